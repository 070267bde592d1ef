"""`save_sharded`: one full copy of what was trained, written aside by rank 0 and renamed if every rank has succeeded.

Shards (ZeRO-3, FSDP) are gathered tensor by tensor into rank 0's host memory; for an adapter, only the adapter's.
"""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sft_play.errors import RunFolderError, SftPlayError, TrainingError
from sft_play.files import atomic
from sft_play.log import one_line
from sft_play.training.checkpoints.full_state_dict import adapter_parameters, gather_to_cpu
from sft_play.training.checkpoints.model_saving import check_saved_weights, saved_shapes, write_weights
from sft_play.training.distributed import gather_values

logger = logging.getLogger(__name__)

_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json")
# A folder with one of these files is a saved model, which a new save may replace.
_MODEL_FILES = ("adapter_config.json", "config.json", "model.safetensors")


def save_sharded(accelerator: Any, model: Any, folder: str | os.PathLike[str], *, tokenizer: Any = None) -> Path:
    """Save a prepared model once, whole, as safetensors; every rank calls it. Returns the folder's path.

    An adapter can be opened with `PeftModel.from_pretrained`, a transformers model with its `from_pretrained`, any
    other module is one `model.safetensors`; tensors keep their dtype. It is written beside the folder and renamed once
    it has been read back and no rank has failed: until then an existing folder is unchanged. Files in it that are not
    weights (notes, a README) are kept. Raises RunFolderError: the folder holds no saved model, or cannot be written;
    TrainingError, on every rank: one has failed; ModelError: what was written is not what the model holds."""
    path = Path(folder).expanduser().resolve()
    temporary_path = path.with_name(f".{path.name}.building")
    folder_state = "nothing was written, and an existing folder is unchanged"
    try:
        _run_on_rank_0(accelerator, path, lambda: _prepare_folders(path, temporary_path))
        unwrapped_model = accelerator.unwrap_model(model, keep_torch_compile=False)
        weights = _gather_weights(accelerator, model, unwrapped_model)
        _run_on_rank_0(accelerator, path, lambda: _write_model(unwrapped_model, tokenizer, weights, temporary_path))
        folder_state = "no rank had failed when the folder was replaced: it is complete, either the new one or the old"
        _run_on_rank_0(accelerator, path, lambda: _replace_folder(temporary_path, path))
    except SftPlayError:
        raise
    except Exception as error:
        if accelerator.num_processes == 1:
            raise
        raise TrainingError(
            f"rank {accelerator.process_index}: saving {path} failed ({type(error).__name__}: "
            f"{one_line(str(error), limit=300)}); {folder_state}"
        ) from error
    finally:
        if accelerator.is_main_process:
            atomic.remove(temporary_path)
    if accelerator.is_main_process:
        logger.info("Saved: %s", path)
    return path


def _run_on_rank_0(accelerator: Any, path: Path, work: Callable[[], None]) -> None:
    """Do this on rank 0, and wait for all ranks; every rank raises where it failed."""
    failure: Exception | None = None
    if accelerator.is_main_process:
        try:
            work()
        except Exception as error:
            failure = error
    first_failure, *_ = gather_values(failure and f"{type(failure).__name__}: {one_line(str(failure), limit=300)}")
    if failure is not None:
        raise failure
    if first_failure is not None:
        raise TrainingError(f"{path} was not saved; rank 0: {first_failure}")


# --- folders ----------------------------------------------------------------------------------------------------------
def _prepare_folders(path: Path, temporary_path: Path) -> None:
    atomic.restore_backup(path)
    if path.exists() and not path.is_dir():
        raise RunFolderError(f"{path} is not a folder")
    if path.is_dir() and any(path.iterdir()) and not any((path / name).is_file() for name in _MODEL_FILES):
        examples = ", ".join(sorted(item.name for item in path.iterdir())[:3])
        raise RunFolderError(
            f"{path} exists and holds no saved model ({one_line(examples)}), so it is not replaced; name a folder "
            "inside it"
        )
    try:
        atomic.remove(temporary_path)
        temporary_path.mkdir(parents=True)
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written: {error.strerror} ({temporary_path})") from None


def _replace_folder(temporary_path: Path, path: Path) -> None:
    """Put the new folder in the place of the old one, with the old one's files that are not weights."""
    if path.is_dir():
        old_weights = {item.name for item in path.iterdir() if item.name.endswith(_WEIGHT_SUFFIXES)}
        left_out = old_weights.union(_MODEL_FILES, (item.name for item in temporary_path.iterdir()))
        shutil.copytree(
            path,
            temporary_path,
            symlinks=True,
            ignore=lambda folder, _: left_out if folder == str(path) else (),
            dirs_exist_ok=True,
        )
    atomic.move_into_place(temporary_path, path)


# --- weights ----------------------------------------------------------------------------------------------------------
def _gather_weights(accelerator: Any, model: Any, unwrapped_model: Any) -> dict[str, torch.Tensor]:
    if accelerator.distributed_type == "FSDP" and not accelerator.is_fsdp2:
        weights = accelerator.get_state_dict(model)  # FSDP1: flat parameters, complete on rank 0
        return dict(weights) if accelerator.is_main_process else {}
    tensors: Any
    if hasattr(unwrapped_model, "peft_config"):
        tensors = adapter_parameters(unwrapped_model)
    else:
        tensors = unwrapped_model.state_dict(keep_vars=True).items()
    return gather_to_cpu(tensors, keeps_copies=accelerator.is_main_process)


def _write_model(unwrapped_model: Any, tokenizer: Any, weights: dict[str, torch.Tensor], folder: Path) -> None:
    shapes = None
    try:
        if hasattr(unwrapped_model, "save_pretrained"):
            write_weights(unwrapped_model, folder, state_dict=weights)
            shapes = saved_shapes(unwrapped_model)
        else:
            # tied tensors: under the first name alone
            names_by_tensor = {id(tensor): name for name, tensor in reversed(weights.items())}
            own_weights = {name: weights[name] for name in names_by_tensor.values()}
            save_file(own_weights, folder / "model.safetensors", {"format": "pt"})
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be written: {error.strerror or error}") from error
    check_saved_weights(folder, expected_shapes=shapes)
