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
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_bnb_weight
from torch import nn
from torch._utils import _unflatten_dense_tensors
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
    shared = {group for groups in groups_by_path.values() for group in groups if len(group) > 1}
    return tuple(
        sorted(group for group in shared if all(groups_by_path[path] == {group} for path in group))
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
        for group in self.groups:  # of a pass that ended within a group, for want of memory
            group.pending_input, group.pending_outputs = None, {}
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
        layers_by_group: dict[tuple[Any, float], list[Any]] = {}
        for path, layer in siblings:
            if _can_group(layer, dtype):
                # a layer that shares its input with none is a group of its own
                key = group_by_path.get(path, layer), layer.scaling[layer.active_adapters[0]]
                layers_by_group.setdefault(key, []).append(layer)
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


class AdapterGroup:
    """LoRA layers that read one input, of one scale. The first that is called computes all outputs,
    and the others take theirs."""

    def __init__(self, layers: Sequence[Any], dtype: torch.dtype) -> None:
        self.layers, self.dtype = layers, dtype
        self.bases = [layer.get_base_layer() for layer in layers]
        self.is_nf4 = any(type(base) is not nn.Linear for base in self.bases)
        name = layers[0].active_adapters[0]
        self.scale = layers[0].scaling[name]
        factors_a = [layer.lora_A[name].weight for layer in layers]
        factors_b = [layer.lora_B[name].weight for layer in layers]
        self.ranks = [len(factor) for factor in factors_a]
        # PEFT's parameters: A of each layer, [r, i], then B of each, [o, r]
        self.factors = [*factors_a, *factors_b]
        self.parameters = sum(factor.numel() for factor in self.factors)
        self.a_shape = (sum(self.ranks), factors_a[0].shape[1])
        self.widths = [len(factor) for factor in factors_b]
        # Copies of all A, [R, i], and of each B, [o, r], with their transposes,
        # which every pass would make anew; none before the first step.
        self.a = self.a_t = torch.empty(0)
        self.b: Sequence[torch.Tensor] = ()
        self.b_t: Sequence[torch.Tensor] = ()
        # The last input, and the outputs of layers that were not called with it yet, by place.
        self.pending_input: torch.Tensor | None = None
        self.pending_outputs: dict[int, torch.Tensor] = {}
        for place, layer in enumerate(layers):
            layer.forward = partial(self._forward, place)

    def create_copies(self) -> Sequence[torch.Tensor]:
        """Create the copies, parts of one tensor, and return them as `factors` has them."""
        flat = self.factors[0].new_empty(self.parameters, dtype=self.dtype)
        copies = self.split_factors(flat)
        self.a, self.b = self.joined_a(flat), copies[len(self.layers) :]
        self.a_t, self.b_t = self.a.t(), [b.t() for b in self.b]
        return copies

    def split_factors(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """Views of one tensor in the shapes of `factors`."""
        return tuple(_unflatten_dense_tensors(flat, self.factors))

    def joined_a(self, flat: torch.Tensor) -> torch.Tensor:
        """The view of all A in one tensor of all factors, [R, i]."""
        return flat.as_strided(self.a_shape, (self.a_shape[1], 1))

    def split_ranks(self, low_rank: torch.Tensor) -> Sequence[torch.Tensor]:
        """Views of each layer's part of [T, R]."""
        parts: Sequence[torch.Tensor] = (low_rank,)
        if len(self.ranks) > 1:
            parts = torch.split_with_sizes(low_rank, self.ranks, dim=1)
        return parts

    def _forward(self, place: int, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if self.pending_input is not x or place not in self.pending_outputs:
            layer = self.layers[place]
            if args or options or not self._takes(layer, x):
                return type(layer).forward(layer, x, *args, **options)
            outputs = _GroupedProducts.apply(x.to(self.dtype), self, *self.factors)
            if len(outputs) == 1:
                return outputs[0]
            self.pending_input, self.pending_outputs = x, dict(enumerate(outputs))
        output = self.pending_outputs.pop(place)
        if not self.pending_outputs:
            self.pending_input = None
        return output

    # PEFT's forward computes all but training passes in the dtype of the copies.
    def _takes(self, layer: Any, x: torch.Tensor) -> bool:
        computed_dtype = x.dtype
        # a layer in 4 bits returns its input's dtype, a plain one autocast's
        if not self.is_nf4 and torch.is_autocast_enabled(x.device.type):
            computed_dtype = torch.get_autocast_dtype(x.device.type)
        return (
            computed_dtype is self.dtype
            and bool(self.b)
            and torch.is_grad_enabled()
            and not layer.disable_adapters
            and not layer.merged_adapters
        )


def base_weight(base: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight of a frozen linear layer, [o, i], dequantised where it is stored in NF4."""
    weight: torch.Tensor = base.weight
    if weight.dtype is dtype:
        return weight
    return dequantize_bnb_weight(weight).to(dtype)


class _GroupedProducts(torch.autograd.Function):
    """The outputs of a group's layers, [..., o] each, of x, [..., i] in the group's dtype. The
    factors are arguments so that autograd brings them their gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: AdapterGroup, *factors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        rows = x.reshape(-1, x.shape[-1])
        low_rank = torch.mm(rows, group.a_t)  # [T, R]
        outputs = []
        for base, b_t, width, part in zip(
            group.bases, group.b_t, group.widths, group.split_ranks(low_rank), strict=True
        ):
            output = base.forward(x)
            output.view(-1, width).addmm_(part, b_t, alpha=group.scale)
            outputs.append(output)
        ctx.group, ctx.shape = group, x.shape
        ctx.save_for_backward(rows, low_rank)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *output_gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        group: AdapterGroup = ctx.group
        rows, low_rank = ctx.saved_tensors
        needs_x_gradient = ctx.needs_input_grad[0]
        flat = rows.new_empty(group.parameters)
        factor_gradients = group.split_factors(flat)
        low_gradient = torch.empty_like(low_rank)
        x_gradient = None
        for base, b, width, b_gradient, gradient, part, part_gradient in zip(
            group.bases,
            group.b,
            group.widths,
            factor_gradients[len(group.bases) :],
            output_gradients,
            group.split_ranks(low_rank),
            group.split_ranks(low_gradient),
            strict=True,
        ):
            gradient = gradient.reshape(-1, width)
            # beta=0: what the tensor holds is not read
            b_gradient.addmm_(gradient.t(), part, beta=0, alpha=group.scale)
            part_gradient.addmm_(gradient, b, beta=0, alpha=group.scale)
            if x_gradient is not None:
                x_gradient.addmm_(gradient, base_weight(base, rows.dtype))
            elif needs_x_gradient:
                x_gradient = torch.mm(gradient, base_weight(base, rows.dtype))
        torch.mm(low_gradient.t(), rows, out=group.joined_a(flat))
        if x_gradient is not None:
            x_gradient = x_gradient.addmm_(low_gradient, group.a).view(ctx.shape)
        if flat.dtype is not group.factors[0].dtype:  # one cast for all
            factor_gradients = group.split_factors(flat.to(group.factors[0].dtype))
        return (x_gradient, None, *factor_gradients)
