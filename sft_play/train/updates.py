"""Whether what the optimizer does reaches the weights: dtypes of what trains, and the share of elements that move.

Read from live objects at the first steps, under every layout: a run can look like any other while its updates are
rounded away.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from sft_play.plan.precision import Updates
from sft_play.train import engine

logger = logging.getLogger(__name__)

LOOKS = range(2, 5)
"""Steps of a start that are looked at: in the first one lora_A has no gradient, since lora_B begins at zero."""
SAMPLE = 4096
"""Elements of a tensor that are compared, evenly spread."""
LOST = 0.5
"""Share of moved elements below which updates count as lost. In fp32 nearly all that have a gradient move."""


@dataclass(frozen=True)
class Found:
    """Dtypes by their names in torch, and the share of the sampled elements with a gradient that a step moved (None:
    no step of the run was looked at)."""

    weights: tuple[str, ...]
    adapters: tuple[str, ...]
    masters: tuple[str, ...]
    """Copies that an engine's optimizer steps in place of the weights."""
    optimizer_states: tuple[str, ...]
    moved_share: float | None
    rounding: Updates

    @property
    def lost(self) -> bool:
        """Whether most updates are rounded away; stochastic rounding moves few elements by design."""
        return self.moved_share is not None and self.moved_share < LOST and self.rounding != "stochastic"

    def as_json(self) -> dict[str, Any]:
        """`updates` of the summary."""
        return asdict(self) | {"lost": self.lost}

    @property
    def line(self) -> str:
        """The dtypes and the share in words."""
        named = {
            "weights": self.weights, "adapters": self.adapters, "copies that are stepped": self.masters,
            "optimizer states": self.optimizer_states,
        }  # fmt: skip
        text = "Dtypes: " + ", ".join(f"{name} {' and '.join(dtypes)}" for name, dtypes in named.items() if dtypes)
        if self.moved_share is None:
            return text
        return f"{text}; a step moves {self.moved_share:.1%} of what trains{self._how}"

    @property
    def warning(self) -> str:
        """What is said where they are lost, with what to set."""
        stepped = self.masters or self.adapters or self.weights
        wish = "tuning.lora.dtype=auto" if self.adapters else "train.weight_updates=auto"
        way = "" if stepped == ("float32",) else f"{wish}, or "
        return (
            f"Most updates are lost: a step moves {self.moved_share or 0.0:.1%} of what trains, since "
            f"{' and '.join(stepped)} holds too few digits for them; set {way}a higher train.learning_rate"
        )

    @property
    def _how(self) -> str:
        return " (rounded stochastically: small updates arrive on average)" if self.rounding == "stochastic" else ""


class UpdateCheck(TrainerCallback):
    """Compares samples of what trains before and after the first steps, then says and keeps what it found.

    All ranks sum their counts, so that every rank has the same answer.
    """

    def __init__(self, rounding: Updates) -> None:
        self._rounding = rounding
        self._steps = self._moved = self._seen = 0
        self._before: list[torch.Tensor] = []
        self._has_gradient: list[torch.Tensor] | None = None
        self.trainer: Any = None
        self.found: Found | None = None

    def on_step_begin(self, *_: Any, lr_scheduler: Any = None, **__: Any) -> None:
        """Sample, where this is a step to look at."""
        self._steps += 1
        rates = lr_scheduler.get_last_lr() if lr_scheduler is not None else [1.0]
        if self._steps in LOOKS and max(rates) > 0:
            self._before = [_sample(tensor).clone() for tensor in stepped(self.trainer)]

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Which of the sampled elements have a gradient; DeepSpeed has stepped already, and shows none."""
        if self._before and not self.trainer.is_deepspeed_enabled:
            gradients = [_gradient(parameter) for parameter in _trained(self.trainer)]
            if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
                self._before = []  # loss scaling skips this step
            self._has_gradient = [gradient != 0 for gradient in gradients]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Compare, and say what was found once all looks are taken."""
        if self._before and not self.trainer.accelerator.optimizer_step_was_skipped:
            self._compare()
        self._before, self._has_gradient = [], None
        if self._steps == LOOKS[-1]:
            self._say()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """A run of fewer steps says what it has seen."""
        if self.found is None:
            self._say()

    def _compare(self) -> None:
        masks = self._has_gradient or [torch.ones_like(before, dtype=torch.bool) for before in self._before]
        for before, mask, after in zip(self._before, masks, stepped(self.trainer), strict=True):
            self._moved += int(((_sample(after) != before) & mask).sum())
            self._seen += int(mask.sum())

    def _say(self) -> None:
        moved, seen = engine.total(self._moved), engine.total(self._seen)
        self.found = Found(
            *dtypes_of(self.trainer), moved_share=round(moved / seen, 4) if seen else None, rounding=self._rounding
        )
        logger.info("%s", self.found.line)
        if self.found.lost:
            logger.warning("%s", self.found.warning)


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """The gradients of a parameter's sampled elements [n]; zeros where it has none."""
    grad = parameter.grad
    return _sample(engine.local(grad)) if grad is not None else torch.zeros_like(_sample(engine.local(parameter)))


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """At most SAMPLE elements [n], evenly spread over a tensor of any shape."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // SAMPLE))]


def _trained(trainer: Any) -> list[nn.Parameter]:
    return [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]


def stepped(trainer: Any) -> list[torch.Tensor]:
    """What the optimizer of this rank steps: trained weights, its parts of them, or DeepSpeed's fp32 copies."""
    wrapped = trainer.model_wrapped
    if engine.is_deepspeed(wrapped):
        return engine.masters(wrapped)
    return [engine.local(parameter) for parameter in _trained(trainer)]


def dtypes_of(trainer: Any) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Dtypes of the base's weights (all of them where every weight trains), adapters, DeepSpeed's copies and optimizer
    states; 4-bit weights are `nf4`."""
    from accelerate.utils import is_peft_model

    has_adapters = is_peft_model(trainer.model)
    base: list[str] = []
    adapters: list[str] = []
    for module in trainer.model.modules():
        is_4bit = type(module).__name__ == "Linear4bit"
        for name, parameter in module.named_parameters(recurse=False):
            is_adapter = has_adapters and parameter.requires_grad
            (adapters if is_adapter else base).append("nf4" if is_4bit and name == "weight" else _name(parameter))
    wrapped = trainer.model_wrapped
    masters = [_name(tensor) for tensor in engine.masters(wrapped)] if engine.is_deepspeed(wrapped) else []
    return _listed(base), _listed(adapters), _listed(masters), _listed(_states(trainer))


def _states(trainer: Any) -> Iterator[str]:
    """Dtypes of the optimizer's states, without counters, scales and tables of a few elements."""
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and not name.startswith(("qmap", "absmax")):
                yield _name(value)


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _listed(names: Iterable[str]) -> tuple[str, ...]:
    """Each once, the commonest first."""
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return tuple(sorted(counts, key=lambda name: -counts[name]))
