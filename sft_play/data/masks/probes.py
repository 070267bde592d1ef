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
    PART_KEY,
    PROBE_ARGUMENTS,
    PROBE_CALL_TURNS,
    PROBE_EXCHANGE,
    PROBE_NEXT_TURNS,
    PROBE_SYSTEM,
    PROBE_TOOLS,
    ArgumentForm,
    FittedTemplate,
    TemplateTraits,
    apply_call_form,
    convert_arguments,
)
from sft_play.data.masks.template import ChatTemplate, EndlessTemplateError, RenderError
from sft_play.data.masks.token_row import InexactMaskError
from sft_play.data.masks.turn_ends import END_WORD, TurnEnds, control_tokens, find_control_tokens
from sft_play.data.sources.messages import Message
from sft_play.errors import TokenizerError


def probe_template(
    chat_template: ChatTemplate, *, special_tokens: Sequence[str], eos_token: str | None, with_tools: bool
) -> tuple[FittedTemplate, TurnEnds]:
    """The template with the traits that were seen, and what ends its assistant turns; raises TokenizerError where it
    cannot render a question and an answer, or drops the answer."""
    # Each step renders with the traits that the steps before it have seen.
    traits = _probe_content(chat_template, with_tools=with_tools)
    writes_calls, argument_form = _probe_calls(FittedTemplate(chat_template, traits))
    traits = replace(traits, writes_calls=writes_calls, argument_form=argument_form)
    traits = replace(traits, system=_probe_system(FittedTemplate(chat_template, traits)))
    ends = TurnEnds(tuple(token for token in special_tokens if token), eos_token)
    traits = replace(traits, think_marks=_probe_think_marks(FittedTemplate(chat_template, traits), ends))
    generation_prompt, answer_header = _probe_headers(FittedTemplate(chat_template, traits), ends.special_tokens)
    template = FittedTemplate(
        chat_template, replace(traits, generation_prompt=generation_prompt, answer_header=answer_header)
    )
    return template, _probe_turn_ends(template, ends)


def _render(template: FittedTemplate, messages: Sequence[Message], *, with_prompt: bool = False) -> str:
    return template.render(messages, PROBE_TOOLS if template.traits.needs_tools else (), with_prompt=with_prompt)


def _probe_content(chat_template: ChatTemplate, *, with_tools: bool) -> TemplateTraits:
    problem, failure = "", "drops"
    for needs_tools, needs_content_parts in itertools.product((with_tools, not with_tools), (False, True)):
        traits = TemplateTraits(needs_content_parts=needs_content_parts, needs_tools=needs_tools)
        try:
            text = _render(FittedTemplate(chat_template, traits), PROBE_EXCHANGE)
        except EndlessTemplateError as error:
            raise TokenizerError(f"the chat template cannot render a question and an answer: {error}") from error
        except RenderError as error:
            problem = problem or str(error)
            continue
        if "answer1q" in text and not (needs_content_parts and PART_KEY.search(text)):
            return traits
        if not needs_content_parts and "answer1q" in text.casefold():
            failure = "rewrites"
    if problem:
        raise TokenizerError(f"the chat template cannot render a question and an answer: {problem}")
    raise TokenizerError(f"the chat template {failure} an assistant's answer; set data.chat_template to another one")


# Tool calls


def _probe_calls(template: FittedTemplate) -> tuple[bool, ArgumentForm | Literal["own"]]:
    # The whole exchange first; some templates refuse a tool's result, or to be given tools.
    with contextlib.suppress(EndlessTemplateError):
        for turns, tools in (
            (PROBE_CALL_TURNS, PROBE_TOOLS),
            (PROBE_CALL_TURNS[:2], PROBE_TOOLS),
            (PROBE_CALL_TURNS[:2], ()),
        ):
            call_texts = {form: _render_calls(template, turns, tools, form) for form in ARGUMENT_FORMS}
            if any(call_texts.values()):
                correct_forms = [
                    form for form, text in call_texts.items() if _are_arguments_intact(template, text, form)
                ]
                return turns is PROBE_CALL_TURNS, correct_forms[0] if len(correct_forms) == 1 else "own"
    return False, "own"


def _render_calls(
    template: FittedTemplate, turns: Sequence[Message], tools: Sequence[Any], argument_form: ArgumentForm
) -> str:
    converted = convert_arguments(turns, argument_form)
    for form in CALL_FORMS:
        try:
            text = template.render(apply_call_form(converted, form), tools)
        except EndlessTemplateError:
            raise
        except RenderError:
            continue
        call_text = text.split("question1q")[-1]  # the tools before it hold words of the calls too
        expected_words = ("look1q", "where1q", *(str(message["content"]) for message in turns[2:]))
        if all(word in call_text for word in expected_words):
            return call_text
    return ""


def _are_arguments_intact(template: FittedTemplate, call_text: str, form: ArgumentForm) -> bool:
    """Whether the probe's arguments are encoded once and not escaped: written as their JSON, or each value as it is."""
    if template.find_added_entity(call_text):
        return False
    if form == "text":
        return json.dumps(PROBE_ARGUMENTS, ensure_ascii=False) in call_text
    if all(value in call_text for value in PROBE_ARGUMENTS.values()):
        return True
    for brace in re.finditer(r"\{", call_text):
        with contextlib.suppress(ValueError):
            if json.JSONDecoder().raw_decode(call_text, brace.start())[0] == PROBE_ARGUMENTS:
                return True
    return False


def _probe_think_marks(template: FittedTemplate, ends: TurnEnds) -> tuple[str, ...]:
    """What opens think text, what closes it, and the control tokens in both; empty where there are no such marks."""
    question, answer = PROBE_EXCHANGE
    think_forms = (
        {"reasoning_content": "thought1q"},
        {"content": f"<think>\nthought1q\n</think>\n\n{answer['content']}"},
    )
    for form in think_forms:
        try:
            text = _render(template, [question, {**answer, **form}])
            question_text, prompt = (
                _render(template, [question], with_prompt=with_prompt) for with_prompt in (False, True)
            )
        except RenderError:
            continue
        text_before, has_think, text_after = text.partition("thought1q")
        closing, has_answer, _ = text_after.partition("answer1q")
        if has_think and has_answer:
            mark_start = next(reversed(find_control_tokens(text_before, ends.special_tokens)), (len(text_before), ""))[
                0
            ]
            marks = (text_before[mark_start:].strip(), closing.strip())
            # what opens the turn itself is no mark
            header = next(iter(control_tokens(prompt.removeprefix(question_text), ends.special_tokens)), "\0")
            if all(mark and mark not in question_text and header not in mark for mark in marks):
                return tuple(dict.fromkeys((*marks, *control_tokens(" ".join(marks), ends.special_tokens))))
    return ()


def _probe_system(template: FittedTemplate) -> Literal["written", "dropped", "refused"]:
    try:
        return "written" if "system1q" in _render(template, [PROBE_SYSTEM, *PROBE_EXCHANGE]) else "dropped"
    except RenderError:
        return "refused"


def _probe_headers(template: FittedTemplate, special_tokens: Sequence[str]) -> tuple[str, str]:
    """The generation prompt behind a question; and where there is none, what stands before the answer all the same."""
    try:
        question, prompt = (
            _render(template, PROBE_EXCHANGE[:1], with_prompt=with_prompt) for with_prompt in (False, True)
        )
    except RenderError:
        return "", ""
    if prompt != question:
        return prompt.removeprefix(question) if prompt.startswith(question) else "", ""
    text_before, _, text_after = _render(template, PROBE_EXCHANGE).partition("answer1q")
    header = text_before.removeprefix(question)
    # many templates write the answer's header in any case: then more than an end of turn stands behind the question
    answer_end = next(iter(control_tokens(text_after, special_tokens)), "")
    after_question = control_tokens(question.rpartition("question1q")[2], special_tokens)
    has_header = any(token != answer_end and not END_WORD.search(token) for token in after_question)
    if has_header or header == text_before:
        return "", ""
    for mark in template.traits.think_marks[:2]:  # an empty think block behind it is no part of the header
        header = header.partition(mark)[0]
    return "", header if header.strip() else ""


# Ends of turns


def _probe_turn_ends(template: FittedTemplate, ends: TurnEnds) -> TurnEnds:
    exchange_text = _render(template, PROBE_EXCHANGE)
    final_tail = exchange_text.rpartition("answer1q")[2]
    try:
        continued_text = _render(template, [*PROBE_EXCHANGE, *PROBE_NEXT_TURNS])
        continuation = continued_text.partition("answer1q")[2]
        continued_tail = continuation.partition("question2q")[0] if "question2q" in continuation else None
    except RenderError:  # a template for a single exchange
        continued_tail = None
    # What closes the question may close an answer too, once it is history.
    after_question = exchange_text.partition("question1q")[2].partition("answer1q")[0]
    question_end = next(iter(control_tokens(after_question, ends.special_tokens)), "")
    history_end_tokens = frozenset({question_end, ends.eos_token or ""} - {""})
    ends = replace(ends, turn_openers=_probe_turn_openers(template, ends), history_end_tokens=history_end_tokens)
    end_texts: list[tuple[str, bool]] = []
    for is_last in (True, False):
        end = ends.find_end(final_tail, continued_tail, is_last=is_last, is_answer_text=True)
        if end is not None:
            end_texts.append((end.text.strip(), end.opens_next_turn))
    # An end of calls counts only where it is none of these.
    ends = replace(ends, end_markers=tuple(dict.fromkeys(text for text, _ in end_texts if text)))
    if template.traits.writes_calls:
        end_texts += _probe_call_ends(template, ends)
    return replace(
        ends,
        end_markers=tuple(dict.fromkeys(text for text, _ in end_texts if text)),
        opener_end_markers=tuple(dict.fromkeys(text for text, opens_next_turn in end_texts if opens_next_turn)),
    )


def _probe_call_ends(template: FittedTemplate, ends: TurnEnds) -> Iterator[tuple[str, bool]]:
    """The last token of a calling turn's end where it is none of the known ends (gpt-oss: `<|call|>`), and whether it
    opens the next turn."""
    try:
        final_text, history_text = (
            template.render(template.fit(turns, PROBE_TOOLS).messages, PROBE_TOOLS)
            for turns in (PROBE_CALL_TURNS[:2], PROBE_CALL_TURNS)
        )
    except (RenderError, InexactMaskError):
        return
    final_tail = final_text.rpartition("where1q")[2]
    text_before, result, _ = history_text.rpartition("result1q")
    continued_tail = text_before.rpartition("where1q")[2] if result else None
    for is_last in (True, False):
        end = ends.find_end(final_tail, continued_tail, is_last=is_last, is_answer_text=False)
        if end is not None and not end.is_text_only:
            # The last token alone: what stands before it closes the call (`</tool_call>`), not the turn.
            token = control_tokens(end.text, ends.special_tokens)[-1]
            if not any(marker.endswith(token) for marker in ends.end_markers):
                yield token, end.opens_next_turn


def _probe_turn_openers(template: FittedTemplate, ends: TurnEnds) -> frozenset[str]:
    """Tokens that open a turn, where the template writes the next one's header whether or not it is asked to."""
    try:
        question = _render(template, PROBE_EXCHANGE[:1])
        if question != _render(template, PROBE_EXCHANGE[:1], with_prompt=True):
            return frozenset()  # it waits for add_generation_prompt, as nearly all do
        beginning = _render(template, [PROBE_SYSTEM, *PROBE_EXCHANGE])
    except RenderError:
        beginning = _render(template, PROBE_EXCHANGE)
    first_text_start = beginning.find("system1q") if "system1q" in beginning else beginning.find("question1q")
    return frozenset(control_tokens(beginning[: max(0, first_text_start)], ends.special_tokens)) - {
        ends.eos_token or ""
    }
