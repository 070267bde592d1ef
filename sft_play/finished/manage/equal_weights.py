"""Two folders of weights, compared bit by bit."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.errors import ModelError
from sft_play.finished.run import weight_files
from sft_play.log import one_line


@dataclass(frozen=True)
class Difference:
    """How a tensor differs: by how much at most (infinite where shapes or dtypes do, or one is not a number)."""

    name: str
    largest: float


@dataclass(frozen=True)
class Compared:
    """Two folders of weights, tensor by tensor in the order of the files."""

    tensors: int
    differing: tuple[Difference, ...]


def compare_weights(one: Path, other: Path) -> Compared:
    """The tensors of two folders of weights, bit by bit, in the order of the first one's files.

    Raises:
        ModelError: a file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    differing: list[Difference] = []
    count = 0
    with contextlib.ExitStack() as held:
        try:
            files = [
                [held.enter_context(safe_open(file, framework="pt")) for file in weight_files(folder)]
                for folder in (one, other)
            ]
            places = {name: file for file in files[1] for name in file.keys()}  # noqa: SIM118  (no mapping)
            for file in files[0]:
                for name in file.offset_keys():
                    count += 1
                    place = places.pop(name, None)
                    if place is None:
                        differing.append(Difference(name, float("inf")))
                    elif (difference := _difference(file.get_tensor(name), place.get_tensor(name))) is not None:
                        differing.append(Difference(name, difference))
        except (OSError, SafetensorError) as error:
            raise ModelError(f"the weights in {one} or {other} cannot be read: {one_line(str(error))}") from None
    differing += [Difference(name, float("inf")) for name in sorted(places)]
    return Compared(count + len(places), tuple(differing))


def _difference(one: Any, other: Any) -> float | None:
    """The largest difference of two tensors; None where they are equal bit for bit."""
    import torch

    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    # as bytes: a NaN is equal to itself then, and -0.0 is not 0.0
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    if torch.equal(*bits):
        return None
    largest = float((one.double() - other.double()).abs().max())
    return float("inf") if math.isnan(largest) else largest
