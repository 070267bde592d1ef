"""The store that ranks share beside their process group: rank 0 hands the run over, all publish how far they are.

It is the launcher's own, by torch's rendezvous (`MASTER_ADDR`, `MASTER_PORT`), so no shared disk is needed.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

_TIMEOUT = timedelta(minutes=10)
_PLANNING = timedelta(days=1)
"""The longest wait for rank 0's plan: it counts the tokens of every row first. Where rank 0 ends, the store's
connection or the launcher ends the others."""
_KEPT: list[Any] = []
"""Rank 0 may be the one that serves the store: it must not be garbage-collected while others use it."""


def meeting_point(name: str) -> Any:
    """A namespace of the store over a connection of its own: one that waits does not block another."""
    store, _, _ = next(dist.rendezvous("env://", timeout=_TIMEOUT))
    _KEPT.append(store)
    return dist.PrefixStore(name, store)


def say_gpu(name: str, rank: int) -> None:
    """Tell rank 0 which GPU this rank has."""
    meeting_point("sft_play_gpus").set(str(rank), name)


def gpus_of_all(world: int) -> list[str]:
    """What every rank says of its GPU, in their order: waits until all have."""
    store, names = meeting_point("sft_play_gpus"), [str(number) for number in range(world)]
    store.wait(names, _TIMEOUT)
    return [str(store.get(name), "utf-8") for name in names]


def handed_over(text: str | None) -> str:
    """Rank 0's text, on every rank: rank 0 passes it, the others pass None and wait for it."""
    store = meeting_point("sft_play")
    if text is not None:
        store.set("handed", text)
        return text
    store.wait(["handed"], _PLANNING)
    return str(store.get("handed"), "utf-8")
