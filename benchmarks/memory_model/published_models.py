"""Shapes of the models that published runs trained, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from sft_play.errors import ModelError
from sft_play.models.config_json import KNOWN_MODELS, is_hub_reachable, load_config_json

Config = Mapping[str, Any]
ConfigOf = Callable[[str], Config]
"""A model's config.json by its name; raises ModelError."""

_LLAMA_2_70B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}

MORE_MODELS: dict[str, dict[str, Any]] = {
    # The Power Scheduler paper (arXiv 2408.13359), table 4; vocabulary of the Granite code tokenizer, tied.
    "ibm/PowerLM-3b": {
        "model_type": "granite",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 40,
        "num_attention_heads": 36,
        "num_key_value_heads": 36,
        "vocab_size": 49_152,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    # Same paper, PowerMoE-3B, whose shape granite-3.0-3b-a800m has.
    "ibm-granite/granite-3.0-3b-a800m-instruct": {
        "model_type": "granitemoe",
        "hidden_size": 1536,
        "intermediate_size": 512,
        "num_hidden_layers": 32,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 40,
        "num_experts_per_tok": 8,
        "vocab_size": 49_155,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    # foundation-model-stack/fms-extras, models/paged_gpt_bigcode.py names the same published config; SantaCoder paper
    # (arXiv 2301.03988), section 5: 24 layers, 16 heads, hidden 2048, multi-query attention.
    "bigcode/gpt_bigcode-santacoder": {
        "model_type": "gpt_bigcode",
        "n_embd": 2048,
        "n_inner": 8192,
        "n_layer": 24,
        "n_head": 16,
        "n_positions": 2048,
        "vocab_size": 49_280,
        "multi_query": True,
        "activation_function": "gelu_pytorch_tanh",
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "resid_pdrop": 0.1,
    },
    # Printed modules of LlamaForCausalLM: 32256 x 2048, 24 layers, 5504 wide; 1,346,471,936 parameters
    # (Xpehutta/llm4sql data-model-generator/lora_sql_model/README.md, less its adapter).
    "deepseek-ai/deepseek-coder-1.3b-instruct": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 5504,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 32_256,
        "max_position_embeddings": 16_384,
        "tie_word_embeddings": False,
    },
    # deepspeedai/DeepSpeedExamples training/bf16_master_weight/train.py with its README's sizes: GPT-2's blocks with
    # norms after them, learned positions, an untied head; 6.86 billion parameters.
    "deepspeedai/bf16_master_weight-6.9b": {
        "model_type": "gpt2",
        "n_embd": 4096,
        "n_inner": 16_384,
        "n_layer": 32,
        "n_head": 32,
        "n_positions": 512,
        "vocab_size": 50_257,
        "activation_function": "gelu",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": False,
    },
    # Llama 2 paper (arXiv 2307.09288), appendix; meta-llama/Llama-2-70b-hf config.json.
    "NousResearch/Llama-2-70b-hf": _LLAMA_2_70B,
    "meta-llama/Llama-2-70b-hf": _LLAMA_2_70B,
}
"""Shapes that only published runs need; the table of known models comes first."""


def known_config(name: str) -> Config:
    """A model's config.json: the tables first, then a mirror's original, then the hub and its cache; or ModelError."""
    if name in MORE_MODELS:
        return MORE_MODELS[name]
    if name in KNOWN_MODELS:
        return KNOWN_MODELS[name].config
    original = _originals().get(_last_part(name))
    if original is not None:
        return original
    if not _hub_once():
        raise ModelError(f"model {name} is in no table, and the hub cannot be reached")
    return load_config_json(name)


@cache
def _hub_once() -> bool:
    return is_hub_reachable()


@cache
def _originals() -> dict[str, Config]:
    """Configs by a repository's name without its owner, where all owners that the table has agree."""
    found: dict[str, Config] = {}
    differing = set()
    # mirrors (unsloth/, NousResearch/) keep the name after the owner; one that two owners fill differently is nobody's
    for name, known in KNOWN_MODELS.items():
        part = _last_part(name)
        if found.setdefault(part, known.config) != known.config:
            differing.add(part)
    return {part: config for part, config in found.items() if part not in differing}


def _last_part(name: str) -> str:
    return name.rpartition("/")[2].lower()


def cache_configs(config_of: ConfigOf) -> ConfigOf:
    @cache  # an error as a text, since a cache keeps no exceptions: the hub is asked once for a model that it lacks
    def ask(name: str) -> Config | str:
        try:
            return config_of(name)
        except ModelError as error:
            return str(error)

    def answer(name: str) -> Config:
        found = ask(name)
        if isinstance(found, str):
            raise ModelError(found)
        return found

    return answer
