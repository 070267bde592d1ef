"""Settings of the environment that the libraries read when they are imported."""

from __future__ import annotations

import logging
import os

from sft_play.environment import deepspeed_on_cpu
from sft_play.facts.hardware import Hardware
from sft_play.facts.models.architecture import hub_answers, local_folder
from sft_play.launch.device import allow_fp16, allow_fused_attention, without_bad_p2p

logger = logging.getLogger(__name__)


def prepare_libraries(model: str, hardware: Hardware) -> None:
    """Settings that the libraries read when they are imported."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if not hardware.gpus:
        deepspeed_on_cpu()
    allow_fused_attention(hardware, os.environ)
    allow_fp16(hardware, os.environ)
    without_bad_p2p(hardware, os.environ)
    offline_without_hub(model)


def offline_without_hub(name: str) -> None:
    """Before the libraries are imported, keep them from waiting for a hub that does not answer."""
    if local_folder(name) is None and not hub_answers():
        logger.info("The hub cannot be reached: %s is looked for in the local cache only", name)
        os.environ["HF_HUB_OFFLINE"] = "1"
