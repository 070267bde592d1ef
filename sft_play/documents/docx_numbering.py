"""The numbers and bullets that Word shows before list items; the file holds rules for them, not their text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from sft_play.documents.docx_package import attribute, child, children, name

BULLET = "-"
_LEVELS = 9


@dataclass(frozen=True)
class _Level:
    form: str = "decimal"
    text: str = ""
    start: int = 1
    restart: int | None = None
    style: str | None = None


def _number(value: str | None, default: int) -> int:
    try:
        return int(value) if value is not None and len(value) < 10 else default
    except ValueError:
        return default


def _level(element: Any) -> _Level:
    def value(label: str) -> str | None:
        return attribute(child(element, label), "w:val")

    restart = value("w:lvlRestart")
    return _Level(
        form=value("w:numFmt") or "decimal",
        text=value("w:lvlText") or "",
        start=_number(value("w:start"), 1),
        restart=None if restart is None else _number(restart, 0),
        style=value("w:pStyle"),
    )


@dataclass
class _List:
    abstract: str
    starts: dict[int, int] = field(default_factory=dict)
    levels: dict[int, _Level] = field(default_factory=dict)


class Numbering:
    """Labels of list items, counted as a document is read from its beginning; `root` is its numbering part."""

    def __init__(self, root: Any = None) -> None:
        self._abstract: dict[str, dict[int, _Level]] = {}
        self._lists: dict[str, _List] = {}
        self._counts: dict[str, dict[int, int]] = {}
        self._used: set[tuple[str, int]] = set()
        by_style, links = {}, {}
        for item in children(root) if root is not None else ():
            if name(item) == "w:abstractNum":
                key = attribute(item, "w:abstractNumId") or ""
                levels = (level for level in children(item) if name(level) == "w:lvl")
                self._abstract[key] = {_number(attribute(level, "w:ilvl"), 0): _level(level) for level in levels}
                by_style[attribute(child(item, "w:styleLink"), "w:val")] = key
                links[key] = attribute(child(item, "w:numStyleLink"), "w:val")
            elif name(item) == "w:num":
                self._lists[attribute(item, "w:numId") or ""] = _list(item)
        # a list may only refer to a numbering style, which another one defines
        for key, style in links.items():
            if style is not None and not self._abstract[key] and style in by_style:
                self._abstract[key] = self._abstract[by_style[style]]

    def level_of_style(self, number: str, style: str) -> int | None:
        """The level of a list that belongs to a paragraph style."""
        used = self._lists.get(number)
        levels = self._abstract.get(used.abstract, {}) if used else {}
        return next((index for index, level in levels.items() if level.style == style), None)

    def label(self, number: str, index: int) -> str | None:
        """The text before the next item at this level of a list: a bullet, a number, or nothing.

        None where the list is not known: the paragraph is no list item.
        """
        used = self._lists.get(number)
        if used is None or used.abstract not in self._abstract or not 0 <= index < _LEVELS:
            return None
        levels = {**self._abstract[used.abstract], **used.levels}
        level = levels.get(index)
        if level is None or level.form == "none":
            return ""
        self._count(number, used, levels, index)
        if level.form == "bullet":
            return BULLET
        counts = self._counts[used.abstract]

        def shown(match: re.Match[str]) -> str:
            other = int(match.group(1)) - 1
            return formatted(counts.get(other, levels.get(other, _Level()).start), levels.get(other, level).form)

        return re.sub(r"%([1-9])", shown, level.text)

    def _count(self, number: str, used: _List, levels: dict[int, _Level], index: int) -> None:
        """Count one item; lists of one abstract list share its counts, as in Word."""
        counts = self._counts.setdefault(used.abstract, {})
        # w:startOverride holds for the first item of a list alone
        if index in used.starts and (number, index) not in self._used:
            counts[index] = used.starts[index]
        else:
            counts[index] = counts[index] + 1 if index in counts else levels[index].start
        self._used.add((number, index))
        # deeper levels start again, unless w:lvlRestart says from which level on (0: never)
        for other in [deeper for deeper in counts if deeper > index]:
            restart = levels.get(other, _Level()).restart
            if restart is None or (restart and index < restart):
                del counts[other]


def _list(item: Any) -> _List:
    read = _List(attribute(child(item, "w:abstractNumId"), "w:val") or "")
    for override in children(item):
        if name(override) == "w:lvlOverride":
            index = _number(attribute(override, "w:ilvl"), 0)
            start = child(override, "w:startOverride")
            if start is not None:
                read.starts[index] = _number(attribute(start, "w:val"), 1)
            own = child(override, "w:lvl")
            if own is not None:
                read.levels[index] = _level(own)
    return read


_ROMAN: tuple[tuple[int, str], ...] = (
    *((1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc"), (50, "l"), (40, "xl")),
    *((10, "x"), (9, "ix"), (5, "v"), (4, "iv"), (1, "i")),
)


def roman(number: int) -> str:
    """A number in small Roman numerals; in figures where there are none."""
    if not 0 < number < 4000:
        return str(number)
    numeral = ""
    for value, letters in _ROMAN:
        numeral += letters * (number // value)
        number %= value
    return numeral


def formatted(number: int, form: str) -> str:
    """A number as Word's list formats write it; formats of other scripts in plain figures."""
    if form in ("lowerRoman", "upperRoman"):
        return roman(number) if form == "lowerRoman" else roman(number).upper()
    if form in ("lowerLetter", "upperLetter") and 0 < number <= 780:
        # Word goes on with aa, bb, …, not with aa, ab as spreadsheets do
        letters = chr(ord("a") + (number - 1) % 26) * ((number - 1) // 26 + 1)
        return letters if form == "lowerLetter" else letters.upper()
    return f"{number:02d}" if form == "decimalZero" else str(number)
