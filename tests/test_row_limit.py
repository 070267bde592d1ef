"""A file may be larger than memory: rows have a limit, long text comes in pieces, nothing half-written is left."""

from __future__ import annotations

import errno
import gzip
import json
import random
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.load import config_from_text
from sft_play.config.schema import DataConfig
from sft_play.data import process as process_module
from sft_play.data.build import survey
from sft_play.data.build.survey import RENDER_BATCH_CHARS, RowRenderer, estimate_size, split_batches
from sft_play.data.managed_outputs import OutputFolder
from sft_play.data.masks.render import Renderer
from sft_play.data.process import process_files
from sft_play.data.sources import json_rows, raw, tables
from sft_play.data.sources.files import read_rows
from sft_play.data.sources.formats import Text
from sft_play.data.sources.raw import NOTE_PIECE, BadRow, RawRow, find_piece_end, read_line_blocks, read_text_pieces
from sft_play.errors import DataError
from tests.conftest import chat, write_rows

MIB = 1 << 20
LIMIT = "the row is larger than 1 MiB"


@pytest.fixture(autouse=True)
def small_limit(monkeypatch):
    """The limit of a row is 1 MiB here, so that files are small."""
    assert raw.MAX_ROW_BYTES == 16 * MIB
    for module in (raw, json_rows, tables, process_module):
        monkeypatch.setattr(module, "MAX_ROW_BYTES", MIB)


@contextmanager
def traced(most: int) -> Iterator[None]:
    """Python's own objects take no more than `most` bytes within."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most, f"{peak:,} bytes"


def write_lines(path: Path, *, long: int) -> Path:
    opened: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wb") as file:
        file.write(json.dumps(chat("q1", "a1")).encode() + b"\n")
        for _ in range(long // MIB):
            file.write(b"x" * MIB)
        file.write(b"x" * (long % MIB) + b"\n")
        file.write(json.dumps(chat("q3", "a3")).encode() + b"\n")
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_line_over_the_limit_is_a_bad_row_and_never_held(tmp_path, name):
    path = write_lines(tmp_path / name, long=9 * MIB)
    with traced(6 * MIB):
        rows = list(read_rows(path, split="train"))
    assert [type(row) for row in rows] == [RawRow, BadRow, RawRow]
    assert [row.where.rpartition(":")[2] for row in rows] == ["1", "2", "3"]
    assert rows[1].reason == LIMIT
    for said in (f"{9 * MIB:,} bytes", f"{MIB:,}", "rows on lines of their own", ".txt"):
        assert said in rows[1].detail


def test_lines_are_held_up_to_the_limit_and_not_a_byte_beyond(tmp_path, monkeypatch):
    chance = random.Random(20)
    path = tmp_path / "a.txt"
    for _ in range(300):
        limit = chance.randint(8, 40)
        wanted = [b"y" * chance.choice([0, 1, limit - 1, limit, limit + 1, 3 * limit]) for _ in range(9)]
        end = chance.choice([b"", b"\n"])
        path.write_bytes(b"\n".join(wanted) + end)
        size = chance.randint(1, limit)
        plain = raw.read_blocks
        monkeypatch.setattr(
            raw, "read_blocks", lambda *a, size=size, plain=plain, **k: plain(*a, **{**k, "size": size})
        )
        monkeypatch.setattr(raw, "MAX_ROW_BYTES", limit)
        found: list[bytes | int] = []
        for at, block in read_line_blocks(path):
            assert at == sum((item if isinstance(item, int) else len(item)) + 1 for item in found)
            found += [block] if isinstance(block, int) else block.removesuffix(b"\n").split(b"\n")
        monkeypatch.undo()
        expected = [line if len(line) <= limit else len(line) for line in wanted]
        if expected[-1] == b"" and not end:
            expected.pop()
        assert found == expected


def middle_of(path: Path) -> tuple[str, str]:
    """Place and reason of the bad row between two good ones."""
    rows = list(read_rows(path, split="train"))
    assert [type(row) for row in rows] == [RawRow, BadRow, RawRow]
    return rows[1].where, rows[1].reason


def test_a_row_of_a_json_list_over_the_limit_is_named_with_its_line(tmp_path):
    path = tmp_path / "a.json"
    big = json.dumps({"text": "x" * (MIB + 9)})
    path.write_text(f'[{{"text": "a"}},\n{big},\n{{"text": "b"}}]')
    assert middle_of(path) == (f"{path}:2", LIMIT)
    # an object around the rows is read whole, so it has the limit of a row
    path.write_text('{"data": [\n' + '{"text": "x"},\n' * 9 + '{"text": "x"}]}')
    assert [row.data for row in read_rows(path, split="train")] == [{"text": "x"}] * 10
    path.write_text('{"data": [\n' + '{"text": "x"},\n' * (MIB // 8) + '{"text": "x"}]}')
    (row,) = read_rows(path, split="train")
    assert (row.reason, "jq -c '.KEY[]' FILE > rows.jsonl" in row.detail) == (LIMIT, True)


def test_a_row_of_a_table_over_the_limit_is_refused(tmp_path):
    import pyarrow as pa
    import pyarrow.feather
    import pyarrow.parquet

    path = tmp_path / "a.csv"
    path.write_text('question,answer\nq,"a\n' + "x y z\n" * MIB)
    with traced(120 * MIB), pytest.raises(DataError, match=r"a\.csv:2: a quote .* not closed, or .* larger than 1 MiB"):
        list(read_rows(path, split="train"))
    path.write_text("question,answer\nq," + "x" * (MIB + 9) + "\n")
    with pytest.raises(DataError, match=LIMIT):
        list(read_rows(path, split="train"))
    field = '"' + "x y z\n" * (MIB // 24) + '"'  # a quarter of the limit, which is one of a row
    path.write_text("question,answer\n" + f"q,{field}\n" * 8)
    assert len([row for row in read_rows(path, split="train") if isinstance(row, RawRow)]) == 8
    path.write_text("a,b,c,d,e,f\n" + ",".join("xyzuvw") + "\n" + ",".join([field] * 6) + "\n")
    with pytest.raises(DataError, match=r"a\.csv:3: a quote .* not closed, or .* larger than 1 MiB"):
        list(read_rows(path, split="train"))
    half = "y" * (MIB // 2 + 9)
    table = pa.table({"question": ["a", half, "c"], "answer": ["x", half, "z"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    pyarrow.feather.write_feather(table, str(tmp_path / "a.arrow"))
    for name in ("a.parquet", "a.arrow"):
        assert middle_of(tmp_path / name) == (f"{tmp_path}/{name}:row 2", LIMIT)


def test_long_rows_of_a_table_become_objects_a_few_at_a_time(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet

    path, table = tmp_path / "a.parquet", pa.table({"text": [f"{number} " + "x" * 500_000 for number in range(80)]})
    pyarrow.parquet.write_table(table, path, row_group_size=80, use_dictionary=False)
    del table
    with traced(24 * MIB):
        found = [int(row.data["text"].split()[0]) for row in read_rows(path, split="train")]
    assert found == list(range(80))


def random_text(chance: random.Random) -> str:
    words = ["word", "to", "the", "ünïcode", "\t", "  ", "\n", "\n\n", "\r\n", "\n \n", "x" * 60, "漢字"]
    return "".join(chance.choice(words) + chance.choice(["", " ", "\n"]) for _ in range(chance.randint(1, 400)))


def test_pieces_of_a_text_joined_are_the_text(tmp_path, monkeypatch):
    monkeypatch.setattr(raw, "TEXT_CHARS", 100)
    chance = random.Random(21)
    path = tmp_path / "a.txt"
    several = 0
    for _ in range(200):
        text = random_text(chance)
        path.write_bytes(text.encode())
        pieces = list(read_text_pieces(path))
        assert "".join(piece for _, piece in pieces) == text
        assert all(len(piece) <= 200 for _, piece in pieces)
        at = 0
        for line, piece in pieces:
            assert line == 1 + text.count("\n", 0, at)
            at += len(piece)
        several += len(pieces) > 1
    assert several > 100


def test_a_text_is_cut_behind_paragraphs_then_lines_then_words():
    for text, end in (("one two\nthree\n\n" * 20, "three\n\n"), ("one two\n" * 40, "two\n")):
        assert text[: find_piece_end(text, 100)].endswith(end)
    words = "one two " * 40
    cut = find_piece_end(words, 100)
    assert (words[cut - 1] == " ", words[cut] == " ") == (False, True)
    assert find_piece_end("x" * 400, 100) == 100


def test_a_long_text_file_is_read_in_pieces_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(raw, "TEXT_CHARS", MIB // 4)
    path = tmp_path / "a.txt"
    path.write_text("A line of words that goes on.\nAnd another one.\n\n" * 75_000)  # 3.6 MB
    with traced(12 * MIB):
        rows = [(row.where, len(row.data["text"])) for row in read_rows(path, split="train", wants_text=True)]
    assert sum(size for _, size in rows) == path.stat().st_size
    assert max(size for _, size in rows) <= raw.TEXT_CHARS * 2
    assert rows[0][0] == f"{path}:1"
    fixed = f"{{raw_path: {path}, out_dir: {tmp_path}/out, val_fraction: 0, test_fraction: 0}}"
    text = f"model: {{name: x}}\ntask_mode: cpt\ndata: {{process: {fixed}}}\n"
    report = process_files(config_from_text(text, name="run.yaml"))
    assert report.rows_kept == report.notes[NOTE_PIECE].count == len(rows)
    written = (tmp_path / "out" / "train.jsonl").read_text().splitlines()
    assert "".join(json.loads(line)["text"] for line in written) == path.read_text()


def test_every_batch_of_long_texts_gives_memory_back(tiny_llama, monkeypatch):
    """Without it the memory of check grew by 25 bytes a byte of plain text."""
    from transformers import AutoTokenizer

    told: list[int] = []
    monkeypatch.setattr(survey, "release_after_long_text", told.append)
    maker = RowRenderer(Renderer(AutoTokenizer.from_pretrained(tiny_llama), max_seq_len=10), task_mode="cpt")
    sizes = [10, 900_000, 800_000, 20]
    made: list[Any] = list(maker.render_rows(enumerate((Text("f", "x " * (size // 2)) for size in sizes), start=1)))
    assert not any(item.row.stripped_think_pieces for item in made)  # which a text has none of
    assert [one.row_number for one in made] == [1, 2, 3, 4]
    assert told == [900_000, 800_000]


def test_rows_are_rendered_a_few_characters_at_a_time():
    texts = [(number, Text("f", "x" * 300_000)) for number in range(1, 51)]
    batches = list(split_batches(texts))
    assert [row for batch in batches for row in batch] == texts
    assert max(sum(len(text.text) for _, text in batch) for batch in batches) <= RENDER_BATCH_CHARS


def test_the_rough_size_of_a_file_is_told_from_a_bounded_sample(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [chat("q", "x" * 500_000)] * 160)  # 80 MB
    with traced(45 * MIB):
        size = estimate_size(DataConfig(train_path=str(path)))
    assert (size.rows, size.characters) == (160, pytest.approx(80_001_000, rel=0.02))


def test_process_names_a_line_over_the_limit_and_writes_nothing(tmp_path):
    path, out = write_lines(tmp_path / "a.jsonl", long=3 * MIB), tmp_path / "out"
    text = f"model: {{name: x}}\ndata: {{process: {{raw_path: {path}, out_dir: {out}}}}}\n"
    with pytest.raises(DataError, match=rf"a\.jsonl:2: {LIMIT} \({3 * MIB:,} bytes"):
        process_files(config_from_text(text, name="run.yaml"))
    assert list(out.iterdir()) == []
    report = process_files(config_from_text(text, name="run.yaml", overrides=("data.on_bad_row=skip",)))
    assert (report.rows_kept, report.dropped[LIMIT].count) == (2, 1)
    # a row of a table that would be too large to be read again: its JSON has twice as many bytes
    path = tmp_path / "a.csv"
    path.write_text('question,answer\nq,a\nq2,"' + "\n" * 600_000 + 'x"\n')
    text = text.replace("a.jsonl", "a.csv")
    with pytest.raises(DataError, match=rf"a\.csv:3: {LIMIT}"):
        process_files(config_from_text(text, name="run.yaml"))
    kept = ("data.on_bad_row=skip", "data.process.test_fraction=0")
    report = process_files(config_from_text(text, name="run.yaml", overrides=kept))
    assert (report.rows_kept, report.dropped[LIMIT].count) == (1, 1)


def test_a_command_that_is_killed_leaves_no_half_written_file_under_its_name(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from sft_play.data.managed_outputs import OutputFolder\n"
        "with OutputFolder(Path(sys.argv[1]), ('a.jsonl',), force=False, command='process') as out:\n"
        "    file = out.open('a.jsonl'); file.write('x' * 10**6); file.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    (tmp_path / "out").mkdir()
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert all(path.name.startswith(".") for path in (tmp_path / "out").iterdir())


def test_a_folder_that_cannot_be_written_is_named_and_what_is_read_meanwhile_is_not(tmp_path):
    for place, refusal in ((tmp_path, DataError), (tmp_path / "raw", PermissionError)):
        output = OutputFolder(tmp_path, ("a.jsonl",), force=False, command="process")
        denied = PermissionError(errno.EACCES, "Permission denied", str(place / ".a.jsonl.0"))
        with pytest.raises(refusal, match="Permission denied"), output:
            raise denied
