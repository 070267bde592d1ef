"""`make consolidate`: the trained weights of a checkpoint, sharded or not, as one adapter or model.
The model is built on the meta device and saved with them, so that tensors get the names of a
finished run's files."""

import contextlib
import io
import logging
import math
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, ModelError, RunFolderError
from sft_play.log import one_line
from sft_play.planner.precision import Precision
from sft_play.runs.folder import CodeTrust, RunFolder, trust_none
from sft_play.runs.lookup import lock_run
from sft_play.text import GIB, MIB
from sft_play.training.checkpoints import checkpoints, sharded_checkpoints
from sft_play.training.checkpoints.full_state_dict import (
    has_adapter,
    model_names_by_saved_name,
    read_checkpoint_weights,
)
from sft_play.training.checkpoints.last_checkpoint import forbid_pickled_code
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
