"""What a user does with a run after it was trained, by the commands as they are typed."""

import io
import json
import sys

import pytest

from tests.conftest import write_run

pytestmark = pytest.mark.build


@pytest.mark.parametrize("mode", [pytest.param("lora", marks=pytest.mark.slow), "qlora"])
def test_train_then_infer_chat_merge_and_prune(tmp_path, tiny_llama, sums, succeed, monkeypatch, mode):
    train = {"max_steps": 3, "learning_rate": 1e-2, "warmup_steps": 0}
    sections = {"data": {"val_fraction": 0.2}, "train": train, "eval": {"before_training": False, "steps": 0}}
    config = ("--config", str(write_run(tmp_path, tiny_llama, sums, tuning={"mode": mode}, **sections)))
    printed = succeed("train", *config, "output.name=first")
    folder = tmp_path / "outputs" / "first"
    assert f"make chat RUN={folder}" in printed
    assert f"Report: {folder}/report.html" in printed
    assert "<svg" in (folder / "report.html").read_text()

    (tmp_path / "prompts.txt").write_text("what is 3 + 3?\nhello\n")
    monkeypatch.setenv("INPUT", str(tmp_path / "prompts.txt"))
    monkeypatch.setenv("OUTPUT", str(tmp_path / "answers.jsonl"))
    succeed("infer", *config, "--max_new_tokens", "4")
    answers = [json.loads(line)["answer"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]

    monkeypatch.setattr(sys, "stdin", io.StringIO("what is 3 + 3?\n"))
    printed = succeed("chat", *config, "--max_new_tokens", "4")
    assert answers[0] in printed

    printed = succeed("merge", *config, "--json")
    merged = json.loads(next(line for line in printed.splitlines() if line.startswith('{"ok"')))
    assert merged["base"] == ("dequantized" if mode == "qlora" else None)
    succeed("merge-test", *config)

    (listed,) = json.loads(succeed("runs", *config, "--json"))["runs"]
    assert (listed["name"], listed["status"], listed["step"]) == ("first", "finished", 3)
    assert listed["checkpoint_bytes"] > 0
    succeed("prune", *config, "--runs", "first", "--checkpoints", "--yes")
    assert not (folder / "checkpoints").exists()
    assert (folder / "adapter").is_dir()
