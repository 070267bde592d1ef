"""A disk that is full while a run saves: one message with the bytes, exit code 2; the last good checkpoint stays."""

import errno
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sft_play.runs.folder import disk_refusal_reason, free_disk_bytes
from sft_play.training.checkpoints import checkpoints
from sft_play.training.loop.loop import PlannedLoop
from tests.conftest import ROOT, clean_environment
from tests.models import uneven_run
from tests.test_sharded_checkpoints import SMALL
from tests.test_train import metrics, run_yaml, train, trained  # noqa: F401  (fixtures)

pytestmark = pytest.mark.build
FULL = os.strerror(errno.ENOSPC)
SAME = ["tuning.mode=lora", "train.max_steps=3", "train.save_steps=1", "train.save_total_limit=null"]
WORDS = re.compile(r"about ([\d,]+) bytes \([\d.]+ \w+\) are needed, and ([\d,]+) bytes \([\d.]+ \w+\) are free there")


class _Disk:
    """Counts what Python writes below `checkpoints/` or, later, anywhere in a run, and refuses from one number on."""

    counts, count, full_from, stays_full = False, 0, None, False

    def __init__(self) -> None:
        sys.addaudithook(self._hear)  # it cannot be taken away again, only be told to do nothing

    def begin(self, *, full_from: int, stays_full: bool) -> None:
        self.count, self.full_from, self.stays_full = 0, full_from, stays_full

    def end(self) -> None:
        self.counts, self.full_from = False, None

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.counts and self.full_from is not None and self._writes(event, arguments):
            self.write(str(arguments[0]))

    def write(self, path: str) -> None:
        self.count += 1
        if self.count == self.full_from or (self.stays_full and self.count > (self.full_from or 0)):
            raise OSError(errno.ENOSPC, FULL, path)

    @staticmethod
    def _writes(event: str, arguments: tuple[object, ...]) -> bool:
        if event == "os.mkdir":
            return "outputs" in str(arguments[0]) and not Path(str(arguments[0])).exists()
        if event == "os.rename":
            return "outputs" in str(arguments[0])
        if event != "open" or "outputs" not in str(arguments[0]):
            return False
        flags = arguments[2] if isinstance(arguments[2], int) else 0
        return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


@pytest.fixture(scope="module")
def disk() -> Iterator[_Disk]:
    made = _Disk()
    yield made
    made.end()


@pytest.fixture
def full(monkeypatch, disk):
    """Fills the disk at a number of the writes of the third checkpoint; `stays_full`: until the process ends."""
    real, save, fsync = PlannedLoop._save_checkpoint, torch.save, os.fsync

    def counted(self, *arguments, **options):
        disk.counts = self.state.global_step == 3 and disk.full_from is not None
        try:
            return real(self, *arguments, **options)
        finally:
            disk.counts = disk.counts and disk.stays_full

    def saved(value, path, *arguments, **options):
        if disk.counts:
            Path(path).write_bytes(b"half")
            disk.write(str(path))
        return save(value, path, *arguments, **options)

    def flushed(descriptor):
        if disk.counts:
            disk.write(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        return fsync(descriptor)

    monkeypatch.setattr(PlannedLoop, "_save_checkpoint", counted)
    monkeypatch.setattr(torch, "save", saved)
    monkeypatch.setattr(os, "fsync", flushed)
    yield disk
    disk.end()


def assert_kept(folder: Path, code: int, printed: str, *, steps: tuple[int, ...] = (1, 2)) -> None:
    assert (code, printed.count("error: ")) == (2, 1), printed
    assert not {text for text in ("Traceback", "a bug in sft_play") if text in printed}
    names = [f"checkpoint-{step}" for step in steps]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == names
    assert all(checkpoints.find_damage(path) is None for path in (folder / "checkpoints").iterdir())
    assert [line["step"] for line in metrics(folder) if "loss" in line][: len(steps)] == list(steps)


def test_each_write_of_a_checkpoint_in_turn(train, full):  # noqa: F811
    """A disk that is full for one write, then for all that follow, the manifest's included."""
    number, failed = 0, 0
    while True:
        number += 1
        for stays_full in (False, True):
            full.begin(full_from=number, stays_full=stays_full)
            name = f"one-{number}-{stays_full}"
            code, printed, folder = train(name, *SAME)
            full.end()
            if code == 0:
                assert not stays_full  # of those that were not refused there is no more
                break
            failed += 1
            assert f"the last checkpoint is that of step 2; that of step 3 cannot be written into {folder}" in printed
            assert FULL in printed
            assert WORDS.search(printed)
            assert_kept(folder, code, printed)
            manifest = json.loads((folder / "manifest.json").read_text())
            if not stays_full:
                assert manifest["status"] == "failed"
                assert "that of step 3 cannot be written" in manifest["error"]
            if number == 1:
                again, printed, _ = train(name, *SAME, verb="resume")
                assert (again, "Resuming bnb run from step 2" in printed) == (0, True), printed
            shutil.rmtree(folder)
        if code == 0:
            break
    assert failed > 50


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "optimizer.pt", "tokenizer.json"])
def test_libraries_whose_writes_the_system_refuses(train, monkeypatch, file):  # noqa: F811
    """By the largest file that the process may write: what C++ and Rust make of it is recognised."""
    _, _, whole = train("whole", *SAME)
    sizes = {path.name: path.stat().st_size for path in (whole / "checkpoints" / "checkpoint-3").iterdir()}
    limit = sizes[file] - 1
    real, before = PlannedLoop._save_checkpoint, resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(self, *arguments, **options):
        if self.state.global_step == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            return real(self, *arguments, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr(PlannedLoop, "_save_checkpoint", limited)
    code, printed, folder = train("one", *SAME)
    assert "that of step 3 cannot be written" in printed
    assert_kept(folder, code, printed)


def test_what_is_free_is_compared_before_anything_is_written(train, trained, monkeypatch):  # noqa: F811
    same = [*SAME, "tuning.mode=full"]
    folder = trained("whole", *same)
    size = sum(path.stat().st_size for path in (folder / "checkpoints" / "checkpoint-3").rglob("*"))
    real, free = PlannedLoop._save_checkpoint, [1 << 40]

    def counted(self, *arguments, **options):
        free[0] = 1000 if self.state.global_step == 3 else 1 << 40
        return real(self, *arguments, **options)

    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(PlannedLoop, "_save_checkpoint", counted)
    monkeypatch.setattr(PlannedLoop, "_write_checkpoint", lambda self, *_: written.append(self.state.global_step))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free[0]))
    written: list[int] = []
    code, printed, folder = train("one", *same)
    assert (code, written) == (2, [1, 2])
    needed, said = (int(number.replace(",", "")) for number in WORDS.search(printed).groups())
    assert said == 1000
    assert 0.5 * size < needed <= size  # never more than a checkpoint takes: one that fits is not refused
    assert json.loads((folder / "manifest.json").read_text())["status"] == "failed"
    free[0] = 1 << 40


def test_a_disk_that_says_nothing_is_not_full(tmp_path, monkeypatch):
    assert free_disk_bytes(tmp_path / "not" / "yet") > 0
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 0))
    assert free_disk_bytes(tmp_path) is None

    def refuse(_: Path) -> None:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(shutil, "disk_usage", refuse)
    assert free_disk_bytes(tmp_path) is None


def test_final_weights_that_find_no_room_leave_the_checkpoints(train, trained, monkeypatch):  # noqa: F811
    def half(model, path, **_):
        raise OSError(errno.ENOSPC, FULL, str(path))

    with monkeypatch.context() as patch:
        patch.setattr("sft_play.training.checkpoints.model_saving.write_weights", half)
        code, printed, folder = train("one", *SAME)
    assert "the trained weights cannot be written into" in printed
    assert WORDS.search(printed)
    assert_kept(folder, code, printed, steps=(1, 2, 3))
    assert not [path for path in folder.iterdir() if "adapter" in path.name]
    trained("one", *SAME, verb="resume")
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("word", ["metrics.jsonl", "summary.json"])
def test_other_files_of_a_run_too(train, monkeypatch, disk, word):  # noqa: F811
    real = _Disk._writes

    def only(event, arguments):
        return real(event, arguments) and word in str(arguments[0]) and event == "open"

    monkeypatch.setattr(_Disk, "_writes", staticmethod(only))
    disk.begin(full_from=1, stays_full=True)
    disk.counts = True
    code, printed, _ = train("one", *SAME)
    disk.end()
    assert (code, "Traceback" in printed) == (2, False), printed
    assert re.search(f"{re.escape(word)}[^ ]* cannot be written: {FULL}; [\\d,]+ bytes", printed), printed


def test_only_errors_of_writing_count():
    unread = RuntimeError("PytorchStreamReader failed reading file data/0: file read failed")
    for error in (None, FileNotFoundError(errno.ENOENT, "no"), unread, ValueError("unexpected pos 64 vs 0")):
        assert disk_refusal_reason(error) is None
    assert disk_refusal_reason(OSError(errno.EDQUOT, "quota")) == os.strerror(errno.EDQUOT)
    assert disk_refusal_reason(RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"))
    outer = ValueError("outer")
    outer.__cause__ = OSError(errno.ENOSPC, FULL)
    outer.__cause__.__context__ = outer  # a circle ends
    assert disk_refusal_reason(outer) == FULL


RANKS = """
import errno, os, pathlib


def fill():
    import torch
    from sft_play.training.checkpoints import sharded_checkpoints

    save, write = torch.save, sharded_checkpoints._PartWriter.write_data

    def saved(value, path, *arguments, **options):
        if "checkpoint-2" in str(path):
            pathlib.Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return save(value, path, *arguments, **options)

    def written(self, *arguments):
        if "checkpoint-2" in str(self.path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, *arguments)

    torch.save = saved
    sharded_checkpoints._PartWriter.write_data = written


if os.environ.get("RANK") == os.environ.get("FULL_FOR", "none"):
    fill()
"""


@pytest.mark.parametrize(("strategy", "rank"), [
    ("ddp", "0"),
    *(pytest.param(name, "1", marks=pytest.mark.slow) for name in ("fsdp", "zero2")),  # each rank writes its part
])  # fmt: skip
def test_ranks_end_with_one_message(tmp_path, tiny_llama, strategy, rank):
    uneven_run(tmp_path, tiny_llama)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(RANKS)
    mode = "full" if strategy == "fsdp" else "lora"
    words = ["--config", f"{tmp_path}/run.yaml", f"tuning.mode={mode}", "train.save_steps=1", "output.name=one"]
    path = f"{ROOT}{os.pathsep}{tmp_path}/site"
    for command, environ in (("train-distributed", {"FULL_FOR": rank}), ("resume", {"RUN": "one"})):
        kept = clean_environment(PYTHONPATH=path, STRATEGY=strategy, NPROC="2", **environ)
        started = [sys.executable, "-c", SMALL, command, *words]
        answer = subprocess.run(started, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=550)
        printed, folder = answer.stdout + answer.stderr, tmp_path / "outputs" / "one"
        if command == "resume":
            assert answer.returncode == 0, printed
            assert "from step 1" in printed
            break
        assert (answer.returncode, "Traceback" in printed) == (2, False), printed
        assert "the last checkpoint is that of step 1; that of step 2 cannot be written into" in printed
        assert [path.name for path in checkpoints.complete_checkpoints(folder / "checkpoints")] == ["checkpoint-1"]
        assert not (folder / "checkpoints" / checkpoints.STAGING_NAME).exists()
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["status"] == "failed"
        assert rank != "0" or "that of step 2 cannot be written" in manifest["error"]
