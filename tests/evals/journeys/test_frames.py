"""How deep a model call lies below the call that asks for an evaluation: Python frames of ours, through tasks."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import FrameType

import pytest

import mettle
import mettle.envs as vf

OURS = str(Path(mettle.__file__).parent)
MOST_TO_THE_ENVIRONMENT, MOST_TO_THE_MODEL = 7, 14
"""From `env.evaluate` to `env.run_rollout`, and to the client's `get_response`; both ends counted."""


def our_frames(frame: FrameType | None) -> list[str]:
    """Functions of the package from `frame` outwards, the innermost first."""
    found = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(OURS):
            found.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")
        frame = frame.f_back
    return found


def frames_to_the_model(env, client) -> list[str]:
    """What lies between the caller of `env.evaluate` and the client's `get_response`, the innermost first.

    A task begins a stack of its own; here it is continued by the stack that made it.
    """
    makers: dict[int, list[str]] = {}
    seen: list[list[str]] = []

    def making(loop, coroutine, **more):
        task = asyncio.Task(coroutine, loop=loop, **more)
        makers[id(task)] = chain(sys._getframe(1))
        return task

    def chain(frame) -> list[str]:
        task = asyncio.current_task()
        return [*our_frames(frame), *(makers.get(id(task), []) if task is not None else [])]

    class Watched(type(client)):
        async def get_response(self, *args, **kwargs):
            seen.append(chain(sys._getframe(0)))
            return await super().get_response(*args, **kwargs)

    async def run() -> None:
        asyncio.get_running_loop().set_task_factory(making)
        await env.evaluate(Watched(client.say), "m", num_examples=1)
        asyncio.get_running_loop().set_task_factory(None)

    asyncio.run(run())
    return seen[0]


@pytest.fixture
def env():
    return vf.SingleTurnEnv(
        eval_dataset=[{"question": "q", "answer": "a"}], rubric=vf.Rubric([lambda completion: 1.0]), env_id="toy"
    )


def test_few_frames_lie_between_an_evaluation_and_its_environment(env, scripted):
    found = frames_to_the_model(env, scripted("a"))
    entry = next(place for place, name in enumerate(found) if name.split(".")[1] in ("run_rollout", "run_group"))
    assert found[-1] == "many_rollouts.evaluate"
    assert len(found[entry:]) <= MOST_TO_THE_ENVIRONMENT, found
    assert len(found) + 1 <= MOST_TO_THE_MODEL, found
