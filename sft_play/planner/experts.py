"""Which code runs a mixture's experts: one rule for the plan, which knows the shape, and the run, which knows the
class."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.facts.models.model_shape import ModelShape
from sft_play.log import one_line
from sft_play.planner.precision import BYTES, SHORT, Precision

ExpertsName = Literal["grouped_mm", "eager"]
"""Names of transformers' implementations. Its `batched_mm` copies an expert's weights for every token, which only pays
for single tokens of generation; `deepgemm` and `sonicmoe` load kernels from the hub."""

ROW_BYTES = 16
"""Rows of a grouped product's matrices begin at a multiple of this (PyTorch's `_grouped_mm`, `check_valid_strides`)."""


@dataclass(frozen=True)
class Experts:
    """An implementation, and why it was chosen. `casts`: the weights of experts are cast to the dtype of the other
    matrix products, which autocast does not do for grouped ones."""

    name: ExpertsName
    reason: str
    casts: bool = False


def experts_of(config: RunConfig, *, has_own_code: bool, widths: Iterable[int], precision: Precision) -> Experts:
    """The implementation for a model with experts: grouped_mm unless its class, its widths or the config are against.

    Args:
        has_own_code: the class runs experts by code of its own, which no setting reaches.
        widths: hidden width and inner width of an expert.

    Raises:
        ConfigError: grouped_mm is asked for by name, and cannot run.
    """
    wanted = config.model.experts_implementation
    if wanted == "eager":
        return Experts("eager", "eager, one expert after another, as model.experts_implementation says")
    # the narrower dtype needs the larger multiple of elements
    step = ROW_BYTES // min(BYTES[precision.compute], BYTES[precision.load])
    odd = [width for width in widths if width % step]
    problem = None
    if has_own_code:
        problem = "its class runs them by code of its own, which model.experts_implementation does not reach"
    elif odd:
        problem = f"grouped products need widths that are multiples of {step}, and one is {odd[0]}"
    if problem is None:
        return _grouped(precision)
    if wanted == "grouped_mm":
        raise ConfigError(
            f"model.experts_implementation=grouped_mm: {one_line(config.model.name)} cannot run it, because {problem}; "
            "use auto"
        )
    return Experts("eager", f"eager, not grouped_mm: {problem}")


def _grouped(precision: Precision) -> Experts:
    reason = "grouped_mm, one product for all experts of a block"
    if precision.load == precision.compute or precision.compute == "float32":
        return Experts("grouped_mm", reason)
    low = SHORT[precision.compute]
    why = f"; their {SHORT[precision.load]} weights are cast to {low} for it, as autocast casts those of other products"
    return Experts("grouped_mm", reason + why, casts=True)


def planned_experts(config: RunConfig, shape: ModelShape, precision: Precision) -> Experts | None:
    """The implementation for the experts of a shape; None where there are none.

    Raises:
        ConfigError: the config names one that cannot run, or there are no experts.
    """
    kinds = [kind for kind in shape.layers if kind.num_experts]
    if not kinds:
        refuse_without_experts(config)
        return None
    # the width of experts in code that is not known is not known either
    widths = sorted({shape.hidden_size, *(kind.expert_width for kind in kinds if kind.expert_width)})
    return experts_of(config, has_own_code=shape.own_experts, widths=widths, precision=precision)


def refuse_without_experts(config: RunConfig) -> None:
    """Raises ConfigError where an implementation is named for a model that has no experts."""
    wanted = config.model.experts_implementation
    if wanted != "auto":
        raise ConfigError(
            f"model.experts_implementation={wanted}: {one_line(config.model.name)} has no experts that it could reach; "
            "leave it at auto"
        )
