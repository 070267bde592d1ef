"""How processes end: a closed terminal saves as SIGTERM does, and what a process has started ends with it."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from sft_play.process import signals
from tests.conftest import ROOT, clean_environment, write_run
from tests.processes import is_alive, wait_for

WAITS = "import time; from sft_play.process.signals import watch_parent; watch_parent(); time.sleep(300)"


@pytest.fixture
def said() -> Iterator[list[str]]:
    found: list[str] = []
    with signals.StopSignals(lambda n: found.append(f"first {n}"), lambda n: found.append(f"again {n}")):
        yield found


def test_a_stop_in_the_exit_handlers_of_a_process_is_no_noise():
    code = (
        "import atexit, os, signal\n"
        "from sft_play.process import signals\n"
        "signals.StopSignals(signals.raise_interrupt).__enter__()\n"
        "atexit.register(lambda: (os.kill(os.getpid(), signal.SIGTERM), print('left')))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "left\n", "")


def test_a_request_to_stop_is_told_from_its_echo(said, monkeypatch):
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)  # at the same time: a batch system signals every process
    assert said == ["first 15"]
    monkeypatch.setattr(signals, "ECHO_S", 0.0)
    signal.raise_signal(signal.SIGHUP)  # a shell's second one, whenever it comes
    assert said == ["first 15"]
    signal.raise_signal(signal.SIGINT)
    assert said == ["first 15", "again 2"]
    monkeypatch.setattr(os, "getppid", lambda: 1)
    signal.raise_signal(signal.SIGTERM)  # of the parent's death, in the midst of the save
    assert said == ["first 15", "again 2"]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_each_of_the_four_is_a_request_of_its_own(said, number):
    signal.raise_signal(number)
    assert said == [f"first {int(number)}"]


class Terminal:
    """A command in a terminal of its own, which is closed as a window is."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self.shown = ""
        self.pid, self._descriptor = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe(words[0], words, clean_environment(TERM="xterm"))
        os.set_blocking(self._descriptor, False)

    def read(self) -> str:
        """What was shown until now; a terminal that nobody reads holds its program up."""
        with contextlib.suppress(BlockingIOError, OSError):
            while part := os.read(self._descriptor, 65_536):
                self.shown += part.decode("utf-8", "replace")
        return self.shown

    def until(self, holds: Callable[[], object]) -> None:
        """Wait for something that the command does."""

        def is_over() -> object:
            self.read()
            return holds() or not is_alive(self.pid)

        wait_for(is_over, said=self.read)
        assert holds(), f"ended:\n{self.shown}"

    def close(self) -> int:
        """Close it; the command's exit code."""
        os.close(self._descriptor)
        wait_for(lambda: not is_alive(self.pid))
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def config(tmp_path, tiny_llama, sums) -> Path:
    train = {"effective_batch_size": 2, "max_steps": 100_000, "gradient_checkpointing": False}
    quick = {"steps": 0, "before_training": False, "generate_rows": 0}
    data = {"val_path": str(sums)}
    return write_run(tmp_path, tiny_llama, sums, data=data, train=train, eval=quick, output={"name": "one"})


def test_a_terminal_that_is_closed_saves_the_run_as_sigterm_does(config, tmp_path):
    terminal = Terminal([sys.executable, "-m", "sft_play", "train", "--config", str(config)], tmp_path)
    run = tmp_path / "outputs" / "one"
    metrics = run / "metrics.jsonl"
    terminal.until(lambda: metrics.exists() and metrics.read_text().count("\n") > 2)
    assert terminal.close() == 130
    manifest, summary = (json.loads((run / f"{name}.json").read_text()) for name in ("manifest", "summary"))
    assert (manifest["status"], manifest.get("error")) == ("stopped", None)
    assert (run / "checkpoints" / f"checkpoint-{summary['steps']}").is_dir()
    assert "SIGHUP: saving at the end of this step" in (run / "train.log").read_text()


@pytest.mark.parametrize(
    "number", [signal.SIGUSR1, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGHUP, signal.SIGTERM))]
)
def test_a_request_before_the_first_step_leaves_a_run_that_is_known_to_be_stopped(config, tmp_path, number):
    words = [sys.executable, "-m", "sft_play", "train", "--config", str(config), "eval.before_training=true"]
    words += ["eval.generate_rows=64", "eval.max_new_tokens=400"]  # for minutes
    terminal = Terminal(words, tmp_path)
    terminal.until(lambda: "Evaluation on val" in terminal.read())
    os.kill(terminal.pid, number)
    wait_for(lambda: terminal.read() and not is_alive(terminal.pid))
    assert terminal.close() == 130
    run = tmp_path / "outputs" / "one"
    assert json.loads((run / "manifest.json").read_text())["status"] == "stopped"
    assert not (run / "run.lock").exists()


STARTS = """
import os, subprocess, sys, time
from sft_play.process.signals import child_environment
child = subprocess.Popen(sys.argv[1:], env=child_environment(os.environ))
sys.stdout.write(f"{child.pid}\\n"); sys.stdout.flush()
time.sleep(300)
"""


def sleeps(pid: int) -> bool:
    """Whether the program has begun: it sleeps, and its imports are done."""
    return psutil.Process(pid).cpu_times().user > 0 and psutil.Process(pid).status() == psutil.STATUS_SLEEPING


@pytest.mark.parametrize("words", [["-c", WAITS], ["-m", "sft_play.process.signals", "waits_long"]])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_child_ends_when_its_parent_is_killed_however_early(tmp_path, words, at_once):
    (tmp_path / "waits_long.py").write_text("import pathlib, time; pathlib.Path('begun').touch(); time.sleep(300)")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    command = [sys.executable, "-c", STARTS, sys.executable, *words]
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        if not at_once:
            wait_for(lambda: (tmp_path / "begun").exists() or (words[0] == "-c" and sleeps(child)))
        parent.kill()
    wait_for(lambda: not is_alive(child), within_s=30)


def test_a_variable_of_the_parents_reaches_no_grandchild(monkeypatch):
    monkeypatch.setenv(signals.PARENT_VARIABLE, f"{os.getppid()}:SIGTERM")
    monkeypatch.setenv(signals.MAKE_VARIABLE, "1:1")
    told = []
    monkeypatch.setattr(signals, "die_with_parent", lambda *words: told.append(words))
    signals.watch_parent()
    assert not {signals.PARENT_VARIABLE, signals.MAKE_VARIABLE} & set(os.environ)
    for make in (f"123456789:{os.getpid()}", f"{os.getppid()}:1"):  # a wrapper of VENV= stands between
        monkeypatch.setenv(signals.MAKE_VARIABLE, make)
        signals.watch_parent()
    assert told == [(os.getppid(), signal.SIGTERM), (123456789, signal.SIGTERM)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_command_ends_when_its_make_alone_gets_a_signal(tmp_path, number):
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    program = (
        f"import os, signal; open('{tmp_path}/pid', 'w').write(str(os.getpid())); "
        f"signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT]); {WAITS}"  # as sft_play/entry.py does
    )
    python.write_text(f"#!/bin/sh\nexec '{sys.executable}' -c \"{program}\"\n")
    python.chmod(0o755)
    environment = {**os.environ, "VENV": str(tmp_path), "PYTHONPATH": str(ROOT)}
    make = subprocess.Popen(["make", "train"], cwd=ROOT, env=environment, start_new_session=True)
    child = int(wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
    wait_for(lambda: sleeps(child))
    make.send_signal(number)
    try:
        make.wait(timeout=30)
        wait_for(lambda: not is_alive(child), within_s=30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(make.pid, signal.SIGKILL)
        make.wait()


ENDED_OTHERWISE = {
    "sft_play.data.masks.sandbox": "chat templates: it ends with the pipe that it reads from",
    "sft_play.runs.folder": "git, with a time limit",
    "sft_play.diagnose.machine_pages": "torch's report of itself, with a time limit",
    "sft_play.commands.launch_file": "accelerate's questions, in the same terminal",
    "sft_play.process.signals": "start_child, which sets the variable",
    "sft_play.machine.compiler": "a compiler's trial of a few lines, with a time limit",
    "sft_play.machine.software": "what Unsloth's environment says of itself, with a time limit",
}


def test_every_process_that_the_package_starts_ends_with_it():
    sources = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "sft_play").rglob("*.py"))}
    starts = r"\bsubprocess\.(Popen|run|call|check_\w+)\(|ProcessPoolExecutor\(|\.Process\(target|os\.fork\("
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sources}
    starting = {name: sources[path] for name, path in names.items() if re.search(starts, sources[path])}
    careless = {name for name, source in starting.items() if "from sft_play.process.signals import" not in source}
    careless.remove("sft_play.finished.export.llama_cpp")  # it imports it as a whole
    assert "signals.child_environment(" in starting["sft_play.finished.export.llama_cpp"]
    assert careless == set(ENDED_OTHERWISE), careless ^ set(ENDED_OTHERWISE)
    assert len(starting) > 5


SAVES = """
import pathlib, signal, sys, time
def save(number, frame):
    print("saved")
    sys.exit(130)
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1]).touch()
time.sleep(float(sys.argv[2]))
print("whole")
"""


@pytest.mark.parametrize(("asked", "code", "written"), [(True, 130, "saved\n"), (False, 0, "whole\n")])
def test_a_process_beside_this_one_is_asked_to_stop_and_waited_for(tmp_path, asked, code, written):
    (tmp_path / "saves_here.py").write_text(SAVES)
    ready, environment = tmp_path / "ready", {**os.environ, "PYTHONPATH": str(tmp_path)}

    def ask() -> None:
        wait_for(ready.exists)
        os.kill(os.getpid(), signal.SIGTERM)

    if asked:
        threading.Thread(target=ask, daemon=True).start()
    words = [str(ready), "300" if asked else "0"]
    ended = signals.run_child("saves_here", words, environment=environment, stdout=subprocess.PIPE)
    assert ended == signals.ChildResult(code, written, was_stopped=asked)


STUBBORN = """
import signal
signal.signal(signal.SIGTERM, lambda *_: print("saving", flush=True))
print("up", flush=True)
while True:
    signal.pause()
"""


@contextlib.contextmanager
def stubborn_children(count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Children that hear of a SIGTERM, and go on; killed at the end, whatever happens."""
    children: list[subprocess.Popen[str]] = []
    try:
        for _ in range(count):
            child = signals.start_child(
                [sys.executable, "-c", STUBBORN], environment=clean_environment(), stdout=subprocess.PIPE, text=True
            )
            children.append(child)
            assert child.stdout.readline() == "up\n"
        yield children
    finally:
        for child in children:
            child.kill()
            child.communicate()


@pytest.mark.parametrize("count", [1, 3])
def test_the_first_request_reaches_every_child_and_the_second_kills_them(monkeypatch, count):
    told: list[int] = []
    with stubborn_children(count) as children, signals.supervise(children, on_stop=told.append) as received:
        assert {os.getsid(child.pid) for child in children} == {child.pid for child in children}  # no Ctrl-C by itself
        signal.raise_signal(signal.SIGINT)
        assert [child.stdout.readline() for child in children] == ["saving\n"] * count
        assert (told, received) == ([signal.SIGINT], [signal.SIGINT])
        monkeypatch.setattr(signals, "ECHO_S", 0.0)
        signal.raise_signal(signal.SIGTERM)
        assert [child.wait(timeout=10) for child in children] == [-signal.SIGKILL] * count
    assert (told, received) == ([signal.SIGINT], [signal.SIGINT, signal.SIGTERM])


def test_an_error_leaves_no_supervised_child_behind_and_kills_as_it_was_told():
    killed: list[subprocess.Popen[str]] = []
    with stubborn_children(2) as children:
        first, second = children
        first.kill()
        first.wait()
        with pytest.raises(KeyError), signals.supervise(children, kill=lambda one: killed.append(one) or one.kill()):
            raise KeyError
        assert killed == [second]  # the other has ended by itself
        assert second.returncode == -signal.SIGKILL
