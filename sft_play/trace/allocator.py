"""PyTorch's CUDA caching allocator on integers: what a sequence of tensors costs in blocks and in segments.

Rules and constants are those of `c10/cuda/CUDACachingAllocator.cpp` of PyTorch 2.13 at default settings. Each stream
has its pools. All sizes are bytes.
"""

from __future__ import annotations

import bisect

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


def round_size(nbytes: int) -> int:
    """The block size of a request: a multiple of 512, at least 512."""
    return max(MIN_BLOCK_SIZE, -(-nbytes // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE)


def allocation_size(size: int) -> int:
    """What cudaMalloc is asked for when no cached block fits a block of `size` bytes."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    if size < MIN_LARGE_ALLOC:
        return LARGE_BUFFER
    return -(-size // ROUND_LARGE) * ROUND_LARGE


class _Block:
    """A range of one segment: in use, free, or (expandable segments) address space without memory."""

    __slots__ = ("allocated", "mapped", "next", "pool", "prev", "ptr", "size")

    def __init__(self, ptr: int, size: int, pool: _BlockPool, *, mapped: bool = True) -> None:
        self.ptr, self.size, self.pool, self.mapped = ptr, size, pool, mapped
        self.prev: _Block | None = None
        self.next: _Block | None = None
        self.allocated = False

    def splice_after(self, block: _Block) -> None:
        self.prev, self.next = block, block.next
        if block.next is not None:
            block.next.prev = self
        block.next = self


_FreeBlock = tuple[int, int, _Block]


class _BlockPool:
    """The free blocks of one size class and stream, ordered by size and then address."""

    __slots__ = ("blocks", "is_small", "stream", "unmapped")

    def __init__(self, *, is_small: bool, stream: int) -> None:
        self.is_small, self.stream = is_small, stream
        self.blocks: list[_FreeBlock] = []
        self.unmapped: list[tuple[int, _Block]] = []

    @property
    def page_size(self) -> int:
        return SMALL_BUFFER if self.is_small else LARGE_BUFFER

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
    """One GPU, with what `torch.cuda.memory_stats` calls allocated and reserved, and peaks since the last reset."""

    def __init__(self, *, expandable_segments: bool = False) -> None:
        self.uses_expandable_segments = expandable_segments
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated = self.peak_reserved = 0
        self._pools: dict[tuple[bool, int], _BlockPool] = {}
        self._active_blocks: dict[object, _Block] = {}
        self._next_ptr = _ADDRESS_SPACE

    # --- what a program sees ------------------------------------------------------------------------------------------
    def malloc(self, key: object, nbytes: int, stream: int = 0) -> None:
        """Give `key` a block for `nbytes` bytes; an empty tensor has none."""
        if nbytes == 0:
            return
        size = round_size(nbytes)
        pool = self._get_pool(size <= SMALL_SIZE, stream)
        block = self._get_free_block(pool, size) or self._alloc_block(pool, size)
        self._split_block(block, size)
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
        """`torch.cuda.empty_cache`: whole free segments, or free pages, go back."""
        for pool in self._pools.values():
            for _, _, block in list(pool.blocks):
                if self.uses_expandable_segments:
                    self._unmap_block(block)
                elif block.prev is None and block.next is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size

    def reset_peak_stats(self) -> None:
        """`torch.cuda.reset_peak_memory_stats`."""
        self.peak_allocated, self.peak_reserved = self.allocated_bytes, self.reserved_bytes

    # --- inside -------------------------------------------------------------------------------------------------------
    def _get_pool(self, is_small: bool, stream: int) -> _BlockPool:
        pool = self._pools.get((is_small, stream))
        if pool is None:
            pool = self._pools[is_small, stream] = _BlockPool(is_small=is_small, stream=stream)
        return pool

    def _free_block(self, block: _Block) -> None:
        block.allocated = False
        block = self._try_merge_blocks(block)
        block.pool.insert(block)

    def _get_free_block(self, pool: _BlockPool, size: int) -> _Block | None:
        index = bisect.bisect_left(pool.blocks, (size,))
        if index == len(pool.blocks):
            return None
        # an expandable segment is chosen by the size that the free block could grow to, as upstream does
        if self.uses_expandable_segments:
            while index + 1 < len(pool.blocks) and _expandable_size(pool.blocks[index + 1][2]) < _expandable_size(
                pool.blocks[index][2]
            ):
                index += 1
        return pool.blocks.pop(index)[2]

    def _split_block(self, block: _Block, size: int) -> None:
        """Split off the remainder where it is worth keeping: 512 bytes, in the large pool more than 1 MiB."""
        remaining_size = block.size - size
        if remaining_size < MIN_BLOCK_SIZE or (
            remaining_size <= SMALL_SIZE and not (block.pool.is_small or self.uses_expandable_segments)
        ):
            return
        remaining = _Block(block.ptr + size, remaining_size, block.pool)
        remaining.splice_after(block)
        block.size = size
        block.pool.insert(remaining)

    def _try_merge_blocks(self, block: _Block) -> _Block:
        prev_block, next_block = block.prev, block.next
        if prev_block is not None and not prev_block.allocated and prev_block.mapped == block.mapped:
            block.pool.remove(prev_block)
            block.ptr, block.size, block.prev = prev_block.ptr, block.size + prev_block.size, prev_block.prev
            if block.prev is not None:
                block.prev.next = block
        if next_block is not None and not next_block.allocated and next_block.mapped == block.mapped:
            block.pool.remove(next_block)
            block.size, block.next = block.size + next_block.size, next_block.next
            if block.next is not None:
                block.next.prev = block
        return block

    def _alloc_block(self, pool: _BlockPool, size: int) -> _Block:
        if self.uses_expandable_segments:
            return self._try_allocate_expandable_block(pool, size)
        segment = allocation_size(size)
        self._reserve_bytes(segment)
        block = _Block(self._next_ptr, segment, pool)
        self._next_ptr += segment + ROUND_LARGE
        return block

    def _reserve_bytes(self, nbytes: int) -> None:
        self.reserved_bytes += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved_bytes)

    # --- expandable segments ------------------------------------------------------------------------------------------
    def _try_allocate_expandable_block(self, pool: _BlockPool, size: int) -> _Block:
        """A free block of at least `size`, grown into unmapped address space."""
        block = self._find_expandable_block(pool, size)
        if not block.mapped:
            block = self._map_block(block, min(block.size, size))
        while block.size < size:
            assert block.next is not None
            block = self._map_block(block.next, min(size - block.size, block.next.size))
        pool.remove(block)
        return block

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
        """Memory for the first `size` bytes of an unmapped block, in whole pages; returns the free block there."""
        pool = block.pool
        size = min(block.size, -(-size // pool.page_size) * pool.page_size)
        self._reserve_bytes(size)
        pool.remove(block)
        if size < block.size:
            remaining = _Block(block.ptr + size, block.size - size, pool, mapped=False)
            remaining.splice_after(block)
            block.size = size
            pool.insert(remaining)
        block.mapped = True
        block = self._try_merge_blocks(block)
        pool.insert(block)
        return block

    def _unmap_block(self, block: _Block) -> None:
        """Return the whole pages inside a free block; the ends that share a page stay."""
        pool = block.pool
        segment_start = block.ptr // _ADDRESS_SPACE * _ADDRESS_SPACE  # the segment's start
        start = segment_start + -(-(block.ptr - segment_start) // pool.page_size) * pool.page_size
        stop = segment_start + (block.ptr + block.size - segment_start) // pool.page_size * pool.page_size
        if stop <= start:
            return
        pool.remove(block)
        if start > block.ptr:
            leading = _Block(block.ptr, start - block.ptr, pool)
            leading.prev, leading.next = block.prev, block
            if block.prev is not None:
                block.prev.next = leading
            block.prev = leading
            pool.insert(leading)
        end = block.ptr + block.size
        block.ptr, block.size = start, stop - start
        if end > stop:
            trailing = _Block(stop, end - stop, pool)
            trailing.splice_after(block)
            pool.insert(trailing)
        self.reserved_bytes -= block.size
        block.mapped = False
        pool.insert(self._try_merge_blocks(block))


def _expandable_size(block: _Block) -> int:
    next_block = block.next
    return block.size + (next_block.size if next_block is not None and not next_block.mapped else 0)
