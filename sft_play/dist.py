"""Small helpers for people's own training scripts and notebooks, over accelerate and DeepSpeed (docs/dist.md)."""

from sft_play.accelerate_helpers.accelerator import NoOpAccelerator, get_accelerator, wrap_model_optimizer
from sft_play.accelerate_helpers.saving import save_sharded
from sft_play.accelerate_helpers.settings import DistConfig

__all__ = ["DistConfig", "NoOpAccelerator", "get_accelerator", "save_sharded", "wrap_model_optimizer"]
