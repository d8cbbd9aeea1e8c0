"""Expert parallelism: a mixture's experts over several ranks, each of which computes its own for the tokens of all.

    tokens of a rank ─► by expert ─► all-to-all ─► the experts that are here ─► all-to-all ─► by token, times shares
                                      │ sizes first: how many rows for which expert
                                      ▼
    a rank that no token reaches answers all the same, for the others' collectives wait for it

transformers keeps a layer's experts stacked in a few parameters [E, ...]. `ExpertParallel`, a `ParallelStyle` of
torch's, cuts them by experts as DTensors and puts the exchange around transformers' own product; FSDP2 then cuts each
expert's matrices among the ranks that have the same experts. Invariant: the gradient of an expert holds the tokens of
the whole expert group already, so it is divided by the group before FSDP2 averages over its ranks: all parameters then
hold the mean over all ranks.
Legend: R tokens of a rank, K experts of a token, H hidden size, E experts of a layer, e = E / ranks own ones, S sent
and A arrived rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from mettle.errors import UserError
from mettle.trainer.expert_ranks import check_expert_ranks

INSIDE = 1
"""The dimension in which FSDP2 cuts experts: the first one is cut by experts."""


class ExpertParallel(ParallelStyle):
    """For a module of stacked experts."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            # Every rank has read the same file: it keeps its part of it, and nobody sends anything.
            cut = distribute_tensor(parameter.data, device_mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
        module.forward = partial(exchanged, module, device_mesh)
        return module


def stacked_experts(layer: nn.Module) -> list[Any]:
    """The modules of a layer that hold experts as transformers stacks them."""
    return [
        module
        for module in layer.modules()
        if type(module).__name__.endswith("Experts")
        and "top_k_index" in inspect.signature(type(module).forward).parameters
        and all(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
    ]


def check_experts(layers: Iterable[nn.Module], *, num_ranks: int, num_cuts: int) -> None:
    """See that `num_ranks` can have experts each, and FSDP2 cut each expert in `num_cuts`.

    Raises: UserError when they cannot.
    """
    found = [module for layer in layers for module in stacked_experts(layer)]
    check_expert_ranks([parameter.shape[0] for module in found for parameter in module.parameters()], num_ranks)
    for module in found:
        for parameter in module.parameters(recurse=False):
            inside = parameter.shape[INSIDE]
            if inside % num_cuts:
                raise UserError(
                    f"an expert's matrix of {inside} rows cannot be cut evenly among {num_cuts} ranks: take fewer"
                    " ranks, or more in trainer.expert_parallel"
                )


class LocalExperts:
    """A module of experts as it would be if there were only those of this rank."""

    def __init__(self, module: Any, parameters: dict[str, Tensor]) -> None:
        self.__dict__.update(parameters)
        self._module = module
        self.num_experts = len(next(iter(parameters.values())))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def exchanged(module: Any, mesh: DeviceMesh, hidden_RH: Tensor, index_RK: Tensor, shares_RK: Tensor) -> Tensor:
    """What the layer's experts make of this rank's tokens [R, H], wherever they are."""
    num_ranks, group = mesh.size(), mesh.get_group()
    own = _local(module, num_ranks)
    num_chosen = index_RK.shape[1]
    experts_S, order_S = torch.sort(index_RK.flatten(), stable=True)
    with torch.no_grad():
        sent = torch.bincount(experts_S, minlength=own.num_experts * num_ranks)
        arrived = torch.empty_like(sent)
        torch.distributed.all_to_all_single(arrived, sent, group=group)
        sizes = torch.stack([sent, arrived]).view(2, num_ranks, own.num_experts)
        to, of = sizes.sum(-1).tolist()  # rows by rank
        numbers = torch.arange(own.num_experts, device=sent.device).repeat(num_ranks)
        experts_A1 = numbers.repeat_interleave(arrived)[:, None]
    arrived_AH = _exchange(hidden_RH[order_S // num_chosen], of, to, group)
    if len(arrived_AH):
        made_AH = type(module).forward(own, arrived_AH, experts_A1, torch.ones_like(arrived_AH[:, :1]))
    else:  # nothing to compute, yet a gradient of zeros is expected of every parameter
        made_AH = arrived_AH + sum((parameter * 0).sum() for parameter in _own_parameters(own))
    made_SH = _exchange(made_AH, to, of, group)
    made_RKH = torch.empty_like(made_SH).index_copy(0, order_S, made_SH).view(*index_RK.shape, -1)
    return (made_RKH * shares_RK[..., None]).sum(1).to(hidden_RH.dtype)


def _exchange(rows: Tensor, receiving: list[int], sending: list[int], group: Any) -> Tensor:
    there: Tensor = all_to_all_single_autograd(rows.contiguous(), receiving, sending, group)
    return torch.ops._c10d_functional.wait_tensor(there)  # type: ignore[no-any-return]


def _local(module: Any, num_ranks: int) -> LocalExperts:
    parameters = {}
    for name, parameter in module.named_parameters(recurse=False):
        assert isinstance(parameter, DTensor), "FSDP2 gathers an expert's matrices, and leaves the experts apart"
        local = parameter.to_local()
        if local.requires_grad:
            local.register_hook(lambda gradient: gradient / num_ranks)  # type: ignore[no-untyped-call]
        parameters[name] = local
    return LocalExperts(module, parameters)


def _own_parameters(own: LocalExperts) -> list[Tensor]:
    return [value for value in vars(own).values() if isinstance(value, Tensor)]
