"""The simulation of a step of a class whose blocks are measured, where the estimate does not know them.

`trace.blocks` runs a class's own blocks; `MeasuredStepSimulation` takes their bytes in place of those of `block`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

from sft_play.config.schema import RunConfig
from sft_play.facts.models.model_shape import ModelShape
from sft_play.planner.memory.block import BlockBytes, LayerBytes
from sft_play.planner.memory.step_memory import Step, StepMemorySimulation
from sft_play.planner.memory.structure import BlockSpec
from sft_play.planner.precision import Precision

# How a block runs: its activations stay for the backward pass, or are computed again there; or there is none.
BlockMode = Literal["kept", "recomputed", "evaluated"]


@dataclass(frozen=True)
class MeasuredBlocks:
    """A micro step of `batch` rows through all kinds of blocks of a model."""

    batch: int
    before: int
    """Live when the first block begins, beside its input and what lasts: the batch, masks, rotations."""
    embedded: int
    """The embedding's output, where only the model's own forward keeps it."""
    first: LayerBytes
    """The first block, whose input may need no gradient."""
    layers: tuple[LayerBytes, ...]
    """The other blocks, by their place in `ModelShape.layers`."""
    tail: LayerBytes
    """What follows the last block: last norm, output head and loss."""
    last: int = 0
    """What the last block keeps beyond others of its kind; below 0 where gradients that the backward pass holds from it
    on, such as those of an input that all blocks read, count as kept by the first."""
    on_cpu: bool = False
    """Extrapolated from a few real tokens on the CPU."""
    ends: tuple[int, ...] = ()
    """The two measured batches on whose line it lies; empty where it was measured itself."""


def interpolate(low: MeasuredBlocks, high: MeasuredBlocks, batch: int) -> MeasuredBlocks:
    """The micro step of a batch between two that were measured, or on their line beyond them. A peak is the largest of
    phases that grow with the batch at different rates, so that the line between two of them is not below it."""
    fraction = (batch - low.batch) / (high.batch - low.batch)

    def blend(low_value: Any, high_value: Any) -> Any:
        if isinstance(low_value, bool):
            return low_value
        if isinstance(low_value, int):
            return round(low_value + fraction * (high_value - low_value))
        if isinstance(low_value, tuple):
            return tuple(map(blend, low_value, high_value))
        return type(low_value)(
            *(blend(getattr(low_value, field.name), getattr(high_value, field.name)) for field in fields(low_value))
        )

    blended: MeasuredBlocks = blend(replace(low, ends=()), replace(high, ends=()))
    return replace(blended, ends=(low.batch, high.batch))


def create_step_simulation(
    config: RunConfig, shape: ModelShape, precision: Precision, step: Step
) -> StepMemorySimulation:
    """The simulation of this step: by measured blocks where the shape has a meter."""
    simulation_class = StepMemorySimulation if shape.block_meter is None else MeasuredStepSimulation
    return simulation_class(config, shape, precision, step)


class MeasuredStepSimulation(StepMemorySimulation):
    """A simulation whose blocks, and what is live around them, are those that `ModelShape.block_meter` measures."""

    @property
    def was_measured_on_cpu(self) -> bool:
        """Whether its bytes are extrapolated from a few real tokens on the CPU."""
        return self._measured_blocks(self._block_mode(0), self.step.micro_batch).on_cpu

    def _compute_blocks(self) -> tuple[list[BlockBytes], list[int]]:
        return [], [self.weight_itemsize] * (self.shape.num_layers + 1)

    def _compute_layers(self) -> list[LayerBytes]:
        layers = [self._measured_layer(self._block_mode(layer), layer) for layer in range(self.shape.num_layers)]
        last_layer_extra = self._measured_blocks(self._block_mode(len(layers) - 1), self.step.micro_batch).last
        layers[-1] = replace(layers[-1], saved=layers[-1].saved + last_layer_extra)
        return [layer_bytes.offloaded for layer_bytes in layers] if self.step.offloads else layers

    def _checkpoint_bytes(self, layer: int) -> int:
        return self._measured_layer("recomputed", layer).saved

    def _batch_bytes(self, batch: int, specs: Sequence[BlockSpec], *, is_training: bool) -> int:
        return self._measured_blocks(self._block_mode(0) if is_training else "evaluated", batch).before

    def _mask_bytes(self, batch: int, specs: Sequence[BlockSpec]) -> int:
        return 0  # what ends with the last block is not in the measured tail

    def _embedding_output_bytes(self, batch: int) -> int:
        return self._measured_blocks("kept", batch).embedded

    def _evaluation_layer(self, layer: int, rows: int, specs: Sequence[BlockSpec]) -> LayerBytes:
        return self._measured_layer("evaluated", layer, rows)

    def _head_bytes(self, batch: int, *, needs_gradient: bool) -> LayerBytes:
        measured = self._measured_blocks(
            self._block_mode(self.shape.num_layers - 1) if needs_gradient else "evaluated", batch
        )
        estimated = super()._head_bytes(batch, needs_gradient=needs_gradient)
        # a few tokens do not show how many it takes at once, and only the class's own loss was run
        if measured.on_cpu or (self.step.loss == "logits") != self.shape.has_custom_logits:
            return estimated
        if not measured.ends:
            return replace(measured.tail, saved=estimated.saved)
        # its tiles are full from some batch on, so that it bends between two batches, as the usual last norm and head
        # do; what a class has beside them grows on a line
        measured_ends = [self._head_bytes(rows, needs_gradient=needs_gradient) for rows in measured.ends]
        estimated_ends = [
            super(MeasuredStepSimulation, self)._head_bytes(rows, needs_gradient=needs_gradient)
            for rows in measured.ends
        ]
        fraction = (batch - measured.ends[0]) / (measured.ends[1] - measured.ends[0])

        def interpolate_peak(peak: Literal["forward", "backward"]) -> int:
            low_difference, high_difference = (
                getattr(one, peak) - getattr(other, peak)
                for one, other in zip(measured_ends, estimated_ends, strict=True)
            )
            return int(getattr(estimated, peak) + round(low_difference + fraction * (high_difference - low_difference)))

        return LayerBytes(
            interpolate_peak("forward"), estimated.saved, interpolate_peak("backward"), measured.tail.gradients
        )

    def _block_mode(self, layer: int) -> BlockMode:
        return "recomputed" if layer < self.recomputed_layers else "kept"

    def _measured_layer(self, mode: BlockMode, layer: int, batch: int | None = None) -> LayerBytes:
        measured = self._measured_blocks(mode, batch or self.step.micro_batch)
        return measured.layers[self.shape.layer_order[layer]] if layer else measured.first

    def _measured_blocks(self, mode: BlockMode, batch: int) -> MeasuredBlocks:
        assert self.shape.block_meter is not None
        if (mode, batch) not in self._measured_by_mode:
            self._measured_by_mode[mode, batch] = self.shape.block_meter(
                self.config, self.shape, self.precision, self.step, self.element_bytes, mode, batch,
                is_accumulating=self._is_accumulating(),
            )  # fmt: skip
        return self._measured_by_mode[mode, batch]

    @cached_property
    def _measured_by_mode(self) -> dict[tuple[BlockMode, int], MeasuredBlocks]:
        return {}
