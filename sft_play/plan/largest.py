"""The answer to `MAX`: the longest sequence, the largest micro-batch or the largest known model that fits."""

from __future__ import annotations

from sft_play.config.schema import RunConfig
from sft_play.errors import SftPlayError
from sft_play.facts.architecture import ModelShape, shape_of
from sft_play.facts.hardware import Hardware
from sft_play.facts.known_models import KNOWN_MODELS
from sft_play.plan.batching import BatchPlan
from sft_play.plan.candidates import Job, candidate_of
from sft_play.plan.layout import Layout, layouts_for
from sft_play.plan.memory import GIB
from sft_play.plan.plan import job_of
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
        value = largest(lambda rows: _fits(job, layouts, rows, job.seq_len), step=1, most=MOST_ROWS)
        return Largest("batch", value, f"{_gib(job.budget)} per rank, {job.seq_len} tokens a row")
    micro = config.train.batch_size if config.train.batch_size != "auto" else 1
    positions = shape.max_positions or LONGEST
    value = largest(lambda length: _fits(job, layouts, micro, length), step=SEQ_STEP, most=positions)
    why = f"the model's {positions} positions" if value == positions else f"{_gib(job.budget)} per rank"
    return Largest("seq_len", value, f"{why}, micro-batch {micro}")


def _fits(job: Job, layouts: tuple[Layout, ...], rows: int, length: int) -> bool:
    wish, layers = job.config.train.gradient_checkpointing, job.shape.num_layers
    count = layers if wish in ("auto", True) else 0 if wish is False else min(int(wish), layers)
    asked = Job(**{**vars(job), "seq_len": length})
    for layout in layouts:
        accum = max(1, job.config.train.effective_batch_size // (rows * layout.data_parallel))
        if candidate_of(asked, layout, BatchPlan(rows, accum, layout.data_parallel), count).fits:
            return True
    return False


def _model(config: RunConfig, hardware: Hardware, has_eval: bool) -> Largest:
    """The largest model of the table, looked for from the top."""
    shapes: dict[int, ModelShape] = {}
    for name in KNOWN_MODELS:
        try:
            shape = shape_of(name)
        except SftPlayError:
            continue
        shapes.setdefault(shape.params, shape)
    budget = 0
    for params in sorted(shapes, reverse=True):
        shape = shapes[params]
        job = job_of(config, shape, hardware, has_eval=has_eval)
        budget = job.budget
        micro = config.train.batch_size if config.train.batch_size != "auto" else 1
        if _fits(job, layouts_for(config, shape, hardware)[0], micro, job.seq_len):
            return Largest("model", shape.name, f"{_gib(budget)} per rank; {params / 1e9:.1f} B parameters")
    return Largest("model", None, f"{_gib(budget)} per rank")


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
