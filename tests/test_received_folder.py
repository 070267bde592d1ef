"""A run folder that somebody else made: its word alone runs no code that comes with a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from sft_play.cli import main
from sft_play.variables import VARIABLES
from tests.finished_runs import finished_run
from tests.models import make_llama


@pytest.fixture
def received(tmp_path, monkeypatch) -> tuple[Path, Path]:
    """A run folder whose settings allow the code of its base, and the file that this code writes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTPUT", str(tmp_path / "answers.jsonl"))
    base = make_llama(tmp_path / "base")
    folder = finished_run(tmp_path / "outputs" / "received", base)
    settings = json.loads((folder / "resolved.json").read_text())
    settings["model"]["trust_remote_code"] = True
    (folder / "resolved.json").write_text(json.dumps(settings))
    mark = tmp_path / "code ran"
    described = json.loads((base / "config.json").read_text())
    classes = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
    (base / "config.json").write_text(json.dumps({**described, "auto_map": classes}))
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


@pytest.mark.parametrize(
    # without those that open no model by a run's settings; of `resume`, which trains a stopped run, see below
    "command",
    sorted(
        {*VARIABLES["RUN"].commands}
        - {"resume", "memory-check", "report", "tensorboard", "tb-open", "tb-stop", "tb-clean"}
    ),
)
def test_the_folders_word_is_refused_with_the_name_of_the_key(received, command, capsys):
    folder, mark = received
    assert main(given(command, folder)) == 2
    printed = "".join(capsys.readouterr())
    assert "SET=model.trust_remote_code=true" in printed
    assert "a run folder does not decide that" in printed
    assert not mark.exists()


KERNEL = f"theirs/flash-own@{'0' * 40}"


@pytest.fixture
def with_kernel(received) -> Path:
    """The folder with a kernel of the hub in its settings, which is code too, in place of the base's own."""
    folder, _ = received
    settings = json.loads((folder / "resolved.json").read_text())
    settings["model"] |= {"trust_remote_code": False, "attn_implementation": KERNEL}
    (folder / "resolved.json").write_text(json.dumps(settings))
    return folder


def test_a_kernel_of_the_hub_is_fetched_by_the_users_word_alone(with_kernel, capsys):
    assert main(given("infer", with_kernel)) == 2
    printed = "".join(capsys.readouterr())
    assert f"SET=model.attn_implementation={KERNEL}" in printed
    assert "a run folder does not decide that" in printed


@pytest.mark.parametrize(
    ("value", "said"), [(KERNEL, "kernel"), ("auto", "does not decide"), (KERNEL[:-1] + "1", "does not decide")]
)
def test_a_kernel_that_is_named_at_the_command_counts(with_kernel, capsys, value, said):
    # it is asked for next: this machine has no package kernels, or no GPU
    main([*given("infer", with_kernel), f"model.attn_implementation={value}"])
    printed = "".join(capsys.readouterr())
    assert said in printed
    assert ("does not decide" in printed) is (value != KERNEL)


def test_what_the_user_gives_at_the_command_counts(received, capsys):
    folder, mark = received
    words = given("infer", folder)
    assert main([*words, "model.trust_remote_code=false"]) == 2
    assert not mark.exists()
    assert main([*words, "model.trust_remote_code=true"]) == 0
    assert mark.exists()


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


WAYS = {
    "its SET": (["model.trust_remote_code=true"], None),
    "its config": ([], "config.yaml"),
    "a config that its manifest names": ([], "theirs.yaml"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_stopped_run_that_was_received_runs_code_by_the_users_word_alone(received, tmp_path, command, way):
    folder, mark = received
    overrides, named = WAYS[way]
    config = yaml.safe_load((tmp_path / "outputs" / "received.yaml").read_text())
    for name in ("config.yaml", "theirs.yaml"):
        trusts = {"trust_remote_code": True} if named == name else {}
        (folder / name).write_text(json.dumps(config | {"model": config["model"] | trusts}))
    manifest = json.loads((folder / "manifest.json").read_text())
    path = str(folder / "theirs.yaml") if named == "theirs.yaml" else "/not/here.yaml"
    manifest |= {"status": "stopped", "overrides": overrides, "config_path": path, "started": manifest["ended"]}
    (folder / "manifest.json").write_text(json.dumps(manifest))
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
