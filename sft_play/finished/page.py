"""One self-contained HTML page (`page.html.jinja`): tables, curves and texts."""

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
COLOURS = (
    *("#4c8bf5", "#f28e2b", "#3aa655", "#d1495b", "#9467bd"),
    *("#17a2b8", "#b58900", "#e377c2", "#7f7f7f", "#8c564b"),
)
# Of what was predicted: such a curve is dashed.
GREY = "#8a8a8a"
# The frame of a chart in units of its viewBox (420 by 236): numbers stand left of it and below.
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 412, 8, 204


@dataclass(frozen=True)
class Curve:
    """A named curve."""

    name: str
    points: Points
    colour: str = COLOURS[0]
    # Of what was measured now and then: its points are shown, and joined where there are more than two.
    shows_points: bool = False


@dataclass(frozen=True)
class Chart:
    """Curves with points in one frame."""

    title: str
    curves: Sequence[Curve]
    is_share: bool = False
    # False for a loss or a norm, whose changes would be small beside its distance from zero.
    begins_at_zero: bool = True
    stage_starts: tuple[int, ...] = ()


def thin_points(points: Points) -> Points:
    """Thin a long curve: each group of neighbours becomes its mean step and value."""
    if len(points) <= 300:  # a chart is about 400 pixels wide
        return points
    groups = np.array_split(np.asarray(points), 300)
    return [(float(x), float(y)) for x, y in (group.mean(axis=0) for group in groups)]


# --- curves on the page, whose template writes the SVG ----------------------------------------------------------------
def draw_chart(chart: Chart) -> dict[str, Any]:
    """What the template draws of a chart, in units of its viewBox: curves, numbers at the axes, starts of stages."""
    steps, values = zip(*(point for curve in chart.curves for point in curve.points), strict=True)
    first_step, last_step, lowest = min(steps), max(steps), min(values)
    if chart.begins_at_zero:
        lowest = min(lowest, 0.0)
    ticks = _round_ticks(lowest, max(values))

    def x(step: float) -> Any:
        return round(_LEFT + (_RIGHT - _LEFT) * (step - first_step) / (last_step - first_step or 1), 1)

    def y(value: float) -> Any:
        return round(_BOTTOM - (_BOTTOM - _TOP) * (value - ticks[0]) / (ticks[-1] - ticks[0]), 1)

    curves = []
    for curve in chart.curves:
        places = [(x(step), y(value)) for step, value in thin_points(curve.points)]
        line = " ".join(f"{left},{top}" for left, top in places)
        if len(places) <= 1 + curve.shows_points:  # too few to be joined
            line = ""
        dots = places if curve.shows_points or len(places) == 1 else []
        is_dashed = curve.colour == GREY
        curves.append({"name": curve.name, "colour": curve.colour, "is_dashed": is_dashed, "line": line, "dots": dots})
    step_ticks = [tick for tick in _round_ticks(first_step, last_step) if first_step <= tick <= last_step]
    factor, unit = (100, "%") if chart.is_share else (1, "")
    return {
        "heading": chart.title,
        "curves": curves,
        "step_ticks": [(x(tick), _format_tick(tick)) for tick in step_ticks if tick == int(tick)],
        "value_ticks": [(y(tick), _format_tick(tick * factor) + unit) for tick in ticks],
        "stages": [x(step) for step in chart.stage_starts[1:]],
    }


def _round_ticks(low: float, high: float) -> list[float]:
    """Four to eleven round numbers at equal distances, from at most `low` to at least `high`."""
    distance = (high - low) / 5 or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(distance))
    step = next(digit * power for digit in (1, 2, 5, 10, 20) if digit * power >= distance)
    first = math.floor(low / step)
    return [index * step for index in range(first, max(first + 1, math.ceil(high / step)) + 1)]


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
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    secrets = secret_values(os.environ.items())

    def redact_value(value: Any) -> Any:
        # before it is escaped: a secret with an `&` in it would no longer be recognised afterwards
        if isinstance(value, Markup):  # the coordinates of a curve
            return value
        return redact(escape_control(str(value)), secrets=secrets)

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, finalize=redact_value,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["draw"] = draw_chart
    filled_sections = [section for section in sections if not section.is_empty]
    text = environment.get_template("page.html.jinja").render(title=title, lead=headline, sections=filled_sections)
    with translate_write_errors(path):
        write_text(path, text)
