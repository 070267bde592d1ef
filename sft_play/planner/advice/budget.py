"""The machine for a budget (`BUDGET`): where the run fits, its hours and what they cost, by dated public prices.

Hours are those of each machine's own plan, for rows of full length. A machine that would fit only with RAM that nobody
said does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from datetime import date
from typing import Any

from sft_play.errors import ConfigError, SftPlayError
from sft_play.facts.gpus.gpu_catalog import Price
from sft_play.facts.hardware import Hardware, named
from sft_play.planner.plan import Plan
from sft_play.units import duration_of

MOST_LINES = 12
"""Machines that are listed; the JSON has all."""


@dataclass(frozen=True)
class Offer:
    """A machine on which the run fits: what its hours cost in US dollars, by whose price of which day (None: the
    user's)."""

    machine: str
    usd_per_gpu_hour: float
    hours: float
    cost: float
    tokens_per_s: float
    speed_error: float | None
    """Share of the speed, and so of hours and cost; None where no published run of its kind was compared."""
    layout: str
    provider: str | None = None
    read: str | None = None
    address: str | None = None

    @property
    def where(self) -> str:
        """The machine and whose price it is."""
        return f"{self.machine} at {self.provider}" if self.provider else self.machine


@dataclass(frozen=True)
class Budget:
    """The answer to `BUDGET`: every machine that fits, the cheapest first, and those that do not."""

    usd: float
    offers: tuple[Offer, ...]
    too_small: tuple[str, ...]
    today: date

    @property
    def within(self) -> tuple[Offer, ...]:
        """The machines that cost no more than the budget."""
        return tuple(offer for offer in self.offers if offer.cost <= self.usd)

    @property
    def cheapest(self) -> Offer | None:
        """The cheapest within the budget."""
        return self.within[0] if self.within else None

    @property
    def fastest(self) -> Offer | None:
        """The fastest within the budget, of equally fast ones the cheaper."""
        return min(self.within, key=lambda offer: (offer.hours, offer.cost), default=None)

    @property
    def ages_days(self) -> tuple[int, int] | None:
        """Days since the newest and the oldest price of the machines that fit were read; None without any."""
        days = [(self.today - date.fromisoformat(offer.read)).days for offer in self.offers if offer.read]
        return (min(days), max(days)) if days else None

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "usd": self.usd,
            "cheapest": asdict(self.cheapest) if self.cheapest else None,
            "fastest": asdict(self.fastest) if self.fastest else None,
            "machines": [{**asdict(offer), "within": offer.cost <= self.usd} for offer in self.offers],
            "too_small": list(self.too_small),
            "price_ages_days": list(self.ages_days) if self.ages_days else None,
        }

    def lines(self) -> list[str]:
        """Cheapest and fastest, or what the cheapest costs where none is within the budget; the machines; the age of
        the prices."""
        if not self.offers:
            return [f"Budget {_usd(self.usd)}: the run fits on no machine with a known price"]
        if self.cheapest is None or self.fastest is None:
            least = self.offers[0]
            heads = [f"Budget {_usd(self.usd)}: NO machine is within it; the cheapest is {_words(least)}"]
        else:
            heads = [f"Budget {_usd(self.usd)}: the cheapest machine is {_words(self.cheapest)}"]
            same = self.fastest == self.cheapest
            heads.append(f"Fastest within it: {'the same' if same else _words(self.fastest)}")
        shown = [f"  {_words(offer)}{'' if offer.cost <= self.usd else ', above it'}" for offer in self.offers]
        more = [f"  and {len(shown) - MOST_LINES} more (JSON=1 lists them)"] if len(shown) > MOST_LINES else []
        return [
            *heads,
            "Machines on which it fits, by cost, if every row were full length:",
            *shown[:MOST_LINES],
            *more,
            *self._about_prices(),
        ]

    def _about_prices(self) -> list[str]:
        if self.ages_days is None:
            return []
        newest, oldest = self.ages_days
        age = f"{newest}" if newest == oldest else f"{newest} to {oldest}"
        return [
            f"Prices are public list prices on demand in USD, read {age} days ago: look them up before you rent; they "
            "leave out storage, traffic, taxes, and the hours until training starts"
        ]


def _usd(amount: float) -> str:
    return f"{amount:,.2f} USD"


def _words(offer: Offer) -> str:
    read = f", price of {offer.read}" if offer.read else ""
    error = "not compared with published runs" if offer.speed_error is None else f"±{offer.speed_error:.0%}"
    return (
        f"{offer.where}: {duration_of(3600 * offer.hours)}, {_usd(offer.cost)} "
        f"({offer.usd_per_gpu_hour:g} a GPU-hour{read}; {offer.layout}, about {offer.tokens_per_s:,.0f} tokens/s, "
        f"{error})"
    )


def budget_of(
    usd: float, prices: Iterable[tuple[Price, int]], *, plan: Callable[[Hardware], Plan | None], today: date
) -> Budget:
    """The machines of a price list on which the run fits, the cheapest first.

    Args:
        prices: a price and how many GPUs the machine has.
        plan: the plan on a machine; None where it certainly does not fit.

    Raises:
        ConfigError: the run's length is not known, so it has no cost.
    """
    offers, too_small = [], []
    for price, count in prices:
        name = f"{count}x{price.gpu}"
        machine = replace(named(name), price_per_gpu_hour=price.usd)
        try:
            made = plan(machine)
        except SftPlayError:  # the batch does not split over that many GPUs, or the model is beyond fp16
            made = None
        # too small, or not certain: RAM or speed that nobody knows
        offer = None if made is None else offer_of(name, made)
        if offer is None:
            too_small.append(name)
            continue
        of = price.of
        offers.append(replace(offer, provider=of.provider, read=of.read.isoformat(), address=of.address))
    offers.sort(key=lambda offer: (offer.cost, offer.hours))
    return Budget(usd, tuple(offers), tuple(too_small), today)


def offer_of(machine: str, plan: Plan) -> Offer | None:
    """What a plan's run costs at its machine's price; None where it does not certainly fit, or its speed or price is
    not known.

    Raises:
        ConfigError: the run's length is not known.
    """
    price = plan.hardware.price_per_gpu_hour
    if not plan.fits or plan.choice.needs_unknown_ram or not plan.speed_known or price is None:
        return None
    hours = plan.hours
    if hours is None:
        raise NoLength
    cost = hours * len(plan.hardware.gpus) * price
    error = plan.speed_error.share if plan.speed_error else None
    return Offer(machine, price, hours, cost, plan.speed.tokens_per_s, error, plan.layout)


class NoLength(ConfigError):
    """The run's length is not known, so nothing can be said of its cost."""

    def __init__(self) -> None:
        super().__init__(
            "BUDGET needs the length of the run, which is not known: set train.max_steps "
            "(SET='train.max_steps=1000'), or data.train_path to one file whose rows can be counted"
        )
