"""An Ollama Modelfile: the chat template of training, written again in Go's template language, and checked.

Ollama does not run the template inside a GGUF. Its own is written from what the chat template writes around probe texts
(`learn`), and what Ollama makes of conversations with it has to be the chat template's text, character by character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sft_play.data.masks.template import RenderError
from sft_play.errors import TokenizerError
from sft_play.finished.export.prompts import Prompts, probes, shared_length
from sft_play.finished.run import FinishedRun

_LONGEST_STOP = 64
_SYSTEM, _USERS, _ANSWERS = "Qsys0Q", ("Quser1Q", "Quser2Q", "Quser3Q"), ("Qbot1Q", "Qbot2Q")


class NoGoTemplate(TokenizerError):
    """The chat template does what a Modelfile cannot say."""


def modelfile_of(
    run: FinishedRun, prompts: Prompts, file: str, *, adds_bos: bool, context: int
) -> tuple[str, tuple[str, ...]]:
    """The Modelfile, and notes on it. `adds_bos`: the engine puts BOS before a prompt. `context`: positions of the
    model. Raises NoGoTemplate where a Modelfile cannot render what the chat template does."""
    tokenizer = prompts.tokenizer
    stops = [tokenizer.decode([token], skip_special_tokens=False) for token in prompts.stops]
    for stop in stops:
        # Ollama stops at a text, not at a token: one that ordinary tokens spell too would end answers early
        if len(tokenizer(stop, add_special_tokens=False)["input_ids"]) != 1:
            raise NoGoTemplate(f"the stop token {stop!r} is not one token when it is written as text")
    if prompts.is_text:
        return modelfile(file, "{{ .Prompt }}", stops=stops, system=None, context=context), ()
    bos = str(tokenizer.bos_token) if adds_bos else ""
    try:
        parts = learn(prompts.render, tokenizer.all_special_tokens)
        template = go_template(parts, bos=bos)
        _check_probes(prompts, parts, bos=bos)
    except NoGoTemplate as error:
        way_out = f"llama-server --jinja runs it itself: make export FORMAT=gguf RUN={run.folder.shell_path}"
        raise NoGoTemplate(f"the chat template cannot be written as an Ollama template: {error}. {way_out}") from None
    dated = f"The chat template writes the date; the Modelfile has that of the run ({prompts.today})"
    notes = (dated,) if "strftime_now" in (prompts.template or "") else ()
    return modelfile(file, template, stops=stops, system=parts.default_system, context=context), notes


def _check_probes(prompts: Prompts, parts: Parts, *, bos: str) -> None:
    for messages in probes():
        if messages[0]["role"] == "system" and parts.system is None:
            continue
        if ollama_text(parts, messages, bos=bos) != prompts.render(messages).removeprefix(bos):
            roles = ", ".join(message["role"] for message in messages)
            raise NoGoTemplate(f"it renders a conversation ({roles}) differently")


def modelfile(file: str, template: str, *, stops: Sequence[str], system: str | None, context: int) -> str:
    """The text of a Modelfile. `context`: tokens of the longest conversation; Ollama's own limit cuts prompts silently.
    Raises NoGoTemplate where a text in it cannot be quoted."""
    for text in (template, system or "", *stops):
        if '"""' in text:
            raise NoGoTemplate('it writes """, which ends a text in a Modelfile')
    lines = [f"FROM ./{file}", f'TEMPLATE """{template}"""']
    if system is not None:
        lines.append(f'SYSTEM """{system}"""')
    lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops if len(stop) <= _LONGEST_STOP]
    # greedy, as the run's own evaluation and every comparison here
    lines += [f"PARAMETER num_ctx {context}", "PARAMETER temperature 0"]
    return "\n".join(lines) + "\n"


# The chat template: messages to text, with `prompt` to what an answer follows; raises RenderError where it refuses.
Render = Callable[..., str]


@dataclass(frozen=True)
class Parts:
    """What a chat template writes around the texts of a conversation."""

    start: str
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


def go_template(parts: Parts, *, bos: str = "") -> str:
    """The parts as a template in Go's language. `bos`: text that the engine puts before every prompt, left out here."""

    def text(literal: str) -> str:
        return literal.replace("{{", '{{ "{{" }}')  # Go's way to write braces that begin no action

    start = parts.start.removeprefix(bos)
    first = text(start)
    inside = ""
    if parts.system is not None:
        opening, closing = parts.system
        if parts.system_place != "own turn":
            system = f"{text(opening)}{{{{ $.System }}}}{text(closing)}"
            # the system prompt is a message too: the first user turn is message 1 then; the last turn has none after it
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


def ollama_text(parts: Parts, messages: Sequence[Mapping[str, str]], *, bos: str = "") -> str:
    """What Ollama makes of a conversation with the template of these parts: neighbouring messages of one role are
    joined first, and the system prompt is every system message."""
    turns: list[tuple[str, str]] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if turns and turns[-1][0] == role:
            turns[-1] = role, f"{turns[-1][1]}\n\n{content}"
        else:
            turns.append((role, content))
    system = "\n\n".join(content for role, content in turns if role == "system")
    opening, closing = parts.system or ("", "")
    whole = f"{opening}{system}{closing}" if system and parts.system is not None else ""
    is_own = parts.system_place == "own turn"
    text = (whole if is_own and whole else parts.start).removeprefix(bos)
    for place, (role, content) in enumerate(turns):
        if role == "user":
            is_here = place <= 1 if parts.system_place == "first user turn" else place == len(turns) - 1
            inside = whole if is_here and not is_own else ""
            text += f"{parts.user[0]}{inside}{content}{parts.user[1]}"
        elif role == "assistant":
            text += f"{parts.assistant[0]}{content}{parts.assistant[1]}"
    return text + parts.answer


def learn(render: Render, special: Sequence[str]) -> Parts:
    """The parts of a chat template, from probe conversations; raises NoGoTemplate where the turns are not written one
    after the other, each in the same way."""
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
    pieces, rest = [], text
    for mark in marks:
        before, there, rest = rest.partition(mark)
        if not there or mark in rest:
            raise NoGoTemplate("it does not write every turn once and in order")
        pieces.append(before)
    return [*pieces, rest]


def _common_start(one: str, other: str) -> str:
    return one[: shared_length(one, other)]


def _common_end(one: str, other: str) -> str:
    return _common_start(one[::-1], other[::-1])[::-1]


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
