"""Rows given as messages are rendered as transformers renders them, or what was changed is said and counted."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest

from sft_play.config.schema import DataConfig
from sft_play.data.masks import fitted_template
from sft_play.data.masks.render import Renderer
from sft_play.data.masks.token_row import TokenRow
from sft_play.data.masks.tokenizer import TokenizerParts
from sft_play.data.process import processed_row
from sft_play.data.sources.formats import content_digest, recognise_format, to_example
from sft_play.data.sources.raw import BadRow, RawRow
from tests.bundled import template_of, there
from tests.models import CHATML, make_tokenizer

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


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def example_of(messages: Any) -> Any:
    data = {"messages": copy.deepcopy(messages)}
    return to_example(RawRow("f:1", data), recognise_format(data))


def rendered(tokenizer: Any, template: str, messages: Any) -> tuple[TokenRow | BadRow, str | None]:
    parts = TokenizerParts.from_tokenizer(tokenizer).replace_template(template)
    options = DataConfig(on_missing_end="train")
    renderer = Renderer(parts, options, max_seq_len=1 << 30)
    made = renderer.render(example_of(messages))
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
    written = json.loads(json.dumps(processed_row(chat, content_digest(chat))))
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
