"""LoRA's adapters with fewer operators than PEFT's own forward: one function for the layers that
read one input, such as the projections to queries, keys and values.

PEFT stays their owner: parameters, names, files, merging, evaluation and generation are its own,
and so is every pass that this module does not take. A layer's part of a training pass is

    output = base(x) + scale * (x A^T) B^T

PEFT starts seven kernels for it forwards and seven backwards beside the base's. Here the second
product adds to the base's output, the A of a group are one matrix, backwards the products add to
one another, and a group's gradients are cast to fp32 together. Products read copies of A and B in
the dtype of the computation, which are made once a step; the gradients are those of PEFT's fp32
parameters.

Shape letters: T tokens, i and o widths of inputs and outputs, r rank, R sum of a group's ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_bnb_weight
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from sft_play.training.class_checks.adapter_trial import wildcard_name
from sft_play.training.class_checks.small_model import measure_small_model, small_model

# Paths of linear layers inside a block that read one tensor, numbers of experts as `*`.
SharedInput = tuple[str, ...]


def find_shared_inputs(hf_config: Any) -> tuple[SharedInput, ...]:
    """Find the linear layers of a class's blocks that read one input, on a small model of the
    class; none where no small model computes."""
    shared, _ = measure_small_model(hf_config, _measure_shared_inputs)
    return shared or ()


def _measure_shared_inputs(
    small_config: Any, *, trust_remote_code: bool
) -> tuple[SharedInput, ...]:
    with torch.random.fork_rng(devices=[]):
        model = small_model(small_config, "eager", trust_remote_code)
    # inputs are kept, so that no two of them have one identity
    calls: list[tuple[nn.Module, torch.Tensor]] = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(
                lambda module, inputs: calls.append((module, inputs[0]))
            )
    with torch.no_grad():
        model(input_ids=torch.arange(3, 19)[None], use_cache=False)
    input_of_layer = {id(layer): id(x) for layer, x in calls}
    if len(input_of_layer) < len(calls):  # blocks that run several times a pass
        return ()
    # a path can share its input with others in one block, and not in another
    groups_by_path: dict[str, set[SharedInput]] = {}
    for siblings in _sibling_layers(model, nn.Linear):
        paths_by_input: dict[int, list[str]] = {}
        for path, layer in siblings:
            if id(layer) in input_of_layer:
                paths_by_input.setdefault(input_of_layer[id(layer)], []).append(path)
        for paths in paths_by_input.values():
            for path in paths:
                groups_by_path.setdefault(path, set()).add(tuple(paths))
    found = {group for groups in groups_by_path.values() for group in groups if len(group) > 1}
    return tuple(
        sorted(group for group in found if all(groups_by_path[path] == {group} for path in group))
    )


def _sibling_layers(model: nn.Module, layer_class: type) -> Iterator[list[tuple[str, Any]]]:
    """The layers of a class below one parent, of each parent inside the blocks of a model, with
    their paths in the block."""
    for block in model.modules():
        if not isinstance(block, GradientCheckpointingLayer):
            continue
        for parent_path, parent in block.named_modules():
            children = [
                (wildcard_name(f"{parent_path}.{name}".removeprefix(".")), child)
                for name, child in parent.named_children()
                if isinstance(child, layer_class)
            ]
            if children:
                yield children


# --- groups ---------------------------------------------------------------------------------------
class GroupedAdapters:
    """The groups of a model whose training passes run here, with the copies of their factors."""

    def __init__(self, groups: Sequence[AdapterGroup]) -> None:
        self.groups = groups
        self._copies: list[torch.Tensor] = []
        self._parameters: list[torch.Tensor] = []

    @torch.no_grad()
    def refresh_copies(self) -> None:
        """Copy A and B of all layers in the dtype of the computation: at the start of each step,
        since only the optimizer changes them."""
        if not self._copies:
            for group in self.groups:
                self._copies += group.create_copies()
                self._parameters += group.factors
        torch._foreach_copy_(self._copies, self._parameters)

    def remove(self) -> None:
        """Let PEFT's own forward run again."""
        for group in self.groups:
            for layer in group.layers:
                del layer.forward


def group_adapters(
    model: nn.Module, shared_inputs: Iterable[SharedInput], *, dtype: torch.dtype
) -> GroupedAdapters | None:
    """Let the plain LoRA layers of a model's blocks train in groups; None where it has none.
    `dtype`: of the computation, under autocast where the adapters have another."""
    groups: list[AdapterGroup] = []
    group_by_path = {path: paths for paths in shared_inputs for path in paths}
    for siblings in _sibling_layers(model, LoraLayer):
        layers_by_group: dict[SharedInput, list[Any]] = {}
        for path, layer in siblings:
            if _can_group(layer, dtype):
                layers_by_group.setdefault(group_by_path.get(path, (path,)), []).append(layer)
        groups += [AdapterGroup(layers, dtype) for layers in layers_by_group.values()]
    return GroupedAdapters(groups) if groups else None


def _can_group(layer: Any, dtype: torch.dtype) -> bool:
    base = layer.get_base_layer()
    adapters = layer.active_adapters
    is_plain = (
        len(adapters) == 1
        and adapters[0] in layer.lora_A
        and not layer.lora_variant
        and not layer.lora_bias[adapters[0]]
        and isinstance(layer.lora_dropout[adapters[0]], nn.Identity)
        and base is layer.base_layer
        and "forward" not in vars(layer)
    )
    if not is_plain:
        return False
    trains_factors = all(
        factor[adapters[0]].weight.requires_grad for factor in (layer.lora_A, layer.lora_B)
    )
    trains_base = any(parameter.requires_grad for parameter in base.parameters())
    # exactly these classes: others may compute something else
    is_linear = type(layer) is LoraLinear and type(base) is nn.Linear and base.weight.dtype is dtype
    is_nf4 = type(layer).__name__ == "Linear4bit" and base.compute_dtype is dtype
    return trains_factors and not trains_base and (is_linear or is_nf4)


@dataclass(eq=False)
class _PendingOutputs:
    # outputs of a group's layers that were not called yet, by their place
    x: torch.Tensor
    outputs: dict[int, torch.Tensor]


class AdapterGroup:
    """LoRA layers that read one input. The first that is called computes all outputs, and the
    others take theirs."""

    def __init__(self, layers: Sequence[Any], dtype: torch.dtype) -> None:
        self.layers, self.dtype = layers, dtype
        self.bases = [layer.get_base_layer() for layer in layers]
        names = [layer.active_adapters[0] for layer in layers]
        named_layers = list(zip(layers, names, strict=True))
        self.scales = [layer.scaling[name] for layer, name in named_layers]
        factors_a = [layer.lora_A[name].weight for layer, name in named_layers]
        factors_b = [layer.lora_B[name].weight for layer, name in named_layers]
        self.ranks = [len(factor) for factor in factors_a]
        # PEFT's parameters: A of each layer, [r, i], then B of each, [o, r]
        self.factors = [*factors_a, *factors_b]
        # Copies of all A, [R, i], and of each B.
        self.a: torch.Tensor
        self.b: Sequence[torch.Tensor]
        self._pending: _PendingOutputs | None = None
        for place, layer in enumerate(layers):
            layer.forward = partial(self._forward, place)

    def create_copies(self) -> list[torch.Tensor]:
        """Create the copies, parts of one tensor, and return them as `factors` has them."""
        copies = self.split_factors(self.factors[0].new_empty(self.parameters, dtype=self.dtype))
        layers = len(self.layers)
        self.a = _joined_rows(copies[:layers])
        self.b = copies[layers:]
        return copies

    @property
    def parameters(self) -> int:
        """The number of trained parameters."""
        return sum(factor.numel() for factor in self.factors)

    def split_factors(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of one tensor in the shapes of `factors`."""
        parts = flat.split([factor.numel() for factor in self.factors])
        return [part.view(factor.shape) for part, factor in zip(parts, self.factors, strict=True)]

    def _forward(self, place: int, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        layer = self.layers[place]
        if args or options or not self._takes(layer, x):
            return type(layer).forward(layer, x, *args, **options)
        pending = self._pending
        if pending is None or pending.x is not x or place not in pending.outputs:
            outputs = _GroupedProducts.apply(x.to(self.dtype), self, *self.factors)
            pending = self._pending = _PendingOutputs(x, dict(enumerate(outputs)))
        output = pending.outputs.pop(place)
        if not pending.outputs:
            self._pending = None
        return output

    # PEFT's forward computes everything but training passes in the dtype of the copies.
    def _takes(self, layer: Any, x: torch.Tensor) -> bool:
        return (
            torch.is_grad_enabled()
            and not layer.disable_adapters
            and not layer.merged_adapters
            and (x.dtype is self.dtype or torch.is_autocast_enabled(x.device.type))
        )


def base_weight(base: Any) -> torch.Tensor:
    """The weight of a frozen linear layer, [o, i], dequantised where it is stored in NF4."""
    return base.weight if type(base) is nn.Linear else dequantize_bnb_weight(base.weight)


def _joined_rows(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    # of matrices that lie one after the other in one tensor
    first = matrices[0]
    rows = sum(len(matrix) for matrix in matrices)
    return first.as_strided((rows, first.shape[1]), first.stride(), first.storage_offset())


class _GroupedProducts(torch.autograd.Function):
    """The outputs of a group's layers, [..., o] each, of x, [..., i] in the group's dtype. The
    factors are arguments so that autograd brings them their gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: AdapterGroup, *factors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        rows = x.reshape(-1, x.shape[-1])
        low_rank = rows @ group.a.T  # [T, R]
        outputs = []
        for base, b, scale, part in zip(
            group.bases, group.b, group.scales, low_rank.split(group.ranks, dim=1), strict=True
        ):
            output = base(x)
            output.view(len(rows), -1).addmm_(part, b.T, alpha=scale)
            outputs.append(output)
        ctx.group = group
        ctx.save_for_backward(x, low_rank)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *output_gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        group: AdapterGroup = ctx.group
        x, low_rank = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        low_gradient = torch.empty_like(low_rank)
        flat = x.new_empty(group.parameters)
        factor_gradients = group.split_factors(flat)
        layers = len(group.layers)
        x_gradient = None
        for base, b, b_gradient, scale, gradient, part, part_gradient in zip(
            group.bases,
            group.b,
            factor_gradients[layers:],
            group.scales,
            output_gradients,
            low_rank.split(group.ranks, dim=1),
            low_gradient.split(group.ranks, dim=1),
            strict=True,
        ):
            # beta=0: what the tensors hold is not read
            gradient = gradient.reshape(len(rows), -1)
            b_gradient.addmm_(gradient.T, part, beta=0, alpha=scale)
            part_gradient.addmm_(gradient, b, beta=0, alpha=scale)
            if ctx.needs_input_grad[0]:
                weight = base_weight(base).to(x.dtype)
                if x_gradient is None:
                    x_gradient = gradient @ weight
                else:
                    x_gradient.addmm_(gradient, weight)
                del weight
        torch.mm(low_gradient.T, rows, out=_joined_rows(factor_gradients[:layers]))
        if x_gradient is not None:
            x_gradient = x_gradient.addmm_(low_gradient, group.a).view(x.shape)
        # one cast for all
        factor_gradients = group.split_factors(flat.to(group.factors[0].dtype))
        return (x_gradient, None, *factor_gradients)
