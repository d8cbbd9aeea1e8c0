"""What a rollout is worth beside the others of its group, as verifiers writes it into states.

Parts: `set_advantages`. Invariant: a rollout without a reward has no advantage and does not shift that of the others.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from typing import Any


def set_advantages(states: Sequence[MutableMapping[str, Any]]) -> None:
    """Reward minus the mean over the rollouts that have one; trajectory steps without a reward inherit both."""
    rewards = [state["reward"] for state in states if state.get("reward") is not None]
    mean = math.fsum(rewards) / len(rewards) if rewards else 0.0
    for state in states:
        reward = state.get("reward")
        state["advantage"] = None if reward is None else reward - mean
        for step in state.get("trajectory") or []:
            if step.get("advantage") is None:
                step["advantage"] = state["advantage"]
            if step.get("reward") is None:
                step["reward"] = reward
