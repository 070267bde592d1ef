"""Pickles of a run folder run no code, whoever made them: consolidate and resume read, or refuse by name."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from sft_play.errors import RunFolderError
from sft_play.training.checkpoints import checkpoints
from sft_play.training.checkpoints.last_checkpoint import forbid_pickled_code
from sft_play.training.checkpoints.sharded_checkpoints import _ContentsUnpickler
from tests.models import uneven_run
from tests.test_distributed import start, succeed
from tests.test_train import run_yaml, train, weights  # noqa: F401  (fixtures)

pytestmark = pytest.mark.build


class Bad:
    """Makes a file when it is unpickled."""

    def __init__(self, made: Path) -> None:
        self._made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"open({str(self._made)!r}, 'w').close()",)


def recommit(checkpoint: Path) -> None:
    """Make the record of a checkpoint true of its present files, as whoever crafts a folder can."""
    checkpoints.record_digests(checkpoint)
    assert checkpoints.find_damage(checkpoint) is None


def craft(path: Path, made: Path) -> None:
    """Put code beside what a file of torch.save holds."""
    content = torch.load(path, weights_only=False)
    torch.save({**content, "more": Bad(made)}, path)


@pytest.mark.parametrize("variable", [None, "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"])
def test_libraries_that_ask_for_everything_get_tensors_only(tmp_path, monkeypatch, variable):
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    torch.save({"tensor": torch.ones(2, dtype=torch.bfloat16), "number": 3}, tmp_path / "fine.pt")
    torch.save({"more": Bad(tmp_path / "made")}, tmp_path / "bad.pt")
    if variable != "TORCH_FORCE_WEIGHTS_ONLY_LOAD":
        torch.load(tmp_path / "bad.pt", weights_only=False)
        (tmp_path / "made").unlink()  # the code of these tests would run
    with forbid_pickled_code(tmp_path):
        assert torch.load(tmp_path / "fine.pt", weights_only=False)["number"] == 3
    with pytest.raises(RunFolderError, match=r"holds exec, which could run code$"), forbid_pickled_code(tmp_path):
        torch.load(tmp_path / "bad.pt", weights_only=False)
    monkeypatch.setenv("TRUST", "1")  # is about DeepSpeed's files
    with pytest.raises(RunFolderError), forbid_pickled_code(tmp_path):
        torch.load(tmp_path / "bad.pt", weights_only=False)
    assert not (tmp_path / "made").exists()
    (tmp_path / "latest").write_text("global_step1")
    monkeypatch.setenv("TRUST", "0")
    with pytest.raises(RunFolderError, match="TRUST=1"), forbid_pickled_code(tmp_path):
        torch.load(tmp_path / "bad.pt", weights_only=False)
    assert not (tmp_path / "made").exists()
    assert os.environ.get(variable or "none") == (None if variable is None else "1")


def test_a_resume_runs_nothing(train, tmp_path):  # noqa: F811
    same = ["tuning.mode=lora", "train.max_steps=3", "train.save_steps=1"]
    _, _, folder = train("one", *same, "train.stop_after_steps=1")
    checkpoint = folder / "checkpoints" / "checkpoint-1"
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        kept = (checkpoint / name).read_bytes()
        craft(checkpoint / name, tmp_path / "made")
        recommit(checkpoint)
        code, printed, _ = train("one", *same, verb="resume")
        assert not (tmp_path / "made").exists(), name
        assert (code, "holds exec, which could run code" in printed, "Traceback" in printed) == (2, True, False), (
            printed
        )
        (checkpoint / name).write_bytes(kept)


@pytest.fixture
def in_fsdp_parts(train, tmp_path):  # noqa: F811
    """A run whose checkpoint is in parts, as under FSDP; a function that writes its weights."""
    same = ["tuning.mode=full", "train.max_steps=2", "train.save_steps=1"]
    _, _, folder = train("one", *same)
    checkpoint = folder / "checkpoints" / "checkpoint-2"
    parts, whole = checkpoint / "shards", load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()

    def write(**other: Any) -> Path:
        shutil.rmtree(parts, ignore_errors=True)
        state = {"model": {**whole, **{name.replace("__", "."): value for name, value in other.items()}}}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(str(parts)), no_dist=True)
        recommit(checkpoint)
        return parts

    return folder, write


def test_parts_of_fsdp_run_nothing(in_fsdp_parts, command, tmp_path):
    folder, write = in_fsdp_parts
    made = tmp_path / "made"
    write(more=Bad(made))  # an object beside the tensors
    code, printed = command("consolidate", "--run", str(folder))
    assert (code, made.exists()) == (0, False), printed
    whole = load_file(folder / "consolidated-2" / "model.safetensors")
    assert all(torch.equal(tensor, whole[name]) for name, tensor in weights(folder).items())
    shutil.rmtree(folder / "consolidated-2")
    write(model__norm__weight=Bad(made))
    code, printed = command("consolidate", "--run", str(folder))
    assert (code, made.exists()) == (2, False), printed
    assert "lacks 1 trained tensors, such as model.norm.weight" in printed
    parts = write()
    (parts / ".metadata").write_bytes(pickle.dumps(Bad(made)))
    recommit(parts.parent)
    code, printed = command("consolidate", "--run", str(folder))
    assert (code, made.exists()) == (2, False), printed
    assert "builtins.exec, which no table of contents has" in printed


@pytest.mark.parametrize("name", [
    "pathlib.Path", "builtins.eval", "torch.distributed.checkpoint.filesystem.FileSystem",
    "torch.distributed.checkpoint.metadata.os.system",
])  # fmt: skip
def test_a_table_of_contents_names_its_own_classes_only(name):
    module, _, one = name.rpartition(".")
    with pytest.raises(pickle.UnpicklingError, match="which no table of contents has"):
        _ContentsUnpickler(io.BytesIO()).find_class(module, one)


@pytest.fixture(scope="module", params=["zero2", "zero3"])
def zero(request, tmp_path_factory, tiny_llama) -> Path:
    """The folder of a run under ZeRO that was stopped after two of five steps."""
    world = tmp_path_factory.mktemp("pickles")
    uneven_run(world, tiny_llama)
    words = ["tuning.mode=full", "output.name=one", "train.stop_after_steps=2"]
    succeed(world, "train-distributed", *words, STRATEGY=request.param, NPROC="2")
    return world / "outputs" / "one"


def resumed(run: Path, python: str = "") -> tuple[int, str]:
    world, layout = run.parents[1], json.loads((run / "manifest.json").read_text())["layout"]
    words = ("resume", "--config", f"{world}/run.yaml", "tuning.mode=full")
    answer = start(world, *words, python=python, RUN="one", NPROC="2", STRATEGY=layout)
    return answer.returncode, answer.stdout + answer.stderr


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed here")
@pytest.mark.slow
def test_zero_runs_nothing(zero, tmp_path, command, monkeypatch):
    made, checkpoint = tmp_path / "made", zero / "checkpoints" / "checkpoint-2"
    files = sorted(checkpoint.rglob("*_states.pt"))
    assert len(files) >= 3
    for file in files:
        kept = file.read_bytes()
        craft(file, made)
        recommit(checkpoint)
        if "rank_0" in file.name or "mp_rank_00_model" in file.name:
            code, printed = command("consolidate", "--run", str(zero), "--out", str(tmp_path / "out"))
            assert (code, made.exists()) == (2, False), printed
            assert "holds exec, which could run code: if you trust whoever wrote it, TRUST=1 reads it" in printed
        if "optim" in file.name:
            code, printed = resumed(zero, python=sys.executable)  # ranks that fail: not by forks
            assert (code, made.exists()) == (2, False), printed
            assert ("holds exec, which could run code" in printed, "Traceback" in printed) == (True, False)
        file.write_bytes(kept)
    craft(files[-1], made)
    recommit(checkpoint)
    monkeypatch.setenv("TRUST", "1")
    code, printed = command("consolidate", "--run", str(zero), "--out", str(tmp_path / "trusted"))
    assert (code, made.exists()) == (0, True), printed
    assert "TRUST=1: what is stored in" in printed
    made.unlink()
    files[-1].write_bytes(kept)
    recommit(checkpoint)
    monkeypatch.delenv("TRUST")
    code, printed = command("consolidate", "--run", str(zero), "--out", str(tmp_path / "out"))
    assert code == 0, printed
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "trusted"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    code, printed = resumed(zero)
    assert code == 0, printed
