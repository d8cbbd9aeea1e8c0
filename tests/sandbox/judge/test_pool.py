"""What a caller sees: verdicts, limits, and what it is told when it asks for something impossible."""

from __future__ import annotations

import asyncio

import pytest

from mettle.errors import UserError
from mettle.sandbox import CallTest, SandboxConfig, SandboxPool, StdioTest, TestResult, Verdict

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def judge_one(pool: SandboxPool, code: str, test: StdioTest | CallTest, **limits: float) -> TestResult:
    result = await pool.judge(code, [test], **limits)  # type: ignore[arg-type]
    return result.tests[0]


async def test_each_test_has_its_own_verdict(pool: SandboxPool) -> None:
    tests = [StdioTest("1 2\n", "3"), StdioTest("1 2\n", "4"), StdioTest("1 x\n", "1")]
    result = await pool.judge("a, b = map(int, input().split())\nprint(a + b)", tests)
    assert [test.verdict for test in result.tests] == [Verdict.PASSED, Verdict.WRONG, Verdict.ERROR]
    assert result.num_passed == 1
    assert not result.has_passed
    assert result.isolation.grade == "ns"
    passed, wrong, error = result.tests
    assert (passed.output, passed.expected, passed.exit_code) == ("3\n", "3", 0)
    assert wrong.output == "3\n"
    assert "a, b = map(int, input().split())" in error.stderr
    assert "ValueError" in error.detail
    assert 0 < passed.cpu_s < 1


async def test_a_stop_at_the_first_failure_leaves_the_rest_unrun(pool: SandboxPool) -> None:
    tests = [StdioTest("", "1"), StdioTest("", "2"), StdioTest("", "1")]
    result = await pool.judge("print(1)", tests, stop_at_first_failure=True)
    assert [test.verdict for test in result.tests] == [Verdict.PASSED, Verdict.WRONG]
    assert result.num_tests == 3
    assert result.fraction_passed == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("code", "verdict", "words"),
    [
        ("while True: pass", Verdict.TIMEOUT, "processor"),
        ("x = 'a' * (1 << 30)", Verdict.MEMORY, "allocation"),
        ("while True: print('x' * 1000)", Verdict.OUTPUT_LIMIT, "output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", Verdict.OUTPUT_LIMIT, "output"),
        ("import os; os.kill(os.getpid(), 9)", Verdict.KILLED, "SIGKILL"),
        ("import os; os.abort()", Verdict.KILLED, "SIGABRT"),
        ("import ctypes; ctypes.string_at(0)", Verdict.KILLED, "SIGSEGV"),
        ("raise SystemExit(3)", Verdict.ERROR, "exit status 3"),
        ("raise SystemExit('bye')", Verdict.ERROR, "bye"),
        ("def f(:", Verdict.ERROR, "SyntaxError"),
        ("import no_such_module", Verdict.ERROR, "ModuleNotFoundError"),
        ("def f(): f()\nf()", Verdict.ERROR, "RecursionError"),
        ("\0", Verdict.ERROR, "null bytes"),
        ("(" * 100_000, Verdict.ERROR, "exit status 1"),
    ],
)
async def test_how_a_program_ends_decides_its_verdict(
    pool: SandboxPool, code: str, verdict: Verdict, words: str
) -> None:
    result = await judge_one(pool, code, StdioTest(), timeout_s=0.5)
    assert result.verdict is verdict, result
    assert words in result.detail


async def test_right_output_with_a_bad_end_has_not_passed(pool: SandboxPool) -> None:
    assert (await judge_one(pool, "print(1); raise SystemExit(1)", StdioTest("", "1"))).verdict is Verdict.ERROR
    assert (await judge_one(pool, "raise ValueError", StdioTest("", ""))).verdict is Verdict.ERROR
    assert (await judge_one(pool, "", StdioTest("", ""))).verdict is Verdict.PASSED


async def test_sleepers_and_the_stopped_end_by_the_wall_clock(pool: SandboxPool) -> None:
    codes = [
        "import time; time.sleep(300)",
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
        "import signal, time\n"
        "for n in set(range(1, 64)) - {9, 19, 32, 33}: signal.signal(n, signal.SIG_IGN)\n"
        "time.sleep(300)",
    ]
    results = await asyncio.gather(*(judge_one(pool, code, StdioTest(), timeout_s=0.1) for code in codes))
    for result in results:
        assert result.verdict is Verdict.TIMEOUT
        assert "wall" in result.detail
        assert result.cpu_s < 0.1
        assert 2.0 < result.wall_s < 200.0


async def test_processor_time_of_all_processes_counts(pool: SandboxPool) -> None:
    code = "import os\nfor _ in range(3): os.fork()\nwhile True: pass"
    result = await judge_one(pool, code, StdioTest(), timeout_s=0.2)
    assert result.verdict is Verdict.TIMEOUT
    assert 0.15 < result.cpu_s < 1.0


async def test_memory_of_all_processes_counts(pool: SandboxPool) -> None:
    code = "import os, time\nfor _ in range(3): os.fork()\nx = bytearray(40 << 20)\ntime.sleep(60)"
    result = await judge_one(pool, code, StdioTest(), memory_mb=160)
    assert result.verdict is Verdict.MEMORY


async def test_a_program_runs_as_the_main_module(pool: SandboxPool) -> None:
    code = (
        "import atexit, pickle, sys, threading\n"
        "class A: pass\n"
        "assert isinstance(pickle.loads(pickle.dumps(A())), A)\n"
        "import __main__\n"
        "assert __main__.A is A and __name__ == '__main__'\n"
        "assert not [name for name in sys.modules if name.startswith('mettle')]\n"
        "import os, signal; assert 'LD_BIND_NOW' not in os.environ\n"
        "assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL\n"
        "atexit.register(print, 'last')\n"
        "threading.Timer(0.05, print, ['thread']).start()\n"
        "print(open('/dev/stdin').read().strip())\n"
        "exit()\n"
    )
    result = await judge_one(pool, code, StdioTest("first\n", "first thread last"))
    assert result.has_passed, result


async def test_programs_can_use_threads_processes_and_files(pool: SandboxPool) -> None:
    code = (
        "import asyncio, multiprocessing, subprocess, tempfile\n"
        "def square(n): return n * n\n"
        "async def main(): await asyncio.sleep(0); return 1\n"
        "if __name__ == '__main__':\n"
        "  with multiprocessing.get_context('fork').Pool(2) as pool: print(sum(pool.map(square, range(4))))\n"
        "  print(subprocess.run(['/bin/echo', 'hi'], capture_output=True, text=True).stdout.strip())\n"
        "  print(asyncio.run(main()))\n"
        "  with tempfile.TemporaryFile() as f: f.write(b'x'); print(f.tell())\n"
    )
    result = await judge_one(pool, code, StdioTest("", "14 hi 1 1"))
    assert result.has_passed, result


async def test_large_input_is_read_or_ignored(pool: SandboxPool) -> None:
    text = "7 " * (2 << 20)
    code = "import sys; print(sum(map(int, sys.stdin.read().split())))"
    assert (await judge_one(pool, code, StdioTest(text, str(7 * (2 << 20))))).has_passed
    assert (await judge_one(pool, "print(1)", StdioTest(text, "1"))).has_passed


async def test_bytes_that_are_not_text_come_back_as_they_are(pool: SandboxPool) -> None:
    code = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1])"
    every_byte = bytes(range(256))
    assert (await judge_one(pool, code, StdioTest(every_byte, every_byte[::-1], compare="exact"))).has_passed
    assert (await judge_one(pool, "print('\\ud800')", StdioTest("", b"\xed\xa0\x80\n"))).verdict is not Verdict.PASSED


async def test_functions_and_methods_are_called_with_exact_values(pool: SandboxPool) -> None:
    code = (
        "class Solution:\n"
        "  def twice(self, x, *, y=1):\n"
        "    print('noise')\n"
        "    return x * 2 * y\n"
        "def same(x): return x"
    )
    tests = [
        CallTest("twice", (3,), expected=6),
        CallTest("twice", (3,), {"y": 2}, expected=12),
        CallTest("same", ([1, (2.5, None)],), expected=[1, [2.5, None]]),
        CallTest("same", (1,), expected=True),
        CallTest("same", (1,), expected=1.0),
        CallTest("same", (1,), expected=1.0, compare="numeric"),
        CallTest("missing", (), expected=None),
    ]
    result = await pool.judge(code, tests)
    verdicts = [test.verdict for test in result.tests]
    P, W, E = Verdict.PASSED, Verdict.WRONG, Verdict.ERROR
    assert verdicts == [P, P, P, W, W, P, E]
    assert result.tests[0].output == 6
    assert result.tests[0].stdout == "noise\n"
    assert "missing" in result.tests[-1].detail


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"language": "cobol"}, "cobol"),
        ({"code": b"print(1)"}, "must be text"),
        ({"code": "\ud800"}, "surrogate"),
        ({"code": "#" * (100 << 20)}, "max_source_kb"),
        ({"timeout_s": -1}, "timeout_s is -1"),
        ({"timeout_s": float("nan")}, "timeout_s is nan"),
        ({"timeout_s": True}, "timeout_s is True"),
        ({"memory_mb": -5}, "memory_mb is -5"),
        ({"memory_mb": 100.5}, "memory_mb is 100.5"),
        ({"tests": []}, "no tests"),
        ({"tests": [("1", "2")]}, "tuple"),
        ({"tests": [StdioTest(stdin=3)]}, "stdin must be text"),  # type: ignore[arg-type]
        ({"tests": [StdioTest(stdin="x" * (17 << 20))]}, "max_input_mb"),
        ({"tests": [StdioTest(compare="fuzzy")]}, "fuzzy"),  # type: ignore[arg-type]
        ({"tests": [CallTest("f", (object(),))]}, "object"),
    ],
)
async def test_bad_input_is_one_clear_error_and_the_pool_stays_healthy(
    pool: SandboxPool, change: dict[str, object], words: str
) -> None:
    request: dict[str, object] = {"code": "print(1)", "tests": [StdioTest("", "1")], **change}
    with pytest.raises(UserError, match=words):
        await pool.judge(**request)  # type: ignore[arg-type]
    assert (await pool.judge("print(1)", [StdioTest("", "1")])).has_passed


async def test_a_pool_that_was_not_started_says_so() -> None:
    with pytest.raises(UserError, match="async with"):
        await SandboxPool(SandboxConfig()).judge("print(1)", [StdioTest("", "1")])


async def test_more_solutions_than_slots_all_get_their_own_answer(pool: SandboxPool) -> None:
    async def one(number: int) -> bool:
        result = await pool.judge("print(int(input()) ** 2)", [StdioTest(str(number), str(number**2))])
        return result.has_passed

    assert all(await asyncio.gather(*(one(number) for number in range(40))))
    assert pool.stats.num_running == 0


async def test_a_cancelled_judgement_leaves_nothing_behind(pool: SandboxPool) -> None:
    task = asyncio.create_task(pool.judge("import time; time.sleep(60)", [StdioTest()]))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pool.stats.num_running == 0
    assert (await pool.judge("print(1)", [StdioTest("", "1")])).has_passed
