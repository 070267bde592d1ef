"""Turns as data sets write them → messages as chat templates take them: role, content, tool calls, think text.

Roles are mapped from the names that data sets use; an unknown one is an error of its row, never dropped. Nothing of
a message is left out silently: what cannot be kept makes the row unusable, with the place and the reason.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from sft_play.data.sources.json_rows import ROLE_KEYS, strict_json
from sft_play.log import one_line
from sft_play.spelling import nearest

Message = dict[str, Any]

# What data sets call a speaker, and what templates call it. `function` is not here: it is a call or a result, which
# only a name beside it (OpenAI's form of a result) decides.
ROLES: dict[str, str] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "bot", "chatbot", "chatgpt", "ai", "model"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "tool_response", "ipython"), "tool"),
}

# Keys of a message whose texts a template may write: think text, Cohere's text before a call, and the content.
TEXT_KEYS = ("reasoning_content", "tool_plan", "content")

# Where the think text of a message may stand.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")

UNKNOWN_ROLE = "unknown role"
NO_SPEAKERS = "a list of texts that does not say whose they are"
_CALL_ROLES = frozenset({"function_call", "tool_call"})

_CONTENT_KEYS = ("content", "value", "text", "parts", "message")
_USER_KEYS = ("user", "human", "prompter", "input", "question", "prompt", "instruction")
_ASSISTANT_KEYS = ("assistant", "gpt", "bot", "chatbot", "model", "output", "answer", "response", "completion")


class Unusable(ValueError):
    """A row that cannot be used: the reason that rows are counted by; where in the row, and what was found."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def shown(value: Any) -> str:
    """A value as it is quoted in a message."""
    try:
        return one_line(json.dumps(value, ensure_ascii=False, default=str), limit=60)
    except (ValueError, RecursionError):
        return kind(value)


_KINDS = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}


def kind(value: Any) -> str:
    """What a value is, in words."""
    return "an object" if isinstance(value, dict) else _KINDS.get(type(value), type(value).__name__)


def unpacked(value: Any, opening: str) -> Any:
    """A value that a table holds as JSON text; anything else as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(tuple(opening)):
        return value
    try:
        return strict_json(value)
    except ValueError:
        return value


def with_texts(value: Any, change: Callable[[str], str], *, but: Collection[str] = ()) -> Any:
    """A copy of a value of JSON with every text changed, those below the keys `but` left as they are."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: item if key in but else with_texts(item, change, but=but) for key, item in value.items()}
    return [with_texts(item, change, but=but) for item in value] if isinstance(value, list) else value


def texts_in(value: Any) -> Iterator[str]:
    """Every text of a value of JSON, keys of objects aside."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from texts_in(part)


def turns_of(value: Any, key: str) -> list[Message]:
    """The messages of a list of turns: objects with a speaker and a text, or with a question and its answer, or pairs
    of texts. Raises Unusable for anything else: a list of texts does not say who wrote them (mt_bench's are all a
    user's)."""
    value = unpacked(value, "[")
    if isinstance(value, str):
        raise Unusable(f"{key} is text that is not a JSON list", "written by str()? write it with json.dumps")
    if not isinstance(value, list) or not value:
        raise Unusable(f"{key} is empty" if value == [] else f"{key} is {kind(value)}, expected a list")
    value = [unpacked(item, "{") for item in value]
    if all(isinstance(item, str) for item in value):
        raise Unusable(
            NO_SPEAKERS,
            f"{key} has {len(value)} of them; where they are the user's and the assistant's in turn, say so with "
            "data.turns_without_roles=alternate",
        )
    if all(isinstance(item, list) for item in value):
        return [message for item in value for message in pair_of_texts(item, key)]
    return [message for index, item in enumerate(value) for message in _messages(item, index)]


def with_roles(value: Any) -> Any:
    """A list of several texts as the user's and the assistant's turns; anything else as it is."""
    texts = unpacked(value, "[")
    if not isinstance(texts, list) or not texts or not all(isinstance(unpacked(item, "{"), str) for item in texts):
        return value
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": item} for role, item in zip(roles, texts, strict=False)]


def pair_of_texts(item: list[Any], key: str) -> list[Message]:
    """The two messages of a list of a question and its answer; raises Unusable for another list."""
    if len(item) != 2 or not all(isinstance(part, str) for part in item):
        raise Unusable(f"{key} is not a list of [question, answer]", shown(item))
    return [{"role": "user", "content": item[0]}, {"role": "assistant", "content": item[1]}]


def _messages(item: Any, index: int) -> list[Message]:
    """The messages of one item: one, or the question and answer of an item that holds both."""
    where = f"messages[{index}]"
    if not isinstance(item, dict):
        raise Unusable("a message is not an object", f"{where} is {kind(item)}")
    role_key = next((key for key in ROLE_KEYS if item.get(key) is not None), None)
    if role_key is None:
        question = next((key for key in _USER_KEYS if isinstance(item.get(key), str)), None)
        answer = next((key for key in _ASSISTANT_KEYS if isinstance(item.get(key), str)), None)
        if question and answer:
            system = item.get("system")
            first = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
            unread = tuple(key for key in item if key not in (question, answer, "system", "id", "index") and item[key])
            reply = {"role": "assistant", "content": item[answer], "_unread": unread}
            return [*first, {"role": "user", "content": item[question]}, reply]
        raise Unusable("a message has no role", f"{where} has the keys {shown(list(item))}")
    return [_message(item, where, role_key)]


def _message(item: dict[str, Any], where: str, role_key: str) -> Message:
    given = item[role_key]
    role = _role(given, where, is_result=isinstance(item.get("name"), str))
    # an empty `content` beside a `value` counts: the first key that is there, whatever it holds
    content_key = next((key for key in _CONTENT_KEYS if key in item and key != role_key), "content")
    content = item.get(content_key)
    message: Message = {"role": role}
    if str(given).strip().lower() in _CALL_ROLES:  # ShareGPT's form: the turn's text is the call as JSON
        message |= {"content": "", "tool_calls": _calls_in_text(content, where)}
    else:
        calls = _calls_of(item, content, where)
        if calls and role != "assistant":
            raise Unusable(f"tool calls in a {role} turn", where)
        if calls:
            message["tool_calls"] = calls
        is_absent = content is None and bool(calls)  # templates may treat an empty text differently
        message["content"] = None if is_absent else content_text(content, f"{where}.{content_key}", role=role)
    if role == "assistant":
        reasoning = _reasoning_of(item, content)
        if reasoning:
            message["reasoning_content"] = reasoning
    for key in ("name", "tool_call_id", "call_id", *(("tool_plan",) if role == "assistant" else ())):
        if isinstance(item.get(key), str):
            message[key] = item[key]
    is_trained = _is_trained(item, where)
    if is_trained is False:
        message["train"] = False
    # `weight: 1` on every message is common and asks for nothing; `train: true` on a user's turn does
    elif is_trained and role != "assistant" and item.get("train"):
        message["_asked"] = True
    unread = tuple(key for key in item if key not in _READ_KEYS and item[key] not in (None, "", [], {}))
    if unread:
        message["_unread"] = unread
    # Only a message with role and content can be given to apply_chat_template, whose rendering ours must equal.
    if role_key == "role" and "content" in item:
        own = {key: value for key, value in item.items() if key not in _TRAIN_KEYS and _is_json(value)}
        if any(value != message.get(key) for key, value in own.items()):
            message[GIVEN] = own
    return message


# Key of a message that holds its author's own message, as `apply_chat_template` would be given it, where the two
# differ: another name of the role, content in parts, further keys.
GIVEN = "_given"
_TRAINED_KEYS = (
    *("train", "training", "trainable", "train_on_turn", "learn", "loss", "weight", "loss_weight", "loss_scale"),
)
_MASKED_KEYS = ("masked", "is_masked", "ignore", "ignored", "ignore_loss")
# Where data sets say of a message whether it is trained: 1 or true of the first says yes, of the second no. `mask` may
# mean either; `train_detail` is axolotl's, by parts of the text.
_TRAIN_KEYS = (*_TRAINED_KEYS, *_MASKED_KEYS, "mask", "train_detail")


_READ_KEYS = frozenset(
    {
        *ROLE_KEYS, *_CONTENT_KEYS, *REASONING_KEYS, *_TRAIN_KEYS,
        *("name", "tool_call_id", "call_id", "tool_plan", "tool_calls", "function_call", "id", "index"),
    }
)  # fmt: skip


def as_given(message: Message) -> Message:
    """The message as its author wrote it, as files are written: read again, it is the same."""
    if GIVEN not in message:
        return message
    return {**message[GIVEN], **({"train": False} if message.get("train") is False else {})}


def without_given(messages: Iterable[Message]) -> list[Message]:
    """The messages without their authors' own, which are the same content."""
    return [{key: message[key] for key in message if key != GIVEN} if GIVEN in message else message
            for message in messages]  # fmt: skip


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, (str, bool, int, float))


def _is_trained(item: Mapping[str, Any], where: str) -> bool | None:
    """Whether a message says that it is trained or not; None where it says nothing. Raises Unusable."""
    said: dict[str, bool] = {}
    for key in _TRAIN_KEYS:
        value = item.get(key)
        if value is None:
            continue
        if key == "train_detail":
            said[key] = _trained_by_parts(value, where)
            continue
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise Unusable("a loss weight other than 0 and 1", f"{where}.{key} is {shown(value)}; it is not rounded")
        if key == "mask":
            raise Unusable(
                "a message has a mask, which may mean that it is trained or that it is not",
                f"{where}.mask is {shown(value)}; write train: true or train: false",
            )
        said[key] = bool(value) is (key in _TRAINED_KEYS)
    if len(set(said.values())) > 1:  # such as train: true beside weight: 0
        given = {key: item[key] for key in said}
        raise Unusable("a message is both trained and not", f"{where}: {shown(given)}")
    return next(iter(said.values()), None)


def _trained_by_parts(value: Any, where: str) -> bool:
    """Axolotl's `train_detail`, where all parts of the text say the same; raises Unusable for anything else."""
    parts = value if isinstance(value, list) else [value]
    said = {part.get("train") if isinstance(part, dict) else None for part in parts}
    if len(said) != 1 or not isinstance(next(iter(said)), bool):
        raise Unusable("a part of a message is to be trained, and whole messages are", f"{where}.train_detail")
    return bool(said.pop())


def _role(given: Any, where: str, *, is_result: bool = False) -> str:
    if not isinstance(given, str):
        raise Unusable("a message has no role", f"{where}: {shown(given)}")
    name = given.strip().lower()  # "Human", "USER "
    if name in ROLES:
        return ROLES[name]
    if name == "function" and is_result:
        return "tool"
    near = nearest(name, ROLES)
    hint = f'; did you mean "{near}"?' if near else f"; known: {', '.join(ROLES)}"
    hint = (
        "; put think text into reasoning_content of the answer that follows"
        if "think" in name or "reason" in name
        else hint
    )
    raise Unusable(f'{UNKNOWN_ROLE} "{one_line(given, limit=40)}"', f"{where}{hint}")


def roles_said(reasons: Iterable[str], roles: Mapping[str, int]) -> list[str]:
    """Where rows are refused for an unknown role: a line with the turns of known roles in the others, by role."""
    if not any(reason.startswith(UNKNOWN_ROLE) for reason in reasons):
        return []
    seen = ", ".join(f"{role} {count:,}" for role, count in sorted(roles.items(), key=lambda item: -item[1])) or "none"
    return [f"turns of known roles in the other rows: {seen}"]


# Content


def content_text(value: Any, where: str, *, role: str = "") -> str:
    """The text of a message's content: a text or parts of one; raises Unusable for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return _join_parts(value, where)
    if isinstance(value, dict) and isinstance(value.get("type"), str) and role != "tool":
        return _join_parts([value], where)
    if isinstance(value, dict) and isinstance(value.get("parts"), list):
        return _join_parts(value["parts"], where)
    # a tool's result may be an object: templates write text, and its JSON is what an API would send
    if isinstance(value, dict) and role == "tool":
        return json.dumps(value, ensure_ascii=False, default=str)
    # an assistant's turn may have no content where it has calls
    way = '; write an empty text as "", and tool calls into tool_calls' if value is None else ""
    raise Unusable("content is not text", f"{where} is {kind(value)}, expected a string{way}")


_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_REASONING_PARTS = frozenset({"reasoning", "thinking"})
_CALL_PARTS = frozenset({"tool_call", "function_call"})
# Parts that are no part of the text: they become `reasoning_content` and `tool_calls`.
_SKIPPED_PARTS = _REASONING_PARTS | _CALL_PARTS


def _join_parts(parts: list[Any], where: str) -> str:
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        text = _first(part, "text", "value") if isinstance(part, dict) else part
        if isinstance(kind, str) and kind in _SKIPPED_PARTS:
            continue  # read by _reasoning_of and _calls_of
        is_text = kind is None or (isinstance(kind, str) and kind in _TEXT_PARTS)
        if not isinstance(text, str) or not is_text:
            raise Unusable("a content part is not text", f"{where} has a part {shown(part)}")
        texts.append(text)
    return "".join(texts)


def _first(part: Mapping[str, Any], *keys: str) -> Any:
    """The first of the keys that holds anything: tables give every part every key."""
    return next((part[key] for key in keys if part.get(key) is not None), None)


def _parts_of(value: Any, kinds: frozenset[str]) -> list[dict[str, Any]]:
    parts = value if isinstance(value, list) else []
    return [
        part for part in parts if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] in kinds
    ]


def _reasoning_of(item: Mapping[str, Any], content: Any) -> str:
    given = _first(item, *REASONING_KEYS)
    if isinstance(given, str):
        if any(item.get(key) not in (None, given) for key in REASONING_KEYS):
            raise Unusable("a message has two different think texts", f"under {', '.join(REASONING_KEYS)}")
        return given
    parts = [_first(part, "text", "value", "thinking", "reasoning") for part in _parts_of(content, _REASONING_PARTS)]
    if not all(isinstance(part, str) for part in parts):
        raise Unusable("a content part is not text", "a part of reasoning without a text")
    return "".join(parts)


# Tool calls


def _calls_of(item: Mapping[str, Any], content: Any, where: str) -> list[Any]:
    calls = unpacked(item.get("tool_calls"), "[{")
    if calls not in (None, "", [], {}):
        return _tool_calls(calls, where)
    if item.get("function_call") not in (None, "", {}):
        return _calls_in_text(item["function_call"], where)
    in_parts = [_first(part, "value", "text", part["type"]) for part in _parts_of(content, _CALL_PARTS)]
    return [call for value in in_parts for call in _calls_in_text(value, where)]


def _tool_calls(calls: Any, where: str) -> list[Any]:
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list):
        raise Unusable("tool_calls is not a list of objects", f"{where}: {shown(calls)}")
    return [_tool_call(unpacked(call, "{"), where) for call in calls]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """A call as its author wrote it, where it is one as templates take it; else the same call in that form."""
    if not isinstance(call, dict):
        raise Unusable("tool_calls is not a list of objects", f"{where}: {shown(call)}")
    is_wrapped = call.get("function") is not None
    function = unpacked(call["function"], "{") if is_wrapped else call
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"].strip():
        raise Unusable("a tool call has no function name", f"{where}: {shown(call)}")
    arguments = _arguments(_first(function, *_ARGUMENT_KEYS), where)
    if is_wrapped:
        kept = {key: value for key, value in function.items() if key not in _ARGUMENT_KEYS or key == "arguments"}
        return {**call, "function": {**kept, "arguments": arguments}}
    wrapped: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {**wrapped, "id": call["id"]} if isinstance(call.get("id"), str) else wrapped


_ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")


def _arguments(value: Any, where: str) -> dict[str, Any] | str:
    """Arguments as their author wrote them, an object or its JSON text (which of the two a template writes correctly,
    `masks/probes.py` finds out); text that was encoded twice is decoded once."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    parsed, text = value, None
    for _ in range(3):  # an object; its text; that text encoded once more
        if not isinstance(parsed, str):
            break
        text, parsed = parsed, _of_json(parsed, "tool call arguments are a string that is not JSON", where)
    if not isinstance(parsed, dict):
        raise Unusable("tool call arguments are not an object", f"{where}: {kind(parsed)}")
    return parsed if text is None else text


def _calls_in_text(value: Any, where: str) -> list[Any]:
    parsed = _of_json(value, "function_call is not JSON", where)
    if parsed in (None, [], {}):
        raise Unusable("function_call is empty", where)
    return _tool_calls(parsed, where)


def _of_json(value: Any, reason: str, where: str) -> Any:
    """The value of a JSON text; anything else as it is. Raises Unusable with the reason where it is no JSON."""
    try:
        return strict_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise Unusable(reason, ": ".join(filter(None, (where, one_line(str(error)))))) from None


def tools_of(value: Any) -> tuple[Any, ...]:
    """The tools of a row as objects, however they are written; raises Unusable for anything else."""
    is_blank = isinstance(value, str) and not value.strip()
    value = None if is_blank else _of_json(value, "tools is a string that is not JSON", "")
    if value is None or value in ("", [], {}):
        return ()
    tools = [unpacked(tool, "{") for tool in (value if isinstance(value, list) else [value])]
    if all(isinstance(tool, dict) for tool in tools):
        return tuple(tools)
    raise Unusable("tools is not a list of objects", shown(value))


def merge_turns(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Messages with neighbours of the same role joined by a blank line; not results of tools, a trained turn and an
    untrained one, or turns with different names."""
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else {}
        # a `train` of its own must stay with its turn; names are speakers of one role
        alike = all(last.get(key) == message.get(key) for key in ("role", "train", "name"))
        if not alike or message["role"] == "tool":
            merged.append(dict(message))
            continue
        last.pop(GIVEN, None)
        for key in TEXT_KEYS:
            both = [part for part in (last.get(key), message.get(key)) if part]
            if both:
                last[key] = "\n\n".join(both)
        if message.get("tool_calls"):
            last["tool_calls"] = [*last.get("tool_calls", []), *message["tool_calls"]]
    return tuple(merged)
