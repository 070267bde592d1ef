"""What llama.cpp makes of an exported GGUF: the pre-tokenizer that its name stands for, and its
tokenizer by llama.cpp's own rules; whether it is training's.
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.errors import ModelError
from sft_play.finished.export.engine_prompts import EnginePrompts, PairedPrompt

# The pre-tokenizers that llama.cpp knows, read from its own source, and which of them a tokenizer's
# is.
#
# A GGUF names its pre-tokenizer (`tokenizer.ggml.pre`). llama.cpp's converter finds the name by a
# checksum over the tokens of one text, so it knows published tokenizers only. Here the name is
# proven instead: both cut many texts, from every part of Unicode, into the same pieces.

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


# --------------------------------------------------------------------------------------------------
# The tokenizer inside a GGUF, as llama.cpp reads it, from the file's own entries by llama.cpp's own
# rules; whether it is training's; and the vocabulary that the converter is given.
#
# Two kinds are read: byte-level BPE (`gpt2`), whose pre-tokenizer llama.cpp's source names, and
# SentencePiece (`llama`).

# Types of tokens, in SentencePiece's own file and in a GGUF (`tokenizer.ggml.token_type`).
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6

_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"


class UnreadableTokenizerError(ModelError):
    """The file's tokenizer is of a kind that only llama.cpp itself can read."""


class GgufTokenizer:
    """Token ids of texts by a GGUF's own tokenizer. `fields`: the file's metadata. `pre_tokenizers`: those of
    llama.cpp. Raises UnreadableTokenizer where its kind or its pre-tokenizer is not known here."""

    def __init__(self, fields: Mapping[str, Any], pre_tokenizers: Mapping[str, PreTokenizer]) -> None:
        def entry(name: str, default: Any = None) -> Any:
            return fields.get(f"tokenizer.ggml.{name}", default)

        self.kind = str(entry("model"))
        self.pre = str(entry("pre", "default"))
        self.tokens: list[str] = list(entry("tokens", []))
        self.ids = {token: token_id for token_id, token in enumerate(self.tokens)}
        """Id by token; of a token that is listed twice the last id."""
        token_types = entry("token_type") or [1] * len(self.tokens)
        special_types = (_UNKNOWN, _CONTROL, _USER_DEFINED)  # wherever they occur in a text
        special_tokens = [
            token
            for token, token_type in zip(self.tokens, token_types, strict=True)
            if token_type in special_types and token
        ]
        # the longest first, where one special token begins with another
        self._special_pattern = re.compile(
            "|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True))) or r"(?!)"
        )
        self.bos_id: int | None = entry("bos_token_id")
        # a file without the entry: llama.cpp adds BOS to SentencePiece's prompts, and to none of byte-level BPE
        self.add_bos = bool(entry("add_bos_token", self.kind == "llama"))
        self.stop_ids = {entry(f"{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
        if self.kind == "gpt2":
            self._encoder = self._byte_level_encoder(entry("merges", []), pre_tokenizers)
        elif self.kind == "llama":
            self._adds_space_prefix = bool(entry("add_space_prefix", True))
            self._encoder = self._sentencepiece_encoder(entry("scores", []), token_types)
        else:
            raise UnreadableTokenizerError(f"the GGUF's tokenizer is a {self.kind}, which only llama.cpp itself reads")

    def _sentencepiece_encoder(self, scores: list[float], token_types: list[int]) -> Callable[[str], list[int]]:
        from sentencepiece import SentencePieceProcessor

        model = _sentencepiece_model(zip(self.tokens, scores, token_types, strict=True), adds_space_prefix=False)
        try:
            processor = SentencePieceProcessor(model_proto=model.SerializeToString())
        except RuntimeError as error:
            raise UnreadableTokenizerError(f"SentencePiece does not read the GGUF's tokenizer: {error}") from None
        prefix = " " if self._adds_space_prefix else ""  # after every special token too
        return lambda text: list(processor.encode(prefix + text))

    def _byte_level_encoder(
        self, merges: list[str], pre_tokenizers: Mapping[str, PreTokenizer]
    ) -> Callable[[str], list[int]]:
        from tokenizers import Tokenizer, models

        if self.pre not in pre_tokenizers:
            raise UnreadableTokenizerError(f"the GGUF's pre-tokenizer {self.pre} is not in this llama.cpp's own table")
        pairs = [tuple(merge.split(" ")) for merge in merges]
        backend = Tokenizer(
            models.BPE(
                vocab=self.ids,
                merges=[(pair[0], pair[1]) for pair in pairs if len(pair) == 2],
                ignore_merges=pre_tokenizers[self.pre].ignore_merges,
            )
        )
        backend.pre_tokenizer = pre_tokenizers[self.pre].build()
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
            ids += [*self._encode_text(text[position : match.start()]), self.ids[match[0]]]
            position = match.end()
        return [*ids, *self._encode_text(text[position:])]

    def _encode_text(self, text: str) -> list[int]:
        return self._encoder(text) if text else []


@dataclass(frozen=True)
class ExportCheck:
    """One comparison: `ok` None where it could not be made."""

    name: str
    ok: bool | None
    reason: str


def file_checks(
    fields: Mapping[str, Any],
    pre_tokenizers: Mapping[str, PreTokenizer],
    prompts: EnginePrompts,
    paired_prompts: Sequence[PairedPrompt],
) -> list[ExportCheck]:
    """The comparisons of a GGUF, by its metadata, with training, on `paired_prompts`. `pre_tokenizers`: those
    of llama.cpp. Of a tokenizer that only llama.cpp itself reads, and without prompts, `ok` is None."""
    checks = []
    if prompts.template is not None:
        is_equal = fields.get("tokenizer.chat_template") == prompts.template
        reason = "the chat template trained with" if is_equal else "another chat template than the one trained with"
        checks.append(ExportCheck("Template", is_equal, f"the file has {reason}"))
    try:
        file_tokenizer = GgufTokenizer(fields, pre_tokenizers)
    except UnreadableTokenizerError as error:
        return [*checks, ExportCheck("Tokenizer", None, str(error))]
    equal_count = sum(
        pair.rendered is not None and file_tokenizer.encode(pair.text) == pair.ids for pair in paired_prompts
    )
    reason = (
        f"{equal_count} of {len(paired_prompts)} prompts have training's token ids by the file's own "
        f"({file_tokenizer.kind}, {file_tokenizer.pre})"
    )
    checks.append(ExportCheck("Tokenizer", equal_count == len(paired_prompts) if paired_prompts else None, reason))
    missing_stops = prompts.tokenizer.convert_ids_to_tokens(sorted(set(prompts.stop_ids) - file_tokenizer.stop_ids))
    reason = (
        f"the file does not end at {', '.join(missing_stops)}"
        if missing_stops
        else "the file ends answers at training's stop tokens"
    )
    return [*checks, ExportCheck("Stop tokens", not missing_stops, reason)]


def read_fields(path: Any) -> dict[str, Any]:
    """The metadata of a GGUF by its keys, as plain values; raises ModelError where it is no GGUF."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(path))
        return {key: field.contents() for key, field in reader.fields.items()}
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ModelError(f"{path} cannot be read as a GGUF: {error}") from None


# --- a vocabulary for the converter -----------------------------------------------------------------------------------
#
# transformers 5 writes tokenizer.json alone, and many bases publish nothing else. Of a SentencePiece tokenizer the
# converter reads `tokenizer.model`; without it, it ends in an error, or gives all pieces one score: another tokenizer.
# What that file says is in tokenizer.json too: SentencePiece joins the pair with the best score first, and the merges
# are in that order.
def is_sentencepiece(tokenizer: Any) -> bool:
    """True if a fast tokenizer is SentencePiece's BPE: bytes only where a character has no piece."""
    return _bpe_model(tokenizer).get("byte_fallback") is True


def adds_space_prefix(tokenizer: Any) -> bool:
    """True if text gets a space before it, as llama.cpp would put one: after special tokens, with one of which a prompt
    begins, and not only at the beginning."""
    special_token = next(iter(tokenizer.all_special_tokens), "")
    pieces = tokenizer.convert_ids_to_tokens(tokenizer(f"{special_token}a", add_special_tokens=False)["input_ids"])
    return any(piece.startswith(_SPACE_MARK) for piece in pieces[1 if special_token else 0 :])


def write_sentencepiece_model(tokenizer: Any, path: Path) -> None:
    """Write the vocabulary of a SentencePiece tokenizer in SentencePiece's own format."""
    model = _bpe_model(tokenizer)
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(model["merges"]):
        ranks.setdefault("".join(pair) if isinstance(pair, list) else pair.replace(" ", "", 1), rank)
    added_tokens = tokenizer.added_tokens_decoder

    def piece_type(piece: str, token_id: int) -> int:
        if piece == model.get("unk_token"):
            return _UNKNOWN
        if token_id in added_tokens:
            return _CONTROL if added_tokens[token_id].special else _USER_DEFINED
        return _BYTE if len(piece) == 6 and piece.startswith("<0x") else _NORMAL

    # characters are in no merge, and nothing is joined to become one: behind all that is joined
    entries = [
        (piece, -float(ranks.get(piece, len(ranks) + token_id)), piece_type(piece, token_id))
        for piece, token_id in sorted(model["vocab"].items(), key=lambda item: item[1])
    ]
    path.write_bytes(_sentencepiece_model(entries, adds_space_prefix=adds_space_prefix(tokenizer)).SerializeToString())


def _sentencepiece_model(entries: Iterable[tuple[str, float, int]], *, adds_space_prefix: bool) -> Any:
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    model.trainer_spec.model_type = sentencepiece_model_pb2.TrainerSpec.BPE
    model.normalizer_spec.add_dummy_prefix = adds_space_prefix
    model.normalizer_spec.remove_extra_whitespaces = False
    for piece, score, piece_type in entries:
        model.pieces.add(piece=piece, score=score, type=piece_type)
    model.trainer_spec.byte_fallback = any(entry.type == _BYTE for entry in model.pieces)
    if not any(entry.type == _UNKNOWN for entry in model.pieces):  # SentencePiece reads no file without one
        model.pieces[0].type = _UNKNOWN
    return model


def _bpe_model(tokenizer: Any) -> dict[str, Any]:
    model: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    return model if model.get("type") == "BPE" else {}
