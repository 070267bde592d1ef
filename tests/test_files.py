"""Files: every kind is read by its content, streamed, split into parts, and refused with a place and a way out."""

import contextlib
import csv
import datetime
import decimal
import functools
import gzip
import hashlib
import io
import json
import math
import os
import pickle
import random
import tracemalloc
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sft_play.config.schema import DataConfig, Encoding
from sft_play.data.build.survey import estimate_size
from sft_play.data.sources import files, raw, tables
from sft_play.data.sources.examples import count_part_rows
from sft_play.data.sources.raw import BadRow, RawRow
from sft_play.errors import DataError
from tests.conftest import chat, refusal_of, write_rows

ROW = chat("hello there", "how are you?")


def rows(path, **options):
    return list(files.read_rows(path, split="train", **options))


def parts_of(source, *, part_bytes=8 << 20, wants_text=False):
    parts = files.list_parts(source, split="train", wants_text=wants_text)
    return [piece for part in parts for piece in files.split_part(part, part_bytes=part_bytes)]


def data_of(path, **options):
    return [row.data for row in rows(path, **options)]


def lines(path: Path, *items: Any) -> Path:
    return write_rows(path, items)


refusal = functools.partial(refusal_of, DataError, rows)


class TestKinds:
    @pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.txt", "a", "a.csv"])
    def test_json_is_told_by_its_content(self, tmp_path, name):
        path = tmp_path / name
        path.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW) + "\n")
        assert files.file_kind(path) == "lines"
        path.write_text(json.dumps([ROW, ROW], indent=1))
        assert files.file_kind(path) == "array"
        assert data_of(path) == [ROW, ROW]

    def test_objects_over_several_lines_are_rows(self, tmp_path):
        path = tmp_path / "a.json"
        path.write_text(json.dumps(ROW, indent=2))
        assert data_of(path) == [ROW]
        path.write_text("\n".join(json.dumps(ROW, indent=2) for _ in range(3)))
        assert data_of(path) == [ROW] * 3
        assert [row.where.rpartition(":")[2] for row in rows(path)] == ["1", "13", "25"]
        path.write_text(json.dumps(ROW, indent=2)[:-2])
        assert "not valid JSON" in refusal(path)

    @pytest.mark.parametrize("indent", [None, 2], ids=["a line", "lines"])
    @pytest.mark.parametrize("key", ["data", "my list"])
    def test_an_object_around_a_list_of_rows_is_these_rows(self, tmp_path, indent, key):
        path = tmp_path / "a.json"
        about = {"version": 1, "info": {"name": "x", "tags": ["a", "b"]}, "languages": ["en", "de"]}
        for whole in ({**about, key: [ROW, ROW]}, {key: [ROW, ROW], **about}):
            path.write_text(json.dumps(whole, indent=indent))
            assert data_of(path) == [ROW, ROW]
            assert [row.where for row in rows(path)] == [f"{path}:1 {key}[0]", f"{path}:1 {key}[1]"]
        (tmp_path / "b.json.gz").write_bytes(gzip.compress(json.dumps(whole, indent=indent).encode()))
        assert data_of(tmp_path / "b.json.gz") == [ROW, ROW]

    def test_a_row_with_a_list_of_objects_beside_its_text_is_a_row(self, tmp_path):
        path = tmp_path / "a.jsonl"
        for row in (
            {"prompt": "q", "completion": "a", "spans": [{"begin": 1}]},
            {"Unterhaltung": ROW["messages"]},
            {"train": [{"text": "a"}], "test": [{"text": "b"}]},  # of which one would be lost
        ):
            path.write_text(json.dumps(row))
            assert data_of(path) == [row]
        lines(path, {"data": [ROW]}, {"data": [ROW]})
        assert data_of(path) == [{"data": [ROW]}] * 2

    @pytest.mark.parametrize(("content", "message"), [
        (b" \n\n", "has no rows: the file is blank"), (b"[]", "the list is empty"),
        (b'[{"a": 1}\n{"a": 2}]', "x.jsonl:2: expected `,` or `]` after a row, found `{`"),
        (b'[{"a": 1}', "found the end of the file"), (b'[{"a": 1}] x', "text after the end of the list"),
        (b"question,answer\nwhat?,that\n", "or a table with a header line (.csv)"),
        ("{}".encode("utf-32"), "is UTF-32"),
        (b'[{"a": 1},\n {"a": tru}]', '2: not valid JSON: Expecting value at column 8. Line: {"a": tru}]'),
        (b"<!DOCTYPE html><html>", "a web page saved in place of the file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "git lfs pull"),
        (b"PK\x03\x04rest", "a zip archive"), (b"BZh9", "bunzip2"), (b"\x80\x04\x95", "pickle"),
        (b"('a', 1)", "json.dumps"), (gzip.compress(gzip.compress(b"{}", mtime=0), mtime=0), "gzipped twice"),
        (gzip.compress(b"PAR1PAR1", mtime=0), "is gzipped Parquet"),
        (b"PAR1garbagePAR1", "is Parquet that cannot be read"), (b"ARROW1garbage", "is Arrow that cannot be read"),
        (gzip.compress(json.dumps(ROW).encode() * 50, mtime=0)[:-20], "cannot be read"),
    ])  # fmt: skip
    def test_what_is_no_data_file_says_what_it_is(self, tmp_path, content, message):
        (tmp_path / "x.jsonl").write_bytes(content)
        assert message in refusal(tmp_path / "x.jsonl")


class TestJson:
    def test_a_list_is_read_piece_by_piece_with_its_lines(self, tmp_path, monkeypatch):
        monkeypatch.setattr(raw.read_blocks, "__kwdefaults__", {**raw.read_blocks.__kwdefaults__, "size": 7})
        items = [{"n": n, "text": "é\n" * n, "in": [1.5e3, -2, {"x": None}]} for n in range(30)]
        path = tmp_path / "a.json"
        path.write_text(json.dumps(items, indent=1, ensure_ascii=False))
        found = rows(path)
        assert [row.data for row in found] == items
        text = path.read_text().split("\n")
        assert all(text[int(row.where.rpartition(":")[2]) - 1].strip() == "{" for row in found)
        path.write_text("[1, 12345, 1.5e+3, true, null]")
        assert [row.detail for row in rows(path)] == ["1", "12345", "1500.0", "true", "null"]

    def test_a_row_of_a_list_that_would_lose_something_is_a_bad_row_and_the_rest_is_read(self, tmp_path):
        (tmp_path / "a.json").write_text('[{"a": 1, "a": 2},\n{"a": NaN},\n{"a": "\\ud83d"},\n{"a": 1e999},\n{"b": 3}]')
        found = rows(tmp_path / "a.json")
        assert [str(row).rpartition("/")[2] for row in found[:4]] == [
            'a.json:1: the key "a" occurs twice in one object', "a.json:2: NaN is not JSON",
            "a.json:3: half of a surrogate pair (a broken emoji) in the text", "a.json:4: a number is too large",
        ]  # fmt: skip
        assert found[4].data == {"b": 3}

    @pytest.mark.parametrize(("line", "message"), [
        ('{"a": 1},', "remove the comma at the end (column 9)"),
        ('{"a": 1}{"a": 2}', "a second object on the same line at column 9"),
        ("{'a': 1}", "keys and strings need double quotes"),
        ('{"a": "b\tc"}', "a raw control character inside a string at column 9"),
        ('{"a": ' + "[" * 5_000, "nested too deeply"), ('{"a": ' + "[" * 300 + "]" * 300 + "}", "nested too deeply"),
        ('{"\\udc00": "a"}', "half of a surrogate pair"), ('{"a": 1e400}', "a number is too large"),
        ('{"a": {"\\ud83d": 1}}', "half of a surrogate pair"), ('"text"', "a row is not an object"),
        ('{"messages": [', "the object goes on in the next line"), ('{"a": ' + "1" * 5000 + "}", "too many digits"),
    ])  # fmt: skip
    def test_a_bad_line_says_what_to_do(self, tmp_path, line, message):
        (tmp_path / "a.jsonl").write_text(f"{json.dumps(ROW)}\n{line}\n{json.dumps(ROW)}\n")
        first, bad, last = rows(tmp_path / "a.jsonl")
        assert message in str(bad)
        assert bad.where.endswith("a.jsonl:2")
        assert (first.data, last.data) == (ROW, ROW)

    def test_pairs_of_surrogates_and_marks_inside_files_are_no_faults(self, tmp_path):
        (tmp_path / "a.jsonl").write_text('\ufeff{"a": "\\ud83d\\ude00"}\n\ufeff{"a": "b"}\n')
        assert data_of(tmp_path / "a.jsonl") == [{"a": "\U0001f600"}, {"a": "b"}]

    def test_rows_before_a_byte_that_is_not_utf8_are_given_first(self, tmp_path):
        (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n{bad}\n{"a": "\xff"}\n')
        reader = files.read_rows(tmp_path / "a.jsonl", split="train")
        assert [type(next(reader)), type(next(reader))] == [RawRow, BadRow]
        with pytest.raises(DataError, match=r"a\.jsonl:3: byte 0xFF at column 8 is not UTF-8"):
            next(reader)

    def test_a_byte_behind_a_character_that_a_blocks_end_cuts_has_its_place(self, tmp_path, monkeypatch):
        monkeypatch.setattr(raw, "read_blocks", lambda path: iter([b"a\xc3", b"\xa9b\xff", b"c"]))
        pieces = raw.read_text_blocks(tmp_path / "a.txt")
        assert next(pieces) == "a"
        with pytest.raises(DataError, match="byte 0xFF at column 5 "):
            next(pieces)


TEXTS = {
    "cp1251": "Привет, как дела? Это простой текст на русском языке.",
    "koi8-r": "Привет, как дела? Это простой текст на русском языке.",
    "cp932": "こんにちは、元気ですか？これはテストです。", "euc-jp": "こんにちは、元気ですか？これはテストです。",
    "euc-kr": "안녕하세요, 오늘 날씨가 좋네요. 이것은 시험입니다.",
    "big5": "你好，今天天氣很好。這是一個測試，我們來看看。", "cp1252": "“Où” est le café – là",
}  # fmt: skip


@pytest.mark.parametrize("encoding", TEXTS)
def test_another_encoding_is_guessed_and_the_option_is_named(tmp_path, encoding):
    text = TEXTS[encoding]
    path = tmp_path / "a b.jsonl"
    path.write_bytes(b'{"text": "ascii"}\n' + json.dumps({"text": text}, ensure_ascii=False).encode(encoding) + b"\n")
    message = refusal(path)
    first = next(byte for byte in path.read_bytes() if byte > 0x7F)
    assert f"a b.jsonl:2: byte 0x{first:02X} at column 1" in message
    assert f"(looks like {encoding}): data.encoding={encoding} in a run reads it so" in message


def test_a_gzipped_file_that_unpacks_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(raw, "MAX_UNPACKED_BYTES", 1 << 20)
    (tmp_path / "bomb.jsonl.gz").write_bytes(gzip.compress(b"{}\n" * (1 << 20)))
    assert "unpacks to more than" in refusal(tmp_path / "bomb.jsonl.gz")
    lines(tmp_path / "fine.jsonl", *[{"text": str(n)} for n in range(10_000)])
    (tmp_path / "fine.gz").write_bytes(gzip.compress((tmp_path / "fine.jsonl").read_bytes()))
    assert len(rows(tmp_path / "fine.gz")) == 10_000


class TestTables:
    def test_csv_takes_quotes_line_breaks_marks_and_other_delimiters(self, tmp_path):
        (tmp_path / "a.csv").write_text('\ufeffquestion,answer\r\n"a ""b""\nc",d\r\n\r\ne,f\r\n')
        found = rows(tmp_path / "a.csv")
        first, second = {"question": 'a "b"\nc', "answer": "d"}, {"question": "e", "answer": "f"}
        assert [row.data for row in found] == [first, second]
        assert [row.where.rpartition(":")[2] for row in found] == ["2", "5"]
        for name, mark in (("b.csv", ";"), ("c.tsv", "\t"), ("d.csv", "|")):
            (tmp_path / name).write_text(f"question{mark}answer\n1,5{mark}b\n")
            assert data_of(tmp_path / name) == [{"question": "1,5", "answer": "b"}]
        (tmp_path / "e.csv").write_text("text\none\ntwo\n")
        assert data_of(tmp_path / "e.csv") == [{"text": "one"}, {"text": "two"}]
        (tmp_path / "f.csv").write_text(",question,answer\n0,a,b\n")  # pandas' index is no column
        assert data_of(tmp_path / "f.csv") == [{"question": "a", "answer": "b"}]
        for first in ("sep=^\n", "\ufeffSEP=^\r\n", '"sep=^"\n'):  # which tells Excel the delimiter
            (tmp_path / "g.csv").write_text(f"{first}question^answer\nx^d\ne\nf^g^h\n")
            good, bad, worse = rows(tmp_path / "g.csv")
            assert (good.data, good.where[-2:]) == ({"question": "x", "answer": "d"}, ":3")
            assert "g.csv:4: 1 fields instead of 2" in str(bad)
            assert "g.csv:5: 3 fields instead of 2" in str(worse)
        (tmp_path / "h.csv").write_text("sep,text\n;,b\n")
        assert data_of(tmp_path / "h.csv") == [{"sep": ";", "text": "b"}]

    def test_a_csv_file_that_cannot_be_read_says_why_and_old_line_ends_are_read(self, tmp_path):
        path = tmp_path / "a.csv"
        for text, message in {
            'a,b\n1,2\n3,"open\n4,5\n': "a.csv:3: a quote opened in this row is not closed",
            "a,a\n1,2\n": 'names the column "a" twice',
            "a,,c\n1,2,3\n": "column 2 of the header has no name",
            "\n\n": "has no rows",
        }.items():
            path.write_text(text)
            assert message in refusal(path)
        for end in ("\r", "\n", "\r\n"):
            path.write_bytes(end.join(["prompt;completion", "q1;a1", 'q2;"a,2"', ""]).encode())
            assert [[*row.values()] for row in data_of(path)] == [["q1", "a1"], ["q2", "a,2"]]

    def test_cells_that_pandas_reads_as_missing_are_marked_and_kept_for_an_option_to_decide(self, tmp_path):
        from pandas._libs.parsers import STR_NA_VALUES

        assert STR_NA_VALUES - {""} == tables.NA_WORDS
        path = tmp_path / "a.csv"
        for word in sorted(tables.NA_WORDS):
            path.write_text(f'question,answer,more\na,{word},"{word}"\nb,x {word},\n')
            first, second = rows(path)
            assert (first.data["answer"], first.missing) == (word, ("answer", "more"))
            assert (second.data["answer"], second.missing) == (f"x {word}", ())

    def table(self, count: int):
        messages = [chat(f"q{n}", f"a{n}")["messages"] for n in range(count)]
        return pa.table({"messages": messages, "n": list(range(count)), "note": [None, "x"] * (count // 2)})

    @pytest.mark.parametrize("kind", ["parquet", "arrow", "stream", "feather"])
    def test_parquet_and_arrow_are_read_row_by_row_by_their_content(self, tmp_path, kind):
        table, path = self.table(2_500), tmp_path / "a.jsonl"
        if kind == "parquet":
            pyarrow.parquet.write_table(table, path, row_group_size=700)
        elif kind == "feather":
            pyarrow.feather.write_feather(table, str(path))
        else:
            make = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
            with make(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=900)
        found = rows(path)
        assert (len(found), found[2_000].where) == (2_500, f"{path}:row 2001")
        assert found[2_000].data == {"messages": table["messages"][2_000].as_py(), "n": 2_000}  # the null is left out
        assert found[2_001].data["note"] == "x"

    @pytest.mark.parametrize("kind", ["arrow", "stream"])
    def test_a_damaged_offset_of_arrow_is_an_error_of_the_data(self, tmp_path, kind):
        """Read as it stands it lies far behind the file, and ends the process by SIGBUS."""
        draw = random.Random(1)
        texts = ["x" * draw.randint(1, 9) for _ in range(40)]
        offsets = [sum(map(len, texts[:n])) for n in range(len(texts) + 1)]
        sink = pa.BufferOutputStream()
        with (pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream)(sink, pa.schema([("text", "string")])) as file:
            file.write_table(pa.table({"text": texts}))
        content = bytearray(sink.getvalue().to_pybytes())
        at = content.index(b"".join(one.to_bytes(4, "little") for one in offsets)) + 4 * draw.randint(1, len(texts))
        content[at : at + 4] = draw.randint(2**20, 2**31 - 1).to_bytes(4, "little")
        (tmp_path / "a.arrow").write_bytes(content)
        assert "is Arrow that cannot be read" in refusal(tmp_path / "a.arrow")

    def test_values_that_json_has_not_become_values_that_it_has(self, tmp_path):
        columns = {
            "text": pa.array([b"caf\xc3\xa9", b"\xff"], pa.binary()), "deep": [[{"x": float("inf")}], None],
            "day": [datetime.date(2026, 1, 2), None], "cost": [decimal.Decimal("1.50"), None], "score": [math.nan, 0.5],
        }  # fmt: skip
        pyarrow.parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
        good, bad = rows(tmp_path / "a.parquet")
        assert good.data == {"text": "café", "day": "2026-01-02", "cost": "1.50", "deep": [{"x": None}]}
        assert "bytes that are not UTF-8" in str(bad)


LINES, ENDS = ("", "  ", '{"a": 1}', '{"a": "é"}', "{bad", '{"text": "' + "x" * 90 + '"}'), ("\n", "\r\n")


class TestParts:
    def same(self, source, **options):
        whole = [(row.where, getattr(row, "data", None), str(row)) for row in rows(source)]
        parts = parts_of(source, **options)
        parts = pickle.loads(pickle.dumps(parts))
        pieces = [(row.where, getattr(row, "data", None), str(row)) for part in parts for row in files.read_part(part)]
        assert pieces == whole
        return parts

    @given(st.lists(st.sampled_from(LINES), min_size=1), st.integers(1, 200), st.sampled_from(ENDS), st.booleans())
    @example(['{"a": 1}'] * 9, 8, "\n", True)
    @settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_parts_of_lines_are_the_whole_with_its_line_numbers(self, tmp_path, found, size, end, is_marked):
        path = tmp_path / "a.jsonl"
        path.write_bytes(("\ufeff" * is_marked + '{"first": 1}' + end + end.join(found)).encode())
        self.same(path, part_bytes=size)

    def test_a_file_of_lines_is_split_and_others_are_not(self, tmp_path):
        many = [{"text": f"row {n}"} for n in range(2_000)]
        assert len(self.same(lines(tmp_path / "a.jsonl", *many), part_bytes=2_000)) > 15
        (tmp_path / "b.json").write_text(json.dumps(many))
        assert len(self.same(tmp_path / "b.json", part_bytes=2_000)) == 1
        (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
        assert len(self.same(tmp_path / "c.jsonl.gz", part_bytes=2_000)) == 1
        assert len(self.same(tmp_path, part_bytes=1 << 30)) == 3

    def test_parquet_is_split_by_row_groups(self, tmp_path):
        pyarrow.parquet.write_table(TestTables().table(100), tmp_path / "a.parquet", row_group_size=30)
        parts = [(part.start, part.first_number) for part in self.same(tmp_path / "a.parquet")]
        assert parts == [(0, 1), (1, 31), (2, 61), (3, 91)]


def test_memory_stays_flat_however_long_a_list_is(tmp_path):
    item = json.dumps({"text": "x" * 1_000})
    path = tmp_path / "a.json"
    path.write_text("[" + ",".join([item] * 20_000) + "]")  # 20 MB on one line
    tracemalloc.start()
    assert sum(1 for _ in files.read_rows(path, split="train")) == 20_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 << 20


class TestSources:
    def test_folders_and_globs_are_read_in_order_without_what_is_hidden(self, tmp_path):
        (tmp_path / "deep" / ".cache").mkdir(parents=True)
        for name in ("b", "a", "c", "deep/d", "deep/._e", "deep/.cache/f"):
            lines(tmp_path / f"{name}.jsonl", {"text": name})
        (tmp_path / "b.csv").write_text("text\ntable\n")
        (tmp_path / "e.txt").write_text("[note] {not json}\nmore")
        (tmp_path / "loop").symlink_to(tmp_path)
        found = [row["text"] for row in data_of(tmp_path)]
        assert found == ["a", "table", "b", "c", "deep/d"]
        assert [row["text"] for row in data_of(tmp_path, wants_text=True)] == [*found, "[note] {not json}\nmore"]
        assert [row["text"] for row in data_of(f"{tmp_path}/[ab].jsonl")] == ["a", "b"]
        assert [row["text"] for row in data_of(f"{tmp_path}/**/*.jsonl")][-1] == "deep/d"
        size = estimate_size(DataConfig(train_path=str(tmp_path)))
        assert (size.rows, size.characters) == (5, sum(map(len, found)))
        for missing in (f"{tmp_path}/none.jsonl", "hub:owner/name"):
            assert estimate_size(DataConfig(train_path=missing)) is None

    def test_saved_data_sets_are_items_of_a_folder_and_their_json_is_decoded(self, tmp_path):
        import datasets

        row = {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"a": 1}]}, {"role": "user"}]}
        features = datasets.Features({"messages": datasets.Json()})
        datasets.Dataset.from_list([row], features=features).save_to_disk(str(tmp_path / "set"))
        lines(tmp_path / "z.jsonl", {"text": "line"})
        assert data_of(tmp_path) == [row, {"text": "line"}]
        assert rows(tmp_path / "set")[0].where == f"{tmp_path}/set:row 1"

    def test_paths_may_be_globs_and_ids_of_the_hub(self, tmp_path):
        def found(path):
            return files.find_data_paths(DataConfig(train_path=path, val_path=None, test_path=None)).train

        lines(tmp_path / "a.jsonl", ROW)
        assert data_of(found(f"{tmp_path}/*.jsonl")) == [ROW]
        assert found("hub:owner/name:config") == files.DataSource("hub:owner/name:config")
        for path, said in {
            "HuggingFaceH4/ultrachat_200k": "is written hub:HuggingFaceH4/ultrachat_200k",
            "nowhere/a.jsonl": "the folder nowhere does not exist",
            **dict.fromkeys(["hub:", "hub:a/b/c", "hub:../x", "hub:a b"], "is written hub:owner/name"),
        }.items():
            with pytest.raises(DataError, match=said):
                found(path)

    def test_a_split_is_found_by_its_usual_names_and_told_from_words_that_begin_like_them(self):
        for names, split, found in (
            (["train", "validation"], "val", "validation"), (["odd"], "odd", "odd"),
            (["train_sft", "test_sft", "train_gen"], "test", "test_sft"),
        ):  # fmt: skip
            assert tables.choose_split(names, split, "x") == found
        with pytest.raises(DataError, match="several could be train: train_sft, train_gen"):
            tables.choose_split(["train_sft", "train_gen"], "train", "x")
        splits = {"train": "train", "validation-00000-of-00002": "val", "gsm8k_test": "test", "dev": "val"}
        for name in (*splits, "Val.1", "testimonials", "training_data_notes", "latest"):
            assert tables.split_from_name(name) == {**splits, "Val.1": "val"}.get(name), name

    def test_the_digest_of_a_source_follows_its_content(self, tmp_path, monkeypatch):
        monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
        path = lines(tmp_path / "a.jsonl", ROW)
        glob, before = files.DataSource(f"{tmp_path}/*.jsonl"), files.source_digest(path)
        assert before == hashlib.sha256(path.read_bytes()).hexdigest()
        of_glob = files.source_digest(glob)
        lines(path, ROW, ROW)
        assert files.source_digest(path) != before
        assert files.source_digest(glob) != of_glob
        assert files.source_digest(files.DataSource("hub:a/b")) != files.source_digest(files.DataSource("hub:a/c"))
        os.utime(path, (1, 1))  # of a file that has rested the digest is remembered
        known = files.source_digest(path)
        for half_written in (b"", b"0123", b"\xff" * 64):
            (remembered,) = (tmp_path / "cache" / "digests").iterdir()
            remembered.write_bytes(half_written)
            assert files.source_digest(path) == known


class TestHub:
    @pytest.fixture
    def hub(self, monkeypatch):
        import datasets

        def serve(answer):
            def load(ident, config, **options):
                self.asked = (ident, config, options)
                if isinstance(answer, Exception):
                    raise answer
                return answer

            monkeypatch.setattr(datasets, "load_dataset", load)
            monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)

        return serve

    def test_rows_are_streamed_and_named(self, hub):
        hub({"train": iter([{"text": "a"}, {"text": "b", "none": None}]), "test": iter([])})
        found = {row.where: row.data for row in rows("hub:owner/name:part")}
        assert found == {f"hub:owner/name:part:train:row {n}": {"text": text} for n, text in ((1, "a"), (2, "b"))}
        assert self.asked == ("owner/name", "part", {"streaming": True})

    def test_errors_and_a_connection_that_breaks_off_say_what_to_do(self, hub):
        for error in (ConnectionError("no route"), ValueError("Config name is missing.\nPick one")):
            hub(error)
            said = refusal("hub:owner/name")
            assert "check the spelling" in said
            assert "hf download owner/name --repo-type dataset" in said

        def broken():  # in the midst of the rows
            yield {"text": "a"}
            raise ConnectionError("reset")

        hub({"train": broken()})
        assert "hub:owner/name cannot be read: reset; " in refusal("hub:owner/name")


NAMES = ("x.jsonl", "x.json", "x.csv", "x.txt", "x.parquet", "x.gz", "x")


@given(st.binary(max_size=300), st.sampled_from(NAMES), st.booleans())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bytes_of_any_kind_end_in_rows_or_an_error_of_the_data(tmp_path, content, name, wants_text):
    for found in (content, gzip.compress(content), b"PAR1" + content, b"ARROW1" + content, b'[{"a": 1},' + content):
        (tmp_path / name).write_bytes(found)
        with contextlib.suppress(DataError):
            assert all(isinstance(row, (RawRow, BadRow)) for row in rows(tmp_path / name, wants_text=wants_text))
            parts_of(tmp_path / name, wants_text=wants_text)


@given(st.text(alphabet='{}[]",:\\ \n\rnul1e.-td8', max_size=60))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_json_of_any_shape_ends_in_rows_or_an_error_of_the_data(tmp_path, text):
    for start in ("{", "[", '[{"a": "', '{"a":\n'):
        (tmp_path / "x.json").write_text(start + text)
        try:
            for row in rows(tmp_path / "x.json"):
                assert isinstance(row, BadRow) or json.dumps(row.data).encode()
        except DataError:
            pass


def test_a_missing_file_shows_the_data_beside_it_first_and_nothing_hidden(tmp_path):
    for name in (".hidden.jsonl", *(f"a{n}.md" for n in range(12)), "train.jsonl", "more.csv.gz"):
        (tmp_path / name).touch()
    said = refusal(str(tmp_path / "trian.jsonl"))
    assert f"trian.jsonl does not exist; {tmp_path} holds more.csv.gz, train.jsonl, a0.md, " in said
    assert ".hidden" not in said
    assert said.count(", ") == 11  # twelve names


# Layouts of other tools, and damage.
def test_a_line_may_be_the_list_of_a_chat_s_messages(tmp_path):
    """xtuner's layout; a list over several lines, and one list of rows, stay what they are."""
    turns = ROW["messages"]
    assert data_of(lines(tmp_path / "a.jsonl", turns, turns)) == [{"messages": turns}] * 2
    assert data_of(lines(tmp_path / "b.jsonl", [ROW, ROW])) == [ROW, ROW]
    (tmp_path / "c.jsonl").write_text(json.dumps([ROW, ROW], indent=1))
    assert data_of(tmp_path / "c.jsonl") == [ROW, ROW]
    mixed = rows(lines(tmp_path / "d.jsonl", turns, [1, 2], turns))
    assert [type(row) for row in mixed] == [RawRow, BadRow, RawRow]


@pytest.mark.parametrize("size", [1, 5000])
def test_nul_bytes_at_the_end_are_named_and_no_encoding(tmp_path, size):
    path = lines(tmp_path / "a.jsonl", ROW, ROW)
    path.write_bytes(path.read_bytes() + b"\0" * size)
    good, other, bad = rows(path)
    assert good.data == other.data == ROW
    assert "NUL bytes in place of a row" in bad.reason + bad.detail


@pytest.mark.parametrize(("stray", "name"), [(b"\xff\xff\xfe", "damaged"), (b"\xe9", "latin1")])
def test_bytes_that_no_text_has_are_damage_and_no_encoding(tmp_path, stray, name):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(ROW).encode().replace(b"hello", b"hel" + stray + b"lo") + b"\n")
    assert name in refusal(path)


# Files that are not UTF-8, read as data.encoding says.
LETTERS = {
    "utf-8": "äß—日", "utf-16": "äß—日", "cp1252": "ÄÖüß€–”", "latin1": "ÄÖüßé", "cp1250": "żłřšő", "cp1254": "ğışİç",
    "cp1251": "Приветёж", "koi8-r": "Приветёж", "cp932": "日本語テスト", "euc-jp": "日本語テスト",
    "gb18030": "汉字测试", "euc-kr": "한글시험", "big5": "漢字測試",
}  # fmt: skip


def written(chance: random.Random, texts: list[tuple[str, str]], kind: str) -> str:
    if kind == "csv":
        table = io.StringIO()
        writer = csv.writer(table, delimiter=chance.choice(",;\t"), lineterminator=chance.choice(["\n", "\r\n"]))
        writer.writerows([("prompt", "completion"), *texts])
        return table.getvalue()
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in texts]
    if kind == "json":
        return json.dumps(rows, ensure_ascii=False)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def pairs_of(path: Path, encoding: str) -> list[tuple[str, str]]:
    data = DataConfig(train_path=str(path), encoding=encoding)
    (part,) = files.list_parts(files.find_data_paths(data).train)
    found: list[Any] = [row for piece in files.split_part(part, part_bytes=300) for row in files.read_part(piece)]
    return [(row.data["prompt"], row.data["completion"]) for row in found]


def test_rows_are_the_same_in_every_encoding(tmp_path, monkeypatch):
    assert set(LETTERS) == set(get_args(Encoding))
    chance = random.Random(9)
    # cuts characters
    monkeypatch.setattr(raw.read_blocks, "__kwdefaults__", {**raw.read_blocks.__kwdefaults__, "size": 61})
    for number in range(120):
        encoding = chance.choice(list(LETTERS))

        def text(letters: str = LETTERS[encoding] + "ab ;,") -> str:
            return "".join(chance.choices(letters, k=chance.randint(1, 40))) + "x"

        texts = [(text(), text()) for _ in range(chance.randint(1, 12))]
        kind, packed = chance.choice(["csv", "json", "jsonl"]), chance.random() < 0.3
        stored = written(chance, texts, kind).encode(encoding)
        path = tmp_path / f"{number}.{kind}"
        path.write_bytes(gzip.compress(stored) if packed else stored)
        assert pairs_of(path, encoding) == texts, encoding
        if encoding not in ("utf-8", "utf-16"):  # a file that is UTF-8 is read so, whatever the others are
            path.write_bytes(written(chance, texts, kind).encode())
            assert pairs_of(path, encoding) == texts


def test_all_files_of_a_run_are_meant(tmp_path):
    def completions(paths: Any) -> list[str]:
        parts = [part for _, path in paths.named_paths() for part in files.list_parts(path)]
        return [row.data["completion"] for part in parts for row in files.read_part(part)]

    (tmp_path / "raw").mkdir()
    for name in ("raw/a", "raw/b", "c", "val"):
        (tmp_path / f"{name}.csv").write_bytes(f"prompt;completion\n{name};Änne\n".encode("cp1252"))
    for path in ("raw", "raw/*.csv", "c.csv"):
        config = DataConfig(train_path=f"{tmp_path}/{path}", val_path=f"{tmp_path}/val.csv", encoding="cp1252")
        paths = files.find_data_paths(config)
        assert completions(paths) == ["Änne"] * (2 if path == "c.csv" else 3)
        assert count_part_rows(files.list_parts(paths.train)) is None  # a table's lines are no rows
    sources = ({"path": str(tmp_path / "c.csv"), "val_path": str(tmp_path / "val.csv")},)
    assert len(completions(files.find_data_paths(DataConfig(sources=sources, encoding="cp1252")))) == 2
    # a byte that the encoding lacks is named with its place
    path = tmp_path / "a.csv"
    path.write_bytes(b"prompt;completion\na;\x81\n")
    with pytest.raises(DataError, match=r"a\.csv, byte 20: neither UTF-8 nor cp1252"):
        pairs_of(path, "cp1252")


def test_rows_of_a_table_are_taken_in_slices_by_their_size_one_at_least():
    sizes = [(0, 5), (tables.SLICE_BYTES, 100), (tables.SLICE_BYTES, 10**6), (4 * tables.SLICE_BYTES, 100)]
    assert [tables._batch_rows(*size) for size in sizes] == [tables.BATCH_ROWS, 100, tables.BATCH_ROWS, 25]
    assert tables._batch_rows(10 * tables.SLICE_BYTES, 3) == 1
