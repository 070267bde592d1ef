"""The phases of one training step on one rank, from the first block to the last and back, each with
its bytes.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

from sft_play.config.schema import RunConfig
from sft_play.models.shape import ModelShape, VisionPass
from sft_play.planner.kernels import (
    GROUPED_MM_MIN_CAPABILITY,
    AttentionName,
    groups_adapters,
    plan_experts,
    plan_kernels,
)
from sft_play.planner.layout import SINGLE, Layout
from sft_play.planner.memory.block import (
    BlockBytes,
    LayerBytes,
    LossName,
    OutputHead,
    block_bytes,
    head_bytes,
    lone_forward,
)
from sft_play.planner.memory.model_states import (
    build_gather_buffers,
    optimizer_temporary_bytes,
    resident_bytes,
    tensor_parallel_parameters,
    trained_parameters,
    trained_vision_params,
    trains_vision,
    vision_resident_bytes,
    zero_bucket_bytes,
)
from sft_play.planner.memory.structure import (
    BlockSpec,
    ElementBytes,
    block_spec,
    element_bytes,
    needs_attention_mask,
    select_attention_kernel,
    tensor_parallel_spec,
)
from sft_play.planner.precision import DTYPE_BYTES, Precision, gradient_sync
from sft_play.text import MIB

StepPhase = Literal["forward", "head", "backward", "optimizer", "evaluation", "saving"]
MemoryTerms = dict[str, int]

# Threads that multiply: the forward's and the autograd engine's.
WORKSPACE_THREADS = 2
# A token's id, its label and its entry in the mask.
TOKEN_BYTES = 3 * 8
# For each number of an embedding into which features are put: CUDA's masked_scatter makes the mask
# whole, and sums over it in int64 (aten/src/ATen/native/cuda/IndexKernel.cpp).
MERGED_BYTES = 9
# Terms that a phase has even where they are 0.
_REQUIRED_TERMS = ("weights", "gradients", "optimizer", "activations", "loss_head")


@dataclass(frozen=True)
class Step:
    """One training step of one rank, as the estimate assumes it: a full-length batch with every
    token scored."""

    micro_batch: int
    grad_accum: int
    seq_len: int
    layout: Layout = SINGLE
    # Blocks, counted from the first, whose activations are recomputed; None: all of them.
    checkpointed_layers: int | None = None
    loss: LossName = "chunked"
    attention: AttentionName = "sdpa"
    # Rows come with a mask of S x S per sequence: they are packed, or padded where `masks` says so.
    padded: bool = False
    # Whether rows that are padded come with a mask, in training and evaluation (`planner.kernels`).
    masks: bool = True
    # Packs, or rows of a micro-batch, lie one behind the other and have boundaries
    # (`attention_functions`), not a mask.
    varlen: bool = False
    # With `varlen`: no kernel takes the boundaries, and each chat is attended to by a call of its
    # own.
    one_by_one: bool = False
    # Rows of an evaluation batch, which are not packed; 0: no evaluation.
    eval_batch: int = 0
    # sdpa runs cuDNN's kernel (`planner.kernels`): all training batches have one shape, and
    # evaluation's do where its rows are blocks of text too.
    cudnn: bool = False
    # LoRA layers cast their inputs to the adapters' dtype under autocast too, as PEFT's do and
    # training's do not.
    casts_inputs: bool = False
    # What checkpointed blocks need for recomputation is kept in RAM.
    offloads: bool = False
    # Whether checkpoints are written.
    saves: bool = True
    on_gpu: bool = True
    # The GPU's compute capability; None where it is unknown, which counts as a current one.
    capability: tuple[int, int] | None = (9, 0)
    # flash-linear-attention is installed, whose kernels the class's gated delta rules run.
    fla: bool = False
    # Pictures of the largest size in a micro-batch at most; 0 for rows of text.
    pictures: int = 0
    # The driver pages GPU memory out instead of failing, beside a desktop (WSL).
    pages: bool = False

    def recomputed_layers(self, layers: int) -> int:
        """How many of a model's `layers` are computed a second time, in the backward pass."""
        return layers if self.checkpointed_layers is None else self.checkpointed_layers

    @property
    def length(self) -> int:
        """Tokens of a row on this rank: all of them, or its part under context parallelism."""
        return -(-self.seq_len // self.layout.context_parallel)

    @property
    def tokens(self) -> int:
        """T = B * S of this rank."""
        return self.micro_batch * self.length


def cublas_workspace_bytes(capability: tuple[int, int] | None) -> int:
    """Bytes of a thread's cuBLAS workspace, from the caching allocator: 32 MiB on compute
    capability 9, 10 and 12, else `:4096:2:16:8` in KiB (aten/src/ATen/cuda/CublasHandlePool.cpp,
    `parseChosenWorkspaceSize`)."""
    return 32 * MIB if capability and capability[0] in (9, 10, 12) else (4096 * 2 + 16 * 8) * 1024


def is_padded(config: RunConfig, layout: Layout, *, rows: int, uses_masks: bool = True) -> bool:
    """True if rows of a batch, not packed, are padded to the longest with a mask; full blocks of
    text never are."""
    return uses_masks and config.task_mode != "cpt" and rows > 1 and layout.context_parallel == 1


def measure_vision(
    config: RunConfig, shape: ModelShape, precision: Precision, step: Step
) -> VisionPass:
    """What a pass of the vision tower over one picture takes in this step."""
    assert shape.vision is not None
    vision_pass = shape.vision.meter(precision, step, trains_vision(config, shape))
    if config.tuning.mode == "full" or not config.tuning.lora.projector:
        return vision_pass
    # what adapters of the projector keep: the inputs and outputs of their layers
    widths = sum(one.inputs + one.outputs for one in shape.vision.weights.projector)
    held_bytes = DTYPE_BYTES[precision.compute] * widths * shape.vision.picture_tokens
    return replace(
        vision_pass,
        peak_bytes=vision_pass.peak_bytes + held_bytes,
        feature_bytes=vision_pass.feature_bytes + held_bytes,
    )


class StepMemorySimulation:
    """A step's way through the model. `phases` yields every phase that can be the peak."""

    def __init__(
        self, config: RunConfig, shape: ModelShape, precision: Precision, step: Step
    ) -> None:
        layout = step.layout
        self.config, self.shape, self.step, self.precision = config, shape, step, precision
        self.is_full, self.is_nf4 = config.tuning.mode == "full", config.tuning.mode == "qlora"
        loaded_element_bytes = element_bytes(config, precision, layout)
        self.trained_parameters = trained_parameters(config, shape, loaded_element_bytes)
        self.rank_parameters = tensor_parallel_parameters(
            config, shape, self.trained_parameters, layout.tensor_parallel
        )
        self.groups_adapters = not step.casts_inputs and groups_adapters(config, precision, layout)
        self.resident = resident_bytes(
            config, shape, loaded_element_bytes, layout, groups_adapters=self.groups_adapters
        )
        if step.layout.is_streamed and not step.on_gpu:  # both are the same RAM
            self.resident = replace(
                self.resident, weights=self.resident.weights + self.resident.host, host=0
            )
        self.vision_pass = VisionPass()
        if shape.vision is not None:
            self.vision_pass = measure_vision(config, shape, precision, step)
            tower_bytes = vision_resident_bytes(config, shape, DTYPE_BYTES[precision.load])
            self.resident = replace(self.resident, weights=self.resident.weights + tower_bytes)
        self.gradient_sync = gradient_sync(config, precision, layout.name)
        self.loaded_element_bytes = self.element_bytes = loaded_element_bytes
        # modules see what is gathered, adapters included
        if layout.is_fsdp and loaded_element_bytes.autocast is not None:
            gathered_itemsize = DTYPE_BYTES[self.gradient_sync.gathered_dtype]
            self.element_bytes = ElementBytes(
                gathered_itemsize, loaded_element_bytes.autocast, gathered_itemsize
            )
        self.weight_itemsize = DTYPE_BYTES[precision.load]
        self.trained_itemsize = self.element_bytes.adapters
        if layout.is_fsdp:
            self.weight_itemsize = self.element_bytes.weights
        if self.is_full:
            self.trained_itemsize = self.element_bytes.weights
        self.recomputed_layers = step.recomputed_layers(shape.num_layers)
        self.accumulates_gradients = step.grad_accum > 1
        delays_reduction = (
            layout.is_fsdp
            and self.gradient_sync.interval != "micro_batch"
            and self.accumulates_gradients
        )
        # Full gradients that every rank keeps between micro-batches though it holds a shard of the
        # weights: after set_requires_gradient_sync(False) FSDP2 reduces them only at the end of the
        # step, in the dtype in which they are sent.
        self.full_gradient_bytes = (
            self.rank_parameters.params
            * DTYPE_BYTES[self.gradient_sync.reduced_dtype]
            * delays_reduction
        )
        self._measured_by_mode: dict[tuple[BlockMode, int], MeasuredBlocks] = {}
        self._known_specs: dict[tuple[bool, bool], tuple[BlockSpec, ...]] = {}
        self.specs = self._block_specs(
            has_padding=step.padded, has_packing=config.data.packing != "none"
        )
        # what is gathered: of no bytes where a rank holds all weights
        self.gather_buffers = build_gather_buffers(
            shape,
            itemsize=self.element_bytes.weights * layout.shards_params,
            is_nf4=self.is_nf4 and layout.shards_params,
            lora=None if self.is_full else config.tuning.lora,
            tensor_parallel_ranks=layout.tensor_parallel,
            # with adapters a unit's gradients are about as small a part of it as the adapters are
            # of the model
            trained_share=(
                1.0
                if self.is_full
                else min(1.0, self.trained_parameters.params / max(1, shape.params))
            ),
            ranks=layout.shard,
            reduce_ratio=DTYPE_BYTES[self.gradient_sync.reduced_dtype]
            / DTYPE_BYTES[self.gradient_sync.computed_dtype],
        )
        self.blocks, self.hidden_itemsizes = self._compute_blocks()
        self.layers = self._compute_layers()

    # --- what the step is made of -----------------------------------------------------------------
    def _block_specs(
        self, *, has_padding: bool, has_packing: bool = False
    ) -> tuple[BlockSpec, ...]:
        if (has_padding, has_packing) in self._known_specs:
            return self._known_specs[has_padding, has_packing]
        step, tuning = self.step, self.config.tuning
        lora, experts = tuning.lora, plan_experts(self.config, self.shape, self.precision)
        uses_eager_experts = (
            experts is not None and experts.name == "eager" and not self.shape.uses_custom_experts
        )
        shared_fields: dict[str, Any] = {
            "lora_dropout": lora.dropout,
            "uses_dora": lora.use_dora,
            "casts_inputs": step.casts_inputs,
            "groups_adapters": self.groups_adapters,
            "one_by_one": step.one_by_one,
            "uses_eager_experts": uses_eager_experts,
            "element_bytes": self.element_bytes,
            "uses_grouped_mm_fallback": (
                step.on_gpu
                and (step.capability or GROUPED_MM_MIN_CAPABILITY) < GROUPED_MM_MIN_CAPABILITY
                and not uses_eager_experts
            ),
            "liger": plan_kernels(self.config, self.shape, step.layout, on_gpu=step.on_gpu).memory,
        }
        specs = []
        for kind in self.shape.layers:
            # one by one each chat has a mask for its window
            needs_mask = (not step.varlen or step.one_by_one) and needs_attention_mask(
                kind, self.shape, length=step.seq_len, padded=has_padding and not step.varlen
            )
            kernel = select_attention_kernel(
                self.shape,
                attention=step.attention,
                masked=needs_mask,
                half_precision=self.element_bytes.autocast is not None or self.weight_itemsize == 2,
                capability=step.capability,
                on_gpu=step.on_gpu,
                unpads_rows=has_padding and not has_packing,
                uses_cudnn=step.cudnn and (has_packing or self.config.task_mode == "cpt"),
            )
            spec = block_spec(kind, self.shape, mode=tuning.mode, lora=lora)
            spec = replace(spec, kernel=kernel, masked=needs_mask, **shared_fields)
            specs.append(tensor_parallel_spec(spec, step.layout.tensor_parallel))
        self._known_specs[has_padding, has_packing] = tuple(specs)
        return tuple(specs)

    def _compute_blocks(self) -> tuple[list[BlockBytes], list[int]]:
        blocks: list[BlockBytes] = []
        # most layers are alike: those of one kind are computed once for each kind of input
        known_blocks: dict[tuple[int, int, bool], BlockBytes] = {}
        itemsizes = [self._table_itemsize(trains=self.trained_parameters.trains_embedding)]
        for layer, kind_index in enumerate(self.shape.layer_order):
            # the first block's input has a gradient if the embedding trains, or checkpointing asks
            # for one (PEFT)
            input_has_grad = (
                layer > 0
                or self.trained_parameters.trains_embedding
                or self.trained_parameters.new_token_params > 0
                or self.recomputed_layers > 0
            )
            key = (kind_index, itemsizes[-1], input_has_grad)
            if key not in known_blocks:
                known_blocks[key] = block_bytes(
                    self.specs[kind_index],
                    batch=self.step.micro_batch,
                    length=self.step.length,
                    itemsize=itemsizes[-1],
                    input_has_grad=input_has_grad,
                    is_accumulating=self._is_accumulating(),
                )
            blocks.append(known_blocks[key])
            itemsizes.append(known_blocks[key].output_itemsize)
        return blocks, itemsizes

    def _compute_layers(self) -> list[LayerBytes]:
        layers = []
        known_layers: dict[tuple[int, int, bool], LayerBytes] = {}
        for layer, block in enumerate(self.blocks):
            is_recomputed = layer < self.recomputed_layers
            key = (id(block), self.hidden_itemsizes[layer], is_recomputed)
            if key not in known_layers:
                known_layers[key] = (
                    self._recomputed_layer(layer, block)
                    if is_recomputed
                    else replace(block.layer, cast=0)
                )
            layers.append(known_layers[key])
        return layers

    def _recomputed_layer(self, layer: int, block: BlockBytes) -> LayerBytes:
        """A block's bytes within a checkpoint. Nothing that its operations save is held:
        torch.utils.checkpoint drops it; the block runs forward again first, and its input stays
        until its backward pass has ended."""
        batch = self.step.micro_batch
        recomputed = replace(
            block.layer,
            forward=self._lone_forward(layer, batch, self.specs, training=True).forward,
            saved=self._hidden_bytes(batch, layer),
            backward=max(block.layer.backward + block.layer.input, block.recompute_peak),
        )
        return recomputed.offloaded if self.step.offloads else recomputed

    def _lone_forward(
        self, layer: int, batch: int, specs: Sequence[BlockSpec], *, training: bool
    ) -> LayerBytes:
        spec, itemsize = specs[self.shape.layer_order[layer]], self.hidden_itemsizes[layer]
        return lone_forward(
            spec, batch=batch, length=self.step.length, itemsize=itemsize, training=training
        )

    def _evaluation_layer(self, layer: int, rows: int, specs: Sequence[BlockSpec]) -> LayerBytes:
        """A block's bytes where nothing is held for a backward pass; autocast copies its fp32
        parameters there too, those of adapters in groups as well: PEFT's forward runs."""
        return self._lone_forward(layer, rows, specs, training=False)

    def _table_itemsize(self, *, trains: bool) -> int:
        # modules_to_save: PEFT's copy has the adapters' dtype
        if trains and not self.is_full:
            return self.element_bytes.adapters
        return self.weight_itemsize

    def _table_copy_bytes(self) -> int:
        """Bytes of the copy of a whole table that its trained rows are put into; 0 unless rows
        train."""
        trained = self.trained_parameters
        trains_rows = trained.new_token_params > 0 and not trained.trains_embedding
        return self.shape.embedding_table_params * self.weight_itemsize * trains_rows

    def _head_bytes(self, batch: int, *, needs_gradient: bool) -> LayerBytes:
        return head_bytes(
            self.specs[self.shape.layer_order[-1]],
            OutputHead(
                self.shape.vocab_size,
                self.trained_parameters.trains_head,
                self._table_itemsize(trains=self.trained_parameters.trains_head),
                self.trained_parameters.new_token_params > 0
                and not self.trained_parameters.trains_head,
                self.shape.caps_logits,
            ),
            batch=batch,
            length=self.step.length,
            itemsize=self.hidden_itemsizes[-1],
            loss=self.step.loss,
            is_accumulating=self._is_accumulating(),
            needs_gradient=needs_gradient,
            on_gpu=self.step.on_gpu,
        )

    def _is_accumulating(self) -> bool:
        """True if a gradient is added to an older one of full size; a rank that keeps shards
        divides each new one."""
        has_full_gradients = not self.step.layout.shards_gradients or self.full_gradient_bytes > 0
        return has_full_gradients and self.accumulates_gradients

    def _kept_gradient_bytes(self, gradients: int) -> int:
        if not self.step.layout.shards_gradients:
            return gradients
        return (
            self.resident.gradients
            * gradients
            // max(1, self.rank_parameters.params * self.trained_itemsize)
        )

    def _batch_bytes(self, batch: int, specs: Sequence[BlockSpec], *, is_training: bool) -> int:
        return TOKEN_BYTES * batch * self.step.length + self._mask_bytes(batch, specs)

    def _mask_bytes(self, batch: int, specs: Sequence[BlockSpec]) -> int:
        """The S x S masks that all blocks share: one for each kind of attention, booleans for sdpa,
        numbers for eager. They end with the forward pass of the blocks, before the head."""
        step, mask_elements = self.step, batch * self.step.length**2
        if step.attention == "flash_attention_2":  # it takes the mask of B x S as it is
            return 0
        masked_kinds = (
            kind
            for kind, spec in zip(self.shape.layers, specs, strict=True)
            if step.attention == "eager" or (spec.masked and not spec.one_by_one)
        )
        attention_kinds = {kind.attention for kind in masked_kinds}
        return (
            len(attention_kinds)
            * mask_elements
            * (self.weight_itemsize if step.attention == "eager" else 1)
        )

    # --- phases -----------------------------------------------------------------------------------
    def _phase_terms(
        self, phase: StepPhase, gradients: int, activations: int, **extra_terms: int
    ) -> tuple[StepPhase, MemoryTerms]:
        terms = self._resident_terms | {"gradients": gradients, "activations": activations}
        if self.shape.vision is not None:
            extra_terms = {"images": self._image_bytes(phase, self.step.pictures)} | extra_terms
        terms.update((term, size) for term, size in extra_terms.items() if size)
        return phase, terms

    def _image_bytes(self, phase: str, pictures: int) -> int:
        """Pictures on the device in a phase, and their features until the language model has run;
        to the end of the step where the tower trains."""
        if self.shape.vision is None or phase in ("optimizer", "saving"):
            return 0
        one = self.vision_pass.scaled(pictures)
        has_features = phase != "backward" or self.vision_pass.backward_bytes > 0
        return one.pixel_bytes + one.feature_bytes * has_features + self._vision_cast_bytes

    @property
    def _vision_cast_bytes(self) -> int:
        """Autocast's copies of a vision tower that trains in fp32."""
        itemsize = DTYPE_BYTES[self.precision.compute]
        casts = self.precision.load != self.precision.compute
        return itemsize * trained_vision_params(self.config, self.shape) * casts

    def _image_phases(
        self, phase: StepPhase, gradients: int, batch_bytes: int, *, rows: int, pictures: int
    ) -> Iterator[tuple[StepPhase, MemoryTerms]]:
        """The tower's pass beside the embedded tokens, then its features put among them."""
        if self.shape.vision is None:
            return
        one, embedded = self.vision_pass.scaled(pictures), self._hidden_bytes(rows, 0)
        pass_bytes = one.pixel_bytes + one.peak_bytes + self._vision_cast_bytes
        # the embedding's own unit, until the next one is gathered
        gathered_bytes = self.gather_buffers.embedding or self.gather_buffers.tail
        yield self._phase_terms(
            phase,
            gradients,
            batch_bytes + embedded,
            images=pass_bytes,
            gather_buffers=gathered_bytes,
        )
        merged_bytes = MERGED_BYTES * rows * self.step.length * self.shape.hidden_size
        yield self._phase_terms(
            phase,
            gradients,
            batch_bytes + 2 * embedded + merged_bytes * self.step.on_gpu,
            images=self._image_bytes(phase, pictures),
            gather_buffers=gathered_bytes,
        )

    @cached_property
    def _resident_terms(self) -> MemoryTerms:
        resident, layout, sync = self.resident, self.step.layout, self.gradient_sync
        bucket_bytes = resident.gradient_buckets
        if layout.is_zero:
            bucket_bytes = zero_bucket_bytes(
                layout,
                self.trained_parameters.params,
                self.shape.params,
                self.shape.hidden_size,
                packed_params=self.shape.packable_params * self.is_nf4,
                reduces_in_fp32=DTYPE_BYTES[sync.reduced_dtype] > DTYPE_BYTES[sync.computed_dtype],
            )
        workspace_bytes = (
            WORKSPACE_THREADS * cublas_workspace_bytes(self.step.capability) * self.step.on_gpu
        )
        sizes = {
            "weights": resident.weights,
            "adapters": resident.adapters,
            "master_weights": resident.master_weights,
            "gradients": 0,
            "optimizer": resident.optimizer,
            "gradient_buckets": bucket_bytes,
            "workspaces": workspace_bytes,
            "activations": 0,
            "loss_head": 0,
        }
        return {term: size for term, size in sizes.items() if size or term in _REQUIRED_TERMS}

    def offloaded_bytes(self) -> int:
        """Bytes of RAM that checkpointed blocks' inputs take (`save_on_cpu`, page-locked)."""
        return sum(map(self._checkpoint_bytes, range(self.recomputed_layers))) * self.step.offloads

    def _checkpoint_bytes(self, layer: int) -> int:
        return self._hidden_bytes(self.step.micro_batch, layer)

    def phases(self) -> Iterator[tuple[StepPhase, MemoryTerms]]:
        """Every phase that can be the peak, with its terms: of each part of the step the highest,
        then the others."""
        yield from self.training_phases.items()
        if self.step.eval_batch:
            yield from self.evaluation_phases(self.step.eval_batch)
        if self.step.saves:
            # a sharded tensor is gathered one at a time, and copied once more on its way to the
            # host the token embedding is the largest: fp32 where it trains under FSDP2
            itemsize = 4 if self.is_full else self.element_bytes.weights
            gathered_bytes = (
                2 * self.shape.embedding_table_params * itemsize * self.step.layout.shards_params
            )
            yield self._phase_terms(
                "saving", self._gradients_between_steps(), 0, gather_buffers=gathered_bytes
            )

    @cached_property
    def training_phases(self) -> Mapping[StepPhase, MemoryTerms]:
        """The phases of the step itself: of each one's visits the one with the most bytes."""
        held_bytes = [self._batch_bytes(self.step.micro_batch, self.specs, is_training=True)]
        temporary_bytes = optimizer_temporary_bytes(
            self.config.train.optim, self.shape, self.rank_parameters
        )
        if self.step.layout.shards_states:
            temporary_bytes //= self.step.layout.shard
        update = self._phase_terms(
            "optimizer", self.resident.gradients, 0, optimizer_step=temporary_bytes
        )
        # in this order: the forward pass fills `held_bytes`, which the backward pass reads
        return largest_by_phase(
            itertools.chain(
                self._forward_phases(held_bytes), self._backward_phases(held_bytes), [update]
            )
        )

    def _hidden_bytes(self, batch: int, layer: int) -> int:
        return batch * self.step.length * self.shape.hidden_size * self.hidden_itemsizes[layer]

    def _embedding_output_bytes(self, batch: int) -> int:
        return self._hidden_bytes(batch, 0)

    def _gradients_between_steps(self) -> int:
        """Gradients between steps: ZeRO-3 keeps their buffer (bytes counted on real ranks), all
        others free them."""
        layout = self.step.layout
        return self.resident.gradients * (layout.is_zero and layout.shards_params)

    def _older_gradient_bytes(self) -> int:
        return max(self.resident.gradients, self.full_gradient_bytes) * self.accumulates_gradients

    def _forward_phases(self, held_bytes: list[int]) -> Iterator[tuple[StepPhase, MemoryTerms]]:
        """Through the blocks to the loss; `held_bytes` collects what is held before each block, and
        at the head: inputs of checkpointed blocks, autocast's copies of fp32 adapters, the
        embedding's output until the model's forward returns."""
        gather_buffers, batch = self.gather_buffers, self.step.micro_batch
        older_gradients, cast_bytes = self._older_gradient_bytes(), 0
        if self._table_copy_bytes():
            yield self._phase_terms(
                "forward",
                older_gradients,
                held_bytes[-1] + self._table_copy_bytes() + self._hidden_bytes(batch, 0),
            )
        yield from self._image_phases(
            "forward",
            older_gradients,
            held_bytes[0] - self._mask_bytes(batch, self.specs),
            rows=batch,
            pictures=self.step.pictures,
        )
        for layer, block in enumerate(self.layers):
            cast_bytes += block.cast
            # where blocks are checkpointed, the first one's checkpoint is the same tensor
            embedding_output = (
                self._embedding_output_bytes(batch) if layer and not self.recomputed_layers else 0
            )
            yield self._phase_terms(
                "forward",
                older_gradients,
                held_bytes[-1] + cast_bytes + embedding_output + block.forward,
                gather_buffers=gather_buffers.forward_bytes(layer),
            )
            held_bytes.append(held_bytes[-1] + block.saved)
        size = self._hidden_bytes(batch, -1)
        if self.step.layout.shards_params:
            yield self._phase_terms(
                "forward",
                older_gradients,
                held_bytes[-1] + cast_bytes + 2 * size,
                gather_buffers=gather_buffers.tail_gather_bytes,
            )
        head = self._head_bytes(self.step.micro_batch, needs_gradient=True)
        # of the head's own peak; its input is counted beside it
        loss_head_bytes = max(0, head.forward - size)
        yield self._phase_terms(
            "head",
            older_gradients,
            held_bytes[-1] + cast_bytes + size,
            loss_head=loss_head_bytes,
            gather_buffers=gather_buffers.tail,
        )

    def _backward_phases(self, held_bytes: list[int]) -> Iterator[tuple[StepPhase, MemoryTerms]]:
        gather_buffers = self.gather_buffers
        head = self._head_bytes(self.step.micro_batch, needs_gradient=True)
        # its parameters, the last block's buffer
        gathered_bytes = gather_buffers.tail + gather_buffers.blocks[-1]
        yield self._phase_terms(
            "head",
            self._older_gradient_bytes(),
            held_bytes[-1],
            loss_head=head.backward,
            gather_buffers=gathered_bytes,
            images=self._image_bytes("backward", self.step.pictures),
        )
        # tied: one gradient with the embedding's, which it waits for: it is one sharded unit, or
        # not yet added up
        new_gradients = self._kept_gradient_bytes(head.gradients) * (not self.accumulates_gradients)
        if self.shape.tied and self.step.layout.shards_params:
            new_gradients = head.gradients
        elif self.shape.tied and self.is_full and self.accumulates_gradients:
            new_gradients = self.shape.embedding_table_params * self.element_bytes.weights
        gradient_bytes = self._older_gradient_bytes() + new_gradients
        for layer, block in reversed(list(enumerate(self.layers))):
            yield self._phase_terms(
                "backward",
                gradient_bytes,
                held_bytes[layer] + block.backward - block.rebuilt,
                dequantised=block.rebuilt,
                gather_buffers=gather_buffers.backward_bytes(layer),
            )
            if self.step.layout.shards_params:
                yield self._phase_terms(
                    "backward",
                    gradient_bytes,
                    held_bytes[layer] + block.input,
                    gather_buffers=gather_buffers.reduction_bytes(layer),
                )
            gradient_bytes += self._kept_gradient_bytes(block.gradients) * (
                not self.accumulates_gradients
            )
        # the embedding's gradient is dense (V*h); where it is also the head's, or an older one
        # exists, or it is sharded only then, it is live in addition
        live_bytes = held_bytes[0] + self._hidden_bytes(self.step.micro_batch, 0)
        if self.vision_pass.backward_bytes:
            one = self.vision_pass.scaled(self.step.pictures)
            yield self._phase_terms(
                "backward",
                max(self.resident.gradients, self.full_gradient_bytes),
                live_bytes,
                images=one.pixel_bytes + one.backward_bytes + self._vision_cast_bytes,
            )
        embedding_gradient = self._table_copy_bytes()
        if self.trained_parameters.trains_embedding:
            embedding_gradient = self.shape.embedding_table_params * self.trained_itemsize
        gradient_bytes = max(self.resident.gradients, self.full_gradient_bytes)
        if self.step.layout.shards_params:
            if not self.accumulates_gradients:
                gradient_bytes -= self._kept_gradient_bytes(embedding_gradient)
            for gathered_bytes in gather_buffers.embedding_backward_bytes(embedding_gradient):
                yield self._phase_terms(
                    "backward", gradient_bytes, live_bytes, gather_buffers=gathered_bytes
                )
            return
        # `gradient_bytes` has the embedding's gradient once, or its shard: `embedding_gradient` is
        # beside it, and so is the head's, which waits to be added to an older one; PEFT's copies of
        # tied modules are not tied
        is_tied = self.shape.tied and self.is_full
        if (
            self._table_copy_bytes()
            or is_tied
            or self._is_accumulating()
            or self.step.layout.shards_gradients
        ):
            live_bytes += embedding_gradient * (1 + (is_tied and self.accumulates_gradients))
        yield self._phase_terms("backward", gradient_bytes, live_bytes)

    def evaluation_phases(self, rows: int) -> Iterator[tuple[StepPhase, MemoryTerms]]:
        """A batch of the evaluation: the last block of each kind, then the head. Nothing is held
        for a backward pass but the embedding's output and autocast's copies; rows are not packed,
        so their mask is not the training's.
        """
        specs = self._block_specs(
            has_padding=is_padded(
                self.config, self.step.layout, rows=rows, uses_masks=self.step.masks
            )
        )
        batch_bytes = self._batch_bytes(rows, specs, is_training=False)
        gather_buffers, gradient_bytes = self.gather_buffers, self._gradients_between_steps()
        pictures = 0
        if self.shape.vision is not None:
            pictures = self.shape.vision.max_pictures(rows=rows, tokens=rows * self.step.seq_len)
        images = self._image_bytes("evaluation", pictures)
        yield from self._image_phases(
            "evaluation",
            gradient_bytes,
            batch_bytes - self._mask_bytes(rows, specs),
            rows=rows,
            pictures=pictures,
        )
        # blocks of one kind need the same, and the last of them comes with the most casts held
        last_layers = {kind_index: layer for layer, kind_index in enumerate(self.shape.layer_order)}
        cast_bytes = 0
        for layer, index in enumerate(self.shape.layer_order):
            block = self._evaluation_layer(layer, rows, specs)
            if last_layers[index] == layer:
                embedding_output = self._hidden_bytes(rows, 0) * (layer > 0)
                live_bytes = batch_bytes + cast_bytes + embedding_output + block.forward
                yield self._phase_terms(
                    "evaluation",
                    gradient_bytes,
                    live_bytes,
                    gather_buffers=gather_buffers.forward_bytes(layer),
                    images=images,
                )
            cast_bytes += block.cast
        head = self._head_bytes(rows, needs_gradient=False)
        live_bytes = (
            batch_bytes
            + cast_bytes
            + self._hidden_bytes(rows, 0)
            + 2 * self._hidden_bytes(rows, -1)
        )
        yield self._phase_terms(
            "evaluation",
            gradient_bytes,
            live_bytes,
            gather_buffers=gather_buffers.tail_gather_bytes,
            images=images,
        )
        batch_bytes -= self._mask_bytes(rows, specs)
        yield self._phase_terms(
            "evaluation",
            gradient_bytes,
            batch_bytes + cast_bytes,
            loss_head=head.forward,
            gather_buffers=gather_buffers.tail,
            images=images,
        )


def largest_by_phase(
    phases: Iterable[tuple[StepPhase, MemoryTerms]],
) -> Mapping[StepPhase, MemoryTerms]:
    """Keep, of each phase's visits, the one with the most bytes."""
    largest_terms: dict[StepPhase, MemoryTerms] = {}
    largest_sizes: dict[StepPhase, int] = {}
    for phase, terms in phases:
        size = sum(terms.values())
        if size > largest_sizes.get(phase, -1):
            largest_terms[phase], largest_sizes[phase] = terms, size
    return largest_terms


# --------------------------------------------------------------------------------------------------
# The simulation of a step of a class whose blocks are measured, where the estimate does not know
# them.
#
# `trace.step` runs a class's own blocks; `MeasuredStepSimulation` takes their bytes in place of
# those of `block`.

# How a block runs: its activations stay for the backward pass, or are computed again there; or
# there is none.
BlockMode = Literal["kept", "recomputed", "evaluated"]


@dataclass(frozen=True)
class MeasuredBlocks:
    """A micro step of `batch` rows through all kinds of blocks of a model."""

    batch: int
    # Live when the first block begins, beside its input and what lasts: the batch, masks,
    # rotations.
    before: int
    # The embedding's output, where only the model's own forward keeps it.
    embedded: int
    # The first block, whose input may need no gradient.
    first: LayerBytes
    # The other blocks, by their place in `ModelShape.layers`.
    layers: tuple[LayerBytes, ...]
    # What follows the last block: last norm, output head and loss.
    tail: LayerBytes
    # What the last block keeps beyond others of its kind; below 0 where gradients that the backward
    # pass holds from it on, such as those of an input that all blocks read, count as kept by the
    # first.
    last: int = 0
    # Extrapolated from a few real tokens on the CPU.
    on_cpu: bool = False
    # The two measured batches on whose line it lies; empty where it was measured itself.
    ends: tuple[int, ...] = ()


def interpolate(low: MeasuredBlocks, high: MeasuredBlocks, batch: int) -> MeasuredBlocks:
    """Interpolate the micro step of a batch between two that were measured, or extend their line
    beyond them. Between them the line is not too low: a peak is the largest of phases that grow
    with the batch at different rates."""
    fraction = (batch - low.batch) / (high.batch - low.batch)

    def blend(low_value: Any, high_value: Any) -> Any:
        if isinstance(low_value, bool):
            return low_value
        if isinstance(low_value, int):
            return round(low_value + fraction * (high_value - low_value))
        if isinstance(low_value, tuple):
            return tuple(map(blend, low_value, high_value))
        return type(low_value)(
            *(
                blend(getattr(low_value, field.name), getattr(high_value, field.name))
                for field in fields(low_value)
            )
        )

    blended: MeasuredBlocks = blend(replace(low, ends=()), replace(high, ends=()))
    return replace(blended, ends=(low.batch, high.batch))


def create_step_simulation(
    config: RunConfig, shape: ModelShape, precision: Precision, step: Step
) -> StepMemorySimulation:
    """The simulation of this step: by measured blocks where the shape has a meter."""
    simulation_class = StepMemorySimulation if shape.block_meter is None else MeasuredStepSimulation
    return simulation_class(config, shape, precision, step)


class MeasuredStepSimulation(StepMemorySimulation):
    """A simulation whose blocks, and what is live around them, are those that
    `ModelShape.block_meter` measures."""

    @property
    def was_measured_on_cpu(self) -> bool:
        """True if its bytes are extrapolated from a few real tokens on the CPU."""
        return self._measured_blocks(self._block_mode(0), self.step.micro_batch).on_cpu

    def _compute_blocks(self) -> tuple[list[BlockBytes], list[int]]:
        return [], [self.weight_itemsize] * (self.shape.num_layers + 1)

    def _compute_layers(self) -> list[LayerBytes]:
        layers = [
            self._measured_layer(self._block_mode(layer), layer)
            for layer in range(self.shape.num_layers)
        ]
        last_layer_extra = self._measured_blocks(
            self._block_mode(len(layers) - 1), self.step.micro_batch
        ).last
        layers[-1] = replace(layers[-1], saved=layers[-1].saved + last_layer_extra)
        return [layer_bytes.offloaded for layer_bytes in layers] if self.step.offloads else layers

    def _checkpoint_bytes(self, layer: int) -> int:
        return self._measured_layer("recomputed", layer).saved

    def _batch_bytes(self, batch: int, specs: Sequence[BlockSpec], *, is_training: bool) -> int:
        return self._measured_blocks(
            self._block_mode(0) if is_training else "evaluated", batch
        ).before

    def _mask_bytes(self, batch: int, specs: Sequence[BlockSpec]) -> int:
        return 0  # what ends with the last block is not in the measured tail

    def _embedding_output_bytes(self, batch: int) -> int:
        return self._measured_blocks("kept", batch).embedded

    def _evaluation_layer(self, layer: int, rows: int, specs: Sequence[BlockSpec]) -> LayerBytes:
        return self._measured_layer("evaluated", layer, rows)

    def _head_bytes(self, batch: int, *, needs_gradient: bool) -> LayerBytes:
        measured = self._measured_blocks(
            self._block_mode(self.shape.num_layers - 1) if needs_gradient else "evaluated", batch
        )
        estimated = super()._head_bytes(batch, needs_gradient=needs_gradient)
        # a few tokens do not show how many it takes at once, and only the class's own loss was run
        if measured.on_cpu or (self.step.loss == "logits") != self.shape.has_custom_logits:
            return estimated
        if not measured.ends:
            return replace(measured.tail, saved=estimated.saved)
        # its tiles are full from some batch on, so that it bends between two batches, as the usual
        # last norm and head do; what a class has beside them grows on a line
        measured_ends = [
            self._head_bytes(rows, needs_gradient=needs_gradient) for rows in measured.ends
        ]
        estimated_ends = [
            super(MeasuredStepSimulation, self)._head_bytes(rows, needs_gradient=needs_gradient)
            for rows in measured.ends
        ]
        fraction = (batch - measured.ends[0]) / (measured.ends[1] - measured.ends[0])

        def interpolate_peak(peak: Literal["forward", "backward"]) -> int:
            low_difference, high_difference = (
                getattr(one, peak) - getattr(other, peak)
                for one, other in zip(measured_ends, estimated_ends, strict=True)
            )
            return int(
                getattr(estimated, peak)
                + round(low_difference + fraction * (high_difference - low_difference))
            )

        return LayerBytes(
            interpolate_peak("forward"),
            estimated.saved,
            interpolate_peak("backward"),
            measured.tail.gradients,
        )

    def _block_mode(self, layer: int) -> BlockMode:
        return "recomputed" if layer < self.recomputed_layers else "kept"

    def _measured_layer(self, mode: BlockMode, layer: int, batch: int | None = None) -> LayerBytes:
        measured = self._measured_blocks(mode, batch or self.step.micro_batch)
        return measured.layers[self.shape.layer_order[layer]] if layer else measured.first

    def _measured_blocks(self, mode: BlockMode, batch: int) -> MeasuredBlocks:
        assert self.shape.block_meter is not None
        if (mode, batch) not in self._measured_by_mode:
            self._measured_by_mode[mode, batch] = self.shape.block_meter(
                self.config,
                self.shape,
                self.precision,
                self.step,
                self.element_bytes,
                mode,
                batch,
                is_accumulating=self._is_accumulating(),
            )
        return self._measured_by_mode[mode, batch]
