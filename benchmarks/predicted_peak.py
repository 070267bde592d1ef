"""Predicted against measured peak memory and speed of real training runs, one row at a time.

    make -C benchmarks benchmark OUT=peaks.json             # on a GPU: 1B to 27B shapes; continues where it stopped
    make -C benchmarks benchmark OUT=peaks.json SMALL=1     # on any CPU: a 2M shape, to see that it runs

Every row is a run of random weights, started as a user starts it. `auto` rows take the plan's micro-batch, and must not
run out of memory; rows with twice that size, which does not fit by the plan, show whether the plan was too shy.
"""

import itertools
import json
import os
import shutil
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_selftest.trials import TrialBench, measured_figures, predicted_figures, train_in_process
from benchmarks.random_model import ensure_published_shape
from benchmarks.report_header import report_header
from benchmarks.steps.material import write_chats, write_config
from sft_play.machine.hardware import detect_hardware
from sft_play.runs.folder import read_json, write_json

LARGE = ("meta-llama/Llama-3.2-1B", "Qwen/Qwen3-4B", "meta-llama/Llama-3.1-8B", "google/gemma-3-27b-it")
SMALL = "sft-play/starter-base"
MODES = ("qlora", "lora", "full")
STEPS = 6
ROW_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Row:
    """One setting: `micro_batch` 0 leaves it to the plan, -1 takes twice what the plan chose."""

    model: str
    mode: str
    seq_len: int
    micro_batch: int
    checkpointing: bool | str

    @property
    def name(self) -> str:
        size = {0: "auto", -1: "twice-auto"}.get(self.micro_batch, str(self.micro_batch))
        return f"{self.model} {self.mode} {size}x{self.seq_len} checkpointing={self.checkpointing}"


def grid(small: bool) -> list[Row]:
    if small:
        rows = [Row(SMALL, mode, 128, 4, on) for mode, on in itertools.product(MODES, (True, False))]
        return [*rows, Row(SMALL, "qlora", 128, 0, "auto")]
    rows = []
    for model, mode in itertools.product(LARGE, MODES):
        if model == LARGE[3] and mode == "full":
            continue  # 27 billion weights, gradients and states need more than one GPU
        for seq_len, micro, on in ((512, 4, True), (2048, 1, False), (2048, 4, True), (8192, 1, True)):
            if on or model != LARGE[3]:
                rows.append(Row(model, mode, seq_len, micro, on))
        rows += [Row(model, mode, 2048, 0, "auto"), Row(model, mode, 2048, -1, "auto")]
        if mode == "qlora" and model != LARGE[3]:
            rows.append(Row(model, mode, 512, 16, True))
    return rows


def run_row(row: Row, micro_batch: int, bench: TrialBench) -> dict[str, Any]:
    """Train a row's run; returns its predicted and measured figures, and the message of one that fails."""
    bench.clean()
    rows = bench.folder / "rows.jsonl"
    write_chats(rows, 64, words_of_answer=(2.0 * row.seq_len, 0.0))
    batch = {"batch_size": micro_batch, "effective_batch_size": 2 * micro_batch} if micro_batch else {}
    config = write_config(
        bench.folder / "run.yaml",
        model=ensure_published_shape(row.model, bench.folder / row.model.replace("/", "--")), rows=rows,
        seq_len=row.seq_len, tuning={"mode": row.mode},
        train={"max_steps": STEPS, "logging_steps": 1, "gradient_checkpointing": row.checkpointing, **batch},
        output={"dir": str(bench.folder / "outputs"), "name": "run"},
    )  # fmt: skip
    result = train_in_process(config, bench, "train", limit_s=ROW_TIMEOUT_S)
    answer: dict[str, Any] = {}
    if (bench.run_folder / "plan.json").is_file():
        answer["predicted"] = predicted_figures(bench.run_folder)
    if result.code == 0:
        answer["measured"] = measured_figures(bench.run_folder)
    elif result.code == 3:
        answer["measured"] = {"out_of_memory": result.message}
    else:
        answer["error"] = result.message
    return answer


def ratios(runs: dict[str, Any]) -> dict[str, Any]:
    """Predicted over measured for each row that has both, and their spread."""
    found: dict[str, Any] = {}
    for name, run in runs.items():
        measured, predicted = run.get("measured", {}), run.get("predicted", {})
        for kind in ("allocated", "reserved", "tokens_per_s"):
            if measured.get(kind) and predicted.get(kind):
                found.setdefault(kind, {})[name] = round(predicted[kind] / measured[kind], 4)
    spread = {}
    for kind, values in found.items():
        every = list(values.values())
        spread[kind] = {"median": statistics.median(every), "least": min(every), "most": max(every)}
    return {"spread": spread, **found}


def main() -> None:
    """Measure the rows that are not in OUT= yet; with SMALL= the small ones."""
    out = Path(os.environ.get("OUT") or "predicted_peak.json")
    runs: dict[str, Any] = read_json(out)["runs"] if out.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        bench = TrialBench(Path(scratch), Path(scratch), on_gpu=bool(detect_hardware().gpus))
        model = ""
        for row in grid(os.environ.get("SMALL", "") not in ("", "0")):
            if row.name in runs:
                continue
            if model and row.model != model:  # the disk need not hold the weights of all
                shutil.rmtree(bench.folder / model.replace("/", "--"), ignore_errors=True)
            model, micro = row.model, row.micro_batch
            if micro < 0:
                chosen = runs[replace(row, micro_batch=0).name].get("predicted")
                if chosen is None:
                    continue
                micro = 2 * chosen["micro_batch"]
            runs[row.name] = run_row(row, micro, bench)
            print(f"{row.name}: {json.dumps(runs[row.name])}", flush=True)
            write_json(out, {**report_header(), "runs": runs, "ratios": ratios(runs)})


if __name__ == "__main__":
    main()
