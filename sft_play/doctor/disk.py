"""Disk: the checkpoints that a planned run writes, the final weights, and the model's own if they are to be fetched."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from sft_play.config.schema import RunConfig
from sft_play.doctor.finding import Finding, failed, passed, skipped, warned
from sft_play.facts.model_shape import ModelShape
from sft_play.facts.space import Space
from sft_play.plan.moments import Walk
from sft_play.plan.plan import Plan
from sft_play.plan.states import paged_bytes

GIB = 2**30
OTHER_BYTES = 64 * 2**20
"""Tokenizer (33 MiB for vocabularies of 256,000), trainer's and random states, metrics."""
STORED_WIDTH = 2
"""Bytes of a parameter as models lie on the hub."""


@dataclass(frozen=True)
class Written:
    """What a run writes, in bytes: one checkpoint, how many lie there at once at most, and the weights at its end.

    `count` is None where all are kept and their number is not known.
    """

    checkpoint: int
    weights: int
    count: int | None

    @property
    def total(self) -> int:
        """The most that lies on the disk at once."""
        return (self.count or 1) * self.checkpoint + self.weights


def written_by(config: RunConfig, shape: ModelShape, plan: Plan) -> Written:
    """What the planned run writes: weights that train, optimizer states as the layout keeps them, and the final save.

    DeepSpeed's checkpoints hold fp32 masters and states beside its copy of the weights and the trainer's. Compared with
    the files of runs of a small model (LoRA, QLoRA, full; one process, FSDP, ZeRO-2 and -3): 0.2 to 5% below, which
    are small files (2026-11-21).
    """
    layout = plan.choice.layout
    walk = Walk(config, shape, plan.precision, plan.choice.step)
    params = walk.trained.params
    paged = paged_bytes(config.train.optim, walk.trained)
    if layout.is_zero:
        weights = walk.trained.width * params
        copies = 1 if layout.shards_params else 2  # ZeRO-3's own files hold the weights as fp32 masters only
        checkpoint = copies * weights + 4 * params + (paged or 8 * params)
    else:
        ranks = (layout.shard if layout.is_fsdp else 1) * layout.tensor_parallel
        weights = walk.resident.gradients * ranks  # a gradient is as large as what it belongs to
        checkpoint = weights + walk.resident.optimizer * ranks + paged
    made = _checkpoints_made(config, plan)
    train = config.train
    at_once = None if train.save_total_limit is None else train.save_total_limit + train.load_best_model_at_end + 1
    counts = [count for count in (made, at_once) if count is not None]
    return Written(checkpoint + OTHER_BYTES, weights + OTHER_BYTES, min(counts) if counts else None)


def _checkpoints_made(config: RunConfig, plan: Plan) -> int | None:
    """How many checkpoints the whole run makes; None where its number of steps is not known."""
    train = config.train
    every = config.eval.steps if train.load_best_model_at_end else train.save_steps
    if not every:
        return math.ceil(train.epochs)
    return None if plan.work is None else math.ceil(plan.work.steps / every)


def check_disk(written: Written, *, folder: Path, there: Path, space: Space | None, may_write: bool) -> Finding:
    """Whether the run's folder can be written and holds the checkpoints that lie there at once."""
    if not may_write:
        return failed("disk", f"output.dir {folder}: {there} cannot be written by this user",
                      "set output.dir to a folder of yours, or give the folder to this user")  # fmt: skip
    if space is None:
        return skipped("disk", f"what is free at {there} cannot be read")
    several = (
        f"{written.count} checkpoints of {_gib(written.checkpoint)} at once (a new one is whole before the oldest goes)"
    )
    one = f"a checkpoint of {_gib(written.checkpoint)}"
    needed = (
        f"{one if written.count == 1 else several} and {_gib(written.weights)} at the end: {_gib(written.total)}; "
        f"{_gib(space.free)} are free at {there}"
    )
    remedy = "free space, set output.dir to a larger disk, train.save_total_limit=1, or a larger train.save_steps"
    if written.count is None:
        known = f"every checkpoint of {_gib(written.checkpoint)} is kept, and {_gib(space.free)} are free at {there}"
        verdict = failed if space.free < written.total else warned
        return verdict("disk", known, "set train.save_total_limit=2")
    if space.free < written.total:
        return failed("disk", needed, remedy)
    return passed("disk", needed)


def check_fetch(shape: ModelShape, *, cached: bool, there: Path, space: Space | None) -> Finding:
    """Whether the hub's cache holds the weights that the run would fetch."""
    size = STORED_WIDTH * shape.params
    if cached:
        return skipped("disk for the model", "the weights are here already")
    if space is None:
        return skipped("disk for the model", f"what is free at {there} cannot be read")
    said = f"about {_gib(size)} are fetched from the hub; {_gib(space.free)} are free at {there}"
    if space.free < size:
        return failed("disk for the model", said, "free space, or export HF_HOME=/a/larger/disk")
    return passed("disk for the model", said)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB // 10 else f"{size / 2**20:.0f} MiB"
