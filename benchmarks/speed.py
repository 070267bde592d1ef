"""The roofline against published speeds of fine-tuning runs, in a table and a JSON file.

    make -C benchmarks benchmark-speed PEAKS=published_peaks.csv OUT=speed.json

Beside published_speeds.py, scaling.py and long_rows.py, the rows of PEAKS that say enough, as ratios to be looked at by
source: published scripts differ in kernels, versions and data.
"""

import csv
import json
import os
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks import published_speeds
from benchmarks.long_rows import long_rows
from benchmarks.report_header import report_header
from benchmarks.scaling import SCALING_POINTS, compare_scaling
from sft_play.errors import SftPlayError
from sft_play.machine.hardware import parse_hardware
from sft_play.models.config_json import KNOWN_MODELS
from sft_play.planner.kernels import AttentionName
from sft_play.planner.layout import SINGLE, Layout
from sft_play.planner.memory.step_memory import Step
from sft_play.planner.precision import Precision
from sft_play.planner.speed import find_rates, predict_speed
from sft_play.runs.folder import write_json

MODES, STRATEGIES = {"full", "lora", "qlora"}, {"single", "fsdp", "fsdp2"}


def predicted(row: dict[str, str]) -> float | None:
    """Tokens per second per GPU of a published row; None where the row says too little."""
    if row["mode"] not in MODES or row["strategy"] not in STRATEGIES or row["model"] not in KNOWN_MODELS:
        return None
    try:
        micro, length, count = int(row["micro_batch"]), int(row["seq_len"]), int(row["n_gpus"])
        hardware = parse_hardware(f"{count}x{row['gpu']}")
        shape = published_speeds.shape(row["model"])
    except (ValueError, SftPlayError):
        return None
    config = published_speeds.speed_config(row["mode"], row["lora_r"] if row["lora_r"].isdigit() else "16")
    half = "float16" if "16" in row["compute_dtype"] and "b" not in row["compute_dtype"] else "bfloat16"
    precision = Precision(half, half, "")  # type: ignore[arg-type]
    layout = SINGLE if count == 1 else Layout("fsdp", count, count)
    layers = None if row["gradient_checkpointing"] in ("full", "true", "yes") else 0
    attention: AttentionName = "eager" if row["attention"] == "eager" else "sdpa"
    step = Step(micro, 1, length, layout=layout, checkpointed_layers=layers, casts_inputs=True, attention=attention)
    return predict_speed(config, shape, precision, step, find_rates(hardware, precision)).tokens_per_s / count


def score(path: Path) -> dict[str, Any]:
    """Predicted over published speed of every row that can be predicted."""
    runs: dict[str, Any] = {}
    with path.open(encoding="utf-8-sig", newline="") as file:
        for row in csv.DictReader(file):
            speed = predicted(row) if row["tokens_per_s"] else None
            if speed is not None:
                measured = float(row["tokens_per_s"])
                group = f"{row['id'].split('/')[0]} {row['gpu']} {row['n_gpus']} {row['mode']}"
                run = {"group": group, "predicted": round(speed, 1), "published": measured}
                runs[row["id"]] = run | {"ratio": speed / measured}
    return runs


def main() -> None:
    """Print the errors of speeds held out, the table by source, GPU and mode, then how runs scale with GPUs, and write
    the file."""
    rows = published_speeds.compare_published()
    classes, within = published_speeds.errors_by_class(rows), published_speeds.shares_within_error(rows)
    sys.stdout.write("Held out, 7B to 70B: median and 90th percentile of how far predictions are off\n")
    for name, error in classes.items():
        sys.stdout.write(f"{name:45s} {error['n']:4d} {error['median']:6.1%} {error['p90']:6.1%}\n")
    for name, hit in within.items():
        sys.stdout.write(f"{name:45s} {hit['n']:4d} within the plan's error: {hit['within']:.0%}\n")
    runs = score(Path(os.environ["PEAKS"])) if os.environ.get("PEAKS") else {}
    groups: dict[str, list[float]] = defaultdict(list)
    for run in runs.values():
        groups[run["group"]].append(run["ratio"])
    ratios = {
        group: {"n": len(found), "median": statistics.median(found), "least": min(found), "most": max(found)}
        for group, found in sorted(groups.items())
    }
    for group, found in ratios.items():
        sys.stdout.write(f"{group:60s} {json.dumps({key: round(value, 2) for key, value in found.items()})}\n")
    scaled = {point.name: compare_scaling(point) for point in SCALING_POINTS}
    for name, found in scaled.items():
        sys.stdout.write(f"{name:90s} {found['published']:.2f}x published, {found['predicted']:.2f}x predicted\n")
    off = sorted(abs(found["ratio"] - 1) for found in scaled.values())
    sys.stdout.write(f"scaling, {len(off)} points: median error {statistics.median(off):.1%}, largest {off[-1]:.1%}\n")
    shared = long_rows()
    for name, found in shared.items():
        sys.stdout.write("{:90s} {published_s:.0f} s published, {predicted_s:.0f} s predicted\n".format(name, **found))
    if os.environ.get("OUT"):
        report = {**report_header(), "held_out": classes, "within": within, "published": rows, "runs": runs}
        write_json(Path(os.environ["OUT"]), {**report, "ratios": ratios, "scaling": scaled, "long_rows": shared})


if __name__ == "__main__":
    main()
