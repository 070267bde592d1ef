"""The curves of a run: as text in the terminal, and as SVG, which vl-convert draws from Vega-Lite specifications in a
process of its own.

The specifications are written here as plain data. altair would write the same JSON: importing it and letting it check
seven charts took 0.9 s more than the 1.3 s of drawing (altair 6.3, vl-convert 1.9, one core of a server's EPYC). The
process of its own keeps the JavaScript engine's memory and threads, and its end where it may not reserve address space
(`ulimit -v`), out of a process that has just trained.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sft_play.finished.report.record import Points, Record
from sft_play.log import escape_control, one_line, redact

COLOURS = ("#4c8bf5", "#f28e2b", "#3aa655", "#d1495b", "#9467bd", "#17a2b8", "#b58900", "#e377c2", "#7f7f7f", "#8c564b")
GREY = "#8a8a8a"
# Of a curve: neighbouring points of a longer one are averaged. A chart is about 400 pixels wide.
_MOST_POINTS = 300
# Largest over smallest value from which a loss is shown on a logarithmic axis.
_LOG_FROM = 20
_LIMIT_S = 120
_DRAW = """
import json, sys
import vl_convert
json.dump([vl_convert.vegalite_to_svg(spec, allowed_base_urls=[]) for spec in json.load(sys.stdin)], sys.stdout)
"""


class NotDrawn(Exception):
    """The charts cannot be drawn here; the text says why."""


@dataclass(frozen=True)
class Curve:
    """A named curve. `colour` is a place in COLOURS, None is grey. `marked` shows its points, joined where there are
    more than two."""

    name: str
    points: Points
    colour: int | None = 0
    marked: bool = False
    dashed: bool = False

    @property
    def is_joined(self) -> bool:
        """Whether its points are joined by a line."""
        return not self.marked or len(self.points) > 2


@dataclass(frozen=True)
class Chart:
    """Curves in one frame. `form` is d3's number format of the vertical axis (`g` would write a tick of 10 as 1e+1)."""

    title: str
    curves: tuple[Curve, ...]
    form: str = ",~r"
    from_zero: bool = False
    is_share: bool = False
    may_be_log: bool = False
    starts: tuple[int, ...] = ()
    with_legend: bool = True

    @property
    def is_log(self) -> bool:
        """Whether the vertical axis is logarithmic."""
        values = [value for curve in self.curves for _, value in curve.points]
        return self.may_be_log and min(values) > 0 and max(values) / min(values) >= _LOG_FROM

    @property
    def heading(self) -> str:
        """The title, with the kind of axis."""
        return f"{self.title} (logarithmic)" if self.is_log else self.title


def draw_charts(charts: Sequence[Chart]) -> list[str]:
    """An SVG for each chart; raises NotDrawn where vl-convert is not installed, or its process failed."""
    if not charts:
        return []
    specs = json.dumps([_spec(chart) for chart in charts])
    try:
        # -P: a json.py in the working folder is not imported
        ended = subprocess.run(
            [sys.executable, "-P", "-c", _DRAW], input=specs, capture_output=True, text=True, encoding="utf-8",
            timeout=_LIMIT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotDrawn(f"the process that draws them: {one_line(str(error))}") from None
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
        raise NotDrawn(f"the process that draws them ended with {ended.returncode}: {one_line(last)}")
    svgs: list[str] = json.loads(ended.stdout)
    return svgs


def thinned(points: Points, most: int = _MOST_POINTS) -> list[tuple[float, float]]:
    """At most so many points: of each group of neighbours the mean step and value; the first and the last one stay."""
    inner = points[1:-1]
    size = math.ceil(len(inner) / max(1, most - 2))
    if size <= 1:
        return list(points)
    groups = [inner[start : start + size] for start in range(0, len(inner), size)]
    means = [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]
    return [points[0], *means, points[-1]]


def _spec(chart: Chart) -> dict[str, Any]:
    names: list[str] = []
    for curve in chart.curves:
        named = _plain(curve.name)
        names.append(f"{named} ({len(names) + 1})" if named in names else named)
    colours = [GREY if curve.colour is None else COLOURS[curve.colour % len(COLOURS)] for curve in chart.curves]
    legend = {"orient": "top", "title": None, "labelLimit": 380, "columns": 3}
    scale: dict[str, Any] = {"domain": names, "range": colours}
    colour: dict[str, Any] = {"field": "name", "type": "nominal", "sort": names, "scale": scale}
    colour["legend"] = legend if chart.with_legend and len(names) > 1 else None
    scale = {"type": "log", "nice": False} if chart.is_log else {"zero": chart.from_zero, "nice": True}
    if chart.is_share:
        scale = {"domain": [0, 1]}
    y: dict[str, Any] = {"field": "value", "type": "quantitative", "title": None, "scale": scale}
    y["axis"] = {"format": chart.form, **({"values": _log_ticks(chart)} if chart.is_log else {"tickCount": 5})}
    x: dict[str, Any] = {"field": "step", "type": "quantitative", "title": "step"}
    x |= {"scale": {"nice": False, "zero": False}, "axis": {"format": "~s", "tickCount": 6}}
    layers = [_layer(curve, name, x, y, colour) for curve, name in zip(chart.curves, names, strict=True)]
    if len(chart.starts) > 1:
        mark = {"type": "rule", "color": GREY, "strokeDash": [2, 3]}
        data = {"values": [{"step": first} for first in chart.starts]}
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


def _layer(curve: Curve, name: str, x: dict[str, Any], y: dict[str, Any], colour: dict[str, Any]) -> dict[str, Any]:
    values = [{"step": step, "value": value, "name": name} for step, value in thinned(curve.points)]
    if len(values) == 1 or not curve.is_joined:  # a line of one point is not drawn at all
        # a thick ring, which looks like a dot: the legend draws strokes
        mark: dict[str, Any] = {"type": "point", "filled": False, "strokeWidth": 3, "size": 16, "opacity": 1}
    else:
        mark = {"type": "line", "strokeWidth": 1.6, "point": curve.marked and {"size": 36}}
    if curve.dashed:
        mark["strokeDash"] = [5, 4]
    return {"data": {"values": values}, "mark": mark, "encoding": {"x": x, "y": y, "color": colour}}


def _plain(text: str) -> str:
    return one_line(redact(escape_control(text)), limit=60)


# --- the charts of a run ----------------------------------------------------------------------------------------------

# Prefix in metrics.jsonl, name and colour of the held-out splits.
_SPLITS = (("eval", "validation", 1), ("test", "test", 2))


def charts_of(record: Record) -> list[Chart]:
    """The curves of a run; a chart that the run cannot fill is left out."""
    starts = tuple(first for _, first in record.starts) if record.has_stages else ()
    curve = record.curve
    held = "memory_allocated_gib" if any(part.on_gpu for part in record.parts) else "memory_resident_gib"
    padding = curve("padding_share")
    if len({value for _, value in padding}) == 1:  # rows without padding, which the summary says in a word
        padding = []
    speeds = [
        (start + step, speed)
        for part, (_, start) in zip(record.parts, record.starts, strict=True)
        for step in (1, part.steps)
        if (speed := part.summary.get("predicted_tokens_per_s"))
    ]
    predicted = Curve("predicted", speeds, None, dashed=True)
    listed = [
        Chart("Loss", (Curve("training", curve("loss")), *_held_out(record, "loss")), may_be_log=True),
        Chart("Exact match", _held_out(record, "exact_match"), form=".0%", is_share=True),
        Chart("Loss by source", _by_source(record), may_be_log=True),
        Chart("Learning rate", (Curve("learning rate", curve("learning_rate")),), form=".2~g", from_zero=True),
        Chart("Gradient norm", (Curve("gradient norm", curve("grad_norm")),), may_be_log=True),
        Chart("Tokens per second", (Curve("measured", curve("tokens_per_s")), predicted), form="~s", from_zero=True),
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
        Chart("Padding", (Curve("padding", padding),), form=".3~%", from_zero=True),
    ]  # fmt: skip
    charts = []
    for chart in listed:
        # a grey curve is what was predicted, and alone says nothing about the run
        filled = tuple(one for one in chart.curves if one.points)
        if any(one.colour is not None for one in filled):
            charts.append(replace(chart, curves=filled, starts=starts))
    return charts


def _held_out(record: Record, figure: str) -> tuple[Curve, ...]:
    curves = {prefix: record.curve(f"{prefix}_{figure}") for prefix, _, _ in _SPLITS}
    return tuple(Curve(name, curves[prefix], colour, marked=True) for prefix, name, colour in _SPLITS)


def _by_source(record: Record) -> tuple[Curve, ...]:
    places = {name: place for place, name in enumerate(record.names("loss_"))}
    training = [Curve(name.removeprefix("loss_"), record.curve(name), place) for name, place in places.items()]
    held = []
    for name in record.names("eval_loss_"):
        title, place = f"{name.removeprefix('eval_loss_')}, validation", places.get(name.removeprefix("eval_"))
        held.append(Curve(title, record.curve(name), place, marked=True))
    return (*training, *held)


# --- curves in the terminal, by plotext -------------------------------------------------------------------------------

WIDTH, HEIGHT = 80, 12
_SIGNS = "*o+x#@"
_ASCII = str.maketrans("┌┐└┘├┤┬┴┼─│", "+++++++++-|")


def plot_lines(chart: Chart) -> list[str]:
    """A chart as lines of ASCII, a legend first; none where there is nothing to draw."""
    shown = [curve for curve in chart.curves if curve.points]
    if all(len(curve.points) < 2 for curve in shown):
        return []
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.plot_size(WIDTH, HEIGHT - 1)
    figure.theme("simple")
    legend = []
    for number, curve in enumerate(shown):
        sign = _SIGNS[number % len(_SIGNS)]
        steps, values = zip(*thinned(curve.points, 2 * WIDTH), strict=True)
        signal = figure.signal(list(steps), list(values), marker=plotext.marker(sign, "blue+"))
        figure.draw(signal if curve.marked else signal.lines())
        legend.append(f"{sign} {one_line(redact(curve.name), limit=24)}")
    figure.legend(False)
    if chart.is_log:
        figure.ruler("y").scale("log")
    first, last = min(curve.points[0][0] for curve in shown), max(curve.points[-1][0] for curve in shown)
    ticks = sorted({round(first + (last - first) * part / 4) for part in range(5)})  # whole steps
    figure.ruler("x").ticks(ticks, [f"{tick:,}" for tick in ticks])
    text = figure.build().string(True)
    lines = [f"{chart.heading}:  {'  '.join(legend)}", *text.rstrip("\n").splitlines()]
    return [line.translate(_ASCII).rstrip() for line in lines]
