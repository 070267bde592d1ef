"""Shapes of the models that the shipped configs name, so that they plan without a network.

Each entry is the part of the published config.json that sizes depend on, and where it was read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KnownModel:
    """A published config (the fields that sizes depend on) and its source."""

    config: dict[str, Any]
    source: str


def _qwen25(hidden: int, width: int, layers: int, heads: int, kv: int, vocab: int, *, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32_768,
        "use_sliding_window": False,
    }


_LLAMA_3_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131_072,
}
_GEMMA_3_27B = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 5376,
        "intermediate_size": 21_504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "sliding_window": 1024,
    },
}
_STARTER_BASE = {
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 1024,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
_QWEN = "config.json of the model, as quoted in citsjtu2020/LLM-Prof sglang/Model_Config.md"
_QWEN_BLOG = "model card of Qwen/Qwen2.5-32B (64 layers, 40 and 8 heads, 32.5B parameters) and its config.json"

KNOWN_MODELS: dict[str, KnownModel] = {
    "Qwen/Qwen2.5-0.5B": KnownModel(_qwen25(896, 4864, 24, 14, 2, 151_936, tied=True), _QWEN),
    "Qwen/Qwen2.5-0.5B-Instruct": KnownModel(_qwen25(896, 4864, 24, 14, 2, 151_936, tied=True), _QWEN),
    "Qwen/Qwen2.5-3B": KnownModel(_qwen25(2048, 11_008, 36, 16, 2, 151_936, tied=True), _QWEN),
    "Qwen/Qwen2.5-3B-Instruct": KnownModel(_qwen25(2048, 11_008, 36, 16, 2, 151_936, tied=True), _QWEN),
    "Qwen/Qwen2.5-7B": KnownModel(_qwen25(3584, 18_944, 28, 28, 4, 152_064, tied=False), _QWEN),
    "Qwen/Qwen2.5-7B-Instruct": KnownModel(_qwen25(3584, 18_944, 28, 28, 4, 152_064, tied=False), _QWEN),
    "Qwen/Qwen2.5-32B-Instruct": KnownModel(_qwen25(5120, 27_648, 64, 40, 8, 152_064, tied=False), _QWEN_BLOG),
    "sft-play/starter-base": KnownModel(_STARTER_BASE, "made by this toolkit: sft_play/train/starter_base.py"),
    "google/gemma-3-27b-it": KnownModel(_GEMMA_3_27B, "google/gemma_pytorch gemma/config.py (27b_v3)"),
    "meta-llama/Llama-3.3-70B-Instruct": KnownModel(
        _LLAMA_3_70B, "ai-dynamo/aiconfigurator model_configs/meta-llama--Meta-Llama-3.1-70B_config.json (same shapes)"
    ),
}
