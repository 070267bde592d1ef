"""Memory that runs out in a step: it is repeated from its start, in micro-batches of half the size.

Until the optimizer's update a step leaves only gradients, sums and random states, which are set back. Over ranks it
cannot be repeated in place, since others wait in a collective: the processes end, with a note for whoever starts them
again (`runs.oom`).
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import TrainerCallback

from sft_play.errors import OutOfMemory
from sft_play.log import one_line
from sft_play.planner.batching import BatchPlan
from sft_play.planner.micro_batches import MicroBatches
from sft_play.runs.oom import RanOut
from sft_play.training.loop.rows import FILLER
from sft_play.training.prepare.device_checks import free_memory, is_out_of_memory, out_of_memory_message
from sft_play.training.ranks import distributed

logger = logging.getLogger(__name__)
T = TypeVar("T")

# What a rank does in a step.
TRAINING, UPDATING = "training", "updating the weights"
# What may fit with smaller micro-batches, and is done again by ranks that start again.
_REPEATED = (TRAINING, "evaluating", "generating answers", "saving a checkpoint", "writing its part of a checkpoint")

# Bytes of a tensor that stands for the optimizer's states, which are of many sizes.
_PIECE = 32 << 20


class StepMemory(TrainerCallback):
    """Repeats a step of the trainer that ran out of memory, and tries the longest rows before the first one."""

    def __init__(self, trainer: Any, cut: MicroBatches) -> None:
        """`cut`: how steps are divided, as planned."""
        ranks = trainer._layout.data_parallel
        passes = max(1, -(-trainer.plan.batch.effective_batch // (cut.rows * ranks)))
        self._trainer, self.cut, self.batch = trainer, cut, BatchPlan(cut.rows, passes, ranks)
        self.told: list[Callable[[RanOut], None]] = []
        """Called when memory has run out, before anything is repeated."""
        self.has_halved = False
        self._start: dict[str, Any] = {}

    @property
    def is_alone(self) -> bool:
        """Whether no engine wraps the model, and no other rank waits for this one."""
        trainer = self._trainer
        has_engine = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        return distributed.world_size() == 1 and not has_engine and trainer.model_wrapped is trainer.model

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Keep what the step begins with, besides weights and optimizer."""
        trainer = self._trainer
        self._start = {
            "random": [get() for get, _ in _random_states()], "loss": trainer._tr_loss.clone(),
            "tokens": trainer._tokens_seen, "counted": trainer._monitor.counted(),
        }  # fmt: skip

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """From here on the step is not repeated: the update takes the same memory for every micro-batch."""
        self._trainer.beat.note(self._trainer.state.global_step + 1, UPDATING)

    def repeated(self, compute: Callable[[bool], T]) -> T:
        """What the passes of a step give; `compute` is told whether it is called again, in halved micro-batches."""
        is_again = False
        while True:
            try:
                return compute(is_again)
            except (RuntimeError, MemoryError) as error:
                half = self.batch.halved
                if half is None or not self.is_alone or not is_out_of_memory(error):
                    raise
                reason = str(error)
            # only here: while the exception lives, so does what its frames hold
            self._set_back()
            self._tell(reason, again="step", now=half.micro_batch)
            self.batch, self.cut = half, self.cut.resized(half.micro_batch)
            self.has_halved = is_again = True

    def batches(self) -> list[dict[str, Any]]:
        """The micro-batches of the present step, cut as they are now."""
        trainer = self._trainer
        steps = len(trainer._batches) // trainer._batches.slots  # of an epoch
        passes = trainer._batches.of_step(trainer.state.global_step % steps, self.cut)
        trainer._passes, trainer._pass = len(passes), 0
        return [self._batch(each[0]) for each in passes]

    def _batch(self, rows: list[int]) -> dict[str, Any]:
        trainer = self._trainer
        batch: dict[str, Any] = trainer.data_collator(trainer.train_dataset.__getitems__(rows or [FILLER]))
        return batch

    def _set_back(self) -> None:
        trainer, start = self._trainer, self._start
        trainer.model_wrapped.zero_grad()
        for (_, put), state in zip(_random_states(), start["random"], strict=True):
            put(state)
        trainer._tr_loss.copy_(start["loss"])
        trainer._tokens_seen = start["tokens"]
        trainer._monitor.recount(start["counted"])
        for batch in trainer._slots:
            batch.clear()  # those that are left of this step: the Trainer passes empty ones over
        free_memory()

    def _tell(self, error: str, *, again: Any, now: int, rows: int | None = None) -> None:
        step, doing = self._trainer.beat.last
        rows = rows or self.batch.micro_batch
        event = RanOut(step, doing, distributed.rank(), rows, now, again, one_line(error, limit=200))
        logger.warning("Out of memory: %s", event.line)
        for tell in self.told:
            tell(event)

    def tried(self, compute: Callable[[], T], rows: int) -> T | None:
        """What a batch gives that is not trained on; None where memory lacked for it, and it is to be repeated in parts
        of half its rows. Where ranks share weights or rows they compute together, and the error is raised."""
        try:
            return compute()
        except (RuntimeError, MemoryError) as error:
            layout = self._trainer._layout
            is_shared = layout.shards_params or layout.tensor_parallel > 1 or layout.context_parallel > 1
            if rows == 1 or is_shared or not is_out_of_memory(error):
                raise
            reason = str(error)
        free_memory()
        self._tell(reason, again="batch", rows=rows, now=rows // 2)
        return None

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """While open, a lack of memory that ends this process is told, and raised as OutOfMemory."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            half, is_repeated = self.batch.halved, self._trainer.beat.last[1] in _REPEATED
            is_again = half is not None and is_repeated and not self.is_alone
            self._tell(str(error), again="run" if is_again else None, now=half.micro_batch if half and is_again else 0)
            message = out_of_memory_message(self._trainer.plan, error, self.batch)
            raise OutOfMemory(message, batch=None if is_again else self.batch) from error

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Compute the longest rows of an epoch once and drop what came of it, so that a lack of memory shows now. Not
        under DeepSpeed, which would count the gradients as a part of the first step; not for compiled blocks, which are
        compiled for the shapes that come first; not for rotations that keep the longest row in mind."""
        trainer = self._trainer
        rotations = getattr(trainer.model.config.get_text_config(), "rope_parameters", None) or {}
        if trainer.is_deepspeed_enabled or trainer.compiler is not None or "dynamic" in str(rotations):
            return
        trainer.beat.note(trainer.state.global_step + 1, TRAINING)
        self.on_step_begin()
        self.repeated(lambda _: self._try_longest())
        self._set_back()

    def _try_longest(self) -> None:
        """Beside as many bytes as the optimizer's states and the gradients of other passes will hold."""
        trainer = self._trainer
        each, rank = trainer._batches.longest_pass(self.cut), trainer._batches.rank
        device, is_new = trainer.args.device, not getattr(trainer.optimizer, "state", None)
        optimizer = trainer.plan.memory.terms.get("optimizer", 0) if is_new else 0
        sizes = (min(_PIECE, optimizer - first) for first in range(0, optimizer, _PIECE))
        held = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        if self.is_alone and self.batch.grad_accum > 1:
            for parameter in trainer.model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        batch = self._batch(each[rank])
        trainer.current_gradient_accumulation_steps = 1  # the Trainer sets it in a step
        trainer.compute_pass(trainer.model_wrapped, batch, torch.tensor(batch["labels"].numel(), device=device))
        del held


def _random_states() -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    of_gpu = [(torch.cuda.get_rng_state, torch.cuda.set_rng_state)] if torch.cuda.is_available() else []
    of_python = (random.getstate, random.setstate)
    return [of_python, (np.random.get_state, np.random.set_state), (torch.get_rng_state, torch.set_rng_state), *of_gpu]
