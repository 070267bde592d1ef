"""A disk that is full, or a place that cannot be written: one message, exit code 2, and what was there stays whole; a
clock that is set during a run."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from sft_play.errors import ConfigError, RunFolderError
from sft_play.finished.run import staged_folder, translate_write_errors
from sft_play.runs.folder import RunFolder
from sft_play.runs.lookup import LOCK_FILE, lock_run
from tests.conftest import clean_environment, write_run
from tests.finished_runs import finished_run

pytestmark = pytest.mark.build
FULL = os.strerror(errno.ENOSPC)


class _Full:
    """A file on a disk that takes five more characters."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> _Full:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def fileno(self) -> int:
        return int(self._file.fileno())

    def flush(self) -> None:
        self._file.flush()

    def write(self, text: str) -> None:
        self._file.write(text[:5])
        self._file.flush()
        raise OSError(errno.ENOSPC, FULL)


@pytest.fixture
def fill(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Fills the disk for files whose name has a word in it."""

    def full(word: str) -> None:
        fdopen, opened, copied = os.fdopen, Path.open, shutil.copyfile

        def by_descriptor(descriptor: int, *arguments: Any, **options: Any) -> Any:
            name = Path(f"/proc/self/fd/{descriptor}").readlink().name
            file = fdopen(descriptor, *arguments, **options)
            return _Full(file) if word in name else file

        def by_path(path: Path, *arguments: Any, **options: Any) -> Any:
            file = opened(path, *arguments, **options)
            return _Full(file) if word in path.name and file.writable() else file

        def copy(source: Any, target: Any, **options: Any) -> Any:
            if word in Path(target).name:
                raise OSError(errno.ENOSPC, FULL)
            return copied(source, target, **options)

        monkeypatch.setattr(os, "fdopen", by_descriptor)
        monkeypatch.setattr(Path, "open", by_path)
        monkeypatch.setattr(shutil, "copyfile", copy)

    return full


@pytest.fixture(scope="module")
def outputs(tmp_path_factory, tiny_llama) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    finished_run(folder / "first", tiny_llama)
    finished_run(folder / "second", tiny_llama, seed=1)
    return folder


def state(folder: Path) -> dict[str, bytes]:
    """Every file but the lock's note."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*")) if path.is_file() and path.name != LOCK_FILE
    }  # fmt: skip


COMMANDS = {
    "eval": (["eval", "--metrics", "none"], "eval.json"), "ship": (["ship", "--limit", "4"], "ship.json"),
    "report": (["report"], "report.html"), "compare": (["compare"], "compare.html"),
    "merge": (["merge", "--force"], "merged/README.md"),
    "export": (["export", "--format", "vllm", "--force"], "export/vllm/tokenizer_config.json"),
}  # fmt: skip
"""Words, and a file that the command writes, which meets the full disk."""


@pytest.mark.parametrize("kind", COMMANDS)
def test_what_was_there_stays_whole_where_the_disk_is_full(outputs, tmp_path, command, fill, monkeypatch, kind):
    words, written = COMMANDS[kind]
    folder = tmp_path / "outputs"
    shutil.copytree(outputs, folder)
    monkeypatch.setenv("SET", f"output.dir={folder}")
    run = folder / "first"
    named = ["--runs", f"{run} {folder / 'second'}"] if kind == "compare" else ["--run", str(run)]
    words = [*words, *named]
    code, said = command(*words)
    assert code == (2 if kind == "ship" else 0), said  # too few rows for a verdict to ship
    before = state(folder)
    assert written in {name.removeprefix("first/") for name in before}
    fill(Path(written).name)
    code, said = command(*words)
    monkeypatch.undo()
    assert (code, "Traceback" in said) == (2, False), said
    (error,) = [line for line in said.splitlines() if "error: " in line]
    assert error.endswith(f"cannot be written: {FULL}")
    assert state(folder) == before


def _raise() -> None:
    raise OSError(errno.ENOSPC, FULL)


def test_answers_that_were_written_stay_and_are_gone_on_with(outputs, tmp_path, command, monkeypatch):
    (tmp_path / "prompts.txt").write_text("one\ntwo\nthree\n")
    target = tmp_path / "answers.jsonl"
    words = ["infer", "--run", str(outputs / "first"), "--max_new_tokens", "2"]
    monkeypatch.setenv("INPUT", str(tmp_path / "prompts.txt"))
    monkeypatch.setenv("OUTPUT", str(target))
    assert command(*words)[0] == 0
    whole = target.read_text()
    target.write_text(whole.splitlines(keepends=True)[0])
    with monkeypatch.context() as patch:
        patch.setattr("sft_play.finished.respond.os.fsync", lambda _: _raise())
        code, said = command(*words)
    assert (code, f"answers.jsonl cannot be written: {FULL}" in said) == (2, True), said
    assert target.read_text().startswith(whole.splitlines(keepends=True)[0])
    assert command(*words)[0] == 0
    assert target.read_text() == whole


def test_weights_that_find_no_place_leave_the_earlier_merge(outputs, tmp_path, command, monkeypatch):
    run = tmp_path / "first"
    shutil.copytree(outputs / "first", run)
    assert command("merge", "--run", str(run))[0] == 0
    before = state(run)

    def no_place(tensors: Any, path: Path, **_: Any) -> None:
        path.write_bytes(b"half")
        raise SafetensorError(f"Error while serializing: I/O error: {FULL} (os error {errno.ENOSPC})")

    monkeypatch.setattr("sft_play.training.checkpoints.model_saving.save_file", no_place)
    code, said = command("merge", "--run", str(run), "--force")
    assert (code, f"merged cannot be written: {FULL}" in said, "Traceback" in said) == (2, True, False), said
    assert state(run) == before


def test_a_run_whose_lock_finds_no_place_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda *_: _raise())
    with pytest.raises(RunFolderError, match=f"cannot be written: {FULL}"):
        lock_run(RunFolder(tmp_path))
    monkeypatch.undo()
    with lock_run(RunFolder(tmp_path)):
        pass


def test_errors_of_reading_elsewhere_are_not_taken_for_those_of_writing(tmp_path):
    path = tmp_path / "eval.json"
    unread = (FileNotFoundError(errno.ENOENT, "no", "x"), SafetensorError("Error while deserializing header"))
    for error in (*unread, RunFolderError(errno.ENOSPC, FULL)):
        with pytest.raises(type(error)), translate_write_errors(path):
            raise error
    path.mkdir()
    refused = pytest.raises(ConfigError, match=r"eval\.json cannot be written: Is a directory")
    with refused, translate_write_errors(path):
        path.write_text("")
    (tmp_path / "file").write_text("")
    for target in ("file/below/merged", "file/merged"):
        with pytest.raises(ConfigError, match="merged cannot be written: "), staged_folder(tmp_path / target):
            raise AssertionError


def test_a_folder_that_cannot_take_its_place_leaves_the_one_that_has_it(tmp_path, monkeypatch):
    target, rename = tmp_path / "merged", Path.rename
    target.mkdir()
    (target / "config.json").write_text("old")

    def refused(path: Path, to: Path) -> Path:
        if to == target and (path / "new").exists():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", refused)
    denied = pytest.raises(ConfigError, match="merged cannot be written: Permission denied")
    with denied, staged_folder(target) as folder:
        (folder / "new").write_text("")
    assert state(tmp_path) == {"merged/config.json": b"old"}
    monkeypatch.undo()
    with staged_folder(target) as folder:
        (folder / "new").write_text("")
    assert state(tmp_path) == {"merged/new": b""}


# --- real disks, end to end -------------------------------------------------------------------------------------------
def saving_run(folder: Path, model: Path, rows: Path, *, outputs: Path) -> Path:
    """Four steps, with a checkpoint at each."""
    train = {"effective_batch_size": 2, "max_steps": 4, "save_steps": 1, "bf16": False}
    return write_run(folder, model, rows, train=train, output={"dir": f"{outputs}/outputs", "name": "one"})


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A file system of this size, or a skip where none may be mounted."""
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if subprocess.run(words, capture_output=True).returncode:
        pytest.skip("mounting a file system is not allowed here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


DISKS = [
    pytest.param("outputs", "64k", "are needed, and", marks=pytest.mark.slow),
    ("outputs", "700k", "there is no room for what the run writes"),  # one checkpoint has room, and three exist at once
    ("outputs", "1300k", "the last checkpoint"),  # the files beside weights and states are more than the rest
    pytest.param("cache", "4k", "SFT_PLAY_CACHE", marks=pytest.mark.slow), ("tmp", "4k", None),
]  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
@pytest.mark.parametrize(("what", "size", "said"), DISKS)
def test_a_run_on_a_disk_that_is_too_small_is_one_message_or_goes_on(tmp_path, tiny_llama, sums, what, size, said):
    """A real file system: outputs that take nothing, one checkpoint or two, a cache that takes no rows, a full /tmp."""
    with small_disk(tmp_path / "small", size) as disk:
        config = saving_run(tmp_path, tiny_llama, sums, outputs=disk if what == "outputs" else tmp_path)
        variables = {"cache": {"SFT_PLAY_CACHE": str(disk)}, "tmp": {"TMPDIR": str(disk)}}.get(what, {})
        if what != "outputs":
            (disk / "filled").write_bytes(b"x" * 4096)
        words = [sys.executable, "-m", "sft_play", "train", "--config", str(config)]
        environ = clean_environment(**variables)
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environ)
        assert "Traceback" not in done.stderr
        if said is None:
            assert done.returncode == 0, done.stderr
            return
        assert (done.returncode, done.stderr.count("] error: ")) == (2, 1), done.stdout
        assert said in done.stderr
        left = list(disk.glob("outputs/one/checkpoints/*"))
        assert all((path / "complete.json").is_file() for path in left)
        assert bool(left) is ("Run folder:" in done.stdout) is (size == "1300k")


# --- clocks -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("jump_s", [-86_400.0, 40 * 86_400.0])
def test_a_clock_set_during_a_run_changes_nothing_but_its_times(
    tmp_path, tiny_llama, sums, succeed, monkeypatch, jump_s
):
    config = saving_run(tmp_path, tiny_llama, sums, outputs=tmp_path)
    real, asked = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: real() + (jump_s if next(asked) > 20 else 0.0))
    words = ("--config", str(config), "train.max_hours=2")
    for verb, more in (("train", ["train.stop_after_steps=2"]), ("resume", [])):
        succeed(verb, *words, *more)
        assert next(asked) > 30  # the clock was set in the midst of it
    summary = json.loads((tmp_path / "outputs" / "one" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 4)
