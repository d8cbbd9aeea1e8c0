"""Worker processes: what they answer, what becomes of those that hang or die, and that none is left behind."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mettle.envs.rubrics.processes import ScoringProcesses, WorkerFailed
from mettle.envs.rubrics.values import Overrun

CALLS = "calls:"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_calls_come_back_to_whoever_made_them_and_workers_are_reused(pool):
    values = await asyncio.gather(*(pool.call(CALLS + "double", {"value": i}) for i in range(200)))
    assert values == [2 * i for i in range(200)]
    assert len({await pool.call(CALLS + "pid", {}) for _ in range(10)} | set(pool.pids)) <= 2


def test_who_asks_again_at_the_moment_of_an_answer_is_given_no_worker_more(pool):
    again, is_there = [], threading.Event()

    def ask_again(_):
        again.append(pool.submit(CALLS + "pid", {}))
        is_there.set()

    first = pool.submit(CALLS + "pid", {})
    first.add_done_callback(ask_again)
    assert is_there.wait(100)
    assert again[0].result(100) == first.result()
    assert pool.pids == [first.result()]


async def test_a_call_over_its_time_is_interrupted_and_its_worker_goes_on():
    pool = ScoringProcesses(1)
    before = await pool.call(CALLS + "pid", {})
    with pytest.raises(Overrun):
        await pool.call(CALLS + "spin", {}, timeout_s=0.1)
    assert await pool.call(CALLS + "pid", {}) == before
    pool.close()


async def test_a_worker_that_does_not_listen_is_killed_and_replaced():
    pool = ScoringProcesses(1)
    before = await pool.call(CALLS + "pid", {})
    with pytest.raises(Overrun):
        await pool.call(CALLS + "deaf", {}, timeout_s=0.1)
    after = await pool.call(CALLS + "pid", {})
    assert after != before
    assert not psutil.pid_exists(before)
    assert pool.num_killed == 1
    pool.close()


async def test_a_worker_that_dies_fails_its_call_only():
    pool = ScoringProcesses(1)
    with pytest.raises(WorkerFailed, match="was ended by SIGKILL"):
        await pool.call(CALLS + "die", {})
    assert await pool.call(CALLS + "double", {"value": 4}) == 8
    pool.close()


async def test_what_a_call_prints_is_not_taken_for_its_answer(pool):
    assert await pool.call(CALLS + "shout", {}) == "x" * 3_000_000


@pytest.mark.parametrize(
    ("call", "arguments", "kind", "says"),
    [
        ("fails", {}, TimeoutError, "my own"),
        ("quits", {}, SystemExit, "3"),
        ("double", {"value": None}, TypeError, "unsupported"),
        ("double", {"value": lambda: 1}, WorkerFailed, "cannot go to another process"),
        ("lambdas", {}, RuntimeError, "cannot be pickled"),
        ("missing", {}, AttributeError, "missing"),
    ],
)
async def test_what_goes_wrong_in_a_call_is_raised_here(pool, call, arguments, kind, says):
    with pytest.raises(kind, match=says):
        await pool.call(CALLS + call, arguments)
    assert await pool.call(CALLS + "double", {"value": 1}) == 2


async def test_memory_is_bounded_where_a_bound_is_given():
    pool = ScoringProcesses(1, max_memory_bytes=1 << 29)
    with pytest.raises(MemoryError):
        await pool.call(CALLS + "hungry", {})
    pool.close()


async def test_idle_workers_end_and_come_back():
    pool = ScoringProcesses(1, idle_s=0.1)
    first = await pool.call(CALLS + "pid", {})
    await _until(lambda: not pool.pids)
    assert not psutil.pid_exists(first)
    assert await pool.call(CALLS + "pid", {}) != first
    pool.close()


async def test_calls_after_closing_are_refused_and_waiting_ones_fail(pool):
    waiting = [asyncio.create_task(pool.call(CALLS + "deaf", {}, timeout_s=30)) for _ in range(3)]
    await _until(lambda: len(pool.pids) == 2)
    pool.close()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(error, WorkerFailed) for error in ended)
    with pytest.raises(WorkerFailed, match="were closed"):
        pool.submit(CALLS + "pid", {})


def test_one_pool_serves_several_event_loops(pool):
    assert [asyncio.run(pool.call(CALLS + "double", {"value": i})) for i in range(3)] == [0, 2, 4]


PARENT = """
import sys, time
sys.path.insert(0, {here!r})
from mettle.envs.rubrics.processes import ScoringProcesses
pool = ScoringProcesses(2)
futures = [pool.submit("calls:deaf", dict(), timeout_s=60) for _ in range(2)]
pool_pids = []
while len(pool_pids) < 2:
    time.sleep(0.05)
    pool_pids = pool.pids
time.sleep(0.5)
print(*pool_pids, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_no_worker_outlives_a_parent_that_is_killed_in_the_middle_of_calls(how):
    source = PARENT.format(here=str(Path(__file__).parent))
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(psutil.pid_exists(pid) for pid in pids)
        os.kill(parent.pid, how)
    deadline = time.monotonic() + 60
    while any(_is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _child(pool: ScoringProcesses, answers: multiprocessing.queues.Queue) -> None:  # type: ignore[type-arg]
    answers.put(pool.pids)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_a_forked_child_leaves_its_parents_workers_alone(pool):
    before = await pool.call(CALLS + "pid", {})
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_child, args=(pool, answers))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert await pool.call(CALLS + "double", {"value": 2}) == 4
    assert before in pool.pids
