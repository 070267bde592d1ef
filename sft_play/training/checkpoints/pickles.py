"""Pickles in a run folder are read without running code, also by libraries that would run it.

A folder may come from somebody else. `torch.load(weights_only=True)` builds tensors and plain values only; DeepSpeed
asks for the opposite, which torch's own variable overrules.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sft_play.errors import RunFolderError

logger = logging.getLogger(__name__)

TRUST = "TRUST"
"""The variable by which the user says that a checkpoint may run code; ranks inherit it."""
_FORCE, _FORCE_NOT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_OF_DEEPSPEED = (
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
)
"""What DeepSpeed's optimizer states hold besides tensors; none of them does anything when it is built."""
_NAMED = re.compile(r"GLOBAL ([\w.]+)")


@contextlib.contextmanager
def without_code(checkpoint: Path) -> Iterator[None]:
    """Within it no pickle runs code, whoever reads it with `torch.load`; with TRUST=1, what DeepSpeed wrote may.

    Raises:
        RunFolderError: a file holds something that could run code.
    """
    is_deepspeed = (checkpoint / "latest").is_file()
    if is_deepspeed and os.environ.get(TRUST, "0") not in ("", "0"):
        logger.warning("TRUST=1: what is stored in %s may run code while it is read", checkpoint)
        yield
        return
    kept = {name: os.environ.pop(name, None) for name in (_FORCE, _FORCE_NOT)}
    os.environ[_FORCE] = "1"
    try:
        with torch.serialization.safe_globals(_own_classes() if is_deepspeed else []):
            yield
    except pickle.UnpicklingError as error:
        named = _NAMED.search(str(error))
        what = named[1] if named else "an object that is neither a tensor nor plain"
        advice = ": if you trust whoever wrote it, TRUST=1 reads it" if is_deepspeed else ""
        raise RunFolderError(
            f"the checkpoint {checkpoint} is not read: a file of it holds {what}, which could run code{advice}"
        ) from error
    finally:
        del os.environ[_FORCE]
        os.environ.update({name: value for name, value in kept.items() if value is not None})


def _own_classes() -> list[Any]:
    classes = []
    for module, name in _OF_DEEPSPEED:
        with contextlib.suppress(ImportError, AttributeError):  # another version has others, which it names
            classes.append(getattr(importlib.import_module(module), name))
    return classes
