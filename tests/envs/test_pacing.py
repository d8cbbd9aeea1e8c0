"""Turns on the event loop: nobody starves, nobody jumps the line, and others are not held up."""

from __future__ import annotations

import asyncio
import time

import mettle.envs as vf
from mettle.envs.pacing import Pacer, pacer


def work(seconds):
    """Hold the loop up for so long, without sleeping."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


async def test_a_slice_with_time_left_makes_nobody_wait():
    pace = Pacer(asyncio.get_running_loop(), slice_s=10.0)
    assert [pace.is_spent for _ in range(100)] == [False] * 100


async def test_work_of_many_coroutines_is_spread_over_many_iterations_in_order():
    pace = Pacer(asyncio.get_running_loop(), slice_s=0.002)
    done, num_turns = [], 0

    async def probe():
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    async def one(number):
        if pace.is_spent:
            await pace.turn()
        work(0.0005)
        done.append(number)

    watching = asyncio.create_task(probe())
    await asyncio.gather(*(one(number) for number in range(200)))
    watching.cancel()
    assert done == sorted(done)
    assert num_turns > 20, "all at once, the loop goes round a few times"


async def test_a_waiter_that_is_cancelled_keeps_nobody_from_their_turn():
    pace = Pacer(asyncio.get_running_loop(), slice_s=0.0)
    assert not pace.is_spent
    waiting = [asyncio.create_task(pace.turn()) for _ in range(20)]
    await asyncio.sleep(0)
    for task in waiting[::2]:
        task.cancel()
    async with asyncio.timeout(60):
        results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [result is None for result in results] == [False, True] * 10
    assert not pace.is_spent


def test_each_loop_has_its_own_pacer():
    async def mine():
        assert pacer() is pacer()
        return pacer()

    assert asyncio.run(mine()) is not asyncio.run(mine())


async def test_two_thousand_rollouts_at_once_let_the_loop_breathe(scripted):
    """Turns of the loop are counted, since the machine may be busy. Without pacing there are less than a dozen."""
    num_turns = 0

    async def probe():
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    env = vf.SingleTurnEnv(dataset=[{"question": "q", "answer": "a"}] * 2000)
    watching = asyncio.create_task(probe())
    results = await env.evaluate(scripted("a"), "m", max_concurrent=2000)
    watching.cancel()
    assert len(results["outputs"]) == 2000
    assert num_turns > 40
