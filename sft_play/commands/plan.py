"""`plan`: memory, speed, layout and batch of a run, with the reasons, before anything loads."""

import dataclasses
import functools
import json
import logging
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sft_play.commands.request import (
    CommandResult,
    Request,
    refuse_make_variables,
    requested_hardware,
)
from sft_play.config.load import LoadedConfig, load_config, split_overrides
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, DoesNotFit, SftPlayError, error_prefix, stage_context
from sft_play.files import relative_to_cwd
from sft_play.launch.deepspeed import apply_deepspeed_batch, keeps_params_on_gpu
from sft_play.launch.planning import (
    MAX_CPU_PARAMS,
    build_plan_request,
    common_layout,
    plan_request,
    plan_run,
    read_deepspeed_config,
    refusals,
    refuse_impossible_strategy,
    training_backend,
)
from sft_play.launch.row_survey import cached_row_tokens, count_row_tokens_if_quick
from sft_play.launch.run_hardware import mesh_hardware, restrict_to_device
from sft_play.log import escape_control, one_line
from sft_play.machine.gpu_catalog import PriceList, find_catalog_entries, load_prices, lowest_prices
from sft_play.machine.hardware import Hardware, parse_hardware
from sft_play.machine.network import DEFAULT_PORT
from sft_play.planner import explain
from sft_play.planner.advice import (
    BudgetResult,
    LargestFit,
    compare_machine_prices,
    find_largest_fit,
    lowest_memory_candidate,
    parse_grid,
    parse_question,
)
from sft_play.planner.layout import LAYOUT_NAMES, LayoutName
from sft_play.planner.plan import Plan, require_fit
from sft_play.process.waiting import report_each
from sft_play.variables import spell_commands

logger = logging.getLogger(__name__)

FIRST_NODE = "NODE0"


def run_plan(request: Request) -> CommandResult:
    """Plan a run, or its longest stage, with the cells of WHATIF and the answers to MAX and BUDGET.
    Exit code 3 if it does not fit, or no machine is within the budget."""
    # read first: a wrong word in MAX or WHATIF costs no planning
    fit_question = parse_question(request.max) if request.max else None
    run = _load_run(request)
    configs = _load_whatif_configs(request)
    machine = restrict_to_device(run.config, requested_hardware(request))
    hardware = mesh_hardware(run.config, machine)
    strategy, keeps_params, apply_deepspeed = _deepspeed_settings(request, hardware)
    fixed_stages = tuple(
        dataclasses.replace(stage, config=apply_deepspeed(stage.config)) for stage in run.stages
    )
    run = dataclasses.replace(run, config=apply_deepspeed(run.config), stages=fixed_stages)
    configs = [(cell, apply_deepspeed(config)) for cell, config in configs]
    layouts = (strategy,) if strategy else LAYOUT_NAMES
    row_errors: list[SftPlayError] = []
    backend = training_backend(run.config, hardware, layouts)
    missing_data_lines = count_row_tokens_if_quick(run, on_error=row_errors.append)
    backend_lines = []
    if backend is not None and backend.fallback_from:  # another one than was asked for
        backend_lines = [f"Backend: {backend.reason}"]
    budget: BudgetResult | None = None
    machine_text = request.hardware or ""
    if request.budget is not None:
        if run.stages:
            raise ConfigError(
                "BUDGET is for a run without stages: its hours are those of one schedule"
            )
        budget = make_budget(run.config, request.budget, hardware, layouts=layouts)
    if budget is not None and budget.offers and not request.hardware and request.price is None:
        cheapest = budget.offers[0]  # within the budget or not
        machine_text = cheapest.machine
        hardware = machine = dataclasses.replace(
            parse_hardware(machine_text), price_per_gpu_hour=cheapest.usd_per_gpu_hour
        )
    refuse_impossible_strategy(run.config, hardware, strategy)
    parts = _plan_parts(run, hardware, layouts, trace=request.trace, keeps_params=keeps_params)
    # the stage that decides: one that does not fit, else the one with the longest rows
    name, config, plan = max(parts, key=lambda part: (not part[2].fits, part[2].max_seq_len))
    cells = _plan_whatif_cells(
        configs,
        run.config,
        machine,
        layouts if request.options.deepspeed else LAYOUT_NAMES,
        keeps_params=keeps_params,
    )
    largest = None
    if fit_question:  # of rows of any length
        fit_request = build_plan_request(config, hardware, layouts)
        largest = find_largest_fit(fit_question, dataclasses.replace(fit_request, row_tokens=None))
    misfit = _misfit_error(plan, config, name)
    refusal_texts: list[str] = []
    if misfit is None:
        refusal_texts = _refusal_texts(run, machine, [part[2] for part in parts], row_errors)
    command, node_lines = None, list[str]()
    if request.model:
        missing_data_lines.clear()
    if misfit is None and not refusal_texts:
        command, node_lines = _start_commands(request, plan, run, machine_text)
    stages = parts if run.stages else []
    data = _plan_json(plan, name, stages, cells, largest, refusal_texts, command)
    lines = _plan_page(
        request, plan, config, backend_lines, missing_data_lines, command, node_lines
    )
    lines += [*explain.stage_lines(stages), *explain.grid_lines(cells)]
    lines += [str(largest)] if largest else []
    if stages:
        stage_note = "the one with the longest rows" if plan.fits else "which does not fit"
        lines.insert(0, f"The plan of stage {name}, {stage_note}:")
    if budget is not None:
        data["budget"] = budget.as_json()
        machine_lines = [f"The plan on {offer.machine}:" for offer in budget.offers[:1]]
        lines = [*budget.lines(), *machine_lines, *lines]
        if misfit is None and not budget.affordable_offers:
            # no machine is within the budget: what the cheapest costs
            misfit = DoesNotFit(budget.lines()[0])
    return CommandResult(
        data, lines, 0 if plan.fits and misfit is None else DoesNotFit.exit_code, misfit
    )


def _load_run(request: Request, settings: Sequence[str] = ()) -> LoadedConfig:
    """Read the run YAML, or make one of default settings for MODEL; `settings` are added to those
    of the request."""
    path, text = request.config, None
    if request.model and request.is_config_given:
        raise ConfigError(
            f"MODEL={one_line(request.model)} and CONFIG={one_line(str(path))} are both given: a"
            " plan is of a run YAML, or of a model with default settings; leave one of them out"
        )
    if request.model:
        path, text = Path(f"MODEL={request.model}"), f"model: {{name: {json.dumps(request.model)}}}"
    return load_config(path, overrides=(*request.overrides, *settings), text=text)


def _start_commands(
    request: Request, plan: Plan, run: LoadedConfig, machine: str
) -> tuple[str | None, list[str]]:
    """Return the command that starts the run, and the lines that stand for it: over several nodes
    one for each, and after a plan of MODEL the command that writes a run YAML. `machine`: its
    name in HARDWARE."""
    if request.model:
        words = ["make", "new", f"MODEL={request.model}", "DATA=my.jsonl"]
        words += [f"HARDWARE={request.hardware}"] if request.hardware else []
        return None, [spell_commands(f"Next, with your rows: {shlex.join(words)}")]
    deepspeed = request.options.deepspeed
    command = launch_line(plan, run, deepspeed.file if deepspeed else None)
    return command, _node_launch_lines(plan, command, machine)


def _load_whatif_configs(request: Request) -> list[tuple[tuple[str, ...], RunConfig]]:
    """Read the cells of WHATIF: the settings of each, and its config, with stages the one with the
    longest rows."""
    if request.whatif is None:
        return []
    try:
        settings = split_overrides(request.whatif)
    except ConfigError as error:
        raise ConfigError(str(error).replace("SET=", "WHATIF=", 1)) from None
    refuse_make_variables(settings)
    configs = []
    for cell in parse_grid(settings):
        with error_prefix(f"WHATIF, {escape_control(' '.join(cell))}"):
            loaded = _load_run(request, cell)
        configs.append((cell, loaded.longest_config))
    return configs


def _refusal_texts(
    run: LoadedConfig, machine: Hardware, plans: list[Plan], row_errors: list[SftPlayError]
) -> list[str]:
    """Warn of everything that would stop a run that fits. Returns the texts, each once."""
    errors = [*row_errors, *refusals(run, machine, needs_rows=False, plans=plans)]
    texts = list(dict.fromkeys(map(str, errors)))
    for text in texts:
        logger.warning("a run%s would stop: %s", "" if machine.named else " here", text)
    return texts


def _plan_json(
    plan: Plan,
    stage_name: str | None,
    stages: list[tuple[str | None, RunConfig, Plan]],
    cells: list[tuple[tuple[str, ...], Plan]],
    largest: LargestFit | None,
    refusal_texts: list[str],
    command: str | None,
) -> dict[str, Any]:
    data = plan.as_json()
    if stages:
        data["stage"] = stage_name
        data["stages"] = [{"name": name, **stage.as_json()} for name, _, stage in stages]
    if cells:
        data["whatif"] = [{"settings": list(cell), **one.as_json()} for cell, one in cells]
    if largest is not None:
        data["max"] = dataclasses.asdict(largest)
    if refusal_texts:
        data["refused_because"] = refusal_texts
    data["precision_of"] = plan.parameters.shares() if plan.parameters else None
    data["launch"] = command
    return data


def _deepspeed_settings(
    request: Request, hardware: Hardware
) -> tuple[LayoutName | None, bool, Callable[[RunConfig], RunConfig]]:
    """Read DeepSpeed's file, where there is one. Returns the layout that is asked for (None: any),
    True if the file offloads states but no parameters, and a function that gives a config what the
    file fixes."""
    if request.options.deepspeed is None:
        return request.options.strategy, False, lambda config: config
    deepspeed_config, strategy, name = read_deepspeed_config(
        request.options.deepspeed, request.options.strategy
    )
    apply_deepspeed = functools.partial(
        apply_deepspeed_batch, deepspeed_config=deepspeed_config, ranks=hardware.ranks, name=name
    )
    return strategy, keeps_params_on_gpu(deepspeed_config, strategy), apply_deepspeed


def _plan_page(
    request: Request,
    plan: Plan,
    config: RunConfig,
    backend_lines: list[str],
    missing_data_lines: list[str],
    command: str | None,
    node_lines: list[str],
) -> list[str]:
    if request.why:
        return [
            *backend_lines,
            *missing_data_lines,
            *explain.plan_lines(plan, config, command=command, node_commands=node_lines),
        ]
    start_lines = []
    if plan.fits and (command is not None or node_lines):
        start_lines = node_lines or [f"Start: {command}"]
    summary = explain.plan_summary_lines(
        plan,
        config,
        start_lines=start_lines,
        has_local_data=not (missing_data_lines or request.model),
    )
    if request.trace:
        summary += [reason for reason in plan.reasons if "trace" in reason]
    return [*backend_lines, *summary]


def _misfit_error(plan: Plan, config: RunConfig, stage_name: str | None) -> DoesNotFit | None:
    try:
        with stage_context(stage_name):
            require_fit(plan, config)
    except DoesNotFit as error:
        return error
    return None


def _plan_parts(
    run: LoadedConfig,
    hardware: Hardware,
    layouts: tuple[LayoutName, ...],
    *,
    trace: bool,
    keeps_params: bool,
) -> list[tuple[str | None, RunConfig, Plan]]:
    """Plan a run, or each of its stages, all in one layout. Returns the stage's name (None: the
    run), the config and the plan of each."""
    requests = [
        build_plan_request(part.config, hardware, layouts, is_stage=bool(run.stages))
        for part in run.runs
    ]
    if run.stages and len(layouts) > 1:
        layouts = (common_layout(requests),)
    return [
        (
            part.stage_name,
            part.config,
            plan_request(
                dataclasses.replace(request, allowed_layouts=layouts, keeps_params=keeps_params),
                trace=trace,
            ),
        )
        for part, request in zip(run.runs, requests, strict=True)
    ]


def _plan_whatif_cells(
    configs: list[tuple[tuple[str, ...], RunConfig]],
    base_config: RunConfig,
    machine: Hardware,
    layouts: tuple[LayoutName, ...],
    *,
    keeps_params: bool,
) -> list[tuple[tuple[str, ...], Plan]]:
    cells = []
    for cell, config in report_each("Planning", configs, unit="cells", count=len(configs)):
        # the lengths of the base's rows for a cell that has the same ones, at whatever limit
        keys = [(one.data, one.task_mode, one.model.name) for one in (config, base_config)]
        with error_prefix(f"WHATIF, {escape_control(' '.join(cell))}"):
            plan = plan_run(
                config,
                mesh_hardware(config, machine),
                layouts=layouts,
                keeps_params=keeps_params,
                include_suggestions=False,
                rows=cached_row_tokens(base_config) if keys[0] == keys[1] else None,
            )
        cells.append((cell, plan))
    return cells


def launch_line(plan: Plan, loaded: LoadedConfig, deepspeed_file: Path | None = None) -> str:
    """Return the command that starts the planned run, on the first of its nodes."""
    target, words = "train", list[str]()
    if deepspeed_file:
        target, words = "train-deepspeed", [f"DEEPSPEED_CONFIG={relative_to_cwd(deepspeed_file)}"]
    elif not plan.choice.layout.is_one_process:
        target, words = "train-distributed", [f"STRATEGY={plan.layout}"]
    argv = ["make", target, f"CONFIG={loaded.path}", *words]
    if plan.hardware.nodes > 1:
        argv += [f"NNODES={plan.hardware.nodes}", "NODE_RANK=0", f"MASTER_ADDR={FIRST_NODE}"]
        argv.append(f"MASTER_PORT={DEFAULT_PORT}")
    overrides, is_large = loaded.overrides, plan.model_params > MAX_CPU_PARAMS
    if is_large and not plan.hardware.gpus and loaded.config.train.device == "auto":
        # a CPU that is only named: without it the run would be refused
        overrides = (*overrides, "train.device=cpu")
    if overrides:
        # quoted only where a setting would be split
        settings = [
            shlex.quote(word) if re.search(r"""[\s'"\\]""", word) else word for word in overrides
        ]
        argv.append(f"SET={' '.join(settings)}")
    return spell_commands(shlex.join(argv))


def _node_launch_lines(plan: Plan, command: str, machine: str) -> list[str]:
    nodes = plan.hardware.nodes
    if nodes == 1:
        return []
    # the job has the layout, the settings and the GPUs of each node from the same words
    words = [
        word
        for word in shlex.split(command)[2:]
        if not word.startswith(("NNODES=", "NODE_RANK=", "MASTER_"))
    ]
    job = shlex.join(["make", "launch-file", "FOR=slurm", f"HARDWARE={machine}", *words])
    return [
        f"Launch, with the address of node 0 for {FIRST_NODE} (under Slurm: {job}):",
        f"  on node 0: {command}",
        f"  on the others: the same with NODE_RANK=1{f' to {nodes - 1}' if nodes > 2 else ''}",
    ]


# --- BUDGET: the machines that a run's money pays for, by their own plans and a dated price list --
def make_budget(
    config: RunConfig,
    budget_usd: float,
    requested_machine: Hardware,
    *,
    layouts: tuple[LayoutName, ...] = LAYOUT_NAMES,
) -> BudgetResult:
    """Compare the machines on which the run fits: its hours there, and what they cost in USD. A
    price of the user's (PRICE=, price=) is for one machine, and no other is compared; without it
    each machine has the lowest price of the list. Raises ConfigError where the run's length is not
    known, a price has no machine with GPUs, or the list has none for the machine that is named.
    """

    def plan_machine(machine: Hardware) -> Plan | None:
        request = build_plan_request(config, machine, layouts)
        best = lowest_memory_candidate(request)
        if best is None or not best.fits:
            return None
        return plan_request(request, include_suggestions=False)

    machines = list(_priced_machines(requested_machine))
    return compare_machine_prices(
        budget_usd,
        report_each("Planning", machines, unit="machines", count=len(machines)),
        make_machine_plan=plan_machine,
        today=datetime.now(UTC).date(),
    )


def _priced_machines(machine: Hardware) -> Iterator[tuple[str, Hardware, PriceList | None]]:
    """Yield every machine of the list at its lowest price, or only the one that is named or has a
    price of the user's: its name, the machine, and the list the price is from (None: the user's
    own)."""
    has_own_price = machine.price_per_gpu_hour is not None
    if not has_own_price and not (machine.named and machine.gpus):
        for price, count in lowest_prices():
            name = f"{count}x{price.gpu}"
            yield (
                name,
                dataclasses.replace(parse_hardware(name), price_per_gpu_hour=price.usd),
                price.price_list,
            )
        return
    if not machine.gpus:
        raise ConfigError(
            "BUDGET with PRICE= needs the machine that the price is for: HARDWARE=2xH200"
        )
    gpu = machine.gpus[0].name
    name = f"{machine.ranks_per_node}x{gpu.removeprefix('NVIDIA ').removeprefix('AMD ')}"
    if machine.nodes > 1:
        name = f"{machine.nodes}x{name}"
    if has_own_price:
        yield name, machine, None
        return
    names = {entry.name for entry in find_catalog_entries(gpu)[:1]}
    prices = [
        price
        for price in load_prices()
        if price.gpu in names and machine.ranks_per_node in price.gpu_counts
    ]
    if not prices:
        raise ConfigError(
            f"BUDGET: the price list has no {name}; give its price (PRICE=2.5, or price=2.5 in"
            " HARDWARE), or leave HARDWARE out to weigh every machine of the list"
        )
    lowest = min(prices, key=lambda price: price.usd)
    yield name, dataclasses.replace(machine, price_per_gpu_hour=lowest.usd), lowest.price_list
