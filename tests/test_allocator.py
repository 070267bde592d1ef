"""The simulated CUDA caching allocator: its rules on sizes worked by hand, its bookkeeping on random traffic."""

import random
from dataclasses import dataclass, field

import pytest

from benchmarks.memory_model.streams import USED, WAIT, ScriptAllocator, replay
from sft_play.trace import storages
from sft_play.trace.storages import ALLOC, FREE, PHASE_START, CachingAllocator

MIB = 1 << 20


@pytest.mark.parametrize(("request_bytes", "allocated", "reserved"), [
    (1, 512, 2 * MIB),  # one block of 512 in a small segment
    (513, 1024, 2 * MIB),
    (MIB, MIB, 2 * MIB),  # the largest small request
    (MIB + 1, MIB + 512, 20 * MIB),  # large pool, shared segment
    (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),  # the last one that shares
    (10 * MIB, 10 * MIB, 10 * MIB),  # a segment of its own
    (11 * MIB, 12 * MIB, 12 * MIB),  # rounded to 2 MiB; the rest of 1 MiB is not split off and counts
    (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),  # a rest of more than 1 MiB is split off
    (0, 0, 0),
])  # fmt: skip
def test_one_request_costs_its_block_and_its_segment(request_bytes, allocated, reserved):
    allocator = CachingAllocator()
    allocator.malloc("a", request_bytes)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)
    allocator.free("a")
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, reserved)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


@dataclass
class Piece:
    """A stretch of a segment; `state` is used, waiting, free or (expandable segments) bare."""

    at: int
    size: int
    state: str
    key: int | None = None
    since: int = 0


@dataclass
class Run:
    """One segment: its pieces by address, without gaps."""

    order: int
    small: bool
    stream: int
    pieces: list[Piece] = field(default_factory=list)


class Plain:
    """The allocator as its documentation tells it, by looking at every byte's owner: no free lists, no links."""

    def __init__(self, *, expandable: bool, capacity: int | None) -> None:
        self.expandable, self.capacity = expandable, capacity
        self.runs: list[Run] = []
        self.uses: dict[int, set[int]] = {}
        self.frees = self.made = 0

    @property
    def reserved(self) -> int:
        return sum(one.size for run in self.runs for one in run.pieces if one.state != "bare")

    def total(self, state: str) -> int:
        return sum(one.size for run in self.runs for one in run.pieces if one.state == state)

    def malloc(self, key: int, nbytes: int, stream: int) -> None:
        size = max(512, (nbytes + 511) // 512 * 512)
        small = size <= MIB
        found = self.fitting(small, stream, size)
        if found is None:
            try:
                found = self.fresh(small, stream, size)
            except MemoryError:
                self.empty_cache()
                found = self.fresh(small, stream, size)
        run, piece = found
        rest = piece.size - size
        if rest >= 512 if (small or self.expandable) else rest > MIB:
            run.pieces.insert(run.pieces.index(piece) + 1, Piece(piece.at + size, rest, "free"))
            piece.size = size
        piece.state, piece.key = "used", key

    def fitting(self, small: bool, stream: int, size: int) -> tuple[Run, Piece] | None:
        free = [
            (piece.size, run.order, piece.at, run, piece)
            for run in self.runs
            if (run.small, run.stream) == (small, stream)
            for piece in run.pieces
            if piece.state == "free" and piece.size >= size
        ]
        free.sort(key=lambda one: one[:3])
        if not free:
            return None
        best = 0
        if self.expandable:
            while best + 1 < len(free) and self.reach(*free[best + 1][3:]) < self.reach(*free[best][3:]):
                best += 1
        return free[best][3:]

    @staticmethod
    def reach(run: Run, piece: Piece) -> int:
        after = run.pieces[run.pieces.index(piece) + 1 :][:1]
        return piece.size + (after[0].size if after and after[0].state == "bare" else 0)

    def take(self, nbytes: int) -> None:
        if self.capacity is not None and self.reserved + nbytes > self.capacity:
            raise MemoryError

    def fresh(self, small: bool, stream: int, size: int) -> tuple[Run, Piece]:
        if self.expandable:
            return self.grown(small, stream, size)
        whole = 2 * MIB if small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
        self.take(whole)
        self.made += 1
        run = Run(self.made, small, stream, [Piece(0, whole, "free")])
        self.runs.append(run)
        return run, run.pieces[0]

    def grown(self, small: bool, stream: int, size: int) -> tuple[Run, Piece]:
        page = 2 * MIB if small else 20 * MIB
        run = next((one for one in self.runs if (one.small, one.stream) == (small, stream)), None)
        if run is None:
            self.made += 1
            run = Run(self.made, small, stream, [Piece(0, 1 << 48, "bare")])
            self.runs.append(run)
        at = next(at for at in range(len(run.pieces)) if self.has_room(run, at, size))
        if at > 0 and run.pieces[at - 1].state == "free":
            at -= 1
        start = run.pieces[at].at
        while True:
            self.join(run)
            at = next(at for at, one in enumerate(run.pieces) if one.at == start)
            have = run.pieces[at].size if run.pieces[at].state == "free" else 0
            if have >= size:
                return run, run.pieces[at]
            bare = run.pieces[at + 1 if have else at]
            wanted = min(bare.size, size - have)
            more = min(bare.size, -(-wanted // page) * page)
            self.take(more)
            if more < bare.size:
                run.pieces.insert(run.pieces.index(bare) + 1, Piece(bare.at + more, bare.size - more, "bare"))
            bare.size, bare.state = more, "free"

    @staticmethod
    def has_room(run: Run, at: int, size: int) -> bool:
        """Whether a bare piece, with what is free around it, is large enough."""
        if run.pieces[at].state != "bare":
            return False
        first = at - 1 if at and run.pieces[at - 1].state == "free" else at
        room = 0
        for one in run.pieces[first:]:
            if one.state not in ("free", "bare") or room >= size:
                break
            room += one.size
        return room >= size

    def join(self, run: Run) -> None:
        joined: list[Piece] = []
        for one in run.pieces:
            if joined and one.state == joined[-1].state and one.state in ("free", "bare"):
                joined[-1].size += one.size
            else:
                joined.append(one)
        run.pieces = joined

    def record_stream(self, key: int, stream: int) -> None:
        run = next(run for run in self.runs for one in run.pieces if one.key == key)
        if run.stream != stream:
            self.uses.setdefault(key, set()).add(stream)

    def free(self, key: int) -> None:
        self.frees += 1
        for run in self.runs:
            for one in run.pieces:
                if one.key == key:
                    one.state, one.key, one.since = ("waiting" if self.uses.get(key) else "free"), None, self.frees
            self.join(run)

    def synchronise(self, until: int) -> None:
        for run in self.runs:
            for one in run.pieces:
                if one.state == "waiting" and one.since <= until:
                    one.state = "free"
            self.join(run)

    def empty_cache(self) -> None:
        self.synchronise(self.frees)
        if not self.expandable:
            self.runs = [run for run in self.runs if [one.state for one in run.pieces] != ["free"]]
            return
        for run in self.runs:
            page = 2 * MIB if run.small else 20 * MIB
            kept: list[Piece] = []
            for one in run.pieces:
                low, high = -(-one.at // page) * page, (one.at + one.size) // page * page
                if one.state != "free" or high <= low:
                    kept.append(one)
                    continue
                cuts = [(one.at, low, "free"), (low, high, "bare"), (high, one.at + one.size, "free")]
                kept += [Piece(start, stop - start, state) for start, stop, state in cuts if stop > start]
            run.pieces = kept
            self.join(run)


@pytest.mark.parametrize("capacity", [None, 400 * MIB])
@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_on_several_streams_is_as_a_plain_allocator_has_it(expandable, seed, capacity):
    draw, live = random.Random(seed), []
    allocator = ScriptAllocator(expandable_segments=expandable, capacity=capacity)
    plain = Plain(expandable=expandable, capacity=capacity)
    refused, moments = 0, [0]
    for key in range(700):
        turn = draw.random()
        if live and turn < 0.42:
            gone = live.pop(draw.randrange(len(live)))
            allocator.free(gone)
            plain.free(gone)
            moments.append(allocator.moment())
        elif live and turn < 0.5:
            used, stream = draw.choice(live), draw.randrange(3)
            allocator.record_stream(used, stream)
            plain.record_stream(used, stream)
        elif turn < 0.53:
            until = draw.choice(moments[-20:])
            allocator.synchronise(until)
            plain.synchronise(until)
        elif turn < 0.54:
            allocator.empty_cache()
            plain.empty_cache()
        else:
            size = draw.choice((draw.randrange(1, 3000), draw.randrange(1, 3 * MIB), draw.randrange(1, 90 * MIB)))
            outcomes = []
            for one in (allocator, plain):
                try:
                    one.malloc(key, size, key % 3)
                    outcomes.append(True)
                except MemoryError:
                    outcomes.append(False)
            assert outcomes[0] == outcomes[1]
            refused += not outcomes[0]
            live += [key] if outcomes[0] else []
        assert (allocator.reserved_bytes, allocator.allocated_bytes) == (plain.reserved, plain.total("used"))
        assert sum(block.size for _, block in allocator._waiting) == plain.total("waiting")
        free = (size for pool in allocator._pools.values() for size, _, _ in pool.blocks)
        assert sum(free) == plain.total("free")
    assert len(moments) > 50
    assert capacity is None or refused


EVENTS = [
    (ALLOC, "loading", 40 * MIB, 0), (FREE, "loading", 0, 0), (ALLOC, "weights", 12 * MIB, 0),
    (PHASE_START, "forward", 0, 0), (ALLOC, "saved", 30 * MIB, 0), (FREE, "saved", 0, 0),
    (PHASE_START, "forward", 1, 0), (ALLOC, "saved again", 20 * MIB, 0), (FREE, "saved again", 0, 0),
    (PHASE_START, "end", 1, 0),
]  # fmt: skip


def test_counters_run_from_the_phase_that_is_asked_for_and_a_plans_from_when_it_has_loaded():
    for count_from, allocated in (("start", 42 * MIB), ("loaded", 42 * MIB), ("second_step", 32 * MIB)):
        peaks = replay(EVENTS, count_from=count_from)
        assert (peaks.allocated, peaks.phases["build"]) == (allocated, (40 * MIB, 40 * MIB))
        assert peaks.phases["forward"][0] == 42 * MIB
    for expandable in (False, True):
        own = storages.replay(EVENTS, expandable_segments=expandable)
        assert (own, own.phases["build"][0]) == (replay(EVENTS, expandable_segments=expandable), 40 * MIB)


def test_a_replay_gives_a_waiting_block_when_the_host_has_waited():
    """Gathered on stream 1, used on the model's own: the second gather finds no block until the host waits."""
    gather = [(ALLOC, "one", 12 * MIB, 1), (USED, "one", 0, 0), (FREE, "one", 0, 0)]
    second = [(ALLOC, "two", 12 * MIB, 1)]
    assert replay([*gather, *second], count_from="start").reserved == 24 * MIB
    assert replay([*gather, (WAIT, None, -1, 0), *second], count_from="start").reserved == 12 * MIB
    before = (WAIT, None, 1, 0)  # for what was given before the second event: the block was not yet freed
    assert replay([*gather, before, *second], count_from="start").reserved == 24 * MIB
