"""What a plan asks of the trace: the settings of a candidate's step and what they measure, a second
prediction; and the shapes and blocks of a class that the tables lack.

What was measured with the libraries is remembered by their versions and this code's: traces by
their settings, shapes by their config.json. Failures are not, nor what came from a model's own
code.
"""

import importlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal

from pydantic import TypeAdapter

from sft_play.config.schema import RunConfig
from sft_play.data.masks.image_processor import ImageProcessorSource
from sft_play.errors import ModelError
from sft_play.log import one_line
from sft_play.machine.host import total_and_free_ram
from sft_play.machine.software import MeasuredT, load_or_measure
from sft_play.models.config_json import (
    load_config_json,
    parse_model_shape,
    quantised_storage_note,
    refuse_quantised,
    refuse_remote_code,
    text_only_note,
)
from sft_play.models.families import UnknownArchitecture, wrapped_config
from sft_play.models.shape import ModelShape, VisionPass, VisionShape, VisionWeights
from sft_play.planner.batching import RowTokens
from sft_play.planner.candidates import Candidate
from sft_play.planner.kernels import groups_adapters, plan_experts, plan_kernels
from sft_play.planner.layout import SINGLE
from sft_play.planner.memory.model_states import trains_vision
from sft_play.planner.memory.step_memory import (
    BlockMode,
    MeasuredBlocks,
    Step,
    interpolate,
    is_padded,
    measure_vision,
)
from sft_play.planner.memory.structure import (
    ElementBytes,
    configured_shape,
    element_bytes,
    needs_repeated_kv,
    stacked_adapter_params,
)
from sft_play.planner.pass_work import CountedWork, mean_work
from sft_play.planner.plan import TracePrediction
from sft_play.planner.precision import (
    DTYPE_BYTES,
    DtypeName,
    Precision,
    adapter_dtype,
    gradient_sync,
)
from sft_play.process.waiting import importing, report_wait
from sft_play.text import GIB
from sft_play.trace.settings import (
    CudnnUse,
    RowMask,
    StepSettings,
    TracedAttention,
    TracedImages,
    TracedPeak,
    TraceUnavailable,
)

logger = logging.getLogger(__name__)

# Part of the key of traces: raised whenever this package would give another number for the same
# settings.
TRACE_VERSION = 20
# The same for shapes.
SHAPE_VERSION = 17
# The same for vision towers.
VISION_VERSION = 3
_PEAK_ADAPTER, _SHAPE_ADAPTER = TypeAdapter(TracedPeak), TypeAdapter(ModelShape)
_VISION_ADAPTER, _PASS_ADAPTER = TypeAdapter(VisionWeights), TypeAdapter(VisionPass)
# The layouts that a trace can run, by their names there.
TRACED_STRATEGIES: dict[str, Literal["single", "ddp", "fsdp2", "streamed"]] = {
    "single": "single",
    "streamed": "streamed",
    "ddp": "ddp",
    "fsdp": "fsdp2",
}
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
    config: RunConfig,
    config_json: Mapping[str, Any],
    shape: ModelShape,
    precision: Precision,
    candidate: Candidate,
) -> TracePrediction:
    """What a trace of the candidate's step measures, or why there is none; raises ModelError as
    PEFT would."""
    name = candidate.layout.name
    obstacles = {
        "plan.trace is false": not config.plan.trace,
        "a trace simulates a GPU, and this run is on the CPU": not candidate.step.on_gpu,
        f"the trace runs one GPU, DDP, FSDP2 and streamed; {name} rests on formulas": (
            name not in TRACED_STRATEGIES
        ),
        "the trace keeps what is recomputed on the GPU, and it is offloaded here": (
            candidate.step.offloads
        ),
        "the trace does not step by stochastic rounding": precision.updates == "stochastic",
        "the trace keeps a vision tower frozen": (
            shape.vision is not None and trains_vision(config, shape)
        ),
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
    config: RunConfig,
    config_json: Mapping[str, Any],
    shape: ModelShape,
    precision: Precision,
    step: Step,
) -> StepSettings:
    """The step as the trainer would run it, in a layout that a trace can run."""
    layout, recomputed_layers = step.layout, step.recomputed_layers(shape.num_layers)
    is_full, is_fsdp = config.tuning.mode == "full", layout.name == "fsdp"
    half_dtype = precision.compute if precision.compute != "float32" else None
    sync = gradient_sync(config, precision, layout.name)
    # how rows reach the attention, and what keeps them apart
    attention: TracedAttention = step.attention
    if step.varlen:
        attention = "one_by_one" if step.one_by_one else "varlen"
    cudnn: CudnnUse = "never"
    if step.cudnn:
        cudnn = "always" if config.task_mode == "cpt" else "training"
    mask: RowMask = row_mask(has_padding=step.padded, uses_masks=step.masks)
    # full blocks are never packed
    if step.varlen or (config.data.packing != "none" and config.task_mode != "cpt"):
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
        groups_adapters=groups_adapters(config, precision, layout),
        quant_compute=precision.compute,
        quant_experts=config.tuning.has_quantized_experts,
        quant_storage=precision.compute if is_fsdp else "uint8",
        checkpointing=recomputed_layers > 0,
        checkpointed_layers=recomputed_layers if 0 < recomputed_layers < shape.num_layers else None,
        loss=step.loss,
        attention=attention,
        repeats_kv=needs_repeated_kv(
            shape,
            attention=step.attention,
            half_precision=half_dtype is not None,
            capability=step.capability,
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
        gathers_in=(
            sync.gathered_dtype if is_fsdp and sync.gathered_dtype != precision.compute else None
        ),
        reduces_in=sync.reduced_dtype if is_fsdp and sync.is_compressed else None,
        on_gpu=step.on_gpu,
        capability=step.capability or (9, 0),
        images=_traced_images(config, shape, precision, step),
    )


def _traced_images(
    config: RunConfig, shape: ModelShape, precision: Precision, step: Step
) -> TracedImages | None:
    if shape.vision is None:
        return None
    vision_pass = measure_vision(config, shape, precision, step)
    training = vision_pass.scaled(step.pictures)
    pictures = shape.vision.max_pictures(
        rows=step.eval_batch, tokens=step.eval_batch * step.seq_len
    )
    evaluation = vision_pass.scaled(pictures * bool(step.eval_batch))
    return TracedImages(
        shape.vision.weights.resident_bytes(DTYPE_BYTES[precision.load]),
        *((one.pixel_bytes, one.peak_bytes, one.feature_bytes) for one in (training, evaluation)),
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
        "target_parameters": (
            sorted({one.path for one in stacked if stacked_adapter_params(one, lora)}) or None
        ),
        "modules_to_save": list(lora.modules_to_save) or None,
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
    }


# --- remembered -----------------------------------------------------------------------------------
def _import_module(name: str) -> ModuleType:
    # a module of this folder that brings torch and transformers: it is loaded where something is
    # measured
    with importing():
        return importlib.import_module(f"sft_play.trace.{name}")


def _measure(task: str, module_name: str, function: str, *words: Any, **options: Any) -> Any:
    module = _import_module(module_name)
    with report_wait(f"{task}, once for these libraries"):
        return getattr(module, function)(*words, **options)


# What this process has loaded or measured: a plan asks for it with every candidate.
_measured_by_key: dict[str, Any] = {}


def _load_once(
    cache_name: str,
    key_fields: Mapping[str, Any],
    adapter: TypeAdapter[MeasuredT],
    measure: Callable[[], MeasuredT],
    *,
    cacheable: bool = True,
) -> MeasuredT:
    key = json.dumps([cache_name, key_fields])
    if key not in _measured_by_key:
        _measured_by_key[key] = load_or_measure(
            cache_name, key_fields, adapter, measure, cacheable=cacheable
        )
    measured: MeasuredT = _measured_by_key[key]
    return measured


def cached_trace(settings: StepSettings) -> TracedPeak:
    """`step.trace_step`, whose result is read from the cache if there is one; raises as that
    does."""
    return load_or_measure(
        "traces",
        {"settings": settings.canonical_text(), "trace": TRACE_VERSION},
        _PEAK_ADAPTER,
        lambda: _measure("Tracing a training step", "step", "trace_step", settings),
    )


def cached_shape(
    config: Mapping[str, Any], *, name: str, trust_remote_code: bool = False
) -> ModelShape:
    """`meta_shape.measure_shape_on_meta`, whose result is read from the cache if there is one,
    except with remote code; raises as that does."""
    shape = load_or_measure(
        "shapes",
        {"config": config, "shape": SHAPE_VERSION},
        _SHAPE_ADAPTER,
        lambda: _measure(
            "Measuring the shapes of the model's class",
            "meta_shape",
            "measure_shape_on_meta",
            config,
            name=name,
            trust_remote_code=trust_remote_code,
        ),
        cacheable=not trust_remote_code,
    )
    return replace(shape, name=name)


# --------------------------------------------------------------------------------------------------
# Bytes of the blocks of a class that the table of families does not have, as a plan asks for them,
# remembered.
#
# Steps are run at the plan's own length, for a few batches; others lie between. A class whose
# operators grow with the length takes as many tokens in short rows, twice; one that cannot run on
# tensors without bytes, few real tokens on the CPU: both would take minutes at full length.

# Part of the key of what is remembered: raised whenever this package would give other bytes for the
# same settings.
BLOCKS_VERSION = 9
# Tokens that states are computed by at once, at least.
MIN_CHUNK_TOKENS = 64
# Names of the same in configs.
_CHUNK_FIELDS = ("chunk_size", "mamba_chunk_size", "block_size")
# Rows that are run together: what a plan asks for first. Sizes cost nothing, so that many rows take
# no longer.
MEASURED_BATCHES: dict[BlockMode, tuple[int, ...]] = {
    "kept": (1, 2, 8, 32),
    "recomputed": (1, 2, 8, 32),
    "evaluated": (1, 8, 64),
}
# Tokens of a row at least.
MIN_METERED_TOKENS = 64
# Tokens of the two rows that run on the CPU.
CPU_ROW_TOKENS = (64, 128)
_BLOCKS_ADAPTER = TypeAdapter(list[MeasuredBlocks])


def load_planned_shape(
    config: Mapping[str, Any], *, name: str, trust_remote_code: bool = False
) -> ModelShape:
    """Read the shapes of a config.json's language model for a plan; for a class that the tables
    lack, they and its blocks are measured. Raises ModelError: it is no causal language model, or
    its class refuses the config."""
    try:
        return parse_model_shape(config, name=name)
    except UnknownArchitecture as error:
        logger.debug("%s; its class is measured on the meta device", error)
    shape = cached_shape(config, name=name, trust_remote_code=trust_remote_code)
    code = name if trust_remote_code and config.get("auto_map") else None
    config_json = json.dumps(dict(config))
    return replace(
        shape,
        block_meter=BlockMeter(config_json, code),
        pass_meter=BlockPassMeter(config_json, code),
    )


@dataclass(frozen=True)
class BlockMeter:
    """Measures blocks of one class; `ModelShape.block_meter` of its shape."""

    # Its config.json.
    config_json: str
    # The folder or hub name whose own code defines it.
    remote_code: str | None = None

    def __call__(
        self,
        config: RunConfig,
        shape: ModelShape,
        precision: Precision,
        step: Step,
        element_bytes: ElementBytes,
        block_mode: BlockMode,
        batch: int,
        *,
        is_accumulating: bool = False,
    ) -> MeasuredBlocks:
        """Measure a micro step of `batch` rows; raises ModelError where its blocks cannot be run
        here."""
        # a run plans before it has counted its rows and after: short ones need not be measured
        # twice
        step = replace(
            step, seq_len=max(step.seq_len, MIN_METERED_TOKENS * step.layout.context_parallel)
        )
        kind_indices = leading_blocks(shape.layer_order)
        settings = self._step_settings(config, shape, precision, step, element_bytes, block_mode)
        padded_step = replace(step, varlen=False, one_by_one=False, padded=True, masks=True)
        return BlockMeasurement(
            settings,
            (
                self._step_settings(
                    config, shape, precision, padded_step, element_bytes, block_mode
                )
                if step.varlen
                else settings
            ),
            block_mode,
            kind_indices,
            # adapters' gradients are too small to tell whether they are added to older ones
            is_accumulating and block_mode != "evaluated" and config.tuning.mode == "full",
            sum(shape.layers[place].params for place in kind_indices)
            + shape.embedding_params
            + shape.head_params,
        ).load_measured_blocks(batch, step.length)

    def _step_settings(
        self,
        config: RunConfig,
        shape: ModelShape,
        precision: Precision,
        step: Step,
        element_bytes: ElementBytes,
        block_mode: BlockMode,
    ) -> StepSettings:
        # DeepSpeed's adapters of half the width would be measured apart, and hardly differ
        single_step = replace(
            step,
            layout=SINGLE,
            offloads=False,
            seq_len=step.length,
            micro_batch=1,
            grad_accum=1,
            eval_batch=0,
            checkpointed_layers=None if block_mode == "recomputed" else 0,
        )
        settings = step_settings(
            config, json.loads(self.config_json), shape, precision, single_step
        )
        is_eval_padded = is_padded(config, step.layout, rows=2, uses_masks=step.masks)
        half_dtype: DtypeName = precision.compute if precision.compute != "float32" else "bfloat16"
        dtypes_by_size: dict[int, DtypeName] = {4: "float32", 2: half_dtype}
        return replace(
            settings,
            code=self.remote_code,
            loss=shape.loss_name,
            kernels="plain",
            images=None,
            groups_adapters=groups_adapters(config, precision, step.layout),
            weights=dtypes_by_size[element_bytes.weights],
            eval_mask=(
                row_mask(has_padding=is_eval_padded, uses_masks=step.masks)
                if block_mode == "evaluated"
                else None
            ),
        )


@dataclass(frozen=True)
class BlockPassMeter(BlockMeter):
    """Counts what blocks of one class move and start beside their products; `pass_meter` of its
    shape."""

    def __call__(  # type: ignore[override]
        self, config: RunConfig, shape: ModelShape, precision: Precision, step: Step
    ) -> CountedWork | None:
        """Count an average block of the class; None where it does not run on fake tensors."""
        # checkpointing runs the same operators again; experts one after another, and slow linear
        # attention, are parts of their own
        plain_step = replace(step, offloads=False, fla=True)
        # engines that shard states give blocks weights in 16 bits
        itemsizes = element_bytes(config, precision)
        if step.layout.shards_states and itemsizes.autocast is not None:
            itemsizes = replace(itemsizes, weights=2)
        settings = replace(
            self._step_settings(config, shape, precision, plain_step, itemsizes, "kept"),
            experts="stacked",
            # squares of eager attention grow with a row
            seq_len=step.length if step.attention == "eager" else COUNTED_TOKENS,
            casts_inputs=step.casts_inputs,
        )
        kind_indices = leading_blocks(shape.layer_order)
        works = _load_once(
            "works",
            {"settings": settings.canonical_text(), "places": kind_indices, "work": WORK_VERSION},
            _WORKS_ADAPTER,
            lambda: _count_blocks(settings, len(kind_indices)),
            cacheable=self.remote_code is None,
        )
        if not works:
            return None
        # the last block of a kind that is counted: the first one has no input with a gradient
        by_kind = dict(zip(kind_indices, works, strict=True))
        is_nf4 = config.tuning.mode == "qlora"
        return mean_work(
            (
                by_kind[index].with_operators(is_nf4 * len(kind.packable_sizes)),
                kind.count / shape.num_layers,
            )
            for index, kind in enumerate(shape.layers)
        )


def _count_blocks(settings: StepSettings, depth: int) -> list[CountedWork]:
    """Count the first blocks; none where the class does not run on fake tensors."""
    try:
        works: list[CountedWork] = _import_module("pass_work").count_blocks(
            settings, depth=depth, length=settings.seq_len
        )
    except TraceUnavailable as error:
        logger.debug("what its blocks move is estimated by their widths: %s", error)
        return []
    return works


# Part of the key of what is remembered: raised whenever this package would count otherwise.
WORK_VERSION = 3
# Tokens of a row that is counted.
COUNTED_TOKENS = 512
_WORKS_ADAPTER = TypeAdapter(list[CountedWork])


def leading_blocks(order: Sequence[int]) -> tuple[int, ...]:
    """The kinds of the first blocks of a model, as many blocks as it takes to show every kind: each
    behind another block where there is one, and of several kinds each before another."""
    needed = max(
        (order.index(kind_index, 1) if kind_index in order[1:] else 0) for kind_index in set(order)
    )
    return tuple(order[: needed + (2 if len(set(order)) > 1 else 1)])


@dataclass(frozen=True)
class BlockMeasurement:
    """A measurement of a model's first blocks, given by their indices in `ModelShape.layers`, in
    one mode of a block."""

    settings: StepSettings
    # For a class that does not take the boundaries of rows one behind the other: a run pads them
    # then, with a mask.
    padded_settings: StepSettings
    block_mode: BlockMode
    kind_indices: tuple[int, ...]
    is_accumulating: bool
    # Their parameters, with the embedding and the head.
    params: int

    def load_measured_blocks(self, rows: int, length: int) -> MeasuredBlocks:
        """Measure a micro step, or interpolate it between two. Raises ModelError: the blocks cannot
        be run."""
        batches = MEASURED_BATCHES[self.block_mode]
        if rows > batches[-1]:  # the next power of two, and the one before
            upper = 1 << (rows - 1).bit_length()
            batches = (upper // 2, upper)
        measured_batches = _load_once(
            "blocks",
            {
                "settings": self.settings.canonical_text(),
                "way": self.block_mode,
                "places": self.kind_indices,
                "accumulates": self.is_accumulating,
                "batches": batches,
                "length": length,
                "blocks": BLOCKS_VERSION,
            },
            _BLOCKS_ADAPTER,
            lambda: self.measure(batches, length),
            cacheable=self.settings.code is None,
        )
        next_measured = next(one for one in measured_batches if one.batch >= rows)
        if next_measured.batch == rows:
            return next_measured
        return interpolate(
            measured_batches[measured_batches.index(next_measured) - 1], next_measured, rows
        )

    def measure(self, batches: Sequence[int], length: int) -> list[MeasuredBlocks]:
        """Measure steps, on tensors without bytes or on a few real ones. Raises ModelError: neither
        is possible."""
        logger.debug(
            "Measuring the blocks of the model's class, once: rows of %d tokens, %s",
            length,
            self.block_mode,
        )
        problem, measurements = "", [self]
        # a class may not take boundaries: then its rows are padded, as a run pads them
        if self.padded_settings is not self.settings:
            measurements.append(replace(self, settings=self.padded_settings))
        for measurement in measurements:
            try:
                return measurement._measure_fake(batches, length)
            except TraceUnavailable as error:
                problem = problem or one_line(str(error), limit=200)
        try:
            return self._measure_on_cpu(batches, length)
        except TraceUnavailable as error:
            raise ModelError(
                "no plan can be made for the class"
                f" {one_line(str(self.settings.model.get('model_type')))}: what its blocks need"
                f" cannot be measured ({problem}; on the CPU: {one_line(str(error), limit=200)})"
            ) from None

    def _measure_fake(self, batches: Sequence[int], length: int) -> list[MeasuredBlocks]:
        sizes = (2 * self._chunk_tokens, self._chunk_tokens)
        long, short = 0, 0
        if length > 2 * sizes[0] and self._is_linear_in_tokens:
            long, short = _import_module("step").count_operators(
                self.settings, [(1, size) for size in sizes], depth=len(self.kind_indices)
            )
        if long <= short:
            return self._run_blocks([(rows, length) for rows in batches])
        # operators grow with the length: as many tokens in short rows of two lengths, extrapolated
        # to rows of `length`
        measured = iter(
            self._run_blocks(
                [(-(-rows * length // size), size) for rows in batches for size in sizes]
            )
        )
        return [
            replace(interpolate(few, many, rows), ends=())
            for rows, few, many in zip(batches, measured, measured, strict=True)
        ]

    @property
    def _chunk_tokens(self) -> int:
        fields = (self.settings.model, wrapped_config(self.settings.model))
        sizes = [part.get(name) for part in fields for name in _CHUNK_FIELDS]
        return max([MIN_CHUNK_TOKENS, *(size for size in sizes if isinstance(size, int))])

    @property
    def _is_linear_in_tokens(self) -> bool:
        # bytes grow with tokens, and not with the square of a row's
        return self.settings.attention != "eager" and "padded" not in (
            self.settings.mask,
            self.settings.eval_mask,
        )

    def _run_blocks(
        self, batch_shapes: Sequence[tuple[int, int]], *, uses_real_tensors: bool = False
    ) -> list[MeasuredBlocks]:
        settings = self.settings
        if uses_real_tensors:  # the CPU has no fused kernel that holds what a GPU's would
            settings = replace(settings, attention="eager")
        measured: list[MeasuredBlocks] = _import_module("step").run_blocks(
            settings,
            batch_shapes,
            self.block_mode,
            kind_indices=self.kind_indices,
            is_accumulating=self.is_accumulating,
            uses_real_tensors=uses_real_tensors,
        )
        return measured

    def _measure_on_cpu(self, batches: Sequence[int], length: int) -> list[MeasuredBlocks]:
        """Measure a few real tokens, in rows of two lengths, and extrapolate to all tokens."""
        if self.settings.attention == "eager":
            raise TraceUnavailable("eager attention's squares do not show in short rows")
        needed_bytes, (_, free_bytes) = 4 * self.params, total_and_free_ram()
        if needed_bytes > free_bytes // 2:
            raise TraceUnavailable(
                f"its weights take {needed_bytes / GIB:.1f} GiB, and {free_bytes / GIB:.1f} GiB are"
                " free"
            )
        short, longer = (
            replace(one, batch=size)
            for one, size in zip(
                self._run_blocks([(1, size) for size in CPU_ROW_TOKENS], uses_real_tensors=True),
                CPU_ROW_TOKENS,
                strict=True,
            )
        )
        mask_bytes = 0 if self._is_linear_in_tokens else length * length
        return [
            _add_mask_bytes(
                replace(interpolate(short, longer, rows * length), batch=rows, ends=()),
                rows * mask_bytes,
            )
            for rows in batches
        ]


def _add_mask_bytes(measured: MeasuredBlocks, mask_bytes: int) -> MeasuredBlocks:
    """Add a mask to a micro step from the CPU, and each block's copy of it that is added to scores:
    an upper bound."""
    bias = 2 * mask_bytes
    layers = (
        replace(
            one,
            forward=one.forward + bias,
            saved=one.saved + bias * (one.saved > 0),
            backward=one.backward + bias,
        )
        for one in (measured.first, *measured.layers)
    )
    first, *later_layers = layers
    return replace(
        measured,
        before=measured.before + mask_bytes,
        first=first,
        layers=tuple(later_layers),
        on_cpu=True,
    )


# --- vision towers --------------------------------------------------------------------------------
@dataclass(frozen=True)
class VisionMeter:
    """Runs the vision tower of a class over a picture; `VisionShape.meter`."""

    config_json: str
    source: ImageProcessorSource
    # Width and height.
    size: tuple[int, int]

    def __call__(self, precision: Precision, step: Step, is_trained: bool) -> VisionPass:
        """What the pass takes in the precision and on the device of a step. Raises ModelError where
        the class cannot look at pictures."""
        settings = StepSettings(
            model=json.loads(self.config_json),
            mode="full",
            # autocast's copies of weights that train are the step's, not a picture's
            weights=precision.compute if is_trained else precision.load,
            autocast=precision.compute if precision.compute != "float32" else None,
            attention="eager" if step.attention == "eager" else "sdpa",
            checkpointing=is_trained and step.checkpointed_layers != 0,
            on_gpu=step.on_gpu,
            capability=step.capability or (9, 0),
        )
        return _load_once(
            "vision",
            {
                "settings": settings.canonical_text(),
                "source": self.source.identity,
                "size": self.size,
                "trained": is_trained,
                "vision": VISION_VERSION,
            },
            _PASS_ADAPTER,
            lambda: _measure(
                "Measuring a pass of the vision tower",
                "vision",
                "measure_picture",
                settings.model,
                settings,
                self.source,
                self.size,
                is_trained=is_trained,
            ),
        )


def load_vision_shape(
    fields: Mapping[str, Any], config: RunConfig, rows: RowTokens
) -> VisionShape | None:
    """The vision tower of a run's base, with the pictures of its rows; None where they show none.
    Raises ModelError: the base takes no images."""
    images = rows.images
    if images is None:
        return None
    weights = load_or_measure(
        "vision_weights",
        {"config": fields, "vision": VISION_VERSION},
        _VISION_ADAPTER,
        lambda: _measure(
            "Measuring the vision tower",
            "vision",
            "measure_vision_weights",
            fields,
            name=config.model.name,
        ),
    )
    meter = VisionMeter(
        json.dumps(dict(fields)),
        ImageProcessorSource.from_config(config),
        (images.width, images.height),
    )
    return VisionShape(
        weights=weights,
        picture_tokens=max(1, images.picture_tokens),
        row_pictures=images.row_pictures,
        token_share=images.token_share,
        mean_token_share=images.tokens / max(1.0, rows.rows * rows.mean),
        meter=meter,
    )


def load_run_model_shape(config: RunConfig, rows: RowTokens | None = None) -> ModelShape:
    """The model's shapes; for a class that the tables lack they are measured on the meta device,
    and so is the vision tower of a run whose `rows` show pictures. Raises ModelError where it is no
    model that a run with this config trains."""
    model = config.model
    fields = load_config_json(model.name, revision=model.revision)
    refuse_quantised(fields, name=model.name, mode=config.tuning.mode)
    refuse_remote_code(fields, name=model.name, allowed=model.trust_remote_code)
    shape = load_planned_shape(fields, name=model.name, trust_remote_code=model.trust_remote_code)
    vision = None if rows is None else load_vision_shape(fields, config, rows)
    return replace(
        configured_shape(config, shape),
        text_only_note=text_only_note(fields) if vision is None else "",
        storage_note=quantised_storage_note(fields, config.tuning.mode),
        vision=vision,
    )
