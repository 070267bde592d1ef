"""The lengths of a run's rows, counted before its plan is made: by tokenising them, once, as the run itself does.

A file in the cache keeps them until the files, the tokenizer, or an option that decides a row's tokens change. A plan
reads that file only; commands that train count the rows first, into the cache of rows that the run then reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from sft_play.config.load import LoadedConfig
from sft_play.config.schema import RunConfig
from sft_play.data.checks import missed_column_lines
from sft_play.data.sources.files import find_data_paths, list_parts
from sft_play.errors import SftPlayError, stage_context
from sft_play.files import atomic, cache_dir
from sft_play.models.config_json import find_model_folder, load_max_positions
from sft_play.planner.batching import RowTokens, summarize_row_tokens
from sft_play.process.waiting import importing
from sft_play.text import MIB

logger = logging.getLogger(__name__)

# Bytes of data that a plan reads to count their tokens: a few seconds.
QUICK_BYTES = 32 * MIB
_TOKENIZER_PATTERNS = ("tokenizer*", "vocab*")
_TOKENIZER_FILE_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt")
# Options of the data section that decide neither which rows there are nor their tokens.
_OPTIONS_WITHOUT_EFFECT = frozenset({"on_bad_row", "max_lost_fraction", "workers", "process", "documents"})
# What this process has counted, for a cache that cannot be written.
_counted_rows: dict[str, RowTokens | None] = {}


def has_variable_lengths(config: RunConfig) -> bool:
    """Whether rows differ in length: blocks of text and packs are full."""
    return config.task_mode == "sft" and config.data.packing == "none"


def cached_row_tokens(config: RunConfig) -> RowTokens | None:
    """The lengths of the rows where they were counted before; nothing is tokenised, and no error is raised."""
    if not has_variable_lengths(config):
        return None
    with contextlib.suppress(OSError, SftPlayError, ValueError, KeyError, TypeError):
        key = _row_tokens_key(config)
        if key in _counted_rows:
            return _counted_rows[key]
        return TypeAdapter(RowTokens).validate_json(_row_tokens_cache_path(key).read_bytes())
    return None


def count_row_tokens(runs: Iterable[LoadedConfig]) -> None:
    """Count the rows of a run, or of each of its stages, where that was not done before; raises SftPlayError where the
    tokenizer cannot be loaded, or the rows cannot be used, as training would say."""
    for stage_run in runs:
        if has_variable_lengths(stage_run.config) and cached_row_tokens(stage_run.config) is None:
            with stage_context(stage_run.stage_name):
                _count_tokens(stage_run.config)


def count_row_tokens_if_quick(
    loaded: LoadedConfig,
    *,
    on_error: Callable[[SftPlayError], object] = lambda error: logger.warning("Rows: not counted: %s", error),
) -> list[str]:
    """Count the rows for a plan, where tokenizer and files are here and small. Returns a line for each part whose data
    are not here: they may be on the machine that trains. `on_error` takes why rows cannot be used."""
    missing_data_lines: list[str] = []
    for stage_run in loaded.runs:
        config = stage_run.config
        with contextlib.suppress(OSError, SftPlayError):  # what is wrong with the rows is said below
            for line in missed_column_lines(config.data, task_mode=config.task_mode):
                logger.warning("%s", line)
        if not has_variable_lengths(config) or cached_row_tokens(config) is not None:
            continue
        with contextlib.suppress(OSError):
            try:
                data_bytes = sum(size for _, size, _ in _data_file_states(config))
            except SftPlayError as error:
                missing_data_lines.append(
                    f"Rows: every row is taken to have full length, because the data are not here: {error}"
                )
                continue
            folder = find_model_folder(config.model.name)
            if (
                folder is None
                or data_bytes > QUICK_BYTES
                or not any(any(folder.glob(name)) for name in _TOKENIZER_PATTERNS)
            ):
                continue
            try:
                with stage_context(stage_run.stage_name):
                    _count_tokens(config)
            except SftPlayError as error:
                on_error(error)
    return missing_data_lines


def _count_tokens(config: RunConfig) -> None:
    with importing():
        import numpy as np

        from sft_play.data.build.splits import build_splits
        from sft_play.training.loop.rows import row_lengths, to_dataset
        from sft_play.training.prepare.tokenizer import load_tokenizer

    logger.debug("Rows: counting their tokens before the plan is made")
    length_limit, positions = _length_limit(config)
    splits = build_splits(
        config, find_data_paths(config.data), load_tokenizer(config).tokenizer, max_seq_len=length_limit,
        max_positions=positions, today=date.today(),
    )  # fmt: skip
    lengths = row_lengths(to_dataset(splits.train.rows))
    held_out = [row_lengths(to_dataset(split.rows)) for split in (splits.val, splits.test) if split is not None]
    row_tokens = summarize_row_tokens(
        dict(zip(*(values.tolist() for values in np.unique(lengths, return_counts=True)), strict=True)),
        limit=length_limit,
        held_out=max((int(split_lengths.max()) for split_lengths in held_out if len(split_lengths)), default=0),
    )
    row_tokens = dataclasses.replace(row_tokens, cut=splits.train.stats.cut_rows) if row_tokens else None
    key = _row_tokens_key(config)
    _counted_rows[key] = row_tokens
    if row_tokens is None:
        return
    cache_path = _row_tokens_cache_path(key)
    with contextlib.suppress(OSError):
        atomic.write(cache_path, json.dumps(dataclasses.asdict(row_tokens)))


def _length_limit(config: RunConfig) -> tuple[int, int | None]:
    positions = load_max_positions(config.model.name, revision=config.model.revision)
    requested_length = config.model.max_seq_len
    return min(requested_length, positions or requested_length), positions


def _row_tokens_cache_path(key: str) -> Path:
    return cache_dir() / "row_tokens" / f"{key}.json"


def _row_tokens_key(config: RunConfig) -> str:
    folder = find_model_folder(config.model.name)
    tokenizer = [config.model.name, config.model.revision] if folder is None else sorted(_tokenizer_file_states(folder))
    code = Path(__file__).parents[1] / "data"  # the code decides tokens too: templates, masks, cuts
    key_parts: dict[str, Any] = {
        "options": {
            name: value for name, value in _data_options(config).items() if name not in _OPTIONS_WITHOUT_EFFECT
        },
        "limit": config.model.max_seq_len,
        "tokenizer": tokenizer,
        "files": sorted(_data_file_states(config)),
        "code": sorted(_file_state(path) for path in code.rglob("*.py")),
    }
    return hashlib.sha256(json.dumps(key_parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _data_options(config: RunConfig) -> dict[str, Any]:
    options: dict[str, Any] = config.data.model_dump(mode="json")
    return options | {"task_mode": config.task_mode, "seed": config.train.seed}


def _tokenizer_file_states(folder: Path) -> Iterator[tuple[str, int, int]]:
    for pattern in _TOKENIZER_FILE_PATTERNS:
        yield from (_file_state(path) for path in folder.glob(pattern))


def _data_file_states(config: RunConfig) -> Iterator[tuple[str, int, int]]:
    paths = find_data_paths(config.data)
    for _, source in paths.named_paths():
        for part in list_parts(source):
            if part.kind == "hub":  # it has no state here: counted once a day
                yield part.name, 0, date.today().toordinal()
                continue
            data_path = part.path
            yield from (
                _file_state(path)
                for path in (data_path.rglob("*") if data_path.is_dir() else [data_path])
                if path.is_file()
            )


def _file_state(path: Path) -> tuple[str, int, int]:
    stat = path.stat()
    return str(path.resolve()), stat.st_size, stat.st_mtime_ns
