"""Which documents there are: files, folders and globs become a sorted list, and other files are counted."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sft_play.data.sources.files import find_source, walk
from sft_play.errors import DataError
from sft_play.log import one_line


@dataclass
class DocumentFiles:
    """What `paths` name: documents by their names in rows and reports, in order, and other files by ending."""

    paths: tuple[str, ...]
    documents: dict[str, Path] = field(default_factory=dict)
    others: Counter[str] = field(default_factory=Counter)


def find_documents(given: str | tuple[str, ...], *, suffixes: Collection[str], own: Iterable[Path]) -> DocumentFiles:
    """The documents that a path or several name, except hidden files and `own`, the files of this command.

    Folders are searched to any depth; links are followed, loops are not.

    Raises:
        DataError: a path does not exist, or there is no document: where it looked, and what is there.
    """
    files = DocumentFiles((given,) if isinstance(given, str) else given)
    seen = {os.path.realpath(path) for path in own}  # a document is read once, whatever leads to it
    for root, path in (one for asked in files.paths for one in _files(asked)):
        real, suffix = os.path.realpath(path), path.suffix.lower()
        if real in seen or path.name.startswith((".", "~$")):  # Word keeps ~$… beside an open document
            continue
        seen.add(real)
        name = _shown(path.relative_to(root))
        if suffix in suffixes:
            # in two folders the same name: the second document is named by its whole path
            files.documents[_shown(path.absolute()) if name in files.documents else name] = path
        else:
            files.others[suffix or "no ending"] += 1
    files.documents = dict(sorted(files.documents.items()))
    if not files.documents:
        others = ", ".join(f"{count} {suffix}" for suffix, count in files.others.most_common(12))
        raise DataError(
            f"data.documents.path={one_line(', '.join(files.paths))}: no documents there (looked from {Path.cwd()} for "
            f"{', '.join(suffixes)}); there are {others or 'no files'}"
        )
    return files


def _shown(path: Path) -> str:
    # a name that is not UTF-8 holds surrogates in Python, which JSON and terminals cannot take
    return os.fsencode(path.as_posix()).decode("utf-8", "replace")


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
