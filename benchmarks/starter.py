"""The starter over seeds and numbers of threads: exact match on the 300 held-out commands, and the worst.

    make -C benchmarks benchmark-starter OUT=starter.json
    python -m benchmarks.starter --seeds 1,2 --threads 1 --out starter.json

For each seed and each number of threads the shipped base is fine-tuned by configs/run_starter.yaml with that seed, as
`make train` does it. Processors and numbers of threads round differently, which changes a run about as much as another
seed does. Runs that the file holds already are kept as long as base, rows and recipe are the same, so that this can be
stopped and started again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from benchmarks.starter_base import digest
from benchmarks.starter_corpus import SPLITS
from sft_play.machine.hardware import detect_hardware
from sft_play.process.environment import independent_environment, openmp_wait_variables
from sft_play.runs.files import write_json
from sft_play.runs.folder import installed_versions
from sft_play.starter import BASE, CONFIG

ROOT = Path(__file__).resolve().parent.parent


def recipe() -> str:
    """Twelve hex digits that change with the base, the rows and the fine-tuning, not with words about it."""
    settings = json.dumps(yaml.safe_load((ROOT / CONFIG).read_text(encoding="utf-8")), sort_keys=True)
    parts = [digest(path) for path in sorted(BASE.glob("*.safetensors")) + sorted(SPLITS.iterdir())]
    return hashlib.sha256("\0".join([settings, *parts]).encode()).hexdigest()[:12]


def run(seed: int, threads: int, place: Path) -> dict[str, Any]:
    """One fine-tuning: exact match, the loss, seconds, load."""
    environment = (
        independent_environment(os.environ) | openmp_wait_variables(os.environ) | {"OMP_NUM_THREADS": str(threads)}
    )
    environment |= {"SFT_PLAY_CACHE": str(place / "cache")}
    began = time.monotonic()
    overrides = [f"train.seed={seed}", "eval.before_training=false"]
    overrides += [f"output.dir={json.dumps(str(place))}", "output.name=run"]
    train = [sys.executable, "-m", "sft_play", "train", "--config", str(ROOT / CONFIG), *overrides]
    subprocess.run(train, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = json.loads((place / "run" / "summary.json").read_text(encoding="utf-8"))["after"]
    return {
        "recipe": recipe(),
        "seed": seed,
        "threads": threads,
        "exact_match": after["exact_match"],
        "loss": after["loss"],
        "fine_tuning_s": time.monotonic() - began,
        "load": os.getloadavg()[0],
        "processor": detect_hardware().cpu_name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def main() -> None:
    """Run what the file does not hold yet, and write it after every run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=os.environ.get("OUT") or "starter.json")
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--threads", default="1,2")
    options = parser.parse_args()
    out = Path(options.out).absolute()
    runs: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))["runs"] if out.is_file() else []
    runs = [one for one in runs if one["recipe"] == recipe()]  # others say nothing about this one
    there = {(one["seed"], one["threads"]) for one in runs}
    for threads in map(int, options.threads.split(",")):
        for seed in map(int, options.seeds.split(",")):
            if (seed, threads) in there:
                continue
            with tempfile.TemporaryDirectory() as workdir:
                runs.append(run(seed, threads, Path(workdir)))
            sys.stdout.write(json.dumps(runs[-1]) + "\n")
            sys.stdout.flush()
            exact_matches = [one["exact_match"] for one in runs]
            summary = {
                "runs": len(runs),
                "worst": min(exact_matches),
                "median": statistics.median(exact_matches),
                "best": max(exact_matches),
            }
            report = {
                "machine": detect_hardware().as_json(),
                "versions": installed_versions(),
                "summary": summary,
                "runs": runs,
            }
            write_json(out, report)


if __name__ == "__main__":
    main()
