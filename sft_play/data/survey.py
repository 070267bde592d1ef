"""A data file as it will be trained, counted: bad rows, repeated rows, masks, ends of turns, what a limit costs.

Everything is counted from the rows' own tokens and labels, one row at a time: nothing of a file is kept but a digest
and two lengths a row.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import numpy as np

from sft_play.config.schema import DataConfig
from sft_play.data.files import AnySource, BadRow, Part, RawRow, data_files, read_part
from sft_play.data.formats import (
    Chat,
    Example,
    Format,
    Text,
    check_columns,
    first_format,
    rename_columns,
    to_example,
)
from sft_play.data.heap import give_back
from sft_play.data.messages import TEXT_KEYS
from sft_play.data.process import content_digest
from sft_play.data.render import IGNORED, LOST_TO_LENGTH, TOO_LONG, Rendered, Renderer, TokenizerParts, TokenRow
from sft_play.data.workers import News, bytes_of, how_many, pieces_of, together
from sft_play.log import one_line

SHOWN_BAD_ROWS = 20
"""Bad rows of a file that are listed; the others are counted."""
ROLE_ROWS, FEWEST_ROLE_ROWS = 1_000, 10
"""Rows in which tokens are counted by role: the first hundred, then ever fewer. Of each piece of a large file that
several processes read, so many fewer, but this many."""
BATCH_ROWS = 256
"""Rows that are rendered and tokenised together."""
BATCH_CHARS = 1 << 20
"""Characters of such a batch, more only where it is one row: tokenising takes some 140 bytes of memory for each."""
TEMPLATE = "template"
"""What tokens are counted under that stand in no message's text."""


class ExampleReader:
    """The examples of a file, folder or data set in order, each row that cannot be one as a `BadRow`.

    Every file has a format of its own. `rows` and `format` say what was found so far. Raises (while it is read):
        DataError: a whole file cannot be read, or its columns are those of no format.
    """

    def __init__(self, path: AnySource, data: DataConfig, *, split: str, text_wanted: bool = False) -> None:
        check_columns(data)
        self.path = path
        self.rows = 0
        self._data, self._split, self._text_wanted = data, split, text_wanted
        self._formats: dict[str, None] = {}

    @property
    def format(self) -> str:
        """The names of the rows' formats."""
        return ", ".join(self._formats) or "unknown"

    def raw(self) -> Iterator[tuple[RawRow | BadRow, Format | None]]:
        """The rows as they stand in the files, counted, each with the format of its file."""
        for part in data_files(self.path, split=self._split, text_wanted=self._text_wanted):
            rows = read_part(part)
            first, shape = first_format(rows, self._data)
            if shape is not None:
                self._formats[shape.name] = None
            for row in itertools.chain(first, rows):
                self.rows += 1
                yield row, shape

    def example(self, row: RawRow | BadRow, shape: Format | None) -> Example | BadRow:
        """A row of a file as an example."""
        return example_of(row, shape, self._data)

    def numbered(self) -> Iterator[tuple[int, Example | BadRow]]:
        """The rows as examples, with their numbers from 1."""
        for row, shape in self.raw():
            yield self.rows, self.example(row, shape)


def example_of(row: RawRow | BadRow, shape: Format | None, data: DataConfig) -> Example | BadRow:
    """A row of a file with this format as an example."""
    if isinstance(row, BadRow):
        return row
    if shape is None:
        return BadRow(row.where, "no known format")
    return to_example(rename_columns(row, data.columns), shape, data)


# --- what a limit costs -----------------------------------------------------------------------------------------------


def trained_runs(labels: Sequence[int]) -> list[tuple[int, int]]:
    """The runs [start, end) of trained tokens; labels of shape [T]."""
    is_trained = np.zeros(len(labels) + 2, dtype=np.int8)
    is_trained[1:-1] = np.asarray(labels, dtype=np.int64) != IGNORED
    edges = np.flatnonzero(np.diff(is_trained)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


class LimitCost:
    """How many trained tokens each `max_seq_len` would keep, from rows before they are cut."""

    def __init__(self, truncate: str) -> None:
        self._truncate = truncate
        self._steps: array[int] = array("q", [0, 0])
        """Differences of the number of trained tokens that need a limit of n (as the index) to be kept."""
        self.longest = 0
        self.trained = 0
        """Trained tokens of all rows, uncut; the first token of a row is never predicted, and does not count."""

    def add(self, size: int, runs: Sequence[tuple[int, int]]) -> None:
        """Count one whole row of `size` tokens, whose trained ones stand in `runs`."""
        self.longest = max(self.longest, size)
        if size + 2 > len(self._steps):
            self._steps.extend([0] * (size + 2 - len(self._steps)))
        for begin, end in runs:
            begin = max(begin, 1)
            if end <= begin:
                continue
            self.trained += end - begin
            if self._truncate == "drop":
                self._steps[size] += end - begin
                self._steps[size + 1] -= end - begin
            elif self._truncate == "prompt":  # a token is kept where the limit reaches back to it
                self._steps[size - end + 1] += 1
                self._steps[size - begin + 1] -= 1
            else:
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
        """Trained tokens that limits of 0, 1, 2, … keep."""
        return itertools.accumulate(itertools.accumulate(self._steps))

    def kept_share(self, limit: int) -> float:
        """The share of the trained tokens that a limit keeps."""
        return list(itertools.islice(self._kept(), limit + 1))[-1] / (self.trained or 1)

    def limit_for(self, share: float) -> int:
        """The smallest limit that keeps this share."""
        return next((limit for limit, kept in enumerate(self._kept()) if kept >= share * self.trained), self.longest)


# --- tokens by role ---------------------------------------------------------------------------------------------------


def tokens_by_role(
    chat: Chat, text: str, labels: Sequence[int], offsets: Sequence[tuple[int, int]]
) -> dict[str, list[int]]:
    """[tokens, trained] by the role whose text each token begins in, `template` for those that are in none.

    A message's text is looked for behind the one before it; one that the template rewrites counts as template.
    """
    spans: list[tuple[int, int, str]] = []
    position = 0
    for message in chat.messages:
        for part in map(message.get, TEXT_KEYS):
            content = str(part or "").strip()
            found = text.find(content, position) if content else -1
            if found >= 0:
                position = found + len(content)
                spans.append((found, position, str(message["role"])))
    counts: dict[str, list[int]] = {}
    at = 0
    for label, (start, _) in zip(labels, offsets, strict=True):
        while at < len(spans) and spans[at][1] <= start:
            at += 1
        role = spans[at][2] if at < len(spans) and spans[at][0] <= start else TEMPLATE
        entry = counts.setdefault(role, [0, 0])
        entry[0] += 1
        entry[1] += label != IGNORED
    return counts


# --- the whole file ---------------------------------------------------------------------------------------------------


@dataclass
class Survey:
    """What the rows of one split came to."""

    split: str
    source: str
    cost: LimitCost
    format: str = "unknown"
    rows: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    """Rows that cannot be used, by reason; those whose answer lies beyond the limit are not among them."""
    first_bad: list[str] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """Rows that the run YAML asks to leave out, by reason."""
    unmasked: Counter[str] = field(default_factory=Counter)
    """Rows that can be read and get no exact mask, by reason."""
    first_unmasked: list[str] = field(default_factory=list)
    out_of_reach: int = 0
    """Rows that lose every trained token to the limit, or are left out for their length."""
    digests: dict[bytes, int] = field(default_factory=dict)
    """Row number (from 1) of the first row with a content, by sixteen bytes of its digest."""
    duplicates: int = 0
    first_duplicate: tuple[int, int] | None = None
    chats: int = 0
    texts: int = 0
    turns: Counter[str] = field(default_factory=Counter)
    """Turns of the rows that can be read, by role."""
    notes: Counter[str] = field(default_factory=Counter)
    """What is to be told of rows that are used, by what it is."""
    first_noted: dict[str, str] = field(default_factory=dict)

    kept: int = 0
    methods: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    trained: int = 0
    cut_rows: int = 0
    cut: int = 0
    lost: int = 0
    merged: int = 0
    untrained_turns: int = 0
    stripped_think: int = 0
    special_in_text: int = 0
    special_rows: int = 0
    first_special: str = ""
    shortest_prompt: int = 0
    """Tokens before the first trained one in the row that comes nearest to keeping it, of those out of reach."""
    lengths: array[int] = field(default_factory=lambda: array("q"))
    whole_lengths: array[int] = field(default_factory=lambda: array("q"))
    with_bos: int = 0
    open_ends: int = 0
    """Rows with an answer whose last trained token is no special one."""
    first_open_end: str = ""
    ends: Counter[int] = field(default_factory=Counter)
    """Ids of the special tokens that trained parts end with."""
    added_ends: Counter[str] = field(default_factory=Counter)
    """Rows whose last turn the template does not end, by the end that was added."""
    pad_trained: int = 0
    roles: dict[str, list[int]] = field(default_factory=dict)
    role_rows: int = 0
    first: Any = None
    """The first row that can be trained: `(row number, Rendered, TokenRow)`."""

    @property
    def lost_trained(self) -> int:
        """Trained tokens that the limit takes away, those of rows that lose all of them included."""
        return max(0, self.cost.trained - self.trained)

    def count_bad(self, row: BadRow) -> None:
        """Count a row that cannot be read."""
        _count(self.bad, self.first_bad, row)

    def count_unmasked(self, row: BadRow) -> None:
        """Count a row that gets no exact mask."""
        _count(self.unmasked, self.first_unmasked, row)

    def count_content(self, example: Example, number: int) -> None:
        """Count an example's content, and whether an earlier row has the same."""
        first = self.digests.setdefault(content_digest(example)[:16], number)
        if first != number:
            self.duplicates += 1
            self.first_duplicate = self.first_duplicate or (first, number)
        self.chats += isinstance(example, Chat)
        self.texts += isinstance(example, Text)
        if isinstance(example, Chat):
            self.turns.update([message["role"] for message in example.messages])
        self.note(example.notes, example.where)

    def note(self, notes: Iterable[str], where: str) -> None:
        """Count what is to be told of a row."""
        for note in notes:
            self.notes[note] += 1
            self.first_noted.setdefault(note, where)

    def add(self, other: Survey) -> None:
        """Add the rows of a later piece of the same split, whose rows are numbered from 1 too."""
        before = self.rows
        repeats = [self.first_duplicate] if self.first_duplicate else []
        if other.first_duplicate:
            one, again = other.first_duplicate
            repeats.append((one + before, again + before))
        for digest, number in other.digests.items():
            first = self.digests.setdefault(digest, number + before)
            if first != number + before:
                self.duplicates += 1
                repeats.append((first, number + before))
        self.first_duplicate = min(repeats, key=lambda repeat: repeat[1], default=None)
        if self.first is None and other.first is not None:
            number, whole, row = other.first
            self.first = (number + before, whole, row)
        add_up(self, other, but=("digests", "first", "first_duplicate", "roles"))
        for role, counted in other.roles.items():
            self.roles[role] = [sum(pair) for pair in zip(self.roles.get(role, (0, 0)), counted, strict=True)]


def add_up(mine: Any, other: Any, *, but: Collection[str] = ()) -> None:
    """Add the counts of later rows to those of earlier ones of the same class, field by field.

    Sums, counters and costs are added, the first bad rows listed up to `SHOWN_BAD_ROWS`, and of what was seen first, or
    is the shortest, the earlier or shorter is kept. Fields in `but` are left to the caller.
    """
    for name, theirs in vars(other).items():
        own = getattr(mine, name)
        if name in but:
            continue
        if name == "shortest_prompt":
            setattr(mine, name, min(filter(None, (own, theirs)), default=0))
        elif isinstance(own, Counter):
            own.update(theirs)
        elif isinstance(own, array):
            own.extend(theirs)
        elif isinstance(own, list):
            own.extend(theirs[: SHOWN_BAD_ROWS - len(own)])
        elif isinstance(own, dict):
            setattr(mine, name, {**theirs, **own})
        elif isinstance(own, LimitCost):
            own.merge(theirs)
        elif isinstance(own, int):
            setattr(mine, name, own + theirs)
        else:
            setattr(mine, name, own or theirs)


def _count(counts: Counter[str], first: list[str], row: BadRow) -> None:
    counts[row.reason] += 1
    if len(first) < SHOWN_BAD_ROWS:
        first.append(one_line(str(row), limit=300))


@dataclass(frozen=True)
class Made:
    """An example with its whole tokens and the row that is left of them, or the reason why there is none.

    `number` is that of the file's row, from 1. `whole` is None where nothing was rendered.
    """

    number: int
    example: Example
    whole: Rendered | None
    row: TokenRow | BadRow

    @property
    def is_too_long(self) -> bool:
        """Whether it is left out for its length alone."""
        return isinstance(self.row, BadRow) and self.row.reason in (LOST_TO_LENGTH, TOO_LONG)


class RowMaker:
    """Examples as the tokens that a run trains.

    With data.multi_turn=split an example becomes several. In `task_mode: cpt` documents stay whole (they are joined
    and cut into full blocks), and a chat is a bad row.
    """

    def __init__(self, renderer: Renderer, *, task_mode: str) -> None:
        self.renderer = renderer
        self.task_mode = task_mode

    @property
    def max_seq_len(self) -> int:
        """The longest row."""
        return self.renderer.max_seq_len

    def of(self, examples: Sequence[tuple[int, Example]], *, document: bool = False) -> list[Made]:
        """Numbered examples, made as one batch; `document`: they are the plain text of `task_mode: cpt_mixed`."""
        joined = document or self.task_mode == "cpt"
        expanded = [(number, one) for number, example in examples for one in self.renderer.expand(example)]
        taken = [one for _, one in expanded if not (joined and isinstance(one, Chat))]
        made = iter(self.renderer.render_all(taken))
        return [self._made(number, one, made, joined=joined) for number, one in expanded]

    def _made(self, number: int, example: Example, made: Iterator[Rendered | BadRow], *, joined: bool) -> Made:
        if joined and isinstance(example, Chat):
            reason = f"task_mode is {self.task_mode}, which takes plain text here, and the row is a chat"
            return Made(number, example, None, BadRow(example.where, reason))
        whole = next(made)
        if isinstance(whole, BadRow):
            return Made(number, example, None, whole)
        if joined:
            return Made(number, example, whole, TokenRow(whole.where, whole.input_ids, whole.labels))
        return Made(number, example, whole, self.renderer.cut(whole))


def made_rows(
    rows: Iterable[tuple[int, Example | BadRow]], maker: RowMaker, *, document: bool = False
) -> Iterator[BadRow | Made]:
    """Numbered rows in their order, made in batches; those that cannot be read as they are."""
    waiting: list[tuple[int, Example]] = []
    chars = longest = 0
    for number, example in rows:
        size = 0 if isinstance(example, BadRow) else characters(example)
        if len(waiting) == BATCH_ROWS or chars + size > BATCH_CHARS or isinstance(example, BadRow):
            yield from maker.of(waiting, document=document)
            give_back(longest)
            waiting, chars, longest = [], 0, 0
        if isinstance(example, BadRow):
            yield example
        else:
            waiting.append((number, example))
            chars, longest = chars + size, max(longest, size)
    yield from maker.of(waiting, document=document)
    give_back(longest)


def characters(example: Example) -> int:
    """About how long an example is."""
    if isinstance(example, Text):
        return len(example.text)
    return sum(len(message.get("content") or "") for message in example.messages)


@dataclass(frozen=True)
class Marks:
    """Ids of a tokenizer's special tokens; None where it has no such token."""

    bos: int | None
    pad: int | None
    eos: int | None
    special: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Any) -> Marks:
        """Those of a transformers tokenizer."""
        special = frozenset(getattr(tokenizer, "added_tokens_decoder", {})) | frozenset(tokenizer.all_special_ids)
        return cls(tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, special)


@dataclass(frozen=True)
class Inquiry:
    """What a survey asks of rows: all that another process needs to ask it too.

    Without `marks` there is no tokenizer, and rows are only read. `document`: the plain text of `task_mode: cpt_mixed`.
    Tokens are counted by role in about `role_rows` rows.
    """

    split: str
    data: DataConfig
    task_mode: str
    document: bool
    marks: Marks | None = None
    tokenizer: TokenizerParts | None = None
    max_seq_len: int = 0
    today: date | None = None
    role_rows: int = ROLE_ROWS


@dataclass(frozen=True)
class _Piece:
    """A piece of a file, and the file's format."""

    part: Part
    shape: Format | None


class Surveyor:
    """Surveys splits with one tokenizer; without a `maker` rows are only read."""

    def __init__(self, data: DataConfig, *, tokenizer: Any = None, maker: RowMaker | None = None) -> None:
        self._data, self._maker = data, maker
        self._marks = Marks.of(tokenizer) if tokenizer is not None and maker is not None else None

    def survey(self, path: AnySource, split: str, *, text_wanted: bool = False, rows: int | None = None) -> Survey:
        """Every row of a file, read, rendered and counted, or the first `rows`; `split` is train, val, test, or text.

        Large files are read by several processes (data.workers), unless only the first rows are asked for.

        Raises:
            DataError: the whole file cannot be read, or its columns are those of no format.
        """
        file_split, wants_text = ("train", True) if split == "text" else (split, text_wanted)
        found = Survey(split, str(path), LimitCost(self._data.truncate))
        if rows is None and self._in_pieces(data_files(path, split=file_split, text_wanted=wants_text), found):
            return found
        reader = ExampleReader(path, self._data, split=file_split, text_wanted=wants_text)
        _Asking(self._inquiry(split), self._maker).ask(itertools.islice(reader.numbered(), rows), found)
        found.format, found.rows = reader.format, reader.rows
        return found

    def _in_pieces(self, parts: Sequence[Part], found: Survey) -> bool:
        """Survey files by several processes, where that is quicker; whether it was done."""
        check_columns(self._data)
        total = bytes_of(parts)
        count = how_many(self._data.workers, total)
        if count == 1:
            return False
        pieces: list[_Piece] = []
        for part in parts:
            shape = first_format(read_part(part), self._data)[1]
            pieces += [_Piece(piece, shape) for piece in pieces_of(part, count=count, total_bytes=total)]
        count = min(count, len(pieces))
        if count <= 1:
            return False
        inquiry = self._inquiry(found.split, role_rows=max(ROLE_ROWS // len(pieces), FEWEST_ROLE_ROWS))
        news = News(f"Check {found.split}", "looked at")
        for made in together(pieces, _asking, inquiry, count=count, done=lambda made: news.add(made.rows)):
            found.add(made)
        found.format = ", ".join(dict.fromkeys(piece.shape.name for piece in pieces if piece.shape)) or "unknown"
        return True

    def _inquiry(self, split: str, *, role_rows: int = ROLE_ROWS) -> Inquiry:
        plain = Inquiry(split, self._data, "", split == "text", role_rows=role_rows)
        if self._maker is None:
            return plain
        renderer = self._maker.renderer
        return dataclasses.replace(
            plain,
            task_mode=self._maker.task_mode,
            marks=self._marks,
            tokenizer=renderer.parts,
            max_seq_len=renderer.max_seq_len,
            today=renderer.today,
        )


def _asking(inquiry: Inquiry) -> Callable[[_Piece], Survey]:
    """What surveys pieces, once in every process."""
    return _Asking(inquiry).of_piece


class _Asking:
    """Asks rows what an inquiry wants to know."""

    def __init__(self, inquiry: Inquiry, maker: RowMaker | None = None) -> None:
        self._inquiry, self._maker = inquiry, maker
        if maker is None and inquiry.tokenizer is not None:
            renderer = Renderer(inquiry.tokenizer, inquiry.data, max_seq_len=inquiry.max_seq_len, today=inquiry.today)
            self._maker = RowMaker(renderer, task_mode=inquiry.task_mode)

    def of_piece(self, piece: _Piece) -> Survey:
        """The survey of a piece alone."""
        data = self._inquiry.data
        found = Survey(self._inquiry.split, "", LimitCost(data.truncate))

        def rows() -> Iterator[tuple[int, Example | BadRow]]:
            for row in read_part(piece.part):
                found.rows += 1
                yield found.rows, example_of(row, piece.shape, data)

        self.ask(rows(), found)
        return found

    def ask(self, rows: Iterable[tuple[int, Example | BadRow]], found: Survey) -> None:
        """Count numbered rows in `found`."""
        counted = self._counted(rows, found)
        if self._maker is None:
            collections.deque(counted, maxlen=0)
            return
        for made in made_rows(counted, self._maker, document=self._inquiry.document):
            assert isinstance(made, Made)
            self._tokens(found, made)

    def _counted(self, rows: Iterable[tuple[int, Example | BadRow]], found: Survey) -> Iterator[tuple[int, Example]]:
        """The examples among the rows; what can be told without tokens is counted."""
        for number, example in rows:
            if isinstance(example, BadRow) and example.is_asked:
                found.left_out[example.reason] += 1
            elif isinstance(example, BadRow):
                found.count_bad(example)
            else:
                found.count_content(example, number)
                yield number, example

    def _tokens(self, found: Survey, made: Made) -> None:
        if made.whole is not None:
            found.methods[made.whole.method] += 1
            runs = trained_runs(made.whole.labels)
            found.cost.add(len(made.whole.labels), runs)
            found.note(made.whole.notes, made.whole.where)
            found.stripped_think += made.whole.stripped_think
            found.special_rows += made.whole.special_in_text > 0
            if made.whole.special_in_text:
                found.first_special = found.first_special or made.whole.where
            found.special_in_text += made.whole.special_in_text
            found.untrained_turns += made.whole.untrained_turns
        if made.is_too_long:
            found.out_of_reach += 1
            if made.whole is not None and runs:
                found.shortest_prompt = min(found.shortest_prompt or runs[0][0], runs[0][0])
        elif isinstance(made.row, BadRow):
            found.count_unmasked(made.row)
        elif made.whole is not None:
            self._count(found, made.whole, made.row, made.number)
            self._count_ends(found, made.whole, runs)
            if isinstance(made.example, Chat):
                self._count_roles(found, made.example, made.whole)

    def _count(self, found: Survey, whole: Rendered, row: TokenRow, number: int) -> None:
        found.first = found.first or (number, whole, row)
        found.kept += 1
        found.tokens += len(row.input_ids)
        found.trained += row.trained
        found.cut_rows += row.cut > 0
        found.cut += row.cut
        found.lost += row.lost
        found.merged += row.merged
        found.lengths.append(len(row.input_ids))
        found.whole_lengths.append(len(whole.input_ids))
        marks = self._inquiry.marks
        assert marks is not None
        found.with_bos += marks.bos is not None and bool(whole.input_ids) and whole.input_ids[0] == marks.bos
        if marks.pad is not None and marks.pad != marks.eos:
            found.pad_trained += marks.pad in row.labels

    def _count_ends(self, found: Survey, whole: Rendered, runs: Sequence[tuple[int, int]]) -> None:
        """Whether each trained part ends with a special token, a line break behind it aside."""
        assert self._inquiry.marks is not None
        ends = self._inquiry.marks.special
        is_open = False
        for begin, end in runs:
            last = reversed(whole.labels[max(begin, end - 2) : end])
            special = next((number for number in last if number in ends), None)
            if special is None:
                is_open = True
            else:
                found.ends[special] += 1
        if whole.added_end:
            found.added_ends[whole.added_end.strip()] += 1
        if is_open and whole.method != "document":
            found.open_ends += 1
            found.first_open_end = found.first_open_end or whole.where

    def _count_roles(self, found: Survey, chat: Chat, whole: Rendered) -> None:
        """Tokens by role, in so many rows as are enough to see by."""
        assert self._maker is not None
        if found.role_rows >= self._inquiry.role_rows or (
            found.role_rows >= 100 and found.kept % (found.role_rows // 10)
        ):
            return
        encoded = self._maker.renderer.encoded(whole.text)
        if encoded.ids != list(whole.input_ids):
            return  # texts that spell special tokens are tokenised in another way
        found.role_rows += 1
        counts = tokens_by_role(chat, whole.text, whole.labels, encoded.offsets)
        for role, (tokens, trained) in counts.items():
            entry = found.roles.setdefault(role, [0, 0])
            entry[0] += tokens
            entry[1] += trained
