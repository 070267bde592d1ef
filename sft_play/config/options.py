"""The options of `RunConfig` as a table: path, default, owner, docstring, and the values that each
accepts.

Whatever lists options (error messages, the reference, the tests) reads this table.
"""

import json
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from sft_play.config.schema import (
    EXTERNAL_NAMES,
    HUB_KERNEL_PATTERN,
    OWNER,
    ExternalNames,
    RunConfig,
    Section,
    TrainConfig,
)
from sft_play.config.yaml_io import nest_values


@dataclass(frozen=True)
class Option:
    """One option: `path` is dotted, `default` is plain data, `accepted_values` completes "expected
    …"."""

    path: str
    default: Any
    required: bool
    owner: str
    doc: str
    accepted_values: str


@cache
def all_options() -> dict[str, Option]:
    """Every option by its dotted path, in the order of the schema."""
    return {
        path: field_option(path, field)
        for path, field, section in _walk_fields(RunConfig)
        if section is None
    }


def option_accepts(path: str, value: Any) -> bool:
    """True if an option accepts a value (plain data), whatever the other options are."""
    try:  # with model.name, the one key without a default
        RunConfig.model_validate_json(json.dumps(nest_values({"model.name": "any", path: value})))
    except ValidationError:
        return False
    return True


def find_option(name: str) -> list[str]:
    """Return the dotted paths of the options and sections of that name."""
    return [
        path for path in [*all_options(), *sections()] if path and path.rpartition(".")[2] == name
    ]


@cache
def sections() -> dict[str, type[Section]]:
    """Every section by its dotted path; the root is the empty path."""
    return {"": RunConfig} | {
        path: section for path, _, section in _walk_fields(RunConfig) if section is not None
    }


@cache
def list_item_sections() -> dict[str, type[Section]]:
    """The sections that are items of lists, by the dotted path of the list (`data.sources`)."""
    items = (
        (path, _list_item_section(field.annotation)) for path, field, _ in _walk_fields(RunConfig)
    )
    return {path: section for path, section in items if section is not None}


def _list_item_section(annotation: Any) -> type[Section] | None:
    """The section that a list holds; None for lists of values and for everything else."""
    item_type = next(iter(get_args(annotation)), None) if get_origin(annotation) is tuple else None
    return item_type if isinstance(item_type, type) and issubclass(item_type, Section) else None


def _walk_fields(
    model: type[Section], prefix: str = ""
) -> Iterator[tuple[str, FieldInfo, type[Section] | None]]:
    """Every field at and below a section by its dotted path, with the section that it holds; None
    for an option."""
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            yield prefix + name, field, section
            yield from _walk_fields(section, f"{prefix}{name}.")
        else:
            yield prefix + name, field, None


def field_option(path: str, field: FieldInfo) -> Option:
    """Describe a field of the schema as an option."""
    extra = field.json_schema_extra
    owner = str(extra[OWNER]) if isinstance(extra, dict) and OWNER in extra else ""
    # a derived default: the one that follows where no other key of the section is given
    default = field.get_default(call_default_factory=True, validated_data={})
    return Option(
        path=path,
        default=None if default is PydanticUndefined else to_jsonable_python(default),
        required=field.is_required(),
        owner=owner,
        doc=(field.description or "").strip(),
        accepted_values=describe_values(field.annotation, tuple(field.metadata)),
    )


def format_yaml_value(value: Any) -> str:
    """A default as written in YAML: JSON is YAML, but plain words and numbers need no quotes."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and 0 < value < 1e-3:
        return f"{value:g}"
    return json.dumps(value)


def describe_values(annotation: Any, limits: tuple[Any, ...] = ()) -> str:
    """The values that an annotation accepts, in words: `auto or a whole number of at least 1`."""
    origin = get_origin(annotation)
    if origin is Annotated:
        item_annotation, *metadata = get_args(annotation)
        # a Field holds its constraints, others are one
        constraints = [part for item in metadata for part in getattr(item, "metadata", [item])]
        return describe_values(item_annotation, tuple(constraints))
    if origin in (Union, types.UnionType):
        return " or ".join(
            dict.fromkeys(describe_values(member, limits) for member in get_args(annotation))
        )
    if origin is Literal:
        *literals, last_literal = map(str, get_args(annotation))
        return f"{', '.join(literals)} or {last_literal}" if literals else last_literal
    if (section := _list_item_section(annotation)) is not None:
        return f"a list of sections with {', '.join(section.model_fields)}"
    if origin is tuple:
        item, *further_items = get_args(annotation)
        if further_items != [...]:
            return "a list"
        return (
            "a list of text"
            if item is str
            else f"a list of {describe_values(item).removeprefix('a ')}"
        )
    if origin is dict:
        return "a mapping of words to words"
    if HUB_KERNEL_PATTERN in (getattr(limit, "pattern", None) for limit in limits):
        return (
            "a flash attention kernel of the hub with its commit (owner/name@40 hexadecimal digits)"
        )
    description = _TYPE_DESCRIPTIONS.get(annotation, str(annotation))
    words = {"ge": "of at least", "gt": "above", "lt": "below", "le": "of at most"}
    bounds = [
        (word, getattr(limit, name, None)) for limit in limits for name, word in words.items()
    ]
    phrases = [
        f"{word} {value:g}" if isinstance(value, float) else f"{word} {value}"
        for word, value in bounds
        if annotation in (int, float) and value is not None
    ]
    return f"{description} {' and '.join(phrases)}" if phrases else description


_TYPE_DESCRIPTIONS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
}


# --- the options that steer the optimizer ---------------------------------------------------------
# The Trainer's arguments (TRL's and Unsloth's), what DeepSpeed's file may not contradict, what
# peers of `make bench` are told, TensorBoard's table of runs, the hints for other tools' names and
# the check for options that an optimizer does not read all come from this table, which is made of
# the fields of `schema.py` that are `optimizer_option(…)`.


@dataclass(frozen=True)
class OptimizerOption:
    """A key of the section `train`, and its other names."""

    name: str
    default: Any
    external_names: ExternalNames

    @property
    def path(self) -> str:
        """Its dotted path."""
        return f"train.{self.name}"

    @property
    def other_names(self) -> list[str]:
        """Names for it in other tools' files, the Trainer's and DeepSpeed's among them."""
        names = [
            self.external_names.trainer,
            (self.external_names.deepspeed or "").rpartition(".")[2],
            *self.external_names.other_tools.split(),
        ]
        return [
            name
            for name in dict.fromkeys(names)
            if name not in ("", self.name) and not name.isdigit()
        ]

    def value(self, config: RunConfig) -> Any:
        """Its value in a run; the run's own property of that name says what auto is."""
        value = getattr(config.train, self.name)
        return getattr(config, self.name) if value == "auto" else value


def optimizer_options() -> tuple[OptimizerOption, ...]:
    """The table, in the order of the schema."""
    fields = TrainConfig.model_fields
    metadata: dict[str, Any] = {name: fields[name].json_schema_extra for name in fields}
    return tuple(
        OptimizerOption(name, fields[name].default, entries[EXTERNAL_NAMES])
        for name, entries in metadata.items()
        if EXTERNAL_NAMES in entries
    )
