"""The model of a finished run, loaded for use: as it was trained, or merged."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from sft_play import runs
from sft_play.data.sources.files import data_paths
from sft_play.data.splits import Split, build_splits
from sft_play.errors import ModelError
from sft_play.finished.run import FinishedRun, base_folder
from sft_play.log import one_line
from sft_play.training.model import DTYPES, build_model_spec, load_model
from sft_play.training.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

Measured = TypeVar("Measured")


def this_device() -> str:
    """The first GPU where there is one, else the CPU."""
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def load_as_trained(run: FinishedRun) -> Any:
    """The run's model as training left it, in eval mode on the first GPU or the CPU: the base in the precision that it
    was trained in (NF4 for QLoRA) with the adapter on it, or the whole trained model.

    Raises:
        ModelError: the base is missing or another one, or weights are missing.
    """
    if not run.is_adapter:
        return load_folder(run.weights, dtype=DTYPES[run.plan().precision.load])
    from peft import PeftModel

    return PeftModel.from_pretrained(load_base(run), str(run.weights)).eval()


def load_base(run: FinishedRun) -> Any:
    """The model as it was before the run, in eval mode on the first GPU or the CPU, in the precision of the run.

    Raises:
        ModelError: the base is missing or another one.
    """
    config, precision = run.config, run.plan().precision
    base_folder(run)  # refuses a base that has changed since
    tokenizer = load_tokenizer(config).tokenizer
    spec = build_model_spec(config, precision, tokenizer_size=len(tokenizer))
    model = load_model(config, precision, spec, device=this_device())
    model.config.use_cache = True
    return model.eval()


def of_each_model(run: FinishedRun, measure: Callable[[str, Any], Measured]) -> tuple[Measured, Measured]:
    """What `measure(whose, model)` gives of the base and of the trained model; one of them is in memory at a time.

    `whose`: "base" or "trained model", for lines on how far it is. An adapter is switched off for the base.

    Raises:
        ModelError: a model cannot be loaded.
    """
    if run.is_adapter:
        model = load_as_trained(run)
        with model.disable_adapter():
            before = measure("base", model)
    else:
        model = load_base(run)
        before = measure("base", model)
        del model  # two whole models may be more than fits
        free_memory()
        model = load_as_trained(run)
    after = measure("trained model", model)
    del model
    free_memory()
    return before, after


def free_memory() -> None:
    """Give the memory of a model that was deleted back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def load_folder(folder: Path, *, dtype: torch.dtype | None = None) -> Any:
    """A whole model from a folder, in eval mode on the first GPU or the CPU; `dtype` None: as its files are.

    Raises:
        ModelError: it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype or "auto", device_map={"": this_device()}, use_safetensors=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"the model in {folder} cannot be loaded: {one_line(str(error), limit=300)}") from error
    return model.eval()


@dataclass(frozen=True)
class HeldOut:
    """Token rows that a run was not trained on, and the split they are from (train, where it has no other)."""

    name: str
    split: Split
    train: Split
    """The rows that it was trained on."""


def held_out(run: FinishedRun) -> HeldOut:
    """The run's test rows, else its validation rows, else the rows it was trained on; read as training read them.

    Raises:
        DataError: the data is gone, or has nothing to learn any more.
    """
    config, tokenizer = run.config, load_tokenizer(run.config).tokenizer
    splits = build_splits(
        config,
        data_paths(config.data),
        tokenizer,
        max_seq_len=run.plan().max_seq_len,
        today=runs.first_day(run.folder),
    )
    for name, split in (("test", splits.test), ("val", splits.val)):
        if split is not None:
            return HeldOut(name, split, splits.train)
    return HeldOut("train", splits.train, splits.train)
