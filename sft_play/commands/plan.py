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
from typing import Any

from sft_play.commands.answer import CommandResult
from sft_play.commands.lookups import requested_hardware
from sft_play.commands.request import Request, refuse_make_variables
from sft_play.config.load import LoadedConfig, load_config, split_overrides
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, DoesNotFit, SftPlayError, error_prefix, stage_context
from sft_play.files import relative_to_cwd
from sft_play.launch.deepspeed import keeps_params_on_gpu
from sft_play.launch.planning import (
    apply_deepspeed_batch,
    build_plan_request,
    common_layout,
    has_eval,
    plan_request,
    plan_run,
    read_deepspeed_config,
    refuse_impossible_strategy,
    training_backend,
)
from sft_play.launch.refusals import MAX_CPU_PARAMS, refusals
from sft_play.launch.row_survey import cached_row_tokens, count_row_tokens_if_quick
from sft_play.launch.run_hardware import mesh_hardware, restrict_to_device
from sft_play.log import escape_control
from sft_play.machine.gpu_catalog import Price, find_catalog_entries, load_prices, lowest_prices
from sft_play.machine.hardware import Hardware, parse_hardware
from sft_play.machine.network import DEFAULT_PORT
from sft_play.machine.software import missing_kernel_packages
from sft_play.planner import calibration, explain, what_if
from sft_play.planner.advice import BudgetResult, build_offer, compare_machine_prices, lowest_memory_candidate
from sft_play.planner.decide import PlanRequest
from sft_play.planner.explain import plan_summary_lines
from sft_play.planner.layout import LAYOUT_NAMES, LayoutName
from sft_play.planner.plan import Plan, require_fit
from sft_play.planner.what_if import FitQuestion, LargestFit, parse_grid, parse_question
from sft_play.trace.block_meter import load_run_model_shape

logger = logging.getLogger(__name__)

FIRST_NODE = "NODE0"


def run_plan(request: Request) -> CommandResult:
    """The plan of a run, of its longest stage where it has stages, with the cells of WHATIF and the answer to MAX."""
    # read first: a wrong word in WHATIF or MAX costs no planning
    cell_overrides, fit_question = _parse_whatif(request.whatif), parse_question(request.max) if request.max else None
    loaded = load_config(request.config, overrides=request.overrides)
    machine = restrict_to_device(loaded.config, requested_hardware(request))
    hardware = mesh_hardware(loaded.config, machine)
    configs = []
    for cell in cell_overrides:
        with error_prefix(f"WHATIF, {escape_control(' '.join(cell))}"):
            configs.append((cell, load_config(request.config, overrides=(*request.overrides, *cell)).longest_config))
    strategy, keeps_params, apply_deepspeed = _deepspeed_settings(request, hardware)
    loaded, configs = (
        _map_configs(loaded, apply_deepspeed),
        [(cell, apply_deepspeed(config)) for cell, config in configs],
    )
    layouts = (strategy,) if strategy else LAYOUT_NAMES
    base_config = loaded.config
    row_errors: list[SftPlayError] = []
    backend, missing_data_lines = (
        training_backend(base_config, hardware, layouts),
        count_row_tokens_if_quick(loaded, on_error=row_errors.append),
    )
    if backend is not None and backend.fallback_from:  # another one than was asked for
        missing_data_lines = [f"Backend: {backend.reason}", *missing_data_lines]
    budget = _request_budget(request, loaded, hardware, layouts)
    if budget is not None and not request.hardware and request.price is None:
        hardware = machine = cheapest_machine(budget) or hardware
    refuse_impossible_strategy(loaded.config, hardware, strategy)
    run = loaded
    stages = _stage_plans(loaded, hardware, strategy, trace=request.trace, keeps_params=keeps_params)
    if stages:
        # the stage that decides: one that does not fit, else the one with the longest rows
        name, config, plan = max(stages, key=lambda stage: (not stage[2].fits, stage[2].max_seq_len))
        loaded = dataclasses.replace(loaded, config=config, stage_name=name)
    else:
        plan = plan_run(loaded.config, hardware, layouts=layouts, trace=request.trace, keeps_params=keeps_params)
    cell_layouts = layouts if request.options.deepspeed else LAYOUT_NAMES
    plan_cell = functools.partial(plan_run, layouts=cell_layouts, keeps_params=keeps_params, include_suggestions=False)
    cells = [(cell, _plan_whatif_cell(cell, config, base_config, machine, plan_cell)) for cell, config in configs]
    largest = _answer_fit_question(fit_question, loaded.config, hardware, layouts) if fit_question else None
    data = _plan_data(plan, loaded, stages, cells)
    if largest is not None:
        data["max"] = dataclasses.asdict(largest)
    misfit, deepspeed_file = (
        _misfit_error(plan, loaded),
        request.options.deepspeed.file if request.options.deepspeed else None,
    )
    plans = [cell_plan for *_, cell_plan in stages] or [plan]
    errors = () if misfit else (*row_errors, *refusals(run, machine, needs_rows=False, plans=plans))
    refusal_texts = _warn_of_refusals(errors, machine)
    data |= {"refused_because": refusal_texts} if refusal_texts else {}
    data["precision_of"] = plan.parameters.shares() if plan.parameters else None
    data["launch"] = None if misfit or refusal_texts else launch_line(plan, loaded, deepspeed_file)
    lines = [
        *_plan_page(
            request,
            plan,
            loaded.config,
            missing_data_lines,
            data["launch"],
            _node_launch_lines(plan, loaded, deepspeed_file),
        ),
        *explain.stage_lines(stages),
        *explain.grid_lines(cells),
        *([what_if.largest_fit_line(largest)] if largest else []),
    ]
    if stages:
        stage_note = "the one with the longest rows" if plan.fits else "which does not fit"
        lines.insert(0, f"The plan of stage {loaded.stage_name}, {stage_note}:")
    if budget is not None:
        data["budget"] = budget.as_json()
        lines = [*budget.lines(), *([f"The plan on {budget.offers[0].machine}:"] if budget.offers else []), *lines]
        if misfit is None and not budget.cheapest:
            misfit = DoesNotFit(budget.lines()[0])  # no machine is within the budget: what the cheapest costs
    return CommandResult(data, lines, 0 if plan.fits and misfit is None else DoesNotFit.exit_code, misfit)


def _plan_data(
    plan: Plan,
    loaded: LoadedConfig,
    stages: Sequence[tuple[str, RunConfig, Plan]],
    cells: Sequence[tuple[tuple[str, ...], Plan]],
) -> dict[str, Any]:
    """The plan as JSON, with the plans of the other stages and of WHATIF's cells."""
    data = plan.as_json()
    if stages:
        data["stage"] = loaded.stage_name
        data["stages"] = [{"name": name, **stage_plan.as_json()} for name, _, stage_plan in stages]
    if cells:
        data["whatif"] = [{"settings": list(cell), **cell_plan.as_json()} for cell, cell_plan in cells]
    return data


def _warn_of_refusals(errors: Iterable[SftPlayError], machine: Hardware) -> list[str]:
    """Warn of each error for which a run would be refused on a machine; returns their texts."""
    texts = list(dict.fromkeys(map(str, errors)))
    for text in texts:
        logger.warning("a run%s would stop: %s", "" if machine.named else " here", text)
    return texts


def _deepspeed_settings(
    request: Request, hardware: Hardware
) -> tuple[LayoutName | None, bool, Callable[[RunConfig], RunConfig]]:
    """The layout that is asked for, whether DeepSpeed's file offloads only states, and settings with what it fixes."""
    deepspeed_request = request.options.deepspeed
    if deepspeed_request is None:
        return request.options.strategy, False, lambda config: config
    deepspeed_config, strategy, name = read_deepspeed_config(deepspeed_request, request.options.strategy)
    apply_deepspeed = functools.partial(
        apply_deepspeed_batch, deepspeed_config=deepspeed_config, ranks=hardware.ranks, name=name
    )
    return strategy, keeps_params_on_gpu(deepspeed_config, strategy), apply_deepspeed


def _map_configs(loaded: LoadedConfig, change_config: Callable[[RunConfig], RunConfig]) -> LoadedConfig:
    stages = tuple(dataclasses.replace(stage, config=change_config(stage.config)) for stage in loaded.stages)
    return dataclasses.replace(loaded, config=change_config(loaded.config), stages=stages)


def _request_budget(
    request: Request, loaded: LoadedConfig, hardware: Hardware, layouts: tuple[LayoutName, ...]
) -> BudgetResult | None:
    if request.budget is None:
        return None
    if loaded.stages:
        raise ConfigError("BUDGET is for a run without stages: its hours are those of one schedule")
    return make_budget(loaded.config, request.budget, hardware, layouts=layouts)


def _plan_page(
    request: Request,
    plan: Plan,
    config: RunConfig,
    missing_data_lines: Sequence[str],
    command: str | None,
    node_launch_lines: Sequence[str],
) -> Sequence[str]:
    if request.why:
        return [
            *missing_data_lines,
            *explain.plan_lines(plan, config, command=command, node_commands=node_launch_lines),
        ]
    start_lines = (node_launch_lines or [f"Start: {command}"]) if command is not None and plan.fits else []
    backend_lines = [line for line in missing_data_lines if line.startswith("Backend")]
    trace_reasons = [reason for reason in plan.reasons if "trace" in reason] if request.trace else []
    return [
        *backend_lines,
        *plan_summary_lines(plan, config, start_lines=start_lines, has_local_data=missing_data_lines == backend_lines),
        *trace_reasons,
    ]


def _misfit_error(plan: Plan, loaded: LoadedConfig) -> DoesNotFit | None:
    try:
        with stage_context(loaded.stage_name):
            require_fit(plan, loaded.config)
    except DoesNotFit as error:
        return error
    return None


def _parse_whatif(text: str | None) -> tuple[tuple[str, ...], ...]:
    if text is None:
        return ()
    try:
        settings = split_overrides(text)
    except ConfigError as error:
        raise ConfigError(str(error).replace("SET=", "WHATIF=", 1)) from None
    refuse_make_variables(settings)
    return tuple(parse_grid(settings))


def _stage_plans(
    loaded: LoadedConfig, hardware: Hardware, strategy: LayoutName | None, *, trace: bool, keeps_params: bool
) -> list[tuple[str, RunConfig, Plan]]:
    stages = loaded.stages
    if not stages:
        return []
    layouts = (strategy,) if strategy else LAYOUT_NAMES
    plan_requests = [build_plan_request(stage.config, hardware, layouts, is_stage=True) for stage in stages]
    layout = strategy or common_layout(plan_requests)
    plans = [
        plan_request(dataclasses.replace(request, allowed_layouts=(layout,), keeps_params=keeps_params), trace=trace)
        for request in plan_requests
    ]
    return [(stage.name, stage.config, plan) for stage, plan in zip(stages, plans, strict=True)]


def _plan_whatif_cell(
    cell: tuple[str, ...], config: RunConfig, base_config: RunConfig, machine: Hardware, make_plan: Callable[..., Plan]
) -> Plan:
    # the lengths of the base's rows for a cell that has the same ones, at whatever limit
    has_same_rows = (config.data, config.task_mode, config.model.name) == (
        base_config.data,
        base_config.task_mode,
        base_config.model.name,
    )
    with error_prefix(f"WHATIF, {escape_control(' '.join(cell))}"):
        return make_plan(
            config, mesh_hardware(config, machine), rows=cached_row_tokens(base_config) if has_same_rows else None
        )


def _answer_fit_question(
    fit_question: FitQuestion, config: RunConfig, hardware: Hardware, layouts: Sequence[LayoutName]
) -> LargestFit:
    from sft_play.planner.what_if import find_largest_fit

    measured_runs = [] if hardware.named else calibration.load_measured_runs()
    has_evaluation, missing_packages = has_eval(config), missing_kernel_packages()
    return find_largest_fit(
        fit_question,
        PlanRequest(
            config,
            load_run_model_shape(config),
            hardware,
            layouts,
            has_evaluation,
            measured_runs,
            missing_packages=missing_packages,
        ),
    )


def launch_line(plan: Plan, loaded: LoadedConfig, deepspeed_file: Path | None = None) -> str:
    """The command that starts the planned run, on the first of its nodes."""
    uses_ranks = plan.layout != "single"
    target = "train-deepspeed" if deepspeed_file else "train-distributed" if uses_ranks else "train"
    argv = ["make", target, f"CONFIG={loaded.path}"]
    if deepspeed_file:
        argv.append(f"DEEPSPEED_CONFIG={relative_to_cwd(deepspeed_file)}")
    elif uses_ranks:
        argv.append(f"STRATEGY={plan.layout}")
    if plan.hardware.nodes > 1:
        argv += [f"NNODES={plan.hardware.nodes}", "NODE_RANK=0", f"MASTER_ADDR={FIRST_NODE}"]
        argv.append(f"MASTER_PORT={DEFAULT_PORT}")
    overrides, is_large = loaded.overrides, plan.model_params > MAX_CPU_PARAMS
    if is_large and not plan.hardware.gpus and loaded.config.train.device == "auto":
        overrides = (*overrides, "train.device=cpu")  # a CPU that is only named: without it the run would be refused
    if overrides:
        # quoted only where a setting would be split
        needs_quotes = re.compile(r"""[\s'"\\]""").search
        settings = (shlex.quote(word) if needs_quotes(word) else word for word in overrides)
        argv.append(f"SET={' '.join(settings)}")
    return shlex.join(argv)


def _node_launch_lines(plan: Plan, loaded: LoadedConfig, deepspeed_file: Path | None) -> list[str]:
    nodes = plan.hardware.nodes
    if nodes == 1:
        return []
    return [
        f"Launch, with the address of node 0 for {FIRST_NODE} (under Slurm: sbatch --nodes={nodes} "
        f"scripts/train_slurm.sbatch {shlex.quote(str(loaded.path))}):",
        f"  on node 0: {launch_line(plan, loaded, deepspeed_file)}",
        f"  on the others: the same with NODE_RANK=1{f' to {nodes - 1}' if nodes > 2 else ''}",
    ]


# --- BUDGET: the machines that a run's money pays for, by their own plans and a dated price list ----------------------


def make_budget(
    config: RunConfig, budget_usd: float, requested_machine: Hardware, *, layouts: tuple[LayoutName, ...] = LAYOUT_NAMES
) -> BudgetResult:
    """The machines on which the run fits, with its hours and their cost. The user's own price (PRICE=, price=) holds
    for its machine, and no other is compared; without one the lowest of the list. Raises ConfigError where the run's
    length is not known, a price has no machine with GPUs, or the list has none for the machine that is named."""
    today = datetime.now(UTC).date()
    shape, has_evaluation = load_run_model_shape(config), has_eval(config)

    def plan_machine(machine: Hardware) -> Plan | None:
        best = lowest_memory_candidate(PlanRequest(config, shape, machine, layouts, has_evaluation))
        if best is None or not best.fits:
            return None
        return plan_run(config, machine, layouts=layouts, include_suggestions=False)

    if requested_machine.price_per_gpu_hour is None and not (requested_machine.named and requested_machine.gpus):
        return compare_machine_prices(budget_usd, lowest_prices(), make_machine_plan=plan_machine, today=today)
    if not requested_machine.gpus:
        raise ConfigError("BUDGET with PRICE= needs the machine that the price is for: HARDWARE=2xH200")
    name, listed_price = _machine_name(requested_machine), None
    if requested_machine.price_per_gpu_hour is None:
        # USD per GPU-hour
        listed_price = min(_listed_prices(requested_machine), key=lambda price: price.usd, default=None)
        if listed_price is None:
            raise ConfigError(
                f"BUDGET: the price list has no {name}; give its price (PRICE=2.5, or price=2.5 in HARDWARE), or leave "
                "HARDWARE out to weigh every machine of the list"
            )
        requested_machine = dataclasses.replace(requested_machine, price_per_gpu_hour=listed_price.usd)
    requested_plan = plan_machine(requested_machine)
    offer = None if requested_plan is None else build_offer(name, requested_plan)
    if offer is None:
        return BudgetResult(budget_usd, (), (name,), today)
    if listed_price is not None:
        price_source = listed_price.price_list
        offer = dataclasses.replace(
            offer, provider=price_source.provider, read=price_source.read.isoformat(), address=price_source.address
        )
    return BudgetResult(budget_usd, (offer,), (), today)


def cheapest_machine(budget: BudgetResult) -> Hardware | None:
    """The cheapest machine on which the run fits, within the budget or not, with its price; None if it fits none."""
    if not budget.offers:
        return None
    cheapest_offer = budget.offers[0]
    return dataclasses.replace(
        parse_hardware(cheapest_offer.machine), price_per_gpu_hour=cheapest_offer.usd_per_gpu_hour
    )


def _listed_prices(machine: Hardware) -> Iterator[Price]:
    entry = next(iter(find_catalog_entries(machine.gpus[0].name)), None)
    if entry is not None:
        yield from (
            price for price in load_prices() if price.gpu == entry.name and machine.ranks_per_node in price.gpu_counts
        )


def _machine_name(machine: Hardware) -> str:
    gpu = machine.gpus[0].name.removeprefix("NVIDIA ").removeprefix("AMD ")
    nodes = f"{machine.nodes}x" if machine.nodes > 1 else ""
    return f"{nodes}{machine.ranks_per_node}x{gpu}"
