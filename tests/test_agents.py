"""AGENTS.md, done: every command of its ten tasks, in their order, on a tiny model in the place of the one it names."""

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sft_play.cli import main
from sft_play.variables import COMMANDS
from tests.conftest import ROOT, chat, clean_environment, write_rows
from tests.schemas import refuse_invalid

TEXT = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
TASKS = {
    match[1]: re.findall(r"^    make (.*)$", match[2], re.MULTILINE)
    for match in re.finditer(r"^\*\*\d+\. ([^.?]+)[.?]\*\*(.*?)(?=^\*\*\d|^## )", TEXT, re.MULTILINE | re.DOTALL)
}
NAMES = ("Plan", "Batch", "Train", "Best checkpoint", "Evaluate", "Compare", "Ship", "Resume", "Diagnose", "Export")


def test_it_is_one_page_with_ten_tasks():
    assert tuple(TASKS) == NAMES
    assert all(TASKS.values())
    assert len(TEXT.splitlines()) <= 100
    for words in TASKS.values():
        assert all(line.split()[0] in COMMANDS and line.endswith(" JSON=1") for line in words)


def test_make_takes_every_line():
    for line in [one for task in TASKS.values() for one in task]:
        ended = subprocess.run(["make", "-n", *shlex.split(line)], cwd=ROOT, env=clean_environment(),
                               capture_output=True, text=True, timeout=60)  # fmt: skip
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
            assert f"`{field}" in TEXT, field


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
    assert plan["fits"] is True
    assert plan["launch"].startswith("make train CONFIG=my.yaml")
    assert batch[0]["max"]["value"] >= plan["effective_batch"] == 8
    assert [cell["effective_batch"] for cell in batch[1]["whatif"]] == [8, 16]
    trained = answers["Train"][1]
    assert (trained["run"], trained["status"], trained["steps"]) == ("outputs/first", "finished", 4)
    listed = answers["Best checkpoint"][0]["runs"][0]
    assert listed["name"] == "first"
    assert [listed[key] == trained[key] for key in ("best_step", "best_checkpoint")] == [True, True]
    lowest = min((one for one in trained["evaluations"] if one["step"]), key=lambda one: one["loss"])
    assert listed["best_step"] == lowest["step"]
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
