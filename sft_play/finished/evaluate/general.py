"""The general sample: short texts and chats about everything, that show what a fine-tuned model has lost.

Written for this project, none of it taken from a dataset: prose, facts, arithmetic, reasoning, code in 17 languages and
formats, data, 26 human languages, instructions and letters; and chats from one question to four turns, with and without
a system prompt. A change of a row is a new version.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.data.masks.render import Renderer
from sft_play.data.masks.token_row import IGNORED
from sft_play.data.sources.formats import Chat
from sft_play.data.sources.raw import BadRow

VERSION = "general-1"
_FOLDER = Path(__file__).parent / "general"


@dataclass(frozen=True)
class Sample:
    """The texts and the chats (messages), each with its kind; `sha256` is that of both files."""

    texts: tuple[tuple[str, str], ...]
    chats: tuple[tuple[str, tuple[dict[str, str], ...]], ...]
    sha256: str


@dataclass(frozen=True)
class GeneralRows:
    """Token rows (`input_ids` and `labels` of shape [T]), each with its kind."""

    rows: list[dict[str, list[int]]]
    kinds: list[str]


def general_sample() -> Sample:
    """The sample that ships with the project."""
    files = {name: (_FOLDER / f"{name}.jsonl").read_bytes() for name in ("text", "chats")}
    lines = {name: [json.loads(line) for line in data.decode("utf-8").splitlines()] for name, data in files.items()}
    return Sample(
        tuple((row["kind"], row["text"]) for row in lines["text"]),
        tuple((row["kind"], tuple(row["messages"])) for row in lines["chats"]),
        hashlib.sha256(files["text"] + files["chats"]).hexdigest(),
    )


def text_rows(sample: Sample, renderer: Renderer, *, longest: int) -> GeneralRows:
    """The texts as tokens, all of them trained, cut after `longest`; the end-of-text token is not part of a text."""
    rows = []
    for ids in renderer.documents([text for _, text in sample.texts]):
        # predicting that a text ends here says nothing about what the model knows
        bare = ids[:-1] if ids[-1] == renderer.parts.end_of_text else ids
        rows.append({"input_ids": bare[:longest], "labels": bare[:longest]})
    return GeneralRows(rows, [kind for kind, _ in sample.texts])


def chat_rows(sample: Sample, renderer: Renderer, *, longest: int) -> tuple[GeneralRows, int]:
    """The chats as tokens by the chat template, the assistant's turns trained, cut after `longest`; and how many the
    template cannot render, or have no trained token within the limit."""
    chats: Sequence[Any] = [
        Chat(f"chat {at} of {VERSION}", messages) for at, (_, messages) in enumerate(sample.chats, start=1)
    ]
    rows, kinds = [], []
    for (kind, _), row in zip(sample.chats, renderer.render_all(chats), strict=True):
        if isinstance(row, BadRow) or not any(label != IGNORED for label in row.labels[1:longest]):
            continue
        rows.append({"input_ids": row.input_ids[:longest], "labels": row.labels[:longest]})
        kinds.append(kind)
    return GeneralRows(rows, kinds), len(chats) - len(rows)
