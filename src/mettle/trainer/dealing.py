"""Costs dealt to ranks: equally many to each, and sums as equal as can be.

Parts: `deal`, by Karmarkar and Karp's largest differencing for equally many items (Michiels, Korst, Aarts and van
Leeuwen 2003: items in descending order, W at a time, are partial dealings to W ranks; the two that differ most are laid
over each other, largest against smallest, until one is left), then by swaps of the heaviest rank. Invariant: the same
costs give the same dealing on every rank, so nobody has to be told.

Legend: P costs, W ranks.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

MAX_SWAPS = 64
"""Swaps that are looked for after the differencing; each makes the heaviest rank lighter, or none is made."""
GOOD_ENOUGH = 1.001
"""The heaviest rank over the mean at which nothing is swapped any more."""


def deal(costs: NDArray[np.float64], num_ranks: int) -> list[list[int]]:
    """Which of the P costs each rank gets, the largest first.

    Raises: ValueError when P is no multiple of the ranks: whoever cuts the work sees to it that it is.
    """
    if len(costs) % num_ranks:
        raise ValueError(f"{len(costs)} costs cannot be dealt equally to {num_ranks} ranks")
    order = np.argsort(-costs, kind="stable")
    if num_ranks == 1 or not len(order):
        return [order.tolist() for _ in range(num_ranks)]
    dealt = np.array(_differenced(costs, order.reshape(-1, num_ranks)), np.int64)  # [W, P / W]
    _swap(costs, dealt)
    # By cost, so that in each round the ranks compute passes of about the same size: their collectives wait.
    return [sorted(members, key=lambda i: (-costs[i], i)) for members in dealt.tolist()]


def _differenced(costs: NDArray[np.float64], rounds: NDArray[np.int64]) -> list[list[int]]:
    heap: list[tuple[float, int, list[float], list[list[int]]]] = []
    for number, items in enumerate(rounds.tolist()):
        sums = [float(costs[i]) for i in items]  # descending
        heap.append((sums[-1] - sums[0], number, sums, [[i] for i in items]))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, left, left_members = heapq.heappop(heap)
        _, _, right, right_members = heapq.heappop(heap)
        merged = sorted(
            ((a + b, i) for i, (a, b) in enumerate(zip(left, reversed(right), strict=True))), key=lambda pair: -pair[0]
        )
        sums = [total for total, _ in merged]
        members = [left_members[i] + right_members[len(right) - 1 - i] for _, i in merged]
        heapq.heappush(heap, (sums[-1] - sums[0], number, sums, members))
    return heap[0][3]


def _swap(costs: NDArray[np.float64], dealt: NDArray[np.int64]) -> None:
    """Swap a pass of the heaviest rank for one of another, in place, while that makes the larger of the two lighter."""
    loads = costs[dealt].sum(1)  # [W]
    mean = loads.mean()
    for _ in range(MAX_SWAPS):
        heaviest = int(loads.argmax())
        if loads[heaviest] <= GOOD_ENOUGH * mean:
            return
        given = costs[dealt[heaviest]][:, None, None] - costs[dealt][None]  # [P/W, W, P/W]: what the heaviest loses
        after = np.maximum(loads[heaviest] - given, loads[None, :, None] + given)
        after[:, heaviest] = np.inf
        own, other, theirs = np.unravel_index(int(after.argmin()), after.shape)
        if after[own, other, theirs] >= loads[heaviest]:
            return
        moved = given[own, other, theirs]
        dealt[heaviest, own], dealt[other, theirs] = dealt[other, theirs], dealt[heaviest, own]
        loads[heaviest] -= moved
        loads[other] += moved
