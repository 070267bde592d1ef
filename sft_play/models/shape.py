"""What a decoder consists of, in numbers of elements: embedding, blocks by kind, head. No torch, no
files.

Module names are transformers' own (5.23), from the block on (`self_attn.q_proj`), so that adapter
targets match as in PEFT.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, Self

# Which keys a block's queries see: all before them, the last `window`, those of their chunk of
# `window`; none where the block has no softmax attention (a recurrent or convolutional one).
AttentionKind = Literal["full", "sliding", "chunked", "none"]

# rms: RMSNorm; gemma: RMSNorm whose weight multiplies in fp32.
NormKind = Literal["rms", "gemma"]

# What the names of attention's own linear layers start with.
ATTENTION_PREFIXES = ("self_attn.", "attn.", "attention.", "self_attention.")


@dataclass(frozen=True)
class LinearShape:
    """One linear layer of a block: `path` inside the block, input and output width."""

    path: str
    inputs: int
    outputs: int
    has_bias: bool = False
    # Whether it takes an adapter (`families.no_adapter_reason`,
    # `training/class_checks/adapter_trial`).
    adaptable: bool = True
    # Whether qlora keeps it in 4 bits; not where the class reads its weight outside of its product.
    is_packable: bool = True

    @property
    def name(self) -> str:
        """The module's own name, `q_proj` of `self_attn.q_proj`."""
        return self.path.rpartition(".")[2]

    @property
    def weights(self) -> int:
        """Elements of the weight matrix."""
        return self.inputs * self.outputs

    @property
    def is_attention(self) -> bool:
        """True if it belongs to the attention, not to the MLP."""
        return self.path.startswith(ATTENTION_PREFIXES)

    def matches(self, target: str) -> bool:
        """True if an adapter target names it: PEFT compares the end of the full name (`q_proj`,
        `attn.c_proj`)."""
        return self.path == target or self.path.endswith(f".{target}")


@dataclass(frozen=True)
class StackedExpertWeight:
    """One matrix of every expert of a block, as one tensor: `path` inside the block, number of
    experts, widths."""

    path: str
    experts: int
    inputs: int
    outputs: int
    # Whether qlora keeps it in 4 bits (`tuning.quantize_experts`).
    is_packable: bool = True

    @property
    def weights(self) -> int:
        """Elements of the tensor."""
        return self.experts * self.inputs * self.outputs

    def matches(self, target: str) -> bool:
        """True if a name of `tuning.lora.target_parameters` means it: the end of its full name."""
        return f".{self.path}".endswith(f".{target}")


@dataclass(frozen=True)
class AdapterPlacement:
    """Where adapters go in a class that the table of families does not have."""

    # What `target_modules: auto` gives to PEFT: ends of the names of layers.
    targets: tuple[str, ...]
    # Linear layers that get none, by full names with * for numbers, and why.
    excluded: tuple[tuple[str, str], ...] = ()
    # Why no small model of the class could be tried; then every linear layer gets one.
    untried_reason: str = ""

    def resolve_targets(self, targets: Literal["auto"] | tuple[str, ...]) -> list[str]:
        """Translate the YAML's targets for PEFT: one that would also match a layer that is left out
        becomes the paths of the layers that it may match."""
        if targets == "auto":
            return list(self.targets)
        resolved: list[str] = []
        for target in targets:
            if any(f".{path}".endswith(f".{target}") for path, _ in self.excluded):
                resolved += [known for known in self.targets if f".{known}".endswith(f".{target}")]
            else:
                resolved.append(target)
        return list(dict.fromkeys(resolved))

    @property
    def notes(self) -> list[str]:
        """What is left out, and why."""
        reasons = dict.fromkeys(reason for _, reason in self.excluded)
        # names inside a block
        inner_reasons = [
            (path.partition(".*.")[2] or path, reason) for path, reason in self.excluded
        ]
        lines = [
            "none on"
            f" {', '.join(sorted({path for path, reason in inner_reasons if reason == one}))}"
            f" ({one})"
            for one in reasons
        ]
        if self.untried_reason:
            lines.append(f"on every linear layer: {self.untried_reason}")
        return lines


@dataclass(frozen=True)
class LayerKind:
    """Identical blocks. Sizes are of one block; `count` is how many there are."""

    count: int
    linears: tuple[LinearShape, ...]
    attention: AttentionKind = "full"
    # Width of the dense MLP; 0 in a block of experts.
    mlp_width: int = 0
    num_experts: int = 0
    # Inner width of one expert; 0 where it cannot be told from the experts' tensors.
    expert_width: int = 0
    # Experts' weights and biases. transformers keeps them as one tensor per projection, which are
    # not linear layers.
    expert_params: int = 0
    # Those tensors, without the biases.
    expert_weights: tuple[StackedExpertWeight, ...] = ()
    # The router, where it is not a linear layer.
    router_params: int = 0
    # Width of all value heads of linear attention (a gated delta rule); 0 in a block without it.
    linear_attention_width: int = 0
    norm_params: int = 0
    # Tells blocks of the same layers apart that are set differently (keys and values of an earlier
    # block, say); empty for a type of the table.
    settings: str = ""
    # The rest: attention sinks, weights of activations, convolutions.
    other_params: int = 0

    @cached_property
    def linear_weights(self) -> int:
        """Elements of the linear layers' weight matrices."""
        return sum(linear.weights for linear in self.linears)

    @cached_property
    def packable_sizes(self) -> tuple[int, ...]:
        """Elements of each matrix that qlora keeps in 4 bits, of linear layers and of experts."""
        expert_sizes = tuple(one.weights for one in self.expert_weights if one.is_packable)
        return tuple(linear.weights for linear in self.linears if linear.is_packable) + expert_sizes

    @cached_property
    def params(self) -> int:
        """All parameters of one block."""
        others = self.expert_params + self.router_params + self.norm_params + self.other_params
        biases = sum(linear.outputs for linear in self.linears if linear.has_bias)
        return self.linear_weights + biases + others


@dataclass(frozen=True)
class VisionWeights:
    """What an image-text class has beside its language model: tower and projector, in numbers of
    elements."""

    params: int
    # Bytes of buffers in a dtype of their own, and how many numbers are in that of the weights.
    buffer_bytes: int = 0
    buffer_elements: int = 0
    # Linear layers of the projector (`tuning.lora.projector`).
    projector: tuple[LinearShape, ...] = ()
    # Tokens of a picture see each other, by a mask that every batch has.
    has_picture_mask: bool = False

    def resident_bytes(self, itemsize: int) -> int:
        """Bytes of all of it, the weights in a dtype of `itemsize`."""
        return itemsize * (self.params + self.buffer_elements) + self.buffer_bytes


@dataclass(frozen=True)
class VisionPass:
    """What a pass of the vision tower over one picture takes beside its weights, in bytes."""

    # The picture as the model is given it.
    pixel_bytes: int = 0
    # At the peak, with the features.
    peak_bytes: int = 0
    # What stays until the language model has run; where the tower trains, with what its backward
    # pass needs.
    feature_bytes: int = 0
    # At the peak of the tower's backward pass; 0 where it is frozen.
    backward_bytes: int = 0
    # Floating-point operations forwards.
    operations: int = 0

    def scaled(self, factor: float) -> Self:
        """The same of so many pictures, or of one with this share of the tokens."""
        return replace(
            self, **{one.name: round(getattr(self, one.name) * factor) for one in fields(self)}
        )


@dataclass(frozen=True)
class VisionShape:
    """The vision tower of a run whose rows have pictures, and the largest load of them."""

    weights: VisionWeights
    # Tokens of the largest picture.
    picture_tokens: int
    # Pictures of a row at most, and the largest share of its tokens that they take.
    row_pictures: int
    token_share: float
    # Of all tokens of the training rows those that pictures take.
    mean_token_share: float
    # Runs the tower over the largest picture, given the precision, the step, and whether it trains
    # (`trace.confirm.VisionMeter`).
    meter: Callable[..., VisionPass] = field(compare=False, repr=False)

    def max_pictures(self, *, rows: int | None, tokens: int) -> int:
        """Pictures of the largest size in a micro-batch of these padded tokens at most; `rows`
        None: of any number of rows."""
        fitting = max(1, int(self.token_share * tokens) // self.picture_tokens)
        return fitting if rows is None else min(fitting, rows * self.row_pictures)

    def with_smaller_pictures(self, share: float) -> Self:
        """The same tower for pictures with this share of the pixels, and so of tokens."""
        meter = self.meter
        return replace(
            self,
            picture_tokens=max(1, round(self.picture_tokens * share)),
            meter=lambda *args: meter(*args).scaled(share),
        )


@dataclass(frozen=True)
class ModelShape:
    """A decoder's shapes: sizes in numbers of elements, `window` in tokens, None where there is
    none. `layers` describes the blocks, and every count comes from it; the single fields above it
    describe the whole model, or its first block of the commonest kind where blocks differ."""

    name: str
    model_type: str
    hidden_size: int
    # Width of the MLP, of one expert where there are experts.
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    max_positions: int | None
    layers: tuple[LayerKind, ...]
    # For each block, from the first to the last, its place in `layers`.
    layer_order: tuple[int, ...]
    window: int | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    # The class runs its experts by code of its own, which `experts_implementation` does not reach.
    uses_custom_experts: bool = False
    # Experts gate as gpt-oss does: clamped, step by step.
    has_clamped_gate: bool = False
    # The weights by which experts' outputs are added are fp32, whatever the run computes in.
    routes_in_fp32: bool = False
    # Packages whose kernels the class runs where they are installed, and its own slower reference
    # code where not.
    kernel_packages: tuple[str, ...] = ()
    has_head_bias: bool = False
    norm: NormKind = "rms"
    # Norms over the hidden width in one block.
    norms_per_layer: int = 2
    has_qk_norm: bool = False
    has_fused_qkv: bool = False
    position_rows: int = 0
    uses_alibi: bool = False
    # How much of a head is rotated; 0 without rotary positions.
    rotary_dim: int = 0
    has_attention_sinks: bool = False
    # Attention scores are capped (Gemma-2): only eager attention does it.
    attention_softcap: float | None = None
    # The output head's logits are capped (Gemma).
    caps_logits: bool = False
    attention_dropout: float = 0.0
    # Width of the token embedding where it is not the hidden size (OPT-350M); else 0.
    embedding_width: int = 0
    # Linear layers outside the blocks, the output head left out.
    outer_linears: tuple[LinearShape, ...] = ()
    # Parameters outside blocks, embedding, head and `outer_linears`: the last norm, an embedding
    # norm.
    outer_params: int = 0
    # Its logits are more than its head's products, so that the loss is computed over whole ones.
    has_custom_logits: bool = False
    # Of all parameters: those that a full training gives no gradient, by the class's own code.
    untrained_params: int = 0
    # Bytes of what the class keeps beside its parameters, whole on every rank, in a dtype of its
    # own: causal masks.
    buffer_bytes: int = 0
    # How many numbers it keeps so in the dtype of the weights: tables of positions.
    buffer_elements: int = 0
    # Dtype of the weights in the model's files as its config.json says; None where it does not.
    stored_dtype: str | None = None
    # Where these shapes are from, if not from the table of families.
    source_note: str = ""
    # What is to be said where only the language model of a larger class is trained.
    text_only_note: str = ""
    storage_note: str = ""
    # Where adapters go; None for a type of the table, whose `linears` tell.
    adapter_placement: AdapterPlacement | None = None
    # The vision tower and the pictures; None where only text is trained.
    vision: VisionShape | None = None
    can_checkpoint: bool = True
    has_fused_attention: bool = True
    # Runs blocks of this class to see their bytes (`trace.confirm.BlockMeter`); None where the
    # estimate knows them.
    block_meter: Callable[..., Any] | None = field(default=None, compare=False, repr=False)
    # Counts what blocks of this class move and start beside their products
    # (`planner.pass_work.PassMeter`); None where a plan goes by their widths.
    pass_meter: Callable[..., Any] | None = field(default=None, compare=False, repr=False)

    def without_packed_experts(self) -> Self:
        """The same shape with experts that stay in 16 bits."""
        kinds = (
            replace(
                kind,
                expert_weights=tuple(
                    replace(one, is_packable=False) for one in kind.expert_weights
                ),
            )
            for kind in self.layers
        )
        return replace(self, layers=tuple(kinds))

    @cached_property
    def linears(self) -> tuple[tuple[LinearShape, int], ...]:
        """Every linear layer but the head, with how many of it the model has."""
        inner = tuple((linear, kind.count) for kind in self.layers for linear in kind.linears)
        return inner + tuple((linear, 1) for linear in self.outer_linears)

    @property
    def has_sdpa(self) -> bool:
        """True if the model runs PyTorch's fused attention: its class has it, and there is no soft
        cap and no sink."""
        return (
            self.has_fused_attention
            and self.attention_softcap is None
            and not self.has_attention_sinks
        )

    @property
    def rows_per_token(self) -> int:
        """Rows that experts multiply for each token. Llama 4's own code takes every expert and
        weighs most by zero (modeling_llama4.py, Llama4TextMoe)."""
        return self.num_experts if self.uses_custom_experts else self.experts_per_token

    @property
    def loss_name(self) -> Literal["chunked", "logits"]:
        """The loss of a run: over whole logits where the class has some of its own."""
        return "logits" if self.has_custom_logits else "chunked"

    @property
    def q_width(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads."""
        return self.num_kv_heads * self.head_dim

    @cached_property
    def embedding_table_params(self) -> int:
        """Weights of the token embedding, and of an output head of its own."""
        return self.vocab_size * (self.embedding_width or self.hidden_size)

    @cached_property
    def embedding_params(self) -> int:
        """Parameters of the token (and learned position) embedding."""
        return self.embedding_table_params + self.position_rows * self.hidden_size

    @cached_property
    def head_params(self) -> int:
        """Weights of an output head of its own; 0 where it is the embedding."""
        return self.embedding_table_params * (not self.tied)

    @cached_property
    def expert_params(self) -> int:
        """Parameters of all blocks' experts (not the shared ones)."""
        return sum(kind.count * kind.expert_params for kind in self.layers)

    @cached_property
    def packable_sizes(self) -> tuple[tuple[int, int], ...]:
        """Elements of each matrix that qlora keeps in 4 bits, with how many of it the model has."""
        inner = tuple(
            (elements, kind.count) for kind in self.layers for elements in kind.packable_sizes
        )
        return inner + tuple((linear.weights, 1) for linear in self.outer_linears)

    @cached_property
    def packable_params(self) -> int:
        """Parameters that qlora keeps in 4 bits."""
        return sum(count * elements for elements, count in self.packable_sizes)

    @cached_property
    def linear_params(self) -> int:
        """Parameters of all weight matrices between embedding and head: linear layers and every
        expert."""
        return sum(count * linear.weights for linear, count in self.linears) + self.expert_params

    @cached_property
    def other_params(self) -> int:
        """Norms, biases, routers, attention sinks, and the last norm."""
        inner = sum(
            kind.count * (kind.params - kind.linear_weights - kind.expert_params)
            for kind in self.layers
        )
        outer = sum(linear.outputs for linear in self.outer_linears if linear.has_bias)
        return inner + outer + self.outer_params + self.vocab_size * self.has_head_bias

    @cached_property
    def params(self) -> int:
        """All parameters of the language model."""
        return self.embedding_params + self.head_params + self.linear_params + self.other_params
