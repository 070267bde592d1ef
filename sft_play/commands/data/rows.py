"""Shared by the commands that show or write rows: which stage's they are, and what may not be overwritten."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from sft_play.config.load import LoadedConfig
from sft_play.data.sources.files import AnySource
from sft_play.errors import DataError


def first_stage(loaded: LoadedConfig) -> tuple[LoadedConfig, tuple[str, ...]]:
    """Of a run with stages the first one, and a line about that."""
    if not loaded.stages:
        return loaded, ()
    first = loaded.stages[0]
    return loaded.of(first), (f"The rows of stage {first.name}, the first of {len(loaded.stages)}",)


def refuse_source(target: Path, files: Sequence[tuple[str, AnySource]]) -> None:
    """Raises DataError where a command would overwrite a file that it reads, with FORCE=1 too."""
    for split, source in files:
        with contextlib.suppress(OSError):
            if Path(str(source)).expanduser().samefile(target):
                named = f"the {split}" if split.startswith("source ") else f"data.{split}_path"
                raise DataError(f"OUT={target} is {named}, which is read; name another file")
