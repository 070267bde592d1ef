"""What was measured with the libraries, remembered: a second start reads it without importing them.

Traces by their settings, and the shapes of models that the table of families does not know by their config.json; both
by the libraries' versions and this code's. Failures are not remembered, nor what came from a model's own code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sft_play.facts.models.model_shape import ModelShape
from sft_play.facts.remembered import keep, place_of
from sft_play.process.heap import importing
from sft_play.trace.settings import StepSettings, TracedPeak

logger = logging.getLogger(__name__)

TRACE_VERSION = 15
"""Part of the key of traces: raised whenever this package would give another number for the same settings."""
SHAPE_VERSION = 6
"""The same for shapes."""
_SHAPE = TypeAdapter(ModelShape)


def _trace(settings: StepSettings) -> TracedPeak:
    with importing():
        from sft_play.trace.step import trace_step
    return trace_step(settings)


def _measure_shape(config: Mapping[str, Any], *, name: str, trust_remote_code: bool) -> ModelShape:
    with importing():
        from sft_play.trace.meta_shape import shape_on_meta
    return shape_on_meta(config, name=name, trust_remote_code=trust_remote_code)


def cached_trace(
    settings: StepSettings, *, folder: Path | None = None, measure: Callable[[StepSettings], TracedPeak] = _trace
) -> TracedPeak:
    """`step.trace_step`, remembered in `folder` (None: in the cache).

    Raises:
        TraceUnavailable, SimulatedOutOfMemory: as `trace_step`.
    """
    path = place_of("traces", folder, {"settings": settings.as_json(), "trace": TRACE_VERSION})
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        plain["phases"] = {name: tuple(pair) for name, pair in plain["phases"].items()}
        return TracedPeak(**{**plain, "notes": tuple(plain["notes"])})
    except (OSError, ValueError, KeyError, TypeError):
        pass  # absent or broken: traced again
    peak = measure(settings)
    keep(path, json.dumps(dataclasses.asdict(peak)))
    return peak


def cached_shape(
    config: Mapping[str, Any],
    *,
    name: str,
    trust_remote_code: bool = False,
    folder: Path | None = None,
    measure: Callable[..., ModelShape] = _measure_shape,
) -> ModelShape:
    """`meta_shape.shape_on_meta`, remembered in `folder` (None: in the cache); not with remote code.

    Raises:
        ModelError: as `shape_on_meta`.
    """
    path = place_of("shapes", folder, {"config": config, "shape": SHAPE_VERSION})
    if not trust_remote_code:
        with contextlib.suppress(OSError, ValidationError):
            return dataclasses.replace(_SHAPE.validate_json(path.read_bytes()), name=name)
    shape = measure(config, name=name, trust_remote_code=trust_remote_code)
    if not trust_remote_code:
        keep(path, _SHAPE.dump_json(shape).decode())
    return shape
