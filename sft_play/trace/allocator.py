"""PyTorch's CUDA caching allocator on integers: what a sequence of tensors costs in blocks and in segments.

Rules and constants are those of `c10/cuda/CUDACachingAllocator.cpp` of PyTorch 2.13 at default settings. Each stream
has its pools. All sizes are bytes.
"""

from __future__ import annotations

import bisect

# kMinBlockSize: every request is rounded up to a multiple of it.
MIN_BLOCK = 512
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


def rounded(nbytes: int) -> int:
    """The block size of a request: a multiple of 512, at least 512."""
    return max(MIN_BLOCK, -(-nbytes // MIN_BLOCK) * MIN_BLOCK)


def segment_size(size: int) -> int:
    """What cudaMalloc is asked for when no cached block fits a block of `size` bytes."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    if size < MIN_LARGE_ALLOC:
        return LARGE_BUFFER
    return -(-size // ROUND_LARGE) * ROUND_LARGE


class _Block:
    """A range of one segment: in use, free, or (expandable segments) address space without memory."""

    __slots__ = ("address", "mapped", "next", "pool", "previous", "size", "used")

    def __init__(self, address: int, size: int, pool: _Pool, *, mapped: bool = True) -> None:
        self.address, self.size, self.pool, self.mapped = address, size, pool, mapped
        self.previous: _Block | None = None
        self.next: _Block | None = None
        self.used = False

    def link_after(self, other: _Block) -> None:
        self.previous, self.next = other, other.next
        if other.next is not None:
            other.next.previous = self
        other.next = self


_Entry = tuple[int, int, _Block]


class _Pool:
    """The free blocks of one size class and stream, ordered by size and then address."""

    __slots__ = ("free", "is_small", "stream", "unmapped")

    def __init__(self, *, is_small: bool, stream: int) -> None:
        self.is_small, self.stream = is_small, stream
        self.free: list[_Entry] = []
        self.unmapped: list[tuple[int, _Block]] = []

    @property
    def page(self) -> int:
        return SMALL_BUFFER if self.is_small else LARGE_BUFFER

    def insert(self, block: _Block) -> None:
        if block.mapped:
            bisect.insort(self.free, (block.size, block.address, block))
        else:
            bisect.insort(self.unmapped, (block.address, block))

    def remove(self, block: _Block) -> None:
        if block.mapped:
            del self.free[bisect.bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect.bisect_left(self.unmapped, (block.address,))]


class CachingAllocator:
    """One GPU, with what `torch.cuda.memory_stats` calls allocated and reserved, and peaks since the last reset."""

    def __init__(self, *, expandable_segments: bool = False) -> None:
        self.expandable = expandable_segments
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self._pools: dict[tuple[bool, int], _Pool] = {}
        self._used: dict[object, _Block] = {}
        self._next_address = _ADDRESS_SPACE

    # --- what a program sees ------------------------------------------------------------------------------------------
    def malloc(self, key: object, nbytes: int, stream: int = 0) -> None:
        """Give `key` a block for `nbytes` bytes; an empty tensor has none."""
        if nbytes == 0:
            return
        size = rounded(nbytes)
        pool = self._pool(size <= SMALL_SIZE, stream)
        block = self._cached(pool, size) or self._new_block(pool, size)
        self._split(block, size)
        block.used = True
        self._used[key] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, key: object) -> None:
        """Return the block of `key`, if it has one, to the cache."""
        block = self._used.pop(key, None)
        if block is not None:
            self.allocated -= block.size
            self._release(block)

    def empty_cache(self) -> None:
        """`torch.cuda.empty_cache`: whole free segments, or free pages, go back."""
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if self.expandable:
                    self._unmap(block)
                elif block.previous is None and block.next is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def reset_peaks(self) -> None:
        """`torch.cuda.reset_peak_memory_stats`."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    # --- inside -------------------------------------------------------------------------------------------------------
    def _pool(self, is_small: bool, stream: int) -> _Pool:
        pool = self._pools.get((is_small, stream))
        if pool is None:
            pool = self._pools[is_small, stream] = _Pool(is_small=is_small, stream=stream)
        return pool

    def _release(self, block: _Block) -> None:
        block.used = False
        block = self._merged(block)
        block.pool.insert(block)

    def _cached(self, pool: _Pool, size: int) -> _Block | None:
        at = bisect.bisect_left(pool.free, (size,))
        if at == len(pool.free):
            return None
        # an expandable segment is chosen by the size that the free block could grow to, as upstream does
        if self.expandable:
            while at + 1 < len(pool.free) and _could_be(pool.free[at + 1][2]) < _could_be(pool.free[at][2]):
                at += 1
        return pool.free.pop(at)[2]

    def _split(self, block: _Block, size: int) -> None:
        """Split off the remainder where it is worth keeping: 512 bytes, in the large pool more than 1 MiB."""
        rest = block.size - size
        if rest < MIN_BLOCK or (rest <= SMALL_SIZE and not (block.pool.is_small or self.expandable)):
            return
        tail = _Block(block.address + size, rest, block.pool)
        tail.link_after(block)
        block.size = size
        block.pool.insert(tail)

    def _merged(self, block: _Block) -> _Block:
        before, after = block.previous, block.next
        if before is not None and not before.used and before.mapped == block.mapped:
            block.pool.remove(before)
            block.address, block.size, block.previous = before.address, block.size + before.size, before.previous
            if block.previous is not None:
                block.previous.next = block
        if after is not None and not after.used and after.mapped == block.mapped:
            block.pool.remove(after)
            block.size, block.next = block.size + after.size, after.next
            if block.next is not None:
                block.next.previous = block
        return block

    def _new_block(self, pool: _Pool, size: int) -> _Block:
        if self.expandable:
            return self._expanded(pool, size)
        segment = segment_size(size)
        self._reserve(segment)
        block = _Block(self._next_address, segment, pool)
        self._next_address += segment + ROUND_LARGE
        return block

    def _reserve(self, nbytes: int) -> None:
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    # --- expandable segments ------------------------------------------------------------------------------------------
    def _expanded(self, pool: _Pool, size: int) -> _Block:
        """A free block of at least `size`, grown into unmapped address space."""
        block = self._growable(pool, size)
        if not block.mapped:
            block = self._map(block, min(block.size, size))
        while block.size < size:
            assert block.next is not None
            block = self._map(block.next, min(size - block.size, block.next.size))
        pool.remove(block)
        return block

    def _growable(self, pool: _Pool, size: int) -> _Block:
        """The lowest run of unmapped and free blocks with room for `size`, or a new segment's."""
        for _, block in pool.unmapped:
            start = block
            if block.previous is not None and not block.previous.used:
                start = block.previous
            room = 0
            at: _Block | None = start
            while at is not None and not at.used and room < size:
                room, at = room + at.size, at.next
            if room >= size:
                return start
        space = _Block(self._next_address, _ADDRESS_SPACE, pool, mapped=False)
        self._next_address += 2 * _ADDRESS_SPACE
        pool.insert(space)
        return space

    def _map(self, block: _Block, size: int) -> _Block:
        """Memory for the first `size` bytes of an unmapped block, in whole pages; returns the free block there."""
        pool = block.pool
        size = min(block.size, -(-size // pool.page) * pool.page)
        self._reserve(size)
        pool.remove(block)
        if size < block.size:
            rest = _Block(block.address + size, block.size - size, pool, mapped=False)
            rest.link_after(block)
            block.size = size
            pool.insert(rest)
        block.mapped = True
        block = self._merged(block)
        pool.insert(block)
        return block

    def _unmap(self, block: _Block) -> None:
        """Return the whole pages inside a free block; the ends that share a page stay."""
        pool = block.pool
        origin = block.address // _ADDRESS_SPACE * _ADDRESS_SPACE  # the segment's start
        start = origin + -(-(block.address - origin) // pool.page) * pool.page
        stop = origin + (block.address + block.size - origin) // pool.page * pool.page
        if stop <= start:
            return
        pool.remove(block)
        if start > block.address:
            head = _Block(block.address, start - block.address, pool)
            head.previous, head.next = block.previous, block
            if block.previous is not None:
                block.previous.next = head
            block.previous = head
            pool.insert(head)
        end = block.address + block.size
        block.address, block.size = start, stop - start
        if end > stop:
            tail = _Block(stop, end - stop, pool)
            tail.link_after(block)
            pool.insert(tail)
        self.reserved -= block.size
        block.mapped = False
        pool.insert(self._merged(block))


def _could_be(block: _Block) -> int:
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)
