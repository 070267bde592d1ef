"""Disk: the checkpoints that a planned run writes, the final weights, and the model if it must be downloaded."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from sft_play.config.schema import RunConfig
from sft_play.errors import SftPlayError
from sft_play.facts.host import DiskSpace, nearest_disk_space
from sft_play.facts.models.architecture import find_model_folder
from sft_play.facts.models.model_shape import ModelShape
from sft_play.findings import Finding, fail_finding, pass_finding, skip_finding, warn_finding
from sft_play.launch.launch_options import LaunchOptions
from sft_play.log import one_line
from sft_play.planner.memory.measured_walk import create_step_simulation
from sft_play.planner.plan import Plan
from sft_play.runs.lookup import output_dir
from sft_play.units import format_size

# Tokenizer (33 MiB for vocabularies of 256,000), trainer and random states, metrics.
OTHER_BYTES = 64 * 2**20
# Bytes per parameter of models on the hub.
STORED_WIDTH = 2
LARGER = "free space, set output.dir to a larger disk, or train.save_total_limit=1"


@dataclass(frozen=True)
class DiskUse:
    """What a run writes, in bytes: one checkpoint, how many exist at once at most (None: all are kept, and their number
    is not known), and the final weights."""

    checkpoint: int
    weights: int
    count: int | None

    @property
    def total(self) -> int:
        """The most that is on the disk at once."""
        return (self.count or 1) * self.checkpoint + self.weights

    def least(self, existing: int = 0) -> int:
        """Of `total` what weights and states take for certain beside `existing` checkpoints; before the final weights
        are written the oldest one goes."""
        more, checkpoint = max(0, (self.count or 1) - existing), self.checkpoint - OTHER_BYTES
        return max(more * checkpoint, (more - 1) * checkpoint + self.weights - OTHER_BYTES)


def disk_use(config: RunConfig, shape: ModelShape, plan: Plan) -> DiskUse:
    """What the planned run writes: checkpoints of the planned size, and the final save; 0.2 to 5% below the files of a
    small model's runs, by the small ones that are not counted (2026-11-21)."""
    layout = plan.choice.layout
    trained = create_step_simulation(config, shape, plan.precision, plan.choice.step).trained_parameters
    weights = trained.width * trained.params
    checkpoint = plan.memory.checkpoint_bytes
    if layout.is_zero:  # DeepSpeed's files and the trainer's each hold the weights; ZeRO-3's own only as fp32 masters
        checkpoint += (1 if layout.shards_params else 2) * weights
    # A new checkpoint is complete before the oldest is deleted, and the best one is kept beside the limit.
    train = config.train
    at_once = None if train.save_total_limit is None else train.save_total_limit + train.load_best_model_at_end + 1
    every = config.eval.steps if train.load_best_model_at_end else train.save_steps
    if not every and plan.row_tokens is not None:  # after each epoch, of which train.max_steps may be several
        every = math.ceil(plan.row_tokens.rows / plan.batch.effective_batch)
    in_all: int | None = None if train.max_steps else math.ceil(train.epochs)
    if every:
        in_all = None if plan.run_length is None else math.ceil(plan.run_length.steps / every)
    counts = [count for count in (in_all, at_once) if count is not None]
    # the fewer of the two bounds: a short run writes fewer checkpoints than the limit allows
    return DiskUse(checkpoint + OTHER_BYTES, weights + OTHER_BYTES, min(counts) if counts else None)


def disk_findings(config: RunConfig, shape: ModelShape, plan: Plan, options: LaunchOptions) -> list[Finding]:
    """Whether the weights to download and the checkpoints fit on their disks."""
    existing, space = nearest_disk_space(hub_cache())
    fetch = check_fetch(shape, cached=has_weights(config), there=existing, space=space)
    if options.nodes.rank > 0 and not plan.choice.layout.is_zero:
        return [skip_finding("disk", "node 0 writes checkpoints and the final weights"), fetch]
    try:
        folder = output_dir(config.output)
    except SftPlayError as error:
        return [fail_finding("disk", one_line(str(error), limit=300), "set output.dir to a folder"), fetch]
    existing, space = nearest_disk_space(folder)
    use, may_write = disk_use(config, shape, plan), os.access(existing, os.W_OK | os.X_OK)
    return [check_disk(use, folder=folder, there=existing, space=space, may_write=may_write), fetch]


def has_weights(config: RunConfig) -> bool:
    """Whether the model's weights are on this machine already."""
    name = config.model.name
    cached = hub_cache() / f"models--{name.replace('/', '--')}" / "snapshots"
    return find_model_folder(name) is not None or any(cached.glob("*/*.safetensors"))


def hub_cache() -> Path:
    """Where weights from the hub are kept."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def check_disk(use: DiskUse, *, folder: Path, there: Path, space: DiskSpace | None, may_write: bool) -> Finding:
    """Whether the run's folder is writable and has room for the checkpoints that exist at once."""
    if not may_write:
        return fail_finding("disk", f"output.dir {folder}: {there} is not writable for this user",
                      "set output.dir to a folder that you can write, or give this user the folder")  # fmt: skip
    if space is None:
        return skip_finding("disk", f"the free space at {there} cannot be read")
    one, free = f"checkpoint of {format_size(use.checkpoint)}", f"{format_size(space.free)} are free at {there}"
    if use.count is None:
        verdict = fail_finding if space.free < use.total else warn_finding
        return verdict("disk", f"every {one} is kept, and {free}", "set train.save_total_limit=2")
    several = f"{use.count} checkpoints of {format_size(use.checkpoint)} at once (the oldest is deleted after a new one)"
    written = f"a {one}" if use.count == 1 else several
    needed = f"{written} and {format_size(use.weights)} at the end: {format_size(use.total)}; {free}"
    if space.free < use.total:
        return fail_finding("disk", needed, LARGER)
    return pass_finding("disk", needed)


def check_fetch(shape: ModelShape, *, cached: bool, there: Path, space: DiskSpace | None) -> Finding:
    """Whether the hub's cache has room for the weights that the run would download."""
    size = STORED_WIDTH * shape.params
    if cached:
        return skip_finding("disk for the model", "the weights are already here")
    if space is None:
        return skip_finding("disk for the model", f"the free space at {there} cannot be read")
    words = f"about {format_size(size)} will be downloaded from the hub; {format_size(space.free)} are free at {there}"
    if space.free < size:
        return fail_finding("disk for the model", words, "free space, or export HF_HOME=/a/larger/disk")
    return pass_finding("disk for the model", words)
