"""Jobs that are done by other processes, with their results in the order of the jobs."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from sft_play.data.sources.files import FilePart, split_part
from sft_play.errors import DataError, translate_library_errors
from sft_play.process.signals import die_with_parent

# Fewer bytes of data are prepared in this process, whose tokenizer has threads: starting others takes longer.
FEW_BYTES = 4 << 20
MOST_WORKERS = 16
# Rows that are rendered and tokenised together, fewer where they are longer than BATCH_CHARS.
BATCH_ROWS = 256
# Characters of such a batch, more only in a single row: tokenising takes about 140 bytes of memory for each.
BATCH_CHARS = 1 << 20
_SMALLEST_PIECE, _LARGEST_PIECE = 256 << 10, 8 << 20
_PIECES_FOR_EACH = 8

_STARTING = threading.Lock()

Recipe = TypeVar("Recipe")
Job = TypeVar("Job")
Result = TypeVar("Result")


def bytes_of(parts: Iterable[FilePart]) -> int:
    """Bytes of the files; data sets of the hub count 0."""
    return sum(part.path.stat().st_size for part in parts if part.kind != "hub" and part.path.is_file())


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def how_many(asked: int | str, total_bytes: int) -> int:
    """How many processes to use: data.workers, or with `auto` one for every core where that is faster."""
    if isinstance(asked, int):
        return asked
    return 1 if total_bytes < FEW_BYTES else min(cores(), MOST_WORKERS)


def file_pieces(part: FilePart, *, count: int, total_bytes: int) -> list[FilePart]:
    """A file in pieces for so many processes: small enough that all of them end at about the same time."""
    if count == 1:
        return [part]
    size = total_bytes // (count * _PIECES_FOR_EACH)
    return split_part(part, part_bytes=max(_SMALLEST_PIECE, min(_LARGEST_PIECE, size)))


def together(
    jobs: Sequence[Job], begin: Callable[[Recipe], Callable[[Job], Result]], recipe: Recipe, *, count: int
) -> Iterator[Result]:
    """Results in the order of the jobs, made by `count` processes. `begin`, a class or function of a module, is called
    once in each and returns what is called with each job. Raises DataError where one died, and what a job raises."""
    context = multiprocessing.get_context("spawn")
    sent = (pickle.dumps((begin, recipe)), os.getpid())
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_start_worker, initargs=sent)
    try:
        with without_program():  # the workers start when jobs are submitted
            futures = [pool.submit(_work, job) for job in jobs]
        yield from (future.result() for future in futures)
    except BrokenProcessPool:
        raise DataError(
            "a process that prepared rows died (out of memory?); lower data.workers, such as data.workers=1"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def without_program() -> Iterator[None]:
    """Processes that are started inside do not import the program that runs here: it may import torch, and a script
    without `if __name__ == "__main__"` would start over in each."""
    with _STARTING:  # one thread at a time, or the second would put back what the first one put there
        program = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = program


# What a worker calls with each job; None in the parent.
_do_job: Callable[[Any], Any] | None = None


def _start_worker(sent: bytes, parent: int) -> None:
    """Start of a worker: it ends with its parent, leaves Ctrl-C to it, and tokenises in one thread."""
    global _do_job
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent, signal.SIGKILL)  # a parent that is killed cannot end its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process for each core: threads would only compete
    begin, recipe = pickle.loads(sent)
    _do_job = begin(recipe)


def _work(job: Any) -> Any:
    assert _do_job is not None
    with translate_library_errors():  # a panic could not be sent to the parent
        return _do_job(job)
