"""Near-duplicates and overlaps: none reported that is none, none missed that is well above the threshold."""

from __future__ import annotations

import json
import random
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from sft_play.config.load import config_from_text
from sft_play.data.near_duplicates import (
    MISS_PROBABILITY,
    SIMILARITY_MARGIN,
    SimilarityIndex,
    SketchMaker,
    choose_bands,
    compute_shingles,
    jaccard_similarity,
)
from sft_play.data.process import process_files
from sft_play.errors import ConfigError, DataError
from tests.conftest import chat

needs_datasketch = pytest.mark.skipif(find_spec("datasketch") is None, reason="datasketch is not installed here")


def plain_set(text: str) -> set[tuple[str, ...]]:
    """Runs of three words by a second way: letters and digits of ASCII texts."""
    words = re.split(r"[^a-z0-9_]+", text.lower())
    words = [word for word in words if word] or [text]
    count = min(3, len(words))
    return {tuple(words[place : place + count]) for place in range(len(words) - count + 1)}


def jaccard(one: str, other: str) -> float:
    mine, theirs = plain_set(one), plain_set(other)
    return len(mine & theirs) / len(mine | theirs)


def varied(draw: random.Random, vocabulary: int) -> list[str]:
    """Texts of random words, and copies in which words were changed, left out or put in."""
    texts: list[str] = []
    for _ in range(draw.randint(20, 60)):
        words = [f"w{draw.randrange(vocabulary)}" for _ in range(draw.choice([1, 2, 3, 10, 40, 200]))]
        texts.append(" ".join(words))
        for _ in range(draw.randint(0, 3)):
            copy = list(words)
            for _ in range(draw.randint(0, max(1, len(words) // 8))):
                place = draw.randrange(len(copy))
                copy[place : place + 1] = draw.choice([[], ["new"], [copy[place], "more"]])
                copy = copy or ["new"]
            texts.append(draw.choice([" ", ", ", "\n"]).join(copy).title())
    draw.shuffle(texts)
    return texts


@needs_datasketch
@pytest.mark.parametrize("seed", range(12))
def test_pairs_are_found_and_no_others(seed):
    draw = random.Random(seed)
    threshold = draw.choice([0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99])
    texts = varied(draw, draw.choice([20, 5000]))
    sketches = SketchMaker(threshold)
    index = SimilarityIndex(sketches)
    reported = 0
    for number, text in enumerate(texts):
        likeness = [(jaccard(text, other), -place) for place, other in enumerate(texts[:number])]
        sketch = sketches.sketch(text)
        found, best = index.nearest(sketch), max(likeness, default=(0.0, 0))
        if found is None:
            assert best[0] < min(threshold + SIMILARITY_MARGIN, (1 + threshold) / 2)
        else:
            reported += 1
            assert found[0] == pytest.approx(jaccard(text, texts[int(found[1])]), abs=1e-12)
            assert found[0] >= threshold
        index.add(sketch, str(number))
    assert 0 < reported < len(texts)


def test_the_index_misses_a_pair_above_the_margin_with_the_probability_that_is_said():
    for hundredths in range(50, 100):
        threshold = hundredths / 100
        bands, rows = choose_bands(threshold)
        likeness = min(threshold + SIMILARITY_MARGIN, (1 + threshold) / 2)
        assert (1 - likeness**rows) ** bands <= MISS_PROBABILITY
        assert (1 - likeness**rows) ** (bands - 1) > MISS_PROBABILITY  # no band too many
        assert bands * rows <= 128


def test_texts_of_all_scripts_are_compared():
    for one, other, least, most in (
        ("私は昨日友達と映画を見に行きました。", "私は昨日友達と映画を見に行った。", 0.5, 0.95),
        ("ฉันชอบกินข้าวผัด", "ฉันชอบกินข้าวต้ม", 0.3, 0.95),
        ("Я пошёл в магазин за хлебом и молоком", "я пошёл В МАГАЗИН за хлебом, и молоком!", 1.0, 1.0),
        ("!!!", "???", 0.0, 0.0), ("!!!", " !!! ", 1.0, 1.0), ("", "a", 0.0, 0.0), ("\ud800 b", "\ud800 b", 1.0, 1.0),
    ):  # fmt: skip
        assert least <= jaccard_similarity(compute_shingles(one), compute_shingles(other)) <= most


# --- make process -----------------------------------------------------------------------------------------------------

LONG = "what is the name of the river that runs through the old town of {} in the north"


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def run(tmp_path):
    def made(*settings: str, rows: list[object]):
        write(tmp_path / "raw.jsonl", *rows)
        text = (
            f"model: {{name: no/model}}\ndata: {{process: {{raw_path: {tmp_path}/raw.jsonl, out_dir: {tmp_path}/out}}}}"
        )
        config = config_from_text(text, name="test", overrides=[f"data.process.{one}" for one in settings])
        report = process_files(config, force=True)
        kept = [json.loads(line)["source"] for file in sorted((tmp_path / "out").glob("*.jsonl"))
                for line in file.read_text().splitlines()]  # fmt: skip
        return report, sorted(int(where.rpartition(":")[2]) for where in kept)

    return made


def rows_with_copies() -> list[dict]:
    system = {"role": "system", "content": "You are a careful assistant. " * 20}
    rows = [chat(LONG.format(f"city{n}"), f"it is the river {n} " + " ".join(f"x{n}y{k}" for k in range(40)))
            for n in range(20)]  # fmt: skip
    copy = json.loads(json.dumps(rows[3]).replace("x3y39", "other"))  # of 50 words one is another
    for row in rows:
        row["messages"].insert(0, system)  # which makes no rows alike
    return [*rows, copy, rows[5]]


@needs_datasketch
def test_near_duplicates_are_counted_and_named_and_dropped_where_that_is_asked(run, tmp_path):
    rows = rows_with_copies()
    report, kept = run(rows=rows)
    assert kept == list(range(1, 23))
    assert report.near_duplicates.count == 1  # the exact one is a duplicate
    assert report.duplicates.count == 1
    assert re.fullmatch(r".*raw\.jsonl:21 \(like .*raw\.jsonl:4, 0\.9\d\)", report.near_duplicates.first[0])
    assert any(
        line.startswith("Near-duplicates: 1, kept; data.process.near_duplicates=drop") for line in report.lines()
    )
    report, kept = run("near_duplicates=drop", "drop_duplicates=true", rows=rows)
    assert kept == list(range(1, 21))
    assert report.dropped["nearly an earlier row"].count == 1
    assert json.loads((tmp_path / "out" / "report.json").read_text())["near_duplicates"]["dropped"] is True
    report, kept = run("near_duplicates=drop", "similarity=0.99", rows=rows)
    assert 21 in kept
    report, kept = run("near_duplicates=ignore", rows=rows)
    assert report.as_json()["near_duplicates"]["dropped"] is None
    assert not any("Near" in line for line in report.lines())


@needs_datasketch
@pytest.mark.parametrize(
    "row",
    [
        chat(LONG.format("city7"), "another answer"),
        {"question": LONG.format("city7"), "answer": 4, "choices": ["a", "b"]},
        {"task": 7, "nested": {"prompts": [LONG.format("city7").upper()]}, "kind": "river"},
        {"messages": [{"role": "user", "content": LONG.format("city7")}]},
    ],
)
def test_a_test_files_question_is_found_in_training_rows_whatever_its_form(run, tmp_path, row):
    other = write(tmp_path / "test.jsonl", chat("hello", "hi"), row)
    fixed = ("val_fraction=0", "test_fraction=0")
    report, kept = run(f"compare_with=[{other}]", "similarity=0.9", *fixed, rows=rows_with_copies())
    assert len(kept) == 22
    assert [report.overlaps[other].count, report.near_duplicates.count] == [1, 1]
    assert re.fullmatch(r".*raw\.jsonl:8 \(like .*test\.jsonl:2, 1\.00\)", report.overlaps[other].first[0])
    report, kept = run(
        f"compare_with=[{other}]", "similarity=0.9", "drop_overlaps=true", *fixed, rows=rows_with_copies()
    )
    assert kept == [n for n in range(1, 23) if n != 8]
    assert f"Training rows nearly in {other}: 1, left out" in "\n".join(report.lines())


@needs_datasketch
def test_held_out_rows_are_left_alone_by_what_they_overlap_with(run, tmp_path):
    other = write(tmp_path / "test.jsonl", *rows_with_copies())
    rows = [*rows_with_copies(), *(chat(f"is {n} left to train on?", f"yes, {n} is") for n in range(9))]
    report, _ = run(f"compare_with=[{other}]", "drop_overlaps=true", "val_fraction=0.5", rows=rows)
    assert report.overlaps[other].count == report.dropped["nearly a row of a held-out file"].count
    assert report.splits["val"].rows > 3


def test_what_cannot_be_read_or_is_no_similarity_is_refused(run, tmp_path):
    with pytest.raises(ConfigError, match="similarity"):
        run("similarity=0.2", rows=[])
    pytest.importorskip("datasketch")
    with pytest.raises(DataError, match=r"gone\.jsonl does not exist"):
        run(f"compare_with=[{tmp_path}/gone.jsonl]", rows=rows_with_copies())


@needs_datasketch
def test_the_runs_own_held_out_files_are_compared_with_by_default(tmp_path):
    """Where they exist, and are neither written here nor raw rows to train on."""
    rows = [chat(LONG.format(f"city{n}"), f"answer {n} " * 9) for n in range(8)]
    raw = write(tmp_path / "raw.jsonl", *rows)
    test = write(tmp_path / "mine.jsonl", rows[3])
    fixed = "val_fraction: 0, test_fraction: 0"

    def overlaps(held_out: str, more: str = ""):
        text = (f"model: {{name: no/model}}\ndata: {{train_path: {raw}, {held_out}, "
                f"process: {{raw_path: {raw}, out_dir: {tmp_path}/out, {fixed}{more}}}}}")  # fmt: skip
        return process_files(config_from_text(text, name="test"), force=True)

    found = overlaps(f"test_path: {test}").overlaps
    assert [(name, places.count) for name, places in found.items()] == [(test, 1)]
    assert overlaps(f"test_path: {test}", ", drop_overlaps: true").rows_kept == 7
    assert len(overlaps(f"val_path: {test}, test_path: {test}", f", compare_with: [{test}]").overlaps) == 1
    assert not overlaps(f"test_path: {test}", ", near_duplicates: ignore").overlaps
    assert not overlaps(f"val_path: {raw}, test_path: {tmp_path}/none.jsonl").overlaps
    assert not overlaps(f"val_path: {tmp_path}/out/train.jsonl").overlaps


@needs_datasketch
def test_rows_of_one_form_are_compared_with_few_and_in_bounded_time():
    """Texts that share most of their words share their keys; of those only the likeliest are compared."""
    draw, sketches = random.Random(1), SketchMaker(0.9)
    index = SimilarityIndex(sketches)
    form = [f"w{n}" for n in range(60)]
    for number in range(600):
        words = [f"x{number}y{place}" if draw.random() < 0.12 else word for place, word in enumerate(form)]
        index.add(sketches.sketch(" ".join(words)), str(number))
    assert all(len(numbers) <= 256 for table in index._tables for numbers in table.values())
    copy = [*words[:-1], "other"]
    found = index.nearest(sketches.sketch(" ".join(copy)))
    assert found is not None
    assert found[0] == pytest.approx(jaccard(" ".join(words), " ".join(copy)))


@needs_datasketch
def test_counting_stops_where_it_would_take_too_much_memory(run, monkeypatch):
    monkeypatch.setattr("sft_play.data.process.MAX_INDEX_BYTES", 8_000)
    rows = rows_with_copies()
    report, _ = run(rows=rows)
    assert report.near_duplicates.count == 0  # the row that it is like came fourth, after the first three were kept
    assert "Near-duplicates: counting takes" in "\n".join(report.lines())
    assert run("near_duplicates=drop", rows=rows)[0].near_duplicates.count == 1
