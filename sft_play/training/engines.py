"""What runs a step over several ranks (DDP, FSDP2 or DeepSpeed, by the Trainer's arguments), and
the proof that it does, read from live objects before the first step: transformers and accelerate
can leave out an engine without a warning."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import ParallelismConfig
from accelerate.utils import DDPCommunicationHookType
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from sft_play.config.schema import RunConfig
from sft_play.errors import TrainingError
from sft_play.planner.layout import Layout
from sft_play.planner.plan import Plan
from sft_play.planner.precision import DTYPE_SHORT_NAMES, DtypeName, gradient_sync
from sft_play.process.environment import set_deepspeed_to_cpu
from sft_play.training import distributed


def engine_arguments(
    plan: Plan,
    config: RunConfig,
    *,
    layer_class: str,
    deepspeed: Mapping[str, Any] | None,
    has_late_gradients: bool = False,
) -> dict[str, Any]:
    """The Trainer's arguments that turn the plan's layout on. `has_late_gradients`: some rows give
    some tensors no gradient."""
    if plan.choice.layout.is_one_process and deepspeed is None:
        return {}
    arguments: dict[str, Any] = {
        "ddp_find_unused_parameters": (
            config.distributed.find_unused_parameters or has_late_gradients
        )
    }
    on_cpu = plan.hardware.device == "cpu"
    if on_cpu:
        arguments["ddp_backend"] = "gloo"
    if deepspeed is not None:
        if on_cpu:
            set_deepspeed_to_cpu()
        return {**arguments, "deepspeed": dict(deepspeed)}
    if gradient_sync(config, plan.precision, plan.layout).interval != "step":
        # else the Trainer reduces gradients only in a step's last micro-step: until then FSDP2
        # keeps whole ones
        arguments["accelerator_config"] = {
            "gradient_accumulation_kwargs": {"sync_each_batch": True}
        }
    if plan.choice.layout.is_fsdp:
        arguments["fsdp"] = True
        arguments["fsdp_config"] = {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": [layer_class],
            "reshard_after_forward": True,
            # `model_loading` reads the weights, or every rank has them
            "cpu_ram_efficient_loading": (False),
            # with another, Trainer.save_model writes no weights at all
            "state_dict_type": ("FULL_STATE_DICT"),
        }
    layout = plan.choice.layout
    # context parallelism: to FSDP2 these are data-parallel ranks with shorter rows
    ranks = layout.gradient_ranks
    if layout.is_fsdp and (layout.tensor_parallel > 1 or ranks > layout.shard):
        config_class = _TensorParallelConfig if layout.tensor_parallel > 1 else ParallelismConfig
        arguments["parallelism_config"] = config_class(
            dp_replicate_size=ranks // layout.shard,
            dp_shard_size=layout.shard,
            tp_size=layout.tensor_parallel,
        )
    return arguments


# Accelerate's own way (1.15) imports a class that transformers removed;
# `tensor_parallel.divide_model` divides.
class _TensorParallelConfig(ParallelismConfig):
    @property
    def tp_enabled(self) -> bool:
        return False

    @property
    def dp_shard_enabled(self) -> bool:
        return True  # even of size 1

    @property
    def active_mesh_dims(self) -> list[str]:
        return [*self.dp_dim_names, "tp"]


def set_gradient_reduction(trainer: Any, plan: Plan, config: RunConfig) -> None:
    """Tell the loop after how many micro-steps ranks reduce gradients, and accelerate's own objects
    the dtypes of gathered weights and reduced gradients, which transformers' arguments cannot
    express; before it wraps the model.
    """
    if trainer.is_deepspeed_enabled:
        # micro-steps that make a step: transformers says 1, since its own loop accumulates, and
        # accelerate would warn
        trainer.accelerator.gradient_accumulation_steps = plan.trainer_batch.grad_accum
    if plan.choice.layout.is_one_process:
        return
    gradients = gradient_sync(config, plan.precision, plan.layout)
    if isinstance(gradients.interval, int):
        trainer.micro_steps_per_reduction = gradients.interval
    if plan.layout in ("ddp", "streamed") and gradients.is_compressed:
        trainer.accelerator.ddp_handler.comm_hook = DDPCommunicationHookType(
            DTYPE_SHORT_NAMES[gradients.reduced_dtype]
        )
    if plan.choice.layout.is_fsdp and (
        gradients.is_compressed or gradients.gathered_dtype != plan.precision.compute
    ):
        # None: FSDP2 casts nothing. A dtype casts the inputs of every unit too, and its output
        is_fp32 = gradients.gathered_dtype == plan.precision.compute == "float32"
        param_dtype = None if is_fp32 else getattr(torch, gradients.gathered_dtype)
        trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=param_dtype,
            reduce_dtype=getattr(torch, gradients.reduced_dtype),
            output_dtype=param_dtype,
        )


def is_deepspeed(wrapped: Any) -> bool:
    """Whether the model is wrapped by DeepSpeed."""
    return hasattr(wrapped, "zero_optimization_stage")


def local_shard(tensor: Any) -> Any:
    """This rank's part of a tensor that is divided over ranks; the tensor itself where it is
    not."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def unwrap_optimizer(optimizer: Any) -> Any:
    """The optimizer inside accelerate's wrapper, and inside DeepSpeed's."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def checkpoint_bytes(trainer: Any) -> int:
    """The least that a checkpoint takes: what trains, with the optimizer's states. All ranks call
    it."""
    values = [
        value
        for state in unwrap_optimizer(trainer.optimizer).state.values()
        for value in state.values()
    ]
    state_bytes: int = sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
    if is_deepspeed(trainer.model_wrapped):
        state_bytes += sum(partition.nbytes for partition in fp32_partitions(trainer.model_wrapped))
        state_bytes = distributed.sum_over_ranks(state_bytes)
    return trained_bytes(trainer) + state_bytes


def trained_bytes(trainer: Any, dtype: torch.dtype | None = None) -> int:
    """What the weights that train take on all ranks together, in this dtype or their own."""
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    return sum(
        int(getattr(weight, "ds_numel", weight.numel())) * (dtype or weight.dtype).itemsize
        for weight in trained
    )


def fp32_partitions(engine: Any) -> list[torch.Tensor]:
    """DeepSpeed's fp32 partitions of the trained weights. Raises TrainingError: it keeps them under
    other names, as with data_types.grad_accum_dtype=fp32 at stage 1."""
    optimizer = engine.optimizer
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    raise TrainingError(
        f"DeepSpeed's {type(optimizer).__name__} keeps its partitions under unknown names; the"
        " engine cannot be checked, and nothing was trained"
    )


def stepped_parameters(trainer: Any) -> list[nn.Parameter]:
    """The parameters that train: the optimizer's own, since a model under FSDP has whole ones in
    their place from an evaluation to the next pass; under DeepSpeed, whose optimizer has none of
    them, the model's."""
    if is_deepspeed(trainer.model_wrapped):
        return [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    groups = unwrap_optimizer(trainer.optimizer).param_groups
    return [parameter for group in groups for parameter in group["params"]]


def release_engine(trainer: Any) -> None:
    """End the engine of a trainer that is done, so that its model is freed: DeepSpeed keeps modules
    in tables that only destroying it empties; ZeRO-3 in a list and in the caches of its
    coordinator's methods too (0.19).
    """
    engine = getattr(trainer, "deepspeed", None)
    if engine is None:
        return
    engine.destroy()
    from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator

    parameter_offload.FWD_MODULE_STACK.clear()
    for method in vars(partitioned_param_coordinator.PartitionedParameterCoordinator).values():
        # the cache lies below the decorator that marks the method for profilers
        cells = [cell.cell_contents for cell in getattr(method, "__closure__", None) or ()]
        for cached in (method, *cells):
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()


def load_device(plan: Plan, config: RunConfig) -> str | None:
    """Where a rank's weights are loaded to: its GPU; the host for FSDP, which divides them there,
    and for a streamed base, which stays there;
    None for ZeRO-3, where transformers refuses a `device_map`."""
    layout = plan.choice.layout
    if layout.is_zero and layout.shards_params:
        return None
    if plan.hardware.device != "cuda":
        return plan.hardware.device
    if layout.is_streamed or (layout.is_fsdp and quant_storage(plan, config) is None):
        return "cpu"
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


def quant_storage(plan: Plan, config: RunConfig) -> DtypeName | None:
    """The dtype of packed 4-bit weights: the compute dtype where FSDP divides them, None (bytes)
    elsewhere."""
    if plan.choice.layout.is_fsdp and config.tuning.mode == "qlora":
        return plan.precision.compute
    return None


# --- the proof ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineCheck:
    """What an engine did with the model; bytes are what each rank holds. `frozen_*` are the weights
    that do not train, as they are stored (NF4's packed bytes, without its constants)."""

    layout: str
    wrapped_class: str
    ranks: int
    whole_bytes: int
    bytes_by_rank: tuple[int, ...]
    frozen_whole_bytes: int = 0
    frozen_bytes_by_rank: tuple[int, ...] = ()


def check_engine(trainer: Any, plan: Plan) -> EngineCheck:
    """Check that the wrapped model is what the plan says; returns what ranks hold. Raises
    TrainingError: it is not."""
    layout = plan.choice.layout
    wrapped = trainer.model_wrapped
    if layout.is_streamed:
        trainer.block_stream.require_streamed()
    class_names = {base_class.__name__ for base_class in type(wrapped).__mro__}
    expected_class = "DistributedDataParallel"  # of streamed ranks too
    if layout.is_zero:
        expected_class = "DeepSpeedEngine"
    elif layout.is_fsdp:
        expected_class = "FSDPModule"
    if expected_class not in class_names:
        raise TrainingError(
            f"the plan says {layout.name}, but the wrapped model is a {type(wrapped).__name__}, not"
            f" a {expected_class}; nothing was trained"
        )
    # zeroN, zeroN_offload
    if layout.is_zero and (stage := wrapped.zero_optimization_stage()) != int(layout.name[4]):
        raise TrainingError(
            f"the plan says {layout.name}, but DeepSpeed runs stage {stage}; nothing was trained"
        )
    whole_bytes, local_bytes = trained_bytes_held(trainer)
    frozen_whole_bytes, frozen_local_bytes, persistent_bytes = frozen_bytes(wrapped)
    sizes, frozen_sizes = (
        distributed.gather_values(local_bytes),
        distributed.gather_values(frozen_local_bytes),
    )
    if layout.shards_states:
        _require_divided(wrapped, layout, "trained", whole_bytes, sizes)
    if layout.shards_params:
        _require_divided(
            wrapped,
            layout,
            "frozen",
            frozen_whole_bytes - persistent_bytes,
            [frozen_size - persistent_bytes for frozen_size in frozen_sizes],
        )
    return EngineCheck(
        layout.name,
        type(wrapped).__name__,
        distributed.world_size(),
        whole_bytes,
        tuple(sizes),
        frozen_whole_bytes,
        tuple(frozen_sizes),
    )


def _require_divided(
    wrapped: Any, layout: Layout, kind: str, whole_bytes: int, sizes: Sequence[int]
) -> None:
    replicated = 0  # embedding, head and norms, which every tensor-parallel rank has
    for parameter in wrapped.parameters():
        if parameter.requires_grad is (kind == "trained") and isinstance(parameter, DTensor):
            axes = parameter.device_mesh.mesh_dim_names or ()
            if "tp" in axes and parameter.placements[axes.index("tp")].is_replicate():
                replicated += parameter.nbytes
    share = (replicated + (whole_bytes - replicated) / layout.tensor_parallel) / layout.shard
    if layout.tensor_parallel > 1 and whole_bytes and share >= whole_bytes / layout.shard:
        share = 0.0  # nothing was divided along the axis: any bytes are too many
    # a tenth more, since uneven parts are padded; the fixed part is for small models, where padding
    # alone is more
    if max(sizes) > 1.1 * share + 4096 * distributed.world_size():
        raise TrainingError(
            f"the plan says {layout.name} over {layout.shard * layout.tensor_parallel} ranks, but a"
            f" rank holds {max(sizes):,} of {whole_bytes:,} bytes of {kind} weights: they are not"
            " divided; nothing was trained"
        )


def single_process_check(trainer: Any, layout: str) -> EngineCheck:
    """The check of one process without an engine: it holds everything that trains. Raises
    TrainingError: a streamed base is not."""
    if layout == "streamed":
        trainer.block_stream.require_streamed()
    whole_bytes, local_bytes = trained_bytes_held(trainer)
    return EngineCheck(layout, type(trainer.model_wrapped).__name__, 1, whole_bytes, (local_bytes,))


def trained_bytes_held(trainer: Any) -> tuple[int, int]:
    """Bytes of the trained weights, whole and on this rank; under DeepSpeed of their fp32
    partitions."""
    wrapped = trainer.model_wrapped
    trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    if is_deepspeed(wrapped):
        whole_bytes = 4 * sum(
            int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in trained
        )
        return whole_bytes, sum(4 * group.numel() for group in fp32_partitions(wrapped))
    return sum(parameter.nbytes for parameter in trained), sum(
        local_shard(parameter).nbytes for parameter in trained
    )


def frozen_bytes(wrapped: Any) -> tuple[int, int, int]:
    """Bytes of the weights that do not train: whole, on this rank, and what DeepSpeed keeps whole
    on every rank on purpose (up to `stage3_param_persistence_threshold`)."""
    whole_bytes = local_bytes = persistent_bytes = 0
    for parameter in (weight for weight in wrapped.parameters() if not weight.requires_grad):
        width = parameter.element_size()
        # where ZeRO-3 has divided it the parameter itself is empty between its uses
        size = width * getattr(parameter, "ds_numel", parameter.numel())
        shard_size = width * getattr(parameter, "ds_tensor", local_shard(parameter)).numel()
        if getattr(parameter, "ds_persist", False):
            persistent_bytes += size
            shard_size = size
        whole_bytes, local_bytes = whole_bytes + size, local_bytes + shard_size
    return whole_bytes, local_bytes, persistent_bytes
