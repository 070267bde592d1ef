"""The way of a new user: raw files to a checked run, a second time, and the messages on the way."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from sft_play.data.managed_outputs import RECORD_NAME, OutputFolder
from tests.conftest import ROOT

pytestmark = pytest.mark.build

WRITTEN = ("data/processed", "data/processed_with_style", "data/rendered")


@pytest.fixture
def story(tmp_path, tiny_llama, monkeypatch, command):
    """An empty folder with raw files of three kinds and a run YAML; runs commands there: (exit code, printed text)."""
    raw = tmp_path / "data" / "raw"
    raw.mkdir(parents=True)
    write_lines(raw / "faq.jsonl", [{"question": f"what is {n} + 1?", "answer": f"it is {n + 1}."} for n in range(40)])
    (raw / "more.csv").write_text("instruction,output\n" + "".join(f"say yes {n},yes {n}\n" for n in range(10)))
    turns = [
        {"from": "system", "value": "You count."},
        {"from": "human", "value": "one"},
        {"from": "gpt", "value": "two"},
        {"from": "human", "value": "three"},
        {"from": "gpt", "value": "four"},
    ]
    (raw / "shared.json").write_text(json.dumps([{"conversations": turns}]))
    config = tmp_path / "my.yaml"
    config.write_text(
        f"model: {{name: {tiny_llama}, max_seq_len: 96}}\n"
        "tuning: {mode: lora}\n"
        "data:\n"
        "  train_path: data/processed_with_style/train.jsonl\n"
        "  val_path: data/processed_with_style/val.jsonl\n"
        "  test_path: data/processed_with_style/test.jsonl\n"
        "  process: {val_fraction: 0.2, test_fraction: 0.1}\n"
        "train: {effective_batch_size: 8, max_steps: 2, report_to: [], gradient_checkpointing: false}\n"
        "eval: {before_training: false, steps: 0}\n"
    )
    monkeypatch.chdir(tmp_path)

    def run(name: str, **variables: str) -> tuple[int, str]:
        with pytest.MonkeyPatch.context() as patch:
            for key, value in variables.items():
                patch.setenv(key, value)
            return command(name, "--config", "my.yaml")

    return run


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_lines(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def states() -> dict[str, tuple[bytes, float]]:
    """Bytes and time of every file that the data commands wrote."""
    files = [file for folder in WRITTEN for file in Path(folder).iterdir() if file.name != RECORD_NAME]
    return {str(file): (file.read_bytes(), file.stat().st_mtime) for file in files}


def test_raw_files_become_a_run_whose_first_lines_say_what_is_trained(story):
    code, said = story("process")
    assert code == 0, said
    assert "Processed 51 rows of 3 files: 51 kept" in said

    code, said = story("style", STYLE="You are terse.")
    assert code == 0, said
    assert "Styled 51 rows" in said
    assert "50 set, 1 prepended" in said
    rows = [row for split in ("train", "val", "test") for row in read_lines(f"data/processed_with_style/{split}.jsonl")]
    prompts = {row["messages"][0]["content"] for row in rows}
    assert prompts == {"You are terse.", "You are terse.\n\nYou count."}

    code, said = story("render")
    assert code == 0, said
    (start, end), *_ = (row := read_lines("data/rendered/train.jsonl")[0])["spans"]
    assert row["text"].startswith("<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\n")
    assert row["text"][:start].endswith("<|im_start|>assistant\n")
    assert row["text"][start:end].endswith("<|im_end|>")

    code, said = story("check")
    assert code == 0, said
    assert "masks: train" in said

    code, said = story("train")
    assert code == 0, said
    before = said[: said.index("Learning rate")]
    assert "masks: verified on every one of" in before
    assert "First training row, trained part in [[ ]]: <|im_start|>system\\nYou are terse." in before
    for line in ("BOS: none", "end of turn: every trained answer ends with <|im_end|>", "padding token: <|endoftext|>"):
        assert line in before
    assert "Written to: " in said


def test_a_second_time_everything_is_the_same_and_the_tokens_are_there(story, monkeypatch):
    for name in ("process", "style", "render"):
        assert story(name, STYLE="You are terse.")[0] == 0
    assert story("train", SET="output.name=one")[0] == 0
    cache = Path(os.environ["SFT_PLAY_CACHE"]) / "tokens"
    made = {folder.name: folder.stat().st_mtime for folder in cache.iterdir() if folder.is_dir()}
    old = states()

    for name in ("process", "style", "render"):
        assert story(name, STYLE="You are terse.")[0] == 0
    assert {file: content for file, (content, _) in states().items()} == {f: content for f, (content, _) in old.items()}
    monkeypatch.setattr("sft_play.data.build.build._build_cache", lambda *_: pytest.fail("the rows were made again"))
    code, said = story("train", SET="output.name=two")
    assert code == 0, said
    assert {folder.name: folder.stat().st_mtime for folder in cache.iterdir() if folder.is_dir()} == made


@pytest.mark.parametrize("name", ["process", "check", "train"])
def test_a_pipe_is_refused_by_every_command_before_it_is_opened(story, tmp_path, name):
    os.mkfifo(tmp_path / "rows.jsonl")
    code, said = story(
        name, SET="data.train_path=rows.jsonl data.val_path=null data.test_path=null data.process.raw_path=rows.jsonl"
    )
    assert code == 2
    assert "rows.jsonl is not a regular file (a pipe or a device?)" in said


class TestADiskThatIsFull:
    def test_writing_says_where_and_leaves_the_old_ones(self, tmp_path):
        with OutputFolder(tmp_path, ("a.txt",), force=False, command="process") as folder:
            folder.open("a.txt").write("old")
        code = (
            "import resource, sys; from pathlib import Path; from sft_play.data.managed_outputs import OutputFolder\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
            f"with OutputFolder(Path({str(tmp_path)!r}), ('a.txt',), force=False, command='process') as folder:\n"
            "    file = folder.open('a.txt')\n"
            "    for _ in range(1000): file.write('x' * 1000)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
        assert f"DataError: {tmp_path} cannot be written: File too large" in done.stderr
        assert (tmp_path / "a.txt").read_text() == "old"
        assert {path.name for path in tmp_path.iterdir()} == {"a.txt", RECORD_NAME}

    def test_process_ends_at_once_with_the_folder_of_the_output(self, story):
        write_lines(Path("data/raw/faq.jsonl"), [{"question": f"q {n}", "answer": "a" * 200} for n in range(3_000)])
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))
        try:
            code, said = story("process")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
        assert code == 2
        assert "data/processed cannot be written: File too large" in said
        assert "fix " not in said
        assert "leave rows out" not in said
        assert list(Path("data/processed").iterdir()) == []
