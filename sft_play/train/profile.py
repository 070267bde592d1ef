"""A window of steps under torch's profiler: where the time goes, and how much communication no computation hides."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

logger = logging.getLogger(__name__)

FIRST_STEP = 3
"""Steps before it warm up: buffers are made, kernels chosen, buckets built."""
FILE = "trace.json.gz"
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
    """Profiles `steps` optimizer steps of this rank, from the third on, and writes the trace into `folder`."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder, self._steps = folder, steps
        self._began: int | None = None
        self._profile: Any = None
        self.trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin with the third step of this start."""
        if self._began is None:
            self._began = state.global_step
        if self._profile is None and state.global_step == self._began + FIRST_STEP - 1:
            on_gpu = torch.cuda.is_available()
            self._profile = profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])], acc_events=True
            )
            self._profile.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End with the last step of the window, or of the run."""
        if self._profile is None or self._began is None:
            return
        done = state.global_step - self._began - FIRST_STEP + 1
        if done == self._steps or (state.global_step >= state.max_steps and 0 < done <= self._steps):
            self._end(done)

    def _end(self, steps: int) -> None:
        self._profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._folder / FILE))
        on_gpu = torch.cuda.is_available()
        communication, computation = spans_of(self._profile.events(), on_gpu=on_gpu)
        whole = sum(end - start for start, end in merged(communication)) / 1e6 / steps
        open_ = exposed(communication, computation) / 1e6 / steps
        logger.info(
            "Profile of %d steps: %.4f s of communication a step, %.4f s of it not hidden by computation; trace: %s",
            steps, whole, open_, self._folder / FILE,
        )  # fmt: skip
        if self.trainer is not None:
            control = self.trainer.control
            is_due = control.should_log  # logging takes it back, and the step's own figures would be left out
            self.trainer.log({"time_communication_s": whole, "time_exposed_communication_s": open_})
            control.should_log = is_due
