"""What runs a step over several ranks: DDP, FSDP2 or DeepSpeed, set up from the plan and checked on live objects.

Every engine is switched on by the Trainer's own arguments. What it really did is read from the wrapped model, since
transformers and accelerate can leave out an engine without a warning.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.utils import DDPCommunicationHookType, is_peft_model
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, RunFolderError, TrainingError
from sft_play.planner.gradients import gradients_of
from sft_play.planner.layout import Layout
from sft_play.planner.plan import Plan
from sft_play.planner.precision import SHORT, DtypeName
from sft_play.training import checkpoints, sharded_checkpoints
from sft_play.training.deepspeed_comm import init_deepspeed
from sft_play.training.full_state_dict import gathered_by_zero3, tied_names
from sft_play.units import GIB, MIB

logger = logging.getLogger(__name__)

_HOST = socket.gethostname()
WRAPPED_CLASS = {
    "ddp": "DistributedDataParallel",
    "fsdp": "FSDPModule",
    "fsdp_hybrid": "FSDPModule",
    "tp": "FSDPModule",
    "fsdp_tp": "FSDPModule",
    "fsdp_cp": "FSDPModule",
    "zero1": "DeepSpeedEngine",
    "zero2": "DeepSpeedEngine",
    "zero3": "DeepSpeedEngine",
    "zero2_offload": "DeepSpeedEngine",
    "zero3_offload": "DeepSpeedEngine",
}
"""The class that a layout's wrapped model is an instance of."""
PATIENCE = datetime.timedelta(days=7)
"""How long ranks wait for a disk at most. The heartbeat ends the wait earlier where no bytes move."""
SHARD_SLACK = 0.10
"""How much more than its share of the bytes a rank may hold: uneven parts are padded."""


def world_size() -> int:
    """Ranks of this run; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this is rank 0, or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0


def barrier(group: Any = None) -> None:
    """Wait for all ranks; does nothing for one."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier(group)


_patient: dict[Any, Any] = {}


def patient() -> Any:
    """A CPU process group of all ranks that waits as long as a disk takes, where the run's own would give up after
    `distributed.timeout_s`; None for one process. All ranks call it."""
    if world_size() == 1:
        return None
    world = dist.group.WORLD
    if world not in _patient:
        _patient.clear()
        _patient[world] = dist.new_group(backend="gloo", timeout=PATIENCE)
    return _patient[world]


def engine_arguments(
    plan: Plan, config: RunConfig, *, layer_class: str, deepspeed: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The Trainer's arguments that turn the plan's layout on."""
    if plan.layout == "single" and deepspeed is None:
        return {}
    arguments: dict[str, Any] = {"ddp_find_unused_parameters": config.distributed.find_unused_parameters}
    on_cpu = plan.hardware.device == "cpu"
    if on_cpu:
        arguments["ddp_backend"] = "gloo"
    if deepspeed is not None:
        if on_cpu:
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        return {**arguments, "deepspeed": dict(deepspeed)}
    if gradients_of(config, plan.precision, plan.layout).every == "micro_batch":
        # else accelerate reduces gradients only in a step's last pass: FSDP2 keeps whole ones on every rank until then
        arguments["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    if plan.choice.layout.is_fsdp:
        arguments["fsdp"] = True
        arguments["fsdp_config"] = {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": [layer_class],
            "reshard_after_forward": True,
            "cpu_ram_efficient_loading": False,
            "state_dict_type": "FULL_STATE_DICT",
        }
    return arguments | _axes(plan.choice.layout)


class _WithTensorParallel(ParallelismConfig):
    """The axes of accelerate's device mesh, with one for tensor parallelism that accelerate does not prepare for.

    Its own way (`Accelerator._prepare_tp` of 1.15) imports a class that transformers removed in 5.17, and refuses FSDP2
    with one shard. Here the model is divided earlier (`tensor_parallel.divide`); all that accelerate has to know of the
    axis is that ranks along it get the same rows.
    """

    @property
    def tp_enabled(self) -> bool:
        """Whether accelerate is to divide the model: no."""
        return False

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether there is an axis for FSDP2: always, even of size 1."""
        return True

    @property
    def active_mesh_dims(self) -> list[str]:
        """The axes of the mesh."""
        return [*self.dp_dim_names, "tp"]


def _axes(layout: Layout) -> dict[str, Any]:
    """The Trainer's argument for layouts of more than one axis. Context parallelism needs none: to FSDP2 its ranks are
    data-parallel ranks whose rows are shorter."""
    ranks = layout.gradient_ranks
    if not layout.is_fsdp or (layout.tensor_parallel == 1 and ranks == layout.shard):
        return {}
    kind = _WithTensorParallel if layout.tensor_parallel > 1 else ParallelismConfig
    sizes = {"dp_replicate_size": ranks // layout.shard, "dp_shard_size": layout.shard}
    return {"parallelism_config": kind(**sizes, tp_size=layout.tensor_parallel)}


def allow_fsdp_on_cpu(plan: Plan) -> None:
    """Let accelerate shard over CPU ranks, for which it would choose DDP whatever is asked for.

    `AcceleratorState` considers FSDP only where the distributed type is multi-GPU. So the type is changed between the
    Trainer's arguments, which create the process group, and the Trainer, which creates that state; the device stays the
    CPU. Used for CPU ranks only, and `check_engine` verifies the result.

    Raises:
        TrainingError: this version of accelerate keeps its state differently.
    """
    if not plan.choice.layout.is_fsdp or plan.hardware.device != "cpu":
        return
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    state = PartialState._shared_state
    if state.get("distributed_type") is not DistributedType.MULTI_CPU:
        raise TrainingError(
            f"FSDP on CPU ranks: accelerate's state has the type {state.get('distributed_type')}, not MULTI_CPU as "
            "expected; this version of accelerate is not supported: use another layout (STRATEGY=ddp)"
        )
    state["distributed_type"] = DistributedType.MULTI_GPU


def tell_accumulation(trainer: Any, plan: Plan) -> None:
    """Tell accelerate how many passes make a step, where DeepSpeed counts them.

    transformers tells it 1, since its own loop accumulates; at the first step accelerate would switch to DeepSpeed's
    number, with a warning that the two differ. Without DeepSpeed accelerate would divide every loss by the number, so
    it stays at 1.
    """
    if trainer.is_deepspeed_enabled:
        trainer.accelerator.gradient_accumulation_steps = plan.counted_batch.grad_accum


def set_dtypes(trainer: Any, plan: Plan, config: RunConfig) -> None:
    """Give accelerate the dtypes of gathered weights and of reduced gradients, before it wraps the model.

    transformers' arguments cannot express them; accelerate's own objects can: DDP's communication hook and FSDP2's
    mixed-precision policy. DeepSpeed reads them from its own configuration.
    """
    if plan.layout == "single":
        return
    chosen = gradients_of(config, plan.precision, plan.layout)
    if plan.layout == "ddp" and chosen.compressed:
        trainer.accelerator.ddp_handler.comm_hook = DDPCommunicationHookType(SHORT[chosen.reduced])
    is_own = chosen.compressed or chosen.gathered != plan.precision.compute
    if plan.choice.layout.is_fsdp and is_own:
        low = None if chosen.gathered == "float32" == plan.precision.compute else getattr(torch, chosen.gathered)
        trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=low, reduce_dtype=getattr(torch, chosen.reduced), output_dtype=low
        )


@dataclass(frozen=True)
class Held:
    """Bytes of some weights: whole, and what this rank holds of them. `device` counts those on the device that
    computes; the rest is offloaded to RAM."""

    whole: int
    here: int
    device: int


@dataclass(frozen=True)
class EngineCheck:
    """What an engine did with the model, read from live objects; bytes are what each rank holds.

    `frozen_*` are the weights that do not train, as they are stored (NF4's packed bytes, without its constants);
    `frozen_device_bytes_by_rank` leaves out what is offloaded to RAM.
    """

    layout: str
    wrapped_class: str
    ranks: int
    whole_bytes: int
    bytes_by_rank: tuple[int, ...]
    frozen_whole_bytes: int = 0
    frozen_bytes_by_rank: tuple[int, ...] = ()
    frozen_device_bytes_by_rank: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """`engine_proof` of the JSON."""
        return asdict(self)

    @property
    def line(self) -> str:
        """The proof in words."""
        line = (
            f"Engine: {self.layout} proved: the model is a {self.wrapped_class} over {self.ranks} ranks; trained "
            f"weights and their states per rank: {_mib(self.bytes_by_rank)} of {_mib([self.whole_bytes])} MiB"
        )
        if self.frozen_whole_bytes:
            line += f"; frozen weights: {_mib(self.frozen_bytes_by_rank)} of {_mib([self.frozen_whole_bytes])} MiB"
        if self.frozen_device_bytes_by_rank != self.frozen_bytes_by_rank:
            line += f", {_mib(self.frozen_device_bytes_by_rank)} of them not in RAM"
        return line


def _mib(sizes: Sequence[int]) -> str:
    return ", ".join(f"{size / MIB:.1f}" for size in sizes)


def check_engine(trainer: Any, plan: Plan) -> EngineCheck:
    """The proof that the wrapped model is what the plan says.

    Raises:
        TrainingError: it is not.
    """
    layout = plan.choice.layout
    wrapped = trainer.model_wrapped
    names = {kind.__name__ for kind in type(wrapped).__mro__}
    wanted = WRAPPED_CLASS.get(layout.name)
    if wanted not in names:
        raise TrainingError(
            f"the plan says {layout.name}, but the wrapped model is a {type(wrapped).__name__}, not a {wanted}: the "
            "engine was left out; nothing was trained"
        )
    stage = _zero_stage(wrapped)
    if layout.is_zero and stage != int(layout.name[4]):
        raise TrainingError(f"the plan says {layout.name}, but DeepSpeed runs stage {stage}; nothing was trained")
    whole, mine = held_bytes(trainer)
    frozen, kept_whole = frozen_bytes(wrapped)
    sizes, frozen_sizes = of_all(mine), of_all((frozen.here, frozen.device))
    engine_check = EngineCheck(
        layout.name, type(wrapped).__name__, world_size(), whole, tuple(sizes), frozen.whole,
        tuple(here for here, _ in frozen_sizes), tuple(device for _, device in frozen_sizes),
    )  # fmt: skip
    trained_alike, frozen_alike = (_alike_over_tp(wrapped, trains) for trains in (True, False))
    expected = _share(whole, trained_alike, layout) if layout.shards_states else whole
    _refuse_undivided(layout, "trained", whole, sizes, share=expected)
    cut = [size - kept_whole for size in engine_check.frozen_bytes_by_rank]
    expected = _share(frozen.whole - kept_whole, frozen_alike, layout) if layout.shards_params else frozen.whole
    _refuse_undivided(layout, "frozen", frozen.whole - kept_whole, cut, share=expected)
    return engine_check


def _share(whole: int, alike: int, layout: Layout) -> float:
    """A rank's share of `whole` bytes, of which every rank of a tensor-parallel group has `alike`."""
    return (alike + (whole - alike) / layout.tensor_parallel) / layout.shard


def _alike_over_tp(wrapped: Any, trains: bool) -> int:
    """Bytes of weights that every rank of a tensor-parallel group has: embedding, head and norms; 0 without one."""
    from torch.distributed.tensor import DTensor

    replicated = 0
    for parameter in wrapped.parameters():
        if parameter.requires_grad is trains and isinstance(parameter, DTensor):
            axes = parameter.device_mesh.mesh_dim_names or ()
            if "tp" in axes and parameter.placements[axes.index("tp")].is_replicate():
                replicated += parameter.nbytes
    return replicated


def _refuse_undivided(layout: Layout, what: str, whole: int, sizes: Sequence[int], *, share: float) -> None:
    """Raises TrainingError where a rank holds more than its share of `whole` bytes, or everything is on every rank of a
    tensor-parallel group."""
    if layout.tensor_parallel > 1 and whole and share >= whole / layout.shard:
        share = 0.0  # nothing was divided along the axis: any bytes are too many
    # the fixed part is for small models, where padding alone is more than the slack
    if max(sizes) > share * (1 + SHARD_SLACK) + 4096 * world_size():
        raise TrainingError(
            f"the plan says {layout.name} over {layout.shard * layout.tensor_parallel} ranks, but a rank holds "
            f"{max(sizes):,} of {whole:,} bytes of {what} weights: they are not divided; nothing was trained"
        )


def engine_check_of_one(trainer: Any) -> EngineCheck:
    """The check of one process without an engine: it holds everything."""
    whole, mine = held_bytes(trainer)
    return EngineCheck("single", type(trainer.model_wrapped).__name__, 1, whole, (mine,))


def _zero_stage(wrapped: Any) -> int | None:
    return int(wrapped.zero_optimization_stage()) if is_deepspeed(wrapped) else None


def held_bytes(trainer: Any) -> tuple[int, int]:
    """Bytes of the trained weights, whole and on this rank; under DeepSpeed of the fp32 partitions of them, which its
    optimizer updates."""
    wrapped = trainer.model_wrapped
    trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    if is_deepspeed(wrapped):
        whole = 4 * sum(int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in trained)
        return whole, sum(4 * group.numel() for group in masters(wrapped))
    return sum(parameter.nbytes for parameter in trained), sum(local(parameter).nbytes for parameter in trained)


def frozen_bytes(wrapped: Any) -> tuple[Held, int]:
    """The weights that do not train, and how many bytes of them DeepSpeed keeps whole on every rank on purpose (those
    up to `stage3_param_persistence_threshold`)."""
    whole = here = device = persistent = 0
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            continue
        width = parameter.element_size()
        if hasattr(parameter, "ds_tensor"):
            size = width * parameter.ds_numel
            part = width * parameter.ds_tensor.numel()
            if parameter.ds_persist:
                part = size
                persistent += size
            on_device = parameter.ds_persist or parameter.ds_tensor.device.type == wrapped.device.type
        else:
            size, part, on_device = width * parameter.numel(), width * local(parameter).numel(), True
        whole, here, device = whole + size, here + part, device + (part if on_device else 0)
    return Held(whole, here, device), persistent


def is_deepspeed(wrapped: Any) -> bool:
    """Whether DeepSpeed carries the model."""
    return hasattr(wrapped, "zero_optimization_stage")


def local(tensor: Any) -> Any:
    """This rank's part of a tensor that is divided over ranks; the tensor itself where it is not."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def masters(engine: Any) -> list[torch.Tensor]:
    """DeepSpeed's fp32 partitions of the trained weights on this rank, which its optimizer updates.

    Raises:
        TrainingError: this version of DeepSpeed keeps them elsewhere.
    """
    optimizer = engine.optimizer
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        groups = getattr(optimizer, name, None)
        if groups is not None:
            return list(groups)
    raise TrainingError(
        f"DeepSpeed's {type(optimizer).__name__} keeps its partitions under unknown names; the engine cannot be "
        "checked, and nothing was trained"
    )


def release(trainer: Any) -> None:
    """End the engine of a trainer that is done, so that its model is freed.

    DeepSpeed keeps modules and parameters in tables of its own, which only destroying the engine empties; ZeRO-3 also
    keeps the model in a list of modules and in the caches of its coordinator's methods (0.19).
    """
    engine = getattr(trainer, "deepspeed", None)
    if engine is None:
        return
    engine.destroy()
    from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator

    getattr(parameter_offload, "FWD_MODULE_STACK", []).clear()
    for method in vars(partitioned_param_coordinator.PartitionedParameterCoordinator).values():
        # the cache lies below the decorator that marks the method for profilers
        cells = [cell.cell_contents for cell in getattr(method, "__closure__", None) or ()]
        for cached in (method, *cells):
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()


def whole_state(trainer: Any, *, in_fp32: bool = False) -> dict[str, Any] | None:
    """The state dict to save, gathered from all ranks; all ranks call it. None: every rank holds the whole model.

    `in_fp32`: fully trained weights are read from DeepSpeed's fp32 copies, as adapters always are.
    """
    is_adapter = is_peft_model(trainer.model)
    engine = getattr(trainer, "deepspeed", None)
    if getattr(trainer, "is_fsdp_enabled", False):
        gather = _gathered_adapter if is_adapter else trainer.accelerator.get_state_dict
        state: dict[str, Any] = gather(trainer.model)
    elif engine is not None:
        is_divided = _zero_stage(engine) == 3
        if is_adapter:
            state = _gathered_adapter(engine.module) if is_divided else dict(saved_with_adapter(engine.module))
        else:
            state = engine._zero3_consolidated_16bit_state_dict() or {} if is_divided else engine.module.state_dict()
        is_half = next(engine.module.parameters()).dtype != torch.float32
        state |= _from_masters(engine.module) if is_half and (is_adapter or in_fp32) else {}
    else:
        return None
    if is_adapter:
        return state
    tied = tied_names(trainer.model)
    return {name: tensor for name, tensor in state.items() if name not in tied} if is_first() else {}


def whole_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Names and whole tensors of an FSDP model, tied ones once, gathered one at a time: on the first rank in the host's
    RAM, None on the others. All ranks iterate to the end."""
    tied = tied_names(model)
    for name, tensor in model.state_dict().items():  # its hooks reshard units that a forward pass left whole
        if name not in tied:
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            yield name, whole.detach().cpu() if is_first() else None


def _from_masters(model: Any) -> dict[str, Any]:
    """DeepSpeed's fp32 copies of what trains, gathered tensor by tensor to rank 0, empty on the others."""
    from deepspeed.utils import safe_get_full_fp32_param

    copies: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            whole = safe_get_full_fp32_param(parameter)
            if is_first() and whole is not None:
                copies[name] = whole.detach().cpu()
    return copies


def _gathered_adapter(model: Any) -> dict[str, Any]:
    """What is saved of an adapter, gathered tensor by tensor to rank 0, empty on the others."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward pass may have left the unit whole
    tensors: dict[str, Any] = {}
    for name, parameter in saved_with_adapter(model):
        with gathered_by_zero3(parameter):
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            if is_first():
                tensors[name] = whole.detach().cpu().clone()
    return tensors


def saved_with_adapter(model: Any) -> list[tuple[str, Any]]:
    """Names and parameters that saving an adapter reads: what trains, and the embeddings, which PEFT saves beside it
    where rows were added. The base is not gathered: for a 70B model it would be 141 GB at each checkpoint."""
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    tables = [layer.weight for layer in layers if layer is not None]
    return [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        or any(part in name for part in (".lora_", ".modules_to_save."))  # saved even where it does not train
        or any(parameter is table for table in tables)
    ]


@contextlib.contextmanager
def process_group(plan: Plan, *, timeout_s: float, deepspeed: bool = False) -> Any:
    """The process group of all ranks, made here so that it has our timeout, and destroyed at the end of the run.

    DeepSpeed gets it at once: ZeRO-3 divides weights while they are read, and would otherwise see a world of one rank.
    """
    if plan.choice.layout.ranks == 1 and "RANK" not in os.environ:
        yield
        return
    if not dist.is_initialized():
        backend = "gloo" if plan.hardware.device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
    if deepspeed:
        init_deepspeed(on_cpu=plan.hardware.device == "cpu")
    try:
        yield
    finally:
        _patient.clear()  # the group ends with the default one; the next run needs a new one
        if dist.is_initialized():
            dist.destroy_process_group()


def device_of(plan: Plan, config: RunConfig) -> str | None:
    """Where a rank's weights are loaded to: its GPU; the host for FSDP, which divides them before they move; None for
    ZeRO-3, which divides plain weights while they are read, and takes NF4's from this rank's device, where transformers
    quantises them whole (it refuses a `device_map` under ZeRO-3)."""
    layout = plan.choice.layout
    if layout.is_zero and layout.shards_params:
        return None
    if plan.hardware.device != "cuda":
        return plan.hardware.device
    if layout.is_fsdp and quant_storage(plan, config) is None:
        return "cpu"
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


def quant_storage(plan: Plan, config: RunConfig) -> DtypeName | None:
    """The dtype of packed 4-bit weights: the compute dtype where FSDP divides them, None (bytes) elsewhere."""
    is_quantised = config.tuning.mode == "qlora"
    return plan.precision.compute if plan.choice.layout.is_fsdp and is_quantised else None


def checkpoint_files(trainer: Any) -> tuple[str, ...]:
    """Files without which a checkpoint of this engine cannot be resumed."""
    if getattr(trainer, "is_deepspeed_enabled", False):
        return ("trainer_state.json", "latest")
    if trainer.in_parts:
        return ("trainer_state.json", "scheduler.pt", sharded_checkpoints.CONTENTS, sharded_checkpoints.GROUPS)
    return checkpoints.NEEDED


def total(number: int) -> int:
    """The sum of a number over all ranks."""
    return _reduced(number, dist.ReduceOp.SUM)


def highest(number: int) -> int:
    """The highest of a number that every rank has."""
    return _reduced(number, dist.ReduceOp.MAX)


def any_rank(flag: bool) -> bool:
    """Whether the flag is true on any rank."""
    return bool(highest(int(flag)))


def _reduced(number: int, operation: Any) -> int:
    if world_size() == 1:
        return number
    tensor = torch.tensor(number, dtype=torch.int64)
    if dist.get_backend() == "nccl":
        tensor = tensor.cuda()
    dist.all_reduce(tensor, op=operation)
    return int(tensor.item())


def of_first(value: Any) -> Any:
    """Rank 0's value (plain data), on every rank."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def of_all(value: Any) -> list[Any]:
    """The value (plain data) of every rank, on all ranks."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def require_all(holds: bool, otherwise: str) -> None:
    """Raises RunFolderError on every rank with the text of `otherwise`, naming the ranks where it does not hold."""
    failing = [f"rank {rank} on {host}" for rank, (host, fine) in enumerate(of_all((_HOST, holds))) if not fine]
    if failing:
        raise RunFolderError(f"{', '.join(failing)}: {otherwise}")


def require_alike(facts: Mapping[str, str]) -> None:
    """Raises ConfigError on every rank where what each rank read for itself differs from what rank 0 read."""
    (first_host, first), *others = of_all((_HOST, dict(facts)))
    for rank, (host, theirs) in enumerate(others, start=1):
        differing = [name for name in {**first, **theirs} if first.get(name) != theirs.get(name)]
        if differing:
            listed = "; ".join(f"{name} ({first.get(name)} there, {theirs.get(name)} here)" for name in differing)
            raise ConfigError(
                f"rank {rank} on {host} does not train what rank 0 on {first_host} trains: they differ in {listed}; "
                "give all nodes the same files, settings and packages"
            )


def require_disk(written: Path, plan: Plan) -> bool:
    """Whether all ranks see what rank 0 has just written; logged where they do not.

    Raises:
        RunFolderError: they do not, and DeepSpeed is the engine, whose ranks each write a part of every checkpoint.
    """
    if plan.hardware.nodes == 1:
        return True
    seen = written.read_bytes() if written.is_file() else b""
    shared = seen == of_first(seen)
    if plan.choice.layout.is_zero:
        require_all(
            shared,
            f"{written.parent} is not on a disk that all nodes share, and under {plan.layout} every rank writes a part "
            "of each checkpoint there: set output.dir to a shared disk, or use STRATEGY=ddp or fsdp",
        )
    if all(of_all(shared)):
        return True
    logger.info("The nodes have disks of their own: checkpoints and the trained weights are on rank 0's; to resume "
                "from a checkpoint, copy %s to every node first", written.parent)  # fmt: skip
    if plan.memory.checkpoint == "sharded" and is_first():
        logger.warning(
            "Checkpoints: each rank should write its part, which needs a disk that all nodes share; instead rank 0 "
            "gathers and writes all %.1f GiB, using %.1f GiB of its RAM: set output.dir to a shared disk",
            plan.memory.checkpoint_bytes / GIB, plan.memory.host_gather_bytes / GIB,
        )  # fmt: skip
    return False


def gathered(files: Mapping[str, bytes]) -> list[tuple[str, bytes]]:
    """The files of all ranks on the first one, nothing on the others; all ranks call it."""
    of_ranks: list[Any] | None = [None] * world_size() if is_first() else None
    dist.gather_object(dict(files), of_ranks)
    return [item for part in of_ranks or () for item in part.items()]


def gathered_numbers(numbers: torch.Tensor) -> list[list[float]]:
    """A vector of numbers of every rank, on all ranks."""
    if world_size() == 1:
        return [numbers.tolist()]
    parts = [torch.empty_like(numbers) for _ in range(world_size())]
    dist.all_gather(parts, numbers)
    return [part.tolist() for part in parts]


def batch_rank(layout: Layout) -> int:
    """This rank's number among those that get rows, or parts of rows, of their own."""
    return (dist.get_rank() if dist.is_initialized() else 0) // layout.tensor_parallel
