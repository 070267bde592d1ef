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

from sft_play.config.options import training_options
from sft_play.config.schema import RunConfig
from sft_play.config.yaml_io import show
from sft_play.errors import ConfigError
from sft_play.launch.deepspeed.files import (
    AUTO,
    AUTO_IS_A_VALUE,
    BATCH_KEYS,
    DTYPE_KEYS,
    SHORT_DTYPES,
    STAGES,
    Config,
    holder_of,
    layout_of,
    leaves_of,
    offloads,
    put_at,
    value_at,
)
from sft_play.planner.layout import LayoutName
from sft_play.planner.plan import Plan

# AdamW's values where no training option sets them: the defaults of transformers' `TrainingArguments`.
ADAM: dict[str, Any] = {"betas": [0.9, 0.999], "eps": 1e-8}

# Keys of `zero_optimization` whose "auto" follows from the model's widest hidden size: the number of elements, and the
# formula in words.
BY_HIDDEN_SIZE: dict[str, tuple[Callable[[int], int], str]] = {
    "reduce_bucket_size": (lambda size: size * size, "hidden size squared"),
    "stage3_prefetch_bucket_size": (lambda size: int(0.9 * size * size), "0.9 × hidden size squared"),
    "stage3_param_persistence_threshold": (lambda size: 10 * size, "10 × hidden size"),
}


@dataclass(frozen=True)
class PlanNumbers:
    """What DeepSpeed needs from a plan. `hidden_size` is the model's widest."""

    layout: LayoutName
    micro_batch: int
    grad_accum: int
    data_parallel_ranks: int
    hidden_size: int
    compute: Literal["bfloat16", "float16", "float32"]
    options: Mapping[str, tuple[str, Any]]
    """The training options by their paths in DeepSpeed's file: key of the run YAML, value."""
    reduce: str | None = None
    """Dtype in which gradients are sent, in DeepSpeed's spelling; None: as computed."""
    buffer: str | None = None
    """Dtype that buffers are cast to; None: unchanged."""

    @classmethod
    def of(cls, plan: Plan, config: RunConfig, *, hidden_size: int) -> PlanNumbers:
        """Those of a plan and the run's settings."""
        mixed, batch = config.distributed.mixed_precision, plan.trainer_batch
        return cls(
            layout=plan.layout,
            micro_batch=batch.micro_batch,  # DeepSpeed takes a fixed number of passes a step
            grad_accum=batch.grad_accum,
            data_parallel_ranks=plan.batch.ranks,
            hidden_size=hidden_size,
            compute=plan.precision.compute,
            options=options_of(config),
            reduce=SHORT_DTYPES.get(mixed.reduce),
            buffer=SHORT_DTYPES.get(mixed.buffer),
        )

    @property
    def effective_batch(self) -> int:
        """Rows per optimizer step, over all ranks."""
        return self.micro_batch * self.grad_accum * self.data_parallel_ranks


def options_of(config: RunConfig) -> dict[str, tuple[str, Any]]:
    """The training options that DeepSpeed's file has, by their paths in it: key of the run YAML, value."""
    return {
        option.elsewhere.deepspeed: (option.key, option.value(config))
        for option in training_options()
        if option.elsewhere.deepspeed
    }


def fill(
    config: Config,
    numbers: PlanNumbers,
    *,
    name: str = "the DeepSpeed configuration",
    torch_adam: str | None = None,
) -> tuple[Config, tuple[str, ...]]:
    """A translated configuration with every "auto" resolved, and a line for each value that the plan supplied.
    `torch_adam`: why DeepSpeed's own CPU Adam cannot run (`adam_obstacles`), so that torch's updates the offloaded
    states. Optimizer and schedule are the run YAML's. Raises ConfigError where a number contradicts the plan; all of
    them at once."""
    filling = _Filling(copy.deepcopy(config), numbers)
    layout = layout_of(config, name=name, planned=numbers.layout)
    if layout != numbers.layout:  # memory and speed were planned for another one
        filling.problems.append(
            f"the file asks for {layout}, but the plan is for {numbers.layout}; leave STRATEGY= out"
        )
    filling.batch()
    filling.options()
    filling.precision()
    filling.zero()
    filling.optimizer()
    filling.scheduler()
    if filling.problems:
        raise ConfigError("\n".join(f"{name}: {problem}" for problem in filling.problems))
    # DeepSpeed stops at optimizer classes that it does not know
    filling.force("zero_allow_untested_optimizer", True, "train.optim is the plan's choice")
    if torch_adam and offloads(filling.config["zero_optimization"], "offload_optimizer"):
        slow = f"torch's AdamW steps on the CPU instead, more slowly: {torch_adam}"
        filling.force("zero_force_ds_cpu_optimizer", False, slow)
    return filling.config, (*filling.shown, *drop_autos(filling.config))


@dataclass
class _Filling:
    config: Config
    numbers: PlanNumbers
    shown: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def settle(self, path: str, value: Any, why: str) -> Any:
        """Set a value that is open; returns the one that the file gives, None where it was open."""
        present = value_at(self.config, path)
        if present not in (AUTO, None):
            return present
        self.force(path, value, why)
        return None

    def force(self, path: str, value: Any, why: str) -> None:
        """Set a value whatever the file says."""
        if value_at(self.config, path) != value:
            put_at(self.config, path, value)
            self.shown.append(f"{path} → {f'{value:,}' if type(value) is int else show(value).strip(chr(34))} ({why})")

    def batch(self) -> None:
        """DeepSpeed asserts that the first is the product of the others and the ranks (0.19: `_batch_assertion`)."""
        of = self.numbers
        product = f"{of.micro_batch} × {of.grad_accum} × {of.data_parallel_ranks} ranks"
        wanted = {
            "train_batch_size": (of.effective_batch, f"micro-batch × accumulation × ranks: {product}"),
            "train_micro_batch_size_per_gpu": (of.micro_batch, "the plan's micro-batch"),
            "gradient_accumulation_steps": (of.grad_accum, "the plan's accumulation"),
        }
        for key, (value, why) in wanted.items():
            if self.settle(key, value, why) not in (None, value):
                present, ours = self.config[key], f"the plan's {value} ({product} = {of.effective_batch})"
                way = f'set it to "auto", or run with train.{BATCH_KEYS[key]}={present}'
                self.problems.append(f"{key}: {present} contradicts {ours}; {way}")

    def options(self) -> None:
        """The training options outside the optimizer's block: DeepSpeed's engine clips by its own number only."""
        for path, (ours, value) in self.numbers.options.items():
            if path.startswith("optimizer."):
                continue
            present = self.settle(path, value, ours)
            if present is not None and not same_numbers(present, value):
                way = f'set it to "auto", or run with {ours}={present:g}'
                self.problems.append(f"{path}: {present:g} contradicts {ours}: {value:g}; {way}")

    def precision(self) -> None:
        """`bf16.enabled` and `fp16.enabled` by the run's compute dtype, whatever the file says: it may have been
        written for another machine. To DeepSpeed, absent means disabled. Autocast is a second way to the same, and
        turned off. Then the dtypes of communication."""
        why, changed = f"the run computes in {self.numbers.compute}", []
        switches = {"bf16": self.numbers.compute == "bfloat16", "fp16": self.numbers.compute == "float16"}
        for key, wanted in {**switches, "torch_autocast": False}.items():
            if self.config.get(key) is None and not wanted:
                continue
            path = f"{key}.enabled"
            if key == "torch_autocast" and value_at(self.config, path) is not True:
                continue
            present = self.settle(path, wanted, why)
            if present not in (None, wanted):
                put_at(self.config, path, wanted)
                changed.append(f"{path}: {show(present)} → {show(wanted)}")
        if changed:
            self.shown.append(f"{', '.join(changed)} ({why}, as train.bf16 and train.fp16 choose)")
        for key, name in DTYPE_KEYS.items():
            dtype = getattr(self.numbers, name)
            if dtype is not None:
                self.force(key, dtype, f"distributed.mixed_precision.{name}")

    def zero(self) -> None:
        """ZeRO's stage and sizes. DeepSpeed's default bucket, 5e8 elements, would take another GiB."""
        of, zero = self.numbers, self.config.get("zero_optimization") or {}
        self.config["zero_optimization"] = {"reduce_bucket_size": AUTO, **zero}
        stage = STAGES[of.layout][0]
        self.settle("zero_optimization.stage", stage, f"the plan's layout, {of.layout}")
        if stage == 3:
            gather = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
            self.force(gather, True, "checkpoints hold whole weights")
        for key, (formula, how) in BY_HIDDEN_SIZE.items():
            path = f"zero_optimization.{key}"
            if value_at(self.config, path) == AUTO and (stage == 3 or not key.startswith("stage3_")):
                self.settle(path, formula(of.hidden_size), f"{how}: {of.hidden_size:,}")

    def optimizer(self) -> None:
        """The plan counted the run YAML's optimizer; a block may repeat it, but not change it."""
        block = self.config.pop("optimizer", None)
        if block is None:
            return
        kind, ours = block.get("type", AUTO), _optimizer_params(self.numbers.options)
        if str(kind).lower() not in ("adam", "adamw", AUTO):
            said = f"optimizer.type: {show(kind)} is not supported; train.optim of the run YAML chooses"
            self.problems.append(said)
        for key, value in (block.get("params") or {}).items():
            if value == AUTO or (key in _ADAM_SWITCHES and isinstance(value, bool)):
                continue  # it leaves the number to the run, or chooses between implementations of the same update
            where, planned = ours.get(key, ("the run YAML's optimizer, which has no such number", None))
            if not same_numbers(value, planned):
                wanted = where if planned is None else f"{where}: {show(planned)}"
                self.problems.append(f'optimizer.params.{key}: {show(value)} contradicts {wanted}; set it to "auto"')
        self.shown.append("optimizer left out: the run YAML's is used (train.optim, learning_rate, weight_decay)")

    def scheduler(self) -> None:
        """The schedule is the run YAML's: DeepSpeed's own would silently replace it."""
        block = self.config.pop("scheduler", None)
        if block is None:
            return
        # a warm-up from 0, and its form, are what a schedule has anyway: they ask for no numbers of their own
        usual = (("warmup_min_lr", 0), ("warmup_type", "linear"), ("warmup_type", "log"))
        fixed = {key: value for key, value in (block.get("params") or {}).items() if value != AUTO}
        own = [f"{key}: {show(value)}" for key, value in sorted(fixed.items()) if (key, value) not in usual]
        if own:
            self.problems.append(
                f"scheduler.params has its own numbers ({', '.join(own)}) and the run YAML has a schedule too "
                '(train.lr_scheduler_type, warmup_steps); remove the scheduler block, or set its numbers to "auto"'
            )
        self.shown.append("scheduler left out: the run YAML's is used (train.lr_scheduler_type, warmup_steps)")


# Parameters that choose an AdamW implementation; all of them compute the same update.
_ADAM_SWITCHES = ("torch_adam", "adam_w_mode", "bias_correction")


def _optimizer_params(options: Mapping[str, tuple[str, Any]]) -> dict[str, tuple[str, Any]]:
    params = {name: ("the run's", copy.copy(value)) for name, value in ADAM.items()}
    for path, (ours, value) in options.items():
        name, _, place = path.removeprefix("optimizer.params.").partition(".")
        if place:
            params[name][1][int(place)] = value
            params[name] = (f"the run's ({ours})", params[name][1])
        elif name != path:
            params[name] = (ours, value)
    return params


def drop_autos(config: Config) -> list[str]:
    """Remove each "auto" that nothing has resolved; returns a line for each. Some sections of DeepSpeed read it as the
    default, others crash. Those of the optimizer's and the scheduler's blocks stay: accelerate resolves them."""
    dropped = []
    for path, value in list(leaves_of(config)):
        if value == AUTO and not path.startswith((*AUTO_IS_A_VALUE, "optimizer.", "scheduler.")):
            holder, key = holder_of(config, path)
            assert holder is not None
            del holder[key]
            dropped.append(f'{path}: "auto" left out (DeepSpeed\'s default)')
    return dropped


def same_numbers(one: Any, other: Any) -> bool:
    """Whether two numbers, or lists of numbers, are numerically equal."""
    try:
        if isinstance(one, list | tuple) or isinstance(other, list | tuple):
            return [float(item) for item in one] == [float(item) for item in other]
        return math.isclose(float(one), float(other), rel_tol=1e-12)
    except (TypeError, ValueError):
        return False


# --- DeepSpeed's CPU Adam, for offloaded optimizer states: can it be built, and has it been? --------------------------


def compiling_words() -> str | None:
    """What to say where the first step waits for DeepSpeed's CPU Adam to be compiled; None where it is there (its
    `op_builder/builder.py`, `load`; torch's `utils/cpp_extension.py`, `_get_build_directory`)."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(given) if given else caches / "torch_extensions"
    spec = find_spec("deepspeed")
    built_in = Path(spec.origin).parent / "ops" / "adam" if spec and spec.origin else folder
    if any(folder.glob(f"{'' if given else 'py*/'}cpu_adam/cpu_adam.so")) or any(built_in.glob("cpu_adam_op*.so")):
        return None
    return f"its CPU Adam is compiled at this first start, which takes minutes; later starts find it in {folder}"


def adam_obstacles() -> tuple[str, ...]:
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
