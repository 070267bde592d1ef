"""What a row is, from its keys: a list of turns, a question and an answer, or text.

Every format becomes the same two things: a `Chat` of checked messages, or a `Text`. Roles are
mapped from the names that data sets use; an unknown one is a bad row, never dropped. What can be
used but looks odd is noted on the example, counted and reported.
"""

import functools
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sft_play.config.schema import DataConfig
from sft_play.data.sources.columns import (
    COLUMN_KINDS,
    NEGATIVE_COLUMNS,
    OTHER_KIND_COLUMNS,
    REJECTED_COLUMNS,
    UnusedColumn,
    kinds_in_name,
    missed_column_kind,
    refuse_other_kind,
    unknown_format_hint,
)
from sft_play.data.sources.images import Picture
from sft_play.data.sources.json_rows import ROLE_KEYS
from sft_play.data.sources.messages import (
    AUTHOR_MESSAGE,
    Message,
    UnusableRowError,
    alternate_roles,
    content_text,
    drop_author_messages,
    iter_texts,
    merge_turns,
    parse_text_pair,
    parse_tools,
    parse_turns,
    quote_value,
    unpack_json,
    value_kind,
)
from sft_play.data.sources.raw import BadRow, RawRow
from sft_play.data.sources.row_images import (
    ROW_IMAGE_COLUMNS,
    UNTRAINED_MEDIA_COLUMNS,
    place_images,
    refuse_untrained_media,
)
from sft_play.errors import DataError
from sft_play.log import one_line
from sft_play.spelling import did_you_mean

EMPTY_TEXT = "text is empty"

NOTE_EMPTY = "an answer is empty or white space (data.drop_empty=true leaves such rows out)"
NOTE_CONTROL = "the text holds control characters (such as NUL or ESC)"
NOTE_TWO_IN_A_ROW = "two turns of the same role in a row (data.merge_consecutive=true joins them)"
NOTE_STARTS_WITH_ASSISTANT = "starts with an assistant turn"
NOTE_ENDS_WITH_TOOL = "ends with a tool turn, which nothing answers"
NOTE_UNREAD_KEY = "the key {key} of a message is not read, but by a chat template that asks for it"
NOTE_NA = (
    "a cell is NaN, None or similar and counts as missing (data.keep_default_na=false reads it as"
    " text)"
)
NOTE_TOOLS_IN_TEXT = (
    "the tools are already in the system prompt, so the template is not given the row's tools a"
    " second time"
)
NOTE_USER_TRAINED = "a turn of another role than assistant asks to be trained, and is not"

_CONTROL_CHARACTER = re.compile("[\x00-\x08\x0e-\x1f\x7f]")


@dataclass(frozen=True)
class Chat:
    """A conversation as a template takes it: messages with role, content and tool calls, the tools,
    and variables for the template, which go before data.chat_template_kwargs. A message has `train:
    False` where it must not be trained, and no such key otherwise. `notes` are oddities; `unused`
    are columns of its row that are not in it. `images` are its pictures in the order of the
    `IMAGE_MARK`s in the messages' contents.
    """

    where: str
    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[UnusedColumn, ...] = field(default=(), compare=False)
    images: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class Text:
    """Plain text without turns."""

    where: str
    text: str
    notes: tuple[str, ...] = field(default=(), compare=False)
    unused: tuple[UnusedColumn, ...] = field(default=(), compare=False)


Example = Chat | Text

_CANONICAL_JSON = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def content_digest(example: Example) -> bytes:
    """32 bytes of the example's content alone: the same row has the same wherever it stands."""
    # without the authors' own notation (roles by another name, content in parts), which changes
    # nothing of the content; images by what their files hold
    content: Any = getattr(example, "text", "")
    if isinstance(example, Chat):
        content = [drop_author_messages(example.messages), example.tools]
        if example.template_kwargs:
            content.append(example.template_kwargs)
        if example.images:
            content.append([picture.digest for picture in example.images])
    return hashlib.sha256(_CANONICAL_JSON.encode(content).encode("utf-8", "replace")).digest()


def digest_share(digest: bytes) -> float:
    """A number in [0, 1) that decides a row's split: by content alone, so that rows that are added
    move no others."""
    return int.from_bytes(digest[:8], "big") / 2**64


@dataclass(frozen=True)
class RowFormat:
    """A shape of rows: the keys it needs, what they hold, and the keys it may have."""

    name: str
    required_columns: tuple[str, ...]
    kind: Literal["turns", "pair", "calls", "text"]
    optional_columns: frozenset[str] = frozenset()

    def build(self, row: RawRow) -> Example:
        """Build the example of a row that has this format; raises UnusableRow."""
        if self.kind == "pair":
            return _build_pair_chat(
                row,
                *self.required_columns,
                extra_columns=[key for key in _CONTEXT_COLUMNS if key in self.optional_columns],
            )
        if self.kind == "calls":
            return _build_call_chat(row, *self.required_columns[:2])
        key = self.required_columns[0]
        if self.kind == "turns":
            if key == "chosen" and not _has_turns(unpack_json(row.data[key], "[")):
                raise UnusableRowError(
                    "chosen is not a list of turns", "beside a text it needs a prompt column"
                )
            return _build_chat(row, parse_turns(row.data[key], key))
        if "role" in row.data:
            raise UnusableRowError(
                "a row is one message, not a conversation", "the turns of a chat belong in one list"
            )
        text = _read_text_column(row, key)
        if not text.strip():
            raise UnusableRowError(EMPTY_TEXT)
        return Text(row.where, text)


# Of a column that is not required, several texts may be the paragraphs.
def _read_text_column(row: RawRow, key: str, *, required: bool = True) -> str:
    value = row.data.get(key)
    if not required and (
        value is None or (isinstance(value, list) and all(isinstance(item, str) for item in value))
    ):
        return "\n\n".join(value or ())
    if not isinstance(value, str):
        raise UnusableRowError(f"{key} is not text", f"it is {value_kind(value)}")
    return value


# Turns


SYSTEM_KEYS = (
    "system",
    "system_prompt",
    "system_message",
    "systemInstruction",
    "system_instruction",
)
TOOL_KEYS = ("tools", "functions")
# variables for the chat template, of a row: where TRL looks for them
TEMPLATE_KWARGS = "chat_template_kwargs"


def _build_chat(row: RawRow, messages: list[Message]) -> Chat:
    refuse_untrained_media(row.data)
    system_column = _first_filled_column(SYSTEM_KEYS, row.data)
    if system_column is not None:
        system_prompt = content_text(row.data[system_column], system_column)
        prompts = [message["content"] for message in messages[:1] if message["role"] == "system"]
        is_new = bool(system_prompt.strip()) and prompts != [system_prompt]
        if is_new and prompts:
            raise UnusableRowError(
                "two system prompts", f"one in {system_column}, another in the first message"
            )
        if is_new:
            messages = [{"role": "system", "content": system_prompt}, *messages]
    # There must be a turn to train, and nothing after it that waits for an answer.
    if not messages:
        raise UnusableRowError("no turns")
    if messages[-1]["role"] == "user":
        raise UnusableRowError(
            "ends with a user turn, nothing to learn from it", f"messages[{len(messages) - 1}]"
        )
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        roles = dict.fromkeys(message["role"] for message in messages)
        raise UnusableRowError(
            "no assistant turn, so nothing to learn", f"the roles are {', '.join(roles)}"
        )
    if all(message.get("train") is False for message in answers):
        raise UnusableRowError("every assistant turn has train: false, nothing to learn")
    tools_column = _first_filled_column(TOOL_KEYS, row.data)
    tools = parse_tools(row.data[tools_column]) if tools_column is not None else ()
    kwargs = unpack_json(row.data.get(TEMPLATE_KWARGS), "{") or {}
    if not isinstance(kwargs, dict):
        raise UnusableRowError(f"{TEMPLATE_KWARGS} is not an object", quote_value(kwargs))
    chat = Chat(row.where, tuple(messages), tools, template_kwargs=kwargs)
    # Hermes' rows have the tools in the prompt that the calls were generated after, and in a column
    prompt = str(messages[0]["content"])
    quoted_texts = (
        (json.dumps(text), json.dumps(text, ensure_ascii=False), repr(text))
        for text in iter_texts(list(tools))
    )
    is_prompt = bool(tools) and messages[0]["role"] == "system"
    if is_prompt and all(any(form in prompt for form in quoted) for quoted in quoted_texts):
        return replace(chat, tools=(), notes=(NOTE_TOOLS_IN_TEXT,))
    return chat


def _first_filled_column(keys: Iterable[str], data: Mapping[str, Any]) -> str | None:
    return next((key for key in keys if data.get(key) not in (None, "", [], {})), None)


# A question and its answer


# What a question is about, in a column of its own: of an instruction, and where data.columns maps
# it.
_CONTEXT_COLUMNS = ("input", "context")


def _build_pair_chat(
    row: RawRow, question: str, answer: str, *, extra_columns: Iterable[str]
) -> Chat:
    prompt, reply = (
        _wrap_single_turn(unpack_json(row.data.get(key), "[{")) for key in (question, answer)
    )
    if _has_turns(prompt) or _has_turns(reply):
        messages = _join_pair_turns(prompt, reply, question, answer)
    else:
        prompt, reply = _read_text_column(row, question), _read_text_column(row, answer)
        # LLaMA-Factory's alpaca rows have earlier exchanges here: [[question, answer], …]
        history = unpack_json(row.data.get("history"), "[") or []
        if not isinstance(history, list) or not all(isinstance(turn, list) for turn in history):
            raise UnusableRowError(
                "history is not a list of [question, answer]", quote_value(history)
            )
        messages = [message for turn in history for message in parse_text_pair(turn, "history")]
        messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
    extra_texts = [
        _read_text_column(row, key, required=False) for key in extra_columns if key != question
    ]
    extra_texts = [text for text in extra_texts if text.strip()]
    last_question = next(
        (message for message in reversed(messages) if message["role"] == "user"), None
    )
    if extra_texts and last_question is not None:
        # as LLaMA-Factory joins alpaca's columns
        last_question["content"] = "\n".join([last_question["content"], *extra_texts])
        last_question.pop(AUTHOR_MESSAGE, None)
    return _build_chat(row, messages)


def _has_turns(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, dict) for item in value)


# A single turn as a list of one: rows of preferences have such.
def _wrap_single_turn(value: Any) -> Any:
    return [value] if isinstance(value, dict) and any(key in value for key in ROLE_KEYS) else value


def _join_pair_turns(prompt: Any, reply: Any, question: str, answer: str) -> list[Message]:
    questions, answers = (
        [{"role": "user", "content": prompt}],
        [{"role": "assistant", "content": reply}],
    )
    if _has_turns(reply):
        answers = parse_turns(reply, answer)
    # the reply repeats the prompt, as `chosen` often does
    if any(message["role"] == "user" for message in answers):
        return answers
    if _has_turns(prompt):
        questions = parse_turns(prompt, question)
    for name, turns in ((question, questions), (answer, answers)):
        if not isinstance(turns[0]["content"], str) and not turns[0].get("tool_calls"):
            raise UnusableRowError(
                f"{name} is not text", f"it is {value_kind(turns[0]['content'])}"
            )
    return [*questions, *answers]


# xLAM's rows: a query, the calls that answer it, and tools whose parameters are listed without a
# schema.
def _build_call_chat(row: RawRow, question: str, calls: str) -> Chat:
    answers = unpack_json(row.data.get(calls), "[{")
    call_list = answers if isinstance(answers, list) else [answers]
    if not call_list or not all(
        isinstance(call, dict) and isinstance(call.get("name"), str) for call in call_list
    ):
        raise UnusableRowError(
            f"{calls} are no calls of tools",
            f"{quote_value(answers)}; map an answer with data.columns",
        )
    question_turn = {"role": "user", "content": _read_text_column(row, question)}
    call_turns = parse_turns([{"role": "assistant", "content": "", "tool_calls": call_list}], calls)
    chat = _build_chat(row, [question_turn, *call_turns])
    tools = []
    for tool in chat.tools:
        parameters = tool.get("parameters")
        is_named_alone = isinstance(parameters, dict) and all(
            isinstance(one, dict) for one in parameters.values()
        )
        if is_named_alone and "properties" not in parameters:
            tool = {**tool, "parameters": {"type": "object", "properties": parameters}}
        tools.append(tool)
    return replace(chat, tools=tuple(tools))


_OPTIONAL_TURN_COLUMNS = frozenset({*TOOL_KEYS, *SYSTEM_KEYS, TEMPLATE_KWARGS, *ROW_IMAGE_COLUMNS})
TURN_COLUMNS = (
    "messages",
    "conversations",
    "conversation",
    "dialog",
    "dialogue",
    "dialogs",
    "turns",
    "contents",
)
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

_FORMAT_NAMES = {"conversations": "sharegpt", "instruction/output": "alpaca"}
# In the order in which they are tried: the first whose needed keys are all there.
FORMATS: tuple[RowFormat, ...] = (
    *(
        RowFormat(_FORMAT_NAMES.get(key, key), (key,), "turns", _OPTIONAL_TURN_COLUMNS)
        for key in TURN_COLUMNS
    ),
    *(
        RowFormat(
            _FORMAT_NAMES.get("/".join(pair), "/".join(pair)),
            pair,
            "pair",
            # an instruction has its context beside it without a mapping
            _OPTIONAL_TURN_COLUMNS.union(
                {"history"}, _CONTEXT_COLUMNS * (pair[0] == "instruction")
            ),
        )
        for pair in PAIR_COLUMNS
    ),
    RowFormat("query/answers", ("query", "answers", "tools"), "calls", _OPTIONAL_TURN_COLUMNS),
    RowFormat("chosen", ("chosen",), "turns", _OPTIONAL_TURN_COLUMNS),
    *(RowFormat(key, (key,), "text") for key in TEXT_COLUMNS),
)

# what a chat may have beside its format's own columns, where data.columns maps it
_MAPPABLE_COLUMNS = {
    "pair": frozenset({*_CONTEXT_COLUMNS, "reasoning"}),
    "turns": frozenset({"reasoning"}),
}
KNOWN_COLUMNS = _MAPPABLE_COLUMNS["pair"].union(
    *((*shape.required_columns, *shape.optional_columns) for shape in FORMATS)
)
_REQUIRED_COLUMNS = frozenset(
    key for shape in FORMATS if shape.kind != "calls" for key in shape.required_columns
)


def recognise_format(
    keys: Collection[str], columns: Mapping[str, str] | None = None
) -> RowFormat | None:
    """The format of a row with these keys, or None. A format whose needed keys the user mapped
    (`data.columns`) goes before all others; what else was mapped, a chat may have too."""
    user_columns = columns or {}
    candidates = [
        row_format
        for row_format in FORMATS
        if all(key in keys for key in row_format.required_columns)
    ]
    if not candidates:
        return None
    # so that data.columns={prompt: q, completion: a} is not overruled by a `messages` column of
    # another meaning
    row_format = max(
        candidates, key=lambda one: all(key in user_columns for key in one.required_columns)
    )
    mapped_columns = _MAPPABLE_COLUMNS.get(row_format.kind, frozenset()).intersection(user_columns)
    return replace(row_format, optional_columns=row_format.optional_columns | mapped_columns)


def rename_columns(row: RawRow, columns: Mapping[str, str]) -> RawRow:
    """The row with the user's column names replaced by the known ones."""
    if not columns or is_processed_row(row.data):
        return row
    known_names = {user_name: known for known, user_name in columns.items()}
    # the user's column takes the known name; a column that had this name already gives way to it
    kept_cells = {
        key: value for key, value in row.data.items() if key not in columns or key in known_names
    }
    return replace(
        row,
        data={known_names.get(key, key): value for key, value in kept_cells.items()},
        missing=tuple(known_names.get(key, key) for key in row.missing),
    )


# key of a processed row that says that `make style` wrote it, and data.style is not to be applied
# again
STYLED_KEY = "styled"
_PROCESSED_COLUMNS = frozenset(
    {"messages", "images", "tools", TEMPLATE_KWARGS, "text", "source", "id", STYLED_KEY}
)


def is_processed_row(keys: Collection[str]) -> bool:
    """True if a row with these keys is one that `make process` wrote."""
    has_content = "messages" in keys or "text" in keys
    return has_content and "source" in keys and "id" in keys and _PROCESSED_COLUMNS.issuperset(keys)


def require_known_columns(data: DataConfig) -> None:
    """Raises DataError when `data.columns` names a column that no format has, or one of the user's
    twice."""
    duplicates = [
        user_name for user_name, count in Counter(data.columns.values()).items() if count > 1
    ]
    if duplicates:
        raise DataError(
            f"data.columns: {one_line(duplicates[0])} is mapped to two columns; each of yours can"
            " stand for one"
        )
    for known in data.columns:
        if known not in KNOWN_COLUMNS:
            name = f"{one_line(known)} is not a column of a known format"
            hint = "; ".join(filter(None, [name, did_you_mean(known, KNOWN_COLUMNS)]))
            raise DataError(
                f"data.columns: {hint} (write known: yours; known:"
                f" {', '.join(sorted(KNOWN_COLUMNS))})"
            )


def _format_columns(row: RawRow) -> str:
    names = [one_line(str(key), limit=40) for key in row.data]
    return ", ".join(names[:30] + ["…"] * (len(names) > 30)) or "none"


# Rows


def to_example(
    row: RawRow, row_format: RowFormat, data: DataConfig | None = None
) -> Example | BadRow:
    """Convert a row of this format to an example, or to a BadRow with a reason. `data` says whether
    turns are merged and rows with empty answers left out (`drop_empty`); such a row comes back as a
    BadRow with `is_asked`.
    """
    data = data or DataConfig()
    na_columns = frozenset(row.missing * data.keep_default_na)
    if na_columns:
        row = replace(
            row, data={key: value for key, value in row.data.items() if key not in na_columns}
        )
    # the file's first rows gave the format; a later row may lack a column, or have null in it
    missing = [key for key in row_format.required_columns if key not in row.data]
    if missing:
        detail = (
            f"format {row_format.name}; its keys:"
            f" {one_line(', '.join(map(str, row.data)) or 'none')}"
        )
        if missing[0] in na_columns:
            detail = NOTE_NA
        return BadRow(row.where, f"{missing[0]} is missing", detail)
    is_text = row_format.kind == "text"
    try:
        # columns that the user mapped (data.columns) are meant, whatever stands beside them
        is_mapped = all(key in data.columns for key in row_format.required_columns)
        if not is_mapped and not OTHER_KIND_COLUMNS.isdisjoint(row.data):
            refuse_other_kind(row.data, row_format.required_columns, is_text=is_text)
        built_row = row
        if data.turns_without_roles != "fail" and not is_text:
            turns = {key: alternate_roles(row.data[key]) for key in row_format.required_columns}
            built_row = replace(row, data=row.data | turns)
        example = row_format.build(built_row)
        if isinstance(example, Chat):
            messages, pictures = place_images(example.messages, row, data)
            example = replace(example, messages=messages, images=pictures)
        if "reasoning" in row_format.optional_columns and isinstance(example, Chat):
            # the think text that data.columns names goes into the last answer
            text = _read_text_column(row, "reasoning", required=False)
            last_answer = next(
                message for message in reversed(example.messages) if message["role"] == "assistant"
            )
            if text.strip():
                if last_answer.setdefault("reasoning_content", text) != text:
                    raise UnusableRowError(
                        "a message has two different think texts",
                        "one in the column, another in the answer",
                    )
                if AUTHOR_MESSAGE in last_answer:
                    last_answer[AUTHOR_MESSAGE] = {
                        **last_answer[AUTHOR_MESSAGE],
                        "reasoning_content": text,
                    }
        unused = _unused_columns(row, row_format, example, data)
    except UnusableRowError as error:
        return BadRow(
            row.where,
            error.reason,
            error.detail,
            is_asked=error.reason == EMPTY_TEXT and data.drop_empty,
        )
    except RecursionError:  # tables have no limit of depth as JSON lines do
        return BadRow(row.where, "nested too deeply")
    notes = [*row.notes, *example.notes]
    if not na_columns.isdisjoint(row_format.optional_columns):
        notes.append(NOTE_NA)
    if isinstance(example, Chat):
        return _finish_chat(example, unused, notes, data)
    if _CONTROL_CHARACTER.search(example.text):
        notes.append(NOTE_CONTROL)
    return replace(example, notes=tuple(notes), unused=unused)


@functools.lru_cache(maxsize=1_000)
def _expected_columns(row_format: RowFormat) -> frozenset[str]:
    # A row with one of these is refused, unless the user mapped its answer and so meant to leave
    # it.
    refused = (*REJECTED_COLUMNS, *NEGATIVE_COLUMNS) * (row_format.kind != "text")
    columns = frozenset(
        (
            *row_format.required_columns,
            *row_format.optional_columns,
            *refused,
            *ROW_IMAGE_COLUMNS,
            *UNTRAINED_MEDIA_COLUMNS,
            "id",
            "source",
            STYLED_KEY,
        )
    )
    # of these a row's first is read: a second one is unused
    return columns.difference(SYSTEM_KEYS, TOOL_KEYS)


def _unused_columns(
    row: RawRow, row_format: RowFormat, example: Example, data: DataConfig
) -> tuple[UnusedColumn, ...]:
    expected, is_text = _expected_columns(row_format), isinstance(example, Text)
    # of several columns for a system prompt, or for tools, the first is read
    read_columns = [
        _first_filled_column(keys, row.data) for keys in (SYSTEM_KEYS, TOOL_KEYS) if not is_text
    ]
    names = [name for name in row.data if name not in expected and name not in read_columns]
    if not names:
        return ()
    mapping_start: tuple[tuple[str, str], ...] = ()
    if isinstance(example, Text):
        contents, example_text, mappable = [example.text], example.text, frozenset({"completion"})
        key = row_format.required_columns[0]
        mapping_start = (("prompt", data.columns.get(key, key)),)
    else:
        messages = drop_author_messages(example.messages)
        contents = [message["content"] or "" for message in messages]
        example_text = "\n".join(iter_texts([*example.tools, *messages]))
        mappable = row_format.optional_columns.union(_MAPPABLE_COLUMNS.get(row_format.kind, ()))
        # a second system prompt, or other think text, would make the row a bad one
        mappable = mappable.difference(message["role"] for message in messages)
        if example.images:
            mappable -= {"images"}
        if any("reasoning_content" in message for message in messages):
            mappable -= {"reasoning"}
    lines = "\n".join(contents).split("\n")
    unused: list[UnusedColumn] = []
    for name in names:
        value, user_name = row.data[name], data.columns.get(name, name)
        if value in (None, "", [], {}):
            continue
        kind = missed_column_kind(name, value, is_text=is_text, answer_chars=len(contents[-1]))
        texts = list(iter_texts(unpack_json(value, "[{")))
        # what the example holds is not lost, nor is a text that is all of it, as some data sets
        # have it rendered too
        is_in_example = all(text.strip() in example_text for text in texts)
        is_rendered = not is_text and all(line in "\n".join(texts) for line in lines)
        if texts and kind not in ("mask", "label") and (is_in_example or is_rendered):
            kind = ""
        column = COLUMN_KINDS.get(kind, {}).get("column", "")
        mapping: tuple[tuple[str, str], ...] = ()
        if column in mappable and (
            isinstance(value, str)
            or column in ("tools", "images")
            or (column == "context" and value == texts)
        ):
            mapping = (*mapping_start, (column, user_name))
        unused.append((user_name, kind, mapping))
    return tuple(unused)


def _finish_chat(
    chat: Chat, unused: tuple[UnusedColumn, ...], notes: list[str], data: DataConfig
) -> Chat | BadRow:
    messages = chat.messages
    if data.merge_consecutive:
        messages = merge_turns(messages)
    roles = [message["role"] for message in messages]
    # the results of parallel calls stand in a row
    if any(role == following != "tool" for role, following in itertools.pairwise(roles)):
        notes.append(NOTE_TWO_IN_A_ROW)
    unread_keys: set[str] = set()
    for message in messages:
        unread_keys.update(message.pop("_unread", ()))
        if message["role"] == "assistant":
            has_more = message.get("tool_calls") or "reasoning_content" in message
            if (
                not (message["content"] or "").strip()
                and not has_more
                and message.get("train", True)
            ):
                notes.append(NOTE_EMPTY)
        elif message.pop("_asked", False):
            notes.append(NOTE_USER_TRAINED)
    notes += [NOTE_UNREAD_KEY.format(key=one_line(key, limit=40)) for key in sorted(unread_keys)]
    if NOTE_EMPTY in notes and data.drop_empty:
        return BadRow(chat.where, "the answer is empty", is_asked=True)
    if next(role for role in roles if role != "system") == "assistant":
        notes.append(NOTE_STARTS_WITH_ASSISTANT)
    if roles[-1] == "tool":
        notes.append(NOTE_ENDS_WITH_TOOL)
    texts = (value for message in messages for value in message.values())
    if any(isinstance(text, str) and _CONTROL_CHARACTER.search(text) for text in texts):
        notes.append(NOTE_CONTROL)
    return replace(chat, messages=messages, unused=unused, notes=tuple(dict.fromkeys(notes)))


# A file has the format of its first row that has one; so many rows are looked at.
FORMAT_PROBE_ROWS = 20


def detect_format(
    rows: Iterator[RawRow | BadRow], data: DataConfig
) -> tuple[list[RawRow | BadRow], RowFormat | None]:
    """The rows that had to be read to know a file's format, and that format; None where all rows
    are bad. Raises DataError where none of the first rows has a known format, or `data.columns`
    names a column that is not there.
    """
    rows_read: list[RawRow | BadRow] = []
    good_rows: list[RawRow] = []
    row_format: RowFormat | None = None
    pending_columns = set(data.columns.values())
    optional_columns = {
        user_name for known, user_name in data.columns.items() if known not in _REQUIRED_COLUMNS
    }
    for raw in rows:
        rows_read.append(raw)
        if isinstance(raw, BadRow):
            continue
        good_rows.append(raw)
        pending_columns.difference_update(raw.data)
        if is_processed_row(raw.data):  # mapped already
            pending_columns.clear()
        row_format = row_format or recognise_format(
            rename_columns(raw, data.columns).data, data.columns
        )
        # what every row needs is in the first; what a row may lack, in one of the first
        if (
            not pending_columns <= optional_columns
            or (row_format is not None and not pending_columns)
            or len(good_rows) == FORMAT_PROBE_ROWS
        ):
            break
    if not good_rows:
        return rows_read, None
    first_row = good_rows[0]
    # a file may lack what rows may lack, where it has no column that could be meant (a misspelt
    # name)
    names = {name for row in good_rows for name in row.data if "about" not in kinds_in_name(name)}
    if row_format is not None:
        names -= _expected_columns(row_format).union(
            row_format.optional_columns, data.columns.values()
        )
    if pending_columns and (names or not pending_columns <= optional_columns):
        missing_column = next(name for name in data.columns.values() if name in pending_columns)
        raise DataError(
            f"{first_row.where}: data.columns names {one_line(missing_column)}; the columns are: "
            f"{_format_columns(first_row)}"
        )
    if row_format is None:
        raise DataError(
            f"{first_row.where}: columns found: {_format_columns(first_row)}. Expected one of:"
            " messages; conversations; instruction + output; prompt + completion; question +"
            " answer; text (docs/data.md has the others, and what is no supervised example)."
            f" {unknown_format_hint(rename_columns(first_row, data.columns).data)}"
        )
    return rows_read, row_format
