"""Disk that a planned run takes: its checkpoints and its final weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sft_play.config.schema import RunConfig
from sft_play.models.shape import ModelShape
from sft_play.planner.memory.step_memory import create_step_simulation
from sft_play.planner.plan import Plan

# Tokenizer (33 MiB for vocabularies of 256,000), trainer and random states, metrics.
OTHER_BYTES = 64 * 2**20
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
        new_checkpoints = max(0, (self.max_checkpoints or 1) - existing_checkpoints)
        checkpoint_bytes = self.checkpoint_bytes - OTHER_BYTES
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
