"""The tokenizer in a GGUF, as llama.cpp reads it, and what its converter is told of the run's.

A GGUF names its pre-tokenizer (`tokenizer.ggml.pre`), of which llama.cpp's converter knows those of
published tokenizers by a checksum. For others the name is proven here: both cut many texts, from
every part of Unicode, into the same pieces. `pre_tokenizers.json` has llama.cpp's own table of them
(its src/llama-vocab.cpp, as of llama-cpp-python 0.3.36): the names, of several the most usual first;
the expressions that cut a text one after the other; and whether a piece that is a token as a whole
skips the merges (`ignore_merges`).
"""

from __future__ import annotations

import functools
import json
import random
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sft_play.errors import ModelError

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

_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"


@functools.cache
def _known_pre_tokenizers() -> list[dict[str, Any]]:
    path = Path(__file__).with_name("pre_tokenizers.json")
    return list(json.loads(path.read_text(encoding="utf-8")))


def _build_pre_tokenizer(entry: Mapping[str, Any]) -> Any:
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in entry["expressions"]]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _probe_texts() -> list[str]:
    """Texts of all kinds: words, numbers, punctuation, white space, and scripts from every part of Unicode."""
    generator = random.Random(0)
    texts = ["".join(generator.choices(_PIECES, k=generator.randint(1, 24))) for _ in range(_RANDOM_TEXTS)]
    for _ in range(_RANDOM_TEXTS):
        alphabets, length = generator.choices(_ALPHABETS, k=3), generator.randint(1, 40)
        texts.append("".join(chr(generator.randint(*generator.choice(alphabets))) for _ in range(length)))
    return [*_PIECES, *texts]


def find_pre_tokenizer(backend: Any) -> str | None:
    """The name by which llama.cpp knows the pre-tokenizer of a `tokenizers` tokenizer. None if it has none that cuts
    like it, or the tokenizer is not byte-level BPE, changes a text first, or merges in another way."""
    from tokenizers import models

    model, texts = backend.model, _probe_texts()
    if not isinstance(model, models.BPE) or backend.pre_tokenizer is None:
        return None
    if model.dropout or model.unk_token or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    if backend.normalizer is not None:
        # llama.cpp does not normalise; of text that is composed already, NFC changes nothing
        composed = [unicodedata.normalize("NFC", text) for text in texts]
        if any(backend.normalizer.normalize_str(text) != text for text in composed):
            return None

    def cut(pre_tokenizer: Any) -> list[list[str]]:
        return [[piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)] for text in texts]

    pieces = cut(backend.pre_tokenizer)
    for entry in _known_pre_tokenizers():
        if entry["ignore_merges"] == bool(model.ignore_merges) and cut(_build_pre_tokenizer(entry)) == pieces:
            return str(entry["names"][0])
    return None


def read_fields(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF by its keys, as plain values; raises ModelError where it is no GGUF."""
    from gguf import GGUFReader

    try:
        return {key: field.contents() for key, field in GGUFReader(str(path)).fields.items()}
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ModelError(f"{path} cannot be read as a GGUF: {error}") from None


class UnreadableTokenizerError(ModelError):
    """The file's tokenizer is of a kind that only llama.cpp itself can read."""


def load_file_tokenizer(file: Path, fields: Mapping[str, Any]) -> Callable[[str], list[int]]:
    """What makes token ids of a rendered prompt by a GGUF's own tokenizer, read by transformers, by llama.cpp's rules:
    special tokens are parsed; a leading BOS of the text is not doubled. `fields`: the file's metadata. Raises
    UnreadableTokenizerError for a kind, or a pre-tokenizer, that is not known here."""
    from tokenizers import normalizers
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, vocabulary, _ = get_gguf_tokenizer(str(file))
    kind, pre = vocabulary["tokenizer_type"], vocabulary.get("pre_tokenizer_type", "default")
    if kind not in ("gpt2", "llama"):
        raise UnreadableTokenizerError(f"the GGUF's tokenizer is a {kind}, which only llama.cpp itself reads")
    backend, _ = convert_gguf_tokenizer(architecture, vocabulary)
    if kind == "gpt2":  # byte-level BPE; transformers cuts by GPT-2's rule where it does not know the name
        known = [entry for entry in _known_pre_tokenizers() if pre in entry["names"]]
        if not known:
            raise UnreadableTokenizerError(f"the GGUF's pre-tokenizer {pre} is not in the table of llama.cpp's")
        backend.pre_tokenizer = _build_pre_tokenizer(known[0])
        backend.model.ignore_merges = known[0]["ignore_merges"]
    else:  # SentencePiece, whose text gets a space before it after every special token too
        prefix = [normalizers.Prepend(_SPACE_MARK)] if vocabulary.get("add_prefix_space", True) else []
        backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE_MARK)])
        backend.pre_tokenizer = None
    bos_id = fields.get("tokenizer.ggml.bos_token_id")
    # a file without the entry: llama.cpp adds BOS to SentencePiece's prompts, and to none of byte-level BPE
    if bos_id is None or not fields.get("tokenizer.ggml.add_bos_token", kind == "llama"):
        return lambda text: list(backend.encode(text, add_special_tokens=False).ids)
    bos = vocabulary["tokens"][bos_id]
    return lambda text: [bos_id, *backend.encode(text.removeprefix(bos), add_special_tokens=False).ids]


def is_sentencepiece(tokenizer: Any) -> bool:
    """True if a fast tokenizer is SentencePiece's BPE: bytes only where a character has no piece."""
    return getattr(tokenizer.backend_tokenizer.model, "byte_fallback", False) is True


def adds_space_prefix(tokenizer: Any) -> bool:
    """True if text gets a space before it, as llama.cpp would put one: after special tokens, with one of which a prompt
    begins, and not only at the beginning."""
    special_token = next(iter(tokenizer.all_special_tokens), "")
    pieces = tokenizer.convert_ids_to_tokens(tokenizer(f"{special_token}a", add_special_tokens=False)["input_ids"])
    return any(piece.startswith(_SPACE_MARK) for piece in pieces[bool(special_token) :])
