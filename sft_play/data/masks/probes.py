"""What a template does, seen by rendering probe conversations once for each template.

A template is never recognised by its name: forks change templates and keep the names.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from sft_play.data.masks.fitted_template import (
    ARGUMENT_FORMS,
    CALL_FORMS,
    CALLING,
    NEXT_TURNS,
    ODD_ARGUMENTS,
    PART_KEY,
    PLAIN,
    PROBE_TOOLS,
    SYSTEM,
    ArgumentForm,
    FittedTemplate,
    Habits,
    in_form,
    with_arguments_as,
)
from sft_play.data.masks.template import ChatTemplate, Endless, RenderError
from sft_play.data.masks.token_row import Inexact
from sft_play.data.masks.turn_ends import SAYS_END, TurnEnds, control_token_places, control_tokens
from sft_play.data.sources.messages import Message
from sft_play.errors import TokenizerError


def probed(
    jinja: ChatTemplate, *, special_tokens: Sequence[str], eos_token: str | None, with_tools: bool
) -> tuple[FittedTemplate, TurnEnds]:
    """The template with the habits that were seen, and what ends its assistant turns; raises TokenizerError where it
    cannot render a question and an answer, or drops the answer."""
    # Each step renders with the habits that the steps before it have seen.
    habits = _content(jinja, with_tools=with_tools)
    calls, arguments = _calls(FittedTemplate(jinja, habits))
    habits = replace(habits, calls=calls, arguments=arguments)
    habits = replace(habits, system=_system(FittedTemplate(jinja, habits)))
    ends = TurnEnds(tuple(token for token in special_tokens if token), eos_token)
    habits = replace(habits, think=_think_marks(FittedTemplate(jinja, habits), ends))
    header, unprompted = _headers(FittedTemplate(jinja, habits), ends.special)
    template = FittedTemplate(jinja, replace(habits, header=header, unprompted=unprompted))
    return template, _ends(template, ends)


def _render(template: FittedTemplate, messages: Sequence[Message], *, prompt: bool = False) -> str:
    return template.rendered(messages, PROBE_TOOLS if template.habits.tools else (), prompt=prompt)


def _content(jinja: ChatTemplate, *, with_tools: bool) -> Habits:
    problem, does = "", "drops"
    for tools, parts in itertools.product((with_tools, not with_tools), (False, True)):
        habits = Habits(parts=parts, tools=tools)
        try:
            text = _render(FittedTemplate(jinja, habits), PLAIN)
        except Endless as error:
            raise TokenizerError(f"the chat template cannot render a question and an answer: {error}") from error
        except RenderError as error:
            problem = problem or str(error)
            continue
        if "answer1q" in text and not (parts and PART_KEY.search(text)):
            return habits
        if not parts and "answer1q" in text.casefold():
            does = "rewrites"
    if problem:
        raise TokenizerError(f"the chat template cannot render a question and an answer: {problem}")
    raise TokenizerError(f"the chat template {does} an assistant's answer; set data.chat_template to another one")


# Tool calls


def _calls(template: FittedTemplate) -> tuple[bool, ArgumentForm | Literal["own"]]:
    # The whole exchange first; some templates refuse a tool's result, or to be given tools.
    with contextlib.suppress(Endless):
        for turns, tools in ((CALLING, PROBE_TOOLS), (CALLING[:2], PROBE_TOOLS), (CALLING[:2], ())):
            written = {kind: _written_calls(template, turns, tools, kind) for kind in ARGUMENT_FORMS}
            if any(written.values()):
                right = [kind for kind, text in written.items() if _are_right(template, text, kind)]
                return turns is CALLING, right[0] if len(right) == 1 else "own"
    return False, "own"


def _written_calls(template: FittedTemplate, turns: Sequence[Message], tools: Sequence[Any], kind: ArgumentForm) -> str:
    given = with_arguments_as(turns, kind)
    for form in CALL_FORMS:
        try:
            text = template.rendered(in_form(given, form), tools)
        except Endless:
            raise
        except RenderError:
            continue
        written = text.split("question1q")[-1]  # the tools before it hold words of the calls too
        words = ("look1q", "where1q", *(str(message["content"]) for message in turns[2:]))
        if all(word in written for word in words):
            return written
    return ""


def _are_right(template: FittedTemplate, written: str, kind: ArgumentForm) -> bool:
    """Whether the probe's arguments are encoded once and not escaped: written as their JSON, or each value as it is."""
    if template.entity(written):
        return False
    if kind == "text":
        return json.dumps(ODD_ARGUMENTS, ensure_ascii=False) in written
    if all(value in written for value in ODD_ARGUMENTS.values()):
        return True
    for brace in re.finditer(r"\{", written):
        with contextlib.suppress(ValueError):
            if json.JSONDecoder().raw_decode(written, brace.start())[0] == ODD_ARGUMENTS:
                return True
    return False


def _think_marks(template: FittedTemplate, ends: TurnEnds) -> tuple[str, ...]:
    """What opens think text, what closes it, and the control tokens in both; empty where there are no such marks."""
    question, answer = PLAIN
    thinking = ({"reasoning_content": "thought1q"}, {"content": f"<think>\nthought1q\n</think>\n\n{answer['content']}"})
    for form in thinking:
        try:
            text = _render(template, [question, {**answer, **form}])
            asked, prompt = (_render(template, [question], prompt=wanted) for wanted in (False, True))
        except RenderError:
            continue
        before, is_there, after = text.partition("thought1q")
        close, is_answered, _ = after.partition("answer1q")
        if is_there and is_answered:
            place = next(reversed(control_token_places(before, ends.special)), (len(before), ""))[0]
            pair = (before[place:].strip(), close.strip())
            # what opens the turn itself is no mark
            header = next(iter(control_tokens(prompt.removeprefix(asked), ends.special)), "\0")
            if all(mark and mark not in asked and header not in mark for mark in pair):
                return tuple(dict.fromkeys((*pair, *control_tokens(" ".join(pair), ends.special))))
    return ()


def _system(template: FittedTemplate) -> Literal["written", "dropped", "refused"]:
    try:
        return "written" if "system1q" in _render(template, [SYSTEM, *PLAIN]) else "dropped"
    except RenderError:
        return "refused"


def _headers(template: FittedTemplate, special: Sequence[str]) -> tuple[str, str]:
    """The generation prompt behind a question; and where there is none, what stands before the answer all the same."""
    try:
        question, prompt = (_render(template, PLAIN[:1], prompt=wanted) for wanted in (False, True))
    except RenderError:
        return "", ""
    if prompt != question:
        return prompt.removeprefix(question) if prompt.startswith(question) else "", ""
    before, _, behind = _render(template, PLAIN).partition("answer1q")
    header = before.removeprefix(question)
    # many templates write the answer's header in any case: then more than an end of turn stands behind the question
    answer_end = next(iter(control_tokens(behind, special)), "")
    after_question = control_tokens(question.rpartition("question1q")[2], special)
    has_header = any(token != answer_end and not SAYS_END.search(token) for token in after_question)
    if has_header or header == before:
        return "", ""
    for mark in template.habits.think[:2]:  # an empty think block behind it is no part of the header
        header = header.partition(mark)[0]
    return "", header if header.strip() else ""


# Ends of turns


def _ends(template: FittedTemplate, ends: TurnEnds) -> TurnEnds:
    last = _render(template, PLAIN)
    own = last.rpartition("answer1q")[2]
    try:
        whole = _render(template, [*PLAIN, *NEXT_TURNS])
        after = whole.partition("answer1q")[2]
        following = after.partition("question2q")[0] if "question2q" in after else None
    except RenderError:  # a template for a single exchange
        following = None
    # What closes the question may close an answer too, once it is history.
    behind_question = last.partition("question1q")[2].partition("answer1q")[0]
    user_end = next(iter(control_tokens(behind_question, ends.special)), "")
    history_ends = frozenset({user_end, ends.eos or ""} - {""})
    ends = replace(ends, openers=_openers(template, ends), history_ends=history_ends)
    found: list[tuple[str, bool]] = []
    for is_last in (True, False):
        end = ends.end_of(own, following, is_last=is_last, is_text=True)
        if end is not None:
            found.append((end.text.strip(), end.by_next))
    # An end of calls counts only where it is none of these.
    ends = replace(ends, markers=tuple(dict.fromkeys(text for text, _ in found if text)))
    if template.habits.calls:
        found += _call_ends(template, ends)
    return replace(
        ends,
        markers=tuple(dict.fromkeys(text for text, _ in found if text)),
        next_openers=tuple(dict.fromkeys(text for text, by_next in found if by_next)),
    )


def _call_ends(template: FittedTemplate, ends: TurnEnds) -> Iterator[tuple[str, bool]]:
    """The last token of a calling turn's end where it is none of the known ends (gpt-oss: `<|call|>`), and whether it
    opens the next turn."""
    try:
        last, whole = (
            template.rendered(template.fitted(turns, PROBE_TOOLS).messages, PROBE_TOOLS)
            for turns in (CALLING[:2], CALLING)
        )
    except (RenderError, Inexact):
        return
    own = last.rpartition("where1q")[2]
    before, result, _ = whole.rpartition("result1q")
    following = before.rpartition("where1q")[2] if result else None
    for is_last in (True, False):
        end = ends.end_of(own, following, is_last=is_last, is_text=False)
        if end is not None and not end.is_words:
            # The last token alone: what stands before it closes the call (`</tool_call>`), not the turn.
            token = control_tokens(end.text, ends.special)[-1]
            if not any(marker.endswith(token) for marker in ends.markers):
                yield token, end.by_next


def _openers(template: FittedTemplate, ends: TurnEnds) -> frozenset[str]:
    """Tokens that open a turn, where the template writes the next one's header whether or not it is asked to."""
    try:
        question = _render(template, PLAIN[:1])
        if question != _render(template, PLAIN[:1], prompt=True):
            return frozenset()  # it waits for add_generation_prompt, as nearly all do
        first = _render(template, [SYSTEM, *PLAIN])
    except RenderError:
        first = _render(template, PLAIN)
    place = first.find("system1q") if "system1q" in first else first.find("question1q")
    return frozenset(control_tokens(first[: max(0, place)], ends.special)) - {ends.eos or ""}
