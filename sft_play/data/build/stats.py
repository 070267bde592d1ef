"""What became of the rows of a source: one count, which training, `make check`, `render` and `process` read.

Of each row only a digest of its tokens and a length are kept.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sft_play.config.schema import DataConfig
from sft_play.data.masks.token_row import IGNORED, TokenRow
from sft_play.data.sources.columns import UnusedColumn
from sft_play.data.sources.formats import Chat, Example
from sft_play.data.sources.raw import LISTED_BAD_ROWS, BadRow


def rows_text(count: int) -> str:
    """A number of rows in words."""
    return f"{count:,} row{'s' * (count != 1)}"


# What a limit costs


def trained_runs(labels: Sequence[int]) -> list[tuple[int, int]]:
    """The runs [start, end) of trained tokens; labels of shape [T]."""
    runs: list[tuple[int, int]] = []
    at = 0
    for is_trained, run in itertools.groupby(labels, IGNORED.__ne__):
        end = at + len(list(run))
        if is_trained:
            runs.append((at, end))
        at = end
    return runs


@dataclass
class LimitCost:
    """How many trained tokens each `max_seq_len` would keep, from whole rows; `truncate` says how they are cut."""

    truncate: str
    longest: int = 0
    trained: int = 0
    """Trained tokens of all whole rows; the first token of a row is never predicted and does not count."""
    _steps: array[int] = field(default_factory=lambda: array("q", [0, 0]))
    """Second differences of the tokens that a limit of n keeps, n being the index: two sums give the tokens, and
    adding a run of any length changes two entries."""

    def add(self, size: int, runs: Sequence[tuple[int, int]]) -> None:
        """Count one whole row of `size` tokens with these runs of trained ones."""
        self.longest = max(self.longest, size)
        if size + 2 > len(self._steps):
            self._steps.extend([0] * (size + 2 - len(self._steps)))
        # With the end cut, a limit of n keeps max(0, min(n, end) - begin) tokens of a run: the count grows by one for
        # each n from begin + 1 to end, so its second difference is 1 at begin + 1 and -1 at end + 1.
        for begin, end in runs:
            begin = max(begin, 1)
            if end <= begin:
                continue
            self.trained += end - begin
            if self.truncate == "drop":  # all at once, where the whole row fits
                self._steps[size] += end - begin
                self._steps[size + 1] -= end - begin
                continue
            if self.truncate == "prompt":  # a token is kept where the limit reaches back to it
                begin, end = size - end, size - begin
            self._steps[begin + 1] += 1
            self._steps[end + 1] -= 1

    def merge(self, other: LimitCost) -> None:
        """Add the rows of another."""
        self.longest = max(self.longest, other.longest)
        self.trained += other.trained
        longer = len(other._steps) - len(self._steps)
        if longer > 0:
            self._steps.extend([0] * longer)
        for index, step in enumerate(other._steps):
            self._steps[index] += step

    def _kept(self) -> Iterator[int]:
        return itertools.accumulate(itertools.accumulate(self._steps))

    def kept_share(self, limit: int) -> float:
        """The share of the trained tokens that a limit keeps."""
        # the last of those there are: beyond the longest row every limit keeps all
        return list(itertools.islice(self._kept(), limit + 1))[-1] / (self.trained or 1)

    def limit_for(self, share: float) -> int:
        """The smallest limit that keeps this share."""
        return next((limit for limit, kept in enumerate(self._kept()) if kept >= share * self.trained), self.longest)


# Rows


@dataclass
class RowStats:
    """Counts of the rows of a source, or of several. Tokens count as they are trained, after the cut at max_seq_len."""

    source: str = ""
    format: str = "unknown"
    rows: int = 0
    split: str = ""
    bad: Counter[str] = field(default_factory=Counter)
    """Rows that cannot be read, by reason."""
    first_bad: list[BadRow] = field(default_factory=list)
    unmasked: Counter[str] = field(default_factory=Counter)
    """Rows that can be read and get no exact mask, by reason; those that are too long are not among them."""
    first_unmasked: list[BadRow] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """Rows that the run YAML asks to leave out, by reason."""
    formats: Counter[str] = field(default_factory=Counter)
    chats: int = 0
    texts: int = 0
    turns: Counter[str] = field(default_factory=Counter)
    """Turns of the rows that can be read, by role."""
    notes: Counter[str] = field(default_factory=Counter)
    """What looks odd in rows that are used."""
    first_noted: dict[str, str] = field(default_factory=dict)
    """Where the first row with each note is."""
    # rows in which a column that is not read holds something
    unused: Counter[UnusedColumn] = field(default_factory=Counter)
    digests: array[int] = field(default_factory=lambda: array("Q"))
    """Of the tokens of each row that is kept, or of each document."""
    shared: dict[str, int] = field(default_factory=dict)
    """Rows that are in another split too, by its name."""

    kept: int = 0
    methods: Counter[str] = field(default_factory=Counter)
    """Rows by how their trained spans were found."""
    tokens: int = 0
    trained: int = 0
    cut_rows: int = 0
    tokens_cut: int = 0
    merged: int = 0
    """Answers that end inside a token, which is split there."""
    untrained_turns: int = 0
    stripped_think: int = 0
    special_rows: int = 0
    """Rows whose texts spell special tokens."""
    special_documents: int = 0
    """Those of them that are plain text, of which every token is trained."""
    special_in_text: int = 0
    """Special tokens that texts spell."""
    first_special: str = ""
    lengths: array[int] = field(default_factory=lambda: array("q"))
    """Tokens of each row that is kept."""
    with_bos: int = 0
    open_ends: int = 0
    """Rows with an answer whose last trained token is no special one."""
    first_open_end: str = ""
    cut_ends: int = 0
    """Rows of which max_seq_len cuts an answer in two, so that its end is not trained."""
    ends: Counter[int] = field(default_factory=Counter)
    """Ids of the special tokens that trained parts end with."""
    added_ends: Counter[str] = field(default_factory=Counter)
    """Rows whose last turn the template does not end, by the end that was added."""
    pad_trained: int = 0
    roles: dict[str, list[int]] = field(default_factory=dict)
    """[tokens, trained] by role, in `role_rows` of the rows."""
    role_rows: int = 0
    first: Any = None
    """The first row that can be trained: `(row number, TokenRow)`, before any cut."""

    too_long: int = 0
    """Rows that lose every trained token to max_seq_len, or are left out for their length."""
    shortest_prompt: int = 0
    """Tokens before the first trained one, the fewest among the rows that are too long; 0 where there is none."""
    lost_by_cut: int = 0
    """Trained tokens that were cut from rows that are kept."""
    lost_with_rows: int = 0
    """Trained tokens of the rows that are too long."""
    cost: LimitCost = field(default_factory=lambda: LimitCost("end"))
    """What other limits would keep."""

    @property
    def lost(self) -> int:
        """Trained tokens that max_seq_len takes away."""
        return self.lost_by_cut + self.lost_with_rows

    @property
    def unusable(self) -> Counter[str]:
        """Rows that cannot be read or get no exact mask, by reason."""
        return self.bad + self.unmasked

    @property
    def repeated(self) -> int:
        """Rows, or documents, with the tokens of an earlier one."""
        return len(self.digests) - len(np.unique(self.digests))

    @property
    def dropped(self) -> dict[str, int]:
        """Rows that are not used, by reason."""
        too_long = Counter({"nothing trained is left within max_seq_len, or too long": self.too_long})
        return dict(self.unusable + self.left_out + too_long)  # adding counters leaves zeros out

    # Counting.

    def count_bad(self, row: BadRow) -> None:
        """Count a row that is not used."""
        (self.left_out if row.is_asked else self.bad)[row.reason] += 1
        if not row.is_asked and len(self.first_bad) < LISTED_BAD_ROWS:
            self.first_bad.append(row)

    def count_unmasked(self, row: BadRow) -> None:
        """Count a row that gets no exact mask."""
        self.unmasked[row.reason] += 1
        if len(self.first_unmasked) < LISTED_BAD_ROWS:
            self.first_unmasked.append(row)

    def count_example(self, example: Example) -> None:
        """Count what a row holds."""
        if isinstance(example, Chat):
            self.chats += 1
            self.turns.update([message["role"] for message in example.messages])
        else:
            self.texts += 1
        self._note(example.notes, example.where)
        self.unused.update(example.unused)

    def _note(self, notes: Iterable[str], where: str) -> None:
        for note in notes:
            self.notes[note] += 1
            self.first_noted.setdefault(note, where)

    def count_rendered(self, whole: TokenRow) -> None:
        """Count how a row was rendered."""
        self._note(whole.notes, whole.where)
        self.methods[whole.method] += 1
        self.untrained_turns += whole.untrained_turns
        self.stripped_think += whole.stripped_think
        self._count_special(whole)

    def _count_special(self, whole: TokenRow) -> None:
        if whole.special_in_text:
            self.special_rows += 1
            self.special_in_text += whole.special_in_text
            self.first_special = self.first_special or whole.where
            self.special_documents += whole.method == "document"

    def count_document(self, whole: TokenRow) -> None:
        """Count a document, which is joined with others and cut into blocks."""
        self._count_special(whole)
        self.kept += 1
        self.tokens += len(whole.input_ids)

    def count_kept(self, row: TokenRow, whole: TokenRow) -> None:
        """Count the tokens of a row within max_seq_len, and the answers of the whole row that it cuts in two."""
        size = len(row.labels)
        is_cut_behind = row.cut_tokens > 0 and row.labels == whole.labels[:size]  # not the beginning: the answer's end goes
        self.cut_ends += is_cut_behind and IGNORED not in whole.labels[size - 1 : size + 1]
        self.kept += 1
        self.tokens += len(row.input_ids)
        self.trained += row.trained_tokens
        self.cut_rows += row.cut_tokens > 0
        self.tokens_cut += row.cut_tokens
        self.lost_by_cut += row.lost_trained_tokens
        self.merged += row.merged_edges

    def count_too_long(self, whole: TokenRow) -> None:
        """Count a row of which max_seq_len leaves nothing to train."""
        prompt = next(index for index, label in enumerate(whole.labels) if label != IGNORED)
        self.too_long += 1
        self.shortest_prompt = min(filter(None, (self.shortest_prompt, prompt)), default=0)
        self.lost_with_rows += whole.trained_tokens

    # Adding up.

    def add(self, other: RowStats) -> None:
        """Add the rows of a later piece of the same source, whose rows are numbered from 1 too."""
        if self.first is None and other.first is not None:
            number, whole = other.first
            self.first = (number + self.rows, whole)
        _add_up(self, other, but=("first",))

    def with_held(self, held: RowStats) -> RowStats:
        """The counts of a source whose rows are on two sides, these ones and those that are held out."""
        both = RowStats(format="")
        _add_up(both, self)
        _add_up(both, held, but=("rows", "first"))
        # the tuples differ in their first number: rows are never compared
        both.first = min(filter(None, (self.first, held.first)), default=None)
        return both

    def beside(self, other: RowStats) -> RowStats:
        """Both sources together."""
        both = RowStats()
        for one in (self, other):
            _add_up(both, one, but=("shared",))
        both.shared = dict(Counter(self.shared) + Counter(other.shared))
        both.source = f"{self.source} + {other.source}"
        both.format = f"{self.format} + {other.format}"
        return both

    # Reports.

    def as_json(self) -> dict[str, Any]:
        """The data report of a run's manifest: rows and tokens as counts, `lost_fraction` from 0 to 1."""
        return {
            "source": self.source,
            "format": self.format,
            "rows_in": self.rows,
            "rows_kept": self.kept,
            "dropped": self.dropped,
            "rows_cut": self.cut_rows,
            "tokens": self.tokens,
            "tokens_trained": self.trained,
            "tokens_cut": self.tokens_cut,
            "trained_tokens_lost": self.lost,
            "lost_fraction": self.lost / max(1, self.cost.trained),
            "answers_merged": self.merged,
            "methods": dict(self.methods),
            "untrained_turns": self.untrained_turns,
            "stripped_think": self.stripped_think,
            "special_rows": self.special_rows,
            "repeated": self.repeated,
            "shared": self.shared,
            "noted": dict(self.notes),
            "unused": sorted({name for name, _, _ in self.unused}),
        }

    def short_line(self, *, max_seq_len: int) -> str:
        """The rows in one line: how many, the trained share, the longest, and how many were cut; or blocks of text."""
        rows = f"{self.rows:,} rows" if self.kept == self.rows else f"{self.kept:,} of {self.rows:,} rows"
        shown = f"{rows} of {self.source}, {self.trained / max(1, self.tokens):.0%} of {self.tokens:,} tokens trained"
        if not self.lengths:  # of text, not of chats
            return f"{shown}, in blocks of {max_seq_len:,}"
        cut = f"{self.cut_rows:,} cut at {max_seq_len:,}" if self.cut_rows else "none cut"
        return f"{shown}, longest {min(max(self.lengths), max_seq_len):,}, {cut}"


def token_digest(ids: Sequence[int]) -> int:
    """Eight bytes for a row's tokens: a million rows are 8 MB, and no two share them by chance."""
    return int.from_bytes(hashlib.blake2b(array("i", ids).tobytes(), digest_size=8).digest(), "big")


def note_shared(splits: Sequence[RowStats]) -> None:
    """Count in each how many of its rows an earlier one of another split has."""
    for earlier, later in itertools.combinations(splits, 2):
        count = len(np.intersect1d(earlier.digests, later.digests))
        if count and earlier.split != later.split:
            later.shared[earlier.split] = later.shared.get(earlier.split, 0) + count


def _add_up(mine: RowStats, other: RowStats, *, but: Collection[str] = ()) -> None:
    """Add the counts of later rows to those of earlier ones, field by field; those in `but` are left to the caller."""
    for name, theirs in vars(other).items():
        own = getattr(mine, name)
        if name in but:
            continue
        if name == "shortest_prompt":
            setattr(mine, name, min(filter(None, (own, theirs)), default=0))
        elif name == "roles":
            for role, counted in theirs.items():
                own[role] = [sum(pair) for pair in zip(own.get(role, (0, 0)), counted, strict=True)]
        elif isinstance(own, Counter):
            own.update(theirs)
        elif isinstance(own, array):
            own.extend(theirs)
        elif isinstance(own, list):
            own.extend(theirs[: LISTED_BAD_ROWS - len(own)])
        elif isinstance(own, dict):
            setattr(mine, name, {**theirs, **own})
        elif isinstance(own, LimitCost):
            own.merge(theirs)
        elif isinstance(own, int):
            setattr(mine, name, own + theirs)
        else:
            setattr(mine, name, own or theirs)


# `model.max_seq_len` is proposed in multiples of this, at which kernels are at their best.
LIMIT_STEP = 64


def ways_to_keep(stats: RowStats, data: DataConfig, *, max_seq_len: int, positions: int | None) -> str:
    """The limits that would keep enough of the trained tokens, and all, within the model's positions."""
    cost, longer = stats.cost, []
    enough = 1 - data.max_lost_fraction
    other = "" if data.truncate == "prompt" else ", or keep the ends of rows with data.truncate=prompt"
    limits = {-(-cost.limit_for(share) // LIMIT_STEP) * LIMIT_STEP for share in (enough, 1.0)}
    for limit in sorted(limits):
        if limit > max_seq_len and (positions is None or limit <= positions):
            kept = cost.kept_share(limit)
            longer.append(f"{limit} keeps {'all' if kept == 1 else f'{kept:.1%}'}")
    if longer:
        return f"set model.max_seq_len: {', '.join(longer)}{other}"
    if positions is not None and cost.kept_share(positions) > cost.kept_share(max_seq_len):
        return f"set model.max_seq_len={positions}, the most that the model has: {cost.kept_share(positions):.1%} kept"
    more = positions is not None and positions > max_seq_len
    why = f"the model's {positions:,} positions keep no more" if more else "the model has no more positions"
    return f"{why}: split or shorten the rows{other}"
