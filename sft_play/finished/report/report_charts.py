"""The curves of a report: which there are, of a run that may have stages, sources and held-out splits."""

from __future__ import annotations

from dataclasses import replace

from sft_play.finished.report.charts import Chart, Curve
from sft_play.finished.report.record import Points, Record

_SPLITS = (("eval", "validation", 1), ("test", "test", 2))
"""Prefix in metrics.jsonl, name and colour of the held-out splits."""


def charts_of(record: Record) -> list[Chart]:
    """The curves of a run; a chart that the run cannot fill is left out."""
    stages = tuple(record.starts) if record.has_stages else ()
    curve = record.curve
    first, *others = record.parts
    has_gpu = any(part.on_gpu for part in (first, *others))
    held = "memory_allocated_gib" if has_gpu else "memory_resident_gib"
    speeds = [
        (start + step, part.summary.get("predicted_tokens_per_s") or 0.0)
        for part, (_, start) in zip(record.parts, record.starts, strict=True)
        for step in (1, part.steps)
    ]
    listed = [
        Chart("Loss", (Curve("training", curve("loss")), *_held_out(record, "loss")), may_be_log=True),
        Chart("Exact match", _held_out(record, "exact_match"), form=".0%", is_share=True),
        Chart("Loss by source", _by_source(record), may_be_log=True),
        Chart("Learning rate", (Curve("learning rate", curve("learning_rate")),), form=".2~g", from_zero=True),
        Chart("Gradient norm", (Curve("gradient norm", curve("grad_norm")),), may_be_log=True),
        Chart(
            "Tokens per second",
            (
                Curve("measured", curve("tokens_per_s")),
                Curve("predicted", [point for point in speeds if point[1]], None, dashed=True),
            ),
            form="~s", from_zero=True,
        ),
        Chart(
            "Memory of a rank, in GiB",
            (
                Curve("peak", curve("memory_peak_gib")),
                Curve("held", curve(held), 1),
                Curve("reserved", curve("memory_reserved_gib"), 2),
                Curve("predicted peak", curve("memory_predicted_gib"), None, dashed=True),
            ),
            from_zero=True,
        ),
        Chart("Padding", (Curve("padding", _if_it_varies(curve("padding_share"))),), form=".3~%", from_zero=True),
    ]  # fmt: skip
    charts = []
    for chart in listed:
        # a grey curve is what was predicted, and alone says nothing about the run
        filled = tuple(one for one in chart.curves if one.points)
        if any(one.colour is not None for one in filled):
            charts.append(replace(chart, curves=filled, stages=stages))
    return charts


def _if_it_varies(points: Points) -> Points:
    """No points where all have one value: rows without padding, which the summary says in a word."""
    return points if len({value for _, value in points}) > 1 else []


def _held_out(record: Record, figure: str) -> tuple[Curve, ...]:
    return tuple(
        Curve(name, record.curve(f"{prefix}_{figure}"), colour, marked=True) for prefix, name, colour in _SPLITS
    )


def _by_source(record: Record) -> tuple[Curve, ...]:
    names = record.names("loss_")
    training = [Curve(name.removeprefix("loss_"), record.curve(name), place) for place, name in enumerate(names)]
    held = [
        Curve(f"{name.removeprefix('eval_loss_')}, validation", record.curve(name),
              names.index(name.removeprefix("eval_")) if name.removeprefix("eval_") in names else None, marked=True)
        for name in record.names("eval_loss_")
    ]  # fmt: skip
    return (*training, *held)
