"""What keys of other tools mean here: the table of `other_tools.yaml`, and how other tools' values become ours.

A key has one of two answers: its place here with the user's value in our terms, or that it is not supported and what
to do instead.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from sft_play.config.leaves import accepts, leaves, training_options
from sft_play.config.yaml_io import Plain, parse


@dataclass(frozen=True)
class Meaning:
    """What a key means here: our settings by path, and an explanation."""

    settings: tuple[tuple[str, Plain], ...] = ()
    words: str = ""


Reader = Callable[[Any, str], Meaning | None]
"""Reads another tool's value for our key; None where it cannot, so that the row's other fields answer."""


@dataclass(frozen=True)
class Known:
    """A row of the table; `other_tools.yaml` explains its fields."""

    path: str = ""
    values: Mapping[str, Meaning] = field(default_factory=dict)
    read: Reader | None = None
    words: str = ""
    switch: bool = False

    @property
    def only_words(self) -> bool:
        """Whether the answer does not depend on the value."""
        return not (self.path or self.values or self.read)


@dataclass(frozen=True)
class OtherTools:
    """`rows` by key, `prefixes` of keys that share a row, and our section for each `sections` of other tools."""

    rows: Mapping[str, Known]
    prefixes: tuple[tuple[tuple[str, ...], Known], ...]
    sections: Mapping[str, str]

    @property
    def plain_keys(self) -> list[str]:
        """Keys that stand alone, for spelling suggestions."""
        return [key for key in self.rows if "." not in key]


@functools.cache
def _file() -> dict[str, Any]:
    text = resources.files("sft_play.config").joinpath("other_tools.yaml").read_text(encoding="utf-8")
    document = parse(text, name="other_tools.yaml")
    assert not document.problems, document.problems
    return document.data


def listed_rows() -> list[tuple[list[str], Known]]:
    """The rows of the file with their keys."""
    return [(entry["keys"].split(), _row(entry)) for entry in _file()["rows"]]


@functools.cache
def table() -> OtherTools:
    """The table, read when the first unknown key or refused value asks for it: that takes a fifth of a second."""
    data = _file()
    rows = {key: row for keys, row in listed_rows() for key in keys}
    for option in training_options():  # its names are ours, whatever the file says of them
        rows |= dict.fromkeys(option.other_names, Known(option.key))
    prefixes = tuple((tuple(entry["keys"].split()), _row(entry)) for entry in data["prefixes"])
    return OtherTools(
        rows, prefixes, {name: ours for ours, names in data["sections"].items() for name in names.split()}
    )


def _row(entry: dict[str, Any]) -> Known:
    path = entry.get("path", "")
    values = {
        spelling: _answer_of(answer, path)
        for spellings, answer in entry.get("values", {}).items()
        for spelling in spellings.split()
    }
    read = _READERS[entry["read"]] if "read" in entry else None
    return Known(path, values, read, entry.get("words", ""), entry.get("switch", False))


def _answer_of(written: str | dict[str, Plain], path: str) -> Meaning:
    if isinstance(written, str):
        return say(written)
    settings = tuple((path if key == "to" else key, value) for key, value in written.items() if key != "words")
    return Meaning(settings, str(written.get("words", "")))


def to(path: str, value: Plain, words: str = "") -> Meaning:
    """An answer that is one of our settings."""
    return Meaning(((path, value),), words)


def say(words: str) -> Meaning:
    """An answer in words only."""
    return Meaning((), words)


_OFF = ("false", "null", "0", "", "none", "[]", "{}", "disabled", "-1")
_DATA_FILE = re.compile(r"\.(jsonl?|csv|parquet|arrow|txt|gz)$", re.IGNORECASE)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_LONGEST_TIMEOUT_S = 86_400


def spelled(value: Plain) -> str:
    """A value as `Known.values` spells it: YAML's word in lower case, whole numbers without a decimal point."""
    if isinstance(value, str):
        return value.strip().lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value)


# --- readers of values that need more than a lookup -------------------------------------------------------------------


def _held_out_share(value: Any, path: str) -> Meaning | None:
    """`val_set_size: 0.05`. Other tools also take a number of rows there, which is no share."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        return None
    if value >= 1:
        return say(
            f"{path} is a fraction (0.05), not a number of rows; put {{value}} rows of your choice into a file of "
            "their own and name it in data.val_path"
        )
    if value > 0.5:
        return say(f"{path} is the fraction held out, at most 0.5, not the fraction trained on")
    return to(path, float(value))


def _data_files(value: Any, path: str) -> Meaning | None:
    """The name of a data set: a file, a hub id, a name in a registry, or a list of `{path: …}`."""
    if isinstance(value, list) and value:
        names = [_entry_name(item) if isinstance(item, dict) else item for item in value]
        if len(names) == 1:
            return _with_task(_data_files(names[0], path), value)
        named = [(item, name) for item, name in zip(value, names, strict=True) if isinstance(name, str)]
        if any(_in_a_registry(name) for _, name in named):
            return say(f"a data set is given by its file, or hub:owner/name, not by a name in a registry: {path}")
        if path == "data.train_path" and named:
            sources: list[Plain] = [_source_of(item, name) for item, name in named]
            return to("data.sources", sources, "a weight in each sets its share of an epoch")
        files: list[Plain] = [_source(name) for _, name in named]
        return to("data.process.raw_path", files, "then make process writes the rows") if files else None
    if not isinstance(value, str) or not value.strip():
        return None
    if "," in value:
        return _data_files([part.strip() for part in value.split(",") if part.strip()], path)
    if _in_a_registry(value):
        return say(f"a data set is given by its file, or hub:owner/name, not by a name in a registry: {path}")
    return to(path, _source(value), "the format is detected, see make preview")


def _in_a_registry(value: str) -> bool:
    is_path = value.startswith((".", "/", "~", "hub:")) or "/" in value or _DATA_FILE.search(value) is not None
    return _source(value) == value and not is_path


def _documents(value: Any, path: str) -> Meaning | None:
    """axolotl's `pretraining_dataset`: its name says the task too."""
    meaning = _data_files(value, path)
    return Meaning((*meaning.settings, ("task_mode", "cpt")), "") if meaning and meaning.settings else meaning


_BUILDERS = ("json", "csv", "parquet", "arrow", "text")
"""Names that `datasets` reads files by: the files are in `data_files`."""


def _entry_name(entry: Mapping[str, Any]) -> Any:
    name = next((entry[key] for key in ("path", "name", "id") if key in entry), None)
    files = entry.get("data_files")
    files = files[0] if isinstance(files, list) and len(files) == 1 else files
    return files if name in _BUILDERS and isinstance(files, str) else name


def _with_task(meaning: Meaning | None, entries: list[Any]) -> Meaning | None:
    """With axolotl's word for plain text, the task that trains it."""
    is_text = isinstance(entries[0], dict) and entries[0].get("type") in ("completion", "pretrain")
    return Meaning((*meaning.settings, ("task_mode", "cpt")), meaning.words) if meaning and is_text else meaning


def _source(value: str) -> str:
    is_hub_id = _HUB_ID.fullmatch(value) and not _DATA_FILE.search(value) and not value.startswith((".", "/", "~"))
    return f"hub:{value}" if is_hub_id else value


def _source_of(item: Any, name: str) -> dict[str, Plain]:
    """One of several data sets as an entry of data.sources, with the share that the other tool gives it."""
    source: dict[str, Plain] = {"path": _source(name)}
    given = item if isinstance(item, dict) else {}
    for ours, theirs in (
        ("weight", ("weight", "prob", "ratio", "proportion")),
        ("max_rows", ("num_samples", "max_samples")),
    ):
        number = next((given[key] for key in theirs if isinstance(given.get(key), (int, float))), None)
        if number:
            source[ours] = number
    return source


def _seconds(value: Any, path: str) -> Meaning | None:
    """`ddp_timeout: 180000000`, which stands for forever, is the longest that is accepted here."""
    if isinstance(value, int | float) and not isinstance(value, bool) and value > _LONGEST_TIMEOUT_S:
        return to(path, _LONGEST_TIMEOUT_S, "the longest")
    return None


def _trackers(value: Any, path: str) -> Meaning | None:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names:
        return None
    own = [name for name in names if accepts(path, [name])]
    return to(path, list(own)) if own else say("trackers: tensorboard, wandb, mlflow, trackio")


def _template(value: Any, _: str) -> Meaning | None:
    """A file, or one of the two names that mean the same here; other names are of the other tool's own templates."""
    if isinstance(value, str) and (value in ("chatml", "plain") or value.endswith((".jinja", ".jinja2", ".j2"))):
        return to("data.chat_template", value)
    return None


def _deepspeed(value: Any, _: str) -> Meaning | None:
    """`deepspeed: ds.json`: DeepSpeed is chosen by the command, not in the run YAML."""
    if not isinstance(value, str):
        return None
    if re.fullmatch(r"zero[123](_offload)?", value):
        return say(f"make train-distributed STRATEGY={value}")
    return say("make train-deepspeed DEEPSPEED_CONFIG={value}") if value.endswith((".json", ".yaml", ".yml")) else None


def _axis(value: Any, name: str) -> Meaning | None:
    """The size of a mesh axis: one group of it, or several, which FSDP2 shards over."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 2:
        return None
    return to("model.mesh_shape", [[1, value], ["fsdp", name]], "with several such groups, their number for the 1")


def _modules(value: Any, path: str) -> Meaning | None:
    if not isinstance(value, str):
        return None
    names = [part.strip() for part in value.split(",") if part.strip()]
    is_plain = all(re.fullmatch(r"\w+(\.\w+)*", name) for name in names)
    return to(path, list(names)) if names and is_plain else None


_READERS: Mapping[str, Reader] = {
    "cp_axis": lambda value, _: _axis(value, "cp"),
    "data_files": _data_files,
    "deepspeed": _deepspeed,
    "documents": _documents,
    "held_out_share": _held_out_share,
    "modules": _modules,
    # `betas: [0.9, 0.95]`: only the second is an option here
    "second_beta": lambda value, path: to(path, value[1]) if isinstance(value, list) and len(value) == 2 else None,
    "seconds": _seconds,
    "template": _template,
    # TRL's `dataset_text_field: body`: our name of the column, mapped to theirs
    "text_column": lambda value, path: to(path, {"text": value}) if isinstance(value, str) and value else None,
    "tp_axis": lambda value, _: _axis(value, "tp"),
    "trackers": _trackers,
}
"""By the name that the table gives them."""


# --- answers ----------------------------------------------------------------------------------------------------------


def known(parts: tuple[str, ...]) -> Known | None:
    """The row of a key, given its path from the root: by its last two names, its last name, or its prefix."""
    names = [part.strip().lower().replace("-", "_") for part in parts[-2:]]
    for name in (".".join(names), names[-1]):
        if name in table().rows:
            return table().rows[name]
    return next((row for prefixes, row in table().prefixes if names[-1].startswith(prefixes)), None)


def answer(row: Known, value: Plain) -> Meaning:
    """What a row answers for a value: by spelling, by its reader, as given where our key accepts it, or in words."""
    word = spelled(value)
    # our reader takes yes and no for words, as YAML 1.2 has it; other tools' files mean true and false by them
    for spelling in (word, {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(word, word)):
        if spelling in row.values:
            return row.values[spelling]
    if value is None or (row.switch and word in _OFF):
        return say("it has no effect: remove it")
    reading = row.read(value, row.path) if row.read else None
    if reading is not None:
        more = row.words if reading.settings and row.path else ""
        return Meaning(reading.settings, "; ".join(filter(None, [reading.words, more])))
    for form in _forms(value) if row.path else ():
        if accepts(row.path, form):
            return to(row.path, form, row.words)
    if not row.path or row.words:
        return say(row.words or "remove it")
    return say(f"here it is {row.path} ({leaves()[row.path].expects})")


def _forms(value: Plain) -> Iterator[Plain]:
    """A value as given, and the number that it spells in another form (`16.0`, `"2e-5"`)."""
    yield value
    number: Plain = value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return
        yield number
    if isinstance(number, float) and number.is_integer():
        yield int(number)
