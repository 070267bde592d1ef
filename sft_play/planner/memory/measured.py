"""Blocks of a class that the table of families does not have: what running them showed, for the step's walk.

`trace.blocks` runs a class's own blocks; `MeasuredWalk` takes their bytes in place of those that `block` works out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal

Way = Literal["kept", "recomputed", "evaluated"]
"""How a block runs: its activations stay for the backward pass, or are computed again there; or there is none."""


@dataclass(frozen=True)
class LayerBytes:
    """One block in a step, above what is held before it. The peaks include its input and, in the backward pass, its
    output's gradient."""

    forward: int
    kept: int = 0
    """Held from its forward to its backward pass."""
    backward: int = 0
    gradients: int = 0
    """Gradients of its parameters that stay, where there were none before; `backward` includes them."""
    cast: int = 0
    """Half-precision copies of fp32 parameters that stay until the forward pass ends, where it is computed again."""
    rebuilt: int = 0
    """Of the backward peak: the NF4 weight that is dequantised at that moment."""
    input: int = 0
    """Its input, where only a checkpoint keeps it."""

    @property
    def offloaded(self) -> LayerBytes:
        """The same where what it keeps is in RAM, and comes back for its backward pass."""
        return replace(self, kept=0, backward=self.backward + self.kept)


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
    on_cpu: bool = False
    """Carried on from a few real tokens."""


def between(low: MeasuredPass, high: MeasuredPass, batch: int) -> MeasuredPass:
    """The pass of a batch between two that were measured, or on their line beyond them.

    A peak is the largest of moments that grow with the batch at different rates, so that the line between two of them
    is not below it.
    """
    share = (batch - low.batch) / (high.batch - low.batch)

    def mixed(one: int, other: int) -> int:
        return round(one + share * (other - one))

    return MeasuredPass(
        batch,
        mixed(low.before, high.before),
        mixed(low.embedded, high.embedded),
        _mixed(low.first, high.first, mixed),
        tuple(_mixed(*pair, mixed) for pair in zip(low.layers, high.layers, strict=True)),
        _mixed(low.tail, high.tail, mixed),
        low.on_cpu,
    )


def _mixed(one: LayerBytes, other: LayerBytes, mixed: Callable[[int, int], int]) -> LayerBytes:
    return LayerBytes(*(mixed(getattr(one, field.name), getattr(other, field.name)) for field in fields(LayerBytes)))
