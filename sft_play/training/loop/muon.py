"""`train.optim: muon`: torch's Muon for the weight matrices between the embeddings, its fused AdamW for all else.

Muon steps by the momentum's matrix with all singular values near one (https://arxiv.org/abs/2502.16982), scaled to the
size of AdamW's updates, so that it takes AdamW's learning rate and weight decay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

_IS_MATRICES = "is_muon"


def matrices_of(model: Any) -> frozenset[nn.Parameter]:
    """The parameters that Muon steps: matrices, but for those of embeddings and of the output head."""
    head = model.get_output_embeddings()
    tables = {one.weight for one in model.modules() if isinstance(one, nn.Embedding)} | {getattr(head, "weight", None)}
    return frozenset(one for one in model.parameters() if one.requires_grad and one.dim() == 2 and one not in tables)


class MuonWithAdamW(Optimizer):
    """Two optimizers as one: groups of parameters are split, and each part is stepped by its own.

    `matrices` are those that Muon steps; the other options are AdamW's.
    """

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
