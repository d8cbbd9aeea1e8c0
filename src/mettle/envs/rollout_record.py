"""A finished rollout as a row of the results: what is kept of a state.

Parts: `output_of`, `token_usage`. The row's format is described in `mettle.evals.output`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mettle.envs.errors import ErrorChain, error_data
from mettle.envs.state import State
from mettle.evals.output import saved_messages


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
