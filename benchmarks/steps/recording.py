"""What every side of a comparison counts and times in the same way: tokens, losses, seconds, memory.

It imports nothing of this project, so that a peer's own environment can run it.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

IGNORED = -100
"""The label of a token that is not trained."""


class MeasurementDone(BaseException):
    """The last measured step is over, and the result is written: nothing more of this run is needed.

    No `Exception`, so that no trainer takes it for a failure of its own.
    """


class Recorder:
    """Keeps what was trained on, and measures the steps after the warm-up.

    Batches are kept as they come and counted afterwards, so that counting takes no time of either side.
    """

    def __init__(self, result: Path, *, warmup: int, steps: int, pad_id: int, facts: dict[str, Any]) -> None:
        """`result`: the JSON file that is written at the end; `facts` are added to it."""
        self._result, self._facts = result, facts
        self._warmup, self._steps, self._pad_id = warmup, steps, pad_id
        self._on_gpu = torch.cuda.is_available() and os.environ.get("CUDA_VISIBLE_DEVICES") != "-1"
        self._batches: list[dict[str, Any]] = []
        self._losses: list[Any] = []
        self._bounds: list[int] = [0]
        self._times: list[float] = []
        self._cpu_s = self._first_cpu_s = 0.0
        self.on_window: Callable[[bool], Any] = lambda begins: None
        """Called with True when measuring begins, with False when it ends; what it returns at the end is added."""

    @property
    def wanted_steps(self) -> int:
        return self._warmup + self._steps

    def saw(self, inputs: Any, loss: Any) -> None:
        """A micro-batch and its loss: its trained tokens' sum over the trained tokens of the whole step."""
        names = ("input_ids", "labels", "attention_mask", "position_ids")
        self._batches.append({name: inputs[name] for name in names if inputs.get(name) is not None})
        self._losses.append(loss.detach())

    def ended_step(self) -> None:
        """An optimizer step is over; raises MeasurementDone after the last."""
        self._bounds.append(len(self._batches))
        done = len(self._bounds) - 1
        if done in (self._warmup, self._warmup + self._steps) and self._on_gpu:
            torch.cuda.synchronize()
        if done >= self._warmup:
            # without a wait for the GPU at each step, which would cost what is measured: only both ends are exact
            self._times.append(time.perf_counter())
        if done == self._warmup:
            self._first_cpu_s = time.process_time()
            if self._on_gpu:
                torch.cuda.reset_peak_memory_stats()
            self.on_window(True)
        if done == self._warmup + self._steps:
            self._cpu_s = time.process_time() - self._first_cpu_s
            more = self.on_window(False) or {}
            self._result.write_text(json.dumps({**self._facts, **self._measured(), **more}), encoding="utf-8")
            raise MeasurementDone

    def _measured(self) -> dict[str, Any]:
        counted = [[count_batch(batch, pad_id=self._pad_id) for batch in step] for step in self._by_step(self._batches)]
        window = [one for step in counted[self._warmup :] for one in step]
        names = ("total", "trained", "padded")
        tokens = {name: sum(one[name] for one in window) for name in names}
        by_step = [{name: sum(one[name] for one in step) for name in names} for step in counted[self._warmup :]]
        lengths = [length for one in window for length in one["lengths"]]
        seconds = self._times[-1] - self._times[0]
        losses = [float(sum(float(loss) for loss in step)) for step in self._by_step(self._losses)]
        return {
            "steps": self._steps, "micro_batches": len(window), "seconds": seconds, "cpu_s": self._cpu_s,
            "step_s": [later - earlier for earlier, later in zip(self._times, self._times[1:], strict=False)],
            "tokens": tokens, "tokens_by_step": by_step, "rows": len(lengths),
            "tokens_per_s": {name: count / seconds for name, count in tokens.items()},
            "rows_per_s": len(lengths) / seconds,
            "weighted_length": sum(length**2 for length in lengths) / max(1, sum(lengths)), "losses": losses,
            "step_digests": [rows_digest(one["rows"] for one in step) for step in counted],
            "rows_digest": rows_digest(one["rows"] for step in counted for one in step),
            "peak_bytes": peak_bytes(on_gpu=self._on_gpu),
        }  # fmt: skip

    def _by_step(self, values: list[Any]) -> list[list[Any]]:
        pairs = zip(self._bounds, self._bounds[1:], strict=False)
        return [values[first:end] for first, end in pairs]


def record_trainer(trainer: Any, recorder: Recorder) -> None:
    """Let a recorder see the micro-batches, losses and steps of a transformers Trainer."""
    real = trainer.training_step

    def training_step(model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        seen = dict(inputs)  # losses take keys out of it
        loss = real(model, inputs, *args, **options)
        if seen:  # a step may need fewer micro-batches than the Trainer counts
            recorder.saw(seen, loss)
        return loss

    class StepEnd(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            recorder.ended_step()

    trainer.training_step = training_step
    trainer.add_callback(StepEnd())


def count_batch(batch: dict[str, Any], *, pad_id: int) -> dict[str, Any]:
    """What a micro-batch holds: places with padding, tokens, trained tokens, and of each chat its length and a digest.

    A chat ends where position ids begin again, else with the attention mask, else with the last token but padding.
    """
    arrays = {name: table.cpu().numpy() for name, table in batch.items()}
    ids, labels = arrays["input_ids"], arrays["labels"]
    trained, lengths, rows = 0, [], []
    for row in range(len(ids)):
        for first, end in _chats(arrays, row, pad_id):
            trained += int((labels[row, first + 1 : end] != IGNORED).sum())
            lengths.append(end - first)
            rows.append(hashlib.sha256(ids[row, first:end].astype("<i8").tobytes()).hexdigest()[:16])
    return {"padded": int(ids.size), "total": sum(lengths), "trained": trained, "lengths": lengths, "rows": rows}


def _chats(arrays: dict[str, Any], row: int, pad_id: int) -> list[tuple[int, int]]:
    """The first place of each chat in a row and the one after its last."""
    ids, labels = arrays["input_ids"][row], arrays["labels"][row]
    is_padding = (ids == pad_id) & (labels == IGNORED)
    if "attention_mask" in arrays and arrays["attention_mask"].ndim == 2:
        is_padding = arrays["attention_mask"][row] == 0
    positions = np.flatnonzero(~is_padding)
    if not len(positions):
        return []
    end = int(positions[-1]) + 1
    starts = [0]
    if "position_ids" in arrays:
        # packs: positions start again at 0 with each chat (one row of positions may stand for the whole batch)
        starts = np.flatnonzero(arrays["position_ids"][min(row, len(arrays["position_ids"]) - 1)][:end] == 0).tolist()
    chats = zip(starts, [*starts[1:], end], strict=True)
    return [(first, after) for first, after in chats if after - first > 1 or not is_padding[first]]


def rows_digest(parts: Iterable[Iterable[str]]) -> str:
    return hashlib.sha256(" ".join(sorted(row for part in parts for row in part)).encode()).hexdigest()[:16]


def peak_bytes(*, on_gpu: bool) -> dict[str, int | None]:
    """The highest resident memory of this process so far; on a GPU, what torch held since the warm-up."""
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    held = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if on_gpu else (None, None)
    return {"resident": kib * 1024, "allocated": held[0], "reserved": held[1]}
