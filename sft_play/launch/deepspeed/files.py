"""A DeepSpeed configuration: the shipped one of each ZeRO layout, a person's file as plain data in current keys, and
what it decides of a run: the layout, and the batch where the run YAML leaves it open.

DeepSpeed reads some sections with pydantic and refuses unknown keys there, with a traceback on every rank; in all
others, the top level first, an unknown key is ignored without a word. So `keys.json` lists the keys that it knows,
those that it has renamed, and those that it has removed. Paths into a configuration are dotted.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from sft_play.config import yaml_io
from sft_play.config.schema import DTYPE_ALIASES, TrainConfig
from sft_play.config.yaml_io import format_value
from sft_play.errors import ConfigError
from sft_play.log import one_line
from sft_play.planner.batching import batch_product_problem, is_single_rank_batch
from sft_play.planner.layout import LayoutName
from sft_play.spelling import nearest_name

# Layout: ZeRO stage, whether optimizer states are offloaded, whether weights are.
ZERO_STAGES: dict[LayoutName, tuple[int, bool, bool]] = {
    "zero1": (1, False, False),
    "zero2": (2, False, False),
    "zero3": (3, False, False),
    "zero2_offload": (2, True, False),
    "zero3_offload": (3, True, True),
}
ZERO_LAYOUTS = {(stage, states): name for name, (stage, states, _) in ZERO_STAGES.items()} | {(1, True): "zero1"}
DEEPSPEED_FILE_DESCRIPTION = "a DeepSpeed configuration in JSON or YAML, such as configs/deepspeed/zero2.json"


def shipped_deepspeed_config(layout: LayoutName) -> DeepspeedConfig:
    """The configuration of a ZeRO layout of `ZERO_STAGES`, its values "auto"; `configs/deepspeed/` holds the same.
    Raises ConfigError where the layout is not one that DeepSpeed runs."""
    if layout not in ZERO_STAGES:
        raise ConfigError(f"DeepSpeed has no layout {one_line(layout)}; it has {', '.join(ZERO_STAGES)}")
    stage, offloads_states, offloads_weights = ZERO_STAGES[layout]
    zero: DeepspeedConfig = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": True,  # reduce a bucket while the backward pass goes on with the next
        "reduce_scatter": True,
        "reduce_bucket_size": AUTO,
    }
    if offloads_states:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if offloads_weights:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": AUTO,
            "stage3_param_persistence_threshold": AUTO,
            "stage3_gather_16bit_weights_on_model_save": True,  # else a checkpoint holds shards only
        }
    return {
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": AUTO,
        "gradient_clipping": AUTO,
        "bf16": {"enabled": AUTO},
        "fp16": {"enabled": AUTO},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # train.optim chooses; DeepSpeed knows its own and torch's Adam
        "wall_clock_breakdown": False,
    }


def read_deepspeed_file(path: Path) -> DeepspeedConfig:
    """A person's file as plain data: JSON (comments and trailing commas allowed) or YAML; raises ConfigError where the
    file is missing, a folder, neither JSON nor YAML, no mapping, or holds a key twice."""
    text = yaml_io.read_text(path, variable="DEEPSPEED_CONFIG", expected=DEEPSPEED_FILE_DESCRIPTION)
    json_text = _NOT_JSON.sub(lambda match: match[1] or re.sub(r"[^\n]", " ", match[0]), text)  # lines and columns stay
    is_json = json_text.lstrip().startswith(("{", "[")) and path.suffix.lower() not in (".yaml", ".yml")
    try:
        data = yaml_io.parse_yaml_value(json_text if is_json else text, name=one_line(str(path)))
    except ConfigError:
        if is_json:
            _raise_json_error(json_text, name=one_line(str(path)))
        raise
    if not isinstance(data, dict):
        raise ConfigError(
            f"{one_line(str(path))} holds {yaml_io.format_value(data)}; expected {DEEPSPEED_FILE_DESCRIPTION}"
        )
    return data


def _raise_json_error(text: str, *, name: str) -> None:
    """Raise ConfigError in the words of JSON where a text is none; a comma behind the last item is allowed."""
    try:
        json.loads(re.sub(r"(?<!,),(?=\s*[}\]])", " ", text))
    except json.JSONDecodeError as error:
        # what lacks a comma may end lines above
        previous_line = text.count("\n", 0, len(text[: error.pos].rstrip())) + 1
        position = f" behind line {previous_line}" if "delimiter" in error.msg else ""
        raise ConfigError(
            f"{name}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}{position}; not valid YAML either"
        ) from None


# What people write in JSON that YAML, of which JSON is a part, does not take: comments, and tabs. Strings are matched
# first, so that the // of a URL begins no comment.
_NOT_JSON = re.compile(r'("(?:[^"\\\n]|\\.)*")|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)|\t', re.DOTALL)


def deepspeed_layout(
    config: DeepspeedConfig, *, name: str = "the DeepSpeed configuration", default_layout: LayoutName = "zero2"
) -> LayoutName:
    """The layout that a translated configuration asks for; where its stage is "auto" or absent, that of
    `default_layout`. Raises ConfigError where it shards nothing (stage 0), or offloads weights that it does not
    shard."""
    zero = config.get("zero_optimization") or {}
    stage = zero.get("stage", AUTO)
    stage = ZERO_STAGES[default_layout][0] if stage in (AUTO, None) else int(stage)
    offloads_states, offloads_weights = is_offloaded(zero, "offload_optimizer"), is_offloaded(zero, "offload_param")
    if stage == 0:
        raise ConfigError(
            f"{name}: zero_optimization.stage 0 shards nothing: every GPU would hold the whole model; "
            "set stage 1, 2 or 3, or ask for STRATEGY=ddp"
        )
    if offloads_weights and stage < 3:
        raise ConfigError(f"{name}: offload_param needs stage 3 and the stage is {stage}; set stage 3 or remove it")
    return ZERO_LAYOUTS[stage, offloads_states]


def keeps_params_on_gpu(config: DeepspeedConfig, layout: LayoutName) -> bool:
    """Whether a file that asks for `zero3_offload` offloads only the optimizer states."""
    return layout == "zero3_offload" and not is_offloaded(config.get("zero_optimization") or {}, "offload_param")


def is_offloaded(zero: DeepspeedConfig, key: str) -> bool:
    """Whether the section `key` of `zero_optimization` moves something off the GPUs."""
    section = zero.get(key)
    return isinstance(section, dict) and section.get("device", "none") in ("cpu", "nvme")


BATCH_KEYS = {
    "train_micro_batch_size_per_gpu": "batch_size",
    "gradient_accumulation_steps": "grad_accum",
    "train_batch_size": "effective_batch_size",
}


def merge_deepspeed_batch(
    train: TrainConfig, config: DeepspeedConfig, *, ranks: int, name: str = "the DeepSpeed configuration"
) -> tuple[TrainConfig, tuple[str, ...]]:
    """The run's settings with the batch of a translated configuration where the run YAML leaves it open (micro-batch
    and accumulation "auto", the effective batch not set), and a line for each value taken from it. Raises ConfigError
    where numbers of the two contradict each other, or do not multiply over the data-parallel `ranks`; all of them at
    once."""
    file_values = {key: value for key in BATCH_KEYS if isinstance(value := config.get(key), int)}  # without "auto"
    if not file_values:
        return train, ()
    run_values = {field: value for field in ("batch_size", "grad_accum") if (value := getattr(train, field)) != AUTO}
    # It has a number as its default, so "given" is what the file or SET holds, even if that is the default.
    if "effective_batch_size" in train.model_fields_set:
        run_values["effective_batch_size"] = train.effective_batch_size
    taken_values: dict[str, int] = {}
    sources = {field: f"train.{field}={value}" for field, value in run_values.items()}
    lines, problems = [], []
    for key, value in file_values.items():
        field = BATCH_KEYS[key]
        if run_values.get(field, value) != value:
            problems.append(
                f'{key}: {value} contradicts train.{field}={run_values[field]}; keep one of them ("auto" here)'
            )
        elif field not in run_values:
            taken_values[field], sources[field] = value, f"{key}: {value}"
            lines.append(f"{key}: {value} is the run's train.{field}, which the run YAML leaves open")
    if not problems:
        merged_values = run_values | taken_values
        micro_batch, grad_accum = (merged_values.get(field) for field in ("batch_size", "grad_accum"))
        if "effective_batch_size" not in merged_values and micro_batch and grad_accum:
            taken_values["effective_batch_size"] = micro_batch * grad_accum * ranks
            lines.append(f"train.effective_batch_size → {micro_batch} × {grad_accum} × {ranks} ranks = "
                         f"{micro_batch * grad_accum * ranks}, which neither file gives")  # fmt: skip
        # a YAML of one rank is kept over several, unless the file repeats its numbers of a rank
        if not (is_single_rank_batch(train) and file_values.keys() == {"train_batch_size"}):
            default_text = f"train.effective_batch_size={train.effective_batch_size} (its default)"
            source_texts = {"effective_batch_size": default_text, **sources}
            problem = batch_product_problem(
                train.model_copy(update=taken_values), ranks=ranks, option_texts=source_texts
            )
            problems += [problem] if problem else []
    if problems:
        raise ConfigError("\n".join(f"{name}: {problem}" for problem in problems))
    return train.model_copy(update=taken_values), tuple(lines)


# Dtypes that the run YAML alone sets: `distributed.mixed_precision`.
DTYPE_KEYS = {"communication_data_type": "reduce", "data_types.buffer_dtype": "buffer"}
SHORT_DTYPES = {short_name: name for name, short_name in DTYPE_ALIASES.items()}


# --- in current keys --------------------------------------------------------------------------------------------------


DeepspeedConfig = dict[str, Any]

# Stands for a value that follows from the run. transformers' word, and ours: DeepSpeed knows it in few places
# (`PATHS_WITH_AUTO`).
AUTO = "auto"

_KEY_TABLE: dict[str, Any] = json.loads(resources.files(__package__).joinpath("keys.json").read_text(encoding="utf-8"))


def _section_keys(section: dict[str, str]) -> frozenset[str]:
    """A section's keys. Some of ZeRO's may be written with the prefix `stage3_` (pydantic's `populate_by_name`)."""
    prefixable_keys = section.get("with_and_without_stage3_", "").split()
    return frozenset([*section["keys"].split(), *prefixable_keys, *(f"stage3_{key}" for key in prefixable_keys)])


# The keys of each section by its dotted path ("" is the top level). Sections that are not here are open: what they may
# contain depends on their values. `sequence_parallel_size` and `inference` are read by transformers and by DeepSpeed's
# ZeRO-3 loading.
KNOWN_DEEPSPEED_KEYS: dict[str, frozenset[str]] = {
    path: _section_keys(section) for path, section in _KEY_TABLE["sections"].items()
}

# Paths where DeepSpeed itself understands "auto".
PATHS_WITH_AUTO: tuple[str, ...] = tuple(_KEY_TABLE["auto_is_a_value"])

_COMMENT_KEY = re.compile(r"_.*|//.*|#.*|comments?", re.IGNORECASE)


def translate_deepspeed_keys(
    raw: DeepspeedConfig, *, name: str = "the DeepSpeed configuration"
) -> tuple[DeepspeedConfig, tuple[str, ...]]:
    """The configuration in DeepSpeed's current keys, and notes on what was translated or left out. Raises ConfigError
    where a key is unknown (the nearest known one is named), was removed while it is switched on, or holds a value of
    the wrong kind. All of them at once."""
    config = copy.deepcopy(raw)
    notes: list[str] = []
    for path, section in walk_sections(config):
        for key in [key for key in section if _COMMENT_KEY.fullmatch(str(key))]:
            del section[key]
            notes.append(f"{_join_path(path, key)} is read as a comment")
    problems = [*_rename_old_keys(config, notes), *_drop_removed_keys(config, notes), *_unknown_key_problems(config)]
    if not problems:  # a value under a wrong key would be reported twice
        problems = _value_problems(config)
    if problems:
        raise ConfigError("\n".join(f"{name}: {problem}" for problem in problems))
    return config, tuple(notes)


def _rename_old_keys(config: DeepspeedConfig, notes: list[str]) -> Iterator[str]:
    for old, new in _KEY_TABLE["renamed"].items():
        parent, key = find_parent(config, old)
        if parent is None or key not in parent:
            continue
        value = new_value = parent.pop(key)
        if "cpu_offload" in old:
            new_value = {"device": "cpu"} if value is True else None if value is False else value
        present_value = get_value_at(config, new)
        if new_value is None or present_value == new_value:
            notes.append(f"{old}: {format_value(value)} is an old key that says nothing more; left out")
        elif present_value is None:
            set_value_at(config, new, new_value)
            notes.append(f"{old}: {format_value(value)} is an old key; read as {new}: {format_value(new_value)}")
        else:
            yield (
                f"{old}: {format_value(value)} (an old key) and {new}: {format_value(present_value)} disagree; "
                f"keep {new} only"
            )


def _drop_removed_keys(config: DeepspeedConfig, notes: list[str]) -> Iterator[str]:
    for path, reason in _KEY_TABLE["removed"].items():
        parent, key = find_parent(config, path)
        if parent is None or key not in parent:
            continue
        value = parent.pop(key)
        switch = value.get("enabled", bool(value)) if isinstance(value, dict) else value
        if switch in (False, None, -1):  # -1 is how sizes such as mics_shard_size were switched off
            notes.append(f"{path}, which newer versions of DeepSpeed refuse, is switched off and left out")
        else:
            yield f"{path} was removed from DeepSpeed: {reason}; remove the key"


def _unknown_key_problems(config: DeepspeedConfig) -> Iterator[str]:
    for path, section in walk_sections(config):
        for key in section if path in KNOWN_DEEPSPEED_KEYS else ():
            if key not in KNOWN_DEEPSPEED_KEYS[path]:
                yield f"{_join_path(path, key)} is not a DeepSpeed key; {_suggest_key(path, str(key))}"


def _suggest_key(path: str, key: str) -> str:
    sections = sorted(
        (section_path for section_path, names in KNOWN_DEEPSPEED_KEYS.items() if key in names),
        key=lambda section: section.count("."),
    )
    if sections:
        return f"it belongs at {' or '.join(_join_path(home, key) for home in sections[:3])}"
    return f"the nearest is {_join_path(path, nearest_name(key, KNOWN_DEEPSPEED_KEYS[path], min_similarity=0.0) or '')}"


# --- values, checked before ranks start: DeepSpeed itself raises late, on every rank ----------------------------------


def _is_whole_number(value: Any, *, minimum: int = 0) -> bool:
    """Also for `5e8`, which JSON and YAML read as a float: that is how bucket sizes are written in most guides."""
    return _is_finite_number(value) and value == int(value) and bool(value >= minimum)


def _is_finite_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value) and value >= 0


_BATCH_KEYS_PATTERN = re.compile(r"train_batch_size|train_micro_batch_size_per_gpu|gradient_accumulation_steps")
# Of a path the test of its values, and what it accepts; DeepSpeed itself checks the others.
_VALUE_CHECKS: tuple[tuple[re.Pattern[str], Callable[[Any], bool], str], ...] = (
    (
        _BATCH_KEYS_PATTERN,
        lambda value: isinstance(value, int) and _is_whole_number(value, minimum=1),
        'a whole number from 1, or "auto"',
    ),
    (re.compile("gradient_clipping"), _is_finite_number, 'a number from 0 (0: no clipping), or "auto"'),
    (
        re.compile(r"zero_optimization\.stage"),
        lambda value: _is_whole_number(value) and value <= 3,
        '0, 1, 2, 3 or "auto"',
    ),
    (
        re.compile(r"zero_optimization\.offload_(optimizer|param)\.device"),
        lambda value: value in ("none", "cpu", "nvme"),
        '"none", "cpu" or "nvme"',
    ),
    (
        re.compile(r"(.*\.)?(enabled|pin_memory|overlap_comm|contiguous_gradients|reduce_scatter)"),
        lambda value: isinstance(value, bool),
        'true, false or "auto"',
    ),
    (
        re.compile(r"zero_optimization\.\w*_(size|threshold|parameters|distance)"),
        _is_whole_number,
        'a whole number without quotes, or "auto"',
    ),
)


def _value_problems(config: DeepspeedConfig) -> list[str]:
    problems = []
    for path, value in walk_values(config):
        if value is not None and (path in KNOWN_DEEPSPEED_KEYS or path in ("optimizer.params", "scheduler.params")):
            known_keys_text = (
                f" with {', '.join(sorted(KNOWN_DEEPSPEED_KEYS[path]))}" if path in KNOWN_DEEPSPEED_KEYS else ""
            )
            problems.append(f"{path}: {format_value(value)} is not a section; expected {{…}}{known_keys_text}")
            continue
        check = next((check for check in _VALUE_CHECKS if check[0].fullmatch(path)), None)
        if check is not None and value not in (AUTO, None) and not check[1](value):
            problems.append(f"{path}: {format_value(value)} is not valid; expected {check[2]}")
    # These change which ranks hold what: the run would not be the planned one.
    for path in ("sequence_parallel_size", "tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size"):
        if _is_finite_number(size := get_value_at(config, path)) and size > 1:
            explanation = "splits rows or layers over ranks; only ZeRO's data-parallel layouts are supported"
            problems.append(f"{path}: {size} {explanation}")
    for path, field in DTYPE_KEYS.items():
        if get_value_at(config, path) not in (None, AUTO):
            problems.append(f'{path} is distributed.mixed_precision.{field} of the run YAML; set it there, "auto" here')
    for path in ("expert_parallel", "autotuning", "data_efficiency"):
        if get_value_at(config, f"{path}.enabled") is True:
            problems.append(f"{path}.enabled: true is not supported: the plan does not model it; remove the section")
    return problems


# --- dotted paths -----------------------------------------------------------------------------------------------------


def _join_path(path: str, key: object) -> str:
    return one_line(f"{path}.{key}" if path else str(key))


def walk_sections(config: DeepspeedConfig, path: str = "") -> Iterator[tuple[str, DeepspeedConfig]]:
    """Every mapping with its dotted path, the outer ones first."""
    yield path, config
    for key, value in list(config.items()):
        if isinstance(value, dict):
            yield from walk_sections(value, f"{path}.{key}" if path else str(key))


def walk_values(config: DeepspeedConfig) -> Iterator[tuple[str, Any]]:
    """Every value that is not a mapping, with its dotted path."""
    for path, section in walk_sections(config):
        for key, value in list(section.items()):
            if not isinstance(value, dict):
                yield f"{path}.{key}" if path else str(key), value


def find_parent(config: DeepspeedConfig, path: str) -> tuple[DeepspeedConfig | None, str]:
    """The mapping that would hold the last key of a path, None where it does not exist, and that key."""
    *outer, key = path.split(".")
    parent: Any = config
    for part in outer:
        parent = parent.get(part) if isinstance(parent, dict) else None
    return (parent if isinstance(parent, dict) else None), key


def get_value_at(config: DeepspeedConfig, path: str) -> Any:
    """The value at a path; None where there is none."""
    parent, key = find_parent(config, path)
    return None if parent is None else parent.get(key)


def set_value_at(config: DeepspeedConfig, path: str, value: Any) -> None:
    """Set the value at a path; sections that are missing are added."""
    *outer, key = path.split(".")
    for part in outer:
        config = config.setdefault(part, {})
    config[key] = value
