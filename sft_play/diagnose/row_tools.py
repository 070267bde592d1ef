"""Helpers of commands that look at rows before anything trains: load a run's tokenizer and row renderer, choose the
stage whose rows are shown, and refuse to overwrite a source."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.config.load import LoadedConfig
from sft_play.config.schema import RunConfig
from sft_play.data.build.survey import RowRenderer
from sft_play.data.sources.files import AnySource
from sft_play.errors import DataError, ModelError
from sft_play.facts.models.architecture import load_max_positions
from sft_play.launch.machine import go_offline_without_hub

ROW_SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class RowTools:
    """A run's tokenizer, notes on what was chosen for it, and the renderer of its rows."""

    tokenizer: Any
    notes: tuple[str, ...]
    row_renderer: RowRenderer


def load_row_tools(config: RunConfig) -> RowTools:
    """The run's tokenizer and renderer; raises TokenizerError or ModelError where they cannot be used."""
    from sft_play.training.prepare.tokenizer import load_tokenizer

    loaded = load_tokenizer(config)
    return RowTools(loaded.tokenizer, loaded.notes, build_row_renderer(config, loaded.tokenizer))


def build_row_renderer(config: RunConfig, tokenizer: Any) -> RowRenderer:
    """Build the renderer that turns a run's conversations into token rows, cut at the plan's longest row."""
    from sft_play.data.masks.render import Renderer

    max_seq_len = config.model.max_seq_len
    positions = load_max_positions(config.model.name, revision=config.model.revision)
    return RowRenderer(
        Renderer(tokenizer, config.data, max_seq_len=min(max_seq_len, positions or max_seq_len)),
        task_mode=config.task_mode,
    )


def configure_hub(config: RunConfig) -> None:
    """Set, before the hub's libraries are imported: no telemetry, and offline where the hub does not answer."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    with contextlib.suppress(ModelError):  # a missing folder is reported where its files are read
        go_offline_without_hub(config.model.name)


def first_stage_run(loaded: LoadedConfig) -> tuple[LoadedConfig, tuple[str, ...]]:
    """The first stage's run of a run with stages, and a line about that."""
    if not loaded.stages:
        return loaded, ()
    first = loaded.stages[0]
    return loaded.for_stage(first), (f"The rows of stage {first.name}, the first of {len(loaded.stages)}",)


def check_not_source(target: Path, files: Sequence[tuple[str, AnySource]]) -> None:
    """Raise DataError if a command would overwrite a file that it reads, with FORCE=1 too."""
    for split, source in files:
        with contextlib.suppress(OSError):
            if Path(str(source)).expanduser().samefile(target):
                description = f"the {split}" if split.startswith("source ") else f"data.{split}_path"
                raise DataError(f"OUT={target} is {description}, which is read; name another file")
