"""What a check found: PASS, WARN, FAIL or SKIP, in words, with the remedy and the threads that it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["PASS", "WARN", "FAIL", "SKIP"]
"""WARN: it will run, slower or less safely than it could. SKIP: not looked at, and why."""
_NAME_WIDTH = 22


@dataclass(frozen=True)
class Finding:
    """One check's answer; a FAIL or a WARN says what to do about it."""

    name: str
    verdict: Verdict
    found: str
    remedy: str | None = None
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert self.remedy or self.verdict in ("PASS", "SKIP"), f"{self.name}: {self.verdict} without a remedy"

    @property
    def lines(self) -> list[str]:
        """The row of the table, and below it the remedy and the sources of what is not well."""
        found = [f"{self.verdict}  {self.name:<{_NAME_WIDTH}} {self.found}"]
        if self.remedy:
            found.append(f"      {'':<{_NAME_WIDTH}} remedy: {self.remedy}")
        return [*found, *(f"      {'':<{_NAME_WIDTH}} see {source}" for source in self.sources)]


def passed(name: str, found: str) -> Finding:
    """A check that found nothing wrong."""
    return Finding(name, "PASS", found)


def skipped(name: str, why: str) -> Finding:
    """A check that was not made, and why."""
    return Finding(name, "SKIP", why)


def warned(name: str, found: str, remedy: str, *sources: str) -> Finding:
    """Something that runs, slower or less safely than it could."""
    return Finding(name, "WARN", found, remedy, sources)


def failed(name: str, found: str, remedy: str, *sources: str) -> Finding:
    """Something that would stop or spoil a run."""
    return Finding(name, "FAIL", found, remedy, sources)


@dataclass(frozen=True)
class Report:
    """All findings of one look at this machine, and how long it took."""

    findings: tuple[Finding, ...]
    elapsed_s: float

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The checks that FAIL."""
        return tuple(finding for finding in self.findings if finding.verdict == "FAIL")

    @property
    def ok(self) -> bool:
        """Whether nothing FAILs."""
        return not self.failures

    def as_json(self) -> dict[str, Any]:
        """One JSON object: `ok`, `elapsed_s` and the findings."""
        return {"ok": self.ok, "elapsed_s": self.elapsed_s, "findings": [asdict(item) for item in self.findings]}

    def lines(self) -> list[str]:
        """The table, and what it comes to."""
        table = [line for finding in self.findings for line in finding.lines]
        return [*table, f"{self._sum()} ({self.elapsed_s:.0f} s)"]

    def _sum(self) -> str:
        counts = {
            verdict: sum(item.verdict == verdict for item in self.findings) for verdict in ("PASS", "WARN", "SKIP")
        }
        rest = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        if self.ok:
            return f"Nothing FAILs: {rest}"
        return f"{len(self.failures)} FAIL: {listed(item.name for item in self.failures)}" + (
            f"; {rest}" if rest else ""
        )


def listed(words: Any) -> str:
    """Each word once, with commas."""
    return ", ".join(dict.fromkeys(str(word) for word in words))


def ranks_words(ranks: Sequence[int]) -> str:
    """`rank 1`, or `ranks 0, 2`."""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(str(rank) for rank in ranks)}"
