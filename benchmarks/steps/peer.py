"""What the runs of other libraries share: training until the recorder has seen enough.

It imports nothing of this project but what a peer's own environment can run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.steps.order import ProcessOrder
from benchmarks.steps.recording import MeasurementDone, Recorder, record_next_trainer, record_trainer


def make_recorder(order: ProcessOrder, facts: dict[str, Any], **others: Any) -> Recorder:
    """The recorder of an order; `others`: settings of the peer that are not those of our run."""
    names = ("micro_batch", "grad_accum", "gradient_checkpointing", "packing")
    settings = {name: facts[name] for name in names} | others
    return Recorder(
        Path(order.result), warmup=order.warmup, steps=order.steps, pad_id=facts["pad_id"],
        facts={"side": order.side, "settings": settings},
    )  # fmt: skip


def train_until_recorded(trainer: Any, recorder: Recorder) -> None:
    """Train with a transformers Trainer until the recorder has seen enough."""
    record_trainer(trainer, recorder)
    with contextlib.suppress(MeasurementDone):
        trainer.train()


@contextlib.contextmanager
def record_next_in_context(recorder: Recorder) -> Iterator[None]:
    """The same of the Trainer that a library makes itself inside this context."""
    record_next_trainer(recorder)
    with contextlib.suppress(MeasurementDone):
        yield
