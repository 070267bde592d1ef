"""make memory-check: which processes train, what they hold of GPUs and RAM, what was predicted, who eats the margin."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sft_play.commands.diagnosing import REFRESH_S
from sft_play.diagnose import machine_pages
from sft_play.diagnose.machine_pages import RankProcess, format_memory_snapshot, lock_holder_pid, read_memory_snapshot
from sft_play.errors import RunFolderError
from sft_play.machine.gpu import Gpu, GpuProcess, GpuSnapshot, GpuStatus
from sft_play.machine.hardware import Hardware
from sft_play.runs.folder import MANIFEST_FORMAT, RunFolder
from sft_play.runs.lookup import LAUNCHER, LOCK_FILE, WRITER, lock_run
from tests.conftest import clean_environment

GIB = 2**30
CPU = Hardware((), "CPU", 8, 64 * GIB, 60 * GIB)
NOWHERE = 2**22 + 1
"""Above every pid that Linux gives out."""


def plan_json(*, on_gpu: bool) -> dict[str, Any]:
    sizes = {"allocated": 55 * GIB, "reserved": 59 * GIB, "margin": 5 * GIB, "outside_allocator": GIB, "host": 0}
    terms = {"weights": 40 * GIB, "loss_head": 15 * GIB, "adapters": 0}
    return {
        "layout": "ddp" if on_gpu else "single", "ranks": 2, "micro_batch": 4, "grad_accum": 2,
        "peak_bytes": {**sizes, "required": 65 * GIB, "terms": terms},
        "hardware": {"gpus": [{"index": 0}, {"index": 1}] if on_gpu else []},
    }  # fmt: skip


def run_folder(output: Path, name: str, *, started: str = "2026-11-21T10:00:00", on_gpu: bool = True) -> RunFolder:
    folder = RunFolder(output / name)
    folder.path.mkdir(parents=True)
    manifest = {"format": MANIFEST_FORMAT, "status": "running", "started": started}
    folder.manifest_path.write_text(json.dumps(manifest))
    (folder.path / "plan.json").write_text(json.dumps(plan_json(on_gpu=on_gpu)))
    return folder


def rank(number: int, pid: int, **fields: Any) -> RankProcess:
    return RankProcess(**{"pid": pid, "rank": number, "rss_bytes": 3 * GIB, "world_size": "2", **fields})


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A function that sets what there is: GPUs, the run's processes; it returns the folder of the runs."""

    def install(*gpus: GpuStatus, ranks: tuple[RankProcess, ...] = (), hardware: Hardware | None = None) -> Path:
        found = hardware or Hardware(
            tuple(Gpu(gpu.index, "NVIDIA H100", 80 * GIB, 79 * GIB, (9, 0)) for gpu in gpus),
            "CPU", 8, 64 * GIB, 60 * GIB,
        )  # fmt: skip
        monkeypatch.setattr(machine_pages, "detect_hardware", lambda environment: found)
        monkeypatch.setattr(machine_pages, "read_all_gpus", lambda **_: GpuSnapshot(gpus, "NVML"))
        monkeypatch.setattr(machine_pages, "find_ranks", lambda folder, holders: ranks)
        monkeypatch.setattr(machine_pages, "lock_holder_pid", lambda folder: OTHER if ranks else None)
        return tmp_path

    return install


def gpu(index: int, *held: GpuProcess, used: int, listed: bool = True) -> GpuStatus:
    sizes = {"total_bytes": 80 * GIB, "used_bytes": used, "free_bytes": 80 * GIB - used}
    return GpuStatus(index, "NVIDIA H100", "NVIDIA", **sizes, processes=held if listed else None)


OTHER = os.getpid()
"""A process that lives, and is no rank."""


def test_each_gpu_shows_the_runs_and_what_is_used_beside_it(machine, tmp_path):
    folder = run_folder(tmp_path, "mine")
    ranks = (rank(0, 11, rss_bytes=4 * GIB), rank(1, 21))
    output = machine(
        gpu(0, GpuProcess(11, "python", 31 * GIB), used=32 * GIB),
        gpu(1, GpuProcess(21, "python", 30 * GIB), GpuProcess(OTHER, "jupyter", 4 * GIB), used=35 * GIB),
        ranks=ranks,
    )
    check = read_memory_snapshot(output, {})
    one, two = check.gpus
    assert (one.ranks, one.run_bytes, one.others_bytes) == ((0,), 31 * GIB, GIB)
    assert (two.ranks, two.run_bytes, two.others_bytes) == ((1,), 30 * GIB, 5 * GIB)
    assert not check.warnings  # 80 - 5 - 60 leaves 15 of a margin of 5
    text = format_memory_snapshot(check)
    assert text[0] == f"Run {folder.path}: 2 of 2 ranks on this machine, pid 11, 21"
    assert ["1", "1", "80.0", "30.00", "60.00", "5.00", "45.00"] in [line.split() for line in text]
    for part in ("55.0 GiB allocated (weights 40.0 GiB, loss head 15.0 GiB)", "= 65.0 GiB needed"):
        assert part in "\n".join(text)
    assert json.loads(json.dumps(dataclasses.asdict(check)))["gpus"][1]["others"][0]["pid"] == OTHER


def test_another_process_that_eats_the_margin_is_named(machine, tmp_path):
    run_folder(tmp_path, "mine")
    output = machine(
        gpu(0, GpuProcess(11, "python", 50 * GIB), GpuProcess(OTHER, "jupy\x1bter", 17 * GIB), used=67 * GIB),
        gpu(1, GpuProcess(21, "python", 30 * GIB), GpuProcess(OTHER, "jupyter", 22 * GIB), used=52 * GIB),
        gpu(2, GpuProcess(OTHER, "jupyter", 79 * GIB), used=79 * GIB), gpu(3, used=9 * GIB, listed=False),
        gpu(4, used=GIB), ranks=(rank(0, 11), rank(1, 21)),
        hardware=dataclasses.replace(CPU, gpus=tuple(Gpu(n, "NVIDIA H100", GIB, GIB, (9, 0)) for n in (0, 2, 3))),
    )  # fmt: skip
    check = read_memory_snapshot(output, {})
    assert [use.index for use in check.gpus] == [0, 1, 2, 3]  # what is visible here, or of the run
    assert (check.gpus[2].run_bytes, check.gpus[3].run_bytes) == (0, None)
    assert len(check.warnings) == 2  # none of the GPU that the run does not use
    # 80 - 17 - 60 = 3 of 5 are left on the first; 80 - 22 - 60 = 2 too few on the second
    assert "3.00 of the plan's margin of 5.00 GiB" in check.warnings[0]
    assert f"pid {OTHER} (jupy\\x1bter) 17.00 GiB" in check.warnings[0]
    assert "0.00 of the plan's margin" in check.warnings[1]
    assert sum(line.startswith("warning: GPU") for line in format_memory_snapshot(check)) == 2


def test_a_container_that_sees_other_pids_says_so_and_warns_of_nothing(machine, tmp_path):
    run_folder(tmp_path, "mine")
    foreign, used = GpuProcess(NOWHERE, None, 70 * GIB), 71 * GIB
    # pids of the host on the first, none on the second, and of the third no list
    gpus = (gpu(0, foreign, used=used), gpu(1, used=used), gpu(2, used=used, listed=False))
    check = read_memory_snapshot(machine(*gpus, ranks=(rank(0, 11), rank(1, 21))), {})
    for use in check.gpus:
        assert (use.run_bytes, use.others_bytes, use.used_bytes) == (None, None, used)
    assert not check.warnings
    assert any("the driver names no process of this run there" in line for line in format_memory_snapshot(check))


def test_without_a_gpu_the_ranks_rss_is_shown_beside_the_prediction(machine, tmp_path):
    run_folder(tmp_path, "mine", on_gpu=False)
    ranks = (rank(0, 11, rss_bytes=4 * GIB), rank(1, 21, rss_bytes=2 * GIB))
    output = machine(ranks=ranks, hardware=CPU)
    check = read_memory_snapshot(output, {})
    assert [(use.rank, use.rss_bytes) for use in check.ranks] == [(0, 4 * GIB), (1, 2 * GIB)]
    text = format_memory_snapshot(check)
    assert [line.split() for line in text if line.startswith("   1 ")] == [["1", "21", "2.00", "60.00"]]


def test_a_manifest_that_says_running_is_no_proof(machine, tmp_path):
    output = machine(hardware=CPU)
    run_folder(output, "killed")
    assert not read_memory_snapshot(output, {}).running
    found = read_memory_snapshot(output, {}, name="killed")
    assert not found.running
    assert "its manifest says running, and nothing writes it: it was ended" in found.said[0]
    text = format_memory_snapshot(read_memory_snapshot(output, {}, name=str(output / "killed")))
    assert "40.0 GiB" in "\n".join(text)
    assert text[-1] == "RAM: 64.0 GiB, 60.0 free"


def test_a_run_that_is_not_there_is_refused(machine, tmp_path):
    output = machine(hardware=CPU)
    run_folder(output, "other")
    with pytest.raises(RunFolderError, match=r"there is no run missing in .*; the runs there: other"):
        read_memory_snapshot(output, {}, name="missing")
    (output / "plain").mkdir()
    with pytest.raises(RunFolderError, match="has no manifest"):
        read_memory_snapshot(output, {}, name="plain")
    (output / "other" / "plan.json").write_text('{"peak_bytes": []}')
    check = read_memory_snapshot(output, {}, name="other")
    assert check.prediction is None
    assert any("its plan.json cannot be read" in line for line in format_memory_snapshot(check))


PROGRAM = """
import json, os, sys, time
from pathlib import Path
from sft_play.runs.folder import RunFolder
from sft_play.runs.lookup import lock_run
folder, forks = sys.argv[1:3]
if (os.environ.get("RANK") or "0") == "0":
    file = open(os.path.join(folder, "train.log"), "a")
    held = lock_run(RunFolder(Path(folder)), role=json.loads(os.environ.get("PART", "null")))
for _ in range(int(forks)):
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
sys.stdout.write("ready\\n")
sys.stdout.flush()
time.sleep(60)
"""


@pytest.fixture
def training(tmp_path) -> Iterator[Any]:
    """A function that starts a process which holds a run, as a training does."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    with contextlib.ExitStack() as stack:

        def begin(folder: RunFolder, *, forks: int = 0, **variables: str) -> subprocess.Popen[str]:
            words = [sys.executable, str(script), str(folder.path), str(forks)]
            environ = clean_environment(**variables)
            started = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True)
            stack.callback(end, started)
            assert started.stdout is not None
            assert started.stdout.readline() == "ready\n"
            return started

        yield begin


def end(started: subprocess.Popen[str]) -> None:
    """End a process that a test started, with what it started: they are a session of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)
    started.wait()
    if started.stdout is not None:
        started.stdout.close()


def test_a_single_process_is_found_by_the_log_that_it_has_open(training, tmp_path):
    folder = run_folder(tmp_path / "out", "alone")
    process = training(folder, forks=2, RANK="")
    found = read_memory_snapshot(tmp_path / "out", {})
    (one,) = found.ranks
    assert (found.running, one.pid, one.rank, one.rss_bytes > 2**20) == (True, process.pid, 0, True)
    assert found.said[0] == f"Run {folder.path}: 1 of 1 ranks on this machine, pid {process.pid}"
    end(process)
    assert not read_memory_snapshot(tmp_path / "out", {}, name="alone").running


@pytest.mark.parametrize("names_folder", [True, False], ids=["ours", "torchrun by hand"])
def test_ranks_of_one_run_are_found_and_their_workers_are_no_ranks(training, tmp_path, names_folder):
    folder = run_folder(tmp_path / "out", "spread")
    common = {"SFT_PLAY_RUN": str(folder.path)} if names_folder else {}
    started = [training(folder, forks=1, RANK=str(n), LOCAL_RANK=str(n), WORLD_SIZE="2", **common) for n in range(2)]
    ranks = read_memory_snapshot(tmp_path / "out", {}).ranks
    assert [(one.rank, one.pid) for one in ranks] == [(0, started[0].pid), (1, started[1].pid)]


def test_the_lock_is_asked_about_and_never_taken(training, tmp_path):
    folder = run_folder(tmp_path / "out", "locked")
    (folder.path / LOCK_FILE).touch()
    assert lock_holder_pid(folder) is None
    process = training(folder)
    assert lock_holder_pid(folder) == process.pid
    with pytest.raises(RunFolderError, match="is being written by another process"):
        lock_run(folder)
    end(process)
    assert lock_holder_pid(folder) is None
    for part in (LAUNCHER, WRITER):
        assert training(folder, PART=str(part)).pid == lock_holder_pid(folder)


def test_a_writer_that_is_not_of_this_machine_is_said(machine, monkeypatch, tmp_path):
    folder = run_folder(tmp_path, "far")
    output = machine(hardware=CPU)
    monkeypatch.setattr(machine_pages, "lock_holder_pid", lambda folder: 0)
    check = read_memory_snapshot(output, {})
    assert (check.running, check.prediction is None) == (True, False)
    assert f"Run {folder.path} is being written, by a process that cannot be seen from here" in check.said[0]


def test_the_newest_of_several_runs_is_shown_and_the_others_named(training, tmp_path):
    older = run_folder(tmp_path / "out", "b", started="2026-11-20T10:00:00")
    newer = run_folder(tmp_path / "out", "a", started="2026-11-21T10:00:00")
    training(newer)
    training(older)
    found = read_memory_snapshot(tmp_path / "out", {})
    assert found.folder == str(newer.path)
    assert f"also running: {older.path}" in found.said[1]
    assert read_memory_snapshot(tmp_path / "out", {}, name="b").folder == str(older.path)


def test_the_command_shows_the_machine_and_answers_0(succeed, tmp_path, monkeypatch):
    config = tmp_path / "run.yaml"
    config.write_text(f"model: {{name: a/b}}\ndata: {{train_path: x.jsonl}}\noutput: {{dir: {tmp_path}/outputs}}\n")
    assert "No run is in progress in" in succeed("memory-check", "--config", str(config))
    monkeypatch.setenv("JSON", "1")
    assert json.loads(succeed("memory-check", "--config", str(config)))["running"] is False
    pauses: list[float] = []

    def pause(seconds: float) -> None:  # Ctrl-C in the third one
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("sft_play.commands.diagnosing.time.sleep", pause)
    printed = succeed("memory-check", "--config", str(config), "--watch")
    assert pauses == [REFRESH_S] * 3
    assert [json.loads(line)["running"] for line in printed.splitlines() if line.startswith("{")] == [False] * 3
