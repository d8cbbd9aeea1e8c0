"""The figures of one rollout: what statistics, listings and comparisons need to know of it.

Parts: `RolloutFacts`; `facts_of` a record, `facts_of_stored` a row of the store, `facts_of_row` a published row.
Invariant: any row that a v0 release ever wrote can be read, whatever it lacks; ten thousand facts stay small because
the conversation is not kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mettle.evals.output import figures_of
from mettle.records.tasks import UNSCORED, RolloutRecord
from mettle.storage.rollouts import RolloutRow


@dataclass(slots=True)
class RolloutFacts:
    """The figures of one rollout. `cause` is the boundary that it failed at, None where it has a reward."""

    example_id: Any
    reward: float | None
    cause: str | None = None
    error_type: str | None = None
    error_message: str | None = None
    is_truncated: bool = False
    stop_condition: str | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None
    num_turns: int = 0
    total_s: float | None = None
    model_s: float | None = None
    env_s: float | None = None
    scoring_s: float | None = None
    task_key: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    excerpt: str = ""


def facts_of(record: RolloutRecord) -> RolloutFacts:
    """The facts of a rollout."""
    usage = record.token_usage or {}
    return RolloutFacts(
        example_id=_example(record.example_id),
        reward=record.reward,
        cause=record.error_kind,
        error_type=UNSCORED if record.error_kind == UNSCORED else record.error_type,
        error_message=record.error,
        is_truncated=record.is_truncated,
        stop_condition=record.stop_condition,
        input_tokens=usage.get("input_tokens"),
        output_tokens=usage.get("output_tokens"),
        num_turns=record.num_turns,
        total_s=record.duration_s or None,
        model_s=record.model_s,
        env_s=record.env_s,
        scoring_s=record.scoring_s,
        task_key=record.uid or None,
        metrics=record.metrics,
        excerpt=record.excerpt,
    )


def facts_of_stored(row: RolloutRow) -> RolloutFacts:
    """The facts of a rollout in the store, which is not opened."""
    return RolloutFacts(
        _example(row.example_id), row.reward, row.error_kind,
        UNSCORED if row.error_kind == UNSCORED else row.error_type, row.error, row.is_truncated, row.stop_condition,
        row.input_tokens, row.output_tokens, row.num_turns, row.duration_s or None, row.model_s, row.env_s,
        row.scoring_s, row.uid, row.metrics, row.excerpt,
    )  # fmt: skip


def facts_of_row(row: Mapping[str, Any]) -> RolloutFacts:
    """The facts of one row of `results.jsonl`."""
    return facts_of(figures_of(row))


def _example(value: Any) -> Any:
    """What tells tasks apart; rows of the same task are grouped by it."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float) or value is None else json.dumps(value, sort_keys=True)
