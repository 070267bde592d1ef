"""`make eval`: the figures of a finished run's model beside those of its base, on the same held-out rows."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.errors import ConfigError
from sft_play.facts.models.architecture import base_weights_identity
from sft_play.finished.answer.respond import Responder
from sft_play.finished.evaluate.eval_rows import EvalRows, eval_rows
from sft_play.finished.evaluate.figures import (
    RESAMPLES,
    SEED,
    EvalFigure,
    Metric,
    ModelFigures,
    eval_figures,
    exp_or_inf,
    figure_table,
    finite,
    metrics_named,
)
from sft_play.finished.evaluate.harness import TaskFigures, Tasks, find_tasks, run_tasks, task_figures
from sft_play.finished.evaluate.score import batch_tokens, compute_dtype, score_rows
from sft_play.finished.load import continued_by, of_each_model
from sft_play.finished.run import FinishedRun, Outcome, next_line, writing
from sft_play.log import one_line
from sft_play.runs.files import write_json, write_text
from sft_play.training.prepare.quiet import quiet_libraries
from sft_play.training.prepare.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

ROWS_FILE, SUMMARY_FILE = "eval.jsonl", "eval.json"


@dataclass(frozen=True)
class Evaluation(Outcome):
    """What `make eval` measured, and where it is written."""

    run: Path
    rows: EvalRows | None
    tokens: int
    figures: tuple[EvalFigure, ...]
    tasks: tuple[TaskFigures, ...]
    facts: dict[str, Any]
    """Further fields of the summary: what was used, and `before`: the adapter that the run continued, which `base` then
    means, or None."""
    rows_path: Path | None
    path: Path

    @property
    def before(self) -> str:
        """What the model before training is called in a table: the base, unless the run continued an adapter."""
        return "base" if self.facts["before"] is None else "before"

    @property
    def perplexity(self) -> dict[str, float | None] | None:
        """That of base and tuned, and their ratio with its interval, from the loss."""
        loss = next((figure for figure in self.figures if figure.is_loss), None)
        if loss is None:
            return None
        ends = {"base": loss.base, "tuned": loss.tuned, "ratio": loss.interval.difference, "low": loss.interval.low,
                "high": loss.interval.high}  # fmt: skip
        return {name: finite(exp_or_inf(value)) for name, value in ends.items()}

    def as_json(self) -> dict[str, Any]:
        rows = self.rows
        return {
            "ok": True,
            "run": str(self.run),
            "split": rows.name if rows and rows.is_own else None,
            "data": rows.name if rows and not rows.is_own else None,
            "rows": len(rows.numbers) if rows else 0,
            "rows_of_split": rows.whole if rows else 0,
            "answers": len(rows.asked) if rows else 0,
            "trained_on": rows.seen if rows else None,
            "tokens": self.tokens,
            "figures": {figure.name: figure.as_json() for figure in self.figures},
            "perplexity": self.perplexity,
            "tasks": [one.as_json() for one in self.tasks],
            **self.facts,
            "rows_path": str(self.rows_path) if self.rows_path else None,
            "path": str(self.path),
        }

    def lines(self) -> list[str]:
        lines = self._rows_lines()
        if self.facts["before"] is not None:
            lines.append(f"Before: {self.facts['before']}, which this run continued")
        lines += figure_table(self.figures, self.perplexity, before=self.before)
        for task in self.tasks:
            lines += task.lines(before=self.before)
        paths = ", ".join(str(path) for path in (self.rows_path, self.path) if path)
        return [*lines, f"Written to: {paths}", next_line("ship", RUN=self.run)]

    def _rows_lines(self) -> list[str]:
        rows = self.rows
        if rows is None:
            return []
        of = f" of {rows.whole:,}" if len(rows.numbers) < rows.whole else ""
        answers = f", {len(rows.asked):,} answers" if rows.asked else ""
        lines = [f"Evaluated: {len(rows.numbers):,}{of} rows of {rows.name} ({self.tokens:,} trained tokens{answers})"]
        if rows.seen:
            seen = f"{rows.seen:,} of {rows.whole:,} rows were trained on, token for token"
            lines.append(f"Warning: {seen}, and say nothing about new data")
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
    rows_path, path = _places(run, out)
    chosen_tasks = find_tasks(tasks)
    wanted = metrics_named(metrics)
    quiet_libraries()
    rows = None
    if not tasks or _has_rows(run, split, data):
        rows = eval_rows(run, split=split, data=data, limit=limit, asks=bool(wanted))
        _require_answers(rows, metrics, wanted)
    length = max_new_tokens or run.config.eval.max_new_tokens
    base, tuned = _both(run, rows, wanted, tasks=chosen_tasks, limit=limit, max_new_tokens=length)
    figures, continued = eval_figures(rows, wanted, base, tuned) if rows else (), continued_by(run)
    facts = {
        "by": {"weights": base_weights_identity(str(run.weights), None)["sha256"], "max_new_tokens": length,
               "resamples": RESAMPLES, "seed": SEED},
        "before": continued.name if continued else None,
    }  # fmt: skip
    task_results = task_figures(base.tasks, tuned.tasks) if base.tasks and tuned.tasks else ()
    tokens = sum(one.tokens for one in tuned.scores)
    evaluation = Evaluation(
        run.folder.path, rows, tokens, figures, task_results, facts, rows_path if rows else None, path
    )
    if rows:
        text = _jsonl(run, rows, base, tuned)
        with writing(rows_path):
            write_text(rows_path, text)
    with writing(path):
        write_json(path, evaluation.as_json())
    return evaluation


def _places(run: FinishedRun, out: Path | None) -> tuple[Path, Path]:
    if out is None:
        return run.folder.path / ROWS_FILE, run.folder.path / SUMMARY_FILE
    shown = one_line(str(out))
    if out.suffix == ".json":
        raise ConfigError(f"OUT={shown} names the rows, a JSONL; the summary is written beside it as .json")
    if out.is_dir():
        raise ConfigError(f"OUT={shown} is a folder; name a file, such as OUT={shown}/eval.jsonl")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"OUT={shown} cannot be written: {error.strerror}") from None
    return out, out.with_suffix(".json")


def _require_answers(rows: EvalRows, named: Sequence[str], metrics: Sequence[Metric]) -> None:
    if named and metrics and not rows.asked:
        raise ConfigError(f"METRICS={one_line(' '.join(named))}: no row of {rows.name} ends with an answer to generate")
    if rows.asked:
        _values(rows, metrics, [rows.asked[0].question.reference])


def _has_rows(run: FinishedRun, split: str | None, data: str | None) -> bool:
    """Whether rows are asked for, or the run has held-out ones: with tasks it needs none."""
    config = run.config.data
    own = config.val_path or config.test_path or config.val_fraction or any(one.val_path for one in config.sources)
    return bool(split or data or own)


def _both(
    run: FinishedRun,
    rows: EvalRows | None,
    metrics: Sequence[Metric],
    *,
    tasks: Tasks | None,
    limit: int | None,
    max_new_tokens: int,
) -> tuple[ModelFigures, ModelFigures]:
    def measured(whose: str, model: Any) -> ModelFigures:
        scores, given, responder = [], [], Responder(run, model)
        if rows is not None:
            logger.info("Evaluating the %s: %s rows", whose, f"{len(rows.numbers):,}")
            scores = score_rows(model, rows.rows, most_tokens=batch_tokens(run), compute=compute_dtype(run))
            asked = [one.question for one in rows.asked]
            given = [answer.text for answer in responder.answers(asked, max_new_tokens=max_new_tokens, model_label=whose)]
        results = run_tasks(run, model, responder.tokenizer, tasks, limit=limit) if tasks else None
        return ModelFigures(scores, given, _values(rows, metrics, given), results)

    return of_each_model(run, measured)


def _values(rows: EvalRows | None, metrics: Sequence[Metric], given: Sequence[str]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {metric.name: [] for metric in metrics} if given and rows else {}
    for asked, answer in zip(rows.asked if rows else (), given, strict=False):
        for metric in metrics:
            try:
                value = metric.compare(answer, asked.question.reference, asked.messages)
            except ConfigError as error:
                raise ConfigError(f"row {asked.row + 1} of {rows.name if rows else ''}: {error}") from error
            values[metric.name].append(value)
    return values


def _jsonl(run: FinishedRun, rows: EvalRows, base: ModelFigures, tuned: ModelFigures) -> str:
    tokenizer = load_tokenizer(run.config).tokenizer
    places = {asked.row: at for at, asked in enumerate(rows.asked)}
    lines = []
    for index, number in enumerate(rows.numbers):
        line: dict[str, Any] = {"row": number + 1}
        at = places.get(number)
        if at is None:
            line["text"] = tokenizer.decode(rows.rows[index]["input_ids"])
        else:
            line |= {"prompt": list(rows.asked[at].messages), "reference": rows.asked[at].question.reference}
        for name, measured in (("base", base), ("tuned", tuned)):
            score = measured.scores[index]
            line[name] = {
                **({} if at is None else {"answer": measured.answers[at]}),
                "nll": score.nll, "tokens": score.tokens, "correct": score.correct,
                **({} if at is None else {metric: values[at] for metric, values in measured.values.items()}),
            }  # fmt: skip
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    return "".join(lines)
