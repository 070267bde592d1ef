"""The end of a run: the figures of the held-out rows before and after training, their loss and the
answers to their questions; the trained weights are saved, the summary is written as JSON and logged
in words."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState

from sft_play.answers import plain_data
from sft_play.data.build.splits import DataSplit
from sft_play.errors import Interrupted
from sft_play.log import one_line
from sft_play.planner import calibration
from sft_play.planner.plan import Plan
from sft_play.runs.folder import (
    free_disk_bytes,
    next_run_commands,
    read_evaluations,
    require_disk_space,
)
from sft_play.text import GIB, format_duration
from sft_play.training import distributed, engines
from sft_play.training.checkpoints import full_state_dict
from sft_play.training.checkpoints.card import (
    CardFacts,
    answer_stop_ids,
    result_figures,
    write_card,
)
from sft_play.training.checkpoints.checkpoints import record_digests
from sft_play.training.checkpoints.model_saving import (
    fetch_base_folder,
    save_model,
    set_stop_tokens,
)
from sft_play.training.engines import EngineCheck, check_engine
from sft_play.training.job import RunJob, resume_command
from sft_play.training.loop.callbacks import StopController
from sft_play.training.loop.loop import PlannedLoop
from sft_play.training.measure.exact_match import (
    GeneratedAnswer,
    Question,
    evenly_spaced,
    select_questions,
)
from sft_play.training.measure.monitor import MemoryPeaks, RunMonitors
from sft_play.training.measure.updates import UpdateCheck
from sft_play.training.prepare.prepare import Prepared


# --- held-out rows before and after training ------------------------------------------------------
@dataclass(frozen=True)
class EvalSet:
    """The held-out split whose loss and answers are measured before and after training, and all
    questions."""

    split: DataSplit | None
    name: str
    questions: list[Question]
    training_questions: list[Question]
    # Asked before and after training for a person to read, where no exact match is measured.
    samples: tuple[Question, ...] = ()

    @property
    def prefix(self) -> str:
        """The first part of the names of its figures."""
        return {"test": "test", "val": "eval"}[self.name]

    def metric_tags(self, *, evaluates_in_training: bool) -> list[str]:
        """The figures of a run, as TensorBoard's tags. `evaluates_in_training`: whether it
        evaluates the validation rows."""
        questions_by_prefix = {}
        if evaluates_in_training:
            questions_by_prefix["eval"] = self.training_questions
        if self.split is not None:
            questions_by_prefix[self.prefix] = self.questions
        tags = []
        for prefix, questions in questions_by_prefix.items():
            tags.append(f"{prefix}/loss")
            if questions:
                tags.append(f"{prefix}/exact_match")
        return tags


@dataclass(frozen=True)
class EvalMetrics:
    """One evaluation of the held-out rows; None where it was not asked for."""

    loss: float | None = None
    exact_match: float | None = None
    rows: int = 0
    answers: tuple[GeneratedAnswer, ...] = ()
    generated_rows: int = 0  # whose answer was generated: `exact_match` is of them

    def as_json(self) -> dict[str, Any]:
        """`before` or `after` of the summary."""
        return {
            "loss": self.loss,
            "exact_match": self.exact_match,
            "rows": self.rows,
            "generated_rows": self.generated_rows,
        }


def build_eval_set(job: RunJob, prepared: Prepared) -> EvalSet:
    """The test rows where there are some, else the validation rows, with their questions."""
    splits = prepared.splits
    validation_questions = _held_out_questions(job, prepared, splits.val)
    name, split, questions = "val", splits.val, validation_questions
    if splits.test is not None:
        name, split = "test", splits.test
        questions = _held_out_questions(job, prepared, splits.test)
    samples = _sample_questions(job, prepared, split)
    return EvalSet(split, name, questions, validation_questions, samples)


# Three questions of the held-out rows, where eval.generate_rows was left open; none where each
# token of an answer would fetch the weights from RAM.
def _sample_questions(
    job: RunJob, prepared: Prepared, split: DataSplit | None
) -> tuple[Question, ...]:
    is_open = "generate_rows" not in job.loaded.config.eval.model_fields_set
    layout = job.plan.choice.layout
    is_slow = layout.offloads_params or layout.is_streamed  # the whole base moves for each token
    if split is None or not is_open or is_slow:
        return ()
    # some rows may have no answer that can be asked for
    questions = select_questions(
        split, prepared.renderer, prepared.tokenizer.tokenizer, max_questions=4 * _SHOWN_SAMPLES
    )
    return tuple(evenly_spaced(questions, _SHOWN_SAMPLES))


def _held_out_questions(job: RunJob, prepared: Prepared, split: DataSplit | None) -> list[Question]:
    max_questions = job.loaded.config.eval.generate_rows
    if split is None or max_questions == 0:
        return []
    selected_questions = select_questions(
        split, prepared.renderer, prepared.tokenizer.tokenizer, max_questions=max_questions
    )
    if not selected_questions:
        logger.info(
            "No held-out row ends with an answer that can be generated: exact match is not measured"
        )
    return selected_questions


def evaluate(trainer: PlannedLoop, eval_set: EvalSet) -> EvalMetrics | None:
    """Evaluate the held-out rows with the present weights: loss, and exact match if there are
    questions. None: there are no such rows."""
    split, eval_questions, prefix = eval_set.split, eval_set.questions, eval_set.prefix
    if split is None:
        return None
    last_step, metrics = trainer.last_metrics
    is_current = (
        last_step == trainer.state.global_step > 0 and not trainer.args.load_best_model_at_end
    )
    if prefix == "test" or not is_current:  # else training ended with this very evaluation
        text = f"{len(split.rows):,} rows"
        if eval_questions:
            text += f", with {len(eval_questions):,} answers generated"
        logger.info("Evaluation on %s: %s", eval_set.name, text)
        metrics = trainer.evaluate(split.rows, metric_key_prefix=prefix, questions=eval_questions)
    return EvalMetrics(
        loss=metrics[f"{prefix}_loss"],
        exact_match=metrics.get(f"{prefix}_exact_match"),
        rows=len(split.rows),
        answers=tuple(
            trainer.last_answers if eval_questions else trainer.answer_samples(eval_set.samples)
        ),
        generated_rows=len(trainer.last_answers) if eval_questions else 0,
    )


def estimate_remaining(trainer: PlannedLoop, eval_set: EvalSet) -> tuple[float, str]:
    """Estimate the seconds of evaluations (with answers), checkpoints and the final save that are
    still to come, each as long as it last took in this run; the final save counts as a checkpoint.
    The text says what the estimate leaves out."""
    args, last_seconds = (
        trainer.args,
        {name: seconds[-1] for name, seconds in trainer.pause_seconds.items()},
    )
    evaluations = remaining_events(args.eval_strategy, args.eval_steps, trainer.state)
    checkpoints = remaining_events(args.save_strategy, args.save_steps, trainer.state)
    # training ends with an evaluation of the validation rows, which is then that of the trained
    # model too
    if (
        eval_set.name == "val"
        and eval_set.split is not None
        and (evaluations == 0 or args.load_best_model_at_end)
    ):
        evaluations += 1
    counts = {
        "eval": evaluations,
        "test": int(eval_set.name == "test"),
        "checkpoint": checkpoints + 1,
    }
    # rows that were not evaluated yet, by those that were
    for name, stand_in in (("eval", "test"), ("test", "eval")):
        if stand_in in last_seconds:
            last_seconds.setdefault(name, last_seconds[stand_in])
    # a resumed run, or one without eval.before_training, has timed none
    seconds = sum(count * last_seconds.get(name, 0.0) for name, count in counts.items())
    if "eval" not in last_seconds and counts["eval"] + counts["test"] > 0:
        return seconds, ", evaluations not counted"
    return seconds, ""


def remaining_events(strategy: str, interval_steps: float | None, state: TrainerState) -> int:
    """Count the coming evaluations or saves of a run that does them every `interval_steps` and
    after the last step, or once an epoch; one that is due after the present step counts."""
    # `epoch` counts micro-batches, and the last step of an epoch may have fewer
    steps_per_epoch = math.ceil(state.global_step / state.epoch - 1e-6) if state.epoch else math.inf
    steps: float = {"steps": interval_steps, "no": math.inf}.get(strategy) or steps_per_epoch
    return int(math.ceil(state.max_steps / steps) - math.floor((state.global_step - 1) / steps))


class InitialEvaluation(TrainerCallback):
    """Measures before the first step: what the engine holds, and the figures of the held-out rows;
    as a callback where an engine wraps the model when training begins."""

    def __init__(
        self,
        job: RunJob,
        trainer: PlannedLoop,
        eval_set: EvalSet,
        peaks: MemoryPeaks,
        *,
        is_resumed: bool,
    ) -> None:
        self._job, self._trainer, self.eval_set, self._peaks = job, trainer, eval_set, peaks
        self._is_resumed = is_resumed
        # What each rank holds; None without an engine.
        self.engine_check: EngineCheck | None = None
        self.metrics: EvalMetrics | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Check the engine, then measure; raises TrainingError if it is not what the plan says."""
        self.engine_check = check = check_engine(self._trainer, self._job.plan)
        logger.debug(
            "Engine: %s proved: the model is a %s over %d ranks",
            check.layout,
            check.wrapped_class,
            check.ranks,
        )
        self.measure()

    def measure(self) -> None:
        """Loading is over: measure the held-out rows; a resumed run keeps the figures of its first
        start."""
        self._peaks.close()
        folder, is_first = self._job.folder, distributed.is_first()
        if not self._job.loaded.config.eval.before_training or self.eval_set.split is None:
            return
        if self._is_resumed:
            recorded_metrics = folder.read_manifest().get("before") if is_first else None
            if recorded_metrics := distributed.broadcast_value(recorded_metrics):
                self.metrics = EvalMetrics(**recorded_metrics)
            return
        self.metrics = evaluate(self._trainer, self.eval_set)
        if is_first and self.metrics is not None:
            folder.update_manifest(before=self.metrics.as_json())


# --- the end of a run -----------------------------------------------------------------------------
logger = logging.getLogger(__name__)

# Passes that a run's seconds by tokens are fitted to, at least.
MIN_FITTED_PASSES = 5

# Questions whose answers are kept in the summary, and the longest text of each.
MAX_KEPT_SAMPLES, _MAX_SAMPLE_CHARACTERS = 12, 2_000
# Of them a terminal shows, and an own run asks.
_SHOWN_SAMPLES = 3


def build_summary(
    job: RunJob,
    trainer: PlannedLoop,
    stop_controller: StopController,
    update_check: UpdateCheck,
    initial_evaluation: InitialEvaluation,
    metrics_after: EvalMetrics | None,
    monitors: RunMonitors,
    *,
    tokens_per_s: float,
) -> dict[str, Any]:
    """`summary.json`; `finish_run` adds `model_path` once the weights are saved. `tokens_per_s`: of
    all ranks."""
    is_stopped, compile_monitor = stop_controller.has_stopped_early, trainer.compile_monitor
    metrics_before, updates = initial_evaluation.metrics, update_check.facts
    evaluations = []
    if distributed.is_first():
        evaluations = read_evaluations(job.folder.metrics_path, stage_name=job.folder.stage_name)
    summary = {
        "status": "stopped" if is_stopped else "finished",
        "split": initial_evaluation.eval_set.name,
        "before": metrics_before.as_json() if metrics_before else None,
        "after": metrics_after.as_json() if metrics_after else None,
        "samples": sample_answers(metrics_before, metrics_after),
        **monitors.peaks.summary_fields(job.plan),
        "tokens_per_s": round(tokens_per_s, 2),
        "steps": trainer.state.global_step,
        "skipped_steps": trainer.non_finite_guard.skipped_steps,
        "ran_out": trainer.step_memory.has_halved,
        "wall_s": round(time.time() - monitors.start_time, 2),
        "exit": Interrupted.exit_code if is_stopped and stop_controller.signal is not None else 0,
        "engine_proof": plain_data(
            initial_evaluation.engine_check
            or engines.single_process_check(trainer, job.plan.layout)
        ),
        "updates": updates.as_json() if updates else None,
        "compile": compile_monitor.figures() if compile_monitor else None,
        "evaluations": evaluations,
        "predicted_tokens_per_s": (
            round(job.plan.speed.tokens_per_s, 2) if job.plan.speed_known else None
        ),
    }
    summary["pass_times"] = pass_times(
        job.plan, trainer._monitor.timed_passes(), floor_s=trainer.step_memory.pass_floor_s
    )
    if job.plan.kernels:  # what the plan counted, what was used, and why they differ
        used, counted = list(trainer.kernels.replaced), asdict(job.plan.kernels)
        summary["kernels"] = {"used": used, "counted": counted, "reason": trainer.kernels.reason}
    return summary


def pass_times(
    plan: Plan, passes: Sequence[tuple[int, float]], *, floor_s: float | None
) -> dict[str, float] | None:
    """Seconds of a pass at no tokens, which were measured (`floor_s`), and of each token, fitted to
    the passes of a run (0: they do not tell); None where they were not, or there are too few."""
    predicted = plan.choice.uncorrected.pass_times
    if floor_s is None or predicted is None or len(passes) < MIN_FITTED_PASSES:
        return None
    token_s = calibration.fit_token_seconds(passes, predicted, host_s=floor_s)
    return {"pass_s": floor_s, "token_s": token_s, "passes": len(passes)}


def summary_lines(job: RunJob, summary: Mapping[str, Any], *, start_step: int) -> list[str]:
    """The last lines of a run; `start_step`: steps of earlier starts."""
    predicted, steps = summary["predicted_tokens_per_s"], summary["steps"]
    steps_text = f"{steps - start_step} of {steps}, after a resume," if start_step else f"{steps}"
    if summary["skipped_steps"]:
        steps_text += f" ({summary['skipped_steps']} skipped: not finite)"
    speed = f"{summary['tokens_per_s']:,.0f} tokens/s in training"
    if predicted is not None:
        speed += f" ({predicted:,.0f} predicted)"
    lines = [f"Steps: {steps_text} in {format_duration(summary['wall_s'])}; {speed}"]
    rows = (summary["after"] or summary["before"] or {}).get("rows")
    for name, before, after in result_figures(summary):
        lines.append(
            f"Held-out {name} ({summary['split']}, {rows} rows): {before} before, {after} after"
        )
    for sample in summary["samples"][:_SHOWN_SAMPLES]:
        verdict = "right" if sample["right"] else f"expected: {one_line(sample['expected'])}"
        lines.append(f"Asked: {one_line(sample['asked'])}")
        if sample["before"] is not None:
            lines.append(f"  before: {one_line(sample['before'])}")
        lines.append(f"  after:  {one_line(sample['after'])}  ({verdict})")
    lines += [format_peak(summary["peak_bytes"]), f"Written to: {job.folder.path}"]
    # the error says how to resume, the last stage what is next
    if summary["exit"] or job.folder.parent_run is not None:
        return lines
    if summary["status"] == "stopped":
        return [*lines, f"Stopped early; resume with: {resume_command(job)}"]
    commands = next_run_commands(
        job.folder,
        job.loaded.path,
        on_gpu=bool(job.plan.hardware.gpus),
        has_held_out_rows=summary["after"] is not None,
    )
    return [
        *lines,
        f"Talk to it: make chat RUN={job.folder.shell_path}",
        f"Try next: {', '.join(commands)}",
    ]


def sample_answers(
    metrics_before: EvalMetrics | None, metrics_after: EvalMetrics | None
) -> list[dict[str, Any]]:
    """Some questions, evenly spaced, with the answers of the untrained (if asked) and the trained
    model."""
    answers = metrics_after.answers if metrics_after else ()
    before_by_prompt = {
        answer.question.prompt_text: _truncate(answer.text)
        for answer in (metrics_before.answers if metrics_before else ())
    }
    return [
        {
            "asked": _truncate(answer.question.prompt_text),
            "expected": _truncate(answer.question.reference),
            "before": before_by_prompt.get(answer.question.prompt_text),
            "after": _truncate(answer.text),
            "right": answer.is_correct,
        }
        for answer in evenly_spaced(answers, MAX_KEPT_SAMPLES)
    ]


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_SAMPLE_CHARACTERS else text[: _MAX_SAMPLE_CHARACTERS - 1] + "…"


def format_peak(peak: Mapping[str, Any]) -> str:
    """The run's highest phase, predicted and measured."""
    scope, bound_text, measured = "reserved on a GPU", "", peak["measured_reserved"]
    if "measured_rss" in peak:
        scope, bound_text, measured = "above the libraries' own", "at most ", peak["measured_rss"]
    predicted = peak["predicted_reserved"] or 0  # plans of earlier versions know no phases
    return (
        f"Peak memory {scope}, in {peak['moment']}:"
        f" {bound_text}{predicted / GIB:.2f} GiB predicted, {measured / GIB:.2f} GiB measured"
    )


def finish_run(
    job: RunJob,
    prepared: Prepared,
    trainer: PlannedLoop,
    summary: dict[str, Any],
    peaks: MemoryPeaks,
    *,
    start_step: int,
) -> None:
    """Save what was trained, write and log the summary; raises Interrupted if the user stopped the
    run."""
    steps, is_finished = summary["steps"], summary["status"] == "finished"
    if is_finished:
        with peaks.during("saving"):
            _save_trained_weights(job, prepared, trainer, steps=steps)
        summary |= peaks.summary_fields(job.plan)
        summary["model_path"] = str(job.folder.model_path(is_adapter=prepared.trains_adapter))
    if distributed.is_first():
        job.folder.write_json("summary.json", summary)
        job.folder.update_manifest(
            status=summary["status"], ended=datetime.now(UTC).isoformat(timespec="seconds")
        )
        if is_finished and prepared.backend.name != "unsloth":  # its process knows no template
            write_model_card(job, prepared, summary)
        for line in summary_lines(job, summary, start_step=start_step):
            logger.info("%s", line)
    # a launcher ends rank 0 when another leaves before rank 0 has written the summary
    distributed.barrier()
    if summary["exit"]:
        hint = f"resume with: {resume_command(job)}" if distributed.is_first() else "by rank 0"
        raise Interrupted(f"stopped at step {steps}, state saved; {hint}")


def write_model_card(job: RunJob, prepared: Prepared, summary: dict[str, Any]) -> None:
    """Write the model card of the trained weights; where the disk refuses it, the weights are whole
    without it."""
    card = CardFacts(
        kind="adapter" if prepared.trains_adapter else "model",
        name=job.folder.whole_run.path.name,
        config=job.loaded.config,
        plan=job.plan,
        model_spec=prepared.model_spec,
        manifest=job.folder.whole_run.read_manifest(),
        summary=summary,
        stop_ids=answer_stop_ids(
            job.loaded.config, prepared.tokenizer.tokenizer, prepared.renderer
        ),
    )
    try:
        write_card(job.folder.model_path(is_adapter=prepared.trains_adapter), card)
    except OSError as error:
        logger.warning("The model card could not be written: %s", error)


def _save_trained_weights(
    job: RunJob, prepared: Prepared, trainer: PlannedLoop, *, steps: int
) -> None:
    path, tokenizer = (
        job.folder.model_path(is_adapter=prepared.trains_adapter),
        prepared.tokenizer.tokenizer,
    )
    dtype = None if prepared.trains_adapter else prepared.model_spec.dtype
    model = trainer.accelerator.unwrap_model(trainer.model)
    needed_bytes = engines.trained_bytes(trainer, dtype)
    free_space = distributed.broadcast_value(free_disk_bytes(path.parent))
    tensors = state = None
    trainer.heartbeat.note(
        trainer.state.global_step, "saving the trained weights", saved_bytes=needed_bytes
    )
    with require_disk_space(
        path.parent, needed_bytes, "the trained weights", available_bytes=free_space
    ):
        if trainer.is_fsdp_enabled and not prepared.trains_adapter:
            tensors = full_state_dict.full_tensors(trainer.model)
        else:
            state = full_state_dict.gather_state_dict(
                trainer, from_fp32_masters=dtype is torch.float32
            )
        if distributed.is_first():
            if prepared.tokenizer.original_template is not None:
                tokenizer.chat_template = prepared.tokenizer.original_template
            has_trained_lora_b = any(
                weight.requires_grad
                for name, weight in model.named_parameters()
                if "lora_B" in name
            )
            base_folder = None
            if prepared.model_spec.text_tower is not None and not prepared.trains_adapter:
                # a whole model of images and text keeps of its base what did not train
                base_model = job.loaded.config.model
                base_folder = fetch_base_folder(base_model.name, revision=base_model.revision)
            save_model(
                model,
                tokenizer,
                path,
                base_folder=base_folder,
                images=prepared.image_source,
                state_dict=state,
                tensors=tensors,
                dtype=dtype,
                steps=steps if has_trained_lora_b else 0,
            )
            if not prepared.trains_adapter:  # whoever loads it ends answers where training did
                set_stop_tokens(
                    path,
                    answer_stop_ids(job.loaded.config, tokenizer, prepared.renderer),
                    tokenizer.pad_token_id,
                )
            record_digests(path)
        else:
            # gathering is collective: every rank has to walk through all tensors
            for _ in tensors or ():
                pass
    trainer.wait_for_disk()
