"""`BUDGET`: the machines that a run's money pays for, by their own plans and a dated price list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.facts.gpus.gpu_catalog import Price, all_prices, cheapest, find
from sft_play.facts.hardware import Hardware, named
from sft_play.planner.advice.budget import Budget, budget_of, offer_of
from sft_play.planner.advice.suggestions import look
from sft_play.planner.layout import LAYOUT_NAMES, LayoutName
from sft_play.planner.plan import Plan, PlanRequest
from sft_play.starting.plan_run import has_eval, plan_for, shape_for


def budget_for(
    config: RunConfig, usd: float, asked: Hardware, *, only: tuple[LayoutName, ...] = LAYOUT_NAMES
) -> Budget:
    """The machines on which the run fits, with its hours and their cost.

    A price of the user's (PRICE=, price=) is taken for the machine that it is about, and nothing else is weighed. A
    machine that is named without a price has the lowest one of the list.

    Raises:
        ConfigError: the run's length is not known, a price is given without a machine that has GPUs, or the list has no
            price for the machine that is named.
    """
    today = datetime.now(UTC).date()
    shape, evaluates = shape_for(config), has_eval(config)

    def plan(machine: Hardware) -> Plan | None:
        best = look(PlanRequest(config, shape, machine, only, evaluates))
        if best is None or not best.fits:
            return None
        return plan_for(config, machine, only=only, with_suggestions=False)

    if asked.price_per_gpu_hour is not None:
        if not asked.gpus:
            raise ConfigError("BUDGET with PRICE= needs the machine that the price is for: HARDWARE=2xH200")
        made, name = plan(asked), _name(asked)
        offer = None if made is None else offer_of(name, made)
        return Budget(usd, (offer,) if offer else (), () if offer else (name,), today)
    if not (asked.named and asked.gpus):
        return budget_of(usd, cheapest(), plan=plan, today=today)
    price = min(_prices_of(asked), key=lambda one: one.usd, default=None)  # USD per GPU-hour
    if price is None:
        raise ConfigError(
            f"BUDGET: the price list has no {_name(asked)}; give its price (PRICE=2.5, or price=2.5 in HARDWARE), or "
            "leave HARDWARE out to weigh every machine of the list"
        )
    made = plan(replace(asked, price_per_gpu_hour=price.usd))
    offer = None if made is None else offer_of(_name(asked), made)
    if offer is None:
        return Budget(usd, (), (_name(asked),), today)
    of = price.of
    offer = replace(offer, provider=of.provider, read=of.read.isoformat(), address=of.address)
    return Budget(usd, (offer,), (), today)


def cheapest_machine(budget: Budget) -> Hardware | None:
    """The cheapest machine on which the run fits, within the budget or not, with its price; None if it fits none."""
    if not budget.offers:
        return None
    first = budget.offers[0]
    return replace(named(first.machine), price_per_gpu_hour=first.usd_per_gpu_hour)


def _prices_of(machine: Hardware) -> Iterator[Price]:
    entry = next(iter(find(machine.gpus[0].name)), None)
    if entry is not None:
        yield from (one for one in all_prices() if one.gpu == entry.name and machine.gpus_per_node in one.counts)


def _name(machine: Hardware) -> str:
    gpu = machine.gpus[0].name.removeprefix("NVIDIA ").removeprefix("AMD ")
    nodes = f"{machine.nodes}x" if machine.nodes > 1 else ""
    return f"{nodes}{machine.gpus_per_node}x{gpu}"
