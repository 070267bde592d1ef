"""What keys of other tools mean here, by the table of `other_tools.yaml`; and what an unknown key
probably means.
"""

import fnmatch
import functools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from sft_play.config.options import (
    all_options,
    find_option,
    format_yaml_value,
    optimizer_options,
    option_accepts,
    sections,
)
from sft_play.config.yaml_io import (
    OVERRIDE_LOCATION,
    JsonValue,
    KeyPath,
    Problem,
    YamlDocument,
    format_value,
    parse_yaml,
    parse_yaml_value,
    resolve_scalar,
    walk_leaves,
)
from sft_play.spelling import nearest_name

# What keys of other tools mean here: the table of `other_tools.yaml`, and how other tools' values
# become ours.
#
# A key has one of two answers: its place here with the user's value in our terms, or that it is not
# supported and what to do instead. `tool_defaults.yaml` says which tool's file it is, and what that
# tool takes where the file is silent.


@dataclass(frozen=True)
class KeyTranslation:
    """What a key means here: our settings by path, and an explanation."""

    settings: Mapping[str, JsonValue] = field(default_factory=dict)
    explanation: str = ""


# Reads another tool's value for our key; None where it cannot, so that the row's other fields
# answer.
ValueReader = Callable[[Any, str], KeyTranslation | None]


@dataclass(frozen=True)
class KnownKey:
    """A row of the table; `other_tools.yaml` explains its fields."""

    path: str = ""
    translations: Mapping[str, KeyTranslation] = field(default_factory=dict)
    read_value: ValueReader | None = None
    explanation: str = ""
    is_switch: bool = False


@dataclass(frozen=True)
class KeyTable:
    """The table: `known_keys` by name, `prefixed_keys` by how a name begins, `sections` has ours
    for each of theirs, `data_set_names` the names of each part of a data set."""

    known_keys: Mapping[str, KnownKey]
    prefixed_keys: Mapping[str, KnownKey]
    sections: Mapping[str, str]
    data_set_names: Mapping[str, list[str]]


@functools.cache
def _load_tables(file_name: str = "other_tools.yaml") -> dict[str, Any]:
    text = Path(__file__).with_name(file_name).read_text(encoding="utf-8")
    document = parse_yaml(text, name=file_name)
    assert not document.problems, document.problems
    return document.data


@functools.cache
def key_table() -> KeyTable:
    """Read the table, when the first unknown key or refused value asks for it: that takes a fifth
    of a second."""
    tables = _load_tables()
    data_set = {part: names.split() for part, names in tables["data_set"].items()}
    # what is part of a source's entry needs no answer, unless a row has one
    data_set_keys = [f"entry.{name}" for names in data_set.values() for name in names]
    known_keys = dict.fromkeys(
        data_set_keys, KnownKey(read_value=lambda value, path: KeyTranslation())
    )
    known_keys |= parse_known_keys(tables["rows"])
    for option in optimizer_options():  # its names are ours, whatever the file says of them
        known_keys |= dict.fromkeys(option.other_names, KnownKey(option.path))
    sections = {
        name: section for section, names in tables["sections"].items() for name in names.split()
    }
    return KeyTable(known_keys, parse_known_keys(tables["prefixes"]), sections, data_set)


def parse_known_keys(entries: list[dict[str, Any]]) -> dict[str, KnownKey]:
    """The rows of a file by each of their keys."""
    known_keys: dict[str, KnownKey] = {}
    for entry in entries:
        path = entry.get("path", "")
        translations = {
            spelling: parse_translation(answer, path)
            for spellings, answer in entry.get("values", {}).items()
            for spelling in spellings.split()
        }
        known_key = KnownKey(
            path,
            translations,
            _READERS.get(entry.get("read", "")),
            entry.get("words", ""),
            entry.get("switch", False),
        )
        known_keys |= dict.fromkeys(entry["keys"].split(), known_key)
    return known_keys


def parse_translation(answer: str | dict[str, JsonValue], path: str = "") -> KeyTranslation:
    """An answer as the tables write it: words, or settings with words beside them."""
    if isinstance(answer, str):
        return KeyTranslation(explanation=answer)
    settings = {
        path if key == "to" else key: value for key, value in answer.items() if key != "words"
    }
    return KeyTranslation(settings, str(answer.get("words", "")))


class OtherTool(NamedTuple):
    """Another tool, as `tool_defaults.yaml` describes the version that was read: `known_keys` mean
    something else in its files than in others', `defaults` is what it takes for a key that its file
    leaves out."""

    name: str
    known_keys: Mapping[str, KnownKey]
    defaults: Mapping[str, Any]


def detect_tool(key_names: Collection[str]) -> OtherTool:
    """Tell by its telltale keys which tool wrote a file; the first tool of the table where no key
    tells."""
    tools = _load_tables("tool_defaults.yaml")
    best = max(
        tools.values(),
        key=lambda entry: sum(
            bool(fnmatch.filter(key_names, pattern)) for pattern in entry["marks"].split()
        ),
    )
    # a tool's own defaults count before those of the tools that it is built on
    entries = [*(tools[name] for name in reversed(best.get("like", "").split())), best]
    defaults = {
        key: value
        for entry in entries
        for group in entry["defaults"]
        for key, value in group["are"].items()
    }
    return OtherTool(
        f"{best['name']} {best['version']}".strip(),
        parse_known_keys(best.get("rows", [])),
        defaults,
    )


OFF_SPELLINGS = ("false", "null", "0", "", "none", "no", "[]", "{}", "disabled", "-1")


def normalize_spelling(value: JsonValue) -> str:
    """Spell a value as `KnownKey.translations` does: YAML's word in lower case, whole numbers
    without decimal point."""
    if isinstance(value, str):
        return value.strip().lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value)


# --- readers of values that need more than a lookup -----------------------------------------------


def _read_held_out_share(value: Any, path: str) -> KeyTranslation | None:
    """`val_set_size: 0.05`. Other tools also take a number of rows there, which is no share."""
    if type(value) not in (int, float) or value < 1:
        return None
    return KeyTranslation(
        explanation=(
            f"{path} is a fraction (0.05), not a number of rows; put {{value}} rows of your choice"
            " into a file of their own and name it in data.val_path"
        )
    )


DATA_SET_OPTIONS = ("data.train_path", "data.val_path")  # where data sets are named
_DATA_FILE = re.compile(r"\.(jsonl?|csv|parquet|arrow|txt|gz)$", re.IGNORECASE)
_HUB_ID = re.compile(r"(?!\.)[\w.-]+/[\w.-]+(:[\w.-]+)?")
# a file or a folder, or a name on the hub; a YAML is another tool's list of data sets
_FILE_OR_HUB_PATH = re.compile(r"(?:hub:|[./~]|.*/)(?!.*\.ya?ml$)")


def _read_data_files(value: Any, path: str) -> KeyTranslation:
    """Read the data sets of a key: one as a path; several, or a part of one, as sources."""
    is_trained = path == DATA_SET_OPTIONS[0]
    all_sources = [
        source
        for entry in parse_data_sets(value)
        for source in _data_set_sources(entry, is_trained=is_trained)
    ]
    # of a file that is named twice what is said last counts
    sources: list[JsonValue] = [*{source["path"]: source for source in all_sources}.values()]
    paths = [source["path"] for source in all_sources]
    if not paths:
        return KeyTranslation(
            explanation=(
                "it names no file, and of the hub no data set in the split that is read here"
            )
        )
    if not all(_FILE_OR_HUB_PATH.match(name) or _DATA_FILE.search(name) for name in paths):
        return KeyTranslation(
            explanation=(
                "a data set is given by its file, or hub:owner/name, not by a name in a registry: "
                f"{path} (several: data.sources)"
            )
        )
    if is_trained and sources != [{"path": paths[0]}]:
        return KeyTranslation(
            {"data.sources": sources}, "a weight in each sets its share of an epoch"
        )
    if len(sources) > 1:
        return KeyTranslation(
            {path: paths[0]}, "one file is taken, not several: make process joins them"
        )
    return KeyTranslation({path: paths[0]}, "the format is detected, see make preview")


def parse_data_sets(value: Any) -> list[dict[str, Any]]:
    """Split a key's value into its data sets: what it says of each, over the defaults of
    torchtune's function for it."""
    if (
        isinstance(value, dict)
        and value
        and all(isinstance(share, int | float) for share in value.values())
    ):
        # the handbook's dataset_mixer
        value = [{"id": name, "weight": share} for name, share in value.items()]
    if isinstance(value, str):
        value = value.split(",")
    defaults = _load_tables("tool_defaults.yaml")["torchtune"]["data_sets"]
    entries = []
    for item in value if isinstance(value, list) else [value]:
        entry = dict(item) if isinstance(item, dict) else {"path": item}
        # the handbook's: the share of the data set's own rows
        if "id" in entry and "weight" in entry:
            entry["share"] = entry.pop("weight")
        if item:
            entries.append(
                defaults.get(str(entry.get("_component_")).rpartition(".")[2], {}) | entry
            )
    return entries


def _data_set_sources(entry: Mapping[str, Any], *, is_trained: bool) -> Iterator[dict[str, Any]]:
    """Yield the files of a data set, or its name on the hub, as entries of data.sources. Nothing
    where no text names it, or it is a split of the hub that is not read here."""
    read_splits = "train" if is_trained else "val|dev"
    names = key_table().data_set_names
    path_key = next((name for name in names["path"] if entry.get(name)), "path")
    parts = {
        part: next(
            (entry[alias] for alias in aliases if alias != path_key and entry.get(alias)), None
        )
        for part, aliases in names.items()
    }
    paths, split = entry.get(path_key), str(parts["split"] or read_splits)
    if paths in ("json", "csv", "parquet", "arrow", "text"):  # of `datasets`, for files
        paths = entry.get("data_files")
        if isinstance(paths, dict):
            paths = paths.get(split, paths)
    for text in paths if isinstance(paths, list) else [paths]:
        if not isinstance(text, str) or not text.strip():
            continue
        source = re.sub(r"^(hf|ms)::|#\d+$", "", text.strip())
        if _HUB_ID.fullmatch(source) and not _DATA_FILE.search(source):
            source = f"hub:{source}"
        is_on_hub = source.startswith("hub:")
        if is_on_hub and not re.match(read_splits, split):
            continue
        if type(parts["config"]) in (str, int) and is_on_hub and source.count(":") == 1:
            source += f":{parts['config']}"
        # ms-swift writes a number of rows as FILE#500, `datasets` as train[:500]
        row_limit = re.search(r"#(\d+)$", text.strip()) or re.search(r"^\w+\[:(\d+)\]$", split)
        if row_limit:
            parts["max_rows"] = int(row_limit[1])
        numbers = {
            part: parts[part]
            for part in ("weight", "max_rows")
            if type(parts[part]) in (int, float)
        }
        yield {"path": source, **numbers}


def _read_documents(value: Any, path: str) -> KeyTranslation:
    """Read axolotl's `pretraining_dataset`, whose name says the task too."""
    translation = _read_data_files(value, path)
    if not translation.settings:
        return translation
    return replace(translation, settings={**translation.settings, "task_mode": "cpt"})


def _read_template(value: Any, _: str) -> KeyTranslation | None:
    """Read a file's name, or one of the two names that mean the same here. Other names are the
    other tool's own templates."""
    if value in ("chatml", "plain") or str(value).endswith((".jinja", ".jinja2", ".j2", ".txt")):
        return KeyTranslation({"data.chat_template": value})
    if "{%" in str(value):
        return KeyTranslation(
            explanation="in a file of its own it is data.chat_template: FILE.jinja"
        )
    return None


def _read_names(value: Any, path: str) -> KeyTranslation | None:
    """Read names in a list, or in a text with commas."""
    if path.startswith("tuning.") and not re.fullmatch(r"[\w.,\[\]\"' -]*", str(value)):
        return KeyTranslation(
            explanation=(
                "a pattern is not read: tuning.lora.target_modules lists names of modules (q_proj,"
                " …), or is auto"
            )
        )
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    if isinstance(value, list):
        names: JsonValue = [
            _load_tables()["modules"].get(str(name), name) for name in value if name
        ]
        if names and option_accepts(path, names):
            return KeyTranslation({path: names})
    return KeyTranslation(explanation=f"{path} takes {all_options()[path].accepted_values}")


def _read_split(value: Any, path: str) -> KeyTranslation:
    """Read a split of `datasets`. There is nothing to say of the one that is read here."""
    match = re.fullmatch(r"(train|val|dev)\w*(\[:\d+\])?", str(value))
    if match and (match[1] == "train") is (path == DATA_SET_OPTIONS[0]):
        words = "this number of rows (max_rows) is drawn by train.seed, not the first"
        return KeyTranslation(explanation=words * bool(match[2]))
    return KeyTranslation(
        explanation=(
            f"{path} reads a split whole, train or validation: load_dataset(…,"
            " split={value}).to_json(FILE) of datasets writes another, or a part, to name here"
        )
    )


# By the name that the table gives them.
_READERS: Mapping[str, ValueReader] = {
    # torchtune's function for a model: `lora_llama3_1_8b` adds adapters, `qlora_llama3_1_8b` to
    # 4-bit weights
    "builder": lambda value, path: KeyTranslation(
        {path: re.sub(r".*\.(q?lora)_.*|.*", r"\1", str(value), count=1) or "full"}
    ),
    "column": lambda value, path: KeyTranslation() if path.endswith(f".{value}") else None,
    "data_files": _read_data_files,
    "documents": _read_documents,
    "held_out_share": _read_held_out_share,
    "names": _read_names,
    # `betas: [0.9, 0.95]`: only the second is an option here
    "second_beta": lambda value, path: (
        KeyTranslation({path: value[1]}) if isinstance(value, list) and len(value) == 2 else None
    ),
    "split": _read_split,
    "system": lambda value, path: (
        KeyTranslation({path: value, "data.style.how": "keep"})
        if value and isinstance(value, str)
        else None
    ),
    "template": _read_template,
}


# --- answers --------------------------------------------------------------------------------------
def find_known_key(parts: tuple[str, ...]) -> KnownKey | None:
    """Find the row of a key, given its path from the root: by its last two names, its last name, or
    its prefix."""
    names = [part.strip().lower().replace("-", "_") for part in parts[-2:]]
    table = key_table()
    for name in (".".join(names), names[-1]):
        if name in table.known_keys:
            return table.known_keys[name]
    return next(
        (
            known_key
            for prefix, known_key in table.prefixed_keys.items()
            if names[-1].startswith(prefix)
        ),
        None,
    )


# Our reader takes yes and no for words, as YAML 1.2 has it; other tools' files mean true and false
# by them.
_YAML_1_1_WORDS = {"yes": "true", "on": "true", "no": "false", "off": "false"}


def translate_value(known_key: KnownKey, value: JsonValue) -> KeyTranslation:
    """Answer a value by a key's row: by its spelling, by the row's reader, as it is where our
    option accepts it, or in words."""
    path, words, normalized = known_key.path, known_key.explanation, normalize_spelling(value)
    for spelling in (normalized, _YAML_1_1_WORDS.get(normalized, normalized)):
        if spelling in known_key.translations:
            return known_key.translations[spelling]
    if value is None or (known_key.is_switch and normalized in OFF_SPELLINGS):
        return KeyTranslation(explanation="it has no effect: remove it")
    translation = known_key.read_value(value, path) if known_key.read_value else None
    if translation is not None:
        if translation.settings and path and words:
            words = "; ".join(filter(None, [translation.explanation, words]))
            translation = KeyTranslation(translation.settings, words)
        return translation
    # as given, or the number that it spells in another form (`16.0`, `"2e-5"`)
    number = resolve_scalar(value.strip()) if isinstance(value, str) else value
    whole_number = int(number) if isinstance(number, float) and number.is_integer() else number
    for candidate_value in (value, number, whole_number) if path else ():
        if option_accepts(path, candidate_value):
            return KeyTranslation({path: candidate_value}, words)
    if not path or words:
        return KeyTranslation(explanation=words or "remove it")
    accepted_values = all_options()[path].accepted_values if path in all_options() else "text"
    return KeyTranslation(explanation=f"here it is {path} ({accepted_values})")


# --------------------------------------------------------------------------------------------------
# What an unknown key probably means: another tool's name for it, its place in another section, or a
# near spelling.
#
# Keys that speak of one option are worked out together: `load_in_4bit: true` and `adapter: lora`
# are one QLoRA, not two answers.

# Keys whose values are not repeated in a message; `pad_token` and the like name a token of the
# vocabulary.
_SECRET_NAME = re.compile(
    r"(?<!pad)(?<!eos)(?<!bos)(?<!unk)_token$|^token$|api_key|secret|password", re.IGNORECASE
)
# Names that mean something else in every section: those of another tool's section are not looked up
# in ours.
_VAGUE_NAMES = {"name", "path", "dir", "mode", "steps", "how", "headers", "workers", "trace"}
# How similar names must be where nothing else connects them: `loss_fn` (0.86) is not a misspelt
# `loss_on`.
_MIN_SIMILARITY = 0.87


@dataclass(frozen=True)
class ForeignKey:
    """A key that our sections do not have: `section` is ours that holds it or corresponds to the
    one that does, `translation` what the table of other tools answers, `option_path` the only
    option of that name, which takes the value; None where there is none. `is_default`: it is not in
    the file, but what its tool takes then.
    """

    path: KeyPath
    value: JsonValue
    section: str | None
    translation: KeyTranslation | None
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
    path: KeyPath, value: JsonValue, *, section: str | None
) -> Iterator[ForeignKey]:
    """Yield an unknown key, or every key in it if it is a section that the table does not answer as
    a whole. `section`: ours that holds it, or that the other tool's section corresponds to; None if
    unknown.
    """
    key, known_key = str(path[-1]), find_known_key(tuple(map(str, path)))
    mapped_section = key_table().sections.get(key.lower())
    is_translated_whole = known_key is not None and (
        not known_key.path or known_key.path in DATA_SET_OPTIONS
    )
    is_misspelt = nearest_name(key, filter(None, sections())) is not None
    # One answer for the whole: a plain value, a section that the table answers itself, or a slip of
    # one of ours, whose keys are right once its name is.
    if (
        not isinstance(value, dict)
        or not value
        or (mapped_section is None and (is_translated_whole or is_misspelt))
    ):
        yield _foreign_key(path, value, section)
        return
    # A stranger's section is only worth opening for keys that are known somewhere.
    known_names = [
        name
        for name in value
        if mapped_section is not None
        or find_option(name)
        or find_known_key((*map(str, path), name)) is not None
    ]
    if mapped_section is None and (section is not None or not known_names):
        yield _foreign_key(path, value, section)
    for name in known_names:
        yield from find_foreign_keys((*path, name), value[name], section=mapped_section)


def _foreign_key(path: KeyPath, value: JsonValue, section: str | None) -> ForeignKey:
    parts = tuple(map(str, path))
    homes = [home for home in _possible_options(parts, section) if home in all_options()]
    option_path, translation, known_key = None, None, find_known_key(parts)
    if len(homes) == 1 and option_accepts(homes[0], value):
        option_path = homes[0]
    if known_key is not None:
        has_words_only = not (known_key.path or known_key.translations or known_key.read_value)
        # our own key of that name says more than words, but less than a row for both names
        # (compile.mode)
        has_own_row = len(parts) > 1 and ".".join(parts[-2:]).lower() in key_table().known_keys
        if has_own_row or not (has_words_only and find_option(parts[-1])):
            translation = translate_value(known_key, value)
    return ForeignKey(path, value, section, translation, option_path)


def _possible_options(parts: tuple[str, ...], section: str | None) -> list[str]:
    """Find our options of a foreign key's name; none where the name is too vague to say."""
    key, is_in_own_section = parts[-1], section is not None and ".".join(parts[:-1]) == section
    paths = find_option(key)
    if section and not is_in_own_section and f"{section}.{key}" in paths:
        paths = [f"{section}.{key}"]
    if ".".join(parts) in all_options():
        paths = [".".join(parts)]
    return paths if is_in_own_section or len(paths) == 1 or key not in _VAGUE_NAMES else []


def unknown_key_problem(document: YamlDocument, key: ForeignKey) -> Problem:
    """Say what an unknown key probably means."""
    raw_text = document.raw_texts.get(key.path)
    separator = "=" if document.location(key.path) == OVERRIDE_LOCATION else ": "
    hint = _explain_key(key, raw_text=raw_text, separator=separator)
    return document.problem(key.path, f"unknown key ({format_key_value(key, raw_text)}); {hint}")


def format_key_value(key: ForeignKey, raw_text: str | None) -> str:
    """Format a key's value for a message: `value 4`; `not shown` for a secret."""
    words = [
        str(part)
        for path, value in walk_leaves(key.value, key.path[-1:])
        if isinstance(value, str)
        for part in path
    ]
    if any(map(_SECRET_NAME.search, words)):
        return "not shown"
    return f"value {format_value(key.value, raw_text=raw_text)}"


def _explain_key(key: ForeignKey, *, raw_text: str | None, separator: str) -> str:
    """Explain a foreign key: by the table's answer, the option of that name, a near spelling, or
    the keys that there are."""
    if key.translation is not None:
        settings = []  # `here it is train.bf16: true`
        for path, value in key.settings.items():
            is_same = value is key.value or (value == key.value and type(value) is type(key.value))
            setting = (
                f"{path}{separator}{format_setting_value(value, raw_text if is_same else None)}"
            )
            if path in all_options() and all_options()[path].default == value:
                setting += ", the default"
            settings.append(setting)
        explanation = key.translation.explanation.replace(
            "{value}", format_value(key.value, raw_text=raw_text).strip('"')
        )
        if not settings:
            return explanation
        return f"here it is {' and '.join(settings)}{f' ({explanation})' if explanation else ''}"
    if key.option_path is not None:
        return (
            f"it belongs at {key.option_path}{separator}{format_setting_value(key.value, raw_text)}"
        )
    name = str(key.path[-1])
    if paths := _possible_options(tuple(map(str, key.path)), key.section):
        return f"it belongs at {' or '.join(paths[:3])}"
    section_keys = list(sections()[key.section].model_fields) if key.section is not None else []
    if similar_name := nearest_name(name, section_keys):
        return f"did you mean {f'{key.section}.' if key.section else ''}{similar_name}?"
    other_names = (
        {path.rpartition(".")[2] for path in [*all_options(), *sections()]} - _VAGUE_NAMES - {""}
    )
    similar_name = (
        None
        if name in _VAGUE_NAMES
        else nearest_name(name, other_names, min_similarity=_MIN_SIMILARITY)
    )
    if similar_name:
        return f"did you mean {' or '.join(find_option(similar_name)[:3])}?"
    return (
        f"{key.section or 'the root'} takes"
        f" {', '.join(section_keys or sections()[''].model_fields)}"
    )


def format_setting_value(value: JsonValue, raw_text: str | None) -> str:
    """A value in the form that YAML and `SET=` read."""
    if isinstance(value, str):
        is_plain_word = (
            re.fullmatch(r"[\w./~@+-][\w./~@:+-]*", value)
            and parse_yaml_value(value, name="") == value
        )
        return value if is_plain_word else format_value(value)
    return format_value(value, raw_text=raw_text) if raw_text else format_yaml_value(value)


# --- together -------------------------------------------------------------------------------------

# Of modes that keys ask for, the first: 4 bits and an adapter are QLoRA, and weights that are
# trained have 16 bits.
_MODE_ORDER = ("full", "qlora", "lora")
# Keys that decide, whatever others say: by `save_strategy: epoch` the Trainer does not read
# save_steps.
_DECISIVE_KEYS = {
    "eval.steps": ("eval_strategy", "evaluation_strategy"),
    "train.save_steps": ("save_strategy",),
    "tuning.lora.target_modules": ("lora_target_linear", "match_all_linear"),
}
# Numbers of steps, which count before shares of them, and before a switch that asks for any.
_STEP_COUNT_KEYS = ("warmup_steps", "num_warmup_steps", "eval_steps", "eval_every")


def merge_keys(keys: Sequence[ForeignKey]) -> list[ForeignKey]:
    """Work the keys out together: one value for each option, and the explanation names the key that
    decided it."""
    merged_keys = list(keys)
    for option in dict.fromkeys(path for key in keys for path in key.settings):
        competing_keys = [key for key in keys if option in key.settings]
        deciding_key = min(competing_keys, key=lambda key: _precedence(option, key))
        value = deciding_key.settings[option]
        explanation = f"together with {deciding_key.name}: {format_value(deciding_key.value)}"
        value_lists = [key.settings[option] for key in competing_keys if not key.is_default]
        items = [
            item
            for value_list in value_lists
            if isinstance(value_list, list)
            for item in value_list
        ]
        if items and isinstance(value, list) and all(isinstance(item, str) for item in items):
            # the trackers, the tokens, the modules of both
            value, explanation = list(dict.fromkeys(items)), ""
        for index, key in enumerate(merged_keys):
            if option in key.settings and normalize_spelling(
                key.settings[option]
            ) != normalize_spelling(value):
                translation = KeyTranslation(
                    {**key.settings, option: value}, "" if key.is_default else explanation
                )
                merged_keys[index] = replace(key, translation=translation)
    return merged_keys


def _precedence(option: str, key: ForeignKey) -> tuple[bool, bool, bool, int, bool]:
    """Order the keys that ask for one option, the deciding one first: a strategy, what is switched
    on, the mode that includes the other."""
    value = key.settings[option]
    mode = _MODE_ORDER.index(str(value)) if value in _MODE_ORDER else len(_MODE_ORDER)
    return (
        key.is_default and option != "tuning.mode",
        key.name not in _DECISIVE_KEYS.get(option, ()),
        normalize_spelling(key.value) in OFF_SPELLINGS,
        mode,
        key.name not in _STEP_COUNT_KEYS,
    )
