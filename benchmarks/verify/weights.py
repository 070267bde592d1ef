"""How far the weights that two runs trained are apart, by how far training moved them."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class TensorDifference:
    """The largest relative difference over tensors, and the tensor that has it."""

    largest: float
    tensor: str


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def compare_tensors(
    start: dict[str, torch.Tensor],
    one: dict[str, torch.Tensor],
    other: dict[str, torch.Tensor],
    *,
    from_bf16: bool = False,
) -> TensorDifference:
    """Largest over tensors of |dw - dw1| / |dw1| (2-norms; d from the start, 1 = the single process).

    `from_bf16`: the other run began with the start rounded to bf16. Infinitely far is a tensor that only the other run
    moved; so are names or shapes that differ, and numbers that are none.
    """
    if set(one) != set(other):
        return TensorDifference(math.inf, sorted(set(one) ^ set(other))[0])
    worst = TensorDifference(0.0, "")
    for name, change in one.items():
        if other[name].shape != change.shape or start[name].shape != change.shape:
            return TensorDifference(math.inf, name)
        begun = start[name].bfloat16() if from_bf16 else start[name]
        moved = change.double() - start[name].double()
        # of the movements, not of the weights: a few steps move these so little that a run without any would be close
        difference = float((other[name].double() - begun.double() - moved).norm())
        size = float(moved.norm())
        relative = math.inf if difference else 0.0
        if size:
            relative = difference / size
        relative = math.inf if math.isnan(relative) else relative
        if relative > worst.largest:
            worst = TensorDifference(relative, name)
    return worst
