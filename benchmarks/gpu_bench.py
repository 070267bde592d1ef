"""`make bench` on a GPU: 8B and 4B shapes, every mode, 2,048 and 8,192 tokens, mixed chats and full blocks, beside TRL.

    python -m benchmarks.gpu_bench --out gpu_bench.json          # at most 25 minutes; --minutes 60 for more of them
    python -m benchmarks.gpu_bench --only 4b-lora-2048-mixed,4b-full-2048-mixed --minutes 8

Weights are random, of the published shapes, so nothing is downloaded; they take 24 GiB of disk. Each trial is a run of
ours and one of TRL's on the same rows, with our micro-batch for both. The most telling trials come first, or those of
--only in their order; those that the time does not reach are written as such, and the same command goes on with them.
The file is written after every trial, with the predicted peak and speed beside the measured ones.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.random_model import ensure_published_shape
from benchmarks.report_header import report_header
from benchmarks.steps import material
from benchmarks.steps.bench import compare
from sft_play.errors import DoesNotFit
from sft_play.machine.hardware import detect_hardware
from sft_play.runs.files import read_json, write_json

MODELS = {"8b": "Qwen/Qwen3-8B", "4b": "Qwen/Qwen3-4B"}
MODES, LENGTHS, KINDS = ("qlora", "lora", "full"), (2048, 8192), ("mixed", "blocks")
TOKENS_PER_STEP = 32_768
"""Of full rows: 16 rows of 2,048 tokens, 4 of 8,192."""
STEPS, WARMUP = 5, 2
ROWS = (STEPS + WARMUP) * 16
FIRST_S = 240.0
"""A trial is not begun with less time left than the longest so far took, or than this before the first has ended."""


@dataclass(frozen=True)
class Trial:
    """One cell of the table."""

    model: str
    mode: str
    length: int
    kind: str
    compiled: bool = False

    @property
    def name(self) -> str:
        return f"{self.model}-{self.mode}-{self.length}-{self.kind}{'-compiled' if self.compiled else ''}"


def trials() -> list[Trial]:
    """All 24, and two with compiled blocks: first six in which every mode, length, kind and model occurs at least
    twice, then the compiled ones, to be compared with two of these."""
    every = [Trial(*cell) for cell in itertools.product(MODELS, MODES, LENGTHS, KINDS)]
    first = [
        Trial("8b", "lora", 2048, "mixed"), Trial("8b", "qlora", 8192, "blocks"), Trial("4b", "full", 2048, "mixed"),
        Trial("4b", "lora", 8192, "blocks"), Trial("8b", "qlora", 2048, "mixed"), Trial("4b", "full", 8192, "blocks"),
    ]  # fmt: skip
    compiled = [replace(trial, compiled=True) for trial in (first[0], first[5])]
    return [*first, *compiled, *(trial for trial in every if trial not in first)]


def config_of(trial: Trial, folder: Path) -> Path:
    """The run YAML of a trial, and its rows: chats whose median is about a tenth of the length, or full ones."""
    rows = folder / f"{trial.kind}-{trial.length}.jsonl"
    # a word is a token and more
    answer = (trial.length / 12, 1.0) if trial.kind == "mixed" else (2.0 * trial.length, 0.0)
    material.write_chats(rows, ROWS, words_of_answer=answer)
    return material.write_config(
        folder / f"{trial.name}.yaml", model=folder / trial.model, rows=rows, seq_len=trial.length,
        tuning={"mode": trial.mode}, plan={"trace": False},
        train={"effective_batch_size": TOKENS_PER_STEP // trial.length, "compile": trial.compiled},
    )  # fmt: skip


def measured(trial: Trial, folder: Path) -> dict[str, Any]:
    began = time.monotonic()
    try:
        ensure_published_shape(MODELS[trial.model], folder / trial.model)
        config = config_of(trial, folder)
        compared = compare(config, peer="trl", steps=STEPS, warmup=WARMUP, rounds=1, tries=False, progress=_say)
        result = {"status": "measured", **compared.as_json()}
        _say("\n".join(compared.lines()))
    except DoesNotFit as error:
        result = {"status": "does not fit", "reason": str(error)}
    except Exception as error:  # one trial must not end the bench
        logging.getLogger(__name__).warning("%s failed", trial.name, exc_info=True)
        result = {"status": "failed", "reason": str(error) or type(error).__name__}
    return {**result, "seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    """All trials that the time allows; the file is written after each."""
    every = {trial.name: trial for trial in trials()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_bench.json"))
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--only", default=",".join(every), help="these trials, such as 4b-lora-2048-mixed,4b-full-2048")
    options = parser.parse_args()
    names = options.only.split(",")
    unknown = [name for name in names if name not in every]
    if unknown:
        parser.error(f"--only: there is no trial {unknown[0]}; there are: {', '.join(every)}")
    if not detect_hardware().gpus:
        parser.error("gpu_bench needs a GPU, and none is seen here; make bench runs on a CPU")
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("benchmarks.steps").setLevel(logging.INFO)  # the last lines of a side that fails
    began, longest, out = time.monotonic(), FIRST_S, options.out.absolute()
    results: dict[str, Any] = read_json(out).get("trials", {})
    with tempfile.TemporaryDirectory(prefix="sft-play-gpu-bench-") as workdir:
        os.environ["SFT_PLAY_CACHE"] = str(Path(workdir) / "cache")
        for name in names:
            if results.get(name, {}).get("status") == "measured":
                continue
            if time.monotonic() - began + longest > options.minutes * 60:
                results[name] = {"status": "not reached"}
            else:
                _say(f"{name}:")
                results[name] = measured(every[name], Path(workdir))
                longest = max(one["seconds"] for one in results.values() if "seconds" in one)
            write_json(out, {**report_header(), "trials": results})
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
