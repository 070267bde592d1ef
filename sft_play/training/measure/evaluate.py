"""The figures of the held-out rows before and after training: their loss, and the answers to their
questions."""

import logging
import math
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback, TrainerState

from sft_play.data.build.splits import DataSplit
from sft_play.training import distributed
from sft_play.training.engines import EngineCheck, check_engine
from sft_play.training.job import RunJob
from sft_play.training.loop.loop import PlannedLoop
from sft_play.training.measure.exact_match import GeneratedAnswer, Question, select_questions
from sft_play.training.measure.monitor import MemoryPeaks
from sft_play.training.prepare.prepare import Prepared

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvalSet:
    """The held-out split whose loss and answers are measured before and after training, and all
    questions."""

    split: DataSplit | None
    name: str
    questions: list[Question]
    training_questions: list[Question]

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
    if splits.test is None:
        return EvalSet(splits.val, "val", validation_questions, validation_questions)
    return EvalSet(
        splits.test, "test", _held_out_questions(job, prepared, splits.test), validation_questions
    )


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
        answers=tuple(trainer.last_answers) if eval_questions else (),
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
