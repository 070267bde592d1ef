"""Which backend trains a run, with the reason: transformers, PEFT and bitsandbytes, or Unsloth in
its own processes.

The one seam for tuning backends: only `choose_backend` decides, from the config, the model's shapes
and the machine.
"""

import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from sft_play.config.options import all_options
from sft_play.config.schema import RunConfig
from sft_play.errors import BackendError, ConfigError
from sft_play.log import one_line
from sft_play.machine.hardware import Hardware
from sft_play.machine.software import (
    UnslothInfo,
    find_unsloth_python,
    install_command,
    probe_unsloth,
)
from sft_play.models.shape import ModelShape
from sft_play.planner.precision import Precision, choose_precision

SETUP_HINT = "make setup-unsloth builds .venv-unsloth, and UNSLOTH_VENV= names another"
# What Unsloth's processes run: each holds the whole model (unslothai/unsloth#2425, #3248).
UNSLOTH_LAYOUTS = ("single", "ddp")
# Types whose linear layers keep their weights transposed (transformers' Conv1D).
TRANSPOSED_MODEL_TYPES = ("gpt2", "openai-gpt")
# Prefixes of owners whose options take effect before anything is handed over.
_PARENT_OWNERS = (
    "data.",
    "runs",
    "launch.torchrun",
    "planner.",
    "trace.",
    "training.prepare.tokenizer",
)
# Prefixes of owners that Unsloth's process runs too: the loop, its trainer's arguments
# (`optimizer_options`), and what is measured.
_WORKER_OWNERS = ("training.loop.", "training.measure.", "training.run")
# Other options that are handed over. One that is none of these, and is not at its default, is
# refused, so that no new option is silently ignored.
_SUPPORTED_OPTIONS = frozenset(
    {
        "model.name", "model.revision", "model.trust_remote_code",
        "tuning.mode", "tuning.backend", "tuning.backend_fallback",
        "tuning.lora.r", "tuning.lora.alpha", "tuning.lora.dropout", "tuning.lora.target_modules",
        "tuning.lora.use_rslora",
    }
)  # fmt: skip
# What Unsloth's process does anyway, where it is asked for.
_FOLLOWED_VALUES: dict[str, Any] = {"train.kernels": "none", "train.compile": False}
# Options that matter during training, whoever owns them.
_UNSUPPORTED_OPTIONS = frozenset(
    {
        *(
            "curriculum",
            "data.sources",
            "data.packing",
            "tuning.lora.dtype",
            "model.experts_implementation",
        ),
        *("distributed.profile_communication", "model.add_tokens"),
    }
)


@dataclass(frozen=True)
class Backend:
    """The tuning backend that runs; `fallback_from` is the one that was asked for, where that
    cannot run."""

    name: str
    reason: str
    fallback_from: str | None = None
    # Of Unsloth's environment, and what Unsloth says of itself there.
    python: Path | None = None
    unsloth_info: UnslothInfo | None = None


def choose_backend(
    config: RunConfig,
    hardware: Hardware,
    *,
    layout: str = "single",
    is_rank: bool = False,
    has_stages: bool = False,
    load_shape: Callable[[], ModelShape] | None = None,
) -> Backend:
    """Choose the backend that trains a run on this machine.

    Args:
        is_rank: a launcher started this process as a rank.
        has_stages: the run, or this part of it, is trained in stages.
        load_shape: the model's shapes; without it the model is not checked.

    Raises BackendError where the backend that was asked for cannot run, and no fallback was named.
    """
    if config.tuning.backend == "bnb":
        return Backend("bnb", "bnb: transformers, PEFT and bitsandbytes")
    try:
        if has_stages:
            raise BackendError("it does not support curriculum")
        python, info = require_unsloth(config, hardware, layout=layout, is_rank=is_rank)
        if load_shape is not None:
            shape = load_shape()
            problem = unsloth_model_problem(
                choose_precision(config, hardware, shape),
                is_text_tower=bool(shape.text_only_note),
                is_transposed=shape.model_type in TRANSPOSED_MODEL_TYPES,
            )
            if problem is not None:
                raise BackendError(problem)
    except BackendError as error:
        name = config.tuning.backend_fallback
        if name is None:
            raise BackendError(
                f"tuning.backend=unsloth cannot run here: {error}; use tuning.backend=bnb, or set "
                "tuning.backend_fallback=bnb to fall back to it where Unsloth cannot run"
            ) from error
        return Backend(name, f"{name} instead of unsloth: {error}", fallback_from="unsloth")
    return Backend(
        "unsloth", f"unsloth: {info.versions_text}, in {python}", python=python, unsloth_info=info
    )


def require_unsloth(
    config: RunConfig, hardware: Hardware, *, layout: str, is_rank: bool
) -> tuple[Path, UnslothInfo]:
    """Find Unsloth's environment, and what Unsloth says about it. `is_rank`: a launcher started
    this process as a rank. Raises BackendError where it cannot run this; Unsloth, which takes
    seconds, is asked last."""
    python = find_unsloth_python(os.environ)
    if python is None:
        raise BackendError(
            "it needs an environment of its own (and a CUDA GPU for its kernels), and there is"
            f" none: {SETUP_HINT}"
        )
    unsupported = unsupported_options(config)
    if unsupported:
        raise BackendError(f"it does not support {'; '.join(unsupported)}")
    if layout not in UNSLOTH_LAYOUTS or hardware.nodes > 1:
        requested = f"{hardware.nodes} nodes" if hardware.nodes > 1 else f"STRATEGY={layout}"
        raise BackendError(
            f"each of its processes holds the whole model; {requested} was asked for: STRATEGY=ddp"
        )
    if is_rank:
        raise BackendError(
            "a launcher started this process as a rank: use make train, or make train-distributed"
        )
    info = probe_unsloth(python)
    has_gpu = bool(hardware.gpus)
    if has_gpu != (info.device != "cpu"):
        parent_gpu, worker_gpu = ("a GPU", "none") if has_gpu else ("none", "one")
        raise BackendError(
            f"there is {parent_gpu} here and {worker_gpu} in {python} (Unsloth chose {info.device})"
        )
    return python, info


def unsloth_model_problem(
    precision: Precision, *, is_text_tower: bool, is_transposed: bool
) -> str | None:
    """Why Unsloth cannot train a model in this precision; None where it can. `is_text_tower`: the
    model is a part of an image-text model. `is_transposed`: its linear layers keep their weights
    transposed."""
    if is_text_tower:
        return "the model is an image-text model, of which only the text tower is trained here"
    if is_transposed:
        return "the model's linear layers are transposed (Conv1D), which Unsloth's are not"
    if precision.load != precision.compute:
        return (
            f"it has one dtype, and the run loads {precision.load} and computes in"
            f" {precision.compute}"
        )
    return None


def check_trackers(config: RunConfig) -> None:
    """Raises ConfigError for a tracker whose package is not installed."""
    for name in config.train.report_to:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"train.report_to: {name} is not installed here; {install_command(name)}, or"
                " leave it out"
            )


def check_image_options(config: RunConfig) -> None:
    """Raises ConfigError where settings exclude rows with images, each with what to set instead."""
    train, conflicts = config.train, []
    if config.tuning.backend == "unsloth":
        conflicts.append(
            "tuning.backend=unsloth (bnb: Unsloth trains the text of image-text models only)"
        )
    if config.data.packing != "none":
        conflicts.append(
            f"data.packing={config.data.packing} (none: classes count the positions of a whole row"
            " and its images)"
        )
    if train.kernels == "liger":
        conflicts.append("train.kernels=liger (auto: the class's own code runs)")
    if train.compile is True:
        conflicts.append("train.compile=true (auto: blocks are not compiled)")
    if conflicts:
        raise ConfigError(f"rows with images do not go together with {'; '.join(conflicts)}")


def unsupported_options(config: RunConfig) -> list[str]:
    """Options of the run that Unsloth cannot follow, with their values."""
    unsupported = []
    if config.tuning.mode == "full":
        unsupported.append("tuning.mode=full (it trains adapters here: qlora, lora)")
    if config.task_mode == "cpt_mixed":
        unsupported.append("task_mode=cpt_mixed")
    if type(config.train.gradient_checkpointing) is int:  # isinstance would take true and false too
        unsupported.append(
            f"train.gradient_checkpointing={config.train.gradient_checkpointing} (all layers or"
            " none)"
        )
    for path, option in all_options().items():
        value: Any = config
        for name in path.split("."):
            value = getattr(value, name, None)
        value = to_jsonable_python(value)
        # an option's owner is the module that reads it: where it takes effect
        is_handled = (
            option.owner.startswith((*_PARENT_OWNERS, *_WORKER_OWNERS))
            and path not in _UNSUPPORTED_OPTIONS
        ) or value == _FOLLOWED_VALUES.get(path, option.default)
        if value != option.default and path not in _SUPPORTED_OPTIONS and not is_handled:
            unsupported.append(f"{path}={one_line(json.dumps(value))}")
    return unsupported
