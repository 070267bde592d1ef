"""Whether rows that are padded or packed come with an attention mask: decided from shapes, measured before a run by
`training.proofs.unmasked` and `training.proofs.boundaries`.

Attention is causal and padding is at the end, so no token of a chat sees a padded place, mask or not. Chats that share
a row are told apart by their boundaries: PyTorch's flash kernel takes those of many chats, and keys stay grouped; where
it does not run, each chat is a call of its own. No S x S mask is held.
"""

from __future__ import annotations

from sft_play.config.schema import RunConfig
from sft_play.facts.models.model_shape import ModelShape
from sft_play.planner.attention import FLASH_HEAD, FLASH_SINCE, flash_runs


def why_masked(
    config: RunConfig, shape: ModelShape, *, attention: str, capability: tuple[int, int] | None, on_gpu: bool
) -> str | None:
    """Why padded rows keep their mask, as the end of a sentence; None where they need none.

    Args:
        capability: the GPU's compute capability; None where it is unknown, which counts as a current one.
    """
    if attention == "eager":
        return "eager attention computes every score, with a mask or without"
    if shape.num_experts:  # load_balancing_loss_func counts padding as tokens where there is no mask
        return "the balance loss of its experts leaves out padding by the mask"
    if any(kind.attention == "none" for kind in shape.layers):
        return "some of its layers carry a state from token to token, and read the mask"
    if shape.alibi:
        return "its positions are a bias that is added to a mask"
    if on_gpu and capability is not None and capability < FLASH_SINCE:
        return "flash attention does not run on this GPU"
    if config.tuning.backend == "unsloth":
        return "Unsloth has attention of its own, which is not measured here"
    return None


def why_no_boundaries(config: RunConfig, shape: ModelShape, *, attention: str) -> str | None:
    """Why packs keep a mask between their chats, as the end of a sentence; None where their boundaries are enough."""
    if config.model.attn_implementation != "auto":
        return f"model.attn_implementation={config.model.attn_implementation}"
    if attention != "sdpa":
        return f"the model's class runs {attention} attention"
    if any(kind.attention in ("none", "chunked") for kind in shape.layers):
        return "some of its layers see a state or chunks, which boundaries do not say"
    if shape.alibi:
        return "its positions are a bias that is added to a mask"
    if shape.attention_dropout:
        return "attention between boundaries has no dropout"
    if config.tuning.backend == "unsloth":
        return "Unsloth has attention of its own, which is not measured here"
    return None


def why_one_by_one(shape: ModelShape, *, half: bool, capability: tuple[int, int] | None, device: str) -> str | None:
    """Why each chat between boundaries is attended to by a call of its own, as the end of a sentence; None where one
    call of PyTorch's flash kernel takes them all.

    Args:
        half: whether attention computes in fp16 or bf16.
        capability: the GPU's compute capability; None where it is unknown, which counts as a current one.
        device: `cuda`, `rocm` or `cpu`. On ROCm torch has the call by AOTriton since 2.11
            (https://github.com/huggingface/kernels/pull/401).
    """
    if device not in ("cuda", "rocm"):
        return f"no kernel for boundaries runs on {device}"
    if shape.mla is not None:  # flash attention takes one width for all three
        return "its keys and values have different widths"
    if shape.head_dim > FLASH_HEAD:
        return f"flash attention takes no heads wider than {FLASH_HEAD}"
    if device == "cuda":
        runs = flash_runs(half=half, capability=capability)
        return None if runs else "flash attention does not run on this GPU in this precision"
    return None if half else "flash attention does not run in this precision"
