"""Another tool's file as a run YAML: its keys in our terms, worked out together, then that tool's own defaults for
what it leaves out, and what has no equivalent as comments with the reason."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import yaml

from sft_play.config import other_tools
from sft_play.config.options import accepts, homes, leaves, sections
from sft_play.config.other_tools import Known, Meaning, Tool
from sft_play.config.unknown_keys import Foreign, shown_value, together
from sft_play.config.validation import cross_problems, unknown_keys, validate
from sft_play.config.yaml_io import (
    Path_,
    Plain,
    Problem,
    YamlDocument,
    dotted,
    parse,
    plain_scalar,
    show,
    value_at,
    walk,
)
from sft_play.errors import ConfigError

_REMOVE = re.compile(r"[:,;]? ?remove it$")
# Words beside a setting that say that it is not all that was asked for.
_LESS = re.compile(r"\bnot\b|longest|together|with tuning")


@dataclass
class Translation:
    """Our settings by path, and what is not taken, with the reason. `idle` are keys that are empty or switched off,
    `defaults` the settings that are the other tool's defaults."""

    tool: Tool
    settings: dict[str, Plain]
    left_out: list[tuple[str, str]] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    defaults: list[str] = field(default_factory=list)

    def comments(self) -> list[str]:
        """What is not taken, and which settings are the other tool's defaults, as lines of comment."""
        reasons = dict.fromkeys(why for _, why in self.left_out)
        texts = [f"{', '.join(what for what, why in self.left_out if why == reason)}: {reason}" for reason in reasons]
        if self.idle:
            texts.append(f"empty, off, or without effect here: {', '.join(self.idle)}")
        if self.defaults:
            texts.append(f"not in the file, defaults of {self.tool.name}: {', '.join(self.defaults)}")
        # no word is broken: a path or a command is meant to be copied
        wrapper = textwrap.TextWrapper(
            112, initial_indent="# ", subsequent_indent="#     ", break_long_words=False, break_on_hyphens=False
        )
        return [line for text in texts for line in wrapper.wrap(text)]


def translate(text: str, *, name: str, beside: Mapping[str, Plain], rows: str = "") -> Translation:
    """Translate another tool's file into a run that loads. `beside` are settings of the user, which win over the
    file's; `rows` is the format of the rows, if it is known. Raises ConfigError if the file is no YAML, names no model,
    or describes another kind of training."""
    values = {dotted(path): str(value) for path, value in walk(parse(text, name=name).data)}
    # OmegaConf's references: ${output_dir}
    document = parse(re.sub(r"\$\{([\w.]+)\}", lambda ref: values.get(ref[1], ref[0]), text), name=name)
    if document.problems:
        raise ConfigError("\n".join(map(str, document.problems)))
    _gather_data_sets(document)
    foreign = [key for _, keys in unknown_keys(document) for key in keys]
    parts = {str(part) for key in foreign for path, _ in walk(key.value, key.path) for part in path}
    result = Translation(other_tools.tool_of(parts), dict(beside))
    keys = [*foreign, *_where_ours_are(document, result)]
    keys += _keys_of_data_sets(keys)
    for at, key in enumerate(keys):
        if row := result.tool.rows.get(key.name):
            keys[at] = dataclasses.replace(key, meaning=other_tools.answer(row, key.value))
    _refuse_preferences(keys, name)
    keys = together([*keys, *_defaults(result.tool, keys)])
    # what another setting decides (steps of each epoch) behind it; of the defaults the mode first
    for key in sorted(keys, key=lambda key: not all(accepts(*one) for one in key.settings.items())):
        if not key.is_default:
            _take(key, document, result)
    for key in sorted(filter(lambda key: key.is_default, keys), key=lambda key: "tuning.mode" not in key.settings):
        _take_default(key, result, rows)
    if "model.name" not in result.settings:
        raise ConfigError(f"{name} names no model; give one beside it: make new FROM={name} MODEL=owner/name")
    _complete(result, beside)
    _leave_out_what_is_refused(result)
    return result


def _gather_data_sets(document: YamlDocument) -> None:
    """Move keys that describe all data sets (`dataset_config`, `max_samples`) into the entry of each one."""
    rows = {key: other_tools.known((key,)) for key, value in document.data.items() if value}
    named = [
        key
        for key, row in rows.items()
        if row and row.path == other_tools.DATA[0] and other_tools.answer(row, document.data[key]).settings
    ]
    beside = {key: document.data.pop(key) for key in rows if named and key in other_tools.table().data_set["beside"]}
    for key in named if beside else []:
        document.data[key] = [beside | entry for entry in other_tools.data_sets(document.data[key])]


def _where_ours_are(document: YamlDocument, result: Translation) -> Iterator[Foreign]:
    """Values at places of ours: settings where we take them, else keys of the other tool."""
    for path in [*leaves(), *filter(None, sections())]:
        at: Path_ = tuple(path.split("."))
        value = value_at(document.data, at)
        if value is None or (path in sections() and isinstance(value, dict)):
            continue
        if path in leaves() and accepts(path, value):
            result.settings.setdefault(path, value)
            continue
        row = other_tools.table().rows.get(str(at[-1]))
        refused = other_tools.say(f"expected {leaves()[path].expects}") if path in leaves() else None
        yield Foreign(at, value, None, other_tools.answer(row, value) if row else refused)


def _keys_of_data_sets(keys: Sequence[Foreign]) -> Iterator[Foreign]:
    """What is said of each data set (a split, columns), as keys of their own; of those that are held out no setting."""
    for key in keys:
        row = other_tools.known(tuple(map(str, key.path)))
        if row is None or row.path not in other_tools.DATA or isinstance(key.value, str):
            continue
        is_trained = row.path == other_tools.DATA[0]
        for number, entry in enumerate(other_tools.data_sets(key.value)):
            for inner, value in walk(entry):
                inner_row = other_tools.known(("entry" if is_trained else "held_out", *map(str, inner)))
                answer = other_tools.answer(inner_row or Known(words="there is no such option here"), value)
                at = (*key.path, number, *inner) if isinstance(key.value, list) else (*key.path, *inner)
                yield Foreign(at, value, None, Meaning(answer.settings if is_trained else (), answer.words))


def _refuse_preferences(keys: list[Foreign], name: str) -> None:
    """Raises ConfigError where a key says that answers are compared: what was written would train something else."""
    for key in keys:
        if key.meaning is not None and key.value and key.meaning.words.startswith("preference tuning"):
            raise ConfigError(f"{name}: {dotted(key.path)}: {show(key.value)}: {key.meaning.words}; nothing is written")


def _defaults(tool: Tool, keys: Sequence[Foreign]) -> Iterator[Foreign]:
    """The tool's defaults as keys, but those of options that the file speaks of, whether it was taken or not; the mode
    follows from several keys, named and not."""
    with_value = [key for key in keys if key.value is not None]
    names = {str(part) for key in with_value for part in key.path}
    rows = [other_tools.known(tuple(map(str, key.path))) for key in with_value]
    options = {row.path for row in rows if row} | {path for key in with_value for path in key.settings}
    if "train.effective_batch_size" in options:  # the plan divides it
        options |= {"train.batch_size", "train.grad_accum"}
    for name, value in tool.defaults.items():
        at = homes(name)
        row = tool.rows.get(name) or other_tools.known(tuple(name.split("."))) or Known(at[0] if len(at) == 1 else "")
        meaning = other_tools.answer_of(value) if isinstance(value, dict) else other_tools.answer(row, value)
        key = Foreign((name,), value, None, meaning, is_default=True)
        is_in_file = name.rpartition(".")[2] in names or not options.isdisjoint(key.settings.keys() - {"tuning.mode"})
        if value is not None and not is_in_file:
            options |= key.settings.keys()
            yield key


def _take(key: Foreign, document: YamlDocument, result: Translation) -> None:
    if key.meaning == Meaning():
        return
    values = ((path, _worked_out(path, value, result.settings)) for path, value in key.settings.items())
    taken = {path: value for path, value in values if accepts(path, value)}
    for path, value in taken.items():
        result.settings.setdefault(path, value)
    raw = document.raw.get(key.path)
    template = _REMOVE.sub("", key.meaning.words) if key.meaning else ""
    words = template.replace("{value}", show(key.value, raw=raw).strip('"'))
    is_off = key.value is False or key.value in (None, "", [], {}) or "no effect" in words
    if not taken and not words.startswith("here rows") and (is_off or (key.meaning is not None and not words)):
        result.idle.append(dotted(key.path))
    elif not taken or _LESS.search(words):
        here = f"here {' and '.join(f'{path}: {show(value)}' for path, value in taken.items())}" if taken else ""
        at = [path for path in homes(key.name) if path in leaves()]
        none = f"{at[0]} takes {leaves()[at[0]].expects}" if len(at) == 1 else "there is no such option here"
        why = "; ".join(filter(None, [here, words])) or none
        result.left_out.append((f"{dotted(key.path)} ({shown_value(key, raw)})", why))


def _take_default(key: Foreign, result: Translation, rows: str) -> None:
    """Take a default of the tool where it is not ours too; those of adapters only where new ones are trained."""
    is_idle = result.settings.get("tuning.mode") == "full" or "model.adapter" in result.settings
    undecided = [path for path in key.settings if path not in result.settings
                 and not (is_idle and path.startswith("tuning.lora."))]  # fmt: skip
    for path in undecided:
        ours = _worked_out(path, key.settings[path], result.settings, rows)
        if accepts(path, ours) and (path == "tuning.mode" or ours != leaves()[path].default):
            result.settings[path] = ours
            result.defaults.append(path)
    # what is said of a mode is that of training the whole
    is_of_mode = "tuning.mode" in key.settings and result.settings["tuning.mode"] != "full"
    words = key.meaning.words if key.meaning and not is_of_mode else ""
    if words and not _REMOVE.search(words) and (not key.settings or (undecided and _LESS.search(words))):
        result.left_out.append((f"{dotted(key.path)} (not in the file)", words))


def _worked_out(path: str, value: Any, settings: Mapping[str, Plain], rows: str = "") -> Any:
    """A value that follows from others: a mapping by what they are, or the product of a number and a setting."""
    if isinstance(value, dict) and not accepts(path, value):
        kind = "adapters" if any(one.startswith("tuning.lora.") for one in settings) else "whole"
        kinds = (rows, settings.get("tuning.mode"), settings.get("train.optim"), kind)
        return next((value[one] for one in kinds if one in value), None)
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], int) and str(value[1]) in leaves():
        return int(value[0] * settings.get(value[1], leaves()[value[1]].default))
    return value


def _complete(result: Translation, beside: Mapping[str, Plain]) -> None:
    """What follows from several settings, those `beside` the file among them."""
    settings = result.settings
    if "data.train_path" in beside and "data.sources" in settings:
        result.left_out.append((f"data.sources: {show(settings.pop('data.sources'))}", "DATA= names the rows"))
    if "data.train_path" not in settings and "data.sources" not in settings:
        names_none = "no file or data set of the hub is named; DATA=FILE, or this key, names it (else: make process)"
        result.left_out.append(("data.train_path", names_none))
    if settings["tuning.mode"] == "full":
        for path in [path for path in settings if path.startswith("tuning.lora.")]:
            result.left_out.append((f"{path}: {show(settings.pop(path))}", "all weights are trained, without adapters"))
    if isinstance(parts := settings.get("tuning.trainable"), list):
        settings["tuning.trainable"] = [*parts, *cast(list[Plain], settings.get("tuning.lora.modules_to_save", []))]
    if isinstance(settings.get("train.batch_size"), int):
        if "train.grad_accum" in settings and "train.effective_batch_size" in settings:
            total = settings.pop("train.effective_batch_size")
            result.left_out.append((f"train.effective_batch_size: {total}", "batch_size x grad_accum x GPUs decide it"))
        elif "train.effective_batch_size" not in settings:
            settings.setdefault("train.grad_accum", 1)  # the other tools' default; ours would be 32 rows in a step


def _leave_out_what_is_refused(result: Translation) -> None:
    """Take out settings, with the reason, until what is left is a run YAML without a problem."""
    while problems := _problems(run_yaml(result.settings)):
        about = [(path, problem.message) for path in result.settings for problem in problems
                 if f"{problem.path}.".startswith((f"{path}.", f"{path}["))]  # fmt: skip
        if not about:
            raise ConfigError("\n".join(map(str, problems)))
        path, why = about[0]
        result.left_out.append((f"{path}: {show(result.settings.pop(path))}", why))


def _problems(text: str) -> list[Problem]:
    document = parse(text, name="the run YAML")
    config, problems = validate(document)
    return problems or (cross_problems(config, document) if config is not None else [])


# --- written ----------------------------------------------------------------------------------------------------------


def run_yaml(settings: Mapping[str, Plain]) -> str:
    """The text for settings by their dotted paths, in the order of the schema."""
    tree: dict[str, Any] = {}
    # a setting may be one of a mapping: data.columns.prompt
    for path in (one for leaf in leaves() for one in settings if f"{one}.".startswith(f"{leaf}.")):
        *holders, name = path.split(".")
        section = tree
        for holder in holders:
            section = section.setdefault(holder, {})
        section[name] = dict(value) if isinstance(value := settings[path], dict) else value
    return "".join(_section({name: value}) for name, value in tree.items())


def _section(section: dict[str, Any]) -> str:
    short, long = (
        yaml.dump(section, Dumper=_Dumper, default_flow_style=flow, width=10_000, sort_keys=False, allow_unicode=True)
        for flow in (None, False)
    )
    is_short = not short.startswith("{") and max(map(len, short.splitlines())) <= 112
    return short if is_short else long


class _Dumper(yaml.SafeDumper):
    """Without anchors; a text that is a number to YAML 1.2 alone (1e-4) is quoted."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if plain_scalar(data) == data else '"')


_Dumper.add_representer(str, _Dumper.represent_str)
