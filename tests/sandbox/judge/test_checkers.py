"""Checkers: what they may say, what happens when they break, and that the solution has no way to them."""

from __future__ import annotations

import shutil

import pytest

from mettle.errors import UserError
from mettle.sandbox import (
    CallTest,
    Checker,
    CheckerError,
    ProgramChecker,
    PythonChecker,
    SandboxPool,
    StdioTest,
    TestResult,
    Verdict,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

DIVISORS = PythonChecker(
    "def check(stdin, expected, output):\n"
    "    a, b = map(int, output.split())\n"
    "    return a * b == int(stdin) and 1 < a, f'{a} times {b}'\n"
)
SHELL_DIVISORS = ProgramChecker(
    "read n < $1; read a b < $2\n"
    '[ -z "$b" ] && { echo two numbers, please >&2; exit 2; }\n'
    "[ $((a * b)) = $n ] && exit 0; echo $a times $b is not $n >&2; exit 1\n",
    language="bash",
)
C_DIVISORS = ProgramChecker(
    '#include "tiny.h"\nint main(int c, char **v) { long n, a, b; FILE *i = fopen(v[1], "r"), *o = fopen(v[2], "r");\n'
    'if (fscanf(i, "%ld", &n) != 1) return 3; if (fscanf(o, "%ld %ld", &a, &b) != 2) return 2;\n'
    "return a * b == n ? 0 : 1; }",
    language="c",
    files={"tiny.h": "#include <stdio.h>\n"},
)
needs_gcc = pytest.mark.skipif(not shutil.which("gcc"), reason="no C compiler")
CHECKERS = [DIVISORS, SHELL_DIVISORS, pytest.param(C_DIVISORS, marks=needs_gcc)]


async def judge(pool: SandboxPool, code: str, test: StdioTest | CallTest, checker: Checker) -> TestResult:
    return (await pool.judge(code, [test], checker=checker)).tests[0]


@pytest.mark.parametrize("checker", CHECKERS, ids=["python", "bash", "c"])
async def test_a_checker_decides_where_more_than_one_output_is_right(pool: SandboxPool, checker: Checker) -> None:
    tests = [StdioTest("12", "3 4"), StdioTest("15", "3 5"), StdioTest("13", "")]
    code = "n = int(input())\nprint(2, n // 2) if n % 2 == 0 else print(n // 3, 3)"
    result = await pool.judge(code, tests, checker=checker)
    assert [test.verdict for test in result.tests] == [Verdict.PASSED, Verdict.PASSED, Verdict.WRONG], result.tests
    assert [test.score for test in result.tests] == [1.0, 1.0, 0.0]
    assert [test.stage for test in result.tests] == ["check"] * 3
    assert result.score == pytest.approx(2 / 3)


@pytest.mark.parametrize("checker", CHECKERS, ids=["python", "bash", "c"])
async def test_an_output_that_a_checker_cannot_read_is_wrong(pool: SandboxPool, checker: Checker) -> None:
    result = await judge(pool, "print('x' * 10)", StdioTest("12", "3 4"), checker)
    assert result.verdict is Verdict.WRONG, result
    assert result.detail


async def test_a_bad_end_is_not_checked(pool: SandboxPool) -> None:
    yes = PythonChecker("def check(*a): return True")
    assert (await judge(pool, "raise SystemExit(1)", StdioTest(), yes)).verdict is Verdict.ERROR
    assert (await judge(pool, "while True: pass", StdioTest(), yes)).verdict is Verdict.TIMEOUT
    assert (await judge(pool, "", StdioTest(), yes)).verdict is Verdict.PASSED


@pytest.mark.parametrize(
    ("returned", "verdict", "score", "words"),
    [
        ("True", Verdict.PASSED, 1.0, ""),
        ("1", Verdict.PASSED, 1.0, ""),
        ("0.25", Verdict.WRONG, 0.25, "does not accept"),
        ("(0.25, 'a quarter')", Verdict.WRONG, 0.25, "a quarter"),
        ("(False, 'no')", Verdict.WRONG, 0.0, "no"),
        ("(True, 'yes')", Verdict.PASSED, 1.0, "yes"),
    ],
)
async def test_a_checker_gives_a_verdict_or_a_part_of_one(
    pool: SandboxPool, returned: str, verdict: Verdict, score: float, words: str
) -> None:
    result = await judge(pool, "", StdioTest(), PythonChecker(f"def check(*a): return {returned}"))
    assert (result.verdict, result.score) == (verdict, score)
    assert words in result.detail


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def check(*a): return None", "score is None"),
        ("def check(*a): return 2", "from 0 to 1"),
        ("def check(*a): return float('nan')", "nan"),
        ("def check(*a): return (True, 3)", "message is a int"),
        ("def check(*a): return object()", "cannot be compared"),
        ("def check(*a): raise ValueError('broken')", "ValueError: broken"),
        ("def check(*a):\n  while True: pass", "timeout"),
        ("def check(*a): return 'x' * (1 << 30)", "memory"),
        ("import os\ndef check(*a): os._exit(0)", "no answer"),
        ("import os\ndef check(*a): os.kill(os.getpid(), 9)", "SIGKILL"),
        ("def check(", "SyntaxError"),
        ("x = 1", "defines no function"),
    ],
)
async def test_a_broken_checker_is_no_verdict(pool: SandboxPool, code: str, words: str) -> None:
    with pytest.raises(CheckerError, match=words):
        await judge(pool, "", StdioTest(), PythonChecker(code, timeout_s=0.3))
    assert (await pool.judge("print(1)", [StdioTest("", "1")])).has_passed


@pytest.mark.parametrize(
    ("code", "verdict", "score"),
    [
        ("exit 0", Verdict.PASSED, 1.0),
        ("exit 1", Verdict.WRONG, 0.0),
        ("exit 2", Verdict.WRONG, 0.0),
        ("exit 8", Verdict.WRONG, 0.0),
        ("echo 'points 5 half of it' >&2; exit 7", Verdict.WRONG, 0.5),
        ("echo 10 >&2; exit 7", Verdict.PASSED, 1.0),
    ],
)
async def test_the_exit_code_of_a_program_is_its_verdict(
    pool: SandboxPool, code: str, verdict: Verdict, score: float
) -> None:
    checker = ProgramChecker(code, language="bash", max_points=10)
    result = await judge(pool, "", StdioTest(), checker)
    assert (result.verdict, result.score) == (verdict, score)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("echo the jury is wrong >&2; exit 3", "exit code 3: the jury is wrong"),
        ("echo 99 >&2; exit 7", "score is 99.0"),
        ("exit 7", "exit code 7"),
        ("kill -9 $$", "SIGKILL"),
        ("while :; do :; done", "timeout"),
        ("while :; do echo xxxxxxxxxxxxxxxxxxx; done", "output"),
    ],
)
async def test_a_program_that_fails_is_no_verdict(pool: SandboxPool, code: str, words: str) -> None:
    with pytest.raises(CheckerError, match=words):
        await judge(pool, "", StdioTest(), ProgramChecker(code, language="bash", max_points=10, timeout_s=0.3))


@needs_gcc
async def test_a_checker_that_does_not_compile_shows_the_compilers_words(pool: SandboxPool) -> None:
    with pytest.raises(CheckerError, match="undeclared"):
        await judge(pool, "", StdioTest(), ProgramChecker("int main(void) { return undeclared; }", language="c"))


async def test_a_checker_sees_bytes_as_they_are_and_hostile_ones_as_text(pool: SandboxPool) -> None:
    code = "import sys; sys.stdout.buffer.write(bytes(range(256)))"
    same = ProgramChecker("cmp $2 $3", language="bash")
    assert (await judge(pool, code, StdioTest("", bytes(range(256))), same)).has_passed
    text = PythonChecker("def check(i, e, o): return o.startswith('\\0\\1') and o.endswith('\\ufffd')")
    assert (await judge(pool, code, StdioTest(), text)).has_passed


async def test_a_function_is_checked_by_its_arguments_and_value(pool: SandboxPool) -> None:
    checker = PythonChecker("def check(args, expected, value): return sorted(value) == sorted(args[0])")
    tests = [CallTest("shuffle", ([3, 1, 2],), expected=None), CallTest("shuffle", ([],), expected=None)]
    assert (await pool.judge("def shuffle(x): return x[::-1]", tests, checker=checker)).has_passed
    result = await pool.judge("def shuffle(x): return x[:1]", tests, checker=checker)
    assert [test.verdict for test in result.tests] == [Verdict.WRONG, Verdict.PASSED]
    assert result.tests[0].output == [3]


@pytest.mark.parametrize(
    ("checker", "test", "words"),
    [
        (lambda *a: True, StdioTest(), "must be a PythonChecker or a ProgramChecker"),
        (PythonChecker(b"x"), StdioTest(), "must be text"),  # type: ignore[arg-type]
        (PythonChecker("def check(*a): 1", timeout_s=-1), StdioTest(), "timeout_s is -1"),
        (PythonChecker("def check(*a): 1"), CallTest("f", (), {"x": 1}), "positional"),
        (PythonChecker("def check(*a): 1"), CallTest("f", (1,), expected=object()), "cannot be sent"),
        (ProgramChecker("x", language="python"), StdioTest(), "PythonChecker"),
        (ProgramChecker("x", language="brainfuck"), StdioTest(), "brainfuck"),
        (ProgramChecker("x", language="bash"), CallTest("f", (1,)), "reads files"),
        (ProgramChecker("x", language="bash", files={"../x": ""}), StdioTest(), "cannot be called"),
        (ProgramChecker("x", language="bash", files={"input.txt": ""}), StdioTest(), "cannot be called"),
        (ProgramChecker("x", language="bash", files={"x": "x" * (17 << 20)}), StdioTest(), "max_input_mb"),
    ],
)
async def test_a_checker_that_cannot_be_asked_is_one_clear_error(
    pool: SandboxPool, checker: Checker, test: StdioTest | CallTest, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        await judge(pool, "def f(*a): return 1", test, checker)
    assert (await pool.judge("print(1)", [StdioTest("", "1")])).has_passed


async def test_one_checkers_traces_are_not_seen_by_the_next_question(pool: SandboxPool) -> None:
    checker = PythonChecker(
        "import os\ndef check(i, e, o):\n  seen = os.path.exists('/tmp/mark')\n  open('/tmp/mark', 'w').close()\n"
        "  return not seen"
    )
    result = await pool.judge("print(1)", [StdioTest()] * 3, checker=checker, num_parallel=2)
    assert result.has_passed
    assert pool.stats.num_running == 0
