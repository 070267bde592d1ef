"""Broken files that people really had: each one says where the fault is, what was found and what to do."""

import pytest

from sft_play.config.load import config_from_text
from sft_play.data.process import ProcessReport, process_files
from sft_play.data.sources import formats
from sft_play.errors import DataError
from tests.bundled import ORIGINS, bad_inputs

pytestmark = pytest.mark.parametrize("origin", ORIGINS)


def run(tmp_path, origin: str, name: str, *settings: str) -> ProcessReport:
    files = f"raw_path: {bad_inputs(origin)}/{name}, out_dir: {tmp_path}, val_fraction: 0, test_fraction: 0"
    text = f"model: {{name: no/model}}\ndata: {{process: {{{files}}}}}"
    return process_files(config_from_text(text, name="run.yaml", overrides=settings))


WHOLE_FILES = {
    "02_trailing_comma.json": ["02_trailing_comma.json:8: remove the comma before `]`"],
    "05_utf16.jsonl": ["is UTF-16, not UTF-8", "data.encoding=utf-16"],
    "06_latin1_bytes.jsonl": [":3: byte 0xF9 at column 45 is not UTF-8 (looks like latin1)", "data.encoding=latin1"],
    "07_gbk.jsonl": [":3: byte 0xC4 at column 44 is not UTF-8 (looks like gb18030)", "data.encoding=gb18030"],
    "08_empty_file.jsonl": ["08_empty_file.jsonl has no rows"],
}


@pytest.mark.parametrize("name", WHOLE_FILES)
def test_a_file_that_cannot_be_read_says_where_and_what_to_do(origin, tmp_path, name):
    for settings in ((), ("data.on_bad_row=skip",)):
        with pytest.raises(DataError) as error:
            run(tmp_path, origin, name, *settings)
        for part in WHOLE_FILES[name]:
            assert part in str(error.value)
    assert not list(tmp_path.glob("*.json*"))


BAD_ROWS = {
    "01_malformed_line.jsonl": (6, ":4: not valid JSON (the string that starts at column 43 is not closed. Line: {"),
    "10_missing_key.jsonl": (6, ":3: messages is missing (format messages; its keys: conversations)"),
    "11_null_content.jsonl": (6, ":3: content is not text (messages[1].content is null, expected a string"),
    "13_empty_messages.jsonl": (6, ":3: messages is empty"),
    "14_ends_with_user.jsonl": (6, ":3: ends with a user turn, nothing to learn from it"),
    "17_role_typo.jsonl": (6, ':3: unknown role "asistant" (messages[1]; did you mean "assistant"?)'),
    "18_content_is_number.jsonl": (6, ":3: content is not text (messages[1].content is a number, expected a string)"),
    "19_output_is_object.json": (1, ":1:52: output is not text (it is an object)"),
    "24_duplicate_json_key.jsonl": (6, ':1: the key "messages" occurs twice in one object'),
    "27_lone_surrogate.jsonl": (6, ":1: half of a surrogate pair (a broken emoji) in the text"),
    "30_nan_literal.jsonl": (1, ":1: NaN is not JSON"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_row_that_cannot_be_used_is_named_and_may_be_skipped(origin, tmp_path, name):
    kept, message = BAD_ROWS[name]
    with pytest.raises(DataError) as error:
        run(tmp_path, origin, name)
    assert message in str(error.value)
    assert f"1 of {kept + 1} rows cannot be used" in str(error.value)
    report = run(tmp_path, origin, name, "data.on_bad_row=skip")
    assert (report.rows_in, report.rows_kept) == (kept + 1, kept)
    assert sum(places.count for places in report.dropped.values()) == 1


READ = {
    "03_json_array_named_jsonl.jsonl": 6, "04_bom_utf8.jsonl": 6, "09_blank_lines.jsonl": 3,
    "20_tool_args_mixed_types.jsonl": 4, "21_tool_args_double_encoded.jsonl": 1, "22_all_longer_than_1024.jsonl": 4,
    "23_prompt_fills_window.jsonl": 7, "25_special_tokens_in_text.jsonl": 7, "29_crlf.jsonl": 6,
    "31_sharegpt_unknown_from.json": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_what_only_looks_odd_is_read_whole_without_a_word(origin, tmp_path, name):
    report = run(tmp_path, origin, name)
    assert (report.rows_kept, report.notes, report.dropped) == (READ[name], {}, {})


NOTED = {
    "12_empty_assistant.jsonl": (8, formats.NOTE_EMPTY, ["3", "4"]),
    "15_assistant_first.jsonl": (7, formats.NOTE_STARTS_WITH_ASSISTANT, ["3"]),
    "16_two_users_in_a_row.jsonl": (7, formats.NOTE_TWO_IN_A_ROW, ["3"]),
    "28_nul_and_control.jsonl": (7, formats.NOTE_CONTROL, ["1"]),
}


@pytest.mark.parametrize("name", NOTED)
def test_what_can_be_used_but_looks_wrong_is_counted_and_named(origin, tmp_path, name):
    rows, note, lines = NOTED[name]
    report = run(tmp_path, origin, name)
    assert (report.rows_kept, [place.rpartition(":")[2] for place in report.notes[note].first]) == (rows, lines)
    assert any(note in line for line in report.lines())


def test_options_mend_what_was_noted(origin, tmp_path):
    report = run(tmp_path, origin, "12_empty_assistant.jsonl", "data.drop_empty=true")
    assert (report.rows_kept, report.dropped["the answer is empty"].count) == (6, 2)
    assert run(tmp_path, origin, "16_two_users_in_a_row.jsonl", "data.merge_consecutive=true").notes == {}


def test_every_broken_file_of_rows_is_tried(origin):
    tried = {*WHOLE_FILES, *BAD_ROWS, *READ, *NOTED, "26_duplicates_and_leak.jsonl"}
    assert tried == {path.name for path in bad_inputs(origin).glob("*.json*")}
