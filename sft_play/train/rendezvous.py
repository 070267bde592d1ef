"""The store through which ranks meet beside their process group: rank 0 hands the run over, all tell how far they are.

It is the launcher's own (`MASTER_ADDR`, `MASTER_PORT`), so no shared disk is needed.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

TIMEOUT_S = 600
_KEPT: list[Any] = []
"""Rank 0 may be the one that serves the store, as long as somebody holds it."""


def meeting_point(name: str, *, timeout_s: float = TIMEOUT_S) -> Any:
    """A part of the store of its own, over a connection of its own: one that waits does not hold up another."""
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    _KEPT.append(store)
    return dist.PrefixStore(name, store)


def handed_over(text: str | None) -> str:
    """Rank 0's text, on every rank: rank 0 gives it, the others give None and wait for it."""
    mine = meeting_point("sft_play")
    if text is not None:
        mine.set("handed", text)
        return text
    found: bytes = mine.get("handed")
    return found.decode("utf-8")
