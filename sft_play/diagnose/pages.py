"""Pages as text: tables, sizes and lists, where what is not known is `n/a`; and the findings of `make check` and `make
doctor`, each with what to do about it, and the verdict."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from sft_play import units
from sft_play.findings import Finding
from sft_play.log import escape_control, one_line

# Columns that every table of figures fits.
PAGE_WIDTH = 100
_UNLIMITED_WIDTH = 100_000
NOT_KNOWN = "n/a"


def gib_or_na(size: int | None, *, digits: int = 1) -> str:
    """A size in units of 2**30 bytes."""
    return NOT_KNOWN if size is None else units.format_gib(size, digits=digits)


def value_or_na(value: Any, unit: str = "") -> str:
    """A value safe to show, with its unit."""
    if value is None:
        return NOT_KNOWN
    text = f"{value:g}" if isinstance(value, float) else one_line(str(value))
    return f"{text} {unit}".strip()


def yes_no_or_na(value: bool | None) -> str:
    """`yes`, `no` or `n/a`."""
    return NOT_KNOWN if value is None else "yes" if value else "no"


def build_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: Sequence[int] = ()) -> Table:
    """A table without frames, numbers to the right; `text_columns` are to the left, and wrap where it is narrow."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="", padding=(0, 1, 0, 0))
    for index, name in enumerate(columns):
        is_text = index in text_columns
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def render_lines(renderable: RenderableType, *, width: int | None = PAGE_WIDTH) -> list[str]:
    """The lines of a table, without colours; names are never read as markup. None: as wide as its longest line."""
    buffer = io.StringIO()
    console_width = _UNLIMITED_WIDTH if width is None else width
    console = Console(file=buffer, width=console_width, no_color=True, highlight=False, markup=False, emoji=False)
    console.print(renderable)
    return [line.rstrip() for line in buffer.getvalue().splitlines()]


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table of short texts, all of them to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def join_unique(words: Iterable[object]) -> str:
    """Each word once, with commas."""
    return ", ".join(dict.fromkeys(str(word) for word in words))


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
