"""How a run is distributed over GPUs: the layouts, and what each shards, gathers and sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sft_play.config.schema import BITSANDBYTES, RunConfig
from sft_play.errors import ConfigError
from sft_play.facts.hardware import Hardware
from sft_play.facts.models.families import TENSOR_PARALLEL_TYPES
from sft_play.facts.models.model_shape import ModelShape
from sft_play.planner.batching import BatchPlan
from sft_play.planner.gradients import refusal
from sft_play.planner.mesh import Mesh, mesh_of, mesh_words
from sft_play.planner.precision import Updates, choose_precision

LayoutName = Literal[
    "single", "ddp", "fsdp", "fsdp_hybrid", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "tp",
    "fsdp_tp", "fsdp_cp",
]  # fmt: skip


LAYOUT_NAMES: tuple[LayoutName, ...] = get_args(LayoutName)
# The order of preference among layouts that are equally fast: fewer moving parts first.
SIMPLICITY: tuple[LayoutName, ...] = (
    "single", "ddp", "fsdp", "fsdp_hybrid", "zero1", "zero2", "zero3", "tp", "fsdp_tp", "fsdp_cp",
    "zero2_offload", "zero3_offload",
)  # fmt: skip
# Layouts whose engine can also run with one rank.
ONE_RANK: tuple[LayoutName, ...] = ("ddp", "fsdp", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
# Sizes of tensor- or context-parallel groups that the plan tries by itself.
PARTS = (2, 4, 8)
DEEPSPEED: tuple[LayoutName, ...] = ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")


def layouts_over(ranks: int) -> tuple[LayoutName, ...]:
    """The layouts to choose from over this many ranks: for one rank it is `single`."""
    return tuple(name for name in LAYOUT_NAMES if name != "single" or ranks == 1)


@dataclass(frozen=True)
class Layout:
    """One way to distribute a run over `data_parallel` x `tensor_parallel` x `context_parallel` ranks. `data_parallel`
    ranks see their own rows. `shard` is the number of ranks over which a sharded layout divides its states
    (`fsdp_hybrid`: those of one node, or `distributed.shard_ranks`); in a tensor-parallel layout, what
    `tensor_parallel` leaves to a rank is divided."""

    name: LayoutName
    data_parallel: int = 1
    shard: int = 1
    tensor_parallel: int = 1
    context_parallel: int = 1
    """Ranks that share the tokens of a row."""
    keeps_params: bool = False
    """`zero3_offload` with weights on the GPUs and only the optimizer states in RAM, as a DeepSpeed file may ask
    for."""

    @property
    def ranks(self) -> int:
        """Processes, one per GPU."""
        return self.data_parallel * self.tensor_parallel * self.context_parallel

    @property
    def gradient_ranks(self) -> int:
        """Ranks over which gradients are reduced: those with rows, or parts of rows, of their own."""
        return self.data_parallel * self.context_parallel

    @property
    def shards_params(self) -> bool:
        """Whether a rank holds only its shard of the weights between steps (FSDP2, ZeRO-3)."""
        return self.is_fsdp or self.name in ("zero3", "zero3_offload")

    @property
    def shards_grads(self) -> bool:
        """Whether a rank keeps only its shard of the gradients."""
        return self.shards_params or self.name in ("zero2", "zero2_offload")

    @property
    def shards_states(self) -> bool:
        """Whether a rank keeps only its shard of the optimizer states."""
        return self.shards_grads or self.name == "zero1"

    @property
    def is_zero(self) -> bool:
        """Whether DeepSpeed runs it."""
        return self.name.startswith("zero")

    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP2 (`fully_shard`) runs it: `tp` too, with one shard, for its fp32 copies of what trains."""
        return self.name.startswith("fsdp") or self.name == "tp"

    @property
    def offloads_states(self) -> bool:
        """Whether optimizer states and fp32 master weights stay in the host's RAM."""
        return self.name.endswith("_offload")

    @property
    def offloads_params(self) -> bool:
        """Whether the weights stay in the host's RAM too."""
        return self.name == "zero3_offload" and not self.keeps_params


SINGLE = Layout("single")


@dataclass(frozen=True)
class Stopped:
    """How a run was distributed when it was stopped: its layout and its batch. `processes` are all of its ranks,
    including those that share rows; `updates` is how they reached its weights, where the layout's engine does not
    decide that."""

    layout: LayoutName
    batch: BatchPlan
    processes: int = 0
    updates: Updates | None = None
    has_trained: bool = True
    """Whether there is anything to continue; a run without a trained step keeps none of this."""
    too_many: int | None = None
    """The smallest micro-batch that has run out of memory; None where none has."""

    def __post_init__(self) -> None:
        # 0: the run's manifest does not say, and then every rank had rows of its own
        object.__setattr__(self, "processes", self.processes or self.batch.ranks)

    def cannot_become(self, layout: LayoutName) -> str | None:
        """Why the run's checkpoint cannot be resumed in another layout; None where it can, over any number of ranks:
        one process, DDP and FSDP read each other's checkpoints, DeepSpeed's shards are of its layout."""
        if not self.has_trained or self.layout == layout:
            return None
        kept = [name for name in (self.layout, layout) if name in DEEPSPEED]
        if not kept:
            return None
        return (
            f"it was stopped under {self.layout}, and is now {layout}: DeepSpeed's checkpoints ({kept[0]}) are resumed "
            "only in their own layout (over any number of ranks)"
        )


@dataclass(frozen=True)
class NotPossible:
    """A layout that the libraries cannot run for this job, and why."""

    name: LayoutName
    because: str


def layouts_for(
    config: RunConfig, shape: ModelShape, hardware: Hardware, *, named: LayoutName | None = None
) -> tuple[tuple[Layout, ...], tuple[NotPossible, ...]]:
    """Every layout that could run the job on all GPUs of the machine, and those that could not, with the reason; with a
    user's mesh, only that one. On one GPU a layout for several that is `named` is tried too. Raises ConfigError where
    the mesh is invalid, is of another number of processes, or cannot run the job."""
    mesh = mesh_of(config.model.mesh_shape)
    if mesh is not None:
        return (_checked_mesh(mesh, config, shape, hardware),), ()
    count = hardware.ranks
    possible_layouts: list[Layout] = []
    refused: list[NotPossible] = []
    imaginable = _imaginable(config, hardware, count)
    if count == 1 and named in ONE_RANK:
        imaginable = [Layout(named), *imaginable]
    if named == "fsdp_cp":
        imaginable += _sharing_rows(hardware)
    for layout in imaginable:
        because = _impossible(layout, config, shape, hardware)
        if because is None:
            possible_layouts.append(layout)
        elif not any(item.name == layout.name for item in refused):  # of several group sizes the first says why
            refused.append(NotPossible(layout.name, because))
    # a name that works with one group size is not impossible because it does not with another
    possible = {layout.name for layout in possible_layouts}
    return tuple(possible_layouts), tuple(item for item in refused if item.name not in possible)


def _checked_mesh(mesh: Mesh, config: RunConfig, shape: ModelShape, hardware: Hardware) -> Layout:
    where = f"model.mesh_shape={mesh_words(config.model.mesh_shape)}"
    if mesh.ranks != hardware.ranks:
        needed, present = (f"{n} process{'es' if n > 1 else ''}" for n in (mesh.ranks, hardware.ranks))
        raise ConfigError(
            f"{where} is a mesh of {needed}, and this is a run of {present}: start {mesh.ranks}, one for each GPU "
            f"(make train-distributed, NPROC= of each node), or give a mesh of {hardware.ranks}"
        )
    layout = _layout_of(mesh)
    because = _impossible(layout, config, shape, hardware)
    if because is not None:
        instead = Mesh(mesh.dp, mesh.fsdp * mesh.tp * mesh.cp)
        raise ConfigError(f"{where} cannot run this job: {because}; use {instead}, or null to let the plan choose")
    return layout


def _layout_of(mesh: Mesh) -> Layout:
    if mesh.ranks == 1:
        return SINGLE
    if mesh.cp > 1:
        return Layout("fsdp_cp", mesh.batches, mesh.fsdp * mesh.cp, context_parallel=mesh.cp)
    if mesh.tp > 1:
        return Layout("fsdp_tp" if mesh.fsdp > 1 else "tp", mesh.batches, mesh.fsdp, mesh.tp)
    if mesh.fsdp == 1:
        return Layout("ddp", mesh.dp)
    return Layout("fsdp_hybrid" if mesh.dp > 1 else "fsdp", mesh.batches, mesh.fsdp)


def with_context_parallel(config: RunConfig, shape: ModelShape, hardware: Hardware) -> tuple[Layout, ...]:
    """The layouts that also divide the tokens of each row, for rows that are too long for a GPU."""
    layouts = _sharing_rows(hardware)
    return tuple(layout for layout in layouts if _impossible(layout, config, shape, hardware) is None)


def _sharing_rows(hardware: Hardware) -> list[Layout]:
    count = hardware.ranks
    # its all-to-alls are in every attention layer, so ranks that share a row are in one node
    fitting = [parts for parts in PARTS if parts <= hardware.gpus_per_node and count % parts == 0]
    return [Layout("fsdp_cp", count // parts, count, context_parallel=parts) for parts in fitting]


def _imaginable(config: RunConfig, hardware: Hardware, count: int) -> list[Layout]:
    # on one CPU process offload would only copy RAM to RAM
    offloads = (
        [Layout("zero2_offload", count, count), Layout("zero3_offload", count, count)]
        if hardware.gpus or count > 1
        else []
    )
    if count == 1:
        return [SINGLE, *offloads]
    inside = hardware.gpus_per_node
    layouts = [Layout("ddp", count), Layout("fsdp", count, count)]
    wanted = config.distributed.shard_ranks
    shard = inside if wanted == "auto" else wanted
    if wanted != "auto" and count % shard:
        raise ConfigError(f"distributed.shard_ranks={shard} does not divide {count} ranks into equal groups")
    # one shard group would be fsdp, groups of one rank ddp
    if 1 < shard < count and count % shard == 0:
        layouts.append(Layout("fsdp_hybrid", count, shard))
    layouts += [Layout(name, count, count) for name in ("zero1", "zero2", "zero3")]
    # its all-reduces are in every block, so tensor parallelism stays inside a node
    for tensor in PARTS:
        if tensor > inside or count % tensor:
            continue
        rest = count // tensor
        layouts.append(Layout("tp", 1, 1, tensor) if rest == 1 else Layout("fsdp_tp", rest, rest, tensor))
    return layouts + offloads


def _impossible(layout: Layout, config: RunConfig, shape: ModelShape, hardware: Hardware) -> str | None:
    optim = config.train.optim
    if config.train.async_save and not (layout.is_fsdp and config.tuning.mode == "full"):
        return "train.async_save: only FSDP2's ranks (fsdp), in full fine-tuning, write their parts beside the training"
    if config.train.compile and (because := not_compiled(layout)):
        return because
    if config.model.add_tokens and config.tuning.mode != "full" and layout.name not in ("single", "ddp"):
        return (
            "model.add_tokens: PEFT trains rows of whole embeddings only, and they are divided here or cast (ddp works)"
        )
    if because := _cannot_start(layout, config):
        return because
    if layout.tensor_parallel > 1 and (because := _not_tensor_parallel(layout, config, shape, hardware)):
        return because
    if layout.context_parallel > 1 and (because := _not_context_parallel(layout, config, shape)):
        return because
    if optim in BITSANDBYTES and (layout.is_fsdp or layout.is_zero or layout.tensor_parallel > 1):
        return f"bitsandbytes' optimizers do not support sharded parameters (train.optim={optim})"
    if optim == "muon" and layout.name not in ("single", "ddp"):
        return "train.optim=muon orthogonalises whole matrices, and they are divided here (ddp works)"
    if optim == "adafactor" and (layout.is_zero or layout.tensor_parallel > 1):
        return "Adafactor needs whole rows and columns, which a partitioned tensor lacks"
    if layout.offloads_states and optim not in ("adamw_torch_fused", "adamw_torch"):
        return "DeepSpeed's CPU optimizer is AdamW"
    return refusal(config, choose_precision(config, hardware, shape), layout.name, on_gpu=bool(hardware.gpus))


def _cannot_start(layout: Layout, config: RunConfig) -> str | None:
    lora, name = config.tuning.lora, f"tuning.lora.init={config.tuning.lora.init}: "
    if config.tuning.mode == "full" or lora.init == "default":
        return None
    if layout.tensor_parallel > 1 or (lora.init == "loftq" and layout.shards_params and layout.is_zero):
        return f"{name}whole 16-bit weights are read for it, and they are divided here (fsdp works)"
    if layout.is_fsdp and lora.use_dora:
        return f"{name}DoRA's layers are divided only when training begins, where half of an adapter cannot be frozen"
    return None


def not_compiled(layout: Layout) -> str | None:
    """Why blocks cannot be compiled in the layout; None where they can."""
    if layout.is_zero:
        return "train.compile: ZeRO's hooks in every submodule would break a compiled block; fsdp shards the same"
    if layout.tensor_parallel > 1 or layout.context_parallel > 1:
        return f"train.compile: ranks of {layout.name} exchange inside each block, which was not tried compiled"
    return None


def _not_tensor_parallel(layout: Layout, config: RunConfig, shape: ModelShape, hardware: Hardware) -> str | None:
    ranks = layout.tensor_parallel
    if config.tuning.mode == "qlora":
        return "NF4 weights cannot be split over tensor-parallel ranks (tuning.mode=lora can)"
    if config.tuning.mode == "lora" and config.tuning.lora.use_dora:
        return "DoRA's magnitudes belong to whole layers"
    if shape.model_type not in TENSOR_PARALLEL_TYPES:
        return f"transformers' plan of {shape.model_type} models does not split every layer of a block by heads"
    if shape.num_kv_heads % ranks or shape.num_heads % ranks:
        return f"{shape.num_heads} heads and {shape.num_kv_heads} key heads do not split over {ranks} ranks"
    if shape.intermediate_size % ranks:
        return f"the MLP's width of {shape.intermediate_size} does not split over {ranks} ranks"
    # transformers' plan leaves each rank a part of the gradients, and GradScaler looks at this rank's only
    if choose_precision(config, hardware, shape).compute == "float16":
        return "loss scaling in fp16 does not see overflows on the other ranks"
    return None


def _not_context_parallel(layout: Layout, config: RunConfig, shape: ModelShape) -> str | None:
    """Each rank attends with some of the heads over the whole row (Ulysses, https://arxiv.org/abs/2309.14509)."""
    ranks, length = layout.context_parallel, config.model.max_seq_len
    if shape.num_heads % ranks:
        return f"{shape.num_heads} heads do not split over {ranks} ranks"
    if shape.num_kv_heads % ranks and ranks % shape.num_kv_heads:
        return f"{shape.num_kv_heads} key heads do not split over {ranks} ranks"
    if config.data.packing != "none" and config.task_mode != "cpt":
        return "packed chats need a mask between them (data.packing=none)"
    if config.model.attn_implementation not in ("auto", "sdpa") or shape.attention_softcap is not None or shape.has_attention_sinks:
        return "it runs with sdpa attention only"
    if shape.uses_alibi:
        return "ALiBi's biases are a mask, and it has none"
    others = {kind.attention for kind in shape.layers} - {"full"}
    if others - {"sliding"} or (others and (shape.window or length) < length):
        return "every layer must attend to the whole row, but some see only a window or a state"
    return None
