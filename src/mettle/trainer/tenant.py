"""What one training job has of its own: the parameters that it trains, their gradients, their moments, its steps.

The network is the `Policy`'s; a tenant is what may be made, switched to and dropped beside it. Parts: `Tenant`,
`OptimParams` (what one optimiser step is told), `build_optimizers`. Invariant: a tenant's state has no part in
another's, so that the same calls give the same bytes whoever else is trained in between.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mettle.errors import UserError
from mettle.trainer.adapter import Adapter
from mettle.trainer.config import OptimConfig
from mettle.trainer.cut import is_cut
from mettle.trainer.muon import Muon, is_muon_matrix
from mettle.trainer.uncompiled import UncompiledAdamW

BASE = ""
"""The name of the tenant whose parameters are the base's own."""


@dataclass(frozen=True, slots=True)
class OptimParams:
    """One optimiser step's numbers. `max_grad_norm` None leaves the gradient as long as it is."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = None


class Tenant:
    """A training job on a base: `parameters` by name, the optimiser over them, and how many steps it has taken.

    `name` is "" for the tenant that trains the base itself, and `is_base` true. Gradients are the parameters' own, so
    they stay with a tenant while others are trained.
    """

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, nn.Parameter],
        optim: OptimConfig | None = None,
        *,
        adapter: Adapter | None = None,
    ) -> None:
        self.name = name
        self.adapter = adapter
        self.is_base = name == BASE
        self.parameters = dict(parameters)
        self.trained = list(self.parameters.values())
        self.optimizer, self.muon = build_optimizers(self.parameters, optim or OptimConfig())
        self.optimizers = [self.optimizer, *([] if self.muon is None else [self.muon])]
        self.num_steps = 0

    @classmethod
    def of_base(cls, policy: nn.Module, optim: OptimConfig | None = None) -> Tenant:
        """The tenant that trains all of a policy."""
        found = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
        return cls(BASE, found, optim)

    @classmethod
    def of_adapter(cls, name: str, adapter: Adapter, optim: OptimConfig | None = None) -> Tenant:
        """The tenant that trains an adapter; its name must not be empty."""
        assert name, "the empty name is the base's"
        return cls(name, adapter.parameters(), optim, adapter=adapter)

    def forget_gradients(self) -> None:
        """Drop what has been accumulated since the last step."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def optimizer_state(self) -> list[dict[str, Any]]:
        """A copy of the optimisers' state, for `load_optimizer_state`."""
        return copy.deepcopy([optimizer.state_dict() for optimizer in self.optimizers])

    def load_optimizer_state(self, saved: list[dict[str, Any]]) -> None:
        """Raises: UserError when it is of another kind of optimiser."""
        if len(saved) != len(self.optimizers):
            raise UserError("a step is repeated with the optimiser of the run: leave optim.type as it is")
        for optimizer, state in zip(self.optimizers, saved, strict=True):
            optimizer.load_state_dict(copy.deepcopy(state))


def build_optimizers(
    parameters: Mapping[str, nn.Parameter], config: OptimConfig
) -> tuple[torch.optim.AdamW, Muon | None]:
    """AdamW, and Muon where the config asks for it, over parameters; vectors (norms, biases) do not decay."""
    muons = [p for name, p in parameters.items() if config.type == "muon" and is_muon_matrix(name, p)]
    taken = {id(parameter) for parameter in muons}
    rest = [parameter for parameter in parameters.values() if id(parameter) not in taken]
    groups = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0},
    ]
    meshes = {parameter.device_mesh for parameter in rest if is_cut(parameter)}
    adamw = UncompiledAdamW(
        [group for group in groups if group["params"]] or groups[:1], lr=config.lr, betas=config.betas, eps=config.eps,
        # torch's products over many parameters at once are of one mesh; experts may be on one of their own.
        foreach=False if len(meshes) > 1 else None,
    )  # fmt: skip
    if not muons:
        return adamw, None
    return adamw, Muon(muons, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
