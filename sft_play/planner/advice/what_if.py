"""Questions about a plan: a grid of settings (`WHATIF`), and the longest sequence, the largest micro-batch or the
largest known model that fits (`MAX`).

Of `MAX` only what certainly fits counts: layouts that offload are considered only where the machine's RAM is known.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, SftPlayError
from sft_play.facts.models.architecture import KNOWN_MODELS, load_config_json, refuse_quantised, load_model_shape
from sft_play.facts.models.model_shape import ModelShape
from sft_play.log import one_line
from sft_play.planner.batching import BatchPlan, effective_batch
from sft_play.planner.candidates import Candidate, Job, candidate_of, first_that_fits, wished_layers
from sft_play.planner.layout import Layout, layouts_for, with_context_parallel
from sft_play.planner.memory.structure import check_targets, configured_shape
from sft_play.planner.plan import PlanRequest, job_of
from sft_play.planner.precision import choose_precision

Question = Literal["seq_len", "batch", "model"]
QUESTIONS: tuple[Question, ...] = get_args(Question)
MOST_CELLS = 200
SEQ_STEP = 64
# Sequences longer than this many tokens are not tried.
LONGEST = 1 << 24


@dataclass(frozen=True)
class Largest:
    """The answer to `MAX`: None where not even the smallest fits."""

    what: Question
    value: int | str | None
    limited_by: str


def grid(words: Sequence[str], *, of: str = "WHATIF") -> list[tuple[str, ...]]:
    """The overrides of each cell of `key=v1,v2 other=a,b`: every combination; `of` is the variable that has them.
    Raises ConfigError for another form, or too many."""
    axes: list[list[str]] = []
    for word in words:
        key, equals, text = word.partition("=")
        values = _values(text)
        if not key or not equals or not all(values):
            raise ConfigError(
                f"{of}: {one_line(word)!r} is not key=value,value; for example {of}='model.max_seq_len=2048,4096'"
            )
        if any(axis[0].startswith(f"{key}=") for axis in axes):
            raise ConfigError(f"{of} names {one_line(key)} twice; give all of its values at once: {one_line(key)}=1,2")
        axes.append([f"{key}={value}" for value in values])
    count = math.prod(map(len, axes))
    if count > MOST_CELLS:
        raise ConfigError(f"{of} asks for {count} plans; ask for at most {MOST_CELLS}")
    return [tuple(cell) for cell in itertools.product(*axes)]


def _values(text: str) -> list[str]:
    """The text split at commas outside brackets, and outside quotes where a value begins with one."""
    values, depth, quote = [""], 0, ""
    for letter in text:
        if quote or (letter in "'\"" and not values[-1].strip()):
            quote = "" if letter == quote else quote or letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0 and not quote:
            values.append("")
        else:
            values[-1] += letter
    return [value.strip() for value in values]


def question(text: str) -> Question:
    """The question that `MAX` asks; raises ConfigError for anything else."""
    for known in QUESTIONS:
        if text == known:
            return known
    raise ConfigError(f"MAX={one_line(text)} is not one of {', '.join(QUESTIONS)}")


def largest(fits: Callable[[int], bool], *, step: int, most: int) -> int | None:
    """The largest multiple of `step` up to `most` for which `fits`, as all smaller ones do; None if the smallest does
    not."""
    if fits(most):
        return most
    # double until one does not fit, then halve between: a question costs a plan
    low, high = 0, 1
    while high * step < most and fits(high * step):
        low, high = high, high * 2
    high = min(high, -(-most // step))
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle * step):
            low = middle
        else:
            high = middle
    return low * step or None


MOST_ROWS = 1 << 16
LEFT_OUT = "; layouts that offload are left out, because the RAM was not given (ram=512GiB)"


def largest_that_fits(question: Question, request: PlanRequest) -> Largest:
    """The largest that fits in any layout of `request.only` with the thriftiest settings that the config leaves open:
    every layer checkpointed, one row a pass, unless it says otherwise. Raises ConfigError where no layout can run
    it."""
    if question == "model":
        return _model(request)
    # masters=False: weights that train in full may be bf16 where fp32 does not fit, as a plan would take them
    job, layouts = job_of(request, masters=False), _layouts(request)
    if not layouts:
        raise ConfigError(f"MAX={question}: {_none_of(request)}")
    if question == "batch":
        rows = largest(lambda rows: _nearest(job, layouts, rows, job.seq_len).fits, step=1, most=MOST_ROWS)
        how = _how(_nearest(job, layouts, rows or 1, job.seq_len))
        return Largest("batch", rows, f"{job.seq_len} tokens a row, {how}")
    micro = _micro(request.config)
    positions = request.shape.max_positions or LONGEST
    length = largest(lambda asked: _nearest(job, layouts, micro, asked).fits, step=SEQ_STEP, most=positions)
    how = _how(_nearest(job, layouts, micro, length or SEQ_STEP))
    end = f"the model's {positions} positions; " if length == positions else ""
    return Largest("seq_len", length, f"{end}micro-batch {micro}, {how}")


def _layouts(request: PlanRequest) -> tuple[Layout, ...]:
    config, shape, hardware = request.config, request.shape, request.hardware
    possible, _ = layouts_for(config, shape, hardware, named=request.named)
    if config.model.mesh_shape is None:
        possible += with_context_parallel(config, shape, hardware)
    always_offloads = config.train.gradient_checkpointing == "offload" and bool(hardware.gpus)
    return tuple(
        layout
        for layout in possible
        if layout.name in request.only and (hardware.ram_given or not (layout.offloads_states or always_offloads))
    )


def _none_of(request: PlanRequest) -> str:
    listed, ranks = ", ".join(request.only), request.hardware.ranks
    left_out = "" if request.hardware.ram_given else LEFT_OUT
    return f"none of the layouts {listed} can run this job on {ranks} rank(s){left_out}"


def _micro(config: RunConfig) -> int:
    return config.train.batch_size if config.train.batch_size != "auto" else 1


def _nearest(job: Job, layouts: tuple[Layout, ...], rows: int, length: int) -> Candidate:
    """The simplest layout that fits, those that offload last; if none does, the one closest to fitting."""
    given = wished_layers(job.config, job.shape)
    count = job.shape.num_layers if given is None else given
    job = dataclasses.replace(job, seq_len=length)

    def candidate(layout: Layout) -> Candidate:
        effective = effective_batch(job.config.train, ranks=layout.data_parallel)
        accum = max(1, effective // (rows * layout.data_parallel))
        return candidate_of(job, layout, BatchPlan(rows, accum, layout.data_parallel), count, eval_rows=1)

    return first_that_fits(map(candidate, layouts))


def _how(candidate: Candidate) -> str:
    left_out = LEFT_OUT if candidate.step.on_gpu and candidate.room.host is None and not candidate.fits else ""
    return f"{candidate.layout.name} {candidate.verdict}{left_out}"


def _model(request: PlanRequest) -> Largest:
    config, shapes = request.config, dict[int, ModelShape]()
    for name in KNOWN_MODELS:
        try:
            shape = configured_shape(config, load_model_shape(name))
            refuse_quantised(load_config_json(name), name=name, mode=config.tuning.mode)
            check_targets(config, shape)
            choose_precision(config, request.hardware, shape)
        except SftPlayError:  # quantised weights, targets that it does not have, values beyond fp16's range
            continue
        if (shape.max_positions or LONGEST) >= config.model.max_seq_len:
            shapes.setdefault(shape.params, shape)  # models of the same size share a row: the first name stands
    how = "no known model allows sequences of that length"
    for params in sorted(shapes, reverse=True):
        shape = shapes[params]
        named = config.model_copy(update={"model": config.model.model_copy(update={"name": shape.name})})
        of_model = dataclasses.replace(request, config=named, shape=shape)
        try:
            job, layouts = job_of(of_model, masters=False), _layouts(of_model)
        except ConfigError as error:  # the user's mesh cannot run it
            how = f"not {shape.name}: {error}"
            continue
        if not layouts:
            how = _none_of(of_model)
            continue
        candidate = _nearest(job, layouts, _micro(config), job.seq_len)
        if candidate.fits:
            return Largest("model", shape.name, f"{params / 1e9:.1f} B parameters, {_how(candidate)}")
        how = f"not even {shape.name}: {_how(candidate)}"
    return Largest("model", None, how)
