"""A finished rollout as it is published: one row, one JSON line.

Parts: `output_of` (a finished state as a row), `task_key_of` (what task it was), `json_line`. The files are in
`results`. The format is that of verifiers 0.3: assistant tool calls as JSON strings, each metric again as a key of the
row; what Mettle adds stands under keys of its own (`task_key`). Invariant: a row is one line of valid JSON in UTF-8,
whatever an environment put into it: a figure that is not finite is null, half a surrogate pair is escaped, an object
is its text.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mettle.envs.errors import ErrorChain, error_data
from mettle.envs.state import State

TASK_FIELDS = ("prompt", "answer", "info")


def output_of(state: State, state_columns: Sequence[str] = (), task_key: str | None = None) -> dict[str, Any]:
    """A finished rollout as a row of the results."""
    source = state["input"]
    error = state.get("error")
    metrics = state.get("metrics") or {}
    output: dict[str, Any] = {
        "example_id": source.get("example_id", 0),
        "prompt": saved_messages(source["prompt"]),
        "completion": saved_messages(state.get("completion") or []),
    }
    output.update({key: source[key] for key in ("answer", "info") if source.get(key)})
    output.update(
        reward=state.get("reward"),
        error=error_data(error) if error is not None else None,
        timing=state["timing"].to_dict(),
        is_completed=state["is_completed"],
        is_truncated=state["is_truncated"],
        stop_condition=state.get("stop_condition"),
        metrics=metrics,
        tool_defs=[dict(tool) for tool in state.get("tool_defs") or []],
    )
    usage = token_usage(state)
    if usage is not None:
        output["token_usage"] = usage
    if error is not None:
        output["error_chain"] = str(ErrorChain(error))
        output["long_error_chain"] = repr(ErrorChain(error))
    for name, value in metrics.items():
        output.setdefault(name, value)
    output.update({name: state.get(name) for name in state_columns})
    if task_key is not None:
        output["task_key"] = task_key
    return output


def task_key_of(row: Mapping[str, Any]) -> str:
    """A task's identity: a hash of what is asked and expected, the same in every process.

    `example_id` is a place in the dataset, which says nothing once the dataset has changed.
    """
    task = {name: row[name] for name in TASK_FIELDS if row.get(name)}
    text = json.dumps(task, sort_keys=True, default=lambda value: type(value).__qualname__, skipkeys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def token_usage(state: State) -> dict[str, float] | None:
    """Sums over the rollout's model calls, and the sizes of its last conversation; None where nobody counted."""
    usages = [step["response"].usage for step in state["trajectory"] if step.get("response")]
    counted = [usage for usage in usages if usage is not None]
    if not counted:
        return None
    completion_total = sum(usage.completion_tokens or 0 for usage in counted)
    last_total = counted[-1].total_tokens or 0
    return {
        "input_tokens": float(sum(usage.prompt_tokens or 0 for usage in counted)),
        "output_tokens": float(completion_total),
        "final_input_tokens": float(max(0, last_total - completion_total)),
        "final_output_tokens": float(completion_total),
    }


def saved_messages(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as plain dicts; tool calls as JSON strings."""
    saved = []
    for message in messages:
        plain = {key: value for key, value in message.items() if value is not None}
        if plain.get("tool_calls"):
            plain["tool_calls"] = [c if isinstance(c, str) else json.dumps(c) for c in plain["tool_calls"]]
        saved.append(plain)
    return saved


def json_line(output: Mapping[str, Any]) -> str:
    """A row as one line that UTF-8 can hold."""
    try:
        line = json.dumps(output, ensure_ascii=False, default=as_json, allow_nan=False) + "\n"
        if not line.isascii():
            line.encode()
        return line
    except (ValueError, TypeError, RecursionError):  # UnicodeEncodeError is a ValueError
        return json.dumps(_plain(output, ()), default=as_json) + "\n"


def as_json(value: Any) -> Any:
    """What JSON does not know, as something it does."""
    if isinstance(value, Mapping):
        return dict(value)
    for method in ("model_dump", "to_dict", "tolist"):
        if hasattr(value, method):
            return getattr(value, method)()
    return str(value)


def _plain(value: Any, inside: tuple[int, ...]) -> Any:
    """A copy that JSON can hold; what contains itself ends where it begins again."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if id(value) in inside or len(inside) > 100:
        return f"<{type(value).__name__}>"
    inside = (*inside, id(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item, inside) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, inside) for item in value]
    return _plain(as_json(value), inside)
