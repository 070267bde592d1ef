"""Questions about a plan: a grid of settings (`WHATIF`), and the longest sequence, the largest
micro-batch or the largest known model that fits (`MAX`).

Of `MAX` only what certainly fits counts: layouts that offload are considered only where the
machine's RAM is known.
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
from sft_play.log import one_line
from sft_play.models.config_json import KNOWN_MODELS, load_config_json, load_model_shape, refuse_quantised
from sft_play.models.shape import ModelShape
from sft_play.planner.batching import BatchPlan, effective_batch
from sft_play.planner.candidates import (
    Candidate,
    PlanInputs,
    build_candidate,
    first_fitting,
    requested_checkpoint_layers,
)
from sft_play.planner.decide import PlanRequest, build_plan_inputs
from sft_play.planner.layout import Layout
from sft_play.planner.memory.structure import check_adapter_targets, configured_shape
from sft_play.planner.possible_layouts import context_parallel_layouts, find_layouts
from sft_play.planner.precision import choose_precision

FitQuestion = Literal["seq_len", "batch", "model"]
QUESTIONS: tuple[FitQuestion, ...] = get_args(FitQuestion)
MAX_GRID_CELLS = 200
SEQ_LEN_STEP = 64
# Sequences longer than this many tokens are not tried.
MAX_TRIED_SEQ_LEN = 1 << 24


@dataclass(frozen=True)
class LargestFit:
    """The answer to `MAX`: None where not even the smallest fits."""

    question: FitQuestion
    value: int | str | None
    limited_by: str


def parse_grid(assignments: Sequence[str], *, variable: str = "WHATIF") -> list[tuple[str, ...]]:
    """The overrides of each cell of `key=v1,v2 other=a,b`: every combination; `variable` names where they stand.
    Raises ConfigError for another form, or too many."""
    axes: list[list[str]] = []
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        values = _split_values(text)
        if not key or not equals or not all(values):
            raise ConfigError(
                f"{variable}: {one_line(assignment)!r} is not key=value,value; for example "
                f"{variable}='model.max_seq_len=2048,4096'"
            )
        if any(axis[0].startswith(f"{key}=") for axis in axes):
            raise ConfigError(
                f"{variable} names {one_line(key)} twice; give all of its values at once: {one_line(key)}=1,2"
            )
        axes.append([f"{key}={value}" for value in values])
    count = math.prod(map(len, axes))
    if count > MAX_GRID_CELLS:
        raise ConfigError(f"{variable} asks for {count} plans; ask for at most {MAX_GRID_CELLS}")
    return [tuple(cell) for cell in itertools.product(*axes)]


def _split_values(text: str) -> list[str]:
    """The text split at commas outside brackets, and outside quotes where a value begins with one."""
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote or (character in "'\"" and not values[-1].strip()):
            quote = "" if character == quote else quote or character
        else:
            depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0 and not quote:
            values.append("")
        else:
            values[-1] += character
    return [value.strip() for value in values]


def parse_question(text: str) -> FitQuestion:
    """The question that `MAX` asks; raises ConfigError for anything else."""
    for question in QUESTIONS:
        if text == question:
            return question
    raise ConfigError(f"MAX={one_line(text)} is not one of {', '.join(QUESTIONS)}")


def largest_fitting_multiple(fits: Callable[[int], bool], *, step: int, limit: int) -> int | None:
    """The largest multiple of `step` up to `limit` for which `fits`, as all smaller ones do; None if the smallest does
    not."""
    if fits(limit):
        return limit
    # double until one does not fit, then halve between: a question costs a plan
    low, high = 0, 1
    while high * step < limit and fits(high * step):
        low, high = high, high * 2
    high = min(high, -(-limit // step))
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle * step):
            low = middle
        else:
            high = middle
    return low * step or None


MAX_TRIED_ROWS = 1 << 16
OFFLOAD_LEFT_OUT_NOTE = "; layouts that offload are left out, because the RAM was not given (ram=512GiB)"


def find_largest_fit(question: FitQuestion, request: PlanRequest) -> LargestFit:
    """Find the largest that fits in any layout of `request.allowed_layouts`. What the config leaves open has the
    value that needs least memory: every layer checkpointed, one row a micro step. Raises ConfigError where no layout
    can run it."""
    if question == "model":
        return _find_largest_model(request)
    # fp32_master_weights=False: weights that train in full may be bf16 where fp32 does not fit, as a plan would take
    # them
    inputs, layouts = build_plan_inputs(request, fp32_master_weights=False), _layouts_with_known_ram(request)
    if not layouts:
        raise ConfigError(f"MAX={question}: {_no_layout_reason(request)}")
    if question == "batch":
        rows = largest_fitting_multiple(
            lambda rows: _simplest_fit(inputs, layouts, rows, inputs.seq_len).fits, step=1, limit=MAX_TRIED_ROWS
        )
        outcome = _format_candidate(_simplest_fit(inputs, layouts, rows or 1, inputs.seq_len))
        return LargestFit("batch", rows, f"{inputs.seq_len} tokens a row, {outcome}")
    micro_batch = _micro_batch_option(request.config)
    positions = request.shape.max_positions or MAX_TRIED_SEQ_LEN
    length = largest_fitting_multiple(
        lambda tried_length: _simplest_fit(inputs, layouts, micro_batch, tried_length).fits,
        step=SEQ_LEN_STEP,
        limit=positions,
    )
    outcome = _format_candidate(_simplest_fit(inputs, layouts, micro_batch, length or SEQ_LEN_STEP))
    positions_note = f"the model's {positions} positions; " if length == positions else ""
    return LargestFit("seq_len", length, f"{positions_note}micro-batch {micro_batch}, {outcome}")


def _layouts_with_known_ram(request: PlanRequest) -> tuple[Layout, ...]:
    config, shape, hardware = request.config, request.shape, request.hardware
    layouts, _ = find_layouts(config, shape, hardware, named=request.named_layout)
    if config.model.mesh_shape is None:
        layouts += context_parallel_layouts(config, shape, hardware)
    always_offloads = config.train.gradient_checkpointing == "offload" and bool(hardware.gpus)
    return tuple(
        layout
        for layout in layouts
        if layout.name in request.allowed_layouts
        and (hardware.ram_given or not (layout.offloads_states or always_offloads))
    )


def _no_layout_reason(request: PlanRequest) -> str:
    layout_names, ranks = ", ".join(request.allowed_layouts), request.hardware.ranks
    left_out_note = "" if request.hardware.ram_given else OFFLOAD_LEFT_OUT_NOTE
    return f"none of the layouts {layout_names} can run this job on {ranks} rank(s){left_out_note}"


def _micro_batch_option(config: RunConfig) -> int:
    return config.train.batch_size if config.train.batch_size != "auto" else 1


def _simplest_fit(inputs: PlanInputs, layouts: tuple[Layout, ...], micro_batch: int, seq_len: int) -> Candidate:
    """The simplest layout that fits, those that offload last; if none does, the one closest to fitting."""
    requested_layers = requested_checkpoint_layers(inputs.config, inputs.shape)
    checkpointed_layers = inputs.shape.num_layers if requested_layers is None else requested_layers
    inputs = dataclasses.replace(inputs, seq_len=seq_len)

    def build_layout_candidate(layout: Layout) -> Candidate:
        step_rows = effective_batch(inputs.config.train, ranks=layout.data_parallel)
        grad_accum = max(1, step_rows // (micro_batch * layout.data_parallel))
        return build_candidate(
            inputs, layout, BatchPlan(micro_batch, grad_accum, layout.data_parallel), checkpointed_layers, eval_rows=1
        )

    return first_fitting(map(build_layout_candidate, layouts))


def _format_candidate(candidate: Candidate) -> str:
    left_out_note = (
        OFFLOAD_LEFT_OUT_NOTE if candidate.step.on_gpu and candidate.budget.host is None and not candidate.fits else ""
    )
    return f"{candidate.layout.name} {candidate.verdict}{left_out_note}"


def _find_largest_model(request: PlanRequest) -> LargestFit:
    config, shapes = request.config, dict[int, ModelShape]()
    for name in KNOWN_MODELS:
        try:
            shape = configured_shape(config, load_model_shape(name))
            refuse_quantised(load_config_json(name), name=name, mode=config.tuning.mode)
            check_adapter_targets(config, shape)
            choose_precision(config, request.hardware, shape)
        except SftPlayError:  # quantised weights, targets that it does not have, values beyond fp16's range
            continue
        if (shape.max_positions or MAX_TRIED_SEQ_LEN) >= config.model.max_seq_len:
            shapes.setdefault(shape.params, shape)  # models of the same size share a row: the first name stands
    outcome = "no known model allows sequences of that length"
    for params in sorted(shapes, reverse=True):
        shape = shapes[params]
        model_config = config.model_copy(update={"model": config.model.model_copy(update={"name": shape.name})})
        model_request = dataclasses.replace(request, config=model_config, shape=shape)
        try:
            inputs, layouts = (
                build_plan_inputs(model_request, fp32_master_weights=False),
                _layouts_with_known_ram(model_request),
            )
        except ConfigError as error:  # the user's mesh cannot run it
            outcome = f"not {shape.name}: {error}"
            continue
        if not layouts:
            outcome = _no_layout_reason(model_request)
            continue
        candidate = _simplest_fit(inputs, layouts, _micro_batch_option(config), inputs.seq_len)
        if candidate.fits:
            return LargestFit("model", shape.name, f"{params / 1e9:.1f} B parameters, {_format_candidate(candidate)}")
        outcome = f"not even {shape.name}: {_format_candidate(candidate)}"
    return LargestFit("model", None, outcome)


def largest_fit_line(largest: LargestFit) -> str:
    """The answer to MAX."""
    if largest.value is None:
        return f"Largest {largest.question}: none fits ({largest.limited_by})"
    return f"Largest {largest.question} that fits: {largest.value} ({largest.limited_by})"
