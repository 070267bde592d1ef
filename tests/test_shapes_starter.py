"""The starter of drawn shapes: rows with pictures that are what they say, and a run that learns to read them."""

import io
import json
import random
import re
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import shapes_base, starter_shapes
from benchmarks.starter_base import digest
from benchmarks.starter_shapes import FOLDER, KINDS, PICTURES, SPLITS
from sft_play.starter import BASES, IMAGE_CONFIG, find_starter_file
from tests.conftest import ROOT
from tests.test_starter import sft_play

FIRST_WORDS = {"How": "count", "Which": "colour", "Where": "place"}


def shipped_rows(split: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]


def asked(row: dict) -> tuple[str, str, str]:
    """Kind, question and answer of a row."""
    question, answer = row["messages"][0]["content"][1]["text"], row["messages"][1]["content"]
    return FIRST_WORDS[question.split()[0]], question, answer


def archived() -> dict[str, bytes]:
    with zipfile.ZipFile(FOLDER / PICTURES) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def levels(picture: bytes) -> tuple[tuple[int, int], bytes]:
    """Size and pixels of an encoded picture."""
    from PIL import Image

    with Image.open(io.BytesIO(picture)) as image:
        return image.size, image.convert("RGB").tobytes()


def test_the_shipped_rows_and_pictures_are_written_again(tmp_path):
    starter_shapes.write_starter(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in FOLDER.iterdir())
    for split in SPLITS:
        assert (tmp_path / f"{split}.jsonl").read_bytes() == (FOLDER / f"{split}.jsonl").read_bytes()
    shipped = archived()
    with zipfile.ZipFile(tmp_path / PICTURES) as archive:
        assert archive.namelist() == list(shipped)
        # to the pixel: how zlib compresses them differs between its versions
        assert [levels(archive.read(name)) for name in shipped] == [levels(picture) for picture in shipped.values()]
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 1e6


def test_every_row_has_one_picture_which_no_other_split_has():
    pictures = {name: levels(picture) for name, picture in archived().items()}
    assert {size for size, _ in pictures.values()} == {(48, 48)}
    assert len(set(pictures.values())) == len(pictures) == sum(SPLITS.values()) == 1030
    used = Counter()
    for split, count in SPLITS.items():
        for row in shipped_rows(split):
            [name] = row["images"]
            assert name.startswith(f"{split}/")
            used[name] += 1
        assert len(shipped_rows(split)) == 3 * count
    assert set(used.values()) == {3}
    assert used.keys() == pictures.keys()


@pytest.mark.parametrize("split", SPLITS)
def test_no_answer_is_frequent(split):
    answers = {kind: Counter() for kind in KINDS}
    for row in shipped_rows(split):
        kind, _, answer = asked(row)
        answers[kind][answer] += 1
    assert {kind: len(of) for kind, of in answers.items()} == {"count": 5, "colour": 6, "place": 9}
    assert {kind: sum(of.values()) for kind, of in answers.items()} == dict.fromkeys(KINDS, SPLITS[split])
    for of in answers.values():
        assert max(of.values()) / of.total() < 0.25  # of five answers; always giving the most frequent one


def test_the_answer_of_a_question_is_seldom_told_by_its_words():
    """A model that sees no picture: of each question the answer that training rows give most often."""
    answers: dict[str, Counter] = {}
    for row in shipped_rows("train"):
        _, question, answer = asked(row)
        answers.setdefault(question, Counter())[answer] += 1
    right = Counter()
    for row in shipped_rows("test"):
        kind, question, answer = asked(row)
        right[kind] += question in answers and answers[question].most_common(1)[0][0] == answer
    assert {kind: right[kind] for kind in KINDS if right[kind] >= 0.45 * SPLITS["test"]} == {}


def test_answers_are_true_of_what_is_drawn():
    """A drawing by hand: a red circle top left, a blue square in the middle, a red square bottom right."""
    shapes = [("red", "circle", 0), ("blue", "square", 4), ("red", "square", 8)]
    drawing = starter_shapes.Drawing(
        tuple(starter_shapes.Shape(colour, kind, cell, (cell % 3 * 16 + 8, cell // 3 * 16 + 8), 5)
              for colour, kind, cell in shapes), grey=40,
    )  # fmt: skip
    answers = {one.text: one.answer for one in starter_shapes.questions(drawing)}
    for question, answer in {
        "How many shapes are there?": "3", "How many squares are there?": "2", "How many triangles are there?": "0",
        "How many red shapes are there?": "2", "Which colour is the circle?": "red",
        "Which colour is the shape at the centre?": "blue", "Where is the circle?": "top left",
        "Where is the blue shape?": "centre",
    }.items():  # fmt: skip
        assert answers[question] == answer
    assert not {"Where is the square?", "Where is the red shape?", "Which colour is the square?"} & answers.keys()
    _, pixels = levels(drawing.png())
    row, column = 40, 45  # bottom right, within five pixels of the middle of the cell (40, 40)
    assert tuple(pixels[3 * (48 * row + column) :][:3]) == starter_shapes.COLOURS["red"]
    assert tuple(pixels[3 * (48 * row + column + 1) :][:3]) == (40, 40, 40)


def test_the_shipped_run_yaml_is_that_of_configs():
    shipped = FOLDER.parent / Path(IMAGE_CONFIG).name
    assert shipped.read_bytes() == (ROOT / IMAGE_CONFIG).read_bytes()
    text = shipped.read_text(encoding="utf-8")
    assert BASES[re.findall(r"name: ([\w/-]+)", text)[0]] == shapes_base.BASE
    rows = [FOLDER / f"{split}.jsonl" for split in SPLITS]
    assert [ROOT / path for path in re.findall(r"_path: (\S+)", text)] == rows
    for file in (*rows, FOLDER / PICTURES, ROOT / IMAGE_CONFIG):
        assert find_starter_file(file.relative_to(ROOT)) == (shipped if file.suffix == ".yaml" else file)


def test_the_shipped_base_is_the_recorded_one():
    """What is fixed is the digest of its files: trained again on another machine, its weights are others."""
    record = json.loads(shapes_base.RECORD.read_text(encoding="utf-8"))
    assert {path.name: digest(path) for path in shapes_base.BASE.iterdir()} == record["sha256"]
    assert sum(path.stat().st_size for path in shapes_base.BASE.iterdir()) < 2.5e6
    assert record["recipe"] == shapes_base.recipe(), "recipe changed: " + record["command"]


def test_the_bases_processor_is_made_again_and_gives_the_pixels_it_was_trained_on(tmp_path):
    import torch
    from PIL import Image
    from transformers import AutoProcessor

    shapes_base.make_processor().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja", "processor_config.json"):
        assert (tmp_path / name).read_bytes() == (shapes_base.BASE / name).read_bytes()
    processor = AutoProcessor.from_pretrained(shapes_base.BASE)
    drawing = starter_shapes.draw(random.Random(3))
    with Image.open(io.BytesIO(drawing.png())) as picture:
        content = [
            {"type": "image", "image": picture.convert("RGB")},
            {"type": "text", "text": "How many shapes are there?"},
        ]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=True, return_dict=True, return_tensors="pt"
    )
    assert (inputs["input_ids"] == processor.image_token_id).sum() == 9  # a token for each patch of 16 pixels
    torch.testing.assert_close(inputs["pixel_values"], shapes_base.pixels([drawing]), rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.story
def test_the_starter_of_shapes_reaches_95_percent(tmp_path):
    words = ["--config", IMAGE_CONFIG, f"output.dir={tmp_path}", "output.name=shapes"]
    printed = sft_play(tmp_path / "cache", "train", *words)
    summary = json.loads((Path(tmp_path) / "shapes" / "summary.json").read_text())
    before, after = summary["before"], summary["after"]
    assert (summary["split"], before["rows"], after["rows"]) == ("test", 300, 300)
    assert before["exact_match"] < 0.20  # what a guess would have of the rows
    assert after["exact_match"] >= 0.95
    assert "Held-out exact match (test, 300 rows): 0" in printed
