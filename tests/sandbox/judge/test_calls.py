"""Functions in JavaScript and bash: called with exact values, compared outside, and not believed.

The forgeries of `DECEIVES` are also given to a judge that compares inside, which they deceive: that run proves that
the other can fail.
"""

from __future__ import annotations

import math
import shutil
import subprocess
from pathlib import Path

import pytest
from call_forgeries import BASH, DECEIVES, GAINS_NOTHING, LOOKS_THROUGH_ITS_MEMORY, NAIVE

from mettle.errors import UserError
from mettle.sandbox import (
    CallTest,
    LanguageSpec,
    PythonChecker,
    SandboxConfig,
    SandboxPool,
    StdioTest,
    Verdict,
)

in_loop = pytest.mark.asyncio(loop_scope="module")
needs_node = pytest.mark.skipif(not shutil.which("node"), reason="no Node.js")
EVERYTHING = [
    *(None, True, False, 0, -7, 2.5, -0.0, 1e300, 1 << 53, -(1 << 70), math.inf, -math.inf),
    *("", "a\u00e9\u2028\U0001f600\0", "\ud800", b"\x00\xff", [], [[], [[1]]], {}, {"a": {"__proto__": [1], "": 2}}),
    *({1: "x"}, {1, 2}, set(), {"$int": "5", "toJSON": None}),
]


@needs_node
@in_loop
async def test_values_go_into_javascript_and_come_back_as_they_were(pool: SandboxPool) -> None:
    tests = [CallTest("same", (value,), expected=value) for value in (EVERYTHING, None, True, 7, 2.5)]
    result = await pool.judge("const same = (value) => value;", tests, language="javascript")
    assert result.has_passed, [test for test in result.tests if not test.has_passed]
    assert [type(test.output) for test in result.tests] == [list, type(None), bool, int, float]


@needs_node
@pytest.mark.parametrize(
    "code",
    [
        "function add(a, b) { return a + b }",
        "const add = (a, b) => a + b",
        "var add = async function (a, b) { await null; return a + b }",
        "class Solution { add(a, b) { return this.sum(a, b) } sum(a, b) { return a + b } }",
        "module.exports = { add: (a, b) => a + b }",
        "exports.add = (a, b) => a + b",
        "const module = 1, require = 2; let name = 'x';\nfunction add(a, b) { return a + b }",
        "if (require.main === module) process.exit(1);\nfunction add(a, b) { return a + b }",
        "console.log('words'); setInterval(() => {}, 9); function add(a, b) { return a + b }",
        "Array.prototype.last = function () { return 9 }; Object.prototype.x = 1; function add(a, b) { return a + b }",
    ],
)
@in_loop
async def test_a_function_is_found_wherever_solutions_have_it(pool: SandboxPool, code: str) -> None:
    result = await pool.judge(code, [CallTest("add", (2, 3), expected=5)], language="js")
    assert result.has_passed, result.tests


@needs_node
@in_loop
async def test_numbers_of_javascript_are_of_one_type_and_nothing_else_is(pool: SandboxPool) -> None:
    tests = [
        CallTest("same", (5,), expected=5.0),
        CallTest("same", (0.1,), expected=0.1 + 1e-9, tolerance=1e-6),
        CallTest("same", (0.1,), expected=0.1 + 1e-9),
        CallTest("same", (1,), expected=True),
        CallTest("same", ("5",), expected=5),
        CallTest("same", ([1, (2, None)],), expected=[1, [2, None]]),
        CallTest("same", ({"a": 1, "b": 2},), expected={"b": 2, "a": 1}),
        CallTest("same", ([],), expected={}),
    ]
    result = await pool.judge("function same(x) { return x }", tests, language="javascript")
    assert [test.has_passed for test in result.tests] == [True, True, False, False, False, True, True, False]


@needs_node
@in_loop
async def test_what_a_function_does_wrong_is_said(pool: SandboxPool) -> None:
    async def judge(code: str) -> tuple[Verdict, str]:
        [test] = (await pool.judge(code, [CallTest("f", (), expected=1)], language="js", timeout_s=0.5)).tests
        return test.verdict, test.detail

    assert await judge("function g() {}") == (
        Verdict.ERROR,
        "exit status 1: uncaught: ReferenceError: the code defines no function f",
    )
    assert (await judge("function f() { throw new Error('no') }"))[1].endswith("Error: no")
    assert (await judge("function f( {"))[0] is Verdict.ERROR
    assert (await judge("function f() { for (;;); }"))[0] is Verdict.TIMEOUT
    assert (await judge("f = () => process.exit(0)"))[1] == "the code ended before f returned"


@needs_node
@in_loop
async def test_each_call_is_a_process_of_its_own(pool: SandboxPool) -> None:
    code = "let count = 0; function next() { return ++count }"
    assert (await pool.judge(code, [CallTest("next", (), expected=1)] * 3, language="js")).has_passed


@needs_node
@in_loop
async def test_a_checker_is_given_what_a_function_in_javascript_returned(pool: SandboxPool) -> None:
    checker = PythonChecker("def check(args, expected, value): return value['sum'] == sum(args), str(expected)")
    tests = [CallTest("add", (2, 3), expected="any")]
    for code, has_passed in [("add = (a, b) => ({ sum: a + b })", True), ("add = (a, b) => ({ sum: 1 })", False)]:
        assert (await pool.judge(code, tests, language="js", checker=checker)).has_passed is has_passed


@needs_node
@pytest.mark.parametrize("name", [*DECEIVES, *GAINS_NOTHING])
@in_loop
async def test_a_function_in_javascript_gains_nothing_by_lying(pool: SandboxPool, name: str) -> None:
    code = {**DECEIVES, **GAINS_NOTHING}[name]
    [test] = (await pool.judge(code, [CallTest("add", (2, 3), expected=5)], language="javascript")).tests
    assert test.verdict in (Verdict.WRONG, Verdict.ERROR, Verdict.OUTPUT_LIMIT), test
    assert test.score == 0


@needs_node
@in_loop
async def test_what_is_expected_is_not_in_the_memory_of_the_process(pool: SandboxPool) -> None:
    word = "forty-two-and-seven!"
    tests = [CallTest("add", (2, 3), expected=word), CallTest("add", (word,), expected=word)]
    result = await pool.judge(LOOKS_THROUGH_ITS_MEMORY, tests, language="javascript")
    assert [test.has_passed for test in result.tests] == [False, True], "it must find what really is there"


@needs_node
@pytest.mark.parametrize("name", DECEIVES)
def test_a_judge_that_compares_inside_is_deceived(tmp_path: Path, name: str) -> None:
    (tmp_path / "naive.js").write_text(NAIVE)
    (tmp_path / "solution.js").write_text(DECEIVES[name])
    command = ["node", str(tmp_path / "naive.js"), str(tmp_path / "solution.js")]
    ended = subprocess.run(command, capture_output=True, timeout=300)
    assert ended.returncode == 0, ended.stderr.decode()


@in_loop
async def test_functions_of_a_shell_print_what_they_return(pool: SandboxPool) -> None:
    code = 'add() { echo $(($1 + $2)); return 1; }\nsame() { printf "%s\\n" "$@"; }\necho loaded'
    tests = [
        CallTest("add", (2, 3), expected=5),
        CallTest("add", (2, 3), expected="5"),
        CallTest("add", (2, 3), expected=6),
        CallTest("same", ("x  y", "*"), expected="x  y\n*"),
        CallTest("same", ([1, 2, 3],), expected=[1, 2, 3]),
        CallTest("same", (0.5, True), expected="0.5\ntrue"),
        CallTest("same", (True,), expected=True),
        CallTest("same", ("2.0000001",), expected=2.0, tolerance=1e-6),
        CallTest("same", ("",), expected=""),
        CallTest("missing", (), expected=""),
    ]
    result = await pool.judge(code, tests, language="bash")
    assert [test.has_passed for test in result.tests] == [True, True, False, *[True] * 6, False], result.tests
    assert result.tests[0].stdout == "loaded\n"
    assert "defines no function missing" in result.tests[-1].detail


@pytest.mark.parametrize("name", BASH)
@in_loop
async def test_a_function_of_a_shell_gains_nothing_by_lying(pool: SandboxPool, name: str) -> None:
    tests = [CallTest("add", (2, 3), expected=5), CallTest("add", (2, 3), expected="")]
    results = (await pool.judge(BASH[name], tests, language="bash")).tests
    assert not results[0].has_passed, results
    assert not results[1].has_passed or name == "prints when it is loaded", results


@pytest.mark.parametrize(
    ("language", "test", "words"),
    [
        ("javascript", CallTest("f", (), {"a": 1}), "by name"),
        ("javascript", CallTest("f(); g", ()), "no name of a function"),
        ("javascript", CallTest("f", (object(),)), "object"),
        ("javascript", CallTest("", ()), "names no function"),
        ("bash", CallTest("f", ({"a": 1},)), "dict"),
        ("bash", CallTest("f", ([[1], [2]],)), "list"),
        ("bash", CallTest("f", ("a\0b",)), "NUL"),
        ("bash", CallTest("f", ("x" * 200_000,)), "128 kB"),
        ("bash", CallTest("-x", ()), "no name of a function"),
    ],
)
@in_loop
async def test_a_call_that_a_language_cannot_be_given_is_refused(
    pool: SandboxPool, language: str, test: CallTest, words: str
) -> None:
    if not shutil.which({"javascript": "node"}.get(language, language)):
        pytest.skip(f"no {language}")
    with pytest.raises(UserError, match=words):
        await pool.judge("f() { :; }", [test], language=language)


@pytest.mark.usefixtures("_needs_isolation")
@pytest.mark.skipif(not shutil.which("perl"), reason="no Perl")
@in_loop
async def test_a_driver_of_a_users_own_is_used_like_the_built_in_ones() -> None:
    driver = "my ($file, $name, @args) = @ARGV; do $file; open O, '>&=', 3; print O &{\\&$name}(@args), '.';"
    spec = LanguageSpec(
        name="perl",
        extension=".pl",
        run=("perl", "{source}"),
        call=("perl", "{driver}", "{source}"),
        call_form="text",
        driver=driver,
    )
    async with SandboxPool(SandboxConfig(warm=0, languages=(spec,))) as pool:
        tests = [CallTest("add", (2, 3), expected=5), CallTest("add", (2, 3), expected=6)]
        result = await pool.judge("sub add { return $_[0] + $_[1] } 1;", tests, language="perl")
        assert [test.verdict for test in result.tests] == [Verdict.PASSED, Verdict.WRONG], result.tests
        assert (await pool.judge("print 1", [StdioTest("", "1")], language="perl")).has_passed
