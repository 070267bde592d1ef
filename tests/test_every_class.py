"""Every causal class that transformers ships is planned: its shapes are counted on its own modules."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.registry import REGISTRY_FILE, REQUIRED_FIELDS
from sft_play.config.load import config_from_text
from sft_play.errors import SftPlayError
from sft_play.machine.hardware import parse_hardware
from sft_play.models.families import NON_DECODER_TYPES
from sft_play.models.shape import AdapterPlacement
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.memory.block import LayerBytes
from sft_play.planner.memory.step_memory import MeasuredBlocks
from sft_play.runs.files import read_json
from sft_play.trace.meta_shape import measure_shape
from sft_play.training.class_checks.masking import _PADDED_LENGTHS
from sft_play.training.class_checks.small_model import config_field, small_config
from sft_play.training.model.nf4_experts import ExpertQuantizer

NOT_BUILT = {"emu3", "mllama"}
"""Types whose class cannot be built from its config's own defaults (transformers 5.23), of sound and images too."""


def classes() -> list[str]:
    """Model types of transformers' causal language models that are decoders of text."""
    return [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in NON_DECODER_TYPES]


def small_on_meta(kind: str):
    """A small model of the class on the meta device, or one of its default sizes, with its config; None where neither
    can be built."""
    for make in (small_config, lambda config: config):
        try:
            config = make(CONFIG_MAPPING[kind](**REQUIRED_FIELDS.get(kind, {})).get_text_config())
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(config), config
        except Exception:  # each class checks its sizes in its own way
            continue
    return None


def some_bytes(config, shape, precision, step, numbers, way, batch, *, is_accumulating=False) -> MeasuredBlocks:
    """A meter of blocks that measures nothing."""
    block = LayerBytes(3 << 20, saved=1 << 20, backward=3 << 20)
    return MeasuredBlocks(batch, 0, 0, block, (block,) * len(shape.layers), block)


def planned(kind: str) -> bool:
    """Whether the class could be built; then every mode was planned, or refused in words."""
    built = small_on_meta(kind)
    if built is None:
        return False
    model, config = built
    measured = measure_shape(model, config, name=kind)
    # how many bytes its blocks take is measured elsewhere (test_measured_blocks, benchmarks/registry.json)
    shape = dataclasses.replace(measured, adapter_placement=AdapterPlacement(()), block_meter=some_bytes)
    assert shape.params == sum(parameter.numel() for parameter in model.parameters()), kind
    for mode in ("lora", "full", "qlora"):
        run = config_from_text(f"model: {{name: m, max_seq_len: 256}}\ntuning: {{mode: {mode}}}\n", name="x")
        try:
            plan = make_plan(PlanRequest(run, shape, parse_hardware("1xH100")))
        except SftPlayError:
            continue
        assert plan.memory.allocated > 0, (kind, mode)
    return True


def test_every_class_is_planned():
    walked = {kind: planned(kind) for kind in classes()}
    assert {kind for kind, built in walked.items() if not built} == NOT_BUILT
    assert sum(walked.values()) > 140


@pytest.mark.parametrize(
    ("kind", "matrices"), [("nemotron_h", 2), ("jetmoe", 3), ("qwen3_moe", 3), ("gpt_oss", 3), ("granitemoehybrid", 3)]
)
def test_experts_are_counted_from_the_tensors_that_the_class_has(kind, matrices):
    model, config = small_on_meta(kind)
    shape = measure_shape(model, config, name=kind)
    layer = next(layer for layer in shape.layers if layer.num_experts)
    names = ("num_local_experts", "n_routed_experts", "num_experts")
    assert layer.num_experts == next(value for name in names if (value := getattr(config, name, None)))
    wide = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    assert layer.expert_width == wide
    assert layer.expert_params >= layer.num_experts * matrices * wide * shape.hidden_size  # or more: biases
    assert shape.experts_per_token > 0


@pytest.mark.parametrize("kinds", [("glm5_next", "dots3_note_text", "deepseek_v3"), None])
def test_a_small_config_is_one_that_its_class_reads(kinds):
    """What a class checks of its sizes when it reads a file holds for the small ones, too."""
    seen = 0
    for kind in kinds or classes():
        try:
            config = CONFIG_MAPPING[kind](**REQUIRED_FIELDS.get(kind, {})).get_text_config()
        except Exception:  # it has no defaults
            continue
        small = small_config(config)
        again = type(small)(**{key: value for key, value in small.to_dict().items() if key != "model_type"})
        for name in ("num_hidden_layers", "head_dim", "qk_head_dim", "qk_rope_head_dim", "qk_nope_head_dim"):
            assert config_field(again, name) == config_field(small, name), (kind, name)
        seen += 1
    assert seen == 3 if kinds else seen > 140


WIDTHS = {
    "adapter_rank", "additional_vocab_size", "attention_hidden_size", "block_multiple_of", "d_model",
    "decoder_ffn_dim", "dense_intermediate_size", "dff", "dim_model_base", "embed_dim", "ffn_dim",
    "ffn_hidden_size", "head_dim", "hidden_size", "intermediate_size", "intermediate_size_mlp", "kv_channels",
    "laurel_rank", "lru_width", "make_ngram_vocab_size_divisible_by", "mamba_d_ssm", "moe_hidden_size",
    "moe_shared_expert_intermediate_size", "n_embd",
    "n_routed_experts", "ngram_vocab_size_base", "num_experts", "num_sliding_attention_heads", "o_lora_rank",
    "ple_embed_dim", "share_expert_dim", "split_ngram_parts", "query_pre_attn_scalar", "router_hidden_size",
    "shared_experts_intermediate_size", "shared_intermediate_size", "swa_head_dim", "swa_num_attention_heads",
    "unpadded_vocab_size", "vocab_size", "vocab_size_per_layer_input", "word_embed_proj_dim", "zero_expert_num",
}  # fmt: skip
OTHERS = {
    *("max_position_embeddings", "original_max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    *("model_max_length", "context_length", "seed", "max_window_layers", "rope_theta", "cls_token_id", "sep_token_id"),
    "local_attention",  # ModernBERT's, whose `sliding_window` is made of it and is short
}


def test_small_models_do_in_short_rows_what_their_class_does_in_long_ones():
    """A size that is longer than the rows of proofs is a width or the longest row: windows are short."""

    def sizes(fields):
        for name, value in fields.items():
            if isinstance(value, dict):
                yield from sizes(value)
            elif isinstance(value, int) and not isinstance(value, bool) and value > max(_PADDED_LENGTHS):
                yield name

    found, seen = {}, 0
    for kind, row in read_json(REGISTRY_FILE)["classes"].items():
        if "plan" not in row:
            continue
        try:
            small = small_config(CONFIG_MAPPING[kind](**REQUIRED_FIELDS.get(kind, {})).get_text_config())
        except Exception:  # it has no defaults
            continue
        found |= dict.fromkeys(sizes(vars(small)), kind)
        seen += 1
    assert {name: kind for name, kind in found.items() if name not in WIDTHS | OTHERS} == {}
    assert seen > 190


@pytest.mark.parametrize(
    ("kind", "whole"),
    [("falcon_mamba", {"x_proj", "dt_proj", "out_proj"}), ("jamba", {"dt_proj"}), ("bamba", {"out_proj"}),
     ("gemma3n_text", {"prediction_coefs", "correction_coefs"}), ("bloom", set()), ("qwen3", set())],
)  # fmt: skip
def test_weights_that_a_class_reads_itself_are_not_packed_in_4_bits(kind, whole):
    """In bytes of 4 bits its own product or kernel would fail; plan, trace and run leave the same layers alone."""
    model, config = small_on_meta(kind)
    shape = measure_shape(model, config, name=kind)
    linears = [linear for linear, _ in shape.linears]
    assert {linear.name for linear in linears if not linear.is_packable} == whole
    assert shape.packable_params == sum(count * one.weights for one, count in shape.linears if one.is_packable) + sum(
        kind.count * stacked.weights for kind in shape.layers for stacked in kind.expert_weights
    )
    left_out = ExpertQuantizer.get_modules_to_not_convert(model)
    assert whole <= {name.rpartition(".")[2] for name in left_out}
