"""Tokenizer rules, on real tokenizers."""

import json
import shutil
from pathlib import Path

import pytest

from sft_play.config.load import config_from_text
from sft_play.errors import TokenizerError
from sft_play.training.prepare.tokenizer import load_tokenizer
from tests.bundled import template_of, there, tokenizer_folder
from tests.conftest import chat, write_rows, write_run

pytestmark = pytest.mark.build


def load(folder, text="task_mode: cpt"):
    return load_tokenizer(config_from_text(f"model: {{name: {folder}}}\n{text}", name="run.yaml"))


def named(*names: str):
    """Tokenizers of the bundled set and, where they are there, the real ones that they stand for."""
    return pytest.mark.parametrize("name", there(names))


@pytest.mark.parametrize(
    ("name", "other"), there([("bundled/bytes", "bundled/metaspace"), ("gpt2", "Mistral-7B-Instruct-v0.3")])
)
def test_a_tokenizer_without_pad_token_gets_one_said_aloud(name, other):
    loaded = load(tokenizer_folder(name))
    assert loaded.tokenizer.pad_token == "<|endoftext|>"
    assert any("Pad token: the tokenizer has none; <|endoftext|> pads" in note for note in loaded.notes)
    loaded = load(tokenizer_folder(other))
    assert loaded.tokenizer.pad_token == "<unk>"


@named("bundled/pad_is_eos", "SmolLM2")
def test_a_pad_token_that_is_also_the_end_token_is_said_aloud(name):
    loaded = load(tokenizer_folder(name))
    assert loaded.tokenizer.pad_token_id == loaded.tokenizer.eos_token_id
    assert any("also the end token; padding is masked by length" in note for note in loaded.notes)


@named("bundled/chatml", "Qwen2.5-Instruct")
def test_a_tokenizer_that_needs_nothing_is_left_as_it_is_and_its_digest_has_the_template(name):
    folder = tokenizer_folder(name)
    loaded = load(folder, "task_mode: sft")
    assert (loaded.notes, loaded.tokenizer.pad_token, len(loaded.sha256)) == ((), "<|endoftext|>", 64)
    assert load(folder).sha256 != load(folder, "data: {chat_template: chatml}").sha256


@named("bundled/bytes", "gpt2")
def test_a_missing_template_names_the_ways_out(name):
    with pytest.raises(TokenizerError) as error:
        load(tokenizer_folder(name), "task_mode: sft")
    for part in ("has no chat template", "data.chat_template", "(plain)", "task_mode=cpt"):
        assert part in str(error.value)
    with pytest.raises(TokenizerError, match=r"needs <\|im_start\|> and <\|im_end\|> in the vocabulary"):
        load(tokenizer_folder(name), "data: {chat_template: chatml}")


@named("bundled/spm", "Mistral-7B-v0.3-spm")
def test_a_sentencepiece_model_loads(name):
    assert load(tokenizer_folder(name)).tokenizer("hello")["input_ids"]


def test_the_training_variant_of_a_template_is_taken_from_trl_or_there_is_none(tiny_llama, tmp_path):
    copied = shutil.copytree(tiny_llama, tmp_path / "own")
    for file in copied.glob("chat_template*"):
        file.unlink()
    own = template_of("trl/qwen3_5_think")
    (copied / "chat_template.jinja").write_text(own)
    loaded = load(copied, "data: {chat_template: training}")
    assert loaded.original_template == own
    assert "generation" in loaded.tokenizer.chat_template
    assert any("training variant" in note for note in loaded.notes)
    (copied / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role + m.content }}<|im_end|>{% endfor %}")
    with pytest.raises(TokenizerError, match="TRL has no training variant"):
        load(copied, "data: {chat_template: training}")


def backtracking(folder: Path, base: Path) -> Path:
    """A run YAML, and its model, whose tokenizer splits by a regular expression that backtracks over `aaaa!`."""
    shutil.copytree(base, folder / "model")
    path = folder / "model" / "tokenizer.json"
    state = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, state["pre_tokenizer"]]}
    path.write_text(json.dumps(state))
    rows = (chat(f"say {n}", "a" * (50 if n == 40 else 1) + "!") for n in range(60))
    return write_run(folder, folder / "model", write_rows(folder / "rows.jsonl", rows))


@pytest.mark.parametrize(("verb", "words"), [("train", ("data.workers=2",)), ("check", ())])
def test_a_regular_expression_that_backtracks_is_an_error_of_the_tokenizer(
    tmp_path, tiny_llama, command, monkeypatch, verb, words
):
    """The library panics, which in Python is no Exception; of a worker it could not even be sent to the parent."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    code, said = command(verb, "--config", str(backtracking(tmp_path, tiny_llama)), *words)
    assert code == 2, said
    assert "the tokenizer cannot split a text: its library stopped (Onig: Regex search error" in said
    assert "Traceback" not in said
    if verb == "check":  # one part that fails hides no other
        assert "memory plan" in said
