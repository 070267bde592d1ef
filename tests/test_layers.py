"""The layers: who may import whom, who may import torch, who reads which option, and who may handle which error."""

import ast
import builtins
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sft_play import errors
from sft_play.config.options import all_options, optimizer_options
from tests.conftest import ROOT

PACKAGE = ROOT / "sft_play"

LAYERS = {
    name: layer
    for layer, names in {
        -2: "exit_codes spelling", -1: "variables", 0: "_version answers errors log", 1: "text files",
        2: "process starter", 3: "config machine models", 4: "runs planner data", 5: "documents training", 6: "trace",
        7: "finished", 8: "launch", 9: "diagnose dist", 10: "commands api", 11: "cli", 12: "entry", 13: "__main__",
    }.items()
    for name in names.split()
}  # fmt: skip
"""Package or module of the package: layer. `sft_play/__init__.py` itself holds the version and the names of `api`."""

STARTED = {("launch.torchrun", "launch.agent"): "the program that is run in the place of torch.distributed.run"}
"""A module that a string names, since it is started as a process of its own, and why."""

HEAVY = {"torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate", "datasets", "deepspeed"}
LIGHT_PACKAGES = LAYERS.keys() - {"data", "documents", "training", "trace", "finished", "diagnose", "dist", "__main__"}

KNOW_TORCH = {
    "launch.agent": "a process of its own, around torch's launcher",
    "launch.nodes": "torch's store, in which nodes meet",
}
"""Modules of a light package that use torch, and what of it."""


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
    functions = [one for one in ast.walk(tree) if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inner = {id(node) for function in functions if only_at_load for node in ast.walk(function)}
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


def used_by(name: str, *, lazy: bool = True) -> set[str]:
    """Modules of the package that a module imports, inside functions too."""
    path, used = modules()[name], set()
    for imported in imports(path, only_at_load=not lazy):
        inside = imported.removeprefix("sft_play.")
        if imported.startswith("sft_play.") and inside in modules():
            used.add(inside)
    return used - {name}


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """The nodes of one cycle in their order; empty where there is none."""
    done: set[str] = set()

    def walk(node: str, way: list[str]) -> list[str]:
        if node in way:
            return way[way.index(node) :]
        if node in done:
            return []
        for other in sorted(graph[node]):
            cycle = walk(other, [*way, node])
            if cycle:
                return cycle
        done.add(node)
        return []

    return next((cycle for node in sorted(graph) if (cycle := walk(node, []))), [])


def test_every_module_has_a_layer_and_every_layer_a_module():
    assert len(modules()) > 35
    tops = {name.split(".")[0] for name in modules()}
    assert tops - LAYERS.keys() == set(), "no layer: add the package to LAYERS"
    assert LAYERS.keys() - tops == set(), "a layer of what is not there"


def test_a_module_imports_only_from_its_package_or_lower_layers():
    for name, path in modules().items():
        package = name.split(".")[0]
        for imported in imports(path):
            root, _, other = imported.partition(".")
            top = other.partition(".")[0]
            if root == "sft_play" and top in LAYERS and top != package:
                assert LAYERS[top] < LAYERS[package], f"{name} imports {imported}: an arrow that runs up"


def test_no_modules_import_each_other_in_a_circle():
    """Neither at load nor inside functions, within a package or between two."""
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert cycle_in({name: used_by(name) for name in modules()}) == []


def test_no_module_needs_the_root_of_the_package():
    """It names `api`, which imports nearly all of them; only modules may be taken from it."""
    for name, path in modules().items():
        taken = {one for one in imports(path) if one.split(".")[0] == "sft_play"} - {"sft_play"}
        assert all(one.split(".")[1] in {other.split(".")[0] for other in modules()} for one in taken), name
        plain = {alias.name for node in ast.walk(tree_of(path)) if isinstance(node, ast.Import) for alias in node.names}
        assert "sft_play" not in plain, f"{name}: import sft_play._version, or the module that is meant"


def test_a_light_module_imports_no_heavy_library_and_data_only_inside_functions():
    for name, path in modules().items():
        package = name.split(".")[0]
        heavy = {imported.split(".")[0] for imported in imports(path, only_at_load=package == "data")} & HEAVY
        if name in KNOW_TORCH:
            heavy -= {"torch"}
        assert not heavy or package not in {*LIGHT_PACKAGES, "data"}, f"{name} imports {heavy}"


def test_only_the_trainer_its_templates_and_traces_know_trl():
    """By an import, or by a module's name in a string, as importlib takes it."""
    importing = {name for name, path in modules().items() if any(item.split(".")[0] == "trl" for item in imports(path))}
    assert importing == {"training.loop.trainer", "training.prepare.tokenizer", "training.model.fused_head"}
    naming = {
        name
        for name, path in modules().items()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and re.match(r"trl\.\w+[\w.]*(:\w+)?$", str(node.value))
    }
    assert naming == {"trace.build", "trace.patches"}


@pytest.mark.parametrize("package", ["training", "trace", "launch"])
def test_the_map_of_a_large_package_names_each_of_its_modules_once(package):
    """Its docstring: where a reader finds what."""
    named = re.findall(r"`(\w+)`", ast.get_docstring(tree_of(PACKAGE / package / "__init__.py")) or "")
    inside = [path for name, path in modules().items() if name.startswith(f"{package}.")]
    theirs = [path.stem for path in inside if path.name != "__init__.py"]
    assert len(theirs) > 5
    assert sorted(named) == sorted(theirs)


def test_nothing_prints_and_entry_points_are_thin():
    for name, path in modules().items():
        tree = tree_of(path)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        assert not [call for call in calls if call.func.id == "print"], f"{name} prints"
    for script in ("train", "resume", "plan"):
        assert len((ROOT / "scripts" / f"{script}.py").read_text(encoding="utf-8").splitlines()) <= 20


def test_the_owner_of_an_option_reads_it():
    of_the_table = {option.path for option in optimizer_options()}
    for path, leaf in all_options().items():
        source = PACKAGE / (leaf.owner.replace(".", "/") + ".py")
        assert source.exists(), f"{path}: its owner {leaf.owner} does not exist"
        read = {node.attr for node in ast.walk(tree_of(source)) if isinstance(node, ast.Attribute)}
        if path in of_the_table and "optimizer_options" in source.read_text(encoding="utf-8"):
            continue  # its owner reads the table
        assert path.rpartition(".")[2] in read, f"{path}: {leaf.owner} never reads it"


def test_every_public_function_has_a_docstring_or_is_an_outcomes():
    """The docstrings of `Answer` hold for what every command answers with."""
    missing, of_outcomes = [], {"ok", "as_json", "lines"}
    for name, path in modules().items():
        tree = tree_of(path)
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
        holders = [tree, *classes]
        for of, node in ((one, node) for one in holders for node in one.body):
            is_public = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
            is_outcome = "Answer" in (ast.unparse(base) for base in getattr(of, "bases", ()))
            if is_public and not ast.get_docstring(node) and not (is_outcome and node.name in of_outcomes):
                missing.append(f"{name}.{node.name}")
    assert not set(missing) - {"data.render.apply_chat_template", "data.render.decode"}, missing


# Refusals reach the user: no handler of a library's errors takes one of the project's own for it.
OWN = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
OF_LIBRARIES = {"open", "read", "read_text", "run", "from_config"}
"""Methods of files, launchers and transformers that some of the project's share their name with."""


def name_of(node: ast.expr | None) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def calls_in(nodes: list[ast.stmt]) -> set[str]:
    called = [one.func for node in nodes for one in ast.walk(node) if isinstance(one, ast.Call)]
    return {name_of(one) for one in called if not (isinstance(one, ast.Attribute) and one.attr in OF_LIBRARIES)} - {""}


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
    """(line, function, body, what is handled, what was handled before) of each `except` and `suppress` that neither
    raises the error again nor puts it into a list for who raises it later."""
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(function):
            if isinstance(node, ast.Try):
                before: set[str] = set()
                for handler in node.handlers:
                    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
                    here = {name_of(kind) for kind in kinds}
                    is_raised = any(isinstance(one, ast.Raise) and one.exc is None for one in ast.walk(handler))
                    is_listed = ast.unparse(handler.body[0]).endswith(f".append({handler.name})")
                    if not is_raised and not is_listed:
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
            methods = {one.attr for node in body for one in ast.walk(node) if isinstance(one, ast.Attribute)}
            for name in calls_in(body):
                of_methods = raising.get((None, name), set()) if name in methods else set()
                for error in raising.get((imported.get(name, path), name), set()) | of_methods:
                    kinds = {kind.__name__ for kind in OWN[error].__mro__}
                    is_wide = any(issubclass(OWN[error], kind) for kind in wide) and not here & set(OWN)
                    if is_wide and not before & kinds & set(OWN):
                        found.append(f"{path.name}:{line} {function}: {error} of {name}")
    return sorted(found)


def test_no_handler_hides_a_refusal():
    """Each error is also the standard library's type that it refines, so a handler of the wide type around a call that
    refuses would hide the refusal, unless one of the project's classes is handled before it."""
    trees = {path: tree_of(path) for path in modules().values()}
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


@pytest.mark.parametrize(("handled", "is_hidden"), [
    *((name, True) for name in ("ValueError", "(TypeError, Exception)")),
    *((name, False) for name in ("TypeError", "OSError", "ConfigError")),
    ("SftPlayError:\n        raise\n    except ValueError", False),
])  # fmt: skip
def test_a_handler_that_hides_a_refusal_is_found(handled, is_hidden):
    found = hidden_in({Path("x.py"): ast.parse(HIDING.format(handled=handled))})
    expected = ["x.py:12 length: ConfigError of deeper"] if is_hidden else []
    assert found == [*expected, "x.py:5 settle: RunFolderError of manifest"]
