"""`RANK` and `WORLD_SIZE` that are exported once on each machine count ranks, or number nodes. And those that a
notebook has left: who is waited for, how long, and how to go on without them."""

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from sft_play.config.load import load_config
from sft_play.data.sources.raw import NotUtf8Error
from sft_play.errors import ConfigError, DoesNotFit, HardwareError, SftPlayError
from sft_play.launch import nodes as launch_nodes
from sft_play.launch import request as launch_request
from sft_play.launch.nodes import meet_nodes, node_card
from sft_play.launch.request import LaunchOptions, LaunchPlan
from sft_play.launch.torchrun import RENDEZVOUS_VARIABLES
from sft_play.machine.hardware import Hardware, parse_hardware
from sft_play.machine.network import NodeSetup
from sft_play.training import distributed
from tests import warm
from tests.conftest import ROOT, clean_environment, write_run
from tests.processes import free_port
from tests.test_nodes import together

pytestmark = pytest.mark.build
GIB = 2**30


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_llama, sums) -> Path:
    train = {"batch_size": 1}
    return write_run(tmp_path_factory.mktemp("exported"), tiny_llama, sums, train=train, eval={"steps": 0})


# --- how exported variables are read ----------------------------------------------------------------------------------
@pytest.mark.parametrize(("machine", "world", "rank", "address", "nodes"), [
    ("4xH100", 8, 4, "10.0.0.1", (2, 1)), ("8xH100", 32, 24, "10.0.0.1", (4, 3)),  # ranks
    ("1xH100", 2, 1, "10.0.0.1", (2, 1)), ("3xH100", 4, 0, "10.0.0.1", (4, 0)),  # nodes: one reading
    ("2xH100", 4, 1, "10.0.0.1", (4, 1)),  # no first rank of a node
    ("2xH100", 2, 0, "10.0.0.1", (2, 0)), ("2xH100", 2, 0, "127.0.0.1", (1, 0)),  # unless nobody can come
])  # fmt: skip
def test_rank_and_world_size_count_ranks_where_they_can(config, monkeypatch, machine, world, rank, address, nodes):
    """Two machines with four GPUs export RANK=0 and RANK=4; Kubernetes numbers as many nodes as WORLD_SIZE says."""
    monkeypatch.setattr(launch_request, "detect_hardware", lambda: parse_hardware(machine))
    exported = NodeSetup(world, rank, address, 29_500, "RANK and WORLD_SIZE are there")
    found = launch_request.resolve_exported_nodes(LaunchOptions(nodes=exported), load_config(config).config).nodes
    assert found == NodeSetup(*nodes, address, 29_500)
    assert ("count ranks" in found.exported_note) == (nodes[0] < world)


def test_nodes_that_read_the_variables_differently_all_say_so(config):
    """Four numbered nodes of two ranks: 0 and 2 can be the first ranks of two."""
    port = free_port()
    machine = Hardware((), "CPU", 2, 8 * GIB, 8 * GIB, cpu_ranks=2)
    card = node_card(load_config(config).config, machine, strategy="ddp", uses_deepspeed=False)
    setups = [NodeSetup(2, 0, "127.0.0.1", port), NodeSetup(4, 1, "127.0.0.1", port)]
    answers = together(*(functools.partial(meet_nodes, setup, card, timeout_s=20) for setup in setups))
    assert [type(answer) for answer in answers] == [ConfigError] * 2
    assert all("NNODES is 2 on node 0 and 4 on node 1" in str(answer) for answer in answers)


def test_a_node_that_comes_after_the_ranks_have_begun_is_told_so(config, monkeypatch):
    monkeypatch.setattr(launch_nodes, "_LEAVE_TIMEOUT_S", 0.5)
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    card = node_card(load_config(config).config, parse_hardware("1xH100"), strategy="ddp", uses_deepspeed=False)
    began = time.monotonic()
    with pytest.raises(HardwareError, match="the ranks of a run that began without this node"):
        meet_nodes(NodeSetup(4, 2, "127.0.0.1", port), card, timeout_s=600)
    assert time.monotonic() - began < 30
    del store


# --- launches ---------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_two_machines_train_by_the_variables_that_guides_export(config):
    """`MASTER_ADDR=… MASTER_PORT=… RANK=… WORLD_SIZE=… make train-distributed` on each node, two ranks on each."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "4", "NPROC": "2"}
    shared |= {"STRATEGY": "ddp", "DS_ACCELERATOR": "cpu"}
    words = [warm.python(), "-m", "sft_play", "train-distributed", "--config", str(config), "output.name=ranks"]
    words.append("distributed.timeout_s=60")
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    running = [
        subprocess.Popen(words, cwd=ROOT, env=clean_environment(**shared, RANK=rank), text=True, **streams)
        for rank in ("0", "2")
    ]
    printed = [process.communicate(timeout=280)[0] for process in running]
    said = "\n---\n".join(printed)
    assert [process.returncode for process in running] == [0, 0], said
    run = config.parent / "outputs" / "ranks"
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["ranks"], plan["hardware"]["nodes"]) == (4, 2)
    assert len([line for line in (run / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]) == 2
    assert said.count("ddp proved: the model is a DistributedDataParallel over 4 ranks") == 1, said
    assert all("count ranks, 4 in all and 2 on each node" in text for text in printed)
    assert "this is node 1, at 127.0.0.1" in printed[1]


def test_what_would_be_started_is_shown_without_waiting_for_anybody(config, succeed, monkeypatch):
    for name, text in {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "192.0.2.1", "NPROC": "2"}.items():
        monkeypatch.setenv(name, text)
    printed = succeed("launch-command", "--config", str(config))
    assert "--nnodes 2 --node-rank 1" in printed
    assert "RANK and WORLD_SIZE in the environment count ranks, 4 in all and 2 on each node" in printed


# --- variables that were left -----------------------------------------------------------------------------------------
LEFT = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize("left", [LEFT, {**LEFT, "RANK": "1"}], ids=["rank 0", "rank 1"])
def test_leftover_variables_are_said_with_the_command_that_leaves_them_out(config, left, tmp_path):
    port = str(free_port())
    words = ["make", f"VENV={warm.environment_folder()}", "train", f"CONFIG={config}"]
    words.append(f"SET=train.max_steps=1 output.dir={tmp_path}")
    environ = clean_environment(**left, MASTER_PORT=port)
    other = "rank 1" if left["RANK"] == "0" else "rank 0"
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(words, cwd=ROOT, env=environ, text=True, start_new_session=True, **streams) as process:
        timer = threading.Timer(60, process.kill)
        timer.start()
        line = next(line for line in process.stdout if f"it waits at 127.0.0.1:{port} for {other}, 600 s" in line)
        timer.cancel()
        os.killpg(process.pid, signal.SIGINT)  # Ctrl-C, while torch waits
    assert process.returncode != 0
    assert not list(tmp_path.iterdir())
    alone = line.partition("alone: ")[2].rstrip()
    assert alone.startswith("env -u RANK -u WORLD_SIZE -u LOCAL_RANK -u MASTER_ADDR -u MASTER_PORT make train CONFIG=")
    # the printed command, in the environment that has the variables
    environ |= {"VENV": str(warm.environment_folder())}
    answer = subprocess.run(["sh", "-c", alone], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (run,) = tmp_path.iterdir()
    assert json.loads((run / "plan.json").read_text())["ranks"] == 1


ALONE, ELSEWHERE = {"RANK": "0", "WORLD_SIZE": "1"}, {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "9994"}


@pytest.mark.parametrize(
    "left",
    [{**ALONE, "LOCAL_RANK": "0"}, {**ALONE, "LOCAL_RANK": "0", **ELSEWHERE}, {**ALONE, **ELSEWHERE},
     {"LOCAL_RANK": "0", **ELSEWHERE}],
    ids=["no address", "of one rank", "of one node", "a local rank alone"],
)  # fmt: skip
def test_leftovers_of_one_process_wait_for_nobody(config, left, tmp_path, succeed, monkeypatch):
    for name, text in left.items():
        monkeypatch.setenv(name, text)
    succeed("train", "--config", str(config), "train.max_steps=1", f"output.dir={tmp_path}")
    assert not set(RENDEZVOUS_VARIABLES) & set(os.environ)
    assert not dist.is_initialized()


def test_ranks_that_do_not_come_are_one_message(monkeypatch):
    monkeypatch.setattr(distributed, "RENDEZVOUS_TIMEOUT_S", 1.0)
    for name, text in {**LEFT, "RANK": "1", "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(HardwareError, match=r"rank 1 waited 1 s at 127.0.0.1:\d+ for the other ranks .*leave RANK"):
        distributed.publish_gpu("", 1)


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
    joined = lambda name: dist.PrefixStore(name, dist.TCPStore("127.0.0.1", store.port))  # noqa: E731
    monkeypatch.setattr(distributed, "open_store", joined)
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
        distributed.broadcast_text(launch_request.refusal_to_json(error))
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
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SERVES], cwd=ROOT, **streams) as first:
        store = dist.TCPStore("127.0.0.1", int(first.stdout.readline()))
        monkeypatch.setattr(distributed, "open_store", lambda name: dist.PrefixStore(name, store))
        monkeypatch.setenv("WORLD_SIZE", "2")
        threading.Timer(1, first.kill).start()
        with pytest.raises(HardwareError, match="rank 0 ended before it had planned"):
            distributed.broadcast_text(None)
