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
BIRTH, DEATH, MARK, EMPTY_CACHE = 0, 1, 2, 3

# (kind, key or phase's name, bytes or step, stream); 0 is the model's own stream.
Event = tuple[int, object, int, int]


@dataclass
class Peaks:
    """Highest bytes of a replay: as the counters show them, and inside each phase."""

    allocated: int = 0
    reserved: int = 0
    phases: dict[str, tuple[int, int]] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    """Allocated bytes when a phase first ended."""


def replay(events: Iterable[Event], *, expandable_segments: bool = False) -> Peaks:
    """Peaks of the events, counted once the model is loaded."""
    allocator = CachingAllocator(expandable_segments=expandable_segments)
    peaks, phase = Peaks(), "build"
    malloc, free = allocator.malloc, allocator.free
    for kind, key, number, stream in events:
        if kind == BIRTH:
            malloc(key, number, stream)
        elif kind == DEATH:
            free(key)
        elif kind == EMPTY_CACHE:
            allocator.empty_cache()
        elif kind == MARK:
            close(peaks, phase, allocator, counts=phase != "build")
            phase = str(key)
    close(peaks, phase, allocator, counts=phase != "build")
    return peaks


def close(peaks: Peaks, phase: str, allocator: CachingAllocator, counts: bool) -> None:
    """The end of a phase."""
    old = peaks.phases.get(phase, (0, 0))
    peaks.phases[phase] = (max(old[0], allocator.peak_allocated), max(old[1], allocator.peak_reserved))
    peaks.after.setdefault(phase, allocator.allocated)
    if counts:
        peaks.allocated = max(peaks.allocated, allocator.peak_allocated)
        peaks.reserved = max(peaks.reserved, allocator.peak_reserved)
    allocator.reset_peaks()


Workspace = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], tuple[int, ...]]

# `_use_count()` of a gradient that only the engine's buffer holds, as a dispatch mode sees it (torch 2.11 to 2.13);
# more means that something else keeps it and the engine must not add in place.
_HELD_BY_ENGINE_ALONE = 4
_DEVICE_OF = torch.ops.prim.device.default
_ENGINE = "_engine_run_backward"
_COMPILER_FRAMES = ("_dynamo/eval_frame.py", "torch/_compile.py")


class StorageLog(TorchDispatchMode):
    """The events of a run: enter it inside the FakeTensorMode, if there is one. `current` and `peak` are live bytes,
    not rounded to blocks; a fake boolean index counts as true everywhere; `is_padded` answers whether a mask has
    padding."""

    def __init__(self, *, workspace: Workspace | None = None, is_padded: Callable[[], bool] | None = None) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.current = self.peak = 0
        self.operators = 0
        self._workspace = workspace
        self.is_padded = is_padded
        self._live: dict[int, tuple[int, int]] = {}
        self._next_key = 0
        self._hidden = 0
        self._stream = 0
        self._streams: list[object] = [None]

    # --- what happened ------------------------------------------------------------------------------------------------
    def mark(self, phase: str, step: int = 0) -> None:
        """A phase starts, in the step of this number."""
        self.events.append((MARK, phase, step, 0))

    def empty_cache(self) -> None:
        """The program calls `torch.cuda.empty_cache`."""
        self.events.append((EMPTY_CACHE, None, 0, 0))

    @contextmanager
    def on(self, stream: object) -> Iterator[None]:
        """Storages allocated inside belong to this stream: any object; None is the model's own stream."""
        before, self._stream = self._stream, self._number(stream)
        try:
            yield
        finally:
            self._stream = before

    def _number(self, stream: object) -> int:
        if stream not in self._streams:
            self._streams.append(stream)
        return self._streams.index(stream)

    def born(self, nbytes: int) -> int:
        """A buffer of the run that is not a tensor here; returns its key for `dies`."""
        key = self._next_key
        self._next_key += 1
        self.events.append((BIRTH, key, nbytes, self._stream))
        self.current += nbytes
        self.peak = max(self.peak, self.current)
        return key

    def dies(self, key: int, nbytes: int) -> None:
        """The end of what `born` started."""
        if nbytes:
            self.events.append((DEATH, key, 0, 0))
            self.current -= nbytes

    def passing(self, sizes: tuple[int, ...]) -> None:
        """Buffers that are all live at once inside one call, and freed after it."""
        keys = [(self.born(nbytes), nbytes) for nbytes in sizes if nbytes]
        for key, nbytes in reversed(keys):
            self.dies(key, nbytes)

    def see(self, tensor: torch.Tensor) -> None:
        """A tensor that exists now. Its device is not queried, which would be as slow as any operator."""
        if self._hidden or isinstance(tensor, DTensor):
            return
        storage = tensor.untyped_storage()
        entry = self._live.get(storage._cdata)
        if entry is None:
            nbytes = storage.nbytes()
            self._live[storage._cdata] = (self.born(nbytes), nbytes)
            # not at exit: storages that outlive the trace say nothing about it
            weakref.finalize(storage, self._died, storage._cdata).atexit = False
        elif entry[1] != storage.nbytes():
            self.resized(storage)

    def key_of(self, tensor: torch.Tensor) -> int | None:
        """The key of a tensor's storage; None for one that is not live here."""
        return self._live.get(tensor.untyped_storage()._cdata, (None, 0))[0]

    def lives(self, key: int | None) -> bool:
        """Whether the storage of this key is still there."""
        return any(entry[0] == key for entry in self._live.values())

    def resized(self, storage: Any) -> None:
        """`storage.resize_` is not an operator; FSDP empties and refills its gathered parameters with it."""
        entry = self._live.get(storage._cdata)
        nbytes = storage.nbytes()
        if entry is None or entry[1] == nbytes:
            return
        self.dies(*entry)
        self._live[storage._cdata] = (self.born(nbytes) if nbytes else -1, nbytes)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Tensors created inside do not exist in a real run."""
        self._hidden += 1
        try:
            yield
        finally:
            self._hidden -= 1

    def _died(self, cdata: int) -> None:
        entry = self._live.pop(cdata, None)
        if entry is not None:
            self.dies(*entry)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled here, and the guard around every operator takes a tenth of a trace."""
        return False

    # --- operators ----------------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # as fake tensors answer it, two calls of three, in a tenth of the time
        kwargs = kwargs or {}
        if DTensor in types:
            return NotImplemented  # DTensor unwraps itself; its wrapper's storage of global size does not exist
        self.operators += 1
        is_sum = func is torch.ops.aten.add.Tensor and _engine_adds_in_place(args)
        choice = _CHOOSING.get(func)
        out = func(*args, **kwargs) if choice is None else choice(self, func, args, kwargs)
        if is_sum:
            self._take_over(args[0], out)
        extra = self._workspace(func, args, kwargs, out) if self._workspace is not None else ()
        if isinstance(out, torch.Tensor):
            self.see(out)
        elif out is not None:
            for leaf in tree_iter(out):
                if isinstance(leaf, torch.Tensor):
                    self.see(leaf)
        if extra:
            self.passing(extra)
        return out

    def _take_over(self, old: torch.Tensor, new: torch.Tensor) -> None:
        old_storage, new_storage = old.untyped_storage(), new.untyped_storage()
        entry = self._live.get(old_storage._cdata)
        if entry is None or new_storage._cdata in self._live or entry[1] != new_storage.nbytes():
            return
        # no death and no birth: the engine would have summed into the older gradient's memory
        del self._live[old_storage._cdata]
        self._live[new_storage._cdata] = entry
        weakref.finalize(new_storage, self._died, new_storage._cdata).atexit = False


def _engine_adds_in_place(args: Any) -> bool:
    """Whether the autograd engine sums two gradients of one tensor and a run without modes adds in place: it does so
    when it holds the last reference (`InputBuffer::accumulate`), but never under dispatch modes or for subclasses."""
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith(_COMPILER_FRAMES):
        frame = frame.f_back
    if frame is None or frame.f_code.co_name != _ENGINE:
        return False
    old, new = args[0], args[1]
    return (
        isinstance(new, torch.Tensor)
        and old.shape == new.shape
        and old.dtype == new.dtype
        and old._use_count() <= _HELD_BY_ENGINE_ALONE
        and torch._C._storage_Use_Count(old.untyped_storage()._cdata) <= 2
    )


# --- boolean indices: operators whose result has no length on fake tensors --------------------------------------------
def _chosen(mask: torch.Tensor) -> int:
    """True positions of a mask; all of a fake one, which has no values."""
    return int(mask.numel()) if isinstance(mask, FakeTensor) else int(mask.sum())


def _by_positions(log: StorageLog, func: Any, args: Any, kwargs: Any) -> Any:
    """`x[mask]`, `x[:, mask]` and `x[mask] = v`, as the CUDA kernels do them: by the mask's table of positions."""
    given = [one for one in args[1] if one is not None]
    if len(given) != 1 or given[0].dtype != torch.bool:
        return func(*args, **kwargs)
    mask = given[0]
    log.passing((8 * _chosen(mask) * mask.dim(),))
    if isinstance(mask, FakeTensor):
        positions = [torch.empty(_chosen(mask), dtype=torch.int64) for _ in range(mask.dim())]
        indices = [one for place in args[1] for one in ([place] if place is None else positions)]
        args = (args[0], indices, *args[2:])
    return func(*args, **kwargs)


def _selected(log: StorageLog, func: Any, args: Any, kwargs: Any) -> Any:
    if not isinstance(args[1], FakeTensor):
        return func(*args, **kwargs)
    return torch.empty(_chosen(args[1]), dtype=args[0].dtype)


def _is_unpadded(log: StorageLog, func: Any, args: Any, kwargs: Any) -> Any:
    """Models ask for the value of a boolean only to see a mask of ones (`create_recurrent_attention_mask`)."""
    if log.is_padded is None or not isinstance(args[0], FakeTensor) or args[0].dtype != torch.bool:
        return func(*args, **kwargs)
    return not log.is_padded()


_CHOOSING: dict[Any, Callable[[StorageLog, Any, Any, Any], Any]] = {
    torch.ops.aten.index.Tensor: _by_positions,
    torch.ops.aten.index_put_.default: _by_positions,
    torch.ops.aten.index_put.default: _by_positions,
    torch.ops.aten._index_put_impl_.default: _by_positions,
    torch.ops.aten.masked_select.default: _selected,
    torch.ops.aten._local_scalar_dense.default: _is_unpadded,
}
