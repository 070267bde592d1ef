"""A row as tokens with its loss mask: what training reads, how it is shown, and why a row has no
mask.

Shape letters: T tokens of one row.
"""

import itertools
from dataclasses import dataclass
from typing import Any

from sft_play.data.sources.images import Picture
from sft_play.data.sources.messages import UnusableRowError

# Characters [start, end) of a text.
Span = tuple[int, int]
# The label of a token that is not trained (torch's and transformers' convention).
IGNORED = -100
# How trained spans are found, as a person reads it.
MASK_METHODS = {
    "prefix": "rendered prefixes",
    "marker": "prefix and end-of-turn marker",
    "header": "the header that prompt and turn have in common",
    "next_turn": "prefix and the token that opens the next turn",
    "last_turn": "the turns that are exact",
    "all": "every token",
    "document": "every token of a document",
    "inexact": "a guess (data.on_inexact_mask=train)",
}
# Where a row's tokens come from; the two sources of task_mode cpt_mixed.
CHAT, TEXT = "chat", "text"


@dataclass
class TokenRow:
    """A row as tokens: ids and labels of shape [T]; a label of `IGNORED` is not trained. Not
    frozen, for speed. `text` is what the whole row's tokens spell, with special tokens of the
    data's own texts as they stand there, and `spans` are the characters of it that are trained.
    `method` says how they were found."""

    location: str
    input_ids: list[int]
    labels: list[int]
    # Tokens that fell to the length limit, and trained ones among them.
    cut_tokens: int = 0
    lost_trained_tokens: int = 0
    # Edges of answers inside a token, which is split there as generation would.
    merged_edges: int = 0
    source: str = CHAT
    method: str = ""
    # Assistant turns without an exact mask.
    untrained_turns: int = 0
    # Pieces of think text that the template does not write.
    stripped_think_pieces: int = 0
    # Special tokens in the data's own texts.
    special_token_count: int = 0
    text: str = ""
    spans: tuple[Span, ...] = ()
    # What was changed of the row for the template's sake.
    notes: tuple[str, ...] = ()
    # The end of `text` that the chat template does not write: what ends its last turn.
    added_end: str = ""
    # Its pictures in the order of their tokens in `input_ids`.
    images: tuple[Picture, ...] = ()
    # How often each image token of `text`, which has every run of them once, is repeated.
    image_runs: tuple[int, ...] = ()
    # Tokens that the pictures take.
    image_tokens: int = 0

    @property
    def trained_tokens(self) -> int:
        """Tokens whose label counts; the first token of a row is never predicted."""
        return count_trained_tokens(self.labels)


def count_trained_tokens(labels: list[int]) -> int:
    """Labels of shape [T] that count: the first token of a row is never predicted."""
    # the model's logits at position t are compared with label t + 1, so label 0 is compared with
    # nothing
    trained_count = len(labels) - labels.count(IGNORED)
    return trained_count - (1 if labels and labels[0] != IGNORED else 0)


def format_row(row: TokenRow, tokenizer: Any, *, max_chars: int = 1_200) -> str:
    """One row as text with its trained parts in `[[…]]`, special tokens visible, those of an image
    once with their number; cut in the middle when long."""
    pieces: list[str] = []
    repeated_ids = frozenset(tokenizer.added_tokens_decoder) if row.images else frozenset()
    for is_ignored, run in itertools.groupby(
        zip(row.labels, row.input_ids, strict=True), lambda pair: pair[0] == IGNORED
    ):
        text = _decode(tokenizer, [token_id for _, token_id in run], repeated_ids)
        pieces.append(text if is_ignored else f"[[{text}]]")
    row_text = "".join(pieces)
    return (
        row_text
        if len(row_text) <= max_chars
        else f"{row_text[: max_chars // 2]} … {row_text[-max_chars // 2 :]}"
    )


# With each run of a token of `repeated_ids` as `<image> x 1,024`.
def _decode(tokenizer: Any, ids: list[int], repeated_ids: frozenset[int]) -> str:
    text = ""
    for repeated_id, run in itertools.groupby(
        ids, lambda token: token if token in repeated_ids else -1
    ):
        tokens = list(run)
        is_repeated = repeated_id >= 0 and len(tokens) > 1
        text += str(
            tokenizer.decode(tokens[:1] if is_repeated else tokens, skip_special_tokens=False)
        )
        text += f" x {len(tokens):,}" * is_repeated
    return text


TEMPLATE_REFUSES_ROW = "the chat template refuses the row"
NO_TURN_END = "the chat template writes no end of turn after a turn"
PROMPT_MISMATCH = "the generation prompt does not match how the chat template writes the turn"


class InexactMaskError(UnusableRowError):
    """A mask that cannot be found exactly."""
