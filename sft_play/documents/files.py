"""Which documents there are: files, folders and globs become a sorted list, and everything else is counted."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sft_play.errors import DataError
from sft_play.log import one_line

LOCK_MARK = "~$"
"""The names of files that Word keeps beside an open document begin like this; they hold no text."""


@dataclass(frozen=True)
class Document:
    """A file to read, and its name in rows and reports."""

    name: str
    path: Path


@dataclass
class DocumentFiles:
    """The documents sorted by name, the names of other files by ending, and counts of what is ignored."""

    documents: list[Document] = field(default_factory=list)
    others: dict[str, list[str]] = field(default_factory=dict)
    hidden: int = 0
    twice: int = 0
    """Files that were reached in two ways, such as through a link; they are read once."""


def find_documents(paths: tuple[str, ...], *, suffixes: Iterable[str], written: Iterable[Path]) -> DocumentFiles:
    """The documents that `paths` name, except `written`, the files of this command.

    Folders are searched to any depth; links are followed, loops are not. Hidden files are counted, not read.

    Raises:
        DataError: a path does not exist, or there is no document: where it looked, and what is there.
    """
    known, own = frozenset(suffixes), {_real(path) for path in written}
    files = DocumentFiles()
    seen: dict[Path, Document] = {}  # by real path: a document is read once, whatever leads to it
    for given in paths:
        for root, path in _files(given, files):
            name = _shown(path, root)
            suffix = path.suffix.lower()
            if _real(path) in own:
                continue
            if path.name.startswith((".", LOCK_MARK)):
                files.hidden += 1
            elif suffix not in known:
                files.others.setdefault(suffix or "no ending", []).append(name)
            elif _real(path) in seen:
                files.twice += 1
            else:
                seen[_real(path)] = Document(name, path)
    files.documents = sorted(_named(list(seen.values())), key=lambda document: document.name)
    for names in files.others.values():
        names.sort()
    if not files.documents:
        others = ", ".join(f"{len(names)} {suffix}" for suffix, names in sorted(files.others.items())[:12])
        raise DataError(
            f"data.documents.path={one_line(', '.join(paths))}: no documents there (looked from {Path.cwd()} for "
            f"{', '.join(sorted(known))}); there are {others or 'no files'}"
            f"{f' and {files.hidden} hidden files' if files.hidden else ''}"
        )
    return files


def _real(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # a link that leads to itself
        return path.absolute()


def _shown(path: Path, root: Path) -> str:
    relative = path.relative_to(root) if path.is_relative_to(root) else Path(path.name)
    # a name that is not UTF-8 holds surrogates in Python, which JSON and terminals cannot take
    return os.fsencode(relative.as_posix()).decode("utf-8", "replace")


def _named(documents: list[Document]) -> list[Document]:
    """Documents with unique names: those with the same name get as many of their folders as make them differ."""
    same: dict[str, list[Document]] = {}
    for document in documents:
        same.setdefault(document.name, []).append(document)
    named: list[Document] = []
    for name, group in same.items():
        if len(group) == 1:
            named += group
            continue
        # from the end: a/x.docx and b/x.docx, named with as few folders as needed
        paths = [document.path.absolute().parts for document in group]
        length = len(Path(name).parts)
        while length < max(map(len, paths)) and len({parts[-length:] for parts in paths}) < len(group):
            length += 1
        for parts, document in zip(paths, group, strict=True):
            named.append(Document(_shown(Path(*parts[-length:]), Path()), document.path))
    return named


def _files(given: str, files: DocumentFiles) -> Iterator[tuple[Path, Path]]:
    """Each file that a path names, with the folder that its name is relative to."""
    try:
        path = Path(given).expanduser()
        exists = path.exists() or path.is_symlink()
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(f"data.documents.path: {one_line(given)} cannot be read ({one_line(str(error))})") from None
    if path.is_dir():
        yield from ((path, file) for file in _walk(path, files, set()))
    elif exists:
        yield path.parent, path
    elif glob.has_magic(str(path)):
        yield from _matching(path, given, files)
    else:
        raise DataError(
            f"data.documents.path: {one_line(given)} does not exist (looked from {Path.cwd()}){_near(path)}"
        )


def _matching(pattern: Path, given: str, files: DocumentFiles) -> Iterator[tuple[Path, Path]]:
    parts = pattern.parts
    fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    root = Path(*parts[:fixed]) if fixed else Path()
    try:
        matches = sorted(root.glob("/".join(parts[fixed:])))
    except (ValueError, NotImplementedError, OSError) as error:
        raise DataError(f"data.documents.path: {one_line(given)} is not a valid glob: {one_line(str(error))}") from None
    if not matches:
        raise DataError(
            f"data.documents.path: nothing matches {one_line(given)} (looked from {Path.cwd()}){_near(root / 'x')}"
        )
    folders = {match for match in matches if match.is_dir()}
    for match in matches:
        if not folders.isdisjoint(match.parents):
            continue  # read with the folder above it
        if match in folders:
            yield from ((root, file) for file in _walk(match, files, set()))
        else:
            yield root, match


def _near(path: Path) -> str:
    folder = path.parent
    try:
        names = sorted(one_line(item.name, limit=60) for item in folder.iterdir())
    except OSError:
        return f"; the folder {one_line(str(folder))} does not exist"
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"; {one_line(str(folder))} holds {', '.join(names[:12]) or 'nothing'}{more}"


def _walk(folder: Path, files: DocumentFiles, above: set[tuple[int, int]]) -> Iterator[Path]:
    """Files of a folder and those below it, sorted by name; a folder linked inside itself is not entered again."""
    try:
        status = folder.stat()
        items = sorted(folder.iterdir())
    except OSError as error:
        raise DataError(f"{one_line(str(folder))} cannot be listed: {error.strerror}") from None
    key = (status.st_dev, status.st_ino)  # of the folder that a link leads to
    if key in above:
        files.twice += 1
        return
    for item in items:
        if item.is_dir():
            if item.name.startswith("."):
                files.hidden += 1
            else:
                yield from _walk(item, files, above | {key})
        elif item.is_file() or item.is_symlink():
            yield item
