"""Data: bytes to rows, rows to chats, chats to tokens with a mask, and what is said of the rest."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from sft_play.config.load import config_from_text
from sft_play.data.sources.files import find_data_paths, read_rows
from sft_play.data.sources.formats import Chat, recognise_format, rename_columns, to_example
from sft_play.data.sources.raw import BadRow, RawRow
from sft_play.errors import DataError
from tests.conftest import chat


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows(path: Path, **options):
    return list(read_rows(path, split="train", **options))


def example(data: dict):
    row = RawRow("f:1", data)
    shape = recognise_format(data)
    assert shape is not None, data
    return to_example(row, shape)


ROW = chat("hello there", "how are you today?")


def test_json_lines_and_arrays_are_read_by_content(tmp_path):
    (tmp_path / "a.jsonl").write_text("\ufeff" + json.dumps(ROW) + "\r\n\r\n" + json.dumps(ROW) + "\n")
    (tmp_path / "b.jsonl").write_text(json.dumps([ROW, ROW]))
    (tmp_path / "c.json").write_text(json.dumps(ROW) + "\n" + json.dumps(ROW))
    (tmp_path / "e.jsonl.gz").write_bytes(gzip.compress(json.dumps(ROW).encode() + b"\n" + json.dumps(ROW).encode()))
    for name in ("a.jsonl", "b.jsonl", "c.json", "e.jsonl.gz"):
        found = rows(tmp_path / name)
        assert [row.data for row in found] == [ROW, ROW], name
    assert [row.where for row in rows(tmp_path / "a.jsonl")] == [f"{tmp_path}/a.jsonl:1", f"{tmp_path}/a.jsonl:3"]


def test_a_folder_saved_by_datasets_is_read_split_by_split(tmp_path):
    import datasets

    saved = datasets.DatasetDict(
        {
            "train": datasets.Dataset.from_list([{"question": "q", "answer": "a"}] * 3),
            "validation": datasets.Dataset.from_list([{"question": "v", "answer": "b"}]),
        }
    )
    saved.save_to_disk(str(tmp_path / "saved"))
    assert len(rows(tmp_path / "saved")) == 3
    assert [row.data for row in read_rows(tmp_path / "saved", split="val")] == [{"question": "v", "answer": "b"}]
    with pytest.raises(DataError, match="splits train, validation"):
        list(read_rows(tmp_path / "saved", split="test"))


def test_a_folder_of_files_is_read_in_order(tmp_path):
    write(tmp_path / "b.jsonl", {"text": "two"})
    write(tmp_path / "a.jsonl", {"text": "one"})
    (tmp_path / "c.txt").write_text("three")
    assert [row.data["text"] for row in rows(tmp_path)] == ["one", "two"]
    assert [row.data["text"] for row in rows(tmp_path, wants_text=True)] == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no rows: the file is empty"),
        (b" \n\n", "has no rows: the file is blank"),
        (b"[]", "the list is empty"),
        (b'[{"a": 1},]', "x.jsonl:1: remove the comma before `]`"),
        (b'[{"a": 1}\n{"a": 2}]', "x.jsonl:2: expected `,` or `]` after a row, found `{`"),
        (b'[{"a": 1}', "found the end of the file"),
        (b'[{"a": 1}] x', "text after the end of the list"),
        (b"hello there", 'is not JSON: it begins with "hello there"'),
        (b'{"a": "caf\xe9"}', "x.jsonl:1: byte 0xE9 at column 11 is not UTF-8"),
        ("{}".encode("utf-16"), "is UTF-16"),
        (b"PAR1xxxx", "is Parquet"),
        ("{}".encode("utf-32"), "is UTF-32"),
        (b"\x1f\x8b\x08\x00garbage", "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_says_where_and_why(tmp_path, content, message):
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(DataError) as error:
        rows(tmp_path / "x.jsonl")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"a": "b', "not valid JSON"),
        ("[1]", "a row is not an object"),
        ('{"a": 1, "a": 2}', 'the key "a" occurs twice in one object'),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": ' + "1" * 5000 + "}", "too many digits"),
        (r'{"a": "\ud83d"}', "half of a surrogate pair"),
    ],
)
def test_a_bad_line_is_a_bad_row_with_its_place(tmp_path, line, reason):
    (tmp_path / "x.jsonl").write_text(json.dumps(ROW) + "\n" + line + "\n")
    good, bad = rows(tmp_path / "x.jsonl")
    assert isinstance(good, RawRow)
    assert isinstance(bad, BadRow)
    assert reason in bad.reason
    assert bad.where.endswith("x.jsonl:2")


@pytest.mark.parametrize(
    ("data", "roles"),
    [
        (ROW, ["user", "assistant"]),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, ["user", "assistant"]),
        (
            {"conversations": [{"from": "user", "value": "a"}, {"from": "bot", "value": "b"}], "system": "s"},
            ["system", "user", "assistant"],
        ),
        ({"instruction": "a", "input": "b", "output": "c"}, ["user", "assistant"]),
        (
            {"instruction": "a", "output": "c", "history": [["q", "r"]], "system": "s"},
            ["system", "user", "assistant", "user", "assistant"],
        ),
        ({"prompt": "a", "completion": "b"}, ["user", "assistant"]),
        ({"question": "a", "answer": "b"}, ["user", "assistant"]),
        (
            {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]},
            ["user", "assistant"],
        ),
    ],
)
def test_formats_are_recognised_from_their_keys(data, roles):
    found = example(data)
    assert isinstance(found, Chat)
    assert [message["role"] for message in found.messages] == roles


def test_alpaca_joins_instruction_and_input():
    found = example({"instruction": "Translate", "input": "chat", "output": "cat"})
    assert found.messages[0]["content"] == "Translate\nchat"


def test_arguments_that_were_encoded_twice_are_encoded_once():
    call = {"function": {"name": "f", "arguments": json.dumps(json.dumps({"x": 1}))}}
    found = example(
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
            ],
            "tools": json.dumps([{"name": "f"}]),
        }
    )
    assert found.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert found.tools == ({"name": "f"},)


def test_content_parts_are_joined_and_reasoning_and_calls_kept_apart():
    parts = [
        {"type": "reasoning", "value": "hm"},
        {"type": "text", "text": "yes"},
        {"type": "tool_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
    ]
    found = example({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": parts}]})
    message = found.messages[1]
    assert (message["content"], message["reasoning_content"]) == ("yes", "hm")
    assert message["tool_calls"][0]["function"]["name"] == "f"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user", "content": "a"}]}, "ends with a user turn"),
        ({"messages": [{"role": "asistant", "content": "a"}]}, 'unknown role "asistant"'),
        ({"messages": [{"content": "a"}]}, "a message has no role"),
        ({"messages": [{"role": "assistant", "content": None}]}, "content is not text"),
        ({"messages": [{"role": "assistant", "content": 3}]}, "content is not text"),
        ({"messages": [1]}, "a message is not an object"),
        ({"question": "a", "answer": None}, "answer is not text"),
        ({"question": "a", "answer": {"x": 1}}, "answer is not text"),
        ({"text": "  "}, "text is empty"),
        ({"instruction": "a", "output": "b", "history": 5}, "history is not a list"),
        ({"messages": [{"role": "assistant", "content": "a"}], "tools": "[" * 9000}, "tools is a string that is not"),
        ({"instruction": "a", "output": "b", "history": ["x"]}, "history is not a list"),
        ({"messages": [{"role": "assistant", "content": "a"}], "tools": "{"}, "tools is a string that is not JSON"),
    ],
)
def test_a_row_of_the_wrong_shape_says_why(data, reason):
    found = example(data)
    assert isinstance(found, BadRow)
    assert reason in found.reason


def test_a_role_typo_names_the_nearest_role():
    assert 'did you mean "assistant"?' in str(example({"messages": [{"role": "asistant", "content": "a"}]}))


def test_columns_are_mapped_to_known_ones():
    row = rename_columns(
        RawRow("f:1", {"q": "a", "prompt": "old", "reply": "b"}), {"prompt": "q", "completion": "reply"}
    )
    assert row.data == {"prompt": "a", "completion": "b"}


def test_missing_files_are_all_named_at_once(tmp_path):
    config = config_from_text(
        f"model: {{name: x}}\ndata: {{train_path: {tmp_path}/a.jsonl, val_path: {tmp_path}/b.jsonl, test_path: null}}",
        name="run.yaml",
    )
    with pytest.raises(DataError) as error:
        find_data_paths(config.data)
    assert "a.jsonl does not exist" in str(error.value)
    assert "b.jsonl does not exist" in str(error.value)


def test_the_default_files_say_who_writes_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="make process"):
        find_data_paths(config_from_text("model: {name: x}", name="run.yaml").data)


def test_a_train_file_of_ones_own_needs_no_default_validation_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "mine.jsonl", ROW)
    paths = find_data_paths(config_from_text(f"model: {{name: x}}\ndata: {{train_path: {path}}}", name="run.yaml").data)
    assert (paths.val, paths.test) == (None, None)
    assert paths.notes == ()
