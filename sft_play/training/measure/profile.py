"""A window of steps under torch's profiler: where the time goes, what ranks send, and how much of it is exposed."""

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
from sft_play.planner.plan import Plan
from sft_play.training.ranks import communication
from sft_play.training.ranks.distributed import is_first, of_all

logger = logging.getLogger(__name__)

FIRST_STEP = 3
"""The steps before it are warm-up: buffers are allocated, kernels chosen, buckets built."""
FILE = "trace.json.gz"
COUNTS = "communication.json"
COUNTED_STEPS = 3
"""Steps of `distributed.profile_communication: true`."""
_COMMUNICATION = ("nccl", "gloo:")
_NOT_COMPUTATION = ("Memcpy", "Memset")

Span = tuple[float, float]


def merged(spans: Iterable[Span]) -> list[Span]:
    """The union of spans, as spans that do not touch, in order."""
    union: list[Span] = []
    for start, end in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def exposed(communication: Iterable[Span], computation: Iterable[Span]) -> float:
    """How long communication runs while nothing is computed, in the spans' unit."""
    busy = merged(computation)
    total = 0.0
    for start, end in merged(communication):
        hidden = sum(max(0.0, min(end, until) - max(start, since)) for since, until in busy)
        total += (end - start) - hidden
    return total


def spans_of(events: Sequence[Any], *, on_gpu: bool) -> tuple[list[Span], list[Span]]:
    """Spans of communication and of computation, in microseconds: kernels on a GPU, operators on a CPU. What a library
    annotates comes back as an event of the GPU too, collectives included: it computes nothing."""
    communication: list[Span] = []
    computation: list[Span] = []
    for event in events:
        is_kernel = event.device_type == DeviceType.CUDA
        if is_kernel != on_gpu or (on_gpu and event.is_user_annotation):
            continue
        span = (event.time_range.start, event.time_range.end)
        if event.name.startswith(_COMMUNICATION):
            communication.append(span)
        elif not event.name.startswith(_NOT_COMPUTATION) and (on_gpu or event.name.startswith("aten::")):
            computation.append(span)
    return communication, computation


class ProfileWindow(TrainerCallback):
    """Profiles `steps` optimizer steps of this rank, from the third on; rank 0 writes the trace into `folder`, and the
    `trainer` logs the times. With a `plan`, on every rank, `communication.json` counts what they send."""

    def __init__(self, folder: Path, steps: int, *, plan: Plan | None = None, trainer: Any = None) -> None:
        self._folder, self._steps, self._plan, self._trainer = folder, steps, plan, trainer
        self._began: int | None = None
        self._profile: Any = None
        self._started_s, self._ended = 0.0, False

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start with the third step of this process."""
        if self._began is None:
            self._began = state.global_step
        if self._profile is None and state.global_step == self._began + FIRST_STEP - 1:
            on_gpu = torch.cuda.is_available()
            self._profile = profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
                acc_events=True,  # else torch warns that it keeps the last cycle only, and there is one
                record_shapes=self._plan is not None,
            )
            self._profile.start()
            self._started_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop after the last step of the window, or of the run."""
        if self._profile is None or self._began is None:
            return
        done = state.global_step - self._began - FIRST_STEP + 1
        if done == self._steps or (state.global_step >= state.max_steps and 0 < done <= self._steps):
            self._end(done)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop with a run that ends inside the window; warn if it ended before the window began."""
        done = state.global_step - (self._began or 0) - FIRST_STEP + 1
        if self._profile is not None and not self._ended and done > 0:
            self._end(done)
        elif not self._ended and is_first():
            logger.warning("Profile: nothing was traced, since the run ended before its step %d did", FIRST_STEP)

    def _end(self, steps: int) -> None:
        on_gpu, self._ended = torch.cuda.is_available(), True
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._started_s
        self._profile.stop()
        events = self._profile.events()
        communication, computation = spans_of(events, on_gpu=on_gpu)
        busy_s = sum(end - start for start, end in merged(communication)) / 1e6
        exposed_s = exposed(communication, computation) / 1e6
        if is_first():
            self._folder.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._folder / FILE))
            logger.info(
                "Profile of %d steps: %.4f s of communication a step, %.4f s of it not hidden by computation; trace: "
                "%s (https://ui.perfetto.dev opens it)", steps, busy_s / steps, exposed_s / steps, self._folder / FILE,
            )  # fmt: skip
            if self._trainer is not None:
                control = self._trainer.control
                is_due = control.should_log  # logging resets it, and the step's own figures would not be logged
                self._trainer.log(
                    {"time_communication_s": busy_s / steps, "time_exposed_communication_s": exposed_s / steps}
                )
                control.should_log = is_due
        if self._plan is not None:
            self._count(self._plan, steps, seconds=seconds, busy_s=busy_s, exposed_s=exposed_s)

    def _count(self, plan: Plan, steps: int, *, seconds: float, busy_s: float, exposed_s: float) -> None:
        collectives = communication.collectives_of(self._profile.profiler.kineto_results.experimental_event_tree())
        spans = [(event.name, event.time_range.start, event.time_range.end) for event in self._profile.events()]
        timed = communication.timed_of(spans, collectives)
        rank = dist.get_rank() if dist.is_initialized() else 0
        own = communication.Counted(rank, socket.gethostname(), seconds, busy_s, exposed_s, collectives, timed)
        counted = of_all(own)
        if not is_first():
            return
        report = communication.communication_report(
            counted, plan.choice.layout, steps=steps, planned=plan.speed.collectives, moved=plan.speed.moved_bytes
        )
        path = self._folder / COUNTS
        path.write_text(json.dumps(report | {"trace": FILE}, indent=1) + "\n", encoding="utf-8")
        verdict = "agree" if report["agrees"] else f"are not within {report['tolerance']:.0%}"
        logger.info("Communication: a rank sends %s bytes a step, %s predicted: they %s; by kind and rank: %s",
                    f"{report['sent_bytes']:,}", f"{report['planned_sent_bytes']:,}", verdict, path)  # fmt: skip


def window_of(config: RunConfig, plan: Plan, folder: Path, trainer: Any = None) -> ProfileWindow | None:
    """The window that a run asks for: on all ranks where communication is counted, else on the first."""
    wish, steps = config.distributed.profile_communication, config.train.profile_steps or 0
    if wish is not False and plan.layout != "single":
        counted_steps = COUNTED_STEPS if wish is True else int(wish)
        return ProfileWindow(folder, max(steps, counted_steps), plan=plan, trainer=trainer)
    return ProfileWindow(folder, steps, trainer=trainer) if steps and is_first() else None
