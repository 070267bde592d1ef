"""Cases in processes of their own, started anew after one that it did not survive; what was wrong, in order."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MODULES = {"yaml": "configs", "rows": "rows", "words": "words", "make": "targets", "serve": "asking",
           "templates": "templates"}  # fmt: skip
MOST_SECONDS = 60.0
"""Longest time for one case, on a machine that others use too; a rendering has limits of 5 s of its own, and masks
render a row up to a dozen times."""
MOST_BYTES = 1536 * 2**20
"""Most by which a single case may raise this process's peak."""

Judge = Callable[[random.Random, Path], bool]
"""Makes one case and tries it in an empty folder: True where it was accepted, False where it was refused.

Raises `Wrong`, or whatever the toolkit lets through."""


class Wrong(Exception):
    """What must not happen, in words."""


@dataclass(frozen=True)
class Tried:
    """One case, and what became of it: accepted, refused or wrong, with why."""

    part: str
    number: int
    verdict: str
    seconds: float = 0.0
    why: str = ""


def judges(part: str) -> AbstractContextManager[Judge]:
    """What makes and tries the cases of a part; open while they run."""
    return importlib.import_module(f"benchmarks.fuzz.{MODULES[part]}").judging()  # type: ignore[no-any-return]


def tried(part: str, numbers: range, *, seed: int) -> Iterator[Tried]:
    """The cases, one after the other, in this process."""
    with judges(part) as judge:
        for number in numbers:
            with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
                yield _try(judge, part, number, random.Random(f"{seed}/{part}/{number}"), Path(folder))


def _try(judge: Judge, part: str, number: int, draw: random.Random, folder: Path) -> Tried:
    begun, before, here = time.monotonic(), _peak_bytes(), Path.cwd()
    verdict, why = "wrong", ""
    os.chdir(folder)
    try:
        verdict = "accepted" if judge(draw, folder) else "refused"
        if (folder / "pwned").exists():
            raise Wrong("a value was run as a command")
        if _peak_bytes() - before > MOST_BYTES:
            raise Wrong(f"it took {(_peak_bytes() - before) / 2**20:,.0f} MiB")
        if time.monotonic() - begun > MOST_SECONDS:
            raise Wrong(f"it took {time.monotonic() - begun:.0f} s")
    except Wrong as error:
        verdict, why = "wrong", str(error)
    except (Exception, SystemExit, KeyboardInterrupt):
        verdict, why = "wrong", traceback.format_exc()
    finally:
        os.chdir(here)
    return Tried(part, number, verdict, round(time.monotonic() - begun, 3), why)


def _peak_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def tried_apart(part: str, numbers: range, *, seed: int) -> Iterator[Tried]:
    """The same in processes of their own: a case that hangs or crashes its process is wrong, and the rest is tried."""
    start = numbers.start
    while start < numbers.stop:
        words = [sys.executable, "-m", "benchmarks.fuzz", "--worker", part, str(seed), str(start), str(numbers.stop)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            for one in _lines_of(process):
                start = one.number + 1
                yield one
            process.kill()
            code = process.wait()
        if start < numbers.stop:
            why = f"its process ended with {code}, or said nothing for {2 * MOST_SECONDS:.0f} s"
            yield Tried(part, start, "wrong", why=why)
            start += 1


def _lines_of(process: subprocess.Popen[bytes]) -> Iterator[Tried]:
    assert process.stdout is not None
    buffer, limit = b"", 4 * MOST_SECONDS  # at first it imports libraries and may make a model
    while select.select([process.stdout], [], [], limit)[0]:
        data = os.read(process.stdout.fileno(), 2**16)
        if not data:
            return
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            limit = 2 * MOST_SECONDS
            yield Tried(**json.loads(line))


def worker(part: str, seed: int, start: int, stop: int) -> None:
    """Try cases and write one line about each; nothing else reaches standard output."""
    out = os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    for one in tried(part, range(start, stop), seed=seed):
        out.write(json.dumps(asdict(one)) + "\n")
        out.flush()


@contextlib.contextmanager
def own_surroundings() -> Iterator[None]:
    """No network, no user's caches or tokens, no variables of make: what a case finds is what it made."""
    from sft_play.process.variables import VARIABLES

    kept = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="fuzz-home-") as home:
        for name in (*VARIABLES, "HF_TOKEN", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "SFT_PLAY_MAKE"):
            os.environ.pop(name, None)
        os.environ.update(
            HOME=home, HF_HOME=f"{home}/hf", SFT_PLAY_CACHE=f"{home}/cache", HF_HUB_OFFLINE="1", NO_COLOR="1",
            OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false",
        )  # fmt: skip
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(kept)


def files_below(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def command(words: list[str], **variables: str) -> tuple[int, str, str]:
    """A command line in this process: exit code, standard output, standard error."""
    import io
    import logging

    from sft_play.cli import main

    out, err, before = io.StringIO(), io.StringIO(), dict(os.environ)
    os.environ.update(variables)
    root = logging.getLogger()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main(words)
            except SystemExit as error:  # --help
                code = int(error.code or 0)
    finally:
        os.environ.clear()
        os.environ.update(before)
        root.handlers[:] = []
    return code, out.getvalue(), err.getvalue()


def require_told(code: int, out: str, err: str, *, is_json: bool) -> None:
    """Raises Wrong where exit code and words do not agree."""
    told: dict[str, Any] = {}
    if is_json:
        try:
            told = json.loads(out)
        except ValueError:
            raise Wrong(f"with JSON=1 it printed {out[:2000]!r}") from None
        if told.get("ok") is not (code == 0):
            raise Wrong(f"ok is {told.get('ok')}, and the exit code {code}")
    if code not in (0, 2, 3):
        raise Wrong(f"exit code {code}: {err[-2000:]}")
    if code == 0 and "] error: " in err:
        raise Wrong(f"exit code 0 after an error: {err[-2000:]}")
    # what `check` found, and a plan that does not fit, are answers
    if code and "] error: " not in err and not out.strip():
        raise Wrong(f"exit code {code} without a word: {err[-1000:]}")
