"""The walk of a step through a class whose blocks are measured, where the estimate does not know them.

`trace.blocks` runs a class's own blocks; `MeasuredWalk` takes their bytes in place of those that `block` works out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

from sft_play.config.schema import RunConfig
from sft_play.facts.models.model_shape import ModelShape
from sft_play.planner.memory.block import BlockBytes, LayerBytes
from sft_play.planner.memory.step_memory import Step, Walk
from sft_play.planner.memory.structure import BlockSpec
from sft_play.planner.precision import Precision

# How a block runs: its activations stay for the backward pass, or are computed again there; or there is none.
Way = Literal["kept", "recomputed", "evaluated"]


@dataclass(frozen=True)
class MeasuredPass:
    """A pass of `batch` rows through all kinds of blocks of a model."""

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
    """Carried on from a few real tokens."""
    ends: tuple[int, ...] = ()
    """The batches on whose line it lies; none where it was run itself."""


def between(low: MeasuredPass, high: MeasuredPass, batch: int) -> MeasuredPass:
    """The pass of a batch between two that were measured, or on their line beyond them. A peak is the largest of
    moments that grow with the batch at different rates, so that the line between two of them is not below it."""
    share = (batch - low.batch) / (high.batch - low.batch)

    def mixed(one: Any, other: Any) -> Any:
        if isinstance(one, bool):
            return one
        if isinstance(one, int):
            return round(one + share * (other - one))
        if isinstance(one, tuple):
            return tuple(map(mixed, one, other))
        return type(one)(*(mixed(getattr(one, field.name), getattr(other, field.name)) for field in fields(one)))

    found: MeasuredPass = mixed(replace(low, ends=()), replace(high, ends=()))
    return replace(found, ends=(low.batch, high.batch))


def walk_of(config: RunConfig, shape: ModelShape, precision: Precision, step: Step) -> Walk:
    """The walk of this step."""
    kind = Walk if shape.block_meter is None else MeasuredWalk
    return kind(config, shape, precision, step)


class MeasuredWalk(Walk):
    """A walk whose blocks, and what is live around them, are those that `ModelShape.block_meter` measures."""

    @property
    def on_cpu(self) -> bool:
        """Whether few real tokens were carried on to the step's."""
        return self._measured(self._way(0), self.step.micro_batch).on_cpu

    def _blocks(self) -> tuple[list[BlockBytes], list[int]]:
        return [], [self.width] * (self.shape.num_layers + 1)

    def _layers(self) -> list[LayerBytes]:
        layers = [self._layer(self._way(layer), layer) for layer in range(self.shape.num_layers)]
        end = self._measured(self._way(len(layers) - 1), self.step.micro_batch).last
        layers[-1] = replace(layers[-1], kept=layers[-1].kept + end)
        return [one.offloaded for one in layers] if self.step.offloads else layers

    def _checkpoint(self, layer: int) -> int:
        return self._layer("recomputed", layer).kept

    def _batch(self, batch: int, specs: Sequence[BlockSpec], *, trains: bool) -> int:
        return self._measured(self._way(0) if trains else "evaluated", batch).before

    def _masks(self, batch: int, specs: Sequence[BlockSpec]) -> int:
        return 0  # what ends with the last block is not in the measured tail

    def _embedded(self, batch: int) -> int:
        return self._measured("kept", batch).embedded

    def _evaluated(self, layer: int, rows: int, specs: Sequence[BlockSpec]) -> LayerBytes:
        return self._layer("evaluated", layer, rows)

    def _head(self, batch: int, *, grad: bool) -> LayerBytes:
        found = self._measured(self._way(self.shape.num_layers - 1) if grad else "evaluated", batch)
        usual = super()._head(batch, grad=grad)
        # a few tokens do not show how many it takes at once, and only the class's own loss was run
        if found.on_cpu or (self.step.loss == "logits") != self.shape.has_custom_logits:
            return usual
        if not found.ends:
            return replace(found.tail, kept=usual.kept)
        # its tiles are full from some batch on, so that it bends between two batches, as the usual last norm and head
        # do; what a class has beside them grows on a line
        run = [self._head(rows, grad=grad) for rows in found.ends]
        bent = [super(MeasuredWalk, self)._head(rows, grad=grad) for rows in found.ends]
        share = (batch - found.ends[0]) / (found.ends[1] - found.ends[0])

        def carried(name: Literal["forward", "backward"]) -> int:
            low, high = (getattr(one, name) - getattr(other, name) for one, other in zip(run, bent, strict=True))
            return int(getattr(usual, name) + round(low + share * (high - low)))

        return LayerBytes(carried("forward"), usual.kept, carried("backward"), found.tail.gradients)

    def _way(self, layer: int) -> Way:
        return "recomputed" if layer < self.recomputed else "kept"

    def _layer(self, way: Way, layer: int, batch: int | None = None) -> LayerBytes:
        found = self._measured(way, batch or self.step.micro_batch)
        return found.layers[self.shape.layer_order[layer]] if layer else found.first

    def _measured(self, way: Way, batch: int) -> MeasuredPass:
        assert self.shape.block_meter is not None
        if (way, batch) not in self._passes:
            self._passes[way, batch] = self.shape.block_meter(
                self.config, self.shape, self.precision, self.step, self.numbers, way, batch,
                accumulates=self._accumulating(),
            )  # fmt: skip
        return self._passes[way, batch]

    @cached_property
    def _passes(self) -> dict[tuple[Way, int], MeasuredPass]:
        return {}
