"""Evaluation: a micro-batch of its own, rows of like length together, the same figures whatever the batches; answers
are generated in batches that hold no more than a training step does."""

import dataclasses
import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from sft_play.config.load import config_from_text
from sft_play.machine.hardware import parse_hardware
from sft_play.models.config_json import load_model_shape, parse_model_shape
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.layout import SINGLE, Layout
from sft_play.planner.memory.estimate import (
    MAX_EVALUATION_ROWS,
    RESIDENT_TERMS,
    kv_cache_bytes_per_token,
    max_evaluation_rows,
)
from sft_play.planner.memory.step_memory import Step, StepMemorySimulation, is_padded
from sft_play.planner.precision import Precision
from sft_play.trace.confirm import step_settings
from sft_play.trace.step import trace_step
from sft_play.training.loop.rows import balanced_batch_size, longest_first_order, pad_to_multiple
from sft_play.training.measure import exact_match
from sft_play.training.measure.exact_match import batch_by_tokens
from tests.conftest import write_run
from tests.ranks import found_by_ranks
from tests.ranks_evaluation import LENGTHS, figures, rows_of, trainer_of
from tests.test_decisions import QUICK
from tests.test_trace import SMALL

BF16 = Precision("bfloat16", "bfloat16", "bf16 everywhere")
MODELS = ("Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.1-8B", "google/gemma-2-9b", "Qwen/Qwen3-30B-A3B")
LAYOUTS = (SINGLE, Layout("ddp", 2), Layout("fsdp", 4, 4), Layout("zero3", 4, 4))


def walk(model: str, mode: str, layout: Layout, *words: str, **step: Any) -> StepMemorySimulation:
    config = config_from_text(f"model: {{name: {model}}}", name="x", overrides=[f"tuning.mode={mode}", *words])
    step.setdefault("padded", is_padded(config, layout, rows=step["micro_batch"]))
    return StepMemorySimulation(config, load_model_shape(model), BF16, Step(layout=layout, **step))


@QUICK
@given(
    model=st.sampled_from(MODELS),
    mode=st.sampled_from(["qlora", "lora", "full"]),
    layout=st.sampled_from(LAYOUTS),
    on_gpu=st.booleans(),
    step=st.fixed_dictionaries({
        "micro_batch": st.sampled_from([1, 2, 4, 8]),
        "grad_accum": st.sampled_from([1, 4]),
        "seq_len": st.sampled_from([256, 1000, 4096]),
        "checkpointed_layers": st.sampled_from([0, 6, None]),
        "attention": st.sampled_from(["sdpa", "eager", "flash_attention_2"]),
        "capability": st.sampled_from([(7, 5), (8, 0), (9, 0)]),
    }),
)  # fmt: skip
def test_the_evaluation_batch_is_the_largest_that_stays_within_the_step(model, mode, layout, on_gpu, step):
    """What is reserved for it, on a CPU its tensors, is within the step's; one row more is beyond, or 64 are enough."""
    made = walk(model, mode, layout, on_gpu=on_gpu, **step)

    def beyond(terms: Any) -> int:
        """What is reserved beyond tensors on a GPU: 60% of what passes."""
        resident = sum(terms.get(name, 0) for name in RESIDENT_TERMS) + terms["gradients"]
        passing = sum(terms.values()) - resident
        return int(0.6 * passing + 0.125 * terms["gradients"]) if on_gpu else 0

    trained = [sum(terms.values()) for terms in made.training_phases.values()]

    def is_within(rows: int) -> bool:
        return all(sum(terms.values()) + beyond(terms) <= max(trained) + 1 for _, terms in made.evaluation_phases(rows))

    rows = max_evaluation_rows(made)
    assert 1 <= rows <= MAX_EVALUATION_ROWS
    assert rows == 1 or is_within(rows)
    assert rows == MAX_EVALUATION_ROWS or not is_within(rows + 1)


@pytest.mark.parametrize(("model", "machine"), [("meta-llama/Llama-3.1-8B", "RTX4090"), ("Qwen/Qwen2.5-0.5B", "T4")])
def test_evaluation_never_raises_what_a_plan_needs(model, machine):
    config = config_from_text(f"model: {{name: {model}}}", name="x", overrides=["tuning.mode=qlora"])
    judged, plain = (
        make_plan(PlanRequest(config, load_model_shape(model), parse_hardware(machine), has_eval=flag))
        for flag in (True, False)
    )
    assert judged.choice.step.eval_batch == judged.eval_batch > judged.batch.micro_batch
    assert (judged.memory.allocated, judged.memory.required) == (plain.memory.allocated, plain.memory.required)
    assert judged.as_json()["eval_batch"] == judged.eval_batch
    assert [sum(line.startswith("evaluation: ") for line in plan.reasons) for plan in (judged, plain)] == [1, 0]
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"batch_size": 3})})
    assert make_plan(PlanRequest(config, load_model_shape(model), parse_hardware(machine))).eval_batch == 3


def test_a_micro_batch_of_one_row_has_no_mask_and_its_evaluation_has_one():
    """Two rows of 4,096 tokens beside one: the mask of S x S and the memory-efficient kernel count in evaluation."""
    one = walk("meta-llama/Llama-3.1-8B", "lora", SINGLE, micro_batch=1, grad_accum=1, seq_len=4096)
    assert not one.step.padded
    alone, two = (max(sum(terms.values()) for _, terms in one.evaluation_phases(rows)) for rows in (1, 2))
    texts = walk("meta-llama/Llama-3.1-8B", "lora", SINGLE, "task_mode=cpt", micro_batch=1, grad_accum=1, seq_len=4096)
    of_text = [max(sum(terms.values()) for _, terms in texts.evaluation_phases(rows)) for rows in (1, 2)]
    assert alone == of_text[0]
    assert two - of_text[1] >= 2 * 4096**2  # booleans, one a pair of tokens


def test_zero3_keeps_its_gradients_buffer_while_it_evaluates():
    made = walk("meta-llama/Llama-3.1-8B", "full", Layout("zero3", 8, 8), micro_batch=1, grad_accum=2, seq_len=512)
    of_zero2 = walk("meta-llama/Llama-3.1-8B", "full", Layout("zero2", 8, 8), micro_batch=1, grad_accum=2, seq_len=512)
    assert {terms["gradients"] for _, terms in made.evaluation_phases(1)} == {made.resident.gradients}
    assert {terms["gradients"] for _, terms in of_zero2.evaluation_phases(1)} == {0}


# --- the order --------------------------------------------------------------------------------------------------------
@QUICK
@given(rows=st.integers(1, 2000), most=st.integers(1, 64), ranks=st.integers(1, 16))
def test_batches_are_evened_without_another_pass(rows, most, ranks):
    batch = balanced_batch_size(rows, max_size=most, ranks=ranks)
    assert 1 <= batch <= most
    passes = -(-rows // (batch * ranks))
    assert passes == -(-rows // (most * ranks))
    assert batch == 1 or -(-rows // ((batch - 1) * ranks)) > passes  # none smaller does it


@pytest.mark.build
def test_the_longest_rows_come_first_and_equal_ones_in_their_order():
    draw = np.random.default_rng(3)
    lengths = draw.integers(2, 6, size=40)
    rows = Dataset.from_dict({
        "input_ids": [[7] * length for length in lengths], "labels": [[7] * length for length in lengths],
    })  # fmt: skip
    order = longest_first_order(pad_to_multiple(rows, multiple=16)).tolist()
    assert sorted(order) == list(range(48))
    wanted = sorted(range(48), key=lambda place: (-([*lengths, *[2] * 8][place]), place))
    assert order == wanted == longest_first_order(pad_to_multiple(rows, multiple=16), batch_size=4).tolist()


@pytest.mark.build
@pytest.mark.parametrize("seed", range(8))
def test_the_ranks_that_share_rows_each_get_every_batch(seed):
    """Batch n goes to rank n modulo the ranks, so that the ranks of a group have consecutive ones."""
    draw = np.random.default_rng(seed)
    batch, copies, groups = (int(number) for number in draw.integers(1, 5, size=3))
    count = batch * copies * groups * int(draw.integers(1, 4))
    rows = Dataset.from_dict({"input_ids": [[7] * length for length in draw.integers(2, 9, size=count).tolist()]})
    order = longest_first_order(rows, batch_size=batch, repeats=copies).reshape(-1, batch)
    of_rank = [order[rank :: copies * groups] for rank in range(copies * groups)]
    for group in range(groups):
        sharing = of_rank[group * copies : (group + 1) * copies]
        assert all(np.array_equal(sharing[0], own) for own in sharing)
    once = np.concatenate([of_rank[group * copies] for group in range(groups)], axis=1).flatten()
    assert once.tolist() == longest_first_order(rows).tolist()


# --- the figures ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def alone(tmp_path_factory, tiny_llama):
    return figures(tiny_llama, tmp_path_factory.mktemp("alone"), ranks=1)


@pytest.fixture(scope="module")
def together(tmp_path_factory, tiny_llama):
    """What two ranks found (tests/ranks_evaluation.py)."""
    return found_by_ranks("tests.ranks_evaluation", str(tiny_llama), folder=tmp_path_factory.mktemp("together"))


def by_hand(model: Any, dtype: Any) -> tuple[float, float]:
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    lost, right = [], []
    for row in rows_of():
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])[1:]
        with torch.no_grad():
            logits = whole(input_ids=ids).logits[0, :-1].float()
        trained = labels >= 0
        lost += torch.nn.functional.cross_entropy(logits[trained], labels[trained], reduction="none").tolist()
        right += (logits.argmax(-1) == labels)[trained].tolist()
    return sum(lost) / len(lost), sum(right) / len(right)


@pytest.mark.build
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 1e-3)])
@pytest.mark.parametrize("world", ["alone", "together"])
def test_the_loss_is_the_mean_over_trained_tokens_whatever_batches_and_ranks(
    request, tiny_llama, world, precision, tolerance
):
    """bf16: products are rounded to 8 bits, in another order for another length of the padding."""
    found = request.getfixturevalue(world)[precision]
    loss, accuracy = by_hand(tiny_llama, torch.float32)
    for size, measured in found.items():
        assert measured["loss"] == pytest.approx(loss, rel=tolerance), size
        assert measured["loss"] == pytest.approx(found["1"]["loss"], rel=tolerance), size
        assert measured["entropy"] == pytest.approx(found["1"]["entropy"], rel=tolerance), size
        if precision == "fp32":
            assert measured["accuracy"] == pytest.approx(accuracy, rel=1e-5), size


@pytest.mark.build
def test_batches_of_the_evaluation_hold_rows_of_like_length(tmp_path, tiny_llama):
    trainer = trainer_of(tiny_llama, tmp_path, "eval.batch_size=4")
    seen = []
    step = trainer.prediction_step

    def watched(model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        seen.append(inputs["attention_mask"].sum(1).tolist())
        return step(model, inputs, *args, **options)

    assert trainer.evaluate()["eval_loss"] == trainer.evaluate()["eval_loss"]  # to the last bit
    trainer.prediction_step = watched
    trainer.evaluate()
    assert [len(batch) for batch in seen] == [4, 4, 3]
    assert [length for batch in seen for length in batch] == sorted(LENGTHS, reverse=True)


# --- the trace --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("kind", "mode"), [
    ("llama", "lora"), ("llama", "qlora"), ("llama", "full"), ("mixtral", "qlora"),
])  # fmt: skip
def test_the_estimate_of_an_evaluation_is_what_a_trace_of_it_measures(kind, mode):
    """Where the blocks are its peak. Adapters train in groups, and answer by PEFT's forward, which holds more."""
    fields = {
        "model_type": kind, "hidden_size": 128, "intermediate_size": 65_536, "num_hidden_layers": 2,
        "num_local_experts": 4, "num_experts_per_tok": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 512,
    }  # fmt: skip
    text = f"model: {{name: m, max_seq_len: 512}}\ntuning: {{mode: {mode}}}"
    config, shape = config_from_text(text, name="x"), parse_model_shape(fields, name="m")
    precision = Precision("float32" if mode == "full" else "bfloat16", "bfloat16", "")
    step = Step(1, 1, 512, eval_batch=8, padded=False, masks=False)
    simulation = StepMemorySimulation(config, shape, precision, step)
    sizes = [sum(terms.values()) for _, terms in simulation.evaluation_phases(8)]
    traced = trace_step(step_settings(config, fields, shape, precision, step))
    assert max(sizes) == pytest.approx(traced.phases["evaluation"][0], rel=0.01)


@pytest.mark.build
def test_a_traced_evaluation_has_a_mask_of_its_own():
    """Rows that are padded get the memory-efficient kernel with its mask, also where training has none."""

    def at(**changes: Any) -> int:
        base = dataclasses.replace(SMALL, capability=(8, 0), seq_len=256, attention="sdpa", eval_batch=8)
        # reserved: the peak is the head's
        return trace_step(dataclasses.replace(base, **changes)).phases["evaluation"][1]

    plain = at()
    assert at(eval_mask="ones") == plain
    assert at(eval_mask="padded") >= plain + 8 * 256**2  # booleans, one a pair of tokens
    assert at(eval_mask="padded") == at(mask="padded") == at(mask="packed", eval_mask="padded")


# --- answers ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(10))
def test_batches_hold_as_many_rows_as_their_tokens_allow(seed):
    draw = random.Random(seed)
    tokens = [draw.randint(1, 400) for _ in range(draw.randint(0, 80))]
    order = sorted(range(len(tokens)), key=tokens.__getitem__)
    most = draw.choice([1, 350, 1000, 5000])
    found = list(batch_by_tokens(order, tokens, most))
    assert [index for batch in found for index in batch] == order
    for place, batch in enumerate(found):
        assert len(batch) == 1 or len(batch) * tokens[batch[-1]] <= most
        if place + 1 < len(found):
            assert (len(batch) + 1) * tokens[found[place + 1][0]] > most


@pytest.mark.parametrize(
    ("model", "nbytes"), [("meta-llama/Llama-3.1-8B", 32 * 2 * 8 * 128 * 2), ("Qwen/Qwen2.5-0.5B", 24 * 2 * 2 * 64 * 2)]
)
def test_a_tokens_keys_and_values_are_counted(model, nbytes):
    assert kv_cache_bytes_per_token(load_model_shape(model), 2) == nbytes


@pytest.mark.parametrize(("machine", "model", "has_eval"), [
    ("1xRTX3060", "Qwen/Qwen2.5-0.5B", True), ("1xH100", "Qwen/Qwen2.5-7B", False),
    ("4xRTX4090", "meta-llama/Llama-3.1-8B", True),
])  # fmt: skip
def test_the_caches_of_a_batch_fit_where_a_step_fits(machine, model, has_eval):
    config, shape = config_from_text(f"model: {{name: {model}}}", name="x"), load_model_shape(model)
    plan = make_plan(PlanRequest(config, shape, parse_hardware(machine), has_eval=has_eval))
    gives_back = plan.memory.allocated - plan.memory.resident
    assert plan.answer_tokens >= 1
    if plan.answer_tokens > 1:
        assert plan.answer_tokens * kv_cache_bytes_per_token(shape, 2) < gives_back
    assert plan.answer_tokens >= gives_back // (20 * kv_cache_bytes_per_token(shape, 2) + gives_back // 512)


@pytest.mark.build
def test_a_run_asks_in_batches_of_its_plan(tmp_path, tiny_llama, sums, succeed, monkeypatch):
    seen: list[tuple[int, int]] = []
    real = exact_match._generate

    def generate(model, tokenizer, questions, stop, new):
        seen.append((len(questions), max(len(question.prompt_ids) for question in questions) + new))
        return real(model, tokenizer, questions, stop, new)

    monkeypatch.setattr(exact_match, "_generate", generate)
    train = {"effective_batch_size": 4, "batch_size": 1, "max_steps": 1}
    asked = {"generate_rows": 12, "max_new_tokens": 8, "before_training": True, "steps": 0}
    output = {"name": "one"}
    path = write_run(tmp_path, tiny_llama, sums, data={"val_fraction": 0.4}, train=train, eval=asked, output=output)
    succeed("train", "--config", str(path))
    most = json.loads((tmp_path / "outputs" / "one" / "plan.json").read_text())["answer_tokens"]
    assert seen
    assert all(rows == 1 or rows * tokens <= most for rows, tokens in seen)
