"""Tensor parallelism: each rank of a group holds a part of every linear layer of the blocks, and
computes with it.

Which layers are divided by columns and by rows is transformers' own plan of the class (`tp_plan`).
The parts are DTensors to gradient norms, FSDP2 and checkpoints; modules compute on local tensors,
with two all-reduces per block and direction (Megatron-LM, https://arxiv.org/abs/1909.08053, section
3). Embedding, norms and head are whole on every rank.
"""

import re
import weakref
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from sft_play.errors import ModelError

# How a module's parameters are divided: by output features; by input features; not, but each rank
# applies them to its own heads only, so that gradients are added up; not, and applied the same on
# every rank.
ParallelStyle = Literal["columns", "rows", "heads", "whole"]
# Our style for each of transformers'. Head and embedding stay whole: TRL's loss reads the head's
# weight directly.
_TRANSFORMERS_STYLES: Mapping[str, ParallelStyle] = {
    "colwise": "columns",
    "rowwise": "rows",
    "replicated_with_grad_allreduce": "heads",
    "colwise_gather_output": "whole",
    "colwise_rep": "whole",
    "embedding_rowwise": "whole",
}
_WHOLE_LAYERS = ("lm_head", "embed_out", "embed_tokens", "embed_in", "wte")
_LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_PEFT_PREFIX = "base_model.model."


def tensor_parallel_plan(model: Any) -> dict[str, ParallelStyle]:
    """How a model's modules are divided, by names with `*`; raises ModelError without a plan that
    is known here."""
    plan = dict(getattr(model, "tp_plan", None) or {})
    unknown_styles = {
        style
        for name, style in plan.items()
        if style not in _TRANSFORMERS_STYLES
        or (_TRANSFORMERS_STYLES[style] == "whole" and name.rpartition(".")[2] not in _WHOLE_LAYERS)
    }
    problem = (
        f"it has layers of the style {', '.join(sorted(unknown_styles))}" if unknown_styles else ""
    )
    if not {"colwise", "rowwise"} <= set(plan.values()):
        problem = problem or "it has none"
    # linear layers of the blocks, and what has parameters beside a divided one
    parents = {
        name.rpartition(".")[0] for name, style in plan.items() if style in ("colwise", "rowwise")
    }
    required = set()
    for name, module in model.named_modules():
        generic = _LAYER_NUMBER.sub(".*", name)
        is_inner = isinstance(module, nn.Linear) and generic != name
        if is_inner or (
            generic.rpartition(".")[0] in parents and any(True for _ in module.parameters())
        ):
            required.add(generic)
    omitted = sorted(required - set(plan))
    if not problem and omitted:
        problem = f"it leaves {omitted[0]} out"
    if problem:
        raise ModelError(
            f"{type(model).__name__} cannot be divided over tensor-parallel"
            f" ranks: of transformers' plan for it: {problem}; use a layout"
            " without tp (model.mesh_shape=null lets the plan choose)"
        )
    return {name: _TRANSFORMERS_STYLES[style] for name, style in plan.items()}


def divide_model(
    model: Any,
    plan: Mapping[str, ParallelStyle],
    mesh: Any,
    *,
    device: torch.device,
    fp32_master_weights: bool = False,
) -> None:
    """Reduce a model that every rank holds whole, with adapters or without, to this rank's part on
    `device`. `plan`: `tensor_parallel_plan` of the model before adapters; `fp32_master_weights`:
    what trains is kept in fp32, which accelerate cannot do with parts. Raises ModelError: a layer
    does not split evenly."""
    divided: dict[int, nn.Parameter] = {}
    gradient_sum = _InputGradientSum(mesh)
    with torch.no_grad():
        for name, module in model.named_modules():
            for attribute, buffer in module.named_buffers(recurse=False):
                module._buffers[attribute] = buffer.to(device)
            parameters = dict(module.named_parameters(recurse=False))
            style = layer_style(name, plan) if parameters else "whole"
            for attribute, parameter in parameters.items():
                if id(parameter) not in divided:  # tied ones stay one
                    dtype = (
                        torch.float32
                        if fp32_master_weights and parameter.requires_grad
                        else parameter.dtype
                    )
                    local_tensor, placement = parameter.detach(), _placement(attribute, style)
                    if isinstance(placement, Shard):
                        size = local_tensor.shape[placement.dim]
                        if size % mesh.size():
                            raise ModelError(
                                f"{name}.{attribute} has {size} features,"
                                f" which do not split over {mesh.size()} ranks"
                            )
                        local_tensor = local_tensor.chunk(mesh.size(), placement.dim)[
                            mesh.get_local_rank()
                        ]
                    local_tensor = local_tensor.to(device, dtype, copy=True).contiguous()
                    # run_check would broadcast every tensor; all ranks have read the same file
                    divided[id(parameter)] = nn.Parameter(
                        DTensor.from_local(local_tensor, mesh, [placement], run_check=False),
                        requires_grad=parameter.requires_grad,
                    )
                module._parameters[attribute] = divided[id(parameter)]
            if parameters:
                _compute_locally(module, style, gradient_sum)


def layer_style(name: str, plan: Mapping[str, ParallelStyle]) -> ParallelStyle:
    """How a module is divided: as its layer is; of an adapter only the factor at the divided
    side."""
    adapter = re.match(
        r"^(.+)\.(base_layer|lora_A|lora_B)(?:\..+)?$", name.removeprefix(_PEFT_PREFIX)
    )
    layer, part = adapter.groups() if adapter else (name.removeprefix(_PEFT_PREFIX), "base_layer")
    style = plan.get(_LAYER_NUMBER.sub(".*", layer), "whole")
    if part == "base_layer" or (part, style) in (("lora_A", "rows"), ("lora_B", "columns")):
        return style
    return "whole"


def _placement(parameter: str, style: ParallelStyle) -> Placement:
    if style == "columns":
        return Shard(0)
    return Shard(1) if style == "rows" and parameter == "weight" else Replicate()


# Backward adds up all ranks' gradients, once for layers that share an input (q, k, v; gate and up).
class _InputGradientSum:
    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        self._last_input: tuple[Any, torch.Tensor] | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if not (torch.is_grad_enabled() and hidden.requires_grad):
            return hidden
        if self._last_input is not None and self._last_input[0]() is hidden:
            return self._last_input[1]
        replicated = DTensor.from_local(hidden, self.mesh, [Replicate()], run_check=False).to_local(
            grad_placements=[Partial()]
        )
        # weak: the input must not stay in memory for this
        self._last_input = (weakref.ref(hidden), replicated)
        return replicated


def _compute_locally(
    module: nn.Module, style: ParallelStyle, gradient_sum: _InputGradientSum
) -> None:
    class_forward, mesh = module.forward, gradient_sum.mesh

    def forward(*args: Any, **options: Any) -> Any:
        if style == "columns":
            args = (gradient_sum(args[0]), *args[1:])
        parts = dict(module._parameters)
        grad_placements = [Partial()] if style == "heads" else None
        local_tensors = {
            name: (
                part.to_local(grad_placements=grad_placements)
                if isinstance(part, DTensor)
                else part
            )
            for name, part in parts.items()
        }
        bias = local_tensors.get("bias") if style == "rows" else None
        if bias is not None:  # it is added once, after the sum
            local_tensors["bias"] = None
        module._parameters.update(local_tensors)
        try:
            output = class_forward(*args, **options)
        finally:
            module._parameters.update(parts)
        if style != "rows":
            return output
        summed = DTensor.from_local(output, mesh, [Partial()], run_check=False).redistribute(
            placements=[Replicate()]
        )
        return summed.to_local() if bias is None else summed.to_local() + bias

    module.forward = forward
