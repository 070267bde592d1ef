"""Control tokens in rendered texts, and where an assistant's turn ends, told from texts alone: what follows it where it
is the last turn, and where the conversation goes on.

`probes.py` learns what ends the turns of a template; `skeletons.py` asks for the end of each turn of a row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sft_play.log import one_line

# Texts that look like control tokens, for templates whose tokens this tokenizer does not have.
_CONTROL_TOKEN = re.compile(
    r"<\|[^|<>]{1,40}\|>|<｜[^｜<>]{1,40}｜>|<\|[A-Za-z_]{1,40}>|<[A-Za-z_]{1,40}\|>|\[/?[A-Z_]{2,20}\]"
    r"|</?[A-Za-z_][^<>\s]{0,40}>"
)
# Control tokens that do not look like HTML or XML tags.
NON_TAG_TOKEN = re.compile(r"<\|[^|<>]{1,40}\|>|<｜[^｜<>]{1,40}｜>|<\|[A-Za-z_]{1,40}>|<[A-Za-z_]{1,40}\|>")
# What may be a tag of a markup language.
MARKUP_TAG = re.compile(r"(?!</s>)</?[A-Za-z_][^<>\s|]{0,40}>")
# Words in the names of control tokens that end something.
END_WORD = re.compile(r"end|eot|eos|eom|return|stop|sep\b|<turn\||^</s>$|\bcall\|>", re.IGNORECASE)


def control_tokens(text: str, special_tokens: Sequence[str]) -> list[str]:
    """Control tokens in a text, in order: the tokenizer's own, and what looks like one."""
    return [token for _, token in find_control_tokens(text, special_tokens)]


def find_control_tokens(text: str, special_tokens: Sequence[str]) -> list[tuple[int, str]]:
    """Where control tokens begin in a text; of those that overlap the first, of those of one beginning the longest."""
    # Both kinds: a tokenizer may lack tokens of its template, and may have tokens that look like words.
    matches = {(match.start(), match.group()) for match in _CONTROL_TOKEN.finditer(text)}
    for token in special_tokens:
        offset = text.find(token)
        while offset >= 0:
            matches.add((offset, token))
            # + 1, not its length: tokens may overlap, and the first one wins below
            offset = text.find(token, offset + 1)
    ordered: list[tuple[int, str]] = []
    covered_until = 0
    for offset, token in sorted(matches, key=lambda place: (place[0], -len(place[1]))):
        if offset >= covered_until:
            ordered.append((offset, token))
            covered_until = offset + len(token)
    return ordered


def common_prefix(first: str, second: str, special_tokens: Sequence[str]) -> str:
    """The common beginning of two texts, with no control token cut in two."""
    # `<|im_end|>` and `<|im_start|>` begin alike: the beginning that both texts have may end inside a token
    size = common_prefix_chars(first, second)
    for text in (first, second):
        for offset, token in find_control_tokens(text, special_tokens):
            if offset < size < offset + len(token):
                size = offset
    return first[:size]


def common_prefix_chars(first: str, second: str) -> int:
    """Length of the common beginning."""
    if second.startswith(first):
        return len(first)
    # by halves: slices are compared by memcmp, far quicker than characters one by one in Python
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[:middle] == second[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def format_first_difference(expected: str, text: str) -> str:
    """Where two texts part, and what the second has there, for a message."""
    offset = common_prefix_chars(expected, text)
    return f"at character {offset + 1}: {one_line(repr(text[max(0, offset - 20) : offset + 40]), limit=90)}"


# Characters that may end a turn without a control token, such as `\n\n### End`: more is text of the template.
_MAX_WORDS_CHARS = 40


@dataclass(frozen=True)
class TurnEnd:
    """What ends a turn: `text` is what stands after its last piece, through its end."""

    text: str
    opens_next_turn: bool = False
    """It is the token that opens the next turn."""
    is_text_only: bool = False
    """It holds no control token."""


@dataclass(frozen=True)
class TurnEnds:
    """What ends an assistant's turn in one template; `special_tokens` and `eos_token` are the tokenizer's."""

    special_tokens: tuple[str, ...]
    eos_token: str | None
    turn_openers: frozenset[str] = frozenset()
    """Tokens that open a turn, where the template writes the next one's header whether or not it is asked to."""
    history_end_tokens: frozenset[str] = frozenset()
    """Tokens that may close a turn once it is history, where another one closes the last turn."""
    end_markers: tuple[str, ...] = ()
    """Texts that end an assistant turn, the usual one first; empty where the template writes nothing."""
    opener_end_markers: tuple[str, ...] = ()
    """Those of them that open the next turn, where the template closes none."""

    @property
    def end_of_turn(self) -> str:
        """The text that ends an assistant turn, such as `<|im_end|>`; empty where the template writes nothing."""
        return self.end_markers[0] if self.end_markers else ""

    @property
    def end_tokens(self) -> frozenset[str]:
        """The control tokens of all ends of turns."""
        return frozenset(token for marker in self.end_markers for token in control_tokens(marker, self.special_tokens))

    def find_end(
        self, final_tail: str | None, continued_tail: str | None, *, is_last: bool, is_answer_text: bool
    ) -> TurnEnd | None:
        """The end of a turn: the text after its last piece, through its end; None where it has no end. `final_tail`
        follows the piece in the conversation that stops with the turn (None: not found), `continued_tail` in the one
        that continues (None: cannot be rendered). `is_last`: the turn is the last of the row; `is_answer_text`: its
        last piece is an answer's text, not think text or a call."""
        # rendered otherwise as a last turn, so there is nothing to compare: only known ends count
        if final_tail is None:
            return self._first_known_end(continued_tail or "")
        # Where the two renderings part, the turn is over: the one goes on with the next turn's header.
        shared = (
            final_tail if continued_tail is None else common_prefix(final_tail, continued_tail, self.special_tokens)
        )
        ends = self._possible_ends(shared, is_answer_text=is_answer_text)
        # A header that is written in any case stands in both, and is the next turn's all the same.
        while ends and ends[-1][1] in self.turn_openers:
            shared = shared[: ends[-1][0]]
            ends = self._possible_ends(shared, is_answer_text=is_answer_text)
        if ends:
            return TurnEnd(shared[: self._end_offset(ends)])
        final_ends = self._possible_ends(final_tail, is_answer_text=is_answer_text)
        if not final_ends and continued_tail is not None:
            opener_end = self._opener_end(final_tail, continued_tail)
            if opener_end:
                return TurnEnd(continued_tail[:opener_end], opens_next_turn=True)
        if final_ends and is_last:
            return TurnEnd(final_tail[: self._end_offset(final_ends)])
        if continued_tail is not None and (final_ends or not is_answer_text):
            # as history the turn may be written otherwise (a call with its id), or be closed by another token
            tokens = [token for _, token in self._possible_ends(continued_tail, is_answer_text=is_answer_text)[:1]]
            end = self._first_known_end(
                continued_tail,
                *(token for token in tokens if token in self.history_end_tokens or END_WORD.search(token)),
            )
            return self._last_call_end(final_tail, end) if is_last else end
        words = shared.rstrip()
        # a call's own brackets and quotes are no end of it: behind a call only words that end turns count
        is_end = (is_answer_text and 0 < len(words) <= _MAX_WORDS_CHARS) or words.endswith(self.end_markers or ("\0",))
        return TurnEnd(words, is_text_only=True) if is_end else None

    def _last_call_end(self, tail: str, history_end: TurnEnd | None) -> TurnEnd | None:
        """Find the end of a last turn that calls a tool and that no control token ends: words that are known to end
        turns, or the token that opens the next turn in a longer conversation. `tail` is the text behind the call."""
        end = self._first_known_end(tail)
        opener = next((text for text in self.opener_end_markers if history_end and history_end.text.endswith(text)), "")
        if end is not None or history_end is None or not opener:
            return end
        words = history_end.text.removesuffix(opener)
        return TurnEnd(tail.rstrip() + words[len(words.rstrip()) :] + opener, opens_next_turn=True)

    def _first_known_end(self, text: str, *extra_markers: str) -> TurnEnd | None:
        """The text through the first of the known ends in it, or of `extra_markers`; of several there the longest."""
        ends = [(text.find(end), -len(end)) for end in (*self.end_markers, *extra_markers) if end in text]
        if not ends:
            return None
        offset, negative_size = min(ends)
        end_text = text[: offset - negative_size]
        return TurnEnd(end_text, is_text_only=not self._possible_ends(end_text, is_answer_text=False))

    def _possible_ends(self, text: str, *, is_answer_text: bool) -> list[tuple[int, str]]:
        """Places of control tokens that may end a turn. Tags such as `</tool_call>` open or close a part of one, unless
        they are tokens that end an answer."""
        known_markers = "".join(self.end_markers) if not is_answer_text else ""

        def may_end(token: str) -> bool:
            if token == self.eos_token or not MARKUP_TAG.fullmatch(token):
                return True
            is_opening_end = token[1] != "/" and bool(END_WORD.search(token))  # such as Gemma's <end_of_turn>
            return is_opening_end or (token in self.special_tokens and (is_answer_text or token in known_markers))

        return [(offset, token) for offset, token in find_control_tokens(text, self.special_tokens) if may_end(token)]

    def _end_offset(self, ends: Sequence[tuple[int, str]]) -> int:
        """Where an end ends: with the first eos, at which generation stops, else where its last token first stands."""
        tokens = [token for _, token in ends]
        offset, token = ends[tokens.index(self.eos_token if self.eos_token in tokens else tokens[-1])]
        return offset + len(token)

    def _opener_end(self, final_tail: str, continued_tail: str) -> int:
        """Where the special token ends that opens the next turn right after this one; 0 where there is none."""
        closed_tail = final_tail.rstrip()
        following_tokens = [
            place for place in find_control_tokens(continued_tail, self.special_tokens) if place[0] >= len(closed_tail)
        ]
        if not continued_tail.startswith(closed_tail) or not following_tokens:
            return 0
        offset, token = following_tokens[0]
        is_token = (
            token in self.special_tokens or NON_TAG_TOKEN.fullmatch(token) or (not closed_tail and token[1] != "/")
        )
        return offset + len(token) if is_token and not continued_tail[len(closed_tail) : offset].strip() else 0
