"""Adapters of a step beside each other: two products for all rows, however many adapters they have.

Legend: R rows, D inputs, X outputs, K the ranks of all adapters together. The factors A of all adapters are one packed
matrix [K, D], their factors B one [X, K]; a row's product with A is put to zero where the rank is another adapter's.
Eight adapters in eight rows (D 512, X 1,024, rank 16) so cost 54 us a projection in place of eight times 29.

Invariant, on a CPU: a row gets the same bits whatever adapters stand beside its own, for zeros add nothing wherever
they stand. For packed products nobody promises that, so it is tried out once a process, and without it rows are
grouped (`adapters.py`), as those of prompts always are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from mettle.inference.engine.adapters import (
    AdapterRows,
    AdapterWeights,
    ExpertRows,
    LowRank,
    Projection,
    group_rows,
)
from mettle.inference.engine.matrices import can_pack, packed_matrix, packed_product

_TRIED = (2, 8, 40)
_TRIED_SIDE, _TRIED_RANK, _TRIED_ADAPTERS = 256, 16, 8


class _Pair(NamedTuple):
    """One projection of all adapters: packed A [K, D] and B [X, K], and how many ranks each of them has."""

    a: Tensor
    b: Tensor
    ranks: tuple[int, ...]


class AdapterStack:
    """Several adapters of one base, side by side."""

    def __init__(self, adapters: Sequence[AdapterWeights]) -> None:
        self.adapters = tuple(adapters)
        self.places = {id(adapter): place for place, adapter in enumerate(adapters)}
        self._pairs: dict[tuple[int, Projection], _Pair | None] = {}

    def pair(self, layer: int, projection: Projection) -> _Pair | None:
        """A projection's factors; None where no adapter has any. They are laid out when they are first asked for."""
        key = (layer, projection)
        if key not in self._pairs:
            self._pairs[key] = _stacked([adapter.pair(layer, projection) for adapter in self.adapters])
        return self._pairs[key]


class StackedRows:
    """The rows of a step; `places` are their adapters' in the stack, -1 for those that have none."""

    def __init__(self, stack: AdapterStack, places: Sequence[int], device: torch.device) -> None:
        self._stack = stack
        self._places_R = torch.tensor(places, device=device)
        self._others: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    def add(self, layer: int, projection: Projection, made_RX: Tensor, inputs_RD: Tensor) -> None:
        """Add to a projection what each row's adapter says, in place."""
        pair = self._stack.pair(layer, projection)
        if pair is None:
            return
        key = (len(inputs_RD), pair.ranks)
        if key not in self._others:
            self._others[key] = self._ranks_of_others(*key)
        shares_RK = packed_product(inputs_RD, pair.a).masked_fill_(self._others[key], 0.0)
        made_RX.add_(packed_product(shares_RK, pair.b))

    def of_experts(self, layer: int, num_rows: int) -> list[ExpertRows]:
        """What the rows' adapters say of a layer's experts. An expert has few rows, which are grouped by adapter."""
        found = []
        for place, adapter in enumerate(self._stack.adapters):
            if experts := adapter.layers[layer].experts:
                is_own_R = torch.zeros(num_rows, dtype=torch.bool)
                is_own_R[: len(self._places_R)] = self._places_R == place
                found.append(ExpertRows(experts, is_own_R))
        return found

    def _ranks_of_others(self, num_rows: int, ranks: tuple[int, ...]) -> Tensor:
        owners_K = torch.repeat_interleave(torch.arange(len(ranks)), torch.tensor(ranks))
        places_R = torch.full((num_rows,), -1)
        places_R[: len(self._places_R)] = self._places_R
        return places_R[:, None] != owners_K


class AdapterStacks:
    """The stack that was used last, and is used again while it holds the adapters that are wanted, and few others."""

    def __init__(self) -> None:
        self._newest: AdapterStack | None = None

    def forget(self) -> None:
        """Hold no adapter any more."""
        self._newest = None

    def rows(
        self, adapters: Sequence[AdapterWeights | None], device: torch.device, dtype: torch.dtype
    ) -> Sequence[StackedRows | AdapterRows]:
        """The rows of a step by their adapters."""
        wanted = {id(adapter): adapter for adapter in adapters if adapter is not None}
        if not wanted:
            return []
        if device.type != "cpu" or not _keeps_bits(dtype, torch.get_num_threads()):
            return group_rows(adapters, device)
        stack = self._newest
        if stack is None or not set(wanted) <= set(stack.places) or len(stack.places) > 2 * len(wanted):
            stack = self._newest = AdapterStack(list(wanted.values()))
        return [StackedRows(stack, [stack.places.get(id(adapter), -1) for adapter in adapters], device)]


def _stacked(lows: Sequence[LowRank | None]) -> _Pair | None:
    found = [low for low in lows if low is not None]
    if not found:
        return None
    a_KD = torch.cat([low.a_t.t() for low in found])
    b_XK = torch.cat([low.b_t.t() for low in found], 1)
    ranks = tuple(0 if low is None else low.a_t.shape[1] for low in lows)
    return _Pair(packed_matrix(a_KD), packed_matrix(b_XK), ranks)


@lru_cache(maxsize=8)
def _keeps_bits(dtype: torch.dtype, num_threads: int) -> bool:
    """Whether a row's bits are the same alone and beside other adapters, first and last."""
    if not can_pack():
        return False
    generator = torch.Generator().manual_seed(0)

    def noise(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(dtype)

    factors = [(noise(_TRIED_RANK, _TRIED_SIDE), noise(_TRIED_SIDE, _TRIED_RANK)) for _ in range(_TRIED_ADAPTERS)]
    rows = noise(max(_TRIED), _TRIED_SIDE)

    def product(count: int, order: Sequence[int]) -> Tensor:
        a, b = torch.cat([factors[i][0] for i in order]), torch.cat([factors[i][1] for i in order], 1)
        shares = packed_product(rows[:count], packed_matrix(a))
        is_own = torch.arange(len(order)).repeat_interleave(_TRIED_RANK) == list(order).index(0)
        return packed_product(shares.masked_fill_(~is_own, 0.0), packed_matrix(b))

    alone = product(max(_TRIED), [0])
    orders = [[0, 1], [1, 0], [*range(_TRIED_ADAPTERS)], [1, 2, 3, 4, 0], [*range(1, _TRIED_ADAPTERS), 0]]
    return all(torch.equal(product(count, order), alone[:count]) for count in _TRIED for order in orders)
