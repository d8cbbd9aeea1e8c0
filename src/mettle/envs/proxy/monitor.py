"""What became of an agent, as metrics of its rollout.

Parts: `CliAgentMonitorRubric`. Invariant: nothing here adds to the reward.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from mettle.envs.decorators import cleanup
from mettle.envs.rubrics.rubric import Rubric
from mettle.envs.state import State


class CliAgentMonitorRubric(Rubric):
    """What became of the agent, as metrics; lets go of a sandbox that was kept for scoring."""

    def __init__(self, release: Callable[[State], Awaitable[None]] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._release = release
        for metric in (self.agent_timeout, self.agent_error, self.sandbox_oom, self.sandbox_timeout):
            self.add_metric(metric)

    async def agent_timeout(self, state: State) -> float:
        """1 when the agent ran out of time."""
        return float(bool(state.get("timed_out")))

    async def agent_error(self, state: State) -> float:
        """1 when the agent ended with an exit code other than 0."""
        return float(state.get("agent_exit_code") not in (None, 0))

    async def sandbox_oom(self, state: State) -> float:
        """1 when the agent's machine ran out of memory."""
        return float(bool(state.get("sandbox_oom")))

    async def sandbox_timeout(self, state: State) -> float:
        """1 when the machine's own time was over."""
        return float(bool(state.get("sandbox_timeout")))

    @cleanup
    async def release_sandbox(self, state: State) -> None:
        """Delete a sandbox that was kept for scoring."""
        if self._release is not None:
            await self._release(state)
