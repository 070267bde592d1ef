"""Data files of every kind: rows in many formats, mutated as JSON and as bytes, read, masked and processed."""

import contextlib
import csv
import gzip
import io
import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks.fuzz import mutate, run
from benchmarks.fuzz.templates import tokenizer
from sft_play.config.schema import DataConfig
from sft_play.errors import DataError, SftPlayError, TokenizerError
from sft_play.files import ROOT

_CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2, None]}}}
_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
_TURNS = [{"role": "user", "content": "what is 2 + 2?"}, {"role": "assistant", "content": "it is 4."}]
_ROWS: tuple[dict[str, Any], ...] = (
    {"messages": _TURNS},
    {"messages": [{"role": "system", "content": "Be kind."}, *_TURNS, *_TURNS]},
    {"messages": [_TURNS[0], {"role": "assistant", "content": "", "tool_calls": [_CALL]},
                  {"role": "tool", "content": "4"}, _TURNS[1]], "tools": [_TOOL]},
    {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hello!"}], "system": "Be kind."},
    {"prompt": "why?", "completion": "because."},
    {"prompt": [_TURNS[0]], "completion": [_TURNS[1]]},
    {"instruction": "translate", "input": "Haus", "output": "house"},
    {"question": "why?", "answer": "because."},
    {"text": "a long text " * 30},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]},
                  {"role": "assistant", "content": "<think>hm</think>ho", "reasoning_content": "hm"}]},
    {"chosen": _TURNS, "rejected": _TURNS},
    {"query": "add 1 and 2", "answers": json.dumps([{"name": "add", "arguments": {"a": 1}}]), "tools": "[]"},
)  # fmt: skip
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "on_bad_row": ("fail", "skip"), "merge_consecutive": (True, False), "system_into_user": (True, False),
    "drop_empty": (True, False), "multi_turn": ("whole", "split"), "on_inexact_mask": ("fail", "skip"),
    "special_tokens_in_text": ("plain", "special"), "turns_without_roles": ("fail", "user_first"),
    "columns": ({}, {"prompt": "question", "completion": "answer"}, {"text": "messages"}),
}  # fmt: skip


@contextlib.contextmanager
def case_runner() -> Iterator[run.CaseRunner]:
    from tests.models import CHATML

    files = [path.read_bytes() for path in sorted((ROOT / "tests" / "bundled" / "rows").glob("*.json*"))]
    with run.isolated_environment(), tokenizer() as made:
        made.chat_template = CHATML

        def judge(draw: random.Random, folder: Path) -> bool:
            name, content = _file(draw, files)
            path = folder / "raw" / name
            path.parent.mkdir()
            path.write_bytes(content)
            data = _options(draw)
            accepted = _reads(draw, path, data, made)
            if draw.random() < 0.1:
                _processes(draw, folder, data)
            return accepted

        yield judge


def _options(draw: random.Random) -> DataConfig:
    options = {key: draw.choice(values) for key, values in _OPTIONS.items() if draw.random() < 0.3}
    try:
        return DataConfig.model_validate_json(json.dumps(options))
    except ValueError:
        return DataConfig()


def _file(draw: random.Random, files: list[bytes]) -> tuple[str, bytes]:
    """A name and a content, which need not fit."""
    ways: tuple[Callable[[], tuple[str, bytes]], ...] = (
        lambda: ("rows.jsonl", draw.choice(files)), lambda: ("rows.jsonl", _lines(_some(draw))),
        lambda: ("rows.json", mutate.as_json(_some(draw)).encode()),
        lambda: ("rows.json", json.dumps(_some(draw), indent=1).encode("utf-8", "replace")),
        lambda: ("rows.csv", _table(draw, _some(draw))), lambda: _columns(draw, _some(draw)),
        lambda: ("rows.txt", "\n".join(draw.choices(mutate.STRANGE_TEXTS, k=20)).encode("utf-8", "surrogatepass")),
    )  # fmt: skip
    name, content = draw.choices(ways, (2, 5, 2, 1, 2, 2, 1))[0]()
    if draw.random() < 0.6:
        content = mutate.raw(draw, content)
    if draw.random() < 0.1:
        content = gzip.compress(content)
        content = mutate.raw(draw, content) if draw.random() < 0.5 else content
    if draw.random() < 0.1:
        name = f"rows.{draw.choice(('jsonl', 'json', 'csv', 'tsv', 'parquet', 'arrow', 'txt', 'gz', 'x'))}"
    return name, content


def _some(draw: random.Random) -> list[Any]:
    row, count = draw.choice(_ROWS), draw.randint(1, 12)
    return [mutate.plain(draw, row) if draw.random() < 0.5 else row for _ in range(count)]


def _lines(rows: list[Any]) -> bytes:
    return "".join(mutate.as_json(row) + "\n" for row in rows).encode()


def _table(draw: random.Random, rows: list[Any]) -> bytes:
    table_rows = [row for row in rows if isinstance(row, dict)] or [{}]
    text = io.StringIO()
    names = [str(key) for key in table_rows[0]]
    writer = csv.DictWriter(text, names, delimiter=draw.choice(",;\t|"), extrasaction="ignore", escapechar="\\")
    with contextlib.suppress(csv.Error, ValueError):
        writer.writeheader()
        writer.writerows({str(key): value for key, value in row.items()} for row in table_rows)
    return text.getvalue().encode("utf-8", "replace")


def _columns(draw: random.Random, rows: list[Any]) -> tuple[str, bytes]:
    """Parquet, Arrow's file or its stream; rows that no table can hold as JSON lines."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    sink = io.BytesIO()
    try:
        table = pa.Table.from_pylist([row for row in rows if isinstance(row, dict)])
        if draw.random() < 0.5:
            pyarrow.parquet.write_table(table, sink, row_group_size=draw.choice((1, 5, 1000)))
            return "rows.parquet", sink.getvalue()
        with pa.ipc.new_stream(sink, table.schema) if draw.random() < 0.5 else pa.ipc.new_file(sink, table.schema) as w:
            w.write_table(table)
        return "rows.arrow", sink.getvalue()
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        return "rows.jsonl", _lines(rows)


def _reads(draw: random.Random, path: Path, data: DataConfig, made: Any) -> bool:
    """Every row as an example, and of the chats a mask."""
    from sft_play.data.masks.render import Renderer
    from sft_play.data.masks.token_row import TokenRow
    from sft_play.data.sources.examples import ExampleReader
    from sft_play.data.sources.formats import content_digest
    from sft_play.data.sources.raw import BadRow

    renderer, good = None, 0
    try:
        reader = ExampleReader(path, data, split="train", wants_text=draw.random() < 0.2)
        for _, example in itertools.islice(reader.numbered_examples(), 60):
            if isinstance(example, BadRow):
                if not example.reason.strip():
                    raise run.FuzzFailure("a bad row without a reason")
                continue
            good += 1
            content_digest(example)
            renderer = renderer or Renderer(made, data, max_seq_len=64)
            for one in renderer.split_turns(renderer.recover_chat(example)):
                row = renderer(one)
                if isinstance(row, TokenRow) and len(row.input_ids) != len(row.labels):
                    raise run.FuzzFailure("the labels are not those of the tokens")
    except (DataError, TokenizerError) as error:
        run.require_words(error)
        return False
    return good > 0


def _processes(draw: random.Random, folder: Path, data: DataConfig) -> None:
    from sft_play.data.process import read_processed

    settings = data.model_dump(mode="json", exclude_unset=True)
    config = {"model": {"name": "gpt2"}, "data": {**settings, "process": {"raw_path": "raw", "out_dir": "out"}}}
    (folder / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    is_json = draw.random() < 0.5
    code, out, err = run.run_command(["process", "--config", "run.yaml", *(["--json"] if is_json else [])])
    run.require_consistent_exit(code, out, err, is_json=is_json)
    written = run.read_files(folder / "out") if (folder / "out").exists() else {}
    if code and written:
        raise run.FuzzFailure(f"refused, and it wrote {sorted(written)}")
    for name in written:
        if name.endswith(".jsonl"):
            try:
                list(read_processed(folder / "out" / name))
            except SftPlayError as error:
                raise run.FuzzFailure(f"what it wrote cannot be read: {error}") from error
