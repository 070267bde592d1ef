"""A plan in words: the reasons that `plan.json` keeps, the summary, and the page of `make plan`."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from pathlib import PurePath
from typing import Any

from rich.table import Table

from sft_play.config.schema import RunConfig
from sft_play.log import one_line
from sft_play.machine.hardware import Hardware
from sft_play.machine.software import LINEAR_ATTENTION_PACKAGE, kernel_package_problem
from sft_play.models.shape import ModelShape
from sft_play.planner.batching import format_batch_product, format_changed_batch
from sft_play.planner.candidates import (
    EQUAL_SPEED_SHARE,
    Candidate,
    PlanInputs,
    build_candidate,
    choose_candidate,
    closest_to_fitting,
    fastest_speed,
    format_needs,
    plan_micro_batches,
)
from sft_play.planner.kernels import PlannedKernels, plan_experts
from sft_play.planner.layout import LAYOUT_PREFERENCE
from sft_play.planner.memory.estimate import MAX_WHOLE_BYTES, MAX_WHOLE_SAVE_S, RUN_PHASES
from sft_play.planner.memory.model_states import loads_by_unit
from sft_play.planner.memory.step_memory import MeasuredStepSimulation, create_step_simulation, is_padded
from sft_play.planner.plan import Plan, RunLength, format_parameters
from sft_play.planner.precision import DTYPE_SHORT_NAMES, ineffective_distributed_options
from sft_play.planner.speed import (
    EXPERTS_PART,
    LINEAR_ATTENTION_PART,
    Speed,
    SpeedError,
    compile_reasons,
    find_speed_error,
)
from sft_play.text import GIB, format_duration, format_gib, render_lines

# Why a plan is as it is, a line each: what `make plan` prints as `Because:` and `plan.json` keeps;
# at the end the candidates that it shows beside its choice, each with why it was not chosen.

REPEATED_KEYS_REASON = (
    "attention: keys and values are repeated for all heads, because flash attention, the only kernel that "
    "takes grouped ones, does not run on this GPU in this precision"
)

CUDNN_REASON = (
    "attention: cuDNN's kernel, which PyTorch prefers on this GPU and which is faster than flash attention there: all "
    "batches have one shape, so its graph is built once"
)

CUSTOM_LOGITS_REASON = "loss: over whole logits, as the class's own are more than its head's products"
ACTIVATION_REASONS = {
    False: "activations: the class's own blocks were run on tensors without bytes",
    True: "activations: the class's own blocks were run on few real tokens on the CPU, carried on",
}


def plan_reasons(
    inputs: PlanInputs,
    candidates: Sequence[Candidate],
    choice: Candidate,
    *,
    max_seq_len: int,
    repeats_kv: bool,
    kernels: PlannedKernels,
    notes: Sequence[str] = (),
) -> tuple[str, ...]:
    """Why the plan is as it is: precision, length, batch, rows, layout, kernels, and what a run should know;
    `max_seq_len`: tokens of a row at most; `notes`: what a trace of the choice said."""
    requested_seq_len = inputs.config.model.max_seq_len
    simulation, has_adapters = (
        create_step_simulation(inputs.config, inputs.shape, choice.precision, choice.step),
        inputs.config.tuning.mode != "full",
    )
    correction = inputs.find_correction(choice.layout).narrow_to_size(choice.uncorrected.reserved)
    length_reasons = (
        [f"max_seq_len {max_seq_len} instead of {requested_seq_len}: the model has {max_seq_len} positions"]
        if max_seq_len != requested_seq_len
        else []
    )
    return (
        choice.precision.reason,
        *length_reasons,
        *([f"the model's shape is {inputs.shape.source_note}"] if inputs.shape.source_note else []),
        *(
            [ACTIVATION_REASONS[simulation.was_measured_on_cpu]]
            if isinstance(simulation, MeasuredStepSimulation)
            else []
        ),
        *([CUSTOM_LOGITS_REASON] if inputs.shape.has_custom_logits else []),
        *(
            f"adapters: {text}"
            for text in (
                inputs.shape.adapter_placement.notes if inputs.shape.adapter_placement and has_adapters else ()
            )
        ),
        *filter(None, (inputs.shape.text_only_note, inputs.shape.storage_note, inputs.shape.published_note)),
        *_batch_reasons(inputs, candidates, choice),
        _row_reason(inputs, choice),
        *_loading_reasons(inputs, choice),
        *([inputs.config.derived_learning_rate[1]] if inputs.config.train.learning_rate == "auto" else []),
        *([_sharded_checkpoint_reason(inputs, choice)] if choice.memory.checkpoint == "sharded" else []),
        *([REPEATED_KEYS_REASON] if repeats_kv else []),
        *([CUDNN_REASON] if choice.step.cudnn else []),
        *([_evaluation_reason(inputs.config, choice)] if choice.step.eval_batch else []),
        *ineffective_distributed_options(inputs.config, choice.layout.name),
        *filter(None, (correction.reason, correction.warning)),
        *slow_code_reasons(inputs.config, inputs.shape, choice, inputs.rates.missing_packages),
        *([kernels.reason] if kernels.reason else []),
        *notes,
        *compile_reasons(inputs.config, inputs.shape),
        *_tuning_reasons(inputs.config, choice),
        *_fit_reasons(choice),
    )


def _tuning_reasons(config: RunConfig, choice: Candidate) -> Iterator[str]:
    tuning, layout, compute = config.tuning, choice.layout, choice.precision.compute
    if tuning.mode != "full" and tuning.lora.dtype == "bfloat16":
        effect = "adapters and their states are bf16, and small updates are lost"
        if compute != "bfloat16":
            effect = f"adapters stay in fp32, because the run computes in {DTYPE_SHORT_NAMES[compute]}"
        elif layout.is_zero or (layout.is_fsdp and tuning.mode == "lora"):
            effect = f"{layout.name} still steps adapters in fp32"
        yield f"tuning.lora.dtype=bfloat16: {effect}"
    if tuning.backend == "unsloth":
        layout_note = "" if layout.name in ("single", "ddp") else f"; {layout.name} would run with backend bnb"
        yield f"tuning.backend=unsloth: planned as backend bnb; Unsloth itself was not measured{layout_note}"


def _batch_reasons(inputs: PlanInputs, candidates: Sequence[Candidate], choice: Candidate) -> list[str]:
    text = format_batch_product(inputs.config.train, choice.batch, is_resumed=inputs.resumed_batch is not None)
    same_layout = [candidate for candidate in candidates if candidate.fits and candidate.layout == choice.layout]
    sizes = [
        candidate.batch.micro_batch
        for candidate in same_layout
        if candidate.checkpointed_layers == choice.checkpointed_layers
    ]
    if max(sizes, default=0) > choice.batch.micro_batch:
        text += f"; up to {max(sizes)} would fit and be about as fast"
    elif len(sizes) > 1:
        text += "; smaller ones are slower"
    effective_batch, layout = choice.batch.effective_batch, choice.layout
    # a mesh is the user's own choice, and needs no explanation
    if (
        layout.data_parallel == layout.ranks
        or effective_batch % layout.ranks == 0
        or inputs.config.model.mesh_shape is not None
    ):
        return [text]
    return [
        text,
        f"an effective batch of {effective_batch} does not split over {layout.ranks} ranks that each read their own "
        f"rows: {layout.name} has {layout.data_parallel}",
    ]


def _loading_reasons(inputs: PlanInputs, choice: Candidate) -> list[str]:
    layout, memory = choice.layout, choice.memory
    if inputs.config.tuning.mode != "qlora" or not layout.shards_params or loads_by_unit(inputs.config, layout):
        return []
    ram_note = ", the packed ones in RAM" if layout.offloads_params else ""
    return [
        f"{layout.name} shards NF4 weights after loading: until then each rank holds all of them "
        f"({memory.load_bytes / GIB:.1f} GiB), in a step {memory.terms['weights'] / GIB:.1f} GiB{ram_note}"
    ]


def _row_reason(inputs: PlanInputs, choice: Candidate) -> str:
    padding_text = _packing_text(inputs, choice) if inputs.packed else _padding_text(inputs, choice)
    row_tokens = inputs.row_tokens
    if row_tokens is None:
        return f"assumed: every row {inputs.seq_len} tokens{padding_text}, every token trained on"
    lengths_text = (
        f"longest row {row_tokens.longest:,} tokens, mean {row_tokens.mean:,.0f}, 95% up to {row_tokens.p95:,}"
    )
    lengths_text += (
        f"; longest held-out row {row_tokens.held_out:,}" if row_tokens.held_out > row_tokens.longest else ""
    )
    padded_tokens = plan_micro_batches(inputs, choice.precision, choice.step).tokens
    fill_note = (
        f": a micro-batch has as many rows as fit into {padded_tokens:,} tokens" if padded_tokens is not None else ""
    )
    return f"{lengths_text}{fill_note}{padding_text}"


def _sharded_checkpoint_reason(inputs: PlanInputs, choice: Candidate) -> str:
    memory = choice.memory
    size_text, rank_size_text = (
        f"{memory.checkpoint_bytes / GIB:.1f} GiB",
        f"{memory.host_save_each_bytes / GIB:.1f} GiB",
    )
    if inputs.config.train.async_save:
        return (
            f"train.async_save: checkpoints of {size_text} are written while training goes on, in parts: each of "
            f"{choice.layout.ranks} ranks keeps its part in RAM meanwhile ({rank_size_text})"
        )
    return (
        f"checkpoints of {size_text} are written in parts, one by each of {choice.layout.ranks} ranks "
        f"({rank_size_text} of RAM each): "
        f"above {MAX_WHOLE_BYTES / GIB:.1f} GiB the first rank would write for more than {MAX_WHOLE_SAVE_S // 60} "
        "minutes, and "
        f"hold {memory.host_gather_bytes / GIB:.1f} GiB in RAM; any number of ranks resumes from them"
    )


def _packing_text(inputs: PlanInputs, choice: Candidate) -> str:
    if choice.step.varlen:
        return (
            ", several chats to a row, told apart by their boundaries, without a "
            f"mask{_separate_calls_text(inputs, choice)}"
        )
    if choice.step.attention == "flash_attention_2":  # their position ids start anew
        return ", several chats to a row, told apart by their boundaries"
    return (
        ", several chats to a row, with a mask between them "
        f"({inputs.row_attention.pack_mask_reason(choice.precision)})"
    )


def _padding_text(inputs: PlanInputs, choice: Candidate) -> str:
    if choice.step.varlen:
        text = ", rows one behind the other without padding, told apart by their boundaries"
        return text + _separate_calls_text(inputs, choice)
    if not is_padded(inputs.config, choice.layout, rows=choice.batch.micro_batch):
        return ""
    can_join_rows = (
        inputs.cuts_by_tokens
        and inputs.row_tokens is not None
        and inputs.row_attention.pack_mask_reason(choice.precision) is None
    )
    is_slower = can_join_rows and choice.layout.context_parallel == 1
    slower_note = (
        "; without padding each chat would be a call of its own, which is predicted to be slower" if is_slower else ""
    )
    if choice.step.padded:
        return f", shorter rows padded to it and masked ({inputs.row_attention.mask_reason}){slower_note}"
    return f", shorter rows padded to it, without a mask (attention is causal, and padding at the end){slower_note}"


def _separate_calls_text(inputs: PlanInputs, choice: Candidate) -> str:
    reason = inputs.row_attention.one_by_one_reason(choice.precision)
    return f", each attended to by a call of its own ({reason})" if choice.step.one_by_one else ""


def _evaluation_reason(config: RunConfig, choice: Candidate) -> str:
    rows, memory = choice.step.eval_batch, choice.memory
    given_note = " (eval.batch_size is given)" if config.eval.batch_size != "auto" else ""
    evaluation_bytes, step_bytes = (memory.phase_bytes(name)[1] or 0 for name in ("evaluation", "training"))
    return (
        f"evaluation: {rows} row{'s' if rows > 1 else ''} at a time per rank{given_note}, rows of similar length "
        "together; "
        f"{evaluation_bytes / GIB:.2f} GiB, a training step {step_bytes / GIB:.2f}"
    )


def _fit_reasons(choice: Candidate) -> list[str]:
    reasons = []
    if choice.step.pages and (choice.offloads or choice.step.offloads):
        needs_text = f"{choice.host_required / GIB:.1f} GiB of RAM are page-locked for offload"
        reasons.append(f"{needs_text}, but WSL has been seen to give only 0.5 to 1 GiB: the run may fail at the start")
    if choice.fits and choice.needs_unknown_ram:
        needs_text = f"{choice.host_required / GIB:.0f} GiB of RAM are needed on each node"
        reasons.append(f"{needs_text}, and the machine's RAM was not given (ram=512GiB)")
    if not choice.fits:
        reasons.append(f"nothing fits: the closest is predicted to need {format_needs(choice, term_count=3)}")
    return reasons


# --- candidates that were not chosen ----------------------------------------------------------------------------------
def candidates_to_show(inputs: PlanInputs, candidates: Sequence[Candidate], choice: Candidate) -> list[Candidate]:
    """The candidates worth showing, each with why it was not chosen: those of the chosen layout, the best of each
    other."""
    selected: dict[Any, Candidate] = {choice.key: choice}
    for candidate in candidates:
        is_same_layout = candidate.layout == choice.layout
        is_same_batch = candidate.batch.micro_batch == choice.batch.micro_batch
        if is_same_layout and (is_same_batch or candidate.checkpointed_layers == choice.checkpointed_layers):
            selected.setdefault(candidate.key, candidate)
    for layout in {candidate.layout: None for candidate in candidates}:
        layout_candidates = [candidate for candidate in candidates if candidate.layout == layout]
        best = choose_candidate(layout_candidates) or closest_to_fitting(layout_candidates)
        selected.setdefault(best.key, best)
    logits_candidate = build_candidate(inputs, choice.layout, choice.batch, choice.checkpointed_layers, loss="logits")
    # full logits are shown only for comparison, but where the class leaves no other way
    if choice.fits or not logits_candidate.fits:
        selected.setdefault(logits_candidate.key, logits_candidate)
    fastest_tokens_per_s = fastest_speed(candidates)
    return [
        candidate
        if candidate.key == choice.key
        else dataclasses.replace(
            candidate,
            rejected_because=rejection_reason(inputs, candidate, choice, fastest_tokens_per_s=fastest_tokens_per_s),
        )
        for candidate in selected.values()
    ]


def rejection_reason(
    inputs: PlanInputs, candidate: Candidate, choice: Candidate, *, fastest_tokens_per_s: float
) -> str:
    """Why a candidate was not chosen, with numbers; `fastest_tokens_per_s`: of the fastest candidate that fits."""
    if not candidate.fits:
        return f"needs {format_needs(candidate, term_count=1)}"
    if candidate.step.loss != choice.step.loss:
        extra_bytes = candidate.memory.allocated - choice.memory.allocated
        # less than 0.05 GiB would be printed as 0.0 GiB more
        if extra_bytes < GIB // 20:
            full_logits, chunked = format_gib(candidate.memory.allocated), format_gib(choice.memory.allocated)
            return f"full logits: {full_logits} GiB allocated; the chunked loss, which training uses, {chunked}"
        return f"full logits: {format_gib(extra_bytes)} GiB more for the same loss"
    speed_ratio = candidate.speed.tokens_per_s / choice.speed.tokens_per_s
    error = find_speed_error(inputs.shape, choice.precision, inputs.hardware, choice.step)
    if candidate.layout != choice.layout:
        return _layout_reason(inputs, candidate, choice, speed_ratio, error)
    if candidate.speed.tokens_per_s < EQUAL_SPEED_SHARE * fastest_tokens_per_s:
        basis = "predicted" if inputs.rates.is_known else "with typical rates"
        share_of_best = candidate.speed.tokens_per_s / fastest_tokens_per_s
        if error.is_within(share_of_best):
            return f"{basis} slower than the fastest that fits, but about as fast within ±{error.share:.0%}"
        return f"{basis} {1 - share_of_best:.1%} slower than the fastest that fits"
    extra_bytes = candidate.memory.required - choice.memory.required
    speed_text = "about as fast" if speed_ratio >= 1.001 else "not faster"
    return (
        f"{speed_text}, {format_gib(extra_bytes)} GiB more"
        if extra_bytes > 0
        else f"{speed_text}, {format_gib(candidate.memory.required)} GiB as well"
    )


def _layout_reason(
    inputs: PlanInputs, candidate: Candidate, choice: Candidate, speed_ratio: float, error: SpeedError
) -> str:
    if candidate.layout.offloads_states and not choice.layout.offloads_states:
        ram_note = f"; it needs {format_gib(candidate.host_required)} GiB of RAM on each node"
        return f"offload is not needed: {_format_fit(inputs, choice)}{ram_note}"
    is_less_simple = LAYOUT_PREFERENCE.index(candidate.layout.name) > LAYOUT_PREFERENCE.index(choice.layout.name)
    text = f"{'not needed' if is_less_simple else 'another is preferred'}: {_format_fit(inputs, choice)}"
    moved_difference = candidate.speed.moved_bytes - choice.speed.moved_bytes
    if abs(moved_difference) >= GIB // 10:
        text += (
            f" and moves {abs(moved_difference) / GIB:.1f} GiB {'less' if moved_difference > 0 else 'more'} per step"
        )
    if speed_ratio < EQUAL_SPEED_SHARE or not is_less_simple:
        text += f"; this is predicted {format_relative_speed(speed_ratio, error)}"
    return text


def format_relative_speed(ratio: float, error: SpeedError | None = None) -> str:
    """A speed relative to another in words: `3% slower`, `12% faster`, `as fast`; `about as fast` within the error."""
    if error is not None and error.is_within(ratio):
        return "about as fast"
    percent = f"{abs(ratio - 1):.0%}"
    if percent == "0%":
        return "as fast"
    return f"{percent} {'faster' if ratio > 1 else 'slower'}"


def _format_fit(inputs: PlanInputs, choice: Candidate) -> str:
    return (
        f"{choice.layout.name} fits at {format_gib(choice.memory.required)} of {format_gib(inputs.device_budget)} GiB"
    )


# --- slower code than there is ----------------------------------------------------------------------------------------
def slow_code_reasons(
    config: RunConfig, shape: ModelShape, choice: Candidate, missing_packages: Collection[str]
) -> list[str]:
    """A line for the experts that do not run as grouped products of 16 bits by themselves, and one for each package of
    `missing_packages` whose kernels the model's class would run on this GPU, with what it costs by the roofline."""
    lines, experts = [], plan_experts(config, shape, choice.precision)
    if experts is not None and experts.name == "eager":
        lines.append(f"experts: {experts.reason}{_format_cost(choice.speed, EXPERTS_PART)}")
    elif experts is not None and experts.casts_weights:
        lines.append(f"experts: {experts.reason}")
    for name in shape.kernel_packages if choice.step.capability is not None else ():
        if name in missing_packages:
            cost_text = _format_cost(choice.speed, LINEAR_ATTENTION_PART) if name == LINEAR_ATTENTION_PACKAGE else ""
            unsound_reason = kernel_package_problem(name, choice.step.capability)
            advice = f"; leave it so: {unsound_reason}" if unsound_reason else ""
            lines.append(
                f"{name} is not installed: {shape.model_type} runs its own slower code instead{cost_text}{advice}"
            )
    return lines


def _format_cost(speed: Speed, part: str) -> str:
    seconds = speed.parts.get(part, 0.0)
    return f": {seconds:.3g} s of a step of {speed.step_s:.3g} s, by the roofline" if seconds else ""


# --------------------------------------------------------------------------------------------------
# The short page, what a person reads of a plan before anything else: does it fit, the batch, how long, which rows,
# what to watch for.
#
# Everything else is on the page below: `make plan WHY=1`, the log of a run and `plan.json`.

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


# --------------------------------------------------------------------------------------------------
# The long page (`WHY=1`), and lines that a run logs: the machine, the batch, the choice, a bar of the memory, the table
# of candidates.
#
# Memory is printed in GiB, units of 2**30 bytes.

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
    return render_lines(table, width=TABLE_WIDTH)


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
    return ["What if:", *render_lines(table, width=TABLE_WIDTH)]


def _build_table(text_columns: Sequence[str], number_columns: Sequence[str], *, first_column: str = "") -> Table:
    table = Table(*filter(None, [first_column]), box=None, pad_edge=False, header_style="", show_edge=False)
    for name in (*text_columns, *number_columns):
        table.add_column(name, justify="right" if name in number_columns else "left", no_wrap=True)
    return table
