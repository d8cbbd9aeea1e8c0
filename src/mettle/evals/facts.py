"""The figures of one rollout: what statistics, listings and comparisons need to know of a row of the results.

Parts: `RolloutFacts`, `facts_of`. Invariant: any row that a v0 release ever wrote can be read, whatever it lacks; ten
thousand facts stay small because the conversation is not kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EXCERPT_CHARS = 60
UNSCORED = "unscored"
KINDS_BY_TYPE = {
    "ModelError": "provider",
    "InvalidModelResponseError": "provider",
    "EmptyModelResponseError": "provider",
    "RateLimitError": "provider",
    "AuthenticationError": "provider",
    "OverlongPromptError": "overlong",
    "ToolError": "environment",
    "ToolParseError": "environment",
    "ToolCallError": "environment",
    "InfraError": "sandbox",
    "SandboxError": "sandbox",
    "TunnelError": "sandbox",
}
"""The boundary that an error belongs to, for files whose errors do not say it."""


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


def facts_of(row: Mapping[str, Any]) -> RolloutFacts:
    """The facts of one row of the results."""
    reward = _number(row.get("reward"))
    usage = row.get("token_usage")
    usage = usage if isinstance(usage, Mapping) else {}
    timing = row.get("timing")
    timing = timing if isinstance(timing, Mapping) else {}
    metrics = row.get("metrics")
    facts = RolloutFacts(
        example_id=_example(row.get("example_id", 0)),
        reward=reward,
        is_truncated=bool(row.get("is_truncated")),
        stop_condition=row.get("stop_condition"),
        input_tokens=_number(usage.get("input_tokens")),
        output_tokens=_number(usage.get("output_tokens")),
        num_turns=sum(
            1 for message in messages_of(row.get("completion")) if message.get("role") in ("assistant", "text")
        ),
        total_s=_seconds(timing, "total"),
        model_s=_seconds(timing, "model"),
        env_s=_seconds(timing, "env"),
        scoring_s=_seconds(timing, "scoring"),
        task_key=row.get("task_key"),
    )
    if isinstance(metrics, Mapping):
        facts.metrics = {str(name): value for name, raw in metrics.items() if (value := _number(raw)) is not None}
    _read_error(facts, row.get("error"))
    facts.excerpt = excerpt(row)
    return facts


def excerpt(row: Mapping[str, Any]) -> str:
    """The error, or the beginning of the last thing the model said, on one short line."""
    error = row.get("error")
    if error:
        text = f"{error.get('error')}: {error.get('message', '')}" if isinstance(error, Mapping) else str(error)
    else:
        said = [m for m in messages_of(row.get("completion")) if m.get("role") in ("assistant", "text")]
        text = content_of(said[-1]) if said else ""
    text = " ".join(text[: 20 * EXCERPT_CHARS].split())
    return text if len(text) <= EXCERPT_CHARS else text[: EXCERPT_CHARS - 3] + "..."


def content_of(message: Mapping[str, Any]) -> str:
    """The text of a saved message; parts that are not text are named."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [str(p.get("text") or f"[{p.get('type')}]") if isinstance(p, Mapping) else str(p) for p in content]
        return " ".join(parts)
    return "" if content is None else str(content)


def messages_of(value: Any) -> list[dict[str, Any]]:
    """Saved messages as a list: the text of a completion model becomes one message."""
    if isinstance(value, str):
        return [{"role": "text", "content": value}]
    return [message for message in value if isinstance(message, dict)] if isinstance(value, list) else []


def _read_error(facts: RolloutFacts, error: Any) -> None:
    if error:
        told = error if isinstance(error, Mapping) else {"message": str(error)}
        facts.error_type = str(told.get("error") or "Error")
        facts.error_message = str(told.get("message") or told.get("error_chain_str") or "")
        facts.cause = str(told.get("kind") or KINDS_BY_TYPE.get(facts.error_type, "rollout"))
        facts.reward = None
    elif facts.reward is None:
        facts.cause = facts.error_type = UNSCORED


def _example(value: Any) -> Any:
    """What tells tasks apart; rows of the same task are grouped by it."""
    return value if isinstance(value, str | int | float) or value is None else json.dumps(value, sort_keys=True)


def _number(value: Any) -> float | None:
    """A finite number, or None."""
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # a whole number of more than 308 digits
        return None
    return number if math.isfinite(number) else None


def _seconds(timing: Mapping[str, Any], name: str) -> float | None:
    """A duration; older files have milliseconds under another name."""
    value = timing.get(name)
    if isinstance(value, Mapping):
        value = value.get("duration")
    if value is None and timing.get(f"{name}_ms") is not None:
        milliseconds = _number(timing[f"{name}_ms"])
        return None if milliseconds is None else milliseconds / 1000
    return _number(value)
