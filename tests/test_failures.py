"""A rank that breaks ends the run: it is named once, nothing stays behind, and the exit code says what to do."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from sft_play.errors import ConfigError, DoesNotFit, HardwareError, Interrupted
from sft_play.launch.agent import RankExit, failure_report, root_exit
from sft_play.launch.torchrun import torchrun_command
from sft_play.machine.network import NodeSetup, require_free_port
from sft_play.process import failures
from sft_play.process.failures import Failure
from sft_play.training.heartbeat import Beat, laggards, stall_report
from tests.conftest import ROOT, chat, clean_environment, write_run
from tests.processes import free_port, is_alive, wait_for

pytestmark = pytest.mark.build
NOISE = ("ChildFailedError", "torch/distributed/elastic", "torch/distributed/run.py", "Root Cause", "error_file:")
WAIT_S = 120
END_S = 60

PROBE = '''
"""Ranks that do nothing but wait for each other, through the command line's own main."""
import datetime, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from sft_play import cli
from sft_play.training.heartbeat import Heartbeat

mode, folder, timeout_s = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
rank = int(os.environ["RANK"])

def work(request):
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s + (20 if mode == "loop" else 0)))
    try:
        with Heartbeat(timeout_s=timeout_s) as beat:
            for step in range(1_000_000):
                beat.note(step, "training")
                (folder / f"rank{rank}").write_text(f"{os.getpid()} {step}")
                if mode == "fault" and rank == 1 and step == 5:
                    raise ValueError("a row of seven tokens")
                if mode == "abort" and rank == 1 and step == 5:
                    os.abort()
                if mode == "loop" and rank == 1 and step == 5:
                    turn_for_ever()
                dist.all_reduce(torch.ones(1))
                time.sleep(0.01)
    finally:
        dist.destroy_process_group()
    return 0

def turn_for_ever():
    while True:
        time.sleep(0.1)

cli.commands.command_function = lambda name: work
cli.read_request = lambda *_: type("Request", (), {"command": "train", "json": False, "trust": False, "out": None})
sys.exit(cli.main(["train"]))
'''


@dataclass
class Started:
    process: subprocess.Popen[bytes]
    printed_to: Path
    agent: int | None = None

    @property
    def printed(self) -> str:
        return self.printed_to.read_text()

    def end(self, within_s: float = END_S) -> int:
        """Its exit code; fails where it takes longer."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"not ended after {within_s} s; it printed:\n{self.printed}")

    def agent_process(self) -> psutil.Process:
        """The agent: the process itself, or its child."""
        for process in [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children()]:
            if "sft_play.launch.agent" in process.cmdline():
                self.agent = process.pid
                return process
        pytest.fail(f"no agent; printed:\n{self.printed}")

    def rank(self, number: int) -> psutil.Process:
        for process in self.agent_process().children():
            if process.environ().get("RANK") == str(number):
                return process
        pytest.fail(f"no rank {number}; printed:\n{self.printed}")

    def require_nobody_left(self, within_s: float = 20) -> None:
        """Fails where a process of the ranks is alive."""

        def is_over() -> bool:
            return not is_alive(self.agent) and not list(failures.find_agent_processes(self.agent))

        wait_for(is_over, within_s=within_s, said=lambda: self.printed)


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Started]]:
    """Starts a command; what is left of it at the end of the test is ended."""
    running: list[Started] = []

    def begin(*words: str, path: Path | None = None, **environ: str) -> Started:
        kept = clean_environment(**{"PYTHONPATH": os.pathsep.join([str(ROOT), str(path or "")]), **environ})
        to = tmp_path / f"printed{len(running)}.txt"
        with to.open("wb") as file:
            process = subprocess.Popen(words, cwd=tmp_path, env=kept, stdout=file, stderr=subprocess.STDOUT)
        running.append(Started(process, to))
        return running[-1]

    yield begin
    for started in running:
        agent = started.agent or started.process.pid
        failures.kill_process_tree(agent)
        failures.kill_process_tree(started.process.pid)
        started.process.wait(20)


def two_ranks_of(module: str) -> list[str]:
    agent = [sys.executable, "-m", "sft_play.launch.agent"]
    return [*agent, "--standalone", "--nproc-per-node", "2", "--module", module]


@pytest.fixture
def probe(start, tmp_path) -> Callable[..., Started]:
    (tmp_path / "probe_ranks.py").write_text(PROBE)

    def begin(mode: str, *, timeout_s: float = 60, **environ: str) -> Started:
        return start(*two_ranks_of("probe_ranks"), mode, str(tmp_path), str(timeout_s), path=tmp_path, **environ)

    return begin


def until_step(started: Started, folder: Path) -> None:
    def are_there() -> bool:
        texts = [path.read_text().split() for path in (folder / "rank0", folder / "rank1") if path.exists()]
        return len(texts) == 2 and all(len(text) == 2 and int(text[1]) >= 3 for text in texts)

    wait_for(are_there, said=lambda: started.printed)
    started.agent_process()


@pytest.fixture(scope="module")
def long_run(tmp_path_factory, tiny_llama, sums) -> Path:
    """The folder of a run YAML with far more steps than a test waits for."""
    folder = tmp_path_factory.mktemp("breaking")
    train = {"effective_batch_size": 4, "batch_size": 2, "max_steps": 100_000, "learning_rate": 1e-4}
    write_run(folder, tiny_llama, sums, train={**train, "logging_steps": 1}, eval={"steps": 0})
    return folder


@pytest.fixture
def training(start, long_run) -> Callable[..., tuple[Started, Path]]:
    """Starts a real run of two ranks and waits until it trains."""

    def begin(name: str, *words: str) -> tuple[Started, Path]:
        command = [sys.executable, "-m", "sft_play", "train-distributed", "--config", f"{long_run}/run.yaml"]
        started = start(*command, f"output.name={name}", *words, STRATEGY="ddp", NPROC="2")
        run = long_run / "outputs" / name
        metrics = run / "metrics.jsonl"
        wait_for(lambda: metrics.exists() or started.process.poll() is not None, said=lambda: started.printed)
        assert started.process.poll() is None, started.printed
        started.agent_process()
        return started, run

    return begin


def last_line(started: Started, start: str = "[train-distributed] error: ") -> str:
    return [line for line in started.printed.splitlines() if line.startswith(start)][-1]


def require_no_noise(started: Started) -> None:
    for noise in NOISE:
        assert noise not in started.printed, started.printed
    assert "Traceback" not in started.printed, started.printed


# --- real runs --------------------------------------------------------------------------------------------------------
def test_ranks_whose_agent_is_killed_before_any_checkpoint_save_one(training):
    """The agent serves the store by which ranks make groups: what a save needs is made before the first step."""
    started, run = training("orphaned")
    started.agent_process().kill()
    assert started.end() == 1
    assert "the ranks' agent was killed by SIGKILL" in started.printed
    require_no_noise(started)
    started.require_nobody_left()
    step = json.loads((run / "summary.json").read_text())["steps"]
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"checkpoint-{step}"]
    assert json.loads((run / "manifest.json").read_text())["status"] == "stopped"


def test_a_run_shows_the_memory_of_its_ranks_and_one_that_is_killed_ends_it_and_is_named(training, long_run, command):
    started, run = training("killed")
    code, printed = command("memory-check", "--config", f"{long_run}/run.yaml", "--json")
    found = json.loads(printed)
    assert (code, found["running"], found["folder"]) == (0, True, str(run))
    assert [use["rank"] for use in found["ranks"]] == [0, 1]
    assert all(use["rss_bytes"] > 100 * 2**20 for use in found["ranks"])  # torch and its libraries alone are more
    rank = started.rank(1)
    rank.kill()
    assert started.end() == 1
    assert f"error: rank 1 of 2 (pid {rank.pid}) was killed by SIGKILL at step " in started.printed
    assert started.printed.count("error: ") == 1, started.printed
    require_no_noise(started)
    started.require_nobody_left()
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["status"] == "failed"
    assert all("was killed by SIGKILL" in text for text in (manifest["error"], (run / "train.log").read_text()))


@pytest.mark.parametrize("number", [pytest.param(signal.SIGHUP, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_saves_at_the_end_of_the_step_and_says_how_to_go_on(training, number):
    started, run = training(f"told-{number.name}")
    started.process.send_signal(number)
    assert started.end() == 130
    counts = [started.printed.count(text) for text in ("stopped at step ", "save at the end of this step", "error:")]
    assert counts == [1, 1, 0], started.printed
    assert f"--run {run.name}" in last_line(started, "[train-distributed] stopped at step ")
    require_no_noise(started)
    assert list((run / "checkpoints").iterdir())
    assert json.loads((run / "manifest.json").read_text())["status"] == "stopped"
    started.require_nobody_left()


@pytest.mark.slow
def test_ranks_save_and_leave_when_the_command_that_started_them_is_killed(training):
    started, run = training("command-killed")
    started.process.kill()
    started.require_nobody_left(within_s=END_S)
    assert list((run / "checkpoints").iterdir())
    assert "stopped at step " in started.printed


def test_bad_input_that_is_found_late_is_one_message_and_exit_code_2(long_run, refuse, monkeypatch):
    """The first row can be read: the command looks no further before it counts the rows."""
    broken = '{"messages": [{"role": "user", "content": \n' * 8
    (long_run / "broken.jsonl").write_text(json.dumps(chat("hello", "hello")) + "\n" + broken)
    monkeypatch.setenv("NPROC", "2")
    words = [f"data.train_path={long_run}/broken.jsonl", "output.name=bad"]
    assert "broken.jsonl" in refuse("train-distributed", "--config", f"{long_run}/run.yaml", *words)
    assert not (long_run / "outputs" / "bad").exists()


# --- ranks that only wait for each other ------------------------------------------------------------------------------
def test_a_rank_that_hangs_ends_the_others_by_the_timeout_and_is_named(probe, tmp_path):
    started = probe("run", timeout_s=6)
    until_step(started, tmp_path)
    started.rank(1).suspend()
    assert started.end() == 1
    line = last_line(started)
    assert "no progress for 6 s (distributed.timeout_s): rank 1 (host " in line
    assert re.search("its last sign of life .*rank 0 waits for it at step ", line)
    require_no_noise(started)
    started.require_nobody_left()


def test_an_exception_of_one_rank_is_shown_once_its_traceback_first(probe):
    started = probe("fault")
    assert started.end(WAIT_S) == 1
    printed = started.printed
    for once in ("Traceback (most recent call last)", "ValueError: a row of seven tokens"):
        assert printed.count(once) == 1, printed
    assert printed.index("Traceback") < printed.index("error: rank 1 of 2 ")
    assert "ended with ValueError at step 5 (training): a row of seven tokens" in printed
    assert not [noise for noise in NOISE if noise in printed], printed


def test_a_rank_that_runs_in_circles_is_named_with_its_place_in_the_code(probe):
    started = probe("loop", timeout_s=6)
    assert started.end(WAIT_S) == 1
    assert re.search(r"no progress for 6 s.*rank 1 in turn_for_ever \(probe_ranks.py:", last_line(started))
    require_no_noise(started)


def test_a_crash_of_the_machine_code_is_shown_with_its_stack(probe):
    started = probe("abort")
    assert started.end(WAIT_S) == 1
    assert "was killed by SIGABRT" in last_line(started)
    assert re.search("(?s)Fatal Python error: Aborted.*in work", started.printed)


@pytest.mark.slow
def test_of_two_nodes_each_says_what_it_knows(start, tmp_path):
    (tmp_path / "probe_ranks.py").write_text(PROBE)
    port = str(free_port())

    def node(number: int) -> Started:
        words = [sys.executable, "-m", "sft_play.launch.agent", "--nnodes", "2", "--node-rank", str(number)]
        words += ["--master-addr", "127.0.0.1", "--master-port", port, "--nproc-per-node", "1", "--module"]
        return start(*words, "probe_ranks", "run", str(tmp_path), "60", path=tmp_path)

    nodes = [node(0), node(1)]
    until_step(nodes[0], tmp_path)
    until_step(nodes[1], tmp_path)
    rank = nodes[1].rank(1)
    rank.kill()
    assert [started.end() for started in nodes] == [1, 1]
    assert f"rank 1 of 2 (pid {rank.pid}) was killed by SIGKILL" in last_line(nodes[1])
    assert re.search(r"rank 0 of 2 \(pid .* lost its connection to another rank at step ", last_line(nodes[0]))
    for started in nodes:
        require_no_noise(started)
        started.require_nobody_left()


def test_a_second_signal_ends_everything_at_once(probe, tmp_path):
    started = probe("run")
    until_step(started, tmp_path)
    started.rank(1).suspend()  # it cannot take the first
    started.rank(0).suspend()
    started.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    started.process.send_signal(signal.SIGTERM)  # of one request: a batch system signals parent and child
    time.sleep(1.5)
    assert started.process.poll() is None, started.printed
    started.process.send_signal(signal.SIGINT)
    assert started.end(20) == 130
    assert "ended at once; what was saved until then is kept" in started.printed
    started.require_nobody_left()


# --- what is said and chosen, without processes -----------------------------------------------------------------------
def own(kind, *, rank=0, at=100.5, message="m", name="ValueError", code=1) -> Failure:
    return Failure(kind, code, name, message, "", at, rank, "a", 10 + rank)


def ended(rank, code, *, at=100.0, **options):
    return RankExit(rank, 10 + rank, code, at, **options)


def test_the_root_is_the_first_failure_that_follows_from_no_other():
    lost = ended(0, 1, failure=own("peer", at=100.1))
    killed = ended(1, -9, at=100.0)  # seen in second 100, after the connection broke
    told = ended(2, -15, at=100.0)
    assert root_exit([lost, killed, told], stopped=False) is killed
    broken = ended(3, 1, at=99.0, failure=own("fault", rank=3, at=99.9))
    assert root_exit([lost, killed, told, broken], stopped=False) is broken
    assert root_exit([lost, told], stopped=False) is lost
    assert root_exit([told], stopped=False) is told
    ended_late = ended(1, -9, at=130.0)  # the launcher's own SIGKILL, 30 s after it asked
    assert root_exit([ended_late, ended(0, 1, failure=own("hung", at=100.2))], stopped=False).rank == 0


def test_a_stop_that_fails_to_save_is_a_failure():
    full = ended(0, 1, failure=own("fault", at=101.0, name="OSError", message="No space left on device"))
    text, code = failure_report([full, ended(1, -15, at=101.0)], 2, stopped=True)
    assert code == 1
    assert "rank 0 of 2 (pid 10) ended with OSError: No space left on device" in text
    text, code = failure_report([ended(0, -15), ended(1, -15)], 2, stopped=True)
    assert (code, "error" in text) == (130, False)
    # of a stop the first rank tells what was saved
    early = ended(1, 130, failure=own("stopped", rank=1, at=100.1, message="stopped"))
    first = ended(0, 130, failure=own("stopped", rank=0, at=100.4, message="stopped, go on with"))
    answer = failure_report([early, first], 2, stopped=True)
    assert answer == ("[train-distributed] stopped, go on with", 130)


def test_what_is_reported_of_ranks_names_the_one_and_keeps_its_exit_code():
    text, code = failure_report([ended(1, -9, step="17 (training)")], 4, stopped=False)
    assert code == 1
    assert "rank 1 of 4 (pid 11) was killed by SIGKILL at step 17 (training) (out of memory? see dmesg)" in text
    text, _ = failure_report([ended(1, 7)], 2, stopped=False)
    assert "rank 1 of 2 (pid 11) ended with exit code 7 and no message" in text
    mine = ended(1, 3, failure=own("user", rank=1, code=3, message="CUDA out of memory"))
    text, code = failure_report([mine, ended(0, -15)], 2, stopped=False)
    assert (text, code) == ("[train-distributed] error: rank 1 (host a): CUDA out of memory", 3)
    both = [mine, ended(0, 3, failure=own("user", code=3, message="CUDA out of memory", at=101.0))]
    assert failure_report(both, 2, stopped=False)[0] == "[train-distributed] error: CUDA out of memory"


def beat(rank, step, count, **options):
    given = {"activity": "training", "since_s": 30.0, "published": 100.0, "number": 1, "where": ""} | options
    return Beat(rank, "a" if rank < 2 else "b", 10 + rank, step, count=count, **given)


def test_who_is_waited_for_is_the_silent_rank_else_the_one_behind():
    beats = [beat(0, 18, 36), beat(1, 17, 34, where="collate (rows.py:3)"), beat(2, 18, 36), beat(3, 18, 36)]
    assert laggards(beats, set()) == [beats[1]]
    assert stall_report(beats, set(), missing_ranks=[], waited_s=30, now=193) == (
        "no progress for 30 s (distributed.timeout_s): rank 1 (host a) stopped at step 17 (training), 30 s ago, in "
        "collate (rows.py:3); ranks 0, 2, 3 wait for it at step 18 (training)"
    )
    assert stall_report(beats, {1}, missing_ranks=[], waited_s=30, now=193) == (
        "no progress for 30 s (distributed.timeout_s): rank 1 (host a) stopped at step 17 (training), its last sign of "
        "life 93 s ago; ranks 0, 2, 3 wait for it at step 18 (training)"
    )
    level = [beat(0, 18, 36, where="all_reduce (c.py:1)"), beat(1, 18, 36, where="collate (rows.py:3)")]
    assert laggards(level, set()) == []
    assert laggards(level, {1}) == [level[1]]
    text = stall_report(level, set(), missing_ranks=[], waited_s=30, now=193)
    assert "all ranks are at step 18 (training): rank 0 in all_reduce (c.py:1), rank 1 in collate (rows.py:3)" in text
    text = stall_report(level, set(), missing_ranks=[2], waited_s=30, now=193)
    assert "rank 2 has never given a sign of life" in text


@pytest.mark.parametrize(("error", "kind"), [
    (ConfigError("x"), "user"), (DoesNotFit("x"), "user"), (Interrupted("x"), "stopped"),
    (KeyboardInterrupt(), "stopped"),
    (ValueError("Connection closed by peer"), "fault"),  # says so, and is none of torch's
    (RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:14204"), "peer"),
    (RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for recv"), "hung"),
    (RuntimeError("NCCL error: remote process exited or there was a network error"), "peer"),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "fault"),
])  # fmt: skip
def test_what_follows_from_another_rank_is_told_from_what_does_not(error, kind):
    assert failures.failure_kind(error) == kind


def test_the_first_word_of_a_rank_stands_unless_a_message_of_ours_words_it(tmp_path, monkeypatch):
    monkeypatch.setattr(failures, "_recorded", None)
    monkeypatch.setenv(failures.ERROR_FILE_VARIABLE, str(tmp_path / "error.json"))
    monkeypatch.setenv("MY_TOKEN", "hidden-value-1")
    first = MemoryError("CUDA out of memory, hidden-value-1")
    assert not failures.report_to_agent(first)  # no agent waits for it: it is to be printed
    found = failures.read_failure(tmp_path / "error.json")
    assert (found.kind, found.exit_code, found.message) == ("fault", 1, "CUDA out of memory, ***")
    failures.report_to_agent(RuntimeError("gloo/transport/tcp/pair.cc:1] Connection closed by peer"))
    failures.report_to_agent(KeyboardInterrupt())
    assert failures.read_failure(tmp_path / "error.json") == found
    try:
        raise DoesNotFit("take a smaller batch") from first
    except DoesNotFit as worded:
        failures.report_to_agent(worded)
    again = failures.read_failure(tmp_path / "error.json")
    assert (again.kind, again.exit_code, again.message, again.time) == ("user", 3, "take a smaller batch", found.time)
    written = json.loads((tmp_path / "error.json").read_text())  # as torch's launcher reads it
    assert written["message"]["extraInfo"].keys() == {"py_callstack", "timestamp"}


def test_a_port_that_is_taken_is_said_before_anything_starts():
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        first = torchrun_command(["train"], processes_per_node=2, nodes=NodeSetup(2, 0, "head", port))
        with pytest.raises(HardwareError, match=f"MASTER_PORT={port} cannot be listened on: .*MASTER_PORT={port + 1}"):
            require_free_port(first.port)
        # it will not listen
        require_free_port(torchrun_command(["train"], processes_per_node=2, nodes=NodeSetup(2, 1, "head", port)).port)
    require_free_port(first.port)
