"""A SentencePiece vocabulary for llama.cpp's converter, from a tokenizer.json that was made of one.

transformers 5 writes tokenizer.json alone, and many bases publish nothing else. For these tokenizers the converter
reads `tokenizer.model`; without it, it ends in an error, or gives all pieces one score: another tokenizer. What
the file says is in tokenizer.json too: SentencePiece joins the pair with the best score first, and the merges are in
that order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
"""Types of pieces in SentencePiece's own file."""


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
    from sentencepiece import sentencepiece_model_pb2

    model = _model_of(tokenizer)
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(model["merges"]):
        ranks.setdefault("".join(pair) if isinstance(pair, list) else pair.replace(" ", "", 1), rank)
    added = tokenizer.added_tokens_decoder
    file = sentencepiece_model_pb2.ModelProto()
    file.trainer_spec.model_type = sentencepiece_model_pb2.TrainerSpec.BPE
    file.trainer_spec.byte_fallback = True
    file.normalizer_spec.add_dummy_prefix = prefixes_space(tokenizer)
    file.normalizer_spec.remove_extra_whitespaces = False
    for piece, number in sorted(model["vocab"].items(), key=lambda item: item[1]):
        # characters are in no merge, and nothing is joined to become one: behind all that is joined
        entry = file.pieces.add(piece=piece, score=-float(ranks.get(piece, len(ranks) + number)))
        if piece == model.get("unk_token"):
            entry.type = _UNKNOWN
        elif number in added:
            entry.type = _CONTROL if added[number].special else _USER_DEFINED
        elif len(piece) == 6 and piece.startswith("<0x"):
            entry.type = _BYTE
    if not any(entry.type == _UNKNOWN for entry in file.pieces):  # SentencePiece reads no file without one
        file.pieces[0].type = _UNKNOWN
    path.write_bytes(file.SerializeToString())


def _model_of(tokenizer: Any) -> dict[str, Any]:
    model: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    return model if model.get("type") == "BPE" else {}
