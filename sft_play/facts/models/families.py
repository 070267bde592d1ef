"""The decoder families of transformers: which modules a block of each model type has, and where their sizes come from.

Read from modeling_*.py of transformers 5.23; a test builds every type on the meta device and compares module by
module. A value that is a string names the field of config.json that decides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from sft_play.facts.models.model_shape import LayerKind, NormKind

Choice = bool | str
"""A fixed answer, or the name of the true-or-false field that gives it."""

WindowRule = Literal[
    "none",
    "all",
    "late",
    "early_odd",
    "every_2",
    "every_4",
    "every_6",
    "first_of_4",
    "pattern",
    "no_rope",
    "chunked",
]
"""Which blocks see a window where config.json has no `layer_types`: none; all (if there is a window); those from
`max_window_layers` on; every second one before it; all but every nth; all but the first of four; by
`sliding_window_pattern`; those without rotary positions; by chunks."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts instead of the MLP."""

    count: str = "num_local_experts"
    width: str = "moe_intermediate_size"
    router: Literal["plain", "linear"] = "plain"
    """plain: a weight outside any linear layer; linear: a linear layer, which auto targets include."""
    router_path: str = "mlp.gate"
    router_extra: Literal["none", "bias", "correction"] = "none"
    """bias: one number per expert in the router; correction: the same, as a parameter beside it."""
    weights: tuple[str, str] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    """Paths of the tensors that hold all experts' gates and up projections, and their down projections."""
    expert_bias: bool = False
    clamped: bool = False
    """The gate is gpt-oss's: `_apply_gate`."""
    fp32_weights: bool = False
    """The router's weights are fp32 under autocast too."""
    own_code: bool = False
    """The class runs its experts by code of its own, which `experts_implementation` does not reach."""
    shared: str | None = None
    """Path of the MLP that every token passes; None: none."""
    shared_count: str | None = None
    """The field with the number of shared experts, whose widths add up."""
    shared_width: str | None = None
    """The field with the width of one shared expert; None: that of a routed one."""
    shared_gate: bool = False
    shared_fused: bool = False
    """The shared MLP is `input_linear` (gate and up) and `output_linear`."""
    where: Literal["all", "after_dense", "sparse_step", "interleaved", "range"] = "all"
    """Which blocks have experts: all; those from `first_k_dense_replace` on; by `decoder_sparse_step` and
    `mlp_only_layers`; by `interleave_moe_layer_step`; from `moe_layer_start_index` to `moe_layer_end_index`."""


_SPLIT = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_PLAIN = ("mlp.up_proj", "mlp.down_proj")
_GPT2_MLP = ("mlp.c_fc", "mlp.c_proj")
_GRANITE_EXPERTS = ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj")
_NEOX_MLP = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")


@dataclass(frozen=True)
class Family:
    """The blocks of one model type. The defaults are Llama's without its biases."""

    qkv: tuple[str, ...] = _SPLIT
    """Paths of the query, key and value projections: three, or one that holds all."""
    out: str = "self_attn.o_proj"
    mlp: tuple[str, ...] = _GATED
    """Gate, up, down; up and down; or gate with up in one, and down (`fused_gate`)."""
    fused_gate: bool = False
    qkv_bias: Choice = False
    out_bias: Choice = False
    mlp_bias: Choice = False
    head_bias: Choice = False
    norm: NormKind = "rms"
    norm_bias: bool = False
    norms: int = 2
    last_norm: bool = True
    embedding_norm: bool = False
    qk_norm: Choice = False
    qk_norm_size: Literal["head", "width"] = "head"
    """head: one weight for all heads; width: as many as the heads are wide together."""
    qk_norm_bias: bool = False
    grouped: bool = True
    """Whether keys have heads of their own (`num_key_value_heads`)."""
    own_head_dim: bool = True
    """Whether `head_dim` of config.json is used."""
    width: str = "intermediate_size"
    dense_width: str | None = None
    """The field with the width of blocks without experts, where it differs."""
    position_offset: int | None = None
    """Extra rows of a learned position embedding; None: not learned."""
    rotary: bool = True
    alibi: Choice = False
    window: WindowRule = "none"
    window_field: str = "sliding_window"
    parallel: Choice = False
    sinks: bool = False
    sdpa: bool = True
    """The class can call PyTorch's fused attention."""
    mla: bool = False
    experts: Experts | None = None


_LLAMA = Family(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias")
_BIASED = Family(qkv_bias="attention_bias", out_bias="attention_bias")
_ERNIE = Family(qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias")
_NEMOTRON = replace(_LLAMA, mlp=_PLAIN, norm="layer", norm_bias=True)
_GLM = Family(qkv_bias="attention_bias", mlp=("mlp.gate_up_proj", "mlp.down_proj"), fused_gate=True)
_LAYER_NORM = Family(
    qkv_bias=True, out_bias=True, mlp_bias=True, norm="layer", norm_bias=True, grouped=False, own_head_dim=False,
)  # fmt: skip
"""What the classes of GPT-2's and GPT-NeoX's time have in common."""
_GPT2 = replace(
    _LAYER_NORM, qkv=("attn.c_attn",), out="attn.c_proj", mlp=_GPT2_MLP, width="n_inner", position_offset=0,
    rotary=False,
)  # fmt: skip
_NEOX = replace(
    _LAYER_NORM, qkv=("attention.query_key_value",), out="attention.dense", mlp=_NEOX_MLP, qkv_bias="attention_bias",
    out_bias="attention_bias", parallel="use_parallel_residual",
)  # fmt: skip
_OPT = replace(_LAYER_NORM, out="self_attn.out_proj", mlp=("fc1", "fc2"), position_offset=2, rotary=False)
_AFTER_DENSE = Experts(
    "n_routed_experts", shared="mlp.shared_experts", shared_count="n_shared_experts", where="after_dense",
)  # fmt: skip
_DEEPSEEK = replace(_BIASED, mla=True, experts=_AFTER_DENSE)

TENSOR_PARALLEL = frozenset({
    "arcee", "cohere", "cohere2", "cwm", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "gpt_neox",
    "granite", "helium", "internlm3", "jais2", "llama", "ministral", "ministral3", "mistral", "nemotron",
    "olmo", "phi", "qwen2", "qwen3", "seed_oss", "smollm3", "starcoder2", "vaultgemma",
})  # fmt: skip
"""Model types whose blocks transformers' tensor-parallel plan splits completely, by heads and MLP columns
(`base_model_tp_plan` of configuration_*.py); a test splits one of each and compares its gradients."""

MOVED_BY_PEFT = frozenset({
    "UnlimitedOcrTextModel", "afmoe", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32",
    "Dots3NoteTextModel", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm4v_moe",
    "glm_moe_dsa", "hunyuan_v1_moe", "longcat_flash", "mellum", "minimax", "minimax_m2", "mixtral", "olmoe",
    "qwen3_moe", "qwen3_next", "qwen3_omni_moe", "qwen3_omni_moe_text", "qwen3_omni_moe_thinker", "solar_open",
})  # fmt: skip
"""Model types whose adapters PEFT moves to the routed experts where they are named as below: on the experts of
transformers before 5.0, as it believes (peft/utils/transformers_weight_conversion.py, `_convert_peft_config_moe`), and
so away from shared experts and dense blocks of the same names; a test compares the list with PEFT's."""
MOVED_NAMES = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
MOVED_WORDS = "PEFT would put its adapter on this model's routed experts, which get none here"
_TUPLE = "an adapter there fails: it returns a tuple"
REFUSED_NAMES = {"llama4_text": {"router": _TUPLE}, "phimoe": {"router": _TUPLE}}
"""Linear layers of the table's model types on which an adapter fails, and why: what
`training/proofs/adapter_trial` finds on a small model of each; a test tries all of them again."""


def why_no_adapter(model_type: str, name: str) -> str | None:
    """Why linear layers of this name get no adapter; None where they take one, as far as is known without a trial."""
    # a language model's adapter is opened on its whole class, too: that of glm4v_moe_text on glm4v_moe
    if {model_type, model_type.removesuffix("_text")} & MOVED_BY_PEFT and name in MOVED_NAMES:
        return MOVED_WORDS
    return REFUSED_NAMES.get(model_type, {}).get(name)


def marked(kind: LayerKind, model_type: str) -> LayerKind:
    """The same kind of block, its linear layers marked where an adapter would not stay."""
    linears = tuple(replace(one, adaptable=why_no_adapter(model_type, one.name) is None) for one in kind.linears)
    return replace(kind, linears=linears)


FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "internlm3": _LLAMA,
    "granite": _LLAMA,
    "smollm3": replace(_LLAMA, window="no_rope"),
    "helium": Family(qkv_bias="attention_bias", mlp_bias="mlp_bias"),
    "arcee": replace(_LLAMA, mlp=_PLAIN),
    "cwm": Family(mlp_bias="mlp_bias", window="first_of_4"),
    "seed_oss": Family(qkv_bias="attention_bias", out_bias="attention_out_bias", mlp_bias="mlp_bias"),
    "ernie4_5": _ERNIE,
    "hunyuan_v1_dense": replace(_BIASED, qk_norm=True),
    "mistral": Family(window="all"),
    "ministral": Family(window="all"),
    "ministral3": Family(window="all"),
    "qwen2": Family(qkv_bias=True, window="late"),
    "qwen3": replace(_BIASED, qk_norm=True, window="late"),
    "gemma": replace(_BIASED, norm="gemma"),
    "gemma2": replace(_BIASED, norm="gemma", norms=4, window="every_2"),
    "gemma3_text": replace(_BIASED, norm="gemma", norms=4, qk_norm=True, window="every_6"),
    "vaultgemma": replace(_BIASED, norm="gemma", window="every_2", sdpa=False),
    "phi": Family(
        out="self_attn.dense", mlp=("mlp.fc1", "mlp.fc2"), qkv_bias=True, out_bias=True, mlp_bias=True, head_bias=True,
        norm="layer", norm_bias=True, norms=1, qk_norm="qk_layernorm", qk_norm_bias=True, parallel=True,
    ),
    "phi3": Family(
        qkv=("self_attn.qkv_proj",), mlp=("mlp.gate_up_proj", "mlp.down_proj"), fused_gate=True, window="all",
    ),
    "starcoder2": replace(_ERNIE, mlp=_GPT2_MLP, norm="layer", norm_bias=True, window="all"),
    "stablelm": Family(
        qkv_bias="use_qkv_bias", norm="layer", norm_bias=True, qk_norm="qk_layernorm", qk_norm_size="width",
        own_head_dim=False, parallel="use_parallel_residual",
    ),
    "cohere": replace(_BIASED, norm="layer", norms=1, qk_norm="use_qk_norm", qk_norm_size="width", parallel=True),
    "cohere2": replace(_BIASED, norm="layer", norms=1, parallel=True, window="every_4"),
    "olmo": replace(_BIASED, norm="none", own_head_dim=False),
    "olmo2": replace(_BIASED, qk_norm=True, qk_norm_size="width"),
    "olmo3": replace(_BIASED, qk_norm=True, qk_norm_size="width", window="every_4"),
    "glm": _GLM,
    "glm4": replace(_GLM, norms=4),
    "exaone4": Family(qk_norm=True, window="pattern"),
    "nemotron": _NEMOTRON,
    "jais2": _NEMOTRON,
    "persimmon": replace(
        _LAYER_NORM, qkv=("self_attn.query_key_value",), out="self_attn.dense", mlp=_NEOX_MLP, qk_norm="qk_layernorm",
        qk_norm_bias=True,
    ),
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neox": _NEOX,
    "opt": _OPT,
    "biogpt": _OPT,
    "bloom": replace(
        _LAYER_NORM, qkv=("self_attention.query_key_value",), out="self_attention.dense", mlp=_NEOX_MLP,
        embedding_norm=True, rotary=False, alibi=True, sdpa=False,
    ),
    "falcon": replace(
        _LAYER_NORM, qkv=("self_attention.query_key_value",), out="self_attention.dense", mlp=_NEOX_MLP,
        qkv_bias="bias", out_bias="bias", mlp_bias="bias", grouped=True, width="ffn_hidden_size", alibi="alibi",
    ),
    "mpt": Family(
        qkv=("attn.Wqkv",), out="attn.out_proj", mlp=("ffn.up_proj", "ffn.down_proj"), norm="layer", grouped=False,
        own_head_dim=False, rotary=False, alibi=True, sdpa=False,
    ),
    "mixtral": Family(window="all", experts=Experts(width="intermediate_size", fp32_weights=True)),
    "phimoe": replace(
        _BIASED, head_bias="lm_head_bias", norm="layer", norm_bias=True, window="all",
        experts=Experts(width="intermediate_size", router="linear", router_path="mlp.router"),
    ),
    "qwen2_moe": Family(
        qkv_bias="qkv_bias", window="early_odd",
        experts=Experts(
            "num_experts", shared="mlp.shared_expert", shared_width="shared_expert_intermediate_size", shared_gate=True,
            where="sparse_step",
        ),
    ),
    "qwen3_moe": replace(_BIASED, qk_norm=True, window="all", experts=Experts(where="sparse_step")),
    "olmoe": replace(
        _BIASED, qk_norm=True, qk_norm_size="width", own_head_dim=False,
        experts=Experts("num_experts", "intermediate_size"),
    ),
    "flex_olmo": replace(
        _BIASED, qk_norm=True, qk_norm_size="width", experts=Experts("num_experts", "intermediate_size"),
    ),
    "granitemoe": replace(
        _BIASED,
        experts=Experts(width="intermediate_size", router_path="block_sparse_moe.router", weights=_GRANITE_EXPERTS),
    ),
    "granitemoeshared": replace(
        _BIASED,
        experts=Experts(
            width="intermediate_size", router_path="block_sparse_moe.router", weights=_GRANITE_EXPERTS,
            shared="shared_mlp", shared_width="shared_intermediate_size", shared_fused=True,
        ),
    ),
    "gpt_oss": replace(
        _BIASED, norm="gemma", window="every_2", sinks=True,
        experts=Experts(
            width="intermediate_size", router_path="mlp.router", router_extra="bias", expert_bias=True, clamped=True,
        ),
    ),
    "deepseek_v2": replace(_DEEPSEEK, mlp_bias="mlp_bias", experts=replace(_AFTER_DENSE, fp32_weights=True)),
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": Family(qkv_bias="attention_bias", qk_norm="use_qk_norm", experts=_AFTER_DENSE),
    "dots1": replace(_BIASED, qk_norm=True, window="late", experts=_AFTER_DENSE),
    "ernie4_5_moe": replace(
        _ERNIE, head_bias="use_bias",
        experts=Experts(
            "moe_num_experts", router_extra="correction", shared="mlp.shared_experts",
            shared_count="moe_num_shared_experts", where="range",
        ),
    ),
    "hunyuan_v1_moe": replace(
        _BIASED, qk_norm=True,
        experts=Experts(
            "num_experts", "intermediate_size", router="linear", router_path="mlp.gate.wg", shared="mlp.shared_mlp",
        ),
    ),
    "llama4_text": replace(
        _BIASED, mlp=("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"),
        dense_width="intermediate_size_mlp", window="chunked", window_field="attention_chunk_size",
        experts=Experts(
            width="intermediate_size", router="linear", router_path="feed_forward.router", own_code=True,
            weights=("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
            shared="feed_forward.shared_expert", where="interleaved",
        ),
    ),
}  # fmt: skip
"""Model type: its blocks."""

WRAPPERS: dict[str, str] = {
    "aya_vision": "cohere2",
    "gemma3": "gemma3_text",
    "idefics3": "llama",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "mistral3": "mistral",
    "paligemma": "gemma",
    "smolvlm": "llama",
    "video_llava": "llama",
    "vipllava": "llama",
}
"""Image-text model type: its language model's type, where `text_config` does not give it."""

_ENCODERS = """
    albert bert bert-generation big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert electra ernie
    esm eurobert ibert longformer luke megatron-bert mobilebert modernbert mpnet mra nomic_bert nystromformer rembert
    roberta roberta-prelayernorm roc_bert roformer squeezebert xlm-roberta xlm-roberta-xl xmod yoso
"""
_ENCODER_DECODERS = """
    bart bigbird_pegasus blenderbot blenderbot-small encoder-decoder led longt5 m2m_100 marian mbart mt5 mvp nllb-moe
    pegasus pegasus_x plbart prophetnet switch_transformers t5 t5gemma t5gemma2 udop umt5
"""
_IMAGES_AND_SOUND = """
    audio-spectrogram-transformer beit clap clip convnext convnextv2 deit depth_anything detr dinov2 dpt hubert
    mask2former resnet sam segformer siglip siglip2 speecht5 swin swinv2 vit vit_mae wav2vec2 wavlm whisper yolos
"""

_WITHOUT_NEXT_TOKENS = {
    "blt": "a model of bytes in patches, of four transformers: no plan is made for more than one list of blocks",
    "diffusion_gemma": "a model that writes blocks of text by diffusion, not token by token",
    "diffusion_gemma_text": "a model that writes blocks of text by diffusion, not token by token",
    "gemma4_assistant": "a draft model, which reads the states of the model that it helps and is none on its own",
    "gemma4_unified_assistant": "a draft model, which reads the states of the model that it helps and is none on its "
    "own",
    "pi0": "a model of a robot's actions, not a language model",
    "shieldgemma2": "a classifier of images, which does not generate text",
}

OTHER_KINDS: dict[str, str] = {
    **dict.fromkeys(_ENCODERS.split(), "an encoder, which reads text but does not generate it"),
    **dict.fromkeys(_ENCODER_DECODERS.split(), "an encoder with a decoder, which this toolkit does not train"),
    **dict.fromkeys(_IMAGES_AND_SOUND.split(), "a model of images or sound, not a language model"),
    **_WITHOUT_NEXT_TOKENS,
}
"""Model types that are not decoders, and what they are."""
