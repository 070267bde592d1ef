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
from sft_play.training.ranks.distributed import gather_values

logger = logging.getLogger(__name__)

_WEIGHTS = (".safetensors", ".safetensors.index.json")
_UNTOUCHED = "nothing was written, and an existing folder is unchanged"
_WHOLE = "no rank had failed when the folder was replaced: it is complete, either the new one or the old"
# A folder with one of these files is a saved model, which a new save may replace.
_MARKS = ("adapter_config.json", "config.json", "model.safetensors")


def save_sharded(accelerator: Any, model: Any, folder: str | os.PathLike[str], *, tokenizer: Any = None) -> Path:
    """Save a prepared model once, whole, as safetensors; every rank calls it. Returns the folder's path.

    An adapter can be opened with `PeftModel.from_pretrained`, a transformers model with its `from_pretrained`, any
    other module is one `model.safetensors`; tensors keep their dtype. It is written beside the folder and renamed once
    it has been read back and no rank has failed: until then an existing folder is unchanged. Files in it that are not
    weights (notes, a README) are kept. Raises RunFolderError: the folder holds no saved model, or cannot be written;
    TrainingError, on every rank: one has failed; ModelError: what was written is not what the model holds."""
    path = Path(folder).expanduser().resolve()
    aside = path.with_name(f".{path.name}.building")
    is_first = bool(accelerator.is_main_process)
    with _told_to_stop():
        # Three barriers: ranks agree that the folder may be written, that all is written, that the swap is made.
        _together(accelerator, lambda: _begin(path, aside) if is_first else None, path)
        try:
            bare = accelerator.unwrap_model(model, keep_torch_compile=False)
            weights = _run(accelerator, lambda: _gathered(accelerator, model, bare, keep=is_first), path)
            _together(accelerator, lambda: _write(bare, tokenizer, weights, aside) if is_first else None, path)
            _together(accelerator, lambda: _swap(aside, path) if is_first else None, path, left=_WHOLE)
        finally:
            if is_first:
                atomic.remove(aside)
    if is_first:
        logger.info("Saved: %s", path)
    return path


# --- ranks that fail --------------------------------------------------------------------------------------------------
def _run(accelerator: Any, work: Callable[[], Any], path: Path, *, left: str = _UNTOUCHED) -> Any:
    try:
        return work()
    except SftPlayError:
        raise
    except Exception as error:
        if accelerator.num_processes == 1:
            raise
        raise TrainingError(
            f"rank {accelerator.process_index}: saving {path} failed ({type(error).__name__}: "
            f"{one_line(str(error), limit=300)}); {left}"
        ) from error


def _together(accelerator: Any, work: Callable[[], Any], path: Path, *, left: str = _UNTOUCHED) -> None:
    """Do this rank's work; every rank waits for all and raises if any failed, that rank its own error."""
    failure: Exception | None = None
    own: str | None = None
    try:
        work()
    except Exception as error:
        failure, own = error, f"{type(error).__name__}: {one_line(str(error), limit=300)}"
    every = _run(accelerator, lambda: gather_values(own), path, left=left)
    if failure is not None:
        raise failure
    wrong = [f"rank {rank}: {text}" for rank, text in enumerate(every) if text is not None]
    if wrong:
        raise TrainingError(f"{path} was not saved; {'; '.join(wrong)}")


@contextlib.contextmanager
def _told_to_stop() -> Iterator[None]:
    """While open, SIGTERM (from a launcher, after another rank ended) unwinds the stack: partial files are removed."""
    # Python sets handlers in the main thread only; a handler that a script has set is its own business.
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


# --- folders ----------------------------------------------------------------------------------------------------------
def _begin(path: Path, aside: Path) -> None:
    atomic.restore_backup(path)
    if path.exists() and not path.is_dir():
        raise RunFolderError(f"{path} is not a folder")
    if path.is_dir() and any(path.iterdir()) and not any((path / mark).is_file() for mark in _MARKS):
        some = ", ".join(sorted(item.name for item in path.iterdir())[:3])
        raise RunFolderError(
            f"{path} exists and holds no saved model ({one_line(some)}), so it is not replaced; name a folder inside it"
        )
    try:
        atomic.remove(aside)
        aside.mkdir(parents=True)
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written: {error.strerror} ({aside})") from None


def _swap(aside: Path, path: Path) -> None:
    if path.is_dir():
        own = {item.name for item in path.iterdir() if item.name.endswith(_WEIGHTS)}
        left = own.union(_MARKS, (item.name for item in aside.iterdir()))
        shutil.copytree(path, aside, symlinks=True, ignore=lambda folder, _: left if folder == str(path) else (),
                        copy_function=_link, dirs_exist_ok=True)  # fmt: skip
    atomic.move_into_place(aside, path)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # not on every file system
        shutil.copy2(source, target)


# --- weights ----------------------------------------------------------------------------------------------------------
def _gathered(accelerator: Any, model: Any, bare: Any, *, keep: bool) -> dict[str, torch.Tensor]:
    if accelerator.distributed_type == "FSDP" and not accelerator.is_fsdp2:
        weights = accelerator.get_state_dict(model)  # FSDP1: flat parameters, complete on rank 0
        return dict(weights) if keep else {}
    tensors = adapter_parameters(bare) if hasattr(bare, "peft_config") else bare.state_dict(keep_vars=True).items()
    return gather_to_cpu(tensors, keeps_copies=keep)


def _write(bare: Any, tokenizer: Any, weights: dict[str, torch.Tensor], aside: Path) -> None:
    try:
        if hasattr(bare, "save_pretrained"):
            write_weights(bare, aside, state_dict=weights)
        else:
            own = {id(tensor): name for name, tensor in reversed(weights.items())}  # tied: under the first name alone
            save_file({name: weights[name] for name in own.values()}, aside / "model.safetensors", {"format": "pt"})
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)
    except OSError as error:
        raise RunFolderError(f"{aside} cannot be written: {error.strerror or error}") from error
    check_saved_weights(aside, expected=saved_shapes(bare) if hasattr(bare, "save_pretrained") else None)
