"""What would fit: changes of a run whose plan does not, the machines for a budget, the largest
that fits, and grids of settings.
"""

import bisect
import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from typing import Any, Literal, get_args

from sft_play.config.schema import RunConfig, TrainConfig
from sft_play.errors import ConfigError, SftPlayError
from sft_play.log import one_line
from sft_play.machine.gpu import Gpu
from sft_play.machine.gpu_catalog import PriceList, find_catalog_entries, suggested_gpus
from sft_play.machine.hardware import Hardware, parse_hardware
from sft_play.machine.software import LIGER_PACKAGE
from sft_play.models.config_json import (
    KNOWN_MODELS,
    load_config_json,
    load_model_shape,
    refuse_quantised,
)
from sft_play.models.shape import ModelShape
from sft_play.planner.batching import BatchPlan, effective_batch
from sft_play.planner.candidates import (
    Candidate,
    PlanInputs,
    build_candidate,
    first_fitting,
    lowest_memory_candidates,
    most_checkpointed_layers,
)
from sft_play.planner.decide import PlanRequest, build_plan_inputs, make_plan, requested_layouts
from sft_play.planner.explain import estimate_duration
from sft_play.planner.kernels import LIGER_REPLACEMENTS
from sft_play.planner.layout import LAYOUT_NAMES, Layout, context_parallel_layouts, find_layouts
from sft_play.planner.memory.structure import check_adapter_targets, configured_shape
from sft_play.planner.plan import Plan, Suggestion
from sft_play.planner.precision import choose_precision
from sft_play.text import GIB, format_duration, format_usd

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
    # no suggestion shows a speed, for which every setting would be counted
    suggestions = tuple(
        find_suggestions(replace(request, shape=replace(request.shape, pass_meter=None)))
    )
    return replace(
        plan,
        suggestions=tuple(suggestion for suggestion in suggestions if suggestion.fits),
        not_enough=tuple(suggestion for suggestion in suggestions if not suggestion.fits),
    )


def find_suggestions(request: PlanRequest) -> Iterator[Suggestion]:
    """Yield changes of settings, then other layouts and machines, each with whether it is enough;
    last a smaller model, where nothing else is."""
    has_fit = False
    for suggestion in itertools.chain(
        _suggest_settings(request), _suggest_layout_or_machine(request)
    ):
        has_fit = has_fit or suggestion.fits
        yield suggestion
    if has_fit:
        return
    name = find_largest_fit("model", request).value
    if isinstance(name, str):
        setting = f"model.name={name}"
        config = _apply_setting(request.config, setting)
        plan = make_plan(
            replace(request, config=config, shape=configured_shape(config, load_model_shape(name)))
        )
        yield _build_suggestion(setting, plan.choice, setting=setting)


def _request_on_machine(request: PlanRequest, machine: Hardware) -> PlanRequest:
    """The request for another machine, in any layout: neither runs nor the mesh of this one are
    meant for it."""
    config = request.config
    if machine.ranks != request.hardware.ranks:
        config = _apply_setting(config, NO_MESH)
    return replace(
        request, config=config, hardware=machine, allowed_layouts=LAYOUT_NAMES, measured_runs=()
    )


def lowest_memory_candidate(request: PlanRequest) -> Candidate | None:
    """The candidate that needs the least memory: far fewer are evaluated than for a plan. None
    where a plan would be refused."""
    with contextlib.suppress(ConfigError):
        layouts, _ = requested_layouts(request)  # those that offload come last
        inputs = build_plan_inputs(request, fp32_master_weights=False)
        return first_fitting(lowest_memory_candidates(inputs, layouts))
    return None


def _planned_choice(request: PlanRequest) -> Candidate | None:
    """The candidate that a plan would choose; if none fits, the one that needs the least memory.
    None if the plan is refused."""
    candidate = lowest_memory_candidate(request)
    # a plan evaluates hundreds of candidates, and says more than the smallest one only where
    # something fits
    if candidate is None or not candidate.fits:
        return candidate
    with contextlib.suppress(ConfigError):
        return make_plan(request).choice
    return None


def _suggest_settings(request: PlanRequest) -> Iterator[Suggestion]:
    """Yield changed settings one at a time, and all of them so far together until that is
    enough."""
    has_fit, combined_settings = False, dict[str, str]()
    present_candidate = _planned_choice(request)
    for change in _memory_saving_settings(request):
        setting = change
        candidate = _planned_choice(_request_with(request, setting))
        # which may be what refuses the change
        if candidate is None and request.config.model.mesh_shape is not None:
            setting = f"{change} {NO_MESH}"
            candidate = _planned_choice(
                replace(request, config=_apply_setting(request.config, setting))
            )
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
        combined_settings |= {
            assignment.partition("=")[0]: assignment for assignment in setting.split()
        }
        # each change alone is not enough so far: all of them up to here
        if not has_fit and len(combined_settings) > 1:
            combined_setting = " ".join(combined_settings.values())
            combined = _planned_choice(_request_with(request, combined_setting))
            if combined is not None and combined.fits:
                has_fit = True
                yield _build_suggestion(combined_setting, combined, setting=combined_setting)


def _suggest_layout_or_machine(request: PlanRequest) -> Iterator[Suggestion]:
    setting = candidate = None
    if request.config.model.mesh_shape is not None:
        setting = NO_MESH
        candidate = _planned_choice(
            replace(request, config=_apply_setting(request.config, NO_MESH))
        )
    elif not set(LAYOUT_NAMES) <= set(request.allowed_layouts):
        candidate = _planned_choice(replace(request, allowed_layouts=LAYOUT_NAMES))
    if candidate is not None and candidate.fits:
        name = candidate.layout.name
        change = f"layout {name} (make train-distributed STRATEGY={name})"
        if setting:
            change = f"{setting} ({name})"
        yield _build_suggestion(change, candidate, setting=setting)
    for machine, description in _larger_machines(request):
        candidate = _planned_choice(_request_on_machine(request, machine))
        if candidate is not None and candidate.fits:
            change = f"{description} ({candidate.layout.name})"
            yield _build_suggestion(change, candidate, hardware=_hardware_name(machine))


def _build_suggestion(
    change: str, candidate: Candidate, *, setting: str | None = None, hardware: str | None = None
) -> Suggestion:
    needs = (
        f"{candidate.memory.required / GIB:.1f} GiB per {candidate.device_word}{candidate.ram_text}"
    )
    if "RAM" in candidate.insufficient_memory and candidate.step.on_gpu and not candidate.offloads:
        needs += f" and {candidate.host_required / GIB:.1f} GiB of RAM on each node"
    return Suggestion(
        change,
        candidate.memory.allocated,
        candidate.memory.required,
        candidate.fits,
        needs,
        setting,
        hardware,
    )


def _memory_saving_settings(request: PlanRequest) -> list[str]:
    # the least harmful first
    config, train, tuning = request.config, request.config.train, request.config.tuning
    is_full, can_checkpoint = tuning.mode == "full", request.shape.can_checkpoint
    checkpointing = train.gradient_checkpointing
    has_liger = (
        LIGER_PACKAGE not in request.missing_packages
        and request.shape.model_type in LIGER_REPLACEMENTS
    )
    helps: dict[str, bool] = {
        "train.gradient_checkpointing=true": (
            can_checkpoint and checkpointing not in ("auto", True, "offload")
        ),
        "train.gradient_checkpointing=offload": can_checkpoint and checkpointing != "offload",
        **dict.fromkeys(_smaller_batches(train), True),
        **dict.fromkeys(_fewer_pixels(request), True),
        "train.weight_updates=auto": is_full and train.weight_updates == "float32",
        "model.dtype=auto": is_full and config.model.dtype == "float32",
        "eval.batch_size=auto": config.eval.batch_size not in ("auto", 1),
        "model.attn_implementation=auto": config.model.attn_implementation == "eager",
        # auto counts the plain ones' memory
        "train.kernels=liger": (
            train.kernels == "auto"
            and train.compile is not True
            and has_liger
            and bool(request.hardware.gpus)
            and request.shape.vision is None
        ),
    }

    def fits(length: int) -> bool:
        shorter = _apply_setting(config, f"model.max_seq_len={length}")
        candidate = lowest_memory_candidate(replace(request, config=shorter))
        return candidate is not None and candidate.fits

    if config.model.max_seq_len > SUGGESTED_SEQ_LEN_STEP:
        limit = (config.model.max_seq_len - 1) // SUGGESTED_SEQ_LEN_STEP * SUGGESTED_SEQ_LEN_STEP
        longest = largest_fitting_multiple(fits, step=SUGGESTED_SEQ_LEN_STEP, limit=limit)
        helps[f"model.max_seq_len={longest or SUGGESTED_SEQ_LEN_STEP}"] = True
    helps |= {
        "train.optim=adafactor": is_full,
        "tuning.mode=lora": is_full,
        "tuning.mode=qlora": tuning.mode != "qlora",
        f"tuning.lora.r={SMALL_LORA_RANK}": not is_full and tuning.lora.r > SMALL_LORA_RANK,
    }
    return [setting for setting, is_helpful in helps.items() if is_helpful]


# Share of all tokens that pictures take from which on smaller ones are suggested, and the share of
# their pixels that is suggested.
DOMINATING_SHARE, SUGGESTED_PIXEL_SHARE = 0.5, 0.5
_PIXELS_OPTION = "data.image_pixels.max"


def _fewer_pixels(request: PlanRequest) -> list[str]:
    images, vision = None, request.shape.vision
    if request.row_tokens is not None:
        images = request.row_tokens.images
    if images is None or vision is None or vision.mean_token_share < DOMINATING_SHARE:
        return []
    pixels = images.width * images.height
    limit = request.config.data.image_pixels.max
    if limit is not None:
        pixels = min(pixels, limit)
    return [f"{_PIXELS_OPTION}={round(SUGGESTED_PIXEL_SHARE * pixels)}"]


def _request_with(request: PlanRequest, setting: str) -> PlanRequest:
    """The request with settings; rows with smaller pictures are about as much shorter."""
    rows, vision = request.row_tokens, request.shape.vision
    changed = replace(request, config=_apply_setting(request.config, setting))
    if f"{_PIXELS_OPTION}=" not in setting or rows is None or vision is None:
        return changed
    scale = 1 - vision.mean_token_share * (1 - SUGGESTED_PIXEL_SHARE)
    shortened = {
        name: round(getattr(rows, name) * scale) for name in ("p95", "longest", "held_out")
    }
    sample = tuple(round(length * scale) for length in rows.sample)
    return replace(
        changed,
        shape=replace(request.shape, vision=vision.with_smaller_pictures(SUGGESTED_PIXEL_SHARE)),
        row_tokens=replace(rows, mean=rows.mean * scale, sample=sample, **shortened),
    )


def _smaller_batches(train: TrainConfig) -> list[str]:
    if train.batch_size == "auto":
        return ["train.grad_accum=auto"] * (train.grad_accum != "auto")
    if train.grad_accum == "auto":
        return ["train.batch_size=1"] * (train.batch_size != 1)
    if train.batch_size == 1:
        return []
    # of three numbers that agree no one can change alone
    grad_accum = "auto"
    if train.derives_effective_batch:
        grad_accum = str(train.batch_size * train.grad_accum)
    return [f"train.batch_size=1 train.grad_accum={grad_accum}"]


def _apply_setting(config: RunConfig, setting: str) -> RunConfig:
    """The config with settings such as `train.batch_size=1`, which are known to be valid."""

    def replace_option(section: Any, name: str, *names: str) -> Any:
        new = replace_option(getattr(section, name), *names) if names else value
        return section.model_copy(update={name: new})

    for assignment in setting.split():
        path, _, text = assignment.partition("=")
        value: Any = {"true": True, "null": None}.get(text, text)
        if text.isdigit():
            value = int(text)
        config = replace_option(config, *path.split("."))
    return config


def _larger_machines(request: PlanRequest) -> Iterator[tuple[Hardware, str]]:
    """More RAM, more GPUs of the same kind, then the smallest larger GPU on which the unchanged job
    fits."""

    def lowest_on(machine: Hardware) -> Candidate | None:
        return lowest_memory_candidate(_request_on_machine(request, machine))

    hardware, count = request.hardware, len(request.hardware.gpus)
    if count and hardware.ram_given:
        machine = _machine_with_gpus(hardware, hardware.gpus[0], count)
        candidate = lowest_on(replace(machine, ram_given=False))
        if (
            candidate is not None
            and candidate.fits
            and candidate.host_required > hardware.ram_free_bytes
        ):
            ram_bytes = -(-candidate.host_required // RAM_STEP_BYTES) * RAM_STEP_BYTES
            machine = replace(machine, ram_bytes=ram_bytes, ram_free_bytes=ram_bytes)
            yield machine, f"{ram_bytes / GIB:.0f} GiB of RAM on each node"
    larger_counts = [gpu_count for gpu_count in GPU_COUNTS if gpu_count > count]
    # a machine without GPUs has no kind to take more of
    for gpu_count in larger_counts if count else []:
        machine = _machine_with_gpus(hardware, hardware.gpus[0], gpu_count)
        if _certainly_fits(lowest_on(machine)):
            yield machine, f"{gpu_count} of these GPUs"
            break
    present_memory = max((gpu.total_bytes for gpu in hardware.gpus), default=0)
    larger_gpus = [entry for entry in suggested_gpus() if entry.memory_bytes > present_memory]
    # each larger GPU as many times as there are now, then more of the largest
    trials = [(entry, max(1, count)) for entry in larger_gpus]
    trials += [(larger_gpus[-1], gpu_count) for gpu_count in larger_counts if larger_gpus]
    # capability and number: the largest memory that is known to be too small. A job's need depends
    # only on a GPU's capability, so that one that is too small rules out all that are not larger
    too_small_memory: dict[object, int] = {}
    for entry, gpu_count in trials:
        kind = (entry.capability, gpu_count)
        if entry.memory_bytes <= too_small_memory.get(kind, 0):
            continue
        named_machine = parse_hardware(f"1x{entry.name}")
        machine = replace(
            _machine_with_gpus(hardware, named_machine.gpus[0], gpu_count),
            link_bytes_per_s=named_machine.link_bytes_per_s,
        )
        candidate = lowest_on(machine)
        if _certainly_fits(candidate):
            yield machine, _hardware_name(machine).partition(",")[0]
            return
        too_small_memory[kind] = entry.memory_bytes
        if candidate is not None:
            too_small_memory[kind] = max(entry.memory_bytes, candidate.memory.required - 1)


def _certainly_fits(candidate: Candidate | None) -> bool:
    # unknown RAM does not count
    return candidate is not None and candidate.fits and not candidate.needs_unknown_ram


def _machine_with_gpus(hardware: Hardware, gpu: Gpu, count: int) -> Hardware:
    """The same machine with that many GPUs of one kind, on more nodes where its own have no room
    for eight or more."""
    # free_bytes None: what other processes hold on the present GPUs is not held there
    gpus = tuple(replace(gpu, index=index, free_bytes=None) for index in range(count))
    nodes = hardware.nodes
    if count != len(hardware.gpus):
        nodes = -(-count // max(GPUS_PER_NODE, hardware.ranks_per_node))
    return replace(
        hardware,
        gpus=gpus,
        nodes=nodes,
        named=True,
        ram_given=hardware.ram_given and bool(hardware.gpus),
    )


def _hardware_name(machine: Hardware) -> str:
    # as HARDWARE= takes it
    gpu = machine.gpus[0]
    name = gpu.name.removeprefix("NVIDIA ").removeprefix("AMD ").replace(" ", "")
    entry = next(iter(find_catalog_entries(name)), None)
    text = f"{machine.ranks_per_node}x{name}"
    if machine.nodes > 1:
        text = f"{machine.nodes}x{text}"
    if entry is None or abs(entry.memory_bytes - gpu.total_bytes) > 0.05 * gpu.total_bytes:
        text += f",mem={gpu.total_bytes >> 20}MiB"
    if machine.ram_given:
        text += f",ram={machine.ram_free_bytes >> 20}MiB"
    return text


# --------------------------------------------------------------------------------------------------
# The machine for a budget (`BUDGET`): where the run fits, its hours and what they cost, by dated
# public prices.
#
# Hours are those of each machine's own plan, as its page says them. A machine that would fit only
# with RAM that nobody said does not count.

# Machines that are listed; the JSON has all.
MAX_LISTED_MACHINES = 12


@dataclass(frozen=True)
class Offer:
    """A machine on which the run fits, with its hours, their cost in US dollars, and the source of
    the price: provider and day (None: the user gave it)."""

    machine: str
    usd_per_gpu_hour: float
    hours: float
    cost: float
    tokens_per_s: float
    # Share of the speed, and so of hours and cost; None where no published run of its kind was
    # compared.
    speed_error: float | None
    layout: str
    provider: str | None = None
    read: str | None = None
    address: str | None = None

    def __str__(self) -> str:
        error_text = "not compared with published runs"
        if self.speed_error is not None:
            error_text = f"±{self.speed_error:.0%}"
        place = f" at {self.provider}" * bool(self.provider)
        price_note = f", price of {self.read}" * bool(self.read)
        return (
            f"{self.machine}{place}: {format_duration(3600 * self.hours)},"
            f" {format_usd(self.cost)} USD ({self.usd_per_gpu_hour:g} a GPU-hour{price_note};"
            f" {self.layout}, about {self.tokens_per_s:,.0f} tokens/s, {error_text})"
        )


@dataclass(frozen=True)
class BudgetResult:
    """The answer to `BUDGET`: every machine that fits, the cheapest first, and those that do
    not."""

    usd: float
    offers: tuple[Offer, ...]
    too_small: tuple[str, ...]
    today: date
    # By what rows the hours are counted, in words.
    basis: str = ""

    @property
    def affordable_offers(self) -> list[Offer]:
        """The machines that cost no more than the budget, the cheapest first."""
        return [offer for offer in self.offers if offer.cost <= self.usd]

    @property
    def fastest(self) -> Offer | None:
        """The fastest within the budget, of equally fast ones the cheaper."""
        return min(
            self.affordable_offers, key=lambda offer: (offer.hours, offer.cost), default=None
        )

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        ages, affordable, fastest = self._price_ages_days(), self.affordable_offers, self.fastest
        return {
            "usd": self.usd,
            "cheapest": asdict(affordable[0]) if affordable else None,
            "fastest": asdict(fastest) if fastest else None,
            "machines": [
                {**asdict(offer), "within": offer.cost <= self.usd} for offer in self.offers
            ],
            "too_small": list(self.too_small),
            "price_ages_days": [*ages[:1], *ages[-1:]] or None,
        }

    def _price_ages_days(self) -> list[int]:
        return sorted(
            (self.today - date.fromisoformat(offer.read)).days
            for offer in self.offers
            if offer.read
        )

    def lines(self) -> list[str]:
        """Cheapest and fastest, the machines by cost, and the age of the prices."""
        budget_text, affordable = f"Budget {self.usd:,.2f} USD", self.affordable_offers
        if not self.offers:
            return [f"{budget_text}: the run fits on no machine with a known price"]
        lines = [f"{budget_text}: NO machine is within it; the cheapest is {self.offers[0]}"]
        if affordable:
            fastest_text = "the same" if self.fastest == affordable[0] else str(self.fastest)
            lines = [
                f"{budget_text}: the cheapest machine is {affordable[0]}",
                f"Fastest within it: {fastest_text}",
            ]
        if format_usd(self.offers[-1].cost) == format_usd(0):
            return [*lines, f"It fits on {len(self.offers)} machines, each under 0.01 USD (JSON=1)"]
        lines.append(f"Machines on which it fits, by cost{self.basis}:")
        for offer in self.offers[:MAX_LISTED_MACHINES]:
            lines.append(f"  {offer}{', above it' * (offer.cost > self.usd)}")
        if len(self.offers) > MAX_LISTED_MACHINES:
            lines.append(f"  and {len(self.offers) - MAX_LISTED_MACHINES} more (JSON=1 lists them)")
        if ages := self._price_ages_days():
            lines.append(f"Public list prices, read {ages[0]} days ago or more: look them up")
        return lines


def compare_machine_prices(
    usd: float,
    machines: Iterable[tuple[str, Hardware, PriceList | None]],
    *,
    make_machine_plan: Callable[[Hardware], Plan | None],
    today: date,
) -> BudgetResult:
    """Price the run on each machine: its name, the hardware, and the list that its price is from
    (None: the user's price). Machines on which the run fits come with the cheapest first;
    `make_machine_plan` gives None where a run certainly does not fit. Raises ConfigError: the run's
    length is not known.
    """
    offers, too_small, basis = [], [], ""
    for name, machine, price_list in machines:
        plan = None
        # such as a batch that does not split over that many GPUs
        with contextlib.suppress(SftPlayError):
            plan = make_machine_plan(machine)
        price = None if plan is None else plan.hardware.price_per_gpu_hour
        if (
            plan is None
            or not plan.fits
            or plan.choice.needs_unknown_ram  # then it does not certainly fit
            or not plan.speed_known
            or price is None
        ):
            too_small.append(name)
            continue
        if plan.run_length is None or plan.hours is None:
            raise ConfigError(
                "BUDGET needs the length of the run, which is not known: set train.max_steps"
                " (SET='train.max_steps=1000'), or data.train_path to one file whose rows can be"
                " counted"
            )
        # as the plan's page says them
        seconds, basis = estimate_duration(plan, plan.run_length)
        cost = seconds / 3600 * len(plan.hardware.gpus) * price
        offer = Offer(name, price, seconds / 3600, cost, plan.speed.tokens_per_s, None, plan.layout)
        if plan.speed_error is not None:
            offer = replace(offer, speed_error=plan.speed_error.share)
        if price_list is not None:
            offer = replace(
                offer,
                provider=price_list.provider,
                read=price_list.read.isoformat(),
                address=price_list.address,
            )
        offers.append(offer)
    offers.sort(key=lambda offer: (offer.cost, offer.hours))
    return BudgetResult(usd, tuple(offers), tuple(too_small), today, basis)


# --------------------------------------------------------------------------------------------------
# Questions about a plan: a grid of settings (`WHATIF`), and the longest sequence, the largest
# micro-batch or the largest known model that fits (`MAX`).
#
# Of `MAX` only what certainly fits counts: layouts that offload are considered only where the
# machine's RAM is known.

FitQuestion = Literal["seq_len", "batch", "model"]
QUESTIONS: tuple[FitQuestion, ...] = get_args(FitQuestion)
MAX_GRID_CELLS = 200
SEQ_LEN_STEP = 64
# Sequences longer than this many tokens, and batches of more rows, are not tried.
MAX_TRIED_SEQ_LEN, MAX_TRIED_ROWS = 1 << 24, 1 << 16
OFFLOAD_LEFT_OUT_NOTE = (
    "; layouts that offload are left out, because the RAM was not given (ram=512GiB)"
)


@dataclass(frozen=True)
class LargestFit:
    """The answer to `MAX`: None where not even the smallest fits."""

    question: FitQuestion
    value: int | str | None
    limited_by: str

    def __str__(self) -> str:
        if self.value is None:
            return f"Largest {self.question}: none fits ({self.limited_by})"
        return f"Largest {self.question} that fits: {self.value} ({self.limited_by})"


def parse_grid(assignments: Sequence[str], *, variable: str = "WHATIF") -> list[tuple[str, ...]]:
    """The overrides of each cell of `key=v1,v2 other=a,b`: every combination; `variable` names
    where they stand. Raises ConfigError for another form, or too many."""
    axes: dict[str, list[str]] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        values = _split_values(text)
        if not key or not equals or not all(values):
            raise ConfigError(
                f"{variable}: {one_line(assignment)!r} is not key=value,value; for example "
                f"{variable}='model.max_seq_len=2048,4096'"
            )
        if key in axes:
            raise ConfigError(
                f"{variable} names {one_line(key)} twice; give all of its values at once:"
                f" {one_line(key)}=1,2"
            )
        axes[key] = [f"{key}={value}" for value in values]
    count = math.prod(map(len, axes.values()))
    if count > MAX_GRID_CELLS:
        raise ConfigError(f"{variable} asks for {count} plans; ask for at most {MAX_GRID_CELLS}")
    return list(itertools.product(*axes.values()))


def _split_values(text: str) -> list[str]:
    """The text split at commas outside brackets, and outside quotes where a value begins with
    one."""
    values, depth, quote = [""], 0, ""
    for character in text:
        if character == quote:
            quote = ""
        elif not quote and character in "'\"" and not values[-1].strip():
            quote = character
        elif not quote:
            depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0 and not quote:
            values.append("")
        else:
            values[-1] += character
    return [value.strip() for value in values]


def parse_question(text: str) -> FitQuestion:
    """The question that `MAX` asks; raises ConfigError for anything else."""
    if text not in QUESTIONS:
        raise ConfigError(f"MAX={one_line(text)} is not one of {', '.join(QUESTIONS)}")
    return text


def largest_fitting_multiple(fits: Callable[[int], bool], *, step: int, limit: int) -> int | None:
    """The largest multiple of `step` up to `limit` that `fits`; None if `step` itself does not.
    Multiples below one that fits have to fit, too."""
    if fits(limit):
        return limit
    # double until one does not fit, then search between: a question costs a plan
    high = 1
    while high * step < limit and fits(high * step):
        high *= 2
    candidates = range(high // 2, min(high, -(-limit // step)))
    count = bisect.bisect_left(candidates[1:], True, key=lambda multiple: not fits(multiple * step))
    return candidates[count] * step or None


def find_largest_fit(question: FitQuestion, request: PlanRequest) -> LargestFit:
    """Find the largest that fits in any layout of `request.allowed_layouts`. What the config leaves
    open has the value that needs least memory: every layer checkpointed, one row a micro step.
    Raises ConfigError where no layout can run it."""
    if question == "model":
        return _find_largest_model(request)
    # weights that train in full may be bf16 where fp32 does not fit, as a plan would take them
    inputs = build_plan_inputs(request, fp32_master_weights=False)
    layouts = _layouts_with_known_ram(request)
    if not layouts:
        raise ConfigError(f"MAX={question}: {_no_layout_reason(request)}")
    micro_batch = _micro_batch_option(request.config)
    positions = request.shape.max_positions or MAX_TRIED_SEQ_LEN

    def fit(value: int) -> Candidate:
        if question == "batch":
            return _simplest_fit(inputs, layouts, value, inputs.seq_len)
        return _simplest_fit(inputs, layouts, micro_batch, value)

    step, limit = SEQ_LEN_STEP, positions
    if question == "batch":
        step, limit = 1, MAX_TRIED_ROWS
    value = largest_fitting_multiple(lambda tried: fit(tried).fits, step=step, limit=limit)
    outcome = _format_candidate(fit(value or step))
    if question == "batch":
        return LargestFit("batch", value, f"{inputs.seq_len} tokens a row, {outcome}")
    positions_note = f"the model's {positions} positions; " * (value == positions)
    return LargestFit("seq_len", value, f"{positions_note}micro-batch {micro_batch}, {outcome}")


def _layouts_with_known_ram(request: PlanRequest) -> tuple[Layout, ...]:
    config, shape, hardware = request.config, request.shape, request.hardware
    layouts, _ = find_layouts(config, shape, hardware, named=request.named_layout)
    if config.model.mesh_shape is None:
        layouts += context_parallel_layouts(config, shape, hardware)
    always_offloads = config.train.gradient_checkpointing == "offload" and bool(hardware.gpus)
    return tuple(
        layout
        for layout in layouts
        if layout.name in request.allowed_layouts
        and (
            hardware.ram_given
            or not (layout.offloads_states or layout.is_streamed or always_offloads)
        )
    )


def _no_layout_reason(request: PlanRequest) -> str:
    layout_names, ranks = ", ".join(request.allowed_layouts), request.hardware.ranks
    left_out_note = OFFLOAD_LEFT_OUT_NOTE * (not request.hardware.ram_given)
    return f"none of the layouts {layout_names} can run this job on {ranks} rank(s){left_out_note}"


def _micro_batch_option(config: RunConfig) -> int:
    return 1 if config.train.batch_size == "auto" else config.train.batch_size


def _simplest_fit(
    inputs: PlanInputs, layouts: tuple[Layout, ...], micro_batch: int, seq_len: int
) -> Candidate:
    """The simplest layout that fits, those that offload last; if none fits, the one closest to
    it."""
    inputs, checkpointed_layers = replace(inputs, seq_len=seq_len), most_checkpointed_layers(inputs)

    def layout_candidates() -> Iterator[Candidate]:
        for layout in layouts:
            step_rows = effective_batch(inputs.config.train, ranks=layout.data_parallel)
            grad_accum = max(1, step_rows // (micro_batch * layout.data_parallel))
            yield build_candidate(
                inputs,
                layout,
                BatchPlan(micro_batch, grad_accum, layout.data_parallel),
                checkpointed_layers,
                eval_rows=1,
            )

    return first_fitting(layout_candidates())


def _format_candidate(candidate: Candidate) -> str:
    leaves_out_offload = (
        candidate.step.on_gpu and candidate.budget.host is None and not candidate.fits
    )
    return (
        f"{candidate.layout.name} {candidate.verdict}{OFFLOAD_LEFT_OUT_NOTE * leaves_out_offload}"
    )


def _find_largest_model(request: PlanRequest) -> LargestFit:
    config, shapes = request.config, dict[int, ModelShape]()
    for name in KNOWN_MODELS:
        try:
            shape = configured_shape(config, load_model_shape(name))
            refuse_quantised(load_config_json(name), name=name, mode=config.tuning.mode)
            check_adapter_targets(config, shape)
            choose_precision(config, request.hardware, shape)
        except SftPlayError:
            # quantised weights, targets that it does not have, values beyond fp16's range
            continue
        if (shape.max_positions or MAX_TRIED_SEQ_LEN) >= config.model.max_seq_len:
            # models of the same size share a row: the first name stands
            shapes.setdefault(shape.params, shape)
    outcome = "no known model allows sequences of that length"
    for params in sorted(shapes, reverse=True):
        shape = shapes[params]
        model_request = replace(
            request, config=_apply_setting(config, f"model.name={shape.name}"), shape=shape
        )
        try:
            inputs = build_plan_inputs(model_request, fp32_master_weights=False)
            layouts = _layouts_with_known_ram(model_request)
        except ConfigError as error:  # the user's mesh cannot run it
            outcome = f"not {shape.name}: {error}"
            continue
        if not layouts:
            outcome = _no_layout_reason(model_request)
            continue
        candidate = _simplest_fit(inputs, layouts, _micro_batch_option(config), inputs.seq_len)
        outcome = _format_candidate(candidate)
        if candidate.fits:
            return LargestFit("model", shape.name, f"{params / 1e9:.1f} B parameters, {outcome}")
        outcome = f"not even {shape.name}: {outcome}"
    return LargestFit("model", None, outcome)
