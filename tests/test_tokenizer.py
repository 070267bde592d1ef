"""Tokenizer rules, on real tokenizers."""

from __future__ import annotations

import builtins

import pytest

from sft_play.config.load import config_from_text
from sft_play.errors import TokenizerError
from sft_play.train.tokenizer import load_tokenizer
from tests.conftest import shared

pytestmark = pytest.mark.build


def load(folder, text="task_mode: cpt"):
    return load_tokenizer(config_from_text(f"model: {{name: {folder}}}\n{text}", name="run.yaml"))


def test_a_tokenizer_without_pad_token_gets_one_said_aloud():
    loaded = load(shared("tokenizers/gpt2"))
    assert loaded.tokenizer.pad_token == "<|endoftext|>"
    assert any("Pad token: the tokenizer has none; <|endoftext|> pads" in note for note in loaded.notes)
    loaded = load(shared("tokenizers/Mistral-7B-Instruct-v0.3"))
    assert loaded.tokenizer.pad_token == "<unk>"


def test_a_pad_token_that_is_also_the_end_token_is_said_aloud():
    loaded = load(shared("tokenizers/SmolLM2"))
    assert loaded.tokenizer.pad_token_id == loaded.tokenizer.eos_token_id
    assert any("also the end token; padding is masked by length" in note for note in loaded.notes)


def test_a_tokenizer_that_needs_nothing_is_left_as_it_is():
    loaded = load(shared("tokenizers/Qwen2.5-Instruct"), "task_mode: sft")
    assert loaded.notes == ()
    assert loaded.tokenizer.pad_token == "<|endoftext|>"
    assert len(loaded.sha256) == 64


def test_a_missing_template_names_the_ways_out():
    with pytest.raises(TokenizerError) as error:
        load(shared("tokenizers/gpt2"), "task_mode: sft")
    for part in ("has no chat template", "data.chat_template", "(plain)", "task_mode=cpt"):
        assert part in str(error.value)


def test_a_built_in_template_that_does_not_fit_the_vocabulary_is_refused():
    with pytest.raises(TokenizerError, match="needs <|im_start|> and <|im_end|> in the vocabulary".replace("|", r"\|")):
        load(shared("tokenizers/gpt2"), "data: {chat_template: chatml}")


def test_a_tokenizer_that_the_library_changes_is_named():
    loaded = load(shared("tokenizers/Phi-3-mini-4k-instruct"))
    assert any("transformers and tokenizer.json disagree on" in note for note in loaded.notes)


def test_a_sentencepiece_model_loads_and_without_its_package_names_it(monkeypatch):
    folder = shared("tokenizers/Mistral-7B-v0.3-spm")
    assert load(folder).tokenizer("hello")["input_ids"]
    real = builtins.__import__

    def without(name, *args, **options):
        if name == "sentencepiece":
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(TokenizerError, match="needs the package sentencepiece: pip install sentencepiece"):
        load(folder)


def test_a_folder_without_a_tokenizer_says_what_was_looked_for(tmp_path):
    with pytest.raises(TokenizerError, match=r"holds no tokenizer \(looked for"):
        load(tmp_path)


def test_the_digest_changes_with_the_template():
    folder = shared("tokenizers/Qwen2.5-Instruct")
    assert load(folder).sha256 != load(folder, "data: {chat_template: chatml}").sha256


def _with_template(folder, tmp_path, template):
    import shutil

    copy = tmp_path / "own"
    shutil.copytree(folder, copy)
    for file in copy.glob("chat_template*"):
        file.unlink()
    (copy / "chat_template.jinja").write_text(template)
    return config_from_text(f"model: {{name: {copy}}}\ndata: {{chat_template: training}}", name="run.yaml")


def test_the_training_variant_of_a_template_is_taken_from_trl(tiny_llama, tmp_path):
    own = shared("chat_templates/trl/qwen3_5_think.jinja").read_text()
    loaded = load_tokenizer(_with_template(tiny_llama, tmp_path, own))
    assert loaded.own_template == own
    assert "{% generation %}" in loaded.tokenizer.chat_template or "generation" in loaded.tokenizer.chat_template
    assert any("training variant" in note for note in loaded.notes)


def test_a_template_that_trl_does_not_know_has_no_training_variant(tiny_llama, tmp_path):
    template = (
        "{% for m in messages %}{{ m.role + ' ' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
    )
    with pytest.raises(TokenizerError, match="TRL knows no training variant"):
        load_tokenizer(_with_template(tiny_llama, tmp_path, template))
