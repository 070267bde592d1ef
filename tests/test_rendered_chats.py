"""Texts that are rendered chats already, in a text column: read as the chats that they are, or named."""

from __future__ import annotations

import json
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.schema import DataConfig
from sft_play.data.masks.render import NOTE_RENDERED_CHAT, Renderer
from sft_play.data.masks.sandbox import RenderError
from sft_play.data.masks.token_row import TokenRow
from sft_play.data.sources.columns import find_rendered_mark
from sft_play.data.sources.formats import Chat, Text
from sft_play.errors import SftPlayError
from tests.bundled import FILES, template_of
from tests.models import make_tokenizer

pytestmark = pytest.mark.build


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Any:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def renderer(tokenizer: Any, template: str, **data: Any) -> Renderer:
    tokenizer.chat_template = template
    return Renderer(tokenizer, DataConfig(**{"on_missing_end": "train", **data}), max_seq_len=4000)


def conversations(seed: int) -> list[dict[str, str]]:
    draw = random.Random(seed)
    words = ["hello", "a\n\nb", "x = [1, 2]", "why?\n", "naïve 日本", "it is 6.", "<b>bold</b>", "- one\n- two"]
    turns = [{"role": "system", "content": "be brief"}] if draw.random() < 0.4 else []
    for _ in range(draw.randint(1, 3)):
        turns += [{"role": role, "content": " ".join(draw.choices(words, k=draw.randint(1, 3))).strip()}
                  for role in ("user", "assistant")]  # fmt: skip
    return turns


def templates() -> list[str]:
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    of_trl = sorted(path.stem for path in (Path(spec.origin).parent / "chat_templates").glob("*.jinja"))[::2]
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
    trained = {}
    for name, text in (("good", good), ("bad", bad)):
        rows = tmp_path / f"{name}.jsonl"
        rows.write_text("".join(json.dumps({"text": text.format(n)}) + "\n" for n in range(12)))
        config = tmp_path / f"{name}.yaml"
        config.write_text(
            f"model: {{name: {json.dumps(str(tiny_llama))}, max_seq_len: 128}}\n"
            f"data: {{train_path: {json.dumps(str(rows))}, on_missing_end: train}}\n"
            "train: {max_steps: 1, effective_batch_size: 2}\n"
        )
        code, printed = command("check", "--config", str(config), "--json")
        assert code == 0, printed
        trained[name] = printed
    assert "is read as the chat that it is" in trained["good"]
    assert [name for name in trained if "special_tokens_in_text" in trained[name]] == ["bad"]
    assert "### Human:" in trained["bad"]
