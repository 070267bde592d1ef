"""`tuning.lora.target_modules`: names that match no layer of the model are refused before anything loads."""

from __future__ import annotations

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.facts.models.families import why_no_adapter
from sft_play.facts.models.model_shape import ModelShape
from sft_play.log import one_line
from sft_play.spelling import did_you_mean

OUTPUT_HEADS = ("lm_head", "embed_out")
"""What transformers calls the output head."""


def check_targets(config: RunConfig, shape: ModelShape) -> None:
    """Raises ConfigError for names in tuning.lora.target_modules that match no linear layer, as training does."""
    targets = config.tuning.lora.target_modules
    if config.tuning.mode == "full" or targets == "auto":
        return
    layers = [linear for linear, _ in shape.linears if linear.adaptable]
    names = sorted({linear.name for linear in layers})
    problems = []
    for target in targets:
        if target in OUTPUT_HEADS:
            problems.append(f"{target} is the output head, which takes no adapter (the loss reads its weight)")
        elif any(linear.matches(target) for linear in layers):
            continue
        elif why := _why_none(target, shape):
            problems.append(f"{one_line(target)}: {why}")
        else:
            near = did_you_mean(target, names)
            hint = f" ({near})" if near else ""
            problems.append(f"{one_line(target)} matches nothing{hint}")
    if problems:
        listed = f"The linear layers are: {', '.join(names)}; auto takes these"
        raise ConfigError(f"tuning.lora.target_modules: {'; '.join(problems)}. {listed}")


def _why_none(target: str, shape: ModelShape) -> str | None:
    """Why the linear layers of this name get no adapter; None where there are none."""
    if shape.adapters is not None:
        return next((why for path, why in shape.adapters.left_out if f".{path}".endswith(f".{target}")), None)
    has_one = any(linear.matches(target) for linear, _ in shape.linears)
    return why_no_adapter(shape.model_type, target.rpartition(".")[2]) if has_one else None
