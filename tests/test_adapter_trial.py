"""Where adapters go: each class's own answer, tried by a step, for the plan, the trace and the run alike."""

import copy
import random
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from sft_play.config.load import load_config
from sft_play.errors import ConfigError, ModelError, TrainingError
from sft_play.files import cache_dir
from sft_play.models.families import MODEL_FAMILIES
from sft_play.models.shape import AdapterPlacement
from sft_play.planner.memory.structure import check_adapter_targets
from sft_play.planner.precision import Precision
from sft_play.trace.confirm import _peft_config, load_run_model_shape
from sft_play.training.class_checks import adapter_trial, small_model
from tests.conftest import ROOT, chat, write_rows, write_run
from tests.models import make_tokenizer
from tests.test_architecture import file_of

pytestmark = pytest.mark.build

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "index_n_heads": 4, "index_head_dim": 32, "index_topk": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
NAMED = {
    "llama4_text": ({"num_local_experts": 4, "head_dim": 16, "intermediate_size_mlp": 96}, {"router"}),
    "deepseek_v4": ({"num_hidden_layers": 6}, {"o_a_proj", "weights_proj"}),
    "falcon_h1": ({"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16,
                   "mamba_d_ssm": 128, "mamba_n_groups": 1}, {"out_proj"}),
    "mamba2": ({"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16}, {"out_proj"}),
    "gemma3n_text": (
        {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": 256, "intermediate_size": [96] * 4, "head_dim": 16,
         "hidden_size_per_layer_input": 16, "activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 8},
        {"correction_coefs", "prediction_coefs"},
    ),
    "deepseek_v32": (MLA, {"wk", "wq_b", "weights_proj"}),
    "jamba": ({"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "num_experts": 4,
               "mamba_dt_rank": 4}, {"dt_proj"}),
    "gemma4_text": ({"head_dim": 16, "vocab_size_per_layer_input": 256}, set()),
}  # fmt: skip
"""Tiny configs, with the names of layers that must get no adapter."""


def small_of(kind: str):
    """The class's config of tiny sizes."""
    changes = NAMED[kind][0]
    if kind == "deepseek_v4":  # its own sizes belong together: all are made narrow at once
        return small_model.small_config(AutoConfig.for_model(kind, **changes))
    return AutoConfig.for_model(kind, **{**SIZES, **changes})


def run_with(folder: Path, *overrides: str):
    config = ROOT / "configs" / "run_lora.yaml"
    return load_config(config, overrides=(f"model.name={folder}", "data.packing=none", *overrides)).config


def without_gradient(model, dtype: torch.dtype) -> list[str]:
    """Adapter tensors without a gradient after a step in autocast's dtype."""
    ids = torch.randint(3, 120, (2, 24), generator=torch.Generator().manual_seed(5))
    model.train()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    assert len(named) > 1
    return [name for name, one in named if one.grad is None or not one.grad.any()]


def test_what_only_longer_rows_reach_has_an_adapter_and_is_waited_for(caplog):
    """DeepSeek-V4's published layers sum up 4 and 128 tokens; the trial's rows are shorter than that."""
    from sft_play.training.loop.callbacks import GradientCheck

    config = AutoConfig.for_model("deepseek_v4", num_hidden_layers=4)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    places, _ = adapter_trial.find_adapter_placement(skeleton)
    late = adapter_trial.late_gradients(skeleton)
    assert {"compressor.gate_proj", "compressor.kv_proj"} <= set(places.targets)
    assert all(".self_attn.compressor." in name and ".indexer." not in name for name in late)
    assert all(late.values())  # no gradient at all: under DDP ranks would wait for it
    assert any(name.endswith("position_bias") for name in late)
    small = AutoModelForCausalLM.from_config(small_model.small_config(config))
    small = get_peft_model(small, adapter_trial.LoraConfig(r=2, target_modules=list(places.targets)))
    state, check = SimpleNamespace(global_step=0), GradientCheck(late)
    for length, waits in ((3, True), (24, False)):
        ids = torch.randint(3, 120, (2, length), generator=torch.Generator().manual_seed(length))
        small(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        if waits:
            with pytest.raises(TrainingError, match=r"compressor\.(kv|gate)_proj\.lora_B"):
                GradientCheck().on_pre_optimizer_step(None, state, None, model=small)
        check.on_pre_optimizer_step(None, state, None, model=small)
        check.on_train_end(None, state, None)
        assert ("only in longer rows, or once" in caplog.text) == waits
        caplog.clear()
        for name, one in small.named_parameters():
            if ".lora_B." in name:  # as after a step
                one.data.normal_(std=0.02)
    for _ in range(2):  # lora_A, whose lora_B was zero
        small(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        check.on_pre_optimizer_step(None, state, None, model=small)
    assert check.is_done
    with torch.device("meta"):  # what is multiplied by zeros at first
        skeleton = AutoModelForCausalLM.from_config(AutoConfig.for_model("doge", num_hidden_layers=2))
    assert adapter_trial.late_gradients(skeleton) == {"model.layers.*.self_attn.dt_proj.weight": ""}


@pytest.mark.parametrize("kind", sorted(NAMED))
def test_plan_trace_and_run_put_adapters_where_each_learns(kind, tmp_path):
    from sft_play.training.prepare.model_spec import build_model_spec

    small_of(kind).save_pretrained(tmp_path)
    config = run_with(tmp_path)
    precision = Precision("float32", "float32", "float32", "for this test")
    spec = build_model_spec(config, precision, tokenizer_size=100)
    targets, shape = set(spec.peft_config.target_modules), load_run_model_shape(config)
    assert set(_peft_config(config, shape)["target_modules"]) == targets
    places = shape.adapter_placement
    if kind not in MODEL_FAMILIES:
        assert (places.untried_reason, set(places.targets)) == ("", targets)
    counted = sum(count for one, count in shape.linears if one.adaptable)
    with torch.device("meta"):
        real = get_peft_model(AutoModelForCausalLM.from_config(spec.hf_config), copy.deepcopy(spec.peft_config))
    assert sum(name.endswith("lora_A.default.weight") for name, _ in real.named_parameters()) == counted
    for base, dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(spec.hf_config), dtype=base)
        adapted = get_peft_model(model, copy.deepcopy(spec.peft_config))
        with torch.no_grad():
            for parameter in adapted.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        adapters = [name for name, one in adapted.named_parameters() if one.requires_grad]
        assert not {name.partition(".lora_")[0].rpartition(".")[2] for name in adapters} & NAMED[kind][1]
        assert without_gradient(adapted, dtype) == []
    for name in NAMED[kind][1]:
        chosen = run_with(tmp_path, f"tuning.lora.target_modules=[{name}]")
        with pytest.raises(ConfigError, match=f"{name}: (an adapter there|it gets no|the class reads)"):
            check_adapter_targets(chosen, shape)
        with pytest.raises(ModelError, match="no linear layers that an adapter could take"):  # a plan comes before
            build_model_spec(chosen, precision, tokenizer_size=100)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "precision"), [*((kind, "bf16") for kind in sorted(NAMED)), ("jamba", "fp32")])
def test_a_run_of_each_class_trains_every_adapter(kind, precision, succeed, tmp_path):
    trained(succeed, tmp_path, kind, precision, "lora")
    metrics = (tmp_path / "outputs" / "one" / "metrics.jsonl").read_text()
    assert "eval_loss" in metrics
    assert ('"aux_loss"' in metrics) == (kind in ("deepseek_v4", "jamba"))


@pytest.mark.slow
def test_full_training_leaves_out_what_gets_no_gradient_by_its_class(succeed, tmp_path):
    """Indexers choose what attention reads, and no gradient passes the choice; all else moves."""
    printed = trained(succeed, tmp_path, "deepseek_v32", "fp32", "full")
    assert "which get no gradient by their class" in printed
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "outputs/one/model"))
    still = {name for name, tensor in after.items() if torch.equal(tensor, before[name])}
    assert still
    assert all(".indexer." in name or name.endswith("e_score_correction_bias") for name in still), still
    assert len(still) < len(after) / 3


def trained(succeed, tmp_path: Path, kind: str, precision: str, mode: str) -> str:
    """Three steps of a small random model of a class; what was printed."""
    torch.manual_seed(0)
    small = small_of(kind)
    small.vocab_size = small.vocab_size_per_layer_input = 400
    make_tokenizer(tmp_path / "base")
    base = AutoModelForCausalLM.from_config(small)
    with torch.no_grad():
        for parameter in base.parameters():  # some begin at zero, as no trained ones are
            parameter.add_(torch.randn_like(parameter) * 0.02)
    base.save_pretrained(tmp_path / "base")
    chats = (chat(f"what is {n} + {n}?", f"it is {2 * n}.") for n in range(16))
    rows, data = write_rows(tmp_path / "rows.jsonl", chats), {"val_fraction": 0.25, "packing": "none"}
    train = {"effective_batch_size": 4, "max_steps": 3, "bf16": precision == "bf16"}
    tuning, output = {"mode": mode, "lora": {"r": 4, "dropout": 0.0}}, {"name": "one"}
    path = write_run(tmp_path, tmp_path / "base", rows, data=data, tuning=tuning, train=train, output=output)
    return succeed("train", "--config", str(path))


@pytest.mark.parametrize("kind", sorted(MODEL_FAMILIES))
def test_what_the_table_says_of_adapters_is_what_a_trial_shows(kind):
    config = AutoConfig.for_model(**file_of(kind))
    failed, problem = small_model.measure_small_model(config, adapter_trial.find_failing_layers, needs_all_layers=True)
    assert failed is not None, problem
    assert not failed


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(MODEL_FAMILIES))
def test_what_is_not_tried_of_the_table_s_classes_would_find_nothing(kind):
    """Parameters without a gradient, ever or at first, logits that TRL's head does not compute, and kept graphs."""
    config = AutoConfig.for_model(**file_of(kind))
    trials = (adapter_trial._try_in_full, adapter_trial._try_late, adapter_trial._try_head, adapter_trial._try_keeping)
    for trial in trials:
        assert small_model.measure_small_model(config, trial, needs_all_layers=True) == ({}, ""), trial


SLOW_TO_BUILD = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("recurrent_gemma", "zamba2")]


@pytest.mark.parametrize("kind", ["flint", "qwen2_moe", *SLOW_TO_BUILD])
def test_classes_of_other_sizes_and_with_router_logits_that_no_block_gives_are_tried_too(kind):
    places = []
    is_dense = {"flint": {}, "qwen2_moe": {"mlp_only_layers": [0, 1]}}.get(kind)
    for wish in (False, True) if is_dense is not None else (False,):
        changes = {} if is_dense is None else {"num_hidden_layers": 2, "output_router_logits": wish, **is_dense}
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **changes))
        places.append(adapter_trial.find_adapter_placement(model))
    assert (places[0], places[0][0].untried_reason) == (places[-1], "")
    assert len(places[0][1]) < len(adapter_trial.linear_layers(model))


def test_a_plan_never_says_that_adapters_fit_which_peft_refuses(succeed, refuse, tmp_path, monkeypatch):
    small_of("falcon_h1").save_pretrained(tmp_path)
    words = ["plan", "--config", str(ROOT / "configs" / "run_lora.yaml"), "--hardware", "1xH100", "data.packing=none"]
    words += [f"model.name={tmp_path}", "model.max_seq_len=32"]
    assert "none on mamba.out_proj (the class reads" in succeed(*words)
    asked = "tuning.lora.target_modules=[in_proj, out_proj]"
    assert "out_proj: the class reads its weight past the adapter" in refuse(*words, asked)
    # as if a later PEFT refused what was tried with this one
    monkeypatch.setattr(AdapterPlacement, "resolve_targets", lambda self, targets: ["in_proj", "out_proj"])
    printed = refuse(*words, "--trace")
    assert ("PEFT refuses the adapters: " in printed, "Launch" in printed) == (True, False), printed


class Odd(nn.Module):
    """A language model whose layers fail in each of the ways that a trial tells apart."""

    def __init__(self, config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(small_model.VOCABULARY_SIZE, 8)
        self.good, self.zero, self.past, self.lost = (nn.Linear(8, 8) for _ in range(4))
        self.tuple_ = Pair(8, 8)
        self.blocks = nn.ModuleList(nn.ModuleList([nn.Linear(8, 8)]) for _ in range(3))
        self.head = nn.Linear(8, small_model.VOCABULARY_SIZE)

    def prepare_inputs_for_generation(self):  # PEFT keeps it
        raise NotImplementedError

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, labels=None, **_):
        hidden = self.embed(input_ids)
        hidden = hidden + self.good(hidden) + nn.functional.linear(hidden, self.past.weight) + self.tuple_(hidden)[0]
        hidden = hidden + self.zero(hidden).detach()
        for block in self.blocks[:2]:  # the last one never runs
            hidden = hidden + block[0](hidden)
        logits = self.head(hidden)
        labels = input_ids if labels is None else labels
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return SimpleNamespace(loss=loss, logits=logits)


class Pair(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden), None


def test_each_way_to_fail_is_told_and_the_rest_gets_adapters(monkeypatch):
    build = lambda config, **options: Odd(config)  # noqa: E731
    monkeypatch.setattr(adapter_trial.AutoModelForCausalLM, "from_config", build)
    state = torch.random.get_rng_state()
    failed = adapter_trial.find_failing_layers(SimpleNamespace(model_type="odd"))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert failed.pop("tuple_").startswith("an adapter there fails: ")
    without = adapter_trial._try_in_full(SimpleNamespace(model_type="odd"))
    assert sorted(without) == ["lost.bias", "lost.weight", "past.bias", "zero.bias", "zero.weight"]
    nothing = adapter_trial.NO_GRADIENT
    assert failed == {"past": adapter_trial.BYPASSES_ADAPTER, "zero": nothing, "lost": nothing, "blocks.*.*": nothing}


def test_a_class_that_cannot_be_tried_says_so_and_leaves_out_what_its_source_shows(monkeypatch):
    monkeypatch.setattr(adapter_trial, "measure_small_model", lambda *args, **options: (None, "it is too large"))
    config = SimpleNamespace(model_type="odd", to_dict=lambda: {"model_type": "odd"})
    places, lost = adapter_trial.find_adapter_placement(Odd(config))
    assert (lost, set(places.targets)) == ({"past"}, {"0.0", "1.0", "2.0", "good", "lost", "tuple_", "zero"})
    untried = "on every linear layer: odd could not be tried: it is too large"
    assert places.notes == [f"none on past ({adapter_trial.BYPASSES_ADAPTER})", untried]


def test_a_trial_is_remembered_unless_the_code_is_the_models_own(monkeypatch):
    trial = Mock(return_value=({"good": "why"}, ""))
    monkeypatch.setattr(adapter_trial, "measure_small_model", trial)
    fields = {"model_type": "odd", "vocab_size": random.random()}
    model = Odd(SimpleNamespace(model_type="odd", to_dict=lambda: dict(fields)))
    first = adapter_trial.find_adapter_placement(model)
    fields["_name_or_path"] = "elsewhere"  # says nothing of the class
    assert (adapter_trial.find_adapter_placement(model), trial.call_count) == (first, 1)
    adapter_trial.find_adapter_placement(model, trust_remote_code=True)
    fields["vocab_size"] = 3
    adapter_trial.find_adapter_placement(model)
    assert trial.call_count == 3
    newest = max((cache_dir() / "adapters").glob("*.json"), key=lambda place: place.stat().st_mtime_ns)
    newest.write_text("{")
    assert (adapter_trial.find_adapter_placement(model), trial.call_count) == (first, 4)


def test_targets_match_the_chosen_layers_and_no_others():
    chance = random.Random(4)
    for _ in range(300):
        words = ["a", "b", "c", "0", "1"]
        count = chance.randint(1, 30)
        modules = sorted({".".join(["model", *chance.choices(words, k=chance.randint(1, 4))]) for _ in range(count)})
        wanted = [name for name in modules if chance.random() < 0.5]
        targets = adapter_trial.shortest_suffixes(wanted, modules)
        # as PEFT compares: the whole name, or its end behind a dot
        matched = {name for name in modules if any(name == one or name.endswith(f".{one}") for one in targets)}
        assert matched == set(wanted), (wanted, modules)


def test_a_given_target_matches_what_it_names_and_nothing_that_is_left_out():
    places = AdapterPlacement(
        ("down_proj", "self_attn.kv_proj", "x.self_attn.q_proj"),
        (("model.layers.*.compressor.kv_proj", "why"), ("model.layers.*.self_attn.q_proj", "why")),
    )
    assert places.resolve_targets("auto") == list(places.targets)
    assert places.resolve_targets(("down_proj", "mlp.down_proj")) == ["down_proj", "mlp.down_proj"]
    assert places.resolve_targets(("kv_proj", "self_attn.kv_proj")) == ["self_attn.kv_proj"]
    assert places.resolve_targets(("q_proj",)) == ["x.self_attn.q_proj"]
    assert places.resolve_targets(("compressor.kv_proj",)) == []


def test_a_class_whose_tokens_see_those_after_them_is_refused():
    from sft_play.trace.meta_shape import measure_shape_on_meta

    config = AutoConfig.for_model("xlnet")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for _ in range(2):  # measured, and remembered
        with pytest.raises(ModelError, match=r"model_type xlnet: its tokens see those after them .* teach it to copy"):
            adapter_trial.find_adapter_placement(model)
    fields = {"model_type": "xlnet", **config.to_dict()}
    with pytest.raises(ModelError, match="tokens see those after them"):  # by its name, before any library loads
        measure_shape_on_meta(fields, name="m")
