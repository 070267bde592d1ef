"""A GGUF run by llama.cpp itself, through llama-cpp-python where that is installed.

Shape letters: T tokens, V the vocabulary.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sft_play.finished.evaluate.divergence import PLACES, Scored


def is_installed() -> bool:
    """Whether llama-cpp-python can be imported here."""
    return importlib.util.find_spec("llama_cpp") is not None


class LlamaCppModel:
    """A GGUF with room for `context` tokens; greedy, one prompt at a time."""

    def __init__(self, file: Path, *, context: int) -> None:
        from llama_cpp import Llama

        # logits_all: without it the scores of a prompt's own tokens are not kept
        self._llama: Any = Llama(model_path=str(file), n_ctx=context, n_batch=512, logits_all=True, verbose=False)
        self._adds_bos = self._llama.metadata.get("tokenizer.ggml.add_bos_token") == "true"

    def prompt_ids(self, text: str) -> list[int]:
        """Ids of a chat template's text, as llama.cpp's server makes them: a BOS is not doubled."""
        if self._adds_bos:
            bos = self._llama.detokenize([self._llama.token_bos()], special=True).decode("utf-8", "replace")
            text = text.removeprefix(bos)
        return list(self._llama.tokenize(text.encode(), add_bos=True, special=True))

    def answer(self, prompt: Sequence[int], *, stop: Sequence[int], max_new_tokens: int) -> tuple[int, ...]:
        """Greedy tokens after a prompt, up to one that ends an answer."""
        self._llama.reset()
        self._llama.eval(list(prompt))
        given: list[int] = []
        while len(given) < max_new_tokens and self._llama.n_tokens < self._llama.n_ctx():
            given.append(int(self._llama.scores[self._llama.n_tokens - 1].argmax()))
            if given[-1] in stop:
                break
            self._llama.eval([given[-1]])
        return tuple(given)

    def log_probs(self, rows: Sequence[dict[str, list[int]]]) -> list[Scored]:
        """As `divergence.log_probs`."""
        scored = []
        for row in rows:
            self._llama.reset()
            self._llama.eval(list(row["input_ids"]))
            labels_T = torch.tensor(row["labels"])[1:]
            places = torch.nonzero(labels_T >= 0).flatten()[:PLACES]
            # a copy: the next row is evaluated into the same array
            logits_TV = torch.from_numpy(self._llama.scores[: self._llama.n_tokens].copy())
            scored.append((torch.log_softmax(logits_TV[places].float(), dim=-1), labels_T[places]))
        return scored
