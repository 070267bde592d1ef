"""Bytes of a training step's peak, term by term: a first closed form of one data-parallel rank.

Symbols: B sequences per pass, S tokens per sequence, T = B*S, h hidden width, f MLP width, q and kv widths of
all query and key heads, a query heads, V vocabulary, e bytes of an activation, r LoRA rank. The formulas follow
the saved tensors of transformers' blocks and of TRL's chunked loss; each term's docstring or comment says which
part. They were checked against published peaks only in part, so the plan adds the margin of its class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sft_play.config.schema import RunConfig
from sft_play.facts.architecture import ModelShape
from sft_play.plan.precision import BYTES, Precision

GIB = 2**30
NF4_BLOCK = 64
"""Weights that share one absmax in bitsandbytes' NF4."""
LOSS_TILE_BYTES = 4096 * 32_768 * 2
"""Logits that TRL's chunked head holds at once: 4,096 tokens by 32,768 words in half precision."""
CUBLAS_WORKSPACE_BYTES = 2 * 33_554_432
"""One workspace for the forward and one for the backward thread on compute capability 9 and later; older GPUs
take a quarter (CublasHandlePool.cpp)."""
CUDA_CONTEXT_BYTES = GIB // 2
"""CUDA context and kernels, outside the allocator: 141 MiB seen on a T4, 0.4 to 0.6 GiB said of H100s."""
NCCL_BYTES = 688 * 2**20
"""NCCL's buffers per communicator, the upper end of what was reported (544 to 688 MiB)."""

ALLOCATOR_SLACK = {"full": 1.05, "lora": 1.04, "qlora": 1.08}
"""Reserved over allocated memory (simulated caching allocator, models of 1B and more)."""
CPU_ACTIVATION_SLACK = 2.0
"""What a CPU process keeps of freed activations, times their size. With it and CPU_LATE_BYTES the prediction was 0.9
to 2.3 times the resident memory of six runs of a 2M model (benchmarks/predicted_peak_cpu.json, 2026-11-21)."""
CPU_LATE_BYTES = GIB // 4
"""Libraries and threads that a CPU run brings in after the imports, from the same runs."""
MARGIN = {"full": 0.03, "lora": 0.03, "qlora": 0.06}
"""Share of the reserved estimate kept free, by the spread of measured runs of its class."""
MARGIN_MULTI_GPU = 0.10
"""The same for several ranks, where nothing was measured."""
MARGIN_BYTES = int(0.3 * GIB)


@dataclass(frozen=True)
class MemoryEstimate:
    """The predicted peak of one rank in bytes: `terms` add up to `allocated`; `required` is what must be free."""

    terms: dict[str, int] = field(default_factory=dict)
    reserved: int = 0
    margin: int = 0
    outside_allocator: int = 0

    @property
    def allocated(self) -> int:
        """Bytes that tensors hold at the peak."""
        return sum(self.terms.values())

    @property
    def required(self) -> int:
        """Bytes that must be free on the device before the run starts."""
        return self.reserved + self.margin + self.outside_allocator


@dataclass(frozen=True)
class Step:
    """One training step of one rank: what the estimate assumes. The batch is full-length and every token scored."""

    micro_batch: int
    grad_accum: int
    seq_len: int
    ranks: int = 1
    on_gpu: bool = True

    @property
    def tokens(self) -> int:
        """T = B * S."""
        return self.micro_batch * self.seq_len


def nf4_bytes(elements: int) -> int:
    """Bytes of a matrix in NF4 with double quantisation: packed weights, 8-bit absmax, their own absmax, codes."""
    blocks = math.ceil(elements / NF4_BLOCK)
    return math.ceil(elements / 2) + blocks + 4 * math.ceil(blocks / 256) + 1024 + 4 + 64


def adapter_params(shape: ModelShape, rank: int) -> int:
    """LoRA parameters on every linear layer of the blocks: r * (inputs + outputs) each.

    Experts that the library keeps as one tensor are not linear layers and get no adapter.
    """
    targets = shape.linear_shapes.items()
    chosen = [io for name, io in targets if not shape.num_experts or name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    return shape.num_layers * sum(rank * (i + o) for i, o in chosen)


def estimate(config: RunConfig, shape: ModelShape, precision: Precision, step: Step) -> MemoryEstimate:
    """The predicted peak of a step, for one rank that holds the whole model."""
    terms = _resident(config, shape, precision, step)
    terms |= _peak_of_step(config, shape, precision, step)
    allocated = sum(terms.values())
    mode = config.tuning.mode
    reserved = int(allocated * ALLOCATOR_SLACK[mode]) if step.on_gpu else _resident_on_cpu(terms)
    share = max(MARGIN[mode], MARGIN_MULTI_GPU if step.ranks > 1 else 0.0)
    outside = (CUDA_CONTEXT_BYTES + (NCCL_BYTES if step.ranks > 1 else 0)) if step.on_gpu else 0
    return MemoryEstimate(terms, reserved, int(reserved * share) + MARGIN_BYTES, outside)


def _resident_on_cpu(terms: dict[str, int]) -> int:
    """Resident memory of a CPU process above the level after its imports: tensors, and what malloc does not return."""
    passing = terms["activations"] + terms["loss_head"]
    return sum(terms.values()) + int(CPU_ACTIVATION_SLACK * passing) + CPU_LATE_BYTES


def _resident(config: RunConfig, shape: ModelShape, precision: Precision, step: Step) -> dict[str, int]:
    """What stays between steps: weights, adapters, optimizer states, gradients, buckets, workspaces."""
    width, mode = BYTES[precision.load], config.tuning.mode
    unquantised = shape.embedding_params + shape.head_params + shape.other_params
    linear = nf4_bytes(shape.linear_params) if mode == "qlora" else width * shape.linear_params
    terms = {"weights": linear + width * unquantised}
    if mode == "full":
        trained, trained_width = shape.params, width
    else:
        # PEFT keeps adapters of an unquantised base in fp32; those of a quantised one follow a bf16 run.
        trained_width = 2 if mode == "qlora" and precision.compute == "bfloat16" else 4
        trained = adapter_params(shape, config.tuning.lora.r)
        trained += _saved_modules(config, shape)
        terms["adapters"] = trained * trained_width
    terms["gradients"] = trained * trained_width
    terms["optimizer"] = optimizer_bytes(config.train.optim, trained, trained_width)
    if step.ranks > 1:
        terms["gradient_buckets"] = trained * trained_width  # DDP's copy: gradient_as_bucket_view is off
    if step.on_gpu:
        terms["workspaces"] = CUBLAS_WORKSPACE_BYTES
    return terms


def _saved_modules(config: RunConfig, shape: ModelShape) -> int:
    """Parameters of whole modules that train beside the adapters, where they are the embedding or the head."""
    names = {name.rpartition(".")[2] for name in config.tuning.lora.modules_to_save}
    vocabulary = shape.vocab_size * shape.hidden_size
    return vocabulary * len(names & {"embed_tokens", "wte"}) + vocabulary * len(names & {"lm_head"})


def optimizer_bytes(optim: str, params: int, param_bytes: int) -> int:
    """Optimizer states in bytes: AdamW keeps two of the parameter's dtype, 8-bit AdamW two bytes and absmax,
    Adafactor rows and columns only."""
    if optim == "paged_adamw_8bit":
        return int(params * (2 + 8 / 256))
    if optim == "adafactor":
        return int(params * 0.02)
    return 2 * param_bytes * params


def _peak_of_step(config: RunConfig, shape: ModelShape, precision: Precision, step: Step) -> dict[str, int]:
    """The larger of two moments: one layer's backward with its neighbours' inputs, or the loss head."""
    e, h, layers = BYTES[precision.compute], shape.hidden_size, shape.num_layers
    per_layer = saved_by_layer(config, shape, e) * step.tokens + _mask_bytes(shape, step, e)
    head = head_bytes(config, shape, step.tokens, e)
    if config.train.gradient_checkpointing:
        boundaries = (layers + 1) * step.tokens * h * e
        flight = _flight(config, shape, step.tokens, e)
        return {"activations": boundaries + max(per_layer + flight, head), "loss_head": 0}
    return {"activations": layers * per_layer, "loss_head": head}


def saved_by_layer(config: RunConfig, shape: ModelShape, e: int) -> int:
    """Bytes per token that one block keeps for its backward pass without checkpointing."""
    h, f, q, kv, r = shape.hidden_size, shape.intermediate_size, shape.q_width, shape.kv_width, config.tuning.lora.r
    mode, lora = config.tuning.mode, config.tuning.lora
    norms = 2 * 4 * h + (2 * (4 + e) * h if shape.norms_per_layer == 4 else 0)
    attention = 2 * e * (q + kv) + 4 * shape.num_heads + (4 * (q + kv) if shape.qk_norm else 0)
    mlp = 3 * e * f
    if mode == "full":
        return norms + 2 * e * h + attention + mlp + 2 * e * h + e * f
    widths = [i for i, _ in shape.linear_shapes.values()]
    copies = e * (2 * h + f) + len(widths) * e * r if mode == "qlora" else sum((e + 4 + 2) * i // 2 for i in widths)
    dropout = sum(widths) * (1 + e) if lora.dropout > 0 else 0
    return norms + attention + mlp + copies + dropout


def _mask_bytes(shape: ModelShape, step: Step, e: int) -> int:
    """A padded batch's attention mask: one boolean and one bias of S x S per sequence while a layer runs."""
    return step.micro_batch * step.seq_len**2 * (1 + 2 * e)


def _flight(config: RunConfig, shape: ModelShape, tokens: int, e: int) -> int:
    """Bytes of a layer's backward beyond what it saved: MLP gradients, and NF4's rebuilt half-precision matrix."""
    h, f = shape.hidden_size, shape.intermediate_size
    dequantised = 2 * h * f if config.tuning.mode == "qlora" else 0
    if config.tuning.mode == "full":
        return tokens * e * (f + h) + e * h * f
    return max(tokens * e * f + dequantised, 2 * tokens * e * f)


def head_bytes(config: RunConfig, shape: ModelShape, tokens: int, e: int) -> int:
    """TRL's chunked loss: the scored hidden states, their fp32 gradient, one tile of logits; a trained head adds
    its fp32 accumulator and the cast of it."""
    h, v = shape.hidden_size, shape.vocab_size
    tile = min(LOSS_TILE_BYTES, 4 * tokens * v)
    trained_head = v * h * (4 + e) if config.tuning.mode == "full" else 0
    return tokens * h * (4 + 2 * e) + 28 * tokens + tile + trained_head
