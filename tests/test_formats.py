"""Formats: what rows of every shape become, what is noted of them, and why some cannot be used."""

import json

import pytest
from hypothesis import example as case
from hypothesis import given, settings
from hypothesis import strategies as st

from sft_play.config.schema import DataConfig
from sft_play.data.sources import formats
from sft_play.data.sources.files import read_rows
from sft_play.data.sources.formats import FORMATS, Chat, Text, detect_format, recognise_format, to_example
from sft_play.data.sources.messages import AUTHOR_MESSAGE, ROLES, merge_turns
from sft_play.data.sources.raw import BadRow, RawRow
from sft_play.errors import DataError
from sft_play.log import escape_control
from tests.bundled import ORIGINS, data_file
from tests.conftest import chat

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALL_PART = {"type": "function_call", "text": None, "value": '{"name": "f", "arguments": "{\\"x\\": 1}"}'}
OF_GEMINI = [{"role": "user", "parts": [{"text": "q"}]}, {"role": "model", "parts": ["a"]}]


def example(row: dict, **options):
    shape = recognise_format(row)
    assert shape is not None, row
    return to_example(RawRow("f:1", row), shape, DataConfig(**options))


def turns(row: dict, **options) -> list[tuple[str, str]]:
    found = example(row, **options)
    assert isinstance(found, Chat), found
    return [(message["role"], message["content"]) for message in found.messages]


def answer(**message):
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", **message}]}


QA = [("user", "q"), ("assistant", "a")]
SQA = [("system", "s"), *QA]


@pytest.mark.parametrize(("row", "expected"), [
    *((row, QA) for row in (
        {"messages": [{"role": "Human ", "content": "q"}, {"role": "AI", "content": "a"}]},
        {"messages": json.dumps(chat("q", "a")["messages"])},
        {"messages": [json.dumps(message) for message in chat("q", "a")["messages"]]},
        {"conversation": [{"human": "q", "assistant": "a"}]}, {"dialogue": [["q", "a"]]},
        {"turns": [{"speaker": "user", "text": "q"}, {"speaker": "bot", "text": "a"}]},
        {"instruction": "q", "response": "a"}, {"query": "q", "response": "a"}, {"input": "q", "output": "a"},
        {"input": [{"role": "user", "content": "q"}], "output": "a"}, {"user": "q", "assistant": "a"},
        {"problem": "q", "solution": "a", "answer": "4"}, {"inputs": "q", "targets": "a"},
        {"prompt": "q", "chosen": "a"}, {"prompt": "q", "chosen": chat("q", "a")["messages"], "rejected": []},
        {"chosen": chat("q", "a")["messages"], "rejected": []},
        {"prompt": [{"role": "user", "content": "q"}], "completion": "a"},
        {"prompt": "q", "completion": [{"role": "assistant", "content": "a"}], "label": True},
    )),
    ({"conversation": [{"system": "s", "input": "q", "output": "a"}]}, SQA),
    ({"systemInstruction": {"parts": [{"text": "s"}]}, "contents": OF_GEMINI}, SQA),
    ({"system": "s", "messages": chat("q", "a")["messages"]}, SQA),
    ({"system_prompt": "s", "question": "q", "response": "a"}, SQA),
    *(({"instruction": "q", key: "c", "response": "a"}, [("user", "q\nc"), QA[1]]) for key in ("context", "input")),
    ({"instruction": "q", "output": "a", "history": '[["x", "y"]]'}, [("user", "x"), ("assistant", "y"), *QA]),
])  # fmt: skip
def test_chats_are_read_from_the_columns_that_data_sets_use(row, expected):
    assert turns(row) == expected


def test_text_is_read_from_its_usual_columns_and_what_process_wrote_needs_no_mapping():
    for key in ("text", "content", "document"):
        assert example({key: "words"}) == Text("f:1", "words")
    row, data = {"messages": [], "source": "raw:1", "id": "0"}, DataConfig(columns={"messages": "chat"})
    assert formats.rename_columns(RawRow("f:1", row), data.columns).data == row
    detect_format(iter([RawRow("f:1", row)]), data)
    with pytest.raises(DataError, match=r"data\.columns names chat"):
        detect_format(iter([RawRow("f:1", {"messages": []})]), data)


def test_the_first_format_that_fits_is_taken_and_a_mapping_goes_before_it():
    keys = {"messages", "question", "answer", "text"}
    assert recognise_format(keys).name == "messages"
    assert recognise_format(keys, {"question": "frage", "answer": "antwort"}).name == "question/answer"
    row = formats.rename_columns(
        RawRow("f:1", {"q": "a", "r": "b", "messages": []}), {"prompt": "q", "completion": "r"}
    )
    assert recognise_format(row.data, {"prompt": "q", "completion": "r"}).name == "prompt/completion"


class TestMessages:
    def last(self, **message):
        return example(answer(**message)).messages[-1]

    @pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
    def test_think_text_is_kept_beside_the_answer(self, key):
        assert self.last(content="a", **{key: "hm"})["reasoning_content"] == "hm"

    @pytest.mark.parametrize("message", [
        {"content": None, "tool_calls": [CALL]}, {"content": "", "tool_calls": json.dumps([CALL])},
        {"tool_calls": [{"function": json.dumps(CALL["function"])}]},
        {"tool_calls": [{"name": "f", "parameters": {"x": 1}}]},
        {"content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}},
        {"content": [{"type": "tool_call", "value": '{"name": "f", "arguments": {"x": 1}}'}]},
        {"content": [CALL_PART]},
    ])  # fmt: skip
    def test_tool_calls_are_found_wherever_they_stand(self, message):
        found = self.last(**message)
        (call,) = found["tool_calls"]
        assert (found["role"], found["content"] or None, call["function"]["name"]) == ("assistant", None, "f")
        assert call["function"]["arguments"] in ({"x": 1}, '{"x": 1}')  # as it is written

    def test_results_of_functions_are_tool_turns(self):
        row = chat("q", "a")
        row["messages"].insert(1, {"role": "function", "name": "f", "content": "42"})
        given = row["messages"][1]
        assert example(row).messages[1] == {"role": "tool", "content": "42", "name": "f", AUTHOR_MESSAGE: given}
        row["messages"][1] = {"role": "tool", "content": {"temp": 3}}
        assert example(row).messages[1]["content"] == '{"temp": 3}'
        del row["messages"][1]["content"]
        row["messages"][1]["role"] = "function"
        assert 'unknown role "function"' in str(example(row))

    @pytest.mark.parametrize(("message", "reason"), [
        ({"content": [{"type": "image", "url": "x"}]}, "an image in an assistant's turn"),
        ({"content": [{"type": "video", "url": "x"}]}, "a content part is video, and only text and images are trained"),
        ({"content": "", "tool_calls": [{"function": {}}]}, "a tool call has no function name"),
        ({"content": "", "tool_calls": 3}, "tool_calls is not a list of objects"),
        ({"tool_calls": [{"name": "f", "arguments": "{x}"}]}, "arguments are a string that is not JSON"),
        ({"tool_calls": [{"name": "f", "arguments": '{"a": 1, "a": 2}'}]}, 'the key "a" occurs twice'),
        ({"tool_calls": [{"name": "f", "arguments": '{"a": "\\ud83d"}'}]}, "half of a surrogate pair"),
        ({"tool_calls": [{"name": "f", "arguments": [1]}]}, "tool call arguments are not an object"),
        ({"content": [{"type": ["text"], "text": "x"}]}, "a content part is not text"),
        ({"content": "a", "train": False}, "every assistant turn has train: false"),
        ({"content": "a", "weight": 0.5}, "than 0 and 1 (messages[1].weight is 0.5; it is not rounded)"),
        ({"content": "a", "masked": "yes"}, "a loss weight other than 0 and 1"),
        ({"content": "a", "ignore": True, "train": True}, "both trained and not"),
        ({"content": "a", "mask": True}, "may mean that it is trained or that it is not"),
        ({"content": "a", "train_detail": [{"train": True}]}, "a part of a message is to be trained"),
    ])  # fmt: skip
    def test_a_message_that_cannot_be_used_says_where_and_why(self, message, reason):
        assert reason in str(example(answer(**message)))


class TestRows:
    @pytest.mark.parametrize(("row", "reason"), [
        ({"messages": [{"role": "system", "content": "s"}]}, "no assistant turn, so nothing to learn"),
        ({"messages": [{"content": "a"}]}, "a message has no role"),
        ({"messages": [1]}, "a message is not an object"),
        ({"instruction": "a", "output": "b", "history": ["x"]}, "history is not a list"),
        ({**chat("q", "a"), "videos": ["x.mp4"]}, "the row has videos, and only text and images are trained"),
        ({"prompt": "q", "completion": "a", "label": False}, "label is false"),
        ({"role": "user", "content": "q"}, "a row is one message, not a conversation"),
        ({"messages": "[{'role': 'user'}]"}, "messages is text that is not a JSON list"),
        ({**chat("q", "a"), "tools": "{"}, "tools is a string that is not JSON"),
        ({**chat("q", "a"), "tools": [1]}, "tools is not a list of objects"),
        ({**chat("q", "a"), "system": 3}, "content is not text (system is a number"),
        ({"chosen": "\n\nHuman: q"}, "chosen is not a list of turns"),
        ({"prompt": None, "completion": [{"role": "assistant", "content": "a"}]}, "prompt is not text"),
        ({"messages": [{"role": "user", "content": "q", "tool_calls": [CALL]}]}, "tool calls in a user turn"),
        ({**chat("q", "a"), "chat_template_kwargs": "no_think"}, "chat_template_kwargs is not an object"),
        ({"messages": [{"role": "narrator", "content": "q"}]}, f"(messages[0]; known: {', '.join(ROLES)})"),
        ({"messages": [{"role": "Thinking", "content": "hm"}]}, "put think text into reasoning_content of the"),
    ])  # fmt: skip
    def test_a_row_that_cannot_be_used_says_why(self, row, reason):
        assert reason in str(example(row))

    def test_two_system_prompts_are_refused_and_the_same_twice_is_one(self):
        row = {"messages": [{"role": "system", "content": "s"}, *chat("q", "a")["messages"]], "system": "s"}
        assert turns(row) == SQA
        assert "two system prompts" in str(example({**row, "system": "t"}))

    def test_tools_that_stand_in_the_system_prompt_too_are_given_once(self):
        parameters = {"type": "object", "properties": {"place": {"type": "string"}}}
        look = {"name": "look", "description": 'Look at "it".\nTwice, at Ann\'s.', "parameters": parameters}
        tools = [{"type": "function", "function": look}]
        for text in (json.dumps(tools), json.dumps(tools, ensure_ascii=False, indent=2), str(tools)):
            prompt = f"You are a function calling AI model. <tools> {text} </tools> Use them."
            said = (("system", prompt), ("human", "q"), ("gpt", "a"))
            turns_ = [{"from": role, "value": text} for role, text in said]
            for column in (tools, json.dumps(tools)):
                found = example({"conversations": turns_, "tools": column})
                assert (found.tools, found.notes) == ((), (formats.NOTE_TOOLS_IN_TEXT,))
                assert found.messages[0]["content"] == prompt
        other = [*tools, {"type": "function", "function": {"name": "listen"}}]
        assert example({"conversations": turns_, "tools": other}).tools == tuple(other)
        brief = [{"from": "system", "value": 'Use "look" where it helps.'}, *turns_[1:]]
        assert example({"conversations": brief, "tools": tools}).tools == tuple(tools)
        assert example({"conversations": turns_[1:], "tools": tools}).tools == tuple(tools)

    @pytest.mark.parametrize("word", ["NaN", "None", "null", "N/A"])
    def test_a_cell_that_says_nothing_is_empty_or_text_as_the_option_says(self, word):
        def read(data, missing, **options):
            return to_example(RawRow("f:2", data, missing=missing), recognise_format(data), DataConfig(**options))

        row = {"question": "q", "answer": word}
        bad = read(row, ("answer",))
        assert bad.reason == "answer is missing"
        assert "data.keep_default_na=false reads it as text" in bad.detail
        assert read(row, ("answer",), keep_default_na=False).messages[-1]["content"] == word
        assert read(row, ()).messages[-1]["content"] == word  # a row of JSON
        row = {"instruction": "q", "input": word, "output": "a", "score": word}
        found = read(row, ("input", "score"))
        assert (found.messages[0]["content"], found.notes, found.unused) == ("q", (formats.NOTE_NA,), ())
        assert read(row, ("score",)).notes == ()
        assert read(row, ("input",), keep_default_na=False).messages[0]["content"] == f"q\n{word}"
        assert read({"text": word}, ("text",)).reason == "text is missing"
        renamed = RawRow("f:2", {"frage": "q", "antwort": word}, missing=("antwort",))
        assert formats.rename_columns(renamed, {"answer": "antwort"}).missing == ("answer",)

    def test_tools_may_be_text_one_object_or_a_list_of_texts(self):
        for tools in ('[{"name": "f"}]', {"name": "f"}, ['{"name": "f"}'], [{"name": "f"}]):
            assert example({**chat("q", "a"), "tools": tools}).tools == ({"name": "f"},)
        assert example({**chat("q", "a"), "functions": [{"name": "f"}]}).tools == ({"name": "f"},)
        for tools in (None, "", "[]", "null", [], {}):
            assert example({**chat("q", "a"), "tools": tools}).tools == ()

    @pytest.mark.parametrize("empty", ["", "  \n"])
    def test_an_empty_answer_is_noted_or_left_out_where_asked(self, empty):
        for row in (chat("q", empty), {"question": "q", "answer": empty}):
            assert example(row).notes == (formats.NOTE_EMPTY,)
            found = example(row, drop_empty=True)
            assert (found.reason, found.is_asked) == ("the answer is empty", True)
        assert example(answer(content=empty, tool_calls=[CALL])).notes == ()
        assert [example({"text": empty}, drop_empty=drops).is_asked for drops in (False, True)] == [False, True]

    def test_turns_of_the_same_role_are_noted_or_joined_where_asked_but_for_what_differs(self):
        row = {"messages": [{"role": "user", "content": "a"}, *chat("b", "c")["messages"]]}
        assert example(row).notes == (formats.NOTE_TWO_IN_A_ROW,)
        assert turns(row, merge_consecutive=True) == [("user", "a\n\nb"), ("assistant", "c")]
        assert example(row, merge_consecutive=True).notes == ()

        def assistant(**keys):
            return {"role": "assistant", "content": "", **keys}

        # calls and think text are kept
        merged = merge_turns([
            assistant(content="a", reasoning_content="x"), assistant(tool_calls=[CALL]),
            *({"role": "tool", "content": text} for text in ("1", "2")),
            assistant(content="b", train=False), assistant(content="c"),
            *({"role": "user", "content": text, "name": name} for text, name in (("d", "Ann"), ("e", "Bob"))),
        ])  # fmt: skip
        assert merged[0] == {"role": "assistant", "content": "a", "reasoning_content": "x", "tool_calls": [CALL]}
        assert [message["content"] for message in merged] == ["a", "1", "2", "b", "c", "d", "e"]

    def test_what_is_odd_is_noted(self):
        assert example({"text": "esc \x1b[31m"}).notes == (formats.NOTE_CONTROL,)
        result = {"role": "tool", "content": "r"}
        assert example({"messages": [*chat("q", "a")["messages"], result]}).notes == (formats.NOTE_ENDS_WITH_TOOL,)


YES = ("train", "training", "trainable", "train_on_turn", "learn", "loss", "weight", "loss_weight", "loss_scale")
NO = ("masked", "is_masked", "ignore", "ignored", "ignore_loss")


@pytest.mark.parametrize("key", [*YES, *NO])
def test_every_key_that_says_a_turn_is_not_trained_is_read(key):
    for value, is_trained in ((False, key in NO), (0.0, key in NO), (1, key in YES), (None, True)):
        row = {"messages": [*chat("a", "b")["messages"], *chat("c", "d")["messages"]]}
        row["messages"][1][key] = value
        assert [message.get("train", True) for message in example(row).messages] == [True, is_trained, True, True]


class TestFirstRows:
    def rows(self, *found):
        return iter([row if isinstance(row, BadRow) else RawRow(f"f:{n}", row) for n, row in enumerate(found, 1)])

    def test_the_first_row_that_has_one_decides(self):
        read, shape = detect_format(self.rows(BadRow("f:0", "x"), {"odd": 1}, chat("q", "a")), DataConfig())
        assert (shape.name, len(read)) == ("messages", 3)
        assert "messages is missing" in str(to_example(read[1], shape))

    def test_rows_of_no_format_are_an_error_and_bad_rows_alone_are_none(self):
        with pytest.raises(DataError, match=r"f:1: columns found: odd\. Expected one of: messages"):
            detect_format(self.rows(*[{"odd": 1}] * 50), DataConfig())
        assert detect_format(self.rows(BadRow("f:1", "x")), DataConfig())[1] is None


MESSAGE_KEYS = [
    *("role", "from", "content", "value", "type", "text", "tool_calls", "function", "name", "arguments", "weight"),
    *("train", "parts", "reasoning", "reasoning_content", "function_call", "user", "assistant", "x"),
]
WRITTEN_KEYS = {"role", "content", "tool_calls", "reasoning_content", "name", "tool_call_id", "train", AUTHOR_MESSAGE}
SIMPLE = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SIMPLE | st.sampled_from([*ROLES, "[", "{}"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(MESSAGE_KEYS), inner, max_size=5),
    max_leaves=12,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from([*ROLES, "function", "x"]) | VALUES, "content": st.text(max_size=5) | VALUES},
        optional={"tool_calls": VALUES, "weight": VALUES, "name": VALUES, "function_call": VALUES, "reasoning": VALUES},
    ),
    max_size=5,
)
KEYS = sorted(formats.KNOWN_COLUMNS | {"images", "label", "id", "source", "rejected"})


@given(st.sampled_from(FORMATS), st.dictionaries(st.sampled_from(KEYS), VALUES | MESSAGES, max_size=4), st.data())
@case(FORMATS[0], {"messages": [{"role": "user", "content": {"type": []}}]}, None)
@case(FORMATS[0], {"messages": [{"role": "gpt", "content": ""}]}, None)
@settings(max_examples=40, deadline=None)
def test_rows_of_any_shape_end_in_an_example_or_a_bad_row(shape, row, data):
    if data is not None:
        row = {**{key: data.draw(VALUES | MESSAGES) for key in shape.required_columns}, **row}
    for options in ({}, {"merge_consecutive": True, "drop_empty": True}):
        found = to_example(RawRow("f:1", row), shape, DataConfig(**options))
        if isinstance(found, BadRow):
            assert str(found) == escape_control(str(found)).replace("\n", " ")
        elif isinstance(found, Chat):
            assert any(message["role"] == "assistant" for message in found.messages)
            for message in found.messages:
                assert message["role"] in {"system", "user", "assistant", "tool"}
                assert isinstance(message["content"], str) or message["tool_calls"]
                assert set(message) <= WRITTEN_KEYS | {"call_id", "tool_plan"}


REAL_FILES = {
    "bundled": {"questions/train.jsonl": 12, "alpaca.json": 8, "sharegpt_tools.json": 3, "typed_parts.jsonl": 2,
                "openai_chat.jsonl": 4, "openai_tools.jsonl": 3},
    "shared": {"gsm8k/train.jsonl": 7_473, "llamafactory/identity.json": 91,
               "llamafactory/glaive_toolcall_en_demo.json": 300, "llamafactory/reason_tool_use_demo_50.jsonl": 50,
               "openai_cookbook/toy_chat_fine_tuning.jsonl": 5, "openai_cookbook/drone_training_first3.jsonl": 3},
}  # fmt: skip


@pytest.mark.parametrize("origin", ORIGINS)
def test_real_files_become_chats_without_loss(origin):
    for name, count in REAL_FILES[origin].items():
        rows = read_rows(data_file(f"bundled/rows/{name}" if origin == "bundled" else f"sft/{name}"), split="train")
        first, shape = detect_format(rows, DataConfig())
        found = [to_example(row, shape) for row in (*first, *rows)]
        assert len(found) == count
        assert all(isinstance(item, Chat) for item in found)
        assert sum(len(message["content"] or "") for item in found for message in item.messages) > 25 * count


def test_other_keys_of_messages_are_named_once_each():
    row = chat("a", "b")
    row["messages"][0] |= {"id": 1, "name": "me", "empty": None, "none": [], "rating": 3}
    row["messages"][1] |= {"reasoning_content": "so", "score": 0.5, "rating": 4, "weight": 1}
    found = example(row)
    assert [note.split()[2] for note in found.notes if "is not read" in note] == ["rating", "score"]
    pair = example({"conversation": [{"human": "q", "assistant": "a", "thinking": "hm", "id": 3, "empty": ""}]})
    assert pair.notes == (formats.NOTE_UNREAD_KEY.format(key="thinking"),)
    row["messages"][0] = {"role": "user", "content": "a", "train": True}
    assert formats.NOTE_USER_TRAINED in example(row).notes
    assert all("_unread" not in message for message in found.messages)


def test_xlam_s_queries_are_chats_that_end_in_calls():
    tool = {"name": "live", "description": "d", "parameters": {"type": {"type": "str", "description": "kind"}}}
    row = {
        "id": 1, "query": "where?", "tools": json.dumps([tool]),
        "answers": json.dumps([{"name": "live", "arguments": {"type": "beta"}}, {"name": "live", "arguments": {}}]),
    }  # fmt: skip
    found = example(row)
    assert [message["role"] for message in found.messages] == ["user", "assistant"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in found.messages[1]["tool_calls"]]
    assert calls == [("live", {"type": "beta"}), ("live", {})]
    assert found.tools[0]["parameters"] == {"type": "object", "properties": tool["parameters"]}
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert example({**row, "tools": [{"name": "live", "parameters": schema}]}).tools[0]["parameters"] == schema
    assert "answers are no calls of tools" in str(example({**row, "answers": ["Paris", "London"]}))


@pytest.mark.parametrize(("odd_rows", "is_known"), [(19, True), (20, False)])
def test_a_format_is_looked_for_in_the_first_twenty_rows_that_can_be_read(odd_rows, is_known):
    rows = [
        BadRow("row 0", "bad"),
        *(RawRow(f"row {n}", {"odd": n}) for n in range(odd_rows)),
        RawRow("last", chat("q", "a")),
    ]
    if is_known:
        assert detect_format(iter(rows), DataConfig())[1] is not None
        return
    with pytest.raises(DataError, match="row 0: columns found: odd"):
        detect_format(iter(rows), DataConfig())
