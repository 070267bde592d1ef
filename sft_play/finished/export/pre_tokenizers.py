"""The pre-tokenizers that llama.cpp knows, read from its own source, and which of them a tokenizer's is.

A GGUF names its pre-tokenizer (`tokenizer.ggml.pre`). llama.cpp's converter finds the name by a checksum over the
tokens of one text, so it knows published tokenizers only. Here the name is proven instead: both cut many texts, from
every part of Unicode, into the same pieces.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Forms of C++ in llama-vocab.cpp: cases of a switch with the expressions of a type, and the names that set a type.
_CASE_PATTERN = re.compile(r"case LLAMA_VOCAB_PRE_TYPE_(\w+):|(default):|regex_exprs = \{(.*?)\n\s*\};", re.DOTALL)
_STRING_PATTERN = re.compile(r'"(?:[^"\\]|\\.)*"')
_TYPE_PATTERN = re.compile(r"pre_type = LLAMA_VOCAB_PRE_TYPE_(\w+);")
_NAME_PATTERN = re.compile(r'tokenizer_pre == "([^"]+)"')
# Of several names for the same expressions, those of the tokenizers that have them first.
PREFERRED_NAMES = (
    "gpt-2",
    "llama-bpe",
    "qwen2",
    "smollm",
    "gpt-4o",
    "tekken",
    "deepseek-llm",
    "deepseek-coder",
    "falcon",
)
_RANDOM_TEXTS = 400
_ALPHABETS = (
    *((0x20, 0x7E), (0x20, 0x7E), (0x09, 0x0D), (0xA0, 0x24F), (0x370, 0x52F), (0x5D0, 0x6FF), (0x900, 0xDFF)),
    *((0xE00, 0x11FF), (0x2000, 0x206F), (0x2070, 0x2BFF), (0x3000, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3)),
    *((0xFF01, 0xFFEE), (0x1F300, 0x1FAFF), (0x10400, 0x1044F)),
)
_PIECES = (
    " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n", "\n ", "a", "Ab", "ABC", "'s", "'S", "'re", "'LL", "'", "’s",
    "1", "12", "123", "1234", "12345678", "1.5", "½", "٣", "!", "?!", "...", "/", "//", "_", "-", "--", "=", "é", "ß",
    "日本", "ひら", "カナ", "한국", "नि", "ก็", "🚀", "👨‍👩‍👧", "\u00a0", "\u3000", "\u200d", "µ", "Ǆ", "$", "+",
    "<", "|", "^",
)  # fmt: skip


@dataclass(frozen=True)
class PreTokenizer:
    """A pre-tokenizer as llama.cpp has it: `expressions` cut a text one after the other."""

    name: str
    expressions: tuple[str, ...]
    ignore_merges: bool
    """True if a piece that is a token stays whole, whatever the merges say."""

    def build(self) -> Any:
        """It, as one of the library `tokenizers`."""
        from tokenizers import Regex, pre_tokenizers

        splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in self.expressions]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def read_pre_tokenizers(source: Path) -> dict[str, PreTokenizer]:
    """By name, those of llama.cpp's `llama-vocab.cpp`; empty where it is missing, or its code has another form."""
    if not source.is_file():
        return {}
    text = source.read_text(encoding="utf-8", errors="replace")
    expressions = _parse_expressions(text)
    pre_tokenizers = {}
    for names, type_name, settings in _iter_branches(text):
        if "escape_whitespaces = true" in settings or "normalizer_opts" in settings:
            continue  # not byte-level, which is the only kind that is compared here
        type_expressions = expressions.get(type_name, expressions.get("default", ()))
        if all(map(_is_readable, type_expressions)):
            pre_tokenizers.update(
                {name: PreTokenizer(name, type_expressions, "ignore_merges = true" in settings) for name in names}
            )
    return pre_tokenizers


def _iter_branches(text: str) -> Iterator[tuple[list[str], str, str]]:
    names: list[str] = []
    type_name, settings = "", ""
    for line in text.splitlines():
        if "tokenizer_pre ==" in line or line.lstrip().startswith("}"):
            if names and type_name:
                yield names, type_name, settings
            if type_name or "tokenizer_pre ==" not in line:
                names, type_name, settings = [], "", ""
            names += _NAME_PATTERN.findall(line)
        elif names:
            type_name = next(iter(_TYPE_PATTERN.findall(line)), type_name)
            settings += line


def _is_readable(expression: str) -> bool:
    """True if it is a regular expression here; a few name sets that llama.cpp's own code fills."""
    from tokenizers import Regex

    try:
        Regex(expression)
    except Exception:  # the library raises no narrower one
        return False
    return True


def _parse_expressions(text: str) -> dict[str, tuple[str, ...]]:
    """The regular expressions of each type of pre-tokenizer; `default` are those of types that are not named."""
    start = text.find("struct llm_tokenizer_bpe")
    switch = text[start : text.find("\n};", start)]
    expressions: dict[str, tuple[str, ...]] = {}
    cases: list[str] = []
    for case, default, block in _CASE_PATTERN.findall(switch):
        if case or default:
            cases.append(case or default)
            continue
        lines = [line for line in block.splitlines() if not line.lstrip().startswith("//")]
        strings = tuple(str(ast.literal_eval(literal)) for literal in _STRING_PATTERN.findall("\n".join(lines)))
        expressions.update(dict.fromkeys(cases, strings))
        cases = []
    return expressions


def probe_texts() -> list[str]:
    """Texts of all kinds: words, numbers, punctuation, white space, and scripts from every part of Unicode."""
    generator = random.Random(0)
    texts = ["".join(generator.choices(_PIECES, k=generator.randint(1, 24))) for _ in range(_RANDOM_TEXTS)]
    for _ in range(_RANDOM_TEXTS):
        ranges = generator.choices(_ALPHABETS, k=3)
        points = [generator.randint(*generator.choice(ranges)) for _ in range(generator.randint(1, 40))]
        texts.append("".join(chr(point) for point in points))
    return [*_PIECES, *texts]


def matching_names(backend: Any, pre_tokenizers: dict[str, PreTokenizer], texts: list[str]) -> list[str]:
    """Names of the known pre-tokenizers that cut every text as the tokenizer `backend` does, those to prefer first;
    none where it is not byte-level BPE, changes the text before it cuts it, or merges in another way."""
    from tokenizers import models

    model = backend.model
    if not isinstance(model, models.BPE) or backend.pre_tokenizer is None or _changes_text(backend, texts):
        return []
    if model.dropout or model.unk_token or model.continuing_subword_prefix or model.end_of_word_suffix:
        return []
    tokenizer_pieces = [backend.pre_tokenizer.pre_tokenize_str(text) for text in texts]
    is_equal: dict[tuple[str, ...], bool] = {}
    names = []
    for name, candidate in pre_tokenizers.items():
        if candidate.expressions not in is_equal:  # many names share their expressions, and a comparison takes a while
            tokenizer = candidate.build()
            is_equal[candidate.expressions] = all(
                [piece for piece, _ in tokenizer.pre_tokenize_str(text)] == [piece for piece, _ in pieces]
                for text, pieces in zip(texts, tokenizer_pieces, strict=True)
            )
        # cut alike, and merged alike: with ignore_merges a piece that is a token as a whole skips the merges
        if is_equal[candidate.expressions] and candidate.ignore_merges == bool(model.ignore_merges):
            names.append(name)
    return sorted(
        names, key=lambda name: (PREFERRED_NAMES.index(name) if name in PREFERRED_NAMES else len(PREFERRED_NAMES), name)
    )


def _changes_text(backend: Any, texts: list[str]) -> bool:
    """True if a normalizer changes texts that are in Unicode's composed form already (NFC changes none of those)."""
    if backend.normalizer is None:
        return False
    import unicodedata

    composed = [unicodedata.normalize("NFC", text) for text in texts]
    return any(backend.normalizer.normalize_str(text) != text for text in composed)
