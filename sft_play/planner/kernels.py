"""Which kernels a plan counts: of attention, of norms, gates and rotations (plain or Liger's), and
of a mixture's experts.

Each by one rule for the plan, which knows the shape, and the run, which knows the class.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, ModelError
from sft_play.log import one_line
from sft_play.machine.software import LIGER_PACKAGE, CudaLibraries, install_command
from sft_play.models.shape import ModelShape
from sft_play.planner.layout import Layout
from sft_play.planner.precision import DTYPE_BYTES, DTYPE_SHORT_NAMES, UNSHARDED_LAYOUTS, Precision

# Which attention code runs, by one rule for the plan, which knows the shape, and the run, which
# knows the class; the kernels behind sdpa, in one table that plan, trace, self-test and run read;
# and whether rows come with a mask.
#
# The table follows PyTorch 2.13 (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp); 2.11 and
# 2.12 have the same order. There cuDNN's kernel comes first on compute capability 9.x and 10.x,
# about twice as fast as flash attention on Hopper, and it builds a graph for every new shape of a
# batch: 0.03 to 1 s each (https://github.com/modelscope/FunASR/pull/3705). So a run takes it where
# all batches have one shape, and switches it off elsewhere; nor is it taken where its backward pass
# is not safe: for heads wider than 128, or of two widths.
#
# Masks are decided from shapes, and measured before a run by `training.class_checks.masking`.
# Attention is causal and padding is at the end, so no token of a chat sees a padded position. Chats
# that share a row are told apart by their boundaries: PyTorch's flash kernel takes those of many
# chats; where it does not run, each chat is a call of its own.

# Names of transformers' implementations.
AttentionName = Literal["sdpa", "eager", "flash_attention_2"]
SdpaKernel = Literal["cudnn", "flash", "efficient", "math"]


def select_attention(implementation: str, *, has_sdpa: bool) -> AttentionName:
    """Resolve `model.attn_implementation` for a model. Kernels of the hub are flash attention 2, to
    the byte."""
    if is_hub_kernel(implementation):
        return "flash_attention_2"
    if implementation == "auto":
        return "sdpa" if has_sdpa else "eager"
    return cast(AttentionName, implementation)


def is_hub_kernel(implementation: str) -> bool:
    """True if it is a kernel of the hub, `owner/name@commit`."""
    return "/" in implementation


def require_attention_package(implementation: str) -> None:
    """Raise ModelError where an attention that was asked for needs a package that is not
    installed."""
    package = (
        "kernels"
        if is_hub_kernel(implementation)
        else {"flash_attention_2": "flash-attn"}.get(implementation)
    )
    if package is not None and importlib.util.find_spec(package.replace("-", "_")) is None:
        raise ModelError(
            f"model.attn_implementation={implementation} needs the package {package}, which is not"
            f" installed; {install_command(package)}, or use auto"
        )


# --- the kernels behind sdpa ----------------------------------------------------------------------
# Compute capability from which PyTorch's flash kernel runs.
FLASH_MIN_CAPABILITY = (8, 0)
# Widest head that it takes.
FLASH_MAX_HEAD_DIM = 256
# An unknown GPU counts as this one, and has no kernel of cuDNN.
_DEFAULT_CAPABILITY = (9, 0)
_NEWEST_CAPABILITY = (12, 1)
# cuDNN's version above which PyTorch prefers it (`check_prefer_cudnn_attention`).
_CUDNN_PREFERRED_ABOVE = 91500


@dataclass(frozen=True)
class SdpaCall:
    """What a call of scaled_dot_product_attention asks for; `has_grouped_heads`: there are fewer
    heads of keys than of queries."""

    head_dim: int
    value_head_dim: int
    has_grouped_heads: bool = False
    masked: bool = False
    # In fp16 or bf16; bf16 is asked for from compute capability 8.0 on.
    half_precision: bool = True
    needs_gradient: bool = True


@dataclass(frozen=True)
class _KernelLimits:
    """What a kernel takes. Compute capabilities are inclusive; head widths are a multiple of
    `head_dim_multiple`."""

    name: SdpaKernel
    min_capability: tuple[int, int] = (0, 0)
    max_capability: tuple[int, int] = (99, 0)
    takes_fp32: bool = True
    takes_mask: bool = True
    takes_grouped_heads: bool = True
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    needs_equal_head_dims: bool = False
    # Widths without a backward pass on GPUs with little shared memory.
    untrainable_head_dims: range = range(0)


# In PyTorch's order of preference.
_SDPA_KERNELS = (
    _KernelLimits("cudnn", (9, 0), (10, 9), takes_fp32=False, max_head_dim=128, head_dim_multiple=8,
                  needs_equal_head_dims=True),
    _KernelLimits("flash", FLASH_MIN_CAPABILITY, _NEWEST_CAPABILITY, takes_fp32=False,
    takes_mask=False,
                  max_head_dim=FLASH_MAX_HEAD_DIM, needs_equal_head_dims=True,
                  untrainable_head_dims=range(193, 225)),
    _KernelLimits("efficient", (5, 0), _NEWEST_CAPABILITY, takes_grouped_heads=False),
    _KernelLimits("math"),
)  # fmt: skip


def sdpa_kernel(
    call: SdpaCall, capability: tuple[int, int] | None, *, uses_cudnn: bool
) -> SdpaKernel:
    """The kernel that PyTorch takes. `capability` None: unknown. `uses_cudnn`: cuDNN's is preferred
    there and not switched off."""
    return next(
        kernel.name
        for kernel in _SDPA_KERNELS
        if (uses_cudnn or kernel.name != "cudnn")
        and _accepts(kernel, call, capability or _DEFAULT_CAPABILITY)
    )


def _accepts(kernel: _KernelLimits, call: SdpaCall, capability: tuple[int, int]) -> bool:
    head_dims = (call.head_dim, call.value_head_dim)
    multiple = kernel.head_dim_multiple
    if kernel.name == "efficient" and capability >= (8, 0):  # PyTorch's minimum_gemm_alignment
        multiple = 8 if call.half_precision else 4
    elif kernel.name == "efficient":
        multiple = 8 if call.half_precision and capability >= (7, 0) else 1
    has_small_shared_memory = (8, 6) <= capability <= (8, 9) or capability[0] == 12
    return (
        kernel.min_capability <= capability <= kernel.max_capability
        and (call.half_precision or kernel.takes_fp32)
        and (kernel.takes_mask or not call.masked)
        and (kernel.takes_grouped_heads or not call.has_grouped_heads)
        and (kernel.max_head_dim is None or max(head_dims) <= kernel.max_head_dim)
        and not any(head_dim % multiple for head_dim in head_dims)
        and (not kernel.needs_equal_head_dims or call.head_dim == call.value_head_dim)
        and not (
            call.needs_gradient
            and has_small_shared_memory
            and call.head_dim in kernel.untrainable_head_dims
        )
    )


def prefers_cudnn(
    capability: tuple[int, int] | None, libraries: CudaLibraries, *, is_amd: bool = False
) -> bool:
    """True if PyTorch asks cuDNN first; not on an unknown GPU, nor on AMD's, whose architectures
    have such numbers."""
    if (
        is_amd
        or capability is None
        or libraries.cudnn <= _CUDNN_PREFERRED_ABOVE
        or capability[0] not in (9, 10)
    ):
        return False
    return libraries.cuda >= (13,) or capability[1] in (0, 3)


def can_run_flash(*, half_precision: bool, capability: tuple[int, int] | None) -> bool:
    """True if PyTorch's flash kernel runs for these numbers on this GPU, in heads of a usual
    width."""
    return (
        sdpa_kernel(SdpaCall(64, 64, half_precision=half_precision), capability, uses_cudnn=False)
        == "flash"
    )


# --- masks ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class RowAttention:
    """How a run's rows are attended to, and why not better, as the ends of sentences. `capability`
    None: unknown, which counts as a current one; `device`: `cuda`, `rocm` or `cpu`."""

    config: RunConfig
    shape: ModelShape
    attention: AttentionName
    capability: tuple[int, int] | None
    device: str

    @property
    def mask_reason(self) -> str | None:
        """Why padded rows keep their mask; None where they need none."""
        is_old = (
            self.device != "cpu"
            and self.capability is not None
            and self.capability < FLASH_MIN_CAPABILITY
        )
        if self.attention == "eager":
            return "eager attention computes every score, with a mask or without"
        if self.shape.vision is not None:
            return "classes read it to find where rows with images begin"
        # load_balancing_loss_func counts padding as tokens where there is no mask
        if self.shape.num_experts:
            return "the balance loss of its experts leaves out padding by the mask"
        if any(kind.attention == "none" for kind in self.shape.layers):
            return "some of its layers carry a state from token to token, and read the mask"
        if self.shape.uses_alibi:
            return "its positions are a bias that is added to a mask"
        return "flash attention does not run on this GPU" if is_old else self._unsloth_reason

    @property
    def _unsloth_reason(self) -> str | None:
        uses_unsloth = self.config.tuning.backend == "unsloth"
        return (
            "Unsloth has attention of its own, which is not measured here" if uses_unsloth else None
        )

    def pack_mask_reason(self, precision: Precision) -> str | None:
        """Why packs keep a mask between their chats; None where their boundaries are enough."""
        if self.shape.vision is not None:
            return "rows with images have positions that boundaries do not say"
        if self.config.model.attn_implementation != "auto":
            return f"model.attn_implementation={self.config.model.attn_implementation}"
        if self.attention != "sdpa":
            return f"the model's class runs {self.attention} attention"
        if any(kind.attention in ("none", "chunked") for kind in self.shape.layers):
            return "some of its layers see a state or chunks, which boundaries do not say"
        if self.shape.uses_alibi:
            return "its positions are a bias that is added to a mask"
        if self.shape.attention_dropout:
            return "attention between boundaries has no dropout"
        if (
            self._unsloth_reason is None
            and self.config.train.compile is True
            and self.one_by_one_reason(precision) is not None
        ):
            return (
                "a call for each chat has its length, for which a compiled block would be compiled"
                " again"
            )
        return self._unsloth_reason

    def one_by_one_reason(self, precision: Precision) -> str | None:
        """Why each chat between boundaries is a call of its own; None where one call of PyTorch's
        flash kernel takes them all: on ROCm by AOTriton
        (https://github.com/huggingface/kernels/pull/401)."""
        half_precision = precision.compute != "float32"
        if self.device == "cpu":
            return "no kernel for boundaries runs on cpu"
        # DeepSeek's keys and values are made from one narrow projection; flash attention takes one
        # width for all three
        if any(linear.name == "kv_b_proj" for linear, _ in self.shape.linears):
            return "its keys and values have different widths"
        if self.shape.head_dim > FLASH_MAX_HEAD_DIM:
            return f"flash attention takes no heads wider than {FLASH_MAX_HEAD_DIM}"
        if self.device == "cuda" and not can_run_flash(
            half_precision=half_precision, capability=self.capability
        ):
            return "flash attention does not run on this GPU in this precision"
        return None if half_precision else "flash attention does not run in this precision"


# --------------------------------------------------------------------------------------------------
# Which kernels a plan counts for norms, gated activations and rotations, the plain ones or Liger's;
# and which code runs a mixture's experts, by one rule for the plan, which knows the shape, and the
# run, which knows the class.
#
# A plan is made before the run has proven Liger's kernels, and on machines that lack them. What is
# counted errs on the side that fits: with `train.kernels: auto` the bytes of the plain code, which
# takes more, and the speed of what the run will take: on the present machine by what is installed,
# on a named one what its environment has; with `liger` both of Liger's, since the run was asked for
# by name and refuses to start without the package.

LIGER_VERSION = "0.8.5"
# Rows of fp32 sums that a trained norm's gradient is added up from, one for each multiprocessor of
# the GPU: the most that a card of the catalogue has (RTX PRO 6000; an H100 has 132).
MAX_MULTIPROCESSORS = 188


@dataclass(frozen=True)
class ReplacedOperations:
    """What liger-kernel replaces of a model; norms over the hidden width always are."""

    # Norms of queries and keys too.
    replaces_head_norms: bool = False
    # The product of an activated gate and its partner.
    replaces_gate: bool = True
    # The rotation of queries and keys.
    replaces_rotation: bool = True
    # A norm writes its input's gradient over its output's; not where the residual needs that one.
    writes_in_place: bool = True


_REPLACED_BY_TYPES = {
    "gemma granite hunyuan_v1_dense llama ministral mistral phi3 qwen2 smollm3": (
        ReplacedOperations()
    ),
    "qwen3": ReplacedOperations(replaces_head_norms=True),
    "gpt_oss mixtral": ReplacedOperations(replaces_gate=False),
    "qwen3_moe": ReplacedOperations(replaces_head_norms=True, replaces_gate=False),
    "gemma2": ReplacedOperations(writes_in_place=False),
    "gemma3_text": ReplacedOperations(replaces_head_norms=True, writes_in_place=False),
    "glm4": ReplacedOperations(replaces_rotation=False, writes_in_place=False),
}
# By model_type, from the package's own table and functions
# (liger_kernel/transformers/monkey_patch.py, MODEL_TYPE_TO_APPLY_LIGER_FN and the defaults of each
# function), as a run asks for them: of a model that is already built, without losses, and without
# experts, which keep their own code (training/class_checks/replaced_code.py). Types that the
# package knows and this table does not are planned with the plain code: those that no trace
# confirms (Qwen3-Next, Qwen3.5, Llama 4, Gemma 4, towers of image models), and those whose norms
# only follow attention and MLP (EXAONE 4, OLMo 2 and 3), which the estimate of a block only
# approximates.
LIGER_REPLACEMENTS: Mapping[str, ReplacedOperations] = {
    kind: replaced for kinds, replaced in _REPLACED_BY_TYPES.items() for kind in kinds.split()
}

KernelsName = Literal["plain", "liger"]


@dataclass(frozen=True)
class PlannedKernels:
    """What Liger's kernels replace in the plan's bytes and in its speed (None: nothing), and why in
    words; no words where the config leaves the plain kernels."""

    memory: ReplacedOperations | None = None
    speed: ReplacedOperations | None = None
    reason: str = ""

    @property
    def counted_kernels(self) -> CountedKernels:
        """The same by name."""
        return CountedKernels(
            "liger" if self.memory else "plain", "liger" if self.speed else "plain"
        )


@dataclass(frozen=True)
class CountedKernels:
    """Which kernels a plan counts, by name: `kernels` of its JSON."""

    memory: KernelsName = "plain"
    speed: KernelsName = "plain"


def plan_kernels(
    config: RunConfig,
    shape: ModelShape,
    layout: Layout,
    *,
    on_gpu: bool,
    missing_packages: Collection[str] = (),
) -> PlannedKernels:
    """What is counted in a layout; `missing_packages`: not installed where the run starts, which
    only `auto` asks."""
    option, is_auto = config.train.kernels, config.train.kernels == "auto"
    # nobody expects Triton on a CPU, and the compiler writes such kernels itself
    if option == "none" or (is_auto and (config.train.compile is True or not on_gpu)):
        return PlannedKernels()
    setting = f"kernels: train.kernels={option}: "
    problem = None
    if not on_gpu:
        problem = "Liger's need a CUDA GPU"
    elif config.tuning.backend != "bnb":
        problem = f"tuning.backend={config.tuning.backend} brings its own"
    elif shape.vision is not None:
        problem = "rows with images run the class's own code"
    elif layout.tensor_parallel > 1:
        problem = "tensor-parallel ranks replace the same forwards"
    elif shape.model_type not in LIGER_REPLACEMENTS:
        problem = (
            f"{LIGER_PACKAGE} {LIGER_VERSION} has none for {one_line(shape.model_type)} that this"
            " plan knows"
        )
    # asked for by name, a missing package is refused when the run starts; the plan may be made on
    # another machine
    elif is_auto and LIGER_PACKAGE in missing_packages:
        problem = f"{LIGER_PACKAGE} is not installed here"
    if problem is not None:
        return PlannedKernels(reason=f"{setting}the plain ones, because {problem}")
    operations = LIGER_REPLACEMENTS[shape.model_type]
    if shape.num_experts:  # experts keep their own code, and so do MLPs beside them
        operations = replace(operations, replaces_gate=False)
    parts = (
        ["norms"]
        + ["gated activations"] * operations.replaces_gate
        + ["rotations"] * operations.replaces_rotation
    )
    replaced_text = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    operations_text = f"{setting}Liger's for {replaced_text}"
    condition = (
        f"if a measurement before the first step shows that they compute the same ({LIGER_PACKAGE}"
        f" {LIGER_VERSION})"
    )
    if option == "liger":
        return PlannedKernels(operations, operations, f"{operations_text}, {condition}")
    # auto may fall back to the plain code when the run starts, which must then still fit
    return PlannedKernels(
        None,
        operations,
        f"{operations_text}, {condition}: the speed is theirs, the memory that of the plain ones,"
        " which take more",
    )


# --- adapters -------------------------------------------------------------------------------------
def groups_adapters(config: RunConfig, precision: Precision, layout: Layout) -> bool:
    """True if LoRA layers that read one input train by one function
    (`training.model.grouped_adapters`), where a run has proven it for the class. Compiled blocks
    fuse PEFT's own operators; ranks that divide weights replace the same layers."""
    tuning = config.tuning
    return (
        tuning.mode != "full"
        and tuning.backend == "bnb"
        and config.train.kernels != "none"
        and config.train.compile is not True
        and layout.name in UNSHARDED_LAYOUTS
        and not (tuning.lora.use_dora or tuning.lora.dropout)
        # autocast casts a base in another dtype in each pass
        and (tuning.mode == "qlora" or precision.load == precision.compute)
    )


# --- experts --------------------------------------------------------------------------------------
# Names of transformers' implementations. Its `batched_mm` copies an expert's weights for every
# token, which only pays for single tokens of generation; `deepgemm` and `sonicmoe` load kernels
# from the hub.
ExpertsImplementationName = Literal["grouped_mm", "eager"]

# Rows of a grouped product's matrices begin at a multiple of this (PyTorch's `_grouped_mm`,
# `check_valid_strides`).
GROUPED_MM_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class ExpertsImplementation:
    """An implementation, and why it was chosen. `casts_weights`: the weights of experts are cast to
    the dtype of the other matrix products, which autocast does not do for grouped ones."""

    name: ExpertsImplementationName
    reason: str
    casts_weights: bool = False


def select_experts_implementation(
    config: RunConfig, *, uses_custom_experts: bool, widths: Iterable[int], precision: Precision
) -> ExpertsImplementation:
    """The implementation for a model with experts: grouped_mm unless its class, its widths or the
    config are against. Raises ConfigError where it is asked for by name, and cannot run."""
    implementation = config.model.experts_implementation
    if implementation == "eager":
        return ExpertsImplementation(
            "eager", "eager, one expert after another, as model.experts_implementation says"
        )
    # the narrower dtype needs the larger multiple of elements
    multiple = GROUPED_MM_ALIGNMENT_BYTES // min(
        DTYPE_BYTES[precision.compute], DTYPE_BYTES[precision.load]
    )
    misaligned_widths = [width for width in widths if width % multiple]
    problem = None
    if uses_custom_experts:
        problem = (
            "its class runs them by code of its own, which model.experts_implementation does not"
            " reach"
        )
    elif misaligned_widths:
        problem = (
            f"grouped products need widths that are multiples of {multiple}, and one is"
            f" {misaligned_widths[0]}"
        )
    reason = "grouped_mm, one product for all experts of a block"
    casts_weights = precision.compute not in (precision.load, "float32")
    if casts_weights:
        reason += (
            f"; their {DTYPE_SHORT_NAMES[precision.load]} weights are cast to"
            f" {DTYPE_SHORT_NAMES[precision.compute]} for it, as autocast casts those of other"
            " products"
        )
    if problem is None:
        return ExpertsImplementation("grouped_mm", reason, casts_weights)
    if implementation == "grouped_mm":
        raise ConfigError(
            f"model.experts_implementation=grouped_mm: {one_line(config.model.name)} cannot run it,"
            f" because {problem}; use auto"
        )
    return ExpertsImplementation("eager", f"eager, not grouped_mm: {problem}")


# Compute capability of the first GPUs with PyTorch's grouped products (transformers,
# integrations/moe.py).
GROUPED_MM_MIN_CAPABILITY = (8, 0)


def plan_experts(
    config: RunConfig, shape: ModelShape, precision: Precision
) -> ExpertsImplementation | None:
    """The implementation for the experts of a shape; None where there are none. Raises ConfigError
    where the config names one that cannot run."""
    expert_layers = [kind for kind in shape.layers if kind.num_experts]
    if not expert_layers:
        check_experts_option(config)
        return None
    # the width of experts in code that is not known is not known either
    return select_experts_implementation(
        config,
        uses_custom_experts=shape.uses_custom_experts,
        widths=sorted(
            {shape.hidden_size, *(kind.expert_width for kind in expert_layers if kind.expert_width)}
        ),
        precision=precision,
    )


def check_experts_option(config: RunConfig) -> None:
    """Raises ConfigError where an implementation is named for a model that has no experts."""
    implementation = config.model.experts_implementation
    if implementation != "auto":
        raise ConfigError(
            f"model.experts_implementation={implementation}: {one_line(config.model.name)} has no"
            " experts that it could reach; leave it at auto"
        )
