"""A window of steps under torch's profiler: where the time goes, what ranks send, and how much of it nothing hides."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from sft_play.config.schema import RunConfig
from sft_play.plan.plan import Plan
from sft_play.train import communication
from sft_play.train.engine import is_first, world_size

logger = logging.getLogger(__name__)

FIRST_STEP = 3
"""Steps before it warm up: buffers are made, kernels chosen, buckets built."""
FILE = "trace.json.gz"
COUNTS = "communication.json"
COUNTED_STEPS = 3
"""Steps of `distributed.profile_communication: true`."""
_COMMUNICATION = ("nccl", "gloo:")
_NOT_COMPUTATION = ("Memcpy", "Memset")

Span = tuple[float, float]


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same times as spans that do not touch, in their order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def exposed(communication: Iterable[Span], computation: Iterable[Span]) -> float:
    """How long communication goes on while nothing is computed, in the spans' unit."""
    busy = merged(computation)
    left = 0.0
    for start, end in merged(communication):
        hidden = sum(max(0.0, min(end, until) - max(start, since)) for since, until in busy)
        left += (end - start) - hidden
    return left


def spans_of(events: Sequence[Any], *, on_gpu: bool) -> tuple[list[Span], list[Span]]:
    """Spans of communication and of computation, in microseconds: kernels on a GPU, operators on a CPU."""
    communication: list[Span] = []
    computation: list[Span] = []
    for event in events:
        is_kernel = event.device_type == DeviceType.CUDA
        if is_kernel != on_gpu:
            continue
        span = (event.time_range.start, event.time_range.end)
        if event.name.startswith(_COMMUNICATION):
            communication.append(span)
        elif not event.name.startswith(_NOT_COMPUTATION) and (on_gpu or event.name.startswith("aten::")):
            computation.append(span)
    return communication, computation


class ProfileWindow(TrainerCallback):
    """Profiles `steps` optimizer steps of this rank, from the third on; rank 0 writes the trace into `folder`.

    With a `plan` every rank has such a window, and what they send each other is counted (`communication.json`).
    """

    def __init__(self, folder: Path, steps: int, *, plan: Plan | None = None) -> None:
        self._folder, self._steps, self._plan = folder, steps, plan
        self._began: int | None = None
        self._profile: Any = None
        self._started_s, self._ended = 0.0, False
        self.trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin with the third step of this start."""
        if self._began is None:
            self._began = state.global_step
        if self._profile is None and state.global_step == self._began + FIRST_STEP - 1:
            on_gpu = torch.cuda.is_available()
            self._profile = profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
                acc_events=True,
                record_shapes=self._plan is not None,
            )
            self._profile.start()
            self._started_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End with the last step of the window, or of the run."""
        if self._profile is None or self._began is None:
            return
        done = state.global_step - self._began - FIRST_STEP + 1
        if done == self._steps or (state.global_step >= state.max_steps and 0 < done <= self._steps):
            self._end(done)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End with a run that was stopped in the window, and say where it ended before."""
        done = state.global_step - (self._began or 0) - FIRST_STEP + 1
        if self._profile is not None and not self._ended and done > 0:
            self._end(done)
        elif not self._ended and is_first():
            logger.warning("Profile: nothing was traced: the run ended before the end of its step %d", FIRST_STEP)

    def _end(self, steps: int) -> None:
        on_gpu, self._ended = torch.cuda.is_available(), True
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._started_s
        self._profile.stop()
        events = self._profile.events()
        communication, computation = spans_of(events, on_gpu=on_gpu)
        whole = sum(end - start for start, end in merged(communication)) / 1e6
        open_ = exposed(communication, computation) / 1e6
        if is_first():
            self._folder.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._folder / FILE))
            logger.info(
                "Profile of %d steps: %.4f s of communication a step, %.4f s of it not hidden by computation; trace: "
                "%s (https://ui.perfetto.dev opens it)", steps, whole / steps, open_ / steps, self._folder / FILE,
            )  # fmt: skip
            self._log({"time_communication_s": whole / steps, "time_exposed_communication_s": open_ / steps})
        if self._plan is not None:
            self._count(self._plan, steps, seconds=seconds, busy_s=whole, exposed_s=open_)

    def _count(self, plan: Plan, steps: int, *, seconds: float, busy_s: float, exposed_s: float) -> None:
        """Put together what all ranks saw, and write it; all ranks call this."""
        collectives = communication.collectives_of(self._profile.profiler.kineto_results.experimental_event_tree())
        work = [(event.name, event.time_range.start, event.time_range.end) for event in self._profile.events()]
        timed = communication.timed_of(work, collectives)
        rank = dist.get_rank() if dist.is_initialized() else 0
        mine = communication.Counted(
            rank, socket.gethostname(), seconds, busy_s, exposed_s, tuple(collectives), tuple(timed)
        )
        counted: list[Any] | None = [None] * world_size() if is_first() else None
        dist.gather_object(mine, counted)
        if counted is None:
            return
        found = communication.report(
            counted, plan.choice.layout, steps=steps, planned=plan.speed.collectives, moved=plan.speed.moved_bytes
        )
        path = self._folder / COUNTS
        path.write_text(json.dumps(found.as_json() | {"trace": FILE}, indent=1) + "\n", encoding="utf-8")
        for line in (*found.lines(), f"Communication: {path}"):
            logger.info("%s", line)

    def _log(self, figures: dict[str, float]) -> None:
        if self.trainer is None:
            return
        control = self.trainer.control
        is_due = control.should_log  # logging takes it back, and the step's own figures would be left out
        self.trainer.log(figures)
        control.should_log = is_due


def window_of(config: RunConfig, plan: Plan, folder: Path) -> ProfileWindow | None:
    """The window that a run asks for, on the ranks that have one: all of them where communication is counted, else the
    first. With both keys given, it is as long as the longer of the two."""
    wish, steps = config.distributed.profile_communication, config.train.profile_steps or 0
    counts = wish is not False and plan.layout != "single"
    if counts:
        return ProfileWindow(folder, max(steps, COUNTED_STEPS if wish is True else int(wish)), plan=plan)
    return ProfileWindow(folder, steps) if steps and is_first() else None
