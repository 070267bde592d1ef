"""The answer to `MAX`: the longest sequence, the largest micro-batch or the largest known model that fits."""

from __future__ import annotations

from sft_play.config.schema import RunConfig
from sft_play.errors import SftPlayError
from sft_play.facts.architecture import ModelShape, shape_of
from sft_play.facts.hardware import Hardware
from sft_play.facts.known_models import KNOWN_MODELS
from sft_play.plan.batching import BatchPlan
from sft_play.plan.candidates import Candidate, Job, candidate_of, host_need
from sft_play.plan.layout import Layout, layouts_for
from sft_play.plan.memory import GIB
from sft_play.plan.plan import check_targets, job_of
from sft_play.plan.whatif import LONGEST, SEQ_STEP, Largest, Question, largest

MOST_ROWS = 1 << 16


def largest_that_fits(
    question: Question, config: RunConfig, shape: ModelShape, hardware: Hardware, *, has_eval: bool = True
) -> Largest:
    """The largest that fits in any layout with the most thrifty settings that the config leaves open: checkpointing
    of every layer and one row a pass, unless it says otherwise."""
    if question == "model":
        return _model(config, hardware, has_eval)
    job = job_of(config, shape, hardware, has_eval=has_eval)
    layouts, _ = layouts_for(config, shape, hardware)
    if question == "batch":
        rows = largest(lambda rows: _fitting(job, layouts, rows, job.seq_len) is not None, step=1, most=MOST_ROWS)
        how = _how(job, _fitting(job, layouts, rows or 1, job.seq_len))
        return Largest("batch", rows, f"{job.seq_len} tokens a row, {how}")
    micro = _micro(config)
    positions = shape.max_positions or LONGEST
    length = largest(lambda asked: _fitting(job, layouts, micro, asked) is not None, step=SEQ_STEP, most=positions)
    how = _how(job, _fitting(job, layouts, micro, length or SEQ_STEP))
    end = f"the model's {positions} positions; " if length == positions else ""
    return Largest("seq_len", length, f"{end}micro-batch {micro}, {how}")


def _micro(config: RunConfig) -> int:
    """The micro-batch that was given, else one row."""
    return config.train.batch_size if config.train.batch_size != "auto" else 1


def _fitting(job: Job, layouts: tuple[Layout, ...], rows: int, length: int) -> Candidate | None:
    """The simplest layout that fits, those that offload last."""
    wish, layers = job.config.train.gradient_checkpointing, job.shape.num_layers
    count = layers if wish in ("auto", True) else 0 if wish is False else min(int(wish), layers)
    asked = Job(**{**vars(job), "seq_len": length})
    for layout in layouts:
        accum = max(1, job.config.train.effective_batch_size // (rows * layout.data_parallel))
        found = candidate_of(asked, layout, BatchPlan(rows, accum, layout.data_parallel), count)
        if found.fits:
            return found
    return None


def _how(job: Job, found: Candidate | None) -> str:
    """Where it fits, and the host's memory where that is part of it."""
    if found is None:
        return f"in no layout of {_gib(job.budget)} a rank"
    text = f"{found.layout.name} at {_gib(found.memory.required)} of {_gib(job.budget)} a rank"
    if found.layout.offloads_states:
        text += f", with {_gib(host_need(job, found.layout, found.memory))} of RAM on each node"
    return text


def _model(config: RunConfig, hardware: Hardware, has_eval: bool) -> Largest:
    """The largest model of the table that has room for the sequences, looked for from the top."""
    shapes: dict[int, ModelShape] = {}
    for name in KNOWN_MODELS:
        try:
            shape = shape_of(name)
            check_targets(config, shape)
        except SftPlayError:  # adapters on layers that this one does not have
            continue
        if (shape.max_positions or LONGEST) >= config.model.max_seq_len:
            shapes.setdefault(shape.params, shape)
    how = "in no layout"
    for params in sorted(shapes, reverse=True):
        shape = shapes[params]
        job = job_of(config, shape, hardware, has_eval=has_eval)
        found = _fitting(job, layouts_for(config, shape, hardware)[0], _micro(config), job.seq_len)
        how = _how(job, found)
        if found is not None:
            return Largest("model", shape.name, f"{params / 1e9:.1f} B parameters, {how}")
    return Largest("model", None, how)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
