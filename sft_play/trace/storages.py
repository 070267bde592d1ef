"""Allocation and freeing of tensors' storages while real code runs, on fake tensors or on real
ones: a dispatch mode sees every operator's outputs, a finalizer on each storage its end. A recorded
step is replayed in the simulated allocator.
"""

from __future__ import annotations

import bisect
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

# PyTorch's CUDA caching allocator on integers: what a sequence of tensors costs in blocks and in
# segments.
#
# Rules and constants are those of `c10/cuda/CUDACachingAllocator.cpp` of PyTorch 2.13 at default
# settings. Each stream has its pools. All sizes are bytes.

# kMinBlockSize: every request is rounded up to a multiple of it.
MIN_BLOCK_SIZE = 512
# kSmallSize: the largest request of the small pool.
SMALL_SIZE = 1 << 20
# kSmallBuffer: a segment of the small pool, and its page in expandable segments.
SMALL_BUFFER = 2 << 20
# kLargeBuffer: a segment for large requests below MIN_LARGE_ALLOC, and the large pool's page.
LARGE_BUFFER = 20 << 20
# kMinLargeAlloc: requests from this size on get their own segment.
MIN_LARGE_ALLOC = 10 << 20
# kRoundLarge: such a segment is rounded up to a multiple of it.
ROUND_LARGE = 2 << 20
_ADDRESS_SPACE = 1 << 48


class _Block:
    """A range of one segment: in use, free, or (expandable segments) address space without
    memory."""

    __slots__ = ("allocated", "mapped", "next", "pool", "prev", "ptr", "size")

    def __init__(self, ptr: int, size: int, pool: _BlockPool, *, mapped: bool = True) -> None:
        self.ptr, self.size, self.pool, self.mapped = ptr, size, pool, mapped
        self.prev: _Block | None = None
        self.next: _Block | None = None
        self.allocated = False

    def split(self, size: int) -> _Block:
        """Keep the first `size` bytes; returns the rest as a block of its own."""
        rest = _Block(self.ptr + size, self.size - size, self.pool, mapped=self.mapped)
        rest.prev, rest.next, self.size = self, self.next, size
        if self.next is not None:
            self.next.prev = rest
        self.next = rest
        return rest


class _BlockPool:
    """The free blocks of one size class and stream, ordered by size and then address; address space
    without memory by address."""

    __slots__ = ("blocks", "is_small", "page_size", "stream", "unmapped")

    def __init__(self, *, is_small: bool, stream: int) -> None:
        self.is_small, self.stream = is_small, stream
        self.page_size = SMALL_BUFFER if is_small else LARGE_BUFFER
        self.blocks: list[tuple[int, int, _Block]] = []
        self.unmapped: list[tuple[int, _Block]] = []

    def insert(self, block: _Block) -> None:
        if block.mapped:
            bisect.insort(self.blocks, (block.size, block.ptr, block))
        else:
            bisect.insort(self.unmapped, (block.ptr, block))

    def remove(self, block: _Block) -> None:
        if block.mapped:
            del self.blocks[bisect.bisect_left(self.blocks, (block.size, block.ptr))]
        else:
            del self.unmapped[bisect.bisect_left(self.unmapped, (block.ptr,))]


class CachingAllocator:
    """One GPU, with what `torch.cuda.memory_stats` calls allocated and reserved, and peaks since
    the last reset."""

    def __init__(self, *, expandable_segments: bool = False) -> None:
        self.uses_expandable_segments = expandable_segments
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated = self.peak_reserved = 0
        self._pools: dict[tuple[bool, int], _BlockPool] = {}
        self._active_blocks: dict[object, _Block] = {}
        self._next_ptr = _ADDRESS_SPACE

    # --- what a program sees ----------------------------------------------------------------------
    def malloc(self, key: object, nbytes: int, stream: int = 0) -> None:
        """Give `key` a block for `nbytes` bytes; an empty tensor has none."""
        if nbytes == 0:
            return
        size = -(-nbytes // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE
        # small and large requests never share a segment, nor do streams: what one frees the other
        # cannot reuse
        kind = (size <= SMALL_SIZE, stream)
        if kind not in self._pools:
            self._pools[kind] = _BlockPool(is_small=kind[0], stream=stream)
        pool = self._pools[kind]
        # a cached block first: only where none fits does the device give more, and `reserved_bytes`
        # grow
        block = self._get_free_block(pool, size) or self._alloc_block(pool, size)
        # the remainder is split off where it is worth keeping: 512 bytes, in the large pool more
        # than 1 MiB
        remaining_size = block.size - size
        keeps_small_rest = pool.is_small or self.uses_expandable_segments
        if remaining_size > SMALL_SIZE or (keeps_small_rest and remaining_size >= MIN_BLOCK_SIZE):
            pool.insert(block.split(size))
        block.allocated = True
        self._active_blocks[key] = block
        self.allocated_bytes += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated_bytes)

    def free(self, key: object) -> None:
        """Return the block of `key`, if it has one, to the cache."""
        block = self._active_blocks.pop(key, None)
        if block is not None:
            self.allocated_bytes -= block.size
            self._free_block(block)

    def empty_cache(self) -> None:
        """Return whole free segments, or free pages, to the device, as `torch.cuda.empty_cache`
        does."""
        for pool in self._pools.values():
            for _, _, block in list(pool.blocks):
                if self.uses_expandable_segments:
                    self._unmap_block(block)
                elif block.prev is None and block.next is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size

    # --- inside -----------------------------------------------------------------------------------
    def _free_block(self, block: _Block) -> None:
        block.allocated = False
        self._insert_merged(block)

    def _get_free_block(self, pool: _BlockPool, size: int) -> _Block | None:
        index = bisect.bisect_left(pool.blocks, (size,))
        if index == len(pool.blocks):
            return None
        # an expandable segment is chosen by the size that the free block could grow to, as upstream
        # does
        if self.uses_expandable_segments:
            while index + 1 < len(pool.blocks) and _expandable_size(
                pool.blocks[index + 1][2]
            ) < _expandable_size(pool.blocks[index][2]):
                index += 1
        return pool.blocks.pop(index)[2]

    def _insert_merged(self, block: _Block) -> None:
        """Join a block with free neighbours of its kind, and put it into its pool."""
        # a neighbour is in its pool by its old size, so it leaves the pool before it grows
        if (
            (before := block.prev) is not None
            and not before.allocated
            and before.mapped == block.mapped
        ):
            block.pool.remove(before)
            block.ptr, block.size, block.prev = before.ptr, block.size + before.size, before.prev
            if block.prev is not None:
                block.prev.next = block
        if (
            (after := block.next) is not None
            and not after.allocated
            and after.mapped == block.mapped
        ):
            block.pool.remove(after)
            block.size, block.next = block.size + after.size, after.next
            if block.next is not None:
                block.next.prev = block
        block.pool.insert(block)

    def _alloc_block(self, pool: _BlockPool, size: int) -> _Block:
        if self.uses_expandable_segments:
            block = self._find_expandable_block(pool, size)
            # memory is mapped piece by piece, as upstream does: each piece joins the free block
            # before it
            if not block.mapped:
                self._map_block(block, min(block.size, size))
            while block.size < size:
                assert block.next is not None
                block = self._map_block(block.next, min(size - block.size, block.next.size))
            pool.remove(block)
            return block
        # what cudaMalloc is asked for
        segment = -(-size // ROUND_LARGE) * ROUND_LARGE
        if size <= SMALL_SIZE:
            segment = SMALL_BUFFER
        elif size < MIN_LARGE_ALLOC:
            segment = LARGE_BUFFER
        self._reserve_bytes(segment)
        block = _Block(self._next_ptr, segment, pool)
        self._next_ptr += segment + ROUND_LARGE  # a gap: blocks of two segments are no neighbours
        return block

    def _reserve_bytes(self, nbytes: int) -> None:
        self.reserved_bytes += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved_bytes)

    # --- expandable segments ----------------------------------------------------------------------
    def _find_expandable_block(self, pool: _BlockPool, size: int) -> _Block:
        """The lowest run of unmapped and free blocks with room for `size`, or a new segment's."""
        for _, block in pool.unmapped:
            start = block
            if block.prev is not None and not block.prev.allocated:
                start = block.prev
            available = 0
            candidate: _Block | None = start
            while candidate is not None and not candidate.allocated and available < size:
                available, candidate = available + candidate.size, candidate.next
            if available >= size:
                return start
        segment = _Block(self._next_ptr, _ADDRESS_SPACE, pool, mapped=False)
        self._next_ptr += 2 * _ADDRESS_SPACE
        pool.insert(segment)
        return segment

    def _map_block(self, block: _Block, size: int) -> _Block:
        """Map memory for the first `size` bytes of an unmapped block, in whole pages; returns the
        free block there."""
        pool = block.pool
        size = min(block.size, -(-size // pool.page_size) * pool.page_size)
        self._reserve_bytes(size)
        pool.remove(block)
        if size < block.size:
            pool.insert(block.split(size))
        block.mapped = True
        self._insert_merged(block)
        return block

    def _unmap_block(self, block: _Block) -> None:
        """Return the whole pages inside a free block; the ends that share a page stay."""
        pool, page = block.pool, block.pool.page_size
        segment_start = block.ptr // _ADDRESS_SPACE * _ADDRESS_SPACE
        start = segment_start + -(-(block.ptr - segment_start) // page) * page
        stop = segment_start + (block.ptr + block.size - segment_start) // page * page
        if stop <= start:
            return
        pool.remove(block)
        if start > block.ptr:
            leading, block = block, block.split(start - block.ptr)
            pool.insert(leading)
        if block.ptr + block.size > stop:
            pool.insert(block.split(stop - start))
        self.reserved_bytes -= block.size
        block.mapped = False
        self._insert_merged(block)


def _expandable_size(block: _Block) -> int:
    next_block = block.next
    if next_block is None or next_block.mapped:
        return block.size
    return block.size + next_block.size


# Kinds of events: a storage is allocated (key, bytes, stream) or freed (key), a phase starts (name,
# step), the cache is emptied.
ALLOC, FREE, PHASE_START, EMPTY_CACHE = 0, 1, 2, 3

# (kind, key or phase's name, bytes or step, stream); 0 is the model's own stream.
Event = tuple[int, object, int, int]


@dataclass
class ReplayPeaks:
    """Highest bytes of a replay: as the counters show them, and inside each phase."""

    allocated: int = 0
    reserved: int = 0
    phases: dict[str, tuple[int, int]] = field(default_factory=dict)
    # Allocated bytes when a phase first ended.
    allocated_after: dict[str, int] = field(default_factory=dict)


def replay(events: Iterable[Event], *, expandable_segments: bool = False) -> ReplayPeaks:
    """Replay events through an allocator: peaks count from the moment when the model is loaded."""
    allocator = CachingAllocator(expandable_segments=expandable_segments)
    peaks, phase = ReplayPeaks(), "build"
    for kind, key, value, stream in events:
        if kind == ALLOC:
            allocator.malloc(key, value, stream)
        elif kind == FREE:
            allocator.free(key)
        elif kind == EMPTY_CACHE:
            allocator.empty_cache()
        elif kind == PHASE_START:
            record_phase_end(peaks, phase, allocator, counts_to_peak=phase != "build")
            phase = str(key)
    record_phase_end(peaks, phase, allocator, counts_to_peak=phase != "build")
    return peaks


def record_phase_end(
    peaks: ReplayPeaks, phase: str, allocator: CachingAllocator, counts_to_peak: bool
) -> None:
    """Record the peaks of a phase that ends."""
    previous = peaks.phases.get(phase, (0, 0))
    peaks.phases[phase] = (
        max(previous[0], allocator.peak_allocated),
        max(previous[1], allocator.peak_reserved),
    )
    peaks.allocated_after.setdefault(phase, allocator.allocated_bytes)
    if counts_to_peak:
        peaks.allocated = max(peaks.allocated, allocator.peak_allocated)
        peaks.reserved = max(peaks.reserved, allocator.peak_reserved)
    allocator.peak_allocated, allocator.peak_reserved = (
        allocator.allocated_bytes,
        allocator.reserved_bytes,
    )


# `_use_count()` of a gradient that only the engine's buffer holds, as a dispatch mode sees it
# (torch 2.11 to 2.13); more means that something else keeps it and the engine must not add in
# place.
_ENGINE_ONLY_USE_COUNT = 4
_DEVICE_OPERATOR = torch.ops.prim.device.default


class StorageLog(TorchDispatchMode):
    """The events of a run: enter it inside the FakeTensorMode, if there is one. `current` and
    `peak` are live bytes, not rounded to blocks; a fake boolean index counts as true everywhere;
    `is_padded` answers whether a mask has padding."""

    def __init__(self, *, workspace_sizes: Callable[..., tuple[int, ...]] | None = None) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.current = self.peak = 0
        self.operator_count = 0
        self._workspace_sizes = workspace_sizes
        self.is_padded: Callable[[], bool] | None = None
        self._live: dict[int, tuple[int, int]] = {}
        self._next_key = 0
        self._hide_depth = 0
        self._stream = 0
        self._streams: list[object] = [None]

    # --- what happened ----------------------------------------------------------------------------
    def start_phase(self, phase: str, step: int = 0) -> None:
        """Record that a phase starts, in the step of this index."""
        self.events.append((PHASE_START, phase, step, 0))

    def empty_cache(self) -> None:
        """The program calls `torch.cuda.empty_cache`."""
        self.events.append((EMPTY_CACHE, None, 0, 0))

    @contextmanager
    def use_stream(self, stream: object) -> Iterator[None]:
        """Storages allocated inside belong to this stream: any object; None is the model's own
        stream."""
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
        """Record a buffer of the run that is not a tensor here; returns its key for
        `record_free`."""
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
        """Record buffers that are all live at once inside one call, and freed after it."""
        keys = [(self.record_alloc(nbytes), nbytes) for nbytes in sizes if nbytes]
        for key, nbytes in reversed(keys):
            self.record_free(key, nbytes)

    def record_tensor(self, tensor: torch.Tensor) -> None:
        """Record a tensor that exists now. Its device is not queried, which would be as slow as any
        operator."""
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

    def record_resize(self, storage: Any) -> None:
        """Record `storage.resize_`, which is not an operator; FSDP empties and refills its gathered
        parameters with it."""
        entry = self._live.get(storage._cdata)
        nbytes = storage.nbytes()
        if entry is None or entry[1] == nbytes:
            return
        self.record_free(*entry)
        self._live[storage._cdata] = (self.record_alloc(nbytes) if nbytes else -1, nbytes)

    @contextmanager
    def hide_allocations(self) -> Iterator[None]:
        """Leave out tensors created inside: they do not exist in a real run."""
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
        # nothing is compiled here, and the guard around every operator takes a tenth of a trace
        return False

    # --- operators --------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OPERATOR and isinstance(args[0], FakeTensor):
            # as fake tensors answer it, two calls of three, in a tenth of the time
            return args[0].fake_device
        kwargs = kwargs or {}
        if DTensor in types:
            # DTensor unwraps itself; its wrapper's storage of global size does not exist
            return NotImplemented
        self.operator_count += 1
        is_sum = func is torch.ops.aten.add.Tensor and _accumulates_in_place(args)
        handler = _MASK_OPERATORS.get(func)
        out = func(*args, **kwargs) if handler is None else handler(self, func, args, kwargs)
        if is_sum:
            old_storage, new_storage = args[0].untyped_storage(), out.untyped_storage()
            entry = self._live.get(old_storage._cdata)
            is_new = new_storage._cdata not in self._live
            if entry is not None and is_new and entry[1] == new_storage.nbytes():
                # no free and no alloc event: autograd accumulates into the memory of the existing
                # gradient
                del self._live[old_storage._cdata]
                self._live[new_storage._cdata] = entry
                weakref.finalize(
                    new_storage, self._record_finalized, new_storage._cdata
                ).atexit = False
        workspaces = (
            self._workspace_sizes(func, args, kwargs, out)
            if self._workspace_sizes is not None
            else ()
        )
        if isinstance(out, torch.Tensor):
            self.record_tensor(out)
        elif out is not None:
            for leaf in tree_iter(out):
                if isinstance(leaf, torch.Tensor):
                    self.record_tensor(leaf)
        if workspaces:
            self.record_temporary(workspaces)
        return out


def _accumulates_in_place(args: Any) -> bool:
    """True if the autograd engine sums two gradients of one tensor and a run without modes adds in
    place: it does so when it holds the last reference (`InputBuffer::accumulate`), but never under
    dispatch modes or for subclasses.
    """
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    frame: FrameType | None = sys._getframe(2)
    # behind the compiler's own frames
    while frame is not None and frame.f_code.co_filename.endswith(
        ("_dynamo/eval_frame.py", "torch/_compile.py")
    ):
        frame = frame.f_back
    if frame is None or frame.f_code.co_name != "_engine_run_backward":
        return False
    old, new = args[0], args[1]
    return (
        isinstance(new, torch.Tensor)
        and old.shape == new.shape
        and old.dtype == new.dtype
        and old._use_count() <= _ENGINE_ONLY_USE_COUNT
        and torch._C._storage_Use_Count(old.untyped_storage()._cdata) <= 2
    )


# --- boolean indices: operators whose result has no length on fake tensors ------------------------
def _selected_count(mask: torch.Tensor) -> int:
    """True positions of a mask; all of a fake one, which has no values."""
    return int(mask.numel()) if isinstance(mask, FakeTensor) else int(mask.sum())


def _index_by_positions(log: StorageLog, func: Any, args: Any, kwargs: Any) -> Any:
    """`x[mask]`, `x[:, mask]` and `x[mask] = v`, as the CUDA kernels do them: by the mask's table
    of positions."""
    tensor_indices = [one for one in args[1] if one is not None]
    if len(tensor_indices) != 1 or tensor_indices[0].dtype != torch.bool:
        return func(*args, **kwargs)
    mask = tensor_indices[0]
    log.record_temporary((8 * _selected_count(mask) * mask.dim(),))
    if isinstance(mask, FakeTensor):
        positions = [
            torch.empty(_selected_count(mask), dtype=torch.int64) for _ in range(mask.dim())
        ]
        indices = [one for index in args[1] for one in ([index] if index is None else positions)]
        args = (args[0], indices, *args[2:])
    return func(*args, **kwargs)


def _masked_select(log: StorageLog, func: Any, args: Any, kwargs: Any) -> Any:
    if not isinstance(args[1], FakeTensor):
        return func(*args, **kwargs)
    return torch.empty(_selected_count(args[1]), dtype=args[0].dtype)


def _read_mask_value(log: StorageLog, func: Any, args: Any, kwargs: Any) -> Any:
    """Models ask for the value of a boolean only to see a mask of ones
    (`create_recurrent_attention_mask`)."""
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
