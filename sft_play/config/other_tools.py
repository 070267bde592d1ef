"""What keys of other tools mean here: the table of `other_tools.yaml`, and how other tools' values become ours.

A key has one of two answers: its place here with the user's value in our terms, or that it is not supported and what
to do instead. `tool_defaults.yaml` says which tool's file it is, and what that tool takes where the file is silent.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from sft_play.config.options import accepts, leaves, training_options
from sft_play.config.yaml_io import Plain, parse


@dataclass(frozen=True)
class Meaning:
    """What a key means here: our settings by path, and an explanation."""

    settings: tuple[tuple[str, Plain], ...] = ()
    words: str = ""


# Reads another tool's value for our key; None where it cannot, so that the row's other fields answer.
Reader = Callable[[Any, str], Meaning | None]


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
    """`rows` by key, `prefixes` of keys that share a row, our section for each `sections` of other tools, the names of
    each part of a `data_set`, and the `plain_keys`, which stand alone, for spelling suggestions."""

    rows: Mapping[str, Known]
    prefixes: tuple[tuple[tuple[str, ...], Known], ...]
    sections: Mapping[str, str]
    data_set: Mapping[str, list[str]]
    plain_keys: list[str]


@functools.cache
def _file(name: str = "other_tools.yaml") -> dict[str, Any]:
    document = parse(resources.files("sft_play.config").joinpath(name).read_text(encoding="utf-8"), name=name)
    assert not document.problems, document.problems
    return document.data


def rows_by_key(entries: list[dict[str, Any]]) -> dict[str, Known]:
    """The rows of a file by each of their keys."""
    return {key: _row(entry) for entry in entries for key in entry["keys"].split()}


@functools.cache
def table() -> OtherTools:
    """The table, read when the first unknown key or refused value asks for it: that takes a fifth of a second."""
    data = _file()
    data_set = {part: names.split() for part, names in data["data_set"].items()}
    # what is part of a source's entry needs no answer, unless a row has one
    parts = [f"{holder}.{name}" for holder in ("entry", "held_out") for names in data_set.values() for name in names]
    rows = dict.fromkeys(parts, Known(read=lambda value, path: Meaning())) | rows_by_key(data["rows"])
    for option in training_options():  # its names are ours, whatever the file says of them
        rows |= dict.fromkeys(option.other_names, Known(option.key))
    prefixes = tuple((tuple(entry["keys"].split()), _row(entry)) for entry in data["prefixes"])
    sections = {name: ours for ours, names in data["sections"].items() for name in names.split()}
    return OtherTools(rows, prefixes, sections, data_set, [key for key in rows if "." not in key])


@dataclass(frozen=True)
class Tool:
    """Another tool, as `tool_defaults.yaml` describes the version that was read: `rows` are keys that mean something
    else in its files than in others', `defaults` what it takes for a key that its file leaves out."""

    name: str
    rows: Mapping[str, Known]
    defaults: Mapping[str, Any]


def tool_of(names: Collection[str]) -> Tool:
    """The tool whose telltale keys a file has most of; the first of the table where it has no tool's."""
    tools = _file("tool_defaults.yaml")
    best = max(
        tools.values(), key=lambda entry: sum(bool(fnmatch.filter(names, mark)) for mark in entry["marks"].split())
    )
    # a tool's own defaults count before those of the tools that it is built on
    entries = [*(tools[name] for name in reversed(best.get("like", "").split())), best]
    defaults = {key: value for entry in entries for one in entry["defaults"] for key, value in one["are"].items()}
    return Tool(f"{best['name']} {best['version']}".strip(), rows_by_key(best.get("rows", [])), defaults)


def _row(entry: dict[str, Any]) -> Known:
    path = entry.get("path", "")
    values = {
        spelling: answer_of(answer, path)
        for spellings, answer in entry.get("values", {}).items()
        for spelling in spellings.split()
    }
    read = _READERS[entry["read"]] if "read" in entry else None
    return Known(path, values, read, entry.get("words", ""), entry.get("switch", False))


def answer_of(written: str | dict[str, Plain], path: str = "") -> Meaning:
    """An answer as the tables write it: words, or settings with words beside them."""
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


OFF = ("false", "null", "0", "", "none", "no", "[]", "{}", "disabled", "-1")
_DATA_FILE = re.compile(r"\.(jsonl?|csv|parquet|arrow|txt|gz)$", re.IGNORECASE)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
# a file or a folder, or a name on the hub; a YAML is another tool's list of data sets
_PATH = re.compile(r"(?:hub:|[./~]|.*/)(?!.*\.ya?ml$)")


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


DATA = ("data.train_path", "data.val_path")  # where data sets are named


def _data_files(value: Any, path: str, *more: tuple[str, Plain]) -> Meaning:
    """The data sets of `data_sets`: one as a path; several, or a part of one, as sources; `more` settings beside."""
    entries = [_sources_of(entry, "train" if path == DATA[0] else "val|dev") for entry in data_sets(value)]
    # by their paths, since no source may be there twice
    sources = list({source["path"]: source for entry in entries for source in entry}.values())
    if not sources:
        return say("it names no file, and of the hub no data set in the split that is read here")
    if not all(_PATH.match(source["path"]) or _DATA_FILE.search(source["path"]) for source in sources):
        return say(
            "a data set is given by its file, or hub:owner/name, not by a name in a registry: "
            f"{path} (several: data.sources)"
        )
    if path == DATA[0] and (len(sources) > 1 or len(sources[0]) > 1):
        return Meaning((("data.sources", list(sources)), *more), "a weight in each sets its share of an epoch")
    several = "one file is taken, not several: make process joins them"
    words = several if len(sources) > 1 else "the format is detected, see make preview"
    return Meaning(((path, sources[0]["path"]), *more), words)


def data_sets(value: Any) -> list[dict[str, Any]]:
    """What a key says of each data set that it names, and what torchtune's function for one takes by default."""
    if isinstance(value, dict) and value and all(isinstance(share, int | float) for share in value.values()):
        value = [{"id": name, "weight": share} for name, share in value.items()]  # the handbook's dataset_mixer
    listed = value.split(",") if isinstance(value, str) else value
    items = listed if isinstance(listed, list) else [listed]
    entries = [item if isinstance(item, dict) else {"path": item} for item in items if item]
    # the handbook's entries have an `id`, and a `weight` that is the share of the data set's own rows
    entries = [
        {"share" if "id" in entry and key == "weight" else key: entry[key] for key in entry} for entry in entries
    ]
    return [
        _file("tool_defaults.yaml")["torchtune"]["data_sets"].get(str(entry.get("_component_")).rpartition(".")[2], {})
        | entry
        for entry in entries
    ]


def _source(value: str) -> str:
    is_hub_id = _HUB_ID.fullmatch(value) and not _DATA_FILE.search(value) and not value.startswith((".", "/", "~"))
    return f"hub:{value}" if is_hub_id else value


def _sources_of(entry: Mapping[str, Any], read_split: str) -> list[dict[str, Any]]:
    """The files of a data set, or its name on the hub, as entries of data.sources; empty where no text names it, or it
    is another split of the hub."""
    at = next((name for name in table().data_set["path"] if entry.get(name)), "path")
    rest = {key: value for key, value in entry.items() if key != at and value}
    parts = {part: next((rest[one] for one in names if one in rest), None) for part, names in table().data_set.items()}
    named, split = entry.get(at), str(parts["split"] or read_split)
    if named in ("json", "csv", "parquet", "arrow", "text"):  # of `datasets`, for files
        files = rest.get("data_files")
        named = files.get(split, files) if isinstance(files, dict) else files
    sources: list[dict[str, Any]] = []
    for path in named if isinstance(named, list) else [named]:
        text = path.strip() if isinstance(path, str) else ""
        source = _source(re.sub(r"^(hf|ms)::|#\d+$", "", text))
        config = f":{parts['config']}" if parts["config"] and re.fullmatch(r"hub:[^:]+", source) else ""
        # ms-swift writes a number of rows as FILE#500, `datasets` as train[:500]
        cut = re.search(r"#(\d+)$", text) or re.search(r"^\w+\[:(\d+)\]$", split)
        numbers = {"weight": parts["weight"], "max_rows": int(cut[1]) if cut else parts["max_rows"]}
        if source and (not source.startswith("hub:") or re.match(read_split, split)):
            sources.append({"path": source + config} | {k: v for k, v in numbers.items() if type(v) in (int, float)})
    return sources


def _template(value: Any, _: str) -> Meaning | None:
    """A file, or one of the two names that mean the same here; other names are of the other tool's own templates."""
    if isinstance(value, str) and (
        value in ("chatml", "plain") or value.endswith((".jinja", ".jinja2", ".j2", ".txt"))
    ):
        return to("data.chat_template", value)
    return say("in a file of its own it is data.chat_template: FILE.jinja") if "{%" in str(value) else None


def _names(value: Any, path: str) -> Meaning | None:
    """Names in a list, or in a text with commas."""
    parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    names: Plain = (
        [_file()["modules"].get(str(name), name) for name in parts if name] if isinstance(parts, list) else None
    )
    is_pattern = path.startswith("tuning.") and not re.fullmatch(r"[\w.,\[\]\"' -]*", str(value))
    if is_pattern:
        return say("a pattern is not read: tuning.lora.target_modules lists names of modules (q_proj, …), or is auto")
    return to(path, names) if names and accepts(path, names) else say(f"{path} takes {leaves()[path].expects}")


def _split(value: Any, path: str) -> Meaning | None:
    """A split of `datasets`: nothing to say of the one that is read."""
    read = re.fullmatch(r"(train|val|dev)\w*(\[:\d+\])?", str(value))
    if read and (read[1] == "train") is (path == DATA[0]):
        return say("this number of rows (max_rows) is drawn by train.seed, not the first") if read[2] else Meaning()
    return say(
        f"{path} reads a split whole, train or validation: load_dataset(…, split={{value}}).to_json(FILE) of datasets "
        "writes another, or a part, to name here"
    )


# By the name that the table gives them.
_READERS: Mapping[str, Reader] = {
    # torchtune's function for a model: `lora_llama3_1_8b` adds adapters, `qlora_llama3_1_8b` to 4-bit weights
    "builder": lambda value, path: to(path, re.sub(r".*\.(q?lora)_.*|.*", r"\1", str(value), count=1) or "full"),
    "column": lambda value, path: Meaning() if path.endswith(f".{value}") else None,
    # ms-swift's mapping of its own columns to the usual ones
    "columns": lambda value, path: to(path, {v: k for k, v in value.items()}) if isinstance(value, dict) else None,
    "data_files": _data_files,
    # axolotl's `pretraining_dataset`: its name says the task too
    "documents": lambda value, path: _data_files(value, path, ("task_mode", "cpt")),
    # torchtune's steps of each epoch
    "each_epoch": lambda value, path: to(path, [value, "train.epochs"]) if isinstance(value, int) else None,
    "held_out_share": _held_out_share,
    "layers": lambda value, path: to(path, [f"layers.{one}" for one in re.findall(r"\d+", str(value))] or "all"),
    "names": _names,
    # `betas: [0.9, 0.95]`: only the second is an option here
    "second_beta": lambda value, path: to(path, value[1]) if isinstance(value, list) and len(value) == 2 else None,
    "split": _split,
    "system": lambda value, path: (
        Meaning(((path, value), ("data.style.how", "keep"))) if value and isinstance(value, str) else None
    ),
    "template": _template,
}


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
    if value is None or (row.switch and word in OFF):
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
    expects = leaves()[row.path].expects if row.path in leaves() else "text"
    return say(f"here it is {row.path} ({expects})")


def _forms(value: Plain) -> list[Plain]:
    """A value as given, and the number that it spells in another form (`16.0`, `"2e-5"`)."""
    text = value.strip() if isinstance(value, str) else ""
    number = float(text) if re.fullmatch(r"[-+]?[\d.]*\d\.?([eE][-+]?\d+)?", text) and text.count(".") < 2 else value
    return [value, number, int(number) if isinstance(number, float) and number.is_integer() else number]
