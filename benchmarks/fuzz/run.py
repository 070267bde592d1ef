"""Cases in processes of their own, started anew after one that it did not survive; what was wrong, in order."""

import contextlib
import importlib
import io
import json
import logging
import os
import random
import resource
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

PART_MODULES = {"yaml": "configs", "rows": "rows", "words": "words", "make": "targets", "serve": "asking",
           "templates": "templates"}  # fmt: skip
MAX_CASE_SECONDS = 60.0
"""Longest time for one case, on a machine that others use too; a rendering has limits of 5 s of its own, and masks
render a row up to a dozen times."""
MAX_CASE_BYTES = 1536 * 2**20
"""Most by which a single case may raise this process's peak."""

CaseRunner = Callable[[random.Random, Path], bool]
"""Makes one case and tries it in an empty folder: True where it was accepted, False where it was refused.

Raises `FuzzFailure`, or whatever the toolkit lets through."""


class FuzzFailure(Exception):
    """What must not happen, in words."""


@dataclass(frozen=True)
class CaseResult:
    """One case, and what became of it: accepted, refused or wrong, with why."""

    part: str
    number: int
    verdict: str
    seconds: float = 0.0
    reason: str = ""


def run_cases(part: str, numbers: range, *, seed: int) -> Iterator[CaseResult]:
    module = importlib.import_module(f"benchmarks.fuzz.{PART_MODULES[part]}")
    with module.case_runner() as judge:
        for number in numbers:
            with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
                yield _run_case(judge, part, number, random.Random(f"{seed}/{part}/{number}"), Path(folder))


def _run_case(run_case: CaseRunner, part: str, number: int, draw: random.Random, folder: Path) -> CaseResult:
    start_time, peak_before, working_folder = time.monotonic(), _peak_bytes(), Path.cwd()
    verdict, reason = "wrong", ""
    os.chdir(folder)
    try:
        verdict = "accepted" if run_case(draw, folder) else "refused"
        if (folder / "pwned").exists():
            raise FuzzFailure("a value was run as a command")
        if _peak_bytes() - peak_before > MAX_CASE_BYTES:
            raise FuzzFailure(f"it took {(_peak_bytes() - peak_before) / 2**20:,.0f} MiB")
        if time.monotonic() - start_time > MAX_CASE_SECONDS:
            raise FuzzFailure(f"it took {time.monotonic() - start_time:.0f} s")
    except FuzzFailure as error:
        verdict, reason = "wrong", str(error)
    except (Exception, SystemExit, KeyboardInterrupt):
        verdict, reason = "wrong", traceback.format_exc()
    finally:
        os.chdir(working_folder)
    return CaseResult(part, number, verdict, round(time.monotonic() - start_time, 3), reason)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def run_cases_isolated(part: str, numbers: range, *, seed: int) -> Iterator[CaseResult]:
    """The same in processes of their own: a case that hangs or crashes its process is wrong, and the rest is tried."""
    next_case = numbers.start
    while next_case < numbers.stop:
        command = [sys.executable, "-m", "benchmarks.fuzz", "--worker", part]
        command += map(str, (seed, next_case, numbers.stop))
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            for result in _read_results(process):
                next_case = result.number + 1
                yield result
            process.kill()
            exit_code = process.wait()
        if next_case < numbers.stop:
            reason = f"its process ended with {exit_code}, or said nothing for {2 * MAX_CASE_SECONDS:.0f} s"
            yield CaseResult(part, next_case, "wrong", reason=reason)
            next_case += 1


def _read_results(process: subprocess.Popen[bytes]) -> Iterator[CaseResult]:
    assert process.stdout is not None
    buffer, limit = b"", 4 * MAX_CASE_SECONDS  # at first it imports libraries and may make a model
    while select.select([process.stdout], [], [], limit)[0]:
        data = os.read(process.stdout.fileno(), 2**16)
        if not data:
            return
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            limit = 2 * MAX_CASE_SECONDS
            yield CaseResult(**json.loads(line))


def run_worker(part: str, seed: int, start: int, stop: int) -> None:
    """Try cases and write one line about each; nothing else reaches standard output."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for result in run_cases(part, range(start, stop), seed=seed):
        out.write(json.dumps(asdict(result)) + "\n")
        out.flush()


@contextlib.contextmanager
def isolated_environment() -> Iterator[None]:
    """No network, no user's caches or tokens, no variables of make: what a case finds is what it made."""
    from sft_play.variables import VARIABLES

    with tempfile.TemporaryDirectory(prefix="fuzz-home-") as home, mock.patch.dict(os.environ):
        for name in (*VARIABLES, "HF_TOKEN", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "SFT_PLAY_MAKE"):
            os.environ.pop(name, None)
        os.environ.update(
            HOME=home, HF_HOME=f"{home}/hf", SFT_PLAY_CACHE=f"{home}/cache", HF_HUB_OFFLINE="1", NO_COLOR="1",
            OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false",
        )  # fmt: skip
        yield


def require_words(error: Exception) -> None:
    """Raises FuzzFailure where a refusal says nothing."""
    if not str(error).strip():
        raise FuzzFailure("refused without a word") from error


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run_command(arguments: list[str], **variables: str) -> tuple[int, str, str]:
    """A command line in this process: exit code, standard output, standard error."""
    from sft_play.cli import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    try:
        with mock.patch.dict(os.environ, variables), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
    except SystemExit as error:  # --help
        code = int(error.code or 0)
    finally:
        logging.getLogger().handlers[:] = []
    return code, out.getvalue(), err.getvalue()


def require_consistent_exit(code: int, out: str, err: str, *, is_json: bool) -> None:
    """Raises FuzzFailure where exit code and words do not agree."""
    answer: dict[str, Any] = {}
    if is_json:
        try:
            answer = json.loads(out)
        except ValueError:
            raise FuzzFailure(f"with JSON=1 it printed {out[:2000]!r}") from None
        if answer.get("ok") is not (code == 0):
            raise FuzzFailure(f"ok is {answer.get('ok')}, and the exit code {code}")
    if code not in (0, 2, 3):
        raise FuzzFailure(f"exit code {code}: {err[-2000:]}")
    if code == 0 and "] error: " in err:
        raise FuzzFailure(f"exit code 0 after an error: {err[-2000:]}")
    # what `check` found, and a plan that does not fit, are answers
    if code and "] error: " not in err and not out.strip():
        raise FuzzFailure(f"exit code {code} without a word: {err[-1000:]}")
