"""Data: bytes to rows, rows to chats, chats to tokens with a mask, and what is said of the rest."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from sft_play.config.load import config_from_text
from sft_play.config.schema import DataConfig
from sft_play.data.files import BadRow, RawRow, data_paths, read_rows
from sft_play.data.formats import Chat, Text, recognise, rename_columns, to_example
from sft_play.data.render import IGNORED, Renderer, end_of_text_id, label_spans, show_row
from sft_play.errors import DataError, TokenizerError
from tests.conftest import chat, shared


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows(path: Path, **options):
    return list(read_rows(path, split="train", **options))


def example(data: dict):
    row = RawRow("f:1", data)
    shape = recognise(data)
    assert shape is not None, data
    return to_example(row, shape)


def renderer_of(tokenizer, *, loss_on="assistant", max_seq_len):
    return Renderer(tokenizer, DataConfig(loss_on=loss_on), max_seq_len=max_seq_len)


ROW = chat("hello there", "how are you today?")


def test_json_lines_arrays_and_spread_out_objects_are_read_by_content(tmp_path):
    (tmp_path / "a.jsonl").write_text("\ufeff" + json.dumps(ROW) + "\r\n\r\n" + json.dumps(ROW) + "\n")
    (tmp_path / "b.jsonl").write_text(json.dumps([ROW, ROW]))
    (tmp_path / "c.json").write_text(json.dumps(ROW) + "\n" + json.dumps(ROW))
    (tmp_path / "d.json").write_text(json.dumps(ROW, indent=2) + "\n" + json.dumps(ROW, indent=2))
    (tmp_path / "e.jsonl.gz").write_bytes(gzip.compress(json.dumps(ROW).encode() + b"\n" + json.dumps(ROW).encode()))
    for name in ("a.jsonl", "b.jsonl", "c.json", "d.json", "e.jsonl.gz"):
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
    assert [row.data["text"] for row in rows(tmp_path, text_wanted=True)] == ["one", "two", "three"]


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
        ('{"a": 1, "a": 2}', 'the key "a" stands twice in one object'),
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


def test_tool_calls_become_objects_however_they_were_encoded():
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
    assert found.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
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


class TestMasks:
    """What is trained of a row, with a real tokenizer's template."""

    @pytest.fixture
    def tokenizer(self, tiny_llama):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(tiny_llama)

    def trained(self, tokenizer, messages, *, loss_on="assistant", tools=(), limit=10_000):
        row = renderer_of(tokenizer, loss_on=loss_on, max_seq_len=limit)(Chat("f:1", tuple(messages), tuple(tools)))
        assert not isinstance(row, BadRow), row
        groups, current = [], []
        for token, label in zip(row.input_ids, row.labels, strict=True):
            if label != IGNORED:
                assert label == token
                current.append(token)
            elif current:
                groups.append(tokenizer.decode(current))
                current = []
        return groups + ([tokenizer.decode(current)] if current else [])

    TURNS = (
        {"role": "system", "content": "yes"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
    )

    def test_every_assistant_turn_is_trained_with_its_end_of_turn_token(self, tokenizer):
        assert self.trained(tokenizer, self.TURNS) == ["one<|im_end|>", "two<|im_end|>"]

    def test_completion_trains_the_last_turn_only(self, tokenizer):
        assert self.trained(tokenizer, self.TURNS, loss_on="completion") == ["two<|im_end|>"]

    def test_all_trains_everything(self, tokenizer):
        (text,) = self.trained(tokenizer, self.TURNS, loss_on="all")
        assert text.startswith("<|im_start|>system\nyes<|im_end|>")
        assert text.endswith("two<|im_end|>\n")

    def test_an_answer_that_stands_in_the_question_too_is_found_in_its_own_turn(self, tokenizer):
        turns = ({"role": "user", "content": "yes"}, {"role": "assistant", "content": "yes"})
        assert self.trained(tokenizer, turns) == ["yes<|im_end|>"]

    def test_a_row_is_cut_at_the_end_and_what_is_lost_is_counted(self, tokenizer):
        renderer = renderer_of(tokenizer, loss_on="assistant", max_seq_len=10_000)
        whole = renderer(Chat("f:1", self.TURNS))
        cut = renderer_of(tokenizer, loss_on="assistant", max_seq_len=len(whole.input_ids) - 3)(Chat("f:1", self.TURNS))
        assert (cut.cut, len(cut.input_ids)) == (3, len(whole.input_ids) - 3)
        assert cut.lost == whole.trained - cut.trained > 0

    def test_a_row_whose_answer_lies_beyond_the_limit_is_a_bad_row(self, tokenizer):
        row = renderer_of(tokenizer, loss_on="assistant", max_seq_len=8)(Chat("f:1", self.TURNS))
        assert isinstance(row, BadRow)
        assert "beyond max_seq_len" in row.reason

    def test_a_template_that_rewrites_history_is_refused_not_guessed(self, tokenizer):
        tokenizer.chat_template = (
            "{% for m in messages %}{% if loop.last %}{{ m.role + ': ' + m.content }}{% else %}"
            "{{ m.role + ': [cut]' }}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
        )
        row = renderer_of(tokenizer, loss_on="assistant", max_seq_len=100)(Chat("f:1", self.TURNS))
        assert isinstance(row, BadRow)
        assert row.reason == "the chat template drops a system turn's text"
        row = renderer_of(tokenizer, loss_on="assistant", max_seq_len=100)(Chat("f:1", self.TURNS[2:]))
        assert isinstance(row, BadRow)

    def test_a_template_that_drops_the_answer_is_refused(self, tokenizer):
        tokenizer.chat_template = "{% for m in messages %}{{ m.role }}{% endfor %}"
        with pytest.raises(TokenizerError, match="drops an assistant's answer"):
            _ = renderer_of(tokenizer, loss_on="assistant", max_seq_len=100).end_of_turn

    def test_a_marker_inside_a_call_is_plain_text_and_ends_nothing(self, tokenizer):
        tokenizer.chat_template = (
            "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
            "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
        )
        call = {"type": "function", "function": {"name": "get", "arguments": {"a": "yes"}}}
        turns = ({"role": "user", "content": "hello"}, {"role": "assistant", "content": "", "tool_calls": [call]})
        (trained,) = self.trained(tokenizer, turns)
        assert trained.endswith('{"a": "yes"}}<|im_end|>')
        call["function"]["arguments"]["a"] = "<|im_end|>x"
        row = renderer_of(tokenizer, max_seq_len=1000)(Chat("f:1", turns))
        ends = [token for token in row.labels if token == tokenizer.convert_tokens_to_ids("<|im_end|>")]
        assert len(ends) == 1  # the one in the text is plain text
        assert row.special_in_text == 1
        assert self.trained(tokenizer, turns)[0].count("<|im_end|>") == 2

    def test_context_that_the_template_drops_is_a_bad_row(self, tokenizer):
        tokenizer.chat_template = tokenizer.chat_template.replace(
            "{% for message in messages %}", "{% for message in messages if message['role'] != 'tool' %}"
        )
        turns = (self.TURNS[1], self.TURNS[2], {"role": "tool", "content": "result 42"}, self.TURNS[4])
        row = renderer_of(tokenizer, loss_on="completion", max_seq_len=1000)(Chat("f:1", turns))
        assert isinstance(row, BadRow)
        assert row.reason == "the chat template drops a tool's text"

    def test_an_answer_that_begins_inside_its_prompts_last_token_is_counted(self):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(shared("tokenizers/Qwen2.5-Instruct"))
        renderer = renderer_of(tokenizer, loss_on="assistant", max_seq_len=1000)
        answers = {content: renderer(Chat("f:1", (self.TURNS[1], {"role": "assistant", "content": content})))
                   for content in ("lead", "\n\nlead")}  # fmt: skip
        assert [row.merged for row in answers.values()] == [0, 1]

    def test_two_bos_tokens_are_never_trained(self, tokenizer):
        tokenizer.bos_token = "<|im_start|>"
        tokenizer.chat_template = "{{ bos_token }}{{ bos_token }}" + tokenizer.chat_template
        row = renderer_of(tokenizer, loss_on="all", max_seq_len=100)(Chat("f:1", self.TURNS))
        assert isinstance(row, BadRow)
        assert row.reason == "two BOS tokens"

    def test_the_pad_token_is_masked_by_length_not_by_id(self, tokenizer):
        from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

        tokenizer.pad_token = tokenizer.eos_token
        renderer = renderer_of(tokenizer, loss_on="assistant", max_seq_len=100)
        short, long = renderer(Chat("f:1", self.TURNS[1:3])), renderer(Chat("f:2", self.TURNS))
        collate = DataCollatorForLanguageModeling(pad_token_id=tokenizer.pad_token_id)
        batch = collate([{"input_ids": row.input_ids, "labels": row.labels} for row in (short, long)])
        trained = [(batch["labels"][n] == tokenizer.eos_token_id).sum().item() for n in range(2)]
        assert trained == [1, 2]

    def test_the_shown_row_marks_what_is_trained(self, tokenizer):
        row = renderer_of(tokenizer, loss_on="assistant", max_seq_len=100)(Chat("f:1", self.TURNS))
        assert "<|im_start|>assistant\n[[one<|im_end|>]]" in show_row(row, tokenizer)

    def test_documents_end_with_the_end_of_text_token(self, tokenizer):
        ids = renderer_of(tokenizer, loss_on="all", max_seq_len=100).document_ids(Text("f:1", "yes no"))
        assert ids[-1] == end_of_text_id(tokenizer) == tokenizer.convert_tokens_to_ids("<|endoftext|>")
        assert tokenizer.decode(ids[:-1]) == "yes no"


REAL_TEMPLATES = {
    "Qwen2.5-Instruct": ("<|im_end|>", "two<|im_end|>"),
    "SmolLM2": ("<|im_end|>", "two<|im_end|>"),
    "Mistral-7B-Instruct-v0.3": ("</s>", "two</s>"),
    "Phi-3-mini-4k-instruct": ("<|end|>", "two<|end|>"),
}


@pytest.mark.parametrize("name", sorted(REAL_TEMPLATES))
def test_real_tokenizers_train_each_answer_through_its_end_marker(name):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared(f"tokenizers/{name}"))
    turns = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "two"},
    ]
    marker, last = REAL_TEMPLATES[name]
    renderer = renderer_of(tokenizer, loss_on="assistant", max_seq_len=1000)
    assert renderer.end_of_turn == marker
    row = renderer(Chat("f:1", tuple(turns)))
    assert not isinstance(row, BadRow), row
    trained = [token for token, label in zip(row.input_ids, row.labels, strict=True) if label != IGNORED]
    text = tokenizer.decode(trained).replace(" ", "")
    assert text == f"one{marker.strip()}{last}"
    bos = tokenizer.bos_token_id
    assert bos is None or row.input_ids.count(bos) <= 1 or name == "SmolLM2"


def test_no_template_gets_a_wrong_mask():
    """Every collected template: what is trained is each answer and none of the questions, or the row is refused."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared("tokenizers/Qwen2.5-Instruct"))
    turns = (
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "alpha one"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "beta two"},
    )
    files = sorted(shared("chat_templates").glob("*/*.jinja"))
    assert len(files) > 130
    exact = 0
    for file in files:
        tokenizer.chat_template = file.read_text(encoding="utf-8")
        for messages in (turns, turns[:2], ({"role": "system", "content": "brief"}, *turns[:2])):
            try:
                row = renderer_of(tokenizer, loss_on="assistant", max_seq_len=100_000)(Chat("f:1", messages))
            except TokenizerError:
                continue
            if isinstance(row, BadRow):
                continue
            pairs = zip(row.input_ids, row.labels, strict=True)
            trained = tokenizer.decode([token for token, label in pairs if label != IGNORED])
            for message in messages:
                is_answer = message["role"] == "assistant"
                is_left_out = row.untrained_turns > 0 and message is not messages[-1]
                assert (message["content"] in trained) == (is_answer and not is_left_out), (file.name, trained)
            exact += 1
    assert exact > 300


def test_label_spans_train_only_tokens_that_lie_whole_in_a_span():
    # "ab cd ef": the span [3, 5) holds "cd"; a token that begins before it is not trained
    offsets = [(0, 2), (2, 5), (3, 5), (5, 8)]
    assert label_spans([1, 2, 3, 4], offsets, [(3, 5)]) == [IGNORED, IGNORED, 3, IGNORED]


def test_missing_files_are_all_named_at_once(tmp_path):
    config = config_from_text(
        f"model: {{name: x}}\ndata: {{train_path: {tmp_path}/a.jsonl, val_path: {tmp_path}/b.jsonl, test_path: null}}",
        name="run.yaml",
    )
    with pytest.raises(DataError) as error:
        data_paths(config.data)
    assert "a.jsonl does not exist" in str(error.value)
    assert "b.jsonl does not exist" in str(error.value)


def test_the_default_files_say_who_writes_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="make process"):
        data_paths(config_from_text("model: {name: x}", name="run.yaml").data)


def test_a_train_file_of_ones_own_needs_no_default_validation_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "mine.jsonl", ROW)
    paths = data_paths(config_from_text(f"model: {{name: x}}\ndata: {{train_path: {path}}}", name="run.yaml").data)
    assert (paths.val, paths.test) == (None, None)
    assert len(paths.notes) == 2
