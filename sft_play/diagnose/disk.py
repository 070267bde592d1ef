"""Disk: the checkpoints that a planned run writes, the final weights, and the model if it must be downloaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from sft_play.config.schema import RunConfig
from sft_play.facts.models.model_shape import ModelShape
from sft_play.facts.space import Space
from sft_play.findings import Finding, failed, passed, skipped, warned
from sft_play.planner.memory.measured_walk import walk_of
from sft_play.planner.memory.model_states import paged_bytes
from sft_play.planner.plan import Plan
from sft_play.units import GIB

OTHER_BYTES = 64 * 2**20
"""Tokenizer (33 MiB for vocabularies of 256,000), trainer and random states, metrics."""
STORED_WIDTH = 2
"""Bytes per parameter of models on the hub."""


@dataclass(frozen=True)
class Written:
    """What a run writes, in bytes: one checkpoint, how many exist at once at most, and the final weights.

    `count` is None where all are kept and their number is not known.
    """

    checkpoint: int
    weights: int
    count: int | None

    @property
    def total(self) -> int:
        """The most that is on the disk at once."""
        return (self.count or 1) * self.checkpoint + self.weights


def written_by(config: RunConfig, shape: ModelShape, plan: Plan) -> Written:
    """What the planned run writes: weights that train, optimizer states as the layout keeps them, and the final save.

    DeepSpeed's checkpoints hold fp32 masters and states beside its copy of the weights and the trainer's. Measured
    against the files of a small model's runs (LoRA, QLoRA, full; one process, FSDP, ZeRO-2 and -3): 0.2 to 5% too low,
    by the small files that are not counted (2026-11-21).
    """
    layout = plan.choice.layout
    walk = walk_of(config, shape, plan.precision, plan.choice.step)
    params = walk.trained.params
    paged = paged_bytes(config.train.optim, walk.trained)
    if layout.is_zero:
        weights = walk.trained.width * params
        copies = 1 if layout.shards_params else 2  # ZeRO-3's own files hold the weights as fp32 masters only
        checkpoint = copies * weights + 4 * params + (paged or 8 * params)
    else:
        ranks = (layout.shard if layout.is_fsdp else 1) * layout.tensor_parallel
        weights = walk.resident.gradients * ranks  # a gradient is as large as its parameter
        checkpoint = weights + walk.resident.optimizer * ranks + paged  # figures of one rank, times those that share
    # A new checkpoint is complete before the oldest is deleted, and the best one is kept beside the limit.
    train = config.train
    at_once = None if train.save_total_limit is None else train.save_total_limit + train.load_best_model_at_end + 1
    every = config.eval.steps if train.load_best_model_at_end else train.save_steps
    in_all: int | None = math.ceil(train.epochs)
    if every:
        in_all = None if plan.work is None else math.ceil(plan.work.steps / every)
    counts = [count for count in (in_all, at_once) if count is not None]
    # the fewer of the two bounds: a short run writes fewer checkpoints than the limit allows
    return Written(checkpoint + OTHER_BYTES, weights + OTHER_BYTES, min(counts) if counts else None)


def check_disk(written: Written, *, folder: Path, there: Path, space: Space | None, may_write: bool) -> Finding:
    """Whether the run's folder is writable and has room for the checkpoints that exist at once."""
    if not may_write:
        return failed("disk", f"output.dir {folder}: {there} is not writable for this user",
                      "set output.dir to a folder that you can write, or give this user the folder")  # fmt: skip
    if space is None:
        return skipped("disk", f"the free space at {there} cannot be read")
    several = (
        f"{written.count} checkpoints of {_gib(written.checkpoint)} at once (a new one is complete before the oldest "
        "is deleted)"
    )
    one = f"a checkpoint of {_gib(written.checkpoint)}"
    needed = (
        f"{one if written.count == 1 else several} and {_gib(written.weights)} at the end: {_gib(written.total)}; "
        f"{_gib(space.free)} are free at {there}"
    )
    remedy = "free space, set output.dir to a larger disk, train.save_total_limit=1, or a larger train.save_steps"
    if written.count is None:
        kept = f"every checkpoint of {_gib(written.checkpoint)} is kept, and {_gib(space.free)} are free at {there}"
        verdict = failed if space.free < written.total else warned
        return verdict("disk", kept, "set train.save_total_limit=2")
    if space.free < written.total:
        return failed("disk", needed, remedy)
    return passed("disk", needed)


def check_fetch(shape: ModelShape, *, cached: bool, there: Path, space: Space | None) -> Finding:
    """Whether the hub's cache has room for the weights that the run would download."""
    size = STORED_WIDTH * shape.params
    if cached:
        return skipped("disk for the model", "the weights are already here")
    if space is None:
        return skipped("disk for the model", f"the free space at {there} cannot be read")
    words = f"about {_gib(size)} will be downloaded from the hub; {_gib(space.free)} are free at {there}"
    if space.free < size:
        return failed("disk for the model", words, "free space, or export HF_HOME=/a/larger/disk")
    return passed("disk for the model", words)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB // 10 else f"{size / 2**20:.0f} MiB"
