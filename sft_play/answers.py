"""What a command answers with: plain data for programs, and lines for a person. And findings, one
for each check: `make check` and `make doctor` answer with them (`diagnose/doctor.py` shows
them)."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal


class Answer:
    """What the work of a command comes to: a dataclass, whose JSON is `ok` and its fields.

    A class whose published JSON has other keys says so in an `as_json` of its own.
    """

    @property
    def ok(self) -> bool:
        """True if the command succeeded: its exit code is 0, else 2."""
        return True

    def as_json(self) -> Any:
        """`ok` and the fields, as plain data."""
        return {"ok": self.ok, **plain_data(self)}

    def lines(self) -> list[str]:
        """In words, the next command last."""
        raise NotImplementedError


def plain_data(instance: Any) -> dict[str, Any]:
    """The fields of a dataclass as JSON has them: lists, text for paths, ISO dates."""
    text = json.dumps(
        asdict(instance), default=lambda value: getattr(value, "isoformat", value.__str__)()
    )
    return json.loads(text)  # type: ignore[no-any-return]


# --- what a check found ---------------------------------------------------------------------------

# WARN: it will run, but slower, less safely or differently than intended. SKIP: not checked, with
# the reason.
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
        assert self.remedy or self.verdict in ("PASS", "SKIP"), (
            f"{self.name}: {self.verdict} without a remedy"
        )


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
