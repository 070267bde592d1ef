"""What `make ship` measures: base and trained model on held-out rows and on the general sample, and
the merge."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sft_play.data.build.stats import token_digest
from sft_play.data.masks.render import Renderer
from sft_play.data.masks.token_row import IGNORED
from sft_play.data.sources.formats import Chat
from sft_play.data.sources.raw import BadRow
from sft_play.errors import DataError, SftPlayError
from sft_play.finished.evaluation import RowScore, score_rows_of_run
from sft_play.finished.export.checks import merge_test
from sft_play.finished.export.merge import ensure_whole_model_folder
from sft_play.finished.load import (
    HeldOutRows,
    build_run_renderer,
    evenly_spaced_indices,
    find_continued_adapter,
    load_held_out_rows,
    measure_both_models,
)
from sft_play.finished.metrics import finite_or_none
from sft_play.finished.respond import Responder
from sft_play.finished.run import FinishedRun, find_merged_model, translate_write_errors
from sft_play.finished.ship import (
    SHIP_FILE,
    Evidence,
    GeneralEvidence,
    Losses,
    MergeEvidence,
    ShipResult,
    TaskEvidence,
    Thresholds,
    chance_losses,
    judge_evidence,
    too_few_rows_reason,
)
from sft_play.log import one_line
from sft_play.models.config_json import base_weights_identity
from sft_play.runs.folder import installed_versions
from sft_play.runs.lookup import lock_run
from sft_play.training.measure.exact_match import select_questions
from sft_play.training.prepare.library_messages import quiet_libraries
from sft_play.training.prepare.tokenizer import load_tokenizer

SHIP_ROWS = 300
# Of the general sample; a change of a row is a new one.
GENERAL_SAMPLE_VERSION = "general-1"
# Tokens of a row of the general sample: real tokenizers need fewer; byte-like ones may need more
# than a model has positions.
_MAX_ROW_TOKENS = 512

LabelledRow = dict[str, list[int]]


# --- the general sample ---------------------------------------------------------------------------
#
# Short texts and chats about everything, that show what a fine-tuned model has lost. Written for
# this project, none of it taken from a dataset: prose, facts, arithmetic, reasoning, code in 17
# languages and formats, data, 26 human languages, instructions and letters; and chats from one
# question to four turns, with and without a system prompt.
@dataclass(frozen=True)
class GeneralSample:
    """The texts and the chats (messages), with the digest of their two files."""

    texts: tuple[str, ...]
    chats: tuple[tuple[dict[str, str], ...], ...]
    sha256: str


def general_sample() -> GeneralSample:
    """The sample that ships with the project."""
    files = {
        name: Path(__file__).with_name("general").joinpath(f"{name}.jsonl").read_bytes()
        for name in ("text", "chats")
    }
    lines = {
        name: [json.loads(line) for line in data.decode("utf-8").splitlines()]
        for name, data in files.items()
    }
    return GeneralSample(
        tuple(row["text"] for row in lines["text"]),
        tuple(tuple(row["messages"]) for row in lines["chats"]),
        hashlib.sha256(files["text"] + files["chats"]).hexdigest(),
    )


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
        held_out_rows = load_held_out_rows(run)
        rows, left_out = distinct_rows(held_out_rows, max_rows)
        provenance["rows_sha256"] = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
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
        # rows of the general sample may be longer than what a small model reads
        scores = []
        for row_set in (rows, texts, chats):
            shortened = [
                {column: values[:max_positions] for column, values in row.items()}
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
    candidate_indices = evenly_spaced_indices(len(held_out_rows.split.rows), 4 * count)
    trained_digests, distinct = set(held_out_rows.train.stats.digests), {}
    for index in candidate_indices:
        row = held_out_rows.split.rows[index]
        digest = token_digest(row["input_ids"])
        if digest not in trained_digests:
            distinct[digest] = {"input_ids": list(row["input_ids"]), "labels": list(row["labels"])}
    rows = list(distinct.values())
    selected = [rows[index] for index in evenly_spaced_indices(len(rows), count)]
    return selected, len(candidate_indices) - len(rows)


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
