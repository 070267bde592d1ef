"""Data files → tokens in an Arrow cache: read, rendered and verified in several processes, mapped, never held whole.

A cache is keyed by everything that decides a row's tokens: the content of the files, the tokenizer with its template,
the options that matter, and this code. It is written aside and renamed when it is complete; another rank or run that
needs it meanwhile waits for the lock. The counts of its rows, bad ones included, are kept beside it: `splits.py`
decides at every start whether a run may continue with them, and `make check` says what they mean.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from sft_play.config.schema import DataConfig
from sft_play.data.build.arrow_rows import RowWriter, write_blocks
from sft_play.data.build.stats import LimitCost, RowStats, token_digest
from sft_play.data.build.survey import RowCounter, RowMaker
from sft_play.data.build.workers import bytes_of, file_pieces, how_many, together
from sft_play.data.masks.render import Renderer
from sft_play.data.masks.token_row import TokenRow
from sft_play.data.masks.tokenizer import TokenizerParts
from sft_play.data.sources.examples import read_example, count_part_rows
from sft_play.data.sources.files import AnySource, FilePart, source_digest, list_parts, read_part
from sft_play.data.sources.formats import Example, RowFormat, content_digest, digest_share, detect_format
from sft_play.data.sources.raw import BadRow
from sft_play.errors import DataError
from sft_play.files import atomic, cache_dir, hold_lock
from sft_play.process.waiting import WaitProgress, report_wait

# The rows of a source, and those of it that are split off for validation.
KEPT, HELD = "kept", "held"

# Options of the data section that decide no row's tokens; the template is part of the tokenizer.
_NOT_IN_KEY = frozenset(
    {
        *("train_path", "val_path", "test_path", "text_path", "text_fraction", "val_fraction", "on_bad_row"),
        *("max_lost_fraction", "packing", "sources", "workers", "process", "documents", "chat_template"),
    }
)


@dataclass(frozen=True)
class Recipe:
    """How rows are made from examples: all that another process needs. `documents`: plain text that is joined and cut
    into blocks of max_seq_len; else rows of chats. `held_share` of the examples, by content hash, are split off;
    `keeps_chats` keeps the conversations beside their tokens."""

    tokenizer: TokenizerParts
    data: DataConfig
    max_seq_len: int
    today: date
    documents: bool = False
    held_share: float = 0.0
    keeps_chats: bool = False
    task_mode: str = "sft"


@dataclass(frozen=True)
class Built:
    """The token rows of a source: Arrow files by KEPT and HELD, and what became of the rows by the same names."""

    folder: Path
    files: dict[str, tuple[str, ...]]
    stats: dict[str, RowStats]

    def dataset(self, name: str) -> Any:
        """The rows as a mapped `datasets.Dataset`; None where there are none."""
        from datasets import Dataset, concatenate_datasets

        parts = [Dataset.from_file(str(self.folder / file)) for file in self.files.get(name, ())]
        parts = [part for part in parts if len(part)]
        return concatenate_datasets(parts) if parts else None


def build(source: AnySource, recipe: Recipe, *, split: str, workers: int | str = "auto") -> Built:
    """The token rows of a source, from the cache or made now. Raises DataError for files, formats and the cache."""
    parts = list_parts(source, split=split, wants_text=recipe.documents)
    try:
        folder = cache_dir() / "tokens" / _key(source, parts, recipe, split)
    except OSError as error:
        raise DataError(f"{error.filename or source} cannot be read: {error.strerror or error}") from error
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(folder.with_name(f"{folder.name}.lock"), waiting=_WAITING):
            return _load(folder) or _make(folder, parts, recipe, split, workers)
    except OSError as error:
        raise DataError(
            f"the token cache {folder.parent} cannot be written: {error.strerror or error}; free space there, or name "
            "another folder in SFT_PLAY_CACHE"
        ) from error


# The key.


def _code_digest(package: Path) -> str:
    """Digest of the code and tables of a package, so that cached rows need no version number. Compiled files are left
    out: they appear as modules are imported."""
    digest = hashlib.sha256()
    for path in sorted(path for path in package.rglob("*") if path.suffix in (".py", ".json")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _key(source: AnySource, parts: Sequence[FilePart], recipe: Recipe, split: str) -> str:
    import tokenizers

    options = {key: value for key, value in recipe.data.model_dump(mode="json").items() if key not in _NOT_IN_KEY}
    decides = {
        # a tokenizer's ids are the library's doing too
        "code": [tokenizers.__version__, _code_digest(Path(__file__).parents[1])],
        "tokenizer": hashlib.sha256(repr(recipe.tokenizer).encode()).hexdigest(),
        "options": options,
        "limit": recipe.max_seq_len,
        "date": str(recipe.today) if recipe.tokenizer.writes_date and not recipe.data.template_date else "",
        "kind": [split, recipe.documents, recipe.held_share, recipe.keeps_chats, recipe.task_mode],
        "source": str(source),
        "content": [[part.name, part.kind, _content(part)] for part in parts],
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:32]


def _content(part: FilePart) -> str:
    """Digest of what a part's file holds; of a data set of the hub its commit, or today's date if that is unknown."""
    if part.kind == "hub":
        from huggingface_hub import HfApi

        with contextlib.suppress(Exception):  # offline, gated, renamed: reading it says so
            return str(HfApi().dataset_info(part.name.split(":")[1], timeout=10).sha)
        return str(date.today())
    return source_digest(part.path)


# The cache.


_META = "meta.pickle"
_WAITING = "Data: another process is preparing the same rows; waiting for it"


_HELD = {(kind.__module__, kind.__qualname__) for kind in (RowStats, LimitCost, BadRow, TokenRow, Counter)}


class _Reader(pickle.Unpickler):
    """Unpickles what a cache holds, and nothing that could run code: others may write to the disk that it is on."""

    def find_class(self, module: str, name: str) -> Any:
        """The class of a name that a cache may hold."""
        if (module, name) in _HELD or (module == "array" and name in ("array", "_array_reconstructor")):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which no cache has")


def _load(folder: Path) -> Built | None:
    with contextlib.suppress(Exception):  # damaged, or pickled by another Python: the rows are made again
        with (folder / _META).open("rb") as file:
            files, stats = _Reader(file).load()
        # the folder was renamed when it was whole; a user may have removed files since
        if all((folder / file).is_file() for names in files.values() for file in names):
            return Built(folder, files, stats)
    shutil.rmtree(folder, ignore_errors=True)
    return None


def _make(folder: Path, parts: Sequence[FilePart], recipe: Recipe, split: str, workers: int | str) -> Built:
    # always the same place: nobody else writes there, since the caller holds the lock
    with atomic.replace_path(folder, temporary=folder.with_name(f"{folder.name}.part")) as aside:
        aside.mkdir()
        files, stats = _rows_of(aside, parts, recipe, split, workers)
        if recipe.documents:
            for name, documents in files.items():
                blocks, held_out = f"{name}.blocks.arrow", split != "train" or name == HELD
                paths = [aside / file for file in documents]
                write_blocks(aside / blocks, paths, recipe.max_seq_len, keeps_short=held_out)
                files[name] = (blocks,)
        (aside / _META).write_bytes(pickle.dumps((files, stats)))
    return Built(folder, files, stats)


_Files = dict[str, tuple[str, ...]]
_Stats = dict[str, RowStats]


def _rows_of(
    folder: Path, parts: Sequence[FilePart], recipe: Recipe, split: str, workers: int | str
) -> tuple[_Files, _Stats]:
    total = bytes_of(parts)
    asked = how_many(workers, total)
    jobs = _jobs_of(folder, parts, recipe, count=asked, total_bytes=total)
    count = min(asked, len(jobs))
    files: dict[str, list[str]] = {KEPT: [], HELD: []}
    stats = _no_rows(recipe)
    with report_wait(f"Tokenising {split} rows", unit="rows", count_total=lambda: count_part_rows(parts)) as news:
        if count > 1:
            results = together(jobs, _Maker, recipe, count=count)
        else:
            maker = _Maker(recipe)
            results = (maker(job, news=news) for job in jobs)
        for made, counted in results:
            news.add(counted[KEPT].rows if count > 1 else 0)
            for name, counts in stats.items():
                counts.add(counted[name])
            for name, file in made.items():
                files[name].append(file)
    formats = [name for name, _ in stats[KEPT].formats.most_common()] + [job.shape.name for job in jobs if job.shape]
    for side in stats.values():
        side.format = ", ".join(dict.fromkeys(formats)) or side.format
    return {name: tuple(names) for name, names in files.items()}, stats


def _jobs_of(folder: Path, parts: Sequence[FilePart], recipe: Recipe, *, count: int, total_bytes: int) -> list[_Job]:
    jobs: list[_Job] = []
    for part in parts:
        shape = detect_format(read_part(part), recipe.data)[1]
        pieces = file_pieces(part, count=count, total_bytes=total_bytes)
        jobs += [_Job(len(jobs) + at, piece, shape, str(folder)) for at, piece in enumerate(pieces)]
    return jobs


def _no_rows(recipe: Recipe) -> _Stats:
    return {name: RowStats(cost=LimitCost(recipe.data.truncate)) for name in (KEPT, HELD)}


@dataclass(frozen=True)
class _Job:
    """A piece of a file, its format, and where its rows go."""

    number: int
    part: FilePart
    shape: RowFormat | None
    folder: str


# Making rows.


class _Maker:
    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        renderer = Renderer(recipe.tokenizer, recipe.data, max_seq_len=recipe.max_seq_len, today=recipe.today)
        self._rows = RowMaker(renderer, task_mode=recipe.task_mode)

    def __call__(self, job: _Job, *, news: WaitProgress | None = None) -> tuple[dict[str, str], _Stats]:
        """The rows of a piece, written into its files: their names, and the counts."""
        recipe, stats = self._recipe, _no_rows(self._recipe)
        counter = RowCounter(self._rows.renderer)
        held = bytearray()
        with contextlib.ExitStack() as stack:
            writers = {
                # a file for each job and side: no process waits for another, and the order is that of the jobs
                name: stack.enter_context(self._writer(job, name))
                for name in ((KEPT, HELD) if recipe.held_share else (KEPT,))
            }
            examples = self._examples(job, stats, held, news)
            for outcome in self._rows.outcomes(examples, document=recipe.documents):
                assert not isinstance(outcome, BadRow)
                side, whole, row = HELD if held[outcome.number - 1] else KEPT, outcome.whole, outcome.row
                if whole is None:
                    assert isinstance(row, BadRow)
                    stats[side].count_unmasked(row)
                elif recipe.documents:
                    stats[side].count_document(whole)
                else:
                    counter.count(stats[side], outcome.number, outcome.example, whole, row)
                if not isinstance(row, BadRow):
                    writers[side].add(row, outcome.example)
                    stats[side].digests.append(token_digest(row.input_ids))
        return {name: writer.path.name for name, writer in writers.items()}, stats

    def _writer(self, job: _Job, name: str) -> RowWriter:
        recipe = self._recipe
        is_held_out = name == HELD or not recipe.held_share  # a recipe of held-out rows alone splits none off
        keeps_chats = recipe.keeps_chats and is_held_out and not recipe.documents
        return RowWriter(Path(job.folder) / f"{job.number:06d}.{name}.arrow", keeps_chats=keeps_chats)

    def _examples(
        self, job: _Job, stats: _Stats, held: bytearray, news: WaitProgress | None
    ) -> Iterator[tuple[int, Example]]:
        """The piece's examples with their rows' numbers; `held` gets 1 for each that is split off, 0 for the others,
        bad ones among them."""
        data, share = self._recipe.data, self._recipe.held_share
        kept = stats[KEPT]
        for number, raw in enumerate(read_part(job.part), start=1):
            for counts in stats.values():
                counts.rows = number
            if news is not None:
                news.add()
            example = read_example(raw, job.shape, data)
            held.append(0)
            if isinstance(example, BadRow):
                kept.count_bad(example)
                continue
            if job.shape is not None:
                kept.formats[job.shape.name] += 1
            if not self._recipe.documents:
                example = self._rows.renderer.recover_chat(example)
            held[-1] = share > 0 and digest_share(content_digest(example)) < share
            stats[HELD if held[-1] else KEPT].count_example(example)
            yield number, example
