"""Files that are not UTF-8, read as `data.encoding` says: rows of every kind, and what is in no encoding."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from pathlib import Path
from typing import Any, get_args

import pytest

from sft_play.config.schema import DataConfig, Encoding
from sft_play.data.sources import raw
from sft_play.data.sources.examples import count_part_rows
from sft_play.data.sources.files import find_data_paths, list_parts, read_part, split_part
from sft_play.errors import DataError

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


def rows(path: Path, encoding: str) -> list[tuple[str, str]]:
    data = DataConfig(train_path=str(path), encoding=encoding)
    (part,) = list_parts(find_data_paths(data).train)
    found: list[Any] = [row for piece in split_part(part, part_bytes=300) for row in read_part(piece)]
    return [(row.data["prompt"], row.data["completion"]) for row in found]


def test_rows_are_the_same_in_every_encoding(tmp_path, monkeypatch):
    assert set(LETTERS) == set(get_args(Encoding))
    chance = random.Random(9)
    # cuts characters
    monkeypatch.setattr(raw.read_blocks, "__kwdefaults__", {**raw.read_blocks.__kwdefaults__, "size": 61})
    for number in range(120):
        encoding = chance.choice(list(LETTERS))
        texts = [
            tuple("".join(chance.choices(LETTERS[encoding] + "ab ;,", k=chance.randint(1, 40))) + "x" for _ in range(2))
            for _ in range(chance.randint(1, 12))
        ]
        kind, packed = chance.choice(["csv", "json", "jsonl"]), chance.random() < 0.3
        stored = written(chance, texts, kind).encode(encoding)
        path = tmp_path / f"{number}.{kind}"
        path.write_bytes(gzip.compress(stored) if packed else stored)
        assert rows(path, encoding) == texts, encoding
        if encoding not in ("utf-8", "utf-16"):  # a file that is UTF-8 is read so, whatever the others are
            path.write_bytes(written(chance, texts, kind).encode())
            assert rows(path, encoding) == texts


def test_all_files_of_a_run_are_meant(tmp_path):
    (tmp_path / "raw").mkdir()
    for name in ("raw/a", "raw/b", "c", "val"):
        (tmp_path / f"{name}.csv").write_bytes(f"prompt;completion\n{name};Änne\n".encode("cp1252"))
    for given in ("raw", "raw/*.csv", "c.csv"):
        paths = find_data_paths(
            DataConfig(train_path=str(tmp_path / given), val_path=str(tmp_path / "val.csv"), encoding="cp1252")
        )
        found: list[Any] = [
            row for _, path in paths.named_paths() for part in list_parts(path) for row in read_part(part)
        ]
        assert [row.data["completion"] for row in found] == ["Änne"] * (2 if given == "c.csv" else 3)
        assert count_part_rows(list_parts(paths.train)) is None  # a table's lines are no rows
    sources = ({"path": str(tmp_path / "c.csv"), "val_path": str(tmp_path / "val.csv")},)
    paths = find_data_paths(DataConfig(sources=sources, encoding="cp1252"))
    assert len([row for _, path in paths.named_paths() for part in list_parts(path) for row in read_part(part)]) == 2


def test_a_byte_that_the_encoding_lacks_is_named_with_its_place(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"prompt;completion\na;\x81\n")
    with pytest.raises(DataError, match=r"a\.csv, byte 20: neither UTF-8 nor cp1252"):
        rows(path, "cp1252")
