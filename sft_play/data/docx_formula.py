"""Formulas of Word (OMML) in one line of text: `(a+b)/(2)`, `x^{2}`, `√(x)`; their characters as they stand.

Meant for reading, not for typesetting: what a structure is not known by is its text alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sft_play.data.docx_package import attribute, child, children, name


def linear(element: Any, text_of: Callable[[Any], str]) -> str:
    """A formula as text; `text_of` reads what is no formula, such as runs of Word inside one."""

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
            return _nary(element, inner)
        case "m:d":
            return _delimited(element, inner)
        case "m:func":
            return f"{part('m:fName')} {part('m:e')}"
        case "m:limLow":
            return f"{part('m:e')}_{{{part('m:lim')}}}"
        case "m:limUpp":
            return f"{part('m:e')}^{{{part('m:lim')}}}"
        case "m:m" | "m:eqArr":
            return "; ".join(_row(item, inner) for item in children(element) if name(item) in ("m:mr", "m:e"))
        case known if known.startswith("m:") and known.endswith("Pr"):
            return ""
        case known if known.startswith("m:"):
            return inner(element)
    return text_of(element)


def _row(row: Any, inner: Callable[[Any], str]) -> str:
    cells = [item for item in children(row) if name(item) == "m:e"] if name(row) == "m:mr" else []
    return ", ".join(inner(cell) for cell in cells) if cells else inner(row)


def _setting(element: Any, properties: str, label: str, default: str) -> str:
    found = child(child(element, properties), label)
    value = attribute(found, "m:val") if found is not None else None
    return default if value is None else value


def _nary(element: Any, inner: Callable[[Any], str]) -> str:
    sub, sup = inner(child(element, "m:sub")), inner(child(element, "m:sup"))
    sign = _setting(element, "m:naryPr", "m:chr", "∫")
    limits = f"{f'_{{{sub}}}' if sub else ''}{f'^{{{sup}}}' if sup else ''}"
    return f"{sign}{limits} {inner(child(element, 'm:e'))}"


def _delimited(element: Any, inner: Callable[[Any], str]) -> str:
    begin = _setting(element, "m:dPr", "m:begChr", "(")
    end = _setting(element, "m:dPr", "m:endChr", ")")
    between = _setting(element, "m:dPr", "m:sepChr", "|")
    return begin + between.join(inner(item) for item in children(element) if name(item) == "m:e") + end
