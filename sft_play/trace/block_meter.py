"""Bytes of the blocks of a class that the table of families does not have, as a plan asks for them, remembered.

A pass is run at the plan's own length, for a few batches; others lie between. A class whose operators grow with the
length takes as many tokens in short rows, twice; one that cannot run on tensors without bytes, few real tokens on the
CPU: both would take minutes at full length.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from sft_play.config.schema import RunConfig
from sft_play.errors import ModelError
from sft_play.facts.host import total_and_free_ram
from sft_play.facts.installed import load_or_measure
from sft_play.facts.models.config_fields import UnknownArchitecture
from sft_play.facts.models.decoder import parse_model_shape
from sft_play.facts.models.model_shape import ModelShape
from sft_play.log import one_line
from sft_play.planner.layout import SINGLE
from sft_play.planner.memory.measured_walk import MeasuredPass, Way, between
from sft_play.planner.memory.step_memory import Step, is_padded
from sft_play.planner.memory.structure import Numbers
from sft_play.planner.precision import DtypeName, Precision
from sft_play.process.imports import importing
from sft_play.trace.confirm import cached_shape, row_mask, settings_of
from sft_play.trace.settings import StepSettings, TraceUnavailable
from sft_play.units import GIB

logger = logging.getLogger(__name__)

# Part of the key of what is remembered: raised whenever this package would give other bytes for the same settings.
BLOCKS_VERSION = 7
# Tokens that states are computed by at once, at least.
CHUNK = 64
# Names of the same in configs.
_CHUNKS = ("chunk_size", "mamba_chunk_size", "block_size")
# Rows that are run together: what a plan asks for first. Sizes cost nothing, so that many rows take no longer.
BATCHES: dict[Way, tuple[int, ...]] = {"kept": (1, 2, 8, 32), "recomputed": (1, 2, 8, 32),
                                       "evaluated": (1, 8, 64)}  # fmt: skip
# Tokens of a row at least.
SHORTEST = 64
# Tokens of the two rows that run on the CPU.
ON_CPU = (64, 128)
_PASSES = TypeAdapter(list[MeasuredPass])
_WORDS: dict[Way, str] = {"kept": "forwards and backwards", "recomputed": "with checkpointing",
                         "evaluated": "without gradients"}  # fmt: skip


def planned_shape(config: Mapping[str, Any], *, name: str, trust_remote_code: bool = False) -> ModelShape:
    """The shapes of a config.json's language model, for a plan: of a class that the tables lack they, and its blocks,
    are measured. Raises ModelError: it is no causal language model, or its class refuses the config."""
    try:
        return parse_model_shape(config, name=name)
    except UnknownArchitecture as error:
        logger.debug("%s; its class is measured on the meta device", error)
    shape = cached_shape(config, name=name, trust_remote_code=trust_remote_code)
    code = name if trust_remote_code and config.get("auto_map") else None
    return replace(shape, block_meter=BlockMeter(json.dumps(dict(config)), code))


@dataclass(frozen=True)
class BlockMeter:
    """Measures blocks of one class; `ModelShape.block_meter` of its shape."""

    model: str
    """Its config.json."""
    code: str | None = None
    """The folder or hub name whose own code defines it."""

    def __call__(
        self,
        config: RunConfig,
        shape: ModelShape,
        precision: Precision,
        step: Step,
        numbers: Numbers,
        way: Way,
        batch: int,
        *,
        accumulates: bool = False,
    ) -> MeasuredPass:
        """A pass of `batch` rows of the step; raises ModelError where its blocks cannot be run here."""
        # a run plans before it has counted its rows and after: short ones need not be measured twice
        step = replace(step, seq_len=max(step.seq_len, SHORTEST * step.layout.context_parallel))
        places = first_blocks(shape.layer_order)
        settings = self._settings(config, shape, precision, step, numbers, way)
        padded = replace(step, varlen=False, one_by_one=False, padded=True, masks=True)
        blocks = Blocks(
            settings,
            self._settings(config, shape, precision, padded, numbers, way) if step.varlen else settings,
            way,
            places,
            # adapters' gradients are too small to tell whether they are added to older ones
            accumulates and way != "evaluated" and config.tuning.mode == "full",
            sum(shape.layers[place].params for place in places) + shape.embedding_params + shape.head_params,
        )
        return blocks.passed(batch, step.length)

    def _settings(
        self, config: RunConfig, shape: ModelShape, precision: Precision, step: Step, numbers: Numbers, way: Way
    ) -> StepSettings:
        # DeepSpeed's adapters of half the width would be measured apart, and hardly differ
        alone = replace(
            step, layout=SINGLE, offloads=False, seq_len=step.length, micro_batch=1, grad_accum=1, eval_batch=0,
            checkpointed_layers=None if way == "recomputed" else 0,
        )  # fmt: skip
        settings = settings_of(config, json.loads(self.model), shape, precision, alone)
        evaluated = is_padded(config, step.layout, rows=2, masks=step.masks)
        half: DtypeName = precision.compute if precision.compute != "float32" else "bfloat16"
        wide: dict[int, DtypeName] = {4: "float32", 2: half}
        return replace(
            settings,
            code=self.code,
            loss="logits" if shape.has_custom_logits else "chunked",
            kernels="plain",
            weights=wide[numbers.weights],
            eval_mask=row_mask(padded=evaluated, masks=step.masks) if way == "evaluated" else None,
        )


def first_blocks(order: Sequence[int]) -> tuple[int, ...]:
    """The places of as many of the first blocks as show every kind, each behind another block where there is one, and
    of several kinds each before another."""
    needed = max((order.index(place, 1) if place in order[1:] else 0) for place in set(order))
    return tuple(order[: needed + (2 if len(set(order)) > 1 else 1)])


@dataclass(frozen=True)
class Blocks:
    """What is run: a model's first blocks, by their places in `ModelShape.layers`, in this way of a step."""

    settings: StepSettings
    padded: StepSettings
    """For a class that does not take the boundaries of rows one behind the other: a run pads them then, with a mask."""
    way: Way
    places: tuple[int, ...]
    accumulates: bool
    weights: int
    """Their parameters, with the embedding and the head."""

    def passed(self, rows: int, length: int) -> MeasuredPass:
        """A pass, as it was measured or between two that were. Raises ModelError: the blocks cannot be run."""
        known = BATCHES[self.way]
        if rows > known[-1]:  # the next power of two, and the one before
            last = 1 << (rows - 1).bit_length()
            known = (last // 2, last)
        found = self._remembered(known, length)
        high = next(one for one in found if one.batch >= rows)
        return high if high.batch == rows else between(found[found.index(high) - 1], high, rows)

    def _remembered(self, batches: tuple[int, ...], length: int) -> list[MeasuredPass]:
        decides = {
            "settings": self.settings.as_json(), "way": self.way, "places": self.places,
            "accumulates": self.accumulates, "batches": batches, "length": length, "blocks": BLOCKS_VERSION,
        }  # fmt: skip
        key = json.dumps(decides)
        if key not in _seen:
            measured = partial(self.measure, batches, length)
            _seen[key] = load_or_measure("blocks", decides, _PASSES, measured, cacheable=self.settings.code is None)
        return _seen[key]

    def measure(self, batches: Sequence[int], length: int) -> list[MeasuredPass]:
        """The passes, on tensors without bytes or on a few real ones. Raises ModelError: neither is possible."""
        logger.debug("Measuring the blocks of the model's class, once: rows of %d tokens, %s", length, _WORDS[self.way])
        problem = ""
        for blocks in (self, replace(self, settings=self.padded))[: 1 + (self.padded is not self.settings)]:
            try:
                return blocks._without_bytes(batches, length)
            except TraceUnavailable as error:
                problem = problem or one_line(str(error), limit=200)
        try:
            return self._on_cpu(batches, length)
        except TraceUnavailable as error:
            kind = one_line(str(self.settings.model.get("model_type")))
            raise ModelError(
                f"no plan can be made for the class {kind}: what its blocks need cannot be measured ({problem}; on the "
                f"CPU: {one_line(str(error), limit=200)})"
            ) from None

    def _without_bytes(self, batches: Sequence[int], length: int) -> list[MeasuredPass]:
        if length > 4 * self._chunk and self._is_flat and self._operators_grow():
            return self._in_short_rows(batches, length)
        return self._run([(rows, length) for rows in batches])

    @property
    def _chunk(self) -> int:
        inner = self.settings.model.get("text_config")
        fields = (self.settings.model, inner if isinstance(inner, Mapping) else {})
        found = [part.get(name) for part in fields for name in _CHUNKS]
        return max([CHUNK, *(size for size in found if isinstance(size, int))])

    @property
    def _is_flat(self) -> bool:
        """Whether bytes grow with tokens, and not with the square of a row's."""
        settings = self.settings
        return settings.attention != "eager" and "padded" not in (settings.mask, settings.eval_mask)

    def _operators_grow(self) -> bool:
        with importing():
            from sft_play.trace.blocks import operators
        sizes = (2 * self._chunk, self._chunk)
        long, short = operators(self.settings, [(1, size) for size in sizes], depth=len(self.places))
        return long > short

    def _run(self, passes: Sequence[tuple[int, int]], *, real: bool = False) -> list[MeasuredPass]:
        with importing():
            from sft_play.trace.blocks import run_blocks
        # of real tensors the CPU has no kernel that holds what a GPU's would
        settings = replace(self.settings, attention="eager") if real else self.settings
        return run_blocks(settings, passes, self.way, places=self.places, accumulates=self.accumulates, real=real)

    def _in_short_rows(self, batches: Sequence[int], length: int) -> list[MeasuredPass]:
        """As many tokens in rows of two lengths, carried on to the rows that are meant."""
        sizes = (2 * self._chunk, self._chunk)
        passes = [(-(-rows * length // size), size) for rows in batches for size in sizes]
        found = iter(self._run(passes))
        return [
            replace(between(few, many, rows), ends=()) for rows, few, many in zip(batches, found, found, strict=True)
        ]

    def _on_cpu(self, batches: Sequence[int], length: int) -> list[MeasuredPass]:
        """Few real tokens, in rows of two lengths, carried on to all tokens."""
        if self.settings.attention == "eager":
            raise TraceUnavailable("eager attention's squares do not show in short rows")
        needed, (_, free) = 4 * self.weights, total_and_free_ram()
        if needed > free // 2:
            raise TraceUnavailable(f"its weights take {needed / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free")
        few, more = (
            replace(one, batch=size)
            for one, size in zip(self._run([(1, size) for size in ON_CPU], real=True), ON_CPU, strict=True)
        )
        masks = 0 if self._is_flat else length * length
        return [
            _masked(replace(between(few, more, rows * length), batch=rows, ends=()), rows * masks) for rows in batches
        ]


def _masked(found: MeasuredPass, squares: int) -> MeasuredPass:
    """A pass on the CPU with a mask of as many places, and each block's copy of it that is added to scores: at most."""
    bias = 2 * squares
    layers = (
        replace(one, forward=one.forward + bias, kept=one.kept + bias * (one.kept > 0), backward=one.backward + bias)
        for one in (found.first, *found.layers)
    )
    first, *others = layers
    return replace(found, before=found.before + squares, first=first, layers=tuple(others), on_cpu=True)


_seen: dict[str, list[MeasuredPass]] = {}
