"""What reflection reads of a rollout: what was asked, what came back, and why it scored as it did.

Parts: `attempt_of`, `record_of`. Invariant: a rollout that failed says that it failed and with what, never that it
scored 0; texts are bounded, so that one long conversation does not crowd the others out of the reflection prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mettle.evals.output import messages_of, output_row
from mettle.gepa.journal import PromptAttempt
from mettle.records.tasks import RolloutRecord, content_of

MAX_TEXT_CHARS = 6000
MAX_VALUE_CHARS = 1500


def attempt_of(
    row: str, candidate: str, rollout: RolloutRecord, *, state_columns: Sequence[str], perfect_score: float
) -> PromptAttempt:
    """A rollout of `row` under `candidate`, with what reflection reads of it."""
    usage = rollout.token_usage or {}
    told = f"{rollout.error_kind}: {rollout.error_type or rollout.error_kind}: {rollout.error or ''}".rstrip(": ")
    return PromptAttempt(
        row, candidate, rollout.reward, told if rollout.reward is None else None,
        record_of(output_row(rollout), state_columns, perfect_score),
        usage.get("input_tokens", 0.0), usage.get("output_tokens", 0.0),
    )  # fmt: skip


def record_of(output: Mapping[str, Any], state_columns: Sequence[str], perfect_score: float) -> dict[str, Any]:
    """One example of a reflective dataset from one row of results."""
    asked = [message for message in messages_of(output.get("prompt")) if message.get("role") != "system"]
    return {
        "Inputs": _clipped(_conversation(asked), MAX_TEXT_CHARS),
        "Generated Outputs": _clipped(_conversation(messages_of(output.get("completion"))), MAX_TEXT_CHARS)
        or "(nothing)",
        "Feedback": _feedback(output, state_columns, perfect_score),
    }


def _feedback(output: Mapping[str, Any], state_columns: Sequence[str], perfect_score: float) -> str:
    error = output.get("error")
    lines = []
    if error or output.get("reward") is None:
        told = error if isinstance(error, Mapping) else {}
        lines.append(f"The rollout failed and has no reward: {told.get('error', 'no reward')}: {told.get('message')}")
    else:
        verdict = (
            "the best possible" if output["reward"] >= perfect_score else f"the best possible is {perfect_score:g}"
        )
        lines.append(f"Reward {output['reward']:.4g} ({verdict}).")
        lines += [f"{name}: {value:.4g}" for name, value in (output.get("metrics") or {}).items()]
    if output.get("answer"):
        lines.append(f"Expected answer: {_clipped(str(output['answer']), MAX_VALUE_CHARS)}")
    if output.get("is_truncated"):
        lines.append("The response was cut off because it was too long.")
    lines += [f"{name}: {_value(output[name])}" for name in state_columns if output.get(name) is not None]
    return "\n".join(lines)


def _conversation(messages: Sequence[Mapping[str, Any]]) -> str:
    if len(messages) == 1 and not messages[0].get("tool_calls"):
        return content_of(messages[0])
    parts = []
    for message in messages:
        parts.append(f"[{message.get('role')}] {content_of(message)}".rstrip())
        for call in message.get("tool_calls") or ():
            known = json.loads(call) if isinstance(call, str) else call
            named = known.get("function", known)
            parts.append(f"[tool call] {named.get('name')}({named.get('arguments')})")
    return "\n".join(parts)


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return _clipped(text, MAX_VALUE_CHARS)


def _clipped(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n[... {len(text) - limit} characters left out ...]\n{text[-limit // 2 :]}"
