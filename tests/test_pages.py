"""ARCHITECTURE.md and CONTRIBUTING.md say where things are: what they name is there, and imports what they say."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from sft_play.data.sources.raw import RawRow
from tests.conftest import ROOT
from tests.test_layers import STARTED, modules, used_by

PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md")


def quoted(page: str) -> list[str]:
    """What a page has in backquotes."""
    return re.findall(r"`([^`\n]+)`", (ROOT / page).read_text(encoding="utf-8"))


def place(path: str) -> Path | None:
    """A file or folder that a page names, from the checkout or from the package; None where there is none."""
    return next((found for found in (ROOT / path, ROOT / "sft_play" / path) if found.exists()), None)


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_a_page_names_is_there(page):
    paths = [text for text in quoted(page) if re.fullmatch(r"[\w.-]+/[\w./-]*|\w+\.(py|md)", text)]
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


# the ways in that no other test goes: an option is added in test_training_options, a command's lists in test_variables


def loaded(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A changed copy of a module, under its file's name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


def test_a_gpu_is_one_line(tmp_path, monkeypatch):
    folder = ROOT / "sft_play" / "machine"
    table = json.loads((folder / "gpu_catalog.json").read_text(encoding="utf-8"))
    table["gpus"].append({**table["gpus"][0], "name": "Example 9000", "aliases": []})
    (tmp_path / "gpu_catalog.json").write_text(json.dumps(table), encoding="utf-8")
    (tmp_path / "gpu_catalog.py").write_text((folder / "gpu_catalog.py").read_text(encoding="utf-8"), encoding="utf-8")
    (entry,) = loaded(tmp_path / "gpu_catalog.py", monkeypatch).find_catalog_entries("example9000")
    assert (entry.name, entry.bandwidth) == ("Example 9000", table["gpus"][0]["bandwidth_gb"] * 1e9)


def test_a_format_is_one_line(tmp_path, monkeypatch):
    text = (ROOT / "sft_play" / "data" / "sources" / "formats.py").read_text(encoding="utf-8")
    longer = text.replace("\nPAIR_COLUMNS = (\n", '\nPAIR_COLUMNS = (\n    ("frage", "antwort"),\n')
    assert longer != text
    (tmp_path / "longer_formats.py").write_text(longer, encoding="utf-8")
    found = loaded(tmp_path / "longer_formats.py", monkeypatch).recognise_format({"frage", "antwort"})
    row = RawRow("rows.jsonl:1", {"frage": "a", "antwort": "b"})
    assert [message["content"] for message in found.build(row).messages] == ["a", "b"]
