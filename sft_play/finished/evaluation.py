"""`make eval`: the figures of a finished run's model beside those of its base, on the same held-out
rows, or a file's; the loss of a model on token rows; and the tasks of lm-evaluation-harness, where
it is installed. And what `make ship` measures: base and trained model on held-out rows and on the
general sample, and the merge.
"""

import hashlib
import importlib.util
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import is_peft_model
from accelerate.utils.memory import should_reduce_batch_size
from datasets import Dataset

from sft_play.answers import Answer
from sft_play.data.build.splits import DataSplit
from sft_play.data.build.stats import token_digest
from sft_play.data.masks.render import Renderer
from sft_play.data.masks.token_row import IGNORED
from sft_play.data.sources.files import find_data_paths, find_source
from sft_play.data.sources.formats import Chat
from sft_play.data.sources.images import Picture
from sft_play.data.sources.messages import Message
from sft_play.data.sources.raw import BadRow
from sft_play.data.sources.row_images import split_at_images
from sft_play.errors import ConfigError, DataError, SftPlayError
from sft_play.finished.export.checks import merge_test
from sft_play.finished.export.merge import ensure_whole_model_folder
from sft_play.finished.metrics import (
    BOOTSTRAP_RESAMPLES,
    BOOTSTRAP_SEED,
    CONFIDENCE_LEVEL,
    Metric,
    MetricComparison,
    compare_metrics,
    finite_or_none,
    select_metrics,
)
from sft_play.finished.respond import (
    HeldOutRows,
    Responder,
    build_run_renderer,
    build_run_splits,
    compute_dtype,
    load_held_out_rows,
    measure_both_models,
    require_images,
    written_images,
)
from sft_play.finished.run import (
    FinishedRun,
    find_continued_adapter,
    find_merged_model,
    next_command_line,
    translate_write_errors,
)
from sft_play.finished.ship import (
    GENERAL_SAMPLE_VERSION,
    SHIP_FILE,
    SHIP_ROWS,
    Evidence,
    GeneralEvidence,
    GeneralSample,
    Losses,
    MergeEvidence,
    ShipResult,
    TaskEvidence,
    Thresholds,
    build_provenance,
    chance_losses,
    general_sample,
    judge_evidence,
    too_few_rows_reason,
)
from sft_play.log import one_line
from sft_play.machine.software import install_command
from sft_play.models.config_json import base_weights_identity
from sft_play.process.waiting import report_wait
from sft_play.runs.folder import write_json, write_text
from sft_play.runs.lookup import lock_run
from sft_play.text import align_columns
from sft_play.training.class_checks.adapter_trial import has_custom_logits
from sft_play.training.loop.rows import PICTURES, Collator, row_lengths
from sft_play.training.measure.exact_match import (
    Question,
    build_questions,
    evenly_spaced,
    select_questions,
)
from sft_play.training.model.fused_head import fused_head
from sft_play.training.model.vision import find_vision
from sft_play.training.prepare.device_checks import free_memory
from sft_play.training.prepare.library_messages import quiet_libraries
from sft_play.training.prepare.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

# Of each row what one model made of it, as eval.jsonl has it: nll, tokens, correct, and the answer
# with its metrics.
RowFigures = list[dict[str, Any]]


# --- the loss of a model on token rows ------------------------------------------------------------
#
# Each row has its own, in the arithmetic of the trainer's evaluation.
#
# TRL's fused head gives the log-probability of each trained token without whole logits: only tiles
# of at most 4,096 tokens by 32,768 words of the vocabulary exist at a time. The trainer evaluates
# through the same head.
_SCORED_COLUMNS = ("input_ids", "labels", PICTURES)


class RowScore(NamedTuple):
    """How well a model predicts the trained tokens of one row."""

    nll: float  # negative log-likelihood, summed over the trained tokens, in nats
    tokens: int  # trained ones; the first of a row is never predicted
    correct: int  # trained tokens that the model thinks likeliest


@torch.no_grad()
def score_rows(
    model: Any,
    rows: Sequence[Any],
    *,
    max_batch_tokens: int,
    autocast_dtype: torch.dtype | None = None,
) -> list[RowScore]:
    """The score of each row, in the rows' order.

    Args:
        model: a causal language model, with an adapter or without; it is left as it was.
        rows: with `input_ids` and `labels` (-100: not trained), and `images` where they have any;
            a Dataset is read batch by batch.
        max_batch_tokens: tokens of a batch, with padding; halved where memory runs out.
        autocast_dtype: the dtype of matrix products; None for that of the weights. A run's is
            `compute_dtype(run)`.

    Raises:
        RuntimeError: a single row does not fit into memory (torch's own error).
    """
    lengths = (
        row_lengths(rows).tolist()
        if isinstance(rows, Dataset)
        else [len(row["input_ids"]) for row in rows]
    )
    # longest first: where memory is too small that shows at the first batch, not after most of the
    # work
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    scores: dict[int, RowScore] = {}
    was_training, start = model.training, 0
    model.eval()
    try:
        with (
            fused_head(model, from_class_logits=has_custom_logits(model.config)),
            report_wait(
                "Computing losses", unit="rows", count_total=lambda: len(lengths)
            ) as progress,
        ):
            while start < len(order):
                longest = max(1, lengths[order[start]])
                batch = order[start : start + max(1, max_batch_tokens // longest)]
                batch_rows = [
                    {name: row[name] for name in _SCORED_COLUMNS if name in row}
                    for row in (rows[index] for index in batch)
                ]
                try:
                    scores |= dict(
                        zip(batch, _score_batch(model, batch_rows, autocast_dtype), strict=True)
                    )
                    start += len(batch)
                    progress.add(len(batch))
                    continue
                except RuntimeError as error:
                    if len(batch) == 1 or not should_reduce_batch_size(error):
                        raise
                # only here: while the exception lives, so does what its frames hold
                max_batch_tokens = longest * len(batch) // 2
                logger.warning(
                    "Out of memory: continuing with at most %s tokens a batch",
                    f"{max_batch_tokens:,}",
                )
                free_memory()
    finally:
        model.train(was_training)
    return [scores[index] for index in range(len(lengths))]


def score_rows_of_run(run: FinishedRun, model: Any, rows: Sequence[Any]) -> list[RowScore]:
    """Score rows by one of the run's models, in the batches and the dtype of the run's own
    evaluation."""
    plan = run.plan()
    return score_rows(  # type: ignore[no-any-return]
        model,
        rows,
        # of the longest row, which may be shorter than max_seq_len
        max_batch_tokens=plan.eval_batch * plan.choice.step.seq_len,
        autocast_dtype=compute_dtype(run),
    )


def _score_batch(
    model: Any, batch_rows: Sequence[dict[str, Any]], autocast_dtype: torch.dtype | None
) -> list[RowScore]:
    vision = find_vision(model)
    # padding is masked: which token it is does not matter
    batch = Collator(pad_id=0, images=None if vision is None else vision.images)(batch_rows)
    dtype = autocast_dtype or next(model.parameters()).dtype
    with torch.autocast(
        model.device.type, dtype=dtype, enabled=dtype in (torch.bfloat16, torch.float16)
    ):
        output = model(
            **{name: tensor.to(model.device) for name, tensor in batch.items()},
            use_cache=False,
            fused_lm_head=True,
        )
    sums = (
        -output.log_probs.double().sum(1),
        output.label_mask.sum(1),
        output.is_top1.sum(1).round().long(),
    )
    return [RowScore(*row) for row in zip(*(values_B.tolist() for values_B in sums), strict=True)]


# --- the rows that `make eval` reads --------------------------------------------------------------
@dataclass(frozen=True)
class EvalRows:
    """Token rows to score: the run's held-out ones, or a file's; none where TASKS= stood alone."""

    split: str | None = None  # `val` or `test`
    data: str | None = None  # the file that DATA= named
    rows: Any = ()
    row_indices: Sequence[int] = ()  # of the rows in their split
    split_size: int = 0  # rows of the whole split, before LIMIT=
    # A question and the messages before its answer, by the position of the row among `rows`.
    questions: Mapping[int, tuple[Question, list[Message]]] = field(default_factory=dict)
    # Rows of the split that were trained on, token for token; None where that is not known.
    rows_trained_on: int | None = None


def load_eval_rows(
    run: FinishedRun,
    *,
    split: str | None,
    data: str | None,
    limit: int | None,
    needs_questions: bool,
) -> EvalRows:
    """Load the rows to score, and with `needs_questions` the questions among them.

    Args:
        split: `test` or `val`; None is test where there is one, else val.
        data: a file in place of a split.
        limit: the most rows that are taken, evenly spaced; None takes all.

    Raises:
        DataError: the run has no such rows, or they cannot be read.
    """
    tokenizer = load_tokenizer(run.config).tokenizer
    if data is not None:
        split_rows, rows_trained_on = _load_file_split(run, tokenizer, data)
    else:
        splits = build_run_splits(run, run.config, tokenizer)
        available = {
            name: rows
            for name, rows in (("test", splits.test), ("val", splits.val))
            if rows is not None
        }
        split = split or next(iter(available), "validation or test")
        if split not in available:
            raise DataError(
                f"{run.folder.path} has no {split} rows, only"
                f" {', '.join(available) or 'trained ones'}; leave SPLIT= out, or name a file that"
                " it has not seen with DATA=FILE"
            )
        split_rows = available[split]
        rows_trained_on = split_rows.stats.shared_rows.get("train", 0)
    split_size = len(split_rows.rows)
    row_indices = evenly_spaced(range(split_size), limit or split_size)
    questions: dict[int, tuple[Question, list[Message]]] = {}
    if needs_questions:  # by the rule of the run's own exact match
        positions = {row_index: position for position, row_index in enumerate(row_indices)}
        chats = {
            positions[row_index]: split_rows.chats[chat_index]
            for chat_index, row_index in enumerate(split_rows.chats.row_indices)
            if row_index in positions
        }
        built = build_questions([*chats.values()], build_run_renderer(run, tokenizer), tokenizer)
        questions = {
            position: (question, list(map(split_at_images, chat.messages[:-1])))
            for (position, chat), question in zip(chats.items(), built, strict=True)
            if question is not None
        }
    if split_rows.stats.image_rows:
        require_images(run, data or f"the {split} split")
    rows = split_rows.rows.select(row_indices)
    return EvalRows(split, data, rows, row_indices, split_size, questions, rows_trained_on)


def _load_file_split(run: FinishedRun, tokenizer: Any, data: str) -> tuple[DataSplit, int | None]:
    """Read a file as the run's test rows would be read; returns its rows, and how many of them were
    trained on. Only for that count are the run's own rows read: None where they are gone."""
    try:
        find_source(data)
    except DataError as error:
        raise DataError(f"DATA={error}") from None
    config, label = run.config, "data.test_path"
    settings: dict[str, Any] = {"test_path": data}  # shared rows are counted
    try:
        find_data_paths(config.data)
        is_own_data_present = True
    except DataError as error:
        logger.warning(
            "The data that the run was trained on is gone (%s): whether rows of DATA= were trained"
            " on is not known",
            one_line(str(error)),
        )
        is_own_data_present, label = False, "data.train_path"
        settings |= {
            "train_path": data,
            "val_path": None,
            "text_path": None,
            "sources": (),
            "val_fraction": 0.0,
        }
        if config.task_mode == "cpt_mixed":
            config = config.model_copy(update={"task_mode": "sft"})
    config = config.model_copy(update={"data": config.data.model_copy(update=settings)})
    try:
        splits = build_run_splits(run, config, tokenizer)
    except DataError as error:
        raise DataError(str(error).replace(label, "DATA")) from error
    if splits.test is None:
        raise DataError(
            f"DATA={one_line(data)} holds no rows for this run: {'; '.join(splits.notes)}"
        )
    trained_on = splits.test.stats.shared_rows.get("train", 0) if is_own_data_present else None
    return splits.test, trained_on


# --- tasks of lm-evaluation-harness ---------------------------------------------------------------
class TaskComparison(NamedTuple):
    """A metric of a task by the harness's name for it (metric and filter, such as `acc,none`), with
    the standard error of the trained model's, where it gives one."""

    task: str
    metric: str
    base: float
    tuned: float
    stderr: float | None


def find_tasks(tasks: Sequence[str]) -> list[str]:
    """Find the tasks that TASKS= names: by the harness's names, by patterns (`mmlu_*`), or by YAML
    files, which stay as they are. Raises ConfigError where the harness is not installed, or does
    not know one."""
    if not tasks:
        return []
    if importlib.util.find_spec("lm_eval") is None:
        command = install_command("sft-play[tasks]")
        raise ConfigError(f"TASKS= needs lm-evaluation-harness: {command}")
    from lm_eval.tasks import TaskManager

    manager, task_names = TaskManager(), list[str]()
    for name in tasks:
        matches = [name] if Path(name).is_file() else manager.match_tasks([name])
        if not matches:
            raise ConfigError(
                f"TASKS={one_line(name)}: lm-evaluation-harness has no such task;"
                " lm-eval ls tasks lists them"
            )
        task_names += matches
    return task_names


def run_tasks(
    run: FinishedRun, model: Any, tokenizer: Any, task_names: Sequence[str], *, limit: int | None
) -> dict[str, Any]:
    """Run the tasks on a model; returns what the harness's `simple_evaluate` does. Runs on chats
    use their chat template. Raises ConfigError where the harness fails, for example because a
    task's data cannot be fetched.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    plan = run.plan()
    compute = plan.precision.compute
    # it wants transformers' class: the base model, in whose layers the adapter sits
    base_model = model.get_base_model() if is_peft_model(model) else model
    # it ties weights, and transformers would tie embeddings again that training made different, or
    # fail at PEFT's wrapper of them
    base_model.tie_weights = lambda *_, **__: None
    try:
        harness = HFLM(
            pretrained=base_model,
            tokenizer=tokenizer,
            batch_size="auto" if base_model.device.type == "cuda" else plan.eval_batch,
            mixed_precision_dtype=compute if compute != "float32" else None,
        )
        results = simple_evaluate(
            model=harness,
            tasks=list(task_names),
            limit=limit,
            # a run on plain text learnt no turns
            apply_chat_template=run.config.task_mode != "cpt",
            log_samples=False,
        )
    except Exception as error:  # of the harness, the hub, and what tasks run
        raise ConfigError(
            f"TASKS={one_line(','.join(task_names))}: lm-evaluation-harness failed: "
            f"{type(error).__name__}: {one_line(str(error), limit=300)}"
        ) from error
    finally:
        del base_model.tie_weights
    return dict(results or {})


def compare_tasks(base: dict[str, Any], tuned: dict[str, Any]) -> tuple[TaskComparison, ...]:
    """Compare two results of the harness (`run_tasks`), metric by metric of each task."""
    comparisons = []
    for task, values in tuned.get("results", {}).items():
        # others are names, and "N/A" where a standard error is not known
        numbers = {
            metric: value for metric, value in values.items() if isinstance(value, (int, float))
        }
        for metric, value in numbers.items():
            name, _, filter_name = metric.partition(",")
            if filter_name and not name.endswith("_stderr"):
                comparisons.append(
                    TaskComparison(
                        task,
                        metric,
                        base["results"][task][metric],
                        value,
                        stderr=numbers.get(f"{name}_stderr,{filter_name}"),
                    )
                )
    return tuple(comparisons)


# --- make eval ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Evaluation(Answer):
    """What `make eval` measured, and where it is written."""

    run: Path
    rows: EvalRows
    tokens: int
    comparisons: Sequence[MetricComparison]
    tasks: Sequence[TaskComparison]
    # Further fields of the summary: what was used, and `before`: the adapter that the run
    # continued, which `base` then means, or None.
    summary_fields: dict[str, Any]
    rows_path: Path | None
    path: Path

    def as_json(self) -> dict[str, Any]:
        rows = self.rows
        return {
            "ok": True,
            "run": str(self.run),
            "split": rows.split,
            "data": rows.data,
            "rows": len(rows.row_indices),
            "rows_of_split": rows.split_size,
            "answers": len(rows.questions),
            "trained_on": rows.rows_trained_on,
            "tokens": self.tokens,
            "figures": {comparison.name: comparison.as_json() for comparison in self.comparisons},
            "perplexity": next(
                (figure.perplexity for figure in self.comparisons if figure.is_loss), None
            ),
            "tasks": [
                {**task._asdict(), "difference": task.tuned - task.base} for task in self.tasks
            ],
            **self.summary_fields,
            "rows_path": str(self.rows_path) if self.rows_path else None,
            "path": str(self.path),
        }

    def lines(self) -> list[str]:
        lines, rows, before = [], self.rows, self.summary_fields["before"]
        if rows.row_indices:
            lines.append(
                f"Evaluated: {len(rows.row_indices):,} of {rows.split_size:,} rows of"
                f" {rows.data or rows.split} ({self.tokens:,} trained tokens,"
                f" {len(rows.questions):,} answers)"
            )
        if rows.rows_trained_on:
            lines.append(
                f"Warning: {rows.rows_trained_on:,} of {rows.split_size:,} rows were trained on,"
                " token for token, and say nothing about new data"
            )
        if before is not None:
            lines.append(f"Before: {before}, which this run continued")
        table = [
            [
                "",
                "base" if before is None else "before",
                "tuned",
                f"difference [{CONFIDENCE_LEVEL:.0%} interval]",
                "",
            ],
            *(row for comparison in self.comparisons for row in comparison.table_rows()),
        ]
        for task in self.tasks:
            difference = f"{task.tuned - task.base:+.4f}"
            if task.stderr is not None:
                difference += f" (standard error {task.stderr:.4f})"
            table.append(
                [
                    f"{task.task} {task.metric}",
                    f"{task.base:.4f}",
                    f"{task.tuned:.4f}",
                    difference,
                    "",
                ]
            )
        lines += align_columns(table)
        return [
            *lines,
            f"Written to: {', '.join(str(path) for path in (self.rows_path, self.path) if path)}",
            next_command_line("ship", RUN=self.run),
        ]


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
    """Evaluate base and trained model on the same rows, and write `eval.jsonl` and `eval.json`; the
    options are those of `make eval` (docs/trained.md). Raises ConfigError where a name is wrong, a
    package is missing, or a place cannot be written; DataError where there are no rows; ModelError
    where the base is gone."""
    # whatever a wrong word can stop is asked before the models load: they take minutes
    rows_path = out or run.folder.path / "eval.jsonl"
    if rows_path.suffix == ".json" or rows_path.is_dir():
        raise ConfigError(
            f"OUT={one_line(str(rows_path))} has to name a JSONL for the rows; the summary goes"
            " beside it as .json"
        )
    path = rows_path.with_suffix(".json")
    chosen_tasks, chosen_metrics = find_tasks(tasks), select_metrics(metrics)
    quiet_libraries()
    rows = EvalRows()
    if not tasks or split or data or _has_held_out_rows(run):  # with tasks rows are not needed
        rows = load_eval_rows(
            run, split=split, data=data, limit=limit, needs_questions=bool(chosen_metrics)
        )
        _try_metrics(rows, metrics, chosen_metrics)
    max_answer_tokens = max_new_tokens or run.config.eval.max_new_tokens

    def measure_model(model_label: str, model: Any) -> tuple[RowFigures, dict[str, Any]]:
        responder, task_results = Responder(run, model), dict[str, Any]()
        logger.info("Evaluating the %s: %s rows", model_label, f"{len(rows.row_indices):,}")
        figures = [score._asdict() for score in score_rows_of_run(run, model, rows.rows)]
        answers = responder.answers(
            [question for question, _ in rows.questions.values()],
            max_new_tokens=max_answer_tokens,
            model_label=model_label,
        )
        for position, answer in zip(rows.questions, answers, strict=True):
            figures[position] = {
                "answer": answer.text,
                **figures[position],
                **_metric_values(rows, chosen_metrics, position, answer.text),
            }
        if chosen_tasks:
            task_results = run_tasks(run, model, responder.tokenizer, chosen_tasks, limit=limit)
        return figures, task_results

    (base_figures, base_tasks), (tuned_figures, tuned_tasks) = measure_both_models(
        run, measure_model
    )
    continued_adapter = find_continued_adapter(run)
    evaluation = Evaluation(
        run.folder.path,
        rows,
        tokens=sum(row["tokens"] for row in tuned_figures),
        comparisons=compare_metrics(base_figures, tuned_figures, chosen_metrics),
        tasks=compare_tasks(base_tasks, tuned_tasks),
        summary_fields={
            "by": {
                "weights": base_weights_identity(str(run.weights), None)["sha256"],
                "max_new_tokens": max_answer_tokens,
                "resamples": BOOTSTRAP_RESAMPLES,
                "seed": BOOTSTRAP_SEED,
            },
            "before": continued_adapter.name if continued_adapter else None,
        },
        rows_path=rows_path if rows.row_indices else None,
        path=path,
    )
    if rows.row_indices:
        with translate_write_errors(rows_path):
            write_text(rows_path, _rows_jsonl(run, rows, base_figures, tuned_figures))
    with translate_write_errors(path):
        write_json(path, evaluation.as_json())
    return evaluation


def _has_held_out_rows(run: FinishedRun) -> bool:
    data = run.config.data
    has_val = data.val_path or data.val_fraction or any(part.val_path for part in data.sources)
    return bool(has_val or data.test_path)


def _try_metrics(rows: EvalRows, names: Sequence[str], metrics: Sequence[Metric]) -> None:
    """Raise ConfigError where the metrics that METRICS= names have no answers to score, or a user's
    own function fails on the first reference."""
    if names and metrics and not rows.questions:
        raise ConfigError(
            f"METRICS={one_line(' '.join(names))}:"
            f" no row of {rows.data or rows.split} ends with an answer"
        )
    for position, (question, _) in [*rows.questions.items()][:1]:
        _metric_values(rows, metrics, position, question.reference)


def _metric_values(
    rows: EvalRows, metrics: Sequence[Metric], position: int, answer: str
) -> dict[str, float]:
    question, messages = rows.questions[position]
    try:
        return {
            metric.name: metric.score(answer, question.reference, messages) for metric in metrics
        }
    except ConfigError as error:
        raise ConfigError(
            f"row {rows.row_indices[position] + 1} of {rows.data or rows.split}: {error}"
        ) from error


def _rows_jsonl(
    run: FinishedRun, rows: EvalRows, base_figures: RowFigures, tuned_figures: RowFigures
) -> str:
    tokenizer = load_tokenizer(run.config).tokenizer
    lines = []
    for position, row_index in enumerate(rows.row_indices):
        record: dict[str, Any] = {"row": row_index + 1}
        if position in rows.questions:
            question, messages = rows.questions[position]
            record |= {"prompt": messages, "reference": question.reference}
            if question.images:
                record["images"] = written_images(question.images)
        else:
            record["text"] = tokenizer.decode(rows.rows[position]["input_ids"])
        record |= {"base": base_figures[position], "tuned": tuned_figures[position]}
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    return "".join(lines)


# --- what `make ship` measures --------------------------------------------------------------------
# Tokens of a row of the general sample: real tokenizers need fewer; byte-like ones may need more
# than a model has positions.
_MAX_ROW_TOKENS = 512

# `input_ids` and `labels`, and `images` where a row has any.
LabelledRow = dict[str, list[Any]]


def text_rows(sample: GeneralSample, renderer: Renderer) -> list[LabelledRow]:
    """The texts as tokens, all of them trained, cut where they are too long; none has the
    end-of-text token."""
    rows = []
    for ids in renderer.tokenise_documents(list(sample.texts)):
        # predicting that a text ends here says nothing about what the model knows
        bare = ids[:-1] if ids[-1] == renderer.tokenizer_parts.end_of_text_id else ids
        rows.append({"input_ids": bare[:_MAX_ROW_TOKENS], "labels": bare[:_MAX_ROW_TOKENS]})
    return rows


def chat_rows(sample: GeneralSample, renderer: Renderer) -> list[LabelledRow]:
    """The chats as tokens by the chat template, the assistant's turns trained, cut where they are
    too long; without those that the template cannot render, or that have no trained token then."""
    chats: Sequence[Any] = [
        Chat(f"chat {number} of {GENERAL_SAMPLE_VERSION}", messages)
        for number, messages in enumerate(sample.chats, start=1)
    ]
    return [
        {"input_ids": row.input_ids[:_MAX_ROW_TOKENS], "labels": row.labels[:_MAX_ROW_TOKENS]}
        for row in renderer.render_all(chats)
        if not isinstance(row, BadRow)
        and any(label != IGNORED for label in row.labels[1:_MAX_ROW_TOKENS])
    ]


# --- a run measured -------------------------------------------------------------------------------
def judge_run(
    run: FinishedRun, *, max_rows: int = SHIP_ROWS, tolerance: float | None = None
) -> ShipResult:
    """Measure, judge, and write ship.json into the run folder. What refuses the run whatever is
    measured, such as too few rows, is known before a model loads.

    Args:
        max_rows: the most held-out rows that are measured.
        tolerance: nats a token by which the loss on general text and chats may rise.

    Raises:
        DataError: the run's data is gone.
        ModelError: the base or an adapter is gone, or another one.
        RunFolderError: another process writes the run.
    """
    quiet_libraries()
    thresholds = Thresholds()
    if tolerance is not None:
        thresholds = replace(thresholds, max_text_rise=tolerance, max_chat_rise=tolerance)
    sample = general_sample()
    provenance = build_provenance(run, sample)
    with lock_run(run.folder):
        held_out_rows = load_held_out_rows(run)
        rows, left_out = distinct_rows(held_out_rows, max_rows)
        # bytes are those of pictures that are in no file of their own
        rows_json = json.dumps(rows, default=lambda value: hashlib.sha256(value).hexdigest())
        provenance["rows_sha256"] = hashlib.sha256(rows_json.encode()).hexdigest()
        evidence = _measure_losses(
            run,
            held_out_rows,
            rows,
            left_out,
            sample,
            thresholds,
            max_questions=min(max_rows, run.config.eval.generate_rows),
        )
        if not judge_evidence(evidence, thresholds).reasons:
            evidence = replace(evidence, merge=_measure_merge(run))
        result = ShipResult(
            run.folder.path, evidence, thresholds, judge_evidence(evidence, thresholds), provenance
        )
        with translate_write_errors(run.folder.path / SHIP_FILE):
            run.folder.write_json(SHIP_FILE, result.as_json())
    return result


def _measure_losses(
    run: FinishedRun,
    held_out_rows: HeldOutRows,
    rows: Sequence[LabelledRow],
    left_out: int,
    sample: GeneralSample,
    thresholds: Thresholds,
    *,
    max_questions: int,
) -> Evidence:
    """Measure everything but the merge; where the rows are too few nothing is, and the evidence
    says so. Raises ModelError if a model cannot be loaded."""
    split = "" if held_out_rows.name == "train" else held_out_rows.name
    task = TaskEvidence(split, left_out=left_out)
    refusal = too_few_rows_reason(task, len(rows), thresholds)
    if refusal:
        return Evidence(task, GeneralEvidence(), MergeEvidence("not needed"), refusal)
    tokenizer = load_tokenizer(run.config).tokenizer
    renderer = build_run_renderer(run, tokenizer)
    questions = select_questions(
        held_out_rows.split, renderer, tokenizer, max_questions=max_questions
    )
    general_renderer = Renderer(
        tokenizer,
        # the sample's own settings, whatever the run trained on: only so do figures of two runs
        # compare
        run.config.data.model_copy(update={"loss_on": "assistant", "multi_turn": "whole"}),
        max_seq_len=_MAX_ROW_TOKENS,
        today=renderer.today,
    )
    texts, chats = text_rows(sample, general_renderer), chat_rows(sample, general_renderer)

    def measure_model(
        model_label: str, model: Any
    ) -> tuple[list[list[RowScore]], tuple[bool, ...]]:
        max_positions = (
            getattr(model.config.get_text_config(), "max_position_embeddings", None)
            or _MAX_ROW_TOKENS
        )
        # rows of the general sample may be longer than what a small model reads; a row with images
        # keeps all of their tokens
        scores = []
        for row_set in (rows, texts, chats):
            shortened = [
                row
                if row.get(PICTURES)
                else {column: values[:max_positions] for column, values in row.items()}
                for row in row_set
            ]
            scores.append(score_rows_of_run(run, model, shortened))
        answers = Responder(run, model).answers(
            questions, max_new_tokens=run.config.eval.max_new_tokens, model_label=model_label
        )
        return scores, tuple(answer.is_correct for answer in answers)

    (base_scores, right_base), (tuned_scores, right_tuned) = measure_both_models(run, measure_model)
    losses, text_losses, chat_losses = map(
        _row_losses, base_scores, tuned_scores, (rows, texts, chats)
    )
    task = replace(task, losses=losses, right_base=right_base, right_tuned=right_tuned)
    return Evidence(
        task,
        GeneralEvidence(text_losses, chat_losses, refused=len(sample.chats) - len(chats)),
        MergeEvidence("not needed"),
    )


def distinct_rows(held_out_rows: HeldOutRows, count: int) -> tuple[list[LabelledRow], int]:
    """Select up to `count` held-out rows, evenly spaced; returns them, and how many were left out
    because they are repeated, or training rows too. A run that was trained on all of its rows has
    none."""
    if held_out_rows.name == "train":
        return [], 0
    # more are read than are wanted, since some may be repeated; at most so many, since each is
    # compared
    candidate_indices = evenly_spaced(range(len(held_out_rows.split.rows)), 4 * count)
    trained_digests, distinct = set(held_out_rows.train.stats.digests), {}
    for index in candidate_indices:
        row = held_out_rows.split.rows[index]
        pictures = row.get(PICTURES) or ()
        digest = token_digest(row["input_ids"], [Picture(**picture) for picture in pictures])
        if digest not in trained_digests:
            distinct[digest] = {"input_ids": list(row["input_ids"]), "labels": list(row["labels"])}
            if pictures:
                distinct[digest][PICTURES] = list(pictures)
    rows = list(distinct.values())
    return evenly_spaced(rows, count), len(candidate_indices) - len(rows)


def _row_losses(
    base: Sequence[RowScore], tuned: Sequence[RowScore], rows: Sequence[LabelledRow]
) -> Losses:
    """The losses of the rows that have a trained token."""
    trained_labels = [[label for label in row["labels"][1:] if label != IGNORED] for row in rows]
    chance = chance_losses(trained_labels) if any(trained_labels) else []
    columns = [
        (
            finite_or_none(base_score.nll),
            finite_or_none(tuned_score.nll),
            base_score.tokens,
            row_chance,
        )
        for base_score, tuned_score, row_chance in zip(base, tuned, chance, strict=bool(chance))
        if base_score.tokens
    ]
    return Losses(*zip(*columns, strict=True))


def _measure_merge(run: FinishedRun) -> MergeEvidence:
    if not run.is_adapter:
        return MergeEvidence("no adapter")
    try:
        if find_merged_model(run) is None:
            ensure_whole_model_folder(run, is_locked=True)
        merge_result = merge_test(run)
    except DataError:
        raise
    except SftPlayError as error:
        return MergeEvidence("failed", reason=one_line(str(error), limit=500))
    return MergeEvidence(
        "compared",
        finite_or_none(merge_result.kl_merged),
        merge_result.kl_limit,
        merge_result.kl_base,
    )
