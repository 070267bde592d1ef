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
from sft_play.units import count_of


@dataclass(frozen=True)
class Experts:
    """Of the experts whose weights are one tensor for all of a block: numbers of parameters, without biases."""

    total: int
    adapters: int
    """Of the adapters, those on them."""


@dataclass(frozen=True)
class Parameters:
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
    experts: Experts | None = None
    """None without experts in one tensor."""

    def shares(self) -> dict[str, dict[str, Any]]:
        """`precision_of` of `plan --json`: numbers of parameters, shares of the model's own, and dtypes."""
        held: dict[str, tuple[int, str | None]] = {
            "quantised": (self.quantised, self.quantised_dtype),
            "adapted": (self.adapters, self.adapter_dtype),
            "frozen": (self.frozen, self.rest_dtype if self.frozen else None),
            "trained": (self.trained, self.adapter_dtype or self.rest_dtype),
        }
        return {name: {"params": n, "share": n / self.total, "dtype": dtype} for name, (n, dtype) in held.items()}


def parameters_of(config: RunConfig, shape: ModelShape, precision: Precision, layout: Layout) -> Parameters:
    """The parameters of a run under its layout."""
    mode, lora = config.tuning.mode, config.tuning.lora
    full, nf4 = mode == "full", mode == "qlora"
    learned = trained_parameters(config, shape, element_bytes(config, precision, layout)).params
    stacks = [(one, kind.count) for kind in shape.layers for one in kind.expert_weights]
    experts = Experts(
        total=sum(count * one.weights for one, count in stacks),
        adapters=0 if full else sum(count * stacked_adapter_params(one, lora) for one, count in stacks),
    )
    return Parameters(
        total=shape.params,
        quantised=shape.packable_params if nf4 else 0,
        quantised_dtype="nf4" if nf4 else None,
        adapters=0 if full else adapter_params(shape, lora),
        adapter_dtype=None if full else _held_in(adapter_dtype(config, precision), config, precision, layout),
        trained=learned,
        frozen=shape.untrained_params if full else shape.params,
        rest_dtype=_held_in(precision.load, config, precision, layout) if full else precision.load,
        experts=experts if stacks else None,
    )


def _held_in(dtype: DtypeName, config: RunConfig, precision: Precision, layout: Layout) -> DtypeName:
    """The dtype of what trains under a layout: DeepSpeed casts it to the dtype of the computation, and accelerate to
    fp32 for FSDP's mixed precision, except beside NF4 weights."""
    if precision.compute == "float32":
        return dtype
    if layout.is_zero:
        return precision.compute
    return "float32" if layout.is_fsdp and config.tuning.mode != "qlora" else dtype


def parameters_line(parameters: Parameters, config: RunConfig) -> str:
    """One line: the shares of the parameters, their dtypes, and the options that would change them."""
    one, lora = parameters, config.tuning.lora
    chosen = "" if config.tuning.trainable == "all" else "; tuning.trainable chooses of what is trained"
    if one.adapter_dtype is None:
        which = f"{count_of(one.trained)} of" if one.frozen else "all of"
        left = ", the others get no gradient by their class" * bool(one.frozen)
        return f"Parameters: {which} {count_of(one.total)} are trained in {one.rest_dtype}{left}{chosen}"
    on_experts = saved = ""
    if one.experts is not None and one.experts.adapters:
        on_experts = f", {count_of(one.experts.adapters)} of them on experts (tuning.lora.target_parameters)"
    elif one.experts is not None:
        on_experts = ", none on experts (tuning.lora.target_parameters=auto)"
    if others := one.trained - one.adapters:
        copies = [f"copies of {', '.join(lora.modules_to_save)}"] if lora.modules_to_save else []
        rows = ["rows of new tokens"] if config.model.add_tokens else []
        keys = ", ".join(["tuning.lora.modules_to_save"] * len(copies) + ["model.add_tokens"] * len(rows))
        saved = f"; {' and '.join(copies + rows)} that train: {count_of(others)} ({keys})"
    base = f"all {one.rest_dtype}, frozen"
    if one.quantised_dtype is not None:
        base = f"{one.quantised / one.total:.1%} in NF4, the rest {one.rest_dtype}, all frozen"
    return (
        f"Parameters: {count_of(one.total)}: {base}; adapters: {count_of(one.adapters)} "
        f"{one.adapter_dtype} ({one.adapters / one.total:.2%}){on_experts}{saved}{chosen}"
    )
