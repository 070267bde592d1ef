"""A run YAML and its overrides → `RunConfig`, or every problem at once.

Overrides apply to the plain data before validation, so they go through the same reader as the file.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sft_play.config import other_tools
from sft_play.config.adapter import put_adapter
from sft_play.config.leaves import Leaf, accepts, homes, item_leaf, leaves, listed, sections
from sft_play.config.reference import yaml_value
from sft_play.config.schema import RunConfig
from sft_play.config.stages import Stage, overlays, set_in_vain, what_trains
from sft_play.config.yaml_io import Document, Path_, Plain, Problem, dotted, parse, parse_value, read_text, show, walk
from sft_play.errors import ConfigError
from sft_play.variables import nearest

_SURROGATE = re.compile("[\ud800-\udfff]")
_SECRET = re.compile(r"(?<!pad)(?<!eos)(?<!bos)(?<!unk)_token$|api_key|secret|password", re.IGNORECASE)
_VAGUE = {"name", "path", "dir", "mode", "steps", "how", "headers", "workers", "trace"}
"""Names that mean something else in every section: those of another tool's section are not looked up in ours."""
_ALIKE = 0.87
"""How similar names must be where nothing else connects them: `loss_fn` (0.86) is not a misspelt `loss_on`."""
OVERRIDE = "SET"
"""The place of an override in messages, where a value of the file has its line."""


@dataclass(frozen=True)
class LoadedConfig:
    """A valid config with the text it came from: `text` as given, `overrides` as `key=value` words."""

    config: RunConfig
    path: Path
    text: str
    overrides: tuple[str, ...]
    stages: tuple[Stage, ...] = ()
    """The stages of its curriculum; empty without one."""
    stage: str | None = None
    """The name of the stage, where this is the run of one stage."""

    @property
    def longest(self) -> RunConfig:
        """The settings of the stage with the longest rows, or of the run where it has no stages."""
        configs = [stage.config for stage in self.stages] or [self.config]
        return max(configs, key=lambda config: config.model.max_seq_len)

    def of(self, stage: Stage) -> LoadedConfig:
        """The run of a single stage."""
        return dataclasses.replace(self, config=stage.config, stages=(), stage=stage.name)


def load_config(path: Path | str, *, overrides: Sequence[str] = (), with_adapter: bool = True) -> LoadedConfig:
    """The run that a YAML file and `key=value` overrides describe.

    Args:
        with_adapter: look for the adapter of `model.adapter` and take its settings; False where only other settings
            are asked for, since the adapter may be gone.

    Raises:
        ConfigError: with every problem, each with its place, path, value, and what to do.
    """
    path = Path(path)
    text = read_text(path)
    config, stages = _from_text(text, name=str(path), overrides=overrides, with_adapter=with_adapter)
    return LoadedConfig(config=config, path=path, text=text, overrides=tuple(overrides), stages=stages)


def config_from_text(text: str, *, name: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that a YAML text and overrides describe; raises like `load_config`. `model.adapter` is not looked for."""
    return _from_text(text, name=name, overrides=overrides, with_adapter=False)[0]


def _from_text(
    text: str, *, name: str, overrides: Sequence[str], with_adapter: bool
) -> tuple[RunConfig, tuple[Stage, ...]]:
    """The run and the stages of its curriculum."""
    document = parse(text, name=name)
    problems = [*document.problems, *apply_overrides(document, overrides)]
    if with_adapter:
        problems += put_adapter(document, lambda key: place(document, tuple(key.split("."))))
    config, more = _validate(document)
    problems += more
    stages: tuple[Stage, ...] = ()
    if config is not None and not problems and config.curriculum:
        stages, more = _stages(config, document)
        problems += more
    elif config is not None and not problems:
        problems += cross_problems(config, document)
    if problems or config is None:
        lines = list(dict.fromkeys(str(problem) for problem in sorted(problems, key=_line_of)))
        listed_lines = f"{len(lines)} problems:\n" + "\n".join(f"  {line}" for line in lines)
        raise ConfigError(lines[0] if len(lines) == 1 else listed_lines)
    return config, stages


def _stages(config: RunConfig, document: Document) -> tuple[tuple[Stage, ...], list[Problem]]:
    """The stages of a curriculum, each validated as a run of its own, and their problems."""
    stages: list[Stage] = []
    laid_over = list(overlays(document))
    problems = [*(problem for stage in laid_over for problem in stage.problems), *set_in_vain(document, laid_over)]
    names = Counter(stage.name.lower() for stage in laid_over)

    def add(path: Path_, message: str) -> None:
        problems.append(Problem(dotted(path), place(document, path), message))

    for overlay in laid_over:
        at: Path_ = ("curriculum", overlay.number - 1)
        own, wrong = _validate(overlay.document)
        wrong += cross_problems(own, overlay.document) if own is not None and not wrong else []
        problems += map(overlay.at, wrong)
        if names[overlay.name.lower()] > 1:
            add((*at, "name"), f"{overlay.name} is the name of {names[overlay.name.lower()]} stages")
        if own is None:
            continue
        before = stages[-1] if stages and stages[-1].number == overlay.number - 1 else None
        if before is not None and what_trains(own) == what_trains(before.config):
            add(at, f"changes nothing: stage {overlay.name} has the data and settings of {before.name} before it; "
                    "give it something of its own, or give that stage more epochs")  # fmt: skip
        stages.append(Stage(overlay.name, overlay.number, own))
    return tuple(stages), problems


def _line_of(problem: Problem) -> int:
    line = problem.where.rpartition(":")[2]
    return int(line) if line.isdigit() else 1_000_000


def split_overrides(text: str) -> list[str]:
    """`SET` split as a shell splits words, without running anything.

    A word with an open bracket takes in the following words, so that a list whose quotes were eaten
    (`model.mesh_shape=[[4, 1], [fsdp, tp]]`) reads as meant.

    Raises:
        ConfigError: a quote is not closed.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{OVERRIDE}={show(text)}: {str(error).lower()}; close the quote") from None
    joined: list[str] = []
    for word in words:
        value = joined[-1].partition("=")[2] if joined else ""
        is_open = sum(map(value.count, "[{")) > sum(map(value.count, "]}"))
        if value.startswith(("[", "{")) and is_open:
            joined[-1] += f" {word}"
        else:
            joined.append(word)
    return joined


def apply_overrides(document: Document, overrides: Iterable[str]) -> list[Problem]:
    """Put each `a.b=value` into the document's data; returns a problem for each that cannot be."""
    problems = []
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not key:
            shown = show(override)
            problems.append(Problem("", OVERRIDE, f"{shown} is not key=value, such as train.epochs=1"))
            continue
        try:
            value = parse_value(text, name=f"{OVERRIDE} {key}")
        except ConfigError as error:
            problems.append(Problem("", "", f"{error}; put the value in quotes to mean it as text"))
            continue
        problems += _put(document, tuple(key.split(".")), value, text)
    return problems


def _put(document: Document, path: tuple[str, ...], value: Plain, text: str) -> list[Problem]:
    if len(path) > 2 and path[0] == "curriculum" and path[1].isdigit():
        return _put_in_stage(document, path, value, text)
    section: dict[str, Plain] = document.data
    for depth, part in enumerate(path[:-1], start=1):
        inner = section.setdefault(part, {})
        if inner is None:
            inner = section[part] = {}
        if not isinstance(inner, dict):
            holder = ".".join(path[:depth])
            return [Problem(".".join(path), OVERRIDE, f"{holder} is {show(inner)}, not a section")]
        section = inner
    section[path[-1]] = value
    for places in (document.lines, document.raw):
        for old in [place for place in places if place[: len(path)] == path]:
            del places[old]
    document.raw[path] = text
    document.overridden.add(path)
    return []


def _put_in_stage(document: Document, path: tuple[str, ...], value: Plain, text: str) -> list[Problem]:
    """Put `curriculum.0.train.epochs=1`, a key of a stage; stages are counted from 0."""
    stages, at, keys = document.data.get("curriculum"), int(path[1]), path[2:]
    if not isinstance(stages, list) or at >= len(stages) or not isinstance(stages[at], dict) or len(keys) > 2:
        count = len(stages) if isinstance(stages, list) else 0
        why = "names a key inside a key" if len(keys) > 2 else f"there are {count} stages, counted from 0"
        return [Problem(".".join(path), OVERRIDE, f"{why}: curriculum.0.train.epochs=1 sets a key of the first")]
    stage = stages[at]
    assert isinstance(stage, dict)
    if len(keys) == 2:
        inner = stage.get(keys[0])
        stage[keys[0]] = {**(inner if isinstance(inner, dict) else {}), keys[1]: value}
    else:
        stage[keys[0]] = value
    full: Path_ = ("curriculum", at, *keys)
    document.lines.pop(full, None)
    document.raw[full] = text
    document.overridden.add(full)
    return []


def _validate(document: Document) -> tuple[RunConfig | None, list[Problem]]:
    unknown, misplaced = list(_unknown_keys(document)), _misplaced(document)
    blocked = {path for path, _ in unknown} | set(misplaced)
    problems = [*(problem for _, key_problems in unknown for problem in key_problems), *misplaced.values()]
    broken = [path for path, value in walk(document.data) if isinstance(value, str) and _SURROGATE.search(value)]
    problems += [
        Problem(dotted(path), place(document, path), "the text has half of a surrogate pair") for path in broken
    ]
    if broken:
        return None, problems
    pruned = _without(document.data, blocked)
    assert isinstance(pruned, dict)
    try:
        return RunConfig.model_validate_json(json.dumps(pruned)), problems
    except ValidationError as error:
        return None, problems + list(_leaf_problems(error, document, blocked))


def _without(data: Plain, blocked: set[Path_], path: Path_ = ()) -> Plain:
    """The data without the keys already reported, and without sections left empty by `key:`."""
    if not isinstance(data, dict):
        return data
    result = {}
    for key, value in data.items():
        inner = (*path, key)
        if inner in blocked or (value is None and dotted(inner) in sections()):
            continue
        result[key] = _without(value, blocked, inner)
    return result


def _misplaced(document: Document) -> dict[Path_, Problem]:
    """Sections that hold a value instead of keys."""
    problems = {}
    for name, section in sections().items():
        if not name:
            continue
        path: Path_ = tuple(name.split("."))
        value = _at(document.data, path)
        if value is None or isinstance(value, dict):
            continue
        first = next(iter(section.model_fields))
        shown = show(value, raw=document.raw.get(path))
        problems[path] = Problem(
            name,
            place(document, path),
            f"expected a section, found {shown}; write {name}: {{{first}: {shown if first == 'name' else '…'}}} "
            f"(its keys: {', '.join(section.model_fields)}){_in_other_tools(document, path, value)}",
        )
    return problems


def _in_other_tools(document: Document, path: Path_, value: Plain) -> str:
    """What a value means where other tools use a section's name for a plain key (`mixed_precision: bf16`)."""
    row = other_tools.table().rows.get(str(path[-1]))
    answer = other_tools.answer(row, value) if row else other_tools.Answer()
    joint = "=" if place(document, path) == OVERRIDE else ": "
    return f"; as other tools mean it, {_words(answer, value, raw=None, joint=joint)}" if answer.settings else ""


def _at(data: Plain, path: Path_) -> Plain:
    for part in path:
        if isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        elif isinstance(data, dict) and part in data:
            data = data[str(part)]
        else:
            return None
    return data


def place(document: Document, path: Path_) -> str:
    """Where a value stands: `SET` for an override, else `file:line`."""
    for set_path in document.overridden:
        if path[: len(set_path)] == set_path or (set_path[: len(path)] == path and path not in document.lines):
            return OVERRIDE
    return document.where(path)


def _unknown_keys(document: Document) -> Iterator[tuple[Path_, list[Problem]]]:
    """Each key that our sections do not have, with its problems: one, or one for every key in a foreign section."""
    for name, section in sections().items():
        own: Path_ = tuple(name.split(".")) if name else ()
        holder = _at(document.data, own)
        if not isinstance(holder, dict):
            continue
        for key in holder:
            if key not in section.model_fields:
                path: Path_ = (*own, key)
                yield path, list(_foreign(document, path, holder[key], section=name))


def _foreign(document: Document, path: Path_, value: Plain, *, section: str | None) -> Iterator[Problem]:
    """The problems of an unknown key; for a section, those of every key in it, unless the table answers it as a whole.

    `section` is our section that holds it, or that the other tool's section corresponds to; None if unknown.
    """
    key, row = str(path[-1]), other_tools.known(tuple(map(str, path)))
    about = other_tools.table().sections.get(key.lower())
    is_answered_whole = row is not None and not row.path and about is None
    if not isinstance(value, dict) or not value or is_answered_whole:
        yield _unknown(document, path, value, section=section)
        return
    meant = None if about is not None else nearest(key, [name for name in sections() if name])
    fields = sections()[about or meant or ""].model_fields if about or meant else {}
    answered = [inner for inner in value if about is not None or (inner not in fields and _is_known((*path, inner)))]
    if about is None and (section is not None or not answered):
        yield _unknown(document, path, value, section=section)
    for inner in value:
        if inner in answered or (meant is not None and inner not in fields):
            yield from _foreign(document, (*path, inner), value[inner], section=about or meant)


def _is_known(path: Path_) -> bool:
    return other_tools.known(tuple(map(str, path))) is not None or bool(homes(str(path[-1])))


def _unknown(document: Document, path: Path_, value: Plain, *, section: str | None) -> Problem:
    where, key = place(document, path), str(path[-1])
    raw = document.raw.get(path)
    joint = "=" if where == OVERRIDE else ": "
    hint = _suggestion(tuple(map(str, path)), value, raw=raw, section=section, joint=joint)
    shown = "not shown" if _SECRET.search(key) and isinstance(value, str) else f"value {show(value, raw=raw)}"
    return Problem(dotted(path), where, f"unknown key ({shown}){hint}")


def flag_hint(flag: str, value: str | None) -> str | None:
    """What another tool's flag (`--mixed_precision`) with its value means here; None if unknown."""
    parts = tuple(flag.lstrip("-").replace("-", "_").split("."))
    try:
        parsed = True if value is None else parse_value(value, name=flag)
    except ConfigError:
        parsed = value
    if ".".join(parts) not in leaves() and (parts[-1] in _VAGUE or not _is_known(parts)):
        return None
    return _suggestion(parts, parsed, raw=value, section=None, joint="=").removeprefix("; ")


def _suggestion(parts: tuple[str, ...], value: Plain, *, raw: str | None, section: str | None, joint: str) -> str:
    """What an unknown key means here: from the table of other tools, from its name elsewhere, or from a similar
    spelling."""
    key, is_own = parts[-1], section is not None and ".".join(parts[:-1]) == section
    row, at = other_tools.known(parts), homes(key)
    if row is not None and not (at and row.only_words):  # our own key of that name is a better answer than words
        return f"; {_words(other_tools.answer(row, value), value, raw=raw, joint=joint)}"
    if section and not is_own and f"{section}.{key}" in at:
        at = [f"{section}.{key}"]
    if ".".join(parts) in leaves():
        at = [".".join(parts)]
    if at and (is_own or len(at) == 1 or key not in _VAGUE):
        shown = f"{joint}{_written(value, raw)}" if len(at) == 1 and at[0] in leaves() and accepts(at[0], value) else ""
        return f"; it belongs at {' or '.join(at[:3])}{shown}"
    here = list(sections()[section].model_fields) if section is not None else []
    near = nearest(key, here)
    if near:
        return f"; did you mean {f'{section}.' if section else ''}{near}?"
    elsewhere = {path.rpartition(".")[2] for path in [*leaves(), *sections()]} - _VAGUE - {""}
    near = None if key in _VAGUE else nearest(key, sorted(elsewhere), other_tools.table().plain_keys)
    if near and difflib.SequenceMatcher(None, key, near).ratio() >= _ALIKE:
        if places := homes(near):
            return f"; did you mean {' or '.join(places[:3])}?"
        answer = other_tools.answer(other_tools.table().rows[near], value)
        return f"; did you mean {near} ({_words(answer, value, raw=raw, joint=joint)})?"
    return f"; {section or 'the root'} takes {', '.join(here or sections()[''].model_fields)}"


def _words(answer: other_tools.Answer, value: Plain, *, raw: str | None, joint: str) -> str:
    """An answer of the table in words: `here it is train.bf16: true`."""
    settings = []
    for path, ours in answer.settings:
        is_same = ours is value or (ours == value and type(ours) is type(value))
        default = ", the default" if leaves()[path].default == ours else ""
        settings.append(f"{path}{joint}{_written(ours, raw if is_same else None)}{default}")
    words = answer.words.replace("{value}", show(value, raw=raw).strip('"'))
    if not settings:
        return words
    return f"here it is {' and '.join(settings)}{f' ({words})' if words else ''}"


def _written(value: Plain, raw: str | None) -> str:
    """A value in the form that YAML and `SET=` read."""
    if isinstance(value, str):
        plain = re.fullmatch(r"[\w./~@+-][\w./~@:+-]*", value) and parse_value(value, name="") == value
        return value if plain else show(value)
    return show(value, raw=raw) if raw else yaml_value(value)


def _leaf_problems(error: ValidationError, document: Document, blocked: set[Path_]) -> Iterator[Problem]:
    seen = set()
    for item in error.errors(include_url=False):
        if item["type"] == "default_factory_not_called":  # another key is wrong, and this default depends on it
            continue
        location = [str(part) for part in item["loc"]]
        name = _leaf_of(location)
        path: Path_ = tuple(name.split("."))
        if name in listed() and len(location) > len(path):
            path = _within_list(name, item["loc"])
            name = dotted(path)
        if name in seen or any(path[: len(stop)] == stop for stop in blocked):
            continue
        seen.add(name)
        if dotted(path) != ".".join(map(str, path)):
            yield Problem(name, place(document, path), _item_message(document, path, item["type"]))
            continue
        message = f"missing; a run YAML needs {name}.name" if name == "model" else "missing"
        if name in leaves():
            leaf, value = leaves()[name], _at(document.data, path)
            message = _expected(leaf, value, document.raw.get(path), habit=_habit(name, value))
            message = f"missing; {leaf.doc}" if item["type"] == "missing" else message
        yield Problem(name, place(document, path), message)


def _within_list(name: str, location: Sequence[str | int]) -> Path_:
    """The part of pydantic's location that names a section in a list, or a key of that section."""
    holder = tuple(name.split("."))
    key = location[len(holder) + 1 : len(holder) + 2]
    return (*holder, int(location[len(holder)]), *map(str, key))


def _item_message(document: Document, path: Path_, kind: str) -> str:
    """What is wrong with a section in a list, or with one of its keys."""
    at = next(index for index, part in enumerate(path) if isinstance(part, int))
    holder, key = ".".join(map(str, path[:at])), path[at + 1 :]
    fields = listed()[holder].model_fields
    value = _at(document.data, path)
    raw = document.raw.get(path)
    if not key:
        first = next(iter(fields))
        return f"expected a section, found {show(value, raw=raw)}; write {{{first}: {show(value, raw=raw)}, …}}"
    if key[0] not in fields:
        near = nearest(str(key[0]), list(fields))
        hint = f"did you mean {near}?" if near else f"{holder}[] takes {', '.join(fields)}"
        return f"unknown key (value {show(value, raw=raw)}); {hint}"
    leaf = item_leaf(holder, str(key[0]))
    return f"missing; {leaf.doc}" if kind == "missing" else _expected(leaf, value, raw)


def _leaf_of(location: list[str]) -> str:
    """The longest prefix of pydantic's location that is a leaf (the rest names union members)."""
    for length in range(len(location), 0, -1):
        name = ".".join(location[:length])
        if name in leaves() or name in sections():
            return name
    return ".".join(location)


def _expected(leaf: Leaf, value: Plain, raw: str | None, *, habit: str = "") -> str:
    """The value that a leaf expects, and the one that was found."""
    hint = _hint(value, raw, leaf.expects) or habit
    return f"expected {leaf.expects}, found {show(value, raw=raw if not isinstance(value, str) else None)}{hint}"


def _habit(name: str, value: Plain) -> str:
    """What another tool's value means, where the key has our name and place."""
    row = other_tools.table().rows.get(name.rpartition(".")[2])
    if row is None or row.path != name or value is None:
        return ""
    answer = other_tools.answer(row, value)
    is_answer = answer.settings or other_tools.spelled(value) in row.values
    text = _words(answer, value, raw=None, joint=": ").replace("here it is", "write", 1)
    return f"; {text}" if is_answer else ""


def _hint(value: Plain, raw: str | None, expected: str) -> str:
    if isinstance(value, str):
        word = value.lower()
        if "true or false" in expected and word in ("yes", "on", "y", "no", "off", "n"):
            return f"; write {'true' if word in ('yes', 'on', 'y') else 'false'}"
        if expected.startswith("a list of") and value in expected:
            return f"; write [{value}]"
        if "number" in expected and value.lstrip("+-").isdigit() and value.lstrip("+-").startswith("0"):
            return "; a number has no leading zero"
        if "number" in expected and value.replace("_", "").replace(",", "").isdigit():
            return "; write the number without separators"
        cutoff = 0.6 if len(value) > 3 else 0.7  # `gpu` is not a misspelt `cpu`
        near = difflib.get_close_matches(value, expected.replace(",", " ").split(), n=1, cutoff=cutoff)
        return f"; did you mean {near[0]}?" if near else ""
    if isinstance(value, (bool, int, float)) and "text" in expected and "list" not in expected:
        return f'; put it in quotes: "{raw if raw is not None else value}"'
    if value is None and "null" not in expected:
        return "; give a value or remove the key"
    return ""


def cross_problems(config: RunConfig, document: Document) -> list[Problem]:
    """Values that are valid alone but not together; each problem names the keys that disagree."""
    train, problems = config.train, []

    def add(name: str | Path_, message: str) -> None:
        path: Path_ = tuple(name.split(".")) if isinstance(name, str) else name
        problems.append(Problem(dotted(path), place(document, path), message))

    if train.fp16 and train.bf16 is True:
        add("train.fp16", "true, and train.bf16 is true as well; choose one")
    if config.task_mode == "cpt_mixed" and config.data.text_path is None:
        add("task_mode", "cpt_mixed needs data.text_path (plain text) as well as data.train_path (chats)")
    if config.task_mode != "cpt_mixed" and config.data.text_path is not None:
        add("data.text_path", f"is read only with task_mode: cpt_mixed, and task_mode is {config.task_mode}")
    for path, message in _source_problems(config):
        add(path, message)
    if train.load_best_model_at_end and config.eval.steps == 0:
        add("train.load_best_model_at_end", "true, but eval.steps=0 never evaluates; set eval.steps")
    if train.early_stopping_patience is not None and not train.load_best_model_at_end:
        add("train.early_stopping_patience", "needs train.load_best_model_at_end: true")
    if train.metric_for_best_model == "exact_match" and config.eval.generate_rows == 0:
        add("train.metric_for_best_model", "exact_match needs eval.generate_rows above 0")
    if train.optim == "adafactor" and train.adam_beta2 != type(train).model_fields["adam_beta2"].default:
        add("train.adam_beta2", f"{train.adam_beta2:g} is AdamW's, and train.optim is adafactor; remove one of them")
    if config.tuning.backend_fallback == config.tuning.backend:
        add("tuning.backend_fallback", f"is the backend itself ({config.tuning.backend}); remove it")
    return problems


def _source_problems(config: RunConfig) -> Iterator[tuple[Path_, str]]:
    """Problems of data.sources as a whole."""
    data, here = config.data, ("data", "sources")
    if not data.sources:
        if data.train_path is None:
            yield ("data", "train_path"), "null, and data.sources is empty; give one of them"
        return
    if data.train_path is not None:
        yield (
            ("data", "train_path"),
            "given together with data.sources; remove it (SET: data.train_path=null), or add it to them",
        )
    if config.task_mode == "cpt_mixed":
        ours = "data.train_path and data.text_path by data.text_fraction"
        yield here, f"task_mode cpt_mixed mixes {ours}; use task_mode sft or cpt with sources"
    without = [source for source in data.sources if source.weight is None]
    if without and len(without) < len(data.sources):
        at = data.sources.index(without[0])
        yield (*here, at), "has no weight, and other sources have one; give every source a weight, or none"
    if data.val_path is not None and any(source.val_path for source in data.sources):
        yield ("data", "val_path"), "given together with a source's val_path; keep one of them"
    first_of: dict[str, int] = {}
    for at, source in enumerate(data.sources):
        same = first_of.setdefault(f"path {source.path.rstrip('/')}", at)
        if same != at:
            yield (*here, at, "path"), f"is data.sources[{same}] already; give one of them the weight of both"
    for at, name in enumerate(data.source_names):
        if name.startswith("rank_"):
            yield (*here, at), f"is named {name}, but loss_{name} is a rank's loss; give it another name"
        same = first_of.setdefault(f"name {name}", at)
        if same != at and data.sources[at].path != data.sources[same].path:
            key = ("name",) if data.sources[at].name else ()
            yield (*here, at, *key), f"is named {name}, as data.sources[{same}] is; give it another name"


def resolved(config: RunConfig, *, effective_batch: int | None = None) -> dict[str, Any]:
    """The config as plain data, defaults included: what `resolved.json` holds.

    Args:
        effective_batch: the plan's. Where the config derives it from the ranks, the file has this number in place of
            the default, so that it trains the same over any number of ranks, or is refused.
    """
    data = config.model_dump(mode="json")
    if config.train.effective_follows:
        data["train"]["effective_batch_size"] = effective_batch
    return data


def resolved_without_paths(config: RunConfig) -> dict[str, Any]:
    """`resolved` without paths: nodes may keep the same files in different folders."""
    settings = resolved(config)
    kept = {key: value for key, value in settings.items() if key != "output"}
    kept["model"] = {key: value for key, value in kept["model"].items() if key not in ("name", "adapter")}
    kept["data"] = _data_without_paths(kept["data"])
    kept["curriculum"] = [{**stage, "data": _data_without_paths(stage["data"])} for stage in kept["curriculum"]]
    return kept


def _data_without_paths(data: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in data.items() if not key.endswith("_path")}
    sources = [
        {key: value for key, value in one.items() if not key.endswith("path")} for one in data.get("sources", ())
    ]
    return {**kept, "sources": sources}


def differing_keys(one: dict[str, Any], other: dict[str, Any], *, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Leaves that differ between two resolved configs: {path: (one's value, other's value)}."""
    differing: dict[str, tuple[Any, Any]] = {}
    for key in [*one, *(key for key in other if key not in one)]:
        left, right = one.get(key), other.get(key)
        path = f"{prefix}{key}"
        if isinstance(left, dict) and isinstance(right, dict) and path in sections():
            differing |= differing_keys(left, right, prefix=f"{path}.")
        elif left != right:
            differing[path] = (left, right)
    return differing
