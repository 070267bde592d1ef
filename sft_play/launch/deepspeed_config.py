"""DeepSpeed's configuration: read as people write it, translated to current keys, and filled in from the plan.

`read` gives plain data, `understand` the same in current keys and what was translated, `layout_of` the layout it asks
for, `with_batch` the run's settings with the batch that it names, `fill` a configuration without any "auto" left. The
formulas for "auto" are those of transformers (https://github.com/huggingface/transformers:
`src/transformers/integrations/deepspeed.py`), so a file that works with the Trainer means the same here; their results
are shown.
"""

from __future__ import annotations

import copy
import difflib
import math
import os
import re
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sft_play.config import yaml_io
from sft_play.config.schema import MixedPrecisionConfig, TrainConfig
from sft_play.errors import ConfigError
from sft_play.launch import deepspeed_keys as keys
from sft_play.launch.given_file import json_of, looks_like_json, text_of
from sft_play.log import one_line
from sft_play.planner.layout import LayoutName

Config = dict[str, Any]
"""DeepSpeed's configuration as plain data: keys and values are DeepSpeed's."""

AUTO = "auto"
STAGES: dict[str, tuple[int, bool, bool]] = {
    "zero1": (1, False, False),
    "zero2": (2, False, False),
    "zero3": (3, False, False),
    "zero2_offload": (2, True, False),
    "zero3_offload": (3, True, True),
}
"""Layout: ZeRO stage, whether optimizer states are offloaded, whether weights are."""
LAYOUTS: dict[tuple[int, bool], LayoutName] = {
    (1, False): "zero1",
    (1, True): "zero1",
    (2, False): "zero2",
    (3, False): "zero3",
    (2, True): "zero2_offload",
    (3, True): "zero3_offload",
}
"""The layout of a stage, with its optimizer states offloaded or not."""

ADAM_BETA1, ADAM_EPS = 0.9, 1e-8
"""AdamW's values in every run: the defaults of transformers' `TrainingArguments`, which no key changes."""

SHIPPED_FILES = ("zero2", "zero3", "zero3_offload")
"""Layouts whose configuration is in `configs/deepspeed/`, to read and to copy."""

WANTED = "a DeepSpeed configuration in JSON or YAML, such as configs/deepspeed/zero2.json"
_COMMENT = re.compile(r"_.*|//.*|#.*|comments?", re.IGNORECASE)


@dataclass(frozen=True)
class PlanNumbers:
    """What DeepSpeed needs from a plan. `max_grad_norm` 0: no clipping. `hidden_size` is the model's widest.

    The optimizer's values are for comparison with a file's own `optimizer` block; None: not compared.
    """

    layout: str
    micro_batch: int
    grad_accum: int
    data_parallel_ranks: int
    hidden_size: int
    max_grad_norm: float
    compute: Literal["bfloat16", "float16", "float32"]
    learning_rate: float | None = None
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    reduce: str | None = None
    """Dtype in which gradients are sent, in DeepSpeed's spelling; None: as computed."""
    buffer: str | None = None
    """Dtype that buffers are cast to; None: unchanged."""

    @property
    def effective_batch(self) -> int:
        """Rows per optimizer step, over all ranks."""
        return self.micro_batch * self.grad_accum * self.data_parallel_ranks


# --- where a configuration comes from --------------------------------------------------------------------------------


def shipped(layout: str) -> Config:
    """The configuration of a ZeRO layout of `STAGES`, its values "auto"; `configs/deepspeed/` holds the same.

    Raises:
        ConfigError: the layout is not one that DeepSpeed runs.
    """
    if layout not in STAGES:
        raise ConfigError(f"DeepSpeed has no layout {one_line(layout)}; it has {', '.join(STAGES)}")
    stage, states, weights = STAGES[layout]
    zero: Config = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": AUTO,
    }
    if states:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if weights:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": AUTO,
            "stage3_param_persistence_threshold": AUTO,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    return {
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": AUTO,
        "gradient_clipping": AUTO,
        "bf16": {"enabled": AUTO},
        "fp16": {"enabled": AUTO},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
    }


def read(path: Path) -> Config:
    """A person's file as plain data: JSON (comments and trailing commas allowed) or YAML.

    Raises:
        ConfigError: the file is missing, a folder, neither JSON nor YAML, no mapping, or holds a key twice.
    """
    text = text_of(path, variable="DEEPSPEED_CONFIG", wanted=WANTED)
    name = one_line(str(path))
    suffix = path.suffix.lower()
    if suffix == ".json" or (suffix not in (".yaml", ".yml") and looks_like_json(text)):
        data = json_of(text, name=name)
    else:
        data = yaml_io.parse_value(text, name=name)
    if data is None:
        raise ConfigError(f"{name}: the file is empty; expected {WANTED}")
    if not isinstance(data, dict):
        kind = "a list" if isinstance(data, list) else f"the value {one_line(repr(data), limit=40)}"
        raise ConfigError(f"{name}: the root is {kind}; expected {WANTED}")
    _refuse_other_kinds(data, name)
    return data


def _refuse_other_kinds(data: Config, name: str) -> None:
    """Raises ConfigError for files of other programs that are easily given by mistake."""
    if {"compute_environment", "distributed_type"} & set(data):
        raise ConfigError(
            f"DEEPSPEED_CONFIG={name} is a configuration of accelerate: give it as ACCELERATE_CONFIG; "
            f"DEEPSPEED_CONFIG names {WANTED}"
        )
    if "model" in data and {"train", "data", "tuning", "task_mode", "output"} & set(data):
        raise ConfigError(f"DEEPSPEED_CONFIG={name} is a run YAML: give it as CONFIG; DEEPSPEED_CONFIG names {WANTED}")


# --- what a file says, in current keys --------------------------------------------------------------------------------


def understand(raw: Config, *, name: str = "the DeepSpeed configuration") -> tuple[Config, tuple[str, ...]]:
    """The configuration in DeepSpeed's current keys, and notes on what was translated or left out.

    Raises:
        ConfigError: a key is unknown (the nearest known one is named), was removed while it is switched on, or holds
            a value of the wrong kind. All of them at once.
    """
    config = copy.deepcopy(raw)
    notes: list[str] = []
    problems: list[str] = []
    for step in (_drop_comments, _expand_switches, _rename, _drop_removed, _drop_bf16_scaling):
        step(config, notes, problems)
    problems += _unknown(config)
    if not problems:
        problems += _wrong_values(config)
    if problems:
        raise ConfigError("\n".join(f"{name}: {problem}" for problem in problems))
    return config, tuple(notes)


def _drop_comments(config: Config, notes: list[str], problems: list[str]) -> None:
    """Keys such as `_comment`, which people use for comments in JSON."""
    for path, section in _sections(config):
        for key in [key for key in section if _COMMENT.fullmatch(str(key))]:
            del section[key]
            notes.append(f"{_join(path, key)} is read as a comment")


def _expand_switches(config: Config, notes: list[str], problems: list[str]) -> None:
    """`"bf16": true` for a section with `enabled`, and `"zero_optimization": true`, ZeRO's first format."""
    for key in ("bf16", "bfloat16", "fp16", "torch_autocast"):
        if isinstance(config.get(key), bool) or config.get(key) == AUTO:
            config[key] = {"enabled": config[key]}
            notes.append(f'{key}: {_show(config[key]["enabled"])} is read as {{"enabled": …}}')
    zero = config.get("zero_optimization")
    if isinstance(zero, bool):
        config["zero_optimization"] = {"stage": int(zero)}
        notes.append(f"zero_optimization: {_show(zero)} is read as stage {int(zero)}, as in ZeRO's first format")
        if "allgather_size" in config:
            config["zero_optimization"]["allgather_bucket_size"] = config.pop("allgather_size")
            notes.append("allgather_size is read as zero_optimization.allgather_bucket_size, its current name")


def _rename(config: Config, notes: list[str], problems: list[str]) -> None:
    for old, new in keys.RENAMED.items():
        holder, key = _holder(config, old)
        if holder is None or key not in holder:
            continue
        value = holder.pop(key)
        meaning = _meaning(old, value, config)
        if meaning is None:
            notes.append(f"{old}: {_show(value)} is an old key that changes nothing; left out")
            continue
        present = _get(config, new)
        both = isinstance(present, dict) and isinstance(meaning, dict)
        is_covered = present == meaning or (both and meaning.items() <= present.items())
        if present is not None and not is_covered:
            problems.append(
                f"{old}: {_show(value)} (an old key) and {new}: {_show(present)} (its current name) disagree; "
                f"keep {new} only"
            )
        elif present is None:
            _put(config, new, meaning)
            notes.append(f"{old}: {_show(value)} is an old key; read as {new}: {_show(meaning)}")
        else:
            notes.append(f"{old}: {_show(value)} is an old key that repeats {new}; left out")


def _meaning(old: str, value: Any, config: Config) -> Any:
    """The new key's value for an old key's value; None where the old one changes nothing."""
    if old.endswith(("cpu_offload", "cpu_offload_param", "cpu_offload_params")):
        return {"device": "cpu"} if value is True else None if value in (False, None) else value
    if old.endswith("cpu_offload_use_pin_memory"):
        # Pins only what is offloaded. `cpu_offload` stands before it in RENAMED, so it is a section by now.
        return value if isinstance(_get(config, "zero_optimization.offload_optimizer"), dict) else None
    if old in ("fp32_allreduce", "allreduce_always_fp32"):
        return "fp32" if value is True else None
    return value


def _drop_removed(config: Config, notes: list[str], problems: list[str]) -> None:
    for path, reason in keys.REMOVED.items():
        holder, key = _holder(config, path)
        if holder is None or key not in holder:
            continue
        value = holder[key]
        switched = value.get("enabled", True) if isinstance(value, dict) else value
        if switched in (False, None, -1) or value == {}:
            del holder[key]
            notes.append(f"{path}, which newer versions of DeepSpeed refuse, is switched off and left out")
        else:
            problems.append(f"{path} was removed from DeepSpeed: {reason}; remove the key")
            del holder[key]


def _drop_bf16_scaling(config: Config, notes: list[str], problems: list[str]) -> None:
    section = config.get("bf16")
    extra = sorted(keys.LOSS_SCALING & set(section)) if isinstance(section, dict) else []
    if extra:
        config["bf16"] = {key: value for key, value in config["bf16"].items() if key not in extra}
        notes.append(
            f"bf16.{{{', '.join(extra)}}} left out: bfloat16 needs no loss scaling, and DeepSpeed refuses them"
        )


def _unknown(config: Config) -> list[str]:
    known = keys.known()
    problems = []
    for path, section in _sections(config):
        if path not in known:
            continue
        for key in section:
            if key not in known[path]:
                problems.append(f"{_join(path, key)} is not a DeepSpeed key; {_nearest(path, str(key), known)}")
    return problems


def _nearest(path: str, key: str, known: keys.Sections) -> str:
    """What an unknown key at `path` may mean."""
    elsewhere = [section for section, names in known.items() if key in names and section != path]
    if elsewhere:
        homes = sorted(elsewhere, key=lambda section: (section.count("."), section not in ("", "zero_optimization")))
        return f"it belongs at {' or '.join(_join(home, key) for home in homes[:3])}"
    flat = {_flat(name): name for name in sorted(known[path])}
    near = difflib.get_close_matches(_flat(key), flat, n=1, cutoff=0.5)
    if near:
        return f"the nearest is {_join(path, flat[near[0]])}"
    everywhere = {_flat(name): _join(section, name) for section, names in known.items() for name in sorted(names)}
    near = difflib.get_close_matches(_flat(key), everywhere, n=1, cutoff=0.6)
    if near:
        return f"the nearest is {everywhere[near[0]]}"
    near = difflib.get_close_matches(_flat(key), flat, n=1, cutoff=0.0)
    return f"the nearest is {_join(path, flat[near[0]])}"


def _flat(key: str) -> str:
    return re.sub(r"[^a-z0-9]", "", key.lower())


# --- values -----------------------------------------------------------------------------------------------------------

Check = Callable[[Any], bool]


def _whole(value: Any, *, least: int) -> bool:
    return _number(value) and value == int(value) and bool(value >= least)


def _number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value) and value >= 0


def _check_of(path: str) -> tuple[Check, str] | None:
    """A test of a key's values, and what it accepts in words; None where DeepSpeed itself checks."""
    section, _, key = path.rpartition(".")
    if path in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        return (lambda value: isinstance(value, int) and _whole(value, least=1)), 'a whole number from 1, or "auto"'
    if path == "gradient_clipping":
        return _number, 'a number from 0 (0: no clipping), or "auto"'
    if path == "zero_optimization.stage":
        return (lambda value: _whole(value, least=0) and value <= 3), '0, 1, 2, 3 or "auto"'
    if section in ("zero_optimization.offload_optimizer", "zero_optimization.offload_param") and key == "device":
        return (lambda value: value in ("none", "cpu", "nvme")), '"none", "cpu" or "nvme"'
    if key in ("enabled", "pin_memory", "overlap_comm", "contiguous_gradients", "reduce_scatter"):
        return (lambda value: isinstance(value, bool)), 'true, false or "auto"'
    if section == "zero_optimization" and re.search(r"_(size|threshold|parameters|distance)$", key):
        return (lambda value: _whole(value, least=0)), 'a whole number without quotes, or "auto"'
    return None


def _wrong_values(config: Config) -> list[str]:
    problems = []
    known = keys.known()
    for path, value in _leaves(config):
        if value is not None and (path in known or path in ("optimizer.params", "scheduler.params")):
            inside = f" with {', '.join(sorted(known[path]))}" if path in known else ""
            problems.append(f"{path}: {_show(value)} is not a section; expected {{…}}{inside}")
            continue
        check = _check_of(path)
        if check and value not in (AUTO, None) and not check[0](value):
            problems.append(f"{path}: {_show(value)} is not valid; expected {check[1]}")
    # These change which ranks hold what: the run would not be the planned one.
    for path in ("sequence_parallel_size", "tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size"):
        if _number(size := _get(config, path)) and size > 1:
            problems.append(
                f"{path}: {size} splits rows or layers over ranks; only ZeRO's data-parallel layouts are supported"
            )
    for path in ("expert_parallel", "autotuning", "data_efficiency"):
        if _get(config, f"{path}.enabled") is True:
            problems.append(f"{path}.enabled: true is not supported: the plan does not model it; remove the section")
    return problems


# --- what it means ----------------------------------------------------------------------------------------------------


def layout_of(config: Config, *, name: str = "the DeepSpeed configuration", planned: str = "zero2") -> LayoutName:
    """The layout that a translated configuration asks for; where its stage is "auto" or absent, that of `planned`.

    Raises:
        ConfigError: it shards nothing (stage 0), or offloads weights that it does not shard.
    """
    zero = config.get("zero_optimization") or {}
    stage = zero.get("stage", AUTO)
    stage = STAGES[planned][0] if stage in (AUTO, None) else int(stage)
    states, weights = _offloaded(zero, "offload_optimizer"), _offloaded(zero, "offload_param")
    if stage == 0:
        raise ConfigError(
            f"{name}: zero_optimization.stage 0 shards nothing: every GPU would hold the whole model; "
            "set stage 1, 2 or 3, or ask for STRATEGY=ddp"
        )
    if weights and stage < 3:
        raise ConfigError(f"{name}: offload_param needs stage 3 and the stage is {stage}; set stage 3 or remove it")
    return LAYOUTS[stage, states]


def layout_notes(config: Config, *, planned: str = "zero2") -> tuple[str, ...]:
    """Where a file differs from the layout that it is planned as."""
    zero = config.get("zero_optimization") or {}
    notes = []
    layout = layout_of(config, planned=planned)
    states, weights = _offloaded(zero, "offload_optimizer"), _offloaded(zero, "offload_param")
    if states and layout == "zero1":
        notes.append("optimizer states go to RAM; the plan for zero1 has them on the GPUs, so it needs less than that")
    if weights and layout == "zero3":
        notes.append("weights go to RAM; the plan for zero3 has them on the GPUs, so it needs less than that")
    if keeps_params(config, layout):
        notes.append("no offload_param: the weights stay on the GPUs, and are planned there")
    for key in ("offload_optimizer", "offload_param"):
        if isinstance(zero.get(key), dict) and zero[key].get("device") == "nvme":
            notes.append(f"{key} goes to NVMe ({zero[key].get('nvme_path')}); its speed is not planned")
    return tuple(notes)


def keeps_params(config: Config, layout: LayoutName) -> bool:
    """Whether a file that asks for `zero3_offload` offloads only the optimizer states."""
    return layout == "zero3_offload" and not _offloaded(config.get("zero_optimization") or {}, "offload_param")


def _offloaded(zero: Config, key: str) -> bool:
    section = zero.get(key)
    return isinstance(section, dict) and section.get("device", "none") in ("cpu", "nvme")


# --- the batch, which the plan takes into account ---------------------------------------------------------------------

_BATCH_KEYS = {
    "train_micro_batch_size_per_gpu": "batch_size",
    "gradient_accumulation_steps": "grad_accum",
    "train_batch_size": "effective_batch_size",
}
"""DeepSpeed's batch keys and the run YAML's."""


def with_batch(
    train: TrainConfig, config: Config, *, ranks: int, name: str = "the DeepSpeed configuration"
) -> tuple[TrainConfig, tuple[str, ...]]:
    """The run's settings with the batch of a translated configuration where the run YAML leaves it open, and a line for
    each value taken from it.

    Micro-batch and accumulation are open where the run YAML says "auto", the effective batch where it does not set
    one; where both others are known it is their product with the data-parallel `ranks`.

    Raises:
        ConfigError: a number of the file contradicts one that the run YAML gives, or they do not multiply; both are
            named, all contradictions at once.
    """
    given_batch = {key: value for key in _BATCH_KEYS if isinstance(value := config.get(key), int)}
    if not given_batch:
        return train, ()
    given = {field: value for field in ("batch_size", "grad_accum") if (value := getattr(train, field)) != AUTO}
    if "effective_batch_size" in train.model_fields_set:
        given["effective_batch_size"] = train.effective_batch_size
    taken: dict[str, int] = {}
    sources = {field: f"train.{field}={value}" for field, value in given.items()}
    lines, problems = [], []
    for key, value in given_batch.items():
        field = _BATCH_KEYS[key]
        if given.get(field, value) != value:
            problems.append(f'{key}: {value} contradicts train.{field}={given[field]}; keep one of them ("auto" here)')
        elif field not in given:
            taken[field], sources[field] = value, f"{key}: {value}"
            lines.append(f"{key}: {value} is the run's train.{field}, which the run YAML leaves open")
    if not problems:
        numbers = given | taken
        micro, accum = (numbers.get(field) for field in ("batch_size", "grad_accum"))
        if "effective_batch_size" not in numbers and micro and accum:
            taken["effective_batch_size"] = micro * accum * ranks
            lines.append(f"train.effective_batch_size → {micro} × {accum} × {ranks} ranks = {micro * accum * ranks}, "
                         "which neither file gives")  # fmt: skip
        problems += _not_a_product(train.model_copy(update=taken), sources, ranks)
    if problems:
        raise ConfigError("\n".join(f"{name}: {problem}" for problem in problems))
    return train.model_copy(update=taken), tuple(lines)


def _not_a_product(train: TrainConfig, sources: dict[str, str], ranks: int) -> list[str]:
    """What is wrong with values that do not multiply to the effective batch."""
    micro, accum = (1 if value == AUTO else int(value) for value in (train.batch_size, train.grad_accum))
    effective, unit = train.effective_batch_size, micro * accum * ranks
    both = AUTO not in (train.batch_size, train.grad_accum)
    if (effective == unit) if both else effective % unit == 0:
        return []
    parts = [sources[field] for field in ("batch_size", "grad_accum") if field in sources]
    wanted = sources.get("effective_batch_size", f"train.effective_batch_size={effective} (its default)")
    product = " × ".join([*parts, f"{ranks} ranks"])
    verb = "is not" if both else "is not a multiple of"
    near = unit if both else max(unit, round(effective / unit) * unit)
    return [f"{wanted} {verb} {product} = {unit}; an effective batch of {near} is"]


# --- dtypes of communication, which the plan takes into account -------------------------------------------------------

_DTYPE_KEYS = {"communication_data_type": "reduce", "data_types.buffer_dtype": "buffer"}
"""DeepSpeed's keys and the run YAML's under distributed.mixed_precision."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
SHORT_DTYPES = {ours: theirs for theirs, ours in _DTYPES.items()}
"""DeepSpeed's names for our dtypes."""


def with_dtypes(
    mixed: MixedPrecisionConfig, config: Config, *, name: str = "the DeepSpeed configuration"
) -> tuple[MixedPrecisionConfig, tuple[str, ...]]:
    """The run's dtypes with those of a translated configuration where the run YAML says auto, and a line for each.

    Raises:
        ConfigError: a dtype of the file contradicts the run YAML's, or is not one.
    """
    taken, lines, problems = dict[str, str](), [], []
    for key, field in _DTYPE_KEYS.items():
        theirs, path = _get(config, key), f"distributed.mixed_precision.{field}"
        if theirs in (None, AUTO):
            continue
        ours, given = _DTYPES.get(str(theirs).lower()), getattr(mixed, field)
        if ours is None:
            problems.append(f"{key}: {_show(theirs)} is not valid; expected {', '.join(_DTYPES)}")
        elif given not in (AUTO, ours):
            problems.append(f"{key}: {theirs} contradicts {path}={given}; keep one of them")
        elif given == AUTO:
            taken[field] = ours
            lines.append(f"{key}: {theirs} is the run's {path}, which the run YAML leaves open")
    if problems:
        raise ConfigError("\n".join(f"{name}: {problem}" for problem in problems))
    return mixed.model_copy(update=taken), tuple(lines)


def _fill_dtypes(config: Config, numbers: PlanNumbers, shown: list[str]) -> list[str]:
    for key, field in _DTYPE_KEYS.items():
        wanted = getattr(numbers, field)
        if wanted is not None and _get(config, key) != wanted:
            _put(config, key, wanted)
            shown.append(f"{key} → {wanted} (distributed.mixed_precision.{field})")
    return []


# --- filled from the plan ---------------------------------------------------------------------------------------------


def fill(
    config: Config,
    numbers: PlanNumbers,
    *,
    name: str = "the DeepSpeed configuration",
    torch_adam: str | None = None,
) -> tuple[Config, tuple[str, ...]]:
    """A translated configuration with every "auto" resolved, and a line for each value that the plan supplied.

    `torch_adam` is the reason why DeepSpeed's own CPU Adam cannot run (`adam_obstacles`): torch's AdamW then updates
    the offloaded states. Optimizer and schedule are the run YAML's; a file's blocks that agree with it are left out.

    Raises:
        ConfigError: a number of the file contradicts the plan; both are named, all contradictions at once.
    """
    resolved = copy.deepcopy(config)
    shown: list[str] = []
    problems: list[str] = []
    layout = layout_of(config, name=name, planned=numbers.layout)
    if layout != numbers.layout:
        problems.append(
            f"the file asks for {layout}, but the plan is for {numbers.layout}; leave STRATEGY= out, or name another "
            "file"
        )
    for step in (_fill_batch, _fill_precision, _fill_dtypes, _fill_zero, _fill_optimizer, _fill_scheduler):
        problems += step(resolved, numbers, shown)
    if problems:
        raise ConfigError("\n".join(f"{name}: {problem}" for problem in problems))
    if not resolved.get("zero_allow_untested_optimizer"):  # DeepSpeed stops at optimizer classes that it does not know
        resolved["zero_allow_untested_optimizer"] = True
        shown.append("zero_allow_untested_optimizer → true (train.optim is the plan's choice)")
    if torch_adam and _offloaded(resolved["zero_optimization"], "offload_optimizer"):
        resolved["zero_force_ds_cpu_optimizer"] = False
        shown.append(
            f"zero_force_ds_cpu_optimizer → false: torch's AdamW steps on the CPU instead, more slowly ({torch_adam})"
        )
    _drop_autos(resolved, shown)
    return resolved, tuple(shown)


def _fill_batch(config: Config, numbers: PlanNumbers, shown: list[str]) -> list[str]:
    product = f"{numbers.micro_batch} × {numbers.grad_accum} × {numbers.data_parallel_ranks} ranks"
    wanted = {
        "train_batch_size": (numbers.effective_batch, f"micro-batch × accumulation × ranks: {product}"),
        "train_micro_batch_size_per_gpu": (numbers.micro_batch, "the plan's micro-batch"),
        "gradient_accumulation_steps": (numbers.grad_accum, "the plan's accumulation"),
    }
    problems = []
    for key, (value, why) in wanted.items():
        present = config.get(key, AUTO)
        if present in (AUTO, None):
            config[key] = value
            shown.append(f"{key} → {value} ({why})")
        elif present != value:
            problems.append(
                f"{key}: {present} contradicts the plan's {value} ({product} = {numbers.effective_batch}); "
                f'set it to "auto", or run with train.{_BATCH_KEYS[key]}={present}'
            )
    norm = config.get("gradient_clipping", AUTO)
    if norm in (AUTO, None):
        config["gradient_clipping"] = numbers.max_grad_norm
        shown.append(f"gradient_clipping → {numbers.max_grad_norm:g} (train.max_grad_norm)")
    elif float(norm) != float(numbers.max_grad_norm):
        problems.append(
            f"gradient_clipping: {norm:g} contradicts train.max_grad_norm: {numbers.max_grad_norm:g}; "
            f'set it to "auto", or run with train.max_grad_norm={norm:g}'
        )
    return problems


def _fill_precision(config: Config, numbers: PlanNumbers, shown: list[str]) -> list[str]:
    """`bf16.enabled` and `fp16.enabled` by the run's compute dtype, whatever the file says: it may have been written
    for another machine. To DeepSpeed, absent means disabled."""
    changed = []
    for key, compute in (("bf16", "bfloat16"), ("fp16", "float16")):
        wanted = numbers.compute == compute
        section = config.get(key)
        if section is None and not wanted:
            continue
        section = {} if section is None else section
        config[key] = section
        present = section.get("enabled", AUTO)
        if present in (AUTO, None):
            section["enabled"] = wanted
            shown.append(f"{key}.enabled → {_show(wanted)} (the run computes in {numbers.compute})")
        elif present is not wanted:
            section["enabled"] = wanted
            changed.append(f"{key}.enabled: {_show(present)} → {_show(wanted)}")
    autocast = config.get("torch_autocast")
    on = autocast if isinstance(autocast, dict) and autocast.get("enabled") is True else None
    if on is not None and _dtype_name(on.get("dtype")) != numbers.compute:
        on["enabled"] = False
        changed.append("torch_autocast.enabled: true → false")
    if changed:
        shown.append(f"{', '.join(changed)} (the run computes in {numbers.compute}, as train.bf16 and train.fp16 "
                     "choose)")  # fmt: skip
    return []


def _dtype_name(value: Any) -> str:
    """A dtype as DeepSpeed's `torch_autocast` names it (default bfloat16), as torch's name."""
    name = str(value).removeprefix("torch.")
    short = {AUTO: "bfloat16", "None": "bfloat16", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
    return short.get(name, name)


def _fill_zero(config: Config, numbers: PlanNumbers, shown: list[str]) -> list[str]:
    zero = config.get("zero_optimization") or {}
    config["zero_optimization"] = zero
    stage = STAGES[numbers.layout][0]
    if zero.get("stage", AUTO) in (AUTO, None):
        zero["stage"] = stage
        shown.append(f"zero_optimization.stage → {stage} (the plan's layout, {numbers.layout})")
    square = numbers.hidden_size**2
    formulas = {"reduce_bucket_size": (square, "hidden size squared")}
    if stage == 3:
        formulas["stage3_prefetch_bucket_size"] = (int(0.9 * square), "0.9 × hidden size squared")
        formulas["stage3_param_persistence_threshold"] = (10 * numbers.hidden_size, "10 × hidden size")
        if zero.get("stage3_gather_16bit_weights_on_model_save") is not True:
            zero["stage3_gather_16bit_weights_on_model_save"] = True
            shown.append("zero_optimization.stage3_gather_16bit_weights_on_model_save → true (checkpoints hold whole "
                         "weights)")  # fmt: skip
    if "reduce_bucket_size" not in zero:  # DeepSpeed's default, 5e8 elements, would take another GiB
        zero["reduce_bucket_size"] = AUTO
    for key, (value, how) in formulas.items():
        if zero.get(key) == AUTO:
            zero[key] = value
            shown.append(f"zero_optimization.{key} → {value:,} ({how}: {numbers.hidden_size:,})")
    return []


_ADAM_SWITCHES = ("torch_adam", "adam_w_mode", "bias_correction")
"""Parameters that choose an AdamW implementation; all of them compute the same update."""


def _fill_optimizer(config: Config, numbers: PlanNumbers, shown: list[str]) -> list[str]:
    """The plan counted the run YAML's optimizer; a block may repeat it, but not change it."""
    block = config.pop("optimizer", None)
    if block is None:
        return []
    kind = block.get("type", AUTO)
    problems = []
    if str(kind).lower() not in ("adam", "adamw", AUTO):
        problems.append(f"optimizer.type: {_show(kind)} is not supported; train.optim of the run YAML chooses")
    ours = {
        "lr": (numbers.learning_rate, "train.learning_rate"),
        "weight_decay": (numbers.weight_decay, "train.weight_decay"),
        "betas": (numbers.betas, "the run's (train.adam_beta2)"),
        "eps": (numbers.eps, "the run's"),
    }
    own_values = []
    for key, value in (block.get("params") or {}).items():
        planned, where = ours.get(key, (None, ""))
        if value == AUTO or (key in _ADAM_SWITCHES and isinstance(value, bool)):
            continue
        if key not in ours:
            problems.append(f"optimizer.params.{key}: {_show(value)} cannot be kept: the optimizer is the run YAML's")
        elif planned is not None and not same_numbers(value, planned):
            problems.append(
                f"optimizer.params.{key}: {_show(value)} contradicts {where}: {_show(planned)}; "
                'set it to "auto", or change the run YAML'
            )
        else:
            own_values.append(f"{key}: {_show(value)}")
    if (block.get("params") or {}).get("torch_adam") is True:
        config["zero_force_ds_cpu_optimizer"] = False
        shown.append("zero_force_ds_cpu_optimizer → false (optimizer.params.torch_adam: true asks for torch's AdamW)")
    repeated = f" ({', '.join(own_values)})" if own_values else ""
    shown.append(f"optimizer{repeated} left out: the run YAML's is used (train.optim, learning_rate, weight_decay)")
    return problems


def _fill_scheduler(config: Config, numbers: PlanNumbers, shown: list[str]) -> list[str]:
    """The schedule is the run YAML's: DeepSpeed's own would silently replace it."""
    block = config.pop("scheduler", None)
    if block is None:
        return []
    fixed = {key: value for key, value in (block.get("params") or {}).items() if value != AUTO}
    zeros = {key for key, value in fixed.items() if key == "warmup_min_lr" and value == 0}
    rest = {key: value for key, value in fixed.items() if key not in zeros | {"warmup_type"}}
    if rest:
        listed = ", ".join(f"{key}: {_show(value)}" for key, value in sorted(rest.items()))
        return [
            f"scheduler.params has its own numbers ({listed}) and the run YAML has a schedule too "
            '(train.lr_scheduler_type, warmup_steps); remove the scheduler block, or set its numbers to "auto"'
        ]
    shown.append("scheduler left out: the run YAML's is used (train.lr_scheduler_type, warmup_steps)")
    return []


def _drop_autos(config: Config, shown: list[str]) -> None:
    """Remove each unresolved "auto": some sections of DeepSpeed read it as the default, others crash."""
    for path, value in list(_leaves(config)):
        if value == AUTO and not path.startswith(keys.AUTO_IS_A_VALUE):
            holder, key = _holder(config, path)
            assert holder is not None
            del holder[key]
            shown.append(f'{path}: "auto" left out (DeepSpeed\'s default)')


def same_numbers(one: Any, other: Any) -> bool:
    """Whether two numbers, or lists of numbers, are numerically equal."""
    try:
        if isinstance(one, list | tuple) or isinstance(other, list | tuple):
            return [float(item) for item in one] == [float(item) for item in other]
        return math.isclose(float(one), float(other), rel_tol=1e-12)
    except (TypeError, ValueError):
        return False


# --- DeepSpeed's own CPU optimizer ------------------------------------------------------------------------------------


def adam_obstacles() -> tuple[str, ...]:
    """What DeepSpeed lacks to build its CPU Adam at the first start: a C++ compiler, ninja, Python's headers.

    Empty where nothing is missing; the build itself may still fail. Sources: DeepSpeed's
    `op_builder/builder.py` (`jit_load`) and torch's `torch/utils/cpp_extension.py`, which reads `CXX`.
    """
    missing = []
    compiler = (os.environ.get("CXX") or "c++").split()[0]
    if shutil.which(compiler) is None and shutil.which("g++") is None:
        missing.append(f"no C++ compiler ({compiler})")
    if shutil.which("ninja") is None:
        missing.append("no ninja")
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        missing.append(f"no Python headers ({headers / 'Python.h'})")
    return tuple(missing)


# --- paths into plain data --------------------------------------------------------------------------------------------


def _join(path: str, key: str) -> str:
    return one_line(f"{path}.{key}" if path else str(key))


def _sections(config: Config, path: str = "") -> Iterator[tuple[str, Config]]:
    """Every mapping with its dotted path, the outer ones first."""
    yield path, config
    for key, value in list(config.items()):
        if isinstance(value, dict):
            yield from _sections(value, f"{path}.{key}" if path else str(key))


def _leaves(config: Config) -> Iterator[tuple[str, Any]]:
    for path, section in _sections(config):
        for key, value in list(section.items()):
            if not isinstance(value, dict):
                yield f"{path}.{key}" if path else str(key), value


def _holder(config: Config, path: str) -> tuple[Config | None, str]:
    """The mapping that would hold the last key of a path, None where it does not exist, and that key."""
    *outer, key = path.split(".")
    holder: Any = config
    for part in outer:
        holder = holder.get(part) if isinstance(holder, dict) else None
    return (holder if isinstance(holder, dict) else None), key


def _get(config: Config, path: str) -> Any:
    holder, key = _holder(config, path)
    return None if holder is None else holder.get(key)


def _put(config: Config, path: str, value: Any) -> None:
    *outer, key = path.split(".")
    for part in outer:
        config = config.setdefault(part, {})
    config[key] = value


def _show(value: Any) -> str:
    return yaml_io.show(list(value) if isinstance(value, tuple) else value)
