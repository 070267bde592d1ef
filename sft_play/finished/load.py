"""The model of a finished run, loaded for use: as it was trained, or merged."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from sft_play.config.schema import RunConfig
from sft_play.data.build.splits import DataSplit, DataSplits, build_splits
from sft_play.data.masks.render import Renderer
from sft_play.data.sources.files import file_digest, find_data_paths
from sft_play.errors import ModelError
from sft_play.finished.run import FinishedRun, base_model_folder
from sft_play.log import one_line
from sft_play.runs.folder import first_start_date
from sft_play.training.checkpoints.full_state_dict import ADAPTER_FILE, load_adapter
from sft_play.training.checkpoints.model_saving import open_tensors
from sft_play.training.model import attention_functions
from sft_play.training.model.language_model import (
    fit_tied_embeddings,
    locate_text_tower,
    prepare_text_config,
)
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

T = TypeVar("T")


def default_device() -> str:
    """The first GPU where there is one, else the CPU."""
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def compute_dtype(run: FinishedRun) -> torch.dtype:
    """The dtype that the run's own evaluations computed in."""
    return TORCH_DTYPES[run.plan().precision.compute]


def load_trained_model(run: FinishedRun) -> Any:
    """Load the run's model as training left it, in eval mode on the first GPU or the CPU: the base
    with the adapter on it, in the precision of the run (NF4 for QLoRA), or the whole trained model.
    Raises ModelError where the base is gone or another one, or weights are missing."""
    if not run.is_adapter:
        return load_model_folder(run.weights, dtype=TORCH_DTYPES[run.plan().precision.load])
    return load_adapter(load_base_model(run), run.weights)


def load_base_model(run: FinishedRun) -> Any:
    """Load the model as it was before the run, in eval mode on the first GPU or the CPU, in the
    precision of the run. Raises ModelError where the base is gone or another one."""
    config, precision = run.config, run.plan().precision
    base_model_folder(run)  # refuses a base that has changed since
    loaded = load_tokenizer(config)
    spec = build_model_spec(
        config, precision, tokenizer_size=len(loaded.tokenizer), new_rows=loaded.new_rows
    )
    attention_functions.enable_cudnn(enabled=False)  # answers have a new length for every token
    model = load_model(config, precision, spec, device=default_device())
    # training switches it off; without it each new token reads the whole prompt again
    model.config.use_cache = True
    return model.eval()


@dataclass(frozen=True)
class ContinuedAdapter:
    """The adapter that a run began from (`model.adapter`): its folder, the digest of its weights,
    and its name."""

    folder: Path
    sha256: str
    name: str


def find_continued_adapter(run: FinishedRun) -> ContinuedAdapter | None:
    """The adapter that the run continued, as its manifest records it; None where it trained a new
    one."""
    record = (run.manifest.get("data") or {}).get("adapter")
    if record is None:
        return None
    name = (
        f"run {record['run']}'s adapter"
        if record.get("run")
        else f"the adapter {one_line(record['path'])}"
    )
    return ContinuedAdapter(Path(record["path"]), str(record["sha256"]), name)


def measure_both_models(run: FinishedRun, measure: Callable[[str, Any], T]) -> tuple[T, T]:
    """Run `measure(model_label, model)` on the model before training (the base, or the adapter that
    was continued) and on the trained one; returns both results. `model_label` names the model in
    log lines. Raises ModelError where a model is gone, or not the one that the run recorded."""
    continued = find_continued_adapter(run)
    if run.is_adapter and continued is None:
        model = load_trained_model(run)
        with model.disable_adapter():
            base_result = measure("base", model)
    else:
        model_label = "base"
        if continued is None:
            model = load_base_model(run)
        else:
            adapter_file = continued.folder / ADAPTER_FILE
            if not adapter_file.is_file() or file_digest(adapter_file) != continued.sha256:
                raise ModelError(
                    f"{adapter_file} is not the adapter that {run.folder.path} continued, or is"
                    " gone: put it back"
                )
            model_label = f"model before training ({continued.name})"
            model = load_adapter(load_base_model(run), continued.folder)
        base_result = measure(model_label, model)
        del model  # two whole models may be more than fits
        free_memory()
        model = load_trained_model(run)
    tuned_result = measure("trained model", model)
    del model
    free_memory()
    return base_result, tuned_result


def load_model_folder(folder: Path, *, dtype: torch.dtype | None = None) -> Any:
    """Load a whole model, in eval mode on the first GPU or the CPU; without `dtype` in the dtype of
    its files. Raises ModelError where it cannot be loaded."""
    from transformers import AutoConfig, AutoModelForCausalLM

    attention_functions.enable_cudnn(enabled=False)
    try:
        # a device by name: device_map="auto" would spread a large model over devices, or offload it
        # without a word
        full_config = AutoConfig.from_pretrained(str(folder))
        # transformers would fetch kernels for some of them
        if getattr(full_config, "quantization_config", None):
            raise ModelError(
                f"{folder} holds quantised weights, and no run of this toolkit saves such"
            )
        config, key_mapping = prepare_text_config(full_config), None
        if config is not full_config:  # of an image-text model its language model
            fit_tied_embeddings(full_config, config, lambda: set(open_tensors(folder)))
            with torch.device("meta"):
                tower = locate_text_tower(full_config, AutoModelForCausalLM.from_config(config))
            key_mapping = tower.key_mapping if tower is not None else None
        with silence_load_report():
            model, loading_info = AutoModelForCausalLM.from_pretrained(
                str(folder),
                config=config,
                dtype=dtype or "auto",
                device_map={"": default_device()},
                use_safetensors=True,
                output_loading_info=True,
                key_mapping=key_mapping,
                **NO_ADAPTER_KWARGS,
            )
    except ModelError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"the model in {folder} cannot be loaded: {one_line(str(error), limit=300)}"
        ) from error
    require_all_weights(model, loading_info, str(folder))
    return model.eval()


def build_run_renderer(run: FinishedRun, tokenizer: Any) -> Renderer:
    """Build the renderer of conversations as the run's training used it, on the day that the run
    began."""
    return Renderer(
        tokenizer,
        run.config.data,
        max_seq_len=run.plan().max_seq_len,
        # a template that writes the date would put another one into every prompt
        today=first_start_date(run.folder),
    )


def build_run_splits(run: FinishedRun, config: RunConfig, tokenizer: Any) -> DataSplits:
    """Tokenise and divide the rows of `config` as training did; it is the run's, or has other data.
    Raises DataError where the data is gone, or no longer has trained tokens."""
    return build_splits(
        config,
        find_data_paths(config.data),
        tokenizer,
        max_seq_len=run.plan().max_seq_len,
        today=first_start_date(run.folder),
    )


def evenly_spaced_indices(total: int, count: int) -> list[int]:
    """Select at most `count` indices below `total`, at equal distances from 0 on."""
    selected = min(count, total)
    return [index * total // selected for index in range(selected)]


@dataclass(frozen=True)
class HeldOutRows:
    """Token rows that a run was not trained on, and the split that has them; `train` where the run
    has no other."""

    name: str
    split: DataSplit
    train: DataSplit


def load_held_out_rows(run: FinishedRun) -> HeldOutRows:
    """Load the run's test rows, else its validation rows, else its training rows, as training read
    them. Raises DataError where the data is gone, or no longer has trained tokens."""
    splits = build_run_splits(run, run.config, load_tokenizer(run.config).tokenizer)
    # test before val: validation rows may have chosen the checkpoint (train.load_best_model_at_end)
    for name, split in (("test", splits.test), ("val", splits.val)):
        if split is not None:
            return HeldOutRows(name, split, splits.train)
    return HeldOutRows("train", splits.train, splits.train)
