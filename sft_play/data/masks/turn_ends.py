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
NO_TAG = re.compile(r"<\|[^|<>]{1,40}\|>|<｜[^｜<>]{1,40}｜>|<\|[A-Za-z_]{1,40}>|<[A-Za-z_]{1,40}\|>")
# What may be a tag of a markup language.
TAG = re.compile(r"(?!</s>)</?[A-Za-z_][^<>\s|]{0,40}>")
# Words in the names of control tokens that end something.
SAYS_END = re.compile(r"end|eot|eos|eom|return|stop|sep\b|<turn\||^</s>$|\bcall\|>", re.IGNORECASE)


def control_tokens(text: str, special: Sequence[str]) -> list[str]:
    """Control tokens in a text, in order: the tokenizer's own, and what looks like one."""
    return [token for _, token in control_token_places(text, special)]


def control_token_places(text: str, special: Sequence[str]) -> list[tuple[int, str]]:
    """Where control tokens begin in a text; of those that overlap the first, of those of one beginning the longest."""
    # Both kinds: a tokenizer may lack tokens of its template, and may have tokens that look like words.
    places = {(match.start(), match.group()) for match in _CONTROL_TOKEN.finditer(text)}
    for token in special:
        at = text.find(token)
        while at >= 0:
            places.add((at, token))
            at = text.find(token, at + 1)  # + 1, not its length: tokens may overlap, and the first one wins below
    ordered: list[tuple[int, str]] = []
    covered = 0
    for at, token in sorted(places, key=lambda place: (place[0], -len(place[1]))):
        if at >= covered:
            ordered.append((at, token))
            covered = at + len(token)
    return ordered


def shared_beginning(own: str, following: str, special: Sequence[str]) -> str:
    """The common beginning of two texts, with no control token cut in two."""
    # `<|im_end|>` and `<|im_start|>` begin alike: the beginning that both texts have may end inside a token
    size = common_length(own, following)
    for text in (own, following):
        for at, token in control_token_places(text, special):
            if at < size < at + len(token):
                size = at
    return own[:size]


def common_length(first: str, second: str) -> int:
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


def first_difference(expected: str, text: str) -> str:
    """Where two texts part, and what the second has there, for a message."""
    at = common_length(expected, text)
    return f"at character {at + 1}: {one_line(repr(text[max(0, at - 20) : at + 40]), limit=90)}"


# Characters that may end a turn without a control token, such as `\n\n### End`: more is text of the template.
_LONGEST_WORDS = 40


@dataclass(frozen=True)
class TurnEnd:
    """What ends a turn: `text` is what stands after its last piece, through its end."""

    text: str
    by_next: bool = False
    """It is the token that opens the next turn."""
    is_words: bool = False
    """It holds no control token."""


@dataclass(frozen=True)
class TurnEnds:
    """What ends an assistant's turn in one template; `special` and `eos` are the tokenizer's."""

    special: tuple[str, ...]
    eos: str | None
    openers: frozenset[str] = frozenset()
    """Tokens that open a turn, where the template writes the next one's header whether or not it is asked to."""
    history_ends: frozenset[str] = frozenset()
    """Tokens that may close a turn once it is history, where another one closes the last turn."""
    markers: tuple[str, ...] = ()
    """Texts that end an assistant turn, the usual one first; empty where the template writes nothing."""
    next_openers: tuple[str, ...] = ()
    """Those of them that open the next turn, where the template closes none."""

    @property
    def end_of_turn(self) -> str:
        """The text that ends an assistant turn, such as `<|im_end|>`; empty where the template writes nothing."""
        return self.markers[0] if self.markers else ""

    @property
    def tokens(self) -> frozenset[str]:
        """The control tokens of all ends of turns."""
        return frozenset(token for marker in self.markers for token in control_tokens(marker, self.special))

    def end_of(self, own: str | None, following: str | None, *, is_last: bool, is_text: bool) -> TurnEnd | None:
        """The end of a turn: the text after its last piece, through its end; None where it has no end. `own` is what
        follows the piece in the conversation that stops with the turn (None: not found there), `following` in the one
        that continues (None: it cannot be rendered). `is_last`: the turn is the last one of the row; `is_text`: its
        last piece is an answer's text, not think text or a call."""
        if own is None:  # rendered otherwise as a last turn, so there is nothing to compare: only known ends count
            return self._first_end(following or "")
        # Where the two renderings part, the turn is over: the one goes on with the next turn's header.
        shared = own if following is None else shared_beginning(own, following, self.special)
        ends = self._possible_ends(shared, is_text=is_text)
        # A header that is written in any case stands in both, and is the next turn's all the same.
        while ends and ends[-1][1] in self.openers:
            shared = shared[: ends[-1][0]]
            ends = self._possible_ends(shared, is_text=is_text)
        if ends:
            return TurnEnd(shared[: self._through(ends)])
        own_ends = self._possible_ends(own, is_text=is_text)
        if not own_ends and following is not None:
            opener = self._opener_end(own, following)
            if opener:
                return TurnEnd(following[:opener], by_next=True)
        if own_ends and is_last:
            return TurnEnd(own[: self._through(own_ends)])
        if following is not None and (own_ends or not is_text):
            # as history the turn may be written otherwise (a call with its id), or be closed by another token
            tokens = [token for _, token in self._possible_ends(following, is_text=is_text)[:1]]
            end = self._first_end(
                following, *(token for token in tokens if token in self.history_ends or SAYS_END.search(token))
            )
            return self._last_call_end(own, end) if is_last else end
        words = shared.rstrip()
        # a call's own brackets and quotes are no end of it: behind a call only words that end turns count
        is_end = (is_text and 0 < len(words) <= _LONGEST_WORDS) or words.endswith(self.markers or ("\0",))
        return TurnEnd(words, is_words=True) if is_end else None

    def _last_call_end(self, tail: str, as_history: TurnEnd | None) -> TurnEnd | None:
        """Find the end of a last turn that calls a tool and that no control token ends: words that are known to end
        turns, or the token that opens the next turn in a longer conversation. `tail` is the text behind the call."""
        end = self._first_end(tail)
        opener = next((text for text in self.next_openers if as_history and as_history.text.endswith(text)), "")
        if end is not None or as_history is None or not opener:
            return end
        before = as_history.text.removesuffix(opener)
        return TurnEnd(tail.rstrip() + before[len(before.rstrip()) :] + opener, by_next=True)

    def _first_end(self, text: str, *more: str) -> TurnEnd | None:
        """The text through the first of the known ends in it, or of `more`; the longest of those that begin there."""
        ends = [(text.find(end), -len(end)) for end in (*self.markers, *more) if end in text]
        if not ends:
            return None
        at, minus_size = min(ends)
        whole = text[: at - minus_size]
        return TurnEnd(whole, is_words=not self._possible_ends(whole, is_text=False))

    def _possible_ends(self, text: str, *, is_text: bool) -> list[tuple[int, str]]:
        """Places of control tokens that may end a turn. Tags such as `</tool_call>` open or close a part of one, unless
        they are tokens that end an answer."""
        known = "".join(self.markers) if not is_text else ""

        def may_end(token: str) -> bool:
            if token == self.eos or not TAG.fullmatch(token):
                return True
            is_opening_end = token[1] != "/" and bool(SAYS_END.search(token))  # such as Gemma's <end_of_turn>
            return is_opening_end or (token in self.special and (is_text or token in known))

        return [(at, token) for at, token in control_token_places(text, self.special) if may_end(token)]

    def _through(self, ends: Sequence[tuple[int, str]]) -> int:
        """Where an end ends: with the first eos, at which generation stops, else where its last token first stands."""
        tokens = [token for _, token in ends]
        at, token = ends[tokens.index(self.eos if self.eos in tokens else tokens[-1])]
        return at + len(token)

    def _opener_end(self, own: str, following: str) -> int:
        """Where the special token ends that opens the next turn right after this one; 0 where there is none."""
        closed = own.rstrip()
        places = [place for place in control_token_places(following, self.special) if place[0] >= len(closed)]
        if not following.startswith(closed) or not places:
            return 0
        at, token = places[0]
        is_token = token in self.special or NO_TAG.fullmatch(token) or (not closed and token[1] != "/")
        return at + len(token) if is_token and not following[len(closed) : at].strip() else 0
