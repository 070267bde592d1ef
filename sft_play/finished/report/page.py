"""One self-contained HTML page: sections of tables, charts, texts; readable on a phone, in print, in the dark.

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
from sft_play.log import escape_control, one_line, redact, secret_values
from sft_play.runs.files import write_text


@dataclass(frozen=True)
class Table:
    """A table; the first column is text, the others are aligned to the right if `numbers`."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: bool = True


@dataclass(frozen=True)
class Sample:
    """A question and texts about it: (label, text, mark), the mark being `good`, `bad` or empty."""

    asked: str
    answers: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Section:
    """A part of the page. Everything in it is optional; what is empty is not shown."""

    title: str
    notes: Sequence[str] = ()
    pairs: Sequence[tuple[str, str]] = ()
    tables: Sequence[Table] = ()
    charts: Sequence[tuple[str, str]] = ()
    """Heading and SVG of each."""
    legend: Sequence[tuple[str, str]] = ()
    """Name and colour of the curves that all charts share."""
    samples: Sequence[Sample] = ()
    items: Sequence[str] = ()
    commands: str = ""
    folded: Sequence[tuple[str, str]] = ()
    """Long texts that are opened by a click: heading and text."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        parts = (self.pairs, self.tables, self.charts, self.samples, self.items, self.commands, self.folded)
        return not any(parts)


def page(title: str, *, lead: Sequence[tuple[str, str]], sections: Sequence[Section]) -> str:
    """The page. `lead`: the few figures that matter, as (name, value), at its top."""
    from markupsafe import Markup

    shown = [section for section in sections if not section.is_empty]
    secrets = secret_values(os.environ.items())
    return str(_template().render(title=title, lead=lead, sections=shown, style=Markup(_STYLE), secrets=secrets))


@functools.cache  # compiling it takes longer than a page
def _template() -> Any:
    """The template, which escapes and redacts whatever it is given."""
    from jinja2 import Environment, pass_context
    from markupsafe import Markup

    @pass_context
    def safe(context: Any, value: Any) -> Any:
        if isinstance(value, Markup):
            return value
        return redact(escape_control(str(value)), secrets=context["secrets"])

    environment = Environment(autoescape=True, finalize=safe, trim_blocks=True, lstrip_blocks=True)
    environment.filters["svg"] = Markup  # drawn by vl-convert, which escapes what a chart names
    return environment.from_string(_TEMPLATE)


def write_page(path: Path, text: str) -> None:
    """Write a page aside and rename it; raises ConfigError where it cannot be written."""
    try:
        if path.is_dir():
            raise ConfigError(f"OUT={one_line(str(path))} is a folder; name a file, such as {path / 'report.html'}")
        write_text(path, text)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{one_line(str(path))} cannot be written: {error.strerror}") from None


_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5c6675; --line: #d9dee6; --back: #fff; --card: #f5f7fa;
  --good: #1a7f37; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ef; --soft: #9aa5b4; --line: #343c48; --back: #14181f;
  --card: #1d232c; --good: #56d364; --bad: #ff8f85; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1000px; padding: 24px 16px 48px; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 12px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 34px 0 10px; padding-bottom: 4px; border-bottom: 1px solid var(--line); }
p { margin: 6px 0; color: var(--soft); overflow-wrap: anywhere; }
.lead { display: grid; grid-template-columns: repeat(auto-fit, minmax(118px, 1fr)); gap: 10px; margin: 0; }
.lead div { background: var(--card); border-radius: 8px; padding: 10px 12px; }
.lead dt { color: var(--soft); font-size: 13px; }
.lead dd { margin: 0; font-size: 16px; font-weight: 600; overflow-wrap: anywhere; }
.pairs { display: grid; grid-template-columns: fit-content(160px) 1fr; gap: 3px 16px; margin: 0 0 10px; }
.pairs dt { color: var(--soft); } .pairs dd { margin: 0; overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin: 6px 0 14px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: break-word; }
th { font-weight: 600; color: var(--soft); font-size: 13px; }
.numbers th + th, .numbers td + td { text-align: right; padding: 4px 0 4px 12px; }
.numbers td + td { white-space: nowrap; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 7px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; position: sticky; top: 0; background: var(--back);
  padding: 6px 0; margin-bottom: 6px; } .legend > span { overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 14px; }
figure { margin: 0; break-inside: avoid; } figcaption { font-weight: 600; font-size: 14px; }
svg { width: 100%; max-width: 560px; height: auto; display: block; }
.sample { background: var(--card); border-radius: 8px; padding: 10px 12px; margin: 8px 0; break-inside: avoid; }
.sample .pairs { margin: 0; } .sample dd, .sample .asked { white-space: pre-wrap; }
.sample .asked { font-weight: 600; overflow-wrap: anywhere; margin-bottom: 4px; }
.good { color: var(--good); } .bad { color: var(--bad); }
ul { padding-left: 20px; margin: 6px 0; } li { overflow-wrap: anywhere; margin: 2px 0; }
pre { background: var(--card); border-radius: 8px; padding: 10px 12px; margin: 6px 0; font-size: 13px;
  white-space: pre-wrap; overflow-wrap: anywhere; }
@media (max-width: 520px) { table { font-size: 13px; } .numbers th + th, .numbers td + td { padding-left: 8px; } }
details { margin: 8px 0; } summary { cursor: pointer; }
@media print { :root { --ink: #000; --soft: #444; --line: #bbb; --back: #fff; --card: #f3f3f3; color-scheme: light; }
  body { max-width: none; padding: 0; font-size: 10pt; } .charts { grid-template-columns: 1fr 1fr; }
  h2 { break-after: avoid; } .pairs, tr { break-inside: avoid; }
  .lead div, .sample, pre, .swatch { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""

_TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{{ title }}</title>
<style>{{ style }}</style>
</head>
<body>
<h1>{{ title }}</h1>
{% if lead %}<dl class="lead">
{% for name, value in lead %}<div><dt>{{ name }}</dt><dd>{{ value }}</dd></div>
{% endfor %}
</dl>{% endif %}

{% for section in sections %}
<section>
<h2>{{ section.title }}</h2>
{% if section.pairs %}<dl class="pairs">
{% for name, value in section.pairs %}<dt>{{ name }}</dt><dd>{{ value }}</dd>
{% endfor %}</dl>{% endif %}
{% for table in section.tables %}
<div class="wide"><table{% if table.numbers %} class="numbers"{% endif %}>
<thead><tr>{% for head in table.heads %}<th>{{ head }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>
{% endfor %}
{% if section.legend and section.charts %}<div class="legend">
{% for name, colour in section.legend %}<span><span class="swatch" style="background: {{ colour }}"></span>{{ name
}}</span>
{% endfor %}</div>{% endif %}
{% if section.charts %}<div class="charts">
{% for heading, svg in section.charts %}<figure><figcaption>{{ heading }}</figcaption>
{{ svg | svg }}
</figure>
{% endfor %}</div>{% endif %}
{% for sample in section.samples %}<div class="sample"><div class="asked">{{ sample.asked }}</div><dl class="pairs">
{% for label, text, mark in sample.answers %}<dt>{{ label }}</dt><dd{% if mark %} class="{{ mark }}"{% endif %}>{{ text
}}</dd>
{% endfor %}</dl></div>
{% endfor %}
{% if section.items %}<ul>{% for item in section.items %}<li>{{ item }}</li>{% endfor %}</ul>{% endif %}
{% if section.commands %}<pre>{{ section.commands }}</pre>{% endif %}
{% for heading, text in section.folded %}<details><summary>{{ heading }}</summary><pre>{{ text }}</pre></details>
{% endfor %}
{% for note in section.notes %}<p>{{ note }}</p>
{% endfor %}
</section>
{% endfor %}
</body>
</html>
"""
