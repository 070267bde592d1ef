"""Disk: the checkpoints that a planned run writes, the final weights, and the model if it must be downloaded."""

from __future__ import annotations

import os
from pathlib import Path

from sft_play.config.schema import RunConfig
from sft_play.errors import SftPlayError
from sft_play.facts.host import DiskSpace, nearest_disk_space
from sft_play.facts.models.architecture import find_model_folder
from sft_play.facts.models.model_shape import ModelShape
from sft_play.findings import Finding, fail_finding, pass_finding, skip_finding, warn_finding
from sft_play.launch.request import LaunchOptions
from sft_play.log import one_line
from sft_play.planner.disk import MORE_SPACE_REMEDY, DiskUsage, planned_disk_usage
from sft_play.planner.plan import Plan
from sft_play.runs.lookup import output_dir
from sft_play.units import format_size

# Bytes per parameter of models on the hub.
HUB_BYTES_PER_PARAM = 2


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
