"""Processes that have their imports already: one imports torch, transformers, TRL and PEFT, the others are its forks.

    words = [warm.python(), "-m", "sft_play", "train", ...]   # in place of sys.executable

Seven of the ten processor seconds of a tiny run are imports, in the command, in the launcher and in every rank. The
program of `python()` takes a Python's words, hands them with its environment, folder and standard streams to the
process that has imported, and stands for the fork that runs them: signals go to the fork, its exit code or signal is
the program's own. What a fork starts with sys.executable is a fork too, so a launch is warm down to its ranks.

Real are the processes, the launcher, the streams and the collectives. Not real are the ids (a child's parent is the
process that has imported) and what libraries read from the environment when they are imported. So what is said of a
rank that fails, signals to ranks, memory that is measured, imports and caches are tested with sys.executable.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PARENT_VARIABLE = "SFT_PLAY_PARENT"
FOLDER_VARIABLE = "SFT_PLAY_WARM"
TORCHRUN = "torch.distributed.run"
MODULES = (
    "sft_play.cli", "sft_play.entry", "sft_play.launch.agent", "sft_play.training.run", "peft.tuners.lora.bnb",
    TORCHRUN, "torch.distributed.fsdp", "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip
"""What runs import."""

CLIENT = r"""
import json, os, signal, socket, sys
words = sys.argv[3:]
kind = next((word for word in words if word != "-u"), "-")
if kind.startswith("-") and kind not in ("-m", "-c"):
    os.execv(sys.argv[2], [sys.argv[2], *words])
heard = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
signal.pthread_sigmask(signal.SIG_BLOCK, heard)
asked = {"words": words, "environment": dict(os.environ), "folder": os.getcwd(), "parent": os.getppid()}
asked = json.dumps(asked).encode()
with socket.socket(socket.AF_UNIX) as line:
    line.connect(sys.argv[1])
    socket.send_fds(line, [len(asked).to_bytes(8, "big")], [0, 1, 2])
    line.sendall(asked)
    with line.makefile("r") as answers:
        pid = int(answers.readline())
        for number in heard:
            signal.signal(number, lambda number, frame: os.kill(pid, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)
        code = int(answers.readline())
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""
"""The program that stands for a fork: address, the real Python, and that Python's words."""


def keep() -> str:
    """Make the folder of the process that imports, which lives until this process ends; the path, for its children too.

    Called where pytest begins, so that the processes of xdist share one.
    """
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    os.mkfifo(folder / "alive")
    alive = os.open(folder / "alive", os.O_RDWR)

    def end(owner: int = os.getpid()) -> None:
        if os.getpid() == owner and not (folder / "line").exists():
            shutil.rmtree(folder, ignore_errors=True)
        os.close(alive)  # what imports waits for this, and removes the folder

    atexit.register(end)
    os.environ[FOLDER_VARIABLE] = str(folder)
    return str(folder)


@functools.cache
def python() -> str:
    """The program to start in place of sys.executable; sys.executable itself where forks cannot be had.

    With a GPU a fork would inherit CUDA, which cannot be.
    """
    if sys.platform != "linux" or any(Path("/dev").glob("nvidia[0-9]*")):
        return sys.executable
    folder = Path(os.environ.get(FOLDER_VARIABLE) or keep())
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "line").exists():
            start_server(folder)
    return str(folder / "bin" / "python")


def start_server(folder: Path) -> None:
    """Write the programs into the folder and start the process that they ask for forks."""
    (folder / "client.py").write_text(CLIENT)
    (folder / "bin").mkdir()
    words = [sys.executable, "-ISB", f"{folder}/client.py", f"{folder}/line", sys.executable]
    for name, module in {"python": (), "sft-play": ("-m", "sft_play"), "torchrun": ("-m", TORCHRUN)}.items():
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {shlex.join([*words, *module])} "$@"\n')
        program.chmod(0o755)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    log = folder / "log"
    with log.open("w") as sink:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.warm", str(folder)],
            cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink,
        )  # fmt: skip
    while not (folder / "line").exists():
        assert server.poll() is None, log.read_text()
        time.sleep(0.05)
    atexit.register(server.poll)  # an object that outlives its process would warn


def programs() -> str:
    """The folder of `python()`, with torchrun and sft-play beside it."""
    return str(Path(python()).parent)


def environment_folder() -> str:
    """The same as a virtual environment is named to make (VENV=)."""
    return str(Path(python()).parent.parent)


@dataclass
class Asked:
    """What a fork is to run, and the descriptors of its standard streams."""

    words: list[str]
    environment: dict[str, str]
    folder: str
    parent: int
    streams: list[int]


def receive(line: socket.socket) -> Asked:
    """One client's request."""
    head, streams, _, _ = socket.recv_fds(line, 8, 3)
    with line.makefile("rb") as file:
        return Asked(**json.loads(file.read(int.from_bytes(head, "big"))), streams=streams)


def serve(folder: Path) -> Asked | None:
    """Fork for each request until the process of `keep` has ended; in a fork, what it is to run."""
    waiting: dict[int, socket.socket] = {}
    ended, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wakes)
    with (
        socket.socket(socket.AF_UNIX) as listener,
        selectors.DefaultSelector() as events,
        (folder / "alive").open("rb", buffering=0) as alive,
    ):
        listener.bind(str(folder / "bound"))
        listener.listen(64)
        (folder / "bound").rename(folder / "line")  # whoever sees it can connect
        for file in (listener, alive, ended):
            events.register(file, selectors.EVENT_READ)
        while True:
            for key, _ in events.select():
                if key.fileobj is alive:
                    for pid in waiting:
                        os.kill(pid, signal.SIGKILL)
                    return None
                if key.fileobj is ended:
                    os.read(ended, 4096)
                    for pid, status in ended_children():
                        line = waiting.pop(pid)
                        with contextlib.suppress(OSError):  # a client that was killed
                            line.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                        with contextlib.suppress(KeyError):
                            events.unregister(line)
                        line.close()
                elif key.fileobj is listener:
                    line = listener.accept()[0]
                    asked = receive(line)
                    if not (pid := os.fork()):
                        signal.set_wakeup_fd(-1)
                        for other in (*waiting.values(), line):
                            other.close()
                        os.close(ended), os.close(wakes)
                        return asked
                    for stream in asked.streams:
                        os.close(stream)
                    line.sendall(f"{pid}\n".encode())
                    waiting[pid] = line
                    events.register(line, selectors.EVENT_READ)
                else:  # a client says no more: it was killed, and its fork ends with it
                    events.unregister(key.fileobj)
                    for pid in [pid for pid, line in waiting.items() if line is key.fileobj]:
                        os.kill(pid, signal.SIGKILL)


def ended_children() -> list[tuple[int, int]]:
    """Process ids and statuses of the forks that have ended since the last call."""
    found = []
    with contextlib.suppress(ChildProcessError):
        while (one := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(one)
    return found


def become(asked: Asked, program: str, path: list[str]) -> None:
    """Make this fork what a Python is after its start: streams, folder, environment, signals, path and words."""
    for target, stream in enumerate(asked.streams):
        os.dup2(stream, target)
        os.close(stream)
    os.chdir(asked.folder)
    os.environ.clear()
    os.environ.update(asked.environment)
    parent, _, number = asked.environment.get(PARENT_VARIABLE, "").partition(":")
    if parent == str(asked.parent):  # the process that it was to end with is the client's parent, not its own
        os.environ[PARENT_VARIABLE] = f"{os.getppid()}:{number}"
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import numpy as np

    random.seed()  # each process draws its own where nothing is seeded
    np.random.seed()
    sys.executable = program
    words = list(asked.words)
    if words[0] == "-u":
        words.pop(0)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    first = str(Path(words[0]).resolve().parent) if not words[0].startswith("-") else asked.folder
    sys.path[:] = [first, *given, *path]
    sys.argv[:] = words if not words[0].startswith("-") else words[1:]
    for entry in given:
        if Path(entry, "sitecustomize.py").is_file():
            runpy.run_path(f"{entry}/sitecustomize.py")


def run(asked: Asked) -> None:
    """Run the module, the code or the file."""
    words = asked.words[1:] if asked.words[0] == "-u" else asked.words
    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv[0] = "-c"
        space: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(words[1], "<string>", "exec"), space)
    else:
        runpy.run_path(words[0], run_name="__main__")


def main(folder: Path) -> None:
    """Import, then serve; a fork comes out of `serve` to run what it was asked for, and ends as any program does."""
    for module in (*MODULES, *(["deepspeed"] if find_spec("deepspeed") else [])):
        importlib.import_module(module)
    path = [entry for entry in sys.path if entry not in ("", str(ROOT))]
    gc.collect()
    gc.freeze()  # a fork's collector does not copy what it never frees, nor walk through it when its run has ended
    gc.unfreeze = lambda: None
    asked = serve(folder)
    if asked is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        become(asked, str(folder / "bin" / "python"), path)
        run(asked)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
