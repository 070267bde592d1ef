"""Small decisions of the data layer, each checked against the plainest way to say it, on random inputs."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sft_play.config.load import config_from_text
from sft_play.config.schema import DataConfig
from sft_play.data.build.splits import MIN_HASHED_DOCUMENTS, build_splits
from sft_play.data.build.stats import RowStats, length_remedy
from sft_play.data.masks.render import Renderer
from sft_play.data.masks.token_row import IGNORED, TokenRow
from sft_play.data.preview import character_sign, choose_row_indices
from sft_play.data.sources.files import find_data_paths
from sft_play.data.sources.raw import BadRow
from sft_play.errors import DataError
from tests.models import CHATML, make_tokenizer

CHAT = [{"role": "user", "content": "say it"}, {"role": "assistant", "content": "it is said"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Any:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


@given(st.integers(1, 60), st.integers(1, 20), st.data())
@settings(deadline=None)
def test_the_rows_of_a_preview_are_spread_over_the_file(rows, count, data):
    longest = data.draw(st.integers(0, rows - 1))
    found = choose_row_indices(rows, count, longest_index=longest)
    assert found == sorted(set(found))
    assert len(found) == min(rows, count)
    assert set(found) <= set(range(rows))
    assert found[0] == 0
    if count > 1:
        assert found[-1] == rows - 1
    if count > 2:
        assert longest in found


@given(st.text(max_size=30))
@settings(deadline=None)
def test_signs_lose_no_character_of_a_text(text):
    signs = [character_sign(character) for character in text]
    assert all(sign.isprintable() for sign in signs)
    for character in "\x00\x1b\x9b\u00ad\u00a0\u200b\u202e\u2028\u2066\u3164\ufeff\U000e0041":
        assert character_sign(character) == f"⟨U+{ord(character):04X}⟩"
    assert all(sign == character or sign[0] in "·⏎⇥⟨" for sign, character in zip(signs, text, strict=True))


@given(
    rows=st.lists(st.one_of(st.sampled_from(["bad", "asked"]), st.lists(st.booleans(), min_size=2, max_size=20))),
    cut=st.integers(0, 30),
    truncate=st.sampled_from(["end", "prompt", "drop"]),
)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_counts_of_parts_add_up_and_every_row_and_trained_token_is_counted_once(tokenizer, rows, cut, truncate):
    """Rows are bad, left out as asked, or tokens of which some are trained; the limit is 8."""
    renderer = Renderer(tokenizer, DataConfig(truncate=truncate), max_seq_len=8)

    def counted(part: list[Any], first: int) -> RowStats:
        stats = RowStats("f", "messages", rows=len(part))
        for number, row in enumerate(part, start=first):
            if isinstance(row, str):
                stats.count_bad(BadRow(f"f:{number}", row, is_asked=row == "asked"))
                continue
            labels = [7 if trained else IGNORED for trained in [*row[:-1], True]]
            whole = TokenRow(f"f:{number}", [7] * len(row), labels, method="prefix", notes=("odd",) * (number % 2))
            left = renderer.truncate(whole)
            if isinstance(left, BadRow):
                stats.count_too_long(whole)
            else:
                stats.count_rendered(whole)
                stats.count_kept(left, whole)
        return stats

    together, parts = counted(rows, 1), counted(rows[:cut], 1)
    parts.add(counted(rows[cut:], 1 + len(rows[:cut])))
    assert parts == together
    tokens = [row for row in rows if not isinstance(row, str)]
    assert together.kept_rows + together.too_long_rows + sum(together.bad_rows.values()) + sum(
        together.left_out_rows.values()
    ) == len(rows)
    assert together.kept_rows == sum(together.methods.values())
    trained = [sum([*row[1:-1], True]) for row in tokens]  # the first token is never predicted, the last one is trained
    assert together.trained_tokens + together.lost_tokens == sum(trained)
    if truncate == "drop":
        assert together.too_long_rows == sum(len(row) > 8 for row in tokens)
        assert (together.cut_rows, together.tokens_lost_by_cut) == (0, 0)
    assert together.tokens + together.cut_tokens <= sum(map(len, tokens))
    assert sum(together.dropped_rows.values()) == len(rows) - together.kept_rows


@given(st.integers(1, 40), st.data())
@settings(max_examples=40, deadline=None)
def test_longer_limits_name_what_they_keep(count, data):
    lengths = [data.draw(st.integers(10, 900)) for _ in range(count)]
    limit = data.draw(st.integers(8, 300))
    positions = data.draw(st.sampled_from([None, 64, 256, 512, 4096]))
    counts, options = RowStats(rows=count), DataConfig()
    for length in lengths:
        counts.truncation_cost.add(length, [(0, length)])
    if max(lengths) <= limit:
        return
    said = length_remedy(counts, options, max_seq_len=limit, max_positions=positions)

    def kept(limit: int) -> float:  # the first token of a row is never predicted
        return sum(min(length, limit) - 1 for length in lengths) / sum(length - 1 for length in lengths)

    fitting = [one for one in range(64, 1_024, 64) if one > limit and (positions is None or one <= positions)]
    wanted = [next((one for one in range(64, 1_024, 64) if kept(one) >= share), 0) for share in (0.95, 1.0)]
    proposed = [one for one in dict.fromkeys(wanted) if one in fitting]
    shares = [f"{one} keeps {'all' if kept(one) == 1 else f'{kept(one):.1%}'}" for one in proposed]
    if proposed:
        assert said.startswith(f"set model.max_seq_len: {', '.join(shares)}, or keep the ends")
    elif positions is not None and positions > limit:
        assert said.startswith(f"set model.max_seq_len={positions}, the most that the model has: {kept(positions):.1%}")
    else:
        assert said.startswith("the model has no more positions: split or shorten the rows")


def splits_of(folder: Path, tokenizer: Any, rows: list[Any], *words: str, **more: Any) -> Any:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = config_from_text(
        "model: {name: m}\n",
        name="run.yaml",
        overrides=[f"data.train_path={folder}/rows.jsonl", "data.val_path=null", "data.test_path=null", *words],
    )
    return build_splits(run, find_data_paths(run.data), tokenizer, max_seq_len=64, **more)


def test_a_template_that_writes_the_day_is_told_today(tmp_path, tokenizer, monkeypatch):
    dated = CHATML.replace("{% for", "{{ strftime_now('%Y-%m-%d') }}\n{% for", 1)
    monkeypatch.setattr(tokenizer, "chat_template", dated)
    row = splits_of(tmp_path, tokenizer, [{"messages": CHAT}]).train.first_row()
    assert tokenizer.decode(row.input_ids).startswith(date.today().isoformat())
    told = splits_of(tmp_path, tokenizer, [{"messages": CHAT}], today=date(2020, 2, 3)).train.first_row()
    assert tokenizer.decode(told.input_ids).startswith("2020-02-03")


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 20])
def test_of_few_documents_the_ends_are_held_out_and_of_many_whole_ones(tmp_path, tokenizer, count):
    rows = [{"text": f"document {number}: " + "it is said again and again " * 40} for number in range(count)]
    made = splits_of(tmp_path, tokenizer, rows, "task_mode=cpt", "data.val_fraction=0.2")
    held = tokenizer.decode([token for row in made.val.rows for token in row["input_ids"]]) if made.val else ""
    if count < MIN_HASHED_DOCUMENTS:
        assert made.val is not None
        assert "document 0:" not in held
    elif held:
        assert held.count("document ") == sum(f"document {number}:" in held for number in range(count)) > 0
    with_bad = [*rows, {"text": 7}]
    with pytest.raises(DataError, match="row"):  # a bad row is judged, however few the documents are
        splits_of(tmp_path, tokenizer, with_bad, "task_mode=cpt", "data.val_fraction=0.2")


@given(st.integers(1, 40), st.sampled_from([0.05, 0.3, 0.5, 0.9]))
@settings(max_examples=12, deadline=None)
def test_text_is_mixed_in_by_its_share(tmp_path_factory, tokenizer, chats, share):
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "texts.jsonl").write_text(json.dumps({"text": "some words of plain text " * 4000}) + "\n")
    rows = [{"messages": [{"role": "user", "content": f"say {n}"}, CHAT[1]]} for n in range(chats)]
    words = ["task_mode=cpt_mixed", f"data.text_path={folder}/texts.jsonl", f"data.text_fraction={share}"]
    made = splits_of(folder, tokenizer, rows, *words)
    sources = [row["source"] for row in made.train.rows]
    assert sources.count(0) == chats
    assert sources.count(1) == max(1, round(chats * share / (1 - share)))
