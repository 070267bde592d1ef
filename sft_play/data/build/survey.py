"""Every row of a data file as it will be trained, counted: for `make check` and the first lines of a run's log.

Of each row only a digest and a length are kept.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from sft_play.config.schema import DataConfig
from sft_play.data.build.stats import LimitCost, RowStats, add_up, trained_runs
from sft_play.data.build.workers import BATCH_CHARS, BATCH_ROWS, News, bytes_of, how_many, pieces_of, together
from sft_play.data.masks.render import Renderer
from sft_play.data.masks.token_row import IGNORED, TokenRow
from sft_play.data.masks.tokenizer_parts import TokenizerParts
from sft_play.data.sources.bad_rows import SHOWN_BAD_ROWS
from sft_play.data.sources.examples import ExampleReader, characters, example_of
from sft_play.data.sources.files import AnySource, Part, data_files, read_part
from sft_play.data.sources.formats import Chat, Example, Format, check_columns, content_digest, first_format
from sft_play.data.sources.messages import TEXT_KEYS
from sft_play.data.sources.raw import BadRow
from sft_play.heap import give_back

ROLE_ROWS, FEWEST_ROLE_ROWS = 1_000, 10
"""Rows in which tokens are counted by role: the first hundred, then fewer and fewer. Where several processes read a
file, each of its n pieces has an nth of them, but at least the second number."""
TEMPLATE = "template"
"""Counts tokens that are in no message's text."""


# Tokens by role


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
            # from the end of the one before: the same words may stand in several messages
            begin = text.find(content, position) if content else -1
            if begin >= 0:
                position = begin + len(content)
                spans.append((begin, position, str(message["role"])))
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


# The whole file


@dataclass
class Survey(RowStats):
    """The counts of one split's rows, and their contents, lengths and ends of turns, which training does not need."""

    split: str = ""
    unmasked: Counter[str] = field(default_factory=Counter)
    """Rows that can be read and get no exact mask, by reason."""
    first_unmasked: list[BadRow] = field(default_factory=list)
    digests: dict[bytes, int] = field(default_factory=dict)
    """Row number (from 1) of the first row with a content, by sixteen bytes of its digest."""
    duplicates: int = 0
    first_duplicate: tuple[int, int] | None = None
    special_in_text: int = 0
    """Special tokens that texts spell."""
    first_special: str = ""
    special_documents: int = 0
    """Rows of plain text, of which every token is trained, that spell special tokens."""
    lengths: array[int] = field(default_factory=lambda: array("q"))
    """Tokens of each row that is kept."""
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
    """[tokens, trained] by role, in `role_rows` of the rows."""
    role_rows: int = 0
    first: Any = None
    """The first row that can be trained: `(row number, TokenRow)`, before any cut."""

    def count_unmasked(self, row: BadRow) -> None:
        """Count a row that gets no exact mask."""
        self.unmasked[row.reason] += 1
        if len(self.first_unmasked) < SHOWN_BAD_ROWS:
            self.first_unmasked.append(row)

    def count_content(self, example: Example, number: int) -> None:
        """Count an example, and whether an earlier row has the same content."""
        # 16 of 32 bytes: a million rows are 16 MB, and no two contents share them by chance
        first = self.digests.setdefault(content_digest(example)[:16], number)
        if first != number:
            self.duplicates += 1
            self.first_duplicate = self.first_duplicate or (first, number)
        self.count_example(example)

    def count_rendered(self, whole: TokenRow) -> None:
        """Count how a row was rendered, and the special tokens that its texts spell."""
        super().count_rendered(whole)
        self.special_in_text += whole.special_in_text
        if whole.special_in_text:
            self.first_special = self.first_special or whole.where
            self.special_documents += whole.method == "document"

    def add(self, other: RowStats) -> None:
        """Add the rows of a later piece of the same split, whose rows are numbered from 1 too."""
        assert isinstance(other, Survey)
        before = self.rows
        repeats = [self.first_duplicate] if self.first_duplicate else []
        if other.first_duplicate:
            first, again = other.first_duplicate
            repeats.append((first + before, again + before))
        for digest, number in other.digests.items():
            first = self.digests.setdefault(digest, number + before)
            if first != number + before:
                self.duplicates += 1
                repeats.append((first, number + before))
        # pieces are added in the order of the file, so the earliest repeat may be of this piece or across the two
        self.first_duplicate = min(repeats, key=lambda repeat: repeat[1], default=None)
        if self.first is None and other.first is not None:
            number, whole = other.first
            self.first = (number + before, whole)
        add_up(self, other, but=("digests", "first", "first_duplicate", "roles"))
        for role, counted in other.roles.items():
            self.roles[role] = [sum(pair) for pair in zip(self.roles.get(role, (0, 0)), counted, strict=True)]


@dataclass(frozen=True)
class RowOutcome:
    """An example with its whole row and what max_seq_len leaves of it, or the reason why there is none.

    `number` is that of the file's row, from 1. `whole` is None where nothing was rendered; beside a whole row, a
    bad `row` is too long.
    """

    number: int
    example: Example
    whole: TokenRow | None
    row: TokenRow | BadRow


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

    def joins(self, *, document: bool) -> bool:
        """Whether texts are documents that are joined; else they are rows, and one that is a rendered chat is read."""
        return document or self.task_mode == "cpt"

    def of(self, examples: Sequence[tuple[int, Example]], *, document: bool = False) -> list[RowOutcome]:
        """Numbered examples, tokenised as one batch; `document`: they are the plain text of `task_mode: cpt_mixed`."""
        joined = self.joins(document=document)
        expanded = [(number, one) for number, example in examples
                    for one in self.renderer.expand(example if joined else self.renderer.as_chat(example))]  # fmt: skip
        taken = [one for _, one in expanded if not (joined and isinstance(one, Chat))]
        rendered = iter(self.renderer.render_all(taken))
        rows = []
        for number, example in expanded:
            if joined and isinstance(example, Chat):
                reason = f"task_mode is {self.task_mode}, which takes plain text here, and the row is a chat"
                rows.append(RowOutcome(number, example, None, BadRow(example.where, reason)))
                continue
            whole = next(rendered)
            if isinstance(whole, BadRow):
                rows.append(RowOutcome(number, example, None, whole))
            else:
                rows.append(RowOutcome(number, example, whole, whole if joined else self.renderer.cut(whole)))
        return rows


def row_outcomes(
    rows: Iterable[tuple[int, Example | BadRow]], maker: RowMaker, *, document: bool = False
) -> Iterator[BadRow | RowOutcome]:
    """Numbered rows in their order, tokenised in batches; bad rows are passed on."""
    waiting: list[tuple[int, Example]] = []
    chars = longest = 0
    for number, example in rows:
        size = 0 if isinstance(example, BadRow) else characters(example)
        # a bad row flushes too, so that outcomes keep the order of the file
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


@dataclass(frozen=True)
class Marks:
    """Ids of a tokenizer's special tokens; None where it has no such token."""

    bos: int | None
    pad: int | None
    eos: int | None
    special: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Any) -> Marks:
        """The special tokens of a transformers tokenizer."""
        special = frozenset(getattr(tokenizer, "added_tokens_decoder", {})) | frozenset(tokenizer.all_special_ids)
        return cls(tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, special)


@dataclass(frozen=True)
class Inquiry:
    """What a survey needs to count rows, in a form that can be sent to another process.

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
        survey = Survey(str(path), split=split, cost=LimitCost(self._data.truncate))
        if rows is None and self._in_pieces(data_files(path, split=file_split, text_wanted=wants_text), survey):
            return survey
        reader = ExampleReader(path, self._data, split=file_split, text_wanted=wants_text)
        _Counting(self._inquiry(split), self._maker).count(itertools.islice(reader.numbered(), rows), survey)
        survey.format, survey.rows = reader.format, reader.rows
        return survey

    def _in_pieces(self, parts: Sequence[Part], survey: Survey) -> bool:
        """Survey files in several processes if that is faster; returns whether it was done."""
        check_columns(self._data)
        total = bytes_of(parts)
        count = how_many(self._data.workers, total)
        if count == 1:
            return False
        pieces: list[_Piece] = []
        for part in parts:
            # by the file's first rows, which a process that is given a later piece does not see
            shape = first_format(read_part(part), self._data)[1]
            pieces += [_Piece(piece, shape) for piece in pieces_of(part, count=count, total_bytes=total)]
        count = min(count, len(pieces))
        if count <= 1:
            return False
        inquiry = self._inquiry(survey.split, role_rows=max(ROLE_ROWS // len(pieces), FEWEST_ROLE_ROWS))
        news = News(f"Check {survey.split}", "looked at")
        for counted in together(pieces, _Counting, inquiry, count=count, done=lambda counted: news.add(counted.rows)):
            survey.add(counted)
        survey.format = ", ".join(dict.fromkeys(piece.shape.name for piece in pieces if piece.shape)) or "unknown"
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


class _Counting:
    """Counts rows for an inquiry; each process has one."""

    def __init__(self, inquiry: Inquiry, maker: RowMaker | None = None) -> None:
        self._inquiry, self._maker = inquiry, maker
        if maker is None and inquiry.tokenizer is not None:
            renderer = Renderer(inquiry.tokenizer, inquiry.data, max_seq_len=inquiry.max_seq_len, today=inquiry.today)
            self._maker = RowMaker(renderer, task_mode=inquiry.task_mode)

    def __call__(self, piece: _Piece) -> Survey:
        """The survey of a piece alone."""
        data = self._inquiry.data
        survey = Survey(split=self._inquiry.split, cost=LimitCost(data.truncate))

        def rows() -> Iterator[tuple[int, Example | BadRow]]:
            for row in read_part(piece.part):
                survey.rows += 1
                yield survey.rows, example_of(row, piece.shape, data)

        self.count(rows(), survey)
        return survey

    def count(self, rows: Iterable[tuple[int, Example | BadRow]], survey: Survey) -> None:
        """Count numbered rows in `survey`."""
        examples = self._examples(rows, survey)
        if self._maker is None:
            collections.deque(examples, maxlen=0)  # only counted
            return
        for outcome in row_outcomes(examples, self._maker, document=self._inquiry.document):
            assert isinstance(outcome, RowOutcome)
            self._count_outcome(survey, outcome)

    def _examples(self, rows: Iterable[tuple[int, Example | BadRow]], survey: Survey) -> Iterator[tuple[int, Example]]:
        """The examples among the rows; what needs no tokens is counted."""
        for number, example in rows:
            if isinstance(example, BadRow):
                survey.count_bad(example)
            else:
                if self._maker is not None and not self._maker.joins(document=self._inquiry.document):
                    example = self._maker.renderer.as_chat(example)
                survey.count_content(example, number)
                yield number, example

    def _count_outcome(self, survey: Survey, outcome: RowOutcome) -> None:
        """Count a row that was rendered, or could not be."""
        whole, row = outcome.whole, outcome.row
        if whole is None:
            assert isinstance(row, BadRow)
            survey.count_unmasked(row)
            return
        runs = trained_runs(whole.labels)
        survey.cost.add(len(whole.labels), runs)
        survey.count_rendered(whole)
        if isinstance(row, BadRow):  # for its length alone: that of another reason has no whole row
            survey.count_too_long(whole, row)
            return
        survey.first = survey.first or (outcome.number, whole)
        survey.count_kept(row)
        survey.lengths.append(len(row.input_ids))
        marks = self._inquiry.marks
        assert marks is not None
        survey.with_bos += marks.bos is not None and bool(whole.input_ids) and whole.input_ids[0] == marks.bos
        if marks.pad is not None and marks.pad != marks.eos:  # a tokenizer without a pad token of its own pads with eos
            survey.pad_trained += marks.pad in row.labels
        self._count_ends(survey, whole, runs)
        if isinstance(outcome.example, Chat):
            self._count_roles(survey, outcome.example, whole)

    def _count_ends(self, survey: Survey, whole: TokenRow, runs: Sequence[tuple[int, int]]) -> None:
        """Whether each trained part ends with a special token, a line break behind it aside."""
        assert self._inquiry.marks is not None
        ends = self._inquiry.marks.special
        is_open = False
        for begin, end in runs:
            last = reversed(whole.labels[max(begin, end - 2) : end])  # the last two: `<|im_end|>` and a line break
            special = next((number for number in last if number in ends), None)
            if special is None:
                is_open = True
            else:
                survey.ends[special] += 1
        if whole.added_end:
            survey.added_ends[whole.added_end.strip()] += 1
        if is_open and whole.method != "document":
            survey.open_ends += 1
            survey.first_open_end = survey.first_open_end or whole.where

    def _count_roles(self, survey: Survey, chat: Chat, whole: TokenRow) -> None:
        """Tokens by role, in a sample of the rows: tokenising them again with offsets takes time."""
        assert self._maker is not None
        if survey.role_rows >= self._inquiry.role_rows or (
            survey.role_rows >= 100 and survey.kept % (survey.role_rows // 10)
        ):
            return
        encoded = self._maker.renderer.encoded(whole.text)
        if encoded.ids != list(whole.input_ids):
            return  # a text that spells a special token is tokenised differently
        survey.role_rows += 1
        counts = tokens_by_role(chat, whole.text, whole.labels, encoded.offsets)
        for role, (tokens, trained) in counts.items():
            entry = survey.roles.setdefault(role, [0, 0])
            entry[0] += tokens
            entry[1] += trained
