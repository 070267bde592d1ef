"""ZeRO-3 with QLoRA: what a rank holds while loading and in a step, and runs over two CPU ranks that prove it."""

import json
import random
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from sft_play.config.load import config_from_text
from sft_play.errors import TrainingError
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
from sft_play.training.engines import _require_divided
from tests.models import uneven_run
from tests.test_distributed import losses, start
from tests.test_going_on import tensors
from tests.test_train import assert_same_bits

BF16 = Precision("bfloat16", "bfloat16", "")
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed here")
LLAMA_8B, LLAMA_70B = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"
H, F, KV, BLOCKS, WORDS = 4096, 14336, 1024, 32, 128256
"""Llama-3.1-8B: hidden, MLP and key widths, blocks, vocabulary."""


def run(text: str = "", *, name: str = LLAMA_8B, mode: str = "qlora"):
    return config_from_text(f"model: {{name: {name}}}\ntuning: {{mode: {mode}}}\n{text}", name="run")


def walk(name: str, ranks: int, *, mode: str = "qlora") -> StepMemorySimulation:
    return StepMemorySimulation(
        run(mode=mode), load_model_shape(LLAMA_8B), BF16, Step(1, 2, 2048, layout=Layout(name, ranks, ranks))
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
    config = run("train: {optim: adamw_torch_fused}", name=LLAMA_70B)
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
        return StepMemorySimulation(run(mode=mode, name=model), shape, precision, step)

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
        assert one.layout.is_fsdp or memory.load_bytes >= whole
        step = memory.reserved + memory.margin + memory.outside_allocator
        assert memory.required == max(step, memory.required_to_load)
        assert memory.is_limited_by_loading == (memory.required > step)
        assert one.fits == (memory.required <= job.device_budget and one.host_required <= (job.host_budget or 1e18))
        if not one.layout.shards_params:
            assert not memory.is_limited_by_loading  # what stays and a step's activations are more


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_llama) -> Path:
    folder = tmp_path_factory.mktemp("zero")
    uneven_run(folder, tiny_llama)
    return folder


@pytest.mark.build
@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_losses_in_bf16_are_those_of_zero2(world, layout):
    found = {}
    for name in ("zero2", layout):
        words = ["--config", f"{world}/run.yaml", "tuning.mode=qlora", "train.bf16=true", f"output.name=bf16-{name}"]
        answer = start(world, "train-distributed", *words, "output.if_exists=replace", STRATEGY=name, NPROC="2")
        assert answer.returncode == 0, answer.stdout + answer.stderr
        found[name] = losses(world / "outputs" / f"bf16-{name}")
    assert found[layout] == pytest.approx(found["zero2"], rel=2**-8)


@pytest.mark.build
@pytest.mark.slow
@needs_deepspeed
def test_a_run_that_zero3_divides_is_resumed_and_written_out(world):
    words, over = ["--config", f"{world}/run.yaml", "tuning.mode=qlora"], {"STRATEGY": "zero3", "NPROC": "2"}
    for verb, more, asked in (
        ("train-distributed", ["output.name=unbroken"], over),
        ("train-distributed", ["output.name=broken", "train.stop_after_steps=2"], over),
        ("resume", [], {"RUN": "broken"}),
    ):
        ended = start(world, verb, *words, *more, **asked)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    assert losses(world / "outputs" / "broken") == losses(world / "outputs" / "unbroken")
    assert_same_bits(*(tensors(world / "outputs" / name / "adapter") for name in ("unbroken", "broken")))


def test_frozen_weights_that_were_not_divided_are_found_out():
    model = torch.nn.Module()  # its parameters, if it had any, would be looked at for tensor-parallel axes
    _require_divided(model, Layout("zero3", 2, 2), "frozen", 100_000, [50_000, 50_000])
    with pytest.raises(TrainingError, match=r"a rank holds 100,000 of 100,000 bytes of frozen weights"):
        _require_divided(model, Layout("zero3", 2, 2), "frozen", 100_000, [50_000, 100_000])
    with pytest.raises(TrainingError, match="are not divided"):  # on every rank of a tensor-parallel group
        _require_divided(model, Layout("tp", 1, 1, 2), "frozen", 100_000, [100_000] * 2)
