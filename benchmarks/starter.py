"""The starter's recipe over seeds and numbers of threads: exact match on the 300 held-out commands, and the worst.

    make -C benchmarks benchmark-starter OUT=starter.json
    python -m benchmarks.starter --seeds 1,2 --threads 1 --out starter.json

For each seed and each number of threads a base is trained from scratch (its random weights and the order of the corpus
come from the seed) and fine-tuned by configs/run_starter.yaml with that seed, as `make train` does it. Processors and
numbers of threads round differently, which changes a run about as much as another seed does. Runs that the file holds
already are kept as long as the recipe is the same, so that this can be stopped and started again.
"""

from __future__ import annotations

import argparse
import ast
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

from sft_play.facts.hardware import detect
from sft_play.process.environment import for_another_run, waiting_threads
from sft_play.runs.files import write_json
from sft_play.runs.manifest import versions
from sft_play.starter import CONFIG

ROOT = Path(__file__).resolve().parent.parent
STARTER_BASE = "sft_play.training.prepare.starter_base"
BASE = f"import sys; from {STARTER_BASE} import ensure_base; print(ensure_base(seed=int(sys.argv[1])))"


def recipe() -> str:
    """Twelve letters that change with what makes the base, the rows and the fine-tuning, not with words about it."""
    code = [
        _without_words(ROOT / name) for name in ("sft_play/starter/language.py", f"{STARTER_BASE.replace('.', '/')}.py")
    ]
    settings = [yaml.safe_load((ROOT / name).read_text()) for name in ("sft_play/starter/base.yaml", CONFIG)]
    return hashlib.sha256("\0".join([*code, json.dumps(settings, sort_keys=True)]).encode()).hexdigest()[:12]


def _without_words(path: Path) -> str:
    """A module's code without comments and docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [
                line for line in node.body if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
            ]
    return ast.dump(tree)


def run(seed: int, threads: int, place: Path) -> dict[str, Any]:
    """The whole recipe once: exact match, the loss, what was answered wrong, seconds of both parts, load."""
    environment = for_another_run(os.environ) | waiting_threads(os.environ)
    environment |= {"OMP_NUM_THREADS": str(threads), "SFT_PLAY_CACHE": str(place / "cache")}
    began = time.monotonic()
    made = subprocess.run(
        [sys.executable, "-c", BASE, str(seed)],
        cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    based = time.monotonic()
    words = [
        f"model.name={json.dumps(made.stdout.splitlines()[-1])}",
        f"train.seed={seed}",
        "eval.before_training=false",
    ]
    words += [f"output.dir={json.dumps(str(place))}", "output.name=run"]
    train = [sys.executable, "-m", "sft_play", "train", "--config", str(ROOT / CONFIG), *words]
    subprocess.run(train, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = json.loads((place / "run" / "summary.json").read_text(encoding="utf-8"))["after"]
    return {
        "recipe": recipe(),
        "seed": seed,
        "threads": threads,
        "exact_match": after["exact_match"],
        "loss": after["loss"],
        "base_s": based - began,
        "fine_tuning_s": time.monotonic() - based,
        "load": os.getloadavg()[0],
        "processor": detect().cpu_name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def main() -> None:
    """Run what the file does not hold yet, and write it after every run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=os.environ.get("OUT") or "starter.json")
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--threads", default="1,2")
    given = parser.parse_args()
    out = Path(given.out).absolute()
    runs: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))["runs"] if out.is_file() else []
    runs = [one for one in runs if one["recipe"] == recipe()]  # others say nothing about this one
    there = {(one["seed"], one["threads"]) for one in runs}
    for threads in map(int, given.threads.split(",")):
        for seed in map(int, given.seeds.split(",")):
            if (seed, threads) in there:
                continue
            with tempfile.TemporaryDirectory() as place:
                runs.append(run(seed, threads, Path(place)))
            sys.stdout.write(json.dumps(runs[-1]) + "\n")
            sys.stdout.flush()
            found = [one["exact_match"] for one in runs]
            summary = {"runs": len(runs), "worst": min(found), "median": statistics.median(found), "best": max(found)}
            report = {"machine": detect().as_json(), "versions": versions(), "summary": summary, "runs": runs}
            write_json(out, report)


if __name__ == "__main__":
    main()
