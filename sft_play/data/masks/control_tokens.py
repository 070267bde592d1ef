"""Control tokens in rendered text: where a turn may begin or end, and what two renderings have in common."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sft_play.log import one_line

_CONTROL_TOKEN = re.compile(
    r"<\|[^|<>]{1,40}\|>|<｜[^｜<>]{1,40}｜>|<\|[A-Za-z_]{1,40}>|<[A-Za-z_]{1,40}\|>|\[/?[A-Z_]{2,20}\]"
    r"|</?[A-Za-z_][^<>\s]{0,40}>"
)
"""Texts that look like control tokens, for templates whose tokens this tokenizer does not have."""
NO_TAG = re.compile(r"<\|[^|<>]{1,40}\|>|<｜[^｜<>]{1,40}｜>|<\|[A-Za-z_]{1,40}>|<[A-Za-z_]{1,40}\|>")
"""Control tokens that cannot be taken for a tag of a markup language."""
TAG = re.compile(r"(?!</s>)</?[A-Za-z_][^<>\s|]{0,40}>")
"""What may be a tag of a markup language."""
SAYS_END = re.compile(r"end|eot|eos|eom|return|stop|sep\b|<turn\||^</s>$|\bcall\|>", re.IGNORECASE)
"""Words in the names of control tokens that end something."""


def control_tokens(text: str, special: Sequence[str]) -> list[str]:
    """Control tokens in a text, in order: the tokenizer's own, and what looks like one."""
    return [token for _, token in control_token_places(text, special)]


def control_token_places(text: str, special: Sequence[str]) -> list[tuple[int, str]]:
    """Where control tokens begin in a text; of those that overlap the first, of those that begin together the longest
    one."""
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
