"""The safetensors files of a model's folder, read by their headers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

from sft_play.errors import ModelError
from sft_play.facts.models.architecture import local_folder
from sft_play.log import one_line


def tensor_shapes(folder: Path) -> dict[str, tuple[Path, tuple[int, ...], str]]:
    """File, shape and dtype (as safetensors writes it, such as BF16) of every tensor in a folder's weights."""
    shapes: dict[str, tuple[Path, tuple[int, ...], str]] = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (safe_open is no mapping)
                part = tensors.get_slice(name)  # reads the file's header, and none of the tensor
                shapes[name] = (file, tuple(part.get_shape()), str(part.get_dtype()))
    return shapes


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers would read: those of the index where there is one, else all of them.

    A hub repository may hold the same weights twice (`consolidated.safetensors` beside `model-*.safetensors`).
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return sorted({folder / place for place in places.values()})
    whole = folder / "model.safetensors"
    return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))


def base_files(name: str, *, revision: str | None) -> Path:
    """The folder with a base's files: the local one, or the hub's, of which what is not there yet is downloaded.

    Raises:
        ModelError: it cannot be fetched.
    """
    folder = local_folder(name)
    if folder is not None:
        return folder
    from huggingface_hub import snapshot_download

    # what transformers reads, and not the same weights again as .bin, .gguf or original/*.pth
    wanted = ["*.safetensors", "*.json", "*.py", "*.txt", "*.model", "*.jinja"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except Exception as error:  # the hub's own errors, and those of every layer below it
        raise ModelError(f"the base {name} cannot be fetched: {one_line(str(error), limit=300)}") from error


def read_tensor(file: Path, name: str) -> torch.Tensor:
    """One tensor of a file."""
    with safe_open(file, framework="pt") as tensors:
        tensor: torch.Tensor = tensors.get_tensor(name)
        return tensor
