"""What logging costs: the same training steps with everything measured and written, and with nothing, in turns.

    make -C benchmarks benchmark-logging OUT=logging.json

`on` logs every step to TensorBoard and metrics.jsonl with the monitor's figures; `off` neither measures nor logs. Both
are one process on the machine that is there; they take turns, and the medians of their seconds per step are compared.
`inside` is the time that measuring and writing themselves took, as a share of the steps: on a busy machine the turns
differ by more than the thing measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from datasets import Dataset

from benchmarks.starter_base import make_model, make_tokenizer
from sft_play.config.load import config_from_text
from sft_play.data.build.splits import DataSplit
from sft_play.data.build.stats import RowStats
from sft_play.machine.hardware import detect_hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.runs.files import write_json
from sft_play.runs.folder import RunFolder, installed_versions
from sft_play.training.loop.callbacks import MetricsFile
from sft_play.training.loop.trainer import PlannedTrainer, build_plan_callbacks, build_trainer
from sft_play.training.measure.monitor import MemoryPeaks, Monitor

SEQ_LEN, ROWS, STEPS = 256, 16, 12


class Silent(Monitor):
    """A monitor that measures nothing."""

    def timed_part(self, name: str, *, label: str | None = None) -> Any:
        """No clock."""
        import contextlib

        return contextlib.nullcontext()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    def count_batch(self, inputs: Any, *, ignored_label: int) -> None:
        """Nothing."""

    def add_loss(self, loss: Any, *, step_tokens: Any, ranks: int) -> None:
        """Nothing."""


class Timed(Monitor):
    """A monitor that knows how long it was measured and written for."""

    spent = 0.0

    def count_batch(self, inputs: Any, *, ignored_label: int) -> None:
        """Count, and the time for it."""
        began = time.perf_counter()
        super().count_batch(inputs, ignored_label=ignored_label)
        self.spent += time.perf_counter() - began

    def add_loss(self, loss: Any, *, step_tokens: Any, ranks: int) -> None:
        """Count, and the time for it."""
        began = time.perf_counter()
        super().add_loss(loss, step_tokens=step_tokens, ranks=ranks)
        self.spent += time.perf_counter() - began


def run(on: bool, folder: Path) -> dict[str, float]:
    """Seconds per step, and the share of them that logging took."""
    model_folder = folder / "model"
    tokenizer = make_tokenizer(["the quick brown fox jumps over the lazy dog"] * 50)
    if not model_folder.exists():
        make_model().save_pretrained(model_folder)
    config = config_from_text(
        f"model: {{name: {model_folder}, max_seq_len: {SEQ_LEN}}}\ntuning: {{mode: full}}\n"
        "data: {val_path: null, test_path: null}\n"
        f"train: {{batch_size: {ROWS}, effective_batch_size: {ROWS}, max_steps: {STEPS}, save_steps: 1000, "
        f"logging_steps: {1 if on else 1000}, report_to: {'[tensorboard]' if on else '[]'}}}\neval: {{steps: 0}}\n",
        name="logging",
    )
    hardware = detect_hardware()
    plan = make_plan(PlanRequest(config, load_model_shape(str(model_folder)), hardware, allowed_layouts=("single",)))
    ids = [7 + index % 50 for index in range(SEQ_LEN)]
    rows = Dataset.from_dict({"input_ids": [ids] * (ROWS * STEPS), "labels": [ids] * (ROWS * STEPS)})
    with tempfile.TemporaryDirectory() as workdir:
        run_folder = RunFolder(Path(workdir) / "run")
        run_folder.path.mkdir()
        kind = Timed if on else Silent
        monitor = kind(plan, peaks=MemoryPeaks(on_gpu=bool(hardware.gpus)))
        trainer = build_trainer(
            config, plan, run_folder, model=make_model(), tokenizer=tokenizer, peft_config=None,
            train_split=DataSplit(rows, RowStats("random", "text")), eval_split=None, monitor=monitor,
        )  # fmt: skip
        writing = [MetricsFile(run_folder.metrics_path, start_time=time.time())] if on else []
        for callback in (*writing, *build_plan_callbacks(config, plan, run_folder, trainer)):
            trainer.add_callback(callback)
        from transformers.trainer_utils import SaveStrategy

        trainer.args.save_strategy = SaveStrategy.NO  # writing a checkpoint takes longer than what is measured
        spent = _timed_log(trainer)
        began = time.perf_counter()
        trainer.train()
        whole = time.perf_counter() - began
    inside = (spent() + (monitor.spent if isinstance(monitor, Timed) else 0.0)) / whole
    return {"seconds_per_step": whole / STEPS, "inside": inside if on else 0.0}


def _timed_log(trainer: PlannedTrainer) -> Any:
    """Time what happens inside the trainer's `log`."""
    seconds = 0.0
    real = trainer.log

    def log(*args: Any, **options: Any) -> None:
        nonlocal seconds
        began = time.perf_counter()
        real(*args, **options)
        seconds += time.perf_counter() - began

    trainer.log = log  # type: ignore[method-assign]
    return lambda: seconds


def main() -> None:
    """Run both in turns and write the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=os.environ.get("OUT") or "logging.json")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {"on": [], "off": []}
    with tempfile.TemporaryDirectory() as workdir:
        run(True, Path(workdir))  # warms up
        for turn in range(options.turns):
            for name in ("on", "off") if turn % 2 else ("off", "on"):
                runs[name].append(run(name == "on", Path(workdir)))
                sys.stdout.write(f"{name}: {json.dumps(runs[name][-1])}\n")
    on, off = (statistics.median(one["seconds_per_step"] for one in runs[name]) for name in ("on", "off"))
    write_json(
        Path(options.out).absolute(),
        {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": detect_hardware().as_json(),
            "versions": installed_versions(),
            "runs": runs,
            "ratios": {"on/off": on / off, "inside": statistics.median(one["inside"] for one in runs["on"])},
        },
    )


if __name__ == "__main__":
    main()
