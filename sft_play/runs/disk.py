"""A disk that takes no more: recognised in whatever a library makes of it, and one message in its place."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from sft_play.errors import RunFolderError, SftPlayError
from sft_play.log import one_line
from sft_play.units import size_of

_REFUSES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors that only writing meets, and that may come without the name of a file."""
_IN_TEXT = re.compile(r"\(os error (\d+)\)|\[Errno (\d+)\]")
"""The number of an error in those of safetensors, which are no OSError, and in texts that quote one."""
_OF_TORCH = re.compile(r"PytorchStreamWriter failed|unexpected pos \d+ vs \d+|basic_ios::clear|iostream error")
"""What torch.save raises where a write fails; it does not say why."""


def refusal(error: BaseException | None) -> str | None:
    """Why the disk refused to write, in the operating system's words; None where something else went wrong."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        of_ranks = getattr(error, "failures", None)  # of torch's distributed checkpoint
        texts = [str(error), *(str(one) for one in (of_ranks.values() if isinstance(of_ranks, dict) else ()))]
        numbers = {int(one or other) for text in texts for one, other in _IN_TEXT.findall(text)}
        numbers |= {error.errno} if isinstance(error, OSError) and error.errno is not None else set()
        for number in numbers.intersection(_REFUSES):
            return os.strerror(number)
        if isinstance(error, RuntimeError) and any(map(_OF_TORCH.search, texts)):
            return "writing failed"
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Within it, a disk that is full or read-only is one message that names the file, where the error does.

    Raises:
        RunFolderError: in place of the error.
    """
    try:
        yield
    except SftPlayError:
        raise
    except Exception as error:
        reason = refusal(error)
        if reason is None:
            raise
        named = error.filename if isinstance(error, OSError) and isinstance(error.filename, (str, bytes)) else None
        what = "a file" if named is None else one_line(os.fsdecode(named))
        free = "" if named is None else f"; {_free_words(Path(os.fsdecode(named)))}"
        raise RunFolderError(f"{what} cannot be written: {reason}{free}") from error


@contextlib.contextmanager
def room(folder: Path, needed: int, what: str, *, free: int | None) -> Iterator[None]:
    """Within it, at least `needed` bytes are written into a folder.

    Args:
        what: begins the message, such as "the checkpoint of step 6".
        free: bytes that are free there; None where that is not known.

    Raises:
        RunFolderError: fewer bytes are free, or the disk refuses.
    """
    words = f"{what} cannot be written into {one_line(str(folder))}: {{}}; about {needed:,} bytes ({size_of(needed)}) "
    words += "are needed, and {}. Free space there, then resume the run"
    if free is not None and free < needed:
        raise RunFolderError(words.format(os.strerror(errno.ENOSPC), _free_words(folder)))
    try:
        yield
    except Exception as error:
        reason = refusal(error)
        if reason is None:
            raise
        raise RunFolderError(words.format(reason, _free_words(folder))) from error


def free_bytes(path: Path) -> int | None:
    """What the disk of a path, which may not exist yet, has free; None where it does not say."""
    place = next((parent for parent in (path, *path.absolute().parents) if parent.is_dir()), Path("/"))
    try:
        usage = shutil.disk_usage(place)
    except OSError:
        return None
    return usage.free if usage.total else None


def _free_words(path: Path) -> str:
    free = free_bytes(path)
    return "what is free there is not known" if free is None else f"{free:,} bytes ({size_of(free)}) are free there"
