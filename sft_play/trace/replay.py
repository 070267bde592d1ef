"""A recorded step through the simulated allocator: the highest bytes of each phase."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from sft_play.trace.allocator import CachingAllocator

BIRTH, DEATH, MARK, EMPTY_CACHE, USED, WAIT = 0, 1, 2, 3, 4, 5
"""Kinds of events: a storage is allocated (key, bytes, stream) or freed (key), a phase starts (name, step), the cache
is emptied, another stream uses a storage (key, stream), the host waits until the work submitted by then is done (an
event's index, or -1: all work)."""

Event = tuple[int, object, int, int]
"""(kind, key or phase's name, bytes or step or an event's index, stream); 0 is the model's own stream."""


@dataclass
class Peaks:
    """Highest bytes of a replay: as the counters show them, and inside each phase."""

    allocated: int = 0
    reserved: int = 0
    phases: dict[str, tuple[int, int]] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    """Allocated bytes when a phase first ended."""
    retries: int = 0


def replay(
    events: Iterable[Event],
    *,
    expandable_segments: bool = False,
    capacity: int | None = None,
    count_from: Literal["loaded", "start", "second_step"] = "loaded",
) -> Peaks:
    """Peaks of the events, counted from the first event, from the end of loading, or from the second step.

    Raises:
        SimulatedOutOfMemory: `capacity` (bytes) does not hold the step.
    """
    allocator = CachingAllocator(expandable_segments=expandable_segments, capacity=capacity)
    peaks, phase, counts = Peaks(), "build", count_from == "start"
    malloc, free = allocator.malloc, allocator.free
    events = list(events)
    # moments that a later WAIT refers to by the event's index
    awaited = {number for kind, _, number, _ in events if kind == WAIT}
    moments: dict[int, int | None] = {-1: None}
    for index, (kind, key, number, stream) in enumerate(events):
        if index in awaited:
            moments[index] = allocator.moment()
        if kind == BIRTH:
            malloc(key, number, stream)
        elif kind == DEATH:
            free(key)
        elif kind == USED:
            allocator.record_stream(key, stream)
        elif kind == WAIT:
            allocator.synchronise(moments[number])
        elif kind == EMPTY_CACHE:
            allocator.empty_cache()
        else:
            _close(peaks, phase, allocator, counts)
            phase = str(key)
            counts = counts or count_from == "loaded" or number >= 1
    _close(peaks, phase, allocator, counts)
    peaks.retries = allocator.retries
    return peaks


def _close(peaks: Peaks, phase: str, allocator: CachingAllocator, counts: bool) -> None:
    """End a phase: its highest bytes enter the table, and the counters where they are on."""
    old = peaks.phases.get(phase, (0, 0))
    peaks.phases[phase] = (max(old[0], allocator.peak_allocated), max(old[1], allocator.peak_reserved))
    peaks.after.setdefault(phase, allocator.allocated)
    if counts:
        peaks.allocated = max(peaks.allocated, allocator.peak_allocated)
        peaks.reserved = max(peaks.reserved, allocator.peak_reserved)
    allocator.reset_peaks()
