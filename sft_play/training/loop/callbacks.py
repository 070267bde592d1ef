"""Callbacks that watch a run: gradients, metrics, progress, and requests to stop."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState

from sft_play.errors import TrainingError
from sft_play.process import failures
from sft_play.process.signals import StopSignals, elapsed_s, has_begun, interrupt
from sft_play.process.waiting import waiting
from sft_play.training.class_checks.adapter_trial import trained_pattern
from sft_play.training.loop.finite import fp16_fault as _fp16_fault
from sft_play.training.ranks.distributed import any_rank, highest
from sft_play.training.ranks.engines import local
from sft_play.units import duration_of

logger = logging.getLogger(__name__)

# Seconds between progress lines where the output is not a terminal.
PLAIN_LINE_EVERY_S = 15.0
_LORA_A = re.compile(r"\.lora_(embedding_)?A\b")


class GradientCheck(TrainerCallback):
    """Stops a run in which a trainable tensor gets no gradient, and names it. lora_A is checked once its lora_B has
    left zero; a step that is not finite is not, since clipping by an infinite norm has set all gradients to zero. Those
    that only longer rows or later steps give one are waited for."""

    def __init__(self, late_gradients: Collection[str] = ()) -> None:
        """`late_gradients`: names of parameters, with * for numbers."""
        self._waiting: dict[str, nn.Parameter] | None = None
        self._late_gradients = late_gradients

    @property
    def done(self) -> bool:
        """Whether every trainable tensor has had a gradient."""
        return self._waiting is not None and not self._waiting

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Check the gradients of this step; raises TrainingError naming tensors that should have had one."""
        in_fp16 = getattr(args, "fp16", False)  # there the flag is that of the step before
        if self.done or model is None or (not in_fp16 and getattr(optimizer, "step_was_skipped", False)):
            return
        if getattr(args, "deepspeed", None):
            self._waiting = {}  # DeepSpeed keeps gradients in its own partitions
            return
        named = dict(model.named_parameters())
        if in_fp16:
            gradients = [parameter.grad for parameter in named.values() if parameter.grad is not None]
            if any_rank(not all(bool(torch.isfinite(local(gradient)).all()) for gradient in gradients)):
                return
        if self._waiting is None:
            self._waiting = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
            if not self._waiting:
                raise TrainingError("no tensor of the model is trainable")
        # any_rank is a collective: all ranks walk through the same names in the same order
        ready = [name for name in self._waiting if not self._is_early(name, named)]
        without = [name for name in ready if not _has_gradient(self._waiting[name])]
        late = {name for name in without if trained_pattern(name) in self._late_gradients}
        without, ready = ([name for name in names if name not in late] for names in (without, ready))
        if without:
            learnt = [named[name] for name in named if named[name].requires_grad and name not in self._waiting]
            if learnt and not any(_has_gradient(parameter) for parameter in learnt):
                raise TrainingError(f"step {state.global_step + 1}: every gradient is zero, though earlier steps had "
                                    "some: start a new run with a lower train.learning_rate")  # fmt: skip
            shown = ", ".join(without[:6]) + (f" and {len(without) - 6} more" if len(without) > 6 else "")
            raise TrainingError(
                f"step {state.global_step + 1}: {len(without)} of {len(ready)} trainable tensors have no gradient "
                f"({shown}); they would learn nothing, so the run stops"
            )
        for name in ready:
            del self._waiting[name]

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Say what no row was long enough for, or stayed beside a tensor of zeros."""
        if late := [name for name in self._waiting or {} if trained_pattern(name) in self._late_gradients]:
            logger.warning("%d trainable tensors had no gradient, and are as they were: this class gives them one only "
                           "in longer rows, or once what it multiplies them by has left zero (%s)",
                           len(late), ", ".join(late[:3]))  # fmt: skip

    @staticmethod
    def _is_early(name: str, named: dict[str, nn.Parameter]) -> bool:
        if not _LORA_A.search(name):
            return False
        partner = named.get(_LORA_A.sub(lambda match: match.group().replace("A", "B"), name))
        return partner is not None and not any_rank(bool(torch.count_nonzero(local(partner.detach()))))


def _has_gradient(parameter: nn.Parameter) -> bool:
    grad = parameter.grad
    return any_rank(grad is not None and bool(torch.count_nonzero(local(grad))))


class MetricsFile(TrainerCallback):
    """Appends what is logged to `metrics.jsonl`, and stops a run whose loss is NaN or infinite."""

    def __init__(self, path: Path, *, started: float, stage: str | None = None) -> None:
        """`started`: seconds since 1970; `stage`: written into every line, in a run that has stages."""
        self._path, self._started = path, started
        self._stage = {"stage": stage} if stage is not None else {}

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, model: Any = None, **_: Any
    ) -> None:
        """Write one line; raises TrainingError for a loss that is NaN or infinite (in fp16 before training too)."""
        if not state.is_world_process_zero or not logs:
            return
        entry: dict[str, Any] = {
            **self._stage,
            "step": state.global_step,
            "epoch": state.epoch,
            "time_s": round(time.time() - self._started, 3),
        }
        for key, value in logs.items():
            if isinstance(value, (int, float)) and key != "epoch":
                entry[key] = value if math.isfinite(value) else str(value)  # JSON has no NaN or infinity
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        in_fp16 = bool(getattr(args, "fp16", False))
        watched = ("loss", "eval_loss", "test_loss") if in_fp16 and state.global_step == 0 else ("loss",)
        for loss in map(logs.get, watched):
            if isinstance(loss, float) and not math.isfinite(loss):
                usual = "look at the data of this step, or start a new run with a lower train.learning_rate"
                advice = _fp16_fault(model) if in_fp16 else usual
                raise TrainingError(f"step {state.global_step}: the loss is {loss}; {advice}")


# What is kept free for a checkpoint at least: this share of the limit, up to so many seconds.
_KEPT_SHARE, _MOST_KEPT_S = 0.05, 600.0


class StopAfter(TrainerCallback):
    """Ends training with a checkpoint: after N steps of this process, in time for a limit in hours, or at the end of a
    step after a signal."""

    def __init__(
        self,
        steps: int | None,
        *,
        hours: float | None = None,
        took_s: Mapping[str, Sequence[float]] | None = None,
        elapsed_s: Callable[[], float] = elapsed_s,
    ) -> None:
        """`took_s`: seconds of the checkpoints and evaluations so far (`Monitor.took_s`)."""
        self._steps, self._hours, self._elapsed_s = steps, hours, elapsed_s
        self._took_s = {} if took_s is None else took_s  # one that is still empty will be filled
        self._done = 0
        self._step_began = self._longest_step_s = 0.0
        self.signal: int | None = None
        self.stopped_early = False
        self.has_begun = False

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock of a step."""
        self.has_begun = True
        has_begun.set()  # of the process, for a wait in native code; the attribute is this stage's
        self._step_began = self._elapsed_s()

    def _time_is_up(self) -> bool:
        if self._hours is None:
            return False
        limit_s = self._hours * 3600
        evaluation, checkpoint = (max(self._took_s.get(name) or [0.0]) for name in ("eval", "checkpoint"))
        checkpoint = max(checkpoint, min(_MOST_KEPT_S, _KEPT_SHARE * limit_s))
        return self._elapsed_s() + self._longest_step_s + evaluation + checkpoint > limit_s

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Ask for a checkpoint and the end if it is time."""
        self._done += 1
        self._longest_step_s = max(self._longest_step_s, self._elapsed_s() - self._step_began)
        if state.global_step >= state.max_steps:
            return
        is_up = self._time_is_up()
        if is_up:
            logger.info("train.max_hours=%g: saving at the end of step %d, then stopping", self._hours,
                        state.global_step)  # fmt: skip
        is_over = is_up or (self._steps is not None and self._done >= self._steps)
        # a signal may reach one rank only, but all have to stop at the same step: -1 stops without one, -2 not at all
        wish = highest(self.signal or (-1 if is_over else -2))
        if wish > -2:
            self.signal = wish if wish > 0 else None
            self.stopped_early = True
            control.should_save = True
            control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Leave out evaluation and saving of an unfinished epoch: the resumed run does both at its end."""
        # the Trainer calls this after a stop too; `epoch` is a float, a whole number at the end of an epoch
        if self.stopped_early and state.epoch is not None and abs(state.epoch - round(state.epoch)) > 1e-6:
            control.should_evaluate = False
            control.should_save = False


def stopping(stop: StopAfter) -> StopSignals:
    """While open, the first signal to stop ends the run after the current step, and at once before the first step; so
    does a second signal."""

    def first(number: int) -> None:
        if not stop.has_begun:  # there is nothing to save
            failures.end_compilers()
            interrupt(number)
        stop.signal = number
        if not failures.under_agent():  # the agent says it once, and stops ranks for other reasons too
            logger.warning("%s: saving at the end of this step, then stopping", signal.Signals(number).name)

    return StopSignals(first)


class Progress(TrainerCallback):
    """Loss, tokens per second, memory and time left: a line every few seconds, the same in the run's log."""

    def __init__(
        self,
        *,
        tokens: Callable[[], int],
        to_come: Callable[[], tuple[float, str]] = lambda: (0.0, ""),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`to_come`: seconds of what follows besides the steps that are left, and in words what these lack."""
        self._tokens, self._to_come, self._now = tokens, to_come, now
        self._loss = self._speed = self._memory = None
        self.first_step = 0
        self._started = self._last_line = 0.0
        self._paused = self._pause_began = 0.0
        self._beginning = contextlib.ExitStack()

    @contextlib.contextmanager
    def beginning(self, what: str) -> Iterator[None]:
        """Say `what` is waited for where the first step takes long to come."""
        with contextlib.ExitStack() as self._beginning:
            self._beginning.enter_context(waiting(what))
            yield

    @property
    def training_s(self) -> float:
        """Seconds spent in training steps, without what happens between them."""
        return max(1e-9, (self._pause_began or self._now()) - self._started - self._paused)

    def wait(self, seconds: float) -> None:
        """Leave out what a step has waited for: compiling."""
        self._paused += seconds

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Start the clock, which stands until the first step."""
        self._started = self._last_line = self._pause_began = self._now()
        self.first_step, self._paused = state.global_step, 0.0

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Remember the loss."""
        if logs and isinstance(logs.get("loss"), float):
            self._loss = logs["loss"]
            self._speed, self._memory = logs.get("tokens_per_s"), logs.get("memory_peak_gib")
            step, steps = state.global_step, state.max_steps
            if step in (self.first_step + 1, steps) or self._now() - self._last_line >= PLAIN_LINE_EVERY_S:
                self._last_line = self._now()
                logger.info("step %d/%d  %s", step, steps, self.line(step, steps))

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop the clock: evaluation and saving follow."""
        self._beginning.close()
        self._pause_began = self._now()

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Let the clock run again."""
        if self._pause_began:
            self._paused += self._now() - self._pause_began
            self._pause_began = 0.0

    def line(self, step: int, steps: int) -> str:
        """Loss, tokens per second of all ranks, the highest peak memory of a rank, and the time left after `step`."""
        done = max(1, step - self.first_step)
        seconds, lacks = self._to_come()
        left = self.training_s / done * (steps - step) + seconds
        loss = f"loss {self._loss:.4f}  " if self._loss is not None else ""
        speed = self._speed if self._speed is not None else self._tokens() / self.training_s
        memory = f"peak {self._memory:.2f} GiB  " if self._memory is not None else ""
        return f"{loss}{speed:,.0f} tokens/s  {memory}{duration_of(left)} left{lacks}"
