"""A few threads for one function, and their accounts."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from mettle.envs.rubrics import threads
from mettle.envs.rubrics.threads import ThreadLane
from mettle.envs.rubrics.values import Overrun


def hold_the_loop_until(is_so):
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


async def test_a_call_whose_time_is_over_as_it_ends_is_counted_once(monkeypatch):
    lane = ThreadLane("f")

    async def over(job, timeout_s):
        hold_the_loop_until(lambda: not lane._num_pending)  # its thread has counted it; this loop has not heard of it
        return False

    with monkeypatch.context() as patched:
        patched.setattr(threads, "_settled", over)
        with pytest.raises(Overrun):
            await lane.run(lambda: "late", 60.0)
    assert (lane._num_alive, lane._num_pending, lane.num_abandoned) == (1, 0, 0)
    assert await lane.run(lambda: "next", 60.0) == "next"


def test_a_call_whose_loop_has_been_closed_ends_in_silence():
    lane, begun, may_end = ThreadLane("f"), threading.Event(), threading.Event()
    loop = asyncio.new_event_loop()

    async def ask():
        asking = asyncio.create_task(lane.run(lambda: begun.set() or may_end.wait(60), None))
        await asyncio.to_thread(begun.wait, 60)
        return asking

    asking = loop.run_until_complete(ask())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    loop.is_closed = lambda: False  # it was not when the thread looked
    may_end.set()
    hold_the_loop_until(lambda: not lane._num_pending)
    assert asyncio.run(lane.run(lambda: "next", 60.0)) == "next"  # by the same thread, which has warned of nothing
    assert not asking.done()
