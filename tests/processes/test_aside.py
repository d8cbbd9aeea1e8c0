"""Work that is done in a process beside: what comes back, and how it ends when it does not."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mettle.processes.aside import Aside, AsideEnded, AsideFailed
from mettle.sandbox.judge.referee import judge_pickled


class Does:
    """A pickle that calls a function where it is read: the work of the tests."""

    def __init__(self, function: Any, *given: Any) -> None:
        self.call = (function, given)

    def __reduce__(self) -> Any:
        return self.call


def order(function: Any, *given: Any) -> bytes:
    return pickle.dumps(Does(function, *given))


@pytest.fixture
async def aside() -> AsyncIterator[Aside]:
    made = Aside(num_children=2, memory_mb=1024)
    yield made
    made.close()


async def test_what_needs_too_much_is_ended_and_the_next_is_done(aside: Aside) -> None:
    with pytest.raises(AsideEnded, match=r"more than 0\.1 s of processor time"):
        await aside.run(judge_pickled, order(eval, "sum(iter(int, 1))"), cpu_s=0.1)
    with pytest.raises(AsideEnded, match="1024 MB"):
        await aside.run(judge_pickled, order(bytearray, 1 << 40), cpu_s=10.0)
    with pytest.raises(AsideFailed, match="judge_pickled: ValueError"):
        await aside.run(judge_pickled, order(str), cpu_s=10.0)


async def test_who_stops_waiting_leaves_no_work_behind(aside: Aside) -> None:
    waiting = asyncio.create_task(aside.run(judge_pickled, order(eval, "sum(iter(int, 1))"), cpu_s=3600.0))
    while not waiting.done() and not aside._num_started:  # noqa: ASYNC110 - a counter
        await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not aside._idle
    with pytest.raises(AsideFailed):  # there is a turn for the next
        await aside.run(judge_pickled, order(str), cpu_s=10.0)
