"""Values that are not finite: a step that has them changes nothing, and no checkpoint holds them."""

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from sft_play.errors import TrainingError
from sft_play.planner.precision import find_fp16_overflow, format_fp16_overflow
from sft_play.training import distributed, engines
from sft_play.training.checkpoints import checkpoints

logger = logging.getLogger(__name__)

# Steps that loss scaling leaves out one after the other at most: 65,536 / 2^17 is one half.
MAX_SCALING_SKIPS = 17
# Steps that `train.on_nan: skip` leaves out one after the other at most. A bad row is in one step; where every step is
# bad, the weights or the settings are at fault, and the rows that are left out meanwhile are lost.
MAX_SKIPPED_STEPS = 5


class NonFiniteStepGuard(TrainerCallback):
    """Looks at each step's gradient norm and loss before the update, on all ranks alike: where one is NaN or infinite
    nothing changes, and the run stops or goes on (`train.on_nan`). DeepSpeed leaves such a step out itself, and so does
    loss scaling, which is how fp16 finds its scale; where it leaves out one after the other, there is none."""

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
        """Called once a step's gradients are whole, before the update; waits for the device once, and for the other
        ranks. `norm`: None where an engine keeps it. Raises TrainingError: the run is to stop for this step."""
        trainer = self._trainer
        norm, loss = _read_numbers(norm, trainer._tr_loss)
        if trainer.args.fp16:
            self._count_scaling_skip(norm)
            return
        fault_level = 0
        if not math.isfinite(loss):
            fault_level = 2
        elif norm is not None and not math.isfinite(norm):
            fault_level = 1
        fault_level = distributed.max_over_ranks(fault_level)
        was_step_taken = trainer.is_deepspeed_enabled and not trainer.optimizer.step_was_skipped
        if not trainer.is_deepspeed_enabled:
            self._set_skip(trainer.optimizer, bool(fault_level))
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
        self._stop_or_skip(problem, was_step_taken=was_step_taken)

    def _count_scaling_skip(self, norm: float | None) -> None:
        trainer, is_skipped = self._trainer, norm is not None and not math.isfinite(norm)
        if trainer.is_deepspeed_enabled:
            is_skipped = trainer.optimizer.step_was_skipped
        if not distributed.any_rank(is_skipped):
            self._consecutive_skips = 0
            return
        self._consecutive_skips += 1
        step = trainer.state.global_step + 1
        if self._consecutive_skips >= MAX_SCALING_SKIPS:
            raise TrainingError(f"step {step}: this step and the {self._consecutive_skips - 1} before it were skipped, "
                                "because gradients are not finite at any loss scale: "
                                f"{describe_fp16_overflow(trainer.model)}")  # fmt: skip
        logger.info("Step %d skipped: gradients not finite, which is how fp16 finds its loss scale", step)

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """The optimizer can step again."""
        if self._optimizer_step is not None:
            self._trainer.optimizer.step, self._optimizer_step = self._optimizer_step, None

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Raises TrainingError for a run, shorter than the limit, in which every step was left out."""
        if self._consecutive_skips and self._consecutive_skips == state.global_step == state.max_steps:
            reason = f": {describe_fp16_overflow(self._trainer.model)}" if self._trainer.args.fp16 else ""
            raise TrainingError(
                f"all {self._consecutive_skips} steps had values that are not finite: nothing was learned{reason}"
            )

    def correct_mean_loss(self, logs: dict[str, float]) -> dict[str, float]:
        """Logs whose loss is the mean of the steps that were not left out; without a loss where all were."""
        steps, skipped = self._trainer.state.global_step - self._last_logged_step, self.steps_without_loss
        self.steps_without_loss = 0
        if not skipped:
            return logs
        if steps > skipped:
            return {**logs, "loss": logs["loss"] * steps / (steps - skipped)}
        return {name: value for name, value in logs.items() if name != "loss"}

    def _set_skip(self, optimizer: Any, should_skip: bool) -> None:
        """Skip the next optimizer step or not, and tell the Trainer, which asks before it moves the learning rate."""
        if should_skip:
            self._optimizer_step, optimizer.step = optimizer.step, lambda *_, **__: None
        optimizer._is_overflow = should_skip

    def _stop_or_skip(self, problem: str, *, was_step_taken: bool) -> None:
        step = int(self._trainer.state.global_step) + 1
        advice = (
            f"{checkpoints.resume_note(Path(self._trainer.args.output_dir))}; look at the data of this step, or "
            "start a new run with a lower train.learning_rate"
        )
        if was_step_taken:  # bf16.check_grad_overflow: false
            raise TrainingError(f"step {step}: {problem}, and DeepSpeed has updated the weights with it; {advice}")
        if self._on_nan == "stop":
            raise TrainingError(f"step {step}: {problem}, so the step was not taken: nothing was changed. A resumed "
                                f"run leaves such steps out with SET='train.on_nan=skip'; {advice}")  # fmt: skip
        if self._consecutive_skips >= MAX_SKIPPED_STEPS:
            raise TrainingError(f"step {step}: {problem}, and the {self._consecutive_skips - 1} steps before it were "
                                f"skipped for the same; {advice}")  # fmt: skip
        if distributed.is_first():
            logger.warning("Step %d skipped: %s; weights, optimizer and learning rate stay as they were", step, problem)


def describe_fp16_overflow(model: Any) -> str:
    """Say what overflows in a model that leaves fp16's range, and what to do about it."""
    text_config = model.config.get_text_config()
    is_eager = getattr(text_config, "_attn_implementation", None) == "eager"
    dropout = getattr(text_config, "attention_dropout", None) or 0.0
    return format_fp16_overflow(
        text_config.model_type, find_fp16_overflow(text_config.model_type, is_eager=is_eager, attention_dropout=dropout)
    )


def _read_numbers(norm: Any, loss: torch.Tensor) -> tuple[float | None, float]:
    """Read norm and loss as numbers with one wait for the device; DeepSpeed's norm is already a number, or None."""
    if not isinstance(norm, torch.Tensor):
        return norm, loss.item()
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    values: list[float] = torch.stack([norm.to(loss.device).float(), loss.float()]).tolist()
    return values[0], values[1]


def _format_value(value: float | None) -> str:
    return "not finite on another rank" if value is None or math.isfinite(value) else str(value)


def require_finite(trainer: Any) -> None:
    """Raises TrainingError on every rank where a weight that trains or a state is not finite on one of them."""
    local_name = next((name for name, tensor in _trained_tensors(trainer) if not is_finite(tensor)), None)
    faulty_name = next((name for name in distributed.gather_values(local_name) if name), None)
    if faulty_name is not None:
        raise TrainingError(
            f"step {trainer.state.global_step}: {faulty_name} has values that are not finite, so no checkpoint is "
            f"written; {checkpoints.resume_note(Path(trainer.args.output_dir))}"
        )


def is_finite(tensor: torch.Tensor) -> bool:
    """True if all values are finite; read from the minimum and maximum, which need no copy of the tensor."""
    return not tensor.numel() or all(map(math.isfinite, torch.stack(tensor.aminmax()).tolist()))


def _trained_tensors(trainer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    wrapped = trainer.model_wrapped
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            yield name, engines.local_shard(parameter.detach())
    if engines.is_deepspeed(wrapped):
        for tensor in engines.fp32_partitions(wrapped):
            yield "the fp32 copy of the weights", tensor
    for state in engines.unwrap_optimizer(trainer.optimizer).state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                yield f"the optimizer's {name}", engines.local_shard(value)
