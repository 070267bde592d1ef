"""The lengths of a run's rows, counted before its plan is made: by tokenising them, once, as the
run itself does.

A file in the cache keeps them until the files, the tokenizer, or an option that decides a row's
tokens change. A plan reads that file, or tokenises rows itself, of many a sample; commands that
train count all rows first, into the cache of rows that the run then reads.
"""

import contextlib
import dataclasses
import hashlib
import heapq
import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from sft_play.config.load import LoadedConfig
from sft_play.config.schema import RunConfig
from sft_play.data.build.stats import file_state
from sft_play.data.build.survey import NumberedExample, RowRenderer, estimate_size
from sft_play.data.checks import missed_column_lines
from sft_play.data.masks.image_processor import ImageProcessorSource, cached_image_processor
from sft_play.data.sources.examples import ExampleReader, check_first_rows, read_example
from sft_play.data.sources.files import (
    AnySource,
    DataPaths,
    data_part_split,
    find_data_paths,
    list_parts,
)
from sft_play.data.sources.formats import RowFormat
from sft_play.data.sources.messages import iter_texts
from sft_play.data.sources.raw import FIX_OR_SKIP, BadRow, RawRow
from sft_play.errors import DataError, SftPlayError, stage_context
from sft_play.files import atomic, cache_dir
from sft_play.log import one_line
from sft_play.models.config_json import find_model_folder, load_max_positions
from sft_play.planner.batching import ImageLoad, RowTokens, summarize_row_tokens
from sft_play.process.waiting import importing, report_each
from sft_play.text import MIB

logger = logging.getLogger(__name__)

# Bytes of data that a plan reads to count their tokens, and from which it takes a sample: a few
# seconds.
QUICK_BYTES, SAMPLED_BYTES = 32 * MIB, 128 * MIB
# Training rows from which a plan takes a sample of so many, and so many of those with the most
# characters: the longest row decides a step's memory.
SAMPLE_ROWS, SAMPLE_LONGEST_ROWS = 4_000, 64
# Options of the data section that decide neither which rows there are nor their tokens.
_OPTIONS_WITHOUT_EFFECT = frozenset(
    {"on_bad_row", "max_lost_fraction", "workers", "process", "documents"}
)


# What a file of the cache holds: the lengths, and the states of the images' files.
_CACHE_ENTRY = TypeAdapter(tuple[RowTokens, dict[str, tuple[int, int]]])


def has_variable_lengths(config: RunConfig) -> bool:
    """Whether rows differ in length: blocks of text and packs are full."""
    return config.task_mode == "sft" and config.data.packing == "none"


def cached_row_tokens(config: RunConfig) -> RowTokens | None:
    """The lengths of the rows where they were counted or sampled before; nothing is tokenised, and
    no error is raised."""
    with contextlib.suppress(OSError, SftPlayError, ValueError):
        if has_variable_lengths(config):
            rows, image_states = _CACHE_ENTRY.validate_json(_cache_path(config).read_bytes())
            # the name of the cache's file knows the files of rows, and not those of their images
            if all(file_state(file) == state for file, state in image_states.items()):
                return rows
    return None


def has_counted_rows(config: RunConfig) -> bool:
    """True if the lengths of all rows were counted before: a sample is no count."""
    rows = cached_row_tokens(config)
    return rows is not None and not rows.sampled_rows


def count_row_tokens(runs: Iterable[LoadedConfig]) -> None:
    """Count the tokens of the rows of a run, or of each of its stages, unless the cache has them.
    Raises the SftPlayError that training would raise: the tokenizer cannot be loaded, or the rows
    cannot be used."""
    for stage_run in runs:
        if has_variable_lengths(stage_run.config) and not has_counted_rows(stage_run.config):
            with stage_context(stage_run.stage_name):
                _count_tokens(stage_run.config)


def load_row_tokens(config: RunConfig) -> RowTokens | None:
    """The lengths and pictures of all rows, counted now where they were not before; None where rows
    do not differ. Raises SftPlayError as `count_row_tokens`."""
    if has_variable_lengths(config) and not has_counted_rows(config):
        _count_tokens(config)
    return cached_row_tokens(config)


def count_row_tokens_if_quick(
    loaded: LoadedConfig,
    *,
    on_error: Callable[[SftPlayError], object] = lambda error: logger.warning(
        "Rows: not counted: %s", error
    ),
) -> list[str]:
    """Count the rows for a plan, or of many a sample, where tokenizer and files are here. Returns a
    line for each part whose data are not here: they may be on the machine that trains. `on_error`
    takes why rows cannot be used.
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
        size = None if config.data.sources else estimate_size(config.data)
        is_sampled = size is not None and size.rows > SAMPLE_ROWS
        if data_bytes <= (SAMPLED_BYTES if is_sampled else QUICK_BYTES):
            try:
                # what needs no library is refused without one
                paths = find_data_paths(config.data)
                check_first_rows(config.data, paths, task_mode=config.task_mode)
                if size is not None and is_sampled:
                    _sample_tokens(config, paths, rows=size.rows)
                else:
                    count_row_tokens([stage_run])
            except SftPlayError as error:
                on_error(error)
    return missing_data_lines


def _sample_tokens(config: RunConfig, paths: DataPaths, *, rows: int) -> None:
    """Estimate the lengths of the training rows, of which there are about so many, from some at
    equal distances. Raises DataError where one of them stops a run."""
    with importing():
        from sft_play.training.prepare.tokenizer import load_tokenizer

    row_renderer = build_row_renderer(config, load_tokenizer(config).tokenizer)
    sampled, longest_by_part = Counter[int](), dict[str, int]()
    pictured_rows: list[_PicturedRow] = []
    image_files: dict[str, tuple[int, int]] = {}
    for part, source in paths.named_paths():
        sample, longest = _sample_examples(source, config, part, rows=rows)
        for numbered_rows in (sample, longest):
            for outcome in row_renderer.render_rows(numbered_rows):
                row = outcome if isinstance(outcome, BadRow) else outcome.row
                if not isinstance(row, BadRow):
                    length = len(row.input_ids)
                    longest_by_part[part] = max(length, longest_by_part.get(part, 0))
                    is_sampled = part == "train" and numbered_rows is sample
                    sampled[length] += is_sampled
                    if row.images:
                        sizes = {(one.width, one.height) for one in row.images}
                        files = {one.file for one in row.images if one.file}
                        image_files |= {file: file_state(file) for file in files}
                        pictured_rows.append(
                            _PicturedRow(
                                length, len(row.images), row.image_tokens, sizes, is_sampled
                            )
                        )
                elif config.data.on_bad_row == "fail" and isinstance(outcome, BadRow):
                    raise DataError(f"{row}; {FIX_OR_SKIP}")
    held_out = max((size for part, size in longest_by_part.items() if part != "train"), default=0)
    if config.data.val_fraction:  # any row may be held out
        held_out = longest_by_part.get("train", 0)
    row_tokens = summarize_row_tokens(sampled, limit=row_renderer.max_seq_len, held_out=held_out)
    if row_tokens is not None:
        count = sampled.total() * (rows // SAMPLE_ROWS) * (1 - config.data.val_fraction)
        row_tokens = dataclasses.replace(
            row_tokens,
            longest=longest_by_part["train"],
            rows=round(count),
            sampled_rows=sampled.total(),
            images=_summarize_images(config, pictured_rows, scale=count / sampled.total()),
        )
        _write_cache(config, row_tokens, image_files)


def _sample_examples(
    source: AnySource, config: RunConfig, part: str, *, rows: int
) -> tuple[list[NumberedExample], list[NumberedExample]]:
    """Read a sample of a source, by a distance that suits so many `rows`, and its rows with the
    most characters."""
    reader = ExampleReader(source, config.data, split=data_part_split(part))
    sample: list[NumberedExample] = []

    def read_sized_rows() -> Iterator[tuple[int, int, RawRow | BadRow, RowFormat | None]]:
        for raw, row_format in reader.raw_rows():
            if reader.rows % (rows // SAMPLE_ROWS) == 0:
                sample.append((reader.rows, read_example(raw, row_format, config.data)))
            texts = [] if isinstance(raw, BadRow) else iter_texts(raw.data)
            yield sum(map(len, texts)), reader.rows, raw, row_format

    sized_rows = report_each(
        f"Looking at rows of {one_line(str(source))}", read_sized_rows(), unit="rows", count=rows
    )
    longest = [
        (number, read_example(raw, row_format, config.data))
        for _, number, raw, row_format in heapq.nlargest(
            SAMPLE_LONGEST_ROWS, sized_rows, key=lambda item: item[0]
        )
    ]
    return sample, longest


def build_row_renderer(config: RunConfig, tokenizer: Any) -> RowRenderer:
    """Build the renderer that turns a run's conversations into token rows, cut at the plan's
    longest row."""
    from sft_play.data.masks.render import Renderer

    renderer = Renderer(
        tokenizer,
        config.data,
        max_seq_len=_row_limit(config),
        images=ImageProcessorSource.from_config(config),
    )
    return RowRenderer(renderer, task_mode=config.task_mode)


def _row_limit(config: RunConfig) -> int:
    positions = load_max_positions(config.model.name, revision=config.model.revision)
    return min(config.model.max_seq_len, positions or config.model.max_seq_len)


def _count_tokens(config: RunConfig) -> None:
    with importing():
        import numpy as np

        from sft_play.data.build.splits import build_splits
        from sft_play.training.loop.rows import row_lengths
        from sft_play.training.prepare.tokenizer import load_tokenizer

    logger.debug("Rows: counting their tokens before the plan is made")
    length_limit = _row_limit(config)
    splits = build_splits(
        config,
        find_data_paths(config.data),
        load_tokenizer(config).tokenizer,
        max_seq_len=length_limit,
        max_positions=load_max_positions(config.model.name, revision=config.model.revision),
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
    counted = splits.named.values()
    pictured_rows = [
        row
        for split in counted
        for row in _read_pictured_rows(split.rows, is_trained=split is splits.train)
    ]
    _write_cache(
        config,
        dataclasses.replace(
            row_tokens,
            cut=splits.train.stats.cut_rows,
            images=_summarize_images(config, pictured_rows),
        ),
        {file: state for split in counted for file, state in split.stats.image_files.items()},
    )


@dataclasses.dataclass(frozen=True)
class _PicturedRow:
    """A row with pictures: its tokens, and of its pictures their number, tokens, and sizes."""

    tokens: int
    pictures: int
    image_tokens: int
    sizes: set[tuple[int, int]]
    # Whether it counts towards the sums, or only towards what is largest.
    is_trained: bool


def _read_pictured_rows(rows: Any, *, is_trained: bool) -> Iterator[_PicturedRow]:
    """Read those rows of a data set that have pictures; no token and no pixel is read."""
    if "image_tokens" not in rows.column_names:
        return
    from sft_play.training.loop.rows import row_lengths

    lengths = iter(row_lengths(rows).tolist())
    columns = rows.select_columns(["images", "image_tokens"]).with_format("arrow")
    for table in columns.iter(batch_size=10_000):
        tokens = table["image_tokens"].to_pylist()
        images = table["images"].combine_chunks()
        # widths and heights of all rows' pictures, one behind the other
        pictures = images.flatten()
        sizes = zip(
            pictures.field("width").to_pylist(), pictures.field("height").to_pylist(), strict=True
        )
        counts = [count or 0 for count in images.value_lengths().to_pylist()]
        for image_tokens, count in zip(tokens, counts, strict=True):
            row_sizes = set(itertools.islice(sizes, count))
            length = next(lengths)
            if count:
                yield _PicturedRow(length, count, image_tokens or 0, row_sizes, is_trained)


def _summarize_images(
    config: RunConfig, rows: Sequence[_PicturedRow], *, scale: float = 1.0
) -> ImageLoad | None:
    """What rows show; None without pictures. `scale`: rows for each of those that were sampled."""
    if not rows:
        return None
    processor = cached_image_processor(ImageProcessorSource.from_config(config))
    sizes = set().union(*(row.sizes for row in rows))
    largest = max(sizes, key=lambda size: (processor.count_tokens(*size), size[0] * size[1], size))
    trained_rows = [row for row in rows if row.is_trained]
    return ImageLoad(
        rows=round(scale * len(trained_rows)),
        pictures=round(scale * sum(row.pictures for row in trained_rows)),
        tokens=round(scale * sum(row.image_tokens for row in trained_rows)),
        width=largest[0],
        height=largest[1],
        picture_tokens=processor.count_tokens(*largest),
        row_pictures=max(row.pictures for row in rows),
        token_share=max(row.image_tokens / max(1, row.tokens) for row in rows),
    )


def _write_cache(
    config: RunConfig, row_tokens: RowTokens, image_files: Mapping[str, tuple[int, int]]
) -> None:
    path = _cache_path(config)
    try:
        atomic.write(path, json.dumps((dataclasses.asdict(row_tokens), image_files)))
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
