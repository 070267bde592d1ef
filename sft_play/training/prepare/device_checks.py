"""Whether the planned device is usable, how much of its memory is free, and the message where it
runs out."""

import contextlib
import gc
import logging
import os
import re
from collections.abc import Iterator

import torch

from sft_play.config.schema import BITSANDBYTES_OPTIMIZERS, RunConfig
from sft_play.errors import DoesNotFit, HardwareError, OutOfMemory, SftPlayError
from sft_play.log import one_line
from sft_play.machine.visible_gpus import CPU_HINT, explain_unusable_torch
from sft_play.planner.batching import BatchPlan
from sft_play.planner.memory.estimate import DESKTOP_BYTES
from sft_play.planner.plan import Plan
from sft_play.process.environment import format_allocator_setting
from sft_play.text import GIB

logger = logging.getLogger(__name__)


def check_device(plan: Plan, config: RunConfig) -> None:
    """Raises HardwareError where torch cannot use the planned GPU, or sees one that the plan does
    not know of."""
    device, has_cuda = plan.hardware.device, torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        reason = "it finds none"
        try:
            torch.cuda.init()
        except Exception as error:  # the exception's type differs between builds
            reason = str(error)
        raise HardwareError(explain_unusable_torch(plan.hardware.gpus[0].name, reason))
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if device == "cpu" and config.train.device == "auto" and torch.accelerator.is_available():
        raise HardwareError(
            f"torch sees an accelerator ({torch.accelerator.current_accelerator()}) that no run is"
            f" planned for (make gpu-info): {CPU_HINT}"
        )


def check_gpu(plan: Plan, config: RunConfig) -> None:
    """Compare the plan with what the GPU can do and has free, before anything is loaded. Raises
    HardwareError: torch or bitsandbytes has no kernels for it; DoesNotFit: less is free than
    planned, and the batch was the plan's.
    """
    if plan.hardware.device != "cuda":
        return
    try:
        torch.zeros(1, device="cuda").add_(1).item()  # creates the CUDA context too
    except torch.OutOfMemoryError:
        pass  # what is free says it
    # torch.AcceleratorError: no kernel image is available for execution on the device
    except RuntimeError as error:
        raise HardwareError(
            f"torch {torch.__version__} cannot compute on {plan.hardware.gpus[0].name}:"
            f" {one_line(str(error), limit=200)} It was built for"
            f" {' '.join(torch.cuda.get_arch_list()) or 'no GPU'}; install a build for"
            " this GPU (make doctor)"
        ) from error
    if config.tuning.mode == "qlora" or config.train.optim in BITSANDBYTES_OPTIMIZERS:
        from bitsandbytes import cextension

        # every call of it would raise
        if isinstance(cextension.lib, cextension.ErrorHandlerMockBNBNativeLibrary):
            raise HardwareError(
                f"bitsandbytes has no library that works with torch for CUDA {torch.version.cuda}:"
                " install another version of it (make doctor), or use tuning.mode=lora with"
                " train.optim=adamw_torch_fused"
            )
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    needed_bytes = plan.memory.reserved + plan.memory.margin
    logger.debug(
        "GPU memory: %.1f GiB free after the CUDA context, %.1f planned",
        free_bytes / GIB,
        needed_bytes / GIB,
    )
    if plan.hardware.pages:
        # Windows' driver would page GPU memory to the host, where a step takes many times as long,
        # without a message
        limit_bytes = (
            min(free_bytes + torch.cuda.memory_reserved(), plan.budget_bytes) - DESKTOP_BYTES
        )
        limit_bytes = max(0, min(limit_bytes, total_bytes))
        torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes)
        logger.info(
            "WSL: this process may use %.1f GiB of the GPU and runs out of memory there; beyond it"
            " Windows' driver would page to the host's memory, many times as slow (%.1f GiB of what"
            " is free are left to the desktop)",
            limit_bytes / GIB,
            DESKTOP_BYTES / GIB,
        )
    logger.debug("%s", format_allocator_setting(os.environ))
    if needed_bytes <= free_bytes:
        return
    message = (
        f"{needed_bytes / GIB:.1f} GiB are planned, but only {free_bytes / GIB:.1f}"
        " are free on the GPU now: another process took memory since the plan was"
        " made; end it (nvidia-smi lists them) and start again"
    )
    if config.train.batch_size == "auto" and config.train.grad_accum == "auto":
        raise DoesNotFit(message)
    logger.warning("%s; continuing because the batch was given", message)


# What torch, its libraries, bitsandbytes and NCCL say where memory lacks, without a type of its own
# for it.
_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|not enough memory|cannot allocate"
    r" memory|ALLOC_FAILED|MemoryAllocation",
    re.I,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is a lack of memory, of a device or of the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return not isinstance(error, SftPlayError)
    return isinstance(error, RuntimeError) and bool(_OUT_OF_MEMORY.search(str(error)))


def free_memory() -> None:
    """Give the memory of what was deleted back to the device."""
    # modules and hooks refer to each other in circles, which `del` alone does not free
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def explain_out_of_memory(plan: Plan) -> Iterator[None]:
    """Raises OutOfMemory in place of an error inside that says that memory lacks."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(out_of_memory_message(plan, error), batch=plan.batch) from error


def out_of_memory_message(plan: Plan, error: BaseException, batch: BatchPlan | None = None) -> str:
    """What was predicted and what to do; `batch`: how rows were divided when memory ran out, None
    as planned."""
    batch = batch or plan.batch
    halved_words = "" if batch == plan.batch else f", and it ran out with {batch.micro_batch} too"
    hint = "more GPUs, or a new run with a shorter model.max_seq_len"
    if (halved := batch.halved) is not None:
        hint = (
            f"SET='train.batch_size={halved.micro_batch} train.grad_accum={halved.grad_accum}',"
            " which resume takes too"
        )
    elif plan.choice.checkpointing is not True:
        hint = "SET=train.gradient_checkpointing=true, which resume takes too"
    return (
        f"CUDA out of memory; the plan predicted {plan.memory.required / GIB:.1f} of"
        f" {plan.budget_bytes / GIB:.1f} GiB with micro-batch"
        f" {plan.batch.micro_batch}{halved_words} ({one_line(str(error), limit=300)}). Check with"
        f" nvidia-smi whether another process took memory meanwhile; try {hint}"
    )
