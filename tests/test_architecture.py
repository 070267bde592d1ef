"""The table of decoder families against transformers: every type is built on the meta device and compared."""

import contextlib
import dataclasses
import json
import re
from typing import Any

import pytest

from benchmarks.generate import defaults_text
from sft_play.errors import ModelError
from sft_play.models import families
from sft_play.models.config_json import KNOWN_MODELS, load_max_positions, parse_model_shape
from sft_play.models.families import CLASS_DEFAULTS, FIELD_ALIASES, MODEL_FAMILIES, WRAPPED_TYPES, UnknownArchitecture
from sft_play.models.shape import LayerKind, ModelShape
from tests.bundled import SHARED_SLOWLY, model_configs

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 128,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
N_EXPERTS = {
    **dict.fromkeys(("mixtral", "gpt_oss"), "num_local_experts"),
    **dict.fromkeys(("qwen3_moe", "olmoe"), "num_experts"),
    "glm4_moe": "n_routed_experts",
}
NEEDED: dict[str, dict[str, Any]] = {"hunyuan_v1_dense": {"head_dim": 16}, "ministral": {"head_dim": 16}}
"""Fields without which the class itself cannot be built."""

NO_DEFAULT: dict[str, dict[str, Any]] = {key: {"head_dim": 64} for key in ("hunyuan_v1_dense", "ministral", "glm4_moe")}
"""Fields that every real file of the type states, since the class has no default that works."""

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}), ("llama", {"head_dim": 32, "tie_word_embeddings": True}),
    ("llama", {"num_key_value_heads": None}), ("mistral", {"head_dim": 32, "sliding_window": None}),
    ("mistral", {"sliding_window": 32}), ("ministral", {"sliding_window": 32, "head_dim": 16}),
    ("mixtral", {"sliding_window": 32, "head_dim": 8}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}),
    ("qwen2", {"layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 3, "use_sliding_window": True}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    ("qwen3_moe", {"mlp_only_layers": [0, 3], "attention_bias": True, "head_dim": 32}),
    ("gemma2", {"attention_bias": True}), ("gemma3_text", {"sliding_window_pattern": 3, "num_hidden_layers": 7}),
    ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"]}),
    ("phi3", {"sliding_window": 16, "tie_word_embeddings": True}), ("olmo2", {"attention_bias": True}),
    ("olmo3", {"sliding_window": 16}), ("olmoe", {"attention_bias": True}),
    ("granite", {"attention_bias": True, "mlp_bias": True}), ("gpt_oss", {"attention_bias": False}),
    ("glm", {"attention_bias": False, "head_dim": 32}),
    ("glm4_moe", {"use_qk_norm": True, "attention_bias": True, "head_dim": 32}), ("ernie4_5", {"use_bias": True}),
    ("exaone4", {"sliding_window": 16, "sliding_window_pattern": 2}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 16, "attention_bias": True, "mlp_bias": True}),
    ("hunyuan_v1_dense", {"attention_bias": True, "head_dim": 32}),
]  # fmt: skip


def file_of(kind: str, **changes: Any) -> dict[str, Any]:
    """A config.json of small sizes."""
    sizes = {**SIZES, **(EXPERTS if kind in N_EXPERTS else {}), **NEEDED.get(kind, {})}
    if kind in N_EXPERTS:
        sizes[N_EXPERTS[kind]] = 4
    return {"model_type": kind, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **sizes, **changes}


def measured(config: dict[str, Any], *, name: str = "m") -> ModelShape:
    """The shape that the class has on the meta device."""
    from sft_play.trace.meta_shape import measure_shape_on_meta

    return measure_shape_on_meta(config, name=name)


def as_in_the_table(shape: ModelShape) -> ModelShape:
    """The shape with one kind for blocks that have the same layers and are set differently (rotations or none)."""
    plain = [dataclasses.replace(kind, settings="", count=0) for kind in shape.layers]
    kinds = list(dict.fromkeys(plain))
    order = tuple(kinds.index(plain[place]) for place in shape.layer_order)
    layers = tuple(dataclasses.replace(kind, count=order.count(place)) for place, kind in enumerate(kinds))
    return dataclasses.replace(shape, layers=layers, layer_order=order)


def _stacks(kind: LayerKind) -> set[tuple[str, int, tuple[int, ...]]]:
    """Stacks of experts; which of a matrix's sides are its inputs, its tensor does not tell."""
    return {(one.path, one.experts, tuple(sorted((one.inputs, one.outputs)))) for one in kind.expert_weights}


def check(config: dict[str, Any]) -> None:
    """The parsed shape equals what the class has on the meta device, block by block and module by module."""
    parsed, built = parse_model_shape(config, name="m"), as_in_the_table(measured(config))
    of_all = ("params", "embedding_params", "head_params", "tied", "vocab_size", "num_layers", "layer_order")
    for key in (*of_all, "expert_params", "window", "norms_per_layer", "attention_dropout"):
        assert getattr(parsed, key) == getattr(built, key), key
    assert sorted(item.path for item, _ in parsed.linears) == sorted(item.path for item, _ in built.linears)
    for mine, real in zip(parsed.layers, built.layers, strict=True):
        assert set(mine.linears) == set(real.linears)
        assert (sorted(mine.packable_sizes), _stacks(mine)) == (sorted(real.packable_sizes), _stacks(real))
        of_experts = ("num_experts", "expert_width", "expert_params", "router_params")
        for key in ("count", "params", "attention", "mlp_width", *of_experts, "norm_params", "other_params"):
            assert getattr(mine, key) == getattr(real, key), key


@pytest.mark.parametrize(("kind", "changes"), [*((kind, {}) for kind in sorted(MODEL_FAMILIES)), *VARIANTS])
def test_small_sizes_give_the_modules_of_the_class(kind, changes):
    check(file_of(kind, **changes))


@pytest.mark.parametrize("kind", sorted(MODEL_FAMILIES))
def test_fields_left_to_the_class_are_those_of_the_class(kind):
    width = CLASS_DEFAULTS[kind]["hidden_size"]
    check({"model_type": kind, "hidden_size": width, "num_hidden_layers": 3, **NO_DEFAULT.get(kind, {})})


def test_the_table_of_class_defaults_is_transformers_own():
    from transformers import CONFIG_MAPPING

    from benchmarks.generate import class_defaults

    seen = 0
    for kind, defaults in CLASS_DEFAULTS.items():
        own = {field.name: field.default for field in dataclasses.fields(CONFIG_MAPPING[kind])}
        for key, value in defaults.items():
            if key == "partial_rotary_factor":
                built = CONFIG_MAPPING[kind](**NO_DEFAULT.get(kind, {}))
                assert built.rope_parameters["partial_rotary_factor"] == value, kind
            else:
                assert own[key] == value, (kind, key)
            seen += 1
    assert set(CLASS_DEFAULTS) == set(MODEL_FAMILIES)
    assert seen > 300
    changed = {kind: dict.fromkeys(fields, 1) for kind, fields in CLASS_DEFAULTS.items()}
    for kind, fields in class_defaults(changed).items():
        assert {key: CLASS_DEFAULTS[kind][key] if key != "partial_rotary_factor" else 1 for key in fields} == fields
    written = families.DEFAULTS_FILE.read_text(encoding="utf-8")
    assert written == defaults_text(CLASS_DEFAULTS), "run make -C benchmarks generate"


def test_sizes_by_another_name_and_wrappers_are_read_as_transformers_reads_them():
    from transformers import CONFIG_MAPPING

    known = {other for others in FIELD_ALIASES.values() for other in others} | {"num_local_experts", "num_experts"}
    known |= {"n_routed_experts", "moe_num_experts", "qkv_bias", "bias", "num_mtp_layers", "num_nextn_predict_layers"}
    for kind in MODEL_FAMILIES:
        for usual, own in CONFIG_MAPPING[kind].attribute_map.items():
            assert {usual, own} & known, (kind, usual, own)
    for wrapper, kind in WRAPPED_TYPES.items():
        assert CONFIG_MAPPING[wrapper]().get_text_config().model_type == kind, wrapper
    assert len(WRAPPED_TYPES) >= 8


@pytest.mark.parametrize("wrapper", ["gemma3", "mistral3", "llava"])
@pytest.mark.parametrize("tied", [None, True, False])
def test_a_wrapper_means_its_language_model(wrapper, tied):
    inner = {key: value for key, value in file_of(WRAPPED_TYPES[wrapper]).items() if key != "model_type"}
    config = {"model_type": wrapper, "text_config": inner, "vision_config": {}}
    check(config | ({} if tied is None else {"tie_word_embeddings": tied}))


ROWS = [*{id(known): (name, known) for name, known in KNOWN_MODELS.items()}.values()]


def test_known_models_have_the_shapes_of_their_classes():
    checked = 0
    for name, known in ROWS:
        try:
            parsed = parse_model_shape(known.config, name=name)
        except UnknownArchitecture:
            if "text_config" not in known.config:  # a published count is of the whole class
                params = measured(known.config, name=name).params
                assert params == (known.params or params), name
                checked += 1
            continue
        built = as_in_the_table(measured(known.config, name=name))
        assert parsed.params == built.params == (known.params or built.params), name
        assert parsed.layer_order == built.layer_order, name
        assert [set(kind.linears) for kind in parsed.layers] == [set(kind.linears) for kind in built.layers], name
        assert [kind.attention for kind in parsed.layers] == [kind.attention for kind in built.layers], name
        checked += 1
    assert checked > 120


def test_known_models_are_built_with_the_parameters_of_their_names():
    """Of image-text models the class with its towers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    checked = 0
    for name, known in ROWS:
        fields = {key: value for key, value in known.config.items() if key != "quantization_config"}
        config = AutoConfig.for_model(**fields)
        with torch.device("meta"):
            auto = AutoModelForImageTextToText if "vision_config" in fields else AutoModelForCausalLM
            params = auto.from_config(config).num_parameters()
        assert params == (known.params or params), name
        # 8x7B and 17B-16E are not sizes of a whole model
        for size, unit in re.findall(r"(?<![\w.])([\d.]+)([bm])(?![a-z]|-\d+e)", name.lower())[:1]:
            assert 0.8 < params / float(size) / {"b": 1e9, "m": 1e6}[unit] < 1.7, (name, params)
            checked += 1
    assert checked > 120


@pytest.mark.parametrize(("config", "named"), [
    ({"model_type": "jamba", "hidden_size": 64}, "jamba"),
    (file_of("qwen3", layer_types=["linear_attention"] + ["full_attention"] * 4), "linear_attention"),
    # masks of dropout, and activations of several steps, which the estimate does not count
    (file_of("phi3", resid_pdrop=0.1), "resid_pdrop"),
    (file_of("phi3", embd_pdrop=0.1), "embd_pdrop"),
    (file_of("llama", hidden_act="gelu_new"), "hidden_act"),
])  # fmt: skip
def test_what_the_table_does_not_know_is_unknown_not_guessed(config, named):
    with pytest.raises(UnknownArchitecture, match=named):
        parse_model_shape(config, name="m")


@pytest.mark.parametrize("origin", SHARED_SLOWLY)
def test_published_configs_have_the_modules_of_their_classes(origin):
    checked = 0
    for path in sorted(model_configs(origin).glob("*/config.json")):
        with contextlib.suppress(UnknownArchitecture):
            check(json.loads(path.read_text(encoding="utf-8")))
            checked += 1
    assert checked >= 17


@pytest.mark.parametrize(("config", "positions"), [
    ({"model_type": "gpt2", "n_embd": 64, "n_positions": 96}, 96),
    ({"model_type": "opt", "hidden_size": 64, "max_position_embeddings": 48}, 48),
    ({"model_type": "qwen3_5", "text_config": {"max_position_embeddings": 72, "hidden_size": 64}}, 72),
    ({"model_type": "bloom", "hidden_size": 64}, None),
    ({"model_type": "bloom", "max_position_embeddings": "many"}, None),
    (file_of("llama", max_position_embeddings=80), 80),
    ({"model_type": "bert", "max_position_embeddings": 512}, None),
])  # fmt: skip
def test_positions_are_read_of_every_class(config, positions, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_max_positions(str(tmp_path)) == positions


def test_modules_that_share_a_name_are_told_apart_by_their_paths():
    shape = measured({"model_type": "gpt2", **SIZES})
    assert {linear.path: (linear.inputs, linear.outputs) for linear in shape.layers[0].linears} == {
        "attn.c_attn": (64, 192), "attn.c_proj": (64, 64), "mlp.c_fc": (64, 256), "mlp.c_proj": (256, 64),
    }  # fmt: skip
    assert [linear.path for linear, _ in shape.linears if linear.matches("c_proj")] == ["attn.c_proj", "mlp.c_proj"]
    assert [linear.path for linear, _ in shape.linears if linear.matches("attn.c_proj")] == ["attn.c_proj"]
    assert not [linear for linear, _ in shape.linears if linear.matches("proj")]


@pytest.mark.parametrize(("fields", "alibi", "dropout"), [
    ({"model_type": "bloom", **SIZES}, True, 0.0), ({"model_type": "falcon", **SIZES, "alibi": True}, True, 0.0),
    ({"model_type": "falcon", **SIZES, "attention_dropout": 0.2}, False, 0.2),
    ({"model_type": "gpt2", **SIZES}, False, 0.1),
    ({"model_type": "codegen", **SIZES, "attn_pdrop": 0.3, "rotary_dim": 8}, False, 0.3),
    ({"model_type": "qwen3_next", **SIZES}, False, 0.0),
], ids=lambda value: value["model_type"] if isinstance(value, dict) else "")  # fmt: skip
def test_what_decides_on_masks_is_read_of_measured_classes_too(fields, alibi, dropout):
    shape = measured(fields)
    assert (shape.uses_alibi, shape.attention_dropout) == (alibi, dropout)


def test_blocks_that_differ_are_counted_by_kind():
    # Gemma-3: 7 blocks, every sixth one sees everything
    shape = parse_model_shape(file_of("gemma3_text", num_hidden_layers=7, sliding_window=16), name="m")
    assert {kind.attention: kind.count for kind in shape.layers} == {"sliding": 6, "full": 1}
    assert (shape.layer_order, shape.window) == ((0, 0, 0, 0, 0, 1, 0), 16)
    # without a window no rule asks for its fields
    shape = parse_model_shape(file_of("exaone4", sliding_window=None, sliding_window_pattern=None), name="m")
    assert (shape.window, {kind.attention for kind in shape.layers}) == (None, {"full"})
    # GLM-4.5: the first 3 blocks of 5 have no experts
    shape = parse_model_shape(file_of("glm4_moe", first_k_dense_replace=3), name="m")
    assert [(kind.count, kind.num_experts, kind.mlp_width) for kind in shape.layers] == [(3, 0, 96), (2, 4, 0)]


GOOD = file_of("llama")


@pytest.mark.parametrize(("config", "message"), [
    ([], "holds a list: it has no model_type"),
    ({"tokenizer_class": "LlamaTokenizer"}, "(a tokenizer's?): it has no model_type"),
    ({"peft_type": "LORA", "base_model_name_or_path": "a/b"}, "an adapter's; name the base model, here a/b"),
    ({"model_type": "t5", "d_model": 512}, "an encoder with a decoder"),
    ({"model_type": "bert", "hidden_size": 768}, "is an encoder"),
    ({**GOOD, "architectures": ["LlamaForSequenceClassification"]}, "not a causal language model"),
    ({**GOOD, "is_encoder_decoder": True}, "an encoder with a decoder"),
    ({**GOOD, "hidden_size": -64}, "hidden_size: -64; the plan needs a whole number"),
    ({**GOOD, "hidden_size": 10**12}, "hidden_size: 1000000000000; no model is that large"),
    ({**GOOD, "hidden_size": 66}, "hidden_size: 66 and num_attention_heads: 4; the first must be a multiple"),
    ({**GOOD, "num_attention_heads": 6, "head_dim": 16, "num_key_value_heads": 4}, "num_key_value_heads: 4"),
    ({**GOOD, "vocab_size": True}, "vocab_size: true"),
    ({**GOOD, "tie_word_embeddings": "yes"}, 'tie_word_embeddings: "yes"; it must be true or false'),
    ({"model_type": "llama"}, "hidden_size: null"),
    ({"model_type": "gemma3", "text_config": []}, "text_config of its config.json is not a mapping"),
    ({**file_of("qwen3"), "layer_types": ["full_attention"]}, "has 1 layer_types and num_hidden_layers: 5"),
    ({**file_of("phi3"), "resid_pdrop": 2}, "resid_pdrop: 2; it must be a number from 0 to 1"),
    ({**file_of("gemma2"), "attn_logit_softcapping": "x"}, "it must be a number above 0"),
])  # fmt: skip
def test_a_config_json_that_is_none_gives_one_message(config, message):
    with pytest.raises(ModelError) as caught:
        parse_model_shape(config, name="m")
    assert message in str(caught.value)
    assert not isinstance(caught.value, UnknownArchitecture)
    assert "\n" not in str(caught.value)


def test_any_value_in_any_field_is_a_shape_or_a_message():
    values: list[object] = [None, -1, 0, 1.5, "x", [], {}, [1], True, 10**30, "ü" * 500]
    tried = 0
    for kind in MODEL_FAMILIES:
        for key in CLASS_DEFAULTS[kind]:
            for value in values:
                with contextlib.suppress(ModelError):
                    assert parse_model_shape({**file_of(kind), key: value}, name="m").params > 0
                tried += 1
    assert tried > 2500


@pytest.mark.parametrize("kind", sorted(MODEL_FAMILIES))
def test_fused_attention_is_planned_where_the_class_calls_it(kind):
    """A plan with sdpa for a class that has none would leave out S x S scores."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as CLASSES

    config, sinks = AutoConfig.for_model(kind), MODEL_FAMILIES[kind].has_sinks
    is_capped = getattr(config, "attn_logit_softcapping", None) is not None
    assert (not sinks and not is_capped) == CLASSES[type(config)]._supports_sdpa
