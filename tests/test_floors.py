"""The house: who may import whom, who may import torch, and who reads which option."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from sft_play.config.leaves import leaves
from tests.conftest import ROOT

PACKAGE = ROOT / "sft_play"

FLOORS = {
    "errors": 0,
    "log": 0,
    "endings": 0,
    "cache": 0,
    "variables": 0,
    "environment": 1,
    "config": 1,
    "facts": 1,
    "starter": 1,
    "runs": 2,
    "plan": 2,
    "data": 2,
    "launch": 3,
    "train": 3,
    "trace": 4,
    "after": 4,
    "verify": 4,
    "doctor": 4,
    "seeing": 4,
    "failures": 1,
    "dist": 4,
    "notebook": 4,
    "start": 5,
    "pipeline": 6,
    "selftest": 6,
    "cli": 7,
    "entry": 8,
    "__main__": 9,
}
"""Room or module of the package: floor. `sft_play/__init__.py` itself holds the version and nothing else."""

HEAVY = {"torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate", "datasets", "deepspeed"}
LIGHT_ROOMS = {
    "errors",
    "log",
    "endings",
    "cache",
    "variables",
    "environment",
    "entry",
    "config",
    "facts",
    "starter",
    "runs",
    "plan",
    "launch",
    "start",
    "cli",
}


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = path
    return found


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports(path: Path, *, only_at_load: bool = False) -> set[str]:
    """Full names of imported modules; with `only_at_load`, those inside functions left out."""
    tree = tree_of(path)
    inner = {
        id(node)
        for function in ast.walk(tree)
        if only_at_load and isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if only_at_load and id(node) in inner:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def test_every_module_has_a_floor():
    assert len(modules()) > 35
    for name in modules():
        assert name.split(".")[0] in FLOORS, f"{name} has no floor: add its room to FLOORS"


@pytest.mark.parametrize("name", sorted(modules()))
def test_a_module_imports_only_from_its_room_or_lower_floors(name):
    room = name.split(".")[0]
    for imported in imports(modules()[name]):
        parts = imported.split(".")
        if parts[0] != "sft_play" or len(parts) < 2 or parts[1] not in FLOORS:
            continue
        other = parts[1]
        assert other == room or FLOORS[other] < FLOORS[room], f"{name} imports {imported}: an arrow that runs up"


@pytest.mark.parametrize("name", [name for name in sorted(modules()) if name.split(".")[0] in LIGHT_ROOMS])
def test_a_light_module_imports_no_heavy_library(name):
    heavy = {imported.split(".")[0] for imported in imports(modules()[name])} & HEAVY
    assert not heavy, f"{name} imports {heavy}"


def test_the_data_room_imports_heavy_libraries_only_inside_functions():
    for name, path in modules().items():
        if name.startswith("data"):
            assert not {item.split(".")[0] for item in imports(path, only_at_load=True)} & HEAVY, name


def test_only_the_trainer_knows_trl():
    knowing = {name for name, path in modules().items() if any(item.split(".")[0] == "trl" for item in imports(path))}
    assert knowing == {"train.trainer"}


def test_planning_loads_no_torch():
    code = (
        "import sys; from sft_play.cli import main; "
        "rc = main(['plan', '--config', 'configs/run_gemma27b_distributed.yaml', '--hardware', '2xH200', '--json']); "
        f"heavy = {sorted(HEAVY)!r}; found = [name for name in heavy if name in sys.modules]; "
        "sys.exit(f'loaded {found}' if found or rc else 0)"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr


def test_nothing_prints_and_entry_points_are_thin():
    for name, path in modules().items():
        tree = tree_of(path)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        assert not [call for call in calls if call.func.id == "print"], f"{name} prints"
    scripts = [ROOT / "scripts" / f"{name}.py" for name in ("train", "resume", "plan")]
    for script in scripts:
        assert len(script.read_text(encoding="utf-8").splitlines()) <= 20


@pytest.mark.parametrize("path", sorted(leaves()))
def test_the_owner_of_an_option_reads_it(path):
    leaf = leaves()[path]
    source = PACKAGE / (leaf.owner.replace(".", "/") + ".py")
    assert source.exists(), f"{path}: its owner {leaf.owner} does not exist"
    tree = tree_of(source)
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert path.rpartition(".")[2] in read, f"{path}: {leaf.owner} never reads it"


def test_every_public_function_has_a_docstring():
    missing = []
    for name, path in modules().items():
        tree = tree_of(path)
        holders = [
            tree,
            *(node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")),
        ]
        for node in (node for holder in holders for node in holder.body):
            is_public = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
            if is_public and not ast.get_docstring(node):
                missing.append(f"{name}.{node.name}")
    assert not set(missing) - {"data.render.apply_chat_template", "data.render.decode"}, missing
