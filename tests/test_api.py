"""The toolkit from Python, its notebooks, and AGENTS.md: every command of its ten tasks, done on a tiny model."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sft_play
from sft_play import load_config, plan, train, variables
from sft_play.cli import main
from sft_play.config.load import split_overrides
from sft_play.errors import DataError, HardwareError
from tests.conftest import ROOT, chat, clean_environment, write_rows, write_run
from tests.schemas import refuse_invalid

GEMMA = ROOT / "configs" / "run_gemma27b_distributed.yaml"


def test_a_plan_is_that_of_the_command(capsys):
    batch = "train.effective_batch_size=64"
    assert main(["plan", "--config", str(GEMMA), "--hardware", "2xH200", "--json", batch]) == 0
    answer = json.loads(capsys.readouterr().out)
    run = load_config(GEMMA, overrides=[batch])
    assert answer.pop("launch").startswith("make train-distributed CONFIG=")
    assert set(answer.pop("precision_of")) == {"quantised", "adapted", "frozen", "trained"}
    planned = json.loads(json.dumps(plan(run, hardware="2xH200").as_json()))
    assert answer == {**planned, "ok": True, "kind": "done", "exit": 0}
    assert not plan(run, hardware="1xRTX3060,ram=8GiB").fits
    with pytest.raises(HardwareError, match="NoSuchGpu"):
        plan(run, hardware="1xNoSuchGpu")
    with pytest.raises(AttributeError, match="no attribute 'fine_tune'"):
        _ = sft_play.fine_tune


def test_importing_and_planning_load_no_torch():
    planned = f"plan(load_config({str(GEMMA)!r}), hardware='2xH200')"
    code = f"import sys; from sft_play import load_config, plan; {planned}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0


@pytest.mark.build
def test_train_returns_the_summary_of_the_run_folder(tiny_llama, sums, tmp_path):
    config = write_run(tmp_path, tiny_llama, sums, output={"name": "mine"})
    summary = train(load_config(config))
    folder = Path(str(summary.pop("run")))
    assert (folder.name, summary) == ("mine", json.loads((folder / "summary.json").read_text()))
    assert (summary["status"], summary["steps"]) == ("finished", 2)
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        train(load_config(config, overrides=["data.train_path=nowhere.jsonl", "output.name=other"]))
    assert not (folder.parent / "other").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_one_of_format_4_5_without_outputs(path):
    book = json.loads(path.read_text(encoding="utf-8"))
    assert (book["nbformat"], book["nbformat_minor"], book["metadata"]["kernelspec"]["name"]) == (4, 5, "python3")
    ids = [cell["id"] for cell in book["cells"]]
    assert len(set(ids)) == len(ids) > 3
    for cell in book["cells"]:
        assert all(line.endswith("\n") for line in cell["source"][:-1])
        left = {key: value for key, value in cell.items() if key not in ("id", "source", "cell_type")}
        ran = {"outputs": [], "execution_count": None} if cell["cell_type"] == "code" else {}
        assert left == {"metadata": {}, **ran}


def test_the_hosted_notebook_calls_targets_and_variables_that_there_are():
    cells = json.loads((ROOT / "examples" / "hosted_gpu.ipynb").read_text(encoding="utf-8"))["cells"]
    lines = [line.strip() for cell in cells if cell["cell_type"] == "code" for line in cell["source"]]
    lines = [line for line in lines if not line.startswith("#")]
    called = []
    for line in lines:
        assert line.startswith(("!", "%cd ", "REPOSITORY = ")), line
        for command in re.findall(r"\bmake (.*)", line):
            target, *words = shlex.split(command, comments=True)
            names = [word.partition("=")[0] for word in words]
            assert variables.command_line_problem([target], names, []) is None, line
            called.append((target, dict(word.split("=", 1) for word in words)))
    assert [target for target, _ in called] == ["setup", "gpu-info", "new", "plan", "train", "chat", "eval"]
    asked = dict(called)
    written = asked["new"]["OUT"]
    assert (ROOT / asked["new"]["DATA"]).is_file()
    assert asked["plan"]["CONFIG"] == asked["train"]["CONFIG"] == written
    assert f"output.name={asked['chat']['RUN']}" in split_overrides(asked["train"]["SET"])
    assert any(f"outputs/{asked['chat']['RUN']}" in line for line in lines if line.startswith("!tar"))
    for word in re.findall(r"`(make [^`]*)`", "".join(line for cell in cells for line in cell["source"])):
        target, *words = shlex.split(word)[1:]
        assert variables.command_line_problem([target], [one.partition("=")[0] for one in words], []) is None, word


def test_the_example_notebook_plans_and_trains_the_starter(capsys, monkeypatch):
    """Its training is a stand-in here: what it is asked to train is looked at, and a run of `train` is tested above."""
    asked = []

    def stand_in(run):
        asked.append(run)
        return {"run": "outputs/from_python", "after": None, "peak_bytes": {}}

    monkeypatch.setattr("sft_play.api.train", stand_in)
    monkeypatch.chdir(ROOT / "examples")
    monkeypatch.setattr(sys, "path", list(sys.path))
    cells = json.loads((ROOT / "examples" / "plan_and_train.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[:3]] == ["1xRTX3060", "1xRTX4090", "2xH200"]
    assert "->" in printed
    assert [(run.path.name, run.config.train.max_steps) for run in asked] == [("run_starter.yaml", 20)]


AGENTS = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
TASKS = {
    match[1]: re.findall(r"^    make (.*)$", match[2], re.MULTILINE)
    for match in re.finditer(r"^\*\*\d+\. ([^.?]+)[.?]\*\*(.*?)(?=^\*\*\d|^## )", AGENTS, re.MULTILINE | re.DOTALL)
}


def test_the_page_for_programs_has_ten_tasks_and_make_takes_every_line():
    assert ", ".join(TASKS) == "Plan, Batch, Train, Best checkpoint, Evaluate, Compare, Ship, Resume, Diagnose, Export"
    assert (all(TASKS.values()), len(AGENTS.splitlines()) <= 100) == (True, True)
    for words in TASKS.values():
        assert all(line.split()[0] in variables.COMMANDS and line.endswith(" JSON=1") for line in words)
    for line in [one for task in TASKS.values() for one in task]:
        words, env = ["make", "-n", *shlex.split(line)], clean_environment()
        ended = subprocess.run(words, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True, timeout=60)
        assert ended.returncode == 0, ended.stderr


def test_the_fields_that_it_names_are_in_the_schemas():
    for command, fields in {
        "plan": ("fits", "peak_bytes", "launch", "reasons", "effective_batch", "max", "ways_out"),
        "runs": ("runs",), "eval": ("figures",), "compare": ("differing", "runs"), "ship": ("verdict", "reasons"),
        "doctor": ("findings",), "check": ("checks",), "export": ("commands",),
    }.items():  # fmt: skip
        schema = json.loads((ROOT / "docs" / "schema" / f"{command}.json").read_text())
        for field in fields:
            assert field in schema["properties"], (command, field)
            assert f"`{field}" in AGENTS, field


def test_the_tasks_are_done_by_these_commands(tmp_path, tiny_llama, monkeypatch, capfd):
    write_rows(tmp_path / "my.jsonl", (chat(f"what is {n}?", f"it is {n}.") for n in range(60)))
    (tmp_path / "my.yaml").write_text(
        f"model: {{name: {tiny_llama}, max_seq_len: 64}}\ntuning: {{mode: lora}}\n"
        "data: {train_path: my.jsonl, val_fraction: 0.2}\ntrain: {effective_batch_size: 8, max_steps: 4}\n"
        "eval: {generate_rows: 2, max_new_tokens: 4}\n"
    )
    monkeypatch.chdir(tmp_path)
    answers = {name: [_done(line, monkeypatch, capfd) for line in lines] for name, lines in TASKS.items()}
    plan, batch = answers["Plan"][0], answers["Batch"]
    assert (plan["fits"], plan["launch"].startswith("make train CONFIG=my.yaml")) == (True, True)
    assert batch[0]["max"]["value"] >= plan["effective_batch"] == 8
    assert [cell["effective_batch"] for cell in batch[1]["whatif"]] == [8, 16]
    trained = answers["Train"][1]
    assert (trained["run"], trained["status"], trained["steps"]) == ("outputs/first", "finished", 4)
    listed = answers["Best checkpoint"][0]["runs"][0]
    lowest = min((one for one in trained["evaluations"] if one["step"]), key=lambda one: one["loss"])
    best = ("first", lowest["step"], trained["best_checkpoint"])
    assert (listed["name"], listed["best_step"], listed["best_checkpoint"]) == best
    assert trained["best_step"] == lowest["step"]
    assert Path(listed["best_checkpoint"]).is_dir()
    assert {"base", "tuned", "low", "high"} <= set(answers["Evaluate"][0]["figures"]["loss"])
    assert "train.learning_rate" in answers["Compare"][1]["differing"]
    assert answers["Ship"][0]["kind"] in ("done", "do_not_ship")
    half, resumed = answers["Resume"]
    assert (half["status"], half["steps"], resumed["status"], resumed["steps"]) == ("stopped", 1, "finished", 4)
    assert resumed["run"] == half["run"]
    assert Path(answers["Export"][2]["path"]).is_dir()


def _done(line: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The answer of a line, whose variables reach the program as make hands them over: in the environment."""
    command, *variables = shlex.split(line)
    capfd.readouterr()
    with monkeypatch.context() as patch:
        for name, _, value in (word.partition("=") for word in variables):
            patch.setenv(name, value)
        code = main([command])
    out, err = capfd.readouterr()
    answer: dict[str, Any] = json.loads(out)
    refuse_invalid(command, answer)
    assert code == answer["exit"]
    # a doctor finds what this machine lacks, and so small a run gives no reason to ship
    assert answer["ok"] or command in ("doctor", "ship"), err
    return answer
