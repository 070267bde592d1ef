"""Experts: which implementation runs them, that it computes what the eager one does, and what the plan says of it."""

import copy
import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from peft.utils import transformers_weight_conversion as peft
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.registry import REQUIRED_FIELDS, model_types
from sft_play.config.load import config_from_text
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.machine import software
from sft_play.machine.hardware import parse_hardware
from sft_play.machine.software import LINEAR_ATTENTION_PACKAGE
from sft_play.models.config_json import load_config_json
from sft_play.models.families import PEFT_MOVED_NAMES, PEFT_MOVED_TYPES
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.memory.estimate import estimate_memory
from sft_play.planner.memory.model_states import adapter_params
from sft_play.planner.memory.step_memory import Step
from sft_play.planner.memory.structure import check_adapter_targets
from sft_play.planner.precision import Precision
from sft_play.planner.speed import EXPERTS_PART, LINEAR_ATTENTION_PART
from sft_play.trace.confirm import load_planned_shape, step_settings
from sft_play.trace.meta_shape import measure_shape_on_meta
from sft_play.trace.step import trace_step
from sft_play.training.class_checks.small_model import measure_small_model, small_config, small_model
from sft_play.training.model.fused_head import fused_head, set_backbone_prefix
from sft_play.training.model.model_loading import load_model
from sft_play.training.prepare import experts
from sft_play.training.prepare.experts import CASTING_GROUPED_MM, balance_coefficient, choose_experts, fit_balance_loss
from sft_play.training.prepare.model_spec import build_model_spec
from tests.test_measured_blocks import some_bytes

pytestmark = pytest.mark.build

FP32, BF16 = Precision("float32", "float32", ""), Precision("bfloat16", "bfloat16", "")
MASTERS = Precision("bfloat16", "float32", "")
ONE_BLOCK = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_only_layers": []}
MODELS = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")


def sizes(kind: str, seed: int, *, step: int = 8) -> dict[str, Any]:
    """A small random model of a type; widths are multiples of `step`."""
    rng = random.Random(f"{kind} {seed}")
    heads = rng.choice((2, 4))
    experts = rng.randint(3, 9)
    width = step * rng.randint(1, 5)
    common = {
        "model_type": kind, "vocab_size": 64, "hidden_size": 8 * heads * rng.randint(1, 2), "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": rng.choice((1, heads)), "max_position_embeddings": 64,
        "num_experts_per_tok": rng.randint(1, min(3, experts)), "tie_word_embeddings": False, "pad_token_id": 0,
        "initializer_range": 0.2,
    }  # fmt: skip
    own: dict[str, dict[str, Any]] = {
        "mixtral": {"num_local_experts": experts, "intermediate_size": width},
        "qwen3_moe": {
            "num_experts": experts, "moe_intermediate_size": width, "intermediate_size": 24, "head_dim": 8,
            "mlp_only_layers": rng.choice(([], [0])), "norm_topk_prob": rng.random() < 0.5,
        },
        "gpt_oss": {"num_local_experts": experts, "intermediate_size": width, "head_dim": 8},
        "deepseek_v3": {
            "n_routed_experts": experts, "moe_intermediate_size": width, "intermediate_size": 24, "n_group": 1,
            "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
            "v_head_dim": 8, "num_key_value_heads": heads, "first_k_dense_replace": rng.choice((0, 1)),
            "n_shared_experts": 1,
        },
    }  # fmt: skip
    return common | own[kind]


def config(**options: Any) -> RunConfig:
    """A run of `x` with these settings of the model, and `mode`."""
    mode = options.pop("mode", "full")
    where = options.pop("name", "x")
    return config_from_text(json.dumps({"model": {"name": str(where), **options}, "tuning": {"mode": mode}}), name="r")


def saved(folder: Path, kind: str, seed: int, **changes: Any) -> Path:
    torch.manual_seed(seed)
    fields = sizes(kind, seed)
    fields |= {name: value for name, value in changes.items() if name in fields}
    kind = fields.pop("model_type")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields), dtype=torch.float32)
    with torch.no_grad():  # routers and biases begin as zeros in some classes: every expert would be a tie
        for name, weight in model.named_parameters():
            if any(part in name for part in ("router", "gate.weight", "bias")):
                weight.normal_(0, 0.5)
    model.save_pretrained(folder)
    return folder


def step(folder: Path, implementation: str, precision: Precision, mode: str = "full") -> tuple[float, Any, Any]:
    """Loss and gradients of one batch, as the trainer loads and runs the model, and the model."""
    run = config(name=folder, experts_implementation=implementation, mode=mode)
    spec = build_model_spec(run, precision, tokenizer_size=64)
    torch.manual_seed(1)
    model = load_model(run, precision, spec, device="cpu")
    if spec.peft_config is not None:
        model = get_peft_model(model, copy.deepcopy(spec.peft_config))
        torch.manual_seed(2)
        for name, weight in model.named_parameters():
            if "lora_B" in name:  # zeros: the gradient of lora_A would be zero
                nn.init.normal_(weight, std=0.1)
    model.train()
    ids = torch.randint(3, 64, (3, 21), generator=torch.Generator().manual_seed(3))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision.compute == "bfloat16"):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    gradients = {name: one.grad.float() for name, one in model.named_parameters() if one.grad is not None}
    return loss.item(), gradients, model


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The norm of the gradients' difference, as a share of the first one's."""
    assert set(one) == set(other)
    total = sum(float((one[name] - other[name]).norm()) ** 2 for name in one) ** 0.5
    return total / sum(float(grad.norm()) ** 2 for grad in one.values()) ** 0.5


def implementation_of(model: Any) -> str:
    return str((model.get_base_model() if hasattr(model, "get_base_model") else model).config._experts_implementation)


def with_fused_head(model: Any, **options: Any) -> Any:
    ids = torch.arange(3, 35).reshape(2, 16)
    with fused_head(model):
        return model(input_ids=ids, labels=ids, use_cache=False, fused_lm_head=True, **options)


# --- exactness --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("mode", ["full", "lora", "qlora"])
def test_grouped_products_give_what_eager_experts_give(tmp_path, kind, mode):
    """In bf16 outputs are added in bf16 or fp32: a rounding (2**-8) each, which may change the next block's routing."""
    two, one = saved(tmp_path / "two", kind, 0), saved(tmp_path / "one", kind, 1, **ONE_BLOCK)
    for folder, precision, tolerance in ((two, FP32, 1e-5), (one, BF16, 2**-6)):
        loss, gradients, model = step(folder, "eager", precision, mode)
        other, mine, grouped = step(folder, "auto", precision, mode)
        assert (implementation_of(model), implementation_of(grouped)) == ("eager", "grouped_mm")
        assert other == pytest.approx(loss, rel=tolerance)
        assert distance(gradients, mine) <= tolerance


@pytest.mark.parametrize("kind", MODELS)
def test_fp32_weights_are_multiplied_in_autocast_s_dtype_as_eager_ones_are(tmp_path, kind):
    """transformers' own grouped products would run in fp32: nearer to the fp32 model than to the eager one."""
    folder = saved(tmp_path / "m", kind, 0, **ONE_BLOCK)
    seen = []
    real = torch.nn.functional.grouped_mm

    def watched(rows: Any, weight: Any, **options: Any) -> Any:
        seen.append((rows.dtype, weight.dtype))
        return real(rows, weight, **options)

    loss, gradients, _ = step(folder, "eager", MASTERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "grouped_mm", watched)
        other, mine, model = step(folder, "auto", MASTERS)
    assert implementation_of(model) == CASTING_GROUPED_MM
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    assert other == pytest.approx(loss, rel=2**-6)
    assert distance(gradients, mine) <= 2**-6
    model.save_pretrained(tmp_path / "out")
    assert "experts_implementation" not in (tmp_path / "out" / "config.json").read_text()


# --- the choice -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(6))
def test_widths_that_grouped_products_refuse_run_eagerly(seed):
    """The rule against PyTorch: on random widths it says grouped_mm exactly where a step runs with it."""
    rng = random.Random(seed)
    width, precision = rng.choice((4, 6, 8, 12, 13, 16, 20, 24)), rng.choice((FP32, BF16))
    fields = sizes("mixtral", seed) | {"intermediate_size": width}
    kind = fields.pop("model_type")
    dtype = torch.float32 if precision is FP32 else torch.bfloat16
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields), dtype=dtype)
    chosen = choose_experts(config(), model, precision)
    ids = torch.randint(3, 64, (2, 9))
    problem = ""
    try:
        model(input_ids=ids, labels=ids).loss.backward()
    except RuntimeError as error:
        problem = str(error)
    assert problem in ("", "strides should be multiple of 16 bytes")
    assert (chosen.name == "grouped_mm") == (not problem)
    if problem:
        assert f"one is {width}" in chosen.reason
        with pytest.raises(ConfigError, match=r"experts_implementation=grouped_mm: x cannot run it.*use auto"):
            choose_experts(config(experts_implementation="grouped_mm"), model, precision)


def test_no_experts_take_no_implementation_and_experts_in_a_list_of_mlps_are_a_class_s_own_code(tiny_llama):
    assert build_model_spec(config(name=tiny_llama), FP32, tokenizer_size=10).experts is None
    with pytest.raises(ConfigError, match="has no experts that it could reach; leave it at auto"):
        build_model_spec(config(name=tiny_llama, experts_implementation="eager"), FP32, tokenizer_size=10)

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    chosen = choose_experts(config(), nn.Sequential(Mixture()), FP32)
    assert chosen.name == "eager"
    assert "code of its own" in chosen.reason
    with pytest.raises(ConfigError, match="code of its own"):
        choose_experts(config(experts_implementation="grouped_mm"), nn.Sequential(Mixture()), FP32)


# --- adapters ---------------------------------------------------------------------------------------------------------
def test_the_table_of_moved_adapters_is_peft_s():
    moved = {
        kind: peft._MOE_TARGET_MODULE_MAPPING[of]
        for kind, of in peft._MODEL_TO_CONVERSION_PATTERN.items()
        if of in peft._MOE_TARGET_MODULE_MAPPING and get_checkpoint_conversion_mapping(kind) is not None
    }
    assert set(moved) == PEFT_MOVED_TYPES
    assert {name for names in moved.values() for name in names} == PEFT_MOVED_NAMES


@pytest.mark.parametrize("kind", MODELS)
def test_adapters_stay_on_the_layers_that_were_planned(tmp_path, kind):
    """PEFT would move those on shared experts and dense blocks to the routed experts."""
    folder = saved(tmp_path / "m", kind, 1, **({"mlp_only_layers": [0]} if kind == "qwen3_moe" else {}))
    run = config(name=folder, mode="lora")
    spec = build_model_spec(run, FP32, tokenizer_size=64)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), copy.deepcopy(spec.peft_config))
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    assert trained
    assert not any(".experts." in name for name in trained)
    shape = load_planned_shape(load_config_json(str(folder)), name="m")
    assert sum(one.numel() for one in trained.values()) == adapter_params(shape, run.tuning.lora)
    says = any("PEFT would put its adapter on this model's routed experts" in note for note in spec.notes)
    assert says == (kind in ("qwen3_moe", "deepseek_v3"))


def test_a_target_that_would_be_moved_is_refused(tmp_path):
    folder = saved(tmp_path / "m", "deepseek_v3", 1)
    words = ["tuning.lora.target_modules=[q_a_proj, down_proj]"]
    run = config_from_text(f"model: {{name: {folder}}}", name="r", overrides=words)
    with pytest.raises(ConfigError, match="down_proj: PEFT would put its adapter on this model's routed experts"):
        check_adapter_targets(run, load_planned_shape(load_config_json(str(folder)), name="m"))


# --- plan -------------------------------------------------------------------------------------------------------------
def plan_of(run: RunConfig, shape: Any, machine: str = "8xH100", without: frozenset[str] = frozenset()) -> Any:
    return make_plan(PlanRequest(run, shape, parse_hardware(machine), missing_packages=without))


def test_eager_experts_cost_what_was_published():
    """Qwen1.5-MoE-A2.7B, 24 blocks of 60 experts: 523 - 80 ms more in each pass."""
    fields = {
        "model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "vocab_size": 151936,
    }  # fmt: skip
    shape = dataclasses.replace(measure_shape_on_meta(fields, name="Qwen1.5-MoE-A2.7B"), block_meter=some_bytes)
    for mode in ("lora", "qlora"):
        runs = (config(experts_implementation=name, mode=mode, name="m") for name in ("auto", "eager"))
        fast, slow = (plan_of(run, shape, "A100-80GB") for run in runs)
        assert EXPERTS_PART not in fast.speed.parts
        assert not any("experts" in line for line in fast.reasons)
        share = slow.choice.checkpointed_layers / 24
        published = 0.443 * (2 + share) * slow.batch.grad_accum
        assert slow.speed.parts[EXPERTS_PART] == pytest.approx(published, rel=0.05)
        assert sum(line.startswith("experts: ") for line in slow.reasons) == 1
    whole = plan_of(config(experts_implementation="eager", name="m"), shape, "8xH100")
    assert whole.speed.parts[EXPERTS_PART] > 2 * 0.443 * 2  # gradients of the whole tensor for each expert


def test_a_plan_names_what_linear_attention_lacks_and_what_it_costs():
    """transformers#48718: Qwen3.5-9B in full over 8 B200, 8 x 1,024 tokens a card, takes 0.52 s a step more without."""
    fields = CONFIG_MAPPING["qwen3_5_text"]().to_dict()
    shape = dataclasses.replace(measure_shape_on_meta(fields, name="Qwen3.5-9B"), block_meter=some_bytes)
    assert shape.params == 8_953_803_264  # as published there
    assert sum(kind.count for kind in shape.layers if kind.linear_attention_width == 4096) == 24
    assert set(shape.kernel_packages) == {LINEAR_ATTENTION_PACKAGE, "causal-conv1d"}
    words = ["train.batch_size=8", "train.grad_accum=1", "train.gradient_checkpointing=false"]
    run = config_from_text("model: {name: m, max_seq_len: 1024}\ntuning: {mode: full}", name="r", overrides=words)
    fast = plan_of(run, shape, "8xB200")
    slow = plan_of(run, shape, "8xB200", frozenset({LINEAR_ATTENTION_PACKAGE, "causal-conv1d"}))
    assert LINEAR_ATTENTION_PART not in fast.speed.parts
    assert not any("not installed" in line for line in fast.reasons)
    assert slow.speed.parts[LINEAR_ATTENTION_PART] == pytest.approx(0.52, abs=0.02)
    lines = [line for line in slow.reasons if "not installed" in line]
    assert len(lines) == 2
    assert [line.startswith(LINEAR_ATTENTION_PACKAGE) for line in lines if "on Blackwell" in line] == [True]
    hopper, on_cpu = (plan_of(run, shape, name, frozenset({LINEAR_ATTENTION_PACKAGE})) for name in ("8xH200", "cpu"))
    assert not any("Blackwell" in line for line in hopper.reasons)
    assert LINEAR_ATTENTION_PART not in on_cpu.speed.parts
    assert not any("not installed" in line for line in on_cpu.reasons)


def test_packages_with_kernels_that_are_not_installed_are_known(monkeypatch):
    monkeypatch.setattr(software, "installed_version", lambda name: "1.0" if name == "causal-conv1d" else None)
    assert software.missing_kernel_packages() == {"flash-linear-attention", "mamba-ssm", "liger-kernel"}


# --- memory -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("choice", ["auto", "eager", "masters"])
def test_the_trace_and_the_closed_form_follow_what_runs(kind, choice):
    """The trace steps the class with the implementation of the run; the estimate is within 4% of it."""
    fields = sizes(kind, 3) | {
        "hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1024,
        "max_position_embeddings": 1024,
        **({"intermediate_size": 1024} if kind in ("mixtral", "gpt_oss") else {"moe_intermediate_size": 256}),
    }  # fmt: skip
    shape = load_planned_shape(dict(fields), name=kind)
    precision = MASTERS if choice == "masters" else BF16
    run = config(experts_implementation="eager" if choice == "eager" else "auto", mode="full")
    attention = "sdpa" if shape.has_sdpa else "eager"
    planned = Step(4, 1, 256, checkpointed_layers=0, attention=attention, saves=False)
    settings = step_settings(run, fields, shape, precision, planned)
    assert settings.experts == {"auto": "stacked", "eager": "eager", "masters": "cast"}[choice]
    traced = trace_step(settings).allocated
    closed = estimate_memory(run, shape, precision, planned).allocated
    assert closed / traced == pytest.approx(1, abs=0.04)


BALANCED = {"mixtral": True, "granitemoe": True, "deepseek_v4": True, "jamba": True, "llama4_text": False}
"""Classes whose config has a balance loss with a weight, and whether they compute one."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", BALANCED)
def test_the_balance_loss_is_the_classes_own(kind, dtype):
    """TRL looks for `num_experts` in the config, which some call otherwise; a class that computes none has none."""
    small = small_config(AutoConfig.for_model(kind))
    assert balance_coefficient(small) > 0
    fit_balance_loss(small)
    assert (balance_coefficient(small) > 0) == BALANCED[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small, dtype=dtype).eval()
    options = {"output_router_logits": True} if balance_coefficient(small) else {}
    ids = torch.arange(3, 35).reshape(2, 16)
    with torch.no_grad():
        own = model(input_ids=ids, labels=ids, use_cache=False, **options)
        fused = with_fused_head(model, **options)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(fused.loss.float(), own.loss.float(), rtol=tolerance, atol=0)
    if BALANCED[kind]:
        torch.testing.assert_close(fused.aux_loss, own.aux_loss)
        assert own.aux_loss > 0.5
    else:
        assert getattr(own, "aux_loss", None) is None


WITHOUT_ROUTERS = {
    "flint": {"num_hidden_layers": 2}, "qwen3_moe": {"num_hidden_layers": 3, "mlp_only_layers": [0, 1, 2]},
}  # fmt: skip
"""Models none of whose blocks gives router logits: experts by the tokens' hash, or dense."""
ROUTERS_BEHIND = {
    "flint": {"num_hidden_layers": 3}, "qwen3_moe": {"num_hidden_layers": 18, "mlp_only_layers": list(range(16))},
}  # fmt: skip
"""The same with routers in their last blocks, of which a small model with few layers has none."""


@pytest.mark.parametrize("kind", WITHOUT_ROUTERS)
def test_a_model_has_a_balance_loss_where_any_of_its_blocks_has_a_router(kind):
    """TRL and the classes compute it of the first block's: IndexError, also where config.json alone asks for them."""
    config = AutoConfig.for_model(kind, **ROUTERS_BEHIND[kind])
    weight = balance_coefficient(config)
    assert fit_balance_loss(config) == []
    assert balance_coefficient(config) == weight > 0
    changes = {**WITHOUT_ROUTERS[kind], "output_router_logits": True}
    config = AutoConfig.for_model(kind, **changes)
    (line,) = fit_balance_loss(config)
    assert "no block of this model gives router logits" in line
    assert balance_coefficient(config) == 0
    small = small_config(AutoConfig.for_model(kind, **changes))
    model, ids = AutoModelForCausalLM.from_config(small).eval(), torch.arange(3, 35).reshape(2, 16)
    with torch.no_grad():
        own = model(input_ids=ids, labels=ids, use_cache=False)
        torch.testing.assert_close(with_fused_head(model).loss, own.loss)


LAYOUTS = {
    "qwen3_moe": ("mlp_only_layers", "decoder_sparse_step"), "laguna": ("mlp_layer_types",),
    "ernie4_5_moe": ("moe_layer_start_index", "moe_layer_interval"), "jamba": ("expert_layer_period",),
}  # fmt: skip
"""Classes with a balance loss, and the fields of their configs that say which blocks have routers."""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_balance_loss_is_left_out_where_the_model_itself_gives_no_router_logits(kind, seed):
    """Random layouts of one to five blocks: the rule against the model of just these blocks."""
    rng = random.Random(f"{kind} {seed}")
    layers = rng.randint(1, 5)
    dense = rng.randint(0, layers)
    drawn = {
        "mlp_only_layers": sorted(rng.sample(range(layers), dense)), "decoder_sparse_step": rng.randint(1, 3),
        "moe_layer_start_index": dense, "moe_layer_interval": rng.randint(1, 2),
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense), "expert_layer_period": rng.randint(1, 7),
    }  # fmt: skip
    layout = {name: drawn[name] for name in LAYOUTS[kind]} | {"num_hidden_layers": layers}
    config = small_config(AutoConfig.for_model(kind, **layout))
    config.router_aux_loss_coef, config.output_router_logits = 0.01, rng.random() < 0.5
    model, ids = AutoModelForCausalLM.from_config(config), torch.arange(3, 35).reshape(2, 16)
    has_routers = bool(model.model(input_ids=ids, output_router_logits=True, use_cache=False).router_logits)
    found = (len(fit_balance_loss(config)), balance_coefficient(config))
    assert found == ((0, 0.01) if has_routers else (1, 0.0))
    with_fused_head(AutoModelForCausalLM.from_config(config)).loss.backward()


@pytest.mark.parametrize("kind", ["afmoe", "dbrx", "deepseek_v3", "qwen3_moe"])
def test_router_logits_that_a_config_asks_for_without_a_weight_are_not_computed(kind):
    """TRL's head would compute a balance loss of them: no class's name for the number of experts, or of no router."""
    config = small_config(AutoConfig.for_model(kind, **REQUIRED_FIELDS.get(kind, {})))
    config.output_router_logits = True
    if hasattr(config, "router_aux_loss_coef"):
        config.router_aux_loss_coef = 0.0
    assert fit_balance_loss(config) == []
    found = with_fused_head(AutoModelForCausalLM.from_config(config))
    assert found.aux_loss is None
    found.loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("layers", [None, 1])
def test_no_class_ends_in_a_balance_loss_of_nothing(layers):
    """Every class whose config has a weight for one, of its usual blocks and of its first alone."""

    def computes(small, *, trust_remote_code):
        model = small_model(small, "eager", trust_remote_code)
        options = {"output_router_logits": True} if balance_coefficient(small) else {}
        with torch.no_grad():
            return float(with_fused_head(model, **options).loss)

    tried = 0
    for kind in model_types():
        try:
            config = CONFIG_MAPPING[kind](**REQUIRED_FIELDS.get(kind, {})).get_text_config()
            for name in ("layer_types", "mlp_layer_types") if layers else ():
                if isinstance(getattr(config, name, None), list):
                    setattr(config, name, getattr(config, name)[:layers])
            config.num_hidden_layers = layers or config.num_hidden_layers
        except Exception:  # each class checks its sizes in its own way
            continue
        if balance_coefficient(config):
            fit_balance_loss(config)
            found, problem = measure_small_model(config, computes, needs_all_layers=layers is not None)
            assert found is not None or "IndexError" not in problem, (kind, problem)
            tried += found is not None
    assert tried > 20


def test_a_class_that_cannot_be_tried_keeps_the_weight_of_its_config(monkeypatch):
    config = AutoConfig.for_model("mixtral")
    monkeypatch.setattr(experts, "measure_small_model", lambda *args, **options: (None, "too large"))
    assert fit_balance_loss(config) == []
    assert balance_coefficient(config) == config.router_aux_loss_coef > 0


def test_llama_4_is_saved_and_read_again_after_its_head_was_fused(tmp_path):
    model = AutoModelForCausalLM.from_config(small_config(AutoConfig.for_model("llama4_text"))).eval()
    assert model.base_model is model
    set_backbone_prefix(model)
    assert model.base_model is model.model
    model.save_pretrained(tmp_path)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)
