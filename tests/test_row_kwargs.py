"""A row's own chat_template_kwargs reach the template: in training, in files, and where answers are asked for."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.load import config_from_text
from sft_play.config.schema import DataConfig
from sft_play.data.build.splits import build_splits
from sft_play.data.masks import render
from sft_play.data.masks.render import Renderer
from sft_play.data.masks.token_row import TokenRow
from sft_play.data.process import process_files
from sft_play.data.sources.files import find_data_paths
from sft_play.data.sources.formats import Chat
from sft_play.data.sources.raw import BadRow
from tests.models import make_tokenizer

pytestmark = pytest.mark.build

TEMPLATE = (
    "{% if tone %}<|im_start|>system\n{{ tone }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{% endif %}"
)
MESSAGES = ({"role": "user", "content": "hello there"}, {"role": "assistant", "content": "light on"})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Any:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder, template=TEMPLATE)
    return AutoTokenizer.from_pretrained(folder)


def renderer(tokenizer: Any, **data: Any) -> Renderer:
    return Renderer(tokenizer, DataConfig(**data), max_seq_len=500)


def test_rows_are_rendered_as_transformers_renders_them_with_their_variables(tokenizer):
    draw = random.Random(5)
    run = {"tone": "calm", "other": 3}
    made = renderer(tokenizer, chat_template_kwargs=run)
    for number in range(30):
        own = draw.choice([{}, {"tone": draw.choice(["loud", "", None, 7])}, {"tone": "loud", "unread": {"a": [1]}}])
        row = made.render(Chat(f"f:{number}", MESSAGES, template_kwargs=own))
        assert isinstance(row, TokenRow)
        expected = tokenizer.apply_chat_template(list(MESSAGES), tokenize=False, **{**run, **own})
        assert row.text == expected
        assert tokenizer.decode([label for label in row.labels if label >= 0]) == "light on<|im_end|>"


def test_the_prompt_that_an_answer_is_asked_after_is_the_row_s_own(tokenizer):
    made = renderer(tokenizer, chat_template_kwargs={"tone": "calm"})
    for own in ({}, {"tone": "loud"}, {"enable_thinking": False}):
        turns = (*MESSAGES, {"role": "user", "content": "more"}, {"role": "assistant", "content": "light off"})
        made.render(Chat("f:1", turns, template_kwargs=own))  # the run's own rows are rendered before any is asked for
        ids = made.prompt_ids(Chat("f:1", MESSAGES, template_kwargs=own))
        asked = made.prompt_and_answer_ids(Chat("f:1", turns, template_kwargs=own))
        assert tokenizer.decode(asked[1]) == "light off<|im_end|>"  # the last answer alone
        variables = {"tone": "calm", **own}
        expected = tokenizer.apply_chat_template([MESSAGES[0]], add_generation_prompt=True, tokenize=False, **variables)
        assert tokenizer.decode(ids) == expected


def test_more_different_ones_than_a_template_is_probed_with_are_refused_with_the_number(tokenizer, monkeypatch):
    monkeypatch.setattr(render, "MAX_ROW_KWARGS", 3)
    made = renderer(tokenizer)
    rows = [made.render(Chat(f"f:{n}", MESSAGES, template_kwargs={"tone": f"t{n}"})) for n in range(5)]
    assert [isinstance(row, TokenRow) for row in rows] == [True, True, True, False, False]
    assert isinstance(rows[3], BadRow)
    assert rows[3].reason == "the rows have more than 3 different chat_template_kwargs"
    assert isinstance(made.render(Chat("f:9", MESSAGES, template_kwargs={"tone": "t1"})), TokenRow)


@pytest.mark.parametrize("own", [{"messages": []}, {"add_generation_prompt": True}, {"tools": []}])
def test_what_the_row_itself_says_cannot_be_set(tokenizer, own):
    row = renderer(tokenizer).render(Chat("f:1", MESSAGES, template_kwargs=own))
    assert isinstance(row, BadRow)
    assert next(iter(own)) in str(row)


def test_they_reach_the_rows_of_a_run_its_held_out_chats_and_the_files_of_process(tokenizer, tmp_path):
    rows = []
    for n, tone in enumerate(["loud", "calm", ""] * 8):
        own = json.dumps({"tone": tone}) if n % 2 else {"tone": tone}
        messages = [{"role": "user", "content": f"hello {n}"}, MESSAGES[1]]
        rows.append({"messages": messages, "chat_template_kwargs": own})
    raw = tmp_path / "raw.jsonl"
    raw.write_text("".join(json.dumps(row) + "\n" for row in rows))

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
