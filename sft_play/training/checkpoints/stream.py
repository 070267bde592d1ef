"""Writes whole weights tensor by tensor: memory never holds more than one file of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from sft_play.errors import ModelError
from sft_play.planner.memory.saving import FILE_BYTES

Tensors = Iterable[tuple[str, torch.Tensor | None]]
"""Names and whole tensors, None on ranks that only help to gather them."""


def keeps_names(model: Any, names: Iterable[str]) -> bool:
    """Whether transformers saves the model's tensors under the names and shapes that they have in memory.

    Otherwise (experts are saved one by one) it has to be given all of them at once.
    """
    empty = {name: torch.empty(0, device="meta") for name in names}
    try:
        return set(revert_weight_conversion(model, dict(empty))) == set(empty)
    except Exception:  # a conversion that fails on empty tensors is a conversion
        return False


def write(
    folder: Path,
    tensors: Tensors,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    dtype_of: Callable[[str, torch.Tensor], torch.dtype],
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write tensors as transformers' safetensors files, with an index where there are several.

    Args:
        shapes: of all tensors to come, by name.
        dtype_of: the dtype to write a tensor in.
        file_bytes: most bytes of a file, unless a single tensor has more.

    Raises:
        ModelError: a tensor is not in `shapes`, has another shape, or is missing at the end.
    """
    parts: list[tuple[Path, list[str]]] = []
    held: dict[str, torch.Tensor] = {}
    total = 0

    def close() -> None:
        nonlocal total
        path = folder / f".part{len(parts)}.safetensors"
        save_file(held, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors writes files that only their owner may read
        parts.append((path, list(held)))
        total += sum(tensor.nbytes for tensor in held.values())
        held.clear()

    for name, tensor in tensors:
        if tensor is None or shapes.get(name) != tuple(tensor.shape):
            shape = None if tensor is None else tuple(tensor.shape)
            raise ModelError(f"{folder}: {name} was to be saved with shape {shapes.get(name)}, but has {shape}")
        tensor = tensor.to(dtype_of(name, tensor)).contiguous()
        if held and sum(other.nbytes for other in held.values()) + tensor.nbytes > file_bytes:
            close()
        held[name] = tensor
    if held:
        close()
    lacking = sorted(set(shapes) - {name for _, names in parts for name in names})
    if lacking:
        raise ModelError(f"{folder}: {len(lacking)} tensors were not gathered, such as {lacking[0]}")
    _name(folder, parts, total=total, params=sum(math.prod(shape) for shape in shapes.values()))


def _name(folder: Path, parts: list[tuple[Path, list[str]]], *, total: int, params: int) -> None:
    """Rename the files to what transformers reads, which has the number of files in it."""
    if len(parts) == 1:
        parts[0][0].rename(folder / "model.safetensors")
        return
    places: dict[str, str] = {}
    for number, (path, names) in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        path.rename(folder / file)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_parameters": params, "total_size": total}, "weight_map": places}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
