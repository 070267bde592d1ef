"""The checkpoint that a run continues from: the last undamaged one, read without running code, for
another number of ranks; and its weights, sharded or not, as one adapter or model (`make
consolidate`).

For that the model is built on the meta device and saved with them, so that tensors get the names of
a finished run's files.
"""

import contextlib
import importlib
import io
import logging
import math
import os
import pickle
import re
import shutil
from argparse import Namespace
from collections.abc import Container, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from sft_play.config.schema import RunConfig
from sft_play.data.masks.image_processor import ImageProcessorSource
from sft_play.errors import ConfigError, ModelError, RunFolderError
from sft_play.log import one_line
from sft_play.planner.precision import Precision
from sft_play.runs.folder import (
    CodeTrust,
    RunFolder,
    free_disk_bytes,
    require_disk_space,
    trust_none,
)
from sft_play.runs.lookup import lock_run
from sft_play.text import GIB, MIB
from sft_play.training import distributed, engines
from sft_play.training.checkpoints import checkpoints, sharded_checkpoints
from sft_play.training.checkpoints.full_state_dict import (
    has_adapter,
    model_names_by_saved_name,
    read_checkpoint_weights,
)
from sft_play.training.checkpoints.model_saving import fetch_base_folder, save_model, saved_shapes
from sft_play.training.prepare.library_messages import quiet_libraries
from sft_play.training.prepare.model_spec import (
    build_meta_model,
    build_model_spec,
    model_location,
    resized_spec,
)
from sft_play.training.prepare.tokenizer import added_token_rows

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
    needed_bytes = (
        2 * sum(state_sizes)
        + state_sizes[0]
        + sum(file.stat().st_size for file in checkpoint.glob("*/*_model_states.pt"))
    )
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


# --- `make consolidate`: its weights as one adapter or model --------------------------------------
def consolidate(
    run: RunFolder,
    *,
    checkpoint: Path | None = None,
    out: Path | None = None,
    is_trusted: CodeTrust = trust_none,
) -> Path:
    """Write the trained weights of a run's checkpoint (the last complete one) as an adapter or
    model into `out`, or `consolidated-STEP` of the run; returns its path. Raises RunFolderError:
    its settings allow what `is_trusted` does not, there is no complete checkpoint, or `out` exists
    or lies in a run that is being written; ModelError: the checkpoint lacks tensors."""
    run.read_manifest()  # raises where the folder is not a run's
    config = run.read_config(is_trusted=is_trusted)
    for stage in [run.stage_folder(stage.name) for stage in config.curriculum]:
        if checkpoints.last_complete_checkpoint(stage.checkpoints_path) is not None:
            run = stage
    if out is not None and run.whole_run.path.resolve() not in (
        out.resolve(),
        *out.resolve().parents,
    ):
        return _write_consolidated(run, config, checkpoint, out)  # the run is only read: no lock
    with lock_run(run.whole_run):
        return _write_consolidated(run, config, checkpoint, out)


def _write_consolidated(
    run: RunFolder, config: RunConfig, checkpoint: Path | None, out: Path | None
) -> Path:
    quiet_libraries()
    transformers_logging.disable_progress_bar()
    source = checkpoint
    if source is not None:
        damage = checkpoints.find_damage(source)
        if damage is not None:
            raise RunFolderError(f"the checkpoint {source} cannot be used: {damage}")
    else:
        source, damaged = checkpoints.last_undamaged(run.checkpoints_path)
        for path, damage in damaged.items():
            logger.warning("%s is skipped: %s", path, damage)
        if source is None:
            raise RunFolderError(
                f"there is no complete checkpoint to consolidate in {run.checkpoints_path}"
            )
    target = out or run.path / f"consolidated-{checkpoints.checkpoint_step(source)}"
    if target.exists():
        raise RunFolderError(f"{target} exists; remove it, or name another place: OUT=FOLDER")
    tokenizer = AutoTokenizer.from_pretrained(
        source, trust_remote_code=config.model.trust_remote_code
    )
    model_spec = build_model_spec(
        config,
        Precision("float32", "float32", ""),
        tokenizer_size=len(tokenizer),
        new_rows=added_token_rows(tokenizer, config),
    )
    options: dict[str, Any] = {"steps": checkpoints.checkpoint_step(source)}
    if model_spec.peft_config is not None:
        model_spec.peft_config.base_model_name_or_path = model_location(config)
    else:
        options["dtype"] = model_spec.dtype
        if model_spec.text_tower is not None:
            options["base_folder"] = fetch_base_folder(
                config.model.name, revision=config.model.revision
            )
            options["images"] = ImageProcessorSource.from_config(config)
    model = build_meta_model(
        resized_spec(model_spec), trust_remote_code=config.model.trust_remote_code
    )
    logger.info("Checkpoint: %s", source)
    if sharded_checkpoints.is_sharded(source):
        options["tensors"] = _iterate_weights(source, model)
    else:  # not below: a fault of what is read is none of OUT
        if (source / "latest").is_file():
            from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

            output = io.StringIO()
            with (
                forbid_pickled_code(source),
                contextlib.redirect_stdout(output),
                contextlib.redirect_stderr(output),
            ):
                weights: dict[str, torch.Tensor] = get_fp32_state_dict_from_zero_checkpoint(
                    str(source)
                )
            # its tensors are views of one flat tensor, which safetensors refuses
            weights = {name: tensor.contiguous().clone() for name, tensor in weights.items()}
        else:
            weights = read_checkpoint_weights(source, model)
        options["state_dict"] = {
            name: weights[name] for name in _require_weights(source, model, weights)
        }
    try:
        size = save_model(model, tokenizer, target, **options)
    except OSError as error:
        raise ConfigError(
            f"OUT={one_line(str(target))} cannot be written: {error.strerror}"
        ) from None
    logger.info("Written to: %s (%.1f MiB of weights)", target, size / MIB)
    return target


def _iterate_weights(source: Path, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    specs = sharded_checkpoints.stored_weight_specs(source)
    names: list[str] = []
    size = 0
    for name in _require_weights(source, model, specs):
        shape, dtype = specs[name]
        names.append(name)
        size += math.prod(shape) * dtype.itemsize
        if size >= GIB:
            yield from sharded_checkpoints.read_sharded_weights(source, names).items()
            names, size = [], 0
    yield from sharded_checkpoints.read_sharded_weights(source, names).items()


def _require_weights(source: Path, model: Any, stored: Container[str]) -> list[str]:
    expected = list(saved_shapes(model))
    if has_adapter(model):
        expected = list(model_names_by_saved_name(model).values())
    missing = sorted(name for name in expected if name not in stored)
    if missing:
        raise ModelError(
            f"the checkpoint {source} lacks {len(missing)} trained tensors, such as {missing[0]}"
        )
    return expected
