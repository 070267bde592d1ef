"""How far two models are from each other: their next-token distributions at the trained places of the same rows.

Shape letters: T tokens of a row, P its trained places, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sft_play.finished.load import evenly_spaced

PLACES = 64
"""Trained places of a row that are compared: with a vocabulary of 150,000 they are 40 MB in fp32."""

Scored = tuple[torch.Tensor, torch.Tensor]
"""Log-probabilities of every token at the trained places of a row ([P, V], fp32, in RAM) and the next tokens ([P])."""


def spaced(rows: Any, count: int) -> list[dict[str, list[int]]]:
    """At most `count` rows, evenly spaced."""
    return [rows[index] for index in evenly_spaced(len(rows), count)]


@torch.no_grad()
def log_probs(model: Any, rows: Sequence[dict[str, list[int]]]) -> list[Scored]:
    """Of each row, what the model expects at its first `PLACES` trained places."""
    scored = []
    for row in rows:
        ids_BT = torch.tensor([row["input_ids"]], device=model.device)
        labels_T = torch.tensor(row["labels"])[1:]
        places = torch.nonzero(labels_T >= 0).flatten()[:PLACES]
        logits_PV = model(input_ids=ids_BT, use_cache=False).logits[0, places.to(model.device)]
        scored.append((torch.log_softmax(logits_PV.float(), dim=-1).cpu(), labels_T[places]))
    return scored


def compared(one: Sequence[Scored], other: Sequence[Scored]) -> tuple[float, float, float]:
    """Mean KL(one ‖ other) over places, the share of them with the same likeliest token, and the largest difference of
    the log-probability of a token that comes."""
    divergences, same, largest = [], [], 0.0
    for (first_PV, tokens_P), (second_PV, _) in zip(one, other, strict=True):
        if not len(tokens_P):
            continue
        width = min(first_PV.shape[1], second_PV.shape[1])
        if first_PV.shape[1] != second_PV.shape[1]:  # one lacks rows that are no token's
            first_PV, second_PV = (one_PV[:, :width].log_softmax(-1) for one_PV in (first_PV, second_PV))
        divergences.append((first_PV.exp() * (first_PV - second_PV)).sum(-1))
        same.append(first_PV.argmax(-1) == second_PV.argmax(-1))
        places = torch.arange(len(tokens_P))
        largest = max(largest, float((first_PV[places, tokens_P] - second_PV[places, tokens_P]).abs().max()))
    # of equal models fp32 sums to about -1e-9; what is not a number stays so: max() keeps its first argument then
    divergence = max(float(torch.cat(divergences).double().mean()), 0.0)
    return divergence, float(torch.cat(same).double().mean()), largest


def loss(scored: Sequence[Scored]) -> float:
    """Mean loss over the trained places."""
    parts = [-log_PV[torch.arange(len(tokens_P)), tokens_P] for log_PV, tokens_P in scored]
    return float(torch.cat(parts).double().mean())
