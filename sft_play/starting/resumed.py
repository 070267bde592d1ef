"""How a run was spread over ranks when it was stopped, and what a resumed run has to keep of that."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from sft_play.config.schema import RunConfig
from sft_play.errors import RunFolderError
from sft_play.planner.batching import BatchPlan, divisors
from sft_play.planner.layout import LAYOUT_NAMES, LayoutName, Stopped
from sft_play.planner.precision import ROUNDS_ITSELF, Updates
from sft_play.runs.files import read_json
from sft_play.runs.folder import RunFolder
from sft_play.runs.ran_out import recorded

logger = logging.getLogger(__name__)


def stopped_run(folder: RunFolder) -> Stopped | None:
    """How a run was spread when it was stopped: by its manifest, or by its plan where it failed before a rank wrote it.

    None where neither says.
    """
    manifest, plan = folder.manifest(), read_json(folder.path / "plan.json")
    batch, layout, processes = manifest.get("batch"), manifest.get("layout", "single"), manifest.get("processes", 0)
    if not isinstance(batch, dict):
        batch = {**plan, "ranks": plan.get("data_parallel_ranks")}
        layout, processes = plan.get("layout"), plan.get("ranks")
    numbers = [batch.get(name) for name in ("micro_batch", "grad_accum", "ranks")]
    micro, accum, ranks = (number if isinstance(number, int) else 0 for number in numbers)
    if min(micro, accum, ranks) < 1:
        return None
    processes = processes if isinstance(processes, int) else 0
    # Elsewhere updates follow from the layout: FSDP and DeepSpeed keep copies in float32.
    updates = plan.get("precision", {}).get("updates") if layout in ROUNDS_ITSELF else None
    known: LayoutName = layout if layout in LAYOUT_NAMES else "single"
    too_many = [event.micro_batch for event in recorded(folder) if event.again in ("step", "run")]
    batch_then = BatchPlan(micro, accum, ranks)
    return Stopped(known, batch_then, processes, updates, folder.has_trained, min(too_many, default=None))


@dataclass(frozen=True)
class Kept:
    """What a resumed run keeps from its first start; None leaves it to the config and the plan."""

    batch: BatchPlan | None = None
    updates: Updates | None = None


NOTHING_KEPT = Kept()
"""A new run."""


def kept_of(config: RunConfig, stopped: Stopped | None, ranks: int) -> Kept:
    """What a resumed run keeps over `ranks` data-parallel ranks: its batch, and how updates reach its weights.

    Free GPU memory may have changed; the rows of a step must not, and with the same split no number does. Over another
    number of ranks the effective batch is kept and the accumulation follows, whatever the config says; a micro-batch
    that does not divide a rank's share becomes the largest that does. One that ran out of memory is not tried again. A
    config that was changed meanwhile is reported by the run folder's own check.

    Raises:
        RunFolderError: the effective batch does not split over the ranks.
    """
    if stopped is None or not (stopped.has_trained or stopped.too_many):
        return NOTHING_KEPT
    train = config.train
    given = None if train.batch_size == "auto" else train.batch_size
    if given and stopped.too_many and given >= stopped.too_many:
        given = None
    updates = stopped.updates if train.weight_updates == "auto" else None
    effective, is_open = stopped.batch.effective_batch, "auto" in (train.batch_size, train.grad_accum)
    # Another effective batch is refused by check_same_run, and a split that is given in full needs none from here.
    is_another = not train.effective_follows and train.effective_batch_size != effective
    is_whole = given and not is_open and given * int(train.grad_accum) * ranks == effective
    if is_another or is_whole:
        return Kept(updates=updates)
    share, left = divmod(effective, ranks)
    if left:
        fitting = ", ".join(str(number) for number in divisors(effective) if number <= 2 * ranks)
        raise RunFolderError(
            f"the run cannot be resumed over {ranks} ranks: they do not divide its effective batch of {effective} "
            f"(it was stopped with {stopped.batch.ranks}); numbers that do: {fitting}"
        )
    micro = given or stopped.batch.micro_batch
    if share % micro and train.batch_size == "auto" and not stopped.too_many:
        return Kept(updates=updates)
    micro = max(size for size in divisors(share) if size <= micro)
    return Kept(BatchPlan(micro, share // micro, ranks), updates)


def log_kept(kept: Kept, stopped: Stopped | None) -> None:
    """Log the batch that is kept."""
    if kept.batch is None or stopped is None:
        return
    batch = kept.batch
    if stopped.too_many:
        logger.info("Batch: micro %d x accum %d x %d ranks: the run ran out of memory with micro-batch %d",
                    batch.micro_batch, batch.grad_accum, batch.ranks, stopped.too_many)  # fmt: skip
    elif batch.ranks == stopped.batch.ranks:
        logger.debug("Batch: micro %d x accum %d, as the run was started", batch.micro_batch, batch.grad_accum)
    else:
        logger.info("Batch: micro %d x accum %d x %d ranks (stopped with %d): the effective batch of %d is kept",
                    batch.micro_batch, batch.grad_accum, batch.ranks, stopped.batch.ranks,
                    batch.effective_batch)  # fmt: skip


def refuse_resuming(folder: RunFolder, stopped: Stopped | None, layout: LayoutName) -> None:
    """Raises RunFolderError, before anything loads, where a run's checkpoint cannot be resumed in this layout."""
    because = stopped.cannot_become(layout) if stopped else None
    if because is None or stopped is None:
        return
    from sft_play.training.checkpoints.checkpoints import last_complete

    if last_complete(folder.checkpoints) is None:
        return  # without a checkpoint it starts again from the first step
    raise RunFolderError(
        f"{folder.path} cannot be resumed: {because}; resume with STRATEGY={stopped.layout}, "
        f"or write out what it has learned so far: make consolidate RUN={folder.quoted}"
    )
