"""Count rows: roughly from a sample, or while they are built; and render rows batch by batch, to
show or write them.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sft_play.config.schema import DataConfig
from sft_play.data.build.stats import RowStats, trained_runs
from sft_play.data.masks.render import Renderer
from sft_play.data.masks.token_row import TokenRow
from sft_play.data.sources.examples import ExampleReader, character_count, count_part_rows
from sft_play.data.sources.files import AnySource, FilePart, find_source, list_parts, read_part
from sft_play.data.sources.formats import Chat, Example, Text
from sft_play.data.sources.messages import iter_texts
from sft_play.data.sources.raw import BadRow, is_gzipped
from sft_play.errors import SftPlayError, translate_library_errors
from sft_play.process.waiting import release_after_long_text

# Rows that are rendered and tokenised together, fewer where they are longer than
# RENDER_BATCH_CHARS.
RENDER_BATCH_ROWS = 256
# Characters of such a batch, more only in a single row: tokenising takes about 140 bytes of memory
# for each.
RENDER_BATCH_CHARS = 1 << 20

# How much there is to train on, roughly and in seconds: rows and characters of a source, from a
# sample.

# English text by a tokenizer with a large vocabulary; code and other languages have fewer
# characters per token.
CHARACTERS_PER_TOKEN = 4.0
# Rows that are read of each file; the rest of a longer one is taken to be like them.
SAMPLE_ROWS = 20_000
# Characters that are read of each file at most.
SAMPLE_CHARACTERS = 32 << 20
# Files that are read at most; the others are taken to have as many rows per byte.
SAMPLE_FILES = 20


@dataclass(frozen=True)
class EstimatedSize:
    """Rows of the training data and their characters, estimated."""

    rows: int
    characters: int

    @property
    def tokens(self) -> int:
        """Tokens by the usual length of one."""
        return int(self.characters / CHARACTERS_PER_TOKEN)


def estimate_size(data: DataConfig, *, wants_text: bool = False) -> EstimatedSize | None:
    """Estimate the size of the training data; None if a file is missing, cannot be read, or is on
    the hub."""
    sources = [(source.path, source.max_rows) for source in data.sources] or [
        (data.train_path or "", None)
    ]
    rows = characters = 0.0
    for path, max_rows in sources:
        size = _estimate_source(path, data.encoding, wants_text=wants_text)
        if size is None:
            return None
        used_rows = min(size.rows, max_rows or size.rows)
        rows, characters = rows + used_rows, characters + size.characters * used_rows / size.rows
    return EstimatedSize(round(rows), round(characters))


def _estimate_source(source_path: str, encoding: str, *, wants_text: bool) -> EstimatedSize | None:
    # an estimate never stops a plan
    with contextlib.suppress(OSError, SftPlayError, ValueError, RuntimeError):
        parts = list_parts(find_source(source_path, encoding=encoding), wants_text=wants_text)
        if any(part.kind != "auto" for part in parts):
            return None
        file_bytes = [part.path.stat().st_size for part in parts]
        file_sizes = [_estimate_file(part) for part in parts[:SAMPLE_FILES]]
        share = sum(file_bytes) / max(1, sum(file_bytes[:SAMPLE_FILES]))
        rows, characters = (
            sum(size.rows for size in file_sizes),
            sum(size.characters for size in file_sizes),
        )
        return EstimatedSize(round(rows * share), round(characters * share)) if rows else None
    return None


def _estimate_file(part: FilePart) -> EstimatedSize:
    rows = characters = 0
    for rows_read, row in enumerate(read_part(part), start=1):
        if not isinstance(row, BadRow):
            rows, characters = rows + 1, characters + sum(map(len, iter_texts(row.data)))
        # a longer file: by lines, or by bytes
        if rows and (rows_read == SAMPLE_ROWS or characters >= SAMPLE_CHARACTERS):
            compression = 4 if is_gzipped(part.path) else 1  # JSON compresses to about a quarter
            count = count_part_rows([part]) or part.path.stat().st_size * compression * rows // max(
                1, characters
            )
            return EstimatedSize(max(rows, count), max(rows, count) * characters // rows)
    return EstimatedSize(rows, characters)


# --------------------------------------------------------------------------------------------------
# Count rows while they are built; and render rows in this process, batch by batch, to show, write
# or count them.


# Counts
class RowCounter:
    """Counts rows as they are made with one tokenizer."""

    def __init__(self, renderer: Renderer) -> None:
        tokenizer_parts, backend = renderer.tokenizer_parts, renderer.backend
        self._bos_id = tokenizer_parts.bos_id
        pad_token = dict(tokenizer_parts.special_tokens_map).get("pad_token")
        # a tokenizer without a pad token of its own pads with eos
        self._pad_id = None
        if pad_token not in (None, tokenizer_parts.eos_token):
            self._pad_id = backend.token_to_id(pad_token)
        added_ids = (token_id for token_id, _, _ in tokenizer_parts.added_tokens)
        self._special_ids = frozenset(added_ids) | frozenset(
            map(backend.token_to_id, tokenizer_parts.special_tokens)
        )

    def count(
        self, stats: RowStats, row_number: int, whole_row: TokenRow, row: TokenRow | BadRow
    ) -> None:
        """Count a rendered row: as `whole_row`, and as max_seq_len leaves it; a bad `row` is too
        long."""
        runs = trained_runs(whole_row.labels)
        stats.truncation_cost.add(len(whole_row.labels), runs)
        if isinstance(row, BadRow):
            stats.count_too_long(whole_row)
            return
        stats.count_rendered(whole_row)
        stats.first_row = stats.first_row or (row_number, whole_row)
        stats.count_kept(row, whole_row)
        stats.lengths.append(len(row.input_ids))
        stats.rows_with_bos += self._bos_id is not None and list(whole_row.input_ids[:1]) == [
            self._bos_id
        ]
        stats.rows_training_pad += self._pad_id is not None and self._pad_id in row.labels
        has_open_end = False
        for begin, end in runs:
            # the last two: `<|im_end|>` and a line break
            last_labels = reversed(whole_row.labels[max(begin, end - 2) : end])
            end_id = next(
                (token_id for token_id in last_labels if token_id in self._special_ids), None
            )
            if end_id is None:
                has_open_end = True
            else:
                stats.end_token_ids[end_id] += 1
        if whole_row.added_end:
            stats.added_ends[whole_row.added_end.strip()] += 1
        if has_open_end and whole_row.method != "document":
            stats.rows_with_open_end += 1
            stats.first_open_end_location = stats.first_open_end_location or whole_row.location


# Rows, one batch after the other
@dataclass(frozen=True)
class RowOutcome:
    """An example with its whole row and what max_seq_len leaves of it, or why there is none;
    `row_number` counts the file's rows from 1. `whole_row` is None where nothing was rendered;
    beside a whole row, a bad `row` is too long."""

    row_number: int
    example: Example
    whole_row: TokenRow | None
    row: TokenRow | BadRow


class RowRenderer:
    """Renders examples as the token rows a run trains; with data.multi_turn=split one becomes
    several. In `task_mode: cpt` documents stay whole (they are joined and cut into full blocks),
    and a chat is a bad row."""

    def __init__(self, renderer: Renderer, *, task_mode: str) -> None:
        self.renderer, self.task_mode = renderer, task_mode
        self.max_seq_len = renderer.max_seq_len

    def render_rows(
        self, rows: Iterable[tuple[int, Example | BadRow]], *, is_document: bool = False
    ) -> Iterator[BadRow | RowOutcome]:
        """Tokenise numbered rows in batches, in their order; bad rows are passed on. `is_document`:
        the rows are plain text of `task_mode: cpt_mixed`."""
        is_joined = is_document or self.task_mode == "cpt"
        for batch in split_batches(rows):
            items: list[NumberedExample] = []
            for row_number, item in batch:
                if isinstance(item, BadRow) or is_joined:
                    items.append((row_number, item))
                else:
                    turns = self.renderer.split_turns(self.renderer.recover_chat(item))
                    items += [(row_number, example) for example in turns]
            examples = [item for _, item in items if not isinstance(item, BadRow)]
            if is_joined:
                examples = [item for item in examples if isinstance(item, Text)]
            with translate_library_errors():
                rendered = iter(self.renderer.render_all(examples))
            for row_number, item in items:
                if isinstance(item, BadRow):
                    yield item
                elif is_joined and isinstance(item, Chat):
                    bad_row = BadRow(
                        item.where,
                        f"task_mode is {self.task_mode}, which takes plain text here, and the row"
                        " is a chat",
                    )
                    yield RowOutcome(row_number, item, None, bad_row)
                elif isinstance(row := next(rendered), BadRow):
                    yield RowOutcome(row_number, item, None, row)
                else:
                    yield RowOutcome(
                        row_number, item, row, row if is_joined else self.renderer.truncate(row)
                    )
            release_after_long_text(max((character_count(item) for _, item in items), default=0))


NumberedExample = tuple[int, Example | BadRow]


def split_batches(rows: Iterable[NumberedExample]) -> Iterator[list[NumberedExample]]:
    """Rows that are rendered and tokenised together: RENDER_BATCH_ROWS, or RENDER_BATCH_CHARS, more
    only in one."""
    batch: list[NumberedExample] = []
    chars = 0
    for row_number, example in rows:
        row_chars = character_count(example)
        if batch and (len(batch) == RENDER_BATCH_ROWS or chars + row_chars > RENDER_BATCH_CHARS):
            yield batch
            batch, chars = [], 0
        batch.append((row_number, example))
        chars += row_chars
    if batch:
        yield batch


def count_readable_rows(
    source: AnySource,
    data: DataConfig,
    split: str,
    *,
    wants_text: bool = False,
    max_rows: int | None = None,
) -> RowStats:
    """Count the rows of a source, or the first `max_rows`, as far as that needs no tokenizer.
    Raises DataError where a file cannot be read or is of no format."""
    stats = RowStats(str(source), split=split)
    reader = ExampleReader(
        source, data, split="train" if split == "text" else split, wants_text=wants_text
    )
    for _, example in itertools.islice(reader.numbered_examples(), max_rows):
        if isinstance(example, BadRow):
            stats.count_bad(example)
        else:
            stats.count_example(example)
    stats.format, stats.rows = reader.format, reader.rows
    return stats
