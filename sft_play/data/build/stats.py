"""Counts of the rows of a source, which training, `make check`, `render` and `process` read.

Of each row only a digest of its tokens and a length are kept.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sft_play.config.schema import DataConfig
from sft_play.data.masks.token_row import IGNORED, TokenRow
from sft_play.data.sources.columns import UnusedColumn
from sft_play.data.sources.formats import Chat, Example
from sft_play.data.sources.images import Picture
from sft_play.data.sources.raw import LISTED_BAD_ROWS, BadRow

# What a limit costs


def trained_runs(labels: Sequence[int]) -> list[tuple[int, int]]:
    """The runs [start, end) of trained tokens; labels of shape [T]."""
    runs: list[tuple[int, int]] = []
    start = 0
    for is_trained, run in itertools.groupby(labels, IGNORED.__ne__):
        end = start + len(list(run))
        if is_trained:
            runs.append((start, end))
        start = end
    return runs


@dataclass
class TruncationCost:
    """How many trained tokens each `max_seq_len` would keep, from whole rows; `truncate` says how
    they are cut."""

    truncate: str
    longest: int = 0
    # Trained tokens of all whole rows; the first token of a row is never predicted and does not
    # count.
    trained_tokens: int = 0
    # Second differences of the tokens that a limit of n keeps, by n: two sums give the tokens, and
    # adding a run of any length changes two entries.
    _second_differences: Counter[int] = field(default_factory=Counter)

    def add(self, row_tokens: int, runs: Sequence[tuple[int, int]]) -> None:
        """Count one whole row of `row_tokens` tokens with these runs of trained ones."""
        self.longest = max(self.longest, row_tokens)
        # With the end cut, a limit of n keeps max(0, min(n, end) - begin) tokens of a run: the
        # count grows by one for each n from begin + 1 to end, so its second difference is 1 at
        # begin + 1 and -1 at end + 1.
        for begin, end in runs:
            begin, weight = max(begin, 1), 1
            self.trained_tokens += end - begin
            if self.truncate == "prompt":  # a token is kept where the limit reaches back to it
                begin, end = row_tokens - end, row_tokens - begin
            elif self.truncate == "drop":  # all at once, where the whole row fits
                begin, end, weight = row_tokens - 1, row_tokens, end - begin
            self._second_differences[begin + 1] += weight
            self._second_differences[end + 1] -= weight

    def _kept_tokens(self) -> Iterator[int]:
        differences = map(self._second_differences.__getitem__, range(self.longest + 1))
        return itertools.accumulate(itertools.accumulate(differences))

    def kept_share(self, limit: int) -> float:
        """The share of the trained tokens that a limit keeps."""
        # the last of those there are: beyond the longest row every limit keeps all
        return list(itertools.islice(self._kept_tokens(), limit + 1))[-1] / (
            self.trained_tokens or 1
        )

    def smallest_limit(self, share: float) -> int:
        """The smallest limit that keeps this share of the trained tokens."""
        return next(
            (
                limit
                for limit, kept_tokens in enumerate(self._kept_tokens())
                if kept_tokens >= share * self.trained_tokens
            ),
            self.longest,
        )


# Rows

# Counts that a report has where there are rows with images.
_IMAGE_COUNTS = ("image_rows", "images", "image_tokens")


@dataclass
class RowStats:
    """Counts of the rows of a source, or of several. Tokens count as they are trained, after the
    cut at max_seq_len."""

    source: str = ""
    format: str = "unknown"
    rows: int = 0
    split: str = ""
    # Rows that cannot be read, by reason.
    bad_rows: Counter[str] = field(default_factory=Counter)
    first_bad_rows: list[BadRow] = field(default_factory=list)
    # Rows that can be read and get no exact mask, by reason; those that are too long are not among
    # them.
    unmasked_rows: Counter[str] = field(default_factory=Counter)
    first_unmasked_rows: list[BadRow] = field(default_factory=list)
    # Rows that the run YAML asks to leave out, by reason.
    left_out_rows: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)
    chats: int = 0
    texts: int = 0
    # Turns of the rows that can be read, by role.
    turns: Counter[str] = field(default_factory=Counter)
    # What looks odd in rows that are used.
    notes: Counter[str] = field(default_factory=Counter)
    # Where the first row with each note is.
    first_note_locations: dict[str, str] = field(default_factory=dict)
    # rows in which a column that is not read holds something
    unused_columns: Counter[UnusedColumn] = field(default_factory=Counter)
    # `token_digest` of each row that is kept, or of each document.
    digests: array[int] = field(default_factory=lambda: array("Q"))
    # Rows that are in another split too, by its name.
    shared_rows: dict[str, int] = field(default_factory=dict)

    kept_rows: int = 0
    # Rows by how their trained spans were found.
    methods: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    trained_tokens: int = 0
    cut_rows: int = 0
    cut_tokens: int = 0
    # Answers that end inside a token, which is split there.
    merged_edges: int = 0
    untrained_turns: int = 0
    stripped_think_pieces: int = 0
    # Rows whose texts spell special tokens.
    special_rows: int = 0
    # Rows among them that are plain text: every token is trained.
    special_documents: int = 0
    # Special tokens that texts spell.
    special_token_count: int = 0
    first_special_location: str = ""
    # Tokens of each row that is kept.
    lengths: array[int] = field(default_factory=lambda: array("q"))
    rows_with_bos: int = 0
    # Rows with an answer whose last trained token is no special one.
    rows_with_open_end: int = 0
    first_open_end_location: str = ""
    # Rows with an answer that max_seq_len cuts in two: its end is not trained.
    rows_with_cut_end: int = 0
    # Ids of the special tokens that trained parts end with.
    end_token_ids: Counter[int] = field(default_factory=Counter)
    # Rows whose last turn the template does not end, by the end that was added.
    added_ends: Counter[str] = field(default_factory=Counter)
    rows_training_pad: int = 0
    # Rows with images that are kept, their images, and the tokens that these take.
    image_rows: int = 0
    images: int = 0
    image_tokens: int = 0
    # Size and time of change (ns) of each file that has one of these images.
    image_files: dict[str, tuple[int, int]] = field(default_factory=dict)
    # The most tokens that the images of a row take.
    largest_image_row: int = 0
    # The first row that can be trained: `(row number, TokenRow)`, before any cut.
    first_row: Any = None

    # Rows that lose every trained token to max_seq_len, or are left out for their length.
    too_long_rows: int = 0
    # Tokens before the first trained one, the fewest among the rows that are too long; 0 where
    # there is none.
    shortest_prompt: int = 0
    # Trained tokens that were cut from rows that are kept.
    tokens_lost_by_cut: int = 0
    # Trained tokens of the rows that are too long.
    tokens_lost_with_rows: int = 0
    # What other limits would keep.
    truncation_cost: TruncationCost = field(default_factory=lambda: TruncationCost("end"))

    @property
    def lost_tokens(self) -> int:
        """Trained tokens that max_seq_len takes away."""
        return self.tokens_lost_by_cut + self.tokens_lost_with_rows

    @property
    def repeated_rows(self) -> int:
        """Rows, or documents, with the tokens of an earlier one."""
        return len(self.digests) - len(np.unique(self.digests))

    @property
    def dropped_rows(self) -> dict[str, int]:
        """Rows that are not used, by reason."""
        too_long = Counter(
            {"nothing trained is left within max_seq_len, or too long": self.too_long_rows}
        )
        # adding counters leaves zeros out
        return dict(self.bad_rows + self.unmasked_rows + self.left_out_rows + too_long)

    # Counting.

    def count_bad(self, row: BadRow) -> None:
        """Count a row that is not used."""
        (self.left_out_rows if row.is_asked else self.bad_rows)[row.reason] += 1
        if not row.is_asked and len(self.first_bad_rows) < LISTED_BAD_ROWS:
            self.first_bad_rows.append(row)

    def count_example(self, example: Example) -> None:
        """Count what a row holds."""
        if isinstance(example, Chat):
            self.chats += 1
            self.turns.update([message["role"] for message in example.messages])
        else:
            self.texts += 1
        self._note(example.notes, example.where)
        self.unused_columns.update(example.unused)

    def _note(self, notes: Iterable[str], location: str) -> None:
        for note in notes:
            self.notes[note] += 1
            self.first_note_locations.setdefault(note, location)

    def count_rendered(self, row: TokenRow) -> None:
        """Count how a row was rendered."""
        self._note(row.notes, row.location)
        self.methods[row.method] += 1
        self.untrained_turns += row.untrained_turns
        self.stripped_think_pieces += row.stripped_think_pieces
        self._count_special(row)

    def _count_special(self, row: TokenRow) -> None:
        if row.special_token_count:
            self.special_rows += 1
            self.special_token_count += row.special_token_count
            self.first_special_location = self.first_special_location or row.location
            self.special_documents += row.method == "document"

    def count_document(self, row: TokenRow) -> None:
        """Count a document, which is joined with others and cut into blocks."""
        self._count_special(row)
        self.kept_rows += 1
        self.tokens += len(row.input_ids)

    def count_kept(self, row: TokenRow, whole_row: TokenRow) -> None:
        """Count the tokens of a row within max_seq_len, and the answers of the whole row that it
        cuts in two."""
        size = len(row.labels)
        # not the beginning: the answer's end goes
        is_end_cut = row.cut_tokens > 0 and row.labels == whole_row.labels[:size]
        self.rows_with_cut_end += (
            is_end_cut and IGNORED not in whole_row.labels[size - 1 : size + 1]
        )
        self.kept_rows += 1
        self.image_rows += bool(row.images)
        self.images += len(row.images)
        for picture in row.images:
            file = picture.file
            if file and file not in self.image_files:
                self.image_files[file] = file_state(file)
        self.image_tokens += row.image_tokens
        self.largest_image_row = max(self.largest_image_row, row.image_tokens)
        self.tokens += len(row.input_ids)
        self.trained_tokens += row.trained_tokens
        self.cut_rows += row.cut_tokens > 0
        self.cut_tokens += row.cut_tokens
        self.tokens_lost_by_cut += row.lost_trained_tokens
        self.merged_edges += row.merged_edges

    def count_too_long(self, row: TokenRow) -> None:
        """Count a row that max_seq_len leaves nothing of to train, or leaves out for its length."""
        prompt_tokens = next(index for index, label in enumerate(row.labels) if label != IGNORED)
        self.too_long_rows += 1
        self.shortest_prompt = min(filter(None, (self.shortest_prompt, prompt_tokens)), default=0)
        self.tokens_lost_with_rows += row.trained_tokens

    # Adding up.

    def add(self, other: RowStats) -> None:
        """Add the rows of a later piece of the same source, whose rows are numbered from 1 too."""
        if self.first_row is None and other.first_row is not None:
            number, row = other.first_row
            self.first_row = (number + self.rows, row)
        _add_fields(self, other, excluded=("first_row",))

    def add_held_out(self, held_out: RowStats) -> None:
        """Add the held-out rows of a source to those that it keeps."""
        _add_fields(self, held_out, excluded=("rows", "first_row"))
        # the tuples differ in their first number: rows are never compared
        self.first_row = min(filter(None, (self.first_row, held_out.first_row)), default=None)

    def merge_source(self, other: RowStats) -> RowStats:
        """Both sources together."""
        combined = RowStats()
        for each in (self, other):
            _add_fields(combined, each, excluded=("shared_rows",))
        combined.shared_rows = dict(Counter(self.shared_rows) + Counter(other.shared_rows))
        combined.source = f"{self.source} + {other.source}"
        combined.format = f"{self.format} + {other.format}"
        return combined

    # Reports.

    def as_json(self) -> dict[str, Any]:
        """The data report of a run's manifest: rows and tokens as counts, `lost_fraction` from 0 to
        1."""
        return {
            "source": self.source,
            "format": self.format,
            "rows_in": self.rows,
            "rows_kept": self.kept_rows,
            "dropped": self.dropped_rows,
            "rows_cut": self.cut_rows,
            "tokens": self.tokens,
            "tokens_trained": self.trained_tokens,
            "tokens_cut": self.cut_tokens,
            "trained_tokens_lost": self.lost_tokens,
            "lost_fraction": self.lost_tokens / max(1, self.truncation_cost.trained_tokens),
            "answers_merged": self.merged_edges,
            "methods": dict(self.methods),
            "untrained_turns": self.untrained_turns,
            "stripped_think": self.stripped_think_pieces,
            "special_rows": self.special_rows,
            "repeated": self.repeated_rows,
            "shared": self.shared_rows,
            "noted": dict(self.notes),
            "unused": sorted({name for name, _, _ in self.unused_columns}),
            **{name: getattr(self, name) for name in _IMAGE_COUNTS if self.image_rows},
        }

    def short_line(self, *, max_seq_len: int) -> str:
        """The rows in one line: how many, the trained share, the longest, and how many were cut; or
        blocks of text."""
        rows = (
            f"{self.rows:,} rows"
            if self.kept_rows == self.rows
            else f"{self.kept_rows:,} of {self.rows:,} rows"
        )
        line = (
            f"{rows} of {self.source}, {self.trained_tokens / max(1, self.tokens):.0%} of "
            f"{self.tokens:,} tokens trained"
        )
        if not self.lengths:  # of text, not of chats
            return f"{line}, in blocks of {max_seq_len:,}"
        cut = f"{self.cut_rows:,} cut at {max_seq_len:,}" if self.cut_rows else "none cut"
        return f"{line}, longest {min(max(self.lengths), max_seq_len):,}, {cut}"


def file_state(file: str) -> tuple[int, int]:
    """Size and time of change (ns) of a file; zeros where it is not there."""
    try:
        state = Path(file).stat()
    except OSError:
        return 0, 0
    return state.st_size, state.st_mtime_ns


def token_digest(ids: Sequence[int], images: Sequence[Picture] = ()) -> int:
    """Hash a row's tokens and pictures to 64 bits: a million rows take 8 MB, and no two collide by
    chance."""
    content = hashlib.blake2b(array("i", ids).tobytes(), digest_size=8)
    for picture in images:
        content.update(picture.digest.encode())
    return int.from_bytes(content.digest(), "big")


def count_shared_rows(splits: Sequence[RowStats]) -> None:
    """Count in each how many of its rows an earlier one of another split has."""
    for earlier, later in itertools.combinations(splits, 2):
        count = len(np.intersect1d(earlier.digests, later.digests))
        if count and earlier.split != later.split:
            later.shared_rows[earlier.split] = later.shared_rows.get(earlier.split, 0) + count


# Add the counts of later rows to earlier counts, field by field; the caller adds the fields of
# `excluded`.
def _add_fields(stats: Any, other: Any, *, excluded: Collection[str] = ()) -> None:
    for name in vars(other).keys() - set(excluded):
        value, other_value = getattr(stats, name), getattr(other, name)
        if name == "shortest_prompt":
            setattr(stats, name, min(filter(None, (value, other_value)), default=0))
        elif name in ("longest", "largest_image_row"):
            setattr(stats, name, max(value, other_value))
        elif isinstance(value, Counter):
            value.update(other_value)
        elif isinstance(value, array):
            value.extend(other_value)
        elif isinstance(value, list):
            value.extend(other_value[: LISTED_BAD_ROWS - len(value)])
        elif isinstance(value, dict):
            setattr(stats, name, {**other_value, **value})
        elif isinstance(value, TruncationCost):
            _add_fields(value, other_value)
        elif isinstance(value, int):
            setattr(stats, name, value + other_value)
        else:
            setattr(stats, name, value or other_value)


# `model.max_seq_len` is proposed in multiples of this, at which kernels are at their best.
LIMIT_MULTIPLE = 64


def length_remedy(
    stats: RowStats, data: DataConfig, *, max_seq_len: int, max_positions: int | None
) -> str:
    """Propose values of max_seq_len that keep enough of the trained tokens, and all, within the
    model's positions."""
    cost, longer_limits = stats.truncation_cost, []
    required_share = 1 - data.max_lost_fraction
    prompt_hint = (
        "" if data.truncate == "prompt" else ", or keep the ends of rows with data.truncate=prompt"
    )
    limits = {
        -(-cost.smallest_limit(share) // LIMIT_MULTIPLE) * LIMIT_MULTIPLE
        for share in (required_share, 1.0)
    }
    for limit in sorted(limits):
        if limit > max_seq_len and (max_positions is None or limit <= max_positions):
            kept_share = cost.kept_share(limit)
            longer_limits.append(
                f"{limit} keeps {'all' if kept_share == 1 else f'{kept_share:.1%}'}"
            )
    if longer_limits:
        return f"set model.max_seq_len: {', '.join(longer_limits)}{prompt_hint}"
    if max_positions is not None and cost.kept_share(max_positions) > cost.kept_share(max_seq_len):
        return (
            f"set model.max_seq_len={max_positions}, the most that the model has: "
            f"{cost.kept_share(max_positions):.1%} kept"
        )
    reason = "the model has no more positions"
    if max_positions is not None and max_positions > max_seq_len:
        reason = f"the model's {max_positions:,} positions keep no more"
    return f"{reason}: split or shorten the rows{prompt_hint}"
