"""YAML as people mean it: numbers are numbers, words are words, and the line of every value is
kept.

PyYAML reads YAML 1.1, in which `2e-4` is a string, `no` is false, `010` is eight and `12:30:45` a
number; and it silently keeps the last of two equal keys. This reader resolves plain scalars by the
YAML 1.2 core schema (https://yaml.org/spec/1.2.2/#103-core-schema), builds plain data only (no tag
can construct an object), and reports duplicate keys with both lines.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

import yaml

from sft_play.errors import ConfigError
from sft_play.log import one_line
from sft_play.spelling import nearest_name
from sft_play.variables import DATA_SUFFIXES

# Plain data: what a YAML value becomes, JSON's types only.
JsonValue = Union[None, bool, int, float, str, list["JsonValue"], dict[str, "JsonValue"]]  # noqa: UP007  (recursive)

# The path of a value: keys and list positions from the root.
KeyPath = tuple[str | int, ...]

# The place of an override in messages, where a value of the file has its line.
OVERRIDE_LOCATION = "SET"

# More values than any run YAML has; stops aliases that expand endlessly ("billion laughs").
MAX_VALUES = 100_000

# More than any such file has; weights or a log named by mistake stop here.
MAX_FILE_BYTES = 64 * 2**20

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL_FLOAT = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
# Tags of plain data; ? and ! are of nodes without one. A timestamp stays the text that it is.
_PLAIN_TAGS = {
    *("?", "!"),
    *(
        f"tag:yaml.org,2002:{name}"
        for name in ("str", "int", "float", "bool", "null", "seq", "map", "timestamp")
    ),
}


@dataclass(frozen=True)
class Problem:
    """One problem: the key's path, its place (`file:line`), and what to do about it."""

    path: str
    location: str
    message: str

    def __str__(self) -> str:
        return ": ".join([*filter(None, (self.location, self.path)), self.message])


@dataclass
class YamlDocument:
    """A YAML file as plain data, with the line and the raw text of every value."""

    name: str
    data: dict[str, JsonValue] = field(default_factory=dict)
    lines: dict[KeyPath, int] = field(default_factory=dict)
    raw_texts: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    overridden_paths: set[KeyPath] = field(default_factory=set)
    # Of a stage: where each setting of its own stands in the file.
    stage_paths: dict[KeyPath, KeyPath] = field(default_factory=dict)

    def location(self, path: KeyPath) -> str:
        """Say where a value stands: `SET` for an override, else `file:line` of the value or its
        nearest ancestor."""
        for override_path in self.overridden_paths:
            if path[: len(override_path)] == override_path or (
                override_path[: len(path)] == path and path not in self.lines
            ):
                return OVERRIDE_LOCATION
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.name}:{self.lines[path]}" if path in self.lines else self.name

    def ensure_section(self, path: KeyPath) -> dict[str, JsonValue] | None:
        """Return the section at a path, made if it is missing or null; None if something on the way
        is no section."""
        value: JsonValue = self.data
        for part in path:
            if isinstance(value, list) and isinstance(part, int):
                value = value[part] if part < len(value) else None
                continue
            if not isinstance(value, dict):
                return None
            if value.get(str(part)) is None:
                value[str(part)] = {}
            value = value[str(part)]
        return value if isinstance(value, dict) else None

    def problem(self, path: KeyPath, message: str) -> Problem:
        """A problem of the value at `path`."""
        own_key = next((key for key in self.stage_paths if path[: len(key)] == key), ())
        shown_path = (*self.stage_paths.get(own_key, ()), *path[len(own_key) :])
        return Problem(dotted_path(shown_path), self.location(path), message)

    def forget(self, path: KeyPath) -> None:
        """Drop lines, texts and overrides of a value that is replaced, and of what is in it."""
        self.lines = {old: line for old, line in self.lines.items() if old[: len(path)] != path}
        self.raw_texts = {
            old: text for old, text in self.raw_texts.items() if old[: len(path)] != path
        }
        self.overridden_paths = {old for old in self.overridden_paths if old[: len(path)] != path}

    def add_problem(self, path: KeyPath, node: yaml.Node, message: str) -> None:
        """Note a problem of the text itself."""
        self.problems.append(
            Problem(dotted_path(path), f"{self.name}:{_line_number(node)}", message)
        )


class _Loader(yaml.SafeLoader):
    """Composes nodes only: PyYAML's implicit resolvers and constructors are never used."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  (PyYAML's name)


def read_text(
    path: Path, *, variable: str | None = None, expected: str = "a run YAML (make new writes one)"
) -> str:
    """Read a UTF-8 file, without a byte order mark. `variable`: the variable that names it
    (`DEEPSPEED_CONFIG`); None: it is a run YAML. `expected`: what it should be. Raises ConfigError
    where it is no such file."""
    display_path = f"{variable}={one_line(str(path))}" if variable else one_line(str(path))
    if variable is None and path.suffix.lower() in DATA_SUFFIXES:
        raise ConfigError(
            f"CONFIG={display_path} is a data file; CONFIG names a run YAML, which names the data:"
            f" make new MODEL=owner/name DATA={display_path} writes one"
        )
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{display_path} has {path.stat().st_size:,} bytes; name {expected}")
        raw = path.read_bytes()
        return raw.decode("utf-8-sig")
    except FileNotFoundError:
        suggestion = _suggest_file(
            path, (path.suffix, ".yaml", ".yml", ".json") if variable else (".yaml", ".yml")
        )
        raise ConfigError(
            f"{display_path} does not exist (looked in {path.absolute().parent}){suggestion}"
        ) from None
    except IsADirectoryError:
        raise ConfigError(f"{display_path} is a folder; name {expected}") from None
    except OSError as error:
        raise ConfigError(
            f"{display_path} cannot be read: {error.strerror}; name {expected}"
        ) from None
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{display_path}:{line}: byte 0x{raw[error.start]:02X} is not UTF-8;"
            " save the file as UTF-8"
        ) from None
    except ValueError as error:  # a null character in the name
        raise ConfigError(f"{display_path} cannot be a file: {error}") from None


def _suggest_file(path: Path, suffixes: tuple[str, ...]) -> str:
    """Suggest the file that was probably meant, beside the path or in configs/; else list those
    that there are."""
    stem = path.stem if path.suffix in suffixes else path.name
    existing: list[Path] = []
    for folder in (path.parent, Path("configs")):
        files = {
            file.name: file for file in sorted(folder.glob("[!.]*")) if file.suffix in suffixes
        }
        stems = {file.stem: file for file in files.values()}
        if match := nearest_name(stem, stems) or nearest_name(path.name, files):
            return f"; did you mean {stems.get(match) or files[match]}?"
        existing = existing or list(files.values())
    return f"; there are: {', '.join(map(str, existing[:20]))}" if existing else ""


def parse_yaml(text: str, *, name: str) -> YamlDocument:
    """Parse a YAML text whose root is a mapping. Raises ConfigError where the text is not YAML, is
    empty, holds several documents, or its root is not a mapping."""
    node = _compose(text, name=name)
    if node is None:
        raise ConfigError(
            f"{name}: the file is empty; a run YAML needs at least `model: {{name: …}}`"
        )
    if not isinstance(node, yaml.MappingNode):
        kind = (
            "a list"
            if isinstance(node, yaml.SequenceNode)
            else f"the value {one_line(str(node.value))!r}"
        )
        raise ConfigError(
            f"{name}:{_line_number(node)}: the root is {kind};"
            " expected sections such as `model: {name: …}`"
        )
    document = YamlDocument(name=name)
    document.data = _read_mapping(document, node, (), (id(node),))
    return document


def parse_yaml_value(text: str, *, name: str) -> JsonValue:
    """Parse a text as one YAML value: what follows `key=` in an override. Raises ConfigError where
    it is none."""
    node = _compose(text, name=name)
    if node is None:
        return None
    document = YamlDocument(name=name)
    value = _read_value(document, node, ())
    if document.problems:
        raise ConfigError("\n".join(map(str, document.problems)))
    return value


def _compose(text: str, *, name: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        location = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        problem, hint = error.problem or str(error), ""
        if "\\t" in problem or "'\t'" in problem:
            hint = "; indent with spaces, not tabs"
        elif "mapping values are not allowed" in problem or "but got ':'" in problem:
            hint = '; put a value that contains ": " in quotes'
        raise ConfigError(f"{location}: not valid YAML: {one_line(problem)}{hint}") from None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        code = error.character if isinstance(error.character, int) else ord(error.character)
        raise ConfigError(
            f"{name}:{line}: the character {one_line(repr(chr(code)))} is not allowed in YAML"
        ) from None
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply") from None


def _line_number(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _read_mapping(
    document: YamlDocument, node: yaml.MappingNode, path: KeyPath, parents: tuple[int, ...]
) -> dict[str, JsonValue]:
    """A mapping's plain data; duplicate and non-text keys become problems."""
    result: dict[str, JsonValue] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            document.add_problem(path, key_node, "a key must be a word")
            continue
        key_path = (*path, key := str(key_node.value))
        if key in result:
            document.add_problem(
                key_path,
                key_node,
                f"the key appears twice, first on line {document.lines[key_path]}",
            )
            continue
        document.lines[key_path] = _line_number(key_node)
        result[key] = _read_value(document, value_node, key_path, parents)
    return result


def _read_value(
    document: YamlDocument, node: yaml.Node, path: KeyPath, parents: tuple[int, ...] = ()
) -> JsonValue:
    """Read the plain data of a node; its line and raw text go into the document. `parents`: the
    nodes that contain it."""
    if path:
        document.lines.setdefault(path, _line_number(node))
    # an alias that names its own ancestor, or aliases of aliases
    if len(document.lines) > MAX_VALUES or id(node) in parents:
        raise ConfigError(f"{document.name}:{_line_number(node)}: aliases expand without end")
    if node.tag not in _PLAIN_TAGS:
        document.add_problem(
            path,
            node,
            f"the tag {one_line(node.tag)} is refused: a run YAML holds plain values only",
        )
        return None
    parents = (*parents, id(node))
    if isinstance(node, yaml.MappingNode):
        return _read_mapping(document, node, path, parents)
    if isinstance(node, yaml.SequenceNode):
        return [
            _read_value(document, item, (*path, index), parents)
            for index, item in enumerate(node.value)
        ]
    assert isinstance(node, yaml.ScalarNode)
    document.raw_texts[path] = str(node.value)
    # a quoted "1" is text, also as a block (| or >)
    return resolve_scalar(str(node.value)) if node.style is None else str(node.value)


def resolve_scalar(text: str) -> JsonValue:
    """What an unquoted scalar means in the YAML 1.2 core schema; a number with a leading zero stays
    a string."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        # int() refuses texts of more than 4,300 digits
        return int(text) if len(text) < 4_000 else text
    if _FLOAT.fullmatch(text):
        return float(text)
    if _SPECIAL_FLOAT.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def dotted_path(path: KeyPath) -> str:
    """`('data', 'columns', 0)` as `data.columns[0]`, with odd characters escaped."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return one_line("".join(parts).removeprefix("."))


def walk_leaves(data: JsonValue, path: KeyPath = ()) -> Iterator[tuple[KeyPath, JsonValue]]:
    """Yield every leaf of plain data with its path; empty mappings and lists are leaves."""
    if isinstance(data, dict) and data:
        for key, value in data.items():
            yield from walk_leaves(value, (*path, key))
    else:
        yield path, data


def nest_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted paths as nested mappings."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *parents, name = path.split(".")
        section = tree
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
    return tree


def find_value(data: JsonValue, path: KeyPath) -> JsonValue:
    """The value at a path of plain data; None where there is none."""
    for part in path:
        if isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        elif isinstance(data, dict) and part in data:
            data = data[str(part)]
        else:
            return None
    return data


def format_value(value: JsonValue, *, raw_text: str | None = None) -> str:
    """A value as shown in a message: the raw text if there is one, else JSON, cut to one line."""
    if isinstance(value, str):
        return one_line(json.dumps(value, ensure_ascii=False), limit=80)
    return one_line(raw_text or json.dumps(value, ensure_ascii=False), limit=80)
