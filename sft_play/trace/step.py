"""One training step, as the real libraries run it, on tensors without bytes: what it needs at its
peak, by the replay of every storage's allocation and freeing through the simulated allocator."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode

from sft_play.planner.memory.block import LayerBytes
from sft_play.planner.memory.model_states import PLACES
from sft_play.planner.memory.step_memory import (
    MERGED_BYTES,
    BlockMode,
    MeasuredBlocks,
    cublas_workspace_bytes,
)
from sft_play.process.waiting import report_each
from sft_play.trace import build, kernels, patches
from sft_play.trace.settings import VARLEN_ATTENTIONS, StepSettings, TracedPeak, TraceUnavailable
from sft_play.trace.storages import ReplayPeaks, StorageLog, replay
from sft_play.training.model import attention_functions
from sft_play.training.model.grouped_adapters import (
    GroupedAdapters,
    find_shared_inputs,
    group_adapters,
)
from sft_play.training.model.streamed_base import move_blocks


def trace_step(settings: StepSettings) -> TracedPeak:
    """Trace one rank's step for its highest bytes; takes seconds, no GPU and no weights. Raises
    TraceUnavailable: the libraries cannot run it on fake tensors."""
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


def record_step(
    settings: StepSettings, *, uses_real_tensors: bool = False, mesh: Any = None
) -> StorageLog:
    """Run the step and return its events. For comparison, `uses_real_tensors` runs it on real CPU
    tensors instead, a sharded step in the real group of `mesh`. Raises TraceUnavailable: as
    `trace_step`."""
    with trace_context(settings, uses_real_tensors=uses_real_tensors, mesh=mesh) as (
        loop,
        skeleton,
    ):
        loop.run(skeleton)
    return loop.log


@contextlib.contextmanager
def trace_context(
    settings: StepSettings,
    *,
    uses_real_tensors: bool = False,
    mesh: Any = None,
    depth: int | None = None,
) -> Iterator[tuple[TracedLoop, Any]]:
    """A training loop and the skeleton of its model, where the step's tensors are logged: fake
    ones, or real ones in the group of `mesh`. `depth`: only the first this many blocks. Raises
    TraceUnavailable: as `trace_step`.
    """
    if settings.strategy.startswith("zero"):
        raise TraceUnavailable("DeepSpeed ZeRO is not traced")
    if settings.kernels not in build.KERNEL_CONTEXTS:
        raise TraceUnavailable("Liger's kernels run on a GPU alone")
    loop_class = LOOP_CLASSES[type(settings)]
    log = loop_class.log_class(
        workspace_sizes=functools.partial(kernels.workspace_sizes, on_gpu=settings.on_gpu)
    )
    shared_inputs: tuple[tuple[str, ...], ...] = ()
    if settings.groups_adapters:
        shared_inputs = find_shared_inputs(build.language_model_config(settings))
    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet_process())
        stack.enter_context(_convert_library_errors())
        state = patches.TraceState(settings, log, shared_inputs)
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


# In an optimizer's name: transformers' Trainer keeps its states of embeddings in fp32.
_WIDE_EMBEDDINGS_SUFFIX = "_wide_embeddings"


class TracedLoop:
    """The loop of a training script: build, steps of micro-batches, clip, update, evaluation."""

    log_class = StorageLog
    _feature_key: int | None = None
    grouped_adapters: GroupedAdapters | None = None

    def __init__(self, state: patches.TraceState, mesh: Any) -> None:
        self.settings, self.log, self.state, self.mesh = state.settings, state.log, state, mesh

    def run(self, skeleton: Any) -> None:
        """Run the loop with this model."""
        settings, log = self.settings, self.log
        model = self.load_model(skeleton)
        if settings.images is not None:
            log.record_alloc(settings.images.weights)
            embedding = build.base_model(model).get_input_embeddings()
            embedding.register_forward_hook(self._merge_images)
        log.empty_cache()
        log.start_phase("prepare")
        after_backward = self.make_after_backward_hook(model)
        workspace = cublas_workspace_bytes(settings.capability) if settings.on_gpu else 0
        log.record_alloc(workspace)  # the thread that runs forward
        optimizer = self.create_optimizer(model)
        for step in range(settings.optimizer_steps):
            if self.grouped_adapters is not None:
                self.grouped_adapters.refresh_copies()
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
        """The model on this rank's GPU; a sharded one is loaded on the host, and only its shards
        arrive."""
        if self.settings.strategy == "streamed":
            return self._load_streamed(skeleton)
        if not _is_sharded(self.settings):
            model = build.load_skeleton(skeleton, self.settings)
            base = build.base_model(model)
            if self.settings.groups_adapters:
                dtype = getattr(torch, self.settings.autocast or self.settings.weights)
                self.grouped_adapters = group_adapters(base, self.state.shared_inputs, dtype=dtype)
            # what a class computes its buffers to be, where tensors are real: some look up rows of
            # tables by them
            with self.log.hide_allocations():
                for module in base.modules():
                    is_real = any(
                        one is not None and not isinstance(one, FakeTensor)
                        for one in module._buffers.values()
                    )
                    # no weights in 4 bits
                    is_plain = all(
                        one.is_floating_point() for one in module.parameters(recurse=False)
                    )
                    if is_real and is_plain:
                        base._init_weights(module)
            return model

        with self.log.hide_allocations():
            model = build.load_skeleton(skeleton, self.settings)
            # each unit passes through the GPU in full once, before it is sharded (`fully_shard`)
            base = build.base_model(model)
            units = [
                *build.require_blocks(base),
                base.get_input_embeddings(),
                base.get_output_embeddings(),
            ]
            upcasts = self.settings.mixed_precision is not None and self.settings.mode != "qlora"
            largest = max(
                sum(
                    int(one.numel())
                    * (4 if upcasts and one.requires_grad else int(one.element_size()))
                    for one in unit.parameters()
                )
                for unit in units
                if unit is not None
            )
            model = SHARDING_FUNCTIONS[self.settings.strategy](model, self.settings, self.mesh)
        self.log.record_temporary((largest,))
        for tensor in (*model.parameters(), *model.buffers()):
            self.log.record_tensor(getattr(tensor, "_local_tensor", tensor))  # this rank's part
        return model

    def _load_streamed(self, skeleton: Any) -> Any:
        """The model with the frozen weights of its blocks in RAM: on this rank's GPU are two places
        for blocks, and all of the rest."""
        with self.log.hide_allocations():
            model = build.load_skeleton(skeleton, self.settings)
            base = build.base_model(model)
            if self.settings.groups_adapters:
                dtype = getattr(torch, self.settings.autocast or self.settings.weights)
                self.grouped_adapters = group_adapters(base, self.state.shared_inputs, dtype=dtype)
            stream = move_blocks(model, torch.device("cpu"))
        resident = {id(one): one for one in (*model.parameters(), *model.buffers())}
        scale_bytes = 0
        for block in stream.blocks:
            scales = build.scales_of(block)
            scale_bytes = max(scale_bytes, sum(scale.nbytes for scale in scales))
            for tensor in scales:
                resident.pop(id(tensor), None)
        for name in stream.streamed_parameters():
            resident.pop(name, None)
        self.log.record_alloc(PLACES * scale_bytes)
        for tensor in resident.values():
            self.log.record_tensor(tensor)
        stream.start()
        return model

    def make_after_backward_hook(self, model: Any) -> Callable[[], None]:
        """Make what DDP runs after each backward pass: a second copy of all gradients, in buckets;
        its reducer is C++ and reads data, so they are made here."""
        has_buckets = self.settings.strategy == "ddp" or (
            self.settings.strategy == "streamed" and self.settings.world > 1
        )
        if not has_buckets:
            return lambda: None

        log = self.log
        trained = [(str(one.dtype), one.nbytes) for one in model.parameters() if one.requires_grad]
        log.record_temporary(
            (min(BROADCAST_BUCKET_BYTES, sum(one.nbytes for one in model.parameters())),)
        )
        # the order of gradients is unknown before the first backward pass: one bucket per dtype,
        # without a limit
        buckets = [
            (log.record_alloc(nbytes), nbytes) for nbytes in bucket_sizes(trained, [1 << 62])
        ]

        def rebuild_buckets() -> None:
            # cut anew once, in the order of the first backward pass: last layers first, 1 MiB and
            # then 25 MiB
            if not buckets:
                return
            for key, nbytes in buckets:
                log.record_free(key, nbytes)
            buckets.clear()
            for nbytes in bucket_sizes(trained[::-1], [1 << 20, 25 << 20]):
                log.record_alloc(nbytes)

        return rebuild_buckets

    def create_optimizer(self, model: Any) -> Any:
        """The optimizer of that name, or a fake with bitsandbytes' states; TraceUnavailable for an
        unknown one."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        state_sizes: dict[str, Callable[[int], tuple[int, ...]]] = {
            "adamw_8bit": build.adam_8bit_state_sizes,
            "paged_adamw_8bit": build.paged_adam_8bit_state_sizes,
            "lion_32bit_bnb": lambda elements: (4 * elements,),
            "lion_8bit": lambda elements: build.adam_8bit_state_sizes(elements)[::2],
            "none": lambda elements: (),
        }
        name = self.settings.optimizer.removesuffix(_WIDE_EMBEDDINGS_SUFFIX)
        fp32_weights: list[Any] = []
        if name != self.settings.optimizer:
            fp32_weights = [
                one.weight for one in model.modules() if isinstance(one, torch.nn.Embedding)
            ]
        if name in state_sizes:
            count = {"paged": 0, "lion": 1}.get(name.partition("_")[0], 2)  # in the allocator
            return build.FakeStateOptimizer(
                trained,
                state_sizes[name],
                self.log,
                fp32_state_counts={id(one): count for one in fp32_weights},
            )
        if name == "muon":
            from sft_play.training.loop.optimizers import MuonWithAdamW, muon_matrices

            return MuonWithAdamW([{"params": trained}], matrices=muon_matrices(model), lr=1e-4)
        if self.settings.optimizer == "adafactor":
            from transformers.optimization import Adafactor

            return Adafactor(trained, lr=1e-3, scale_parameter=False, relative_step=False)
        if self.settings.optimizer == "adamw_fused":
            return torch.optim.AdamW(trained, lr=1e-4, fused=True)
        if self.settings.optimizer == "adamw_foreach":
            return torch.optim.AdamW(trained, lr=1e-4, foreach=True)
        raise TraceUnavailable(f"no optimizer {self.settings.optimizer!r} is known to the trace")

    def make_batch(self, rows: int, length: int) -> dict[str, Any]:
        """The collator's tensors: packs without a mask, for flash attention in one row with their
        boundaries."""
        is_packed = self.state.active_mask == "packed"
        is_flat = is_packed and self.settings.attention in ("flash_attention_2", *VARLEN_ATTENTIONS)
        shape = (1, rows * length) if is_flat else (rows, length)
        batch: dict[str, Any] = {
            name: torch.zeros(shape, dtype=torch.long) for name in ("input_ids", "labels")
        }
        if is_packed:
            batch["position_ids"] = torch.zeros(shape, dtype=torch.long)
        elif self.state.active_mask == "positions":
            batch["position_ids"] = torch.zeros((1, length), dtype=torch.long)
        elif self.state.active_mask != "none":
            batch["attention_mask"] = torch.ones(shape, dtype=torch.long)
        if is_flat:
            ends = torch.zeros(rows + 1, dtype=torch.int32)
            batch |= {
                "cu_seq_lens_q": ends,
                "cu_seq_lens_k": ends,
                "max_length_q": length,
                "max_length_k": length,
            }
            if self.settings.attention in VARLEN_ATTENTIONS:
                batch["chat_lengths"] = (length,) * rows
        return batch

    def compute_loss(self, model: Any, batch: dict[str, Any]) -> torch.Tensor:
        """The loss of a batch."""
        dtype = self.settings.autocast
        with (
            torch.autocast("cpu", dtype=getattr(torch, dtype))
            if dtype
            else contextlib.nullcontext()
        ):
            if self.settings.loss in ("chunked", "logits"):
                out = model(**batch, use_cache=False, fused_lm_head=True)
                return (-out.log_probs).sum() / out.label_mask.sum().clamp(min=1)
            return model(**batch, use_cache=False).loss

    @contextlib.contextmanager
    def gradient_sync(self, model: Any, is_last: bool) -> Iterator[None]:
        """accelerate's `no_sync` around all micro-batches but the last: sharded models keep whole
        gradients there."""
        if is_last or self.settings.sync_each_batch or not _is_sharded(self.settings):
            yield
        else:
            model.set_requires_gradient_sync(False)
            yield
            model.set_requires_gradient_sync(True)

    def run_micro_step(self, model: Any, step: int, length: int) -> None:
        """A micro-batch of rows of this length, forwards and backwards."""
        with self._pictures_on_device():
            loss = self.compute_loss(model, self.make_batch(self.settings.micro_batch, length))
            self._free_features()
            if self.settings.grad_accum > 1:
                loss = loss / self.settings.grad_accum
            self.log.start_phase("backward", step)
            loss.backward()

    def optimizer_step(self, model: Any, optimizer: Any) -> None:
        """Clip, update, and free the gradients."""
        if self.settings.clip:
            torch.nn.utils.clip_grad_norm_(
                [one for one in model.parameters() if one.requires_grad], 1.0, foreach=True
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def evaluate_batch(self, model: Any, rows: int, length: int) -> None:
        """Run the forward pass of an evaluation batch."""
        model.eval()
        self.state.is_evaluating = True
        with torch.no_grad(), self._pictures_on_device():
            self.compute_loss(model, self.make_batch(rows, length))
            self._free_features()
        self.state.is_evaluating = False
        model.train()

    # --- pictures ---------------------------------------------------------------------------------
    @property
    def _picture_bytes(self) -> tuple[int, int, int]:
        images = self.settings.images
        if images is None:
            return 0, 0, 0
        return images.evaluation if self.state.is_evaluating else images.training

    @contextlib.contextmanager
    def _pictures_on_device(self) -> Iterator[None]:
        pixel_bytes = self._picture_bytes[0]
        key = self.log.record_alloc(pixel_bytes)
        yield
        self.log.record_free(key, pixel_bytes)

    def _merge_images(self, module: Any, args: Any, embedded: torch.Tensor) -> torch.Tensor:
        """The tower's pass, and its features among the embeddings as the whole class puts them."""
        _, peak_bytes, feature_bytes = self._picture_bytes
        self.log.record_temporary((peak_bytes,))
        self._feature_key = self.log.record_alloc(feature_bytes)
        with self.log.hide_allocations():  # the source is of the features
            source = torch.empty(embedded.numel(), dtype=embedded.dtype)
        is_picture = torch.zeros(embedded.shape[:-1], dtype=torch.bool).unsqueeze(-1)
        merged = embedded.masked_scatter(is_picture.expand_as(embedded), source)
        self.log.record_temporary((MERGED_BYTES * embedded.numel() * self.settings.on_gpu,))
        return merged

    def _free_features(self) -> None:
        if self._feature_key is not None:
            self.log.record_free(self._feature_key, self._picture_bytes[2])
            self._feature_key = None

    def replay_peaks(self) -> tuple[ReplayPeaks, ReplayPeaks]:
        """Peaks in the allocator's two modes, fixed-size segments and expandable ones."""
        return replay(self.log.events), replay(self.log.events, expandable_segments=True)


# The loop of each kind of settings; benchmarks add that of other scripts.
LOOP_CLASSES: dict[type[StepSettings], type[TracedLoop]] = {StepSettings: TracedLoop}


def _is_sharded(settings: StepSettings) -> bool:
    return settings.strategy.startswith("fsdp")


# --- faults ---------------------------------------------------------------------------------------
@contextlib.contextmanager
def _convert_library_errors() -> Iterator[None]:
    """Turn an exception from inside a library into TraceUnavailable; our own keep their
    traceback."""
    try:
        yield
    except (TraceUnavailable, MemoryError, KeyboardInterrupt):
        raise
    except ImportError as error:
        raise TraceUnavailable(
            f"a library, or a part of it that the trace uses, is missing: {error}"
        ) from error
    except Exception as error:
        innermost = traceback.extract_tb(error.__traceback__)[-1].filename
        if Path(innermost).resolve().parent == Path(__file__).resolve().parent:
            raise
        text = " ".join(str(error).split())[:300]
        raise TraceUnavailable(
            f"the libraries cannot run this step on fake tensors: {type(error).__name__}: {text}"
        ) from error


@contextlib.contextmanager
def quiet_process() -> Iterator[None]:
    """Silence libraries, and hold back garbage collection: its timing depends on what this process
    did before, and so would peaks."""
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
# Several GPUs seen from one of them: DDP's gradient buckets, and the real FSDP2 in a group of one
# real rank.

# DDP sends its parameters to the other ranks in flat copies of at most this size
# (`_sync_module_states`).
BROADCAST_BUCKET_BYTES = 250 << 20


# --- DDP ------------------------------------------------------------------------------------------
def bucket_sizes(tensors: list[tuple[str, int]], limits: list[int]) -> list[int]:
    """Bytes of each bucket for tensors (dtype, bytes) in this order (reducer.cpp,
    `compute_bucket_assignment_by_size`): each dtype fills its own and closes it at the limit, the
    first one at the first, the others at the last.
    """
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


# --- FSDP2 ----------------------------------------------------------------------------------------
@contextlib.contextmanager
def fake_device_mesh(world_size: int) -> Iterator[Any]:
    """A device mesh over `world_size` ranks, this process the first; its collectives do nothing.
    Enter it outside a FakeTensorMode. Raises TraceUnavailable: this process already belongs to a
    group."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise TraceUnavailable(
            "a sharded step is traced in a process without a process group of its own"
        )
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
    finally:
        dist.destroy_process_group()


def apply_fsdp2(model: Any, settings: StepSettings, mesh: Any) -> Any:
    """Cut the model into the units that accelerate's `fsdp2_prepare_model` makes of it. 4-bit
    weights packed as uint8 stay whole on every rank, and nothing is upcast beside them, as for a
    Params4bit (which a fake is not)."""
    from accelerate.utils import fsdp_utils
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    is_4bit, unsharded = settings.mode == "qlora", []
    if is_4bit and settings.quant_storage == "uint8":
        unsharded = [one for one in model.modules() if isinstance(one, build.fake_nf4_class())]
    gather_dtype = settings.gathers_in or settings.mixed_precision
    param_dtype = getattr(torch, gather_dtype) if gather_dtype else None
    reduce_dtype = getattr(torch, settings.reduces_in) if settings.reduces_in else param_dtype
    # what `fsdp2_prepare_model` reads of its plugin: units are the model's own no-split layers
    plugin = SimpleNamespace(
        set_auto_wrap_policy=lambda model: None,
        auto_wrap_policy=transformer_auto_wrap_policy,
        transformer_cls_names_to_wrap=[
            type(build.require_blocks(build.base_model(model))[0]).__name__
        ],
        reshard_after_forward=True,
        cpu_offload=OffloadPolicy(),
        mixed_precision_policy=MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=reduce_dtype, output_dtype=param_dtype
        ),
        ignored_modules=unsharded or None,
        cpu_ram_efficient_loading=False,
        min_num_params=0,
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names),
        mixed_precision="no" if is_4bit or settings.mixed_precision is None else "bf16",
        is_main_process=False,
        device=torch.device("cpu"),
    )
    return fsdp_utils.fsdp2_prepare_model(accelerator, model)


# What divides a model over the ranks of a mesh, by the strategy's name; benchmarks add what only
# older scripts ran.
SHARDING_FUNCTIONS: dict[str, Callable[[Any, StepSettings, Any], Any]] = {"fsdp2": apply_fsdp2}


# --------------------------------------------------------------------------------------------------
# The blocks of a model, each run forwards and backwards: what it keeps, and its peaks.
#
# Hooks read the live bytes of a trace where one block ends and the next begins: forwards when its
# call begins and ends, backwards when the gradient of its output is there.


def run_blocks(
    settings: StepSettings,
    batch_shapes: Collection[tuple[int, int]],
    block_mode: BlockMode,
    *,
    kind_indices: Sequence[int],
    is_accumulating: bool = False,
    uses_real_tensors: bool = False,
) -> list[MeasuredBlocks]:
    """Measure micro steps of (rows, tokens of a row). `kind_indices`: each first block's index in
    `ModelShape.layers`; `is_accumulating`: gradients are added to those of an earlier one;
    `uses_real_tensors`: on real CPU tensors. Raises TraceUnavailable: the libraries cannot run
    them."""
    measured_batches = []
    with trace_context(settings, uses_real_tensors=uses_real_tensors, depth=len(kind_indices)) as (
        loop,
        skeleton,
    ):
        model = loop.load_model(skeleton)
        if loop.grouped_adapters is not None:
            loop.grouped_adapters.refresh_copies()
        blocks = list(build.find_block_list(build.base_model(model))[1])
        task = "Measuring the blocks of the model's class, once for these libraries"
        for rows, length in report_each(
            task, batch_shapes, unit="batches", count=len(batch_shapes)
        ):
            recorder = _BlockRecorder(loop, model, blocks, block_mode)
            try:
                if is_accumulating and block_mode != "evaluated":
                    recorder.run_micro_step(rows, length)
                measured_batches.append(recorder.measure_micro_step(rows, length, kind_indices))
            finally:
                for handle in recorder.handles:
                    handle.remove()
                model.zero_grad(set_to_none=True)
    return measured_batches


class _BlockRecorder:
    """Reads one step. Lists have an entry for each block; bytes are live ones, not rounded to the
    allocator's units."""

    def __init__(
        self, loop: TracedLoop, model: Any, blocks: Sequence[nn.Module], block_mode: BlockMode
    ) -> None:
        self._loop, self._model, self._blocks, self._block_mode = loop, model, blocks, block_mode
        self._log: StorageLog = loop.log
        self.handles: list[Any] = []
        for layer, block in enumerate(blocks):
            self.handles.append(
                block.register_forward_pre_hook(self._forward_start_hook(layer), with_kwargs=True)
            )
            self.handles.append(block.register_forward_hook(self._forward_end_hook(layer)))

    # --- the pass ---------------------------------------------------------------------------------
    def run_micro_step(self, rows: int, length: int) -> bool:
        """Run a micro step, backwards too in training; True if the first block's input outlives the
        forward pass."""
        count = len(self._blocks)
        self._is_forward, self._open_layer = True, -1
        self._start_bytes, self._input_bytes, self._peak_bytes = (
            [0] * count,
            [0] * count,
            [0] * count,
        )
        # When a block's backward pass begins: live bytes, those of the gradient, and those of all
        # parameters' gradients; None where nothing trains up to it.
        self._backward_starts: list[tuple[int, int, int] | None] = [None] * count
        self._backward_peaks = [0] * count
        # Peaks behind the last block, and before its backward pass.
        self._tail_peak = self._tail_backward_peak = 0
        self._static_bytes = self._log.current
        self._previous_gradients = _total_gradient_bytes(self._model.parameters())
        # dead as soon as nothing holds the storage
        self._first_input: weakref.ref[torch.UntypedStorage] | None = None
        if self._block_mode == "evaluated":
            self._loop.evaluate_batch(self._model, rows, length)
            self._tail_peak = self._log.peak
            return False
        loss = self._loop.compute_loss(self._model, self._loop.make_batch(rows, length))
        self._tail_peak, self._is_forward = self._log.peak, False
        is_kept = self._first_input is not None and self._first_input() is not None
        self._log.peak = self._log.current
        loss.backward()
        self._close_block(self._backward_peaks)
        return is_kept

    def measure_micro_step(
        self, rows: int, length: int, kind_indices: Sequence[int]
    ) -> MeasuredBlocks:
        is_kept = self.run_micro_step(rows, length)
        if not all(self._start_bytes):
            raise TraceUnavailable("the model does not call each of its first blocks")
        embedding_bytes = 0 if is_kept or self._block_mode == "evaluated" else self._input_bytes[0]
        held_bytes = self._held_bytes(embedding_bytes)
        # such as states that a class keeps on its modules, and replaces when it runs again; behind
        # the first block what the model's own code held before it may be gone
        if held_bytes[-1] < held_bytes[1]:
            raise TraceUnavailable("less is held behind its blocks than before them")
        layers = [
            self._layer_bytes(layer, held_bytes, embedding_bytes)
            for layer in range(len(self._blocks))
        ]
        # a later block of a kind is like all but the first, and but the last, where there is
        # another
        last_kind = kind_indices[-1]
        by_kind = {kind_index: layers[layer] for layer, kind_index in enumerate(kind_indices[:-1])}
        if last_kind not in kind_indices[1:-1]:
            by_kind[last_kind] = layers[-1]
        kinds = tuple(by_kind[one] for one in range(len(by_kind)))
        last_extra = layers[-1].saved - by_kind[last_kind].saved
        return MeasuredBlocks(
            rows,
            held_bytes[0],
            embedding_bytes,
            layers[0],
            kinds,
            self._tail_bytes(held_bytes[-1]),
            last_extra,
        )

    def _tail_bytes(self, held_bytes: int) -> LayerBytes:
        cast_bytes = (
            0
            if self._block_mode == "kept"
            else sum(self._cast_bytes(block) for block in self._blocks)
        )
        forward = self._tail_peak - self._static_bytes - held_bytes
        backward_start = self._backward_starts[-1]
        if backward_start is None:
            return LayerBytes(forward - cast_bytes)
        return LayerBytes(
            forward - cast_bytes,
            0,
            self._tail_backward_peak - self._static_bytes - held_bytes,
            backward_start[2] - self._previous_gradients,
        )

    def _held_bytes(self, embedding_bytes: int) -> list[int]:
        """What is held before each block, and after the last, beside its input and what lasts."""
        count = len(self._blocks)
        starts = [
            self._start_bytes[layer] - self._input_bytes[layer] - self._static_bytes
            for layer in range(count)
        ]
        if self._block_mode == "evaluated":
            return [starts[0]] * (count + 1)
        held_bytes, cast_bytes = starts[:1], 0
        # backward, the states saved at a boundary are freed and only their gradient is live: held
        # is taken from forward
        has_block_boundaries = any(
            getattr(block, "is_block_boundary", False) is True for block in self._blocks
        )
        for layer, backward_start in enumerate(self._backward_starts):
            cast_bytes += (
                self._cast_bytes(self._blocks[layer]) if self._block_mode == "recomputed" else 0
            )
            # freed since the forward pass: what its own frames and autocast kept
            if backward_start is not None and not (has_block_boundaries and layer + 1 < count):
                live, gradient, all_gradients = backward_start
                held_bytes.append(
                    live
                    - gradient
                    - self._static_bytes
                    - (all_gradients - self._previous_gradients)
                )
            else:
                held_bytes.append(
                    starts[layer + 1] - embedding_bytes - cast_bytes
                    if layer + 1 < count
                    else held_bytes[-1]
                )
        return held_bytes

    def _layer_bytes(
        self, layer: int, held_bytes: Sequence[int], embedding_bytes: int
    ) -> LayerBytes:
        cast_bytes = [self._cast_bytes(block) for block in self._blocks[: layer + 1]]
        forward = self._peak_bytes[layer] - (self._start_bytes[layer] - self._input_bytes[layer])
        if self._block_mode == "evaluated":
            return LayerBytes(forward, cast=cast_bytes[-1])
        kept_bytes, backward_start = (
            held_bytes[layer + 1] - held_bytes[layer],
            self._backward_starts[layer],
        )
        later_gradients = (
            backward_start[2] - self._previous_gradients if backward_start is not None else 0
        )
        backward = (
            self._backward_peaks[layer] - self._static_bytes - held_bytes[layer] - later_gradients
            if backward_start is not None
            else 0
        )
        forward = (
            self._peak_bytes[layer]
            - self._static_bytes
            - held_bytes[layer]
            - (embedding_bytes if layer else 0)
        )
        gradients = _total_gradient_bytes(self._blocks[layer].parameters())
        if self._block_mode == "kept":
            return LayerBytes(forward, kept_bytes, backward, gradients)
        return LayerBytes(
            forward - sum(cast_bytes),
            kept_bytes,
            backward,
            gradients,
            cast=cast_bytes[-1],
            input=kept_bytes,
        )

    def _cast_bytes(self, block: nn.Module) -> int:
        """Bytes of autocast's half-precision copies of a block's fp32 leaves with a gradient
        (cached_cast). Adapters that train in groups have lasting copies instead, which evaluations
        do not read."""
        if self._loop.settings.autocast is None:
            return 0
        grouped_ids: set[int] = set()
        if self._loop.grouped_adapters is not None and self._block_mode != "evaluated":
            groups = self._loop.grouped_adapters.groups
            grouped_ids = {id(factor) for group in groups for factor in group.factors}
        return sum(
            2 * one.numel()
            for one in block.parameters()
            if one.requires_grad
            and one.dtype == torch.float32
            and one.dim() > 1
            and id(one) not in grouped_ids
        )

    # --- hooks ------------------------------------------------------------------------------------
    def _forward_start_hook(self, layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._is_forward:  # a block that is computed again
                return
            self._close_block(self._peak_bytes)
            if self._start_bytes[layer]:
                raise TraceUnavailable("the model calls a block more than once in a pass")
            hidden = hidden_states(args) if args else hidden_states(kwargs.get("hidden_states"))
            self._start_bytes[layer], self._input_bytes[layer] = self._log.current, hidden.nbytes
            if layer == 0:
                self._first_input = weakref.ref(hidden.untyped_storage())
                if hidden.requires_grad:
                    hidden.register_hook(lambda gradient: self._close_block(self._backward_peaks))
            self._log.peak, self._open_layer = self._log.current, layer

        return hook

    def _forward_end_hook(self, layer: int) -> Callable[..., None]:
        def start_backward(gradient: torch.Tensor) -> None:
            self._close_block(self._backward_peaks)
            if layer == len(self._blocks) - 1:
                self._tail_backward_peak = self._log.peak
            all_gradients = _total_gradient_bytes(self._model.parameters())
            self._backward_starts[layer] = (self._log.current, gradient.nbytes, all_gradients)
            self._log.peak, self._open_layer = self._log.current, layer

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not self._is_forward:
                return
            self._close_block(self._peak_bytes)
            self._log.peak = self._log.current
            hidden = hidden_states(output)
            if hidden.requires_grad:
                hidden.register_hook(start_backward)

        return hook

    def _close_block(self, peaks: list[int]) -> None:
        if self._open_layer >= 0:
            peaks[self._open_layer], self._open_layer = self._log.peak, -1


def _total_gradient_bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(one.grad.nbytes for one in parameters if one.grad is not None)


def hidden_states(value: Any) -> torch.Tensor:
    """The states among a block's arguments or results, of which they are the first."""
    while isinstance(value, tuple | list):
        value = value[0]
    if not isinstance(value, torch.Tensor):
        raise TraceUnavailable(
            f"a block's hidden states are a {type(value).__name__}, not a tensor"
        )
    return value


def count_operators(
    settings: StepSettings, batch_shapes: Iterable[tuple[int, int]], *, depth: int
) -> list[int]:
    """Count the operators that each pass of an evaluation runs."""
    counts = []
    with trace_context(settings, depth=depth) as (loop, skeleton):
        model = loop.load_model(skeleton)
        for rows, length in batch_shapes:
            previous = loop.log.operator_count
            loop.evaluate_batch(model, rows, length)
            counts.append(loop.log.operator_count - previous)
    return counts
