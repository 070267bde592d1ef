"""A chat template with the form of messages that it takes: content, roles, tool calls.

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

from sft_play.data.masks.marked_copy import SALT, Kind
from sft_play.data.masks.template import ChatTemplate, Endless, RenderError
from sft_play.data.masks.token_row import REFUSED, Inexact
from sft_play.data.masks.turn_ends import first_difference
from sft_play.data.sources.messages import AUTHOR_MESSAGE, REASONING_KEYS, TEXT_KEYS, Message, map_texts, drop_author_messages

# In a rendering: the template took a list of parts for the text, and wrote it with its keys.
PART_KEY = re.compile(r"""['"]type['"]""")

PLAIN: list[Message] = [{"role": "user", "content": "question1q"}, {"role": "assistant", "content": "answer1q"}]
SYSTEM: Message = {"role": "system", "content": "system1q"}
NEXT_TURNS: list[Message] = [{"role": "user", "content": "question2q"}, {"role": "assistant", "content": "answer2q"}]
# Put behind a row of the data, whose own texts do not hold it.
NEXT_QUESTION: Message = {"role": "user", "content": "question9q"}
# A plain answer to a question of the data.
ANSWER: Message = {"role": "assistant", "content": "answer9q"}

# Arguments that come out changed if a template escapes, encodes twice, or writes Python in place of JSON.
ODD_ARGUMENTS = {"odd": 'x < y > "z" & don\'t écru', "place": "where1q"}
CALLING: list[Message] = [
    {"role": "user", "content": "question1q"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "id": "call1q", "function": {"name": "look1q", "arguments": ODD_ARGUMENTS}}
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
_NOT_ITS_OWN = "the row is not rendered as apply_chat_template renders its messages"


@dataclass(frozen=True)
class Habits:
    """What a template was seen to do with probe conversations."""

    parts: bool = False
    """It takes content only as a list of parts."""
    tools: bool = False
    """It has to be given tools: a template for rows with tools may loop over them without a check."""
    arguments: ArgumentForm | Literal["own"] = "own"
    """The one form of a call's arguments that it writes correctly; `own` where it writes both or neither."""
    system: Literal["written", "dropped", "refused"] = "written"
    calls: bool = False
    """It writes tool calls."""
    think: tuple[str, ...] = ()
    """What opens think text, what closes it, and the control tokens in both."""
    header: str = ""
    """What it writes behind a question as the prompt of an answer; empty where it writes no generation prompt."""
    unprompted: str = ""
    """What stands between a question and its answer where it writes no generation prompt, such as the answer's role."""


class FittedTemplate:
    """A template that is given messages in the form that it takes, as its `habits` say."""

    def __init__(self, jinja: ChatTemplate, habits: Habits) -> None:
        self.jinja, self.habits = jinja, habits
        # Keys that a template may ask a message for by name.
        self._names = frozenset(re.findall(r"\w+", jinja.source))
        self._taken: dict[tuple[str, ...], bool] = {}

    def rendered(self, messages: Sequence[Message], tools: Sequence[Any] = (), *, prompt: bool = False) -> str:
        """The conversation as the model sees it; `messages` are fitted ones. Raises RenderError."""
        return self.jinja.render(adapted(messages, parts=self.habits.parts), tools=tools, prompt=prompt)

    def is_think(self, text: str) -> bool:
        """Whether a text has only marks of think text and white space."""
        for mark in sorted(self.habits.think, key=len, reverse=True):
            text = text.replace(mark, "")
        return not text.strip()

    def empty_think(self, text: str) -> int:
        """Length of the empty think block that a text begins with, and of the white space after it. Its opening mark
        may be part of the prompt."""
        opening, closing = map(re.escape, self.habits.think[:2] or ("\0", "\0"))
        match = re.match(rf"\s*(?:{opening}\s*)?{closing}\s*", text)
        return match.end() if match else 0

    def rendered_or_nothing(self, messages: Sequence[Message], tools: Sequence[Any]) -> str:
        """The conversation as the model sees it; empty where the template refuses it."""
        try:
            return self.rendered(messages, tools)
        except RenderError:
            return ""

    def fitted(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> Fitted:
        """The conversation as its author wrote it where the template writes its calls so; else as near to that as it
        allows: arguments as objects or as text are the same JSON. Raises Inexact where it refuses every form."""
        if any(AUTHOR_MESSAGE in message for message in messages):
            authored = self._as_authored(messages, tools)
            fitted = self.fitted(authored.messages, tools)
            fitted = Fitted(fitted.messages, (*authored.notes, *fitted.notes))
            if not fitted.notes:
                self._check_as_authored(messages, fitted.messages, tools)
            return fitted
        if not any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
            return Fitted(messages)
        arguments = self.habits.arguments
        given = messages if arguments == "own" else with_arguments_as(messages, arguments)
        accepted: list[Sequence[Message]] = []
        refusal = ""
        # The first form whose calls are all written; a template may take a form and drop the calls without a word.
        for form in CALL_FORMS:
            candidate = in_form(given, form)
            if candidate in accepted:
                continue
            try:
                writes = self._writes_names(candidate, tools)
            except RenderError as error:
                refusal = str(error)
                if isinstance(error, Endless):
                    break  # each further form would take as long
                continue
            if writes:
                return with_notes(messages, candidate)
            accepted.append(candidate)
        if not accepted:
            raise Inexact(REFUSED, refusal)
        return with_notes(messages, accepted[0])

    def _writes_names(self, messages: Sequence[Message], tools: Sequence[Any]) -> bool:
        count = itertools.count()

        def mark(text: str, index: int, kind: Kind) -> str:
            return f"{text}{SALT}{next(count)}q" if kind == "name" else text

        text = self.rendered([mapped(message, 0, mark) for message in messages], tools)
        return all(f"{SALT}{number}q" in text for number in range(next(count)))

    def _as_authored(self, messages: Sequence[Message], tools: Sequence[Any]) -> Fitted:
        """The messages with what their author wrote, as far as the template takes it: roles, parts, and further keys,
        unless the template has no name for them and the text is the same without them."""
        notes: dict[str, None] = {}
        whole = [self._authored(message, notes) if AUTHOR_MESSAGE in message else message for message in messages]
        slim = [
            {key: value for key, value in message.items() if key in KNOWN_KEYS or key in self._names}
            for message in whole
        ]
        if slim != whole and self.rendered_or_nothing(slim, tools) != self.rendered_or_nothing(whole, tools):
            return Fitted(whole, tuple(notes))
        return Fitted(slim, tuple(notes))

    def _check_as_authored(self, messages: Sequence[Message], fitted: Sequence[Message], tools: Sequence[Any]) -> None:
        own = [message.get(AUTHOR_MESSAGE, message) for message in messages]
        if any((given.get("tool_calls") or None) != message.get("tool_calls")
               for given, message in zip(own, messages, strict=True)):  # fmt: skip
            return  # calls in a form of their own are noted where rows are read
        wanted, text = self.rendered_or_nothing(own, tools), self.rendered_or_nothing(fitted, tools)
        if wanted and wanted != text:
            raise Inexact(_NOT_ITS_OWN, first_difference(wanted, text))

    def _authored(self, message: Message, notes: dict[str, None]) -> Message:
        """A message with its author's role, content and keys; what cannot be kept is noted."""
        given = message[AUTHOR_MESSAGE]
        authored = drop_author_messages([message])[0]
        if given["role"] != authored["role"]:
            if authored["role"] == "system" and self._takes(given["role"]):
                authored["role"] = given["role"]
            else:
                notes[NOTE_ROLE] = None
        if not isinstance(given["content"], (str, type(None))):
            kinds = kinds_of_parts(given["content"])
            if kinds and self._takes(authored["role"], *kinds):
                authored["content"] = given["content"]
                if not any(given.get(key) for key in REASONING_KEYS):
                    authored.pop("reasoning_content", None)
            else:
                notes[NOTE_PARTS] = None
        # the same think text or calls under another of their names must not be given twice
        covered = {*authored, *(REASONING_KEYS if "reasoning_content" in authored else ())}
        covered |= {*(CALL_KEYS if authored.get("tool_calls") else ())}
        return authored | {key: value for key, value in given.items() if key not in covered and value is not None}

    def _takes(self, role: str, *kinds: str) -> bool:
        asked = (role, *kinds)
        if asked not in self._taken:
            words = [f"part{number}q" for number in range(len(kinds))] or ["part0q"]
            parts = [{"type": kind, kind: word} for kind, word in zip(kinds, words, strict=False)]
            message = {"role": role, "content": parts or words[0]}
            question, reply = PLAIN
            before: list[Message] = {"assistant": [question], "tool": [*CALLING[:2]]}.get(role, [])
            after: list[Message] = {"assistant": [], "tool": [], "user": [reply]}.get(role, [*PLAIN])
            turns = [*before, {**CALLING[2], **message} if role == "tool" else message, *after]
            with contextlib.suppress(RenderError, Inexact):
                text = self.rendered(self.fitted(turns).messages)
                self._taken[asked] = all(word in text for word in words) and not PART_KEY.search(text)
        return self._taken.setdefault(asked, False)

    def entity(self, text: str, row: Any = ()) -> str:
        """The first HTML entity of a text that comes from neither the template's source nor the row; else empty."""
        for entity in dict.fromkeys(_ENTITY.findall(text)):
            if entity not in self.jinja.source and entity not in json.dumps(row, ensure_ascii=False, default=str):
                return str(entity)
        return ""


# Forms of messages


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


# In the order in which they are tried: the first leaves the row as it is written.
CALL_FORMS = tuple(
    CallForm(content, typed, short_ids)
    for content in ("own", "empty", "absent")
    for typed, short_ids in ((False, False), (True, False), (False, True), (True, True))  # fewest changes first
)


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
            else map_texts(arguments, lambda text: change(text, index, "argument"))
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
    # Mistral's templates refuse any other id: "Tool call IDs should be alphanumeric strings with length 9!"
    plain = given if given.isalnum() and given.isascii() else ""
    return plain if len(plain) == 9 else hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:9]
