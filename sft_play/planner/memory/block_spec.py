"""What the bytes of one decoder block depend on besides the batch: its layers, its dtypes and how it is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sft_play.facts.liger import Replaced

AttentionKernel = Literal["cudnn", "flash", "varlen", "efficient", "math", "eager"]
"""varlen: flash attention of padded rows, whose tokens are gathered first and scattered back."""


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
class Numbers:
    """Bytes of an element: loaded weights, autocast's dtype (None: no autocast), adapters, optimizer states (None: the
    dtype of their parameter)."""

    weights: int = 2
    autocast: int | None = 2
    adapters: int = 4
    states: int | None = None


@dataclass(frozen=True)
class BlockSpec:
    """A block's structure and how it is trained: everything that its bytes depend on besides the batch."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    linears: tuple[tuple[str, LinearSpec], ...]
    """Linear layers by role: q, k, v, o or qkv; gate, up, down or gate_up; latent attention's own."""
    norm: Literal["rms", "gemma", "layer"] = "rms"
    norm_after: bool = False
    """Outputs of attention and MLP are normed before they are added, as in Gemma 2."""
    parallel: bool = False
    """Attention and MLP read the same input, and one norm's output."""
    parallel_norms: bool = False
    """Each of the two has a norm of its own, as in GPT-NeoX."""
    qk_norm: bool = False
    rotary: float = 1.0
    """Fraction of a head that is rotated; 0: none."""
    rotary_by_cat: bool = False
    """Rotated and other parts of a head are concatenated."""
    activation: Literal["kernel", "gelu_new"] = "kernel"
    dropout: float = 0.0
    """Dropout of the block's two outputs."""
    attention_dropout: float = 0.0
    """Dropout of attention probabilities: eager attention keeps its mask, the fused kernels recompute it."""
    kernel: AttentionKernel = "flash"
    masked: bool = False
    """Attention gets a mask of S x S."""
    one_by_one: bool = False
    """Each chat is attended to by a call of its own."""
    softcap: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    gated_experts: bool = True
    expert_bias: bool = False
    clamped_gate: bool = False
    """Experts gate as gpt-oss does."""
    routes_in_fp32: bool = False
    """The weights by which experts' outputs are added are fp32."""
    experts_in_turn: bool = False
    """Experts run one after another instead of as one grouped product."""
    attends: bool = True
    """False: no softmax attention, but a recurrent or convolutional mixer."""
    full: bool = False
    """The weights train themselves, without adapters."""
    nf4: bool = False
    lora_dropout: float = 0.0
    dora: bool = False
    casts_inputs: bool = False
    """LoRA layers cast their inputs to the adapters' dtype under autocast too."""
    liger: Replaced | None = None
    """What Liger's kernels replace; None: nothing."""
    numbers: Numbers = field(default_factory=Numbers)
