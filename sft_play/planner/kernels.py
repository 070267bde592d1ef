"""Which kernels a plan counts for norms, gated activations and rotations: the plain ones or Liger's.

A plan is made before the run has proven Liger's kernels, and on machines that lack them. What is counted errs on the
side that fits: with `train.kernels: auto` the bytes of the plain code, which takes more, and the speed of what the run
will take here; with `liger` both of Liger's, since the run was asked for by name and refuses to start without the
package.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from sft_play.config.schema import RunConfig
from sft_play.facts.liger import PACKAGE, REPLACED, VERSION, Replaced
from sft_play.facts.models.model_shape import ModelShape
from sft_play.log import one_line
from sft_play.planner.layout import Layout

KernelsName = Literal["plain", "liger"]


@dataclass(frozen=True)
class PlannedKernels:
    """What Liger's kernels replace in the plan's bytes and in its speed (None: nothing), and why in words."""

    memory: Replaced | None
    speed: Replaced | None
    reason: str


@dataclass(frozen=True)
class CountedKernels:
    """Which kernels a plan counts, by name: `kernels` of its JSON.

    `plain_bytes`: what the choice would require of a device with the plain ones; None where those are counted.
    """

    memory: KernelsName = "plain"
    speed: KernelsName = "plain"
    plain_bytes: int | None = None


def planned_kernels(
    config: RunConfig, shape: ModelShape, layout: Layout, *, on_gpu: bool, without: Collection[str] = ()
) -> PlannedKernels | None:
    """What is counted in a layout; None where the config leaves the plain kernels. `without`: packages that are not
    installed here, which only `auto` asks."""
    wish = config.train.kernels
    if wish == "none":
        return None
    setting = f"kernels: train.kernels={wish}: "
    problem = _problem(config, shape, layout, on_gpu=on_gpu)
    # asked for by name, a missing package is refused when the run starts; the plan may be made on another machine
    if problem is None and wish == "auto" and PACKAGE in without:
        problem = f"{PACKAGE} is not installed here"
    if problem is not None:
        return PlannedKernels(None, None, f"{setting}the plain ones, because {problem}")
    replaced = REPLACED[shape.model_type]
    if shape.num_experts:  # experts keep their own code, and so do MLPs beside them
        replaced = replace(replaced, gate=False)
    words = f"{setting}Liger's for {replaced.words}"
    check = f"if a measurement before the first step shows that they compute the same ({PACKAGE} {VERSION})"
    if wish == "liger":
        return PlannedKernels(replaced, replaced, f"{words}, {check}")
    # auto may fall back to the plain code when the run starts, which must then still fit
    counted = "the speed is theirs, the memory that of the plain ones, which take more"
    return PlannedKernels(None, replaced, f"{words}, {check}: {counted}")


def counted_kernels(
    config: RunConfig, shape: ModelShape, layout: Layout, *, on_gpu: bool, without: Collection[str] = ()
) -> CountedKernels:
    """The same by name, without the bytes of the plain ones."""
    planned = planned_kernels(config, shape, layout, on_gpu=on_gpu, without=without)
    if planned is None:
        return CountedKernels()
    return CountedKernels("liger" if planned.memory else "plain", "liger" if planned.speed else "plain")


def liger_in_memory(config: RunConfig, shape: ModelShape, layout: Layout, *, on_gpu: bool) -> Replaced | None:
    """What Liger's kernels replace in a step whose bytes are counted; None: nothing."""
    planned = planned_kernels(config, shape, layout, on_gpu=on_gpu)
    return planned.memory if planned else None


def _problem(config: RunConfig, shape: ModelShape, layout: Layout, *, on_gpu: bool) -> str | None:
    """Why the run will not take Liger's kernels; None where it will try."""
    if not on_gpu:
        return "Liger's need a CUDA GPU"
    if config.tuning.backend != "bnb":
        return f"tuning.backend={config.tuning.backend} brings its own"
    if layout.tensor_parallel > 1:
        return "tensor-parallel ranks replace the same forwards"
    if shape.model_type not in REPLACED:
        return f"{PACKAGE} {VERSION} has none for {one_line(shape.model_type)} that this plan knows"
    return None
