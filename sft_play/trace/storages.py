"""Allocation and freeing of tensors' storages while real code runs, on fake tensors or on real ones: a dispatch mode
sees every operator's outputs, a finalizer on each storage its end. A recorded step is replayed in the simulated
allocator."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from sft_play.trace.allocator import CachingAllocator

# Kinds of events: a storage is allocated (key, bytes, stream) or freed (key), a phase starts (name, step), the cache
# is emptied.
ALLOC, FREE, PHASE_START, EMPTY_CACHE = 0, 1, 2, 3

# (kind, key or phase's name, bytes or step, stream); 0 is the model's own stream.
Event = tuple[int, object, int, int]


@dataclass
class ReplayPeaks:
    """Highest bytes of a replay: as the counters show them, and inside each phase."""

    allocated: int = 0
    reserved: int = 0
    phases: dict[str, tuple[int, int]] = field(default_factory=dict)
    allocated_after: dict[str, int] = field(default_factory=dict)
    """Allocated bytes when a phase first ended."""


def replay(events: Iterable[Event], *, expandable_segments: bool = False) -> ReplayPeaks:
    """Peaks of the events, counted once the model is loaded."""
    allocator = CachingAllocator(expandable_segments=expandable_segments)
    peaks, phase = ReplayPeaks(), "build"
    malloc, free = allocator.malloc, allocator.free
    for kind, key, value, stream in events:
        if kind == ALLOC:
            malloc(key, value, stream)
        elif kind == FREE:
            free(key)
        elif kind == EMPTY_CACHE:
            allocator.empty_cache()
        elif kind == PHASE_START:
            record_phase_end(peaks, phase, allocator, counts_to_peak=phase != "build")
            phase = str(key)
    record_phase_end(peaks, phase, allocator, counts_to_peak=phase != "build")
    return peaks


def record_phase_end(peaks: ReplayPeaks, phase: str, allocator: CachingAllocator, counts_to_peak: bool) -> None:
    """Record the peaks of a phase that ends."""
    previous = peaks.phases.get(phase, (0, 0))
    peaks.phases[phase] = (max(previous[0], allocator.peak_allocated), max(previous[1], allocator.peak_reserved))
    peaks.allocated_after.setdefault(phase, allocator.allocated_bytes)
    if counts_to_peak:
        peaks.allocated = max(peaks.allocated, allocator.peak_allocated)
        peaks.reserved = max(peaks.reserved, allocator.peak_reserved)
    allocator.reset_peak_stats()


WorkspaceSizes = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], tuple[int, ...]]

# `_use_count()` of a gradient that only the engine's buffer holds, as a dispatch mode sees it (torch 2.11 to 2.13);
# more means that something else keeps it and the engine must not add in place.
_ENGINE_ONLY_USE_COUNT = 4
_DEVICE_OPERATOR = torch.ops.prim.device.default
_ENGINE_FUNCTION = "_engine_run_backward"
_COMPILER_FRAMES = ("_dynamo/eval_frame.py", "torch/_compile.py")


class StorageLog(TorchDispatchMode):
    """The events of a run: enter it inside the FakeTensorMode, if there is one. `current` and `peak` are live bytes,
    not rounded to blocks; a fake boolean index counts as true everywhere; `is_padded` answers whether a mask has
    padding."""

    def __init__(
        self, *, workspace_sizes: WorkspaceSizes | None = None, is_padded: Callable[[], bool] | None = None
    ) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.current = self.peak = 0
        self.operator_count = 0
        self._workspace_sizes = workspace_sizes
        self.is_padded = is_padded
        self._live: dict[int, tuple[int, int]] = {}
        self._next_key = 0
        self._hide_depth = 0
        self._stream = 0
        self._streams: list[object] = [None]

    # --- what happened ------------------------------------------------------------------------------------------------
    def start_phase(self, phase: str, step: int = 0) -> None:
        """Record that a phase starts, in the step of this index."""
        self.events.append((PHASE_START, phase, step, 0))

    def empty_cache(self) -> None:
        """The program calls `torch.cuda.empty_cache`."""
        self.events.append((EMPTY_CACHE, None, 0, 0))

    @contextmanager
    def use_stream(self, stream: object) -> Iterator[None]:
        """Storages allocated inside belong to this stream: any object; None is the model's own stream."""
        previous, self._stream = self._stream, self._stream_index(stream)
        try:
            yield
        finally:
            self._stream = previous

    def _stream_index(self, stream: object) -> int:
        if stream not in self._streams:
            self._streams.append(stream)
        return self._streams.index(stream)

    def record_alloc(self, nbytes: int) -> int:
        """Record a buffer of the run that is not a tensor here; returns its key for `record_free`."""
        key = self._next_key
        self._next_key += 1
        self.events.append((ALLOC, key, nbytes, self._stream))
        self.current += nbytes
        self.peak = max(self.peak, self.current)
        return key

    def record_free(self, key: int, nbytes: int) -> None:
        """Record that a buffer of `record_alloc` is freed."""
        if nbytes:
            self.events.append((FREE, key, 0, 0))
            self.current -= nbytes

    def record_temporary(self, sizes: tuple[int, ...]) -> None:
        """Buffers that are all live at once inside one call, and freed after it."""
        keys = [(self.record_alloc(nbytes), nbytes) for nbytes in sizes if nbytes]
        for key, nbytes in reversed(keys):
            self.record_free(key, nbytes)

    def record_tensor(self, tensor: torch.Tensor) -> None:
        """Record a tensor that exists now. Its device is not queried, which would be as slow as any operator."""
        if self._hide_depth or isinstance(tensor, DTensor):
            return
        storage = tensor.untyped_storage()
        entry = self._live.get(storage._cdata)
        if entry is None:
            nbytes = storage.nbytes()
            self._live[storage._cdata] = (self.record_alloc(nbytes), nbytes)
            # not at exit: storages that outlive the trace say nothing about it
            weakref.finalize(storage, self._record_finalized, storage._cdata).atexit = False
        elif entry[1] != storage.nbytes():
            self.record_resize(storage)

    def storage_key(self, tensor: torch.Tensor) -> int | None:
        """The key of a tensor's storage; None for one that is not live here."""
        return self._live.get(tensor.untyped_storage()._cdata, (None, 0))[0]

    def is_live(self, key: int | None) -> bool:
        """Whether the storage of this key is still there."""
        return any(entry[0] == key for entry in self._live.values())

    def record_resize(self, storage: Any) -> None:
        """`storage.resize_` is not an operator; FSDP empties and refills its gathered parameters with it."""
        entry = self._live.get(storage._cdata)
        nbytes = storage.nbytes()
        if entry is None or entry[1] == nbytes:
            return
        self.record_free(*entry)
        self._live[storage._cdata] = (self.record_alloc(nbytes) if nbytes else -1, nbytes)

    @contextmanager
    def hide_allocations(self) -> Iterator[None]:
        """Tensors created inside do not exist in a real run."""
        self._hide_depth += 1
        try:
            yield
        finally:
            self._hide_depth -= 1

    def _record_finalized(self, cdata: int) -> None:
        entry = self._live.pop(cdata, None)
        if entry is not None:
            self.record_free(*entry)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled here, and the guard around every operator takes a tenth of a trace."""
        return False

    # --- operators ----------------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OPERATOR and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # as fake tensors answer it, two calls of three, in a tenth of the time
        kwargs = kwargs or {}
        if DTensor in types:
            return NotImplemented  # DTensor unwraps itself; its wrapper's storage of global size does not exist
        self.operator_count += 1
        is_sum = func is torch.ops.aten.add.Tensor and _accumulates_in_place(args)
        handler = _MASK_OPERATORS.get(func)
        out = func(*args, **kwargs) if handler is None else handler(self, func, args, kwargs)
        if is_sum:
            self._reuse_storage(args[0], out)
        workspaces = self._workspace_sizes(func, args, kwargs, out) if self._workspace_sizes is not None else ()
        if isinstance(out, torch.Tensor):
            self.record_tensor(out)
        elif out is not None:
            for leaf in tree_iter(out):
                if isinstance(leaf, torch.Tensor):
                    self.record_tensor(leaf)
        if workspaces:
            self.record_temporary(workspaces)
        return out

    def _reuse_storage(self, old: torch.Tensor, new: torch.Tensor) -> None:
        old_storage, new_storage = old.untyped_storage(), new.untyped_storage()
        entry = self._live.get(old_storage._cdata)
        if entry is None or new_storage._cdata in self._live or entry[1] != new_storage.nbytes():
            return
        # no free and no alloc event: autograd accumulates into the memory of the existing gradient
        del self._live[old_storage._cdata]
        self._live[new_storage._cdata] = entry
        weakref.finalize(new_storage, self._record_finalized, new_storage._cdata).atexit = False


def _accumulates_in_place(args: Any) -> bool:
    """Whether the autograd engine sums two gradients of one tensor and a run without modes adds in place: it does so
    when it holds the last reference (`InputBuffer::accumulate`), but never under dispatch modes or for subclasses."""
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith(_COMPILER_FRAMES):
        frame = frame.f_back
    if frame is None or frame.f_code.co_name != _ENGINE_FUNCTION:
        return False
    old, new = args[0], args[1]
    return (
        isinstance(new, torch.Tensor)
        and old.shape == new.shape
        and old.dtype == new.dtype
        and old._use_count() <= _ENGINE_ONLY_USE_COUNT
        and torch._C._storage_Use_Count(old.untyped_storage()._cdata) <= 2
    )


# --- boolean indices: operators whose result has no length on fake tensors --------------------------------------------
def _selected_count(mask: torch.Tensor) -> int:
    """True positions of a mask; all of a fake one, which has no values."""
    return int(mask.numel()) if isinstance(mask, FakeTensor) else int(mask.sum())


def _index_by_positions(log: StorageLog, func: Any, args: Any, kwargs: Any) -> Any:
    """`x[mask]`, `x[:, mask]` and `x[mask] = v`, as the CUDA kernels do them: by the mask's table of positions."""
    tensor_indices = [one for one in args[1] if one is not None]
    if len(tensor_indices) != 1 or tensor_indices[0].dtype != torch.bool:
        return func(*args, **kwargs)
    mask = tensor_indices[0]
    log.record_temporary((8 * _selected_count(mask) * mask.dim(),))
    if isinstance(mask, FakeTensor):
        positions = [torch.empty(_selected_count(mask), dtype=torch.int64) for _ in range(mask.dim())]
        indices = [one for index in args[1] for one in ([index] if index is None else positions)]
        args = (args[0], indices, *args[2:])
    return func(*args, **kwargs)


def _masked_select(log: StorageLog, func: Any, args: Any, kwargs: Any) -> Any:
    if not isinstance(args[1], FakeTensor):
        return func(*args, **kwargs)
    return torch.empty(_selected_count(args[1]), dtype=args[0].dtype)


def _read_mask_value(log: StorageLog, func: Any, args: Any, kwargs: Any) -> Any:
    """Models ask for the value of a boolean only to see a mask of ones (`create_recurrent_attention_mask`)."""
    if log.is_padded is None or not isinstance(args[0], FakeTensor) or args[0].dtype != torch.bool:
        return func(*args, **kwargs)
    return not log.is_padded()


_MASK_OPERATORS: dict[Any, Callable[[StorageLog, Any, Any, Any], Any]] = {
    torch.ops.aten.index.Tensor: _index_by_positions,
    torch.ops.aten.index_put_.default: _index_by_positions,
    torch.ops.aten.index_put.default: _index_by_positions,
    torch.ops.aten._index_put_impl_.default: _index_by_positions,
    torch.ops.aten.masked_select.default: _masked_select,
    torch.ops.aten._local_scalar_dense.default: _read_mask_value,
}
