"""The way of a new user: raw files to a checked run, a second time, and the messages on the way."""

import json
import os
import resource
from pathlib import Path

import pytest

from sft_play.data.managed_outputs import RECORD_NAME
from tests.conftest import write_rows, write_run

pytestmark = pytest.mark.build


@pytest.fixture
def story(tmp_path, tiny_llama, monkeypatch, command):
    """A folder with raw files of three kinds and a run YAML; runs commands there to a given end: the printed text."""
    raw = tmp_path / "data" / "raw"
    raw.mkdir(parents=True)
    write_rows(raw / "faq.jsonl", ({"question": f"what is {n} + 1?", "answer": f"it is {n + 1}."} for n in range(40)))
    (raw / "more.csv").write_text("instruction,output\n" + "".join(f"say yes {n},yes {n}\n" for n in range(10)))
    said = [("system", "You count."), ("human", "one"), ("gpt", "two"), ("human", "three"), ("gpt", "four")]
    turns = [{"from": speaker, "value": text} for speaker, text in said]
    (raw / "shared.json").write_text(json.dumps([{"conversations": turns}]))
    styled = {f"{split}_path": f"data/processed_with_style/{split}.jsonl" for split in ("train", "val", "test")}
    write_run(
        tmp_path,
        tiny_llama,
        raw,
        model={"max_seq_len": 96},
        data={**styled, "process": {"val_fraction": 0.2, "test_fraction": 0.1}},
        eval={"before_training": False, "steps": 0},
    )
    monkeypatch.chdir(tmp_path)

    def run(name: str, *, ends: int = 0, **variables: str) -> str:
        with pytest.MonkeyPatch.context() as patch:
            for key, value in variables.items():
                patch.setenv(key, value)
            code, said = command(name, "--config", "run.yaml")
        assert code == ends, said
        return said

    return run


def states() -> dict[str, bytes]:
    """Every file that the data commands wrote."""
    folders = (Path(f"data/{name}") for name in ("processed", "processed_with_style", "rendered"))
    files = [file for folder in folders if folder.is_dir() for file in folder.iterdir()]
    return {str(file): file.read_bytes() for file in files if file.name != RECORD_NAME}


def test_raw_files_become_a_run_and_a_second_time_everything_is_the_same(story, monkeypatch):
    assert "Processed 51 rows of 3 files: 51 kept" in story("process")
    assert "50 set, 1 prepended" in story("style", STYLE="You are terse.")
    files = Path("data/processed_with_style").glob("*.jsonl")
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    prompts = {row["messages"][0]["content"] for row in rows}
    assert prompts == {"You are terse.", "You are terse.\n\nYou count."}
    story("render")
    row = json.loads(Path("data/rendered/train.jsonl").read_text().splitlines()[0])
    start, end = row["spans"][0]
    assert row["text"].startswith("<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\n")
    assert row["text"][:start].endswith("<|im_start|>assistant\n")
    assert row["text"][start:end].endswith("<|im_end|>")
    assert "masks: train" in story("check")
    said = story("train")
    before = said[: said.index("Learning rate")]
    for words in ("verified on every one of", "in [[ ]]: <|im_start|>system", "every trained answer ends with"):
        assert words in before
    cache = Path(os.environ["SFT_PLAY_CACHE"]) / "tokens"
    made, old = {folder.name for folder in cache.iterdir() if folder.is_dir()}, states()
    for name in ("process", "style", "render"):  # a second time everything is the same, and the tokens are there
        story(name, STYLE="You are terse.")
    assert states() == old
    monkeypatch.setattr("sft_play.data.build.build._build_cache", lambda *_: pytest.fail("the rows were made again"))
    story("train", SET="output.name=two")
    assert {folder.name for folder in cache.iterdir() if folder.is_dir()} == made


def test_a_disk_that_is_full_is_one_message_and_leaves_the_old_ones(story):
    story("process")
    old = states()
    write_rows(Path("data/raw/faq.jsonl"), [{"question": f"q {n}", "answer": "a" * 200} for n in range(3_000)])
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        said = story("process", ends=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "data/processed cannot be written: File too large" in said
    assert "leave rows out" not in said
    assert states() == old


def test_a_pipe_is_refused_by_every_command_before_it_is_opened(story, tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    words = "data.train_path=rows.jsonl data.val_path=null data.test_path=null data.process.raw_path=rows.jsonl"
    for name in ("process", "check", "train"):
        assert "rows.jsonl is not a regular file (a pipe or a device?)" in story(name, ends=2, SET=words)
