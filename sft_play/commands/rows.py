"""What is done with data before training.

`process`, `style` and `dapt-docx`: files to conversations, conversations with a system prompt,
documents to text. `render` and `preview`: the text that the model will see with its mask as spans,
in files; and the tokens of examples with the trained part in colour, here and as a page.
`full-pipeline`: process, style, render and check, each on what the one before wrote.
"""

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from sft_play.answers import Answer, Finding, pass_finding, warn_finding
from sft_play.commands.diagnosing import check_result
from sft_play.commands.request import (
    CommandResult,
    Request,
    command_line,
    command_result,
    requested_hardware,
)
from sft_play.config.load import LoadedConfig, load_config
from sft_play.config.schema import DataConfig, RunConfig
from sft_play.data.build.stats import RowStats
from sft_play.data.build.survey import RowRenderer
from sft_play.data.checks import missed_column_lines
from sft_play.data.managed_outputs import OutputFolder
from sft_play.data.preview import (
    MAX_PAGE_PIECES,
    MAX_TERMINAL_PIECES,
    PreviewRow,
    TokenBytes,
    choose_rows,
    format_plain_lines,
    format_terminal_text,
    make_visible,
    preview_rows,
    render_html_page,
)
from sft_play.data.process import process_files, style_rows
from sft_play.data.sources.examples import ExampleReader, check_first_rows
from sft_play.data.sources.files import AnySource, data_part_split, find_data_paths
from sft_play.data.sources.raw import FIX_OR_SKIP, BadRow, bad_row_lines
from sft_play.diagnose.run_check import (
    ROW_SPLITS,
    check_not_source,
    check_run,
    configure_hub,
    first_stage_run,
    load_row_tools,
)
from sft_play.errors import ConfigError, DataError, SftPlayError
from sft_play.log import escape_control, one_line
from sft_play.machine.hardware import Hardware

DEFAULT_RENDERED = Path("data/rendered")


def run_rows(request: Request) -> CommandResult | int:
    """Run a command on data. Those that write rows answer with the counts of rows that were taken
    and left out, preview shows examples (in colour where the terminal has colours), full-pipeline
    stops at the first step that fails."""
    loaded, command = load_config(request.config, overrides=request.overrides), request.command
    config = loaded.config
    if command == "full-pipeline":
        return full_pipeline(
            loaded,
            requested_hardware(request),
            style=request.style,
            force=request.force,
            is_full=request.why,
        )
    if command == "render":
        return render(loaded, out=request.out, force=request.force)
    if command == "preview":
        shown_preview = preview(
            loaded, count=request.n, row=request.row, page=request.out, force=request.force
        )
        # not through the log, which keeps no colours
        if not request.json and shown_preview.draw(sys.stdout):
            return 0
        return command_result(shown_preview, is_written_to_out=False)
    if command == "dapt-docx":
        from sft_play.documents import convert_documents

        result = command_result(convert_documents(config, force=request.force))
    elif command == "process":
        result = command_result(process_files(config, force=request.force))
    else:
        result = command_result(style_rows(config, request.style, force=request.force))
    return _add_next_command(result, request, config)


# --- render ---------------------------------------------------------------------------------------


def render(loaded: LoadedConfig, *, out: Path | None, force: bool) -> CommandResult:
    """Write the text that the model will see with its mask as spans, one JSON row per example.
    `out`: a file for the training rows alone, or a folder for all. Raises TokenizerError where the
    tokenizer or its template cannot be used, and DataError where rows cannot be used (unless
    data.on_bad_row=skip) or a file was edited since; nothing is written then."""
    loaded, stage_notes = first_stage_run(loaded)
    config = loaded.config
    paths = find_data_paths(config.data)
    check_first_rows(config.data, paths, task_mode=config.task_mode)
    configure_hub(config)
    _, tokenizer_notes, row_renderer = load_row_tools(config)
    out = out or DEFAULT_RENDERED
    if out == DEFAULT_RENDERED or out.is_dir():
        folder = out
        names_by_part = {part: _rendered_name(part) for part, _ in paths.named_paths()}
        # of splits that this run lacks too: a file of an earlier run under such a name must not
        # pass for this one's
        file_names = tuple(
            dict.fromkeys([*map(_rendered_name, (*ROW_SPLITS, "text")), *names_by_part.values()])
        )
    elif len(paths.sources) > 1:
        raise DataError(
            f"OUT={out} is one file, and data.sources names {len(paths.sources)};"
            " name an existing folder"
        )
    else:
        folder, names_by_part, file_names = out.parent, {"train": out.name}, (out.name,)
    files = [(part, path) for part, path in paths.named_paths() if part in names_by_part] or [
        ("train", paths.train)
    ]
    for name in names_by_part.values():
        check_not_source(folder / name, files)
    rendered_files = []
    with OutputFolder(folder, file_names, force=force, command="render") as output:
        for part, path in files:
            name = names_by_part[part]
            stats = _render_rows(path, part, output.open(name), config.data, row_renderer)
            rendered_files.append(RenderedFile(data_part_split(part), folder / name, stats))
        bad_lines = [line for file in rendered_files for line in file.bad_lines()]
        if bad_lines and config.data.on_bad_row == "fail":
            raise DataError("\n".join([*bad_lines, FIX_OR_SKIP]))
        for file in rendered_files:
            if not file.stats.kept_rows:
                reasons = file.lines()[1:] or [f"{file.stats.source} has no rows"]
                raise DataError("\n".join([f"no row of {file.stats.source} is left:", *reasons]))
    notes = [*stage_notes, *paths.notes, *tokenizer_notes]
    file_lines = [line for file in rendered_files for line in file.lines()]
    return CommandResult(
        {"ok": True, "files": [file.as_json() for file in rendered_files], "notes": notes},
        ["\n".join([*notes, *file_lines])],
        is_written_to_out=False,
    )


def _rendered_name(part: str) -> str:
    split, source = data_part_split(part), part.removeprefix("source ").removesuffix(" (val)")
    return f"{split}.jsonl" if source == part else f"{split}-{source}.jsonl"


def _render_rows(
    source: AnySource, part: str, target: TextIO, data: DataConfig, row_renderer: RowRenderer
) -> RowStats:
    stats, is_text = RowStats(str(source)), part == "text"
    split = "train" if is_text else data_part_split(part)
    reader = ExampleReader(
        source, data, split=split, wants_text=is_text or row_renderer.task_mode == "cpt"
    )
    for outcome in row_renderer.render_rows(reader.numbered_examples(), is_document=is_text):
        whole_row = None if isinstance(outcome, BadRow) else outcome.whole_row
        row = outcome if isinstance(outcome, BadRow) else outcome.row
        if whole_row is None:
            assert isinstance(row, BadRow)
            stats.count_bad(row)
        elif isinstance(row, BadRow):
            stats.count_too_long(whole_row)
        else:
            stats.count_kept(row, whole_row)
            line = {
                "where": whole_row.location,
                "text": whole_row.text,
                "spans": whole_row.spans,
                "tokens": len(whole_row.input_ids),
                "trained": whole_row.trained_tokens,
                "cut": row.cut_tokens,
                "lost": row.lost_trained_tokens,
                "method": whole_row.method,
            }
            if whole_row.images:  # whose runs of tokens the text has once each
                line["images"] = [picture.name for picture in whole_row.images]
                line["image_tokens"] = whole_row.image_tokens
            target.write(json.dumps(line, ensure_ascii=False) + "\n")
    stats.rows = reader.rows
    return stats


@dataclasses.dataclass(frozen=True)
class RenderedFile:
    """What was written of one split; the whole rows, before max_seq_len cuts them."""

    split: str
    path: Path
    stats: RowStats

    def bad_lines(self) -> list[str]:
        """Describe the bad rows: counts by reason, the first of them, and how many more. Empty if
        there are none."""
        stats = self.stats
        if not stats.bad_rows:
            return []
        return bad_row_lines(
            f"{stats.rows:,} rows of {stats.source}", stats.bad_rows, stats.first_bad_rows
        )

    def lines(self) -> list[str]:
        """What was written, in words."""
        stats = self.stats
        tokens, trained = (self.as_json()[name] for name in ("tokens", "trained"))
        count = f"{tokens:,} tokens, {trained:,} of them trained ({trained / max(1, tokens):.0%})"
        lines = [
            f"{self.path}: {stats.kept_rows:,} of {stats.rows:,} rows of {stats.source}; {count}"
        ]
        if stats.cut_tokens:
            lines.append(
                f"max_seq_len cuts {stats.cut_tokens:,} tokens,"
                f" {stats.tokens_lost_by_cut:,} of them trained"
            )
        if stats.too_long_rows:
            lines.append(f"{stats.too_long_rows:,} rows left out: too long for max_seq_len")
        if stats.left_out_rows:
            lines.append(
                f"{stats.left_out_rows.total():,} rows left out as asked (data.drop_empty)"
            )
        return lines + self.bad_lines()

    def as_json(self) -> dict[str, Any]:
        """Rows and tokens as counts, and the bad rows by reason."""
        stats = self.stats
        return {
            "split": self.split,
            "source": stats.source,
            "path": str(self.path),
            "rows_in": stats.rows,
            "rows": stats.kept_rows,
            "tokens": stats.tokens + stats.cut_tokens,
            "trained": stats.trained_tokens + stats.tokens_lost_by_cut,
            "cut": stats.cut_tokens,
            "lost": stats.tokens_lost_by_cut,
            "out_of_reach": stats.too_long_rows,
            "left_out": stats.left_out_rows.total(),
            "bad": stats.bad_rows.total(),
            "reasons": dict(stats.bad_rows),
            "first_bad": [one_line(str(row), limit=300) for row in stats.first_bad_rows],
        }


# --- preview --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Preview(Answer):
    """Examples to look at, and the page that shows them."""

    source: str
    rows: int
    examples: tuple[PreviewRow, ...]
    notes: tuple[str, ...]
    page: Path
    max_pieces: int = MAX_TERMINAL_PIECES

    def lines(self) -> list[str]:
        """The examples as plain text, trained parts in [[ ]]."""
        lines = [
            (
                f"{len(self.examples):,} of {self.rows:,} rows of {self.source};"
                " trained parts in [[ ]]"
            ),
            *self.notes,
        ]
        for example in self.examples:
            lines += ["", *format_plain_lines(example, max_pieces=self.max_pieces)]
        return [*lines, "", f"Page: {self.page}"]

    def as_json(self) -> dict[str, Any]:
        """`ok`, `page`, `source`, `rows` and the examples with ids and labels."""
        return {
            "ok": self.ok,
            "page": str(self.page),
            "source": self.source,
            "rows": self.rows,
            "examples": [example.as_json() for example in self.examples],
        }

    def draw(self, stream: TextIO) -> bool:
        """Print the examples in colour and return True; False, with nothing printed, where `stream`
        is no terminal with colours."""
        from rich.console import Console

        console = Console(file=stream, highlight=False, markup=False, emoji=False)
        if not console.is_terminal or console.no_color or console.color_system is None:
            return False
        title = (
            f"{len(self.examples):,} of {self.rows:,} rows"
            f" of {make_visible(self.source)}; trained parts green"
        )
        console.print("\n".join([title, *map(make_visible, self.notes)]))
        for example in self.examples:
            console.print("", format_terminal_text(example, max_pieces=self.max_pieces), sep="\n")
        console.print(f"Page: {make_visible(str(self.page))}")
        return True


def preview(
    loaded: LoadedConfig, *, count: int | None, row: int | None, page: Path | None, force: bool
) -> Preview:
    """Show examples of the training file with their exact tokens, and write them as a page.
    `count`: how many, evenly over the file; `row`: only this one, counted from 1. Raises DataError
    where the file cannot be read, has no such row, or the page was edited since; TokenizerError
    where the tokenizer or its template cannot be used."""
    loaded, stage_notes = first_stage_run(loaded)
    config = loaded.config
    paths = find_data_paths(config.data)
    configure_hub(config)
    reader = ExampleReader(
        paths.train, config.data, split="train", wants_text=config.task_mode == "cpt"
    )
    chosen_rows = choose_rows(reader, count=count or 5, row_number=row)
    tokenizer, tokenizer_notes, row_renderer = load_row_tools(config)
    token_bytes = TokenBytes(tokenizer)
    examples = tuple(
        example
        for row_number, raw in chosen_rows
        for example in preview_rows(row_number, raw, reader, row_renderer, token_bytes)
    )
    page = page or Path("data/preview.html")
    check_not_source(page, [("train", paths.train)])
    notes = [*stage_notes, *tokenizer_notes]
    if len(paths.sources) > 1:
        notes.append(
            "The first of data.sources; not shown:"
            f" {', '.join(source.name for source in paths.sources[1:])}"
        )
    notes += missed_column_lines(config.data, task_mode=config.task_mode)
    intro_lines = [
        (
            f"{len(examples):,} of {reader.rows:,}"
            f" rows of {paths.train} ({reader.format}); config {loaded.path}"
        ),
        (
            f"model {config.model.name}, task_mode {config.task_mode}, data.loss_on"
            f" {config.data.loss_on}, max_seq_len {row_renderer.max_seq_len:,}"
        ),
        *notes,
    ]
    if config.task_mode == "cpt":
        intro_lines.append(
            "task_mode cpt joins the documents and cuts them into full blocks;"
            " here each is shown whole"
        )
    with OutputFolder(page.parent, (page.name,), force=force, command="preview") as folder:
        folder.open(page.name).write(
            render_html_page(
                examples, title=f"Preview of {Path(str(paths.train)).name}", intro_lines=intro_lines
            )
        )
    return Preview(
        str(paths.train),
        reader.rows,
        examples,
        tuple(notes),
        page,
        max_pieces=MAX_TERMINAL_PIECES if row is None else MAX_PAGE_PIECES,
    )


# --- what comes next, and all in one go -----------------------------------------------------------


def _add_next_command(result: CommandResult, request: Request, config: RunConfig) -> CommandResult:
    """Add the next command to an answer: it reads what was just written, whatever the config trains
    on."""
    data = config.data
    out_dirs = {
        "process": data.process.out_dir,
        "style": data.style.out_dir,
        "dapt-docx": data.documents.out_dir,
    }
    folder = Path(out_dirs[request.command])
    finding = _training_files_finding(data, folder)
    lines, settings = [], [*request.overrides]
    if request.command == "dapt-docx" and config.task_mode == "cpt_mixed":
        settings.append(f"data.text_path={_quote_path(folder / 'train.jsonl')}")
    elif finding.verdict != "PASS":
        lines = [f"Not read yet: {finding.found.partition('; ')[0]}, not {folder / 'train.jsonl'}"]
        settings += ["task_mode=cpt"] if request.command == "dapt-docx" else []
        settings += _file_settings(folder, data)
    lines.append(f"Next: {command_line(request, 'check', settings)}")
    return dataclasses.replace(result, lines=[*result.lines, *lines])


def _file_settings(folder: Path, data: DataConfig) -> list[str]:
    settings = ["data.sources=[]"] if data.sources else []
    settings.append(f"data.train_path={_quote_path(folder / 'train.jsonl')}")
    for split in ("val", "test"):
        path = folder.expanduser() / f"{split}.jsonl"
        has_rows = path.is_file() and path.stat().st_size > 0
        settings.append(
            f"data.{split}_path={_quote_path(folder / path.name) if has_rows else 'null'}"
        )
    return settings


def _quote_path(path: Path) -> str:
    return str(path) if re.fullmatch(r"[\w./~-]+", str(path)) else json.dumps(str(path))


def full_pipeline(
    loaded: LoadedConfig,
    hardware: Hardware,
    *,
    style: str | None,
    force: bool,
    is_full: bool = False,
) -> CommandResult:
    """Run process, style (where it is asked for), render and check, each on what the one before
    wrote, up to the first that fails. `is_full`: True shows the whole page of the check."""
    steps, lines = [], []
    stop_details, name = None, "process"
    try:
        for name, run_step in _pipeline_steps(
            loaded, hardware, style=style, force=force, is_full=is_full
        ):
            result = run_step()
            steps.append({"name": name, "ok": result.exit_code == 0, "answer": result.data})
            lines += [f"== {name} ==", *result.lines]
            if result.exit_code:
                break
    except SftPlayError as error:
        stop_details = {"name": name, "why": str(error)}
        lines += [
            f"== {name} ==",
            escape_control(str(error)),
            f"Stopped at {name}; what was written before it is kept",
        ]
    ok = stop_details is None and all(step["ok"] for step in steps)
    return CommandResult(
        {"ok": ok, "steps": steps, "stopped": stop_details},
        ["\n".join(lines)],
        0 if ok else ConfigError.exit_code,
    )


def _pipeline_steps(
    loaded: LoadedConfig, hardware: Hardware, *, style: str | None, force: bool, is_full: bool
) -> Iterator[tuple[str, Callable[[], CommandResult]]]:
    """Yield the steps in order: a name, and a function without arguments. A step is built when
    those before it are done."""
    config = loaded.config
    yield "process", lambda: command_result(process_files(config, force=force))
    folder = Path(config.data.process.out_dir)
    style_config = config.data.style
    if style is not None or style_config.system is not None or style_config.per_source:
        yield "style", lambda: command_result(style_rows(config, style, force=force))
        folder = Path(style_config.out_dir)
    overrides = [*loaded.overrides, *_file_settings(folder, config.data)]  # what was just written
    yield (
        "render",
        lambda: render(load_config(loaded.path, overrides=overrides), out=None, force=force),
    )
    findings = [_training_files_finding(config.data, folder)]
    yield (
        "check",
        lambda: check_result(
            check_run(loaded.path, overrides, hardware, earlier_findings=findings), is_full=is_full
        ),
    )


def _training_files_finding(data: DataConfig, folder: Path) -> Finding:
    written_file = folder / "train.jsonl"
    read_files = f"data.sources: {', '.join(data.source_names)}"
    if data.train_path is not None:
        if Path(data.train_path).expanduser().absolute() == written_file.expanduser().absolute():
            return pass_finding(
                "training files", f"data.train_path={written_file}, which was written just now"
            )
        read_files = f"data.train_path={one_line(data.train_path)}"
    return warn_finding(
        "training files",
        f"make train with this config reads {read_files}; checked below is {written_file}, which"
        " was written just now",
        f"to train on it: data.train_path={written_file}, with val_path and test_path beside it",
    )
