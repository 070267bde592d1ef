"""The leaves of `RunConfig` as a table: path, default, owner, docstring, and the values that each accepts.

Whatever lists options (error messages, the reference, the tests) reads this table.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from sft_play.config import schema
from sft_play.config.schema import ELSEWHERE, HUB_KERNEL, OWNER, Elsewhere, RunConfig, Section


@dataclass(frozen=True)
class Leaf:
    """One option: `path` is dotted, `default` is plain data, `expects` completes "expected …"."""

    path: str
    default: Any
    required: bool
    owner: str
    doc: str
    expects: str


@cache
def leaves() -> dict[str, Leaf]:
    """Every leaf by its dotted path, in the order of the schema."""
    return {leaf.path: leaf for leaf in _walk(RunConfig, "")}


def accepts(path: str, value: Any) -> bool:
    """Whether a leaf accepts a value (plain data), whatever the other leaves are."""
    data: dict[str, Any] = {"model": {"name": "any"}}  # the one key without a default
    *holders, name = path.split(".")
    section = data
    for holder in holders:
        section = section.setdefault(holder, {})
    section[name] = value
    try:
        RunConfig.model_validate_json(json.dumps(data))
    except ValidationError:
        return False
    return True


def homes(name: str) -> list[str]:
    """The leaves and sections with that name, by their dotted paths."""
    return [path for path in [*leaves(), *sections()] if path and path.rpartition(".")[2] == name]


@cache
def sections() -> dict[str, type[Section]]:
    """Every section by its dotted path; the root is the empty path."""
    return {"": RunConfig, **dict(_sections(RunConfig, ""))}


def _sections(model: type[Section], prefix: str) -> Iterator[tuple[str, type[Section]]]:
    for name, field in model.model_fields.items():
        inner = _section_type(field)
        if inner is not None:
            yield prefix + name, inner
            yield from _sections(inner, f"{prefix}{name}.")


@cache
def listed() -> dict[str, type[Section]]:
    """The sections that are items of lists, by the dotted path of the list (`data.sources`)."""
    return {
        prefix + name: inner
        for holder, section in sections().items()
        for prefix in [f"{holder}." if holder else ""]
        for name, field in section.model_fields.items()
        if (inner := _item_type(field.annotation)) is not None
    }


def item_leaf(path: str, name: str) -> Leaf:
    """A leaf of the sections in a list."""
    return _leaf(name, listed()[path].model_fields[name])


def _item_type(kind: Any) -> type[Section] | None:
    """The section that a list holds; None for lists of values and for everything else."""
    first = next(iter(get_args(kind)), None) if get_origin(kind) is tuple else None
    return first if isinstance(first, type) and issubclass(first, Section) else None


def _walk(model: type[Section], prefix: str) -> Iterator[Leaf]:
    for name, field in model.model_fields.items():
        inner = _section_type(field)
        if inner is not None:
            yield from _walk(inner, f"{prefix}{name}.")
        else:
            yield _leaf(prefix + name, field)


def _section_type(field: FieldInfo) -> type[Section] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _leaf(path: str, field: FieldInfo) -> Leaf:
    extra = field.json_schema_extra
    owner = str(extra[OWNER]) if isinstance(extra, dict) and OWNER in extra else ""
    # a derived default: the one that follows where no other key of the section is given
    default = field.get_default(call_default_factory=True, validated_data={})
    return Leaf(
        path=path,
        default=None if default is PydanticUndefined else plain(default),
        required=field.is_required(),
        owner=owner,
        doc=(field.description or "").strip(),
        expects=expects(field.annotation, tuple(field.metadata)),
    )


def plain(value: Any) -> Any:
    """A default as JSON has it: tuples become lists."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return [plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def yaml_value(value: Any) -> str:
    """A default as written in YAML: JSON is YAML, but plain words and numbers need no quotes."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and 0 < value < 1e-3:
        return f"{value:g}"
    return json.dumps(value)


def expects(kind: Any, limits: tuple[Any, ...] = ()) -> str:
    """The values that an annotation accepts, in words: `auto or a whole number of at least 1`."""
    origin = get_origin(kind)
    if origin is Annotated:
        inner, *more = get_args(kind)
        constraints: list[Any] = []
        for item in more:
            constraints += item.metadata if isinstance(item, FieldInfo) else [item]
        return expects(inner, tuple(constraints))
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(expects(option, limits) for option in get_args(kind)))
    if origin is Literal:
        *options, last = map(str, get_args(kind))
        return f"{', '.join(options)} or {last}" if options else last
    if (section := _item_type(kind)) is not None:
        return f"a list of sections with {', '.join(section.model_fields)}"
    if origin is tuple:
        item, *rest = get_args(kind)
        if rest != [...]:
            return "a list"
        return "a list of text" if item is str else f"a list of {expects(item).removeprefix('a ')}"
    if origin is dict:
        return "a mapping of words to words"
    for limit in limits:
        if getattr(limit, "pattern", None) in _FORMS:
            return _FORMS[limit.pattern]
    return _WORDS.get(kind, str(kind)) + _limits(limits, number=kind in (int, float))


def _limits(limits: tuple[Any, ...], *, number: bool) -> str:
    def shown(value: Any) -> str:
        return f"{value:g}" if isinstance(value, float) else str(value)

    said = {"ge": "of at least", "gt": "above", "lt": "below", "le": "of at most"}
    given = ((word, getattr(limit, name, None)) for limit in limits if number for name, word in said.items())
    words = [f"{word} {shown(value)}" for word, value in given if value is not None]
    return (" " + " and ".join(words)) if words else ""


_FORMS = {HUB_KERNEL: "a flash attention kernel of the hub with its commit (owner/name@40 hexadecimal digits)"}
_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
}


# --- the options that steer the optimizer -----------------------------------------------------------------------------
# The Trainer's arguments (TRL's and Unsloth's), what DeepSpeed's file may not contradict, what peers of `make bench`
# are told, TensorBoard's table of runs, the hints for other tools' names and the check for options that an optimizer
# does not read all come from this table, which is made of the fields of `schema.py` that are `training(…)`.


@dataclass(frozen=True)
class TrainingOption:
    """A key of the section `train`, and its other names."""

    name: str
    default: Any
    elsewhere: Elsewhere

    @property
    def key(self) -> str:
        """Its dotted path."""
        return f"train.{self.name}"

    @property
    def other_names(self) -> list[str]:
        """Names for it in other tools' files, the Trainer's and DeepSpeed's among them."""
        in_deepspeed = (self.elsewhere.deepspeed or "").rpartition(".")[2]
        names = [self.elsewhere.trainer, in_deepspeed, *self.elsewhere.tools.split()]
        return [name for name in dict.fromkeys(names) if name not in ("", self.name) and not name.isdigit()]

    def value(self, config: RunConfig) -> Any:
        """Its value in a run; the run's own property of that name says what auto is."""
        given = getattr(config.train, self.name)
        return getattr(config, self.name) if given == "auto" else given

    def is_read_by(self, optimizer: str) -> bool:
        """Whether a value of train.optim reads it."""
        return optimizer in (self.elsewhere.optimizers or (optimizer,))


def training_options() -> tuple[TrainingOption, ...]:
    """The table, in the order of the schema."""
    options = []
    for name, field in schema.TrainConfig.model_fields.items():
        extra: Any = field.json_schema_extra
        if ELSEWHERE in extra:
            options.append(TrainingOption(name, field.default, extra[ELSEWHERE]))
    return tuple(options)
