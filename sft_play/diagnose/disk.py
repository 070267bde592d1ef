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
HUB_BYTES_PER_PARAM = 2
MORE_SPACE_REMEDY = "free space, set output.dir to a larger disk, or train.save_total_limit=1"


@dataclass(frozen=True)
class DiskUsage:
    """What a run writes: one checkpoint, the final weights, and how many checkpoints exist at once at most (None: all
    are kept, and their number is not known)."""

    checkpoint_bytes: int
    weights_bytes: int
    max_checkpoints: int | None

    @property
    def total_bytes(self) -> int:
        """The most bytes that are on the disk at once."""
        return (self.max_checkpoints or 1) * self.checkpoint_bytes + self.weights_bytes

    def min_bytes(self, existing_checkpoints: int = 0) -> int:
        """Of `total_bytes` what weights and states take for certain beside `existing_checkpoints`; before the final
        weights are written the oldest one goes."""
        new_checkpoints, checkpoint_bytes = (
            max(0, (self.max_checkpoints or 1) - existing_checkpoints),
            self.checkpoint_bytes - OTHER_BYTES,
        )
        return max(
            new_checkpoints * checkpoint_bytes,
            (new_checkpoints - 1) * checkpoint_bytes + self.weights_bytes - OTHER_BYTES,
        )


def planned_disk_usage(config: RunConfig, shape: ModelShape, plan: Plan) -> DiskUsage:
    """What the planned run writes: checkpoints of the planned size, and the final save; 0.2 to 5% below the files of a
    small model's runs, by the small ones that are not counted (2026-11-21)."""
    layout = plan.choice.layout
    trained = create_step_simulation(config, shape, plan.precision, plan.choice.step).trained_parameters
    weights_bytes = trained.itemsize * trained.params
    checkpoint_bytes = plan.memory.checkpoint_bytes
    if layout.is_zero:  # DeepSpeed's files and the trainer's each hold the weights; ZeRO-3's own only as fp32 masters
        checkpoint_bytes += (1 if layout.shards_params else 2) * weights_bytes
    # A new checkpoint is complete before the oldest is deleted, and the best one is kept beside the limit.
    train = config.train
    kept_at_once = None if train.save_total_limit is None else train.save_total_limit + train.load_best_model_at_end + 1
    save_interval = config.eval.steps if train.load_best_model_at_end else train.save_steps
    if not save_interval and plan.row_tokens is not None:  # after each epoch, of which train.max_steps may be several
        save_interval = math.ceil(plan.row_tokens.rows / plan.batch.effective_batch)
    total_saves: int | None = None if train.max_steps else math.ceil(train.epochs)
    if save_interval:
        total_saves = None if plan.run_length is None else math.ceil(plan.run_length.steps / save_interval)
    checkpoint_counts = [count for count in (total_saves, kept_at_once) if count is not None]
    # the fewer of the two bounds: a short run writes fewer checkpoints than the limit allows
    return DiskUsage(
        checkpoint_bytes + OTHER_BYTES,
        weights_bytes + OTHER_BYTES,
        min(checkpoint_counts) if checkpoint_counts else None,
    )


def disk_findings(config: RunConfig, shape: ModelShape, plan: Plan, options: LaunchOptions) -> list[Finding]:
    """Whether the weights to download and the checkpoints fit on their disks."""
    disk_folder, space = nearest_disk_space(hub_cache_folder())
    download = check_download(shape, is_cached=has_local_weights(config), disk_folder=disk_folder, space=space)
    if options.nodes.rank > 0 and not plan.choice.layout.is_zero:
        return [skip_finding("disk", "node 0 writes checkpoints and the final weights"), download]
    try:
        folder = output_dir(config.output)
    except SftPlayError as error:
        return [fail_finding("disk", one_line(str(error), limit=300), "set output.dir to a folder"), download]
    disk_folder, space = nearest_disk_space(folder)
    disk_usage, is_writable = planned_disk_usage(config, shape, plan), os.access(disk_folder, os.W_OK | os.X_OK)
    return [
        check_disk(disk_usage, folder=folder, disk_folder=disk_folder, space=space, is_writable=is_writable),
        download,
    ]


def has_local_weights(config: RunConfig) -> bool:
    """True if the model's weights are on this machine already."""
    name = config.model.name
    snapshots = hub_cache_folder() / f"models--{name.replace('/', '--')}" / "snapshots"
    return find_model_folder(name) is not None or any(snapshots.glob("*/*.safetensors"))


def hub_cache_folder() -> Path:
    """Where weights from the hub are kept."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def check_disk(
    disk_usage: DiskUsage, *, folder: Path, disk_folder: Path, space: DiskSpace | None, is_writable: bool
) -> Finding:
    """Whether the run's folder is writable and has room for the checkpoints that exist at once."""
    if not is_writable:
        return fail_finding("disk", f"output.dir {folder}: {disk_folder} is not writable for this user",
                      "set output.dir to a folder that you can write, or give this user the folder")  # fmt: skip
    if space is None:
        return skip_finding("disk", f"the free space at {disk_folder} cannot be read")
    checkpoint_text, free_text = (
        f"checkpoint of {format_size(disk_usage.checkpoint_bytes)}",
        f"{format_size(space.free)} are free at {disk_folder}",
    )
    if disk_usage.max_checkpoints is None:
        verdict = fail_finding if space.free < disk_usage.total_bytes else warn_finding
        return verdict("disk", f"every {checkpoint_text} is kept, and {free_text}", "set train.save_total_limit=2")
    checkpoint_size = format_size(disk_usage.checkpoint_bytes)
    several_text = (
        f"{disk_usage.max_checkpoints} checkpoints of {checkpoint_size} at once (the oldest is deleted after a new one)"
    )
    written_text = f"a {checkpoint_text}" if disk_usage.max_checkpoints == 1 else several_text
    sizes = f"{format_size(disk_usage.weights_bytes)} at the end: {format_size(disk_usage.total_bytes)}"
    needed = f"{written_text} and {sizes}; {free_text}"
    if space.free < disk_usage.total_bytes:
        return fail_finding("disk", needed, MORE_SPACE_REMEDY)
    return pass_finding("disk", needed)


def check_download(shape: ModelShape, *, is_cached: bool, disk_folder: Path, space: DiskSpace | None) -> Finding:
    """Whether the hub's cache has room for the weights that the run would download."""
    download_bytes = HUB_BYTES_PER_PARAM * shape.params
    if is_cached:
        return skip_finding("disk for the model", "the weights are already here")
    if space is None:
        return skip_finding("disk for the model", f"the free space at {disk_folder} cannot be read")
    message = (
        f"about {format_size(download_bytes)} will be downloaded from the hub; {format_size(space.free)} are free at "
        f"{disk_folder}"
    )
    if space.free < download_bytes:
        return fail_finding("disk for the model", message, "free space, or export HF_HOME=/a/larger/disk")
    return pass_finding("disk for the model", message)
