"""Stop texts of a request: generation ends at the first, and neither it nor what follows is in the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import StoppingCriteria

_MARGIN_TOKENS = 16
"""Tokens beyond the stop text's bytes that are decoded too: special ones have no text, parts of a character neither."""


def until_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the stop text that is complete first; all of it where there is none.

    Not the one that begins first: of two that overlap, the answer ends before the longer one could be complete, and
    where it is cut must not depend on how the text is divided into tokens.
    """
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(found)[1]] if found else text


class UntilStop:
    """Pieces of a streamed text, up to the first stop text; what may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held, self._is_over = stops, "", False

    def feed(self, piece: str) -> str:
        """What can be shown once this piece has come."""
        if self._is_over:
            return ""
        text = self._held + piece
        shown = until_stop(text, self._stops)
        self._is_over = len(shown) < len(text)
        held = 0 if self._is_over else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :] if held else ""
        return shown[: len(shown) - held]

    def end(self) -> str:
        """What was held back, since it was no stop text after all."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The most characters at the end of a text with which a stop text begins."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class StopTexts(StoppingCriteria):
    """Ends generation once the text after the prompt holds a stop text.

    transformers' own `stop_strings` compares each with every entry of the vocabulary first, which takes seconds for a
    few and minutes for many, and takes the prompt's end for the beginning of one.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], *, prompt_tokens: int) -> None:
        self._tokenizer, self._stops, self._begin = tokenizer, stops, prompt_tokens
        self._window = max(len(stop.encode()) for stop in stops) + _MARGIN_TOKENS

    def __call__(self, input_ids: torch.Tensor, scores: Any = None, **_: Any) -> torch.Tensor:
        tail = input_ids[:, max(self._begin, input_ids.shape[-1] - self._window) :]
        texts = self._tokenizer.batch_decode(tail, skip_special_tokens=True)
        found = [any(stop in text for stop in self._stops) for text in texts]
        return torch.tensor(found, dtype=torch.bool, device=input_ids.device)
