"""Shapes of the models in the shipped configs and of the most used others: they can be planned without a network.

Each row holds the part of the published config.json that determines sizes, how the weights are stored where they are
quantised, where it was read, and the published number of parameters where that was read too. Models of the same shape
(base, instruct, successors) share a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]


@dataclass(frozen=True)
class KnownModel:
    """A published config (the fields that determine sizes), its source, and the published parameters if known."""

    config: Config
    source: str
    params: int | None = None


_LITGPT = "Lightning-AI/litgpt@26857050fe litgpt/config.py"
_MLC = "mlc-ai/mlc-llm@79d603f085 python/mlc_llm/model/model_preset.py"
_AIC = "ai-dynamo/aiconfigurator@095f58a51c aic-core/src/aiconfigurator_core/model_configs"
_HUB = "https://huggingface.co"
_QWEN_LIST = "citsjtu2020/LLM-Prof@8434c8d19c sglang/Model_Config.md"


def _sizes(hidden: int, width: int, layers: int, heads: int, kv: int, vocab: int, positions: int) -> Config:
    return {
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
    }


def _llama(*sizes: int, tied: bool = False, **more: Any) -> Config:
    return {"model_type": "llama", **_sizes(*sizes), "tie_word_embeddings": tied, **more}


def _mistral(*sizes: int, window: int | None = None, **more: Any) -> Config:
    return {"model_type": "mistral", **_sizes(*sizes), "sliding_window": window, **more}


def _mixtral(*sizes: int) -> Config:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
    return {"model_type": "mixtral", **_sizes(*sizes), **experts}


def _qwen2(*sizes: int, tied: bool = False) -> Config:
    return {"model_type": "qwen2", **_sizes(*sizes), "tie_word_embeddings": tied, "use_sliding_window": False}


def _qwen3(*sizes: int, tied: bool = False) -> Config:
    return {"model_type": "qwen3", **_sizes(*sizes), "head_dim": 128, "tie_word_embeddings": tied}


def _qwen3_moe(*sizes: int, width: int, experts: int = 128) -> Config:
    moe = {"num_experts": experts, "num_experts_per_tok": 8, "moe_intermediate_size": width, "decoder_sparse_step": 1}
    return {"model_type": "qwen3_moe", **_sizes(*sizes), "head_dim": 128, **moe, "tie_word_embeddings": False}


def _gemma(kind: str, *sizes: int, head: int = 256, **more: Any) -> Config:
    return {"model_type": kind, **_sizes(*sizes), "head_dim": head, **more}


def _gemma3(*sizes: int, head: int = 256) -> Config:
    return {"model_type": "gemma3", "text_config": _gemma("gemma3_text", *sizes, head=head, sliding_window=1024)}


def _phi3(*sizes: int, window: int | None = None, tied: bool = False, **more: Any) -> Config:
    return {"model_type": "phi3", **_sizes(*sizes), "sliding_window": window, "tie_word_embeddings": tied, **more}


def _phi(*sizes: int) -> Config:
    return {"model_type": "phi", **_sizes(*sizes), "tie_word_embeddings": False}


def _pythia(hidden: int, layers: int, heads: int, vocab: int) -> Config:
    return {
        "model_type": "gpt_neox",
        **_sizes(hidden, 4 * hidden, layers, heads, heads, vocab, 2048),
        "tie_word_embeddings": False,
        "rotary_pct": 0.25,
    }


def _falcon(hidden: int, layers: int, heads: int, kv: int) -> Config:
    new = {"new_decoder_architecture": kv > 1, "multi_query": True, "num_kv_heads": kv, "bias": False}
    return {"model_type": "falcon", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "vocab_size": 65_024, **new}  # fmt: skip


def _gpt2(hidden: int, layers: int, heads: int) -> Config:
    return {"model_type": "gpt2", "n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 1024,
            "vocab_size": 50_257}  # fmt: skip


def _opt(hidden: int, layers: int, heads: int, embedding: int, *, first_norm: bool = True) -> Config:
    return {"model_type": "opt", "hidden_size": hidden, "ffn_dim": 4 * hidden, "num_hidden_layers": layers,
            "num_attention_heads": heads, "vocab_size": 50_272, "max_position_embeddings": 2048,
            "word_embed_proj_dim": embedding, "do_layer_norm_before": first_norm}  # fmt: skip


def _olmo2(*sizes: int) -> Config:
    return {"model_type": "olmo2", **_sizes(*sizes), "tie_word_embeddings": False}


def _gpt_oss(layers: int, experts: int) -> Config:
    return {"model_type": "gpt_oss", **_sizes(2880, 2880, layers, 64, 8, 201_088, 131_072), "head_dim": 64,
            "num_local_experts": experts, "num_experts_per_tok": 4, "sliding_window": 128,
            "attention_bias": True, "quantization_config": {"quant_method": "mxfp4"}}  # fmt: skip


def _deepseek_v3() -> Config:
    return {
        "model_type": "deepseek_v3",
        **_sizes(7168, 18_432, 61, 128, 128, 129_280, 163_840),
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "quantization_config": {"quant_method": "fp8"},
    }


def _starcoder2(*sizes: int, tied: bool) -> Config:
    fields = {"use_bias": True, "sliding_window": 4096, "tie_word_embeddings": tied}
    return {"model_type": "starcoder2", **_sizes(*sizes), **fields}


def _granite(*sizes: int) -> Config:
    """Granite 3.0 to 3.2 have attention dropout (Unsloth, models/_utils.py); later ones do not."""
    return {"model_type": "granite", **_sizes(*sizes), "tie_word_embeddings": True, "attention_dropout": 0.1}


def _stablelm(*sizes: int, qkv_bias: bool) -> Config:
    return {"model_type": "stablelm", **_sizes(*sizes), "use_qkv_bias": qkv_bias}


_STARTER = "made by this toolkit: sft_play/training/prepare/starter_base.py"
_STARTER_BASE: Config = {  # written out: its order is part of the key under which a made starter base is kept
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

Row = tuple[str, Config, str, int | None]

# fmt: off
_ROWS: tuple[Row, ...] = (
    ("sft-play/starter-base", _STARTER_BASE, _STARTER, None),
    # --- Llama ------------------------------------------------------------------------------------------------------
    ("meta-llama/Llama-2-7b-hf meta-llama/Llama-2-7b-chat-hf",
     _llama(4096, 11_008, 32, 32, 32, 32_000, 4096), _LITGPT, None),
    ("meta-llama/Llama-2-13b-hf meta-llama/Llama-2-13b-chat-hf",
     _llama(5120, 13_824, 40, 40, 40, 32_000, 4096), _LITGPT, None),
    ("meta-llama/Llama-2-70b-hf meta-llama/Llama-2-70b-chat-hf",
     _llama(8192, 28_672, 80, 64, 8, 32_000, 4096), _LITGPT, None),
    ("codellama/CodeLlama-7b-hf codellama/CodeLlama-7b-Instruct-hf",
     _llama(4096, 11_008, 32, 32, 32, 32_016, 16_384), _LITGPT, None),
    ("codellama/CodeLlama-13b-hf codellama/CodeLlama-13b-Instruct-hf",
     _llama(5120, 13_824, 40, 40, 40, 32_016, 16_384), _LITGPT, None),
    ("codellama/CodeLlama-34b-hf codellama/CodeLlama-34b-Instruct-hf",
     _llama(8192, 22_016, 48, 64, 8, 32_000, 16_384), _LITGPT, None),
    ("meta-llama/Meta-Llama-3-8B meta-llama/Meta-Llama-3-8B-Instruct",
     _llama(4096, 14_336, 32, 32, 8, 128_256, 8192), _LITGPT, 8_030_261_248),
    ("meta-llama/Meta-Llama-3-70B meta-llama/Meta-Llama-3-70B-Instruct",
     _llama(8192, 28_672, 80, 64, 8, 128_256, 8192), _LITGPT, 70_553_706_496),
    ("meta-llama/Llama-3.1-8B meta-llama/Meta-Llama-3.1-8B meta-llama/Meta-Llama-3.1-8B-Instruct "
     "meta-llama/Llama-3.1-8B-Instruct NousResearch/Meta-Llama-3.1-8B-Instruct "
     "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
     _llama(4096, 14_336, 32, 32, 8, 128_256, 131_072), f"{_AIC}/meta-llama--Meta-Llama-3.1-8B_config.json",
     8_030_261_248),
    ("meta-llama/Llama-3.1-70B meta-llama/Meta-Llama-3.1-70B meta-llama/Meta-Llama-3.1-70B-Instruct "
     "meta-llama/Llama-3.3-70B-Instruct nvidia/Llama-3.1-Nemotron-70B-Instruct-HF "
     "deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
     _llama(8192, 28_672, 80, 64, 8, 128_256, 131_072), f"{_AIC}/meta-llama--Meta-Llama-3.1-70B_config.json",
     70_553_706_496),
    ("meta-llama/Llama-3.1-405B meta-llama/Meta-Llama-3.1-405B meta-llama/Meta-Llama-3.1-405B-Instruct",
     _llama(16_384, 53_248, 126, 128, 8, 128_256, 131_072), f"{_AIC}/meta-llama--Meta-Llama-3.1-405B_config.json",
     None),
    ("meta-llama/Llama-3.2-1B meta-llama/Llama-3.2-1B-Instruct",
     _llama(2048, 8192, 16, 32, 8, 128_256, 131_072, tied=True, head_dim=64), f"{_MLC} [llama3_2_1b]",
     1_235_814_400),
    ("meta-llama/Llama-3.2-3B meta-llama/Llama-3.2-3B-Instruct",
     _llama(3072, 8192, 28, 24, 8, 128_256, 131_072, tied=True, head_dim=128), f"{_MLC} [llama3_2_3b]", None),
    ("meta-llama/Llama-4-Scout-17B-16E-Instruct",
     {"model_type": "llama4",
      "text_config": {"model_type": "llama4_text", **_sizes(5120, 8192, 48, 40, 8, 202_048, 10_485_760),
                      "head_dim": 128, "intermediate_size_mlp": 16_384, "num_local_experts": 16,
                      "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "attention_chunk_size": 8192}},
     f"{_AIC}/meta-llama--Llama-4-Scout-17B-16E-Instruct_config.json", None),
    # --- Llama-shaped models of others -------------------------------------------------------------------------------
    ("TinyLlama/TinyLlama-1.1B-Chat-v1.0 TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
     _llama(2048, 5632, 22, 32, 4, 32_000, 2048), f"{_MLC} [tinyllama_1b_chat_v1.0]", 1_100_048_384),
    ("HuggingFaceTB/SmolLM2-135M HuggingFaceTB/SmolLM2-135M-Instruct",
     _llama(576, 1536, 30, 9, 3, 49_152, 8192, tied=True), f"{_MLC} [smollm2_135m]", 134_515_008),
    ("HuggingFaceTB/SmolLM2-360M HuggingFaceTB/SmolLM2-360M-Instruct",
     _llama(960, 2560, 32, 15, 5, 49_152, 8192, tied=True), f"{_MLC} [smollm2_360m]", None),
    ("HuggingFaceTB/SmolLM-360M HuggingFaceTB/SmolLM-360M-Instruct",
     _llama(960, 2560, 32, 15, 5, 49_152, 2048, tied=True),
     f"{_HUB}/HuggingFaceTB/SmolLM-360M-Instruct/blob/main/config.json", None),
    ("HuggingFaceTB/SmolLM2-1.7B HuggingFaceTB/SmolLM2-1.7B-Instruct",
     _llama(2048, 8192, 24, 32, 32, 49_152, 8192, tied=True), f"{_LITGPT}; {_MLC} [smollm_1_7b] (tied)", None),
    ("HuggingFaceTB/SmolLM3-3B HuggingFaceTB/SmolLM3-3B-Base",
     {"model_type": "smollm3", **_sizes(2048, 11_008, 36, 16, 4, 128_256, 65_536), "tie_word_embeddings": True},
     f"{_HUB}/patrickfleith/smollm3-sft/blob/main/config.json (a fine-tuned copy)", None),
    ("01-ai/Yi-6B", _llama(4096, 11_008, 32, 32, 4, 64_000, 4096), f"{_HUB}/01-ai/Yi-6B/blob/main/config.json", None),
    ("01-ai/Yi-34B", _llama(7168, 20_480, 60, 56, 8, 64_000, 4096), f"{_HUB}/01-ai/Yi-34B config.json @3ace5f03ee",
     None),
    ("01-ai/Yi-34B-200K", _llama(7168, 20_480, 60, 56, 8, 64_000, 200_000),
     f"{_HUB}/01-ai/Yi-34B-200K config.json @d1466f8ddc", None),
    ("deepseek-ai/deepseek-coder-1.3b-base", _llama(2048, 5504, 24, 16, 16, 32_256, 16_384),
     f"{_HUB}/l3lab/ntp-mathlib-st-deepseek-coder-1.3b config.json (a fine-tuned copy)", None),
    ("deepseek-ai/deepseek-coder-6.7b-base deepseek-ai/deepseek-coder-6.7b-instruct",
     _llama(4096, 11_008, 32, 32, 32, 32_256, 16_384),
     f"{_HUB}/AIGym/deepseek-coder-6.7b-chat config.json (a fine-tuned copy)", None),
    ("tiiuae/Falcon3-1B-Base tiiuae/Falcon3-1B-Instruct", _llama(2048, 8192, 18, 8, 4, 131_072, 4096), _LITGPT, None),
    ("tiiuae/Falcon3-3B-Base tiiuae/Falcon3-3B-Instruct",
     _llama(3072, 9216, 22, 12, 4, 131_072, 32_768), _LITGPT, None),
    ("tiiuae/Falcon3-7B-Base tiiuae/Falcon3-7B-Instruct",
     _llama(3072, 23_040, 28, 12, 4, 131_072, 32_768), _LITGPT, None),
    ("tiiuae/Falcon3-10B-Base tiiuae/Falcon3-10B-Instruct",
     _llama(3072, 23_040, 40, 12, 4, 131_072, 32_768), _LITGPT, None),
    ("ibm-granite/granite-8b-code-base",
     _llama(4096, 14_336, 36, 32, 8, 49_152, 4096, tied=True, attention_bias=True, mlp_bias=True),
     f"{_HUB}/ticlazau/granite-8b-rpgle config.json (a fine-tuned copy)", None),
    # --- Mistral ----------------------------------------------------------------------------------------------------
    ("mistralai/Mistral-7B-v0.1 mistralai/Mistral-7B-Instruct-v0.1",
     _mistral(4096, 14_336, 32, 32, 8, 32_000, 32_768, window=4096), f"{_LITGPT}; {_MLC} [mistral_7b]", None),
    ("mistralai/Mistral-7B-Instruct-v0.2", _mistral(4096, 14_336, 32, 32, 8, 32_000, 32_768), _LITGPT, None),
    ("mistralai/Mistral-7B-v0.3 mistralai/Mistral-7B-Instruct-v0.3",
     _mistral(4096, 14_336, 32, 32, 8, 32_768, 32_768), f"{_MLC} [mistral_7b_v03]", 7_248_023_552),
    ("mistralai/Mistral-Nemo-Base-2407 mistralai/Mistral-Nemo-Instruct-2407",
     _mistral(5120, 14_336, 40, 32, 8, 131_072, 1_024_000, head_dim=128),
     f"{_HUB}/yuyouyu/Mistral-Nemo-BD-RP/blob/main/config.json (a fine-tuned copy)", None),
    ("mistralai/Mistral-Small-24B-Base-2501 mistralai/Mistral-Small-24B-Instruct-2501",
     _mistral(5120, 32_768, 40, 32, 8, 131_072, 32_768, head_dim=128),
     f"{_HUB}/unsloth/Mistral-Small-24B-Instruct-2501-GGUF/blob/main/config.json", None),
    ("mistralai/Mistral-Small-Instruct-2409", _mistral(6144, 16_384, 56, 48, 8, 32_768, 32_768, head_dim=128),
     f"{_HUB}/minchyeom/letta/blob/main/config.json (a fine-tuned copy)", None),
    ("mistralai/Mistral-Large-Instruct-2407 mistralai/Mistral-Large-Instruct-2411",
     _mistral(12_288, 28_672, 88, 96, 8, 32_768, 32_768), _LITGPT, None),
    ("mistralai/Mixtral-8x7B-v0.1 mistralai/Mixtral-8x7B-Instruct-v0.1",
     _mixtral(4096, 14_336, 32, 32, 8, 32_000, 32_768), f"{_AIC}/mistralai--Mixtral-8x7B-v0.1_config.json",
     46_702_792_704),
    ("mistralai/Mixtral-8x22B-v0.1", _mixtral(6144, 16_384, 56, 48, 8, 32_000, 65_536),
     f"{_AIC}/mistralai--Mixtral-8x22B-v0.1_config.json", None),
    ("mistralai/Mixtral-8x22B-Instruct-v0.1", _mixtral(6144, 16_384, 56, 48, 8, 32_768, 65_536), _LITGPT, None),
    # --- Qwen -------------------------------------------------------------------------------------------------------
    ("Qwen/Qwen2.5-0.5B Qwen/Qwen2.5-0.5B-Instruct Qwen/Qwen2.5-Coder-0.5B Qwen/Qwen2.5-Coder-0.5B-Instruct "
     "Qwen/Qwen2-0.5B-Instruct",
     _qwen2(896, 4864, 24, 14, 2, 151_936, 32_768, tied=True), f"{_MLC} [qwen2_0_5b]; {_LITGPT}", 494_032_768),
    ("Qwen/Qwen2.5-1.5B Qwen/Qwen2.5-1.5B-Instruct Qwen/Qwen2.5-Coder-1.5B Qwen/Qwen2.5-Coder-1.5B-Instruct "
     "Qwen/Qwen2-1.5B-Instruct",
     _qwen2(1536, 8960, 28, 12, 2, 151_936, 32_768, tied=True), f"{_MLC} [qwen2_1_5b]; {_LITGPT}", None),
    ("Qwen/Qwen2.5-Math-1.5B Qwen/Qwen2.5-Math-1.5B-Instruct",
     _qwen2(1536, 8960, 28, 12, 2, 151_936, 4096, tied=True), f"{_MLC} [qwen2_1_5b]; {_LITGPT}", None),
    ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", _qwen2(1536, 8960, 28, 12, 2, 151_936, 131_072),
     f"{_HUB}/onnx-community/DeepSeek-R1-Distill-Qwen-1.5B-ONNX/blob/main/config.json", None),
    ("Qwen/Qwen2.5-3B Qwen/Qwen2.5-3B-Instruct Qwen/Qwen2.5-Coder-3B Qwen/Qwen2.5-Coder-3B-Instruct",
     _qwen2(2048, 11_008, 36, 16, 2, 151_936, 32_768, tied=True), _QWEN_LIST, 3_085_938_688),
    ("Qwen/Qwen2.5-7B Qwen/Qwen2.5-7B-Instruct Qwen/Qwen2.5-Coder-7B Qwen/Qwen2.5-Coder-7B-Instruct "
     "Qwen/Qwen2-7B-Instruct",
     _qwen2(3584, 18_944, 28, 28, 4, 152_064, 32_768), _QWEN_LIST, 7_615_616_512),
    ("Qwen/Qwen2.5-Math-7B Qwen/Qwen2.5-Math-7B-Instruct",
     _qwen2(3584, 18_944, 28, 28, 4, 152_064, 4096), _LITGPT, None),
    ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", _qwen2(3584, 18_944, 28, 28, 4, 152_064, 131_072),
     f"{_HUB}/unsloth/DeepSeek-R1-Distill-Qwen-7B-bnb-4bit config.json", None),
    ("Qwen/Qwen2.5-7B-Instruct-1M", _qwen2(3584, 18_944, 28, 28, 4, 152_064, 1_010_000), _LITGPT, None),
    ("Qwen/Qwen2.5-14B Qwen/Qwen2.5-14B-Instruct Qwen/Qwen2.5-Coder-14B Qwen/Qwen2.5-Coder-14B-Instruct",
     _qwen2(5120, 13_824, 48, 40, 8, 152_064, 32_768), _LITGPT, None),
    ("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", _qwen2(5120, 13_824, 48, 40, 8, 152_064, 131_072),
     f"{_HUB}/unsloth/DeepSeek-R1-Distill-Qwen-14B-bnb-4bit config.json", None),
    ("Qwen/Qwen2.5-14B-Instruct-1M", _qwen2(5120, 13_824, 48, 40, 8, 152_064, 1_010_000), _LITGPT, None),
    ("Qwen/Qwen2.5-32B Qwen/Qwen2.5-32B-Instruct Qwen/Qwen2.5-Coder-32B Qwen/Qwen2.5-Coder-32B-Instruct "
     "Qwen/QwQ-32B-Preview",
     _qwen2(5120, 27_648, 64, 40, 8, 152_064, 32_768), _LITGPT, None),
    ("Qwen/QwQ-32B", _qwen2(5120, 27_648, 64, 40, 8, 152_064, 131_072), _LITGPT, None),
    ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", _qwen2(5120, 27_648, 64, 40, 8, 152_064, 131_072),
     f"{_HUB}/AIFunOver/DeepSeek-R1-Distill-Qwen-32B-openvino-8bit/blob/main/config.json", None),
    ("Qwen/Qwen2.5-72B Qwen/Qwen2.5-72B-Instruct", _qwen2(8192, 29_568, 80, 64, 8, 152_064, 32_768), _LITGPT, None),
    ("Qwen/Qwen2.5-Math-72B Qwen/Qwen2.5-Math-72B-Instruct",
     _qwen2(8192, 29_568, 80, 64, 8, 152_064, 4096), _LITGPT, None),
    ("Qwen/Qwen3-0.6B Qwen/Qwen3-0.6B-Base", _qwen3(1024, 3072, 28, 16, 8, 151_936, 40_960, tied=True),
     f"{_AIC}/Qwen--Qwen3-0.6B_config.json", None),
    ("Qwen/Qwen3-1.7B Qwen/Qwen3-1.7B-Base", _qwen3(2048, 6144, 28, 16, 8, 151_936, 40_960, tied=True),
     f"{_AIC}/Qwen--Qwen3-1.7B_config.json", None),
    ("Qwen/Qwen3-4B Qwen/Qwen3-4B-Base", _qwen3(2560, 9728, 36, 32, 8, 151_936, 40_960, tied=True), _QWEN_LIST,
     4_022_468_096),
    ("Qwen/Qwen3-4B-Instruct-2507 Qwen/Qwen3-4B-Thinking-2507",
     _qwen3(2560, 9728, 36, 32, 8, 151_936, 262_144, tied=True), f"{_LITGPT}; {_QWEN_LIST} (tied)", 4_022_468_096),
    ("Qwen/Qwen3-8B Qwen/Qwen3-8B-Base", _qwen3(4096, 12_288, 36, 32, 8, 151_936, 40_960),
     f"{_AIC}/Qwen--Qwen3-8B_config.json", 8_190_735_360),
    ("Qwen/Qwen3-14B Qwen/Qwen3-14B-Base", _qwen3(5120, 17_408, 40, 40, 8, 151_936, 40_960), _LITGPT, None),
    ("Qwen/Qwen3-32B", _qwen3(5120, 25_600, 64, 64, 8, 151_936, 40_960), f"{_AIC}/Qwen--Qwen3-32B_config.json", None),
    ("Qwen/Qwen3-30B-A3B Qwen/Qwen3-30B-A3B-Base", _qwen3_moe(2048, 6144, 48, 32, 4, 151_936, 40_960, width=768),
     f"{_AIC}/Qwen--Qwen3-30B-A3B_config.json", 30_532_122_624),
    ("Qwen/Qwen3-30B-A3B-Instruct-2507 Qwen/Qwen3-30B-A3B-Thinking-2507",
     _qwen3_moe(2048, 6144, 48, 32, 4, 151_936, 262_144, width=768), _LITGPT, 30_532_122_624),
    ("Qwen/Qwen3-235B-A22B", _qwen3_moe(4096, 12_288, 94, 64, 4, 151_936, 40_960, width=1536),
     f"{_AIC}/Qwen--Qwen3-235B-A22B_config.json", None),
    ("Qwen/Qwen3-235B-A22B-Instruct-2507 Qwen/Qwen3-235B-A22B-Thinking-2507",
     _qwen3_moe(4096, 12_288, 94, 64, 4, 151_936, 262_144, width=1536), _LITGPT, None),
    ("Qwen/Qwen3-Coder-480B-A35B-Instruct",
     _qwen3_moe(6144, 8192, 62, 96, 8, 151_936, 262_144, width=2560, experts=160),
     f"{_AIC}/Qwen--Qwen3-Coder-480B-A35B-Instruct_config.json", None),
    # --- Gemma ------------------------------------------------------------------------------------------------------
    ("google/gemma-2b google/gemma-2b-it", _gemma("gemma", 2048, 16_384, 18, 8, 1, 256_000, 8192), _LITGPT, None),
    ("google/gemma-7b google/gemma-7b-it google/codegemma-7b-it",
     _gemma("gemma", 3072, 24_576, 28, 16, 16, 256_000, 8192), _LITGPT, None),
    ("google/gemma-2-2b google/gemma-2-2b-it", _gemma("gemma2", 2304, 9216, 26, 8, 4, 256_000, 8192),
     f"{_MLC} [gemma2_2b]", None),
    ("google/gemma-2-9b google/gemma-2-9b-it", _gemma("gemma2", 3584, 14_336, 42, 16, 8, 256_000, 8192),
     f"{_MLC} [gemma2_9b]", 9_241_705_984),
    ("google/gemma-2-27b google/gemma-2-27b-it",
     _gemma("gemma2", 4608, 36_864, 46, 32, 16, 256_000, 8192, head=128), f"{_MLC} [gemma2_27b]", None),
    ("google/gemma-3-1b-it", _gemma("gemma3_text", 1152, 6912, 26, 4, 1, 262_144, 32_768, sliding_window=512),
     f"{_MLC} [gemma3_1b_it]", 999_885_952),
    ("google/gemma-3-4b-it google/gemma-3-4b-pt", _gemma3(2560, 10_240, 34, 8, 4, 262_208, 131_072),
     f"{_LITGPT}; vocabulary: transformers' class default", None),
    ("google/gemma-3-12b-it", _gemma3(3840, 15_360, 48, 16, 8, 262_208, 131_072),
     f"{_LITGPT}; vocabulary: transformers' class default", None),
    ("google/gemma-3-27b-it", _gemma3(5376, 21_504, 62, 32, 16, 262_208, 131_072, head=128),
     "google/gemma_pytorch@014acb7ac4 gemma/config.py (27b_v3)", None),
    # --- Phi --------------------------------------------------------------------------------------------------------
    ("microsoft/phi-1_5", _phi(2048, 8192, 24, 32, 32, 51_200, 2048), _LITGPT, None),
    ("microsoft/phi-2", _phi(2560, 10_240, 32, 32, 32, 51_200, 2048), f"{_LITGPT}; {_MLC} [phi-2]", 2_779_683_840),
    ("microsoft/Phi-3-mini-4k-instruct", _phi3(3072, 8192, 32, 32, 32, 32_064, 4096, window=2047),
     f"{_HUB}/mcding/CorrectDPO-Model-DPO_Pm3B_U0_beta0.10 config.json (a fine-tuned copy)", 3_821_079_552),
    ("microsoft/Phi-3-mini-128k-instruct microsoft/Phi-3.5-mini-instruct",
     _phi3(3072, 8192, 32, 32, 32, 32_064, 131_072, window=262_144), f"{_MLC} [phi-3_5]", 3_821_079_552),
    ("microsoft/Phi-3-medium-4k-instruct", _phi3(5120, 17_920, 40, 40, 10, 32_064, 4096, window=2047),
     f"{_HUB}/microsoft/Phi-3-medium-4k-instruct config.json @3da3d15332", None),
    ("microsoft/phi-4", _phi3(5120, 17_920, 40, 40, 10, 100_352, 16_384), _LITGPT, None),
    ("microsoft/Phi-4-reasoning microsoft/Phi-4-reasoning-plus",
     _phi3(5120, 17_920, 40, 40, 10, 100_352, 32_768), _LITGPT, None),
    ("microsoft/Phi-4-mini-instruct microsoft/Phi-4-mini-reasoning",
     _phi3(3072, 8192, 32, 24, 8, 200_064, 131_072, window=262_144, tied=True, partial_rotary_factor=0.75),
     f"{_MLC} [phi-4]", None),
    # --- OLMo, Granite, StarCoder, StableLM, gpt-oss, DeepSeek ------------------------------------------------------
    ("allenai/OLMo-1B-hf",
     {"model_type": "olmo", **_sizes(2048, 8192, 16, 16, 16, 50_304, 2048), "tie_word_embeddings": True},
     f"{_HUB}/onnx-community/OLMo-1B-hf/blob/main/config.json", None),
    ("allenai/OLMo-7B-hf allenai/OLMo-7B-Instruct-hf",
     {"model_type": "olmo", **_sizes(4096, 11_008, 32, 32, 32, 50_304, 2048), "tie_word_embeddings": False},
     _LITGPT, None),
    ("allenai/OLMo-2-1124-7B allenai/OLMo-2-1124-7B-SFT allenai/OLMo-2-1124-7B-DPO allenai/OLMo-2-1124-7B-Instruct",
     _olmo2(4096, 11_008, 32, 32, 32, 100_352, 4096), f"{_MLC} [olmo2_7b]", None),
    ("allenai/OLMo-2-1124-13B allenai/OLMo-2-1124-13B-SFT allenai/OLMo-2-1124-13B-DPO "
     "allenai/OLMo-2-1124-13B-Instruct",
     _olmo2(5120, 13_824, 40, 40, 40, 100_352, 4096),
     f"{_HUB}/allenai/OLMo-2-1124-13B/blob/main/config.json", None),
    ("allenai/OLMo-2-0325-32B", _olmo2(5120, 27_648, 64, 40, 8, 100_352, 4096),
     f"{_HUB}/allenai/OLMo-2-0325-32B config.json", None),
    ("ibm-granite/granite-3.1-2b-instruct ibm-granite/granite-3.2-2b-instruct",
     _granite(2048, 8192, 40, 32, 8, 49_155, 131_072),
     f"{_HUB}/unsloth/granite-3.2-2b-instruct config.json @918d2374b9", None),
    ("ibm-granite/granite-3.1-8b-instruct", _granite(4096, 12_800, 40, 32, 8, 49_155, 131_072),
     f"{_HUB}/ibm-granite/granite-3.1-8b-instruct config.json @96fedcdf57", None),
    ("bigcode/starcoder2-3b", _starcoder2(3072, 12_288, 30, 24, 2, 49_152, 16_384, tied=True),
     f"{_HUB}/OpenVINO/starcoder2-3b-int8-ov config.json @c1cc7147d8", None),
    ("bigcode/starcoder2-7b", _starcoder2(4608, 18_432, 32, 36, 4, 49_152, 16_384, tied=True),
     f"{_MLC} [starcoder2]", None),
    ("bigcode/starcoder2-15b", _starcoder2(6144, 24_576, 40, 48, 4, 49_152, 16_384, tied=False),
     f"{_HUB}/OpenVINO/starcoder2-15b-int8-ov config.json", None),
    ("stabilityai/stablelm-3b-4e1t stabilityai/stablelm-zephyr-3b",
     _stablelm(2560, 6912, 32, 32, 32, 50_304, 4096, qkv_bias=False), f"{_MLC} [stablelm]", None),
    ("stabilityai/stablelm-2-zephyr-1_6b", _stablelm(2048, 5632, 24, 32, 32, 100_352, 4096, qkv_bias=True),
     f"{_MLC} [stablelm-2-zephyr-1_6b]", None),
    ("openai/gpt-oss-20b", _gpt_oss(24, 32), f"{_AIC}/openai--gpt-oss-20b_config.json", 20_914_757_184),
    ("openai/gpt-oss-120b", _gpt_oss(36, 128), f"{_AIC}/openai--gpt-oss-120b_config.json", None),
    ("deepseek-ai/DeepSeek-V3 deepseek-ai/DeepSeek-R1", _deepseek_v3(), f"{_AIC}/deepseek-ai--DeepSeek-V3_config.json",
     None),
    # --- older ones -------------------------------------------------------------------------------------------------
    ("gpt2 openai-community/gpt2", _gpt2(768, 12, 12), f"{_MLC} [gpt2]", 124_439_808),
    ("gpt2-medium openai-community/gpt2-medium", _gpt2(1024, 24, 16), f"{_MLC} [gpt2_medium]", None),
    ("gpt2-large openai-community/gpt2-large", _gpt2(1280, 36, 20),
     f"{_HUB}/openai-community/gpt2-large config.json @934da44f9c", None),
    ("gpt2-xl openai-community/gpt2-xl", _gpt2(1600, 48, 25),
     f"{_HUB}/model-attribution-challenge/gpt2-xl config.json @4bcc4abd9b (a copy)", None),
    ("facebook/opt-125m", _opt(768, 12, 12, 768), f"{_HUB}/inverse-scaling/opt-125m_eval config.json (a copy)", None),
    ("facebook/opt-350m", _opt(1024, 24, 16, 512, first_norm=False),
     f"{_HUB}/sartajbhuvaji/facebook-opt-350m-chat config.json (a fine-tuned copy)", None),
    ("facebook/opt-1.3b", _opt(2048, 24, 32, 2048), f"{_HUB}/0x70DA/EnabledChat config.json (a fine-tuned copy)", None),
    ("facebook/opt-2.7b", _opt(2560, 32, 32, 2560), f"{_HUB}/facebook/opt-2.7b config.json", None),
    ("EleutherAI/pythia-70m EleutherAI/pythia-70m-deduped", _pythia(512, 6, 8, 50_304), _LITGPT, None),
    ("EleutherAI/pythia-160m EleutherAI/pythia-160m-deduped", _pythia(768, 12, 12, 50_304), _LITGPT, None),
    ("EleutherAI/pythia-410m EleutherAI/pythia-410m-deduped", _pythia(1024, 24, 16, 50_304), _LITGPT, None),
    ("EleutherAI/pythia-1b EleutherAI/pythia-1b-deduped", _pythia(2048, 16, 8, 50_304), _LITGPT, None),
    ("EleutherAI/pythia-1.4b EleutherAI/pythia-1.4b-deduped", _pythia(2048, 24, 16, 50_304), _LITGPT, None),
    ("EleutherAI/pythia-2.8b EleutherAI/pythia-2.8b-deduped", _pythia(2560, 32, 32, 50_304), _LITGPT, None),
    ("EleutherAI/pythia-6.9b EleutherAI/pythia-6.9b-deduped", _pythia(4096, 32, 32, 50_432),
     f"{_HUB}/EleutherAI/pythia-6.9b/blob/main/config.json", None),
    ("EleutherAI/pythia-12b EleutherAI/pythia-12b-deduped", _pythia(5120, 36, 40, 50_688),
     f"{_HUB}/EleutherAI/pythia-12b config.json @step6000", None),
    ("tiiuae/falcon-7b tiiuae/falcon-7b-instruct", _falcon(4544, 32, 71, 1), _LITGPT, None),
    ("tiiuae/falcon-40b tiiuae/falcon-40b-instruct", _falcon(8192, 60, 128, 8), _LITGPT, None),
    ("tiiuae/falcon-180B tiiuae/falcon-180B-chat", _falcon(14_848, 80, 232, 8), _LITGPT, None),
)
# fmt: on


_STORED = {"gpt2": "float32", "opt": "float16", "gpt_neox": "float16", "phi": "float16"}
"""Dtype of the published files by model type; bfloat16 for the others. A local config.json gives its own."""


def _by_name() -> Iterator[tuple[str, KnownModel]]:
    for names, config, source, params in _ROWS:
        is_half = names.startswith("meta-llama/Llama-2")
        stored = "float16" if is_half else _STORED.get(config["model_type"], "bfloat16")
        known = KnownModel({**config, "dtype": stored}, source, params)
        for name in names.split():
            yield name, known


KNOWN_MODELS: dict[str, KnownModel] = dict(_by_name())
"""Hub id: config."""
