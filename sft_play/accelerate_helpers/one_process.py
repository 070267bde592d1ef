"""`NoOpAccelerator`: what a training loop calls of accelerate's interface, for one process without that package."""

from __future__ import annotations

import builtins
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map  # private, but transformers registers its outputs with it too
from torch.utils.data import DataLoader

from sft_play.errors import BackendError


class NoOpAccelerator:
    """One process with the methods and attributes of `accelerate.Accelerator` that a training loop uses. They do the
    same: autocast, accumulation (optimizer and scheduler steps in between do nothing), batches on the device. The error
    for any other (hooks, `save_state`), and for fp16, says that accelerate is missing."""

    distributed_type: str = "NO"  # equal to accelerate's DistributedType.NO
    num_processes = 1
    process_index = local_process_index = 0
    is_main_process = is_local_main_process = is_last_process = sync_gradients = True
    use_distributed = optimizer_step_was_skipped = is_fsdp2 = False
    dist_config: Any = None
    deepspeed_plugin = scaler = None
    print = staticmethod(builtins.print)
    clip_grad_norm_ = staticmethod(torch.nn.utils.clip_grad_norm_)
    clip_grad_value_ = staticmethod(torch.nn.utils.clip_grad_value_)
    free_memory = staticmethod(lambda *objects: [None] * len(objects))  # a, b = free_memory(a, b) drops both
    # over one process: nothing to wait for or to report to trackers, nothing to combine, nowhere else to run
    wait_for_everyone = init_trackers = log = end_training = staticmethod(lambda *args, **kwargs: None)
    gather = staticmethod(torch.atleast_1d)
    gather_for_metrics = reduce = pad_across_processes = staticmethod(lambda value, *args, **kwargs: value)
    on_main_process = on_local_main_process = on_last_process = staticmethod(lambda function: function)
    main_process_first = local_main_process_first = staticmethod(lambda: nullcontext())
    no_sync = join_uneven_inputs = split_between_processes = staticmethod(lambda value, *args, **kw: nullcontext(value))

    def __init__(self, mixed_precision: str | None = None, gradient_accumulation_steps: int = 1) -> None:
        if mixed_precision == "fp16":
            raise BackendError("fp16 needs accelerate, which scales the loss; set mixed_precision: bf16 or no")
        self.mixed_precision = mixed_precision or "no"
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        self.state = self  # `accelerator.state.num_processes` is what scripts ask
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
    to_fp32 = functools.partial(
        tree_map, lambda value: value.float() if getattr(value, "dtype", 0) == torch.bfloat16 else value
    )
    return functools.wraps(forward)(lambda *args, **kwargs: to_fp32(forward(*args, **kwargs)))


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
