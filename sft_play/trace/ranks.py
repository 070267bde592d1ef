"""Several GPUs seen from one of them: DDP's gradient buckets, and the real FSDP2 in a group of one real rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from sft_play.trace import build, fakes
from sft_play.trace.settings import StepSettings, TraceUnavailable
from sft_play.trace.storages import StorageLog

# DDP sends its parameters to the other ranks in flat copies of at most this size (`_sync_module_states`).
BROADCAST_BUCKET_BYTES = 250 << 20


# --- DDP --------------------------------------------------------------------------------------------------------------
class GradientBuckets:
    """DDP's second copy of all gradients, cut again after the first backward pass; its reducer is C++ and reads data,
    so they are made here."""

    def __init__(self, model: nn.Module, log: StorageLog) -> None:
        self._log = log
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        log.record_temporary((min(BROADCAST_BUCKET_BYTES, sum(one.nbytes for one in model.parameters())),))
        self._buckets: list[tuple[int, int]] = []
        self._is_rebuilt = False
        # the order of gradients is unknown before the first backward pass: one bucket per dtype, without a limit
        self._allocate_buckets([1 << 62])

    def rebuild_buckets(self) -> None:
        """Cut anew after the first backward pass, in its order: last layers first, 1 MiB and then 25 MiB."""
        if self._is_rebuilt:
            return
        for key, nbytes in self._buckets:
            self._log.record_free(key, nbytes)
        self._trained.reverse()
        self._allocate_buckets([1 << 20, 25 << 20])
        self._is_rebuilt = True

    def _allocate_buckets(self, limits: list[int]) -> None:
        sizes = bucket_sizes([(str(one.dtype), one.nbytes) for one in self._trained], limits)
        self._buckets = [(self._log.record_alloc(nbytes), nbytes) for nbytes in sizes]


def bucket_sizes(tensors: list[tuple[str, int]], limits: list[int]) -> list[int]:
    """Bytes of each bucket for tensors (dtype, bytes) in this order (reducer.cpp, `compute_bucket_assignment_by_size`):
    each dtype fills its own and closes it at the limit, the first one at the first, the others at the last."""
    open_buckets: dict[str, int] = {}
    limit_indices: dict[str, int] = {}
    closed = []
    for dtype, nbytes in tensors:
        open_buckets[dtype] = open_buckets.get(dtype, 0) + nbytes
        limit_index = limit_indices.setdefault(dtype, 0)
        if open_buckets[dtype] >= limits[limit_index]:
            closed.append(open_buckets.pop(dtype))
            limit_indices[dtype] = min(limit_index + 1, len(limits) - 1)
    return closed + list(open_buckets.values())


# --- FSDP2 ------------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def fake_device_mesh(world_size: int) -> Iterator[Any]:
    """A device mesh over `world_size` ranks, this process the first; its collectives do nothing. Enter it outside a
    FakeTensorMode. Raises TraceUnavailable: this process already belongs to a group."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise TraceUnavailable("a sharded step is traced in a process without a process group of its own")
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
    finally:
        dist.destroy_process_group()


def apply_fsdp2(model: Any, settings: StepSettings, mesh: Any) -> Any:
    """The model in the units that accelerate's `fsdp2_prepare_model` makes of it. 4-bit weights packed as uint8 stay
    whole on every rank, and nothing is upcast beside them, as for a Params4bit (which a fake is not)."""
    from accelerate.utils import fsdp_utils

    is_4bit = settings.mode == "qlora"
    unsharded = [one for one in model.modules() if isinstance(one, fakes.fake_nf4_class())] if is_4bit else []
    if settings.quant_storage != "uint8":
        unsharded = []
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=_fsdp_plugin(model, settings, unsharded)),
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names),
        mixed_precision="no" if is_4bit or settings.mixed_precision is None else "bf16",
        is_main_process=False,
        device=torch.device("cpu"),
    )
    return fsdp_utils.fsdp2_prepare_model(accelerator, model)


# What divides a model over the ranks of a mesh, by the strategy's name; benchmarks add what only older scripts ran.
SHARDING_FUNCTIONS: dict[str, Callable[[Any, StepSettings, Any], Any]] = {"fsdp2": apply_fsdp2}


# --- a sharded model ----------------------------------------------------------------------------------------------
def local_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """This rank's tensors of a sharded model, each once, in module order."""
    for tensor in (*model.parameters(), *model.buffers()):
        yield getattr(tensor, "_local_tensor", tensor)


def largest_unit_bytes(model: Any, settings: StepSettings) -> int:
    """Bytes of the largest unit before it is sharded: each passes through the GPU in full once (`fully_shard`)."""
    base = build.base_model(model)
    units = [*build.require_blocks(base), base.get_input_embeddings(), base.get_output_embeddings()]
    upcasts = settings.mixed_precision is not None and settings.mode != "qlora"
    return max(
        sum(
            int(one.numel()) * (4 if upcasts and one.requires_grad else int(one.element_size()))
            for one in unit.parameters()
        )
        for unit in units
        if unit is not None
    )


def _fsdp_plugin(model: Any, settings: StepSettings, unsharded: list[Any]) -> Any:
    """What `fsdp2_prepare_model` reads of its plugin: units are the model's own no-split layers."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    gather_dtype = settings.gathers_in or settings.mixed_precision
    param_dtype = getattr(torch, gather_dtype) if gather_dtype else None
    reduce_dtype = getattr(torch, settings.reduces_in) if settings.reduces_in else param_dtype
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, output_dtype=param_dtype)
    return SimpleNamespace(
        set_auto_wrap_policy=lambda model: None,
        auto_wrap_policy=transformer_auto_wrap_policy,
        transformer_cls_names_to_wrap=[type(build.require_blocks(build.base_model(model))[0]).__name__],
        reshard_after_forward=True,
        cpu_offload=OffloadPolicy(),
        mixed_precision_policy=policy,
        ignored_modules=unsharded or None,
        cpu_ram_efficient_loading=False,
        min_num_params=0,
    )
