"""What a person reads of a plan: the machine, the batch, the choice, a bar of the memory, the table of candidates.

Memory is printed in GiB, units of 2**30 bytes.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from sft_play.config.schema import RunConfig
from sft_play.facts.hardware import Hardware
from sft_play.planner.advice.what_if import Largest
from sft_play.planner.candidates import Candidate
from sft_play.planner.memory.estimate import RUN_PHASES
from sft_play.planner.parameters import parameters_line
from sft_play.planner.plan import Plan
from sft_play.units import GIB, duration_of

BAR_WIDTH = 60
TABLE_WIDTH = 150
# Identical GPUs up to this number are listed one by one.
MOST_GPU_LINES = 16
# One letter per term in the bar; other terms are `x`.
LETTERS = {
    "weights": "W",
    "adapters": "a",
    "gradients": "G",
    "gradient_buckets": "B",
    "optimizer": "O",
    "activations": "A",
    "loss_head": "H",
    "gather_buffers": "F",
    "dequantised": "D",
    "workspaces": "w",
    "evaluation": "E",
}


def detected_lines(hardware: Hardware) -> list[str]:
    """The lines about the machine of the plan, detected or only named: one per GPU with its memory, and their sum."""
    notes, host = [*hardware.notes], _host_words(hardware)
    if not hardware.gpus:
        where = "Planned for a machine without GPUs, named" if hardware.named else "Detected no GPU"
        return [f"{where}: running on the CPU ({host})", *notes]
    count = len(hardware.gpus)
    gpus = f"{count} GPU{'s' if count > 1 else ''}"
    head = f"Planned for {gpus}, named and not detected:" if hardware.named else f"Detected {gpus}:"
    total = f"Total VRAM: {sum(gpu.total_bytes for gpu in hardware.gpus) / GIB:.1f} GiB"
    ram = [f"RAM of each node: {host}"] if hardware.named else []
    return ["\n".join([head, *_gpu_lines(hardware)]), total, *ram, *notes]


def _host_words(hardware: Hardware) -> str:
    ram = f"{hardware.ram_bytes / GIB:.1f} GiB"
    if not hardware.named:
        return f"{hardware.cpu_name}, {hardware.cpu_cores} cores, {ram} of RAM"
    if hardware.gpus:
        return ram if hardware.ram_given else "not given (ram=512GiB)"
    assumed = "" if hardware.ram_given else ": this machine's, because none was given (ram=64GiB)"
    return f"{hardware.cpu_cores} cores, {ram} of RAM{assumed}"


def _gpu_lines(hardware: Hardware) -> list[str]:
    first, last = hardware.gpus[0], hardware.gpus[-1]
    kinds = {(gpu.name, gpu.total_bytes) for gpu in hardware.gpus}
    if len(hardware.gpus) > MOST_GPU_LINES and len(kinds) == 1:
        return [f"  GPU {first.index}-{last.index}: {first.name} ({first.total_bytes / GIB:.1f} GiB) each"]
    return [f"  GPU {gpu.index}: {gpu.name} ({gpu.total_bytes / GIB:.1f} GiB)" for gpu in hardware.gpus]


def known_lines(plan: Plan, config: RunConfig) -> list[str]:
    """The lines about the batch that users know, word for word."""
    auto = config.train.batch_size == "auto" or config.train.grad_accum == "auto"
    each = "per GPU" if plan.hardware.gpus else "per process"
    word = "Auto-calculated batch size" if auto else "Batch size"
    return [
        f"{word}: {plan.batch.micro_batch} {each}, gradient accumulation: {plan.batch.grad_accum}",
        f"Effective batch size: {plan.batch.effective_batch}",
    ]


def batch_lines(plan: Plan, config: RunConfig) -> list[str]:
    """The lines about the batch, then the reasons and the predicted peak."""
    return [
        *known_lines(plan, config),
        *(f"Because: {reason}" for reason in plan.reasons),
        memory_line(plan),
    ]


def share_lines(plan: Plan, config: RunConfig) -> list[str]:
    """The line about what is quantised, adapted and trained; none for a plan of an earlier version."""
    return [parameters_line(plan.parameters, config)] if plan.parameters else []


def memory_line(plan: Plan) -> str:
    """The predicted peak of one rank, the terms of its tensors, and what must be free for it, in GiB."""
    memory = plan.memory
    large = {name: size for name, size in memory.terms.items() if size >= 0.005 * memory.allocated}
    terms = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.2f}" for name, size in large.items())
    beside, of = "context" if plan.hardware.gpus else "libraries", RUN_PHASES.get(memory.moment, "a step")
    return (
        f"Predicted peak: {memory.peak_text} (tensors of {of} {memory.allocated / GIB:.2f}: {terms})"
        f"{loading_words(plan.choice)}; with margin and {beside} {memory.required / GIB:.2f} of "
        f"{plan.budget_bytes / GIB:.1f} GiB"
    )


def loading_words(candidate: Candidate) -> str:
    """The peak of loading, as the end of a sentence, where a rank keeps only a shard or loading needs the most."""
    memory = candidate.memory
    # otherwise a run loads what it keeps, and the figure would repeat the weights' term
    is_shown = candidate.layout.shards_params or memory.is_limited_by_loading
    ram = f" and {memory.host_load_bytes / GIB:.2f} GiB of RAM" if memory.host_load_bytes else ""
    return f"; {memory.load_bytes / GIB:.2f} GiB{ram} while loading" if is_shown else ""


def choice_line(plan: Plan) -> str:
    """The choice in one sentence."""
    choice, gpus = plan.choice, len(plan.hardware.gpus)
    where = f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "the CPU"
    passes = f"{choice.batch.grad_accum} pass{'es' if choice.batch.grad_accum > 1 else ''}"
    return (
        f"Choice: {choice.layout.name} on {where}, micro-batch {choice.batch.micro_batch} x {passes}, "
        f"{choice.checkpointing_words}: {choice.verdict}"
    )


def speed_lines(plan: Plan) -> list[str]:
    """Predicted speed, time, energy and money."""
    if not plan.speed_known:
        return ["Speed: not predicted (the device's rates are not known)"]
    speed = plan.speed
    slow = [
        f"{name.replace('_', ' ')} {s / speed.step_s:.0%}" for name, s in speed.parts.items() if s > 0.01 * speed.step_s
    ]
    mfu = f", model FLOP utilisation {plan.mfu:.0%}" if plan.mfu is not None else ""
    error = f" ({plan.speed_error.words})" if plan.speed_error else ""
    lines = [
        f"Speed: about {speed.tokens_per_s:,.0f} tokens/s{error}, {speed.step_s:.2f} s per step{mfu} "
        f"({', '.join(slow)}); a roofline, not a measurement"
    ]
    run = plan.as_json()["run"]
    if run is None:
        lines.append(
            "Run: hours and cost are not predicted (no train.max_steps, and data.train_path is not one file here)"
        )
    elif run["hours"] is not None:
        is_known = plan.row_tokens is not None
        line = (
            f"Run: {run['steps']:,} steps, {duration_of(3600 * run['hours'])}"
            f"{'' if is_known else ' if every row were full length'}"
        )
        if plan.compile_s:
            line += f" with {plan.compile_s:.0f} s of compiling"
        if run["gpu_hours"] is not None:
            line += f", {run['gpu_hours']:.1f} GPU-hours"
        if run["tokens"] is not None and not is_known:
            short = duration_of(run["tokens"] / speed.tokens_per_s)
            line += f"; about {short} for the {run['tokens']:,} tokens that the file's size suggests"
        if run["energy_kwh"] is not None:
            line += f"; at most {run['energy_kwh']:.1f} kWh"
        if run["cost"] is not None:
            line += f"; {run['cost']:.2f} at {plan.hardware.price_per_gpu_hour:g} per GPU-hour"
        lines.append(line)
    return lines


ALLOCATOR = (
    "Allocator: counted for fixed-size and expandable segments, whichever needs more; a run on Linux with "
    "NVIDIA's driver sets expandable_segments unless PYTORCH_ALLOC_CONF says otherwise"
)


def bar_lines(plan: Plan) -> list[str]:
    """A bar of one rank's memory: what each part of the budget is for."""
    budget, memory = plan.budget_bytes, plan.memory
    whole = max(budget, memory.required)  # a plan that does not fit is wider than its budget, and fills the bar
    parts = [(LETTERS.get(name, "x"), name, size) for name, size in memory.terms.items() if size > 0]
    parts.append(("s", "allocator slack", memory.reserved - memory.allocated))
    parts.append(("m", "margin", memory.margin))
    beside = "context and communicators" if plan.hardware.gpus else "libraries"
    parts.append(("c", beside, memory.outside_allocator))
    # last: what the others leave of `required`, which is loading's own where loading decides
    parts.append(("L", "more while loading", memory.required - sum(size for _, _, size in parts)))
    bar, filled = "", 0
    for letter, _, size in parts:
        filled += max(0, size)
        # rounded from the running sum, so that the parts add up to the bar
        bar += letter * (round(filled / whole * BAR_WIDTH) - len(bar))
    bar = bar.ljust(BAR_WIDTH, ".")
    count = len(plan.hardware.gpus)
    where = "RAM" if not count else "GPU 0" if count == 1 else f"GPU 0-{count - 1}, each"
    legend = ", ".join(
        f"{letter} {name.replace('_', ' ')} {size / GIB:.2f}" for letter, name, size in parts if size > 0
    )
    margin = f"Margin: {memory.margin / GIB:.2f} GiB, {memory.margin_reason}" if memory.margin_reason else ""
    moment = f"Peak: in the {memory.moment} of a step{loading_words(plan.choice)}" if memory.moment else ""
    return [
        f"{where} |{bar}| {memory.required / GIB:.1f} of {budget / GIB:.1f} GiB",
        f"  {legend}",
        *(line for line in (moment, margin, ALLOCATOR if count else "") if line),
    ]


def table_lines(plan: Plan) -> list[str]:
    """The table of candidates, the chosen one first, each with why it was not chosen."""
    rows = sorted(plan.candidates, key=lambda candidate: candidate.rejected_because is not None)
    table = _table(("layout", "micro x accum", "checkpointing", "loss"), ("needs GiB", "tokens/s"))
    table.add_column("why")
    for candidate in rows:
        table.add_row(
            candidate.layout.name,
            f"{candidate.batch.micro_batch} x {candidate.batch.grad_accum}",
            _checkpointing(candidate),
            candidate.step.loss,
            f"{candidate.memory.required / GIB:.1f}",
            f"{candidate.speed.tokens_per_s:,.0f}" if plan.speed_known else "-",
            candidate.rejected_because or ("chosen" if plan.fits else "closest to fitting, but does not fit"),
        )
    for item in plan.not_possible:
        table.add_row(item.name, "-", "-", "-", "-", "-", f"not possible: {item.because}")
    return _text_of(table)


def _checkpointing(candidate: Candidate) -> str:
    return candidate.checkpointing_words.removeprefix("checkpointing ").removeprefix("in ")


def way_lines(plan: Plan) -> list[str]:
    """The suggestions with their predicted peaks, and what was tried and is not enough."""
    lines = [f"  {way.change}: {way.needs}" for way in plan.suggestions]
    if lines:
        lines.insert(0, "Suggestions, the least harmful first:")
    if plan.not_enough:
        lines.append(f"Not enough on their own: {'; '.join(f'{way.change} ({way.needs})' for way in plan.not_enough)}")
    return lines


def stage_lines(stages: Sequence[tuple[str, RunConfig, Plan]]) -> list[str]:
    """One line per stage of a curriculum: its length, learning rate, row length, and what its step needs."""
    if not stages:
        return []
    lines = [f"Stages, each with its own schedule and optimizer, all under {stages[0][2].layout}:"]
    for number, (name, config, plan) in enumerate(stages, start=1):
        train = config.train
        passes = f"{train.epochs:g} epoch{'s' if train.epochs != 1 else ''}"
        length = f"{train.max_steps:,} steps" if train.max_steps else passes
        full = "" if plan.row_tokens is not None else " if every row were full length"
        hours = f", {duration_of(3600 * plan.hours)}{full}" if plan.hours is not None else ""
        parts = "" if config.tuning.trainable == "all" else f", trains {', '.join(config.tuning.trainable)}"
        lines.append(
            f"  {number} {name}: {length}, learning rate {config.learning_rate:g}, rows of at most "
            f"{plan.max_seq_len:,} tokens{parts}; micro {plan.batch.micro_batch} x accum {plan.batch.grad_accum}, "
            f"{plan.choice.checkpointing_words}: {plan.choice.verdict}{hours}"
        )
    return lines


def plan_lines(plan: Plan, config: RunConfig, *, command: str | None, by_node: Sequence[str] = ()) -> list[str]:
    """Everything that `make plan WHY=1` prints; `by_node`: lines with the command of each node; None: none would start
    it."""
    launch = (list(by_node) or [f"Launch: {command}"]) if command is not None else []
    return [
        *detected_lines(plan.hardware),
        choice_line(plan),
        *share_lines(plan, config),
        *batch_lines(plan, config),
        *bar_lines(plan),
        *(speed_lines(plan) if plan.fits else []),
        "Candidates:",
        *table_lines(plan),
        *(launch if plan.fits else way_lines(plan)),
    ]


def grid_lines(cells: Sequence[tuple[tuple[str, ...], Plan]]) -> list[str]:
    """The table of a grid, one row per cell: what fits, or which memory is too small."""
    if not cells:
        return []
    words = ("fits", "layout", "micro x accum", "checkpointing")
    table = _table(words, ("allocated GiB", "needs GiB", "tokens/s"), first="settings")
    for settings, plan in cells:
        speed = f"{plan.speed.tokens_per_s:,.0f}" if plan.speed_known and plan.fits else "-"
        ram = f", with {plan.choice.host_required / GIB:.1f} GiB of RAM" if plan.choice.offloads else ""
        table.add_row(
            " ".join(settings),
            f"yes{ram}" if plan.fits else f"NO: too little {' and '.join(plan.choice.short_of)}",
            plan.layout,
            f"{plan.batch.micro_batch} x {plan.batch.grad_accum}",
            _checkpointing(plan.choice),
            f"{plan.memory.allocated / GIB:.1f}",
            f"{plan.memory.required / GIB:.1f}",
            speed,
        )
    return ["What if:", *_text_of(table)]


def largest_line(largest: Largest) -> str:
    """The answer to MAX."""
    if largest.value is None:
        return f"Largest {largest.what}: none fits ({largest.limited_by})"
    return f"Largest {largest.what} that fits: {largest.value} ({largest.limited_by})"


def _table(words: Sequence[str], numbers: Sequence[str], *, first: str = "") -> Table:
    table = Table(*filter(None, [first]), box=None, pad_edge=False, header_style="", show_edge=False)
    for name in (*words, *numbers):
        table.add_column(name, justify="right" if name in numbers else "left", no_wrap=True)
    return table


def _text_of(table: Table) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=TABLE_WIDTH, no_color=True, highlight=False).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]
