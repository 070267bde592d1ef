"""`make report`: one page about a run, from what its folder records; nothing is measured or computed a second time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.errors import SftPlayError
from sft_play.finished.report.charts import NotDrawn, Screen, charts_of, draw_charts, plot_lines
from sft_play.finished.report.page import page, write_page
from sft_play.finished.report.record import Record, lead_of, read_record
from sft_play.finished.report.report_sections import sections_of
from sft_play.finished.run import next_line
from sft_play.log import one_line
from sft_play.runs.folder import RunFolder

logger = logging.getLogger(__name__)

REPORT = "report.html"
"""In a run folder: its report."""


@dataclass(frozen=True)
class RunReport:
    """A report that was written."""

    record: Record
    path: Path
    sections: tuple[str, ...]
    charts: int
    plot: tuple[str, ...] = ()
    """Curves for the terminal, with escape codes where it has colours."""

    ok = True

    def as_json(self) -> dict[str, Any]:
        """In plain data."""
        return {
            "ok": True, "run": str(self.record.folder.path), "path": str(self.path), "status": self.record.status,
            "sections": list(self.sections), "charts": self.charts, "figures": dict(lead_of(self.record)),
            "warnings": list(self.record.warnings),
        }  # fmt: skip

    def lines(self) -> list[str]:
        """In words."""
        figures = ", ".join(f"{name.lower()} {value}" for name, value in lead_of(self.record))
        count = len(self.record.warnings)
        warned = [f"Warnings in the log: {count}"] if count else []
        return [
            f"Run {self.record.name}: {figures}",
            *warned,
            f"Written to: {self.path}",
            f"{next_line('compare', RUNS=f'{self.record.folder.path} OTHER')} shows it beside another run",
        ]


def report(record: Record, *, path: Path | None = None, screen: Screen | None = None) -> RunReport:
    """Write the report of a run.

    Args:
        path: where to; `report.html` in the run folder where None.
        screen: how curves are drawn for the terminal; None draws none.

    Raises:
        ConfigError: the page cannot be written there.
    """
    charts, problem = charts_of(record), None
    try:
        svgs = draw_charts(charts)
    except NotDrawn as error:
        svgs, problem = [], f"The charts are missing: {error}"
        logger.warning("%s", problem)
    pictures = [(chart.heading, svg) for chart, svg in zip(charts, svgs, strict=False)]
    sections = [section for section in sections_of(record, pictures, problem) if not section.is_empty]
    target = path or record.folder.path / REPORT
    write_page(target, page(f"{record.name}: training report", lead=lead_of(record), sections=sections))
    plot: list[str] = []
    if screen is not None and charts and charts[0].title == "Loss":
        plot = plot_lines("Loss", charts[0].curves, screen, is_log=charts[0].is_log)
    return RunReport(record, target, tuple(section.title for section in sections), len(svgs), tuple(plot))


@contextlib.contextmanager
def reported(folder: RunFolder) -> Iterator[None]:
    """Write the report once the run inside has ended, however it ended; not where it was refused before it began."""
    before = _state(folder)
    try:
        yield
    finally:
        if _state(folder) != before:  # a run that was refused leaves an earlier one's manifest, and its report, alone
            report_at_end(folder)


def _state(folder: RunFolder) -> tuple[int, int] | None:
    """What changes with every start and end of a run: its manifest is written anew."""
    try:
        status = folder.manifest_path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def report_at_end(folder: RunFolder) -> None:
    """Write the report of a run that has just ended, and name it; whatever goes wrong is a warning.

    It is called after the summary was written: nothing that the run measured of itself changes.
    """
    if not folder.manifest_path.is_file():  # nothing was trained, and the folder is gone
        return
    problem: Exception
    try:
        logger.info("Report: %s", report(read_record(folder)).path)
        return
    except SftPlayError as error:
        problem = error
    except Exception as error:  # a run that was trained has not failed because of its report
        problem = error
    logger.warning(
        "The report was not written: %s: %s; make report RUN=%s writes it",
        type(problem).__name__, one_line(str(problem)), folder.path,
    )  # fmt: skip
