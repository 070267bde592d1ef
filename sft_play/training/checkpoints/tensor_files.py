"""The safetensors files of a model's folder, read by their headers.

Where weights are stored quantised, in MXFP4 or in blocks of FP8 or FP4, the folder is seen as if it held the 16-bit
tensors that they stand for: each is dequantised when it is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from sft_play.errors import ModelError
from sft_play.facts.models.architecture import find_model_folder
from sft_play.facts.models.config_fields import dequantisable_method
from sft_play.log import one_line
from sft_play.process.waiting import report_wait
from sft_play.runs.files import read_json


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a folder's weights."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """As safetensors writes it, such as BF16."""
    read: Callable[[], torch.Tensor]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Its values, as transformers reads them of a file."""
        return self.read()[index]


def open_tensors(folder: Path) -> dict[str, FileTensor]:
    """Every tensor in a folder's weights, none read yet; raises ModelError for a quantised one without scales."""
    tensors: dict[str, FileTensor] = {}
    for file in weight_files(folder):
        archive: Any = safe_open(file, framework="pt")  # maps the file, as long as any of its tensors is held
        for name in archive.keys():  # noqa: SIM118  (safe_open is no mapping)
            tensor_slice = archive.get_slice(name)  # reads the file's header, and none of the tensor
            read = partial(archive.get_tensor, name)
            tensors[name] = FileTensor(file, tuple(tensor_slice.get_shape()), str(tensor_slice.get_dtype()), read)
    config = read_json(folder / "config.json")
    method, fields = dequantisable_method(config)
    if method == "mxfp4":
        return dict(_mxfp4_tensors(tensors))
    if method == "fp8":
        return dict(_block_tensors(tensors, fields.get("weight_block_size")))
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers would read: those of the index where there is one, else all of them. A hub repository
    may hold the same weights twice (`consolidated.safetensors` beside `model-*.safetensors`)."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return sorted({folder / name for name in files.values()})
    single_file = folder / "model.safetensors"
    return [single_file] if single_file.is_file() else sorted(folder.glob("*.safetensors"))


def fetch_base_folder(name: str, *, revision: str | None) -> Path:
    """A base's folder: the local one, or the hub's, downloaded; raises ModelError where it cannot be fetched."""
    folder = find_model_folder(name)
    if folder is not None:
        return folder
    from huggingface_hub import snapshot_download

    # what transformers reads, and not the same weights again as .bin, .gguf or original/*.pth
    patterns = ["*.safetensors", "*.json", "*.py", "*.txt", "*.model", "*.jinja"]
    try:
        with report_wait(f"Downloading {one_line(name)} from the hub"):
            return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub's own errors, and those of every layer below it
        problem = describe_broken_connection(error) or f"cannot be fetched: {one_line(str(error), limit=300)}"
        raise ModelError(f"the base {name} {problem}") from error


def describe_broken_connection(error: BaseException) -> str | None:
    """Describe a download that a connection error ended, also as the cause of another error; None for any other."""
    cause: BaseException | None = error
    while cause is not None and not type(cause).__module__.startswith(_CONNECTION_PACKAGES):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    message = one_line(str(cause) or type(cause).__name__, limit=200)
    return f"did not come whole ({message}); files that did are kept, and the next start fetches the others"


# How the names of packages begin whose errors are those of a connection.
_CONNECTION_PACKAGES = ("httpx", "httpcore", "requests", "urllib3")


# --- stored quantised -------------------------------------------------------------------------------------------------
# The values of four bits without their sign, which comes first (OCP Microscaling Formats 1.0, 5.3.3).
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Of a scale that is an exponent of two in a byte (E8M0).
_E8M0_BIAS = 127
# How the scales of a tensor are called: DeepSeek-V3, Qwen and MiniMax; DeepSeek-V4; Mistral; per tensor.
_SCALE_NAMES = ("{key}_scale_inv", "{stem}.scale", "{stem}.qscale_weight", "{key}_scale")
# Ends of the names of scales of activations, which 16 bits have no use for.
_UNUSED_SUFFIXES = ("activation_scale", "input_scale", "qscale_act")
_PACKED_DTYPES = ("F8_E4M3", "F8_E5M2", "F4", "I8", "U8")


def _mxfp4_tensors(tensors: Mapping[str, FileTensor]) -> Iterator[tuple[str, FileTensor]]:
    """gpt-oss: `*_blocks` (experts x rows x groups x 16 bytes) and `*_scales` (experts x rows x groups)."""
    for key, blocks in tensors.items():
        name = key.removesuffix("_blocks")
        if name == key:
            if not (key.endswith("_scales") and f"{key.removesuffix('_scales')}_blocks" in tensors):
                yield key, blocks
            continue
        scales = tensors.get(f"{name}_scales")
        if scales is None:
            raise ModelError(f"{blocks.file} holds {key}, and no {name}_scales")
        experts, rows, groups, group_bytes = blocks.shape
        shape = (experts, 2 * group_bytes * groups, rows)
        yield name, FileTensor(blocks.file, shape, "BF16", partial(_read_mxfp4, blocks, scales))


def _read_mxfp4(blocks: FileTensor, scales: FileTensor) -> torch.Tensor:
    values: torch.Tensor = convert_moe_packed_tensors(blocks.read(), scales.read())
    return values


def _block_tensors(tensors: Mapping[str, FileTensor], block_size: Any) -> Iterator[tuple[str, FileTensor]]:
    scale_keys, scales_by_key = set[str](), dict[str, str]()
    for key, tensor in tensors.items():
        if tensor.dtype in _PACKED_DTYPES:
            names = [name.format(key=key, stem=key.removesuffix(".weight")) for name in _SCALE_NAMES]
            scales = next((name for name in names if name in tensors and name != key), None)
            if scales is not None:
                scale_keys.add(scales)
                scales_by_key[key] = scales
            elif tensor.dtype.startswith("F8") and not key.endswith("scale_inv"):
                raise ModelError(f"{tensor.file} holds {key} in {tensor.dtype}, and no scales of it")
    for key, tensor in tensors.items():
        if key in scale_keys or key.endswith(_UNUSED_SUFFIXES):
            continue
        if key in scales_by_key:
            values_per_byte = 1 if tensor.dtype.startswith("F8") else 2  # two numbers in a byte
            shape = (*tensor.shape[:-1], values_per_byte * tensor.shape[-1])
            read = partial(_read_blocks, tensor, tensors[scales_by_key[key]], block_size)
            tensor = FileTensor(tensor.file, shape, "BF16", read)
        yield key, tensor


def _read_blocks(tensor: FileTensor, scales: FileTensor, block_size: Any) -> torch.Tensor:
    """In bfloat16: each block times its scale, in fp32; the last blocks may be smaller than the others."""
    stored, scale = tensor.read(), scales.read()
    scale = _powers_of_two(scale) if scale.dtype is torch.uint8 else scale.float()
    values = stored.float() if tensor.dtype.startswith("F8") else _unpack_fp4(stored.view(torch.uint8))
    if scale.numel() == 1:
        return (values * scale.reshape(())).bfloat16()
    sizes = block_size if isinstance(block_size, list | tuple) and len(block_size) == 2 else (0, 0)
    rows, columns = map(_block_length, values.shape[-2:], scale.shape[-2:], sizes)
    expanded = scale.repeat_interleave(rows, -2)[..., : values.shape[-2], :]
    expanded = expanded.repeat_interleave(columns, -1)[..., : values.shape[-1]]
    return (values * expanded).bfloat16()


def _block_length(length: int, count: int, configured: int) -> int:
    """Elements of a block on a side of `length` with `count` blocks; the config's size where it gives this count."""
    return configured if configured and math.ceil(length / configured) == count else math.ceil(length / count)


def _unpack_fp4(stored: torch.Tensor) -> torch.Tensor:
    """Bytes of two numbers each, the lower half first, in fp32: the last side is twice as long."""
    table = torch.tensor([*_E2M1_VALUES, *(-value for value in _E2M1_VALUES)])
    halves = torch.stack([stored & 15, stored >> 4], dim=-1)
    return table[halves.int()].reshape(*stored.shape[:-1], -1)


def _powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    return torch.exp2(exponents.float() - _E8M0_BIAS)
