"""The page of `make memory-check`: the run, a table with the prediction beside it, RAM, warnings; once or renewed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from rich.table import Table

from sft_play.diagnose.memory_check import MemoryPrediction, MemorySnapshot
from sft_play.log import escape_control, one_line
from sft_play.tables import build_table, gib_or_na, render_lines
from sft_play.units import format_size

# Seconds between two looks.
REFRESH_S = 3.0


def format_memory_snapshot(snapshot: MemorySnapshot) -> list[str]:
    """What a person reads: the run, one table with the prediction beside it, RAM, warnings."""
    lines = [*snapshot.said]
    prediction_table = _prediction_table(snapshot.prediction) if snapshot.prediction else None
    use_table = _rank_table(snapshot) if _should_show_ranks(snapshot) else _gpu_table(snapshot)
    sizes = [[moment, format_size(size)] for moment, size in snapshot.measured.items()]
    measured_table = build_table(("measured\nper rank", ""), sizes, text_columns=(0,)) if sizes else None
    if any((use_table, prediction_table, measured_table)):
        grid = Table.grid(padding=(0, 4))
        grid.add_row(*(table for table in (use_table, prediction_table, measured_table) if table is not None))
        lines += ["", *render_lines(grid), ""]
    if (prediction := snapshot.prediction) is not None:
        batch = f"micro-batch {prediction.micro_batch} x accum {prediction.grad_accum}"
        layout = f"{one_line(prediction.layout)} over {prediction.ranks} rank(s)"
        lines.append(f"Plan: {layout}, {batch}; sizes in units of 2**30 bytes")
        if not prediction.on_gpu:
            lines.append("RSS has the libraries too: what is predicted of it is resident and libraries together")
    # `n/a` in the table needs a reason: without one it looks like a run that holds nothing
    if any(use.ranks and use.run_bytes is None for use in snapshot.gpus) and not _should_show_ranks(snapshot):
        lines.append("n/a: the driver names no process of this run there, as in a container, or before it uses the GPU")
    run_text = f"; this run holds {gib_or_na(snapshot.ram.run_bytes, digits=2)}" if snapshot.ranks else ""
    lines.append(
        f"RAM: {gib_or_na(snapshot.ram.total_bytes)} GiB, {gib_or_na(snapshot.ram.free_bytes)} free{run_text}"
        + ("" if snapshot.gpus else "; no GPU here")
    )
    lines += [f"warning: {text}" for text in snapshot.warnings]
    return [escape_control(line) for line in lines]


def _should_show_ranks(snapshot: MemorySnapshot) -> bool:
    if not snapshot.ranks:
        return False
    return not snapshot.gpus or (snapshot.prediction is not None and not snapshot.prediction.on_gpu)


def _gpu_table(snapshot: MemorySnapshot) -> Table | None:
    if not snapshot.gpus:
        return None
    headers = ("GPU", "rank", "total", "this\nrun", "others", "free", "peak\nseen")
    rows = []
    for use in snapshot.gpus:
        sizes = (use.run_bytes, use.others_bytes, use.free_bytes, use.peak_bytes)
        ranks = ",".join(map(str, use.ranks)) or "-"
        rows.append([str(use.index), ranks, gib_or_na(use.total_bytes), *(gib_or_na(size, digits=2) for size in sizes)])
    return build_table(headers, rows)


def _rank_table(snapshot: MemorySnapshot) -> Table:
    rows = [
        [str(use.rank), str(use.pid), gib_or_na(use.rss_bytes, digits=2), gib_or_na(use.peak_rss_bytes, digits=2)]
        for use in snapshot.ranks
    ]
    return build_table(("rank", "pid", "RSS\nGiB", "peak\nseen"), rows)


def _prediction_table(prediction: MemoryPrediction) -> Table:
    terms = [(name.replace("_", " "), size) for name, size in prediction.terms.items() if size > 0]
    total_word, outside_words = ("reserved", "context, NCCL") if prediction.on_gpu else ("resident", "libraries")
    sums = [
        ("= allocated", prediction.allocated),
        (f"= {total_word} in {prediction.moment}", prediction.reserved),
        ("+ margin", prediction.margin),
        (f"+ {outside_words}", prediction.outside_allocator),
        ("= needed", prediction.required),
    ]
    rows = [[name, format_size(size)] for name, size in [*terms, *sums] if size > 0]
    return build_table(("predicted\nper rank", ""), rows, text_columns=(0,))


def watch_memory(
    read_snapshot: Callable[[], MemorySnapshot],
    *,
    show_snapshot: Callable[[MemorySnapshot], None],
    pause: Callable[[float], None] = time.sleep,
) -> MemorySnapshot | None:
    """Take snapshots until Ctrl-C, and show each; returns the last one."""
    last_snapshot: MemorySnapshot | None = None
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            last_snapshot = read_snapshot()
            show_snapshot(last_snapshot)
            pause(REFRESH_S)
    return last_snapshot
