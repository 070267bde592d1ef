"""The result of a check: PASS, WARN, FAIL or SKIP, a text, the remedy, and the threads that it rests on.

`make check` and `make doctor` both collect these; `diagnose/doctor.py` shows them.
"""

from dataclasses import dataclass
from typing import Literal

# WARN: it will run, but slower, less safely or differently than intended. SKIP: not checked, with the reason.
Verdict = Literal["PASS", "WARN", "FAIL", "SKIP"]


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


def pass_finding(name: str, found: str) -> Finding:
    """A check that found nothing wrong."""
    return Finding(name, "PASS", found)


def skip_finding(name: str, reason: str) -> Finding:
    """A check that was not made, and why."""
    return Finding(name, "SKIP", reason)


def warn_finding(name: str, found: str, remedy: str, *sources: str) -> Finding:
    """Something that runs, but slower, less safely or differently than intended."""
    return Finding(name, "WARN", found, remedy, sources)


def fail_finding(name: str, found: str, remedy: str, *sources: str) -> Finding:
    """Something that would stop or spoil a run."""
    return Finding(name, "FAIL", found, remedy, sources)
