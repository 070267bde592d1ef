"""`make ship`: base and trained model measured on held-out rows and on the general sample, the merge
compared, and one verdict with everything that it was computed from (`ship_rule.judge_evidence`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sft_play.answers import Answer
from sft_play.data.build.stats import token_digest
from sft_play.data.masks.render import Renderer
from sft_play.data.masks.token_row import IGNORED, count_trained_tokens
from sft_play.data.sources.formats import Chat
from sft_play.data.sources.raw import BadRow
from sft_play.errors import DataError, ModelError, SftPlayError
from sft_play.exit_codes import DO_NOT_SHIP, EXIT_KINDS
from sft_play.finished import ship_rule as rule
from sft_play.finished.eval_rows import RowScore, compute_dtype, eval_batch_tokens, score_rows
from sft_play.finished.export.check_merge import merge_test
from sft_play.finished.export.merge import ensure_whole_model_folder
from sft_play.finished.export.places import find_merged_model
from sft_play.finished.load import (
    HeldOutRows,
    build_run_renderer,
    evenly_spaced_indices,
    find_continued_adapter,
    load_held_out_rows,
    measure_both_models,
)
from sft_play.finished.respond import Responder
from sft_play.finished.run import FinishedRun, next_command_line, translate_write_errors
from sft_play.log import one_line
from sft_play.models.config_json import base_weights_identity
from sft_play.runs.folder import installed_versions
from sft_play.runs.lookup import lock_run
from sft_play.training.measure.exact_match import select_questions
from sft_play.training.prepare.library_messages import quiet_libraries
from sft_play.training.prepare.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

SHIP_ROWS = 300
SHIP_FILE = "ship.json"
# Of the general sample; a change of a row is a new one.
GENERAL_SAMPLE_VERSION = "general-1"
# The general sample: short texts and chats about everything, that show what a fine-tuned model has lost.
#
# Written for this project, none of it taken from a dataset: prose, facts, arithmetic, reasoning, code in 17 languages
# and formats, data, 26 human languages, instructions and letters; and chats from one question to four turns, with and
# without a system prompt.
_GENERAL_FOLDER = Path(__file__).parent / "general"
# Tokens of a row of the general sample: real tokenizers need fewer; byte-like ones may need more than a model has
# positions.
_MAX_ROW_TOKENS = 512

LabelledRow = dict[str, list[int]]


@dataclass(frozen=True)
class ShipResult(Answer):
    """A verdict with its evidence, as it is written to ship.json."""

    run: Path
    evidence: rule.Evidence
    thresholds: rule.Thresholds
    verdict: rule.ShipVerdict
    provenance: dict[str, Any]

    @property
    def ok(self) -> bool:
        return self.verdict.ok

    def as_json(self) -> dict[str, Any]:
        return {
            "format": rule.SHIP_FORMAT, "ok": self.ok, "kind": EXIT_KINDS[0] if self.ok else DO_NOT_SHIP,
            "verdict": self.verdict.label, "reasons": self.verdict.reasons,
            "run": str(self.run), "checks": [check.as_json() for check in self.verdict.checks], **self.provenance,
            "thresholds": dataclasses.asdict(self.thresholds), "evidence": dataclasses.asdict(self.evidence),
        }  # fmt: skip

    def lines(self) -> list[str]:
        next_command = ("export", "FORMAT=gguf") if self.ok else ("eval", "writes every row")
        evidence = rule.format_evidence(self.verdict, self.provenance.get("before"))
        return [*evidence, f"Written to: {self.run / SHIP_FILE}", next_command_line(*next_command, RUN=self.run)]


def judge_run(run: FinishedRun, *, max_rows: int = SHIP_ROWS, tolerance: float | None = None) -> ShipResult:
    """Measure, judge, and write ship.json into the run folder. `tolerance`: nats a token by which the loss on general
    text and chats may rise. Raises DataError where the run's data is gone, or RunFolderError where another process
    writes it. What refuses the run whatever is measured is known before a model loads: rows, files."""
    quiet_libraries()
    thresholds = rule.Thresholds()
    if tolerance is not None:
        thresholds = dataclasses.replace(thresholds, max_text_rise=tolerance, max_chat_rise=tolerance)
    sample, continued_adapter = general_sample(), find_continued_adapter(run)
    provenance: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "sample": {"version": GENERAL_SAMPLE_VERSION, "sha256": sample.sha256},
        "weights": {"sha256": base_weights_identity(str(run.weights), None)["sha256"]},
        "base": (run.manifest.get("data") or {}).get("weights"),
        "before": continued_adapter.name if continued_adapter else None,
        "versions": installed_versions(),
    }
    with lock_run(run.folder):
        try:
            measurement = _ShipMeasurement(run, max_rows)
            provenance["rows_sha256"] = measurement.rows_sha256
            refusal_reason = rule.too_few_rows_reason(measurement.task, thresholds)
            evidence = (
                _unmeasured_evidence(measurement.task, refusal_reason)
                if refusal_reason
                else measurement.measure_evidence()
            )
        except ModelError as error:
            evidence = _unmeasured_evidence(rule.TaskEvidence(""), str(error))
        if not rule.judge_evidence(evidence, thresholds).reasons:
            evidence = dataclasses.replace(evidence, merge=_measure_merge(run))
        result = ShipResult(
            run.folder.path, evidence, thresholds, rule.judge_evidence(evidence, thresholds), provenance
        )
        with translate_write_errors(run.folder.path / SHIP_FILE):
            run.folder.write_json(SHIP_FILE, result.as_json())
    return result


def _unmeasured_evidence(task: rule.TaskEvidence, reason: str) -> rule.Evidence:
    return rule.Evidence(task, rule.GeneralEvidence(), rule.MergeEvidence("not needed"), reason)


class _ShipMeasurement:
    def __init__(self, run: FinishedRun, max_rows: int) -> None:
        config = run.config
        self.run = run
        tokenizer = load_tokenizer(config).tokenizer
        renderer = build_run_renderer(run, tokenizer)
        self.held_out_rows = load_held_out_rows(run)
        split = "" if self.held_out_rows.name == "train" else self.held_out_rows.name
        self.rows, left_out = distinct_rows(self.held_out_rows, max_rows) if split else ([], 0)
        placeholder_scores = [RowScore(math.nan, count_trained_tokens(row["labels"]), 0) for row in self.rows]
        # what is known of the task before a model reads its rows
        self.task = rule.TaskEvidence(
            split, _row_losses(placeholder_scores, placeholder_scores, self.rows), left_out=left_out
        )
        max_questions = min(max_rows, config.eval.generate_rows) if self.rows else 0
        self.questions = select_questions(self.held_out_rows.split, renderer, tokenizer, max_questions=max_questions)
        # the sample's own settings, whatever the run trained on: only so do figures of two runs compare
        general_renderer = Renderer(
            tokenizer,
            config.data.model_copy(update={"loss_on": "assistant", "multi_turn": "whole"}),
            max_seq_len=_MAX_ROW_TOKENS,
            today=renderer.today,
        )
        sample = general_sample()
        self.general_texts, self.general_chats = (
            text_rows(sample, general_renderer),
            chat_rows(sample, general_renderer),
        )
        self.refused_chats = len(sample.chats) - len(self.general_chats)
        self.rows_sha256 = hashlib.sha256(json.dumps(self.rows).encode()).hexdigest()

    def measure_evidence(self) -> rule.Evidence:
        """Measure all evidence but the merge; raises ModelError if a model cannot be loaded."""
        logger.info(
            "To be measured: %d rows of %s, %d of them with a generated answer, and %d general texts and chats",
            len(self.rows), self.task.split, len(self.questions), len(self.general_texts) + len(self.general_chats),
        )  # fmt: skip
        (base_scores, right_base), (tuned_scores, right_tuned) = measure_both_models(self.run, self._measure_model)
        text_losses = _row_losses(base_scores["text"], tuned_scores["text"], self.general_texts)
        chat_losses = _row_losses(base_scores["chats"], tuned_scores["chats"], self.general_chats)
        losses = _row_losses(base_scores["task"], tuned_scores["task"], self.rows)
        task = dataclasses.replace(self.task, losses=losses, right_base=right_base, right_tuned=right_tuned)
        return rule.Evidence(
            task, rule.GeneralEvidence(text_losses, chat_losses, self.refused_chats), rule.MergeEvidence("not needed")
        )

    def _measure_model(self, model_label: str, model: Any) -> tuple[dict[str, list[RowScore]], tuple[bool, ...]]:
        logger.info("Measuring the %s", model_label)
        row_sets = {"task": self.rows, "text": self.general_texts, "chats": self.general_chats}
        max_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or _MAX_ROW_TOKENS
        scores = {}
        for name, rows in row_sets.items():
            shortened_rows = [{column: values[:max_positions] for column, values in row.items()} for row in rows]
            max_batch_tokens, autocast_dtype = eval_batch_tokens(self.run), compute_dtype(self.run)
            scores[name] = score_rows(
                model, shortened_rows, max_batch_tokens=max_batch_tokens, autocast_dtype=autocast_dtype
            )
        answers = Responder(self.run, model).answers(self.questions, max_new_tokens=self.run.config.eval.max_new_tokens)
        return scores, tuple(answer.is_correct for answer in answers)


def distinct_rows(held_out_rows: HeldOutRows, count: int) -> tuple[list[LabelledRow], int]:
    """Up to `count` held-out rows, evenly spaced, and how many were left out: repeated, or training rows too."""
    # more are read than are wanted, since some may be repeated; at most so many, since each is compared
    candidate_indices = evenly_spaced_indices(len(held_out_rows.split.rows), 4 * count)
    trained_digests, distinct = set(held_out_rows.train.stats.digests), {}
    for index in candidate_indices:
        row = held_out_rows.split.rows[index]
        digest = token_digest(row["input_ids"])
        if digest not in trained_digests:
            distinct[digest] = {"input_ids": list(row["input_ids"]), "labels": list(row["labels"])}
    rows = list(distinct.values())
    return [rows[index] for index in evenly_spaced_indices(len(rows), count)], len(candidate_indices) - len(rows)


def _row_losses(base: Sequence[RowScore], tuned: Sequence[RowScore], rows: Sequence[LabelledRow]) -> rule.Losses:
    scored_indices = [index for index, score in enumerate(base) if score.tokens]
    trained_labels = [[label for label in row["labels"][1:] if label != IGNORED] for row in rows]
    chance = rule.chance_losses(trained_labels) if scored_indices else []

    def finite_nlls(scores: Sequence[RowScore]) -> tuple[float | None, ...]:
        return tuple(scores[index].nll if math.isfinite(scores[index].nll) else None for index in scored_indices)

    tokens, chance_nlls = (
        tuple(base[index].tokens for index in scored_indices),
        tuple(chance[index] for index in scored_indices),
    )
    return rule.Losses(finite_nlls(base), finite_nlls(tuned), tokens, chance_nlls)


def _measure_merge(run: FinishedRun) -> rule.MergeEvidence:
    if not run.is_adapter:
        return rule.MergeEvidence("no adapter")
    try:
        if find_merged_model(run) is None:
            ensure_whole_model_folder(run, is_locked=True)
        merge_result = merge_test(run)
    except DataError:
        raise
    except SftPlayError as error:
        return rule.MergeEvidence("failed", reason=one_line(str(error), limit=500))
    kl = merge_result.kl_merged if math.isfinite(merge_result.kl_merged) else None
    return rule.MergeEvidence("compared", kl, merge_result.kl_limit, merge_result.kl_base)


@dataclass(frozen=True)
class GeneralSample:
    """The texts and the chats (messages); `sha256` is that of both files."""

    texts: tuple[str, ...]
    chats: tuple[tuple[dict[str, str], ...], ...]
    sha256: str


def general_sample() -> GeneralSample:
    """The sample that ships with the project."""
    files = {name: (_GENERAL_FOLDER / f"{name}.jsonl").read_bytes() for name in ("text", "chats")}
    lines = {name: [json.loads(line) for line in data.decode("utf-8").splitlines()] for name, data in files.items()}
    return GeneralSample(
        tuple(row["text"] for row in lines["text"]),
        tuple(tuple(row["messages"]) for row in lines["chats"]),
        hashlib.sha256(files["text"] + files["chats"]).hexdigest(),
    )


def text_rows(sample: GeneralSample, renderer: Renderer) -> list[LabelledRow]:
    """The texts as tokens, all of them trained, cut where they are too long; none has the end-of-text token."""
    rows = []
    for ids in renderer.tokenise_documents(list(sample.texts)):
        # predicting that a text ends here says nothing about what the model knows
        bare = ids[:-1] if ids[-1] == renderer.tokenizer_parts.end_of_text_id else ids
        rows.append({"input_ids": bare[:_MAX_ROW_TOKENS], "labels": bare[:_MAX_ROW_TOKENS]})
    return rows


def chat_rows(sample: GeneralSample, renderer: Renderer) -> list[LabelledRow]:
    """The chats as tokens by the chat template, the assistant's turns trained, cut where they are too long; without
    those that the template cannot render, or that have no trained token then."""
    chats: Sequence[Any] = [
        Chat(f"chat {number} of {GENERAL_SAMPLE_VERSION}", messages)
        for number, messages in enumerate(sample.chats, start=1)
    ]
    return [
        {"input_ids": row.input_ids[:_MAX_ROW_TOKENS], "labels": row.labels[:_MAX_ROW_TOKENS]}
        for row in renderer.render_all(chats)
        if not isinstance(row, BadRow) and any(label != IGNORED for label in row.labels[1:_MAX_ROW_TOKENS])
    ]
