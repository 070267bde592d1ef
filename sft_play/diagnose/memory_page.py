"""The page of `make memory-check`: the run, a table with the prediction beside it, RAM, warnings; once or renewed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from rich.table import Table

from sft_play.diagnose.memory_check import MemorySeen, Prediction
from sft_play.diagnose.pages import gib, lines_of, table_of
from sft_play.log import escape_control, one_line
from sft_play.units import format_size

# Seconds between two looks.
REFRESH_S = 3.0


def memory_lines(check: MemorySeen) -> list[str]:
    """What a person reads: the run, one table with the prediction beside it, RAM, warnings."""
    page = [*check.said]
    right = _prediction_table(check.prediction) if check.prediction else None
    left = _rank_table(check) if _shows_ranks(check) else _gpu_table(check)
    sizes = [[moment, format_size(size)] for moment, size in check.measured.items()]
    measured = table_of(("measured\nper rank", ""), sizes, left=(0,)) if sizes else None
    if any((left, right, measured)):
        grid = Table.grid(padding=(0, 4))
        grid.add_row(*(part for part in (left, right, measured) if part is not None))
        page += ["", *lines_of(grid), ""]
    if (prediction := check.prediction) is not None:
        batch = f"micro-batch {prediction.micro_batch} x accum {prediction.grad_accum}"
        where = f"{one_line(prediction.layout)} over {prediction.ranks} rank(s)"
        page.append(f"Plan: {where}, {batch}; sizes in units of 2**30 bytes")
        if not prediction.on_gpu:
            page.append("RSS has the libraries too: what is predicted of it is resident and libraries together")
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
    rows = [
        [str(use.rank), str(use.pid), gib(use.rss_bytes, digits=2), gib(use.peak_rss_bytes, digits=2)]
        for use in check.ranks
    ]
    return table_of(("rank", "pid", "RSS\nGiB", "peak\nseen"), rows)


def _prediction_table(prediction: Prediction) -> Table:
    terms = [(name.replace("_", " "), size) for name, size in prediction.terms.items() if size > 0]
    word, beside = ("reserved", "context, NCCL") if prediction.on_gpu else ("resident", "libraries")
    sums = [
        ("= allocated", prediction.allocated),
        (f"= {word} in {prediction.moment}", prediction.reserved),
        ("+ margin", prediction.margin),
        (f"+ {beside}", prediction.outside_allocator),
        ("= needed", prediction.required),
    ]
    rows = [[name, format_size(size)] for name, size in [*terms, *sums] if size > 0]
    return table_of(("predicted\nper rank", ""), rows, left=(0,))


def watch(
    take: Callable[[], MemorySeen], *, write: Callable[[MemorySeen], None], pause: Callable[[float], None] = time.sleep
) -> MemorySeen | None:
    """Look again and again until Ctrl-C, and `write` each look; the last one."""
    last: MemorySeen | None = None
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            last = take()
            write(last)
            pause(REFRESH_S)
    return last
