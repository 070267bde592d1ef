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
import torch.distributed as dist

from sft_play.errors import RunFolderError, SftPlayError, TrainingError
from sft_play.log import one_line

logger = logging.getLogger(__name__)

_WEIGHTS = (".safetensors", ".safetensors.index.json")
_UNTOUCHED = "nothing was written, and an existing folder is unchanged"
_WHOLE = "no rank had failed when the folder was replaced: it is complete, either the new one or the old"
_MARKS = ("adapter_config.json", "config.json", "model.safetensors")
"""A folder with one of these files is a saved model, which a new save may replace."""


def save_sharded(accelerator: Any, model: Any, folder: str | os.PathLike[str], *, tokenizer: Any = None) -> Path:
    """Save a prepared model once, whole, as safetensors; every rank calls it. Returns the folder's path.

    An adapter can be opened with `PeftModel.from_pretrained`, a transformers model with its `from_pretrained`, any
    other module is one `model.safetensors`; tensors keep their dtype. It is written beside the folder and renamed once
    it has been read back and no rank has failed: until then an existing folder is unchanged. Files in it that are not
    weights (notes, a README) are kept.

    Raises:
        RunFolderError: the folder exists and holds no saved model, or cannot be written.
        TrainingError: a rank failed or ended meanwhile. Nothing is left, and every rank raises.
        ModelError: what was written is not finite, or not what the model holds.
    """
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
                shutil.rmtree(aside, ignore_errors=True)
    if is_first:
        logger.info("Saved: %s", path)
    return path


# --- ranks that fail --------------------------------------------------------------------------------------------------


def _run(accelerator: Any, work: Callable[[], Any], path: Path, *, left: str = _UNTOUCHED) -> Any:
    """Do work in which ranks wait for each other; raises TrainingError, with what is `left` on disk, if one of them is
    gone."""
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
    every = [own]
    if accelerator.num_processes > 1:
        every = [None] * accelerator.num_processes
        _run(accelerator, lambda: dist.all_gather_object(every, own), path, left=left)
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
    """Finish what a killed save left, check whether the folder may be written, and create the folder beside it."""
    _finish(path)
    if path.exists() and not path.is_dir():
        raise RunFolderError(f"{path} is not a folder; name a new folder, or one that holds a saved model")
    if path.is_dir() and any(path.iterdir()) and not any((path / mark).is_file() for mark in _MARKS):
        some = ", ".join(sorted(item.name for item in path.iterdir())[:3])
        raise RunFolderError(
            f"{path} exists and holds no saved model ({one_line(some)}), so it is not replaced; name a folder inside it"
        )
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written: {error.strerror} ({aside})") from None


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def _swap(aside: Path, path: Path) -> None:
    """Put the new folder in place of the old one."""
    if path.is_dir():
        path.rename(_replaced(path))
    try:
        aside.rename(path)
    finally:
        _finish(path)


def _finish(path: Path) -> None:
    """Finish a swap that may have been interrupted at any point: the new folder, with the old one's other files."""
    old = _replaced(path)
    if not old.is_dir():
        return  # nothing was being swapped
    if not path.exists():  # killed between the two renames: the old model comes back
        old.rename(path)
        return
    for item in old.iterdir():
        if not item.name.endswith(_WEIGHTS) and item.name not in _MARKS and not (path / item.name).exists():
            item.rename(path / item.name)
    shutil.rmtree(old, ignore_errors=True)


# --- weights ----------------------------------------------------------------------------------------------------------


def _gathered(accelerator: Any, model: Any, bare: Any, *, keep: bool) -> dict[str, torch.Tensor]:
    """The full tensors to save, by their names in the model, in host memory where `keep`; all ranks call it."""
    if accelerator.distributed_type == "FSDP" and not accelerator.is_fsdp2:
        weights = accelerator.get_state_dict(model)  # FSDP1: flat parameters, complete on rank 0
        return dict(weights) if keep else {}
    wanted = bare.state_dict(keep_vars=True)
    if hasattr(bare, "peft_config"):
        wanted = _adapter_tensors(bare, wanted)
    copies: dict[int, torch.Tensor] = {}  # by identity: tied tensors are gathered once
    for tensor in wanted.values():
        if id(tensor) not in copies:
            whole = _whole(tensor, keep=keep)
            copies[id(tensor)] = whole.detach().to("cpu", copy=True).contiguous() if keep else torch.empty(0)
    return {name: copies[id(tensor)] for name, tensor in wanted.items()} if keep else {}


def _adapter_tensors(bare: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a PEFT model that belong to its adapters."""
    from peft import get_peft_model_state_dict

    kept: set[int] = set()
    for adapter in bare.peft_config:
        saved = get_peft_model_state_dict(
            bare, state_dict=tensors, adapter_name=adapter, save_embedding_layers=_saves_embeddings(bare, adapter)
        )
        kept |= {id(tensor) for tensor in saved.values()}
    return {name: tensor for name, tensor in tensors.items() if id(tensor) in kept}


def _saves_embeddings(bare: Any, adapter: str) -> bool:
    """Whether the embeddings belong to the adapter: they train, or the adapter targets them.

    PEFT would find out on the hub whether the vocabulary was resized.
    """
    targets = getattr(bare.peft_config[adapter], "target_modules", None) or ()
    if not isinstance(targets, str) and {"embed_tokens", "lm_head", "wte"} & {
        str(one).split(".")[-1] for one in targets
    }:
        return True
    ends = [bare.get_input_embeddings(), bare.get_output_embeddings()] if hasattr(bare, "get_input_embeddings") else []
    return any(weight.requires_grad for end in ends if end is not None for weight in end.parameters(recurse=False))


def _whole(tensor: Any, *, keep: bool) -> torch.Tensor:
    """The full tensor of one that this rank may hold a shard of; all ranks call it."""
    if hasattr(tensor, "ds_id"):  # ZeRO-3
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor], modifier_rank=None):
            return tensor.detach().clone() if keep else tensor.detach()[:0]
    if hasattr(tensor, "full_tensor"):  # FSDP2
        return tensor.full_tensor()
    return tensor


def _write(bare: Any, tokenizer: Any, weights: dict[str, torch.Tensor], aside: Path) -> None:
    """Write the folder beside the old one, and read it back."""
    from sft_play.training.checkpoints.model_saving import check_saved_weights, whole_shapes

    try:
        if hasattr(bare, "peft_config"):
            embeddings = any(_saves_embeddings(bare, adapter) for adapter in bare.peft_config)
            bare.save_pretrained(aside, state_dict=weights, save_embedding_layers=embeddings, is_main_process=True)
        elif hasattr(bare, "save_pretrained"):
            bare.save_pretrained(aside, state_dict=weights, is_main_process=True)
        else:
            from safetensors.torch import save_file

            save_file(_once(weights), aside / "model.safetensors", metadata={"format": "pt"})
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)
    except OSError as error:
        raise RunFolderError(f"{aside} cannot be written: {error.strerror or error}") from error
    check_saved_weights(aside, expected=whole_shapes(bare) if hasattr(bare, "save_pretrained") else None)


def _once(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tied tensors only under their first name, as safetensors requires."""
    first_names: dict[int, str] = {}
    for name, tensor in weights.items():
        first_names.setdefault(id(tensor), name)
    return {name: weights[name] for name in first_names.values()}
