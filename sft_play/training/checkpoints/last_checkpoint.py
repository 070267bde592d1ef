"""The checkpoint that a run continues from: the last undamaged one, read without running code, for
another number of ranks.
"""

import contextlib
import importlib
import io
import logging
import os
import pickle
import re
import shutil
from argparse import Namespace
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from sft_play.errors import RunFolderError
from sft_play.runs.folder import free_disk_bytes, require_disk_space
from sft_play.training import distributed, engines
from sft_play.training.checkpoints import checkpoints

logger = logging.getLogger(__name__)


# Pickles in a checkpoint are read without running code, by libraries that would run it too: torch's
# own variable overrules DeepSpeed.

_WEIGHTS_ONLY_VARIABLES = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")


def find_last_checkpoint(folder: Path) -> Path | None:
    """The last sound checkpoint on rank 0, which every rank has to find too, or None; later ones
    are named in a warning, and count no more. All ranks call it. Raises RunFolderError: all are
    damaged, or another node lacks it.
    """
    name_and_damaged: tuple[str | None, dict[Path, str]] = None, {}
    if distributed.is_first():
        # of a save that was killed
        shutil.rmtree(checkpoints.staging_path(folder), ignore_errors=True)
        last, damaged = checkpoints.last_undamaged(folder)
        name_and_damaged = last.name if last else None, damaged
    distributed.barrier(distributed.long_timeout_group())  # as long as reading takes
    name, damaged = distributed.broadcast_value(name_and_damaged)
    if damaged and name is None:
        reasons = [f"{path} is skipped: {damage}" for path, damage in damaged.items()]
        raise RunFolderError(
            f"no checkpoint can be resumed: {'; '.join(reasons)}. Nothing was changed: put back a"
            " copy of one of them, or start a new run (make train)"
        )
    if name is None:
        return None
    checkpoint: Path = folder / name
    damage = None
    if not distributed.is_first():
        damage = checkpoints.find_damage(checkpoint, reads_contents=distributed.is_first_of_node())
    distributed.barrier(distributed.long_timeout_group())
    distributed.require_all(
        damage is None,
        f"the checkpoint {checkpoint} is missing or damaged on this node; every node reads it: copy"
        " the run folder to this node, or write to a disk that all nodes share",
    )
    if distributed.is_first():
        for path, reason in damaged.items():
            logger.warning("%s is skipped: %s", path, reason)
            # retention would keep it, as the newest, in place of a good one
            (path / checkpoints.COMPLETE_FILE).unlink(missing_ok=True)
        if damaged:
            logger.warning(
                "The run falls back to the checkpoint of step %d",
                checkpoints.checkpoint_step(checkpoint),
            )
    return checkpoint


# --- pickles --------------------------------------------------------------------------------------
@contextlib.contextmanager
def forbid_pickled_code(checkpoint: Path) -> Iterator[None]:
    """Within it no pickle runs code, but DeepSpeed's with TRUST=1; raises RunFolderError for one
    that could."""
    is_deepspeed = (checkpoint / "latest").is_file()
    if is_deepspeed and os.environ.get("TRUST", "0") not in ("", "0"):
        logger.warning("TRUST=1: what is stored in %s may run code while it is read", checkpoint)
        yield
        return
    own_variables = {
        name: os.environ.pop(name) for name in _WEIGHTS_ONLY_VARIABLES if name in os.environ
    }
    os.environ[_WEIGHTS_ONLY_VARIABLES[0]] = "1"
    classes, advice = list[Any](), ""
    if is_deepspeed:
        advice = ": if you trust whoever wrote it, TRUST=1 reads it"
        # what its optimizer states hold besides tensors; none of them does anything when it is
        # built
        for module, name in (
            ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
            ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
            ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
            ("deepspeed.utils.tensor_fragment", "fragment_address"),
        ):
            # another version has others, which it names
            with contextlib.suppress(ImportError, AttributeError):
                classes.append(getattr(importlib.import_module(module), name))
    try:
        with torch.serialization.safe_globals(classes):
            yield
    except pickle.UnpicklingError as error:
        refused = re.search(r"GLOBAL ([\w.]+)", str(error))
        description = refused[1] if refused else "an object that is neither a tensor nor plain"
        raise RunFolderError(
            f"the checkpoint {checkpoint} is not read: a file of it holds {description}, which"
            f" could run code{advice}"
        ) from error
    finally:
        del os.environ[_WEIGHTS_ONLY_VARIABLES[0]]
        os.environ.update(own_variables)


# --------------------------------------------------------------------------------------------------
# DeepSpeed's checkpoints over another number of ranks, by its universal form, which its own
# converter writes beside.
#
# What ZeRO-3's loader gets wrong is put right here (0.19.8,
# `load_hp_checkpoint_state_from_checkpoint_dir_stage3`): all groups of the optimizer get those of
# the first, and all states one tensor that counts the steps.


@contextlib.contextmanager
def readable_checkpoint(trainer: Any, checkpoint: Path) -> Iterator[Path]:
    """Yield the checkpoint as this number of ranks can read it: itself, or a copy in DeepSpeed's
    universal form, which `finish_loading` removes. All ranks call it. Raises RunFolderError: there
    is no room for the copy.
    """
    state_files, folder = (
        sorted(checkpoint.glob("global_step*/*_optim_states.pt")),
        checkpoint.parent,
    )
    if not trainer.is_deepspeed_enabled or len(state_files) == distributed.world_size():
        yield checkpoint
        return
    converted = checkpoints.checkpoint_path(
        checkpoints.staging_path(folder), checkpoints.checkpoint_step(checkpoint)
    )
    trainer.heartbeat.note(checkpoints.checkpoint_step(checkpoint), "converting the checkpoint")
    trainer.heartbeat.stop_clock()  # it takes longer than a step, and so does reading the copy
    # every state as pieces and whole, the first rank's again, and the weights: what is frozen is in
    # no part
    state_sizes = [state_file.stat().st_size for state_file in state_files]
    needed_bytes = 2 * sum(state_sizes) + state_sizes[0]
    needed_bytes += sum(file.stat().st_size for file in checkpoint.glob("*/*_model_states.pt"))
    try:
        available_bytes = distributed.broadcast_value(free_disk_bytes(folder))
        with require_disk_space(
            folder,
            needed_bytes,
            f"{checkpoint.name} for another number of ranks",
            available_bytes=available_bytes,
        ):
            if distributed.is_first():
                logger.info(
                    "Converting the optimizer states of %d ranks for %d: %s",
                    len(state_files),
                    distributed.world_size(),
                    checkpoint,
                )
                checkpoints.create_staging(folder)
                _convert_to_universal(checkpoint, converted, state_files[0].parent)
        trainer.wait_for_disk()
        _set_universal_loading(trainer, enabled=True)
        yield converted
    finally:
        _set_universal_loading(trainer, enabled=False)
        if distributed.is_first():
            shutil.rmtree(converted.parent, ignore_errors=True)


def finish_loading(trainer: Any, checkpoint: Path) -> None:
    """After the engine has read a copy: put back its optimizer's groups and its reading, and remove
    the copy."""
    if not (checkpoint / "latest_universal").is_file():
        return
    optimizer = engines.unwrap_optimizer(trainer.optimizer)
    groups = None
    if distributed.is_first():
        groups = torch.load(
            next(checkpoint.glob("*/zero/optimizer_state.pt")),
            map_location="cpu",
            weights_only=True,
            mmap=True,
        )["param_groups"]
    for group, saved_group in zip(
        optimizer.param_groups, distributed.broadcast_value(groups), strict=True
    ):
        group.update({name: value for name, value in saved_group.items() if name != "params"})
    for state in optimizer.state.values():
        state["step"] = deepcopy(state["step"])
    _set_universal_loading(trainer, enabled=False)
    trainer.wait_for_disk()
    if distributed.is_first():
        shutil.rmtree(checkpoint.parent, ignore_errors=True)


# An engine that is still to be made gets it by its config.
def _set_universal_loading(trainer: Any, *, enabled: bool) -> None:
    trainer.accelerator.state.deepspeed_plugin.deepspeed_config["checkpoint"] = {
        "load_universal": enabled
    }
    if engines.is_deepspeed(trainer.model_wrapped):
        trainer.model_wrapped._config.load_universal_checkpoint = enabled


def _convert_to_universal(checkpoint: Path, converted: Path, states_folder: Path) -> None:
    from deepspeed.checkpoint.ds_to_universal import main

    converted.mkdir()
    for item in checkpoint.iterdir():
        if item != states_folder:
            (converted / item.name).symlink_to(item.absolute())
    arguments = Namespace(
        input_folder=str(states_folder),
        output_folder=str(converted / f"{states_folder.name}_universal"),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,  # what only Megatron's models write
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main(arguments)
