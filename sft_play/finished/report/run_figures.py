"""The figures of a run that a report and a comparison show: losses, speed, peaks; sizes and times in words."""

from __future__ import annotations

from sft_play.diagnose.text import sized
from sft_play.finished.report.record import Part, Record
from sft_play.units import GIB


def lead_of(record: Record) -> list[tuple[str, str]]:
    """The few figures that matter, those that are known."""
    lead = [("Status", record.status), ("Steps", f"{record.steps:,}{_of_steps(record)}")]
    for name, label, form in (("loss", "Held-out loss", "{:.4f}"), ("exact_match", "Exact match", "{:.1%}")):
        shown = before_and_after(record, name, form)
        if shown:
            lead.append((label, shown))
    best = record.best
    if best is not None and not isinstance(record.summary.get("after"), dict):
        lead.append((f"Best held-out {best[0].replace('_', ' ')}", f"{best[1]:.4g}"))
    speed = tokens_per_s(record)
    lead += [("Tokens/s", f"{speed:,.0f}")] if speed else []
    peak = measured_peak(record)
    lead += [("Peak memory", size(peak))] if peak else []
    wall = record.summary.get("wall_s")
    lead += [("Time", duration(wall))] if wall else []
    return lead


def _of_steps(record: Record) -> str:
    planned = [(part.plan.get("run") or {}).get("steps") for part in record.parts]
    total = sum(steps for steps in planned if isinstance(steps, (int, float)))
    return f" of {total:,}" if total and total != record.steps and not record.has_stages else ""


def before_and_after(record: Record, name: str, form: str) -> str:
    """A held-out figure before and after training, such as `9.44 → 0.13`; empty where none was measured."""
    before, after = ((record.summary.get(when) or {}).get(name) for when in ("before", "after"))
    if before is None and not record.summary:  # of a run that was killed: its manifest has what was measured first
        before = (record.manifest.get("before") or {}).get(name)
    shown = [form.format(value) for value in (before, after) if isinstance(value, (int, float))]
    return " → ".join(shown) if after is not None else f"{shown[0]} before" if shown else ""


def tokens_per_s(record: Record) -> float | None:
    """Speed in training: of the whole run where it has ended, else the mean of what was logged."""
    recorded = record.summary.get("tokens_per_s")
    if recorded:
        return float(recorded)
    speeds = [(part.tokens_per_s, part.training_s) for part in record.parts if part.tokens_per_s and part.training_s]
    seconds = sum(time or 0.0 for _, time in speeds)
    return sum((speed or 0.0) * (time or 0.0) for speed, time in speeds) / seconds if seconds else None


def predicted_and_measured(part: Part) -> tuple[str, int | None, int | None]:
    """The peak of the training steps by which plan and run are compared: what is counted, predicted and measured bytes.

    On a GPU what torch's allocator reserved, on a CPU resident memory. Of a run that has not ended, the measured peak
    is what it has logged so far.
    """
    peak = part.summary.get("peak_bytes") or {}
    planned = part.plan.get("peak_bytes") or {}
    predicted = peak.get("predicted_reserved", planned.get("reserved"))
    kind, key = ("reserved", "measured_reserved") if part.on_gpu else ("resident", "measured_rss")
    measured = peak.get(key)
    if measured is None:  # killed or still running: no summary, but every log line has the peak so far
        logged = part.last.get("memory_peak_gib")  # of allocated bytes on a GPU
        if isinstance(logged, (int, float)) and not part.summary:
            measured = int(logged * GIB)
            kind, predicted = ("allocated", planned.get("allocated")) if part.on_gpu else (kind, predicted)
    return kind, predicted, measured


def measured_peak(record: Record) -> int | None:
    """The highest measured peak of the training steps, over all parts."""
    return max((peak for part in record.parts if (peak := predicted_and_measured(part)[2])), default=None)


def size(count: float | None) -> str:
    """Bytes in GiB, small ones in MiB; `-` where not known."""
    return "-" if count is None else sized(count)


def duration(seconds: float | None) -> str:
    """Seconds as `2 h 05 min`; `-` where not known."""
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def off_by(predicted: float | None, measured: float | None) -> str:
    """How far the measured value is from the predicted one."""
    return f"{measured / predicted - 1:+.0%}" if predicted and measured is not None else ""
