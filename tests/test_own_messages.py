"""Rows given as messages are rendered as transformers renders them, or what was changed is said and counted.

Texts that are rendered chats already are read as the chats that they are, or named; and a row's own
chat_template_kwargs reach the template: in training, in files, and where answers are asked for.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.load import config_from_text
from sft_play.config.schema import DataConfig
from sft_play.data.build.splits import build_splits
from sft_play.data.masks import fitted_template, render
from sft_play.data.masks.render import NOTE_RENDERED_CHAT, Renderer
from sft_play.data.masks.sandbox import RenderError
from sft_play.data.masks.token_row import TokenRow
from sft_play.data.process import process_files, processed_row
from sft_play.data.sources.columns import find_rendered_mark
from sft_play.data.sources.files import find_data_paths
from sft_play.data.sources.formats import Chat, Text, content_digest, recognise_format, to_example
from sft_play.data.sources.raw import BadRow, RawRow
from sft_play.errors import SftPlayError
from tests.bundled import FILES, template_of, there
from tests.conftest import write_rows, write_run
from tests.models import CHATML

pytestmark = pytest.mark.build
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if not loop.first %}|{% endif %}{{ p.text if p.type == 'text' else "
    "'<think>' + p.thinking + '</think>' }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KEYS = CHATML.replace("<|im_end|>", "{% if m.mood %} ({{ m.mood }}){% endif %}<|im_end|>", 1)
STRICT = (
    "{% for m in messages %}{{ raise_exception('r') if m.role not in ['system', 'user', 'assistant'] }}{% endfor %}"
)
ROWS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
    "developer": [
        {"role": "developer", "content": "s"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"},
    ],
    "keys": [
        {"role": "user", "content": "q", "mood": "glad", "id": 7},
        {"role": "assistant", "content": "a", "mood": "calm <|im_end|>", "at": "2020"},
    ],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "q1"}, {"type": "text", "text": "q2"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "a1"}, {"type": "text", "text": " a2"}]},
    ],
    "think parts": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]},
    ],
    "other names": [{"role": "human", "content": "q"}, {"role": "gpt", "content": "a"}],
    "empty calls": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "tool_calls": []}],
}  # fmt: skip


def example_of(messages: Any) -> Any:
    data = {"messages": copy.deepcopy(messages)}
    return to_example(RawRow("f:1", data), recognise_format(data))


def renderer(tokenizer: Any, template: str, **data: Any) -> Renderer:
    tokenizer.chat_template = template
    return Renderer(tokenizer, DataConfig(on_missing_end="train", **data), max_seq_len=1 << 30)


def rendered(tokenizer: Any, template: str, messages: Any) -> tuple[TokenRow | BadRow, str | None]:
    made = renderer(tokenizer, template).render(example_of(messages))
    try:
        own = tokenizer.apply_chat_template(copy.deepcopy(messages), chat_template=template, tokenize=False)
    except Exception:  # whatever a template raises
        own = None
    return made, own


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("template", [PARTS, KEYS, STRICT + CHATML])
def test_a_row_is_what_transformers_renders_or_what_was_changed_is_said(tokenizer, template, name):
    made, own = rendered(tokenizer, template, ROWS[name])
    assert isinstance(made, TokenRow), made
    assert (made.text == own) != bool(made.notes)


@pytest.mark.parametrize(("template", "name", "notes"), [
    (CHATML, "developer", ()), (STRICT + CHATML, "developer", (fitted_template.NOTE_ROLE,)), (KEYS, "keys", ()),
    (CHATML, "keys", ()), (PARTS, "parts", ()), (CHATML, "parts", (fitted_template.NOTE_PARTS,)),
    (PARTS, "think parts", ()), (CHATML, "other names", (fitted_template.NOTE_ROLE,)),
])  # fmt: skip
def test_what_the_template_takes_is_kept_and_the_rest_is_named(tokenizer, template, name, notes):
    made, own = rendered(tokenizer, template, ROWS[name])
    assert isinstance(made, TokenRow), made
    assert made.notes == notes
    assert (made.text == own) == (notes == ())


def test_a_special_token_in_a_key_that_the_template_reads_is_text(tokenizer):
    made, own = rendered(tokenizer, KEYS, ROWS["keys"])
    assert isinstance(made, TokenRow)
    assert made.text == own
    assert made.special_token_count == 1
    assert made.input_ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 2


@pytest.mark.parametrize("name", ROWS)
def test_a_processed_row_is_read_as_the_row_itself(name):
    chat = example_of(ROWS[name])
    written = json.loads(json.dumps(processed_row(chat, content_digest(chat), Path())))
    again = to_example(RawRow("f:1", written), recognise_format(written))
    assert again == chat
    assert content_digest(again) == content_digest(chat)
    assert content_digest(dataclasses.replace(chat, template_kwargs={"tone": "dry"})) != content_digest(chat)


REAL = ("bundled/tools", "trl/qwen3", "mistral-common/v13_think", "trl/gptoss", "llama.cpp/google-gemma-2-2b-it")


@pytest.mark.parametrize("name", there(REAL))
def test_real_templates_too(tokenizer, name):
    template, taken = template_of(name), 0
    for messages in ROWS.values():
        made, own = rendered(tokenizer, template, messages)
        if isinstance(made, TokenRow):
            taken += 1
            assert made.text.removesuffix(made.added_end) == own or made.notes, messages
    assert taken > 0


def conversations(seed: int) -> list[dict[str, str]]:
    draw = random.Random(seed)
    words = ["hello", "a\n\nb", "x = [1, 2]", "why?\n", "naïve 日本", "it is 6.", "<b>bold</b>", "- one\n- two"]
    turns = [{"role": "system", "content": "be brief"}] if draw.random() < 0.4 else []
    for _ in range(draw.randint(1, 3)):
        turns += [{"role": role, "content": " ".join(draw.choices(words, k=draw.randint(1, 3))).strip()}
                  for role in ("user", "assistant")]  # fmt: skip
    return turns


def templates() -> list[str]:
    folder = Path(find_spec("trl").origin).parent / "chat_templates"
    of_trl = sorted(path.stem for path in folder.glob("*.jinja"))[::2]
    return [*(f"bundled/{path.stem}" for path in sorted((FILES / "templates").glob("*.jinja"))),
            *(f"trl/{name}" for name in of_trl)]  # fmt: skip


@pytest.mark.parametrize("name", templates())
def test_a_rendered_chat_is_trained_as_the_chat_is(tokenizer, name):
    one = renderer(tokenizer, template_of(name))
    compared = 0
    for seed in range(8):
        chat = Chat("f:1", tuple(conversations(seed)))
        try:
            text = one.turn_locator().template.render(chat.messages)
        except (SftPlayError, RenderError):  # the template's own refusal
            continue
        read = one.recover_chat(Text("f:1", text))
        assert isinstance(read, Chat), text
        assert NOTE_RENDERED_CHAT in read.notes
        ours, expected = one(read), one(chat)
        assert type(ours) is type(expected)
        if isinstance(ours, TokenRow):
            assert ours.input_ids == expected.input_ids
            if len(read.messages) == len(chat.messages):  # else the template's own system prompt became a message
                assert ours.labels == expected.labels
        compared += 1
    if not compared:
        pytest.skip(f"{name} renders nothing with this tokenizer")


def test_what_stands_around_a_chat_does_not_matter(tokenizer):
    one = renderer(tokenizer, template_of("bundled/chatml"))
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>"
    for given in (text, f"{text}\n", f"\n{text}\n\n", f"{text}\n<|endoftext|>", f"{text}<|endoftext|>"):
        read = one.recover_chat(Text("f:1", given))
        assert isinstance(read, Chat), given
        assert [message["content"] for message in read.messages] == ["hi", "hello"]
    own_system = renderer(tokenizer, template_of("trl/qwen2_5"))  # a prompt of its own, which this text leaves out
    read = own_system.recover_chat(Text("f:1", text))
    assert isinstance(read, Chat)
    assert [message["role"] for message in read.messages] == ["user", "assistant"]


@pytest.mark.parametrize("text", [
    "The mark <|im_end|> ends a turn of ChatML.",
    "<|im_start|>user\nhi<|im_end|>\n",  # nobody answers
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>tool\nx<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n",
    "before <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\nand more",
    "<|im_start|>user\nhi\n<|im_start|>assistant\nhello<|im_end|>\n",
    "plain words",
    "",
])  # fmt: skip
def test_a_text_that_the_template_does_not_write_stays_a_text_and_its_tokens_are_counted(tokenizer, text):
    one = renderer(tokenizer, template_of("bundled/chatml"))
    read = one.recover_chat(Text("f:1", text))
    assert isinstance(read, Text)
    row = one(read)
    assert isinstance(row, TokenRow)
    assert row.special_token_count == text.count("<|im_start|>") + text.count("<|im_end|>")


@pytest.mark.parametrize(("text", "mark"), [
    ("### Human: hi\n### Assistant: hello", "### Human:"), ("USER: hi\nASSISTANT: hello", "USER: hi"),
    ("<s>[INST] hi [/INST] hello</s>", "[INST]"), ("<|user|>\nhi<|end|>\n<|assistant|>\nx", "<|user|>"),
    ("The user said: hello. Human rights.", None), ("## Heading\n\ntext", None), ("[INSTALL] now", None),
])  # fmt: skip
def test_layouts_of_other_templates_are_named(tokenizer, text, mark):
    assert (find_rendered_mark(text) or "").startswith(mark or "")
    assert (find_rendered_mark(text) is None) is (mark is None)
    noted = renderer(tokenizer, template_of("bundled/chatml")).recover_chat(Text("f:1", text)).notes
    assert [note.startswith("special_tokens_in_text") for note in noted] == ([True] if mark else [])


def test_check_and_the_run_say_what_is_read_and_what_is_not(tmp_path, tiny_llama, command):
    good = "<|im_start|>user\nwhat is it?<|im_end|>\n<|im_start|>assistant\nit is {}.<|im_end|>\n"
    bad = "### Human: what is it?<|im_end|>\n### Assistant: it is {}."
    said = []
    for text in (good, bad):
        rows = write_rows(tmp_path / "rows.jsonl", ({"text": text.format(n)} for n in range(12)))
        config = write_run(tmp_path, tiny_llama, rows, data={"on_missing_end": "train"})
        code, printed = command("check", "--config", str(config), "--json")
        assert code == 0, printed
        said.append(printed)
    assert "is read as the chat that it is" in said[0]
    assert ["special_tokens_in_text" in one for one in said] == [False, True]
    assert "### Human:" in said[1]


TEMPLATE = (
    "{% if tone %}<|im_start|>system\n{{ tone }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{% endif %}"
)
MESSAGES = ({"role": "user", "content": "hello there"}, {"role": "assistant", "content": "light on"})


def test_rows_are_rendered_as_transformers_renders_them_with_their_own_variables(tokenizer):
    draw = random.Random(5)
    run = {"tone": "calm", "other": 3}
    made = renderer(tokenizer, TEMPLATE, chat_template_kwargs=run)
    for number in range(30):
        own = draw.choice([{}, {"tone": draw.choice(["loud", "", None, 7])}, {"tone": "loud", "unread": {"a": [1]}}])
        row = made.render(Chat(f"f:{number}", MESSAGES, template_kwargs=own))
        assert isinstance(row, TokenRow)
        expected = tokenizer.apply_chat_template(list(MESSAGES), tokenize=False, **{**run, **own})
        assert row.text == expected
        assert tokenizer.decode([label for label in row.labels if label >= 0]) == "light on<|im_end|>"


def test_the_prompt_that_an_answer_is_asked_after_is_the_row_s_own(tokenizer):
    made = renderer(tokenizer, TEMPLATE, chat_template_kwargs={"tone": "calm"})
    for own in ({}, {"tone": "loud"}, {"enable_thinking": False}):
        turns = (*MESSAGES, {"role": "user", "content": "more"}, {"role": "assistant", "content": "light off"})
        made.render(Chat("f:1", turns, template_kwargs=own))  # the run's own rows are rendered before any is asked for
        ids = made.prompt_ids(Chat("f:1", MESSAGES, template_kwargs=own))
        asked = made.prompt_and_answer_ids(Chat("f:1", turns, template_kwargs=own))
        assert tokenizer.decode(asked[1]) == "light off<|im_end|>"  # the last answer alone
        variables = {"tone": "calm", **own}
        expected = tokenizer.apply_chat_template([MESSAGES[0]], add_generation_prompt=True, tokenize=False, **variables)
        assert tokenizer.decode(ids) == expected


def test_more_different_variables_than_a_template_is_probed_with_are_refused_with_the_number(tokenizer, monkeypatch):
    monkeypatch.setattr(render, "MAX_ROW_KWARGS", 3)
    made = renderer(tokenizer, TEMPLATE)
    rows = [made.render(Chat(f"f:{n}", MESSAGES, template_kwargs={"tone": f"t{n}"})) for n in range(5)]
    assert [isinstance(row, TokenRow) for row in rows] == [True, True, True, False, False]
    assert isinstance(rows[3], BadRow)
    assert rows[3].reason == "the rows have more than 3 different chat_template_kwargs"
    assert isinstance(made.render(Chat("f:9", MESSAGES, template_kwargs={"tone": "t1"})), TokenRow)


def test_what_the_row_itself_says_cannot_be_set(tokenizer):
    for name in ("messages", "add_generation_prompt", "tools"):
        row = renderer(tokenizer, TEMPLATE).render(Chat("f:1", MESSAGES, template_kwargs={name: []}))
        assert isinstance(row, BadRow)
        assert name in str(row)


def test_own_variables_reach_the_rows_of_a_run_its_held_out_chats_and_the_files_of_process(tokenizer, tmp_path):
    tokenizer.chat_template, rows = TEMPLATE, []
    for n, tone in enumerate(["loud", "calm", ""] * 8):
        own = json.dumps({"tone": tone}) if n % 2 else {"tone": tone}
        messages = [{"role": "user", "content": f"hello {n}"}, MESSAGES[1]]
        rows.append({"messages": messages, "chat_template_kwargs": own})
    raw = write_rows(tmp_path / "raw.jsonl", rows)

    def texts(path: Path) -> tuple[list[str], list[Any]]:
        config = config_from_text(
            f"model: {{name: x}}\ndata: {{train_path: {path}, val_path: {path}, process: {{raw_path: {raw}, "
            f"out_dir: {tmp_path}/out, val_fraction: 0, test_fraction: 0}}}}",
            name="x",
        )
        splits = build_splits(config, find_data_paths(config.data), tokenizer, max_seq_len=200)
        assert splits.val is not None
        kwargs = [splits.val.chats[at].template_kwargs for at in range(len(splits.val.chats))]
        if path == raw:
            process_files(config)
        return sorted(tokenizer.decode(ids) for ids in splits.train.rows["input_ids"]), kwargs

    direct, kwargs = texts(raw)
    assert [len([text for text in direct if tone in text]) for tone in ("loud", "calm", "hello")] == [8, 8, 24]
    assert kwargs == [{"tone": tone} for tone in ["loud", "calm", ""] * 8]
    assert texts(tmp_path / "out" / "train.jsonl")[0] == direct
