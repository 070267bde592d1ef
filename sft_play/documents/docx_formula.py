"""Formulas of Word (OMML) in one line of text: `(a+b)/(2)`, `x^{2}`, `√(x)`; their characters as they are.

Meant for reading, not for typesetting: of a structure that is not known only the text remains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sft_play.documents.docx_package import attribute, child, children, name


def linear(element: Any, text_of: Callable[[Any], str]) -> str:
    """A formula as text; `text_of` reads elements that are no formula, such as runs of Word inside one."""

    def inner(node: Any) -> str:
        return "".join(linear(item, text_of) for item in children(node)) if node is not None else ""

    def part(label: str) -> str:
        return inner(child(element, label))

    match name(element):
        case "m:r":
            return "".join(item.text or "" if name(item) == "m:t" else text_of(item) for item in children(element))
        case "m:f":
            return f"({part('m:num')})/({part('m:den')})"
        case "m:sSup":
            return f"{part('m:e')}^{{{part('m:sup')}}}"
        case "m:sSub":
            return f"{part('m:e')}_{{{part('m:sub')}}}"
        case "m:sSubSup":
            return f"{part('m:e')}_{{{part('m:sub')}}}^{{{part('m:sup')}}}"
        case "m:sPre":
            return f"_{{{part('m:sub')}}}^{{{part('m:sup')}}}{part('m:e')}"
        case "m:rad":
            degree = part("m:deg")
            return f"√{f'[{degree}]' if degree else ''}({part('m:e')})"
        case "m:nary":
            # what Word leaves out of the file is its default: the integral, round brackets, a bar between
            sign = _setting(element, "m:naryPr", "m:chr", "∫")
            lower, upper = part("m:sub"), part("m:sup")
            return f"{sign}{f'_{{{lower}}}' if lower else ''}{f'^{{{upper}}}' if upper else ''} {part('m:e')}"
        case "m:d":
            begin = _setting(element, "m:dPr", "m:begChr", "(")
            end = _setting(element, "m:dPr", "m:endChr", ")")
            between = _setting(element, "m:dPr", "m:sepChr", "|")
            return begin + between.join(inner(item) for item in children(element) if name(item) == "m:e") + end
        case "m:func":
            return f"{part('m:fName')} {part('m:e')}"
        case "m:limLow":
            return f"{part('m:e')}_{{{part('m:lim')}}}"
        case "m:limUpp":
            return f"{part('m:e')}^{{{part('m:lim')}}}"
        case "m:m" | "m:eqArr":
            return "; ".join(_row(item, inner) for item in children(element) if name(item) in ("m:mr", "m:e"))
        case label if label.startswith("m:"):  # boxes, accents, phantoms: their text; properties (…Pr) have none
            return "" if label.endswith("Pr") else inner(element)
    return text_of(element)


def _row(row: Any, inner: Callable[[Any], str]) -> str:
    cells = [item for item in children(row) if name(item) == "m:e"] if name(row) == "m:mr" else []
    return ", ".join(inner(cell) for cell in cells) if cells else inner(row)


def _setting(element: Any, properties: str, label: str, default: str) -> str:
    value = attribute(child(child(element, properties), label), "m:val")
    return default if value is None else value
