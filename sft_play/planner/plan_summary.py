"""What a person reads of a plan before anything else: does it fit, the batch, how long, which rows, what to watch for.

`plan_details` has everything else: `make plan WHY=1`, the log of a run and `plan.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from sft_play.config.schema import RunConfig
from sft_play.log import one_line
from sft_play.planner.batching import format_changed_batch
from sft_play.planner.plan import Plan, RunLength
from sft_play.units import format_duration

MODE_NAMES = {"qlora": "QLoRA", "lora": "LoRA", "full": "full fine-tuning"}
# Optimizer steps below which a run hardly moves its weights: warmup and decay of the learning rate are most of it.
FEW_STEPS = 20
LONG_CPU_RUN_S = 3600.0


def plan_summary_lines(plan: Plan, config: RunConfig, *, start_lines: Sequence[str], has_local_data: bool) -> list[str]:
    """The default page of `make plan`; `start_lines`: with the command that starts the run; `has_local_data`: the
    data are on this machine."""
    name = one_line(PurePath(config.model.name).name or config.model.name)
    verdict = plan.choice.verdict.replace("fits", "FITS", 1).replace("does NOT fit", "DOES NOT FIT", 1)
    if plan.fits and not start_lines:
        verdict = f"NOT STARTED{'' if plan.hardware.named else ' on this machine'} ({plan.choice.verdict})"
    return [
        f"{name}, {_format_mode(plan, config)}, on {_format_machine(plan)}: {verdict}; predicted peak "
        f"{plan.memory.peak_text}",
        f"{_format_batch(plan)}; {format_run_length(plan)}",
        _format_data(plan, config, is_local=has_local_data),
        *(f"Warning: {warning}" for warning in plan_warnings(plan, config)),
        *start_lines[:-1],
        "    ".join([*start_lines[-1:], "Why, and what else was compared: make plan ... WHY=1"]),
    ]


def fit_line(plan: Plan, config: RunConfig) -> str:
    """What a run says of its plan: the mode, whether it fits, how long it takes."""
    peak = f"predicted peak {plan.memory.peak_text}"
    return f"Plan: {_format_mode(plan, config)} {plan.choice.verdict}; {format_run_length(plan)}; {peak}"


def format_run_length(plan: Plan) -> str:
    """Steps, duration and money of the run, as far as they are known."""
    run, run_length = plan.as_json()["run"], plan.run_length
    if run is None or run_length is None:
        return "steps and duration are known once the rows are here"
    steps = f"{run['steps']:,} step{'' if run['steps'] == 1 else 's'}"
    if run["hours"] is None:
        return f"{steps}; how long is not known before a first run on this machine"
    error_share = plan.speed_error.share if plan.speed_error else None
    error_text = f" (speed may be {error_share:.0%} off)" if error_share is not None else ""
    cost_text = f"; costs {run['cost']:.2f}" if run["cost"] is not None else ""
    seconds, basis = _estimate_duration(plan, run_length)
    return f"{steps}; about {format_duration(seconds)}{basis}{error_text}{cost_text}"


def _estimate_duration(plan: Plan, run_length: RunLength) -> tuple[float, str]:
    if plan.row_tokens is None and run_length.tokens is not None:
        return run_length.tokens / plan.speed.tokens_per_s + plan.compile_s, " by the size of the data"
    basis = " if every row were full length" if plan.row_tokens is None else ""
    return run_length.steps * plan.speed.step_s + plan.compile_s, basis


def plan_warnings(plan: Plan, config: RunConfig) -> list[str]:
    """What a person would want to know before the first step."""
    messages = []
    if plan.run_length is not None and plan.run_length.steps < FEW_STEPS and not config.train.max_steps:
        steps_text = f"{plan.run_length.steps} optimizer step{' is' if plan.run_length.steps == 1 else 's are'} few"
        messages.append(
            f"{steps_text}: more train.epochs, or a smaller {config.train.effective_batch_options}, makes more"
        )
    if batch_change := format_changed_batch(config.train, plan.batch):
        messages.append(f"{batch_change}: the effective batch of {plan.batch.effective_batch} is kept over all ranks")
    return [*messages, *long_cpu_warnings(plan)]


def long_cpu_warnings(plan: Plan) -> list[str]:
    """That a run takes an hour or more on a CPU, where it does."""
    if plan.run_length is None or plan.hardware.gpus:
        return []
    seconds, _ = _estimate_duration(plan, plan.run_length)  # by typical rates where this CPU's are not known
    if seconds < LONG_CPU_RUN_S:
        return []
    duration_text = f"about {format_duration(seconds)}" if plan.speed_known else "some hours"
    return [f"{duration_text} on a CPU: a GPU takes minutes (make plan HARDWARE=1xRTX3060 shows one)"]


def _format_mode(plan: Plan, config: RunConfig) -> str:
    layout = f" in {plan.layout}" if plan.layout != "single" else ""
    return f"{MODE_NAMES[config.tuning.mode]}{layout}"


def _format_machine(plan: Plan) -> str:
    hardware = plan.hardware
    assumed_note = " (assumed)" if hardware.named else ""
    if not hardware.gpus:
        ranks_text = f", {hardware.ranks} processes" if hardware.ranks > 1 else ""
        return f"{'a' if hardware.named else 'this'} CPU{ranks_text}{assumed_note}"
    nodes_text = f" on {hardware.nodes} nodes" if hardware.nodes > 1 else ""
    return f"{len(hardware.gpus)} x {hardware.gpus[0].name}{nodes_text}{assumed_note}"


def _format_batch(plan: Plan) -> str:
    batch, unit = plan.batch, "GPUs" if plan.hardware.gpus else "processes"
    ranks_per_row = plan.choice.layout.ranks // batch.ranks  # ranks that share rows
    unit = unit if ranks_per_row == 1 else f"groups of {ranks_per_row} {unit}"
    rows_text = f"{batch.micro_batch} row{'' if batch.micro_batch == 1 else 's'}"
    micro_steps_text = f"{batch.grad_accum} pass{'' if batch.grad_accum == 1 else 'es'}"
    ranks_text = f" x {batch.ranks} {unit}" if batch.ranks > 1 else ""
    return f"Batch {batch.effective_batch} = {rows_text} x {micro_steps_text}{ranks_text}"


def _format_data(plan: Plan, config: RunConfig, *, is_local: bool) -> str:
    data, row_tokens = config.data, plan.row_tokens
    name = one_line(data.train_path or f"{len(data.sources)} sources")
    if row_tokens is None:
        if config.task_mode != "sft" or data.packing != "none":
            return f"Data: {name}, in full rows of {plan.max_seq_len:,} tokens"
        reason = "not counted" if is_local else "not here"
        return f"Data: {name} ({reason}), every row taken to have {plan.max_seq_len:,} tokens"
    cut_text = (
        "none cut"
        if row_tokens.longest < row_tokens.limit or row_tokens.cut == 0
        else f"longer ones cut at {row_tokens.limit:,}"
    )
    cut_text = f"{row_tokens.cut:,} cut at {row_tokens.limit:,}" if row_tokens.cut else cut_text
    return f"Data: {row_tokens.rows:,} rows of {name}, longest {row_tokens.longest:,} tokens, {cut_text}"
