"""One question, one answer."""

from __future__ import annotations

from typing import Any

from mettle.envs.multiturn_env import MultiTurnEnv
from mettle.envs.state import State
from mettle.records.messages import Messages


class SingleTurnEnv(MultiTurnEnv):
    """A `MultiTurnEnv` of one model call."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"max_turns": 1, **kwargs})

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Any:
        """Never asked: the rollout ends with the model's turn."""
        raise NotImplementedError("a single-turn environment has nothing to answer")
