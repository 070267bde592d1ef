"""The lengths of a run's rows, counted before its plan is made: by tokenising them, once, as the
run itself does.

A file in the cache keeps them until the files, the tokenizer, or an option that decides a row's
tokens change. A plan reads that file only; commands that train count the rows first, into the cache
of rows that the run then reads.
"""

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
from sft_play.errors import DataError, SftPlayError, stage_context
from sft_play.files import atomic, cache_dir
from sft_play.models.config_json import find_model_folder, load_max_positions
from sft_play.planner.batching import RowTokens, summarize_row_tokens
from sft_play.process.waiting import importing
from sft_play.text import MIB

logger = logging.getLogger(__name__)

# Bytes of data that a plan reads to count their tokens: a few seconds.
QUICK_BYTES = 32 * MIB
# Options of the data section that decide neither which rows there are nor their tokens.
_OPTIONS_WITHOUT_EFFECT = frozenset(
    {"on_bad_row", "max_lost_fraction", "workers", "process", "documents"}
)


def has_variable_lengths(config: RunConfig) -> bool:
    """Whether rows differ in length: blocks of text and packs are full."""
    return config.task_mode == "sft" and config.data.packing == "none"


def cached_row_tokens(config: RunConfig) -> RowTokens | None:
    """The lengths of the rows where they were counted before; nothing is tokenised, and no error is
    raised."""
    with contextlib.suppress(OSError, SftPlayError, ValueError):
        if has_variable_lengths(config):
            return TypeAdapter(RowTokens).validate_json(_cache_path(config).read_bytes())
    return None


def count_row_tokens(runs: Iterable[LoadedConfig]) -> None:
    """Count the tokens of the rows of a run, or of each of its stages, unless the cache has them.
    Raises the SftPlayError that training would raise: the tokenizer cannot be loaded, or the rows
    cannot be used."""
    for stage_run in runs:
        if has_variable_lengths(stage_run.config) and cached_row_tokens(stage_run.config) is None:
            with stage_context(stage_run.stage_name):
                _count_tokens(stage_run.config)


def count_row_tokens_if_quick(
    loaded: LoadedConfig,
    *,
    on_error: Callable[[SftPlayError], object] = lambda error: logger.warning(
        "Rows: not counted: %s", error
    ),
) -> list[str]:
    """Count the rows for a plan, where tokenizer and files are here and small. Returns a line for
    each part whose data are not here: they may be on the machine that trains. `on_error` takes why
    rows cannot be used.
    """
    missing_data_lines: list[str] = []
    for stage_run in loaded.runs:
        config = stage_run.config
        # what is wrong with the rows is said below
        with contextlib.suppress(OSError, SftPlayError):
            for line in missed_column_lines(config.data, task_mode=config.task_mode):
                logger.warning("%s", line)
        if not has_variable_lengths(config) or cached_row_tokens(config) is not None:
            continue
        try:
            data_bytes = sum(size for _, size, _ in _data_file_states(config))
        except (SftPlayError, OSError) as error:
            missing_data_lines.append(
                "Rows: every row is taken to have full length, because the data are not here:"
                f" {error}"
            )
            continue
        folder = find_model_folder(config.model.name)
        if folder is None or not any(any(folder.glob(name)) for name in ("tokenizer*", "vocab*")):
            continue
        if data_bytes <= QUICK_BYTES:
            try:
                count_row_tokens([stage_run])
            except SftPlayError as error:
                on_error(error)
    return missing_data_lines


def _count_tokens(config: RunConfig) -> None:
    with importing():
        import numpy as np

        from sft_play.data.build.splits import build_splits
        from sft_play.training.loop.rows import row_lengths
        from sft_play.training.prepare.tokenizer import load_tokenizer

    logger.debug("Rows: counting their tokens before the plan is made")
    positions = load_max_positions(config.model.name, revision=config.model.revision)
    length_limit = min(config.model.max_seq_len, positions or config.model.max_seq_len)
    splits = build_splits(
        config,
        find_data_paths(config.data),
        load_tokenizer(config).tokenizer,
        max_seq_len=length_limit,
        max_positions=positions,
        today=date.today(),
    )
    lengths, counts = np.unique(row_lengths(splits.train.rows), return_counts=True)
    held_out = [row_lengths(split.rows) for split in (splits.val, splits.test) if split is not None]
    row_tokens = summarize_row_tokens(
        dict(zip(lengths.tolist(), counts.tolist(), strict=True)),
        limit=length_limit,
        held_out=max(
            (int(split_lengths.max()) for split_lengths in held_out if len(split_lengths)),
            default=0,
        ),
    )
    assert row_tokens is not None  # a split without rows is refused as it is built
    row_tokens = dataclasses.replace(row_tokens, cut=splits.train.stats.cut_rows)
    path = _cache_path(config)
    try:
        atomic.write(path, json.dumps(dataclasses.asdict(row_tokens)))
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror or error}; free space there, or name"
            " another folder in SFT_PLAY_CACHE"
        ) from error


def _cache_path(config: RunConfig) -> Path:
    """Name the cache file of a run's row lengths by everything that decides them: the sizes and
    times of the files, the options, and the code, as it has the templates, masks and cuts."""
    folder = find_model_folder(config.model.name)
    tokenizer: list[Any] = [config.model.name, config.model.revision]
    if folder is not None:
        tokenizer = sorted(
            _file_state(path)
            for pattern in ("*.json", "*.jinja", "*.model", "*.txt")
            for path in folder.glob(pattern)
        )
    options = config.data.model_dump(mode="json", exclude=set(_OPTIONS_WITHOUT_EFFECT))
    code = Path(__file__).parents[1] / "data"
    key_parts = {
        "options": options | {"task_mode": config.task_mode, "seed": config.train.seed},
        "limit": config.model.max_seq_len,
        "tokenizer": tokenizer,
        "files": sorted(_data_file_states(config)),
        "code": sorted(map(_file_state, code.rglob("*.py"))),
    }
    key = json.dumps(key_parts, sort_keys=True, default=str)
    return cache_dir() / "row_tokens" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _data_file_states(config: RunConfig) -> Iterator[tuple[str, int, int]]:
    for _, source in find_data_paths(config.data).named_paths():
        for part in list_parts(source):
            if part.kind == "hub":  # it has no state here: counted once a day
                yield part.name, 0, date.today().toordinal()
            elif part.path.is_dir():
                yield from (_file_state(path) for path in part.path.rglob("*") if path.is_file())
            else:
                yield _file_state(part.path)


def _file_state(path: Path) -> tuple[str, int, int]:
    stat = path.stat()
    return str(path.resolve()), stat.st_size, stat.st_mtime_ns
