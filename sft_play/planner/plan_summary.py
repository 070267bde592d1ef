"""What a person reads of a plan before anything else: does it fit, the batch, how long, which rows, what to watch for.

`show` has everything else: `make plan WHY=1`, the log of a run and `plan.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from sft_play.config.schema import RunConfig
from sft_play.log import one_line
from sft_play.planner.batching import changed_words
from sft_play.planner.plan import Plan, Work
from sft_play.units import duration_of

MODES = {"qlora": "QLoRA", "lora": "LoRA", "full": "full fine-tuning"}
# Optimizer steps below which a run hardly moves its weights: warmup and decay of the learning rate are most of it.
FEW_STEPS = 20
LONG_ON_CPU_S = 3600.0


def plan_screen(plan: Plan, config: RunConfig, *, start: Sequence[str], is_here: bool) -> list[str]:
    """The default page of `make plan`; `start`: the lines with the command that starts the run; `is_here`: the data
    are."""
    name = one_line(PurePath(config.model.name).name or config.model.name)
    verdict = plan.choice.verdict.replace("fits", "FITS", 1).replace("does NOT fit", "DOES NOT FIT", 1)
    if plan.fits and not start:
        verdict = f"NOT STARTED{'' if plan.hardware.named else ' on this machine'} ({plan.choice.verdict})"
    return [
        f"{name}, {_how(plan, config)}, on {_machine(plan)}: {verdict}; predicted peak {plan.memory.peak_text}",
        f"{_batch(plan)}; {run_words(plan)}",
        _data(plan, config, is_here=is_here),
        *(f"Warning: {warning}" for warning in warnings(plan, config)),
        *start[:-1],
        "    ".join([*start[-1:], "Why, and what else was compared: make plan ... WHY=1"]),
    ]


def fit_line(plan: Plan, config: RunConfig) -> str:
    """What a run says of its plan: the mode, whether it fits, how long it takes."""
    peak = f"predicted peak {plan.memory.peak_text}"
    return f"Plan: {_how(plan, config)} {plan.choice.verdict}; {run_words(plan)}; {peak}"


def run_words(plan: Plan) -> str:
    """Steps, duration and money of the run, as far as they are known."""
    run, work = plan.as_json()["run"], plan.work
    if run is None or work is None:
        return "steps and duration are known once the rows are here"
    steps = f"{run['steps']:,} step{'' if run['steps'] == 1 else 's'}"
    if run["hours"] is None:
        return f"{steps}; how long is not known before a first run on this machine"
    share = plan.speed_error.share if plan.speed_error else None
    off = f" (speed may be {share:.0%} off)" if share is not None else ""
    cost = f"; costs {run['cost']:.2f}" if run["cost"] is not None else ""
    seconds, by = _duration(plan, work)
    return f"{steps}; about {duration_of(seconds)}{by}{off}{cost}"


def _duration(plan: Plan, work: Work) -> tuple[float, str]:
    if plan.row_tokens is None and work.tokens is not None:
        return work.tokens / plan.speed.tokens_per_s + plan.compile_s, " by the size of the data"
    by = " if every row were full length" if plan.row_tokens is None else ""
    return work.steps * plan.speed.step_s + plan.compile_s, by


def warnings(plan: Plan, config: RunConfig) -> list[str]:
    """What a person would want to know before the first step."""
    found = []
    if plan.work is not None and plan.work.steps < FEW_STEPS and not config.train.max_steps:
        few = f"{plan.work.steps} optimizer step{' is' if plan.work.steps == 1 else 's are'} few"
        found.append(f"{few}: more train.epochs, or a smaller {config.train.effective_words}, makes more")
    if changed := changed_words(config.train, plan.batch):
        found.append(f"{changed}: the effective batch of {plan.batch.effective_batch} is kept over all ranks")
    return [*found, *long_on_cpu(plan)]


def long_on_cpu(plan: Plan) -> list[str]:
    """That a run takes an hour or more on a CPU, where it does."""
    if plan.work is None or plan.hardware.gpus:
        return []
    seconds, _ = _duration(plan, plan.work)  # by typical rates where this CPU's are not known
    if seconds < LONG_ON_CPU_S:
        return []
    long = f"about {duration_of(seconds)}" if plan.speed_known else "some hours"
    return [f"{long} on a CPU: a GPU takes minutes (make plan HARDWARE=1xRTX3060 shows one)"]


def _how(plan: Plan, config: RunConfig) -> str:
    layout = f" in {plan.layout}" if plan.layout != "single" else ""
    return f"{MODES[config.tuning.mode]}{layout}"


def _machine(plan: Plan) -> str:
    hardware = plan.hardware
    assumed = " (assumed)" if hardware.named else ""
    if not hardware.gpus:
        ranks = f", {hardware.ranks} processes" if hardware.ranks > 1 else ""
        return f"{'a' if hardware.named else 'this'} CPU{ranks}{assumed}"
    nodes = f" on {hardware.nodes} nodes" if hardware.nodes > 1 else ""
    return f"{len(hardware.gpus)} x {hardware.gpus[0].name}{nodes}{assumed}"


def _batch(plan: Plan) -> str:
    batch, what = plan.batch, "GPUs" if plan.hardware.gpus else "processes"
    alike = plan.choice.layout.ranks // batch.ranks  # ranks that share rows
    what = what if alike == 1 else f"groups of {alike} {what}"
    rows = f"{batch.micro_batch} row{'' if batch.micro_batch == 1 else 's'}"
    passes = f"{batch.grad_accum} pass{'' if batch.grad_accum == 1 else 'es'}"
    ranks = f" x {batch.ranks} {what}" if batch.ranks > 1 else ""
    return f"Batch {batch.effective_batch} = {rows} x {passes}{ranks}"


def _data(plan: Plan, config: RunConfig, *, is_here: bool) -> str:
    data, rows = config.data, plan.row_tokens
    name = one_line(data.train_path or f"{len(data.sources)} sources")
    if rows is None:
        if config.task_mode != "sft" or data.packing != "none":
            return f"Data: {name}, in full rows of {plan.max_seq_len:,} tokens"
        why = "not counted" if is_here else "not here"
        return f"Data: {name} ({why}), every row taken to have {plan.max_seq_len:,} tokens"
    cut = "none cut" if rows.longest < rows.limit or rows.cut == 0 else f"longer ones cut at {rows.limit:,}"
    cut = f"{rows.cut:,} cut at {rows.limit:,}" if rows.cut else cut
    return f"Data: {rows.rows:,} rows of {name}, longest {rows.longest:,} tokens, {cut}"
