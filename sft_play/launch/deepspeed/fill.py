"""A DeepSpeed configuration with every "auto" resolved from the plan.

The formulas for "auto" are those of transformers (https://github.com/huggingface/transformers:
`src/transformers/integrations/deepspeed.py`), so a file that works with the Trainer means the same here; their results
are shown.
"""

from __future__ import annotations

import copy
import math
import os
import shutil
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from sft_play.config.options import optimizer_options
from sft_play.config.schema import RunConfig
from sft_play.config.yaml_io import format_value
from sft_play.errors import ConfigError
from sft_play.launch.deepspeed.files import (
    AUTO,
    BATCH_KEYS,
    DTYPE_KEYS,
    PATHS_WITH_AUTO,
    SHORT_DTYPES,
    ZERO_STAGES,
    DeepspeedConfig,
    deepspeed_layout,
    find_parent,
    get_value_at,
    is_offloaded,
    set_value_at,
    walk_values,
)
from sft_play.planner.layout import LayoutName
from sft_play.planner.plan import Plan

# AdamW's values where no training option sets them: the defaults of transformers' `TrainingArguments`.
ADAM_DEFAULTS: dict[str, Any] = {"betas": [0.9, 0.999], "eps": 1e-8}

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
    options: Mapping[str, tuple[str, Any]]
    """The training options by their paths in DeepSpeed's file: key of the run YAML, value."""
    reduce: str | None = None
    """Dtype in which gradients are sent, in DeepSpeed's spelling; None: as computed."""
    buffer: str | None = None
    """Dtype that buffers are cast to; None: unchanged."""

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
    filler = _ConfigFiller(copy.deepcopy(config), plan_values)
    layout = deepspeed_layout(config, name=name, default_layout=plan_values.layout)
    if layout != plan_values.layout:  # memory and speed were planned for another one
        filler.problems.append(
            f"the file asks for {layout}, but the plan is for {plan_values.layout}; leave STRATEGY= out"
        )
    filler.fill_batch()
    filler.check_options()
    filler.fill_precision()
    filler.fill_zero()
    filler.drop_optimizer()
    filler.drop_scheduler()
    if filler.problems:
        raise ConfigError("\n".join(f"{name}: {problem}" for problem in filler.problems))
    # DeepSpeed stops at optimizer classes that it does not know
    filler.set_always("zero_allow_untested_optimizer", True, "train.optim is the plan's choice")
    if adam_obstacle and is_offloaded(filler.config["zero_optimization"], "offload_optimizer"):
        reason = f"torch's AdamW steps on the CPU instead, more slowly: {adam_obstacle}"
        filler.set_always("zero_force_ds_cpu_optimizer", False, reason)
    return filler.config, (*filler.lines, *drop_unresolved_autos(filler.config))


@dataclass
class _ConfigFiller:
    config: DeepspeedConfig
    plan_values: PlanValues
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def set_if_open(self, path: str, value: Any, reason: str) -> Any:
        """Set a value that is open; returns the one that the file gives, None where it was open."""
        file_value = get_value_at(self.config, path)
        if file_value not in (AUTO, None):
            return file_value
        self.set_always(path, value, reason)
        return None

    def set_always(self, path: str, value: Any, reason: str) -> None:
        """Set a value whatever the file says."""
        if get_value_at(self.config, path) != value:
            set_value_at(self.config, path, value)
            self.lines.append(
                f"{path} → {f'{value:,}' if type(value) is int else format_value(value).strip(chr(34))} ({reason})"
            )

    def fill_batch(self) -> None:
        """DeepSpeed asserts that the first is the product of the others and the ranks (0.19: `_batch_assertion`)."""
        plan_values = self.plan_values
        product = f"{plan_values.micro_batch} × {plan_values.grad_accum} × {plan_values.data_parallel_ranks} ranks"
        expected = {
            "train_batch_size": (plan_values.effective_batch, f"micro-batch × accumulation × ranks: {product}"),
            "train_micro_batch_size_per_gpu": (plan_values.micro_batch, "the plan's micro-batch"),
            "gradient_accumulation_steps": (plan_values.grad_accum, "the plan's accumulation"),
        }
        for key, (value, reason) in expected.items():
            if self.set_if_open(key, value, reason) not in (None, value):
                file_value, plan_text = (
                    self.config[key],
                    f"the plan's {value} ({product} = {plan_values.effective_batch})",
                )
                remedy = f'set it to "auto", or run with train.{BATCH_KEYS[key]}={file_value}'
                self.problems.append(f"{key}: {file_value} contradicts {plan_text}; {remedy}")

    def check_options(self) -> None:
        """The training options outside the optimizer's block: DeepSpeed's engine clips by its own number only."""
        for path, (run_key, value) in self.plan_values.options.items():
            if path.startswith("optimizer."):
                continue
            file_value = self.set_if_open(path, value, run_key)
            if file_value is not None and not are_numbers_equal(file_value, value):
                remedy = f'set it to "auto", or run with {run_key}={file_value:g}'
                self.problems.append(f"{path}: {file_value:g} contradicts {run_key}: {value:g}; {remedy}")

    def fill_precision(self) -> None:
        """`bf16.enabled` and `fp16.enabled` by the run's compute dtype, whatever the file says: it may have been
        written for another machine. To DeepSpeed, absent means disabled. Autocast is a second way to the same, and
        turned off. Then the dtypes of communication."""
        reason, changed = f"the run computes in {self.plan_values.compute_dtype}", []
        switches = {
            "bf16": self.plan_values.compute_dtype == "bfloat16",
            "fp16": self.plan_values.compute_dtype == "float16",
        }
        for key, is_enabled in {**switches, "torch_autocast": False}.items():
            if self.config.get(key) is None and not is_enabled:
                continue
            path = f"{key}.enabled"
            if key == "torch_autocast" and get_value_at(self.config, path) is not True:
                continue
            file_value = self.set_if_open(path, is_enabled, reason)
            if file_value not in (None, is_enabled):
                set_value_at(self.config, path, is_enabled)
                changed.append(f"{path}: {format_value(file_value)} → {format_value(is_enabled)}")
        if changed:
            self.lines.append(f"{', '.join(changed)} ({reason}, as train.bf16 and train.fp16 choose)")
        for key, name in DTYPE_KEYS.items():
            dtype = getattr(self.plan_values, name)
            if dtype is not None:
                self.set_always(key, dtype, f"distributed.mixed_precision.{name}")

    def fill_zero(self) -> None:
        """ZeRO's stage and sizes. DeepSpeed's default bucket, 5e8 elements, would take another GiB."""
        plan_values, zero = self.plan_values, self.config.get("zero_optimization") or {}
        self.config["zero_optimization"] = {"reduce_bucket_size": AUTO, **zero}
        stage = ZERO_STAGES[plan_values.layout][0]
        self.set_if_open("zero_optimization.stage", stage, f"the plan's layout, {plan_values.layout}")
        if stage == 3:
            gather_path = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
            self.set_always(gather_path, True, "checkpoints hold whole weights")
        for key, (formula, formula_text) in HIDDEN_SIZE_FORMULAS.items():
            path = f"zero_optimization.{key}"
            if get_value_at(self.config, path) == AUTO and (stage == 3 or not key.startswith("stage3_")):
                self.set_if_open(path, formula(plan_values.hidden_size), f"{formula_text}: {plan_values.hidden_size:,}")

    def drop_optimizer(self) -> None:
        """The plan counted the run YAML's optimizer; a block may repeat it, but not change it."""
        block = self.config.pop("optimizer", None)
        if block is None:
            return
        optimizer_type, run_params = block.get("type", AUTO), _optimizer_params(self.plan_values.options)
        if str(optimizer_type).lower() not in ("adam", "adamw", AUTO):
            message = (
                f"optimizer.type: {format_value(optimizer_type)} is not supported; train.optim of the run YAML chooses"
            )
            self.problems.append(message)
        for key, value in (block.get("params") or {}).items():
            if value == AUTO or (key in _ADAM_SWITCHES and isinstance(value, bool)):
                continue  # it leaves the number to the run, or chooses between implementations of the same update
            source, planned_value = run_params.get(key, ("the run YAML's optimizer, which has no such number", None))
            if not are_numbers_equal(value, planned_value):
                expected = source if planned_value is None else f"{source}: {format_value(planned_value)}"
                self.problems.append(
                    f'optimizer.params.{key}: {format_value(value)} contradicts {expected}; set it to "auto"'
                )
        self.lines.append("optimizer left out: the run YAML's is used (train.optim, learning_rate, weight_decay)")

    def drop_scheduler(self) -> None:
        """The schedule is the run YAML's: DeepSpeed's own would silently replace it."""
        block = self.config.pop("scheduler", None)
        if block is None:
            return
        # a warm-up from 0, and its form, are what a schedule has anyway: they ask for no numbers of their own
        harmless_params = (("warmup_min_lr", 0), ("warmup_type", "linear"), ("warmup_type", "log"))
        fixed_params = {key: value for key, value in (block.get("params") or {}).items() if value != AUTO}
        own_numbers = [
            f"{key}: {format_value(value)}"
            for key, value in sorted(fixed_params.items())
            if (key, value) not in harmless_params
        ]
        if own_numbers:
            self.problems.append(
                f"scheduler.params has its own numbers ({', '.join(own_numbers)}) and the run YAML has a schedule too "
                '(train.lr_scheduler_type, warmup_steps); remove the scheduler block, or set its numbers to "auto"'
            )
        self.lines.append("scheduler left out: the run YAML's is used (train.lr_scheduler_type, warmup_steps)")


# Parameters that choose an AdamW implementation; all of them compute the same update.
_ADAM_SWITCHES = ("torch_adam", "adam_w_mode", "bias_correction")


def _optimizer_params(options: Mapping[str, tuple[str, Any]]) -> dict[str, tuple[str, Any]]:
    params = {name: ("the run's", copy.copy(value)) for name, value in ADAM_DEFAULTS.items()}
    for path, (run_key, value) in options.items():
        name, _, index = path.removeprefix("optimizer.params.").partition(".")
        if index:
            params[name][1][int(index)] = value
            params[name] = (f"the run's ({run_key})", params[name][1])
        elif name != path:
            params[name] = (run_key, value)
    return params


def drop_unresolved_autos(config: DeepspeedConfig) -> list[str]:
    """Remove each "auto" that nothing has resolved; returns a line for each. Some sections of DeepSpeed read it as the
    default, others crash. Those of the optimizer's and the scheduler's blocks stay: accelerate resolves them."""
    dropped = []
    for path, value in list(walk_values(config)):
        if value == AUTO and not path.startswith((*PATHS_WITH_AUTO, "optimizer.", "scheduler.")):
            parent, key = find_parent(config, path)
            assert parent is not None
            del parent[key]
            dropped.append(f'{path}: "auto" left out (DeepSpeed\'s default)')
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
