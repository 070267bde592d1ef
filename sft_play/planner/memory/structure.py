"""From a model's shape, a run and a step to the structure of each block: projections by role,
kernel, adapters, dtypes.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, TypeVar

from sft_play.config.schema import LoraConfig, RunConfig
from sft_play.errors import ConfigError
from sft_play.log import one_line
from sft_play.models.families import no_adapter_reason
from sft_play.models.shape import LayerKind, LinearShape, ModelShape, NormKind, StackedExpertWeight
from sft_play.planner.kernels import FLASH_MAX_HEAD_DIM, ReplacedOperations, SdpaCall, sdpa_kernel
from sft_play.planner.layout import SINGLE, Layout
from sft_play.planner.precision import DTYPE_BYTES, Precision, adapter_dtype
from sft_play.spelling import did_you_mean
from sft_play.text import MIB

# From this size on a tensor gets its own segment, of whole 2 MiB (kMinLargeAlloc,
# CUDACachingAllocator.cpp).
OWN_SEGMENT_BYTES = 10 * MIB


def segment_remainder(nbytes: int) -> int:
    """Bytes that a large tensor's block has beyond its own: a remainder of at most 1 MiB is not
    split off."""
    if nbytes < OWN_SEGMENT_BYTES:
        return 0
    remainder = -nbytes % (2 * MIB)
    # kSmallSize: a larger remainder becomes a block of its own
    return remainder if remainder <= MIB else 0


# Weights that share one absmax in bitsandbytes' NF4: its default, and transformers sets no other.
NF4_BLOCK = 64

# varlen: flash attention of padded rows, whose tokens are gathered first and scattered back.
AttentionKernel = Literal["cudnn", "flash", "varlen", "efficient", "eager"]


@dataclass(frozen=True)
class LinearSpec:
    """A linear layer: widths, and how it is trained. `rank` 0: no adapter."""

    inputs: int
    outputs: int
    rank: int = 0

    @property
    def elements(self) -> int:
        """Weights of its matrix."""
        return self.inputs * self.outputs


@dataclass(frozen=True)
class ElementBytes:
    """Bytes of an element of loaded weights, of autocast's dtype (None: no autocast), of adapters
    and of optimizer states (None: the dtype of their parameter)."""

    weights: int = 2
    autocast: int | None = 2
    adapters: int = 4
    states: int | None = None


@dataclass(frozen=True)
class BlockSpec:
    """A block's structure and how it is trained: everything that its bytes depend on besides the
    batch."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    # Linear layers by role: q, k, v, o or qkv; gate, up, down or gate_up.
    linears: tuple[tuple[str, LinearSpec], ...]
    norm: NormKind = "rms"
    # Outputs of attention and MLP are normed before they are added, as in Gemma 2.
    has_post_norms: bool = False
    qk_norm: bool = False
    # Fraction of a head that is rotated; 0: none.
    partial_rotary_factor: float = 1.0
    # Rotated and other parts of a head are concatenated.
    concatenates_rotary: bool = False
    # Dropout of attention probabilities: eager attention keeps its mask, the fused kernels
    # recompute it.
    attention_dropout: float = 0.0
    kernel: AttentionKernel = "flash"
    # Attention gets a mask of S x S.
    masked: bool = False
    # Each chat is attended to by a call of its own.
    one_by_one: bool = False
    has_softcap: bool = False
    # Attention scores get a column that takes a share of the softmax, as in gpt-oss.
    has_sinks: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    has_expert_bias: bool = False
    # Experts gate as gpt-oss does.
    clamps_gate: bool = False
    # The weights by which experts' outputs are added are fp32.
    routes_in_fp32: bool = False
    # Elements of each stacked tensor of experts, and parameters of its adapter (0: none).
    expert_tensors: tuple[tuple[int, int], ...] = ()
    # Experts run one after another instead of as one grouped product.
    uses_eager_experts: bool = False
    # Grouped products run as transformers' own loop (GPUs before Ampere), which holds the rows of
    # frozen weights and makes their gradients too.
    uses_grouped_mm_fallback: bool = False
    # The weights train themselves, without adapters.
    trains_weights: bool = False
    is_nf4: bool = False
    has_nf4_experts: bool = False
    lora_dropout: float = 0.0
    uses_dora: bool = False
    # LoRA layers cast their inputs to the adapters' dtype under autocast too.
    casts_inputs: bool = False
    # LoRA layers train in groups (training/model/grouped_adapters.py), not by PEFT's forward.
    groups_adapters: bool = False
    # What Liger's kernels replace; None: nothing.
    liger: ReplacedOperations | None = None
    element_bytes: ElementBytes = field(default_factory=ElementBytes)


# Roles of the linear layers that tensor parallelism divides by their inputs; the others by their
# outputs.
ROW_PARALLEL_ROLES = ("o", "down")


def element_bytes(config: RunConfig, precision: Precision, layout: Layout = SINGLE) -> ElementBytes:
    """Bytes of weights, autocast's dtype, adapters and states; DeepSpeed casts what trains to the
    compute dtype."""
    load, compute = DTYPE_BYTES[precision.load], None if precision.compute == "float32" else 2
    adapters = DTYPE_BYTES[adapter_dtype(config, precision)]
    if layout.is_zero and compute is not None:
        adapters = compute
    # stochastic rounding steps in fp32 beside weights of two bytes; otherwise states have their
    # parameter's dtype
    return ElementBytes(
        load, compute, adapters, states=4 if precision.updates == "stochastic" else None
    )


def configured_shape(config: RunConfig, shape: ModelShape) -> ModelShape:
    """A model's shapes as the run changes them: rows of new tokens, experts that stay in 16
    bits."""
    if config.tuning.quantize_experts is False:
        shape = shape.without_packed_experts()
    # some models have spare rows, which the tokenizer alone knows
    return replace(shape, vocab_size=shape.vocab_size + len(config.model.add_tokens))


def is_target(linear: LinearShape, targets: tuple[str, ...] | Literal["auto"]) -> bool:
    """True if a linear layer gets an adapter."""
    return linear.adaptable and (
        targets == "auto" or any(linear.matches(target) for target in targets)
    )


def stacked_adapter_params(stacked: StackedExpertWeight, lora: LoraConfig) -> int:
    """Parameters of the adapter on a stacked tensor of experts, r * (inputs + outputs) for each; 0
    without one."""
    targets = lora.adapted_parameters
    is_target_tensor = targets == "auto" or any(stacked.matches(target) for target in targets)
    return (
        lora.stored_rank * stacked.experts * (stacked.inputs + stacked.outputs)
        if is_target_tensor
        else 0
    )


def needs_attention_mask(kind: LayerKind, shape: ModelShape, *, length: int, padded: bool) -> bool:
    """True if attention gets a mask of S x S: real padding, or a window shorter than the rows
    (transformers omits it where causality alone expresses it: masking_utils.py,
    `_ignore_causal_mask_sdpa`)."""
    is_windowed = (
        kind.attention in ("sliding", "chunked")
        and shape.window is not None
        and length >= shape.window
    )
    return kind.attention != "none" and (padded or is_windowed)


def select_attention_kernel(
    shape: ModelShape,
    *,
    attention: str,
    masked: bool,
    half_precision: bool,
    capability: tuple[int, int] | None,
    on_gpu: bool,
    unpads_rows: bool = False,
    uses_cudnn: bool = False,
) -> AttentionKernel:
    """The kernel that runs: torch's choice for sdpa, or the one asked for. `unpads_rows`: rows are
    padded, which flash-attn 2 takes without their padding. Keys and values are repeated where
    `needs_repeated_kv` says so.
    """
    if attention == "eager":
        return "eager"
    if attention == "flash_attention_2" or not on_gpu:
        return "varlen" if unpads_rows and on_gpu else "flash"
    # transformers repeats keys and values wherever there is a mask
    call = sdpa_call(shape, masked=masked, half_precision=half_precision)
    kernel = sdpa_kernel(call, capability, uses_cudnn=uses_cudnn)
    if kernel == "math":
        kernel = sdpa_kernel(
            replace(call, has_grouped_heads=False), capability, uses_cudnn=uses_cudnn
        )
    return "efficient" if kernel == "math" else kernel  # of a GPU newer than the table


def sdpa_call(shape: ModelShape, *, masked: bool, half_precision: bool) -> SdpaCall:
    """What transformers asks of PyTorch's sdpa for this model."""
    # heads that are grouped in a way that transformers would leave to PyTorch
    has_grouped_heads = (
        shape.num_heads != shape.num_kv_heads and shape.head_dim <= FLASH_MAX_HEAD_DIM
    )
    return SdpaCall(
        shape.head_dim,
        shape.head_dim,
        has_grouped_heads=has_grouped_heads and not masked,
        masked=masked,
        half_precision=half_precision,
    )


def needs_repeated_kv(
    shape: ModelShape, *, attention: str, half_precision: bool, capability: tuple[int, int] | None
) -> bool:
    """True if a run on GPUs of this capability repeats keys and values for sdpa. Only flash
    attention takes grouped heads; where it does not run, PyTorch would use its math kernel, with S
    x S scores in fp32."""
    call = sdpa_call(shape, masked=False, half_precision=half_precision)
    return (
        attention == "sdpa"
        and call.has_grouped_heads
        and sdpa_kernel(call, capability, uses_cudnn=False) == "math"
    )


@lru_cache(maxsize=4096)
def block_spec(kind: LayerKind, shape: ModelShape, *, mode: str, lora: LoraConfig) -> BlockSpec:
    """A block of this kind with the adapters of this mode; how it runs is left at the defaults."""
    is_full = mode == "full"
    targets = () if is_full else lora.target_modules
    return BlockSpec(
        hidden=shape.hidden_size,
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        linears=tuple(
            (
                role,
                LinearSpec(
                    linear.inputs,
                    linear.outputs,
                    lora.stored_rank if is_target(linear, targets) else 0,
                ),
            )
            for role, linear in linears_by_role(kind, shape).items()
        ),
        norm=shape.norm,
        has_post_norms=shape.norms_per_layer >= 4,
        qk_norm=shape.has_qk_norm,
        partial_rotary_factor=shape.rotary_dim / max(1, shape.head_dim),
        concatenates_rotary=0 < shape.rotary_dim < shape.head_dim
        or (shape.has_fused_qkv and shape.rotary_dim > 0),
        attention_dropout=shape.attention_dropout,
        has_softcap=shape.attention_softcap is not None,
        has_sinks=shape.has_attention_sinks,
        # experts of unknown width are counted as none
        num_experts=kind.num_experts if kind.expert_width else 0,
        experts_per_token=shape.experts_per_token,
        expert_width=kind.expert_width,
        expert_tensors=tuple(
            (tensor.weights, 0 if is_full else stacked_adapter_params(tensor, lora))
            for tensor in kind.expert_weights
        ),
        has_expert_bias=kind.expert_params
        > 3 * shape.hidden_size * kind.expert_width * kind.num_experts
        > 0,
        clamps_gate=shape.has_clamped_gate,
        routes_in_fp32=shape.routes_in_fp32,
        trains_weights=is_full,
        is_nf4=mode == "qlora",
        has_nf4_experts=mode == "qlora"
        and all(tensor.is_packable for tensor in kind.expert_weights),
    )


_ATTENTION_ROLES = {4: "qkvo", 2: ("qkv", "o")}
# Roles by how many layers there are: families name them differently, but list them in one order.
_MLP_ROLES = {3: ("gate", "up", "down"), 2: ("gate_up", "down"), 0: ()}


def linears_by_role(kind: LayerKind, shape: ModelShape) -> dict[str, LinearShape]:
    """The linear layers of a block by role; empty for a class whose blocks are measured."""
    if shape.adapter_placement is not None:
        return {}
    attention_linears = [linear for linear in kind.linears if linear.is_attention]
    mlp_linears = [linear for linear in kind.linears if not linear.is_attention]
    return dict(
        zip(
            (*_ATTENTION_ROLES[len(attention_linears)], *_MLP_ROLES[len(mlp_linears)]),
            (*attention_linears, *mlp_linears),
            strict=True,
        )
    )


def tensor_parallel_spec(spec: BlockSpec, ranks: int) -> BlockSpec:
    """The block's part on one of `ranks`: heads and MLP columns are divided, hidden states are
    full."""
    if ranks == 1:
        return spec
    return replace(
        spec,
        linears=tuple(
            (
                role,
                tensor_parallel_linear(linear, ranks, is_row_parallel=role in ROW_PARALLEL_ROLES),
            )
            for role, linear in spec.linears
        ),
        heads=max(1, spec.heads // ranks),
        kv_heads=max(1, spec.kv_heads // ranks),
        expert_width=spec.expert_width // ranks,
    )


AnyLinear = TypeVar("AnyLinear", LinearShape, LinearSpec)


def tensor_parallel_linear(linear: AnyLinear, ranks: int, *, is_row_parallel: bool) -> AnyLinear:
    """One tensor-parallel rank's part of a linear layer."""
    if is_row_parallel:
        return replace(linear, inputs=max(1, linear.inputs // ranks))
    return replace(linear, outputs=max(1, linear.outputs // ranks))


# What transformers calls the output head.
OUTPUT_HEADS = ("lm_head", "embed_out")


def check_adapter_targets(config: RunConfig, shape: ModelShape) -> None:
    """Raises ConfigError for adapter targets that match no linear layer, and for what is asked of
    experts that are not there."""
    tuning, lora, targets = config.tuning, config.tuning.lora, config.tuning.lora.target_modules
    stacked = [tensor for kind in shape.layers for tensor in kind.expert_weights]
    adapted_parameters = () if tuning.mode == "full" else lora.adapted_parameters
    key = "tuning.lora.experts" if lora.experts else "tuning.lora.target_parameters"
    options = ["tuning.quantize_experts=true"] * (tuning.quantize_experts is True) + [key] * bool(
        adapted_parameters
    )
    if options and not stacked:
        raise ConfigError(
            f"{' and '.join(options)}: {one_line(config.model.name)} has no experts in one tensor;"
            " leave it out"
        )
    parameter_names = adapted_parameters if isinstance(adapted_parameters, tuple) else ()
    if missing := [
        name for name in parameter_names if not any(tensor.matches(name) for tensor in stacked)
    ]:
        tensor_names = ", ".join(sorted({tensor.path.rpartition(".")[2] for tensor in stacked}))
        raise ConfigError(
            f"{key}: {one_line(', '.join(missing))} matches nothing; the stacked experts are:"
            f" {tensor_names}"
        )
    if config.tuning.mode == "full" or targets == "auto":
        return
    layers = [linear for linear, _ in shape.linears if linear.adaptable]
    names = sorted({linear.name for linear in layers})
    unmatched = [
        target_name
        for target_name in targets
        if target_name in OUTPUT_HEADS or not any(linear.matches(target_name) for linear in layers)
    ]
    if unmatched:
        problems = "; ".join(
            f"{one_line(target)}{_unmatched_reason(target, shape, names)}" for target in unmatched
        )
        raise ConfigError(
            f"tuning.lora.target_modules: {problems}. The linear layers are: {', '.join(names)};"
            " auto takes these"
        )


def _unmatched_reason(target: str, shape: ModelShape, names: list[str]) -> str:
    placement, reason = shape.adapter_placement, None
    if target in OUTPUT_HEADS:
        return " is the output head, which takes no adapter (the loss reads its weight)"
    if placement is not None:
        reason = next(
            (text for path, text in placement.excluded if f".{path}".endswith(f".{target}")), None
        )
    elif any(linear.matches(target) for linear, _ in shape.linears):
        reason = no_adapter_reason(shape.model_type, target.rpartition(".")[2])
    if reason:
        return f": {reason}"
    suggestion = did_you_mean(target, names)
    return " matches nothing" + f" ({suggestion})" * bool(suggestion)
