"""Model families whose values exceed fp16's range, as measured in other libraries' lists and threads.

Each entry names what was seen and where. Left out, because sources contradict each other or it was not seen in a
forward pass: deepseek_v3 (vllm#14809 saw it in deepseek_v2 only), gpt_neo (transformers#11076 against DeepSpeed#1112),
falcon_h1 (unsloth-zoo#212, removed from Unsloth's list again).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

LARGEST = 65_504
"""The largest finite number of fp16."""


@dataclass(frozen=True)
class Overflow:
    """What exceeds fp16's range: `what` was seen, at `source`, in models of type `family`."""

    what: str
    source: str
    in_backward: bool = False
    """Only gradients do: loss scaling handles that by skipping steps until its scale is small enough."""
    only_with: Literal["eager", "attention_dropout"] | None = None
    """What a run must use for it to happen: eager attention, which makes logits in the compute dtype before it scales
    them (sdpa and flash keep them in fp32), or a config.json with attention dropout."""
    family: str = ""

    @property
    def seen(self) -> str:
        """What was seen, in words that follow a colon."""
        return f"in {self.family} models {self.what} ({self.source})"


_GITHUB = "https://github.com"
_UNSLOTH_LIST = f"{_GITHUB}/unslothai/unsloth-zoo, model_lists.py"
_VLLM_LIST = f"{_GITHUB}/vllm-project/vllm, config/model.py"
_LLAMA_CPP = f"{_GITHUB}/ggml-org/llama.cpp"

_GEMMA3 = Overflow("activations reach 800,000", f"{_GITHUB}/unslothai/unsloth/pull/4014")
_GEMMA3N = Overflow("activations exceed it", _UNSLOTH_LIST)
_GEMMA4 = Overflow("the MLP's product becomes infinite", f"{_GITHUB}/unslothai/unsloth-zoo/pull/600")
_QWEN3_5 = Overflow("its gated delta net becomes NaN", _UNSLOTH_LIST)
_GRADIENTS = Overflow("gradients exceed it", f"{_GITHUB}/unslothai/unsloth-zoo/pull/866", in_backward=True)
_GRANITE = Overflow(
    "with attention dropout the MLP's product reaches 85,000",
    f"{_GITHUB}/unslothai/unsloth, models/_utils.py",
    only_with="attention_dropout",
)


def _logits(source: str) -> Overflow:
    return Overflow("attention logits exceed it with eager attention", source, only_with="eager")


OVERFLOWS: dict[str, Overflow] = {
    "gemma2": Overflow("activations exceed it", _VLLM_LIST),  # 27B: erratic in fp16, https://huggingface.co/blog/gemma2
    "gemma3": _GEMMA3,  # also transformers#36822, #39972, vllm#17364
    "gemma3_text": _GEMMA3,
    "gemma3n": _GEMMA3N,
    "gemma3n_text": _GEMMA3N,
    "gemma4": _GEMMA4,  # E2B and E4B; unsloth#4875 measured 2,080 elsewhere and was taken back
    "gemma4_text": _GEMMA4,
    "gemma4_unified": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "glm4": Overflow("activations become NaN", f"{_GITHUB}/vllm-project/vllm/issues/17154"),
    "plamo2": Overflow("activations exceed it", _VLLM_LIST),
    "gpt_oss": Overflow(
        "the residual stream reaches 92,000 in the last layers of 36", f"{_GITHUB}/ROCm/hip-ep/pull/168"
    ),  # also onnxruntime-genai#2444, and Unsloth's list for both sizes
    "deepseek_v2": Overflow("activations exceed it", f"{_GITHUB}/vllm-project/vllm/pull/13232"),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
    "granite": _GRANITE,  # 3.0 to 3.2; later ones have no attention dropout
    "granitemoehybrid": Overflow(
        "the shared MLP's product reaches 65,000", f"{_GITHUB}/unslothai/unsloth-zoo, temporary_patches"
    ),
    "qwen3_moe": _GRADIENTS,  # forward 350 at most
    "glm4_moe": _GRADIENTS,
    "glm4_moe_lite": _GRADIENTS,
    "phi": _logits(f"{_GITHUB}/huggingface/transformers/pull/28163"),
    "phi3": _logits(f"{_LLAMA_CPP}/issues/7805"),
    "gpt_neox": _logits(f"{_LLAMA_CPP}/issues/7805"),
    "qwen2": _logits(f"{_GITHUB}/QwenLM/Qwen3/issues/868"),
    "granitemoe": _logits(f"{_GITHUB}/ikawrakow/ik_llama.cpp/pull/102"),
}
"""By model_type of config.json; text towers under their own type."""


def overflow_of(model_type: str, *, eager: bool = False, attention_dropout: float = 0.0) -> Overflow | None:
    """What is known to exceed fp16's range in a model of this type with these settings; None if nothing."""
    overflow = OVERFLOWS.get(model_type)
    if overflow is None or (overflow.only_with == "eager" and not eager):
        return None
    if overflow.only_with == "attention_dropout" and not attention_dropout:
        return None
    return replace(overflow, family=model_type)


def fault(model_type: str, overflow: Overflow | None) -> str:
    """What a non-finite loss or gradients mean in fp16, and what to do."""
    evidence = f"known: {overflow.seen}" if overflow else f"{model_type} is not among the families known for it"
    return (
        f"activations or gradients left fp16's range, which ends at {LARGEST:,} ({evidence}); compute in fp32 "
        "(train.fp16=false train.bf16=false) or, on a GPU that has it, bf16 (train.fp16=false train.bf16=true), or "
        "lower train.learning_rate"
    )
