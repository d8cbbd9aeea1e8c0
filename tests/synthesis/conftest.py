"""Rollouts as an evaluation saves them."""

from __future__ import annotations

from typing import Any


def row(task: int = 0, said: str = "yes", reward: float | None = 1.0, **other: Any) -> dict[str, Any]:
    return {
        "example_id": task,
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": f"question {task}"}],
        "completion": [{"role": "assistant", "content": said}],
        "reward": reward,
        "metrics": {"exact": reward},
        "error": None if reward is not None else {"error": "ModelError", "message": "gone"},
        "task_key": f"t{task}",
        "tool_defs": [],
        **other,
    }
