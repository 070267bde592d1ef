"""What `data.*_path` names → files → rows that know their file and line. The content decides, not the name.

JSON lists, one object per line, CSV, Parquet, Arrow, plain text, gzipped or not;
folders and globs of these, folders saved by `datasets`, data sets of the hub. Everything is streamed. Work can be
split: the rows of a file's parts, one part after the other, are the file's rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import hashlib
import itertools
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

from sft_play.config.schema import TEXT_TRAIN, WRITTEN, DataConfig
from sft_play.data.sources import json_rows, tables
from sft_play.data.sources.columns import shape_of
from sft_play.data.sources.file_kinds import DATA_SUFFIXES, TEXT_SUFFIXES, kind_of, suffix_of
from sft_play.data.sources.formats import recognise
from sft_play.data.sources.raw import (
    NOTE_PIECE,
    BadRow,
    RawRow,
    blocks,
    encoded,
    encoding_of,
    is_gzipped,
    is_long,
    pieces_of,
    require_file,
    text_pieces,
)
from sft_play.errors import DataError
from sft_play.files import atomic, cache_dir
from sft_play.log import one_line

# Names in folders of data that hold none.
NOT_DATA = frozenset({"dataset_infos.json", "__MACOSX"})


@dataclass(frozen=True)
class Source:
    """What a path option names: a file, a folder, a glob or `hub:owner/name`."""

    given: str
    encoding: str = "utf-8"

    def __str__(self) -> str:
        return self.given


AnySource = Source | Path | str


@dataclass(frozen=True)
class SourcePaths:
    """Where one of several sources is read from; `val` is None where it has no held-out rows of its own."""

    name: str
    train: Path | Source
    val: Path | Source | None


@dataclass(frozen=True)
class DataPaths:
    """Where each split is read from. `notes` are to be logged. With `sources`, `train` is the first of them."""

    train: Path | Source
    val: Path | Source | None
    test: Path | Source | None
    text: Path | Source | None
    notes: tuple[str, ...] = ()
    sources: tuple[SourcePaths, ...] = ()

    def files(self) -> list[tuple[str, Path | Source]]:
        """What is read, each with the name of its part: train, val, test, text, source NAME, source NAME (val)."""
        named: list[tuple[str, Path | Source | None]] = [] if self.sources else [("train", self.train)]
        for source in self.sources:
            named += [(f"source {source.name}", source.train), (f"source {source.name} (val)", source.val)]
        named += [("val", self.val), ("test", self.test), ("text", self.text)]
        return [(name, path) for name, path in named if path is not None]


@dataclass(frozen=True)
class Part:
    """A file, or a piece of one, that one process can read: picklable. `kind` is "auto" until the file was looked at.
    [start, end) are bytes of lines or row groups of Parquet; `first` is the number of the first line or row. `split`
    picks one of a data set that has several."""

    name: str
    kind: str = "auto"
    split: str = "train"
    text_wanted: bool = False
    start: int = 0
    end: int | None = None
    first: int = 1
    encoding: str = "utf-8"

    @property
    def path(self) -> Path:
        """The file."""
        return encoded(Path(self.name).expanduser(), self.encoding)


def split_of(part: str) -> str:
    """The split that a part of `DataPaths.files` belongs to."""
    if part.startswith("source "):
        return "val" if part.endswith(" (val)") else "train"
    return part


def data_paths(data: DataConfig) -> DataPaths:
    """The files that a run reads; the default `val_path` and `test_path`, for which a command may have had no rows, may
    be missing, which is noted. Raises DataError naming every other file that is missing."""
    missing: list[str] = []
    notes: list[str] = []
    unwritten: list[str] = []

    def find(key: str, value: str | None) -> Path | Source | None:
        source = None if value is None else _located(value, data.encoding)
        if value is None or source is not None:
            return source
        if not _is_default(key, data):
            missing.append(f"data.{key}: {_absent(value)}")
        elif key != "train_path" and _existing(data.train_path or "") is not None:
            notes.append(f"data.{key}: there is no {value}; it is not used")
        else:
            unwritten.append(f"data.{key}={value}")
        return None

    # every path is looked for before the first error is raised, so that one message names all that is missing
    train = find("train_path", data.train_path)
    sources: list[SourcePaths] = []
    for at, (source, name) in enumerate(zip(data.sources, data.source_names, strict=True)):
        rows, held = find(f"sources[{at}].path", source.path), find(f"sources[{at}].val_path", source.val_path)
        sources += [] if rows is None else [SourcePaths(name, rows, held)]
    val = find("val_path", data.val_path)
    test = find("test_path", data.test_path)
    text = find("text_path", data.text_path)
    if unwritten:
        target = "dapt-docx" if PurePath(data.train_path or "") == PurePath(TEXT_TRAIN) else "process"
        missing.append(
            f"{', '.join(unwritten)}: not there; `make {target}` writes them: run it first, or set data.train_path to "
            "your own file, for which val_path and test_path have no defaults"
        )
    train = sources[0].train if sources else train
    if missing or train is None:
        raise DataError("\n".join([*missing, f"looked from {Path.cwd()}"]))
    return DataPaths(train, val, test, text, tuple(notes), tuple(sources))


def _is_default(key: str, data: DataConfig) -> bool:
    if data.train_path is None or str(PurePath(data.train_path)) not in WRITTEN:
        return False
    default = getattr(DataConfig(train_path=data.train_path), key, None)  # a path of data.sources has none
    return default is not None and PurePath(getattr(data, key)) == PurePath(default)


def has_held_out_file(data: DataConfig) -> bool:
    """Whether a run reads validation or test rows from a file; a default that no command wrote is not read."""
    if any(source.val_path for source in data.sources):
        return True
    is_written = _is_default("train_path", data) and _existing(data.train_path or "") is not None
    given = {key: value for key in ("val_path", "test_path") if (value := getattr(data, key)) is not None}
    return any(
        not (is_written and _is_default(key, data)) or _existing(value) is not None for key, value in given.items()
    )


def find_source(value: str, *, encoding: str = "utf-8") -> Path | Source:
    """What a path option names; raises DataError with what lies beside a missing one."""
    source = _located(value, encoding)
    if source is None:
        raise DataError(f"{_absent(value)}; looked from {Path.cwd()}")
    return source


def _located(value: str, encoding: str) -> Path | Source | None:
    if value.startswith(tables.HUB):
        tables.hub_parts(value)
        return Source(value)
    path = _existing(value)
    if path is not None:
        return encoded(path, encoding)
    return Source(value, encoding) if glob.has_magic(value) and _glob(value) else None


def _existing(value: str) -> Path | None:
    try:
        path = Path(value).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long for the file system; ~someone who does not exist; a NUL
        return None


def _glob(pattern: str) -> list[Path]:
    try:
        paths = glob.glob(os.path.expanduser(pattern), recursive=True)  # noqa: PTH111, PTH207 - absolute patterns too
    except (OSError, ValueError, re.error):
        return []
    return sorted(map(Path, paths))


_HUB_LIKE = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def _absent(value: str) -> str:
    shown = one_line(value)
    if glob.has_magic(value):
        return f"no file matches {shown}"
    first, _, last = value.partition("/")
    is_data_name = suffix_of(Path(last)) in DATA_SUFFIXES | TEXT_SUFFIXES
    # owner/name without hub: is the usual slip; data/train.jsonl looks the same but for its suffix
    if _HUB_LIKE.fullmatch(value) and not is_data_name and _existing(first) is None:
        return f"{shown} does not exist here; a data set of the hub is written hub:{shown}"
    parent = Path(value).parent
    if (folder := _existing(str(parent))) is None:
        return f"{shown} does not exist; the folder {one_line(str(parent))} does not exist"
    with contextlib.suppress(OSError):
        there = [item for item in folder.iterdir() if not item.name.startswith(".")]
        # data first: a folder such as a checkout has much else
        there.sort(key=lambda item: (suffix_of(item) not in DATA_SUFFIXES, item.name))
        if names := [one_line(item.name, limit=60) for item in there[:12]]:
            return f"{shown} does not exist; {parent} holds {', '.join(names)}"
    return f"{shown} does not exist"


def read_rows(source: AnySource, *, split: str, text_wanted: bool = False) -> Iterator[RawRow | BadRow]:
    """The rows of a source, bad ones among them. `split` picks one of several in a saved folder or on the hub; with
    `text_wanted`, files that are not JSON or tables are plain text. Raises DataError for a whole file."""
    for part in data_files(source, split=split, text_wanted=text_wanted):
        yield from read_part(part)


def data_files(source: AnySource, *, split: str = "train", text_wanted: bool = False) -> list[Part]:
    """The files of a source in their order (folders sorted), each as one part; nothing is opened. Raises DataError
    where there are none, or one is a pipe, a device or not readable by this user."""
    given = str(source)
    if given.startswith(tables.HUB):
        tables.hub_parts(given)
        return [Part(given, "hub", split, text_wanted)]
    path = source if isinstance(source, Path) else _existing(given)
    if path is not None:
        return _files_at(path, split, text_wanted)
    matches = _glob(given)
    encoding = source.encoding if isinstance(source, Source) else "utf-8"
    matches = [encoded(match, encoding) for match in matches]
    parts = [part for match in matches for part in _files_at(match, split, text_wanted, is_one_of=True)]
    if not parts:
        raise DataError(_absent(given) if not matches else f"what matches {one_line(given)} holds no data files")
    return list(dict.fromkeys(parts))  # with `**` a folder and the files in it may both match


def _files_at(path: Path, split: str, text_wanted: bool, *, is_one_of: bool = False) -> list[Part]:
    if not path.is_dir():
        require_file(path)
        return [Part(str(path), "auto", split, text_wanted, encoding=encoding_of(path))]
    wanted = DATA_SUFFIXES | (TEXT_SUFFIXES if text_wanted else frozenset())
    parts = [
        Part(str(item), "saved" if item.is_dir() else "auto", split, text_wanted, encoding=encoding_of(path))
        for item in walk(path)
        if item.is_dir() or suffix_of(item) in wanted
    ]
    if not parts and not is_one_of:
        texts = sum(suffix_of(item) in TEXT_SUFFIXES for item in walk(path))
        is_text = f"; it holds {texts:,} text file{'s' if texts > 1 else ''}: task_mode: cpt trains plain text"
        looked_for = f"looked for {', '.join(sorted(wanted))} and a saved dataset"
        raise DataError(f"{path} holds no data files; {looked_for}{is_text if texts else ''}")
    return parts


def walk(folder: Path) -> list[Path]:
    """The files below a folder, sorted, without hidden ones; a folder saved by `datasets` is one item."""
    if is_saved(folder):
        return [folder]
    items: list[Path] = []
    seen: set[str] = set()
    for at, folders, names in os.walk(folder, followlinks=True):
        here = Path(at)
        real = os.path.realpath(at)  # links may lead in a circle
        if real in seen or (here != folder and is_saved(here)):
            folders[:] = []  # os.walk goes into what is left of this list
            items += [] if real in seen else [here]
            continue
        seen.add(real)
        folders[:] = [name for name in folders if not name.startswith(".") and name not in NOT_DATA]
        items += [here / name for name in names if not name.startswith(".") and name not in NOT_DATA]
    return sorted(item for item in items if item.is_file() or is_saved(item))  # the order of os.walk is the disk's


def is_saved(path: Path) -> bool:
    """Whether a folder was saved by `datasets`."""
    return (path / "dataset_dict.json").is_file() or (
        (path / "dataset_info.json").is_file() and (path / "state.json").is_file()
    )


def read_part(part: Part) -> Iterator[RawRow | BadRow]:
    """The rows of a part in their order; where plain text is wanted, one with a long text as the rows of its pieces.
    Raises DataError where the file cannot be read."""
    rows = _whole_rows(part)
    return itertools.chain.from_iterable(map(_in_pieces, rows)) if part.text_wanted else rows


def _in_pieces(row: RawRow | BadRow) -> Iterator[RawRow | BadRow]:
    """The row, or as many as its one long text has pieces, which tokenised whole would take gigabytes."""
    long = [] if isinstance(row, BadRow) else [key for key, value in row.data.items() if is_long(value)]
    # with two long texts a row is no document with columns beside it, and there is no one text to cut
    if isinstance(row, BadRow) or len(long) != 1:
        yield row
        return
    for number, (_, piece) in enumerate(pieces_of([row.data[long[0]]]), start=1):
        data = {**row.data, long[0]: piece}
        yield dataclasses.replace(row, where=f"{row.where} piece {number}", data=data, notes=(NOTE_PIECE,))


def _whole_rows(part: Part) -> Iterator[RawRow | BadRow]:
    kind = part.kind if part.kind != "auto" else kind_of(part.path, text_wanted=part.text_wanted)
    name, path = one_line(part.name, limit=4_000), part.path
    if kind == "lines":
        rows = json_rows.read_lines(path, name, start=part.start, end=part.end, first_line=part.first)
        yield from _unwrapped(rows) if part.end is None else rows
    elif kind == "objects":
        yield from _unwrapped(json_rows.read_objects(path, name))
    elif kind == "array":
        yield from json_rows.read_array(path, name)
    elif kind == "csv":
        yield from tables.read_csv(path, name)
    elif kind == "parquet":
        yield from tables.read_parquet(path, name, start=part.start, end=part.end, first_row=part.first)
    elif kind in ("arrow", "arrow stream"):
        yield from tables.read_arrow(path, name, is_stream=kind == "arrow stream")
    elif kind == "saved":
        yield from tables.read_saved(part.name, name, part.split)
    elif kind == "hub":
        yield from tables.read_hub(part.name, part.split)
    else:
        assert kind == "text", kind
        pieces = text_pieces(path)
        first = list(itertools.islice(pieces, 2))
        is_whole = len(first) == 1  # a second piece is read ahead to know it: whole files are named without a line
        for line, text in itertools.chain(first, pieces):
            yield RawRow(name if is_whole else f"{name}:{line}", {"text": text}, () if is_whole else (NOTE_PIECE,))


def _unwrapped(rows: Iterator[RawRow | BadRow]) -> Iterator[RawRow | BadRow]:
    """The rows as they are; of a single object that is no row, those of the list that it holds under one key."""
    first = list(itertools.islice(rows, 2))
    row = first[0] if len(first) == 1 else None
    if isinstance(row, RawRow) and recognise(row.data) is None:
        keys = [key for key, value in row.data.items() if shape_of(value) == "rows"]
        if len(keys) == 1:
            first = [RawRow(f"{row.where} {keys[0]}[{at}]", item) for at, item in enumerate(row.data[keys[0]])]
    return itertools.chain(first, rows)


def split_part(part: Part, *, part_bytes: int) -> list[Part]:
    """A file's part as smaller ones for different processes: lines in ranges of about `part_bytes`, Parquet by row
    groups, others not at all. Raises DataError where the file is empty, missing or of no known kind."""
    if part.kind != "auto":
        return [part]
    path = part.path
    kind = kind_of(path, text_wanted=part.text_wanted)
    whole = dataclasses.replace(part, kind=kind)
    if kind == "parquet":
        groups, first = [], 1
        for index, rows in enumerate(tables.parquet_groups(path)):
            groups.append(dataclasses.replace(whole, start=index, end=index + 1, first=first))
            first += rows
        return groups or [whole]
    # offsets are those of the bytes that are read, which another encoding's are not
    if kind == "lines" and part.encoding == "utf-8" and not is_gzipped(path) and path.stat().st_size > part_bytes:
        ranges = _line_ranges(whole, part_bytes)
        return ranges if len(ranges) > 1 else [whole]
    return [whole]


def _line_ranges(part: Part, part_bytes: int) -> list[Part]:
    ranges: list[Part] = []
    start, first, line, at = 0, 1, 1, 0
    for block in blocks(part.path):
        done = 0
        while at + len(block) - start > part_bytes:  # a part may end in this block: at the next line end
            cut = block.find(b"\n", max(done, start + part_bytes - at)) + 1
            if cut == 0:
                break
            line += block.count(b"\n", done, cut)
            ranges.append(dataclasses.replace(part, start=start, end=at + cut, first=first))
            start, first, done = at + cut, line, cut
        line += block.count(b"\n", done)
        at += len(block)
    if start < at:  # the rest, which may lack a line end
        ranges.append(dataclasses.replace(part, start=start, end=at, first=first))
    return ranges


def content_digest_of(source: AnySource) -> str:
    """Digest of what a source's files hold: of one file the file's own, of a data set of the hub its name's."""
    path = source if isinstance(source, Path) else _existing(str(source))
    if path is not None and path.is_file():
        return digest_of(path)
    found = _glob(str(source)) if path is None else path.rglob("*")
    files = sorted(file for file in found if file.is_file())
    named = [[str(file if path is None else file.relative_to(path)), digest_of(file)] for file in files]
    return hashlib.sha256(json.dumps(named or str(source)).encode()).hexdigest()


def digest_of(file: Path) -> str:
    """SHA-256 of a file's content, remembered until its size, times, inode or path change."""
    state = file.stat()
    # as git does: a file whose size, times and inode are the same has not changed
    identity = [str(file.resolve()), state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino, state.st_dev]
    note = cache_dir() / "digests" / hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    with contextlib.suppress(OSError, ValueError):
        digest = note.read_text(encoding="ascii")
        if len(digest) == 64:  # else half-written
            return digest
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if time.time() - state.st_mtime > 2:  # a file that is being written may change within the clock's tick
        with contextlib.suppress(OSError):
            atomic.write(note, digest)
    return digest
