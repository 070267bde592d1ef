"""The rows of a step are divided by tokens: every row once, within the memory, at the least cost, over all ranks."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from pydantic import TypeAdapter

from sft_play.planner import batching
from sft_play.planner.batching import MicroBatches, RowAssignment, average_micro_steps, summarize_row_tokens
from tests.ranks import found_by_ranks


def drawn(seed: int) -> tuple[list[int], int, int, int]:
    """Sorted lengths, tokens of a micro-batch, cost of a pass, ranks."""
    draw = random.Random(seed)
    longest = draw.choice([8, 60, 500, 2048])
    lengths = sorted((draw.randint(2, longest) for _ in range(draw.randint(1, 40))), reverse=True)
    return lengths, longest * draw.randint(1, 6), draw.choice([0, 1, 50, 700]), draw.choice([1, 2, 3, 4])


def check_whole(cut: RowAssignment, count: int, ranks: int) -> None:
    assert sorted(row for each in cut for batch in each for row in batch) == list(range(count))
    assert all(len(each) == ranks and any(each) for each in cut)


@pytest.mark.parametrize("seed", range(25))
def test_padded_micro_batches_hold_every_row_once_within_their_tokens(seed):
    lengths, tokens, overhead, ranks = drawn(seed)
    cut = MicroBatches(1, tokens=tokens, overhead=overhead).assign_rows(lengths, ranks=ranks)
    check_whole(cut, len(lengths), ranks)
    batches = [batch for each in cut for batch in each if batch]
    assert max(len(batch) * max(lengths[row] for row in batch) for batch in batches) <= tokens
    order = list(itertools.chain(*batches))
    assert order == sorted(order)  # neighbours by length share a pass
    assert all(max(map(len, each)) - min(map(len, each)) <= 1 for each in cut)


def cost(cut: RowAssignment, lengths: Sequence[int], overhead: int, ranks: int) -> int:
    return sum(overhead + -(-sum(map(len, each)) // ranks) * lengths[min(itertools.chain(*each))] for each in cut)


@pytest.mark.parametrize("seed", range(25))
def test_no_other_cut_of_sorted_rows_costs_less(seed):
    draw = random.Random(seed)
    lengths = sorted((draw.randint(2, 90) for _ in range(draw.randint(1, 9))), reverse=True)
    tokens, overhead, ranks = 90 * draw.randint(1, 3), draw.choice([0, 20, 200]), draw.choice([1, 2])
    found = MicroBatches(1, tokens=tokens, overhead=overhead).assign_rows(lengths, ranks=ranks)
    costs = []
    for ends in itertools.product([False, True], repeat=len(lengths) - 1):  # every way to cut
        borders = [0, *(place for place, cuts in enumerate(ends, start=1) if cuts), len(lengths)]
        sizes = [-(-(last - first) // ranks) * lengths[first] for first, last in itertools.pairwise(borders)]
        if max(sizes) <= tokens:
            costs.append(sum(overhead + size for size in sizes))
    assert cost(found, lengths, overhead, ranks) == min(costs)


@pytest.mark.parametrize("seed", range(25))
def test_joined_micro_batches_need_no_more_passes_than_rows_of_full_length(seed):
    lengths, tokens, _, ranks = drawn(seed)
    longest = lengths[0]
    rows = max(1, tokens // longest)
    plan = MicroBatches(rows, tokens=rows * longest, padded=False)
    cut = plan.assign_rows(lengths, ranks=ranks)
    check_whole(cut, len(lengths), ranks)
    sums = [[sum(lengths[row] for row in batch) for batch in each] for each in cut]
    assert max(map(max, sums)) <= rows * longest
    assert len(cut) <= plan.max_micro_steps(-(-len(lengths) // ranks))
    flat = list(itertools.chain(*sums))
    assert flat == sorted(flat, reverse=True)  # those that ranks compute at the same time are alike


@pytest.mark.parametrize("seed", range(25))
def test_a_batch_that_was_given_is_kept_in_rows(seed):
    lengths, _, _, ranks = drawn(seed)
    rows = random.Random(seed).randint(1, 9)
    cut = MicroBatches(rows).assign_rows(lengths, ranks=ranks)
    check_whole(cut, len(lengths), ranks)
    assert all(sum(map(len, each)) == rows * ranks for each in cut[:-1])
    most = MicroBatches(rows).max_micro_steps(-(-len(lengths) // ranks))
    assert len(cut) == most == -(-len(lengths) // (rows * ranks))


@pytest.mark.parametrize("seed", range(20))
def test_an_average_step_has_the_tokens_of_the_rows_and_the_places_of_its_cut(seed):
    draw = random.Random(seed)
    lengths = [draw.randint(5, 400) for _ in range(draw.randint(1, 700))]
    rows = summarize_row_tokens(Counter(lengths), limit=512)
    assert (rows.longest, rows.rows) == (max(lengths), len(lengths))
    assert rows.mean == pytest.approx(sum(lengths) / len(lengths))
    assert sum(length <= rows.p95 for length in lengths) >= 0.95 * len(lengths)
    assert sum(length < rows.p95 for length in lengths) <= 0.95 * len(lengths)
    assert list(rows.sample) == sorted(lengths, reverse=True)
    batch, ranks = draw.choice([4, 32, 64]), draw.choice([1, 2])
    for plan in (MicroBatches(2), MicroBatches(2, tokens=800, overhead=40), MicroBatches(2, tokens=800, padded=False)):
        passes = average_micro_steps(rows, plan, effective_batch=batch, ranks=ranks)
        assert passes.padded_tokens <= 800
        assert passes.tokens <= passes.count * passes.padded_tokens * ranks * 1.0001  # places are padded tokens
        assert passes.row_length <= rows.longest
    if len(lengths) > 200:
        assert passes.tokens == pytest.approx(batch * rows.mean, rel=0.6)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("plan", [MicroBatches(2), MicroBatches(2, tokens=100, padded=False)])
def test_a_step_that_takes_every_row_is_counted_by_hand(plan, ranks, monkeypatch):
    lengths = [80, 70, 60, 50, 40, 30, 20, 10]
    rows = summarize_row_tokens(Counter(lengths), limit=512)
    fullest: list[tuple[int, float]] = []  # tokens and length of a row, by the fullest rank of each micro step
    for micro_step in plan.assign_rows(lengths, ranks=ranks):
        batches = [[lengths[index] for index in batch] for batch in micro_step if batch]
        if plan.padded:
            fullest.append(max((len(batch) * max(batch), max(batch)) for batch in batches))
        else:
            fullest.append(max((sum(batch), sum(one**2 for one in batch) / sum(batch)) for batch in batches))
    monkeypatch.setattr(batching, "_MAX_SAMPLED_ROWS", 8 // ranks)  # of each rank: all rows are drawn
    found = average_micro_steps(rows, plan, effective_batch=8, ranks=ranks)
    total = sum(tokens for tokens, _ in fullest)
    assert (found.count, found.tokens) == (len(fullest), sum(lengths))
    assert found.padded_tokens == pytest.approx(total / len(fullest))
    assert found.row_length == pytest.approx(sum(tokens * length for tokens, length in fullest) / total)


def test_another_limit_cuts_the_lengths_or_makes_them_unknown():
    rows = summarize_row_tokens(Counter([100, 300, 512]), limit=512, held_out=80)
    assert (rows.limited_to(512) is rows, rows.limited_to(1024)) == (True, None)  # a row was cut at 512, perhaps
    shorter = rows.limited_to(256)
    assert (shorter.longest, shorter.p95, shorter.held_out, shorter.mean) == (256, 256, 80, pytest.approx(204))
    loose = summarize_row_tokens(Counter([100, 300]), limit=512, held_out=400)
    assert (loose.limited_to(4096) is loose, loose.longest_row) == (True, 400)
    assert TypeAdapter(type(rows)).validate_json(json.dumps(dataclasses.asdict(rows))) == rows
    assert summarize_row_tokens({}, limit=512) is None


@pytest.fixture(scope="module")
def alone(tmp_path_factory, tiny_llama) -> dict[str, dict[str, dict[str, list[float]]]]:
    from tests.ranks_micro_batches import trained

    folder = tmp_path_factory.mktemp("alone")
    return {name: trained(tiny_llama, folder / name, ranks=1, bf16=name == "bf16") for name in ("fp32", "bf16")}


TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}


def check_same(found: dict[str, list[float]], wanted: dict[str, list[float]], tolerance: float) -> None:
    for name, share in (("loss", 1), ("grad_norm", 10), ("weights", 10)):
        assert found[name] == pytest.approx(wanted[name], rel=share * tolerance), name


@pytest.mark.build
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("cut", ["by tokens", "a cheap pass", "joined", "all at once", "resumed"])
def test_the_cut_of_a_step_changes_no_number(alone, precision, cut):
    check_same(alone[precision][cut], alone[precision]["one row"], TOLERANCE[precision])


@pytest.mark.build
def test_ranks_train_what_one_process_trains(tmp_path, tiny_llama, alone):
    found = found_by_ranks("tests.ranks_micro_batches", str(tiny_llama), folder=tmp_path)
    for precision in ("fp32", "bf16"):
        for cut, figures in found[precision].items():
            check_same(figures, alone[precision][cut], TOLERANCE[precision])
