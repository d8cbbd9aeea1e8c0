"""Tasks and what becomes of them.

A *task* is a dataset row with a stable uid. Each pass over the data draws it once more; the draw (`TaskDraw`) is
what the ledger accounts for. Invariant: a draw is trained at most once, and each is at any time in exactly one state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

UNSCORED = "unscored"
"""The kind of a rollout that came to its end with neither a reward nor an error."""

MODEL_ROLES = ("assistant", "text")
EXCERPT_CHARS = 60


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
    SMALL_ADVANTAGE = "small_advantage"
    DIFFICULTY = "difficulty"
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
    """One draw of a task. `draw_id` is unique in the run and ordered; `uid` names the dataset row.

    `example_id` is the row's place in its dataset, or what the row itself calls its place. An evaluation draws nothing
    from the run's tasks: its `draw_id` is -1.
    """

    draw_id: int
    env_id: str
    uid: str
    epoch: int
    example_id: Any


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call of a rollout, holding only the tokens that it adds.

    The prompt of this call is the first `prefix_length` tokens of the previous turn's whole sequence (its prompt and
    completion; 0 for the first turn) followed by `new_prompt_ids`. A shorter `prefix_length` means that
    the conversation was rewritten, so a new sample branches off here. `logprobs` are natural-log probabilities of
    `completion_ids` as sampled, `versions` the policy version that sampled each. `reward` and `advantage` are what the
    environment itself gave this step of the trajectory, None where it gave none. `experts` [N, W] are those of a
    mixture whose engine recorded them (see `records.tokens`). `replica` is the engine that sampled, "" where one alone
    does, or nobody tells.
    """

    prefix_length: int
    new_prompt_ids: NDArray[np.int32]
    completion_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    temperature: float = 1.0
    reward: float | None = None
    advantage: float | None = None
    experts: NDArray[np.int16] | None = None
    replica: str = ""


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """One rollout, whoever asked for it: training, an evaluation, a search for prompts.

    `reward` is None when the rollout failed (then `error_kind` says at which boundary, `error` what happened, and the
    other `error_*` what was raised). `messages` is the whole conversation as plain dicts, of which the first
    `num_prompt_messages` were the prompt. `uid` and `example_id` name the task, `position` the rollout's place in its
    group (None: where it stands there). `timing` has the spans behind the durations, as verifiers writes them, and
    `token_usage` the sums over the model calls; `columns` are further fields of the published row.
    `advantage` is the environment's own, or the mean over the tokens of what the algorithm gave; `credit` is all that
    the algorithm said, None when it does not train.
    """

    rollout_id: str
    reward: float | None
    metrics: dict[str, float]
    messages: list[dict[str, Any]]
    turns: tuple[Turn, ...] = ()
    stop_condition: str | None = None
    is_truncated: bool = False
    duration_s: float = 0.0
    error_kind: str | None = None
    error: str | None = None
    advantage: float | None = None
    answer: Any = ""
    example_id: Any = 0
    uid: str = ""
    position: int | None = None
    num_prompt_messages: int = 0
    info: Any = None
    is_completed: bool = True
    error_type: str | None = None
    error_chain: str | None = None
    error_chain_repr: str | None = None
    model_s: float | None = None
    env_s: float | None = None
    scoring_s: float | None = None
    timing: dict[str, Any] | None = None
    token_usage: dict[str, float] | None = None
    tool_defs: list[dict[str, Any]] = field(default_factory=list)
    columns: dict[str, Any] = field(default_factory=dict)
    credit: Credit | None = None

    @property
    def prompt(self) -> list[dict[str, Any]]:
        """The messages that the rollout began with."""
        return self.messages[: self.num_prompt_messages]

    @property
    def completion(self) -> list[dict[str, Any]]:
        """The messages that the rollout added."""
        return self.messages[self.num_prompt_messages :]

    @property
    def num_turns(self) -> int:
        """Times that the model spoke."""
        said = sum(message.get("role") in MODEL_ROLES for message in self.completion)
        return said or len(self.turns)

    @property
    def excerpt(self) -> str:
        """The error, or the beginning of the last thing the model said, on one short line."""
        if self.error_kind is not None and self.error_kind != UNSCORED:
            text = f"{self.error_type or self.error_kind}: {self.error or ''}"
        else:
            said = [message for message in self.completion if message.get("role") in MODEL_ROLES]
            text = content_of(said[-1]) if said else ""
        short = " ".join(text[: 3 * EXCERPT_CHARS].split())
        if len(short) <= EXCERPT_CHARS < len(text):  # much of it was white space
            short = " ".join(text[: 20 * EXCERPT_CHARS].split())
        return short if len(short) <= EXCERPT_CHARS else short[: EXCERPT_CHARS - 3] + "..."

    @property
    def num_completion_tokens(self) -> int:
        """Sampled tokens over all turns, each of which could train."""
        return sum(len(turn.completion_ids) for turn in self.turns)

    @property
    def num_output_tokens(self) -> int:
        """Sampled tokens, by the endpoint's count where it does not tell them."""
        counted = (self.token_usage or {}).get("output_tokens") or 0
        return self.num_completion_tokens or int(counted)

    @property
    def version_range(self) -> tuple[int, int]:
        """Oldest and newest policy version among the sampled tokens; (-1, -1) when none was sampled."""
        oldest, newest = 2**30, -1
        for turn in self.turns:
            # Of a few numbers a list knows this sooner than an array.
            own = turn.versions.tolist() if len(turn.versions) < 64 else [turn.versions.min(), turn.versions.max()]
            if own:
                oldest, newest = min(oldest, int(min(own))), max(newest, int(max(own)))
        return (-1, -1) if newest < 0 else (oldest, newest)


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


def content_of(message: Mapping[str, Any]) -> str:
    """The text of a saved message; parts that are not text are named."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [str(p.get("text") or f"[{p.get('type')}]") if isinstance(p, Mapping) else str(p) for p in content]
        return " ".join(parts)
    return "" if content is None else str(content)
