"""A run as one story: `run_training` prepares it and opens its folder on all ranks, `train_stage`
trains a stage."""

import contextlib
import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sft_play.process.waiting import frozen_objects, report_wait
from sft_play.runs.folder import truncate_metrics
from sft_play.training import distributed, engines
from sft_play.training.checkpoints import checkpoints
from sft_play.training.checkpoints.last_checkpoint import find_last_checkpoint
from sft_play.training.heartbeat import Heartbeat
from sft_play.training.job import RunJob
from sft_play.training.loop import callbacks
from sft_play.training.loop.curriculum import StageSequence
from sft_play.training.loop.loop import PlannedLoop
from sft_play.training.loop.out_of_memory import record_oom
from sft_play.training.loop.trainer import build_plan_callbacks, load_trainer
from sft_play.training.measure.monitor import RunMonitors, start_memory_peaks
from sft_play.training.measure.summary import (
    EvalSet,
    InitialEvaluation,
    build_eval_set,
    build_summary,
    estimate_remaining,
    evaluate,
    finish_run,
)
from sft_play.training.measure.updates import UpdateCheck
from sft_play.training.model import attention_functions
from sft_play.training.prepare.device_checks import explain_out_of_memory
from sft_play.training.prepare.prepare import (
    Prepared,
    data_facts,
    prepare_stages,
    require_agreement,
)
from sft_play.training.prepare.run_folder import log_start, open_run_folder
from sft_play.training.unsloth_run import train_with_unsloth

logger = logging.getLogger(__name__)


def run_training(job: RunJob) -> dict[str, Any]:
    """Train as the job says, stage by stage; returns the summary. Raises SftPlayError: what the
    user can fix; a folder in which nothing was trained is removed; Interrupted: the user stopped
    the run, its state saved.
    """
    start_time, memory_peaks = time.time(), start_memory_peaks(job.plan)
    prepared_stages = prepare_stages(job)
    first_stage, facts = prepared_stages[0], data_facts(job.stage_jobs, prepared_stages)
    if first_stage.backend.name == "unsloth":
        with open_run_folder(job, prepared_stages, facts):
            return train_with_unsloth(
                job, first_stage, build_eval_set(job, first_stage), start_time=start_time
            )
    with (
        distributed.process_group(
            job.plan, timeout_s=job.timeout_s, uses_deepspeed=job.deepspeed is not None
        ),
        Heartbeat(job.timeout_s) as heartbeat,
        contextlib.closing(memory_peaks),
    ):
        require_agreement(job, first_stage, facts)
        with open_run_folder(job, prepared_stages, facts):
            monitors = RunMonitors(memory_peaks, heartbeat, start_time)
            if job.stages:
                return StageSequence(job, prepared_stages, monitors, train_stage).train()
            return train_stage(
                job, first_stage, monitors, begins_from=first_stage.base_adapter_folder
            )


def train_stage(
    job: RunJob,
    prepared: Prepared,
    monitors: RunMonitors,
    *,
    begins_from: Path | None = None,
    build_eval_set: Callable[..., EvalSet] = build_eval_set,
    load_trainer: Callable[..., PlannedLoop] = load_trainer,
) -> dict[str, Any]:
    """Load the model, evaluate, train, evaluate, save; returns the summary. `begins_from`: the
    folder of the weights of the stage before, or of the adapter that the run continues; None: the
    model's own. A backend that has its own replaces `build_eval_set` and `load_trainer`. Raises
    OutOfMemory: the step could not be repeated with less; Interrupted: the user stopped the run,
    and its state was saved."""
    # until the plan's choice, since class checks run small models of many shapes
    attention_functions.enable_cudnn(enabled=False)
    with explain_out_of_memory(job.plan):
        checkpoint = find_last_checkpoint(job.folder.checkpoints_path) if job.resume else None
        monitors.peaks.clear()  # those of the stage before
        is_disk_shared = distributed.check_shared_disk(job.folder.manifest_path, job.plan)
        distributed.require_all(
            is_disk_shared or not job.loaded.config.train.async_save,
            "train.async_save: every rank writes a part of each checkpoint,"
            f" and {job.folder.path} is not on a disk that all nodes share:"
            " set output.dir to one, or leave train.async_save out",
        )
        log_start(job, prepared, checkpoint)
        eval_set = build_eval_set(job, prepared)
        monitors.peaks.start("loading")
        trainer = load_trainer(
            job,
            prepared,
            eval_set,
            monitors,
            begins_from=begins_from,
            saves_shards=is_disk_shared and job.plan.memory.checkpoint == "sharded",
        )
        initial_evaluation = InitialEvaluation(
            job, trainer, eval_set, monitors.peaks, is_resumed=checkpoint is not None
        )
        trainer.step_memory.on_oom.append(functools.partial(record_oom, job))
        with trainer.step_memory.raise_out_of_memory():
            stop_controller, update_check, start_step, tokens_per_s = _run_training_loop(
                job, prepared, trainer, monitors, initial_evaluation, checkpoint
            )
            monitors.peaks.close()
            metrics_after = (
                None if stop_controller.has_stopped_early else evaluate(trainer, eval_set)
            )
        monitors.heartbeat.note(trainer.state.global_step, "saving the trained weights")
        summary = build_summary(
            job,
            trainer,
            stop_controller,
            update_check,
            initial_evaluation,
            metrics_after,
            monitors,
            tokens_per_s=tokens_per_s,
        )
        finish_run(job, prepared, trainer, summary, monitors.peaks, start_step=start_step)
    if job.folder.stage_name is not None:  # another model is loaded into this process
        engines.release_engine(trainer)
    return summary


def _run_training_loop(
    job: RunJob,
    prepared: Prepared,
    trainer: PlannedLoop,
    monitors: RunMonitors,
    initial_evaluation: InitialEvaluation,
    checkpoint: Path | None,
) -> tuple[callbacks.StopController, UpdateCheck, int, float]:
    config, folder, eval_set = job.loaded.config, job.folder, initial_evaluation.eval_set
    compile_monitor = trainer.compile_monitor
    resume_step = None if checkpoint is None else checkpoints.checkpoint_step(checkpoint)
    stop_controller = callbacks.StopController(
        config.train.stop_after_steps,
        hours=config.train.max_hours,
        pause_seconds=trainer.pause_seconds,
    )
    update_check = UpdateCheck(trainer, job.plan.precision.updates)
    progress = callbacks.Progress(estimate_remaining=lambda: estimate_remaining(trainer, eval_set))
    if distributed.is_first():  # lines after the checkpoint go: their steps are trained again
        truncate_metrics(
            folder.metrics_path,
            -1 if resume_step is None else resume_step,
            stage_name=folder.stage_name,
        )
    if compile_monitor is not None:
        compile_monitor.on_compiled.append(progress.exclude_wait)
    plan_callbacks = build_plan_callbacks(
        config,
        job.plan,
        folder,
        trainer,
        resume_step=resume_step,
        metric_tags=eval_set.metric_tags(evaluates_in_training=trainer.args.eval_strategy != "no"),
    )
    has_engine = not job.plan.choice.layout.is_one_process or job.deepspeed is not None
    trainer_callbacks = [
        callbacks.GradientCheck(prepared.model_spec.late_gradients),
        update_check,
        callbacks.MetricsFile(
            folder.metrics_path, start_time=monitors.start_time, stage=folder.stage_name
        ),
        progress,
        stop_controller,
        *plan_callbacks,
    ]
    if has_engine:  # it evaluates before the clock of the progress starts
        trainer_callbacks.insert(0, initial_evaluation)
    for callback in trainer_callbacks:
        trainer.add_callback(callback)
    trainable_parameters = sum(
        parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad
    )
    logger.debug("Trainable parameters: %s", f"{trainable_parameters:,}")
    if not has_engine:  # none will wrap the model when training begins
        initial_evaluation.measure()
    message = "Preparing the first step"
    if job.plan.layout.endswith("_offload"):
        message += (
            ", for which DeepSpeed compiles its optimizer for RAM (once on a machine, minutes)"
        )
    monitor_context = (
        contextlib.closing(compile_monitor) if compile_monitor else contextlib.nullcontext()
    )
    with (
        callbacks.stop_signals(stop_controller),
        monitor_context,
        frozen_objects(),
        progress.start_wait as start_wait,
    ):
        start_wait.enter_context(report_wait(message))
        progress.on_first_step = functools.partial(_begin_first_step, trainer, start_wait)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    # ranks of a tensor-parallel group see the same tokens
    tokens = (
        distributed.sum_over_ranks(trainer.tokens_seen) / job.plan.choice.layout.tensor_parallel
    )
    return stop_controller, update_check, progress.start_step, tokens / progress.training_s


def _begin_first_step(trainer: PlannedLoop, start_wait: contextlib.ExitStack) -> None:
    """End the wait for what comes before the first step, and count its passes."""
    start_wait.close()
    wait = report_wait("Training the first step", unit="passes", count_total=trainer.count_passes)
    trainer.step_progress = start_wait.enter_context(wait)
