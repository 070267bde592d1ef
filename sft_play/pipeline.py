"""The data commands that need tokenizer, plan and files together: preview, render, check, and the whole way."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from sft_play import start
from sft_play.cache import cache_dir
from sft_play.config.load import LoadedConfig, load_config
from sft_play.config.schema import DataConfig, RunConfig
from sft_play.data import judge
from sft_play.data import preview as show
from sft_play.data.files import AnySource, BadRow, DataPaths, RawRow, data_paths, find_source
from sft_play.data.judge import Check, ok, problem, skipped, warning
from sft_play.data.render import Rendered, TokenRow, trained_tokens
from sft_play.data.survey import SHOWN_BAD_ROWS, ExampleReader, Made, RowMaker, Survey, Surveyor, made_rows
from sft_play.data.written import OutputFolder
from sft_play.doctor import check as doctor
from sft_play.errors import DataError, ModelError, SftPlayError
from sft_play.facts.architecture import check_available, config_json, hub_answers, local_folder, shape_of
from sft_play.facts.hardware import Hardware
from sft_play.launch.spread import Spread
from sft_play.log import escape_control, one_line
from sft_play.plan.plan import Plan, require_fit
from sft_play.starter.names import BASE_NAME

logger = logging.getLogger(__name__)

DEFAULT_PAGE = Path("data/preview.html")
DEFAULT_RENDERED = Path("data/rendered")
DEFAULT_EXAMPLES = 5
SPLITS = ("train", "val", "test")


# --- what all of them need --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tools:
    """A run's tokenizer, what was chosen with it, and what makes rows with it."""

    tokenizer: Any
    notes: tuple[str, ...]
    maker: RowMaker


def _tools(config: RunConfig) -> Tools:
    """The run's tokenizer and renderer; raises what makes them unusable."""
    loaded = _tokenizer(config)
    return Tools(loaded.tokenizer, loaded.notes, _maker(config, loaded.tokenizer))


def _tokenizer(config: RunConfig) -> Any:
    """The run's `LoadedTokenizer`; the starter's is made anew, for its base may not have been trained yet."""
    from sft_play.train.tokenizer import load_tokenizer

    if config.model.name != BASE_NAME:
        return load_tokenizer(config)
    from sft_play.starter import language
    from sft_play.train.starter_base import make_tokenizer

    with tempfile.TemporaryDirectory(prefix="sft-play-") as folder:
        make_tokenizer(language.corpus_documents(seed=language.DEFAULT_SEED)).save_pretrained(folder)
        return load_tokenizer(config.model_copy(update={"model": config.model.model_copy(update={"name": folder})}))


def _maker(config: RunConfig, tokenizer: Any) -> RowMaker:
    from sft_play.data.render import Renderer

    return RowMaker(Renderer(tokenizer, config.data, max_seq_len=_max_seq_len(config)), task_mode=config.task_mode)


def _positions(config: RunConfig) -> int | None:
    """The most positions that the model has, where its config.json tells."""
    with contextlib.suppress(SftPlayError):
        return shape_of(config.model.name, revision=config.model.revision, trust_remote_code=True).max_positions
    return None


def _max_seq_len(config: RunConfig) -> int:
    """The longest row of the run, as the plan takes it."""
    positions = _positions(config)
    return config.model.max_seq_len if positions is None else min(config.model.max_seq_len, positions)


def _prepare(config: RunConfig) -> None:
    """Settings of the libraries, before they are imported."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if config.model.name != BASE_NAME:
        with contextlib.suppress(ModelError):  # a folder that is not there is said where it is looked for
            start.offline_without_hub(config.model.name)


def _files(paths: DataPaths) -> list[tuple[str, AnySource]]:
    """Each file of a run with the name of its part."""
    return [(name, path) for name, path in paths.files()]


def _first_stage(loaded: LoadedConfig) -> tuple[LoadedConfig, tuple[str, ...]]:
    """Of a run with stages the first, and a line that says so."""
    if not loaded.stages:
        return loaded, ()
    first = loaded.stages[0]
    return loaded.of(first), (f"The rows of stage {first.name}, the first of {len(loaded.stages)}",)


def _split_of(part: str) -> str:
    """The split that a part of `_files` belongs to."""
    if part.startswith("source "):
        return "val" if part.endswith(" (val)") else "train"
    return part


def _rendered_name(part: str) -> str:
    """The file that a part's rows are rendered into: train.jsonl, train-NAME.jsonl for a source."""
    named = part.removeprefix("source ").removesuffix(" (val)")
    return f"{_split_of(part)}{f'-{named}' if named != part else ''}.jsonl"


def _refuse_source(target: Path, files: Sequence[tuple[str, AnySource]]) -> None:
    """Raises DataError where a command would write over a file that it reads, which no FORCE=1 can mean."""
    for split, source in files:
        with contextlib.suppress(OSError):
            if Path(str(source)).expanduser().samefile(target):
                named = f"the {split}" if split.startswith("source ") else f"data.{split}_path"
                raise DataError(f"OUT={target} is {named}, which is read; name another file")


# --- preview ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preview:
    """Examples to look at, and the page that shows them."""

    source: str
    rows: int
    examples: tuple[show.Shown, ...]
    notes: tuple[str, ...]
    page: Path
    most: int = show.TERMINAL_PIECES

    ok: bool = True

    def lines(self) -> list[str]:
        """The examples as plain text, trained parts in [[ ]]."""
        head = f"{len(self.examples):,} of {self.rows:,} rows of {self.source}; trained parts in [[ ]]"
        body = [line for shown in self.examples for line in ["", *show.plain_lines(shown, most=self.most)]]
        return [head, *self.notes, *body, "", f"Page: {self.page}"]

    def as_json(self) -> dict[str, Any]:
        """`ok`, `page`, `source`, `rows` and the examples with ids and labels."""
        examples = [shown.as_json() for shown in self.examples]
        return {"ok": self.ok, "page": str(self.page), "source": self.source, "rows": self.rows, "examples": examples}

    def draw(self, stream: TextIO) -> bool:
        """The examples in colour where `stream` is a terminal with colours; elsewhere nothing is drawn, and false."""
        from rich.console import Console

        console = Console(file=stream, highlight=False, markup=False, emoji=False)
        if not console.is_terminal or console.no_color or console.color_system is None:
            return False
        console.print(
            f"{len(self.examples):,} of {self.rows:,} rows of {show.visible(self.source)}; trained parts green"
        )
        for note in self.notes:
            console.print(show.visible(note))
        for shown in self.examples:
            console.print()
            console.print(show.terminal_text(shown, most=self.most))
        console.print(f"Page: {show.visible(str(self.page))}")
        return True


def preview(loaded: LoadedConfig, *, count: int | None, row: int | None, page: Path | None, force: bool) -> Preview:
    """Examples of the training file with their exact tokens, as a page too.

    Args:
        count: how many, evenly over the file; 5 where it is None.
        row: only this one, counted from 1.
        page: where the page is written; data/preview.html where it is None.

    Raises:
        DataError: the file cannot be read, has no such row, or the page was edited since.
        TokenizerError: the tokenizer or its template cannot be used.
    """
    loaded, of_stage = _first_stage(loaded)
    config = loaded.config
    paths = data_paths(config.data)
    path = paths.train
    _prepare(config)
    reader = ExampleReader(path, config.data, split="train", text_wanted=config.task_mode == "cpt")
    chosen = _row(reader, row) if row is not None else _spread(reader, count or DEFAULT_EXAMPLES)
    tools = _tools(config)
    names = show.TokenBytes(tools.tokenizer)
    examples = tuple(one for number, raw in chosen for one in _shown(number, raw, reader, tools.maker, names))
    target = page or DEFAULT_PAGE
    _refuse_source(target, [("train", path)])
    others = [source.name for source in paths.sources[1:]]
    notes = (
        *of_stage,
        *tools.notes,
        *([f"The first of data.sources; not shown: {', '.join(others)}"] if others else []),
    )
    about = [
        f"{len(examples):,} of {reader.rows:,} rows of {path} ({reader.format}); config {loaded.path}",
        f"model {config.model.name}, task_mode {config.task_mode}, data.loss_on {config.data.loss_on}, "
        f"max_seq_len {tools.maker.max_seq_len:,}",
        *notes,
    ]
    if config.task_mode == "cpt":
        about.append("task_mode cpt joins the documents and cuts them into full blocks; here each is shown whole")
    with OutputFolder(target.parent, (target.name,), force=force, command="preview") as folder:
        folder.open(target.name).write(show.page(examples, title=f"Preview of {Path(str(path)).name}", about=about))
    most = show.PAGE_PIECES if row is not None else show.TERMINAL_PIECES
    return Preview(str(path), reader.rows, examples, notes, target, most)


_Raw = tuple[RawRow | BadRow, Any]
"""A row as it stands in its file, and the format of the file."""


def _row(reader: ExampleReader, wanted: int) -> list[tuple[int, _Raw]]:
    """The row of this number, from 1."""
    found = [raw for number, raw in enumerate(reader.raw(), start=1) if number == wanted]
    if not found:
        rows = f"{reader.rows:,} row{'s' if reader.rows != 1 else ''}"
        raise DataError(f"ROW={wanted}: {reader.path} has {rows}; rows are counted from 1")
    return [(wanted, found[0])]


def _spread(reader: ExampleReader, count: int) -> list[tuple[int, _Raw]]:
    """Rows evenly over a file of unknown length, its longest among them, read once and few kept.

    Rows whose number is a multiple of a stride are kept; the stride doubles when they are four times as many as wanted.
    """
    kept: dict[int, _Raw] = {}
    stride = 1
    longest: tuple[int, int, _Raw] | None = None
    last: tuple[int, _Raw] | None = None
    for number, raw in enumerate(reader.raw()):
        size = len(str(raw[0].data)) if isinstance(raw[0], RawRow) else 0
        if longest is None or size > longest[0]:
            longest = (size, number, raw)
        last = (number, raw)
        if number % stride == 0:
            kept[number] = raw
            if len(kept) > 4 * count + 4:
                stride *= 2
                kept = {n: item for n, item in kept.items() if n % stride == 0}
    if last is None or longest is None:
        raise DataError(f"{reader.path} has no rows")
    kept |= {last[0]: last[1], longest[1]: longest[2]}
    there = sorted(kept)
    near = sorted({_nearest(there, n) for n in show.spread_out(last[0] + 1, count, longest=longest[1])})
    return [(n + 1, kept[n]) for n in near]


def _nearest(numbers: Sequence[int], wanted: int) -> int:
    return min(numbers, key=lambda number: abs(number - wanted))


def _shown(
    number: int, found: _Raw, reader: ExampleReader, maker: RowMaker, names: show.TokenBytes
) -> list[show.Shown]:
    """One row with its tokens, or why it has none; with data.multi_turn=split one for each row that it becomes."""
    raw, shape = found
    example = reader.example(raw, shape)
    as_read = show.raw_text(raw.data) if isinstance(raw, RawRow) else ""
    if isinstance(example, BadRow):
        return [show.Shown(number, example.where, reason=_why(example), raw=as_read)]
    return [_shown_made(made, names, maker.max_seq_len, as_read) for made in maker.of([(number, example)])]


def _shown_made(made: Made, names: show.TokenBytes, limit: int, as_read: str) -> show.Shown:
    whole, row = made.whole, made.row
    if whole is None:
        assert isinstance(row, BadRow)
        return show.Shown(made.number, row.where, reason=_why(row), raw=as_read)
    ids, labels = tuple(whole.input_ids), tuple(whole.labels)
    if isinstance(row, BadRow):
        reason, cut, left = _why(row), max(0, len(ids) - limit), ids[:limit]
        lost = sum(label != show.IGNORED for label in labels[limit:])
    else:
        reason, cut, left, lost = "", row.cut, tuple(row.input_ids), row.lost
    kept = show.kept_tokens(ids, left)
    notes = (
        *made.example.notes,
        *whole.notes,
        *_row_notes(whole),
        *(() if kept else ("the cut row is made anew: the whole one is shown",)),
    )
    pieces = show.pieces_of(ids, labels, names, kept=kept or [True] * len(ids))
    return show.Shown(
        made.number, whole.where, ids, labels, tuple(pieces), whole.method, notes, cut=cut, lost=lost, reason=reason
    )


def _row_notes(whole: Rendered) -> Iterator[str]:
    """What is special about a row, in words."""
    if whole.untrained_turns:
        yield f"{whole.untrained_turns} assistant turns have no exact mask and are not trained"
    if whole.stripped_think:
        yield f"{whole.stripped_think} pieces of think text are not written by the template"
    if whole.special_in_text:
        yield f"{whole.special_in_text} special tokens are spelled in its texts"
    if whole.added_end:
        end = one_line(whole.added_end.strip())
        yield f"{end} is added behind the last turn, which the chat template does not end"
    if whole.merged:
        yield f"{whole.merged} ends of answers stand inside a token, which is split there"


def _why(row: BadRow) -> str:
    return f"{row.reason}{f' ({row.detail})' if row.detail else ''}"


# --- render -----------------------------------------------------------------------------------------------------------


@dataclass
class RenderedFile:
    """What was written of one split."""

    split: str
    source: str
    path: Path
    rows_in: int = 0
    rows: int = 0
    tokens: int = 0
    trained: int = 0
    cut: int = 0
    lost: int = 0
    out_of_reach: int = 0
    left_out: int = 0
    bad: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    first_bad: list[str] = field(default_factory=list)

    def count_bad(self, row: BadRow) -> None:
        """Count a row that cannot be used."""
        self.bad += 1
        self.reasons[row.reason] = self.reasons.get(row.reason, 0) + 1
        if len(self.first_bad) < SHOWN_BAD_ROWS:
            self.first_bad.append(one_line(str(row), limit=300))

    def bad_lines(self) -> list[str]:
        """The bad rows in words: counts by reason, the first of them, and how many more."""
        reasons = "; ".join(
            f"{count:,} x {reason}" for reason, count in sorted(self.reasons.items(), key=lambda r: -r[1])
        )
        more = [f"  … and {self.bad - len(self.first_bad):,} more"] if self.bad > len(self.first_bad) else []
        head = f"{self.bad:,} of {self.rows_in:,} rows of {self.source} cannot be used: {reasons}"
        return [head, *(f"  {line}" for line in self.first_bad), *more]

    def lines(self) -> list[str]:
        """What was written, in words."""
        share = self.trained / max(1, self.tokens)
        found = [
            f"{self.path}: {self.rows:,} of {self.rows_in:,} rows of {self.source}; {self.tokens:,} tokens, "
            f"{self.trained:,} of them trained ({share:.0%})"
        ]
        if self.cut:
            found.append(f"max_seq_len cuts {self.cut:,} tokens, {self.lost:,} of them trained")
        if self.out_of_reach:
            found.append(f"{self.out_of_reach:,} rows left out: too long for max_seq_len")
        if self.left_out:
            found.append(f"{self.left_out:,} rows left out as asked (data.drop_empty)")
        return found + (self.bad_lines() if self.bad else [])


@dataclass(frozen=True)
class Renderings:
    """What `make render` wrote."""

    files: tuple[RenderedFile, ...]
    notes: tuple[str, ...]
    ok: bool = True

    def lines(self) -> list[str]:
        """Each file in words."""
        return [*self.notes, *(line for file in self.files for line in file.lines())]

    def as_json(self) -> dict[str, Any]:
        """`ok`, and each file with its counts."""
        files = [{**file.__dict__, "path": str(file.path)} for file in self.files]
        return {"ok": self.ok, "files": files, "notes": list(self.notes)}


def render(loaded: LoadedConfig, *, out: Path | None, force: bool) -> Renderings:
    """The text that the model will see with its mask as spans, one JSON row per example.

    Args:
        out: a file for the training rows alone, or a folder for all; data/rendered where it is None.

    Raises:
        DataError: rows that cannot be used (unless data.on_bad_row=skip), or a file that was edited since; nothing is
            written then.
        TokenizerError: the tokenizer or its template cannot be used.
    """
    loaded, of_stage = _first_stage(loaded)
    config = loaded.config
    paths = data_paths(config.data)
    _prepare(config)
    tools = _tools(config)
    whole_folder = out is None or out.is_dir()
    folder = out if out is not None and out.is_dir() else DEFAULT_RENDERED if out is None else out.parent
    if not whole_folder and len(paths.sources) > 1:
        raise DataError(
            f"OUT={out} is one file, and data.sources names {len(paths.sources)}; name a folder that is there"
        )
    files = _files(paths) if whole_folder else [("train", paths.train)]
    names = {part: _rendered_name(part) if whole_folder or out is None else out.name for part, _ in files}
    announced = tuple(names.values())
    if whole_folder:
        announced = tuple(dict.fromkeys([*(f"{split}.jsonl" for split in (*SPLITS, "text")), *announced]))
    for name in names.values():
        _refuse_source(folder / name, files)
    with OutputFolder(folder, announced, force=force, command="render") as written:
        made = [
            _render_file(path, _split_of(part), written.open(names[part]), folder / names[part], config, tools.maker)
            for part, path in files
        ]
        _refuse_bad(made, config.data)
    return Renderings(tuple(made), (*of_stage, *paths.notes, *tools.notes))


def _render_file(
    source: AnySource, split: str, target: TextIO, path: Path, config: RunConfig, maker: RowMaker
) -> RenderedFile:
    """Every row of a file, rendered and written."""
    found = RenderedFile(split, str(source), path)
    text_wanted = config.task_mode == "cpt" or split == "text"
    reader = ExampleReader(source, config.data, split="train" if split == "text" else split, text_wanted=text_wanted)
    for made in made_rows(reader.numbered(), maker, document=split == "text"):
        if isinstance(made, BadRow) and made.is_asked:
            found.left_out += 1
        elif isinstance(made, BadRow):
            found.count_bad(made)
        elif made.is_too_long:
            found.out_of_reach += 1
        elif isinstance(made.row, BadRow):
            found.count_bad(made.row)
        elif made.whole is not None:
            _write_row(target, found, made.whole, made.row)
    found.rows_in = reader.rows
    return found


def _write_row(target: TextIO, found: RenderedFile, whole: Rendered, row: TokenRow) -> None:
    trained = trained_tokens(whole.labels)
    line = {
        "where": whole.where,
        "text": whole.text,
        "spans": [list(span) for span in whole.spans],
        "tokens": len(whole.input_ids),
        "trained": trained,
        "cut": row.cut,
        "lost": row.lost,
        "method": whole.method,
    }
    target.write(json.dumps(line, ensure_ascii=False) + "\n")
    found.rows += 1
    found.tokens += len(whole.input_ids)
    found.trained += trained
    found.cut += row.cut
    found.lost += row.lost


def _refuse_bad(files: Sequence[RenderedFile], data: DataConfig) -> None:
    """Raises DataError where rows cannot be used and are not to be skipped, or none is left."""
    bad = [file for file in files if file.bad]
    if bad and data.on_bad_row == "fail":
        lines = [line for file in bad for line in file.bad_lines()]
        raise DataError("\n".join([*lines, "mend them, or leave them out, counted, with data.on_bad_row=skip"]))
    for file in files:
        if not file.rows:
            lines = file.lines()[1:] or [f"{file.source} has no rows"]
            raise DataError("\n".join([f"no row of {file.source} is left:", *lines]))


# --- check ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """Everything that was checked, in the order of the page."""

    config: Path
    checks: tuple[Check, ...]
    elapsed_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether there is no problem; warnings are none."""
        return not any(check.state == "problem" for check in self.checks)

    def lines(self) -> list[str]:
        """The page, and what it comes to."""
        page = [line for check in self.checks for line in check.lines()]
        counts = {state: sum(check.state == state for check in self.checks) for state in ("problem", "warning", "ok")}
        said = [f"{counts['problem']} problem{'s' if counts['problem'] != 1 else ''}"] if counts["problem"] else []
        said += [f"{counts['warning']} warning{'s' if counts['warning'] != 1 else ''}"] if counts["warning"] else []
        tried = any((check.name, check.state) == ("memory plan", "warning") for check in self.checks)
        verdict = "Not ready" if not self.ok else "Predicted not to fit" if tried else "Ready to train"
        said.append(f"{counts['ok']} ok")
        return [f"Check of {self.config}:", *page, f"{verdict}: {', '.join(said)} ({self.elapsed_s:.0f} s)"]

    def as_json(self) -> dict[str, Any]:
        """`ok`, `elapsed_s` and the checks."""
        return {"ok": self.ok, "elapsed_s": self.elapsed_s, "checks": [check.as_json() for check in self.checks]}


def check(config_path: Path, overrides: Sequence[str], hardware: Hardware, *, also: Sequence[Check] = ()) -> Report:
    """Everything that can be checked before training; one part that fails hides no other. Nothing is written.

    Args:
        hardware: the machine that the memory plan is for.
        also: findings of the caller's, shown first.
    """
    started = time.monotonic()
    try:
        loaded = load_config(config_path, overrides=overrides)
    except SftPlayError as error:
        found = [*also, problem("config", str(error), "mend the run YAML; configs/reference.yaml lists every option")]
        return Report(config_path, tuple(found), time.monotonic() - started)
    checks = [*also]
    for number, stage in enumerate(loaded.stages, start=1):
        checks.append(ok("stage", f"{number} of {len(loaded.stages)}, {stage.name}"))
        checks += _Checks(loaded.of(stage), hardware).all()
    if not loaded.stages:
        checks += _Checks(loaded, hardware).all()
    return Report(config_path, tuple(checks), time.monotonic() - started)


class _Checks:
    """The parts of `make check`, each of them with what the earlier ones found."""

    def __init__(self, loaded: LoadedConfig, hardware: Hardware) -> None:
        self._loaded, self._config, self._hardware = loaded, loaded.config, hardware
        self._tokenizer: Any = None
        self._maker: RowMaker | None = None
        self._plan: Plan | None = None
        self._surveys: dict[str, Survey] = {}
        self._no_files = False
        self._said: dict[str, str] = {}
        """Errors that were said already, and under which name."""

    def _problem(self, name: str, error: SftPlayError, do: str) -> Check:
        """An error as a problem; where it was said before, only that this part was not looked at."""
        first = self._said.setdefault(str(error), name)
        return problem(name, str(error), do) if first == name else skipped(name, f"not without the {first}; see there")

    def all(self) -> Iterator[Check]:
        """Every check, in the order of the page."""
        config = self._config
        words = len(self._loaded.overrides)
        with_words = f" with {words} setting{'s' if words > 1 else ''}" if words else ""
        yield ok("config", f"{self._loaded.path}{with_words}: {config.model.name}, {config.task_mode}, "
                           f"{config.tuning.mode}")  # fmt: skip
        _prepare(config)
        yield from self._model_files()
        yield from self._tokenizer_and_template()
        yield from self._data()
        plan = list(_guarded("memory plan", self._memory()))
        yield from _guarded("padding", self._padding())
        yield from _guarded("model", self._model())
        yield from plan
        yield from _guarded("disk", self._disk())

    def _model_files(self) -> Iterator[Check]:
        name = self._config.model.name
        try:
            found = "" if name == BASE_NAME else _missing_weights(self._config)
        except SftPlayError as error:
            self._no_files = True
            yield self._problem("model files", error, "give model.name a folder or hub id that is there")
            return
        if name == BASE_NAME:
            made = any((cache_dir() / "starter").glob("base-*/model/model.safetensors"))
            yield ok("model files", f"{name}: {'in the cache' if made else 'trained by the first make train, once'}")
        elif found:
            yield problem("model files", found, "fetch the weights as safetensors, or give another model.name")
        else:
            yield ok("model files", f"{name}: config.json and weights can be had")

    def _tokenizer_and_template(self) -> Iterator[Check]:
        if self._no_files:
            yield skipped("tokenizer", "not without the model files; see there")
            return
        try:
            loaded = _tokenizer(self._config)
        except SftPlayError as error:
            yield self._problem("tokenizer", error, "mend it, or give another model.name or data.chat_template")
            return
        self._tokenizer = loaded.tokenizer
        said = f"{type(loaded.tokenizer).__name__}, {len(loaded.tokenizer):,} tokens"
        yield ok("tokenizer", "\n".join([said, *(one_line(note, limit=300) for note in loaded.notes)]))
        try:
            maker = _maker(self._config, loaded.tokenizer)
            if self._config.task_mode != "cpt":
                maker.renderer.turns()
            self._maker = maker
        except SftPlayError as error:
            yield problem("chat template", str(error), "give data.chat_template another template")
            return
        if self._config.task_mode != "cpt":
            own = self._config.data.chat_template or "the tokenizer's own"
            yield ok("chat template", f"{one_line(own, limit=300)}; masks are verified row by row below")

    def _data(self) -> Iterator[Check]:
        config = self._config
        try:
            paths = data_paths(config.data)
            files = _files(paths)
            yield ok("data files", "\n".join([", ".join(str(path) for _, path in files), *paths.notes]))
        except SftPlayError as error:
            yield problem("data files", str(error), "name files that are there")
            files = _files_that_are_there(config.data)
        surveys: dict[str, Survey] = {}
        surveyor = Surveyor(config.data, tokenizer=self._tokenizer, maker=self._maker)
        for part, path in files:
            try:
                surveys[part] = surveyor.survey(path, _split_of(part), text_wanted=config.task_mode == "cpt")
            except SftPlayError as error:
                yield problem(f"rows: {part}", str(error), "mend the file, or give another one")
                continue
            yield from judge.judge_rows(surveys[part], config.data, task_mode=config.task_mode)
        if surveys:
            yield from judge.judge_repeats(surveys)
        self._surveys = surveys
        yield from self._held_out()
        if self._maker is not None:
            yield from self._masks(surveys)
        elif surveys:
            yield skipped("masks", "not without a tokenizer and a template; see there")

    def _held_out(self) -> Iterator[Check]:
        """Options that need rows to evaluate on."""
        config = self._config
        has_val = any(_split_of(part) == "val" for part in self._surveys)
        if config.train.load_best_model_at_end and not has_val and not config.data.val_fraction:
            yield problem("evaluation", "train.load_best_model_at_end=true needs validation rows, and there are none",
                          "give data.val_path or data.val_fraction")  # fmt: skip

    def _masks(self, surveys: dict[str, Survey]) -> Iterator[Check]:
        config, maker = self._config, self._maker
        assert maker is not None
        positions = _positions(config)
        chats = [survey for survey in surveys.values() if not self._is_text(survey)]
        for survey in chats:
            yield from judge.judge_masks(survey, config.data)
            yield from judge.judge_texts(survey, config.data)
        for survey in chats[:1]:
            yield from judge.judge_roles(survey)
            plain = self._tokenizer("x")["input_ids"]
            adds_bos = bool(plain) and plain[0] == self._tokenizer.bos_token_id
            yield from judge.judge_marks(survey, self._tokenizer, adds_bos=adds_bos)
            yield from self._example(survey)
        for survey in chats:
            yield from judge.judge_lengths(survey, config.data, max_seq_len=maker.max_seq_len, positions=positions)
        for survey in surveys.values():
            if self._is_text(survey) and not (survey.chats and survey.split in ("val", "test")):
                if survey.unmasked:
                    yield from judge.judge_masks(survey, config.data)
                yield from judge.judge_blocks(survey, max_seq_len=maker.max_seq_len)

    def _is_text(self, survey: Survey) -> bool:
        return self._config.task_mode == "cpt" or survey.split == "text"

    def _example(self, survey: Survey) -> Iterator[Check]:
        """One row with its trained part marked."""
        if survey.first is None:
            return
        number, whole, _ = survey.first
        names = show.TokenBytes(self._tokenizer)
        pieces = show.pieces_of(whole.input_ids, whole.labels, names, kept=[True] * len(whole.input_ids))
        shown = show.Shown(number, whole.where, tuple(whole.input_ids), tuple(whole.labels), tuple(pieces))
        yield ok("example", f"row {number:,} of {survey.split}, trained part in [[ ]] (make preview shows more):\n"
                            f"{show.example_line(shown)}")  # fmt: skip

    def _memory(self) -> Iterator[Check]:
        from sft_play.plan.show import choice_line, memory_line

        where = "the named machine" if self._hardware.named else "this machine"
        try:
            self._plan = plan = start.plan_for(self._config, self._hardware)
            require_fit(plan, self._config)
        except SftPlayError as error:
            yield self._problem("memory plan", error, "make plan shows every candidate and the ways out")
            return
        said = f"{choice_line(plan)} ({where})\n{memory_line(plan)}"
        if plan.fits:
            yield ok("memory plan", said)
        else:
            yield warning("memory plan", f"{said}\nit is tried because the batch was given",
                          "make plan shows the ways out")  # fmt: skip
        train = self._surveys.get("train")
        if train is not None and train.kept and train.kept < plan.batch.effective_batch and not self._is_text(train):
            yield warning(
                "batch",
                f"{train.kept:,} training rows are fewer than one effective batch of {plan.batch.effective_batch:,}: a "
                "step sees them all",
                f"lower {self._config.train.effective_words}",
            )

    def _padding(self) -> Iterator[Check]:
        """What each way to make batches would pad."""
        from sft_play.data.packing import padding_shares

        train, plan, config = self._surveys.get("train"), self._plan, self._config
        if train is None or plan is None or self._maker is None or self._is_text(train) or not train.kept:
            return
        shares = padding_shares(
            train.lengths,
            micro_batch=plan.batch.micro_batch,
            effective_batch=plan.batch.effective_batch,
            max_seq_len=self._maker.max_seq_len,
            seed=config.train.seed,
        )
        yield from judge.judge_padding(
            shares,
            micro_batch=plan.batch.micro_batch,
            packing=config.data.packing,
            grouped=config.train.group_by_length,
        )

    def _model(self) -> Iterator[Check]:
        """Names of modules, embeddings and the backend, looked up on the model's own class."""
        if self._tokenizer is None or self._plan is None:
            yield skipped("model", "not without a tokenizer and a plan; see there")
            return
        from sft_play.train.model import choose_backend, draw_blueprint
        from sft_play.train.trainable import trainable_note

        try:
            if not self._hardware.named:
                choose_backend(self._config)
            if set(self._config.train.report_to) - {"tensorboard"}:
                from sft_play.train.trainer import check_trackers  # brings TRL along: seconds

                check_trackers(self._config)
            if self._config.model.name == BASE_NAME:
                return
            drawn = draw_blueprint(self._config, self._plan.precision, tokenizer_size=len(self._tokenizer))
            trained = trainable_note(self._config, drawn)
        except SftPlayError as error:
            yield problem("model", str(error), "mend the option that is named")
            return
        said = f"{drawn.vocab_size:,} embeddings for {len(self._tokenizer):,} tokens"
        notes = [*drawn.notes, *([trained] if trained else [])]
        yield ok("model", "\n".join([said, *(one_line(note, limit=300) for note in notes)]))

    def _disk(self) -> Iterator[Check]:
        if self._hardware.named:
            yield skipped("disk", "the machine is a named one, not this")
            return
        if self._plan is None:
            yield skipped("disk", "not without a memory plan; see there")
            return
        planned = doctor.Planned(self._config, start.shape_for(self._config), self._plan)
        states = {"PASS": "ok", "WARN": "warning", "FAIL": "problem", "SKIP": "skipped"}
        for finding in doctor.disk_findings(planned, Spread(), os.environ):
            yield Check(finding.name, states[finding.verdict], finding.found, finding.remedy)  # type: ignore[arg-type]


def _guarded(name: str, checks: Iterator[Check]) -> Iterator[Check]:
    """The checks of a part; what it cannot do for a reason that a user can mend is a problem, and the rest goes on."""
    try:
        yield from checks
    except SftPlayError as error:
        yield problem(name, str(error), "mend what is named")


def _missing_weights(config: RunConfig) -> str:
    """What is wrong with the model's weights, from the names of its files; empty where they can be had."""
    name = config.model.name
    folder = local_folder(name)
    if folder is None:
        check_available(name, revision=config.model.revision)
        if doctor.is_here(config, os.environ) or hub_answers():
            return ""
        return f"the weights of {name} are not in the local cache, and the hub cannot be reached"
    config_json(name)
    names = {item.name for item in folder.iterdir()}
    if not any(item.endswith(".safetensors") for item in names):
        return f"{folder} holds no *.safetensors"
    index = folder / "model.safetensors.index.json"
    if index.name not in names:
        return ""
    try:
        parts = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{index} cannot be read"
    missing = sorted(str(part) for part in parts if part not in names)
    return f"{folder} lacks {len(missing)} of {len(parts)} parts, such as {one_line(missing[0])}" if missing else ""


def _files_that_are_there(data: DataConfig) -> list[tuple[str, AnySource]]:
    """The files of a config of which others are missing."""
    found: list[tuple[str, AnySource]] = []
    named = [(split, getattr(data, f"{split}_path")) for split in (*SPLITS, "text")]
    for source, name in zip(data.sources, data.source_names, strict=True):
        named += [(f"source {name}", source.path), (f"source {name} (val)", source.val_path)]
    for part, value in named:
        with contextlib.suppress(DataError):
            if value is not None:
                found.append((part, find_source(value)))
    return found


# --- the whole way ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """The steps of `make full-pipeline` that were made, with their answers; `stopped` says at which one and why."""

    steps: tuple[tuple[str, Any], ...]
    stopped: tuple[str, str] | None = None

    @property
    def ok(self) -> bool:
        """Whether every step went well."""
        return self.stopped is None and all(_is_ok(answer) for _, answer in self.steps)

    def lines(self) -> list[str]:
        """The steps one after the other."""
        found = []
        for name, answer in self.steps:
            found += [f"== {name} ==", *answer.lines()]
        if self.stopped is not None:
            name, why = self.stopped
            found += [
                f"== {name} ==",
                f"{escape_control(why)}",
                f"Stopped at {name}; what was written before it is kept",
            ]
        return found

    def as_json(self) -> dict[str, Any]:
        """`ok`, the steps, and the one that it stopped at."""
        steps = [{"name": name, "ok": _is_ok(answer), "answer": answer.as_json()} for name, answer in self.steps]
        stopped = None if self.stopped is None else {"name": self.stopped[0], "why": self.stopped[1]}
        return {"ok": self.ok, "steps": steps, "stopped": stopped}


def _is_ok(answer: Any) -> bool:
    return bool(answer.ok() if callable(answer.ok) else answer.ok)


def full_pipeline(
    config_path: Path, overrides: Sequence[str], hardware: Hardware, *, style: str | None, force: bool
) -> Way:
    """process, style where it is asked for, render and check, each on what the one before wrote.

    Raises:
        ConfigError: the run YAML cannot be read; no step was made.
    """
    loaded = load_config(config_path, overrides=overrides)
    steps: list[tuple[str, Any]] = []
    name = "process"
    try:
        for name, make in _steps(loaded, hardware, style=style, force=force):
            answer = make()
            steps.append((name, answer))
            if not _is_ok(answer):
                break
    except SftPlayError as error:
        return Way(tuple(steps), (name, str(error)))
    return Way(tuple(steps))


def _steps(loaded: LoadedConfig, hardware: Hardware, *, style: str | None, force: bool) -> Iterator[tuple[str, Any]]:
    """The steps in order, each as a function without arguments, made when the ones before it are done."""
    from sft_play.data.process import process

    config = loaded.config
    yield "process", lambda: process(config, force=force)
    folder = Path(config.data.process.out_dir)
    wanted = config.data.style
    if style is not None or wanted.system is not None or wanted.per_source:
        from sft_play.data.style import style as restyle

        yield "style", lambda: restyle(config, style, force=force)
        folder = Path(wanted.out_dir)
    overrides = (*loaded.overrides, *(["data.sources=[]"] if config.data.sources else []), *_pointing_to(folder))
    yield "render", lambda: render(load_config(loaded.path, overrides=overrides), out=None, force=force)
    yield "check", lambda: check(loaded.path, overrides, hardware, also=[_which_files(config.data, folder)])


def _pointing_to(folder: Path) -> list[str]:
    """Settings with which a run reads the files of a folder that process or style wrote."""
    found = [f"data.train_path={json.dumps(str(folder / 'train.jsonl'))}"]
    for split in ("val", "test"):
        path = folder.expanduser() / f"{split}.jsonl"
        there = path.is_file() and path.stat().st_size > 0
        found.append(f"data.{split}_path={json.dumps(str(folder / path.name)) if there else 'null'}")
    return found


def _which_files(data: DataConfig, folder: Path) -> Check:
    """Whether the config trains on what was written."""
    written = folder / "train.jsonl"
    if _same(data.train_path, written):
        return ok("training files", f"data.train_path={written}, which was written just now")
    return warning(
        "training files",
        f"make train with this config reads {_read_for_training(data)}; below, {written} is checked, which was written "
        "just now",
        f"to train on it: data.train_path={written}, with val_path and test_path beside it",
    )


def _read_for_training(data: DataConfig) -> str:
    """Where the training rows come from, as the run YAML says it."""
    if data.train_path is None:
        return f"data.sources: {', '.join(data.source_names)}"
    return f"data.train_path={one_line(data.train_path)}"


def _same(one: str | None, other: Path) -> bool:
    return one is not None and Path(one).expanduser().absolute() == other.expanduser().absolute()
