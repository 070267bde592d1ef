"""A run folder that somebody else made: its word alone runs no code that comes with a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from sft_play.cli import main
from sft_play.variables import VARIABLES
from tests.finished_runs import finished_run
from tests.models import make_llama


def change(file: Path, **changes: Any) -> None:
    """Set keys of a JSON file; those of a section are added to it."""
    data = json.loads(file.read_text())
    for name, value in changes.items():
        data[name] = data.get(name, {}) | value if isinstance(value, dict) else value
    file.write_text(json.dumps(data))


@pytest.fixture
def received(tmp_path, monkeypatch) -> tuple[Path, Path]:
    """A run folder whose settings allow the code of its base, and the file that this code writes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTPUT", str(tmp_path / "answers.jsonl"))
    base = make_llama(tmp_path / "base")
    folder = finished_run(tmp_path / "outputs" / "received", base)
    change(folder / "resolved.json", model={"trust_remote_code": True})
    mark = tmp_path / "code ran"
    classes = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
    change(base / "config.json", auto_map=classes)
    (base / "theirs.py").write_text(
        "from pathlib import Path\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"Path({str(mark)!r}).touch()\n"
        "class Config(LlamaConfig):\n    pass\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
    )
    return folder, mark


def given(command: str, folder: Path) -> list[str]:
    (folder.parent / "asked.jsonl").write_text(json.dumps({"prompt": "what is 1 + 1?"}) + "\n")
    more = {
        "infer": ["--input", str(folder.parent / "asked.jsonl")],
        "export": ["--format", "gguf"],
        "push": ["--repo", "me/it", "--yes"],
    }
    return [command, "--run", str(folder), *more.get(command, [])]


# those that open no model by a run's settings, and `resume`, which trains a stopped run: see below
LEFT_OUT = {"resume", "memory-check", "report", "tensorboard", "tb-open", "tb-stop", "tb-clean"}


@pytest.mark.parametrize("verb", sorted({*VARIABLES["RUN"].commands} - LEFT_OUT))
def test_the_folders_word_is_refused_with_the_name_of_the_key(received, verb, refuse):
    folder, mark = received
    printed = refuse(*given(verb, folder))
    assert "SET=model.trust_remote_code=true" in printed
    assert ("a run folder does not decide that" in printed, mark.exists()) == (True, False)


KERNEL = f"theirs/flash-own@{'0' * 40}"


@pytest.fixture
def with_kernel(received) -> Path:
    """The folder with a kernel of the hub in its settings, which is code too, in place of the base's own."""
    folder, _ = received
    change(folder / "resolved.json", model={"trust_remote_code": False, "attn_implementation": KERNEL})
    return folder


def test_a_kernel_of_the_hub_is_fetched_by_the_users_word_alone(with_kernel, refuse):
    printed = refuse(*given("infer", with_kernel))
    assert f"SET=model.attn_implementation={KERNEL}" in printed
    assert "a run folder does not decide that" in printed


@pytest.mark.parametrize(
    ("value", "said"), [(KERNEL, "kernel"), ("auto", "does not decide"), (KERNEL[:-1] + "1", "does not decide")]
)
def test_a_kernel_that_is_named_at_the_command_counts(with_kernel, command, value, said):
    # it is asked for next: this machine has no package kernels, or no GPU
    _, printed = command(*given("infer", with_kernel), f"model.attn_implementation={value}")
    assert said in printed
    assert ("does not decide" in printed) is (value != KERNEL)


def test_what_the_user_gives_at_the_command_counts(received):
    folder, mark = received
    for word, code in (("false", 2), ("true", 0)):
        assert main([*given("infer", folder), f"model.trust_remote_code={word}"]) == code
        assert mark.exists() == (word == "true")


@pytest.mark.parametrize(
    ("named", "revision", "trusted", "code"),
    [("base", None, True, 0), ("base", "abc", True, 2), ("other", None, True, 2), ("base", None, False, 2)],
)
def test_a_config_that_is_given_counts_for_its_own_model(received, tmp_path, named, revision, trusted, code):
    folder, mark = received
    config = yaml.safe_load((tmp_path / "outputs" / "received.yaml").read_text())
    config["model"] |= {"name": str(tmp_path / named), "revision": revision, "trust_remote_code": trusted}
    (tmp_path / "mine.yaml").write_text(json.dumps(config))
    assert main([*given("infer", folder), "--config", str(tmp_path / "mine.yaml")]) == code
    assert mark.exists() == (code == 0)


@pytest.mark.parametrize(
    ("overrides", "named"), [(["model.trust_remote_code=true"], None), ([], "config.yaml"), ([], "theirs.yaml")],
    ids=["its SET", "its config", "a config that its manifest names"],
)  # fmt: skip
def test_a_stopped_run_that_was_received_runs_code_by_the_users_word_alone(
    received, tmp_path, command, overrides, named
):
    folder, mark = received
    config = yaml.safe_load((tmp_path / "outputs" / "received.yaml").read_text())
    for name in ("config.yaml", "theirs.yaml"):
        trusts = {"trust_remote_code": True} if named == name else {}
        (folder / name).write_text(json.dumps(config | {"model": config["model"] | trusts}))
    path = str(folder / "theirs.yaml") if named == "theirs.yaml" else "/not/here.yaml"
    ended = json.loads((folder / "manifest.json").read_text())["ended"]
    change(folder / "manifest.json", status="stopped", overrides=overrides, config_path=path, started=ended)
    another = shutil.copytree(folder, folder.parent / "another")
    code, said = command("resume", "--run", str(folder))
    assert (code, "a run folder does not decide that" in said, mark.exists()) == (2, True, False), said
    # with a config of the user's own, its words count in place of the folder's, but not in place of its SET
    code, said = command("resume", "--run", str(folder), "--config", str(folder.parent / "received.yaml"))
    is_refused = "a run folder does not decide that" in said
    assert (code, is_refused, mark.exists()) == (2 if overrides else 0, bool(overrides), False), said
    if overrides:
        command("resume", "--run", str(another), "model.trust_remote_code=true")
        assert mark.exists()
