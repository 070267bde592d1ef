"""Published speeds of runs whose settings are published too, what the plan says of them, and its error by class.

`published_speeds.csv` has a row a run (README.md, Speeds); errors are those of the rows held out. `kernels`: `plain`
(PyTorch's and FlashAttention's), `compiled` (torch.compile) or `fused` (Liger, Triton's LoRA, Transformer Engine),
which the plan takes for Liger's. `checkpointing`: all layers, none, or the share of them.
"""

import csv
import functools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sft_play.config.load import config_from_text
from sft_play.config.schema import RunConfig
from sft_play.machine.hardware import parse_hardware
from sft_play.models.config_json import load_config_json
from sft_play.models.shape import ModelShape
from sft_play.planner.layout import Layout
from sft_play.planner.memory.step_memory import Step
from sft_play.planner.precision import Precision
from sft_play.planner.speed import SpeedError, find_rates, find_speed_error, predict_speed
from sft_play.runs.folder import read_json
from sft_play.trace.confirm import load_planned_shape

SPEEDS_FILE = Path(__file__).with_name("published_speeds.csv")
TARGET_PARAMETERS = (6.5e9, 73e9)
"""Parameters of the models of 7B to 70B, as their names round them."""
OTHER_MODELS = read_json(SPEEDS_FILE.with_name("published_speeds_models.json"))
"""Models of published runs that the table of known models lacks."""
PRECISION = Precision("bfloat16", "bfloat16", "")


@functools.cache
def shape(name: str) -> ModelShape:
    return load_planned_shape(OTHER_MODELS.get(name) or load_config_json(name), name=name)


named_hardware = functools.cache(parse_hardware)


@functools.cache
def speed_config(mode: str, rank: str = "", kernels: str = "plain") -> RunConfig:
    """The config of a run of which no more than this matters to its speed."""
    lora = f", lora: {{r: {rank}}}" if rank else ""
    train = {
        "plain": "kernels: none, compile: false", "compiled": "kernels: none, compile: true",
        "fused": "kernels: liger, compile: false",
    }[kernels]  # fmt: skip
    return config_from_text(f"model: {{name: x}}\ntuning: {{mode: {mode}{lora}}}\ntrain: {{{train}}}", name="row")


def read_speed_rows() -> list[dict[str, str]]:
    with SPEEDS_FILE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def row_step(row: Mapping[str, str]) -> Step:
    machine, model = named_hardware(row["machine"]), shape(row["model"])
    gpus, tensor, context = len(machine.gpus), int(row["tensor_parallel"]), int(row["context_parallel"])
    data, name = gpus // (tensor * context), row["layout"]
    shards = {"fsdp": gpus, "fsdp_hybrid": machine.ranks_per_node, "fsdp_tp": data, "fsdp_cp": gpus}
    layout = Layout(name, data, shards.get(name, 1), tensor, context)  # type: ignore[arg-type]
    share = float({"all": "1", "none": "0"}.get(row["checkpointing"], row["checkpointing"]))
    micro, accum, length = (int(row[name]) for name in ("micro_batch", "grad_accum", "seq_len"))
    layers = round(share * model.num_layers)
    return Step(micro, accum, length, layout=layout, checkpointed_layers=layers, casts_inputs=True)


def predict_error(row: Mapping[str, str]) -> SpeedError:
    return find_speed_error(shape(row["model"]), PRECISION, named_hardware(row["machine"]), row_step(row))


def compare_speed(row: Mapping[str, str]) -> dict[str, Any]:
    """Predicted and published tokens per second and GPU of a row, and their quotient."""
    machine, published = named_hardware(row["machine"]), float(row["tokens_per_s_gpu"])
    config = speed_config(row["mode"], row["lora_r"], row["kernels"])
    rates = find_rates(machine, PRECISION)
    speed = predict_speed(config, shape(row["model"]), PRECISION, row_step(row), rates)
    predicted = speed.tokens_per_s / len(machine.gpus)
    return {
        **{name: row[name] for name in ("source", "date", "split", "kernels", "mode")}, "gpus": len(machine.gpus),
        "class": predict_error(row).of, "published": published, "predicted": round(predicted, 1),
        "ratio": predicted / published,
    }  # fmt: skip


def compare_published() -> dict[str, dict[str, Any]]:
    return {row["id"]: compare_speed(row) for row in read_speed_rows()}


def summarize_errors(ratios: Sequence[float]) -> dict[str, float | int]:
    """How many, and median and 90th percentile of how far predictions are from what was published."""
    off = sorted(abs(ratio - 1) for ratio in ratios)
    at = min(len(off) - 1, int(0.9 * len(off)))
    return {"n": len(off), "median": statistics.median(off), "p90": off[at], "ratio": statistics.median(ratios)}


def errors_by_class(comparisons: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float | int]]:
    """The errors of the rows held out, 7B to 70B, by number of GPUs, mode, kernels, source and the plan's class of
    error; `all sources` is the median of the sources' own medians: a long table counts no more than a short one."""
    smallest, largest = TARGET_PARAMETERS
    groups: dict[str, list[float]] = defaultdict(list)
    for row in read_speed_rows():
        one = comparisons[row["id"]]
        if row["split"] != "held out" or not smallest < shape(row["model"]).params < largest:
            continue
        several = "several GPUs" if one["gpus"] > 1 else "one GPU"
        source = f"source {row['id'].split('/')[0]}"
        names = (several, row["mode"], f"{several}, {row['mode']}", f"{row['kernels']} kernels", one["class"], source)
        for name in ("all", *names):
            groups[name].append(one["ratio"])
    errors = {name: summarize_errors(groups[name]) for name in sorted(groups)}
    sources = [error["median"] for name, error in errors.items() if name.startswith("source ")]
    errors["all sources"] = {"n": len(sources), "median": statistics.median(sources), "p90": max(sources)}
    return errors


def shares_within_error(comparisons: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float | int]]:
    """For each class of the plan, how many of the rows held out were measured within its share of the prediction."""
    hits: dict[str, list[bool]] = defaultdict(list)
    for row in read_speed_rows():
        error = predict_error(row)
        if row["split"] == "held out" and error.share is not None:
            hits[error.of].append(abs(1 / comparisons[row["id"]]["ratio"] - 1) <= error.share)
    return {name: {"n": len(matches), "within": sum(matches) / len(matches)} for name, matches in sorted(hits.items())}
