"""What clouds ask for an hour of a GPU, on demand, in US dollars: `gpu_prices.json`, by public lists.

Each list has its date and address. Prices change every week, and none of these is an offer: every answer that uses one
shows its date. Only on-demand prices of GPUs in the catalogue are here, no spot prices and no community hosts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path


@dataclass(frozen=True)
class PriceList:
    """A provider's page, the day on which its prices were read, and where that reading is kept."""

    provider: str
    read: date
    address: str
    kept_at: str = ""


@dataclass(frozen=True)
class Price:
    """US dollars for an hour of one GPU of a machine that has `counts` of them; `gpu` is the catalogue's name."""

    of: PriceList
    gpu: str
    usd: float
    counts: tuple[int, ...] = (1, 2, 4, 8)


def _read(path: Path) -> tuple[Price, ...]:
    table = json.loads(path.read_text(encoding="utf-8"))
    lists = {
        name: PriceList(**{**one, "read": date.fromisoformat(one["read"])}) for name, one in table["lists"].items()
    }
    return tuple(Price(lists[row["of"]], row["gpu"], row["usd"], tuple(row["counts"])) for row in table["prices"])


PRICES: tuple[Price, ...] = _read(Path(__file__).with_suffix(".json"))
"""Hyperstack sells the SXM boards whole; Lambda's price depends on how many GPUs the machine has."""


def cheapest(prices: tuple[Price, ...] = PRICES) -> Iterator[tuple[Price, int]]:
    """The lowest price of every GPU and number of them, in the order of the list."""
    found: dict[tuple[str, int], Price] = {}
    for price in prices:
        for count in price.counts:
            kept = found.get((price.gpu, count))
            if kept is None or price.usd < kept.usd:
                found[price.gpu, count] = price
    for (_, count), price in found.items():
        yield price, count
