"""Code in place of the model's own, used where it is measured to compute the same: PyTorch's varlen
kernel, Liger's kernels, compiled blocks, LoRA layers in groups.

Logits and gradients of a small model have to agree in fp32; in 16 bits the other code must not be
further from fp32 than the plain one is. PyTorch's varlen kernel is compared with a call for each
chat, on the run's own GPU.

Shape letters: T tokens of all chats, H heads, G heads of keys, D width of a head.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import itertools
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.log import one_line
from sft_play.machine.software import LIGER_PACKAGE, install_command
from sft_play.planner.kernels import LIGER_VERSION
from sft_play.planner.plan import Plan
from sft_play.training import distributed
from sft_play.training.class_checks.small_model import (
    VOCABULARY_SIZE,
    pack_row,
    run_model,
    small_config,
    small_model,
)
from sft_play.training.model import attention_functions, grouped_adapters
from sft_play.training.model.grouped_adapters import GroupedAdapters
from sft_play.training.prepare.model_spec import ModelSpec, decoder_layers

logger = logging.getLogger(__name__)

# Difference in fp32, over the size of what is compared, that counts as rounding: 6e-6 at most for
# llama, mistral, phi3, qwen2, qwen3 and gpt_oss, 1.1e-4 for qwen3_5, whose recurrence amplifies it
# (liger-kernel 0.8.5 in Triton's interpreter, benchmarks/LOG.md); a norm that is wrong by 1% is
# further off.
FP32_TOLERANCE = 1e-3
# How many times as far from fp32 as the plain code other code may be in 16 bits.
MAX_HALF_ERROR_RATIO = 1.5
_ROWS, _LENGTH = 2, 23
# Tokens of the chats on which a kernel is tried: one alone, and some beyond a kernel's tiles of 64
# and 128.
KERNEL_CHAT_LENGTHS = (100, 1, 27, 256, 129)
# Relative error that counts as rounding in 16 bits, which give 0.004. A chat that sees another, or
# a window that is off by one, is off by 0.09 and more.
KERNEL_TOLERANCE = 0.02

TensorList = list[torch.Tensor]
CheckResult = TypeVar("CheckResult")


@dataclass(frozen=True)
class ClassCheck:
    """How far other code is from the plain code, over logits and gradients, the worst of them."""

    # Relative difference in fp32.
    fp32_difference: float
    # Its error in the run's dtype over the plain code's own; 0 for a run in fp32.
    half_precision_ratio: float

    @property
    def is_rounding(self) -> bool:
        """Whether both are rounding (a figure that is not a number is none)."""
        return (
            self.fp32_difference < FP32_TOLERANCE
            and self.half_precision_ratio < MAX_HALF_ERROR_RATIO
        )

    @property
    def figures_text(self) -> str:
        """The measured differences in words."""
        half = f", {self.half_precision_ratio:.2f} of the plain error in 16 bits"
        return f"{self.fp32_difference:.0e} in fp32{half if self.half_precision_ratio else ''}"


def all_ranks_agree(
    check: Callable[[], tuple[CheckResult, str | None]],
) -> tuple[CheckResult | None, str | None]:
    """Call `check` on all ranks and return its result, or None and the problem if any rank has one.
    What `check` raises is a problem too: a class can break at anything that is put into it."""
    result, problem = None, None
    try:
        result, problem = check()
    except Exception as error:
        problem = f"not proven: {type(error).__name__}: {one_line(str(error), limit=200)}"
    if distributed.any_rank(problem is not None):
        return None, problem or "another rank cannot"
    return result, None


def check_replaced_code(
    small_configs: Iterable[Any],
    replace: Callable[[Sequence[Any]], AbstractContextManager[Any]],
    *,
    attention: str,
    device: torch.device,
    dtype: torch.dtype,
    packed: bool = False,
    prepare: Callable[[Any], Any] = lambda model: model,
) -> ClassCheck:
    """How far other code is from the plain code on a small model of each config, the worst of them.
    `replace` puts it into models for as long as its context is open; `packed`: in 16 bits rows lie
    one behind the other, told apart by boundaries, for which attention has no kernel in fp32: there
    they are padded ones. `prepare` makes of a model the one that is run, under autocast in 16
    bits where it has made fp32 parameters."""
    differences, ratios, generator = [], [0.0], np.random.default_rng(1)
    packs = [pack_row([generator.integers(3, VOCABULARY_SIZE, size=_LENGTH)]) for _ in range(_ROWS)]
    rows = [{"input_ids": pack["input_ids"], "labels": pack["labels"]} for pack in packs]

    def compute(model: Any, flat: bool) -> TensorList:
        # packed 4-bit weights are no numbers to compute in
        dtypes = {one.dtype for one in model.parameters() if one.is_floating_point()}
        with torch.autocast(device.type, dtype, enabled=len(dtypes) > 1):
            outputs = run_model(model, packs if flat else rows, flat=flat, uses_masks=False)
        return [outputs.logits, *outputs.weight_gradients]

    for config in small_configs:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # all ranks and runs compare the same models
            model = small_model(config, "sdpa" if packed else attention, trust_remote_code=False)
            variants = [(prepare(model.to(device)), False)]
            if dtype != torch.float32:
                torch.manual_seed(0)
                model = small_model(config, attention, trust_remote_code=False)
                variants.append((prepare(model.to(device, dtype)), packed))
            reference, *reference_half = (compute(*variant) for variant in variants)
            with replace([model for model, _ in variants]):
                replaced, *replaced_half = (compute(*variant) for variant in variants)
        differences.append(relative_difference(replaced, reference))
        for plain, other in zip(reference_half, replaced_half, strict=True):
            error = _typical_difference(plain, reference)
            ratios.append(_typical_difference(other, reference) / error if error else 0.0)
    return ClassCheck(_max_or_nan(differences), _max_or_nan(ratios))


def relative_difference(tensors: TensorList, references: TensorList) -> float:
    """The largest difference of a tensor over its size, as norms; nan if any is."""
    return _max_or_nan(
        [
            float((tensor - reference).norm() / reference.norm().clamp(min=1e-12))
            for tensor, reference in zip(tensors, references, strict=True)
        ]
    )


def _typical_difference(tensors: TensorList, references: TensorList) -> float:
    # of all tensors, by their squares: in 16 bits a gradient of a deep small model can be off by
    # its size and more, and the worst of a hundred is chance. Beyond its size all are alike
    differences = [
        (tensor - reference).norm() / reference.norm().clamp(min=1e-12)
        for tensor, reference in zip(tensors, references, strict=True)
    ]
    return float(torch.stack(differences).clamp(max=1.0).square().mean().sqrt())


def _max_or_nan(figures: Sequence[float]) -> float:
    return float(torch.tensor(figures).max())  # Python's own would pass over a nan


def _compare_on_small_models(
    check: Callable[..., ClassCheck], model: Any, plan: Plan, *, device: torch.device, problem: str
) -> tuple[ClassCheck, str | None]:
    # what `check` finds for the class and the precision of a run's model; a problem where it is
    # more than rounding
    attention = str(model.config._attn_implementation)
    # whole rows here, where no ranks share them
    if attention == attention_functions.ULYSSES_ATTENTION:
        attention = "sdpa"
    result = check(
        model.config,
        attention=attention,
        device=device,
        dtype=getattr(torch, plan.precision.compute),
    )
    if result.is_rounding:
        return result, None
    return result, f"{problem}: {result.figures_text}"


# --- PyTorch's varlen kernel ----------------------------------------------------------------------
# Heads of queries and of keys, and their width.
HeadShape = tuple[int, int, int]


def verify_varlen_kernel(model_spec: ModelSpec, plan: Plan, *, device: torch.device) -> None:
    """Use PyTorch's kernel where the plan counts on it and it is proven here; all ranks do the
    same."""
    attention_functions.enable_flash(enabled=False)
    if (
        model_spec.attention.name != attention_functions.VARLEN_ATTENTION
        or plan.choice.step.one_by_one
    ):
        return
    dtype = getattr(torch, plan.precision.compute)

    def check_kernel() -> tuple[float, str | None]:
        largest = 0.0
        for heads, window in _kernel_cases(
            model_spec.hf_config, plan.choice.layout.tensor_parallel
        ):
            error = kernel_error(
                attention_functions.flash_attention,
                heads,
                window=window,
                dtype=dtype,
                device=device,
            )
            largest = max(largest, error)
            if not error <= KERNEL_TOLERANCE:
                return (
                    error,
                    f"it is wrong on {device} for heads {heads}, window {window}: {error:.2g}",
                )
        return largest, None

    error, problem = all_ranks_agree(check_kernel)
    if problem is not None:
        logger.warning(
            "Attention: falls back to one call of sdpa for each chat, with the same numbers, but"
            " slower and with more memory than planned: PyTorch's varlen kernel: %s",
            problem,
        )
        return
    attention_functions.enable_flash(enabled=True)
    logger.debug(
        "Attention: on this GPU PyTorch's varlen kernel is within %.1g of a call for each chat",
        error,
    )


def kernel_error(
    kernel: Callable[..., torch.Tensor],
    heads: HeadShape,
    *,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """Compare a kernel's outputs and gradients with one call for each chat, in fp32 on the CPU;
    returns the `relative_difference`."""
    generator, (queries, keys, width) = torch.Generator().manual_seed(1), heads
    shapes = [(sum(KERNEL_CHAT_LENGTHS), count, width) for count in (queries, keys, keys, queries)]
    *values, weight = (
        torch.randn(shape, generator=generator).to(dtype).float() for shape in shapes
    )
    inputs = [tensor.to(device, dtype).requires_grad_() for tensor in values]
    reference_inputs = [tensor.requires_grad_() for tensor in values]
    options: dict[str, Any] = {"scale": width**-0.5, "window": window}
    boundaries = torch.tensor(
        [0, *itertools.accumulate(KERNEL_CHAT_LENGTHS)], dtype=torch.int32, device=device
    )
    output = kernel(*inputs, boundaries, max(KERNEL_CHAT_LENGTHS), **options)
    query, key, value = reference_inputs
    reference = attention_functions.attention_per_chat(
        query, key, value, KERNEL_CHAT_LENGTHS, **options
    )
    gradients = torch.autograd.grad(output, inputs, weight.to(device, dtype))
    return relative_difference(
        [tensor.detach().cpu().float() for tensor in (output, *gradients)],
        [reference.detach(), *torch.autograd.grad(reference, reference_inputs, weight)],
    )


# Of all layers, where their sizes differ.
def _kernel_cases(hf_config: Any, tensor_parallel: int) -> list[tuple[HeadShape, int | None]]:
    if getattr(hf_config, "is_heterogeneous", False):
        layer_configs = [
            hf_config.per_layer_config[layer] for layer in range(hf_config.num_hidden_layers)
        ]
        return sorted(
            {case for layer in layer_configs for case in _kernel_cases(layer, tensor_parallel)},
            key=str,
        )
    queries = hf_config.num_attention_heads
    width = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // queries
    keys = getattr(hf_config, "num_key_value_heads", None) or queries
    # Gemma 4's layers without a window
    widths = {width, getattr(hf_config, "global_head_dim", None) or width}
    key_counts = {keys, getattr(hf_config, "num_global_key_value_heads", None) or keys}
    windows: list[int | None] = [None]
    if isinstance(window := getattr(hf_config, "sliding_window", None), int) and window > 0:
        # shorter than most of the chats
        windows.append(min(window, 48))
    heads = [
        (max(1, queries // tensor_parallel), max(1, key_count // tensor_parallel), head_width)
        for key_count, head_width in itertools.product(sorted(key_counts), sorted(widths))
    ]
    return list(itertools.product(heads, windows))


# --------------------------------------------------------------------------------------------------
# Liger's Triton kernels in place of a model's norms, gated activations and rotations, where they
# compute the same: measured on the run's own device, on small models of the class with rows as wide
# as the real one's.

LIGER_MODULE = "liger_kernel"
GATE_KERNELS = ("swiglu", "geglu")
# What may be replaced, by the names of Liger's arguments; all others (its losses) are switched off.
# Gates stay in a model with experts, which the package would replace too, by code that computes
# gradients of frozen weights and multiplies in the dtype of the hidden states, not in autocast's
# (0.8.5, ops/fused_moe.py).
REPLACEABLE_KERNELS = ("rms_norm", *GATE_KERNELS, "rope")
# Closed, it puts back what Liger's functions replaced for this process's model: another stage
# begins without them.
_kernels_of_run = contextlib.ExitStack()


@dataclass(frozen=True)
class ActiveKernels:
    """The kernels of a run: what Liger's replaced (REPLACEABLE_KERNELS), or why the plain ones run
    where the config asks for more."""

    replaced: tuple[str, ...] = ()
    reason: str | None = None


def restore_plain_code() -> None:
    """Put back what Liger's functions replaced for this process's last model, such as that of the
    stage before."""
    _kernels_of_run.close()


def check_kernels(config: RunConfig, plan: Plan) -> None:
    """Raises ConfigError where train.kernels=liger cannot be followed on this machine or in this
    layout."""
    if config.train.kernels == "liger" and (problem := _liger_problem(plan)):
        raise ConfigError(f"train.kernels: liger: {problem}; use train.kernels=auto, or none")


def activate_kernels(
    model: Any, config: RunConfig, plan: Plan, *, device: torch.device
) -> ActiveKernels:
    """Replace what Liger has kernels for, if the config wants it and they are proven; all ranks do
    the same. The model has no adapters yet. Raises ConfigError: kernels were asked for by name, and
    compute something else."""
    restore_plain_code()
    if config.train.kernels == "none":
        return ActiveKernels()

    def check() -> tuple[ClassCheck | None, str | None]:
        problem = _liger_problem(plan) or _unknown_class_problem(model)
        if problem is not None:
            return None, problem
        return _compare_on_small_models(
            check_liger_kernels,
            model,
            plan,
            device=device,
            problem="they differ on a small model of this class",
        )

    class_check, reason = all_ranks_agree(check)
    if class_check is None:
        if config.train.kernels == "liger":
            raise ConfigError(f"train.kernels: liger: {reason}; use train.kernels=auto, or none")
        # on a CPU nobody misses them
        level = logging.INFO if plan.hardware.device == "cuda" else logging.DEBUG
        logger.log(level, "Kernels: the plain ones; train.kernels=auto: %s", reason)
        return ActiveKernels(reason=reason)
    replaced = _kernels_of_run.enter_context(_liger_kernels([model]))
    names, figures = ", ".join(replaced), class_check.figures_text
    logger.debug("Kernels: Liger's %s (on small models of this class: %s)", names, figures)
    return ActiveKernels(replaced)


def check_liger_kernels(
    hf_config: Any, *, attention: str, device: torch.device, dtype: torch.dtype
) -> ClassCheck:
    """How far Liger's kernels are from the plain code, on two small models, one with hidden states
    and one with an MLP as wide as the real one's: wide rows take other ways through them."""
    small_configs = []
    for width in ("hidden_size", "intermediate_size"):
        small_configs.append(small_config(hf_config))
        if isinstance(getattr(hf_config, width, None), int):
            setattr(small_configs[-1], width, getattr(hf_config, width))
    return check_replaced_code(
        small_configs, _liger_kernels, attention=attention, device=device, dtype=dtype
    )


def _liger_problem(plan: Plan) -> str | None:
    if importlib.util.find_spec(LIGER_MODULE) is None:
        return (
            f"{LIGER_PACKAGE} is not installed here"
            f" ({install_command(f'{LIGER_PACKAGE}=={LIGER_VERSION}')})"
        )
    if plan.hardware.device != "cuda":
        return "its kernels are Triton's, which need a CUDA GPU"
    if plan.choice.layout.tensor_parallel > 1:
        return "tensor-parallel ranks replace the same forwards (model.mesh_shape)"
    return None


def _unknown_class_problem(model: Any) -> str | None:
    model_type = str(getattr(model.config, "model_type", None))
    is_known = model_type in _liger_functions() and type(model).__module__.startswith(
        "transformers.models."
    )
    return None if is_known else f"it has no kernels for {one_line(model_type)}"


def _liger_functions() -> dict[str, Any]:
    return dict(
        importlib.import_module(
            f"{LIGER_MODULE}.transformers.monkey_patch"
        ).MODEL_TYPE_TO_APPLY_LIGER_FN
    )


@contextlib.contextmanager
def _liger_kernels(models: Sequence[Any]) -> Iterator[tuple[str, ...]]:
    # yields their names; at the end the module that the class is from has its own names again,
    # since Liger replaces classes and functions there too
    module = sys.modules[type(models[0]).__module__]
    plain_names = dict(vars(module))
    try:
        replaced = [_apply_liger(model) for model in models]
        # open as long as a run lasts, it must not keep the model of a stage that has ended
        del models
        yield replaced[0]
    finally:
        for name, value in plain_names.items():
            setattr(module, name, value)


def _apply_liger(model: Any) -> tuple[str, ...]:
    apply_liger = _liger_functions()[model.config.model_type]
    options = inspect.signature(apply_liger).parameters
    has_experts = any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules())
    kinds = tuple(
        kind for kind in REPLACEABLE_KERNELS if not (has_experts and kind in GATE_KERNELS)
    )
    # what is left at its default is what the package has a kernel for in this class
    apply_liger(model=model, **{name: False for name in options if name not in (*kinds, "model")})
    return tuple(kind for kind in kinds if kind in options and options[kind].default)


# --------------------------------------------------------------------------------------------------
# Blocks of a model compiled by torch.compile, where it computes what the plain code computes.
#
# Each block is compiled in place, with lengths and numbers of rows as symbols. Evaluation and
# generation run the plain code. The time of compiling does not count for the training's speed; the
# summary has it.

COMPILE_BACKEND = "inductor"
# Graphs of one function beyond which dynamo compiles no more and runs plain code: kinds of blocks,
# each for one row and for several, with inputs that need a gradient and without, checkpointed or
# not. torch's own limit of 8 is less.
MAX_GRAPHS_PER_BLOCK = 32


class CompileMonitor(TrainerCallback):
    """Compiled blocks: their time, told to `on_compiled`, and what became of them; `close` ends the
    watch, and puts torch's settings back; the blocks stay compiled."""

    def __init__(self) -> None:
        from torch._dynamo import config
        from torch._dynamo.callback import callback_handler
        from torch._functorch import config as functorch_config

        self.on_compiled: list[Callable[[float], None]] = []
        self._seconds = self._compile_start = 0.0
        self._has_warned = False
        stack = contextlib.ExitStack()
        callback_handler.register_start_callback(self._on_compile_start)
        stack.callback(callback_handler.remove_start_callback, self._on_compile_start)
        callback_handler.register_end_callback(self._on_compile_end)
        stack.callback(callback_handler.remove_end_callback, self._on_compile_end)
        # DDP's own optimizer splits graphs by its buckets, and takes none that recompute; blocks
        # are small already
        stack.enter_context(config.patch(optimize_ddp=False, recompile_limit=MAX_GRAPHS_PER_BLOCK))
        # compiled with the forward pass, the backward one fails where the plain code can still run
        stack.enter_context(functorch_config.patch(force_non_lazy_backward_lowering=True))
        self.close = stack.close
        self._initial_counts = _dynamo_counts()

    def figures(self) -> dict[str, Any]:
        """`compile` of the summary: seconds in training passes, which the speed leaves out, graphs,
        `cached`, which of inductor's were in its cache, and `breaks`, at which plain code runs:
        between two graphs, or since too many kinds of passes were seen."""
        graphs, breaks, cached = (
            count - initial
            for count, initial in zip(_dynamo_counts(), self._initial_counts, strict=True)
        )
        return {
            "seconds": round(self._seconds, 2),
            "graphs": graphs,
            "cached": cached,
            "breaks": breaks,
        }

    def _on_compile_start(self, _: Any) -> None:
        self._compile_start = time.perf_counter()

    def _on_compile_end(self, _: Any) -> None:
        seconds = time.perf_counter() - self._compile_start
        self._seconds += seconds
        for callback in self.on_compiled:
            callback(seconds)

    def run_block(
        self,
        blocks: Sequence[torch.nn.Module],
        block: torch.nn.Module,
        compiled: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a compiled block. The first that the compiler fails at leaves all of them plain, with
        one warning: adapters and packed weights are not in the small model that was proven."""
        from torch._dynamo.exc import TorchDynamoException

        try:
            return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            for one in blocks:
                one._compiled_call_impl = None
            self._has_warned = True
            # the first paragraph: after it torch advises on its own settings
            problem = " ".join(str(error).partition("\n\n")[0].split())
            logger.warning(
                "Compiled blocks: none, the plain code runs: %s", one_line(problem, limit=200)
            )
            return block(*args, **kwargs)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Warn once of what is not compiled."""
        figures = self.figures()
        if not self._has_warned and (figures["breaks"] or not figures["graphs"]):
            self._has_warned = True
            logger.warning(
                "Compiled blocks: %d graphs, and plain code runs at %d places"
                " (TORCH_LOGS=graph_breaks says where and why)",
                figures["graphs"],
                figures["breaks"],
            )


def verify_compiled_blocks(model: Any, plan: Plan, *, device: torch.device) -> bool:
    """True if the plan compiles blocks and they are proven for the class of the model, which has no
    adapters and no other kernels yet; all ranks say the same."""
    if not plan.compiled:
        return False
    restore_plain_code()
    class_check, reason = all_ranks_agree(
        lambda: _compare_on_small_models(
            check_compiled_blocks,
            model,
            plan,
            device=device,
            problem="a small model of this class computes something else compiled",
        )
    )
    if class_check is None:
        logger.warning("Compiled blocks: none, the plain code runs: %s", reason)
        return False
    logger.debug(
        "Compiled blocks: proven on a small model of this class: %s", class_check.figures_text
    )
    return True


def compile_blocks(model: torch.nn.Module) -> CompileMonitor:
    """Compile a model's blocks, each at its first pass.

    A block's `forward` checkpoints and its hooks shard, so that checkpointing is inside what is
    compiled and FSDP2's gathers are around it, as torchtitan has it.
    """
    monitor, blocks = CompileMonitor(), decoder_layers(model)
    logger.debug("Compiled blocks: %d, at their first pass", compile_in_place(model))
    for block in blocks:
        block._compiled_call_impl = functools.partial(
            monitor.run_block, blocks, block, block._compiled_call_impl
        )
    return monitor


def check_compiled_blocks(
    hf_config: Any, *, attention: str, device: torch.device, dtype: torch.dtype
) -> ClassCheck:
    """How far compiled blocks are from the plain code; nothing stays compiled. Raises ValueError:
    no block compiles."""
    packed = attention == attention_functions.VARLEN_ATTENTION and dtype != torch.float32
    return check_replaced_code(
        [small_config(hf_config)],
        _compiled_blocks,
        attention=attention,
        device=device,
        dtype=dtype,
        packed=packed,
    )


@contextlib.contextmanager
def _compiled_blocks(models: Sequence[Any]) -> Iterator[None]:
    initial_graphs = _dynamo_counts()[0]
    for model in models:
        compile_in_place(model)
    try:
        yield
        # dynamo runs as plain code what it cannot compile, without an error
        if _dynamo_counts()[0] == initial_graphs:
            raise ValueError("none of its blocks compiles")
    finally:
        torch.compiler.reset()


def compile_in_place(model: torch.nn.Module) -> int:
    """Compile each block of a model at its next pass; returns how many there are."""
    blocks = decoder_layers(model)
    for block in blocks:
        block.compile(backend=COMPILE_BACKEND, dynamic=True)
    return len(blocks)


def _dynamo_counts() -> tuple[int, int, int]:
    # graphs, breaks or functions that it gave up, and graphs of inductor from its cache, where a
    # graph has one forwards and one backwards
    from torch._dynamo.utils import counters

    limit_breaks = sum(
        count for name, count in counters["unimplemented"].items() if "limit exceeded" in name
    )
    return (
        counters["stats"]["unique_graphs"],
        sum(counters["graph_break"].values()) + limit_breaks,
        counters["inductor"]["fxgraph_cache_hit"],
    )


# --------------------------------------------------------------------------------------------------
# LoRA layers that train in groups, by fewer operators than PEFT's (training/model/
# grouped_adapters.py), where they compute what PEFT's compute.

# Rank of the adapters on a small model.
_TRIED_RANK = 4


def activate_grouped_adapters(
    model: Any, plan: Plan, *, device: torch.device
) -> GroupedAdapters | None:
    """Let the LoRA layers of a PEFT model train in groups, if they are proven; None where PEFT's
    forward stays. All ranks do the same."""
    base = model.get_base_model()
    targets = model.peft_config[model.active_adapter].target_modules
    is_quantised = any(hasattr(weight, "quant_state") for weight in base.parameters())
    class_check, reason = all_ranks_agree(
        lambda: _compare_on_small_models(
            functools.partial(check_grouped_adapters, targets=targets, is_quantised=is_quantised),
            base,
            plan,
            device=device,
            problem="a small model of this class trains otherwise with adapters in groups",
        )
    )
    grouped = None
    if class_check is not None:
        grouped = grouped_adapters.group_adapters(
            base,
            grouped_adapters.find_shared_inputs(base.config),
            dtype=getattr(torch, plan.precision.compute),
        )
    if grouped is None:
        level = logging.INFO if plan.hardware.device == "cuda" else logging.DEBUG
        problem = reason or "no layer is a plain one"
        logger.log(level, "Adapters: PEFT's forward runs, not groups of layers: %s", problem)
        return None
    logger.debug(
        "Adapters: %d layers train in %d groups (on a small model of this class: %s)",
        sum(len(group.layers) for group in grouped.groups),
        len(grouped.groups),
        class_check.figures_text if class_check is not None else "",
    )
    return grouped


def check_grouped_adapters(
    hf_config: Any,
    *,
    attention: str,
    device: torch.device,
    dtype: torch.dtype,
    targets: Any = "all-linear",
    is_quantised: bool = False,
) -> ClassCheck:
    """How far adapters in groups are from PEFT's own, in logits and in their gradients; on the
    layers of PEFT's `target_modules`, whose weights are in 4 bits where the run's are
    (`is_quantised`)."""
    shared_inputs = grouped_adapters.find_shared_inputs(hf_config)

    @contextlib.contextmanager
    def group(models: Sequence[Any]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for model, model_dtype in zip(models, (torch.float32, dtype), strict=False):
                grouped = grouped_adapters.group_adapters(model, shared_inputs, dtype=model_dtype)
                if grouped is None:
                    raise ValueError("its layers take no plain adapter")
                grouped.refresh_copies()
                stack.callback(grouped.remove)
            yield

    return check_replaced_code(
        [small_config(hf_config)],
        group,
        attention=attention,
        device=device,
        dtype=dtype,
        prepare=functools.partial(_add_adapters, targets=targets, is_quantised=is_quantised),
    )


def _quantise_layers(model: Any) -> None:
    """Put NF4 layers of bitsandbytes in the place of the linear layers of a model's blocks, as
    loading a base for QLoRA does."""
    bitsandbytes = importlib.import_module("bitsandbytes").nn
    model.is_loaded_in_4bit = True  # PEFT asks for it
    for block in decoder_layers(model):
        for parent in list(block.modules()):
            for name, layer in list(parent.named_children()):
                if type(layer) is not torch.nn.Linear:
                    continue
                weight = layer.weight
                quantised = bitsandbytes.Linear4bit(
                    layer.in_features,
                    layer.out_features,
                    bias=layer.bias is not None,
                    compute_dtype=weight.dtype,
                    quant_type="nf4",
                )
                quantised.weight = bitsandbytes.Params4bit(
                    weight.data, requires_grad=False, quant_type="nf4", module=quantised
                )
                quantised.bias = layer.bias
                setattr(parent, name, quantised.to(weight.device))


def _add_adapters(model: Any, targets: Any, *, is_quantised: bool) -> Any:
    if is_quantised:
        _quantise_layers(model)
    # B is random, since a gradient of A from zeros says nothing
    adapters = LoraConfig(target_modules=targets, r=_TRIED_RANK, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, of patterns that it adds for a class itself
        adapted = get_peft_model(model, adapters)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / _TRIED_RANK)
    return adapted
