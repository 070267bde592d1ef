"""What a row is, from its keys: messages, ShareGPT, alpaca, prompt/completion, question/answer, text.

Every format becomes the same two things: a `Chat` of checked messages, or a `Text`. Roles are mapped from the
names that data sets use; an unknown one is a bad row, never dropped.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from sft_play.config.schema import DataConfig
from sft_play.data.files import BadRow, RawRow
from sft_play.errors import DataError
from sft_play.log import one_line

Message = dict[str, Any]

ROLES: dict[str, str] = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "ipython": "tool",
}
"""What data sets call a speaker, and what templates call it. `function` is not here: it is a call or a result."""


@dataclass(frozen=True)
class Chat:
    """A conversation as a template takes it: messages with role, content and tool calls, and the tools there are."""

    where: str
    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Text:
    """Plain text without turns."""

    where: str
    text: str


Example = Chat | Text


class _Unusable(ValueError):
    """A row that cannot be used; the first argument is the reason rows are counted by, the second the detail."""

    @property
    def reason(self) -> str:
        """What rows are counted by."""
        return str(self.args[0])

    @property
    def detail(self) -> str:
        """Where in the row, and what was found."""
        return str(self.args[1]) if len(self.args) > 1 else ""


@dataclass(frozen=True)
class Format:
    """A shape of rows: the keys it needs, those it may have, and how a row becomes an example."""

    name: str
    needs: tuple[str, ...]
    build: Callable[[RawRow], Example]
    may_have: frozenset[str] = field(default_factory=frozenset)


def _chat(row: RawRow, messages: list[Message], tools: Any = None) -> Chat:
    if not any(message["role"] == "assistant" for message in messages):
        raise _Unusable("no assistant turn, so nothing to learn")
    return Chat(row.where, tuple(messages), _tools(tools))


def _tools(value: Any) -> tuple[Any, ...]:
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _Unusable("tools is a string that is not JSON", str(error)) from None
    if value in (None, "", [], {}):
        return ()
    if isinstance(value, list) and all(isinstance(tool, dict) for tool in value):
        return tuple(value)
    raise _Unusable("tools is not a list of objects", one_line(json.dumps(value), limit=60))


def _from_messages(row: RawRow) -> Chat:
    value = row.data["messages"]
    if not isinstance(value, list) or not value:
        raise _Unusable("messages is empty" if value == [] else f"messages is {_kind(value)}, expected a list")
    messages = [_message(item, index, "role", "content") for index, item in enumerate(value)]
    return _chat(row, messages, row.data.get("tools"))


def _from_sharegpt(row: RawRow) -> Chat:
    value = row.data["conversations"]
    if not isinstance(value, list) or not value:
        raise _Unusable("conversations is empty" if value == [] else f"conversations is {_kind(value)}")
    first = value[0] if isinstance(value[0], dict) else {}
    role, content = ("from", "value") if "from" in first else ("role", "content")
    messages = [_message(item, index, role, content) for index, item in enumerate(value)]
    system = row.data.get("system")
    if isinstance(system, str) and system.strip():
        messages.insert(0, {"role": "system", "content": system})
    return _chat(row, messages, row.data.get("tools"))


def _message(item: Any, index: int, role_key: str, content_key: str) -> Message:
    where = f"messages[{index}]"
    if not isinstance(item, dict):
        raise _Unusable("a message is not an object", f"{where} is {_kind(item)}")
    given = item.get(role_key)
    role = _role(given, where)
    if given == "function_call":
        return {"role": role, "content": "", "tool_calls": _calls_in_text(item.get(content_key), where)}
    message: Message = {"role": role}
    calls = item.get("tool_calls") or _calls_in_parts(item.get(content_key), where)
    if calls:
        message["tool_calls"] = _tool_calls(calls, where)
    message["content"] = _content(item.get(content_key), where, may_be_none=bool(calls))
    reasoning = item.get("reasoning_content") or _reasoning(item.get(content_key))
    if isinstance(reasoning, str) and reasoning:
        message["reasoning_content"] = reasoning
    for key in ("name", "tool_call_id"):
        if isinstance(item.get(key), str):
            message[key] = item[key]
    return message


def _role(given: Any, where: str) -> str:
    if isinstance(given, str) and given.lower() in ROLES:
        return ROLES[given.lower()]
    if not isinstance(given, str):
        raise _Unusable("a message has no role", f"{where}: {one_line(json.dumps(given))}")
    near = difflib.get_close_matches(given.lower(), ROLES, n=1, cutoff=0.7)
    hint = f'; did you mean "{near[0]}"?' if near else f"; known: {', '.join(ROLES)}"
    raise _Unusable(f'unknown role "{one_line(given, limit=40)}"', f"{where}{hint}")


def _content(value: Any, where: str, *, may_be_none: bool) -> str:
    if isinstance(value, str):
        return value
    if value is None and may_be_none:
        return ""
    if isinstance(value, list):
        return _join_parts(value, where)
    raise _Unusable("content is not text", f"{where}.content is {_kind(value)}, expected a string")


_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_REASONING_PARTS = frozenset({"reasoning", "thinking"})
_CALL_PARTS = frozenset({"tool_call", "function_call"})
_SKIPPED_PARTS = _REASONING_PARTS | _CALL_PARTS
"""Parts that are no part of the text: they become `reasoning_content` and `tool_calls`."""


def _join_parts(parts: list[Any], where: str) -> str:
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text", part.get("value")) if isinstance(part, dict) else part
        if kind in _SKIPPED_PARTS:
            continue
        if not isinstance(text, str) or (kind is not None and kind not in _TEXT_PARTS):
            raise _Unusable("a content part is not text", f"{where}.content has a part of type {one_line(str(kind))}")
        texts.append(text)
    return "".join(texts)


def _reasoning(value: Any) -> str:
    if not isinstance(value, list):
        return ""
    parts = [part for part in value if isinstance(part, dict) and part.get("type") in _REASONING_PARTS]
    return "".join(str(part.get("text", part.get("value", part.get("thinking", "")))) for part in parts)


def _calls_in_parts(value: Any, where: str) -> list[Any]:
    parts = value if isinstance(value, list) else []
    found = [part for part in parts if isinstance(part, dict) and part.get("type") in _CALL_PARTS]
    return [call for part in found for call in _calls_in_text(part.get("value", part.get("text")), where)]


def _tool_calls(calls: Any, where: str) -> list[Any]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise _Unusable("tool_calls is not a list of objects", where)
    return [_tool_call(call, where) for call in calls]


def _tool_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _Unusable("a tool call has no function name", where)
    arguments = _arguments(function.get("arguments"), where)
    made: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {**made, "id": call["id"]} if isinstance(call.get("id"), str) else made


def _arguments(value: Any, where: str) -> dict[str, Any]:
    """Arguments as an object, however often they were encoded as a string."""
    for _ in range(3):
        if not isinstance(value, str):
            break
        try:
            value = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError):
            raise _Unusable("tool call arguments are a string that is not JSON", where) from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _Unusable("tool call arguments are not an object", f"{where}: {_kind(value)}")
    return value


def _calls_in_text(value: Any, where: str) -> list[Any]:
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise _Unusable("function_call is not JSON", where) from None
    return _tool_calls(parsed if isinstance(parsed, list) else [parsed], where)


def _kind(value: Any) -> str:
    names: dict[type, str] = {
        type(None): "null",
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)


def _words(row: RawRow, key: str, *, needed: bool = True) -> str:
    value = row.data.get(key)
    if value is None and not needed:
        return ""
    if not isinstance(value, str):
        raise _Unusable(f"{key} is not text", f"it is {_kind(value)}")
    return value


def _from_alpaca(row: RawRow) -> Chat:
    question, extra = _words(row, "instruction"), _words(row, "input", needed=False)
    messages: list[Message] = []
    if _words(row, "system", needed=False):
        messages.append({"role": "system", "content": row.data["system"]})
    history = row.data.get("history") or []
    if not isinstance(history, list):
        raise _Unusable("history is not a list of [question, answer]")
    for turn in history:
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(part, str) for part in turn):
            raise _Unusable("history is not a list of [question, answer]")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    content = f"{question}\n{extra}" if extra.strip() else question
    messages += [{"role": "user", "content": content}, {"role": "assistant", "content": _words(row, "output")}]
    return _chat(row, messages)


def _pair(question: str, answer: str) -> Callable[[RawRow], Chat]:
    def build(row: RawRow) -> Chat:
        prompt, completion = row.data.get(question), row.data.get(answer)
        if isinstance(prompt, list) or isinstance(completion, list):
            turns = [*_as_list(prompt, "user"), *_as_list(completion, "assistant")]
            return _chat(row, [_message(item, index, "role", "content") for index, item in enumerate(turns)])
        messages = [
            {"role": "user", "content": _words(row, question)},
            {"role": "assistant", "content": _words(row, answer)},
        ]
        if _words(row, "system", needed=False):
            messages.insert(0, {"role": "system", "content": row.data["system"]})
        return _chat(row, messages)

    return build


def _as_list(value: Any, role: str) -> list[Any]:
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _from_text(row: RawRow) -> Text:
    text = _words(row, "text")
    if not text.strip():
        raise _Unusable("text is empty")
    return Text(row.where, text)


FORMATS: tuple[Format, ...] = (
    Format("messages", ("messages",), _from_messages, frozenset({"tools"})),
    Format("sharegpt", ("conversations",), _from_sharegpt, frozenset({"tools", "system"})),
    Format("alpaca", ("instruction", "output"), _from_alpaca, frozenset({"input", "history", "system"})),
    Format("prompt/completion", ("prompt", "completion"), _pair("prompt", "completion"), frozenset({"system"})),
    Format("prompt/response", ("prompt", "response"), _pair("prompt", "response"), frozenset({"system"})),
    Format("question/answer", ("question", "answer"), _pair("question", "answer"), frozenset({"system"})),
    Format("text", ("text",), _from_text),
)
"""In the order in which they are tried: the first whose needed keys are all there."""

KNOWN_COLUMNS = frozenset(key for shape in FORMATS for key in (*shape.needs, *shape.may_have))


def recognise(keys: Collection[str]) -> Format | None:
    """The format of a row with these keys, or None."""
    return next((shape for shape in FORMATS if all(key in keys for key in shape.needs)), None)


def rename_columns(row: RawRow, columns: Mapping[str, str]) -> RawRow:
    """The row with the user's column names replaced by the known ones."""
    if not columns:
        return row
    mine = {theirs: known for known, theirs in columns.items()}
    kept = {key: value for key, value in row.data.items() if key not in columns or key in mine}
    return RawRow(row.where, {mine.get(key, key): value for key, value in kept.items()})


def check_mapping(row: RawRow, columns: Mapping[str, str]) -> None:
    """Raises DataError when `data.columns` names a column of the user's that the first row does not have."""
    absent = [theirs for theirs in columns.values() if theirs not in row.data]
    if absent:
        there = ", ".join(one_line(str(key), limit=40) for key in row.data) or "none"
        raise DataError(f"{row.where}: data.columns names {one_line(absent[0])}, and the columns there are: {there}")


def check_columns(data: DataConfig) -> None:
    """Raises DataError when `data.columns` names a column that no format has, or one of the user's twice."""
    twice = [theirs for theirs, count in Counter(data.columns.values()).items() if count > 1]
    if twice:
        raise DataError(f"data.columns: {one_line(twice[0])} is mapped to two columns; each of yours stands for one")
    for known in data.columns:
        if known not in KNOWN_COLUMNS:
            near = difflib.get_close_matches(known, KNOWN_COLUMNS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise DataError(
                f"data.columns: {one_line(known)} is no column of a known format{hint} (write known: yours; known: "
                f"{', '.join(sorted(KNOWN_COLUMNS))})"
            )


def to_example(row: RawRow, shape: Format) -> Example | BadRow:
    """The row as an example of this format, or why it cannot be one."""
    missing = [key for key in shape.needs if key not in row.data]
    if missing:
        there = ", ".join(map(str, row.data)) or "none"
        return BadRow(row.where, f"{missing[0]} is missing", f"format {shape.name}; keys there: {one_line(there)}")
    try:
        return shape.build(row)
    except _Unusable as error:
        return BadRow(row.where, error.reason, error.detail)


def unknown_format(row: RawRow) -> DataError:
    """The error for rows whose keys no format has."""
    known = "; ".join(" + ".join(shape.needs) for shape in FORMATS)
    there = ", ".join(one_line(str(key), limit=40) for key in row.data) or "none"
    return DataError(
        f"{row.where}: columns found: {there}. Expected one of: {known}. Map yours, such as "
        "data.columns={prompt: question_text, completion: reply}"
    )
