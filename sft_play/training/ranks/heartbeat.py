"""Signs of life of every rank: where a rank stopped and who waits for it, reported before the run is ended.

A rank that hangs stops them all, and each of the others knows only that it waits. So each notes what it begins, a
thread publishes the notes in torch's store, and a rank that has waited too long reads those of all.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from sft_play.process import failures
from sft_play.process.failures import numbered
from sft_play.training.ranks.distributed import meeting_point

logger = logging.getLogger(__name__)

# Seconds between two signs of life: 64 ranks set 32 keys a second, a negligible load for the store.
INTERVAL_S = 2.0
# A note's length in its file: always the same, so that a shorter one leaves nothing of the last.
NOTE_BYTES = 64
# How long the store may take to answer: it may be gone with the first node.
STORE_S = 10.0


@dataclass(frozen=True)
class Beat:
    """A rank's sign of life: what it last began (the `count`th thing), how long ago, and where its code is; `published`
    is in seconds since 1970, `number` counts them. `file` has the latest note at once."""

    rank: int
    host: str
    pid: int
    step: int
    activity: str
    count: int
    since_s: float
    published: float
    number: int
    where: str = ""
    file: str = ""
    moved: int = 0
    """Bytes written or read so far."""

    @property
    def place(self) -> str:
        """The step and what the rank did in it."""
        return f"step {self.step} ({self.activity})"


def laggards(beats: Sequence[Beat], silent: Collection[int]) -> list[Beat]:
    """Those that the others wait for: ranks without a sign of life, else those that began the fewest things and whose
    bytes do not move. Empty where all are equal."""
    dead = [beat for beat in beats if beat.rank in silent]
    if dead:
        return dead
    least = min((beat.count for beat in beats), default=0)
    behind = [beat for beat in beats if beat.count == least]
    longest = max((beat.since_s for beat in behind), default=0.0)
    if any(beat.moved for beat in behind):
        behind = [beat for beat in behind if beat.since_s > longest / 2]
    return behind if len(behind) < len(beats) else []


def worded(
    beats: Sequence[Beat], silent: Collection[int], *, missing: Sequence[int], waited_s: float, now: float
) -> str:
    """Which rank stopped where, and who waits for it. `silent`: ranks that published nothing between two looks;
    `missing`: those that never did; `now`: in seconds since 1970."""
    head = f"no progress for {waited_s:.0f} s (distributed.timeout_s)"
    parts = [f"rank {rank} has never given a sign of life" for rank in missing]
    slow = laggards(beats, silent)
    for beat in slow:
        if beat.rank in silent:
            end = f"its last sign of life {max(0.0, now - beat.published):.0f} s ago"
        else:
            end = f"{beat.since_s:.0f} s ago{f', in {beat.where}' if beat.where else ''}"
        parts.append(f"rank {beat.rank} (host {beat.host}) stopped at {beat.place}, {end}")
    waiting = [beat for beat in beats if beat not in slow]
    if not parts:
        each = ", ".join(f"rank {beat.rank} in {beat.where or 'unknown code'}" for beat in beats)
        return f"{head}: all ranks are at {beats[0].place}: {each}" if beats else head
    if waiting:
        places = sorted({beat.place for beat in waiting})
        verb = "waits" if len(waiting) == 1 else "wait"
        parts.append(f"{numbered([beat.rank for beat in waiting])} {verb} for it at {' or '.join(places)}")
    return f"{head}: {'; '.join(parts)}"


def noted(path: Path) -> tuple[int, int, str] | None:
    """Step, count and activity of the last note that a rank of this node wrote; None where it wrote none."""
    try:
        step, count, activity = path.read_text(encoding="utf-8").split(maxsplit=2)
        return int(step), int(count), activity.strip()
    except (OSError, ValueError):
        return None


def _bytes_in(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(place) / name).stat().st_size
    return total


class Heartbeat:
    """While open, watches that this rank makes progress; after `timeout_s` without any it is ended with a report. The
    clock starts at the first `note`, and restarts with every `moved` byte. An exception that passes through is recorded
    before the ranks' connections are closed. Does nothing for one process."""

    def __init__(self, timeout_s: float, *, interval_s: float = INTERVAL_S) -> None:
        self.timeout_s = timeout_s
        self._interval_s = min(interval_s, timeout_s / 4)
        self._step, self._activity, self._count = 0, "starting", 0
        self._noted: float | None = None
        self._moved = self._moved_published = 0
        self._growing: Path | None = None
        self._size = 0
        self._waits, self._others = False, 0
        self._number = 0
        self._rank = self._world = 0
        self._store: Any = None
        self._path, self._file = failures.beside_error_file(failures.BEAT_NAME), -1
        self._end = threading.Event()
        self._telling = threading.Lock()
        self._thread: threading.Thread | None = None
        self._main = threading.main_thread().ident

    def __enter__(self) -> Heartbeat:
        if not dist.is_initialized() or dist.get_world_size() < 2:
            return self
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        with contextlib.suppress(OSError):
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600) if self._path is not None else -1
        try:
            self._store = meeting_point("sft_play/beats")
            self._store.set_timeout(timedelta(seconds=STORE_S))
        except (RuntimeError, ValueError) as error:
            logger.warning("no store for signs of life (%s): a rank that hangs cannot be named", error)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="sft_play heartbeat")
        self._thread.start()
        return self

    def note(self, step: int, activity: str) -> None:
        """Record what begins now, such as `training` or `saving`; cheap enough for every micro-step."""
        self._step, self._activity = step, activity
        if self._thread is None:
            return
        self._count += 1
        self._noted = time.monotonic()
        if self._file >= 0:
            # into the page cache, where it outlives this process however it ends
            os.pwrite(self._file, f"{step} {self._count} {activity}"[:NOTE_BYTES].ljust(NOTE_BYTES).encode(), 0)

    @property
    def last(self) -> tuple[int, str]:
        """The last note: step and activity."""
        return self._step, self._activity

    def moved(self, count: int) -> None:
        """Record bytes that were written or read: the current activity makes progress."""
        if self._thread is None or count <= 0:
            return
        self._moved += count
        self._noted = time.monotonic() if self._noted is not None else None

    @contextlib.contextmanager
    def watching(self, folder: Path) -> Iterator[None]:
        """While open, bytes by which the files in a folder grow count as moved: for files that libraries write."""
        self._size, self._growing = _bytes_in(folder), folder
        try:
            yield
        finally:
            self._growing = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """While open, this rank waits for others that write or read, and its clock restarts as long as any does."""
        before, self._waits = self._waits, True
        try:
            yield
        finally:
            self._waits = before

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end.set()
        if self._thread is None:
            return
        if error is not None:
            with self._telling:
                kind = failures.kind_of(error)
                is_on_several_nodes = int(os.environ.get("LOCAL_WORLD_SIZE", self._world)) < self._world
                if kind == "hung":
                    self._tell()
                elif kind == "peer" and is_on_several_nodes:
                    failures.write_down("peer", self._who_left(), error=error)
                else:
                    failures.hand_over(error)
        self._thread.join(self._interval_s)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    # --- the thread ---------------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        self._publish()
        # until the next sign of life, or until this rank has waited too long
        while not self._end.wait(max(0.05, min(self._interval_s, self.timeout_s - self._still_s()))):
            folder = self._growing
            if folder is not None:
                size = _bytes_in(folder)
                self.moved(size - self._size)
                self._size = size
            self._publish()
            self._look_at_others()
            if self._still_s() >= self.timeout_s:
                with self._telling:
                    if not self._end.is_set():
                        self._tell()
                        logging.shutdown()
                        os._exit(1)  # the main thread is inside a collective that nothing else ends

    def _look_at_others(self) -> None:
        """All ranks add to one number, so that a look is one request."""
        if self._store is None or (not self._waits and self._moved == self._moved_published):
            return
        moved = self._moved
        try:
            total = int(self._store.add("moved", moved - self._moved_published))
        except RuntimeError:
            self._store = None
            return
        if self._waits and total > self._others and self._noted is not None:
            self._noted = time.monotonic()
        self._moved_published, self._others = moved, total

    def _still_s(self) -> float:
        return time.monotonic() - self._noted if self._noted is not None else 0.0

    def _publish(self) -> None:
        if self._store is None:
            return
        self._number += 1
        still = self._still_s()
        where = self._where() if still >= 2 * self._interval_s else ""
        beat = Beat(
            self._rank, socket.gethostname(), os.getpid(), self._step, self._activity, self._count, round(still, 1),
            time.time(), self._number, where, str(self._path or ""), self._moved,
        )  # fmt: skip
        try:
            self._store.set(str(self._rank), json.dumps(asdict(beat)))
        except RuntimeError:  # the launcher has ended, which ends this rank too
            self._store = None

    def _where(self) -> str:
        """Where the main thread is: its innermost frame outside torch, else the innermost."""
        frame = innermost = sys._current_frames().get(self._main or 0)
        while frame is not None and f"{os.sep}torch{os.sep}" in frame.f_code.co_filename:
            frame = frame.f_back
        chosen = frame or innermost
        if chosen is None:
            return ""
        return f"{chosen.f_code.co_name} ({os.path.basename(chosen.f_code.co_filename)}:{chosen.f_lineno})"  # noqa: PTH119

    def _tell(self) -> None:
        waited = max(self._still_s(), self.timeout_s)
        beats, silent = self._looked_twice()
        missing = [rank for rank in range(self._world) if rank not in {beat.rank for beat in beats}]
        text = worded(beats, silent, missing=missing, waited_s=waited, now=time.time())
        if not beats:  # the store is gone, and with it what the others published
            text = f"no progress for {waited:.0f} s: rank {self._rank} waits at step {self._step} ({self._activity})"
        failures.write_down("hung", text)
        if not failures.under_agent():
            is_first = True
            with contextlib.suppress(RuntimeError):
                is_first = self._store is None or int(self._store.add("told", 1)) == 1
            if is_first:
                logger.error("%s", text)
            return
        for beat in laggards(beats, silent):
            if beat.pid == os.getpid() or beat.host != socket.gethostname():
                continue
            with contextlib.suppress(psutil.Error):  # a rank that hangs would hold up the others until its agent acts
                process = psutil.Process(beat.pid)
                if process.ppid() == os.getppid():
                    process.kill()

    def _looked_twice(self) -> tuple[list[Beat], set[int]]:
        """The signs of life of all ranks, and the ranks that give none. Two looks need no agreement of the clocks."""
        before = self._all()
        for _ in range(5):  # 2.5 intervals, in which a rank that lives has published
            time.sleep(self._interval_s / 2)
            self._publish()  # others, whose time is over too, may be looking at this one
        after = self._all()
        numbers = {beat.rank: beat.number for beat in before}
        return after, {beat.rank for beat in after if numbers.get(beat.rank) == beat.number}

    def _all(self) -> list[Beat]:
        """The latest signs of life, with what ranks of this node have noted since they published theirs."""
        beats: list[Beat] = []
        if self._store is None:
            return beats
        with contextlib.suppress(RuntimeError, ValueError, TypeError):
            for rank in range(self._world):
                if not self._store.check([str(rank)]):
                    continue
                beat = Beat(**json.loads(self._store.get(str(rank))))
                last = noted(Path(beat.file)) if beat.file and beat.host == socket.gethostname() else None
                if last is not None:
                    beat = replace(beat, step=last[0], count=last[1], activity=last[2])
                beats.append(beat)
        return beats

    def _who_left(self) -> str:
        beats, silent = self._looked_twice()
        gone = [beat for beat in beats if beat.rank in silent]
        if not gone:
            return "the launcher of another node has ended; see its output there"
        listed = ", ".join(f"rank {beat.rank} (host {beat.host}, last at {beat.place})" for beat in gone)
        return f"{listed} gives no more signs of life; see the output of its host"
