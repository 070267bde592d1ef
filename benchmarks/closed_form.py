"""The estimate of the plan against the trace of the real step, on a fixed sample of settings.

    python -m benchmarks.closed_form --configs FOLDER --out closed_form.json

FOLDER holds one folder with a config.json for each model. Nothing is downloaded, no GPU is needed. A row of OUT is
traced once: start again to continue; the estimate is always computed anew. Sizes are allocated bytes on one rank.
"""

import argparse
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import benchmarks.memory_model.closed  # noqa: F401  (which adds the loss of other scripts)
from benchmarks.report_header import report_header
from sft_play.config.load import config_from_text
from sft_play.config.schema import RunConfig
from sft_play.models.config_json import parse_model_shape
from sft_play.planner.kernels import AttentionName
from sft_play.planner.layout import SINGLE, Layout
from sft_play.planner.memory.estimate import MemoryEstimate, estimate_memory
from sft_play.planner.memory.step_memory import Step
from sft_play.planner.precision import Precision
from sft_play.runs.folder import write_json
from sft_play.trace.confirm import step_settings
from sft_play.trace.settings import StepSettings

BF16 = Precision("bfloat16", "bfloat16", "")
FP32_MASTERS = Precision("bfloat16", "float32", "")

SAMPLE = Path(__file__).with_name("closed_form_sample.txt")


@dataclass(frozen=True)
class SampleSetting:
    """One row of the sample, as the plan's words."""

    model: str
    config: RunConfig
    step: Step
    precision: Precision


def sample_settings() -> dict[str, SampleSetting]:
    lines = SAMPLE.read_text(encoding="utf-8").splitlines()
    return {line: parse_setting(line) for line in lines if not line.startswith("#")}


def parse_setting(line: str) -> SampleSetting:
    """What one line of the sample means."""
    model, mode, length, rows, *options_text = line.split()
    options = dict(word.partition("=")[::2] for word in options_text)
    targets = options.get("targets")
    lora = {
        "dtype": "bfloat16" if "bf16_adapters" in options else "auto", "r": int(options.get("rank", 16)),
        "dropout": float(options.get("dropout", 0)), "use_dora": "dora" in options,
        "target_modules": targets.split(",") if targets else "auto",
        "target_parameters": "auto" if "experts" in options else [],
    }  # fmt: skip
    kernels = "liger" if "liger" in options else "none"
    settings = {
        "model": {"name": model, "max_seq_len": int(length)},
        "tuning": {"mode": mode, "lora": lora},
        "train": {"optim": options.get("optim", "adamw_torch_fused"), "kernels": kernels},
    }
    config = config_from_text(json.dumps(settings), name=line)
    layout = SINGLE
    if "fsdp" in options:
        layout = Layout("fsdp", int(options["fsdp"]), int(options["fsdp"]))
    elif "ddp" in options:
        layout = Layout("ddp", int(options["ddp"]))
    attention: AttentionName = "flash_attention_2" if "flash" in options else "sdpa"
    checkpointed_layers = int(options["some"]) if "some" in options else None
    step = Step(
        int(rows), int(options.get("accum", 1)), int(length), layout=layout,
        checkpointed_layers=0 if "off" in options else checkpointed_layers,
        loss="model" if options.get("loss") == "logits" else "chunked",
        attention="eager" if "eager" in options else attention, padded="padded" in options, varlen="apart" in options,
        one_by_one="apart" in options, capability=(7, 5) if "apart" in options else (9, 0),
        eval_batch=int(options.get("eval", 0)),
    )  # fmt: skip
    return SampleSetting(model, config, step, FP32_MASTERS if "masters" in options else BF16)


def predict_memory(setting: SampleSetting, model: Mapping[str, Any]) -> MemoryEstimate:
    shape = parse_model_shape(dict(model), name=setting.model)
    return estimate_memory(setting.config, shape, setting.precision, setting.step)


def trace_settings(setting: SampleSetting, model: Mapping[str, Any]) -> StepSettings:
    """The same step in the words of the plan's own trace."""
    shape = parse_model_shape(dict(model), name=setting.model)
    return step_settings(setting.config, model, shape, setting.precision, setting.step)


def compare_setting(
    setting: SampleSetting, model: Mapping[str, Any], earlier: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Both answers; the trace's from an earlier row where there is one."""
    from benchmarks.memory_model import liger  # noqa: F401  (which lets the tracer run them)
    from sft_play.trace.confirm import cached_trace

    closed = predict_memory(setting, model)
    row: dict[str, Any] = {"closed_allocated": closed.allocated, "closed_reserved": closed.reserved}
    row |= {"moment": closed.moment, "moments": closed.moments}
    if earlier is not None:
        return row | {name: earlier[name] for name in ("traced_allocated", "traced_reserved", "phases")}
    peak = cached_trace(trace_settings(setting, model))
    phases = {name: peaks[0] for name, peaks in peak.phases.items()}
    return row | {"traced_allocated": peak.allocated, "traced_reserved": peak.reserved, "phases": phases}


def summarize_ratios(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Estimate over trace for each row, and the spread: one GPU and FSDP2 apart."""
    ratios = {name: round(run["closed_allocated"] / run["traced_allocated"], 4) for name, run in runs.items()}
    groups: dict[str, list[float]] = {"one_gpu": [], "fsdp2": [], "ddp": []}
    for name, ratio in ratios.items():
        group = "ddp" if "ddp=" in name else "one_gpu"
        groups["fsdp2" if "fsdp=" in name else group].append(abs(ratio - 1))
    errors = {
        group: {"rows": len(found), "median": round(statistics.median(found), 4), "worst": round(max(found), 4)}
        for group, found in groups.items()
        if found
    }
    return {"ratios": ratios, "error": errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", type=Path, required=True, help="folder of folders with a config.json")
    parser.add_argument("--out", type=Path, default=Path("closed_form.json"))
    options = parser.parse_args()
    done: dict[str, Any] = json.loads(options.out.read_text())["runs"] if options.out.exists() else {}
    for name, setting in sample_settings().items():
        model = json.loads((options.configs / setting.model / "config.json").read_text(encoding="utf-8"))
        done[name] = compare_setting(setting, model, done.get(name))
        ratio = done[name]["closed_allocated"] / done[name]["traced_allocated"]
        print(f"{ratio:8.4f}  {done[name]['moment']:10}  {name}", flush=True)
        write_json(options.out, {**report_header(), **summarize_ratios(done), "runs": done})
    print(json.dumps(summarize_ratios(done)["error"], indent=1))


if __name__ == "__main__":
    main()
