"""The verdict of `make ship`: a pure rule over what base and trained model lose on held-out rows
and on the general sample, and over the merge; and the verdict of a ship.json computed again
(`REPLAY=`), without a model.

Three checks, all of which have to pass:

- task: the loss on held-out rows fell, and not by chance.
- general: the loss on the general sample did not rise by more than a bound; of the rows that the
  base reads better than chance, since nothing else can be lost.
- merge: the merged model is the adapter's, by the verdict of `make merge-test`.

A row's loss counts up to the unigram loss (chance: each token predicted by its frequency in these
rows). A base that is worse than that (random weights, or a language that it is sure of and that
is another) gets better by any noise that makes it less sure, and worse by nothing.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, TypeAdapter, ValidationError

from sft_play.answers import Answer
from sft_play.errors import ConfigError
from sft_play.exit_codes import DO_NOT_SHIP, EXIT_KINDS
from sft_play.finished.metrics import Interval, paired_bootstrap
from sft_play.finished.run import (
    FinishedRun,
    find_continued_adapter,
    next_command_line,
    translate_write_errors,
)
from sft_play.log import one_line
from sft_play.models.config_json import base_weights_identity
from sft_play.runs.folder import installed_versions
from sft_play.runs.lookup import lock_run

SHIP_FILE = "ship.json"
# Held-out rows that are measured at most.
SHIP_ROWS = 300
# Of the general sample; a change of a row is a new one.
GENERAL_SAMPLE_VERSION = "general-1"
# Of ship.json, which holds evidence and thresholds as they are here.
SHIP_FORMAT = "sft_play ship 2"
_VERDICTS = {True: "ship", False: "do not ship"}

FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
FractionFloat = Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True)
class Thresholds:
    """What a run has to reach to be shipped. Losses are in nats a token."""

    # Of the interval of the gain. At 0.99 up to 6% of runs without a gain passed in simulations of
    # 30 rows with skewed differences, at 0.995 at most 4% (0.5% without skew); real trainings gain
    # tens of standard errors.
    level: FractionFloat = 0.995
    # Held-out rows, no two alike, below which no gain counts: with 20 the simulated share was above
    # 4%.
    min_rows: int = 30
    # The gain that the whole interval has to exceed, relative to the base's loss: with enough rows
    # the tiny change of random weights, better or worse, is measurable too. A judgement.
    min_gain: float = 0.01
    # Of the interval of exact match, which may not be wholly below zero.
    answers_level: FractionFloat = 0.95
    # Of the loss on general text: perplexity x 1.1. A judgement, below the x 1.26 (+0.23) on
    # WikiText-2 that was published for an instruction tuning of all weights of a model of 253
    # million parameters.
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
    """Losses of rows before and after training, in nats, each summed over the row's trained tokens
    [rows]; None is not a number. `chance` is the loss of guessing each token by its frequency in
    these rows."""

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
                return (
                    f"{name} loss is not a number on {values.count(None):,} of {len(self):,} rows"
                )
        return ""

    def to_arrays(self) -> list[npt.NDArray[np.float64]]:
        """Base, tuned, tokens and chance [rows]; all losses have to be numbers."""
        return [
            np.array(column, float) for column in (self.base, self.tuned, self.tokens, self.chance)
        ]


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
    """One of the three checks. `ok` is None where it was not judged; `line` says the evidence,
    `reason` what is wrong."""

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
        return {
            "ok": self.ok,
            "verdict": _VERDICTS[self.ok],
            "reasons": self.reasons,
            **asdict(self),
        }

    def lines(self, continued_adapter: str | None) -> list[str]:
        """What the run was compared with where that is not its base, a line for each check, and the
        verdict."""
        lines = [f"{check.name.capitalize()}: {check.line}" for check in self.checks]
        if continued_adapter:
            lines.insert(
                0,
                f"Before: {continued_adapter}, which this run continued:"
                " it is the base of these figures",
            )
        return [
            *lines,
            ": ".join(filter(None, [f"Verdict: {_VERDICTS[self.ok]}", "; ".join(self.reasons)])),
        ]


# --- the rule -------------------------------------------------------------------------------------
def judge_evidence(evidence: Evidence, thresholds: Thresholds) -> ShipVerdict:
    """Judge the evidence; a pure function: equal evidence and thresholds give an equal verdict."""
    if evidence.not_loaded:
        return ShipVerdict(
            (
                ShipCheck("task", False, "not measured", evidence.not_loaded),
                ShipCheck("general", None, "not measured"),
                ShipCheck("merge", None, "not measured"),
            )
        )
    general = evidence.general
    text = _judge_rise("text", general.text, thresholds.max_text_rise, thresholds)
    chats = _judge_rise("chats", general.chats, thresholds.max_chat_rise, thresholds)
    reasons = "; ".join(filter(None, (text.reason, chats.reason)))
    return ShipVerdict(
        (
            _judge_task(evidence.task, thresholds),
            ShipCheck("general", text.ok and chats.ok, f"{text.line}; {chats.line}", reasons),
            _judge_merge(evidence.merge),
        )
    )


def too_few_rows_reason(task: TaskEvidence, rows: int, thresholds: Thresholds) -> str:
    """Say why no gain on so many rows could count, whatever the models make of them; empty where
    one could."""
    remedy = "data.test_path, data.val_path or data.val_fraction gives a run more of them"
    if not task.split:
        return f"there are no rows that the run was not trained on; {remedy}"
    if rows >= thresholds.min_rows:
        return ""
    return (
        f"not enough evidence: {rows} held-out rows (and {task.left_out} repeated ones or training"
        f" rows), at least {thresholds.min_rows} are needed; {remedy}"
    )


def chance_losses(rows: Sequence[Sequence[int]]) -> list[float]:
    """The loss of each row, in nats, by guessing every token with the frequency that it has in all
    rows: the least that a model without any context can have on them. A row is its trained
    tokens."""
    tokens, counts = np.unique(
        np.concatenate([np.asarray(row, np.int64) for row in rows]), return_counts=True
    )
    nats = dict(zip(tokens.tolist(), (-np.log(counts / counts.sum())).tolist(), strict=True))
    return [sum(nats[token] for token in row) for row in rows]


def loss_gain(losses: Losses, thresholds: Thresholds) -> Interval:
    """How much the loss fell, in nats a token, with its interval; a loss above chance counts as
    chance."""
    base, tuned, tokens, chance = losses.to_arrays()
    base_nats, tuned_nats = (np.minimum(nats, chance) / tokens for nats in (base, tuned))
    return _paired_interval(tuned_nats, base_nats, thresholds.level, thresholds, weights=tokens)


def _paired_interval(
    first: Any, second: Any, level: float, thresholds: Thresholds, *, weights: Any = None
) -> Interval:
    return paired_bootstrap(
        first,
        second,
        weights=weights,
        level=level,
        resamples=thresholds.resamples,
        seed=thresholds.seed,
    )


def _judge_task(task: TaskEvidence, thresholds: Thresholds) -> ShipCheck:
    losses = task.losses
    refusal = too_few_rows_reason(task, len(losses), thresholds) or losses.non_finite_reason
    if refusal:
        return ShipCheck("task", False, "not measured", refusal)
    base, tuned, tokens, chance = losses.to_arrays()
    base_loss, tuned_loss, chance_loss, capped_base_loss = (
        float(nats.sum() / tokens.sum()) for nats in (base, tuned, chance, np.minimum(base, chance))
    )
    gain = loss_gain(losses, thresholds)
    required_gain = thresholds.min_gain * capped_base_loss
    chance_note = f" (chance {chance_loss:.4f})" if capped_base_loss < base_loss else ""
    line = (
        f"loss {base_loss:.4f}{chance_note} to {tuned_loss:.4f} on {len(losses):,} rows"
        f" ({task.split}), gain {gain.difference:.4f} ({gain.level:.1%} interval {gain.low:.4f} to"
        f" {gain.high:.4f}, asked: above {required_gain:.4f})"
    )
    reason = ""
    if task.right_base:
        base_rate, tuned_rate = np.mean(task.right_base), np.mean(task.right_tuned)
        line += (
            f"; exact match {base_rate:.1%} to {tuned_rate:.1%} of {len(task.right_base):,} rows"
        )
        change = _paired_interval(
            task.right_base, task.right_tuned, thresholds.answers_level, thresholds
        )
        if change.high < 0:
            reason = (
                f"exact match fell from {base_rate:.1%} to {tuned_rate:.1%}, by more than chance"
            )
    if not gain.low > required_gain:
        reason = "the loss on held-out rows is not better"
        if gain.difference > required_gain:
            reason = "the gain is within what chance gives"
        if tuned_loss >= chance_loss:
            reason = (
                "the trained model reads the held-out rows no better than by guessing tokens by"
                " their frequency"
            )
    return ShipCheck("task", not reason, line, reason)


def _judge_rise(name: str, losses: Losses, bound: float, thresholds: Thresholds) -> ShipCheck:
    if not len(losses):
        return ShipCheck(name, True, f"{name} not measured (the chat template renders none)")
    if losses.non_finite_reason:
        return ShipCheck(name, False, f"{name} not measured", f"{name}: {losses.non_finite_reason}")
    base, tuned, tokens, chance = losses.to_arrays()
    is_known = base < chance
    if is_known.sum() < thresholds.min_known:
        return ShipCheck(
            name,
            True,
            f"{name}: nothing to lose (the base reads {is_known.sum()} of {len(losses)} rows better"
            " than chance)",
        )
    base, tuned, tokens = base[is_known], np.minimum(tuned, chance)[is_known], tokens[is_known]
    rise = _paired_interval(
        base / tokens, tuned / tokens, thresholds.general_level, thresholds, weights=tokens
    )
    line = f"{name} {rise.difference:+.4f} (at most {rise.high:+.4f}, allowed {bound:+g})"
    if rise.high <= bound:
        return ShipCheck(name, True, line)
    return ShipCheck(
        name,
        False,
        line,
        f"the loss on general {name} rose by {rise.difference:.4f}, at most {rise.high:.4f};"
        f" allowed: {bound:g}",
    )


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


def build_provenance(run: FinishedRun, sample: GeneralSample) -> dict[str, Any]:
    """Say what a verdict is about, and what it was measured with."""
    continued_adapter = find_continued_adapter(run)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "sample": {"version": GENERAL_SAMPLE_VERSION, "sha256": sample.sha256},
        "weights": {"sha256": base_weights_identity(str(run.weights), None)["sha256"]},
        "base": (run.manifest.get("data") or {}).get("weights"),
        "before": continued_adapter.name if continued_adapter else None,
        "versions": installed_versions(),
    }


# --- a verdict computed again ---------------------------------------------------------------------
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
        return {
            **self.verdict.as_json(),
            "ok": self.ok,
            "path": str(self.path),
            "differences": list(self.differences),
        }

    def lines(self) -> list[str]:
        conclusion = f"Replayed: the verdict of {self.path} follows from its evidence"
        if self.differences:
            conclusion = (
                f"{self.path} does NOT follow from its own evidence: {', '.join(self.differences)}"
            )
        return [*self.verdict.lines(self.continued_adapter), conclusion]


def replay_verdict(path: Path) -> ReplayResult:
    """Compute the verdict of a ship.json again from its evidence and thresholds, without the
    model; raises ConfigError where the file cannot be read, or is not what `make ship` writes."""
    file_name = one_line(str(path))
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"REPLAY={file_name} cannot be read as JSON: {one_line(str(error))}"
        ) from None
    if not isinstance(recorded, dict) or recorded.get("format") != SHIP_FORMAT:
        raise ConfigError(
            f"REPLAY={file_name} is not a file that make ship writes (JSON in the format"
            f" {SHIP_FORMAT!r})"
        )
    try:
        evidence = TypeAdapter(Evidence).validate_python(recorded.get("evidence"))
        thresholds = TypeAdapter(Thresholds).validate_python(recorded.get("thresholds"))
        # the checks too, which are compared by name: the file may have been edited
        TypeAdapter(dict[str, list[dict[str, Any]]]).validate_python(
            {"checks": recorded.get("checks")}
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
        raise ConfigError(
            f"REPLAY={file_name}: its evidence is not whole: {one_line(reason, limit=300)}"
        ) from None
    verdict = judge_evidence(evidence, thresholds)
    decision, recorded_decision = _decision(verdict.as_json()), _decision(recorded)
    differences = [
        name
        for name in decision | recorded_decision
        if decision.get(name) != recorded_decision.get(name)
    ]
    return ReplayResult(
        path, verdict, tuple(differences), one_line(str(recorded.get("before") or ""))
    )


def _decision(verdict: dict[str, Any]) -> dict[str, Any]:
    """What decides, by names; the figures and words of the checks repeat the evidence."""
    return {
        "ok": verdict.get("ok"),
        "verdict": verdict.get("verdict"),
        **{f"checks[{check.get('name')}].ok": check.get("ok") for check in verdict["checks"]},
    }


# --- a verdict with its evidence ------------------------------------------------------------------
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
            "format": SHIP_FORMAT,
            "kind": EXIT_KINDS[0] if self.ok else DO_NOT_SHIP,
            **self.verdict.as_json(),
            "run": str(self.run),
            **self.provenance,
            "thresholds": asdict(self.thresholds),
            "evidence": asdict(self.evidence),
        }

    def lines(self) -> list[str]:
        lines = [
            *self.verdict.lines(self.provenance.get("before")),
            f"Written to: {self.run / SHIP_FILE}",
        ]
        if self.ok:
            return [*lines, next_command_line("export", "FORMAT=gguf", RUN=self.run)]
        return [*lines, next_command_line("eval", "writes every row", RUN=self.run)]


def refuse_few_rows(run: FinishedRun, max_rows: int) -> ShipResult | None:
    """Refuse a run that has too few held-out rows by its own record, before a library loads, and
    write ship.json; None where they have to be looked at."""
    records = run.manifest.get("data") or {}
    split = next((name for name in ("test", "val") if name in records), "")
    is_known = "report" in records.get(split or "train", {}) and not run.config.curriculum
    # the rows of several sources are recorded by source
    if not is_known or run.config.data.sources:
        return None
    thresholds, task = Thresholds(), TaskEvidence(split)
    rows = min(max_rows, records[split]["report"]["rows_kept"]) if split else 0
    refusal = too_few_rows_reason(task, rows, thresholds)
    if not refusal:
        return None
    evidence = Evidence(task, GeneralEvidence(), MergeEvidence("not needed"), refusal)
    verdict, provenance = (
        judge_evidence(evidence, thresholds),
        build_provenance(run, general_sample()),
    )
    result = ShipResult(run.folder.path, evidence, thresholds, verdict, provenance)
    with lock_run(run.folder), translate_write_errors(run.folder.path / SHIP_FILE):
        run.folder.write_json(SHIP_FILE, result.as_json())
    return result
