"""The model of a finished run, loaded for use: as it was trained, or merged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from sft_play.config.schema import RunConfig
from sft_play.data.build.splits import Split, Splits, build_splits
from sft_play.data.masks.render import Renderer
from sft_play.data.sources.files import find_data_paths, file_digest
from sft_play.errors import ModelError
from sft_play.finished.run import FinishedRun, base_folder
from sft_play.log import one_line
from sft_play.runs.manifest import first_start_date
from sft_play.training.checkpoints.full_state_dict import ADAPTER_FILE, load_adapter
from sft_play.training.checkpoints.tensor_files import open_tensors
from sft_play.training.model import sdpa
from sft_play.training.model.language_model import fit_tied_embeddings, locate_text_tower, prepare_text_config
from sft_play.training.model.model_loading import (
    NO_ADAPTER_KWARGS,
    TORCH_DTYPES,
    load_model,
    require_all_weights,
    silence_load_report,
)
from sft_play.training.prepare.device_checks import free_memory
from sft_play.training.prepare.model_spec import build_model_spec
from sft_play.training.prepare.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")


def this_device() -> str:
    """The first GPU where there is one, else the CPU."""
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def load_as_trained(run: FinishedRun) -> Any:
    """The run's model as training left it, in eval mode on the first GPU or the CPU: the base in the precision that it
    was trained in (NF4 for QLoRA) with the adapter on it, or the whole trained model; raises ModelError where the base
    is missing or another one, or weights are missing."""
    if not run.is_adapter:
        return load_folder(run.weights, dtype=TORCH_DTYPES[run.plan().precision.load])
    return load_adapter(load_base(run), run.weights)


def load_base(run: FinishedRun) -> Any:
    """The model as it was before the run, in eval mode on the first GPU or the CPU, in the precision of the run; raises
    ModelError where the base is missing or another one."""
    config, precision = run.config, run.plan().precision
    base_folder(run)  # refuses a base that has changed since
    loaded = load_tokenizer(config)
    spec = build_model_spec(config, precision, tokenizer_size=len(loaded.tokenizer), new_rows=loaded.new_rows)
    sdpa.enable_cudnn(enabled=False)  # answers have a new length for every token
    model = load_model(config, precision, spec, device=this_device())
    model.config.use_cache = True  # training switches it off; without it each new token reads the whole prompt again
    return model.eval()


@dataclass(frozen=True)
class Continued:
    """The adapter that a run began from (`model.adapter`): its folder, the digest of its weights, and its name."""

    folder: Path
    sha256: str
    name: str


def continued_by(run: FinishedRun) -> Continued | None:
    """The adapter that the run continued, as its manifest records it; None where it trained a new one."""
    fact = (run.manifest.get("data") or {}).get("adapter")
    if fact is None:
        return None
    name = f"run {fact['run']}'s adapter" if fact.get("run") else f"the adapter {one_line(fact['path'])}"
    return Continued(Path(fact["path"]), str(fact["sha256"]), name)


def load_before(run: FinishedRun) -> Any:
    """The model that training began with: the base, with the adapter that was continued on it, where one was; raises
    ModelError where base or adapter is missing or another one."""
    before = continued_by(run)
    if before is None:
        return load_base(run)
    file = before.folder / ADAPTER_FILE
    if not file.is_file():
        raise ModelError(f"{file} is gone; {run.folder.path} continued its training")
    if file_digest(file) != before.sha256:
        raise ModelError(f"{file} is not the adapter that {run.folder.path} continued, by its digest: put it back")
    return load_adapter(load_base(run), before.folder)


def of_each_model(run: FinishedRun, measure: Callable[[str, Any], T]) -> tuple[T, T]:
    """What `measure(whose, model)` gives of the model before training (the base, with an adapter that was continued)
    and of the trained one; `whose` names the model in lines on how far it is. Raises ModelError where one cannot be
    loaded."""
    continued = continued_by(run)
    if run.is_adapter and continued is None:
        model = load_as_trained(run)
        with model.disable_adapter():
            before = measure("base", model)
    else:
        model = load_before(run)
        before = measure("base" if continued is None else f"model before training ({continued.name})", model)
        del model  # two whole models may be more than fits
        free_memory()
        model = load_as_trained(run)
    after = measure("trained model", model)
    del model
    free_memory()
    return before, after


def load_folder(folder: Path, *, dtype: torch.dtype | None = None) -> Any:
    """A whole model from a folder, in eval mode on the first GPU or the CPU; `dtype` None: as its files are. Raises
    ModelError where it cannot be loaded."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sdpa.enable_cudnn(enabled=False)
    try:
        # a device by name: device_map="auto" would spread a large model over devices, or offload it without a word
        whole = AutoConfig.from_pretrained(str(folder))
        if getattr(whole, "quantization_config", None):  # transformers would fetch kernels for some of them
            raise ModelError(f"{folder} holds quantised weights, and no run of this toolkit saves such")
        config, key_mapping = prepare_text_config(whole), None
        if config is not whole:  # of an image-text model its language model
            fit_tied_embeddings(whole, config, lambda: set(open_tensors(folder)))
            with torch.device("meta"):
                tower = locate_text_tower(whole, AutoModelForCausalLM.from_config(config))
            key_mapping = tower.key_mapping if tower is not None else None
        with silence_load_report():
            model, info = AutoModelForCausalLM.from_pretrained(
                str(folder), config=config, dtype=dtype or "auto", device_map={"": this_device()}, use_safetensors=True,
                output_loading_info=True, key_mapping=key_mapping, **NO_ADAPTER_KWARGS,
            )  # fmt: skip
    except ModelError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"the model in {folder} cannot be loaded: {one_line(str(error), limit=300)}") from error
    require_all_weights(model, info, str(folder))
    return model.eval()


def renderer_of(run: FinishedRun, tokenizer: Any) -> Renderer:
    """What renders conversations as the run's training did, on the day that the run began."""
    day = first_start_date(run.folder)  # a template that writes the date would put another one into every prompt
    return Renderer(tokenizer, run.config.data, max_seq_len=run.plan().max_seq_len, today=day)


def splits_of(run: FinishedRun, config: RunConfig, tokenizer: Any) -> Splits:
    """The rows of `config`, the run's or one with other data, tokenised and divided as training did; raises DataError
    where the data is gone, or no longer has trained tokens."""
    return build_splits(
        config, find_data_paths(config.data), tokenizer, max_seq_len=run.plan().max_seq_len, today=first_start_date(run.folder)
    )


def evenly_spaced(whole: int, count: int) -> list[int]:
    """At most `count` of the indices below `whole`, the first and others at equal distances."""
    number = min(count, whole)
    return [index * whole // number for index in range(number)]


@dataclass(frozen=True)
class HeldOut:
    """Token rows that a run was not trained on, and the split they are from (train, where it has no other)."""

    name: str
    split: Split
    train: Split


def held_out(run: FinishedRun) -> HeldOut:
    """The run's test rows, else its validation rows, else the rows it was trained on; read as training read them.
    Raises DataError where the data is gone, or no longer has trained tokens."""
    splits = splits_of(run, run.config, load_tokenizer(run.config).tokenizer)
    # test before val: validation rows may have chosen the checkpoint (train.load_best_model_at_end)
    for name, split in (("test", splits.test), ("val", splits.val)):
        if split is not None:
            return HeldOut(name, split, splits.train)
    return HeldOut("train", splits.train, splits.train)
