"""ARCHITECTURE.md and CONTRIBUTING.md say where things are: what they name is there, and imports what they say."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.test_layers import STARTED, modules, used_by

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
            assert first, one
            assert second, other
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
            found = place(path)
            assert found, path
            assert re.search(rf"^(?:def |class )?{name}\b", found.read_text(), re.MULTILINE), name
        assert pairs or page == "ARCHITECTURE.md"


def test_every_package_is_in_the_table_of_the_architecture():
    table = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = table[table.index("| layer |") : table.index("\n\n", table.index("| layer |"))]
    tops = {name.partition(".")[0] for name in modules()}
    assert sorted(tops - set(re.findall(r"`(\w+)`", table)) - {"__main__", "_version"}) == []
