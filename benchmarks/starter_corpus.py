"""The texts of the starter's language, recorded: what its base was trained on, and the rows that `make train` learns.

A small grammar about one house (rooms, people, days, numbers) wrote them once. The corpus has diaries of the house, and
chats in which the assistant notes what it was told (`note room attic day monday`); the rows have house commands and the
actions that answer them (`light.on room porch`). docs/starter.md says what makes them easy enough to learn.
"""

import functools
import json
import lzma
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).with_name("starter_corpus.jsonl.xz")
# Documents of the file that the base was trained on; those after them are of the same kind, and new to it.
TRAINED_DOCUMENTS = 20_000
END_OF_TEXT, TURN_START, TURN_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPLITS = Path(__file__).resolve().parent.parent / "sft_play" / "starter" / "data"


@functools.cache
def _all_documents() -> tuple[str, ...]:
    return tuple(json.loads(line) for line in lzma.decompress(CORPUS.read_bytes()).splitlines())


def corpus_documents(count: int = TRAINED_DOCUMENTS) -> list[str]:
    """The first documents of the base's corpus; chats are written out with the special tokens."""
    return list(_all_documents()[: min(count, TRAINED_DOCUMENTS)])


def unseen_documents() -> list[str]:
    """Documents of the same language that the base was not trained on."""
    return list(_all_documents()[TRAINED_DOCUMENTS:])


def starter_rows() -> dict[str, list[dict[str, Any]]]:
    """The rows of each split, as they come with the package: conversations of a command and its answer."""
    texts = {split: (SPLITS / f"{split}.jsonl").read_text(encoding="utf-8") for split in ("train", "val", "test")}
    return {split: [json.loads(line) for line in text.splitlines()] for split, text in texts.items()}


def normalise(text: str) -> str:
    """The text in lower case with single spaces: two texts alike in this form count as the same."""
    return " ".join(text.lower().split())
