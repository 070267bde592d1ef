"""Published measured peaks against the tracer and the estimate: the table and JSON of `make memory-model-score`.

An error is predicted / measured - 1. Rows of equal settings are traced once. A row that cannot be traced is counted
with its reason and takes no part in the errors; so is, apart, one that the estimate has no words for. What the
estimate promises (its reserved bytes with their margin) is held against what the run reserved.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.memory_model.closed import NoClosedForm, closed_form
from benchmarks.memory_model.published import PublishedRun, read_runs
from benchmarks.memory_model.published_models import ConfigOf
from benchmarks.memory_model.script_settings import ScriptSettings
from sft_play.errors import ConfigError
from sft_play.machine.hardware import detect_hardware
from sft_play.planner.memory.estimate import MemoryEstimate
from sft_play.process.signals import die_with_parent
from sft_play.runs.folder import installed_versions
from sft_play.text import GIB
from sft_play.trace.settings import TracedPeak, TraceUnavailable

logger = logging.getLogger(__name__)

TraceFunction = Callable[[ScriptSettings], TracedPeak]
Progress = Callable[[str], None]

KINDS = ("allocated", "reserved")


@dataclass(frozen=True)
class ScoredRow:
    """A row that the tracer expresses, or the estimate alone; bytes, None where there is no such figure."""

    run: PublishedRun
    predicted_allocated: int | None
    predicted_reserved: int | None
    closed: MemoryEstimate | None = None
    """The estimate's prediction; None where it has no words for the settings."""

    @property
    def promised(self) -> int | None:
        """Bytes that the estimate says must be free for the allocator: reserved and its margin."""
        return self.closed.reserved + self.closed.margin if self.closed else None

    def errors(self) -> dict[str, float | None]:
        """Predicted / measured - 1 of trace and estimate (the reserved bound without its margin), by INTERFACES.md's
        names; None where one of the two is not known."""
        closed = (self.closed.allocated, self.closed.reserved) if self.closed else (None, None)
        run = self.run
        return {
            "allocated_error": _error(self.predicted_allocated, run.measured_allocated),
            "reserved_error": _error(self.predicted_reserved, run.measured_reserved),
            "closed_allocated_error": _error(closed[0], run.measured_allocated),
            "closed_reserved_error": _error(closed[1], run.measured_reserved),
        }

    def as_json(self) -> dict[str, Any]:
        """The row as INTERFACES.md has it, its source, the estimate and the errors beside."""
        return {
            "id": self.run.id,
            "class": self.run.grade,
            "mode": self.run.mode,
            "strategy": self.run.strategy,
            "source": self.run.source,
            "predicted_allocated_bytes": self.predicted_allocated,
            "measured_allocated_bytes": self.run.measured_allocated,
            "predicted_reserved_bytes": self.predicted_reserved,
            "measured_reserved_bytes": self.run.measured_reserved,
            "closed_allocated_bytes": self.closed.allocated if self.closed else None,
            "closed_reserved_bytes": self.closed.reserved if self.closed else None,
            "closed_promised_bytes": self.promised,
            **{name: _rounded(error) for name, error in self.errors().items()},
        }


@dataclass(frozen=True)
class Spread:
    """Errors of a group: median and 95th percentile of their size, and the worst on either side (0: none there)."""

    n: int
    median_abs_error: float
    p95_abs_error: float
    worst_over: float
    worst_under: float

    @classmethod
    def of(cls, errors: Iterable[float]) -> Spread | None:
        """The spread of these errors; None where there are none."""
        found = sorted(errors)
        if not found:
            return None
        sizes = sorted(abs(error) for error in found)
        return cls(len(found), quantile(sizes, 0.5), quantile(sizes, 0.95), max(found[-1], 0.0), min(found[0], 0.0))

    def as_json(self) -> dict[str, Any]:
        """Fractions, rounded to a millionth."""
        return {name: _rounded(value) for name, value in asdict(self).items()}


def quantile(ordered: list[float], share: float) -> float:
    """The value at a share of an ordered list, between neighbours in proportion (numpy's default)."""
    place = (len(ordered) - 1) * share  # of an index, from 0
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Group:
    """Rows of one kind: how many were expressed, how many settings are distinct among them (repeats of one prove no
    more than one), the spread of each error, and what the estimate promised."""

    n: int
    settings: int
    spreads: Mapping[str, Spread | None]
    promise: Promise

    @classmethod
    def of(cls, rows: Sequence[ScoredRow]) -> Group:
        """The group of these rows."""
        errors = [row.errors() for row in rows]
        spreads = {
            name: Spread.of(error for error in (one[name] for one in errors) if error is not None)
            for name in (errors[0] if errors else ())
        }
        return cls(len(rows), _distinct(rows), spreads, Promise.of(rows))

    def as_json(self) -> dict[str, Any]:
        """INTERFACES.md's summary of one group; a kind that was measured nowhere is null."""
        found = {name: spread.as_json() if spread else None for name, spread in self.spreads.items()}
        return {
            "n": self.n,
            "settings": self.settings,
            **{kind: found[f"{kind}_error"] for kind in KINDS},
            "closed_form": {
                **{kind: found[f"closed_{kind}_error"] for kind in KINDS},
                "promise": self.promise.as_json(),
            },
        }


@dataclass(frozen=True)
class Promise:
    """What the estimate promised to rows whose reserved bytes were measured."""

    n: int
    settings: int
    """Distinct ones among the rows."""
    short: tuple[str, ...]
    """Rows that reserved more than was promised."""
    ran: int
    """Rows on a card whose size is known: all of them ran there."""
    refused: tuple[str, ...]
    """Of those, rows that a plan would have refused."""
    median_over: float | None
    """Median of promised / measured - 1."""

    @classmethod
    def of(cls, rows: Iterable[ScoredRow]) -> Promise:
        """The promise to these rows; those without an estimate or a measured figure take no part."""
        known = [row for row in rows if row.closed is not None and row.run.measured_reserved]
        over = sorted((row.promised or 0) / (row.run.measured_reserved or 1) - 1 for row in known)
        cards = [(row, _card(row)) for row in known if _card(row)]
        return cls(
            n=len(known),
            settings=_distinct(known),
            short=tuple(row.run.id for row in known if (row.promised or 0) < (row.run.measured_reserved or 0)),
            ran=len(cards),
            refused=tuple(row.run.id for row, card in cards if row.closed and row.closed.required > card),
            median_over=quantile(over, 0.5) if over else None,
        )

    def as_json(self) -> dict[str, Any]:
        """Counts, and the rows by their id."""
        plain = {"n": self.n, "settings": self.settings, "short": len(self.short), "short_rows": list(self.short)}
        plain |= {"ran": self.ran, "refused": len(self.refused), "refused_rows": list(self.refused)}
        return plain | {"median_over": _rounded(self.median_over)}


def _card(row: ScoredRow) -> int:
    """Bytes of the card that a row ran on; 0 where that is not known."""
    return (row.run.settings.capacity or 0) if row.run.settings is not None else 0


def _distinct(rows: Iterable[ScoredRow]) -> int:
    """Distinct settings of rows."""
    return len({row.run.settings.canonical_text() for row in rows if row.run.settings is not None})


@dataclass(frozen=True)
class ScoreReport:
    """What a score found, row by row, and why rows are missing."""

    rows: tuple[ScoredRow, ...]
    refused: tuple[PublishedRun, ...] = ()
    """Rows without a prediction; each has a reason."""
    groups: Mapping[str, Group] = field(default_factory=dict)
    seconds: float = 0.0
    no_closed_form: Mapping[str, int] = field(default_factory=dict)
    """Traced rows without an estimate, counted by reason."""

    @property
    def not_expressible(self) -> dict[str, int]:
        """Rows without a prediction, counted by reason, most frequent first."""
        return dict(Counter(run.reason or "" for run in self.refused).most_common())

    def as_json(self) -> dict[str, Any]:
        """The object of INTERFACES.md, `memory-model-score --out`; bytes are integers, errors fractions."""
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": detect_hardware().as_json(),
            "versions": installed_versions(),
            "rows": [row.as_json() for row in self.rows],
            "not_expressible": self.not_expressible,
            "not_expressible_rows": [{"id": run.id, "class": run.grade, "reason": run.reason} for run in self.refused],
            "no_closed_form": dict(self.no_closed_form),
            "summary": {name: group.as_json() for name, group in self.groups.items()},
            "seconds": round(self.seconds, 1),
        }

    def table_lines(self) -> list[str]:
        """Rows, summary and reasons as text, GiB and per cent."""
        return [*self._row_lines(), "", *self._summary_lines(), "", *self._reason_lines()]

    def _row_lines(self) -> list[str]:
        head = f"{'allocated, GiB':>26}  {'reserved, GiB':>26}  row"
        sub = f"{'predicted':>9} {'measured':>8} {'error':>7}  {'predicted':>9} {'measured':>8} {'error':>7}"
        lines = [head, sub]
        for row in sorted(self.rows, key=lambda one: (one.run.grade, one.run.mode, one.run.strategy, one.run.source)):
            allocated = _figures(row.predicted_allocated, row.run.measured_allocated)
            reserved = _figures(row.predicted_reserved, row.run.measured_reserved)
            lines.append(f"{allocated}  {reserved}  {row.run.grade} {row.run.mode} {row.run.strategy}: {row.run.id}")
        return lines

    def _summary_lines(self) -> list[str]:
        """Of each group the absolute errors of trace and estimate, and how often a run reserved more than promised."""
        lines = ["absolute error: rows, median, 95th percentile, the worst over and under; and what was promised"]
        for name, group in self.groups.items():
            lines.append(f"{name}: {group.n} rows, {group.settings} settings")
            lines += [
                f"    {label.removesuffix('_error').replace('_', ' form, '):<22} {_spread(spread)}"
                for label, spread in group.spreads.items()
                if spread is not None
            ]
            if group.promise.n:
                lines.append(f"    promised too little    {len(group.promise.short)} of {group.promise.n}")
        whole = Promise.of(self.rows)
        lines.append(
            f"promised too little: {len(whole.short)} of {whole.n} rows ({whole.settings} settings) reserved more than "
            f"the estimate and its margin; {len(whole.refused)} of {whole.ran} that ran on a card of known size "
            "would have been refused"
        )
        return lines

    def _reason_lines(self) -> list[str]:
        total = len(self.rows) + len(self.refused)
        lines = [f"{len(self.rows)} of {total} rows expressed; {len(self.refused)} not:"]
        by_grade = Counter((run.reason or "", run.grade) for run in self.refused)
        for reason, count in self.not_expressible.items():
            grades = ", ".join(f"{n} {grade}" for (why, grade), n in sorted(by_grade.items()) if why == reason)
            lines.append(f"{count:>5}  {reason} ({grades})")
        return lines


# --- running --------------------------------------------------------------------------------------------------------


def score(
    peaks: Path,
    out: Path | None = None,
    *,
    progress: Progress | None = None,
    trace: TraceFunction | None = None,
    config_of: ConfigOf | None = None,
) -> ScoreReport:
    """Trace the rows of a CSV file of measured peaks and compare; the JSON goes to `out` where one is given.

    `progress` hears a line for each new trace. `trace` and `config_of` are the tracer and the finder of configs, unless
    given. Raises ConfigError where the file cannot be read as a table of peaks or `out` cannot be written.
    """
    started = time.monotonic()
    if out is not None:
        _require_writable(out)
    runs = sorted(read_runs(peaks, config_of=config_of), key=lambda one: one.grade)
    answers = _traces(runs, trace, progress)
    rows: list[ScoredRow] = []
    refused: list[PublishedRun] = []
    unknown: Counter[str] = Counter()
    for run in runs:
        answer = run.reason if run.settings is None else answers[run.settings.canonical_text()]
        if isinstance(answer, TracedPeak) and run.settings is not None:
            closed = _closed(run.settings, unknown)
            rows.append(ScoredRow(run, answer.allocated, answer.reserved, closed))
        elif run.settings is not None and is_estimate_only(run.settings):
            rows.append(ScoredRow(run, None, None, _closed(run.settings, unknown)))
        else:
            refused.append(replace(run, reason=str(answer)))
    seconds = time.monotonic() - started
    report = ScoreReport(tuple(rows), tuple(refused), group_rows(rows), seconds, dict(unknown.most_common()))
    if out is not None:
        _write(out, report)
    return report


def is_estimate_only(settings: ScriptSettings) -> bool:
    """Whether only the estimate can predict it: DeepSpeed ZeRO, and flash attention with sinks (gpt-oss)."""
    has_sinks = settings.model.get("model_type") == "gpt_oss" and settings.attention != "eager"
    return settings.strategy in ("zero1", "zero2", "zero3") or has_sinks


def _closed(settings: ScriptSettings, unknown: Counter[str]) -> MemoryEstimate | None:
    """The estimate of these settings; why there is none is counted."""
    try:
        return closed_form(settings)
    except NoClosedForm as why:
        unknown[str(why)] += 1
        return None


TraceAnswer = TracedPeak | str
"""A trace's peak, or why there is none."""


def _traces(
    runs: Iterable[PublishedRun], trace: TraceFunction | None, progress: Progress | None
) -> dict[str, TraceAnswer]:
    """The answer for each of the distinct settings, by their text; several at once where there are cores for it."""
    # each once: many rows repeat the settings of another, and a trace takes seconds
    distinct = {run.settings.canonical_text(): (run.id, run.settings) for run in runs if run.settings is not None}
    found: dict[str, TraceAnswer] = {}
    for key, answer in _answers({key: settings for key, (_, settings) in distinct.items()}, trace):
        found[key] = answer
        if progress is not None:
            progress(f"{len(found)}/{len(distinct)} {distinct[key][0]}")
    return found


def _answers(distinct: Mapping[str, ScriptSettings], trace: TraceFunction | None) -> Iterator[tuple[str, TraceAnswer]]:
    workers = min(len(distinct), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, MAX_WORKERS)
    if trace is not None or workers < 2:
        for key, settings in distinct.items():
            yield key, trace_or_reason(settings, trace)
        return
    context = multiprocessing.get_context("spawn")  # torch has threads of its own, which a fork would lose
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker, initargs=(os.getpid(),)) as pool:
        waiting = {pool.submit(trace_or_reason, settings): key for key, settings in distinct.items()}
        for done in as_completed(waiting):
            yield waiting[done], done.result()


def _tracer() -> TraceFunction:
    from benchmarks.memory_model import old_scripts  # noqa: F401  (which lets the tracer run them)
    from sft_play.trace.confirm import cached_trace

    return cached_trace


MAX_WORKERS = 8
"""Processes at once: each holds the libraries and one model's graph, about a gigabyte."""


def _begin_worker(parent: int) -> None:
    """A worker ends with its parent, and computes in one thread."""
    die_with_parent(parent, signal.SIGKILL)
    import torch

    torch.set_num_threads(1)


def trace_or_reason(settings: ScriptSettings, trace: TraceFunction | None = None) -> TraceAnswer:
    """The peak of these settings, or why there is none.

    A published run did fit: where the simulated card is too small by a little, it is traced without a bound.
    """
    try:
        return (trace or _tracer())(settings)
    except MemoryError:  # the simulated card is full
        if settings.capacity is None:
            return "the simulated GPU is too small for it"
        return trace_or_reason(replace(settings, capacity=None), trace)
    except TraceUnavailable as why:
        return _first_sentence(f"{_method(settings)} cannot be traced: {why}")
    except Exception as error:  # one row must not end the score of hundreds; its reason is counted
        logger.debug("The trace of %s failed", settings.canonical_text(), exc_info=True)
        return _first_sentence(f"{_method(settings)} cannot be traced: {type(error).__name__}: {error}")


def _method(settings: ScriptSettings) -> str:
    kind = str((settings.peft or {}).get("peft_type", ""))
    return kind if kind and kind != "LORA" else settings.mode


def _first_sentence(text: str) -> str:
    return " ".join(text.split())[:160]


def _require_writable(out: Path) -> None:
    if out.is_dir() or not out.resolve().parent.is_dir():
        raise ConfigError(f"OUT={out}: no file can be written there; name a file in a folder that exists")


def _write(out: Path, report: ScoreReport) -> None:
    aside = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        aside.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
        aside.replace(out)
    except OSError as error:
        raise ConfigError(f"OUT={out}: cannot be written ({error.strerror or error})") from None


# --- groups ---------------------------------------------------------------------------------------------------------


FIRST_GROUPS = ("one GPU, lora dora full, sdpa or flash", "one GPU, qlora", "fsdp")


def group_rows(rows: Iterable[ScoredRow]) -> dict[str, Group]:
    """Class A as asked, by mode, strategy, both, attention and source; the other classes by class and source."""
    found: dict[str, list[ScoredRow]] = defaultdict(list)
    for row in rows:
        for name in _group_names(row.run):
            found[name].append(row)
    names = [*(name for name in FIRST_GROUPS if name in found), *sorted(found.keys() - FIRST_GROUPS)]
    return {name: Group.of(found[name]) for name in names}


def _group_names(run: PublishedRun) -> list[str]:
    strategy = plain_strategy(run.strategy)
    if run.grade != "A":
        names = [f"class {run.grade}", f"class {run.grade}, mode {run.mode}", f"class {run.grade}, source {run.source}"]
        return [*names, "zero"] if strategy.startswith("zero") else names
    names = ["class A", f"mode {run.mode}", f"strategy {strategy}", f"mode {run.mode}, strategy {strategy}"]
    names += [f"source {run.source}", f"source {run.source}, mode {run.mode}, strategy {strategy}"]
    if strategy == "single" and run.attention != "eager" and run.mode in {"lora", "dora", "full"}:
        names.append("one GPU, lora dora full, sdpa or flash")
    if strategy == "single" and run.attention == "eager":
        names.append(f"mode {run.mode}, eager attention")
    if strategy == "single" and run.mode == "qlora":
        names.append("one GPU, qlora")
    if strategy in {"fsdp", "fsdp2"}:
        names.append("fsdp")
    if strategy.startswith("zero"):
        names.append("zero")
    return names


def plain_strategy(text: str) -> str:
    """`fsdp2 (8)`, `fsdp2 4 x cp 2` as their first word; context parallel alone is sharded over its ranks too."""
    word = text.lower().split(" ")[0] or "unknown"
    return "fsdp2" if word == "cp" else word


# --- figures --------------------------------------------------------------------------------------------------------


def _error(predicted: int | None, measured: int | None) -> float | None:
    return None if not measured or predicted is None else predicted / measured - 1


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _figures(predicted: int | None, measured: int | None) -> str:
    error = _error(predicted, measured)
    if predicted is None:
        return f"{'-':>9} {'-' if measured is None else f'{measured / GIB:.3f}':>8} {'-':>7}"
    if measured is None or error is None:
        return f"{predicted / GIB:9.3f} {'-':>8} {'-':>7}"
    return f"{predicted / GIB:9.3f} {measured / GIB:8.3f} {error:+7.2%}"


def _spread(spread: Spread) -> str:
    shares = f"{spread.median_abs_error:7.2%} {spread.p95_abs_error:7.2%} {spread.worst_over:+7.1%}"
    return f"{spread.n:>4} {shares} {spread.worst_under:+7.1%}"
