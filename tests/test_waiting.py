"""What takes long says so: when, how often, with which total; and nothing else does."""

import json
import logging
import random
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet
import pytest

from sft_play.data.sources.examples import count_part_rows
from sft_play.data.sources.files import find_source, list_parts
from sft_play.process import waiting as module
from sft_play.process.waiting import WaitProgress, report_wait


@pytest.fixture
def quickly(monkeypatch):
    monkeypatch.setattr(module, "FIRST_LINE_S", 0.03)


def said(caplog) -> list[str]:
    return [re.sub(r"\d+ s so far$", "S", record.getMessage()) for record in caplog.records]


def until(caplog, text: str) -> None:
    """Wait for a line; the test's own limit ends it where none comes."""
    for _ in range(2000):
        if any(text in line for line in said(caplog)):
            return
        threading.Event().wait(0.005)
    pytest.fail(f"{text} was not said: {said(caplog)}")


def test_what_is_quick_says_nothing_and_does_not_look_for_a_total(caplog):
    caplog.set_level(logging.INFO)
    with report_wait("Reading", unit="rows", count_total=lambda: pytest.fail("looked up")) as news:
        news.add()
    assert said(caplog) == []
    assert module._open_waits == []
    assert not [one for one in threading.enumerate() if one.name == "waiting"]


def test_the_innermost_speaks_and_then_the_one_around_it(caplog, quickly):
    caplog.set_level(logging.INFO)
    with report_wait("Checking"):
        with report_wait("Reading", unit="rows", count_total=lambda: 7) as news:
            news.add(3)
            until(caplog, "Reading: 3 of 7 rows, ")
            assert set(said(caplog)) == {"Reading: 3 of 7 rows, S"}
        until(caplog, "Checking: S")
    with pytest.raises(KeyError), report_wait("Reading"):
        raise KeyError
    assert module._open_waits == []


def test_lines_become_rare(monkeypatch):
    pauses: list[float] = []

    class Ended:
        def wait(self, pause: float) -> bool:
            pauses.append(pause)
            return len(pauses) == 8

        def set(self) -> None: ...

    monkeypatch.setattr(module, "threading", SimpleNamespace(Event=Ended, Thread=threading.Thread))
    with report_wait("Reading"):
        pass
    assert pauses == [3, 6, 12, 24, 48, 60, 60, 60]


def test_a_total_is_said_where_it_can_be_right():
    chance = random.Random(6)
    for _ in range(300):
        total, done = chance.choice([None, chance.randint(0, 10**6)]), chance.randint(0, 10**6)
        asked = []
        one = WaitProgress("Reading", "rows", lambda total=total, asked=asked: asked.append(1) or total)
        one.add(done)
        lines = [re.sub(r"\d+ s so far$", "S", one.line()) for _ in range(2)]
        of = f" of {total:,}" if total is not None and total >= max(done, 1) else ""
        assert lines == [f"Reading: {done:,}{of} rows, S"] * 2
        assert len(asked) == 1


def test_rows_are_counted_by_lines_and_row_groups_and_by_nothing_that_has_to_be_read(tmp_path: Path):
    chance = random.Random(8)
    for number in range(12):
        folder = tmp_path / str(number)
        folder.mkdir()
        counts = [chance.randint(1, 30) for _ in range(chance.randint(1, 3))]
        for at, count in enumerate(counts):
            rows = [{"prompt": f"{n}", "completion": "x"} for n in range(count)]
            if chance.random() < 0.5:
                (folder / f"{at}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            else:
                pa.parquet.write_table(pa.Table.from_pylist(rows), folder / f"{at}.parquet")
        assert count_part_rows(list_parts(find_source(str(folder)))) == sum(counts)
        (folder / "z.json").write_text(json.dumps([{"prompt": "a", "completion": "b"}]))
        assert count_part_rows(list_parts(find_source(str(folder)))) is None
