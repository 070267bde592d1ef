"""kill -9 at random moments of a run; what is resumed afterwards, against the run that nobody killed.

Moments are drawn over the whole time of a run: starting, steps, evaluation, answers, checkpoints, the last weights.
Equal bit for bit are the losses of all steps, how many rows and tokens had been trained at each, the weights and the
optimizer's state. The learning rate is constant: one that has come to zero would hide a step too many.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import warm
from tests.conftest import clean_environment
from tests.models import make_llama
from tests.resume_exam.exam import write_rows

LAYOUTS: dict[str, dict[str, str]] = {
    "one process": {},
    "ddp": {"NPROC": "2", "STRATEGY": "ddp"},
    "fsdp": {"NPROC": "2", "STRATEGY": "fsdp"},
    "zero2": {"NPROC": "2", "STRATEGY": "zero2"},
    "streamed": {"STRATEGY": "streamed"},
    "curriculum": {},
}
LATER_S = 0.5
"""Seconds after a line at most: what is written between two lines is hit too."""
MOST_KILLS = 4
"""Kills of one run, one after another: a resumed run is killed too."""


@dataclass(frozen=True)
class Killed:
    """One run that was killed and resumed until it finished."""

    layout: str
    seed: int
    moments: tuple[str, ...]
    """What the run had printed last when it was killed."""
    differs: tuple[str, ...]


def write_run(folder: Path, base: Path, layout: str) -> Path:
    """A run with evaluation, answers and a checkpoint every second step."""
    write_rows(folder)
    stages = "curriculum: [{name: first, max_steps: 5}, {name: second, max_steps: 5, learning_rate: 5e-4}]\n"
    path = folder / "run.yaml"
    path.write_text(
        f"model: {{name: {base}, max_seq_len: 64}}\ntuning: {{mode: lora, lora: {{dropout: 0.1}}}}\n"
        f"data: {{train_path: {folder}/rows.jsonl, val_fraction: 0.2}}\n"
        "train: {effective_batch_size: 8, batch_size: 2, max_steps: 10, learning_rate: 1e-3, "
        "lr_scheduler_type: constant, save_steps: 2, report_to: []}\n"
        "eval: {steps: 3, generate_rows: 2}\n"
        f"output: {{dir: {folder}/outputs, name: run, if_exists: resume}}\n" + stages * (layout == "curriculum")
    )
    return path


def started(path: Path, layout: str) -> subprocess.Popen[str]:
    """The command a batch system would give each time: begun where there is nothing, resumed where there is."""
    command = "train-distributed" if "NPROC" in LAYOUTS[layout] else "train"
    return subprocess.Popen(
        [warm.python(), "-m", "sft_play", command, "--config", str(path)],
        env=clean_environment(**LAYOUTS[layout]), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip


def left_of(run: Path) -> dict[str, Any]:
    """What a finished run leaves that another must equal."""
    from safetensors.torch import load_file

    from tests.resume_exam.exam import _digest

    lines = [json.loads(line) for file in sorted(run.rglob("metrics.jsonl")) for line in file.read_text().splitlines()]
    steps = {(one.get("stage"), one["step"]): one for one in lines if "loss" in one and "step" in one}
    weights = {
        str(file.relative_to(run)): _digest(*(one for _, one in sorted(load_file(file).items())))
        for file in sorted(run.rglob("adapter_model.safetensors"))
        if "checkpoints" not in file.parts
    }
    losses, rows = (
        {at: [one[name] for name in names] for at, one in steps.items()}
        for names in (["loss"], ["samples_seen", "num_tokens"])
    )
    return {"losses": losses, "rows": rows, "weights": weights, "optimizer": _optimizers(run)}


def _optimizers(run: Path) -> dict[str, str]:
    import torch

    from tests.resume_exam.exam import _digest

    found = {}
    for file in sorted([*run.rglob("optimizer.pt"), *run.rglob("*_optim_states.pt")]):
        # DeepSpeed's holds objects of its own; the run is this machine's
        state = torch.load(file, weights_only=file.name == "optimizer.pt")
        found[str(file.relative_to(run))] = _digest(*_tensors(state))
    if not found:
        raise RuntimeError(f"{run} has no optimizer's state that could be compared")
    return found


def _tensors(state: Any) -> Iterator[Any]:
    """Every tensor of nested dicts and lists, in the order of their keys."""
    import torch

    if isinstance(state, torch.Tensor):
        yield state.reshape(-1)
    elif isinstance(state, dict):
        for key in sorted(state, key=str):
            yield from _tensors(state[key])
    elif isinstance(state, list | tuple):
        for one in state:
            yield from _tensors(one)


def unbroken(folder: Path, base: Path, layout: str) -> tuple[dict[str, Any], int]:
    """What the run leaves that nobody kills, and the lines that it prints.

    Raises:
        RuntimeError: it failed.
    """
    folder.mkdir(parents=True)
    one = started(write_run(folder, base, layout), layout)
    printed, _ = one.communicate()
    if one.returncode:
        raise RuntimeError(printed)
    return left_of(folder / "outputs" / "run"), len(printed.splitlines())


def killed(folder: Path, base: Path, layout: str, seed: int, lines: int, wanted: dict[str, Any]) -> Killed:
    """A run killed at up to `MOST_KILLS` random moments, then left alone."""
    folder.mkdir(parents=True)
    path, draw = write_run(folder, base, layout), random.Random(seed)
    moments: list[str] = []
    for _ in range(draw.randint(1, MOST_KILLS)):
        moment = _killed_at(started(path, layout), folder, draw.randint(0, lines), draw.uniform(0.0, LATER_S))
        if moment is None:
            break
        moments.append(moment)
    one = started(path, layout)
    printed, _ = one.communicate()
    if one.returncode and "is finished" not in printed:
        return Killed(layout, seed, tuple(moments), (f"exit code {one.returncode}: {printed[-300:]}",))
    found = left_of(folder / "outputs" / "run")
    return Killed(layout, seed, tuple(moments), tuple(name for name in wanted if found[name] != wanted[name]))


def _killed_at(one: subprocess.Popen[str], folder: Path, lines: int, later_s: float) -> str | None:
    """Kill a run a little after it has printed so many lines; the last of them, or None where it had ended before."""
    assert one.stdout is not None
    said = "starting"
    for _ in range(lines):
        line = one.stdout.readline()
        if not line:
            one.wait()
            return None
        said = line.strip()[:100]
    time.sleep(later_s)
    _kill(one, folder)
    return said


def _kill(one: subprocess.Popen[str], folder: Path) -> None:
    """End the command and every process of its run, as the loss of the machine would."""
    import psutil

    for process in psutil.process_iter(["cmdline", "environ"]):
        words = " ".join(process.info["cmdline"] or [])
        if str(folder) in words and process.pid != os.getpid():
            process.kill()
    one.send_signal(signal.SIGKILL)
    one.communicate()


def summary(found: list[Killed]) -> str:
    """A table in Markdown: runs, kills and runs that differed, by layout."""
    rows = ["| layout | runs | kills | differ |", "|---|---|---|---|"]
    for layout in dict.fromkeys(one.layout for one in found):
        of = [one for one in found if one.layout == layout]
        kills, differing = sum(len(one.moments) for one in of), sum(bool(one.differs) for one in of)
        rows.append(f"| {layout} | {len(of)} | {kills} | {differing} |")
    return "\n".join(rows)


def main(layouts: list[str], runs: int, seed: int, folder: Path) -> list[Killed]:
    """Kill `runs` runs of each layout."""
    base = make_llama(folder / "base")
    found = []
    for layout in layouts:
        wanted, lines = unbroken(folder / layout / "unbroken", base, layout)
        for number in range(seed, seed + runs):
            found.append(killed(folder / layout / str(number), base, layout, number, lines, wanted))
            print(json.dumps(vars(found[-1])), file=sys.stderr, flush=True)
    return found
