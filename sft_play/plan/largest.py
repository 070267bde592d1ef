"""The answer to `MAX`: the longest sequence, the largest micro-batch or the largest known model that fits.

What fits is what fits for certain: layouts that offload are looked at only where the machine's RAM is known.
"""

from __future__ import annotations

from collections.abc import Sequence

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, SftPlayError
from sft_play.facts.architecture import ModelShape, shape_of
from sft_play.facts.hardware import Hardware
from sft_play.facts.known_models import KNOWN_MODELS
from sft_play.plan.batching import BatchPlan, effective_batch
from sft_play.plan.candidates import Candidate, Job, candidate_of, least, wished_layers
from sft_play.plan.layout import LAYOUT_NAMES, Layout, LayoutName, layouts_for, with_context_parallel
from sft_play.plan.plan import check_targets, job_of
from sft_play.plan.precision import choose_precision
from sft_play.plan.record import Measured
from sft_play.plan.whatif import LONGEST, SEQ_STEP, Largest, Question, largest

MOST_ROWS = 1 << 16


def largest_that_fits(
    question: Question,
    config: RunConfig,
    shape: ModelShape,
    hardware: Hardware,
    *,
    only: Sequence[LayoutName] = LAYOUT_NAMES,
    has_eval: bool = True,
    earlier: Sequence[Measured] = (),
) -> Largest:
    """The largest that fits in any layout of `only` with the most thrifty settings that
    the config leaves open: checkpointing of every layer and one row a pass, unless it says otherwise. `earlier`: runs
    measured on this machine.

    Raises:
        ConfigError: none of the layouts can run the job.
    """
    if question == "model":
        return _model(config, hardware, only, has_eval, earlier)
    job = job_of(config, shape, hardware, has_eval=has_eval, earlier=earlier, masters=False)
    layouts = _layouts(config, shape, hardware, only)
    if not layouts:
        raise ConfigError(
            f"MAX={question}: this job runs in no layout of {', '.join(only)} on {hardware.ranks} rank(s)"
        )
    if question == "batch":
        rows = largest(lambda rows: _nearest(job, layouts, rows, job.seq_len).fits, step=1, most=MOST_ROWS)
        how = _how(_nearest(job, layouts, rows or 1, job.seq_len))
        return Largest("batch", rows, f"{job.seq_len} tokens a row, {how}")
    micro = _micro(config)
    positions = shape.max_positions or LONGEST
    length = largest(lambda asked: _nearest(job, layouts, micro, asked).fits, step=SEQ_STEP, most=positions)
    how = _how(_nearest(job, layouts, micro, length or SEQ_STEP))
    end = f"the model's {positions} positions; " if length == positions else ""
    return Largest("seq_len", length, f"{end}micro-batch {micro}, {how}")


def _layouts(
    config: RunConfig, shape: ModelShape, hardware: Hardware, only: Sequence[LayoutName]
) -> tuple[Layout, ...]:
    possible, _ = layouts_for(config, shape, hardware, named=only[0] if len(only) == 1 else None)
    if config.model.mesh_shape is None:
        possible += with_context_parallel(config, shape, hardware)
    return tuple(layout for layout in possible if layout.name in only)


def _micro(config: RunConfig) -> int:
    """The micro-batch that was given, else one row."""
    return config.train.batch_size if config.train.batch_size != "auto" else 1


def _nearest(job: Job, layouts: tuple[Layout, ...], rows: int, length: int) -> Candidate:
    """The simplest layout that fits, those that offload last; where none does, the one that is nearest to it."""
    given = wished_layers(job.config, job.shape.num_layers)
    count = job.shape.num_layers if given is None else given
    asked = Job(**{**vars(job), "seq_len": length})
    found = []
    for layout in layouts:
        effective = effective_batch(job.config.train, ranks=layout.data_parallel)
        accum = max(1, effective // (rows * layout.data_parallel))
        candidate = candidate_of(asked, layout, BatchPlan(rows, accum, layout.data_parallel), count)
        if candidate.hangs_on_ram:
            continue
        if candidate.fits:
            return candidate
        found.append(candidate)
    return least(found)


def _how(found: Candidate) -> str:
    """In which layout it fits, or is nearest to it, with the numbers of the GPU and, where it counts, of the host."""
    unknown = "; layouts that offload are left out, since the RAM is not given (ram=512GiB)"
    left_out = unknown if found.step.on_gpu and found.room.host is None and not found.fits else ""
    return f"{found.layout.name} {found.verdict}{left_out}"


def _model(
    config: RunConfig,
    hardware: Hardware,
    only: Sequence[LayoutName],
    has_eval: bool,
    earlier: Sequence[Measured],
) -> Largest:
    """The largest model of the table that has room for the sequences, looked for from the top."""
    shapes: dict[int, ModelShape] = {}
    for name in KNOWN_MODELS:
        try:
            shape = shape_of(name)
            check_targets(config, shape)
            choose_precision(config, hardware, shape)
        except SftPlayError:  # adapters on layers that this one does not have, fp16 that it leaves
            continue
        if (shape.max_positions or LONGEST) >= config.model.max_seq_len:
            shapes.setdefault(shape.params, shape)
    how = "no known model has room for the sequences"
    for params in sorted(shapes, reverse=True):
        shape = shapes[params]
        named = config.model_copy(update={"model": config.model.model_copy(update={"name": shape.name})})
        job = job_of(named, shape, hardware, has_eval=has_eval, earlier=earlier, masters=False)
        layouts = _layouts(named, shape, hardware, only)
        if not layouts:
            continue
        found = _nearest(job, layouts, _micro(config), job.seq_len)
        if found.fits:
            return Largest("model", shape.name, f"{params / 1e9:.1f} B parameters, {_how(found)}")
        how = f"not even {shape.name}: {_how(found)}"
    return Largest("model", None, how)
