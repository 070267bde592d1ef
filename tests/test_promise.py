"""What the plan promises without a trace: reserved bytes from what passes in a step, against measured runs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
from pathlib import Path

import pytest

from benchmarks.closed_form import parse_setting, predict_memory
from benchmarks.memory_model.closed import NoClosedForm, closed_form
from benchmarks.memory_model.published import read_runs
from benchmarks.memory_model.score import ScoredRow, promise_to, score
from sft_play.planner.layout import SINGLE, Layout
from sft_play.planner.memory.estimate import (
    GRADIENT_SLACK,
    RESIDENT_TERMS,
    TEMPORARY_SLACK,
    reserved_bytes,
    resident_term_bytes,
    step_reserved_bytes,
)
from tests.bundled import model_config
from tests.conftest import ROOT, shared
from tests.test_score import ROW, config_of, fixed, settings_of, write

LORA = {"peft_type": "LORA", "r": 8, "target_modules": "all-linear"}
TERMS = {"weights": 1000, "adapters": 20, "optimizer": 40, "gradients": 80, "activations": 400, "loss_head": 200}


@pytest.fixture(scope="module")
def rows() -> list[ScoredRow]:
    """The shared rows with an estimate and a measured figure; no trace is made."""
    found = []
    for run in read_runs(shared("published_peaks.csv")):
        if run.settings is not None and (run.measured_reserved or run.measured_allocated):
            with contextlib.suppress(NoClosedForm):
                found.append(ScoredRow(run, 0, 0, closed_form(run.settings)))
    return found


def test_what_stays_is_packed_and_what_passes_leaves_holes() -> None:
    assert resident_term_bytes(TERMS) == 1060
    found = reserved_bytes(TERMS, attention="sdpa", layout=SINGLE)
    assert found == sum(TERMS.values()) + TEMPORARY_SLACK["sdpa"] * 600 + GRADIENT_SLACK * 80
    stays = dict.fromkeys(RESIDENT_TERMS, 1 << 30)
    assert reserved_bytes(stays, attention="eager", layout=SINGLE) == len(RESIDENT_TERMS) << 30


@pytest.mark.parametrize(("attention", "layout"), [("eager", SINGLE), ("sdpa", Layout("ddp", 2))])
def test_squares_and_gathered_units_leave_more(attention: str, layout: Layout) -> None:
    least = reserved_bytes(TERMS, attention="sdpa", layout=SINGLE)
    assert reserved_bytes(TERMS, attention=attention, layout=layout) > least
    assert reserved_bytes(TERMS, attention="flash_attention_2", layout=SINGLE) == least


def test_each_stream_keeps_its_own_highest_bytes_under_fsdp() -> None:
    """Gathered in forward, gradients at the end: never alive together, and none is given what the other freed."""
    gib = 1 << 30
    moments = [
        {"weights": 4 * gib, "activations": 2 * gib, "gather_buffers": 3 * gib},
        {"weights": 4 * gib, "gradients": 4 * gib},
    ]
    sharded = step_reserved_bytes(moments, attention="sdpa", layout=Layout("fsdp", 8, 8))
    # 4 + 2 and a half of it on the model's stream, 3 gathered, 4 and an eighth of it reduced
    assert sharded == int(7 * gib + 3 * gib + 4.5 * gib)
    whole = step_reserved_bytes(moments, attention="sdpa", layout=Layout("ddp", 8))
    assert whole == max(reserved_bytes(one, attention="sdpa", layout=Layout("ddp", 8)) for one in moments)


@pytest.mark.parametrize("seed", range(20))
def test_streams_never_lower_a_bound(seed: int) -> None:
    draw = random.Random(seed)
    names = (*TERMS, "gather_buffers", "dequantised")
    moments = [{name: draw.randrange(1 << 34) for name in names if draw.random() < 0.7} for _ in range(4)]
    for layout in (SINGLE, Layout("ddp", 2), Layout("fsdp", 4, 4), Layout("zero3", 4, 4)):
        plain = max(reserved_bytes(one, attention="sdpa", layout=layout) for one in moments)
        found = step_reserved_bytes(moments, attention="sdpa", layout=layout)
        assert found >= plain
        assert found == plain or layout.is_fsdp


@pytest.mark.parametrize("group", ["all", "qlora", "lora", "eager", "sdpa"])
def test_at_most_one_measured_run_in_twenty_reserved_more_than_was_promised(rows: list[ScoredRow], group: str) -> None:
    """Repeats of one setting count once, by their largest."""
    chosen = [row for row in rows if row.run.measured_reserved and group in ("all", row.run.mode, row.run.attention)]
    largest: dict[str, ScoredRow] = {}
    for row in chosen:
        key = row.run.settings.canonical_text() if row.run.settings else ""
        if key not in largest or (row.run.measured_reserved or 0) > (largest[key].run.measured_reserved or 0):
            largest[key] = row
    promise = promise_to(largest.values())
    assert promise["n"] >= 10
    assert promise["short"] <= 0.05 * promise["n"]
    assert promise["median_over"] < 0.30


def test_replays_stay_within_the_promise() -> None:
    fixed_runs = json.loads((ROOT / "benchmarks" / "closed_form.json").read_text())["runs"]
    short = [line for line, run in fixed_runs.items() if promised_to(line, layers=None) < run["traced_reserved"]]
    assert len(short) <= 1
    changing = json.loads((ROOT / "benchmarks" / "reserved.json").read_text())
    for line, run in changing["runs"].items():
        promised = promised_to(line, layers=changing["layers"])
        assert run["allocated"] <= run["needed"] <= run["reserved"] <= promised, line
        assert run["allocated"] <= run["expandable"] <= promised, line  # the allocator's other way


def promised_to(line: str, *, layers: int | None) -> int:
    """Reserved bytes and margin of a benchmark's row; of a model cut to `layers`."""
    setting = parse_setting(line)
    model = model_config(setting.model)
    model |= {"num_hidden_layers": layers} if layers else {}
    found = predict_memory(setting, model)
    return found.reserved + found.margin


def test_few_measured_runs_would_have_been_refused(rows: list[ScoredRow]) -> None:
    """Most of those had filled nine tenths of their card: a search for the largest batch that runs."""
    promise = promise_to(rows)
    assert promise["ran"] >= 50
    assert promise["refused"] <= 0.10 * promise["ran"]


def test_the_closed_form_meets_measured_allocated_bytes(rows: list[ScoredRow]) -> None:
    """One GPU and fused attention, whatever the script: the error's median is under 2%."""
    plain = [row for row in rows if (row.run.strategy, row.run.attention) == ("single", "sdpa")]
    found = [row.errors()["closed_allocated_error"] for row in plain]
    errors = sorted(abs(error) for error in found if error is not None)
    assert len(errors) >= 40
    assert errors[len(errors) // 2] < 0.02


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"peft": {"peft_type": "IA3"}}, "adapters of another kind (IA3)"),
        ({"peft": {**LORA, "target_modules": ".*q_proj"}}, "a pattern"),
        ({"optimizer": "lora_fa"}, "the optimizer lora_fa"),
        ({"strategy": "fsdp1", "world": 2}, "the first FSDP"),
        ({"fp32_norms": True}, "norms in fp32"),
        ({"loss": "logits_shifted_half"}, "half precision"),
        ({"experts": "loop"}, "experts"),
    ],
)
def test_what_the_closed_form_has_no_words_for_is_said(changes: dict[str, object], part: str) -> None:
    with pytest.raises(NoClosedForm) as why:
        closed_form(dataclasses.replace(settings_of(), **changes))  # type: ignore[arg-type]
    assert part in str(why.value)


def test_selective_checkpointing_is_refused_and_not_read_as_full(tmp_path: Path) -> None:
    path = write(tmp_path / "peaks.csv", [{**ROW, "gradient_checkpointing": "selective"}])
    report = score(path, trace=fixed, config_of=config_of)
    assert not report.rows
    assert next(iter(report.not_expressible)).startswith("selective checkpointing")
