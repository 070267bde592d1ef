"""Memory that runs out in a step: it is repeated from its start, in micro-batches of half the size.

Until the optimizer's update a step leaves only gradients, sums and random states, which are set
back. Over ranks it cannot be repeated in place, since others wait in a collective: the processes
end, with a note for whoever starts them again (`runs.folder`)."""

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
from sft_play.planner import calibration
from sft_play.planner.batching import BatchPlan, MicroBatches
from sft_play.runs.folder import OomEvent, record_oom_event, write_oom_note
from sft_play.training import distributed
from sft_play.training.job import RunJob, measured_run
from sft_play.training.loop.rows import FILLER_INDEX
from sft_play.training.measure.monitor import measure_pass_floor, record_host_speed
from sft_play.training.prepare.device_checks import (
    free_memory,
    is_out_of_memory,
    out_of_memory_message,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

# What a rank does in a step.
TRAINING, UPDATING = "training", "updating the weights"


# Bytes of a tensor that stands for the optimizer's states, which are of many sizes.
_STAND_IN_BYTES = 32 << 20


class StepMemory(TrainerCallback):
    """Repeats a step of the trainer that ran out of memory, and tries the longest rows before the
    first one. `micro_batches`: how steps are divided, as planned."""

    def __init__(self, trainer: Any, micro_batches: MicroBatches) -> None:
        ranks = trainer._layout.data_parallel
        micro_steps = max(1, -(-trainer.plan.batch.effective_batch // (micro_batches.rows * ranks)))
        self._trainer, self.micro_batches = trainer, micro_batches
        self.batch_plan = BatchPlan(micro_batches.rows, micro_steps, ranks)
        # Called when memory has run out, before anything is repeated.
        self.on_oom: list[Callable[[OomEvent], None]] = []
        self.has_halved = False
        # Seconds of a pass of hardly any tokens; None where it was not measured.
        self.pass_floor_s: float | None = None
        self._step_start: dict[str, Any] = {}

    @property
    def is_single_process(self) -> bool:
        """Whether no engine wraps the model, and no other rank waits for this one."""
        trainer = self._trainer
        return (
            distributed.world_size() == 1
            and not trainer.is_fsdp_enabled
            and not trainer.is_deepspeed_enabled
            and trainer.model_wrapped is trainer.model
        )

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Keep what the step begins with, besides weights and optimizer."""
        trainer = self._trainer
        self._step_start = {
            "random": [get() for get, _ in _random_states()],
            "loss": trainer._tr_loss.clone(),
            "tokens": trainer._tokens_seen,
            "counted": trainer._monitor.sums,
        }

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """From here on the step is not repeated: the update takes the same memory for every
        micro-batch."""
        self._trainer.heartbeat.note(self._trainer.state.global_step + 1, UPDATING)

    def run_with_retry(self, compute: Callable[[bool], T]) -> T:
        """Return what `compute` does; out of memory, call it again in halved micro-batches (its
        argument: a retry)."""
        is_retry = False
        while True:
            try:
                return compute(is_retry)
            except (RuntimeError, MemoryError) as error:
                halved_plan = self.batch_plan.halved
                if halved_plan is None or not self.is_single_process or not is_out_of_memory(error):
                    raise
                message = str(error)
            # only here: while the exception lives, so does what its frames hold
            self._restore_step_start()
            self._report_oom(message, retry="step", retry_rows=halved_plan.micro_batch)
            self.batch_plan, self.micro_batches = (
                halved_plan,
                self.micro_batches.resized(halved_plan.micro_batch),
            )
            self.has_halved = is_retry = True

    def collate_step(self) -> list[dict[str, Any]]:
        """The micro-batches of the present step, cut as they are now."""
        trainer = self._trainer
        steps_per_epoch = len(trainer._step_batches) // trainer._step_batches.slots
        micro_steps = trainer._step_batches.step_rows(
            trainer.state.global_step % steps_per_epoch, self.micro_batches
        )
        trainer._micro_steps, trainer._micro_step = len(micro_steps), 0
        return [self._collate(rows_by_rank[0]) for rows_by_rank in micro_steps]

    def _collate(self, rows: list[int]) -> Any:
        trainer = self._trainer
        return trainer.data_collator(trainer.train_dataset.__getitems__(rows or [FILLER_INDEX]))

    def _restore_step_start(self) -> None:
        trainer, start = self._trainer, self._step_start
        trainer.model_wrapped.zero_grad()
        for (_, set_state), state in zip(_random_states(), start["random"], strict=True):
            set_state(state)
        trainer._tr_loss.copy_(start["loss"])
        trainer._tokens_seen = start["tokens"]
        trainer._monitor.sums = start["counted"]
        for batch in trainer._slot_batches:
            batch.clear()  # those that are left of this step: the Trainer passes empty ones over
        free_memory()

    def _report_oom(
        self, error: str, *, retry: Any, retry_rows: int, rows: int | None = None
    ) -> None:
        step, activity = self._trainer.heartbeat.last_note
        rows = rows or self.batch_plan.micro_batch
        event = OomEvent(
            step, activity, distributed.rank(), rows, retry_rows, retry, one_line(error, limit=200)
        )
        logger.warning("Out of memory: %s", event.description)
        for callback in self.on_oom:
            callback(event)

    def try_batch(self, compute: Callable[[], T], row_count: int) -> T | None:
        """Compute a batch outside training; return None where memory ran out, for the caller to
        repeat it in halves. Raises the error where ranks share weights or rows: they compute
        together, so one cannot repeat it alone.
        """
        try:
            return compute()
        except (RuntimeError, MemoryError) as error:
            layout = self._trainer._layout
            is_shared = (
                layout.shards_params or layout.tensor_parallel > 1 or layout.context_parallel > 1
            )
            if row_count == 1 or is_shared or not is_out_of_memory(error):
                raise
            message = str(error)
        free_memory()
        self._report_oom(message, retry="batch", rows=row_count, retry_rows=row_count // 2)
        return None

    @contextlib.contextmanager
    def raise_out_of_memory(self) -> Iterator[None]:
        """While open, report running out of memory that ends this process, and raise it as
        OutOfMemory."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            halved_plan = self.batch_plan.halved
            message = out_of_memory_message(self._trainer.plan, error, self.batch_plan)
            is_retried_activity = self._trainer.heartbeat.last_note[1] in (
                TRAINING,
                "evaluating",
                "generating answers",
                "saving a checkpoint",
                "writing its part of a checkpoint",
            )
            if halved_plan is None or not is_retried_activity or self.is_single_process:
                self._report_oom(str(error), retry=None, retry_rows=0)
                raise OutOfMemory(message, batch=self.batch_plan) from error
            self._report_oom(str(error), retry="run", retry_rows=halved_plan.micro_batch)
            raise OutOfMemory(message, batch=None) from error

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Compute the longest rows of an epoch once and drop what came of it, so that a lack of
        memory shows now. Not under DeepSpeed, which would count the gradients as a part of the
        first step; not for rotations that keep the longest row in mind.
        """
        trainer = self._trainer
        rope_parameters = (
            getattr(trainer.model.config.get_text_config(), "rope_parameters", None) or {}
        )
        if trainer.is_deepspeed_enabled or "dynamic" in str(rope_parameters):
            return
        trainer.heartbeat.note(trainer.state.global_step + 1, TRAINING)
        self.on_step_begin()
        self.run_with_retry(lambda _: self._compute_longest_rows())
        if trainer.runs_planned_code:  # everything that a pass uses is built now
            self.pass_floor_s = measure_pass_floor(trainer)
        self._restore_step_start()
        if self.pass_floor_s is not None:
            record_host_speed(trainer.plan, self.pass_floor_s)

    def _compute_longest_rows(self) -> None:
        # with stand-ins for optimizer states and for gradients of other micro-steps
        trainer = self._trainer
        rows_by_rank, rank = (
            trainer._step_batches.largest_micro_step(self.micro_batches),
            trainer._step_batches.rank,
        )
        device, stand_ins = trainer.args.device, []
        if not getattr(trainer.optimizer, "state", None):
            for _ in range(-(-trainer.plan.memory.terms.get("optimizer", 0) // _STAND_IN_BYTES)):
                stand_ins.append(torch.empty(_STAND_IN_BYTES, dtype=torch.uint8, device=device))
        if self.is_single_process and self.batch_plan.grad_accum > 1:
            for parameter in trainer.model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        batch = self._collate(rows_by_rank[rank])
        trainer.current_gradient_accumulation_steps = 1  # the Trainer sets it in a step
        trainer.refresh_adapter_copies()
        # compiled blocks too run their plain code here, whose memory is what the plan counts
        with trainer.plain_blocks():
            trainer.compute_micro_step(
                trainer.model_wrapped, batch, torch.tensor(batch["labels"].numel(), device=device)
            )
        del stand_ins


def _random_states() -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    states: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
        (random.getstate, random.setstate),
        (np.random.get_state, np.random.set_state),
        (torch.get_rng_state, torch.set_rng_state),
    ]
    if torch.cuda.is_available():
        states.append((torch.cuda.get_rng_state, torch.cuda.set_rng_state))
    return states


def record_oom(job: RunJob, event: OomEvent) -> None:
    """Record that a step ran out of memory: for later plans, and in the run's folder."""
    plan = job.plan
    is_planned = (
        event.micro_batch == plan.batch.micro_batch
        and job.loaded.config.tuning.backend != "unsloth"
    )
    if is_planned and event.doing in (TRAINING, UPDATING):
        calibration.add_measured_run(
            measured_run(job.loaded.config, plan, ran_out_of=plan.budget_bytes)
        )
    if event.again == "run":
        write_oom_note(job.folder, event)
    elif distributed.is_first():
        record_oom_event(job.folder, event)
