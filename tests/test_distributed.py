"""Runs over several CPU ranks: every engine proved, the losses of one process, and what stops before it begins."""

import json
import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sft_play.config.load import load_config
from sft_play.errors import TrainingError
from sft_play.machine.hardware import Hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.memory.model_states import nf4_bytes, weight_bytes
from tests import warm
from tests.conftest import ROOT, clean_environment
from tests.models import uneven_run
from tests.processes import free_port
from tests.test_train import assert_same_bits, losses

GIB = 2**30
pytestmark = pytest.mark.build
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed here")


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_llama) -> Path:
    """A folder with a run YAML of five steps, two of them accumulated: an epoch's uneven end among them."""
    folder = tmp_path_factory.mktemp("ranks")
    uneven_run(folder, tiny_llama)
    return folder


def start(world: Path, *words: str, limit_s: float = 280, python: str = "", **environ: str) -> Any:
    """A command's end; its processes begin with the sitecustomize.py of the folder's `site`, where it has one."""
    env = clean_environment(**{"PYTHONPATH": f"{ROOT}{os.pathsep}{world}/site", **environ})
    command = [python or warm.python(), "-m", "sft_play", *words]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit_s)


def succeed(world: Path, *words: str, **environ: Any) -> subprocess.CompletedProcess[str]:
    """A command with the run YAML of the folder, which has to end with exit code 0."""
    command, *more = words
    answer = start(world, command, "--config", f"{world}/run.yaml", *more, **environ)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer


@pytest.fixture(scope="module")
def alone(world) -> dict[str, list[float]]:
    """Losses of the same runs in one process."""
    found = {}
    for mode in ("lora", "full", "qlora"):
        succeed(world, "train", f"tuning.mode={mode}", f"output.name=alone-{mode}")
        found[mode] = losses(world / "outputs" / f"alone-{mode}")
    return found


ENGINES = [
    ("ddp", "lora", "DistributedDataParallel"), ("fsdp", "full", "FSDPLlamaForCausalLM"),
    pytest.param("fsdp", "qlora", "FSDPPeftModelForCausalLM", marks=pytest.mark.slow),
    pytest.param("zero2", "qlora", "DeepSpeedEngine", marks=needs_deepspeed),
    pytest.param("zero3", "qlora", "DeepSpeedEngine", marks=[needs_deepspeed, pytest.mark.slow]),
    pytest.param("zero3", "full", "DeepSpeedEngine", marks=[needs_deepspeed, pytest.mark.slow]),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "mode", "wrapped"), ENGINES)
def test_every_engine_is_proved_and_loses_what_one_process_loses(world, alone, strategy, mode, wrapped):
    name = f"{strategy}-{mode}"
    extensions = world / "extensions"
    words = ("train-distributed", f"tuning.mode={mode}", f"output.name={name}")
    answer = succeed(world, *words, STRATEGY=strategy, NPROC="2", TORCH_EXTENSIONS_DIR=str(extensions))
    assert not list(extensions.rglob("deepspeed_shm_comm")), "it takes a minute to compile, and training never calls it"
    assert f"Engine: {strategy} proved: the model is a {wrapped} over 2 ranks" in answer.stdout
    assert "accumulation steps mismatch" not in answer.stdout + answer.stderr
    run = world / "outputs" / name
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["layout"], plan["ranks"], plan["micro_batch"], plan["grad_accum"]) == (strategy, 2, 2, 2)
    assert losses(run) == pytest.approx(alone[mode], rel=1e-5)
    saved = run / ("model" if mode == "full" else "adapter")
    assert shapes(saved) == shapes(world / "outputs" / f"alone-{mode}" / saved.name)
    summary = json.loads((run / "summary.json").read_text())
    one = json.loads((world / "outputs" / f"alone-{mode}" / "summary.json").read_text())
    for when in ("before", "after"):  # 13 rows over 2 ranks: each is counted once
        assert summary[when]["loss"] == pytest.approx(one[when]["loss"], rel=1e-5)
    proof = summary["engine_proof"]
    assert (summary["exit"], proof["wrapped_class"], proof["layout"]) == (0, wrapped, strategy)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all({"loss_rank_0", "loss_rank_1"} <= set(line) for line in lines if "loss" in line)
    assert not list(run.glob(".lock*"))


def shapes(folder: Path) -> dict[str, list[int]]:
    """Names and shapes of the saved tensors."""
    from safetensors import safe_open

    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: list(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    assert found
    return found


def test_ranks_that_a_person_starts_find_each_other_and_one_counts_the_rows_and_plans(world, alone, tmp_path):
    """`torchrun --standalone --nproc-per-node 2 --no-python sft-play train …`, word for word."""
    torchrun_program, program = (shutil.which(name, path=warm.programs()) for name in ("torchrun", "sft-play"))
    if torchrun_program is None or program is None:
        pytest.skip("torchrun and sft-play are not beside this Python")
    words = [torchrun_program, "--standalone", "--nproc-per-node", "2", "--no-python", program, "train", "--config"]
    words += [f"{world}/run.yaml", "tuning.mode=lora", "output.name=by-hand", "--lora-rank", "16", "--strategy", "ddp"]
    environment = clean_environment(SFT_PLAY_CACHE=str(tmp_path / "cache"))
    answer = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    once = ("Rows: counting their tokens before the plan is made", "Engine: ddp proved")
    assert [answer.stdout.count(words) for words in once] == [1, 1]
    run = world / "outputs" / "by-hand"
    assert json.loads((run / "plan.json").read_text())["row_tokens"] is not None
    assert losses(run) == pytest.approx(alone["lora"], rel=1e-5)


@pytest.mark.parametrize(("variables", "message"), [
    ({"STRATEGY": "zero3", "SET": "tuning.mode=qlora train.optim=paged_adamw_8bit"}, "cannot run this job: bitsa"),
    ({"NPROC": "3"}, "does not split over"), ({"GPUS": "0,x"}, "is not a list of GPU numbers"),
    ({"GPUS": ",0,, 1 ,"}, "GPUS= names GPUs, and this machine has none"),
    ({"ACCELERATE_CONFIG": "/nowhere.yaml"}, "/nowhere.yaml"),
])  # fmt: skip
def test_what_cannot_be_meant_is_one_message_before_anything_starts(world, refuse, monkeypatch, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert message in refuse("train-distributed", "--config", f"{world}/run.yaml", "output.name=never")
    assert not (world / "outputs" / "never").exists()


def shown_command(world: Path, name: str, *words: str, **environ: str) -> str:
    """The line of `make launch-command`, which leaves nothing behind."""
    given = ("launch-command", "tuning.mode=lora", "train.max_steps=1", f"output.name={name}", "--json")
    answer = succeed(world, *given, *words, **environ)
    assert not (world / "outputs" / name).exists()
    launch = json.loads(answer.stdout)["launch"]
    assert launch.keys() == {"line", "words", "environment"}
    return str(launch["line"])


def pasted(*lines: str) -> list[subprocess.CompletedProcess[str]]:
    """How each line ends that a person pastes into a shell of its own, all at the same time."""
    options: Any = {"cwd": ROOT, "env": clean_environment(), "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    running = [subprocess.Popen(["sh", "-c", line], text=True, **options) for line in lines]
    ended = [(process, process.communicate(timeout=280)[0]) for process in running]
    return [subprocess.CompletedProcess(one.args, one.returncode, said) for one, said in ended]


@pytest.mark.parametrize(("layout", "words", "environ"), [
    ("ddp", (), {"STRATEGY": "ddp"}),
    pytest.param("fsdp", (), {"SET": "model.mesh_shape=[[2],[fsdp]]"}, marks=pytest.mark.slow),
    pytest.param("zero2", ("--deepspeed",), {"STRATEGY": "zero2"}, marks=[needs_deepspeed, pytest.mark.slow]),
])  # fmt: skip
def test_the_command_that_is_shown_trains_where_it_is_pasted(world, layout, words, environ):
    name = f"shown-{layout}"
    line = shown_command(world, name, *words, NPROC="2", **environ)
    (ended,) = pasted(line)
    assert ended.returncode == 0, f"{line}\n{ended.stdout}"
    run = world / "outputs" / name
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["layout"], plan["ranks"], len(losses(run))) == (layout, 2, 1)
    assert json.loads((run / "summary.json").read_text())["exit"] == 0


def test_the_commands_that_two_nodes_are_shown_train_together(world):
    meeting = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    nodes = {**meeting, "NPROC": "1", "STRATEGY": "ddp"}
    lines = [shown_command(world, "shown-nodes", **nodes, NODE_RANK=str(rank)) for rank in (0, 1)]
    ended = pasted(*lines)
    assert [one.returncode for one in ended] == [0, 0], "\n".join(one.stdout for one in ended)
    assert json.loads((world / "outputs" / "shown-nodes" / "plan.json").read_text())["hardware"]["nodes"] == 2


@pytest.mark.slow
def test_the_command_in_a_resumed_runs_log_can_be_pasted_too(world):
    words = ["tuning.mode=lora", "output.name=logged", "train.stop_after_steps=1"]
    for command in ("train-distributed", "resume"):
        succeed(world, command, *words, NPROC="2", STRATEGY="ddp")
    run = world / "outputs" / "logged"
    before = losses(run)
    line = [line for line in (run / "train.log").read_text().splitlines() if "Launch: " in line][-1]
    (ended,) = pasted(line.partition("Launch: ")[2].replace("train.stop_after_steps=1", "train.stop_after_steps=2"))
    assert ended.returncode == 0, ended.stdout
    assert (losses(run)[: len(before)], len(losses(run))) == (before, len(before) + 2)


def test_an_engine_that_was_left_out_or_whose_partitions_have_other_names_is_found_out(world, tiny_llama):
    import torch

    from sft_play.training.engines import check_engine, fp32_partitions

    config = load_config(world / "run.yaml", overrides=["tuning.mode=lora"]).config
    machine = Hardware((), "CPU", 2, 8 * GIB, 8 * GIB, cpu_ranks=2)
    plan = make_plan(PlanRequest(config, load_model_shape(str(tiny_llama)), machine, allowed_layouts=("fsdp",)))

    with pytest.raises(TrainingError, match="the plan says fsdp, but the wrapped model is a Linear"):
        check_engine(SimpleNamespace(model_wrapped=torch.nn.Linear(2, 2)), plan)
    # DeepSpeed's `BF16_Optimizer`, which it takes at stage 1 where the user's file accumulates in fp32
    with pytest.raises(TrainingError, match="DeepSpeed's object keeps its partitions under unknown names"):
        fp32_partitions(SimpleNamespace(optimizer=object()))


def test_a_rank_that_nobody_launched_is_refused_and_help_names_none(command, refuse, world, capfd):
    assert "to train here: train" in refuse("rank", "--config", f"{world}/run.yaml")
    with pytest.raises(SystemExit):
        command("--help")
    assert not re.search(r"\brank:", capfd.readouterr().out)
    printed = refuse("plan", "--config", f"{world}/run.yaml", "--tensorboard")
    assert not printed.rstrip().endswith(", rank")


WRITTEN_ELSEWHERE = """// for the A100s
{
  "_comment": "what trained the 7B",
  # every rank its part of everything
  "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
  "bf16": {"enabled": true},  // not on this machine
  "train_micro_batch_size_per_gpu": 1,
  "gradient_accumulation_steps": "auto",
}
"""


@needs_deepspeed
def test_each_rank_keeps_half_of_the_nf4_bytes_and_the_run_is_that_of_one_process(world, alone, command, tiny_llama):
    from safetensors.torch import load_file

    (world / "theirs.json").write_text(WRITTEN_ELSEWHERE)
    words = ("tuning.mode=qlora", "output.name=theirs", "train.batch_size=auto", "eval.generate_rows=3")
    words, file = (*words, "eval.max_new_tokens=4"), f"{world}/theirs.json"
    answer = succeed(world, "train-deepspeed", *words, NPROC="2", DEEPSPEED_CONFIG=file)
    said = answer.stdout + answer.stderr
    assert said.count("the run computes in float32") == 1
    assert "Gradient accumulation steps mismatch" not in said
    run = world / "outputs" / "theirs"
    plan, summary = (json.loads((run / name).read_text()) for name in ("plan.json", "summary.json"))
    assert (plan["layout"], plan["micro_batch"], plan["grad_accum"], plan["effective_batch"]) == ("zero3", 1, 4, 8)
    assert losses(run) == pytest.approx(alone["qlora"], rel=1e-5)
    one = json.loads((world / "outputs" / "alone-qlora" / "summary.json").read_text())
    for when in ("before", "after"):
        assert summary[when]["loss"] == pytest.approx(one[when]["loss"], rel=1e-5)
        assert summary[when]["exact_match"] is not None  # answers were generated over both ranks
    proof = summary["engine_proof"]
    half = proof["frozen_whole_bytes"] / 2
    assert proof["frozen_bytes_by_rank"] == [half, half]  # NF4's packed bytes, tables and norms
    shape = load_model_shape(str(tiny_llama))
    whole = weight_bytes(shape, itemsize=4, is_nf4=True)
    constants = sum(count * (nf4_bytes(x.weights) - x.weights // 2) for x, count in shape.linears)
    assert proof["frozen_whole_bytes"] == pytest.approx(whole - constants, rel=0.01)
    assert command("consolidate", "--run", str(run))[0] == 0
    folders = ("consolidated-5", "adapter", "checkpoints/checkpoint-5")
    made, *others = (load_file(run / name / "adapter_model.safetensors") for name in folders)
    for other in others:
        assert_same_bits(made, other)
