"""Tensor parallelism: each rank of a group holds a part of every linear layer of the blocks, and computes with it.

Which layers are divided by columns and by rows is transformers' own plan of the class (`tp_plan`). The parts are
DTensors to gradient norms, FSDP2 and checkpoints; modules compute on local tensors, with two all-reduces per block and
direction (Megatron-LM, https://arxiv.org/abs/1909.08053, section 3). Embedding, norms and head are whole on every rank.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from sft_play.errors import ModelError

# How a module's parameters are divided: by output features; by input features; not, but each rank applies them to its
# own heads only, so that gradients are added up; not, and applied the same on every rank.
Style = Literal["columns", "rows", "heads", "whole"]
# Our style for each of transformers'. Head and embedding stay whole: TRL's loss reads the head's weight directly.
_STYLES: Mapping[str, Style] = {
    "colwise": "columns", "rowwise": "rows", "replicated_with_grad_allreduce": "heads",
    "colwise_gather_output": "whole", "colwise_rep": "whole", "embedding_rowwise": "whole",
}  # fmt: skip
_OUTER = ("lm_head", "embed_out", "embed_tokens", "embed_in", "wte")
_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_ADAPTER = re.compile(r"^(.+)\.(base_layer|lora_A|lora_B)(?:\..+)?$")
_PEFT_PREFIX = "base_model.model."


def plan_of(model: Any) -> dict[str, Style]:
    """How a model's modules are divided, by names with `*`; raises ModelError without a plan that is known here."""
    plan = dict(getattr(model, "tp_plan", None) or {})
    foreign = {
        style for name, style in plan.items()
        if style not in _STYLES or (_STYLES[style] == "whole" and name.rpartition(".")[2] not in _OUTER)
    }  # fmt: skip
    problem = f"it has layers of the style {', '.join(sorted(foreign))}" if foreign else ""
    if not {"colwise", "rowwise"} <= set(plan.values()):
        problem = problem or "it has none"
    left = sorted(_beside_divided(model, plan) - set(plan))
    if not problem and left:
        problem = f"it leaves {left[0]} out"
    if problem:
        raise ModelError(
            f"{type(model).__name__} cannot be divided over tensor-parallel ranks: of transformers' plan for it: "
            f"{problem}; use a layout without tp (model.mesh_shape=null lets the plan choose)"
        )
    return {name: _STYLES[style] for name, style in plan.items()}


def _beside_divided(model: Any, plan: Mapping[str, str]) -> set[str]:
    """What a plan has to name: linear layers of the blocks, and what has parameters beside a divided one."""
    parents = {name.rpartition(".")[0] for name, style in plan.items() if style in ("colwise", "rowwise")}
    names = set()
    for name, module in model.named_modules():
        generic = _NUMBER.sub(".*", name)
        is_inner = isinstance(module, nn.Linear) and generic != name
        if is_inner or (generic.rpartition(".")[0] in parents and any(True for _ in module.parameters())):
            names.add(generic)
    return names


def divide(model: Any, plan: Mapping[str, Style], mesh: Any, *, device: torch.device, masters: bool = False) -> None:
    """Reduce a model that every rank holds whole, with adapters or without, to this rank's part on `device`. `plan`:
    `plan_of` the model before adapters; `masters`: what trains is kept in fp32, which accelerate cannot do with parts.
    Raises ModelError: a layer does not split evenly."""
    parts: dict[int, nn.Parameter] = {}
    entrance = _Entrance(mesh)
    with torch.no_grad():
        for name, module in model.named_modules():
            for own, buffer in module.named_buffers(recurse=False):
                module._buffers[own] = buffer.to(device)
            parameters = dict(module.named_parameters(recurse=False))
            style = style_of(name, plan) if parameters else "whole"
            for own, parameter in parameters.items():
                if id(parameter) not in parts:  # tied ones stay one
                    dtype = torch.float32 if masters and parameter.requires_grad else parameter.dtype
                    local = _local(parameter.detach(), _placement(own, style), mesh, name=f"{name}.{own}")
                    # run_check would broadcast every tensor; all ranks have read the same file
                    part = DTensor.from_local(
                        local.to(device, dtype, copy=True).contiguous(), mesh, [_placement(own, style)], run_check=False
                    )
                    parts[id(parameter)] = nn.Parameter(part, requires_grad=parameter.requires_grad)
                module._parameters[own] = parts[id(parameter)]
            if parameters:
                _compute_locally(module, style, entrance)


def style_of(name: str, plan: Mapping[str, Style]) -> Style:
    """How a module is divided: as its layer is; of an adapter only the factor at the divided side."""
    adapter = _ADAPTER.match(name.removeprefix(_PEFT_PREFIX))
    layer, part = adapter.groups() if adapter else (name.removeprefix(_PEFT_PREFIX), "base_layer")
    style = plan.get(_NUMBER.sub(".*", layer), "whole")
    if part == "base_layer" or (part, style) in (("lora_A", "rows"), ("lora_B", "columns")):
        return style
    return "whole"


def _placement(parameter: str, style: Style) -> Placement:
    if style == "columns":
        return Shard(0)
    return Shard(1) if style == "rows" and parameter == "weight" else Replicate()


def _local(tensor: torch.Tensor, placement: Placement, mesh: Any, *, name: str) -> torch.Tensor:
    if not isinstance(placement, Shard):
        return tensor
    size, ranks = tensor.shape[placement.dim], mesh.size()
    if size % ranks:
        raise ModelError(f"{name} has {size} features, which do not split over {ranks} ranks")
    return tensor.chunk(ranks, dim=placement.dim)[mesh.get_local_rank()]


class _Entrance:
    """Backward adds up all ranks' gradients, once for layers that share an input (q, k, v; gate and up)."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        self._last: tuple[Any, torch.Tensor] | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if not (torch.is_grad_enabled() and hidden.requires_grad):
            return hidden
        if self._last is not None and self._last[0]() is hidden:
            return self._last[1]
        entered = DTensor.from_local(hidden, self.mesh, [Replicate()], run_check=False).to_local(
            grad_placements=[Partial()]
        )
        self._last = (weakref.ref(hidden), entered)  # weak: the input must not stay in memory for this
        return entered


def _compute_locally(module: nn.Module, style: Style, entrance: _Entrance) -> None:
    whole_forward, mesh = module.forward, entrance.mesh

    def forward(*args: Any, **options: Any) -> Any:
        if style == "columns":
            args = (entrance(args[0]), *args[1:])
        with _local_parameters(module, style) as bias:
            output = whole_forward(*args, **options)
        if style != "rows":
            return output
        summed = DTensor.from_local(output, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
        return summed.to_local() if bias is None else summed.to_local() + bias

    module.forward = forward


@contextlib.contextmanager
def _local_parameters(module: nn.Module, style: Style) -> Iterator[torch.Tensor | None]:
    """Yields the bias of a layer divided by rows, which is added once, after the sum."""
    parts = dict(module._parameters)
    grads = [Partial()] if style == "heads" else None
    local = {
        name: part.to_local(grad_placements=grads) if isinstance(part, DTensor) else part
        for name, part in parts.items()
    }
    bias = local.get("bias") if style == "rows" else None
    if bias is not None:
        local["bias"] = None
    module._parameters.update(local)
    try:
        yield bias
    finally:
        module._parameters.update(parts)
