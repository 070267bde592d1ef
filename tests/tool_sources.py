"""Defaults of other tools as their own source has them: read by its syntax, in wheels or where it is installed."""

import ast
import os
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
        given = node.args.args
        yield from zip(
            (one.arg for one in given[len(given) - len(node.args.defaults) :]), node.args.defaults, strict=True
        )
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
