"""Values that are not finite: a step that has them changes nothing, and no checkpoint holds them."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from sft_play.errors import BackendError, TrainingError
from sft_play.planner.precision import find_fp16_overflow, format_fp16_fault
from sft_play.training.checkpoints import checkpoints
from sft_play.training.ranks import distributed, engines

logger = logging.getLogger(__name__)

# Steps that loss scaling leaves out one after the other at most: 65,536 / 2^17 is one half.
SCALINGS_IN_A_ROW = 17
# Steps that `train.on_nan: skip` leaves out one after the other at most. A bad row is in one step; where every step is
# bad, the weights or the settings are at fault, and the rows that are left out meanwhile are lost.
SKIPS_IN_A_ROW = 5


class FiniteSteps(TrainerCallback):
    """Looks at each step's gradient norm and loss before the update, on all ranks alike: where one is NaN or infinite
    nothing changes, and the run stops or goes on (`train.on_nan`). DeepSpeed leaves such a step out itself, and so does
    loss scaling, which is how fp16 finds its scale; where it leaves out one after the other, there is none."""

    def __init__(self, trainer: Any, on_nan: Literal["stop", "skip"]) -> None:
        self._trainer, self._on_nan = trainer, on_nan
        self._in_a_row = 0
        self.skipped = 0
        """Steps that were left out since this process started."""
        self.left_out = 0
        """Steps since the last log whose loss was not finite, and is not in the logged mean."""
        self._loss_before: torch.Tensor | float = 0.0
        self._logged_step = 0
        self._real_step: Any = None
        """The optimizer's own, while a step is left out."""

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Note the sum of losses before this step."""
        self._loss_before, self._logged_step = self._trainer._tr_loss.clone(), self._trainer._globalstep_last_logged

    def judge(self, norm: Any) -> None:
        """Called once a step's gradients are whole, before the update; waits for the device once, and for the other
        ranks. `norm`: None where an engine keeps it. Raises TrainingError: the run is to stop for this step."""
        trainer = self._trainer
        norm, loss = _read(norm, trainer._tr_loss)
        if trainer.args.fp16:
            self._count_scaling(norm)
            return
        fault = distributed.highest(2 if not math.isfinite(loss) else 0 if norm is None or math.isfinite(norm) else 1)
        was_taken = trainer.is_deepspeed_enabled and not trainer.optimizer.step_was_skipped
        if not trainer.is_deepspeed_enabled:
            self._leave_out(trainer.optimizer, bool(fault))
        if not fault:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        self.skipped += 1
        if fault == 2:
            trainer._tr_loss.copy_(self._loss_before)
            self.left_out += 1
        what = f"the loss is {_value(loss)}" if fault == 2 else f"the gradient norm is {_value(norm)}"
        self._decide(what, was_taken=was_taken)

    def _count_scaling(self, norm: float | None) -> None:
        trainer, is_left_out = self._trainer, norm is not None and not math.isfinite(norm)
        if trainer.is_deepspeed_enabled:
            is_left_out = trainer.optimizer.step_was_skipped
        if not distributed.any_rank(is_left_out):
            self._in_a_row = 0
            return
        self._in_a_row += 1
        step = trainer.state.global_step + 1
        if self._in_a_row >= SCALINGS_IN_A_ROW:
            raise TrainingError(f"step {step}: this step and the {self._in_a_row - 1} before it were skipped, because "
                                f"gradients are not finite at any loss scale: {fp16_fault(trainer.model)}")  # fmt: skip
        logger.info("Step %d skipped: gradients not finite, which is how fp16 finds its loss scale", step)

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """The optimizer can step again."""
        if self._real_step is not None:
            self._trainer.optimizer.step, self._real_step = self._real_step, None

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Raises TrainingError for a run, shorter than the limit, in which every step was left out."""
        if self._in_a_row and self._in_a_row == state.global_step == state.max_steps:
            why = f": {fp16_fault(self._trainer.model)}" if self._trainer.args.fp16 else ""
            raise TrainingError(f"all {self._in_a_row} steps had values that are not finite: nothing was learned{why}")

    def with_mean_loss(self, logs: dict[str, float]) -> dict[str, float]:
        """Logs whose loss is the mean of the steps that were not left out; without a loss where all were."""
        steps, left_out = self._trainer.state.global_step - self._logged_step, self.left_out
        self.left_out = 0
        if not left_out:
            return logs
        if steps > left_out:
            return {**logs, "loss": logs["loss"] * steps / (steps - left_out)}
        return {name: value for name, value in logs.items() if name != "loss"}

    def _leave_out(self, optimizer: Any, leave_out: bool) -> None:
        """Said too to whoever asks whether the step was skipped: the Trainer, before it moves the learning rate."""
        if leave_out:
            self._real_step, optimizer.step = optimizer.step, lambda *_, **__: None
        optimizer._is_overflow = leave_out
        if self._trainer.accelerator.optimizer_step_was_skipped != leave_out:
            raise BackendError("this version of accelerate keeps elsewhere whether a step was skipped; install that of "
                               "requirements.lock (make setup)")  # fmt: skip

    def _decide(self, what: str, *, was_taken: bool) -> None:
        step = int(self._trainer.state.global_step) + 1
        end = f"{checkpoints.resume_note(Path(self._trainer.args.output_dir))}; look at the data of this step, or start a "
        end += "new run with a lower train.learning_rate"
        if was_taken:  # bf16.check_grad_overflow: false
            raise TrainingError(f"step {step}: {what}, and DeepSpeed has updated the weights with it; {end}")
        if self._on_nan == "stop":
            raise TrainingError(f"step {step}: {what}, so the step was not taken: nothing was changed. A resumed run "
                                f"leaves such steps out with SET='train.on_nan=skip'; {end}")  # fmt: skip
        if self._in_a_row >= SKIPS_IN_A_ROW:
            raise TrainingError(f"step {step}: {what}, and the {self._in_a_row - 1} steps before it were skipped for "
                                f"the same; {end}")  # fmt: skip
        if distributed.is_first():
            logger.warning("Step %d skipped: %s; weights, optimizer and learning rate stay as they were", step, what)


def fp16_fault(model: Any) -> str:
    """What a model that leaves fp16's range is, and the ways out."""
    text = model.config.get_text_config()
    eager = getattr(text, "_attn_implementation", None) == "eager"
    dropout = getattr(text, "attention_dropout", None) or 0.0
    return format_fp16_fault(text.model_type, find_fp16_overflow(text.model_type, is_eager=eager, attention_dropout=dropout))


def _read(norm: Any, loss: torch.Tensor) -> tuple[float | None, float]:
    """A norm and a loss as numbers, for which the device is waited for once; DeepSpeed's norm is a number, or None."""
    if not isinstance(norm, torch.Tensor):
        return norm, loss.item()
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    both: list[float] = torch.stack([whole.to(loss.device).float(), loss.float()]).tolist()
    return both[0], both[1]


def _value(number: float | None) -> str:
    return "not finite on another rank" if number is None or math.isfinite(number) else str(number)


def require_finite(trainer: Any) -> None:
    """Raises TrainingError on every rank where a weight that trains or a state is not finite on one of them."""
    bad = next((name for name, tensor in _trained(trainer) if not is_finite(tensor)), None)
    found = next((name for name in distributed.of_all(bad) if name), None)
    if found is not None:
        raise TrainingError(
            f"step {trainer.state.global_step}: {found} has values that are not finite, so no checkpoint is written; "
            f"{checkpoints.resume_note(Path(trainer.args.output_dir))}"
        )


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are; found by the extremes, which take no memory as large as the tensor."""
    return not tensor.numel() or all(map(math.isfinite, torch.stack(tensor.aminmax()).tolist()))


def _trained(trainer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    wrapped = trainer.model_wrapped
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            yield name, engines.local(parameter.detach())
    for tensor in engines.masters(wrapped) if engines.is_deepspeed(wrapped) else ():
        yield "the fp32 copy of the weights", tensor
    for state in engines.innermost(trainer.optimizer).state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                yield f"the optimizer's {name}", engines.local(value)
