"""`make ship`: base and trained model measured on held-out rows and on the general sample, the merge compared, and one
verdict with everything that it was computed from (`ship_rule.judge`)."""

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

from sft_play.data.build.stats import token_digest
from sft_play.data.masks.render import Renderer
from sft_play.data.masks.token_row import IGNORED, trained_tokens
from sft_play.data.sources.formats import Chat
from sft_play.data.sources.raw import BadRow
from sft_play.errors import DataError, ModelError, SftPlayError
from sft_play.exit_codes import DO_NOT_SHIP, EXIT_KINDS
from sft_play.facts.models.architecture import base_weights_identity
from sft_play.finished.answer.respond import Responder
from sft_play.finished.evaluate import ship_rule as rule
from sft_play.finished.evaluate.score import RowScore, batch_tokens, compute_dtype, score_rows
from sft_play.finished.export.check_merge import merge_test
from sft_play.finished.export.merge import whole_model
from sft_play.finished.export.places import merged_model
from sft_play.finished.load import HeldOut, continued_by, evenly_spaced, held_out, of_each_model, renderer_of
from sft_play.finished.run import FinishedRun, Outcome, next_line, writing
from sft_play.log import one_line
from sft_play.runs.locking import lock_run
from sft_play.runs.manifest import installed_versions
from sft_play.training.measure.exact_match import select_questions
from sft_play.training.prepare.quiet import quiet_libraries
from sft_play.training.prepare.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

ROWS = 300
SHIP_FILE = "ship.json"
# Of the general sample; a change of a row is a new one.
VERSION = "general-1"
# The general sample: short texts and chats about everything, that show what a fine-tuned model has lost.
#
# Written for this project, none of it taken from a dataset: prose, facts, arithmetic, reasoning, code in 17 languages
# and formats, data, 26 human languages, instructions and letters; and chats from one question to four turns, with and
# without a system prompt.
_GENERAL = Path(__file__).parent / "general"
# Tokens of a row of the general sample: real tokenizers need fewer; byte-like ones may need more than a model has
# positions.
_LONGEST = 512

Row = dict[str, list[int]]


@dataclass(frozen=True)
class Shipped(Outcome):
    """A verdict with its evidence, as it is written to ship.json."""

    run: Path
    evidence: rule.Evidence
    thresholds: rule.Thresholds
    verdict: rule.Verdict
    about: dict[str, Any]

    @property
    def ok(self) -> bool:
        return self.verdict.ok

    def as_json(self) -> dict[str, Any]:
        return {
            "format": rule.FORMAT, "ok": self.ok, "kind": EXIT_KINDS[0] if self.ok else DO_NOT_SHIP,
            "verdict": self.verdict.word, "reasons": self.verdict.reasons,
            "run": str(self.run), "checks": [check.as_json() for check in self.verdict.checks], **self.about,
            "thresholds": dataclasses.asdict(self.thresholds), "evidence": dataclasses.asdict(self.evidence),
        }  # fmt: skip

    def lines(self) -> list[str]:
        after = ("export", "FORMAT=gguf") if self.ok else ("eval", "writes every row")
        evidence = rule.evidence_lines(self.verdict, self.about.get("before"))
        return [*evidence, f"Written to: {self.run / SHIP_FILE}", next_line(*after, RUN=self.run)]


def ship(run: FinishedRun, *, rows: int = ROWS, tolerance: float | None = None) -> Shipped:
    """Measure, judge, and write ship.json into the run folder. `tolerance`: nats a token by which the loss on general
    text and chats may rise. Raises DataError where the run's data is gone, or RunFolderError where another process
    writes it. What refuses the run whatever is measured is known before a model loads: rows, files."""
    quiet_libraries()
    thresholds = rule.Thresholds()
    if tolerance is not None:
        thresholds = dataclasses.replace(thresholds, max_text_rise=tolerance, max_chat_rise=tolerance)
    sample, continued = general_sample(), continued_by(run)
    about: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "sample": {"version": VERSION, "sha256": sample.sha256},
        "weights": {"sha256": base_weights_identity(str(run.weights), None)["sha256"]},
        "base": (run.manifest.get("data") or {}).get("weights"),
        "before": continued.name if continued else None,
        "versions": installed_versions(),
    }
    with lock_run(run.folder):
        try:
            measured = _ShipRows(run, rows)
            about["rows_sha256"] = measured.rows_sha256
            refusal = rule.too_few(measured.task, thresholds)
            evidence = _refused(measured.task, refusal) if refusal else measured.evidence()
        except ModelError as error:
            evidence = _refused(rule.TaskEvidence(""), str(error))
        if not rule.judge(evidence, thresholds).reasons:
            evidence = dataclasses.replace(evidence, merge=_merge_evidence(run))
        shipped = Shipped(run.folder.path, evidence, thresholds, rule.judge(evidence, thresholds), about)
        with writing(run.folder.path / SHIP_FILE):
            run.folder.write_json(SHIP_FILE, shipped.as_json())
    return shipped


def _refused(task: rule.TaskEvidence, reason: str) -> rule.Evidence:
    return rule.Evidence(task, rule.GeneralEvidence(), rule.MergeEvidence("not needed"), reason)


class _ShipRows:
    def __init__(self, run: FinishedRun, rows: int) -> None:
        config = run.config
        self.run = run
        tokenizer = load_tokenizer(config).tokenizer
        renderer = renderer_of(run, tokenizer)
        self.held = held_out(run)
        split = "" if self.held.name == "train" else self.held.name
        self.rows, left_out = distinct_rows(self.held, rows) if split else ([], 0)
        unread = [RowScore(math.nan, trained_tokens(row["labels"]), 0) for row in self.rows]
        # what is known of the task before a model reads its rows
        self.task = rule.TaskEvidence(split, _losses(unread, unread, self.rows), left_out=left_out)
        most = min(rows, config.eval.generate_rows) if self.rows else 0
        self.asked = select_questions(self.held.split, renderer, tokenizer, max_questions=most)
        # the sample's own settings, whatever the run trained on: only so do figures of two runs compare
        general = Renderer(
            tokenizer,
            config.data.model_copy(update={"loss_on": "assistant", "multi_turn": "whole"}),
            max_seq_len=_LONGEST,
            today=renderer.today,
        )
        sample = general_sample()
        self.text, self.chats = text_rows(sample, general), chat_rows(sample, general)
        self.refused = len(sample.chats) - len(self.chats)
        self.rows_sha256 = hashlib.sha256(json.dumps(self.rows).encode()).hexdigest()

    def evidence(self) -> rule.Evidence:
        """All but the merge; raises ModelError where the model cannot be loaded."""
        logger.info(
            "To be measured: %d rows of %s, %d of them with a generated answer, and %d general texts and chats",
            len(self.rows), self.task.split, len(self.asked), len(self.text) + len(self.chats),
        )  # fmt: skip
        (base, right_base), (tuned, right_tuned) = of_each_model(self.run, self._measured)
        text = _losses(base["text"], tuned["text"], self.text)
        chats = _losses(base["chats"], tuned["chats"], self.chats)
        losses = _losses(base["task"], tuned["task"], self.rows)
        task = dataclasses.replace(self.task, losses=losses, right_base=right_base, right_tuned=right_tuned)
        return rule.Evidence(task, rule.GeneralEvidence(text, chats, self.refused), rule.MergeEvidence("not needed"))

    def _measured(self, whose: str, model: Any) -> tuple[dict[str, list[RowScore]], tuple[bool, ...]]:
        logger.info("Measuring the %s", whose)
        parts = {"task": self.rows, "text": self.text, "chats": self.chats}
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or _LONGEST
        scores = {}
        for part, chosen in parts.items():
            cut = [{name: values[:positions] for name, values in row.items()} for row in chosen]
            most, compute = batch_tokens(self.run), compute_dtype(self.run)
            scores[part] = score_rows(model, cut, most_tokens=most, compute=compute)
        answered = Responder(self.run, model).answers(self.asked, max_new_tokens=self.run.config.eval.max_new_tokens)
        return scores, tuple(answer.is_correct for answer in answered)


def distinct_rows(held: HeldOut, count: int) -> tuple[list[Row], int]:
    """Up to `count` held-out rows, evenly spaced, and how many were left out: repeated, or training rows too."""
    # more are read than are wanted, since some may be repeated; at most so many, since each is compared
    read = evenly_spaced(len(held.split.rows), 4 * count)
    trained, chosen = set(held.train.report.digests), {}
    for index in read:
        row = held.split.rows[index]
        digest = token_digest(row["input_ids"])
        if digest not in trained:
            chosen[digest] = {"input_ids": list(row["input_ids"]), "labels": list(row["labels"])}
    rows = list(chosen.values())
    return [rows[index] for index in evenly_spaced(len(rows), count)], len(read) - len(rows)


def _losses(base: Sequence[RowScore], tuned: Sequence[RowScore], rows: Sequence[Row]) -> rule.Losses:
    counts = [at for at, score in enumerate(base) if score.tokens]
    trained = [[label for label in row["labels"][1:] if label != IGNORED] for row in rows]
    chance = rule.chance_losses(trained) if counts else []

    def numbers(scores: Sequence[RowScore]) -> tuple[float | None, ...]:
        return tuple(scores[at].nll if math.isfinite(scores[at].nll) else None for at in counts)

    tokens, guessed = tuple(base[at].tokens for at in counts), tuple(chance[at] for at in counts)
    return rule.Losses(numbers(base), numbers(tuned), tokens, guessed)


def _merge_evidence(run: FinishedRun) -> rule.MergeEvidence:
    if not run.is_adapter:
        return rule.MergeEvidence("no adapter")
    try:
        if merged_model(run) is None:
            whole_model(run, is_locked=True)
        compared = merge_test(run)
    except DataError:
        raise
    except SftPlayError as error:
        return rule.MergeEvidence("failed", reason=one_line(str(error), limit=500))
    kl = compared.kl_merged if math.isfinite(compared.kl_merged) else None
    return rule.MergeEvidence("compared", kl, compared.kl_limit, compared.kl_base)


@dataclass(frozen=True)
class GeneralSample:
    """The texts and the chats (messages); `sha256` is that of both files."""

    texts: tuple[str, ...]
    chats: tuple[tuple[dict[str, str], ...], ...]
    sha256: str


def general_sample() -> GeneralSample:
    """The sample that ships with the project."""
    files = {name: (_GENERAL / f"{name}.jsonl").read_bytes() for name in ("text", "chats")}
    lines = {name: [json.loads(line) for line in data.decode("utf-8").splitlines()] for name, data in files.items()}
    return GeneralSample(
        tuple(row["text"] for row in lines["text"]),
        tuple(tuple(row["messages"]) for row in lines["chats"]),
        hashlib.sha256(files["text"] + files["chats"]).hexdigest(),
    )


def text_rows(sample: GeneralSample, renderer: Renderer) -> list[Row]:
    """The texts as tokens, all of them trained, cut where they are too long; none has the end-of-text token."""
    rows = []
    for ids in renderer.documents(list(sample.texts)):
        # predicting that a text ends here says nothing about what the model knows
        bare = ids[:-1] if ids[-1] == renderer.parts.end_of_text else ids
        rows.append({"input_ids": bare[:_LONGEST], "labels": bare[:_LONGEST]})
    return rows


def chat_rows(sample: GeneralSample, renderer: Renderer) -> list[Row]:
    """The chats as tokens by the chat template, the assistant's turns trained, cut where they are too long; without
    those that the template cannot render, or that have no trained token then."""
    chats: Sequence[Any] = [
        Chat(f"chat {at} of {VERSION}", messages) for at, messages in enumerate(sample.chats, start=1)
    ]
    return [
        {"input_ids": row.input_ids[:_LONGEST], "labels": row.labels[:_LONGEST]}
        for row in renderer.render_all(chats)
        if not isinstance(row, BadRow) and any(label != IGNORED for label in row.labels[1:_LONGEST])
    ]
