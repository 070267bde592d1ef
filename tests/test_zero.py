"""ZeRO: its checkpoints resumed over another number of ranks, with the same states and the losses of the unbroken run;
ZeRO-3 with QLoRA: what a rank holds while loading and in a step, and runs over two CPU ranks that prove it."""

import functools
import json
import random
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sft_play.config.load import config_from_text
from sft_play.errors import RunFolderError, TrainingError
from sft_play.machine.hardware import parse_hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner.candidates import evaluate_candidates
from sft_play.planner.decide import PlanRequest, build_plan_inputs, make_plan
from sft_play.planner.explain import plan_lines
from sft_play.planner.layout import Layout, find_layouts
from sft_play.planner.memory.estimate import host_copy_bytes, host_read_bytes, loading_terms
from sft_play.planner.memory.model_states import large_tensors, nf4_bytes, weight_bytes
from sft_play.planner.memory.step_memory import Step, StepMemorySimulation
from sft_play.planner.plan import plan_from_json
from sft_play.planner.precision import Precision
from sft_play.training.checkpoints import checkpoints, last_checkpoint
from sft_play.training.checkpoints.last_checkpoint import forbid_pickled_code
from sft_play.training.engines import _require_divided
from sft_play.training.heartbeat import Heartbeat
from tests.test_distributed import start, succeed
from tests.test_train import assert_same_bits, logged, losses, weights

pytestmark = pytest.mark.build
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed here")


def written(folder: Path, ranks: int) -> Path:
    """A checkpoint with the names that DeepSpeed's has."""
    checkpoint = folder / "checkpoint-3"
    (checkpoint / "global_step3").mkdir(parents=True)
    for rank in range(ranks):
        (checkpoint / "global_step3" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(b"x" * 1000)
    (checkpoint / "global_step3" / "mp_rank_00_model_states.pt").write_bytes(b"x" * 300)
    (checkpoint / "latest").write_text("global_step3")
    return checkpoint


def trainer(*, is_deepspeed: bool = True) -> Any:
    plugin, heartbeat = SimpleNamespace(deepspeed_config={}), Heartbeat(60.0)
    heartbeat._thread = threading.current_thread()  # as of a run of several ranks
    return SimpleNamespace(
        is_deepspeed_enabled=is_deepspeed, heartbeat=heartbeat, model_wrapped=None, wait_for_disk=lambda: None,
        accelerator=SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin)),
    )  # fmt: skip


def test_what_as_many_ranks_wrote_is_read_as_it_is(tmp_path):
    checkpoint = written(tmp_path, 1)
    for one in (trainer(), trainer(is_deepspeed=False)):
        with last_checkpoint.readable_checkpoint(one, checkpoint) as path:
            assert path == checkpoint
    with last_checkpoint.readable_checkpoint(trainer(is_deepspeed=False), written(tmp_path / "two", 2)) as path:
        assert path.parent == tmp_path / "two"


@pytest.mark.parametrize(("free", "fits"), [(2 * 2000 + 1000 + 300, True), (2 * 2000 + 1000 + 299, False)])
def test_a_conversion_that_finds_no_room_says_what_it_takes_and_leaves_nothing(tmp_path, monkeypatch, free, fits):
    checkpoint, made = written(tmp_path, 2), []
    before = {path: path.stat().st_mtime_ns for path in checkpoint.rglob("*")}
    monkeypatch.setattr(last_checkpoint, "free_disk_bytes", lambda _: free)
    monkeypatch.setattr(last_checkpoint, "_convert_to_universal", lambda _, path, __: made.append(path) or path.mkdir())
    if fits:
        one = trainer()
        with last_checkpoint.readable_checkpoint(one, checkpoint) as path:
            assert path == made[0] == checkpoints.checkpoint_path(tmp_path / checkpoints.STAGING_NAME, 3)
            assert one.heartbeat.last_note == (3, "converting the checkpoint")
            assert one.heartbeat._last_progress is None  # it may take longer than distributed.timeout_s
    else:
        with pytest.raises(RunFolderError, match=r"checkpoint-3 for another number of ranks .* about 5,300 bytes"):
            last_checkpoint.readable_checkpoint(trainer(), checkpoint).__enter__()
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-3"}
    assert before == {path: path.stat().st_mtime_ns for path in checkpoint.rglob("*")}


RANKS = """
import os


def keep():
    from sft_play.training.checkpoints import last_checkpoint

    read = last_checkpoint.finish_loading

    def loaded(trainer, path):
        is_copy = (path / "latest_universal").is_file()
        read(trainer, path)
        if is_copy:
            trainer.model_wrapped.save_checkpoint(os.environ["KEPT"], exclude_frozen_parameters=True)

    last_checkpoint.finish_loading = loaded


def die():
    import signal
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal._save_optimizer_state = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


if "RANK" in os.environ and os.environ.get("KEPT"):
    keep()
if os.environ.get("RANK") == "0" and os.environ.get("DIES"):
    die()
"""
"""sitecustomize.py: ranks that write what they have loaded at once, or that are killed while they convert."""


def states(checkpoint: Path, aside: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]], set[float]]:
    """Of a checkpoint of DeepSpeed: each whole weight and moment, the optimizer's groups, its counts of steps."""
    (parts,) = checkpoint.glob("global_step*")
    with forbid_pickled_code(checkpoint):
        last_checkpoint._convert_to_universal(checkpoint, aside, parts)
    (zero,) = aside.glob("*/zero")
    tensors, steps = {}, set()
    for path in zero.glob("*/*.pt"):
        value = torch.load(path, weights_only=False)
        value = value["param"] if isinstance(value, dict) else value
        if path.stem == "step":
            steps.add(float(value))
        else:
            tensors[f"{path.parent.name} {path.stem}"] = value.flatten()
    whole = torch.load(zero / "optimizer_state.pt", weights_only=False)
    steps |= {float(one["step"]) for one in whole.get("optimizer_state_dict", {}).get("state", {}).values()}
    groups = [{key: one[key] for key in ("lr", "weight_decay", "betas", "eps")} for one in whole["param_groups"]]
    return tensors, groups, steps


def run(world: Path, command: str, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return start(world, command, "--config", f"{world}/run.yaml", *words, limit_s=400, **environ)


def done(world: Path, command: str, *words: str, **environ: str) -> str:
    return succeed(world, command, *words, limit_s=400, **environ).stdout


@pytest.fixture(scope="module")
def unbroken(world) -> Callable[..., list[float]]:
    """Losses of the run over two ranks that nobody stopped."""

    @functools.cache
    def losses_of(strategy: str, *words: str) -> list[float]:
        name = f"unbroken-{strategy}-{abs(hash(words))}"
        done(world, "train-distributed", *words, f"output.name={name}", STRATEGY=strategy, NPROC="2")
        return losses(world / "outputs" / name)

    return losses_of


DECAY = "train.weight_decay=0.1"
"""With it the optimizer has two groups, and two counts of steps."""


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize(("strategy", "words", "first", "then"), [
    ("zero2", ["tuning.mode=full", DECAY], 2, 1), ("zero3", ["tuning.mode=full", DECAY], 2, 1),
    ("zero3", ["tuning.mode=full", DECAY, "train.bf16=true"], 1, 2),
    ("zero2", ["tuning.mode=lora", "train.bf16=true"], 1, 2),
    ("zero1", ["tuning.mode=full", DECAY, "train.bf16=true"], 2, 4), ("zero3", ["tuning.mode=qlora"], 2, 4),
], ids=lambda one: "-".join(word.partition("=")[2] for word in one) if isinstance(one, list) else str(one))  # fmt: skip
def test_states_are_those_that_were_saved_and_losses_go_on(world, unbroken, strategy, words, first, then):
    name = f"{strategy}-{first}-{then}-{abs(hash(tuple(words)))}"
    kept, folder = world / name, world / "outputs" / name
    stop = [f"output.name={name}", "train.stop_after_steps=2"]
    done(world, "train-distributed", *words, *stop, STRATEGY=strategy, NPROC=str(first))
    ended = done(world, "resume", *words, RUN=name, NPROC=str(then), KEPT=str(kept))
    assert f"Converting the optimizer states of {first} ranks for {then}" in ended
    saved, groups, steps = states(folder / "checkpoints" / "checkpoint-2", world / f"{name}-saved")
    loaded, groups_then, steps_then = states(kept, world / f"{name}-loaded")
    assert len([key for key in saved if key.endswith("exp_avg_sq") and saved[key].abs().max() > 0]) > 8
    assert_same_bits(saved, loaded)
    assert (groups, steps) == (groups_then, steps_then)
    assert (len(groups), steps) == (2 if DECAY in words else 1, {2.0})
    assert states(folder / "checkpoints" / "checkpoint-5", world / f"{name}-end")[2] == {5.0}
    tolerance = 4e-3 if "train.bf16=true" in words else 1e-5
    assert losses(folder) == pytest.approx(unbroken(strategy, *words), rel=tolerance)
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"checkpoint-2", "checkpoint-5"}
    batch = json.loads((folder / "manifest.json").read_text())["batch"]
    assert (batch["micro_batch"] * batch["grad_accum"] * then, batch["ranks"]) == (8, then)


@pytest.mark.slow
@needs_deepspeed
def test_a_kill_while_it_is_converted_leaves_the_checkpoint_and_the_next_resume_goes_on(world, unbroken):
    words, folder = ["tuning.mode=lora"], world / "outputs" / "killed"
    stop = ["output.name=killed", "train.stop_after_steps=2"]
    done(world, "train-distributed", *words, *stop, STRATEGY="zero2", NPROC="2")
    broken = run(world, "resume", *words, RUN="killed", NPROC="1", DIES="1")
    assert broken.returncode == 1, broken.stdout + broken.stderr
    assert checkpoints.find_damage(folder / "checkpoints" / "checkpoint-2") is None
    done(world, "resume", *words, RUN="killed", NPROC="1")
    assert losses(folder) == pytest.approx(unbroken("zero2", *words), rel=1e-5)
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"checkpoint-2", "checkpoint-5"}


@pytest.mark.slow
@needs_deepspeed
def test_the_best_checkpoint_may_be_of_another_number_of_ranks(world):
    words = ["tuning.mode=full", "train.learning_rate=1.0", "eval.steps=1", "train.save_steps=1", DECAY]
    words += ["train.load_best_model_at_end=true", "train.warmup_steps=0"]
    stop = ["output.name=best", "train.stop_after_steps=2"]
    done(world, "train-distributed", *words, *stop, STRATEGY="zero3", NPROC="2")
    done(world, "resume", *words, RUN="best", NPROC="1")
    found = logged(world / "outputs" / "best", "eval_loss")[1:]
    assert found[5] == pytest.approx(found[0], rel=1e-5)
    assert min(found[:5]) == found[0]


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_losses_in_bf16_are_those_of_zero2(world, layout):
    found = {}
    for name in ("zero2", layout):
        words = ["tuning.mode=qlora", "train.bf16=true", f"output.name=bf16-{name}", "output.if_exists=replace"]
        done(world, "train-distributed", *words, STRATEGY=name, NPROC="2")
        found[name] = losses(world / "outputs" / f"bf16-{name}")
    assert found[layout] == pytest.approx(found["zero2"], rel=2**-8)


@pytest.mark.slow
@needs_deepspeed
def test_a_run_that_zero3_divides_is_resumed_and_written_out(world):
    for name, words in (("unbroken", []), ("broken", ["train.stop_after_steps=2"])):
        words = ["tuning.mode=qlora", f"output.name={name}", *words]
        done(world, "train-distributed", *words, STRATEGY="zero3", NPROC="2")
    done(world, "resume", "tuning.mode=qlora", RUN="broken")
    runs = [world / "outputs" / name for name in ("unbroken", "broken")]
    assert losses(runs[1]) == losses(runs[0])
    assert_same_bits(*map(weights, runs))


BF16 = Precision("bfloat16", "bfloat16", "")
LLAMA_8B, LLAMA_70B = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"
H, F, KV, BLOCKS, WORDS = 4096, 14336, 1024, 32, 128256
"""Llama-3.1-8B: hidden, MLP and key widths, blocks, vocabulary."""


def run_config(text: str = "", *, name: str = LLAMA_8B, mode: str = "qlora"):
    return config_from_text(f"model: {{name: {name}}}\ntuning: {{mode: {mode}}}\n{text}", name="run")


def walk(name: str, ranks: int, *, mode: str = "qlora") -> StepMemorySimulation:
    return StepMemorySimulation(
        run_config(mode=mode), load_model_shape(LLAMA_8B), BF16, Step(1, 2, 2048, layout=Layout(name, ranks, ranks))
    )


def test_a_rank_keeps_its_part_of_packed_weights_and_tables_and_all_constants():
    linears = [H * H] * 2 + [H * KV] * 2 + [H * F] * 3
    packed = BLOCKS * sum(linears) // 2
    constants = BLOCKS * sum(nf4_bytes(elements) for elements in linears) - packed
    tables, norms = 2 * 2 * WORDS * H, 2 * (2 * BLOCKS + 1) * H
    for ranks in (2, 4, 8):
        held, memory = walk("zero3", ranks).resident, walk("zero3_offload", ranks)
        assert held.weights == pytest.approx((packed + tables) / ranks + constants + norms, rel=0.001)
        assert held.host == 0
        offloaded, trained = memory.resident, memory.trained_parameters.params
        assert offloaded.weights == constants + norms  # no parameters, or too small to be worth a gather
        # beside them 18 bytes for each number of the adapters: 2 as they are, 4 master, 8 of states, 4 of gradients
        assert offloaded.host == pytest.approx((packed + tables + 18 * trained) / ranks, rel=0.001)


def test_loading_holds_all_weights_on_every_rank_but_under_fsdp():
    shape = load_model_shape(LLAMA_8B)
    whole = weight_bytes(shape, itemsize=2, is_nf4=True)
    adapters = 4 * walk("zero3", 2).trained_parameters.params  # PEFT makes them fp32
    for ranks in (2, 8):
        for name in ("ddp", "zero2", "zero3", "zero3_offload"):
            assert sum(loading_terms(walk(name, ranks)).values()) == whole + adapters, name
        fsdp = walk("fsdp", ranks)  # its parts, the largest unit (the table), and a tensor that arrives
        part = fsdp.resident.weights + fsdp.resident.adapters
        assert sum(loading_terms(fsdp).values()) == part + 2 * (2 * WORDS * H)
    plain = walk("zero3", 8, mode="lora")  # read and divided tensor by tensor: its part, and the largest table
    assert sum(loading_terms(plain).values()) == plain.resident.weights + plain.resident.adapters + 2 * WORDS * H


def test_a_model_larger_than_a_gpu_is_loaded_by_fsdp_and_both_peaks_are_said():
    """All of the 4-bit weights would be 38 GiB on every GPU."""
    config = run_config("train: {optim: adamw_torch_fused}", name=LLAMA_70B)
    plan = make_plan(PlanRequest(config, load_model_shape(LLAMA_70B), parse_hardware("8xRTX4090,ram=64GiB")))
    assert (plan.layout, plan.fits) == ("fsdp", True)
    zero3 = next(candidate for candidate in plan.candidates if candidate.layout.name == "zero3")
    assert (zero3.fits, "while loading" in str(zero3.rejected_because)) == (False, True)
    told = "\n".join(plan_lines(plan, config, command="make train"))
    memory = plan.memory
    load, step, ram = (size / 2**30 for size in (memory.load_bytes, memory.allocated, memory.host_load_bytes))
    for part in (f"(tensors of a step {step:.2f}: ", f"; {load:.2f} GiB and {ram:.2f} GiB of RAM while loading"):
        assert part in told
    assert "until then each rank holds all of them" not in told
    assert plan.as_json()["peak_bytes"]["load"] == memory.load_bytes < memory.allocated
    assert plan_from_json(json.loads(json.dumps(plan.as_json()))) == plan


@pytest.mark.parametrize("seed", range(12))
def test_what_a_rank_of_fsdp_loads_is_its_parts_a_unit_and_a_tensor(seed):
    """Less with every doubling of the ranks; in RAM only copies of what is cast or stacked, on the first rank."""
    draw = random.Random(seed)
    mode = draw.choice(["full", "lora", "qlora"])
    model = draw.choice([LLAMA_8B, LLAMA_70B, "google/gemma-2b", "Qwen/Qwen3-30B-A3B"])
    shape = replace(load_model_shape(model), stored_dtype=draw.choice(["bfloat16", "float32", None]))
    precision = draw.choice([BF16, Precision("float32", "float32", "")])

    def loaded(name: str, ranks: int) -> StepMemorySimulation:
        step = Step(1, 2, 512, layout=Layout(name, ranks, ranks))
        return StepMemorySimulation(run_config(mode=mode, name=model), shape, precision, step)

    found = [sum(loading_terms(loaded("fsdp", ranks)).values()) for ranks in (2, 4, 8, 16)]
    assert sorted(found, reverse=True) == found
    width = 4 if precision.load == "float32" else 2
    units = [shape.vocab_size * shape.hidden_size, *(kind.params for kind in shape.layers)]
    unit = max(units) * (4 if mode == "full" else width) * 1.1  # with adapters
    tensors = sorted(elements for elements, count, _ in large_tensors(shape) for _ in range(min(count, 4)))
    largest = width * tensors[-1]
    one = loaded("fsdp", 2)
    parts = one.resident.weights + one.resident.adapters
    assert parts + largest < found[0] <= parts + unit + largest
    same = shape.stored_dtype == precision.load
    assert host_copy_bytes(one) == width * (shape.expert_params if same else shape.params)
    assert host_read_bytes(one) == host_copy_bytes(one) + largest
    # each tensor goes straight to its GPU, and what is quantised is read in turn
    threads = 1 if same or mode == "qlora" else 4
    assert host_read_bytes(loaded("ddp", 2)) == width * sum(tensors[-threads:])


@pytest.mark.parametrize("seed", range(3))
def test_what_is_required_covers_loading_and_steps_of_every_candidate(seed):
    draw = random.Random(seed)
    model = draw.choice(["Qwen/Qwen2.5-3B-Instruct", LLAMA_8B, LLAMA_70B, "Qwen/Qwen3-30B-A3B", "google/gemma-2b"])
    machine = draw.choice(["2xRTX3060", "4xRTX4090", "8xH100", "2xT4", "4xA100-80GB,ram=1TiB"])
    text = f"train: {{effective_batch_size: {draw.choice([8, 16, 64])}}}\ntuning: {{mode: qlora}}\n"
    length = draw.choice([256, 1024, 4096])
    config = config_from_text(f"model: {{name: {model}, max_seq_len: {length}}}\n{text}", name="r")
    shape, hardware = load_model_shape(model), parse_hardware(machine)
    job = build_plan_inputs(PlanRequest(config, shape, hardware))
    whole = weight_bytes(shape, itemsize=2, is_nf4=True)
    candidates = evaluate_candidates(job, find_layouts(config, shape, hardware)[0])
    assert {"zero3", "zero3_offload"} <= {candidate.layout.name for candidate in candidates}
    for one in candidates:
        memory = one.memory
        assert one.layout.is_fsdp or one.layout.is_streamed or memory.load_bytes >= whole
        step = memory.reserved + memory.margin + memory.outside_allocator
        assert memory.required == max(step, memory.required_to_load)
        assert memory.is_limited_by_loading == (memory.required > step)
        assert one.fits == (memory.required <= job.device_budget and one.host_required <= (job.host_budget or 1e18))
        if not one.layout.shards_params:
            assert not memory.is_limited_by_loading  # what stays and a step's activations are more


def test_frozen_weights_that_were_not_divided_are_found_out():
    model = torch.nn.Module()  # its parameters, if it had any, would be looked at for tensor-parallel axes
    _require_divided(model, Layout("zero3", 2, 2), "frozen", 100_000, [50_000, 50_000])
    with pytest.raises(TrainingError, match=r"a rank holds 100,000 of 100,000 bytes of frozen weights"):
        _require_divided(model, Layout("zero3", 2, 2), "frozen", 100_000, [50_000, 100_000])
    with pytest.raises(TrainingError, match="are not divided"):  # on every rank of a tensor-parallel group
        _require_divided(model, Layout("tp", 1, 1, 2), "frozen", 100_000, [100_000] * 2)
