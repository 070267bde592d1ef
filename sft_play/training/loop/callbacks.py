"""Callbacks that watch a run: gradients, values that are not finite, metrics, progress, requests to
stop."""

import contextlib
import json
import logging
import math
import re
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, set_seed

from sft_play.errors import TrainingError
from sft_play.log import one_line
from sft_play.planner.layout import Layout
from sft_play.planner.precision import find_fp16_overflow, format_fp16_overflow
from sft_play.process import failures
from sft_play.process.signals import StopSignals, elapsed_s, raise_interrupt, training_begun
from sft_play.text import format_duration
from sft_play.training import distributed, engines
from sft_play.training.checkpoints import checkpoints
from sft_play.training.class_checks.adapter_trial import trained_pattern
from sft_play.training.loop.rows import EpochOrder

logger = logging.getLogger(__name__)

_LORA_A = re.compile(r"\.lora_(embedding_)?A\b")


class GradientCheck(TrainerCallback):
    """Stops a run in which a trainable tensor gets no gradient, and names it. lora_A is checked
    once its lora_B has left zero; a step that is not finite is not, since clipping by an infinite
    norm has set all gradients to zero. Those that only longer rows or later steps give one are
    waited for. `late_gradients`: names of parameters, with * for numbers."""

    def __init__(self, late_gradients: Collection[str] = ()) -> None:
        self._unchecked: dict[str, nn.Parameter] | None = None
        self._late_gradients = late_gradients

    @property
    def is_done(self) -> bool:
        """Whether every trainable tensor has had a gradient."""
        return self._unchecked is not None and not self._unchecked

    def on_pre_optimizer_step(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        """Check the gradients of this step; raises TrainingError naming tensors that should have
        had one."""
        is_fp16 = getattr(args, "fp16", False)  # there the flag is that of the step before
        if (
            self.is_done
            or model is None
            or (not is_fp16 and getattr(optimizer, "step_was_skipped", False))
        ):
            return
        if getattr(args, "deepspeed", None):
            self._unchecked = {}  # DeepSpeed keeps gradients in its own partitions
            return
        parameters = dict(model.named_parameters())
        if is_fp16:
            sizes = largest_sizes([parameter.grad for parameter in parameters.values()])
            if distributed.any_rank(not all(map(math.isfinite, sizes))):
                return
        if self._unchecked is None:
            self._unchecked = {
                name: parameter for name, parameter in parameters.items() if parameter.requires_grad
            }
            if not self._unchecked:
                raise TrainingError("no tensor of the model is trainable")
        lora_b_names = {
            name: _LORA_A.sub(lambda match: match.group().replace("A", "B"), name)
            for name in self._unchecked
            if _LORA_A.search(name)
        }
        lora_bs = {
            name: parameters[other] for name, other in lora_b_names.items() if other in parameters
        }
        # one read of the device and one collective for all: a rank may hold no part of a tensor
        sizes = largest_sizes(
            [parameter.grad for parameter in self._unchecked.values()] + [*lora_bs.values()]
        )
        flags = distributed.any_rank_for_each([size != 0 for size in sizes])
        has_gradient = dict(zip(self._unchecked, flags, strict=False))
        has_left_zero = dict(zip(lora_bs, flags[len(has_gradient) :], strict=True))
        ready = [name for name in self._unchecked if has_left_zero.get(name, True)]
        without_gradient = [name for name in ready if not has_gradient[name]]
        late = {name for name in without_gradient if trained_pattern(name) in self._late_gradients}
        ready, faulty = (
            [name for name in names if name not in late] for names in (ready, without_gradient)
        )
        if faulty:
            raise TrainingError(
                f"step {state.global_step + 1}: {len(faulty)} of {len(ready)} trainable tensors"
                f" have no gradient ({one_line(', '.join(faulty), limit=400)}); they would learn"
                " nothing, so the run stops. If earlier steps had some, start a new run with a"
                " lower train.learning_rate"
            )
        for name in ready:
            del self._unchecked[name]

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Warn of tensors without a gradient: no row was long enough, or what multiplies them
        stayed zero."""
        if late := [
            name for name in self._unchecked or {} if trained_pattern(name) in self._late_gradients
        ]:
            logger.warning(
                "%d trainable tensors had no gradient, and are as they were: this class gives them"
                " one only in longer rows, or once what it multiplies them by has left zero (%s)",
                len(late),
                ", ".join(late[:3]),
            )


class MetricsFile(TrainerCallback):
    """Appends what is logged to `metrics.jsonl`, and stops an fp16 run whose loss is NaN or
    infinite. `start_time`: seconds since 1970; `stage`: written into every line, in a run that has
    stages."""

    def __init__(self, path: Path, *, start_time: float, stage: str | None = None) -> None:
        self._path, self._start_time = path, start_time
        self._stage = {"stage": stage} if stage is not None else {}

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, Any] | None = None,
        model: Any = None,
        **_: Any,
    ) -> None:
        """Write one line; raises TrainingError for a loss in fp16 that is NaN or infinite."""
        if not state.is_world_process_zero or not logs:
            return
        entry: dict[str, Any] = {
            **self._stage,
            "step": state.global_step,
            "epoch": state.epoch,
            "time_s": round(time.time() - self._start_time, 3),
        }
        entry |= {
            # JSON has no NaN or infinity
            key: value if math.isfinite(value) else str(value)
            for key, value in logs.items()
            if isinstance(value, (int, float)) and key != "epoch"
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        if args.fp16:  # in other dtypes `NonFiniteStepGuard` has seen it
            loss_keys = ("loss", "eval_loss", "test_loss") if state.global_step == 0 else ("loss",)
            for loss in map(logs.get, loss_keys):
                if isinstance(loss, float) and not math.isfinite(loss):
                    raise TrainingError(
                        f"step {state.global_step}: the loss is {loss};"
                        f" {describe_fp16_overflow(model)}"
                    )


class StopController(TrainerCallback):
    """Ends training with a checkpoint: after N steps of this process, in time for a limit in hours,
    or at the end of a step after a signal. `pause_seconds`: seconds of the checkpoints and
    evaluations so far (`Monitor.pause_seconds`)."""

    def __init__(
        self,
        steps: int | None,
        *,
        hours: float | None = None,
        pause_seconds: Mapping[str, Sequence[float]] = MappingProxyType({}),
        elapsed_s: Callable[[], float] = elapsed_s,
    ) -> None:
        self._steps, self._hours, self._elapsed_s = steps, hours, elapsed_s
        self._pause_seconds = pause_seconds
        self._steps_done = 0
        self._step_start = self._longest_step_s = 0.0
        self.signal: int | None = None
        self.has_stopped_early = False
        self.has_begun = False

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock of a step."""
        self.has_begun = True
        # of the process, for a wait in native code; the attribute is this stage's
        training_begun.set()
        self._step_start = self._elapsed_s()

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Ask for a checkpoint and the end if it is time."""
        self._steps_done += 1
        self._longest_step_s = max(self._longest_step_s, self._elapsed_s() - self._step_start)
        if state.global_step >= state.max_steps:
            return
        should_stop = self._steps is not None and self._steps_done >= self._steps
        if self._hours is not None:
            limit_s = self._hours * 3600
            reserved_s = min(600.0, 0.05 * limit_s)  # kept free for a checkpoint at least
            evaluation_s, checkpoint_s = (
                max(self._pause_seconds.get(name) or [0]) for name in ("eval", "checkpoint")
            )
            needed_s = self._longest_step_s + evaluation_s + max(checkpoint_s, reserved_s)
            if self._elapsed_s() + needed_s > limit_s:
                should_stop = True
                logger.info(
                    "train.max_hours=%g: saving at the end of step %d, then stopping",
                    self._hours,
                    state.global_step,
                )
        # a signal may reach one rank only, but all have to stop at the same step: -1 stops without
        # one, -2 not at all
        stop_signal = distributed.max_over_ranks(self.signal or (-1 if should_stop else -2))
        if stop_signal > -2:
            if stop_signal > 0:
                self.signal = stop_signal
            self.has_stopped_early = True
            control.should_save = True
            control.should_training_stop = True

    def on_epoch_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Leave out evaluation and saving of an unfinished epoch: the resumed run does both at its
        end."""
        # the Trainer calls this after a stop too; `epoch` is a float, a whole number at the end of
        # an epoch
        if (
            self.has_stopped_early
            and state.epoch is not None
            and abs(state.epoch - round(state.epoch)) > 1e-6
        ):
            control.should_evaluate = False
            control.should_save = False


def stop_signals(stop_controller: StopController) -> StopSignals:
    """While open, the first signal to stop ends the run after the current step (before the first
    step: at once); a second signal ends it at once."""

    def on_first_signal(signal_number: int) -> None:
        if not stop_controller.has_begun:  # there is nothing to save
            failures.kill_compilers()
            raise_interrupt(signal_number)
        stop_controller.signal = signal_number
        # the agent says it once, and stops ranks for other reasons too
        if not failures.is_under_agent():
            logger.warning(
                "%s: saving at the end of this step, then stopping",
                signal.Signals(signal_number).name,
            )

    return StopSignals(on_first_signal)


class Progress(TrainerCallback):
    """Loss, tokens per second, memory and time left: a line every few seconds, the same in the
    run's log. `estimate_remaining`: seconds of what follows besides the steps that are left, and in
    words what these lack.
    """

    def __init__(
        self,
        *,
        estimate_remaining: Callable[[], tuple[float, str]] = lambda: (0.0, ""),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._estimate_remaining, self._clock = estimate_remaining, clock
        self.start_step = 0
        self._start_time = self._last_line_time = 0.0
        self._paused_s = self._pause_start = 0.0
        # Closed with the first step, which is a wait of its own.
        self.start_wait = contextlib.ExitStack()
        self.on_first_step: Callable[[], None] | None = None

    @property
    def training_s(self) -> float:
        """Seconds spent in training steps, without what happens between them."""
        return max(1e-9, (self._pause_start or self._clock()) - self._start_time - self._paused_s)

    def exclude_wait(self, seconds: float) -> None:
        """Leave out what a step has waited for: compiling."""
        self._paused_s += seconds

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Start the clock, which stands until the first step."""
        self._start_time = self._last_line_time = self._pause_start = self._clock()
        self.start_step, self._paused_s = state.global_step, 0.0

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Write a line about this step, if it is time for one."""
        if logs and "loss" in logs:
            step, steps = state.global_step, state.max_steps
            if step in (self.start_step + 1, steps) or self._clock() - self._last_line_time >= 15:
                self._last_line_time = self._clock()
                logger.info("step %d/%d  %s", step, steps, self.format_line(step, steps, logs))

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Stop the clock: evaluation and saving follow."""
        self.start_wait.close()
        self._pause_start = self._clock()

    def on_step_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Let the clock run again."""
        if self._pause_start:
            self._paused_s += self._clock() - self._pause_start
            self._pause_start = 0.0
        if self.on_first_step is not None and state.global_step == self.start_step:
            self.on_first_step()

    def format_line(self, step: int, steps: int, logs: Mapping[str, float]) -> str:
        """Loss, tokens per second of all ranks, the highest peak memory of a rank, and the time
        left after `step`."""
        steps_done = max(1, step - self.start_step)
        pauses_s, caveat = self._estimate_remaining()
        remaining_s = self.training_s / steps_done * (steps - step) + pauses_s
        line = f"loss {logs['loss']:.4f}  {logs['tokens_per_s']:,.0f} tokens/s  "
        if "memory_peak_gib" in logs:
            line += f"peak {logs['memory_peak_gib']:.2f} GiB  "
        return f"{line}{format_duration(remaining_s)} left{caveat}"


class RowsAndSeeds(TrainerCallback):
    """Sets the epoch of the row order, which accelerate does not when a resumed run of several
    ranks skips batches, and seeds dropout differently on every rank, where the Trainer seeds all
    alike.
    """

    def __init__(self, epoch_order: EpochOrder, layout: Layout) -> None:
        self._epoch_order, self._layout = epoch_order, layout

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Seed this rank; a resumed run restores its states later. The first one of a new run keeps
        the numbers of one process; ranks of a tensor-parallel group drop alike."""
        rank = distributed.rank() // self._layout.tensor_parallel
        # 100,003: above any number of ranks, so that no two steps share a seed
        if rank or state.global_step:
            set_seed((args.seed + rank + 100_003 * state.global_step) % 2**32)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the epoch of the step counter."""
        self._epoch_order.set_epoch(int(state.epoch or 0))


# --------------------------------------------------------------------------------------------------
# Values that are not finite: a step that has them changes nothing, and no checkpoint holds them.


# Steps that `train.on_nan: skip` leaves out one after the other at most. A bad row is in one step;
# where every step is bad, the weights or the settings are at fault, and the rows that are left out
# meanwhile are lost.
MAX_SKIPPED_STEPS = 5


class NonFiniteStepGuard(TrainerCallback):
    """Looks at each step's gradient norm and loss before the update, on all ranks alike. If one is
    NaN or infinite, nothing changes, and the run stops or goes on (`train.on_nan`). DeepSpeed skips
    such a step itself. So does fp16's loss scaling, which finds its scale that way; too many skips
    in a row mean that no scale is low enough."""

    def __init__(self, trainer: Any, on_nan: Literal["stop", "skip"]) -> None:
        self._trainer, self._on_nan = trainer, on_nan
        self._consecutive_skips = 0
        # Steps that were left out since this process started.
        self.skipped_steps = 0
        # Steps since the last log whose loss was not finite, and is not in the logged mean.
        self.steps_without_loss = 0
        self._loss_at_step_start: torch.Tensor | float = 0.0
        self._last_logged_step = 0
        # The optimizer's own, while a step is left out.
        self._optimizer_step: Any = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Note the sum of losses before this step."""
        self._loss_at_step_start = self._trainer._tr_loss.clone()
        self._last_logged_step = self._trainer._globalstep_last_logged

    def check_step(self, norm: Any) -> None:
        """Called once a step's gradients are whole, before the update; waits for the device once,
        and for the other ranks. `norm`: None where an engine keeps it. Raises TrainingError: the
        run is to stop for this step.
        """
        trainer = self._trainer
        # one wait for the device for both; DeepSpeed's norm is a number, or None
        if isinstance(norm, torch.Tensor):
            full_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            values = torch.stack(
                [full_norm.to(trainer._tr_loss.device).float(), trainer._tr_loss.float()]
            )
            norm, loss = values.tolist()
        else:
            loss = trainer._tr_loss.item()
        if trainer.args.fp16:
            self._count_scaling_skip(norm)
            return
        has_bad_norm = norm is not None and not math.isfinite(norm)
        fault_level = distributed.max_over_ranks(int(has_bad_norm) if math.isfinite(loss) else 2)
        was_step_taken = trainer.is_deepspeed_enabled and not trainer.optimizer.step_was_skipped
        if not trainer.is_deepspeed_enabled:
            # the Trainer asks for it before it moves the learning rate
            trainer.optimizer._is_overflow = bool(fault_level)
            if fault_level:
                self._optimizer_step = trainer.optimizer.step
                trainer.optimizer.step = lambda *_, **__: None
        if not fault_level:
            self._consecutive_skips = 0
            return
        self._consecutive_skips += 1
        self.skipped_steps += 1
        problem = f"the gradient norm is {_format_value(norm)}"
        if fault_level == 2:
            problem = f"the loss is {_format_value(loss)}"
            trainer._tr_loss.copy_(self._loss_at_step_start)
            self.steps_without_loss += 1
        step = int(trainer.state.global_step) + 1
        advice = (
            f"{checkpoints.resume_note(Path(trainer.args.output_dir))}; look at the data of this"
            " step, or start a new run with a lower train.learning_rate"
        )
        if was_step_taken:  # bf16.check_grad_overflow: false
            raise TrainingError(
                f"step {step}: {problem}, and DeepSpeed has updated the weights with it; {advice}"
            )
        if self._on_nan == "stop":
            raise TrainingError(
                f"step {step}: {problem}, so the step was not taken: nothing was changed. A resumed"
                f" run leaves such steps out with SET='train.on_nan=skip'; {advice}"
            )
        if self._consecutive_skips >= MAX_SKIPPED_STEPS:
            raise TrainingError(
                f"step {step}: {problem}, and the {self._consecutive_skips - 1} steps before it"
                f" were skipped for the same; {advice}"
            )
        if distributed.is_first():
            logger.warning(
                "Step %d skipped: %s; weights, optimizer and learning rate stay as they were",
                step,
                problem,
            )

    def _count_scaling_skip(self, norm: float | None) -> None:
        trainer, is_skipped = self._trainer, norm is not None and not math.isfinite(norm)
        if trainer.is_deepspeed_enabled:
            is_skipped = trainer.optimizer.step_was_skipped
        if not distributed.any_rank(is_skipped):
            self._consecutive_skips = 0
            return
        self._consecutive_skips += 1
        step = trainer.state.global_step + 1
        if self._consecutive_skips >= 17:  # loss scaling halves: 65,536 / 2^17 is one half
            raise TrainingError(
                f"step {step}: this step and the {self._consecutive_skips - 1} before it were"
                " skipped, because gradients are not finite at any loss scale:"
                f" {describe_fp16_overflow(trainer.model)}"
            )
        logger.info(
            "Step %d skipped: gradients not finite, which is how fp16 finds its loss scale", step
        )

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """The optimizer can step again."""
        if self._optimizer_step is not None:
            self._trainer.optimizer.step, self._optimizer_step = self._optimizer_step, None

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Raises TrainingError for a run, shorter than the limit, in which every step was left
        out."""
        if (
            self._consecutive_skips
            and self._consecutive_skips == state.global_step == state.max_steps
        ):
            reason = (
                f": {describe_fp16_overflow(self._trainer.model)}"
                if self._trainer.args.fp16
                else ""
            )
            raise TrainingError(
                f"all {self._consecutive_skips} steps had values"
                f" that are not finite: nothing was learned{reason}"
            )

    def correct_mean_loss(self, logs: dict[str, float]) -> dict[str, float]:
        """Logs whose loss is the mean of the steps that were not left out; without a loss where all
        were."""
        steps, skipped = (
            self._trainer.state.global_step - self._last_logged_step,
            self.steps_without_loss,
        )
        self.steps_without_loss = 0
        if not skipped:
            return logs
        if steps > skipped:
            return {**logs, "loss": logs["loss"] * steps / (steps - skipped)}
        return {name: value for name, value in logs.items() if name != "loss"}


def describe_fp16_overflow(model: Any) -> str:
    """Say what overflows in a model that leaves fp16's range, and what to do about it."""
    text_config = model.config.get_text_config()
    overflow = find_fp16_overflow(
        text_config.model_type,
        is_eager=getattr(text_config, "_attn_implementation", None) == "eager",
        attention_dropout=getattr(text_config, "attention_dropout", None) or 0.0,
    )
    return format_fp16_overflow(text_config.model_type, overflow)


def _format_value(value: float | None) -> str:
    return "not finite on another rank" if value is None or math.isfinite(value) else str(value)


def require_finite(trainer: Any) -> None:
    """Raises TrainingError on every rank where a weight that trains or a state is not finite on one
    of them."""
    wrapped = trainer.model_wrapped
    tensors = [
        (name, engines.local_shard(parameter.detach()))
        for name, parameter in trainer.model.named_parameters()
        if parameter.requires_grad
    ]
    if engines.is_deepspeed(wrapped):
        tensors += [
            ("the fp32 copy of the weights", tensor) for tensor in engines.fp32_partitions(wrapped)
        ]
    tensors += [
        (f"the optimizer's {name}", engines.local_shard(value))
        for state in engines.unwrap_optimizer(trainer.optimizer).state.values()
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    ]
    sizes = largest_sizes([tensor for _, tensor in tensors])
    local_name = next(
        (name for (name, _), size in zip(tensors, sizes, strict=True) if not math.isfinite(size)),
        None,
    )
    faulty_name = next((name for name in distributed.gather_values(local_name) if name), None)
    if faulty_name is not None:
        raise TrainingError(
            f"step {trainer.state.global_step}: {faulty_name} has values that are not finite, so no"
            f" checkpoint is written; {checkpoints.resume_note(Path(trainer.args.output_dir))}"
        )


def largest_sizes(tensors: Sequence[torch.Tensor | None]) -> list[float]:
    """The largest absolute value of each tensor, or of this rank's part of it: 0.0 where there is
    none, not finite where one value is not. Each device is read once for all of its tensors."""
    parts_by_device: dict[torch.device, dict[int, torch.Tensor]] = defaultdict(dict)
    for index, tensor in enumerate(tensors):
        part = None if tensor is None else engines.local_shard(tensor.detach())
        if part is not None and part.numel():
            parts_by_device[part.device][index] = part
    sizes = [0.0] * len(tensors)
    for parts in parts_by_device.values():
        norms = torch.stack(torch._foreach_norm([*parts.values()], ord=math.inf))
        for index, size in zip(parts, norms.tolist(), strict=True):
            sizes[index] = size
    return sizes
