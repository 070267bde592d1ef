"""Files of the machine: kept for later runs, in the folder of caches; and written whole or not at
all (`atomic`)."""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

logger = logging.getLogger(__name__)

# The checkout's folder, or site-packages: the one that holds the package.
ROOT = Path(__file__).resolve().parents[2]


def cache_dir(environment: Mapping[str, str] | None = None) -> Path:
    """`SFT_PLAY_CACHE`, or `~/.cache/sft-play`."""
    variables = os.environ if environment is None else environment
    return Path(variables.get("SFT_PLAY_CACHE") or "~/.cache/sft-play").expanduser()


def relative_to_cwd(path: Path) -> Path:
    """Return a path as messages and commands show it: relative to the current folder if it lies in
    it, through links too, else unchanged."""
    with contextlib.suppress(OSError):  # the current folder is gone
        current = Path.cwd()
        for parent in path.parents if path.is_absolute() else ():
            if parent.exists() and parent.samefile(current):
                return path.relative_to(parent)
    return path


# Errors of a file system that has no locks, as network file systems may be mounted.
NO_LOCKS_ERRNOS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@contextlib.contextmanager
def hold_lock(path: Path, *, waiting_message: str) -> Iterator[None]:
    """Hold the lock on this file; logs `waiting_message` where another process holds it. Where the
    file system has no locks, only the processes of this machine wait for each other."""
    # The file stays: if its holder removed it, two waiting processes could lock two files of the
    # same name.
    with path.open("a") as file, contextlib.ExitStack() as fallback:
        try:
            _acquire_lock(file, waiting_message)
        except OSError as error:
            if error.errno not in NO_LOCKS_ERRNOS:
                raise
            advice = (
                "two machines must not write there at the same time; SFT_PLAY_CACHE can name a"
                " local folder"
            )
            logger.warning(
                "%s: the file system does not support locks (%s): %s",
                path.parent,
                error.strerror,
                advice,
            )
            name = hashlib.sha256(
                str(path.resolve()).encode("utf-8", "surrogateescape")
            ).hexdigest()[:24]
            local_lock = Path(tempfile.gettempdir()) / f"sft-play-{os.getuid()}-{name}.lock"
            _acquire_lock(fallback.enter_context(local_lock.open("a")), waiting_message)
        yield


def _acquire_lock(file: TextIO, waiting_message: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info("%s", waiting_message)
        fcntl.flock(file, fcntl.LOCK_EX)
