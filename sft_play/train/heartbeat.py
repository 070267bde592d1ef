"""Signs of life of every rank: where a rank stopped and who waits for it, said before the run is ended.

Ranks wait for each other in every step. One that hangs stops them all, and each of the others knows only that it
waits. So each notes what it begins, a thread of its own publishes that, and a rank that has waited too long looks at
the notes of all.
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

from sft_play import failures
from sft_play.failures import numbered
from sft_play.train.rendezvous import meeting_point

logger = logging.getLogger(__name__)

INTERVAL_S = 2.0
"""Seconds between two signs of life: 64 ranks set 32 keys a second, which the store does not feel."""
NOTE_BYTES = 64
STORE_S = 10.0
"""How long the store may take to answer: it may have gone with the first node."""


@dataclass(frozen=True)
class Beat:
    """A rank's sign of life: what it last began, how many things before, how long ago, and where its code stands.

    `file` is where the rank notes the same at once; the signs of life lag behind by their interval.
    """

    rank: int
    host: str
    pid: int
    step: int
    what: str
    count: int
    since_s: float
    published: float
    number: int
    where: str = ""
    file: str = ""
    moved: int = 0
    """Bytes that it wrote or read so far."""

    @property
    def place(self) -> str:
        """The step and what the rank did in it."""
        return f"step {self.step} ({self.what})"


def laggards(beats: Sequence[Beat], silent: Collection[int]) -> list[Beat]:
    """Those that the others wait for: ranks without a sign of life, else those that began the fewest things.

    Of those that write, the ones whose bytes get on are not waited for. None where all are equal: each of them waits,
    or the one that hangs does so between two notes.
    """
    without = [beat for beat in beats if beat.rank in silent]
    if without:
        return without
    least = min((beat.count for beat in beats), default=0)
    behind = [beat for beat in beats if beat.count == least]
    longest = max((beat.since_s for beat in behind), default=0.0)
    if any(beat.moved for beat in behind):
        behind = [beat for beat in behind if beat.since_s > longest / 2]
    return behind if len(behind) < len(beats) else []


def worded(
    beats: Sequence[Beat], silent: Collection[int], *, missing: Sequence[int], waited_s: float, now: float
) -> str:
    """Which rank stopped where, and who waits for it.

    Args:
        silent: ranks that published nothing while it was waited for.
        missing: ranks that never published.
        now: wall clock, in seconds since 1970, against which `published` is read.
    """
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
        each = ", ".join(f"rank {beat.rank} in {beat.where or 'code that is not known'}" for beat in beats)
        return f"{head}: all ranks stand at {beats[0].place}: {each}" if beats else head
    if waiting:
        parts.append(_waiting(waiting))
    return f"{head}: {'; '.join(parts)}"


def _waiting(beats: Sequence[Beat]) -> str:
    ranks = numbered([beat.rank for beat in beats])
    places = sorted({beat.place for beat in beats})
    return f"{ranks} wait{'s' if len(beats) == 1 else ''} for it at {' or '.join(places)}"


def noted(path: Path) -> tuple[int, int, str] | None:
    """Step, count and what of the last note that a rank of this node wrote; None where it wrote none."""
    try:
        step, count, what = path.read_text(encoding="utf-8").split(maxsplit=2)
        return int(step), int(count), what.strip()
    except (OSError, ValueError):
        return None


def _freshened(beat: Beat) -> Beat:
    """The beat with what a rank of this node noted since it published it."""
    last = noted(Path(beat.file)) if beat.file and beat.host == socket.gethostname() else None
    return replace(beat, step=last[0], count=last[1], what=last[2]) if last is not None else beat


def _bytes_in(folder: Path) -> int:
    """Bytes of the files under a folder; files that go away meanwhile count as none."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(place) / name).stat().st_size
    return total


class Heartbeat:
    """While open, watches that this rank gets on; a rank that does not for `timeout_s` is ended with what is known.

    It counts from the first `note`, so that loading a model may take what it takes, and anew from every byte that is
    `moved`, so that a disk may take what it takes. An exception that passes through is written down at once, before the
    ranks' connections are taken down. Nothing for one process.
    """

    def __init__(self, timeout_s: float, *, interval_s: float = INTERVAL_S) -> None:
        self.timeout_s = timeout_s
        self._interval_s = min(interval_s, timeout_s / 4)
        self._step, self._what, self._count = 0, "starting", 0
        self._noted: float | None = None
        self._moved = self._moved_said = 0
        self._growing: Path | None = None
        self._size = 0
        self._waits, self._others = False, 0
        self._number = 0
        self._rank = self._world = 0
        self._store: Any = None
        self._path = failures.beside_error_file(failures.BEAT_NAME)
        self._file: int | None = None
        self._end = threading.Event()
        self._telling = threading.Lock()
        self._thread: threading.Thread | None = None
        self._main = threading.main_thread().ident

    def __enter__(self) -> Heartbeat:
        if not dist.is_initialized() or dist.get_world_size() < 2:
            return self
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        with contextlib.suppress(OSError):
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600) if self._path is not None else None
        try:
            self._store = meeting_point("sft_play/beats")
            self._store.set_timeout(timedelta(seconds=STORE_S))
        except (RuntimeError, ValueError) as error:
            logger.warning("no store to give signs of life in (%s): a rank that hangs cannot be named", error)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="sft_play heartbeat")
        self._thread.start()
        return self

    def note(self, step: int, what: str) -> None:
        """Say what begins now, such as `training` or `saving`; cheap enough for every micro-step."""
        if self._thread is None:
            return
        self._step, self._what = step, what
        self._count += 1
        self._noted = time.monotonic()
        if self._file is not None:
            # into the page cache, where it outlives this process however it ends
            os.pwrite(self._file, f"{step} {self._count} {what}"[:NOTE_BYTES].ljust(NOTE_BYTES).encode(), 0)

    def moved(self, count: int) -> None:
        """Say that bytes were written or read: whatever began last gets on."""
        if self._thread is None or count <= 0:
            return
        self._moved += count
        self._go_on()

    def _go_on(self) -> None:
        """Count anew, where it counts yet."""
        if self._noted is not None:
            self._noted = time.monotonic()

    @contextlib.contextmanager
    def watching(self, folder: Path) -> Iterator[None]:
        """While open, bytes by which the files in a folder grow are moved: for what libraries write."""
        self._size, self._growing = _bytes_in(folder), folder
        try:
            yield
        finally:
            self._growing = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """While open, this rank waits for others that write or read, and gets on as long as any of them does."""
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
            self._write_down(error)
        self._thread.join(self._interval_s)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write_down(self, error: BaseException) -> None:
        """The failure of this rank in the launcher's file; one of waiting with the name of who was waited for."""
        with self._telling:
            kind = failures.kind_of(error)
            if kind == "hung":
                self._tell()
            elif kind == "peer" and self._is_on_several_nodes():
                failures.write_down("peer", self._who_left(), error=error)
            else:
                failures.hand_over(error)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        self._publish()
        while not self._end.wait(self._wait_s()):
            self._look_at_files()
            self._publish()
            self._look_at_others()
            if self._still_s() >= self.timeout_s:
                with self._telling:
                    if not self._end.is_set():
                        self._tell()
                        logging.shutdown()
                        os._exit(1)  # the main thread is inside a collective that nothing else ends

    def _look_at_files(self) -> None:
        folder = self._growing
        if folder is not None:
            size = _bytes_in(folder)
            self.moved(size - self._size)
            self._size = size

    def _look_at_others(self) -> None:
        """Whether any rank has moved bytes since the last look: all add to one number, so that a look is one answer."""
        if self._store is None or (not self._waits and self._moved == self._moved_said):
            return
        moved = self._moved
        try:
            total = int(self._store.add("moved", moved - self._moved_said))
        except RuntimeError:
            self._store = None
            return
        if self._waits and total > self._others:
            self._go_on()
        self._moved_said, self._others = moved, total

    def _wait_s(self) -> float:
        """Until the next sign of life, or until this rank has waited too long."""
        return max(0.05, min(self._interval_s, self.timeout_s - self._still_s()))

    def _still_s(self) -> float:
        """Seconds since the last note; 0 before the first."""
        return time.monotonic() - self._noted if self._noted is not None else 0.0

    def _publish(self) -> None:
        if self._store is None:
            return
        self._number += 1
        still = self._still_s()
        where = self._where() if still >= 2 * self._interval_s else ""
        beat = Beat(
            self._rank, socket.gethostname(), os.getpid(), self._step, self._what, self._count, round(still, 1),
            time.time(), self._number, where, str(self._path or ""), self._moved,
        )  # fmt: skip
        try:
            self._store.set(str(self._rank), json.dumps(asdict(beat)))
        except RuntimeError:  # the launcher has ended, which ends this rank too
            self._store = None

    def _where(self) -> str:
        """Where the main thread stands: its innermost frame that is no part of torch's, else the innermost."""
        frame = innermost = sys._current_frames().get(self._main or 0)
        while frame is not None and f"{os.sep}torch{os.sep}" in frame.f_code.co_filename:
            frame = frame.f_back
        chosen = frame or innermost
        if chosen is None:
            return ""
        return f"{chosen.f_code.co_name} ({os.path.basename(chosen.f_code.co_filename)}:{chosen.f_lineno})"  # noqa: PTH119

    def _tell(self) -> None:
        """Write down who stopped where, say it where no agent does, and end those beside this rank that hang."""
        waited = max(self._still_s(), self.timeout_s)
        beats, silent = self._looked_twice()
        missing = [rank for rank in range(self._world) if rank not in {beat.rank for beat in beats}]
        text = worded(beats, silent, missing=missing, waited_s=waited, now=time.time())
        if not beats:  # the store has gone, and with it what the others said
            text = f"no progress for {waited:.0f} s: rank {self._rank} waits at step {self._step} ({self._what})"
        failures.write_down("hung", text)
        if not failures.under_agent() and self._is_first_to_tell():
            logger.error("%s", text)
        for beat in laggards(beats, silent):
            self._end_sibling(beat)

    def _looked_twice(self) -> tuple[list[Beat], set[int]]:
        """The signs of life of all ranks, and the ranks that give none: clocks of hosts need not agree for this."""
        before = self._all()
        time.sleep(2.5 * self._interval_s)
        self._publish()
        after = self._all()
        numbers = {beat.rank: beat.number for beat in before}
        return after, {beat.rank for beat in after if numbers.get(beat.rank) == beat.number}

    def _all(self) -> list[Beat]:
        found: list[Beat] = []
        if self._store is None:
            return found
        with contextlib.suppress(RuntimeError, ValueError, TypeError):
            for rank in range(self._world):
                if self._store.check([str(rank)]):
                    found.append(_freshened(Beat(**json.loads(self._store.get(str(rank))))))
        return found

    def _is_first_to_tell(self) -> bool:
        """Whether no other rank has said it."""
        if self._store is None:
            return True
        try:
            return int(self._store.add("told", 1)) == 1
        except RuntimeError:
            return True

    def _end_sibling(self, beat: Beat) -> None:
        """SIGKILL for a rank of the same agent that hangs: it would hold the others up until its agent does it."""
        if beat.pid == os.getpid() or beat.host != socket.gethostname() or not failures.under_agent():
            return
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(beat.pid)
            if process.ppid() == os.getppid():
                process.kill()

    def _is_on_several_nodes(self) -> bool:
        return int(os.environ.get("LOCAL_WORLD_SIZE", self._world)) < self._world

    def _who_left(self) -> str:
        """Which ranks no longer give signs of life, as far as the store still answers."""
        beats, silent = self._looked_twice()
        gone = [beat for beat in beats if beat.rank in silent]
        if not gone:
            return "the launcher of another node has ended; see what it says there"
        listed = ", ".join(f"rank {beat.rank} (host {beat.host}, last at {beat.place})" for beat in gone)
        return f"{listed} gives no sign of life any more; see what its host says"
