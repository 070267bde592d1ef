"""Published measured peaks against the tracer and the estimate: the table and JSON of `make memory-model-score`.

An error is predicted / measured - 1. Rows of equal settings are traced once. A row that cannot be traced is counted
with its reason and takes no part in the errors; so is, apart, one that the estimate has no words for. What the
estimate promises (its reserved bytes with their margin) is held against what the run reserved.
"""

import logging
import multiprocessing
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.memory_model.closed import NoClosedForm, closed_form
from benchmarks.memory_model.published import PublishedRun, read_runs
from benchmarks.memory_model.published_models import ConfigOf
from benchmarks.memory_model.script_settings import ScriptSettings
from benchmarks.report_header import report_header
from sft_play.planner.memory.estimate import MemoryEstimate
from sft_play.process.signals import die_with_parent
from sft_play.text import GIB
from sft_play.trace.settings import TracedPeak, TraceUnavailable

logger = logging.getLogger(__name__)

TraceFunction = Callable[[ScriptSettings], TracedPeak]
Progress = Callable[[str], None]
MAX_WORKERS = 8
"""Processes at once: each holds the libraries and one model's graph, about a gigabyte."""
FIRST_GROUPS = ("one GPU, lora dora full, sdpa or flash", "one GPU, qlora", "fsdp")


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
        """Errors of trace and estimate (the reserved bound without its margin); None where a figure is missing."""
        run, closed = self.run, self.closed
        return {
            "allocated_error": _error(self.predicted_allocated, run.measured_allocated),
            "reserved_error": _error(self.predicted_reserved, run.measured_reserved),
            "closed_allocated_error": _error(closed.allocated if closed else None, run.measured_allocated),
            "closed_reserved_error": _error(closed.reserved if closed else None, run.measured_reserved),
        }

    def as_json(self) -> dict[str, Any]:
        run = self.run
        about = {"id": run.id, "class": run.grade, "mode": run.mode, "strategy": run.strategy, "source": run.source}
        return {
            **about, "predicted_allocated_bytes": self.predicted_allocated,
            "measured_allocated_bytes": run.measured_allocated, "predicted_reserved_bytes": self.predicted_reserved,
            "measured_reserved_bytes": run.measured_reserved,
            "closed_allocated_bytes": self.closed.allocated if self.closed else None,
            "closed_reserved_bytes": self.closed.reserved if self.closed else None,
            "closed_promised_bytes": self.promised,
            **{name: None if error is None else round(error, 6) for name, error in self.errors().items()},
        }  # fmt: skip


def spread(errors: Iterable[float | None]) -> dict[str, Any] | None:
    """Median and 95th percentile of the errors' size, and the worst over and under (0: none there)."""
    found = np.array([error for error in errors if error is not None])
    if not len(found):
        return None
    median, p95 = np.quantile(abs(found), (0.5, 0.95))
    figures = {"median_abs_error": median, "p95_abs_error": p95}
    figures |= {"worst_over": max(found.max(), 0.0), "worst_under": min(found.min(), 0.0)}
    return {"n": len(found), **{name: round(float(value), 6) for name, value in figures.items()}}


def promise_to(rows: Iterable[ScoredRow]) -> dict[str, Any]:
    """What the estimate promised to rows whose reserved bytes were measured.

    `short` rows reserved more than that. `ran`: rows on a card whose size is known; of those a plan would have
    `refused` some. `median_over`: the median of promised / measured - 1.
    """
    over: list[float] = []
    known: list[ScoredRow] = []
    short: list[str] = []
    refused: list[str] = []
    ran = 0
    for row in rows:
        measured, settings = row.run.measured_reserved, row.run.settings
        if row.closed is None or row.promised is None or not measured:
            continue
        known.append(row)
        over.append(row.promised / measured - 1)
        if row.promised < measured:
            short.append(row.run.id)
        if settings is not None and settings.capacity:
            ran += 1
            if row.closed.required > settings.capacity:
                refused.append(row.run.id)
    return {
        "n": len(known), "settings": _distinct(known), "short": len(short), "short_rows": short, "ran": ran,
        "refused": len(refused), "refused_rows": refused,
        "median_over": round(float(np.median(over)), 6) if over else None,
    }  # fmt: skip


def summarize(rows: Sequence[ScoredRow]) -> dict[str, Any]:
    """A group of rows: how many there are, how many settings are distinct among them (repeats of one prove no more than
    one), the spread of each error, and what the estimate promised."""
    errors = [row.errors() for row in rows]
    spreads = {name: spread(one[name] for one in errors) for name in errors[0]}
    estimated = {kind: spreads[f"closed_{kind}_error"] for kind in ("allocated", "reserved")}
    return {
        "n": len(rows), "settings": _distinct(rows), "allocated": spreads["allocated_error"],
        "reserved": spreads["reserved_error"], "closed_form": {**estimated, "promise": promise_to(rows)},
    }  # fmt: skip


def _distinct(rows: Iterable[ScoredRow]) -> int:
    return len({row.run.settings.canonical_text() for row in rows if row.run.settings is not None})


@dataclass(frozen=True)
class ScoreReport:
    """What a score found, row by row, and why rows are missing."""

    rows: tuple[ScoredRow, ...]
    refused: tuple[PublishedRun, ...]
    """Rows without a prediction; each has a reason."""
    groups: Mapping[str, dict[str, Any]]
    no_closed_form: Mapping[str, int]
    """Traced rows without an estimate, counted by reason."""
    seconds: float

    @property
    def not_expressible(self) -> dict[str, int]:
        """Rows without a prediction, counted by reason, most frequent first."""
        return dict(Counter(run.reason or "" for run in self.refused).most_common())

    def as_json(self) -> dict[str, Any]:
        return {
            **report_header(), "rows": [row.as_json() for row in self.rows], "not_expressible": self.not_expressible,
            "not_expressible_rows": [{"id": run.id, "class": run.grade, "reason": run.reason} for run in self.refused],
            "no_closed_form": dict(self.no_closed_form), "summary": dict(self.groups),
            "seconds": round(self.seconds, 1),
        }  # fmt: skip

    def table_lines(self) -> list[str]:
        lines = [
            f"{'allocated, GiB':>26}  {'reserved, GiB':>26}  row",
            f"{'predicted':>9} {'measured':>8} {'error':>7}  {'predicted':>9} {'measured':>8} {'error':>7}",
        ]
        for row in sorted(self.rows, key=lambda one: (one.run.grade, one.run.mode, one.run.strategy, one.run.source)):
            allocated = _figures(row.predicted_allocated, row.run.measured_allocated)
            reserved = _figures(row.predicted_reserved, row.run.measured_reserved)
            lines.append(f"{allocated}  {reserved}  {row.run.grade} {row.run.mode} {row.run.strategy}: {row.run.id}")
        lines += ["", "absolute error: rows, median, 95th percentile, worst over and under; and what was promised"]
        for name, group in self.groups.items():
            lines.append(f"{name}: {group['n']} rows, {group['settings']} settings")
            for form, part in (("", group), ("closed form, ", group["closed_form"])):
                for kind in ("allocated", "reserved"):
                    if part[kind] is not None:
                        lines.append(f"    {form + kind:<22} {_spread_text(part[kind])}")
            promise = group["closed_form"]["promise"]
            if promise["n"]:
                lines.append(f"    promised too little    {promise['short']} of {promise['n']}")
        whole = promise_to(self.rows)
        lines.append(
            f"promised too little: {whole['short']} of {whole['n']} rows ({whole['settings']} settings) reserved more "
            f"than the estimate and its margin; {whole['refused']} of {whole['ran']} that ran on a card of known size "
            "would have been refused"
        )
        lines += ["", f"{len(self.rows)} of {len(self.rows) + len(self.refused)} rows expressed; the others not:"]
        by_grade = Counter((run.reason or "", run.grade) for run in self.refused)
        for reason, count in self.not_expressible.items():
            grades = ", ".join(f"{n} {grade}" for (why, grade), n in sorted(by_grade.items()) if why == reason)
            lines.append(f"{count:>5}  {reason} ({grades})")
        return lines


def score(
    peaks: Path,
    *,
    progress: Progress | None = None,
    trace: TraceFunction | None = None,
    config_of: ConfigOf | None = None,
) -> ScoreReport:
    """Trace the rows of a CSV file of measured peaks and compare; `progress` hears a line for each new trace. Raises
    ConfigError where the file cannot be read as a table of peaks."""
    started = time.monotonic()
    runs = sorted(read_runs(peaks, config_of=config_of), key=lambda one: one.grade)
    answers = _traces(runs, trace, progress)
    rows: list[ScoredRow] = []
    refused: list[PublishedRun] = []
    unknown: Counter[str] = Counter()
    for run in runs:
        answer = run.reason if run.settings is None else answers[run.settings.canonical_text()]
        traced = answer if isinstance(answer, TracedPeak) else None
        if run.settings is None or (traced is None and not is_estimate_only(run.settings)):
            refused.append(replace(run, reason=str(answer)))
            continue
        closed = None
        try:
            closed = closed_form(run.settings)
        except NoClosedForm as why:
            unknown[str(why)] += 1
        held: tuple[int | None, int | None] = (traced.allocated, traced.reserved) if traced else (None, None)
        rows.append(ScoredRow(run, *held, closed))
    no_closed_form = dict(unknown.most_common())
    return ScoreReport(tuple(rows), tuple(refused), group_rows(rows), no_closed_form, time.monotonic() - started)


def is_estimate_only(settings: ScriptSettings) -> bool:
    """Whether only the estimate can predict it: DeepSpeed ZeRO, and flash attention with sinks (gpt-oss)."""
    has_sinks = settings.model.get("model_type") == "gpt_oss" and settings.attention != "eager"
    return settings.strategy in ("zero1", "zero2", "zero3") or has_sinks


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


def _begin_worker(parent: int) -> None:
    """A worker ends with its parent, and computes in one thread."""
    die_with_parent(parent, signal.SIGKILL)
    import torch

    torch.set_num_threads(1)


def trace_or_reason(settings: ScriptSettings, trace: TraceFunction | None = None) -> TraceAnswer:
    """The peak of these settings, or why there is none."""
    if trace is None:
        from benchmarks.memory_model import old_scripts  # noqa: F401  (which lets the tracer run them)
        from sft_play.trace.confirm import cached_trace

        trace = cached_trace
    try:
        return trace(settings)
    except MemoryError:  # the simulated card is full
        if settings.capacity is None:
            return "the simulated GPU is too small for it"
        # a published run did fit: the simulated card is too small by a little
        return trace_or_reason(replace(settings, capacity=None), trace)
    except TraceUnavailable as why:
        reason = str(why)
    except Exception as error:  # one row must not end the score of hundreds; its reason is counted
        logger.debug("The trace of %s failed", settings.canonical_text(), exc_info=True)
        reason = f"{type(error).__name__}: {error}"
    kind = str((settings.peft or {}).get("peft_type", "LORA"))
    method = settings.mode if kind == "LORA" else kind
    return " ".join(f"{method} cannot be traced: {reason}".split())[:160]


def group_rows(rows: Iterable[ScoredRow]) -> dict[str, dict[str, Any]]:
    """Class A as asked, by mode, strategy, both, attention and source; the other classes by class and source."""
    found: dict[str, list[ScoredRow]] = defaultdict(list)
    for row in rows:
        for name in _group_names(row.run):
            found[name].append(row)
    names = [*(name for name in FIRST_GROUPS if name in found), *sorted(found.keys() - FIRST_GROUPS)]
    return {name: summarize(found[name]) for name in names}


def _group_names(run: PublishedRun) -> list[str]:
    strategy = plain_strategy(run.strategy)
    if run.grade == "A":
        names = ["class A", f"mode {run.mode}", f"strategy {strategy}", f"mode {run.mode}, strategy {strategy}"]
        names += [f"source {run.source}", f"source {run.source}, mode {run.mode}, strategy {strategy}"]
        if strategy == "single" and run.attention == "eager":
            names.append(f"mode {run.mode}, eager attention")
        elif strategy == "single" and run.mode in {"lora", "dora", "full"}:
            names.append(FIRST_GROUPS[0])
        if strategy == "single" and run.mode == "qlora":
            names.append(FIRST_GROUPS[1])
        if strategy in {"fsdp", "fsdp2"}:
            names.append(FIRST_GROUPS[2])
    else:
        names = [f"class {run.grade}", f"class {run.grade}, mode {run.mode}", f"class {run.grade}, source {run.source}"]
    return [*names, "zero"] if strategy.startswith("zero") else names


def plain_strategy(text: str) -> str:
    """`fsdp2 (8)`, `fsdp2 4 x cp 2` as their first word; context parallel alone is sharded over its ranks too."""
    word = text.lower().split(" ")[0] or "unknown"
    return "fsdp2" if word == "cp" else word


def _error(predicted: int | None, measured: int | None) -> float | None:
    return None if not measured or predicted is None else predicted / measured - 1


def _figures(predicted: int | None, measured: int | None) -> str:
    error = _error(predicted, measured)
    texts = ["-" if size is None else f"{size / GIB:.3f}" for size in (predicted, measured)]
    share = "-" if error is None else f"{error:+.2%}"
    return f"{texts[0]:>9} {texts[1]:>8} {share:>7}"


def _spread_text(found: dict[str, Any]) -> str:
    shares = f"{found['median_abs_error']:7.2%} {found['p95_abs_error']:7.2%} {found['worst_over']:+7.1%}"
    return f"{found['n']:>4} {shares} {found['worst_under']:+7.1%}"
