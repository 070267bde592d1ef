"""Messages in the form that a chat template takes: content, roles, and tool calls.

Templates differ in what they accept. Nothing here decides which form is right: `turns.py` tries them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sft_play.data.sources.messages import REASONING_KEYS, TEXT_KEYS, Message, with_texts

Kind = Literal["content", "reasoning", "name", "argument", "arguments"]
"""`argument` is a text inside the arguments of a call, `arguments` all of them as one JSON text."""
ArgumentForm = Literal["object", "text"]
ARGUMENT_FORMS: tuple[ArgumentForm, ...] = ("object", "text")
NOTE_CONTENT = "a turn that only calls tools is passed to the chat template with empty content, or without content"
NOTE_TYPED = "a tool call without a type is passed to the chat template with type: function, which it requires"
NOTE_ROLE = "a role is passed to the chat template under its usual name (system, user, assistant, tool)"
NOTE_PARTS = "content in parts is passed to the chat template as one text, which it takes"
NOTE_SHORT_IDS = "ids of tool calls are passed to the chat template as nine letters and digits, which it requires"
TEXT_FOR_OBJECT = (
    "tool call arguments that are objects are passed to the chat template as JSON text, the form that it writes "
    "correctly"
)
OBJECT_FOR_TEXT = (
    "tool call arguments that are JSON text are passed to the chat template as objects: it would encode text a "
    "second time or not write it"
)


@dataclass(frozen=True)
class CallForm:
    """What is changed in a row with tool calls, besides the form of their arguments, where the template refuses the row
    or drops its calls as they are."""

    content: Literal["own", "absent", "empty"] = "own"
    """In a turn that only calls."""
    typed: bool = False
    """Every call has a type."""
    short_ids: bool = False
    """Ids are nine letters and digits."""


CALL_FORMS = tuple(
    CallForm(content, typed, short_ids)
    for content in ("own", "empty", "absent")
    for typed, short_ids in ((False, False), (True, False), (False, True), (True, True))  # fewest changes first
)
"""In the order in which they are tried: the first leaves the row as it is written."""


@dataclass(frozen=True)
class Fitted:
    """A conversation as the template takes it, and what was changed for that, in words; mostly nothing."""

    messages: Sequence[Message]
    notes: tuple[str, ...] = ()


CALL_KEYS = ("tool_calls", "function_call")


KNOWN_KEYS = frozenset({"role", "tool_calls", "name", "tool_call_id", "call_id", "train", *TEXT_KEYS})


def kinds_of_parts(content: Any) -> list[str]:
    """The types of a list of parts that are text or think text; empty for anything else."""
    parts = content if isinstance(content, list) else []
    kinds = [str(part.get("type")) if isinstance(part, dict) else "" for part in parts]
    # `{"type": "text", "text": …}`, and `{"type": "thinking", "thinking": …}` with the text under the type's own name
    plain = all(
        kind in ("text", "thinking", "reasoning") and isinstance(part.get("text" if kind == "text" else kind), str)
        for kind, part in zip(kinds, parts, strict=True)
    )
    return kinds if plain else []


def mapped(message: Message, index: int, change: Callable[[str, int, Kind], str]) -> Message:
    """A copy of the message with every text changed, think text before content, calls last."""
    copy = dict(message)
    for key in TEXT_KEYS:
        if isinstance(copy.get(key), str):
            copy[key] = change(copy[key], index, "content" if key == "content" else "reasoning")
    if isinstance(copy.get("content"), list):
        kinds: dict[str, Kind] = {"text": "content", **dict.fromkeys(REASONING_KEYS, "reasoning")}
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
            else with_texts(arguments, lambda text: change(text, index, "argument"))
        )
        calls.append({**call, "function": {**function, "name": name, "arguments": arguments}})
    return {**copy, "tool_calls": calls} if calls else copy


def adapted(messages: Sequence[Message], *, parts: bool) -> list[Message]:
    """The messages without `train`, which is ours, and with `parts` their content as lists of parts."""
    copies = [{key: value for key, value in message.items() if key != "train"} for message in messages]
    for copy in copies if parts else ():
        if isinstance(copy.get("content"), str):
            copy["content"] = [{"type": "text", "text": copy["content"]}]
    return copies


def in_form(messages: Sequence[Message], form: CallForm) -> list[Message]:
    """The messages with their calls in a form."""
    copies = [dict(message) for message in messages]
    for copy in copies:
        if copy.get("tool_calls"):
            copy["tool_calls"] = [dict(call) for call in copy["tool_calls"]]
            for call in copy["tool_calls"]:
                if form.typed and not call.get("type"):
                    call["type"] = "function"
                if form.short_ids:
                    call["id"] = _short_id(str(call.get("id") or call["function"]["name"]))
            # some templates refuse null, others write it as "None", and some test whether the key is there
            if form.content != "own" and not copy.get("content"):
                copy["content"] = "" if form.content == "empty" else None
        for key in ("tool_call_id", "call_id") if form.short_ids else ():
            if isinstance(copy.get(key), str):
                copy[key] = _short_id(copy[key])
    return copies


def with_arguments_as(messages: Sequence[Message], kind: ArgumentForm) -> list[Message]:
    """The messages with the arguments of all calls as objects or as JSON text."""
    copies = [dict(message) for message in messages]
    for copy in copies:
        calls = []
        for call in copy.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            if kind == "text" and not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            elif kind == "object" and isinstance(arguments, str):
                arguments = json.loads(arguments)
            calls.append({**call, "function": {**call["function"], "arguments": arguments}})
        if calls:
            copy["tool_calls"] = calls
    return copies


def with_notes(before: Sequence[Message], after: Sequence[Message]) -> Fitted:
    """The fitted messages with what was changed, in words."""
    notes: dict[str, None] = {}
    for old, new in zip(before, after, strict=True):
        if old.get("content") != new.get("content"):
            notes[NOTE_CONTENT] = None
        if old.get("tool_call_id") != new.get("tool_call_id") or old.get("call_id") != new.get("call_id"):
            notes[NOTE_SHORT_IDS] = None
        for was, now in zip(old.get("tool_calls") or (), new.get("tool_calls") or (), strict=True):
            given, taken = was["function"]["arguments"], now["function"]["arguments"]
            if isinstance(given, str) != isinstance(taken, str):
                notes[OBJECT_FOR_TEXT if isinstance(given, str) else TEXT_FOR_OBJECT] = None
            if was.get("type") != now.get("type"):
                notes[NOTE_TYPED] = None
            if was.get("id") != now.get("id"):
                notes[NOTE_SHORT_IDS] = None
    return Fitted(after, tuple(notes))


def _short_id(given: str) -> str:
    """Nine letters and digits, the same for the same id."""
    # Mistral's templates refuse any other id: "Tool call IDs should be alphanumeric strings with length 9!"
    plain = given if given.isalnum() and given.isascii() else ""
    return plain if len(plain) == 9 else hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:9]
