"""What would fit where a plan does not: changes of the run, the least harmful first, and machines
for a budget.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from typing import Any

from sft_play.config.schema import RunConfig, TrainConfig
from sft_play.errors import ConfigError, SftPlayError
from sft_play.machine.gpu import Gpu
from sft_play.machine.gpu_catalog import CatalogEntry, Price, find_catalog_entries, suggested_gpus
from sft_play.machine.hardware import Hardware, parse_hardware
from sft_play.machine.software import LIGER_PACKAGE
from sft_play.models.config_json import load_model_shape
from sft_play.planner.candidates import Candidate, first_fitting, lowest_memory_candidates
from sft_play.planner.decide import PlanRequest, build_plan_inputs, make_plan
from sft_play.planner.kernels import LIGER_REPLACEMENTS
from sft_play.planner.layout import LAYOUT_NAMES
from sft_play.planner.memory.structure import configured_shape
from sft_play.planner.plan import Plan, Suggestion
from sft_play.planner.possible_layouts import find_layouts
from sft_play.planner.what_if import find_largest_fit, largest_fitting_multiple
from sft_play.text import GIB, format_duration

# What would fit where the plan does not: changes, the least harmful first, each with its predicted
# peak.
#
# Changed settings are predicted with what earlier runs on this machine taught, as their own plan
# would be. Other machines are only named: nothing was measured there, and layouts that offload
# count only where a machine's RAM is known.

# Shorter sequences are suggested in steps of this many tokens, down to one step.
SUGGESTED_SEQ_LEN_STEP = 256
GPU_COUNTS = (2, 4, 8, 16, 32, 64)
# GPUs per node when more are suggested than the present nodes have.
GPUS_PER_NODE = 8
SMALL_LORA_RANK = 8
NO_MESH = "model.mesh_shape=null"
# RAM is suggested in steps of this many bytes.
RAM_STEP_BYTES = 16 * GIB


def make_advised_plan(request: PlanRequest, **options: Any) -> Plan:
    """The plan of `make_plan`; if it does not fit, with the changes that would make it fit."""
    plan = make_plan(request, **options)
    if plan.fits:
        return plan
    all_suggestions = tuple(find_suggestions(request))
    return replace(
        plan,
        suggestions=tuple(suggestion for suggestion in all_suggestions if suggestion.fits),
        not_enough=tuple(suggestion for suggestion in all_suggestions if not suggestion.fits),
    )


def find_suggestions(request: PlanRequest) -> Iterator[Suggestion]:
    """Changes that need less memory or provide more, and those that are not enough; then a smaller model."""
    has_fit = False
    for suggestion in itertools.chain(_suggest_settings(request), _suggest_layout(request), _suggest_machine(request)):
        has_fit = has_fit or suggestion.fits
        yield suggestion
    if not has_fit:
        yield from _suggest_smaller_model(request)


def _request_on_machine(request: PlanRequest, machine: Hardware) -> PlanRequest:
    """The request for another machine, in any layout: neither runs nor the mesh of this one are meant for it."""
    has_same_ranks = machine.ranks == request.hardware.ranks
    config = request.config if has_same_ranks else _apply_setting(request.config, NO_MESH)
    return replace(request, config=config, hardware=machine, allowed_layouts=LAYOUT_NAMES, measured_runs=())


def lowest_memory_candidate(request: PlanRequest) -> Candidate | None:
    """The candidate that needs the least memory: far fewer are evaluated than for a plan. None where a plan would be
    refused."""
    with contextlib.suppress(ConfigError):
        possible, _ = find_layouts(request.config, request.shape, request.hardware)
        layouts = [layout for layout in possible if layout.name in request.allowed_layouts] or list(possible[:1])
        if not layouts:
            return None
        # those that offload come last
        return first_fitting(lowest_memory_candidates(build_plan_inputs(request, fp32_master_weights=False), layouts))
    return None


def _planned_choice(request: PlanRequest) -> Candidate | None:
    """What a plan would choose where something fits, else the one that needs the least memory; None where a plan is
    refused."""
    candidate = lowest_memory_candidate(request)
    # a plan evaluates hundreds of candidates, and says more than the smallest one only where something fits
    if candidate is None or not candidate.fits:
        return candidate
    with contextlib.suppress(ConfigError):
        return make_plan(request).choice
    return None


def _suggest_settings(request: PlanRequest) -> Iterator[Suggestion]:
    """Changed settings one at a time, and all so far together as long as none is enough."""
    has_fit, combined_config, combined_settings = False, request.config, dict[str, str]()
    present_candidate = _planned_choice(request)
    for change in _memory_saving_settings(request):
        setting, candidate = change, _planned_choice(replace(request, config=_apply_setting(request.config, change)))
        if candidate is None and request.config.model.mesh_shape is not None:  # which may be what refuses the change
            setting = f"{change} {NO_MESH}"
            candidate = _planned_choice(replace(request, config=_apply_setting(request.config, setting)))
        if candidate is None:
            continue
        if (
            not candidate.fits
            and present_candidate is not None
            and candidate.budget_ratio > present_candidate.budget_ratio
        ):
            continue
        yield _build_suggestion(setting, candidate, setting=setting)
        has_fit = has_fit or candidate.fits
        combined_config = _apply_setting(combined_config, setting)
        combined_settings |= {assignment.partition("=")[0]: assignment for assignment in setting.split()}
        # each change alone is not enough so far: all of them up to here
        if not has_fit and len(combined_settings) > 1:
            combined = _planned_choice(replace(request, config=combined_config))
            if combined is not None and combined.fits:
                has_fit = True
                combined_setting = " ".join(combined_settings.values())
                yield _build_suggestion(combined_setting, combined, setting=combined_setting)


def _suggest_layout(request: PlanRequest) -> Iterator[Suggestion]:
    if request.config.model.mesh_shape is not None:
        candidate = _planned_choice(replace(request, config=_apply_setting(request.config, NO_MESH)))
        if candidate is not None and candidate.fits:
            yield _build_suggestion(f"{NO_MESH} ({candidate.layout.name})", candidate, setting=NO_MESH)
        return
    if set(LAYOUT_NAMES) <= set(request.allowed_layouts):
        return
    candidate = _planned_choice(replace(request, allowed_layouts=LAYOUT_NAMES))
    if candidate is not None and candidate.fits:
        name = candidate.layout.name
        yield _build_suggestion(f"layout {name} (make train-distributed STRATEGY={name})", candidate)


def _suggest_machine(request: PlanRequest) -> Iterator[Suggestion]:
    for machine, description in _larger_machines(request):
        candidate = _planned_choice(_request_on_machine(request, machine))
        if candidate is not None and candidate.fits:
            yield _build_suggestion(
                f"{description} ({candidate.layout.name})", candidate, hardware=_hardware_name(machine)
            )


def _suggest_smaller_model(request: PlanRequest) -> Iterator[Suggestion]:
    name = find_largest_fit("model", request).value
    if isinstance(name, str):
        setting = f"model.name={name}"
        config = _apply_setting(request.config, setting)
        plan = make_plan(replace(request, config=config, shape=configured_shape(config, load_model_shape(name))))
        yield _build_suggestion(setting, plan.choice, setting=setting)


def _build_suggestion(
    change: str, candidate: Candidate, *, setting: str | None = None, hardware: str | None = None
) -> Suggestion:
    device = "GPU" if candidate.step.on_gpu else "process"
    needs = f"{candidate.memory.required / GIB:.1f} GiB per {device}{candidate.ram_text}"
    if "RAM" in candidate.insufficient_memory and candidate.step.on_gpu and not candidate.offloads:
        needs += f" and {candidate.host_required / GIB:.1f} GiB of RAM on each node"
    return Suggestion(
        change, candidate.memory.allocated, candidate.memory.required, candidate.fits, needs, setting, hardware
    )


def _memory_saving_settings(request: PlanRequest) -> list[str]:
    """Settings that need less memory, the least harmful first."""
    config = request.config
    checkpointing = config.train.gradient_checkpointing
    settings = ["train.gradient_checkpointing=true"] if checkpointing not in ("auto", True, "offload") else []
    settings += ["train.gradient_checkpointing=offload"] if checkpointing != "offload" else []
    settings = settings if request.shape.can_checkpoint else []
    settings += _smaller_batches(config.train)
    if config.tuning.mode == "full" and config.train.weight_updates == "float32":
        settings.append("train.weight_updates=auto")
    if config.tuning.mode == "full" and config.model.dtype == "float32":
        settings.append("model.dtype=auto")
    if config.eval.batch_size not in ("auto", 1):
        settings.append("eval.batch_size=auto")
    if config.model.attn_implementation == "eager":
        settings.append("model.attn_implementation=auto")
    if (
        config.train.kernels == "auto"
        and LIGER_PACKAGE not in request.missing_packages
        and request.shape.model_type in LIGER_REPLACEMENTS
    ):
        settings += ["train.kernels=liger"] if request.hardware.gpus else []  # auto counts the plain ones' memory
    if config.model.max_seq_len > SUGGESTED_SEQ_LEN_STEP:
        settings.append(f"model.max_seq_len={_longest_fitting_seq_len(request)}")
    if config.tuning.mode == "full":
        settings += ["train.optim=adafactor", "tuning.mode=lora"]
    if config.tuning.mode != "qlora":
        settings.append("tuning.mode=qlora")
    if config.tuning.mode != "full" and config.tuning.lora.r > SMALL_LORA_RANK:
        settings.append(f"tuning.lora.r={SMALL_LORA_RANK}")
    return settings


def _smaller_batches(train: TrainConfig) -> list[str]:
    if train.derives_effective_batch:
        rows = int(train.batch_size) * int(train.grad_accum)
        return [f"train.batch_size=1 train.grad_accum={rows}"] if train.batch_size != 1 else []
    if "auto" not in (train.batch_size, train.grad_accum):  # of three numbers that agree no one can change alone
        return ["train.batch_size=1 train.grad_accum=auto"] if train.batch_size != 1 else []
    return [
        *(["train.batch_size=1"] if train.batch_size not in ("auto", 1) else []),
        *(["train.grad_accum=auto"] if train.grad_accum != "auto" else []),
    ]


def _longest_fitting_seq_len(request: PlanRequest) -> int:
    def fits(length: int) -> bool:
        candidate = lowest_memory_candidate(
            replace(request, config=_apply_setting(request.config, f"model.max_seq_len={length}"))
        )
        return candidate is not None and candidate.fits

    max_seq_len = (request.config.model.max_seq_len - 1) // SUGGESTED_SEQ_LEN_STEP * SUGGESTED_SEQ_LEN_STEP
    return largest_fitting_multiple(fits, step=SUGGESTED_SEQ_LEN_STEP, limit=max_seq_len) or SUGGESTED_SEQ_LEN_STEP


def _apply_setting(config: RunConfig, setting: str) -> RunConfig:
    changed: RunConfig = config
    for assignment in setting.split():
        path, _, value_text = assignment.partition("=")
        value: Any = {"true": True, "null": None}.get(
            value_text, int(value_text) if value_text.isdigit() else value_text
        )
        changed = _replace_option(changed, path.split("."), value)
    return changed


def _replace_option(section: Any, path: Sequence[str], value: Any) -> Any:
    if len(path) == 1:
        return section.model_copy(update={path[0]: value})
    return section.model_copy(update={path[0]: _replace_option(getattr(section, path[0]), path[1:], value)})


def _larger_machines(request: PlanRequest) -> Iterator[tuple[Hardware, str]]:
    """More RAM, more GPUs of the same kind, then the smallest larger GPU on which the unchanged job fits."""
    hardware = request.hardware
    count = len(hardware.gpus)
    yield from _machines_with_more_ram(request)
    larger_counts = [gpu_count for gpu_count in GPU_COUNTS if gpu_count > count]
    for gpu_count in larger_counts if count else ():
        machine = _machine_with_gpus(hardware, hardware.gpus[0], gpu_count)
        if _certainly_fits(lowest_memory_candidate(_request_on_machine(request, machine))):
            yield machine, f"{gpu_count} of these GPUs"
            break
    present_memory = max((gpu.total_bytes for gpu in hardware.gpus), default=0)
    # capability: the largest memory that is known to be too small for it
    too_small_memory: dict[object, int] = {}
    larger_gpus = [entry for entry in suggested_gpus() if entry.memory_bytes > present_memory]
    for entry in larger_gpus:
        # a job's need depends only on a GPU's capability: one that is too small rules out all that are not larger
        if entry.memory_bytes <= too_small_memory.get(entry.capability, 0):
            continue
        machine = _machine_with_entry(hardware, entry, max(1, count))
        candidate = lowest_memory_candidate(_request_on_machine(request, machine))
        if _certainly_fits(candidate):
            yield machine, _hardware_name(machine).partition(",")[0]
            return
        too_small_memory[entry.capability] = max(entry.memory_bytes, candidate.memory.required - 1 if candidate else 0)
    for gpu_count in larger_counts if larger_gpus else ():
        machine = _machine_with_entry(hardware, larger_gpus[-1], gpu_count)
        if _certainly_fits(lowest_memory_candidate(_request_on_machine(request, machine))):
            yield machine, _hardware_name(machine).partition(",")[0]
            return


def _machines_with_more_ram(request: PlanRequest) -> Iterator[tuple[Hardware, str]]:
    hardware = request.hardware
    if not hardware.gpus or not hardware.ram_given:
        return
    machine = _machine_with_gpus(hardware, hardware.gpus[0], len(hardware.gpus))
    candidate = lowest_memory_candidate(_request_on_machine(request, replace(machine, ram_given=False)))
    if candidate is None or not candidate.fits or candidate.host_required <= hardware.ram_free_bytes:
        return
    ram_bytes = -(-candidate.host_required // RAM_STEP_BYTES) * RAM_STEP_BYTES
    yield (
        replace(machine, ram_bytes=ram_bytes, ram_free_bytes=ram_bytes),
        f"{ram_bytes / GIB:.0f} GiB of RAM on each node",
    )


def _machine_with_entry(hardware: Hardware, entry: CatalogEntry, count: int) -> Hardware:
    named_machine = parse_hardware(f"1x{entry.name}")
    return replace(
        _machine_with_gpus(hardware, named_machine.gpus[0], count), link_bytes_per_s=named_machine.link_bytes_per_s
    )


def _certainly_fits(candidate: Candidate | None) -> bool:
    """Whether it certainly fits: unknown RAM does not count."""
    return candidate is not None and candidate.fits and not candidate.needs_unknown_ram


def _machine_with_gpus(hardware: Hardware, gpu: Gpu, count: int) -> Hardware:
    """The same machine with that many GPUs of one kind, on more nodes where its own have no room for eight or more."""
    # free_bytes None: what other processes hold on the present GPUs is not held there
    gpus = tuple(replace(gpu, index=index, free_bytes=None) for index in range(count))
    nodes = hardware.nodes if count == len(hardware.gpus) else -(-count // max(GPUS_PER_NODE, hardware.ranks_per_node))
    has_given_ram = hardware.ram_given and bool(hardware.gpus)
    return replace(hardware, gpus=gpus, nodes=nodes, named=True, ram_given=has_given_ram)


def _hardware_name(machine: Hardware) -> str:
    gpu = machine.gpus[0]
    name = gpu.name.removeprefix("NVIDIA ").removeprefix("AMD ").replace(" ", "")  # as HARDWARE= takes it
    entry = next(iter(find_catalog_entries(name)), None)
    nodes = f"{machine.nodes}x" if machine.nodes > 1 else ""
    text = f"{nodes}{machine.ranks_per_node}x{name}"
    if entry is None or abs(entry.memory_bytes - gpu.total_bytes) > 0.05 * gpu.total_bytes:
        text += f",mem={gpu.total_bytes >> 20}MiB"
    return text + (f",ram={machine.ram_free_bytes >> 20}MiB" if machine.ram_given else "")


# --------------------------------------------------------------------------------------------------
# The machine for a budget (`BUDGET`): where the run fits, its hours and what they cost, by dated
# public prices.
#
# Hours are those of each machine's own plan, for rows of full length. A machine that would fit only
# with RAM that nobody said does not count.

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
