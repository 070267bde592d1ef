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
from sft_play.finished.harness import TaskComparison, compare_tasks, find_tasks, run_tasks
from sft_play.finished.load import find_continued_adapter, measure_both_models
from sft_play.finished.metrics import (
    BOOTSTRAP_RESAMPLES,
    BOOTSTRAP_SEED,
    Metric,
    MetricComparison,
    compare_metrics,
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

# Of each row what one model made of it, as eval.jsonl has it: nll, tokens, correct, and the answer with its metrics.
RowFigures = list[dict[str, Any]]


@dataclass(frozen=True)
class Evaluation(Answer):
    """What `make eval` measured, and where it is written."""

    run: Path
    rows: EvalRows | None
    tokens: int
    comparisons: Sequence[MetricComparison]
    tasks: Sequence[TaskComparison]
    # Further fields of the summary: what was used, and `before`: the adapter that the run continued, which `base` then
    # means, or None.
    summary_fields: dict[str, Any]
    rows_path: Path | None
    path: Path

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
            "perplexity": next((figure.perplexity for figure in self.comparisons if figure.is_loss), None),
            "tasks": [task.as_json() for task in self.tasks],
            **self.summary_fields,
            "rows_path": str(self.rows_path) if self.rows_path else None,
            "path": str(self.path),
        }

    def lines(self) -> list[str]:
        lines, rows, before = [], self.rows, self.summary_fields["before"]
        if rows is not None:
            total = f" of {rows.split_size:,}" if len(rows.row_indices) < rows.split_size else ""
            answers = f", {len(rows.questions):,} answers" if rows.questions else ""
            counts = f"{len(rows.row_indices):,}{total} rows of {rows.name}"
            lines.append(f"Evaluated: {counts} ({self.tokens:,} trained tokens{answers})")
            if rows.rows_trained_on:
                warning = f"{rows.rows_trained_on:,} of {rows.split_size:,} rows were trained on, token for token"
                lines.append(f"Warning: {warning}, and say nothing about new data")
        if before is not None:
            lines.append(f"Before: {before}, which this run continued")
        base_label = "base" if before is None else "before"
        lines += format_comparisons(self.comparisons, base_label=base_label)
        lines += [task.format_line(base_label=base_label) for task in self.tasks]
        paths = ", ".join(str(path) for path in (self.rows_path, self.path) if path)
        return [*lines, f"Written to: {paths}", next_command_line("ship", RUN=self.run)]


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
        if metrics and chosen_metrics and not rows.questions:
            reason = f"no row of {rows.name} ends with an answer to generate"
            raise ConfigError(f"METRICS={one_line(' '.join(metrics))}: {reason}")
        for position, question_row in [*rows.questions.items()][:1]:  # a function that fails does so now
            _metric_values(rows, chosen_metrics, position, question_row.question.reference)
    max_answer_tokens = max_new_tokens or run.config.eval.max_new_tokens

    def measure_model(model_label: str, model: Any) -> tuple[RowFigures, dict[str, Any]]:
        responder, figures = Responder(run, model), []
        if rows is not None:
            logger.info("Evaluating the %s: %s rows", model_label, f"{len(rows.row_indices):,}")
            figures = _measure_rows(responder, rows, chosen_metrics, model_label, max_answer_tokens)
        if chosen_tasks is None:
            return figures, {}
        return figures, run_tasks(run, model, responder.tokenizer, chosen_tasks, limit=limit)

    (base_figures, base_tasks), (tuned_figures, tuned_tasks) = measure_both_models(run, measure_model)
    continued_adapter = find_continued_adapter(run)
    summary_fields = {
        "by": {"weights": base_weights_identity(str(run.weights), None)["sha256"], "max_new_tokens": max_answer_tokens,
               "resamples": BOOTSTRAP_RESAMPLES, "seed": BOOTSTRAP_SEED},
        "before": continued_adapter.name if continued_adapter else None,
    }  # fmt: skip
    evaluation = Evaluation(
        run.folder.path,
        rows,
        tokens=sum(row["tokens"] for row in tuned_figures),
        comparisons=compare_metrics(base_figures, tuned_figures, chosen_metrics) if rows else (),
        tasks=compare_tasks(base_tasks, tuned_tasks),
        summary_fields=summary_fields,
        rows_path=rows_path if rows else None,
        path=path,
    )
    if rows:
        rows_jsonl = _rows_jsonl(run, rows, base_figures, tuned_figures)
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


def _has_rows(run: FinishedRun, split: str | None, data: str | None) -> bool:
    """True if rows are asked for, or the run has held-out ones: with tasks it needs none."""
    config = run.config.data
    has_held_out = (
        config.val_path or config.test_path or config.val_fraction or any(source.val_path for source in config.sources)
    )
    return bool(split or data or has_held_out)


def _measure_rows(
    responder: Responder, rows: EvalRows, metrics: Sequence[Metric], model_label: str, max_new_tokens: int
) -> RowFigures:
    run = responder.run
    scores = score_rows(
        responder.model, rows.rows, max_batch_tokens=eval_batch_tokens(run), autocast_dtype=compute_dtype(run)
    )
    figures = [score._asdict() for score in scores]
    questions = [question_row.question for question_row in rows.questions.values()]
    answers = responder.answers(questions, max_new_tokens=max_new_tokens, model_label=model_label)
    for position, answer in zip(rows.questions, answers, strict=True):
        values = _metric_values(rows, metrics, position, answer.text)
        figures[position] = {"answer": answer.text, **figures[position], **values}
    return figures


def _metric_values(rows: EvalRows, metrics: Sequence[Metric], position: int, answer: str) -> dict[str, float]:
    question_row = rows.questions[position]
    try:
        return {
            metric.name: metric.score(answer, question_row.question.reference, question_row.messages)
            for metric in metrics
        }
    except ConfigError as error:
        raise ConfigError(f"row {rows.row_indices[position] + 1} of {rows.name}: {error}") from error


def _rows_jsonl(run: FinishedRun, rows: EvalRows, base_figures: RowFigures, tuned_figures: RowFigures) -> str:
    tokenizer = load_tokenizer(run.config).tokenizer
    lines = []
    for position, row_index in enumerate(rows.row_indices):
        record: dict[str, Any] = {"row": row_index + 1}
        question_row = rows.questions.get(position)
        if question_row is None:
            record["text"] = tokenizer.decode(rows.rows[position]["input_ids"])
        else:
            record |= {"prompt": list(question_row.messages), "reference": question_row.question.reference}
        record |= {"base": base_figures[position], "tuned": tuned_figures[position]}
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    return "".join(lines)
