"""The LoRA config of a run: which linear layers get adapters, with every name of the YAML checked against the model."""

from __future__ import annotations

import difflib
from typing import Any

from peft import LoraConfig as PeftLoraConfig
from torch import nn
from transformers.pytorch_utils import Conv1D

from sft_play.config.schema import RunConfig
from sft_play.errors import ModelError
from sft_play.facts.families import MOVED_WORDS, takes_adapter
from sft_play.log import one_line

_SHOWN_NAMES = 24
"""Names of linear layers that an error lists at most."""


def peft_config_of(config: RunConfig, skeleton: Any) -> PeftLoraConfig:
    """PEFT's config for a model of this class, whose weights may be on the meta device.

    Raises:
        ModelError: a target or a module to save matches nothing, or a module gets both.
    """
    lora, kind = config.tuning.lora, str(skeleton.config.model_type)
    layers = {
        name: layer for name, layer in linear_layers(skeleton).items() if takes_adapter(kind, name.rpartition(".")[2])
    }
    if lora.target_modules == "auto":
        targets = sorted({name.rpartition(".")[2] for name in layers})
        if not targets:
            raise ModelError(f"{config.model.name} has no linear layers that an adapter could take")
    else:
        targets = list(lora.target_modules)
        _check_targets(targets, layers, skeleton)
    _check_saved(config, targets, skeleton)
    return PeftLoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        modules_to_save=list(lora.modules_to_save) or None,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in layers.values()),  # GPT-2's weights are transposed
    )


def adapter_notes(peft_config: PeftLoraConfig, skeleton: Any, hf_config: Any) -> list[str]:
    """Where adapters are, and where they are not."""
    targets = sorted(peft_config.target_modules or ())
    notes = [f"Adapters: r {peft_config.r}, alpha {peft_config.lora_alpha} on {', '.join(targets)}"]
    if any(parameter.dim() == 3 for parameter in skeleton.parameters()):
        notes.append("Adapters: the experts are one tensor per layer, not linear layers, and get none")
    names = {name.rpartition(".")[2] for name in linear_layers(skeleton)}
    moved = sorted(name for name in names if not takes_adapter(hf_config.model_type, name))
    if moved:
        notes.append(f"Adapters: none on {', '.join(moved)}, which PEFT would put on the experts instead")
    return notes


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every linear layer of the language model by its full name, without the output head."""
    head = _output_head(model)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head
    }


def _output_head(model: Any) -> nn.Module | None:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def _check_targets(wanted: list[str], layers: dict[str, nn.Module], model: Any) -> None:
    """Raises ModelError naming every target that matches no linear layer, with the names that exist."""
    head = _output_head(model)
    head_names = [name for name, module in model.named_modules() if module is head]
    problems = []
    for target in wanted:
        if any(_matches(target, name) for name in head_names):
            problems.append(f"{target} is the output head, which takes no adapter (the loss reads its weight)")
        elif not takes_adapter(str(model.config.model_type), target.rpartition(".")[2]):
            problems.append(f"{one_line(target)}: {MOVED_WORDS}")
        elif not any(_matches(target, name) for name in layers):
            problems.append(f"{one_line(target)} matches nothing{_nearest(target, layers)}")
    if problems:
        names = ", ".join(sorted({name.rpartition(".")[2] for name in layers})[:_SHOWN_NAMES])
        raise ModelError(
            f"tuning.lora.target_modules: {'; '.join(problems)}. The linear layers are: {names}; auto takes them all"
        )


def _check_saved(config: RunConfig, targets: list[str], model: nn.Module) -> None:
    """Raises ModelError for a module of modules_to_save that matches nothing, or that gets an adapter too."""
    modules = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    for saved in config.tuning.lora.modules_to_save:
        if not any(_matches(saved, name) for name in modules):
            names = ", ".join(sorted({name.rpartition(".")[2] for name in modules if not name[-1].isdigit()}))
            raise ModelError(
                f"tuning.lora.modules_to_save: {one_line(saved)} matches nothing{_nearest(saved, modules)}. "
                f"The modules are: {one_line(names, limit=400)}"
            )
        if saved in targets:
            raise ModelError(f"tuning.lora: {one_line(saved)} is both in target_modules and in modules_to_save")
        inside = [layer for layer in linear_layers(model) if f".{saved}." in f".{layer}."]
        if inside:
            raise ModelError(
                f"tuning.lora.modules_to_save: {one_line(saved)} holds linear layers that get adapters or are "
                f"quantised, such as {inside[0]}; name whole modules without them: embed_tokens, lm_head, norms"
            )


def _matches(target: str, name: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _nearest(target: str, names: Any) -> str:
    near = difflib.get_close_matches(target, {name.rpartition(".")[2] for name in names}, n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""
