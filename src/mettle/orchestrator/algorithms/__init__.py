"""Algorithms: the rewards of one group to advantages. One small file each, with its paper and formula.

An algorithm is registered by name, here or under the entry point group `mettle.algorithms`. Listing the names imports
no plug-in. Invariant of all: an errored rollout (reward None) gets None and does not shift its siblings' baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol

from mettle.orchestrator.algorithms.grpo import GRPO
from mettle.orchestrator.algorithms.max_rl import MaxRL
from mettle.orchestrator.algorithms.rae import RAE

ENTRY_POINT_GROUP = "mettle.algorithms"


class Algorithm(Protocol):
    """Rewards of one group to advantages. `state` is what must survive a restart ({} when there is nothing)."""

    min_group_size: int

    def advantages(self, env_id: str, rewards: Sequence[float | None]) -> list[float | None]:
        """One advantage a rollout, None where the reward is None."""
        ...

    def state(self) -> dict[str, Any]:
        """JSON values that `restore` takes back."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up a state that was saved."""
        ...


BUILT_IN: dict[str, Callable[..., Algorithm]] = {"grpo": GRPO, "max_rl": MaxRL, "rae": RAE}


def algorithm_names() -> list[str]:
    """The names that `make_algorithm` knows."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def make_algorithm(name: str, options: Mapping[str, Any]) -> Algorithm:
    """The algorithm called `name`. Raises: ValueError for an unknown name or option."""
    factory = BUILT_IN.get(name)
    if factory is None:
        found = [point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == name]
        if not found:
            raise ValueError(f"there is no algorithm {name!r}; there are {', '.join(algorithm_names())}")
        factory = found[0].load()
    try:
        return factory(**options)
    except TypeError as error:
        raise ValueError(f"algorithm {name!r} does not take these options: {error}") from error


def check_options(name: str, options: Mapping[str, Any], group_size: int) -> None:
    """Raise ValueError, saying what to change, when the algorithm could not learn from such groups."""
    algorithm = make_algorithm(name, options)
    if group_size < algorithm.min_group_size:
        raise ValueError(
            f"{name} compares the rollouts of a group, so with group_size {group_size} every advantage is 0: "
            f"set group_size to at least {algorithm.min_group_size} (8 or 16 are usual)"
        )
