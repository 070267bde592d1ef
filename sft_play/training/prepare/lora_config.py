"""Which weights a run trains: linear layers get adapters by its LoRA config, whose targets the plan
has checked; of all that a mode would train, `tuning.trainable` chooses by patterns: dotted pieces
of a name, globs and ranges (`layers.0-3`); `lora` means the adapters, `norm` every norm."""

import fnmatch
import re
from collections.abc import Iterable, Sequence
from typing import Any

from peft import LoraConfig as PeftLoraConfig
from torch import nn
from transformers.pytorch_utils import Conv1D

from sft_play.config.schema import LoraConfig, RunConfig
from sft_play.errors import ModelError
from sft_play.log import one_line
from sft_play.spelling import did_you_mean
from sft_play.training.class_checks.adapter_trial import (
    find_adapter_placement,
    linear_layers,
    output_head,
)
from sft_play.training.prepare.experts import select_stacked_experts


def build_peft_config(
    config: RunConfig, skeleton: Any, *, new_rows: Sequence[int] = ()
) -> tuple[PeftLoraConfig, list[str]]:
    """PEFT's config for a model of this class, with notes on where adapters are, and are not;
    `new_rows`: of added tokens. Raises ModelError: a module to save matches nothing, or gets
    adapters, or no layer could take one.
    """
    lora = config.tuning.lora
    placement, layers_without_adapter = find_adapter_placement(
        skeleton, trust_remote_code=config.model.trust_remote_code
    )
    layers = {
        name: layer
        for name, layer in linear_layers(skeleton).items()
        if name not in layers_without_adapter
    }
    targets = placement.resolve_targets(lora.target_modules)
    if not targets:
        raise ModelError(f"{config.model.name} has no linear layers that an adapter could take")
    module_names = [
        name
        for name, module in skeleton.named_modules()
        if name and any(True for _ in module.parameters())
    ]
    for target in lora.modules_to_save:
        if not any(_matches_any([target], name) for name in module_names):
            names = one_line(
                ", ".join(sorted({name.rpartition(".")[2] for name in module_names})), limit=400
            )
            raise ModelError(
                f"tuning.lora.modules_to_save: {one_line(target)} matches nothing"
                f"{_suggestion(target, module_names)}. The modules are: {names}"
            )
        adapted_layers = [
            layer for layer in linear_layers(skeleton) if f".{target}." in f".{layer}."
        ]
        if adapted_layers:
            raise ModelError(
                f"tuning.lora.modules_to_save: {one_line(target)} holds linear layers that get"
                f" adapters or are quantised, such as {adapted_layers[0]}"
            )
    init_note = "" if lora.init == "default" else _checked_init_note(lora, targets, layers)
    notes = [f"Adapters: r {lora.r}, alpha {lora.alpha}{init_note} on {', '.join(sorted(targets))}"]
    expert_names = (
        select_stacked_experts(skeleton, lora.adapted_parameters) if lora.adapted_parameters else []
    )
    if expert_names:
        weight_names = sorted({name.rpartition(".")[2] for name in expert_names})
        notes.append(
            f"Adapters: one on {' and '.join(weight_names)} of every expert"
            " (tuning.lora.target_parameters)"
        )
    notes += [f"Adapters: {note}" for note in placement.notes]
    return (
        PeftLoraConfig(
            task_type="CAUSAL_LM",
            r=lora.stored_rank,
            lora_alpha=lora.stored_alpha,
            lora_dropout=lora.dropout,
            target_modules=targets,
            target_parameters=expert_names or None,
            modules_to_save=list(lora.modules_to_save) or None,
            trainable_token_indices=trainable_rows(
                skeleton, new_rows, saved_modules=lora.modules_to_save
            ),
            use_rslora=lora.use_rslora,
            use_dora=lora.use_dora,
            # GPT-2's weights are transposed
            fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in layers.values()),
        ),
        notes,
    )


def _checked_init_note(
    lora: LoraConfig, targets: Iterable[str], layers: dict[str, nn.Module]
) -> str:
    max_ranks = {
        name: min(layer.weight.shape)
        for name, layer in layers.items()
        if _matches_any(targets, name)
    }
    name = min(max_ranks, key=lambda layer_name: max_ranks[layer_name])
    if max_ranks[name] < lora.r:
        raise ModelError(
            f"tuning.lora.init={lora.init}: {name} has {max_ranks[name]} singular directions, and "
            f"tuning.lora.r is {lora.r}; use a smaller rank"
        )
    if lora.init == "pissa":
        return f", started by pissa (a frozen half makes it r {lora.stored_rank})"
    return f", started by {lora.init}"


def trainable_rows(
    model: Any, rows: Sequence[int], *, saved_modules: Sequence[str]
) -> dict[str, list[int]] | None:
    """The rows of added tokens that train in each table of embeddings, tied ones once;
    `saved_modules`: names of modules that train whole. None: no rows. Raises ModelError: the head
    has a bias, which PEFT's rows leave out.
    """
    if not rows:
        return None
    inputs, head = model.get_input_embeddings(), output_head(model)
    if getattr(head, "bias", None) is not None:
        raise ModelError(
            f"model.add_tokens: the output head of {type(model).__name__} has a bias, which PEFT's"
            " rows leave out; use tuning.mode=full"
        )
    table_names = {
        module: name for name, module in model.named_modules() if module in (inputs, head)
    }
    tables = [table for table in table_names if not _matches_any(saved_modules, table_names[table])]
    if model.config.tie_word_embeddings and len(tables) == len(table_names):
        tables = [inputs]
    return {table_names[table]: list(rows) for table in tables} or None


def _matches_any(targets: Iterable[str], name: str) -> bool:
    return any(f".{name}".endswith(f".{target}") for target in targets)


def _suggestion(target: str, names: Iterable[str]) -> str:
    suggestion = did_you_mean(target, {name.rpartition(".")[2] for name in names})
    return f" ({suggestion})" if suggestion else ""


# --- tuning.trainable -----------------------------------------------------------------------------
def matches_pattern(pattern: str, name: str) -> bool:
    """Whether a pattern matches a weight: its pieces occur in the weight's name, one directly after
    the other."""
    pieces, parts = pattern.split("."), name.split(".")

    def matches_piece(piece: str, part: str) -> bool:
        if (span := re.fullmatch(r"(\d+)-(\d+)", piece)) is not None:
            return part.isdigit() and int(span[1]) <= int(part) <= int(span[2])
        return fnmatch.fnmatchcase(part, {"lora": "lora_*", "norm": "*norm*"}.get(piece, piece))

    return any(
        all(map(matches_piece, pieces, parts[start : start + len(pieces)]))
        for start in range(len(parts) - len(pieces) + 1)
    )


def select_names(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """The names that any of the patterns matches."""
    return [name for name in names if any(matches_pattern(pattern, name) for pattern in patterns)]


def trainable_note(config: RunConfig, model: nn.Module) -> str:
    """Describe in a line what `tuning.trainable` chooses; raises ModelError for a pattern that
    matches nothing."""
    patterns = config.tuning.trainable
    sizes = {
        name: weight.numel() for name, weight in model.named_parameters() if weight.requires_grad
    }
    for pattern in patterns:
        if not select_names([pattern], sizes):
            parts = {part for name in sizes for part in name.split(".") if not part.isdigit()}
            raise ModelError(
                f"tuning.trainable: {one_line(pattern)} names no weight that"
                f" tuning.mode={config.tuning.mode}"
                f" trains{_suggestion(pattern.rpartition('.')[2], parts)}; one"
                f" of them is {next(iter(sizes))}"
            )
    selected = select_names(patterns, sizes)
    share = sum(sizes[name] for name in selected) / sum(sizes.values())
    return (
        f"Trainable: {', '.join(patterns)}: {len(selected):,} of {len(sizes):,} tensors that"
        f" tuning.mode={config.tuning.mode} trains ({share:.2%} of their parameters); the plan"
        " counts memory for all of them"
    )


def freeze_unmatched(model: nn.Module, patterns: Any) -> None:
    """Freeze every weight that no pattern matches; `all` changes nothing."""
    if patterns == "all":
        return
    for name, weight in model.named_parameters():
        if weight.requires_grad and not select_names(patterns, [name]):
            weight.requires_grad_(False)
