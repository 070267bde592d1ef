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
from sft_play.facts.hardware import Hardware, parse_hardware
from sft_play.planner.plan import Plan
from sft_play.units import format_duration

# Machines that are listed; the JSON has all.
MAX_LISTED_MACHINES = 12


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
    def machine_text(self) -> str:
        """The machine and whose price it is."""
        return f"{self.machine} at {self.provider}" if self.provider else self.machine


@dataclass(frozen=True)
class BudgetResult:
    """The answer to `BUDGET`: every machine that fits, the cheapest first, and those that do not."""

    usd: float
    offers: tuple[Offer, ...]
    too_small: tuple[str, ...]
    today: date

    @property
    def affordable_offers(self) -> tuple[Offer, ...]:
        """The machines that cost no more than the budget."""
        return tuple(offer for offer in self.offers if offer.cost <= self.usd)

    @property
    def cheapest(self) -> Offer | None:
        """The cheapest within the budget."""
        return self.affordable_offers[0] if self.affordable_offers else None

    @property
    def fastest(self) -> Offer | None:
        """The fastest within the budget, of equally fast ones the cheaper."""
        return min(self.affordable_offers, key=lambda offer: (offer.hours, offer.cost), default=None)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        ages = self._price_ages_days()
        return {
            "usd": self.usd,
            "cheapest": asdict(self.cheapest) if self.cheapest else None,
            "fastest": asdict(self.fastest) if self.fastest else None,
            "machines": [{**asdict(offer), "within": offer.cost <= self.usd} for offer in self.offers],
            "too_small": list(self.too_small),
            "price_ages_days": [ages[0], ages[-1]] if ages else None,
        }

    def _price_ages_days(self) -> list[int]:
        return sorted((self.today - date.fromisoformat(offer.read)).days for offer in self.offers if offer.read)

    def lines(self) -> list[str]:
        """Cheapest and fastest, the machines by cost, and the age of the prices."""
        budget_text = f"Budget {self.usd:,.2f} USD"
        if not self.offers:
            return [f"{budget_text}: the run fits on no machine with a known price"]
        if self.cheapest is None or self.fastest is None:
            heading_lines = [f"{budget_text}: NO machine is within it; the cheapest is {_format_offer(self.offers[0])}"]
        else:
            is_same = self.fastest == self.cheapest
            heading_lines = [
                f"{budget_text}: the cheapest machine is {_format_offer(self.cheapest)}",
                f"Fastest within it: {'the same' if is_same else _format_offer(self.fastest)}",
            ]
        offer_lines = [
            f"  {_format_offer(offer)}{'' if offer.cost <= self.usd else ', above it'}" for offer in self.offers
        ]
        omitted_lines = (
            [f"  and {len(offer_lines) - MAX_LISTED_MACHINES} more (JSON=1 lists them)"]
            if len(offer_lines) > MAX_LISTED_MACHINES
            else []
        )
        price_lines = [
            f"Public list prices, read {days} days ago or more: look them up" for days in self._price_ages_days()[:1]
        ]
        heading_lines.append("Machines on which it fits, by cost, if every row were full length:")
        return [*heading_lines, *offer_lines[:MAX_LISTED_MACHINES], *omitted_lines, *price_lines]


def _format_offer(offer: Offer) -> str:
    price_note = f", price of {offer.read}" if offer.read else ""
    error_text = "not compared with published runs" if offer.speed_error is None else f"±{offer.speed_error:.0%}"
    return (
        f"{offer.machine_text}: {format_duration(3600 * offer.hours)}, {offer.cost:,.2f} USD "
        f"({offer.usd_per_gpu_hour:g} a GPU-hour{price_note}; {offer.layout}, about {offer.tokens_per_s:,.0f} "
        "tokens/s, "
        f"{error_text})"
    )


def compare_machine_prices(
    usd: float,
    prices: Iterable[tuple[Price, int]],
    *,
    make_machine_plan: Callable[[Hardware], Plan | None],
    today: date,
) -> BudgetResult:
    """Compare the machines of a price list (a price, how many GPUs): those on which the run fits, the cheapest first.
    `make_machine_plan` gives None where a run certainly does not fit. Raises ConfigError: its length is not known."""
    offers, too_small = [], []
    for price, count in prices:
        name = f"{count}x{price.gpu}"
        machine = replace(parse_hardware(name), price_per_gpu_hour=price.usd)
        try:
            machine_plan = make_machine_plan(machine)
        except SftPlayError:  # the batch does not split over that many GPUs, or the model is beyond fp16
            machine_plan = None
        if machine_plan is None or (offer := build_offer(name, machine_plan)) is None:
            too_small.append(name)
            continue
        source = price.price_list
        offers.append(replace(offer, provider=source.provider, read=source.read.isoformat(), address=source.address))
    offers.sort(key=lambda offer: (offer.cost, offer.hours))
    return BudgetResult(usd, tuple(offers), tuple(too_small), today)


def build_offer(machine: str, plan: Plan) -> Offer | None:
    """What a plan's run costs at its machine's price; None where it does not certainly fit, or speed or price are not
    known. Raises ConfigError where the run's length is not."""
    price = plan.hardware.price_per_gpu_hour
    if not plan.fits or plan.choice.needs_unknown_ram or not plan.speed_known or price is None:
        return None
    hours = plan.hours
    if hours is None:
        raise ConfigError(
            "BUDGET needs the length of the run, which is not known: set train.max_steps "
            "(SET='train.max_steps=1000'), or data.train_path to one file whose rows can be counted"
        )
    cost = hours * len(plan.hardware.gpus) * price
    error = plan.speed_error.share if plan.speed_error else None
    return Offer(machine, price, hours, cost, plan.speed.tokens_per_s, error, plan.layout)
