"""A document → `RunConfig`; pydantic's errors as problems with a line, the expected value and the one found.

`cross_problems` has what pydantic does not look for: values that contradict each other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from pydantic import ValidationError

from sft_play.config import other_tools
from sft_play.config.options import item_leaf, leaves, listed, sections, training_options
from sft_play.config.schema import RunConfig
from sft_play.config.unknown_keys import Foreign, answer_words, foreign_keys, together, unknown_problem
from sft_play.config.yaml_io import (
    OVERRIDE,
    TYPOGRAPHIC,
    Path_,
    Plain,
    Problem,
    YamlDocument,
    dotted,
    show,
    value_at,
    walk,
)
from sft_play.spelling import TYPO_SIMILARITY, did_you_mean

# Rates above it are slips, such as 2e4 for 2e-4: published ones end at 1e-2.
MOST_LEARNING_RATE = 1.0
_SURROGATE = re.compile("[\ud800-\udfff]")


def validate(document: YamlDocument) -> tuple[RunConfig | None, list[Problem]]:
    """The run that a document's data describes, None where pydantic refuses it, and every problem with its keys and
    values. The config is usable only where there is no problem."""
    unknown, misplaced = dict(unknown_keys(document)), _misplaced(document)
    blocked = {*unknown, *misplaced}
    foreign = together([key for keys in unknown.values() for key in keys])
    problems = [*(unknown_problem(document, key) for key in foreign), *misplaced.values()]
    broken = [path for path, value in walk(document.data) if isinstance(value, str) and _SURROGATE.search(value)]
    problems += [document.problem(path, "the text has half of a surrogate pair") for path in broken]
    quoted = "is in typographic quotes, which YAML takes for letters of the text; write \" or '"
    texts = [(path, value) for path, value in walk(document.data) if isinstance(value, str) and len(value) > 1]
    problems += [document.problem(path, quoted) for path, value in texts if {value[0], value[-1]} <= {*TYPOGRAPHIC}]
    if broken:
        return None, problems
    # Without the keys that are reported already, pydantic finds what else is wrong: all problems are shown at once.
    pruned = _without(document.data, blocked)
    assert isinstance(pruned, dict)
    try:
        # From JSON, because strict models refuse a list for a tuple in Python's data but take a JSON array for one.
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


def _misplaced(document: YamlDocument) -> dict[Path_, Problem]:
    problems = {}
    for name, section in sections().items():
        if not name:
            continue
        path: Path_ = tuple(name.split("."))
        value = value_at(document.data, path)
        if value is None or isinstance(value, dict):
            continue
        first = next(iter(section.model_fields))
        shown = show(value, raw=document.raw.get(path))
        problems[path] = Problem(
            name,
            document.where(path),
            f"expected a section, found {shown}; write {name}: {{{first}: {shown if first == 'name' else '…'}}} "
            f"(its keys: {', '.join(section.model_fields)}){_in_other_tools(document, path, value)}",
        )
    return problems


def _in_other_tools(document: YamlDocument, path: Path_, value: Plain) -> str:
    """What a value means where other tools use a section's name for a plain key (`mixed_precision: bf16`)."""
    row = other_tools.table().rows.get(str(path[-1]))
    answer = other_tools.answer(row, value) if row else other_tools.Meaning()
    joint = "=" if document.where(path) == OVERRIDE else ": "
    return f"; as other tools mean it, {answer_words(answer, value, raw=None, joint=joint)}" if answer.settings else ""


def unknown_keys(document: YamlDocument) -> Iterator[tuple[Path_, list[Foreign]]]:
    """Each key that our sections do not have, with itself, or with every key in it where it is a foreign section."""
    for name, section in sections().items():
        own: Path_ = tuple(name.split(".")) if name else ()
        holder = value_at(document.data, own)
        if not isinstance(holder, dict):
            continue
        for key in holder:
            if key not in section.model_fields:
                path: Path_ = (*own, key)
                yield path, list(foreign_keys(document, path, holder[key], section=name))


def _leaf_problems(error: ValidationError, document: YamlDocument, blocked: set[Path_]) -> Iterator[Problem]:
    seen = set()  # a union reports one error for each of its members; the key is reported once
    for item in error.errors(include_url=False):
        if item["type"] == "default_factory_not_called":  # another key is wrong, and this default depends on it
            continue
        path = _path_of(item["loc"])
        if path not in seen and not any(path[: len(stop)] == stop for stop in blocked):
            seen.add(path)
            yield document.problem(path, _what_is_wrong(document, path, item["type"]))


def _path_of(location: Sequence[str | int]) -> Path_:
    """The part of pydantic's location that is a key or a section of ours: unions name their members beyond it."""
    for length in range(len(location), 0, -1):
        name = ".".join(map(str, location[:length]))
        if name in listed() and len(location) > length:
            return (*name.split("."), int(location[length]), *map(str, location[length + 1 : length + 2]))
        if name in leaves() or name in sections():
            return tuple(name.split("."))
    return tuple(map(str, location))


def _what_is_wrong(document: YamlDocument, path: Path_, kind: str) -> str:
    value, raw, name, habit = value_at(document.data, path), document.raw.get(path), ".".join(map(str, path)), ""
    at = next((index for index, part in enumerate(path) if isinstance(part, int)), None)
    if at is not None:  # a section in a list, or one of its keys
        holder, key = ".".join(map(str, path[:at])), path[at + 1 :]
        fields = listed()[holder].model_fields
        if not key:
            first = next(iter(fields))
            return f"expected a section, found {show(value, raw=raw)}; write {{{first}: {show(value, raw=raw)}, …}}"
        if key[0] not in fields:
            hint = did_you_mean(str(key[0]), fields) or f"{holder}[] takes {', '.join(fields)}"
            return f"unknown key (value {show(value, raw=raw)}); {hint}"
        leaf = item_leaf(holder, str(key[0]))
    elif name in leaves():
        leaf, habit = leaves()[name], _habit(name, value)
    else:
        return f"missing; a run YAML needs {name}.name" if name == "model" else "missing"
    if kind == "missing":
        return f"missing; {leaf.doc}"
    hint = hint_at(value, raw, leaf.expects, guesses=not habit) or habit  # another tool's word is no slip of ours
    return f"expected {leaf.expects}, found {show(value, raw=raw if not isinstance(value, str) else None)}{hint}"


def _habit(name: str, value: Plain) -> str:
    """What another tool's value means, where the key has our name and place."""
    row = other_tools.table().rows.get(name.rpartition(".")[2])
    if row is None or row.path != name or value is None:
        return ""
    answer = other_tools.answer(row, value)
    is_answer = answer.settings or other_tools.spelled(value) in row.values
    text = answer_words(answer, value, raw=None, joint=": ").replace("here it is", "write", 1)
    return f"; {text}" if is_answer else ""


def hint_at(value: Plain, raw: str | None, expected: str, *, guesses: bool = True) -> str:
    """What may have been meant by a value where another kind was expected, by its spelling too if it `guesses`."""
    if isinstance(value, str):
        word = value.lower()
        if "true or false" in expected and word in ("yes", "on", "y", "no", "off", "n"):
            return f"; write {'true' if word in ('yes', 'on', 'y') else 'false'}"
        if expected.startswith("a list of") and value in expected:
            return f"; write [{value}]"
        if "number" in expected and value.lstrip("+-").replace("_", "").replace(",", "").isdigit():
            return "; write the number without separators and leading zeros"
        alike = 0.6 if len(value) > 3 else TYPO_SIMILARITY  # `gpu` is not a misspelt `cpu`
        near = did_you_mean(value, expected.replace(",", " ").split(), min_similarity=alike) if guesses else ""
        return f"; {near}" if near else ""
    if isinstance(value, (bool, int, float)) and "text" in expected and "list" not in expected:
        return f'; put it in quotes: "{raw if raw is not None else value}"'
    if value is None and "null" not in expected:
        return "; give a value or remove the key"
    return ""


# --- values that are valid alone, but not together --------------------------------------------------------------------


def cross_problems(config: RunConfig, document: YamlDocument) -> list[Problem]:
    """Values that are valid alone but not together; each problem names the keys that disagree."""
    train, problems = config.train, []

    def add(name: str | Path_, message: str) -> None:
        path: Path_ = tuple(name.split(".")) if isinstance(name, str) else name
        problems.append(document.problem(path, message))

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
    if config.learning_rate > MOST_LEARNING_RATE:
        mantissa, _, power = f"{config.learning_rate:e}".partition("e+")
        meant = f"{float(mantissa):g}e-{int(power) or 4}"
        too_high = f"{config.learning_rate:,g} is above {MOST_LEARNING_RATE:g}, where nothing learns"
        add("train.learning_rate", f"{too_high}; did you mean {meant}?")
    for option in training_options():
        value = option.value(config)
        if not option.is_read_by(train.optim) and value != option.default:
            add(option.key, f"{value} is AdamW's, and train.optim is {train.optim}; remove one of them")
    if train.optim == "muon" and config.tuning.mode != "full":
        add(
            "train.optim",
            f"muon steps whole weight matrices, and tuning.mode is {config.tuning.mode}; use full or AdamW",
        )
    lora = config.tuning.lora
    for name, value in (("dropout", lora.dropout), ("use_dora", lora.use_dora)):
        if lora.adapted_parameters and value:
            key = "experts" if lora.experts else "target_parameters"
            add(f"tuning.lora.{name}", f"{value}, and adapters on experts have none; remove it or {key}")
    if lora.experts and lora.target_parameters not in ((), "auto"):
        add("tuning.lora.experts", "true adapts all weights of experts, and target_parameters names some; remove one")
    if config.tuning.quantize_experts is True and config.tuning.mode != "qlora":
        add("tuning.quantize_experts", f"true, and tuning.mode is {config.tuning.mode}; use qlora, or remove it")
    if config.tuning.mode != "full":
        for name, message in _start_problems(config):
            add(name, message)
    if config.tuning.backend_fallback == config.tuning.backend:
        add("tuning.backend_fallback", f"is the backend itself ({config.tuning.backend}); remove it")
    return problems


def _start_problems(config: RunConfig) -> Iterator[tuple[str, str]]:
    lora = config.tuning.lora
    key, start = "tuning.lora.init", lora.init
    if start == "default":
        return
    if config.model.adapter is not None:
        yield key, f"{start}, and model.adapter continues one that has started; remove one of them"
    if lora.adapted_parameters:
        name = "experts" if lora.experts else "target_parameters"
        yield key, f"{start} is for linear layers, and tuning.lora.{name} adapts experts; remove one of them"
    if start == "loftq":
        if config.tuning.mode != "qlora":
            yield key, f"loftq starts at what NF4 lost, and tuning.mode is {config.tuning.mode}; use qlora, or pissa"
        if lora.use_dora:
            yield key, "loftq changes what DoRA's magnitudes were taken from; remove tuning.lora.use_dora"
    elif lora.use_rslora:
        yield "tuning.lora.use_rslora", "pissa divides its start by the scale; set tuning.lora.alpha instead"


def _source_problems(config: RunConfig) -> Iterator[tuple[Path_, str]]:
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
