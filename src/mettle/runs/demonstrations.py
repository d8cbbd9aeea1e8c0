"""Demonstrations for the warm-up: what an environment itself shows to be wanted, as chats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mettle.envs.demonstrations import Demonstrator, has_demonstrations
from mettle.envs.environment import Environment
from mettle.envs.loops import run_sync
from mettle.errors import UserError
from mettle.storage.files import write_atomic


def write_demonstrations(path: Path, env: Environment, *, env_id: str) -> int:
    """Play the demonstrations of the training rows and write them as chats, one a line; returns how many lines.

    Raises: UserError when there are none, or the environment fails under its own.
    """
    lines = run_sync(_play(env, env_id))
    if not lines:
        raise UserError(
            f"environment {env_id!r} has no demonstrations: for a warm-up it needs `demonstrate`, or its rows an "
            "'answer' or 'demonstration'"
        )
    write_atomic(path, ("\n".join(lines) + "\n").encode())
    return len(lines)


async def _play(env: Environment, env_id: str) -> list[str]:
    client = Demonstrator(env)
    lines = []
    for row in env.get_dataset():
        if not has_demonstrations(env, row):
            continue
        state = await env.rollout(row, client, "demonstration")
        if state.get("error") is not None:
            raise UserError(f"environment {env_id!r} fails under its own demonstration: {state['error']}")
        lines += [json.dumps(chat, ensure_ascii=True) for chat in _chats(state)]
    return lines


def _chats(state: Any) -> Iterator[dict[str, Any]]:
    """A chat for each user turn: what trains is what follows the last user message (see `trainer.demonstrations`)."""
    steps = state["trajectory"]
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        messages = [*step["prompt"], *step["completion"]]
        if following is None or any(message["role"] == "user" for message in following["prompt"][len(messages) :]):
            yield {"messages": messages, **({"tools": state["tool_defs"]} if state["tool_defs"] else {})}
