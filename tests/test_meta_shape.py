"""Shapes measured on the meta device: for model types that the table of families does not have."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sft_play.errors import ModelError
from sft_play.models.config_json import load_config_json, parse_model_shape
from sft_play.models.families import UnknownArchitecture
from sft_play.trace import meta_shape
from sft_play.trace.build import language_model_config as trace_config_of
from sft_play.trace.confirm import cached_shape
from sft_play.trace.meta_shape import measure_shape_on_meta
from sft_play.trace.settings import StepSettings
from sft_play.training.class_checks.small_model import small_config
from sft_play.training.model.language_model import prepare_text_config

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
UNKNOWN = {
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "num_experts": 4},
    "mamba": {},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "qwen3_next": {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16,
                   "shared_expert_intermediate_size": 32},
    "gemma3n_text": {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": 256, "intermediate_size": [96] * 4,
                     "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": {"head_dim": 16, "vocab_size_per_layer_input": 256},
    "bitnet": {},
    "granitemoehybrid": {"mamba_n_heads": 8, "layers_block_type": ["mamba", "attention"] * 2},
}  # fmt: skip


def config_of(kind):
    return {"model_type": kind, **SMALL, **UNKNOWN[kind]}


def measured_again(config, **options):
    pytest.fail("measured again")


def test_a_measured_shape_is_remembered_by_config_and_versions(tmp_path, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path))
    config = config_of("jamba")
    first = cached_shape(config, name="m")
    assert first == measure_shape_on_meta(config, name="m")
    (file,) = (tmp_path / "shapes").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(meta_shape, "measure_shape_on_meta", measured_again)
        assert cached_shape(config, name="m") == first
        assert cached_shape(config, name="n").name == "n"
        for changed, options in (({"vocab_size": 512}, {}), ({}, {"trust_remote_code": True})):
            with pytest.raises(pytest.fail.Exception, match="measured again"):
                cached_shape({**config, **changed}, name="m", **options)
    file.write_text('{"name": "m"}')
    assert cached_shape(config, name="m") == first
    monkeypatch.setattr(meta_shape, "measure_shape_on_meta", measured_again)
    monkeypatch.setattr("sft_play.machine.software.installed_version", lambda library: "99")
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        cached_shape(config, name="m")


@pytest.mark.parametrize("kind", sorted(UNKNOWN))
def test_an_unknown_type_is_measured_whole(kind):
    config = config_of(kind)
    with pytest.raises(UnknownArchitecture):
        parse_model_shape(config, name="m")
    shape = measure_shape_on_meta(config, name="m")
    fields = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields))
    assert shape.params == sum(parameter.numel() for parameter in model.parameters())
    assert shape.num_layers == len(shape.layer_order) == sum(layer.count for layer in shape.layers) == 4
    head = model.get_output_embeddings()
    linears = [one for one in model.modules() if isinstance(one, torch.nn.Linear) and one is not head]
    assert sum(one.weight.numel() for one in linears) == sum(linear.weights * count for linear, count in shape.linears)
    assert "measured on its class" in shape.source_note


@pytest.mark.parametrize(
    ("kind", "dtype"), [("xglm", torch.bfloat16), ("openai-gpt", torch.float32), ("llama", torch.bfloat16)]
)
def test_buffers_are_counted_in_the_dtype_that_they_are_loaded_in(kind, dtype):
    """Tables of positions are in the dtype of the weights; rotary frequencies and masks have their own."""
    config = small_config(CONFIG_MAPPING[kind]().get_text_config())
    with torch.device("meta"):
        loaded = AutoModelForCausalLM.from_config(prepare_text_config(config), dtype=dtype)
    shape = measure_shape_on_meta(json.loads(json.dumps(config.to_dict(), default=str)), name="m")
    counted = shape.buffer_bytes + dtype.itemsize * shape.buffer_elements
    assert sum(one.nbytes for one in loaded.buffers()) == counted > 0


@pytest.mark.parametrize("kind", ["bamba", "nemotron_h"])
def test_a_config_that_transformers_wrote_is_read(kind, tmp_path, monkeypatch):
    """Their `time_step_limit` ends at infinity, which JSON lacks."""
    sizes = {"num_hidden_layers": 4} if kind == "nemotron_h" else {**SMALL, **UNKNOWN.get(kind, {})}
    written = AutoConfig.for_model(kind, **sizes, time_step_limit=[0.0, float("inf")])
    written.save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    read = load_config_json(str(tmp_path))
    assert read["time_step_limit"] == [0.0, float("inf")]
    assert trace_config_of(StepSettings(model=read)).time_step_limit[1] == float("inf")
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    first = cached_shape(read, name="m")
    monkeypatch.setattr(meta_shape, "measure_shape_on_meta", measured_again)
    assert cached_shape(read, name="m") == first


def test_experts_and_routers_are_no_linear_layers():
    experts = {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
    shape = measure_shape_on_meta({"model_type": "qwen3_moe", **SMALL, **experts}, name="m")
    # 4 experts of gate, up and down, 64 x 32 each, in each of 4 blocks
    assert (shape.expert_params, shape.layers[0].router_params) == (4 * 4 * 3 * 64 * 32, 4 * 64)
    assert {linear.name for linear in shape.layers[0].linears} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert (shape.num_experts, shape.experts_per_token, shape.layers[0].expert_width) == (4, 2, 32)


@pytest.mark.parametrize(("config", "message"), [
    ({"model_type": "no-such-type", **SMALL}, "transformers cannot build its class"),
    ({"model_type": "jamba", "hidden_size": "x"}, 'hidden_size: "x"'),
    ({"model_type": "jamba", **SMALL, "attn_layer_period": "x"}, "transformers cannot"),
    ({"model_type": "jamba", **SMALL, "num_attention_heads": 0}, "num_attention_heads: 0; the plan needs"),
    ({"model_type": "gemma4", "text_config": {**SMALL, "hidden_size": -64}}, "hidden_size: -64"),
    ({"model_type": "t5", "d_model": 64}, "an encoder with a decoder"),
    ({"model_type": "chameleon", **SMALL}, "does not know as a causal language model"),
    ({"model_type": "idefics", **SMALL}, "blocks read an image in every pass"),
    ({"model_type": "reformer", **SMALL}, "rows of one length alone"), ([], "holds a list"),
])  # fmt: skip
def test_what_cannot_be_built_gives_one_message(config, message):
    with pytest.raises(ModelError, match=message) as caught:
        measure_shape_on_meta(config, name="m")
    assert "\n" not in str(caught.value)


MINE = """
import torch
from transformers import PreTrainedConfig, PreTrainedModel
class MyConfig(PreTrainedConfig):
    model_type = "my-own"
    width: int = 8
class MyLM(PreTrainedModel):
    config_class = MyConfig
    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(16, config.width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(config.width, config.width) for _ in range(3))
        self.head = torch.nn.Linear(config.width, 16, bias=False)
        self.post_init()
    get_input_embeddings = lambda self: self.embed
    get_output_embeddings = lambda self: self.head
"""


def test_custom_code_is_not_run_unless_it_is_allowed(tmp_path):
    config = {"model_type": "my-own", "auto_map": {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyLM"}}
    (tmp_path / "config.json").write_text(json.dumps({**config, "width": 8}))
    (tmp_path / "mine.py").write_text(MINE)
    with pytest.raises(ModelError, match=r"model\.trust_remote_code=true"):
        measure_shape_on_meta(config, name=str(tmp_path))
    shape = measure_shape_on_meta(config, name=str(tmp_path), trust_remote_code=True)
    assert (shape.params, shape.num_layers) == (16 * 8 + 3 * (8 * 8 + 8) + 16 * 8, 3)


@pytest.mark.build
@pytest.mark.parametrize(("kind", "packed"), [("falcon", False), ("gpt2", True), ("opt", True), ("qwen3_next", True)])
def test_4_bits_are_counted_where_transformers_puts_them(kind, packed):
    """It replaces plain linear layers only: Falcon's, of a class of its own, stay in 16 bits."""
    from bitsandbytes.nn import Linear4bit

    config = config_of(kind) if kind == "qwen3_next" else {"model_type": kind, **SMALL}
    shape = measure_shape_on_meta(config, name="m")
    assert (shape.packable_params > 0) == packed
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    replace_with_bnb_linear(model, ["lm_head"], quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    assert any(isinstance(module, Linear4bit) for module in model.modules()) == packed


@pytest.mark.parametrize("layers", [6, 13])
def test_blocks_that_read_what_others_left_at_boundaries_are_kinds_of_their_own(layers):
    """Inkling 2's read one state more behind every sixth block: 24 of them alike were planned 5% low."""
    config = small_config(AutoConfig.for_model("inkling2_text"))
    fields = {**config.to_dict(), "num_hidden_layers": layers, "layer_types": (config.layer_types * 3)[:layers]}
    shape = measure_shape_on_meta(json.loads(json.dumps(fields, default=str)), name="m")
    groups = [set(shape.layer_order[first : first + 6]) for first in range(0, layers, 6)]
    assert sum(map(len, groups)) == len(set.union(*groups))
