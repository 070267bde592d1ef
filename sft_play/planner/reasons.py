"""Why a plan is as it is, a line each: what `make plan` prints as `Because:` and `plan.json` keeps."""

from __future__ import annotations

from collections.abc import Sequence

from sft_play.config.schema import RunConfig
from sft_play.planner.batching import arithmetic
from sft_play.planner.candidates import Candidate, Job, micro_batches, needs_words
from sft_play.planner.gradients import effects
from sft_play.planner.kernels import CountedKernels, planned_kernels
from sft_play.planner.memory.measured_walk import MeasuredWalk, walk_of
from sft_play.planner.memory.model_states import loads_by_unit
from sft_play.planner.memory.saving import WHOLE_BYTES, WHOLE_SAVE_S
from sft_play.planner.memory.step_memory import Walk, is_padded
from sft_play.planner.precision import SHORT
from sft_play.planner.speed import compiled
from sft_play.planner.speed.slow_code import slow_words
from sft_play.units import GIB

REPEATED_KEYS = (
    "attention: keys and values are repeated for all heads, because flash attention, the only kernel that "
    "takes grouped ones, does not run on this GPU in this precision"
)

CUDNN = (
    "attention: cuDNN's kernel, which PyTorch prefers on this GPU and which is faster than flash attention there: all "
    "batches have one shape, so its graph is built once"
)


def reasons_of(
    job: Job,
    candidates: Sequence[Candidate],
    chosen: Candidate,
    *,
    limit: int,
    repeats_kv: bool,
    kernels: CountedKernels | None,
    notes: Sequence[str] = (),
) -> tuple[str, ...]:
    """Why the plan is as it is: precision, length, batch, rows, layout, kernels, and what a run should know.

    Args:
        limit: tokens of a row at most.
        repeats_kv: whether sdpa repeats keys and values for all heads.
        kernels: those that memory and speed count.
        notes: what a trace of the choice said.
    """
    wish = job.config.model.max_seq_len
    walk = walk_of(job.config, job.shape, chosen.precision, chosen.step)
    learned = job.learned(chosen.layout).reason
    shortened = [f"max_seq_len {limit} instead of {wish}: the model has {limit} positions"] if limit != wish else []
    return (
        chosen.precision.reason,
        *shortened,
        *([f"the model's shape is {job.shape.note}"] if job.shape.note else []),
        *_activation_words(walk),
        *_adapter_words(job),
        *([job.shape.text_only] if job.shape.text_only else []),
        *_batch_words(job, candidates, chosen),
        _row_words(job, chosen),
        *_loading_words(job, chosen),
        *([_sharded_checkpoint_words(chosen)] if chosen.memory.checkpoint == "sharded" else []),
        *([REPEATED_KEYS] if repeats_kv else []),
        *([CUDNN] if chosen.step.cudnn else []),
        *([_evaluation_words(job.config, chosen)] if chosen.step.eval_batch else []),
        *effects(
            job.config,
            chosen.precision,
            chosen.layout.name,
            grad_accum=chosen.batch.grad_accum,
            whole_bytes=walk.whole_gradients,
        ),
        *([learned] if learned else []),
        *slow_words(job.config, job.shape, chosen, job.rates.without),
        *_kernel_words(job, chosen, kernels),
        *notes,
        *compiled.words(job.config, job.shape),
        *_adapters_in_bf16(job.config, chosen),
        *_unknown_of_unsloth(job.config, chosen),
        *_advice(chosen),
    )


def _activation_words(walk: Walk) -> list[str]:
    """How the activations of a class that the tables do not know were measured."""
    if not isinstance(walk, MeasuredWalk):
        return []
    how = "few real tokens on the CPU, carried on" if walk.on_cpu else "tensors without bytes"
    return [f"activations: the class's own blocks were run on {how}"]


def _kernel_words(job: Job, chosen: Candidate, counted: CountedKernels | None) -> list[str]:
    """Which kernels are counted, and what the plain ones would need."""
    step = chosen.step
    planned = planned_kernels(job.config, job.shape, step.layout, on_gpu=step.on_gpu, without=job.rates.without)
    if planned is None or counted is None:
        return []
    need = counted.plain_bytes
    otherwise = f"; the plain ones, which run otherwise, would need {need / GIB:.1f} GiB" if need is not None else ""
    return [f"{planned.reason}{otherwise}"]


def _adapter_words(job: Job) -> list[str]:
    """Where a class that the table does not have gets no adapters."""
    if job.config.tuning.mode == "full" or job.shape.adapters is None:
        return []
    return [f"adapters: {words}" for words in job.shape.adapters.words]


def _adapters_in_bf16(config: RunConfig, chosen: Candidate) -> list[str]:
    """The effect of tuning.lora.dtype=bfloat16."""
    lora, layout = config.tuning.lora, chosen.layout
    if config.tuning.mode == "full" or lora.dtype != "bfloat16":
        return []
    setting = "tuning.lora.dtype=bfloat16: "
    if chosen.precision.compute != "bfloat16":
        return [f"{setting}adapters stay in fp32, because the run computes in {SHORT[chosen.precision.compute]}"]
    if layout.is_zero or (layout.is_fsdp and config.tuning.mode == "lora"):
        return [f"{setting}{layout.name} still steps adapters in fp32"]
    return [f"{setting}adapters and their states are bf16, and small updates are lost"]


def _unknown_of_unsloth(config: RunConfig, chosen: Candidate) -> list[str]:
    """What this plan does not know about a run on Unsloth."""
    if config.tuning.backend != "unsloth":
        return []
    note = "tuning.backend=unsloth: memory and speed are those of backend bnb; Unsloth itself was not measured"
    if chosen.layout.name in ("single", "ddp"):
        return [note]
    return [note, f"Unsloth runs only single and ddp; {chosen.layout.name} would run with backend bnb (STRATEGY=ddp)"]


def _batch_words(job: Job, candidates: Sequence[Candidate], chosen: Candidate) -> list[str]:
    """The product of the batch, how other micro-batches compare, and why some ranks share rows."""
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
    """That loading needs more than a step, which a reader of the weights' term would not expect."""
    layout, memory = chosen.layout, chosen.memory
    if job.config.tuning.mode != "qlora" or not layout.shards_params or loads_by_unit(job.config, layout):
        return []
    where = ", the packed ones in RAM" if layout.offloads_params else ""
    return [
        f"{layout.name} shards NF4 weights after loading: until then each rank holds all of them "
        f"({memory.load_bytes / GIB:.1f} GiB), in a step {memory.terms['weights'] / GIB:.1f} GiB{where}"
    ]


def _row_words(job: Job, chosen: Candidate) -> str:
    """What is known, or assumed, of the lengths of rows, and what becomes of shorter ones."""
    padding = _packing_words(job, chosen) if job.packed else _padding_words(job, chosen)
    rows = job.rows
    if rows is None:
        return f"assumed: every row {job.seq_len} tokens{padding}, every token trained on"
    known = f"longest row {rows.longest:,} tokens, mean {rows.mean:,.0f}, 95% up to {rows.p95:,}"
    known += f"; longest held-out row {rows.held_out:,}" if rows.held_out > rows.longest else ""
    places = micro_batches(job, chosen.precision, chosen.step).tokens
    if places is None:
        return f"{known}{padding}"
    return f"{known}: a micro-batch has as many rows as fit into {places:,} tokens{padding}"


def _sharded_checkpoint_words(chosen: Candidate) -> str:
    """How checkpoints are written where each rank writes a shard, and why."""
    memory = chosen.memory
    return (
        f"checkpoints of {memory.checkpoint_bytes / GIB:.1f} GiB are written in parts, one by each of "
        f"{chosen.layout.ranks} ranks ({memory.host_save_each_bytes / GIB:.1f} GiB of RAM each): above "
        f"{WHOLE_BYTES / GIB:.1f} GiB the first rank would write for more than {WHOLE_SAVE_S // 60} minutes, and hold "
        f"{memory.host_gather_bytes / GIB:.1f} GiB in RAM; any number of ranks resumes from them"
    )


def _packing_words(job: Job, chosen: Candidate) -> str:
    """How chats that share a row are told apart, and why."""
    if chosen.step.varlen:
        return f", several chats to a row, told apart by their boundaries, without a mask{_calls_words(job, chosen)}"
    if chosen.step.attention == "flash_attention_2":  # their position ids start anew
        return ", several chats to a row, told apart by their boundaries"
    return f", several chats to a row, with a mask between them ({job.unbounded_because(chosen.precision)})"


def _padding_words(job: Job, chosen: Candidate) -> str:
    """What becomes of rows that are shorter than others in their batch, and why."""
    if chosen.step.varlen:
        words = ", rows one behind the other without padding, told apart by their boundaries"
        return words + _calls_words(job, chosen)
    if not is_padded(job.config, chosen.layout, rows=chosen.batch.micro_batch):
        return ""
    joins = job.by_tokens and job.rows is not None and job.unbounded_because(chosen.precision) is None
    slower = joins and chosen.layout.context_parallel == 1
    why = "; without padding each chat would be a call of its own, which is predicted to be slower" if slower else ""
    if chosen.step.padded:
        return f", shorter rows padded to it and masked ({job.masked_because}){why}"
    return f", shorter rows padded to it, without a mask (attention is causal, and padding at the end){why}"


def _calls_words(job: Job, chosen: Candidate) -> str:
    """Why each chat is attended to by itself, where it is."""
    because = job.one_by_one_because(chosen.precision)
    return f", each attended to by a call of its own ({because})" if chosen.step.one_by_one else ""


def _evaluation_words(config: RunConfig, chosen: Candidate) -> str:
    """How many rows are evaluated at once, with their memory beside that of a training step."""
    rows, moments = chosen.step.eval_batch, chosen.memory.moments
    given = " (eval.batch_size is given)" if config.eval.batch_size != "auto" else ""
    step = max(size for name, size in moments.items() if name not in ("evaluation", "saving"))
    return (
        f"evaluation: {rows} row{'s' if rows > 1 else ''} at a time per rank{given}, rows of similar length together; "
        f"{moments['evaluation'] / GIB:.2f} GiB, a training step {step / GIB:.2f}"
    )


def _advice(chosen: Candidate) -> list[str]:
    """What may fail, or does not fit, although the plan is the best there is."""
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
