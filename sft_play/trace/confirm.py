"""From a plan's candidate to the settings of the step that is traced, and back: a second prediction for the plan.

What was measured with the libraries is remembered by their versions and this code's: traces by their settings, shapes
by their config.json. Failures are not, nor what came from a model's own code.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import TypeAdapter

from sft_play.config.schema import RunConfig
from sft_play.machine.software import load_or_measure
from sft_play.models.shape import ModelShape
from sft_play.planner.candidates import Candidate
from sft_play.planner.kernels import plan_experts, plan_kernels
from sft_play.planner.memory.step_memory import Step, is_padded
from sft_play.planner.memory.structure import needs_repeated_kv, stacked_adapter_params
from sft_play.planner.plan import TracePrediction
from sft_play.planner.precision import DtypeName, Precision, adapter_dtype, gradient_sync
from sft_play.process.waiting import importing


class TraceUnavailable(Exception):
    """These settings cannot be traced with these libraries; the text says why. The plan then does without a trace."""


# The two ways of this toolkit's own attention.
VARLEN_ATTENTIONS = ("varlen", "one_by_one")
TracedAttention = Literal["sdpa", "eager", "flash_attention_2", "varlen", "one_by_one"]
CudnnUse = Literal["never", "training", "always"]
RowMask = Literal["none", "ones", "padded", "packed", "positions"]


@dataclass(frozen=True)
class StepSettings:
    """One rank's training step. Sizes in tokens and sequences; defaults are what this toolkit's trainer does."""

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
    # --- dtypes -----------------------------------------------------------------------------------------------------
    weights: DtypeName = "bfloat16"
    # None: the script runs without autocast.
    autocast: DtypeName | None = "bfloat16"
    # None: what PEFT and TRL do in the mode (fp32 on unquantised bases, bf16 on NF4).
    adapters: DtypeName | None = None
    # LoRA layers cast their inputs to the adapters' dtype under autocast too, as PEFT's do unless
    # they are told.
    casts_inputs: bool = False
    double_quant: bool = True
    quant_compute: DtypeName = "bfloat16"
    quant_storage: str = "uint8"
    # NF4 for stacked experts too, as this toolkit loads them (training/model/nf4_experts.py).
    quant_experts: bool = False
    # --- the step ---------------------------------------------------------------------------------------------------
    checkpointing: bool = True
    # None: all of them; a number: the first this many layers, the rest keep their activations.
    checkpointed_layers: int | None = None
    reentrant: bool = False
    # chunked: TRL 1.16's head; logits: this toolkit's, over the class's whole logits; model: the
    # class's own loss over them; the others those of older versions of transformers: shifted,
    # before 4.50, copied, float replaced the half logits, half stayed in their dtype.
    loss: Literal[
        "chunked", "logits", "model", "logits_float", "logits_shifted", "logits_shifted_float", "logits_shifted_half"
    ] = "chunked"  # fmt: skip
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
    # A name that `step.make_optimizer` knows. 8-bit ones with `_wide_embeddings` keep embeddings'
    # states in fp32.
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
    # --- other phases ------------------------------------------------------------------------------------------------
    # Rows of an evaluation batch after the steps; None: no evaluation.
    eval_batch: int | None = None
    # The evaluation's mask, where it differs from the training's.
    eval_mask: RowMask | None = None
    # --- ranks ------------------------------------------------------------------------------------------------------
    # fsdp1: with flat parameters, which older scripts ran; zero1 to zero3: DeepSpeed, which is
    # never traced.
    strategy: Literal["single", "ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"] = "single"
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

    def canonical_text(self) -> str:
        """A canonical text: equal settings give equal texts."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class TracedPeak:
    """What a trace measured: highest bytes of one rank, in tensors' blocks and in the allocator's segments."""

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


# --------------------------------------------------------------------------------------------------
# A candidate as such settings, and what its trace measures.

logger = logging.getLogger(__name__)

# Part of the key of traces: raised whenever this package would give another number for the same settings.
TRACE_VERSION = 20
# The same for shapes.
SHAPE_VERSION = 17
_PEAK_ADAPTER, _SHAPE_ADAPTER = TypeAdapter(TracedPeak), TypeAdapter(ModelShape)
# The layouts that a trace can run, by their names there.
TRACED_STRATEGIES: dict[str, Literal["single", "ddp", "fsdp2"]] = {"single": "single", "ddp": "ddp", "fsdp": "fsdp2"}
TRACED_OPTIMIZERS = {
    "adamw_torch_fused": "adamw_fused",
    "adamw_torch": "adamw_foreach",
    "paged_adamw_8bit": "paged_adamw_8bit_wide_embeddings",
    "adamw_8bit": "adamw_8bit_wide_embeddings",
    "lion_32bit": "lion_32bit_bnb",
    "lion_8bit": "lion_8bit_wide_embeddings",
    "muon": "muon",
    "adafactor": "adafactor",
}


def trace_candidate(
    config: RunConfig, config_json: Mapping[str, Any], shape: ModelShape, precision: Precision, candidate: Candidate
) -> TracePrediction:
    """What a trace of the candidate's step measures, or why there is none; raises ModelError as PEFT would."""
    name = candidate.layout.name
    obstacles = {
        "plan.trace is false": not config.plan.trace,
        "a trace simulates a GPU, and this run is on the CPU": not candidate.step.on_gpu,
        f"the trace runs one GPU, DDP and FSDP2; {name} rests on formulas": name not in TRACED_STRATEGIES,
        "the trace keeps what is recomputed on the GPU, and it is offloaded here": candidate.step.offloads,
        "the trace does not step by stochastic rounding": precision.updates == "stochastic",
    }
    if reason := next((reason for reason, applies in obstacles.items() if applies), None):
        return TracePrediction(unavailable_reason=reason)
    try:
        peak = cached_trace(step_settings(config, config_json, shape, precision, candidate.step))
    except TraceUnavailable as error:
        return TracePrediction(unavailable_reason=str(error))
    logger.debug("traced in %.1f s", peak.seconds)
    return TracePrediction(peak.allocated, peak.reserved_either)


def step_settings(
    config: RunConfig, config_json: Mapping[str, Any], shape: ModelShape, precision: Precision, step: Step
) -> StepSettings:
    """The step as the trainer would run it, in a layout that a trace can run."""
    layout, recomputed_layers = step.layout, step.recomputed_layers(shape.num_layers)
    is_full, is_fsdp = config.tuning.mode == "full", layout.name == "fsdp"
    half_dtype = precision.compute if precision.compute != "float32" else None
    sync = gradient_sync(config, precision, layout.name)
    attention: TracedAttention = step.attention
    if step.varlen:
        attention = "one_by_one" if step.one_by_one else "varlen"
    cudnn: CudnnUse = "never"
    if step.cudnn:
        cudnn = "always" if config.task_mode == "cpt" else "training"
    mask: RowMask = row_mask(has_padding=step.padded, uses_masks=step.masks)
    if step.varlen or (config.data.packing != "none" and config.task_mode != "cpt"):  # full blocks are never packed
        mask = "packed"
    return StepSettings(
        model=config_json,
        mode=config.tuning.mode,
        peft=None if is_full else _peft_config(config, shape),
        new_tokens=len(config.model.add_tokens),
        micro_batch=step.micro_batch,
        seq_len=step.seq_len,
        grad_accum=min(step.grad_accum, 2),  # a third one meets the same as the second
        weights=precision.load,
        autocast=half_dtype,
        adapters=None if is_full else adapter_dtype(config, precision),
        quant_compute=precision.compute,
        quant_experts=config.tuning.has_quantized_experts,
        quant_storage=precision.compute if is_fsdp else "uint8",
        checkpointing=recomputed_layers > 0,
        checkpointed_layers=recomputed_layers if 0 < recomputed_layers < shape.num_layers else None,
        loss=step.loss,
        attention=attention,
        repeats_kv=needs_repeated_kv(
            shape, attention=step.attention, half_precision=half_dtype is not None, capability=step.capability
        ),
        cudnn=cudnn,
        mask=mask,
        optimizer=TRACED_OPTIMIZERS[config.train.optim],
        experts=_expert_implementation(config, shape, precision),
        kernels=plan_kernels(config, shape, layout, on_gpu=step.on_gpu).counted_kernels.memory,
        delta_rule="fla" if step.fla else "plain",
        clip=config.train.max_grad_norm > 0,
        eval_batch=step.eval_batch or None,
        eval_mask=row_mask(
            has_padding=is_padded(config, step.layout, rows=step.eval_batch, uses_masks=step.masks),
            uses_masks=step.masks,
        ),
        strategy=TRACED_STRATEGIES[layout.name],
        world=layout.ranks,
        sync_each_batch=is_fsdp and sync.interval == "micro_batch",
        mixed_precision=half_dtype,
        gathers_in=sync.gathered_dtype if is_fsdp and sync.gathered_dtype != precision.compute else None,
        reduces_in=sync.reduced_dtype if is_fsdp and sync.is_compressed else None,
        on_gpu=step.on_gpu,
        capability=step.capability or (9, 0),
    )


def _expert_implementation(
    config: RunConfig, shape: ModelShape, precision: Precision
) -> Literal["stacked", "cast", "eager"]:
    experts = plan_experts(config, shape, precision)
    if experts is None or shape.uses_custom_experts:
        return "stacked"
    if experts.casts_weights:
        return "cast"
    return "eager" if experts.name == "eager" else "stacked"


def row_mask(*, has_padding: bool, uses_masks: bool) -> RowMask:
    """What the collator gives the model of rows of one chat."""
    if not uses_masks:
        return "positions"
    return "padded" if has_padding else "ones"


def _peft_config(config: RunConfig, shape: ModelShape) -> dict[str, Any]:
    lora = config.tuning.lora
    stacked = [weight for kind in shape.layers for weight in kind.expert_weights]
    if shape.adapter_placement is not None:
        targets = shape.adapter_placement.resolve_targets(lora.target_modules)
    elif lora.target_modules == "auto":  # "all-linear" would name fused experts too
        targets = sorted({linear.name for linear, _ in shape.linears if linear.adaptable})
    else:
        targets = list(lora.target_modules)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.stored_rank,
        "lora_alpha": lora.stored_alpha,
        "lora_dropout": lora.dropout,
        "target_modules": targets,
        "target_parameters": sorted({one.path for one in stacked if stacked_adapter_params(one, lora)}) or None,
        "modules_to_save": list(lora.modules_to_save) or None,
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
    }


# --- remembered -------------------------------------------------------------------------------------------------------
def cached_trace(settings: StepSettings) -> TracedPeak:
    """`step.trace_step`, remembered; raises as that does."""

    def measure() -> TracedPeak:
        with importing():
            from sft_play.trace import step
        return step.trace_step(settings)

    return load_or_measure(
        "traces", {"settings": settings.canonical_text(), "trace": TRACE_VERSION}, _PEAK_ADAPTER, measure
    )


def cached_shape(config: Mapping[str, Any], *, name: str, trust_remote_code: bool = False) -> ModelShape:
    """`meta_shape.measure_shape_on_meta`, remembered, but not with remote code; raises as that does."""

    def measure() -> ModelShape:
        with importing():
            from sft_play.trace import meta_shape
        return meta_shape.measure_shape_on_meta(config, name=name, trust_remote_code=trust_remote_code)

    key_fields = {"config": config, "shape": SHAPE_VERSION}
    shape = load_or_measure("shapes", key_fields, _SHAPE_ADAPTER, measure, cacheable=not trust_remote_code)
    return dataclasses.replace(shape, name=name)
