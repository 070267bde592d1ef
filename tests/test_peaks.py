"""The peak of each moment of a run: what one takes is not read as another's."""

from __future__ import annotations

import contextlib
import json
import platform
import random
import re
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from sft_play.planner import calibration
from sft_play.planner.memory.estimate import MemoryEstimate, RunPhase
from sft_play.text import GIB
from sft_play.training.measure import monitor as peaks_module
from sft_play.training.measure.monitor import SAMPLE_INTERVAL_S, MemoryPeaks, start_memory_peaks
from sft_play.training.measure.summary import format_peak
from tests import warm
from tests.conftest import ROOT, chat, clean_environment, write_rows, write_run

pytestmark = pytest.mark.build
MIB = 2**20


class Card:
    """A GPU's counters as torch keeps them: peaks since the last reset, and blocks that stay reserved once freed."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.most_allocated = self.most_reserved = 0

    def take(self, size: int) -> None:
        self.allocated += size
        self.reserved = max(self.reserved, self.allocated)
        self.most_allocated = max(self.most_allocated, self.allocated)
        self.most_reserved = max(self.most_reserved, self.reserved)

    def pass_through(self, size: int) -> None:
        self.take(size)
        self.allocated -= size

    def empty(self) -> None:
        self.reserved = self.allocated

    def reset(self) -> None:
        self.most_allocated, self.most_reserved = self.allocated, self.reserved


@pytest.fixture
def card(monkeypatch):
    made, cuda = Card(), peaks_module.torch.cuda
    monkeypatch.setattr(cuda, "max_memory_allocated", lambda: made.most_allocated)
    monkeypatch.setattr(cuda, "max_memory_reserved", lambda: made.most_reserved)
    monkeypatch.setattr(cuda, "empty_cache", made.empty)
    monkeypatch.setattr(cuda, "reset_peak_memory_stats", made.reset)
    return made


@pytest.mark.parametrize("seed", range(6))
def test_each_moment_has_the_highest_of_its_own_parts(card, seed):
    draw, found = random.Random(seed), MemoryPeaks(on_gpu=True)
    wanted: dict[str, int] = {}
    found.start("training")
    for _ in range(30):
        name = draw.choice(["training", "evaluation", "generation", "saving"])
        size = draw.randint(0, 100)
        with contextlib.nullcontext() if name == "training" else found.during(name):
            card.pass_through(size)
        wanted[name] = max(wanted.get(name, 0), size)
    assert {name: allocated for name, (allocated, _) in found.by_phase().items()} == {"training": 0} | wanted


def test_what_generated_answers_left_is_not_the_trainings_peak_and_nothing_counts_after_the_end(card):
    """10 stay, a step passes 5, an evaluation 20, generation within it 40: steps go on with nothing of it reserved."""
    found = MemoryPeaks(on_gpu=True)
    card.take(10)
    with found.during("generation"):  # before training
        card.pass_through(90)
    found.start("training")
    card.pass_through(5)
    with found.during("evaluation"):
        card.pass_through(20)
        with found.during("generation"):
            card.pass_through(40)
        card.pass_through(1)
    card.pass_through(3)
    found.close()
    card.take(200)
    assert found.by_phase() == {"generation": (100, 100), "training": (15, 15), "evaluation": (30, 30)}
    found.clear()  # another stage begins
    assert found.by_phase() == {}


def test_the_one_figure_of_a_gpu_is_reserved_in_its_highest_moment(card):
    memory = MemoryEstimate(reserved=70, by_moment={"training": (40, 50), "evaluation": (60, 70)})
    plan: Any = SimpleNamespace(hardware=SimpleNamespace(device="cuda"), memory=memory)
    peaks = start_memory_peaks(plan)
    peaks.start("training")
    card.take(30)
    with peaks.during("evaluation"):
        card.pass_through(50)
    figures = {"predicted_allocated": 60, "measured_allocated": 80, "predicted_reserved": 70, "measured_reserved": 80}
    fields = peaks.summary_fields(plan)
    assert fields["peak_bytes"] == {"moment": "evaluation", **figures}
    assert fields["peak_bytes_by_moment"]["evaluation"] == figures
    line = format_peak({"moment": "evaluation", **{name: GIB * value for name, value in figures.items()}})
    assert line == "Peak memory reserved on a GPU, in evaluation: 70.00 GiB predicted, 80.00 GiB measured"


def test_on_a_cpu_a_predicted_peak_is_said_as_the_bound_that_it_is():
    figures = {"predicted_reserved": 2 * GIB, "measured_reserved": None, "measured_rss": GIB}
    assert format_peak({"moment": "training", **figures}).endswith("at most 2.00 GiB predicted, 1.00 GiB measured")


def test_a_predicted_peak_in_loading_says_that_pages_of_files_can_be_dropped() -> None:
    """They are not required, so that a CPU's peak may be more than what is."""
    on_cpu = MemoryEstimate(load_bytes=2 * GIB, by_moment={"training": (GIB, GIB), "loading": (2 * GIB, 4 * GIB)})
    assert on_cpu.peak_text == "4.00 GiB in loading, with pages of files that can be dropped"
    on_gpu = MemoryEstimate(load_bytes=4 * GIB, by_moment={"training": (GIB, GIB), "loading": (4 * GIB, 4 * GIB)})
    assert on_gpu.peak_text == "4.00 GiB in loading"


ALONE = """
import json, random, resource, sys, time
import numpy as np
import psutil
from sft_play.training.measure.monitor import MemoryPeaks

draw, wanted = random.Random(2), {}
level = psutil.Process().memory_info().rss
found = MemoryPeaks(baseline_bytes=level)

def touch(name, mib):
    block = np.ones(mib * 2**20 // 8)
    time.sleep(float(sys.argv[1]))
    wanted[name] = max(wanted.get(name, 0), mib)
    del block

found.start("training")
for _ in range(3):
    touch("training", draw.randint(40, 120))
    moment = draw.choice(["evaluation", "generation", "saving"])
    with found.during(moment):
        touch(moment, draw.randint(40, 200))
measured = {name: highest for name, (highest, _) in found.by_phase().items()}
found.close()
kernels = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([wanted, measured, level, kernels]))
"""


def test_each_moment_of_a_cpu_has_its_own_peak_and_the_kernels_mark_stays() -> None:
    """In a process of its own; the mark is what `time -v` and Slurm's MaxRSS read."""
    words = [warm.python(), "-c", ALONE, str(5 * SAMPLE_INTERVAL_S)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT, env=clean_environment())
    wanted, measured, level, kernels = json.loads(done.stdout.splitlines()[-1])
    assert measured.keys() == wanted.keys()
    for moment, mib in wanted.items():
        assert (mib - 4) * MIB <= measured[moment] <= (mib + 40) * MIB, moment
    assert kernels >= level + (max(wanted.values()) - 4) * MIB


@pytest.mark.parametrize("closes", [True, False])
def test_no_thread_is_left_when_a_run_has_ended_or_failed(closes):
    before, found = set(threading.enumerate()), MemoryPeaks()
    with contextlib.suppress(ValueError), contextlib.closing(found) if closes else contextlib.nullcontext():
        found.start("training")
        with found.during("evaluation"):
            pass
        raise ValueError("in a step")
    del found  # a caller may have closed nothing
    for _ in range(100):
        if not any(one.name == "resident memory" for one in set(threading.enumerate()) - before):
            return
        time.sleep(SAMPLE_INTERVAL_S)
    pytest.fail("a thread goes on")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc_trim gives memory back")
def test_what_an_earlier_run_freed_is_not_part_of_a_runs_level():
    """300 MiB in a cycle, in blocks small enough for the heap; the last block stays, and with it the heap's end."""
    earlier: list[Any] = [b"x" * (64 << 10) for _ in range(4800)]
    last = earlier[-1]
    earlier.append(earlier)
    del earlier
    before = psutil.Process().memory_info().rss
    plan: Any = SimpleNamespace(hardware=SimpleNamespace(device="cpu"))
    assert start_memory_peaks(plan).baseline_bytes < before - 250 * MIB
    assert len(last) == 64 << 10


def test_a_run_records_each_moment_and_one_figure_of_the_highest(tmp_path, tiny_llama, succeed, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    rows = write_rows(tmp_path / "rows.jsonl", (chat(f"what is {n}?", "it is " * (n % 5 + 1)) for n in range(12)))
    path = write_run(
        tmp_path, tiny_llama, rows, data={"val_fraction": 0.25}, train={"effective_batch_size": 4, "save_steps": 1},
        eval={"steps": 1, "generate_rows": 2, "max_new_tokens": 4}, output={"name": "one"},
    )  # fmt: skip
    said = succeed("train", "--config", str(path))
    folder = tmp_path / "outputs" / "one"
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    found = summary["peak_bytes_by_moment"]
    assert set(found) == {"loading", "training", "evaluation", "generation", "saving"}
    highest = max(found, key=lambda name: found[name]["measured_rss"])
    assert summary["peak_bytes"] == {"moment": highest, **found[highest]}
    planned = json.loads((folder / "plan.json").read_text())["peak_bytes"]
    assert planned["by_moment"].keys() == found.keys()
    for moment, (allocated, reserved) in planned["by_moment"].items():
        assert (found[moment]["predicted_allocated"], found[moment]["predicted_reserved"]) == (allocated, reserved)
    (line,) = [line for line in said.splitlines() if "Peak memory above the " in line]
    peak = summary["peak_bytes"]
    numbers = [f"{peak[name] / GIB:.2f}" for name in ("predicted_reserved", "measured_rss")]
    assert re.findall(r"([0-9.]+) GiB", line) == numbers
    # later plans learn from the two figures
    recorded = json.loads((tmp_path / "cache" / "measured.jsonl").read_text().splitlines()[-1])
    learned = ("training", "evaluation")
    assert recorded["measured_reserved"] == max(found[name]["measured_rss"] for name in learned)
    assert recorded["predicted_reserved"] == max(planned["by_moment"][name][1] for name in learned)


@pytest.mark.parametrize("seed", range(6))
def test_corrections_by_earlier_runs_hold_in_every_moment_but_loading(seed: int) -> None:
    draw = random.Random(seed)
    moments: list[RunPhase] = ["training", "evaluation", "saving", "generation", "loading"]
    by_moment = {name: (draw.randint(1, 10**9), draw.randint(1, 10**9)) for name in moments}
    raw = max(one for name, (_, one) in by_moment.items() if name != "loading")
    memory = MemoryEstimate(reserved=3 * raw // 2, by_moment=by_moment)
    for name, (allocated, reserved) in by_moment.items():
        factor = 1 if name == "loading" else memory.reserved / raw
        assert memory.phase_bytes(name) == (allocated, pytest.approx(factor * reserved, abs=1))
    assert MemoryEstimate().phase_bytes("training") == (None, None)  # a plan of an earlier version


def test_records_of_earlier_versions_are_still_read(tmp_path: Path) -> None:
    line = {
        "device": "cpu", "mode": "lora", "layout": "single", "model": "m", "micro_batch": 1, "seq_len": 64,
        "predicted_allocated": 1, "measured_allocated": 0, "predicted_reserved": 2, "measured_reserved": 3,
        "predicted_tokens_per_s": 1.0, "measured_tokens_per_s": 1.0, "versions": "", "finished": "", "version": 2,
    }  # fmt: skip
    (tmp_path / "measured.jsonl").write_text(json.dumps(line) + "\n")
    (run,) = calibration.load_measured_runs(tmp_path / "measured.jsonl")
    assert run.memory_ratio == 1.5
