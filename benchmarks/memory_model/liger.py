"""Liger's kernels as a trace runs them: autograd functions that hold and allocate what liger-kernel 0.8.5's do, which
need not be installed (liger_kernel/ops/{rms_norm,swiglu,geglu,rope}.py, transformers/monkey_patch.py). The plan's own
count of their bytes is compared with it.

Importing it lets the tracer run them.
"""

import contextlib
import importlib
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch

from sft_play.planner.kernels import LIGER_REPLACEMENTS, LIGER_VERSION, MAX_MULTIPROCESSORS
from sft_play.trace import build
from sft_play.trace.settings import TraceUnavailable

HEAD_NORMS = ("q_norm", "k_norm", "query_layernorm", "key_layernorm")
ROTATION = "apply_rotary_pos_emb"


class Norm(torch.autograd.Function):
    """LigerRMSNormFunction. x: [..., width]; weight: [width]."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, in_place: bool) -> Any:
        x = x.contiguous()
        out = torch.empty_like(x)
        statistics = torch.empty(x.numel() // x.shape[-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, statistics)
        ctx.in_place = in_place
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradient of x, over that of the output where it may, and of the weight if it trains."""
        grad = grads[0].contiguous()
        _, weight, _ = ctx.saved_tensors
        trains = ctx.needs_input_grad[1]
        parts = torch.empty((MAX_MULTIPROCESSORS, weight.shape[0]), dtype=torch.float32) if trains else None
        out = grad if ctx.in_place else torch.zeros_like(grad)
        return out, None if parts is None else parts.sum(dim=0).to(weight.dtype), None


class Gate(torch.autograd.Function):
    """LigerSiLUMulFunction and LigerGELUMulFunction: gradients are written over what was held."""

    @staticmethod
    def forward(ctx: Any, gate: Any, up: Any) -> Any:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grads[0].contiguous()
        return ctx.saved_tensors


class Rotation(torch.autograd.Function):
    """LigerRopeFunction: query and key, [batch, heads, tokens, head size], are rotated where they lie."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, cos: Any, sin: Any) -> Any:
        ctx.save_for_backward(cos.contiguous(), sin.contiguous())
        return _by_token(query), _by_token(key)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _by_token(grads[0]), _by_token(grads[1]), None, None


def _by_token(x: Any) -> Any:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@contextlib.contextmanager
def replaced(model: Any) -> Iterator[None]:
    """Let a model run these functions in place of its own. Raises TraceUnavailable: nothing is known of its type."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    kind = base.config.model_type
    if kind not in LIGER_REPLACEMENTS:
        raise TraceUnavailable(f"nothing is known of liger-kernel {LIGER_VERSION} on {kind}")
    chosen, names = LIGER_REPLACEMENTS[kind], dict(base.named_modules())
    norms = [one for name, one in names.items() if _is_norm(name, one, of_heads=chosen.replaces_head_norms)]
    for norm in norms:
        norm.forward = MethodType(lambda self, x: Norm.apply(x, self.weight, chosen.writes_in_place), norm)
    has_experts = any(name.rpartition(".")[2] == "experts" for name in names)
    gates = [one for one in names.values() if _is_gated(one)] if chosen.replaces_gate and not has_experts else []
    for mlp in gates:
        mlp.forward = MethodType(_gated_mlp, mlp)
    module = importlib.import_module(type(base).__module__)
    lacks_gates = chosen.replaces_gate and not has_experts and not gates
    if not norms or lacks_gates or (chosen.replaces_rotation and not hasattr(module, ROTATION)):
        raise TraceUnavailable(f"{type(base).__name__} lacks what liger-kernel {LIGER_VERSION} replaces in {kind}")
    with contextlib.ExitStack() as undo:
        if chosen.replaces_rotation:
            undo.callback(setattr, module, ROTATION, getattr(module, ROTATION))
            setattr(module, ROTATION, lambda q, k, cos, sin, *_, **__: Rotation.apply(q, k, cos, sin))
        yield


def _is_norm(name: str, module: Any, *, of_heads: bool) -> bool:
    is_norm = type(module).__name__.endswith("RMSNorm") and getattr(module, "weight", None) is not None
    return is_norm and (of_heads or name.rpartition(".")[2] not in HEAD_NORMS)


def _is_gated(module: Any) -> bool:
    has = {name for name, _ in module.named_children()}
    return "down_proj" in has and ("gate_up_proj" in has or {"gate_proj", "up_proj"} <= has)


def _gated_mlp(self: Any, x: Any) -> Any:
    if hasattr(self, "gate_up_proj"):
        up = self.gate_up_proj(x)
        gate, up = up.chunk(2, dim=-1)
        return self.down_proj(Gate.apply(gate, up))
    return self.down_proj(Gate.apply(self.gate_proj(x), self.up_proj(x)))


build.KERNEL_CONTEXTS["liger"] = replaced
