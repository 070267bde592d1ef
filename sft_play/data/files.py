"""Bytes → rows that know their file and line. What the content is decides, not the file's name.

JSON arrays, one object per line, objects printed over several lines, plain text, folders of these, and folders
saved by `datasets` are read. A file that cannot be read says where and why.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.config.schema import DataConfig
from sft_play.errors import DataError
from sft_play.log import one_line

TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".text"})
"""Names of plain text; any other file whose content does not begin like JSON is text only where text is asked."""
JSON_SUFFIXES = frozenset({".jsonl", ".json", ".ndjson"})
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class RawRow:
    """One object of a data file with the place it came from."""

    where: str
    data: dict[str, Any]


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used, where it stands, and why; `reason` is what rows are counted by."""

    where: str
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}{f' ({self.detail})' if self.detail else ''}"


@dataclass(frozen=True)
class DataPaths:
    """Where each split is read from; None where there is none. `notes` are choices to say aloud."""

    train: Path
    val: Path | None
    test: Path | None
    text: Path | None
    notes: tuple[str, ...] = ()


def data_paths(data: DataConfig) -> DataPaths:
    """The files that a run reads, all of them there.

    The default `val_path` and `test_path` belong to the default `train_path`: with a train file of one's own they
    may be missing, which is said aloud.

    Raises:
        DataError: naming every file that is missing.
    """
    defaults = DataConfig()
    own_train = data.train_path != defaults.train_path
    missing: list[str] = []
    notes: list[str] = []
    unwritten: list[str] = []

    def find(key: str, value: str | None, default: str | None) -> Path | None:
        if value is None:
            return None
        path = _existing(value)
        if path is not None:
            return path
        if own_train and value == default:
            notes.append(f"data.{key}: there is no {value}; going on without it")
            return None
        if value == default:
            unwritten.append(f"data.{key}={value}")
        else:
            missing.append(f"data.{key}: {one_line(value)} does not exist{_hint(value)}")
        return None

    train = find("train_path", data.train_path, defaults.train_path)
    val = find("val_path", data.val_path, defaults.val_path)
    test = find("test_path", data.test_path, defaults.test_path)
    text = find("text_path", data.text_path, None)
    if unwritten:
        missing.append(
            f"{', '.join(unwritten)}: not there; these are the defaults, which `make process` writes: give your own "
            "data.train_path, and null for a val_path or test_path that you do not have"
        )
    if missing or train is None:
        raise DataError("\n".join([*missing, f"looked from {Path.cwd()}"]))
    return DataPaths(train, val, test, text, tuple(notes))


def _existing(value: str) -> Path | None:
    try:
        path = Path(value).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # a name too long for the file system; ~someone who does not exist
        return None


def _hint(value: str) -> str:
    parent = Path(value).parent
    try:
        names = sorted(one_line(item.name, limit=60) for item in parent.expanduser().iterdir())[:12]
    except (OSError, RuntimeError):
        names = []
    if not names and _existing(str(parent)) is not None:
        return ""
    return f"; {parent} holds {', '.join(names)}" if names else f"; the folder {one_line(str(parent))} does not exist"


def read_rows(path: Path, *, split: str, text_wanted: bool = False) -> Iterator[RawRow | BadRow]:
    """The rows of a file or folder, bad ones among them as `BadRow`.

    `split` picks one of several in a folder saved by `datasets`. With `text_wanted`, files that are not JSON are
    plain text: each one is a row `{"text": …}`.

    Raises:
        DataError: a whole file that cannot be read: not UTF-8, not JSON, empty.
    """
    if path.is_dir():
        yield from _read_folder(path, split, text_wanted)
    elif _is_text(path, text_wanted):
        yield RawRow(str(path), {"text": decode(_bytes(path), path)})
    else:
        yield from _read_json(path)


def _is_text(path: Path, text_wanted: bool) -> bool:
    name = path.name.removesuffix(".gz")
    suffix = Path(name).suffix.lower()
    if suffix in TEXT_SUFFIXES:
        return True
    return text_wanted and suffix not in JSON_SUFFIXES


def _read_folder(path: Path, split: str, text_wanted: bool) -> Iterator[RawRow | BadRow]:
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        yield from _read_saved_dataset(path, split)
        return
    wanted = JSON_SUFFIXES | (TEXT_SUFFIXES if text_wanted else frozenset())
    files = sorted(
        item
        for item in path.rglob("*")
        if item.is_file() and Path(item.name.removesuffix(".gz")).suffix.lower() in wanted
    )
    if not files:
        raise DataError(f"{path} holds no data files; looked for {', '.join(sorted(wanted))} and a saved dataset")
    for file in files:
        yield from read_rows(file, split=split, text_wanted=text_wanted)


def _read_saved_dataset(path: Path, split: str) -> Iterator[RawRow | BadRow]:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # datasets and pyarrow raise many kinds for a folder that is damaged
        raise DataError(f"{path} cannot be loaded by datasets.load_from_disk: {one_line(str(error))}") from error
    if isinstance(loaded, datasets.DatasetDict):
        names = {"train": ("train",), "val": ("validation", "val", "valid", "dev"), "test": ("test",)}[split]
        found = next((name for name in names if name in loaded), None)
        if found is None:
            raise DataError(f"{path} has the splits {', '.join(map(str, loaded))}; none of them is {names[0]}")
        loaded = loaded[found]
    for index, row in enumerate(loaded):
        yield RawRow(f"{path}:row {index + 1}", {key: value for key, value in row.items() if value is not None})


def _bytes(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def decode(raw: bytes, path: Path) -> str:
    """UTF-8 text without a byte order mark; raises DataError with the line, the byte and what to run."""
    if raw[:4] == b"PAR1":
        raise DataError(f"{path} is Parquet; rows are JSONL or JSON, or a folder saved by datasets (save_to_disk)")
    if raw[:4] in (b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff"):
        raise DataError(f"{path} is UTF-32, not UTF-8. Convert it: iconv -f utf-32 -t utf-8 {path} > new.jsonl")
    if raw[:2] in _UTF16_MARKS:
        raise DataError(f"{path} is UTF-16, not UTF-8. Convert it: iconv -f utf-16 -t utf-8 {path} > new.jsonl")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - (raw.rfind(b"\n", 0, error.start) + 1) + 1
        raise DataError(
            f"{path}:{line}: byte 0x{raw[error.start]:02X} at column {column} is not UTF-8; find its encoding "
            "(latin1, gbk, …) and convert: iconv -f latin1 -t utf-8"
        ) from None


class _RefusedJson(ValueError):
    """JSON that parses but would lose something."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _RefusedJson(f'the key "{one_line(key)}" stands twice in one object')
        found[key] = value
    return found


def _constant(name: str) -> Any:
    raise _RefusedJson(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_constant)


def _read_json(path: Path) -> Iterator[RawRow | BadRow]:
    text = decode(_bytes(path), path)
    start = len(text) - len(text.lstrip())
    if start == len(text):
        raise DataError(f"{path} has no rows: the file is {'empty' if not text else 'blank'}")
    if text[start] == "[":
        yield from _read_array(text, start, path)
    elif text[start] == "{":
        yield from _read_objects(text, path)
    else:
        shown = one_line(text[start : start + 40])
        raise DataError(f'{path} is not JSON: it begins with "{shown}"; rows are JSON objects, one a line, or a list')


def _line_number(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _read_array(text: str, start: int, path: Path) -> Iterator[RawRow | BadRow]:
    """Rows of a JSON list; each knows the line on which it begins."""
    position, line, last = _skip(text, start + 1), _line_number(text, start + 1), start + 1
    if position < len(text) and text[position] == "]":
        raise DataError(f"{path} has no rows: the list is empty")
    while True:
        line, last = line + text.count("\n", last, position), position
        if position < len(text) and text[position] == "]":
            raise DataError(f"{path}:{line}: remove the comma before `]`")
        value, position = _decode_at(text, position, lambda error: _syntax(text, path, error))
        yield _as_row(value, f"{path}:{line}")
        position = _skip(text, position)
        if position < len(text) and text[position] == ",":
            position = _skip(text, position + 1)
        elif position < len(text) and text[position] == "]":
            break
        else:
            found = f"`{one_line(text[position])}`" if position < len(text) else "the end of the file"
            raise DataError(f"{path}:{_line_number(text, position)}: expected `,` or `]` after a row, found {found}")
    rest = _skip(text, position + 1)
    if rest < len(text):
        raise DataError(f"{path}:{_line_number(text, rest)}: text after the end of the list")


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _decode_at(text: str, position: int, fail: Callable[[ValueError], DataError]) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, position)
    except (ValueError, RecursionError) as error:
        raise fail(error if isinstance(error, ValueError) else ValueError("nested too deeply")) from None


def _syntax(text: str, path: Path, error: ValueError) -> DataError:
    if isinstance(error, json.JSONDecodeError):
        line = text.split("\n")[error.lineno - 1]
        return DataError(f"{path}:{error.lineno}: not valid JSON: {_why(error)}. Line: {one_line(line, limit=60)}")
    return DataError(f"{path}: {error}")


def _why(error: json.JSONDecodeError) -> str:
    if "Unterminated string" in error.msg:
        return f"the string that starts at column {error.colno} is not closed"
    return f"{error.msg} at column {error.colno}"


def _read_objects(text: str, path: Path) -> Iterator[RawRow | BadRow]:
    """One object per line; where the first line is not one by itself, objects printed over several lines."""
    lines = text.split("\n")
    first = next(line for line in lines if line.strip())
    try:
        _DECODER.decode(first.strip())
    except _RefusedJson:
        pass
    except (ValueError, RecursionError):
        if _is_spread_out(text):
            yield from _read_spread_out(text, path)
            return
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _read_line(line, f"{path}:{number}")


def _read_line(line: str, where: str) -> RawRow | BadRow:
    try:
        return _as_row(_DECODER.decode(line.strip()), where)
    except json.JSONDecodeError as error:
        return BadRow(where, "not valid JSON", f"{_why(error)}. Line: {one_line(line, limit=60)}")
    except _RefusedJson as error:
        return BadRow(where, str(error))
    except RecursionError:
        return BadRow(where, "nested too deeply")
    except ValueError:  # Python reads no whole number of more than 4,300 digits
        return BadRow(where, "a number has too many digits")


def _is_spread_out(text: str) -> bool:
    """Whether the text begins with an object that spans lines."""
    try:
        _, end = json.JSONDecoder().raw_decode(text, _skip(text, 0))
    except (ValueError, RecursionError):
        return False
    return "\n" in text[:end].strip()


def _read_spread_out(text: str, path: Path) -> Iterator[RawRow | BadRow]:
    position = _skip(text, 0)
    while position < len(text):
        where = f"{path}:{_line_number(text, position)}"
        value, position = _decode_at(text, position, lambda error: _syntax(text, path, error))
        yield _as_row(value, where)
        position = _skip(text, position)


def _as_row(value: Any, where: str) -> RawRow | BadRow:
    if not isinstance(value, dict):
        return BadRow(where, "a row is not an object", one_line(json.dumps(value, ensure_ascii=False), limit=60))
    if _LONE_SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        return BadRow(where, "half of a surrogate pair (a broken emoji) in the text")
    return RawRow(where, value)
