"""A plan in words: the reasons that `plan.json` keeps, the summary, and the page of `make plan`."""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from pathlib import PurePath

from rich.table import Table

from sft_play.config.schema import RunConfig
from sft_play.log import one_line
from sft_play.machine.gpu_catalog import find_catalog_entries
from sft_play.machine.hardware import Hardware
from sft_play.machine.software import LINEAR_ATTENTION_PACKAGE, kernel_package_problem
from sft_play.models.shape import ModelShape
from sft_play.planner.batching import format_batch_product, format_changed_batch
from sft_play.planner.candidates import (
    EQUAL_SPEED_SHARE,
    STREAMED_LEAD,
    Candidate,
    PlanInputs,
    build_candidate,
    choose_candidate,
    closest_to_fitting,
    estimate_micro_steps,
    fastest_speed,
    format_needs,
    plan_micro_batches,
    predict_step_speed,
)
from sft_play.planner.kernels import PlannedKernels, plan_experts
from sft_play.planner.layout import LAYOUT_PREFERENCE, Layout
from sft_play.planner.memory.estimate import MAX_WHOLE_BYTES, MAX_WHOLE_SAVE_S, RUN_PHASES
from sft_play.planner.memory.model_states import loads_by_unit, streamed_bytes
from sft_play.planner.memory.step_memory import (
    MeasuredStepSimulation,
    create_step_simulation,
    is_padded,
)
from sft_play.planner.plan import Plan, RunLength, format_parameters, plan_vision
from sft_play.planner.precision import (
    DTYPE_BYTES,
    DTYPE_SHORT_NAMES,
    ineffective_distributed_options,
)
from sft_play.planner.speed import (
    EXPERTS_PART,
    LINEAR_ATTENTION_PART,
    OPERATOR_RANGE_S,
    Speed,
    SpeedError,
    compile_reasons,
    find_speed_error,
)
from sft_play.text import GIB, format_duration, format_gib, format_usd, plural, render_lines

# Why a plan is as it is, a line each: what `make plan` prints as `Because:` and `plan.json` keeps;
# at the end the candidates that it shows beside its choice, each with why it was not chosen.

REPEATED_KEYS_REASON = (
    "attention: keys and values are repeated for all heads, because flash attention, the only"
    " kernel that takes grouped ones, does not run on this GPU in this precision"
)

CUDNN_REASON = (
    "attention: cuDNN's kernel, which PyTorch prefers on this GPU and which is faster than flash"
    " attention there: all batches have one shape, so its graph is built once"
)

CUSTOM_LOGITS_REASON = (
    "loss: over whole logits, as the class's own are more than its head's products"
)
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
    """Why the plan is as it is, and what a run should know; `max_seq_len`: tokens of a row at most;
    `notes`: what a trace of the choice said."""
    config, shape = inputs.config, inputs.shape
    requested_seq_len = config.model.max_seq_len
    length_reason = (
        f"max_seq_len {max_seq_len} instead of {requested_seq_len}: the model has {max_seq_len}"
        " positions"
    )
    simulation = create_step_simulation(config, shape, choice.precision, choice.step)
    activation_reason = ""
    if isinstance(simulation, MeasuredStepSimulation):
        activation_reason = ACTIVATION_REASONS[simulation.was_measured_on_cpu]
    adapter_notes, learning_rate_reason = [], ""
    if shape.adapter_placement is not None and config.tuning.mode != "full":
        adapter_notes = shape.adapter_placement.notes
    if config.train.learning_rate == "auto":
        _, learning_rate_reason = config.derived_learning_rate
    correction = inputs.find_correction(choice.layout).narrow_to_size(choice.uncorrected.reserved)
    # in the order of the decisions; a text that does not apply is empty, and drops out
    reasons = (
        choice.precision.reason,
        length_reason * (max_seq_len != requested_seq_len),
        f"the model's shape is {shape.source_note}" * bool(shape.source_note),
        activation_reason,
        CUSTOM_LOGITS_REASON * shape.has_custom_logits,
        *(f"adapters: {note}" for note in adapter_notes),
        *(shape.text_only_note, shape.storage_note),
        *_batch_reasons(inputs, candidates, choice),
        learning_rate_reason,
        _checkpoint_reason(config, choice),
        _image_reason(inputs, choice),
        REPEATED_KEYS_REASON * repeats_kv,
        CUDNN_REASON * choice.step.cudnn,
        _evaluation_reason(config, choice),
        *ineffective_distributed_options(config, choice.layout.name),
        *(correction.reason, correction.warning),
        _host_reason(inputs, choice),
        _stream_reason(inputs, choice),
        *slow_code_reasons(config, shape, choice, inputs.rates.missing_packages),
        kernels.reason,
        *notes,
        *compile_reasons(config, shape),
        *_tuning_and_fit_reasons(config, choice),
    )
    return tuple(filter(None, reasons))


def _checkpoint_reason(config: RunConfig, choice: Candidate) -> str:
    """Why checkpoints are written in parts; empty where the first rank writes them whole."""
    memory, ranks = choice.memory, choice.layout.ranks
    if memory.checkpoint != "sharded":
        return ""
    size_text = f"{memory.checkpoint_bytes / GIB:.1f} GiB"
    rank_size_text = f"{memory.host_save_each_bytes / GIB:.1f} GiB"
    if config.train.async_save:
        return (
            f"train.async_save: checkpoints of {size_text} are written while training goes on,"
            f" in parts: each of {ranks} ranks keeps its part in RAM meanwhile"
            f" ({rank_size_text})"
        )
    return (
        f"checkpoints of {size_text} are written in parts, one by each of {ranks} ranks"
        f" ({rank_size_text} of RAM each): above {MAX_WHOLE_BYTES / GIB:.1f} GiB the first rank"
        f" would write for more than {MAX_WHOLE_SAVE_S // 60} minutes, and hold"
        f" {memory.host_gather_bytes / GIB:.1f} GiB in RAM; any number of ranks resumes from"
        " them"
    )


def _image_reason(inputs: PlanInputs, choice: Candidate) -> str:
    """What the rows show, and what the vision tower takes; empty for rows of text."""
    rows, figures = inputs.row_tokens, plan_vision(inputs, choice)
    if rows is None or rows.images is None or figures is None:
        return ""
    images = rows.images
    count_text = f"1 to {images.row_pictures}" if images.row_pictures > 1 else "one"
    return (
        f"images: {plural(images.rows, 'row has', 'rows have')} {count_text}, at most"
        f" {images.picture_tokens:,} tokens each; the vision tower takes"
        f" {figures.weight_bytes / GIB:.2f} GiB, {'trained' if figures.is_trained else 'frozen'},"
        f" and at most {figures.pass_bytes / GIB:.2f} GiB while it looks at {figures.pictures}"
        " (data.image_pixels.max makes images smaller)"
    )


def _evaluation_reason(config: RunConfig, choice: Candidate) -> str:
    """How many rows are evaluated at a time, and their memory; empty without evaluation."""
    if not choice.step.eval_batch:
        return ""
    option_note = " (eval.batch_size is given)" * (config.eval.batch_size != "auto")
    evaluation_bytes, step_bytes = (
        choice.memory.phase_bytes(name)[1] or 0 for name in ("evaluation", "training")
    )
    return (
        f"evaluation: {plural(choice.step.eval_batch, 'row')} at a time per rank{option_note},"
        f" rows of similar length together; {evaluation_bytes / GIB:.2f} GiB, a training step"
        f" {step_bytes / GIB:.2f}"
    )


def _stream_reason(inputs: PlanInputs, choice: Candidate) -> str:
    """What a streamed base sends over the bus, and how much of it the computation hides; empty for
    another layout."""
    step = choice.step
    if not choice.layout.is_streamed:
        return ""
    if not step.on_gpu:
        return "the base stays in one part of RAM and visits another, as it would a GPU"
    passes, tokens = step.grad_accum, step.tokens
    micro_steps = estimate_micro_steps(inputs, choice.precision, step)
    if micro_steps is not None:  # of the run's own rows
        passes, tokens = max(1, round(micro_steps.count)), round(micro_steps.padded_tokens)
    itemsize = DTYPE_BYTES[choice.precision.load]
    sent_bytes = 2 * streamed_bytes(inputs.config, inputs.shape, itemsize) * passes
    rate = inputs.layout_rates(choice.layout).bus_bytes_per_s
    hidden_share = 1 - choice.speed.parts["bus"] * rate / sent_bytes
    source = "as for cards of its kind"
    if inputs.host_speed is not None and inputs.host_speed.bus_bytes_per_s:
        source = f"measured by {inputs.host_speed.measured_by} ({inputs.host_speed.date})"
    return (
        f"the base visits from RAM: {sent_bytes / GIB:.0f} GiB a step at {rate / 1e9:.0f} GB/s"
        f" ({source}); {plural(passes, 'pass', 'passes')} of {tokens:,} tokens hide"
        f" {max(0.0, hidden_share):.0%} of it"
    )


def _host_reason(inputs: PlanInputs, choice: Candidate) -> str:
    """What the host's speed is from; where it was not measured, the speeds that it may come to.
    Empty where the quickest and the slowest host come to the same."""
    measured, correction = inputs.host_speed, inputs.find_correction(choice.layout)
    if not choice.step.on_gpu or correction.has_measured_speed:
        return ""
    if measured is not None and measured.operator_s:
        return (
            f"host: {measured.operator_s * 1e6:.0f} us an operator, measured by"
            f" {measured.measured_by} ({measured.date})"
        )
    rates = inputs.layout_rates(choice.layout)
    fastest, slowest = (
        predict_step_speed(
            inputs, choice.precision, choice.step, dataclasses.replace(rates, operator_s=operator_s)
        ).tokens_per_s
        for operator_s in OPERATOR_RANGE_S
    )
    if slowest >= EQUAL_SPEED_SHARE * fastest:
        return ""
    return (
        f"host: not measured on this machine, {rates.operator_s * 1e6:.0f} us an operator are"
        f" assumed; the {OPERATOR_RANGE_S[0] * 1e6:.0f} to {OPERATOR_RANGE_S[1] * 1e6:.0f} that"
        f" were seen come to {fastest:,.0f} to {slowest:,.0f} tokens/s (make gpu-info FULL=1 and"
        " every run measure it)"
    )


def _tuning_and_fit_reasons(config: RunConfig, choice: Candidate) -> Iterator[str]:
    tuning, layout, compute = config.tuning, choice.layout, choice.precision.compute
    if tuning.mode != "full" and tuning.lora.dtype == "bfloat16":
        effect = "adapters and their states are bf16, and small updates are lost"
        if compute != "bfloat16":
            effect = (
                f"adapters stay in fp32, because the run computes in {DTYPE_SHORT_NAMES[compute]}"
            )
        elif layout.is_zero or (layout.is_fsdp and tuning.mode == "lora"):
            effect = f"{layout.name} still steps adapters in fp32"
        yield f"tuning.lora.dtype=bfloat16: {effect}"
    if tuning.backend == "unsloth":
        layout_note = f"; {layout.name} would run with backend bnb" * (
            layout.name not in ("single", "ddp")
        )
        yield (
            "tuning.backend=unsloth: planned as backend bnb; Unsloth itself was not"
            f" measured{layout_note}"
        )
    ram_gib = choice.host_required / GIB
    if choice.step.pages and (choice.offloads or choice.step.offloads):
        yield (
            f"{ram_gib:.1f} GiB of RAM are page-locked for offload, but WSL has been seen to give"
            " only 0.5 to 1 GiB: the run may fail at the start"
        )
    if choice.fits and choice.needs_unknown_ram:
        yield (
            f"{ram_gib:.0f} GiB of RAM are needed on each node, and the machine's RAM was not given"
            " (ram=512GiB)"
        )
    if not choice.fits:
        yield f"nothing fits: the closest is predicted to need {format_needs(choice, term_count=3)}"


def _batch_reasons(
    inputs: PlanInputs, candidates: Sequence[Candidate], choice: Candidate
) -> Iterator[str]:
    batch, layout = choice.batch, choice.layout
    text = format_batch_product(
        inputs.config.train, batch, is_resumed=inputs.resumed_batch is not None
    )
    sizes = [
        one.batch.micro_batch
        for one in candidates
        if one.fits
        and one.layout == layout
        and one.checkpointed_layers == choice.checkpointed_layers
    ]
    if max(sizes, default=0) > batch.micro_batch:
        text += f"; up to {max(sizes)} would fit and be about as fast"
    elif len(sizes) > 1:
        text += "; smaller ones are slower"
    yield text
    shares_rows = layout.data_parallel != layout.ranks and batch.effective_batch % layout.ranks != 0
    # a mesh is the user's own choice, and needs no explanation
    if shares_rows and inputs.config.model.mesh_shape is None:
        yield (
            f"an effective batch of {batch.effective_batch} does not split over {layout.ranks}"
            f" ranks that each read their own rows: {layout.name} has {layout.data_parallel}"
        )
    yield _row_reason(inputs, choice)
    is_nf4, memory = inputs.config.tuning.mode == "qlora", choice.memory
    if is_nf4 and layout.shards_params and not loads_by_unit(inputs.config, layout):
        ram_note = ", the packed ones in RAM" * layout.offloads_params
        yield (
            f"{layout.name} shards NF4 weights after loading: until then each rank holds all of"
            f" them ({memory.load_bytes / GIB:.1f} GiB), in a step"
            f" {memory.terms['weights'] / GIB:.1f} GiB{ram_note}"
        )


def _row_reason(inputs: PlanInputs, choice: Candidate) -> str:
    padding_text, row_tokens = _padding_text(inputs, choice), inputs.row_tokens
    if row_tokens is None:
        return f"assumed: every row {inputs.seq_len} tokens{padding_text}, every token trained on"
    text = (
        f"longest row {row_tokens.longest:,} tokens, mean {row_tokens.mean:,.0f}, 95% up to"
        f" {row_tokens.p95:,}"
    )
    if row_tokens.sampled_rows:
        text += (
            f" (estimated from a sample of {row_tokens.sampled_rows:,} rows; training counts all)"
        )
    if row_tokens.held_out > row_tokens.longest:
        text += f"; longest held-out row {row_tokens.held_out:,}"
    padded_tokens = plan_micro_batches(inputs, choice.precision, choice.step).tokens
    if padded_tokens is not None:
        text += f": a micro-batch has as many rows as fit into {padded_tokens:,} tokens"
    return text + padding_text


def _padding_text(inputs: PlanInputs, choice: Candidate) -> str:
    """How chats that share a row, or a micro-batch, are told apart, as the end of a sentence."""
    mask_reason = inputs.row_attention.pack_mask_reason(choice.precision)
    if choice.step.varlen:
        text = ", rows one behind the other without padding, told apart by their boundaries"
        if inputs.packed:
            text = ", several chats to a row, told apart by their boundaries, without a mask"
        call_reason = inputs.row_attention.one_by_one_reason(choice.precision)
        return (
            text
            + f", each attended to by a call of its own ({call_reason})" * choice.step.one_by_one
        )
    # their position ids start anew
    if inputs.packed and choice.step.attention == "flash_attention_2":
        return ", several chats to a row, told apart by their boundaries"
    if inputs.packed:
        return f", several chats to a row, with a mask between them ({mask_reason})"
    if not is_padded(inputs.config, choice.layout, rows=choice.batch.micro_batch):
        return ""
    text = (
        ", shorter rows padded to it, without a mask (attention is causal, and padding at the end)"
    )
    if choice.step.padded:
        text = f", shorter rows padded to it and masked ({inputs.row_attention.mask_reason})"
    if (
        inputs.cuts_by_tokens
        and inputs.row_tokens is not None
        and mask_reason is None
        and choice.layout.context_parallel == 1
    ):
        text += (
            "; without padding each chat would be a call of its own, which is predicted to be"
            " slower"
        )
    return text


# --- candidates that were not chosen --------------------------------------------------------------
def candidates_to_show(
    inputs: PlanInputs, candidates: Sequence[Candidate], choice: Candidate
) -> list[Candidate]:
    """The candidates worth showing, each with why it was not chosen: all of the chosen layout, the
    best of each other."""
    by_layout: dict[Layout, list[Candidate]] = {}
    for candidate in candidates:
        by_layout.setdefault(candidate.layout, []).append(candidate)
    selected = [
        one
        for one in by_layout[choice.layout]
        if one.batch.micro_batch == choice.batch.micro_batch
        or one.checkpointed_layers == choice.checkpointed_layers
    ]
    selected += [
        choose_candidate(others) or closest_to_fitting(others) for others in by_layout.values()
    ]
    logits_candidate = build_candidate(
        inputs, choice.layout, choice.batch, choice.checkpointed_layers, loss="logits"
    )
    # full logits are shown only for comparison, but where the class leaves no other way
    if choice.fits or not logits_candidate.fits:
        selected.append(logits_candidate)
    fastest_tokens_per_s = fastest_speed(candidates)
    by_key = {choice.key: choice}
    for one in selected:
        if one.key not in by_key:
            by_key[one.key] = dataclasses.replace(
                one,
                rejected_because=rejection_reason(
                    inputs, one, choice, fastest_tokens_per_s=fastest_tokens_per_s
                ),
            )
    return list(by_key.values())


def rejection_reason(
    inputs: PlanInputs, candidate: Candidate, choice: Candidate, *, fastest_tokens_per_s: float
) -> str:
    """Why a candidate was not chosen, with numbers; `fastest_tokens_per_s`: the speed of the
    fastest candidate that fits."""
    if not candidate.fits:
        return f"needs {format_needs(candidate, term_count=1)}"
    if candidate.step.loss != choice.step.loss:
        extra_bytes = candidate.memory.allocated - choice.memory.allocated
        # less than 0.05 GiB would be printed as 0.0 GiB more
        if extra_bytes < GIB // 20:
            return (
                f"full logits: {format_gib(candidate.memory.allocated)} GiB allocated; the chunked"
                f" loss, which training uses, {format_gib(choice.memory.allocated)}"
            )
        return f"full logits: {format_gib(extra_bytes)} GiB more for the same loss"
    speed_ratio = candidate.speed.tokens_per_s / choice.speed.tokens_per_s
    error = find_speed_error(inputs.shape, choice.precision, inputs.hardware, choice.step)
    if candidate.layout != choice.layout:
        fit_text = (
            f"{choice.layout.name} fits at {format_gib(choice.memory.required)} of "
            f"{format_gib(inputs.device_budget)} GiB"
        )
        if candidate.layout.offloads_states and not choice.layout.offloads_states:
            return (
                f"offload is not needed: {fit_text}; it needs {format_gib(candidate.host_required)}"
                " GiB of RAM on each node"
            )
        if candidate.layout.is_streamed and speed_ratio > 1:
            return (
                f"predicted {format_relative_speed(speed_ratio, error)}, and a streamed base, whose"
                f" speed was measured on no card, is taken from {STREAMED_LEAD:g} times on:"
                f" {fit_text}"
            )
        is_less_simple = LAYOUT_PREFERENCE.index(candidate.layout.name) > LAYOUT_PREFERENCE.index(
            choice.layout.name
        )
        text = f"another is preferred: {fit_text}"
        if is_less_simple:
            text = f"not needed: {fit_text}"
        saved_gib = (candidate.speed.moved_bytes - choice.speed.moved_bytes) / GIB
        if saved_gib >= 0.1:
            text += f" and moves {saved_gib:.1f} GiB less per step"
        elif saved_gib <= -0.1:
            text += f" and moves {-saved_gib:.1f} GiB more per step"
        if speed_ratio < EQUAL_SPEED_SHARE or not is_less_simple:
            text += f"; this is predicted {format_relative_speed(speed_ratio, error)}"
        return text
    share_of_best = candidate.speed.tokens_per_s / fastest_tokens_per_s
    if share_of_best < EQUAL_SPEED_SHARE:
        basis = "predicted" if inputs.rates.is_known else "with typical rates"
        if error.is_within(share_of_best):
            return (
                f"{basis} slower than the fastest that fits, but about as fast within"
                f" ±{error.share:.0%}"
            )
        return f"{basis} {1 - share_of_best:.1%} slower than the fastest that fits"
    extra_bytes = candidate.memory.required - choice.memory.required
    speed_text = "about as fast" if speed_ratio >= 1.001 else "not faster"
    if extra_bytes > 0:
        return f"{speed_text}, {format_gib(extra_bytes)} GiB more"
    return f"{speed_text}, {format_gib(candidate.memory.required)} GiB as well"


def format_relative_speed(ratio: float, error: SpeedError | None = None) -> str:
    """A speed relative to another in words: `3% slower`, `12% faster`, `as fast`; `about as fast`
    within the error."""
    if error is not None and error.is_within(ratio):
        return "about as fast"
    percent = f"{abs(ratio - 1):.0%}"
    if percent == "0%":
        return "as fast"
    if ratio > 1:
        return f"{percent} faster"
    return f"{percent} slower"


# --- slower code than there is --------------------------------------------------------------------
def slow_code_reasons(
    config: RunConfig, shape: ModelShape, choice: Candidate, missing_packages: Collection[str]
) -> Iterator[str]:
    """A line for experts that do not run as grouped products of 16 bits by themselves, and one for
    each of `missing_packages` with kernels that the model's class would run on this GPU; each with
    what it costs by the roofline."""
    experts, capability = plan_experts(config, shape, choice.precision), choice.step.capability
    if experts is not None and (experts.name == "eager" or experts.casts_weights):
        yield f"experts: {experts.reason}{_format_cost(choice.speed, EXPERTS_PART)}"
    for name in shape.kernel_packages:
        if capability is None or name not in missing_packages:
            continue
        text = f"{name} is not installed: {shape.model_type} runs its own slower code instead"
        if name == LINEAR_ATTENTION_PACKAGE:
            text += _format_cost(choice.speed, LINEAR_ATTENTION_PART)
        if unsound_reason := kernel_package_problem(name, capability):
            text += f"; leave it so: {unsound_reason}"
        yield text


def _format_cost(speed: Speed, part: str) -> str:
    seconds = speed.parts.get(part, 0.0)
    return f": {seconds:.3g} s of a step of {speed.step_s:.3g} s, by the roofline" * bool(seconds)


# --------------------------------------------------------------------------------------------------
# The short page, what a person reads of a plan before anything else: does it fit, the batch, how
# long, which rows, what to watch for.
#
# Everything else is on the page below: `make plan WHY=1`, the log of a run and `plan.json`.

MODE_NAMES = {"qlora": "QLoRA", "lora": "LoRA", "full": "full fine-tuning"}
# Optimizer steps below which a run hardly moves its weights: warmup and decay of the learning rate
# are most of it.
FEW_STEPS = 20
LONG_CPU_RUN_S = 3600.0
# How a note of the machine goes on where a GPU's name has several entries (`machine/hardware.py`).
_SEVERAL_ENTRIES = "; the catalogue also has"


def plan_summary_lines(
    plan: Plan, config: RunConfig, *, start_lines: Sequence[str], has_local_data: bool
) -> list[str]:
    """The default page of `make plan`; `start_lines`: with the command that starts the run;
    `has_local_data`: the data are on this machine."""
    name = one_line(PurePath(config.model.name).name or config.model.name)
    verdict = plan.choice.verdict.replace("fits", "FITS", 1).replace(
        "does NOT fit", "DOES NOT FIT", 1
    )
    verdict = verdict.replace(
        f" per {plan.choice.device_word}",
        f" per {plan.choice.device_word}, margin included",
        plan.fits,
    )
    if plan.fits and not start_lines:
        verdict = (
            f"NOT STARTED{' on this machine' * (not plan.hardware.named)} ({plan.choice.verdict})"
        )
    hardware, batch = plan.hardware, plan.batch
    unit = {"GPU": "GPUs", "process": "processes"}[plan.choice.device_word]
    machine = "a CPU" if hardware.named else "this CPU"
    if hardware.gpus:
        machine = f"{len(hardware.gpus)} x {hardware.gpus[0].name}"
        machine += f" on {hardware.nodes} nodes" * (hardware.nodes > 1)
    elif hardware.ranks > 1:
        machine += f", {hardware.ranks} processes"
    others = [note.partition(_SEVERAL_ENTRIES)[2] for note in hardware.notes]
    if any(others):
        laptops = find_catalog_entries(f"{hardware.gpus[0].name} laptop")
        others += [f", {entry.name}" for entry in laptops]
        others.insert(0, "; also")
    machine += f" (assumed{''.join(others)})" * hardware.named
    ranks_per_row = plan.choice.layout.ranks // batch.ranks  # ranks that share rows
    if ranks_per_row > 1:
        unit = f"groups of {ranks_per_row} {unit}"
    batch_text = (
        f"Batch {batch.effective_batch} = {plural(batch.micro_batch, 'row')} x "
        f"{plural(batch.grad_accum, 'pass', 'passes')}"
    )
    batch_text += f" x {batch.ranks} {unit}" * (batch.ranks > 1)
    return [
        (
            f"{name}, {_format_mode(plan, config)}, on {machine}: {verdict}; predicted peak"
            f" {_bounded_peak(plan)}"
        ),
        f"{batch_text}; {_format_pace(plan, config)}",
        _format_data(plan, config, is_local=has_local_data),
        *(f"Warning: {warning}" for warning in plan_warnings(plan, config)),
        *start_lines[:-1],
        "    ".join([*start_lines[-1:], "Why, and what else was compared: make plan ... WHY=1"]),
    ]


# The learning rate, tokens per second, the run's length, and the weights that are loaded before.
def _format_pace(plan: Plan, config: RunConfig) -> str:
    weights = 2 * plan.model_params  # in 16 bits, as most are published
    is_long = plan.hours is not None and weights >= GIB
    loading_note = f", beside loading some {weights / GIB:.0f} GiB of weights" * is_long
    speed_text = f"about {plan.speed.tokens_per_s:,.0f} tokens/s; " * plan.speed_known
    return (
        f"learning rate {config.learning_rate:g}; {speed_text}{format_run_length(plan)}"
        f"{loading_note}"
    )


def fit_line(plan: Plan, config: RunConfig) -> str:
    """What a run says of its plan: the mode, whether it fits, how long it takes."""
    return (
        f"Plan: {_format_mode(plan, config)} {plan.choice.verdict}; {format_run_length(plan)};"
        f" predicted peak {_bounded_peak(plan)}"
    )


def _bounded_peak(plan: Plan) -> str:
    # on a CPU: how much of freed tensors malloc keeps is not known
    bound_text = "at most " * (not plan.hardware.gpus)
    return f"{bound_text}{plan.memory.peak_text}"


def format_run_length(plan: Plan) -> str:
    """Steps, duration and money of the run, as far as they are known."""
    run, run_length = plan.run_figures(), plan.run_length
    if run is None or run_length is None:
        return "steps and duration are known once the rows are here"
    steps = plural(run["steps"], "step")
    if run["hours"] is None:
        return f"{steps}; how long is not known before a first run on this machine"
    seconds, basis = estimate_duration(plan, run_length)
    text = f"{steps}; about {format_duration(seconds)}{basis}"
    if plan.speed_error is not None and plan.speed_error.share is not None:
        text += f" (speed may be {plan.speed_error.share:.0%} off)"
    if run["cost"] is not None:  # of the hours of full rows
        text += f"; costs {format_usd(run['cost'] * seconds / (3600 * run['hours']))}"
    return text


def estimate_duration(plan: Plan, run_length: RunLength) -> tuple[float, str]:
    """Seconds of the run, and by what rows, in words: those counted, else the size of the data,
    else full ones."""
    if plan.row_tokens is None and run_length.tokens is not None:
        return (
            run_length.tokens / plan.speed.tokens_per_s + plan.compile_s,
            " by the size of the data",
        )
    return run_length.steps * plan.speed.step_s + plan.compile_s, _full_rows_note(plan)


def _full_rows_note(plan: Plan) -> str:
    return " if every row were full length" * (plan.row_tokens is None)


def plan_warnings(plan: Plan, config: RunConfig) -> list[str]:
    """What a person would want to know before the first step."""
    warnings = []
    if (
        plan.run_length is not None
        and plan.run_length.steps < FEW_STEPS
        and not config.train.max_steps
    ):
        warnings.append(
            f"{plural(plan.run_length.steps, 'optimizer step is', 'optimizer steps are')} few: more"
            f" train.epochs, or a smaller {config.train.effective_batch_options}, makes more"
        )
    if batch_change := format_changed_batch(config.train, plan.batch):
        warnings.append(
            f"{batch_change}: the effective batch of {plan.batch.effective_batch} is kept over all"
            " ranks"
        )
    return warnings + long_cpu_warnings(plan)


def long_cpu_warnings(plan: Plan) -> list[str]:
    """A warning if the run takes an hour or more on a CPU."""
    if plan.run_length is None or plan.hardware.gpus:
        return []
    # by typical rates where this CPU's are not known
    seconds, _ = estimate_duration(plan, plan.run_length)
    if seconds < LONG_CPU_RUN_S:
        return []
    duration_text = "some hours"
    if plan.speed_known:
        duration_text = f"about {format_duration(seconds)}"
    return [
        f"{duration_text} on a CPU: a GPU takes minutes (make plan HARDWARE=1xRTX3060 shows one)"
    ]


def _format_mode(plan: Plan, config: RunConfig) -> str:
    mode = MODE_NAMES[config.tuning.mode]
    if plan.choice.layout.is_streamed:
        return f"{mode}, base streamed from RAM"
    return mode + f" in {plan.layout}" * (plan.layout != "single")


def _format_data(plan: Plan, config: RunConfig, *, is_local: bool) -> str:
    data, rows = config.data, plan.row_tokens
    name = one_line(data.train_path or f"{len(data.sources)} sources")
    if rows is None and (config.task_mode != "sft" or data.packing != "none"):
        return f"Data: {name}, in full rows of {plan.max_seq_len:,} tokens"
    if rows is None:
        reason = "not counted" if is_local else "not here"
        return f"Data: {name} ({reason}), every row taken to have {plan.max_seq_len:,} tokens"
    cut_text = f"longer ones cut at {rows.limit:,}"
    if rows.cut:
        cut_text = f"{rows.cut:,} cut at {rows.limit:,}"
    elif rows.longest < rows.limit or rows.cut == 0:
        cut_text = "none cut"
    count_text = f"{rows.rows:,} rows of {name}"
    if rows.images is not None:
        count_text += f" ({rows.images.rows:,} with images)"
    if rows.sampled_rows:
        count_text = f"about {count_text}, by a sample of {rows.sampled_rows:,}"
    return f"Data: {count_text}, longest {rows.longest:,} tokens, {cut_text}"


# --------------------------------------------------------------------------------------------------
# The long page (`WHY=1`), and lines that a run logs: the machine, the batch, the choice, a bar of
# the memory, the table of candidates.
#
# Memory is printed in GiB, units of 2**30 bytes.

BAR_WIDTH = 60
TABLE_WIDTH = 150
# Identical GPUs up to this number are listed one by one.
MAX_GPU_LINES = 16
# One letter per term in the bar; other terms are `x`.
TERM_LETTERS = {
    "weights": "W", "adapters": "a", "gradients": "G", "gradient_buckets": "B", "optimizer": "O",
    "activations": "A", "loss_head": "H", "gather_buffers": "F", "dequantised": "D",
    "workspaces": "w", "evaluation": "E",
}  # fmt: skip


def hardware_lines(hardware: Hardware) -> list[str]:
    """The lines about the machine of the plan, detected or only named: one per GPU with its memory,
    and their sum."""
    gpus, host_text = hardware.gpus, _format_host(hardware)
    if not gpus:
        origin = "Detected no GPU"
        if hardware.named:
            origin = "Planned for a machine without GPUs, named"
        return [f"{origin}: running on the CPU ({host_text})", *hardware.notes]
    gpu_count = plural(len(gpus), "GPU")
    lines = [f"Detected {gpu_count}:"]
    if hardware.named:
        lines = [f"Planned for {gpu_count}, named and not detected:"]
    if len(gpus) > MAX_GPU_LINES and len({(gpu.name, gpu.total_bytes) for gpu in gpus}) == 1:
        first, last = gpus[0], gpus[-1]
        lines.append(
            f"  GPU {first.index}-{last.index}: {first.name} ({first.total_bytes / GIB:.1f} GiB)"
            " each"
        )
    else:
        lines += [
            f"  GPU {gpu.index}: {gpu.name} ({gpu.total_bytes / GIB:.1f} GiB)" for gpu in gpus
        ]
    total_line = f"Total VRAM: {sum(gpu.total_bytes for gpu in gpus) / GIB:.1f} GiB"
    return [
        "\n".join(lines),
        total_line,
        *([f"RAM of each node: {host_text}"] * hardware.named),
        *hardware.notes,
    ]


def _format_host(hardware: Hardware) -> str:
    ram_text = f"{hardware.ram_bytes / GIB:.1f} GiB"
    if not hardware.named:
        return f"{hardware.cpu_name}, {hardware.cpu_cores} cores, {ram_text} of RAM"
    if hardware.gpus and not hardware.ram_given:
        return "not given (ram=512GiB)"
    if hardware.gpus:
        return ram_text
    assumed_note = ": this machine's, because none was given (ram=64GiB)" * (not hardware.ram_given)
    return f"{hardware.cpu_cores} cores, {ram_text} of RAM{assumed_note}"


def batch_size_lines(plan: Plan, config: RunConfig) -> list[str]:
    """The lines about the batch that users know, word for word."""
    label = "Batch size"
    if "auto" in (config.train.batch_size, config.train.grad_accum):
        label = "Auto-calculated batch size"
    return [
        (
            f"{label}: {plan.batch.micro_batch} per {plan.choice.device_word}, gradient"
            f" accumulation: {plan.batch.grad_accum}"
        ),
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
    """The line about what is quantised, adapted and trained; none for a plan of an earlier
    version."""
    if plan.parameters is None:
        return []
    return [format_parameters(plan.parameters, config)]


def memory_line(plan: Plan) -> str:
    """The predicted peak of one rank, the terms of its tensors, and what must be free for it, in
    GiB."""
    memory = plan.memory
    large_terms = {
        name: size for name, size in memory.terms.items() if size >= 0.005 * memory.allocated
    }
    terms_text = ", ".join(
        f"{name.replace('_', ' ')} {size / GIB:.2f}" for name, size in large_terms.items()
    )
    outside_name = "context" if plan.hardware.gpus else "libraries"
    phase = RUN_PHASES.get(memory.moment, "a step")
    return (
        f"Predicted peak: {memory.peak_text} (tensors of {phase} {memory.allocated / GIB:.2f}:"
        f" {terms_text}){format_loading(plan.choice)}; with margin and {outside_name}"
        f" {memory.required / GIB:.2f} of {plan.budget_bytes / GIB:.1f} GiB"
    )


def format_loading(candidate: Candidate) -> str:
    """The peak of loading as the end of a sentence; empty unless a rank keeps only a shard, or
    loading needs more than a step."""
    memory = candidate.memory
    # otherwise a run loads what it keeps, and the figure would repeat the weights' term
    is_notable = candidate.layout.shards_params or memory.is_limited_by_loading
    ram_text = f" and {memory.host_load_bytes / GIB:.2f} GiB of RAM" * bool(memory.host_load_bytes)
    return f"; {memory.load_bytes / GIB:.2f} GiB{ram_text} while loading" * is_notable


def choice_line(plan: Plan) -> str:
    """The choice in one sentence."""
    choice, gpus = plan.choice, plan.hardware.gpus
    device = plural(len(gpus), "GPU") if gpus else "the CPU"
    return (
        f"Choice: {choice.layout.name} on {device}, micro-batch {choice.batch.micro_batch} x"
        f" {plural(choice.batch.grad_accum, 'pass', 'passes')}, {choice.checkpointing_text}:"
        f" {choice.verdict}"
    )


def speed_lines(plan: Plan) -> list[str]:
    """Predicted speed, time, energy and money."""
    if not plan.speed_known:
        return ["Speed: not predicted (the device's rates are not known)"]
    speed, run = plan.speed, plan.run_figures()
    parts = {
        name.replace("_", " "): seconds / speed.step_s for name, seconds in speed.parts.items()
    }
    parts_text = ", ".join(f"{name} {share:.0%}" for name, share in parts.items() if share > 0.01)
    error_text = mfu_text = ""
    if plan.speed_error is not None:
        error_text = f" ({plan.speed_error.text})"
    if plan.mfu is not None:
        mfu_text = f", model FLOP utilisation {plan.mfu:.0%}"
    speed_line = (
        f"Speed: about {speed.tokens_per_s:,.0f} tokens/s{error_text}, {speed.step_s:.2f} s per"
        f" step{mfu_text} ({parts_text}); a roofline, not a measurement"
    )
    if run is None:
        return [
            speed_line,
            (
                "Run: hours and cost are not predicted (no train.max_steps, and data.train_path is"
                " not one file here)"
            ),
        ]
    if run["hours"] is None:
        return [speed_line]
    line = (
        f"Run: {run['steps']:,} steps,"
        f" {format_duration(3600 * run['hours'])}{_full_rows_note(plan)}"
    )
    if plan.compile_s:
        line += f" with {plan.compile_s:.0f} s of compiling"
    if run["gpu_hours"] is not None:
        line += f", {run['gpu_hours']:.1f} GPU-hours"
    if run["tokens"] is not None and plan.row_tokens is None:
        duration_text = format_duration(run["tokens"] / speed.tokens_per_s)
        line += (
            f"; about {duration_text} for the {run['tokens']:,} tokens that the file's size"
            " suggests"
        )
    if run["energy_kwh"] is not None:
        line += f"; at most {run['energy_kwh']:.1f} kWh"
    if run["cost"] is not None:
        line += f"; {run['cost']:.2f} at {plan.hardware.price_per_gpu_hour:g} per GPU-hour"
    return [speed_line, line]


ALLOCATOR_NOTE = (
    "Allocator: counted for fixed-size and expandable segments, whichever needs more; a run on"
    " Linux with NVIDIA's driver sets expandable_segments unless PYTORCH_ALLOC_CONF says otherwise"
)


def bar_lines(plan: Plan) -> list[str]:
    """A bar of one rank's memory: what each part of the budget is for."""
    budget, memory, gpu_count = plan.budget_bytes, plan.memory, len(plan.hardware.gpus)
    # a plan that does not fit is wider than its budget, and fills the bar
    bar_bytes = max(budget, memory.required)
    outside_name = "context and communicators" if gpu_count else "libraries"
    parts = [
        *(
            (TERM_LETTERS.get(name, "x"), name, size)
            for name, size in memory.terms.items()
            if size > 0
        ),
        ("s", "allocator slack", memory.reserved - memory.allocated),
        ("m", "margin", memory.margin),
        ("c", outside_name, memory.outside_allocator),
    ]
    # last: what the others leave of `required`, which is loading's own where loading decides
    parts.append(("L", "more while loading", memory.required - sum(size for _, _, size in parts)))
    bar, filled_bytes = "", 0
    for letter, _, size in parts:
        filled_bytes += max(0, size)
        # rounded from the running sum, so that the parts add up to the bar
        bar += letter * (round(filled_bytes / bar_bytes * BAR_WIDTH) - len(bar))
    device = {0: "RAM", 1: "GPU 0"}.get(gpu_count, f"GPU 0-{gpu_count - 1}, each")
    legend = ", ".join(
        f"{letter} {name.replace('_', ' ')} {size / GIB:.2f}"
        for letter, name, size in parts
        if size > 0
    )
    lines = [
        (
            f"{device} |{bar.ljust(BAR_WIDTH, '.')}| {memory.required / GIB:.1f} of"
            f" {budget / GIB:.1f} GiB"
        ),
        f"  {legend}",
    ]
    if memory.moment:
        lines.append(f"Peak: in the {memory.moment} of a step{format_loading(plan.choice)}")
    if memory.margin_reason:
        lines.append(f"Margin: {memory.margin / GIB:.2f} GiB, {memory.margin_reason}")
    return lines + [ALLOCATOR_NOTE] * bool(gpu_count)


def candidate_table_lines(plan: Plan) -> list[str]:
    """The table of candidates, the chosen one first, each with why it was not chosen."""
    table = _build_table(
        ("layout", "micro x accum", "checkpointing", "loss"), ("needs GiB", "tokens/s")
    )
    table.add_column("why")
    verdict = "chosen" if plan.fits else "closest to fitting, but does not fit"
    for candidate in sorted(plan.candidates, key=lambda one: one.rejected_because is not None):
        table.add_row(
            candidate.layout.name,
            f"{candidate.batch.micro_batch} x {candidate.batch.grad_accum}",
            _format_checkpointing(candidate),
            candidate.step.loss,
            f"{candidate.memory.required / GIB:.1f}",
            _format_speed(candidate, is_known=plan.speed_known),
            candidate.rejected_because or verdict,
        )
    for item in plan.not_possible:
        table.add_row(item.name, *"-" * 5, f"not possible: {item.because}")
    return render_lines(table, width=TABLE_WIDTH)


def _format_speed(candidate: Candidate, *, is_known: bool) -> str:
    if not is_known:
        return "-"
    return f"{candidate.speed.tokens_per_s:,.0f}"


def _format_checkpointing(candidate: Candidate) -> str:
    return candidate.checkpointing_text.removeprefix("checkpointing ").removeprefix("in ")


def suggestion_lines(plan: Plan) -> list[str]:
    """The suggestions with their predicted peaks, and what was tried and is not enough."""
    lines = [f"  {suggestion.change}: {suggestion.needs}" for suggestion in plan.suggestions]
    if lines:
        lines.insert(0, "Suggestions, the least harmful first:")
    if plan.not_enough:
        lines.append(
            "Not enough on their own:"
            f" {'; '.join(f'{item.change} ({item.needs})' for item in plan.not_enough)}"
        )
    return lines


def stage_lines(stages: Sequence[tuple[str | None, RunConfig, Plan]]) -> list[str]:
    """One line per stage of a curriculum: its length, learning rate, row length, and what its step
    needs."""
    if not stages:
        return []
    lines = [f"Stages, each with its own schedule and optimizer, all under {stages[0][2].layout}:"]
    for number, (name, config, plan) in enumerate(stages, start=1):
        train, trainable = config.train, config.tuning.trainable
        length_text = f"{train.epochs:g} epoch{'s' * (train.epochs != 1)}"
        if train.max_steps:
            length_text = f"{train.max_steps:,} steps"
        hours_text = ""
        if plan.hours is not None:
            hours_text = f", {format_duration(3600 * plan.hours)}{_full_rows_note(plan)}"
        trained_parts = f", trains {', '.join(trainable)}" * (trainable != "all")
        lines.append(
            f"  {number} {name}: {length_text}, learning rate {config.learning_rate:g}, rows of at"
            f" most {plan.max_seq_len:,} tokens{trained_parts}; micro {plan.batch.micro_batch} x"
            f" accum {plan.batch.grad_accum}, {plan.choice.checkpointing_text}:"
            f" {plan.choice.verdict}{hours_text}"
        )
    return lines


def plan_lines(
    plan: Plan, config: RunConfig, *, command: str | None, node_commands: Sequence[str] = ()
) -> list[str]:
    """Everything that `make plan WHY=1` prints. `command` None: no command starts it.
    `node_commands`: lines that stand for it, such as the command of each node."""
    lines = [
        *hardware_lines(plan.hardware),
        choice_line(plan),
        *parameter_lines(plan, config),
        *batch_lines(plan, config),
        *bar_lines(plan),
    ]
    candidate_lines = ["Candidates:", *candidate_table_lines(plan)]
    if not plan.fits:
        return lines + candidate_lines + suggestion_lines(plan)
    lines += speed_lines(plan) + candidate_lines
    if command is not None or node_commands:
        lines += list(node_commands) or [f"Launch: {command}"]
    return lines


def grid_lines(cells: Sequence[tuple[tuple[str, ...], Plan]]) -> list[str]:
    """The table of a grid, one row per cell: what fits, or which memory is too small."""
    if not cells:
        return []
    table = _build_table(
        ("fits", "layout", "micro x accum", "checkpointing"),
        ("allocated GiB", "needs GiB", "tokens/s"),
        first_column="settings",
    )
    for settings, plan in cells:
        verdict = f"NO: too little {' and '.join(plan.choice.insufficient_memory)}"
        if plan.fits:
            verdict = (
                "yes"
                + f", with {plan.choice.host_required / GIB:.1f} GiB of RAM" * plan.choice.offloads
            )
        table.add_row(
            " ".join(settings),
            verdict,
            plan.layout,
            f"{plan.batch.micro_batch} x {plan.batch.grad_accum}",
            _format_checkpointing(plan.choice),
            f"{plan.memory.allocated / GIB:.1f}",
            f"{plan.memory.required / GIB:.1f}",
            _format_speed(plan.choice, is_known=plan.speed_known and plan.fits),
        )
    return ["What if:", *render_lines(table, width=TABLE_WIDTH)]


def _build_table(
    text_columns: Sequence[str], number_columns: Sequence[str], *, first_column: str = ""
) -> Table:
    table = Table(
        *filter(None, [first_column]), box=None, pad_edge=False, header_style="", show_edge=False
    )
    for name in text_columns:
        table.add_column(name, no_wrap=True)
    for name in number_columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table
