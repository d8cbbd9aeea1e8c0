"""Tasks and what becomes of them.

A *task* is a dataset row with a stable uid. Each pass over the data draws it once more; the draw (`TaskDraw`) is
what the ledger accounts for. Invariant: a draw is trained at most once, and each is at any time in exactly one state.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class TaskState(StrEnum):
    """The life of a task draw. Each transition is committed before its effect is relied on."""

    PENDING = "pending"
    IN_FLIGHT = "in_flight"
    SCORED = "scored"
    SHIPPED = "shipped"
    TRAINED = "trained"
    DROPPED = "dropped"


class DropReason(StrEnum):
    """Why a task draw left without being trained."""

    ZERO_ADVANTAGE = "zero_advantage"
    STALE = "stale"
    ERRORS = "errors"
    NO_TOKENS = "no_tokens"
    RUN_ENDED = "run_ended"


@dataclass(frozen=True, slots=True)
class TaskDraw:
    """One draw of a task. `draw_id` is unique in the run and ordered; `uid` names the dataset row."""

    draw_id: int
    env_id: str
    uid: str
    epoch: int
    example_id: int


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """One rollout as the ledger keeps it and the run page shows it.

    `reward` is None when the rollout failed (then `error_kind` says at which boundary and `error` what happened).
    `messages` is the whole conversation; `turns` holds one dict per model call:
    {"prompt_ids", "completion_ids", "logprobs", "versions"} as plain lists (natural-log probabilities).
    """

    rollout_id: str
    reward: float | None
    metrics: dict[str, float]
    messages: list[dict[str, Any]]
    turns: list[dict[str, Any]]
    stop_condition: str | None
    is_truncated: bool
    duration_s: float
    error_kind: str | None = None
    error: str | None = None
    advantage: float | None = None
    answer: str = ""

    @property
    def num_completion_tokens(self) -> int:
        """Sampled tokens over all turns."""
        return sum(len(turn["completion_ids"]) for turn in self.turns)
