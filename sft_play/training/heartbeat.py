"""Signs of life of every rank: where a rank stopped and who waits for it, reported before the run
is ended.

A rank that hangs stops them all, and each of the others knows only that it waits. So each notes
what it begins, a thread publishes the notes in torch's store, and a rank that has waited too long
reads those of all.
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
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import psutil
import torch.distributed as dist

from sft_play.process import failures
from sft_play.training.distributed import open_store

logger = logging.getLogger(__name__)

# A note's length in its file: always the same, so that a shorter one leaves nothing of the last.
NOTE_BYTES = 64
# Bytes a second that a disk writes at least: what is saved gets so much more time than the timeout.
SLOWEST_DISK = 20 << 20


@dataclass(frozen=True)
class Beat:
    """A rank's sign of life: what it last began (the `count`th thing), how long ago, and where its
    code is; `published` is in seconds since 1970, `number` counts them."""

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

    @property
    def position(self) -> str:
        """The step and what the rank did in it."""
        return f"step {self.step} ({self.activity})"


def laggards(beats: Sequence[Beat], silent_ranks: Collection[int]) -> list[Beat]:
    """Find the ranks that the others wait for: those without a sign of life, else those that began
    the fewest things. Empty where all are equal."""
    silent_beats = [beat for beat in beats if beat.rank in silent_ranks]
    if silent_beats:
        return silent_beats
    least_count = min((beat.count for beat in beats), default=0)
    slowest = [beat for beat in beats if beat.count == least_count]
    return slowest if len(slowest) < len(beats) else []


def stall_report(
    beats: Sequence[Beat],
    silent_ranks: Collection[int],
    *,
    missing_ranks: Sequence[int],
    waited_s: float,
    now: float,
) -> str:
    """Which rank stopped where, and who waits for it. `silent_ranks`: ranks that published nothing
    between two looks; `missing_ranks`: those that never did; `now`: in seconds since 1970."""
    head = f"no progress for {waited_s:.0f} s (distributed.timeout_s)"
    parts = [f"rank {rank} has never given a sign of life" for rank in missing_ranks]
    stopped_beats = laggards(beats, silent_ranks)
    for beat in stopped_beats:
        last_sign = f"{beat.since_s:.0f} s ago"
        if beat.rank in silent_ranks:
            last_sign = f"its last sign of life {max(0.0, now - beat.published):.0f} s ago"
        elif beat.where:
            last_sign += f", in {beat.where}"
        parts.append(f"rank {beat.rank} (host {beat.host}) stopped at {beat.position}, {last_sign}")
    if not parts:
        positions = ", ".join(
            f"rank {beat.rank} in {beat.where or 'unknown code'}" for beat in beats
        )
        return f"{head}: all ranks are at {beats[0].position}: {positions}"
    waiting_beats = [beat for beat in beats if beat not in stopped_beats]
    if waiting_beats:
        positions = " or ".join(sorted({beat.position for beat in waiting_beats}))
        verb = "waits" if len(waiting_beats) == 1 else "wait"
        parts.append(
            f"{failures.format_ranks([beat.rank for beat in waiting_beats])}"
            f" {verb} for it at {positions}"
        )
    return f"{head}: {'; '.join(parts)}"


def read_note(path: Path) -> tuple[int, str] | None:
    """Step and activity of the last note that a rank of this node wrote; None where it wrote
    none."""
    try:
        step, activity = path.read_text(encoding="utf-8").split(maxsplit=1)
        return int(step), activity.strip()
    except (OSError, ValueError):
        return None


class Heartbeat:
    """While open, watches that this rank makes progress; after `timeout_s` without any it is ended
    with a report. The clock starts at the first note, and restarts with each. An exception that
    passes through is recorded before the ranks' connections are closed. Does nothing for one
    process."""

    def __init__(self, timeout_s: float, *, interval_s: float = 2.0) -> None:
        self.timeout_s = timeout_s
        # Step and activity of what this rank began last.
        self.last_note = (0, "starting")
        # between two signs of life: 64 ranks set 32 keys a second, a negligible load for the store
        self._interval_s = min(interval_s, timeout_s / 4)
        self._note_count = self._publish_count = 0
        self._last_progress: float | None = None
        # Seconds that what began last may take.
        self._limit_s = timeout_s
        self._rank = self._world_size = 0
        self._store: Any = None
        self._note_file: IO[bytes] | None = None
        self._stop_event = threading.Event()
        self._report_lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Heartbeat:
        if not dist.is_initialized() or dist.get_world_size() < 2:
            return self
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        note_path = failures.rank_file_path(failures.HEARTBEAT_NAME)
        if note_path is not None:
            with contextlib.suppress(OSError):
                self._note_file = note_path.open("wb", buffering=0)
        self._store = open_store("sft_play/beats")
        # it may be gone with the first node
        self._store.set_timeout(timedelta(seconds=10))
        self._thread = threading.Thread(target=self._run, daemon=True, name="sft_play heartbeat")
        self._thread.start()
        return self

    def note(self, step: int, activity: str, *, saved_bytes: int = 0) -> None:
        """Record what begins now, such as `training` or `saving`; cheap enough for every
        micro-step. `saved_bytes`: what is written meanwhile, which may take longer than the
        timeout."""
        self.last_note = step, activity
        if self._thread is None:
            return
        self._note_count += 1
        self._limit_s = self.timeout_s + saved_bytes / SLOWEST_DISK
        self._last_progress = time.monotonic()
        if self._note_file is not None:
            # into the page cache, where it outlives this process however it ends
            self._note_file.seek(0)
            self._note_file.write(f"{step} {activity}"[:NOTE_BYTES].ljust(NOTE_BYTES).encode())

    def note_wait(self) -> None:
        """Record that this rank has done its part of what it began last, and waits for the
        others."""
        self._note_count += 1
        if self._last_progress is not None:
            self._last_progress = time.monotonic()

    def stop_clock(self) -> None:
        """Let what begins now take any time, until the next note: reading weights and
        checkpoints."""
        self._last_progress = None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stop_event.set()
        if self._thread is None:
            return
        if error is not None:
            with self._report_lock:
                if failures.failure_kind(error) == "hung":
                    self._report_stall()
                else:
                    failures.report_to_agent(error)
        self._thread.join(self._interval_s)
        if self._note_file is not None:
            self._note_file.close()
            self._note_file = None

    # --- the thread -------------------------------------------------------------------------------
    def _run(self) -> None:
        self._publish()
        # until the next sign of life, or until this rank has waited too long
        while not self._stop_event.wait(
            max(0.05, min(self._interval_s, self._limit_s - self._idle_s()))
        ):
            self._publish()
            if self._idle_s() < self._limit_s:
                continue
            with self._report_lock:
                if not self._stop_event.is_set():
                    self._report_stall()
                    logging.shutdown()
                    os._exit(1)  # the main thread is inside a collective that nothing else ends

    def _idle_s(self) -> float:
        last_progress = self._last_progress
        return 0.0 if last_progress is None else time.monotonic() - last_progress

    def _publish(self) -> None:
        if self._store is None:
            return
        self._publish_count += 1
        idle_s = self._idle_s()
        location = ""
        # where the main thread is: its innermost frame outside torch
        if idle_s >= 2 * self._interval_s:
            outer = sys._current_frames()[threading.main_thread().ident or 0]
            while f"{os.sep}torch{os.sep}" in outer.f_code.co_filename and outer.f_back is not None:
                outer = outer.f_back
            location = (
                f"{outer.f_code.co_name} ({Path(outer.f_code.co_filename).name}:{outer.f_lineno})"
            )
        beat = Beat(
            self._rank,
            socket.gethostname(),
            os.getpid(),
            *self.last_note,
            self._note_count,
            round(idle_s, 1),
            time.time(),
            self._publish_count,
            location,
        )
        try:
            self._store.set(str(self._rank), json.dumps(asdict(beat)))
        except RuntimeError:  # the launcher has ended, which ends this rank too
            self._store = None

    def _report_stall(self) -> None:
        waited_s = max(self._idle_s(), self.timeout_s)
        # two looks need no agreement of the clocks
        earlier_numbers = {beat.rank: beat.number for beat in self._read_beats()}
        for _ in range(5):  # 2.5 intervals, in which a rank that lives has published
            time.sleep(self._interval_s / 2)
            self._publish()  # others, whose time is over too, may be looking at this one
        beats = self._read_beats()
        silent_ranks = {
            beat.rank for beat in beats if earlier_numbers.get(beat.rank) == beat.number
        }
        missing_ranks = [
            rank for rank in range(self._world_size) if rank not in {beat.rank for beat in beats}
        ]
        if beats:
            text = stall_report(
                beats, silent_ranks, missing_ranks=missing_ranks, waited_s=waited_s, now=time.time()
            )
        else:  # the store is gone, and with it what the others published
            step, activity = self.last_note
            text = (
                f"no progress for {waited_s:.0f} s: rank"
                f" {self._rank} waits at step {step} ({activity})"
            )
        failures.record_failure("hung", text)
        if not failures.is_under_agent():
            with contextlib.suppress(RuntimeError):
                if self._store is not None and int(self._store.add("told", 1)) > 1:
                    return
            logger.error("%s", text)
            return
        for beat in laggards(beats, silent_ranks):
            if beat.pid == os.getpid() or beat.host != socket.gethostname():
                continue
            # a rank that hangs would hold up the others until its agent acts
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(beat.pid)
                if process.ppid() == os.getppid():
                    process.kill()

    def _read_beats(self) -> list[Beat]:
        if self._store is None:
            return []
        with contextlib.suppress(RuntimeError):
            ranks = [
                str(rank) for rank in range(self._world_size) if self._store.check([str(rank)])
            ]
            return [Beat(**json.loads(self._store.get(rank))) for rank in ranks]
        return []
