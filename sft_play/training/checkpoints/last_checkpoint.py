"""The checkpoint that a run continues from: the last one that is still as it was written. Pickles in it are read
without running code, by libraries that would run it too: torch's own variable overrules DeepSpeed."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sft_play.errors import RunFolderError
from sft_play.training import distributed
from sft_play.training.checkpoints import checkpoints
from sft_play.training.heartbeat import Heartbeat

logger = logging.getLogger(__name__)

# The variable by which the user says that a checkpoint may run code; ranks inherit it.
TRUST_VARIABLE = "TRUST"
_WEIGHTS_ONLY_VARIABLE, _NOT_WEIGHTS_ONLY_VARIABLE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
# What DeepSpeed's optimizer states hold besides tensors; none of them does anything when it is built.
_DEEPSPEED_CLASSES = (
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
)
_REFUSED_NAME = re.compile(r"GLOBAL ([\w.]+)")


def find_last_checkpoint(folder: Path, heartbeat: Heartbeat) -> Path | None:
    """The last sound checkpoint on rank 0, which every rank has to find too, or None; later ones are named in a
    warning, and count no more. All ranks call it. Raises RunFolderError: all are damaged, or another node lacks it."""
    name_and_damaged: tuple[str | None, dict[Path, str]] = None, {}
    if distributed.is_first():
        shutil.rmtree(checkpoints.staging_path(folder), ignore_errors=True)  # of a save that was killed
        last, damaged = checkpoints.last_undamaged(folder, on_bytes=heartbeat.add_moved_bytes)
        name_and_damaged = last.name if last else None, damaged
    with heartbeat.waiting():
        distributed.barrier(distributed.long_timeout_group())  # as long as reading takes
    name, damaged = distributed.broadcast_value(name_and_damaged)
    if damaged and name is None:
        raise RunFolderError(
            f"no checkpoint can be resumed: {'; '.join(map(checkpoints.skipped_line, damaged, damaged.values()))}. "
            f"Nothing "
            "was changed: put back a copy of one of them, or start a new run (make train)"
        )
    if name is None:
        return None
    checkpoint: Path = folder / name
    damage = (
        None
        if distributed.is_first()
        else checkpoints.find_damage(checkpoint, reads_contents=distributed.is_first_of_node())
    )
    with heartbeat.waiting():
        distributed.barrier(distributed.long_timeout_group())
    distributed.require_all(
        damage is None,
        f"the checkpoint {checkpoint} is missing or damaged on this node; every node reads it: copy the run folder to "
        "this node, or write to a disk that all nodes share",
    )
    if distributed.is_first():
        for path, reason in damaged.items():
            logger.warning("%s", checkpoints.skipped_line(path, reason))
            # retention would keep it, as the newest, in place of a good one
            (path / checkpoints.COMPLETE_FILE).unlink(missing_ok=True)
        if damaged:
            logger.warning("The run falls back to the checkpoint of step %d", checkpoints.checkpoint_step(checkpoint))
    return checkpoint


# --- pickles ----------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def forbid_pickled_code(checkpoint: Path) -> Iterator[None]:
    """Within it no pickle runs code, but DeepSpeed's with TRUST=1; raises RunFolderError for one that could."""
    is_deepspeed = (checkpoint / "latest").is_file()
    if is_deepspeed and os.environ.get(TRUST_VARIABLE, "0") not in ("", "0"):
        logger.warning("TRUST=1: what is stored in %s may run code while it is read", checkpoint)
        yield
        return
    previous_values = {
        name: os.environ.pop(name, None) for name in (_WEIGHTS_ONLY_VARIABLE, _NOT_WEIGHTS_ONLY_VARIABLE)
    }
    os.environ[_WEIGHTS_ONLY_VARIABLE] = "1"
    try:
        with torch.serialization.safe_globals(_deepspeed_classes() if is_deepspeed else []):
            yield
    except pickle.UnpicklingError as error:
        match = _REFUSED_NAME.search(str(error))
        description = match[1] if match else "an object that is neither a tensor nor plain"
        advice = ": if you trust whoever wrote it, TRUST=1 reads it" if is_deepspeed else ""
        raise RunFolderError(
            f"the checkpoint {checkpoint} is not read: a file of it holds {description}, which could run code{advice}"
        ) from error
    finally:
        del os.environ[_WEIGHTS_ONLY_VARIABLE]
        os.environ.update({name: value for name, value in previous_values.items() if value is not None})


def _deepspeed_classes() -> list[Any]:
    classes = []
    for module, name in _DEEPSPEED_CLASSES:
        with contextlib.suppress(ImportError, AttributeError):  # another version has others, which it names
            classes.append(getattr(importlib.import_module(module), name))
    return classes
