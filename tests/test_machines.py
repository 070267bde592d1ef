"""Machines that misbehave, end to end: full disks of every kind, a clock that is set during a run."""

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import chat, clean_environment

pytestmark = pytest.mark.build


def write_run(folder: Path, model: Path, *, outputs: Path | None = None) -> Path:
    rows = "".join(json.dumps(chat(f"what is {n}?", f"{n}.")) + "\n" for n in range(16))
    (folder / "rows.jsonl").write_text(rows)
    path = folder / "run.yaml"
    path.write_text(
        f"model: {{name: {model}, max_seq_len: 64}}\ndata: {{train_path: {folder}/rows.jsonl}}\n"
        "tuning: {mode: lora}\n"
        "train: {effective_batch_size: 2, max_steps: 4, save_steps: 1, report_to: [], bf16: false}\n"
        f"output: {{dir: {outputs or folder / 'outputs'}, name: one}}\n"
    )
    return path


# --- full disks -------------------------------------------------------------------------------------------------------
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
    pytest.param("cache", "4k", "SFT_PLAY_CACHE", marks=pytest.mark.slow),
    ("tmp", "4k", None),
]


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
@pytest.mark.parametrize(("what", "size", "said"), DISKS)
def test_a_run_on_a_disk_that_is_too_small_is_one_message_or_goes_on(tmp_path, tiny_llama, what, size, said):
    """A real file system: outputs that take nothing, one checkpoint or two, a cache that takes no rows, a full /tmp."""
    with small_disk(tmp_path / "small", size) as disk:
        config = write_run(tmp_path, tiny_llama, outputs=disk / "outputs" if what == "outputs" else None)
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
def test_a_clock_that_is_set_during_a_run_changes_nothing_but_its_times(
    tmp_path, tiny_llama, command, monkeypatch, jump_s
):
    config = write_run(tmp_path, tiny_llama)
    real, asked = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: real() + (jump_s if next(asked) > 20 else 0.0))
    words = ("--config", str(config), "train.max_hours=2")
    for verb, more in (("train", ["train.stop_after_steps=2"]), ("resume", [])):
        code, said = command(verb, *words, *more)
        assert code == 0, said
        assert next(asked) > 30  # the clock was set in the midst of it
    summary = json.loads((tmp_path / "outputs" / "one" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 4)
