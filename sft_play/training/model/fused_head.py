"""TRL's fused head on a model that no trainer holds: log-probabilities of trained tokens without
whole logits; and one over whole logits for classes whose logits TRL does not compute."""

import contextlib
import functools
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from accelerate.utils import is_peft_model
from peft.utils import TrainableTokensWrapper

from sft_play.data.masks.token_row import IGNORED
from sft_play.process.environment import set_deepspeed_to_cpu
from sft_play.training.prepare.experts import fit_balance_loss


def set_backbone_prefix(model: Any) -> None:
    """Let `base_model` be the model without its head, which TRL's loss calls: Llama 4's text class
    names a part that it lacks (transformers 5.23). Of a head whose rows train it asks the bias,
    which PEFT's wrapper lacks (0.21).
    """
    if model.base_model is model and isinstance(getattr(model, "model", None), torch.nn.Module):
        model.base_model_prefix = "model"
    head = model.get_output_embeddings()
    if isinstance(head, TrainableTokensWrapper):
        head.bias = None  # `prepare.lora_config` refuses one


def use_class_logits(model: Any) -> None:
    """Let the model answer `fused_lm_head=True` from its class's own logits [B, T, V]: TRL
    multiplies the last hidden states by the head, and knows a few factors and caps."""
    from trl.trainer.utils import FusedCausalLMOutput

    class_forward = model.forward

    @functools.wraps(type(model).forward)  # `generate` looks at its parameters
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **options: Any) -> Any:
        if not fused_lm_head:
            return class_forward(*args, **options)
        labels, shift_labels = options.pop("labels", None), options.pop("shift_labels", None)
        output = class_forward(*args, **options)
        logits = output.logits if shift_labels is not None else output.logits[:, :-1]
        labels = (shift_labels if shift_labels is not None else labels[:, 1:]).to(logits.device)
        mask = labels != IGNORED
        vocabulary_log_probs = logits.float().log_softmax(-1)
        log_probs = vocabulary_log_probs.gather(-1, labels.clamp(min=0)[..., None])[
            ..., 0
        ].masked_fill(~mask, 0)
        with torch.no_grad():  # row by row: it would be as large as the logits
            entropy = torch.stack(
                [-(row.exp() * row).sum(-1) for row in vocabulary_log_probs]
            ).masked_fill(~mask, 0)
            is_correct = (logits.argmax(-1) == labels) & mask
        return FusedCausalLMOutput(
            loss=-log_probs.sum() / mask.sum().clamp(min=1),
            log_probs=log_probs,
            entropy=entropy,
            is_top1=is_correct,
            label_mask=mask,
            aux_loss=getattr(output, "aux_loss", None),
        )

    model.forward = MethodType(forward, model)


@contextlib.contextmanager
def fused_head(model: Any, *, from_class_logits: bool = False) -> Iterator[None]:
    """While it lasts, the model takes `fused_lm_head=True` and then returns `log_probs`, `is_top1`
    and `label_mask` of the labels from the second on, each [B, T - 1], as under TRL's trainer;
    `from_class_logits`: of its class's own logits."""
    if not torch.cuda.is_available():
        set_deepspeed_to_cpu()
    # imports the whole of TRL's utilities, DeepSpeed among them
    from trl.trainer.utils import add_fused_lm_head

    base = model.get_base_model() if is_peft_model(model) else model
    set_backbone_prefix(base)
    fit_balance_loss(base.config.get_text_config())
    # TRL sets its own on the instance, over the class's
    previous_forward = base.__dict__.get("forward")
    if from_class_logits:
        use_class_logits(base)
    else:
        add_fused_lm_head(base, outputs=("log_probs", "is_top1"))
    try:
        yield
    finally:
        if previous_forward is None:
            del base.forward
        else:
            base.forward = previous_forward
