"""What a chat template writes around the texts of a conversation, learnt from probe texts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from sft_play.data.masks.template import RenderError
from sft_play.errors import TokenizerError


class Render(Protocol):
    """The chat template: messages to text, with `prompt` to what an answer follows; raises RenderError where it refuses
    them."""

    def __call__(self, messages: Sequence[Mapping[str, Any]], /, *, prompt: bool = True) -> str: ...


_SYSTEM, _USERS, _ANSWERS = "Qsys0Q", ("Quser1Q", "Quser2Q", "Quser3Q"), ("Qbot1Q", "Qbot2Q")
_LONGEST_STOP = 64


class NoGoTemplate(TokenizerError):
    """The chat template does what a Modelfile cannot say."""


@dataclass(frozen=True)
class Parts:
    """What a chat template writes around the texts of a conversation."""

    start: str
    """Before the first turn where there is no system prompt."""
    system: tuple[str, str] | None
    """Around the system prompt; None where the template writes none."""
    system_place: Literal["own turn", "first user turn", "last user turn"]
    """Where the system prompt stands; inside a user turn it comes before that turn's text."""
    user: tuple[str, str]
    assistant: tuple[str, str]
    answer: str
    """After the last turn, where the answer begins."""
    default_system: str | None = None
    """The system prompt that the template writes where none is given."""


def learn(render: Render, special: Sequence[str]) -> Parts:
    """The parts of a chat template, from probe conversations.

    Raises:
        NoGoTemplate: the turns are not written one after the other, each in the same way.
    """
    turns = [_turn("user", _USERS[0]), _turn("assistant", _ANSWERS[0]), _turn("user", _USERS[1]),
             _turn("assistant", _ANSWERS[1]), _turn("user", _USERS[2])]  # fmt: skip
    head, *between, tail = _cut(render(turns), [turn["content"] for turn in turns])
    # between[0] and [2] go from a question to its answer, [1] and [3] from an answer to the next question
    if between[0] != between[2] or between[1] != between[3]:
        raise NoGoTemplate("it writes earlier turns in another way than later ones")
    # a question that nothing follows shows where its turn ends, and where that of the answer begins
    user_end = _cut(render(turns[:1], prompt=False), [turns[0]["content"]])[1]
    if not between[0].startswith(user_end) or not tail.startswith(user_end):
        user_end = _whole_tokens(_common_start(between[0], tail), [between[0], tail], special)
    # what opens a user turn ends both what stands before the first one and what stands between an answer and the next
    opener = _whole_tokens(_common_end(head, between[1]), [head, between[1]], special)
    if user_end and opener.startswith(user_end):  # what ends every turn ended a system prompt of the template's own
        opener = opener.removeprefix(user_end)
    start, closer = head[: len(head) - len(opener)], between[1][: len(between[1]) - len(opener)]
    own = between[0].removeprefix(user_end)
    parts = Parts(start, None, "own turn", (opener, user_end), (own, closer), tail[len(user_end) :])
    return _with_system(parts, render, turns, between, tail)


def _with_system(
    parts: Parts, render: Render, turns: Sequence[Mapping[str, str]], between: Sequence[str], tail: str
) -> Parts:
    """The parts with those of the system prompt."""
    try:
        text = render([_turn("system", _SYSTEM), *turns])
    except RenderError:
        return parts
    if _SYSTEM not in text:
        return parts
    contents = [turn["content"] for turn in turns]
    if text.index(_SYSTEM) > text.find(contents[0]):
        *others, before, after, end = _cut(text, [*contents[:-1], _SYSTEM, contents[-1]])
        if [*others[1:], end] != [*between[:-1], tail] or not before.startswith(between[-1]):
            raise NoGoTemplate("it writes the system prompt between the turns")
        return replace(parts, system=(before.removeprefix(between[-1]), after), system_place="last user turn")
    before, after, *others = _cut(text, [_SYSTEM, *contents])
    if [*others] != [*between, tail]:
        raise NoGoTemplate("it writes the turns in another way where there is a system prompt")
    opener = parts.user[0]
    if before.startswith(parts.start + opener) and not after.endswith(opener):
        return replace(parts, system=(before[len(parts.start + opener) :], after), system_place="first user turn")
    if opener and not after.endswith(opener):
        raise NoGoTemplate("it opens the first user turn in another way after a system prompt")
    system = (before, after[: len(after) - len(opener)])
    is_default = parts.start.startswith(system[0]) and parts.start.endswith(system[1])
    default = parts.start[len(system[0]) : len(parts.start) - len(system[1])] if is_default else ""
    return replace(parts, system=system, default_system=default or None)


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _cut(text: str, marks: Sequence[str]) -> list[str]:
    """The text between marks that it holds once each, in this order."""
    pieces, rest = [], text
    for mark in marks:
        before, there, rest = rest.partition(mark)
        if not there or mark in rest:
            raise NoGoTemplate("it does not write every turn once and in order")
        pieces.append(before)
    return [*pieces, rest]


def _common_end(one: str, other: str) -> str:
    length = 0
    while length < min(len(one), len(other)) and one[-1 - length] == other[-1 - length]:
        length += 1
    return one[len(one) - length :]


def _common_start(one: str, other: str) -> str:
    return _common_end(one[::-1], other[::-1])[::-1]


def _whole_tokens(end: str, texts: Sequence[str], special: Sequence[str]) -> str:
    """The end, shortened so that it does not begin inside a special token of either text."""
    spans = [
        (match.start() - len(text), match.end() - len(text))
        for text in texts
        for token in special
        for match in re.finditer(re.escape(token), text)
    ]
    start = -len(end)
    while any(first < start < last for first, last in spans):
        start = min(last for first, last in spans if first < start < last)
    return end[len(end) + start :] if start else ""
