"""The defaults of data.train_path, val_path and test_path hold only together: no run is judged on another's files."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from sft_play.commands.rows import preview, render
from sft_play.config.load import config_from_text, load_config, resolved_config
from sft_play.config.schema import DataConfig, RunConfig
from sft_play.data.sources.files import find_data_paths
from sft_play.diagnose.run_check import check_run
from sft_play.errors import DataError
from sft_play.launch.planning import has_eval
from sft_play.machine.hardware import detect_hardware
from tests.conftest import chat, write_rows

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
    for given, parts in {
        (("train_path", "a.jsonl"), ("val_path", "b.jsonl")): ("a.jsonl does not exist", "b.jsonl does not exist"),
        (): ("make process",),
    }.items():
        with pytest.raises(DataError) as error:
            find_data_paths(DataConfig(**dict(given)))
        assert all(part in str(error.value) for part in parts)


@pytest.mark.parametrize(
    ("given", "val", "test"),
    [
        ({"train_path": "mine.jsonl"}, None, None),
        ({"train_path": "mine.jsonl", "val_path": "v.jsonl"}, "v.jsonl", None),
        ({"train_path": "mine.jsonl", "val_path": f"{STALE}/val.jsonl"}, f"{STALE}/val.jsonl", None),
        ({"train_path": "data/processed_with_style/train.jsonl"}, None, None),
        ({"train_path": f"{STALE}/train.jsonl"}, f"{STALE}/val.jsonl", f"{STALE}/test.jsonl"),
        ({"train_path": f"./{STALE}/train.jsonl"}, f"{STALE}/val.jsonl", f"{STALE}/test.jsonl"),
        ({"val_path": None}, None, f"{STALE}/test.jsonl"),
    ],
)
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
