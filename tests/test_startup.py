"""Starts: what is refused before a library loads, what is said first, loaded once, remembered for the second."""

import contextlib
import gc
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from sft_play.config.schema import DataConfig
from sft_play.data.sources import examples
from sft_play.data.sources.files import find_data_paths
from sft_play.errors import DataError, RunFolderError
from sft_play.process import waiting
from sft_play.runs.folder import MANIFEST_FORMAT, RunFolder, write_json
from sft_play.runs.lookup import lock_run, require_writable_output_dir
from tests.conftest import ROOT, chat, write_run

HEAVY = ("torch", "transformers", "datasets", "trl", "peft", "accelerate", "bitsandbytes", "deepspeed", "pandas")

SEVERAL = f"""
import contextlib, io, json, sys
from sft_play.cli import main
from sft_play.launch import ranks

def started(launch, folder):
    print("the ranks were started")
    return 0

ranks.run_ranks = started
found = []
for words in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(words)
    found.append([code, said.getvalue(), sorted(set({HEAVY!r}) & set(sys.modules))])
print(json.dumps(found))
"""
"""Commands in one process: of each the exit code, what was said, and which libraries are loaded by then."""

WATCHED = f"""
import gc, json, logging, sys
from sft_play.cli import main
loaded = {{}}

class Watch(logging.Handler):
    def emit(self, record):
        loaded.setdefault(record.getMessage().partition(":")[0], sorted(set({HEAVY!r}) & set(sys.modules)))

logging.getLogger("sft_play").addHandler(Watch())
code = main(sys.argv[1:])
with open("found.json", "w") as file:
    json.dump([code, loaded, gc.get_freeze_count(), gc.isenabled()], file)
"""
"""A run, and which libraries were loaded when each line was first said."""


def in_a_process(code: str, folder: Path, *words: str, given: str = "") -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=folder, input=given, env=environment, text=True,
                          capture_output=True, timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def jsonl(*rows: object) -> str:
    return "".join(row + "\n" if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)


FILES = {"empty": "", "broken": jsonl(*["{not json"] * 130), "unknown": jsonl({"picture": "a"}, {"picture": "b"})}
WRONG_DATA = {
    "empty": "empty.jsonl has no rows: the file is empty",
    "broken": "100 of the first 100 rows of data.train_path=broken.jsonl cannot be used: 100 x not valid JSON",
    "unknown": "picture", "missing": "data.train_path: missing.jsonl does not exist",
}  # fmt: skip
WRONG_FOLDER = {
    ("output.dir=good.jsonl/outputs",): "output.dir=good.jsonl/outputs cannot be written: Not a directory",
    ("output.name=held", "output.if_exists=replace"): "is being written by another process",
}
STARTS = {"train": [], "train-distributed": ["--nproc", "2"]}
ANSWERED = {
    ("check", "data.train_path=empty.jsonl"): (2, "empty.jsonl has no rows: the file is empty"),
    ("check", "data.train_path=broken.jsonl"): (2, "130 x not valid JSON"),
    ("check", "train.report_to=[mlflow]", "data.train_path=good.jsonl"): (2, "pip install mlflow, or leave it out"),
    ("plan", "data.train_path=empty.jsonl"): (0, "would stop: empty.jsonl has no rows: the file is empty"),
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_llama, sums):
    """A folder with a run YAML, data files of all kinds, and a run that this process writes."""
    folder = tmp_path_factory.mktemp("starts")
    for name, text in FILES.items():
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "good.jsonl").write_text(sums.read_text())
    sections = {"train": {"max_steps": 1}, "eval": {"steps": 0}, "output": {"dir": "outputs"}}
    write_run(folder, tiny_llama, Path("good.jsonl"), tuning={"mode": "qlora"}, **sections)
    held = RunFolder(folder / "outputs" / "held")
    held.path.mkdir(parents=True)
    write_json(held.manifest_path, {"format": MANIFEST_FORMAT, "status": "running"})
    with lock_run(held):
        yield folder


@pytest.fixture(scope="module")
def refused(place):
    """By command and words: the exit code, what was said, and the libraries that were loaded by then."""
    asked = [(command, f"data.train_path={name}.jsonl") for command in STARTS for name in WRONG_DATA]
    asked += [(command, *words) for command in STARTS for words in WRONG_FOLDER]
    asked += [*ANSWERED, ("train-distributed", "data.train_path=good.jsonl")]
    # rows that a plan has counted need no tokenizer at a start
    in_a_process("from sft_play.cli import main; import sys; sys.exit(main(sys.argv[1:]))", place, "plan", "--config",
                 "run.yaml", "data.train_path=good.jsonl")  # fmt: skip
    lines = [[command, "--config", "run.yaml", *STARTS.get(command, []), *words] for command, *words in asked]
    answers = json.loads(in_a_process(SEVERAL, place, given=json.dumps(lines)).splitlines()[-1])
    return dict(zip(asked, answers, strict=True))


@pytest.mark.parametrize("name", WRONG_DATA)
@pytest.mark.parametrize("command", STARTS)
def test_data_that_cannot_be_read_is_refused_before_a_library_loads(command, name, refused):
    code, said, loaded = refused[command, f"data.train_path={name}.jsonl"]
    # not even planned
    assert (code, loaded, WRONG_DATA[name] in said, "Choice:" in said) == (2, [], True, False), said


@pytest.mark.skipif(find_spec("mlflow") is not None, reason="mlflow is installed here")
@pytest.mark.parametrize("asked", ANSWERED)
def test_what_needs_no_library_is_answered_without_one(asked, refused):
    code, said, loaded = refused[asked]
    assert (code, loaded, ANSWERED[asked][1] in said) == (ANSWERED[asked][0], [], True), said


@pytest.mark.parametrize("words", WRONG_FOLDER)
@pytest.mark.parametrize("command", STARTS)
def test_a_folder_that_cannot_be_written_is_refused_before_a_library_loads(command, words, refused):
    code, said, loaded = refused[command, *words]
    assert (code, loaded, WRONG_FOLDER[words] in said) == (2, [], True), said


def test_the_parent_of_ranks_starts_them_without_a_library(refused):
    code, said, loaded = refused["train-distributed", "data.train_path=good.jsonl"]
    assert (code, loaded, "Choice: ddp" in said) == (0, [], True), said
    assert said.index("Launch:") < said.index("the ranks were started")


def test_looking_whether_a_folder_can_be_written_leaves_nothing(tmp_path):
    require_writable_output_dir(RunFolder(tmp_path / "outputs" / "deep" / "run"))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="cannot be written: Not a directory"):
        require_writable_output_dir(RunFolder(tmp_path / "file" / "run"))


def look(folder: Path, text: str, *, task_mode: str = "sft", **options: object) -> None:
    (folder / "rows.jsonl").write_text(text)
    data = DataConfig(train_path=str(folder / "rows.jsonl"), **options)
    examples.check_first_rows(data, find_data_paths(data), task_mode=task_mode)


def test_a_later_row_that_can_be_read_is_left_to_the_run_and_so_are_rows_that_need_a_library(tmp_path, monkeypatch):
    """Whoever has to fix rows wants all of them counted: only a file whose first rows are all bad is refused here."""
    bad, good = ["{not json"] * examples.CHECKED_FIRST_ROWS, chat("a", "b")
    look(tmp_path, jsonl(*bad[1:], good))
    look(tmp_path, jsonl(*bad, good), on_bad_row="skip")
    with pytest.raises(DataError, match=r"100 of the first 100 rows of data\.train_path=.*\n  .*rows\.jsonl:1: not"):
        look(tmp_path, jsonl(*bad, good))
    with pytest.raises(DataError, match=r"1 of 1 rows of data\.train_path="):
        look(tmp_path, "{not json\n")
    data = DataConfig(train_path="hub:owner/name")
    monkeypatch.setattr(examples, "read_part", lambda part: pytest.fail(f"{part} was read"))
    examples.check_first_rows(data, find_data_paths(data), task_mode="sft")


def test_rows_of_no_format_count_only_where_enough_of_them_were_read(tmp_path):
    """A format is that of the first of twenty rows that has one; bad rows between them do not count."""
    unknown, bad = {"picture": "a"}, ["{not json"] * examples.CHECKED_FIRST_ROWS
    look(tmp_path, jsonl(unknown, *bad, chat("a", "b")))
    with pytest.raises(DataError, match="picture"):
        look(tmp_path, jsonl(unknown, *bad[2:]))
    with pytest.raises(DataError, match="picture"):
        look(tmp_path, jsonl(*[unknown] * 20, chat("a", "b")))


def test_every_source_is_looked_at_and_plain_text_is_none_of_chats(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "words.dat").write_text("words of a text")
    for key in ("val_path", "test_path"):
        with pytest.raises(DataError, match=r"empty\.jsonl has no rows"):
            look(tmp_path, jsonl(chat("a", "b")), **{key: str(tmp_path / "empty.jsonl")})
    look(tmp_path, jsonl({"text": "words"}), task_mode="cpt", val_path=str(tmp_path / "words.dat"))
    with pytest.raises(DataError, match=r"words\.dat is not JSON"):
        look(tmp_path, jsonl(chat("a", "b")), val_path=str(tmp_path / "words.dat"))
    with pytest.raises(DataError, match=r"data\.columns"):
        look(tmp_path, jsonl(chat("a", "b")), columns={"nothing": "messages"})


def test_data_and_plan_come_before_the_libraries_which_are_announced_once(place):
    in_a_process(WATCHED, place, "train", "--config", "run.yaml")
    code, loaded, frozen, is_enabled = json.loads((place / "found.json").read_text())
    assert (code, is_enabled) == (0, True)
    assert frozen > 300_000  # what imports made is left out of collections: about a million; Python's own are hundreds
    lines = list(loaded)
    assert lines.index("Choice") < lines.index("Predicted peak") < lines.index("Loading libraries")
    assert lines.index("Loading libraries") < lines.index("Data train") < lines.index("Trainable parameters")
    assert loaded["Loading libraries"] == []
    assert {"torch", "transformers", "trl", "peft"} <= set(loaded["Data train"])
    logs = [path.read_text() for path in (place / "outputs").glob("run-*/train.log")]
    (log,) = [log for log in logs if "Trainable parameters" in log]  # the other has what the parent of ranks said
    assert log.count("Loading libraries") == 1


@pytest.mark.parametrize("has_torch", [True, False])
def test_a_process_that_has_torch_or_collects_nothing_is_left_as_it_is(has_torch, monkeypatch):
    """A trace runs without collections, and decides itself when they are on again."""
    monkeypatch.setitem(sys.modules, "torch", sys)
    if not has_torch:
        monkeypatch.delitem(sys.modules, "torch")
        gc.disable()
    monkeypatch.setattr(gc, "freeze", lambda: pytest.fail("frozen"))
    try:
        with waiting.importing():
            assert gc.isenabled() == has_torch
        assert gc.isenabled() == has_torch
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_collections_are_on_again_however_imports_end(error, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    with contextlib.suppress(error), waiting.importing():
        assert not gc.isenabled()
        raise error
    assert (gc.isenabled(), frozen) == (True, [False])  # frozen before: none walks through all that was imported


def test_a_second_plan_of_a_class_that_the_tables_lack_loads_no_library(tmp_path, monkeypatch, sums):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 256}  # fmt: skip
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "bitnet", **sizes}))
    (tmp_path / "run.yaml").write_text(
        f"model: {{name: {tmp_path}/model, max_seq_len: 64}}\ndata: {{train_path: {sums}}}\n"
        "train: {effective_batch_size: 8}\n"
    )
    plan = json.dumps([["plan", "--config", "run.yaml"]])
    first, second = (json.loads(in_a_process(SEVERAL, tmp_path, given=plan).splitlines()[-1])[0] for _ in range(2))
    assert (first[0], second[0], "torch" in first[2], second[2]) == (0, 0, True, [])

    def choice(said: str) -> list[str]:
        """The figures that do not depend on how much memory is free."""
        lines = [line for line in said.splitlines() if "Predicted peak" in line or "Choice" in line]
        return [line.rpartition(" of ")[0] for line in lines]

    assert choice(first[1]) == choice(second[1]) != []
