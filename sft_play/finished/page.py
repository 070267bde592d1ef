"""One self-contained HTML page (`page.html.jinja`): tables, charts and texts; and a run's curves as
SVG and as text.
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sft_play.errors import ConfigError
from sft_play.finished.record import Points, RunRecord
from sft_play.finished.run import translate_write_errors
from sft_play.log import escape_control, one_line, redact, secret_values
from sft_play.runs.files import write_text

# The curves of a run: as text in the terminal, and as SVG, which vl-convert draws from Vega-Lite
# specifications in a process of its own.
#
# The specifications are written here as plain data. altair would write the same JSON: importing it
# and letting it check seven charts took 0.9 s more than the 1.3 s of drawing (altair 6.3,
# vl-convert 1.9, one core of a server's EPYC). The process of its own keeps the JavaScript engine's
# memory and threads, and its end where it may not reserve address space (`ulimit -v`), out of a
# process that has just trained.
COLOURS = ("#4c8bf5", "#f28e2b", "#3aa655", "#d1495b", "#9467bd", "#17a2b8", "#b58900", "#e377c2", "#7f7f7f", "#8c564b")
GREY = "#8a8a8a"
# Of a curve: neighbouring points of a longer one are averaged. A chart is about 400 pixels wide.
_MAX_POINTS = 300
# Largest over smallest value from which a loss is shown on a logarithmic axis.
_LOG_SCALE_RATIO = 20
_DRAW_TIMEOUT_S = 120
_DRAW_PROGRAM = """
import json, sys
import vl_convert
json.dump([vl_convert.vegalite_to_svg(spec, allowed_base_urls=[]) for spec in json.load(sys.stdin)], sys.stdout)
"""


class ChartError(Exception):
    """The charts cannot be drawn here; the text says why."""


@dataclass(frozen=True)
class Curve:
    """A named curve. `colour_index` is that in COLOURS, None is grey. `shows_points`: with its points, joined where
    there are more than two."""

    name: str
    points: Points
    colour_index: int | None = 0
    shows_points: bool = False
    is_dashed: bool = False

    @property
    def is_joined(self) -> bool:
        """True if its points are joined by a line."""
        return not self.shows_points or len(self.points) > 2


@dataclass(frozen=True)
class Chart:
    """Curves in one frame. `tick_format`: d3's number format of the vertical axis (`g` would write a 10 as 1e+1)."""

    title: str
    curves: tuple[Curve, ...]
    tick_format: str = ",~r"
    starts_at_zero: bool = False
    is_share: bool = False
    may_use_log: bool = False
    stage_starts: tuple[int, ...] = ()
    has_legend: bool = True

    @property
    def uses_log_scale(self) -> bool:
        """True if the vertical axis is logarithmic."""
        values = [value for curve in self.curves for _, value in curve.points]
        return self.may_use_log and min(values) > 0 and max(values) / min(values) >= _LOG_SCALE_RATIO

    @property
    def heading(self) -> str:
        """The title, with the kind of axis."""
        return f"{self.title} (logarithmic)" if self.uses_log_scale else self.title


def draw_charts(charts: Sequence[Chart]) -> list[str]:
    """An SVG for each chart; raises ChartError where vl-convert is not installed, or its process failed."""
    if not charts:
        return []
    specs = json.dumps([_vega_spec(chart) for chart in charts])
    try:
        # -P: a json.py in the working folder is not imported
        process = subprocess.run(
            [sys.executable, "-P", "-c", _DRAW_PROGRAM], input=specs, capture_output=True, text=True, encoding="utf-8",
            timeout=_DRAW_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ChartError(f"the process that draws them: {one_line(str(error))}") from None
    if process.returncode:
        error_line = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise ChartError(f"the process that draws them ended with {process.returncode}: {one_line(error_line)}")
    svgs: list[str] = json.loads(process.stdout)
    return svgs


def thin_points(points: Points, max_points: int = _MAX_POINTS) -> list[tuple[float, float]]:
    """At most so many points: of each group of neighbours the mean step and value; the first and the last one stay."""
    inner = points[1:-1]
    group_size = math.ceil(len(inner) / max(1, max_points - 2))
    if group_size <= 1:
        return list(points)
    groups = [inner[offset : offset + group_size] for offset in range(0, len(inner), group_size)]
    means = [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]
    return [points[0], *means, points[-1]]


def _vega_spec(chart: Chart) -> dict[str, Any]:
    names: list[str] = []
    for curve in chart.curves:
        curve_name = _plain_text(curve.name)
        names.append(f"{curve_name} ({len(names) + 1})" if curve_name in names else curve_name)
    colours = [
        GREY if curve.colour_index is None else COLOURS[curve.colour_index % len(COLOURS)] for curve in chart.curves
    ]
    legend = {"orient": "top", "title": None, "labelLimit": 380, "columns": 3}
    scale: dict[str, Any] = {"domain": names, "range": colours}
    colour: dict[str, Any] = {"field": "name", "type": "nominal", "sort": names, "scale": scale}
    colour["legend"] = legend if chart.has_legend and len(names) > 1 else None
    scale = {"type": "log", "nice": False} if chart.uses_log_scale else {"zero": chart.starts_at_zero, "nice": True}
    if chart.is_share:
        scale = {"domain": [0, 1]}
    y: dict[str, Any] = {"field": "value", "type": "quantitative", "title": None, "scale": scale}
    y["axis"] = {
        "format": chart.tick_format,
        **({"values": _log_ticks(chart)} if chart.uses_log_scale else {"tickCount": 5}),
    }
    x: dict[str, Any] = {"field": "step", "type": "quantitative", "title": "step"}
    x |= {"scale": {"nice": False, "zero": False}, "axis": {"format": "~s", "tickCount": 6}}
    layers = [_vega_layer(curve, name, x, y, colour) for curve, name in zip(chart.curves, names, strict=True)]
    if len(chart.stage_starts) > 1:
        mark = {"type": "rule", "color": GREY, "strokeDash": [2, 3]}
        data = {"values": [{"step": first_step} for first_step in chart.stage_starts]}
        layers.append({"data": data, "mark": mark, "encoding": {"x": x}})
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": 420,
        "height": 230,
        "autosize": {"type": "fit", "contains": "padding"},
        "background": "transparent",
        "layer": layers,
        "config": {
            "view": {"stroke": None},
            # currentColor: the page's own text colour, so that a dark page has light axes
            "axis": {
                "labelColor": "currentColor", "titleColor": "currentColor", "gridColor": GREY, "gridOpacity": 0.25,
                "domainColor": GREY, "tickColor": GREY, "labelFontSize": 11, "titleFontWeight": "normal",
            },
            "legend": {
                "labelColor": "currentColor", "labelFontSize": 11, "symbolType": "stroke", "symbolStrokeWidth": 3,
            },
        },
    }  # fmt: skip


def _log_ticks(chart: Chart) -> list[float]:
    """1, 2 and 5 of each power of ten in the range, or the powers alone where there are many."""
    values = [value for curve in chart.curves for _, value in curve.points]
    low, high = min(values), max(values)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if high / low < 1e4 else (1,)
    return [tick for power in powers for digit in digits if low <= (tick := digit * 10.0**power) <= high]


def _vega_layer(
    curve: Curve, name: str, x: dict[str, Any], y: dict[str, Any], colour: dict[str, Any]
) -> dict[str, Any]:
    values = [{"step": step, "value": value, "name": name} for step, value in thin_points(curve.points)]
    if len(values) == 1 or not curve.is_joined:  # a line of one point is not drawn at all
        # a thick ring, which looks like a dot: the legend draws strokes
        mark: dict[str, Any] = {"type": "point", "filled": False, "strokeWidth": 3, "size": 16, "opacity": 1}
    else:
        mark = {"type": "line", "strokeWidth": 1.6, "point": curve.shows_points and {"size": 36}}
    if curve.is_dashed:
        mark["strokeDash"] = [5, 4]
    return {"data": {"values": values}, "mark": mark, "encoding": {"x": x, "y": y, "color": colour}}


def _plain_text(text: str) -> str:
    return one_line(redact(escape_control(text)), limit=60)


# --- the charts of a run ----------------------------------------------------------------------------------------------

# Prefix in metrics.jsonl, name and colour of the held-out splits.
_HELD_OUT_SPLITS = (("eval", "validation", 1), ("test", "test", 2))


def build_run_charts(record: RunRecord) -> list[Chart]:
    """The curves of a run; a chart that the run cannot fill is left out."""
    stage_starts = tuple(first_step for _, first_step in record.stage_starts) if record.has_stages else ()
    curve = record.curve
    held_key = "memory_allocated_gib" if any(part.is_on_gpu for part in record.parts) else "memory_resident_gib"
    padding = curve("padding_share")
    if len({value for _, value in padding}) == 1:  # rows without padding, which the summary says in a word
        padding = []
    speeds = [
        (start + step, speed)
        for part, (_, start) in zip(record.parts, record.stage_starts, strict=True)
        for step in (1, part.steps)
        if (speed := part.summary.get("predicted_tokens_per_s"))
    ]
    predicted = Curve("predicted", speeds, None, is_dashed=True)
    all_charts = [
        Chart("Loss", (Curve("training", curve("loss")), *_held_out_curves(record, "loss")), may_use_log=True),
        Chart("Exact match", _held_out_curves(record, "exact_match"), tick_format=".0%", is_share=True),
        Chart("Loss by source", _source_curves(record), may_use_log=True),
        Chart("Learning rate", (Curve("learning rate", curve("learning_rate")),), tick_format=".2~g",
        starts_at_zero=True),
        Chart("Gradient norm", (Curve("gradient norm", curve("grad_norm")),), may_use_log=True),
        Chart("Tokens per second", (Curve("measured", curve("tokens_per_s")), predicted), tick_format="~s",
        starts_at_zero=True),
        Chart(
            "Memory of a rank, in GiB",
            (
                Curve("peak", curve("memory_peak_gib")),
                Curve("held", curve(held_key), 1),
                Curve("reserved", curve("memory_reserved_gib"), 2),
                Curve("predicted peak", curve("memory_predicted_gib"), None, is_dashed=True),
            ),
            starts_at_zero=True,
        ),
        Chart("Padding", (Curve("padding", padding),), tick_format=".3~%", starts_at_zero=True),
    ]  # fmt: skip
    charts = []
    for chart in all_charts:
        # a grey curve is what was predicted, and alone says nothing about the run
        filled = tuple(chart_curve for chart_curve in chart.curves if chart_curve.points)
        if any(chart_curve.colour_index is not None for chart_curve in filled):
            charts.append(replace(chart, curves=filled, stage_starts=stage_starts))
    return charts


def _held_out_curves(record: RunRecord, metric: str) -> tuple[Curve, ...]:
    curves = {prefix: record.curve(f"{prefix}_{metric}") for prefix, _, _ in _HELD_OUT_SPLITS}
    return tuple(
        Curve(name, curves[prefix], colour_index, shows_points=True) for prefix, name, colour_index in _HELD_OUT_SPLITS
    )


def _source_curves(record: RunRecord) -> tuple[Curve, ...]:
    colour_indices = {name: colour_index for colour_index, name in enumerate(record.curve_names("loss_"))}
    training = [
        Curve(name.removeprefix("loss_"), record.curve(name), colour_index)
        for name, colour_index in colour_indices.items()
    ]
    held_out = []
    for name in record.curve_names("eval_loss_"):
        title, colour_index = (
            f"{name.removeprefix('eval_loss_')}, validation",
            colour_indices.get(name.removeprefix("eval_")),
        )
        held_out.append(Curve(title, record.curve(name), colour_index, shows_points=True))
    return (*training, *held_out)


# --- curves in the terminal, by plotext -------------------------------------------------------------------------------
PLOT_WIDTH, PLOT_HEIGHT = 80, 12
_PLOT_MARKERS = "*o+x#@"
_BOX_TO_ASCII = str.maketrans("┌┐└┘├┤┬┴┼─│", "+++++++++-|")


def plot_as_text(chart: Chart) -> list[str]:
    """A chart as lines of ASCII, a legend first; none where there is nothing to draw."""
    curves = [curve for curve in chart.curves if curve.points]
    if all(len(curve.points) < 2 for curve in curves):
        return []
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.plot_size(PLOT_WIDTH, PLOT_HEIGHT - 1)
    figure.theme("simple")
    legend = []
    for index, curve in enumerate(curves):
        marker = _PLOT_MARKERS[index % len(_PLOT_MARKERS)]
        steps, values = zip(*thin_points(curve.points, 2 * PLOT_WIDTH), strict=True)
        signal = figure.signal(list(steps), list(values), marker=plotext.marker(marker, "blue+"))
        figure.draw(signal if curve.shows_points else signal.lines())
        legend.append(f"{marker} {one_line(redact(curve.name), limit=24)}")
    figure.legend(False)
    if chart.uses_log_scale:
        figure.ruler("y").scale("log")
    first_step, last_step = min(curve.points[0][0] for curve in curves), max(curve.points[-1][0] for curve in curves)
    ticks = sorted({round(first_step + (last_step - first_step) * quarter / 4) for quarter in range(5)})  # whole steps
    figure.ruler("x").ticks(ticks, [f"{tick:,}" for tick in ticks])
    text = figure.build().string(True)
    lines = [f"{chart.heading}:  {'  '.join(legend)}", *text.rstrip("\n").splitlines()]
    return [line.translate(_BOX_TO_ASCII).rstrip() for line in lines]


# One self-contained HTML page (`page.html.jinja`): tables, charts, texts; readable on a phone, in
# print, in the dark.
#
# Everything that comes from data is escaped by jinja2, and redacted before that: once escaped, a
# secret with an `&` in it would no longer be recognised.
@dataclass(frozen=True)
class ReportTable:
    """A table; the first column is text, the others are aligned to the right if `has_numbers`."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    has_numbers: bool = True


@dataclass(frozen=True)
class AnsweredQuestion:
    """A question and texts about it: (label, text, mark), the mark being `good`, `bad` or empty."""

    question: str
    answers: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class ReportSection:
    """A part of the page. Everything in it is optional; what is empty is not shown."""

    title: str
    notes: Sequence[str] = ()
    pairs: Sequence[tuple[str, str]] = ()
    tables: Sequence[ReportTable] = ()
    charts: Sequence[tuple[str, str]] = ()
    legend: Sequence[tuple[str, str]] = ()
    samples: Sequence[AnsweredQuestion] = ()
    items: Sequence[str] = ()
    commands: str = ""
    folded: Sequence[tuple[str, str]] = ()
    """Long texts that are opened by a click: heading and text."""

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to show."""
        parts = (self.pairs, self.tables, self.charts, self.samples, self.items, self.commands, self.folded)
        return not any(parts)


def render_page(title: str, *, headline: Sequence[tuple[str, str]], sections: Sequence[ReportSection]) -> str:
    """Render the page. `headline`: the few figures that matter, as (name, value), at its top."""
    filled_sections = [section for section in sections if not section.is_empty]
    secrets = secret_values(os.environ.items())
    return str(_page_template().render(title=title, lead=headline, sections=filled_sections, secrets=secrets))


@functools.cache  # compiling it takes longer than a page
def _page_template() -> Any:
    """The template, which escapes and redacts whatever it is given."""
    from jinja2 import Environment, FileSystemLoader, pass_context
    from markupsafe import Markup

    @pass_context
    def redact_value(context: Any, value: Any) -> Any:
        if isinstance(value, Markup):
            return value
        return redact(escape_control(str(value)), secrets=context["secrets"])

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, finalize=redact_value, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["svg"] = Markup  # drawn by vl-convert, which escapes what a chart names
    return environment.get_template("page.html.jinja")


def write_page(path: Path, text: str) -> None:
    """Write a page aside and rename it; raises ConfigError where it cannot be written."""
    if path.is_dir():
        raise ConfigError(f"OUT={one_line(str(path))} is a folder; name a file, such as {path / 'report.html'}")
    with translate_write_errors(path):
        write_text(path, text)
