"""Helpers for people's own training scripts and notebooks, over accelerate and DeepSpeed
(docs/dist.md): an `accelerate.Accelerator` configured from a file, what it trains, and one complete
save."""

import importlib.util
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from pydantic import Field, ValidationError
from safetensors.torch import save_file

from sft_play.config.schema import Name, Section
from sft_play.config.yaml_io import YamlDocument, parse_yaml, read_text
from sft_play.errors import ConfigError, RunFolderError, SftPlayError, TrainingError
from sft_play.files import atomic
from sft_play.launch.accelerate import refuse_too_few_processes, remove_accelerate_variables
from sft_play.launch.deepspeed import (
    AUTO,
    HIDDEN_SIZE_FORMULAS,
    drop_unresolved_autos,
    is_offloaded,
    read_deepspeed_file,
    shipped_deepspeed_config,
    translate_deepspeed_keys,
)
from sft_play.log import one_line
from sft_play.process.environment import set_deepspeed_to_cpu
from sft_play.training.checkpoints.full_state_dict import adapter_parameters, gather_to_cpu
from sft_play.training.checkpoints.model_saving import (
    check_saved_weights,
    saved_shapes,
    write_weights,
)
from sft_play.training.distributed import (
    announce_compile_waits,
    gather_values,
    init_deepspeed,
    require_same_inputs,
)

__all__ = [
    "DistConfig",
    "NoOpAccelerator",
    "get_accelerator",
    "save_sharded",
    "wrap_model_optimizer",
]

logger = logging.getLogger(__name__)

DEFAULT_CONFIG = "configs/train/common.yaml"
# The checkout, where `configs/` is; for an installed package, a folder that has none.
PROJECT_FOLDER = Path(__file__).resolve().parents[1]


# --- settings -------------------------------------------------------------------------------------
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
    deepspeed_config: Name | Path | None = None

    # DeepSpeed ZeRO-3 with weights and optimizer states in RAM.
    zero3_offload: bool = False

    # DDP's search for parameters that got no gradient.
    find_unused_parameters: bool = False


def read_settings(
    config: str | os.PathLike[str] | Mapping[str, Any] | DistConfig,
) -> tuple[DistConfig, Path]:
    """The settings of a file or a mapping, and the folder of the file. Raises ConfigError: there is
    no such file, or keys or values are wrong; all of them at once."""
    if isinstance(config, DistConfig):
        return config, Path()
    if isinstance(config, Mapping):
        document, folder = YamlDocument(name="config", data=dict(config)), Path()
    else:
        path = _find_file(Path(config))
        if os.fspath(config) == DEFAULT_CONFIG and not path.exists():
            return DistConfig.model_validate({}), Path()
        document, folder = parse_yaml(read_text(path), name=one_line(str(path))), path.parent
    problems = list(document.problems)
    try:
        settings = DistConfig.model_validate(document.data)
    except ValidationError as error:
        for item in error.errors():
            key = str(item["loc"][0])
            problems.append(
                document.problem((key,), f"{item['msg']}, found {one_line(repr(item['input']))}")
            )
    if problems:
        raise ConfigError("\n".join(map(str, problems)))
    if settings.zero3_offload and settings.backend == "accelerate":
        raise ConfigError(
            "zero3_offload: true is for DeepSpeed, but backend is accelerate; set backend:"
            " deepspeed"
        )
    return settings, folder


def _find_file(path: Path, *folders: Path) -> Path:
    """Find a path of the user's in the working folder, in `folders`, or in the project; returns it
    unchanged where it is in none."""
    path = path.expanduser()
    return next(
        filter(Path.exists, (path, *(folder / path for folder in (*folders, PROJECT_FOLDER)))), path
    )


def load_deepspeed_config(
    settings: DistConfig, folder: Path, *, best_precision: str
) -> dict[str, Any]:
    """DeepSpeed's configuration for these settings: their file, looked for in `folder` too, or the
    shipped one. What it leaves "auto" is accelerate's to fill. Raises ConfigError: it cannot be
    read, or contradicts the settings.
    """
    if settings.deepspeed_config is None:
        name, config = (
            "DeepSpeed",
            shipped_deepspeed_config("zero3_offload" if settings.zero3_offload else "zero2"),
        )
    else:
        path = _find_file(Path(settings.deepspeed_config), folder)
        name = one_line(str(path))
        config = translate_deepspeed_keys(
            read_deepspeed_file(path, variable="deepspeed_config"), name=name
        )
    steps = settings.gradient_accumulation_steps
    if config.get("gradient_accumulation_steps", "auto") not in ("auto", steps):
        raise ConfigError(
            f"{name}: gradient_accumulation_steps: {config['gradient_accumulation_steps']}"
            f" contradicts the {steps} of the settings; keep one of them"
        )
    config["gradient_accumulation_steps"] = steps
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping"):
        config.setdefault(key, "auto")
    zero = config.setdefault("zero_optimization", {})
    if zero.get("stage", "auto") == "auto":
        zero["stage"] = 3 if settings.zero3_offload else 2
    if zero["stage"] != 3 and (settings.zero3_offload or is_offloaded(zero, "offload_param")):
        raise ConfigError(
            f"{name}: weights that are offloaded (zero3_offload, offload_param) need stage 3, and "
            f"zero_optimization.stage is {zero['stage']}"
        )
    for key in ("offload_optimizer", "offload_param"):
        # what the file moves to NVMe stays there
        if settings.zero3_offload and not is_offloaded(zero, key):
            zero[key] = {"device": "cpu", "pin_memory": True}
    precision = _precision(settings, config, best_precision)
    for key in ("bf16", "fp16"):  # the file may have been written for another machine
        config[key] = {**config.get(key, {}), "enabled": key == precision}
    return config


def _precision(settings: DistConfig, deepspeed: Mapping[str, Any], best_precision: str) -> str:
    """That of the settings; auto follows a DeepSpeed file that sets it, else the device."""
    if settings.mixed_precision != "auto":
        return settings.mixed_precision
    enabled = {key: deepspeed.get(key, {}).get("enabled") for key in ("bf16", "fp16")}
    for key, is_enabled in enabled.items():
        if is_enabled is True:
            return key
    return "no" if enabled.get(best_precision) is False else best_precision


# --- the accelerator ------------------------------------------------------------------------------
class NoOpAccelerator(Accelerator):
    """accelerate's Accelerator for one process without a settings file: nothing is spread over
    ranks."""

    def __init__(
        self, mixed_precision: str | None = None, gradient_accumulation_steps: int = 1
    ) -> None:
        super().__init__(
            mixed_precision=mixed_precision,
            gradient_accumulation_steps=gradient_accumulation_steps,
            cpu=not torch.accelerator.is_available(),
        )


def get_accelerator(
    config: str | os.PathLike[str] | Mapping[str, Any] | DistConfig = DEFAULT_CONFIG,
) -> Any:
    """An `accelerate.Accelerator` with the settings of a YAML file or a mapping (`DistConfig` lists
    the keys).

    A relative path is looked up in the working folder, then in the project. Without the package
    DeepSpeed accelerate runs instead, with a warning. A second call replaces the accelerator of the
    first. The settings are its attribute `dist_config`. Raises ConfigError: the settings are wrong
    or contradictory, or differ over ranks, or a launcher started too few of these."""
    refuse_too_few_processes(os.environ)
    best_precision = _best_precision()
    if best_precision == "no":
        set_deepspeed_to_cpu()
    settings, folder = read_settings(config)
    deepspeed: dict[str, Any] = {}
    if settings.backend == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        logger.warning(
            "backend: deepspeed falls back to accelerate: the package deepspeed is not installed"
        )
    elif settings.backend == "deepspeed":
        deepspeed = load_deepspeed_config(settings, folder, best_precision=best_precision)
    precision = _precision(settings, deepspeed, best_precision)
    # accelerate's state refuses a second precision or DeepSpeed plugin, so no cell of a notebook
    # could run twice
    if AcceleratorState._shared_state:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    accelerator = _new_accelerator(settings, precision, deepspeed, on_cpu=best_precision == "no")
    accelerator.dist_config = settings
    compared = {**settings.model_dump(), "mixed_precision": precision, "DeepSpeed": deepspeed}
    require_same_inputs({key: str(value) for key, value in compared.items()})
    return accelerator


def _best_precision() -> str:
    if (
        os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
        or not torch.accelerator.is_available()
    ):
        return "no"
    lacks_bf16 = torch.cuda.is_available() and not torch.cuda.is_bf16_supported(
        including_emulation=False
    )
    return "fp16" if lacks_bf16 else "bf16"


def _new_accelerator(
    settings: DistConfig, precision: str, deepspeed: dict[str, Any], *, on_cpu: bool
) -> Any:
    from accelerate.utils import (
        DeepSpeedPlugin,
        DistributedDataParallelKwargs,
        DistributedType,
        GradientAccumulationPlugin,
    )

    options: dict[str, Any] = {"cpu": on_cpu}
    if deepspeed:
        remove_accelerate_variables(os.environ)
        announce_compile_waits()
        if "RANK" not in os.environ:  # DeepSpeed looks for MPI unless a launcher has set the ranks
            os.environ |= {
                "RANK": "0",
                "WORLD_SIZE": "1",
                "LOCAL_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
            }
            os.environ["MASTER_PORT"] = "0"  # rank 0 listens at any port that is free
        if on_cpu:
            # with `cpu=True` the Accelerator itself would silently leave out DeepSpeed
            PartialState(cpu=True)
        options = {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=deepspeed)}
    elif (
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
        and settings.backend == "accelerate"
    ):
        logger.warning(
            "accelerate launch asked for DeepSpeed, but backend is accelerate, which trains without"
            " it; set backend: deepspeed"
        )
    # FSDP would keep every rank's full gradients until the last micro-batch of a step
    uses_fsdp = not deepspeed and os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    accelerator = Accelerator(
        mixed_precision=precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=settings.gradient_accumulation_steps, sync_each_batch=uses_fsdp
        ),
        kwargs_handlers=[
            DistributedDataParallelKwargs(find_unused_parameters=settings.find_unused_parameters)
        ],
        **options,
    )
    if uses_fsdp and str(accelerator.distributed_type) != str(DistributedType.FSDP):
        logger.warning(
            "accelerate launch asked for FSDP, and accelerate trains without it here (%s)",
            accelerator.distributed_type,
        )
    if deepspeed and on_cpu:
        init_deepspeed(on_cpu=True)  # ZeRO-3 partitions weights while they are read
    return accelerator


def wrap_model_optimizer(
    accelerator: Any,
    model: Any,
    optimizer: Any = None,
    *others: Any,
    gradient_checkpointing: bool | None = None,
) -> tuple[Any, ...]:
    """Model, optimizer and the rest (data loaders, schedulers), prepared, in the order given;
    `None` stays `None`. `gradient_checkpointing`: None follows the settings of `get_accelerator`.
    Raises ConfigError: the model cannot recompute its activations."""
    if gradient_checkpointing is None:
        gradient_checkpointing = getattr(
            getattr(accelerator, "dist_config", None), "gradient_checkpointing", False
        )
    if gradient_checkpointing:
        # transformers' new and old name of the same
        kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
        enable = getattr(model, f"{kind}_checkpointing_enable", None)
        if enable is None:
            raise ConfigError(
                f"gradient_checkpointing: {type(model).__name__} has no"
                " gradient_checkpointing_enable, as transformers' models have; set it to false, or"
                " recompute in your model's forward"
            )
        # non-reentrant: that works with frozen weights and under DDP
        enable(**{f"{kind}_checkpointing_kwargs": {"use_reentrant": False}})
    plugin = getattr(accelerator, "deepspeed_plugin", None)
    if plugin is not None:
        # what is "auto" and goes by the model's hidden size, which accelerate finds in text models'
        # configs alone
        zero: dict[str, Any] = plugin.deepspeed_config["zero_optimization"]
        model_config: Any = getattr(model, "config", None)
        if hasattr(model_config, "get_text_config"):
            model_config = model_config.get_text_config()
        hidden_size = getattr(model_config, "hidden_size", None)
        for key, formula in HIDDEN_SIZE_FORMULAS.items():
            if hidden_size is not None and zero.get(key) == AUTO:
                zero[key] = formula(hidden_size)
        if hidden_size is None:
            drop_unresolved_autos(zero, "zero_optimization.")
    items = (model, optimizer, *others)
    present_items = [item for item in items if item is not None]
    prepared = accelerator.prepare(*present_items)
    remaining_items = iter(prepared if len(present_items) > 1 else (prepared,))
    return tuple(None if item is None else next(remaining_items) for item in items)


# --- saving ---------------------------------------------------------------------------------------
# A folder with one of these files is a saved model, which a new save may replace.
_MODEL_FILES = ("adapter_config.json", "config.json", "model.safetensors")


def save_sharded(
    accelerator: Any, model: Any, folder: str | os.PathLike[str], *, tokenizer: Any = None
) -> Path:
    """Save a prepared model once, whole, as safetensors; every rank calls it. Returns the folder's
    path.

    An adapter can be opened with `PeftModel.from_pretrained`, a transformers model with its
    `from_pretrained`, any other module is one `model.safetensors`; tensors keep their dtype. Shards
    (ZeRO-3, FSDP) are gathered tensor by tensor into rank 0's host memory. It is written beside the
    folder and renamed once it has been read back and no rank has failed: until then an existing
    folder is unchanged. Files in it that are not weights (notes, a README) are kept. Raises
    RunFolderError: the folder holds no saved model, or cannot be written; TrainingError, on every
    rank: one has failed; ModelError: what was written is not what the model holds."""
    path = Path(folder).expanduser().resolve()
    temporary_path = path.with_name(f".{path.name}.building")
    try:
        _run_on_rank_0(accelerator, lambda: _prepare_folders(path, temporary_path))
        unwrapped_model = accelerator.unwrap_model(model, keep_torch_compile=False)
        weights = _gather_weights(accelerator, model, unwrapped_model)
        _run_on_rank_0(
            accelerator, lambda: _write_model(unwrapped_model, tokenizer, weights, temporary_path)
        )
        _run_on_rank_0(accelerator, lambda: _replace_folder(temporary_path, path))
    except SftPlayError:
        raise
    except Exception as error:
        raise TrainingError(
            f"rank {accelerator.process_index}: saving {path} failed ({type(error).__name__}:"
            f" {one_line(str(error), limit=300)}); a folder there is a whole save, the earlier or"
            " this one"
        ) from error
    finally:
        if accelerator.is_main_process:
            atomic.remove(temporary_path)
    return path


def _run_on_rank_0(accelerator: Any, work: Callable[[], None]) -> None:
    """Do this on rank 0, and wait for all ranks; every rank raises where it failed."""
    failure, message = None, ""
    if accelerator.is_main_process:
        try:
            work()
        except Exception as error:
            failure, message = error, f"{type(error).__name__}: {one_line(str(error), limit=300)}"
    first_message, *_ = gather_values(message)
    if failure is not None:
        raise failure
    if first_message:
        raise TrainingError(f"nothing was saved; rank 0: {first_message}")


def _prepare_folders(path: Path, temporary_path: Path) -> None:
    atomic.restore_backup(path)
    if path.exists() and not path.is_dir():
        raise RunFolderError(f"{path} is not a folder")
    if (
        path.is_dir()
        and any(path.iterdir())
        and not any((path / name).is_file() for name in _MODEL_FILES)
    ):
        examples = ", ".join(sorted(item.name for item in path.iterdir())[:3])
        raise RunFolderError(
            f"{path} exists and holds no saved model ({one_line(examples)}), so it is not replaced;"
            " name a folder inside it"
        )
    try:
        atomic.remove(temporary_path)
        temporary_path.mkdir(parents=True)
    except OSError as error:
        raise RunFolderError(
            f"{path} cannot be written: {error.strerror} ({temporary_path})"
        ) from None


def _gather_weights(accelerator: Any, model: Any, unwrapped_model: Any) -> dict[str, torch.Tensor]:
    if accelerator.distributed_type == "FSDP" and not accelerator.is_fsdp2:
        weights = accelerator.get_state_dict(model)  # FSDP1: flat parameters, complete on rank 0
        return dict(weights) if accelerator.is_main_process else {}
    # of an adapter its own parameters alone: the state of a base in 4 bits is packed to be read
    tensors: Any = (
        adapter_parameters(unwrapped_model)
        if hasattr(unwrapped_model, "peft_config")
        else unwrapped_model.state_dict(keep_vars=True).items()
    )
    return gather_to_cpu(tensors, keeps_copies=accelerator.is_main_process)


def _write_model(
    unwrapped_model: Any, tokenizer: Any, weights: dict[str, torch.Tensor], folder: Path
) -> None:
    shapes = None
    if hasattr(unwrapped_model, "save_pretrained"):
        write_weights(unwrapped_model, folder, state_dict=weights)
        shapes = saved_shapes(unwrapped_model)
    else:
        # tied tensors: under the first name alone
        names_by_tensor = {id(tensor): name for name, tensor in reversed(weights.items())}
        own_weights = {name: weights[name] for name in names_by_tensor.values()}
        save_file(own_weights, folder / "model.safetensors", {"format": "pt"})
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    check_saved_weights(folder, expected_shapes=shapes)


def _replace_folder(temporary_path: Path, path: Path) -> None:
    """Put the new folder in the place of the old one, with the old one's files that are not
    weights."""
    if path.is_dir():
        old_weights = {
            item.name
            for item in path.iterdir()
            if item.name.endswith((".safetensors", ".safetensors.index.json"))
        }
        left_out = old_weights.union(_MODEL_FILES, (item.name for item in temporary_path.iterdir()))
        shutil.copytree(
            path,
            temporary_path,
            symlinks=True,
            ignore=lambda folder, _: left_out if folder == str(path) else (),
            dirs_exist_ok=True,
        )
    atomic.move_into_place(temporary_path, path)
