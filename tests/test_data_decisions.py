"""Small decisions of the data layer, each checked against the plainest way to say it, on random inputs."""

import copy
import json
import re
from array import array
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from sft_play.config.load import config_from_text
from sft_play.config.schema import DataConfig
from sft_play.data import checks
from sft_play.data.build.splits import MIN_HASHED_DOCUMENTS, build_splits
from sft_play.data.build.stats import RowStats, TruncationCost, length_remedy
from sft_play.data.build.survey import RowCounter
from sft_play.data.masks.render import Renderer
from sft_play.data.masks.token_row import IGNORED, TokenRow
from sft_play.data.masks.turns import SENTINEL_PREFIX, MarkedPiece, MarkedText
from sft_play.data.preview import character_sign, choose_row_indices
from sft_play.data.sources.files import find_data_paths
from sft_play.data.sources.raw import BadRow
from sft_play.errors import DataError
from tests.conftest import write_rows
from tests.models import CHATML

CHAT = [{"role": "user", "content": "say it"}, {"role": "assistant", "content": "it is said"}]


@given(st.integers(1, 60), st.integers(1, 20), st.data())
@settings(deadline=None)
def test_the_rows_of_a_preview_are_spread_over_the_file(rows, count, data):
    longest = data.draw(st.integers(0, rows - 1))
    found = choose_row_indices(rows, count, longest_index=longest)
    assert (found, len(found), found[0]) == (sorted(set(found) & set(range(rows))), min(rows, count), 0)
    assert count < 2 or found[-1] == rows - 1
    assert count < 3 or longest in found


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
    left_out = sum(together.bad_rows.values()) + sum(together.left_out_rows.values())
    assert together.kept_rows + together.too_long_rows + left_out == len(rows)
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


def lost(kept: int, out: int, share: float) -> dict[str, Any]:
    """Counts of rows of which max_seq_len took this share of 100 trained tokens."""
    cost = TruncationCost("end")
    cost.add(101, [(0, 101)])
    return {"kept_rows": kept, "too_long_rows": out, "tokens_lost_by_cut": round(100 * share), "truncation_cost": cost}


BAD = {"bad_rows": Counter({"odd": 1}), "unmasked_rows": Counter({"odd": 1}), "kept_rows": 2}
SKIP = DataConfig(on_bad_row="skip")
FIVE = DataConfig(max_lost_fraction=0.05)
TEXTS, SPELLED = {"special_rows": 1, "special_token_count": 2}, "special_tokens_in_text"
JUDGES: dict[str, Callable[[RowStats, DataConfig, Any], Any]] = {
    "rows": lambda stats, data, _: checks.judge_rows(stats, data, task_mode="sft"),
    "cpt": lambda stats, data, _: checks.judge_rows(stats, data, task_mode="cpt"),
    "copies": lambda stats, *_: checks.judge_duplicates([stats]),
    "beside val": lambda stats, *_: checks.judge_duplicates([RowStats(split="val", digests=array("Q", [2])), stats]),
    "beside text": lambda stats, *_: checks.judge_duplicates([RowStats(split="text", digests=array("Q", [1])), stats]),
    "masks": lambda stats, data, _: checks.judge_masks(stats, data),
    "texts": lambda stats, data, _: checks.judge_texts(stats, data),
    "lengths": lambda stats, data, _: checks.judge_lengths(stats, data, max_seq_len=8, max_positions=None),
    "blocks": lambda stats, *_: [checks.judge_blocks(stats, max_seq_len=8)],
    "tokens": lambda stats, _, tokenizer: checks.judge_special_tokens(stats, tokenizer),
}


@pytest.mark.parametrize(("judge", "counts", "data", "found"), [
    ("rows", {"chats": 3}, None, "PASS"),
    ("rows", {"rows": 0}, None, "FAIL"),
    ("rows", BAD, None, "FAIL"),
    ("rows", BAD, SKIP, "WARN"),
    ("rows", {"left_out_rows": Counter(a=2), "notes": Counter(b=1), "first_note_locations": {"b": "f:1"}}, None,
     "PASS PASS WARN"),
    ("rows", {"unused_columns": Counter({("url", "", ()): 1})}, None, "PASS PASS"),
    ("rows", {"unused_columns": Counter({("passage", "context", ()): 1})}, None, "PASS WARN"),
    ("cpt", {"chats": 1}, None, "FAIL"),
    ("copies", {"digests": array("Q", [1, 2])}, None, "PASS"),
    ("copies", {"digests": array("Q", [1, 1])}, None, "WARN"),
    ("beside val", {"digests": array("Q", [1, 2])}, None, "WARN PASS"),
    ("beside text", {"digests": array("Q", [1, 2])}, None, "PASS"),
    ("masks", BAD, None, "FAIL"),
    ("masks", BAD, SKIP, "WARN"),
    ("masks", {"kept_rows": 0}, None, "SKIP"),
    ("masks", {"methods": Counter(inexact=1), "untrained_turns": 1}, None, "PASS WARN WARN"),
    ("masks", {"methods": Counter(prefix=3), "merged_edges": 1}, None, "PASS PASS"),
    ("texts", {"stripped_think_pieces": 1}, None, "WARN"),
    ("texts", TEXTS, None, "PASS"),
    ("texts", TEXTS, DataConfig(**{SPELLED: "control"}), "WARN"),
    ("texts", TEXTS | {"special_documents": 1}, None, "WARN"),
    ("lengths", lost(3, 0, 0), FIVE, "PASS"),
    ("lengths", lost(3, 0, 0.05), FIVE, "WARN"),  # as much as is accepted
    ("lengths", lost(3, 0, 0.06), FIVE, "FAIL"),
    ("lengths", lost(3, 0, 0.06) | {"split": "val"}, FIVE, "WARN"),
    ("lengths", lost(0, 3, 0.01), FIVE, "FAIL"),
    ("lengths", lost(2, 1, 0), FIVE, "WARN"),
    ("blocks", {"tokens": 16}, None, "PASS"),
    ("blocks", {"tokens": 7}, None, "FAIL"),
    ("blocks", {"tokens": 7, "split": "val"}, None, "PASS"),
    ("blocks", {"kept_rows": 0}, None, "SKIP"),
    ("tokens", {"texts": 1}, None, ""),
    ("tokens", {"rows_with_bos": 3}, None, "PASS PASS PASS"),
    ("tokens", {"rows_with_bos": 2}, None, "WARN PASS PASS"),
    ("tokens", {"rows_with_open_end": 1, "first_open_end_location": "f:1"}, None, "PASS WARN PASS"),
    ("tokens", {"rows_with_cut_end": 1, "rows_training_pad": 1}, None, "PASS WARN WARN"),
])  # fmt: skip
def test_what_is_counted_is_judged(tokenizer, judge, counts, data, found):
    """Three rows of a training file, but for what is said."""
    stats = RowStats(**{"source": "f", "split": "train", "rows": 3, "kept_rows": 3, **counts})
    findings = list(JUDGES[judge](stats, data or DataConfig(), tokenizer))
    assert " ".join(finding.verdict for finding in findings) == found, findings


def test_marks_of_rows_are_counted(tokenizer):
    bos, pad, end, a = 1, 0, 2, 77
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.bos_token = "<|im_start|>"
    counter, stats = RowCounter(Renderer(tokenizer, DataConfig(), max_seq_len=64)), RowStats()
    for number, ids in enumerate([[bos, a, end], [bos, a, a], [a, end, a], [a, pad, end], [a, end, a, a]], start=1):
        row = TokenRow(f"f:{number}", ids, [IGNORED, *ids[1:]], method="prefix")
        counter.count(stats, number, row, row)
    plain = TokenRow("f:6", [a, a], [a, a], method="document")
    counter.count(stats, 6, plain, plain)
    assert (stats.rows_with_bos, stats.rows_training_pad, dict(stats.end_token_ids)) == (2, 1, {end: 3})
    assert (stats.rows_with_open_end, stats.first_open_end_location) == (2, "f:2")
    without = RowStats(kept_rows=3, split="train")
    assert next(checks.judge_special_tokens(without, tokenizer)).verdict == "PASS"
    put = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)])
    tokenizer.backend_tokenizer.post_processor = put  # it begins each text with BOS, and no row has one
    assert next(checks.judge_special_tokens(without, tokenizer)).verdict == "WARN"


def test_the_columns_of_every_source_that_is_trained_are_looked_at_and_the_hub_is_not_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    passage = "The lamp in the hall was lit at noon, and nobody had touched it. " * 4
    asked = {"question": "Which lamp is on?", "answer": "It."}
    for name, row in {
        "plain": asked, "about": {**asked, "passage": passage}, "held": {**asked, "passage": passage},
        "text": {"text": "words", "reasoning": passage},
    }.items():  # fmt: skip
        Path(f"{name}.jsonl").write_text(json.dumps(row) + "\n")

    def missed(data: str, mode: str = "sft") -> list[str]:
        run = config_from_text(f"model: {{name: m}}\ntask_mode: {mode}\ndata: {data}", name="x.yaml")
        return [line.partition(" not read: ")[0] for line in checks.missed_column_lines(run.data, task_mode=mode)]

    sources = "{sources: [{path: plain.jsonl}, {path: about.jsonl}, {path: 'hub:o/n'}], val_path: held.jsonl}"
    assert missed(sources) == ["Columns of source about"]
    assert missed("{train_path: about.jsonl, val_path: held.jsonl}") == ["Columns"]
    mixed = "{train_path: plain.jsonl, val_path: held.jsonl, text_path: text.jsonl}"
    assert missed(mixed, "cpt_mixed") == ["Columns of text"]
    assert missed("{train_path: text.jsonl, val_path: null}", "cpt") == ["Columns"]


def test_the_share_of_padding_of_the_runs_own_batches_is_marked():
    shares, packed = {"random": 0.5, "grouped": 0.2, "best_fit": 0.1}, ("best_fit", True, "packed (best_fit)")
    for packing, groups, marked in (("none", False, "random order"), ("none", True, "grouped by length"), packed):
        found = checks.judge_padding(shares, micro_batch=4, packing=packing, groups_by_length=groups).found
        assert re.findall(r"[,:] ([^,:]+) [\d.]+% \(this run\)", found) == [marked]


def test_what_max_seq_len_loses_comes_with_what_would_keep_it():
    cost = TruncationCost("end")
    cost.add(6, [(4, 6)])
    cost.add(100, [(90, 100)])
    stats = RowStats("f", rows=2, split="train", kept_rows=1, too_long_rows=1, truncation_cost=cost)
    for truncate, positions in (("end", 64), ("prompt", 8)):
        said = length_remedy(stats, DataConfig(truncate=truncate), max_seq_len=8, max_positions=positions)
        assert ("data.truncate=prompt" in said, "split or shorten the rows" in said) == (truncate == "end", True)
    short, shorter = (TokenRow("f", [7] * size, [IGNORED] * size + [7]) for size in (100, 56))
    for row in (short, shorter, short):
        stats.count_too_long(row)
    assert stats.shortest_prompt == 56
    for truncate, said in (("drop", "3 of 5 rows left out"), ("end", "3 of 5 rows without any trained token left")):
        stats = RowStats(**{"rows": 5, "split": "val", "rows_with_cut_end": 1, **lost(2, 3, 0.5)})
        (found,) = JUDGES["lengths"](stats, DataConfig(truncate=truncate), None)
        assert said in found.found
        assert "1 of 5 rows train an answer without its end" in found.found


def splits_of(folder: Path, tokenizer: Any, rows: list[Any], *words: str, **more: Any) -> Any:
    write_rows(folder / "rows.jsonl", rows)
    files = (f"data.train_path={folder}/rows.jsonl", "data.val_path=null", "data.test_path=null")
    run = config_from_text("model: {name: m}\n", name="run.yaml", overrides=[*files, *words])
    return build_splits(run, find_data_paths(run.data), tokenizer, max_seq_len=64, **more)


def test_a_template_that_writes_the_day_is_told_today(tmp_path, tokenizer, monkeypatch):
    dated = CHATML.replace("{% for", "{{ strftime_now('%Y-%m-%d') }}\n{% for", 1)
    monkeypatch.setattr(tokenizer, "chat_template", dated)
    for told, day in (({}, date.today()), ({"today": date(2020, 2, 3)}, date(2020, 2, 3))):
        row = splits_of(tmp_path, tokenizer, [{"messages": CHAT}], **told).train.first_row()
        assert tokenizer.decode(row.input_ids).startswith(day.isoformat())


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


def test_what_a_share_splits_off_is_counted_on_its_side_and_where_that_is_nothing_it_is_said(tmp_path, tokenizer):
    many = [{"messages": [{"role": "user", "content": f"say {n}"}, CHAT[1]]} for n in range(60)]
    made = splits_of(tmp_path, tokenizer, many, "data.val_fraction=0.3")
    counts = [split.stats.rows for split in (made.train, made.val)]
    assert (counts, sum(counts), counts[1] > 5) == ([len(made.train.rows), len(made.val.rows)], 60, True)
    assert (len(made.train.chats), len(made.val.chats)) == (0, counts[1])  # of which answers are generated
    rows = [{"messages": CHAT}]
    nothing = splits_of(tmp_path, tokenizer, rows, "data.val_fraction=0.000001")
    assert (nothing.val, [note for note in nothing.notes if "leaves no validation rows" in note] != []) == (None, True)
    given = splits_of(tmp_path, tokenizer, rows, f"data.val_path={tmp_path}/rows.jsonl", "data.val_fraction=0.4")
    assert (len(given.train.rows), len(given.val.rows)) == (1, 1)
    assert any("data.val_fraction=0.4 is not used" in note for note in given.notes)


@given(st.integers(1, 40), st.sampled_from([0.05, 0.3, 0.5, 0.9]))
@settings(max_examples=12, deadline=None)
def test_text_is_mixed_in_by_its_share(tmp_path_factory, tokenizer, chats, share):
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "texts.jsonl").write_text(json.dumps({"text": "some words of plain text " * 4000}) + "\n")
    rows = [{"messages": [{"role": "user", "content": f"say {n}"}, CHAT[1]]} for n in range(chats)]
    words = ["task_mode=cpt_mixed", f"data.text_path={folder}/texts.jsonl", f"data.text_fraction={share}"]
    made = splits_of(folder, tokenizer, rows, *words)
    sources = [row["source"] for row in made.train.rows]
    assert (sources.count(0), sources.count(1)) == (chats, max(1, round(chats * share / (1 - share))))


@pytest.mark.parametrize(("written", "changed"), [
    ("{0}", set()), ("{0!j}", set()), ("x", {0}), ("{open}", {0}), ("{open}{1}", {0}),
])  # fmt: skip
def test_pieces_that_a_template_changes_or_cuts_off_are_named(written, changed):
    """`x` in place of the text, the text in JSON, and an end that is cut off, at the end and before another piece."""
    pieces = [MarkedPiece(0, "content", 'say "lamp"'), MarkedPiece(1, "content", "hall")]
    begin, end = (f"{SENTINEL_PREFIX}00000{letter}" for letter in "be")
    other = f"{SENTINEL_PREFIX}00001bhall{SENTINEL_PREFIX}00001e"
    texts = {"{0}": pieces[0].text, "{0!j}": json.dumps(pieces[0].text)[1:-1], "x": "x"}
    text = f"{begin}{texts[written]}{end}" if written in texts else f"{begin}lamp" + other * ("1" in written)
    marked = MarkedText(f"a {text} b", pieces)
    assert marked.changed_pieces == changed
    assert marked.gap_spans[-1][1] == len(marked.text)


def test_arguments_that_are_encoded_twice_are_changed():
    begin, end = (f"{SENTINEL_PREFIX}00000{letter}" for letter in "be")
    for kind, changed in (("content", set()), ("arguments", {0})):
        piece = MarkedPiece(0, kind, '{"a": "b"}')
        assert MarkedText(begin + json.dumps(piece.text)[1:-1] + end, [piece]).changed_pieces == changed
