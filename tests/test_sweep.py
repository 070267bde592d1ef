"""`make sweep`: cells read, refused and planned before the first trains; each a run; again, only what is left."""

import dataclasses
import itertools
import json
import random
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from sft_play.cli import main
from sft_play.commands import sweep
from sft_play.commands.sweep import cell_name, expand_cells, plan_cells, sweep_lines
from sft_play.config.load import load_config
from sft_play.errors import ConfigError, RunFolderError
from sft_play.machine.hardware import detect_hardware
from sft_play.planner.advice import parse_grid
from sft_play.runs.folder import read_json, write_json
from sft_play.runs.lookup import check_run_name
from tests import warm
from tests.conftest import ROOT, chat, write_rows

LISTED = "train.learning_rate=1e-3,1e-2"


@pytest.fixture
def world(tmp_path, tiny_llama, monkeypatch) -> Path:
    write_rows(tmp_path / "rows.jsonl", (chat(f"what is {n}?", f"it is {n}.") for n in range(40)))
    (tmp_path / "my run.yaml").write_text(
        f"model: {{name: {tiny_llama}, max_seq_len: 64}}\ntuning: {{mode: lora, lora: {{r: 4}}}}\n"
        "data: {train_path: rows.jsonl, val_path: null, test_path: null, val_fraction: 0.2}\n"
        "train: {effective_batch_size: 8, max_steps: 3, report_to: []}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", warm.python())
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def cells(*words: str) -> list[sweep.SweepCell]:
    return plan_cells(expand_cells(Path("my run.yaml"), words))


@pytest.mark.parametrize("seed", range(5))
def test_every_combination_is_a_cell_and_commas_in_brackets_or_quotes_part_no_values(seed):
    draw = random.Random(seed)
    pool = ["1e-4", "16", "[a, b]", "{a: 1, b: [2, 3]}", '"x, y"', "'it, [is'", "null", "it's", "text"]
    axes = {f"s.key{n}": draw.sample(pool, draw.randint(1, 4)) for n in range(draw.randint(1, 4))}
    words = [f"{key}={draw.choice([',', ', ']).join(values)}" for key, values in axes.items()]
    pairs = ([f"{key}={value}" for value in values] for key, values in axes.items())
    assert parse_grid(words, variable="SET") == list(itertools.product(*pairs))


@pytest.mark.parametrize("seed", range(5))
def test_names_tell_cells_apart_and_are_words_that_runs_takes(seed):
    draw = random.Random(seed)
    letters = "ab1.,/ -_=é[]'\"\n:~"
    values = ["".join(draw.choices(letters, k=draw.choice([1, 5, 300]))) for _ in range(30)]
    words = [(f"a.x={one}", f"{key}={other}") for one in values for key, other in (("b.x", "1"), ("b.y", "2"))]
    names = [cell_name("base", pair) for pair in words]
    assert len(set(names)) == len(set(words))
    for name in names:
        assert check_run_name(name, key="RUN") == name
        assert not set(name) & set(", \n\t")
    assert names == [cell_name("base", pair) for pair in words]
    assert cell_name("my", ["train.learning_rate=1e-4", "tuning.lora.r=16"]) == "my-learning_rate=1e-4-r=16"
    both = ["curriculum.0.train.epochs=1", "train.epochs=2"]
    assert cell_name("my", both) == "my-curriculum.0.train.epochs=1-train.epochs=2"
    assert cell_name("my", ["model.name=a/b"]).startswith("my-name=a_b-")


def test_what_can_be_refused_is_refused_at_once(world, monkeypatch, capsys):
    with pytest.raises(ConfigError, match="lists no values"):
        cells("train.learning_rate=1e-3")
    with pytest.raises(ConfigError, match=r"twice; give all of its values at once: train.epochs=1,2"):
        cells("train.epochs=1", "train.epochs=2")
    with pytest.raises(ConfigError, match=r"lora\.rank=4: .*unknown key .*here it is tuning\.lora\.r=4"):
        cells("train.learning_rate=1e-3,fast", "tuning.lora.rank=4,8")
    with pytest.raises(Exception, match="nowhere"):
        cells("data.train_path=rows.jsonl,nowhere.jsonl")
    assert not (world / "outputs").exists()
    (world / "outputs" / "my-run-learning_rate=1e-3").mkdir(parents=True)
    with pytest.raises(RunFolderError, match="no manifest"):
        cells(LISTED)
    with monkeypatch.context() as patch:
        patch.chdir(ROOT)
        assert main(["sweep", "model.name=some/model,other/model"]) == 2
    assert "without CONFIG sweep uses the starter" in capsys.readouterr().err  # which takes no other model
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["sweep", "--config", "my run.yaml", LISTED]) == 2
    assert "without a launcher" in capsys.readouterr().err


@pytest.mark.build
def test_cells_that_do_not_fit_are_named_with_their_peak_and_skipped(world, monkeypatch, capsys):
    fixed = ("train.effective_batch_size=1", "train.gradient_checkpointing=true", "eval.batch_size=1")
    words = ("tuning.lora.r=4,64", LISTED, *fixed)
    small, _, large, _ = (cell.plan.memory.required for cell in cells(*words))
    assert small < large
    between = dataclasses.replace(detect_hardware(), ram_free_bytes=(small + large) // 2)
    monkeypatch.setattr(sweep, "detect_hardware", lambda: between)
    planned = cells(*words)
    assert [cell.state for cell in planned] == ["new", "new", "does_not_fit", "does_not_fit"]
    lines = sweep_lines(planned)
    assert lines[0].startswith("Sweep: 4 cells, 2 to train")
    assert sweep_lines(planned[2:])[0] == "Sweep: 2 cells, 0 to train, 0 h"
    rows = {line.split()[0]: line for line in reversed(lines) if line.startswith("my-run")}  # those of the table
    for cell in planned:
        assert f"{cell.plan.memory.required / 2**30:.2f}" in rows[cell.name]
        assert ("NO" in rows[cell.name]) == (cell.error is not None) == ("r=64" in cell.name)
    assert (f"{planned[2].name} does not fit: " in "\n".join(lines), "need" in str(planned[2].error)) == (True, True)
    # a batch that is given and does not fit would be tried by train: not here
    given = cells("tuning.lora.r=4,64", *fixed, "train.batch_size=1", "train.grad_accum=1")
    assert [one.state for one in given] == ["new", "does_not_fit"]
    # where none fits, nothing is started and the code says so
    monkeypatch.setattr(sweep.signals, "run_child", lambda *_, **__: pytest.fail("started"))
    monkeypatch.setattr(sweep, "detect_hardware", lambda: dataclasses.replace(between, ram_free_bytes=small // 2))
    capsys.readouterr()
    assert main(["sweep", "--config", "my run.yaml", "--json", *words]) == 3
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ok"], answer["kind"], answer["compare"]) == (False, "does_not_fit", None)
    assert [one["status"] for one in answer["cells"]] == ["does_not_fit"] * 4


def swept(*words: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> dict:
    capsys.readouterr()
    assert main(["sweep", "--config", "my run.yaml", "--json", *words]) == code
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] == (code == 0)
    return answer


@pytest.mark.build
def test_each_cell_is_a_run_one_that_fails_keeps_no_other_and_again_what_is_left_trains(world, capsys, monkeypatch):
    # planned here, and refused by the process of the cell
    monkeypatch.setattr("sft_play.config.validation.MAX_LEARNING_RATE", float("inf"))
    words = ("train.learning_rate=1e30,1e-3,1e-2",)
    answer = swept(*words, capsys=capsys, code=2)
    assert [one["status"] for one in answer["cells"]] == ["failed", "finished", "finished"]
    assert answer["cells"][0]["error"]
    names = ["my-run-learning_rate=1e-3", "my-run-learning_rate=1e-2"]
    assert [one["name"] for one in answer["compare"]["runs"]] == names
    assert answer["compare"]["differing"]["train.learning_rate"] == [1e-3, 1e-2]
    assert Path(answer["compare"]["path"]).is_file()
    folders = [Path(one["path"]) for one in answer["cells"]]
    ended = [read_json(folder / "manifest.json").get("ended") for folder in folders[1:]]
    for cell, one in zip(answer["cells"][1:], folders[1:], strict=True):
        assert read_json(one / "resolved.json")["train"]["learning_rate"] == float(cell["settings"][0].split("=")[1])
    swept(*words, capsys=capsys, code=2)
    assert [read_json(folder / "manifest.json").get("ended") for folder in folders[1:]] == ended  # not trained again
    # other settings under the same names are another sweep
    with pytest.raises(RunFolderError, match=r"train.seed: the run has 42, now 7"):
        cells(*words, "train.seed=7")
    (world / "rows.jsonl").write_text((world / "rows.jsonl").read_text().replace("it is 3.", "it is 4."))
    with pytest.raises(RunFolderError, match=r"the content of rows.jsonl has changed"):
        cells(*words)
    # started over where that is said
    assert {cell.state for cell in cells(*words, "output.if_exists=replace")} == {"new"}


@pytest.mark.build
def test_a_stopped_cell_is_resumed(world, capsys):
    answer = swept(LISTED, "train.stop_after_steps=1", capsys=capsys, code=2)
    assert [one["status"] for one in answer["cells"]] == ["stopped", "stopped"]
    assert answer["compare"] is None
    assert [cell.state for cell in cells(LISTED)] == ["begun", "begun"]
    answer = swept(LISTED, capsys=capsys)
    for one in answer["cells"]:
        resumed = read_json(Path(one["path"]) / "manifest.json")["resumed"]
        assert (one["status"], len(resumed)) == ("finished", 1)


def test_a_config_that_changes_meanwhile_is_not_trained(world, monkeypatch):
    planned = cells(LISTED)
    path = world / "my run.yaml"
    path.write_text(path.read_text().replace("max_steps: 3", "max_steps: 4"))
    monkeypatch.setattr(sweep.signals, "run_child", lambda *_, **__: pytest.fail("started"))
    for cell in sweep.train_cells(planned, {}):
        assert (cell.state, "has changed since the sweep began" in str(cell.error)) == ("failed", True)


@pytest.mark.parametrize(("code", "written", "status", "state", "said"), [
    (0, "{}", "finished", "finished", None), (130, "{}", "stopped", "stopped", "the same command resumes it"),
    (2, '{"error": "no room"}', None, "failed", "no room"), (-9, "", "running", "failed", "signal 9"),
    (1, "not json", "failed", "failed", "exit code 1"),
])  # fmt: skip
def test_what_a_cells_process_says_decides_its_state(world, monkeypatch, code, written, status, state, said):
    planned = cells(LISTED)

    def ended(module, words, **_):
        name = next(word for word in words if word.startswith("output.name=")).partition("=")[2]
        if status is not None:
            folder = world / "outputs" / json.loads(name)
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / "manifest.json", {"format": "sft_play run 1", "status": status})
        return sweep.signals.ChildResult(code, written, was_stopped=False)

    monkeypatch.setattr(sweep.signals, "run_child", ended)
    for cell in sweep.train_cells(planned, {}):
        assert cell.state == state
        assert (said is None and cell.error is None) or said in str(cell.error)


def test_every_cell_is_what_train_with_its_words_is(world, monkeypatch):
    run_child = Mock(return_value=sweep.signals.ChildResult(1, "", was_stopped=False))
    monkeypatch.setattr(sweep.signals, "run_child", run_child)
    planned = cells(LISTED, "tuning.lora.target_modules=[q_proj, v_proj]", "train.seed=1,2")
    sweep.train_cells(planned, {})
    for cell, call in zip(planned, run_child.call_args_list, strict=True):
        words = list(call.args[1])
        assert words[:4] == ["train", "--config", "my run.yaml", "--json"]
        assert load_config("my run.yaml", overrides=words[4:]).config == cell.loaded.config
        assert cell.loaded.config.tuning.lora.target_modules == ("q_proj", "v_proj")
