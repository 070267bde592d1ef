"""Defaults that transformers uses for fields that config.json leaves out, by model type.

Read from configuration_*.py of transformers 5.23; a test compares them with the installed library. Only fields that
shapes depend on are listed; None means that the class has the field and derives its value from others.
"""

from __future__ import annotations

# fmt: off
CLASS_DEFAULTS: dict[str, dict[str, int | float | bool | str | None]] = {
    "apertus": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None,
        "intermediate_size": 14336, "vocab_size": 131072, "max_position_embeddings": 65536,
        "tie_word_embeddings": False, "attention_bias": False, "hidden_act": "xielu", "attention_dropout": 0.0,
    },
    "arcee": {
        "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None,
        "head_dim": None, "intermediate_size": 18432, "vocab_size": 32000, "max_position_embeddings": 4096,
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "hidden_act": "relu2",
        "attention_dropout": 0.0,
    },
    "biogpt": {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
        "vocab_size": 42384, "max_position_embeddings": 1024, "tie_word_embeddings": True, "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
    },
    "bloom": {
        "hidden_size": 64, "n_layer": 2, "n_head": 8, "vocab_size": 250880, "tie_word_embeddings": True,
        "hidden_dropout": 0.0, "attention_dropout": 0.0,
    },
    "codegen": {
        "n_embd": 4096, "n_layer": 28, "n_head": 16, "n_inner": None, "vocab_size": 50400, "n_positions": 2048,
        "tie_word_embeddings": False, "activation_function": "gelu_new", "rotary_dim": 64, "resid_pdrop": 0.0,
        "attn_pdrop": 0.0, "embd_pdrop": 0.0,
    },
    "cohere": {
        "hidden_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 64, "num_key_value_heads": None,
        "intermediate_size": 22528, "vocab_size": 256000, "max_position_embeddings": 8192, "tie_word_embeddings": True,
        "attention_bias": False, "use_qk_norm": False, "hidden_act": "silu", "attention_dropout": 0.0,
    },
    "cohere2": {
        "hidden_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 64, "num_key_value_heads": None,
        "intermediate_size": 22528, "vocab_size": 256000, "max_position_embeddings": 8192, "tie_word_embeddings": True,
        "attention_bias": False, "sliding_window": 4096, "hidden_act": "silu", "attention_dropout": 0.0,
    },
    "cwm": {
        "hidden_size": 6144, "num_hidden_layers": 64, "num_attention_heads": 48, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 21504, "vocab_size": 128256, "max_position_embeddings": 131072,
        "tie_word_embeddings": False, "mlp_bias": False, "sliding_window": 8192, "hidden_act": "silu",
        "attention_dropout": 0.0,
    },
    "deepseek_v2": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None,
        "head_dim": None, "intermediate_size": 11008, "vocab_size": 102400, "max_position_embeddings": 2048,
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "hidden_act": "silu",
        "n_routed_experts": 64, "num_experts_per_tok": None, "moe_intermediate_size": 1407, "n_shared_experts": 2,
        "first_k_dense_replace": 0, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "attention_dropout": 0.0,
    },
    "deepseek_v3": {
        "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
        "intermediate_size": 18432, "vocab_size": 129280, "max_position_embeddings": 4096,
        "tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu", "n_routed_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "attention_dropout": 0.0,
    },
    "dots1": {
        "hidden_size": 4608, "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 32,
        "intermediate_size": 10944, "vocab_size": 152064, "max_position_embeddings": 2048,
        "tie_word_embeddings": False, "attention_bias": False, "sliding_window": 4096, "max_window_layers": 62,
        "hidden_act": "silu", "n_routed_experts": None, "num_experts_per_tok": None, "moe_intermediate_size": 1408,
        "n_shared_experts": None, "first_k_dense_replace": 0, "attention_dropout": 0.0,
    },
    "ernie4_5": {
        "hidden_size": 1024, "num_hidden_layers": 18, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 128, "intermediate_size": 3072, "vocab_size": 103424, "max_position_embeddings": 131072,
        "tie_word_embeddings": True, "use_bias": False, "hidden_act": "silu",
    },
    "ernie4_5_moe": {
        "hidden_size": 2560, "num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4,
        "intermediate_size": 12288, "vocab_size": 103424, "max_position_embeddings": 131072,
        "tie_word_embeddings": True, "use_bias": False, "hidden_act": "silu", "moe_num_experts": 64, "moe_k": 6,
        "moe_intermediate_size": 1536, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
        "moe_layer_end_index": -1, "moe_layer_interval": 1,
    },
    "exaone4": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "intermediate_size": 16384, "vocab_size": 102400, "max_position_embeddings": 2048,
        "tie_word_embeddings": False, "sliding_window": 4096, "sliding_window_pattern": 4, "hidden_act": "silu",
        "attention_dropout": 0.0,
    },
    "falcon": {
        "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "num_kv_heads": None,
        "ffn_hidden_size": None, "vocab_size": 65024, "max_position_embeddings": 2048, "tie_word_embeddings": True,
        "bias": False, "activation": "gelu", "alibi": False, "parallel_attn": True, "multi_query": True,
        "new_decoder_architecture": False, "num_ln_in_parallel_attn": None, "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "flex_olmo": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None,
        "intermediate_size": 11008, "vocab_size": 100352, "max_position_embeddings": 4096,
        "tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu", "num_experts": 7,
        "num_experts_per_tok": 5, "attention_dropout": 0.0,
    },
    "gemma": {
        "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 16,
        "head_dim": 256, "intermediate_size": 24576, "vocab_size": 256000, "max_position_embeddings": 8192,
        "tie_word_embeddings": True, "attention_bias": False, "hidden_act": "gelu_pytorch_tanh",
        "attention_dropout": 0.0,
    },
    "gemma2": {
        "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "intermediate_size": 9216, "vocab_size": 256000, "max_position_embeddings": 8192,
        "tie_word_embeddings": True, "attention_bias": False, "sliding_window": 4096,
        "hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": 50.0,
        "attention_dropout": 0.0,
    },
    "gemma3_text": {
        "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "intermediate_size": 9216, "vocab_size": 262208, "max_position_embeddings": 131072,
        "tie_word_embeddings": True, "attention_bias": False, "sliding_window": 4096,
        "hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": None,
        "attention_dropout": 0.0,
    },
    "glm": {
        "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2,
        "head_dim": 128, "intermediate_size": 13696, "vocab_size": 151552, "max_position_embeddings": 131072,
        "tie_word_embeddings": False, "attention_bias": True, "hidden_act": "silu", "attention_dropout": 0.0,
        "partial_rotary_factor": 0.5,
    },
    "glm4": {
        "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2,
        "head_dim": 128, "intermediate_size": 13696, "vocab_size": 151552, "max_position_embeddings": 131072,
        "tie_word_embeddings": False, "attention_bias": True, "hidden_act": "silu", "attention_dropout": 0.0,
        "partial_rotary_factor": 0.5,
    },
    "glm4_moe": {
        "hidden_size": 4096, "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
        "intermediate_size": 10944, "vocab_size": 151552, "max_position_embeddings": 131072,
        "tie_word_embeddings": False, "attention_bias": False, "use_qk_norm": False, "hidden_act": "silu",
        "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "attention_dropout": 0.0, "partial_rotary_factor": 0.5,
    },
    "gpt2": {
        "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None, "vocab_size": 50257, "n_positions": 1024,
        "tie_word_embeddings": True, "activation_function": "gelu_new", "resid_pdrop": 0.1, "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
    },
    "gpt_bigcode": {
        "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None, "vocab_size": 50257, "n_positions": 1024,
        "tie_word_embeddings": True, "activation_function": "gelu_pytorch_tanh", "multi_query": True,
        "resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1,
    },
    "gpt_neo": {
        "hidden_size": 2048, "num_layers": 24, "num_heads": 16, "intermediate_size": None, "vocab_size": 50257,
        "max_position_embeddings": 2048, "tie_word_embeddings": True, "attention_types": None, "window_size": 256,
        "activation_function": "gelu_new", "resid_dropout": 0.0, "attention_dropout": 0.0, "embed_dropout": 0.0,
    },
    "gpt_neox": {
        "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64, "intermediate_size": 24576,
        "vocab_size": 50432, "max_position_embeddings": 2048, "tie_word_embeddings": False, "attention_bias": True,
        "hidden_act": "gelu", "use_parallel_residual": True, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "partial_rotary_factor": 0.25,
    },
    "gpt_oss": {
        "hidden_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "intermediate_size": 2880, "vocab_size": 201088, "max_position_embeddings": 131072,
        "tie_word_embeddings": False, "attention_bias": True, "sliding_window": 128, "hidden_act": "silu",
        "num_local_experts": 128, "num_experts_per_tok": 4, "attention_dropout": 0.0,
    },
    "gptj": {
        "n_embd": 4096, "n_layer": 28, "n_head": 16, "n_inner": None, "vocab_size": 50400, "n_positions": 2048,
        "tie_word_embeddings": False, "activation_function": "gelu_new", "rotary_dim": 64, "resid_pdrop": 0.0,
        "attn_pdrop": 0.0, "embd_pdrop": 0.0,
    },
    "granite": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None,
        "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": False,
        "attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "attention_dropout": 0.0,
    },
    "granitemoe": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None,
        "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": False,
        "attention_bias": False, "hidden_act": "silu", "num_local_experts": 8, "num_experts_per_tok": 2,
        "attention_dropout": 0.0,
    },
    "granitemoeshared": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None,
        "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": False,
        "attention_bias": False, "hidden_act": "silu", "num_local_experts": 8, "num_experts_per_tok": 2,
        "shared_intermediate_size": 0, "attention_dropout": 0.0,
    },
    "helium": {
        "hidden_size": 2560, "num_hidden_layers": 24, "num_attention_heads": 20, "num_key_value_heads": 20,
        "head_dim": 128, "intermediate_size": 7040, "vocab_size": 48000, "max_position_embeddings": 4096,
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "hidden_act": "silu",
        "attention_dropout": 0.0,
    },
    "hunyuan_v1_dense": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None,
        "head_dim": None, "intermediate_size": 11008, "vocab_size": 290943, "max_position_embeddings": 2048,
        "tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu", "attention_dropout": 0.0,
    },
    "hunyuan_v1_moe": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None,
        "head_dim": None, "intermediate_size": 11008, "vocab_size": 290943, "max_position_embeddings": 2048,
        "tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu", "num_experts": 1, "moe_topk": 1,
        "attention_dropout": 0.0,
    },
    "internlm3": {
        "hidden_size": 4096, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 2,
        "head_dim": 128, "intermediate_size": 10240, "vocab_size": 128512, "max_position_embeddings": 32768,
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "hidden_act": "silu",
        "attention_dropout": 0.0,
    },
    "jais2": {
        "hidden_size": 3328, "num_hidden_layers": 32, "num_attention_heads": 26, "num_key_value_heads": None,
        "head_dim": None, "intermediate_size": 26624, "vocab_size": 150272, "max_position_embeddings": 8192,
        "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "hidden_act": "relu2",
        "attention_dropout": 0.0,
    },
    "llama": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None,
        "head_dim": None, "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 2048,
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "hidden_act": "silu",
        "attention_dropout": 0.0,
    },
    "llama4_text": {
        "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "vocab_size": 202048,
        "max_position_embeddings": 131072, "tie_word_embeddings": False, "attention_bias": False, "use_qk_norm": True,
        "attention_chunk_size": 8192, "no_rope_layer_interval": 4, "hidden_act": "silu", "num_local_experts": 16,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "attention_dropout": 0.0,
    },
    "ministral": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": None, "intermediate_size": 14336, "vocab_size": 32000, "max_position_embeddings": 131072,
        "tie_word_embeddings": False, "sliding_window": 4096, "hidden_act": "silu", "attention_dropout": 0.0,
    },
    "ministral3": {
        "hidden_size": 4096, "num_hidden_layers": 34, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 14336, "vocab_size": 131072, "max_position_embeddings": 262144,
        "tie_word_embeddings": False, "sliding_window": None, "hidden_act": "silu", "attention_dropout": 0.0,
    },
    "mistral": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": None, "intermediate_size": 14336, "vocab_size": 32000, "max_position_embeddings": 131072,
        "tie_word_embeddings": False, "sliding_window": 4096, "hidden_act": "silu", "attention_dropout": 0.0,
    },
    "mixtral": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": None, "intermediate_size": 14336, "vocab_size": 32000, "max_position_embeddings": 131072,
        "tie_word_embeddings": False, "sliding_window": None, "hidden_act": "silu", "num_local_experts": 8,
        "num_experts_per_tok": 2, "attention_dropout": 0.0,
    },
    "mpt": {
        "d_model": 2048, "n_layers": 24, "n_heads": 16, "expansion_ratio": 4, "vocab_size": 50368, "max_seq_len": 2048,
        "tie_word_embeddings": True, "resid_pdrop": 0.0, "emb_pdrop": 0.0,
    },
    "nanochat": {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 6, "num_key_value_heads": None,
        "intermediate_size": 8192, "vocab_size": 50304, "max_position_embeddings": 2048, "tie_word_embeddings": False,
        "attention_bias": False, "hidden_act": "relu2", "attention_dropout": 0.0,
    },
    "nemotron": {
        "hidden_size": 6144, "num_hidden_layers": 32, "num_attention_heads": 48, "num_key_value_heads": None,
        "head_dim": None, "intermediate_size": 24576, "vocab_size": 256000, "max_position_embeddings": 4096,
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "hidden_act": "relu2",
        "attention_dropout": 0.0, "partial_rotary_factor": 0.5,
    },
    "olmo": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None,
        "intermediate_size": 11008, "vocab_size": 50304, "max_position_embeddings": 2048, "tie_word_embeddings": False,
        "attention_bias": False, "hidden_act": "silu", "attention_dropout": 0.0,
    },
    "olmo2": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None,
        "intermediate_size": 11008, "vocab_size": 50304, "max_position_embeddings": 2048, "tie_word_embeddings": False,
        "attention_bias": False, "hidden_act": "silu", "attention_dropout": 0.0,
    },
    "olmo3": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None,
        "intermediate_size": 11008, "vocab_size": 50304, "max_position_embeddings": 2048, "tie_word_embeddings": False,
        "attention_bias": False, "sliding_window": 4096, "hidden_act": "silu", "attention_dropout": 0.0,
    },
    "olmoe": {
        "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": None,
        "intermediate_size": 2048, "vocab_size": 50304, "max_position_embeddings": 4096, "tie_word_embeddings": False,
        "attention_bias": False, "hidden_act": "silu", "num_experts": 64, "num_experts_per_tok": 8,
        "attention_dropout": 0.0,
    },
    "opt": {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072, "vocab_size": 50272,
        "max_position_embeddings": 2048, "tie_word_embeddings": True, "enable_bias": True,
        "layer_norm_elementwise_affine": True, "do_layer_norm_before": True, "word_embed_proj_dim": None,
        "activation_function": "relu", "dropout": 0.1, "attention_dropout": 0.0,
    },
    "persimmon": {
        "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 64, "intermediate_size": 16384,
        "vocab_size": 262144, "max_position_embeddings": 16384, "tie_word_embeddings": False, "qk_layernorm": True,
        "hidden_act": "relu2", "hidden_dropout": 0.0, "attention_dropout": 0.0, "partial_rotary_factor": 0.5,
    },
    "phi": {
        "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": None,
        "intermediate_size": 8192, "vocab_size": 51200, "max_position_embeddings": 2048, "tie_word_embeddings": False,
        "qk_layernorm": False, "hidden_act": "gelu_new", "resid_pdrop": 0.0, "attention_dropout": 0.0,
        "embd_pdrop": 0.0, "partial_rotary_factor": 0.5,
    },
    "phi3": {
        "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None,
        "intermediate_size": 8192, "vocab_size": 32064, "max_position_embeddings": 4096, "tie_word_embeddings": False,
        "sliding_window": None, "hidden_act": "silu", "resid_pdrop": 0.0, "attention_dropout": 0.0, "embd_pdrop": 0.0,
    },
    "phimoe": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 6400, "vocab_size": 32064, "max_position_embeddings": 131072,
        "tie_word_embeddings": False, "attention_bias": False, "lm_head_bias": False, "sliding_window": None,
        "hidden_act": "silu", "num_local_experts": 16, "num_experts_per_tok": 2, "attention_dropout": 0.0,
    },
    "qwen2": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "intermediate_size": 22016, "vocab_size": 151936, "max_position_embeddings": 32768,
        "tie_word_embeddings": False, "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28,
        "hidden_act": "silu", "attention_dropout": 0.0,
    },
    "qwen2_moe": {
        "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
        "intermediate_size": 5632, "vocab_size": 151936, "max_position_embeddings": 32768,
        "tie_word_embeddings": False, "qkv_bias": True, "sliding_window": 4096, "use_sliding_window": False,
        "max_window_layers": 28, "hidden_act": "silu", "num_experts": 60, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "decoder_sparse_step": 1,
        "attention_dropout": 0.0,
    },
    "qwen3": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "head_dim": 128, "intermediate_size": 22016, "vocab_size": 151936, "max_position_embeddings": 32768,
        "tie_word_embeddings": False, "attention_bias": False, "sliding_window": 4096, "use_sliding_window": False,
        "max_window_layers": 28, "hidden_act": "silu", "attention_dropout": 0.0,
    },
    "qwen3_moe": {
        "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 4,
        "intermediate_size": 6144, "vocab_size": 151936, "max_position_embeddings": 32768,
        "tie_word_embeddings": False, "attention_bias": False, "sliding_window": 4096, "use_sliding_window": False,
        "hidden_act": "silu", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "decoder_sparse_step": 1, "attention_dropout": 0.0,
    },
    "seed_oss": {
        "hidden_size": 4096, "num_hidden_layers": 64, "num_attention_heads": 80, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 27648, "vocab_size": 155136, "max_position_embeddings": 524288,
        "tie_word_embeddings": False, "attention_bias": True, "attention_out_bias": False, "mlp_bias": False,
        "hidden_act": "silu", "residual_dropout": 0.1, "attention_dropout": 0.1,
    },
    "smollm3": {
        "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
        "intermediate_size": 11008, "vocab_size": 128256, "max_position_embeddings": 32768,
        "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "sliding_window": None,
        "use_sliding_window": False, "no_rope_layer_interval": 4, "hidden_act": "silu", "attention_dropout": 0.0,
    },
    "stablelm": {
        "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "intermediate_size": 6912, "vocab_size": 50304, "max_position_embeddings": 4096, "tie_word_embeddings": False,
        "use_qkv_bias": False, "qk_layernorm": False, "hidden_act": "silu", "use_parallel_residual": False,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "partial_rotary_factor": 0.25,
    },
    "starcoder2": {
        "hidden_size": 3072, "num_hidden_layers": 30, "num_attention_heads": 24, "num_key_value_heads": 2,
        "intermediate_size": 12288, "vocab_size": 49152, "max_position_embeddings": 4096, "tie_word_embeddings": True,
        "use_bias": True, "sliding_window": None, "hidden_act": "gelu_pytorch_tanh", "residual_dropout": 0.0,
        "attention_dropout": 0.0, "embedding_dropout": 0.0,
    },
    "vaultgemma": {
        "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "intermediate_size": 9216, "vocab_size": 256000, "max_position_embeddings": 8192,
        "tie_word_embeddings": True, "attention_bias": False, "sliding_window": 4096,
        "hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": 50.0,
        "attention_dropout": 0.0,
    },
}
# fmt: on
"""Model type: field: default."""
