"""What liger-kernel 0.8.5 replaces in a model, by its model_type, without importing it.

From the package's own table and functions (liger_kernel/transformers/monkey_patch.py, MODEL_TYPE_TO_APPLY_LIGER_FN and
the defaults of each function), as a run asks for them: of a model that is already built, without losses, and without
experts, which keep their own code (sft_play/training/proofs/kernels.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PACKAGE = "liger-kernel"
VERSION = "0.8.5"
MULTIPROCESSORS = 188
"""Rows of fp32 sums that a trained norm's gradient is added up from, one for each multiprocessor of the GPU: the most
that a card of the catalogue has (RTX PRO 6000; an H100 has 132)."""


@dataclass(frozen=True)
class Replaced:
    """What of a model is replaced; norms over the hidden width always are."""

    head_norms: bool = False
    """Norms of queries and keys too."""
    gate: bool = True
    """The product of an activated gate and its partner."""
    rotation: bool = True
    """The rotation of queries and keys."""
    in_place: bool = True
    """A norm writes its input's gradient over its output's; not where the residual needs that one."""

    @property
    def words(self) -> str:
        """What is replaced, as the end of a sentence."""
        parts = ["norms", *(["gated activations"] if self.gate else []), *(["rotations"] if self.rotation else [])]
        return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]


_PLAIN = Replaced()
_HEADS = Replaced(head_norms=True)
_EXPERTS = Replaced(gate=False)
REPLACED: Mapping[str, Replaced] = {
    "deepseek_v2": Replaced(gate=False, rotation=False),
    "deepseek_v3": Replaced(gate=False, rotation=False),
    "gemma": _PLAIN,
    "gemma2": Replaced(in_place=False),
    "gemma3_text": Replaced(head_norms=True, in_place=False),
    "glm4": Replaced(rotation=False, in_place=False),
    "gpt_oss": _EXPERTS,
    "granite": _PLAIN,
    "hunyuan_v1_dense": _PLAIN,
    "llama": _PLAIN,
    "ministral": _PLAIN,
    "mistral": _PLAIN,
    "mixtral": _EXPERTS,
    "phi3": _PLAIN,
    "qwen2": _PLAIN,
    "qwen3": _HEADS,
    "qwen3_moe": Replaced(head_norms=True, gate=False),
    "smollm3": _PLAIN,
}
"""By model_type. Types that the package knows and this table does not are planned with the plain code: those that no
trace confirms (Qwen3-Next, Qwen3.5, Llama 4, Gemma 4, towers of image models), and those whose norms only follow
attention and MLP (EXAONE 4, OLMo 2 and 3), which the estimate of a block only approximates."""
