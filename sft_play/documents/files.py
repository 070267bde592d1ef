"""Which documents there are: files, folders and globs become a sorted list, and other files are counted."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sft_play.data.sources.files import find_source, walk
from sft_play.errors import DataError
from sft_play.log import one_line

LOCK_MARK = "~$"
"""The names of files that Word keeps beside an open document begin like this; they hold no text."""


@dataclass
class DocumentFiles:
    """The documents by their names in rows and reports, in order, and the names of other files by ending."""

    documents: dict[str, Path] = field(default_factory=dict)
    others: dict[str, list[str]] = field(default_factory=dict)


def find_documents(paths: tuple[str, ...], *, suffixes: Iterable[str], written: Iterable[Path]) -> DocumentFiles:
    """The documents that `paths` name, except hidden files and `written`, the files of this command.

    Folders are searched to any depth; links are followed, loops are not.

    Raises:
        DataError: a path does not exist, or there is no document: where it looked, and what is there.
    """
    known, files = frozenset(suffixes), DocumentFiles()
    seen = {os.path.realpath(path) for path in written}  # a document is read once, whatever leads to it
    found: dict[str, list[Path]] = {}
    for root, path in (one for given in paths for one in _files(given)):
        real, suffix = os.path.realpath(path), path.suffix.lower()
        if real in seen or path.name.startswith((".", LOCK_MARK)):
            continue
        seen.add(real)
        # a name that is not UTF-8 holds surrogates in Python, which JSON and terminals cannot take
        name = os.fsencode(path.relative_to(root).as_posix()).decode("utf-8", "replace")
        if suffix in known:
            found.setdefault(name, []).append(path)
        else:
            files.others.setdefault(suffix or "no ending", []).append(name)
    files.documents = dict(sorted(_named(found)))
    if not files.documents:
        others = ", ".join(f"{len(names)} {suffix}" for suffix, names in sorted(files.others.items())[:12])
        raise DataError(
            f"data.documents.path={one_line(', '.join(paths))}: no documents there (looked from {Path.cwd()} for "
            f"{', '.join(sorted(known))}); there are {others or 'no files'}"
        )
    return files


def _files(given: str) -> Iterator[tuple[Path, Path]]:
    """Each file that a path names, after the folder that its name is relative to."""
    path = find_source(given)
    if isinstance(path, Path):
        yield from ((path, file) for file in walk(path)) if path.is_dir() else [(path.parent, path)]
        return
    parts = Path(given).expanduser().parts
    root = Path(*parts[: next((n for n, part in enumerate(parts) if glob.has_magic(part)), 0)])
    for match in sorted(root.glob("/".join(parts[len(root.parts) :]))):
        yield from ((root, file) for file in (walk(match) if match.is_dir() else [match]))


def _named(found: dict[str, list[Path]]) -> Iterator[tuple[str, Path]]:
    """Documents with unique names: those with the same name are named from the folder that they share."""
    for name, paths in found.items():
        shared = os.path.commonpath([path.absolute().parent for path in paths])
        for path in paths:
            yield (path.absolute().relative_to(shared).as_posix() if len(paths) > 1 else name), path
