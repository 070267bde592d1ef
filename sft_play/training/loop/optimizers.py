"""What the optimizers of a run do that no library's does: Muon beside AdamW, LoRA+, stochastic rounding.

Muon: torch's, for the weight matrices between the embeddings (https://arxiv.org/abs/2502.16982), scaled to AdamW's
updates, so that it takes AdamW's learning rate and weight decay. LoRA+ (https://huggingface.co/papers/2402.12354): a
rate of its own for lora_B and vectors; PEFT's function makes an optimizer that no schedule of the Trainer's groups
knows. Stochastic rounding (https://arxiv.org/abs/2010.06192): updates too small for bf16 arrive in expectation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

_IS_MATRICES = "is_muon"
# fp32 has 16 bits more than bf16.
_DISCARDED = 1 << 16
# Key in the first group's options, which are saved with the optimizer: how many steps were rounded.
STEPS = "rounded_steps"
# More than there are steps or tensors, so that no two tensors of a run share their noise.
_PRIME = 1_000_003


def matrices_of(model: Any) -> frozenset[nn.Parameter]:
    """The parameters that Muon steps: matrices, but for those of embeddings and of the output head."""
    head = model.get_output_embeddings()
    tables = {one.weight for one in model.modules() if isinstance(one, nn.Embedding)} | {getattr(head, "weight", None)}
    return frozenset(one for one in model.parameters() if one.requires_grad and one.dim() == 2 and one not in tables)


class MuonWithAdamW(Optimizer):
    """Two optimizers as one: Muon steps the `matrices` of each group, AdamW the rest."""

    def __init__(
        self, params: Any, *, matrices: Collection[nn.Parameter], lr: float, weight_decay: float = 0.0, **adamw: Any
    ) -> None:
        given = [group if isinstance(group, dict) else {"params": [group]} for group in params]
        muon, rest = (
            [{**group, "params": [one for one in group["params"] if (one in matrices) == wanted]} for group in given]
            for wanted in (True, False)
        )
        muon, rest = ([group for group in part if group["params"]] for part in (muon, rest))
        options = {"lr": lr, "weight_decay": weight_decay}
        self._muon = Muon(muon, **options, adjust_lr_fn="match_rms_adamw") if muon else None
        self._adamw = AdamW(rest, **options, **{"fused": True, **adamw}) if rest else None
        groups = [
            {**group, _IS_MATRICES: part is self._muon}
            for part in (self._muon, self._adamw)
            if part is not None
            for group in part.param_groups
        ]
        super().__init__(groups, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both; `closure` is called once, before."""
        loss = closure() if closure is not None else None
        for part in (self._muon, self._adamw):
            if part is None:
                continue
            # the groups of now, with their learning rates, and the states of this optimizer, which are what is saved
            part.param_groups = [group for group in self.param_groups if group[_IS_MATRICES] == (part is self._muon)]
            part.state = self.state
            part.step()
        return loss


def faster_by_name(model: Any) -> frozenset[int]:
    """The parameters, by their `id`, that get the higher rate."""
    shapes = {name: getattr(one, "ds_shape", one.shape) for name, one in model.named_parameters()}  # whole under ZeRO-3
    return frozenset(id(one) for name, one in model.named_parameters() if "lora_B" in name or len(shapes[name]) == 1)


def split_by_rate(group: dict[str, Any], fast: frozenset[int], *, ratio: float) -> Iterator[dict[str, Any]]:
    """A group of an optimizer as two: the parameters with its own rate, and those with `ratio` times as much."""
    for is_fast in (False, True):
        params = [one for one in group["params"] if (id(one) in fast) == is_fast]
        yield {**group, "params": params, "lr": group["lr"] * (ratio if is_fast else 1.0)}


def round_stochastically(exact: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """fp32 numbers [...], overwritten, as one of their two bf16 neighbours: the mean is the number."""
    bits = exact.view(torch.int32)
    noise = torch.randint(_DISCARDED, bits.shape, dtype=torch.int32, device=exact.device, generator=generator)
    bits.add_(noise.masked_fill_(~torch.isfinite(exact), 0)).bitwise_and_(-_DISCARDED)
    return exact.to(torch.bfloat16)


class _Rounding(Optimizer):
    """A mixin that lets an optimizer step one parameter after the other, bf16 ones as fp32 copies."""

    param_groups: list[dict[str, Any]]

    def __init__(self, params: Any, *args: Any, rounding_seed: int = 0, **options: Any) -> None:
        super().__init__(params, *args, **options)
        self._seed = rounding_seed

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        groups, number = self.param_groups, 0
        groups[0][STEPS] = groups[0].get(STEPS, 0) + 1
        try:
            for group in groups:
                for parameter in group["params"]:
                    number += 1
                    if parameter.grad is not None:
                        self.param_groups = [{**group, "params": [parameter]}]
                        self._step_one(parameter, noise=(groups[0][STEPS], number))
        finally:
            self.param_groups = groups
        return loss

    def _step_one(self, parameter: nn.Parameter, noise: tuple[int, int]) -> None:
        if parameter.dtype != torch.bfloat16:
            super().step()
            return
        # the dtypes of data and gradient have to agree at every assignment: so the gradient goes first and comes last
        rounded, gradient = parameter.data, parameter.grad
        parameter.grad = None
        parameter.data = rounded.float()
        parameter.grad = gradient.float() if gradient is not None else None
        try:
            super().step()
            exact = parameter.data
        finally:
            parameter.grad = None
            parameter.data = rounded
            parameter.grad = gradient
        generator = torch.Generator(rounded.device)
        generator.manual_seed(((self._seed * _PRIME + noise[0]) * _PRIME + noise[1]) % 2**63)
        rounded.copy_(round_stochastically(exact, generator))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as the library does, but keep the dtypes of the saved moments, which it casts to the weights' dtype."""
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for parameter, number in zip(parameters, numbers, strict=True):
            for name, saved in state_dict["state"].get(number, {}).items():
                held = self.state[parameter].get(name)
                if isinstance(saved, torch.Tensor) and isinstance(held, torch.Tensor) and held.dtype != saved.dtype:
                    self.state[parameter][name] = saved.to(held.device, copy=True)


def rounding(kind: type[Optimizer]) -> type[Optimizer]:
    """The class of an optimizer (torch.optim's or alike) that steps bf16 parameters by stochastic rounding, with noise
    from `rounding_seed`, step and the tensor's number: the same on all ranks of DDP and in a resumed run."""
    return type(f"Rounding{kind.__name__}", (_Rounding, kind), {})
