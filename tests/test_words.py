"""Tokens of known words are the tokenizer's own, span by span; where they would not be, the tokenizer is asked."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from benchmarks.starter_base import make_tokenizer
from sft_play.data.masks.render import Renderer
from sft_play.data.masks.tokenizer import Encoder, TokenizerParts
from sft_play.data.masks.words import _KNOWN_CODES, build_word_tokenizer, to_python_pattern
from tests.bundled import data_file, there, tokenizer_folder

TEXTS = ["Don't count 1234 sheep, I'LL do it!\n\n\tfor (int i = 0; i < 10; ++i) { x[i] += 3.5; }  the end"] * 30
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(*before: Any, use_regex: bool = False) -> Tokenizer:
    """A byte-level BPE tokenizer that cuts by these steps."""
    made = Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    made.pre_tokenizer = pre_tokenizers.Sequence([*before, last])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<|im_start|>", "<|im_end|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    return made


def split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


KINDS = {
    "gpt2": byte_level(use_regex=True),
    "gpt4": byte_level(split(GPT4)),
    "o200k": byte_level(split(O200K)),
    "word classes": byte_level(split(r"[\w]+| ?[^\s\w]+|\s+(?!\S)|\s+")),
}
KNOWN = st.text(
    st.one_of(
        st.characters(max_codepoint=127), st.sampled_from(" \n'sSt1aA"), st.sampled_from(sorted(map(chr, _KNOWN_CODES)))
    ),
    max_size=80,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.one_of(KNOWN, st.sampled_from(["<|im_start|>", "<|im_end|>"])), max_size=6))
def test_ids_by_words_are_the_tokenizers_own(kind: str, parts: list[str]):
    words = build_word_tokenizer(KINDS[kind])
    assert words is not None
    text = "".join(parts)
    made = words.encode(text)
    if kind == "word classes" and not text.isascii():
        assert made is None
    else:
        assert made == KINDS[kind].encode(text, add_special_tokens=False).ids


def test_a_span_is_told_by_its_first_and_last_token():
    words = build_word_tokenizer(KINDS["gpt4"])
    assert words is not None
    text = "<|im_start|>assistant\n7 8<|im_end|>\n"
    start = text.index("7")
    ids, spans = words.encode_with_spans(text, [(start, len(text) - 1)]) or ([], [])
    [(first, last)] = spans
    assert KINDS["gpt4"].decode(ids[first:last], skip_special_tokens=False) == "7 8<|im_end|>"
    assert KINDS["gpt4"].decode(ids[:first], skip_special_tokens=False) == "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("cafe\u0301 one", (0, 5)),
        ("\u00a0one", (0, 4)),
        ("one two", (1, 3)),
        ("a<|im_end|>", (1, 5)),
        ("one two", (0, 5)),
    ],
)
def test_the_tokenizer_is_asked_for_other_texts_and_for_edges_inside_words(text: str, span: tuple[int, int]):
    words = build_word_tokenizer(KINDS["gpt4"])
    assert words is not None
    assert words.encode_with_spans(text, [span]) is None


def changed(**parts: Any) -> Tokenizer:
    """The gpt4 tokenizer with other parts."""
    made = Tokenizer.from_str(KINDS["gpt4"].to_str())
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def with_added(token: AddedToken) -> Tokenizer:
    made = changed()
    made.add_tokens([token])
    return made


@pytest.mark.parametrize(
    "other",
    [
        changed(normalizer=normalizers.Lowercase()),
        changed(pre_tokenizer=pre_tokenizers.Metaspace()),
        changed(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        changed(pre_tokenizer=pre_tokenizers.Whitespace()),
        with_added(AddedToken("<|pad|>", rstrip=True)),
        with_added(AddedToken("word", single_word=True)),
        Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
        byte_level(split(r"\p{N}{1,3}"), split(GPT4)),
    ],
    ids=[
        "lowercase",
        "metaspace",
        "prefix space",
        "white space",
        "strips",
        "single word",
        "word level",
        "two patterns",
    ],
)
def test_tokenizers_of_other_kinds_have_no_words(other: Tokenizer):
    assert build_word_tokenizer(other) is None


def test_a_normaliser_that_leaves_ascii_alone_is_no_hindrance():
    assert build_word_tokenizer(changed(normalizer=normalizers.NFC())) is not None


@pytest.mark.parametrize(
    "pattern", [r"a$", r"^a", "a.b", r"[a&&b]", r"[[a]b]", r"\ba", r"a{2}+", r"(?x)a", r"\h", r"a\z"]
)
def test_patterns_that_mean_another_thing_in_python_are_refused(pattern: str):
    with pytest.raises(ValueError, match=re.escape(pattern)):
        to_python_pattern(pattern)


def test_classes_are_spelt_out():
    assert re.fullmatch(to_python_pattern(r"[\p{Lu}\p{Nd}]+"), "AZ09", re.ASCII)
    assert not re.fullmatch(to_python_pattern(r"\p{Lu}"), "a", re.ASCII)
    assert re.fullmatch(to_python_pattern(r"\P{L}+"), "1 -\n", re.ASCII)
    assert not re.search(to_python_pattern(r"\p{Lm}"), "".join(map(chr, range(128))), re.ASCII)


def test_rows_by_words_are_the_rows_of_the_tokenizer(monkeypatch: pytest.MonkeyPatch):
    from sft_play.data.sources.formats import Chat

    parts = TokenizerParts.from_tokenizer(make_tokenizer(["one two three don't 12 \n user assistant"] * 20))
    texts = ["one", " two\n\nthree ", "don't 12", "caf\u00e9", "<|im_end|>", "", "\t"]
    chats = [
        Chat(f"rows:{number}", ({"role": "user", "content": asked}, {"role": "assistant", "content": answer}))
        for number, (asked, answer) in enumerate((asked, answer) for asked in texts for answer in texts)
    ]
    quick = Renderer(parts, max_seq_len=512)
    assert quick.encoder.word_tokenizer is not None
    made = quick.render_all(chats)
    slow = Renderer(parts, max_seq_len=512)
    monkeypatch.setattr(Encoder, "word_tokenizer", None)
    assert slow.render_all(chats) == made


@pytest.mark.parametrize("name", there(["bundled/chatml", "bundled/bytes", "Qwen2.5-Instruct", "SmolLM2", "gpt2"]))
def test_real_tokenizers_have_words(name: str):
    from transformers import AutoTokenizer

    backend = AutoTokenizer.from_pretrained(tokenizer_folder(name)).backend_tokenizer
    words = build_word_tokenizer(backend)
    assert words is not None
    own = name.startswith("bundled/")
    rows = data_file("bundled/rows/questions/train.jsonl" if own else "sft/gsm8k/test.jsonl")
    texts = [json.loads(line)["answer"] for line in rows.read_text("utf-8").splitlines()] + _code()
    texts += "".join(_code()).splitlines(keepends=True)[:3_000] if own else []
    asked = [encoding.ids for encoding in backend.encode_batch(texts, add_special_tokens=False)]
    made = [words.encode(text) for text in texts]
    assert sum(ids is not None for ids in made) > 1_000
    assert all(ids is None or ids == wanted for ids, wanted in zip(made, asked, strict=True))


def _code() -> list[str]:
    """Texts with much white space and many marks: this project's own."""
    return [path.read_text("utf-8") for path in Path(__file__).parent.glob("test_d*.py")]
