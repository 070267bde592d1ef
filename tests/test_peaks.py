"""The peak of each moment of a run: what one takes is not read as another's."""

from __future__ import annotations

import json
import platform
import random
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from sft_play.training.measure import peaks as peaks_module
from sft_play.training.measure.peaks import Highest, MemoryMeter, Peaks
from tests.conftest import chat

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

    def give(self, size: int) -> None:
        self.allocated -= size

    def empty(self) -> None:
        self.reserved = self.allocated

    def reset(self) -> None:
        self.most_allocated, self.most_reserved = self.allocated, self.reserved


@pytest.fixture
def card(monkeypatch):
    made = Card()
    monkeypatch.setattr(peaks_module.torch.cuda, "max_memory_allocated", lambda: made.most_allocated)
    monkeypatch.setattr(peaks_module.torch.cuda, "max_memory_reserved", lambda: made.most_reserved)
    monkeypatch.setattr(peaks_module.torch.cuda, "empty_cache", made.empty)
    monkeypatch.setattr(peaks_module.torch.cuda, "reset_peak_memory_stats", made.reset)
    return made


def test_what_generated_answers_left_is_not_the_trainings_peak(card):
    """10 stay, a step passes 5, an evaluation 20, generation 40: then steps go on, with nothing of it reserved."""
    found = Peaks(on_gpu=True)
    card.take(10)
    with found.during("generation"):  # before training
        card.take(90)
        card.give(90)
    found.start("training")
    card.take(5)
    card.give(5)
    with found.during("evaluation"):
        card.take(20)
        card.give(20)
        with found.during("generation"):
            card.take(40)
            card.give(40)
        card.take(1)
        card.give(1)
    card.take(3)
    card.give(3)
    assert found.highest("training") == Highest(15, 15)
    assert found.by_moment() == {
        "generation": Highest(100, 100), "training": Highest(15, 15), "evaluation": Highest(30, 30)
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_each_moment_has_the_highest_of_its_own_parts(card, seed):
    draw, found = random.Random(seed), Peaks(on_gpu=True)
    wanted: dict[str, int] = {}
    found.start("training")
    for _ in range(30):
        name = draw.choice(["training", "evaluation", "generation", "saving"])
        size = draw.randint(0, 100)

        def work(size: int = size) -> None:
            card.take(size)
            card.give(size)

        if name == "training":
            work()
        else:
            with found.during(name):
                work()
        wanted[name] = max(wanted.get(name, 0), size)
    assert {name: one.allocated for name, one in found.by_moment().items()} == {"training": 0} | wanted


def test_nothing_is_counted_after_the_end_and_a_stage_begins_anew(card):
    found = Peaks(on_gpu=True)
    found.start("training")
    card.take(4)
    found.end()
    card.take(100)
    assert found.by_moment() == {"training": Highest(4, 4)}
    found.forget()
    assert found.by_moment() == {}


ALONE = """
import numpy as np
from sft_play.training.measure.peaks import Peaks

def touch(mib):
    return int(np.ones(mib * 2**20 // 8).sum())

found = Peaks(level_bytes=0)
found.start("training")
touch(40)
before = found.highest("training").allocated
with found.during("generation"):
    touch(400)
touch(40)
print(before, found.highest("training").allocated, found.highest("generation").allocated)
"""


def test_resident_memory_of_a_moment_is_its_own_where_linux_counts_anew():
    """In a process of its own: threads that other tests leave may hold memory of theirs."""
    if not peaks_module.cleared():
        pytest.skip("/proc/self/clear_refs cannot be written here")
    printed = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True, timeout=120)
    before, after, generated = map(int, printed.stdout.splitlines()[-1].split())
    assert generated >= before + 300 * MIB
    assert after <= before + 100 * MIB


def test_where_the_count_cannot_begin_anew_nothing_is_known(monkeypatch):
    """macOS, or a container that hides /proc: the kernel's count only rises."""
    monkeypatch.setattr(peaks_module, "cleared", lambda: False)
    found = Peaks()
    found.start("training")
    assert found.highest("training") is None
    assert found.by_moment() == {}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc_trim gives memory back")
def test_what_an_earlier_run_freed_is_not_part_of_a_runs_level():
    """300 MiB in a cycle, in blocks small enough for the heap; the last block stays, and with it the heap's end."""
    earlier: list[Any] = [b"x" * (64 << 10) for _ in range(4800)]
    last = earlier[-1]
    earlier.append(earlier)
    del earlier
    before = psutil.Process().memory_info().rss
    plan: Any = SimpleNamespace(hardware=SimpleNamespace(device="cpu"))
    assert MemoryMeter(plan).level < before - 250 * MIB
    assert len(last) == 64 << 10


def test_a_run_records_the_peak_of_each_moment_and_says_the_trainings(tmp_path, tiny_llama, command, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(chat(f"what is {n}?", "it is " * (n % 5 + 1))) + "\n" for n in range(12)))
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {{name: {tiny_llama}, max_seq_len: 64}}\ntuning: {{mode: lora}}\n"
        f"data: {{train_path: {rows}, val_path: null, test_path: null, val_fraction: 0.25}}\n"
        "train: {effective_batch_size: 4, max_steps: 2, report_to: [], save_steps: 1}\n"
        f"eval: {{steps: 1, generate_rows: 2, max_new_tokens: 4}}\noutput: {{dir: {tmp_path}/outputs, name: one}}\n"
    )
    code, said = command("train", "--config", str(path))
    assert code == 0, said
    summary: dict[str, Any] = json.loads((tmp_path / "outputs" / "one" / "summary.json").read_text())
    found = summary["peak_bytes_by_moment"]
    assert set(found) == {"loading", "training", "evaluation", "generation", "saving"}
    assert found["training"]["measured_rss"] == summary["peak_bytes"]["measured_rss"] > 0
    moments = json.loads((tmp_path / "outputs" / "one" / "plan.json").read_text())["peak_bytes"]["moments"]
    steps = [size for name, size in moments.items() if name not in ("evaluation", "saving")]
    assert found["training"]["predicted_allocated"] == max(steps)
    assert found["evaluation"]["predicted_allocated"] == moments["evaluation"]
    assert found["generation"]["predicted_allocated"] is None
    peak = summary["peak_bytes"]
    (line,) = [line for line in said.splitlines() if "Peak memory above the " in line]
    numbers = [float(text) for text in re.findall(r"([0-9.]+) GiB", line)]
    assert numbers == [float(f"{count / 2**30:.2f}") for count in (peak["predicted_reserved"], peak["measured_rss"])]
    recorded = json.loads((tmp_path / "cache" / "measured.jsonl").read_text().splitlines()[-1])
    assert recorded["measured_reserved"] == found["training"]["measured_rss"]
