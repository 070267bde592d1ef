"""What watches the optimizer steps of a run: gradients, updates, metrics, progress, and requests to stop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import TrainerCallback

from sft_play.runs.files import truncate_metrics
from sft_play.training import distributed
from sft_play.training.checkpoints import checkpoints
from sft_play.training.job import RunJob
from sft_play.training.loop.callbacks import GradientCheck, MetricsFile, Progress, StopController, stop_signals
from sft_play.training.loop.loop import PlannedLoop
from sft_play.training.loop.trainer import build_plan_callbacks
from sft_play.training.measure.evaluate import EvalSet, estimate_remaining
from sft_play.training.measure.monitor import RunMonitors
from sft_play.training.measure.updates import UpdateCheck
from sft_play.training.prepare.prepare import Prepared


class RunCallbacks:
    """The callbacks of one training, from its first step or from a checkpoint."""

    def __init__(
        self,
        job: RunJob,
        prepared: Prepared,
        trainer: PlannedLoop,
        eval_set: EvalSet,
        monitors: RunMonitors,
        checkpoint: Path | None,
    ) -> None:
        self._job, self._trainer = job, trainer
        self._resume_step = None if checkpoint is None else checkpoints.checkpoint_step(checkpoint)
        train = job.loaded.config.train
        self.stop_controller = StopController(
            train.stop_after_steps, hours=train.max_hours, pause_seconds=trainer.pause_seconds
        )
        self.update_check = UpdateCheck(trainer, job.plan.precision.updates)
        self.progress = Progress(estimate_remaining=lambda: estimate_remaining(trainer, eval_set))
        self._gradient_check = GradientCheck(prepared.model_spec.late_gradients)
        self._metrics_file = MetricsFile(
            job.folder.metrics_path, start_time=monitors.start_time, stage=job.folder.stage_name
        )
        self._metric_tags = eval_set.metric_tags(evaluates_in_training=trainer.args.eval_strategy != "no")

    def add_to_trainer(self, *, before: Sequence[TrainerCallback] = ()) -> None:
        """Add all of them to the trainer; those of `before` are called first.

        The lines of metrics.jsonl that come after the checkpoint are removed: their steps are trained again.
        """
        job, trainer = self._job, self._trainer
        if distributed.is_first():
            last_step = -1 if self._resume_step is None else self._resume_step
            truncate_metrics(job.folder.metrics_path, last_step, stage_name=job.folder.stage_name)
        if trainer.compile_monitor is not None:
            trainer.compile_monitor.on_compiled.append(self.progress.exclude_wait)
        plan_callbacks = build_plan_callbacks(
            job.loaded.config,
            job.plan,
            job.folder,
            trainer,
            resume_step=self._resume_step,
            metric_tags=self._metric_tags,
        )
        own_callbacks = (
            *(self._gradient_check, self.update_check, self._metrics_file),
            *(self.progress, self.stop_controller),
        )
        for callback in (*before, *own_callbacks, *plan_callbacks):
            trainer.add_callback(callback)

    @contextlib.contextmanager
    def watching(self, message: str) -> Iterator[None]:
        """While open, requests to stop are heeded; `message` says what takes long before the first step."""
        monitor = self._trainer.compile_monitor
        monitor_context = contextlib.closing(monitor) if monitor is not None else contextlib.nullcontext()
        with stop_signals(self.stop_controller), monitor_context, self.progress.announce_start(message):
            yield
