"""Saved evaluations of known content."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Saved = Callable[..., Path]


@pytest.fixture
def saved(tmp_path) -> Saved:
    """Write an evaluation whose task i has the rewards `rewards[i]`; None is a failed rollout."""

    def write(rewards: list[list[float | None]], name: str = "a", metadata: dict[str, Any] | None = None) -> Path:
        folder = tmp_path / "outputs" / "evals" / "toy--m" / name
        folder.mkdir(parents=True)
        about = {"env_id": "toy", "model": "m", "rollouts_per_example": max(map(len, rewards), default=1)}
        (folder / "metadata.json").write_text(json.dumps({**about, "pass_threshold": 0.5, **(metadata or {})}))
        rows = [row_of(task, reward) for task, values in enumerate(rewards) for reward in values]
        (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return write


def row_of(task: int, reward: float | None, **fields: Any) -> dict[str, Any]:
    """A row of the published format."""
    error = {"error": "ModelError", "message": "status 500", "kind": "provider"} if reward is None else None
    return {
        "example_id": task,
        "prompt": [{"role": "user", "content": f"question {task}"}],
        "completion": [{"role": "assistant", "content": f"answer {task}"}] if reward is not None else [],
        "answer": str(task),
        "reward": reward,
        "error": error,
        "timing": {"total": 2.0, "model": {"spans": [], "duration": 1.5}, "scoring": {"duration": 0.5}},
        "is_completed": True,
        "is_truncated": False,
        "stop_condition": "max_turns_reached",
        "metrics": {"right": reward} if reward is not None else {},
        "token_usage": {"input_tokens": 10.0, "output_tokens": 3.0} if reward is not None else None,
        "task_key": f"key{task}",
        **fields,
    }
