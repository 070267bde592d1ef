"""A document → `RunConfig`; pydantic's errors as problems with a line, the expected value and the
one found.

`find_conflicts` has what pydantic does not look for: values that contradict each other.
"""

import copy
import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sft_play.config.options import (
    all_options,
    field_option,
    list_item_sections,
    optimizer_options,
    sections,
)
from sft_play.config.other_tools import (
    ForeignKey,
    find_foreign_keys,
    merge_keys,
    unknown_key_problem,
)
from sft_play.config.schema import RunConfig
from sft_play.config.yaml_io import (
    JsonValue,
    KeyPath,
    Problem,
    YamlDocument,
    find_value,
    format_value,
    walk_leaves,
)
from sft_play.errors import ConfigError
from sft_play.spelling import TYPO_SIMILARITY, did_you_mean

# Rates above it are slips, such as 2e4 for 2e-4: published ones end at 1e-2.
MAX_LEARNING_RATE = 1.0
_SURROGATE = re.compile("[\ud800-\udfff]")
TYPOGRAPHIC_QUOTES = frozenset("“”„‟‘’‚‛«»")


def validate(document: YamlDocument) -> tuple[RunConfig | None, list[Problem]]:
    """Check a document. Returns the run that it describes (None where pydantic refuses it), and
    every problem with its keys and values.

    Contradictions are looked for only where every value by itself is right. A run with stages is
    not searched for them: each stage is, and may put right what is wrong with the run's own
    settings."""
    leaves = list(walk_leaves(document.data))
    # in a key, a value, or an item of a list: pydantic reads nothing of such a document
    problems = [
        document.problem(path, "the text has half of a surrogate pair")
        for path, value in leaves
        if _SURROGATE.search(json.dumps([*path, value], ensure_ascii=False))
    ]
    if problems:
        return None, problems
    for path, value in leaves:
        if isinstance(value, str) and value and {value[0], value[-1]} <= TYPOGRAPHIC_QUOTES:
            problems.append(
                document.problem(
                    path,
                    'is in typographic quotes, which YAML takes for letters of the text; write "'
                    " or '",
                )
            )
    config, errors = read_config(document)
    foreign_keys = merge_keys(find_unknown_keys(document, errors))
    problems += (unknown_key_problem(document, key) for key in foreign_keys)
    # a union reports one error for each of its members; the key is reported once
    reported_paths = set()
    for error in errors:
        path = _error_path(error["loc"])
        # a default that was not made follows from another key, which is wrong
        is_reported = path in reported_paths or error["type"] == "default_factory_not_called"
        if not is_reported and not _is_unknown_key(error):
            reported_paths.add(path)
            problems.append(document.problem(path, _describe_error(document, path, error["type"])))
    if config is not None and not problems and not config.curriculum:
        problems = find_conflicts(config, document)
    return config, problems


def read_config(document: YamlDocument) -> tuple[RunConfig | None, list[ErrorDetails]]:
    """Let pydantic read a document, without sections left empty by `key:`. Returns the run, or None
    and pydantic's errors. Raises ConfigError where the document as a whole is no mapping, or is
    nested deeper than pydantic goes."""
    data = copy.deepcopy(document.data)
    for name in filter(None, reversed(sections())):  # the inner ones first
        *parents, key = name.split(".")
        holder = find_value(data, tuple(parents))
        if isinstance(holder, dict) and key in holder and holder[key] is None:
            del holder[key]
    try:
        # From JSON, because strict models refuse a list for a tuple in Python's data but take a
        # JSON array for one.
        return RunConfig.model_validate_json(json.dumps(data)), []
    except ValidationError as error:
        errors = error.errors(include_url=False)
    if not errors[0]["loc"]:
        raise ConfigError(f"{document.name}: not sections and settings: {errors[0]['msg']}")
    return None, errors


def find_unknown_keys(document: YamlDocument, errors: Sequence[ErrorDetails]) -> list[ForeignKey]:
    """Find the keys that our sections do not have, by pydantic's errors. A foreign section counts
    as the keys in it."""
    unknown_paths = [error["loc"] for error in errors if _is_unknown_key(error)]
    return [
        key
        for path in unknown_paths
        for key in find_foreign_keys(
            path, find_value(document.data, path), section=".".join(map(str, path[:-1]))
        )
    ]


def _is_unknown_key(error: ErrorDetails) -> bool:
    # a key of a section in a list has no meaning elsewhere
    return error["type"] == "extra_forbidden" and all(
        isinstance(part, str) for part in error["loc"]
    )


def _error_path(location: Sequence[str | int]) -> KeyPath:
    """Cut pydantic's location to a key or section of ours: it goes on with the member of a
    union."""
    for length in range(len(location), 0, -1):
        name = ".".join(map(str, location[:length]))
        if name in list_item_sections() and len(location) > length:
            return (
                *name.split("."),
                int(location[length]),
                *map(str, location[length + 1 : length + 2]),
            )
        if name in all_options() or name in sections():
            return tuple(name.split("."))
    return tuple(map(str, location))


def _describe_error(document: YamlDocument, path: KeyPath, error_type: str) -> str:
    value, raw_text = find_value(document.data, path), document.raw_texts.get(path)
    shown_value = format_value(value, raw_text=raw_text)
    name = ".".join(map(str, path))
    section, option = sections().get(name), all_options().get(name)
    list_index = next((index for index, part in enumerate(path) if isinstance(part, int)), None)
    if list_index is not None:  # a section in a list, or one of its keys
        list_path, key_path = ".".join(map(str, path[:list_index])), path[list_index + 1 :]
        section = list_item_sections()[list_path]
        if key_path and key_path[0] not in section.model_fields:
            keys = section.model_fields
            hint = did_you_mean(str(key_path[0]), keys) or f"{list_path}[] takes {', '.join(keys)}"
            return f"unknown key (value {shown_value}); {hint}"
        if key_path:
            option = field_option(str(key_path[0]), section.model_fields[str(key_path[0])])
    if option is not None:
        if error_type == "missing":
            return f"missing; {option.doc}"
        hint = value_hint(value, raw_text, option.accepted_values)
        return f"expected {option.accepted_values}, found {shown_value}{hint}"
    if section is None or error_type == "missing":
        return "missing; a run YAML needs model.name"
    example = next(iter(section.model_fields))
    if example in ("name", "path"):
        example = f"{example}: {shown_value}"
    return (
        f"expected a section, found {shown_value}; write {{{example}, …}} (of"
        f" {', '.join(section.model_fields)})"
    )


def value_hint(value: JsonValue, raw_text: str | None, accepted_values: str) -> str:
    """Guess what was meant by a value of the wrong kind, also by its spelling. Empty without a
    guess."""
    if isinstance(value, str):
        word = value.lower()
        if "true or false" in accepted_values and word in ("yes", "on", "y", "no", "off", "n"):
            return f"; write {'true' if word in ('yes', 'on', 'y') else 'false'}"
        if accepted_values.startswith("a list of") and value in accepted_values:
            return f"; write [{value}]"
        if (
            "number" in accepted_values
            and value.lstrip("+-").replace("_", "").replace(",", "").isdigit()
        ):
            return "; write the number without separators and leading zeros"
        min_similarity = 0.6 if len(value) > 3 else TYPO_SIMILARITY  # `gpu` is not a misspelt `cpu`
        suggestion = did_you_mean(
            value, accepted_values.replace(",", " ").split(), min_similarity=min_similarity
        )
        return f"; {suggestion}" if suggestion else ""
    if (
        isinstance(value, (bool, int, float))
        and "text" in accepted_values
        and "list" not in accepted_values
    ):
        return f'; put it in quotes: "{raw_text if raw_text is not None else value}"'
    if value is None and "null" not in accepted_values:
        return "; give a value or remove the key"
    return ""


# --- values that are valid alone, but not together ------------------------------------------------


def find_conflicts(config: RunConfig, document: YamlDocument) -> list[Problem]:
    """Find values that are valid alone but not together. Each problem names the keys that
    disagree."""
    return [
        document.problem(path, message)
        for path, message in (*_setting_conflicts(config), *_source_conflicts(config))
    ]


# A key, whether it contradicts another, and what is wrong.
_Rule = tuple[str, Any, str]


def _setting_conflicts(config: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    train, tuning = config.train, config.tuning
    is_mixed = config.task_mode == "cpt_mixed"
    # a rate with the sign of its power turned: 2e4 was meant as 2e-4
    mantissa, _, power = f"{config.learning_rate:e}".replace("+", "-").partition("e-")
    rules: tuple[_Rule, ...] = (
        (
            "train.fp16",
            train.fp16 and train.bf16 is True,
            "true, and train.bf16 is true as well; choose one",
        ),
        (
            "task_mode",
            is_mixed and config.data.text_path is None,
            "cpt_mixed needs data.text_path (plain text) as well as data.train_path (chats)",
        ),
        (
            "data.text_path",
            not is_mixed and config.data.text_path is not None,
            f"is read only with task_mode: cpt_mixed, and task_mode is {config.task_mode}",
        ),
        (
            "train.load_best_model_at_end",
            train.load_best_model_at_end and config.eval.steps == 0,
            "true, but eval.steps=0 never evaluates; set eval.steps",
        ),
        (
            "train.early_stopping_patience",
            train.early_stopping_patience is not None and not train.load_best_model_at_end,
            "needs train.load_best_model_at_end: true",
        ),
        (
            "train.metric_for_best_model",
            train.metric_for_best_model == "exact_match" and config.eval.generate_rows == 0,
            "exact_match needs eval.generate_rows above 0",
        ),
        (
            "train.learning_rate",
            config.learning_rate > MAX_LEARNING_RATE,
            (
                f"{config.learning_rate:,g} is above {MAX_LEARNING_RATE:g}, where nothing learns;"
                f" did you mean {float(mantissa):g}e-{int(power) or 4}?"
            ),
        ),
        *(
            (
                option.path,
                True,
                (
                    f"{option.value(config)} is AdamW's, and train.optim is {train.optim}; remove"
                    " one of them"
                ),
            )
            for option in optimizer_options()
            if train.optim not in (option.external_names.optimizers or (train.optim,))
            and option.value(config) != option.default
        ),
        (
            "train.optim",
            train.optim == "muon" and tuning.mode != "full",
            (
                f"muon steps whole weight matrices, and tuning.mode is {tuning.mode};"
                " use full or AdamW"
            ),
        ),
        (
            "tuning.backend_fallback",
            tuning.backend_fallback == tuning.backend,
            f"is the backend itself ({tuning.backend}); remove it",
        ),
    )
    for name, is_wrong, message in (*rules, *_adapter_rules(config), *_data_rules(config)):
        if is_wrong:
            yield tuple(name.split(".")), message


def _adapter_rules(config: RunConfig) -> tuple[_Rule, ...]:
    tuning, lora = config.tuning, config.tuning.lora
    mode, init = tuning.mode, lora.init if tuning.mode != "full" else "default"
    experts_key = "experts" if lora.experts else "target_parameters"
    return (
        *(
            (
                f"tuning.lora.{name}",
                lora.adapted_parameters and value,
                f"{value}, and adapters on experts have none; remove it or {experts_key}",
            )
            for name, value in (("dropout", lora.dropout), ("use_dora", lora.use_dora))
        ),
        (
            "tuning.train_vision",
            tuning.train_vision and mode != "full",
            f"is of full training, and tuning.mode is {mode}; tuning.lora.projector=true puts"
            " adapters on the projector",
        ),
        (
            "tuning.lora.experts",
            lora.experts and lora.target_parameters not in ((), "auto"),
            "true adapts all weights of experts, and target_parameters names some; remove one",
        ),
        (
            "tuning.quantize_experts",
            tuning.quantize_experts is True and mode != "qlora",
            f"true, and tuning.mode is {mode}; use qlora, or remove it",
        ),
        (
            "tuning.lora.init",
            init != "default" and config.model.adapter is not None,
            f"{init}, and model.adapter continues one that has started; remove one of them",
        ),
        (
            "tuning.lora.init",
            init != "default" and lora.adapted_parameters,
            (
                f"{init} is for linear layers, and tuning.lora.{experts_key} adapts experts; remove"
                " one of them"
            ),
        ),
        (
            "tuning.lora.init",
            init == "loftq" and mode != "qlora",
            f"loftq starts at what NF4 lost, and tuning.mode is {mode}; use qlora, or pissa",
        ),
        (
            "tuning.lora.init",
            init == "loftq" and lora.use_dora,
            "loftq changes what DoRA's magnitudes were taken from; remove tuning.lora.use_dora",
        ),
        (
            "tuning.lora.use_rslora",
            init == "pissa" and lora.use_rslora,
            "pissa divides its start by the scale; set tuning.lora.alpha instead",
        ),
    )


def _data_rules(config: RunConfig) -> tuple[_Rule, ...]:
    data, pixels = config.data, config.data.image_pixels
    return (
        (
            "data.image_pixels",
            (pixels.min or 0) > (pixels.max or math.inf),
            f"at least {pixels.min} and at most {pixels.max} pixels exclude each other",
        ),
        (
            "data.train_path",
            not data.sources and data.train_path is None,
            "null, and data.sources is empty; give one of them",
        ),
        (
            "data.train_path",
            data.sources and data.train_path is not None,
            (
                "given together with data.sources; remove it (SET: data.train_path=null),"
                " or add it to them"
            ),
        ),
        (
            "data.sources",
            data.sources and config.task_mode == "cpt_mixed",
            (
                "task_mode cpt_mixed mixes data.train_path and data.text_path by"
                " data.text_fraction; use task_mode sft or cpt with sources"
            ),
        ),
        (
            "data.val_path",
            data.val_path is not None and any(source.val_path for source in data.sources),
            "given together with a source's val_path; keep one of them",
        ),
    )


def _source_conflicts(config: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    sources, names = config.data.sources, config.data.source_names
    paths = [source.path.rstrip("/") for source in sources]
    has_weights = any(source.weight is not None for source in sources)
    for index, (source, name) in enumerate(zip(sources, names, strict=True)):
        path: KeyPath = ("data", "sources", index)
        if has_weights and source.weight is None:
            yield (
                path,
                "has no weight, and other sources have one; give every source a weight, or none",
            )
        if name.startswith("rank_"):
            yield path, f"is named {name}, but loss_{name} is a rank's loss; give it another name"
        same_path, same_name = paths.index(paths[index]), names.index(name)
        if same_path != index:
            yield (
                (*path, "path"),
                f"is data.sources[{same_path}] already; give one of them the weight of both",
            )
        elif same_name != index:
            yield (
                (*path, "name"),
                f"is named {name}, as data.sources[{same_name}] is; give it another name",
            )
