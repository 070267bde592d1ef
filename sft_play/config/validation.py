"""A document → `RunConfig`; pydantic's errors as problems with a line, the expected value and the one found.

`find_conflicts` has what pydantic does not look for: values that contradict each other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from pydantic import ValidationError

from sft_play.config import other_tools
from sft_play.config.options import all_options, list_item_option, list_item_sections, optimizer_options, sections
from sft_play.config.other_tools import (
    ForeignKey,
    find_foreign_keys,
    format_translation,
    merge_keys,
    unknown_key_problem,
)
from sft_play.config.schema import RunConfig
from sft_play.config.yaml_io import (
    OVERRIDE_LOCATION,
    TYPOGRAPHIC_QUOTES,
    JsonValue,
    KeyPath,
    Problem,
    YamlDocument,
    dotted_path,
    find_value,
    format_value,
    walk_leaves,
)
from sft_play.spelling import TYPO_SIMILARITY, did_you_mean

# Rates above it are slips, such as 2e4 for 2e-4: published ones end at 1e-2.
MAX_LEARNING_RATE = 1.0
_SURROGATE = re.compile("[\ud800-\udfff]")


def validate(document: YamlDocument) -> tuple[RunConfig | None, list[Problem]]:
    """The run that a document's data describes, None where pydantic refuses it, and every problem with its keys and
    values. The config is usable only where there is no problem."""
    unknown_by_path, misplaced = dict(find_unknown_keys(document)), _misplaced_values(document)
    reported_paths = {*unknown_by_path, *misplaced}
    foreign_keys = merge_keys([key for keys in unknown_by_path.values() for key in keys])
    problems = [*(unknown_key_problem(document, key) for key in foreign_keys), *misplaced.values()]
    broken_paths = [
        path for path, value in walk_leaves(document.data) if isinstance(value, str) and _SURROGATE.search(value)
    ]
    problems += [document.problem(path, "the text has half of a surrogate pair") for path in broken_paths]
    quotes_message = "is in typographic quotes, which YAML takes for letters of the text; write \" or '"
    texts = [(path, value) for path, value in walk_leaves(document.data) if isinstance(value, str) and len(value) > 1]
    problems += [
        document.problem(path, quotes_message)
        for path, value in texts
        if {value[0], value[-1]} <= {*TYPOGRAPHIC_QUOTES}
    ]
    if broken_paths:
        return None, problems
    # Without the keys that are reported already, pydantic finds what else is wrong: all problems are shown at once.
    pruned_data = _drop_reported_keys(document.data, reported_paths)
    assert isinstance(pruned_data, dict)
    try:
        # From JSON, because strict models refuse a list for a tuple in Python's data but take a JSON array for one.
        return RunConfig.model_validate_json(json.dumps(pruned_data)), problems
    except ValidationError as error:
        return None, problems + list(_option_problems(error, document, reported_paths))


def _drop_reported_keys(data: JsonValue, reported_paths: set[KeyPath], path: KeyPath = ()) -> JsonValue:
    """The data without the keys already reported, and without sections left empty by `key:`."""
    if not isinstance(data, dict):
        return data
    result = {}
    for key, value in data.items():
        inner_path = (*path, key)
        if inner_path in reported_paths or (value is None and dotted_path(inner_path) in sections()):
            continue
        result[key] = _drop_reported_keys(value, reported_paths, inner_path)
    return result


def _misplaced_values(document: YamlDocument) -> dict[KeyPath, Problem]:
    problems = {}
    for name, section in sections().items():
        if not name:
            continue
        path: KeyPath = tuple(name.split("."))
        value = find_value(document.data, path)
        if value is None or isinstance(value, dict):
            continue
        first_key = next(iter(section.model_fields))
        display_value = format_value(value, raw_text=document.raw_texts.get(path))
        example = f"{name}: {{{first_key}: {display_value if first_key == 'name' else '…'}}}"
        problems[path] = Problem(
            name,
            document.location(path),
            f"expected a section, found {display_value}; write {example} "
            f"(its keys: {', '.join(section.model_fields)}){_other_tools_hint(document, path, value)}",
        )
    return problems


def _other_tools_hint(document: YamlDocument, path: KeyPath, value: JsonValue) -> str:
    """What a value means where other tools use a section's name for a plain key (`mixed_precision: bf16`)."""
    known_key = other_tools.key_table().known_keys.get(str(path[-1]))
    translation = other_tools.translate_value(known_key, value) if known_key else other_tools.KeyTranslation()
    separator = "=" if document.location(path) == OVERRIDE_LOCATION else ": "
    return (
        f"; as other tools mean it, {format_translation(translation, value, raw_text=None, separator=separator)}"
        if translation.settings
        else ""
    )


def find_unknown_keys(document: YamlDocument) -> Iterator[tuple[KeyPath, list[ForeignKey]]]:
    """Each key that our sections do not have, with itself, or with every key in it where it is a foreign section."""
    for name, section in sections().items():
        section_path: KeyPath = tuple(name.split(".")) if name else ()
        section_values = find_value(document.data, section_path)
        if not isinstance(section_values, dict):
            continue
        for key in section_values:
            if key not in section.model_fields:
                path: KeyPath = (*section_path, key)
                yield path, list(find_foreign_keys(document, path, section_values[key], section=name))


def _option_problems(error: ValidationError, document: YamlDocument, reported_paths: set[KeyPath]) -> Iterator[Problem]:
    reported = set()  # a union reports one error for each of its members; the key is reported once
    for item in error.errors(include_url=False):
        if item["type"] == "default_factory_not_called":  # another key is wrong, and this default depends on it
            continue
        path = _error_path(item["loc"])
        if path not in reported and not any(
            path[: len(blocked_path)] == blocked_path for blocked_path in reported_paths
        ):
            reported.add(path)
            yield document.problem(path, _describe_error(document, path, item["type"]))


def _error_path(location: Sequence[str | int]) -> KeyPath:
    """The part of pydantic's location that is a key or a section of ours: unions name their members beyond it."""
    for length in range(len(location), 0, -1):
        name = ".".join(map(str, location[:length]))
        if name in list_item_sections() and len(location) > length:
            return (*name.split("."), int(location[length]), *map(str, location[length + 1 : length + 2]))
        if name in all_options() or name in sections():
            return tuple(name.split("."))
    return tuple(map(str, location))


def _describe_error(document: YamlDocument, path: KeyPath, error_type: str) -> str:
    value, raw_text, name, other_tool_hint = (
        find_value(document.data, path),
        document.raw_texts.get(path),
        ".".join(map(str, path)),
        "",
    )
    list_index = next((index for index, part in enumerate(path) if isinstance(part, int)), None)
    if list_index is not None:  # a section in a list, or one of its keys
        list_path, key_path = ".".join(map(str, path[:list_index])), path[list_index + 1 :]
        fields = list_item_sections()[list_path].model_fields
        if not key_path:
            first_key = next(iter(fields))
            display_value = format_value(value, raw_text=raw_text)
            return f"expected a section, found {display_value}; write {{{first_key}: {display_value}, …}}"
        if key_path[0] not in fields:
            hint = did_you_mean(str(key_path[0]), fields) or f"{list_path}[] takes {', '.join(fields)}"
            return f"unknown key (value {format_value(value, raw_text=raw_text)}); {hint}"
        option = list_item_option(list_path, str(key_path[0]))
    elif name in all_options():
        option, other_tool_hint = all_options()[name], _other_tool_value_hint(name, value)
    else:
        return f"missing; a run YAML needs {name}.name" if name == "model" else "missing"
    if error_type == "missing":
        return f"missing; {option.doc}"
    # another tool's word is no slip of ours
    hint = value_hint(value, raw_text, option.accepted_values, can_guess=not other_tool_hint) or other_tool_hint
    display_value = format_value(value, raw_text=raw_text if not isinstance(value, str) else None)
    return f"expected {option.accepted_values}, found {display_value}{hint}"


def _other_tool_value_hint(name: str, value: JsonValue) -> str:
    """What another tool's value means, where the key has our name and place."""
    known_key = other_tools.key_table().known_keys.get(name.rpartition(".")[2])
    if known_key is None or known_key.path != name or value is None:
        return ""
    translation = other_tools.translate_value(known_key, value)
    is_translated = translation.settings or other_tools.normalize_spelling(value) in known_key.translations
    text = format_translation(translation, value, raw_text=None, separator=": ").replace("here it is", "write", 1)
    return f"; {text}" if is_translated else ""


def value_hint(value: JsonValue, raw_text: str | None, accepted_values: str, *, can_guess: bool = True) -> str:
    """What may have been meant by a value where another kind was expected, by its spelling too if it `can_guess`."""
    if isinstance(value, str):
        word = value.lower()
        if "true or false" in accepted_values and word in ("yes", "on", "y", "no", "off", "n"):
            return f"; write {'true' if word in ('yes', 'on', 'y') else 'false'}"
        if accepted_values.startswith("a list of") and value in accepted_values:
            return f"; write [{value}]"
        if "number" in accepted_values and value.lstrip("+-").replace("_", "").replace(",", "").isdigit():
            return "; write the number without separators and leading zeros"
        min_similarity = 0.6 if len(value) > 3 else TYPO_SIMILARITY  # `gpu` is not a misspelt `cpu`
        suggestion = (
            did_you_mean(value, accepted_values.replace(",", " ").split(), min_similarity=min_similarity)
            if can_guess
            else ""
        )
        return f"; {suggestion}" if suggestion else ""
    if isinstance(value, (bool, int, float)) and "text" in accepted_values and "list" not in accepted_values:
        return f'; put it in quotes: "{raw_text if raw_text is not None else value}"'
    if value is None and "null" not in accepted_values:
        return "; give a value or remove the key"
    return ""


# --- values that are valid alone, but not together --------------------------------------------------------------------


def find_conflicts(config: RunConfig, document: YamlDocument) -> list[Problem]:
    """Values that are valid alone but not together; each problem names the keys that disagree."""
    train, problems = config.train, []

    def add_problem(name: str | KeyPath, message: str) -> None:
        path: KeyPath = tuple(name.split(".")) if isinstance(name, str) else name
        problems.append(document.problem(path, message))

    if train.fp16 and train.bf16 is True:
        add_problem("train.fp16", "true, and train.bf16 is true as well; choose one")
    if config.task_mode == "cpt_mixed" and config.data.text_path is None:
        add_problem("task_mode", "cpt_mixed needs data.text_path (plain text) as well as data.train_path (chats)")
    if config.task_mode != "cpt_mixed" and config.data.text_path is not None:
        add_problem("data.text_path", f"is read only with task_mode: cpt_mixed, and task_mode is {config.task_mode}")
    for path, message in _source_conflicts(config):
        add_problem(path, message)
    if train.load_best_model_at_end and config.eval.steps == 0:
        add_problem("train.load_best_model_at_end", "true, but eval.steps=0 never evaluates; set eval.steps")
    if train.early_stopping_patience is not None and not train.load_best_model_at_end:
        add_problem("train.early_stopping_patience", "needs train.load_best_model_at_end: true")
    if train.metric_for_best_model == "exact_match" and config.eval.generate_rows == 0:
        add_problem("train.metric_for_best_model", "exact_match needs eval.generate_rows above 0")
    if config.learning_rate > MAX_LEARNING_RATE:
        mantissa, _, power = f"{config.learning_rate:e}".partition("e+")
        suggestion = f"{float(mantissa):g}e-{int(power) or 4}"
        reason = f"{config.learning_rate:,g} is above {MAX_LEARNING_RATE:g}, where nothing learns"
        add_problem("train.learning_rate", f"{reason}; did you mean {suggestion}?")
    for option in optimizer_options():
        value = option.value(config)
        if not option.is_read_by(train.optim) and value != option.default:
            add_problem(option.path, f"{value} is AdamW's, and train.optim is {train.optim}; remove one of them")
    if train.optim == "muon" and config.tuning.mode != "full":
        add_problem(
            "train.optim",
            f"muon steps whole weight matrices, and tuning.mode is {config.tuning.mode}; use full or AdamW",
        )
    lora = config.tuning.lora
    for name, value in (("dropout", lora.dropout), ("use_dora", lora.use_dora)):
        if lora.adapted_parameters and value:
            key = "experts" if lora.experts else "target_parameters"
            add_problem(f"tuning.lora.{name}", f"{value}, and adapters on experts have none; remove it or {key}")
    if lora.experts and lora.target_parameters not in ((), "auto"):
        add_problem(
            "tuning.lora.experts", "true adapts all weights of experts, and target_parameters names some; remove one"
        )
    if config.tuning.quantize_experts is True and config.tuning.mode != "qlora":
        add_problem(
            "tuning.quantize_experts", f"true, and tuning.mode is {config.tuning.mode}; use qlora, or remove it"
        )
    if config.tuning.mode != "full":
        for name, message in _adapter_init_conflicts(config):
            add_problem(name, message)
    if config.tuning.backend_fallback == config.tuning.backend:
        add_problem("tuning.backend_fallback", f"is the backend itself ({config.tuning.backend}); remove it")
    return problems


def _adapter_init_conflicts(config: RunConfig) -> Iterator[tuple[str, str]]:
    lora = config.tuning.lora
    key, init_method = "tuning.lora.init", lora.init
    if init_method == "default":
        return
    if config.model.adapter is not None:
        yield key, f"{init_method}, and model.adapter continues one that has started; remove one of them"
    if lora.adapted_parameters:
        name = "experts" if lora.experts else "target_parameters"
        yield key, f"{init_method} is for linear layers, and tuning.lora.{name} adapts experts; remove one of them"
    if init_method == "loftq":
        if config.tuning.mode != "qlora":
            yield key, f"loftq starts at what NF4 lost, and tuning.mode is {config.tuning.mode}; use qlora, or pissa"
        if lora.use_dora:
            yield key, "loftq changes what DoRA's magnitudes were taken from; remove tuning.lora.use_dora"
    elif lora.use_rslora:
        yield "tuning.lora.use_rslora", "pissa divides its start by the scale; set tuning.lora.alpha instead"


def _source_conflicts(config: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    data, sources_path = config.data, ("data", "sources")
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
        mixed_paths = "data.train_path and data.text_path by data.text_fraction"
        yield sources_path, f"task_mode cpt_mixed mixes {mixed_paths}; use task_mode sft or cpt with sources"
    unweighted = [source for source in data.sources if source.weight is None]
    if unweighted and len(unweighted) < len(data.sources):
        index = data.sources.index(unweighted[0])
        yield (*sources_path, index), "has no weight, and other sources have one; give every source a weight, or none"
    if data.val_path is not None and any(source.val_path for source in data.sources):
        yield ("data", "val_path"), "given together with a source's val_path; keep one of them"
    first_indices: dict[str, int] = {}
    for index, source in enumerate(data.sources):
        first_index = first_indices.setdefault(f"path {source.path.rstrip('/')}", index)
        if first_index != index:
            yield (
                (*sources_path, index, "path"),
                f"is data.sources[{first_index}] already; give one of them the weight of both",
            )
    for index, name in enumerate(data.source_names):
        if name.startswith("rank_"):
            yield (*sources_path, index), f"is named {name}, but loss_{name} is a rank's loss; give it another name"
        first_index = first_indices.setdefault(f"name {name}", index)
        if first_index != index and data.sources[index].path != data.sources[first_index].path:
            key = ("name",) if data.sources[index].name else ()
            yield (
                (*sources_path, index, *key),
                f"is named {name}, as data.sources[{first_index}] is; give it another name",
            )
