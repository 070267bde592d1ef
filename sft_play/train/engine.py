"""What carries a step over several ranks: DDP, FSDP2 or DeepSpeed, set up from the plan and proved from live objects.

Every engine is reached through the Trainer's own arguments. What an engine really did is read from the wrapped model,
since one that was asked for can be left out without a word.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.utils import DDPCommunicationHookType, is_peft_model
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from transformers import TrainerCallback

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, RunFolderError, TrainingError
from sft_play.plan.gradients import gradients_of
from sft_play.plan.layout import Layout
from sft_play.plan.memory import GIB
from sft_play.plan.plan import Plan
from sft_play.plan.precision import SHORT, DtypeName
from sft_play.train import checkpoints, sharded_checkpoints

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
"""How long ranks wait for a disk at most: the heartbeat ends a wait for one that hangs, since it sees bytes move."""
SHARD_SLACK = 0.10
"""How much more than its share of the bytes a rank may hold: padding of uneven parts."""


def world_size() -> int:
    """Ranks of this run; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this is rank 0, or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0


def barrier(group: Any = None) -> None:
    """Wait for all ranks; nothing for one."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier(group)


_patient: dict[Any, Any] = {}


def patient() -> Any:
    """A process group of all ranks on the CPU that waits as long as a disk takes, where the run's own would give up
    after `distributed.timeout_s`; None for one process. All ranks call it."""
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
    found: dict[str, Any] = {"ddp_find_unused_parameters": config.distributed.find_unused_parameters}
    on_cpu = plan.hardware.device == "cpu"
    if deepspeed is not None:
        if on_cpu:
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
            found["ddp_backend"] = "gloo"
        return {**found, "deepspeed": dict(deepspeed)}
    if on_cpu:
        found["ddp_backend"] = "gloo"
    if gradients_of(config, plan.precision, plan.layout).every == "micro_batch":
        # else accelerate adds gradients up in a step's last pass alone: FSDP2 keeps whole ones on every rank until then
        found["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    if plan.choice.layout.is_fsdp:
        found["fsdp"] = True
        found["fsdp_config"] = {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": [layer_class],
            "reshard_after_forward": True,
            "cpu_ram_efficient_loading": False,
            "state_dict_type": "FULL_STATE_DICT",
        }
    found |= _axes(plan.choice.layout)
    return found


class _WithTensorParallel(ParallelismConfig):
    """The axes of accelerate's device mesh with one for tensor parallelism, which accelerate does not prepare for.

    Its own way (`Accelerator._prepare_tp` of 1.15) imports a class that transformers has no more from 5.17 on, and
    FSDP2 with one shard is refused. Here the model is divided before (`tensor_parallel.divide`), and of the axis
    accelerate has to know only that ranks along it are handed the same rows.
    """

    @property
    def tp_enabled(self) -> bool:
        """Whether accelerate is to divide the model: no."""
        return False

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether there is an axis for FSDP2: always, of size 1 too."""
        return True

    @property
    def active_mesh_dims(self) -> list[str]:
        """The axes of the mesh."""
        return [*self.dp_dim_names, "tp"]


def _axes(layout: Layout) -> dict[str, Any]:
    """The Trainer's argument for layouts of more than one axis. Context parallelism has none: to the engine, its ranks
    are FSDP2's like any others, whose rows are parts of rows."""
    ranks = layout.gradient_ranks
    if not layout.is_fsdp or (layout.tensor_parallel == 1 and ranks == layout.shard):
        return {}
    kind = _WithTensorParallel if layout.tensor_parallel > 1 else ParallelismConfig
    sizes = {"dp_replicate_size": ranks // layout.shard, "dp_shard_size": layout.shard}
    return {"parallelism_config": kind(**sizes, tp_size=layout.tensor_parallel)}


def allow_fsdp_on_cpu(plan: Plan) -> None:
    """Let accelerate shard over CPU ranks, which it takes for DDP whatever is asked for.

    `AcceleratorState` looks at FSDP only where the distributed type is one of several GPUs. Between the Trainer's
    arguments, which make the process group, and the Trainer, which makes that state, the type is changed; the device
    stays the CPU. Used for CPU ranks alone, and `prove` looks at what came of it.

    Raises:
        TrainingError: accelerate keeps its state in another way than this knows.
    """
    if not plan.choice.layout.is_fsdp or plan.hardware.device != "cpu":
        return
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    state = PartialState._shared_state
    if state.get("distributed_type") is not DistributedType.MULTI_CPU:
        raise TrainingError(
            f"FSDP on CPU ranks: accelerate's state has the type {state.get('distributed_type')}, and MULTI_CPU was "
            "expected; this version of accelerate is not known: take another layout (STRATEGY=ddp)"
        )
    state["distributed_type"] = DistributedType.MULTI_GPU


def tell_accumulation(trainer: Any, plan: Plan) -> None:
    """Tell accelerate how many passes make a step, where DeepSpeed counts them.

    transformers tells it 1, since its own loop accumulates; accelerate would take DeepSpeed's number at the first step,
    with a warning that the two differ. Without DeepSpeed it would divide every loss by the number, and is left alone.
    """
    if trainer.is_deepspeed_enabled:
        trainer.accelerator.gradient_accumulation_steps = plan.batch.grad_accum


def set_dtypes(trainer: Any, plan: Plan, config: RunConfig) -> None:
    """Hand accelerate the dtypes of gathered weights and of gradients on their way, before it wraps the model.

    transformers' arguments have no word for them; accelerate's own objects do: the hook that DDP compresses gradients
    with, and FSDP2's policy. DeepSpeed has read its from its configuration.
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
    """Bytes that this rank holds of some weights, and of the same weights whole. `device` counts those that are on the
    device that computes; the rest is offloaded to RAM."""

    whole: int
    here: int
    device: int


@dataclass(frozen=True)
class Proof:
    """What an engine made of the model, read from live objects: bytes are those that each rank holds.

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
        """`engine_proof` in plain data."""
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
    return ", ".join(f"{size / 2**20:.1f}" for size in sizes)


def prove(trainer: Any, plan: Plan) -> Proof:
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
            f"the plan says {layout.name}, and the wrapped model is a {type(wrapped).__name__}, no {wanted}: the "
            "engine was left out; nothing was trained"
        )
    stage = _zero_stage(wrapped)
    if layout.is_zero and stage != int(layout.name[4]):
        raise TrainingError(f"the plan says {layout.name}, and DeepSpeed runs stage {stage}; nothing was trained")
    whole, mine = held_bytes(trainer)
    frozen, kept_whole = frozen_bytes(wrapped)
    sizes, frozen_sizes = of_all(mine), of_all((frozen.here, frozen.device))
    proof = Proof(
        layout.name, type(wrapped).__name__, world_size(), whole, tuple(sizes), frozen.whole,
        tuple(here for here, _ in frozen_sizes), tuple(device for _, device in frozen_sizes),
    )  # fmt: skip
    trained_alike, frozen_alike = (_alike_over_tp(wrapped, trains) for trains in (True, False))
    expected = _share(whole, trained_alike, layout) if layout.shards_states else whole
    _refuse_undivided(layout, "trained", whole, sizes, share=expected)
    cut = [size - kept_whole for size in proof.frozen_bytes_by_rank]
    expected = _share(frozen.whole - kept_whole, frozen_alike, layout) if layout.shards_params else frozen.whole
    _refuse_undivided(layout, "frozen", frozen.whole - kept_whole, cut, share=expected)
    return proof


def _share(whole: int, alike: int, layout: Layout) -> float:
    """A rank's share of `whole` bytes, of which every rank of a tensor-parallel group has `alike`."""
    return (alike + (whole - alike) / layout.tensor_parallel) / layout.shard


def _alike_over_tp(wrapped: Any, trains: bool) -> int:
    """Bytes of weights that every rank of a tensor-parallel group has: embedding, head and norms; 0 without one."""
    from torch.distributed.tensor import DTensor

    found = 0
    for parameter in wrapped.parameters():
        if parameter.requires_grad is trains and isinstance(parameter, DTensor):
            axes = parameter.device_mesh.mesh_dim_names or ()
            if "tp" in axes and parameter.placements[axes.index("tp")].is_replicate():
                found += parameter.numel() * parameter.element_size()
    return found


def _refuse_undivided(layout: Layout, what: str, whole: int, sizes: Sequence[int], *, share: float) -> None:
    """Raises TrainingError where a rank holds more than its share of `whole` bytes, or everything is on every rank of a
    tensor-parallel group."""
    if layout.tensor_parallel > 1 and whole and share >= whole / layout.shard:
        share = 0.0
    if max(sizes) > share * (1 + SHARD_SLACK) + 4096 * world_size():
        raise TrainingError(
            f"the plan says {layout.name} over {layout.shard * layout.tensor_parallel} ranks, and a rank holds "
            f"{max(sizes):,} of {whole:,} bytes of {what} weights: they are not divided; nothing was trained"
        )


def proof_of_one(trainer: Any) -> Proof:
    """The same of one process without an engine: it holds everything."""
    whole, mine = held_bytes(trainer)
    return Proof("single", type(trainer.model_wrapped).__name__, 1, whole, (mine,))


def _zero_stage(wrapped: Any) -> int | None:
    return int(wrapped.zero_optimization_stage()) if is_deepspeed(wrapped) else None


def held_bytes(trainer: Any) -> tuple[int, int]:
    """Bytes of the trained weights (ZeRO-1 and -2: of the fp32 masters that the optimizer updates), whole and here."""
    from torch.distributed.tensor import DTensor

    wrapped = trainer.model_wrapped
    if is_deepspeed(wrapped):
        return _zero_bytes(wrapped)
    whole = mine = 0
    for parameter in wrapped.parameters():
        if not parameter.requires_grad:
            continue
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        whole += parameter.numel() * parameter.element_size()
        mine += local.numel() * local.element_size()
    return whole, mine


def frozen_bytes(wrapped: Any) -> tuple[Held, int]:
    """The weights that do not train, and how many bytes of them DeepSpeed keeps whole on every rank on purpose (those
    up to `stage3_param_persistence_threshold`)."""
    from torch.distributed.tensor import DTensor

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
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            size, part, on_device = width * parameter.numel(), width * local.numel(), True
        whole, here, device = whole + size, here + part, device + (part if on_device else 0)
    return Held(whole, here, device), persistent


def is_deepspeed(wrapped: Any) -> bool:
    """Whether DeepSpeed carries the model."""
    return hasattr(wrapped, "zero_optimization_stage")


def local(tensor: Any) -> Any:
    """This rank's part of a tensor that is divided over ranks, or the tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _zero_bytes(engine: Any) -> tuple[int, int]:
    """Whole and own bytes of DeepSpeed's fp32 partitions of the trained weights."""
    trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    whole = 4 * sum(int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in trained)
    return whole, sum(4 * group.numel() for group in masters(engine))


def masters(engine: Any) -> list[torch.Tensor]:
    """DeepSpeed's fp32 partitions of the trained weights on this rank, which its optimizer steps.

    Raises:
        TrainingError: this version keeps them elsewhere.
    """
    optimizer = engine.optimizer
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        groups = getattr(optimizer, name, None)
        if groups is not None:
            return list(groups)
    raise TrainingError(
        f"DeepSpeed's {type(optimizer).__name__} keeps its partitions under names that are not known here; the engine "
        "cannot be proved, and nothing was trained"
    )


class ProveEngine(TrainerCallback):
    """Proves the engine once the Trainer has wrapped the model, before the first step."""

    def __init__(self, plan: Plan, loaded: Callable[[], None] = lambda: None) -> None:
        """`loaded` is called once the model is there as it trains."""
        self._plan, self._loaded = plan, loaded
        self.trainer: Any = None
        self.proof: Proof | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Look, say and stop where it is not what the plan says."""
        self.proof = prove(self.trainer, self._plan)
        logger.info("%s", self.proof.line)
        self._loaded()


def release(trainer: Any) -> None:
    """End the engine of a trainer that has nothing more to do, so that its model goes with it.

    DeepSpeed keeps modules and parameters in tables of its own, which only ending the engine empties; ZeRO-3 keeps the
    model in a list of modules too, and in the caches of its coordinator's methods (0.19).
    """
    engine = getattr(trainer, "deepspeed", None)
    if engine is None:
        return
    engine.destroy()
    from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator

    getattr(parameter_offload, "FWD_MODULE_STACK", []).clear()
    for method in vars(partitioned_param_coordinator.PartitionedParameterCoordinator).values():
        cells = [cell.cell_contents for cell in getattr(method, "__closure__", None) or ()]  # below its profiling marks
        for cached in (method, *cells):
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()


def whole_state(trainer: Any, *, in_fp32: bool = False) -> dict[str, Any] | None:
    """The state dict to save, gathered from all ranks; all ranks call it. None: the model holds its own whole one.

    `in_fp32`: whole weights that trained in full are read from DeepSpeed's fp32 copies, as adapters always are.
    """
    is_adapter = is_peft_model(trainer.model)
    engine = getattr(trainer, "deepspeed", None)
    if getattr(trainer, "is_fsdp_enabled", False):
        gather = _adapter_of_fsdp if is_adapter else trainer.accelerator.get_state_dict
        state: dict[str, Any] = gather(trainer.model)
    elif engine is not None:
        state = _state_of_zero(engine, is_adapter=is_adapter)
        is_half = next(engine.module.parameters()).dtype != torch.float32
        state |= _from_masters(engine.module) if is_half and (is_adapter or in_fp32) else {}
    else:
        return None
    if is_adapter:
        return state
    tied = set(getattr(trainer.model, "all_tied_weights_keys", None) or ())  # gathered apart, written once
    return {name: tensor for name, tensor in state.items() if name not in tied} if is_first() else {}


def whole_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Names and whole tensors of an FSDP model, tied ones once, gathered one at a time: on the first rank in the host's
    RAM, None on the others. All ranks go through all of it."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    for name, tensor in model.state_dict().items():  # its hooks cut units that a forward pass has left whole
        if name not in tied:
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            yield name, whole.detach().cpu() if is_first() else None


def _state_of_zero(engine: Any, *, is_adapter: bool) -> dict[str, Any]:
    """What is saved of DeepSpeed's model as it computes, on rank 0."""
    if _zero_stage(engine) != 3:
        return dict(saved_with_adapter(engine.module) if is_adapter else engine.module.state_dict())
    if is_adapter:
        return _adapter_of_zero3(engine.module)
    return engine._zero3_consolidated_16bit_state_dict() or {}


def _from_masters(model: Any) -> dict[str, Any]:
    """DeepSpeed's fp32 copies of what trains, gathered tensor by tensor to rank 0, empty on the others."""
    from deepspeed.utils import safe_get_full_fp32_param

    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            whole = safe_get_full_fp32_param(parameter)
            if is_first() and whole is not None:
                found[name] = whole.detach().cpu()
    return found


def _adapter_of_zero3(model: Any) -> dict[str, Any]:
    """What is saved of an adapter, gathered tensor by tensor to rank 0, empty on the others."""
    import deepspeed

    found: dict[str, Any] = {}
    for name, parameter in saved_with_adapter(model):
        with deepspeed.zero.GatheredParameters([parameter]):
            if is_first():
                found[name] = parameter.detach().cpu().clone()
    return found


def _adapter_of_fsdp(model: Any) -> dict[str, Any]:
    """The same under FSDP2, whose units are cut again where a forward pass has left them whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    found: dict[str, Any] = {}
    for name, parameter in saved_with_adapter(model):
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        if is_first():
            found[name] = whole.detach().cpu().clone()
    return found


def saved_with_adapter(model: Any) -> list[tuple[str, Any]]:
    """Names and parameters that saving an adapter reads: what trains, and the embeddings, which PEFT saves beside it
    where rows were added. The base stays where it is: of a 70B it would be 141 GB, gathered for each checkpoint."""
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    tables = [layer.weight for layer in layers if layer is not None]
    return [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        or any(part in name for part in (".lora_", ".modules_to_save."))  # saved where it does not train, too
        or any(parameter is table for table in tables)
    ]


@contextlib.contextmanager
def process_group(plan: Plan, *, timeout_s: float, deepspeed: bool = False) -> Any:
    """The process group of all ranks, made here so that its timeout is ours, and ended with the run.

    DeepSpeed is told of it at once: ZeRO-3 divides weights while they are read, and would count a world of one rank.
    """
    if plan.choice.layout.ranks == 1 and "RANK" not in os.environ:
        yield
        return
    if not dist.is_initialized():
        backend = "gloo" if plan.hardware.device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
    if deepspeed:
        if plan.hardware.device == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        from deepspeed import comm

        comm.init_distributed("gloo" if plan.hardware.device == "cpu" else "nccl", auto_mpi_discovery=False)
    try:
        yield
    finally:
        _patient.clear()
        if dist.is_initialized():
            dist.destroy_process_group()


def device_of(plan: Plan, config: RunConfig) -> str | None:
    """Where a rank's weights are loaded to: its GPU; the host for FSDP, which divides them before they move; None for
    ZeRO-3, which divides plain weights while they are read, and takes NF4's from this rank's device, where transformers
    makes them whole (it refuses to be told a place under ZeRO-3)."""
    layout = plan.choice.layout
    if layout.is_zero and layout.shards_params:
        return None
    if plan.hardware.device != "cuda":
        return plan.hardware.device
    if layout.is_fsdp and quant_storage(plan, config) is None:
        return "cpu"
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


def quant_storage(plan: Plan, config: RunConfig) -> DtypeName | None:
    """The dtype of packed 4-bit weights: that of the computation where FSDP divides them, else bytes."""
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
    if world_size() == 1:
        return number
    answer = torch.tensor(number, dtype=torch.int64)
    if dist.get_backend() == "nccl":
        answer = answer.cuda()
    dist.all_reduce(answer)
    return int(answer.item())


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
    found: list[Any] = [None] * world_size()
    dist.all_gather_object(found, value)
    return found


def require_all(holds: bool, otherwise: str) -> None:
    """Raises RunFolderError on every rank, naming those where it does not hold."""
    lacking = [f"rank {rank} on {host}" for rank, (host, fine) in enumerate(of_all((_HOST, holds))) if not fine]
    if lacking:
        raise RunFolderError(f"{', '.join(lacking)}: {otherwise}")


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
    """Whether all ranks see what rank 0 has just written; said where they do not.

    Raises:
        RunFolderError: DeepSpeed runs it, whose ranks each write a part of every checkpoint.
    """
    if plan.hardware.nodes == 1:
        return True
    seen = written.read_bytes() if written.is_file() else b""
    shared = seen == of_first(seen)
    if plan.choice.layout.is_zero:
        require_all(
            shared,
            f"{written.parent} is not on a disk that all nodes share, and under {plan.layout} every rank writes a part "
            "of each checkpoint there: set output.dir to a shared disk, or take STRATEGY=ddp or fsdp",
        )
    if all(of_all(shared)):
        return True
    logger.info("The nodes have disks of their own: checkpoints and the trained weights are on rank 0's; to go on "
                "from a checkpoint, copy %s to every node first", written.parent)  # fmt: skip
    if plan.memory.checkpoint == "sharded" and is_first():
        logger.warning(
            "Checkpoints: each rank was to write its part, which needs a disk that all nodes share; rank 0 gathers and "
            "writes all %.1f GiB instead, with %.1f GiB of its RAM: set output.dir to a shared disk",
            plan.memory.checkpoint_bytes / GIB, plan.memory.host_gather_bytes / GIB,
        )  # fmt: skip
    return False


def gathered(files: Mapping[str, bytes]) -> list[tuple[str, bytes]]:
    """The files of all ranks on the first one, nothing on the others; all ranks call it."""
    found: list[Any] | None = [None] * world_size() if is_first() else None
    dist.gather_object(dict(files), found)
    return [item for part in found or () for item in part.items()]


def gathered_numbers(numbers: torch.Tensor) -> list[list[float]]:
    """A vector of numbers of every rank, on all ranks."""
    if world_size() == 1:
        return [numbers.tolist()]
    parts = [torch.empty_like(numbers) for _ in range(world_size())]
    dist.all_gather(parts, numbers)
    return [part.tolist() for part in parts]


def any_rank(flag: bool) -> bool:
    """Whether the flag is true on any rank."""
    return bool(highest(int(flag)))


def batch_rank(layout: Layout) -> int:
    """This rank's place among those that see rows, or parts of rows, of their own."""
    return (dist.get_rank() if dist.is_initialized() else 0) // layout.tensor_parallel


def highest(number: int) -> int:
    """The highest of a number that every rank has."""
    if world_size() == 1:
        return number
    answer = torch.tensor(number)
    if dist.get_backend() == "nccl":
        answer = answer.cuda()
    dist.all_reduce(answer, op=dist.ReduceOp.MAX)
    return int(answer.item())
