"""Updates reach the weights: dtypes of adapters and states, fp32 weights or stochastic rounding, and how it is seen."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from bitsandbytes.optim import PagedAdamW
from transformers import AutoModelForCausalLM
from transformers.optimization import Adafactor

from sft_play.config.load import config_from_text
from sft_play.config.schema import RunConfig
from sft_play.launch import request as resume
from sft_play.machine.hardware import parse_hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner.advice import make_advised_plan
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.layout import SINGLE, Layout
from sft_play.planner.memory.model_states import resident_bytes
from sft_play.planner.memory.structure import element_bytes
from sft_play.planner.plan import Plan
from sft_play.planner.precision import Precision, adapter_dtype, apply_weight_updates
from sft_play.runs.folder import MANIFEST_FORMAT, RunFolder
from sft_play.training.checkpoints import full_state_dict
from sft_play.training.checkpoints.checkpoints import checkpoint_path
from sft_play.training.loop.optimizers import round_stochastically, stochastic_rounding_class
from sft_play.training.measure.updates import UpdateFacts
from tests.conftest import chat, write_rows, write_run
from tests.models import make_llama
from tests.test_train import assert_same_bits, weights

BF16 = Precision("bfloat16", "bfloat16", "bf16: the GPU has it")


def run(mode: str, more: str = "", name: str = "Qwen/Qwen2.5-3B-Instruct") -> RunConfig:
    return config_from_text(f"model: {{name: {name}}}\ntuning: {{mode: {mode}}}\n{more}", name="x")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 3e4])
def test_a_rounded_number_is_a_neighbour_and_right_on_average(scale):
    exact = torch.randn(64, generator=generator(1)) * scale
    many = torch.stack([round_stochastically(exact.clone(), generator(seed)) for seed in range(2000)])
    assert many.dtype is torch.bfloat16
    below = torch.minimum(many.min(0).values, exact.to(torch.bfloat16)).double()
    above = torch.maximum(many.max(0).values, exact.to(torch.bfloat16)).double()
    gap = above - below
    assert bool((gap <= exact.double().abs() * 2**-7).all())
    assert bool(((below <= exact.double()) & (exact.double() <= above)).all())
    assert bool(((many.double().mean(0) - exact.double()).abs() <= 0.06 * gap + 1e-300).all())


def test_numbers_that_bf16_holds_and_those_that_are_none_stay():
    held = torch.tensor([0.0, -0.0, 1.0, -3.5, 2.0**-120, float("inf"), -float("inf")])
    assert torch.equal(round_stochastically(held.clone(), generator()).float(), held)
    assert bool(round_stochastically(torch.tensor([float("nan")] * 50), generator()).isnan().all())


OPTIMIZERS = {
    "fused": (torch.optim.AdamW, {"fused": True}), "foreach": (torch.optim.AdamW, {"foreach": True}),
    "paged": (PagedAdamW, {"optim_bits": 8}),
    "adafactor": (Adafactor, {"scale_parameter": False, "relative_step": False}),
}  # fmt: skip


def steps(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], first: int, last: int) -> None:
    for step in range(first, last):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator(step)).to(parameter.dtype) + 1
        optimizer.step()


def parameters_of(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((96, 64), (5000,))]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_small_updates_arrive_on_average_and_a_resumed_run_is_the_unbroken_one(kind):
    made, options = OPTIMIZERS[kind]
    options = options | {"lr": 1e-5, "weight_decay": 0.0}
    wide, narrow, rounded = (parameters_of(dtype) for dtype in (torch.float32, torch.bfloat16, torch.bfloat16))
    steps(made(wide, **options), wide, 0, 60)
    steps(made(narrow, **options), narrow, 0, 60)
    optimizer = stochastic_rounding_class(made)(rounded, **options, rounding_seed=3)
    steps(optimizer, rounded, 0, 40)
    saved, kept = copy.deepcopy(optimizer.state_dict()), [parameter.detach().clone() for parameter in rounded]
    steps(optimizer, rounded, 40, 60)
    as_ever = parameters_of(torch.float32)  # parameters that are fp32 already
    steps(stochastic_rounding_class(made)(as_ever, **options), as_ever, 0, 60)
    assert all(torch.equal(one, other) for one, other in zip(wide, as_ever, strict=True))
    for exact, nearest, found in zip(wide, narrow, rounded, strict=True):
        assert bool((nearest == 1).all()), "rounded to the nearest, every update is lost"
        moved, wanted = (float((one.detach().double() - 1).mean()) for one in (found, exact))
        assert moved == pytest.approx(wanted, rel=0.2)
        assert (found.dtype, found.grad is None) == (torch.bfloat16, False)
    dtypes = {v.dtype for v in optimizer.state[rounded[0]].values() if isinstance(v, torch.Tensor) and v.dim()}
    assert torch.bfloat16 not in dtypes
    again = [torch.nn.Parameter(tensor) for tensor in kept]
    resumed = stochastic_rounding_class(made)(again, **options, rounding_seed=3)
    resumed.load_state_dict(saved)
    steps(resumed, again, 40, 60)
    assert all(torch.equal(one, other) for one, other in zip(rounded, again, strict=True))


@pytest.mark.parametrize(("mode", "wish", "dtype", "layout", "masters", "load", "updates"), [
    ("full", "auto", "auto", "single", True, "float32", "float32"),
    ("full", "auto", "auto", "single", False, "bfloat16", "stochastic"),
    ("full", "auto", "auto", "ddp", False, "bfloat16", "stochastic"),
    ("full", "auto", "bfloat16", "single", True, "bfloat16", "stochastic"),
    ("full", "float32", "auto", "single", False, "float32", "float32"),
    ("full", "stochastic", "auto", "single", True, "bfloat16", "stochastic"),
    ("full", "bfloat16", "auto", "single", True, "bfloat16", "bfloat16"),
    ("full", "bfloat16", "auto", "fsdp", True, "bfloat16", "float32"),
    ("full", "auto", "auto", "zero2", False, "bfloat16", "float32"),
    ("lora", "auto", "auto", "single", False, "bfloat16", "float32"),
    ("qlora", "bfloat16", "auto", "ddp", True, "bfloat16", "float32"),
])  # fmt: skip
def test_how_updates_reach_the_weights(mode, wish, dtype, layout, masters, load, updates):
    config = run(mode, f"train: {{weight_updates: {wish}}}")
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    found = apply_weight_updates(BF16, config, layout, fp32_master_weights=masters)
    assert (found.load, found.updates, found.compute) == (load, updates, "bfloat16")
    changed = (load, updates) != ("bfloat16", "float32")
    assert (found.reason != BF16.reason) == changed


def planned(config: RunConfig, machine: str) -> Plan:
    return make_plan(PlanRequest(config, load_model_shape(config.model.name), parse_hardware(machine)))


@pytest.mark.parametrize("machine", ["1xRTX4090", "1xA100-80GB", "2xRTX4090"])
@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-7B"])
def test_full_in_bf16_holds_fp32_weights_wherever_they_fit(machine, model):
    """Rounding is planned exactly where no plan with fp32 weights, or an engine's fp32 copies, fits without offload."""
    plan = planned(run("full", name=model), machine)
    wide = planned(run("full", "train: {weight_updates: float32}", name=model), machine)
    fits_wide = any(one.fits and not one.layout.offloads_states for one in (wide.choice, *wide.candidates))
    if fits_wide:
        assert plan.precision.updates == "float32"
        assert plan.precision.load == ("float32" if plan.layout in ("single", "ddp") else "bfloat16")
        assert plan.choice.memory == wide.choice.memory
    elif plan.fits and not plan.choice.layout.offloads_states:
        assert (plan.precision.updates, plan.precision.load) == ("stochastic", "bfloat16")
    assert plan.precision == plan.choice.precision
    assert plan.precision.updates != "bfloat16"


@pytest.mark.parametrize("asked", ["train.weight_updates=float32", "model.dtype=float32"])
def test_fp32_weights_that_do_not_fit_are_to_be_given_up_first(asked):
    text = "model: {name: Qwen/Qwen2.5-1.5B}\ntuning: {mode: full}"
    config = config_from_text(text, name="run.yaml", overrides=[asked])
    shape, card = load_model_shape(config.model.name), parse_hardware("1xRTX4090")
    found = make_advised_plan(PlanRequest(config, shape, card, allowed_layouts=("single",)))
    assert not found.fits
    assert asked.partition("=")[0] + "=auto" in [one.setting for one in found.suggestions]


def test_somewhere_rounding_makes_a_run_fit():
    """1.5B on 24 GiB: 16 bytes a parameter do not fit, 12 do."""
    found = planned(run("full", name="Qwen/Qwen2.5-1.5B"), "1xRTX4090")
    assert (found.fits, found.precision.updates) == (True, "stochastic")
    params = load_model_shape("Qwen/Qwen2.5-1.5B").params
    terms = found.memory.terms
    assert terms["weights"] == pytest.approx(2 * params, rel=0.02)
    assert terms["optimizer"] == pytest.approx(8 * params, rel=0.02)
    eight = planned(run("full", "train: {optim: paged_adamw_8bit, weight_updates: stochastic}"), "1xRTX4090")
    scales = 2 * 4 / 256 * eight.memory.terms["weights"] / 2
    assert 0.5 * scales < eight.memory.terms["optimizer"] < scales  # states are paged, embeddings' have none


@pytest.mark.parametrize("mode", ["lora", "qlora"])
@pytest.mark.parametrize(("wish", "compute", "dtype"), [
    ("auto", "bfloat16", "float32"), ("auto", "float32", "float32"), ("float32", "bfloat16", "float32"),
    ("bfloat16", "bfloat16", "bfloat16"), ("bfloat16", "float32", "float32"), ("bfloat16", "float16", "float32"),
])  # fmt: skip
def test_adapters_are_fp32_unless_bf16_is_asked_for_by_name(mode, wish, compute, dtype):
    config = config_from_text(f"model: {{name: x}}\ntuning: {{mode: {mode}, lora: {{dtype: {wish}}}}}", name="x")
    assert adapter_dtype(config, Precision(compute, compute, "")) == dtype


@pytest.mark.parametrize(("mode", "machine", "only", "more", "said"), [
    ("qlora", "1xRTX4090", "single", "", "adapters and their states are bf16"),
    ("qlora", "2xH100", "fsdp", "", "adapters and their states are bf16"),
    ("lora", "2xH100", "fsdp", "", "fsdp still steps adapters in fp32"),
    ("qlora", "2xH100", "zero2", "", "zero2 still steps adapters in fp32"),
    ("lora", "1xT4", "single", "", "adapters stay in fp32, because the run computes in fp16"),
    ("lora", "1xH100", "single", "train: {bf16: false}", "adapters stay in fp32, because the run computes in fp32"),
])  # fmt: skip
def test_what_comes_of_the_wish_for_bf16_adapters_is_said(mode, machine, only, more, said):
    name = "Qwen/Qwen2.5-0.5B"
    plain = run(mode, more, name)
    lora = plain.tuning.lora.model_copy(update={"dtype": "bfloat16"})
    asked = plain.model_copy(update={"tuning": plain.tuning.model_copy(update={"lora": lora})})
    shape, hardware = load_model_shape(name), parse_hardware(machine)
    plans = [make_plan(PlanRequest(one, shape, hardware, allowed_layouts=(only,))) for one in (plain, asked)]
    assert any(said in reason for reason in plans[1].reasons)
    assert not any("tuning.lora.dtype" in reason for reason in plans[0].reasons)


@pytest.mark.parametrize(
    ("layout", "trained"), [(SINGLE, 16), (Layout("ddp", 2), 20), (Layout("fsdp", 2, 2), 8), (Layout("zero2", 2, 2), 9)]
)
def test_the_plan_counts_adapters_gradients_and_states_of_qlora_in_fp32(layout, trained):
    """Bytes a parameter: weight, gradient, two states, DDP's bucket: 4 each; ZeRO-2 on 2 ranks 2 + 1 + 2 + 4."""
    config, shape = run("qlora"), load_model_shape("Qwen/Qwen2.5-3B-Instruct")
    found = resident_bytes(config, shape, element_bytes(config, BF16, layout), layout)
    r, targets = config.tuning.lora.r, shape.linears
    params = sum(count * r * (linear.inputs + linear.outputs) for linear, count in targets)
    total = found.adapters + found.gradients + found.optimizer + found.gradient_buckets + found.master_weights
    assert total == pytest.approx(trained * params, rel=1e-3)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("updates")
    base = make_llama(folder / "base")
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)
    rows = write_rows(folder / "rows.jsonl", (chat(f"{n} + {n}", f"it is {2 * n}.") for n in range(24)))
    train = {"effective_batch_size": 4, "max_steps": 5, "learning_rate": 1e-5, "bf16": True, "warmup_steps": 0}
    write_run(folder, base, rows, train={**train, "gradient_checkpointing": False}, output={"if_exists": "replace"})
    return folder


def summary_of(folder: Path, name: str) -> dict:
    return json.loads((folder / "outputs" / name / "summary.json").read_text())


def saved_dtypes(folder: Path) -> set[str]:
    return {str(tensor.dtype).removeprefix("torch.") for tensor in weights(folder).values()}


@pytest.mark.build
@pytest.mark.parametrize(("mode", "more", "trained", "states", "moved", "lost"), [
    ("qlora", (), "float32", "float32", (0.95, 1.0), False),
    ("qlora", ("tuning.lora.dtype=bfloat16",), "bfloat16", "bfloat16", (0.0, 0.95), None),
    ("full", (), "float32", "float32", (0.95, 1.0), False),
    ("full", ("train.weight_updates=stochastic",), "bfloat16", "float32", (0.0, 0.5), False),
    ("full", ("train.weight_updates=bfloat16",), "bfloat16", "bfloat16", (0.0, 0.3), True),
])  # fmt: skip
def test_a_run_says_and_records_its_dtypes_and_what_a_step_moves(
    world, succeed, mode, more, trained, states, moved, lost
):
    name = "-".join([mode, *more]).replace("=", "-")
    words = ("--config", str(world / "run.yaml"), f"tuning.mode={mode}", f"output.name={name}")
    printed = succeed("train", *words, *more)
    found = summary_of(world, name)["updates"]
    kind = "adapters" if mode != "full" else "weights"
    assert (found[kind], found["optimizer_states"]) == ([trained], [states])
    assert moved[0] <= found["moved_share"] <= moved[1]
    if mode == "qlora":
        assert found["weights"][0] == "nf4"
    if lost is not None:
        assert found["lost"] is lost
    assert ("Most updates are lost" in printed) == found["lost"]
    run_folder = world / "outputs" / name
    assert saved_dtypes(run_folder) == {"bfloat16" if mode == "full" else trained}
    if mode == "full":
        assert json.loads((run_folder / "model" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.build
def test_rounded_runs_resume_to_the_same_bits(world, succeed):
    same = ["--config", str(world / "run.yaml"), "tuning.mode=full", "train.weight_updates=stochastic",
            "train.learning_rate=1e-3", "train.save_steps=2"]  # fmt: skip
    succeed("train", *same, "output.name=whole")
    succeed("train", *same, "output.name=parts", "train.stop_after_steps=2")
    succeed("resume", *same, "--run", "parts")
    assert_same_bits(*(weights(world / "outputs" / name) for name in ("whole", "parts")))


@pytest.mark.parametrize("layout", ["single", "ddp", "fsdp", "zero2"])
@pytest.mark.parametrize("updates", ["float32", "stochastic", "bfloat16"])
def test_a_run_is_resumed_with_the_updates_that_it_was_started_with(tmp_path, layout, updates):
    """Whatever would fit now: another way would round its weights, or find states of another dtype."""
    folder, batch = RunFolder(tmp_path), {"micro_batch": 2, "grad_accum": 2, "ranks": 1}
    folder.write_json("manifest.json", {"format": MANIFEST_FORMAT, "batch": batch, "layout": layout, "processes": 1})
    folder.write_json("plan.json", {"precision": {"updates": updates}, "compiled": True})
    checkpoint_path(folder.checkpoints_path, 1).mkdir(parents=True)  # without a step nothing is kept
    stopped = resume.read_previous_run(folder)
    assert stopped.compiled
    for wish in ("auto", "stochastic"):
        config = run("full", f"train: {{weight_updates: {wish}}}")
        is_kept = wish == "auto" and layout in ("single", "ddp")
        _, kept = resume.resume_constraints(config, stopped, 1)
        assert kept == (updates if is_kept else None)
        if layout in ("single", "ddp"):
            for masters in (True, False):
                options = {"fp32_master_weights": masters, "resumed_updates": kept}
                wanted = run("full", f"train: {{weight_updates: {updates if is_kept else wish}}}")
                resumed = apply_weight_updates(BF16, config, layout, **options)
                assert resumed == apply_weight_updates(BF16, wanted, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "mode", "copies"), [
    ("ddp", "full", []), ("fsdp", "qlora", []), ("tp", "lora", []), ("zero2", "qlora", ["float32"]),
    ("zero3", "full", ["float32"]),
])  # fmt: skip
def test_every_layout_steps_fp32_and_saves_in_the_dtype_of_the_base(world, strategy, mode, copies):
    from tests.test_distributed import start as launched

    name = f"{strategy}-{mode}"
    words = ["train-distributed", "--strategy", strategy, "--nproc", "2", "--config", str(world / "run.yaml")]
    answer = launched(world, *words, f"tuning.mode={mode}", f"output.name={name}")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    found = summary_of(world, name)["updates"]
    assert (found["masters"], found["optimizer_states"]) == (copies, ["float32"])
    trained = found["adapters"] if mode != "full" else found["weights"]
    assert trained == (["bfloat16"] if copies else ["float32"])
    assert found["moved_share"] > 0.95
    assert saved_dtypes(world / "outputs" / name) == {"bfloat16" if mode == "full" else "float32"}


@pytest.mark.parametrize(("weights", "adapters", "masters", "named", "way"), [
    (("bfloat16",), (), (), "bfloat16", "train.weight_updates=auto, or a higher"),
    (("nf4", "float32"), ("bfloat16",), (), "bfloat16", "tuning.lora.dtype=auto, or a higher"),
    (("float32",), (), (), "float32", "set a higher"),
    (("bfloat16",), ("bfloat16",), ("float32",), "float32", "set a higher"),
])  # fmt: skip
def test_the_warning_names_what_is_stepped_and_a_setting_that_would_help(weights, adapters, masters, named, way):
    facts = UpdateFacts(weights, adapters, masters, (), 0.1, "float32")
    assert facts.is_lost
    for changes in ({"moved_share": 0.51}, {"moved_share": None}, {"rounding": "stochastic"}):
        assert not dataclasses.replace(facts, **changes).is_lost, changes
    assert all(part in facts.warning for part in (f"since {named} has too few digits", way))


def test_of_a_base_that_is_divided_a_checkpoint_of_adapters_reads_no_layer(world):
    """All that PEFT saves is there; of the base its embeddings alone, which PEFT may save beside them."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    base = AutoModelForCausalLM.from_pretrained(world / "base")
    model = get_peft_model(base, LoraConfig(target_modules="all-linear", modules_to_save=["norm"], use_dora=True))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name and "lora_" in name)  # frozen adapters are saved too
    found = dict(full_state_dict.adapter_parameters(model))
    saved = get_peft_model_state_dict(model, state_dict=found)
    assert saved.keys() == get_peft_model_state_dict(model).keys()
    assert not [name for name in found if "base_layer" in name or "original_module" in name]
    assert sum("embed_tokens" in name for name in found) == 1
