"""Rows without padding where no kernel takes their boundaries: when, at what price, and on which GPU one is trusted."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from typing import Any

import pytest

from sft_play.config.load import config_from_text
from sft_play.machine.gpu import Gpu
from sft_play.machine.gpu_catalog import CATALOG_ENTRIES
from sft_play.machine.hardware import Hardware, parse_hardware
from sft_play.models.config_json import load_model_shape
from sft_play.models.shape import LinearShape
from sft_play.planner import candidates
from sft_play.planner.batching import MicroBatches, average_micro_steps, summarize_row_tokens
from sft_play.planner.candidates import plan_micro_batches
from sft_play.planner.decide import PlanRequest, build_plan_inputs, make_plan
from sft_play.planner.kernels import RowAttention
from sft_play.planner.pass_work import CHAT_OPERATORS, FORWARD_OPERATOR_WEIGHT, OUTER_OPERATORS
from sft_play.planner.plan import plan_from_json
from sft_play.planner.precision import Precision
from sft_play.planner.speed import predict_speed

GIB = 2**30
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
LATENT = LinearShape("self_attn.kv_b_proj", 512, 32 * 256)


def test_a_call_for_each_chat_is_planned_exactly_where_no_kernel_takes_boundaries():
    draw, seen = random.Random(5), set()
    for _ in range(400):
        device = draw.choice(["cuda", "cuda", "rocm", "cpu"])
        half, width = draw.random() < 0.7, draw.choice([64, 128, 256, 257, 512])
        capability = draw.choice([None, (6, 0), (7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (12, 0)])
        shape = dataclasses.replace(load_model_shape(LLAMA), head_dim=width)
        if is_latent := draw.random() < 0.1:
            (kind,) = shape.layers
            kind = dataclasses.replace(kind, linears=(*kind.linears, LATENT))
            shape = dataclasses.replace(shape, layers=(kind,))
        precision = Precision("bfloat16" if half else "float32", "bfloat16", "")
        because = RowAttention(run_of(), shape, "sdpa", capability, device).one_by_one_reason(precision)
        runs = half and width <= 256 and not is_latent and device != "cpu"
        runs = runs and (device != "cuda" or capability not in ((6, 0), (7, 0), (7, 5)))
        assert (because is None) == runs, (device, half, width, capability)
        seen.add((device, runs))
    assert len(seen) == 5


def run_of(model: str = LLAMA, mode: str = "lora", batch: int = 32, *overrides: str) -> Any:
    text = f"model: {{name: {model}, max_seq_len: 2048}}\ntuning: {{mode: {mode}}}\n"
    text += f"train: {{effective_batch_size: {batch}, kernels: none}}\n"
    return config_from_text(text, name="run.yaml", overrides=overrides)


MODELS = (LLAMA, "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-3B-Instruct", "google/gemma-3-1b-it")


def test_rows_are_padded_exactly_where_that_is_predicted_faster(monkeypatch):
    draw, seen = random.Random(3), {True: 0, False: 0}
    cards = [entry.name for entry in CATALOG_ENTRIES]
    monkeypatch.setattr(RowAttention, "one_by_one_reason", lambda *_: "no kernel")  # on every card
    for _ in range(15):
        model, mode = draw.choice(MODELS), draw.choice(["lora", "qlora"])
        card, batch = draw.choice(cards), draw.choice([8, 32, 64])
        mean, spread = draw.choice([12, 40, 200, 800]), draw.choice([0.0, 0.02, 0.6])
        lengths = [max(2, min(2048, round(mean * draw.lognormvariate(0, spread)))) for _ in range(400)]
        known = summarize_row_tokens(Counter(lengths), limit=2048)
        config, machine = run_of(model, mode, batch), parse_hardware(f"1x{card}")
        request = PlanRequest(config, load_model_shape(model), machine, row_tokens=known, has_eval=False)
        plan, job = make_plan(request), build_plan_inputs(request)
        for candidate in plan.candidates:
            step, speeds = candidate.step, {}
            precision = job.layout_precision(step.layout)
            assert step.one_by_one == step.varlen
            for joined in (True, False):
                other = dataclasses.replace(step, varlen=joined, one_by_one=joined, padded=not joined and step.masks)
                cut = plan_micro_batches(job, precision, other)
                assert cut.padded != joined
                passes = average_micro_steps(known, cut, effective_batch=batch, ranks=1)
                speed = predict_speed(job.config, job.shape, precision, other, job.rates, micro_steps=passes)
                speeds[joined] = speed.tokens_per_s
            assert step.varlen == (speeds[True] >= speeds[False]), (card, model, mean, spread, speeds)
            assert candidate.speed.tokens_per_s == pytest.approx(max(speeds.values()))
            seen[step.varlen] += 1
        said = "each chat would be a call of its own" in " ".join(plan.reasons)
        assert said == (not plan.choice.step.varlen and plan.choice.batch.micro_batch > 1)
    assert min(seen.values()) > 3, seen


def test_every_chat_of_a_pass_costs_its_starts():
    """By hand: a GPU that takes no time waits for all starts."""
    request = PlanRequest(run_of(mode="full"), load_model_shape(LLAMA), parse_hardware("1xH200"), has_eval=False)
    job = build_plan_inputs(request)
    rates = dataclasses.replace(job.rates, card_factor=0.0, operator_s=1.0)
    plan, rows_of_one_length = make_plan(request), dataclasses.replace(job, row_tokens=None)
    step = candidates._build_step(rows_of_one_length, plan.choice.layout, plan.batch, 0, loss="chunked")
    assert step.varlen
    passes = average_micro_steps(summarize_row_tokens({64: 32}, limit=2048), MicroBatches(1, tokens=2048, padded=False),
                            effective_batch=32, ranks=1)  # fmt: skip
    assert (passes.count, passes.rows) == (1, 32)
    starts = {}
    for apart in (True, False):
        other = dataclasses.replace(step, one_by_one=apart)
        speed = predict_speed(job.config, job.shape, job.precision, other, rates, micro_steps=passes)
        starts[apart] = speed.parts["kernel_starts"]
    # Llama forwards: 2 norms of 8, a rotation of 10, a gate of 2, 2 sums, 7 products and attention; backwards norms of
    # 16, 14, 3, 7 and each product twice
    forward, backward = 2 * 8 + 10 + 2 + 2 + 7 + 1, 2 * 16 + 14 + 3 + 7 + 2 * 7 + 1
    assert starts[False] == pytest.approx(32 * (FORWARD_OPERATOR_WEIGHT * forward + backward) + OUTER_OPERATORS)
    assert starts[True] - starts[False] == pytest.approx(32 * CHAT_OPERATORS * 32)


def test_the_rows_of_a_pass_are_those_of_its_fullest_rank():
    draw = random.Random(9)
    for _ in range(40):
        rows = summarize_row_tokens({draw.randint(1, 90): draw.randint(1, 40) for _ in range(6)}, limit=90)
        ranks, batch = draw.choice([1, 2, 4]), draw.choice([4, 16, 33])
        cut = MicroBatches(2, tokens=180, padded=draw.random() < 0.5, overhead=20)
        passes = average_micro_steps(rows, cut, effective_batch=batch, ranks=ranks)
        assert 1 <= passes.rows <= min(batch, rows.rows)
        if ranks == 1:  # every row is in one pass
            assert passes.rows * passes.count == pytest.approx(min(batch, rows.rows))
        assert passes.rows * rows.longest >= passes.padded_tokens - 1e-9


MASKED_MODELS = (
    "Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.1-8B", "google/gemma-2-9b", "Qwen/Qwen3-30B-A3B",
    "microsoft/Phi-3.5-mini-instruct",
)  # fmt: skip


def test_plans_leave_the_mask_out_by_the_rule():
    draw, seen = random.Random(7), set()
    for _ in range(80):
        model, capability = draw.choice(MASKED_MODELS), draw.choice([(7, 5), (8, 0), (9, 0), None])
        backend, packing = draw.choice(["bnb", "bnb", "unsloth"]), draw.choice(["none", "none", "best_fit"])
        attention, micro = draw.choice(["auto", "auto", "eager"]), draw.choice([1, 4])
        mode = "qlora" if backend == "unsloth" else "lora"
        config = run_of(
            model, mode, 16, "model.max_seq_len=1024", f"tuning.backend={backend}", f"data.packing={packing}",
            f"train.batch_size={micro}", f"model.attn_implementation={attention}",
        )  # fmt: skip
        dropout = draw.choice([0.0, 0.0, 0.1])
        shape = dataclasses.replace(load_model_shape(model), uses_alibi=draw.random() < 0.1, attention_dropout=dropout)
        machine = Hardware((Gpu(0, "GPU", 140 * GIB, None, capability),), "CPU", 8, 256 * GIB, 256 * GIB)
        plan = make_plan(PlanRequest(config, shape, machine))
        keeps = attention == "eager" or "gemma-2" in model or "A3B" in model or shape.uses_alibi
        keeps = keeps or capability == (7, 5) or backend == "unsloth"
        bounded = packing != "none" and attention == "auto" and not model.startswith("google/gemma-2")
        bounded = bounded and not dropout and not shape.uses_alibi and backend != "unsloth"
        step = plan.choice.step
        assert step.varlen == bounded
        assert step.one_by_one == (bounded and capability == (7, 5))
        assert step.masks == keeps, (model, capability, backend, attention)
        assert step.padded == (not bounded if packing != "none" else keeps and micro > 1)
        rows = max(step.eval_batch, 1 if packing != "none" else micro)
        assert (plan.masked_bytes is None) == (not bounded and (keeps or rows == 1))
        told = " ".join(plan.reasons)
        if packing == "none" and micro > 1:
            assert ("without a mask" in told) == (not keeps)
            assert ("padded to it and masked (" in told) == keeps
        assert plan_from_json(json.loads(json.dumps(plan.as_json()))) == plan
        seen.add((keeps, packing, micro))
    assert len(seen) == 8


@pytest.mark.build
def test_no_number_is_read_from_the_device(monkeypatch):
    """On the meta device nothing can be read: a pass with checkpointing and windows, forwards and backwards."""
    import torch
    from transformers import AutoModelForCausalLM, MistralConfig

    from sft_play.training.loop.rows import CHAT_LENGTHS, COUNT_KEYS, Collator
    from sft_play.training.model import attention_functions

    config = MistralConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3, head_dim=8,
                           num_attention_heads=2, num_key_value_heads=1, sliding_window=6)  # fmt: skip
    ids = [list(range(3, 3 + n)) for n in (9, 4)]
    rows = [{"input_ids": one, "labels": [-100, *one[1:]], "chat_lengths": [len(one)]} for one in ids]
    batch = Collator(pad_id=0, flat=True, adds_chat_lengths=True)(rows)
    assert batch[CHAT_LENGTHS] == (9, 4)
    assert CHAT_LENGTHS not in Collator(pad_id=0, flat=True)(rows)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention_functions.VARLEN_ATTENTION)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: False)  # torch knows none of this device
    inputs = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in batch.items() if name not in COUNT_KEYS
    }  # fmt: skip
    model(**inputs, use_cache=False).loss.backward()
    assert all(one.grad is not None for one in model.parameters())
    with pytest.raises((RuntimeError, NotImplementedError)):  # without the lengths they would be
        model(**{name: value for name, value in inputs.items() if name != CHAT_LENGTHS}, use_cache=False)
    # sliding rows that are padded: their lengths are their shape
    padded = {"input_ids": torch.zeros(2, 9, dtype=torch.long, device="meta"), "labels": None}
    model(**padded, position_ids=torch.zeros(1, 9, dtype=torch.long, device="meta"), use_cache=False)


@pytest.mark.build
def test_lengths_stay_on_the_host_on_their_way_to_the_model(tmp_path, tiny_llama, monkeypatch):
    """As accelerate's loader and DDP hand them on; the kernel, which needs none, is not given any."""
    from torch.nn.parallel.scatter_gather import scatter_kwargs

    from sft_play.training.loop.rows import CHAT_LENGTHS
    from sft_play.training.model import attention_functions
    from tests.ranks_micro_batches import trainer_of

    cut = MicroBatches(1, tokens=48, padded=False)
    trainer = trainer_of(tiny_llama, tmp_path, cut, ranks=1, bf16=False)
    batches = [batch for batch in trainer.get_train_dataloader() if batch]
    assert any(len(batch[CHAT_LENGTHS]) > 1 for batch in batches)
    for batch in batches:
        lengths = trainer._prepare_inputs(batch)[CHAT_LENGTHS]
        assert lengths == tuple(batch["cu_seq_lens_q"].diff().tolist())
        assert set(map(type, lengths)) == {int}
    _, (given,) = scatter_kwargs((), {CHAT_LENGTHS: (3, 4)}, [0])
    assert tuple(given[CHAT_LENGTHS]) == (3, 4)
    monkeypatch.setattr(attention_functions, "_uses_flash", True)
    trainer = trainer_of(tiny_llama, tmp_path, cut, ranks=1, bf16=False)
    batches = [batch for batch in trainer.get_train_dataloader() if batch]
    assert {("cu_seq_lens_q" in batch, CHAT_LENGTHS in batch) for batch in batches} == {(True, False)}
