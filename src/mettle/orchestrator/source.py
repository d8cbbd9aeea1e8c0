"""What the orchestrator asks of its environments: tasks by name and number, and rollouts of them.

Parts: `TaskSource` (the protocol). `environments.EnvironmentSource` runs real environments against the engine;
`simulator.SimulatedSource` is the in-memory one of tests and demonstrations.
"""

from __future__ import annotations

from typing import Protocol

from mettle.evals.source import RolloutSource


class TaskSource(RolloutSource, Protocol):
    """Tasks and rollouts of the configured environments, by name."""

    def num_tasks(self, env: str, *, is_eval: bool = False) -> int:
        """Tasks of an environment (of its evaluation split under `is_eval`)."""
        ...

    def uid(self, env: str, example_id: int, *, is_eval: bool = False) -> str:
        """A name of the dataset row that stays the same from process to process."""
        ...

    def provides_advantages(self, env: str) -> bool:
        """True when an environment computes advantages itself."""
        ...

    def figures(self) -> dict[str, float]:
        """Gauges of what the environments run in, since they were last asked for."""
        ...

    async def close(self) -> None:
        """Let go of connections and of what the environments hold."""
        ...
