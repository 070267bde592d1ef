"""What a row is, from its keys: a list of turns, a question and an answer, or text.

Every format becomes the same two things: a `Chat` of checked messages, or a `Text`. Roles are mapped from the
names that data sets use; an unknown one is a bad row, never dropped. What can be used but looks odd is noted on the
example, counted and reported.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sft_play.config.schema import DataConfig
from sft_play.data.sources.columns import KINDS, Unused, kinds_of_name, missed_kind, way_to_read
from sft_play.data.sources.json_rows import ROLE_KEYS
from sft_play.data.sources.messages import (
    GIVEN,
    Message,
    Unusable,
    content_text,
    kind,
    merge_turns,
    pair_of_texts,
    shown,
    texts_in,
    tools_of,
    turns_of,
    unpacked,
    with_roles,
    without_given,
)
from sft_play.data.sources.other_kinds import NEGATIVES, REJECTED, TELLTALES, refuse_other_kind
from sft_play.data.sources.raw import BadRow, RawRow
from sft_play.errors import DataError
from sft_play.log import one_line
from sft_play.spelling import did_you_mean

EMPTY_ANSWER = "the answer is empty"
EMPTY_TEXT = "text is empty"
ENDS_WITH_USER = "ends with a user turn, nothing to learn from it"
NOTHING_TRAINED = "every assistant turn has train: false, nothing to learn"

NOTE_EMPTY = "an answer is empty or white space (data.drop_empty=true leaves such rows out)"
NOTE_CONTROL = "the text holds control characters (such as NUL or ESC)"
NOTE_TWO_IN_A_ROW = "two turns of the same role in a row (data.merge_consecutive=true joins them)"
NOTE_STARTS_WITH_ASSISTANT = "starts with an assistant turn"
NOTE_ENDS_WITH_TOOL = "ends with a tool turn, which nothing answers"
NOTE_UNREAD_KEY = "the key {key} of a message is not read, but by a chat template that asks for it"
NOTE_NA = "a cell is NaN, None or similar and counts as missing (data.keep_default_na=false reads it as text)"
NOTE_TOOLS_IN_TEXT = (
    "the tools are already in the system prompt, so the template is not given the row's tools a second time"
)
NOTE_USER_TRAINED = "a turn of another role than assistant asks to be trained, and is not"

_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f]")


@dataclass(frozen=True)
class Chat:
    """A conversation as a template takes it: messages with role, content and tool calls, the tools, and variables for
    the template, which go before data.chat_template_kwargs. A message has `train: False` where it must not be trained,
    and no such key otherwise. `notes` are oddities; `unused` are columns of its row that are not in it."""

    where: str
    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[Unused, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Text:
    """Plain text without turns."""

    where: str
    text: str
    notes: tuple[str, ...] = field(default=(), compare=False)
    unused: tuple[Unused, ...] = field(default=(), compare=False)


Example = Chat | Text

_CANONICAL = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def content_digest(example: Example) -> bytes:
    """32 bytes of the example's content alone: the same row has the same wherever it stands."""
    # without the authors' own notation (roles by another name, content in parts), which changes nothing of the content
    content: Any = example.text if isinstance(example, Text) else [without_given(example.messages), example.tools]
    if isinstance(example, Chat) and example.template_kwargs:
        content = [*content, example.template_kwargs]
    return hashlib.sha256(_CANONICAL.encode(content).encode("utf-8", "replace")).digest()


def digest_share(digest: bytes) -> float:
    """A number in [0, 1) that decides a row's split: by content alone, so that rows that are added move no others."""
    return int.from_bytes(digest[:8], "big") / 2**64


@dataclass(frozen=True)
class Format:
    """A shape of rows: the keys it needs, what they hold, and the keys it may have."""

    name: str
    needs: tuple[str, ...]
    kind: Literal["turns", "pair", "calls", "text"]
    may_have: frozenset[str] = frozenset()

    def build(self, row: RawRow) -> Example:
        """The example that a row of this format is; raises Unusable."""
        if self.kind == "pair":
            return _chat_of_pair(row, *self.needs, extras=[key for key in _EXTRAS if key in self.may_have])
        if self.kind == "calls":
            return _chat_of_calls(row, *self.needs[:2])
        key = self.needs[0]
        if self.kind == "turns":
            if key == "chosen" and not _is_turns(unpacked(row.data[key], "[")):
                raise Unusable("chosen is not a list of turns", "beside a text it needs a prompt column")
            return _chat(row, turns_of(row.data[key], key))
        if "role" in row.data:
            tree = "; parent_id says which message it answers (OASST)" if "parent_id" in row.data else ""
            raise Unusable("a row is one message, not a conversation", f"the turns of a chat belong in one list{tree}")
        text = _text_at(row, key)
        if not text.strip():
            raise Unusable(EMPTY_TEXT)
        return Text(row.where, text)


def _text_at(row: RawRow, key: str, *, needed: bool = True) -> str:
    """The text of a column; of one that is not needed, several texts may be the paragraphs."""
    value = row.data.get(key)
    if not needed and (value is None or (isinstance(value, list) and all(isinstance(item, str) for item in value))):
        return "\n\n".join(value or ())
    if not isinstance(value, str):
        raise Unusable(f"{key} is not text", f"it is {kind(value)}")
    return value


# Turns


SYSTEM_KEYS = ("system", "system_prompt", "system_message", "systemInstruction", "system_instruction")
TOOL_KEYS = ("tools", "functions")
# variables for the chat template, of a row: where TRL looks for them
TEMPLATE_KWARGS = "chat_template_kwargs"
_MEDIA_KEYS = ("images", "image", "videos", "video", "audios", "audio")

_BESIDE = frozenset({*SYSTEM_KEYS, *TOOL_KEYS, TEMPLATE_KWARGS, *_MEDIA_KEYS})


def _chat(row: RawRow, messages: list[Message]) -> Chat:
    if _BESIDE.isdisjoint(row.data):
        _check_turns(messages)
        return Chat(row.where, tuple(messages))
    for key in _MEDIA_KEYS:
        # a flag or a count of that name (`image: false`) is no picture
        if row.data.get(key) not in (None, "", [], {}) and not isinstance(row.data[key], (bool, int, float)):
            raise Unusable(f"the row has {key}, and only text is trained", shown(row.data[key]))
    messages = [*_system(row, messages), *messages]
    _check_turns(messages)
    column = _first_filled(TOOL_KEYS, row.data)
    tools = tools_of(row.data[column]) if column is not None else ()
    kwargs = unpacked(row.data.get(TEMPLATE_KWARGS), "{") or {}
    if not isinstance(kwargs, dict):
        raise Unusable(f"{TEMPLATE_KWARGS} is not an object", shown(kwargs))
    chat = Chat(row.where, tuple(messages), tools, template_kwargs=kwargs)
    # Hermes' rows have the tools in the prompt that the calls were generated after, and in a column
    prompt = str(messages[0]["content"]) if messages[0]["role"] == "system" else ""
    forms = ((json.dumps(text), json.dumps(text, ensure_ascii=False), repr(text)) for text in texts_in(list(tools)))
    is_twice = bool(tools) and all(any(form in prompt for form in quoted) for quoted in forms)
    return replace(chat, tools=(), notes=(NOTE_TOOLS_IN_TEXT,)) if is_twice else chat


def _first_filled(keys: Iterable[str], data: Mapping[str, Any]) -> str | None:
    """The first of the columns that holds anything."""
    return next((key for key in keys if data.get(key) not in (None, "", [], {})), None)


def _system(row: RawRow, messages: list[Message]) -> list[Message]:
    """The row's own system prompt as a message; none where the first message says the same."""
    key = _first_filled(SYSTEM_KEYS, row.data)
    if key is None:
        return []
    given = row.data[key]
    text = content_text(given.get("parts", given) if isinstance(given, dict) else given, key)
    if not text.strip():
        return []
    first = messages[0] if messages else {}
    if first.get("role") == "system":
        if first["content"] == text:
            return []
        raise Unusable("two system prompts", f"one in {key}, another in the first message")
    return [{"role": "system", "content": text}]


def _check_turns(messages: list[Message]) -> None:
    if not messages:
        raise Unusable("no turns")
    if messages[-1]["role"] == "user":
        raise Unusable(ENDS_WITH_USER, f"messages[{len(messages) - 1}]")
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise Unusable("no assistant turn, so nothing to learn", f"the roles are {roles}")
    if all(message.get("train") is False for message in answers):
        raise Unusable(NOTHING_TRAINED)


# A question and its answer


# What a question is about, in a column of its own: of an instruction, and where data.columns maps it.
_EXTRAS = ("input", "context")


def _question_and_answer(row: RawRow, question: str, answer: str) -> list[Message]:
    prompt, reply = _text_at(row, question), _text_at(row, answer)
    # LLaMA-Factory's alpaca rows have earlier exchanges here: [[question, answer], …]
    history = unpacked(row.data.get("history"), "[")
    if history in (None, ""):
        history = []
    if not isinstance(history, list) or not all(isinstance(turn, list) for turn in history):
        raise Unusable("history is not a list of [question, answer]", shown(history))
    earlier = [message for turn in history for message in pair_of_texts(turn, "history")]
    return [*earlier, {"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]


def _chat_of_pair(row: RawRow, question: str, answer: str, *, extras: Iterable[str]) -> Chat:
    prompt, reply = (_listed(unpacked(row.data.get(key), "[{")) for key in (question, answer))
    is_chat = _is_turns(prompt) or _is_turns(reply)
    messages = (
        _turns_of_pair(prompt, reply, question, answer) if is_chat else _question_and_answer(row, question, answer)
    )
    more = [text for key in extras if key != question and (text := _text_at(row, key, needed=False)).strip()]
    last = next((message for message in reversed(messages) if message["role"] == "user"), None)
    if more and last is not None:
        last["content"] = "\n".join([last["content"], *more])  # as LLaMA-Factory joins alpaca's columns
        last.pop(GIVEN, None)
    return _chat(row, messages)


def _add_reasoning(chat: Chat, row: RawRow) -> None:
    """Put the think text that data.columns names into the chat's last answer."""
    text = _text_at(row, "reasoning", needed=False)
    last = next(message for message in reversed(chat.messages) if message["role"] == "assistant")
    if text.strip() and last.setdefault("reasoning_content", text) != text:
        raise Unusable("a message has two different think texts", "one in the column, another in the answer")
    if text.strip() and GIVEN in last:
        last[GIVEN] = {**last[GIVEN], "reasoning_content": text}


def _is_turns(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, dict) for item in value)


def _listed(value: Any) -> Any:
    """A single turn as a list of one, as rows of preferences have it."""
    return [value] if isinstance(value, dict) and any(key in value for key in ROLE_KEYS) else value


def _turns_of_pair(prompt: Any, reply: Any, question: str, answer: str) -> list[Message]:
    """Turns of a prompt and a reply of which at least one is a list; a reply with user turns is the whole chat."""
    answers = turns_of(reply, answer) if _is_turns(reply) else [{"role": "assistant", "content": reply}]
    if any(message["role"] == "user" for message in answers):  # the reply repeats the prompt, as `chosen` often does
        return answers
    asked = turns_of(prompt, question) if _is_turns(prompt) else [{"role": "user", "content": prompt}]
    for name, turns in ((question, asked), (answer, answers)):
        if not isinstance(turns[0]["content"], str) and not turns[0].get("tool_calls"):
            raise Unusable(f"{name} is not text", f"it is {kind(turns[0]['content'])}")
    return [*asked, *answers]


def _chat_of_calls(row: RawRow, question: str, calls: str) -> Chat:
    """xLAM's rows: a query, the calls that answer it, and tools whose parameters are listed without a schema."""
    answers = unpacked(row.data.get(calls), "[{")
    made = answers if isinstance(answers, list) else [answers]
    if not made or not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in made):
        raise Unusable(f"{calls} are no calls of tools", f"{shown(answers)}; map an answer with data.columns")
    asked = [{"role": "user", "content": _text_at(row, question)}]
    called = turns_of([{"role": "assistant", "content": "", "tool_calls": made}], calls)
    chat = _chat(row, [*asked, *called])
    return replace(chat, tools=tuple(_with_schema(tool) for tool in chat.tools))


def _with_schema(tool: Any) -> Any:
    """A tool as templates take it: its parameters, given by name alone, as the properties of an object."""
    given = tool.get("parameters")
    if not isinstance(given, dict) or "properties" in given or not all(isinstance(one, dict) for one in given.values()):
        return tool
    return {**tool, "parameters": {"type": "object", "properties": given}}


_BESIDE_TURNS = frozenset({*TOOL_KEYS, *SYSTEM_KEYS, TEMPLATE_KWARGS})
_BESIDE_PAIRS = _BESIDE_TURNS | {"history"}
TURN_COLUMNS = ("messages", "conversations", "conversation", "dialog", "dialogue", "dialogs", "turns", "contents")
PAIR_COLUMNS = (
    ("instruction", "output"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    *(("instruction", answer) for answer in ("response", "completion", "answer")),
    *(("query", answer) for answer in ("response", "answer", "output")),
    *(("question", answer) for answer in ("response", "output", "completion")),
    *(("prompt", answer) for answer in ("output", "answer", "chosen", "reply", "target")),
    *(("input", answer) for answer in ("output", "response", "target", "completion", "answer")),
    ("problem", "solution"),
    ("problem", "answer"),
    ("user", "assistant"),
    ("human", "assistant"),
    ("human", "bot"),
    ("inputs", "targets"),
)
TEXT_COLUMNS = ("text", "content", "document")

_NAMES = {"conversations": "sharegpt", "instruction/output": "alpaca"}
# In the order in which they are tried: the first whose needed keys are all there.
FORMATS: tuple[Format, ...] = (
    *(Format(_NAMES.get(key, key), (key,), "turns", _BESIDE_TURNS) for key in TURN_COLUMNS),
    *(
        Format(
            _NAMES.get(f"{pair[0]}/{pair[1]}", f"{pair[0]}/{pair[1]}"),
            pair,
            "pair",
            _BESIDE_PAIRS | (frozenset(_EXTRAS) if pair[0] == "instruction" else frozenset()),
        )
        for pair in PAIR_COLUMNS
    ),
    Format("query/answers", ("query", "answers", "tools"), "calls", _BESIDE_TURNS),
    Format("chosen", ("chosen",), "turns", _BESIDE_TURNS),
    *(Format(key, (key,), "text") for key in TEXT_COLUMNS),
)

# what a chat may have beside its format's own columns, where data.columns maps it
_MAPPED = {"pair": frozenset({*_EXTRAS, "reasoning"}), "turns": frozenset({"reasoning"})}
KNOWN_COLUMNS = _MAPPED["pair"].union(*((*shape.needs, *shape.may_have) for shape in FORMATS))
_NEEDED = frozenset(key for shape in FORMATS if shape.kind != "calls" for key in shape.needs)
# those that error messages name
_LEADING = "messages; conversations; instruction + output; prompt + completion; question + answer; text"


def recognise(keys: Collection[str], columns: Mapping[str, str] | None = None) -> Format | None:
    """The format of a row with these keys, or None. A format whose needed keys the user mapped (`data.columns`) goes
    before all others; what else was mapped, a chat may have too."""
    mapped = columns or {}
    # so that data.columns={prompt: q, completion: a} is not overruled by a `messages` column of another meaning
    fitting = [shape for shape in FORMATS if all(key in keys for key in shape.needs)]
    shape = next((shape for shape in fitting if all(key in mapped for key in shape.needs)), next(iter(fitting), None))
    more = _MAPPED.get(shape.kind, frozenset()).intersection(mapped) if shape is not None else ()
    return replace(shape, may_have=shape.may_have.union(more)) if shape is not None and more else shape


def rename_columns(row: RawRow, columns: Mapping[str, str]) -> RawRow:
    """The row with the user's column names replaced by the known ones."""
    if not columns or is_processed(row.data):
        return row
    known_names = {given: known for known, given in columns.items()}
    # the user's column takes the known name; a column that had this name already gives way to it
    kept = {key: value for key, value in row.data.items() if key not in columns or key in known_names}
    missing = tuple(known_names.get(key, key) for key in row.missing)
    return replace(row, data={known_names.get(key, key): value for key, value in kept.items()}, missing=missing)


# key of a processed row that says that `make style` wrote it, and data.style is not to be applied again
STYLED = "styled"
_PROCESSED = frozenset({"messages", "tools", TEMPLATE_KWARGS, "text", "source", "id", STYLED})


def is_processed(keys: Collection[str]) -> bool:
    """Whether a row with these keys is one that `make process` wrote."""
    return "source" in keys and "id" in keys and ("messages" in keys or "text" in keys) and _PROCESSED.issuperset(keys)


def check_columns(data: DataConfig) -> None:
    """Raises DataError when `data.columns` names a column that no format has, or one of the user's twice."""
    twice = [given for given, count in Counter(data.columns.values()).items() if count > 1]
    if twice:
        raise DataError(f"data.columns: {one_line(twice[0])} is mapped to two columns; each of yours can stand for one")
    for known in data.columns:
        if known not in KNOWN_COLUMNS:
            near = did_you_mean(known, KNOWN_COLUMNS)
            hint = f"; {near}" if near else ""
            raise DataError(
                f"data.columns: {one_line(known)} is not a column of a known format{hint} (write known: yours; known: "
                f"{', '.join(sorted(KNOWN_COLUMNS))})"
            )


def _columns(row: RawRow) -> str:
    names = [one_line(str(key), limit=40) for key in row.data]
    return ", ".join([*names[:30], *(["…"] if len(names) > 30 else [])]) or "none"


# Rows


def to_example(row: RawRow, shape: Format, data: DataConfig | None = None) -> Example | BadRow:
    """The row as an example of this format, or why it cannot be one. `data` says whether turns are merged and rows with
    empty answers left out (`drop_empty`); such a row comes back as a BadRow with `is_asked`."""
    data = data or DataConfig()
    empty = frozenset(row.missing if data.keep_default_na else ())
    row = replace(row, data={key: value for key, value in row.data.items() if key not in empty}) if empty else row
    # the format is that of the file's first rows; a later row may lack a column, or have null in it
    missing = [key for key in shape.needs if key not in row.data]
    if missing:
        keys = one_line(", ".join(map(str, row.data)) or "none")
        detail = NOTE_NA if missing[0] in empty else f"format {shape.name}; its keys: {keys}"
        return BadRow(row.where, f"{missing[0]} is missing", detail)
    is_text = shape.kind == "text"
    try:
        # columns that the user mapped (data.columns) are meant, whatever stands beside them
        is_mapped = all(key in data.columns for key in shape.needs)
        if not is_mapped and not TELLTALES.isdisjoint(row.data):
            refuse_other_kind(row.data, shape.needs, is_text=is_text)
        given = row
        if data.turns_without_roles != "fail" and not is_text:
            given = replace(row, data={**row.data, **{key: with_roles(row.data[key]) for key in shape.needs}})
        example = shape.build(given)
        if "reasoning" in shape.may_have and isinstance(example, Chat):
            _add_reasoning(example, row)
        unused = _unused_columns(row, shape, example, data)
    except Unusable as error:
        is_asked = error.reason == EMPTY_TEXT and data.drop_empty
        return BadRow(row.where, error.reason, error.detail, is_asked=is_asked)
    except RecursionError:  # tables have no limit of depth as JSON lines do
        return BadRow(row.where, "nested too deeply")
    notes = [*row.notes, *example.notes, *([NOTE_NA] if not empty.isdisjoint(shape.may_have) else [])]
    if isinstance(example, Text):
        notes += [NOTE_CONTROL] if _CONTROL.search(example.text) else []
        return replace(example, notes=tuple(notes), unused=unused)
    return _finish(replace(example, unused=unused) if unused else example, notes, data)


@functools.lru_cache(maxsize=1_000)
def _expected_columns(shape: Format) -> frozenset[str]:
    """The columns of a row that are never said to be unused, but for those of which a row has one of several."""
    # a row with one of these is refused, unless the user mapped its answer and so meant to leave it
    refused = (*REJECTED, *NEGATIVES) if shape.kind != "text" else ()
    columns = frozenset((*shape.needs, *shape.may_have, *refused, *_MEDIA_KEYS, "id", "source", STYLED))
    return columns.difference(SYSTEM_KEYS, TOOL_KEYS)


def _unused_columns(row: RawRow, shape: Format, example: Example, data: DataConfig) -> tuple[Unused, ...]:
    """The columns of a row that are not in its example and hold something, by the names that its file gives them."""
    expected, is_text = _expected_columns(shape), isinstance(example, Text)
    # of several columns for a system prompt, or for tools, the first is read
    read = () if is_text else (_first_filled(SYSTEM_KEYS, row.data), _first_filled(TOOL_KEYS, row.data))
    names = [name for name in row.data if name not in expected and name not in read]
    if not names:
        return ()
    messages = [] if isinstance(example, Text) else without_given(example.messages)
    answer = example.text if isinstance(example, Text) else messages[-1]["content"] or ""
    contents = [message["content"] or "" for message in messages]
    example_text = "\n".join([answer, *texts_in([*getattr(example, "tools", ()), *messages])])
    mappable = {"completion"} if is_text else shape.may_have.union(_MAPPED.get(shape.kind, ()))
    # a second system prompt, or other think text, would make the row a bad one
    mappable = mappable.difference(message["role"] for message in messages)
    mappable -= {"reasoning"} if any("reasoning_content" in message for message in messages) else set()
    text_column = data.columns.get(shape.needs[0], shape.needs[0])
    unused: list[Unused] = []
    for name, value in ((name, row.data[name]) for name in names if row.data[name] not in (None, "", [], {})):
        kind = missed_kind(name, value, is_text=is_text, answer_chars=len(answer))
        texts = list(texts_in(unpacked(value, "[{")))
        whole = "\n".join(texts)
        # what the example holds is not lost, nor is a text that is all of it, as some data sets have it rendered too
        is_held = all(text.strip() in example_text for text in texts)
        is_rendered = not is_text and all(line in whole for line in "\n".join(contents).split("\n"))
        if texts and kind not in ("mask", "label") and (is_held or is_rendered):
            kind = ""
        column = KINDS[kind].get("column", "") if kind else ""
        fits = isinstance(value, str) or column == "tools" or (column == "context" and value == texts)
        theirs = data.columns.get(name, name)
        mapping = ((column, theirs),) if column in mappable and fits else ()
        unused.append((theirs, kind, (("prompt", text_column), *mapping) if is_text and mapping else mapping))
    return tuple(unused)


def _finish(chat: Chat, notes: list[str], data: DataConfig) -> Chat | BadRow:
    messages = chat.messages
    if data.merge_consecutive:
        messages = merge_turns(messages)
    previous = first_speaker = ""
    unread: set[str] = set()
    for message in messages:
        unread.update(message.pop("_unread", ()))
        role = message["role"]
        if role != "system":
            first_speaker = first_speaker or role
        if role == previous and role != "tool":  # the results of parallel calls stand in a row
            notes.append(NOTE_TWO_IN_A_ROW)
        previous = role
        if role == "assistant":
            has_more = message.get("tool_calls") or "reasoning_content" in message
            if not (message["content"] or "").strip() and not has_more and message.get("train", True):
                notes.append(NOTE_EMPTY)
        elif message.pop("_asked", False):
            notes.append(NOTE_USER_TRAINED)
    notes += [NOTE_UNREAD_KEY.format(key=one_line(key, limit=40)) for key in sorted(unread)]
    if NOTE_EMPTY in notes and data.drop_empty:
        return BadRow(chat.where, EMPTY_ANSWER, is_asked=True)
    if first_speaker == "assistant":
        notes.append(NOTE_STARTS_WITH_ASSISTANT)
    if previous == "tool":
        notes.append(NOTE_ENDS_WITH_TOOL)
    texts = (value for message in messages for value in message.values())
    if any(isinstance(text, str) and _CONTROL.search(text) for text in texts):
        notes.append(NOTE_CONTROL)
    if not notes and messages is chat.messages:  # most rows
        return chat
    return replace(chat, messages=messages, notes=tuple(dict.fromkeys(notes)))


# A file's format is that of its first row that has one, among this many.
FIRST_ROWS = 20


def first_format(rows: Iterator[RawRow | BadRow], data: DataConfig) -> tuple[list[RawRow | BadRow], Format | None]:
    """The rows that had to be read to know a file's format, and that format; None where all rows are bad. Raises
    DataError where none of the first rows has a known format, or `data.columns` names a column that is not there."""
    read: list[RawRow | BadRow] = []
    first: RawRow | None = None
    shape: Format | None = None
    seen = 0
    awaited = set(data.columns.values())
    may_lack = {theirs for known, theirs in data.columns.items() if known not in _NEEDED}
    for raw in rows:
        read.append(raw)
        if isinstance(raw, BadRow):
            continue
        first, seen = first or raw, seen + 1
        # rows that were processed are mapped already
        awaited = set() if is_processed(raw.data) else awaited.difference(raw.data)
        shape = shape or recognise(rename_columns(raw, data.columns).data, data.columns)
        # what every row needs is in the first; what a row may lack, in one of the first
        if not awaited <= may_lack or (shape is not None and not awaited) or seen == FIRST_ROWS:
            break
    # a file may lack what rows may lack, where it has no column that could be meant (a misspelt name)
    names = {name for row in read if isinstance(row, RawRow) for name in row.data if "about" not in kinds_of_name(name)}
    names -= _expected_columns(shape).union(shape.may_have, data.columns.values()) if shape is not None else set()
    if first is not None and awaited and (names or not awaited <= may_lack):
        absent = next(name for name in data.columns.values() if name in awaited)
        raise DataError(f"{first.where}: data.columns names {one_line(absent)}; the columns are: {_columns(first)}")
    if first is not None and shape is None:
        raise DataError(
            f"{first.where}: columns found: {_columns(first)}. Expected one of: {_LEADING} (docs/data.md has the "
            f"others, and what is no supervised example). {way_to_read(rename_columns(first, data.columns).data)}"
        )
    return read, shape
