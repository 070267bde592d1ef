"""What the allocator did for older scripts: blocks that another stream used, and a card that is full.

A block that another stream used (`record_stream`) waits, once freed, until the host knows that its use has ended. FSDP1
did so; FSDP2 waits by events and tells the allocator nothing.
"""

from collections.abc import Iterable
from typing import Literal

import torch

from sft_play.trace.storages import (
    ALLOC,
    EMPTY_CACHE,
    FREE,
    CachingAllocator,
    Event,
    ReplayPeaks,
    StorageLog,
    _Block,
    _BlockPool,
    record_phase_end,
)

USED, WAIT = 4, 5
"""Two more kinds of events: another stream uses a storage (key, stream), the host waits until the work submitted by
then is done (an event's index, or -1: all work)."""


class SimulatedOutOfMemory(MemoryError):
    """The simulated GPU has no room for a segment, even after its cache was freed."""


class ScriptAllocator(CachingAllocator):
    """Beyond `capacity` bytes of segments the cache is given back, then it raises SimulatedOutOfMemory."""

    def __init__(self, *, expandable_segments: bool = False, capacity: int | None = None) -> None:
        super().__init__(expandable_segments=expandable_segments)
        self.capacity = capacity
        self._uses: dict[object, set[int]] = {}
        self._waiting: list[tuple[int, _Block]] = []
        self._frees = 0

    def free(self, key: object) -> None:
        """Return the block of `key`, if it has one, to the cache, at once or when other streams are done with it."""
        block = self._active_blocks.pop(key, None)
        if block is None:
            return
        self.allocated_bytes -= block.size
        self._frees += 1
        if self._uses.pop(key, None):
            self._waiting.append((self._frees, block))
        else:
            self._free_block(block)

    def record_stream(self, key: object, stream: int) -> None:
        """`Tensor.record_stream`: once freed, the block of `key` also waits for this stream; its own needs no wait."""
        block = self._active_blocks.get(key)
        if block is not None and stream != block.pool.stream:
            self._uses.setdefault(key, set()).add(stream)

    def moment(self) -> int:
        return self._frees

    def synchronise(self, until: int | None = None) -> None:
        """The host knows that all work up to this moment is done (None: all): what waited for it is free."""
        done = [block for when, block in self._waiting if until is None or when <= until]
        self._waiting = [] if until is None else [pair for pair in self._waiting if pair[0] > until]
        for block in done:
            self._free_block(block)

    def empty_cache(self) -> None:
        self.synchronise()
        super().empty_cache()

    def _alloc_block(self, pool: _BlockPool, size: int) -> _Block:
        try:
            return super()._alloc_block(pool, size)
        except SimulatedOutOfMemory:  # free the cache and try again, as malloc_retry does
            self.empty_cache()
            return super()._alloc_block(pool, size)

    def _reserve_bytes(self, nbytes: int) -> None:
        if self.capacity is not None and self.reserved_bytes + nbytes > self.capacity:
            raise SimulatedOutOfMemory(
                f"{self.reserved_bytes} bytes are reserved ({self.allocated_bytes} in use); {nbytes} more do not "
                f"fit into {self.capacity}"
            )
        super()._reserve_bytes(nbytes)


class ScriptLog(StorageLog):
    """A log that hears of streams and of the host's waiting, too."""

    def used(self, tensor: torch.Tensor, stream: object) -> None:
        entry = self._live.get(tensor.untyped_storage()._cdata)
        if entry is not None:
            self.events.append((USED, entry[0], 0, self._stream_index(stream)))

    def wait(self, until: int = -1) -> None:
        """The host waits for the work submitted before the event of this index (-1: all of it)."""
        self.events.append((WAIT, None, until, 0))


def replay(
    events: Iterable[Event],
    *,
    expandable_segments: bool = False,
    capacity: int | None = None,
    count_from: Literal["loaded", "start", "second_step"] = "loaded",
) -> ReplayPeaks:
    """Peaks of the events, counted from then on; raises SimulatedOutOfMemory where `capacity` is too little."""
    allocator = ScriptAllocator(expandable_segments=expandable_segments, capacity=capacity)
    peaks, phase, counts = ReplayPeaks(), "build", count_from == "start"
    events = list(events)
    # moments that a later WAIT refers to by the event's index
    awaited = {number for kind, _, number, _ in events if kind == WAIT}
    moments: dict[int, int | None] = {-1: None}
    for index, (kind, key, number, stream) in enumerate(events):
        if index in awaited:
            moments[index] = allocator.moment()
        if kind == ALLOC:
            allocator.malloc(key, number, stream)
        elif kind == FREE:
            allocator.free(key)
        elif kind == USED:
            allocator.record_stream(key, stream)
        elif kind == WAIT:
            allocator.synchronise(moments[number])
        elif kind == EMPTY_CACHE:
            allocator.empty_cache()
        else:
            record_phase_end(peaks, phase, allocator, counts)
            phase = str(key)
            counts = counts or count_from == "loaded" or number >= 1
    record_phase_end(peaks, phase, allocator, counts)
    return peaks
