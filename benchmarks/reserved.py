"""What the caching allocator reserves beyond what tensors hold: steps whose rows change their length, replayed.

    python -m benchmarks.reserved --configs FOLDER --out reserved.json

FOLDER holds one folder with a config.json for each model. Nothing is downloaded, no GPU is needed. A row is done once:
start again to continue. A share is (bytes - allocated) / (allocated - what stays between steps), of one rank.
`reserved` is that of a card without a limit; `needed` that of the smallest card on which the same steps go through,
since the allocator gives whole free segments back before it fails; `expandable` that of a card without a limit with
expandable segments. Steps of one length are in closed_form.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.closed_form import SampleSetting, parse_setting, predict_memory, trace_settings
from benchmarks.memory_model.script_settings import to_script_settings
from benchmarks.memory_model.streams import SimulatedOutOfMemory, replay
from sft_play.machine.hardware import detect_hardware
from sft_play.runs.files import write_json
from sft_play.runs.folder import installed_versions
from sft_play.trace.storages import Event

LENGTHS = (0.45, 1.0, 0.6, 1.0)
"""Longest rows of four batches over the longest of all: rows that are padded to the longest of their batch."""
LAYERS = 4
"""Layers of each model, of the kind that it begins with: more take longer and repeat the same sizes."""
CAP_PRECISION = 16 << 20
"""Bytes to which `needed` is found."""

RESERVED_SAMPLE = """
SmolLM2-135M-Instruct qlora 2048 4 padded
Llama-3.2-1B lora 2048 2 padded
Llama-3.2-1B qlora 2048 4 padded
TinyLlama-1.1B-Chat-v1.0 qlora 1024 4 eager padded
Llama-3.2-1B full 2048 2 padded
Qwen2.5-0.5B lora 2048 2 off padded
Qwen2.5-3B qlora 2048 2 padded
Llama-3.1-8B qlora 2048 2 padded
"""
"""Rows in the words of benchmarks/closed_form.py."""


def required_cap(events: list[Event], allocated: int, reserved: int) -> int:
    """Bytes of the smallest card on which the events go through, between these two."""
    low, high = allocated, reserved  # below the one nothing fits, and on the other the steps did go through
    while high - low > CAP_PRECISION:
        middle = (low + high) // 2
        try:
            replay(events, capacity=middle)
            high = middle
        except SimulatedOutOfMemory:
            low = middle
    return high


def replay_setting(setting: SampleSetting, model: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes of the steps' replay, and both shares."""
    from benchmarks.memory_model import old_scripts  # noqa: F401  (which lets the tracer run it)
    from sft_play.trace.step import record_step

    settings = trace_settings(setting, model)
    lengths = tuple(int(settings.seq_len * share) for share in LENGTHS)
    log = record_step(to_script_settings(settings, lengths=lengths, optimizer_steps=len(lengths)))
    peaks = replay(log.events)
    least = required_cap(log.events, peaks.allocated, peaks.reserved)
    passing = max(1, peaks.allocated - predict_memory(setting, model).resident)
    expandable = replay(log.events, expandable_segments=True).reserved
    result = {"allocated": peaks.allocated, "reserved": peaks.reserved, "needed": least, "expandable": expandable}
    names = ("reserved", "needed", "expandable")
    shares = {f"{name}_share": round((result[name] - peaks.allocated) / passing, 4) for name in names}
    return {**result, **shares}


def main() -> int:
    """Do what is missing, writing after each row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", type=Path, required=True, help="folder of folders with a config.json")
    parser.add_argument("--out", type=Path, default=Path("reserved.json"))
    options = parser.parse_args()
    done: dict[str, Any] = json.loads(options.out.read_text())["runs"] if options.out.exists() else {}
    for line in (line for line in RESERVED_SAMPLE.strip().splitlines() if line not in done):
        setting = parse_setting(line)
        model = json.loads((options.configs / setting.model / "config.json").read_text(encoding="utf-8"))
        model["num_hidden_layers"] = LAYERS
        done[line] = replay_setting(setting, model)
        sys.stdout.write(
            f"{done[line]['reserved_share']:7.3f} {done[line]['needed_share']:7.3f} "
            f"{done[line]['expandable_share']:7.3f}  {line}\n"
        )
        sys.stdout.flush()
        report = {
            "machine": detect_hardware().as_json(),
            "versions": installed_versions(),
            "layers": LAYERS,
            "lengths": LENGTHS,
        }
        write_json(options.out, {"date": datetime.now(UTC).isoformat(timespec="seconds"), **report, "runs": done})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
