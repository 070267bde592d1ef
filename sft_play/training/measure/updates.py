"""Whether the optimizer's updates reach the weights, read from live objects at the first steps: a run whose updates are
rounded away looks like any other."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from sft_play.planner.precision import WeightUpdates
from sft_play.training.prepare.experts import PACKED_ATTRIBUTE
from sft_play.training.ranks import distributed, engines

logger = logging.getLogger(__name__)

# Steps that are compared, counted from the start of this process: at the first, lora_A has no gradient yet, since
# lora_B begins at zero.
LOOKS = range(2, 5)
# Elements of a tensor that are compared, evenly spaced.
SAMPLE = 4096
# Share of moved elements below which updates count as lost. In fp32 nearly all that have a gradient move.
LOST = 0.5


@dataclass(frozen=True)
class UpdateFacts:
    """Dtypes by torch's names, and the share of sampled elements with a gradient that a step changed."""

    weights: tuple[str, ...]
    adapters: tuple[str, ...]
    masters: tuple[str, ...]
    """Copies that an engine's optimizer steps in place of the weights."""
    optimizer_states: tuple[str, ...]
    moved_share: float | None
    rounding: WeightUpdates

    @property
    def lost(self) -> bool:
        """Whether most updates are rounded away; stochastic rounding moves few elements by design."""
        return self.moved_share is not None and self.moved_share < LOST and self.rounding != "stochastic"

    def as_json(self) -> dict[str, Any]:
        """`updates` of the summary."""
        return asdict(self) | {"lost": self.lost}

    @property
    def warning(self) -> str:
        """The warning for lost updates, with what to set."""
        stepped = self.masters or self.adapters or self.weights
        setting = "tuning.lora.dtype=auto" if self.adapters else "train.weight_updates=auto"
        alternative = "" if stepped == ("float32",) else f"{setting}, or "
        return (
            f"Most updates are lost: a step moves {self.moved_share or 0.0:.1%} of what trains, since "
            f"{' and '.join(stepped)} has too few digits for them; set {alternative}a higher train.learning_rate"
        )


class UpdateCheck(TrainerCallback):
    """Compares samples of what trains before and after the first steps, on all ranks, and warns of what is lost."""

    def __init__(self, trainer: Any, rounding: WeightUpdates) -> None:
        self._trainer, self._rounding = trainer, rounding
        self._steps = self._moved = self._seen = 0
        self._before: list[torch.Tensor] = []
        self._has_gradient: list[torch.Tensor] | None = None
        self.facts: UpdateFacts | None = None

    def on_step_begin(self, *_: Any, lr_scheduler: Any = None, **__: Any) -> None:
        """Take samples if this is a step to compare."""
        self._steps += 1
        rates = lr_scheduler.get_last_lr() if lr_scheduler is not None else [1.0]
        if self._steps in LOOKS and max(rates) > 0:
            self._before = [_sample(tensor).clone() for tensor in stepped(self._trainer)]

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Note which of the sampled elements have a gradient. DeepSpeed has already stepped, and shows none."""
        if self._before and not self._trainer.is_deepspeed_enabled:
            whole = (torch.zeros_like(one) if one.grad is None else one.grad for one in _trained(self._trainer))
            gradients = [_sample(engines.local(gradient)) for gradient in whole]
            if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
                self._before = []  # loss scaling skips this step
            self._has_gradient = [gradient != 0 for gradient in gradients]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Compare, and take the result after the last step to compare."""
        if self._before and not self._trainer.accelerator.optimizer_step_was_skipped:
            masks = self._has_gradient or [torch.ones_like(before, dtype=torch.bool) for before in self._before]
            for before, mask, after in zip(self._before, masks, stepped(self._trainer), strict=True):
                self._moved += int(((_sample(after) != before) & mask).sum())
                self._seen += int(mask.sum())
        self._before, self._has_gradient = [], None
        if self._steps == LOOKS[-1]:
            self._say()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Take the result of a shorter run."""
        if self.facts is None:
            self._say()

    def _say(self) -> None:
        moved, seen = distributed.total(self._moved), distributed.total(self._seen)
        self.facts = UpdateFacts(
            *dtypes_of(self._trainer), moved_share=round(moved / seen, 4) if seen else None, rounding=self._rounding
        )
        if self.facts.lost:
            logger.warning("%s", self.facts.warning)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // SAMPLE))]


def _trained(trainer: Any) -> list[nn.Parameter]:
    return [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]


def stepped(trainer: Any) -> list[torch.Tensor]:
    """What this rank's optimizer steps: trained weights, their shards, or DeepSpeed's fp32 copies."""
    wrapped = trainer.model_wrapped
    if engines.is_deepspeed(wrapped):
        return engines.masters(wrapped)
    return [engines.local(parameter) for parameter in _trained(trainer)]


def dtypes_of(trainer: Any) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Dtypes of the base's weights (`nf4` in 4 bits), adapters, DeepSpeed's copies and optimizer states."""
    from accelerate.utils import is_peft_model

    has_adapters = is_peft_model(trainer.model)
    base, adapters = list[str](), list[str]()
    for module in trainer.model.modules():
        packed = ("weight",) if type(module).__name__ == "Linear4bit" else vars(module).get(PACKED_ATTRIBUTE, ())
        for name, parameter in module.named_parameters(recurse=False):
            is_adapter = has_adapters and parameter.requires_grad
            (adapters if is_adapter else base).append("nf4" if name in packed else _name(parameter))
    wrapped = trainer.model_wrapped
    masters = [_name(tensor) for tensor in engines.masters(wrapped)] if engines.is_deepspeed(wrapped) else []
    return _listed(base), _listed(adapters), _listed(masters), _listed(_states(trainer))


def _states(trainer: Any) -> Iterator[str]:
    """Dtypes of the optimizer's states, without counters and the scales and code tables of 8-bit states."""
    for state in engines.innermost(trainer.optimizer).state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and not name.startswith(("qmap", "absmax")):
                yield _name(value)


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _listed(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name, _ in Counter(names).most_common())
