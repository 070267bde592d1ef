"""What the runs of other libraries share: training until the recorder has seen enough.

It imports nothing of this project but what a peer's own environment can run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.steps.order import Order
from benchmarks.steps.recording import Measured, Recorder, record, record_next


def recorder_for(order: Order, facts: dict[str, Any], **others: Any) -> Recorder:
    """The recorder of an order; `others`: settings of the peer that are not those of our run."""
    names = ("micro_batch", "grad_accum", "gradient_checkpointing", "packing")
    settings = {name: facts[name] for name in names} | others
    return Recorder(
        Path(order.result), warmup=order.warmup, steps=order.steps, pad_id=facts["pad_id"],
        facts={"side": order.side, "settings": settings},
    )  # fmt: skip


def train_recorded(trainer: Any, recorder: Recorder) -> None:
    """Train with a transformers Trainer until the recorder has seen enough."""
    record(trainer, recorder)
    with contextlib.suppress(Measured):
        trainer.train()


@contextlib.contextmanager
def next_trainer_recorded(recorder: Recorder) -> Iterator[None]:
    """The same of the Trainer that a library makes itself inside this context."""
    record_next(recorder)
    with contextlib.suppress(Measured):
        yield
