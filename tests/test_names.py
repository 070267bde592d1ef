"""One word, one meaning: what a reader of the package has to look up is defined once, and bindings name a thing.

What ARCHITECTURE.md and CONTRIBUTING.md name is there, and imports what they say.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.test_layers import STARTED, modules, tree_of, used_by

UPSTREAM = {"TYPE_CHECKING", "T", "main", "logger"}
"""Names that each module has for itself: of typing, logging, and the function that a program starts with."""

EMPTY = {
    *("given", "found", "own", "shown", "asked", "kept", "wanted", "said", "told", "seen", "taken", "met", "look"),
    *("here", "there", "theirs", "ours", "mine", "what", "why", "where", "how", "way", "beside"),
}
"""Words that say how a value came here, and not what it is."""

PUBLIC_FIELDS = {
    "answers": {"found"}, "config.schema": {"how"}, "data.sources.formats": {"where"}, "data.sources.raw": {"where"},
    "diagnose.machine_pages": {"said"}, "finished.listing": {"kept"}, "planner.precision": {"what"},
    "training.heartbeat": {"where"},
}  # fmt: skip
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


PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md")


def place(path: str) -> Path | None:
    """A file or folder that a page names, from the checkout or from the package; None where there is none."""
    return next((found for found in (ROOT / path, ROOT / "sft_play" / path) if found.exists()), None)


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_a_page_names_is_there(page):
    quoted = re.findall(r"`([^`\n]+)`", (ROOT / page).read_text(encoding="utf-8"))
    paths = [text for text in quoted if re.fullmatch(r"[\w.-]+/[\w./-]*|\w+\.(py|md)", text)]
    assert len(paths) >= 8
    assert [path for path in paths if place(path) is None] == []


def test_what_an_arrow_joins_imports_or_starts_the_next():
    """`a.py` → `b.py`: the first imports the second, or starts it as a process of its own."""
    text = " ".join((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split())
    chains = [re.findall(r"`([^`]+)`", chain) for chain in re.findall(r"(?:`[^`]+` → )+`[^`]+`", text)]
    assert sum(map(len, chains)) >= 8
    for chain in chains:
        for one, other in itertools.pairwise(chain):
            first, second = place(one), place(other)
            assert None not in (first, second), (one, other)
            name = ".".join(second.relative_to(ROOT / "sft_play").with_suffix("").parts)
            if first.is_relative_to(ROOT / "sft_play"):
                user = ".".join(first.relative_to(ROOT / "sft_play").with_suffix("").parts)
                assert name in used_by(user) or (user, name) in STARTED, (one, other)
            else:
                assert f"sft_play.{name}" in first.read_text(encoding="utf-8"), (one, other)


def test_a_name_that_stands_with_its_file_is_in_it():
    """`NAME` of `file.py`, and `NAME` in `file.py`."""
    for page in PAGES:
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        pairs = re.findall(r"`(\w+)`(?:, `\w+`)? (?:of|in) `([\w/.]+\.py)`", text)
        for name, path in pairs:
            assert re.search(rf"^(?:def |class )?{name}\b", place(path).read_text(), re.MULTILINE), name
        assert pairs or page == "ARCHITECTURE.md"


def test_every_package_is_in_the_table_of_the_architecture():
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = page[page.index("| layer |") :].partition("\n\n")[0]
    tops = {name.partition(".")[0] for name in modules()}
    assert sorted(tops - set(re.findall(r"`(\w+)`", table)) - {"__main__", "_version"}) == []
