"""`NoOpAccelerator`: accelerate's interface for one process, where the package itself is not installed.

Methods have the names and parameters of `accelerate.Accelerator` (1.15) and do the same for one process: autocast,
accumulation (optimizer and scheduler steps in between do nothing), data on the device.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from sft_play.errors import ConfigError

logger = logging.getLogger(__name__)


class _Steps:
    """The state of the accumulation, shared by the accelerator and what it has prepared."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.step = 0
        self.is_last = True
        self.at_end_of_data = False


class _Optimizer(torch.optim.Optimizer):
    """An optimizer that steps and clears gradients only at the end of an accumulation."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: _Steps) -> None:
        self.optimizer, self._steps = optimizer, steps  # the wrapped optimizer is already initialised

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)
    step_was_skipped = False

    def step(self, closure: Any = None) -> Any:
        """Step where the accumulation ends."""
        return self.optimizer.step(closure) if self._steps.is_last else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients where the accumulation ends."""
        if self._steps.is_last:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The wrapped optimizer's."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The wrapped optimizer's."""
        self.optimizer.load_state_dict(state_dict)


class _Scheduler:
    """A scheduler that steps where the accumulation ends; everything else is the wrapped one's."""

    def __init__(self, scheduler: Any, steps: _Steps) -> None:
        self.scheduler, self._steps = scheduler, steps

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step with the optimizer."""
        if self._steps.is_last:
            self.scheduler.step(*args, **kwargs)
        else:
            self.scheduler._step_count += 1  # or torch would warn that the optimizer has not stepped

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)


class _Loader:
    """A data loader whose batches are on the device; it marks the last one."""

    def __init__(self, loader: Any, device: torch.device, steps: _Steps, *, skip: int = 0) -> None:
        self.base_dataloader, self._device, self._steps, self._skip = loader, device, steps, skip

    def __len__(self) -> int:
        return len(self.base_dataloader) - self._skip

    def __iter__(self) -> Iterator[Any]:
        self._steps.at_end_of_data = False
        batches = iter(self.base_dataloader)
        for _ in range(self._skip):
            next(batches, None)
        end = object()
        batch = next(batches, end)
        while batch is not end:  # one batch ahead, since only the next one shows which is the last
            following = next(batches, end)
            self._steps.at_end_of_data = following is end
            yield _moved(batch, self._device)
            batch = following
        self._steps.at_end_of_data = False

    def __getattr__(self, name: str) -> Any:  # scripts ask for dataset, batch_size, sampler
        return getattr(self.base_dataloader, name)


def _moved(value: Any, device: torch.device) -> Any:
    """Every tensor of a batch on the device."""
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    return _each(value, lambda item: _moved(item, device))


def _in_fp32(value: Any) -> Any:
    """Outputs of a forward under autocast as accelerate returns them: 16-bit floats in fp32."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, dict):
        for key in list(value):
            value[key] = _in_fp32(value[key])  # in place: a model's output has a class of its own
        return value
    return _each(value, _in_fp32)


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """A list, tuple or named tuple with every item changed; anything else as it is."""
    if not isinstance(value, (list, tuple)):
        return value
    items = [change(item) for item in value]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


class NoOpAccelerator:
    """One process with the methods and attributes of `accelerate.Accelerator` that scripts use.

    What needs accelerate itself (FSDP, DeepSpeed, trackers, hooks, profiles) is missing, and the error says so.

    Raises:
        ConfigError: fp16, whose loss accelerate scales.
    """

    distributed_type: str = "NO"
    """Equal to accelerate's `DistributedType.NO`."""
    num_processes = 1
    process_index = local_process_index = 0
    is_main_process = is_local_main_process = is_last_process = True
    use_distributed = multi_device = split_batches = optimizer_step_was_skipped = is_fsdp2 = False
    should_save_model = even_batches = True
    deepspeed_plugin = parallelism_config = scaler = project_dir = logging_dir = dispatch_batches = None

    def __init__(
        self, mixed_precision: Literal["no", "bf16", "fp16"] | None = None, gradient_accumulation_steps: int = 1
    ) -> None:
        if mixed_precision == "fp16":
            raise ConfigError("mixed_precision: fp16 needs accelerate, which scales the loss; set bf16 or no")
        self.mixed_precision = mixed_precision or "no"
        current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self.device = torch.device(current.type, 0) if current is not None else torch.device("cpu")
        self.trackers: list[Any] = []
        self.dist_config: Any = None
        self._steps = _Steps(gradient_accumulation_steps)
        self._models: list[torch.nn.Module] = []
        self._optimizers: list[_Optimizer] = []
        self._schedulers: list[_Scheduler] = []
        self._dataloaders: list[_Loader] = []
        self._custom_objects: list[Any] = []
        self._trigger = False

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"NoOpAccelerator has no {name}: one process without accelerate; pip install accelerate")

    @property
    def state(self) -> NoOpAccelerator:
        """Itself: `accelerator.state.num_processes` is what scripts ask."""
        return self

    @property
    def sync_gradients(self) -> bool:
        """Whether this is the last micro-batch of an accumulation."""
        return self._steps.is_last

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        """Set whether this is the last micro-batch, where your own loop counts."""
        self._steps.is_last = sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self._steps.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        """Set the number, from the next micro-batch on."""
        self._steps.num_steps = gradient_accumulation_steps

    # Preparing.

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Each object prepared by its type, in the given order; a single one is not returned as a tuple."""
        by_type: dict[type, Callable[[Any], Any]] = {
            torch.nn.Module: self.prepare_model, torch.optim.Optimizer: self.prepare_optimizer,
            LRScheduler: self.prepare_scheduler, DataLoader: self.prepare_data_loader,
        }  # fmt: skip
        prepared = tuple(
            next((prepare(item) for kind, prepare in by_type.items() if isinstance(item, kind)), item) for item in args
        )
        return prepared[0] if len(prepared) == 1 else prepared

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """The model on the device, its forward under autocast with outputs in fp32."""
        if any(prepared is model for prepared in self._models):
            return model
        self._models.append(model)
        if device_placement is not False and getattr(model, "hf_device_map", None) is None:
            model = model.to(self.device)
        if self.mixed_precision == "bf16":
            forward = model.forward

            @functools.wraps(forward)
            def autocast_forward(*args: Any, **kwargs: Any) -> Any:
                with self.autocast():
                    outputs = forward(*args, **kwargs)
                return _in_fp32(outputs)

            autocast_forward._plain = forward  # type: ignore[attr-defined]
            model.forward = autocast_forward  # the instance's: `unwrap_model` removes it, and the class keeps its own
        return model

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: Any = None) -> Any:
        """The optimizer, which steps at the end of an accumulation."""
        return self._wrapped(optimizer, _Optimizer, self._optimizers, self._steps)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """The scheduler, which steps with the optimizer."""
        return self._wrapped(scheduler, _Scheduler, self._schedulers, self._steps)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """The data loader, with its batches on the device."""
        return self._wrapped(data_loader, _Loader, self._dataloaders, self.device, self._steps)

    def _wrapped(self, item: Any, wrapper: type, wrapped: list[Any], *arguments: Any) -> Any:
        """The item in its wrapper, which is added to the list; an item that has it already stays."""
        if not isinstance(item, wrapper):
            item = wrapper(item, *arguments)
            wrapped.append(item)
        return item

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """The same data loader without its first batches, to continue within an epoch."""
        base = dataloader.base_dataloader if isinstance(dataloader, _Loader) else dataloader
        return _Loader(base, self.device, self._steps, skip=num_batches)

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """The model itself; without `keep_fp32_wrapper` its own forward too."""
        plain = getattr(model.__dict__.get("forward"), "_plain", None)
        if not keep_fp32_wrapper and plain is not None:
            del model.forward
        if not keep_torch_compile:
            model = getattr(model, "_orig_mod", model)
        return model

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """The model's state dictionary."""
        return model.state_dict()

    # One step.

    @contextlib.contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """One micro-batch: gradients accumulate until the last one of a step, or of the data."""
        if self._steps.at_end_of_data:  # the data's last batch ends a step early, as accelerate has it
            self._steps.step, self._steps.is_last = 0, True
        else:
            self._steps.step += 1
            self._steps.is_last = self._steps.step % self._steps.num_steps == 0
        yield

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """One process has nothing to synchronise."""
        yield

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: Any = None) -> Iterator[None]:
        """One process has nothing to wait for."""
        yield

    @contextlib.contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """bf16 where the settings ask for it."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.mixed_precision == "bf16"):
            yield

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Gradients of the loss, divided by the accumulation steps."""
        (loss / self._steps.num_steps).backward(**kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Nothing: no loss was scaled."""

    def clip_grad_norm_(self, parameters: Any, max_norm: Any, norm_type: Any = 2) -> torch.Tensor:
        """torch's own; returns the norm before clipping."""
        norm: torch.Tensor = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        return norm

    def clip_grad_value_(self, parameters: Any, clip_value: Any) -> None:
        """torch's own."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def set_trigger(self) -> None:
        """Set the flag that `check_trigger` looks for on every process, here one."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Whether the flag was set; reading clears it."""
        was_set, self._trigger = self._trigger, False
        return was_set

    # Collectives, over one process.

    def gather(self, tensor: Any) -> Any:
        """The tensor of each process: a number becomes a vector of one."""
        if isinstance(tensor, torch.Tensor):
            return tensor.clone()[None] if tensor.ndim == 0 else tensor
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """The input: no row is repeated to fill a batch."""
        return input_data

    def reduce(self, tensor: Any, reduction: Any = "sum", scale: Any = 1.0) -> Any:
        """Sum or mean over processes, scaled."""
        return tensor

    def pad_across_processes(self, tensor: Any, dim: Any = 0, pad_index: Any = 0, pad_first: Any = False) -> Any:
        """The input: there is no longer one."""
        return tensor

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """All inputs."""
        yield inputs

    def wait_for_everyone(self) -> None:
        """Nothing to wait for."""

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """This is the main process."""
        yield

    local_main_process_first = main_process_first

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """The function unchanged: it runs here."""
        return function if function is not None else self.on_main_process

    on_local_main_process = on_main_process

    def on_last_process(self, function: Callable[..., Any]) -> Any:
        """The function unchanged: it runs here."""
        return function

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """The function if it is for this process, else one that does nothing."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return function if process_index in (None, 0) else lambda *args, **kwargs: None

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """The function if it is for this process, else one that does nothing."""
        return self.on_process(function, process_index=local_process_index)

    # Logging and saving.

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, on the main process."""
        stream = kwargs.pop("file", None) or sys.stdout
        stream.write(kwargs.pop("sep", " ").join(map(str, args)) + kwargs.pop("end", "\n"))
        if kwargs.pop("flush", False):
            stream.flush()

    def init_trackers(
        self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Trackers are accelerate's; `log` writes values to the log."""

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Write the values to the log."""
        logger.info("%s%s", "" if step is None else f"step {step}: ", values)

    def end_training(self) -> None:
        """There is nothing to close."""

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Save an object to a file, as safetensors if asked."""
        if safe_serialization:
            from safetensors.torch import save_file

            save_file(obj, f, metadata={"format": "pt"})
        else:
            torch.save(obj, f)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save the weights as `model.safetensors` in a folder."""
        from safetensors.torch import save_model

        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Let `save_state` save the state of these objects too."""
        for item in objects:
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
                raise ValueError(f"{type(item).__name__} has no state_dict and load_state_dict, so it cannot be saved")
        self._custom_objects += objects

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> str:
        """Save models, optimizers, schedulers, registered objects and random states, in one file in a folder."""
        if output_dir is None:
            raise ValueError("save_state needs output_dir: no project folder is kept without accelerate")
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        states = {name: [item.state_dict() for item in items] for name, items in self._kept().items()}
        torch.save({**states, "random": torch.get_rng_state(), "step": self._steps.step}, folder / "one_process.pt")
        return str(folder)

    def load_state(
        self,
        input_dir: str | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load what `save_state` wrote into the prepared and registered objects."""
        if input_dir is None:
            raise ValueError("load_state needs input_dir: no project folder is kept without accelerate")
        states = torch.load(Path(input_dir) / "one_process.pt", map_location="cpu", weights_only=True)
        for name, items in self._kept().items():
            for item, state in zip(items, states[name], strict=True):
                item.load_state_dict(state)
        torch.set_rng_state(states["random"])
        self._steps.step = states["step"]

    def _kept(self) -> dict[str, list[Any]]:
        return {
            "models": [*self._models],
            "optimizers": [*self._optimizers],
            "schedulers": [*self._schedulers],
            "objects": self._custom_objects,
        }

    def free_memory(self, *objects: Any) -> list[Any]:
        """Drop what was prepared; `a, b = accelerator.free_memory(a, b)` also frees those names."""
        for items in (self._models, self._optimizers, self._schedulers, self._dataloaders):
            items.clear()
        self._steps.step = 0
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return [None] * len(objects)

    clear = free_memory
