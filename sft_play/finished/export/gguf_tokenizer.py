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
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
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

# Types of tokens, in SentencePiece's own file and in a GGUF (`tokenizer.ggml.token_type`).
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
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


class GgufTokenizer:
    """Token ids of texts by a GGUF's own tokenizer, from its metadata `fields` by llama.cpp's rules. Reads byte-level
    BPE (`gpt2`) and SentencePiece (`llama`), raises UnreadableTokenizerError for others, and for a pre-tokenizer that
    is not in the table."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        def entry(name: str, default: Any = None) -> Any:
            return fields.get(f"tokenizer.ggml.{name}", default)

        self.kind, self.pre = str(entry("model")), str(entry("pre", "default"))
        self.tokens: list[str] = list(entry("tokens", []))
        self.ids = {token: token_id for token_id, token in enumerate(self.tokens)}
        token_types = entry("token_type") or [_NORMAL] * len(self.tokens)
        # wherever they occur in a text; the longest first, where one begins with another
        special_tokens = [
            token
            for token, token_type in zip(self.tokens, token_types, strict=True)
            if token and token_type in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
        special_tokens.sort(key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, special_tokens)) or r"(?!)")
        self.bos_id: int | None = entry("bos_token_id")
        # a file without the entry: llama.cpp adds BOS to SentencePiece's prompts, and to none of byte-level BPE
        self.add_bos = bool(entry("add_bos_token", self.kind == "llama"))
        self.stop_ids = {entry(f"{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
        if self.kind == "gpt2":
            self._encode_text = self._byte_level_encoder(entry("merges", []))
        elif self.kind == "llama":
            pieces = zip(self.tokens, entry("scores", []), token_types, strict=True)
            self._encode_text = _sentencepiece_encoder(pieces, prefix=" " if entry("add_space_prefix", True) else "")
        else:
            raise UnreadableTokenizerError(f"the GGUF's tokenizer is a {self.kind}, which only llama.cpp itself reads")

    def _byte_level_encoder(self, merges: list[str]) -> Callable[[str], list[int]]:
        from tokenizers import Tokenizer, models

        known = next((entry for entry in _known_pre_tokenizers() if self.pre in entry["names"]), None)
        if known is None:
            raise UnreadableTokenizerError(f"the GGUF's pre-tokenizer {self.pre} is not in the table of llama.cpp's")
        pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
        backend = Tokenizer(models.BPE(vocab=self.ids, merges=pairs, ignore_merges=known["ignore_merges"]))
        backend.pre_tokenizer = _build_pre_tokenizer(known)
        return lambda text: list(backend.encode(text, add_special_tokens=False).ids)

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered prompt: special tokens are parsed; a leading BOS of the text is not doubled, which is what
        llama.cpp does with the text of a chat template."""
        ids: list[int] = []
        if self.add_bos and self.bos_id is not None:
            ids.append(self.bos_id)
            text = text.removeprefix(self.tokens[self.bos_id])
        position = 0
        for match in self._special_pattern.finditer(text):
            if match.start() > position:
                ids += self._encode_text(text[position : match.start()])
            ids.append(self.ids[match[0]])
            position = match.end()
        return ids + self._encode_text(text[position:]) if position < len(text) else ids


def _sentencepiece_encoder(pieces: Iterable[tuple[str, float, int]], *, prefix: str) -> Callable[[str], list[int]]:
    """`pieces`: texts with scores and types. `prefix` is put before every text between special tokens, as llama.cpp
    does it."""
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    model.trainer_spec.model_type = sentencepiece_model_pb2.TrainerSpec.BPE
    model.normalizer_spec.add_dummy_prefix = model.normalizer_spec.remove_extra_whitespaces = False
    for piece, score, piece_type in pieces:
        model.pieces.add(piece=piece, score=score, type=piece_type)
    types = {piece.type for piece in model.pieces}
    model.trainer_spec.byte_fallback = _BYTE in types
    if _UNKNOWN not in types:  # SentencePiece reads no file without one
        model.pieces[0].type = _UNKNOWN
    try:
        processor = SentencePieceProcessor(model_proto=model.SerializeToString())
    except RuntimeError as error:
        raise UnreadableTokenizerError(f"SentencePiece does not read the GGUF's tokenizer: {error}") from None
    return lambda text: list(processor.encode(prefix + text))


def is_sentencepiece(tokenizer: Any) -> bool:
    """True if a fast tokenizer is SentencePiece's BPE: bytes only where a character has no piece."""
    return getattr(tokenizer.backend_tokenizer.model, "byte_fallback", False) is True


def adds_space_prefix(tokenizer: Any) -> bool:
    """True if text gets a space before it, as llama.cpp would put one: after special tokens, with one of which a prompt
    begins, and not only at the beginning."""
    special_token = next(iter(tokenizer.all_special_tokens), "")
    pieces = tokenizer.convert_ids_to_tokens(tokenizer(f"{special_token}a", add_special_tokens=False)["input_ids"])
    return any(piece.startswith(_SPACE_MARK) for piece in pieces[bool(special_token) :])
