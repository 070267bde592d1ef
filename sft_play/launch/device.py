"""The device that a run uses: the detected GPUs, or the CPU where no GPU is expected or the CPU is asked for."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence

from sft_play.config.schema import RunConfig
from sft_play.errors import HardwareError
from sft_play.facts.compiler import require_compiler, require_for_blocks
from sft_play.facts.gpus import nvml
from sft_play.facts.gpus.unseen import HIDING, ON_CPU, read_devices, unseen
from sft_play.facts.hardware import Hardware
from sft_play.facts.models.architecture import hub_answers, local_folder
from sft_play.log import one_line
from sft_play.process.environment import deepspeed_on_cpu

P2P_OFF = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
"""What accelerate asks for on several RTX 40 with an older driver than `_P2P_DRIVER`."""
_P2P_DRIVER = [550, 40, 7]

logger = logging.getLogger(__name__)

CPU_PARAMS = 1_000_000_000
"""Parameters above which a model is trained on a CPU only if that is asked for: a step takes minutes."""


def machine_for(config: RunConfig, hardware: Hardware) -> Hardware:
    """This machine as `train.device` restricts it."""
    return hardware.without_gpus() if config.train.device == "cpu" else hardware


def hide_gpus(config: RunConfig, environment: MutableMapping[str, str]) -> None:
    """Hide all GPUs from libraries imported later and from ranks, where the CPU is asked for: with -1, because AMD's
    HIP reads an empty list as unset."""
    if config.train.device == "cpu":
        if environment.get(HIDING[0]) != "-1":  # for a rank, the parent has logged it already
            logger.info("train.device=cpu: no GPU is used or looked for")
        environment.update(dict.fromkeys(HIDING, "-1"))


def without_bad_p2p(hardware: Hardware, environment: MutableMapping[str, str]) -> None:
    """Switch NCCL's P2P and InfiniBand off where accelerate would refuse to start: call it before accelerate's state
    is made, for one process as well."""
    if not hardware.gpus or P2P_OFF.keys() <= environment.keys():
        return
    names, driver = _cards()
    if refuses_p2p(names, driver):
        missing = {name: text for name, text in P2P_OFF.items() if name not in environment}
        environment.update(missing)
        logger.warning("%s: driver %s of several RTX 40 offers a P2P that hangs; driver 550.40.07 or newer does not",
                       " ".join(f"{name}={text}" for name, text in missing.items()), driver)  # fmt: skip


def refuses_p2p(names: Sequence[str], driver: str | None) -> bool:
    """accelerate's own rule (utils/environment.py, `check_cuda_p2p_ib_support`): the machine has several GPUs, visible
    or not, one of them an RTX 40, and an older driver; however many processes there are."""
    version = [int(part) for part in re.findall(r"\d+", driver or "")]
    return len(names) > 1 and any("RTX 40" in name for name in names) and bool(version) and version < _P2P_DRIVER


def _cards() -> tuple[list[str], str | None]:
    """The names of all GPUs of this machine, and its driver."""
    seen = nvml.see(details=False, topology=False)
    return ([gpu.name or "" for gpu in seen.gpus], seen.driver) if seen else ([], None)


def allow_fp16(hardware: Hardware, environment: MutableMapping[str, str]) -> None:
    """Let DeepSpeed train in fp16 on Pascal, the only 16 bits that it has: without the variable its engine refuses to
    start on compute capability 6.x (accelerator/cuda_accelerator.py, `is_fp16_supported`)."""
    if any(gpu.capability and gpu.capability[0] == 6 for gpu in hardware.gpus):
        environment.setdefault("DS_ALLOW_DEPRECATED_FP16", "1")


def require_machine(
    config: RunConfig, hardware: Hardware, environment: Mapping[str, str], *, params: Callable[[], int]
) -> None:
    """Check, before anything loads, that a run on this machine is what its user expects and can take a step.

    Args:
        params: the model's parameters; asked for a run on the CPU only.

    Raises:
        HardwareError: there is an accelerator that would not be used, the model is too large for a CPU, Triton cannot
            build what the loss needs, blocks are to be compiled and inductor cannot, or flash-attn 2 has no kernels.
    """
    if config.train.compile:
        require_for_blocks(hardware, environment)
    flash = flash_obstacle(config, hardware)
    if flash is not None:
        raise HardwareError(f"model.attn_implementation: {flash[0]}; {flash[1]}")
    if hardware.gpus:
        return require_compiler(hardware, environment)
    if config.train.device == "cpu":
        return None
    accelerator = unseen(read_devices(environment))
    if accelerator is not None:
        raise HardwareError(accelerator.message)
    count = params()  # asked last: for a model of the hub it fetches the config
    if count > CPU_PARAMS:
        raise HardwareError(too_large(config.model.name, count))
    return None


def flash_obstacle(config: RunConfig, hardware: Hardware) -> tuple[str, str] | None:
    """What keeps flash-attn 2 from this machine, and what to do; None where it runs, or is not asked for."""
    if config.model.attn_implementation != "flash_attention_2":
        return None
    if not hardware.gpus:
        return "flash_attention_2 has kernels for GPUs, and this run uses the CPU", "use auto"
    old = [gpu for gpu in hardware.gpus if gpu.capability and gpu.capability < (8, 0)]
    if not old:
        return None
    return (
        f"flash_attention_2 needs GPUs from Ampere on (compute capability 8.0), and {old[0].name} has "
        f"{'.'.join(map(str, old[0].capability or ()))}",
        "use auto",
    )


def say_unseen(config: RunConfig, hardware: Hardware, environment: Mapping[str, str]) -> None:
    """Warn, beside a plan for this machine's CPU, that a run here would not start."""
    if not hardware.named and hardware.device == "cpu" and config.train.device == "auto":
        accelerator = unseen(read_devices(environment))
        if accelerator is not None:
            logger.warning("a run here would stop: %s", accelerator.message)


def too_large(name: str, params: int) -> str:
    """The message for a model that is too large to train on a CPU by mistake."""
    return (
        f"no GPU was detected here, and {one_line(name)} has {params / 1e9:.1f} billion parameters: make gpu-info "
        f"shows what this machine has; or {ON_CPU}"
    )


def prepare_libraries(model: str, hardware: Hardware) -> None:
    """Settings that the libraries read when they are imported."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if not hardware.gpus:
        deepspeed_on_cpu()
    allow_fp16(hardware, os.environ)
    without_bad_p2p(hardware, os.environ)
    offline_without_hub(model)


def offline_without_hub(name: str) -> None:
    """Before the libraries are imported, keep them from waiting for a hub that does not answer."""
    if local_folder(name) is None and not hub_answers():
        logger.info("The hub cannot be reached: %s is looked for in the local cache only", name)
        os.environ["HF_HUB_OFFLINE"] = "1"
