"""LoRA+ (https://huggingface.co/papers/2402.12354): a learning rate of its own for every lora_B.

As in PEFT's `create_loraplus_optimizer`, vectors, such as DoRA's magnitudes, have lora_B's. That function makes the
optimizer itself, with rates that no schedule of the Trainer's groups knows; here the Trainer's own groups are split.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def faster_by_name(model: Any) -> frozenset[int]:
    """The parameters, by their `id`, that get the higher rate."""
    shapes = {name: getattr(one, "ds_shape", one.shape) for name, one in model.named_parameters()}  # whole under ZeRO-3
    return frozenset(id(one) for name, one in model.named_parameters() if "lora_B" in name or len(shapes[name]) == 1)


def split_by_rate(group: dict[str, Any], fast: frozenset[int], *, ratio: float) -> Iterator[dict[str, Any]]:
    """A group of an optimizer as two: the parameters with its own rate, and those with `ratio` times as much."""
    for is_fast in (False, True):
        params = [one for one in group["params"] if (id(one) in fast) == is_fast]
        yield {**group, "params": params, "lr": group["lr"] * (ratio if is_fast else 1.0)}
