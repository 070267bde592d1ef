"""Files of the machine: kept for later runs, in the folder of caches; and written whole or not at all (`atomic`)."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
"""The checkout's folder, or site-packages: the one that holds the package."""


def cache_dir(environment: Mapping[str, str] | None = None) -> Path:
    """`SFT_PLAY_CACHE`, or `~/.cache/sft-play`."""
    environment = os.environ if environment is None else environment
    given = environment.get("SFT_PLAY_CACHE")
    return Path(given).expanduser() if given else Path("~/.cache/sft-play").expanduser()


@contextlib.contextmanager
def locked(path: Path, *, waiting: str) -> Iterator[None]:
    """Hold the lock on this file; logs `waiting` where another process holds it."""
    # The file stays: if its holder removed it, two waiting processes could lock two files of the same name.
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("%s", waiting)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
