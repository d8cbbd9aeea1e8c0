"""A rollout as it is published: one row, one JSON line; and the way back.

Parts: `output_row` (a record as a row), `record_of` (a row as a record, whoever wrote it), `task_key_of` (what task it
was), `json_line`. The files are in `results`. The format is that of verifiers 0.3: assistant tool calls as JSON
strings, each metric again as a key of the row; what Mettle adds stands under keys of its own (`task_key`). Invariant: a
row that is read and written again says the same; what a record has no field for is kept in its `columns`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from mettle.records.tasks import UNSCORED, RolloutRecord
from mettle.storage.plain_json import json_text

MAX_NUMBER: Final = 1e100
"""A number that is read and is greater is none: the third powers of such numbers are summed to intervals."""

TASK_FIELDS = ("prompt", "answer", "info")
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


def output_row(record: RolloutRecord) -> dict[str, Any]:
    """A rollout as a row of the results."""
    row: dict[str, Any] = {
        "example_id": record.example_id,
        "prompt": saved_messages(record.prompt),
        "completion": saved_messages(record.completion),
    }
    if record.answer:
        row["answer"] = record.answer
    if record.info:
        row["info"] = record.info
    row.update(
        reward=record.reward,
        error=error_row(record),
        timing=record.timing,
        is_completed=record.is_completed,
        is_truncated=record.is_truncated,
        stop_condition=record.stop_condition,
        metrics=record.metrics,
        tool_defs=record.tool_defs,
    )
    if record.token_usage is not None:
        row["token_usage"] = record.token_usage
    if row["error"] is not None:
        row["error_chain"], row["long_error_chain"] = record.error_chain, record.error_chain_repr
    for name, value in record.metrics.items():
        row.setdefault(name, value)
    row.update(record.columns)
    if record.uid:
        row["task_key"] = record.uid
    return row


def error_row(record: RolloutRecord) -> dict[str, Any] | None:
    """A rollout's failure as it is published; None for one without."""
    if record.error_kind is None or record.error_kind == UNSCORED:
        return None
    return {
        "error": record.error_type or "Error",
        "message": record.error or record.error_type or "",
        "error_chain_repr": record.error_chain_repr,
        "error_chain_str": record.error_chain,
        "kind": record.error_kind,
    }


def record_of(row: Mapping[str, Any], rollout_id: str = "", position: int | None = None) -> RolloutRecord:
    """A row that any v0 release or Mettle wrote, as a record; `columns` has whatever the fields cannot say."""
    record = replace(figures_of(row), rollout_id=rollout_id, position=position)
    again = output_row(record)
    return replace(record, columns={k: v for k, v in row.items() if k not in again or again[k] != v})


def figures_of(row: Mapping[str, Any]) -> RolloutRecord:
    """`record_of` without the fields that only publishing the row again needs."""
    usage, timing, metrics = (_mapping(row.get(name)) for name in ("token_usage", "timing", "metrics"))
    prompt = messages_of(row.get("prompt"))
    reward, error = _number(row.get("reward")), row.get("error")
    kind = error_type = message = chain = chain_repr = None
    if error:
        told = error if isinstance(error, Mapping) else {"message": str(error)}
        error_type = str(told.get("error") or "Error")
        message = str(told.get("message") or told.get("error_chain_str") or "")
        chain, chain_repr = told.get("error_chain_str"), told.get("error_chain_repr")
        kind = str(told.get("kind") or KINDS_BY_TYPE.get(error_type, "rollout"))
        reward = None
    elif reward is None:
        kind = UNSCORED
    counted = None if usage is None else {str(k): v for k, raw in usage.items() if (v := _number(raw)) is not None}
    tools = row.get("tool_defs")
    return RolloutRecord(
        rollout_id="",
        reward=reward,
        metrics={str(name): value for name, raw in (metrics or {}).items() if (value := _number(raw)) is not None},
        messages=[*prompt, *messages_of(row.get("completion"))],
        num_prompt_messages=len(prompt),
        stop_condition=None if (stop := row.get("stop_condition")) is None else str(stop),
        is_truncated=bool(row.get("is_truncated")),
        is_completed=bool(row.get("is_completed", True)),
        duration_s=_seconds(timing, "total") or 0.0,
        model_s=_seconds(timing, "model"),
        env_s=_seconds(timing, "env"),
        scoring_s=_seconds(timing, "scoring"),
        timing=None if timing is None else dict(timing),
        error_kind=kind,
        error=message,
        error_type=error_type,
        error_chain=chain if isinstance(chain, str) else None,
        error_chain_repr=chain_repr if isinstance(chain_repr, str) else None,
        answer=row.get("answer", ""),
        info=row.get("info"),
        example_id=row.get("example_id", 0),
        uid=str(row.get("task_key") or ""),
        token_usage=counted,
        tool_defs=tools if isinstance(tools, list) else [],
    )


def task_key_of(row: Mapping[str, Any]) -> str:
    """A task's identity: a hash of what is asked and expected, the same in every process.

    `example_id` is a place in the dataset, which says nothing once the dataset has changed.
    """
    task = {name: row[name] for name in TASK_FIELDS if row.get(name)}
    text = json.dumps(task, sort_keys=True, default=lambda value: type(value).__qualname__, skipkeys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def saved_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as they are published: tool calls as JSON strings."""
    return [_saved(message) if message.get("tool_calls") else message for message in messages]


def messages_of(value: Any) -> list[dict[str, Any]]:
    """Saved messages as a list: the text of a completion model becomes one message."""
    if isinstance(value, str):
        return [{"role": "text", "content": value}]
    if not isinstance(value, list):
        return []
    return [_message(message) for message in value if isinstance(message, dict)]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose role is a text and whose tool calls are a list."""
    if not isinstance(message.get("role", ""), str):
        message = {**message, "role": str(message["role"])}
    calls = message.get("tool_calls")
    return message if isinstance(calls, list | None) else {**message, "tool_calls": [calls]}


def json_line(output: Mapping[str, Any]) -> str:
    """A row as one line that UTF-8 can hold."""
    return json_text(output) + "\n"


def _saved(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "tool_calls": [c if isinstance(c, str) else json.dumps(c) for c in message["tool_calls"]]}


def _mapping(value: Any) -> Mapping[str, Any] | None:
    return value if isinstance(value, Mapping) else None


def _number(value: Any) -> float | None:
    """A finite number that figures can be made of, or None."""
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # a whole number of more than 308 digits
        return None
    return number if abs(number) <= MAX_NUMBER else None


def _seconds(timing: Mapping[str, Any] | None, name: str) -> float | None:
    """A duration; older files have milliseconds under another name."""
    if timing is None:
        return None
    value = timing.get(name)
    if isinstance(value, Mapping):
        value = value.get("duration")
    if value is None and timing.get(f"{name}_ms") is not None:
        milliseconds = _number(timing[f"{name}_ms"])
        return None if milliseconds is None else milliseconds / 1000
    return _number(value)
