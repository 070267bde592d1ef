"""What a run computes by slower code than there is, and what that costs: a line each, for the plan and the doctor."""

from __future__ import annotations

from collections.abc import Collection

from sft_play.config.schema import RunConfig
from sft_play.facts.installed import LINEAR_ATTENTION, unsound
from sft_play.facts.models.model_shape import ModelShape
from sft_play.planner.candidates import Candidate
from sft_play.planner.experts import planned_experts
from sft_play.planner.speed.throughput import EXPERTS_PART, LINEAR_PART, Speed

PUBLISHED = {
    LINEAR_ATTENTION: "Qwen3.5-9B on 8 B200: 1.22 s a step without it, 0.70 s with it",
    "causal-conv1d": "Qwen3.5-9B on 8 B200: at most 0.1 s of a step of 0.70 s",
}
"""What others measured: https://github.com/huggingface/transformers/issues/48718, and the baseline of 0.605 s with both
packages and a smaller Trainer loop in https://github.com/huggingface/transformers/pull/48915."""


def slow_words(config: RunConfig, shape: ModelShape, chosen: Candidate, without: Collection[str]) -> list[str]:
    """A line for the experts that do not run as grouped products of 16 bits by themselves, and one for each package
    that is missing, with what it costs."""
    eager = eager_words(config, shape, chosen)
    experts = planned_experts(config, shape, chosen.precision)
    cast = [f"experts: {experts.reason}"] if experts is not None and experts.casts else []
    return [*([f"experts: {eager}"] if eager else []), *cast, *missing_words(shape, chosen, without).values()]


def eager_words(config: RunConfig, shape: ModelShape, chosen: Candidate) -> str | None:
    """Why experts run one after another, or by their class's own code, and what it costs; None where they do not."""
    experts = planned_experts(config, shape, chosen.precision)
    if experts is None or experts.name != "eager":
        return None
    return f"{experts.reason}{_cost(chosen.speed, EXPERTS_PART)}"


def missing_words(shape: ModelShape, chosen: Candidate, without: Collection[str]) -> dict[str, str]:
    """For each package of `without` whose kernels the model's class would run on this GPU: a line with what that
    costs, as far as it is known, and why to leave it so where its kernels fail there."""
    if chosen.step.capability is None:
        return {}
    words = {}
    for name in shape.kernel_packages:
        if name not in without:
            continue
        cost = f" (published: {PUBLISHED[name]})" if LINEAR_ATTENTION in shape.kernel_packages else ""
        if name == LINEAR_ATTENTION:
            cost = f"{_cost(chosen.speed, LINEAR_PART)}{cost}"
        why_not = unsound(name, chosen.step.capability)
        leave = f"; leave it so: {why_not}" if why_not else ""
        words[name] = f"{name} is not installed: {shape.model_type} runs its own slower code instead{cost}{leave}"
    return words


def _cost(speed: Speed, part: str) -> str:
    """The predicted share of a step; empty where it has none."""
    seconds = speed.parts.get(part, 0.0)
    return f": {seconds:.3g} s of a step of {speed.step_s:.3g} s, by the roofline" if seconds else ""
