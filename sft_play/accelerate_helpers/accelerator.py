"""`get_accelerator` and `wrap_model_optimizer`: an `accelerate.Accelerator` configured from a file,
and what it trains.

accelerate and DeepSpeed are imported only when used: either may be missing.
"""

from __future__ import annotations

import builtins
import functools
import importlib.util
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map  # private, but transformers registers its outputs with it too
from torch.utils.data import DataLoader

from sft_play.accelerate_helpers.settings import (
    DEFAULT_CONFIG,
    AutocastPrecision,
    CheckedSettings,
    DistConfig,
    check_settings,
)
from sft_play.errors import BackendError, ConfigError
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


class NoOpAccelerator:
    """One process with what a training loop calls of `accelerate.Accelerator`. It does the same: autocast, accumulation
    (optimizer and scheduler steps in between do nothing), batches on the device. The error for anything else (trackers,
    hooks, `save_state`), and for fp16, says that accelerate is missing."""

    distributed_type: str = "NO"  # equal to accelerate's DistributedType.NO
    num_processes = 1
    process_index = local_process_index = 0
    is_main_process = is_local_main_process = sync_gradients = True
    is_fsdp2 = False
    dist_config: Any = None
    deepspeed_plugin = None
    print = staticmethod(builtins.print)
    clip_grad_norm_ = staticmethod(torch.nn.utils.clip_grad_norm_)
    free_memory = staticmethod(lambda *objects: [None] * len(objects))  # a, b = free_memory(a, b) drops both
    wait_for_everyone = end_training = staticmethod(lambda: None)
    gather = staticmethod(torch.atleast_1d)
    gather_for_metrics = reduce = staticmethod(lambda value, *args, **kwargs: value)

    def __init__(self, mixed_precision: str | None = None, gradient_accumulation_steps: int = 1) -> None:
        if mixed_precision == "fp16":
            raise BackendError("fp16 needs accelerate, which scales the loss; set mixed_precision: bf16 or no")
        self.mixed_precision = mixed_precision or "no"
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        self._micro_batches, self._is_end_of_data = 0, False

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"NoOpAccelerator has no {name}: one process without accelerate; pip install accelerate")

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Each object prepared by its type, in the given order; a single one is not returned as a tuple."""
        return tuple(map(self._prepare_item, args)) if len(args) > 1 else self._prepare_item(*args)

    def _prepare_item(self, item: Any) -> Any:
        if isinstance(item, DataLoader):
            return _DeviceLoader(item, self)
        if isinstance(item, torch.nn.Module):
            item = item if getattr(item, "hf_device_map", None) else item.to(self.device)
            if self.mixed_precision == "bf16":  # the instance's forward: its class keeps its own
                item.forward = _cast_outputs_to_fp32(self.autocast()(item.forward))
        for name in ("step", "zero_grad"):
            if isinstance(item, (torch.optim.Optimizer, LRScheduler)) and hasattr(item, name):
                setattr(item, name, self._skip_unless_synced(getattr(item, name)))
        return item

    def _skip_unless_synced(self, step: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(step)(lambda *args, **kwargs: step(*args, **kwargs) if self.sync_gradients else None)

    def accumulate(self, *models: Any) -> nullcontext[None]:
        """One micro-batch: gradients accumulate until the last one of a step, or of the data."""
        self._micro_batches = 0 if self._is_end_of_data else self._micro_batches + 1
        self.sync_gradients = self._micro_batches % self.gradient_accumulation_steps == 0
        return nullcontext()

    def autocast(self) -> Any:
        """bf16 where it was asked for; a context or a decorator."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.mixed_precision == "bf16")

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Gradients of the loss, divided by the accumulation steps."""
        (loss / self.gradient_accumulation_steps).backward(**kwargs)

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """The model itself, with its autocast; without `keep_torch_compile` the one that was compiled."""
        return model if keep_torch_compile else getattr(model, "_orig_mod", model)


def _cast_outputs_to_fp32(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward whose outputs are in fp32, as accelerate returns them."""

    def to_fp32(value: Any) -> Any:
        return value.float() if getattr(value, "dtype", None) == torch.bfloat16 else value

    return functools.wraps(forward)(lambda *args, **kwargs: tree_map(to_fp32, forward(*args, **kwargs)))


class _DeviceLoader:
    """A data loader whose batches are on the device; it tells the accelerator which one is the last."""

    def __init__(self, loader: Any, accelerator: NoOpAccelerator) -> None:
        self.base_dataloader, self._accelerator = loader, accelerator

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def __getattr__(self, name: str) -> Any:  # scripts ask for dataset, batch_size, sampler
        return getattr(self.base_dataloader, name)

    def __iter__(self) -> Iterator[Any]:
        device, sentinel = self._accelerator.device, object()
        for batch, next_batch in itertools.pairwise(itertools.chain(self.base_dataloader, [sentinel])):
            self._accelerator._is_end_of_data = next_batch is sentinel
            yield tree_map(lambda value: value.to(device) if hasattr(value, "to") else value, batch)
        self._accelerator._is_end_of_data = False


def get_accelerator(config: str | os.PathLike[str] | Mapping[str, Any] | DistConfig = DEFAULT_CONFIG) -> Any:
    """An `accelerate.Accelerator` with the settings of a YAML file or a mapping (`DistConfig` lists the keys).

    A relative path is looked up in the working folder, then in the project. Without DeepSpeed's file or package
    accelerate runs instead, without accelerate a `NoOpAccelerator` in a single process, each with a warning. A second
    call replaces the accelerator of the first. The settings are its attribute `dist_config`. Raises ConfigError: the
    settings are wrong or contradictory, or differ over ranks, or a launcher started too few of these; BackendError:
    without accelerate there are several ranks, or fp16 is asked for."""
    if importlib.util.find_spec("accelerate") is None:
        return _no_op_accelerator(config)
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


def _no_op_accelerator(config: Any) -> Any:
    checked = check_settings(config, best_precision=_best_precision(), has_deepspeed=False)
    ranks = rank_variables(os.environ).get("WORLD_SIZE", "1")
    if ranks != "1":
        raise BackendError(
            f"{ranks} ranks were started and the package accelerate is not installed: each would train on its own; "
            "pip install accelerate"
        )
    _warn("the package accelerate is not installed: one process trains, without DDP, FSDP or ZeRO (NoOpAccelerator)")
    accelerator = NoOpAccelerator(
        mixed_precision=checked.mixed_precision,
        gradient_accumulation_steps=checked.settings.gradient_accumulation_steps,
    )
    accelerator.dist_config = checked.settings
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
    from accelerate import Accelerator
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
