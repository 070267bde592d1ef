"""Whether the optimizer's updates reach the weights, read from live objects at the first steps: a
run whose updates are rounded away looks like any other."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import TrainerCallback

from sft_play.planner.precision import WeightUpdates
from sft_play.training import distributed, engines
from sft_play.training.prepare.experts import PACKED_ATTRIBUTE

logger = logging.getLogger(__name__)

# Steps that are compared, counted from the start of this process: at the first, lora_A has no
# gradient yet, since lora_B begins at zero.
COMPARED_STEPS = range(2, 5)

# Share of moved elements below which updates count as lost. In fp32 nearly all that have a gradient
# move.
LOST_SHARE = 0.5


@dataclass(frozen=True)
class UpdateFacts:
    """Dtypes by torch's names, and the share of sampled elements with a gradient that a step
    changed."""

    weights: tuple[str, ...]
    adapters: tuple[str, ...]
    masters: tuple[str, ...]  # copies that an engine's optimizer steps in place of the weights
    optimizer_states: tuple[str, ...]
    moved_share: float | None
    rounding: WeightUpdates

    @property
    def is_lost(self) -> bool:
        """Whether most updates are rounded away; stochastic rounding moves few elements by
        design."""
        return (
            self.moved_share is not None
            and self.moved_share < LOST_SHARE
            and self.rounding != "stochastic"
        )

    def as_json(self) -> dict[str, Any]:
        """`updates` of the summary."""
        return asdict(self) | {"lost": self.is_lost}

    @property
    def warning(self) -> str:
        """The warning for lost updates, with what to set."""
        stepped_dtypes, setting = (
            self.masters or self.adapters or self.weights,
            "a higher train.learning_rate",
        )
        if stepped_dtypes != ("float32",):
            option = "tuning.lora.dtype" if self.adapters else "train.weight_updates"
            setting = f"{option}=auto, or {setting}"
        return (
            f"Most updates are lost: a step moves {self.moved_share or 0.0:.1%} of what trains,"
            f" since {' and '.join(stepped_dtypes)} has too few digits for them; set {setting}"
        )


class UpdateCheck(TrainerCallback):
    """Compares samples of what trains before and after the first steps, on all ranks, and warns of
    what is lost."""

    def __init__(self, trainer: Any, rounding: WeightUpdates) -> None:
        self._trainer, self._rounding = trainer, rounding
        self._steps = 0
        # Of the step that is compared: the sampled elements before it, and those with a gradient.
        self._elements_before: torch.Tensor | None = None
        self._has_gradient: torch.Tensor | None = None
        # Moved and compared elements [2], on the device: they are read once, at the end.
        self._counts: torch.Tensor | None = None
        self.facts: UpdateFacts | None = None

    def on_step_begin(self, *_: Any, lr_scheduler: Any = None, **__: Any) -> None:
        """Take samples if this is a step to compare."""
        self._steps += 1
        if self._steps in COMPARED_STEPS and (
            lr_scheduler is None or max(lr_scheduler.get_last_lr()) > 0
        ):
            self._elements_before = _sample_elements(stepped_tensors(self._trainer))

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Note which of the sampled elements have a gradient. DeepSpeed has already stepped, and
        shows none."""
        if self._elements_before is not None and not self._trainer.is_deepspeed_enabled:
            gradients = _sample_elements(
                [
                    engines.local_shard(
                        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    )
                    for parameter in engines.stepped_parameters(self._trainer)
                ]
            )
            # loss scaling skips a step whose gradients are not finite: none of it counts
            self._has_gradient = (gradients != 0) & torch.isfinite(gradients).all()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Compare, and take the result after the last step to compare."""
        before, has_gradient = self._elements_before, self._has_gradient
        if before is not None and not self._trainer.accelerator.optimizer_step_was_skipped:
            if has_gradient is None:
                has_gradient = torch.ones_like(before, dtype=torch.bool)
            has_moved = _sample_elements(stepped_tensors(self._trainer)) != before
            counts = torch.stack([(has_moved & has_gradient).sum(), has_gradient.sum()])
            self._counts = counts if self._counts is None else self._counts + counts
        self._elements_before = self._has_gradient = None
        if self._steps == COMPARED_STEPS[-1]:
            self._report_facts()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Take the result of a shorter run."""
        if self.facts is None:
            self._report_facts()

    def _report_facts(self) -> None:
        counts = [0, 0] if self._counts is None else self._counts.tolist()
        moved, compared = distributed.sum_each_over_ranks(counts)
        self.facts = UpdateFacts(
            **training_dtypes(self._trainer),
            moved_share=round(moved / compared, 4) if compared else None,
            rounding=self._rounding,
        )
        if self.facts.is_lost:
            logger.warning("%s", self.facts.warning)


def _sample_elements(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    # a copy of at most 4,096 of each, evenly spaced, in one tensor: one kernel for all of them
    flat_tensors = [tensor.detach().reshape(-1) for tensor in tensors]
    return torch.cat([flat[:: max(1, -(-flat.numel() // 4096))] for flat in flat_tensors])


def stepped_tensors(trainer: Any) -> list[torch.Tensor]:
    """The tensors that this rank's optimizer updates: trained weights, their shards, or DeepSpeed's
    fp32 copies."""
    wrapped = trainer.model_wrapped
    if engines.is_deepspeed(wrapped):
        return engines.fp32_partitions(wrapped)
    return [engines.local_shard(parameter) for parameter in engines.stepped_parameters(trainer)]


def training_dtypes(trainer: Any) -> dict[str, Any]:
    """Dtypes of the base's weights (`nf4` in 4 bits), adapters, DeepSpeed's copies and optimizer
    states, the most frequent first."""
    from accelerate.utils import is_peft_model

    has_adapters, wrapped = is_peft_model(trainer.model), trainer.model_wrapped
    counters = {
        name: Counter[str]() for name in ("weights", "adapters", "masters", "optimizer_states")
    }
    for module in trainer.model.modules():
        packed = vars(module).get(PACKED_ATTRIBUTE, ())
        for name, parameter in module.named_parameters(recurse=False):
            part = "adapters" if has_adapters and parameter.requires_grad else "weights"
            is_nf4 = name in packed or (name, type(module).__name__) == ("weight", "Linear4bit")
            counters[part]["nf4" if is_nf4 else _dtype_name(parameter)] += 1
    if engines.is_deepspeed(wrapped):
        counters["masters"].update(map(_dtype_name, engines.fp32_partitions(wrapped)))
    for state in engines.unwrap_optimizer(trainer.optimizer).state.values():
        for name, value in state.items():
            # without counters and the scales and code tables of 8-bit states
            if (
                isinstance(value, torch.Tensor)
                and value.dim()
                and not name.startswith(("qmap", "absmax"))
            ):
                counters["optimizer_states"][_dtype_name(value)] += 1
    return {
        part: tuple(name for name, _ in counter.most_common()) for part, counter in counters.items()
    }


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
