"""`save_sharded`: one full copy of what was trained, written aside by rank 0 and renamed if every rank has succeeded.

Shards (ZeRO-3, FSDP) are gathered tensor by tensor into rank 0's host memory; for an adapter, only the adapter's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
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
_NOTHING_WRITTEN = "nothing was written, and an existing folder is unchanged"
_FOLDER_COMPLETE = "no rank had failed when the folder was replaced: it is complete, either the new one or the old"
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
    is_main = bool(accelerator.is_main_process)
    with _unwind_on_sigterm():
        # Three barriers: ranks agree that the folder may be written, that all is written, that the swap is made.
        _run_on_all_ranks(accelerator, lambda: _prepare_folders(path, temporary_path) if is_main else None, path)
        try:
            unwrapped_model = accelerator.unwrap_model(model, keep_torch_compile=False)
            weights = _run_step(
                accelerator, lambda: _gather_weights(accelerator, model, unwrapped_model, is_main=is_main), path
            )
            _run_on_all_ranks(
                accelerator,
                lambda: _write_model(unwrapped_model, tokenizer, weights, temporary_path) if is_main else None,
                path,
            )
            _run_on_all_ranks(
                accelerator,
                lambda: _replace_folder(temporary_path, path) if is_main else None,
                path,
                folder_state=_FOLDER_COMPLETE,
            )
        finally:
            if is_main:
                atomic.remove(temporary_path)
    if is_main:
        logger.info("Saved: %s", path)
    return path


# --- ranks that fail --------------------------------------------------------------------------------------------------
def _run_step(accelerator: Any, work: Callable[[], Any], path: Path, *, folder_state: str = _NOTHING_WRITTEN) -> Any:
    try:
        return work()
    except SftPlayError:
        raise
    except Exception as error:
        if accelerator.num_processes == 1:
            raise
        raise TrainingError(
            f"rank {accelerator.process_index}: saving {path} failed ({type(error).__name__}: "
            f"{one_line(str(error), limit=300)}); {folder_state}"
        ) from error


def _run_on_all_ranks(
    accelerator: Any, work: Callable[[], Any], path: Path, *, folder_state: str = _NOTHING_WRITTEN
) -> None:
    """Do this rank's work; every rank waits for all and raises if any failed, that rank its own error."""
    failure: Exception | None = None
    error_text: str | None = None
    try:
        work()
    except Exception as error:
        failure, error_text = error, f"{type(error).__name__}: {one_line(str(error), limit=300)}"
    rank_errors = _run_step(accelerator, lambda: gather_values(error_text), path, folder_state=folder_state)
    if failure is not None:
        raise failure
    failed_ranks = [
        f"rank {rank}: {rank_error}" for rank, rank_error in enumerate(rank_errors) if rank_error is not None
    ]
    if failed_ranks:
        raise TrainingError(f"{path} was not saved; {'; '.join(failed_ranks)}")


@contextlib.contextmanager
def _unwind_on_sigterm() -> Iterator[None]:
    """While open, SIGTERM (from a launcher, after another rank ended) unwinds the stack: partial files are removed."""
    # Python sets handlers in the main thread only; a handler that a script has set is its own business.
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def exit_on_signal(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, exit_on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


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
    if path.is_dir():
        old_weights = {item.name for item in path.iterdir() if item.name.endswith(_WEIGHT_SUFFIXES)}
        ignored_names = old_weights.union(_MODEL_FILES, (item.name for item in temporary_path.iterdir()))
        shutil.copytree(path, temporary_path, symlinks=True,
                        ignore=lambda folder, _: ignored_names if folder == str(path) else (),
                        copy_function=_link_or_copy, dirs_exist_ok=True)  # fmt: skip
    atomic.move_into_place(temporary_path, path)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # not on every file system
        shutil.copy2(source, target)


# --- weights ----------------------------------------------------------------------------------------------------------
def _gather_weights(accelerator: Any, model: Any, unwrapped_model: Any, *, is_main: bool) -> dict[str, torch.Tensor]:
    if accelerator.distributed_type == "FSDP" and not accelerator.is_fsdp2:
        weights = accelerator.get_state_dict(model)  # FSDP1: flat parameters, complete on rank 0
        return dict(weights) if is_main else {}
    tensors = (
        adapter_parameters(unwrapped_model)
        if hasattr(unwrapped_model, "peft_config")
        else unwrapped_model.state_dict(keep_vars=True).items()
    )
    return gather_to_cpu(tensors, keeps_copies=is_main)


def _write_model(unwrapped_model: Any, tokenizer: Any, weights: dict[str, torch.Tensor], temporary_path: Path) -> None:
    try:
        if hasattr(unwrapped_model, "save_pretrained"):
            write_weights(unwrapped_model, temporary_path, state_dict=weights)
        else:
            # tied: under the first name alone
            names_by_tensor = {id(tensor): name for name, tensor in reversed(weights.items())}
            save_file(
                {name: weights[name] for name in names_by_tensor.values()},
                temporary_path / "model.safetensors",
                {"format": "pt"},
            )
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary_path)
    except OSError as error:
        raise RunFolderError(f"{temporary_path} cannot be written: {error.strerror or error}") from error
    check_saved_weights(
        temporary_path,
        expected_shapes=saved_shapes(unwrapped_model) if hasattr(unwrapped_model, "save_pretrained") else None,
    )
