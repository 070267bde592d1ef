"""Another tool's file as a run YAML: its keys in our terms, worked out together, and what has no equivalent as comments
with the reason."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from sft_play.config import other_tools
from sft_play.config.leaves import accepts, homes, leaves, sections
from sft_play.config.unknown_keys import Foreign, shown_value, together
from sft_play.config.validation import cross_problems, unknown_keys, validate
from sft_play.config.yaml_io import Path_, Plain, Problem, YamlDocument, dotted, parse, plain_scalar, show, value_at
from sft_play.errors import ConfigError

_OF_ADAPTERS = ("stage", "template", "cutoff_len", "finetuning_type", "training_type")
"""Keys of tools that train adapters where nothing else is said: LLaMA-Factory and Unsloth."""
_READ_OF_AN_ENTRY = frozenset({"path", "weight", "prob", "ratio", "proportion", "num_samples", "max_samples"})
_BY_ROWS = "format and columns are recognised by the rows' keys (make preview shows them; data.columns names others)"


_REMOVE = re.compile(r"[:,;]? ?remove it$")
_LESS = re.compile(r"\bnot\b|longest|together|with tuning")
"""Words beside a setting that say that it is not all that was asked for."""


@dataclass
class Translation:
    """Our settings by path, and what is not taken, with the reason. `idle` are keys that are empty or switched off."""

    settings: dict[str, Plain] = field(default_factory=dict)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)

    def comments(self) -> list[str]:
        """What is not taken, as lines of comment."""
        said = [f"{what}: {why}" for what, why in self.left_out]
        said += [f"empty, off, or without effect here: {', '.join(self.idle)}"] if self.idle else []
        # no word is broken: a path or a command is meant to be copied
        wrapper = textwrap.TextWrapper(
            112, initial_indent="# ", subsequent_indent="#     ", break_long_words=False, break_on_hyphens=False
        )
        return [line for text in said for line in wrapper.wrap(text)]


def translate(text: str, *, name: str, given: Mapping[str, Plain]) -> Translation:
    """The run that another tool's file describes, with settings that are `given` beside it; it loads. Raises
    ConfigError where the file is no YAML, names no model, or describes another kind of training."""
    document = parse(text, name=name)
    if document.problems:
        raise ConfigError("\n".join(map(str, document.problems)))
    result = Translation()
    keys = together([*(key for _, keys in unknown_keys(document) for key in keys), *_where_ours_are(document, result)])
    _refuse_preferences(keys, name)
    for key in keys:
        _take(key, document, result)
    result.settings |= given
    if "data.train_path" in given:
        result.settings.pop("data.sources", None)
    if "model.name" not in result.settings:
        raise ConfigError(f"{name} names no model; give one beside it: make new FROM={name} MODEL=owner/name")
    _complete(result, {key.name for key in keys})
    _leave_out_what_is_refused(result)
    return result


def _where_ours_are(document: YamlDocument, result: Translation) -> Iterator[Foreign]:
    """Values at places of ours: settings where we take them, else keys of the other tool."""
    for path in [*leaves(), *filter(None, sections())]:
        at: Path_ = tuple(path.split("."))
        value = value_at(document.data, at)
        if value is None or (path in sections() and isinstance(value, dict)):
            continue
        if path in leaves() and accepts(path, value):
            result.settings[path] = value
            continue
        row = other_tools.table().rows.get(str(at[-1]))
        refused = other_tools.say(f"expected {leaves()[path].expects}") if path in leaves() else None
        yield Foreign(at, value, None, other_tools.answer(row, value) if row else refused)


def _refuse_preferences(keys: list[Foreign], name: str) -> None:
    """Raises ConfigError where a key says that answers are compared: what was written would train something else."""
    for key in keys:
        if key.meaning is not None and key.value and key.meaning.words.startswith("preference tuning"):
            raise ConfigError(f"{name}: {dotted(key.path)}: {show(key.value)}: {key.meaning.words}; nothing is written")


def _take(key: Foreign, document: YamlDocument, result: Translation) -> None:
    meaning, words = key.settings, key.meaning.words if key.meaning else ""
    taken = {path: value for path, value in meaning.items() if accepts(path, value)}
    for path, value in taken.items():
        result.settings.setdefault(path, value)
    raw = document.raw.get(key.path)
    words = _REMOVE.sub("", words.replace("{value}", show(key.value, raw=raw).strip('"')))
    is_off = key.value is False or key.value in (None, "", [], {}) or "no effect" in words
    if not taken and (is_off or (key.meaning is not None and not words)):
        result.idle.append(dotted(key.path))
    elif not taken or _LESS.search(words):
        here = f"here {' and '.join(f'{path}: {show(value)}' for path, value in taken.items())}" if taken else ""
        at = [path for path in homes(key.name) if path in leaves()]
        none = f"{at[0]} takes {leaves()[at[0]].expects}" if len(at) == 1 else "there is no such option here"
        why = "; ".join(filter(None, [here, words])) or none
        result.left_out.append((f"{dotted(key.path)} ({shown_value(key, raw)})", why))
    for number, entry in enumerate(key.value if taken and isinstance(key.value, list) else []):
        more = entry if isinstance(entry, dict) else {}
        values = ", ".join(f"{one}: {show(value)}" for one, value in more.items() if one not in _READ_OF_AN_ENTRY)
        if values:
            result.left_out.append((f"{dotted((*key.path, number))} ({values})", _BY_ROWS))


def _complete(result: Translation, names: set[str]) -> None:
    """What the other tool does where its file is silent, and this one would not."""
    settings = result.settings
    if "data.train_path" not in settings and "data.sources" not in settings:
        names_none = "no file or data set of the hub is named; DATA=FILE, or this key, names it (else: make process)"
        result.left_out.append(("data.train_path", names_none))
    if "tuning.mode" not in settings:
        is_adapter = any(path.startswith("tuning.lora.") for path in settings) or not names.isdisjoint(_OF_ADAPTERS)
        settings["tuning.mode"] = "lora" if is_adapter else "full"
        what = (
            "adapters, since the file has options of them" if is_adapter else "all weights, since it names no adapter"
        )
        result.left_out.append((f"tuning.mode: {settings['tuning.mode']}", f"{what}; qlora needs least memory"))
    if settings["tuning.mode"] == "full":
        for path in [path for path in settings if path.startswith("tuning.lora.")]:
            result.left_out.append((f"{path}: {show(settings.pop(path))}", "all weights are trained, without adapters"))
    if isinstance(settings.get("train.batch_size"), int):
        if "train.grad_accum" in settings and "train.effective_batch_size" in settings:
            total = settings.pop("train.effective_batch_size")
            result.left_out.append((f"train.effective_batch_size: {total}", "batch_size x grad_accum x GPUs decide it"))
        elif "train.effective_batch_size" not in settings:
            settings.setdefault("train.grad_accum", 1)  # the other tools' default; ours would be 32 rows in a step


def _leave_out_what_is_refused(result: Translation) -> None:
    """Take out settings, with the reason, until what is left is a run YAML without a problem."""
    while problems := _problems(run_yaml(result.settings)):
        for path in [path for path in result.settings for problem in problems if _is_about(problem, path)]:
            if path in result.settings:
                why = next(problem.message for problem in problems if _is_about(problem, path))
                result.left_out.append((f"{path}: {show(result.settings.pop(path))}", why))
                break
        else:
            raise ConfigError("\n".join(map(str, problems)))


def _is_about(problem: Problem, path: str) -> bool:
    return f"{problem.path}.".startswith((f"{path}.", f"{path}["))


def _problems(text: str) -> list[Problem]:
    document = parse(text, name="the run YAML")
    config, problems = validate(document)
    return problems or (cross_problems(config, document) if config is not None else [])


# --- written ----------------------------------------------------------------------------------------------------------

_WIDTH = 112


def run_yaml(settings: Mapping[str, Plain]) -> str:
    """The text for settings by their dotted paths, in the order of the schema."""
    tree: dict[str, Any] = {}
    for path in (one for one in leaves() if one in settings):
        *holders, name = path.split(".")
        section = tree
        for holder in holders:
            section = section.setdefault(holder, {})
        section[name] = settings[path]
    return "".join(_section({name: value}) for name, value in tree.items())


def _section(section: dict[str, Any]) -> str:
    short, long = (
        yaml.dump(section, Dumper=_Dumper, default_flow_style=flow, width=10_000, sort_keys=False, allow_unicode=True)
        for flow in (None, False)
    )
    is_short = not short.startswith("{") and max(map(len, short.splitlines())) <= _WIDTH
    return short if is_short else long


class _Dumper(yaml.SafeDumper):
    """Without anchors; a text that is a number to YAML 1.2 alone (1e-4) is quoted."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if plain_scalar(data) == data else '"')


_Dumper.add_representer(str, _Dumper.represent_str)
