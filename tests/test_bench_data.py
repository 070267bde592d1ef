"""benchmarks/data.py: its rows, its sums, and one small measurement; what it measures is in benchmarks/README.md."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import data as bench
from benchmarks.starter_base import make_tokenizer

ROWS = [
    [{"role": "user", "content": "one"}, {"role": "assistant", "content": "1"}],
    [{"role": "user", "content": "two"}, {"role": "assistant", "content": "2"}],
]


def run(tool: str, of: int, per_s: float, **more: Any) -> dict[str, Any]:
    """A run as it is noted; TRL may have taken fewer rows than the file has."""
    rows = more.pop("rows", of)
    noted = {"tool": tool, "of": of, "rows": rows, "form": "messages", "rows_per_s": per_s}
    return {**noted, "prepare_s": rows / per_s, "total_s": rows / per_s + 5, "peak_rss_bytes": 100, **more}


def test_repeated_rows_differ_from_each_other_in_every_text():
    made = list(bench.changed_rows(ROWS, 5))
    assert [[message["role"] for message in row] for row in made] == [["user", "assistant"]] * 5
    assert [row[0]["content"] for row in made] == [
        "No. 0: one", "No. 1: two", "No. 2: one", "No. 3: two", "No. 4: one",
    ]  # fmt: skip
    assert made[2][1]["content"] == "1\n(No. 2 assistant)"
    assert ROWS[0][0]["content"] == "one"


def test_the_last_turn_is_the_completion(tmp_path: Path):
    bench.write_rows(tmp_path / "rows.jsonl", iter(ROWS[:1]), "prompt_completion")
    assert json.loads((tmp_path / "rows.jsonl").read_text()) == {"prompt": ROWS[0][:1], "completion": ROWS[0][1:]}


def test_ratios_compare_the_best_run_of_each_tool_at_the_fewest_rows():
    runs = [
        run("ours", 10_000, 3000.0),
        run("ours", 10_000, 2000.0),
        run("trl", 10_000, 500.0),
        run("trl", 10_000, 750.0, form="prompt_completion", peak_rss_bytes=400),
        run("tokenizer", 10_000, 4000.0),
        run("ours", 1_000_000, 3200.0, peak_rss_bytes=110),
        run("trl", 1_000_000, 800.0, rows=20_000),
    ]
    found = bench.ratios([*runs, {"tool": "trl", "of": 10_000, "rows": 10_000, "error": "no template"}])
    assert found["ours_over_trl"] == 4.0  # 3000 / 750
    assert found["ours_over_tokenizer"] == 0.75  # 3000 / 4000
    assert found["memory_1M_over_10k"] == pytest.approx(1.1)  # 110 / 100
    assert found["by_rows"]["10000"]["memory_ours_over_trl"] == 0.25  # 100 / 400
    assert found["by_rows"]["1000000"]["ours_over_trl"] == 4.0  # 3200 / 800


@pytest.mark.parametrize("text", ["ten", "", "0", "10,-1", "1e6"])
def test_numbers_of_rows_that_are_none_are_refused(text: str):
    with pytest.raises(SystemExit, match="expected numbers of rows such as 10000,1000000"):
        bench.row_counts(text)


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """A folder with a small tokenizer of its own."""
    make_tokenizer(["one two three 1 2 3 No. user assistant"] * 20).save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def test_a_measurement_says_time_memory_and_what_came_out(tmp_path: Path, tokenizer: str):
    bench.write_rows(tmp_path / "rows.jsonl", bench.changed_rows(ROWS, 40), "messages")
    job = bench.Job(
        "ours", 40, 40, file=str(tmp_path / "rows.jsonl"), tokenizer=tokenizer, cache=str(tmp_path / "cache")
    )
    found = bench.measure(job)
    assert "error" not in found, found
    assert found["masks"] == {"prefix": 40}
    assert 0 < found["trained_tokens"] < found["tokens"]
    assert found["rows_per_s"] == pytest.approx(40 / found["prepare_s"])
    assert found["total_s"] > found["prepare_s"]
    assert found["peak_rss_bytes"] > 10**7


def test_a_measurement_that_fails_is_a_result(tmp_path: Path, tokenizer: str):
    job = bench.Job("ours", 1, 1, file=str(tmp_path / "none.jsonl"), tokenizer=tokenizer, cache=str(tmp_path))
    assert "none.jsonl" in bench.measure(job)["error"]


@pytest.mark.slow
def test_trl_and_this_project_make_the_same_tokens(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "real_rows", lambda: ("two rows", ROWS))
    answer = bench.bench([60], tokenizer, tmp_path / "out.json", trl_rows=60, rounds=1)
    runs = {(one["tool"], one["form"]): one for one in answer["runs"]}
    made = {key: one["ids_digest"] for key, one in runs.items() if "ids_digest" in one}
    assert len({made[key] for key in made}) == 1, runs
    assert {key[0] for key in made} == {"ours", "trl"}
    assert json.loads((tmp_path / "out.json").read_text())["ratios"] == answer["ratios"]
    assert answer["ratios"]["by_rows"]["60"]["second_start_s"] < 5
