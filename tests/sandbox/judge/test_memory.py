"""Judgements that are remembered: only equal ones, only final ones, and never more than was asked for."""

from __future__ import annotations

import asyncio

import pytest

from mettle.sandbox import CallTest, JudgeResult, PythonChecker, SandboxConfig, SandboxPool, StdioTest, Verdict
from mettle.sandbox.judge.memory import JudgementCache
from mettle.sandbox.judge.orders import make_job
from mettle.sandbox.judge.request import JudgeRequest

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("_needs_isolation")]

DRAWS = "import os; print(os.urandom(8).hex())"
CONFIG = SandboxConfig(warm=0, max_remembered=2)


async def test_a_pool_remembers_nothing_unless_it_is_asked_to(pool: SandboxPool) -> None:
    results = [await pool.judge(DRAWS, [StdioTest("", "1")]) for _ in range(2)]
    assert results[0].tests[0].output != results[1].tests[0].output
    assert pool.stats.num_remembered == 0


async def test_the_same_judgement_is_run_once_also_when_asked_for_at_once() -> None:
    async with SandboxPool(CONFIG) as pool:
        results = await asyncio.gather(*(pool.judge(DRAWS, [StdioTest("", "1")]) for _ in range(8)))
        assert len({result.tests[0].output for result in results}) == 1
        assert sum(result.is_remembered for result in results) == 7
        assert (pool.stats.num_judged, pool.stats.num_remembered) == (8, 7)


async def test_whatever_is_different_is_judged_anew() -> None:
    async with SandboxPool(CONFIG) as pool:
        await pool.judge(DRAWS, [StdioTest("", "1")])
        for code, tests, options in [
            (DRAWS + " ", [StdioTest("", "1")], {}),
            (DRAWS, [StdioTest("", "1", compare="exact")], {}),
            (DRAWS, [StdioTest("", "1")], {"timeout_s": 3.0}),
            (DRAWS, [StdioTest("", "1")], {"checker": PythonChecker("def check(*a): return True")}),
            (DRAWS, [StdioTest("", "1")], {"stop_at_first_failure": True}),
            ("f = lambda x: x", [CallTest("f", (1,), expected=1)], {}),
            ("f = lambda x: x", [CallTest("f", (True,), expected=1)], {}),
            ("f = lambda x: x", [CallTest("f", (1,), expected=1.0)], {}),
        ]:
            assert not (await pool.judge(code, tests, **options)).is_remembered  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "code",
    ["import os; os.kill(os.getpid(), 9)", "while True: pass", "x = 'x' * (1 << 40)", "while 1: print('x' * 99)"],
)
async def test_an_end_that_could_have_been_another_is_not_kept(code: str) -> None:
    async with SandboxPool(CONFIG) as pool:
        results = await asyncio.gather(*(pool.judge(code, [StdioTest()], timeout_s=0.1) for _ in range(3)))
        assert not any(result.is_remembered for result in results)
        assert all(result.tests[0].verdict not in (Verdict.PASSED, Verdict.WRONG) for result in results)


async def test_what_is_kept_is_bounded_in_number_and_in_bytes(pool: SandboxPool) -> None:
    result = await pool.judge("print('x' * 1000)", [StdioTest("", "1")])
    jobs = [make_job(pool.config, JudgeRequest(f"print({n})", [StdioTest("", "1")])) for n in range(5)]

    async def judge() -> object:
        return result

    few, small = JudgementCache(2), JudgementCache(100, max_bytes=17_000)
    for memory in (few, small):
        for job in jobs:
            await memory.judged(job, judge)  # type: ignore[arg-type]
    assert len(few) == len(small) == 2
    assert small.num_bytes <= 17_000
    assert not (await few.judged(jobs[0], judge)).is_remembered  # type: ignore[arg-type]
    assert (await few.judged(jobs[4], judge)).is_remembered  # type: ignore[arg-type]


async def test_who_waits_for_one_that_is_cancelled_judges_for_himself() -> None:
    async with SandboxPool(CONFIG) as pool:
        job = make_job(pool.config, JudgeRequest("print(1)", [StdioTest("", "1")]))
        begun, memory = asyncio.Event(), JudgementCache(2)

        async def never_done() -> JudgeResult:
            begun.set()
            return await asyncio.get_running_loop().create_future()

        async def judge() -> JudgeResult:
            return await pool.judge("print(1)", [StdioTest("", "1")])

        first = asyncio.create_task(memory.judged(job, never_done))
        await begun.wait()
        second = asyncio.create_task(memory.judged(job, judge))
        await asyncio.sleep(0)
        assert not second.done()
        first.cancel()
        result = await second
        assert (result.has_passed, result.is_remembered) == (True, False)
