"""Why a plan is as it is, a line each: what `make plan` prints as `Because:` and `plan.json` keeps; at the end the
candidates that it shows beside its choice, each with why it was not chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from sft_play.config.schema import RunConfig
from sft_play.facts.installed import LINEAR_ATTENTION_PACKAGE, kernel_package_problem
from sft_play.facts.models.model_shape import ModelShape
from sft_play.planner.batching import arithmetic
from sft_play.planner.candidates import (
    AS_FAST,
    Candidate,
    Job,
    candidate_of,
    choose,
    fastest,
    least,
    micro_batches,
    needs_words,
)
from sft_play.planner.gradients import unused
from sft_play.planner.kernels import PlannedKernels, planned_experts
from sft_play.planner.layout import SIMPLICITY
from sft_play.planner.memory.loading_and_saving import MAX_WHOLE_BYTES, MAX_WHOLE_SAVE_S
from sft_play.planner.memory.measured_walk import MeasuredStepSimulation, create_step_simulation
from sft_play.planner.memory.model_states import loads_by_unit
from sft_play.planner.memory.step_memory import is_padded
from sft_play.planner.precision import SHORT
from sft_play.planner.speed.compile_and_liger import compiling_words
from sft_play.planner.speed.throughput import EXPERTS_PART, LINEAR_PART, Speed, SpeedError, speed_error
from sft_play.units import GIB, gib

REPEATED_KEYS = (
    "attention: keys and values are repeated for all heads, because flash attention, the only kernel that "
    "takes grouped ones, does not run on this GPU in this precision"
)

CUDNN = (
    "attention: cuDNN's kernel, which PyTorch prefers on this GPU and which is faster than flash attention there: all "
    "batches have one shape, so its graph is built once"
)

OWN_LOGITS = "loss: over whole logits, as the class's own are more than its head's products"
ACTIVATIONS = {
    False: "activations: the class's own blocks were run on tensors without bytes",
    True: "activations: the class's own blocks were run on few real tokens on the CPU, carried on",
}


def reasons_of(
    job: Job,
    candidates: Sequence[Candidate],
    chosen: Candidate,
    *,
    limit: int,
    repeats_kv: bool,
    kernels: PlannedKernels,
    notes: Sequence[str] = (),
) -> tuple[str, ...]:
    """Why the plan is as it is: precision, length, batch, rows, layout, kernels, and what a run should know; `limit`:
    tokens of a row at most; `notes`: what a trace of the choice said."""
    wish = job.config.model.max_seq_len
    walk, adapts = create_step_simulation(job.config, job.shape, chosen.precision, chosen.step), job.config.tuning.mode != "full"
    learned = job.learned(chosen.layout).at(chosen.raw.reserved)
    shortened = [f"max_seq_len {limit} instead of {wish}: the model has {limit} positions"] if limit != wish else []
    return (
        chosen.precision.reason,
        *shortened,
        *([f"the model's shape is {job.shape.source_note}"] if job.shape.source_note else []),
        *([ACTIVATIONS[walk.was_measured_on_cpu]] if isinstance(walk, MeasuredStepSimulation) else []),
        *([OWN_LOGITS] if job.shape.has_custom_logits else []),
        *(f"adapters: {words}" for words in (job.shape.adapter_placement.notes if job.shape.adapter_placement and adapts else ())),
        *filter(None, (job.shape.text_only_note, job.shape.storage_note, job.shape.published_note)),
        *_batch_words(job, candidates, chosen),
        _row_words(job, chosen),
        *_loading_words(job, chosen),
        *([job.config.learning_rate_by_rule[1]] if job.config.train.learning_rate == "auto" else []),
        *([_sharded_checkpoint_words(job, chosen)] if chosen.memory.checkpoint == "sharded" else []),
        *([REPEATED_KEYS] if repeats_kv else []),
        *([CUDNN] if chosen.step.cudnn else []),
        *([_evaluation_words(job.config, chosen)] if chosen.step.eval_batch else []),
        *unused(job.config, chosen.layout.name),
        *filter(None, (learned.reason, learned.warning)),
        *slow_words(job.config, job.shape, chosen, job.rates.without),
        *([kernels.reason] if kernels.reason else []),
        *notes,
        *compiling_words(job.config, job.shape),
        *_of_tuning(job.config, chosen),
        *_advice(chosen),
    )


def _of_tuning(config: RunConfig, chosen: Candidate) -> Iterator[str]:
    tuning, layout, compute = config.tuning, chosen.layout, chosen.precision.compute
    if tuning.mode != "full" and tuning.lora.dtype == "bfloat16":
        words = "adapters and their states are bf16, and small updates are lost"
        if compute != "bfloat16":
            words = f"adapters stay in fp32, because the run computes in {SHORT[compute]}"
        elif layout.is_zero or (layout.is_fsdp and tuning.mode == "lora"):
            words = f"{layout.name} still steps adapters in fp32"
        yield f"tuning.lora.dtype=bfloat16: {words}"
    if tuning.backend == "unsloth":
        other = "" if layout.name in ("single", "ddp") else f"; {layout.name} would run with backend bnb"
        yield f"tuning.backend=unsloth: planned as backend bnb; Unsloth itself was not measured{other}"


def _batch_words(job: Job, candidates: Sequence[Candidate], chosen: Candidate) -> list[str]:
    product = arithmetic(job.config.train, chosen.batch, is_fixed=job.fixed is not None)
    alike = [one for one in candidates if one.fits and one.layout == chosen.layout]
    sizes = [one.batch.micro_batch for one in alike if one.checkpointed == chosen.checkpointed]
    if max(sizes, default=0) > chosen.batch.micro_batch:
        product += f"; up to {max(sizes)} would fit and be about as fast"
    elif len(sizes) > 1:
        product += "; smaller ones are slower"
    effective, layout = chosen.batch.effective_batch, chosen.layout
    # a mesh is the user's own choice, and needs no explanation
    if layout.data_parallel == layout.ranks or effective % layout.ranks == 0 or job.config.model.mesh_shape is not None:
        return [product]
    return [
        product,
        f"an effective batch of {effective} does not split over {layout.ranks} ranks that each read their own "
        f"rows: {layout.name} has {layout.data_parallel}",
    ]


def _loading_words(job: Job, chosen: Candidate) -> list[str]:
    layout, memory = chosen.layout, chosen.memory
    if job.config.tuning.mode != "qlora" or not layout.shards_params or loads_by_unit(job.config, layout):
        return []
    where = ", the packed ones in RAM" if layout.offloads_params else ""
    return [
        f"{layout.name} shards NF4 weights after loading: until then each rank holds all of them "
        f"({memory.load_bytes / GIB:.1f} GiB), in a step {memory.terms['weights'] / GIB:.1f} GiB{where}"
    ]


def _row_words(job: Job, chosen: Candidate) -> str:
    padding = _packing_words(job, chosen) if job.packed else _padding_words(job, chosen)
    rows = job.rows
    if rows is None:
        return f"assumed: every row {job.seq_len} tokens{padding}, every token trained on"
    known = f"longest row {rows.longest:,} tokens, mean {rows.mean:,.0f}, 95% up to {rows.p95:,}"
    known += f"; longest held-out row {rows.held_out:,}" if rows.held_out > rows.longest else ""
    places = micro_batches(job, chosen.precision, chosen.step).tokens
    fills = f": a micro-batch has as many rows as fit into {places:,} tokens" if places is not None else ""
    return f"{known}{fills}{padding}"


def _sharded_checkpoint_words(job: Job, chosen: Candidate) -> str:
    memory = chosen.memory
    size, each = f"{memory.checkpoint_bytes / GIB:.1f} GiB", f"{memory.host_save_each_bytes / GIB:.1f} GiB"
    if job.config.train.async_save:
        return (
            f"train.async_save: checkpoints of {size} are written while training goes on, in parts: each of "
            f"{chosen.layout.ranks} ranks keeps its part in RAM meanwhile ({each})"
        )
    return (
        f"checkpoints of {size} are written in parts, one by each of {chosen.layout.ranks} ranks ({each} of RAM each): "
        f"above {MAX_WHOLE_BYTES / GIB:.1f} GiB the first rank would write for more than {MAX_WHOLE_SAVE_S // 60} minutes, and "
        f"hold {memory.host_gather_bytes / GIB:.1f} GiB in RAM; any number of ranks resumes from them"
    )


def _packing_words(job: Job, chosen: Candidate) -> str:
    if chosen.step.varlen:
        return f", several chats to a row, told apart by their boundaries, without a mask{_calls_words(job, chosen)}"
    if chosen.step.attention == "flash_attention_2":  # their position ids start anew
        return ", several chats to a row, told apart by their boundaries"
    return f", several chats to a row, with a mask between them ({job.attended.unbounded_because(chosen.precision)})"


def _padding_words(job: Job, chosen: Candidate) -> str:
    if chosen.step.varlen:
        words = ", rows one behind the other without padding, told apart by their boundaries"
        return words + _calls_words(job, chosen)
    if not is_padded(job.config, chosen.layout, rows=chosen.batch.micro_batch):
        return ""
    joins = job.by_tokens and job.rows is not None and job.attended.unbounded_because(chosen.precision) is None
    slower = joins and chosen.layout.context_parallel == 1
    why = "; without padding each chat would be a call of its own, which is predicted to be slower" if slower else ""
    if chosen.step.padded:
        return f", shorter rows padded to it and masked ({job.attended.masked_because}){why}"
    return f", shorter rows padded to it, without a mask (attention is causal, and padding at the end){why}"


def _calls_words(job: Job, chosen: Candidate) -> str:
    because = job.attended.one_by_one_because(chosen.precision)
    return f", each attended to by a call of its own ({because})" if chosen.step.one_by_one else ""


def _evaluation_words(config: RunConfig, chosen: Candidate) -> str:
    rows, memory = chosen.step.eval_batch, chosen.memory
    given = " (eval.batch_size is given)" if config.eval.batch_size != "auto" else ""
    evaluation, step = (memory.phase_bytes(name)[1] or 0 for name in ("evaluation", "training"))
    return (
        f"evaluation: {rows} row{'s' if rows > 1 else ''} at a time per rank{given}, rows of similar length together; "
        f"{evaluation / GIB:.2f} GiB, a training step {step / GIB:.2f}"
    )


def _advice(chosen: Candidate) -> list[str]:
    reasons = []
    if chosen.step.pages and (chosen.offloads or chosen.step.offloads):
        need = f"{chosen.host_required / GIB:.1f} GiB of RAM are page-locked for offload"
        reasons.append(f"{need}, but WSL has been seen to give only 0.5 to 1 GiB: the run may fail at the start")
    if chosen.fits and chosen.needs_unknown_ram:
        need = f"{chosen.host_required / GIB:.0f} GiB of RAM are needed on each node"
        reasons.append(f"{need}, and the machine's RAM was not given (ram=512GiB)")
    if not chosen.fits:
        reasons.append(f"nothing fits: the closest is predicted to need {needs_words(chosen, terms=3)}")
    return reasons


# --- the others -------------------------------------------------------------------------------------------------------
def shown(job: Job, candidates: Sequence[Candidate], chosen: Candidate) -> list[Candidate]:
    """The candidates worth showing, each with why it was not chosen: those of the chosen layout, the best of each
    other."""
    kept: dict[Any, Candidate] = {chosen.key: chosen}
    for candidate in candidates:
        same_layout = candidate.layout == chosen.layout
        same_batch = candidate.batch.micro_batch == chosen.batch.micro_batch
        if same_layout and (same_batch or candidate.checkpointed == chosen.checkpointed):
            kept.setdefault(candidate.key, candidate)
    for layout in {candidate.layout: None for candidate in candidates}:
        mine = [candidate for candidate in candidates if candidate.layout == layout]
        best = choose(mine) or least(mine)
        kept.setdefault(best.key, best)
    whole = candidate_of(job, chosen.layout, chosen.batch, chosen.checkpointed, loss="logits")
    # full logits are shown only for comparison, but where the class leaves no other way
    if chosen.fits or not whole.fits:
        kept.setdefault(whole.key, whole)
    speed = fastest(candidates)
    return [
        candidate
        if candidate.key == chosen.key
        else dataclasses.replace(candidate, rejected_because=because(job, candidate, chosen, best=speed))
        for candidate in kept.values()
    ]


def because(job: Job, candidate: Candidate, chosen: Candidate, *, best: float) -> str:
    """Why a candidate was not chosen, with numbers; `best`: tokens per second of the fastest that fits."""
    if not candidate.fits:
        return f"needs {needs_words(candidate, terms=1)}"
    if candidate.step.loss != chosen.step.loss:
        more = candidate.memory.allocated - chosen.memory.allocated
        # less than 0.05 GiB would be printed as 0.0 GiB more
        if more < GIB // 20:
            full, chunked = gib(candidate.memory.allocated), gib(chosen.memory.allocated)
            return f"full logits: {full} GiB allocated; the chunked loss, which training uses, {chunked}"
        return f"full logits: {gib(more)} GiB more for the same loss"
    ratio = candidate.speed.tokens_per_s / chosen.speed.tokens_per_s
    error = speed_error(job.shape, chosen.precision, job.hardware, chosen.step)
    if candidate.layout != chosen.layout:
        return _layout_reason(job, candidate, chosen, ratio, error)
    if candidate.speed.tokens_per_s < AS_FAST * best:
        word = "predicted" if job.rates.known else "with typical rates"
        of_best = candidate.speed.tokens_per_s / best
        if error.is_within(of_best):
            return f"{word} slower than the fastest that fits, but about as fast within ±{error.share:.0%}"
        return f"{word} {1 - of_best:.1%} slower than the fastest that fits"
    more = candidate.memory.required - chosen.memory.required
    faster = "about as fast" if ratio >= 1.001 else "not faster"
    return f"{faster}, {gib(more)} GiB more" if more > 0 else f"{faster}, {gib(candidate.memory.required)} GiB as well"


def _layout_reason(job: Job, candidate: Candidate, chosen: Candidate, ratio: float, error: SpeedError) -> str:
    if candidate.layout.offloads_states and not chosen.layout.offloads_states:
        needed = f"; it needs {gib(candidate.host_required)} GiB of RAM on each node"
        return f"offload is not needed: {_fits_at(job, chosen)}{needed}"
    is_less_simple = SIMPLICITY.index(candidate.layout.name) > SIMPLICITY.index(chosen.layout.name)
    text = f"{'not needed' if is_less_simple else 'another is preferred'}: {_fits_at(job, chosen)}"
    moved = candidate.speed.moved_bytes - chosen.speed.moved_bytes
    if abs(moved) >= GIB // 10:
        text += f" and moves {abs(moved) / GIB:.1f} GiB {'less' if moved > 0 else 'more'} per step"
    if ratio < AS_FAST or not is_less_simple:
        text += f"; this is predicted {speed_words(ratio, error)}"
    return text


def speed_words(ratio: float, error: SpeedError | None = None) -> str:
    """A speed relative to another in words: `3% slower`, `12% faster`, `as fast`; `about as fast` within the error."""
    if error is not None and error.is_within(ratio):
        return "about as fast"
    percent = f"{abs(ratio - 1):.0%}"
    if percent == "0%":
        return "as fast"
    return f"{percent} {'faster' if ratio > 1 else 'slower'}"


def _fits_at(job: Job, chosen: Candidate) -> str:
    return f"{chosen.layout.name} fits at {gib(chosen.memory.required)} of {gib(job.budget)} GiB"


# --- slower code than there is ----------------------------------------------------------------------------------------
def slow_words(config: RunConfig, shape: ModelShape, chosen: Candidate, without: Collection[str]) -> list[str]:
    """A line for the experts that do not run as grouped products of 16 bits by themselves, and one for each package of
    `without` whose kernels the model's class would run on this GPU, with what it costs by the roofline."""
    lines, experts = [], planned_experts(config, shape, chosen.precision)
    if experts is not None and experts.name == "eager":
        lines.append(f"experts: {experts.reason}{_cost(chosen.speed, EXPERTS_PART)}")
    elif experts is not None and experts.casts:
        lines.append(f"experts: {experts.reason}")
    for name in shape.kernel_packages if chosen.step.capability is not None else ():
        if name in without:
            cost = _cost(chosen.speed, LINEAR_PART) if name == LINEAR_ATTENTION_PACKAGE else ""
            why_not = kernel_package_problem(name, chosen.step.capability)
            leave = f"; leave it so: {why_not}" if why_not else ""
            lines.append(f"{name} is not installed: {shape.model_type} runs its own slower code instead{cost}{leave}")
    return lines


def _cost(speed: Speed, part: str) -> str:
    seconds = speed.parts.get(part, 0.0)
    return f": {seconds:.3g} s of a step of {speed.step_s:.3g} s, by the roofline" if seconds else ""
