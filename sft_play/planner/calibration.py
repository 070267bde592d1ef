"""Measurements of earlier runs on this machine beside their predictions, and what later plans learn
from them.

One JSON line per finished run in the cache folder. A line holds the raw prediction, before any
correction: a ratio of measured to corrected figures would become 1 as soon as a correction was
right, and so undo it.

The corrections differ. Speed is an expectation: the median of the newest runs, which one outlier
does not move. It has two numbers, the host's seconds of a pass and the card's seconds of a token,
or one ratio where a run's passes are not known. Memory is a bound: the largest ratio of all
recorded runs, never below 1, so it is only corrected upwards.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from sft_play.files import atomic, cache_dir, hold_lock
from sft_play.planner.kernels import CountedKernels, KernelsName
from sft_play.planner.pass_work import PassTimes
from sft_play.text import GIB

RECORD_FILE = "measured.jsonl"
# Of a line. Lines without it come from a version that recorded corrected predictions, and are
# ignored.
RECORD_VERSION = 3
# Lines that the record keeps, the newest.
MAX_RECORDED_RUNS = 200
# Runs that a plan learns its speed from, the newest.
MAX_SPEED_RUNS = 10
# The model's name in lines of the self-test's trials. Speeds are learned from them where no run
# says more; memory is not, because for a model of 0.5B the allocator's rounding is a larger share
# than for others.
SELFTEST_MODEL = "make gpu-selftest"
# A step that ran out of memory is planned again where this many times as much is free: other
# processes have ended.
RETRY_MEMORY_FACTOR = 1.25
# A plan is corrected to at most this multiple of its prediction: anything beyond was not this run's
# memory.
MAX_MEMORY_FACTOR = 4.0
# Sizes are alike within this factor: what a small run needs beyond is mostly the libraries' own.
SIMILAR_SIZE_FACTOR = 2.0
# A pass that takes this many times as long as the host's says something of the card.
CLEAR_OF_HOST = 1.1
# Factors of the card that are tried at most.
MAX_FITTED = 16
# Fractions of the roofline within which a speed is believed; on a CPU the roofline is only an order
# of magnitude.
SPEED_RANGE = (1e-4, 1e4)


@dataclass(frozen=True)
class UncorrectedPrediction:
    """The prediction of a step before earlier runs, or a measured host, correct it: reserved bytes
    of a rank, tokens/s over all, and the seconds of a pass (None in a plan of an earlier
    version)."""

    reserved: int
    tokens_per_s: float
    pass_times: PassTimes | None = None


@dataclass(frozen=True)
class MeasuredRun:
    """A finished run: bytes of one rank, tokens per second over all; `device` is the GPU's name or
    `cpu`. Predictions are raw, as if no run had been recorded before."""

    device: str
    mode: str
    layout: str
    model: str
    micro_batch: int
    seq_len: int
    predicted_allocated: int
    measured_allocated: int
    predicted_reserved: int
    measured_reserved: int
    predicted_tokens_per_s: float
    measured_tokens_per_s: float
    versions: str
    finished: str
    version: int = RECORD_VERSION
    # What ran, of norms, gated activations and rotations. A prediction that counted others is 0, as
    # if unknown.
    kernels: KernelsName = "plain"
    # Those that the memory was predicted for, where Liger's ran in a plan that counted the plain
    # ones, which take more; None: `kernels`.
    memory_kernels: KernelsName | None = None
    # Whether its blocks were compiled: such runs and plain ones do not correct each other's plans.
    compiled: bool = False
    # Of a run whose memory ran out: the bytes that it was planned for. Then nothing was measured.
    # 0: it did not.
    ran_out_of: int = 0
    # Seconds of a pass at no tokens, which are the host's, and of each token; 0: not measured, as
    # in lines of earlier versions and of runs that do not measure their host.
    predicted_pass_s: float = 0.0
    measured_pass_s: float = 0.0
    predicted_token_s: float = 0.0
    measured_token_s: float = 0.0

    @property
    def memory_ratio(self) -> float:
        """Measured over predicted reserved bytes; 0 where one is unknown."""
        return (
            self.measured_reserved / self.predicted_reserved if self.predicted_reserved > 0 else 0.0
        )

    @property
    def speed_ratio(self) -> float:
        """Measured over predicted tokens per second; 0 where one is unknown."""
        return (
            self.measured_tokens_per_s / self.predicted_tokens_per_s
            if self.predicted_tokens_per_s > 0
            else 0.0
        )


@dataclass(frozen=True)
class Correction:
    """Corrections from earlier runs on the same device in the same mode: factors on reserved memory
    (>= 1) and on speed. `memory_factor` is the largest over runs of any size; `narrow_to_size`
    gives the factor for one prediction."""

    run_count: int = 0
    memory_factor: float = 1.0
    speed_factor: float = 1.0
    # Factors of a pass's seconds, in place of the one on speed: of the host's (None: passes were
    # not measured) and of the card's.
    host_factor: float | None = None
    card_factor: float = 1.0
    has_measured_speed: bool = False
    uses_selftest_speed: bool = False
    # Reserved bytes of the runs that memory is learned from: predicted, measured.
    peaks: tuple[tuple[int, int], ...] = ()

    # The step with the smallest prediction that ran out of memory, unless a later run has fitted
    # with as much.
    oom_run: MeasuredRun | None = None

    def corrected_reserved(self, uncorrected_bytes: int, budget_bytes: int) -> int:
        """The corrected prediction of a step's reserved bytes; above the budget if a step with no
        larger a prediction has run out of it."""
        corrected_bytes = int(
            uncorrected_bytes * self.narrow_to_size(uncorrected_bytes).memory_factor
        )
        if self.oom_run and uncorrected_bytes >= self.oom_run.predicted_reserved:
            return max(corrected_bytes, budget_bytes + 1)
        return corrected_bytes

    def narrow_to_size(self, predicted_bytes: int) -> Correction:
        """The correction for a prediction of `predicted_bytes`, from runs of like size. A run
        counts for larger predictions up to SIMILAR_SIZE_FACTOR times what it measured, so that a
        larger prediction never gets a smaller result."""

        def factor(peak: tuple[int, int]) -> float:
            return min(
                peak[1] / peak[0],
                MAX_MEMORY_FACTOR,
                SIMILAR_SIZE_FACTOR * peak[1] / predicted_bytes,
            )

        similar_peaks = [
            peak
            for peak in self.peaks
            if peak[0] / SIMILAR_SIZE_FACTOR <= predicted_bytes <= SIMILAR_SIZE_FACTOR * max(peak)
        ]
        similar_peaks.sort(key=factor, reverse=True)
        return replace(
            self, memory_factor=max([1.0, *map(factor, similar_peaks)]), peaks=tuple(similar_peaks)
        )

    @property
    def warning(self) -> str | None:
        """What ran out of memory here, in words."""
        if self.oom_run is None:
            return None
        run, day = self.oom_run, self.oom_run.finished.partition("T")[0]
        return (
            f"micro-batch {run.micro_batch} ran out of memory in a run of this kind on this machine"
            f" ({run.layout}, {run.seq_len} tokens, {run.ran_out_of / GIB:.1f} GiB, {day}): nothing"
            " that is predicted to need as much is planned, until a run that is given such a batch"
            " (train.batch_size) has fitted"
        )

    @property
    def reason(self) -> str | None:
        """The correction in words; None without a run."""
        if self.uses_selftest_speed:
            return (
                f"{SELFTEST_MODEL} measured {self._speed_text} in this mode on this machine, which"
                " predicts this speed until one of your runs measures it"
            )
        if not self.run_count:
            return None
        peak_count = len(self.peaks)
        text = (
            f"{peak_count} earlier run{'s' if peak_count > 1 else ''} of this kind on this machine"
        )
        if self.memory_factor > 1:
            figures = "{1:.2f} GiB, {0:.2f} predicted".format(
                *(size / GIB for size in self.peaks[0])
            )
            text += (
                f" used {self.memory_factor - 1:.1%} more memory than predicted ({figures}), which"
                " is added here"
            )
        elif self.peaks:
            text += " stayed within their predicted memory"
        else:
            text = (
                "earlier runs of this kind on this machine were of other sizes, and do not correct"
                " this one's memory"
            )
        if self.has_measured_speed:
            text += f"; they measured {self._speed_text}, by which this one is predicted"
        return text

    @property
    def _speed_text(self) -> str:
        if self.host_factor is None:
            return f"{self.speed_factor:.2f} of the roofline's speed"
        return (
            f"{self.card_factor:.2f} of the roofline's seconds of a token and"
            f" {self.host_factor:.2f} of the host's seconds of a pass"
        )


def measured_runs_path() -> Path:
    """The file of the record."""
    return cache_dir() / RECORD_FILE


def add_measured_run(measured_run: MeasuredRun) -> None:
    """Append a run; a cache that cannot be written does not fail a run that is done."""
    path = measured_runs_path()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(
            path.with_suffix(".lock"),
            waiting_message="waiting for another run that is writing its measurements",
        ):
            lines = [
                json.dumps(asdict(run))
                for run in [*load_measured_runs(), measured_run][-MAX_RECORDED_RUNS:]
            ]
            atomic.write(path, "\n".join(lines) + "\n")  # readers hold no lock


def load_measured_runs(path: Path | None = None) -> list[MeasuredRun]:
    """The recorded runs, oldest first; unreadable lines, and lines of other versions, are
    skipped."""
    try:
        lines = (path or measured_runs_path()).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    return [run for line in lines if (run := _parse_run(line)) is not None]


# annotations are strings here (from __future__ import annotations)
_NUMERIC_FIELDS = tuple(
    field.name for field in fields(MeasuredRun) if field.type in ("int", "float")
)


def _parse_run(line: str) -> MeasuredRun | None:
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        data = json.loads(line)
        if isinstance(data, Mapping) and data.get("version") in (2, RECORD_VERSION):
            # version 2 predicted speeds by another rule: what it measured of memory still counts
            data = {**data, **({"predicted_tokens_per_s": 0.0} if data["version"] == 2 else {})}
            run = MeasuredRun(**data)
            if all(
                math.isfinite(getattr(run, name)) and getattr(run, name) >= 0
                for name in _NUMERIC_FIELDS
            ):
                return run
    return None


def compute_correction(
    runs: Iterable[MeasuredRun],
    *,
    device: str,
    mode: str,
    layout: str,
    model: str | None = None,
    kernels: CountedKernels = CountedKernels(),  # noqa: B008
    is_compiled: bool = False,
    budget_bytes: int = 0,
) -> Correction:
    """The correction from recorded runs of the closest kind, by their raw ratios; compiled runs
    apart from plain ones.

    Memory is learned from runs of this model in this layout, else from runs of this layout, else
    from runs of the device and mode. Speed is learned from runs of this model in any layout, else
    from all, so that a measurement of one layout does not make another look faster; if there is
    none, from the self-test's trials. Either is learned only from runs with the kernels that the
    plan counts for it. A run that ran out of memory counts for this model in this layout, as long
    as `budget_bytes` is not much larger now.
    """
    same_kind = [
        run for run in runs if (run.device, run.mode, run.compiled) == (device, mode, is_compiled)
    ]
    finished_runs = [run for run in same_kind if not run.ran_out_of]
    # what was asked for and what the plan counted can differ: a prediction that counted other
    # kernels is recorded as 0
    memory_runs = [
        run
        for run in finished_runs
        if (run.memory_kernels or run.kernels) == kernels.memory and run.predicted_reserved
    ]
    nearest_runs = _prefer_runs(
        [run for run in memory_runs if run.model != SELFTEST_MODEL],
        lambda run: run.layout == layout,
    )
    nearest_runs = _prefer_runs(nearest_runs, lambda run: run.model == model)
    memory_factor = max([1.0, *(run.memory_ratio for run in nearest_runs)])
    finished_runs = [
        run for run in finished_runs if run.kernels == kernels.speed and run.speed_ratio > 0
    ]
    speed_runs = _prefer_runs(
        [run for run in finished_runs if run.model != SELFTEST_MODEL],
        lambda run: run.model == model,
    )
    newest_runs = (speed_runs or finished_runs)[-MAX_SPEED_RUNS:]
    # passes say more than a run's mean speed, which holds for rows of its lengths alone
    host_factor = _median_factor(
        [run.measured_pass_s / (run.predicted_pass_s or math.inf) for run in newest_runs]
    )
    card_factor = _median_factor(
        [run.measured_token_s / (run.predicted_token_s or math.inf) for run in newest_runs]
    )
    speed_factor = None
    if host_factor is None:
        speed_factor = _median_factor([run.speed_ratio for run in newest_runs])
    same_model_runs = [
        run
        for run in same_kind
        if (run.layout, run.model, run.memory_kernels or run.kernels)
        == (layout, model, kernels.memory)
    ]
    return Correction(
        len(nearest_runs),
        min(MAX_MEMORY_FACTOR, memory_factor),
        speed_factor or 1.0,
        host_factor,
        card_factor or 1.0,
        has_measured_speed=bool(newest_runs),
        uses_selftest_speed=bool(newest_runs) and not speed_runs,
        oom_run=_find_oom_run(same_model_runs, budget_bytes),
        peaks=tuple((run.predicted_reserved, run.measured_reserved) for run in nearest_runs),
    )


def _find_oom_run(runs: Sequence[MeasuredRun], budget_bytes: int) -> MeasuredRun | None:
    """The smallest run that ran out of about this budget and that no later run disproves."""
    oom_runs: list[MeasuredRun] = []
    for run in runs:
        if not run.ran_out_of:
            oom_runs = [
                oom_run
                for oom_run in oom_runs
                if run.predicted_reserved < oom_run.predicted_reserved
            ]
        elif budget_bytes <= RETRY_MEMORY_FACTOR * run.ran_out_of:
            oom_runs.append(run)
    return min(oom_runs, key=lambda run: run.predicted_reserved, default=None)


def _median_factor(ratios: Sequence[float]) -> float | None:
    """The median of the ratios that are known, within what is believed; None without one."""
    known = [ratio for ratio in ratios if ratio > 0]
    lowest, highest = SPEED_RANGE
    return min(highest, max(lowest, statistics.median(known))) if known else None


def fit_token_seconds(
    passes: Sequence[tuple[float, float]], predicted: PassTimes, *, host_s: float
) -> float:
    """Seconds of each token, by measured passes (tokens, seconds), their predicted times and a pass
    of hardly any tokens as it was measured: of the card's factors by which single passes come out,
    the one by which all are off least. 0 where the host alone explains them all."""
    times = predicted.corrected(host_factor=host_s / max(1e-12, predicted.host_s), card_factor=1.0)
    factors = sorted(
        factor
        for tokens, seconds in passes
        if seconds > CLEAR_OF_HOST * host_s
        and (factor := times.card_factor(tokens, seconds)) is not None
    )

    def error(card_factor: float) -> float:
        fitted = times.corrected(host_factor=1.0, card_factor=card_factor)
        return sum(
            abs(math.log(max(1e-12, fitted.seconds(tokens)) / max(1e-12, seconds)))
            for tokens, seconds in passes
        )

    tried_factors = factors[:: 1 + len(factors) // MAX_FITTED]
    return min(tried_factors, key=error, default=0.0) * predicted.token_s


def _prefer_runs(
    runs: list[MeasuredRun], is_preferred: Callable[[MeasuredRun], bool]
) -> list[MeasuredRun]:
    return [run for run in runs if is_preferred(run)] or runs
