"""An Ollama Modelfile: the chat template of training, written again in Go's template language, and checked.

Ollama does not run the template inside a GGUF. Its own is written from what the chat template writes around probe texts
(`learn_template_parts`), and what Ollama makes of conversations with it has to be the chat template's text, character
by character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sft_play.data.masks.sandbox import RenderError
from sft_play.errors import TokenizerError
from sft_play.finished.export.engine_prompts import EnginePrompts, probe_conversations, shared_prefix_length
from sft_play.finished.run import FinishedRun

_MAX_STOP_CHARS = 64
_SYSTEM, _USERS, _ANSWERS = "Qsys0Q", ("Quser1Q", "Quser2Q", "Quser3Q"), ("Qbot1Q", "Qbot2Q")


class UnsupportedTemplateError(TokenizerError):
    """The chat template does what a Modelfile cannot say."""


def build_modelfile(
    run: FinishedRun, prompts: EnginePrompts, file: str, *, adds_bos: bool, context: int
) -> tuple[str, tuple[str, ...]]:
    """The Modelfile, and notes on it. `adds_bos`: the engine puts BOS before a prompt. `context`: positions of the
    model. Raises UnsupportedTemplate where a Modelfile cannot render what the chat template does."""
    tokenizer = prompts.tokenizer
    stops = [tokenizer.decode([token], skip_special_tokens=False) for token in prompts.stop_ids]
    for stop in stops:
        # Ollama stops at a text, not at a token: one that ordinary tokens spell too would end answers early
        if len(tokenizer(stop, add_special_tokens=False)["input_ids"]) != 1:
            raise UnsupportedTemplateError(f"the stop token {stop!r} is not one token when it is written as text")
    if prompts.is_plain_text:
        return format_modelfile(file, "{{ .Prompt }}", stops=stops, system=None, context=context), ()
    bos = str(tokenizer.bos_token) if adds_bos else ""
    try:
        parts = learn_template_parts(prompts.render, tokenizer.all_special_tokens)
        template = go_template(parts, bos=bos)
        _check_probes(prompts, parts, bos=bos)
    except UnsupportedTemplateError as error:
        remedy = f"llama-server --jinja runs it itself: make export FORMAT=gguf RUN={run.folder.shell_path}"
        raise UnsupportedTemplateError(
            f"the chat template cannot be written as an Ollama template: {error}. {remedy}"
        ) from None
    date_note = f"The chat template writes the date; the Modelfile has that of the run ({prompts.today})"
    notes = (date_note,) if "strftime_now" in (prompts.template or "") else ()
    return format_modelfile(file, template, stops=stops, system=parts.default_system, context=context), notes


def _check_probes(prompts: EnginePrompts, parts: TemplateParts, *, bos: str) -> None:
    for messages in probe_conversations():
        if messages[0]["role"] == "system" and parts.system is None:
            continue
        if render_as_ollama(parts, messages, bos=bos) != prompts.render(messages).removeprefix(bos):
            roles = ", ".join(message["role"] for message in messages)
            raise UnsupportedTemplateError(f"it renders a conversation ({roles}) differently")


def format_modelfile(file: str, template: str, *, stops: Sequence[str], system: str | None, context: int) -> str:
    """The text of a Modelfile. `context`: tokens of the longest conversation; Ollama's own limit cuts prompts silently.
    Raises UnsupportedTemplate where a text in it cannot be quoted."""
    for text in (template, system or "", *stops):
        if '"""' in text:
            raise UnsupportedTemplateError('it writes """, which ends a text in a Modelfile')
    lines = [f"FROM ./{file}", f'TEMPLATE """{template}"""']
    if system is not None:
        lines.append(f'SYSTEM """{system}"""')
    lines += [
        f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops if len(stop) <= _MAX_STOP_CHARS
    ]
    # greedy, as the run's own evaluation and every comparison here
    lines += [f"PARAMETER num_ctx {context}", "PARAMETER temperature 0"]
    return "\n".join(lines) + "\n"


# The chat template: messages to text, with `prompt` to what an answer follows; raises RenderError where it refuses.
RenderFunction = Callable[..., str]


@dataclass(frozen=True)
class TemplateParts:
    """What a chat template writes around the texts of a conversation."""

    start: str
    system: tuple[str, str] | None
    """Around the system prompt; None where the template writes none."""
    system_position: Literal["own turn", "first user turn", "last user turn"]
    """Where the system prompt stands; inside a user turn it comes before that turn's text."""
    user: tuple[str, str]
    assistant: tuple[str, str]
    answer: str
    """After the last turn, where the answer begins."""
    default_system: str | None = None
    """The system prompt that the template writes where none is given."""


def go_template(parts: TemplateParts, *, bos: str = "") -> str:
    """The parts as a template in Go's language. `bos`: text that the engine puts before every prompt, left out here."""

    def escape(literal: str) -> str:
        return literal.replace("{{", '{{ "{{" }}')  # Go's way to write braces that begin no action

    start = parts.start.removeprefix(bos)
    opening_text = escape(start)
    system_action = ""
    if parts.system is not None:
        opening, closing = parts.system
        if parts.system_position != "own turn":
            system = f"{escape(opening)}{{{{ $.System }}}}{escape(closing)}"
            # the system prompt is a message too: the first user turn is message 1 then; the last turn has none after it
            system_condition = (
                "le $i 1" if parts.system_position == "first user turn" else "eq (len (slice $.Messages $i)) 1"
            )
            system_action = f"{{{{ if and $.System ({system_condition}) }}}}{system}{{{{ end }}}}"
        else:
            system = f"{escape(opening.removeprefix(bos))}{{{{ .System }}}}{escape(closing)}"
            without_system = f"{{{{ else }}}}{opening_text}" if opening_text else ""
            opening_text = f"{{{{ if .System }}}}{system}{without_system}{{{{ end }}}}"
    user = f"{escape(parts.user[0])}{system_action}{{{{ .Content }}}}{escape(parts.user[1])}"
    assistant = f"{escape(parts.assistant[0])}{{{{ .Content }}}}{escape(parts.assistant[1])}"
    index = "$i, $_ := " if system_action else ""
    return (
        f'{opening_text}{{{{ range {index}.Messages }}}}{{{{ if eq .Role "user" }}}}{user}'
        f'{{{{ else if eq .Role "assistant" }}}}{assistant}{{{{ end }}}}{{{{ end }}}}{escape(parts.answer)}'
    )


def render_as_ollama(parts: TemplateParts, messages: Sequence[Mapping[str, str]], *, bos: str = "") -> str:
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
    system_text = f"{opening}{system}{closing}" if system and parts.system is not None else ""
    has_own_turn = parts.system_position == "own turn"
    text = (system_text if has_own_turn and system_text else parts.start).removeprefix(bos)
    for turn_index, (role, content) in enumerate(turns):
        if role == "user":
            follows_system = (
                turn_index <= 1 if parts.system_position == "first user turn" else turn_index == len(turns) - 1
            )
            inner_system = system_text if follows_system and not has_own_turn else ""
            text += f"{parts.user[0]}{inner_system}{content}{parts.user[1]}"
        elif role == "assistant":
            text += f"{parts.assistant[0]}{content}{parts.assistant[1]}"
    return text + parts.answer


def learn_template_parts(render: RenderFunction, special_tokens: Sequence[str]) -> TemplateParts:
    """Learn the parts of a chat template from probe conversations. Raises UnsupportedTemplate where the turns are not
    written one after the other, each in the same way."""
    turns = [_turn("user", _USERS[0]), _turn("assistant", _ANSWERS[0]), _turn("user", _USERS[1]),
             _turn("assistant", _ANSWERS[1]), _turn("user", _USERS[2])]  # fmt: skip
    before_first, *between, after_last = _split_at_marks(render(turns), [turn["content"] for turn in turns])
    # between[0] and [2] go from a question to its answer, [1] and [3] from an answer to the next question
    if between[0] != between[2] or between[1] != between[3]:
        raise UnsupportedTemplateError("it writes earlier turns in another way than later ones")
    # a question that nothing follows shows where its turn ends, and where that of the answer begins
    user_end = _split_at_marks(render(turns[:1], prompt=False), [turns[0]["content"]])[1]
    if not between[0].startswith(user_end) or not after_last.startswith(user_end):
        user_end = _trim_to_whole_tokens(
            _common_prefix(between[0], after_last), [between[0], after_last], special_tokens
        )
    # what opens a user turn ends both what stands before the first one and what stands between an answer and the next
    user_start = _trim_to_whole_tokens(
        _common_suffix(before_first, between[1]), [before_first, between[1]], special_tokens
    )
    if user_end and user_start.startswith(user_end):  # what ends every turn ended a system prompt of the template's own
        user_start = user_start.removeprefix(user_end)
    start, answer_end = (
        before_first[: len(before_first) - len(user_start)],
        between[1][: len(between[1]) - len(user_start)],
    )
    answer_start = between[0].removeprefix(user_end)
    parts = TemplateParts(
        start, None, "own turn", (user_start, user_end), (answer_start, answer_end), after_last[len(user_end) :]
    )
    return _learn_system_parts(parts, render, turns, between, after_last)


def _learn_system_parts(
    parts: TemplateParts, render: RenderFunction, turns: Sequence[Mapping[str, str]], between: Sequence[str], tail: str
) -> TemplateParts:
    try:
        text = render([_turn("system", _SYSTEM), *turns])
    except RenderError:
        return parts
    if _SYSTEM not in text:
        return parts
    contents = [turn["content"] for turn in turns]
    if text.index(_SYSTEM) > text.find(contents[0]):
        *pieces, text_before, text_after, end = _split_at_marks(text, [*contents[:-1], _SYSTEM, contents[-1]])
        if [*pieces[1:], end] != [*between[:-1], tail] or not text_before.startswith(between[-1]):
            raise UnsupportedTemplateError("it writes the system prompt between the turns")
        return replace(
            parts, system=(text_before.removeprefix(between[-1]), text_after), system_position="last user turn"
        )
    text_before, text_after, *pieces = _split_at_marks(text, [_SYSTEM, *contents])
    if [*pieces] != [*between, tail]:
        raise UnsupportedTemplateError("it writes the turns in another way where there is a system prompt")
    user_start = parts.user[0]
    if text_before.startswith(parts.start + user_start) and not text_after.endswith(user_start):
        return replace(
            parts, system=(text_before[len(parts.start + user_start) :], text_after), system_position="first user turn"
        )
    if user_start and not text_after.endswith(user_start):
        raise UnsupportedTemplateError("it opens the first user turn in another way after a system prompt")
    system = (text_before, text_after[: len(text_after) - len(user_start)])
    is_default = parts.start.startswith(system[0]) and parts.start.endswith(system[1])
    default_system = parts.start[len(system[0]) : len(parts.start) - len(system[1])] if is_default else ""
    return replace(parts, system=system, default_system=default_system or None)


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _split_at_marks(text: str, marks: Sequence[str]) -> list[str]:
    pieces, remainder = [], text
    for mark in marks:
        piece, matched, remainder = remainder.partition(mark)
        if not matched or mark in remainder:
            raise UnsupportedTemplateError("it does not write every turn once and in order")
        pieces.append(piece)
    return [*pieces, remainder]


def _common_prefix(first: str, second: str) -> str:
    return first[: shared_prefix_length(first, second)]


def _common_suffix(first: str, second: str) -> str:
    return _common_prefix(first[::-1], second[::-1])[::-1]


def _trim_to_whole_tokens(text_end: str, texts: Sequence[str], special_tokens: Sequence[str]) -> str:
    """The end, shortened so that it does not begin inside a special token of either text."""
    spans = [
        (match.start() - len(text), match.end() - len(text))
        for text in texts
        for token in special_tokens
        for match in re.finditer(re.escape(token), text)
    ]
    cut = -len(text_end)
    while any(span_start < cut < span_end for span_start, span_end in spans):
        cut = min(span_end for span_start, span_end in spans if span_start < cut < span_end)
    return text_end[len(text_end) + cut :] if cut else ""
