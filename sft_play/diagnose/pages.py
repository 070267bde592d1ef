"""The findings of `make check` and `make doctor` as pages: each with what to do about it, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from sft_play.findings import Finding
from sft_play.log import escape_control
from sft_play.tables import join_unique, render_lines

CHECK_STATES = {"PASS": "ok", "WARN": "warning", "FAIL": "problem", "SKIP": "skipped"}
_STATE_LABELS = {**CHECK_STATES, "FAIL": "PROBLEM"}


def format_findings(findings: Sequence[Finding], labels: Mapping[str, str] = _STATE_LABELS) -> list[str]:
    """Each finding's verdict, name and text; below the text what to do, and the threads that it rests on."""
    rows = Table.grid(padding=(0, 2, 0, 0))
    for column in range(3):
        rows.add_column(no_wrap=True, overflow="ignore", min_width=(0, 18, 0)[column])
    for finding in findings:
        remedy = [f"do: {finding.remedy}"] if finding.remedy else []
        text = "\n".join([finding.found, *remedy, *(f"see {source}" for source in finding.sources)])
        rows.add_row(labels.get(finding.verdict, finding.verdict), escape_control(finding.name), escape_control(text))
    return render_lines(rows, width=None)


@dataclass(frozen=True)
class FindingsReport:
    """All findings of one look, in the order of the page, and how long it took."""

    findings: tuple[Finding, ...]
    elapsed_s: float = 0.0

    @property
    def ok(self) -> bool:
        """True if nothing FAILs; warnings do not count."""
        return not self.names_by_verdict("FAIL")

    def names_by_verdict(self, verdict: str) -> list[str]:
        """The names of the findings of one verdict."""
        return [finding.name for finding in self.findings if finding.verdict == verdict]


class DoctorReport(FindingsReport):
    """All findings of one look at this machine."""

    def as_json(self) -> dict[str, Any]:
        """One JSON object: `ok`, `elapsed_s` and the findings."""
        return {"ok": self.ok, "elapsed_s": self.elapsed_s, "findings": [asdict(item) for item in self.findings]}

    def lines(self) -> list[str]:
        """The table, and the verdict."""
        failed_names = self.names_by_verdict("FAIL")
        header = "Nothing FAILs: " if self.ok else f"{len(failed_names)} FAIL: {join_unique(failed_names)}; "
        counts = ", ".join(f"{len(self.names_by_verdict(verdict))} {verdict}" for verdict in ("PASS", "WARN", "SKIP"))
        return [*format_findings(self.findings, {}), f"{header}{counts} ({self.elapsed_s:.0f} s)"]


@dataclass(frozen=True)
class CheckReport(FindingsReport):
    """Everything that was checked of a config."""

    config: Path = Path()

    def summary_lines(self) -> list[str]:
        """Problems and warnings, and the verdict."""
        problems = [item for item in self.findings if item.verdict in ("FAIL", "WARN")]
        verdict = f"{self._verdict()}; WHY=1 shows each"
        return [f"Check of {self.config}:", *format_findings(problems), verdict] if problems else [verdict]

    def lines(self) -> list[str]:
        """The page and its verdict."""
        return [f"Check of {self.config}:", *format_findings(self.findings), self._verdict()]

    def _verdict(self) -> str:
        counts = [
            f"{count} {word}{'s' * (count != 1)}"
            for state, word in (("FAIL", "problem"), ("WARN", "warning"))
            if (count := len(self.names_by_verdict(state)))
        ]  # fmt: skip
        is_tried = "memory plan" in self.names_by_verdict("WARN")
        verdict = "Not ready" if not self.ok else "Predicted not to fit" if is_tried else "Ready to train"
        counts.append(f"{len(self.names_by_verdict('PASS'))} ok")
        return f"{verdict}: {', '.join(counts)} ({self.elapsed_s:.0f} s)"

    def as_json(self) -> dict[str, Any]:
        """`ok`, `elapsed_s` and the checks."""
        checks = []
        for item in self.findings:
            check = {"name": item.name, "state": CHECK_STATES[item.verdict], "what": item.found, "do": item.remedy}
            checks.append(check | ({"see": list(item.sources)} if item.sources else {}))
        return {"ok": self.ok, "elapsed_s": self.elapsed_s, "checks": checks}
