"""One self-contained HTML page (`page.html.jinja`): tables, curves and texts."""

import functools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sft_play.errors import ConfigError
from sft_play.finished.run import translate_write_errors
from sft_play.log import escape_control, one_line, redact, secret_values
from sft_play.runs.files import write_text

Points = Sequence[tuple[float, float]]

# Of curves, in their order.
COLOURS = ("#4c8bf5", "#f28e2b", "#3aa655", "#d1495b", "#9467bd", "#17a2b8", "#b58900", "#e377c2", "#7f7f7f", "#8c564b")
# Of what was predicted.
GREY = "#8a8a8a"
# Of a curve: neighbouring points of a longer one are averaged. A chart is about 400 pixels wide.
_MAX_POINTS = 300
# Largest over smallest value from which a loss is shown on a logarithmic axis.
_LOG_SCALE_RATIO = 20
# The frame of a chart in units of its viewBox (420 by 236): numbers stand left of it and below.
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 412, 8, 204


@dataclass(frozen=True)
class Curve:
    """A named curve."""

    name: str
    points: Points
    # In COLOURS; None: it was predicted, and is grey and dashed.
    colour_index: int | None = 0
    # Of what was measured now and then: its points are shown, and joined where there are more than two.
    shows_points: bool = False

    @property
    def colour(self) -> str:
        """As HTML writes it."""
        return GREY if self.colour_index is None else COLOURS[self.colour_index % len(COLOURS)]


@dataclass(frozen=True)
class Chart:
    """Curves with points in one frame."""

    title: str
    curves: tuple[Curve, ...]
    is_share: bool = False
    # Of a loss or a norm, whose axis need not start at zero.
    may_use_log: bool = False
    stage_starts: tuple[int, ...] = ()

    @property
    def uses_log_scale(self) -> bool:
        """True if the vertical axis is logarithmic."""
        values = [value for curve in self.curves for _, value in curve.points]
        return self.may_use_log and min(values) > 0 and max(values) / min(values) >= _LOG_SCALE_RATIO

    @property
    def heading(self) -> str:
        """The title, with the kind of axis."""
        return f"{self.title} (logarithmic)" if self.uses_log_scale else self.title


def thin_points(points: Points, max_points: int = _MAX_POINTS) -> list[tuple[float, float]]:
    """At most so many points: of each group of neighbours the mean step and value; the first and the last one stay."""
    inner = points[1:-1]
    group_size = math.ceil(len(inner) / max(1, max_points - 2))
    if group_size <= 1:
        return list(points)
    groups = [inner[offset : offset + group_size] for offset in range(0, len(inner), group_size)]
    means = [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]
    return [points[0], *means, points[-1]]


# --- curves on the page, whose template writes the SVG ----------------------------------------------------------------
def draw_chart(chart: Chart) -> dict[str, Any]:
    """What the template draws of a chart, in units of its viewBox: curves, numbers at the axes, starts of stages."""
    steps, values = zip(*(point for curve in chart.curves for point in curve.points), strict=True)
    first_step, last_step, lowest, highest = min(steps), max(steps), min(values), max(values)
    if not chart.may_use_log:
        lowest = min(lowest, 0.0)
    if chart.uses_log_scale:
        ticks, scale = _log_ticks(lowest, highest), math.log10
    else:
        ticks, scale = _linear_ticks(lowest, highest), float
        lowest, highest = ticks[0], ticks[-1]

    def x(step: float) -> Any:
        return round(_LEFT + (_RIGHT - _LEFT) * (step - first_step) / (last_step - first_step or 1), 1)

    def y(value: float) -> Any:
        share = (scale(value) - scale(lowest)) / (scale(highest) - scale(lowest))
        return round(_BOTTOM - (_BOTTOM - _TOP) * share, 1)

    curves = []
    for curve in chart.curves:
        places = [(x(step), y(value)) for step, value in thin_points(curve.points)]
        is_joined = len(places) > (2 if curve.shows_points else 1)
        curves.append({
            "name": curve.name,
            "colour": curve.colour,
            "is_dashed": curve.colour_index is None,
            "line": " ".join(f"{left},{top}" for left, top in places) if is_joined else "",
            "dots": places if curve.shows_points or not is_joined else [],
        })  # fmt: skip
    step_ticks = [tick for tick in _linear_ticks(first_step, last_step) if first_step <= tick <= last_step]
    percent = "%" if chart.is_share else ""
    return {
        "heading": chart.heading,
        "curves": curves,
        "step_ticks": [(x(tick), _format_tick(tick)) for tick in step_ticks if tick == int(tick)],
        "value_ticks": [(y(tick), _format_tick(tick * (100 if percent else 1)) + percent) for tick in ticks],
        "stages": [x(step) for step in chart.stage_starts[1:]],
    }


def _linear_ticks(low: float, high: float) -> list[float]:
    """Four to eleven round numbers at equal distances, from at most `low` to at least `high`."""
    distance = (high - low) / 5 or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(distance))
    step = next(digit * power for digit in (1, 2, 5, 10, 20) if digit * power >= distance)
    first = math.floor(low / step)
    return [index * step for index in range(first, max(first + 1, math.ceil(high / step)) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each power of ten in the range, or the powers alone where there are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if high / low < 1e4 else (1,)
    return [tick for power in powers for digit in digits if low <= (tick := digit * 10.0**power) <= high]


def _format_tick(value: float) -> str:
    """The number without an exponent, which few people read."""
    return np.format_float_positional(value, precision=4, fractional=False, trim="-")


# --- the page: readable on a phone, in print, in the dark -------------------------------------------------------------
@dataclass(frozen=True)
class ReportTable:
    """A table; the first column is text, the others are aligned to the right if `has_numbers`."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    has_numbers: bool = True


@dataclass(frozen=True)
class ReportSection:
    """A part of the page. Everything in it is optional."""

    title: str
    pairs: Sequence[tuple[str, str]] = ()
    tables: Sequence[ReportTable] = ()
    charts: Sequence[Chart] = ()
    # Questions with the answers of both models, as `samples` of a summary has them.
    samples: Sequence[dict[str, Any]] = ()
    items: Sequence[str] = ()
    # Long texts that are opened by a click: heading and text.
    folded: Sequence[tuple[str, str]] = ()

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to show."""
        return not any((self.pairs, self.tables, self.charts, self.samples, self.items, self.folded))


def write_page(
    path: Path, title: str, *, headline: Sequence[tuple[str, str]] = (), sections: Sequence[ReportSection]
) -> None:
    """Write a page aside and rename it; raises ConfigError where it cannot be written.

    `headline`: the few figures that matter, as (name, value), at its top. Sections without content are left out.
    """
    if path.is_dir():
        raise ConfigError(f"OUT={one_line(str(path))} is a folder; name a file, such as {path / 'report.html'}")
    filled_sections = [section for section in sections if not section.is_empty]
    secrets = secret_values(os.environ.items())
    text = _page_template().render(title=title, lead=headline, sections=filled_sections, secrets=secrets)
    with translate_write_errors(path):
        write_text(path, text)


@functools.cache  # compiling it takes longer than a page
def _page_template() -> Any:
    """The template, which escapes whatever it is given, redacted: once escaped, a secret with an `&` in it would no
    longer be recognised."""
    from jinja2 import Environment, FileSystemLoader, pass_context
    from markupsafe import Markup

    @pass_context
    def redact_value(context: Any, value: Any) -> Any:
        if isinstance(value, Markup):  # the coordinates of a curve
            return value
        return redact(escape_control(str(value)), secrets=context["secrets"])

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, finalize=redact_value, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["draw"] = draw_chart
    return environment.get_template("page.html.jinja")
