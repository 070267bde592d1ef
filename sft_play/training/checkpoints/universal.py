"""DeepSpeed's checkpoints over another number of ranks, by its universal form, which its own converter writes beside.

What ZeRO-3's loader gets wrong is put right here (0.19.8, `load_hp_checkpoint_state_from_checkpoint_dir_stage3`): all
groups of the optimizer get those of the first, and all states one tensor that counts the steps.
"""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
from argparse import Namespace
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from sft_play.runs.files import free_disk_bytes, require_disk_space
from sft_play.training import distributed, engines
from sft_play.training.checkpoints import checkpoints

logger = logging.getLogger(__name__)

_OPTIMIZER_FILES, _MODEL_FILES = "*_optim_states.pt", "*_model_states.pt"
_GROUPS_FILE = "zero/optimizer_state.pt"


@contextlib.contextmanager
def readable_checkpoint(trainer: Any, checkpoint: Path) -> Iterator[Path]:
    """Yield the checkpoint as this number of ranks can read it: itself, or a copy in DeepSpeed's universal form, which
    `finish_loading` removes. All ranks call it. Raises RunFolderError: there is no room for the copy."""
    state_files, folder = sorted(checkpoint.glob(f"global_step*/{_OPTIMIZER_FILES}")), checkpoint.parent
    if not trainer.is_deepspeed_enabled or len(state_files) == distributed.world_size():
        yield checkpoint
        return
    converted = checkpoints.checkpoint_path(checkpoints.staging_path(folder), checkpoints.checkpoint_step(checkpoint))
    trainer.heartbeat.note(checkpoints.checkpoint_step(checkpoint), "converting the checkpoint")
    # every state as pieces and whole, the first rank's again, and the weights: what is frozen is in no part
    state_sizes = [state_file.stat().st_size for state_file in state_files]
    needed_bytes = (
        2 * sum(state_sizes)
        + state_sizes[0]
        + sum(file.stat().st_size for file in checkpoint.glob(f"*/{_MODEL_FILES}"))
    )
    try:
        available_bytes, purpose = (
            distributed.broadcast_value(free_disk_bytes(folder)),
            f"{checkpoint.name} for another number of ranks",
        )
        with (
            require_disk_space(folder, needed_bytes, purpose, available_bytes=available_bytes),
            trainer.watch_writing(folder),
        ):
            if distributed.is_first():
                logger.info("Converting the optimizer states of %d ranks for %d: %s",
                            len(state_files), distributed.world_size(), checkpoint)  # fmt: skip
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
    """After the engine has read a copy: put back its optimizer's groups and its reading, and remove the copy."""
    if not (checkpoint / "latest_universal").is_file():
        return
    optimizer = engines.unwrap_optimizer(trainer.optimizer)
    groups = None
    if distributed.is_first():
        path = next(checkpoint.glob(f"*/{_GROUPS_FILE}"))
        groups = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["param_groups"]
    for group, saved_group in zip(optimizer.param_groups, distributed.broadcast_value(groups), strict=True):
        group.update({name: value for name, value in saved_group.items() if name != "params"})
    for state in optimizer.state.values():
        state["step"] = deepcopy(state["step"])
    _set_universal_loading(trainer, enabled=False)
    trainer.wait_for_disk()
    if distributed.is_first():
        shutil.rmtree(checkpoint.parent, ignore_errors=True)


def _set_universal_loading(trainer: Any, *, enabled: bool) -> None:
    """Let the engine read the universal form or not; an engine still to be made gets it by its config."""
    trainer.accelerator.state.deepspeed_plugin.deepspeed_config["checkpoint"] = {"load_universal": enabled}
    if engines.is_deepspeed(trainer.model_wrapped):
        trainer.model_wrapped._config.load_universal_checkpoint = enabled


def _convert_to_universal(checkpoint: Path, converted: Path, states_folder: Path) -> None:
    from deepspeed.checkpoint.ds_to_universal import main

    converted.mkdir()
    for item in checkpoint.iterdir():
        if item != states_folder:
            (converted / item.name).symlink_to(item.absolute())
    arguments = Namespace(
        input_folder=str(states_folder), output_folder=str(converted / f"{states_folder.name}_universal"),
        num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True,
        inject_missing_state=True,  # what only Megatron's models write
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main(arguments)
