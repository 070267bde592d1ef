"""The starter: honest data, and real learning without a network or a GPU."""

import json
import os
import re
import subprocess
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import starter_base
from benchmarks.starter_corpus import corpus_documents, normalise, starter_rows, unseen_documents
from sft_play.config.load import load_config
from sft_play.data.build.splits import build_splits
from sft_play.data.sources.files import find_data_paths
from sft_play.models.config_json import KNOWN_MODELS, find_model_folder, parse_model_shape
from sft_play.starter import BASE_NAME, BASES, CONFIG, find_starter_file
from tests import warm
from tests.conftest import ROOT, shared, write_rows
from tests.converter import converter
from tests.test_train import losses

SLOTS = ("person", "room", "door", "style", "item", "degrees", "minutes", "hour", "day")
"""What a command may need, as the corpus names it."""


def test_there_are_enough_rows_of_as_many_kinds_and_the_corpus_has_none_of_them():
    rows = starter_rows()
    prompts = {split: [normalise(row["messages"][0]["content"]) for row in rows[split]] for split in rows}
    assert [len(rows[split]) for split in ("train", "val", "test")] == [2600, 100, 300]
    actions = {row["messages"][1]["content"].split()[0] for row in rows["train"]}
    assert len(actions) >= 12
    documents = corpus_documents()
    corpus, training = "\n".join(map(normalise, documents)), set(prompts["train"])
    for prompt in (*prompts["val"], *prompts["test"]):
        assert (prompt in training, prompt in corpus) == (False, False)
    assert not [action for action in actions if action in "\n".join(documents)]
    answers = Counter(row["messages"][1]["content"] for row in rows["test"])
    assert max(answers.values()) / len(rows["test"]) < 0.10  # always giving the most frequent one


def test_values_are_also_noted_where_no_wording_tells_what_they_are():
    """Copying is learned slot by slot: two slots of nine were not yet copied where sentences alone taught it."""
    loose = Counter()
    for text in corpus_documents():
        if (found := re.search(r"user\nsort (.*)<\|im_end\|>\n.*\nnote (.*)<", text)) is not None:
            noted = found[2].split()
            assert sorted(found[1].split()) == sorted(noted[1::2])
            loose.update(noted[::2])
    assert set(loose) == set(SLOTS)
    assert min(loose.values()) > max(2000, 0.9 * max(loose.values()))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def sft_play(cache: Path, *words: str, typed: str = "", **variables: str) -> str:
    """What a command prints on standard output; `typed` is its standard input, `variables` are make's."""
    kept = {name: value for name, value in os.environ.items() if name not in ("SET", "CONFIG")}
    answer = subprocess.run(
        [warm.python(), "-m", "sft_play", *words], cwd=ROOT, env={**kept, "SFT_PLAY_CACHE": str(cache), **variables},
        input=typed, capture_output=True, text=True, timeout=2400,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def test_the_shipped_base_is_the_recorded_one():
    """What is fixed is the digest of its files: trained again on another machine, its weights are others."""
    record = json.loads(starter_base.RECORD.read_text(encoding="utf-8"))
    assert {path.name: starter_base.digest(path) for path in BASES[BASE_NAME].iterdir()} == record["sha256"]
    assert sum(path.stat().st_size for path in BASES[BASE_NAME].iterdir()) < 4.1e6
    assert record["recipe"] == starter_base.recipe(), "corpus, tokenizer or recipe changed: " + record["command"]


def test_the_recipe_changes_with_what_the_base_is_made_of(tmp_path, monkeypatch):
    recipe, other = starter_base.recipe(), tmp_path / "corpus"
    other.write_bytes(b"")
    for name, value in (("CORPUS", other), ("SEED", 3), ("INITIALIZER_RANGE", 0.02), ("CHAT_TEMPLATE", "")):
        with monkeypatch.context() as patch:
            patch.setattr(starter_base, name, value)
            assert starter_base.recipe() != recipe


def test_the_shipped_tokenizer_and_shape_are_made_from_the_corpus_and_the_table(tmp_path):
    documents = corpus_documents()
    starter_base.make_tokenizer(documents).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (BASES[BASE_NAME] / name).read_bytes()
    table = parse_model_shape(KNOWN_MODELS[BASE_NAME].config, name=BASE_NAME)
    assert parse_model_shape(json.loads((BASES[BASE_NAME] / "config.json").read_text()), name=BASE_NAME) == table
    assert find_model_folder(BASE_NAME) == BASES[BASE_NAME]


def test_what_two_bases_differ_by_is_said_of_random_weights():
    one = {"a": torch.zeros(5), "b": torch.zeros(3)}
    other = one | {"a": torch.tensor([0.0, 8.0, 0.0, -9.0, 0.0])}
    assert starter_base.difference(one, one).startswith("the same as the shipped base")
    said = "2 of 8 weights differ from the shipped base's, by at most 9"
    assert starter_base.difference(one, other).startswith(said)
    assert "shipped before" in starter_base.difference({}, one)


def test_a_wheel_has_every_data_file_of_the_package():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    taken = {path for pattern in tools["package-data"]["sft_play"] for path in (ROOT / "sft_play").glob(pattern)}
    files = {path for path in (ROOT / "sft_play").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path for path in files - taken if path.suffix != ".py"} == set()
    assert set(BASES[BASE_NAME].iterdir()) < taken
    # the package's copy of the run YAML, and of its rows, as a user who has no checkout names them
    shipped = find_starter_file(Path(CONFIG))
    assert shipped is not None
    assert shipped.read_bytes() == (ROOT / CONFIG).read_bytes()
    for text in re.findall(r"_path: (\S+)", shipped.read_text(encoding="utf-8")):
        assert find_starter_file(Path(text)) == ROOT / text
    assert find_starter_file(Path("sft_play/starter/data/mine.jsonl")) is find_starter_file(Path("train.jsonl")) is None


def test_the_base_copies_every_slot():
    """What fine-tuning builds on: a base that copies eight slots of nine falls below 95% whatever follows."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(BASES[BASE_NAME]),
        AutoTokenizer.from_pretrained(BASES[BASE_NAME]),
    )
    notes = re.compile(r"<\|im_start\|>user\n[^<]*<\|im_end\|>\n<\|im_start\|>assistant\nnote [^<]*<\|im_end\|>\n")
    chats = [text for text in unseen_documents() if notes.fullmatch(text)]
    slots = {tokenizer(f" {slot}").input_ids[0]: slot for slot in SLOTS}
    right, asked = Counter(), Counter()
    for chat in chats:
        ids = tokenizer(chat).input_ids
        with torch.no_grad():
            said = model(input_ids=torch.tensor([ids])).logits[0].argmax(-1).tolist()
        answer = [place for place, token in enumerate(ids) if token == ids[0]][1]
        for place in range(answer, len(ids) - 1):
            if ids[place] in slots:
                asked[slots[ids[place]]] += 1
                right[slots[ids[place]]] += said[place] == ids[place + 1]
    assert min(asked.values()) > 20
    assert {slot: right[slot] / asked[slot] for slot in SLOTS if right[slot] < 0.95 * asked[slot]} == {}


@pytest.mark.story
def test_make_train_without_a_config_really_learns(cache, tmp_path):
    printed = sft_play(cache, "train", f"output.dir={tmp_path}", "output.name=starter", "train.epochs=1")
    summary = json.loads((tmp_path / "starter" / "summary.json").read_text())
    before, after = summary["before"], summary["after"]
    assert (summary["split"], before["rows"], after["rows"], summary["tokens_per_s"] > 0) == ("test", 300, 300, True)
    assert before["exact_match"] < 0.10
    assert after["exact_match"] > 0.5  # after one epoch of three
    assert after["loss"] < before["loss"]
    lines = printed.splitlines()
    counted = {"Evaluation on test: 300 rows, with 300 answers generated": 2, "Asked:": 3, "before:": 3}
    assert {part: sum(part in line for line in lines) for part in counted} == counted
    for part in ("Held-out exact match (test, 300 rows): 0", "Peak memory above the ", "Try next:"):
        assert part in printed


@pytest.mark.story
def test_from_own_rows_to_a_model_that_is_judged_exported_and_reported(cache, tmp_path):
    own = tmp_path / "commands.jsonl"
    rows = starter_rows()["train"][:800]
    turns = ([turn["content"] for turn in row["messages"][:2]] for row in rows)
    write_rows(own, ({"prompt": prompt, "completion": answer} for prompt, answer in turns))
    run_yaml = tmp_path / "own.yaml"
    run_yaml.write_text(
        "model: {name: sft-play/starter-base, max_seq_len: 128}\n"
        f"data: {{train_path: {own}, val_fraction: 0.1}}\n"
        "train: {effective_batch_size: 16, epochs: 1, learning_rate: 3e-3, gradient_checkpointing: false}\n"
        f"eval: {{generate_rows: 40, max_new_tokens: 24}}\noutput: {{dir: {tmp_path}/outputs, name: own}}\n"
    )

    def command(name: str, *words: str, typed: str = "", **variables: str) -> str:
        return sft_play(cache, name, "--config", str(run_yaml), *words, typed=typed, **variables)

    def answered(name: str, *words: str, **variables: str) -> dict:
        return json.loads(command(name, *words, "--json", **variables))

    assert answered("plan")["fits"]
    assert answered("check")["ok"]
    trained = answered("train")
    assert trained["after"]["loss"] < trained["before"]["loss"]
    folder = tmp_path / "outputs" / "own"
    assert (folder / "report.html").is_file()  # of every run, without being asked for
    asked = rows[0]["messages"][0]["content"]
    said = command("chat", typed=f"{asked}\n")

    figures = answered("eval")["figures"]
    assert figures["loss"]["tuned"] == pytest.approx(trained["after"]["loss"], abs=1e-4)
    shipped = answered("ship")
    assert (shipped["verdict"], shipped["ok"]) == ("ship", True)
    assert "Replayed" in command("ship", "--replay", str(folder / "ship.json"))
    assert answered("merge", "--out", str(tmp_path / "merged"))["path"] == str(tmp_path / "merged")
    llama_cpp = str(converter())
    assert answered("export", FORMAT="gguf", LLAMA_CPP=llama_cpp)["format"] == "gguf"
    assert answered("export-test", "--limit", "20")["ok"]
    (tmp_path / "asked.txt").write_text(f"{asked}\n")
    variables = {"INPUT": str(tmp_path / "asked.txt"), "OUTPUT": str(tmp_path / "answers.jsonl")}
    command("infer", "--max-new-tokens", "24", **variables)
    assert json.loads((tmp_path / "answers.jsonl").read_text())["answer"] in said
    assert answered("report")["run"] == str(folder)
    assert "<svg" in (folder / "report.html").read_text()
    assert [one["status"] for one in answered("runs")["runs"]] == ["finished"]


@pytest.mark.slow
def test_the_starter_reaches_95_percent(cache, tmp_path):
    sft_play(cache, "train", f"output.dir={tmp_path}", "output.name=starter")
    assert json.loads((tmp_path / "starter" / "summary.json").read_text())["after"]["exact_match"] >= 0.95


@pytest.mark.slow
@pytest.mark.story
@pytest.mark.parametrize(("file", "overrides"), [
    ("sft/gsm8k/train.jsonl", ["model.max_seq_len=512", "eval.generate_rows=0"]),
    ("sft/llamafactory/identity.json", ["model.max_seq_len=512"]),
    ("sft/openai_cookbook/toy_chat_fine_tuning.jsonl", ["model.max_seq_len=1024"]),
    ("sft/openai_cookbook/drone_training_first3.jsonl", ["model.max_seq_len=8192"]),
    ("corpora/tinyshakespeare.txt", ["task_mode=cpt"]),
])  # fmt: skip
def test_real_files_train_on_the_starters_base(cache, tmp_path, file, overrides):
    fixed = ["train.max_steps=2", "eval.before_training=false", "train.effective_batch_size=4", "eval.generate_rows=2"]
    fixed += [f"output.dir={tmp_path}", "output.name=one", f"data.train_path={shared(file)}"]
    sft_play(cache, "train", *fixed, *overrides)
    assert len(losses(tmp_path / "one")) == 2


def test_the_base_reads_the_turns_of_its_corpus_as_the_tokens_that_fine_tuning_uses(tmp_path):
    """As plain text each `<|im_start|>` is five tokens, and the base never sees the one that every chat begins with."""
    documents = corpus_documents(300)
    tokenizer = starter_base.make_tokenizer(documents)
    write_rows(tmp_path / "corpus.jsonl", ({"text": text} for text in documents))
    config = load_config(starter_base.RECIPE, overrides=[f"data.train_path={tmp_path}/corpus.jsonl"]).config
    splits = build_splits(config, find_data_paths(config.data), tokenizer, max_seq_len=128)
    stream = [token for block in splits.train.rows["input_ids"] for token in block]
    wanted = [token for text in documents for token in [*tokenizer(text).input_ids, tokenizer.pad_token_id]]
    assert stream == wanted[: len(stream)]
    assert stream.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) > 100
