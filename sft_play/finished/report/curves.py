"""Curves in the terminal, by plotext: some twelve lines, in colour only where the output is a terminal."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from sft_play.finished.report.charts import Curve, thinned
from sft_play.log import one_line, redact

HEIGHT = 12
"""Lines of a plot, its axis included."""
_COLOURS = ("blue+", "orange+", "green+", "red+", "magenta+", "cyan+")
_SIGNS = "*o+x#@"
_ASCII = str.maketrans("┌┐└┘├┤┬┴┼─│", "+++++++++-|")


@dataclass(frozen=True)
class Screen:
    """How to draw: columns; whether colours (escape codes) are wanted; whether only ASCII is."""

    width: int = 80
    colour: bool = False
    ascii: bool = True


def screen_of(stream: TextIO | None, environment: Mapping[str, str] = os.environ) -> Screen:
    """The terminal that a stream is; ASCII without colours where it is a file or a pipe."""
    if stream is None or not stream.isatty():
        return Screen()
    is_plain = bool(environment.get("NO_COLOR")) or environment.get("TERM") == "dumb"
    is_unicode = (stream.encoding or "").lower().replace("-", "") == "utf8"
    return Screen(max(40, min(100, shutil.get_terminal_size().columns)), not is_plain, not is_unicode)


def plot_lines(title: str, curves: Sequence[Curve], screen: Screen, *, is_log: bool = False) -> list[str]:
    """The curves as lines of text, a legend first; none where there is nothing to draw."""
    shown = [curve for curve in curves if curve.points]
    if not shown or all(len(curve.points) < 2 for curve in shown):
        return []
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.plot_size(screen.width, HEIGHT - 1)
    figure.theme("simple")
    legend = []
    for number, curve in enumerate(shown):
        colour, sign = _COLOURS[number % len(_COLOURS)], _SIGNS[number % len(_SIGNS)]
        steps, values = zip(*thinned(curve.points, 2 * screen.width), strict=True)
        # with colours one dense marker does for all curves; without them each needs a sign of its own
        symbol = sign if screen.ascii or not screen.colour or curve.marked else "hd"
        signal = figure.signal(list(steps), list(values), marker=plotext.marker(symbol, colour))
        figure.draw(signal if curve.marked else signal.lines())
        named = one_line(redact(curve.name), limit=24)
        key = "─" if symbol == "hd" else symbol
        legend.append(f"{plotext.colorize(key, colour).string() if screen.colour else key} {named}")
    figure.legend(False)
    if is_log:
        figure.ruler("y").scale("log")
    _whole_steps(figure, shown)
    text = figure.build().string(not screen.colour)
    lines = [f"{title}{' (logarithmic)' if is_log else ''}:  {'  '.join(legend)}", *text.rstrip("\n").splitlines()]
    return [(line.translate(_ASCII) if screen.ascii else line).rstrip() for line in lines]


def _whole_steps(figure: object, curves: Sequence[Curve]) -> None:
    """Label the horizontal axis with whole steps."""
    first = min(curve.points[0][0] for curve in curves)
    last = max(curve.points[-1][0] for curve in curves)
    ticks = sorted({round(first + (last - first) * part / 4) for part in range(5)})
    figure.ruler("x").ticks(ticks, [f"{tick:,}" for tick in ticks])  # type: ignore[attr-defined]
