"""What a trace runs: a frozen description of one training step. Benchmarks add what other scripts
did.

Torch-free, hashable by its JSON, and the key of the cache. Dtypes are torch's names (`bfloat16`).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sft_play.planner.precision import DtypeName


class TraceUnavailable(Exception):
    """These settings cannot be traced with these libraries; the text says why. The plan then does
    without a trace."""


# The two ways of this toolkit's own attention.
VARLEN_ATTENTIONS = ("varlen", "one_by_one")
TracedAttention = Literal["sdpa", "eager", "flash_attention_2", "varlen", "one_by_one"]
CudnnUse = Literal["never", "training", "always"]
RowMask = Literal["none", "ones", "padded", "packed", "positions"]


@dataclass(frozen=True)
class TracedImages:
    """Bytes of a frozen vision tower; and of a micro-batch's pictures in training and in
    evaluation: as the model is given them, at the peak of the tower's pass, and features that
    stay."""

    weights: int
    training: tuple[int, int, int]
    evaluation: tuple[int, int, int]


@dataclass(frozen=True)
class StepSettings:
    """One rank's training step. Sizes in tokens and sequences; defaults are what this toolkit's
    trainer does."""

    # The model's config.json as plain data.
    model: Mapping[str, Any]
    # Folder or hub name of a model whose own code defines its class.
    code: str | None = None
    mode: Literal["full", "lora", "qlora"] = "qlora"
    # PEFT's config as plain data (`peft_type`, `r`, `target_modules`, ...); None in full mode.
    peft: Mapping[str, Any] | None = None
    # Tokens that the vocabulary gets; with adapters their rows train.
    new_tokens: int = 0
    micro_batch: int = 1
    seq_len: int = 2048
    grad_accum: int = 1
    optimizer_steps: int = 2
    # --- dtypes -----------------------------------------------------------------------------------
    weights: DtypeName = "bfloat16"
    # None: the script runs without autocast.
    autocast: DtypeName | None = "bfloat16"
    # None: what PEFT and TRL do in the mode (fp32 on unquantised bases, bf16 on NF4).
    adapters: DtypeName | None = None
    # LoRA layers cast their inputs to the adapters' dtype under autocast too, as PEFT's do unless
    # they are told.
    casts_inputs: bool = False
    # LoRA layers train in groups (training/model/grouped_adapters.py), as this toolkit's do where
    # one rank holds whole weights.
    groups_adapters: bool = False
    double_quant: bool = True
    quant_compute: DtypeName = "bfloat16"
    quant_storage: str = "uint8"
    # NF4 for stacked experts too, as this toolkit loads them (training/model/nf4_experts.py).
    quant_experts: bool = False
    # --- the step ---------------------------------------------------------------------------------
    checkpointing: bool = True
    # None: all of them; a number: the first this many layers, the rest keep their activations.
    checkpointed_layers: int | None = None
    reentrant: bool = False
    # chunked: TRL 1.16's head; logits: this toolkit's, over the class's whole logits; model: the
    # class's own loss over them; the others those of older versions of transformers: shifted,
    # before 4.50, copied, float replaced the half logits, half stayed in their dtype.
    loss: Literal[
        "chunked",
        "logits",
        "model",
        "logits_float",
        "logits_shifted",
        "logits_shifted_float",
        "logits_shifted_half",
    ] = "chunked"
    # varlen: this toolkit's own, by the boundaries of packs
    # (training/model/attention_functions.py); one_by_one: the same by a call for each chat.
    attention: TracedAttention = "sdpa"
    # none: no attention mask is passed; ones: one without padding; padded: real padding; packed:
    # position ids that restart; positions: position ids that do not.
    mask: RowMask = "ones"
    # sdpa repeats them where transformers would leave grouped heads to PyTorch, as this toolkit's
    # runs do where flash attention does not run (training/model/attention_functions.py).
    repeats_kv: bool = False
    # When sdpa may run cuDNN's kernel, which PyTorch prefers on some GPUs (`planner.kernels`);
    # training: not in an evaluation.
    cudnn: CudnnUse = "never"
    # A name that `TracedLoop.create_optimizer` knows. 8-bit ones with `_wide_embeddings` keep
    # embeddings' states in fp32.
    optimizer: str = "adamw_fused"
    clip: bool = True
    # stacked: transformers' grouped products; cast: the same in autocast's dtype
    # (training/prepare/experts.py); eager: one expert after another; loop: that with separate
    # linear layers, as before transformers 5.0.
    experts: Literal["stacked", "cast", "eager", "loop"] = "stacked"
    # Of norms, gated activations and rotations: the model's own, or liger-kernel's, which no plan's
    # trace runs.
    kernels: Literal["plain", "liger"] = "plain"
    # Of gated delta rules: the class's own code, or flash-linear-attention's kernels
    # (`trace.kernels`).
    delta_rule: Literal["plain", "fla"] = "plain"
    # Sharded gradients are reduced after every micro-batch (accelerate's `sync_each_batch`); else
    # full ones are kept until the last.
    sync_each_batch: bool = False
    # --- other phases -----------------------------------------------------------------------------
    # Rows of an evaluation batch after the steps; None: no evaluation.
    eval_batch: int | None = None
    # The evaluation's mask, where it differs from the training's.
    eval_mask: RowMask | None = None
    # --- ranks ------------------------------------------------------------------------------------
    # fsdp1: with flat parameters, which older scripts ran; streamed: blocks of a frozen base visit
    # from RAM (training/model/streamed_base.py), with several ranks under DDP; zero1 to zero3:
    # DeepSpeed, which is never traced.
    strategy: Literal["single", "ddp", "fsdp1", "fsdp2", "streamed", "zero1", "zero2", "zero3"] = (
        "single"
    )
    world: int = 1
    # accelerate's mixed precision of sharded steps: trained weights are kept in fp32, gathered and
    # reduced in this.
    mixed_precision: DtypeName | None = "bfloat16"
    # FSDP2's param_dtype, where it is not `mixed_precision`.
    gathers_in: DtypeName | None = None
    # FSDP2's reduce_dtype, where gradients are not sent as computed.
    reduces_in: DtypeName | None = None
    on_gpu: bool = True
    # CUDA's, of the GPU that is simulated. On a CPU TRL's head runs without Triton, and nothing
    # takes workspaces.
    capability: tuple[int, int] = (9, 0)
    # Pictures, and the tower that looks at them; None for rows of text.
    images: TracedImages | None = None

    def canonical_text(self) -> str:
        """A canonical text: equal settings give equal texts."""
        fields = asdict(self)
        if self.images is None:  # as it was before there were any
            del fields["images"]
        return json.dumps(fields, sort_keys=True)


@dataclass(frozen=True)
class TracedPeak:
    """What a trace measured: highest bytes of one rank, in tensors' blocks and in the allocator's
    segments."""

    allocated: int
    reserved: int
    # Highest (allocated, reserved) inside each phase: build, forward, backward, optimizer,
    # evaluation.
    phases: Mapping[str, tuple[int, int]]
    # Allocated bytes after loading.
    resident: int
    # The larger reserved peak of the allocator's two modes, fixed-size and expandable segments.
    reserved_either: int = 0
    seconds: float = 0.0
