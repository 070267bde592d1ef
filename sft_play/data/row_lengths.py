"""How many tokens rows have, by the model's tokenizer where it is on this disk: `make process` reports it.

The chat template's own tokens are not counted: processing needs no model, and its rows may be trained with any.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sft_play.config.schema import RunConfig
from sft_play.data.build.size import CHARACTERS_PER_TOKEN
from sft_play.data.process_report import LENGTH_EDGES, SplitReport
from sft_play.data.sources.formats import Example, Text
from sft_play.data.sources.messages import TEXT_KEYS
from sft_play.data.sources.raw import piece_end
from sft_play.log import one_line

logger = logging.getLogger(__name__)

COUNTED_ROWS = 20_000
"""The first rows, whose tokens are all counted; of the others every tenth, chosen by content, stands for ten."""
_ONE_IN = 10
_BATCH = 500
_BATCH_CHARS = 256 << 10
"""Texts whose tokens are counted together: this many, or this many characters; a longer text is counted in pieces."""

TokenCounter = Callable[[list[str]], list[int]]
"""Texts → the number of tokens of each."""


def _texts_of(example: Example) -> str:
    """Everything of an example that becomes tokens, the template's own left out."""
    if isinstance(example, Text):
        return example.text
    parts = [json.dumps(example.tools, ensure_ascii=False)] if example.tools else []
    for message in example.messages:
        parts += [str(message[key]) for key in TEXT_KEYS if message.get(key)]
        if message.get("tool_calls"):
            parts.append(json.dumps(message["tool_calls"], ensure_ascii=False))
    return "\n".join(parts)


class RowLengths:
    """Tokens of rows, counted in batches; after `COUNTED_ROWS` only those of a tenth, chosen by content."""

    def __init__(self, counter: TokenCounter, max_seq_len: int) -> None:
        self._counter, self._max_seq_len = counter, max_seq_len
        self._rows = 0
        self._waiting: list[tuple[str, float, SplitReport]] = []
        self._chars = 0

    def add(self, example: Example, digest: bytes, counts: SplitReport) -> None:
        """Note a row's length."""
        self._rows += 1
        weight = 1.0
        if self._rows > COUNTED_ROWS:
            if digest[8] % _ONE_IN:  # the bytes before it decide the split
                return
            weight = 256 / len(range(0, 256, _ONE_IN))  # 26 of 256 bytes pass: not quite one in ten
        text = _texts_of(example)
        self._waiting.append((text, weight, counts))
        self._chars += len(text)
        if len(self._waiting) >= _BATCH or self._chars >= _BATCH_CHARS:
            self.flush()

    def flush(self) -> None:
        """Count the texts that wait."""
        sizes = self._counts([text for text, _, _ in self._waiting])
        for tokens, (_, weight, counts) in zip(sizes, self._waiting, strict=True):
            index = next((at for at, edge in enumerate(LENGTH_EDGES) if tokens <= edge), len(LENGTH_EDGES))
            counts.lengths[index] += weight
            counts.counted += weight
            counts.tokens += weight * tokens
            counts.over += weight * (tokens > self._max_seq_len)
            counts.longest = max(counts.longest, tokens)
        self._waiting, self._chars = [], 0

    def _counts(self, texts: list[str]) -> list[int]:
        """The tokens of each text; a long one is counted in pieces."""
        counts: list[int] = []
        short: list[str] = []
        for text in texts:
            if len(text) <= 2 * _BATCH_CHARS:
                short.append(text)
                continue
            counts += self._counter(short) if short else []
            short = []
            tokens = 0
            while len(text) > 2 * _BATCH_CHARS:
                cut = piece_end(text, _BATCH_CHARS)
                tokens += self._counter([text[:cut]])[0]
                text = text[cut:]
            counts.append(tokens + self._counter([text])[0])
        return counts + (self._counter(short) if short else [])


def token_counter(config: RunConfig) -> tuple[TokenCounter, str]:
    """What counts tokens, and its name: the model's tokenizer where it is on this disk, else an estimate."""
    tokenizer = _local_tokenizer(config)

    def count(texts: list[str]) -> list[int]:
        if tokenizer is None:
            return [round(len(text) / CHARACTERS_PER_TOKEN) for text in texts]
        # verbose=False: transformers would warn of texts that are longer than the model's positions
        return [len(ids) for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]]

    if tokenizer is None:
        return count, f"lengths are estimated at {CHARACTERS_PER_TOKEN:g} characters per token"
    return count, "counted by the model's tokenizer, without the template's own tokens"


def _local_tokenizer(config: RunConfig) -> Any:
    """The model's tokenizer from its folder or the hub's cache; None where there is none or it cannot be loaded."""
    # Looked for before AutoTokenizer is imported, which takes seconds, and never fetched: processing works offline.
    name, files = config.model.name, ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    folder = Path(name).expanduser()
    if folder.is_dir():
        is_local = any((folder / file).is_file() for file in files)
    else:
        from huggingface_hub import try_to_load_from_cache

        try:
            cached = [try_to_load_from_cache(name, file, revision=config.model.revision) for file in files]
        except ValueError:  # a name that is no hub id
            return None
        is_local = any(isinstance(path, str) for path in cached)
    if not is_local:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(folder) if folder.is_dir() else name,
            revision=config.model.revision,
            local_files_only=True,
            trust_remote_code=False,  # by default transformers asks on the terminal
        )
    except Exception as error:  # each kind of tokenizer fails in its own way on a damaged file
        logger.info("The tokenizer of %s cannot be loaded for lengths: %s", name, one_line(str(error)))
        return None
