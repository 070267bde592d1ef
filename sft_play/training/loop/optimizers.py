"""What the optimizers of a run do that no library's does: Muon beside AdamW, LoRA+, stochastic
rounding.

Muon: torch's, for the weight matrices between the embeddings (https://arxiv.org/abs/2502.16982),
scaled to AdamW's updates, so that it takes AdamW's learning rate and weight decay. LoRA+
(https://huggingface.co/papers/2402.12354): a rate of its own for lora_B and vectors; PEFT's
function makes an optimizer that no schedule of the Trainer's groups knows. Stochastic rounding
(https://arxiv.org/abs/2010.06192): updates too small for bf16 arrive in expectation.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

_IS_MUON_KEY = "is_muon"
# fp32 has 16 bits more than bf16.
_ROUNDING_RANGE = 1 << 16
# Key in the first group's options, which are saved with the optimizer: how many steps were rounded.
ROUNDED_STEPS_KEY = "rounded_steps"
# More than there are steps or tensors, so that no two tensors of a run share their noise.
_NOISE_STRIDE = 1_000_003


def muon_matrices(model: Any) -> frozenset[nn.Parameter]:
    """Select the parameters that Muon steps: all matrices except embeddings and the output head."""
    embedding_weights = {
        module.weight for module in model.modules() if isinstance(module, nn.Embedding)
    }
    embedding_weights.add(getattr(model.get_output_embeddings(), "weight", None))
    return frozenset(
        parameter
        for parameter in model.parameters()
        if parameter.requires_grad and parameter.dim() == 2 and parameter not in embedding_weights
    )


class MuonWithAdamW(Optimizer):
    """Two optimizers as one: Muon steps the `matrices` of each group, AdamW the rest."""

    def __init__(
        self,
        params: Any,
        *,
        matrices: Collection[nn.Parameter],
        lr: float,
        weight_decay: float = 0.0,
        **adamw: Any,
    ) -> None:
        parts: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for group in params:
            for is_muon, part in parts.items():
                chosen = [
                    parameter for parameter in group["params"] if (parameter in matrices) == is_muon
                ]
                if chosen:
                    part.append({**group, "params": chosen})
        options = {"lr": lr, "weight_decay": weight_decay}
        # torch's optimizers refuse an empty list
        self._muon = (
            Muon(parts[True], **options, adjust_lr_fn="match_rms_adamw") if parts[True] else None
        )
        self._adamw = (
            AdamW(parts[False], **options, **{"fused": True, **adamw}) if parts[False] else None
        )
        groups = [
            {**group, _IS_MUON_KEY: optimizer is self._muon}
            for optimizer in (self._muon, self._adamw)
            if optimizer is not None
            for group in optimizer.param_groups
        ]
        super().__init__(groups, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both; `closure` is called once, before."""
        loss = closure() if closure is not None else None
        for optimizer in (self._muon, self._adamw):
            if optimizer is None:
                continue
            # the groups of now, with their learning rates, and the states of this optimizer, which
            # are what is saved
            optimizer.param_groups = [
                group
                for group in self.param_groups
                if group[_IS_MUON_KEY] == (optimizer is self._muon)
            ]
            optimizer.state = self.state
            optimizer.step()
        return loss


def loraplus_groups(
    groups: list[dict[str, Any]], model: Any, *, ratio: float
) -> list[dict[str, Any]]:
    """Split each group of an optimizer in two (LoRA+): lora_B's parameters and vectors have `ratio`
    times its learning rate."""
    fast_ids, parts = set(), []
    for name, parameter in model.named_parameters():
        # ds_shape: the whole one under ZeRO-3
        if "lora_B" in name or len(getattr(parameter, "ds_shape", parameter.shape)) == 1:
            fast_ids.add(id(parameter))
    for group in groups:
        for is_fast, factor in ((False, 1.0), (True, ratio)):
            params = [
                parameter for parameter in group["params"] if (id(parameter) in fast_ids) == is_fast
            ]
            parts.append({**group, "params": params, "lr": group["lr"] * factor})
    return parts


def round_stochastically(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """fp32 numbers [...], overwritten, as one of their two bf16 neighbours: the mean is the
    number."""
    bits = values.view(torch.int32)
    noise = torch.randint(
        _ROUNDING_RANGE, bits.shape, dtype=torch.int32, device=values.device, generator=generator
    )
    bits.add_(noise.masked_fill_(~torch.isfinite(values), 0)).bitwise_and_(-_ROUNDING_RANGE)
    return values.to(torch.bfloat16)


# A mixin that lets an optimizer step one parameter after the other, bf16 ones as fp32 copies.
class _StochasticRounding(Optimizer):
    param_groups: list[dict[str, Any]]

    def __init__(self, params: Any, *args: Any, rounding_seed: int = 0, **options: Any) -> None:
        super().__init__(params, *args, **options)
        self._seed = rounding_seed

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        groups, index = self.param_groups, 0
        groups[0][ROUNDED_STEPS_KEY] = groups[0].get(ROUNDED_STEPS_KEY, 0) + 1
        try:
            for group in groups:
                for parameter in group["params"]:
                    index += 1
                    if parameter.grad is not None:
                        self.param_groups = [{**group, "params": [parameter]}]
                        self._step_parameter(
                            parameter, noise_key=(groups[0][ROUNDED_STEPS_KEY], index)
                        )
        finally:
            self.param_groups = groups
        return loss

    def _step_parameter(self, parameter: nn.Parameter, noise_key: tuple[int, int]) -> None:
        if parameter.dtype != torch.bfloat16:
            super().step()
            return
        # the dtypes of data and gradient have to agree at every assignment: so the gradient goes
        # first and comes last
        rounded = parameter.data
        gradient: Any = parameter.grad
        parameter.grad = None
        parameter.data = rounded.float()
        parameter.grad = gradient.float()
        try:
            super().step()
            exact = parameter.data
        finally:
            parameter.grad = None
            parameter.data = rounded
            parameter.grad = gradient
        generator = torch.Generator(rounded.device)
        generator.manual_seed(
            ((self._seed * _NOISE_STRIDE + noise_key[0]) * _NOISE_STRIDE + noise_key[1]) % 2**63
        )
        rounded.copy_(round_stochastically(exact, generator))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # keep the dtypes of the saved moments, which the library casts to the weights' dtype
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        for parameter, state_index in zip(parameters, indices, strict=True):
            for name, saved_value in state_dict["state"].get(state_index, {}).items():
                current_value = self.state[parameter].get(name)
                if (
                    isinstance(saved_value, torch.Tensor)
                    and isinstance(current_value, torch.Tensor)
                    and current_value.dtype != saved_value.dtype
                ):
                    self.state[parameter][name] = saved_value.to(current_value.device, copy=True)


def stochastic_rounding_class(optimizer_class: type[Optimizer]) -> type[Optimizer]:
    """The class of an optimizer (torch.optim's or alike) that steps bf16 parameters by stochastic
    rounding, with noise from `rounding_seed`, step and the tensor's number: the same on all ranks
    of DDP and in a resumed run.
    """
    return type(f"Rounding{optimizer_class.__name__}", (_StochasticRounding, optimizer_class), {})
