"""Where rollouts come from: the seam between whoever wants them and whatever makes them.

Parts: `GroupRequest` (what to roll out), `RolloutSource` (the protocol), `failed_rollouts`. An environment with its
model is a source; so is an engine with the environments of a run, and a simulation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mettle.errors import EnvironmentFault, RolloutError
from mettle.records.sampling import SamplingParams
from mettle.records.tasks import RolloutRecord


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """`size` rollouts of one task; their ids are `{prefix}-{position}`.

    `positions` are their places in the group, where only some of it is wanted; `rows` are what each rollout begins
    with, for a source that has no data of its own.
    """

    env: str
    example_id: Any
    prefix: str
    size: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    is_eval: bool = False
    positions: tuple[int, ...] = ()
    uid: str = ""
    rows: tuple[Mapping[str, Any], ...] = ()

    @property
    def rollouts(self) -> list[tuple[str, int]]:
        """(id, position) of each rollout."""
        return [(f"{self.prefix}-{position}", position) for position in self.positions or range(self.size)]


class RolloutSource(Protocol):
    """Makes rollouts of tasks."""

    async def run_group(self, request: GroupRequest) -> tuple[RolloutRecord, ...]:
        """Roll out one group. A rollout that fails is a record with `error_kind`; it never raises for one."""
        ...


def failed_rollouts(request: GroupRequest, error: BaseException) -> tuple[RolloutRecord, ...]:
    """The records of a group that came to nothing. What is not attributed yet is the environment's fault."""
    kind = error.kind if isinstance(error, RolloutError) else EnvironmentFault.kind
    name = type(error).__name__
    text = (str(error) or name) if isinstance(error, RolloutError) else f"{name}: {error}"
    return tuple(
        RolloutRecord(
            rollout_id, None, {}, [], error_kind=kind, error=text, error_type=name, error_chain=name,
            error_chain_repr=repr(error), example_id=request.example_id, uid=request.uid, position=position,
        )
        for rollout_id, position in request.rollouts
    )  # fmt: skip
