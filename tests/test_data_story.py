"""The way of a new user: raw files to a checked run, a second time, and the messages on the way. Without paths the
defaults hold only together: no run is judged on another's files."""

import itertools
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from sft_play.commands.rows import preview, render
from sft_play.config.load import config_from_text, load_config, resolved_config
from sft_play.config.schema import DataConfig, RunConfig
from sft_play.data.managed_outputs import RECORD_NAME
from sft_play.data.sources.files import find_data_paths
from sft_play.diagnose.run_check import check_run
from sft_play.errors import DataError
from sft_play.launch.planning import has_eval
from sft_play.machine.hardware import detect_hardware
from tests.conftest import chat, write_rows, write_run


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
    data = {**styled, "process": {"val_fraction": 0.2, "test_fraction": 0.1}}
    quick = {"before_training": False, "steps": 0}
    write_run(tmp_path, tiny_llama, raw, model={"max_seq_len": 96}, data=data, eval=quick)
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


@pytest.mark.build
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


@pytest.mark.build
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


@pytest.mark.build
def test_a_pipe_is_refused_by_every_command_before_it_is_opened(story, tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    words = "data.train_path=rows.jsonl data.val_path=null data.test_path=null data.process.raw_path=rows.jsonl"
    for name in ("process", "check", "train"):
        assert "rows.jsonl is not a regular file (a pipe or a device?)" in story(name, ends=2, SET=words)


STALE = "data/processed"


@pytest.fixture
def stale(tmp_path, monkeypatch) -> Path:
    """A folder in which `make process` has run for other rows, with a file of the user's own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / STALE).mkdir(parents=True)
    for split, count in (("train", 30), ("val", 5), ("test", 5)):
        write_rows(tmp_path / STALE / f"{split}.jsonl", (chat(f"stale {n}", f"answer {n}") for n in range(count)))
    write_rows(tmp_path / "mine.jsonl", (chat(f"mine {n}", f"answer {n}") for n in range(60)))
    return tmp_path


def config(model: Any, data: str, *overrides: str) -> RunConfig:
    return config_from_text(f"model: {{name: {model}, max_seq_len: 64}}\n{data}", name="run.yaml", overrides=overrides)


def test_missing_files_are_all_named_at_once_and_default_ones_with_who_writes_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"a\.jsonl does not exist[\s\S]*b\.jsonl does not exist"):
        find_data_paths(DataConfig(train_path="a.jsonl", val_path="b.jsonl"))
    with pytest.raises(DataError, match="make process"):
        find_data_paths(DataConfig())


@pytest.mark.parametrize(("given", "val", "test"), [
    ({"train_path": "mine.jsonl"}, None, None),
    ({"train_path": "mine.jsonl", "val_path": "v.jsonl"}, "v.jsonl", None),
    ({"train_path": "mine.jsonl", "val_path": f"{STALE}/val.jsonl"}, f"{STALE}/val.jsonl", None),
    ({"train_path": "data/processed_with_style/train.jsonl"}, None, None),
    ({"train_path": f"{STALE}/train.jsonl"}, f"{STALE}/val.jsonl", f"{STALE}/test.jsonl"),
    ({"train_path": f"./{STALE}/train.jsonl"}, f"{STALE}/val.jsonl", f"{STALE}/test.jsonl"),
    ({"val_path": None}, None, f"{STALE}/test.jsonl"),
])  # fmt: skip
def test_a_train_path_of_ones_own_has_no_default_beside_it_and_what_is_given_stays(given, val, test):
    words = [f"data.{name}={'null' if path is None else path}" for name, path in given.items()]
    for found in (DataConfig(**given), config("x", "", *words).data):
        assert (found.val_path, found.test_path) == (val, test)
    assert resolved_config(config("x", "", *words))["data"]["val_path"] == val


@pytest.mark.build
def test_no_command_reads_or_names_the_stale_files(stale, tiny_llama):
    path = stale / "run.yaml"
    path.write_text(f"model: {{name: {tiny_llama}}}\ndata: {{train_path: mine.jsonl, val_fraction: 0.2}}\n")
    loaded = load_config(path)
    written = render(loaded, out=None, force=False)
    assert [(file["split"], file["source"]) for file in written.data["files"]] == [("train", "mine.jsonl")]
    report = check_run(path, (), detect_hardware())
    assert not any("processed" in line for line in report.lines())
    shown = preview(loaded, count=1, row=None, page=stale / "page.html", force=False)
    assert shown.source == "mine.jsonl"


def test_the_plan_and_the_files_agree_on_whether_there_is_an_evaluation(stale):
    (stale / STALE / "test.jsonl").unlink()
    choices = [["unset", "null", f"{STALE}/val.jsonl", "mine.jsonl"]] * 2
    seen = set()
    for train, val, test, fraction in itertools.product((None, "mine.jsonl"), *choices, (0.0, 0.1)):
        given = {"train_path": train, "val_path": val, "test_path": test}
        words = [f"data.{key}={value}" for key, value in given.items() if value not in (None, "unset")]
        made = config("x", f"data: {{val_fraction: {fraction}}}\n", *words)
        paths = find_data_paths(made.data)
        expected = paths.val is not None or paths.test is not None or fraction > 0
        assert has_eval(made) == expected, words
        seen.add(expected)
    assert seen == {True, False}
