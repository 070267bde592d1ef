"""`train.learning_rate: auto` follows its rule, and an explicit value is never changed. LoRA+: lora_B has its own
rate in every layout, as PEFT's optimizer has it, and after a resume."""

import json
import math
import random

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from transformers import AutoModelForCausalLM, TrainingArguments

from sft_play.config.load import config_from_text
from sft_play.machine.hardware import parse_hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.training.loop.loop import PlannedLoop
from sft_play.training.loop.optimizers import loraplus_groups
from tests.conftest import chat, write_rows, write_run
from tests.models import uneven_run
from tests.test_distributed import start
from tests.test_train import assert_resumes, losses, run_yaml, train, trained, weights  # noqa: F401  (fixtures)

pytestmark = pytest.mark.build


def run(mode="lora", rows=32, r=16, alpha=32, rslora=False, more=""):
    lora = f"{{r: {r}, alpha: {alpha}, use_rslora: {str(rslora).lower()}}}"
    text = f"model: {{name: Qwen/Qwen2.5-0.5B}}\ntuning: {{mode: {mode}, lora: {lora}}}\n"
    return config_from_text(f"{text}train: {{effective_batch_size: {rows}{more}}}\n", name="run")


def by_hand(mode, rows, r, alpha, rslora):
    """The rule once more: in halves of the square root's exponent, from the rate at 32 rows."""
    scale = alpha / math.sqrt(r) if rslora else alpha / r
    at_32 = 1e-5 if mode == "full" else 2e-4 / max(1.0, scale * r / 32)
    return at_32 * 2 ** (0.5 * math.log2(sorted((16, rows, 128))[1] / 32))


def test_auto_is_the_rule_on_random_runs():
    draw = random.Random(7)
    for _ in range(300):
        drawn = (
            draw.choice(["qlora", "lora", "full"]), draw.choice([1, 7, 16, 17, 32, 64, 128, 500]),
            draw.choice([1, 4, 16, 64, 256]), draw.choice([1, 8, 32, 33, 64, 512]), draw.random() < 0.3,
        )  # fmt: skip
        assert run(*drawn).learning_rate == pytest.approx(by_hand(*drawn), rel=0.006), drawn  # three digits


def test_the_defaults_are_what_they_were_and_rank_alone_changes_nothing():
    assert (run().learning_rate, run("full").learning_rate) == (2e-4, 1e-5)
    assert {run(r=r).learning_rate for r in (1, 16, 256)} == {2e-4}
    # the incident: r 256 with alpha 512, its scale as usual, diverges at 2e-4
    assert run(r=256, alpha=512).learning_rate == 1.25e-5
    plain = run()
    lora = plain.tuning.lora.model_copy(update={"loraplus_lr_ratio": 16.0})
    plus = plain.model_copy(update={"tuning": plain.tuning.model_copy(update={"lora": lora})})
    assert plus.learning_rate == plain.learning_rate / 16


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_the_plan_says_the_rate_and_why(mode):
    def reasons(config):
        return make_plan(PlanRequest(config, load_model_shape("Qwen/Qwen2.5-0.5B"), parse_hardware("H100"))).reasons

    (said,) = [line for line in reasons(run(mode, alpha=64)) if line.startswith("learning rate")]
    expected = "1e-05 (auto): 2e-05 at 128" if mode == "full" else "0.0001 (auto)"
    assert said.startswith(f"learning rate {expected}")
    assert ("x 32/64, since" in said) == (mode == "lora")
    given = run(mode, alpha=512, more=", learning_rate: 0.5")
    assert given.learning_rate == 0.5
    assert not [line for line in reasons(given) if line.startswith("learning rate")]


# --- LoRA+ ------------------------------------------------------------------------------------------------------------
PLUS = "tuning.lora.loraplus_lr_ratio=16"


@pytest.mark.parametrize("dora", [False, True])
def test_the_groups_are_those_of_pefts_optimizer(tiny_llama, dora):
    base = AutoModelForCausalLM.from_pretrained(tiny_llama)
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"], use_dora=dora))
    theirs = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16)
    wanted = {id(one): group["lr"] for group in theirs.param_groups for one in group["params"]}
    params = [one for one in model.parameters() if one.requires_grad]
    groups = loraplus_groups([{"params": params, "lr": 1e-3, "weight_decay": 0.1}], model, ratio=16)
    ours = {id(one): group["lr"] for group in groups for one in group["params"]}
    assert ours == wanted
    assert set(ours.values()) == {1e-3, 16e-3}


@pytest.mark.parametrize("bf16", ["true", "false"])
@pytest.mark.parametrize("more", ["tuning.mode=qlora", "tuning.lora.use_dora=true", "train.optim=lion_8bit"])
def test_a_run_resumes_to_the_same_bits(trained, bf16, more):  # noqa: F811
    given = (PLUS, "tuning.mode=lora", more, f"train.bf16={bf16}", "train.max_steps=4", "train.save_steps=2",
             "train.learning_rate=2e-3")  # fmt: skip
    _, parts = assert_resumes(trained, *given)
    state = torch.load(parts / "checkpoints" / "checkpoint-2" / "optimizer.pt", weights_only=False)
    slow, fast = state["param_groups"]
    assert [fast["lr"], fast["initial_lr"]] == pytest.approx([16 * slow["lr"], 16 * 2e-3])


def test_only_lora_b_moves_faster(trained):  # noqa: F811
    """After the first step lora_A is where it was, as B was zero; Adam's first step is the rate's size."""
    for name, ratio in (("plain", 1), ("plus", 8)):
        words = (f"tuning.lora.loraplus_lr_ratio={ratio}", "train.max_steps=1", "train.learning_rate=1e-3")
        folder = trained(name, "tuning.mode=lora", *words)
        moved = [one.abs().max().item() for name, one in weights(folder).items() if "lora_B" in name]
        assert moved == pytest.approx([ratio * 1e-3] * len(moved), rel=1e-2)


def test_an_optimizer_that_is_asked_for_twice_has_the_ratio_once(tmp_path, tiny_llama):
    """As under DeepSpeed, where deepspeed_init and the Trainer both ask."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_llama), LoraConfig(target_modules=["q_proj"]))
    arguments = TrainingArguments(output_dir=str(tmp_path), learning_rate=1e-3, report_to=[], use_cpu=True)
    loop = object.__new__(PlannedLoop)  # as far as the Trainer's own method reads it
    vars(loop).update(model=model, args=arguments, optimizer=None, optimizer_cls_and_kwargs=None)
    loop._loraplus_lr_ratio = 16.0
    first = loop.create_optimizer()
    assert loop.create_optimizer() is first
    assert [group["lr"] for group in first.param_groups] == [1e-3, 16e-3]


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp", "zero2", "zero3"))]
)
def test_ranks_lose_what_one_process_does(tmp_path, tiny_llama, strategy):
    uneven_run(tmp_path, tiny_llama)
    words = ("--config", f"{tmp_path}/run.yaml", "tuning.mode=lora", PLUS, "tuning.lora.use_dora=false")
    for verb, name, more in (("train", "one", {}), ("train-distributed", "many", {"STRATEGY": strategy, "NPROC": "2"})):
        answer = start(tmp_path, verb, *words, f"output.name={name}", **more)
        assert answer.returncode == 0, answer.stdout + answer.stderr
    one, many = (losses(tmp_path / "outputs" / name) for name in ("one", "many"))
    assert len(one) == 5
    assert many == pytest.approx(one, rel=2e-5)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_that_would_be_all_warmup_has_none(tmp_path, tiny_llama, succeed, steps):
    """The first step of a warmup has a rate of zero: one of a single step would train nothing."""
    rows = write_rows(tmp_path / "rows.jsonl", (chat(f"what is {n}?", "yes") for n in range(16)))
    run_file = write_run(tmp_path, tiny_llama, rows, train={"max_steps": steps, "learning_rate": 1e-3})
    succeed("train", "--config", str(run_file), "output.name=short")
    lines = [json.loads(line) for line in (tmp_path / "outputs/short/metrics.jsonl").read_text().splitlines()]
    assert next(line["learning_rate"] for line in lines if "loss" in line) == (1e-3 if steps == 1 else 0)
