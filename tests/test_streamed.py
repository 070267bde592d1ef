"""A frozen base in RAM whose blocks visit the device: the resident run to the bit, and what the plan says."""

import dataclasses
import json
import logging
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from sft_play.config.load import config_from_text
from sft_play.errors import DoesNotFit, TrainingError
from sft_play.machine import host_speed
from sft_play.machine.hardware import parse_hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner.batching import BatchPlan
from sft_play.planner.candidates import STREAMED_LEAD, build_candidate, choose_candidate
from sft_play.planner.decide import PlanRequest, build_plan_inputs, make_plan
from sft_play.planner.layout import Layout, find_layouts
from sft_play.planner.memory.model_states import streamed_bytes
from sft_play.training.model import streamed_base
from sft_play.training.model.streamed_base import BlockStream, move_blocks, stream_base
from tests.conftest import chat, write_rows, write_run
from tests.models import make_tokenizer
from tests.test_merge import EXPERTS, llama, small_model, with_images

QWEN = "Qwen/Qwen2.5-3B-Instruct"
LAYERS = {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"]}


def images() -> object:
    text = {"vocab_size": 400, "sliding_window": 32, "num_hidden_layers": 5, **LAYERS}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 32, "patch_size": 16}  # fmt: skip
    return with_images("Gemma3", text, vision, mm_tokens_per_image=4)


# More blocks than places, odd and even: each is driven out between its passes.
MODELS = {
    "dense": lambda: llama(num_hidden_layers=5),
    "experts": lambda: small_model("Qwen3Moe", num_hidden_layers=4, **EXPERTS),
    "images": images,
}
RUNS = {
    "dense, checkpointed in bf16": ("dense", "qlora", ["train.gradient_checkpointing=true", "train.bf16=true"]),
    "dense, one pass": ("dense", "lora", ["train.batch_size=8", "train.gradient_checkpointing=false"]),
    "DoRA": ("dense", "qlora", ["tuning.lora.use_dora=true", "train.gradient_checkpointing=false"]),
    "PiSSA": ("dense", "lora", ["tuning.lora.init=pissa", "train.batch_size=4"]),
    "experts in 4 bits": ("experts", "qlora", ["train.gradient_checkpointing=1"]),
    "an image-text base": ("images", "lora", ["train.gradient_checkpointing=false", "train.bf16=true"]),
}  # fmt: skip


def base_of(folder: Path, kind: str) -> Path:
    model = MODELS[kind]()
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def trained(folder: Path) -> tuple[list, dict, dict]:
    """Losses, adapters and summary of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    losses = [(line.get("loss"), line.get("grad_norm"), line.get("eval_loss")) for line in lines]
    losses = [figures for figures in losses if any(figures)]  # a resumed run has a line that says so
    return losses, load_file(folder / "adapter" / "adapter_model.safetensors"), summary


@pytest.mark.build
@pytest.mark.parametrize("name", RUNS)
def test_a_streamed_run_is_the_resident_one_to_the_bit(tmp_path, succeed, name):
    """Losses, gradients, evaluations, answers and adapters; and it is streamed, which the engine's proof checks."""
    kind, mode, words = RUNS[name]
    rows = write_rows(tmp_path / "rows.jsonl", (chat(f"what is {n}?", f"it is {n} " * (1 + n % 3)) for n in range(24)))
    run = write_run(
        tmp_path, base_of(tmp_path / "base", kind), rows, tuning={"mode": mode}, data={"val_fraction": 0.25},
        train={"max_steps": 3, "learning_rate": 1e-2}, eval={"steps": 2, "generate_rows": 3, "max_new_tokens": 4},
    )  # fmt: skip
    found = {}
    for layout in ("single", "streamed"):
        succeed("train", "--config", str(run), "--strategy", layout, *words, f"output.name={layout}")
        found[layout] = trained(tmp_path / "outputs" / layout)
    (losses, adapters, summary), (others, other_adapters, streamed) = found["single"], found["streamed"]
    assert others == losses
    assert len(losses) > 3
    assert adapters.keys() == other_adapters.keys()
    assert all(torch.equal(value, other_adapters[key]) for key, value in adapters.items())
    for key in ("before", "after", "samples"):
        assert streamed[key] == summary[key]
    assert (summary["engine_proof"]["layout"], streamed["engine_proof"]["layout"]) == ("single", "streamed")


@pytest.mark.build
def test_a_run_goes_on_from_streamed_to_resident_and_is_answered_block_by_block(tmp_path, succeed, monkeypatch):
    rows = write_rows(tmp_path / "rows.jsonl", (chat(f"what is {n}?", f"it is {n}") for n in range(16)))
    run = write_run(tmp_path, base_of(tmp_path / "base", "dense"), rows, tuning={"mode": "qlora"},
                    train={"max_steps": 4})  # fmt: skip
    succeed("train", "--config", str(run), "output.name=whole")
    succeed("train", "--config", str(run), "--strategy", "streamed", "output.name=parts", "train.stop_after_steps=2")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("what is 3?\n")
    monkeypatch.setenv("INPUT", str(prompts))
    outputs = [tmp_path / "streamed.jsonl", tmp_path / "single.jsonl"]
    succeed("resume", "--run", str(tmp_path / "outputs/parts"), "--strategy", "single")
    whole, parts = (trained(tmp_path / "outputs" / name) for name in ("whole", "parts"))
    assert parts[0] == whole[0]
    assert all(torch.equal(value, parts[1][key]) for key, value in whole[1].items())
    succeed("train", "--config", str(run), "--strategy", "streamed", "output.name=streamed")
    for name, output in zip(("streamed", "whole"), outputs, strict=True):
        monkeypatch.setenv("OUTPUT", str(output))
        said = succeed("infer", "--run", str(tmp_path / "outputs" / name))
        assert ("go over the bus" in said) is (name == "streamed")
    answers = [json.loads(output.read_text())["answer"] for output in outputs]
    assert answers[0] == answers[1]


# --- the blocks -------------------------------------------------------------------------------------------------------
@pytest.mark.build
@pytest.mark.parametrize("kind", MODELS)
def test_the_device_holds_two_blocks_and_the_rest(kind):
    """Counted in storages, within 1% of what the plan counts for a base in 32 bits."""
    model = MODELS[kind]().requires_grad_(False)
    whole = sum(parameter.nbytes for parameter in {id(one): one for one in model.parameters()}.values())
    stream = stream_base(model, torch.device("cpu"))
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in model.parameters()}
    blocks = [sum(one.nbytes for one in block.parameters()) for block in stream.blocks]
    assert sum(storages.values()) == pytest.approx(whole - sum(blocks) + 2 * max(blocks), rel=0.01)
    assert sum(place.nbytes for place in stream._places) == pytest.approx(2 * max(blocks), rel=0.02)
    assert stream.host_bytes == pytest.approx(sum(blocks), rel=0.02)
    stream.require_streamed()
    next(stream.blocks[0].parameters()).data = torch.zeros(next(stream.blocks[0].parameters()).shape)
    with pytest.raises(TrainingError, match="block 0 holds weights of its own"):
        stream.require_streamed()


@pytest.mark.build
def test_a_block_is_brought_whatever_the_order_of_visits():
    """Each visit finds the block's own numbers, and the next block's where one is on its way."""

    class Block(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((3, 5), value), requires_grad=False)

    blocks = [Block(float(value)) for value in range(5)]
    stream = BlockStream(torch.device("cpu"))
    for block in blocks:
        stream.add(block)
    stream.start()
    draw = random.Random(3)
    for index in [*range(5), *range(5), *(draw.randrange(5) for _ in range(40))]:
        with torch.set_grad_enabled(draw.random() < 0.5):
            stream.visit(index)
        assert (blocks[index].weight == index).all()
        assert index + 1 == 5 or (blocks[index + 1].weight == index + 1).all()


@pytest.mark.build
def test_a_pin_that_is_refused_is_one_warning_with_figures(monkeypatch, caplog):
    refused = type("Cuda", (), {"cudaHostRegister": staticmethod(lambda *_: 2)})
    monkeypatch.setattr(streamed_base.torch.cuda, "cudart", lambda: refused)
    stream = BlockStream(torch.device("cpu"))
    stream.is_pinned = True  # as on a card
    with caplog.at_level(logging.WARNING):
        for block in llama().requires_grad_(False).model.layers:
            stream.add(block)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "pins no more than 0.0 GiB" in caplog.text


@pytest.mark.build
def test_ram_that_runs_out_is_an_error_with_figures(monkeypatch):
    def refuse(*_):
        raise OSError(12, "Cannot allocate memory")

    blocks = MODELS["dense"]().requires_grad_(False).model.layers
    stream = BlockStream(torch.device("cpu"))
    stream.add(blocks[0])
    monkeypatch.setattr(streamed_base.mmap, "mmap", refuse)
    with pytest.raises(DoesNotFit, match=r"0\.00 GiB of the base are there, and the next block takes 0\.00"):
        stream.add(blocks[1])


@pytest.mark.parametrize("seed", range(3))
def test_a_bus_that_is_slower_than_the_computation_is_said_with_both(seed):
    plan, draw = make_plan(request_of("1xRTX4090,ram=64GiB", "meta-llama/Llama-3.3-70B-Instruct")), random.Random(seed)
    computed, size = plan.speed.pass_times.seconds(plan.choice.step.tokens), 34 * 2**30
    for _ in range(20):
        rate = draw.uniform(0.2, 5) * 2 * size / computed
        said = streamed_base.slow_bus_warning(plan, size, rate)
        assert bool(said) == (2 * size > rate * computed)
        assert not said or f"{computed:.1f} s by the plan" in said


@pytest.mark.build
@pytest.mark.slow
def test_ranks_that_stream_train_as_ddp_does(tmp_path, succeed):
    rows = write_rows(tmp_path / "rows.jsonl", (chat(f"what is {n}?", f"it is {n} " * (1 + n % 3)) for n in range(24)))
    run = write_run(tmp_path, base_of(tmp_path / "base", "dense"), rows, tuning={"mode": "qlora"},
                    train={"max_steps": 3, "learning_rate": 1e-2})  # fmt: skip
    for layout in ("ddp", "streamed"):
        words = ("--nproc", "2", "--strategy", layout, f"output.name={layout}")
        succeed("train-distributed", "--config", str(run), *words)
    (losses, adapters, _), (others, other_adapters, summary) = (
        trained(tmp_path / "outputs" / layout) for layout in ("ddp", "streamed")
    )
    assert others == losses
    assert all(torch.equal(value, other_adapters[key]) for key, value in adapters.items())
    assert (summary["engine_proof"]["layout"], summary["engine_proof"]["ranks"]) == ("streamed", 2)


def test_blocks_that_share_weights_keep_them_on_the_device():
    model = llama().requires_grad_(False)
    shared = model.model.layers[0].mlp.up_proj.weight
    model.model.layers[1].mlp.up_proj.weight = shared
    before = shared.clone()
    stream = move_blocks(model, torch.device("cpu"))
    stream.start()
    for index in (0, 1, 0):
        stream.visit(index)
        assert torch.equal(model.model.layers[index].mlp.up_proj.weight, before)


# --- the plan ---------------------------------------------------------------------------------------------------------
def request_of(hardware: str, model: str = QWEN, mode: str = "qlora", **train: object) -> PlanRequest:
    text = json.dumps({"model": {"name": model, "max_seq_len": 1024}, "tuning": {"mode": mode}, "train": train})
    config = config_from_text(text, name="run")
    return PlanRequest(config, load_model_shape(model), parse_hardware(hardware))


@pytest.mark.parametrize(("hardware", "model"), [
    ("1xRTX3060,ram=64GiB", "Qwen/Qwen3-32B"), ("1xRTX4090,ram=64GiB", "meta-llama/Llama-3.3-70B-Instruct"),
])  # fmt: skip
def test_a_base_that_no_card_holds_is_streamed_with_its_bus_in_words(hardware, model):
    plan = make_plan(request_of(hardware, model))
    assert (plan.layout, plan.fits) == ("streamed", True)
    reason = next(reason for reason in plan.reasons if reason.startswith("the base visits from RAM: "))
    assert "GB/s" in reason
    sent = streamed_bytes(request_of(hardware, model).config, load_model_shape(model), 2)
    assert sent < plan.choice.host_required < 1.15 * sent  # with what is read at once


def test_too_little_ram_is_refused_with_what_it_would_take():
    plan = make_plan(request_of("1xRTX4090,ram=24GiB", "meta-llama/Llama-3.3-70B-Instruct"))
    assert not plan.fits
    streamed = next(one for one in plan.candidates if one.layout.is_streamed)
    assert "RAM" in streamed.insufficient_memory
    assert "of 24.0" in streamed.verdict


@pytest.mark.parametrize("kind", ["rwkv", "zamba2"])
def test_classes_that_cannot_be_streamed_are_refused_by_name(kind):
    request = request_of("1xRTX4090,ram=64GiB")
    shape = dataclasses.replace(request.shape, model_type=kind)
    layouts, refused = find_layouts(request.config, shape, request.hardware)
    assert "streamed" not in [layout.name for layout in layouts]
    assert next(one.because for one in refused if one.name == "streamed").startswith(f"{kind}: ")
    shape = dataclasses.replace(shape, model_type="ctrl", can_checkpoint=False)
    _, refused = find_layouts(request.config, shape, request.hardware)
    assert ["no blocks" in one.because for one in refused if one.name == "streamed"] == [True]


@pytest.mark.build
def test_a_class_without_blocks_is_no_streamed_one():
    stream = stream_base(nn.Linear(3, 3).requires_grad_(False), torch.device("cpu"))
    with pytest.raises(TrainingError, match="no block of this class"):
        stream.require_streamed()


def test_full_fine_tuning_and_compiled_blocks_are_refused_by_name(refuse, tmp_path, tiny_llama):
    rows = write_rows(tmp_path / "rows.jsonl", [chat("a", "b")] * 8)
    run = write_run(tmp_path, tiny_llama, rows)
    said = refuse("plan", "--config", str(run), "--strategy", "streamed", "tuning.mode=full")
    assert "zero3_offload does that" in said
    assert "arrive when it is called" in refuse(
        "plan", "--config", str(run), "--strategy", "streamed", "train.compile=true"
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_bus_is_hidden_by_passes_of_many_tokens_and_shown_where_it_is_not(seed):
    """By a rule of its own: each direction waits for what its computation does not cover."""
    draw = random.Random(seed)
    request = request_of("1xRTX4090,ram=128GiB", draw.choice([QWEN, "Qwen/Qwen3-8B"]), draw.choice(["lora", "qlora"]))
    rate = draw.uniform(0.2e9, 5e9)
    speed = host_speed.HostSpeed("RTX 4090", 0.0, "a test", "2026-12-01", bus_bytes_per_s=rate)
    inputs = build_plan_inputs(dataclasses.replace(request, host_speed=speed))
    layers, layout = request.shape.num_layers, Layout("streamed")
    for micro in (1, 4, 16):
        one = build_candidate(inputs, layout, BatchPlan(micro, 32 // micro, 1), layers)
        parts, passes = one.speed.parts, 32 // micro
        own = {"matrix", "memory", "dequantise", "kernels", "kernel_starts"}
        computed = sum(seconds for name, seconds in parts.items() if name in own) / passes
        sent = streamed_bytes(request.config, request.shape, 2) / rate
        waits = max(0.0, sent - computed / 3) + max(0.0, sent - computed * 2 / 3)
        assert parts["bus"] / passes == pytest.approx(waits, rel=1e-6, abs=1e-9)


def test_auto_streams_where_nothing_else_fits_or_it_is_clearly_faster():
    """The rule again, on candidates of random speeds."""
    inputs = build_plan_inputs(request_of("1xRTX4090,ram=128GiB"))
    batch, layers = BatchPlan(4, 8, 1), inputs.shape.num_layers
    resident, streamed = (build_candidate(inputs, Layout(name), batch, layers) for name in ("single", "streamed"))
    draw, chosen = random.Random(5), set()
    for _ in range(60):
        lead, room = draw.uniform(0.8, 1.8), draw.random() < 0.8
        budget = resident.budget if room else dataclasses.replace(resident.budget, device=1)
        one = dataclasses.replace(resident, budget=budget)
        other = dataclasses.replace(streamed, speed=resident.speed.scaled(1 / lead))
        choice = choose_candidate([one, other])
        assert choice is not None
        assert choice.layout.name == ("streamed" if not room or lead >= STREAMED_LEAD else "single")
        chosen.add(choice.layout.name)
    assert chosen == {"single", "streamed"}


def test_a_measured_bus_stays_beside_the_host_and_is_planned_with(tmp_path, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path))
    host_speed.save_host_speed("a card", measured_by="a run", bus_bytes_per_s=6e9)
    assert host_speed.load_host_speeds()["a card"].operator_s == 0
    host_speed.save_host_speed("a card", 1e-5, measured_by="a run")
    known = host_speed.load_host_speeds()["a card"]
    assert (known.operator_s, known.bus_bytes_per_s) == (1e-5, 6e9)
    request = dataclasses.replace(request_of("1xRTX3060,ram=64GiB", "Qwen/Qwen3-32B"), host_speed=known)
    assert "at 6 GB/s (measured by a run" in " ".join(make_plan(request).reasons)
