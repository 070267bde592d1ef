"""The settings of `get_accelerator`: seven keys of a YAML file or a mapping, strict, with all problems at once.

A DeepSpeed file is read and checked here too, so that contradictions between the two are in the same message.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from sft_play.config.leaves import expects
from sft_play.config.schema import Name, Section
from sft_play.config.validation import hint_at
from sft_play.config.yaml_io import Problem, YamlDocument, parse, read_text, show
from sft_play.errors import ConfigError
from sft_play.launch.deepspeed.files import read_deepspeed_file, shipped_config, translate
from sft_play.log import one_line
from sft_play.spelling import did_you_mean

DEFAULT_CONFIG = "configs/train/common.yaml"
PROJECT = Path(__file__).resolve().parents[2]
"""The checkout, where `configs/` is; for an installed package, a folder that has none."""

Precision = Literal["no", "fp16", "bf16"]


class DistConfig(Section):
    """The keys of `configs/train/common.yaml`."""

    backend: Literal["accelerate", "deepspeed"] = "accelerate"
    """What runs the training over ranks: accelerate's DDP (or FSDP under `accelerate launch`), or DeepSpeed."""

    mixed_precision: Literal["auto", "no", "fp16", "bf16"] = "auto"
    """Autocast's dtype; auto takes bf16 where the GPU has it, fp16 on older GPUs, no on a CPU."""

    gradient_accumulation_steps: int = Field(1, ge=1)
    """Micro-batches per optimizer step."""

    gradient_checkpointing: bool = False
    """Whether `wrap_model_optimizer` turns on gradient checkpointing."""

    deepspeed_config: Name | None = None
    """DeepSpeed's file in JSON or YAML; null takes ZeRO-2, or ZeRO-3 with offload."""

    zero3_offload: bool = False
    """DeepSpeed ZeRO-3 with weights and optimizer states in RAM."""

    find_unused_parameters: bool = False
    """DDP's search for parameters that got no gradient."""


_OF_A_RUN = {"model", "train", "data", "tuning", "output", "task_mode"}


@dataclass(frozen=True)
class CheckedSettings:
    """Consistent settings, and DeepSpeed's configuration in current keys where DeepSpeed runs. `mixed_precision` is
    resolved. `fallback` says why accelerate runs though DeepSpeed was asked for; `notes` say what was translated or is
    not used."""

    settings: DistConfig
    name: str
    mixed_precision: Precision
    deepspeed: dict[str, Any] | None = None
    fallback: str | None = None
    notes: tuple[str, ...] = ()


@dataclass
class _Reading:
    """A configuration while it is read: its source, the valid values, and the problems."""

    document: YamlDocument
    folder: Path | None
    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, key: str, message: str) -> None:
        self.problems.append(str(Problem(one_line(key), self.document.where((key,)), message)))

    def get(self, key: str) -> Any:
        return self.values.get(key)


def asked(
    config: str | os.PathLike[str] | Mapping[str, Any] | DistConfig, *, best: Precision, has_deepspeed: bool
) -> CheckedSettings:
    """The settings of a file or a mapping, checked together with the DeepSpeed file that they name. `best`: the dtype
    that suits this machine's device; "no" is a CPU.

    Raises:
        ConfigError: the file is missing or not a YAML mapping; or keys are unknown, values wrong, or values contradict
            each other, the device or the DeepSpeed file: all of them in one message.
    """
    reading = _read(config)
    _check_keys(reading)
    if reading.get("backend") == "accelerate" and reading.get("zero3_offload"):
        reading.add("zero3_offload", "true is for DeepSpeed, but backend is accelerate; set backend: deepspeed")
    deepspeed, fallback = None, None
    if reading.get("backend") == "deepspeed":
        deepspeed, fallback = _deepspeed(reading, has_deepspeed=has_deepspeed)
    precision = _precision(reading, deepspeed, best)
    if reading.problems:
        lines = list(dict.fromkeys(reading.problems))
        raise ConfigError(lines[0] if len(lines) == 1 else f"{len(lines)} problems:\n  " + "\n  ".join(lines))
    settings = DistConfig(**reading.values)
    return CheckedSettings(settings, reading.document.name, precision, deepspeed, fallback, tuple(reading.notes))


# --- where it comes from ----------------------------------------------------------------------------------------------


def _read(config: Any) -> _Reading:
    if isinstance(config, DistConfig):
        config = config.model_dump()
    if isinstance(config, Mapping):
        plain = ((key, os.fspath(one) if isinstance(one, os.PathLike) else one) for key, one in config.items())
        return _Reading(YamlDocument(name="config", data={str(key): value for key, value in plain}), None)
    if not isinstance(config, (str, os.PathLike)):
        raise ConfigError(f"config is {type(config).__name__}; give the path of a YAML file, or a mapping of its keys")
    path = next(filter(Path.exists, _places(Path(config))), None)
    if path is None and os.fspath(config) == DEFAULT_CONFIG:
        reading = _Reading(YamlDocument(name="the defaults"), None)
        reading.notes.append(f"{DEFAULT_CONFIG} is neither in {Path.cwd()} nor in {PROJECT}: the defaults are used")
        return reading
    path = path or Path(config).expanduser()
    name = one_line(str(path))
    document = parse(read_text(path), name=name)
    reading = _Reading(document, path.absolute().parent, problems=[str(problem) for problem in document.problems])
    if len(_OF_A_RUN & set(document.data)) > 1:  # one alone may be a misspelt key
        raise ConfigError(f"{name} is a run YAML, for make train CONFIG=; get_accelerator takes {_keys()}")
    return reading


def _places(path: Path, *folders: Path) -> list[Path]:
    """Where a file may be: as given, then below the folders, then in the project."""
    path = path.expanduser()
    if path.is_absolute():
        return [path]
    return [path, *(folder / path for folder in (*folders, PROJECT))]


def _keys() -> str:
    return ", ".join(DistConfig.model_fields)


def _check_keys(reading: _Reading) -> None:
    data = reading.document.data
    for key in data:
        if key not in DistConfig.model_fields:
            hint = did_you_mean(key, DistConfig.model_fields) or f"the keys are {_keys()}"
            reading.add(key, f"unknown key (value {_shown(data[key])}); {hint}")
    for key, option in DistConfig.model_fields.items():
        if key not in data:
            reading.values[key] = option.default
            continue
        try:  # one key at a time, so that the others are known where one is wrong
            reading.values[key] = getattr(DistConfig.model_validate({key: data[key]}), key)
        except ValidationError:
            wanted = expects(option.annotation, tuple(option.metadata))
            raw = reading.document.raw.get((key,)) if not isinstance(data[key], str) else None
            reading.add(key, f"expected {wanted}, found {_shown(data[key], raw)}{hint_at(data[key], raw, wanted)}")


def _shown(value: Any, raw: str | None = None) -> str:
    try:
        return show(value, raw=raw)
    except (TypeError, ValueError):  # an object of a script's own class
        return one_line(repr(value), limit=80)


def _precision(reading: _Reading, deepspeed: Mapping[str, Any] | None, best: Precision) -> Precision:
    """The compute dtype: auto follows the DeepSpeed file where that fixes it, else the device."""
    wish, allowed = reading.get("mixed_precision"), _allowed(deepspeed or {})
    # A file that enables neither bf16 nor fp16 allows "no"; one that enables both allows nothing, which is reported.
    chosen: Precision = best if best in allowed else "no" if "no" in allowed else next(iter(allowed), "no")
    if wish not in (None, "auto"):
        chosen = wish
    if chosen == "fp16" and best == "no":
        reading.add("mixed_precision", "fp16 needs a GPU, but there is none; set bf16 or no")
    return chosen


# --- DeepSpeed's file -------------------------------------------------------------------------------------------------


def _deepspeed(reading: _Reading, *, has_deepspeed: bool) -> tuple[dict[str, Any] | None, str | None]:
    if not has_deepspeed:
        return None, "the package deepspeed is not installed"
    given, offload = reading.get("deepspeed_config"), bool(reading.get("zero3_offload"))
    if given is None:
        return _filled(shipped_config("zero3_offload" if offload else "zero2"), reading, "DeepSpeed"), None
    places = _places(Path(given), *([reading.folder] if reading.folder is not None else []))
    path = next(filter(Path.exists, places), None)
    if path is None:
        tried = ", ".join(dict.fromkeys(one_line(str(place.absolute())) for place in places))
        return None, f"deepspeed_config: {one_line(given)} does not exist (looked for {tried})"
    name = one_line(str(path))
    try:
        config, notes = translate(read_deepspeed_file(path), name=name)
    except ConfigError as error:
        reading.problems += str(error).replace("DEEPSPEED_CONFIG=", "deepspeed_config: ").splitlines()
        return None, None
    reading.notes += [f"{name}: {note}" for note in notes]
    return _filled(config, reading, name), None


def _filled(config: dict[str, Any], reading: _Reading, name: str) -> dict[str, Any]:
    reading.problems += [f"{name}: {text}" for text in _contradictions(config, reading)]
    zero = config.get("zero_optimization") or {}
    config["zero_optimization"] = zero
    if zero.get("stage", "auto") in ("auto", None):
        zero["stage"] = 3 if reading.get("zero3_offload") else 2
    if reading.get("zero3_offload"):  # what the file offloads already, such as to NVMe, stays there
        for key in ("offload_optimizer", "offload_param"):
            section = zero.get(key)
            if not isinstance(section, dict) or section.get("device", "none") in ("none", "auto", None):
                zero[key] = {"device": "cpu", "pin_memory": True}
    if config.get("gradient_accumulation_steps", "auto") in ("auto", None):
        config["gradient_accumulation_steps"] = reading.get("gradient_accumulation_steps")
    if config.get("gradient_clipping", "auto") in ("auto", None):
        config["gradient_clipping"] = 1.0
        reading.notes.append(f"{name}: gradient_clipping → 1.0; DeepSpeed clips, and clip_grad_norm_ does not")
    return config


def _contradictions(config: Mapping[str, Any], reading: _Reading) -> Iterator[str]:
    here = reading.document.name
    steps, theirs = reading.get("gradient_accumulation_steps"), config.get("gradient_accumulation_steps", "auto")
    if steps is not None and theirs not in ("auto", None, steps):
        yield f"gradient_accumulation_steps: {theirs} contradicts gradient_accumulation_steps: {steps} of {here}"
    wish, allowed = reading.get("mixed_precision"), _allowed(config)
    if not allowed:
        yield "bf16.enabled and fp16.enabled are both true; keep one of them"
    elif wish not in (None, "auto", *allowed):
        listed = ", ".join(f"{key}.enabled: {str(value).lower()}" for key, value in _enabled(config).items())
        yield f"{listed} contradicts mixed_precision: {wish} of {here}; set mixed_precision: {' or '.join(allowed)}"
    zero = config.get("zero_optimization") or {}
    if reading.get("zero3_offload") and zero.get("stage", "auto") not in ("auto", None, 3):
        yield f"zero_optimization.stage: {zero['stage']} contradicts zero3_offload: true of {here}"
    param = zero.get("offload_param")
    if isinstance(param, dict) and param.get("device") in ("cpu", "nvme") and zero.get("stage") in (0, 1, 2):
        yield f"offload_param needs stage 3 and the stage is {zero['stage']}"


def _allowed(config: Mapping[str, Any]) -> tuple[Precision, ...]:
    """The dtypes that a DeepSpeed configuration can compute in: all three where it leaves `enabled` open."""
    dtypes: tuple[Precision, ...] = ("no", "bf16", "fp16")
    for key, value in _enabled(config).items():
        dtypes = tuple(one for one in dtypes if (one == key) is value)
    return dtypes


def _enabled(config: Mapping[str, Any]) -> dict[str, bool]:
    """Whether bf16 and fp16 are enabled, where a DeepSpeed configuration fixes it."""
    enabled = {key: (config.get(key) or {}).get("enabled") for key in ("bf16", "fp16")}
    return {key: value for key, value in enabled.items() if isinstance(value, bool)}
