"""Predicted against measured peak memory and speed of real runs, one row at a time.

    make benchmark OUT=peaks.json             # on a GPU: 0.5B and 3B shapes
    make benchmark OUT=peaks.json SMALL=1     # on any CPU: a 2M shape

Weights are random, made from the published shapes; nothing is downloaded. Each run is `sft-play train` in a process
of its own. Rows that the file already holds are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sft_play.facts.hardware import detect
from sft_play.facts.known_models import KNOWN_MODELS
from sft_play.runs import versions, write_json
from sft_play.train.starter_base import make_tokenizer

ROOT = Path(__file__).resolve().parent.parent
LARGE = ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-3B")
SMALL = ("sft-play/starter-base",)
MODES = ("qlora", "lora", "full")
LENGTHS = (512, 2048)
STEPS = 3
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "and",
    "runs",
    "into",
    "the",
    "dark",
    "forest",
    "again",
]


def make_model(name: str, folder: Path) -> Path:
    """A folder with a model of this shape, random weights, and a small tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = folder / name.replace("/", "--")
    if not path.exists():
        config = AutoConfig.for_model(**KNOWN_MODELS[name].config)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
        make_tokenizer([" ".join(WORDS)] * 50).save_pretrained(path)
    return path


def measure(model: Path, folder: Path, mode: str, length: int) -> dict[str, Any]:
    """Predicted and measured peak in bytes and tokens per second of one run of full-length rows."""
    text = folder / "text.txt"
    text.write_text(" ".join(itertools.islice(itertools.cycle(WORDS), 400_000)), encoding="utf-8")
    name = f"{model.name}-{mode}-{length}"
    config = folder / "run.yaml"
    config.write_text(
        f"model: {{name: {model}, max_seq_len: {length}}}\ntask_mode: cpt\ntuning: {{mode: {mode}}}\n"
        f"data: {{train_path: {text}, val_path: null, test_path: null}}\n"
        f"train: {{max_steps: {STEPS}, effective_batch_size: 8, report_to: []}}\neval: {{steps: 0}}\n"
        f"output: {{dir: {folder}/outputs, name: {name}, if_exists: replace}}\n",
        encoding="utf-8",
    )
    words = [sys.executable, "-m", "sft_play", "train", "--config", str(config)]
    answer = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if answer.returncode:
        return {"error": (answer.stdout + answer.stderr).strip().splitlines()[-1], "exit": answer.returncode}
    summary = json.loads((folder / "outputs" / name / "summary.json").read_text())
    return {"peak_bytes": summary["peak_bytes"], "tokens_per_s": summary["tokens_per_s"]}


def ratios(runs: dict[str, Any]) -> dict[str, float]:
    """Predicted over measured peak of each run that has both: allocated on a GPU, resident memory on a CPU."""
    found = {}
    for name, run in runs.items():
        peak = run.get("peak_bytes", {})
        kind = "allocated" if peak.get("measured_allocated") else "reserved"
        measured = peak.get("measured_allocated") or peak.get("measured_rss")
        if measured:
            found[name] = round(peak[f"predicted_{kind}"] / measured, 4)
    return found


def main() -> int:
    """Run what is missing, writing after each row."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--small", action="store_true", default=bool(os.environ.get("SMALL")), help="2M shape only")
    words.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "predicted_peak.json"))
    given = words.parse_args()
    done = json.loads(given.out.read_text())["runs"] if given.out.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in SMALL if given.small else LARGE:
            model = make_model(name, Path(scratch))
            for mode, length in itertools.product(MODES, LENGTHS):
                row = f"{name} {mode} {length}"
                if row in done:
                    continue
                done[row] = measure(model, Path(scratch), mode, length)
                sys.stdout.write(f"{row}: {json.dumps(done[row])}\n")
                report = {"machine": detect().as_json(), "versions": versions(), "runs": done, "ratios": ratios(done)}
                write_json(given.out, {"date": datetime.now(UTC).isoformat(timespec="seconds"), **report})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
