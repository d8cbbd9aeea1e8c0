"""Reward functions that are coroutines and compute: found out by name, and kept off the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from functools import partial
from pathlib import Path

import pytest

import mettle.envs as vf
from mettle.envs.rubrics.coroutines import HoldMeter, never_waits
from mettle.envs.rubrics.function import RewardFunction

SPIN_S = 0.06


def spin(cpu_s=SPIN_S):
    ends = time.thread_time() + cpu_s
    while time.thread_time() < ends:
        pass


async def computes(completion):
    spin()
    return 1.0


async def computes_and_waits(completion):
    await asyncio.sleep(0)
    spin()
    return 1.0


async def waits(completion):
    await asyncio.sleep(SPIN_S)
    return 1.0


@vf.run_in("process")
async def in_a_process(completion):
    await asyncio.sleep(0)
    return 2.0


class Grader:
    async def __call__(self, completion):
        return 1.0


async def ticks_during(work) -> int:
    """How often somebody who sleeps for a millisecond came to his turn while `work` went on."""
    num_ticks, task = 0, asyncio.ensure_future(work)
    while not task.done():
        await asyncio.sleep(0.001)
        num_ticks += 1
    await task
    return num_ticks


async def test_a_coroutine_that_never_awaits_does_not_hold_the_loop(finished):
    states = [finished() for _ in range(8)]
    num_ticks = await ticks_during(vf.Rubric([computes]).score_group(states))
    assert [state["reward"] for state in states] == [1.0] * 8
    assert num_ticks > 20, "on the loop, the eight calls would leave it one turn each at most"


async def test_one_that_awaits_and_computes_is_named_once(finished, caplog):
    rubric = vf.Rubric([computes_and_waits])
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            await rubric.score_group([finished()])
    (said,) = [record.getMessage() for record in caplog.records if "holds the event loop" in record.getMessage()]
    assert "computes_and_waits" in said
    assert "vf.run_in" in said
    stats = rubric.func_stats()["computes_and_waits"]
    assert stats["runs_in"] == "loop"
    assert stats["held_ms"] >= SPIN_S * 1e3


async def test_one_that_waits_is_not_named(finished, caplog):
    rubric = vf.Rubric([waits])
    with caplog.at_level(logging.WARNING):
        await rubric.score_group([finished() for _ in range(6)])
    assert [record for record in caplog.records if "holds" in record.getMessage()] == []


def test_a_machine_that_is_busy_with_others_is_not_the_function_s_fault(caplog):
    meter = HoldMeter("innocent")
    for _ in range(3):
        meter.add(0.2, cpu_s=0.0)
        for _ in range(2):
            meter.add(0.0, cpu_s=0.0)
    assert caplog.records == []
    for _ in range(9):
        meter.add(0.2, cpu_s=0.0)
    assert len(caplog.records) == 1, "when it is so more often than not, it blocks"


async def test_in_a_thread_of_its_own_it_has_a_loop_of_its_own(finished):
    seen = []

    @vf.run_in("thread")
    async def elsewhere(completion):
        await asyncio.sleep(0)
        seen.append((threading.get_ident(), asyncio.get_running_loop()))
        spin()
        return 1.0

    states = [finished() for _ in range(4)]
    num_ticks = await ticks_during(vf.Rubric([elsewhere]).score_group(states))
    assert [state["reward"] for state in states] == [1.0] * 4
    assert threading.get_ident() not in {thread for thread, _ in seen}
    assert asyncio.get_running_loop() not in [loop for _, loop in seen]
    assert num_ticks > 20


async def test_in_a_process_it_is_run_to_its_end(finished, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import test_coroutines

    state = finished()
    await vf.Rubric([test_coroutines.in_a_process]).score_group([state])
    assert state["reward"] == 2.0, state["error"]


async def test_one_that_wants_the_running_loop_gets_it(finished):
    async def starts_a_task(completion):
        asyncio.get_running_loop().call_soon(list)
        return 1.0

    rubric = vf.Rubric([starts_a_task])
    state = finished()
    await rubric.score_group([state])
    assert state["reward"] == 1.0, state["error"]
    assert rubric.func_stats()["starts_a_task"]["runs_in"] == "loop"


async def test_a_measured_coroutine_is_cancelled_timed_out_and_raised_through_as_ever(finished):
    cleaned = []

    async def hangs(completion):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cleaned.append(completion)
            raise

    async def recovers(completion):
        try:
            async with asyncio.timeout(0.001):
                await asyncio.sleep(60)
        except TimeoutError:
            return 0.5

    async def fails(completion):
        await asyncio.sleep(0)
        raise KeyError("x")

    hung, good, failed = finished(), finished(), finished()
    await vf.Rubric([hangs], func_timeout_seconds=0.01).score_group([hung])
    await vf.Rubric([recovers]).score_group([good])
    await vf.Rubric([fails]).score_group([failed])
    assert str(hung["error"]) == "hangs: no score within 0.01 s"
    assert len(cleaned) == 1
    assert good["reward"] == 0.5
    assert "KeyError" in str(failed["error"])


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (computes, True), (partial(computes, completion="a"), True), (Grader(), True), (Grader().__call__, True),
        (computes_and_waits, False), (waits, False), (len, False),
    ],
)  # fmt: skip
def test_whether_it_awaits_is_read_off_its_code(function, expected):
    assert never_waits(function) is expected


async def test_measuring_costs_microseconds():
    function = RewardFunction(computes_and_waits, None)

    async def nothing():
        return 1.0

    started = time.process_time()
    for _ in range(5_000):
        await function._meter.watch(nothing())
    assert (time.process_time() - started) / 5_000 < 40e-6
