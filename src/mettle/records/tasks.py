"""Tasks and what becomes of them.

A *task* is a dataset row with a stable uid. Each pass over the data draws it once more; the draw (`TaskDraw`) is
what the ledger accounts for. Invariant: a draw is trained at most once, and each is at any time in exactly one state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


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


CreditValue = float | Sequence[float | NDArray[np.float32]]
"""A number for all sampled tokens of a rollout, or an entry a turn (see `orchestrator/credit.py`)."""
Credit = Mapping[str, CreditValue]
"""What an algorithm says of a rollout's tokens, by column (`records.tokens.CREDIT_COLUMNS`)."""


@dataclass(frozen=True, slots=True)
class TaskDraw:
    """One draw of a task. `draw_id` is unique in the run and ordered; `uid` names the dataset row."""

    draw_id: int
    env_id: str
    uid: str
    epoch: int
    example_id: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call of a rollout, holding only the tokens that it adds.

    The prompt of this call is the first `prefix_length` tokens of the previous turn's whole sequence (its prompt and
    completion; 0 for the first turn) followed by `new_prompt_ids`. A shorter `prefix_length` means that
    the conversation was rewritten, so a new sample branches off here. `logprobs` are natural-log probabilities of
    `completion_ids` as sampled, `versions` the policy version that sampled each. `reward` and `advantage` are what the
    environment itself gave this step of the trajectory, None where it gave none.
    """

    prefix_length: int
    new_prompt_ids: NDArray[np.int32]
    completion_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    temperature: float = 1.0
    reward: float | None = None
    advantage: float | None = None


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """One rollout as it is stored beside the ledger and shown on the run page.

    `reward` is None when the rollout failed (then `error_kind` says at which boundary and `error` what happened).
    `messages` is the whole conversation as plain dicts, prompt first. `advantage` is the environment's own, or the mean
    over the tokens of what the algorithm gave; `credit` is all that the algorithm said, None when it does not train.
    """

    rollout_id: str
    reward: float | None
    metrics: dict[str, float]
    messages: list[dict[str, Any]]
    turns: tuple[Turn, ...]
    stop_condition: str | None = None
    is_truncated: bool = False
    duration_s: float = 0.0
    error_kind: str | None = None
    error: str | None = None
    advantage: float | None = None
    answer: str = ""
    credit: Credit | None = None

    @property
    def num_completion_tokens(self) -> int:
        """Sampled tokens over all turns."""
        return sum(len(turn.completion_ids) for turn in self.turns)

    @property
    def version_range(self) -> tuple[int, int]:
        """Oldest and newest policy version among the sampled tokens; (-1, -1) when none was sampled."""
        versions = [v for turn in self.turns for v in (turn.versions.min(initial=2**30), turn.versions.max(initial=-1))]
        if not versions or max(versions[1::2]) < 0:
            return -1, -1
        return int(min(versions[::2])), int(max(versions[1::2]))


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """The rollouts of one task draw, which are compared with each other."""

    draw: TaskDraw
    version_at_start: int
    rollouts: tuple[RolloutRecord, ...]

    @property
    def rewards(self) -> list[float]:
        """Rewards of the rollouts that have one."""
        return [r.reward for r in self.rollouts if r.reward is not None]
