"""Several nodes: two hosts in network namespaces where they can be made, two launches over the loopback, and a meeting
that says what is wrong before a rank starts."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from sft_play.config.load import load_config
from sft_play.errors import ConfigError, HardwareError, SftPlayError
from sft_play.launch import nodes
from sft_play.launch.nodes import card_differences, meet_nodes, node_card
from sft_play.launch.request import choose_interface, parse_launch_options
from sft_play.launch.torchrun import RankInfo
from sft_play.machine.hardware import Hardware
from sft_play.machine.network import NodeSetup
from tests.conftest import ROOT, VARIABLES, clean_environment, write_run
from tests.processes import free_port
from tests.test_distributed import losses, start

pytestmark = pytest.mark.build
MACHINE = Hardware((), "CPU", 2, 2**33, 2**33, cpu_ranks=4, nodes=2)
TWO_HOSTS = """
set -e
folder=$1
unshare --net --uts --mount sleep 900 & a=$!
unshare --net --uts --mount sleep 900 & b=$!
tries=0
for pid in $a $b; do  # until each is in a network of its own
  while [ "$(readlink /proc/$pid/ns/net)" = "$(readlink /proc/$$/ns/net)" ] && [ $tries -lt 50 ]; do
    sleep 0.1; tries=$((tries + 1))
  done
done
ip link add link-a type veth peer name link-b
ip link set link-a netns $a
ip link set link-b netns $b
own() {  # name, its address, the other's name and address, as /etc/hosts of Debian has them
  hostname $1
  ip link set lo up
  ip addr add $2/24 dev link-${1#node-}
  ip link set link-${1#node-} up
  printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n%s %s\\n' $1 $4 $3 > "$folder/hosts-$1"
  mount --bind "$folder/hosts-$1" /etc/hosts
  mount -t tmpfs none "$folder/outputs"
}
for one in "$a node-a 10.99.0.1 node-b 10.99.0.2" "$b node-b 10.99.0.2 node-a 10.99.0.1"; do
  set -- $one
  pid=$1; shift
  nsenter -t $pid --net --uts --mount -- sh -ec "folder='$folder'; $(cat "$folder/own.sh"); own $*"
done
echo ready $a $b
wait
"""
OWN = TWO_HOSTS.partition("own() {")[2].partition("\n}\n")[0]


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_llama, sums) -> Path:
    """A folder with a run YAML of three steps of eight rows: four ranks with two passes each, or one with eight."""
    folder = tmp_path_factory.mktemp("nodes")
    (folder / "outputs").mkdir()
    train = {"batch_size": 1, "max_steps": 3, "learning_rate": 1e-3}
    write_run(folder, tiny_llama, sums, data={"val_fraction": 0}, train=train, eval={"steps": 0})
    return folder


@dataclass(frozen=True)
class Hosts:
    """Two hosts on this machine: names, networks and outputs of their own, an Ethernet cable between them."""

    pids: tuple[int, int]
    addresses: tuple[str, str] = ("10.99.0.1", "10.99.0.2")

    def on(self, node: int, words: Sequence[str]) -> list[str]:
        """The words that run a command on a host, in the folder that it is started in."""
        enter = ["nsenter", "-t", str(self.pids[node]), "--user", "--preserve-credentials", "--net", "--uts", "--mount"]
        return [*enter, "--", "sh", "-c", 'cd "$0" && exec "$@"', str(ROOT), *words]


@pytest.fixture(scope="module")
def hosts(world) -> Iterator[Hosts]:
    """Two hosts in namespaces of their own, which are gone when their processes are."""
    missing = [name for name in ("unshare", "nsenter", "ip", "mount", "hostname") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no network namespaces here: {', '.join(missing)} is not installed")
    (world / "own.sh").write_text(f"own() {{{OWN}\n}}\n")
    script = world / "two_hosts.sh"
    script.write_text(TWO_HOSTS)
    words = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", str(script), str(world)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen(words, text=True, **pipes) as made:
        try:
            assert made.stdout is not None
            first = made.stdout.readline().split()
            if first[:1] != ["ready"]:
                made.kill()
                pytest.skip(f"no network namespaces here: {made.communicate()[1].strip()[-200:]}")
            yield Hosts((int(first[1]), int(first[2])))
        finally:
            kill_session(made)


def kill_session(process: subprocess.Popen[str]) -> None:
    """End a process that was started as the leader of its session, with what is in it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Ended(NamedTuple):
    code: int
    printed: str


def run_together(folder: Path, commands: Sequence[Sequence[str]], environs: Sequence[dict[str, str]]) -> list[Ended]:
    running, logs = [], []
    for number, (words, environ) in enumerate(zip(commands, environs, strict=True)):
        logs.append(folder / f"printed-{number}-{time.monotonic_ns()}")
        with logs[-1].open("w") as sink:
            pipes: dict[str, Any] = {"stdout": sink, "stderr": subprocess.STDOUT, "start_new_session": True}
            running.append(subprocess.Popen(words, cwd=ROOT, env=clean_environment(**environ), text=True, **pipes))
    deadline = time.monotonic() + 240
    try:
        for process in running:
            process.wait(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pytest.fail("\n---\n".join(log.read_text() for log in logs))
    finally:
        for process in running:
            kill_session(process)
    return [Ended(process.returncode, log.read_text()) for process, log in zip(running, logs, strict=True)]


def command(world: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "sft_play", "train-distributed", "--config", f"{world}/run.yaml", *words]


def node(rank: int, address: str, port: int, **more: str) -> dict[str, str]:
    found = {"NNODES": "2", "NODE_RANK": str(rank), "MASTER_ADDR": address, "MASTER_PORT": str(port), "NPROC": "2"}
    return found | {"STRATEGY": "ddp"} | more


def on_two_hosts(world: Path, hosts: Hosts, strategy: str, address: str) -> list[Ended]:
    words = command(world, f"output.name=hosts-{strategy}", "distributed.timeout_s=120")
    environs = [node(rank, address, 29_500, STRATEGY=strategy) for rank in (0, 1)]
    return run_together(world, [hosts.on(rank, words) for rank in (0, 1)], environs)


@pytest.fixture(scope="module")
def alone(world) -> list[float]:
    answer = start(world, "train", "--config", f"{world}/run.yaml", "output.name=alone")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return losses(world / "outputs" / "alone")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "wrapped", "address"),
    [("ddp", "DistributedDataParallel", "10.99.0.1"), ("fsdp", "FSDPPeftModelForCausalLM", "node-a")],
)
def test_two_hosts_with_disks_of_their_own_train_what_one_process_trains(
    world, hosts, alone, strategy, wrapped, address
):
    """Each host's own name means 127.0.1.1 on it, which is what gloo would tell the other one without help."""
    from safetensors.torch import load_file

    from sft_play.training.checkpoints import checkpoints

    first, second = on_two_hosts(world, hosts, strategy, address)
    assert (first.code, second.code) == (0, 0), first.printed + second.printed
    assert "this is node 1, at 10.99.0.2 on link-b" in second.printed
    assert "The nodes have disks of their own" in first.printed
    assert f"Engine: {strategy} proved: the model is a {wrapped} over 4 ranks" in first.printed
    run = world / f"of-node-0-{strategy}"
    subprocess.run(hosts.on(0, ["cp", "-r", f"{world}/outputs/hosts-{strategy}", str(run)]), check=True)
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["layout"], plan["ranks"], plan["micro_batch"], plan["grad_accum"]) == (strategy, 4, 1, 2)
    assert losses(run) == pytest.approx(alone, rel=1e-5)
    (kept,) = checkpoints.complete_checkpoints(run / "checkpoints")
    assert checkpoints.checkpoint_step(kept) == len(alone) == 3
    tensors = load_file(run / "adapter" / "adapter_model.safetensors")
    # lora_A and lora_B of seven projections in two layers
    assert [bool(tensor.numel()) for tensor in tensors.values()] == [True] * 2 * 2 * 7
    found = hosts.on(1, ["find", f"{world}/outputs", "-type", "f"])
    assert subprocess.check_output(found) == b""  # one run folder, on rank 0's node


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed here")
@pytest.mark.slow
def test_zero_without_a_shared_disk_is_refused_before_the_first_step(world, hosts):
    for one in on_two_hosts(world, hosts, "zero2", "10.99.0.1"):
        assert one.code == 2, one.printed
        assert "is not on a disk that all nodes share, and under zero2 every rank writes a part" in one.printed
        assert "step 1/3" not in one.printed


def test_nodes_that_were_told_different_things_all_say_so_and_start_nothing(world):
    port = free_port()
    words = command(world, "output.name=never")
    environs = [node(0, "127.0.0.1", port), node(1, "127.0.0.1", port, NPROC="1")]
    ended = run_together(world, [words, [*words, "train.learning_rate=2e-3"]], environs)
    for one in ended:
        assert (one.code, one.printed.count("error:"), "Traceback" in one.printed) == (2, 1, False), one.printed
        assert "number of ranks is 2 on node 0 and 1 on node 1" in one.printed
        assert "train.learning_rate is 0.001 on node 0 and 0.002 on node 1" in one.printed
    assert not (world / "outputs" / "never").exists()


@pytest.fixture
def card(world) -> dict[str, Any]:
    return node_card(load_config(world / "run.yaml").config, MACHINE, strategy="ddp", uses_deepspeed=False)


def together(*calls: Callable[[], dict[str, str]]) -> list[dict[str, str] | SftPlayError]:
    def answer(function: Callable[[], dict[str, str]]) -> dict[str, str] | SftPlayError:
        try:
            return function()
        except SftPlayError as error:
            return error

    # a refused node waits until node 0 has gone, and here all are one process
    with mock.patch.object(nodes, "_LEAVE_TIMEOUT_S", 1.0), ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(answer, calls, timeout=60))


def test_three_nodes_meet_and_each_has_all_cards(card, caplog):
    caplog.set_level("INFO")
    port = free_port()

    def meet(rank: int) -> dict[str, str]:
        setup, own_card = NodeSetup(3, rank, "127.0.0.1", port), {**card, "host": f"h{rank}"}
        given = {"GLOO_SOCKET_IFNAME": "eth7"} if rank == 1 else {}
        return meet_nodes(setup, own_card, timeout_s=30, environment=given)

    met = together(*(functools.partial(meet, rank) for rank in (2, 0, 1)))
    assert met == [{"GLOO_SOCKET_IFNAME": "lo"}, {"GLOO_SOCKET_IFNAME": "lo"}, {}]
    assert caplog.text.count("(h0, h1, h2)") == 3
    with socket.create_server(("127.0.0.1", port)):
        pass  # torch may listen there now


@pytest.mark.parametrize(("setups", "message"), [
    ([(3, 0), (2, 1)], "NNODES is 3 on node 0 and 2 on node 1"),
    ([(3, 0), (4, 2)], "NNODES is 3 on node 0 and 4 on node 2"),
    ([(3, 0), (3, 1), (3, 1)], "were both given NODE_RANK=1"),
])  # fmt: skip
def test_nodes_that_count_differently_are_told_on_all(card, setups, message):
    port = free_port()
    places = [NodeSetup(*setup, "127.0.0.1", port) for setup in setups]
    for answer in together(*(functools.partial(meet_nodes, one, card, timeout_s=30) for one in places)):
        assert isinstance(answer, ConfigError)
        assert message in str(answer)


def test_a_node_that_never_comes_is_named_when_the_time_is_over(card):
    answers = together(
        lambda: meet_nodes(NodeSetup(3, 0, "127.0.0.1", free_port()), card, timeout_s=1),
        lambda: meet_nodes(NodeSetup(2, 1, "127.0.0.1", free_port()), card, timeout_s=1),
    )
    assert [type(answer) for answer in answers] == [ConfigError, HardwareError]
    assert "nodes 1, 2 of 3 did not connect to 127.0.0.1:" in str(answers[0])
    assert "node 0 did not answer at 127.0.0.1:" in str(answers[1])
    assert "MASTER_ADDR= resolves to this machine itself" in str(answers[1])


def test_a_port_or_an_address_that_is_none_is_said_before_anybody_waits(card):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(HardwareError, match=rf"MASTER_PORT={port} cannot be listened on"):
            meet_nodes(NodeSetup(2, 0, "127.0.0.1", port), card, timeout_s=60)
    with pytest.raises(ConfigError, match=r"NODE_RANK=0 is the machine at MASTER_ADDR=192\.0\.2\.1"):
        # an address of documentation (RFC 5737)
        meet_nodes(NodeSetup(2, 0, "192.0.2.1", free_port()), card, timeout_s=60)
    for rank in (0, 1):
        with pytest.raises(ConfigError, match=r"MASTER_ADDR=nowhere\.invalid does not resolve on this machine"):
            meet_nodes(NodeSetup(2, rank, "nowhere.invalid", free_port()), card, timeout_s=60)


def test_where_files_lie_may_differ_and_what_they_are_trained_with_may_not(world, card):
    def told(*overrides: str, strategy: str = "ddp") -> dict[str, Any]:
        config = load_config(world / "run.yaml", overrides=overrides).config
        return {**node_card(config, MACHINE, strategy=strategy, uses_deepspeed=False), "node": 1}

    first = {**card, "node": 0}
    assert card_differences(first, told("output.dir=/elsewhere", "data.train_path=/x.jsonl")) == []
    assert card_differences(first, told("train.seed=7")) == ["train.seed is 42 on node 0 and 7 on node 1"]
    assert card_differences(first, told(strategy="fsdp")) == ["STRATEGY is ddp on node 0 and fsdp on node 1"]


def test_a_rank_among_several_nodes_is_given_the_interface_to_the_others():
    apart, here = RankInfo(2, 0, 4, 2), RankInfo(1, 1, 2, 2)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    choose_interface(here, environment)
    assert "GLOO_SOCKET_IFNAME" not in environment  # one node: torch's own choice stands
    choose_interface(apart, environment)
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"
    given = {**environment, "GLOO_SOCKET_IFNAME": "ib0"}
    choose_interface(apart, given)
    assert given["GLOO_SOCKET_IFNAME"] == "ib0"
    with pytest.raises(ConfigError, match="--local-addr"):
        choose_interface(apart, {"MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "29500"})


@pytest.mark.parametrize(("variables", "message"), [
    ({"NNODES": "2", "MASTER_ADDR": "x"}, "NNODES=2 needs NODE_RANK=0 to 1"),
    ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": " "}, "needs NODE_RANK=0 to 1 and MASTER_ADDR="),
    ({"NODE_RANK": "1"}, r"NODE_RANK=1 is not one of NNODES=1"),
    ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "h:29500"}, "the port goes into MASTER_PORT="),
    ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "99999"}, "is not a port"),
])  # fmt: skip
def test_variables_of_nodes_that_cannot_be_meant_are_refused(variables, message):
    with pytest.raises(ConfigError, match=message):
        parse_launch_options(variables)


FAKE_SRUN = """#!/bin/bash
# srun of two nodes on one machine: a task for each, signals handed on, the highest exit code.
printf '%s\\n' "$@" > "$FAKE/srun-words"
while [ "${1#-}" != "$1" ]; do shift; done
pids=()
for id in $(seq 0 $((NNODES - 1))); do
  SLURM_NODEID=$id SLURM_PROCID=$id "$@" > "$FAKE/task-$id" 2>&1 &
  pids+=($!)
done
trap 'kill -TERM "${pids[@]}"' TERM
highest=0
for pid in "${pids[@]}"; do
  while :; do
    wait "$pid"; code=$?
    kill -0 "$pid" 2>/dev/null || break
  done
  wait "$pid"; code=$?
  [ "$code" -gt "$highest" ] && highest=$code
done
exit "$highest"
"""
FAKE_SCONTROL = """#!/bin/bash
printf '%s\\n' "$*" >> "$FAKE/scontrol-words"
case "$1 $2" in
  "show hostnames") printf '%s\\n' ${FAKE_HOSTS:-node7 node9} ;;
  "show job") printf 'JobId=%s\\n   Command=%s my.yaml\\n' "$3" "$FAKE_COMMAND" ;;
  requeue*) exit "${FAKE_REQUEUE:-0}" ;;
esac
"""
FAKE_LAUNCH = """#!/bin/bash
trap 'echo saved; exit 130' TERM
env | grep -E '^(NNODES|NODE_RANK|MASTER_ADDR|MASTER_PORT)=' | sort
printf 'word %s\\n' "$@"
echo started
[ -z "${FAKE_WAITS:-}" ] || while :; do sleep 0.1; done
exit "${FAKE_EXIT:-0}"
"""


@pytest.fixture
def slurm(tmp_path) -> Path:
    """A folder with programs that stand for Slurm's, and a project whose launch says what it was given."""
    for name, text in (("bin/srun", FAKE_SRUN), ("bin/scontrol", FAKE_SCONTROL),
                       ("home/scripts/train_distributed.sh", FAKE_LAUNCH)):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "submitted from").mkdir()
    (tmp_path / "submitted from" / "my run.yaml").write_text("model: {name: x}\n")
    return tmp_path


def batch(slurm: Path, *words: str, job: int = 4711, nodes: int = 2, **environ: str) -> subprocess.Popen[str]:
    """The batch script as Slurm starts it: a copy in a folder of Slurm's own."""
    copy = slurm / "slurmd" / "slurm_script"
    copy.parent.mkdir(exist_ok=True)
    shutil.copy(ROOT / "scripts" / "train_slurm.sbatch", copy)
    kept = {name: value for name, value in os.environ.items()
            if name not in VARIABLES and not name.startswith(("SLURM_", "SFT_PLAY_HOME"))}  # fmt: skip
    kept |= {"PATH": f"{slurm}/bin:{os.environ['PATH']}", "FAKE": str(slurm), "SLURM_JOB_ID": str(job),
             "FAKE_COMMAND": f"{slurm}/home/scripts/train_slurm.sbatch", "SLURM_JOB_NODELIST": "node[7,9]",
             "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_SUBMIT_DIR": f"{slurm}/submitted from"}  # fmt: skip
    return subprocess.Popen(
        ["bash", str(copy), *words], cwd=slurm, env={**kept, **environ}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def ended(process: subprocess.Popen[str], limit_s: float = 60) -> Ended:
    try:
        printed, _ = process.communicate(timeout=limit_s)
    finally:
        kill_session(process)
    return Ended(process.returncode, printed)


def test_the_batch_script_tells_each_node_which_it_is(slurm):
    result = ended(batch(slurm, "my run.yaml", "train.epochs=2", "data.train_path=a b.jsonl"))
    assert result.code == 0, result.printed
    for rank in (0, 1):
        variables = ["MASTER_ADDR=node7", "MASTER_PORT=14711", "NNODES=2", f"NODE_RANK={rank}"]
        given = ["--config", f"{slurm}/submitted from/my run.yaml", "output.name=slurm-4711", "output.if_exists=resume",
                 "train.epochs=2", "data.train_path=a b.jsonl"]  # fmt: skip
        wanted = [*variables, *(f"word {word}" for word in given), "started"]
        assert (slurm / f"task-{rank}").read_text().splitlines() == wanted
    words = (slurm / "srun-words").read_text().splitlines()
    assert words[:2] == ["--ntasks=2", "--ntasks-per-node=1"]
    assert ended(batch(slurm, "my run.yaml", FAKE_EXIT="2")).code == 2
    assert "requeue" not in (slurm / "scontrol-words").read_text()  # nor of one that fails


def test_one_node_meets_nobody_and_two_jobs_have_two_ports(slurm):
    result = ended(batch(slurm, "my run.yaml", nodes=1))
    assert result.code == 0, result.printed
    assert (slurm / "task-0").read_text().splitlines()[:2] == ["NNODES=1", "word --config"]
    assert ended(batch(slurm, "my run.yaml", job=4712)).code == 0
    assert "MASTER_PORT=14712" in (slurm / "task-1").read_text()


@pytest.mark.parametrize(("number", "requeue", "words"), [
    (signal.SIGUSR1, "0", "the job is requeued and continues from the last checkpoint"),
    (signal.SIGUSR1, "1", "the job cannot be requeued; resume by hand"), (signal.SIGTERM, "0", None),
])  # fmt: skip
def test_a_signal_saves_on_every_node_and_only_the_time_limit_queues_anew(slurm, number, requeue, words):
    process = batch(slurm, "my run.yaml", FAKE_WAITS="1", FAKE_REQUEUE=requeue)
    deadline = time.monotonic() + 30
    tasks = [slurm / f"task-{rank}" for rank in (0, 1)]
    while not all(task.exists() and "started" in task.read_text() for task in tasks):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    result = ended(process)
    assert result.code == 130, result.printed
    assert all(task.read_text().endswith("saved\n") for task in tasks)
    assert ("requeue 4711" in (slurm / "scontrol-words").read_text()) == (words is not None)
    assert (words or "") in result.printed


@pytest.mark.parametrize(("words", "environ", "message"), [
    ([], {}, "no run YAML is named"), (["nowhere.yaml"], {}, "the run YAML nowhere.yaml does not exist"),
    (["my run.yaml"], {"FAKE_COMMAND": "/nowhere/x.sbatch"}, "the project is not at"),
    (["my run.yaml"], {"SLURM_JOB_ID": ""}, "this is a batch script of Slurm"),
])  # fmt: skip
def test_what_the_batch_script_cannot_do_is_one_message(slurm, words, environ, message):
    result = ended(batch(slurm, *words, **environ))
    assert (result.code, result.printed.count("error:"), message in result.printed) == (2, 1, True), result.printed


@pytest.mark.slow
def test_the_batch_script_trains_over_two_nodes_and_goes_on_with_what_it_began(world, alone, slurm):
    """The real launches behind a srun of two nodes on this machine; the second start is the one of a requeued job."""
    environ = {"FAKE_HOSTS": "localhost localhost", "SFT_PLAY_HOME": str(ROOT), "VENV": sys.prefix, "NPROC": "2",
               "STRATEGY": "ddp", "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())}  # fmt: skip
    first = ended(batch(slurm, f"{world}/run.yaml", "train.stop_after_steps=2", **environ), limit_s=240)
    assert first.code == 0, first.printed + (slurm / "task-0").read_text() + (slurm / "task-1").read_text()
    second = ended(batch(slurm, f"{world}/run.yaml", **environ), limit_s=240)
    printed = (slurm / "task-0").read_text()
    assert second.code == 0, second.printed + printed
    assert "from step 2" in printed
    run = world / "outputs" / "slurm-4711"
    assert losses(run) == pytest.approx(alone, rel=1e-5)
