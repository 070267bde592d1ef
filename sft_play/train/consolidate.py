"""`make consolidate`: the trained weights of a checkpoint, divided over ranks or not, as one adapter or model.

DeepSpeed's parts are put together by its own `zero_to_fp32`; FSDP's sharded ones by torch's. The names that they have
in memory become those of a finished run's files by the way that saving takes: the model is built on the meta device
and saved with these weights.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import shutil
import tempfile
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from sft_play.config.load import config_from_text
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, ModelError, RunFolderError
from sft_play.log import one_line
from sft_play.plan.precision import Precision
from sft_play.runs import RunFolder, lock
from sft_play.train import checkpoints, sharded_checkpoints
from sft_play.train.model import Blueprint, check_saved_weights, draw_blueprint, whole_shapes, write_weights
from sft_play.train.portable import adapter_names, read_weights
from sft_play.train.run import quiet_libraries

logger = logging.getLogger(__name__)

_READ_BYTES = 2**30
"""Weights that are read at once: the table of contents is read anew each time."""
_FSDP_PARTS = "pytorch_model_fsdp_0"


def consolidate(run: RunFolder, *, checkpoint: Path | None = None, out: Path | None = None) -> Path:
    """Write the trained weights of a run's checkpoint (the last complete one) as an adapter or model; returns its path.

    Args:
        out: where to write; `consolidated-STEP` in the run folder where None.

    Raises:
        RunFolderError: there is no complete checkpoint, `out` exists, or lies in a run that is being written.
        ModelError: the checkpoint does not hold what the model needs.
    """
    config = _config_of(run)
    run = _stage_of(run, config)
    if out is not None and run.whole.path.resolve() not in (out.resolve(), *out.resolve().parents):
        return _consolidated(run, config, checkpoint, out)  # which only reads the run
    with lock(run.whole):
        return _consolidated(run, config, checkpoint, out)


def _consolidated(run: RunFolder, config: RunConfig, checkpoint: Path | None, out: Path | None) -> Path:
    quiet_libraries()
    transformers_logging.disable_progress_bar()
    source = checkpoint or checkpoints.last_complete(run.checkpoints)
    if source is None:
        reasons = "; ".join(checkpoints.damage(run.checkpoints)) or f"{run.checkpoints} holds none"
        raise RunFolderError(f"there is no complete checkpoint to consolidate: {reasons}")
    if not checkpoints.is_complete(source):
        raise RunFolderError(f"the checkpoint {source} is not whole: {'; '.join(checkpoints.damage(source.parent))}")
    target = out or run.path / f"consolidated-{checkpoints.step_of(source)}"
    if target.exists():
        raise RunFolderError(f"{target} exists; remove it, or name another place: OUT=FOLDER")
    model, tokenizer, blueprint = _skeleton(config, source)
    is_adapter = blueprint.peft_config is not None
    native = blueprint.is_text_tower and not is_adapter
    weights: dict[str, torch.Tensor] | None = None
    tensors: Iterator[tuple[str, torch.Tensor]] | None = None
    if sharded_checkpoints.is_sharded(source):
        tensors = _one_by_one(source, model)
    else:
        weights = _weights(source, model)
    logger.info("Checkpoint: %s (%s)", source, _kind(source))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    except OSError as error:
        raise ConfigError(f"OUT={one_line(str(target))} cannot be written: {error.strerror}") from None
    try:
        dtype = None if is_adapter else blueprint.dtype
        write_weights(model, building, native_names=native, state_dict=weights, tensors=tensors, dtype=dtype)
        tokenizer.save_pretrained(building)
        size = check_saved_weights(building, expected=whole_shapes(model), must_have_learned=_has_stepped(source))
        building.chmod(0o755)
        building.rename(target)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    logger.info("Written to: %s (%.1f MiB of weights)", target, size / 2**20)
    return target


def _stage_of(run: RunFolder, config: RunConfig) -> RunFolder:
    """Of a run with stages the last one that has a whole checkpoint; else the run itself."""
    stages = [run.of_stage(stage.name) for stage in config.curriculum]
    done = [stage for stage in stages if checkpoints.last_complete(stage.checkpoints) is not None]
    return done[-1] if done else run


def _config_of(run: RunFolder) -> RunConfig:
    """The settings that the run was made with."""
    run.manifest()
    try:
        text = (run.path / "resolved.json").read_text(encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"{run.path}/resolved.json cannot be read: {error.strerror}") from None
    return config_from_text(text, name=str(run.path / "resolved.json"))


def _skeleton(config: RunConfig, source: Path) -> tuple[Any, Any, Blueprint]:
    """The model with its adapter on the meta device, the tokenizer that lies beside the checkpoint, the blueprint."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=config.model.trust_remote_code)
    blueprint = draw_blueprint(config, Precision("float32", "float32", ""), tokenizer_size=len(tokenizer))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(blueprint.hf_config, trust_remote_code=config.model.trust_remote_code)
        if blueprint.resize_to is not None:
            model.resize_token_embeddings(blueprint.resize_to, mean_resizing=False)
        if blueprint.peft_config is not None:
            blueprint.peft_config.base_model_name_or_path = config.model.name
            model = get_peft_model(model, blueprint.peft_config)
    return model, tokenizer, blueprint


def _one_by_one(source: Path, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a checkpoint in parts, some of them read at a time."""
    stored = sharded_checkpoints.stored_weights(source)
    names: list[str] = []
    size = 0
    for name in _require(source, model, stored):
        shape, dtype = stored[name]
        names.append(name)
        size += math.prod(shape) * dtype.itemsize
        if size >= _READ_BYTES:
            yield from sharded_checkpoints.read_weights(source, names).items()
            names, size = [], 0
    yield from sharded_checkpoints.read_weights(source, names).items()


def _require(source: Path, model: Any, found: Container[str]) -> list[str]:
    """The names that saving takes; raises ModelError where the checkpoint lacks one."""
    wanted = list(adapter_names(model).values() if hasattr(model, "peft_config") else whole_shapes(model))
    missing = sorted(name for name in wanted if name not in found)
    if missing:
        raise ModelError(f"the checkpoint {source} lacks {len(missing)} trained tensors, such as {missing[0]}")
    return wanted


def _kind(source: Path) -> str:
    if sharded_checkpoints.is_sharded(source):
        return "parts, one of each rank"
    if (source / "latest").is_file():
        return "DeepSpeed's parts"
    return "FSDP's parts" if (source / _FSDP_PARTS).is_dir() else "whole files"


def _weights(source: Path, model: Any) -> dict[str, torch.Tensor]:
    """The trained weights of a checkpoint that is not in parts, by the names that saving takes."""
    if _kind(source) == "DeepSpeed's parts":
        found = _deepspeed_weights(source)
    else:
        found = _fsdp_weights(source) if (source / _FSDP_PARTS).is_dir() else read_weights(source, model)
    return {name: found[name] for name in _require(source, model, found)}


def _deepspeed_weights(source: Path) -> dict[str, torch.Tensor]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):  # it prints what it does
        found: dict[str, torch.Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(source))
    return {name: tensor.contiguous().clone() for name, tensor in found.items()}


def _fsdp_weights(source: Path) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory() as place:
        whole = Path(place) / "whole.pt"
        dcp_to_torch_save(source / _FSDP_PARTS, whole)
        found: dict[str, torch.Tensor] = torch.load(whole, weights_only=True)["model"]
    return found


def _has_stepped(source: Path) -> bool:
    """Whether more than one optimizer step was taken; the first may have a learning rate of zero."""
    return checkpoints.step_of(source) > 1
