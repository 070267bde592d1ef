"""Predicted against measured peak memory of every engine with one rank, through the toolkit's own launch.

    make -C benchmarks benchmark-engines OUT=engines.json           # on one GPU: shapes of 1B to 8B with random weights
    make -C benchmarks benchmark-engines OUT=engines.json SMALL=1   # on any CPU: a 2M shape, to see that it runs

A model of random weights is written once per shape, and each row is a run of `sft-play train-distributed --nproc 1`: it
plans, proves its engine, trains a few steps and writes both figures into its summary. Runs that are in OUT are not
repeated, so the script continues where it was stopped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sft_play.machine.hardware import detect_hardware
from sft_play.models.config_json import KNOWN_MODELS
from sft_play.process.signals import child_environment
from sft_play.runs.files import write_json
from sft_play.runs.folder import installed_versions

LARGE = ("meta-llama/Llama-3.2-1B", "Qwen/Qwen3-4B", "meta-llama/Llama-3.1-8B")
SMALL = ("sft-play/starter-base",)
ENGINES = ("single", "ddp", "fsdp", "zero2", "zero3")
MODES = ("lora", "qlora", "full")
STEPS = 4
WORDS = "the quick brown fox jumps over the lazy dog and runs into the dark forest again".split()  # noqa: SIM905


def rows_of(small: bool) -> list[tuple[str, str, str]]:
    """Every model, mode and engine; 8B of weights, gradients and states in full are more than one GPU holds."""
    rows = itertools.product(SMALL if small else LARGE, MODES, ENGINES)
    return [row for row in rows if row[:2] != (LARGE[2], "full")]


def write_model(name: str, folder: Path) -> Path:
    """The model's shape with random weights, its tokenizer and rows of text, written once."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks.starter_base import make_tokenizer

    path = folder / name.replace("/", "--")
    if (path / "rows.jsonl").is_file():
        return path
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(KNOWN_MODELS[name].config), encoding="utf-8")
    make_tokenizer([" ".join(WORDS)] * 50).save_pretrained(path)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
    model.save_pretrained(path)
    del model
    text = " ".join(WORDS * 40_000)
    (path / "rows.jsonl").write_text(json.dumps({"text": text}) + "\n", encoding="utf-8")
    return path


def run(row: tuple[str, str, str], scratch: Path, *, seq_len: int) -> dict[str, Any]:
    """What one run predicted and measured, in bytes; an error is a result."""
    name, mode, engine = row
    model = write_model(name, scratch)
    config = scratch / "run.yaml"
    config.write_text(
        f"model: {{name: {model}, max_seq_len: {seq_len}}}\ntask_mode: cpt\ntuning: {{mode: {mode}}}\n"
        f"data: {{train_path: {model}/rows.jsonl, val_path: null, test_path: null}}\n"
        f"train: {{batch_size: 2, effective_batch_size: 4, max_steps: {STEPS}, report_to: [], save_steps: 1000}}\n"
        f"eval: {{steps: 0, before_training: false}}\noutput: {{dir: {scratch}/outputs, name: row}}\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "sft_play"]
    command += ["train"] if engine == "single" else ["train-distributed", "--strategy", engine, "--nproc", "1"]
    began = time.monotonic()
    environment = child_environment(os.environ)
    answer = subprocess.run(
        [*command, "--config", str(config)], env=environment, capture_output=True, text=True, check=False
    )
    summary = scratch / "outputs" / "row" / "summary.json"
    found: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1)}
    if answer.returncode or not summary.is_file():
        lines = [line for line in (answer.stdout + answer.stderr).splitlines() if "rror" in line]
        found["error"] = " / ".join(lines[-3:])[:400] or f"exit code {answer.returncode}"
    else:
        read = json.loads(summary.read_text(encoding="utf-8"))
        found |= {"peak_bytes": read["peak_bytes"], "engine_proof": read["engine_proof"]}
        found |= {key: read[key] for key in ("tokens_per_s", "predicted_tokens_per_s")}
    shutil.rmtree(scratch / "outputs", ignore_errors=True)
    return found


def ratios(runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Predicted over measured peak by engine: median, lowest, highest."""
    found: dict[str, list[float]] = {}
    for name, one in runs.items():
        peak = one.get("peak_bytes", {})
        measured = peak.get("measured_allocated") or peak.get("measured_rss")
        predicted = peak.get("predicted_allocated" if peak.get("measured_allocated") else "predicted_reserved")
        if measured and predicted:
            found.setdefault(name.split()[-1], []).append(predicted / measured)
    return {
        engine: {"n": len(values), "median": statistics.median(values), "min": min(values), "max": max(values)}
        for engine, values in found.items()
    }


def main() -> None:
    """Run what is not yet in OUT."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=os.environ.get("OUT") or "engines.json")
    parser.add_argument("--small", action="store_true", default=os.environ.get("SMALL", "") not in ("", "0"))
    parser.add_argument("--scratch", default=None, help="folder for the models (kept); a temporary one otherwise")
    options = parser.parse_args()
    out, hardware = Path(options.out), detect_hardware()
    runs = json.loads(out.read_text(encoding="utf-8"))["runs"] if out.is_file() else {}
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(options.scratch or temporary)
        for row in rows_of(options.small):
            name = " ".join(row)
            if name in runs:
                continue
            runs[name] = run(row, scratch, seq_len=128 if options.small else 2048)
            sys.stdout.write(f"{name}: {json.dumps(runs[name])[:300]}\n")
            sys.stdout.flush()
            write_json(
                out.absolute(),
                {
                    "date": datetime.now(UTC).isoformat(timespec="seconds"),
                    "machine": hardware.as_json(),
                    "versions": installed_versions(),
                    "runs": runs,
                    "ratios": ratios(runs),
                },
            )


if __name__ == "__main__":
    main()
