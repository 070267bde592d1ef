"""A run as one story: `run_training` prepares it and opens its folder on all ranks, `train_stage` trains a stage."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sft_play.planner import calibration
from sft_play.planner.precision import DTYPE_SHORT_NAMES
from sft_play.runs import oom
from sft_play.runs.files import truncate_metrics
from sft_play.training import distributed, engines
from sft_play.training.checkpoints import checkpoints
from sft_play.training.checkpoints.last_checkpoint import find_last_checkpoint
from sft_play.training.heartbeat import Heartbeat
from sft_play.training.job import RunJob
from sft_play.training.loop.callbacks import GradientCheck, MetricsFile, Progress, StopController, stop_signals
from sft_play.training.loop.curriculum import StageSequence
from sft_play.training.loop.loop import PlannedLoop
from sft_play.training.loop.memory import TRAINING, UPDATING
from sft_play.training.loop.trainer import build_plan_callbacks, load_trainer
from sft_play.training.measure.evaluate import EvalSet, InitialEvaluation, build_eval_set, estimate_remaining, evaluate
from sft_play.training.measure.monitor import MemoryMeter, RunMonitors
from sft_play.training.measure.recorded import measured_run
from sft_play.training.measure.summary import TrainingSummary, build_summary, finish_run
from sft_play.training.measure.updates import UpdateCheck
from sft_play.training.model import attention_functions
from sft_play.training.prepare.device_checks import check_device, check_gpu, explain_out_of_memory
from sft_play.training.prepare.library_messages import quiet_libraries
from sft_play.training.prepare.prepare import Prepared, data_facts, input_digests, prepare
from sft_play.training.prepare.run_folder import open_run_folder
from sft_play.training.unsloth import bridge

logger = logging.getLogger(__name__)


def run_training(job: RunJob) -> dict[str, Any]:
    """Train as the job says, stage by stage; returns the summary. Raises SftPlayError: what the user can fix; a folder
    in which nothing was trained is removed; Interrupted: the user stopped the run, its state saved."""
    start_time, memory_meter = time.time(), MemoryMeter(job.plan)
    quiet_libraries()
    for stage in job.stage_jobs:
        check_device(stage.plan, stage.loaded.config)
    if job.loaded.config.tuning.backend == "bnb":  # with Unsloth its own process checks the GPU
        check_gpu(job.largest_stage.plan, job.largest_stage.loaded.config)
    prepared_stages = [prepare(stage) for stage in job.stage_jobs]  # tokenizer, the model on the meta device, rows
    facts = data_facts(job.stage_jobs, prepared_stages)
    if prepared_stages[0].backend.name == "unsloth":
        with open_run_folder(job, prepared_stages, facts):
            return bridge.train_with_unsloth(
                job, prepared_stages[0], build_eval_set(job, prepared_stages[0]), start_time=start_time
            )
    if prepared_stages[0].backend.fallback_from:
        check_gpu(job.largest_stage.plan, job.largest_stage.loaded.config)
    with (
        distributed.process_group(job.plan, timeout_s=job.timeout_s, uses_deepspeed=job.deepspeed is not None),
        Heartbeat(job.timeout_s) as heartbeat,
        contextlib.closing(memory_meter.peaks),
    ):
        distributed.require_same_inputs(
            input_digests(job, facts, writes_date=prepared_stages[0].renderer.tokenizer_parts.writes_date)
        )
        with open_run_folder(job, prepared_stages, facts):
            monitors = RunMonitors(memory_meter, heartbeat, start_time)
            if job.stages:
                return StageSequence(job, prepared_stages, monitors, train_stage).train()
            return train_stage(job, prepared_stages[0], monitors, begins_from=prepared_stages[0].base_adapter_folder)


def train_stage(
    job: RunJob,
    prepared: Prepared,
    monitors: RunMonitors,
    *,
    begins_from: Path | None = None,
    build_eval_set: Callable[..., EvalSet] = build_eval_set,
    load_trainer: Callable[..., PlannedLoop] = load_trainer,
) -> dict[str, Any]:
    """Load the model, evaluate, train, evaluate, save; returns the summary. `begins_from`: the folder of the weights of
    the stage before, or of the adapter that the run continues; None: the model's own. A backend that has its own
    replaces `build_eval_set` and `load_trainer`. Raises OutOfMemory: the step could not be repeated with less;
    Interrupted: the user stopped the run, and its state was saved."""
    attention_functions.enable_cudnn(
        enabled=False
    )  # until the plan's choice, since class checks run small models of many shapes
    with explain_out_of_memory(job.plan):
        checkpoint = find_last_checkpoint(job.folder.checkpoints_path, monitors.heartbeat) if job.resume else None
        monitors.memory.peaks.clear()  # those of the stage before
        is_disk_shared = distributed.check_shared_disk(job.folder.manifest_path, job.plan)
        distributed.require_all(
            is_disk_shared or not job.loaded.config.train.async_save,
            f"train.async_save: every rank writes a part of each checkpoint, and {job.folder.path} is not on a disk "
            "that all nodes share: set output.dir to one, or leave train.async_save out",
        )
        _log_start(job, prepared, checkpoint)
        eval_set = build_eval_set(job, prepared)
        monitors.memory.peaks.start("loading")
        trainer = load_trainer(
            job, prepared, eval_set, monitors, begins_from=begins_from,
            saves_shards=is_disk_shared and job.plan.memory.checkpoint == "sharded",
        )  # fmt: skip
        initial_evaluation = InitialEvaluation(
            job, trainer, eval_set, monitors.memory.peaks, is_resumed=checkpoint is not None
        )
        metric_tags = eval_set.metric_tags(evaluates_in_training=trainer.args.eval_strategy != "no")
        trainer.step_memory.on_oom.append(functools.partial(_record_oom, job))
        with trainer.step_memory.raise_out_of_memory():
            gradient_check = GradientCheck(prepared.model_spec.late_gradients)
            training = _run_training_loop(
                job, trainer, initial_evaluation, monitors, checkpoint, metric_tags, gradient_check
            )
            metrics_after = None if training.stop_controller.has_stopped_early else evaluate(trainer, eval_set)
        monitors.heartbeat.note(trainer.state.global_step, "saving the trained weights")
        summary = build_summary(job, trainer, training, initial_evaluation, metrics_after, monitors)
        finish_run(job, prepared, trainer, summary, monitors.memory, start_step=training.progress.start_step)
    if job.folder.stage_name is not None:  # another model is loaded into this process
        engines.release_engine(trainer)
    return summary


def _run_training_loop(
    job: RunJob,
    trainer: PlannedLoop,
    initial_evaluation: InitialEvaluation,
    monitors: RunMonitors,
    checkpoint: Path | None,
    metric_tags: Sequence[str],
    gradient_check: GradientCheck,
) -> TrainingSummary:
    resume_step = checkpoints.checkpoint_step(checkpoint) if checkpoint else None
    if distributed.is_first():
        truncate_metrics(
            job.folder.metrics_path, -1 if resume_step is None else resume_step, stage_name=job.folder.stage_name
        )
    train_config = job.loaded.config.train
    stop_controller = StopController(
        train_config.stop_after_steps, hours=train_config.max_hours, pause_seconds=trainer.pause_seconds
    )
    update_check = UpdateCheck(trainer, job.plan.precision.updates)
    progress = Progress(
        count_tokens=lambda: trainer.tokens_seen,
        estimate_remaining=lambda: estimate_remaining(trainer, initial_evaluation.eval_set),
    )
    compile_monitor = trainer.compile_monitor
    if compile_monitor is not None:
        compile_monitor.on_compiled.append(progress.exclude_wait)
    metrics_file = MetricsFile(job.folder.metrics_path, start_time=monitors.start_time, stage=job.folder.stage_name)
    has_engine = job.plan.layout != "single" or job.deepspeed is not None
    for callback in (
        *([initial_evaluation] if has_engine else []),  # first: it evaluates before the clock of `progress` starts
        *(gradient_check, update_check, metrics_file, progress, stop_controller),
        *build_plan_callbacks(
            job.loaded.config, job.plan, job.folder, trainer, resume_step=resume_step, metric_tags=metric_tags
        ),
    ):
        trainer.add_callback(callback)
    trainable_parameters = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
    logger.debug("Trainable parameters: %s", f"{trainable_parameters:,}")
    if not has_engine:  # none will wrap the model when training begins
        initial_evaluation.measure()
    compiler_context = contextlib.nullcontext() if compile_monitor is None else contextlib.closing(compile_monitor)
    build_note = ", for which DeepSpeed compiles its optimizer for RAM (once on a machine, minutes)"
    message = f"Preparing the first step{build_note if job.plan.layout.endswith('_offload') else ''}"
    with stop_signals(stop_controller), compiler_context, progress.announce_start(message):
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    # ranks of a tensor-parallel group see the same tokens
    tokens = distributed.sum_over_ranks(trainer.tokens_seen) / job.plan.choice.layout.tensor_parallel
    monitors.memory.peaks.close()
    return TrainingSummary(stop_controller, progress, update_check, tokens / progress.training_s)


def _record_oom(job: RunJob, event: oom.OomEvent) -> None:
    plan = job.plan
    is_planned = event.micro_batch == plan.batch.micro_batch and job.loaded.config.tuning.backend != "unsloth"
    if is_planned and event.doing in (TRAINING, UPDATING):
        calibration.add_measured_run(measured_run(job.loaded.config, plan, ran_out_of=plan.budget_bytes))
    if event.again == "run":
        oom.write_oom_note(job.folder, event)
    elif distributed.is_first():
        oom.record_oom_event(job.folder, event)


def _log_start(job: RunJob, prepared: Prepared, checkpoint: Path | None) -> None:
    ranks, on_gpu = job.plan.choice.layout.ranks, bool(job.plan.hardware.gpus)
    device = f"{ranks} GPU{'s' if ranks != 1 else ''}" if on_gpu else "the CPU"
    device += f" ({ranks} ranks)" if ranks > 1 and not on_gpu else ""
    precision = DTYPE_SHORT_NAMES[job.plan.precision.compute]
    backend = f"{prepared.backend.name}{' distributed' if ranks > 1 else ''}"
    if checkpoint is not None:
        logger.info("Resuming %s run from step %d with %s precision on %s",
                    backend, checkpoints.checkpoint_step(checkpoint), precision, device)  # fmt: skip
    elif job.resume:
        logger.info("%s has no checkpoint: starting again from the first step", job.folder.path)
    else:
        logger.info("Starting new %s run with %s precision on %s", backend, precision, device)
    logger.info("Run folder: %s", job.folder.path)
    logger.debug("Learning rate: %g (%s)", job.loaded.config.learning_rate, job.loaded.config.train.lr_scheduler_type)
