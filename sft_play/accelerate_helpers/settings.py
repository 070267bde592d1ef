"""The settings of `get_accelerator`: seven keys of a YAML file or a mapping, strict, and their DeepSpeed file."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from sft_play.config.options import describe_values
from sft_play.config.schema import Name, Section
from sft_play.config.validation import value_hint
from sft_play.config.yaml_io import YamlDocument, format_value, parse_yaml, read_text
from sft_play.errors import ConfigError
from sft_play.launch.deepspeed import read_deepspeed_file, shipped_deepspeed_config, translate_deepspeed_keys
from sft_play.log import one_line
from sft_play.spelling import did_you_mean

logger = logging.getLogger(__name__)

DEFAULT_CONFIG = "configs/train/common.yaml"
# The checkout, where `configs/` is; for an installed package, a folder that has none.
PROJECT_FOLDER = Path(__file__).resolve().parents[2]

AutocastPrecision = Literal["no", "fp16", "bf16"]


class DistConfig(Section):
    """The keys of `configs/train/common.yaml`."""

    # What runs the training over ranks: accelerate's DDP (or FSDP under `accelerate launch`), or
    # DeepSpeed.
    backend: Literal["accelerate", "deepspeed"] = "accelerate"

    # Autocast's dtype; auto takes bf16 where the GPU has it, fp16 on older GPUs, no on a CPU.
    mixed_precision: Literal["auto", "no", "fp16", "bf16"] = "auto"

    # Micro-batches per optimizer step.
    gradient_accumulation_steps: int = Field(1, ge=1)

    # Whether `wrap_model_optimizer` turns on gradient checkpointing.
    gradient_checkpointing: bool = False

    # DeepSpeed's file in JSON or YAML; null takes ZeRO-2, or ZeRO-3 with offload.
    deepspeed_config: Name | None = None

    # DeepSpeed ZeRO-3 with weights and optimizer states in RAM.
    zero3_offload: bool = False

    # DDP's search for parameters that got no gradient.
    find_unused_parameters: bool = False


@dataclass(frozen=True)
class CheckedSettings:
    """Consistent settings, DeepSpeed's configuration where it runs, and why it does not though asked for."""

    settings: DistConfig
    mixed_precision: AutocastPrecision
    deepspeed_config: dict[str, Any] | None = None
    fallback_reason: str | None = None


def check_settings(
    config: str | os.PathLike[str] | Mapping[str, Any] | DistConfig,
    *,
    best_precision: AutocastPrecision,
    has_deepspeed: bool,
) -> CheckedSettings:
    """The settings of a file or a mapping, checked together with their DeepSpeed file; `best_precision`: that of
    this device, "no" on a CPU. Raises ConfigError: there is no such file, keys or values are wrong, or contradict."""
    document, folder = _read_config(config)
    settings = _parse_settings(document)
    deepspeed, fallback, problems = None, None, list[str]()
    if settings.backend == "deepspeed":
        name, deepspeed, fallback = _load_deepspeed_file(settings, folder, has_deepspeed=has_deepspeed)
    elif settings.zero3_offload:
        problems.append("zero3_offload: true is for DeepSpeed, but backend is accelerate; set backend: deepspeed")
    precision = _resolve_precision(settings, deepspeed or {}, best_precision)
    if precision == "fp16" and best_precision == "no":
        problems.append("mixed_precision: fp16 needs a GPU, but there is none; set bf16 or no")
    if deepspeed is not None:
        problems += [f"{name}: {text}" for text in _find_contradictions(deepspeed, settings, document.name)]
        _fill_deepspeed_config(deepspeed, settings, name, precision)
    _raise_problems(problems)
    return CheckedSettings(settings, precision, deepspeed, fallback)


def _raise_problems(problems: Sequence[str]) -> None:
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError(f"{len(problems)} problems:\n  " + "\n  ".join(problems))


def _read_config(config: Any) -> tuple[YamlDocument, Path | None]:
    """The settings as given, and the folder of their file."""
    if isinstance(config, DistConfig):
        config = config.model_dump()
    if isinstance(config, Mapping):
        data = {
            str(key): os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in config.items()
        }
        return YamlDocument(name="config", data=data), None
    if not isinstance(config, (str, os.PathLike)):
        raise ConfigError(f"config is {type(config).__name__}; give the path of a YAML file, or a mapping of its keys")
    path = next(filter(Path.exists, _candidate_paths(Path(config))), Path(config).expanduser())
    if os.fspath(config) == DEFAULT_CONFIG and not path.exists():
        logger.info("%s is neither in %s nor in %s: the defaults are used", DEFAULT_CONFIG, Path.cwd(), PROJECT_FOLDER)
        return YamlDocument(name="the defaults"), None
    return parse_yaml(read_text(path), name=one_line(str(path))), path.absolute().parent


def _candidate_paths(path: Path, *folders: Path) -> list[Path]:
    """Where a path may lead that a user has given; an absolute one stays as it is beside any folder."""
    path = path.expanduser()
    return list(dict.fromkeys([path, *(folder / path for folder in (*folders, PROJECT_FOLDER))]))


def _parse_settings(document: YamlDocument) -> DistConfig:
    data, fields = document.data, DistConfig.model_fields
    problems = [str(problem) for problem in document.problems]
    for key in data.keys() - fields.keys():
        hint = did_you_mean(key, fields) or f"the keys are {', '.join(fields)}"
        message = f"unknown key (value {_format_any_value(data[key])}); {hint}"
        problems.append(str(document.problem((one_line(key),), message)))
    settings = DistConfig.model_validate({})
    try:
        settings = DistConfig.model_validate({key: data[key] for key in data if key in fields})
    except ValidationError as error:
        for key in dict.fromkeys(str(item["loc"][0]) for item in error.errors()):
            accepted_values = describe_values(fields[key].annotation, tuple(fields[key].metadata))
            raw_text = None if isinstance(data[key], str) else document.raw_texts.get((key,))
            hint = value_hint(data[key], raw_text, accepted_values)
            message = f"expected {accepted_values}, found {_format_any_value(data[key], raw_text)}{hint}"
            problems.append(str(document.problem((key,), message)))
    _raise_problems(problems)
    return settings


def _format_any_value(value: Any, raw_text: str | None = None) -> str:
    try:
        return format_value(value, raw_text=raw_text)
    except (TypeError, ValueError):  # an object of a script's own class
        return one_line(repr(value), limit=80)


def _resolve_precision(
    settings: DistConfig, deepspeed: Mapping[str, Any], best_precision: AutocastPrecision
) -> AutocastPrecision:
    """Resolve mixed_precision: auto follows the DeepSpeed file if that sets it, else the device."""
    if settings.mixed_precision != "auto":
        return settings.mixed_precision
    enabled = {key: (deepspeed.get(key) or {}).get("enabled") for key in ("bf16", "fp16")}
    if True in enabled.values():
        return "bf16" if enabled["bf16"] is True else "fp16"
    return "no" if enabled.get(best_precision) is False else best_precision


# --- DeepSpeed's file -------------------------------------------------------------------------------------------------
def _load_deepspeed_file(
    settings: DistConfig, folder: Path | None, *, has_deepspeed: bool
) -> tuple[str, dict[str, Any] | None, str | None]:
    """Its name and configuration in current keys; or the reason why accelerate runs instead."""
    if not has_deepspeed:
        return "", None, "the package deepspeed is not installed"
    file_name = settings.deepspeed_config
    if file_name is None:
        return "DeepSpeed", shipped_deepspeed_config("zero3_offload" if settings.zero3_offload else "zero2"), None
    paths = _candidate_paths(Path(file_name), *([folder] if folder is not None else []))
    path = next(filter(Path.exists, paths), None)
    if path is None:
        searched = ", ".join(one_line(str(candidate.absolute())) for candidate in paths)
        return "", None, f"deepspeed_config: {one_line(file_name)} does not exist (looked for {searched})"
    name = one_line(str(path))
    try:
        config, notes = translate_deepspeed_keys(read_deepspeed_file(path), name=name)
    except ConfigError as error:
        raise ConfigError(str(error).replace("DEEPSPEED_CONFIG=", "deepspeed_config: ")) from None
    for note in notes:
        logger.info("%s: %s", name, note)
    return name, config, None


def _fill_deepspeed_config(
    config: dict[str, Any], settings: DistConfig, name: str, precision: AutocastPrecision
) -> None:
    for key in ("bf16", "fp16"):  # as in a run, whose file may have been written for another machine
        if key in config or key == precision:
            config[key] = {**(config.get(key) or {}), "enabled": key == precision}
    zero = config["zero_optimization"] = config.get("zero_optimization") or {}
    if zero.get("stage", "auto") in ("auto", None):
        zero["stage"] = 3 if settings.zero3_offload else 2
    for key in ("offload_optimizer", "offload_param") if settings.zero3_offload else ():
        section = zero.get(key)  # what the file offloads already, such as to NVMe, stays there
        if not isinstance(section, dict) or section.get("device", "none") in ("none", "auto", None):
            zero[key] = {"device": "cpu", "pin_memory": True}
    if config.get("gradient_accumulation_steps", "auto") in ("auto", None):
        config["gradient_accumulation_steps"] = settings.gradient_accumulation_steps
    if config.get("gradient_clipping", "auto") in ("auto", None):
        config["gradient_clipping"] = 1.0
        logger.info("%s: gradient_clipping → 1.0; DeepSpeed clips, and clip_grad_norm_ does not", name)


def _find_contradictions(config: Mapping[str, Any], settings: DistConfig, source: str) -> Iterator[str]:
    steps, file_steps = settings.gradient_accumulation_steps, config.get("gradient_accumulation_steps", "auto")
    if file_steps not in ("auto", None, steps):
        yield f"gradient_accumulation_steps: {file_steps} contradicts gradient_accumulation_steps: {steps} of {source}"
    zero = config.get("zero_optimization") or {}
    if settings.zero3_offload and zero.get("stage", "auto") not in ("auto", None, 3):
        yield f"zero_optimization.stage: {zero['stage']} contradicts zero3_offload: true of {source}"
    offload_param = zero.get("offload_param")
    if (
        isinstance(offload_param, dict)
        and offload_param.get("device") in ("cpu", "nvme")
        and zero.get("stage") in (0, 1, 2)
    ):
        yield f"offload_param needs stage 3 and the stage is {zero['stage']}"
