"""Jobs that are done by other processes, with their results in the order of the jobs."""

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
MIN_PARALLEL_BYTES = 4 << 20
MAX_WORKERS = 16
# Rows that are rendered and tokenised together, fewer where they are longer than RENDER_BATCH_CHARS.
RENDER_BATCH_ROWS = 256
# Characters of such a batch, more only in a single row: tokenising takes about 140 bytes of memory for each.
RENDER_BATCH_CHARS = 1 << 20
_MIN_PIECE_BYTES, _MAX_PIECE_BYTES = 256 << 10, 8 << 20
_PIECES_PER_WORKER = 8

_START_LOCK = threading.Lock()

WorkerRecipe = TypeVar("WorkerRecipe")
WorkerJob = TypeVar("WorkerJob")
WorkerResult = TypeVar("WorkerResult")


def total_file_bytes(parts: Iterable[FilePart]) -> int:
    """Bytes of the files; data sets of the hub count 0."""
    return sum(part.path.stat().st_size for part in parts if part.kind != "hub" and part.path.is_file())


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_count(requested_workers: int | str, total_bytes: int) -> int:
    """How many processes to use: data.workers, or with `auto` one for every core where that is faster."""
    if isinstance(requested_workers, int):
        return requested_workers
    return 1 if total_bytes < MIN_PARALLEL_BYTES else min(usable_cores(), MAX_WORKERS)


def split_for_workers(part: FilePart, *, workers: int, total_bytes: int) -> list[FilePart]:
    """Split a file into pieces for so many workers, small enough that all of them end at about the same time."""
    if workers == 1:
        return [part]
    size = total_bytes // (workers * _PIECES_PER_WORKER)
    return split_part(part, part_bytes=max(_MIN_PIECE_BYTES, min(_MAX_PIECE_BYTES, size)))


def run_jobs(
    jobs: Sequence[WorkerJob],
    make_worker: Callable[[WorkerRecipe], Callable[[WorkerJob], WorkerResult]],
    recipe: WorkerRecipe,
    *,
    workers: int,
) -> Iterator[WorkerResult]:
    """Results in the order of the jobs, made by `workers` processes. `make_worker`, a class or function of a module, is
    called once in each and returns what is called with each job. Raises DataError if one died, and what jobs raise."""
    context = multiprocessing.get_context("spawn")
    initializer_args = (pickle.dumps((make_worker, recipe)), os.getpid())
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=initializer_args)
    try:
        with hide_main_module():  # the workers start when jobs are submitted
            futures = [pool.submit(_run_job, job) for job in jobs]
        yield from (future.result() for future in futures)
    except BrokenProcessPool:
        raise DataError(
            "a process that prepared rows died (out of memory?); lower data.workers, such as data.workers=1"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def hide_main_module() -> Iterator[None]:
    """Keep processes started in this context from importing the running program: it may import torch, and a script
    without `if __name__ == "__main__"` would start over in each."""
    with _START_LOCK:  # one thread at a time, or the second would put back what the first one put there
        main_module = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main_module


# What a worker calls with each job; None in the parent.
_worker: Callable[[Any], Any] | None = None


def _start_worker(pickled_recipe: bytes, parent_pid: int) -> None:
    """Set up a worker process: it dies with its parent, leaves Ctrl-C to it, and tokenises in one thread."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent_pid, signal.SIGKILL)  # a parent that is killed cannot end its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process for each core: threads would only compete
    make_worker, recipe = pickle.loads(pickled_recipe)
    _worker = make_worker(recipe)


def _run_job(job: Any) -> Any:
    assert _worker is not None
    with translate_library_errors():  # a panic could not be sent to the parent
        return _worker(job)
