"""How many of a model's parameters are quantised, adapted, trained and frozen, in which dtypes; the same in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sft_play.config.schema import RunConfig
from sft_play.facts.models.model_shape import ModelShape
from sft_play.planner.gradients import adapter_dtype
from sft_play.planner.layout import Layout
from sft_play.planner.memory.model_states import adapter_params, trained_parameters
from sft_play.planner.memory.structure import element_bytes, stacked_adapter_params
from sft_play.planner.precision import DtypeName, Precision
from sft_play.units import format_count


@dataclass(frozen=True)
class ExpertParameters:
    """Of the experts whose weights are one tensor for all of a block: numbers of parameters, without biases."""

    total: int
    adapters: int
    """Of the adapters, those on them."""


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters of the language model and of what is added to it, as one rank without shards holds them.
    `trained` and `frozen` are together `total`, and adapters and copies of `modules_to_save`, which the mode adds."""

    total: int
    """The model's own."""
    quantised: int
    """Of those: what is kept in `quantised_dtype`; all others are in `rest_dtype`."""
    quantised_dtype: Literal["nf4"] | None
    adapters: int
    adapter_dtype: DtypeName | None
    """None where there are no adapters."""
    trained: int
    """What the mode trains; `tuning.trainable` may choose of it."""
    frozen: int
    rest_dtype: DtypeName
    experts: ExpertParameters | None = None
    """None without experts in one tensor."""

    def shares(self) -> dict[str, dict[str, Any]]:
        """`precision_of` of `plan --json`: numbers of parameters, shares of the model's own, and dtypes."""
        groups: dict[str, tuple[int, str | None]] = {
            "quantised": (self.quantised, self.quantised_dtype),
            "adapted": (self.adapters, self.adapter_dtype),
            "frozen": (self.frozen, self.rest_dtype if self.frozen else None),
            "trained": (self.trained, self.adapter_dtype or self.rest_dtype),
        }
        return {
            name: {"params": count, "share": count / self.total, "dtype": dtype}
            for name, (count, dtype) in groups.items()
        }


def count_parameters(config: RunConfig, shape: ModelShape, precision: Precision, layout: Layout) -> ParameterCounts:
    """The parameters of a run under its layout."""
    mode, lora = config.tuning.mode, config.tuning.lora
    is_full, is_nf4 = mode == "full", mode == "qlora"
    trained_count = trained_parameters(config, shape, element_bytes(config, precision, layout)).params
    stacked_tensors = [(stacked, kind.count) for kind in shape.layers for stacked in kind.expert_weights]
    experts = ExpertParameters(
        total=sum(count * stacked.weights for stacked, count in stacked_tensors),
        adapters=0
        if is_full
        else sum(count * stacked_adapter_params(stacked, lora) for stacked, count in stacked_tensors),
    )
    return ParameterCounts(
        total=shape.params,
        quantised=shape.packable_params if is_nf4 else 0,
        quantised_dtype="nf4" if is_nf4 else None,
        adapters=0 if is_full else adapter_params(shape, lora),
        adapter_dtype=None if is_full else _trained_dtype(adapter_dtype(config, precision), config, precision, layout),
        trained=trained_count,
        frozen=shape.untrained_params if is_full else shape.params,
        rest_dtype=_trained_dtype(precision.load, config, precision, layout) if is_full else precision.load,
        experts=experts if stacked_tensors else None,
    )


def _trained_dtype(dtype: DtypeName, config: RunConfig, precision: Precision, layout: Layout) -> DtypeName:
    """The dtype of what trains under a layout: DeepSpeed casts it to the dtype of the computation, and accelerate to
    fp32 for FSDP's mixed precision, except beside NF4 weights."""
    if precision.compute == "float32":
        return dtype
    if layout.is_zero:
        return precision.compute
    return "float32" if layout.is_fsdp and config.tuning.mode != "qlora" else dtype


def format_parameters(parameters: ParameterCounts, config: RunConfig) -> str:
    """One line: the shares of the parameters, their dtypes, and the options that would change them."""
    counts, lora = parameters, config.tuning.lora
    selection_note = "" if config.tuning.trainable == "all" else "; tuning.trainable chooses of what is trained"
    if counts.adapter_dtype is None:
        share_text = f"{format_count(counts.trained)} of" if counts.frozen else "all of"
        frozen_note = ", the others get no gradient by their class" * bool(counts.frozen)
        return (
            f"Parameters: {share_text} {format_count(counts.total)} are trained in "
            f"{counts.rest_dtype}{frozen_note}{selection_note}"
        )
    experts_note = copies_note = ""
    if counts.experts is not None and counts.experts.adapters:
        experts_note = f", {format_count(counts.experts.adapters)} of them on experts (tuning.lora.target_parameters)"
    elif counts.experts is not None:
        experts_note = ", none on experts (tuning.lora.target_parameters=auto)"
    if copied_params := counts.trained - counts.adapters:
        copies = [f"copies of {', '.join(lora.modules_to_save)}"] if lora.modules_to_save else []
        rows = ["rows of new tokens"] if config.model.add_tokens else []
        keys = ", ".join(["tuning.lora.modules_to_save"] * len(copies) + ["model.add_tokens"] * len(rows))
        copies_note = f"; {' and '.join(copies + rows)} that train: {format_count(copied_params)} ({keys})"
    base_text = f"all {counts.rest_dtype}, frozen"
    if counts.quantised_dtype is not None:
        base_text = f"{counts.quantised / counts.total:.1%} in NF4, the rest {counts.rest_dtype}, all frozen"
    return (
        f"Parameters: {format_count(counts.total)}: {base_text}; adapters: {format_count(counts.adapters)} "
        f"{counts.adapter_dtype} ({counts.adapters / counts.total:.2%}){experts_note}{copies_note}{selection_note}"
    )
