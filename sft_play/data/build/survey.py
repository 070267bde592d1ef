"""Rows counted while they are made; and rows made here, one batch after the other, to be shown, written or counted."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sft_play.config.schema import DataConfig
from sft_play.data.build.stats import RowStats, trained_runs
from sft_play.data.build.workers import BATCH_CHARS, BATCH_ROWS
from sft_play.data.masks.render import Renderer
from sft_play.data.masks.token_row import IGNORED, TokenRow
from sft_play.data.sources.examples import ExampleReader, character_count
from sft_play.data.sources.files import AnySource
from sft_play.data.sources.formats import Chat, Example
from sft_play.data.sources.messages import TEXT_KEYS
from sft_play.data.sources.raw import BadRow
from sft_play.errors import translate_library_errors
from sft_play.process.imports import release_after_long_text

# Rows of each piece of a file in which tokens are counted by role: that takes tokenising them again.
ROLE_ROWS = 64
# Counts tokens that are in no message's text.
TEMPLATE = "template"


# Tokens by role


def tokens_by_role(
    chat: Chat, text: str, labels: Sequence[int], offsets: Sequence[tuple[int, int]]
) -> dict[str, list[int]]:
    """[tokens, trained] by the role whose text each token begins in, `template` for those that are in none. A message's
    text is looked for behind the one before it; one that the template rewrites counts as template."""
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


class RowCounter:
    """Counts rows as they are made with one tokenizer."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        parts, backend = renderer.tokenizer_parts, renderer.encoder.backend
        pad = dict(parts.special_tokens_map).get("pad_token")
        # a tokenizer without a pad token of its own pads with eos
        self._pad = None if pad is None or pad == parts.eos_token else backend.token_to_id(pad)
        added = (number for number, _, _ in parts.added_tokens)
        self._special = frozenset(added) | frozenset(map(backend.token_to_id, parts.special_tokens))

    def count(self, survey: RowStats, number: int, example: Example, whole: TokenRow, row: TokenRow | BadRow) -> None:
        """Count a row that was rendered: as a `whole`, and as max_seq_len leaves it; a bad `row` is too long."""
        runs = trained_runs(whole.labels)
        survey.cost.add(len(whole.labels), runs)
        if isinstance(row, BadRow):
            survey.count_too_long(whole)
            return
        survey.count_rendered(whole)
        survey.first = survey.first or (number, whole)
        survey.count_kept(row, whole)
        survey.lengths.append(len(row.input_ids))
        bos = self._renderer.tokenizer_parts.bos_id
        survey.with_bos += bos is not None and bool(whole.input_ids) and whole.input_ids[0] == bos
        survey.pad_trained += self._pad is not None and self._pad in row.labels
        self._count_ends(survey, whole, runs)
        if isinstance(example, Chat):
            self._count_roles(survey, example, whole)

    def _count_ends(self, survey: RowStats, whole: TokenRow, runs: Sequence[tuple[int, int]]) -> None:
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

    def _count_roles(self, survey: RowStats, chat: Chat, whole: TokenRow) -> None:
        if survey.role_rows == ROLE_ROWS:
            return
        encoded = self._renderer.encoder.backend.encode(whole.text, add_special_tokens=False)
        if encoded.ids != list(whole.input_ids):
            return  # a text that spells a special token is tokenised differently
        survey.role_rows += 1
        for role, (tokens, trained) in tokens_by_role(chat, whole.text, whole.labels, encoded.offsets).items():
            entry = survey.roles.setdefault(role, [0, 0])
            entry[0] += tokens
            entry[1] += trained


# Rows, one batch after the other


@dataclass(frozen=True)
class RowOutcome:
    """An example with its whole row and what max_seq_len leaves of it, or why there is none; `number` counts the file's
    rows from 1. `whole` is None where nothing was rendered; beside a whole row, a bad `row` is too long."""

    number: int
    example: Example
    whole: TokenRow | None
    row: TokenRow | BadRow


class RowMaker:
    """Examples as the tokens that a run trains. With data.multi_turn=split an example becomes several. In `task_mode:
    cpt` documents stay whole (they are joined and cut into full blocks), and a chat is a bad row."""

    def __init__(self, renderer: Renderer, *, task_mode: str) -> None:
        self.renderer, self.task_mode = renderer, task_mode
        self.max_seq_len = renderer.max_seq_len

    def outcomes(
        self, rows: Iterable[tuple[int, Example | BadRow]], *, document: bool = False
    ) -> Iterator[BadRow | RowOutcome]:
        """Numbered rows in their order, tokenised in batches; bad rows are passed on. `document`: they are the plain
        text of `task_mode: cpt_mixed`."""
        joined = document or self.task_mode == "cpt"
        for batch in in_batches(rows):
            parts: list[Numbered] = []
            for number, one in batch:
                if isinstance(one, BadRow) or joined:
                    parts.append((number, one))
                else:
                    parts += [(number, part) for part in self.renderer.split_turns(self.renderer.recover_chat(one))]
            taken = [one for _, one in parts if not (isinstance(one, BadRow) or (joined and isinstance(one, Chat)))]
            with translate_library_errors():
                rendered = iter(self.renderer.render_all(taken))
            for number, one in parts:
                if isinstance(one, BadRow):
                    yield one
                elif joined and isinstance(one, Chat):
                    why = f"task_mode is {self.task_mode}, which takes plain text here, and the row is a chat"
                    yield RowOutcome(number, one, None, BadRow(one.where, why))
                elif isinstance(row := next(rendered), BadRow):
                    yield RowOutcome(number, one, None, row)
                else:
                    yield RowOutcome(number, one, row, row if joined else self.renderer.truncate(row))
            release_after_long_text(max((character_count(one) for _, one in parts if not isinstance(one, BadRow)), default=0))


Numbered = tuple[int, Example | BadRow]


def in_batches(rows: Iterable[Numbered]) -> Iterator[list[Numbered]]:
    """Rows that are rendered and tokenised together: BATCH_ROWS, or BATCH_CHARS, more only in a single row."""
    batch: list[Numbered] = []
    chars = 0
    for number, one in rows:
        size = 0 if isinstance(one, BadRow) else character_count(one)
        if batch and (len(batch) == BATCH_ROWS or chars + size > BATCH_CHARS):
            yield batch
            batch, chars = [], 0
        batch.append((number, one))
        chars += size
    if batch:
        yield batch


def survey_rows(
    source: AnySource, data: DataConfig, split: str, *, text_wanted: bool = False, most: int | None = None
) -> RowStats:
    """The rows of a source, or the first `most`, as far as they can be counted without a tokenizer; raises DataError
    where a file cannot be read or is of no format."""
    survey = RowStats(str(source), split=split)
    reader = ExampleReader(source, data, split="train" if split == "text" else split, wants_text=text_wanted)
    for _, example in itertools.islice(reader.numbered_examples(), most):
        if isinstance(example, BadRow):
            survey.count_bad(example)
        else:
            survey.count_example(example)
    survey.format, survey.rows = reader.format, reader.rows
    return survey
