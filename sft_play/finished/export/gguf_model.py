"""A GGUF read back by transformers: its weights and settings, compared with those of the model that it was made of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sft_play.errors import ModelError
from sft_play.finished.load import this_device
from sft_play.log import one_line
from sft_play.training.model import sdpa
from sft_play.training.model.language_model import language_config

_AS_LLAMA = ("mistral",)
"""Model types that llama.cpp writes as `llama`, and that compute as it does."""
_SETTINGS = {
    "block_count": ("num_hidden_layers",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.sliding_window": ("sliding_window",),
    "context_length": ("max_position_embeddings",),
    "expert_count": ("num_local_experts", "num_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "vocab_size": ("vocab_size",),
}
"""Keys of a GGUF, after its architecture, and the config's names for the same."""
_FP32_STEP = 1.2e-7
_ROUNDED_HERE = ("F16", "BF16", "Q8_0")
"""Types that are rounded here as the converter rounds; llama.cpp's library searches the scales of those below."""
_FARTHEST = 0.5
"""Of a tensor in fewer than 8 bits, the largest distance from the model's relative to its size (Frobenius norms), or
2^(2 - bits) where that is less: weights of a normal distribution are at a third of that, another tensor at 1.4."""


class NotReadHere(ModelError):
    """transformers cannot read a GGUF of this architecture."""


def load_gguf(file: Path, model: Path, *, dtype: torch.dtype, rows: int) -> Any:
    """The model in a GGUF, in eval mode on the first GPU or the CPU.

    Its settings are those of the folder `model`: transformers reads not all of them out of a GGUF (Llama 3's scaled
    positions, biases), so they are compared by themselves (`different_settings`). `rows`: of the file's embeddings.
    Weights are unpacked, so that they can be compared. Raises NotReadHere where transformers does not read this
    architecture.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

    config = language_config(AutoConfig.from_pretrained(model))  # a GGUF holds the language model
    config.get_text_config().vocab_size = rows  # the converter may leave out rows that only pad the embeddings
    if config.model_type in _AS_LLAMA:
        from transformers import LlamaConfig

        kept = {key: value for key, value in config.to_dict().items() if key not in ("model_type", "architectures")}
        config = LlamaConfig(**kept)
    sdpa.switch(cudnn=False)
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            str(file.parent),
            gguf_file=file.name,
            config=config,
            dtype=dtype,
            device_map={"": this_device()},
            quantization_config=GgufConfig(dequantize=True),
        )
    except (OSError, ValueError, RuntimeError, NotImplementedError, KeyError, ImportError, AttributeError) as error:
        why = f"({config.model_type}): {one_line(str(error), limit=120)}"
        raise NotReadHere(f"transformers does not read this GGUF {why}") from None
    return loaded.eval()


@dataclass(frozen=True)
class Weights:
    """How many tensors a GGUF holds as the model has them, rounded to the file's types, and the first that differs."""

    tensors: int
    equal: int
    rounded: int
    """Of the equal ones, those that the file's type has rounded."""
    first: str | None
    relative_rounding: float
    """Size of the rounding relative to the weights (Frobenius norms)."""


def compare_gguf_weights(read: Any, model: Any, types: set[str], *, rows: int) -> Weights:
    """The tensors of a GGUF that was read back with those of the model, both in the model's dtype.

    `types`: names of gguf's types that the file has. `rows`: of its embeddings, which may lack those that are no
    token's. A tensor counts as equal where it is, bit for bit, the model's, or the model's after rounding to one of the
    types; where one of these has fewer than 8 bits, where it is near (`_FARTHEST`). Vectors may differ by fp32's last
    place: llama.cpp stores Gemma's norms plus one.
    """
    there, wanted = read.state_dict(), model.state_dict()  # both by transformers' names
    bits = min((count for kind in types if (count := bits_of(kind)) and kind not in _ROUNDED_HERE), default=None)
    nearest = 0.0 if bits is None else min(_FARTHEST, 2.0 ** (2 - bits))
    equal = rounded = 0
    first, error, size = None, 0.0, 0.0
    for name in sorted(set(there) | set(wanted)):
        one, other = there.get(name), wanted.get(name)
        if one is not None and other is not None and one.shape[:1] == (rows,) and other.shape[1:] == one.shape[1:]:
            other = other[:rows]
        if one is None or other is None or one.shape != other.shape:
            reason = "not in the file" if one is None else "not in the model" if other is None else "another shape"
            first = first or f"{name} ({reason})"
            continue
        difference = float((one.double() - other.double()).square().sum())
        error, size = error + difference, size + float(other.double().square().sum())
        if difference == 0 or (other.ndim < 2 and _differs_by_last_place(one, other)):
            equal += 1
        elif any(torch.equal(one, candidate) for candidate in _rounded(other, types)) or (
            other.ndim > 1 and difference <= nearest**2 * float(other.double().square().sum())
        ):
            equal, rounded = equal + 1, rounded + 1
        else:
            first = first or name
    return Weights(len(set(there) | set(wanted)), equal, rounded, first, (error / size) ** 0.5 if size else 0.0)


def _differs_by_last_place(one: torch.Tensor, other: torch.Tensor) -> bool:
    step = max(_FP32_STEP, torch.finfo(other.dtype).eps if other.is_floating_point() else 0.0)
    bound = _FP32_STEP + step * other.double().abs()
    return bool(((one.double() - other.double()).abs() <= bound).all())


def _rounded(tensor: torch.Tensor, types: set[str]) -> list[torch.Tensor]:
    """The tensor after each of the types, as the converter rounds; in either orientation, since some layers are stored
    transposed."""
    from gguf import GGMLQuantizationType, dequantize, quantize

    results = []
    # Q8_0 rounds in blocks of 32 along a row, so that a transposed tensor rounds to other values
    for turned in (False, True) if tensor.ndim == 2 else (False,):
        values = tensor.detach().float().cpu()
        values = (values.T if turned else values).contiguous().numpy()
        for name in sorted(types & {*_ROUNDED_HERE}):
            kind = GGMLQuantizationType[name]
            if name == "Q8_0" and values.shape[-1] % 32:
                continue  # no whole blocks: the converter stores such a tensor in F16
            back = torch.from_numpy(dequantize(quantize(values, kind), kind).reshape(values.shape).copy())
            results.append((back.T if turned else back).to(tensor.dtype).to(tensor.device))
    return results


def tensor_types(file: Path) -> set[str]:
    """Names of the types that the file's tensors have, such as Q8_0."""
    return {tensor.tensor_type.name for tensor in _tensors(file)}


def _tensors(file: Path) -> list[Any]:
    from gguf import GGUFReader

    return list(GGUFReader(str(file)).tensors)


def bits_of(kind: str) -> int | None:
    """Bits of a weight in a type of a GGUF, such as 4 of Q4_K and IQ4_XS; None for floats."""
    found = re.match(r"I?Q(\d)_", kind)
    return int(found[1]) if found else None


def embedding_rows(file: Path) -> int:
    """Rows of the file's input embeddings."""
    return next(int(one.shape[-1]) for one in _tensors(file) if one.name == "token_embd.weight")


def different_settings(file: Path, fields: Mapping[str, Any], config: Any) -> list[str]:
    """What a GGUF says of the model that its config does not say, each in words; empty where all agree."""
    text = config.get_text_config()
    architecture = str(fields.get("general.architecture"))
    problems = []
    for key, names in _SETTINGS.items():
        there = fields.get(f"{architecture}.{key}")
        wanted = next((value for name in names if (value := getattr(text, name, None)) is not None), None)
        if isinstance(there, int | float) and isinstance(wanted, int | float) and not _are_close(there, wanted):
            problems.append(f"{key} is {there:g}, the model has {wanted:g}")
    return [*problems, *_different_positions(file, fields, text, architecture)]


def _are_close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-5 * max(abs(one), abs(other))


def _different_positions(file: Path, fields: Mapping[str, Any], text: Any, architecture: str) -> list[str]:
    rope = getattr(text, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    wanted = {"freq_base": rope.get("rope_theta")}
    if rope.get("rope_type") in ("linear", "yarn"):
        wanted["scaling.factor"] = rope.get("factor")
    problems = []
    for key, value in wanted.items():
        there = fields.get(f"{architecture}.rope.{key}", 1.0 if key == "scaling.factor" else None)
        if value is not None and there is not None and not _are_close(float(there), float(value)):
            problems.append(f"rope.{key} is {there:g}, the model has {value:g}")
    if rope.get("rope_type") == "llama3" and all(one.name != "rope_freqs.weight" for one in _tensors(file)):
        problems.append("rope_freqs is missing, and the model scales its positions (llama3)")
    return problems
