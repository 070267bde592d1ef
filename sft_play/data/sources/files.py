"""What `data.*_path` names → files → rows that know their file and line. The content decides, not
the name.

JSON lists, one object per line, CSV, Parquet, Arrow, plain text, gzipped or not; folders and
globs of these, folders saved by `datasets`, data sets of the hub. Everything is streamed. Work
can be split: the rows of a file's parts, one part after the other, are the file's rows.
"""

import contextlib
import glob
import hashlib
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from sft_play.config.schema import MANAGED_HELD_OUT_FILES, PROCESSED_TEXT_PATH, DataConfig
from sft_play.data.sources import json_rows, tables
from sft_play.data.sources.formats import recognise_format
from sft_play.data.sources.raw import (
    BLOCK_BYTES,
    BOM,
    GZIP_MARK,
    HEAD_BYTES,
    NOTE_PIECE,
    BadRow,
    RawRow,
    is_gzipped,
    mark_encoding,
    path_encoding,
    read_head,
    read_text_pieces,
    require_file,
    wide_encoding_error,
)
from sft_play.errors import DataError
from sft_play.files import atomic, cache_dir
from sft_play.log import one_line
from sft_play.starter import find_starter_file

# What a data file is: its content decides; its name only between kinds that the content could be.

# Names of plain text; any other file whose content does not begin like JSON is text only where text
# is asked.
TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".text"})
TABLE_SUFFIXES = frozenset({".csv", ".tsv"})
ROW_FILE_SUFFIXES = TABLE_SUFFIXES.union(
    (".jsonl", ".json", ".ndjson"), (".parquet", ".pq", ".arrow", ".feather", ".ipc")
)

_BINARY_SIGNATURES = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow stream"}
_UNREADABLE_SIGNATURES = {
    b"PK\x03\x04": "a zip archive or an Office file: unpack it, or save the sheet as CSV (UTF-8)",
    b"BZh": "compressed with bzip2: bunzip2",
    b"\xfd7zXZ": "compressed with xz: unxz",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: unzstd",
    b"7z\xbc\xaf": "a 7z archive: unpack it",
    b"FEA1": (
        "Feather 1, which nothing reads any more: write it with"
        " pyarrow.feather.write_feather(version=2)"
    ),
    b"%PDF": "a PDF document: make dapt-docx turns documents into text",
    b"SQLite format 3": "an SQLite database: write the table as CSV or JSONL",
    b"\x89HDF": "HDF5: write it as Parquet (pandas: to_parquet)",
    b"\x80\x04\x95": "a Python pickle, which is not read: it could run code; write it as JSONL",
    b"\x80\x05\x95": "a Python pickle, which is not read: it could run code; write it as JSONL",
    b"version https://git-lfs": "a Git LFS pointer, not the file itself: git lfs pull",
    GZIP_MARK: "gzipped twice: gunzip it once",
}


def file_kind(path: Path, *, wants_text: bool = False) -> str:
    """What a file is: lines, objects, array, csv, parquet, arrow, arrow stream or text, by its
    content; by its name only between kinds that the content could be. Raises DataError where it is
    empty, or of no kind that can be read.
    """
    beginning = read_head(path)
    for signature, kind in _BINARY_SIGNATURES.items():
        if beginning.startswith(signature):
            if is_gzipped(path):  # pyarrow seeks in the file
                raise DataError(
                    f"{path} is gzipped {kind.title()}, which is read from its end: gunzip it"
                )
            return kind
    for signature, advice in _UNREADABLE_SIGNATURES.items():
        if beginning.startswith(signature):
            raise DataError(f"{path} is {advice}")
    if encoding_error := wide_encoding_error(path, beginning):
        raise encoding_error
    # "ignore": the head may end inside a character; bytes that are not UTF-8 are named, with line,
    # while rows are read
    text = beginning.removeprefix(BOM).decode("utf-8", "ignore").lstrip()
    if not text:
        problem = "the file is blank" if beginning else "the file is empty"
        if len(beginning) == HEAD_BYTES:
            problem = f"its first {HEAD_BYTES:,} bytes are blank"
        raise DataError(f"{path} has no rows: {problem}")
    suffix = data_suffix(path)
    if suffix in TEXT_SUFFIXES or (wants_text and suffix not in ROW_FILE_SUFFIXES):
        # a text may begin with a bracket: rows only where they are objects, with a text where it is
        # wanted
        line = text.partition("\n")[0]
        is_list = not wants_text and re.match(r"\[\s*\{\s*\"", text) is not None
        is_object = (
            line.startswith("{")
            and getattr(json_rows.parse_line(line, ""), "reason", "") != "not valid JSON"
        )
        holds_rows = is_list or (is_object and ('"text"' in line or not wants_text))
        return _json_kind(text) if holds_rows else "text"
    if text[0] in "[{":
        return _json_kind(text)
    if suffix in TABLE_SUFFIXES:
        return "csv"
    advice = (
        "rows are JSON objects, one per line, or a list (json.dumps writes them, print and str do"
        " not); or a table with a header line (.csv)"
    )
    if re.match(r"<(!doctype|html|\?xml|head|body)", text, re.IGNORECASE):
        advice = "a web page saved in place of the file? Fetch the file itself"
    raise DataError(f'{path} is not JSON: it begins with "{one_line(text[:40])}"; {advice}')


def _json_kind(beginning: str) -> str:
    first_line, line_end, following = beginning.partition("\n")
    first_row, second_row = (
        json_rows.parse_line(line, "") for line in (first_line, following.partition("\n")[0])
    )
    if beginning[0] == "[":  # a list of messages is a row
        is_row = line_end and following.lstrip().startswith("[") and isinstance(first_row, RawRow)
        return "lines" if is_row else "array"
    # where rows stand on lines of their own and the first was cut off, the second line is a row
    spans_lines = (
        json_rows.OBJECT_CONTINUES in str(first_row)
        and isinstance(second_row, BadRow)
        and bool(following.strip())
    )
    return "objects" if spans_lines else "lines"


def data_suffix(path: Path) -> str:
    """What a file's name ends in, `.gz` left out, in lower case."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


# Names in folders of data that hold none.
NON_DATA_NAMES = frozenset({"dataset_infos.json", "__MACOSX"})


@dataclass(frozen=True)
class DataSource:
    """What a path option names: a file, a folder, a glob or `hub:owner/name`."""

    path: str
    encoding: str = "utf-8"

    def __str__(self) -> str:
        return self.path


AnySource = DataSource | Path | str


@dataclass(frozen=True)
class SourcePaths:
    """Where one of several sources is read from; `val` is None where it has no held-out rows of its
    own."""

    name: str
    train: Path | DataSource
    val: Path | DataSource | None


@dataclass(frozen=True)
class DataPaths:
    """Where each split is read from. `notes` are to be logged. With `sources`, `train` is the first
    of them."""

    train: Path | DataSource
    val: Path | DataSource | None
    test: Path | DataSource | None
    text: Path | DataSource | None
    notes: tuple[str, ...] = ()
    sources: tuple[SourcePaths, ...] = ()

    def named_paths(self) -> list[tuple[str, Path | DataSource]]:
        """What is read, each with the name of its part: train, val, test, text, source NAME, source
        NAME (val)."""
        pairs: list[tuple[str, Path | DataSource | None]] = (
            [] if self.sources else [("train", self.train)]
        )
        for source in self.sources:
            pairs += [
                (f"source {source.name}", source.train),
                (f"source {source.name} (val)", source.val),
            ]
        pairs += [("val", self.val), ("test", self.test), ("text", self.text)]
        return [(name, path) for name, path in pairs if path is not None]


@dataclass(frozen=True)
class FilePart:
    """A file, or a piece of one, that one process can read: picklable. `kind` is "auto" until the
    file was looked at. [start, end) are bytes of lines or row groups of Parquet; `first_number`
    counts the first line or row from 1. `split` picks one of a data set that has several."""

    name: str
    kind: str = "auto"
    split: str = "train"
    wants_text: bool = False
    start: int = 0
    end: int | None = None
    first_number: int = 1
    encoding: str = "utf-8"

    @property
    def path(self) -> Path:
        """The file."""
        return mark_encoding(Path(self.name).expanduser(), self.encoding)


def data_part_split(data_part: str) -> str:
    """The split that a part of `DataPaths.named_paths` belongs to."""
    if data_part.startswith("source "):
        return "val" if data_part.endswith(" (val)") else "train"
    return data_part


def find_data_paths(data: DataConfig) -> DataPaths:
    """Find the files that a run reads; the default `val_path` and `test_path` may be missing, since
    a command may have had no rows for them: that is noted. Raises DataError naming every other file
    that is missing.
    """
    missing: list[str] = []
    notes: list[str] = []
    missing_defaults: list[str] = []

    def locate(key: str, value: str | None) -> Path | DataSource | None:
        source = value and _locate(value, data.encoding)
        if value is None or source:
            return source or None
        if not _is_default_path(key, data):
            missing.append(f"data.{key}: {_describe_missing(value)}")
        elif key != "train_path" and _existing_path(data.train_path or "") is not None:
            notes.append(f"data.{key}: there is no {value}; it is not used")
        else:
            missing_defaults.append(f"data.{key}={value}")
        return None

    # every path is looked for before the first error is raised, so that one message names all that
    # is missing
    train = locate("train_path", data.train_path)
    sources: list[SourcePaths] = []
    for index, (source, name) in enumerate(zip(data.sources, data.source_names, strict=True)):
        train_rows = locate(f"sources[{index}].path", source.path)
        held_out = locate(f"sources[{index}].val_path", source.val_path)
        if train_rows is not None:
            sources.append(SourcePaths(name, train_rows, held_out))
    val = locate("val_path", data.val_path)
    test = locate("test_path", data.test_path)
    text = locate("text_path", data.text_path)
    if missing_defaults:
        target = (
            "dapt-docx"
            if PurePath(data.train_path or "") == PurePath(PROCESSED_TEXT_PATH)
            else "process"
        )
        missing.append(
            f"{', '.join(missing_defaults)}: not there; `make {target}` writes them: run it first,"
            " or set data.train_path to your own file, for which val_path and test_path have no"
            " defaults"
        )
    if sources:
        train = sources[0].train
    if missing or train is None:
        raise DataError("\n".join([*missing, f"looked from {Path.cwd()}"]))
    return DataPaths(train, val, test, text, tuple(notes), tuple(sources))


def _is_default_path(key: str, data: DataConfig) -> bool:
    if data.train_path is None or str(PurePath(data.train_path)) not in MANAGED_HELD_OUT_FILES:
        return False
    # a path of data.sources has none
    default = getattr(DataConfig(train_path=data.train_path), key, None)
    return default is not None and PurePath(getattr(data, key)) == PurePath(default)


def has_held_out_file(data: DataConfig) -> bool:
    """True if a run reads validation or test rows from a file; a default that no command wrote is
    not read."""
    if any(source.val_path for source in data.sources):
        return True
    is_written = (
        _is_default_path("train_path", data) and _existing_path(data.train_path or "") is not None
    )
    paths = {"val_path": data.val_path, "test_path": data.test_path}
    return any(
        path is not None
        and not (is_written and _is_default_path(key, data) and _existing_path(path) is None)
        for key, path in paths.items()
    )


def find_source(value: str, *, encoding: str = "utf-8") -> Path | DataSource:
    """Find the source that a path option names; raises DataError, which lists the folder's files,
    if it is missing."""
    source = _locate(value, encoding)
    if source is None:
        raise DataError(f"{_describe_missing(value)}; looked from {Path.cwd()}")
    return source


def _locate(value: str, encoding: str) -> Path | DataSource | None:
    if value.startswith(tables.HUB_PREFIX):
        tables.parse_hub_name(value)
        return DataSource(value)
    path = _existing_path(value)
    if path is not None:
        return mark_encoding(path, encoding)
    return DataSource(value, encoding) if glob.has_magic(value) and _glob_paths(value) else None


def _existing_path(value: str) -> Path | None:
    try:
        path = Path(value).expanduser()
        return path if path.exists() else find_starter_file(path)
    # too long for the file system; ~someone who does not exist; a NUL
    except (OSError, RuntimeError, ValueError):
        return None


def _glob_paths(pattern: str) -> list[Path]:
    try:
        paths = glob.glob(os.path.expanduser(pattern), recursive=True)  # noqa: PTH111, PTH207 - absolute patterns too
    except (OSError, ValueError, re.error):
        return []
    return sorted(map(Path, paths))


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def _describe_missing(value: str) -> str:
    text = one_line(value)
    if glob.has_magic(value):
        return f"no file matches {text}"
    first, _, last = value.partition("/")
    is_data_name = data_suffix(Path(last)) in ROW_FILE_SUFFIXES | TEXT_SUFFIXES
    # owner/name without hub: is the usual slip; data/train.jsonl looks the same but for its suffix
    if _HUB_NAME.fullmatch(value) and not is_data_name and _existing_path(first) is None:
        return f"{text} does not exist here; a data set of the hub is written hub:{text}"
    parent = Path(value).parent
    if (folder := _existing_path(str(parent))) is None:
        return f"{text} does not exist; the folder {one_line(str(parent))} does not exist"
    with contextlib.suppress(OSError):
        entries = [item for item in folder.iterdir() if not item.name.startswith(".")]
        # data first: a folder such as a checkout has much else
        entries.sort(key=lambda item: (data_suffix(item) not in ROW_FILE_SUFFIXES, item.name))
        if names := [one_line(item.name, limit=60) for item in entries[:12]]:
            return f"{text} does not exist; {parent} holds {', '.join(names)}"
    return f"{text} does not exist"


def read_rows(
    source: AnySource, *, split: str, wants_text: bool = False
) -> Iterator[RawRow | BadRow]:
    """The rows of a source, bad ones among them. `split` picks one of several in a saved folder or
    on the hub; with `wants_text`, files that are not JSON or tables are plain text. Raises
    DataError for a whole file.
    """
    for part in list_parts(source, split=split, wants_text=wants_text):
        yield from read_part(part)


def list_parts(
    source: AnySource, *, split: str = "train", wants_text: bool = False
) -> list[FilePart]:
    """The files of a source in their order (folders sorted), each as one part; nothing is opened.
    Raises DataError where there are none, or one is a pipe, a device or not readable by this
    user."""
    source_text = str(source)
    if source_text.startswith(tables.HUB_PREFIX):
        tables.parse_hub_name(source_text)
        return [FilePart(source_text, "hub", split, wants_text)]
    path = source if isinstance(source, Path) else _existing_path(source_text)
    if path is not None:
        return _list_path_parts(path, split, wants_text)
    encoding = source.encoding if isinstance(source, DataSource) else "utf-8"
    matches = [mark_encoding(match, encoding) for match in _glob_paths(source_text)]
    if not matches:
        raise DataError(_describe_missing(source_text))
    parts = [
        part
        for match in matches
        for part in _list_path_parts(match, split, wants_text, is_glob_match=True)
    ]
    if not parts:
        raise DataError(f"what matches {one_line(source_text)} holds no data files")
    return list(dict.fromkeys(parts))  # with `**` a folder and the files in it may both match


def _list_path_parts(
    path: Path, split: str, wants_text: bool, *, is_glob_match: bool = False
) -> list[FilePart]:
    if not path.is_dir():
        require_file(path)
        return [FilePart(str(path), "auto", split, wants_text, encoding=path_encoding(path))]
    suffixes = ROW_FILE_SUFFIXES
    if wants_text:
        suffixes |= TEXT_SUFFIXES
    parts = [
        FilePart(
            str(item),
            "saved" if item.is_dir() else "auto",
            split,
            wants_text,
            encoding=path_encoding(path),
        )
        for item in walk_data_files(path)
        if item.is_dir() or data_suffix(item) in suffixes
    ]
    if not parts and not is_glob_match:
        message = (
            f"{path} holds no data files; looked for {', '.join(sorted(suffixes))} and a saved"
            " dataset"
        )
        text_files = sum(data_suffix(item) in TEXT_SUFFIXES for item in walk_data_files(path))
        if text_files:
            message += (
                f"; it holds {text_files:,} text file{'s' * (text_files > 1)}: task_mode: cpt"
                " trains plain text"
            )
        raise DataError(message)
    return parts


def walk_data_files(folder: Path) -> list[Path]:
    """The files below a folder, sorted, without hidden ones; a folder saved by `datasets` is one
    item."""
    items: list[Path] = []
    visited: set[str] = set()
    for current, folders, names in os.walk(folder, followlinks=True):
        current_path = Path(current)
        real_path = os.path.realpath(current)  # links may lead in a circle
        if real_path in visited or is_saved_dataset(current_path):
            folders[:] = []  # os.walk goes into what is left of this list
            items += [] if real_path in visited else [current_path]
            continue
        visited.add(real_path)
        folders[:] = [
            name for name in folders if not name.startswith(".") and name not in NON_DATA_NAMES
        ]
        items += [
            current_path / name
            for name in names
            if not name.startswith(".") and name not in NON_DATA_NAMES
        ]
    # the order of os.walk is the disk's
    return sorted(item for item in items if item.is_file() or is_saved_dataset(item))


def is_saved_dataset(path: Path) -> bool:
    """True if a folder was saved by `datasets`."""
    return (path / "dataset_dict.json").is_file() or (
        (path / "dataset_info.json").is_file() and (path / "state.json").is_file()
    )


def read_part(part: FilePart) -> Iterator[RawRow | BadRow]:
    """The rows of a part in their order; raises DataError where the file cannot be read."""
    kind = part.kind if part.kind != "auto" else file_kind(part.path, wants_text=part.wants_text)
    folders = {"saved": part.path, "hub": ""}
    folder = str(folders.get(kind, part.path.parent))
    for row in _READERS[kind](part, part.path, one_line(part.name, limit=4_000)):
        yield replace(row, folder=folder) if isinstance(row, RawRow) else row


def _read_lines(part: FilePart, path: Path, name: str) -> Iterator[RawRow | BadRow]:
    rows = json_rows.read_lines(
        path, name, start=part.start, end=part.end, first_line=part.first_number
    )
    return _unwrap_single_object(rows) if part.end is None else rows


def _read_text(path: Path, name: str) -> Iterator[RawRow]:
    pieces = read_text_pieces(path)
    leading_pieces = list(itertools.islice(pieces, 2))
    # a second piece is read ahead to know it: whole files are named without a line
    is_whole = len(leading_pieces) == 1
    for line, text in itertools.chain(leading_pieces, pieces):
        yield RawRow(
            name if is_whole else f"{name}:{line}",
            {"text": text},
            () if is_whole else (NOTE_PIECE,),
        )


# A single object that is no row may hold rows: as a list, under one key.
def _unwrap_single_object(rows: Iterator[RawRow | BadRow]) -> Iterator[RawRow | BadRow]:
    leading_rows = list(itertools.islice(rows, 2))
    row = leading_rows[0] if len(leading_rows) == 1 else None
    if isinstance(row, RawRow) and recognise_format(row.data) is None:
        lists = {key: value for key, value in row.data.items() if isinstance(value, list) and value}
        keys = [
            key
            for key, value in lists.items()
            if all(isinstance(item, dict) for item in value) and not json_rows.is_turn_list(value)
        ]
        if len(keys) == 1:
            leading_rows = [
                RawRow(f"{row.where} {keys[0]}[{index}]", item)
                for index, item in enumerate(row.data[keys[0]])
            ]
    return itertools.chain(leading_rows, rows)


# By the kind of a part: its rows, of its path and the name that messages have for it.
_READERS: dict[str, Callable[[FilePart, Path, str], Iterator[RawRow | BadRow]]] = {
    "lines": _read_lines,
    "objects": lambda _, path, name: _unwrap_single_object(json_rows.read_objects(path, name)),
    "array": lambda _, path, name: json_rows.read_array(path, name),
    "csv": lambda _, path, name: tables.read_csv(path, name),
    "parquet": lambda part, path, name: tables.read_parquet(
        path, name, start=part.start, end=part.end, first_row=part.first_number
    ),
    "arrow": lambda _, path, name: tables.read_arrow(path, name, is_stream=False),
    "arrow stream": lambda _, path, name: tables.read_arrow(path, name, is_stream=True),
    "saved": lambda part, _, name: tables.read_saved_dataset(part.name, name, part.split),
    "hub": lambda part, *_: tables.read_hub(part.name, part.split),
    "text": lambda _, path, name: _read_text(path, name),
}


def split_part(part: FilePart, *, part_bytes: int) -> list[FilePart]:
    """A file's part as smaller ones for different processes: lines in ranges of about `part_bytes`,
    Parquet by row groups, others not at all. Raises DataError where the file is empty, missing or
    of no known kind.
    """
    if part.kind != "auto":
        return [part]
    path = part.path
    kind = file_kind(path, wants_text=part.wants_text)
    typed_part = replace(part, kind=kind)
    if kind == "parquet":
        groups, first_row = [], 1
        for index, rows in enumerate(tables.parquet_group_rows(path)):
            groups.append(replace(typed_part, start=index, end=index + 1, first_number=first_row))
            first_row += rows
        return groups or [typed_part]
    # offsets count the bytes of UTF-8 that are read: a file in another encoding is not cut
    if (
        kind != "lines"
        or part.encoding != "utf-8"
        or is_gzipped(path)
        or path.stat().st_size <= part_bytes
    ):
        return [typed_part]
    ranges: list[FilePart] = []
    start, line = 0, 1
    with path.open("rb") as file:
        while block := file.read(part_bytes):
            line_ends = block.count(b"\n")
            # on to the end of a line, which may be longer than can be held
            while block and not block.endswith(b"\n"):
                block = file.readline(BLOCK_BYTES)
                line_ends += block.count(b"\n")
            ranges.append(replace(typed_part, start=start, end=file.tell(), first_number=line))
            start, line = file.tell(), line + line_ends
    return ranges if len(ranges) > 1 else [typed_part]


def source_digest(source: AnySource) -> str:
    """Digest of what a source's files hold: of one file the file's own, of a data set of the hub
    its name's."""
    path = source if isinstance(source, Path) else _existing_path(str(source))
    if path is not None and path.is_file():
        return file_digest(path)
    paths = _glob_paths(str(source)) if path is None else path.rglob("*")
    files = sorted(file for file in paths if file.is_file())
    digests = [
        [str(file if path is None else file.relative_to(path)), file_digest(file)] for file in files
    ]
    return hashlib.sha256(json.dumps(digests or str(source)).encode()).hexdigest()


def file_digest(file: Path) -> str:
    """SHA-256 of a file's content, remembered until its size, times, inode or path change."""
    stat = file.stat()
    # as git does: a file whose size, times and inode are the same has not changed
    identity = [
        str(file.resolve()),
        stat.st_size,
        stat.st_mtime_ns,
        stat.st_ctime_ns,
        stat.st_ino,
        stat.st_dev,
    ]
    cache_file = cache_dir() / "digests" / hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    with contextlib.suppress(OSError, ValueError):
        digest = cache_file.read_text(encoding="ascii")
        if len(digest) == 64:  # else half-written
            return digest
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    # a file that is being written may change within the clock's tick
    if time.time() - stat.st_mtime > 2:
        with contextlib.suppress(OSError):
            atomic.write(cache_file, digest)
    return digest
