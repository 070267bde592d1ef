"""DeepSpeed's configuration: the shipped one of each ZeRO layout, a person's file as plain data in
current keys, and every "auto" in it resolved from the plan.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from sft_play.config import yaml_io
from sft_play.config.options import optimizer_options
from sft_play.config.schema import DTYPE_ALIASES, RunConfig, TrainConfig
from sft_play.config.yaml_io import format_value
from sft_play.errors import ConfigError
from sft_play.log import one_line
from sft_play.planner.batching import batch_product_problem, is_single_rank_batch
from sft_play.planner.layout import LayoutName
from sft_play.planner.plan import Plan
from sft_play.spelling import nearest_name

# A DeepSpeed configuration: the shipped one of each ZeRO layout, a person's file as plain data in
# current keys, and what it decides of a run: the layout, and the batch where the run YAML leaves it
# open.
#
# DeepSpeed reads some sections with pydantic and refuses unknown keys there, with a traceback on
# every rank; in all others, the top level first, an unknown key is ignored without a word. So
# `deepspeed_keys.json` lists the keys that it knows, those that it has renamed, and those that it has
# removed. Paths into a configuration are dotted.

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


def read_deepspeed_file(path: Path, *, variable: str = "DEEPSPEED_CONFIG") -> DeepspeedConfig:
    """A person's file as plain data: JSON (comments and trailing commas allowed) or YAML; raises ConfigError where the
    file is missing, a folder, neither JSON nor YAML, no mapping, or holds a key twice. `variable`: what named it."""
    text = yaml_io.read_text(path, variable=variable, expected=DEEPSPEED_FILE_DESCRIPTION)
    name = one_line(str(path))
    json_text = _NOT_YAML.sub(lambda match: match[1] or re.sub(r"[^\n]", " ", match[0]), text)  # lines and columns stay
    is_json = json_text.lstrip().startswith(("{", "[")) and path.suffix.lower() not in (".yaml", ".yml")
    data = yaml_io.parse_yaml_value(json_text if is_json else text, name=name)
    if not isinstance(data, dict):
        raise ConfigError(f"{name} holds {yaml_io.format_value(data)}; expected {DEEPSPEED_FILE_DESCRIPTION}")
    return data


# What people write in JSON that YAML, of which JSON is a part, does not take: comments, and tabs. Strings are matched
# first, so that the // of a URL begins no comment.
_NOT_YAML = re.compile(r'("(?:[^"\\\n]|\\.)*")|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)|\t', re.DOTALL)


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


def merge_deepspeed_batch(
    train: TrainConfig, config: DeepspeedConfig, *, ranks: int, name: str = "the DeepSpeed configuration"
) -> tuple[TrainConfig, tuple[str, ...]]:
    """The run's settings with the batch of a translated configuration where the run YAML leaves it open (micro-batch
    and accumulation "auto", the effective batch not set), and a line for each value taken from it. Raises ConfigError
    where numbers of the two contradict each other, or do not multiply over the data-parallel `ranks`; all of them at
    once."""
    keys = {field: key for key, field in BATCH_KEYS.items()}
    file_values = {field: config[key] for field, key in keys.items() if isinstance(config.get(key), int)}  # no "auto"
    if not file_values:
        return train, ()
    run_values = {field: value for field in ("batch_size", "grad_accum") if (value := getattr(train, field)) != AUTO}
    # It has a number as its default, so "given" is what the file or SET holds, even if that is the default.
    if "effective_batch_size" in train.model_fields_set:
        run_values["effective_batch_size"] = train.effective_batch_size
    problems = [
        f'{keys[field]}: {value} contradicts train.{field}={run_values[field]}; keep one of them ("auto" here)'
        for field, value in file_values.items()
        if run_values.get(field, value) != value
    ]
    taken_values = {field: value for field, value in file_values.items() if field not in run_values}
    source_texts = {"effective_batch_size": f"train.effective_batch_size={train.effective_batch_size} (its default)"}
    source_texts |= {field: f"train.{field}={value}" for field, value in run_values.items()}
    source_texts |= {field: f"{keys[field]}: {value}" for field, value in taken_values.items()}
    lines = [
        f"{source_texts[field]} is the run's train.{field}, which the run YAML leaves open" for field in taken_values
    ]
    micro_batch, grad_accum = ((run_values | taken_values).get(field) for field in ("batch_size", "grad_accum"))
    if "effective_batch_size" not in run_values | taken_values and micro_batch and grad_accum:
        taken_values["effective_batch_size"] = micro_batch * grad_accum * ranks
        lines.append(f"train.effective_batch_size → {micro_batch} × {grad_accum} × {ranks} ranks = "
                     f"{micro_batch * grad_accum * ranks}, which neither file gives")  # fmt: skip
    merged = train.model_copy(update=taken_values)
    # a YAML of one rank is kept over several, unless the file repeats its numbers of a rank
    is_kept = is_single_rank_batch(train) and file_values.keys() == {"effective_batch_size"}
    if not problems and not is_kept:
        problems += filter(None, [batch_product_problem(merged, ranks=ranks, option_texts=source_texts)])
    if problems:
        raise ConfigError("\n".join(f"{name}: {problem}" for problem in problems))
    return merged, tuple(lines)


SHORT_DTYPES = {short_name: name for name, short_name in DTYPE_ALIASES.items()}

# --- in current keys --------------------------------------------------------------------------------------------------
DeepspeedConfig = dict[str, Any]

# Stands for a value that follows from the run. transformers' word, and ours: DeepSpeed knows it in few places
# (`PATHS_WITH_AUTO`).
AUTO = "auto"

_KEY_TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("deepspeed_keys.json").read_text(encoding="utf-8"))


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
    values: dict[str, Any] = {}
    notes = []
    for path, value in yaml_io.walk_leaves(raw):
        comment = next((key for key in path if _COMMENT_KEY.fullmatch(str(key))), None)
        if comment is not None:
            notes.append(f"{one_line(str(comment))} is read as a comment")
        elif path and value is not None:
            values[".".join(map(str, path))] = copy.deepcopy(value)
    problems = [*_rename_old_keys(values, notes), *_drop_removed_keys(values, notes), *_unknown_key_problems(values)]
    # a value under a wrong key would be reported twice
    problems = list(dict.fromkeys(problems)) or list(_value_problems(values))
    if problems:
        raise ConfigError("\n".join(f"{name}: {problem}" for problem in problems))
    return yaml_io.nest_values(values), tuple(dict.fromkeys(notes))


def _paths_below(values: Mapping[str, Any], path: str) -> list[str]:
    """The path and those inside it, as far as there are values."""
    return [inner for inner in values if inner == path or inner.startswith(f"{path}.")]


def _rename_old_keys(values: dict[str, Any], notes: list[str]) -> Iterator[str]:
    for old, new in _KEY_TABLE["renamed"].items():
        for path in _paths_below(values, old):
            value = new_value = values.pop(path)
            new_path = new + path.removeprefix(old)
            if path == old and "cpu_offload" in old and value in (True, False):  # a switch, now a section
                new_path, new_value = f"{new}.device", "cpu" if value else None
            present_value = values.get(new_path)
            display_text = f"{path}: {format_value(value)}"
            if new_value is None or present_value == new_value:
                notes.append(f"{display_text} is an old key that says nothing more; left out")
            elif present_value is None:
                values[new_path] = new_value
                notes.append(f"{display_text} is an old key; read as {new_path}: {format_value(new_value)}")
            else:
                yield f"{display_text} (an old key) and {new_path}: {format_value(present_value)} disagree; keep one"


def _drop_removed_keys(values: dict[str, Any], notes: list[str]) -> Iterator[str]:
    for key, reason in _KEY_TABLE["removed"].items():
        removed = {path: values.pop(path) for path in _paths_below(values, key)}
        # -1 is how sizes such as mics_shard_size were switched off
        if removed and removed.get(f"{key}.enabled", removed.get(key, True)) in (False, None, -1, {}):
            notes.append(f"{key}, which newer versions of DeepSpeed refuse, is switched off and left out")
        elif removed:
            yield f"{key} was removed from DeepSpeed: {reason}; remove the key"


def _unknown_key_problems(values: Mapping[str, Any]) -> Iterator[str]:
    for path in values:
        section = ""
        for key in path.split("."):
            if section in KNOWN_DEEPSPEED_KEYS and key not in KNOWN_DEEPSPEED_KEYS[section]:
                yield f"{_join_path(section, key)} is not a DeepSpeed key; {_suggest_key(section, key)}"
                break
            section = f"{section}.{key}" if section else key


def _suggest_key(section: str, key: str) -> str:
    homes = [path for path, names in KNOWN_DEEPSPEED_KEYS.items() if key in names]
    if homes:
        homes.sort(key=lambda home: home.count("."))
        return f"it belongs at {' or '.join(_join_path(home, key) for home in homes[:3])}"
    nearest = nearest_name(key, KNOWN_DEEPSPEED_KEYS[section], min_similarity=0.0)
    return f"the nearest is {_join_path(section, nearest or '')}"


def _join_path(section: str, key: str) -> str:
    return one_line(f"{section}.{key}" if section else key)


# --- values, checked before ranks start: DeepSpeed itself raises late, on every rank ----------------------------------
def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value) and value >= 0


def _is_whole_number(value: Any) -> bool:
    """Also for `5e8`, which JSON and YAML read as a float: that is how bucket sizes are written in most guides."""
    return _is_number(value) and value == int(value)


# Of a path the test of its values, and what it accepts: the first row that matches; DeepSpeed itself checks the others.
# Parallelism, dtypes and modes that are refused here would make the run another one than was planned.
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
        "1: only ZeRO's data-parallel layouts are supported, which split neither rows nor layers over ranks",
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
    (r"zero_optimization\.stage", lambda value: _is_whole_number(value) and value <= 3, '0, 1, 2, 3 or "auto"'),
    (
        r"zero_optimization\.offload_(optimizer|param)\.device",
        lambda value: value in ("none", "cpu", "nvme"),
        '"none", "cpu" or "nvme"',
    ),
    (
        r"(.*\.)?(enabled|pin_memory|overlap_comm|contiguous_gradients|reduce_scatter)",
        lambda value: isinstance(value, bool),
        'true, false or "auto"',
    ),
    (
        r"zero_optimization\.\w*_(size|threshold|parameters|distance)",
        _is_whole_number,
        'a whole number without quotes, or "auto"',
    ),
)


def _value_problems(values: Mapping[str, Any]) -> Iterator[str]:
    for path, value in values.items():
        if value in (None, {}):
            continue
        if path in KNOWN_DEEPSPEED_KEYS or path in ("optimizer.params", "scheduler.params"):
            keys = ", ".join(sorted(KNOWN_DEEPSPEED_KEYS.get(path, ())))
            yield f"{path}: {format_value(value)} is not a section; expected {{{keys or '…'}}}"
            continue
        check = next((check for check in _VALUE_CHECKS if re.fullmatch(check[0], path)), None)
        if check is not None and value != AUTO and not check[1](value):
            yield f"{path}: {format_value(value)} is not valid; expected {check[2]}"


# --------------------------------------------------------------------------------------------------
# A DeepSpeed configuration with every "auto" resolved from the plan.
#
# The formulas for "auto" are those of transformers (https://github.com/huggingface/transformers:
# `src/transformers/integrations/deepspeed.py`), so a file that works with the Trainer means the
# same here; their results are shown.

# Keys of `zero_optimization` whose "auto" follows from the model's widest hidden size: the number of elements, and the
# formula in words.
HIDDEN_SIZE_FORMULAS: dict[str, tuple[Callable[[int], int], str]] = {
    "reduce_bucket_size": (lambda size: size * size, "hidden size squared"),
    "stage3_prefetch_bucket_size": (lambda size: int(0.9 * size * size), "0.9 × hidden size squared"),
    "stage3_param_persistence_threshold": (lambda size: 10 * size, "10 × hidden size"),
}


@dataclass(frozen=True)
class PlanValues:
    """What DeepSpeed needs from a plan. `hidden_size` is the model's widest."""

    layout: LayoutName
    micro_batch: int
    grad_accum: int
    data_parallel_ranks: int
    hidden_size: int
    compute_dtype: Literal["bfloat16", "float16", "float32"]
    # The training options by their paths in DeepSpeed's file: key of the run YAML, value.
    options: Mapping[str, tuple[str, Any]]
    # Dtype in which gradients are sent, in DeepSpeed's spelling; None: as computed.
    reduce: str | None = None
    # Dtype that buffers are cast to; None: unchanged.
    buffer: str | None = None

    @classmethod
    def from_plan(cls, plan: Plan, config: RunConfig, *, hidden_size: int) -> PlanValues:
        """Those of a plan and the run's settings."""
        mixed_precision, batch = config.distributed.mixed_precision, plan.trainer_batch
        return cls(
            layout=plan.layout,
            micro_batch=batch.micro_batch,  # DeepSpeed takes a fixed number of micro steps
            grad_accum=batch.grad_accum,
            data_parallel_ranks=plan.batch.ranks,
            hidden_size=hidden_size,
            compute_dtype=plan.precision.compute,
            options=deepspeed_options(config),
            reduce=SHORT_DTYPES.get(mixed_precision.reduce),
            buffer=SHORT_DTYPES.get(mixed_precision.buffer),
        )

    @property
    def effective_batch(self) -> int:
        """Rows per optimizer step, over all ranks."""
        return self.micro_batch * self.grad_accum * self.data_parallel_ranks


def deepspeed_options(config: RunConfig) -> dict[str, tuple[str, Any]]:
    """The training options that DeepSpeed's file has, by their paths in it: key of the run YAML, value."""
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
    adam_obstacle: str | None = None,
) -> tuple[DeepspeedConfig, tuple[str, ...]]:
    """A translated configuration with every "auto" resolved, and a line for each value that the plan supplied.
    `adam_obstacle`: why DeepSpeed's own CPU Adam cannot run (`cpu_adam_obstacles`), so that torch's updates the
    offloaded states. Optimizer and schedule are the run YAML's. Raises ConfigError where a number contradicts the plan;
    all of them at once."""
    leaves = {".".join(map(str, path)): copy.deepcopy(value) for path, value in yaml_io.walk_leaves(config)}
    filler = _ConfigFiller({path: value for path, value in leaves.items() if value not in (None, {})}, plan_values)
    layout = deepspeed_layout(config, name=name, default_layout=plan_values.layout)
    if layout != plan_values.layout:  # memory and speed were planned for another one
        filler.problems.append(
            f"the file asks for {layout}, but the plan is for {plan_values.layout}; leave STRATEGY= out"
        )
    filler.fill_from_plan()
    filler.fill_precision()
    filler.drop_optimizer()
    filler.drop_scheduler()
    if filler.problems:
        raise ConfigError("\n".join(f"{name}: {problem}" for problem in filler.problems))
    if adam_obstacle and filler.values.get("zero_optimization.offload_optimizer.device") in OFFLOAD_DEVICES:
        reason = f"torch's AdamW steps on the CPU instead, more slowly: {adam_obstacle}"
        filler.set_value("zero_force_ds_cpu_optimizer", False, reason)
    filled = yaml_io.nest_values(filler.values)
    return filled, (*filler.lines, *drop_unresolved_autos(filled))


@dataclass
class _ConfigFiller:
    """A configuration by dotted paths while it is filled, with what is said of it."""

    values: dict[str, Any]
    plan_values: PlanValues
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def set_value(self, path: str, value: Any, reason: str) -> None:
        """Set a value whatever the file says."""
        if self.values.get(path) != value:
            self.values[path] = value
            display_value = f"{value:,}" if type(value) is int else format_value(value).strip('"')
            self.lines.append(f"{path} → {display_value} ({reason})")

    def fill_from_plan(self) -> None:
        """Fill what the file leaves open with the plan's, and compare the rest: DeepSpeed asserts that the batch is the
        product of the others and the ranks, and its engine clips by its own number only. Its default bucket, 5e8
        elements, would take another GiB."""
        plan = self.plan_values
        stage, size = ZERO_STAGES[plan.layout][0], plan.hidden_size
        product = f"{plan.micro_batch} × {plan.grad_accum} × {plan.data_parallel_ranks} ranks = {plan.effective_batch}"
        batch = {
            "train_batch_size": plan.effective_batch,
            "train_micro_batch_size_per_gpu": plan.micro_batch,
            "gradient_accumulation_steps": plan.grad_accum,
        }
        # path, value, where it is from, and the key of the run YAML where a file must not contradict it
        rows = [
            (key, value, f"the plan's {value} ({product})", f"train.{BATCH_KEYS[key]}") for key, value in batch.items()
        ]
        rows += [
            (path, value, f"{run_key}: {value:g}", run_key)
            for path, (run_key, value) in plan.options.items()
            if not path.startswith("optimizer.")
        ]
        rows.append(("zero_optimization.stage", stage, f"the plan's layout, {plan.layout}", ""))
        for key, (formula, formula_text) in HIDDEN_SIZE_FORMULAS.items():
            path = f"zero_optimization.{key}"
            if key == "reduce_bucket_size" or (stage == 3 and self.values.get(path) == AUTO):
                rows.append((path, formula(size), f"{formula_text}: {size:,}", ""))
        for path, value, source, run_key in rows:
            if self.values.get(path, AUTO) == AUTO:
                self.set_value(path, value, source)
            elif run_key and not are_numbers_equal(self.values[path], value):
                remedy = f'set it to "auto", or run with {run_key}={self.values[path]:g}'
                self.problems.append(f"{path}: {self.values[path]:g} contradicts {source}; {remedy}")
        if stage == 3:
            gather_path = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
            self.set_value(gather_path, True, "checkpoints hold whole weights")
        # DeepSpeed stops at optimizer classes that it does not know
        self.set_value("zero_allow_untested_optimizer", True, "train.optim is the plan's choice")

    def fill_precision(self) -> None:
        """`bf16.enabled` and `fp16.enabled` by the run's compute dtype, whatever the file says: it may have been
        written for another machine. To DeepSpeed, absent means disabled. Autocast is a second way to the same, and
        turned off. Then the dtypes of communication."""
        compute = self.plan_values.compute_dtype
        reason, changed = f"the run computes in {compute}", []
        switches = {"bf16": compute == "bfloat16", "fp16": compute == "float16", "torch_autocast": False}
        for path, is_enabled in ((f"{key}.enabled", is_enabled) for key, is_enabled in switches.items()):
            if path not in self.values and not is_enabled:
                continue
            if self.values.get(path, AUTO) == AUTO:
                self.set_value(path, is_enabled, reason)
            elif self.values[path] is not is_enabled:
                changed.append(f"{path}: {format_value(self.values[path])} → {format_value(is_enabled)}")
                self.values[path] = is_enabled
        if changed:
            self.lines.append(f"{', '.join(changed)} ({reason}, as train.bf16 and train.fp16 choose)")
        dtypes = {"communication_data_type": "reduce", "data_types.buffer_dtype": "buffer"}
        for path, option in dtypes.items():
            dtype = getattr(self.plan_values, option)
            if dtype is not None:
                self.set_value(path, dtype, f"distributed.mixed_precision.{option}")

    def drop_optimizer(self) -> None:
        """The plan counted the run YAML's optimizer; a block may repeat it, but not change it."""
        block = {path: self.values.pop(path) for path in _paths_below(self.values, "optimizer")}
        if not block:
            return
        beta2_key, beta2 = self.plan_values.options["optimizer.params.betas.1"]
        expected = {  # where no option sets them, the defaults of transformers' `TrainingArguments`
            "optimizer.params.betas": (f"the run's ({beta2_key})", [0.9, beta2]),
            "optimizer.params.eps": ("the run's", 1e-8),
            **self.plan_values.options,
        }
        optimizer_type = block.pop("optimizer.type", AUTO)
        if str(optimizer_type).lower() not in ("adam", "adamw", AUTO):
            shown_type = f"optimizer.type: {format_value(optimizer_type)}"
            self.problems.append(f"{shown_type} is not supported; train.optim of the run YAML chooses")
        for path, value in block.items():
            # it leaves the number to the run, or chooses between implementations of the same update
            is_switch = path.endswith(_ADAM_SWITCHES) and isinstance(value, bool)
            if value == AUTO or is_switch or not path.startswith("optimizer.params."):
                continue
            source, planned = expected.get(path, ("the run YAML's optimizer, which has no such number", None))
            if not are_numbers_equal(value, planned):
                source = source if planned is None else f"{source}: {format_value(planned)}"
                self.problems.append(f'{path}: {format_value(value)} contradicts {source}; set it to "auto"')
        self.lines.append("optimizer left out: the run YAML's is used (train.optim, learning_rate, weight_decay)")

    def drop_scheduler(self) -> None:
        """The schedule is the run YAML's: DeepSpeed's own would silently replace it."""
        block = {path: self.values.pop(path) for path in _paths_below(self.values, "scheduler")}
        # a warm-up from 0, and its form, are what a schedule has anyway: they ask for no numbers of their own
        harmless_params = (("warmup_min_lr", 0), ("warmup_type", "linear"), ("warmup_type", "log"))
        params = {path.removeprefix("scheduler.params."): value for path, value in block.items() if value != AUTO}
        own_numbers = [
            f"{key}: {format_value(value)}"
            for key, value in sorted(params.items())
            if key != "scheduler.type" and (key, value) not in harmless_params
        ]
        if own_numbers:
            self.problems.append(
                f"scheduler.params has its own numbers ({', '.join(own_numbers)}) and the run YAML has a schedule too "
                '(train.lr_scheduler_type, warmup_steps); remove the scheduler block, or set its numbers to "auto"'
            )
        if block:
            self.lines.append("scheduler left out: the run YAML's is used (train.lr_scheduler_type, warmup_steps)")


# Parameters that choose an AdamW implementation; all of them compute the same update.
_ADAM_SWITCHES = (".torch_adam", ".adam_w_mode", ".bias_correction")


def drop_unresolved_autos(config: DeepspeedConfig, path: str = "") -> list[str]:
    """Remove each "auto" that nothing has resolved; returns a line for each. Some sections of DeepSpeed read it as the
    default, others crash. Those of the optimizer's and the scheduler's blocks stay: accelerate resolves them."""
    dropped = []
    for key, value in list(config.items()):
        inner = f"{path}{key}"
        if isinstance(value, dict):
            dropped += drop_unresolved_autos(value, f"{inner}.")
        elif value == AUTO and not inner.startswith((*PATHS_WITH_AUTO, "optimizer.", "scheduler.")):
            del config[key]
            dropped.append(f'{inner}: "auto" left out (DeepSpeed\'s default)')
    return dropped


def are_numbers_equal(first: Any, second: Any) -> bool:
    """Whether two numbers, or lists of numbers, are numerically equal."""
    try:
        if isinstance(first, list | tuple) or isinstance(second, list | tuple):
            return [float(item) for item in first] == [float(item) for item in second]
        return math.isclose(float(first), float(second), rel_tol=1e-12)
    except (TypeError, ValueError):
        return False


# --- DeepSpeed's CPU Adam, for offloaded optimizer states: can it be built, and has it been? --------------------------
def cpu_adam_compile_note() -> str | None:
    """What to say where the first step waits for DeepSpeed's CPU Adam to be compiled; None where it is there (its
    `op_builder/builder.py`, `load`; torch's `utils/cpp_extension.py`, `_get_build_directory`)."""
    extensions_dir = os.environ.get("TORCH_EXTENSIONS_DIR")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(extensions_dir) if extensions_dir else caches / "torch_extensions"
    spec = find_spec("deepspeed")
    built_in = Path(spec.origin).parent / "ops" / "adam" if spec and spec.origin else folder
    if any(folder.glob(f"{'' if extensions_dir else 'py*/'}cpu_adam/cpu_adam.so")) or any(
        built_in.glob("cpu_adam_op*.so")
    ):
        return None
    return f"its CPU Adam is compiled at this first start, which takes minutes; later starts find it in {folder}"


def cpu_adam_obstacles() -> tuple[str, ...]:
    """What DeepSpeed lacks to build its CPU Adam: a C++ compiler, ninja, Python's headers (its `op_builder/builder.py`,
    `jit_load`; torch's `utils/cpp_extension.py`, which reads `CXX`). Empty: nothing; the build may still fail."""
    missing = []
    compiler = (os.environ.get("CXX") or "c++").split()[0]  # CXX may hold flags, or a wrapper before the compiler
    if shutil.which(compiler) is None and shutil.which("g++") is None:
        missing.append(f"no C++ compiler ({compiler})")
    if shutil.which("ninja") is None:
        missing.append("no ninja")
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        missing.append(f"no Python headers ({headers / 'Python.h'})")
    return tuple(missing)
