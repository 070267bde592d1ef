"""One training step, as the real libraries run it, on tensors without bytes: what it needs at its peak, by the replay
of every storage's allocation and freeing through the simulated allocator."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from sft_play.planner.memory.step_memory import cublas_workspace_bytes
from sft_play.trace import build, kernels, patches
from sft_play.trace.settings import VARLEN_ATTENTIONS, StepSettings, TracedPeak, TraceUnavailable
from sft_play.trace.storages import ReplayPeaks, StorageLog, replay


def trace_step(settings: StepSettings) -> TracedPeak:
    """The highest bytes of one rank's step; seconds of work, no GPU, no weights. Raises TraceUnavailable: the libraries
    cannot run it on fake tensors."""
    start = time.perf_counter()
    with trace_context(settings) as (loop, skeleton):
        loop.run(skeleton)
    peaks, other_peaks = loop.replay_peaks()
    return TracedPeak(
        allocated=peaks.allocated,
        reserved=peaks.reserved,
        reserved_either=max(peaks.reserved, other_peaks.reserved),
        phases=peaks.phases,
        resident=peaks.allocated_after["build"],
        seconds=round(time.perf_counter() - start, 3),
    )


def record_step(settings: StepSettings, *, uses_real_tensors: bool = False, mesh: Any = None) -> StorageLog:
    """The events of the step. For comparison, `uses_real_tensors` runs it on real CPU tensors instead,
    a sharded step in the real group of `mesh`. Raises TraceUnavailable: as `trace_step`."""
    with trace_context(settings, uses_real_tensors=uses_real_tensors, mesh=mesh) as (loop, skeleton):
        loop.run(skeleton)
    return loop.log


@contextlib.contextmanager
def trace_context(
    settings: StepSettings, *, uses_real_tensors: bool = False, mesh: Any = None, depth: int | None = None
) -> Iterator[tuple[TracedLoop, Any]]:
    """A training loop and the skeleton of its model, where the step's tensors are logged: fake ones, or real ones in
    the group of `mesh`. `depth`: only the first this many blocks. Raises TraceUnavailable: as `trace_step`."""
    if settings.strategy.startswith("zero"):
        raise TraceUnavailable("DeepSpeed ZeRO is not traced")
    if settings.kernels not in build.KERNEL_CONTEXTS:
        raise TraceUnavailable("Liger's kernels run on a GPU alone")
    from sft_play.training.model import attention_functions

    loop_class = LOOP_CLASSES[type(settings)]
    log = loop_class.log_class(workspace_sizes=functools.partial(kernels.workspace_sizes, on_gpu=settings.on_gpu))
    with contextlib.ExitStack() as stack:
        stack.enter_context(_quiet_process())
        stack.enter_context(_convert_library_errors())
        state = patches.TraceState(settings, log)
        log.is_padded = lambda: state.active_mask == "padded"
        stack.enter_context(patches.install_patches(state))
        stack.enter_context(attention_functions.kv_repetition(enabled=settings.repeats_kv))
        model = build.build_skeleton(settings, depth=depth)
        stack.enter_context(build.use_class_functions(build.base_model(model), settings))
        stack.enter_context(build.KERNEL_CONTEXTS[settings.kernels](model))
        if _is_sharded(settings) and mesh is None:
            mesh = stack.enter_context(fake_device_mesh(settings.world))
        # the log is entered last: it must see operators before the fake mode does
        if not uses_real_tensors:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(log)
        yield loop_class(state, mesh), model


class TracedLoop:
    """The loop of a training script: build, steps of micro-batches, clip, update, evaluation."""

    log_class = StorageLog

    def __init__(self, state: patches.TraceState, mesh: Any) -> None:
        self.settings, self.log, self.state, self.mesh = state.settings, state.log, state, mesh

    def run(self, skeleton: Any) -> None:
        """Run the loop with this model."""
        settings, log = self.settings, self.log
        model = self.load_model(skeleton)
        log.empty_cache()
        log.start_phase("prepare")
        after_backward = self.make_after_backward_hook(model)
        workspace = cublas_workspace_bytes(settings.capability) if settings.on_gpu else 0
        log.record_alloc(workspace)  # the thread that runs forward
        optimizer = self.create_optimizer(model)
        for step in range(settings.optimizer_steps):
            for micro_step in range(settings.grad_accum):
                log.start_phase("forward", step)
                with self.gradient_sync(model, micro_step == settings.grad_accum - 1):
                    self.run_micro_step(model, step, settings.seq_len)
                if step == micro_step == 0:
                    log.record_alloc(workspace)  # autograd's own thread
                after_backward()
            log.start_phase("optimizer", step)
            self.optimizer_step(model, optimizer)
        if settings.eval_batch:
            log.empty_cache()  # as the trainer does between the phases of a run
            log.start_phase("evaluation", settings.optimizer_steps - 1)
            self.evaluate_batch(model, settings.eval_batch, settings.seq_len)
        log.start_phase("end", settings.optimizer_steps - 1)

    def load_model(self, skeleton: Any) -> Any:
        """The model on this rank's GPU; a sharded one is loaded on the host, and only its shards arrive."""
        if not _is_sharded(self.settings):
            model = build.load_skeleton(skeleton, self.settings)
            with self.log.hide_allocations():
                build.fill_buffers(model)
            return model

        with self.log.hide_allocations():
            model = build.load_skeleton(skeleton, self.settings)
            largest = largest_unit_bytes(model, self.settings)
            model = SHARDING_FUNCTIONS[self.settings.strategy](model, self.settings, self.mesh)
        self.log.record_temporary((largest,))
        for tensor in local_tensors(model):
            self.log.record_tensor(tensor)
        return model

    def make_after_backward_hook(self, model: Any) -> Callable[[], None]:
        """Make what DDP runs after each backward pass."""
        if self.settings.strategy != "ddp":
            return lambda: None

        return GradientBuckets(model, self.log).rebuild_buckets

    def create_optimizer(self, model: Any) -> Any:
        """The optimizer of the run."""
        return make_optimizer(self.settings, model, self.log)

    def make_batch(self, rows: int, length: int) -> dict[str, Any]:
        """The collator's tensors: packs without a mask, for flash attention in one row with their boundaries."""
        is_packed = self.state.active_mask == "packed"
        is_flat = is_packed and self.settings.attention in ("flash_attention_2", *VARLEN_ATTENTIONS)
        shape = (1, rows * length) if is_flat else (rows, length)
        batch: dict[str, Any] = {name: torch.zeros(shape, dtype=torch.long) for name in ("input_ids", "labels")}
        if is_packed:
            batch["position_ids"] = torch.zeros(shape, dtype=torch.long)
        elif self.state.active_mask == "positions":
            batch["position_ids"] = torch.zeros((1, length), dtype=torch.long)
        elif self.state.active_mask != "none":
            batch["attention_mask"] = torch.ones(shape, dtype=torch.long)
        if is_flat:
            ends = torch.zeros(rows + 1, dtype=torch.int32)
            batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": length, "max_length_k": length}
            if self.settings.attention in VARLEN_ATTENTIONS:
                batch["chat_lengths"] = (length,) * rows
        return batch

    def compute_loss(self, model: Any, batch: dict[str, Any]) -> torch.Tensor:
        """The loss of a batch."""
        dtype = self.settings.autocast
        with torch.autocast("cpu", dtype=getattr(torch, dtype)) if dtype else contextlib.nullcontext():
            if self.settings.loss in ("chunked", "logits"):
                out = model(**batch, use_cache=False, fused_lm_head=True)
                return (-out.log_probs).sum() / out.label_mask.sum().clamp(min=1)
            return model(**batch, use_cache=False).loss

    @contextlib.contextmanager
    def gradient_sync(self, model: Any, is_last: bool) -> Iterator[None]:
        """accelerate's `no_sync` around all micro-batches but the last: sharded models keep whole gradients there."""
        if is_last or self.settings.sync_each_batch or not _is_sharded(self.settings):
            yield
        else:
            model.set_requires_gradient_sync(False)
            yield
            model.set_requires_gradient_sync(True)

    def run_micro_step(self, model: Any, step: int, length: int) -> None:
        """A micro-batch of rows of this length, forwards and backwards."""
        loss = self.compute_loss(model, self.make_batch(self.settings.micro_batch, length))
        if self.settings.grad_accum > 1:
            loss = loss / self.settings.grad_accum
        self.log.start_phase("backward", step)
        loss.backward()

    def optimizer_step(self, model: Any, optimizer: Any) -> None:
        """Clip, update, and free the gradients."""
        if self.settings.clip:
            trained = [one for one in model.parameters() if one.requires_grad]
            torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def evaluate_batch(self, model: Any, rows: int, length: int) -> None:
        """Run the forward pass of an evaluation batch."""
        model.eval()
        self.state.is_evaluating = True
        with torch.no_grad():
            self.compute_loss(model, self.make_batch(rows, length))
        self.state.is_evaluating = False
        model.train()

    def replay_peaks(self) -> tuple[ReplayPeaks, ReplayPeaks]:
        """Peaks in the allocator's two modes, fixed-size segments and expandable ones."""
        return replay(self.log.events), replay(self.log.events, expandable_segments=True)


# The loop of each kind of settings; benchmarks add that of other scripts.
LOOP_CLASSES: dict[type[StepSettings], type[TracedLoop]] = {StepSettings: TracedLoop}


def _is_sharded(settings: StepSettings) -> bool:
    return settings.strategy.startswith("fsdp")


# In an optimizer's name: transformers' Trainer keeps its states of embeddings in fp32.
_WIDE_EMBEDDINGS_SUFFIX = "_wide_embeddings"


def make_optimizer(settings: StepSettings, model: Any, log: StorageLog) -> Any:
    """The optimizer of that name, or a fake with bitsandbytes' states; raises TraceUnavailable for an unknown one."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    state_sizes: dict[str, Callable[[int], tuple[int, ...]]] = {
        "adamw_8bit": build.adam_8bit_state_sizes,
        "paged_adamw_8bit": build.paged_adam_8bit_state_sizes,
        "lion_32bit_bnb": lambda elements: (4 * elements,),
        "none": lambda elements: (),
    }
    name, fp32_weights = settings.optimizer.removesuffix(_WIDE_EMBEDDINGS_SUFFIX), list[Any]()
    state_sizes["lion_8bit"] = lambda elements: build.adam_8bit_state_sizes(elements)[::2]
    if name != settings.optimizer:
        fp32_weights = [one.weight for one in model.modules() if isinstance(one, torch.nn.Embedding)]
    if name in state_sizes:
        count = {"paged": 0, "lion": 1}.get(name.partition("_")[0], 2)  # in the allocator
        return build.FakeStateOptimizer(
            trained, state_sizes[name], log, fp32_state_counts={id(one): count for one in fp32_weights}
        )
    if name == "muon":
        from sft_play.training.loop.optimizers import MuonWithAdamW, muon_matrices

        return MuonWithAdamW([{"params": trained}], matrices=muon_matrices(model), lr=1e-4)
    if settings.optimizer == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(trained, lr=1e-3, scale_parameter=False, relative_step=False)
    if settings.optimizer == "adamw_fused":
        return torch.optim.AdamW(trained, lr=1e-4, fused=True)
    if settings.optimizer == "adamw_foreach":
        return torch.optim.AdamW(trained, lr=1e-4, foreach=True)
    raise TraceUnavailable(f"no optimizer {settings.optimizer!r} is known to the trace")


# --- faults -----------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _convert_library_errors() -> Iterator[None]:
    """Turn an exception from inside a library into TraceUnavailable; our own keep their traceback."""
    try:
        yield
    except (TraceUnavailable, MemoryError, KeyboardInterrupt):
        raise
    except ImportError as error:
        raise TraceUnavailable(f"a library, or a part of it that the trace uses, is missing: {error}") from error
    except Exception as error:
        innermost = traceback.extract_tb(error.__traceback__)[-1].filename
        if Path(innermost).resolve().parent == Path(__file__).resolve().parent:
            raise
        text = " ".join(str(error).split())[:300]
        raise TraceUnavailable(
            f"the libraries cannot run this step on fake tensors: {type(error).__name__}: {text}"
        ) from error


@contextlib.contextmanager
def _quiet_process() -> Iterator[None]:
    """No messages of libraries, and no garbage collection in between: its timing depends on what this process did
    before, and so would peaks."""
    gc.collect()
    was_enabled, previous_level = gc.isenabled(), logging.root.manager.disable
    gc.disable()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous_level)
        if was_enabled:
            gc.enable()


# --------------------------------------------------------------------------------------------------
# Several GPUs seen from one of them: DDP's gradient buckets, and the real FSDP2 in a group of one real rank.

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
    unsharded = [one for one in model.modules() if isinstance(one, build.fake_nf4_class())] if is_4bit else []
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
