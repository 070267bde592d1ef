"""The figures of docs/bench.md that a CPU can give, in about ten minutes on two quiet cores.

    python -m benchmarks.steps.cpu --out benchmarks/bench_cpu.json        # --only bare,trl: some of them

A model of random weights and chats of mixed lengths are made first (`material`), then `make bench` compares, on one
thread a process: the bare loop on equal batches, TRL's trainer on padded rows and on packed ones, and `trl sft` from
start to end with 100 steps; with `--rows FILE` TRL's trainer on rows of your own, 8 a step (GSM8K's train.jsonl in
bench_cpu.json). The file is written after each.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.steps import material
from benchmarks.steps.bench import compare
from sft_play.runs.files import write_json

SEQ_LEN, ROWS = 512, 2000
PACKED: dict[str, dict[str, Any]] = {"data": {"packing": "best_fit"}, "train": {"effective_batch_size": 8}}
"""Eight rows of 512 tokens hold about as many chats as 32 rows without packing."""


@dataclass(frozen=True)
class MeasuredPeer:
    """A comparison: its peer, how long it runs, and the settings that differ from those of `material`."""

    peer: str
    steps: int
    warmup: int
    rounds: int
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)


EVERY = {
    "bare": MeasuredPeer("bare", steps=8, warmup=2, rounds=3),
    "trl": MeasuredPeer("trl", steps=7, warmup=1, rounds=2),
    "trl-packed": MeasuredPeer("trl", steps=7, warmup=1, rounds=2, sections=PACKED),
    "trl-cli": MeasuredPeer("trl-cli", steps=99, warmup=1, rounds=2, sections={"train": {"effective_batch_size": 4}}),
    "rows": MeasuredPeer("trl", steps=30, warmup=2, rounds=2, sections={"train": {"effective_batch_size": 8}}),
}
"""Every comparison by its name in the file."""


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "bench_cpu.json"))
    parser.add_argument("--only", default=",".join(EVERY), help="names with commas")
    parser.add_argument("--rows", type=Path, help="a JSONL file, for the comparison named rows")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="sft-play-bench-cpu-") as workdir:
        folder = Path(workdir)
        os.environ["SFT_PLAY_CACHE"] = str(folder / "cache")  # no earlier run's tokens or speeds
        material.write_model(folder / "model")
        material.write_chats(folder / "chats.jsonl", ROWS)
        for name in options.only.split(","):
            one, rows = EVERY[name], options.rows.absolute() if options.rows else None
            if name == "rows" and rows is None:
                continue
            config = material.write_config(
                folder / f"{name}.yaml", model=folder / "model", seq_len=SEQ_LEN,
                rows=rows if rows and name == "rows" else folder / "chats.jsonl", **one.sections,
            )  # fmt: skip
            compared = compare(
                config, peer=one.peer, steps=one.steps, warmup=one.warmup, rounds=one.rounds, progress=_say
            )
            _say("\n".join(compared.lines()))
            results[name] = compared.as_json()
            write_json(options.out.absolute(), results)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
