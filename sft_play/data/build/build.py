"""Data files → tokens in an Arrow cache: read, rendered and verified in several processes, mapped,
never held whole.

A cache is keyed by everything that decides a row's tokens: the content of the files, the
tokenizer with its template, the options that matter, and this code. It is written aside and
renamed when it is complete; another rank or run that needs it meanwhile waits for the lock. The
counts of its rows, bad ones included, are kept beside it: `splits.py` decides at every start
whether a run may continue with them, and `make check` says what they mean.
"""

import base64
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from sft_play.config.schema import DataConfig
from sft_play.data.build.stats import RowStats, TruncationCost, file_state, token_digest
from sft_play.data.build.survey import RowCounter, RowRenderer
from sft_play.data.masks.image_processor import ImageProcessorSource
from sft_play.data.masks.render import Renderer
from sft_play.data.masks.token_row import CHAT, TokenRow
from sft_play.data.masks.tokenizer import TokenizerParts
from sft_play.data.sources.examples import count_part_rows, read_example
from sft_play.data.sources.files import (
    AnySource,
    FilePart,
    list_parts,
    read_part,
    source_digest,
    split_part,
)
from sft_play.data.sources.formats import (
    Chat,
    Example,
    RowFormat,
    Text,
    content_digest,
    detect_format,
    digest_share,
)
from sft_play.data.sources.images import Picture
from sft_play.data.sources.raw import LISTED_BAD_ROWS, BadRow
from sft_play.errors import DataError, translate_library_errors
from sft_play.files import atomic, cache_dir, hold_lock
from sft_play.machine.host import cpu_cores
from sft_play.process.signals import die_with_parent
from sft_play.process.waiting import WaitProgress, report_wait

# Token rows in Arrow files: written in batches without a Python object for each token, and cut into
# blocks.
#
# Columns: `input_ids` and `labels` (lists of int32), `source` (0: chat, 1: text), of rows with
# images `images` and `image_tokens`, and where it is kept `chat` (JSON).

_SCHEMA = pa.schema(
    [("input_ids", pa.list_(pa.int32())), ("labels", pa.list_(pa.int32())), ("source", pa.int8())]
)
# Further columns of chats: pictures, not decoded, and the tokens that they take. `BuiltRows` leaves
# them out where no row has any.
_PICTURE_TYPE = pa.struct(
    [("path", pa.string()), ("data", pa.binary()), ("width", pa.int32()), ("height", pa.int32())]
)
_IMAGES_TYPE = pa.list_(_PICTURE_TYPE)
IMAGE_COLUMNS = ("images", "image_tokens")
_CHAT_SCHEMA = _SCHEMA.append(pa.field("images", _IMAGES_TYPE)).append(
    pa.field("image_tokens", pa.int32())
)
# Rows that are written together: so many, or so many tokens.
_BATCH_ROWS, _BATCH_TOKENS = 256, 1 << 18


class RowWriter:
    """Writes token rows to an Arrow stream file; with `keeps_chats` also their conversations
    (column `chat`)."""

    def __init__(self, path: Path, *, keeps_chats: bool) -> None:
        self.path = path
        self._keeps_chats = keeps_chats
        self._schema = _CHAT_SCHEMA
        if keeps_chats:
            self._schema = _CHAT_SCHEMA.append(pa.field("chat", pa.string()))
        self._pending: list[tuple[TokenRow, Example]] = []
        self._tokens = 0

    def __enter__(self) -> Self:
        self._file = pa.OSFile(str(self.path), "wb")
        self._stream = pa.ipc.new_stream(self._file, self._schema)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._write_batch()
        self._stream.close()
        self._file.close()

    def add(self, row: TokenRow, example: Example) -> None:
        """Add a token row and the example it was made from; a full batch is written at once."""
        self._pending.append((row, example))
        self._tokens += len(row.input_ids)
        if len(self._pending) == _BATCH_ROWS or self._tokens > _BATCH_TOKENS:
            self._write_batch()

    def _write_batch(self) -> None:
        if not self._pending:
            return
        columns = [
            _to_list_array(*_concatenate([row.input_ids for row, _ in self._pending])),
            _to_list_array(*_concatenate([row.labels for row, _ in self._pending])),
            _to_arrow(np.array([row.source != CHAT for row, _ in self._pending], np.int8)),
            pa.array([[*map(asdict, row.images)] for row, _ in self._pending], _IMAGES_TYPE),
            pa.array([row.image_tokens for row, _ in self._pending], pa.int32()),
        ]
        if self._keeps_chats:
            columns.append(
                pa.array([_chat_to_json(example) for _, example in self._pending], pa.string())
            )
        self._stream.write_batch(pa.record_batch(columns, schema=self._schema))
        self._pending, self._tokens = [], 0


def _chat_to_json(example: Example) -> str | None:
    if not isinstance(example, Chat):
        return None
    return json.dumps(
        [
            example.where,
            example.messages,
            example.tools,
            example.template_kwargs,
            [
                (image.path, base64.b64encode(image.data).decode(), image.width, image.height)
                for image in example.images
            ],
        ],
        ensure_ascii=False,
    )


def chat_from_json(text: str) -> Chat:
    """Parse a conversation from the `chat` column."""
    location, messages, tools, template_kwargs, pictures = json.loads(text)
    return Chat(
        location,
        tuple(messages),
        tuple(tools),
        template_kwargs=template_kwargs,
        images=tuple(
            Picture(path, base64.b64decode(data), width, height)
            for path, data, width, height in pictures
        ),
    )


def write_blocks(
    output_path: Path, paths: Sequence[Path], block_size: int, *, keeps_short: bool
) -> None:
    """Join documents and cut them into blocks of exactly `block_size` tokens; remove the documents'
    own files. Tokens that fill no block are dropped; with `keeps_short` a text shorter than one
    block becomes one short block."""
    pending_ids = np.zeros(0, np.int32)
    has_blocks = False
    with pa.OSFile(str(output_path), "wb") as target, pa.ipc.new_stream(target, _SCHEMA) as stream:
        for document_path in paths:
            with (
                pa.memory_map(str(document_path)) as source,
                pa.ipc.open_stream(source) as documents,
            ):
                for batch in documents:
                    pending_ids = np.concatenate(
                        [pending_ids, batch.column(0).flatten().to_numpy()]
                    )
                    full_size = len(pending_ids) // block_size * block_size
                    if full_size:  # written at once: a corpus of any size is never held in memory
                        stream.write_batch(_make_block_batch(pending_ids[:full_size], block_size))
                        pending_ids, has_blocks = pending_ids[full_size:].copy(), True
            document_path.unlink()
        if not has_blocks and len(pending_ids) and keeps_short:
            stream.write_batch(_make_block_batch(pending_ids, len(pending_ids)))


def _make_block_batch(tokens: Any, block_size: int) -> Any:
    offsets = np.arange(0, len(tokens) + 1, block_size, dtype=np.int32)
    column = _to_list_array(offsets, np.ascontiguousarray(tokens, np.int32))
    return pa.record_batch(
        [column, column, _to_arrow(np.ones(len(offsets) - 1, np.int8))], schema=_SCHEMA
    )


# The offsets of the lists (int32, [lists + 1]) and all their tokens (int32, [tokens]).
def _concatenate(token_lists: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    offsets = np.cumsum([0, *map(len, token_lists)], dtype=np.int32)
    return offsets, np.fromiter(
        itertools.chain.from_iterable(token_lists), np.int32, int(offsets[-1])
    )


def _to_arrow(values: Any) -> Any:
    # `pyarrow.array` would import pandas first, which takes a second
    return pa.Array.from_buffers(
        pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)]
    )


def _to_list_array(offsets: Any, tokens: Any) -> Any:
    return pa.ListArray.from_arrays(_to_arrow(offsets), _to_arrow(tokens))


# The two sides of a source: rows that it keeps, and rows that are split off for validation.
KEPT_SIDE, HELD_OUT_SIDE = "kept", "held"

# Options of the data section that decide no row's tokens; the template is part of the tokenizer.
_OPTIONS_NOT_IN_KEY = frozenset(
    {
        "train_path",
        "val_path",
        "test_path",
        "text_path",
        "text_fraction",
        "val_fraction",
        "on_bad_row",
        "max_lost_fraction",
        "packing",
        "sources",
        "workers",
        "process",
        "documents",
        "chat_template",
    }
)


@dataclass(frozen=True)
class BuildRecipe:
    """How rows are made from examples: all that another process needs. `is_document`: plain text,
    joined and cut into blocks of max_seq_len; else rows of chats. `held_out_share` of the examples,
    by content hash, are split off; `text_span` is the part of each document that is read, as shares
    of its characters; `keeps_chats` keeps the conversations beside their tokens."""

    tokenizer: TokenizerParts
    data: DataConfig
    max_seq_len: int
    today: date
    is_document: bool = False
    text_span: tuple[float, float] = (0.0, 1.0)
    held_out_share: float = 0.0
    keeps_chats: bool = False
    task_mode: str = "sft"
    images: ImageProcessorSource | None = None


@dataclass(frozen=True)
class BuiltRows:
    """The token rows of a source: Arrow files, and counts of rows, each by KEPT_SIDE and
    HELD_OUT_SIDE."""

    folder: Path
    files: dict[str, list[str]]
    stats: dict[str, RowStats]

    def dataset(self, name: str) -> Any:
        """The rows as a mapped `datasets.Dataset`; None where there are none."""
        from datasets import Dataset, concatenate_datasets

        paths = [str(self.folder / file) for file in self.files.get(name, ())]
        parts = list(filter(len, map(Dataset.from_file, paths)))
        if not parts:
            return None
        rows = concatenate_datasets(parts)
        has_images = any(side_stats.image_rows for side_stats in self.stats.values())
        unused_columns = [name for name in IMAGE_COLUMNS if name in rows.column_names]
        return rows if has_images else rows.remove_columns(unused_columns)


def build_rows(
    source: AnySource, recipe: BuildRecipe, *, split: str, workers: int | str = "auto"
) -> BuiltRows:
    """Load the token rows of a source from the cache, or build them. Raises DataError for files,
    formats and cache."""
    import tokenizers

    parts = list_parts(source, split=split, wants_text=recipe.is_document)
    try:
        key_parts = {
            # a tokenizer's ids are the library's doing too
            "code": [tokenizers.__version__, _code_digest(Path(__file__).parents[1])],
            "tokenizer": hashlib.sha256(repr(recipe.tokenizer).encode()).hexdigest(),
            "options": recipe.data.model_dump(mode="json", exclude=set(_OPTIONS_NOT_IN_KEY)),
            "limit": recipe.max_seq_len,
            "images": None if recipe.images is None else recipe.images.identity,
            "date": str(recipe.today)
            if recipe.tokenizer.writes_date and not recipe.data.template_date
            else "",
            "kind": [
                split,
                recipe.is_document,
                recipe.text_span,
                recipe.held_out_share,
                recipe.keeps_chats,
                recipe.task_mode,
            ],
            "source": str(source),
            "content": [[part.name, part.kind, _content_digest(part)] for part in parts],
        }
        key = hashlib.sha256(json.dumps(key_parts, sort_keys=True).encode()).hexdigest()[:32]
        folder = cache_dir() / "tokens" / key
    except OSError as error:
        raise DataError(
            f"{error.filename or source} cannot be read: {error.strerror or error}"
        ) from error
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(
            folder.with_name(f"{folder.name}.lock"),
            waiting_message="Data: another process is preparing the same rows; waiting for it",
        ):
            return _load_cache(folder, parts) or _build_cache(folder, parts, recipe, split, workers)
    except OSError as error:
        raise DataError(
            f"the token cache {folder.parent} cannot be written: {error.strerror or error}; free "
            "space there, or name another folder in SFT_PLAY_CACHE"
        ) from error


# Cached rows need no version number: a digest of the code and tables is in their key. Compiled
# files are left out: they appear as modules are imported.
def _code_digest(package: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in package.rglob("*") if path.suffix in (".py", ".json")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


# A digest of a file's content; for a data set of the hub its commit, or today's date if that is
# unknown.
def _content_digest(part: FilePart) -> str:
    if part.kind == "hub":
        from huggingface_hub import HfApi

        with contextlib.suppress(Exception):  # offline, gated, renamed: reading it says so
            return str(HfApi().dataset_info(part.name.split(":")[1], timeout=10).sha)
        return str(date.today())
    return source_digest(part.path)


# The cache.
_META_FILE = "meta.pickle"

_PICKLED_CLASSES = {
    (kind.__module__, kind.__qualname__)
    for kind in (RowStats, TruncationCost, BadRow, TokenRow, Picture, Counter)
}


class _CacheUnpickler(pickle.Unpickler):
    # nothing that could run code: others may write to the disk that a cache is on

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PICKLED_CLASSES or (
            module == "array" and name in ("array", "_array_reconstructor")
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which no cache has")


# Rows name the files of their images, which the key of a cache does not know: another folder may
# have the same rows, files may have changed, and what was missing may be there now.
def _has_same_images(
    stats: Mapping[str, RowStats], folders: Sequence[str], parts: Sequence[FilePart]
) -> bool:
    counts = stats.values()
    reasons = [reason for one in counts for reason in (*one.bad_rows, *one.unmasked_rows)]
    if any(reason.startswith(("an image", "the processor")) for reason in reasons):
        return False
    if not any(one.image_rows for one in counts):
        return True
    states = {file: state for one in counts for file, state in one.image_files.items()}
    return _part_folders(parts) == list(folders) and all(
        file_state(file) == state for file, state in states.items()
    )


def _part_folders(parts: Sequence[FilePart]) -> list[str]:
    return [str(part.path.resolve().parent) for part in parts if part.kind != "hub"]


def _load_cache(folder: Path, parts: Sequence[FilePart]) -> BuiltRows | None:
    # damaged, or pickled by another Python: the rows are made again
    with contextlib.suppress(Exception):
        with (folder / _META_FILE).open("rb") as file:
            files, stats, folders = _CacheUnpickler(file).load()
        # the folder was renamed when it was whole; a user may have removed files since
        are_there = all((folder / file).is_file() for names in files.values() for file in names)
        if are_there and _has_same_images(stats, folders, parts):
            return BuiltRows(folder, files, stats)
    shutil.rmtree(folder, ignore_errors=True)
    return None


# Fewer bytes of data are prepared in this process, whose tokenizer has threads: starting others
# takes longer.
_MIN_PARALLEL_BYTES = 4 << 20
_MAX_WORKERS = 16
# Pieces of files are small enough that all workers end at about the same time.
_MIN_PIECE_BYTES, _MAX_PIECE_BYTES, _PIECES_PER_WORKER = 256 << 10, 8 << 20, 8
_SideStats = dict[str, RowStats]


def _build_cache(
    folder: Path, parts: Sequence[FilePart], recipe: BuildRecipe, split: str, workers: int | str
) -> BuiltRows:
    # always the same place: nobody else writes there, since the caller holds the lock
    with atomic.replace_path(
        folder, temporary=folder.with_name(f"{folder.name}.part")
    ) as temporary_folder:
        temporary_folder.mkdir()
        total_bytes = sum(
            part.path.stat().st_size for part in parts if part.kind != "hub" and part.path.is_file()
        )
        if not isinstance(workers, int):
            workers = 1 if total_bytes < _MIN_PARALLEL_BYTES else min(cpu_cores(), _MAX_WORKERS)
        piece_bytes = total_bytes // (workers * _PIECES_PER_WORKER)
        piece_bytes = max(_MIN_PIECE_BYTES, min(_MAX_PIECE_BYTES, piece_bytes))
        # A file's format is found here, where its first rows are: a worker may get any piece of it.
        jobs: list[_BuildJob] = []
        for part in parts:
            row_format = detect_format(read_part(part), recipe.data)[1]
            for piece in split_part(part, part_bytes=piece_bytes) if workers > 1 else [part]:
                jobs.append((piece, row_format, temporary_folder / f"{len(jobs):06d}"))
        workers = min(workers, len(jobs))
        files: dict[str, list[str]] = {KEPT_SIDE: [], HELD_OUT_SIDE: []}
        stats = _empty_stats(recipe)
        with report_wait(
            f"Tokenising {split} rows", unit="rows", count_total=lambda: count_part_rows(parts)
        ) as progress:
            if workers > 1:
                results = _run_jobs(jobs, recipe, workers)
            else:
                results = itertools.starmap(_BuildWorker(recipe, progress), jobs)
            for job_files, job_stats in results:
                if workers > 1:
                    progress.add(job_stats[KEPT_SIDE].rows)
                for name, counts in stats.items():
                    counts.add(job_stats[name])
                for name, file in job_files.items():
                    files[name].append(file)
        # by their rows, then the formats of files whose rows are all bad
        formats = [name for name, _ in stats[KEPT_SIDE].formats.most_common()]
        formats += [row_format.name for _, row_format, _ in jobs if row_format]
        for side_stats in stats.values():
            side_stats.format = ", ".join(dict.fromkeys(formats)) or side_stats.format
        # Documents run on over the ends of files and pieces: blocks are cut when all are there.
        if recipe.is_document:
            for side, document_files in files.items():
                is_held_out = split != "train" or side == HELD_OUT_SIDE or recipe.text_span[0] > 0
                blocks_path = temporary_folder / f"{side}.blocks.arrow"
                write_blocks(
                    blocks_path,
                    [temporary_folder / file for file in document_files],
                    recipe.max_seq_len,
                    keeps_short=is_held_out,
                )
                files[side] = [blocks_path.name]
        meta = pickle.dumps((files, stats, _part_folders(parts)))
        (temporary_folder / _META_FILE).write_bytes(meta)
    return BuiltRows(folder, files, stats)


def _empty_stats(recipe: BuildRecipe) -> _SideStats:
    return {
        name: RowStats(truncation_cost=TruncationCost(recipe.data.truncate))
        for name in (KEPT_SIDE, HELD_OUT_SIDE)
    }


# A piece of a file, its format, and how the paths of its Arrow files begin.
_BuildJob = tuple[FilePart, RowFormat | None, Path]


# Making rows.
class _BuildWorker:
    def __init__(self, recipe: BuildRecipe, progress: WaitProgress | None = None) -> None:
        self._recipe, self._progress = recipe, progress
        renderer = Renderer(
            recipe.tokenizer,
            recipe.data,
            max_seq_len=recipe.max_seq_len,
            today=recipe.today,
            images=recipe.images,
        )
        self._row_renderer = RowRenderer(renderer, task_mode=recipe.task_mode)

    # Writes the rows of a piece of a file to Arrow files; returns their names and the counts of
    # rows, by side.
    def __call__(
        self, part: FilePart, row_format: RowFormat | None, path: Path
    ) -> tuple[dict[str, str], _SideStats]:
        recipe, stats = self._recipe, _empty_stats(self._recipe)
        counter = RowCounter(self._row_renderer.renderer)
        held_out_flags = bytearray()
        with contextlib.ExitStack() as stack:
            writers: dict[str, RowWriter] = {}
            # a file for each job and side: no process waits for another, and the order is that of
            # the jobs
            for name in (KEPT_SIDE, HELD_OUT_SIDE) if recipe.held_out_share else (KEPT_SIDE,):
                # a recipe of held-out rows alone splits none off
                is_held_out = name == HELD_OUT_SIDE or not recipe.held_out_share
                keeps_chats = recipe.keeps_chats and is_held_out and not recipe.is_document
                writers[name] = stack.enter_context(
                    RowWriter(path.with_suffix(f".{name}.arrow"), keeps_chats=keeps_chats)
                )
            examples = self._read_examples(part, row_format, stats, held_out_flags)
            for outcome in self._row_renderer.render_rows(examples, is_document=recipe.is_document):
                assert not isinstance(outcome, BadRow)
                whole_row, row = outcome.whole_row, outcome.row
                side = (KEPT_SIDE, HELD_OUT_SIDE)[held_out_flags[outcome.row_number - 1]]
                if whole_row is None:
                    assert isinstance(row, BadRow)
                    stats[side].unmasked_rows[row.reason] += 1
                    if len(stats[side].first_unmasked_rows) < LISTED_BAD_ROWS:
                        stats[side].first_unmasked_rows.append(row)
                elif recipe.is_document:
                    stats[side].count_document(whole_row)
                else:
                    counter.count(stats[side], outcome.row_number, whole_row, row)
                if not isinstance(row, BadRow):
                    writers[side].add(row, outcome.example)
                    stats[side].digests.append(token_digest(row.input_ids, row.images))
        return {name: writer.path.name for name, writer in writers.items()}, stats

    # The examples with their rows' numbers; `held_out_flags` gets 1 for each that is split off,
    # else 0, bad ones among them.
    def _read_examples(
        self,
        part: FilePart,
        row_format: RowFormat | None,
        stats: _SideStats,
        held_out_flags: bytearray,
    ) -> Iterator[tuple[int, Example]]:
        data, held_out_share = self._recipe.data, self._recipe.held_out_share
        kept_stats = stats[KEPT_SIDE]
        for row_number, raw in enumerate(read_part(part), start=1):
            for counts in stats.values():
                counts.rows = row_number
            if self._progress is not None:
                self._progress.add()
            example = read_example(raw, row_format, data)
            held_out_flags.append(0)
            if isinstance(example, BadRow):
                kept_stats.count_bad(example)
                continue
            if row_format is not None:
                kept_stats.formats[row_format.name] += 1
            if not self._recipe.is_document:
                example = self._row_renderer.renderer.recover_chat(example)
            elif isinstance(example, Text) and self._recipe.text_span != (0.0, 1.0):
                start, end = (int(len(example.text) * share) for share in self._recipe.text_span)
                example = replace(example, text=example.text[start:end])
            if isinstance(example, Text) and not example.text.strip():
                continue  # a document's end may be blank
            held_out_flags[-1] = (
                held_out_share > 0 and digest_share(content_digest(example)) < held_out_share
            )
            stats[(KEPT_SIDE, HELD_OUT_SIDE)[held_out_flags[-1]]].count_example(example)
            yield row_number, example


# Jobs that other processes do.


# Results in the order of the jobs. Raises DataError if a process died, and what jobs raise.
def _run_jobs(
    jobs: Sequence[_BuildJob], recipe: BuildRecipe, workers: int
) -> Iterator[tuple[dict[str, str], _SideStats]]:
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(pickle.dumps(recipe), os.getpid()),
    )
    try:
        with hide_main_module():  # the workers start when jobs are submitted
            futures = [pool.submit(_run_job, job) for job in jobs]
        yield from (future.result() for future in futures)
    except BrokenExecutor:
        raise DataError(
            "a process that prepared rows died (out of memory?); lower data.workers, such as "
            "data.workers=1"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_START_LOCK = threading.Lock()


@contextlib.contextmanager
def hide_main_module() -> Iterator[None]:
    """Keep processes started in this context from importing the running program: it may import
    torch, and a script without `if __name__ == "__main__"` would start over in each."""
    # one thread at a time, or the second would put back what the first one put there
    with _START_LOCK:
        main_module = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main_module


# What a worker calls with each job; None in the parent.
_worker: _BuildWorker | None = None


def _start_worker(pickled_recipe: bytes, parent_pid: int) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent_pid, signal.SIGKILL)  # a parent that is killed cannot end its workers
    # one process for each core: threads would only compete
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = _BuildWorker(pickle.loads(pickled_recipe))


def _run_job(job: _BuildJob) -> tuple[dict[str, str], _SideStats]:
    assert _worker is not None
    with translate_library_errors():  # a panic could not be sent to the parent
        return _worker(*job)
