"""The simulated CUDA caching allocator: its rules on sizes worked by hand, its bookkeeping on random traffic."""

from __future__ import annotations

import random

import pytest

from sft_play.trace.allocator import CachingAllocator, SimulatedOutOfMemory, rounded
from sft_play.trace.replay import BIRTH, DEATH, EMPTY_CACHE, MARK, replay

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("request_bytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),  # one block of 512 in a small segment
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),  # the largest small request
        (MIB + 1, MIB + 512, 20 * MIB),  # large pool, shared segment
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),  # the last one that shares
        (10 * MIB, 10 * MIB, 10 * MIB),  # a segment of its own
        (11 * MIB, 12 * MIB, 12 * MIB),  # rounded to 2 MiB; the rest of 1 MiB is not split off and counts
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),  # a rest of more than 1 MiB is split off
        (0, 0, 0),
    ],
)
def test_one_request_costs_its_block_and_its_segment(request_bytes, allocated, reserved):
    allocator = CachingAllocator()
    allocator.malloc("a", request_bytes)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)
    allocator.free("a")
    assert (allocator.allocated, allocator.reserved) == (0, reserved)
    allocator.empty_cache()
    assert allocator.reserved == 0


def test_the_smallest_free_block_that_fits_is_taken():
    allocator = CachingAllocator()
    for key, size in (("a", 30 * MIB), ("b", 14 * MIB), ("c", 22 * MIB)):
        allocator.malloc(key, size)
    for key in "abc":
        allocator.free(key)
    allocator.malloc("d", 20 * MIB)  # 22 MiB is the best fit; its rest of 2 MiB is split off
    assert allocator.reserved == 66 * MIB
    allocator.malloc("e", 30 * MIB)  # still free and whole
    assert allocator.reserved == 66 * MIB
    allocator.malloc("f", 2 * MIB)  # the rest of 22
    assert allocator.reserved == 66 * MIB


def test_freed_neighbours_become_one_block_again():
    allocator = CachingAllocator()
    for key in "abcd":
        allocator.malloc(key, 5 * MIB)  # all four in one segment of 20 MiB
    assert allocator.reserved == 20 * MIB
    allocator.free("b")
    allocator.free("c")
    allocator.malloc("e", 9 * MIB)  # fits only where b and c were
    assert allocator.reserved == 20 * MIB
    allocator.malloc("f", 6 * MIB)
    assert allocator.reserved == 40 * MIB


def test_streams_do_not_share_free_blocks():
    allocator = CachingAllocator()
    allocator.malloc("a", 12 * MIB, 0)
    allocator.free("a")
    allocator.malloc("b", 12 * MIB, 1)
    assert allocator.reserved == 24 * MIB


def test_capacity_gives_the_cache_back_before_it_refuses():
    allocator = CachingAllocator(capacity=64 * MIB)
    allocator.malloc("a", 40 * MIB)
    allocator.free("a")
    allocator.malloc("b", 60 * MIB)  # 40 MiB of cache had to go
    assert (allocator.reserved, allocator.retries) == (60 * MIB, 1)
    with pytest.raises(SimulatedOutOfMemory, match=str(64 * MIB)):
        allocator.malloc("c", 5 * MIB)


def test_an_expandable_segment_grows_by_pages_and_leaves_no_holes():
    allocator = CachingAllocator(expandable_segments=True)
    allocator.malloc("a", 30 * MIB)
    assert allocator.reserved == 40 * MIB  # two pages of 20 MiB
    allocator.malloc("b", 25 * MIB)  # 10 are there, one more page gives 30
    assert allocator.reserved == 60 * MIB
    allocator.free("a")
    allocator.malloc("c", 64 * MIB)  # the hole of 30 is too small: 5 at the end and three more pages
    assert allocator.reserved == 120 * MIB
    allocator.malloc("d", 30 * MIB)  # the hole
    assert allocator.reserved == 120 * MIB
    allocator.malloc("e", 512)
    assert allocator.reserved == 122 * MIB  # the small pool's page


def test_empty_cache_unmaps_whole_pages_inside_an_expandable_segment():
    allocator = CachingAllocator(expandable_segments=True)
    for key, size in (("a", 30 * MIB), ("b", 50 * MIB), ("c", 20 * MIB)):
        allocator.malloc(key, size)
    assert allocator.reserved == 100 * MIB
    allocator.free("b")  # 30..80: of its pages only 40..60 and 60..80 are whole
    allocator.empty_cache()
    assert allocator.reserved == 60 * MIB
    allocator.malloc("d", 50 * MIB)  # mapped again where it was
    assert allocator.reserved == 100 * MIB


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_keeps_the_books(expandable, seed):
    """Free and used bytes are the segments; nothing is left after the last free and an emptied cache."""
    draw, allocator, live = random.Random(seed), CachingAllocator(expandable_segments=expandable), {}
    for key in range(3000):
        if live and draw.random() < 0.5:
            gone = draw.choice(list(live))
            allocator.free(gone)
            del live[gone]
        else:
            live[key] = draw.choice((draw.randrange(1, 2000), draw.randrange(1, 3 * MIB), draw.randrange(1, 90 * MIB)))
            allocator.malloc(key, live[key], draw.randrange(2))
        if key % 500 == 499:
            allocator.empty_cache()
        assert allocator.allocated + allocator.free_bytes() == allocator.reserved
        assert allocator.requested == sum(live.values()) <= sum(map(rounded, live.values())) <= allocator.allocated
        assert allocator.reserved <= allocator.peak_reserved
    for key in live:
        allocator.free(key)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.requested, allocator.reserved) == (0, 0, 0)


EVENTS = [
    (BIRTH, "loading", 40 * MIB, 0),
    (DEATH, "loading", 0, 0),
    (BIRTH, "weights", 12 * MIB, 0),
    (MARK, "forward", 0, 0),
    (BIRTH, "saved", 30 * MIB, 0),
    (DEATH, "saved", 0, 0),
    (MARK, "forward", 1, 0),
    (BIRTH, "saved again", 20 * MIB, 0),
    (DEATH, "saved again", 0, 0),
    (MARK, "end", 1, 0),
]


@pytest.mark.parametrize(
    ("count_from", "allocated"), [("start", 42 * MIB), ("loaded", 42 * MIB), ("second_step", 32 * MIB)]
)
def test_counters_run_from_the_phase_that_is_asked_for(count_from, allocated):
    peaks = replay(EVENTS, count_from=count_from)
    assert peaks.allocated == allocated
    assert peaks.phases["build"] == (40 * MIB, 40 * MIB)
    assert peaks.phases["forward"][0] == 42 * MIB


def test_an_emptied_cache_is_not_reserved_any_more():
    """Weights split the 40 MiB that loading left (12 and a rest of 28): the segment stays; without them it goes."""
    assert replay(EVENTS).reserved == 40 * MIB + 30 * MIB
    emptied = [*EVENTS[:2], (EMPTY_CACHE, None, 0, 0), *EVENTS[2:]]
    assert replay(emptied).reserved == 42 * MIB
