"""Finished rollouts to score."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import mettle.envs as vf
from mettle.envs.rubrics import processes
from mettle.envs.state import State, new_state


@pytest.fixture
def finished() -> Callable[..., State]:
    def make(answer: Any = "a", said: str | None = "a", prompt: Any = (), **row: Any) -> State:
        state = new_state({"prompt": list(prompt), "answer": answer, **row}, None, "m", {}, [])
        state["completion"] = [vf.AssistantMessage(content=said)]
        return state

    return make


@pytest.fixture
def pool() -> Iterator[processes.ScoringProcesses]:
    made = processes.ScoringProcesses(2)
    yield made
    made.close()
