"""`make process` and `make style`: raw files to checked, split conversations, near-duplicates, and system prompts."""

from __future__ import annotations

import functools
import json
import random
import re
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sft_play.config.load import config_from_text
from sft_play.data import near_duplicates
from sft_play.data.build.splits import build_splits
from sft_play.data.near_duplicates import SIMILARITY_MARGIN, SimilarityIndex, SketchMaker
from sft_play.data.process import process_files, read_processed, split_by_digest, style_rows
from sft_play.data.sources.examples import NOTE_UNSTYLED, ExampleReader
from sft_play.data.sources.files import find_data_paths
from sft_play.data.sources.messages import AUTHOR_MESSAGE, author_form
from sft_play.errors import ConfigError, DataError
from tests.conftest import chat, refusal_of


def write(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chats(start: int, stop: int):
    return [chat(f"what is {n}?", f"it is {n}") for n in range(start, stop)]


@pytest.fixture
def run(tmp_path):
    """Processes tmp_path/raw (or `raw`) into tmp_path/out with these settings."""

    def made(*settings: str, raw: object = None, force: bool = False, name: str = "no/model", task: str = "sft"):
        given = raw if raw is not None else tmp_path / "raw"
        given = json.dumps([str(item) for item in given] if isinstance(given, (list, tuple)) else str(given))
        config = config_from_text(
            f"task_mode: {task}\nmodel: {{name: {name}, max_seq_len: 8}}\n"
            f"data: {{process: {{raw_path: {given}, out_dir: {tmp_path}/out}}, style: {{out_dir: {tmp_path}/styled}}}}",
            name="run.yaml",
            overrides=settings,
        )
        return process_files(config, force=force)

    made.folder = tmp_path / "out"
    return made


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def contents(path: Path) -> set[str]:
    return {row["messages"][0]["content"] for row in rows_of(path)} if path.exists() else set()


ALL_IN_TRAIN = ("data.process.val_fraction=0", "data.process.test_fraction=0")


refusal = functools.partial(refusal_of, DataError)


def test_raw_files_of_every_kind_become_one_form(run, tmp_path):
    raw = tmp_path / "raw"
    write(raw / "a.jsonl", {"question": "q1", "answer": "a1", "score": 3})
    (raw / "b.json").write_text(json.dumps([{"instruction": "q2", "input": "", "output": "a2"}]))
    (raw / "c.csv").write_text("prompt,completion\nq3,a3\n")
    row = {"messages": [*chat("q4", "a4")["messages"], *chat("q5", "a5")["messages"]], "tools": [{"name": "f"}]}
    row["messages"][1]["weight"] = 0
    write(raw / "deep" / "d.jsonl", row)
    (raw / "README.md").write_text("about this")
    report = run(*ALL_IN_TRAIN)
    found = rows_of(run.folder / "train.jsonl")
    texts = [[message["content"] for message in row["messages"]] for row in found]
    assert texts == [["q1", "a1"], ["q2", "a2"], ["q3", "a3"], ["q4", "a4", "q5", "a5"]]
    places = [row["source"].removeprefix(f"{raw}/") for row in found]
    assert places == ["a.jsonl:1", "b.json:1", "c.csv:2", "deep/d.jsonl:1"]
    assert [set(row) for row in found] == [{"messages", "source", "id"}] * 3 + [{"messages", "tools", "source", "id"}]
    assert [message.get("train") for message in found[3]["messages"]] == [None, False, None, None]
    assert report.splits["train"].trained_turns == 4
    assert [file.format for file in report.files] == ["question/answer", "alpaca", "prompt/completion", "messages"]
    text = "\n".join(report.lines())
    for part in ("a.jsonl: 1 rows, question/answer; columns not used: score", "README.md"):
        assert part in text
    assert json.loads((run.folder / "report.json").read_text()) == report.as_json()
    assert not (run.folder / "val.jsonl").exists()


def test_rows_never_move_when_others_are_added(run, tmp_path):
    found = []
    for name, rows in (("a", chats(0, 300)), ("0", chats(300, 700))):
        write(tmp_path / "raw" / f"{name}.jsonl", *rows)
        run("data.process.val_fraction=0.2", "data.process.test_fraction=0.1")
        found.append({split: contents(run.folder / f"{split}.jsonl") for split in ("train", "val", "test")})
    before, after = found
    assert all(before[name] <= after[name] for name in before)
    assert [len(before[name]) for name in ("val", "test")] == pytest.approx([60, 30], abs=25)
    assert sum(map(len, after.values())) == 700
    # the same content is on the same side, whatever its form
    write(tmp_path / "raw" / "b.jsonl", *({"question": f"what is {n}?", "answer": f"it is {n}"} for n in range(100)))
    report = run("data.process.val_fraction=0.5")
    assert (report.duplicates.count, report.leaks.count) == (100, 0)
    assert not contents(run.folder / "train.jsonl") & contents(run.folder / "val.jsonl")
    # the first 8 bytes as a share of 2**64: 0x40… is 0.25, 0x80… is 0.5
    sides = {0: "val", 0x3F: "val", 0x40: "test", 0x7F: "test", 0x80: "train", 0xFF: "train"}
    for first, split in sides.items():
        digest = bytes([first, *[0] * 31])
        assert split_by_digest(digest, val_fraction=0.25, test_fraction=0.25) == split


@pytest.mark.parametrize(
    "names",
    [("train/a.jsonl", "dev/a.jsonl", "test/a.jsonl"), ("more.jsonl", "sums_val.jsonl", "test-00000-of-00001.jsonl")],
)
def test_files_that_bring_their_own_splits_keep_them(run, tmp_path, names):
    for at, name in enumerate(names):
        write(tmp_path / "raw" / name, *chats(10 * at, 10 * at + 10))
    report = run()
    for at, name in enumerate(("train", "val", "test")):
        assert contents(run.folder / f"{name}.jsonl") == {f"what is {n}?" for n in range(10 * at, 10 * at + 10)}
    assert "have their own splits (train, val, test)" in "\n".join(report.lines())
    alone = run("data.process.val_fraction=0.2", raw=write(tmp_path / "train.jsonl", *chats(0, 200)), force=True)
    assert (report.has_own_splits, alone.has_own_splits, alone.splits["val"].rows > 10) == (True, False, True)


def test_the_splits_of_a_saved_data_set_are_kept(run, tmp_path):
    import datasets

    made = {"train_sft": chats(0, 20), "validation": chats(20, 25), "odd": chats(25, 26)}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in made.items()})
    saved.save_to_disk(str(tmp_path / "set"))
    report = run(raw=tmp_path / "set")
    assert {name: split.rows for name, split in report.splits.items()} == {"train": 20, "val": 5}
    assert "its split odd is none of train, val, test: not read" in "\n".join(report.lines())
    assert rows_of(run.folder / "val.jsonl")[0]["source"].endswith("set:validation:row 1")


def test_duplicates_are_counted_and_left_out_where_asked(run, tmp_path):
    write(tmp_path / "raw" / "a.jsonl", *chats(0, 30), *chats(0, 25))
    report = run()
    assert (report.duplicates.count, report.rows_kept, len(report.duplicates.first)) == (25, 55, 20)
    assert report.duplicates.first[0].endswith("a.jsonl:31")
    assert "… and 5 more" in "\n".join(report.lines())
    report = run("data.process.drop_duplicates=true")
    assert (report.duplicates.count, report.rows_kept, report.rows_in) == (25, 30, 55)
    assert report.dropped["a duplicate of an earlier row"].count == 25


def test_training_rows_that_are_held_out_too_are_counted_and_left_out_where_asked(run, tmp_path):
    for name, rows in (("train", (0, 10)), ("val", (8, 12)), ("test", (11, 13))):
        write(tmp_path / "raw" / f"{name}.jsonl", *chats(*rows))
    report = run()
    places = [place.removeprefix(f"{tmp_path}/raw/") for place in report.leaks.first]
    assert places == ["test.jsonl:1 (val)", "train.jsonl:9 (val)", "train.jsonl:10 (val)"]
    assert report.splits["train"].rows == 10
    report = run("data.process.drop_leaks=true")
    assert contents(run.folder / "train.jsonl") == {f"what is {n}?" for n in range(8)}
    assert (report.splits["val"].rows, report.splits["test"].rows) == (4, 2)
    assert report.dropped["stands in val or test too"].count == 2


def test_all_problems_of_all_files_are_in_one_report_and_nothing_is_written(run, tmp_path):
    write(tmp_path / "raw" / "a.jsonl", chat("q", "a"), {"messages": []}, *[{"messages": [1]}] * 30)
    (tmp_path / "raw" / "b.jsonl").write_text('{"messages": [\n')
    (tmp_path / "raw" / "c.json").write_text("[{},]")
    (tmp_path / "raw" / "d.jsonl").write_bytes(b'{"text": "\xff"}')
    write(tmp_path / "raw" / "e.jsonl", {"odd": 1})
    message = refusal(run)
    for part in (
        "a.jsonl: 31 of 32 rows cannot be used: 30 x a message is not an object; 1 x messages is empty",
        *("a.jsonl:21: a message is not an object", "… and 11 more", "b.jsonl: 1 of 1 rows", "d.jsonl:1: byte 0xFF"),
        *("c.json:1: remove the comma", "e.jsonl:1: columns found: odd", "on_bad_row=skip; nothing was written"),
    ):
        assert part in message, part
    assert "a.jsonl:22:" not in message
    assert not [*run.folder.glob("*.jsonl"), *run.folder.glob(".*.part")]
    for name in "abe":
        (tmp_path / "raw" / f"{name}.jsonl").unlink()
    assert "fix them; nothing was written" in refusal(run)
    (tmp_path / "raw" / "c.json").unlink()
    assert "fix it; nothing was written" in refusal(run)


def test_what_leaves_no_row_to_train_on_is_refused(run, tmp_path):
    path = write(tmp_path / "raw" / "a.jsonl", chat("q", "a"), {"messages": []}, {"messages": []})
    report = run("data.on_bad_row=skip", *ALL_IN_TRAIN)
    assert (report.rows_in, report.rows_kept) == (3, 1)
    assert f"Left out: 2 rows: messages is empty: {path}:2, {path}:3" in report.lines()
    settings = ("data.on_bad_row=skip", "data.process.val_fraction=0.5", "data.process.test_fraction=0.5")
    assert "none into train; set data.process.val_fraction=0" in refusal(run, *settings)
    write(tmp_path / "raw" / "a.jsonl", {"messages": []})
    assert "no row is left of 1 (1 x messages is empty)" in refusal(run, *settings)
    write(tmp_path / "raw" / "a.jsonl", *chats(0, 3))
    write(tmp_path / "raw" / "b.jsonl", {"text": "words"})
    assert "mix chats" in refusal(run)
    assert "is in the folder that is written to" in refusal(run, raw=run.folder)


def test_lengths_are_counted_with_their_share_over_the_limit(run, tmp_path):
    # 4 characters a token, the line break between the turns among them; max_seq_len is 8
    write(tmp_path / "raw" / "a.jsonl", *(chat("q", "w" * (4 * tokens - 2)) for tokens in (4, 8, 10, 301)))
    report = run(*ALL_IN_TRAIN)
    train, epoch = report.as_json()["splits"]["train"], report.as_json()["tokens_per_epoch_estimated"]
    assert (epoch, train["tokens_estimated"], train["share_over_max_seq_len"], train["longest"]) == (323, 323, 0.5, 301)


def test_what_is_written_is_the_same_each_time_and_kept_where_somebody_edited_it(run, tmp_path):
    write(tmp_path / "a.jsonl", *chats(0, 100))
    states = []
    for _ in range(2):  # what was written stands among the raw files the second time, and is not read
        assert run(raw=tmp_path).rows_in == 100
        states.append({path.name: path.read_bytes() for path in run.folder.iterdir()})
    assert states[0] == states[1]
    (run.folder / "val.jsonl").write_text("mine")
    assert "make process FORCE=1" in refusal(run, raw=tmp_path)
    assert (run.folder / "val.jsonl").read_text() == "mine"
    run(*ALL_IN_TRAIN, raw=tmp_path, force=True)
    assert not (run.folder / "val.jsonl").exists()
    first = (run.folder / "train.jsonl").read_text()
    write(tmp_path / "again" / "a.jsonl", *rows_of(run.folder / "train.jsonl"))
    run(*ALL_IN_TRAIN, raw=tmp_path / "again")
    assert (run.folder / "train.jsonl").read_text() == first
    write(tmp_path / "named" / "a.jsonl", *({**row, "source": ""} for row in rows_of(run.folder / "train.jsonl")))
    run(*ALL_IN_TRAIN, raw=tmp_path / "named")  # no name of a source is none: the row has the place where it stands
    assert rows_of(run.folder / "train.jsonl")[1]["source"] == f"{tmp_path}/named/a.jsonl:2"


WORDS = st.text() | st.sampled_from(["user", "assistant"])
CELLS = st.text() | st.lists(st.dictionaries(st.sampled_from(["role", "content"]), WORDS))
ROWS = st.dictionaries(st.sampled_from(["messages", "text", "prompt", "completion"]), CELLS)


@given(st.lists(ROWS, max_size=6))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_raw_rows_of_any_shape_end_in_files_that_can_be_read_or_an_error(run, tmp_path, rows):
    write(tmp_path / "raw" / "a.jsonl", *rows)
    try:
        report = run("data.on_bad_row=skip", force=True)
    except DataError:
        return
    found = [row for name in report.splits for row in read_processed(run.folder / f"{name}.jsonl")]
    assert len(found) == report.rows_kept


def test_memory_grows_by_little_more_than_a_digest_a_row(run, tmp_path, monkeypatch):
    # a machine that is busy would count the rows meanwhile, by blocks of a MiB
    monkeypatch.setattr("sft_play.data.process.count_part_rows", lambda parts: None)

    def peak(count):
        write(tmp_path / "raw" / "a.jsonl", *({"text": f"{n} " + "x" * 1_000} for n in range(count)))
        tracemalloc.start()
        run("data.process.near_duplicates=ignore", force=True)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    few, many = peak(3_000), peak(7_000)  # both more than a block
    assert many - few < 4_000 * 250


@pytest.fixture
def style(run, tmp_path):
    """Styles five processed rows, three of which have a system prompt."""
    systems = [{"messages": [{"role": "system", "content": "old"}, *chat(f"s{n}", "a")["messages"]]} for n in range(3)]
    write(tmp_path / "raw" / "a.jsonl", *systems)
    write(tmp_path / "raw" / "b.jsonl", *[chat(f"b{n}", "a") for n in range(2)])
    run(*ALL_IN_TRAIN)

    def made(words, *settings, force=False):
        text = f"model: {{name: x}}\ndata: {{process: {{out_dir: {run.folder}}}, style: {{out_dir: {made.folder}}}}}"
        return style_rows(config_from_text(text, name="run.yaml", overrides=settings), words, force=force)

    made.folder = tmp_path / "styled"
    return made


PER_SOURCE = 'data.style.per_source={"b.*": "new", "z*": "none"}'


@pytest.mark.parametrize(("text", "settings", "prompts", "counts"), [
    ("new", (), ["new\n\nold"] * 3 + ["new"] * 2, {"prepended": 3, "set": 2}),
    ("new", ("data.style.how=replace", "data.style.system=x"), ["new"] * 5, {"replaced": 3, "set": 2}),
    (None, ("data.style.how=keep", "data.style.system=new"), ["old"] * 3 + ["new"] * 2, {"left": 3, "set": 2}),
    (None, (PER_SOURCE,), ["old"] * 3 + ["new"] * 2, {"left": 3, "set": 2}),
])  # fmt: skip
def test_a_prompt_is_set_prepended_replaced_or_left(style, tmp_path, text, settings, prompts, counts):
    report = style(text, *settings)
    assert [row["messages"][0]["content"] for row in rows_of(style.folder / "train.jsonl")] == prompts
    assert dict(report.total) == counts
    assert report.as_json()["set"] == 2
    assert json.loads((style.folder / "report.json").read_text()) == report.as_json()
    assert report.unused_globs == (("z*",) if "z*" in "".join(settings) else ())
    before, after = (rows_of(folder / "train.jsonl") for folder in (tmp_path / "out", style.folder))
    assert [(row["source"], row["id"]) for row in before] == [(row["source"], row["id"]) for row in after]


def test_what_cannot_be_styled_is_refused_and_text_is_left(style, run, tmp_path):
    for text in (None, "", "  "):
        with pytest.raises(ConfigError, match="make style STYLE="):
            style(text)
    with pytest.raises(ConfigError, match="give it another folder"):
        style("x", f"data.style.out_dir={tmp_path}/out")
    style("x")
    (style.folder / "train.jsonl").write_text("mine")
    with pytest.raises(DataError, match="make style FORCE=1"):
        style("x")
    (tmp_path / "out" / "train.jsonl").unlink()
    with pytest.raises(DataError, match=r"train\.jsonl is missing; make process writes it"):
        style("x", force=True)
    write(tmp_path / "text" / "a.jsonl", *[{"text": f"t {n}"} for n in range(40)])
    run(*ALL_IN_TRAIN, raw=tmp_path / "text", force=True)
    assert style("x", force=True).total["text"] == 40
    assert (tmp_path / "out" / "train.jsonl").read_bytes() == (style.folder / "train.jsonl").read_bytes()


def system_of(messages) -> str | None:
    return messages[0]["content"] if messages[0]["role"] == "system" else None


def after(first, question):
    return {"messages": [first, *chat(question, "a")["messages"]]}


class TestStyleOfARun:
    """System prompts that rows are given when they are read: those that `make style` would write."""

    ROWS = (
        chat("plain", "a"), after({"role": "system", "content": "old"}, "old"),
        after({"role": "System ", "content": "old"}, "odd role"),
        after({"role": "developer", "content": "dev", "name": "Ann"}, "developer"),
        after({"role": "system", "content": [{"type": "text", "text": "part"}]}, "parts"),
        after({"role": "system", "content": "  "}, "blank"),
        {"conversations": [{"from": "human", "value": "sharegpt"}, {"from": "gpt", "value": "a"}], "system": "column"},
        {"instruction": "alpaca", "input": "", "output": "a"},
        {"prompt": [{"role": "system", "content": "of pairs"}, {"role": "user", "content": "pair"}], "completion": "a"},
    )  # fmt: skip
    """Each in a file of its own, since a file has one format."""

    def config(self, folder, path, style):
        fixed = {"raw_path": f"{folder}/raw", "val_fraction": 0, "test_fraction": 0, "out_dir": f"{folder}/out"}
        data = {"train_path": str(path), "process": fixed, "style": {"out_dir": f"{folder}/styled", **style}}
        return config_from_text(json.dumps({"model": {"name": "x"}, "data": data}), name="run.yaml")

    @pytest.fixture
    def raw(self, tmp_path):
        for number, row in enumerate(self.ROWS):
            write(tmp_path / "raw" / f"f{number}.jsonl", row)
        return tmp_path / "raw"

    def read(self, config):
        reader = ExampleReader(Path(config.data.train_path), config.data, split="train")
        found = {}
        for _, example in reader.numbered_examples():
            question = next(message["content"] for message in example.messages if message["role"] == "user")
            found[question] = [{**message, AUTHOR_MESSAGE: author_form(message)} for message in example.messages]
        return found

    @pytest.mark.parametrize(("how", "system", "files"), [
        ("prepend", "be terse", {}), ("replace", "be terse", {"raw/*3*": "for three", "*": "for all"}),
        ("keep", "be terse", {"*1.jsonl": "for one"}), ("prepend", None, {"*1.jsonl": "for one"}),
    ])  # fmt: skip
    def test_rows_are_those_that_style_writes(self, tmp_path, raw, how, files, system):
        per_source = {glob.replace("raw", str(raw)): text for glob, text in files.items()}
        given = {"how": how, "system": system, "per_source": per_source}
        config = self.config(tmp_path, raw, given)
        direct = self.read(config)
        process_files(config)
        processed = self.read(self.config(tmp_path, tmp_path / "out" / "train.jsonl", given))
        style_rows(config, None)
        # what style wrote is read as it is, whatever the config says: nothing is prepended twice
        for again in (given, {"how": "prepend", "system": "another"}):
            written = self.read(self.config(tmp_path, tmp_path / "styled" / "train.jsonl", again))
            assert written == direct == processed

    def test_the_prompts_by_hand(self, tmp_path, raw):
        given = {"system": "be terse", "per_source": {"f1.*": "for one"}}
        read = self.read(self.config(tmp_path, raw, given))
        assert {question: system_of(messages) for question, messages in read.items()} == {
            "plain": "be terse", "old": "for one\n\nold", "odd role": "be terse\n\nold", "developer": "be terse\n\ndev",
            "parts": "part", "blank": "be terse", "sharegpt": "be terse\n\ncolumn", "alpaca": "be terse",
            "pair": "be terse\n\nof pairs",
        }  # fmt: skip
        wanted = {"role": "developer", "content": "be terse\n\ndev", "name": "Ann"}
        assert read["developer"][0][AUTHOR_MESSAGE] == wanted

    def test_what_keeps_its_prompt_without_being_asked_is_noted(self, tmp_path):
        for row in (self.ROWS[4], {"text": "plain words"}):
            path = write(tmp_path / "a.jsonl", row)
            data = self.config(tmp_path, path, {"system": "be terse"}).data
            ((_, example),) = ExampleReader(path, data, split="train").numbered_examples()
            assert example.notes == (NOTE_UNSTYLED,)
            kept = data.model_copy(update={"style": data.style.model_copy(update={"how": "keep", "system": None})})
            ((_, example),) = ExampleReader(path, kept, split="train").numbered_examples()
            assert example.notes == ()

    @pytest.mark.build
    def test_rows_that_are_trained_and_held_out_have_it(self, tmp_path, tiny_llama):
        from transformers import AutoTokenizer

        path = write(tmp_path / "a.jsonl", *chats(0, 60))
        tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
        text = f"model: {{name: x}}\ndata: {{train_path: {path}, val_fraction: 0.3, test_path: {path}, "
        config = config_from_text(f"{text}style: {{system: be terse}}}}", name="x")
        splits = build_splits(config, find_data_paths(config.data), tokenizer, max_seq_len=200)
        for split in (splits.train, splits.val, splits.test):
            texts = [tokenizer.decode(ids) for ids in split.rows["input_ids"]]
            assert all(text.startswith("<|im_start|>system\nbe terse<|im_end|>") for text in texts)
        for split in (splits.val, splits.test):
            assert len(split.chats) == len(split.rows)
            assert all(system_of(split.chats[at].messages) == "be terse" for at in range(len(split.chats)))
        plain = config_from_text(f"{text}}}", name="x")  # not from the other's cache
        other = build_splits(plain, find_data_paths(plain.data), tokenizer, max_seq_len=200)
        assert "be terse" not in tokenizer.decode(other.train.rows[0]["input_ids"])


def plain_set(text: str) -> set[tuple[str, ...]]:
    """Runs of three words by a second way: letters and digits of ASCII texts."""
    words = re.split(r"[^a-z0-9_]+", text.lower())
    words = [word for word in words if word] or [text]
    count = min(3, len(words))
    return {tuple(words[place : place + count]) for place in range(len(words) - count + 1)}


def jaccard(one: str, other: str) -> float:
    mine, theirs = plain_set(one), plain_set(other)
    return len(mine & theirs) / len(mine | theirs)


def varied(draw: random.Random, vocabulary: int) -> list[str]:
    texts: list[str] = []
    for _ in range(draw.randint(20, 60)):
        words = [f"w{draw.randrange(vocabulary)}" for _ in range(draw.choice([1, 2, 3, 10, 40, 200]))]
        texts.append(" ".join(words))
        for _ in range(draw.randint(0, 3)):
            copy = list(words)
            for _ in range(draw.randint(0, max(1, len(words) // 8))):
                place = draw.randrange(len(copy))
                copy[place : place + 1] = draw.choice([[], ["new"], [copy[place], "more"]])
                copy = copy or ["new"]
            texts.append(draw.choice([" ", ", ", "\n"]).join(copy).title())
    draw.shuffle(texts)
    return texts


@pytest.mark.parametrize("seed", range(12))
def test_pairs_are_found_and_no_others(seed):
    draw = random.Random(seed)
    threshold = draw.choice([0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99])
    texts = varied(draw, draw.choice([20, 5000]))
    sketches, reported = SketchMaker(threshold), 0
    index = SimilarityIndex(sketches)
    for number, text in enumerate(texts):
        likeness = [(jaccard(text, other), -place) for place, other in enumerate(texts[:number])]
        sketch = sketches.sketch(text)
        found, best = index.nearest(sketch), max(likeness, default=(0.0, 0))
        if found is None:
            assert best[0] < min(threshold + SIMILARITY_MARGIN, (1 + threshold) / 2)
        else:
            reported += 1
            assert threshold <= found[0] == pytest.approx(jaccard(text, texts[int(found[1])]), abs=1e-12)
        index.add(sketch, str(number))
    assert 0 < reported < len(texts)


def test_the_index_misses_a_pair_above_the_margin_with_the_probability_that_is_said():
    for hundredths in range(50, 100):
        threshold = hundredths / 100
        bands, rows = near_duplicates.choose_bands(threshold)
        likeness = min(threshold + SIMILARITY_MARGIN, (1 + threshold) / 2)
        assert (1 - likeness**rows) ** bands <= near_duplicates.MISS_PROBABILITY
        assert (1 - likeness**rows) ** (bands - 1) > near_duplicates.MISS_PROBABILITY  # no band too many
        assert bands * rows <= 128


def test_texts_of_all_scripts_are_compared():
    for one, other, least, most in (
        ("私は昨日友達と映画を見に行きました。", "私は昨日友達と映画を見に行った。", 0.5, 0.95),
        ("ฉันชอบกินข้าวผัด", "ฉันชอบกินข้าวต้ม", 0.3, 0.95),
        ("Я пошёл в магазин за хлебом и молоком", "я пошёл В МАГАЗИН за хлебом, и молоком!", 1.0, 1.0),
        ("!!!", "???", 0.0, 0.0), ("!!!", " !!! ", 1.0, 1.0), ("", "a", 0.0, 0.0), ("\ud800 b", "\ud800 b", 1.0, 1.0),
    ):  # fmt: skip
        sets = map(near_duplicates.compute_shingles, (one, other))
        assert least <= near_duplicates.jaccard_similarity(*sets) <= most


LONG = "what is the name of the river that runs through the old town of {} in the north"


@pytest.fixture
def near(run, tmp_path):
    def made(*settings: str, rows: list[object]):
        raw = write(tmp_path / "raw.jsonl", *rows)
        report = run(*(f"data.process.{setting}" for setting in settings), raw=raw, force=True)
        kept = [row["source"] for file in run.folder.glob("*.jsonl") for row in rows_of(file)]
        return report, sorted(int(where.rpartition(":")[2]) for where in kept)

    return made


def rows_with_copies() -> list[dict]:
    system = {"role": "system", "content": "You are a careful assistant. " * 20}
    rows = [chat(LONG.format(f"city{n}"), f"it is the river {n} " + " ".join(f"x{n}y{k}" for k in range(40)))
            for n in range(20)]  # fmt: skip
    copy = json.loads(json.dumps(rows[3]).replace("x3y39", "other"))  # of 50 words one is another
    for row in rows:
        row["messages"].insert(0, system)  # which makes no rows alike
    return [*rows, copy, rows[5]]


def test_near_duplicates_are_counted_and_named_and_dropped_where_that_is_asked(near, tmp_path):
    rows = rows_with_copies()
    report, kept = near(rows=rows)
    assert kept == list(range(1, 23))
    assert (report.near_duplicates.count, report.duplicates.count) == (1, 1)  # the exact one is a duplicate
    assert re.fullmatch(r".*raw\.jsonl:21 \(like .*raw\.jsonl:4, 0\.9\d\)", report.near_duplicates.first[0])
    assert "Near-duplicates: 1, kept; data.process.near_duplicates=drop" in "\n".join(report.lines())
    report, kept = near("near_duplicates=drop", "drop_duplicates=true", rows=rows)
    assert (kept, report.dropped["nearly an earlier row"].count) == (list(range(1, 21)), 1)
    assert json.loads((tmp_path / "out" / "report.json").read_text())["near_duplicates"]["dropped"] is True
    assert 21 in near("near_duplicates=drop", "similarity=0.99", rows=rows)[1]
    report, kept = near("near_duplicates=ignore", rows=rows)
    assert report.as_json()["near_duplicates"]["dropped"] is None
    assert not any("Near" in line for line in report.lines())


@pytest.mark.parametrize("row", [
    chat(LONG.format("city7"), "another answer"),
    {"question": LONG.format("city7"), "answer": 4, "choices": ["a", "b"]},
    {"task": 7, "nested": {"prompts": [LONG.format("city7").upper()]}, "kind": "river"},
    {"messages": [{"role": "user", "content": LONG.format("city7")}]},
])  # fmt: skip
def test_a_test_files_question_is_found_in_training_rows_whatever_its_form(near, tmp_path, row):
    other = str(write(tmp_path / "test.jsonl", chat("hello", "hi"), row))
    fixed = ("val_fraction=0", "test_fraction=0")
    rows = rows_with_copies()
    report, kept = near(f"compare_with=[{other}]", "similarity=0.9", *fixed, rows=rows)
    assert len(kept) == 22
    assert [report.overlaps[other].count, report.near_duplicates.count] == [1, 1]
    assert re.fullmatch(r".*raw\.jsonl:8 \(like .*test\.jsonl:2, 1\.00\)", report.overlaps[other].first[0])
    report, kept = near(f"compare_with=[{other}]", "similarity=0.9", "drop_overlaps=true", *fixed, rows=rows)
    assert kept == [n for n in range(1, 23) if n != 8]
    assert f"Training rows nearly in {other}: 1, left out" in "\n".join(report.lines())


def test_held_out_rows_are_left_alone_by_what_they_overlap_with(near, tmp_path):
    other = str(write(tmp_path / "test.jsonl", *rows_with_copies()))
    rows = [*rows_with_copies(), *(chat(f"is {n} left to train on?", f"yes, {n} is") for n in range(9))]
    report, _ = near(f"compare_with=[{other}]", "drop_overlaps=true", "val_fraction=0.5", rows=rows)
    assert report.overlaps[other].count == report.dropped["nearly a row of a held-out file"].count
    assert report.splits["val"].rows > 3


def test_what_cannot_be_read_or_is_no_similarity_is_refused(near, tmp_path):
    with pytest.raises(ConfigError, match="similarity"):
        near("similarity=0.2", rows=[])
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "\xff"}')
    for file, why in (("bad.jsonl", ""), ("gone.jsonl", r".*gone\.jsonl does not exist")):
        with pytest.raises(DataError, match=rf"^data\.process\.compare_with: {why}"):
            near(f"compare_with=[{tmp_path}/{file}]", rows=rows_with_copies())


def test_the_runs_own_held_out_files_are_compared_with_by_default(tmp_path):
    """Where they exist, and are neither written here nor raw rows to train on."""
    rows = [chat(LONG.format(f"city{n}"), f"answer {n} " * 9) for n in range(8)]
    raw = write(tmp_path / "raw.jsonl", *rows)
    test = str(write(tmp_path / "mine.jsonl", rows[3]))
    fixed = "val_fraction: 0, test_fraction: 0"

    def overlaps(held_out: str, more: str = ""):
        text = (f"model: {{name: no/model}}\ndata: {{train_path: {raw}, {held_out}, "
                f"process: {{raw_path: {raw}, out_dir: {tmp_path}/out, {fixed}{more}}}}}")  # fmt: skip
        return process_files(config_from_text(text, name="test"), force=True)

    found = overlaps(f"test_path: {test}").overlaps
    assert [(name, places.count) for name, places in found.items()] == [(test, 1)]
    assert overlaps(f"test_path: {test}", ", drop_overlaps: true").rows_kept == 7
    assert len(overlaps(f"val_path: {test}, test_path: {test}", f", compare_with: [{test}]").overlaps) == 1
    # however it is named, it is read once, and the key is said where it cannot be read
    again = f"{tmp_path}/out/../mine.jsonl"
    assert [*overlaps(f"val_path: {again}, test_path: {test}", f", compare_with: [{test}]").overlaps] == [test]
    assert [*overlaps(f"val_path: {again}, test_path: {test}").overlaps] == [again]
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match=r"^data\.test_path: .*empty\.jsonl has no rows"):
        overlaps(f"test_path: {tmp_path}/empty.jsonl")
    assert not overlaps(f"test_path: {test}", ", near_duplicates: ignore").overlaps
    assert not overlaps(f"val_path: {raw}, test_path: {tmp_path}/none.jsonl").overlaps
    assert not overlaps(f"val_path: {tmp_path}/out/train.jsonl").overlaps


def test_rows_of_one_form_are_compared_with_few_and_in_bounded_time():
    """Texts that share most of their words share their keys; of those only the likeliest are compared."""
    draw, sketches = random.Random(1), SketchMaker(0.9)
    index = SimilarityIndex(sketches)
    form = [f"w{n}" for n in range(60)]
    for number in range(600):
        words = [f"x{number}y{place}" if draw.random() < 0.12 else word for place, word in enumerate(form)]
        index.add(sketches.sketch(" ".join(words)), str(number))
    assert all(len(numbers) <= 256 for table in index._tables for numbers in table.values())
    copy = [*words[:-1], "other"]
    found = index.nearest(sketches.sketch(" ".join(copy)))
    assert found[0] == pytest.approx(jaccard(" ".join(words), " ".join(copy)))


def test_counting_stops_where_it_would_take_too_much_memory(near, monkeypatch):
    monkeypatch.setattr("sft_play.data.process.MAX_INDEX_BYTES", 8_000)
    rows = rows_with_copies()
    report, _ = near(rows=rows)
    assert report.near_duplicates.count == 0  # the row that it is like came fourth, after the first three were kept
    assert "Near-duplicates: counting takes" in "\n".join(report.lines())
    assert near("near_duplicates=drop", rows=rows)[0].near_duplicates.count == 1
