"""Why a plan is as it is, a line each: what `make plan` prints as `Because:` and `plan.json` keeps; at the end the
candidates that it shows beside its choice, each with why it was not chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from sft_play.config.schema import RunConfig
from sft_play.facts.installed import LINEAR_ATTENTION_PACKAGE, kernel_package_problem
from sft_play.facts.models.model_shape import ModelShape
from sft_play.planner.batching import format_batch_product
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
from sft_play.planner.gradients import ineffective_distributed_options
from sft_play.planner.kernels import PlannedKernels, plan_experts
from sft_play.planner.layout import LAYOUT_PREFERENCE
from sft_play.planner.memory.loading_and_saving import MAX_WHOLE_BYTES, MAX_WHOLE_SAVE_S
from sft_play.planner.memory.measured_walk import MeasuredStepSimulation, create_step_simulation
from sft_play.planner.memory.model_states import loads_by_unit
from sft_play.planner.memory.step_memory import is_padded
from sft_play.planner.precision import DTYPE_SHORT_NAMES
from sft_play.planner.speed.compile_and_liger import compile_reasons
from sft_play.planner.speed.throughput import EXPERTS_PART, LINEAR_ATTENTION_PART, Speed, SpeedError, find_speed_error
from sft_play.units import GIB, format_gib

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
