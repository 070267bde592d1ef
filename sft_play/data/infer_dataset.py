"""What a person's data are, from their first rows: task, columns, held-out share and length for a
new run YAML."""

import functools
import itertools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sft_play.config.schema import DataConfig, Encoding, TrainConfig
from sft_play.config.yaml_io import JsonValue
from sft_play.data.build.survey import SAMPLE_CHARACTERS, estimate_size
from sft_play.data.sources.columns import find_rendered_mark, guess_columns
from sft_play.data.sources.examples import ExampleReader, character_count, example_text
from sft_play.data.sources.files import AnySource, find_source, list_parts, read_rows
from sft_play.data.sources.formats import (
    Chat,
    Example,
    Text,
    content_digest,
    digest_share,
    recognise_format,
)
from sft_play.data.sources.raw import BadRow, NotUtf8Error, RawRow, no_usable_rows_error
from sft_play.data.sources.tables import split_from_name
from sft_play.errors import DataError
from sft_play.log import one_line

# Rows that are looked at.
MAX_SAMPLED_ROWS = 5_000
# Of these the longest, whose tokens are counted.
_COUNTED_ROWS = 100
# What a template writes beside the texts: a system prompt of its own, and the marks of each turn.
_TEMPLATE_TOKENS, _TURN_TOKENS = 40, 8
_LENGTH_CHOICES = (128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
# Up to here a length holds every row; beyond, 99% of the tokens, because memory and time grow with
# the longest row.
_MAX_FULL_LENGTH = 4096
_MIN_ROWS_TO_SPLIT, _MAX_HELD_OUT_ROWS = 40, 2_000
# As many held-out rows tell whether a run is better, and are held out of as many rows, or more.
_MIN_HELD_OUT_ROWS, _ROWS_FOR_A_VERDICT = 30, 300
# Optimizer steps that plain text comes to.
_MIN_STEPS = 20

# The tokens of a text.
CountTokens = Callable[[str], int]
# The tokens of an image, by its width and height.
CountImageTokens = Callable[[int, int], int]


@dataclass(frozen=True)
class InferredDataset:
    """Settings inferred from the data (by dotted path), a description of the data, and the name of
    the rows' format."""

    settings: dict[str, JsonValue]
    description: str
    is_chat: bool
    format: str
    has_images: bool = False


def estimate_image_tokens(width: int, height: int) -> int:
    """Estimate the tokens of an image as Qwen2.5-VL has them: one for 28 x 28 pixels."""
    return -(-width // 28) * -(-height // 28)


def estimate_tokens(text: str) -> int:
    """Estimate an upper bound on a text's tokens: three bytes of UTF-8 a token; English has more
    bytes in one."""
    return -(-len(text.encode("utf-8", "replace")) // 3)


def infer_dataset(
    data_path: str,
    *,
    count_tokens: CountTokens = estimate_tokens,
    count_image_tokens: CountImageTokens = estimate_image_tokens,
    max_positions: int | None = None,
    columns: Mapping[str, Any] = types.MappingProxyType({}),
) -> InferredDataset:
    """Infer a run's settings from the first rows of its data; of files that are not UTF-8 also the
    likely encoding. `max_positions`: the longest row that the model takes; `columns`: the user's
    `data.columns`. Raises DataError where no row can be used.
    """
    infer = functools.partial(
        _infer_with_encoding,
        data_path,
        count_tokens=count_tokens,
        count_image_tokens=count_image_tokens,
        max_positions=max_positions,
        columns=dict(columns),
    )
    try:
        return infer("utf-8")
    except NotUtf8Error as error:
        if error.encoding is None:
            raise
        dataset, encoding = infer(error.encoding), error.encoding
    return replace(
        dataset,
        settings={**dataset.settings, "data.encoding": encoding},
        description=f"{dataset.description}; not UTF-8, but {encoding} by its looks: make preview"
        " shows the rows",
    )


def _sample_rows(reader: ExampleReader) -> tuple[list[Example], list[BadRow]]:
    """The first rows of a data set, those that cannot be used apart."""
    examples: list[Example] = []
    bad_rows: list[BadRow] = []
    chars = 0
    for _, row in itertools.islice(reader.numbered_examples(), MAX_SAMPLED_ROWS):
        if isinstance(row, BadRow):
            bad_rows.append(row)
        else:
            examples.append(row)
        chars += character_count(row)
        if chars > SAMPLE_CHARACTERS:
            break
    return examples, bad_rows


def _infer_with_encoding(
    data_path: str,
    encoding: Encoding,
    *,
    count_tokens: CountTokens,
    count_image_tokens: CountImageTokens,
    max_positions: int | None,
    columns: dict[str, Any],
) -> InferredDataset:
    paths, source, is_text = _find_sources(data_path, encoding)
    if not is_text and not columns:
        rows = itertools.islice(read_rows(source, split="train"), MAX_SAMPLED_ROWS)
        first_row = next((row for row in rows if isinstance(row, RawRow)), None)
        if first_row is not None and recognise_format(first_row.data) is None:
            columns = guess_columns(first_row.data)
    reader = ExampleReader(source, DataConfig(columns=columns), split="train", wants_text=is_text)
    examples, bad_rows = _sample_rows(reader)
    if not examples:
        raise no_usable_rows_error(
            f"the first {len(bad_rows):,} rows of {one_line(data_path)}", bad_rows
        )
    is_cpt = isinstance(examples[0], Text) and not find_rendered_mark(examples[0].text)
    size = estimate_size(
        DataConfig(train_path=paths["data.train_path"], encoding=encoding), wants_text=is_cpt
    )
    row_count = max(getattr(size, "rows", 0), len(examples))
    # the tokens of each example: counted for the longest, by their characters for the others
    texts = list(map(example_text, examples))
    longest = sorted(range(len(texts)), key=lambda index: -len(texts[index]))[:_COUNTED_ROWS]
    counted_tokens = {index: count_tokens(texts[index]) for index in longest}
    tokens_per_char = sum(counted_tokens.values()) / max(
        1, sum(len(texts[index]) for index in longest)
    )
    row_tokens = [
        counted_tokens.get(index, round(len(text) * tokens_per_char))
        for index, text in enumerate(texts)
    ]
    for index, example in enumerate(examples):
        if isinstance(example, Chat):
            row_tokens[index] += _TEMPLATE_TOKENS + _TURN_TOKENS * len(example.messages)
            for picture in example.images:
                row_tokens[index] += count_image_tokens(picture.width, picture.height)
    default_batch = batch = TrainConfig().effective_batch_size
    if is_cpt:
        task, description = "cpt", f"{row_count:,} text{'s' * (row_count > 1)}"
        length, batch = _choose_blocks(sum(row_tokens), batch)
        if batch < default_batch:
            description += (
                f" of about {sum(row_tokens):,} tokens: short blocks and small batches make"
                f" {sum(row_tokens) // (length * batch)} steps"
            )
    else:
        length = _choose_length(row_tokens)
        description = f"{row_count:,} row{'s' * (row_count > 1)} ({reader.format})"
        task, description = "sft", f"{description}, the longest of about {max(row_tokens):,} tokens"
    image_rows = sum(bool(getattr(example, "images", ())) for example in examples)
    if image_rows:
        description += f"; {image_rows:,} of the first {len(examples):,} with images"
    if bad_rows:
        description += (
            f"; {len(bad_rows):,} of the first {len(bad_rows) + len(examples):,} cannot be used:"
            " make check"
        )
    length = min(length, max_positions or length)
    settings: dict[str, JsonValue] = {"model.max_seq_len": length, "task_mode": task, **paths}
    if columns:
        settings["data.columns"] = dict(columns)
    if batch != default_batch:
        settings["train.effective_batch_size"] = batch
    if "data.val_path" not in paths:
        # of one document its end is held out, and there are blocks to hold out
        rows_to_split = max(row_count, is_cpt * sum(row_tokens) // length)
        settings["data.val_fraction"] = _held_out_share(rows_to_split, () if is_cpt else examples)
    return InferredDataset(
        settings,
        description,
        not is_cpt and isinstance(examples[0], Chat),
        reader.format,
        image_rows > 0,
    )


def _held_out_share(rows_to_split: int, examples: Sequence[Example]) -> float:
    """The share of validation rows: enough for a verdict where the examples are as many."""
    share = 0.0
    if rows_to_split >= _MIN_ROWS_TO_SPLIT:
        share = min(0.05, max(round(_MAX_HELD_OUT_ROWS / rows_to_split, 4), 0.0001))
    if len(examples) >= _ROWS_FOR_A_VERDICT:
        # the share that a row's content draws decides whether it is held out
        shares = sorted(digest_share(content_digest(example)) for example in examples)
        share = max(share, math.ceil(shares[_MIN_HELD_OUT_ROWS - 1] * 1000 + 1e-6) / 1000)
    return share


# The data's paths by their keys, what is looked at of them, and whether it is a folder of plain
# text. A folder of files named by splits is read by these: as one source its held-out rows would be
# trained on.
def _find_sources(data_path: str, encoding: str) -> tuple[dict[str, str], AnySource, bool]:
    source = find_source(data_path, encoding=encoding)
    if isinstance(source, Path) and source.is_dir():
        splits: dict[str, list[str]] = {}
        for file in source.iterdir():
            if file.is_file() and (split := split_from_name(file.name.partition(".")[0])):
                splits.setdefault(split, []).append(str(file))
        if "train" in splits and all(len(files) == 1 for files in splits.values()):
            paths = {f"data.{split}_path": files[0] for split, files in sorted(splits.items())}
            return paths, find_source(paths["data.train_path"], encoding=encoding), False
    try:
        parts = list_parts(source)
    except DataError:
        list_parts(source, wants_text=True)
        return {"data.train_path": data_path}, source, True
    is_text = all(
        part.kind == "auto" and part.path.suffix.lower() in (".txt", ".md", ".rst")
        for part in parts
    )
    return {"data.train_path": data_path}, source, is_text


# The length of blocks of plain text, and the blocks of a step: 2,048 and `batch`, or down to an
# eighth of it where the text would fill fewer than eight blocks, or _MIN_STEPS steps.
def _choose_blocks(tokens: int, batch: int) -> tuple[int, int]:
    lengths = [length for length in (2048, 1024, 512, 256, 128) if 8 * length <= tokens] or [64]
    choices = itertools.product(lengths, [batch, batch // 2, batch // 4, batch // 8])
    enough = (choice for choice in choices if _MIN_STEPS * math.prod(choice) <= tokens)
    return next(enough, (lengths[-1], batch // 8))


def _choose_length(tokens: Sequence[int]) -> int:
    for length in _LENGTH_CHOICES:
        lost_tokens = sum(max(0, row_tokens - length) for row_tokens in tokens)
        if lost_tokens <= 0.01 * sum(tokens) * (length >= _MAX_FULL_LENGTH):
            return length
    return _LENGTH_CHOICES[-1]
