"""TRL's fused head on a model that no trainer holds: log-probabilities of trained tokens without whole logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import is_peft_model
from peft.utils import TrainableTokensWrapper

from sft_play.process.environment import deepspeed_on_cpu
from sft_play.training.prepare.experts import fit_balance_loss


def name_backbone(model: Any) -> None:
    """Let `base_model` be the model without its head, which TRL's loss calls: Llama 4's text class names a part that it
    lacks (transformers 5.23). Of a head whose rows train it asks the bias, which PEFT's wrapper lacks (0.21)."""
    if model.base_model is model and isinstance(getattr(model, "model", None), torch.nn.Module):
        model.base_model_prefix = "model"
    head = model.get_output_embeddings()
    if isinstance(head, TrainableTokensWrapper):
        head.bias = None  # `prepare.lora_config` refuses one


@contextlib.contextmanager
def fused_head(model: Any) -> Iterator[None]:
    """While it lasts, the model takes `fused_lm_head=True` and then returns `log_probs`, `is_top1` and `label_mask` of
    the labels from the second on, each [B, T - 1], as under TRL's trainer."""
    if not torch.cuda.is_available():
        deepspeed_on_cpu()
    from trl.trainer.utils import add_fused_lm_head  # imports the whole of TRL's utilities, DeepSpeed among them

    base = model.get_base_model() if is_peft_model(model) else model
    name_backbone(base)
    fit_balance_loss(base.config.get_text_config())
    before = base.__dict__.get("forward")  # TRL sets its own on the instance, over the class's
    add_fused_lm_head(base, outputs=("log_probs", "is_top1"))
    try:
        yield
    finally:
        if before is None:
            del base.forward
        else:
            base.forward = before
