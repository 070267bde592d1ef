"""Bytes of a training step's peak on one rank, term by term; of loading the weights, and of saving
a checkpoint.
"""

import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from sft_play.config.schema import RunConfig
from sft_play.models.shape import ModelShape
from sft_play.planner.layout import Layout
from sft_play.planner.memory.model_states import (
    block_adapter_params,
    large_tensors,
    largest_tensor_elements,
    loads_by_unit,
    paged_bytes,
    resident_bytes,
    stored_block_bytes,
    vision_resident_bytes,
    weight_bytes,
)
from sft_play.planner.memory.step_memory import (
    MemoryTerms,
    Step,
    StepMemorySimulation,
    create_step_simulation,
    is_padded,
    largest_by_phase,
)
from sft_play.planner.memory.structure import is_target
from sft_play.planner.precision import DTYPE_BYTES, Precision
from sft_play.text import GIB, MIB

# What loading the weights takes of a rank's device and of RAM; how checkpoints are written, and the
# RAM for that.


def loading_terms(simulation: StepMemorySimulation) -> MemoryTerms:
    """The most that a rank holds on its device until the model is there and wrapped, by what it is
    for. Under FSDP2 a rank has its shards, one full unit, and the tensor that arrived last
    (training/model/model_loading.py). Under ZeRO-3 each rank creates all NF4 weights
    (core_model_loading.py), PEFT adds adapters in fp32, and only then does DeepSpeed partition;
    plain weights are partitioned as they arrive."""
    config, shape, layout = simulation.config, simulation.shape, simulation.step.layout
    resident, itemsize = simulation.resident, simulation.loaded_element_bytes.weights

    def terms(weights: int, adapters: int, temporary: int, **others: int) -> MemoryTerms:
        return {"weights": weights, "adapters": adapters, "gather_buffers": temporary, **others}

    if loads_by_unit(config, layout):
        # while a unit is sharded: what trains in full in its own dtype, fp32 under mixed precision,
        # packed matrices with their constants
        upcasts = simulation.loaded_element_bytes.autocast is not None
        trained_itemsize = 4 if simulation.is_full and upcasts else itemsize
        adapter_itemsize = (
            4 if upcasts and not simulation.is_nf4 else simulation.loaded_element_bytes.adapters
        )
        units_bytes = [trained_itemsize * shape.embedding_table_params]
        adapted = not simulation.is_full
        for kind in shape.layers:
            adapter_params = adapted * block_adapter_params(kind, config.tuning.lora)
            units_bytes.append(
                stored_block_bytes(kind, itemsize=trained_itemsize, is_nf4=simulation.is_nf4)
                + adapter_itemsize * adapter_params
            )
        temporary = max(units_bytes) + itemsize * largest_tensor_elements(shape)
        if simulation.step.on_gpu:
            return terms(resident.weights, resident.adapters, temporary)
        # on a CPU the copies that the first rank reads are in the same memory
        return terms(
            resident.weights, resident.adapters, temporary, host_copies=host_copy_bytes(simulation)
        )
    if layout.is_streamed:
        # each tensor of a quantised base is packed on the device, before anything stays there
        packed = STACKING_COPIES * itemsize * largest_tensor_elements(shape) * simulation.is_nf4
        packing = max(0, packed - resident.weights, _adapter_start_bytes(simulation))
        return terms(resident.weights, resident.adapters, packing)
    shard_total = resident.weights + resident.adapters
    # divided on the way to the device, where FSDP2 shards what is already there
    if layout.tensor_parallel > 1:
        unsharded = resident_bytes(
            config, shape, simulation.loaded_element_bytes, replace(layout, shard=1)
        )
        return terms(unsharded.weights, unsharded.adapters, shard_total)
    # embeddings that grow are copied
    grown_table = itemsize * shape.embedding_table_params * bool(config.model.add_tokens)
    stacked_sizes = [
        stacked.weights
        for kind in shape.layers
        for stacked in kind.expert_weights
        if stacked.is_packable or not simulation.is_nf4
    ]
    if not simulation.is_nf4:
        temporary = itemsize * largest_tensor_elements(shape)
        # parts of a stack, beside all that is loaded; adapters are not there yet
        if not layout.shards_params:
            stack_bytes = (STACKING_COPIES - 1) * itemsize * max(stacked_sizes, default=0)
            temporary = max(stack_bytes, grown_table - resident.adapters)
        return terms(
            resident.weights, resident.adapters, max(temporary, _adapter_start_bytes(simulation))
        )
    sizes = [linear.weights for linear, _ in shape.linears] + [
        STACKING_COPIES * size for size in stacked_sizes
    ]
    # not there yet while the last matrices are quantised
    adapter_bytes = 4 * simulation.trained_parameters.params
    temporary = max(
        shard_total * layout.is_fsdp,  # DoRA: accelerate keeps all until FSDP has cut
        grown_table - adapter_bytes,
        itemsize * max(sizes, default=0) - adapter_bytes,
        _adapter_start_bytes(simulation),
    )
    packed = weight_bytes(shape, itemsize=itemsize, is_nf4=True)
    return terms(packed + vision_resident_bytes(config, shape, itemsize), adapter_bytes, temporary)


def _adapter_start_bytes(simulation: StepMemorySimulation) -> int:
    """What it takes to start the largest adapter at its layer's singular directions: the weight in
    fp32, and as NF4 has it and as it was (training/model/model_loading.py)."""
    lora = simulation.config.tuning.lora
    if simulation.is_full or lora.init == "default":
        return 0
    weights = [
        linear.weights
        for linear, _ in simulation.shape.linears
        if is_target(linear, lora.target_modules)
    ]
    return (4 + 2 * simulation.loaded_element_bytes.weights * simulation.is_nf4) * max(
        weights, default=0
    )


def host_read_bytes(simulation: StepMemorySimulation) -> int:
    """Bytes of RAM that a rank needs to load the weights, without pages of their files."""
    layout, shape = simulation.step.layout, simulation.shape
    itemsize = simulation.loaded_element_bytes.weights
    if layout.is_fsdp or (layout.is_zero and layout.shards_params and not simulation.is_nf4):
        return itemsize * largest_tensor_elements(shape) + host_copy_bytes(simulation)
    sizes = sorted(
        (size for size, count, _ in large_tensors(shape) for _ in range(count)), reverse=True
    )
    # one after the other where each is packed as it comes; what is cast is cast in RAM, by several
    # threads
    reads_one = simulation.is_nf4 or shape.stored_dtype == simulation.precision.load
    read_bytes = itemsize * sum(sizes[: 1 if reads_one else READER_THREADS])
    if simulation.is_nf4 and simulation.config.tuning.lora.init == "loftq":  # the base's own
        read_bytes += host_copy_bytes(simulation)
    return read_bytes


def host_copy_bytes(simulation: StepMemorySimulation) -> int:
    """Bytes of RAM that a rank keeps of weights that it reads into RAM: transformers maps files
    into memory, and copies what is cast from another dtype (DeepSpeed: each tensor in transit) or
    stacked (experts).
    """
    shape = simulation.shape
    has_stored_dtype = shape.stored_dtype == simulation.precision.load
    copied_params = (
        shape.expert_params if has_stored_dtype or simulation.step.layout.is_zero else shape.params
    )
    return simulation.loaded_element_bytes.weights * copied_params


# Of a stacked tensor of experts while it is loaded: itself, and the parts that it is put together
# from (transformers' core_model_loading.py, MergeModulelist and Concatenate).
STACKING_COPIES = 2

# Threads in which transformers reads tensors (core_model_loading.py, GLOBAL_WORKERS).
READER_THREADS = 4

# Whole: one process writes everything, gathered if it is sharded. Sharded: each rank writes its
# shard, in torch's distributed format. DeepSpeed writes each rank's shard in its own format.
CheckpointFormat = Literal["whole", "sharded", "deepspeed"]

# Assumed write rate of one process: the baseline of a general-purpose volume in the cloud (AWS gp3:
# 125 MiB/s; Google's and Azure's are about as fast). Not measured; a local NVMe disk is ten times
# as fast.
DISK_BYTES_PER_S = 125 * MIB
# How long all other ranks may wait while the first one writes.
MAX_WHOLE_SAVE_S = 120
# The largest checkpoint of full states that is gathered on the first rank, 14.6 GiB: above it,
# writing by one process costs minutes of all GPUs, and the gathered copy (two thirds of it) more
# host RAM than a run has to spare. Up to 1.3 billion parameters with AdamW in fp32 (12 bytes each)
# stay whole.
MAX_WHOLE_BYTES = DISK_BYTES_PER_S * MAX_WHOLE_SAVE_S
# Largest file of final weights that are gathered tensor by tensor, complete in the first rank's RAM
# before it is written.
MAX_WEIGHTS_FILE_BYTES = 5 * 10**9
# Largest file that transformers writes at once (`max_shard_size` of `save_pretrained`), complete in
# the host's RAM.
SAVE_SHARD_BYTES = 50 * 10**9
# For a tensor of a sharded checkpoint: the copy from the GPU, and its serialised bytes.
SHARDED_SAVE_COPIES = 2


@dataclass(frozen=True)
class CheckpointSaving:
    """How a training checkpoint is written. Bytes of RAM are those in use at once, `total_bytes` is
    on disk."""

    format: CheckpointFormat
    # Bytes of weights and optimizer states.
    total_bytes: int
    # RAM that the first rank needs beyond what every rank needs, for a checkpoint or the final
    # weights.
    first_rank_ram: int
    each_rank_ram: int
    gathered_ram: int
    # Of `each_rank_ram`: the copy that a rank holds while its part is written beside the training.
    staged_ram: int = 0


def plan_checkpoint_saving(simulation: StepMemorySimulation) -> CheckpointSaving:
    """How checkpoints are written: sharded where FSDP divides full states that are too large for
    one process."""
    layout, parameters = simulation.step.layout, simulation.trained_parameters
    untrained_params = simulation.shape.untrained_params * simulation.is_full  # saved with the rest
    final_weights_ram = min(
        (parameters.params + untrained_params) * parameters.itemsize, SAVE_SHARD_BYTES
    )
    paged_state_bytes = paged_bytes(simulation.config.train.optim, simulation.shape, parameters)
    if layout.is_zero:
        return CheckpointSaving(
            "deepspeed",
            4 * parameters.params + (paged_state_bytes or 8 * parameters.params),
            final_weights_ram,
            0,
            final_weights_ram,
        )
    shard_count = (layout.shard if layout.is_fsdp else 1) * layout.tensor_parallel
    # a gradient is as large as its parameter
    weight_and_gradient_bytes = (
        simulation.resident.gradients * shard_count
        + simulation.loaded_element_bytes.weights * untrained_params
    )
    state_bytes = simulation.resident.optimizer * shard_count + paged_state_bytes
    total_bytes = weight_and_gradient_bytes + state_bytes
    if not (layout.is_fsdp and simulation.is_full):
        return CheckpointSaving("whole", total_bytes, final_weights_ram, 0, final_weights_ram)
    # the one is written, and freed, before the other is gathered
    gathered_ram = max(weight_and_gradient_bytes, state_bytes)
    largest_elements = largest_tensor_elements(simulation.shape)
    # the first rank holds a file of the final weights in 16 bits, and one tensor in fp32; all of
    # them where there are experts, which are saved under other names than they have in memory
    gathered_weights_ram = 2 * (parameters.params + untrained_params)
    if simulation.shape.num_experts == 0:
        gathered_weights_ram = (
            min(gathered_weights_ram, MAX_WEIGHTS_FILE_BYTES) + 4 * largest_elements
        )
    is_async = simulation.config.train.async_save
    if total_bytes <= MAX_WHOLE_BYTES and not is_async:
        return CheckpointSaving(
            "whole", total_bytes, max(gathered_ram, gathered_weights_ram), 0, gathered_ram
        )
    staged_ram = -(-total_bytes // shard_count) * is_async
    return CheckpointSaving(
        "sharded",
        total_bytes,
        gathered_weights_ram,
        SHARDED_SAVE_COPIES * 4 * -(-largest_elements // shard_count) + staged_ram,
        gathered_ram,
        staged_ram,
    )


# --------------------------------------------------------------------------------------------------
# The peak of a step.
#
# A step is a sequence of phases (forward, head, backward, optimizer, evaluation, saving); each has
# its live bytes, and the largest is the peak. What stays between steps and what a sharded model
# gathers come from `model_states`, what a block and the head hold and use from `block`, which
# follows the libraries' own forward on sizes; `step_memory` goes through them. No tensor is
# created: a candidate takes milliseconds.

# --- how much more than the tensors must be free, by a setting's class ----------------------------
# Terms that are allocated once: the allocator packs them, and loses only rounding.
RESIDENT_TERMS = (
    "weights",
    "adapters",
    "master_weights",
    "optimizer",
    "gradient_buckets",
    "workspaces",
)
# What the allocator keeps beyond a step's temporary tensors, as a fraction of their bytes:
# remainders of blocks that were split for one size and requested for another (forward, backward,
# evaluation, the next batch's length). More for attention's S x S matrices and gathered units, the
# largest of all. From replays, not from measured rows: benchmarks/reserved.json (rows of one length
# and of changing ones) and closed_form.json; docs/memory-model.md scores it on measured ones.
TEMPORARY_SLACK = {"sdpa": 0.25, "flash_attention_2": 0.25, "eager": 0.50, "several_gpus": 0.50}
# The same for an evaluation's batch, whose tensors are few and large: each splits another block. In
# replays of 9 settings on a GPU without limit 0.28 to 0.55 (docs/memory-model.md).
EVALUATION_SLACK = 0.6
# The same for gradients: they have the weights' own sizes in every step.
GRADIENT_SLACK = 0.125
# Kept free in every class, in addition to the fraction.
MARGIN_BYTES = int(0.3 * GIB)

# Kept free in addition under WSL: the desktop takes and returns GPU memory during a run, and what
# is missing is then moved to the host's memory. Not measured: what a browser and a few more windows
# may take.
DESKTOP_BYTES = GIB

# What a run does, one after the other; the forward and backward passes of a step and its update are
# training.
RunPhase = Literal["loading", "training", "evaluation", "generation", "saving"]

# The run's phase for each phase of the estimate that is none of a training step.
RUN_PHASES: dict[str, RunPhase] = {"evaluation": "evaluation", "saving": "saving"}

MarginClass = Literal[
    "measured", "quantised", "autocast", "padded", "eager", "several_gpus", "shared_rows",
    "foreach", "unseen", "measured_blocks", "own_kernels",
]  # fmt: skip


@dataclass(frozen=True)
class Margin:
    """A fraction of the predicted reserved bytes that is kept free, and the evidence for its
    size."""

    share: float
    reason: str


# One row per class; a setting in several classes takes the largest fraction.
MARGINS: dict[MarginClass, Margin] = {
    "measured": Margin(
        0.03, "LoRA and full on one GPU with flash or efficient attention: measured within 1%"
    ),
    "quantised": Margin(
        0.06, "QLoRA: 2 of 48 measured rows reserved more than 6% above their trace"
    ),
    "autocast": Margin(
        0.06,
        "fp32 weights that train under autocast: their casts come and go; simulated up to 5% above",
    ),
    "padded": Margin(
        0.06, "rows of different lengths share batches: sizes change from batch to batch"
    ),
    "eager": Margin(
        0.10, "eager attention: reserved memory of measured rows was up to 9% above the prediction"
    ),
    "foreach": Margin(
        0.10, "AdamW one list at a time: reserved memory jumps with the row length (simulated)"
    ),
    "several_gpus": Margin(
        0.10, "DDP and FSDP2: buckets and gathered weights are computed, not yet measured"
    ),
    "shared_rows": Margin(
        0.10, "context parallelism: FSDP2 with a part of each row; a published run is within 1%"
    ),
    "measured_blocks": Margin(
        0.06, "blocks that were measured: 1% below their trace at most, small models 4%"
    ),
    "own_kernels": Margin(
        0.15,
        "a class with kernels of its own: its reference code was measured, and packages may need"
        " other buffers",
    ),
    "unseen": Margin(
        0.15,
        "ZeRO, tensor parallel, offload, a streamed base, experts by code of their class: not"
        " measured",
    ),
}

# CUDA context and kernels, outside the allocator: 141 MiB seen on a T4, 0.4 to 0.6 GiB reported for
# H100s.
CUDA_CONTEXT_BYTES = GIB // 2
# NCCL's buffers per communicator, the upper end of what was reported (544 to 688 MiB).
NCCL_BYTES = 688 * MIB
# Fraction of the loading bytes that is kept free beside them. Not measured on a GPU yet; a step's
# margin covers activations, and loading has none.
LOAD_MARGIN = MARGINS["quantised"].share

# Rows of an evaluation batch that a plan takes at most: a device that computes so many at once
# gains nothing from more, and each rank's last batch is filled up.
MAX_EVALUATION_ROWS = 64

# What a CPU process keeps of freed activations and of the head, as multiples of their size: malloc
# keeps blocks of up to 32 MiB, as activations are, and gives larger ones back at once, as the
# head's mostly are. With them and CPU_LATE_BYTES the prediction is 1.05 to 2.7 times, at the median
# 1.35 times, the resident memory of 38 phases (training, evaluation) of 22 runs of models of 2M to
# 135M parameters (2026-11-28, two cores, torch 2.13; benchmarks/LOG.md). A bound, and said as one:
# runs of few steps keep next to none of it.
CPU_ACTIVATION_SLACK, CPU_HEAD_SLACK = 3.0, 0.25
# Libraries and threads that a CPU run loads after the imports, from the same runs.
CPU_LATE_BYTES = 192 * MIB
# What a process has resident of Python, torch and the other libraries once they are imported,
# beyond what it has while it plans: 0.52 GiB in those runs. A plan is made before, so they are not
# yet missing from the free memory.
CPU_LIBRARIES_BYTES = GIB // 2


@dataclass(frozen=True)
class MemoryEstimate:
    """The predicted peak of one rank in bytes: `terms` add up to `allocated`; `required` is what
    must be free."""

    # What the bytes are for at the peak: weights, adapters, master_weights, gradients, optimizer,
    # gradient_buckets, workspaces, activations, loss_head, dequantised, gather_buffers,
    # optimizer_step, images; those of no bytes may be absent.
    terms: dict[str, int] = field(default_factory=dict)
    reserved: int = 0
    margin: int = 0
    # CUDA context, NCCL, the managed memory of paged optimizer states; on a CPU the copy of a
    # checkpoint that is written beside the training.
    outside_allocator: int = 0
    # The phase of the step with the peak: forward, head, backward, optimizer, evaluation, saving.
    moment: str = ""
    moments: dict[str, int] = field(default_factory=dict)
    # Bytes of tensors and reserved ones in each phase of the run, without what earlier runs
    # correct: `reserved` is the most but for loading. Answers are generated in batches that take no
    # more than the peak.
    by_moment: dict[RunPhase, tuple[int, int]] = field(default_factory=dict)
    # Allocated bytes while the model is loaded, before the first step: more than a step's where a
    # rank creates all NF4 weights and keeps a shard of them.
    load_bytes: int = 0
    # RAM that this rank needs for what is offloaded and for writing a checkpoint.
    host_bytes: int = 0
    # Of those, what the first rank alone takes to write a checkpoint or the final weights.
    host_save_bytes: int = 0
    # Of those, what each rank takes to write its shard of a checkpoint.
    host_save_each_bytes: int = 0
    # RAM that the first rank would take to write a checkpoint whole.
    host_gather_bytes: int = 0
    checkpoint: CheckpointFormat = "whole"
    # Weights and optimizer states of one checkpoint.
    checkpoint_bytes: int = 0
    # RAM for loading the weights, for a rank that reads them (under FSDP2 only the first), without
    # file pages, which can be dropped.
    host_load_bytes: int = 0
    margin_reason: str = ""
    # Of the margin: what is kept free whatever the size of the run.
    kept_free: int = MARGIN_BYTES

    @property
    def allocated(self) -> int:
        """Bytes that tensors hold at the peak."""
        return sum(self.terms.values())

    @property
    def resident(self) -> int:
        """The allocated bytes that stay between steps."""
        return resident_term_bytes(self.terms)

    def phase_bytes(self, phase: RunPhase) -> tuple[int | None, int | None]:
        """Predicted bytes of a phase of the run: of tensors, and reserved, corrected as the peak
        is. None: unknown."""
        allocated, reserved = self.by_moment.get(phase, (None, None))
        if reserved is not None and phase != "loading":
            uncorrected_reserved = max(
                phase_reserved
                for phase_name, (_, phase_reserved) in self.by_moment.items()
                if phase_name != "loading"
            )
            reserved = reserved * self.reserved // uncorrected_reserved
        return allocated, reserved

    @property
    def peak_text(self) -> str:
        """The predicted peak as a run's last line has it beside the measured one: reserved, on a
        CPU resident."""
        phase = max(self.by_moment, key=lambda phase_name: self.phase_bytes(phase_name)[1] or 0)
        reserved = self.phase_bytes(phase)[1] or 0
        # on a CPU: they are not required, so that the peak may be more than what is
        includes_file_pages = phase == "loading" and reserved > self.load_bytes
        return (
            f"{reserved / GIB:.2f} GiB in"
            f" {phase}{', with pages of files that can be dropped' * includes_file_pages}"
        )

    @property
    def required_to_load(self) -> int:
        """Bytes that must be free for loading, with a margin for what quantising leaves in the
        allocator."""
        return int(self.load_bytes * (1 + LOAD_MARGIN)) + self.kept_free + self.outside_allocator

    @property
    def is_limited_by_loading(self) -> bool:
        """True if loading needs more than any step does."""
        return self.required_to_load > self.reserved + self.margin + self.outside_allocator

    @property
    def required(self) -> int:
        """Bytes that must be free on the device before the run starts, for steps and loading."""
        return max(self.reserved + self.margin + self.outside_allocator, self.required_to_load)


def estimate_memory(
    config: RunConfig, shape: ModelShape, precision: Precision, step: Step
) -> MemoryEstimate:
    """Estimate the peak of a step on one rank: the largest of its phases, and what must be free for
    it."""
    return estimate_from_simulation(create_step_simulation(config, shape, precision, step))


def estimate_from_simulation(simulation: StepMemorySimulation) -> MemoryEstimate:
    """Estimate the peak of a step from its simulation."""
    shape, step, layout = simulation.shape, simulation.step, simulation.step.layout
    phases = largest_by_phase(simulation.phases())
    phase_totals = {str(phase): sum(terms.values()) for phase, terms in phases.items()}
    peak = max(phases, key=lambda name: phase_totals[name])
    saving = (
        plan_checkpoint_saving(simulation) if step.saves else CheckpointSaving("whole", 0, 0, 0, 0)
    )
    # the phase with the most live bytes need not be the one with the most reserved: slack differs
    # between terms
    by_moment: dict[RunPhase, tuple[int, int]] = {}
    for name, terms in phases.items():
        reserved = _phase_reserved_bytes(name, terms, step)
        # what is copied to be written is in the same memory
        if name == "saving" and not step.on_gpu:
            reserved += saving.first_rank_ram
        run_phase = RUN_PHASES.get(name, "training")
        previous = by_moment.get(run_phase, (0, 0))
        by_moment[run_phase] = max(previous[0], phase_totals[name]), max(previous[1], reserved)
    if step.on_gpu:  # an evaluation starts with an empty cache
        step_terms = [terms for name, terms in phases.items() if name != "evaluation"]
        over_streams = step_reserved_bytes(step_terms, attention=step.attention, layout=layout)
        by_moment["training"] = (
            by_moment["training"][0],
            max(by_moment["training"][1], over_streams),
        )
    reserved = max(one for _, one in by_moment.values())
    by_moment["generation"] = phase_totals[peak], reserved
    load_bytes = late_bytes = sum(loading_terms(simulation).values())
    paged_state_bytes = paged_bytes(
        simulation.config.train.optim, shape, simulation.trained_parameters
    )
    if step.on_gpu:
        # layouts of two dimensions have a communicator for each
        communicators = (layout.ranks > 1) + (
            layout.ranks > 1 and layout.name in ("fsdp_hybrid", "fsdp_tp")
        )
        outside_allocator = CUDA_CONTEXT_BYTES + NCCL_BYTES * communicators
    else:
        outside_allocator = CPU_LIBRARIES_BYTES + saving.staged_ram
        # with pages of the files from which weights in another dtype are made: they can be dropped,
        # and so are not required
        late_bytes += CPU_LATE_BYTES
        if shape.stored_dtype != simulation.precision.load or simulation.is_nf4:
            late_bytes += (4 if shape.stored_dtype == "float32" else 2) * shape.params
    by_moment["loading"] = load_bytes, late_bytes
    margin = select_margin(simulation)
    # not a share: what other processes take does not grow with the run
    kept_free = MARGIN_BYTES + DESKTOP_BYTES * step.pages
    desktop_note = f"; {DESKTOP_BYTES / GIB:.1f} GiB of it for the desktop beside WSL" * step.pages
    save_ram = saving.first_rank_ram + saving.each_rank_ram
    return MemoryEstimate(
        terms=phases[peak],
        reserved=reserved,
        margin=int(reserved * margin.share) + kept_free,
        outside_allocator=paged_state_bytes + outside_allocator,
        moment=peak,
        moments=phase_totals,
        by_moment=by_moment,
        load_bytes=load_bytes,
        host_bytes=(
            simulation.resident.host
            + simulation.offloaded_bytes()
            + host_pixel_bytes(simulation)
            + save_ram
        ),
        host_save_bytes=saving.first_rank_ram,
        host_save_each_bytes=saving.each_rank_ram,
        host_gather_bytes=saving.gathered_ram,
        checkpoint=saving.format,
        checkpoint_bytes=saving.total_bytes,
        host_load_bytes=host_read_bytes(simulation) if step.on_gpu else 0,
        margin_reason=(
            f"{margin.share:.0%} + {kept_free / GIB:.1f} GiB: {margin.reason}{desktop_note}"
        ),
        kept_free=kept_free,
    )


# Batches that a worker of the loader has made before they are asked for (torch's
# `prefetch_factor`).
PREFETCHED_BATCHES = 2
# Processes of a rank that make pixels on a machine with a card, where the run YAML asks for none.
IMAGE_WORKERS = 4


def count_image_workers(configured: int, *, on_gpu: bool) -> int:
    """Processes of a rank that make pixels while it computes; a rank with fewer cores has fewer."""
    return configured or IMAGE_WORKERS * on_gpu


def host_pixel_bytes(simulation: StepMemorySimulation) -> int:
    """Bytes of RAM that a rank's pictures take as the model is given them: those of a step, and
    those that workers have made."""
    step = simulation.step
    workers = count_image_workers(
        simulation.config.train.dataloader_num_workers, on_gpu=step.on_gpu
    )
    batches = step.grad_accum + PREFETCHED_BATCHES * workers
    return simulation.vision_pass.pixel_bytes * step.pictures * batches


def max_evaluation_rows(simulation: StepMemorySimulation) -> int:
    """Rows of the largest evaluation batch of one rank that is never the run's peak, at most
    MAX_EVALUATION_ROWS."""
    step = simulation.step
    step_peak = max(sum(terms.values()) for terms in simulation.training_phases.values())

    def is_beyond(rows: int) -> bool:
        # on a CPU tensors alone: what malloc keeps of a step is more than of an evaluation
        return any(
            (_phase_reserved_bytes(phase, terms, step) if step.on_gpu else sum(terms.values()))
            > step_peak
            for phase, terms in simulation.evaluation_phases(rows)
        )

    if not is_beyond(MAX_EVALUATION_ROWS):
        return MAX_EVALUATION_ROWS
    # more rows never need less, so the limit can be searched by halves
    return max(1, bisect.bisect_left(range(1, MAX_EVALUATION_ROWS), True, key=is_beyond))


def _phase_reserved_bytes(phase: str, terms: Mapping[str, int], step: Step) -> int:
    # above the level after the imports: tensors, and what malloc does not return
    if not step.on_gpu:
        slack_bytes = (
            CPU_ACTIVATION_SLACK * terms["activations"] + CPU_HEAD_SLACK * terms["loss_head"]
        )
        return sum(terms.values()) + int(slack_bytes) + CPU_LATE_BYTES
    return reserved_bytes(
        terms, attention=step.attention, layout=step.layout, is_evaluation=phase == "evaluation"
    )


def kv_cache_bytes_per_token(shape: ModelShape, itemsize: int) -> int:
    """Bytes of one token's keys and values in all attention layers."""
    return (
        2
        * itemsize
        * shape.kv_width
        * sum(kind.count for kind in shape.layers if kind.attention != "none")
    )


def generation_token_budget(simulation: StepMemorySimulation, memory: MemoryEstimate) -> int:
    """Tokens, rows x (prompt + answer), whose caches and forward pass hold no more than a step
    holds and frees."""
    step, itemsize = simulation.step, DTYPE_BYTES[simulation.precision.compute]
    phase, rows = (
        ("evaluation", step.eval_batch)
        if "evaluation" in memory.moments
        else ("forward", step.micro_batch)
    )
    temporary_bytes = memory.moments.get(phase, 0) - memory.resident
    bytes_per_token = kv_cache_bytes_per_token(simulation.shape, itemsize)
    if not step.on_gpu and step.loss == "chunked":
        temporary_bytes = max(
            terms["activations"] for _, terms in simulation.evaluation_phases(rows)
        )
        # the head computes one token of a row at a time, whose logits `generate` has in fp32 twice
        # besides (measured: 12.3 bytes a word, 10.1 in bf16, 300 rows, transformers 5.23); a row
        # has at least an answer's tokens
        bytes_per_token += (
            (itemsize + 8) * simulation.shape.vocab_size // simulation.config.eval.max_new_tokens
        )
    bytes_per_token += max(0, temporary_bytes) // max(1, rows * step.length)
    return max(1, (memory.allocated - memory.resident) // bytes_per_token)


def resident_term_bytes(terms: Mapping[str, int]) -> int:
    """Bytes of a phase's terms that stay between steps."""
    return sum(terms.get(name, 0) for name in RESIDENT_TERMS)


def reserved_bytes(
    terms: Mapping[str, int], *, attention: str, layout: Layout, is_evaluation: bool = False
) -> int:
    """Bytes that the allocator has reserved when a phase's terms are live: a bound, if no trace
    says more; `is_evaluation`: the phase is an evaluation's."""
    gradient_bytes = terms.get("gradients", 0)
    # what comes and goes within a step: activations, the head, gathered units
    temporary = sum(terms.values()) - resident_term_bytes(terms) - gradient_bytes
    # beside shared rows, units are small
    is_multi_gpu = layout.ranks > 1 and layout.context_parallel == 1
    slack = TEMPORARY_SLACK["several_gpus" if is_multi_gpu else attention]
    slack = max(slack, EVALUATION_SLACK * is_evaluation)
    return int(sum(terms.values()) + slack * temporary + GRADIENT_SLACK * gradient_bytes)


# Terms that FSDP allocates on its own streams: reduced gradients and gathered units.
OTHER_STREAM_TERMS = ("gradients", "gather_buffers")


def step_reserved_bytes(
    phases: Iterable[Mapping[str, int]], *, attention: str, layout: Layout
) -> int:
    """Bytes that the allocator has reserved after a step with these phases' terms: the largest of
    their bounds.

    Under FSDP what is freed on one stream is not given to another, so each stream keeps its own
    highest bytes, whenever they were; their sum counts where it is more. A stream's units are whole
    and of few sizes, and leave no holes in its own pools (replays in benchmarks/closed_form.json).
    """
    step_terms = list(phases)  # read several times
    bound = max(reserved_bytes(terms, attention=attention, layout=layout) for terms in step_terms)
    if not layout.is_fsdp:
        return bound
    # a freed block is only reused on the stream that it was allocated on (CUDACachingAllocator)
    main_stream = [
        {name: size for name, size in one.items() if name not in OTHER_STREAM_TERMS}
        for one in step_terms
    ]
    per_stream = max(reserved_bytes(one, attention=attention, layout=layout) for one in main_stream)
    # the highest of each stream, although they are not in the same phase
    per_stream += int((1 + GRADIENT_SLACK) * max(one.get("gradients", 0) for one in step_terms))
    return max(bound, per_stream + max(one.get("gather_buffers", 0) for one in step_terms))


def select_margin(simulation: StepMemorySimulation) -> Margin:
    """The margin of a setting: the largest among the classes that it belongs to."""
    config, shape = simulation.config, simulation.shape
    step, layout = simulation.step, simulation.step.layout
    has_custom_experts = shape.uses_custom_experts or any(
        kind.num_experts and not kind.expert_weights for kind in shape.layers
    )
    class_applies: dict[MarginClass, bool] = {
        "measured": True,
        "quantised": simulation.is_nf4,
        "autocast": (
            simulation.is_full and simulation.precision.load != simulation.precision.compute
        ),
        "padded": step.padded or step.varlen or is_padded(config, layout, rows=step.micro_batch),
        "eager": step.attention == "eager",
        "foreach": simulation.is_full and config.train.optim == "adamw_torch",
        "several_gpus": layout.ranks > 1,
        "measured_blocks": shape.block_meter is not None,
        "own_kernels": bool(shape.kernel_packages),
        "shared_rows": layout.context_parallel > 1,
        "unseen": (
            has_custom_experts
            or layout.is_zero
            or layout.offloads_states
            or layout.is_streamed
            or layout.tensor_parallel > 1
        ),
    }
    return max(
        (MARGINS[name] for name, is_applicable in class_applies.items() if is_applicable),
        key=lambda margin: margin.share,
    )
