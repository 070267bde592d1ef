"""Adapt messages to the form that a chat template takes: content, roles, tool calls.

Templates differ in what they accept. Which form one writes correctly is seen by trying them: on probe conversations
(`probes.py`), and for tool calls on the row itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sft_play.data.masks.marked_copy import SENTINEL_PREFIX, PieceKind
from sft_play.data.masks.template import ChatTemplate, EndlessTemplateError, RenderError
from sft_play.data.masks.token_row import TEMPLATE_REFUSES_ROW, InexactMaskError
from sft_play.data.masks.turn_ends import format_first_difference
from sft_play.data.sources.messages import (
    AUTHOR_MESSAGE,
    REASONING_KEYS,
    TEXT_KEYS,
    Message,
    drop_author_messages,
    map_texts,
)

# In a rendering: the template took a list of parts for the text, and wrote it with its keys.
PART_KEY = re.compile(r"""['"]type['"]""")

PROBE_EXCHANGE: list[Message] = [
    {"role": "user", "content": "question1q"},
    {"role": "assistant", "content": "answer1q"},
]
PROBE_SYSTEM: Message = {"role": "system", "content": "system1q"}
PROBE_NEXT_TURNS: list[Message] = [
    {"role": "user", "content": "question2q"},
    {"role": "assistant", "content": "answer2q"},
]
# Put behind a row of the data, whose own texts do not hold it.
NEXT_QUESTION: Message = {"role": "user", "content": "question9q"}
# A plain answer to a question of the data.
PLAIN_ANSWER: Message = {"role": "assistant", "content": "answer9q"}

# Arguments that come out changed if a template escapes, encodes twice, or writes Python in place of JSON.
PROBE_ARGUMENTS = {"odd": 'x < y > "z" & don\'t écru', "place": "where1q"}
PROBE_CALL_TURNS: list[Message] = [
    {"role": "user", "content": "question1q"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "id": "call1q", "function": {"name": "look1q", "arguments": PROBE_ARGUMENTS}}
        ],
    },
    {"role": "tool", "content": "result1q", "name": "look1q", "tool_call_id": "call1q"},
    {"role": "assistant", "content": "answer1q"},
]
PROBE_TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look somewhere.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "description": "Where."}},
                "required": ["place"],
            },
        },
    }
]


ArgumentForm = Literal["object", "text"]
ARGUMENT_FORMS: tuple[ArgumentForm, ...] = ("object", "text")

_ENTITY = re.compile(r"&(?:[a-z]{2,6}|#\d{1,5}|#x[0-9A-Fa-f]{1,4});")
_DIFFERS_FROM_AUTHORED = "the row is not rendered as apply_chat_template renders its messages"


@dataclass(frozen=True)
class TemplateTraits:
    """What a template was seen to do with probe conversations."""

    needs_content_parts: bool = False
    """It takes content only as a list of parts."""
    needs_tools: bool = False
    """It has to be given tools: a template for rows with tools may loop over them without a check."""
    argument_form: ArgumentForm | Literal["own"] = "own"
    """The one form of a call's arguments that it writes correctly; `own` where it writes both or neither."""
    system: Literal["written", "dropped", "refused"] = "written"
    writes_calls: bool = False
    """It writes tool calls."""
    think_marks: tuple[str, ...] = ()
    """What opens think text, what closes it, and the control tokens in both."""
    generation_prompt: str = ""
    """What it writes behind a question as the prompt of an answer; empty where it writes no generation prompt."""
    answer_header: str = ""
    """What stands between a question and its answer where it writes no generation prompt, such as the answer's role."""


class FittedTemplate:
    """A chat template with its probed `traits`, which adapts messages to the form that the template takes."""

    def __init__(self, chat_template: ChatTemplate, traits: TemplateTraits) -> None:
        self.chat_template, self.traits = chat_template, traits
        # Keys that a template may ask a message for by name.
        self._source_words = frozenset(re.findall(r"\w+", chat_template.source))
        self._accepted: dict[tuple[str, ...], bool] = {}

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = (), *, with_prompt: bool = False) -> str:
        """The conversation as the model sees it; `messages` are fitted ones. Raises RenderError."""
        return self.chat_template.render(
            to_template_messages(messages, as_parts=self.traits.needs_content_parts),
            tools=tools,
            with_prompt=with_prompt,
        )

    def has_only_think_marks(self, text: str) -> bool:
        """Whether a text has only marks of think text and white space."""
        for mark in sorted(self.traits.think_marks, key=len, reverse=True):
            text = text.replace(mark, "")
        return not text.strip()

    def empty_think_chars(self, text: str) -> int:
        """Length of the empty think block that a text begins with, and of the white space after it. Its opening mark
        may be part of the prompt."""
        opening, closing = map(re.escape, self.traits.think_marks[:2] or ("\0", "\0"))
        match = re.match(rf"\s*(?:{opening}\s*)?{closing}\s*", text)
        return match.end() if match else 0

    def try_render(self, messages: Sequence[Message], tools: Sequence[Any]) -> str:
        """The conversation as the model sees it; empty where the template refuses it."""
        try:
            return self.render(messages, tools)
        except RenderError:
            return ""

    def fit(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> FittedMessages:
        """Adapt a conversation to the template: unchanged if its calls are written so, else as little as the template
        allows: arguments as objects or as text are the same JSON. Raises InexactMaskError if it refuses every form."""
        if any(AUTHOR_MESSAGE in message for message in messages):
            authored = self._authored_messages(messages, tools)
            fitted = self.fit(authored.messages, tools)
            fitted = FittedMessages(fitted.messages, (*authored.notes, *fitted.notes))
            if not fitted.notes:
                self._check_authored_rendering(messages, fitted.messages, tools)
            return fitted
        if not any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
            return FittedMessages(messages)
        argument_form = self.traits.argument_form
        converted = messages if argument_form == "own" else convert_arguments(messages, argument_form)
        accepted_candidates: list[Sequence[Message]] = []
        refusal = ""
        # The first form whose calls are all written; a template may take a form and drop the calls without a word.
        for form in CALL_FORMS:
            candidate = apply_call_form(converted, form)
            if candidate in accepted_candidates:
                continue
            try:
                writes_names = self._writes_names(candidate, tools)
            except RenderError as error:
                refusal = str(error)
                if isinstance(error, EndlessTemplateError):
                    break  # each further form would take as long
                continue
            if writes_names:
                return note_changes(messages, candidate)
            accepted_candidates.append(candidate)
        if not accepted_candidates:
            raise InexactMaskError(TEMPLATE_REFUSES_ROW, refusal)
        return note_changes(messages, accepted_candidates[0])

    def _writes_names(self, messages: Sequence[Message], tools: Sequence[Any]) -> bool:
        count = itertools.count()

        def mark(text: str, index: int, kind: PieceKind) -> str:
            return f"{text}{SENTINEL_PREFIX}{next(count)}q" if kind == "name" else text

        text = self.render([map_message_texts(message, 0, mark) for message in messages], tools)
        return all(f"{SENTINEL_PREFIX}{call_number}q" in text for call_number in range(next(count)))

    def _authored_messages(self, messages: Sequence[Message], tools: Sequence[Any]) -> FittedMessages:
        """The messages with what their author wrote, as far as the template takes it: roles, parts, and further keys,
        unless the template has no name for them and the text is the same without them."""
        notes: dict[str, None] = {}
        authored = [
            self._authored_message(message, notes) if AUTHOR_MESSAGE in message else message for message in messages
        ]
        known_keys_only = [
            {key: value for key, value in message.items() if key in KNOWN_KEYS or key in self._source_words}
            for message in authored
        ]
        if known_keys_only != authored and self.try_render(known_keys_only, tools) != self.try_render(authored, tools):
            return FittedMessages(authored, tuple(notes))
        return FittedMessages(known_keys_only, tuple(notes))

    def _check_authored_rendering(
        self, messages: Sequence[Message], fitted: Sequence[Message], tools: Sequence[Any]
    ) -> None:
        authored = [message.get(AUTHOR_MESSAGE, message) for message in messages]
        if any((original.get("tool_calls") or None) != message.get("tool_calls")
               for original, message in zip(authored, messages, strict=True)):  # fmt: skip
            return  # calls in a form of their own are noted where rows are read
        authored_text, text = self.try_render(authored, tools), self.try_render(fitted, tools)
        if authored_text and authored_text != text:
            raise InexactMaskError(_DIFFERS_FROM_AUTHORED, format_first_difference(authored_text, text))

    def _authored_message(self, message: Message, notes: dict[str, None]) -> Message:
        """A message with its author's role, content and keys; what cannot be kept is noted."""
        original = message[AUTHOR_MESSAGE]
        authored = drop_author_messages([message])[0]
        if original["role"] != authored["role"]:
            if authored["role"] == "system" and self._accepts(original["role"]):
                authored["role"] = original["role"]
            else:
                notes[NOTE_ROLE] = None
        if not isinstance(original["content"], (str, type(None))):
            kinds = content_part_kinds(original["content"])
            if kinds and self._accepts(authored["role"], *kinds):
                authored["content"] = original["content"]
                if not any(original.get(key) for key in REASONING_KEYS):
                    authored.pop("reasoning_content", None)
            else:
                notes[NOTE_PARTS] = None
        # the same think text or calls under another of their names must not be given twice
        covered_keys = {*authored, *(REASONING_KEYS if "reasoning_content" in authored else ())}
        covered_keys |= {*(CALL_KEYS if authored.get("tool_calls") else ())}
        return authored | {
            key: value for key, value in original.items() if key not in covered_keys and value is not None
        }

    def _accepts(self, role: str, *kinds: str) -> bool:
        key = (role, *kinds)
        if key not in self._accepted:
            words = [f"part{index}q" for index in range(len(kinds))] or ["part0q"]
            parts = [{"type": kind, kind: word} for kind, word in zip(kinds, words, strict=False)]
            message = {"role": role, "content": parts or words[0]}
            question, reply = PROBE_EXCHANGE
            earlier_turns: list[Message] = {"assistant": [question], "tool": [*PROBE_CALL_TURNS[:2]]}.get(role, [])
            later_turns: list[Message] = {"assistant": [], "tool": [], "user": [reply]}.get(role, [*PROBE_EXCHANGE])
            turns = [*earlier_turns, {**PROBE_CALL_TURNS[2], **message} if role == "tool" else message, *later_turns]
            with contextlib.suppress(RenderError, InexactMaskError):
                text = self.render(self.fit(turns).messages)
                self._accepted[key] = all(word in text for word in words) and not PART_KEY.search(text)
        return self._accepted.setdefault(key, False)

    def find_added_entity(self, text: str, row: Any = ()) -> str:
        """The first HTML entity of a text that comes from neither the template's source nor the row; else empty."""
        for entity in dict.fromkeys(_ENTITY.findall(text)):
            if entity not in self.chat_template.source and entity not in json.dumps(
                row, ensure_ascii=False, default=str
            ):
                return str(entity)
        return ""


# Forms of messages


NOTE_CONTENT = "a turn that only calls tools is passed to the chat template with empty content, or without content"
NOTE_TYPED = "a tool call without a type is passed to the chat template with type: function, which it requires"
NOTE_ROLE = "a role is passed to the chat template under its usual name (system, user, assistant, tool)"
NOTE_PARTS = "content in parts is passed to the chat template as one text, which it takes"
NOTE_SHORT_IDS = "ids of tool calls are passed to the chat template as nine letters and digits, which it requires"
NOTE_TEXT_FOR_OBJECT = (
    "tool call arguments that are objects are passed to the chat template as JSON text, the form that it writes "
    "correctly"
)
NOTE_OBJECT_FOR_TEXT = (
    "tool call arguments that are JSON text are passed to the chat template as objects: it would encode text a "
    "second time or not write it"
)


@dataclass(frozen=True)
class CallForm:
    """What is changed in a row with tool calls, besides the form of their arguments, where the template refuses the row
    or drops its calls as they are."""

    content: Literal["own", "absent", "empty"] = "own"
    """In a turn that only calls."""
    adds_type: bool = False
    """Every call has a type."""
    shortens_ids: bool = False
    """Ids are nine letters and digits."""


# In the order in which they are tried: the first leaves the row as it is written.
CALL_FORMS = tuple(
    CallForm(content, typed, short_ids)
    for content in ("own", "empty", "absent")
    for typed, short_ids in ((False, False), (True, False), (False, True), (True, True))  # fewest changes first
)


@dataclass(frozen=True)
class FittedMessages:
    """A conversation as the template takes it, and what was changed for that, in words; mostly nothing."""

    messages: Sequence[Message]
    notes: tuple[str, ...] = ()


CALL_KEYS = ("tool_calls", "function_call")


KNOWN_KEYS = frozenset({"role", "tool_calls", "name", "tool_call_id", "call_id", "train", *TEXT_KEYS})


def content_part_kinds(content: Any) -> list[str]:
    """The types of a list of parts that are text or think text; empty for anything else."""
    parts = content if isinstance(content, list) else []
    kinds = [str(part.get("type")) if isinstance(part, dict) else "" for part in parts]
    # `{"type": "text", "text": …}`, and `{"type": "thinking", "thinking": …}` with the text under the type's own name
    are_texts = all(
        kind in ("text", "thinking", "reasoning") and isinstance(part.get("text" if kind == "text" else kind), str)
        for kind, part in zip(kinds, parts, strict=True)
    )
    return kinds if are_texts else []


def map_message_texts(message: Message, index: int, change: Callable[[str, int, PieceKind], str]) -> Message:
    """A copy of the message with every text changed, think text before content, calls last."""
    copy = dict(message)
    for key in TEXT_KEYS:
        if isinstance(copy.get(key), str):
            copy[key] = change(copy[key], index, "content" if key == "content" else "reasoning")
    if isinstance(copy.get("content"), list):
        kinds: dict[str, PieceKind] = {"text": "content", **dict.fromkeys(REASONING_KEYS, "reasoning")}
        copy["content"] = [
            {
                key: change(value, index, kinds[key]) if key in kinds and isinstance(value, str) else value
                for key, value in part.items()
            }
            for part in copy["content"]
        ]
    calls = []
    for call in copy.get("tool_calls") or ():
        function = call["function"]
        name, arguments = change(function["name"], index, "name"), function["arguments"]
        arguments = (
            change(arguments, index, "arguments")
            if isinstance(arguments, str)
            else map_texts(arguments, lambda text: change(text, index, "argument"))
        )
        calls.append({**call, "function": {**function, "name": name, "arguments": arguments}})
    return {**copy, "tool_calls": calls} if calls else copy


def to_template_messages(messages: Sequence[Message], *, as_parts: bool) -> list[Message]:
    """The messages without `train`, which is ours, and with `as_parts` their content as lists of parts."""
    copies = [{key: value for key, value in message.items() if key != "train"} for message in messages]
    for copy in copies if as_parts else ():
        if isinstance(copy.get("content"), str):
            copy["content"] = [{"type": "text", "text": copy["content"]}]
    return copies


def apply_call_form(messages: Sequence[Message], form: CallForm) -> list[Message]:
    """The messages with their calls in a form."""
    copies = [dict(message) for message in messages]
    for copy in copies:
        if copy.get("tool_calls"):
            copy["tool_calls"] = [dict(call) for call in copy["tool_calls"]]
            for call in copy["tool_calls"]:
                if form.adds_type and not call.get("type"):
                    call["type"] = "function"
                if form.shortens_ids:
                    call["id"] = _short_id(str(call.get("id") or call["function"]["name"]))
            # some templates refuse null, others write it as "None", and some test whether the key is there
            if form.content != "own" and not copy.get("content"):
                copy["content"] = "" if form.content == "empty" else None
        for key in ("tool_call_id", "call_id") if form.shortens_ids else ():
            if isinstance(copy.get(key), str):
                copy[key] = _short_id(copy[key])
    return copies


def convert_arguments(messages: Sequence[Message], form: ArgumentForm) -> list[Message]:
    """The messages with the arguments of all calls as objects or as JSON text."""
    copies = [dict(message) for message in messages]
    for copy in copies:
        calls = []
        for call in copy.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            if form == "text" and not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            elif form == "object" and isinstance(arguments, str):
                arguments = json.loads(arguments)
            calls.append({**call, "function": {**call["function"], "arguments": arguments}})
        if calls:
            copy["tool_calls"] = calls
    return copies


def note_changes(original: Sequence[Message], fitted: Sequence[Message]) -> FittedMessages:
    """The fitted messages with what was changed, in words."""
    notes: dict[str, None] = {}
    for old, new in zip(original, fitted, strict=True):
        if old.get("content") != new.get("content"):
            notes[NOTE_CONTENT] = None
        if old.get("tool_call_id") != new.get("tool_call_id") or old.get("call_id") != new.get("call_id"):
            notes[NOTE_SHORT_IDS] = None
        for old_call, new_call in zip(old.get("tool_calls") or (), new.get("tool_calls") or (), strict=True):
            old_arguments, new_arguments = old_call["function"]["arguments"], new_call["function"]["arguments"]
            if isinstance(old_arguments, str) != isinstance(new_arguments, str):
                notes[NOTE_OBJECT_FOR_TEXT if isinstance(old_arguments, str) else NOTE_TEXT_FOR_OBJECT] = None
            if old_call.get("type") != new_call.get("type"):
                notes[NOTE_TYPED] = None
            if old_call.get("id") != new_call.get("id"):
                notes[NOTE_SHORT_IDS] = None
    return FittedMessages(fitted, tuple(notes))


def _short_id(call_id: str) -> str:
    # Mistral's templates refuse any other id: "Tool call IDs should be alphanumeric strings with length 9!"
    usable_id = call_id if call_id.isalnum() and call_id.isascii() else ""
    return usable_id if len(usable_id) == 9 else hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]
