"""DeepSpeed's configuration: the shipped one of each ZeRO layout, a person's file as plain data in
current keys, what it decides of a run (the layout, and the batch where the run YAML leaves it
open), and every "auto" in it resolved from the plan.

DeepSpeed reads some sections with pydantic and refuses unknown keys there, with a traceback on
every rank; in all others, the top level first, an unknown key is ignored without a word. So
`deepspeed_keys.json` lists the keys that it knows, and those that it has renamed. Paths into a
configuration are dotted.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import re
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sft_play.config import yaml_io
from sft_play.config.options import optimizer_options
from sft_play.config.schema import DTYPE_ALIASES, RunConfig
from sft_play.errors import ConfigError
from sft_play.log import one_line
from sft_play.planner.batching import BatchPlan, batch_product_problem, is_single_rank_batch
from sft_play.planner.layout import LayoutName

logger = logging.getLogger(__name__)

DeepspeedConfig = dict[str, Any]

# Stands for a value that follows from the run. transformers' word, and ours: DeepSpeed knows it in
# few places (`PATHS_WITH_AUTO`).
AUTO = "auto"

# Layout: ZeRO stage, whether optimizer states are offloaded, whether weights are.
ZERO_STAGES: dict[LayoutName, tuple[int, bool, bool]] = {
    "zero1": (1, False, False),
    "zero2": (2, False, False),
    "zero3": (3, False, False),
    "zero2_offload": (2, True, False),
    "zero3_offload": (3, True, True),
}
ZERO_LAYOUTS = {(stage, states): name for name, (stage, states, _) in ZERO_STAGES.items()} | {
    (1, True): "zero1"
}
DEEPSPEED_FILE_DESCRIPTION = (
    "a DeepSpeed configuration in JSON or YAML, such as configs/deepspeed/zero2.json"
)


def shipped_deepspeed_config(layout: LayoutName) -> DeepspeedConfig:
    """The configuration of a ZeRO layout of `ZERO_STAGES`, its values "auto"; `configs/deepspeed/`
    holds the same. Raises ConfigError where the layout is not one that DeepSpeed runs."""
    if layout not in ZERO_STAGES:
        raise ConfigError(
            f"DeepSpeed has no layout {one_line(layout)}; it has {', '.join(ZERO_STAGES)}"
        )
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
            # else a checkpoint holds shards only
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
        # train.optim chooses; DeepSpeed knows its own and torch's Adam
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
    }


def read_deepspeed_file(path: Path, *, variable: str = "DEEPSPEED_CONFIG") -> DeepspeedConfig:
    """A person's file as plain data: JSON (comments and trailing commas allowed) or YAML; raises
    ConfigError where the file is missing, a folder, neither JSON nor YAML, no mapping, or holds a
    key twice. `variable`: what named it.
    """
    text = yaml_io.read_text(path, variable=variable, expected=DEEPSPEED_FILE_DESCRIPTION)
    name = one_line(str(path))
    # lines and columns stay
    json_text = _NOT_YAML.sub(lambda match: match[1] or re.sub(r"[^\n]", " ", match[0]), text)
    is_json = json_text.lstrip().startswith(("{", "[")) and path.suffix.lower() not in (
        ".yaml",
        ".yml",
    )
    data = yaml_io.parse_yaml_value(json_text if is_json else text, name=name)
    if not isinstance(data, dict):
        raise ConfigError(
            f"{name} holds {yaml_io.format_value(data)}; expected {DEEPSPEED_FILE_DESCRIPTION}"
        )
    return data


# What people write in JSON and a YAML parser, which reads plain JSON, refuses: comments, and tabs.
# Strings are matched first, so that the // of a URL begins no comment.
_NOT_YAML = re.compile(r'("(?:[^"\\\n]|\\.)*")|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)|\t', re.DOTALL)


def deepspeed_layout(
    config: DeepspeedConfig,
    *,
    name: str = "the DeepSpeed configuration",
    default_layout: LayoutName = "zero2",
) -> LayoutName:
    """The layout that a translated configuration asks for; a stage that is "auto" or absent is
    taken from `default_layout`. Raises ConfigError where it shards nothing (stage 0), or offloads
    weights that it does not shard."""
    zero = config.get("zero_optimization") or {}
    stage = zero.get("stage", AUTO)
    stage = ZERO_STAGES[default_layout][0] if stage in (AUTO, None) else int(stage)
    if stage == 0:
        raise ConfigError(
            f"{name}: zero_optimization.stage 0 shards nothing: every GPU would hold the whole"
            " model; set stage 1, 2 or 3, or ask for STRATEGY=ddp"
        )
    if stage < 3 and is_offloaded(zero, "offload_param"):
        raise ConfigError(
            f"{name}: offload_param needs stage 3 and the stage is {stage}; set stage 3 or"
            " remove it"
        )
    return ZERO_LAYOUTS[stage, is_offloaded(zero, "offload_optimizer")]


def keeps_params_on_gpu(config: DeepspeedConfig, layout: LayoutName) -> bool:
    """Whether a file that asks for `zero3_offload` offloads only the optimizer states."""
    return layout == "zero3_offload" and not is_offloaded(
        config.get("zero_optimization") or {}, "offload_param"
    )


# Where DeepSpeed moves optimizer states and weights.
OFFLOAD_DEVICES = ("cpu", "nvme")


def is_offloaded(zero: DeepspeedConfig, key: str) -> bool:
    """Whether the section `key` of `zero_optimization` moves something off the GPUs."""
    section = zero.get(key)
    return isinstance(section, dict) and section.get("device") in OFFLOAD_DEVICES


BATCH_KEYS = {
    "train_micro_batch_size_per_gpu": "batch_size",
    "gradient_accumulation_steps": "grad_accum",
    "train_batch_size": "effective_batch_size",
}


def apply_deepspeed_batch(
    config: RunConfig, deepspeed_config: DeepspeedConfig, *, ranks: int, name: str
) -> RunConfig:
    """The run's settings with the batch of a translated configuration where the run YAML leaves it
    open (micro-batch and accumulation "auto", the effective batch not set). Raises ConfigError
    where numbers of the two contradict each other, or do not multiply over the data-parallel
    `ranks`; all of them at once."""
    train = config.train
    source_texts = {
        "effective_batch_size": (
            f"train.effective_batch_size={train.effective_batch_size} (its default)"
        )
    }
    run_values, file_values, taken_values = {}, {}, {}
    problems = []
    for key, field_name in BATCH_KEYS.items():
        value, file_value = getattr(train, field_name), deepspeed_config.get(key)
        # the effective batch has a number as its default: it is given where the YAML or SET holds
        # it
        if value != AUTO and (
            field_name != "effective_batch_size" or field_name in train.model_fields_set
        ):
            run_values[field_name] = value
            source_texts[field_name] = f"train.{field_name}={value}"
        if not isinstance(file_value, int):  # "auto"
            continue
        file_values[field_name] = file_value
        if field_name not in run_values:
            taken_values[field_name] = file_value
            source_texts[field_name] = f"{key}: {file_value}"
        elif value != file_value:
            problems.append(
                f"{key}: {file_value} contradicts train.{field_name}={value}; keep one of them"
                ' ("auto" here)'
            )
    if not file_values:
        return config
    micro_batch, grad_accum = (
        (run_values | taken_values).get(name) for name in ("batch_size", "grad_accum")
    )
    if "effective_batch_size" not in run_values | taken_values and micro_batch and grad_accum:
        taken_values["effective_batch_size"] = micro_batch * grad_accum * ranks
    merged = train.model_copy(update=taken_values)
    # a YAML of one rank is kept over several, unless the file repeats its numbers of a rank
    is_kept = is_single_rank_batch(train) and file_values.keys() == {"effective_batch_size"}
    if not problems and not is_kept:
        problems += filter(
            None, [batch_product_problem(merged, ranks=ranks, option_texts=source_texts)]
        )
    if problems:
        raise ConfigError("\n".join(f"{name}: {problem}" for problem in problems))
    logger.debug("%s gives, where the run YAML leaves it open: %s", name, taken_values)
    return config.model_copy(update={"train": merged})


SHORT_DTYPES = {short_name: name for name, short_name in DTYPE_ALIASES.items()}

# --- in current keys ------------------------------------------------------------------------------
_KEY_TABLE: dict[str, Any] = json.loads(
    Path(__file__).with_name("deepspeed_keys.json").read_text(encoding="utf-8")
)


# The keys of each section by its dotted path ("" is the top level). Sections that are not here are
# open: what they may contain depends on their values. `sequence_parallel_size` and `inference` are
# read by transformers and by DeepSpeed's ZeRO-3 loading.
KNOWN_DEEPSPEED_KEYS: dict[str, frozenset[str]] = {
    path: frozenset(
        [
            *section["keys"].split(),
            # some of ZeRO's may be written with this prefix (pydantic's `populate_by_name`)
            *(
                prefix + key
                for key in section.get("with_and_without_stage3_", "").split()
                for prefix in ("", "stage3_")
            ),
        ]
    )
    for path, section in _KEY_TABLE["sections"].items()
}

# Paths where DeepSpeed itself understands "auto".
PATHS_WITH_AUTO: tuple[str, ...] = tuple(_KEY_TABLE["auto_is_a_value"])

_COMMENT_KEY = re.compile(r"_.*|//.*|#.*|comments?", re.IGNORECASE)


def translate_deepspeed_keys(
    raw: DeepspeedConfig, *, name: str = "the DeepSpeed configuration"
) -> DeepspeedConfig:
    """The configuration in DeepSpeed's current keys, without comments. Raises ConfigError where a
    key is unknown, or holds a value of the wrong kind, or one that would make another run than is
    planned; all of them at once.
    """
    values = {
        ".".join(map(str, path)): copy.deepcopy(value)
        for path, value in yaml_io.walk_leaves(raw)
        if value is not None and path and not any(_COMMENT_KEY.fullmatch(str(key)) for key in path)
    }
    problems = []
    for old, new in _KEY_TABLE["renamed"].items():
        for path in _paths_below(values, old):
            value, new_path = values.pop(path), new + path.removeprefix(old)
            # a switch, now a section
            if path == old and "cpu_offload" in old and isinstance(value, bool):
                # guides keep it, switched off, beside its section
                if not value and _paths_below(values, new):
                    continue
                new_path, value = f"{new}.device", "cpu" if value else "none"
            logger.debug(
                "DeepSpeed: %s is an old key, read as %s: %s",
                path,
                new_path,
                yaml_io.format_value(value),
            )
            if values.setdefault(new_path, value) != value:
                problems.append(
                    f"{path} (an old key) and {new_path}: {yaml_io.format_value(values[new_path])}"
                    " disagree; keep one"
                )
    for path in values:
        section = ""
        for key in path.split("."):
            inner = f"{section}.{key}" if section else key
            if section in KNOWN_DEEPSPEED_KEYS and key not in KNOWN_DEEPSPEED_KEYS[section]:
                problems.append(
                    f"{one_line(inner)} is not a DeepSpeed key; remove it, or write the one that is"
                    " meant"
                )
                break
            section = inner
    if not problems:  # a value under a wrong key would be reported twice
        for path, value in values.items():
            if path in KNOWN_DEEPSPEED_KEYS or path in ("optimizer.params", "scheduler.params"):
                if value != {}:
                    problems.append(f"{path}: {yaml_io.format_value(value)} is not a section")
                continue
            for pattern, is_valid, expected in _VALUE_CHECKS:
                if re.fullmatch(pattern, path) and value != AUTO and not is_valid(value):
                    problems.append(
                        f"{path}: {yaml_io.format_value(value)} is not valid; expected {expected}"
                    )
    if problems:
        raise ConfigError("\n".join(f"{name}: {problem}" for problem in dict.fromkeys(problems)))
    return yaml_io.nest_values(values)


def _paths_below(values: Mapping[str, Any], path: str) -> list[str]:
    return [inner for inner in values if inner == path or inner.startswith(f"{path}.")]


# --- values that our own code reads, or that would make the run another one than was planned ------
def _is_number(value: Any) -> bool:
    return (
        not isinstance(value, bool)
        and isinstance(value, int | float)
        and math.isfinite(value)
        and value >= 0
    )


# Of a path the test of its values, and what it accepts; DeepSpeed itself checks the others.
_VALUE_CHECKS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "train_batch_size|train_micro_batch_size_per_gpu|gradient_accumulation_steps",
        lambda value: type(value) is int and value >= 1,
        'a whole number from 1, or "auto"',
    ),
    ("gradient_clipping", _is_number, 'a number from 0 (0: no clipping), or "auto"'),
    (
        r"sequence_parallel_size|tensor_parallel\.(autotp_size|tp\.tp_size)",
        lambda value: not _is_number(value) or value <= 1,
        (
            "1: only ZeRO's data-parallel layouts are supported, which split neither rows nor"
            " layers over ranks"
        ),
    ),
    (
        "communication_data_type",
        lambda value: False,
        '"auto": distributed.mixed_precision.reduce of the run YAML sets it',
    ),
    (
        r"data_types\.buffer_dtype",
        lambda value: False,
        '"auto": distributed.mixed_precision.buffer of the run YAML sets it',
    ),
    (
        r"(expert_parallel|autotuning|data_efficiency)\.enabled",
        lambda value: value is False,
        "false: the plan does not model it",
    ),
    (
        r"zero_optimization\.stage",
        lambda value: _is_number(value) and value in (0, 1, 2, 3),
        '0, 1, 2, 3 or "auto"',
    ),
    (
        r"zero_optimization\.offload_(optimizer|param)\.device",
        lambda value: value in ("none", "cpu", "nvme"),
        '"none", "cpu" or "nvme"',
    ),
)


# --- every "auto" resolved from the plan ----------------------------------------------------------
# The formulas for "auto" are those of transformers (https://github.com/huggingface/transformers:
# `src/transformers/integrations/deepspeed.py`), so a file that works with the Trainer means the
# same here.

# Keys of `zero_optimization` whose "auto" follows from the model's widest hidden size: the number
# of elements.
HIDDEN_SIZE_FORMULAS: dict[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda size: size * size,
    "stage3_prefetch_bucket_size": lambda size: int(0.9 * size * size),
    "stage3_param_persistence_threshold": lambda size: 10 * size,
}


@dataclass(frozen=True)
class PlanValues:
    """What DeepSpeed needs from a plan. `hidden_size` is the model's widest."""

    layout: LayoutName
    batch: BatchPlan
    hidden_size: int
    compute_dtype: Literal["bfloat16", "float16", "float32"]
    # The training options by their paths in DeepSpeed's file: key of the run YAML, value.
    options: Mapping[str, tuple[str, Any]]
    # Dtype in which gradients are sent, in DeepSpeed's spelling; None: as computed.
    reduce: str | None = None
    # Dtype that buffers are cast to; None: unchanged.
    buffer: str | None = None


def deepspeed_options(config: RunConfig) -> dict[str, tuple[str, Any]]:
    """The training options that DeepSpeed's file has, by their paths in it: key of the run YAML,
    value."""
    return {
        option.external_names.deepspeed: (option.path, option.value(config))
        for option in optimizer_options()
        if option.external_names.deepspeed
    }


def fill_auto_values(
    config: DeepspeedConfig,
    plan_values: PlanValues,
    *,
    name: str = "the DeepSpeed configuration",
    adam_obstacle: str = "",
) -> DeepspeedConfig:
    """A translated configuration with every "auto" resolved. `adam_obstacle`: why DeepSpeed's own
    CPU Adam cannot run (`cpu_adam_obstacles`), so that torch's updates the offloaded states, more
    slowly. Optimizer and schedule are the run YAML's. Raises ConfigError where a number contradicts
    the plan; all of them at once."""
    values = {
        ".".join(map(str, path)): copy.deepcopy(value)
        for path, value in yaml_io.walk_leaves(config)
        if value not in (None, {})
    }
    problems = []
    layout = deepspeed_layout(config, name=name, default_layout=plan_values.layout)
    if layout != plan_values.layout:  # memory and speed were planned for another one
        problems.append(
            f"the file asks for {layout}, but the plan is for {plan_values.layout}; leave"
            " STRATEGY= out"
        )
    problems += [*_fill_from_plan(values, plan_values), *_drop_optimizer(values, plan_values)]
    # The dtype by the run's, whatever the file says: it may have been written for another machine.
    # To DeepSpeed, absent means disabled. Autocast is a second way to the same, and turned off.
    compute = plan_values.compute_dtype
    switches = {
        "bf16": compute == "bfloat16",
        "fp16": compute == "float16",
        "torch_autocast": False,
    }
    for key, is_enabled in switches.items():
        if is_enabled or f"{key}.enabled" in values:
            _set_value(values, f"{key}.enabled", is_enabled, f"the run computes in {compute}")
    dtypes = {"communication_data_type": "reduce", "data_types.buffer_dtype": "buffer"}
    for path, option in dtypes.items():
        dtype = getattr(plan_values, option)
        if dtype is not None:
            _set_value(values, path, dtype, f"distributed.mixed_precision.{option}")
    # the schedule is the run YAML's: DeepSpeed's own would silently replace it
    for path in _paths_below(values, "scheduler"):
        value = values.pop(path)
        if value != AUTO and path != "scheduler.type":
            problems.append(
                f"{path}: {yaml_io.format_value(value)}: the run YAML has the schedule"
                " (train.lr_scheduler_type, warmup_steps); remove the scheduler block, or set its"
                ' numbers to "auto"'
            )
    if problems:
        raise ConfigError("\n".join(f"{name}: {problem}" for problem in problems))
    if (
        adam_obstacle
        and values.get("zero_optimization.offload_optimizer.device") in OFFLOAD_DEVICES
    ):
        _set_value(
            values,
            "zero_force_ds_cpu_optimizer",
            False,
            f"torch's AdamW steps on the CPU: {adam_obstacle}",
        )
    filled = yaml_io.nest_values(values)
    drop_unresolved_autos(filled)
    return filled


def _set_value(values: dict[str, Any], path: str, value: Any, reason: str) -> None:
    if values.get(path) != value:
        values[path] = value
        logger.debug("DeepSpeed: %s → %s (%s)", path, yaml_io.format_value(value), reason)


def _fill_from_plan(values: dict[str, Any], plan: PlanValues) -> Iterator[str]:
    """Fill the values that the file leaves open with the plan's, and yield a problem for each
    number that contradicts the plan. They have to agree: DeepSpeed asserts that its three numbers
    of the batch multiply, and its engine clips by its own number only. Its default bucket, 5e8
    elements, would take another GiB."""
    stage = ZERO_STAGES[plan.layout][0]
    product = (
        f"{plan.batch.micro_batch} × {plan.batch.grad_accum} × {plan.batch.ranks} ranks ="
        f" {plan.batch.effective_batch}"
    )
    batch = {
        "train_batch_size": plan.batch.effective_batch,
        "train_micro_batch_size_per_gpu": plan.batch.micro_batch,
        "gradient_accumulation_steps": plan.batch.grad_accum,
    }
    # path, value, where it is from, and the key of the run YAML that a file must not contradict
    rows = [
        (key, value, f"the plan's {value} ({product})", f"train.{BATCH_KEYS[key]}")
        for key, value in batch.items()
    ]
    rows += [
        (path, value, f"{run_key}: {value:g}", run_key)
        for path, (run_key, value) in plan.options.items()
        if not path.startswith("optimizer.")
    ]
    for path, value, source, run_key in rows:
        if values.get(path, AUTO) == AUTO:
            _set_value(values, path, value, source)
        elif not are_numbers_equal(values[path], value):
            remedy = f'set it to "auto", or run with {run_key}={values[path]:g}'
            yield f"{path}: {values[path]:g} contradicts {source}; {remedy}"
    if values.get("zero_optimization.stage", AUTO) == AUTO:
        _set_value(values, "zero_optimization.stage", stage, f"the plan's layout, {plan.layout}")
    for key, formula in HIDDEN_SIZE_FORMULAS.items():
        path = f"zero_optimization.{key}"
        is_open = values.get(path) == AUTO or (key == "reduce_bucket_size" and path not in values)
        if is_open and (stage == 3 or key == "reduce_bucket_size"):
            _set_value(
                values, path, formula(plan.hidden_size), f"from the hidden size, {plan.hidden_size}"
            )
    if stage == 3:
        path = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
        _set_value(values, path, True, "checkpoints hold whole weights")
    # DeepSpeed stops at optimizer classes that it does not know
    _set_value(values, "zero_allow_untested_optimizer", True, "train.optim is the plan's choice")


def _drop_optimizer(values: dict[str, Any], plan: PlanValues) -> Iterator[str]:
    """Remove the optimizer's block, and yield a problem for each number in it that is not the run
    YAML's: the plan counted that optimizer."""
    block = {path: values.pop(path) for path in _paths_below(values, "optimizer")}
    beta2_key, beta2 = plan.options["optimizer.params.betas.1"]
    # where no option sets them, the defaults of transformers' `TrainingArguments`
    planned_options = {
        "optimizer.params.betas": (f"the run's ({beta2_key})", [0.9, beta2]),
        "optimizer.params.eps": ("the run's", 1e-8),
        **plan.options,
    }
    optimizer_type = block.pop("optimizer.type", AUTO)
    if str(optimizer_type).lower() not in ("adam", "adamw", AUTO):
        yield (
            f"optimizer.type: {yaml_io.format_value(optimizer_type)} is not supported; train.optim"
            " of the run YAML chooses"
        )
    for path, value in block.items():
        # torch_adam chooses between implementations of the same update
        if (
            value == AUTO
            or path.endswith(".torch_adam")
            or not path.startswith("optimizer.params.")
        ):
            continue
        # as they are without a word
        if value is True and path.endswith((".adam_w_mode", ".bias_correction")):
            continue
        source, planned = planned_options.get(path, ("the run YAML's optimizer, which has", None))
        if not are_numbers_equal(value, planned):
            yield (
                f"{path}: {yaml_io.format_value(value)} contradicts {source}:"
                f' {yaml_io.format_value(planned)}; set it to "auto"'
            )


def drop_unresolved_autos(config: DeepspeedConfig, path: str = "") -> None:
    """Remove each "auto" that nothing has resolved: some sections of DeepSpeed read it as the
    default, others crash. Those of the optimizer's and the scheduler's blocks stay: accelerate
    resolves them."""
    for key, value in list(config.items()):
        inner = f"{path}{key}"
        if isinstance(value, dict):
            drop_unresolved_autos(value, f"{inner}.")
        elif value == AUTO and not inner.startswith((*PATHS_WITH_AUTO, "optimizer.", "scheduler.")):
            del config[key]


def are_numbers_equal(first: Any, second: Any) -> bool:
    """Whether two numbers, or lists of numbers, are numerically equal."""
    try:
        if isinstance(first, list | tuple) or isinstance(second, list | tuple):
            return [float(item) for item in first] == [float(item) for item in second]
        return math.isclose(float(first), float(second), rel_tol=1e-12)
    except (TypeError, ValueError):
        return False


# --- DeepSpeed's CPU Adam, for offloaded optimizer states: can it be built? -----------------------
def cpu_adam_obstacles() -> tuple[str, ...]:
    """What DeepSpeed lacks to build its CPU Adam: a C++ compiler, ninja, Python's headers (its
    `op_builder/builder.py`, `jit_load`; torch's `utils/cpp_extension.py`, which reads `CXX`).
    Empty: nothing; the build may still fail.
    """
    missing = []
    # CXX may hold flags, or a wrapper before the compiler
    compiler = (os.environ.get("CXX") or "c++").split()[0]
    if shutil.which(compiler) is None and shutil.which("g++") is None:
        missing.append(f"no C++ compiler ({compiler})")
    if shutil.which("ninja") is None:
        missing.append("no ninja")
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        missing.append(f"no Python headers ({headers / 'Python.h'})")
    return tuple(missing)
