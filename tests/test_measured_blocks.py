"""Every causal class that transformers ships is planned: its shapes are counted on its own modules, and for classes
outside the table of families its own blocks are run, and a plan's activations are those."""

import dataclasses
import functools
import json
import random
import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.qwen3_5 import modeling_qwen3_5

from benchmarks.registry import REGISTRY_FILE, REQUIRED_FIELDS, wide_config
from sft_play.config.load import config_from_text
from sft_play.errors import ConfigError, ModelError, SftPlayError
from sft_play.machine.hardware import parse_hardware
from sft_play.models.config_json import parse_model_shape
from sft_play.models.families import MODEL_FAMILIES, NON_DECODER_TYPES
from sft_play.models.shape import AdapterPlacement
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.memory.block import LayerBytes
from sft_play.planner.memory.estimate import estimate_memory
from sft_play.planner.memory.step_memory import MeasuredBlocks, Step, create_step_simulation, interpolate
from sft_play.planner.plan import plan_from_json
from sft_play.runs.folder import read_json
from sft_play.trace import build, confirm
from sft_play.trace import step as blocks
from sft_play.trace.confirm import BlockMeter, leading_blocks, load_planned_shape, step_settings
from sft_play.trace.meta_shape import measure_shape, measure_shape_on_meta
from sft_play.trace.step import record_step, trace_context
from sft_play.training.class_checks.masking import _PADDED_LENGTHS
from sft_play.training.class_checks.small_model import config_field, small_config
from sft_play.training.model.nf4_experts import ExpertQuantizer
from tests.test_memory import BF16
from tests.test_meta_shape import SMALL
from tests.test_trace import phase_peaks

# Every causal class is planned: its shapes are counted on its own modules.
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
    packable = sum(count * one.weights for one, count in shape.linears if one.is_packable)
    stacked = sum(of.count * one.weights for of in shape.layers for one in of.expert_weights)
    assert shape.packable_params == packable + stacked
    left_out = ExpertQuantizer.get_modules_to_not_convert(model)
    assert whole <= {name.rpartition(".")[2] for name in left_out}


# Its blocks
WIDE = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 4096, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LINEAR = {"linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 64,
          "linear_value_head_dim": 64}  # fmt: skip
MAMBA = {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 32, "mamba_n_groups": 1, "mamba_chunk_size": 32}
CLASSES = {
    "qwen3_5_text": LINEAR,
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 1024},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"] * 3, "num_local_experts": 4,
                         "num_experts_per_tok": 2, "shared_intermediate_size": 512},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 3, "block_ff_dim": 1024},
    "gemma4_text": {"vocab_size_per_layer_input": 512, "global_head_dim": 64},
    "deepseek_v4": {},
    "flint": {},
}  # fmt: skip
OFTEN = ("qwen3_5_text", "falcon_h1", "lfm2")
"""Linear attention, a state beside attention, convolutions: in the default tests."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(confirm, "_measured_by_key", {})


def run(mode="lora", text="", length=256):
    rank = "" if mode == "full" else ", lora: {r: 8}"
    text = f"model: {{name: m, max_seq_len: {length}}}\ntuning: {{mode: {mode}{rank}}}\n{text}"
    return config_from_text(text, name="x")


def wide(kind, **more):
    """A config of moderate width, as transformers would write it."""
    if kind in ("deepseek_v4", "flint"):  # sizes that depend on one another
        config = small_config(CONFIG_MAPPING[kind]().get_text_config())
    else:
        config = CONFIG_MAPPING[kind](**{**WIDE, **CLASSES.get(kind, {}), **more}).get_text_config()
    return json.loads(json.dumps(config.to_dict(), default=str))


def measured_shape(fields, kind=""):
    shape = measure_shape_on_meta(fields, name=kind or "m")
    return dataclasses.replace(shape, block_meter=BlockMeter(json.dumps(fields)))


def step_of(shape, **changes):
    attention = "sdpa" if shape.has_sdpa else "eager"
    usual = Step(2, 1, 256, attention=attention, masks=False, saves=False, checkpointed_layers=0)
    return dataclasses.replace(usual, **changes)


@pytest.mark.parametrize("mode", ["lora", "qlora", "full"])
def test_measured_blocks_are_those_of_the_closed_form_where_it_knows_them(mode):
    """Llama's: 8 of its kind by the estimate, line by line, against the same by running them."""
    fields = {**WIDE, "model_type": "llama", "num_hidden_layers": 8}
    closed = parse_model_shape(fields, name="m")
    measured = dataclasses.replace(closed, block_meter=BlockMeter(json.dumps(fields)))
    draw = random.Random(7)
    for checkpointed in (0, None, 3):
        step = step_of(
            closed, micro_batch=draw.choice([1, 2, 8]), seq_len=draw.choice([128, 512, 1000]),
            grad_accum=draw.choice([1, 3]), checkpointed_layers=checkpointed, eval_batch=draw.choice([0, 8]),
        )  # fmt: skip
        known, found = (estimate_memory(run(mode), shape, BF16, step) for shape in (closed, measured))
        for moment, size in known.moments.items():
            rel = 0.01 if moment != "evaluation" else 0.002
            assert found.moments[moment] == pytest.approx(size, rel=rel), (moment, step)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in OFTEN else pytest.mark.slow) for kind in sorted(CLASSES)]
)
def test_a_class_outside_the_table_needs_what_its_whole_step_does(kind):
    """The plan from a few blocks against a trace of all of them, both ways of a block, adapters and full weights."""
    assert kind not in MODEL_FAMILIES
    fields = wide(kind)
    shape, rows = measured_shape(fields), random.Random(kind)
    for mode, layers in (("lora", 0), ("full", None)):
        step = step_of(shape, checkpointed_layers=layers, eval_batch=rows.randrange(1, 10))
        found = estimate_memory(run(mode), shape, BF16, step)
        # live bytes: the allocator rounds blocks up to the next MiB, which counts in small models
        peaks = phase_peaks(record_step(step_settings(run(mode), fields, shape, BF16, step)))
        assert found.allocated == pytest.approx(max(peaks.values()), rel=0.01), (mode, layers)
        assert found.moments["evaluation"] == pytest.approx(peaks["evaluation 1"], rel=0.003), (mode, layers)


@pytest.mark.slow
def test_every_class_outside_the_table_is_measured_or_refused_by_name():
    """What cannot be measured is named, with the reason; nothing is planned on a guess."""
    refused, measured = {}, 0
    for kind in classes():
        built = small_on_meta(kind) if kind not in MODEL_FAMILIES else None
        if built is None:
            continue
        fields = json.loads(json.dumps(built[1].to_dict(), default=str))
        try:
            shape = measured_shape(fields, kind)
            found = estimate_memory(run(), shape, BF16, step_of(shape))
            assert found.moments["forward"] > 0
            measured += 1
        except ModelError as error:
            refused[kind] = str(error)
    assert set(refused) <= REFUSED, refused
    assert measured > 70


REFUSED = {"blt", "longcat_flash", "xlm", "rwkv", "trocr", "xlstm", "dots3_note", "dots3_note_text"}
"""Types, by transformers 5.23, whose small models can be made and whose blocks cannot be measured."""


def test_long_rows_of_states_are_carried_on_from_short_ones():
    """Operators grow with the length, chunk by chunk in Python: as many tokens in short rows stand for long ones."""
    fields = wide("qwen3_5_text")
    shape = measured_shape(fields)
    step = step_of(shape, micro_batch=2, seq_len=1024)
    assert step.seq_len > confirm.MIN_CHUNK_TOKENS * 4
    lengths = []
    original = blocks.run_blocks

    def watched(settings, passes, *words, **options):
        passes = list(passes)
        lengths.extend(length for _, length in passes)
        return original(settings, passes, *words, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "run_blocks", watched)
        found = estimate_memory(run(length=1024), shape, BF16, step)
    assert set(lengths) == {confirm.MIN_CHUNK_TOKENS, 2 * confirm.MIN_CHUNK_TOKENS}
    peaks = phase_peaks(record_step(step_settings(run(length=1024), fields, shape, BF16, step)))
    assert found.allocated == pytest.approx(max(peaks.values()), rel=0.01)


def test_a_class_that_needs_values_is_measured_small_on_the_cpu():
    """JetMoE splits tokens by lists of numbers, which tensors without bytes do not have."""
    fields = {
        **SMALL, "model_type": "jetmoe", "hidden_size": 256, "kv_channels": 32, "num_local_experts": 4,
        "num_experts_per_tok": 2, "num_key_value_heads": 2, "num_attention_heads": 4, "intermediate_size": 512,
    }  # fmt: skip
    shape = measured_shape(fields)
    step = step_of(shape, micro_batch=1, seq_len=128)
    walk = create_step_simulation(run(length=128), shape, BF16, step)
    assert walk.was_measured_on_cpu
    # the same step with real tensors; attention's scores are counted in both, and the head's tile is a full one there
    settings = dataclasses.replace(step_settings(run(length=128), fields, shape, BF16, step), attention="eager")
    real = record_step(settings, uses_real_tensors=True)
    assert real.peak == pytest.approx(estimate_memory(run(length=128), shape, BF16, step).allocated, rel=0.1)
    twice = create_step_simulation(run(length=128), shape, BF16, step_of(shape, micro_batch=2, seq_len=128))
    assert twice.layers[1].saved == pytest.approx(2 * walk.layers[1].saved, rel=0.1)
    plan = make_plan(PlanRequest(run(length=128), shape, parse_hardware("1xH100")))
    assert any("few real tokens on the CPU" in reason for reason in plan.reasons)


def test_what_cannot_be_measured_is_refused_by_name_and_nothing_is_guessed(monkeypatch):
    def fails(*words, **options):
        raise confirm.TraceUnavailable("no kernel")

    shape = measured_shape(wide("qwen3_5_text"))
    for name in ("run_blocks", "count_operators"):
        monkeypatch.setattr(blocks, name, fails)
    with pytest.raises(ModelError, match=r"no plan can be made for the class qwen3_5_text: .* \(no kernel; on the CPU"):
        make_plan(PlanRequest(run(), shape, parse_hardware("1xH100")))


def test_a_class_that_repeats_its_blocks_is_refused(monkeypatch):
    """One of unknown name, as HRM-text."""
    monkeypatch.delitem(NON_DECODER_TYPES, "hrm_text")
    _, config = small_on_meta("hrm_text")
    shape = measured_shape(json.loads(json.dumps(config.to_dict(), default=str)))
    with pytest.raises(ModelError, match="calls a block more than once"):
        estimate_memory(run(), shape, BF16, step_of(shape))


def test_a_plan_says_where_its_activations_are_from():
    measured = make_plan(PlanRequest(run(), measured_shape(wide("lfm2")), parse_hardware("1xRTX3060")))
    assert measured.as_json()["activations_from"] == "measured"
    assert any("tensors without bytes" in reason for reason in measured.reasons)
    assert plan_from_json(json.loads(json.dumps(measured.as_json()))) == measured
    llama = parse_model_shape({**WIDE, "model_type": "llama"}, name="m")
    known = make_plan(PlanRequest(run(), llama, parse_hardware("1xRTX3060")))
    assert known.as_json()["activations_from"] == "blocks"
    assert not any(reason.startswith("activations:") for reason in known.reasons)


def test_passes_are_measured_once(tmp_path, monkeypatch):
    shape = measured_shape(wide("lfm2"))
    step = step_of(shape, eval_batch=3)
    first = estimate_memory(run(), shape, BF16, step)
    monkeypatch.setattr(confirm, "_measured_by_key", {})  # as in another process
    monkeypatch.setattr(blocks, "run_blocks", lambda *words, **options: pytest.fail("measured again"))
    assert estimate_memory(run(), shape, BF16, step) == first
    for file in (tmp_path / "cache" / "blocks").iterdir():
        file.write_text("[]x")
    monkeypatch.setattr(confirm, "_measured_by_key", {})
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        estimate_memory(run(), shape, BF16, step)


def test_a_class_runs_its_own_code_where_a_package_would_replace_it(monkeypatch):
    """Kernels of a package do not run on tensors without bytes."""
    own = modeling_qwen3_5.torch_chunk_gated_delta_rule

    @functools.wraps(own)
    def of_a_package(*words, **options):
        pytest.fail("the package's kernel was called")

    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", of_a_package)
    shape = measured_shape(wide("qwen3_5_text"))
    assert estimate_memory(run(), shape, BF16, step_of(shape)).allocated > 0
    assert modeling_qwen3_5.torch_chunk_gated_delta_rule is of_a_package
    assert set(shape.kernel_packages) == {"causal-conv1d", "flash-linear-attention"}


def test_all_functions_that_packages_replace_are_found():
    """By the text of transformers' files: as many as there are decorators."""
    files = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    texts = [file.read_text(encoding="utf-8") for file in files]
    uses = sum(len(re.findall(r"^@use_kernel_func_from_hub_with_fallback\(", text, re.MULTILINE)) for text in texts)
    assert uses == sum(len(build._REPLACEABLE_FUNCTION.findall(text)) for text in texts) > 50


def test_between_two_passes_bytes_lie_on_their_line():
    low = MeasuredBlocks(2, 10, 20, LayerBytes(100, 50, 300), (LayerBytes(8),), LayerBytes(4, gradients=2), -10)
    high = MeasuredBlocks(8, 70, 80, LayerBytes(700, 350, 600), (LayerBytes(20),), LayerBytes(4, gradients=8), -40)
    found = interpolate(low, high, 4)  # a third of the way
    tail = LayerBytes(4, gradients=4)
    assert found == MeasuredBlocks(4, 30, 40, LayerBytes(300, 150, 400), (LayerBytes(12),), tail, -20, ends=(2, 8))
    assert dataclasses.replace(interpolate(low, high, 8), ends=()) == high


def test_as_many_blocks_run_as_show_every_kind_behind_another():
    for given, size in (((0, 0, 0, 1, 0), 5), ((0, 1, 1, 1), 3), ((0,), 1), ((0, 0, 0), 2), ((0, 1, 0, 2), 4)):
        assert leading_blocks(given) == given[:size]
    draw = random.Random(3)
    for _ in range(200):
        order = tuple(draw.choices(range(3), k=draw.randrange(1, 12)))
        order = tuple(list(dict.fromkeys(order)).index(place) for place in order)
        size = next(
            size for size in range(1, len(order) + 1)
            if all(place in order[1:size] or place not in order[1:] for place in order)
        )  # fmt: skip
        assert leading_blocks(order) == order[: size + (len(set(order)) > 1)]


@pytest.mark.parametrize("kind", ["qwen4_exp_text", "gpt_neo"])
def test_real_buffers_hold_what_their_class_computes(kind):
    """Qwen4 looks up rows of its table of n-grams by numbers in its buffers: zeros there end its pass in an error."""
    fields = wide_config(kind)
    shape = load_planned_shape(fields, name="m")
    settings = step_settings(run(), fields, shape, BF16, step_of(shape))
    with trace_context(settings, uses_real_tensors=True) as (loop, skeleton):
        found = dict(build.base_model(loop.load_model(skeleton)).named_buffers())
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(build.language_model_config(settings), dtype=torch.bfloat16)
    meant = dict(model.named_buffers())
    assert found.keys() == meant.keys() != set()
    assert all(torch.equal(found[name], one) for name, one in meant.items())


@pytest.mark.parametrize("mode", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_a_class_that_keeps_its_states_graphs_is_planned_without_checkpointing(mode):
    """RecurrentGemma has them on its modules: blocks that were computed again stay, 60% more than a plan could say."""
    fields = {**wide_config("recurrent_gemma"), "num_hidden_layers": 3}
    shape, config = load_planned_shape(fields, name="m"), run(mode, length=64)
    assert not shape.can_checkpoint
    step = step_of(shape, seq_len=64, checkpointed_layers=0)
    found = estimate_memory(config, shape, BF16, step)
    peaks = phase_peaks(record_step(step_settings(config, fields, shape, BF16, step)))
    assert found.allocated == pytest.approx(max(peaks.values()), rel=0.01)
    wished = run(mode, text="train: {gradient_checkpointing: true}\n")
    with pytest.raises(ConfigError, match="recurrent_gemma has no activation checkpointing that frees memory"):
        make_plan(PlanRequest(wished, shape, parse_hardware("1xRTX3060")))
    # where nobody had found that their graphs stay, its blocks' bytes do not add up
    shape = dataclasses.replace(shape, can_checkpoint=True)
    with pytest.raises(ModelError, match="recurrent_gemma: what its blocks need cannot be measured"):
        estimate_memory(config, shape, BF16, step_of(shape, seq_len=64, checkpointed_layers=None))
