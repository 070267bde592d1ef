"""Predicted against measured peak memory and speed of real training steps, one row at a time.

    make -C benchmarks benchmark OUT=peaks.json             # on a GPU: 1B to 27B shapes; continues where it stopped
    make -C benchmarks benchmark OUT=peaks.json SMALL=1     # on any CPU: a 2M shape, to see that it runs

Every row is predicted first, by the estimate and by the trace, and written; then it is measured in a process of
its own with this toolkit's trainer on random weights of the published shapes, and written again. Nothing is
downloaded. `auto` rows take the micro-batch that the plan chooses, and must not run out of memory; rows with twice
that size, where the plan said that it does not fit, show whether the plan was too shy.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import resource
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from sft_play.config.load import config_from_text
from sft_play.config.schema import RunConfig
from sft_play.machine.hardware import Hardware, detect_hardware
from sft_play.models.config_json import KNOWN_MODELS, load_model_shape
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.plan import Plan
from sft_play.process.signals import die_with_parent
from sft_play.runs.files import write_json
from sft_play.runs.folder import RunFolder, installed_versions

LARGE = ("meta-llama/Llama-3.2-1B", "Qwen/Qwen3-4B", "meta-llama/Llama-3.1-8B", "google/gemma-3-27b-it")
SMALL = ("sft-play/starter-base",)
STEPS = 3
WORDS = "the quick brown fox jumps over the lazy dog and runs into the dark forest again".split()  # noqa: SIM905


@dataclasses.dataclass(frozen=True)
class Row:
    """One setting: `micro_batch` 0 leaves it to the plan, -1 takes twice what the plan chose."""

    model: str
    mode: str
    seq_len: int
    micro_batch: int
    checkpointing: bool | str

    @property
    def name(self) -> str:
        """The row's name in the results."""
        size = {0: "auto", -1: "twice-auto"}.get(self.micro_batch, str(self.micro_batch))
        return f"{self.model} {self.mode} {size}x{self.seq_len} checkpointing={self.checkpointing}"


def grid(small: bool) -> list[Row]:
    """The fixed list of rows."""
    if small:
        rows = [Row(SMALL[0], mode, 128, 4, on) for mode in ("qlora", "lora", "full") for on in (True, False)]
        return [*rows, Row(SMALL[0], "qlora", 128, 0, "auto")]
    rows = []
    for model, mode in itertools.product(LARGE, ("qlora", "lora", "full")):
        if model == LARGE[3] and mode == "full":
            continue  # 27 billion weights, gradients and states need more than one GPU
        for seq_len, micro, on in ((512, 4, True), (2048, 1, False), (2048, 4, True), (8192, 1, True)):
            if model == LARGE[3] and not on:
                continue
            rows.append(Row(model, mode, seq_len, micro, on))
        rows += [Row(model, mode, 2048, 0, "auto"), Row(model, mode, 2048, -1, "auto")]
    return rows + [Row(model, "qlora", 512, 16, True) for model in LARGE[:3]]


def model_folder(name: str, scratch: Path) -> Path:
    """A folder with the model's config.json and a small tokenizer, without weights."""
    from benchmarks.starter_base import make_tokenizer

    path = scratch / name.replace("/", "--")
    if not path.exists():
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(KNOWN_MODELS[name].config), encoding="utf-8")
        make_tokenizer([" ".join(WORDS)] * 50).save_pretrained(path)
    return path


def config_of(row: Row, scratch: Path, micro_batch: int) -> RunConfig:
    """The run that a row stands for: packed rows of full length, no evaluation."""
    batch = f"batch_size: {micro_batch}, effective_batch_size: {2 * micro_batch}, " if micro_batch else ""
    return config_from_text(
        f"model: {{name: {model_folder(row.model, scratch)}, max_seq_len: {row.seq_len}}}\ntask_mode: cpt\n"
        f"tuning: {{mode: {row.mode}}}\ndata: {{val_path: null, test_path: null}}\n"
        f"train: {{{batch}max_steps: {STEPS}, report_to: [], save_steps: 1000, "
        f"gradient_checkpointing: {str(row.checkpointing).lower()}}}\neval: {{steps: 0}}\n",
        name="row",
    )


def planned(row: Row, scratch: Path, hardware: Hardware) -> tuple[RunConfig, Plan]:
    """The row's config and plan."""
    micro = row.micro_batch
    if micro < 0:
        micro = 2 * planned(dataclasses.replace(row, micro_batch=0), scratch, hardware)[1].batch.micro_batch
    config = config_of(row, scratch, micro)
    shape = load_model_shape(config.model.name)
    return config, make_plan(PlanRequest(config, shape, hardware, allowed_layouts=("single",), has_eval=False))


def predict(row: Row, scratch: Path, hardware: Hardware) -> dict[str, Any]:
    """What estimate and trace say of the row, in bytes."""
    from sft_play.models.config_json import load_config_json
    from sft_play.trace.confirm import cached_trace, step_settings
    from sft_play.trace.settings import TraceUnavailable

    config, plan = planned(row, scratch, hardware)
    prediction: dict[str, Any] = {
        "micro_batch": plan.batch.micro_batch,
        "grad_accum": plan.batch.grad_accum,
        "checkpointed_layers": plan.choice.checkpointed_layers,
        "fits": plan.fits,
        "allocated": plan.memory.allocated,
        "reserved": plan.memory.reserved,
        "required": plan.memory.required,
        "tokens_per_s": plan.speed.tokens_per_s if plan.speed_known else None,
    }
    if not hardware.gpus:
        return prediction
    settings = step_settings(
        config,
        load_config_json(config.model.name),
        load_model_shape(config.model.name),
        plan.precision,
        plan.choice.step,
    )
    try:
        traced = cached_trace(settings)
    except TraceUnavailable as error:
        return {**prediction, "trace": str(error)}
    return {**prediction, "traced_allocated": traced.allocated, "traced_reserved": traced.reserved}


def random_model(config: RunConfig, plan: Plan, model_spec: Any) -> Any:
    """The model on the run's device with random weights, quantised where the mode says so."""
    import torch
    from transformers import AutoModelForCausalLM

    from sft_play.training.model.model_loading import TORCH_DTYPES, keep_4bit_trainable

    device = torch.device(plan.hardware.device)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            model_spec.hf_config, dtype=TORCH_DTYPES[plan.precision.load], attn_implementation=model_spec.attention.name
        )
    if config.tuning.mode == "qlora":
        quantise(model, config, plan)
    keep_4bit_trainable(model)
    model.config.use_cache = False
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return model


def quantise(model: Any, config: RunConfig, plan: Plan) -> None:
    """Every linear layer but the head in NF4, one at a time, marked as transformers marks it."""
    import bitsandbytes as bnb
    from torch import nn
    from transformers.quantizers import AutoHfQuantizer
    from transformers.utils.quantization_config import QuantizationMethod

    from sft_play.training.model.model_loading import TORCH_DTYPES, quantization_config

    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):  # a list: children are replaced while it is walked
            if type(child) is not nn.Linear or child is head:
                continue
            new = bnb.nn.Linear4bit(
                child.in_features, child.out_features, child.bias is not None, device="meta",
                compute_dtype=TORCH_DTYPES[plan.precision.compute], quant_type="nf4",
            )  # fmt: skip
            weight = child.weight.data
            new.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=new).to(weight.device)
            new.bias = child.bias
            setattr(module, name, new)
    model.requires_grad_(False)
    model.is_loaded_in_4bit, model.is_quantized = True, True
    model.quantization_method = QuantizationMethod.BITS_AND_BYTES
    model.hf_quantizer = AutoHfQuantizer.from_config(quantization_config(plan.precision), pre_quantized=False)


def measure(row: Row, scratch: Path, hardware: Hardware) -> dict[str, Any]:
    """Peak bytes and tokens per second of the row's steps; an out-of-memory error is a result.

    On a CPU `reserved` is resident memory above the level after the imports.
    """
    import torch

    from sft_play.training.prepare.model_spec import build_model_spec
    from sft_play.training.prepare.tokenizer import load_tokenizer

    level = psutil.Process().memory_info().rss
    config, plan = planned(row, scratch, hardware)
    tokenizer = load_tokenizer(config)
    model_spec = build_model_spec(config, plan.precision, tokenizer_size=len(tokenizer.tokenizer))
    on_gpu = bool(hardware.gpus)
    try:
        model = random_model(config, plan, model_spec)
        seconds, counted = steps_of(row, config, plan, model_spec, model, tokenizer.tokenizer)
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error).splitlines()[0]}
    tokens = counted * plan.batch.effective_batch * row.seq_len
    found: dict[str, Any] = {"tokens_per_s": round(tokens / seconds, 1)}
    if on_gpu:
        free, total = torch.cuda.mem_get_info()
        found["allocated"] = torch.cuda.max_memory_allocated()
        found["reserved"] = torch.cuda.max_memory_reserved()
        found["outside_allocator"] = total - free - torch.cuda.memory_reserved()
    else:
        unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes on macOS, KiB elsewhere
        found["reserved"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - level
    return found


def steps_of(row: Row, config: RunConfig, plan: Plan, model_spec: Any, model: Any, tokenizer: Any) -> tuple[float, int]:
    """Runs the steps; returns the seconds and number of those after the first."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from transformers.trainer_utils import SaveStrategy

    from sft_play.data.build.splits import DataSplit
    from sft_play.data.build.stats import RowStats
    from sft_play.training.loop.trainer import build_plan_callbacks, build_trainer

    times: list[float] = []

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            settle()
            times.append(time.perf_counter())

    ids = [7 + index % 50 for index in range(row.seq_len)]
    row_count = plan.batch.effective_batch * STEPS
    rows = Dataset.from_dict({"input_ids": [ids] * row_count, "labels": [ids] * row_count})
    with tempfile.TemporaryDirectory() as folder:
        run_folder = RunFolder(Path(folder) / "run")
        trainer = build_trainer(
            config,
            plan,
            run_folder,
            model=model,
            tokenizer=tokenizer,
            peft_config=model_spec.peft_config,
            train_split=DataSplit(rows, RowStats("random", "text")),
            eval_split=None,
        )
        for callback in (Watch(), *build_plan_callbacks(config, plan, run_folder, trainer)):
            trainer.add_callback(callback)
        trainer.args.save_strategy = SaveStrategy.NO  # the last step would write gigabytes
        reset_peak()
        trainer.train()
    return times[-1] - times[0], len(times) - 1


def settle() -> None:
    """Wait until the GPU is done."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def reset_peak() -> None:
    """Count from here."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def in_child(work: Any, *args: Any) -> dict[str, Any]:
    """Runs `work` in a forked process, so that no row leaves memory to the next; what breaks is an `error`."""
    read, write = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        die_with_parent(parent, signal.SIGKILL)
        os.close(read)
        try:
            answer = work(*args)
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:300], "where": traceback.format_exc()[-600:]}
        with os.fdopen(write, "w") as pipe:
            pipe.write(json.dumps(answer))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"error": f"the process ended with status {status}"}


def ratios(runs: dict[str, Any]) -> dict[str, Any]:
    """Predicted over measured for each row that has both, and their spread."""
    found: dict[str, Any] = {}
    for name, run in runs.items():
        measured, predicted = run.get("measured", {}), run.get("predicted", {})
        for kind in ("allocated", "reserved", "tokens_per_s"):
            for key in (kind, f"traced_{kind}"):
                if measured.get(kind) and predicted.get(key):
                    found.setdefault(key, {})[name] = round(predicted[key] / measured[kind], 4)
    options = {
        label: {
            "median": statistics.median(values.values()),
            "least": min(values.values()),
            "most": max(values.values()),
        }
        for label, values in found.items()
    }
    return {"spread": options, **found}


def write(path: Path, hardware: Hardware, runs: dict[str, Any]) -> None:
    """The results so far."""
    report = {"machine": hardware.as_json(), "versions": installed_versions(), "runs": runs, "ratios": ratios(runs)}
    write_json(path, {"date": datetime.now(UTC).isoformat(timespec="seconds"), **report})


def tasks(rows: list[Row], runs: dict[str, Any]) -> Iterator[tuple[Row, str]]:
    """Predictions first, then measurements, of what is missing."""
    for kind in ("predicted", "measured"):
        for row in rows:
            if kind not in runs.get(row.name, {}):
                yield row, kind


def main() -> int:
    """Run what is missing, writing after each row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", default=os.environ.get("SMALL", "") not in ("", "0"))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "predicted_peak.json"))
    options = parser.parse_args()
    runs: dict[str, Any] = json.loads(options.out.read_text())["runs"] if options.out.exists() else {}
    hardware = detect_hardware().limit_gpus(1)
    import sft_play.trace.step
    import sft_play.training.loop.trainer  # noqa: F401  (imported once, before the forks)

    with tempfile.TemporaryDirectory() as scratch:
        for row, kind in tasks(grid(options.small), runs):
            if kind == "measured" and row.micro_batch < 0 and runs[row.name]["predicted"].get("fits", True):
                continue  # the plan said that it fits: nothing to learn of its shyness
            model_folder(row.model, Path(scratch))
            answer = in_child(predict if kind == "predicted" else measure, row, Path(scratch), hardware)
            runs.setdefault(row.name, {})[kind] = answer
            sys.stdout.write(f"{kind} {row.name}: {json.dumps(answer)}\n")
            sys.stdout.flush()
            write(options.out, hardware, runs)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
