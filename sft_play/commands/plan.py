"""`plan`: memory, speed, layout and batch of a run, with the reasons, before anything loads."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from sft_play.commands.answer import Answer
from sft_play.commands.request import Request, asked_machine, refuse_variables
from sft_play.config.load import LoadedConfig, load_config, split_overrides
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, DoesNotFit, SftPlayError, about, in_stage
from sft_play.facts.gpus.gpu_catalog import Price, load_prices, lowest_prices, find_gpus
from sft_play.facts.hardware import Hardware, parse_hardware
from sft_play.facts.installed import missing_kernel_packages
from sft_play.facts.network import DEFAULT_PORT
from sft_play.files import relative_to_cwd
from sft_play.launch.deepspeed.files import keeps_params_on_gpu
from sft_play.launch.launch_options import mesh_hardware
from sft_play.launch.machine import MAX_CPU_PARAMS, restrict_to_device
from sft_play.log import escape_control
from sft_play.planner import calibration, plan_details
from sft_play.planner.advice.budget import BudgetResult, build_offer, compare_machine_prices
from sft_play.planner.advice.suggestions import lowest_memory_candidate
from sft_play.planner.advice.what_if import LargestFit, Question, parse_grid, parse_question
from sft_play.planner.layout import LAYOUT_NAMES, LayoutName
from sft_play.planner.plan import Plan, PlanRequest, require_fit
from sft_play.planner.plan_summary import plan_summary_lines
from sft_play.starting.plan_run import has_eval, plan_run, load_model_shape, training_backend
from sft_play.starting.plan_stages import apply_deepspeed_batch, common_layout, read_deepspeed_config, refuse_impossible_strategy
from sft_play.starting.refusals import refusals
from sft_play.starting.row_survey import count_row_tokens_if_quick, cached_row_tokens

logger = logging.getLogger(__name__)

FIRST_NODE = "NODE0"


def run(request: Request) -> Answer:
    """The plan of a run, of its longest stage where it has stages, with the cells of WHATIF and the answer to MAX."""
    # read first: a wrong word in WHATIF or MAX costs no planning
    asked_cells, asked_largest = _cells(request.whatif), parse_question(request.max) if request.max else None
    loaded = load_config(request.config, overrides=request.overrides)
    whole = restrict_to_device(loaded.config, asked_machine(request))
    hardware = mesh_hardware(loaded.config, whole)
    configs = []
    for cell in asked_cells:
        with about(f"WHATIF, {escape_control(' '.join(cell))}"):
            configs.append((cell, load_config(request.config, overrides=(*request.overrides, *cell)).longest))
    strategy, keeps, says = _as_deepspeed_says(request, hardware)
    loaded, configs = _with(loaded, says), [(cell, says(config)) for cell, config in configs]
    only = (strategy,) if strategy else LAYOUT_NAMES
    base = loaded.config
    unusable: list[SftPlayError] = []
    backend, absent = training_backend(base, hardware, only), count_row_tokens_if_quick(loaded, on_error=unusable.append)
    if backend is not None and backend.fallback_from:  # another one than was asked for
        absent = [f"Backend: {backend.reason}", *absent]
    budget = _budget(request, loaded, hardware, only)
    if budget is not None and not request.hardware and request.price is None:
        hardware = whole = cheapest_machine(budget) or hardware
    refuse_impossible_strategy(loaded.config, hardware, strategy)
    whole_run = loaded
    stages = _stage_plans(loaded, hardware, strategy, trace=request.trace, keeps_params=keeps)
    if stages:
        # the stage that decides: one that does not fit, else the one with the longest rows
        name, config, plan = max(stages, key=lambda stage: (not stage[2].fits, stage[2].max_seq_len))
        loaded = dataclasses.replace(loaded, config=config, stage=name)
    else:
        plan = plan_run(loaded.config, hardware, layouts=only, trace=request.trace, keeps_params=keeps)
    cell_only = only if request.options.deepspeed else LAYOUT_NAMES
    plan_cell = functools.partial(plan_run, layouts=cell_only, keeps_params=keeps, include_suggestions=False)
    cells = [(cell, _planned_cell(cell, config, base, whole, plan_cell)) for cell, config in configs]
    largest = _largest(asked_largest, loaded.config, hardware, only) if asked_largest else None
    data = plan.as_json()
    if stages:
        data |= {"stage": loaded.stage, "stages": [{"name": name, **one.as_json()} for name, _, one in stages]}
    if cells:
        data["whatif"] = [{"settings": list(cell), **one.as_json()} for cell, one in cells]
    if largest is not None:
        data["max"] = dataclasses.asdict(largest)
    refused, file = _refused(plan, loaded), request.options.deepspeed.file if request.options.deepspeed else None
    plans = [one for *_, one in stages] or [plan]
    errors = () if refused else (*unusable, *refusals(whole_run, whole, needs_rows=False, plans=plans))
    because = _warn_of_refusals(errors, whole)
    data |= {"refused_because": because} if because else {}
    data["precision_of"] = plan.parameters.shares() if plan.parameters else None
    data["launch"] = None if refused or because else launch_line(plan, loaded, file)
    lines = [
        *_page(request, plan, loaded.config, absent, data["launch"], _launches_by_node(plan, loaded, file)),
        *plan_details.stage_lines(stages),
        *plan_details.grid_lines(cells),
        *([plan_details.largest_line(largest)] if largest else []),
    ]
    if stages:
        why = "the one with the longest rows" if plan.fits else "which does not fit"
        lines.insert(0, f"The plan of stage {loaded.stage}, {why}:")
    if budget is not None:
        data["budget"] = budget.as_json()
        lines = [*budget.lines(), *([f"The plan on {budget.offers[0].machine}:"] if budget.offers else []), *lines]
        if refused is None and not budget.cheapest:
            refused = DoesNotFit(budget.lines()[0])  # no machine is within the budget: what the cheapest costs
    return Answer(data, lines, 0 if plan.fits and refused is None else DoesNotFit.exit_code, refused)


def _warn_of_refusals(errors: Iterable[SftPlayError], machine: Hardware) -> list[str]:
    """Warn of each error for which a run would be refused on a machine; returns their texts."""
    texts = list(dict.fromkeys(map(str, errors)))
    for text in texts:
        logger.warning("a run%s would stop: %s", "" if machine.named else " here", text)
    return texts


def _as_deepspeed_says(
    request: Request, hardware: Hardware
) -> tuple[LayoutName | None, bool, Callable[[RunConfig], RunConfig]]:
    """The layout that is asked for, whether DeepSpeed's file offloads only states, and settings with what it fixes."""
    asked = request.options.deepspeed
    if asked is None:
        return request.options.strategy, False, lambda config: config
    raw, strategy, name = read_deepspeed_config(asked, request.options.strategy)
    says = functools.partial(apply_deepspeed_batch, deepspeed_config=raw, ranks=hardware.ranks, name=name)
    return strategy, keeps_params_on_gpu(raw, strategy), says


def _with(loaded: LoadedConfig, says: Callable[[RunConfig], RunConfig]) -> LoadedConfig:
    stages = tuple(dataclasses.replace(stage, config=says(stage.config)) for stage in loaded.stages)
    return dataclasses.replace(loaded, config=says(loaded.config), stages=stages)


def _budget(request: Request, loaded: LoadedConfig, hardware: Hardware, only: tuple[LayoutName, ...]) -> BudgetResult | None:
    if request.budget is None:
        return None
    if loaded.stages:
        raise ConfigError("BUDGET is for a run without stages: its hours are those of one schedule")
    return budget_for(loaded.config, request.budget, hardware, only=only)


def _page(
    request: Request, plan: Plan, config: RunConfig, absent: Sequence[str], command: str | None, by_node: Sequence[str]
) -> Sequence[str]:
    if request.why:
        return [*absent, *plan_details.plan_lines(plan, config, command=command, node_commands=by_node)]
    start = (by_node or [f"Start: {command}"]) if command is not None and plan.fits else []
    fallback = [line for line in absent if line.startswith("Backend")]
    traced = [reason for reason in plan.reasons if "trace" in reason] if request.trace else []
    return [*fallback, *plan_summary_lines(plan, config, start_lines=start, has_local_data=absent == fallback), *traced]


def _refused(plan: Plan, loaded: LoadedConfig) -> DoesNotFit | None:
    try:
        with in_stage(loaded.stage):
            require_fit(plan, loaded.config)
    except DoesNotFit as error:
        return error
    return None


def _cells(text: str | None) -> tuple[tuple[str, ...], ...]:
    if text is None:
        return ()
    try:
        words = split_overrides(text)
    except ConfigError as error:
        raise ConfigError(str(error).replace("SET=", "WHATIF=", 1)) from None
    refuse_variables(words)
    return tuple(parse_grid(words))


def _stage_plans(
    loaded: LoadedConfig, hardware: Hardware, strategy: LayoutName | None, *, trace: bool, keeps_params: bool
) -> list[tuple[str, RunConfig, Plan]]:
    stages = loaded.stages
    if not stages:
        return []
    only = (strategy,) if strategy else LAYOUT_NAMES
    common = strategy or common_layout([stage.config for stage in stages], hardware, only=only)
    plan = functools.partial(plan_run, hardware=hardware, layouts=(common,), trace=trace, keeps_params=keeps_params)
    return [(stage.name, stage.config, plan(stage.config)) for stage in stages]


def _planned_cell(
    cell: tuple[str, ...], config: RunConfig, base: RunConfig, whole: Hardware, plan: Callable[..., Plan]
) -> Plan:
    # the lengths of the base's rows for a cell that has the same ones, at whatever limit
    is_same = (config.data, config.task_mode, config.model.name) == (base.data, base.task_mode, base.model.name)
    with about(f"WHATIF, {escape_control(' '.join(cell))}"):
        return plan(config, mesh_hardware(config, whole), rows=cached_row_tokens(base) if is_same else None)


def _largest(asked: Question, config: RunConfig, hardware: Hardware, only: Sequence[LayoutName]) -> LargestFit:
    from sft_play.planner.advice.what_if import find_largest_fit

    earlier = [] if hardware.named else calibration.load_measured_runs()
    evaluates, without = has_eval(config), missing_kernel_packages()
    return find_largest_fit(
        asked, PlanRequest(config, load_model_shape(config), hardware, only, evaluates, earlier, missing_packages=without)
    )


def launch_line(plan: Plan, loaded: LoadedConfig, deepspeed: Path | None = None) -> str:
    """The command that starts the planned run, on the first of its nodes."""
    spreads = plan.layout != "single"
    verb = "train-deepspeed" if deepspeed else "train-distributed" if spreads else "train"
    words = ["make", verb, f"CONFIG={loaded.path}"]
    if deepspeed:
        words.append(f"DEEPSPEED_CONFIG={relative_to_cwd(deepspeed)}")
    elif spreads:
        words.append(f"STRATEGY={plan.layout}")
    if plan.hardware.nodes > 1:
        words += [f"NNODES={plan.hardware.nodes}", "NODE_RANK=0", f"MASTER_ADDR={FIRST_NODE}"]
        words.append(f"MASTER_PORT={DEFAULT_PORT}")
    overrides, is_large = loaded.overrides, plan.model_params > MAX_CPU_PARAMS
    if is_large and not plan.hardware.gpus and loaded.config.train.device == "auto":
        overrides = (*overrides, "train.device=cpu")  # a CPU that is only named: without it the run would be refused
    if overrides:
        # quoted only where a setting would be split
        is_split = re.compile(r"""[\s'"\\]""").search
        settings = (shlex.quote(word) if is_split(word) else word for word in overrides)
        words.append(f"SET={' '.join(settings)}")
    return shlex.join(words)


def _launches_by_node(plan: Plan, loaded: LoadedConfig, deepspeed: Path | None) -> list[str]:
    nodes = plan.hardware.nodes
    if nodes == 1:
        return []
    return [
        f"Launch, with the address of node 0 for {FIRST_NODE} (under Slurm: sbatch --nodes={nodes} "
        f"scripts/train_slurm.sbatch {shlex.quote(str(loaded.path))}):",
        f"  on node 0: {launch_line(plan, loaded, deepspeed)}",
        f"  on the others: the same with NODE_RANK=1{f' to {nodes - 1}' if nodes > 2 else ''}",
    ]


# --- BUDGET: the machines that a run's money pays for, by their own plans and a dated price list ----------------------


def budget_for(
    config: RunConfig, usd: float, asked: Hardware, *, only: tuple[LayoutName, ...] = LAYOUT_NAMES
) -> BudgetResult:
    """The machines on which the run fits, with its hours and their cost. The user's own price (PRICE=, price=) holds
    for its machine, and no other is compared; without one the lowest of the list. Raises ConfigError where the run's
    length is not known, a price has no machine with GPUs, or the list has none for the machine that is named."""
    today = datetime.now(UTC).date()
    shape, evaluates = load_model_shape(config), has_eval(config)

    def plan(machine: Hardware) -> Plan | None:
        best = lowest_memory_candidate(PlanRequest(config, shape, machine, only, evaluates))
        if best is None or not best.fits:
            return None
        return plan_run(config, machine, layouts=only, include_suggestions=False)

    if asked.price_per_gpu_hour is None and not (asked.named and asked.gpus):
        return compare_machine_prices(usd, lowest_prices(), make_machine_plan=plan, today=today)
    if not asked.gpus:
        raise ConfigError("BUDGET with PRICE= needs the machine that the price is for: HARDWARE=2xH200")
    name, listed = _machine_name(asked), None
    if asked.price_per_gpu_hour is None:
        listed = min(_prices_of(asked), key=lambda one: one.usd, default=None)  # USD per GPU-hour
        if listed is None:
            raise ConfigError(
                f"BUDGET: the price list has no {name}; give its price (PRICE=2.5, or price=2.5 in HARDWARE), or leave "
                "HARDWARE out to weigh every machine of the list"
            )
        asked = dataclasses.replace(asked, price_per_gpu_hour=listed.usd)
    made = plan(asked)
    offer = None if made is None else build_offer(name, made)
    if offer is None:
        return BudgetResult(usd, (), (name,), today)
    if listed is not None:
        of = listed.price_list
        offer = dataclasses.replace(offer, provider=of.provider, read=of.read.isoformat(), address=of.address)
    return BudgetResult(usd, (offer,), (), today)


def cheapest_machine(budget: BudgetResult) -> Hardware | None:
    """The cheapest machine on which the run fits, within the budget or not, with its price; None if it fits none."""
    if not budget.offers:
        return None
    first = budget.offers[0]
    return dataclasses.replace(parse_hardware(first.machine), price_per_gpu_hour=first.usd_per_gpu_hour)


def _prices_of(machine: Hardware) -> Iterator[Price]:
    entry = next(iter(find_gpus(machine.gpus[0].name)), None)
    if entry is not None:
        yield from (one for one in load_prices() if one.gpu == entry.name and machine.gpus_per_node in one.gpu_counts)


def _machine_name(machine: Hardware) -> str:
    gpu = machine.gpus[0].name.removeprefix("NVIDIA ").removeprefix("AMD ")
    nodes = f"{machine.nodes}x" if machine.nodes > 1 else ""
    return f"{nodes}{machine.gpus_per_node}x{gpu}"
