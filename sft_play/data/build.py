"""Data files → tokens in an Arrow cache: read, rendered and verified in several processes, mapped, never held whole.

A cache is keyed by everything that decides a row's tokens: the content of the files, the tokenizer with its template,
the options that matter, and this code. It is made aside and renamed when it is whole; who else wants it meanwhile
(another rank, another run) waits for the lock and finds it. Bad rows are part of what is kept: they are judged anew at
every start, in `dataset.py`.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import json
import os
import pickle
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from sft_play.cache import cache_dir, locked
from sft_play.config.schema import DataConfig
from sft_play.data.files import AnySource, BadRow, Part, data_files, read_part, source_digest
from sft_play.data.formats import Chat, Example, Format, Text, first_format
from sft_play.data.heap import give_back
from sft_play.data.process import content_digest
from sft_play.data.render import CHAT, LOST_TO_LENGTH, TOO_LONG, Draft, Rendered, Renderer, TokenizerParts, TokenRow
from sft_play.data.survey import BATCH_CHARS, SHOWN_BAD_ROWS, LimitCost, add_up, characters, example_of, trained_runs
from sft_play.data.workers import News, bytes_of, how_many, pieces_of, together
from sft_play.errors import DataError

KEPT, HELD = "kept", "held"
"""The rows of a source, and those of it that are split off for validation."""
BATCH_ROWS = 256
"""Rows that are rendered and tokenised together, fewer where they are longer than BATCH_CHARS."""

_SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32())), ("labels", pa.list_(pa.int32())), ("source", pa.int8())])
_SCHEMA_WITH_CHATS = _SCHEMA.append(pa.field("chat", pa.string()))
_NOT_IN_KEY = frozenset(
    {
        *("train_path", "val_path", "test_path", "text_path", "text_fraction", "val_fraction", "on_bad_row"),
        *("max_lost_fraction", "packing", "sources", "workers", "process", "style", "documents", "chat_template"),
    }
)
"""Options of the data section that decide no row's tokens; the template is part of the tokenizer."""


@dataclass(frozen=True)
class Recipe:
    """How rows are made from examples: all that another process needs.

    `documents`: plain text that is joined and cut into blocks of max_seq_len; else rows of chats. `held_share` of the
    examples, by content hash, are split off; `keeps_chats` keeps the conversations beside their tokens.
    """

    tokenizer: TokenizerParts
    data: DataConfig
    max_seq_len: int
    today: date
    documents: bool = False
    held_share: float = 0.0
    keeps_chats: bool = False


@dataclass
class Counts:
    """What became of a source's rows; sums of those of its parts."""

    rows: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    first_bad: list[BadRow] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """Rows that an option asks to leave out, by reason."""
    too_long: int = 0
    first_too_long: str = ""
    shortest_prompt: int = 0
    """Tokens before the first trained one in the row that comes nearest to keeping it."""
    kept: int = 0
    chats: int = 0
    texts: int = 0
    roles: Counter[str] = field(default_factory=Counter)
    """Turns by role."""
    repeated: int = 0
    """Rows, or documents, with the tokens of an earlier one."""
    tokens: int = 0
    trained: int = 0
    cut_rows: int = 0
    tokens_cut: int = 0
    lost: int = 0
    merged: int = 0
    untrained_turns: int = 0
    stripped_think: int = 0
    special_rows: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    methods: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    first_noted: dict[str, str] = field(default_factory=dict)
    cost: LimitCost = field(default_factory=lambda: LimitCost("end"))
    """What longer limits would keep of the rows that are longer than this one."""

    @property
    def whole_trained(self) -> int:
        """Trained tokens before anything was cut."""
        return self.trained + self.lost

    def note(self, notes: Iterable[str], where: str) -> None:
        """Count what is to be told of a row that is used."""
        for note in notes:
            self.notes[note] += 1
            self.first_noted.setdefault(note, where)

    def count_bad(self, row: BadRow) -> None:
        """Count a row that is not used."""
        if row.is_asked:
            self.left_out[row.reason] += 1
            return
        self.bad[row.reason] += 1
        if len(self.first_bad) < SHOWN_BAD_ROWS:
            self.first_bad.append(row)

    def add(self, other: Counts) -> None:
        """Add what became of the rows of a later part."""
        add_up(self, other)


@dataclass(frozen=True)
class Built:
    """The token rows of a source: Arrow files by KEPT and HELD, and what became of the rows by the same names."""

    folder: Path
    files: dict[str, tuple[str, ...]]
    counts: dict[str, Counts]

    def digests(self, name: str) -> Any:
        """Eight bytes for the tokens of each row, or each document: uint64 of shape [rows], sorted, no two alike."""
        return np.load(self.folder / _digests_file(name))

    def dataset(self, name: str) -> Any:
        """The rows as a mapped `datasets.Dataset`; None where there are none."""
        from datasets import Dataset, concatenate_datasets

        parts = [Dataset.from_file(str(self.folder / file)) for file in self.files.get(name, ())]
        parts = [part for part in parts if len(part)]
        return concatenate_datasets(parts) if parts else None


def build(source: AnySource, recipe: Recipe, *, split: str, workers: int | str = "auto") -> Built:
    """The token rows of a source, from the cache or made now.

    Raises:
        DataError: a file cannot be read, its columns are those of no format, or the cache cannot be written.
    """
    parts = _parts(source, recipe, split)
    try:
        folder = cache_dir() / "tokens" / _key(source, parts, recipe, split)
    except OSError as error:
        raise DataError(f"{error.filename or source} cannot be read: {error.strerror or error}") from error
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f"{folder.name}.lock"), waiting=_WAITING):
            found = _load(folder)
            if found is not None:
                return found
            return _make(folder, parts, recipe, split, workers)
    except OSError as error:
        raise DataError(
            f"the token cache {folder.parent} cannot be written: {error.strerror or error}; free space there, or name "
            "another folder in SFT_PLAY_CACHE"
        ) from error


# The key.


def _parts(source: AnySource, recipe: Recipe, split: str) -> list[Part]:
    return data_files(source, split=split, text_wanted=recipe.documents)


def _key(source: AnySource, parts: Sequence[Part], recipe: Recipe, split: str) -> str:
    options = {key: value for key, value in recipe.data.model_dump(mode="json").items() if key not in _NOT_IN_KEY}
    writes_date = any("strftime_now" in text for _, text in recipe.tokenizer.templates)
    decides = {
        "code": _code_digest(),
        "tokenizer": hashlib.sha256(repr(recipe.tokenizer).encode()).hexdigest(),
        "options": options,
        "limit": recipe.max_seq_len,
        "date": str(recipe.today) if writes_date and not recipe.data.template_date else "",
        "kind": [split, recipe.documents, recipe.held_share, recipe.keeps_chats],
        "source": str(source),
        "content": [[part.name, part.kind, _content(part)] for part in parts],
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:32]


def _code_digest() -> str:
    """Digest of the code that makes rows: what stands beside this file, and the tokenizers' version."""
    import tokenizers

    found = hashlib.sha256(tokenizers.__version__.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def _content(part: Part) -> str:
    """Digest of what a part's file holds."""
    if part.kind == "hub":
        return _hub_commit(part.name)
    path = part.path
    files = sorted(item for item in path.rglob("*") if item.is_file()) if path.is_dir() else [path]
    return hashlib.sha256("".join(digest_of(file) for file in files).encode()).hexdigest()


def content_digest_of(source: AnySource) -> str:
    """Digest of what a source's files hold, for a run's record; that of a single file is the file's own."""
    path = Path(str(source)).expanduser()
    with contextlib.suppress(OSError):
        if path.is_file():
            return digest_of(path)
    return source_digest(source)


def _hub_commit(name: str) -> str:
    """The commit that a data set of the hub stands at; the day where the hub does not say."""
    from huggingface_hub import HfApi

    with contextlib.suppress(Exception):  # offline, gated, renamed: reading it says so
        return str(HfApi().dataset_info(name.split(":")[1], timeout=10).sha)
    return str(date.today())


def digest_of(file: Path) -> str:
    """SHA-256 of a file's content; remembered as long as its size, times and place on the disk stay."""
    state = file.stat()
    stands = [str(file.resolve()), state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino, state.st_dev]
    note = cache_dir() / "digests" / hashlib.sha256(json.dumps(stands).encode()).hexdigest()
    with contextlib.suppress(OSError, ValueError):
        found = note.read_text(encoding="ascii")
        if len(found) == 64:
            return found
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if time.time() - state.st_mtime > 2:  # a file that is being written may change within the clock's tick
        with contextlib.suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            aside = note.with_name(f"{note.name}.{os.getpid()}")
            aside.write_text(digest, encoding="ascii")
            aside.replace(note)
    return digest


# The cache.


_META = "meta.pickle"


def _digests_file(name: str) -> str:
    return f"{name}.digests.npy"


_WAITING = "Data: another process prepares the same rows; waiting for it"


def _load(folder: Path) -> Built | None:
    """A cache that is there and whole."""
    try:
        files, counts = pickle.loads((folder / _META).read_bytes())
    except FileNotFoundError:
        return None
    except Exception:  # made by another Python, or damaged: it is made again
        shutil.rmtree(folder, ignore_errors=True)
        return None
    if all((folder / file).is_file() for names in files.values() for file in names):
        return Built(folder, files, counts)
    shutil.rmtree(folder, ignore_errors=True)
    return None


def _make(folder: Path, parts: Sequence[Part], recipe: Recipe, split: str, workers: int | str) -> Built:
    """Make the cache aside and give it its name; what an earlier try left is removed."""
    for left in folder.parent.glob(f"{folder.name}.*.part"):
        shutil.rmtree(left, ignore_errors=True)
    aside = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    aside.mkdir()
    try:
        files, counts = _rows_of(aside, parts, recipe, split, workers)
        if recipe.documents:
            files = {name: _blocks(aside, name, found, recipe, split) for name, found in files.items()}
        (aside / _META).write_bytes(pickle.dumps((files, counts)))
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return Built(folder, files, counts)


_Files = dict[str, tuple[str, ...]]
_AllCounts = dict[str, Counts]


def _rows_of(
    folder: Path, parts: Sequence[Part], recipe: Recipe, split: str, workers: int | str
) -> tuple[_Files, _AllCounts]:
    """Every part's rows in a file of its own, made here or by other processes."""
    total = bytes_of(parts)
    count = how_many(workers, total)
    jobs: list[_Job] = []
    for part in parts:
        shape = _shape_of(part, recipe.data)
        pieces = pieces_of(part, count=count, total_bytes=total)
        jobs += [_Job(len(jobs) + at, piece, shape, str(folder)) for at, piece in enumerate(pieces)]
    count = min(count, len(jobs))
    digests: dict[str, list[Any]] = {KEPT: [], HELD: []}
    results = _together(jobs, recipe, count, split) if count > 1 else _here(jobs, recipe, split)
    files: dict[str, list[str]] = {KEPT: [], HELD: []}
    counts = {KEPT: Counts(cost=LimitCost(recipe.data.truncate)), HELD: Counts(cost=LimitCost(recipe.data.truncate))}
    for result in results:
        for name, file in result.files.items():
            files[name].append(file)
        for name, found in result.counts.items():
            counts[name].add(found)
        for name, made in result.digests.items():
            digests[name].append(made)
    for name, all_made in digests.items():
        every = np.concatenate([np.zeros(0, np.uint64), *all_made])
        distinct = np.unique(every)
        counts[name].repeated = len(every) - len(distinct)
        np.save(folder / _digests_file(name), distinct)
    return {name: tuple(found) for name, found in files.items()}, counts


def _shape_of(part: Part, data: DataConfig) -> Format | None:
    """The format of a file; raises DataError where its columns are those of none."""
    return first_format(read_part(part), data)[1]


@dataclass(frozen=True)
class _Job:
    """A piece of a file, its format, and where its rows go."""

    number: int
    part: Part
    shape: Format | None
    folder: str


@dataclass(frozen=True)
class _Result:
    files: dict[str, str]
    counts: _AllCounts
    digests: dict[str, Any]


def _here(jobs: Sequence[_Job], recipe: Recipe, split: str) -> Iterator[_Result]:
    maker = _Maker(recipe)
    news = News(f"Data {split}", "prepared")
    for job in jobs:
        yield maker.make(job, news=news)


def _together(jobs: Sequence[_Job], recipe: Recipe, count: int, split: str) -> Iterator[_Result]:
    news = News(f"Data {split}", "prepared")
    return together(jobs, _maker, recipe, count=count, done=lambda result: news.add(result.counts[KEPT].rows))


def _maker(recipe: Recipe) -> Callable[[_Job], _Result]:
    """What makes rows by this recipe, once in every process."""
    return _Maker(recipe).make


# Making rows.


class _Maker:
    """Makes rows by one recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._renderer = Renderer(recipe.tokenizer, recipe.data, max_seq_len=recipe.max_seq_len, today=recipe.today)

    def make(self, job: _Job, *, news: News | None = None) -> _Result:
        """The rows of a piece, written into its files."""
        truncate = self._recipe.data.truncate
        counts = {KEPT: Counts(cost=LimitCost(truncate)), HELD: Counts(cost=LimitCost(truncate))}
        with contextlib.ExitStack() as stack:
            stack.enter_context(_collecting_seldom())
            writers = {
                name: stack.enter_context(_Writer(Path(job.folder), f"{job.number:06d}.{name}.arrow", self._recipe))
                for name in self._names()
            }
            for batch in self._begun(job, counts):
                self._finish(batch, counts[batch.name], writers[batch.name])
                gc.collect(0)
                give_back(max(map(characters, batch.examples), default=0))
                if news is not None:
                    news.add(len(batch.examples))
        return _Result(
            {name: writer.name for name, writer in writers.items()},
            counts,
            {name: np.frombuffer(writer.digests, np.uint64) for name, writer in writers.items()},
        )

    def _begun(self, job: _Job, counts: _AllCounts) -> Iterator[_Batch]:
        """The piece's examples in batches: the tokenizer has one of them while the next is read and rendered."""
        before: _Batch | None = None
        with ThreadPoolExecutor(1) as tokenizer:
            for examples in _batches(self._examples(job, counts[KEPT])):
                for name, share in self._shared(examples).items():
                    _count_examples(share, counts[name])
                    begun = self._begin(name, share, tokenizer)
                    if before is not None:
                        yield before
                    before = begun
            if before is not None:
                yield before

    def _begin(self, name: str, examples: Sequence[Example], tokenizer: ThreadPoolExecutor) -> _Batch:
        """A batch that is rendered and on its way through the tokenizer."""
        renderer = self._renderer
        if self._recipe.documents:
            texts = [example for example in examples if isinstance(example, Text)]
            return _Batch(name, texts, [], tokenizer.submit(renderer.documents, [text.text for text in texts]))
        expanded = [one for example in examples for one in renderer.expand(example)]
        drafts = renderer.drafts(expanded)
        return _Batch(name, expanded, drafts, tokenizer.submit(renderer.encodings, drafts))

    def _names(self) -> tuple[str, ...]:
        return (KEPT, HELD) if self._recipe.held_share else (KEPT,)

    def _examples(self, job: _Job, counts: Counts) -> Iterator[Example]:
        """The piece's examples; rows that are none are counted."""
        data = self._recipe.data
        for raw in read_part(job.part):
            counts.rows += 1
            example = example_of(raw, job.shape, data)
            if isinstance(example, BadRow):
                counts.count_bad(example)
            else:
                if job.shape is not None:
                    counts.formats[job.shape.name] += 1
                yield example

    def _shared(self, batch: Sequence[Example]) -> dict[str, list[Example]]:
        """A batch as what is kept and what is split off."""
        share = self._recipe.held_share
        if not share:
            return {KEPT: list(batch)}
        found: dict[str, list[Example]] = {KEPT: [], HELD: []}
        for example in batch:
            found[HELD if content_share(example) < share else KEPT].append(example)
        return found

    def _finish(self, batch: _Batch, counts: Counts, writer: _Writer) -> None:
        """Count and write a batch whose tokens are there."""
        tokens = batch.tokens.result()
        if self._recipe.documents:
            documents = [TokenRow(one.where, ids, []) for one, ids in zip(batch.examples, tokens, strict=True)]
            counts.kept += len(documents)
            counts.tokens += sum(len(row.input_ids) for row in documents)
            writer.write(documents, batch.examples)
            return
        rows = []
        chats = []
        for one, whole in zip(batch.examples, self._renderer.tokenised(batch.drafts, tokens), strict=True):
            row = self._row(whole, counts)
            if row is not None:
                rows.append(row)
                chats.append(one)
        writer.write(rows, chats)

    def _row(self, whole: Rendered | BadRow, counts: Counts) -> TokenRow | None:
        """The row that is left of a rendered example, counted; None where there is none."""
        if isinstance(whole, BadRow):
            counts.count_bad(whole)
            return None
        row = self._renderer.cut(whole)
        if len(whole.input_ids) > self._recipe.max_seq_len:
            counts.cost.add(len(whole.labels), trained_runs(whole.labels))
        if isinstance(row, BadRow):
            self._count_too_long(whole, row, counts)
            return None
        counts.kept += 1
        counts.note(whole.notes, whole.where)
        counts.methods[row.method] += 1
        counts.tokens += len(row.input_ids)
        counts.trained += row.trained
        counts.cut_rows += row.cut > 0
        counts.tokens_cut += row.cut
        counts.lost += row.lost
        counts.merged += row.merged
        counts.untrained_turns += row.untrained_turns
        counts.stripped_think += row.stripped_think
        counts.special_rows += row.special_in_text > 0
        return row

    def _count_too_long(self, whole: Rendered, row: BadRow, counts: Counts) -> None:
        assert row.reason in (LOST_TO_LENGTH, TOO_LONG), row
        runs = trained_runs(whole.labels)
        counts.too_long += 1
        counts.first_too_long = counts.first_too_long or f"{row.where}: {row.detail}"
        counts.shortest_prompt = min(filter(None, (counts.shortest_prompt, runs[0][0])), default=0)
        counts.lost += sum(end - max(begin, 1) for begin, end in runs)


@dataclass(frozen=True)
class _Batch:
    """Examples on their way through the tokenizer: those of documents have no drafts, and lists of ids as tokens."""

    name: str
    examples: Sequence[Example]
    drafts: Sequence[Draft | BadRow]
    tokens: Future[list[Any]]


def _count_examples(examples: Sequence[Example], counts: Counts) -> None:
    for example in examples:
        counts.chats += isinstance(example, Chat)
        counts.texts += isinstance(example, Text)
        if isinstance(example, Chat):
            counts.roles.update([message["role"] for message in example.messages])
        counts.note(example.notes, example.where)


def _batches(examples: Iterable[Example]) -> Iterator[list[Example]]:
    """Up to BATCH_ROWS examples at once, fewer where they are long."""
    batch: list[Example] = []
    chars = 0
    for example in examples:
        size = characters(example)
        if batch and (len(batch) == BATCH_ROWS or chars + size > BATCH_CHARS):
            yield batch
            batch, chars = [], 0
        batch.append(example)
        chars += size
    if batch:
        yield batch


@contextlib.contextmanager
def _collecting_seldom() -> Iterator[None]:
    """Python looks for cyclic garbage only when told: rows are many objects, and make none."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def content_share(example: Example) -> float:
    """A number in [0, 1) from the example's content alone: the same row always falls on the same side."""
    return int.from_bytes(content_digest(example)[:8], "big") / 2**64


class _Writer:
    """An Arrow stream file of token rows."""

    def __init__(self, folder: Path, name: str, recipe: Recipe) -> None:
        self.name = name
        self.digests = bytearray()
        """Eight bytes for the tokens of each row."""
        self._path = folder / name
        is_judged = not recipe.held_share or f".{HELD}." in name
        self._keeps_chats = recipe.keeps_chats and is_judged and not recipe.documents
        self._schema = _SCHEMA_WITH_CHATS if self._keeps_chats else _SCHEMA

    def __enter__(self) -> _Writer:
        self._file = pa.OSFile(str(self._path), "wb")
        self._stream = pa.ipc.new_stream(self._file, self._schema)
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._file.close()

    def write(self, rows: Sequence[TokenRow], examples: Sequence[Example]) -> None:
        """A batch of rows with the examples they are made of."""
        if not rows:
            return
        offsets, ids = _joined([row.input_ids for row in rows])
        label_offsets, labels = _joined([row.labels for row in rows])
        sources = np.array([row.source != CHAT for row in rows], np.int8)
        tokens = memoryview(ids).cast("B")
        for begin, end in itertools.pairwise((offsets * ids.itemsize).tolist()):
            self.digests += hashlib.blake2b(tokens[begin:end], digest_size=8).digest()
        columns = [_lists(offsets, ids), _lists(label_offsets, labels), _arrow(sources)]
        if self._keeps_chats:
            columns.append(pa.array([_as_json(example) for example in examples], pa.string()))
        self._stream.write_batch(pa.record_batch(columns, schema=self._schema))


def _joined(values: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    """Lists of tokens joined: int32 of shape [lists + 1], where each begins, and of shape [tokens]."""
    lengths = np.fromiter(map(len, values), np.int32, len(values))
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets, np.fromiter(itertools.chain.from_iterable(values), np.int32, int(offsets[-1]))


def _arrow(values: Any) -> Any:
    """A numpy array of integers as an Arrow one; `pyarrow.array` would load pandas first, half a second."""
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def _lists(offsets: Any, tokens: Any) -> Any:
    """Joined lists as an Arrow column, without an object for each token."""
    return pa.ListArray.from_arrays(_arrow(offsets), _arrow(tokens))


def _as_json(example: Example) -> str | None:
    if not isinstance(example, Chat):
        return None
    return json.dumps([example.where, example.messages, example.tools], ensure_ascii=False)


def chat_of(text: str) -> Chat:
    """A conversation as it was kept beside its tokens."""
    where, messages, tools = json.loads(text)
    return Chat(where, tuple(messages), tuple(tools))


# Blocks of text.


def _blocks(folder: Path, name: str, files: Sequence[str], recipe: Recipe, split: str) -> tuple[str, ...]:
    """Documents joined and cut into blocks of exactly max_seq_len tokens, in a file of their own.

    The rest that fills no block is left over; a held-out text shorter than one block is a block by itself.
    """
    size = recipe.max_seq_len
    made = f"{name}.blocks.arrow"
    carry = np.zeros(0, np.int32)
    wrote = False
    with pa.OSFile(str(folder / made), "wb") as target, pa.ipc.new_stream(target, _SCHEMA) as stream:
        for file in files:
            with pa.memory_map(str(folder / file)) as source, pa.ipc.open_stream(source) as documents:
                for batch in documents:
                    ids = batch.column(0)
                    carry = np.concatenate([carry, ids.flatten().to_numpy()])
                    whole = len(carry) // size * size
                    if whole:
                        stream.write_batch(_block_batch(carry[:whole], size))
                        carry, wrote = carry[whole:].copy(), True
            (folder / file).unlink()
        if not wrote and len(carry) and (split != "train" or name == HELD):
            stream.write_batch(_block_batch(carry, len(carry)))
    return (made,)


def _block_batch(tokens: Any, size: int) -> Any:
    """Full blocks as a batch: every token is trained."""
    column = _lists(np.arange(0, len(tokens) + 1, size, dtype=np.int32), np.ascontiguousarray(tokens, np.int32))
    sources = _arrow(np.ones(len(tokens) // size, np.int8))
    return pa.record_batch([column, column, sources], schema=_SCHEMA)
