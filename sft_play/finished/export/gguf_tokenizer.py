"""The tokenizer inside a GGUF, as llama.cpp reads it, from the file's own entries by llama.cpp's own rules; whether it
is training's; and the vocabulary that the converter is given.

Two kinds are read: byte-level BPE (`gpt2`), whose pre-tokenizer llama.cpp's source names, and SentencePiece (`llama`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.errors import ModelError
from sft_play.finished.export.pre_tokenizers import PreTokenizer
from sft_play.finished.export.prompts import PairedPrompt, Prompts

# Types of tokens, in SentencePiece's own file and in a GGUF (`tokenizer.ggml.token_type`).
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class UnreadableTokenizer(ModelError):
    """The file's tokenizer is of a kind that only llama.cpp itself can read."""


class GgufTokenizer:
    """Token ids of texts by a GGUF's own tokenizer. `fields`: the file's metadata. `known`: llama.cpp's pre-tokenizers.
    Raises UnreadableTokenizer where its kind or its pre-tokenizer is not known here."""

    def __init__(self, fields: Mapping[str, Any], known: Mapping[str, PreTokenizer]) -> None:
        def entry(name: str, default: Any = None) -> Any:
            return fields.get(f"tokenizer.ggml.{name}", default)

        self.kind = str(entry("model"))
        self.pre = str(entry("pre", "default"))
        self.tokens: list[str] = list(entry("tokens", []))
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        """Of tokens that are written twice, the last one."""
        types = entry("token_type") or [1] * len(self.tokens)
        whole = (_UNKNOWN, _CONTROL, _USER_DEFINED)  # wherever they occur in a text
        special = [token for token, kind in zip(self.tokens, types, strict=True) if kind in whole and token]
        # the longest first, where one special token begins with another
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
        self.bos_id: int | None = entry("bos_token_id")
        # a file without the entry: llama.cpp adds BOS to SentencePiece's prompts, and to none of byte-level BPE
        self.add_bos = bool(entry("add_bos_token", self.kind == "llama"))
        self.stop_ids = {entry(f"{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
        if self.kind == "gpt2":
            self._encode_plain = self._byte_level(entry("merges", []), known)
        elif self.kind == "llama":
            self._prefixes_space = bool(entry("add_space_prefix", True))
            self._encode_plain = self._sentence_pieces(entry("scores", []), types)
        else:
            raise UnreadableTokenizer(f"the GGUF's tokenizer is a {self.kind}, which only llama.cpp itself reads")

    def _sentence_pieces(self, scores: list[float], types: list[int]) -> Callable[[str], list[int]]:
        from sentencepiece import SentencePieceProcessor

        file = _sentencepiece_file(zip(self.tokens, scores, types, strict=True), prefixes_space=False)
        try:
            pieces = SentencePieceProcessor(model_proto=file.SerializeToString())
        except RuntimeError as error:
            raise UnreadableTokenizer(f"SentencePiece does not read the GGUF's tokenizer: {error}") from None
        prefix = " " if self._prefixes_space else ""  # after every special token too
        return lambda text: list(pieces.encode(prefix + text))

    def _byte_level(self, merges: list[str], known: Mapping[str, PreTokenizer]) -> Callable[[str], list[int]]:
        from tokenizers import Tokenizer, models

        if self.pre not in known:
            raise UnreadableTokenizer(f"the GGUF's pre-tokenizer {self.pre} is not in this llama.cpp's own table")
        pairs = [tuple(merge.split(" ")) for merge in merges]
        backend = Tokenizer(
            models.BPE(
                vocab=self.ids,
                merges=[(pair[0], pair[1]) for pair in pairs if len(pair) == 2],
                ignore_merges=known[self.pre].ignore_merges,
            )
        )
        backend.pre_tokenizer = known[self.pre].built()
        return lambda text: list(backend.encode(text, add_special_tokens=False).ids)

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered prompt: special tokens are parsed; a leading BOS of the text is not doubled, which is what
        llama.cpp does with the text of a chat template."""
        ids: list[int] = []
        if self.add_bos and self.bos_id is not None:
            ids.append(self.bos_id)
            text = text.removeprefix(self.tokens[self.bos_id])
        position = 0
        for match in self._special.finditer(text):
            ids += [*self._plain(text[position : match.start()]), self.ids[match[0]]]
            position = match.end()
        return [*ids, *self._plain(text[position:])]

    def _plain(self, text: str) -> list[int]:
        return self._encode_plain(text) if text else []


@dataclass(frozen=True)
class ExportCheck:
    """One comparison: `ok` None where it could not be made."""

    name: str
    ok: bool | None
    reason: str


def file_checks(
    fields: Mapping[str, Any], known: Mapping[str, PreTokenizer], prompts: Prompts, asked: Sequence[PairedPrompt]
) -> list[ExportCheck]:
    """The comparisons of a GGUF, by its metadata, with training, on the prompts `asked`. `known`: llama.cpp's
    pre-tokenizers. Of a tokenizer that only llama.cpp itself reads, and without prompts, `ok` is None."""
    checks = []
    if prompts.template is not None:
        is_own = fields.get("tokenizer.chat_template") == prompts.template
        words = "the chat template trained with" if is_own else "another chat template than the one trained with"
        checks.append(ExportCheck("Template", is_own, f"the file has {words}"))
    try:
        own = GgufTokenizer(fields, known)
    except UnreadableTokenizer as error:
        return [*checks, ExportCheck("Tokenizer", None, str(error))]
    same = sum(one.rendered is not None and own.encode(one.text) == one.ids for one in asked)
    words = f"{same} of {len(asked)} prompts have training's token ids by the file's own ({own.kind}, {own.pre})"
    checks.append(ExportCheck("Tokenizer", same == len(asked) if asked else None, words))
    lost = prompts.tokenizer.convert_ids_to_tokens(sorted(set(prompts.stops) - own.stop_ids))
    words = f"the file does not end at {', '.join(lost)}" if lost else "the file ends answers at training's stop tokens"
    return [*checks, ExportCheck("Stop tokens", not lost, words)]


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
    """Whether a fast tokenizer is SentencePiece's BPE: bytes only where a character has no piece."""
    return _model_of(tokenizer).get("byte_fallback") is True


def prefixes_space(tokenizer: Any) -> bool:
    """Whether text gets a space before it, as llama.cpp would put one: after special tokens, with one of which a prompt
    begins, and not only at the beginning."""
    first = next(iter(tokenizer.all_special_tokens), "")
    pieces = tokenizer.convert_ids_to_tokens(tokenizer(f"{first}a", add_special_tokens=False)["input_ids"])
    return any(piece.startswith(_SPACE) for piece in pieces[1 if first else 0 :])


def write_pieces(tokenizer: Any, path: Path) -> None:
    """Write the vocabulary of a SentencePiece tokenizer in SentencePiece's own format."""
    model = _model_of(tokenizer)
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(model["merges"]):
        ranks.setdefault("".join(pair) if isinstance(pair, list) else pair.replace(" ", "", 1), rank)
    added = tokenizer.added_tokens_decoder

    def kind_of(piece: str, number: int) -> int:
        if piece == model.get("unk_token"):
            return _UNKNOWN
        if number in added:
            return _CONTROL if added[number].special else _USER_DEFINED
        return _BYTE if len(piece) == 6 and piece.startswith("<0x") else _NORMAL

    # characters are in no merge, and nothing is joined to become one: behind all that is joined
    entries = [
        (piece, -float(ranks.get(piece, len(ranks) + number)), kind_of(piece, number))
        for piece, number in sorted(model["vocab"].items(), key=lambda item: item[1])
    ]
    path.write_bytes(_sentencepiece_file(entries, prefixes_space=prefixes_space(tokenizer)).SerializeToString())


def _sentencepiece_file(entries: Iterable[tuple[str, float, int]], *, prefixes_space: bool) -> Any:
    from sentencepiece import sentencepiece_model_pb2

    file = sentencepiece_model_pb2.ModelProto()
    file.trainer_spec.model_type = sentencepiece_model_pb2.TrainerSpec.BPE
    file.normalizer_spec.add_dummy_prefix = prefixes_space
    file.normalizer_spec.remove_extra_whitespaces = False
    for piece, score, kind in entries:
        file.pieces.add(piece=piece, score=score, type=kind)
    file.trainer_spec.byte_fallback = any(entry.type == _BYTE for entry in file.pieces)
    if not any(entry.type == _UNKNOWN for entry in file.pieces):  # SentencePiece reads no file without one
        file.pieces[0].type = _UNKNOWN
    return file


def _model_of(tokenizer: Any) -> dict[str, Any]:
    model: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    return model if model.get("type") == "BPE" else {}
