"""Conditions of this folder's tables: `{"nccl": ">=2.29.2,<2.29.3", "machine": ["aarch64"], "over_nccl": true}`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from packaging.specifiers import SpecifierSet

Condition = Mapping[str, Any]
"""By the name of a fact: a range of versions or numbers, a list of words, or whether it is true."""
Facts = Mapping[str, Any]
"""None: not known, which meets no condition."""


def holds(when: Condition | Sequence[Condition], facts: Facts) -> bool:
    """Whether the facts meet a condition, or one of several."""
    either = [when] if isinstance(when, Mapping) else when
    return any(all(_meets(facts[name], wanted) for name, wanted in one.items()) for one in either)


def _meets(fact: Any, wanted: Any) -> bool:
    if fact is None:
        return False
    if isinstance(wanted, bool):
        return fact is wanted
    if isinstance(wanted, list):
        return fact in wanted
    # the leading numbers alone: 2.13.0+cu128, 6.8.0-45-generic and 570.86.15 have to compare
    match = re.match(r"\d+(?:\.\d+)*", str(fact))
    return match is not None and match[0] in SpecifierSet(wanted)
