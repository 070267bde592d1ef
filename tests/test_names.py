"""One word, one meaning: what a reader of the package has to look up is defined once, and bindings name a thing."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from tests.conftest import ROOT
from tests.test_layers import modules, tree_of

UPSTREAM = {"TYPE_CHECKING", "T", "main", "logger"}
"""Names that each module has for itself: of typing, logging, and the function that a program starts with."""

EMPTY = {
    *("given", "found", "own", "shown", "asked", "kept", "wanted", "said", "told", "seen", "taken", "met", "look"),
    *("here", "there", "theirs", "ours", "mine", "what", "why", "where", "how", "way", "beside"),
}
"""Words that say how a value came here, and not what it is."""

PUBLIC_FIELDS = {
    "answers": {"found"},
    "config.schema": {"how"},
    "data.sources.formats": {"where"},
    "data.sources.raw": {"where"},
    "diagnose.machine_pages": {"said"},
    "finished.listing": {"kept"},
    "planner.precision": {"what"},
    "training.heartbeat": {"where"},
}
"""Such names that are keys of YAML, JSON or recorded data, by module."""


def bindings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno


def defined_names(tree: ast.Module) -> Iterator[str]:
    """What a module defines at its top level, without what it imports."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_a_public_name_is_defined_in_one_module():
    homes = defaultdict(set)
    for module, path in modules().items():
        for name in defined_names(tree_of(path)):
            if not name.startswith("_") and name not in UPSTREAM:
                homes[name].add(module)
    assert len(homes) > 1000
    assert {name: sorted(where) for name, where in homes.items() if len(where) > 1} == {}


def test_a_binding_names_a_thing():
    empty = [
        f"{module}:{line}: {name}"
        for module, path in modules().items()
        for name, line in bindings(tree_of(path))
        if name.strip("_") in EMPTY - PUBLIC_FIELDS.get(module, set())
    ]
    assert empty == []


def test_the_twelve_words_are_defined_where_the_page_says():
    page = (ROOT / "ARCHITECTURE.md").read_text()
    rows = re.findall(r"^\| (\w+) \| .* \| `([\w/]+\.py)` \|$", page.partition("## Twelve words")[2], re.MULTILINE)
    assert len(rows) == len(dict(rows)) == 12
    for word, path in rows:
        names = list(defined_names(tree_of(ROOT / "sft_play" / path)))
        assert any(word.lower() in name.lower() for name in names), f"{path} defines no {word}: {names}"
