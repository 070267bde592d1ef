"""Splits of token rows: what is kept, what stops a run, blocks of text, mixes, and the cache they lie in."""

import dataclasses
import errno
import fcntl
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from unittest.mock import Mock

import pytest

from sft_play.config.load import config_from_text
from sft_play.config.schema import DataConfig
from sft_play.data.build import build as build_module
from sft_play.data.build.build import KEPT_SIDE, BuildRecipe, RowWriter, build_rows
from sft_play.data.build.splits import build_splits
from sft_play.data.build.stats import RowStats
from sft_play.data.checks import judge_split
from sft_play.data.masks.token_row import IGNORED
from sft_play.data.masks.tokenizer import TokenizerParts
from sft_play.data.sources.files import find_data_paths
from sft_play.errors import DataError
from sft_play.files import hold_lock
from tests.bundled import SHARED_SLOWLY, data_file, tokenizer_folder
from tests.conftest import ROOT, chat, write_rows

ROW = chat("hello there", "how are you today?")
MIXED = "task_mode: cpt_mixed\ndata: {train_path: t.jsonl, text_path: t.txt"


def said_of(report: RowStats) -> str:
    data = DataConfig(on_bad_row="skip", max_lost_fraction=1.0)
    return "\n".join(found.found for found in judge_split(report, data, max_seq_len=32, max_positions=None))


@pytest.fixture(scope="module")
def tokenizer(tiny_llama):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_llama)


def build(tokenizer, text, *, limit=64):
    config = config_from_text(f"model: {{name: x}}\n{text}", name="run.yaml")
    return build_splits(config, find_data_paths(config.data), tokenizer, max_seq_len=limit)


class TestSplits:
    def test_a_split_by_content_hash_does_not_move_when_rows_are_added(self, tokenizer, tmp_path):
        def held_out(count):
            path = write_rows(tmp_path / "t.jsonl", (chat(f"q {n}", f"a {n}") for n in range(count)))
            splits = build(tokenizer, f"data: {{train_path: {path}, val_path: null, val_fraction: 0.2}}")
            assert len(splits.train.rows) + len(splits.val.rows) == count
            return {item.messages[0]["content"] for item in splits.val.chats}

        few, more = held_out(50), held_out(80)
        assert few == {question for question in more if int(question.split()[1]) < 50}
        assert 3 <= len(few) <= 20

    def test_bad_rows_stop_the_run_with_their_lines_and_reasons(self, tokenizer, tmp_path):
        bad = ({"messages": []}, {"messages": [{"role": "x", "content": "a"}]}, {"y": 1})
        path = write_rows(tmp_path / "t.jsonl", [ROW, *bad])
        with pytest.raises(DataError, match="3 of 4 rows") as error:
            build(tokenizer, f"data: {{train_path: {path}, val_path: null, test_path: null}}")
        parts = ["t.jsonl:2: messages is empty", 't.jsonl:3: unknown role "x"', "t.jsonl:4: messages is missing"]
        parts += ["data.on_bad_row=skip", "turns of known roles in the other rows: user 1, assistant 1"]
        assert all(part in str(error.value) for part in parts)
        train = build(tokenizer, f"data: {{train_path: {path}, val_path: null, on_bad_row: skip}}").train
        assert (len(train.rows), train.stats.dropped_rows["messages is empty"]) == (1, 1)

    @pytest.mark.parametrize(("data", "said"), [
        ("task_mode: cpt\ndata: {train_path: w.txt, test_path: null}", "less than one block of max_seq_len 64"),
        ("task_mode: cpt\ndata: {train_path: t.jsonl}", r"task_mode is cpt.*use task_mode=sft"),
        ("task_mode: cpt\ndata: {train_path: t.txt, val_path: t.jsonl}", r"1 rows are chats .*data\.val_path=null"),
        (f"{MIXED}, text_fraction: 0.9999999}}", "passes over it; lower it"),
        ("data: {train_path: q.jsonl, columns: {prompt: nix, completion: r}}", r"names nix; the columns are: q, r"),
        ("data: {train_path: q.jsonl, columns: {prompt: q, completion: q}}", "q is mapped to two columns"),
        ("data: {train_path: q.jsonl, columns: {promt: q}}", "did you mean prompt"),
    ])  # fmt: skip
    def test_what_a_run_cannot_train_on_is_refused(self, tokenizer, tmp_path, monkeypatch, data, said):
        monkeypatch.chdir(tmp_path)
        write_rows(Path("t.jsonl"), [ROW])
        write_rows(Path("q.jsonl"), [{"q": "a", "r": "b"}])
        Path("t.txt").write_text("the light in the kitchen is on. " * 200)
        Path("w.txt").write_text("yes no")
        with pytest.raises(DataError, match=said):
            build(tokenizer, data)

    def test_rows_that_stand_twice_or_in_two_splits_are_counted(self, tokenizer, tmp_path):
        rows = [chat(f"q {n}", f"a {n}") for n in range(8)]
        train = write_rows(tmp_path / "t.jsonl", [*rows, rows[0], rows[0], rows[3]])
        val = write_rows(tmp_path / "v.jsonl", [rows[1], rows[2], rows[2], chat("other", "row")])
        config = f"data: {{train_path: {train}, val_path: {val}, test_path: {train}, workers: 2}}"
        splits = build(tokenizer, config)
        stats = [split.stats for split in (splits.train, splits.val, splits.test)]
        assert [one.repeated_rows for one in stats] == [3, 1, 3]
        assert [one.shared_rows for one in stats] == [{}, {"train": 2}, {"train": 8, "val": 2}]
        assert "3 rows of train with the tokens of an earlier one" in said_of(stats[0])
        assert "2 rows with the same tokens as in train" in said_of(stats[1])
        again = build(tokenizer, config)
        assert [again.train.stats, again.val.stats] == stats[:2]

    def test_plain_text_is_packed_into_full_blocks_and_every_token_is_trained(self, tokenizer, tmp_path):
        path = tmp_path / "t.txt"
        path.write_text("the light in the kitchen is on. " * 100)
        splits = build(tokenizer, f"task_mode: cpt\ndata: {{train_path: {path}, val_path: null}}", limit=32)
        assert len(splits.train.rows) > 10
        for row in splits.train.rows:
            assert (len(row["input_ids"]), row["labels"], row["source"]) == (32, row["input_ids"], 1)
        assert any("packed into" in note for note in splits.notes)

    def test_mixed_runs_keep_the_ratio_and_each_kind_its_own_mask(self, tokenizer, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        write_rows(Path("t.jsonl"), (chat(f"q {n}", f"a {n}") for n in range(30)))
        Path("t.txt").write_text("the light in the kitchen is on. " * 60)
        splits = build(tokenizer, f"{MIXED}, text_fraction: 0.25, val_path: null}}")
        blocks = [row for row in splits.train.rows if IGNORED not in row["labels"]]
        assert (len(blocks), len(splits.train.rows)) == (10, 40)  # 10 / (10 + 30) = 0.25
        assert all(len(row["input_ids"]) == 64 and row["source"] == 1 for row in blocks)
        sources = splits.train.rows["source"][:]
        assert sources != sorted(sources)


class TestCache:
    """The token cache: keyed by what decides the tokens, whole or not there, the same however it was made."""

    @pytest.fixture
    def recipe(self, tokenizer):
        data = config_from_text("model: {name: x}", name="run.yaml").data
        return BuildRecipe(TokenizerParts.from_tokenizer(tokenizer), data, 64, date(2026, 1, 2))

    @pytest.fixture(autouse=True)
    def cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
        return tmp_path / "cache" / "tokens"

    def rows(self, built, name=KEPT_SIDE):
        return [(row["input_ids"], row["labels"]) for row in built.dataset(name)]

    def test_a_cache_that_holds_code_runs_none_and_is_made_again(self, recipe, tmp_path, cache, monkeypatch):
        path = write_rows(tmp_path / "t.jsonl", (chat(f"q {n}", f"a {n}") for n in range(40)))
        made = self.rows(build_rows(path, recipe, split="train"))
        with monkeypatch.context() as patch:
            patch.setattr(build_module, "_build_cache", lambda *_: pytest.fail("made again"))
            assert self.rows(build_rows(path, recipe, split="train")) == made
        [meta] = cache.glob("*/meta.pickle")
        good, ran = pickle.loads(meta.read_bytes()), tmp_path / "ran"

        class Bad:
            def __reduce__(self):
                return Path.touch, (ran,)

        meta.write_bytes(pickle.dumps((good, Bad())))
        assert self.rows(build_rows(path, recipe, split="train")) == made
        assert (ran.exists(), pickle.loads(meta.read_bytes())) == (False, good)
        pickle.loads(pickle.dumps(Bad()))  # it would have
        assert ran.exists()

    def test_on_a_disk_without_locks_the_processes_of_this_machine_still_wait(self, tmp_path, monkeypatch, caplog):
        taken, flock = [], fcntl.flock
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "here"))
        (tmp_path / "here").mkdir()

        def without(file, how):
            if Path(file.name).parent == tmp_path:
                raise OSError(errno.ENOLCK, "No locks available")
            taken.append(file.name)
            flock(file, how)

        monkeypatch.setattr(fcntl, "flock", without)
        with hold_lock(tmp_path / "one.lock", waiting_message="waiting"):
            assert "does not support locks (No locks available)" in caplog.text
            assert "SFT_PLAY_CACHE" in caplog.text
            with Path(taken[0]).open("a") as other, pytest.raises(BlockingIOError):
                flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with Path(taken[0]).open("a") as other:
            flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def test_what_decides_the_tokens_makes_another_cache_and_nothing_else_does(self, recipe, tmp_path, cache):
        path = write_rows(tmp_path / "t.jsonl", [ROW])
        source = dict(recipe.tokenizer.templates)["default"]
        dated = {"tokenizer": recipe.tokenizer.replace_template("{{ strftime_now('%Y') }}" + source)}
        no_token = {"max_lost_fraction": 0.5, "on_bad_row": "skip", "packing": "best_fit"}
        later = {"today": date(2030, 1, 1)}

        def caches(recipe, **changes):
            build_rows(path, dataclasses.replace(recipe, **changes), split="train")
            return len([item for item in cache.iterdir() if item.is_dir()])

        assert caches(recipe) == caches(recipe, data=recipe.data.model_copy(update=no_token), **later) == 1
        assert caches(recipe, tokenizer=recipe.tokenizer.replace_template(source + " ")) == 2
        assert caches(recipe, max_seq_len=63) == 3
        assert caches(recipe, data=recipe.data.model_copy(update={"loss_on": "all"})) == 4
        assert (caches(recipe, **dated), caches(recipe, **dated, **later)) == (5, 6)
        write_rows(path, [chat("hello there", "how are you this day?")])
        assert caches(recipe) == 7

    def test_code_and_tables_of_rows_decide_the_cache_and_compiled_files_do_not(self, tmp_path):
        """Python compiles modules as they are imported, so that a second start has more files than the first."""
        (tmp_path / "masks" / "__pycache__").mkdir(parents=True)
        (tmp_path / "masks" / "render.py").write_text("x = 1\n")
        (tmp_path / "words.json").write_text("{}")
        digest = build_module._code_digest(tmp_path)
        (tmp_path / "masks" / "__pycache__" / "render.cpython-311.pyc").write_bytes(b"compiled")
        assert build_module._code_digest(tmp_path) == digest
        (tmp_path / "words.json").write_text("[]")
        with_words = build_module._code_digest(tmp_path)
        (tmp_path / "masks" / "render.py").write_text("x = 2\n")
        assert len({digest, with_words, build_module._code_digest(tmp_path)}) == 3

    def test_a_script_without_a_main_guard_may_prepare_rows_with_workers(self, tiny_llama, tmp_path):
        """Workers do not run the script again: they would each begin workers of their own, and wait for them."""
        path = write_rows(tmp_path / "t.jsonl", (chat(f"question {n}", "yes " * 200) for n in range(1_500)))
        script = tmp_path / "script.py"
        script.write_text(
            "from datetime import date\nfrom pathlib import Path\n"
            "from transformers import AutoTokenizer\n"
            "from sft_play.config.schema import DataConfig\n"
            "from sft_play.data.build.build import BuildRecipe, build_rows\n"
            "from sft_play.data.masks.tokenizer import TokenizerParts\n"
            f"parts = TokenizerParts.from_tokenizer(AutoTokenizer.from_pretrained({str(tiny_llama)!r}))\n"
            "recipe = BuildRecipe(parts, DataConfig(), 512, date.today())\n"
            f"built = build_rows(Path({str(path)!r}), recipe, split='train', workers=2)\n"
            "print(len(built.files['kept']), built.stats['kept'].kept_rows)\n"
        )
        words, environment = [sys.executable, str(script)], {**os.environ, "PYTHONPATH": str(ROOT)}
        answer = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
        assert answer.returncode == 0, answer.stderr
        pieces, rows = map(int, answer.stdout.split()[-2:])
        assert (pieces > 2, rows) == (True, 1_500)

    def test_a_build_that_breaks_leaves_no_half_cache(self, recipe, tmp_path, cache, monkeypatch):
        path = write_rows(tmp_path / "t.jsonl", (chat(f"q {n}", f"a {n}") for n in range(600)))
        with monkeypatch.context() as patch:
            patch.setattr(RowWriter, "add", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                build_rows(path, recipe, split="train")
        assert not [item for item in cache.iterdir() if item.is_dir()]
        assert len(build_rows(path, recipe, split="train").dataset(KEPT_SIDE)) == 600

    def test_a_cache_that_is_damaged_is_made_again(self, recipe, tmp_path):
        path = write_rows(tmp_path / "t.jsonl", [ROW])
        built = build_rows(path, recipe, split="train")
        (counts,) = built.folder.glob("meta.*")
        killed = built.folder.with_name(f"{built.folder.name}.part")  # what a build that was killed leaves
        for damage in (
            (built.folder / built.files[KEPT_SIDE][0]).unlink,
            lambda: counts.write_bytes(b"half"),
            lambda: built.folder.rename(killed),
        ):
            damage()
            again = build_rows(path, recipe, split="train")
            assert len(again.dataset(KEPT_SIDE)) == again.stats[KEPT_SIDE].kept_rows == 1
            assert not killed.exists()

    def test_ranks_that_start_at_once_make_one_cache(self, recipe, tmp_path, cache):
        path = write_rows(tmp_path / "t.jsonl", (chat(f"q {n}", f"a {n}") for n in range(3_000)))
        context = multiprocessing.get_context("spawn")
        with context.Pool(3) as pool:
            found = pool.starmap(_count_rows, [(path, recipe)] * 3)
        assert sorted(found) == [(3_000, 0), (3_000, 0), (3_000, 1)]
        assert len([item for item in cache.iterdir() if item.is_dir()]) == 1

    def test_a_cache_that_cannot_be_written_says_what_to_do(self, recipe, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "file"))
        with pytest.raises(DataError, match="SFT_PLAY_CACHE"):
            build_rows(write_rows(tmp_path / "t.jsonl", [ROW]), recipe, split="train")

    def test_a_worker_that_dies_is_named(self, recipe, tmp_path, monkeypatch):
        path = write_rows(tmp_path / "t.jsonl", (chat(f"q {n}" * 400, f"a {n}") for n in range(3_000)))
        monkeypatch.setattr(build_module, "_run_job", _die)
        with pytest.raises(DataError, match="a process that prepared rows died"):
            build_rows(path, recipe, split="train", workers=2)


def _count_rows(path, recipe):
    made, whole = [], build_module._build_cache
    build_module._build_cache = lambda *given: made.append(1) or whole(*given)
    return len(build_rows(path, recipe, split="train", workers=1).dataset(KEPT_SIDE)), len(made)


def _die(*_):
    os._exit(9)


def test_too_much_lost_says_which_limit_keeps_how_much(tokenizer, tmp_path):
    long = [chat("yes", "no " * 100) for _ in range(5)]
    path = write_rows(tmp_path / "t.jsonl", [*(chat(f"q {n}", f"a {n}") for n in range(20)), *long])
    data = f"data: {{train_path: {path}, val_path: null"
    with pytest.raises(DataError, match=r"5 of 25 rows are cut[^$]*max_lost_fraction=0\.05[^$]*128 keeps all"):
        build(tokenizer, f"{data}}}", limit=32)
    with pytest.raises(DataError, match=r"all \d+ rows lose their answer at max_seq_len 4 \(shortest prompt: \d+ tok"):
        build(tokenizer, f"{data}}}", limit=4)
    report = build(tokenizer, f"{data}, max_lost_fraction: 1.0}}", limit=32).train.stats
    assert report.cut_rows == 5
    assert report.as_json()["lost_fraction"] == report.lost_tokens / (report.lost_tokens + report.trained_tokens)
    assert "5 of 25 rows are cut at max_seq_len" in said_of(report)


def test_a_mixed_run_holds_text_out_beside_its_chats(tokenizer, tmp_path):
    chats = write_rows(tmp_path / "t.jsonl", (chat(f"q {n}", f"a {n}") for n in range(30)))
    val = write_rows(tmp_path / "v.jsonl", (chat(f"v {n}", f"a {n}") for n in range(5)))
    text = write_rows(tmp_path / "x.jsonl", ({"text": f"the light {n} in the kitchen is on. " * 30} for n in range(99)))
    data = f"data: {{train_path: {chats}, text_path: {text}, val_path: {val}}}"
    splits = build(tokenizer, f"task_mode: cpt_mixed\n{data}")
    sources = splits.val.rows["source"][:]
    assert (sources.count(0), sources.count(1) >= 1) == (5, True)
    assert any("held-out text" in note for note in splits.notes)
    trained = {tuple(row["input_ids"]) for row in splits.train.rows}
    assert not [row for row in splits.val.rows if row["source"] == 1 and tuple(row["input_ids"]) in trained]


REAL_ROWS = {
    "bundled": (
        "bundled/chatml",
        {"questions/train.jsonl": 12, "alpaca.json": 8, "sharegpt_tools.json": 3, "typed_parts.jsonl": 2,
         "openai_chat.jsonl": 4, "openai_tools.jsonl": 3},
    ),
    "shared": (
        "Qwen2.5-Instruct",
        {"gsm8k/test.jsonl": 1319, "llamafactory/identity.json": 91, "llamafactory/glaive_toolcall_en_demo.json": 300,
         "llamafactory/reason_tool_use_demo_50.jsonl": 50, "openai_cookbook/toy_chat_fine_tuning.jsonl": 5,
         "openai_cookbook/drone_training_first3.jsonl": 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("origin", SHARED_SLOWLY)
def test_real_files_render_whole_with_a_real_tokenizer(origin):
    from transformers import AutoTokenizer

    tokenizer_name, files = REAL_ROWS[origin]
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder(tokenizer_name))
    folder = data_file("bundled/rows" if origin == "bundled" else "sft")
    for name, count in files.items():
        splits = build(tokenizer, f"data: {{train_path: {folder}/{name}, val_path: null}}", limit=32_768)
        assert (len(splits.train.rows), splits.train.stats.dropped_rows) == (count, {})
        assert all(any(label != IGNORED for label in row["labels"]) for row in splits.train.rows)


def test_a_run_loads_no_command_on_data_and_commands_no_heavy_library():
    """What trains counts, judges and splits rows; process, style, preview and what writes files are commands on top."""
    code = (
        "import sys; import sft_play.data.build.splits, sft_play.data.checks, sft_play.data.build.packing; "
        "names = [f'sft_play.data.{name}' for name in ('process', 'style', 'preview', 'managed_outputs')]; "
        "found = [name for name in names if name in sys.modules]; import sft_play.commands.rows; "
        "found += [name for name in ('torch', 'transformers', 'datasets') if name in sys.modules]; "
        "sys.exit(' '.join(found) or None)"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stderr) == (0, "")
