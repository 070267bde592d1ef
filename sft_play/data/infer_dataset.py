"""What a person's data are, from their first rows: task, columns, held-out share and length for a new run YAML."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sft_play.config.schema import DataConfig, Encoding
from sft_play.config.yaml_io import JsonValue
from sft_play.data.build.survey import SAMPLE_CHARACTERS, estimate_size
from sft_play.data.sources.columns import find_rendered_mark, guess_columns
from sft_play.data.sources.examples import ExampleReader, character_count
from sft_play.data.sources.files import AnySource, find_source, list_parts, read_rows
from sft_play.data.sources.formats import Chat, Example, Text, recognise_format
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
# Up to here a length holds every row; beyond, 99% of the tokens, because memory and time grow with the longest row.
_MAX_FULL_LENGTH = 4096
_MIN_ROWS_TO_SPLIT, _MAX_HELD_OUT_ROWS = 40, 2_000

# The tokens of a text.
CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class InferredDataset:
    """Settings inferred from the data (by dotted path), a description of the data, and the name of the rows' format."""

    settings: dict[str, JsonValue]
    description: str
    is_chat: bool
    format: str


def estimate_tokens(text: str) -> int:
    """Estimate an upper bound on a text's tokens: three bytes of UTF-8 a token; English has more bytes in one."""
    return -(-len(text.encode("utf-8", "replace")) // 3)


def infer_dataset(
    data_path: str, *, count_tokens: CountTokens = estimate_tokens, max_positions: int | None = None
) -> InferredDataset:
    """Infer a run's settings from the first rows of its data; of files that are not UTF-8 also the likely encoding.
    `max_positions`: the longest row that the model takes. Raises DataError where no row can be used."""
    try:
        return _infer_with_encoding(data_path, "utf-8", count_tokens, max_positions)
    except NotUtf8Error as error:
        if error.encoding is None:
            raise
        dataset, encoding = _infer_with_encoding(data_path, error.encoding, count_tokens, max_positions), error.encoding
    description = f"{dataset.description}; not UTF-8, but {encoding} by its looks: make preview shows the rows"
    return replace(dataset, settings={**dataset.settings, "data.encoding": encoding}, description=description)


def _infer_with_encoding(
    data_path: str, encoding: Encoding, count_tokens: CountTokens, max_positions: int | None
) -> InferredDataset:
    paths, source, is_text = _find_sources(data_path, encoding)
    columns = {} if is_text else _guess_columns(source)
    reader = ExampleReader(source, DataConfig(columns=columns), split="train", wants_text=is_text)
    examples, bad_rows = _read_sample(reader)
    if not examples:
        raise no_usable_rows_error(f"the first {len(bad_rows):,} rows of {one_line(data_path)}", bad_rows)
    is_cpt = isinstance(examples[0], Text) and not find_rendered_mark(examples[0].text)
    size = estimate_size(DataConfig(train_path=paths["data.train_path"], encoding=encoding), wants_text=is_cpt)
    rows = max(size.rows if size else 0, len(examples))
    row_tokens = _estimate_row_tokens(examples, count_tokens)
    length = min(
        _choose_block_length(sum(row_tokens)) if is_cpt else _choose_length(row_tokens),
        max_positions or _LENGTH_CHOICES[-1],
    )
    settings: dict[str, JsonValue] = {"model.max_seq_len": length}
    settings |= {"task_mode": "cpt" if is_cpt else "sft", **paths}
    if columns:
        settings["data.columns"] = dict(columns)
    if "data.val_path" not in paths:
        # of one document its end is held out
        settings["data.val_fraction"] = _choose_val_fraction(max(rows, sum(row_tokens) // length if is_cpt else 0))
    noun = f"text{'s' if rows > 1 else ''}" if is_cpt else f"row{'s' if rows > 1 else ''} ({reader.format})"
    longest_note = "" if is_cpt else f", the longest of about {max(row_tokens):,} tokens"
    unused_note = (
        f"; {len(bad_rows):,} of the first {len(bad_rows) + len(examples):,} cannot be used: make check"
        if bad_rows
        else ""
    )
    return InferredDataset(
        settings=settings,
        description=f"{rows:,} {noun}{longest_note}{unused_note}",
        is_chat=not is_cpt and isinstance(examples[0], Chat),
        format=reader.format,
    )


def _find_sources(data_path: str, encoding: str) -> tuple[dict[str, str], AnySource, bool]:
    """The data's paths by their keys, what is looked at of them, and whether it is a folder of plain text. A folder of
    files named by splits is read by these: as one source its held-out rows would be trained on."""
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
        is_text = all(part.kind == "auto" and part.path.suffix.lower() in (".txt", ".md", ".rst") for part in parts)
        return {"data.train_path": data_path}, source, is_text
    except DataError:
        list_parts(source, wants_text=True)
        return {"data.train_path": data_path}, source, True


def _guess_columns(source: AnySource) -> dict[str, str]:
    rows = itertools.islice(read_rows(source, split="train"), MAX_SAMPLED_ROWS)
    first_row = next((row for row in rows if isinstance(row, RawRow)), None)
    return guess_columns(first_row.data) if first_row is not None and recognise_format(first_row.data) is None else {}


def _read_sample(reader: ExampleReader) -> tuple[list[Example], list[BadRow]]:
    examples: list[Example] = []
    bad_rows: list[BadRow] = []
    chars = 0
    for _, row in itertools.islice(reader.numbered_examples(), MAX_SAMPLED_ROWS):
        if isinstance(row, BadRow):
            bad_rows.append(row)
            continue
        examples.append(row)
        chars += character_count(row)
        if chars > SAMPLE_CHARACTERS:
            break
    return examples, bad_rows


def _estimate_row_tokens(examples: Sequence[Example], count_tokens: CountTokens) -> list[int]:
    """The tokens of each example: counted for the longest, by their characters for the others."""
    texts = [example.text if isinstance(example, Text) else _chat_text(example) for example in examples]
    template_tokens = [
        0 if isinstance(example, Text) else _TEMPLATE_TOKENS + _TURN_TOKENS * len(example.messages)
        for example in examples
    ]
    longest = sorted(range(len(texts)), key=lambda index: -len(texts[index]))[:_COUNTED_ROWS]
    counted_tokens = {index: count_tokens(texts[index]) for index in longest}
    tokens_per_char = sum(counted_tokens.values()) / max(1, sum(len(texts[index]) for index in longest))
    return [
        counted_tokens.get(index, round(len(text) * tokens_per_char)) + template_tokens[index]
        for index, text in enumerate(texts)
    ]


def _chat_text(chat: Chat) -> str:
    calls_and_tools = [chat.tools, [message["tool_calls"] for message in chat.messages if message.get("tool_calls")]]
    texts = [str(message.get(key) or "") for message in chat.messages for key in ("content", "reasoning_content")]
    return "\n".join([*texts, *(json.dumps(item, ensure_ascii=False, indent=1) for item in calls_and_tools if item)])


def _choose_length(tokens: Sequence[int]) -> int:
    longest_fit = next((length for length in _LENGTH_CHOICES if length >= max(tokens)), _LENGTH_CHOICES[-1])
    if longest_fit <= _MAX_FULL_LENGTH:
        return longest_fit
    lost_tokens = {
        length: sum(max(0, row_tokens - length) for row_tokens in tokens)
        for length in _LENGTH_CHOICES
        if length >= _MAX_FULL_LENGTH
    }
    return next(
        length for length in lost_tokens if lost_tokens[length] <= 0.01 * sum(tokens) or length == _LENGTH_CHOICES[-1]
    )


def _choose_block_length(tokens: int) -> int:
    """The length of a block of plain text: 2,048, or less where the text would fill fewer than eight."""
    return next((length for length in (2048, 1024, 512, 256, 128) if 8 * length <= tokens), 64)


def _choose_val_fraction(rows: int) -> float:
    return 0.0 if rows < _MIN_ROWS_TO_SPLIT else min(0.05, round(_MAX_HELD_OUT_ROWS / rows, 4) or 0.0001)
