"""Rows are counted before the plan, which uses their lengths; a note keeps them until something changes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.load import load_config
from sft_play.launch import row_survey
from sft_play.starter import BASE_NAME, BASES
from tests.conftest import ROOT, chat, write_rows, write_run

LONG, SHORT = "yes no " * 20, "yes"


@pytest.fixture
def run(tmp_path, tiny_llama, monkeypatch) -> Path:
    """A run YAML whose rows are far shorter than max_seq_len, and a longer one that is held out."""
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    rows, held_out = write(tmp_path / "train.jsonl", [SHORT] * 12), write(tmp_path / "val.jsonl", [LONG])
    return write_run(tmp_path, tiny_llama, rows, model={"max_seq_len": 400}, data={"val_path": str(held_out)},
                     train={"max_steps": 1}, eval={"steps": 0})  # fmt: skip


def write(path: Path, answers: list[str]) -> Path:
    return write_rows(path, (chat(f"what is {n}?", answer) for n, answer in enumerate(answers)))


def planned(succeed: Any, run: Path, *words: str) -> dict[str, Any]:
    said = succeed("plan", "--config", str(run), "--json", *words)
    found: dict[str, Any] = json.loads(said[said.index("{") : said.rindex("}") + 1])
    return found


def tokens(tiny_llama: Path, path: Path) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    rows = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    return [len(tokenizer(tokenizer.apply_chat_template(row, tokenize=False))["input_ids"]) for row in rows]


def test_a_plan_says_that_the_data_is_not_here(run, succeed):
    # it may be on the machine that trains
    said = succeed("plan", "--config", str(run), f"data.train_path={run.parent}/trian.jsonl")
    assert "the data are not here: data.train_path: " in said
    assert "train.jsonl" in said, "the names that are there show the misspelt one"
    assert planned(succeed, run, f"data.train_path={run.parent}/trian.jsonl")["row_tokens"] is None


def test_a_plan_has_the_lengths_of_the_rows_and_the_memory_of_the_longest(run, tiny_llama, succeed):
    plan = planned(succeed, run)
    lengths, held_out = (tokens(tiny_llama, run.parent / f"{name}.jsonl") for name in ("train", "val"))
    found = plan["row_tokens"]
    assert (found["longest"], found["rows"], found["held_out"]) == (max(lengths), 12, max(held_out))
    assert found["mean"] == pytest.approx(sum(lengths) / 12)
    assert plan["step"]["seq_len"] == max(held_out) < plan["max_seq_len"] == 400
    assert f"longest row {max(lengths)} tokens" in " ".join(plan["reasons"])
    packed = planned(succeed, run, "data.packing=best_fit")
    assert (packed["row_tokens"], packed["step"]["seq_len"]) == (None, 400)


def test_a_note_keeps_the_lengths_until_a_file_or_the_limit_changes(run, succeed):
    config = load_config(run).config
    assert row_survey.cached_row_tokens(config) is None
    first = planned(succeed, run)
    kept = row_survey.cached_row_tokens(config)
    assert kept.images is None
    assert json.loads(json.dumps(dataclasses.asdict(kept))) == {**first["row_tokens"], "images": None}
    assert row_survey.cached_row_tokens(load_config(run, overrides=["model.max_seq_len=300"]).config) is None
    write(run.parent / "train.jsonl", [SHORT, LONG * 2])
    assert row_survey.cached_row_tokens(config) is None
    assert planned(succeed, run)["row_tokens"]["longest"] > first["row_tokens"]["longest"]


def test_of_many_rows_a_plan_takes_a_sample_and_training_counts_all(run, tiny_llama, succeed, monkeypatch):
    """The longest row is in no sample by chance, and decides the memory all the same."""
    monkeypatch.setattr(row_survey, "SAMPLE_ROWS", 10)
    monkeypatch.setattr(row_survey, "SAMPLE_LONGEST_ROWS", 1)
    monkeypatch.delenv("WHY", raising=False)
    train = write(run.parent / "train.jsonl", [LONG if n == 6 else SHORT for n in range(42)])
    plan, lengths = planned(succeed, run), tokens(tiny_llama, train)
    found = plan["row_tokens"]
    assert (found["sampled_rows"], found["rows"], found["longest"]) == (10, 40, max(lengths))
    assert found["mean"] == pytest.approx(sum(lengths[3::4]) / 10)
    assert "by a sample of 10, " in succeed("plan", "--config", str(run))
    assert "estimated from a sample of 10 rows; training counts all" in " ".join(plan["reasons"])
    succeed("train", "--config", str(run), "output.name=all")
    found = json.loads((run.parent / "outputs" / "all" / "plan.json").read_text())["row_tokens"]
    assert (found["sampled_rows"], found["rows"]) == (0, 42)
    assert "42 rows of " in succeed("plan", "--config", str(run))  # from then on
    write(train, ["yes <|im_start|>"] * 41 + [SHORT])
    assert "data.on_bad_row=skip" in succeed("plan", "--config", str(run), "data.train_path=" + str(spoilt(train)))


def spoilt(path: Path) -> Path:
    """The file with a row of no use where a sample looks."""
    lines = path.read_text().splitlines()
    lines[3] = '{"messages": 5}'
    path.write_text("\n".join(lines))
    return path


def test_rows_that_cannot_be_read_leave_a_plan_for_full_rows(run, succeed):
    (run.parent / "train.jsonl").write_text("{broken\n" * 5)
    plan = planned(succeed, run)
    assert (plan["row_tokens"], plan["step"]["seq_len"]) == (None, 400)


def test_a_run_trains_by_the_plan_of_its_own_rows(run, succeed):
    succeed("train", "--config", str(run), "output.name=counted")
    plan = json.loads((run.parent / "outputs" / "counted" / "plan.json").read_text())
    assert plan["row_tokens"]["rows"] == 12
    assert plan["micro_batches"]["tokens"] == plan["micro_batch"] * plan["step"]["seq_len"]


def test_the_starters_rows_are_counted_by_the_shipped_base_and_nobody_is_asked(run):
    """In a process of its own: the plan of the starter's name, then of its folder; any look for a machine raises."""
    asked = subprocess.run(
        [sys.executable, "-c", ALONE, str(run), str(BASES[BASE_NAME])], capture_output=True, text=True, cwd=ROOT,
        env={name: text for name, text in os.environ.items() if name != "HF_HUB_OFFLINE"},
    )  # fmt: skip
    assert asked.returncode == 0, asked.stderr[-3000:]
    by_name, by_folder = json.loads(asked.stdout.splitlines()[-1])
    assert by_name == by_folder
    assert by_name["longest"] == max(tokens(BASES[BASE_NAME], run.parent / "train.jsonl"))
    assert "Retrying" not in asked.stderr


ALONE = """
import dataclasses, json, socket, sys
run, base = sys.argv[1:]
asked = []
def refuse(*words, **_):
    asked.append(words)
    raise AssertionError(f"asked the network: {words}")
socket.getaddrinfo = socket.create_connection = refuse
from sft_play.config.load import load_config
from sft_play.starter import BASE_NAME
from sft_play.launch import row_survey
found = []
for name in (BASE_NAME, base):
    loaded = load_config(run, overrides=[f"model.name={json.dumps(name)}"])
    assert row_survey.count_row_tokens_if_quick(loaded) == []
    found.append(dataclasses.asdict(row_survey.cached_row_tokens(loaded.config)))
    if name == BASE_NAME:
        for note in row_survey._cache_path(loaded.config).parent.iterdir():
            note.unlink()
assert not asked, asked
print(json.dumps(found))
"""
