"""A finished run trained again from its folder: bit-equal, or the first tensor that differs is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sft_play.errors import RunFolderError
from sft_play.finished.reproduce import compare_weights, describe_code
from sft_play.runs.folder import code_state
from sft_play.runs.lookup import unused_path
from tests import warm
from tests.conftest import ROOT, chat, write_rows

pytestmark = pytest.mark.build


def sft_play(folder: Path, *words: str, code: int = 0, python: str | None = None) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_CONFIG": "none"}
    done = subprocess.run([python or warm.python(), "-m", "sft_play", *words], cwd=folder, capture_output=True,
                          text=True, timeout=500, env=environment)  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if "--json" in words else done.stdout + done.stderr


def reproduced(folder: Path, run: str, *words: str, code: int = 0) -> dict[str, Any]:
    answer = json.loads(sft_play(folder, "reproduce", "--run", run, "--json", *words, code=code))
    assert answer["ok"] == (code == 0)
    return answer


def refused(folder: Path, run: str = "first") -> str:
    return sft_play(folder, "reproduce", "--run", run, code=2)


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_llama):
    folder = tmp_path_factory.mktemp("world")
    write_rows(folder / "rows.jsonl", (chat(f"what is {n}?", f"it is {n}.") for n in range(40)))
    (folder / "run.yaml").write_text(
        f"model: {{name: {tiny_llama}, max_seq_len: 64}}\ntuning: {{mode: lora, lora: {{r: 4, dropout: 0.1}}}}\n"
        "data: {train_path: rows.jsonl, val_path: null, test_path: null, val_fraction: 0.2}\n"
        "train: {effective_batch_size: 8, max_steps: 3, learning_rate: 1e-2, report_to: []}\n"
    )
    sft_play(folder, "train", "--config", "run.yaml", "output.name=first")
    return folder


@pytest.fixture
def copy(world, tmp_path):
    """The same in a folder of its own, to be spoiled; its manifest names the folder."""
    folder = shutil.copytree(world, tmp_path / "copy", ignore=shutil.ignore_patterns("*-reproduced*"))
    change(folder / "outputs" / "first" / "manifest.json", cwd=str(folder))
    return folder


def change(file: Path, **changes: Any) -> None:
    """Change values of a JSON file; `train__seed=1` is the key seed of the section train."""
    data = json.loads(file.read_text())
    for key, value in changes.items():
        *outer, name = key.split("__")
        section = data
        for part in outer:
            section = section[part]
        section[name] = value
    file.write_text(json.dumps(data))


def test_a_run_trained_again_is_equal_bit_for_bit_and_from_any_folder(world, tmp_path):
    first = world / "outputs" / "first"
    answer = reproduced(tmp_path, str(first))
    again = Path(answer["path"])
    assert again == world / "outputs" / "first-reproduced"
    assert (answer["first_differing"], answer["steps"]) == (None, 3)
    one, other = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (first, again))
    assert answer["tensors"] == len(one) > 10
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(bool(tensor.any()) for name, tensor in one.items() if "lora_B" in name)
    assert unused_path(first.with_name("first-reproduced")).name == "first-reproduced-2"  # the name is taken by now


def test_what_training_read_has_to_be_there_unchanged(copy, tiny_llama):
    first, rows = copy / "outputs" / "first", copy / "rows.jsonl"
    text = rows.read_text()
    rows.write_text(text.replace("it is 3.", "it is 4."))
    assert "data train: the content of rows.jsonl has changed since the run" in refused(copy)
    rows.write_text(text)
    base = shutil.copytree(tiny_llama, copy / "base")
    change(first / "resolved.json", model__name=str(base))
    tensors = load_file(base / "model.safetensors")
    save_file({name: tensor * 2 for name, tensor in tensors.items()}, base / "model.safetensors", {"format": "pt"})
    assert "are not those that" in refused(copy)
    shutil.copyfile(tiny_llama / "model.safetensors", base / "model.safetensors")
    (base / "chat_template.jinja").write_text((base / "chat_template.jinja").read_text() + " ")
    assert f"tokenizer: that of {base}, or its template, has changed" in refused(copy)
    assert list((copy / "outputs").glob("*reproduced*")) == []


def test_another_seed_differs_and_what_the_plan_had_decided_is_kept(copy):
    first = copy / "outputs" / "first"
    change(first / "manifest.json", batch__micro_batch=2, batch__grad_accum=4)
    change(first / "resolved.json", train__seed=7)
    answer = reproduced(copy, "first", code=2)
    again = json.loads((copy / answer["path"] / "manifest.json").read_text())
    assert (again["batch"]["micro_batch"], again["batch"]["grad_accum"], again["cpu"]["threads"]) == (2, 4, 1)
    assert 0 < answer["tensors_differing"] <= answer["tensors"]
    assert answer["first_differing"]["max_diff"] > 0


@pytest.mark.slow  # what is repeated of a plain run is above, stages and adapters have tests of their own
def test_a_run_with_stages_that_continues_an_adapter_is_repeated(copy):
    words = ["--config", "run.yaml", "model.adapter=first", "tuning.lora.dropout=0.0", "output.name=second",
             "curriculum=[{name: a, max_steps: 1}, {name: b, max_steps: 2, learning_rate: 1e-3}]"]  # fmt: skip
    sft_play(copy, "train", *words)
    assert reproduced(copy, "second")["steps"] == 3
    file = copy / "outputs" / "first" / "adapter" / "adapter_model.safetensors"
    save_file({name: tensor * 1.5 for name, tensor in load_file(file).items()}, file)
    assert "which it began from, has changed since" in refused(copy, "second")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
def test_a_run_over_ranks_is_repeated_over_as_many(copy, strategy):
    sft_play(copy, "train-distributed", "--config", "run.yaml", "--nproc", "2", "--strategy", strategy,
             "output.name=two", "train.max_steps=2")  # fmt: skip
    answer = reproduced(copy, "two")
    again = json.loads((copy / answer["path"] / "manifest.json").read_text())
    old = json.loads((copy / "outputs" / "two" / "manifest.json").read_text())
    assert (again["layout"], again["processes"], again["cpu"]) == (strategy, 2, old["cpu"])


@pytest.fixture
def checkout(tmp_path):
    """A repository with two commits of a package, and the manifests of a run of each."""
    root = tmp_path / "checkout"
    package = root / "sft_play"
    package.mkdir(parents=True)

    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *words], cwd=root, check=True, capture_output=True)

    git("init", "--quiet")
    manifests = []
    for number in (1, 2):
        (package / "__init__.py").write_text(f"number = {number}\n")
        git("add", "."), git("commit", "--quiet", "-m", str(number))
        manifests.append({"code": code_state(package)})
    return package, manifests


def test_other_code_than_the_runs_is_refused(checkout):
    package, (old, new) = checkout
    assert "unchanged since the run" in describe_code(new, package=package)
    (package / "__init__.py").write_text("number = 3\n")
    dirty = {"code": code_state(package)}
    assert ", with changes)" in describe_code(dirty, package=package)  # changed without a commit, and still the same
    (package / "__init__.py").write_text("number = 4\n")
    commit = old["code"]["git"]["commit"][:12]
    for said, manifest in (
        (rf"\(commit {commit}\): git worktree add \.\./then {commit} has it", old),
        (r"with changes\): git worktree", dirty), (r"\(no commit\)$", {"code": {"sha256": "0", "git": None}}),
    ):  # fmt: skip
        with pytest.raises(RunFolderError, match=said):
            describe_code(manifest, package=package)


def test_the_digest_of_the_code_is_of_names_and_contents(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    first = code_state(tmp_path)
    assert first["git"] is None  # no repository tracks it
    (tmp_path / "a.txt").write_text("no code")
    assert code_state(tmp_path) == first
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert code_state(tmp_path) != first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_tensor_that_differs_is_the_first_of_the_file(tmp_path, dtype):
    generator = torch.Generator().manual_seed(0)
    tensors = {f"t{number}": torch.randn(4, 3, generator=generator).to(dtype) for number in range(5)}
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
    assert compare_weights(one, other) == (5, {})
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    changed["t3"][1, 2] += 0.5
    changed["t2"][0, 0] += 0.25
    save_file(changed, other / "model.safetensors")
    differing = compare_weights(one, other)[1]
    assert list(differing) == ["t2", "t3"]
    assert differing["t2"] == float((changed["t2"].double() - tensors["t2"].double()).abs().max()) > 0
    changed = {**tensors, "t4": tensors["t4"][:2].contiguous(), "t9": tensors["t0"].clone()}
    del changed["t1"]
    save_file(changed, other / "model.safetensors")
    assert compare_weights(one, other) == (6, dict.fromkeys(["t1", "t4", "t9"], float("inf")))
    # zeros of two signs are two values, and equal NaNs one
    for folder, zero in ((one, 0.0), (other, -0.0)):
        save_file({"nan": torch.tensor([float("nan")]), "zero": torch.tensor([zero])}, folder / "model.safetensors")
    assert compare_weights(one, other) == (2, {"zero": 0.0})
