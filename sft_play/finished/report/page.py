"""One self-contained HTML page (`page.html.jinja`): tables, charts, texts; readable on a phone, in print, in the dark.

Everything that comes from data is escaped by jinja2, and redacted before that: once escaped, a secret with an `&` in it
would no longer be recognised.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.errors import ConfigError
from sft_play.finished.run import translate_write_errors
from sft_play.log import escape_control, one_line, redact, secret_values
from sft_play.runs.files import write_text


@dataclass(frozen=True)
class ReportTable:
    """A table; the first column is text, the others are aligned to the right if `has_numbers`."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    has_numbers: bool = True


@dataclass(frozen=True)
class AnsweredQuestion:
    """A question and texts about it: (label, text, mark), the mark being `good`, `bad` or empty."""

    question: str
    answers: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class ReportSection:
    """A part of the page. Everything in it is optional; what is empty is not shown."""

    title: str
    notes: Sequence[str] = ()
    pairs: Sequence[tuple[str, str]] = ()
    tables: Sequence[ReportTable] = ()
    charts: Sequence[tuple[str, str]] = ()
    legend: Sequence[tuple[str, str]] = ()
    samples: Sequence[AnsweredQuestion] = ()
    items: Sequence[str] = ()
    commands: str = ""
    folded: Sequence[tuple[str, str]] = ()
    """Long texts that are opened by a click: heading and text."""

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to show."""
        parts = (self.pairs, self.tables, self.charts, self.samples, self.items, self.commands, self.folded)
        return not any(parts)


def render_page(title: str, *, headline: Sequence[tuple[str, str]], sections: Sequence[ReportSection]) -> str:
    """Render the page. `headline`: the few figures that matter, as (name, value), at its top."""
    filled_sections = [section for section in sections if not section.is_empty]
    secrets = secret_values(os.environ.items())
    return str(_page_template().render(title=title, lead=headline, sections=filled_sections, secrets=secrets))


@functools.cache  # compiling it takes longer than a page
def _page_template() -> Any:
    """The template, which escapes and redacts whatever it is given."""
    from jinja2 import Environment, FileSystemLoader, pass_context
    from markupsafe import Markup

    @pass_context
    def redact_value(context: Any, value: Any) -> Any:
        if isinstance(value, Markup):
            return value
        return redact(escape_control(str(value)), secrets=context["secrets"])

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, finalize=redact_value, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["svg"] = Markup  # drawn by vl-convert, which escapes what a chart names
    return environment.get_template("page.html.jinja")


def write_page(path: Path, text: str) -> None:
    """Write a page aside and rename it; raises ConfigError where it cannot be written."""
    if path.is_dir():
        raise ConfigError(f"OUT={one_line(str(path))} is a folder; name a file, such as {path / 'report.html'}")
    with translate_write_errors(path):
        write_text(path, text)
