"""`make eval`: the figures of a finished run's model beside those of its base, on the same held-out
rows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.answers import Answer
from sft_play.errors import ConfigError
from sft_play.finished.eval_rows import EvalRows, compute_dtype, eval_batch_tokens, load_eval_rows, score_rows
from sft_play.finished.harness import HarnessTasks, TaskComparison, compare_tasks, find_tasks, run_tasks
from sft_play.finished.load import find_continued_adapter, measure_both_models
from sft_play.finished.metrics import (
    BOOTSTRAP_RESAMPLES,
    BOOTSTRAP_SEED,
    Metric,
    MetricComparison,
    ModelMetrics,
    compare_metrics,
    exp_or_inf,
    finite_or_none,
    format_comparisons,
    select_metrics,
)
from sft_play.finished.respond import Responder
from sft_play.finished.run import FinishedRun, next_command_line, translate_write_errors
from sft_play.log import one_line
from sft_play.models.config_json import base_weights_identity
from sft_play.runs.files import write_json, write_text
from sft_play.training.prepare.library_messages import quiet_libraries
from sft_play.training.prepare.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

ROWS_FILE, SUMMARY_FILE = "eval.jsonl", "eval.json"


@dataclass(frozen=True)
class Evaluation(Answer):
    """What `make eval` measured, and where it is written."""

    run: Path
    rows: EvalRows | None
    tokens: int
    comparisons: tuple[MetricComparison, ...]
    tasks: tuple[TaskComparison, ...]
    summary_fields: dict[str, Any]
    """Further fields of the summary: what was used, and `before`: the adapter that the run continued, which `base` then
    means, or None."""
    rows_path: Path | None
    path: Path

    @property
    def base_label(self) -> str:
        """What the model before training is called in a table: the base, unless the run continued an adapter."""
        return "base" if self.summary_fields["before"] is None else "before"

    @property
    def perplexity(self) -> dict[str, float | None] | None:
        """That of base and tuned, and their ratio with its interval, from the loss."""
        loss = next((comparison for comparison in self.comparisons if comparison.is_loss), None)
        if loss is None:
            return None
        values = {"base": loss.base, "tuned": loss.tuned, "ratio": loss.interval.difference, "low": loss.interval.low,
                "high": loss.interval.high}  # fmt: skip
        return {name: finite_or_none(exp_or_inf(value)) for name, value in values.items()}

    def as_json(self) -> dict[str, Any]:
        rows = self.rows
        return {
            "ok": True,
            "run": str(self.run),
            "split": rows.name if rows and rows.is_run_split else None,
            "data": rows.name if rows and not rows.is_run_split else None,
            "rows": len(rows.row_indices) if rows else 0,
            "rows_of_split": rows.split_size if rows else 0,
            "answers": len(rows.questions) if rows else 0,
            "trained_on": rows.rows_trained_on if rows else None,
            "tokens": self.tokens,
            "figures": {comparison.name: comparison.as_json() for comparison in self.comparisons},
            "perplexity": self.perplexity,
            "tasks": [task.as_json() for task in self.tasks],
            **self.summary_fields,
            "rows_path": str(self.rows_path) if self.rows_path else None,
            "path": str(self.path),
        }

    def lines(self) -> list[str]:
        lines = self._rows_lines()
        if self.summary_fields["before"] is not None:
            lines.append(f"Before: {self.summary_fields['before']}, which this run continued")
        lines += format_comparisons(self.comparisons, self.perplexity, base_label=self.base_label)
        for task in self.tasks:
            lines += task.lines(base_label=self.base_label)
        paths = ", ".join(str(path) for path in (self.rows_path, self.path) if path)
        return [*lines, f"Written to: {paths}", next_command_line("ship", RUN=self.run)]

    def _rows_lines(self) -> list[str]:
        rows = self.rows
        if rows is None:
            return []
        total = f" of {rows.split_size:,}" if len(rows.row_indices) < rows.split_size else ""
        answers = f", {len(rows.questions):,} answers" if rows.questions else ""
        lines = [
            f"Evaluated: {len(rows.row_indices):,}{total} rows of {rows.name} ({self.tokens:,} trained tokens{answers})"
        ]
        if rows.rows_trained_on:
            warning = f"{rows.rows_trained_on:,} of {rows.split_size:,} rows were trained on, token for token"
            lines.append(f"Warning: {warning}, and say nothing about new data")
        return lines


def evaluate_run(
    run: FinishedRun,
    *,
    split: str | None = None,
    data: str | None = None,
    limit: int | None = None,
    metrics: Sequence[str] = (),
    tasks: Sequence[str] = (),
    out: Path | None = None,
    max_new_tokens: int | None = None,
) -> Evaluation:
    """Evaluate base and trained model on the same rows, and write `eval.jsonl` and `eval.json`, with the options of
    docs/trained.md (eval). Raises ConfigError where a name is wrong, a package is missing, or a place cannot be
    written; DataError where there are no rows; ModelError where the base is gone."""
    # whatever a wrong word can stop is asked before the models load: they take minutes
    rows_path, path = _output_paths(run, out)
    chosen_tasks = find_tasks(tasks)
    chosen_metrics = select_metrics(metrics)
    quiet_libraries()
    rows = None
    if not tasks or _has_rows(run, split, data):
        rows = load_eval_rows(run, split=split, data=data, limit=limit, needs_questions=bool(chosen_metrics))
        _require_answers(rows, metrics, chosen_metrics)
    max_answer_tokens = max_new_tokens or run.config.eval.max_new_tokens
    base_metrics, tuned_metrics = _evaluate_models(
        run, rows, chosen_metrics, tasks=chosen_tasks, limit=limit, max_new_tokens=max_answer_tokens
    )
    comparisons, continued_adapter = (
        compare_metrics(rows, chosen_metrics, base_metrics, tuned_metrics) if rows else (),
        find_continued_adapter(run),
    )
    summary_fields = {
        "by": {"weights": base_weights_identity(str(run.weights), None)["sha256"], "max_new_tokens": max_answer_tokens,
               "resamples": BOOTSTRAP_RESAMPLES, "seed": BOOTSTRAP_SEED},
        "before": continued_adapter.name if continued_adapter else None,
    }  # fmt: skip
    task_results = (
        compare_tasks(base_metrics.tasks, tuned_metrics.tasks) if base_metrics.tasks and tuned_metrics.tasks else ()
    )
    tokens = sum(score.tokens for score in tuned_metrics.scores)
    evaluation = Evaluation(
        run.folder.path, rows, tokens, comparisons, task_results, summary_fields, rows_path if rows else None, path
    )
    if rows:
        rows_jsonl = _rows_jsonl(run, rows, base_metrics, tuned_metrics)
        with translate_write_errors(rows_path):
            write_text(rows_path, rows_jsonl)
    with translate_write_errors(path):
        write_json(path, evaluation.as_json())
    return evaluation


def _output_paths(run: FinishedRun, out: Path | None) -> tuple[Path, Path]:
    if out is None:
        return run.folder.path / ROWS_FILE, run.folder.path / SUMMARY_FILE
    out_text = one_line(str(out))
    if out.suffix == ".json":
        raise ConfigError(f"OUT={out_text} names the rows, a JSONL; the summary is written beside it as .json")
    if out.is_dir():
        raise ConfigError(f"OUT={out_text} is a folder; name a file, such as OUT={out_text}/eval.jsonl")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"OUT={out_text} cannot be written: {error.strerror}") from None
    return out, out.with_suffix(".json")


def _require_answers(rows: EvalRows, metric_names: Sequence[str], metrics: Sequence[Metric]) -> None:
    if metric_names and metrics and not rows.questions:
        raise ConfigError(
            f"METRICS={one_line(' '.join(metric_names))}: no row of {rows.name} ends with an answer to generate"
        )
    if rows.questions:
        _metric_values(rows, metrics, [rows.questions[0].question.reference])


def _has_rows(run: FinishedRun, split: str | None, data: str | None) -> bool:
    """True if rows are asked for, or the run has held-out ones: with tasks it needs none."""
    config = run.config.data
    has_held_out = (
        config.val_path or config.test_path or config.val_fraction or any(source.val_path for source in config.sources)
    )
    return bool(split or data or has_held_out)


def _evaluate_models(
    run: FinishedRun,
    rows: EvalRows | None,
    metrics: Sequence[Metric],
    *,
    tasks: HarnessTasks | None,
    limit: int | None,
    max_new_tokens: int,
) -> tuple[ModelMetrics, ModelMetrics]:
    def evaluate_model(model_label: str, model: Any) -> ModelMetrics:
        scores, answers, responder = [], [], Responder(run, model)
        if rows is not None:
            logger.info("Evaluating the %s: %s rows", model_label, f"{len(rows.row_indices):,}")
            scores = score_rows(
                model, rows.rows, max_batch_tokens=eval_batch_tokens(run), autocast_dtype=compute_dtype(run)
            )
            questions = [question_row.question for question_row in rows.questions]
            answers = [
                answer.text
                for answer in responder.answers(questions, max_new_tokens=max_new_tokens, model_label=model_label)
            ]
        task_results = run_tasks(run, model, responder.tokenizer, tasks, limit=limit) if tasks else None
        return ModelMetrics(scores, answers, _metric_values(rows, metrics, answers), task_results)

    return measure_both_models(run, evaluate_model)


def _metric_values(rows: EvalRows | None, metrics: Sequence[Metric], answers: Sequence[str]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {metric.name: [] for metric in metrics} if answers and rows else {}
    for question_row, answer in zip(rows.questions if rows else (), answers, strict=False):
        for metric in metrics:
            try:
                value = metric.score(answer, question_row.question.reference, question_row.messages)
            except ConfigError as error:
                raise ConfigError(
                    f"row {question_row.row_index + 1} of {rows.name if rows else ''}: {error}"
                ) from error
            values[metric.name].append(value)
    return values


def _rows_jsonl(run: FinishedRun, rows: EvalRows, base_metrics: ModelMetrics, tuned_metrics: ModelMetrics) -> str:
    tokenizer = load_tokenizer(run.config).tokenizer
    question_indices = {
        question_row.row_index: question_index for question_index, question_row in enumerate(rows.questions)
    }
    lines = []
    for index, row_index in enumerate(rows.row_indices):
        record: dict[str, Any] = {"row": row_index + 1}
        question_index = question_indices.get(row_index)
        if question_index is None:
            record["text"] = tokenizer.decode(rows.rows[index]["input_ids"])
        else:
            record |= {
                "prompt": list(rows.questions[question_index].messages),
                "reference": rows.questions[question_index].question.reference,
            }
        for name, model_metrics in (("base", base_metrics), ("tuned", tuned_metrics)):
            score = model_metrics.scores[index]
            record[name] = {
                **({} if question_index is None else {"answer": model_metrics.answers[question_index]}),
                "nll": score.nll, "tokens": score.tokens, "correct": score.correct,
                **({} if question_index is None else {metric: values[question_index] for metric,
                values in model_metrics.values.items()}),
            }  # fmt: skip
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    return "".join(lines)
