"""Launches as people type them elsewhere: variables that schedulers export, accelerate's own file, other launchers.

The recipes are run on CPU ranks with the text that people type; what decides is tried on random environments."""

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config import config_args
from hypothesis import given, settings
from hypothesis import strategies as st

from sft_play.commands import launch_requests
from sft_play.commands.request import read_request
from sft_play.errors import ConfigError
from sft_play.launch import accelerate, torchrun
from sft_play.launch import run_hardware as of_ranks
from sft_play.launch.request import LaunchOptions, fill_from_accelerate, parse_launch_options
from sft_play.machine.hardware import parse_hardware
from sft_play.machine.network import NodeSetup
from tests import warm
from tests.conftest import ROOT, clean_environment
from tests.models import uneven_run
from tests.processes import free_port
from tests.test_train import losses

BIN = Path(sys.executable).parent
build = pytest.mark.build
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed here")
QUICK = settings(max_examples=150, deadline=None)
DDP = "ddp proved: the model is a DistributedDataParallel over 2 ranks"
BY_ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "no"}


@QUICK
@given(rank=st.integers(0, 5), more=st.integers(1, 5), local=st.one_of(st.none(), st.integers(0, 5)))
def test_rank_and_world_size_name_a_node_unless_a_local_rank_is_known(rank, more, local):
    environment = {"RANK": str(rank), "WORLD_SIZE": str(rank + more), "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    if local is not None:
        environment["LOCAL_RANK"] = str(min(local, rank))
        assert torchrun.node_variables(environment) == ({}, ())
        assert torchrun.rank_variables(environment)
        return
    assert torchrun.read_rank_info(environment) is None
    found, lines = torchrun.node_variables(environment)
    assert (found["NODE_RANK"], found["NNODES"], len(lines)) == (str(rank), str(rank + more), rank + more > 1)
    assert found.keys() == {"NODE_RANK", "NNODES", "EXPORTED"}
    for command in ("train", "train-distributed", "train-deepspeed", "launch-command", "resume"):
        options = read_request([command, "--config", "x.yaml"], environment).options
        several = NodeSetup(rank + more, rank, "10.0.0.1", 1234)
        are_several = rank + more > 1
        assert (options.nodes, bool(options.notes)) == (several if are_several else NodeSetup(), are_several)


@pytest.mark.parametrize(
    ("environment", "nodes", "processes"),
    [
        ({"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "5", "RANK": "1",
          "WORLD_SIZE": "16", "PET_NPROC_PER_NODE": "8"}, NodeSetup(2, 1, "a", 5), 8),
        ({"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "NPROC_PER_NODE": "4"}, NodeSetup(2, 1, "a", 29_500), 4),
        ({"NNODES": "1", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, NodeSetup(), None),
        ({"MASTER_ADDR": "a", "PET_NPROC_PER_NODE": "gpu"}, NodeSetup(1, 0, "a", None), None),
        ({"NPROC_PER_NODE": "4", "NPROC": "2"}, NodeSetup(), 2),
    ],
)  # fmt: skip
def test_what_schedulers_export_is_read_and_what_is_typed_wins(environment, nodes, processes):
    options = read_request(["train-distributed", "--config", "x.yaml"], environment).options
    assert (options.nodes, options.processes_per_node) == (nodes, processes)


@pytest.mark.parametrize(("environment", "message"), [
    ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, r"NODE_RANK=2 is not one of NNODES=2.*\(RANK=2 and"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "needs NODE_RANK=0 to 1 and MASTER_ADDR="),
    ({"RANK": "0", "WORLD_SIZE": "x", "MASTER_ADDR": "a"}, "NNODES=x is not a whole number"),
    ({"PET_NNODES": "1:4", "MASTER_ADDR": "a"}, "PET_NNODES=1:4 is a range"),
])  # fmt: skip
def test_what_schedulers_export_and_cannot_be_meant_is_one_message(environment, message):
    for command in ("train-distributed", "train"):
        with pytest.raises(ConfigError, match=message):
            read_request([command, "--config", "x.yaml"], environment)


def test_tasks_of_slurm_that_would_each_be_a_run_are_refused():
    slurm = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    for environment in (slurm, {"OMPI_COMM_WORLD_SIZE": "4"}, {"MPI_LOCALNRANKS": "4"}):
        with pytest.raises(ConfigError, match="this command was started 4 times"):
            torchrun.refuse_repeated_starts(environment, node_count=1)
    torchrun.refuse_repeated_starts(slurm, node_count=2)
    for changes in ({"SLURM_STEP_NUM_TASKS": "1"}, {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}):
        torchrun.refuse_repeated_starts(slurm | changes, node_count=1)
    torchrun.refuse_repeated_starts({"SLURM_PROCID": "0"}, node_count=1)


def test_an_address_of_another_machine_without_a_number_of_nodes_stops_and_of_this_one_is_said(monkeypatch, caplog):
    for nodes in (NodeSetup(), NodeSetup(1, 0, "127.0.0.1", None), NodeSetup(2, 1, "192.0.2.1", 5)):
        torchrun.refuse_lone_node(nodes)
    for address in ("192.0.2.1", "no-such-host.invalid"):
        with pytest.raises(ConfigError, match=r"is another machine.*give NNODES=2 NODE_RANK=1 .* or NNODES=1 for"):
            torchrun.refuse_lone_node(NodeSetup(1, 0, address, None))
    monkeypatch.setattr(torchrun, "can_bind", lambda address: address == "192.0.2.7")
    with caplog.at_level("INFO"):
        torchrun.refuse_lone_node(NodeSetup(1, 0, "192.0.2.7", None))
    assert "MASTER_ADDR=192.0.2.7 is this machine: the run is on it alone" in caplog.text


def accelerate_file(path: Path, kind: str = "MULTI_GPU", **changes: object) -> Path:
    """A file as `accelerate config` writes it; None leaves a key out."""
    answers: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": kind, "downcast_bf16": "no",
        "machine_rank": 0, "main_training_function": "main", "mixed_precision": "no", "num_machines": 1,
        "num_processes": 2, "rdzv_backend": "static", "same_network": True, "use_cpu": False,
    }  # fmt: skip
    answers = {key: value for key, value in (answers | changes).items() if value is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(answers))
    return path


@pytest.mark.parametrize("variable", ["HF_HOME", "XDG_CACHE_HOME", "HOME"])
def test_accelerates_own_place_is_where_accelerate_says(tmp_path, variable, monkeypatch):
    """`default_yaml_config_file` of accelerate, which reads the variables as it is imported."""
    with monkeypatch.context() as patch:
        for name in ("HF_HOME", "XDG_CACHE_HOME"):
            patch.delenv(name, raising=False)
        patch.setenv(variable, str(tmp_path))
        theirs = importlib.reload(config_args).default_yaml_config_file
        assert str(accelerate.default_accelerate_path(os.environ)) == theirs
        assert theirs.startswith(str(tmp_path))
    importlib.reload(config_args)


def test_the_named_file_wins_then_the_projects_then_accelerates_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environment = {"HF_HOME": str(tmp_path / "home")}
    assert accelerate.find_accelerate_file(environment) is None
    own = accelerate_file(accelerate.default_accelerate_path(environment), num_machines=2, main_process_ip="10.0.0.1")
    assert accelerate.find_accelerate_file(environment) == own
    project = accelerate_file(tmp_path / "configs" / "accelerate" / "default_config.yaml")
    assert accelerate.find_accelerate_file(environment) == project.relative_to(tmp_path)
    assert accelerate.find_accelerate_file({**environment, "ACCELERATE_CONFIG": "none"}) is None
    assert accelerate.find_accelerate_file({**environment, "ACCELERATE_CONFIG": "mine.yaml"}) == Path("mine.yaml")


@QUICK
@given(machines=st.integers(1, 4), rank=st.integers(0, 3), each=st.integers(1, 8), address=st.booleans())
def test_accelerates_file_for_several_machines_is_a_launch_over_them(tmp_path_factory, machines, rank, each, address):
    path = tmp_path_factory.mktemp("accelerate") / "file.yaml"
    accelerate_file(path, num_machines=machines, machine_rank=min(rank, machines - 1), num_processes=machines * each,
                    main_process_ip="10.0.0.1" if address else None, main_process_port=1234)  # fmt: skip
    config = accelerate.read_accelerate_file(path)
    if machines > 1 and not address:
        with pytest.raises(ConfigError, match="needs main_process_ip"):
            fill_from_accelerate(LaunchOptions(), config)
        return
    options = fill_from_accelerate(LaunchOptions(), config)
    several = NodeSetup(machines, min(rank, machines - 1), "10.0.0.1", 1234)
    assert (options.nodes, options.processes_per_node) == (several if machines > 1 else NodeSetup(), each)
    typed = fill_from_accelerate(parse_launch_options({"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "5"}), config)
    assert (typed.nodes.address, typed.nodes.port) == ("10.0.0.9", 5)


def test_a_broken_file_of_accelerate_does_not_stop_one_process(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert not launch_requests.accelerate_has_several_machines()
    own = accelerate_file(accelerate.default_accelerate_path(os.environ), num_machines=2, main_process_ip="10.0.0.1")
    assert launch_requests.accelerate_has_several_machines()
    own.write_text("distributed_type: TPU\n")
    assert not launch_requests.accelerate_has_several_machines()
    assert "not needed for one process" in caplog.text


def test_accelerate_that_starts_one_process_instead_of_several_is_noticed():
    environment = {**BY_ACCELERATE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    for fine in (BY_ACCELERATE, {"MASTER_ADDR": "127.0.0.1"}, environment | rank):
        accelerate.refuse_too_few_processes(fine)
    with pytest.raises(ConfigError, match=r"several processes .* and started 1"):
        accelerate.refuse_too_few_processes(environment)


@pytest.mark.parametrize(
    ("told", "strategy", "engine"),
    [
        ({}, None, False),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_VERSION": "1"}, "fsdp", False),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_SHARDING_STRATEGY": "NO_SHARD"}, "ddp", False),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, "zero3", True),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
          "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, "zero2_offload", True),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"}, None, True),
    ],
)  # fmt: skip
def test_what_accelerate_tells_its_ranks_is_the_layout_and_is_acted_on_once(told, strategy, engine):
    environment = {**BY_ACCELERATE, **told, "HF_HOME": "here", "ACCELERATE_CONFIG": "f.yaml"}
    choices = accelerate.accelerate_launch_config(environment)
    assert choices is not None
    options = fill_from_accelerate(LaunchOptions(), choices)
    assert (options.strategy, options.deepspeed is not None) == (strategy, engine)
    if "ds.json" in told.values():
        assert options.deepspeed.file == Path("ds.json")
    assert fill_from_accelerate(LaunchOptions(strategy="zero1"), choices).strategy == "zero1"
    accelerate.remove_accelerate_variables(environment)
    assert environment == {"HF_HOME": "here", "ACCELERATE_CONFIG": "f.yaml"}
    assert accelerate.accelerate_launch_config(environment) is None


COUNTS = st.integers(1, 8)


@QUICK
@given(there=COUNTS, used=COUNTS, nodes=st.integers(1, 3), file=st.booleans(), named_ones=st.booleans())
def test_idle_gpus_are_counted_and_the_number_that_uses_all_is_said(there, used, nodes, file, named_ones):
    used = min(used, there)
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_ranks, "detect_hardware", lambda: parse_hardware(f"{there}xH100"))
        patch.setattr(of_ranks.logger, "warning", lambda text, *values: said.append(text % values))
        hardware = of_ranks.spread_hardware(parse_hardware(f"{used}xH100"), used * nodes, nodes)
        of_ranks.warn_idle_gpus(hardware, range(used) if named_ones else (), Path("acc.yaml") if file else None)
    if used == there or named_ones:
        assert said == []
        return
    (line,) = said
    assert re.match(rf"{there - used} of this node's {there} GPUs stay[^$]*NPROC={there}\b", line)
    assert (f"num_processes: {there * nodes} in acc.yaml" in line) == file


@pytest.mark.parametrize(("machine", "nodes"), [("4x8xH100", 4), ("2x8xH100", 2), ("8xH100", 1)])
def test_a_plan_ends_with_the_command_of_each_node(succeed, machine, nodes, tmp_path, monkeypatch):
    said = succeed("plan", "--config", "configs/run_lora.yaml", "--hardware", machine, "train.epochs=3")
    lines = said.strip().splitlines()
    if nodes == 1:
        assert "Launch: make train-distributed" in lines[-1]
        return
    asked = f"NNODES={nodes} NODE_RANK=0 MASTER_ADDR=NODE0 MASTER_PORT=29500"
    assert re.search(f"on node 0: make train-distributed CONFIG=configs/run_lora.yaml .*{asked}", lines[-2])
    assert lines[-1].endswith(f"on the others: the same with NODE_RANK=1{' to 3' if nodes == 4 else ''}")
    job = re.search(r"\(under Slurm: make launch-file (.*)\):", said)
    assert job is not None
    for word in shlex.split(job[1]):
        monkeypatch.setenv(*word.split("=", 1))
    succeed("launch-file", "--out", str(tmp_path / "x.sbatch"))
    layout = re.search(r"STRATEGY=(\w+)", job[1])
    parts = (f"--nodes={nodes}\n", "--gpus-per-node=8\n", f"--strategy {layout and layout[1]}", " train.epochs=3 ")
    assert [part in (tmp_path / "x.sbatch").read_text() for part in parts] == [True] * 4


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_llama) -> Path:
    folder = tmp_path_factory.mktemp("ways_in")
    uneven_run(folder, tiny_llama)
    return folder


@pytest.fixture(scope="module")
def alone(world) -> list[float]:
    (ended,) = together(world, [run_words(world, "alone")])
    assert ended.returncode == 0, ended.stdout
    return losses(world / "outputs" / "alone")


def run_words(world: Path, name: str, program: Sequence[str] = ("scripts/train.py",)) -> list[str]:
    return [warm.python(), *program, "--config", f"{world}/run.yaml", "tuning.mode=lora", f"output.name={name}"]


def together(
    world: Path, commands: Sequence[Sequence[str]], environs: Sequence[dict[str, str]] = ({},)
) -> list[subprocess.CompletedProcess[str]]:
    """Start commands at the same time, as from the project's folder, and wait for all; what each printed."""
    kept = clean_environment(DS_ACCELERATOR="cpu")
    kept["PATH"] = f"{BIN}{os.pathsep}{kept.get('PATH', '')}"
    running = [
        subprocess.Popen(list(words), cwd=ROOT, env={**kept, **environ}, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True, start_new_session=True)
        for words, environ in zip(commands, environs, strict=True)
    ]  # fmt: skip
    ended = []
    for process, words in zip(running, commands, strict=True):
        try:
            said, _ = process.communicate(timeout=280)
        finally:
            process.kill()
        ended.append(subprocess.CompletedProcess(list(words), process.returncode, said))
    return ended


def program(name: str) -> str:
    return shutil.which(name, path=str(BIN)) or pytest.skip(f"{name} is not beside this Python")


def assert_trained(world: Path, name: str, alone: list[float], ended: Sequence[subprocess.CompletedProcess[str]],
                   proved: str) -> None:  # fmt: skip
    """One run over all ranks, which lost what one process loses."""
    said = "\n---\n".join(one.stdout for one in ended)
    assert ({one.returncode for one in ended}, said.count(f"Engine: {proved}")) == ({0}, 1), said
    assert losses(world / "outputs" / name) == pytest.approx(alone, rel=1e-5)
    assert [path.name for path in (world / "outputs").iterdir() if path.name.startswith(name)] == [name]


@build
def test_accelerates_own_file_makes_two_nodes_of_make_train_distributed(world, alone, tmp_path):
    """`accelerate config` on both machines, then `make train-distributed`: its file is read without being named."""
    at = {"num_machines": 2, "main_process_ip": "127.0.0.1", "main_process_port": free_port()}
    environs = [{"HF_HOME": str(tmp_path / f"home-{rank}")} for rank in (0, 1)]
    for rank, environ in enumerate(environs):
        accelerate_file(accelerate.default_accelerate_path(environ), machine_rank=rank, **at)
    words = ["make", f"VENV={warm.environment_folder()}", "train-distributed", f"CONFIG={world}/run.yaml"]
    words.append("SET=tuning.mode=lora output.name=own-file")
    ended = together(world, [words, words], environs)
    assert_trained(world, "own-file", alone, ended, DDP)
    assert "accelerate's own file" in ended[0].stdout


@build
def test_accelerate_launch_runs_the_layout_of_its_file(world, alone, tmp_path):
    fsdp = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_reshard_after_forward": True,
            "fsdp_offload_params": False, "fsdp_state_dict_type": "SHARDED_STATE_DICT"}  # fmt: skip
    file = accelerate_file(tmp_path / "fsdp.yaml", "FSDP", fsdp_config=fsdp, main_process_port=free_port())
    launcher = [program("accelerate"), "launch", "--config_file", str(file), "scripts/train.py"]
    ended = together(world, [run_words(world, "by-accelerate", launcher)])
    assert_trained(world, "by-accelerate", alone, ended, "fsdp proved: the model is a FSDP")


def test_ranks_without_a_meeting_place_are_on_one_machine():
    for environment, port in (({"MASTER_PORT": "5"}, {}), ({}, {"MASTER_PORT": "29500"})):
        with pytest.raises(ConfigError, match=r"MASTER_ADDR.* not in the environment: ranks on 2 nodes"):
            torchrun.rendezvous_variables(environment, node_count=2)
        found = torchrun.rendezvous_variables(environment, node_count=1)
        assert found == {"MASTER_ADDR": "127.0.0.1"} | port
        assert torchrun.rendezvous_variables({**environment, **found}, node_count=2) == {}


@build
@needs_deepspeed
def test_deepspeeds_launcher_starts_the_ranks_of_a_script(world, alone):
    launcher = [program("deepspeed"), "--num_gpus=2", f"--master_port={free_port()}", "scripts/train.py"]
    ended = together(world, [run_words(world, "by-deepspeed", launcher)])
    assert_trained(world, "by-deepspeed", alone, ended, DDP)


@build
def test_a_script_that_launches_is_a_rank_under_another_launcher(world, alone):
    """`torchrun --nproc-per-node 2 scripts/train_distributed.py`: two ranks, not two launches of two."""
    launcher = [program("torchrun"), "--standalone", "--nproc-per-node", "2", "scripts/train_distributed.py"]
    ended = together(world, [[*run_words(world, "nested", launcher), "--strategy", "ddp"]])
    assert_trained(world, "nested", alone, ended, DDP)


def test_a_number_of_processes_that_the_launcher_did_not_start_is_refused(monkeypatch):
    for name, text in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, text)
    request = read_request(["train-distributed", "--config", "x.yaml", "--nproc", "2"], os.environ)
    with pytest.raises(ConfigError, match=r"NPROC=2 asks for 2 processes on this node, and the launcher started 1"):
        launch_requests.launcher_rank_info(request)


def test_a_ranks_settings_are_its_words_alone():
    environment = {"SET": "train.save_steps=2 model.max_seq_len=64"}
    alone = read_request(["train", "--config", "x.yaml"], environment).overrides
    assert alone == ("train.save_steps=2", "model.max_seq_len=64")
    assert read_request(["rank", "--config", "x.yaml", *alone], environment).overrides == alone
    assert read_request(["rank", "--config", "x.yaml"], environment).overrides == ()
