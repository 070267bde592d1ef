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
from sft_play.planner.advice.what_if import LargestFit
from sft_play.planner.candidates import Candidate
from sft_play.planner.memory.estimate import RUN_PHASES
from sft_play.planner.parameters import format_parameters
from sft_play.planner.plan import Plan
from sft_play.units import GIB, format_duration

BAR_WIDTH = 60
TABLE_WIDTH = 150
# Identical GPUs up to this number are listed one by one.
MAX_GPU_LINES = 16
# One letter per term in the bar; other terms are `x`.
TERM_LETTERS = {
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


def hardware_lines(hardware: Hardware) -> list[str]:
    """The lines about the machine of the plan, detected or only named: one per GPU with its memory, and their sum."""
    notes, host_text = [*hardware.notes], _format_host(hardware)
    if not hardware.gpus:
        origin = "Planned for a machine without GPUs, named" if hardware.named else "Detected no GPU"
        return [f"{origin}: running on the CPU ({host_text})", *notes]
    count = len(hardware.gpus)
    gpu_count = f"{count} GPU{'s' if count > 1 else ''}"
    heading = f"Planned for {gpu_count}, named and not detected:" if hardware.named else f"Detected {gpu_count}:"
    total_line = f"Total VRAM: {sum(gpu.total_bytes for gpu in hardware.gpus) / GIB:.1f} GiB"
    ram_lines = [f"RAM of each node: {host_text}"] if hardware.named else []
    return ["\n".join([heading, *_gpu_lines(hardware)]), total_line, *ram_lines, *notes]


def _format_host(hardware: Hardware) -> str:
    ram_text = f"{hardware.ram_bytes / GIB:.1f} GiB"
    if not hardware.named:
        return f"{hardware.cpu_name}, {hardware.cpu_cores} cores, {ram_text} of RAM"
    if hardware.gpus:
        return ram_text if hardware.ram_given else "not given (ram=512GiB)"
    assumed_note = "" if hardware.ram_given else ": this machine's, because none was given (ram=64GiB)"
    return f"{hardware.cpu_cores} cores, {ram_text} of RAM{assumed_note}"


def _gpu_lines(hardware: Hardware) -> list[str]:
    first, last = hardware.gpus[0], hardware.gpus[-1]
    kinds = {(gpu.name, gpu.total_bytes) for gpu in hardware.gpus}
    if len(hardware.gpus) > MAX_GPU_LINES and len(kinds) == 1:
        return [f"  GPU {first.index}-{last.index}: {first.name} ({first.total_bytes / GIB:.1f} GiB) each"]
    return [f"  GPU {gpu.index}: {gpu.name} ({gpu.total_bytes / GIB:.1f} GiB)" for gpu in hardware.gpus]


def batch_size_lines(plan: Plan, config: RunConfig) -> list[str]:
    """The lines about the batch that users know, word for word."""
    is_auto = config.train.batch_size == "auto" or config.train.grad_accum == "auto"
    unit = "per GPU" if plan.hardware.gpus else "per process"
    label = "Auto-calculated batch size" if is_auto else "Batch size"
    return [
        f"{label}: {plan.batch.micro_batch} {unit}, gradient accumulation: {plan.batch.grad_accum}",
        f"Effective batch size: {plan.batch.effective_batch}",
    ]


def batch_lines(plan: Plan, config: RunConfig) -> list[str]:
    """The lines about the batch, then the reasons and the predicted peak."""
    return [
        *batch_size_lines(plan, config),
        *(f"Because: {reason}" for reason in plan.reasons),
        memory_line(plan),
    ]


def parameter_lines(plan: Plan, config: RunConfig) -> list[str]:
    """The line about what is quantised, adapted and trained; none for a plan of an earlier version."""
    return [format_parameters(plan.parameters, config)] if plan.parameters else []


def memory_line(plan: Plan) -> str:
    """The predicted peak of one rank, the terms of its tensors, and what must be free for it, in GiB."""
    memory = plan.memory
    large_terms = {name: size for name, size in memory.terms.items() if size >= 0.005 * memory.allocated}
    terms_text = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.2f}" for name, size in large_terms.items())
    outside_name, phase = "context" if plan.hardware.gpus else "libraries", RUN_PHASES.get(memory.moment, "a step")
    return (
        f"Predicted peak: {memory.peak_text} (tensors of {phase} {memory.allocated / GIB:.2f}: {terms_text})"
        f"{format_loading(plan.choice)}; with margin and {outside_name} {memory.required / GIB:.2f} of "
        f"{plan.budget_bytes / GIB:.1f} GiB"
    )


def format_loading(candidate: Candidate) -> str:
    """The peak of loading, as the end of a sentence, where a rank keeps only a shard or loading needs the most."""
    memory = candidate.memory
    # otherwise a run loads what it keeps, and the figure would repeat the weights' term
    is_notable = candidate.layout.shards_params or memory.is_limited_by_loading
    ram_text = f" and {memory.host_load_bytes / GIB:.2f} GiB of RAM" if memory.host_load_bytes else ""
    return f"; {memory.load_bytes / GIB:.2f} GiB{ram_text} while loading" if is_notable else ""


def choice_line(plan: Plan) -> str:
    """The choice in one sentence."""
    choice, gpu_count = plan.choice, len(plan.hardware.gpus)
    device = f"{gpu_count} GPU{'s' if gpu_count > 1 else ''}" if gpu_count else "the CPU"
    micro_steps_text = f"{choice.batch.grad_accum} pass{'es' if choice.batch.grad_accum > 1 else ''}"
    return (
        f"Choice: {choice.layout.name} on {device}, micro-batch {choice.batch.micro_batch} x {micro_steps_text}, "
        f"{choice.checkpointing_text}: {choice.verdict}"
    )


def speed_lines(plan: Plan) -> list[str]:
    """Predicted speed, time, energy and money."""
    if not plan.speed_known:
        return ["Speed: not predicted (the device's rates are not known)"]
    speed = plan.speed
    part_texts = [
        f"{name.replace('_', ' ')} {seconds / speed.step_s:.0%}"
        for name, seconds in speed.parts.items()
        if seconds > 0.01 * speed.step_s
    ]
    mfu_text = f", model FLOP utilisation {plan.mfu:.0%}" if plan.mfu is not None else ""
    error_text = f" ({plan.speed_error.text})" if plan.speed_error else ""
    lines = [
        f"Speed: about {speed.tokens_per_s:,.0f} tokens/s{error_text}, {speed.step_s:.2f} s per step{mfu_text} "
        f"({', '.join(part_texts)}); a roofline, not a measurement"
    ]
    run = plan.as_json()["run"]
    if run is None:
        lines.append(
            "Run: hours and cost are not predicted (no train.max_steps, and data.train_path is not one file here)"
        )
    elif run["hours"] is not None:
        has_row_lengths = plan.row_tokens is not None
        line = (
            f"Run: {run['steps']:,} steps, {format_duration(3600 * run['hours'])}"
            f"{'' if has_row_lengths else ' if every row were full length'}"
        )
        if plan.compile_s:
            line += f" with {plan.compile_s:.0f} s of compiling"
        if run["gpu_hours"] is not None:
            line += f", {run['gpu_hours']:.1f} GPU-hours"
        if run["tokens"] is not None and not has_row_lengths:
            duration_text = format_duration(run["tokens"] / speed.tokens_per_s)
            line += f"; about {duration_text} for the {run['tokens']:,} tokens that the file's size suggests"
        if run["energy_kwh"] is not None:
            line += f"; at most {run['energy_kwh']:.1f} kWh"
        if run["cost"] is not None:
            line += f"; {run['cost']:.2f} at {plan.hardware.price_per_gpu_hour:g} per GPU-hour"
        lines.append(line)
    return lines


ALLOCATOR_NOTE = (
    "Allocator: counted for fixed-size and expandable segments, whichever needs more; a run on Linux with "
    "NVIDIA's driver sets expandable_segments unless PYTORCH_ALLOC_CONF says otherwise"
)


def bar_lines(plan: Plan) -> list[str]:
    """A bar of one rank's memory: what each part of the budget is for."""
    budget, memory = plan.budget_bytes, plan.memory
    bar_bytes = max(budget, memory.required)  # a plan that does not fit is wider than its budget, and fills the bar
    parts = [(TERM_LETTERS.get(name, "x"), name, size) for name, size in memory.terms.items() if size > 0]
    parts.append(("s", "allocator slack", memory.reserved - memory.allocated))
    parts.append(("m", "margin", memory.margin))
    outside_name = "context and communicators" if plan.hardware.gpus else "libraries"
    parts.append(("c", outside_name, memory.outside_allocator))
    # last: what the others leave of `required`, which is loading's own where loading decides
    parts.append(("L", "more while loading", memory.required - sum(size for _, _, size in parts)))
    bar, filled_bytes = "", 0
    for letter, _, size in parts:
        filled_bytes += max(0, size)
        # rounded from the running sum, so that the parts add up to the bar
        bar += letter * (round(filled_bytes / bar_bytes * BAR_WIDTH) - len(bar))
    bar = bar.ljust(BAR_WIDTH, ".")
    gpu_count = len(plan.hardware.gpus)
    device = "RAM" if not gpu_count else "GPU 0" if gpu_count == 1 else f"GPU 0-{gpu_count - 1}, each"
    legend = ", ".join(
        f"{letter} {name.replace('_', ' ')} {size / GIB:.2f}" for letter, name, size in parts if size > 0
    )
    margin_line = f"Margin: {memory.margin / GIB:.2f} GiB, {memory.margin_reason}" if memory.margin_reason else ""
    phase_line = f"Peak: in the {memory.moment} of a step{format_loading(plan.choice)}" if memory.moment else ""
    return [
        f"{device} |{bar}| {memory.required / GIB:.1f} of {budget / GIB:.1f} GiB",
        f"  {legend}",
        *(line for line in (phase_line, margin_line, ALLOCATOR_NOTE if gpu_count else "") if line),
    ]


def candidate_table_lines(plan: Plan) -> list[str]:
    """The table of candidates, the chosen one first, each with why it was not chosen."""
    rows = sorted(plan.candidates, key=lambda candidate: candidate.rejected_because is not None)
    table = _build_table(("layout", "micro x accum", "checkpointing", "loss"), ("needs GiB", "tokens/s"))
    table.add_column("why")
    for candidate in rows:
        table.add_row(
            candidate.layout.name,
            f"{candidate.batch.micro_batch} x {candidate.batch.grad_accum}",
            _format_checkpointing(candidate),
            candidate.step.loss,
            f"{candidate.memory.required / GIB:.1f}",
            f"{candidate.speed.tokens_per_s:,.0f}" if plan.speed_known else "-",
            candidate.rejected_because or ("chosen" if plan.fits else "closest to fitting, but does not fit"),
        )
    for item in plan.not_possible:
        table.add_row(item.name, "-", "-", "-", "-", "-", f"not possible: {item.because}")
    return _render_table(table)


def _format_checkpointing(candidate: Candidate) -> str:
    return candidate.checkpointing_text.removeprefix("checkpointing ").removeprefix("in ")


def suggestion_lines(plan: Plan) -> list[str]:
    """The suggestions with their predicted peaks, and what was tried and is not enough."""
    lines = [f"  {suggestion.change}: {suggestion.needs}" for suggestion in plan.suggestions]
    if lines:
        lines.insert(0, "Suggestions, the least harmful first:")
    if plan.not_enough:
        lines.append(
            f"Not enough on their own: {'; '.join(f'{item.change} ({item.needs})' for item in plan.not_enough)}"
        )
    return lines


def stage_lines(stages: Sequence[tuple[str, RunConfig, Plan]]) -> list[str]:
    """One line per stage of a curriculum: its length, learning rate, row length, and what its step needs."""
    if not stages:
        return []
    lines = [f"Stages, each with its own schedule and optimizer, all under {stages[0][2].layout}:"]
    for number, (name, config, plan) in enumerate(stages, start=1):
        train = config.train
        epochs_text = f"{train.epochs:g} epoch{'s' if train.epochs != 1 else ''}"
        length_text = f"{train.max_steps:,} steps" if train.max_steps else epochs_text
        full_rows_note = "" if plan.row_tokens is not None else " if every row were full length"
        hours_text = f", {format_duration(3600 * plan.hours)}{full_rows_note}" if plan.hours is not None else ""
        trained_parts = "" if config.tuning.trainable == "all" else f", trains {', '.join(config.tuning.trainable)}"
        lines.append(
            f"  {number} {name}: {length_text}, learning rate {config.learning_rate:g}, rows of at most "
            f"{plan.max_seq_len:,} tokens{trained_parts}; micro {plan.batch.micro_batch} x accum "
            f"{plan.batch.grad_accum}, "
            f"{plan.choice.checkpointing_text}: {plan.choice.verdict}{hours_text}"
        )
    return lines


def plan_lines(plan: Plan, config: RunConfig, *, command: str | None, node_commands: Sequence[str] = ()) -> list[str]:
    """Everything that `make plan WHY=1` prints. `command` None: no command starts it. `node_commands`: lines with the
    command of each node."""
    launch_lines = (list(node_commands) or [f"Launch: {command}"]) if command is not None else []
    return [
        *hardware_lines(plan.hardware),
        choice_line(plan),
        *parameter_lines(plan, config),
        *batch_lines(plan, config),
        *bar_lines(plan),
        *(speed_lines(plan) if plan.fits else []),
        "Candidates:",
        *candidate_table_lines(plan),
        *(launch_lines if plan.fits else suggestion_lines(plan)),
    ]


def grid_lines(cells: Sequence[tuple[tuple[str, ...], Plan]]) -> list[str]:
    """The table of a grid, one row per cell: what fits, or which memory is too small."""
    if not cells:
        return []
    text_columns = ("fits", "layout", "micro x accum", "checkpointing")
    table = _build_table(text_columns, ("allocated GiB", "needs GiB", "tokens/s"), first_column="settings")
    for settings, plan in cells:
        speed_text = f"{plan.speed.tokens_per_s:,.0f}" if plan.speed_known and plan.fits else "-"
        ram_text = f", with {plan.choice.host_required / GIB:.1f} GiB of RAM" if plan.choice.offloads else ""
        table.add_row(
            " ".join(settings),
            f"yes{ram_text}" if plan.fits else f"NO: too little {' and '.join(plan.choice.insufficient_memory)}",
            plan.layout,
            f"{plan.batch.micro_batch} x {plan.batch.grad_accum}",
            _format_checkpointing(plan.choice),
            f"{plan.memory.allocated / GIB:.1f}",
            f"{plan.memory.required / GIB:.1f}",
            speed_text,
        )
    return ["What if:", *_render_table(table)]


def largest_fit_line(largest: LargestFit) -> str:
    """The answer to MAX."""
    if largest.value is None:
        return f"Largest {largest.question}: none fits ({largest.limited_by})"
    return f"Largest {largest.question} that fits: {largest.value} ({largest.limited_by})"


def _build_table(text_columns: Sequence[str], number_columns: Sequence[str], *, first_column: str = "") -> Table:
    table = Table(*filter(None, [first_column]), box=None, pad_edge=False, header_style="", show_edge=False)
    for name in (*text_columns, *number_columns):
        table.add_column(name, justify="right" if name in number_columns else "left", no_wrap=True)
    return table


def _render_table(table: Table) -> list[str]:
    buffer = io.StringIO()
    Console(file=buffer, width=TABLE_WIDTH, no_color=True, highlight=False).print(table)
    return [line.rstrip() for line in buffer.getvalue().splitlines()]
