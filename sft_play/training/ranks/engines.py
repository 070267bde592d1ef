"""What runs a step over several ranks: DDP, FSDP2 or DeepSpeed, switched on by the Trainer's arguments."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate import ParallelismConfig
from accelerate.utils import DDPCommunicationHookType
from torch.distributed.fsdp import MixedPrecisionPolicy

from sft_play.config.schema import RunConfig
from sft_play.errors import TrainingError
from sft_play.planner.gradients import gradients_of
from sft_play.planner.layout import Layout
from sft_play.planner.plan import Plan
from sft_play.planner.precision import SHORT, DtypeName
from sft_play.process.environment import deepspeed_on_cpu
from sft_play.training.ranks import distributed


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
            deepspeed_on_cpu()
        return {**arguments, "deepspeed": dict(deepspeed)}
    if gradients_of(config, plan.precision, plan.layout).every != "step":
        # else the Trainer reduces gradients only in a step's last pass: FSDP2 keeps whole ones on every rank until then
        arguments["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    if plan.choice.layout.is_fsdp:
        arguments["fsdp"] = True
        arguments["fsdp_config"] = {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": [layer_class],
            "reshard_after_forward": True,
            "cpu_ram_efficient_loading": False,  # `fsdp_loading` reads the weights, or every rank has them
            "state_dict_type": "FULL_STATE_DICT",  # with another, Trainer.save_model writes no weights at all
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


def set_gradients(trainer: Any, plan: Plan, config: RunConfig) -> None:
    """Tell the loop after how many passes ranks reduce gradients, and accelerate the dtypes of gathered weights and of
    reduced gradients, before it wraps the model.

    transformers' arguments cannot express them; accelerate's own objects can: DDP's communication hook and FSDP2's
    mixed-precision policy. DeepSpeed reads them from its own configuration.
    """
    if plan.layout == "single":
        return
    chosen = gradients_of(config, plan.precision, plan.layout)
    trainer.passes_reduced_together = chosen.every if isinstance(chosen.every, int) else 1
    if plan.layout == "ddp" and chosen.compressed:
        trainer.accelerator.ddp_handler.comm_hook = DDPCommunicationHookType(SHORT[chosen.reduced])
    is_own = chosen.compressed or chosen.gathered != plan.precision.compute
    if plan.choice.layout.is_fsdp and is_own:
        # None: FSDP2 casts nothing. A dtype casts the inputs of every unit too, and its output
        low = None if chosen.gathered == "float32" == plan.precision.compute else getattr(torch, chosen.gathered)
        trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=low, reduce_dtype=getattr(torch, chosen.reduced), output_dtype=low
        )


def zero_stage(wrapped: Any) -> int | None:
    """The ZeRO stage that DeepSpeed runs; None where another engine wraps the model."""
    return int(wrapped.zero_optimization_stage()) if is_deepspeed(wrapped) else None


def is_deepspeed(wrapped: Any) -> bool:
    """Whether the model is wrapped by DeepSpeed."""
    return hasattr(wrapped, "zero_optimization_stage")


def local(tensor: Any) -> Any:
    """This rank's part of a tensor that is divided over ranks; the tensor itself where it is not."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def innermost(optimizer: Any) -> Any:
    """The optimizer inside accelerate's wrapper, and inside DeepSpeed's."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def checkpoint_bytes(trainer: Any) -> int:
    """The least that a checkpoint takes: what trains, with the optimizer's states. All ranks call it."""
    values = [value for state in innermost(trainer.optimizer).state.values() for value in state.values()]
    states = [value for value in values if isinstance(value, torch.Tensor)]
    if not is_deepspeed(trainer.model_wrapped):
        return trained_bytes(trainer) + _bytes_of(states)
    return trained_bytes(trainer) + distributed.total(_bytes_of([*masters(trainer.model_wrapped), *states]))


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def trained_bytes(trainer: Any, dtype: torch.dtype | None = None) -> int:
    """What the weights that train take on all ranks together, in this dtype or their own."""
    return sum(
        int(getattr(one, "ds_numel", one.numel())) * (dtype.itemsize if dtype is not None else one.element_size())
        for one in trainer.model.parameters()
        if one.requires_grad
    )


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
