"""What torch compiles for a run: a stop meanwhile ends everything at once, and the lock of one that was killed is
removed, while that of a living one never is."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from sft_play.training import distributed
from tests.conftest import ROOT, clean_environment
from tests.processes import is_alive, wait_for
from tests.test_failures import Started, start, two_ranks_of  # noqa: F401

pytestmark = pytest.mark.build
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed here")
needs_ninja = pytest.mark.skipif(shutil.which("ninja") is None, reason="ninja is not installed here")

COMPILING = '''
"""Ranks that are at what comes before their first step: a program runs a program that runs another, as ninja does."""
import subprocess, sys
from sft_play import cli
from sft_play.training.loop.callbacks import StopController, stop_signals

def work(request):
    with stop_signals(StopController(None)):
        compiler = "sleep 600 & echo $! >> " + sys.argv[1] + "/compilers; wait"
        subprocess.run(["sh", "-c", f"sh -c '{compiler}' & wait"], check=True)
    return 0

cli.commands.command_function = lambda name: work
cli.read_request = lambda *_: type("Request", (), {"command": "train", "json": False, "trust": False, "out": None})
sys.exit(cli.main(["train"]))
'''
SLOW_COMPILER = """#!/bin/sh
for word in "$@"; do
  if [ "$word" = -c ]; then sleep 600 & echo $! >> "$COMPILERS"; wait; fi
done
exec c++ "$@"
"""


def compilers(folder: Path, count: int) -> list[int]:
    """The process ids of compilers that have begun; empty until so many have."""
    path = folder / "compilers"
    pids = path.read_text().split() if path.exists() else []
    return [int(pid) for pid in pids] if len(pids) >= count else []


# --- stops ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("killed", ["nobody", pytest.param("agent", marks=pytest.mark.slow)])
def test_a_stop_before_the_first_step_ends_ranks_and_what_their_programs_started(start, tmp_path, killed):  # noqa: F811
    (tmp_path / "compiling_ranks.py").write_text(COMPILING)
    started = start(*two_ranks_of("compiling_ranks"), str(tmp_path), path=tmp_path)
    wait_for(lambda: compilers(tmp_path, 2), said=lambda: started.printed)
    pids, agent = compilers(tmp_path, 2), started.agent_process()
    agent.kill() if killed == "agent" else agent.terminate()
    code = started.end(20)
    assert code == (130 if killed == "nobody" else -signal.SIGKILL), started.printed
    started.require_nobody_left(within_s=10)
    assert not [pid for pid in pids if is_alive(pid)]
    assert "Traceback" not in started.printed, started.printed


STOPS: list[tuple[str, Callable[[Started], object]]] = [
    ("Ctrl-C", lambda started: started.process.send_signal(signal.SIGINT)),
    ("SIGTERM", lambda started: started.process.send_signal(signal.SIGTERM)),
    ("closed terminal", lambda started: started.process.send_signal(signal.SIGHUP)),
    ("kill of the command", lambda started: started.process.kill()),
    ("kill of command and agent", lambda started: [started.agent_process().kill(), started.process.kill()]),
]


@pytest.fixture
def compiling(start, tmp_path, tiny_llama, sums) -> Callable[..., Started]:  # noqa: F811
    """Starts a real run that waits for DeepSpeed's CPU Adam: its compiler takes ten minutes for each file."""
    (tmp_path / "run.yaml").write_text(
        f"model: {{name: {tiny_llama}, max_seq_len: 64}}\ntuning: {{mode: lora}}\n"
        f"data: {{train_path: {sums}, val_path: null, test_path: null}}\n"
        f"train: {{effective_batch_size: 4, max_steps: 1, report_to: []}}\neval: {{steps: 0}}\n"
        f"output: {{dir: {tmp_path}/outputs}}\n"
    )
    compiler = tmp_path / "slow-c++"
    compiler.write_text(SLOW_COMPILER)
    compiler.chmod(0o755)

    def begin(layout: str, name: str, **environ: str) -> Started:
        words = [sys.executable, "-m", "sft_play", "train-distributed", "--config", f"{tmp_path}/run.yaml"]
        return start(
            *words, f"output.name={name}", STRATEGY=layout, NPROC="2", TORCH_EXTENSIONS_DIR=f"{tmp_path}/extensions",
            COMPILERS=f"{tmp_path}/compilers", DS_ACCELERATOR="cpu", **{"CXX": str(compiler), **environ},
        )  # fmt: skip

    return begin


@needs_deepspeed
@needs_ninja
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero2_offload", "zero3_offload"])
@pytest.mark.parametrize(("name", "stop"), STOPS)
def test_a_stop_while_deepspeed_compiles_leaves_no_process_and_no_lock(compiling, tmp_path, layout, name, stop):
    started = compiling(layout, "stopped")
    wait_for(lambda: compilers(tmp_path, 1) or started.process.poll() is not None, said=lambda: started.printed)
    started.agent_process()
    stop(started)
    assert started.end(20) == (-signal.SIGKILL if "kill" in name else 130), started.printed
    started.require_nobody_left(within_s=15)
    assert not [pid for pid in compilers(tmp_path, 1) if is_alive(pid)]
    assert not (tmp_path / "extensions" / "cpu_adam" / "lock").exists()
    assert "Traceback" not in started.printed, started.printed


@needs_deepspeed
@needs_ninja
@pytest.mark.slow
def test_a_compile_that_was_killed_with_all_processes_does_not_hold_up_the_next_start(compiling, tmp_path):
    killed = compiling("zero2_offload", "killed")
    wait_for(lambda: compilers(tmp_path, 1) or killed.process.poll() is not None, said=lambda: killed.printed)
    killed.agent_process()
    tree = [psutil.Process(killed.process.pid), *psutil.Process(killed.process.pid).children(recursive=True)]
    for process in reversed(tree):  # the compilers last: they outlive their rank for a moment
        process.suspend()
    for process in tree:
        process.kill()
    lock = tmp_path / "extensions" / "cpu_adam" / "lock"
    killed.end(20)
    assert lock.exists()
    again = compiling("zero2_offload", "again", CXX="c++")
    assert again.end(600) == 0, again.printed
    assert again.printed.count(f"{lock} was left by a process that was killed while it compiled: removed") == 1
    assert not lock.exists()


DEAF = """
import datetime, sys
from torch.distributed import TCPStore
from sft_play.process import signals, failures
signals.UNHEARD_STOP_S = 0.5
signals.StopSignals(signals.raise_interrupt).__enter__()
signals.end_when_unresponsive(failures.exit_stopped)
if sys.argv[1] == "begun":
    signals.training_begun.set()
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print("waits", flush=True)
store.wait(["what nobody sets"], datetime.timedelta(seconds=float(sys.argv[2])))
"""


@pytest.mark.parametrize(("when", "wait_s"), [("before", 60), ("begun", 4)])
def test_a_stop_that_torch_does_not_hear_ends_what_has_nothing_to_save(when, wait_s):
    """It waits for other ranks in native code. Once a step has begun, a wait is left alone."""
    with subprocess.Popen(
        [sys.executable, "-c", DEAF, when, str(wait_s)], cwd=ROOT, env=clean_environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        time.sleep(0.5)  # until torch's wait has begun
        began = time.monotonic()
        process.terminate()
        process.communicate(timeout=30)
    took_s = time.monotonic() - began
    if when == "before":
        assert process.returncode == 130
        assert took_s < 10
    else:
        assert process.returncode != 130
        assert took_s > 2


# --- locks ------------------------------------------------------------------------------------------------------------

HOLDS = """
import sys, time
from torch.utils.file_baton import FileBaton
if sys.argv[2] == "ours":
    from sft_play.training.distributed import remove_abandoned_locks
    remove_abandoned_locks()
lock = FileBaton(sys.argv[1])
assert lock.try_acquire()
print("holds", flush=True)
sys.stdin.readline()
lock.release()
"""


@pytest.fixture
def holder(tmp_path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a process that holds torch's lock until it reads a line; `whose`: of ours, or another tool's."""
    held: list[subprocess.Popen[str]] = []

    def hold(whose: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", HOLDS, str(tmp_path / "lock"), whose]
        one = subprocess.Popen(words, cwd=ROOT, env=clean_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               text=True)  # fmt: skip
        held.append(one)
        assert one.stdout is not None
        assert one.stdout.readline() == "holds\n"
        return one

    yield hold
    for one in held:
        one.kill()
        one.communicate()


@pytest.fixture
def taken(tmp_path, monkeypatch, caplog) -> Callable[..., threading.Thread]:
    """Begins to wait for the lock, as a run of ours does, which looks more often here."""
    from torch.utils.file_baton import FileBaton

    monkeypatch.setattr(FileBaton, "try_acquire", FileBaton.try_acquire)  # set back at the end
    caplog.set_level("INFO")
    distributed.remove_abandoned_locks()

    def wait(lock: Path = tmp_path / "lock") -> threading.Thread:
        waits = threading.Thread(target=FileBaton(str(lock), 0.005).try_acquire, daemon=True)
        waits.start()
        return waits

    return wait


@pytest.mark.parametrize("whose", ["ours", "another tool's"])
def test_a_lock_is_removed_once_its_owner_is_killed_and_not_before(holder, taken, tmp_path, caplog, whose):
    owner = holder(whose)
    made = (tmp_path / "lock").stat().st_ino
    waits = taken()
    waits.join(1.0)
    assert waits.is_alive(), "the owner lives"
    assert (tmp_path / "lock").stat().st_ino == made
    owner.kill()
    waits.join(20)
    assert not waits.is_alive()
    assert (tmp_path / "lock").exists(), "it is the one of who has waited"
    assert caplog.text.count("was left by a process that was killed while it compiled: removed") == 1


@pytest.mark.parametrize("whose", ["ours", "another tool's"])
def test_a_lock_that_is_released_is_taken_without_a_word(holder, taken, tmp_path, caplog, whose):
    owner = holder(whose)
    waits = taken()
    waits.join(0.5)
    owner.communicate("\n", timeout=20)
    assert owner.returncode == 0
    waits.join(20)
    assert not waits.is_alive()
    assert "was left" not in caplog.text


@pytest.mark.parametrize("through", ["", "link"], ids=["its path", "a link, as many caches are"])
def test_a_lock_stays_as_long_as_compilers_work_in_its_folder(taken, tmp_path, through):
    """ninja goes on for a while where the process that runs it is killed; the kernel knows its folder without links."""
    (tmp_path / "lock").touch()
    if through:
        (tmp_path / through).symlink_to(tmp_path)
    with subprocess.Popen(["sleep", "600"], cwd=tmp_path) as ninja:
        waits = taken(tmp_path / through / "lock")
        waits.join(1.0)
        has_waited = waits.is_alive()
        ninja.kill()
    assert has_waited
    waits.join(20)
    assert not waits.is_alive()


def test_of_many_that_find_a_lock_left_behind_each_gets_its_turn(holder, taken, tmp_path, caplog):
    holder("another tool's").kill()
    turns: list[float] = []

    def compile_once() -> None:
        from torch.utils.file_baton import FileBaton

        lock = FileBaton(str(tmp_path / "lock"), 0.005)
        assert lock.try_acquire()
        turns.append(time.monotonic())
        time.sleep(0.2)
        turns.append(time.monotonic())
        lock.release()

    taken().join(20)
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").touch()
    together = [threading.Thread(target=compile_once, daemon=True) for _ in range(6)]
    for one in together:
        one.start()
    for one in together:
        one.join(30)
    assert len(turns) == 12
    assert turns == sorted(turns), "two compiled at the same time"
    assert not (tmp_path / "lock").exists()


def test_a_lock_whose_owner_cannot_be_seen_stays_and_the_line_says_how_to_remove_it(
    taken, tmp_path, caplog, monkeypatch
):
    """Another user's, or one on a disk that other machines write to: the kernel gives no lease."""
    from sft_play.process import waiting

    monkeypatch.setattr(waiting, "FIRST_LINE_S", 0.2)

    def refused(*_: object) -> int:
        raise OSError(22, os.strerror(22))

    monkeypatch.setattr(distributed.fcntl, "fcntl", refused)
    lock = tmp_path / "lock"
    lock.touch()
    waits = taken()
    waits.join(1.5)
    assert waits.is_alive()
    assert lock.exists()
    assert f"Waiting for the process that compiles in {tmp_path} (if there is none: rm {lock})" in caplog.text
    lock.unlink()
    waits.join(20)
    assert not waits.is_alive()
