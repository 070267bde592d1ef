"""`get_accelerator` and `wrap_model_optimizer`: an `accelerate.Accelerator` configured from a file,
and what it trains.

DeepSpeed is imported only when used: it may be missing.
"""

import importlib.util
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator

from sft_play.accelerate_helpers.settings import (
    DEFAULT_CONFIG,
    AutocastPrecision,
    CheckedSettings,
    DistConfig,
    check_settings,
)
from sft_play.errors import ConfigError
from sft_play.launch.accelerate import refuse_too_few_processes, remove_accelerate_variables
from sft_play.launch.deepspeed import (
    HIDDEN_SIZE_FORMULAS,
    cpu_adam_compile_note,
    cpu_adam_obstacles,
    drop_unresolved_autos,
)
from sft_play.launch.run_hardware import disable_broken_p2p
from sft_play.launch.torchrun import rank_variables
from sft_play.log import one_line
from sft_play.machine.hardware import detect_hardware
from sft_play.process.environment import set_deepspeed_to_cpu
from sft_play.training.distributed import init_deepspeed, remove_abandoned_locks, require_same_inputs

logger = logging.getLogger(__name__)


class NoOpAccelerator(Accelerator):
    """accelerate's Accelerator for one process without a settings file: nothing is spread over ranks."""

    def __init__(self, mixed_precision: str | None = None, gradient_accumulation_steps: int = 1) -> None:
        super().__init__(
            mixed_precision=mixed_precision,
            gradient_accumulation_steps=gradient_accumulation_steps,
            cpu=not torch.accelerator.is_available(),
        )


def get_accelerator(config: str | os.PathLike[str] | Mapping[str, Any] | DistConfig = DEFAULT_CONFIG) -> Any:
    """An `accelerate.Accelerator` with the settings of a YAML file or a mapping (`DistConfig` lists the keys).

    A relative path is looked up in the working folder, then in the project. Without DeepSpeed's file or package
    accelerate runs instead, with a warning. A second call replaces the accelerator of the first. The settings are its
    attribute `dist_config`. Raises ConfigError: the settings are wrong or contradictory, or differ over ranks, or a
    launcher started too few of these."""
    launch_hint = "torchrun --standalone --nproc-per-node 2, or accelerate launch --multi_gpu, to start your script"
    refuse_too_few_processes(os.environ, alternative=launch_hint)
    best_precision = _best_precision()
    if best_precision == "no":
        set_deepspeed_to_cpu()
    elif torch.version.hip is None:
        disable_broken_p2p(detect_hardware(), os.environ)
    checked = check_settings(
        config, best_precision=best_precision, has_deepspeed=importlib.util.find_spec("deepspeed") is not None
    )
    if checked.fallback_reason is not None:
        lost_offload = " (zero3_offload: nothing is offloaded)" if checked.settings.zero3_offload else ""
        _warn(f"backend: deepspeed falls back to accelerate{lost_offload}: {checked.fallback_reason}")
    _drop_launcher_settings(checked)
    remove_abandoned_locks()
    _reset_accelerate_state()
    accelerator = _new_accelerator(checked, on_cpu=best_precision == "no")
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true" and accelerator.distributed_type != "FSDP":
        _warn(f"accelerate launch asked for FSDP, which accelerate does not use here (type "
              f"{accelerator.distributed_type}): it shards over several GPUs only")  # fmt: skip
    accelerator.dist_config = checked.settings
    resolved = {"mixed_precision": checked.mixed_precision, "DeepSpeed": checked.deepspeed_config}
    compared = checked.settings.model_dump() | resolved
    require_same_inputs({key: str(value) for key, value in compared.items()})
    return accelerator


def _best_precision() -> AutocastPrecision:
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes") or not torch.accelerator.is_available():
        return "no"
    lacks_bf16 = torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)
    return "fp16" if lacks_bf16 else "bf16"


def _drop_launcher_settings(checked: CheckedSettings) -> None:
    """Remove what `accelerate launch` exported; but for DeepSpeed's variables it stays where accelerate runs."""
    if checked.deepspeed_config is not None:
        remove_accelerate_variables(os.environ)
        return
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true" and checked.fallback_reason is None:
        _warn("accelerate launch asked for DeepSpeed, but backend is accelerate; set backend: deepspeed")
    for name in [name for name in os.environ if name.startswith("ACCELERATE_") and "DEEPSPEED" in name]:
        del os.environ[name]


def _reset_accelerate_state() -> None:
    """Reset accelerate's state: it rejects a second precision or DeepSpeed plugin, so no cell could run twice."""
    from accelerate.state import AcceleratorState, GradientState

    if AcceleratorState._shared_state:
        _warn("this process already had an Accelerator; it and what it prepared are replaced")
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def _new_accelerator(checked: CheckedSettings, *, on_cpu: bool) -> Any:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin

    # FSDP would keep every rank's full gradients until the last micro-batch of a step
    uses_fsdp = checked.deepspeed_config is None and os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    options: dict[str, Any] = {"cpu": on_cpu}
    if checked.deepspeed_config is not None:
        if not rank_variables(os.environ):  # DeepSpeed looks for MPI unless a launcher has set the ranks
            os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
            os.environ["MASTER_PORT"] = "0"  # rank 0 listens at any port that is free
        if on_cpu:
            PartialState(cpu=True)  # with `cpu=True` the Accelerator itself would silently leave out DeepSpeed
        options = {"deepspeed_plugin": _deepspeed_plugin(checked.deepspeed_config)}
    accelerator = Accelerator(
        mixed_precision=checked.mixed_precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=checked.settings.gradient_accumulation_steps, sync_each_batch=uses_fsdp
        ),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=checked.settings.find_unused_parameters)],
        **options,
    )
    if checked.deepspeed_config is not None and on_cpu:
        init_deepspeed(on_cpu=True)  # ZeRO-3 partitions weights while they are read
    return accelerator


def _deepspeed_plugin(config: dict[str, Any]) -> Any:
    from accelerate.utils import DeepSpeedPlugin

    offload = config["zero_optimization"].get("offload_optimizer") or {}
    if offload.get("device", "none") != "none" and config.get("zero_force_ds_cpu_optimizer", True):
        if obstacles := cpu_adam_obstacles():
            _warn(f"DeepSpeed's CPU Adam cannot be built ({', '.join(obstacles)}): torch's AdamW steps there, slower")
            config["zero_force_ds_cpu_optimizer"] = False
        elif message := cpu_adam_compile_note():
            _warn(f"DeepSpeed: {message}")
    return DeepSpeedPlugin(hf_ds_config=config)


def _warn(message: str) -> None:
    logger.log(logging.WARNING if os.environ.get("LOCAL_RANK", "0") == "0" else logging.DEBUG, "%s", message)


# --- what is trained --------------------------------------------------------------------------------------------------
def wrap_model_optimizer(
    accelerator: Any,
    model: Any,
    optimizer: Any = None,
    *others: Any,
    gradient_checkpointing: bool | None = None,
    micro_batch_size: int | None = None,
) -> tuple[Any, ...]:
    """Model, optimizer and the rest (data loaders, schedulers), prepared, in the order given; `None` stays `None`.
    `gradient_checkpointing`: None follows the settings of `get_accelerator`; `micro_batch_size`: rows per rank and
    pass, for DeepSpeed where no data loader gives it. Raises ConfigError: the model cannot recompute its
    activations."""
    settings = getattr(accelerator, "dist_config", None)
    if getattr(settings, "gradient_checkpointing", False) if gradient_checkpointing is None else gradient_checkpointing:
        _enable_gradient_checkpointing(model)
    plugin = getattr(accelerator, "deepspeed_plugin", None)
    if plugin is not None:
        _fill_deepspeed(plugin.deepspeed_config, model, (optimizer, *others), micro_batch_size)
    items = (model, optimizer, *others)
    present_items = [item for item in items if item is not None]
    prepared = accelerator.prepare(*present_items)
    remaining_items = iter(prepared if len(present_items) > 1 else (prepared,))
    return tuple(None if item is None else next(remaining_items) for item in items)


def _enable_gradient_checkpointing(model: Any) -> None:
    """Turn on gradient checkpointing, non-reentrant: that works with frozen weights and under DDP."""
    class_name = type(model).__name__
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"  # transformers' two names
    enable = getattr(model, f"{kind}_checkpointing_enable", None)
    if enable is None:
        raise ConfigError(f"gradient_checkpointing: {class_name} has no gradient_checkpointing_enable, as "
                          "transformers' models have; set it to false, or recompute in your model's "
                          "forward")  # fmt: skip
    try:
        enable(**{f"{kind}_checkpointing_kwargs": {"use_reentrant": False}})
    except ValueError as error:
        raise ConfigError(
            f"gradient_checkpointing: {class_name} cannot: {one_line(str(error))}; set it to false"
        ) from None


def _fill_deepspeed(config: dict[str, Any], model: Any, items: tuple[Any, ...], micro_batch_size: int | None) -> None:
    """Fill what accelerate does not: it raises if there is no loader with a batch size, or no width in the config."""
    model_config: Any = getattr(model, "config", None)
    text_config = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    zero, hidden_size = config["zero_optimization"], getattr(text_config, "hidden_size", None)
    for key, (formula, _) in HIDDEN_SIZE_FORMULAS.items():
        if zero.get(key) == "auto" and isinstance(hidden_size, int):
            zero[key] = formula(hidden_size)
    if config.get("train_micro_batch_size_per_gpu", "auto") in ("auto", None):
        batch_sizes = (getattr(item, "batch_size", None) for item in items)  # the first data loader's, which trains
        config["train_micro_batch_size_per_gpu"] = micro_batch_size or next(filter(None, batch_sizes), 1)
    item_classes = {type(item).__name__ for item in items}
    for block, placeholder in {"optimizer": "DummyOptim", "scheduler": "DummyScheduler"}.items():
        if block in config and placeholder not in item_classes:  # accelerate's markers for "as the file says"
            _warn(f"the DeepSpeed file's {block} block is left out: the script's is used")
            del config[block]
    for line in drop_unresolved_autos(config):
        logger.info("DeepSpeed: %s", line)
