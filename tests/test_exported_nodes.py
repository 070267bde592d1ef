"""`RANK` and `WORLD_SIZE` that are exported once on each machine number nodes, or count ranks: the nodes that come
tell. And those that a notebook has left: who is waited for, how long, and how to go on without them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from sft_play.config.load import load_config
from sft_play.data.sources.raw import NotUtf8Error
from sft_play.errors import ConfigError, DoesNotFit, HardwareError, SftPlayError
from sft_play.launch import nodes as launch_nodes
from sft_play.launch import rank as launch_rank
from sft_play.launch import request as launch_request
from sft_play.launch.nodes import NodeMeeting, meet_nodes, node_card
from sft_play.launch.rank import LaunchPlan
from sft_play.launch.request import LaunchOptions
from sft_play.launch.torchrun import RENDEZVOUS_VARIABLES
from sft_play.machine.hardware import Hardware, parse_hardware
from sft_play.machine.network import NodeSetup, local_addresses
from sft_play.training import distributed
from tests import warm
from tests.conftest import ROOT, clean_environment
from tests.test_nodes import free_port, together

pytestmark = pytest.mark.build
GIB = 2**30


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_llama, sums) -> Path:
    """A run YAML of two steps of eight rows."""
    folder = tmp_path_factory.mktemp("exported")
    path = folder / "run.yaml"
    path.write_text(
        f"model: {{name: {tiny_llama}, max_seq_len: 64}}\ntuning: {{mode: lora}}\n"
        f"data: {{train_path: {sums}, val_path: null, test_path: null}}\n"
        "train: {effective_batch_size: 8, batch_size: 1, max_steps: 2, report_to: []}\neval: {steps: 0}\n"
        f"output: {{dir: {folder}/outputs}}\n"
    )
    return path


# --- the meeting, in threads ------------------------------------------------------------------------------------------


@pytest.fixture
def call(config) -> Callable[..., Callable[[], NodeMeeting]]:
    """A node with exported RANK and WORLD_SIZE, and so many ranks, that meets the others."""

    def of(rank: int, world: int, processes: int, port: int, *, limit_s: float = 30, after_s: float = 0,
           address: str = "127.0.0.1") -> Callable[[], NodeMeeting]:  # fmt: skip
        machine = Hardware((), "CPU", 2, 8 * GIB, 8 * GIB, cpu_ranks=processes)
        card = node_card(load_config(config).config, machine, strategy="ddp", uses_deepspeed=False)

        def come() -> NodeMeeting:
            time.sleep(after_s)
            return meet_nodes(NodeSetup(world, rank, address, port), card, timeout_s=limit_s, may_count_ranks=True)

        return come

    return of


def counted(answers: Sequence[NodeMeeting | SftPlayError]) -> list[int]:
    """How many nodes each has counted."""
    assert all(isinstance(one, NodeMeeting) for one in answers), answers
    return [len(one.cards) for one in answers if isinstance(one, NodeMeeting)]


@pytest.mark.parametrize(
    ("world", "processes", "ranks"),
    [
        pytest.param(4, 2, (0, 2), id="ranks of two nodes"),
        pytest.param(6, 2, (4, 0, 2), id="ranks of three nodes"),
        pytest.param(2, 2, (0,), id="all ranks on a node that no other machine can reach"),
        pytest.param(4, 2, (0, 1, 2, 3), id="nodes"),
        pytest.param(2, 2, (0, 1), id="as many nodes as ranks on each"),
    ],
)
def test_the_nodes_that_come_tell_what_the_variables_count(call, world, processes, ranks):
    port = free_port()
    answers = together(*(call(rank, world, processes, port) for rank in ranks))
    assert counted(answers) == [len(ranks)] * len(ranks)


def test_a_node_that_contradicts_is_waited_for_and_then_all_of_its_kind(call):
    """RANK=0 and 2 could be all of four ranks; 1 comes before the while is over, and 3 long after."""
    port, limit_s = free_port(), 60.0
    late = {1: 0.3, 3: 3.0}
    calls = [call(rank, 4, 2, port, limit_s=limit_s, after_s=late.get(rank, 0)) for rank in range(4)]
    began = time.monotonic()
    assert counted(together(*calls)) == [4, 4, 4, 4]
    assert time.monotonic() - began > late[3]


def test_a_single_node_that_others_can_reach_waits_for_them(call):
    """It has all ranks of WORLD_SIZE, and is as well the first of as many nodes."""
    address = next(iter(local_addresses()), None)
    if address is None:
        pytest.skip("this machine has no address but the loopback")
    for where in (address, socket.gethostname()):  # which Debian's /etc/hosts has as 127.0.1.1
        (answer,) = together(call(0, 2, 2, free_port(), limit_s=2, address=where))
        assert isinstance(answer, HardwareError)
        assert "node 1 of 2 did not connect" in str(answer)


@pytest.mark.parametrize("ranks", [(0,), (0, 2), (2, 4)])
def test_nodes_that_do_not_come_are_missed_by_all(call, ranks):
    port = free_port()
    for answer in together(*(call(rank, 6, 2, port, limit_s=2) for rank in ranks)):
        assert isinstance(answer, HardwareError)
        assert "did not connect to" in str(answer) or "node 0 did not answer" in str(answer)


def test_a_node_that_contradicts_after_the_count_ends_the_start_of_all(call, config):
    """Two nodes have found that they have all four ranks, and meet again before their ranks start."""
    port = free_port()
    machine = Hardware((), "CPU", 2, 8 * GIB, 8 * GIB, cpu_ranks=4, nodes=2)
    card = node_card(load_config(config).config, machine, strategy="ddp", uses_deepspeed=False)
    answers = together(lambda: meet_nodes(NodeSetup(2, 0, "127.0.0.1", port), card, timeout_s=20), call(1, 4, 2, port))
    for answer in answers:
        assert isinstance(answer, ConfigError)
        assert "node 0 was given NNODES=2, and node 1 NNODES=4" in str(answer)


def test_a_node_that_comes_after_the_ranks_have_begun_is_told_so(call, monkeypatch):
    """torchrun serves a store of its own at the port then."""
    monkeypatch.setattr(launch_nodes, "_LEAVE_TIMEOUT_S", 0.5)
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    began = time.monotonic()
    (answer,) = together(call(2, 4, 2, port, limit_s=600))
    assert isinstance(answer, HardwareError)
    assert "the ranks of a run that began without this node" in str(answer)
    assert time.monotonic() - began < 30
    del store


@pytest.mark.parametrize(
    ("machine", "world", "ranks", "nodes"),
    [("4xH100", 8, (0, 4), 2), ("8xH100", 32, (0, 8, 16, 24), 4), ("1xH100", 2, (0, 1), 2), ("3xH100", 4, (0, 1), 4)],
)
def test_the_gpus_of_a_node_are_its_ranks(config, monkeypatch, machine, world, ranks, nodes):
    """Two machines with four GPUs export RANK=0 and RANK=4. One GPU, or three of four ranks, leave one reading."""
    monkeypatch.setattr(launch_request, "detect_hardware", lambda: parse_hardware(machine))
    settings = load_config(config, overrides=["distributed.timeout_s=30"]).config
    port = free_port()

    def count(rank: int) -> Callable[[], Any]:
        exported = NodeSetup(world, rank, "127.0.0.1", port, "RANK and WORLD_SIZE are there")
        return lambda: launch_request.resolve_exported_nodes(LaunchOptions(nodes=exported), settings).nodes

    each = parse_hardware(machine).ranks if nodes < world else 1
    for rank, answer in zip(ranks, together(*(count(rank) for rank in ranks)), strict=True):
        assert answer == NodeSetup(nodes, rank // each, "127.0.0.1", port)
        assert bool(answer.exported_note)


# --- launches ---------------------------------------------------------------------------------------------------------


@dataclass
class Ended:
    """How a command ended."""

    code: int
    printed: str


def launch(
    config: Path, name: str, *ranks: int, world: int, later_s: dict[int, float] | None = None, python: str = "",
    words: Sequence[str] = ("distributed.timeout_s=60",), **environ: str
) -> list[Ended]:  # fmt: skip
    """`MASTER_ADDR=… MASTER_PORT=… RANK=… WORLD_SIZE=… make train-distributed` on each node, two ranks on each."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world), "NPROC": "2"}
    shared |= {"STRATEGY": "ddp", "DS_ACCELERATOR": "cpu", **environ}
    command = [python or warm.python(), "-m", "sft_play", "train-distributed", "--config", str(config)]
    running: dict[int, subprocess.Popen[str]] = {}

    def start(rank: int) -> None:
        time.sleep((later_s or {}).get(rank, 0))
        running[rank] = subprocess.Popen(
            [*command, f"output.name={name}", *words], cwd=ROOT, env=clean_environment(**shared, RANK=str(rank)),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    starts = [threading.Thread(target=start, args=(rank,)) for rank in ranks]
    for one in starts:
        one.start()
    for one in starts:
        one.join()
    printed = {rank: running[rank].communicate(timeout=280)[0] for rank in ranks}
    return [Ended(running[rank].returncode, printed[rank]) for rank in ranks]


def assert_trained(config: Path, name: str, ended: Sequence[Ended], *, nodes: int, ranks: int) -> None:
    """One run of all ranks on all nodes."""
    said = "\n---\n".join(one.printed for one in ended)
    assert [one.code for one in ended] == [0] * len(ended), said
    run = config.parent / "outputs" / name
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["ranks"], plan["hardware"]["nodes"]) == (ranks, nodes)
    assert len([line for line in (run / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]) == 2
    assert said.count(f"ddp proved: the model is a DistributedDataParallel over {ranks} ranks") == 1, said


def test_two_machines_train_by_the_variables_that_guides_export(config):
    """RANK=0 and RANK=2 of WORLD_SIZE=4, two ranks on each."""
    ended = launch(config, "ranks", 0, 2, world=4)
    assert_trained(config, "ranks", ended, nodes=2, ranks=4)
    for one in ended:
        assert "count ranks, 4 in all and 2 on each node: those that come tell" in one.printed
    assert "this is node 1, at 127.0.0.1" in ended[1].printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "world", "later_s"),
    [
        ("as-many", (0, 1), 2, {}),
        ("contradicted", (0, 1, 2, 3), 4, {1: 2.0, 3: 6.0}),
    ],
)
def test_machines_that_are_numbered_train_as_nodes(config, name, ranks, world, later_s):
    """WORLD_SIZE counts nodes, as Kubernetes' PyTorchJob has it; two of the four could be all, and others come late."""
    ended = launch(config, name, *ranks, world=world, later_s=later_s, words=["distributed.timeout_s=240"])
    assert_trained(config, name, ended, nodes=world, ranks=2 * world)


@pytest.mark.slow
def test_a_late_machine_is_waited_for(config):
    ended = launch(config, "late", 0, 2, world=4, later_s={2: 12.0})
    assert_trained(config, "late", ended, nodes=2, ranks=4)


@pytest.mark.slow
def test_machines_that_do_not_come_are_one_message_that_names_both_readings(config):
    for ranks in ((0,), (2,)):
        (ended,) = launch(config, "missing", *ranks, world=4, words=["distributed.timeout_s=5"])
        assert ended.code == 2, ended.printed
        assert ended.printed.count("error:") == 1, ended.printed
        line = ended.printed[ended.printed.index("error:") :]
        assert f"RANK={ranks[0]} and WORLD_SIZE=4 in the environment, without LOCAL_RANK: this is node" in line
        assert "count ranks, 4 in all and 2 on each node" in line
    assert not (config.parent / "outputs" / "missing").exists()


@pytest.mark.slow
def test_a_machine_that_comes_when_the_ranks_have_begun_is_told_how_the_others_were_counted(config):
    words = ["distributed.timeout_s=30", "train.max_steps=60"]
    ended = launch(config, "begun", 0, 2, 1, world=4, later_s={1: 20.0}, words=words)
    assert [one.code for one in ended] == [0, 0, 2], "\n".join(one.printed for one in ended)
    line = ended[2].printed[ended[2].printed.index("error:") :]
    assert "RANK=1 and WORLD_SIZE=4 in the environment" in line
    assert "count ranks, 4 in all and 2 on each node" in line
    assert any(words in line for words in ("began without this node", "node 0 did not answer", "lost each other"))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "reading"), [((0, 2), "count ranks, 4 in all"), ((0, 1), "this is node")])
def test_what_goes_wrong_later_names_how_the_variables_were_read(config, ranks, reading):
    """A batch that does not divide over the ranks there are."""
    world = 4 if ranks == (0, 2) else 2
    words = ["distributed.timeout_s=60", "train.effective_batch_size=7"]
    for ended in launch(config, "undivided", *ranks, world=world, words=words):
        assert ended.code == 2, ended.printed
        line = ended.printed[ended.printed.index("error:") :]
        assert "does not split over" in line
        assert reading in line


def test_what_would_be_started_is_shown_without_waiting_for_anybody(config, command, monkeypatch):
    for name, text in {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "192.0.2.1", "NPROC": "2"}.items():
        monkeypatch.setenv(name, text)
    code, printed = command("launch-command", "--config", str(config))
    assert code == 0, printed
    assert "--nnodes 4 --node-rank 2" in printed
    assert "RANK=2 and WORLD_SIZE=4 in the environment, without LOCAL_RANK: this is node 2 of 4 nodes" in printed
    assert "or RANK and WORLD_SIZE in the environment count ranks, 4 in all and 2 on each node: NNODES=2" in printed


# --- variables that were left -----------------------------------------------------------------------------------------


LEFT = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


def until_said(process: subprocess.Popen[str], pattern: str, *, within_s: float = 60) -> str:
    """What a process prints until a line has the pattern; the match."""
    assert process.stdout is not None
    timer = threading.Timer(within_s, process.kill)
    timer.start()
    said = ""
    for line in process.stdout:
        said += line
        if found := re.search(pattern, line):
            timer.cancel()
            return found[0]
    pytest.fail(said)


@pytest.mark.parametrize("left", [LEFT, {**LEFT, "RANK": "1"}], ids=["rank 0", "rank 1"])
def test_leftover_variables_are_said_with_the_command_that_leaves_them_out(config, left, tmp_path):
    port = str(free_port())
    words = ["make", f"VENV={warm.environment_folder()}", "train", f"CONFIG={config}"]
    words.append("SET=train.max_steps=1 output.dir=" + str(tmp_path))
    environ = clean_environment(**left, MASTER_PORT=port)
    other = "rank 1" if left["RANK"] == "0" else "rank 0"
    with subprocess.Popen(
        words,
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        line = until_said(process, rf"it waits at 127\.0\.0\.1:{port} for {other}, 600 s at most.*")
        os.killpg(process.pid, signal.SIGINT)  # Ctrl-C, while torch waits
    assert process.returncode != 0
    assert not list(tmp_path.iterdir())
    alone = line.partition("alone: ")[2]
    assert alone.startswith("env -u RANK -u WORLD_SIZE -u LOCAL_RANK -u MASTER_ADDR -u MASTER_PORT make train CONFIG=")
    # the printed command, in the environment that has the variables
    answer = subprocess.run(
        ["sh", "-c", alone], cwd=ROOT, env={**environ, "VENV": str(warm.environment_folder())}, capture_output=True,
        text=True, timeout=200,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (run,) = tmp_path.iterdir()
    assert json.loads((run / "plan.json").read_text())["ranks"] == 1


def test_leftover_variables_of_a_node_come_with_the_command_that_leaves_them_out(config, tmp_path):
    environ = clean_environment(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    words = [warm.python(), "-m", "sft_play", "train", "--config", str(config), f"output.dir={tmp_path}"]
    with subprocess.Popen(
        words, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        alone = until_said(process, "env -u RANK .*")
        until_said(process, r"Nodes: node 1 looks for node 0 at 127\.0\.0\.1:\d+, 1800 s at most")
        process.terminate()
    assert process.returncode == 130
    answer = subprocess.run(["sh", "-c", alone], cwd=ROOT, env={**environ, "VENV": str(warm.environment_folder())},
                            capture_output=True, text=True, timeout=200)  # fmt: skip
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.parametrize(
    "left",
    [
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "9994"},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "9994"},
        {"LOCAL_RANK": "0", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "9994"},
    ],
    ids=["no address", "of one rank", "of one node", "a local rank alone"],
)
def test_leftovers_of_one_process_wait_for_nobody(config, left, tmp_path, command, monkeypatch):
    for name, text in left.items():
        monkeypatch.setenv(name, text)
    code, printed = command("train", "--config", str(config), "train.max_steps=1", f"output.dir={tmp_path}")
    assert code == 0, printed
    assert not set(RENDEZVOUS_VARIABLES) & set(os.environ)
    assert not dist.is_initialized()


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_come_are_one_message(monkeypatch, rank):
    monkeypatch.setattr(distributed, "RENDEZVOUS_TIMEOUT_S", 1.0)
    left = {**LEFT, "RANK": str(rank), "MASTER_PORT": str(free_port())}
    for name, text in left.items():
        monkeypatch.setenv(name, text)
    said = rf"rank {rank} waited 1 s at 127.0.0.1:\d+ for the other ranks .*leave RANK"
    with pytest.raises(HardwareError, match=said):
        distributed.publish_gpu("", rank)


def test_a_launch_that_starts_one_process_because_of_leftovers_says_so(config, tmp_path, command, monkeypatch):
    for name, text in {**LEFT, "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, text)
    words = ["--config", str(config), "train.max_steps=1", f"output.dir={tmp_path}"]
    code, printed = command("train-distributed", *words)
    assert code == 0, printed
    assert "no others are started; without them: env -u RANK -u WORLD_SIZE -u LOCAL_RANK -u MASTER_ADDR make" in printed


# --- what rank 0 decides ----------------------------------------------------------------------------------------------


SERVES = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def ranks_store(monkeypatch) -> None:
    """Two ranks, as threads, that meet in one store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(
        distributed, "open_store", lambda name: dist.PrefixStore(name, dist.TCPStore("127.0.0.1", store.port))
    )
    monkeypatch.setenv("WORLD_SIZE", "2")


def test_a_rank_that_waits_for_the_plan_hears_a_stop(ranks_store):
    """A wait of torch's store would hear it when it is over."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    late = threading.Timer(10, distributed.broadcast_text, ["the plan"])
    late.start()
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            distributed.broadcast_text(None)
    finally:
        signal.signal(signal.SIGALRM, before)
        late.cancel()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("error", [ConfigError("no such key"), DoesNotFit("9 of 8 GiB"), NotUtf8Error("byte 7")])
def test_what_rank_0_refuses_reaches_the_others_before_it_ends(ranks_store, error):
    began, left = time.monotonic(), []

    def leave() -> None:
        distributed.broadcast_text(launch_rank.refusal_to_json(error))
        left.append(time.monotonic() - began)

    first = threading.Thread(target=leave)
    first.start()
    time.sleep(1)
    assert not left
    with pytest.raises(SftPlayError, match=str(error)) as raised:
        LaunchPlan.from_json(distributed.broadcast_text(None))
    assert raised.value.exit_code == error.exit_code
    first.join(5)
    assert left


def test_a_rank_0_that_is_gone_is_named(monkeypatch):
    """Without a launcher it serves the store."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as first:
        assert first.stdout is not None
        store = dist.TCPStore("127.0.0.1", int(first.stdout.readline()))
        monkeypatch.setattr(distributed, "open_store", lambda name: dist.PrefixStore(name, store))
        monkeypatch.setenv("WORLD_SIZE", "2")
        threading.Timer(1, first.kill).start()
        with pytest.raises(HardwareError, match="rank 0 ended before it had planned"):
            distributed.broadcast_text(None)


def test_ranks_of_no_launcher_are_all_told_why_rank_0_refuses(config, tmp_path):
    """Rank 0 serves their store, and names the run folder, which is there."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a file").touch()
    shared = {**LEFT, "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": "2"}
    words = [warm.python(), "-m", "sft_play", "train", "--config", str(config), f"output.dir={tmp_path}"]
    running = [
        subprocess.Popen([*words, "output.name=there"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         env=clean_environment(**{**shared, "RANK": rank, "LOCAL_RANK": rank}), text=True)
        for rank in "01"
    ]  # fmt: skip
    for process in running:
        printed, _ = process.communicate(timeout=100)
        assert process.returncode == 2, printed
        assert f"error: the run folder {tmp_path}/there exists" in printed


@pytest.mark.slow
def test_an_error_of_rank_0_ends_all_machines_at_once_and_names_the_reading(config):
    (config.parent / "outputs" / "taken").mkdir(parents=True)
    began = time.monotonic()
    words = ["distributed.timeout_s=240"]
    for ended in launch(config, "taken", 0, 2, world=4, words=words, python=sys.executable):
        assert ended.code == 2, ended.printed
        assert ended.printed.count("error:") == 1
        after = ended.printed[ended.printed.index("error:") :]
        assert "/taken exists" in after
        assert "count ranks, 4 in all and 2 on each node" in after
    assert time.monotonic() - began < 120
