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
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from sft_play.config.leaves import training_options
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

ADAM: dict[str, Any] = {"betas": [0.9, 0.999], "eps": 1e-8}
"""AdamW's values where no training option sets them: the defaults of transformers' `TrainingArguments`."""

BY_HIDDEN_SIZE: dict[str, tuple[Callable[[int], int], str]] = {
    "reduce_bucket_size": (lambda size: size * size, "hidden size squared"),
    "stage3_prefetch_bucket_size": (lambda size: int(0.9 * size * size), "0.9 × hidden size squared"),
    "stage3_param_persistence_threshold": (lambda size: 10 * size, "10 × hidden size"),
}
"""Keys of `zero_optimization` whose "auto" follows from the model's widest hidden size: the number of elements, and the
formula in words."""


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
        mixed, batch = config.distributed.mixed_precision, plan.counted_batch
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

    `torch_adam` is the reason why DeepSpeed's own CPU Adam cannot run (`adam_obstacles`): torch's AdamW then updates
    the offloaded states. Optimizer and schedule are the run YAML's; a file's blocks that agree with it are left out.

    Raises:
        ConfigError: a number of the file contradicts the plan; both are named, all contradictions at once.
    """
    resolved = copy.deepcopy(config)
    shown: list[str] = []
    problems: list[str] = []
    layout = layout_of(config, name=name, planned=numbers.layout)
    if layout != numbers.layout:  # memory and speed were planned for another one
        problems.append(
            f"the file asks for {layout}, but the plan is for {numbers.layout}; leave STRATEGY= out, or name another "
            "file"
        )
    for step in (
        _fill_batch,
        _fill_options,
        _fill_precision,
        _fill_dtypes,
        _fill_zero,
        _fill_optimizer,
        _fill_scheduler,
    ):
        problems += step(resolved, numbers, shown)
    if problems:
        raise ConfigError("\n".join(f"{name}: {problem}" for problem in problems))
    if not resolved.get("zero_allow_untested_optimizer"):  # DeepSpeed stops at optimizer classes that it does not know
        resolved["zero_allow_untested_optimizer"] = True
        shown.append("zero_allow_untested_optimizer → true (train.optim is the plan's choice)")
    if torch_adam and offloads(resolved["zero_optimization"], "offload_optimizer"):
        resolved["zero_force_ds_cpu_optimizer"] = False
        shown.append(
            f"zero_force_ds_cpu_optimizer → false: torch's AdamW steps on the CPU instead, more slowly ({torch_adam})"
        )
    shown += drop_autos(resolved)
    return resolved, tuple(shown)


def _fill_batch(config: Config, numbers: PlanNumbers, shown: list[str]) -> list[str]:
    product = f"{numbers.micro_batch} × {numbers.grad_accum} × {numbers.data_parallel_ranks} ranks"
    # DeepSpeed asserts that the first is the product of the others and the ranks (0.19: `_batch_assertion`).
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
                f'set it to "auto", or run with train.{BATCH_KEYS[key]}={present}'
            )
    return problems


def _fill_options(config: Config, numbers: PlanNumbers, shown: list[str]) -> list[str]:
    """The training options outside the optimizer's block: DeepSpeed's engine clips by its own number only."""
    problems = []
    for path, (ours, value) in numbers.options.items():
        present = value_at(config, path)
        if path.startswith("optimizer."):
            continue
        if present in (AUTO, None):
            put_at(config, path, value)
            shown.append(f"{path} → {value:g} ({ours})")
        elif not same_numbers(present, value):
            problems.append(
                f'{path}: {present:g} contradicts {ours}: {value:g}; set it to "auto", or run with {ours}={present:g}'
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
            continue  # absent means disabled
        section = {} if section is None else section
        config[key] = section
        present = section.get("enabled", AUTO)
        if present in (AUTO, None):
            section["enabled"] = wanted
            shown.append(f"{key}.enabled → {show(wanted)} (the run computes in {numbers.compute})")
        elif present is not wanted:
            section["enabled"] = wanted
            changed.append(f"{key}.enabled: {show(present)} → {show(wanted)}")
    autocast = config.get("torch_autocast")
    if isinstance(autocast, dict) and autocast.get("enabled") is True:  # a second way to the same precision
        autocast["enabled"] = False
        changed.append("torch_autocast.enabled: true → false")
    if changed:
        shown.append(
            f"{', '.join(changed)} (the run computes in {numbers.compute}, as train.bf16 and train.fp16 choose)"
        )
    return []


def _fill_dtypes(config: Config, numbers: PlanNumbers, shown: list[str]) -> list[str]:
    for key, field in DTYPE_KEYS.items():
        wanted = getattr(numbers, field)
        if wanted is not None and value_at(config, key) != wanted:
            put_at(config, key, wanted)
            shown.append(f"{key} → {wanted} (distributed.mixed_precision.{field})")
    return []


def _fill_zero(config: Config, numbers: PlanNumbers, shown: list[str]) -> list[str]:
    zero = config.get("zero_optimization") or {}
    config["zero_optimization"] = zero
    stage = STAGES[numbers.layout][0]
    if zero.get("stage", AUTO) in (AUTO, None):
        zero["stage"] = stage
        shown.append(f"zero_optimization.stage → {stage} (the plan's layout, {numbers.layout})")
    gather = "stage3_gather_16bit_weights_on_model_save"
    if stage == 3 and zero.get(gather) is not True:
        zero[gather] = True
        shown.append(f"zero_optimization.{gather} → true (checkpoints hold whole weights)")
    if "reduce_bucket_size" not in zero:  # DeepSpeed's default, 5e8 elements, would take another GiB
        zero["reduce_bucket_size"] = AUTO
    for key, (formula, how) in BY_HIDDEN_SIZE.items():
        if zero.get(key) == AUTO and (stage == 3 or not key.startswith("stage3_")):
            zero[key] = formula(numbers.hidden_size)
            shown.append(f"zero_optimization.{key} → {zero[key]:,} ({how}: {numbers.hidden_size:,})")
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
        problems.append(f"optimizer.type: {show(kind)} is not supported; train.optim of the run YAML chooses")
    ours = _optimizer_params(numbers.options)
    for key, value in (block.get("params") or {}).items():
        if value == AUTO or (key in _ADAM_SWITCHES and isinstance(value, bool)):
            continue  # it leaves the number to the run, or chooses between implementations of the same update
        where, planned = ours.get(key, ("the run YAML's optimizer, which has no such number", None))
        if not same_numbers(value, planned):
            wanted = "" if planned is None else f": {show(planned)}"
            problems.append(f'optimizer.params.{key}: {show(value)} contradicts {where}{wanted}; set it to "auto"')
    shown.append("optimizer left out: the run YAML's is used (train.optim, learning_rate, weight_decay)")
    return problems


def _optimizer_params(options: Mapping[str, tuple[str, Any]]) -> dict[str, tuple[str, Any]]:
    """The run's values of what an optimizer's block may hold: whose they are, value."""
    params = {name: ("the run's", copy.copy(value)) for name, value in ADAM.items()}
    for path, (ours, value) in options.items():
        name, _, place = path.removeprefix("optimizer.params.").partition(".")
        if place:
            params[name][1][int(place)] = value
            params[name] = (f"the run's ({ours})", params[name][1])
        elif name != path:
            params[name] = (ours, value)
    return params


def _fill_scheduler(config: Config, numbers: PlanNumbers, shown: list[str]) -> list[str]:
    """The schedule is the run YAML's: DeepSpeed's own would silently replace it."""
    block = config.pop("scheduler", None)
    if block is None:
        return []
    # a warm-up from 0, and its form, are what a schedule has anyway: they ask for no numbers of their own
    usual = (("warmup_min_lr", 0), ("warmup_type", "linear"), ("warmup_type", "log"))
    fixed = {key: value for key, value in (block.get("params") or {}).items() if value != AUTO}
    own = [f"{key}: {show(value)}" for key, value in sorted(fixed.items()) if (key, value) not in usual]
    if own:
        return [
            f"scheduler.params has its own numbers ({', '.join(own)}) and the run YAML has a schedule too "
            '(train.lr_scheduler_type, warmup_steps); remove the scheduler block, or set its numbers to "auto"'
        ]
    shown.append("scheduler left out: the run YAML's is used (train.lr_scheduler_type, warmup_steps)")
    return []


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
    """What to say where the first step waits for DeepSpeed's CPU Adam to be compiled; None where it is there.

    Sources: DeepSpeed's `op_builder/builder.py` (`load`: a built-in module, else torch's folder of extensions) and
    torch's `torch/utils/cpp_extension.py` (`_get_build_directory`).
    """
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(given) if given else caches / "torch_extensions"
    spec = find_spec("deepspeed")
    built_in = Path(spec.origin).parent / "ops" / "adam" if spec and spec.origin else folder
    if any(folder.glob(f"{'' if given else 'py*/'}cpu_adam/cpu_adam.so")) or any(built_in.glob("cpu_adam_op*.so")):
        return None
    return f"its CPU Adam is compiled at this first start, which takes minutes; later starts find it in {folder}"


def adam_obstacles() -> tuple[str, ...]:
    """What DeepSpeed lacks to build its CPU Adam at the first start: a C++ compiler, ninja, Python's headers.

    Empty where nothing is missing; the build itself may still fail. Sources: DeepSpeed's
    `op_builder/builder.py` (`jit_load`) and torch's `torch/utils/cpp_extension.py`, which reads `CXX`.
    """
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
