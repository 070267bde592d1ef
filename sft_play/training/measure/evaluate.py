"""The figures of the held-out rows before and after training: their loss, and the answers to their questions."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback, TrainerState

from sft_play.data.build.splits import Split
from sft_play.training.job import RunJob
from sft_play.training.loop.loop import PlannedLoop
from sft_play.training.loop.rows import to_dataset
from sft_play.training.measure.exact_match import Answer, Question, questions
from sft_play.training.measure.peaks import Peaks
from sft_play.training.prepare.prepare import Prepared
from sft_play.training.ranks import distributed
from sft_play.training.ranks.engines import EngineCheck, check_engine, engine_check_of_one

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvalSet:
    """The held-out split whose loss and answers are measured before and after training, and all questions."""

    split: Split | None
    name: str
    asked: list[Question]
    asked_while_training: list[Question]

    def metrics(self, *, while_training: bool) -> list[str]:
        """The figures of a run, as TensorBoard's tags. `while_training`: whether it evaluates the validation rows."""
        evaluated = {"eval": self.asked_while_training} if while_training else {}
        if self.split is not None:
            evaluated["test" if self.name == "test" else "eval"] = self.asked
        return [
            f"{prefix}/{figure}"
            for prefix, asked in evaluated.items()
            for figure in ("loss", *(["exact_match"] if asked else []))
        ]


@dataclass(frozen=True)
class Figures:
    """One evaluation of the held-out rows; None where it was not asked for."""

    loss: float | None = None
    exact_match: float | None = None
    rows: int = 0
    answers: tuple[Answer, ...] = ()
    generated_rows: int = 0  # whose answer was generated: `exact_match` is of them

    def as_json(self) -> dict[str, Any]:
        """`before` or `after` of the summary."""
        return {
            "loss": self.loss, "exact_match": self.exact_match, "rows": self.rows,
            "generated_rows": self.generated_rows,
        }  # fmt: skip


def eval_set_of(job: RunJob, prepared: Prepared) -> EvalSet:
    """The test rows where there are some, else the validation rows, with their questions."""
    splits = prepared.splits
    split, name = (splits.test, "test") if splits.test is not None else (splits.val, "val")
    asked = _questions(job, prepared, split)
    return EvalSet(split, name, asked, asked if name == "val" else _questions(job, prepared, splits.val))


def _questions(job: RunJob, prepared: Prepared, split: Split | None) -> list[Question]:
    most = job.loaded.config.eval.generate_rows
    if split is None or most == 0:
        return []
    asked = questions(split, prepared.renderer, prepared.tokenizer.tokenizer, most=most)
    if not asked:
        logger.info("No held-out row ends with an answer that can be generated: exact match is not measured")
    return asked


def evaluate(trainer: PlannedLoop, eval_set: EvalSet) -> Figures | None:
    """Loss and exact match of the held-out rows with the present weights; None where there are no such rows."""
    split, name, asked = eval_set.split, eval_set.name, eval_set.asked
    if split is None:
        return None
    prefix = "test" if name == "test" else "eval"
    last_step, metrics = trainer.last_metrics
    is_current = last_step == trainer.state.global_step > 0 and not trainer.args.load_best_model_at_end
    if name == "test" or not is_current:  # else training ended with this very evaluation
        with_answers = f", with {len(asked):,} answers generated" if asked else ""
        logger.info("Evaluation on %s: %s rows%s", name, f"{len(split.rows):,}", with_answers)
        metrics = trainer.evaluate(to_dataset(split.rows), metric_key_prefix=prefix, questions=asked)
    answers = tuple(trainer.last_answers) if asked else ()
    return Figures(
        metrics[f"{prefix}_loss"], metrics.get(f"{prefix}_exact_match"), len(split.rows), answers, len(answers)
    )


def to_come(trainer: PlannedLoop, eval_set: EvalSet) -> tuple[float, str]:
    """Seconds of what follows besides the steps that are left, as long as each took last in this run: evaluations with
    their answers, checkpoints, and the trained weights, which take about what a checkpoint does. In words: what these
    seconds lack."""
    args, last_s = trainer.args, {name: seconds[-1] for name, seconds in trainer.pause_seconds.items()}
    evaluations = visits_left(args.eval_strategy, args.eval_steps, trainer.state)
    checkpoints = visits_left(args.save_strategy, args.save_steps, trainer.state)
    # training ends with an evaluation of the validation rows, which is then that of the trained model too
    if eval_set.name == "val" and eval_set.split is not None and (evaluations == 0 or args.load_best_model_at_end):
        evaluations += 1
    counts = {"eval": evaluations, "test": int(eval_set.name == "test"), "checkpoint": checkpoints + 1}
    for name, other in (("eval", "test"), ("test", "eval")):  # rows that were not evaluated yet, by those that were
        if other in last_s:
            last_s.setdefault(name, last_s[other])
    # a resumed run, or one without eval.before_training, has timed none
    is_unknown = "eval" not in last_s and counts["eval"] + counts["test"] > 0
    seconds = sum(count * last_s.get(name, 0.0) for name, count in counts.items())
    return seconds, ", evaluations not counted" if is_unknown else ""


def visits_left(strategy: str, every: float | None, state: TrainerState) -> int:
    """How often something is still to come that a run does every so many `steps` and after the last, or once an epoch;
    what is due after the present step is to come."""
    # `epoch` counts micro-batches, of which the last step of an epoch may have fewer
    of_epoch = math.ceil(state.global_step / state.epoch - 1e-6) if state.epoch else math.inf
    steps: float = {"steps": every, "no": math.inf}.get(strategy) or of_epoch
    return int(math.ceil(state.max_steps / steps) - math.floor((state.global_step - 1) / steps))


class BeforeTraining(TrainerCallback):
    """Measures before the first step: what the engine holds, and the figures of the held-out rows; as a callback where
    an engine wraps the model when training begins."""

    def __init__(self, job: RunJob, trainer: PlannedLoop, eval_set: EvalSet, peaks: Peaks, *, is_resumed: bool) -> None:
        self._job, self._trainer, self.eval_set, self._peaks = job, trainer, eval_set, peaks
        self._is_resumed = is_resumed
        self._engine_check: EngineCheck | None = None
        self.figures: Figures | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Check the engine, then measure; raises TrainingError if it is not what the plan says."""
        self._engine_check = check_engine(self._trainer, self._job.plan)
        logger.debug("%s", self._engine_check.line)
        self.measure()

    def measure(self) -> None:
        """Loading is over: measure the held-out rows; a resumed run keeps the figures of its first start."""
        self._peaks.close()
        folder, is_first = self._job.folder, distributed.is_first()
        if not self._job.loaded.config.eval.before_training or self.eval_set.split is None:
            return
        if self._is_resumed:
            recorded = distributed.of_first(folder.manifest().get("before") if is_first else None)
            self.figures = Figures(**recorded) if recorded else None
            return
        self.figures = evaluate(self._trainer, self.eval_set)
        if is_first and self.figures is not None:
            folder.update_manifest(before=self.figures.as_json())

    @property
    def engine_check(self) -> EngineCheck:
        """What each rank holds; without an engine, what the one process holds now."""
        return self._engine_check or engine_check_of_one(self._trainer)
