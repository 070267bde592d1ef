"""Stochastic rounding: optimizer steps after which small updates of bf16 weights survive on average.

An update below 1/512 of a bf16 weight is lost when the sum is rounded to nearest. Rounded up with the probability that
the discarded bits give, it arrives in expectation (https://arxiv.org/abs/2010.06192). Optimizer and moments are the
library's own: tensors are stepped one after the other as fp32 copies, and their moments stay in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

_DISCARDED = 1 << 16
"""fp32 has 16 bits more than bf16."""
STEPS = "rounded_steps"
"""Key in the first group's options, which are saved with the optimizer: how many steps were rounded."""
_PRIME = 1_000_003
"""More than there are steps or tensors, so that no two tensors of a run share their noise."""


def round_stochastically(exact: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """fp32 numbers [...] rounded to one of their two bf16 neighbours, nearer ones more often: the mean is the number.

    `exact` is overwritten. Numbers that bf16 can represent stay, infinities and NaN too.
    """
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
        """One step over all parameters that have a gradient; `closure` is called once, before."""
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

    def _step_one(self, parameter: torch.nn.Parameter, noise: tuple[int, int]) -> None:
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
    """The class of an optimizer (torch.optim's or alike) that steps bf16 parameters by stochastic rounding.

    It takes the library's arguments and `rounding_seed`: the noise follows from seed, step and the tensor's number, so
    it is the same on all ranks of DDP and in a resumed run.
    """
    return type(f"Rounding{kind.__name__}", (_Rounding, kind), {})
