"""Defaults that transformers uses for fields that config.json leaves out, by model type: `class_defaults.json`.

`make -C benchmarks generate` reads them anew from the installed transformers; a test compares. Only fields that shapes
depend on are listed; None means that the class has the field and derives its value from others.
"""

from __future__ import annotations

import json
from pathlib import Path

Defaults = dict[str, int | float | bool | str | None]

FILE = Path(__file__).with_suffix(".json")
CLASS_DEFAULTS: dict[str, Defaults] = json.loads(FILE.read_text(encoding="utf-8"))


def as_text(table: dict[str, Defaults]) -> str:
    """The file of such a table: a line for each model type."""
    rows = (f"  {json.dumps(kind)}: {json.dumps(table[kind])}" for kind in sorted(table))
    return "{\n" + ",\n".join(rows) + "\n}\n"
