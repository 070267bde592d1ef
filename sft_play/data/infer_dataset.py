"""What a person's data are, from their first rows: task, columns, held-out share and length for a new run YAML."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sft_play.config.schema import DataConfig, Encoding
from sft_play.config.yaml_io import JsonValue
from sft_play.data.build.size import SAMPLE_CHARACTERS, rough_size
from sft_play.data.sources.columns import guess_columns, find_rendered_mark
from sft_play.data.sources.examples import ExampleReader, character_count
from sft_play.data.sources.files import AnySource, list_parts, find_source, read_rows
from sft_play.data.sources.formats import Chat, Example, Text, recognise_format
from sft_play.data.sources.raw import BadRow, NotUtf8, RawRow, no_usable_rows_error
from sft_play.data.sources.tables import split_from_name
from sft_play.errors import DataError
from sft_play.log import one_line

# Rows that are looked at.
SAMPLE = 5_000
# Of these the longest, whose tokens are counted.
_COUNTED = 100
# What a template writes beside the texts: a system prompt of its own, and the marks of each turn.
_FORMAT_TOKENS, _TURN_TOKENS = 40, 8
_LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
# Up to here a length holds every row; beyond, 99% of the tokens, because memory and time grow with the longest row.
_USUAL = 4096
_FEWEST_TO_SPLIT, _MOST_HELD_OUT = 40, 2_000

# The tokens of a text.
Count = Callable[[str], int]


@dataclass(frozen=True)
class FirstLook:
    """The settings that the data ask for, by path, in words what was seen, and the format of the rows by its name."""

    settings: dict[str, JsonValue]
    words: str
    is_chat: bool
    format: str


def by_characters(text: str) -> int:
    """About as many tokens as a text has at most: three bytes of UTF-8 a token; English has more in one."""
    return -(-len(text.encode("utf-8", "replace")) // 3)


def first_look(given: str, *, count: Count = by_characters, positions: int | None = None) -> FirstLook:
    """What the first rows of some data ask for; of files that are not UTF-8, the encoding that they look like too.
    `positions`: the longest row that the model takes. Raises DataError where no row can be used."""
    try:
        return _look(given, "utf-8", count, positions)
    except NotUtf8 as error:
        if error.encoding is None:
            raise
        look, encoding = _look(given, error.encoding, count, positions), error.encoding
    words = f"{look.words}; not UTF-8, but {encoding} by its looks: make preview shows the rows"
    return replace(look, settings={**look.settings, "data.encoding": encoding}, words=words)


def _look(given: str, encoding: Encoding, count: Count, positions: int | None) -> FirstLook:
    paths, source, is_text = _sources(given, encoding)
    columns = {} if is_text else _columns(source)
    reader = ExampleReader(source, DataConfig(columns=columns), split="train", wants_text=is_text)
    examples, bad = _sample(reader)
    if not examples:
        raise no_usable_rows_error(f"the first {len(bad):,} rows of {one_line(given)}", bad)
    is_cpt = isinstance(examples[0], Text) and not find_rendered_mark(examples[0].text)
    size = rough_size(DataConfig(train_path=paths["data.train_path"], encoding=encoding), text_wanted=is_cpt)
    rows = max(size.rows if size else 0, len(examples))
    tokens = _tokens(examples, count)
    length = min(_block(sum(tokens)) if is_cpt else _length(tokens), positions or _LENGTHS[-1])
    settings: dict[str, JsonValue] = {"model.max_seq_len": length}
    settings |= {"task_mode": "cpt" if is_cpt else "sft", **paths}
    if columns:
        settings["data.columns"] = dict(columns)
    if "data.val_path" not in paths:
        # of one document its end is held out
        settings["data.val_fraction"] = _held_out(max(rows, sum(tokens) // length if is_cpt else 0))
    what = f"text{'s' if rows > 1 else ''}" if is_cpt else f"row{'s' if rows > 1 else ''} ({reader.format})"
    longest = "" if is_cpt else f", the longest of about {max(tokens):,} tokens"
    unused = f"; {len(bad):,} of the first {len(bad) + len(examples):,} cannot be used: make check" if bad else ""
    return FirstLook(
        settings=settings,
        words=f"{rows:,} {what}{longest}{unused}",
        is_chat=not is_cpt and isinstance(examples[0], Chat),
        format=reader.format,
    )


def _sources(given: str, encoding: str) -> tuple[dict[str, str], AnySource, bool]:
    """The data's paths by their keys, what is looked at of them, and whether it is a folder of plain text. A folder of
    files named by splits is read by these: as one source its held-out rows would be trained on."""
    source = find_source(given, encoding=encoding)
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
        return {"data.train_path": given}, source, is_text
    except DataError:
        list_parts(source, wants_text=True)
        return {"data.train_path": given}, source, True


def _columns(source: AnySource) -> dict[str, str]:
    rows = itertools.islice(read_rows(source, split="train"), SAMPLE)
    first = next((row for row in rows if isinstance(row, RawRow)), None)
    return guess_columns(first.data) if first is not None and recognise_format(first.data) is None else {}


def _sample(reader: ExampleReader) -> tuple[list[Example], list[BadRow]]:
    examples: list[Example] = []
    bad: list[BadRow] = []
    size = 0
    for _, row in itertools.islice(reader.numbered_examples(), SAMPLE):
        if isinstance(row, BadRow):
            bad.append(row)
            continue
        examples.append(row)
        size += character_count(row)
        if size > SAMPLE_CHARACTERS:
            break
    return examples, bad


def _tokens(examples: Sequence[Example], count: Count) -> list[int]:
    """The tokens of each example: counted for the longest, by their characters for the others."""
    texts = [example.text if isinstance(example, Text) else _written(example) for example in examples]
    marks = [0 if isinstance(one, Text) else _FORMAT_TOKENS + _TURN_TOKENS * len(one.messages) for one in examples]
    longest = sorted(range(len(texts)), key=lambda at: -len(texts[at]))[:_COUNTED]
    counted = {at: count(texts[at]) for at in longest}
    each = sum(counted.values()) / max(1, sum(len(texts[at]) for at in longest))
    return [counted.get(at, round(len(text) * each)) + marks[at] for at, text in enumerate(texts)]


def _written(chat: Chat) -> str:
    more = [chat.tools, [message["tool_calls"] for message in chat.messages if message.get("tool_calls")]]
    said = [str(message.get(key) or "") for message in chat.messages for key in ("content", "reasoning_content")]
    return "\n".join([*said, *(json.dumps(one, ensure_ascii=False, indent=1) for one in more if one)])


def _length(tokens: Sequence[int]) -> int:
    fits = next((length for length in _LENGTHS if length >= max(tokens)), _LENGTHS[-1])
    if fits <= _USUAL:
        return fits
    lost = {length: sum(max(0, one - length) for one in tokens) for length in _LENGTHS if length >= _USUAL}
    return next(length for length in lost if lost[length] <= 0.01 * sum(tokens) or length == _LENGTHS[-1])


def _block(tokens: int) -> int:
    """The length of a block of plain text: 2,048, or less where the text would fill fewer than eight."""
    return next((length for length in (2048, 1024, 512, 256, 128) if 8 * length <= tokens), 64)


def _held_out(rows: int) -> float:
    return 0.0 if rows < _FEWEST_TO_SPLIT else min(0.05, round(_MOST_HELD_OUT / rows, 4) or 0.0001)
