"""What is counted of a recursive rollout, in its state and as metrics of weight 0.

Parts: `RLMMonitorRubric`, `METRICS`, `new_counts`, `set_metrics`. Invariant: every metric is a number in every rollout,
0 where nothing happened.
"""

from __future__ import annotations

from typing import Any

from mettle.envs.rubrics.rubric import Rubric
from mettle.envs.state import State

COUNTED = (
    "sub_llm_call_count", "sub_llm_total_turns", "sub_llm_prompt_tokens", "sub_llm_completion_tokens",
    "sub_llm_total_tool_calls", "sub_llm_batch_count", "sub_llm_max_batch_size", "repl_call_count",
    "repl_total_time_seconds", "root_tool_call_count",
)  # fmt: skip
"""Counted while the rollout runs."""
METRICS = (
    *COUNTED, "sub_llm_mean_batch_size", "repl_mean_time_seconds", "main_rlm_turns", "main_rlm_prompt_tokens",
    "main_rlm_completion_tokens",
)  # fmt: skip


class RLMMonitorRubric(Rubric):
    """The metrics of `METRICS`, by their names."""

    def __init__(self, root_tool_names: list[str] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in METRICS:
            self.add_metric(_metric(name))


def _metric(name: str) -> Any:
    def metric(state: State) -> float:
        return float(state.get(name) or 0)

    metric.__name__ = name
    return metric


def new_counts() -> dict[str, Any]:
    """Every metric at 0."""
    return dict.fromkeys(METRICS, 0)


def set_metrics(state: State) -> None:
    """Those that follow from the others and from the trajectory."""
    state["sub_llm_mean_batch_size"] = state["sub_llm_call_count"] / max(1, state["sub_llm_batch_count"])
    state["repl_mean_time_seconds"] = state["repl_total_time_seconds"] / max(1, state["repl_call_count"])
    usages = [step["response"].usage or {} for step in state["trajectory"] if step.get("response") is not None]
    state["main_rlm_turns"] = len(state["trajectory"])
    state["main_rlm_prompt_tokens"] = sum(usage.get("prompt_tokens") or 0 for usage in usages)
    state["main_rlm_completion_tokens"] = sum(usage.get("completion_tokens") or 0 for usage in usages)
