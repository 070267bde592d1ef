"""What is counted of every row of a source while its rows are built: for `make check` and the first lines of a log.

Of each row only a digest and a length are kept.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sft_play.config.schema import DataConfig
from sft_play.data.build.stats import LimitCost, RowStats, add_up, trained_runs
from sft_play.data.build.workers import BATCH_CHARS, BATCH_ROWS
from sft_play.data.masks.render import Renderer
from sft_play.data.masks.token_row import IGNORED, TokenRow
from sft_play.data.sources.examples import ExampleReader, characters
from sft_play.data.sources.files import AnySource
from sft_play.data.sources.formats import Chat, Example, content_digest
from sft_play.data.sources.messages import TEXT_KEYS
from sft_play.data.sources.raw import SHOWN_BAD_ROWS, BadRow
from sft_play.process.heap import give_back

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


# Counts


@dataclass
class Survey(RowStats):
    """The counts of a source's rows, and their contents, lengths and ends of turns, which training does not need."""

    split: str = ""
    unmasked: Counter[str] = field(default_factory=Counter)
    """Rows that can be read and get no exact mask, by reason."""
    first_unmasked: list[BadRow] = field(default_factory=list)
    contents: array[int] = field(default_factory=lambda: array("Q"))
    """Eight bytes of the digest of each row's content; 0 for a row that cannot be read."""
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

    def count_content(self, example: Example, digest: bytes, number: int) -> None:
        """Count an example with its content's digest, the row of this number."""
        self._fill(number - 1)
        # 8 of 32 bytes: a million rows are 8 MB, and no two contents share them by chance
        self.contents.append(int.from_bytes(digest[:8], "big"))
        self.count_example(example)

    def _fill(self, rows: int) -> None:
        self.contents.extend(itertools.repeat(0, rows - len(self.contents)))

    def count_rendered(self, whole: TokenRow) -> None:
        """Count how a row was rendered, and the special tokens that its texts spell."""
        super().count_rendered(whole)
        self.special_in_text += whole.special_in_text
        if whole.special_in_text:
            self.first_special = self.first_special or whole.where
            self.special_documents += whole.method == "document"

    def add(self, other: RowStats) -> None:
        """Add the rows of a later piece of the same source, whose rows are numbered from 1 too."""
        assert isinstance(other, Survey)
        self._fill(self.rows)
        if self.first is None and other.first is not None:
            number, whole = other.first
            self.first = (number + self.rows, whole)
        add_up(self, other, but=("first", "roles"))
        for role, counted in other.roles.items():
            self.roles[role] = [sum(pair) for pair in zip(self.roles.get(role, (0, 0)), counted, strict=True)]

    def repeats(self) -> tuple[int, tuple[int, int]]:
        """How many rows have the content of an earlier one, and the numbers of the first such pair; (0, 0) for none."""
        numbers, contents = self._readable()
        _, first, which = np.unique(contents, return_index=True, return_inverse=True)
        earlier = first[which]
        again = np.flatnonzero(earlier != np.arange(len(contents)))
        if not len(again):
            return 0, (0, 0)
        return len(again), (int(numbers[earlier[again[0]]]), int(numbers[again[0]]))

    def shared_with(self, other: Survey) -> tuple[int, tuple[int, int]]:
        """How many contents are in both, and the numbers of two rows with the earliest of them; (0, 0) for none."""
        (mine, contents), (theirs, others) = self._readable(), other._readable()
        both, here, there = np.intersect1d(contents, others, return_indices=True)  # the first row with each content
        if not len(both):
            return 0, (0, 0)
        earliest = int(np.argmin(here))
        return len(both), (int(mine[here[earliest]]), int(theirs[there[earliest]]))

    def _readable(self) -> tuple[Any, Any]:
        """Numbers of the rows that can be read, and their contents: of shape [rows]."""
        contents = np.array(self.contents, np.uint64)
        places = np.flatnonzero(contents)
        return places + 1, contents[places]


class RowCounter:
    """Counts rows as they are made with one tokenizer; tokens by role in about `role_rows` of them."""

    def __init__(self, renderer: Renderer, *, role_rows: int = ROLE_ROWS) -> None:
        self._renderer, self._role_rows = renderer, role_rows
        parts, backend = renderer.parts, renderer.encoder.backend
        pad = dict(parts.special_map).get("pad_token")
        # a tokenizer without a pad token of its own pads with eos
        self._pad = None if pad is None or pad == parts.eos else backend.token_to_id(pad)
        added = (number for number, _, _ in parts.added)
        self._special = frozenset(added) | frozenset(map(backend.token_to_id, parts.special))

    def count(self, survey: Survey, outcome: RowOutcome) -> None:
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
        bos = self._renderer.parts.bos_id
        survey.with_bos += bos is not None and bool(whole.input_ids) and whole.input_ids[0] == bos
        survey.pad_trained += self._pad is not None and self._pad in row.labels
        self._count_ends(survey, whole, runs)
        if isinstance(outcome.example, Chat):
            self._count_roles(survey, outcome.example, whole)

    def _count_ends(self, survey: Survey, whole: TokenRow, runs: Sequence[tuple[int, int]]) -> None:
        """Whether each trained part ends with a special token, a line break behind it aside."""
        is_open = False
        for begin, end in runs:
            last = reversed(whole.labels[max(begin, end - 2) : end])  # the last two: `<|im_end|>` and a line break
            special = next((number for number in last if number in self._special), None)
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
        counted = survey.role_rows
        if counted >= self._role_rows or (counted >= 100 and survey.kept % (counted // 10)):
            return
        encoded = self._renderer.encoded(whole.text)
        if encoded.ids != list(whole.input_ids):
            return  # a text that spells a special token is tokenised differently
        survey.role_rows += 1
        for role, (tokens, trained) in tokens_by_role(chat, whole.text, whole.labels, encoded.offsets).items():
            entry = survey.roles.setdefault(role, [0, 0])
            entry[0] += tokens
            entry[1] += trained


# Rows, one batch after the other


def no_document(task_mode: str) -> str:
    """Why a chat is no document."""
    return f"task_mode is {task_mode}, which takes plain text here, and the row is a chat"


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
                row = BadRow(example.where, no_document(self.task_mode))
                rows.append(RowOutcome(number, example, None, row))
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


def survey_rows(
    source: AnySource,
    data: DataConfig,
    split: str,
    *,
    maker: RowMaker | None = None,
    text_wanted: bool = False,
    rows: int | None = None,
) -> Survey:
    """The rows of a source counted in this process, all or the first `rows`; without a `maker` they are only read.

    Raises:
        DataError: the whole file cannot be read, or its columns are those of no format.
    """
    survey = Survey(str(source), split=split, cost=LimitCost(data.truncate))
    reader = ExampleReader(source, data, split="train" if split == "text" else split, text_wanted=text_wanted)

    def examples() -> Iterator[tuple[int, Example]]:
        for number, example in itertools.islice(reader.numbered(), rows):
            if isinstance(example, BadRow):
                survey.count_bad(example)
                continue
            if maker is not None and not maker.joins(document=split == "text"):
                example = maker.renderer.as_chat(example)
            survey.count_content(example, content_digest(example), number)
            yield number, example

    if maker is None:
        for _ in examples():
            pass
    else:
        counter = RowCounter(maker.renderer)
        for outcome in row_outcomes(examples(), maker, document=split == "text"):
            assert isinstance(outcome, RowOutcome)
            counter.count(survey, outcome)
    survey.format, survey.rows = reader.format, reader.rows
    return survey
