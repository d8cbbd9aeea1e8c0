"""Tree: the rollouts of a group are the paths of a tree, and a turn is credited with what it made of its node.

Turns that are the same token for token from the beginning on are one node. Its value V is the mean reward of the
rollouts that go through it, and turn t of rollout i, which leads from node p to node n, has

    A_it = (global_weight (V(n) - V(root)) + local_weight (V(n) - V(p))) / sqrt(rollouts through n)

so a turn after which nothing is open any more gets no local credit, and one that many rollouts share does not count as
often as it is there. Source: TreeRL, arXiv 2506.11902; the tree is read off the rollouts, whoever branched them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from mettle.evals.estimator import mean_of
from mettle.orchestrator.algorithms import Algorithm
from mettle.orchestrator.credit import are_equal, per_rollout, rewards_of
from mettle.orchestrator.samples import contexts_of
from mettle.records.tasks import Credit, GroupRecord, RolloutRecord

if TYPE_CHECKING:
    from mettle.orchestrator.services import Services


class TreeCredit(Algorithm):
    """Value of what a turn led to, against the start and against where it was taken."""

    min_group_size = 2

    def __init__(self, *, global_weight: float = 1.0, local_weight: float = 1.0) -> None:
        if not global_weight and not local_weight:
            raise ValueError("global_weight and local_weight are both 0, so every advantage is: raise one of them")
        self._global_weight, self._local_weight = global_weight, local_weight

    async def credit(self, group: GroupRecord, services: Services) -> list[Credit | None]:
        if are_equal(group.rewards):
            return per_rollout(None if reward is None else 0.0 for reward in rewards_of(group))
        through: dict[bytes, list[float]] = {}
        paths = [None if rollout.reward is None else _path(rollout) for rollout in group.rollouts]
        for rollout, path in zip(group.rollouts, paths, strict=True):
            for node in path or ():
                through.setdefault(node, []).append(rollout.reward or 0.0)
        root = mean_of(group.rewards)
        values = {node: mean_of(rewards) for node, rewards in through.items()}
        found: list[Credit | None] = []
        for path in paths:
            if path is None:
                found.append(None)
                continue
            before, advantages = root, []
            for node in path:
                gain = self._global_weight * (values[node] - root) + self._local_weight * (values[node] - before)
                advantages.append(gain / math.sqrt(len(through[node])))
                before = values[node]
            found.append({"advantages": advantages})
        return found


def _path(rollout: RolloutRecord) -> list[bytes]:
    """The nodes that a rollout goes through: all tokens up to the end of each turn."""
    return [
        np.concatenate([context, turn.completion_ids]).astype(np.int32).tobytes()
        for context, turn in zip(contexts_of(rollout.turns), rollout.turns, strict=True)
    ]
