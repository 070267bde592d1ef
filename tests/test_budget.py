"""`BUDGET`: the machines that a run's money pays for, on random prices against the rule written again, and the price
list."""

import json
import random
from dataclasses import replace
from datetime import date, timedelta

import pytest

from sft_play.config.load import config_from_text
from sft_play.machine.gpu_catalog import CATALOG_ENTRIES, PriceList, load_prices, lowest_prices
from sft_play.machine.hardware import parse_hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner.advice import BudgetResult, Offer, compare_machine_prices
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.explain import format_run_length
from sft_play.planner.plan import RunLength
from sft_play.text import format_duration
from tests.conftest import Command

TODAY = date(2026, 11, 23)
LIST = PriceList("Somewhere", date(2026, 11, 1), "https://example.org/prices")
RUN = """
model: {name: Qwen/Qwen2.5-7B-Instruct, max_seq_len: 1024}
tuning: {mode: lora}
train: {effective_batch_size: 16, max_steps: 500}
"""


def priced(name: str, usd: float):
    """A machine at a price of the list, as the comparison takes it."""
    return name, replace(parse_hardware(name), price_per_gpu_hour=usd), LIST


def test_every_price_is_of_a_gpu_of_the_catalogue_with_date_and_address():
    names = {entry.name for entry in CATALOG_ENTRIES}
    for price in load_prices():
        assert price.gpu in names, price
        assert 0.05 < price.usd < 15
        assert set() < set(price.gpu_counts) <= {1, 2, 4, 8}
        assert price.price_list.address.startswith("https://")
        assert price.price_list.kept_at
        assert date(2026, 1, 1) < price.price_list.read <= TODAY
    assert len({price.price_list.provider for price in load_prices()}) >= 5
    assert len({price.gpu for price in load_prices()}) >= 15


def offers(chance: random.Random) -> tuple[Offer, ...]:
    made = [
        Offer(f"{n}xH100", chance.choice((1.0, 2.5)), chance.randrange(1, 9), chance.randrange(1, 30), 1000.0, 0.15,
              "single", "Somewhere", (TODAY - timedelta(days=chance.randrange(300))).isoformat(), "https://x")
        for n in range(chance.randrange(6))
    ]  # fmt: skip
    return tuple(sorted(made, key=lambda offer: (offer.cost, offer.hours)))


def test_cheapest_and_fastest_are_within_the_budget_on_random_offers():
    chance, seen = random.Random("budget"), set()
    for _ in range(300):
        found = BudgetResult(chance.randrange(30), offers(chance), ("1xT4",), TODAY)
        within = [offer for offer in found.offers if offer.cost <= found.usd]
        assert found.affordable_offers == within
        text = "\n".join(found.lines())
        if not found.offers:
            assert "fits on no machine" in text
        elif not within:
            least = min(offer.cost for offer in found.offers)
            assert found.fastest is None
            assert f"NO machine is within it; the cheapest is {found.offers[0]}" in text
            assert f"{least:,.2f} USD" in text
            assert text.count(", above it") == len(found.offers)
        else:
            cheapest = within[0]
            assert cheapest.cost == min(offer.cost for offer in within)
            assert found.fastest.hours == min(offer.hours for offer in within)
            assert f"the cheapest machine is {cheapest.machine} at Somewhere: " in text
            assert ("Fastest within it: the same" in text) == (found.fastest == cheapest)
        if found.offers:
            days = [(TODAY - date.fromisoformat(offer.read)).days for offer in found.offers]
            assert found.as_json()["price_ages_days"] == [min(days), max(days)]
            assert f"read {min(days)} days ago" in text
        data = json.loads(json.dumps(found.as_json(), allow_nan=False))
        assert [one["within"] for one in data["machines"]] == [offer in within for offer in found.offers]
        assert (data["cheapest"] is None) == (not within)
        seen.add((bool(found.offers), bool(within), found.fastest == (within or [None])[0]))
    assert len(seen) == 4


def test_small_costs_are_said_in_one_line_and_hours_as_the_plans_page_has_them():
    cheap = replace(offers(random.Random(3))[0], cost=0.004)
    lines = BudgetResult(5, (cheap, cheap), (), TODAY).lines()
    assert (len(lines), "0.00" in " ".join(lines), "under 0.01 USD" in lines[-1]) == (3, False, True)
    config = config_from_text(RUN, name="run.yaml")
    request = PlanRequest(config, load_model_shape(config.model.name), parse_hardware("1xH100"), has_eval=False)
    name, machine, price_list = priced("1xH100", 3.0)
    made = make_plan(replace(request, hardware=machine), estimate_run_length=lambda _: RunLength(500, 100_000))
    found = compare_machine_prices(5.0, [(name, machine, price_list)], make_machine_plan=lambda _: made, today=TODAY)
    assert found.offers[0].hours == pytest.approx((100_000 / made.speed.tokens_per_s + made.compile_s) / 3600)
    assert f"about {format_duration(3600 * found.offers[0].hours)} by the size of the data" in format_run_length(made)
    assert found.basis == " by the size of the data"


def test_hours_and_cost_are_those_of_each_machines_own_plan():
    machines = [priced("1xH100", 3.0), priced("8xH100", 2.0), priced("1xT4", 0.5)]
    config = config_from_text(RUN, name="run.yaml")
    request = PlanRequest(config, load_model_shape(config.model.name), parse_hardware("1xH100"), has_eval=False)
    work = RunLength(500, None)

    def plan(machine):
        return make_plan(replace(request, hardware=machine), estimate_run_length=lambda _: work)

    found = compare_machine_prices(5.0, machines, make_machine_plan=plan, today=TODAY)
    assert {offer.machine for offer in found.offers} == {"1xH100", "8xH100"}
    assert found.too_small == ("1xT4",)  # 15 GB of weights in 14.6 GiB
    for offer in found.offers:
        count = int(offer.machine[0])
        made = plan(parse_hardware(offer.machine))
        assert offer.hours == pytest.approx(500 * made.speed.step_s / 3600)
        assert offer.cost == pytest.approx(offer.hours * count * {1: 3.0, 8: 2.0}[count])
        assert (offer.speed_error, offer.provider, offer.read) == (0.15, "Somewhere", "2026-11-01")


@pytest.fixture
def run_yaml(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return str(path)


@pytest.fixture
def few_prices(monkeypatch):
    """Three machines, so that a test takes no longer."""
    few = [(price, 1) for price, count in lowest_prices() if price.gpu in ("H100", "L4", "T4") and count == 1]
    assert len(few) == 3
    monkeypatch.setattr("sft_play.commands.plan.lowest_prices", lambda: few)


@pytest.fixture
def answered(command: Command, run_yaml, tmp_path):
    """A function that plans with more words: the answer and what was printed."""

    def run(*words: str):
        _, text = command("plan", "--config", run_yaml, *words, "--out", str(tmp_path / "plan.json"))
        return json.loads((tmp_path / "plan.json").read_text()), text

    return run


def test_the_plan_is_that_of_the_cheapest_machine_and_the_json_has_all(answered, few_prices):
    data, text = answered("--budget", "50")
    assert "Budget 50.00 USD: the cheapest machine is 1x" in text
    best = data["budget"]["cheapest"]
    assert f"1x{data['hardware']['gpus'][0]['name'].removeprefix('NVIDIA ')}" == best["machine"]
    assert data["hardware"]["price_per_gpu_hour"] == best["usd_per_gpu_hour"]
    assert data["run"]["cost"] == pytest.approx(best["cost"])
    costs = [one["cost"] for one in data["budget"]["machines"]]
    assert (costs, data["budget"]["too_small"]) == (sorted(costs), ["1xT4"])


def test_a_price_of_the_users_wins_and_is_for_the_machine_that_is_named(answered):
    asked = (("1xH100",), ("1xH100", "--price", "100"), ("1xH100,price=100",))
    listed, given, inside = (answered("--budget", "9", "--hardware", *words)[0] for words in asked)
    lowest = min(price.usd for price in load_prices() if price.gpu == "H100" and 1 in price.gpu_counts)
    assert (listed["budget"]["machines"][0]["usd_per_gpu_hour"], given["budget"]) == (lowest, inside["budget"])
    only = given["budget"]["machines"]
    assert (len(only), only[0]["usd_per_gpu_hour"], only[0]["provider"]) == (1, 100, None)
    assert given["budget"]["price_ages_days"] is None


@pytest.mark.parametrize(("words", "message"), [
    (("--budget", "5", "train.max_steps=null"), "BUDGET needs the length of the run"),
    (("--budget", "5", "--hardware", "1xRTX3060"), "price list has no 1xRTX 3060"),
    (("--budget", "5", "--price", "2"), "HARDWARE=2xH200"),
    (("--budget", "-1"), "not an amount of money, such as BUDGET=20"),
    (("--budget", "much"), "not an amount of money, such as BUDGET=20"),
    (("--budget", "２０"), "not an amount of money, such as BUDGET=20"),  # as STEPS=３ is refused
])  # fmt: skip
def test_what_is_missing_is_asked_for(refuse, run_yaml, few_prices, words, message):
    assert message in refuse("plan", "--config", run_yaml, *words)


def test_what_would_fit_only_with_ram_that_nobody_said_does_not_count():
    config = config_from_text("model: {name: meta-llama/Llama-3.1-8B}\ntuning: {mode: full}", name="x")
    request = PlanRequest(config, load_model_shape(config.model.name), parse_hardware("1xRTX4090"), has_eval=False)
    machines = [priced("1xRTX4090", 0.4)]
    request = replace(request, hardware=machines[0][1])
    plan = make_plan(request, estimate_run_length=lambda _: RunLength(10, None))
    assert (plan.fits, plan.choice.needs_unknown_ram) == (True, True)
    found = compare_machine_prices(99.0, machines, make_machine_plan=lambda _: plan, today=TODAY)
    assert (found.offers, found.too_small) == ((), ("1xRTX4090",))
