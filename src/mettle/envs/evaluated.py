"""What is asked of whatever is evaluated: an environment, or a pool of workers that have it.

Parts: `Evaluated`. Invariant: a failed rollout is in the state that comes back; nothing is raised for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mettle.envs.state import State
from mettle.evals.resume import Row
from mettle.records.messages import Tool


class Evaluated(Protocol):
    """What is asked of an environment that is evaluated; see `mettle.envs.environment.Environment`."""

    env_id: str
    env_args: dict[str, Any]
    sampling_args: dict[str, Any]
    pass_threshold: float
    tool_defs: list[Tool]

    @property
    def requires_group_rollouts(self) -> bool: ...
    @property
    def has_independent_members(self) -> bool: ...
    async def run_rollout(
        self,
        input: Row,
        client: Any,
        model: str,
        sampling_args: Mapping[str, Any] | None = None,
        max_retries: int = 0,
    ) -> State: ...
    async def run_group(
        self,
        group_inputs: Sequence[Row],
        client: Any,
        model: str,
        sampling_args: Mapping[str, Any] | None = None,
        max_retries: int = 0,
    ) -> list[State]: ...
