"""The table of other tools' defaults: its form, that each default reaches the written YAML or a comment, and that it is
what the tools' own source says, read by its syntax in wheels or where it is installed (docs/testing.md)."""

import ast
import datetime
import os
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sft_play.config import other_tools
from sft_play.config.load import config_from_text
from sft_play.config.options import all_options, find_option, option_accepts
from sft_play.config.translated import format_run_yaml, translate_file

TOOLS: dict[str, Any] = other_tools._load_tables("tool_defaults.yaml")
NAMED = [tool for tool in TOOLS if tool != "none"]
INSTALLED = ("transformers", "trl", "peft", "torch")

WHEELS = "SFT_PLAY_WHEELS"
"""The variable that names a folder with wheels of the tools (docs/testing.md)."""


def wheels() -> list[Path]:
    """The wheels of the folder that SFT_PLAY_WHEELS names; none where it is not set."""
    folder = os.environ.get(WHEELS)
    return sorted(Path(folder).glob("*.whl")) if folder else []


def installed_source(file: str) -> str | None:
    """The text of a file of an installed package; None where it is not installed."""
    path = Path(sysconfig.get_paths()["purelib"], file)
    return path.read_text(encoding="utf-8") if path.is_file() else None


def source_in_wheels(file: str) -> str | None:
    """The text of a file in the first wheel that has it; None where no wheel does."""
    for wheel in wheels():
        with zipfile.ZipFile(wheel) as archive:
            if file in archive.namelist():
                return archive.read(file).decode("utf-8")
    return None


def version_of_wheel(package: str) -> str | None:
    """The version of a package among the wheels, by the file's name; None where it is not there."""
    name = package.replace("-", "_").lower()
    return next((w.name.split("-")[1] for w in wheels() if w.name.split("-")[0].lower() == name), None)


def default_in(source: str, name: str, key: str) -> Any:
    """The default of a field of a class, or of an argument of a function (`Class.method` too). Raises LookupError where
    there is none, and ValueError where it is no literal."""
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef)
        node = next(one for one in ast.walk(node) if isinstance(one, kinds) and one.name == part)
    for field, value in _fields(node):
        if field == key:
            return _literal(value)
    raise LookupError(f"{name} has no {key}")


def _fields(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    if isinstance(node, ast.FunctionDef):
        names = [one.arg for one in node.args.args[len(node.args.args) - len(node.args.defaults) :]]
        yield from zip(names, node.args.defaults, strict=True)
        yield from zip((one.arg for one in node.args.kwonlyargs), node.args.kw_defaults, strict=True)
    if isinstance(node, ast.ClassDef):
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                yield item.target.id, item.value


def _literal(value: ast.expr | None) -> Any:
    """A literal, or that of dataclasses' or pydantic's `field(default=…)`; a name that follows (`default_optim`) is
    none."""
    if isinstance(value, ast.Call):
        named = {one.arg: one.value for one in value.keywords}
        if "default_factory" in named:
            factory = named["default_factory"]
            return _literal(factory.body) if isinstance(factory, ast.Lambda) else []
        return _literal(named.get("default", value.args[0] if value.args else None))
    assert value is not None
    return ast.literal_eval(value)


def checks(source_of) -> tuple[int, list[str]]:
    """How many defaults were compared with what `find_source` gives for a file, and those that differ."""
    wrong, compared = [], 0
    for tool in NAMED:
        for part in TOOLS[tool]["defaults"]:
            file, _, name = part["in"].partition(" ")
            source = source_of(file)
            if source is None:
                continue
            compared += len(part["are"])
            if "code" in part:
                wrong += [] if part["code"] in source else [f"{tool}: {file} has no {part['code']}"]
                continue
            for key, value in part["are"].items():
                found = default_in(source, name, key.rpartition(".")[2])
                if found != value or isinstance(found, bool) is not isinstance(value, bool):
                    wrong.append(f"{tool}: {key} is {found}, not {value}: {file} {name}")
    return compared, wrong


def test_defaults_are_those_of_the_installed_libraries():
    compared, wrong = checks(lambda file: installed_source(file) if file.split("/")[0] in INSTALLED else None)
    assert not wrong
    assert compared > 25


@pytest.mark.skipif(not wheels(), reason=f"{WHEELS} names no folder with wheels of the tools")
def test_defaults_are_those_of_the_wheels():
    compared, wrong = checks(source_in_wheels)
    assert not wrong
    there = {tool: version_of_wheel(TOOLS[tool]["package"]) for tool in NAMED}
    assert compared > 10 * sum(version is not None for version in there.values()) - 10
    old = {tool: version for tool, version in there.items() if version not in (None, TOOLS[tool]["version"])}
    assert not old, "read anew, with the date of today"
    source = source_in_wheels("torchtune/datasets/__init__.py")
    if source is not None:
        for name, said in TOOLS["torchtune"]["data_sets"].items():
            stem = name.removesuffix("_dataset").replace("_cleaned", "").replace("_articles", "")
            text = source_in_wheels(f"torchtune/datasets/_{stem}.py")
            assert text is not None, name
            for key in {"source", "train_on_input"} & said.keys() if "cleaned" not in name else ():
                assert default_in(text, name, key) == said[key], (name, key)
            assert all(f'"{said[key]}"' in text for key in ("source", "subset", "column") if key in said), name


@pytest.mark.parametrize("tool", NAMED)
def test_the_table_has_its_form(tool):
    entry = TOOLS[tool]
    assert set(entry) <= {"name", "package", "version", "date", "like", "marks", "rows", "defaults", "data_sets"}
    assert datetime.date.fromisoformat(str(entry["date"])) >= datetime.date(2026, 11, 1)
    assert all(name in TOOLS for name in entry["like"].split())
    assert len(entry["marks"].split()) >= 4
    # a file with its marks alone is its own
    marks = {mark.replace("*", "a") for mark in entry["marks"].split()}
    found = other_tools.detect_tool(marks)
    assert found.name == f"{entry['name']} {entry['version']}"
    for row in found.known_keys.values():
        assert not row.path or option_accepts(row.path, all_options()[row.path].default) or row.path in all_options()
    for part in entry["defaults"]:
        assert set(part) <= {"in", "code", "are"}
        assert (" " in part["in"]) is ("code" not in part), part["in"]
        for key, value in part["are"].items():
            for path in value if isinstance(value, dict) else ():
                assert path == "words" or path in all_options(), (key, path)


NEUTRAL = {
    "axolotl": "dataset_prepared_path: p", "llamafactory": "overwrite_cache: true", "swift": "model_author: me",
    "torchtune": "optimizer_in_bwd: true", "unsloth": "finetune_language_layers: true",
    "trl": "dataset_train_split: train", "transformers": "dataset_config_name: c",
}  # fmt: skip
"""A line of a file that tells the tool, and sets no option."""


@pytest.mark.parametrize("tool", NAMED)
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_each_default_reaches_the_yaml_or_a_comment(tool, mode):
    """Of a file that says nothing but the mode, every default is in force in the run that is written, or a comment
    names its key. Those that follow from other settings are worked out by hand in test_translated.py."""
    text = f"{NEUTRAL[tool]}\ntuning: {{mode: {mode}}}\n"
    found = translate_file(text, name="x.yaml", user_settings={"model.name": "a/b"})
    assert found.tool.name.startswith(TOOLS[tool]["name"])
    config = config_from_text(format_run_yaml(found.settings), name="x.yaml")
    said = " ".join(" ".join(found.comments()).replace("# ", "").split())
    seen: set[str] = set()
    for key, value in found.tool.defaults.items():
        row = found.tool.known_keys.get(key) or other_tools.find_known_key(tuple(key.split(".")))
        if isinstance(value, dict):
            wanted = value
        else:
            wanted = dict(other_tools.translate_value(row, value).settings) if row else {find_option(key)[0]: value}
        for path, ours in wanted.items() if value is not None else ():
            is_idle = mode == "full" and path.startswith("tuning.lora.")
            if path in {"words", "tuning.mode", *seen} or isinstance(ours, (dict, list)) or is_idle:
                continue  # a section that is not there (lr_scheduler) decides before what would be in it
            at: Any = config
            for name in path.split("."):
                at = getattr(at, name)
            assert at == ours, (key, path)
            seen.add(path)
        if isinstance(value, dict) and set(value) == {"words"}:
            assert f"{key} (not in the file): {value['words']}" in said
            seen.add(key)
    assert len(seen) > 2
