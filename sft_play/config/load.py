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
"""Names that mean another thing in every section: in a foreign one they are not followed elsewhere."""
_ALIKE = 0.87
"""How alike names are to be where nothing else connects them: `loss_fn` (0.86) is no misspelt `loss_on`."""
OVERRIDE = "SET"
"""What an override is called where a message says where a value stands."""


@dataclass(frozen=True)
class LoadedConfig:
    """A valid config with the text it came from: `text` as given, `overrides` as `key=value` words."""

    config: RunConfig
    path: Path
    text: str
    overrides: tuple[str, ...]
    stages: tuple[Stage, ...] = ()
    """The stages of its curriculum; none without one."""
    stage: str | None = None
    """The name of the stage that this is the run of."""

    @property
    def longest(self) -> RunConfig:
        """The settings of the stage with the longest rows, or of the run where it has no stages."""
        configs = [stage.config for stage in self.stages] or [self.config]
        return max(configs, key=lambda config: config.model.max_seq_len)

    def of(self, stage: Stage) -> LoadedConfig:
        """The run of one stage alone."""
        return dataclasses.replace(self, config=stage.config, stages=(), stage=stage.name)


def load_config(path: Path | str, *, overrides: Sequence[str] = ()) -> LoadedConfig:
    """The run that a YAML file and `key=value` overrides ask for.

    Raises:
        ConfigError: with every problem, each with its place, path, value, and what to do.
    """
    path = Path(path)
    text = read_text(path)
    config, stages = _from_text(text, name=str(path), overrides=overrides)
    return LoadedConfig(config=config, path=path, text=text, overrides=tuple(overrides), stages=stages)


def config_from_text(text: str, *, name: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that a YAML text and overrides ask for; raises like `load_config`."""
    return _from_text(text, name=name, overrides=overrides)[0]


def _from_text(text: str, *, name: str, overrides: Sequence[str]) -> tuple[RunConfig, tuple[Stage, ...]]:
    """The run, and the stages of its curriculum."""
    document = parse(text, name=name)
    problems = [*document.problems, *apply_overrides(document, overrides)]
    config, found = _validate(document)
    problems += found
    stages: tuple[Stage, ...] = ()
    if config is not None and not problems and config.curriculum:
        stages, found = _stages(config, document)
        problems += found
    elif config is not None and not problems:
        problems += cross_problems(config, document)
    if problems or config is None:
        raise ConfigError(_report(sorted(problems, key=_line_of)))
    return config, stages


def _stages(config: RunConfig, document: Document) -> tuple[tuple[Stage, ...], list[Problem]]:
    """The stages of a curriculum, each validated as a run of its own, or what is wrong with them."""
    made: list[Stage] = []
    found = list(overlays(document))
    problems = [*(problem for stage in found for problem in stage.problems), *set_in_vain(document, found)]
    names = Counter(stage.name.lower() for stage in found)

    def add(path: Path_, message: str) -> None:
        problems.append(Problem(dotted(path), place(document, path), message))

    for overlay in found:
        at: Path_ = ("curriculum", overlay.number - 1)
        own, wrong = _validate(overlay.document)
        wrong += cross_problems(own, overlay.document) if own is not None and not wrong else []
        problems += map(overlay.at, wrong)
        if names[overlay.name.lower()] > 1:
            add((*at, "name"), f"{overlay.name} is the name of {names[overlay.name.lower()]} stages")
        if own is None:
            continue
        before = made[-1] if made and made[-1].number == overlay.number - 1 else None
        if before is not None and what_trains(own) == what_trains(before.config):
            add(at, f"changes nothing: stage {overlay.name} has the data and settings of {before.name} before it; "
                    "give it something of its own, or give that stage more epochs")  # fmt: skip
        made.append(Stage(overlay.name, overlay.number, own))
    return tuple(made), problems


def _line_of(problem: Problem) -> int:
    line = problem.where.rpartition(":")[2]
    return int(line) if line.isdigit() else 1_000_000


def _report(problems: list[Problem]) -> str:
    lines = list(dict.fromkeys(map(str, problems)))
    return lines[0] if len(lines) == 1 else f"{len(lines)} problems:\n" + "\n".join(f"  {line}" for line in lines)


def split_overrides(text: str) -> list[str]:
    """`SET` split as a shell would split words, without running anything.

    A bracket that a word opens holds the following words too, so that a list whose quotes were eaten
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
        if joined and _open_brackets(joined[-1]) > 0:
            joined[-1] += f" {word}"
        else:
            joined.append(word)
    return joined


def _open_brackets(word: str) -> int:
    value = word.partition("=")[2]
    if not value.startswith(("[", "{")):
        return 0
    return sum(value.count(mark) for mark in "[{") - sum(value.count(mark) for mark in "]}")


def apply_overrides(document: Document, overrides: Iterable[str]) -> list[Problem]:
    """Put each `a.b=value` into the document's data; what cannot be put is returned as problems."""
    problems = []
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not key:
            found = show(override)
            problems.append(Problem("", OVERRIDE, f"{found} is not key=value, such as train.epochs=1"))
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
    where: dict[str, Plain] = document.data
    for depth, part in enumerate(path[:-1], start=1):
        inner = where.setdefault(part, {})
        if inner is None:
            inner = where[part] = {}
        if not isinstance(inner, dict):
            holder = ".".join(path[:depth])
            return [Problem(".".join(path), OVERRIDE, f"{holder} is {show(inner)}, not a section")]
        where = inner
    where[path[-1]] = value
    for old in [known for known in document.lines if known[: len(path)] == path]:
        del document.lines[old]
    for old in [known for known in document.raw if known[: len(path)] == path]:
        del document.raw[old]
    document.raw[path] = text
    document.overridden.add(path)
    return []


def _put_in_stage(document: Document, path: tuple[str, ...], value: Plain, text: str) -> list[Problem]:
    """Put `curriculum.0.train.epochs=1`: a key of a stage, which are counted from 0."""
    stages, at, keys = document.data.get("curriculum"), int(path[1]), path[2:]
    if not isinstance(stages, list) or at >= len(stages) or not isinstance(stages[at], dict) or len(keys) > 2:
        count = len(stages) if isinstance(stages, list) else 0
        what = "names a key of a key" if len(keys) > 2 else f"there are {count} stages, counted from 0"
        return [Problem(".".join(path), OVERRIDE, f"{what}: curriculum.0.train.epochs=1 sets a key of the first")]
    where = stages[at]
    assert isinstance(where, dict)
    if len(keys) == 2:
        inner = where.get(keys[0])
        where[keys[0]] = {**(inner if isinstance(inner, dict) else {}), keys[1]: value}
    else:
        where[keys[0]] = value
    full: Path_ = ("curriculum", at, *keys)
    document.lines.pop(full, None)
    document.raw[full] = text
    document.overridden.add(full)
    return []


def _validate(document: Document) -> tuple[RunConfig | None, list[Problem]]:
    unknown = list(_unknown_keys(document))
    blocked = {path for path, _ in unknown} | set(_misplaced(document))
    problems = [problem for _, found in unknown for problem in found] + list(_misplaced(document).values())
    broken = [path for path, value in walk(document.data) if isinstance(value, str) and _SURROGATE.search(value)]
    problems += [
        Problem(dotted(path), place(document, path), "half of a surrogate pair in the text") for path in broken
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
    """The data without what was already reported, and without sections left empty by `key:`."""
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
    found = {}
    for name, section in sections().items():
        if not name:
            continue
        path: Path_ = tuple(name.split("."))
        value = _at(document.data, path)
        if value is None or isinstance(value, dict):
            continue
        first = next(iter(section.model_fields))
        shown = show(value, raw=document.raw.get(path))
        found[path] = Problem(
            name,
            place(document, path),
            f"expected a section, found {shown}; write {name}: {{{first}: {shown if first == 'name' else '…'}}} "
            f"(its keys: {', '.join(section.model_fields)}){_meant_elsewhere(document, path, value)}",
        )
    return found


def _meant_elsewhere(document: Document, path: Path_, value: Plain) -> str:
    """What a value means that other tools give to a key of a section's name (`mixed_precision: bf16`)."""
    row = other_tools.KNOWN.get(str(path[-1]))
    answer = other_tools.answer(row, value) if row else other_tools.Answer()
    joint = "=" if place(document, path) == OVERRIDE else ": "
    return f"; as other tools mean it, {_said(answer, value, raw=None, joint=joint)}" if answer.settings else ""


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
    """Each key that no section of ours has, with its problems: one, or those of every key in a foreign section."""
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
    """The problems of an unknown key: of every key in it where it is a section that the table does not answer whole.

    `section` is ours that holds it, or that a section of another tool is about; None where that is not known.
    """
    key = str(path[-1])
    if not isinstance(value, dict) or not value or _is_answered_whole(path):
        yield _unknown(document, path, value, section=section)
        return
    about = other_tools.SECTIONS.get(key.lower())
    meant = None if about is not None else nearest(key, [name for name in sections() if name])
    fields = sections()[about or meant or ""].model_fields if about or meant else {}
    answered = [inner for inner in value if about is not None or (inner not in fields and _is_known((*path, inner)))]
    if about is None and (section is not None or not answered):
        yield _unknown(document, path, value, section=section)
    for inner in value:
        if inner in answered or (meant is not None and inner not in fields):
            yield from _foreign(document, (*path, inner), value[inner], section=about or meant)


def _is_answered_whole(path: Path_) -> bool:
    """Whether a section of another tool has one answer, whatever stands in it."""
    row = other_tools.known(tuple(map(str, path)))
    return row is not None and not row.path and str(path[-1]).lower() not in other_tools.SECTIONS


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
    """What a flag of another tool (`--mixed_precision`) with its value means here; None where nobody knows."""
    parts = tuple(flag.lstrip("-").replace("-", "_").split("."))
    try:
        read = True if value is None else parse_value(value, name=flag)
    except ConfigError:
        read = value
    if ".".join(parts) not in leaves() and (parts[-1] in _VAGUE or not _is_known(parts)):
        return None
    return _suggestion(parts, read, raw=value, section=None, joint="=").removeprefix("; ")


def _suggestion(parts: tuple[str, ...], value: Plain, *, raw: str | None, section: str | None, joint: str) -> str:
    """What an unknown key means here: by the table of other tools, by its name elsewhere, or by a near spelling."""
    key, is_own = parts[-1], section is not None and ".".join(parts[:-1]) == section
    row, at = other_tools.known(parts), homes(key)
    if row is not None and not (at and row.only_words):  # a key of that name that we have says more than words
        return f"; {_said(other_tools.answer(row, value), value, raw=raw, joint=joint)}"
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
    near = None if key in _VAGUE else nearest(key, sorted(elsewhere), other_tools.PLAIN)
    if near and difflib.SequenceMatcher(None, key, near).ratio() >= _ALIKE:
        found = homes(near)
        return f"; did you mean {' or '.join(found[:3]) if found else _respelt(near, value, raw, joint)}?"
    return f"; {section or 'the root'} takes {', '.join(here or sections()[''].model_fields)}"


def _respelt(key: str, value: Plain, raw: str | None, joint: str) -> str:
    return f"{key} ({_said(other_tools.answer(other_tools.KNOWN[key], value), value, raw=raw, joint=joint)})"


def _said(answer: other_tools.Answer, value: Plain, *, raw: str | None, joint: str) -> str:
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
    """A value as YAML and `SET=` read it."""
    if isinstance(value, str):
        plain = re.fullmatch(r"[\w./~@+-][\w./~@:+-]*", value) and parse_value(value, name="") == value
        return value if plain else show(value)
    return show(value, raw=raw) if raw else yaml_value(value)


def _leaf_problems(error: ValidationError, document: Document, blocked: set[Path_]) -> Iterator[Problem]:
    seen = set()
    for item in error.errors(include_url=False):
        if item["type"] == "default_factory_not_called":  # another key is wrong, from which this default follows
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
        yield Problem(name, place(document, path), _leaf_message(name, document, path, item["type"] == "missing"))


def _within_list(name: str, location: Sequence[str | int]) -> Path_:
    """The part of pydantic's location that names a section in a list, or a key of it."""
    holder = tuple(name.split("."))
    key = location[len(holder) + 1 : len(holder) + 2]
    return (*holder, int(location[len(holder)]), *map(str, key))


def _item_message(document: Document, path: Path_, kind: str) -> str:
    """What is wrong with a section in a list, or with a key of it."""
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
    """The longest part of pydantic's location that is a leaf (it goes on with the names of union members)."""
    for length in range(len(location), 0, -1):
        name = ".".join(location[:length])
        if name in leaves() or name in sections():
            return name
    return ".".join(location)


def _leaf_message(name: str, document: Document, path: Path_, missing: bool) -> str:
    if name not in leaves():
        return f"missing; a run YAML needs {name}.name" if name == "model" else "missing"
    leaf = leaves()[name]
    if missing:
        return f"missing; {leaf.doc}"
    value = _at(document.data, path)
    return _expected(leaf, value, document.raw.get(path), habit=_habit(name, value))


def _expected(leaf: Leaf, value: Plain, raw: str | None, *, habit: str = "") -> str:
    """What a leaf must be, and what it is."""
    hint = _hint(value, raw, leaf.expects) or habit
    return f"expected {leaf.expects}, found {show(value, raw=raw if not isinstance(value, str) else None)}{hint}"


def _habit(name: str, value: Plain) -> str:
    """What a value of another tool means, where the key is named and placed as ours."""
    row = other_tools.KNOWN.get(name.rpartition(".")[2])
    if row is None or row.path != name or value is None:
        return ""
    found = other_tools.answer(row, value)
    is_answer = found.settings or other_tools.spelled(value) in row.values
    said = _said(found, value, raw=None, joint=": ").replace("here it is", "write", 1)
    return f"; {said}" if is_answer else ""


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
        cutoff = 0.6 if len(value) > 3 else 0.7  # gpu is no slip of the pen for cpu
        near = difflib.get_close_matches(value, expected.replace(",", " ").split(), n=1, cutoff=cutoff)
        return f"; did you mean {near[0]}?" if near else ""
    if isinstance(value, (bool, int, float)) and "text" in expected and "list" not in expected:
        return f'; put it in quotes: "{raw if raw is not None else value}"'
    if value is None and "null" not in expected:
        return "; give a value or remove the key"
    return ""


def cross_problems(config: RunConfig, document: Document) -> list[Problem]:
    """What is right key by key but not together; each names the keys that disagree."""
    train, found = config.train, []

    def add(name: str | Path_, message: str) -> None:
        path: Path_ = tuple(name.split(".")) if isinstance(name, str) else name
        found.append(Problem(dotted(path), place(document, path), message))

    if train.fp16 and train.bf16 is True:
        add("train.fp16", "true, and train.bf16 is true as well; choose one")
    if config.task_mode == "cpt_mixed" and config.data.text_path is None:
        add("task_mode", "cpt_mixed needs data.text_path (plain text) beside data.train_path (chats)")
    if config.task_mode != "cpt_mixed" and config.data.text_path is not None:
        add("data.text_path", f"is read by task_mode: cpt_mixed only, and task_mode is {config.task_mode}")
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
    return found


def _source_problems(config: RunConfig) -> Iterator[tuple[Path_, str]]:
    """What is wrong with data.sources as a whole."""
    data, here = config.data, ("data", "sources")
    if not data.sources:
        if data.train_path is None:
            yield ("data", "train_path"), "null, and there are no data.sources; give one of them"
        return
    if data.train_path is not None:
        yield (
            ("data", "train_path"),
            "given beside data.sources; remove it (SET: data.train_path=null), or make it one of them",
        )
    if config.task_mode == "cpt_mixed":
        ours = "data.train_path and data.text_path by data.text_fraction"
        yield here, f"task_mode cpt_mixed mixes {ours}; use task_mode sft or cpt with sources"
    without = [source for source in data.sources if source.weight is None]
    if without and len(without) < len(data.sources):
        at = data.sources.index(without[0])
        yield (*here, at), "has no weight, and other sources have one; give every source a weight, or none"
    if data.val_path is not None and any(source.val_path for source in data.sources):
        yield ("data", "val_path"), "given beside a val_path of a source; keep one of them"
    first_of: dict[str, int] = {}
    for at, source in enumerate(data.sources):
        same = first_of.setdefault(f"path {source.path.rstrip('/')}", at)
        if same != at:
            yield (*here, at, "path"), f"is data.sources[{same}] already; give one of them the weight of both"
    for at, name in enumerate(data.source_names):
        if name.startswith("rank_"):
            yield (*here, at), f"is named {name}, and loss_{name} is the loss of a rank; give it another name"
        same = first_of.setdefault(f"name {name}", at)
        if same != at and data.sources[at].path != data.sources[same].path:
            key = ("name",) if data.sources[at].name else ()
            yield (*here, at, *key), f"is named {name}, as data.sources[{same}] is; give it another name"


def resolved(config: RunConfig, *, effective_batch: int | None = None) -> dict[str, Any]:
    """The config as plain data, defaults included: what `resolved.json` holds.

    Args:
        effective_batch: what the plan made of the batch. Where the config leaves it to the ranks it stands in place of
            a default that nobody asked for, so that the file trains the same over any number of ranks, or is refused.
    """
    data = config.model_dump(mode="json")
    if config.train.effective_follows:
        data["train"]["effective_batch_size"] = effective_batch
    return data


def differing_keys(one: dict[str, Any], other: dict[str, Any], *, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Leaves at which two resolved configs differ: {path: (one's value, other's value)}."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in [*one, *(key for key in other if key not in one)]:
        left, right = one.get(key), other.get(key)
        path = f"{prefix}{key}"
        if isinstance(left, dict) and isinstance(right, dict) and path in sections():
            found |= differing_keys(left, right, prefix=f"{path}.")
        elif left != right:
            found[path] = (left, right)
    return found
