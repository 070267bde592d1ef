"""Chats in one row: which share it, that no cut and no glance at another comes of it, and what it saves."""

from __future__ import annotations

import json
import random
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GptOssConfig, LlamaConfig
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from sft_play.config.load import config_from_text
from sft_play.data.build.packing import Packs, group_by_length, pack_best_fit, padding_shares
from sft_play.errors import ConfigError
from sft_play.machine.gpu import Gpu
from sft_play.machine.hardware import Hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.training.class_checks import masking
from sft_play.training.class_checks.masking import require_packable
from sft_play.training.loop.rows import COUNT_KEYS, FILLER_INDEX, Collator, TrainingRows
from tests.conftest import Command, chat, write_rows, write_run

pytestmark = pytest.mark.build


def test_each_row_goes_into_the_fullest_pack_with_room_for_it():
    # 7 opens a pack (3 left), 5 another (5 left); 3 fits both and goes where it leaves nothing; 2 and 2 go to the 5,
    # which leaves 1; 1 fills it
    packs = pack_best_fit([5, 2, 7, 1, 3, 2], 10)
    assert [pack.tolist() for pack in packs] == [[2, 4], [0, 1, 3, 5]]
    assert packs.tokens.tolist() == [10, 10]
    # 4 + 4 fill neither pack to its end, and 2 + 2 do
    assert [pack.tolist() for pack in pack_best_fit([4, 4, 4, 2, 2], 10)] == [[0, 1, 3], [2, 4]]
    assert len(pack_best_fit([], 10)) == 0
    for lengths, said in (([3, 11], "3 to 11 tokens"), ([3, 0], "0 to 3 tokens")):
        with pytest.raises(ValueError, match=f"rows of {said}; a pack takes rows of 1 to 10"):
            pack_best_fit(lengths, 10)


def by_the_book(lengths: list[int], capacity: int) -> list[int]:
    """Tokens of the packs of best-fit decreasing, looking at every open pack for every row."""
    packs: list[int] = []
    for length in sorted(lengths, reverse=True):
        room = [(capacity - tokens, place) for place, tokens in enumerate(packs) if tokens + length <= capacity]
        if room:
            packs[min(room)[1]] += length
        else:
            packs.append(length)
    return sorted(packs)


def test_packs_are_those_of_best_fit_decreasing_and_hold_every_row_once():
    draw = np.random.default_rng(0)
    for _ in range(200):
        capacity = int(draw.integers(1, 1500))
        lengths = draw.integers(1, capacity + 1, size=int(draw.integers(0, 50)))
        packs = pack_best_fit(lengths, capacity)
        assert sorted(packs.tokens.tolist()) == by_the_book(lengths.tolist(), capacity)
        assert sorted(packs.indices.tolist()) == list(range(len(lengths)))
        for pack, tokens in zip(packs, packs.tokens, strict=True):
            assert lengths[pack].sum() == tokens <= capacity
            assert pack.tolist() == sorted(pack.tolist())


def test_rows_of_a_step_are_sorted_by_length_and_stay_in_it():
    lengths = np.array([5, 1, 9, 5, 2, 7, 3])
    order = [6, 2, 0, 1, 3, 5, 4]  # lengths 3 9 5 1 | 5 7 2
    assert group_by_length(order, lengths, window=4).tolist() == [2, 0, 6, 1, 5, 3, 4]
    assert group_by_length([3, 0], lengths, window=4).tolist() == [3, 0]  # as they came where they are equal


def test_padding_of_each_choice_is_that_of_its_micro_batches():
    # two rows a micro-batch: beside each other by length none is padded; a 4 beside a 1 wastes 3 of 8 places
    shares = padding_shares([4, 1, 4, 1], micro_batch=2, effective_batch=4, max_seq_len=5, seed=0)
    assert shares["grouped"] == shares["best_fit"] == 0
    drawn = [padding_shares([4, 1, 4, 1], micro_batch=2, effective_batch=4, max_seq_len=5, seed=n) for n in range(20)]
    assert {shares["random"] for shares in drawn} == {0.0, 6 / 16}
    # a step of one micro-batch has nothing to sort; rows that are longer than the limit count as cut
    one = padding_shares([9, 2], micro_batch=2, effective_batch=2, max_seq_len=4, seed=0)
    assert one == {"random": 2 / 8, "grouped": 2 / 8, "best_fit": 2 / 8}
    assert padding_shares([], micro_batch=2, effective_batch=2, max_seq_len=4, seed=0)["random"] == 0


def dataset(lengths: list[int], sources: list[int] | None = None) -> Any:
    ids = [[100 * (n + 1) + place for place in range(length)] for n, length in enumerate(lengths)]
    return Dataset.from_dict({"input_ids": ids, "labels": ids, "source": sources or [0] * len(lengths)})


def test_a_pack_holds_whole_chats_and_predicts_no_chats_beginning_from_another():
    rows = TrainingRows(dataset([3, 2, 4]), packs=pack_best_fit([3, 2, 4], 6))
    assert len(rows) == 2
    first, filler = ({name: value.tolist() for name, value in rows[at].items()} for at in (0, FILLER_INDEX))
    assert first["input_ids"] == [200, 201, 300, 301, 302, 303]
    assert first["labels"] == [-100, 201, -100, 301, 302, 303]
    assert (filler["labels"], filler["chat_lengths"], first["chat_lengths"]) == ([-100, -100], [2], [2, 4])
    several = [row["input_ids"].tolist() for row in rows.__getitems__([1, 0])]
    assert several == [rows[1]["input_ids"].tolist(), first["input_ids"]] == [[100, 101, 102], first["input_ids"]]
    with pytest.raises(IndexError):
        rows[2]


def test_a_batch_of_packs_begins_its_positions_anew_with_every_chat():
    rows = TrainingRows(dataset([3, 2, 4], [0, 1, 0]), packs=pack_best_fit([3, 2, 4], 6))
    batch = Collator(pad_id=7, adds_sources=True)([rows[0], rows[1]])
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3], [0, 1, 2, 0, 0, 0]]
    assert batch["input_ids"][1].tolist() == [100, 101, 102, 7, 7, 7]
    assert batch["labels"][1].tolist() == [-100, 101, 102, -100, -100, -100]
    assert batch["source"].tolist() == [[1, 1, 0, 0, 0, 0], [0] * 6]
    assert "attention_mask" not in batch
    assert (int(batch["token_count"]), int(batch["sample_count"])) == (9, 3)
    flat = Collator(pad_id=7, flat=True, adds_sources=True)([rows[0], rows[1]])
    assert flat["input_ids"].shape == (1, 9)
    assert flat["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3, 0, 1, 2]]
    assert flat["cu_seq_lens_q"].tolist() == [0, 2, 6, 9]
    assert flat["max_length_q"] == 4


def test_a_batch_of_single_rows_is_the_one_that_trl_makes():
    rows = dataset([3, 2, 5])
    ours = Collator(pad_id=7)([rows[n] for n in range(3)])
    theirs = DataCollatorForLanguageModeling(pad_token_id=7)([rows[n] for n in range(3)])
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


BASE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
KEEP_APART: dict[str, dict[str, Any]] = {
    "llama": BASE, "mistral": {**BASE, "sliding_window": 4}, "gemma2": {**BASE, "head_dim": 8, "sliding_window": 4},
    "gpt2": {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "qwen3_moe": {**BASE, "head_dim": 8, **EXPERTS},
    "llama4_text": {**BASE, "head_dim": 8, "attention_chunk_size": 4, "num_local_experts": 2, "num_hidden_layers": 4},
}  # fmt: skip
ATTENTION = [(kind, name) for kind in KEEP_APART for name in ("sdpa", "eager") if (kind, name) != ("gemma2", "sdpa")]


def tiny(kind: str, attention: str, **changes: Any) -> Any:
    """A model of the class with weights that let everything which is seen show."""
    config = CONFIG_MAPPING[kind](**{**KEEP_APART[kind], **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=draw) * 0.3)
    return model.eval()


def packed(rows: list[list[list[int]]], *, flat: bool = False) -> dict[str, Any]:
    """A batch of packs, each given as its chats, as training makes it."""
    chats = [ids for row in rows for ids in row]
    data = Dataset.from_dict({"input_ids": chats, "labels": chats})
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    packs = Packs(offsets, np.arange(len(chats)), np.array([sum(map(len, row)) for row in rows]))
    made = TrainingRows(data, packs=packs)
    batch = Collator(pad_id=0, flat=flat)([made[n] for n in range(len(rows))])
    return {name: value for name, value in batch.items() if name not in COUNT_KEYS}


def logits(model: Any, batch: dict[str, Any]) -> Any:
    with torch.no_grad():
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        return model(**inputs, use_cache=False).logits


def chats(*lengths: int, seed: int = 0) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(3, 97, size=length).tolist() for length in lengths]


@pytest.mark.parametrize(("kind", "attention"), ATTENTION)
def test_a_chat_in_a_pack_is_computed_as_if_it_were_alone(kind, attention):
    model = tiny(kind, attention)
    first, second, third, other = chats(7, 9, 5, 7)
    alone = logits(model, packed([[second]]))[0]
    # two packs in a batch, the shorter one padded
    both = logits(model, packed([[first, second, third], [second]]))
    assert both.shape[:2] == (2, 21)
    assert both.isfinite().all()  # a padded place sees itself: no row of the mask is empty
    tolerance = 1e-5 * max(1.0, float(alone.std()))
    for found in (both[0, 7:16], both[1, :9]):
        assert float((found - alone).abs().max()) < tolerance
    changed = logits(model, packed([[other, second, third], [second]]))
    # experts multiply other chats' rows in the same matrix: CPUs round that differently by a few 1e-6
    assert float((changed[0, 7:] - both[0, 7:]).abs().max()) < tolerance
    assert float((changed[0, :7] - both[0, :7]).abs().max()) > 0.1  # it is seen where it should be


@pytest.mark.parametrize(("kind", "attention"), ATTENTION)
def test_loss_and_gradients_of_packs_are_those_of_the_rows(kind, attention):
    model = tiny(kind, attention).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if attention == "sdpa":
        model.activation_checkpointing_enable({"use_reentrant": False})
    texts = chats(7, 9, 5, 6)
    rows = Collator(pad_id=0)([{"input_ids": ids, "labels": ids} for ids in texts])

    def of(batch: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        model.zero_grad()
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        scores = model(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(scores, batch["labels"][:, 1:].flatten(), reduction="sum")
        loss.backward()
        grads = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
        return float(loss.detach()), grads

    loss, gradients = of(rows)
    packed_loss, packed_gradients = of(packed([texts[:3], texts[3:]]))
    assert (packed_loss, set(packed_gradients)) == (pytest.approx(loss, rel=1e-5), set(gradients))
    largest = max(float(gradient.norm()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert float((packed_gradients[name] - gradient).norm()) < 1e-4 * largest, name


# masks without position ids; states that go on from chat to chat
@pytest.mark.parametrize("kind", ["falcon", "gpt_oss", "mamba", "recurrent_gemma", "jamba"])
def test_a_class_that_lets_a_chat_see_another_is_refused(kind):
    options = {"use_mamba_kernels": False} if kind == "jamba" else {}
    with pytest.raises(ConfigError, match=f"data.packing=best_fit: {kind} does not keep the chats of a row") as error:
        require_packable(CONFIG_MAPPING[kind](**options), attention="eager")
    assert "use data.packing=none" in str(error.value)


@pytest.mark.parametrize("kind", ["deepseek_v32", "doge", "llama4_text"])
def test_what_a_class_does_beyond_short_rows_counts_where_rows_are_longer(kind):
    """It chooses among tokens of all chats, or weighs them by their place in the row, from a size of its config on."""
    name = {"deepseek_v32": "index_topk", "doge": "keep_window_size", "llama4_text": "floor_scale"}[kind]
    size = random.Random(kind).randrange(64, 4096)
    config = CONFIG_MAPPING[kind](**{name: size})
    for longest in (16, size):
        assert "apart" in require_packable(config, attention="sdpa", max_row_tokens=longest)
    for longest in (size + 1, 10 * size, None):
        with pytest.raises(ConfigError, match=f"{kind} does not keep .*; use data.packing=none"):
            require_packable(config, attention="sdpa", max_row_tokens=longest)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gemma2", "deepseek_v3", "gpt2"])
def test_a_class_of_any_size_is_measured_on_a_small_one(kind):
    config = CONFIG_MAPPING[kind]()
    before, state = config.to_dict(), torch.random.get_rng_state()
    note = require_packable(config, attention="eager" if kind == "gemma2" else "flash_attention_2")
    assert f"Packing: {kind} keeps the chats of a row apart" in note
    assert config.to_dict() == before
    assert torch.equal(torch.random.get_rng_state(), state)  # the run's random numbers are its own


def test_a_class_that_cannot_be_measured_is_refused_and_why_is_said(monkeypatch):
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("heads\x1b[31m and tails")

    for found, why in (
        (refuse, "RuntimeError: heads"), (lambda *_, **__: (0.0, 0.001), "hardly depends on those before it"),
        (lambda *_, **__: (float("nan"), 1.0), "numbers that are not finite"),
    ):  # fmt: skip
        monkeypatch.setattr(masking, "measure_packing_leak", found)
        with pytest.raises(ConfigError, match=rf"whether llama keeps .* cannot be measured \(.*{why}") as error:
            require_packable(LlamaConfig(), attention="sdpa")
        assert "\x1b" not in str(error.value)


def test_the_plan_counts_the_mask_of_packs_even_for_one_row_where_they_have_one():
    machine = Hardware((Gpu(0, "GPU", 40 * 2**30, None, (9, 0)),), "CPU", 2, 24 * 2**30, 24 * 2**30)

    def plan(*overrides: str) -> Any:
        text = "model: {name: Qwen/Qwen2.5-0.5B, max_seq_len: 4096}\ntrain: {effective_batch_size: 8, batch_size: 1}\n"
        config = config_from_text(text, name="run.yaml", overrides=overrides)
        return make_plan(PlanRequest(config, load_model_shape("Qwen/Qwen2.5-0.5B"), machine))

    single, text = plan(), plan("data.packing=best_fit", "task_mode=cpt")
    packs, apart = plan("data.packing=best_fit", "model.attn_implementation=sdpa"), plan("data.packing=best_fit")
    assert [one.choice.step.padded for one in (single, apart, packs)] == [False, False, True]
    assert apart.memory.terms == single.memory.terms  # boundaries cost nothing
    assert apart.masked_bytes - apart.memory.required >= 4096**2
    assert packs.memory.allocated - single.memory.allocated >= 4096**2  # a byte a place
    assert text.memory.terms == plan("task_mode=cpt").memory.terms  # full blocks: nothing to pack


def run_yaml(folder: Any, model: Any, *, rows: int = 24) -> Any:
    words = ["the", "light", "in", "kitchen", "is", "on", "yes", "no"]
    draw = np.random.default_rng(3)
    answers = [" ".join(draw.choice(words, size=int(draw.integers(1, 12)))) for _ in range(rows)]
    file = write_rows(folder / "rows.jsonl", (chat(f"what is {n}?", answer) for n, answer in enumerate(answers)))
    train = {"effective_batch_size": 24, "batch_size": 4, "learning_rate": 1e-2, "warmup_steps": 0, "bf16": False}
    return write_run(
        folder, model, file, model={"max_seq_len": 96}, tuning={"mode": "full"}, data={"val_path": str(file)},
        train={**train, "lr_scheduler_type": "constant"}, eval={"steps": 0},
    )  # fmt: skip


def metrics(folder: Any, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "outputs" / name / "metrics.jsonl").read_text().splitlines()]


def trained(succeed: Command, path: Any, name: str, *words: str) -> tuple[list[dict[str, Any]], str]:
    said = succeed("train", "--config", str(path), f"output.name={name}", *words)
    return metrics(path.parent, name), said


def test_a_run_on_packs_learns_what_the_run_on_rows_does(tmp_path, tiny_llama, succeed):
    path = run_yaml(tmp_path, tiny_llama)
    rows, _ = trained(succeed, path, "rows", "train.group_by_length=false")
    packs, said = trained(succeed, path, "packs", "data.packing=best_fit")
    for name in ("loss", "grad_norm", "eval_loss"):
        of_rows, of_packs = ([line[name] for line in lines if name in line] for lines in (rows, packs))
        assert of_packs == pytest.approx(of_rows, rel=1e-4) != [], name
    last = [[line for line in lines if "padding_share" in line][-1] for lines in (rows, packs)]
    assert last[0]["samples_seen"] == last[1]["samples_seen"] == 48  # chats, not packs
    assert last[0]["num_tokens"] == last[1]["num_tokens"]
    assert last[1]["padding_share"] < last[0]["padding_share"]
    for part in ("Packing: llama keeps the chats", "Packing: 24 chats in ", "fewer than one effective batch of 24"):
        assert part in said


def test_a_run_on_packs_goes_on_as_if_it_had_not_stopped(tmp_path, tiny_llama, succeed):
    """Stopped in the middle of an epoch of packs, rows prepared in a process of their own."""
    path = run_yaml(tmp_path, tiny_llama)
    words = ["data.packing=best_fit", "train.effective_batch_size=2", "train.batch_size=1", "train.max_steps=3",
             "model.max_seq_len=64", "train.dataloader_num_workers=1"]  # fmt: skip
    whole, _ = trained(succeed, path, "whole", *words)
    trained(succeed, path, "parts", *words, "train.stop_after_steps=1")
    parts, _ = trained(succeed, path, "parts", *words, "output.if_exists=resume")
    losses, of_parts = ([line["loss"] for line in lines if "loss" in line] for lines in (whole, parts))
    assert len(losses) == 3
    assert of_parts == pytest.approx(losses, rel=1e-5)


def test_a_run_on_packs_is_refused_before_weights_are_read_where_the_class_cannot(tmp_path, tiny_llama, command):
    model = tmp_path / "gpt_oss"
    shutil.copytree(tiny_llama, model)  # the weights of another class: reading them would fail otherwise
    GptOssConfig(
        vocab_size=400, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, num_local_experts=4, bos_token_id=1, eos_token_id=2, pad_token_id=None,
    ).save_pretrained(model)  # fmt: skip
    path = run_yaml(tmp_path, model)
    code, said = command("train", "--config", str(path), "output.name=no", "data.packing=best_fit")
    assert (code, "data.packing=best_fit: gpt_oss does not keep the chats of a row apart" in said) == (2, True), said
    assert not (tmp_path / "outputs" / "no").exists()
