"""Where rollouts come from: the seam between the orchestrator and environments.

Parts: `GroupRequest` (what to roll out), `RolloutSource` (the protocol). `environments.EnvironmentSource` runs real
environments against the engine; `simulator.SimulatedSource` is the in-memory one of tests and demonstrations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mettle.records.sampling import SamplingParams
from mettle.records.tasks import RolloutRecord


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """`size` rollouts of one task; their ids are `{prefix}-{position}`."""

    env: str
    example_id: int
    prefix: str
    size: int
    sampling: SamplingParams
    is_eval: bool = False


class RolloutSource(Protocol):
    """Tasks and rollouts of the configured environments, by name."""

    def num_tasks(self, env: str, *, is_eval: bool = False) -> int:
        """Tasks of an environment (of its evaluation split under `is_eval`)."""
        ...

    def uid(self, env: str, example_id: int) -> str:
        """A name of the dataset row that stays the same from process to process."""
        ...

    def provides_advantages(self, env: str) -> bool:
        """True when an environment computes advantages itself."""
        ...

    def figures(self) -> dict[str, float]:
        """Gauges of what the environments run in, since they were last asked for."""
        ...

    async def run_group(self, request: GroupRequest) -> tuple[RolloutRecord, ...]:
        """Roll out one group. A rollout that fails is a record with `error_kind`; it never raises for one."""
        ...

    async def close(self) -> None:
        """Let go of connections and of what the environments hold."""
        ...
