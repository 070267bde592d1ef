"""Every row is trained on once per epoch, in the same order and the same steps whatever the ranks."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler
from datasets import Dataset, Features, List, Value, load_from_disk
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

from sft_play.data.build.packing import pack_best_fit
from sft_play.planner.batching import MicroBatches
from sft_play.training.loop import rows as loop_rows
from sft_play.training.loop.rows import EpochOrder, StepBatches, TrainingRows, row_lengths, trained_tokens
from sft_play.training.measure.monitor import source_losses
from tests.conftest import chat, write_rows, write_run
from tests.ranks_evaluation import trainer_of as own_trainer
from tests.test_distributed import succeed as succeed_in
from tests.test_train import logged

pytestmark = pytest.mark.build


def dataset(count: int):
    return Dataset.from_dict(
        {"input_ids": [[n, n + 1, n + 2] for n in range(count)], "labels": [[n, 5, 5] for n in range(count)]}
    )


LENGTHS = np.random.default_rng(5).integers(2, 60, size=64)


def batches_of(count: int, *, micro: int, ranks: int, epoch: int = 0, by_length: bool = False) -> list[list[list[int]]]:
    """Micro-batches of each rank in steps of 8 rows: what a step does not need is empty; FILLER is a masked row."""
    per_rank = []
    for rank in range(ranks):
        order = EpochOrder(count, seed=42, lengths=LENGTHS[:count] if by_length else None, effective_batch=8)
        order.set_epoch(epoch)
        batches = StepBatches(order, LENGTHS[:count], MicroBatches(micro), effective_batch=8, rank=rank, ranks=ranks)
        per_rank.append(list(batches))
        assert len(batches) == len(per_rank[-1])
    assert len({tuple(map(bool, batches)) for batches in per_rank}) == 1
    return per_rank


def steps_of(
    count: int, *, micro: int, accum: int, ranks: int, epoch: int = 0, by_length: bool = False
) -> list[list[int]]:
    per_rank = batches_of(count, micro=micro, ranks=ranks, epoch=epoch, by_length=by_length)
    return [
        sorted(n for rank in per_rank for batch in rank[first : first + accum] for n in batch if n >= 0)
        for first in range(0, len(per_rank[0]), accum)
    ]


@pytest.mark.parametrize(("micro", "accum", "ranks"), [(2, 4, 1), (8, 1, 1), (1, 4, 2), (1, 2, 4), (2, 1, 4)])
@pytest.mark.parametrize("by_length", [False, True])
def test_a_step_has_the_same_rows_under_every_split_and_each_comes_once(micro, accum, ranks, by_length):
    for count, epoch in itertools.product([1, 5, 16, 37], (0, 3)):
        steps = steps_of(count, micro=micro, accum=accum, ranks=ranks, epoch=epoch, by_length=by_length)
        assert sorted(n for step in steps for n in step) == list(range(count))
        assert len(steps) == math.ceil(count / 8)
        assert steps == steps_of(count, micro=8, accum=1, ranks=1, epoch=epoch)  # ungrouped, in one pass


@pytest.mark.parametrize(("micro", "accum", "ranks"), [(2, 4, 1), (2, 2, 2), (1, 4, 2), (1, 2, 4), (2, 1, 4)])
def test_rows_that_ranks_have_at_the_same_time_are_of_like_length(micro, accum, ranks):
    per_rank = batches_of(37, micro=micro, ranks=ranks, by_length=True)
    passes = [[n for batch in batches for n in batch if n >= 0] for batches in zip(*per_rank, strict=True)]
    lengths = [[LENGTHS[n] for n in rows] for rows in passes]
    for first in range(0, len(passes), accum):
        for longer, shorter in itertools.pairwise(filter(None, lengths[first : first + accum])):
            assert min(longer) >= max(shorter)


def test_the_order_is_that_of_accelerates_seedable_sampler():
    theirs = SeedableRandomSampler(range(21), data_seed=42, generator=torch.Generator())
    ours = EpochOrder(21, seed=42)
    for epoch in (0, 1, 5):
        theirs.set_epoch(epoch)
        ours.set_epoch(epoch)
        assert list(ours) == list(theirs)


def test_a_filled_data_set_keeps_its_other_columns():
    tokens = List(Value("int32"))
    columns = {"input_ids": tokens, "labels": tokens, "source": Value("int8"), "where": Value("string")}
    one = {"input_ids": [[1, 2, 3]], "labels": [[-100, 2, 3]], "source": [1], "where": ["a.jsonl:1"]}
    rows = loop_rows.pad_to_multiple(Dataset.from_dict(one, features=Features(columns)), multiple=2)
    assert rows.features == Features(columns)
    assert rows[1] == {"input_ids": [2, 3], "labels": [-100, -100], "source": 1, "where": "a.jsonl:1"}


def test_the_tokens_of_a_data_set_are_counted():
    made = Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5]], "labels": [[-100, -100, 3], [4, 5]]})
    assert row_lengths(made).tolist() == [3, 2]
    assert trained_tokens(made) == 2  # the first token of a row is never predicted
    assert trained_tokens(made.select([])) == 0


def test_a_selection_of_a_mapped_file_is_read_in_its_own_order(tmp_path):
    ids = [[100 * (n + 1) + place for place in range(length)] for n, length in enumerate([3, 2, 4, 5])]
    Dataset.from_dict({"input_ids": ids, "labels": ids}).save_to_disk(str(tmp_path / "rows"))
    loaded = load_from_disk(str(tmp_path / "rows")).select([3, 0, 2])
    assert row_lengths(loaded).tolist() == [5, 3, 4]
    assert trained_tokens(loaded) == 4 + 2 + 3
    rows = TrainingRows(loaded, packs=pack_best_fit(row_lengths(loaded), 8))
    assert [row["input_ids"].tolist() for row in rows] == [ids[3] + ids[0], ids[2]]


def mixed_run(folder: Path, model: Path) -> Path:
    rows = write_rows(folder / "rows.jsonl", (chat(f"what is {n}?", "it is " * (n % 5 + 1)) for n in range(20)))
    texts = write_rows(folder / "text.jsonl", ({"text": f"the light {n} is on. " * 9} for n in range(12)))
    train = {"batch_size": 2, "max_steps": 4, "report_to": ["tensorboard"], "logging_steps": 2, "learning_rate": 1e-3}
    data = {"text_path": str(texts), "val_fraction": 0.2, "text_fraction": 0.5}
    changes = {"model": {"max_seq_len": 48}, "tuning": {"mode": "full"}, "eval": {"steps": 2}}
    return write_run(folder, model, rows, data=data, train=train, **changes)


def trainer_of(folder: Path, model: Path, rows: Any, *overrides: str) -> Any:
    """A trainer on rows of our own that are chats and text, in this process."""
    mixed = ("task_mode=cpt_mixed", "data.text_path=none.txt", "train.bf16=false")
    return own_trainer(model, folder / "run", *mixed, *overrides, rows=rows)


def sourced(lengths: list[int], sources: list[int]) -> Any:
    draw = np.random.default_rng(1)
    ids = [draw.integers(3, 300, size=length).tolist() for length in lengths]
    return Dataset.from_dict({"input_ids": ids, "labels": ids, "source": sources})


@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_losses_of_chats_and_texts_are_means_over_their_own_tokens(tmp_path, tiny_llama, packing):
    """Against each row's loss by the model itself; all eight rows are seen in the two steps that are logged once."""
    rows = sourced([9, 30, 20, 12, 5, 40, 17, 3], [0, 1, 0, 1, 0, 1, 0, 0])
    trainer = trainer_of(
        tmp_path, tiny_llama, rows, f"data.packing={packing}", "train.logging_steps=2", "train.learning_rate=1e-9",
        "train.effective_batch_size=8", "train.max_steps=2",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(tiny_llama).eval()
    lost: dict[int, list[float]] = {0: [], 1: []}
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row["input_ids"]])
            scores = torch.log_softmax(model(input_ids=ids).logits[0, :-1].float(), -1)
            lost[row["source"]] += (-scores.gather(1, ids[0, 1:, None])).flatten().tolist()
    of_chats, of_text = (sum(losses) / len(losses) for losses in (lost[0], lost[1]))
    trainer.train()
    step = next(line for line in trainer.state.log_history if "loss" in line and line["step"] == 2)
    whole = sum(map(sum, lost.values())) / sum(map(len, lost.values()))
    wanted = {"loss_chat": of_chats, "loss_text": of_text, "loss": whole}
    assert {name: step[name] for name in wanted} == pytest.approx(wanted, rel=1e-4)
    found = trainer.evaluate()
    assert {name: found[f"eval_{name}"] for name in wanted} == pytest.approx(wanted, rel=1e-4)
    assert any("eval_loss_text" in line and "eval_loss" in line for line in trainer.state.log_history)


def test_one_mode_has_no_sources(tmp_path, tiny_llama):
    rows = sourced([9, 30, 20, 12], [0, 1, 0, 1])
    sft = trainer_of(tmp_path, tiny_llama, rows, "task_mode=sft", "data.text_path=null")
    sft.train()
    assert not any("loss_chat" in line or "loss_text" in line for line in sft.state.log_history)


def test_the_sources_of_every_rank_count():
    # rank 0: chats 6.0 over 3 tokens, text 4.0 over 1; rank 1: chats 2.0 over 1, no text
    found = source_losses([[6.0, 3, 4.0, 1], [2.0, 1, 0.0, 0]], prefix="eval_")
    assert found == {"eval_loss_chat": 2.0, "eval_loss_text": 4.0}
    assert source_losses([[6.0, 3, 0.0, 0]]) == {"loss_chat": 2.0}


def test_a_run_on_chats_and_text_logs_the_loss_of_each(tmp_path, tiny_llama, succeed):
    succeed("train", "--config", str(mixed_run(tmp_path, tiny_llama)), "task_mode=cpt_mixed", "output.name=mixed")
    run = tmp_path / "outputs" / "mixed"
    assert len(logged(run, "loss_chat")) == len(logged(run, "loss_text")) == len(logged(run, "loss"))
    assert len(logged(run, "eval_loss_chat")) == len(logged(run, "eval_loss")) > 0
    for folder, wanted in (("tb", {"train/loss_chat", "train/loss_text"}), ("tb/validation", {"eval/loss_chat"})):
        events = EventAccumulator(str(run / folder), size_guidance={"scalars": 0})
        events.Reload()
        assert wanted <= set(events.Tags()["scalars"])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_packs_and_sources_are_the_same_over_ranks(tmp_path, tiny_llama, strategy):
    mixed_run(tmp_path, tiny_llama)
    words = ["task_mode=cpt_mixed", "data.packing=best_fit", "train.logging_steps=1"]
    spread = {"STRATEGY": strategy, "NPROC": "2"}
    for name, command, given in (("one", "train", {}), ("two", "train-distributed", spread)):
        succeed_in(tmp_path, command, *words, f"output.name={name}", **given)
    one, two = (tmp_path / "outputs" / name for name in ("one", "two"))
    for name in ("loss", "loss_chat", "loss_text", "eval_loss", "eval_loss_chat", "num_tokens", "samples_seen"):
        assert logged(two, name) == pytest.approx(logged(one, name), rel=1e-4), name
        assert logged(one, name)
