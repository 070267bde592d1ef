"""Turns as data sets write them → messages as chat templates take them: role, content, tool calls,
think text.

Roles are mapped from the names that data sets use; an unknown one is an error of its row, never
dropped. Nothing of a message is left out silently: what cannot be kept makes the row unusable, with
the place and the reason.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from sft_play.data.sources.images import IMAGE_MARK
from sft_play.data.sources.json_rows import ROLE_KEYS, parse_strict_json
from sft_play.log import one_line
from sft_play.spelling import nearest_name

Message = dict[str, Any]

# What data sets call a speaker, and what templates call it. `function` is not here: it is a call or
# a result, which only a name beside it (OpenAI's form of a result) decides.
ROLES: dict[str, str] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "bot", "chatbot", "chatgpt", "ai", "model"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
    **dict.fromkeys(
        ("tool", "observation", "function_response", "tool_response", "ipython"), "tool"
    ),
}

# Keys of a message whose texts a template may write: think text, Cohere's text before a call, and
# the content.
TEXT_KEYS = ("reasoning_content", "tool_plan", "content")

# Where the think text of a message may stand.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")

UNKNOWN_ROLE = "unknown role"

_CONTENT_KEYS = ("content", "value", "text", "parts", "message")
_USER_KEYS = ("user", "human", "prompter", "input", "question", "prompt", "instruction")
_ASSISTANT_KEYS = (
    "assistant",
    "gpt",
    "bot",
    "chatbot",
    "model",
    "output",
    "answer",
    "response",
    "completion",
)


class UnusableRowError(ValueError):
    """A row that cannot be used: the reason that rows are counted by; where in the row, and what
    was found."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def quote_value(value: Any) -> str:
    """A value as it is quoted in a message."""
    try:
        return one_line(json.dumps(value, ensure_ascii=False, default=str), limit=60)
    except (ValueError, RecursionError):
        return value_kind(value)


_TYPE_NAMES = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "an object",
}


def value_kind(value: Any) -> str:
    """What a value is, in words."""
    return _TYPE_NAMES.get(type(value), type(value).__name__)


def unpack_json(value: Any, opening: str) -> Any:
    """A value that a table holds as JSON text; anything else as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(tuple(opening)):
        return value
    try:
        return parse_strict_json(value)
    except ValueError:
        return value


def map_texts(
    value: Any, change: Callable[[str], str], *, skipped_keys: Collection[str] = ()
) -> Any:
    """A copy of a value of JSON with every text changed, those below `skipped_keys` left as they
    are."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {
            key: item if key in skipped_keys else map_texts(item, change, skipped_keys=skipped_keys)
            for key, item in value.items()
        }
    return (
        [map_texts(item, change, skipped_keys=skipped_keys) for item in value]
        if isinstance(value, list)
        else value
    )


def iter_texts(value: Any) -> Iterator[str]:
    """Every text of a value of JSON, keys of objects aside."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from iter_texts(part)


def parse_turns(value: Any, key: str) -> list[Message]:
    """The messages of a list of turns: objects with a speaker and a text, or with a question and
    its answer, or pairs of texts. Raises UnusableRow for anything else: a list of texts does not
    say who wrote them (mt_bench's are all a user's)."""
    value = unpack_json(value, "[")
    if isinstance(value, str):
        raise UnusableRowError(
            f"{key} is text that is not a JSON list", "written by str()? write it with json.dumps"
        )
    if not isinstance(value, list) or not value:
        raise UnusableRowError(
            f"{key} is empty" if value == [] else f"{key} is {value_kind(value)}, expected a list"
        )
    value = [unpack_json(item, "{") for item in value]
    if all(isinstance(item, str) for item in value):
        raise UnusableRowError(
            "a list of texts that does not say whose they are",
            f"{key} has {len(value)} of them; where they are the user's and the assistant's in"
            " turn, say so with data.turns_without_roles=alternate",
        )
    if all(isinstance(item, list) for item in value):
        return [message for item in value for message in parse_text_pair(item, key)]
    return [message for index, item in enumerate(value) for message in _parse_item(item, index)]


def alternate_roles(value: Any) -> Any:
    """Turn a list of texts into alternating user and assistant turns; return anything else
    unchanged."""
    texts = unpack_json(value, "[")
    if (
        not isinstance(texts, list)
        or not texts
        or not all(isinstance(unpack_json(item, "{"), str) for item in texts)
    ):
        return value
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": item} for role, item in zip(roles, texts, strict=False)]


def parse_text_pair(item: list[Any], key: str) -> list[Message]:
    """The two messages of a list of a question and its answer; raises UnusableRow for another
    list."""
    if len(item) != 2 or not all(isinstance(part, str) for part in item):
        raise UnusableRowError(f"{key} is not a list of [question, answer]", quote_value(item))
    return [{"role": "user", "content": item[0]}, {"role": "assistant", "content": item[1]}]


_PLAIN_KEYS, _PLAIN_ROLES = {"role", "content"}, ("user", "assistant", "system")


def _parse_item(item: Any, index: int) -> list[Message]:
    location = f"messages[{index}]"
    if not isinstance(item, dict):
        raise UnusableRowError("a message is not an object", f"{location} is {value_kind(item)}")
    # nearly every message, and what all that follows would make of it
    if (
        item.keys() == _PLAIN_KEYS
        and item["role"] in _PLAIN_ROLES
        and isinstance(item["content"], str)
    ):
        return [{"role": item["role"], "content": item["content"]}]
    role_key = next((key for key in ROLE_KEYS if item.get(key) is not None), None)
    if role_key is None:
        question = next((key for key in _USER_KEYS if isinstance(item.get(key), str)), None)
        answer = next((key for key in _ASSISTANT_KEYS if isinstance(item.get(key), str)), None)
        if question and answer:
            system = item.get("system")
            system_messages = (
                [{"role": "system", "content": system}]
                if isinstance(system, str) and system.strip()
                else []
            )
            unread_keys = tuple(
                key
                for key in item
                if key not in (question, answer, "system", "id", "index") and item[key]
            )
            return [
                *system_messages,
                {"role": "user", "content": item[question]},
                {"role": "assistant", "content": item[answer], "_unread": unread_keys},
            ]
        raise UnusableRowError(
            "a message has no role", f"{location} has the keys {quote_value(list(item))}"
        )
    return [_parse_message(item, location, role_key)]


def _parse_message(item: dict[str, Any], location: str, role_key: str) -> Message:
    role_value = item[role_key]
    role = _map_role(role_value, location, is_result=isinstance(item.get("name"), str))
    # an empty `content` beside a `value` counts: the first key that is there, whatever it holds
    content_key = next((key for key in _CONTENT_KEYS if key in item and key != role_key), "content")
    content = item.get(content_key)
    message: Message = {"role": role}
    # ShareGPT's form: the turn's text is the call as JSON
    if str(role_value).strip().lower() in CALL_PART_TYPES:
        message |= {"content": "", "tool_calls": _parse_call_text(content, location)}
    else:
        calls = _read_calls(item, content, location)
        if calls and role != "assistant":
            raise UnusableRowError(f"tool calls in a {role} turn", location)
        if calls:
            message["tool_calls"] = calls
        is_absent = content is None and bool(calls)  # templates may treat an empty text differently
        images: list[tuple[Any, Any]] = []
        message["content"] = (
            None
            if is_absent
            else content_text(content, f"{location}.{content_key}", role=role, images=images)
        )
        if images:
            message[PART_IMAGES] = images
    if role == "assistant":
        reasoning = _read_reasoning(item, content)
        if reasoning:
            message["reasoning_content"] = reasoning
    for key in (
        "name",
        "tool_call_id",
        "call_id",
        *(("tool_plan",) if role == "assistant" else ()),
    ):
        if isinstance(item.get(key), str):
            message[key] = item[key]
    is_trained = _read_train_flag(item, location)
    if is_trained is False:
        message["train"] = False
    # `weight: 1` on every message is common and asks for nothing; `train: true` on a user's turn
    # does
    elif is_trained and role != "assistant" and item.get("train"):
        message["_asked"] = True
    unread_keys = tuple(
        key for key in item if key not in _READ_KEYS and item[key] not in (None, "", [], {})
    )
    if unread_keys:
        message["_unread"] = unread_keys
    # Only a message with role and content can be given to apply_chat_template, whose rendering ours
    # must equal.
    if role_key == "role" and "content" in item:
        author_message = {
            key: value
            for key, value in item.items()
            if key not in _LOSS_FLAG_KEYS and _is_json(value)
        }
        if any(value != message.get(key) for key, value in author_message.items()):
            message[AUTHOR_MESSAGE] = author_message
    return message


# Key of a message that holds its author's own message, as `apply_chat_template` would be given it,
# where the two differ: another name of the role, content in parts, further keys.
AUTHOR_MESSAGE = "_given"
# Key of a message, until its images are found, for the value and the index of each part that is
# one; both may be None.
PART_IMAGES = "_images"
_TRAINED_KEYS = (
    "train",
    "training",
    "trainable",
    "train_on_turn",
    "learn",
    "loss",
    "weight",
    "loss_weight",
    "loss_scale",
)
# Where data sets say of a message whether it is trained: 1 or true of the first says yes, of the
# second no. `mask` may mean either; `train_detail` is axolotl's, by parts of the text.
_LOSS_FLAG_KEYS = (
    *_TRAINED_KEYS,
    "masked",
    "is_masked",
    "ignore",
    "ignored",
    "ignore_loss",
    "mask",
    "train_detail",
)


_READ_KEYS = frozenset(
    {
        *ROLE_KEYS, *_CONTENT_KEYS, *REASONING_KEYS, *_LOSS_FLAG_KEYS,
        *("name", "tool_call_id", "call_id", "tool_plan", "tool_calls", "function_call", "id"),
        "index",
    }
)  # fmt: skip


def author_form(message: Message) -> Message:
    """The message as its author wrote it, as files are written: read again, it is the same."""
    if AUTHOR_MESSAGE not in message:
        return message
    return {
        **message[AUTHOR_MESSAGE],
        **({"train": False} if message.get("train") is False else {}),
    }


def drop_author_messages(messages: Iterable[Message]) -> list[Message]:
    """The messages without their authors' own, which are the same content."""
    return [
        (
            {key: message[key] for key in message if key != AUTHOR_MESSAGE}
            if AUTHOR_MESSAGE in message
            else message
        )
        for message in messages
    ]


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, (str, bool, int, float))


def _read_train_flag(item: Mapping[str, Any], location: str) -> bool | None:
    flags: dict[str, bool] = {}
    for key in _LOSS_FLAG_KEYS:
        value = item.get(key)
        if value is None:
            continue
        if key == "train_detail":
            raise UnusableRowError(
                "a part of a message is to be trained, and whole messages are",
                f"{location}.train_detail; write train: true or train: false",
            )
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise UnusableRowError(
                "a loss weight other than 0 and 1",
                f"{location}.{key} is {quote_value(value)}; it is not rounded",
            )
        if key == "mask":
            raise UnusableRowError(
                "a message has a mask, which may mean that it is trained or that it is not",
                f"{location}.mask is {quote_value(value)}; write train: true or train: false",
            )
        flags[key] = bool(value) is (key in _TRAINED_KEYS)
    if len(set(flags.values())) > 1:  # such as train: true beside weight: 0
        values = {key: item[key] for key in flags}
        raise UnusableRowError(
            "a message is both trained and not", f"{location}: {quote_value(values)}"
        )
    return next(iter(flags.values()), None)


def _map_role(value: Any, location: str, *, is_result: bool = False) -> str:
    if not isinstance(value, str):
        raise UnusableRowError("a message has no role", f"{location}: {quote_value(value)}")
    name = value.strip().lower()  # "Human", "USER "
    if name in ROLES:
        return ROLES[name]
    if name == "function" and is_result:
        return "tool"
    suggestion = nearest_name(name, ROLES)
    hint = f'; did you mean "{suggestion}"?' if suggestion else f"; known: {', '.join(ROLES)}"
    hint = (
        "; put think text into reasoning_content of the answer that follows"
        if "think" in name or "reason" in name
        else hint
    )
    raise UnusableRowError(f'{UNKNOWN_ROLE} "{one_line(value, limit=40)}"', f"{location}{hint}")


def known_role_lines(reasons: Iterable[str], roles: Counter[str]) -> list[str]:
    """Where rows are refused for an unknown role: a line with the turns of known roles in the
    others, by role."""
    if not any(reason.startswith(UNKNOWN_ROLE) for reason in reasons):
        return []
    counts_text = ", ".join(f"{role} {count:,}" for role, count in roles.most_common())
    return [f"turns of known roles in the other rows: {counts_text or 'none'}"]


# Content


def content_text(
    value: Any, location: str, *, role: str = "", images: list[tuple[Any, Any]] | None = None
) -> str:
    """The text of a message's content: a text or parts of one. A part that is an image becomes an
    IMAGE_MARK and is added to `images` (its value and index), where that is given. Raises
    UnusableRow for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return _join_parts(value, location, images)
    if isinstance(value, dict) and isinstance(value.get("type"), str) and role != "tool":
        return _join_parts([value], location, images)
    if isinstance(value, dict) and isinstance(value.get("parts"), list):
        return _join_parts(value["parts"], location, images)
    # a tool's result may be an object: templates write text, and its JSON is what an API would send
    if isinstance(value, dict) and role == "tool":
        return json.dumps(value, ensure_ascii=False, default=str)
    # an assistant's turn may have no content where it has calls
    hint = '; write an empty text as "", and tool calls into tool_calls' if value is None else ""
    raise UnusableRowError(
        "content is not text", f"{location} is {value_kind(value)}, expected a string{hint}"
    )


_TEXT_PART_TYPES = frozenset({"text", "input_text", "output_text"})
_REASONING_PART_TYPES = frozenset({"reasoning", "thinking"})
CALL_PART_TYPES = frozenset({"tool_call", "function_call"})
_IMAGE_PART_TYPES = ("image", "image_url", "input_image")
# Where a part has its image: the first is the part's own type in most of them.
_IMAGE_PART_KEYS = ("image", "image_url", "path", "url")
_UNTRAINED_PART_TYPES = ("video", "video_url", "audio", "audio_url", "input_audio", "sound")


def _join_parts(parts: list[Any], location: str, images: list[tuple[Any, Any]] | None) -> str:
    texts = []
    for part in parts:
        part_type = part.get("type") if isinstance(part, dict) else None
        if part_type in _UNTRAINED_PART_TYPES:
            raise UnusableRowError(
                f"a content part is {part_type}, and only text and images are trained",
                f"{location} has a part {quote_value(part)}",
            )
        # Qwen's older rows have parts without a type: {"image": …}, {"text": …}
        is_image = part_type in _IMAGE_PART_TYPES or (
            isinstance(part, dict) and part_type is None and part.get("image") is not None
        )
        if is_image and images is not None:
            images.append((_first_value(part, *_IMAGE_PART_KEYS), part.get("index")))
            texts.append(IMAGE_MARK)
            continue
        text = _first_value(part, "text", "value") if isinstance(part, dict) else part
        if isinstance(part_type, str) and part_type in _REASONING_PART_TYPES | CALL_PART_TYPES:
            continue  # read by _read_reasoning and _read_calls
        is_text = not is_image and (
            part_type is None or (isinstance(part_type, str) and part_type in _TEXT_PART_TYPES)
        )
        if not isinstance(text, str) or not is_text:
            raise UnusableRowError(
                "a content part is not text", f"{location} has a part {quote_value(part)}"
            )
        texts.append(text)
    return "".join(texts)


def _first_value(part: Mapping[str, Any], *keys: str) -> Any:
    # tables give every part every key
    return next((part[key] for key in keys if part.get(key) is not None), None)


def _select_parts(value: Any, part_types: frozenset[str]) -> list[dict[str, Any]]:
    parts = value if isinstance(value, list) else []
    return [
        part
        for part in parts
        if isinstance(part, dict)
        and isinstance(part.get("type"), str)
        and part["type"] in part_types
    ]


def _read_reasoning(item: Mapping[str, Any], content: Any) -> str:
    reasoning = _first_value(item, *REASONING_KEYS)
    if isinstance(reasoning, str):
        if any(item.get(key) not in (None, reasoning) for key in REASONING_KEYS):
            raise UnusableRowError(
                "a message has two different think texts", f"under {', '.join(REASONING_KEYS)}"
            )
        return reasoning
    parts = [
        _first_value(part, "text", "value", "thinking", "reasoning")
        for part in _select_parts(content, _REASONING_PART_TYPES)
    ]
    if not all(isinstance(part, str) for part in parts):
        raise UnusableRowError("a content part is not text", "a part of reasoning without a text")
    return "".join(parts)


# Tool calls


def _read_calls(item: Mapping[str, Any], content: Any, location: str) -> list[Any]:
    calls = unpack_json(item.get("tool_calls"), "[{")
    if calls not in (None, "", [], {}):
        return _parse_tool_calls(calls, location)
    if item.get("function_call") not in (None, "", {}):
        return _parse_call_text(item["function_call"], location)
    part_values = [
        _first_value(part, "value", "text", part["type"])
        for part in _select_parts(content, CALL_PART_TYPES)
    ]
    return [call for value in part_values for call in _parse_call_text(value, location)]


def _parse_tool_calls(calls: Any, location: str) -> list[Any]:
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list):
        raise UnusableRowError(
            "tool_calls is not a list of objects", f"{location}: {quote_value(calls)}"
        )
    return [_parse_tool_call(unpack_json(call, "{"), location) for call in calls]


# A call as its author wrote it, where it is one as templates take it; else the same call in that
# form.
def _parse_tool_call(call: Any, location: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise UnusableRowError(
            "tool_calls is not a list of objects", f"{location}: {quote_value(call)}"
        )
    is_wrapped = call.get("function") is not None
    function = unpack_json(call["function"], "{") if is_wrapped else call
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not function["name"].strip()
    ):
        raise UnusableRowError(
            "a tool call has no function name", f"{location}: {quote_value(call)}"
        )
    arguments = _parse_arguments(_first_value(function, *_ARGUMENT_KEYS), location)
    if is_wrapped:
        fields = {
            key: value
            for key, value in function.items()
            if key not in _ARGUMENT_KEYS or key == "arguments"
        }
        return {**call, "function": {**fields, "arguments": arguments}}
    wrapped: dict[str, Any] = {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
    return {**wrapped, "id": call["id"]} if isinstance(call.get("id"), str) else wrapped


_ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")


# Arguments as their author wrote them, an object or its JSON text (which of the two a template
# writes correctly, `masks/fitted_template.py` finds out); text that was encoded twice is decoded
# once.
def _parse_arguments(value: Any, location: str) -> dict[str, Any] | str:
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    parsed, text = value, None
    for _ in range(3):  # an object; its text; that text encoded once more
        if not isinstance(parsed, str):
            break
        text, parsed = (
            parsed,
            _parse_json_text(parsed, "tool call arguments are a string that is not JSON", location),
        )
    if not isinstance(parsed, dict):
        raise UnusableRowError(
            "tool call arguments are not an object", f"{location}: {value_kind(parsed)}"
        )
    return parsed if text is None else text


def _parse_call_text(value: Any, location: str) -> list[Any]:
    parsed = _parse_json_text(value, "function_call is not JSON", location)
    if parsed in (None, [], {}):
        raise UnusableRowError("function_call is empty", location)
    return _parse_tool_calls(parsed, location)


def _parse_json_text(value: Any, reason: str, location: str) -> Any:
    try:
        return parse_strict_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise UnusableRowError(
            reason, ": ".join(filter(None, (location, one_line(str(error)))))
        ) from None


def parse_tools(value: Any) -> tuple[Any, ...]:
    """The tools of a row as objects, however they are written; raises UnusableRow for anything
    else."""
    is_blank = isinstance(value, str) and not value.strip()
    value = None if is_blank else _parse_json_text(value, "tools is a string that is not JSON", "")
    if value is None or value in ("", [], {}):
        return ()
    tools = [unpack_json(tool, "{") for tool in (value if isinstance(value, list) else [value])]
    if all(isinstance(tool, dict) for tool in tools):
        return tuple(tools)
    raise UnusableRowError("tools is not a list of objects", quote_value(value))


def merge_turns(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Join neighbouring messages of one role with a blank line between; not results of tools, a
    trained turn and an untrained one, or turns with different names."""
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else {}
        # a `train` of its own must stay with its turn; names are speakers of one role
        is_same_speaker = all(
            last.get(key) == message.get(key) for key in ("role", "train", "name")
        )
        if not is_same_speaker or message["role"] == "tool":
            merged.append(dict(message))
            continue
        last.pop(AUTHOR_MESSAGE, None)
        for key in TEXT_KEYS:
            texts = [part for part in (last.get(key), message.get(key)) if part]
            if texts:
                last[key] = "\n\n".join(texts)
        if message.get("tool_calls"):
            last["tool_calls"] = [*last.get("tool_calls", []), *message["tool_calls"]]
    return tuple(merged)
