"""Whether a GGUF's own chat template, tokenizer and stop tokens are those of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sft_play.finished.export.gguf_tokenizer import GgufTokenizer, UnreadableTokenizer
from sft_play.finished.export.pre_tokenizers import PreTokenizer
from sft_play.finished.export.prompts import PairedPrompt, Prompts


@dataclass(frozen=True)
class ExportCheck:
    """One comparison: `ok` None where it could not be made."""

    name: str
    ok: bool | None
    words: str


def file_checks(
    fields: Mapping[str, Any], known: Mapping[str, PreTokenizer], prompts: Prompts, asked: Sequence[PairedPrompt]
) -> list[ExportCheck]:
    """The comparisons of a GGUF, by its metadata, with training, on the prompts `asked`.

    `known`: llama.cpp's pre-tokenizers. Of a tokenizer that only llama.cpp itself reads `ok` is None.
    """
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
    checks.append(ExportCheck("Tokenizer", same == len(asked) > 0, words))
    lost = prompts.tokenizer.convert_ids_to_tokens(sorted(set(prompts.stops) - own.stop_ids))
    words = f"the file does not end at {', '.join(lost)}" if lost else "the file ends answers at training's stop tokens"
    return [*checks, ExportCheck("Stop tokens", not lost, words)]
