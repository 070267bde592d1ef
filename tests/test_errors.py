"""Refusals reach the user: no handler of a library's errors takes one of the project's own for it.

Each error is also the standard library's type that it refines, so a handler of the wide type around a call that
refuses would hide the refusal, unless one of the project's classes is handled before it.
"""

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path

import pytest

from sft_play import errors

PACKAGE = Path(errors.__file__).parent
OWN = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
OF_FILES = {"open", "read", "run"}
"""Methods of files and launchers that some of the project's share their name with."""


def name_of(node: ast.expr | None) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def calls_in(nodes: list[ast.stmt]) -> set[str]:
    called = [one.func for node in nodes for one in ast.walk(node) if isinstance(one, ast.Call)]
    return {name_of(one) for one in called if not (isinstance(one, ast.Attribute) and one.attr in OF_FILES)} - {""}


def imported_in(tree: ast.Module) -> dict[str, Path]:
    """The module of each name that is imported from one of the project's."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sft_play."):
            module = PACKAGE.parent / f"{str(node.module).replace('.', '/')}.py"
            found.update({alias.asname or alias.name: module for alias in node.names})
    return found


def refusals(trees: dict[Path, ast.Module]) -> dict[tuple[Path | None, str], set[str]]:
    """The errors that each function raises, itself or through others: by (module, name), methods by (None, name)."""
    found: dict[tuple[Path | None, str], set[str]] = {}
    calls: dict[tuple[Path | None, str], set[tuple[Path, str]]] = {}
    for path, tree in trees.items():
        imported = imported_in(tree)
        methods = {one for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for one in node.body}
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            key = (None if node in methods else path, node.name)
            raised = [one.exc for one in ast.walk(node) if isinstance(one, ast.Raise)]
            names = {name_of(one.func if isinstance(one, ast.Call) else one) for one in raised}
            found.setdefault(key, set()).update(names & set(OWN))
            calls[key] = {(imported.get(name, path), name) for name in calls_in(node.body)}
    grown = True
    while grown:
        grown = False
        for key, names in calls.items():
            more = set().union(*(found.get(name, set()) for name in names)) - found[key]
            found[key] |= more
            grown = grown or bool(more)
    return found


def handlers(tree: ast.Module) -> Iterator[tuple[int, str, list[ast.stmt], set[str], set[str]]]:
    """(line, function, body, what is handled, what was handled before) of each `except` and `suppress`."""
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(function):
            if isinstance(node, ast.Try):
                before: set[str] = set()
                for handler in node.handlers:
                    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
                    here = {name_of(kind) for kind in kinds}
                    if not any(isinstance(one, ast.Raise) and one.exc is None for one in ast.walk(handler)):
                        yield handler.lineno, function.name, node.body, here, set(before)
                    before |= here
            for item in node.items if isinstance(node, ast.With) else ():
                call = item.context_expr
                if isinstance(call, ast.Call) and name_of(call.func) == "suppress":
                    yield node.lineno, function.name, node.body, {name_of(one) for one in call.args}, set()


def hidden_in(trees: dict[Path, ast.Module]) -> list[str]:
    """The handlers of a wide type around a call that refuses."""
    raising, found = refusals(trees), []
    for path, tree in trees.items():
        imported = imported_in(tree)
        for line, function, body, here, before in handlers(tree):
            wide = [kind for name in here if isinstance(kind := getattr(builtins, name, None), type)]
            for name in calls_in(body):
                for error in raising.get((imported.get(name, path), name), set()) | raising.get((None, name), set()):
                    kinds = {kind.__name__ for kind in OWN[error].__mro__}
                    is_wide = any(issubclass(OWN[error], kind) for kind in wide) and not here & set(OWN)
                    if is_wide and not before & kinds & set(OWN):
                        found.append(f"{path.name}:{line} {function}: {error} of {name}")
    return sorted(found)


def test_no_handler_hides_a_refusal():
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    assert len(trees) > 100
    assert sum(len(list(handlers(tree))) for tree in trees.values()) > 200
    assert hidden_in(trees) == []


HIDING = """
def manifest(self):
    raise RunFolderError("another's")
def settle(folder):
    with suppress(OSError):
        folder.write(manifest(folder))
def refuse():
    raise ConfigError("no")
def length(text):
    try:
        return deeper(text)
    except {handled}:
        return None
def deeper(text):
    return refuse() if text else 0
"""


@pytest.mark.parametrize(
    ("handled", "is_hidden"),
    [
        *((name, True) for name in ("ValueError", "(TypeError, Exception)")),
        *((name, False) for name in ("TypeError", "OSError", "ConfigError")),
        ("SftPlayError:\n        raise\n    except ValueError", False),
    ],
)
def test_a_handler_that_hides_a_refusal_is_found(handled, is_hidden):
    found = hidden_in({Path("x.py"): ast.parse(HIDING.format(handled=handled))})
    expected = ["x.py:12 length: ConfigError of deeper"] if is_hidden else []
    assert found == [*expected, "x.py:5 settle: RunFolderError of manifest"]
