"""The routers of a mixture of experts: which experts its tokens took, and computing with those that the engine took.

Parts: `Routers`, which hooks every router of a network; `told` (what holds for one pass), `figures` (the load of the
experts). A router of transformers gives (logits, shares of the chosen experts, their numbers) for each token. Where the
engine's choice is known, the numbers are the engine's, and the shares those that this network's own logits give them:
the gradient reaches the router as ever, and a token near the border of two experts is not computed by one of them there
and by the other here (router replay, arXiv 2510.11370).

What is known of a token is known of the place that predicts it, so replay and figures are of the places that predict
targets. Invariant: without recorded experts the network computes what it computes without this module.
Legend: R tokens of a pass, L layers with a router, E experts of each, K chosen ones, W = L K.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mettle.errors import StorageError
from mettle.trainer.world import World

Routed = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class _Told:
    """Of a pass: the places [M] that predict targets, and the engine's experts there [M, L, K], -1 where unknown."""

    places_M: Tensor
    experts_MLK: Tensor | None


class Routers:
    """The routers of a network, in the order of its layers; none in a dense one."""

    def __init__(self, network: nn.Module) -> None:
        self._routers: list[Any] = [m for m in network.modules() if type(m).__name__.endswith("TopKRouter")]
        for number, router in enumerate(self._routers):
            router.register_forward_hook(partial(self._route, number))
        self._told: _Told | None = None
        self._is_counting = False
        self.forget()

    @property
    def width(self) -> int:
        """W: the numbers that an engine records of a token."""
        return sum(int(router.top_k) for router in self._routers)

    def forget(self) -> None:
        """Count from nothing."""
        sizes = [int(router.num_experts) for router in self._routers]
        self._loads = [torch.zeros(size, dtype=torch.float64) for size in sizes]
        self._num_chosen = torch.zeros(
            3, dtype=torch.float64
        )  # all choices, replayed ones, those that were others here

    @contextmanager
    def told(self, sources: NDArray[np.int64], experts: NDArray[np.int16], num_labels: int = 1) -> Iterator[None]:
        """Within the block the network computes a pass whose targets [K] are predicted at `sources`, flat in [B, T].

        What is known of the engine's choices, `experts` [K, W], holds until the next pass: activation checkpointing
        computes this one again in its backward pass.
        Raises: StorageError when they are of another model.
        """
        if not self._routers:
            yield
            return
        width = experts.shape[1]
        if width not in (0, self.width):
            raise StorageError(
                f"the batch has {width} experts a token, and this model chooses {self.width}: another model sampled it"
            )
        places_M, first_M = np.unique(sources[::num_labels], return_index=True)
        chosen = None
        if width and len(places_M):
            layers = len(self._routers)
            chosen = torch.from_numpy(experts[::num_labels][first_M].astype(np.int64)).view(len(places_M), layers, -1)
        device = self._routers[0].weight.device
        self._told = _Told(torch.from_numpy(places_M).to(device), None if chosen is None else chosen.to(device))
        self._is_counting = True
        try:
            yield
        finally:
            self._is_counting = False

    def figures(self, world: World) -> dict[str, float]:
        """Of what was computed since `forget`, over all ranks.

        `experts/layer_N/max_load` is the load of the busiest expert over the mean load, 1 where all are alike, and
        `.../idle_share` the share of experts that no token took; `experts/...` the worst layer's. Of the choices that
        were replayed, `experts/rerouted_share` would have been others here.
        """
        if not self._routers:
            return {}
        loads = [world.total(load.to(world.device)).cpu() for load in self._loads]
        every, replayed, rerouted = world.total(self._num_chosen.to(world.device)).tolist()
        busiest = [float(load.max() / load.mean().clamp_min(1e-9)) for load in loads]
        idle = [float((load == 0).double().mean()) for load in loads]
        found = {"experts/max_load": max(busiest), "experts/idle_share": max(idle)}
        found |= {f"experts/layer_{i}/max_load": value for i, value in enumerate(busiest)}
        found |= {f"experts/layer_{i}/idle_share": value for i, value in enumerate(idle)}
        found["experts/replayed_share"] = replayed / max(1.0, every)
        if replayed:
            found["experts/rerouted_share"] = rerouted / replayed
        return found

    def _route(self, number: int, router: Any, _: Any, routed: Routed) -> Routed | None:
        told = self._told
        if told is None or not len(told.places_M):
            return None
        logits_RE, shares_RK, own_RK = routed
        chosen_RK = own_RK
        if told.experts_MLK is not None:
            engine_MK = told.experts_MLK[:, number]
            at_MK = own_RK[told.places_M]
            chosen_RK = own_RK.index_copy(0, told.places_M, torch.where(engine_MK >= 0, engine_MK, at_MK))
            shares_RK = _shares(router, logits_RE, chosen_RK)
        if self._is_counting:
            self._count(number, told, own_RK, chosen_RK)
        return logits_RE, shares_RK, chosen_RK

    @torch.no_grad()
    def _count(self, number: int, told: _Told, own_RK: Tensor, chosen_RK: Tensor) -> None:
        chosen_MK = chosen_RK[told.places_M]
        self._loads[number] += torch.bincount(chosen_MK.flatten(), minlength=len(self._loads[number])).cpu()
        known = torch.zeros(())
        rerouted = torch.zeros(())
        if told.experts_MLK is not None:
            is_known_M1 = told.experts_MLK[:, number, :1] >= 0
            own_MK = own_RK[told.places_M]
            is_own_MK = (chosen_MK[:, :, None] == own_MK[:, None, :]).any(-1)
            known = is_known_M1.expand_as(chosen_MK).sum()
            rerouted = (~is_own_MK & is_known_M1).sum()
        self._num_chosen += torch.stack([torch.tensor(float(chosen_MK.numel())), known.cpu(), rerouted.cpu()])


def _shares(router: Any, logits_RE: Tensor, chosen_RK: Tensor) -> Tensor:
    """The shares of given experts, as the router computes those of its own."""
    probabilities_RE = torch.softmax(logits_RE, -1, dtype=torch.float32)
    shares_RK = probabilities_RE.gather(-1, chosen_RK)
    if getattr(router, "norm_topk_prob", True):
        shares_RK = shares_RK / shares_RK.sum(-1, keepdim=True)
    return shares_RK.to(logits_RE.dtype)
