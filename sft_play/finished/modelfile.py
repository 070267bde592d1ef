"""An Ollama Modelfile: the chat template of training, written again in Go's template language, and checked.

Ollama does not run the template inside a GGUF. Its own is learnt here from what the chat template writes around probe
texts; then a small evaluator of Go's templates renders conversations with it, and every one has to be the chat
template's text.
"""

from __future__ import annotations

import json
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
    if between[0] != between[2] or between[1] != between[3]:
        raise NoGoTemplate("it writes earlier turns in another way than later ones")
    user_end = _cut(render(turns[:1], prompt=False), [turns[0]["content"]])[1]
    if not between[0].startswith(user_end) or not tail.startswith(user_end):
        user_end = _whole_tokens(_common_start(between[0], tail), [between[0], tail], special)
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


# --- Go's template language -------------------------------------------------------------------------------------------


def go_template(parts: Parts, *, bos: str = "") -> str:
    """The parts as a template for Ollama. `bos`: text that the engine puts before every prompt, left out here."""

    def text(literal: str) -> str:
        return literal.replace("{{", '{{ "{{" }}')

    start = parts.start.removeprefix(bos)
    first = text(start)
    inside = ""
    if parts.system is not None:
        opening, closing = parts.system
        if parts.system_place != "own turn":
            system = f"{text(opening)}{{{{ $.System }}}}{text(closing)}"
            is_here = "le $i 1" if parts.system_place == "first user turn" else "eq (len (slice $.Messages $i)) 1"
            inside = f"{{{{ if and $.System ({is_here}) }}}}{system}{{{{ end }}}}"
        else:
            system = f"{text(opening.removeprefix(bos))}{{{{ .System }}}}{text(closing)}"
            first = f"{{{{ if .System }}}}{system}{{{{ else }}}}{first}{{{{ end }}}}" if first else (
                f"{{{{ if .System }}}}{system}{{{{ end }}}}"
            )  # fmt: skip
    user = f"{text(parts.user[0])}{inside}{{{{ .Content }}}}{text(parts.user[1])}"
    assistant = f"{text(parts.assistant[0])}{{{{ .Content }}}}{text(parts.assistant[1])}"
    index = "$i, $_ := " if inside else ""
    return (
        f'{first}{{{{ range {index}.Messages }}}}{{{{ if eq .Role "user" }}}}{user}'
        f'{{{{ else if eq .Role "assistant" }}}}{assistant}{{{{ end }}}}{{{{ end }}}}{text(parts.answer)}'
    )


def evaluate(template: str, messages: Sequence[Mapping[str, str]]) -> str:
    """What Ollama makes of a conversation with this template.

    As Ollama does, neighbouring messages of one role are joined first, and `.System` is every system prompt.

    Raises:
        ValueError: the template uses what this evaluator does not know.
    """
    joined: list[dict[str, str]] = []
    for message in messages:
        if joined and joined[-1]["role"] == message["role"]:
            joined[-1]["content"] += "\n\n" + message["content"]
        else:
            joined.append({"role": message["role"], "content": message["content"]})
    system = "\n\n".join(one["content"] for one in joined if one["role"] == "system")
    root = {"System": system, "Messages": [{"Role": one["role"], "Content": one["content"]} for one in joined]}
    pieces = re.split(r"\{\{(.*?)\}\}", template, flags=re.DOTALL)
    nodes, rest = _parse(list(enumerate(pieces)))
    if rest:
        raise ValueError("an end without a beginning")
    return _run(nodes, root, {"$": root})


_Node = tuple[str, Any]


def _parse(pieces: list[tuple[int, str]]) -> tuple[list[_Node], list[tuple[int, str]]]:
    """Nodes up to the `end` or `else` that closes this block, and the pieces from there on."""
    nodes: list[_Node] = []
    while pieces:
        (number, piece), pieces = pieces[0], pieces[1:]
        if number % 2 == 0:
            nodes.append(("text", piece))
            continue
        action = piece.strip()
        word = action.partition(" ")[0]
        if word in ("end", "else"):
            return nodes, [(number, piece), *pieces]
        if word in ("if", "range"):
            branches = []
            while True:
                body, pieces = _parse(pieces)
                if not pieces:
                    raise ValueError(f"{word} without an end")
                branches.append((action.partition(" ")[2].strip(), body))
                action, pieces = pieces[0][1].strip(), pieces[1:]
                if action == "end":
                    break
                action = action.removeprefix("else").strip() or "if true"
            nodes.append((word, branches))
        else:
            nodes.append(("value", action))
    return nodes, []


def _run(nodes: Sequence[_Node], dot: Any, variables: dict[str, Any]) -> str:
    written = []
    for kind, body in nodes:
        if kind == "text":
            written.append(body)
        elif kind == "value":
            written.append(str(_value(body, dot, variables)))
        elif kind == "if":
            chosen: list[_Node] = next((block for condition, block in body if _value(condition, dot, variables)), [])
            written.append(_run(chosen, dot, variables))
        else:
            ((loop, block),) = body
            names, _, source = loop.rpartition(":=")
            index = names.partition(",")[0].strip()
            for number, item in enumerate(_value(source.strip(), dot, variables)):
                written.append(_run(block, item, {**variables, index: number} if index else variables))
    return "".join(written)


def _value(expression: str, dot: Any, variables: Mapping[str, Any]) -> Any:
    words = _words(expression)
    name, arguments = words[0], words[1:]
    if arguments:
        if name not in _FUNCTIONS:
            raise ValueError(f"the function {name} is not known here")
        return _FUNCTIONS[name](*(_value(one, dot, variables) for one in arguments))
    if name.startswith("("):
        return _value(name[1:-1], dot, variables)
    if name.startswith('"'):
        return json.loads(name)
    if name == "true":
        return True
    if name.isdigit():
        return int(name)
    holder, _, field = name.partition(".")
    value = variables[holder] if holder else dot
    return value[field] if field else value


def _words(expression: str) -> list[str]:
    """An expression's words; one in parentheses is one word."""
    words, depth = [""], 0
    for part in re.findall(r'"(?:[^"\\]|\\.)*"|[()]|\s+|[^\s()"]+', expression):
        if part.isspace() and not depth:
            words.append("")
            continue
        depth += (part == "(") - (part == ")")
        words[-1] += part
    return words


_FUNCTIONS: dict[str, Any] = {
    "eq": lambda one, other: one == other,
    "le": lambda one, other: one <= other,
    "and": lambda *values: all(values),
    "len": len,
    "slice": lambda items, start: items[start:],
}


# --- the file ---------------------------------------------------------------------------------------------------------


def modelfile(file: str, template: str, *, stops: Sequence[str], system: str | None, context: int) -> str:
    """The text of a Modelfile. `context`: tokens of the longest conversation; Ollama's own limit cuts prompts silently.

    Raises:
        NoGoTemplate: a text in it cannot be quoted.
    """
    for text in (template, system or "", *stops):
        if '"""' in text:
            raise NoGoTemplate('it writes """, which ends a text in a Modelfile')
    lines = [f"FROM ./{file}", f'TEMPLATE """{template}"""']
    if system is not None:
        lines.append(f'SYSTEM """{system}"""')
    lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops if len(stop) <= _LONGEST_STOP]
    lines += [f"PARAMETER num_ctx {context}", "PARAMETER temperature 0"]
    return "\n".join(lines) + "\n"


def probes() -> list[list[dict[str, str]]]:
    """Conversations that a Modelfile has to get right: one to four turns, with a system prompt and without."""
    texts = ("Hello", "naïve café 日本語 🚀", "a {{ .b }} {% c %} \"d\" '''", "two\n\nlines", "1 < 2 && 3 > 2")
    conversations = []
    for turns in range(1, 5):
        asked = [
            _turn(role, f"{texts[(turn + shift) % len(texts)]} {turn}")
            for turn in range(turns)
            for shift, role in enumerate(("user", "assistant"))
        ][:-1]
        conversations += [asked, [_turn("system", "You are terse."), *asked]]
    return conversations
