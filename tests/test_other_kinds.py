"""Rows that are data of another kind than supervised examples are named, and innocent columns stop nothing."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from sft_play.config.schema import DataConfig
from sft_play.data.sources.columns import NEGATIVE_COLUMNS, PREFERENCE_TAGS, REJECTED_COLUMNS
from sft_play.data.sources.formats import (
    FORMATS,
    TEXT_COLUMNS,
    Chat,
    detect_format,
    recognise_format,
    rename_columns,
    to_example,
)
from sft_play.data.sources.raw import BadRow, RawRow
from tests.conftest import chat

ASKED = [{"from": "human", "value": "q"}]
TURNS = chat("q", "a")["messages"]
SHAREGPT = [*ASKED, {"from": "gpt", "value": "a"}]


def read(row: dict[str, Any], **options: Any) -> Any:
    """The row as a file of it alone is read."""
    data = DataConfig(**options)
    raw = rename_columns(RawRow("f:1", row), data.columns)
    _, shape = detect_format(iter([RawRow("f:1", row)]), data)
    assert shape is not None
    return to_example(raw, shape, data)


def texts(found: Any) -> list[tuple[str, str]]:
    assert isinstance(found, Chat), found
    return [(message["role"], message["content"]) for message in found.messages]


QA = [("user", "q"), ("assistant", "a")]

KTO = "is false: an answer that is not wanted (KTO)"
DPO = "preferences (a chosen and a rejected answer, as for DPO)"


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"messages": TURNS, "label": False}, f"label {KTO}"),
        ({"conversations": SHAREGPT, "kto_tag": False}, f"kto_tag {KTO}"),
        ({"prompt": "q", "completion": "a", "label": False}, f"label {KTO}"),
        ({"prompt": [TURNS[0]], "completion": [TURNS[1]], "label": False}, f"label {KTO}"),
        ({"instruction": "q", "output": "a", "label": "False"}, f"label {KTO}"),
        ({"conversations": ASKED, "chosen": SHAREGPT[1], "rejected": {"from": "gpt", "value": "b"}}, DPO),
        ({"conversations": SHAREGPT, "chosen": "a", "rejected": "b"}, DPO),
        ({"messages": TURNS, "chosen": TURNS, "rejected": chat("q", "b")["messages"]}, DPO),
        ({"messages": TURNS, "rejected_response": "b"}, DPO),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, DPO),
        ({"prompt": "q", "chosen": TURNS, "rejected": json.dumps(chat("q", "b")["messages"])}, DPO),
        ({"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"}, DPO),
        ({"question": "q", "response": "a", "rejected": "b c"}, DPO),
        ({"query": "q", "answer": "a", "negative": "an other passage"}, "for retrieval or embeddings"),
        ({"query": "q", "response": "a", "neg": ["x", "y"]}, "for retrieval or embeddings"),
        ({"question": "q", "choices": ["x", "y"], "answer": 1}, "multiple choice"),
        ({"question": "q", "options": {"A": "x", "B": "y"}, "answer": "B"}, "multiple choice"),
    ],
)
def test_a_row_of_another_kind_is_named_and_a_whole_mapping_takes_it(row, kind):
    found = read(row)
    assert isinstance(found, BadRow), found
    assert kind in found.reason
    assert "data.columns" in found.detail or "column of its own" in found.detail


@pytest.mark.parametrize("key", ["messages", "conversations", "dialog", "turns", "conversation"])
@pytest.mark.parametrize("pack", [list, json.dumps])
def test_texts_without_speakers_are_turns_only_where_it_is_said(key, pack):
    row = {"question_id": 81, key: pack(["Compose a blog post.", "Rewrite it."]), "reference": []}
    found = read(row)
    assert isinstance(found, BadRow)
    assert "does not say whose they are" in found.reason
    assert "data.turns_without_roles=alternate" in found.detail
    taken = read(row, turns_without_roles="alternate")
    assert texts(taken) == [("user", "Compose a blog post."), ("assistant", "Rewrite it.")]


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": "prompt", "completion": "chosen"}),
        ({"chosen": TURNS, "rejected": chat("q", "b")["messages"]}, {"messages": "chosen"}),
        ({"prompt": "q", "chosen": TURNS, "rejected": chat("q", "b")["messages"]}, {"messages": "chosen"}),
        ({"messages": TURNS, "chosen": "x", "rejected": "y"}, {"messages": "messages"}),
        ({"messages": TURNS, "label": False}, {"messages": "messages"}),
    ],
)
def test_what_the_message_proposes_trains_what_it_says(row, columns):
    refused = read(row)
    said = f"{{{', '.join(f'{known}: {theirs}' for known, theirs in columns.items())}}}"
    assert isinstance(refused, BadRow)
    assert said in refused.detail
    assert texts(read(row, columns=columns)) == QA


def test_plain_text_may_have_any_label():
    for label in (0, 1, True, False, "neg", "false"):
        assert read({"text": "a film review", "label": label}).text == "a film review"


INNOCENT: dict[str, list[Any]] = {
    "label": [True, "true", 1, 3, "math", "", None, 0.5, ["a"], "falsehood", "desirable", "1"],
    "kto_tag": [True, None],
    "undesirable": [False, 0, None, "no"],
    "is_desirable": [True, 1, None],
    "chosen": [True, False, None, "yes", 1],
    "rejected": [True, False, None, "", "no", "False", 0, [], {}, " "],
    "rejected_by": ["a reviewer"],
    "negative": [True, 0, None, "no", -1],
    "choices": [None, [], 3, "one of them", ["x", "y"]],
    "options": [{"temperature": 0.5, "top_p": 1}, None],
    "labels": [["a", "b"], [1, 0]],
    "completions": [2, ["x"]],
    "id": ["7", 7],
    "source": ["web"],
    "category": ["brainstorm"],
    "score": [0.0, -1, 1],
    "quality": ["low", 5],
    "rating": [1],
    "winner": ["a"],
    "difficulty": ["easy"],
    "tags": [["x"], "x"],
    "meta": [{"label": False, "rejected": "b"}],
    "reward": [0.1],
    "turn": [1],
    "preference": [True],
}
"""Columns of real data sets with values that say nothing against the row."""


def _rows() -> list[dict[str, Any]]:
    """A row of every format, with answers of several words."""
    rows = []
    for shape in FORMATS:
        if shape.name in TEXT_COLUMNS:
            rows.append({shape.required_columns[0]: "some words"})
        elif len(shape.required_columns) == 1:
            rows.append({shape.required_columns[0]: TURNS})
        elif shape.kind == "calls":
            call = {"name": "look_up", "arguments": {"word": "light"}}
            rows.append({"query": "what is it", "answers": [call], "tools": [{"name": "look_up", "parameters": {}}]})
        else:
            rows.append({shape.required_columns[0]: "what is it", shape.required_columns[1]: "it is that"})
    return rows


def test_innocent_columns_change_nothing():
    """Every format with random columns beside it, seeded: the example is that of the row alone."""
    chance = random.Random(13)
    for row in _rows():
        alone = read(row)
        for _ in range(100):
            names = [key for key in chance.sample(sorted(INNOCENT), k=chance.randint(1, 6)) if key not in row]
            extra = {key: chance.choice(INNOCENT[key]) for key in names}
            items = list({**row, **extra}.items())
            chance.shuffle(items)
            if recognise_format(dict(items)) is recognise_format(row):
                assert read(dict(items)) == alone, (row, extra)


def test_what_tells_another_kind_is_found_among_any_other_columns():
    """The same with one column that does tell: refused, whatever stands beside it."""
    chance = random.Random(14)
    telling: dict[str, list[Any]] = {
        **{
            key: [True, "true", 1, "1"]
            if "un" in key
            else [False, "false", " False", 0, "0", 0.0, "undesirable", "rejected"]
            for key in PREFERENCE_TAGS
        },
        **{
            key: ["another answer", TURNS, [{"role": "assistant", "content": "b"}], {"x": "y"}]
            for key in REJECTED_COLUMNS
        },
        **{key: ["an other passage", ["x"], '["x", "y"]'] for key in NEGATIVE_COLUMNS},
    }
    refused = 0
    for row in _rows():
        for key, values in telling.items():
            if key in PREFERENCE_TAGS and set(row) & set(TEXT_COLUMNS):
                continue
            names = chance.sample(sorted(set(INNOCENT) - {*row, *telling, "chosen"}), k=3)
            extra = {name: chance.choice(INNOCENT[name]) for name in names}
            found = read({**row, **extra, key: chance.choice(values)})
            assert isinstance(found, BadRow), (row, key)
            refused += 1
    assert refused > 500
