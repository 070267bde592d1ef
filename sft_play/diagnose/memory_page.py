"""The page of `make memory-check`: the run, a table with the prediction beside it, RAM, warnings; once or renewed."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sft_play.diagnose.memory_check import MemorySeen, Prediction
from sft_play.diagnose.pages import gib, lines_of, sized, table_of
from sft_play.log import escape_control, one_line

REFRESH_S = 2.0
"""How often the table on a terminal is refreshed."""
BLOCK_S = 5.0
"""How often a block of lines is written where the output is not a terminal."""


def memory_lines(check: MemorySeen) -> list[str]:
    """What a person reads: the run, one table with the prediction beside it, RAM, warnings."""
    page = [*check.said]
    right = _prediction_table(check.prediction) if check.prediction else None
    left = _rank_table(check) if _shows_ranks(check) else _gpu_table(check)
    if left is not None or right is not None:
        grid = Table.grid(padding=(0, 4))
        grid.add_row(*(part for part in (left, right) if part is not None))
        page += ["", *lines_of(grid), ""]
    if (prediction := check.prediction) is not None:
        batch = f"micro-batch {prediction.micro_batch} x accum {prediction.grad_accum}"
        where = f"{one_line(prediction.layout)} over {prediction.ranks} rank(s)"
        page.append(f"Plan: {where}, {batch}; sizes in units of 2**30 bytes")
        if not prediction.on_gpu:
            page.append("The prediction comes on top of what a process holds after its imports")
    # `n/a` in the table needs a reason: without one it looks like a run that holds nothing
    if any(use.ranks and use.run_bytes is None for use in check.gpus) and not _shows_ranks(check):
        page.append("n/a: the driver names no process of this run there, as in a container, or before it uses the GPU")
    run = f"; this run holds {gib(check.ram.run_bytes, digits=2)}" if check.ranks else ""
    page.append(
        f"RAM: {gib(check.ram.total_bytes)} GiB, {gib(check.ram.free_bytes)} free{run}"
        + ("" if check.gpus else "; no GPU here")
    )
    page += [f"warning: {text}" for text in check.warnings]
    return [escape_control(line) for line in page]


def _shows_ranks(check: MemorySeen) -> bool:
    if not check.ranks:
        return False
    return not check.gpus or (check.prediction is not None and not check.prediction.on_gpu)


def _gpu_table(check: MemorySeen) -> Table | None:
    if not check.gpus:
        return None
    heads = ("GPU", "rank", "total", "this\nrun", "others", "free", "peak\nseen")
    rows = []
    for use in check.gpus:
        sizes = (use.run_bytes, use.others_bytes, use.free_bytes, use.peak_bytes)
        ranks = ",".join(map(str, use.ranks)) or "-"
        rows.append([str(use.index), ranks, gib(use.total_bytes), *(gib(size, digits=2) for size in sizes)])
    return table_of(heads, rows)


def _rank_table(check: MemorySeen) -> Table:
    heads = ("rank", "pid", "RSS\nGiB", "peak\nGiB", "workers", "their\nGiB")
    rows = []
    for use in check.ranks:
        own, peak, theirs = (gib(size, digits=2) for size in (use.rss_bytes, use.peak_rss_bytes, use.workers_rss_bytes))
        rows.append([str(use.rank), str(use.pid), own, peak, str(use.workers), theirs])
    return table_of(heads, rows)


def _prediction_table(prediction: Prediction) -> Table:
    terms = [(name.replace("_", " "), size) for name, size in prediction.terms.items() if size > 0]
    word = "reserved" if prediction.on_gpu else "resident"
    sums = [
        ("= allocated", prediction.allocated),
        (f"= {word}", prediction.reserved),
        ("+ margin", prediction.margin),
        ("+ context, NCCL", prediction.outside_allocator),
        ("= needed", prediction.required),
    ]
    rows = [[name, sized(size)] for name, size in [*terms, *sums] if size > 0]
    return table_of(("predicted\nper rank", ""), rows, left=(0,))


def watch(
    take: Callable[[], MemorySeen],
    *,
    write: Callable[[MemorySeen], None],
    console: Console | None = None,
    rounds: int | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> MemorySeen | None:
    """Look again and again until Ctrl-C (or for so many rounds); the last look.

    On a terminal (`console`) one table is renewed in place; elsewhere `write` gets each look.
    """
    last: MemorySeen | None = None
    table = Live(console=console, auto_refresh=False, vertical_overflow="visible") if console else None
    with contextlib.suppress(KeyboardInterrupt), table or contextlib.nullcontext() as live:
        for done in itertools.count(1):
            last = take()
            if live is None:
                write(last)
            else:
                live.update(Text("\n".join([*memory_lines(last), f"{last.time}; Ctrl-C ends this"])), refresh=True)
            if done == rounds:
                break
            pause(REFRESH_S if live is not None else BLOCK_S)
    return last


def terminal(stream: TextIO) -> Console | None:
    """The terminal that a stream is; None where it is a file or a pipe."""
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    return console if console.is_terminal else None
