"""What an unknown key probably means: another tool's name for it, its place in another section, or a near spelling.

Keys that speak of one option are worked out together: `load_in_4bit: true` and `adapter: lora` are one QLoRA, not two
answers of which the last one counts.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sft_play.config import other_tools
from sft_play.config.options import all_options, find_option, format_yaml_value, option_accepts, sections
from sft_play.config.yaml_io import (
    OVERRIDE_LOCATION,
    JsonValue,
    KeyPath,
    Problem,
    YamlDocument,
    dotted_path,
    format_value,
    parse_yaml_value,
    walk_leaves,
)
from sft_play.errors import ConfigError
from sft_play.spelling import nearest_name

# Keys whose values are not repeated in a message; `pad_token` and the like name a token of the vocabulary.
_SECRET_NAME = re.compile(r"(?<!pad)(?<!eos)(?<!bos)(?<!unk)_token$|^token$|api_key|secret|password", re.IGNORECASE)
# Names that mean something else in every section: those of another tool's section are not looked up in ours.
_VAGUE_NAMES = {"name", "path", "dir", "mode", "steps", "how", "headers", "workers", "trace"}
# How similar names must be where nothing else connects them: `loss_fn` (0.86) is not a misspelt `loss_on`.
_MIN_SIMILARITY = 0.87


@dataclass(frozen=True)
class ForeignKey:
    """A key that our sections do not have: `section` is ours that holds it or corresponds to the one that does,
    `translation` what the table of other tools answers, `option_path` the only option of that name, which takes the
    value; None where there is none. `is_default`: it is not in the file, but what its tool takes then."""

    path: KeyPath
    value: JsonValue
    section: str | None
    translation: other_tools.KeyTranslation | None
    option_path: str | None = None
    is_default: bool = False

    @property
    def name(self) -> str:
        """The key alone."""
        return str(self.path[-1]).lower()

    @property
    def settings(self) -> dict[str, JsonValue]:
        """The options that it asks for, by their paths."""
        if self.translation is not None:
            return dict(self.translation.settings)
        return {} if self.option_path is None else {self.option_path: self.value}


def find_foreign_keys(
    document: YamlDocument, path: KeyPath, value: JsonValue, *, section: str | None
) -> Iterator[ForeignKey]:
    """Yield an unknown key, or every key in it if it is a section that the table does not answer as a whole.
    `section`: ours that holds it, or that the other tool's section corresponds to; None if unknown."""
    key, known_key = str(path[-1]), other_tools.find_known_key(tuple(map(str, path)))
    mapped_section = other_tools.key_table().sections.get(key.lower())
    is_translated_whole = (
        known_key is not None
        and (not known_key.path or known_key.path in other_tools.DATA_SET_OPTIONS)
        and mapped_section is None
    )
    if not isinstance(value, dict) or not value or is_translated_whole:
        yield _foreign_key(path, value, section)
        return
    similar_section = None if mapped_section is not None else nearest_name(key, [name for name in sections() if name])
    fields = (
        sections()[mapped_section or similar_section or ""].model_fields if mapped_section or similar_section else {}
    )
    known_names = [
        inner_key
        for inner_key in value
        if mapped_section is not None or (inner_key not in fields and _is_known_key((*path, inner_key)))
    ]
    if mapped_section is None and (section is not None or not known_names):
        yield _foreign_key(path, value, section)
    for inner_key in value:
        if inner_key in known_names or (similar_section is not None and inner_key not in fields):
            yield from find_foreign_keys(
                document, (*path, inner_key), value[inner_key], section=mapped_section or similar_section
            )


def _foreign_key(path: KeyPath, value: JsonValue, section: str | None) -> ForeignKey:
    parts = tuple(map(str, path))
    option_paths = _possible_options(parts, section)
    is_option_value = (
        len(option_paths) == 1 and option_paths[0] in all_options() and option_accepts(option_paths[0], value)
    )
    return ForeignKey(path, value, section, translate_key(parts, value), option_paths[0] if is_option_value else None)


def _possible_options(parts: tuple[str, ...], section: str | None) -> list[str]:
    """Where our keys of that name belong; none where the name is too vague to say."""
    key, is_in_own_section = parts[-1], section is not None and ".".join(parts[:-1]) == section
    paths = find_option(key)
    if section and not is_in_own_section and f"{section}.{key}" in paths:
        paths = [f"{section}.{key}"]
    if ".".join(parts) in all_options():
        paths = [".".join(parts)]
    return paths if is_in_own_section or len(paths) == 1 or key not in _VAGUE_NAMES else []


def translate_key(parts: tuple[str, ...], value: JsonValue) -> other_tools.KeyTranslation | None:
    """What the table of other tools answers; None without an answer, or where our own key says more than words."""
    known_key = other_tools.find_known_key(parts)
    # a row for both names (compile.mode) says more than the home of the last one (tuning.mode)
    is_two_part_name = len(parts) > 1 and ".".join(parts[-2:]).lower() in other_tools.key_table().known_keys
    if known_key is None or (find_option(parts[-1]) and known_key.has_fixed_answer and not is_two_part_name):
        return None
    return other_tools.translate_value(known_key, value)


def _is_known_key(path: KeyPath) -> bool:
    return other_tools.find_known_key(tuple(map(str, path))) is not None or bool(find_option(str(path[-1])))


def unknown_key_problem(document: YamlDocument, key: ForeignKey) -> Problem:
    """The problem of an unknown key."""
    location, raw_text = document.location(key.path), document.raw_texts.get(key.path)
    separator = "=" if location == OVERRIDE_LOCATION else ": "
    if key.translation is not None:
        hint = f"; {format_translation(key.translation, key.value, raw_text=raw_text, separator=separator)}"
    else:
        hint = _suggestion(
            tuple(map(str, key.path)), key.value, raw_text=raw_text, section=key.section, separator=separator
        )
    return Problem(dotted_path(key.path), location, f"unknown key ({format_key_value(key, raw_text)}){hint}")


def format_key_value(key: ForeignKey, raw_text: str | None) -> str:
    """`value 4`, or that it is a secret."""
    words = [
        str(part) for path, value in walk_leaves(key.value, key.path[-1:]) if isinstance(value, str) for part in path
    ]
    is_secret = any(map(_SECRET_NAME.search, words))
    return "not shown" if is_secret else f"value {format_value(key.value, raw_text=raw_text)}"


def flag_hint(flag: str, value: str | None) -> str | None:
    """What another tool's flag (`--mixed_precision`) with its value means here; None if unknown."""
    parts = tuple(flag.lstrip("-").replace("-", "_").split("."))
    try:
        parsed = True if value is None else parse_yaml_value(value, name=flag)
    except ConfigError:
        parsed = value
    if ".".join(parts) not in all_options() and (parts[-1] in _VAGUE_NAMES or not _is_known_key(parts)):
        return None
    translation = translate_key(parts, parsed)
    if translation is not None:
        return format_translation(translation, parsed, raw_text=value, separator="=")
    return _suggestion(parts, parsed, raw_text=value, section=None, separator="=").removeprefix("; ")


def _suggestion(
    parts: tuple[str, ...], value: JsonValue, *, raw_text: str | None, section: str | None, separator: str
) -> str:
    key, paths = parts[-1], _possible_options(parts, section)
    if paths:
        value_text = (
            f"{separator}{format_setting_value(value, raw_text)}"
            if len(paths) == 1 and paths[0] in all_options() and option_accepts(paths[0], value)
            else ""
        )
        return f"; it belongs at {' or '.join(paths[:3])}{value_text}"
    section_keys = list(sections()[section].model_fields) if section is not None else []
    similar_name = nearest_name(key, section_keys)
    if similar_name:
        return f"; did you mean {f'{section}.' if section else ''}{similar_name}?"
    other_names = {path.rpartition(".")[2] for path in [*all_options(), *sections()]} - _VAGUE_NAMES - {""}
    similar_name = (
        None
        if key in _VAGUE_NAMES
        else nearest_name(key, other_names, other_tools.key_table().plain_keys, min_similarity=_MIN_SIMILARITY)
    )
    if similar_name:
        if similar_paths := find_option(similar_name):
            return f"; did you mean {' or '.join(similar_paths[:3])}?"
        translation = other_tools.translate_value(other_tools.key_table().known_keys[similar_name], value)
        meaning = format_translation(translation, value, raw_text=raw_text, separator=separator)
        return f"; did you mean {similar_name} ({meaning})?"
    return f"; {section or 'the root'} takes {', '.join(section_keys or sections()[''].model_fields)}"


def format_translation(
    translation: other_tools.KeyTranslation, value: JsonValue, *, raw_text: str | None, separator: str
) -> str:
    """An answer of the table in words: `here it is train.bf16: true`."""
    settings = []
    for option_path, option_value in translation.settings:
        is_same = option_value is value or (option_value == value and type(option_value) is type(value))
        default = (
            ", the default"
            if option_path in all_options() and all_options()[option_path].default == option_value
            else ""
        )
        settings.append(
            f"{option_path}{separator}{format_setting_value(option_value, raw_text if is_same else None)}{default}"
        )
    explanation = translation.explanation.replace("{value}", format_value(value, raw_text=raw_text).strip('"'))
    if not settings:
        return explanation
    return f"here it is {' and '.join(settings)}{f' ({explanation})' if explanation else ''}"


def format_setting_value(value: JsonValue, raw_text: str | None) -> str:
    """A value in the form that YAML and `SET=` read."""
    if isinstance(value, str):
        is_plain_word = re.fullmatch(r"[\w./~@+-][\w./~@:+-]*", value) and parse_yaml_value(value, name="") == value
        return value if is_plain_word else format_value(value)
    return format_value(value, raw_text=raw_text) if raw_text else format_yaml_value(value)


# --- together ---------------------------------------------------------------------------------------------------------

# Of modes that keys ask for, the first: 4 bits and an adapter are QLoRA, and weights that are trained have 16 bits.
_MODE_ORDER = ("full", "qlora", "lora")
# Keys that decide, whatever others say: by `save_strategy: epoch` the Trainer does not read save_steps.
_DECISIVE_KEYS = {
    "eval.steps": ("eval_strategy", "evaluation_strategy"),
    "train.save_steps": ("save_strategy",),
    "tuning.lora.target_modules": ("lora_target_linear", "match_all_linear"),
}
# Numbers of steps, which count before shares of them, and before a switch that asks for any.
_STEP_COUNT_KEYS = ("warmup_steps", "num_warmup_steps", "eval_steps", "eval_every")


def merge_keys(keys: Sequence[ForeignKey]) -> list[ForeignKey]:
    """The keys with the answers that hold for all of them: one value for each option, and which key decides it."""
    merged_keys = list(keys)
    for option in dict.fromkeys(path for key in keys for path in key.settings):
        competing_keys = [key for key in keys if option in key.settings]
        deciding_key = min(competing_keys, key=lambda key: _precedence(option, key))
        value = deciding_key.settings[option]
        explanation = f"together with {deciding_key.name}: {format_value(deciding_key.value)}"
        value_lists = [key.settings[option] for key in competing_keys if not key.is_default]
        items = [item for value_list in value_lists if isinstance(value_list, list) for item in value_list]
        if items and isinstance(value, list) and all(isinstance(item, str) for item in items):
            value, explanation = list(dict.fromkeys(items)), ""  # the trackers, the tokens, the modules of both
        for index, key in enumerate(merged_keys):
            if option in key.settings and other_tools.normalize_spelling(
                key.settings[option]
            ) != other_tools.normalize_spelling(value):
                reason = "" if key.is_default else explanation
                if reason and option.startswith("data.columns."):  # one name of a column holds for all data sets
                    column = f"{option}={key.settings[option]}"
                    reason += f"; make process SET='data.process.raw_path=FILE {column}' writes its rows"
                settings = tuple({**key.settings, option: value}.items())
                merged_keys[index] = dataclasses.replace(key, translation=other_tools.KeyTranslation(settings, reason))
    return merged_keys


def _precedence(option: str, key: ForeignKey) -> tuple[bool, bool, bool, int, bool]:
    """What counts first of several keys: a strategy, what is switched on, the mode that includes the other."""
    value = key.settings[option]
    mode = _MODE_ORDER.index(str(value)) if value in _MODE_ORDER else len(_MODE_ORDER)
    return (
        key.is_default and option != "tuning.mode",
        key.name not in _DECISIVE_KEYS.get(option, ()),
        other_tools.normalize_spelling(key.value) in other_tools.OFF_SPELLINGS,
        mode,
        key.name not in _STEP_COUNT_KEYS,
    )
