"""Judgements: a verdict per test, limits, exact values, and one clear error for bad input."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mettle.errors import UserError
from mettle.sandbox.judge.checkers import CheckerError
from mettle.sandbox.judge.verdicts import CallTest, PythonChecker, StdioTest, Verdict
from mettle.sandbox.protocols import Judge


@pytest.mark.asyncio(loop_scope="module")
class JudgeContract:
    """Everything that judges keep. A subclass gives the fixture `judge`, started."""

    async def test_each_test_has_its_own_verdict(self, judge: Judge) -> None:
        tests = [StdioTest("1 2\n", "3"), StdioTest("1 2\n", "4"), StdioTest("1 x\n", "1")]
        result = await judge.judge("a, b = map(int, input().split())\nprint(a + b)", tests)
        assert [test.verdict for test in result.tests] == [Verdict.PASSED, Verdict.WRONG, Verdict.ERROR]
        assert result.num_passed == 1
        passed, wrong, error = result.tests
        assert (passed.output, passed.expected, passed.exit_code) == ("3\n", "3", 0)
        assert wrong.output == "3\n"
        assert "ValueError" in error.stderr
        assert 0 < passed.wall_s < 10

    async def test_the_isolation_in_force_stands_in_the_result(self, judge: Judge) -> None:
        result = await judge.judge("print(1)", [StdioTest("", "1")])
        assert result.isolation == judge.isolation
        assert result.isolation.layers

    async def test_a_stop_at_the_first_failure_leaves_the_rest_unrun(self, judge: Judge) -> None:
        tests = [StdioTest("", "1"), StdioTest("", "2"), StdioTest("", "1")]
        result = await judge.judge("print(1)", tests, stop_at_first_failure=True)
        assert [test.verdict for test in result.tests] == [Verdict.PASSED, Verdict.WRONG]
        assert result.num_tests == 3

    @pytest.mark.parametrize(
        ("code", "verdict"),
        [
            ("while True: pass", Verdict.TIMEOUT),
            ("import time; time.sleep(60)", Verdict.TIMEOUT),
            ("x = 'a' * (1 << 30)", Verdict.MEMORY),
            ("while True: print('x' * 1000)", Verdict.OUTPUT_LIMIT),
            ("import os; os.kill(os.getpid(), 9)", Verdict.KILLED),
            ("raise SystemExit(3)", Verdict.ERROR),
            ("def f(:", Verdict.ERROR),
            ("print(1); raise SystemExit(1)", Verdict.ERROR),
        ],
    )
    async def test_how_a_program_ends_decides_its_verdict(self, judge: Judge, code: str, verdict: Verdict) -> None:
        result = await judge.judge(code, [StdioTest("", "1")], timeout_s=0.5)
        assert result.tests[0].verdict is verdict, result.tests[0]
        assert result.tests[0].detail

    async def test_bytes_that_are_not_text_come_back_as_they_are(self, judge: Judge) -> None:
        code = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1])"
        every_byte = bytes(range(256))
        result = await judge.judge(code, [StdioTest(every_byte, every_byte[::-1], compare="exact")])
        assert result.has_passed, result

    async def test_functions_are_called_with_exact_values(self, judge: Judge) -> None:
        code = "class Solution:\n  def twice(self, x, *, y=1): return x * 2 * y\ndef same(x): return x"
        tests = [
            CallTest("twice", (3,), {"y": 2}, expected=12),
            CallTest("same", ([1, (2.5, None)],), expected=[1, [2.5, None]]),
            CallTest("same", (1,), expected=True),
            CallTest("same", (1,), expected=1.0, compare="numeric"),
            CallTest("same", ({1: {b"x"}, "k": float("inf")},), expected={1: {b"x"}, "k": float("inf")}),
            CallTest("same", (1 << 5000,), expected=1 << 5000),
        ]
        result = await judge.judge(code, tests)
        passed, wrong = Verdict.PASSED, Verdict.WRONG
        assert [test.verdict for test in result.tests] == [passed, passed, wrong, passed, passed, passed]
        assert result.tests[0].output == 12
        assert result.tests[4].output == {1: {b"x"}, "k": float("inf")}

    async def test_a_tasks_own_checker_decides_and_a_broken_one_is_no_verdict(self, judge: Judge) -> None:
        half = PythonChecker("def check(stdin, output, expected):\n    return 0.5, 'near ' + output.strip()")
        answers = [await judge.judge("print(2)", [StdioTest("", "3")], checker=half)]
        assert answers[0].tests[0].score == 0.5
        assert "near" in answers[0].tests[0].detail
        with pytest.raises(CheckerError):
            await judge.judge("print(2)", [StdioTest("", "3")], checker=PythonChecker("def check(*a): raise KeyError"))

    async def test_tests_side_by_side_keep_their_order(self, judge: Judge) -> None:
        tests = [StdioTest(str(number), str(number)) for number in range(8)]
        result = await judge.judge("print(input())", tests, num_parallel=4)
        assert [test.expected for test in result.tests] == [str(number) for number in range(8)]
        assert result.has_passed

    async def test_bad_input_is_one_clear_error_and_the_pool_stays_healthy(self, judge: Judge) -> None:
        changes: list[tuple[dict[str, Any], str]] = [
            ({"language": "cobol"}, "cobol"),
            ({"code": b"print(1)"}, "must be text"),
            ({"code": "\ud800"}, "surrogate"),
            ({"code": "#" * (5 << 20)}, "max_source_kb"),
            ({"timeout_s": -1}, "timeout_s is -1"),
            ({"timeout_s": float("nan")}, "timeout_s is nan"),
            ({"memory_mb": -5}, "memory_mb is -5"),
            ({"tests": []}, "no tests"),
            ({"tests": [("1", "2")]}, "tuple"),
            ({"tests": [StdioTest(compare="fuzzy")]}, "fuzzy"),  # type: ignore[arg-type]
            ({"tests": [CallTest("f", (object(),))]}, "object"),
        ]
        for change, words in changes:
            request: dict[str, Any] = {"code": "print(1)", "tests": [StdioTest("", "1")], **change}
            with pytest.raises(UserError, match=words):
                await judge.judge(**request)
        # As many as a pool keeps ready, so that one that was spoiled would be met.
        for _ in range(2):
            assert (await judge.judge("print(1)", [StdioTest("", "1")])).has_passed

    async def test_many_at_once_all_get_their_own_answer(self, judge: Judge) -> None:
        async def one(number: int) -> bool:
            tests = [StdioTest(str(number), str(number**2))]
            return (await judge.judge("print(int(input()) ** 2)", tests)).has_passed

        assert all(await asyncio.gather(*(one(number) for number in range(6))))

    async def test_a_cancelled_judgement_leaves_the_pool_healthy(self, judge: Judge) -> None:
        task = asyncio.create_task(judge.judge("import time; time.sleep(60)", [StdioTest()]))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await judge.judge("print(1)", [StdioTest("", "1")])).has_passed
