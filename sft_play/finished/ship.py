"""`make ship`: base and trained model measured on held-out rows and on the general sample, the merge compared, and one
verdict with everything that it was computed from; and the verdict of a ship.json computed again (`REPLAY=`), without a
model.

Three checks, all of which have to pass:

- task: the loss on held-out rows fell, and not by chance.
- general: the loss on the general sample did not rise by more than a bound; of the rows that the base reads better than
  chance, since nothing else can be lost.
- merge: the merged model is the adapter's, by the verdict of `make merge-test`.

A row's loss counts up to the unigram loss (chance: each token predicted by its frequency in these
rows). A base that is worse than that (random weights, or a language that it is sure of and that
is another) gets better by any noise that makes it less sure, and worse by nothing.
"""

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, TypeAdapter, ValidationError

from sft_play.answers import Answer
from sft_play.data.build.stats import token_digest
from sft_play.data.masks.render import Renderer
from sft_play.data.masks.token_row import IGNORED
from sft_play.data.sources.formats import Chat
from sft_play.data.sources.raw import BadRow
from sft_play.errors import ConfigError, DataError, SftPlayError
from sft_play.exit_codes import DO_NOT_SHIP, EXIT_KINDS
from sft_play.finished.evaluation import RowScore, score_rows_of_run
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
from sft_play.finished.metrics import Interval, finite_or_none, paired_bootstrap
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
# Of ship.json, which holds evidence and thresholds as they are here.
SHIP_FORMAT = "sft_play ship 2"
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

_VERDICTS = {True: "ship", False: "do not ship"}

LabelledRow = dict[str, list[int]]
FloatArray = npt.NDArray[np.float64]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
FractionFloat = Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True)
class Thresholds:
    """What the verdict asks for. Losses are in nats a token."""

    # Of the interval of the gain. At 0.99 up to 6% of runs without a gain passed in simulations of 30 rows with skewed
    # differences, at 0.995 at most 4% (0.5% without skew); real trainings gain tens of standard errors.
    level: FractionFloat = 0.995
    # Held-out rows, no two alike, below which no gain counts: with 20 the simulated share was above 4%.
    min_rows: int = 30
    # The gain that the whole interval has to exceed, relative to the base's loss: with enough rows the tiny change of
    # random weights, better or worse, is measurable too. A judgement.
    min_gain: float = 0.01
    # Of the interval of exact match, which may not be wholly below zero.
    answers_level: FractionFloat = 0.95
    # Of the loss on general text: perplexity x 1.1. A judgement, below the x 1.26 (+0.23) on WikiText-2 that was
    # published for an instruction tuning of all weights of a model of 253 million parameters.
    max_text_rise: float = 0.1
    # The same on general chats, whose style is what fine-tuning is meant to change. A judgement.
    max_chat_rise: float = 0.2
    # Of the interval of the rise, whose upper end has to be within the bound.
    general_level: FractionFloat = 0.95
    # Rows of the sample that the base has to read better than chance for a rise to be measured.
    min_known: int = 8
    resamples: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    seed: Annotated[int, Field(ge=0)] = 0


@dataclass(frozen=True)
class Losses:
    """Losses of rows before and after training: sums over each row's trained tokens, in nats, all [rows]; None: not a
    number. `chance`: of guessing each token by its frequency in these rows."""

    base: tuple[FiniteFloat | None, ...] = ()
    tuned: tuple[FiniteFloat | None, ...] = ()
    tokens: tuple[Annotated[int, Field(ge=1)], ...] = ()
    chance: tuple[FiniteFloat, ...] = ()

    def __post_init__(self) -> None:
        if {len(column) for column in (self.base, self.tuned, self.chance)} != {len(self)}:
            raise ValueError("the columns of losses have different lengths")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def non_finite_reason(self) -> str:
        """Which model's losses are not numbers, in words; empty where all are."""
        for name, values in (("the trained model's", self.tuned), ("the base's", self.base)):
            if None in values:
                return f"{name} loss is not a number on {values.count(None):,} of {len(self):,} rows"
        return ""

    def to_arrays(self) -> list[FloatArray]:
        """Base, tuned, tokens and chance [rows], of which none is None."""
        return [np.array(column, float) for column in (self.base, self.tuned, self.tokens, self.chance)]


@dataclass(frozen=True)
class TaskEvidence:
    """Held-out rows of the run's own data."""

    split: str  # test or val; empty where the run has no rows that it was not trained on
    losses: Losses = field(default_factory=Losses)
    # Whether each generated answer is the reference; empty where none was asked for.
    right_base: tuple[bool, ...] = ()
    right_tuned: tuple[bool, ...] = ()
    left_out: int = 0  # rows that were not counted: repeated, or training rows too

    def __post_init__(self) -> None:
        if len(self.right_base) != len(self.right_tuned):
            raise ValueError("the columns of the answers have different lengths")


@dataclass(frozen=True)
class GeneralEvidence:
    """The sample that ships with the project."""

    text: Losses = field(default_factory=Losses)
    chats: Losses = field(default_factory=Losses)
    refused: int = 0  # chats that the run's chat template cannot render


@dataclass(frozen=True)
class MergeEvidence:
    """What `merge-test` measured: mean KL divergences in nats."""

    state: Literal["compared", "no adapter", "failed", "not needed"]
    kl_merged: float | None = None
    kl_limit: float | None = None
    kl_base: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Evidence:
    """Everything that the verdict is computed from."""

    task: TaskEvidence
    general: GeneralEvidence
    merge: MergeEvidence
    # Why nothing was measured: too few rows refuse the run whatever it is.
    not_loaded: str = ""


@dataclass(frozen=True)
class ShipCheck:
    """One of the three: `ok` is None where it was not judged. `line` says the evidence, `reason` what is wrong."""

    name: str
    ok: bool | None
    line: str
    reason: str = ""


@dataclass(frozen=True)
class ShipVerdict:
    """The three checks."""

    checks: tuple[ShipCheck, ...]

    @property
    def ok(self) -> bool:
        """True if the run should be shipped."""
        return all(check.ok is True for check in self.checks)

    @property
    def reasons(self) -> list[str]:
        """What is wrong, a line for each check that failed."""
        return [f"{check.name}: {check.reason}" for check in self.checks if check.ok is False]

    def as_json(self) -> dict[str, Any]:
        """In plain data."""
        checks = [asdict(check) for check in self.checks]
        return {"ok": self.ok, "verdict": _VERDICTS[self.ok], "reasons": self.reasons, "checks": checks}

    def lines(self, continued_adapter: str | None) -> list[str]:
        """What the run was compared with where that is not its base, a line for each check, and the verdict."""
        lines = [f"{check.name.capitalize()}: {check.line}" for check in self.checks]
        if continued_adapter:
            lines.insert(0, f"Before: {continued_adapter}, which this run continued: it is the base of these figures")
        return [*lines, ": ".join(filter(None, [f"Verdict: {_VERDICTS[self.ok]}", "; ".join(self.reasons)]))]


# --- the rule ---------------------------------------------------------------------------------------------------------
def judge_evidence(evidence: Evidence, thresholds: Thresholds) -> ShipVerdict:
    """Judge the evidence; a pure function: equal evidence and thresholds give an equal verdict."""
    if evidence.not_loaded:
        refused_check = ShipCheck("task", False, "not measured", evidence.not_loaded)
        return ShipVerdict((refused_check, *(ShipCheck(name, None, "not measured") for name in ("general", "merge"))))
    general = evidence.general
    text = _judge_rise("text", general.text, thresholds.max_text_rise, thresholds)
    chats = _judge_rise("chats", general.chats, thresholds.max_chat_rise, thresholds)
    reasons = "; ".join(filter(None, (text.reason, chats.reason)))
    general_check = ShipCheck("general", text.ok and chats.ok, f"{text.line}; {chats.line}", reasons)
    return ShipVerdict((_judge_task(evidence.task, thresholds), general_check, _judge_merge(evidence.merge)))


def too_few_rows_reason(task: TaskEvidence, rows: int, thresholds: Thresholds) -> str:
    """Say why no gain on so many rows could count, whatever the models make of them; empty where one could."""
    remedy = "data.test_path, data.val_path or data.val_fraction gives a run more of them"
    if not task.split:
        return f"there are no rows that the run was not trained on; {remedy}"
    if rows >= thresholds.min_rows:
        return ""
    counts = f"{rows} held-out rows (and {task.left_out} repeated ones or training rows)"
    return f"not enough evidence: {counts}, at least {thresholds.min_rows} are needed; {remedy}"


def chance_losses(rows: Sequence[Sequence[int]]) -> list[float]:
    """The loss of each row (its trained tokens), in nats, by guessing every token with the frequency that it has in all
    rows: the least that a model without any context can have on them."""
    tokens, counts = np.unique(np.concatenate([np.asarray(row, np.int64) for row in rows]), return_counts=True)
    nats = dict(zip(tokens.tolist(), (-np.log(counts / counts.sum())).tolist(), strict=True))
    return [sum(nats[token] for token in row) for row in rows]


def loss_gain(losses: Losses, thresholds: Thresholds) -> Interval:
    """How much the loss up to chance fell, in nats a token, with its interval."""
    base, tuned, tokens, chance = losses.to_arrays()
    base_nats, tuned_nats = (np.minimum(nats, chance) / tokens for nats in (base, tuned))
    return _paired_interval(tuned_nats, base_nats, thresholds.level, thresholds, weights=tokens)


def _paired_interval(first: Any, second: Any, level: float, thresholds: Thresholds, *, weights: Any = None) -> Interval:
    return paired_bootstrap(
        first, second, weights=weights, level=level, resamples=thresholds.resamples, seed=thresholds.seed
    )


def _judge_task(task: TaskEvidence, thresholds: Thresholds) -> ShipCheck:
    losses = task.losses
    refusal = too_few_rows_reason(task, len(losses), thresholds) or losses.non_finite_reason
    if refusal:
        return ShipCheck("task", False, "not measured", refusal)
    base, tuned, tokens, chance = losses.to_arrays()
    sums = (base, tuned, chance, np.minimum(base, chance))
    base_loss, tuned_loss, chance_loss, capped_base_loss = (float(nats.sum() / tokens.sum()) for nats in sums)
    gain = loss_gain(losses, thresholds)
    required_gain = thresholds.min_gain * capped_base_loss
    chance_note = f" (chance {chance_loss:.4f})" if capped_base_loss < base_loss else ""
    line = f"loss {base_loss:.4f}{chance_note} to {tuned_loss:.4f} on {len(losses):,} rows ({task.split})"
    interval_text = f"{gain.level:.1%} interval {gain.low:.4f} to {gain.high:.4f}"
    line += f", gain {gain.difference:.4f} ({interval_text}, asked: above {required_gain:.4f})"
    reason = ""
    if task.right_base:
        base_rate, tuned_rate = np.mean(task.right_base), np.mean(task.right_tuned)
        line += f"; exact match {base_rate:.1%} to {tuned_rate:.1%} of {len(task.right_base):,} rows"
        change = _paired_interval(task.right_base, task.right_tuned, thresholds.answers_level, thresholds)
        if change.high < 0:
            reason = f"exact match fell from {base_rate:.1%} to {tuned_rate:.1%}, by more than chance"
    if not gain.low > required_gain:
        reason = "the loss on held-out rows is not better"
        if gain.difference > required_gain:
            reason = "the gain is within what chance gives"
        if tuned_loss >= chance_loss:
            reason = "the trained model reads the held-out rows no better than by guessing tokens by their frequency"
    return ShipCheck("task", not reason, line, reason)


def _judge_rise(name: str, losses: Losses, bound: float, thresholds: Thresholds) -> ShipCheck:
    if not len(losses):
        return ShipCheck(name, True, f"{name} not measured (the chat template renders none)")
    if losses.non_finite_reason:
        return ShipCheck(name, False, f"{name} not measured", f"{name}: {losses.non_finite_reason}")
    base, tuned, tokens, chance = losses.to_arrays()
    is_known = base < chance
    known_rows = int(is_known.sum())
    if known_rows < thresholds.min_known:
        line = f"{name}: nothing to lose (the base reads {known_rows} of {len(losses)} rows better than chance)"
        return ShipCheck(name, True, line)
    base, tuned, tokens = base[is_known], np.minimum(tuned, chance)[is_known], tokens[is_known]
    rise = _paired_interval(base / tokens, tuned / tokens, thresholds.general_level, thresholds, weights=tokens)
    line = f"{name} {rise.difference:+.4f} (at most {rise.high:+.4f}, allowed {bound:+g})"
    if rise.high <= bound:
        return ShipCheck(name, True, line)
    reason = f"the loss on general {name} rose by {rise.difference:.4f}, at most {rise.high:.4f}; allowed: {bound:g}"
    return ShipCheck(name, False, line, reason)


def _judge_merge(merge: MergeEvidence) -> ShipCheck:
    if merge.state == "no adapter":
        return ShipCheck("merge", True, "not needed (all weights were trained)")
    if merge.state == "not needed":
        return ShipCheck("merge", None, "not tested, since the run is refused already")
    if merge.state == "failed" or merge.kl_limit is None:
        return ShipCheck("merge", False, "not tested", merge.reason or "it was not compared")
    kl = math.nan if merge.kl_merged is None else merge.kl_merged
    line = f"KL divergence from the adapter {kl:.2g} nats (limit {merge.kl_limit:.2g})"
    if kl <= merge.kl_limit:
        return ShipCheck("merge", True, line)
    return ShipCheck("merge", False, line, "the merged model is not the adapter's")


# --- a verdict computed again -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ReplayResult(Answer):
    """A verdict that was computed again from its file."""

    path: Path
    verdict: ShipVerdict
    # The names of what the file decides otherwise.
    differences: tuple[str, ...]
    # The adapter that the run continued, as the file names it; empty where there was none.
    continued_adapter: str

    @property
    def ok(self) -> bool:
        return not self.differences and self.verdict.ok

    def as_json(self) -> dict[str, Any]:
        differences = list(self.differences)
        return {**self.verdict.as_json(), "ok": self.ok, "path": str(self.path), "differences": differences}

    def lines(self) -> list[str]:
        lines = self.verdict.lines(self.continued_adapter)
        if self.differences:
            return [*lines, f"{self.path} does NOT follow from its own evidence: {', '.join(self.differences)}"]
        return [*lines, f"Replayed: the verdict of {self.path} follows from its evidence"]


def replay_verdict(path: Path) -> ReplayResult:
    """The verdict of a ship.json computed again from its evidence and thresholds, without the model; raises ConfigError
    where the file cannot be read, or is not what `make ship` writes."""
    file_name = one_line(str(path))
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"REPLAY={file_name} cannot be read: {error.strerror}") from None
    except ValueError:
        recorded = None
    if not isinstance(recorded, dict) or recorded.get("format") != SHIP_FORMAT:
        raise ConfigError(
            f"REPLAY={file_name} is not a file that make ship writes (JSON in the format {SHIP_FORMAT!r})"
        )
    try:
        evidence = TypeAdapter(Evidence).validate_python(recorded.get("evidence"))
        thresholds = TypeAdapter(Thresholds).validate_python(recorded.get("thresholds"))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
        raise ConfigError(f"REPLAY={file_name}: its evidence is not whole: {one_line(reason, limit=300)}") from None
    verdict = judge_evidence(evidence, thresholds)
    decision, recorded_decision = _decision(verdict.as_json()), _decision(recorded)
    differences = [name for name in decision | recorded_decision if decision.get(name) != recorded_decision.get(name)]
    return ReplayResult(path, verdict, tuple(differences), one_line(str(recorded.get("before") or "")))


def _decision(verdict: dict[str, Any]) -> dict[str, Any]:
    """What decides, by names; the figures and words of the checks repeat the evidence."""
    checks = {f"checks[{check.get('name')}].ok": check.get("ok") for check in verdict.get("checks") or ()}
    return {"ok": verdict.get("ok"), "verdict": verdict.get("verdict"), **checks}


# --- the general sample -----------------------------------------------------------------------------------------------
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


# --- a run measured ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ShipResult(Answer):
    """A verdict with its evidence, as it is written to ship.json."""

    run: Path
    evidence: Evidence
    thresholds: Thresholds
    verdict: ShipVerdict
    provenance: dict[str, Any]

    @property
    def ok(self) -> bool:
        return self.verdict.ok

    def as_json(self) -> dict[str, Any]:
        return {
            "format": SHIP_FORMAT, "kind": EXIT_KINDS[0] if self.ok else DO_NOT_SHIP, **self.verdict.as_json(),
            "run": str(self.run), **self.provenance,
            "thresholds": asdict(self.thresholds), "evidence": asdict(self.evidence),
        }  # fmt: skip

    def lines(self) -> list[str]:
        lines = [*self.verdict.lines(self.provenance.get("before")), f"Written to: {self.run / SHIP_FILE}"]
        if self.ok:
            return [*lines, next_command_line("export", "FORMAT=gguf", RUN=self.run)]
        return [*lines, next_command_line("eval", "writes every row", RUN=self.run)]


def judge_run(run: FinishedRun, *, max_rows: int = SHIP_ROWS, tolerance: float | None = None) -> ShipResult:
    """Measure, judge, and write ship.json into the run folder. `tolerance`: nats a token by which the loss on general
    text and chats may rise. Raises DataError where the run's data is gone, ModelError where a model is,
    or RunFolderError where another process writes the run.
    What refuses the run whatever is measured is known before a model loads: rows, files."""
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
            run, held_out_rows, rows, left_out, sample, thresholds,
            max_questions=min(max_rows, run.config.eval.generate_rows),
        )  # fmt: skip
        if not judge_evidence(evidence, thresholds).reasons:
            evidence = replace(evidence, merge=_measure_merge(run))
        verdict = judge_evidence(evidence, thresholds)
        result = ShipResult(run.folder.path, evidence, thresholds, verdict, provenance)
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
    """All evidence but the merge; none where the rows are too few. Raises ModelError if a model cannot be loaded."""
    split = "" if held_out_rows.name == "train" else held_out_rows.name
    task = TaskEvidence(split, left_out=left_out)
    refusal = too_few_rows_reason(task, len(rows), thresholds)
    if refusal:
        return Evidence(task, GeneralEvidence(), MergeEvidence("not needed"), refusal)
    tokenizer = load_tokenizer(run.config).tokenizer
    renderer = build_run_renderer(run, tokenizer)
    questions = select_questions(held_out_rows.split, renderer, tokenizer, max_questions=max_questions)
    # the sample's own settings, whatever the run trained on: only so do figures of two runs compare
    data_options = run.config.data.model_copy(update={"loss_on": "assistant", "multi_turn": "whole"})
    general_renderer = Renderer(tokenizer, data_options, max_seq_len=_MAX_ROW_TOKENS, today=renderer.today)
    texts, chats = text_rows(sample, general_renderer), chat_rows(sample, general_renderer)
    logger.info(
        "To be measured: %d rows of %s, %d of them with a generated answer, and %d general texts and chats",
        len(rows), split, len(questions), len(texts) + len(chats),
    )  # fmt: skip

    def measure_model(model_label: str, model: Any) -> tuple[list[list[RowScore]], tuple[bool, ...]]:
        logger.info("Measuring the %s", model_label)
        max_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or _MAX_ROW_TOKENS
        scores = []
        for row_set in (rows, texts, chats):
            shortened_rows = [{column: values[:max_positions] for column, values in row.items()} for row in row_set]
            scores.append(score_rows_of_run(run, model, shortened_rows))
        answers = Responder(run, model).answers(questions, max_new_tokens=run.config.eval.max_new_tokens)
        return scores, tuple(answer.is_correct for answer in answers)

    (base_scores, right_base), (tuned_scores, right_tuned) = measure_both_models(run, measure_model)
    losses, text_losses, chat_losses = map(_row_losses, base_scores, tuned_scores, (rows, texts, chats))
    task = replace(task, losses=losses, right_base=right_base, right_tuned=right_tuned)
    general = GeneralEvidence(text_losses, chat_losses, refused=len(sample.chats) - len(chats))
    return Evidence(task, general, MergeEvidence("not needed"))


def distinct_rows(held_out_rows: HeldOutRows, count: int) -> tuple[list[LabelledRow], int]:
    """Up to `count` held-out rows, evenly spaced, and how many were left out: repeated, or training rows too. None of a
    run that was trained on all of its rows."""
    if held_out_rows.name == "train":
        return [], 0
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


def _row_losses(base: Sequence[RowScore], tuned: Sequence[RowScore], rows: Sequence[LabelledRow]) -> Losses:
    """The losses of the rows that have a trained token."""
    trained_labels = [[label for label in row["labels"][1:] if label != IGNORED] for row in rows]
    chance = chance_losses(trained_labels) if any(trained_labels) else []
    columns = [
        (finite_or_none(base_score.nll), finite_or_none(tuned_score.nll), base_score.tokens, row_chance)
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
        "compared", finite_or_none(merge_result.kl_merged), merge_result.kl_limit, merge_result.kl_base
    )
