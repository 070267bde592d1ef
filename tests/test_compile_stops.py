"""What torch compiles for a run: a stop meanwhile ends everything at once, and a wait for another process is said."""

import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sft_play.process import waiting
from sft_play.training import distributed
from tests.conftest import ROOT, clean_environment, write_run
from tests.processes import is_alive, wait_for
from tests.test_distributed import needs_deepspeed
from tests.test_failures import Started, start, two_ranks_of  # noqa: F401

pytestmark = pytest.mark.build
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


STOPS = {
    "Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM, "closed terminal": signal.SIGHUP,
    "kill of the command": signal.SIGKILL, "kill of command and agent": signal.SIGKILL,
}  # fmt: skip


@pytest.fixture
def compiling(start, tmp_path, tiny_llama, sums) -> Started:  # noqa: F811
    """A real run that waits for DeepSpeed's CPU Adam: its compiler takes ten minutes for each file."""
    config = write_run(tmp_path, tiny_llama, sums, train={"max_steps": 1}, eval={"steps": 0})
    compiler = tmp_path / "slow-c++"
    compiler.write_text(SLOW_COMPILER)
    compiler.chmod(0o755)

    words = [sys.executable, "-m", "sft_play", "train-distributed", "--config", str(config), "output.name=stopped"]
    places = {"TORCH_EXTENSIONS_DIR": f"{tmp_path}/extensions", "COMPILERS": f"{tmp_path}/compilers"}
    return start(*words, STRATEGY="zero2_offload", NPROC="2", DS_ACCELERATOR="cpu", CXX=str(compiler), **places)


@needs_deepspeed
@needs_ninja
@pytest.mark.slow
@pytest.mark.parametrize("name", STOPS)
def test_a_stop_while_deepspeed_compiles_leaves_no_process_and_no_lock(compiling, tmp_path, name):
    started = compiling
    wait_for(lambda: compilers(tmp_path, 1) or started.process.poll() is not None, said=lambda: started.printed)
    agent = started.agent_process()
    if "agent" in name:
        agent.kill()
    started.process.send_signal(STOPS[name])
    assert started.end(20) == (-signal.SIGKILL if "kill" in name else 130), started.printed
    started.require_nobody_left(within_s=15)
    assert not [pid for pid in compilers(tmp_path, 1) if is_alive(pid)]
    assert not (tmp_path / "extensions" / "cpu_adam" / "lock").exists()
    assert "Traceback" not in started.printed, started.printed


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
    words, options = [sys.executable, "-c", DEAF, when, str(wait_s)], {"cwd": ROOT, "env": clean_environment()}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        time.sleep(0.5)  # until torch's wait has begun
        began = time.monotonic()
        process.terminate()
        process.communicate(timeout=30)
    took_s = time.monotonic() - began
    if when == "before":
        assert (process.returncode, took_s < 10) == (130, True)
    else:
        assert (process.returncode != 130, took_s > 2) == (True, True)


def test_a_wait_for_what_another_process_compiles_names_its_lock(tmp_path, monkeypatch, caplog):
    from torch.utils.file_baton import FileBaton

    monkeypatch.setattr(waiting, "FIRST_LINE_S", 0.1)
    monkeypatch.setattr(FileBaton, "wait", FileBaton.wait)  # set back at the end
    caplog.set_level("INFO")
    distributed.announce_compile_waits()
    lock = tmp_path / "lock"
    lock.touch()
    waits = threading.Thread(target=FileBaton(str(lock), 0.005).wait, daemon=True)
    waits.start()
    waits.join(1.0)
    assert waits.is_alive()
    assert f"Waiting for the process that compiles in {tmp_path} (if there is none: rm {lock})" in caplog.text
    lock.unlink()
    waits.join(20)
    assert not waits.is_alive()
