"""Languages besides Python: every verdict, the compiler's own limits, and what is said when one is missing."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from mettle.errors import UserError
from mettle.sandbox import CallTest, LanguageSpec, SandboxConfig, SandboxPool, StdioTest, TestResult, Verdict
from mettle.sandbox.toolchains import find_language, why_missing

pytestmark = pytest.mark.asyncio(loop_scope="module")

C_HEAD = "#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n#include <unistd.h>\n"
PERL_SUM = "my ($a, $b) = split ' ', <STDIN>; print $a + $b, qq(\\n);"
JAVA_SUM = (
    "import java.util.*;\npublic class Main { public static void main(String[] a) {\n"
    "Scanner s = new Scanner(System.in); System.out.println(s.nextInt() + s.nextInt()); } }"
)
JAVA_MAIN = "public class Main {{ public static void main(String[] a) {{ {} }} }}"
SUM = {
    "bash": "read a b; echo $((a + b))",
    "javascript": "const [a, b] = require('fs').readFileSync(0, 'utf8').split(' ').map(Number); console.log(a + b)",
    "c": C_HEAD + 'int main(void) { int a, b; scanf("%d %d", &a, &b); printf("%d\\n", a + b); return 0; }',
    "cpp": "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b << std::endl; }",
    "perl": PERL_SUM,
    "java": JAVA_SUM,
    "rust": (
        "use std::io::*;\nfn main() { let mut s = String::new(); stdin().read_to_string(&mut s).unwrap();\n"
        'println!("{}", s.split_whitespace().map(|w| w.parse::<i64>().unwrap()).sum::<i64>()); }'
    ),
    "go": 'package main\nimport "fmt"\nfunc main() { var a, b int; fmt.Scan(&a, &b); fmt.Println(a + b) }',
    "ruby": "puts gets.split.sum(&:to_i)",
    "php": '<?php [$a, $b] = explode(" ", fgets(STDIN)); echo $a + $b, "\\n";',
    "lua": 'local a, b = io.read("n", "n"); print(a + b)',
    "tcl": "lassign [gets stdin] a b; puts [expr {$a + $b}]",
    "r": 'x <- scan(file("stdin"), quiet = TRUE); cat(sum(x), "\\n", sep = "")',
    "julia": "println(sum(parse.(Int, split(readline()))))",
    "haskell": 'main = interact $ \\s -> show (sum (map read (words s))) ++ "\\n"',
}
INSTALLED = [name for name in SUM if why_missing(find_language(SandboxConfig(), name)) is None]
# How a program of each language ends badly: its source, the verdict, and a word of the detail.
ENDINGS = {
    "bash": [
        ("exit 3", Verdict.ERROR, "exit status 3"),
        ("while :; do :; done", Verdict.TIMEOUT, "processor"),
        ("sleep 60", Verdict.TIMEOUT, "wall"),
        ("x=x; while :; do x=$x$x; done", Verdict.MEMORY, "MB"),
        ("while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done", Verdict.OUTPUT_LIMIT, "output"),
        ("kill -9 $$", Verdict.KILLED, "SIGKILL"),
        ("if", Verdict.ERROR, "syntax error"),
    ],
    "javascript": [
        ("throw new Error('no')", Verdict.ERROR, "exit status 1"),
        ("for (;;);", Verdict.TIMEOUT, "processor"),
        ("const x = []; for (;;) x.push(new Array(1e5).fill(1.5))", Verdict.MEMORY, "MB"),
        ("const x = []; for (;;) x.push(Buffer.alloc(1 << 24, 1))", Verdict.MEMORY, "MB"),
        ("for (;;) require('fs').writeSync(1, 'x'.repeat(1000))", Verdict.OUTPUT_LIMIT, "output"),
        ("process.kill(process.pid, 'SIGKILL')", Verdict.KILLED, "SIGKILL"),
        ("function f( {", Verdict.ERROR, "exit status 1"),
    ],
    "c": [
        (C_HEAD + "int main(void) { return 3; }", Verdict.ERROR, "exit status 3"),
        ("int main(void) { for (volatile int x = 0;;) x = 1; }", Verdict.TIMEOUT, "processor"),
        (C_HEAD + "int main(void) { for (;;) memset(malloc(1 << 20), 1, 1 << 20); }", Verdict.MEMORY, "MB"),
        (C_HEAD + "int main(void) { for (;;) puts(\"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\"); }", Verdict.OUTPUT_LIMIT, "output"),
        (C_HEAD + "int main(void) { abort(); }", Verdict.KILLED, "SIGABRT"),
        ("int main(void) { return *(volatile int *)0; }", Verdict.KILLED, "SIGSEGV"),
    ],
    "perl": [
        ("die qq(no\\n)", Verdict.ERROR, "exit status"),
        ("1 while 1", Verdict.TIMEOUT, "processor"),
        ("my @x; push @x, 'x' x 1e6 while 1", Verdict.MEMORY, "MB"),
        ("kill 9, $$", Verdict.KILLED, "SIGKILL"),
    ],
    "java": [
        (JAVA_MAIN.format("throw new RuntimeException(\"no\");"), Verdict.ERROR, "exit status 1"),
        (JAVA_MAIN.format("java.util.List<long[]> x = new java.util.ArrayList<>(); while (true) x.add(new long[1 << 18]);"),
         Verdict.MEMORY, "MB"),
    ],
    "rust": [
        ("fn main() { panic!(\"no\") }", Verdict.ERROR, "exit status 101"),
        ("fn main() { let mut v = vec![1u8]; loop { v.extend_from_slice(&v.clone()) } }", Verdict.MEMORY, "MB"),
    ],
    "tcl": [("error no", Verdict.ERROR, "exit status 1"), ("while 1 {}", Verdict.TIMEOUT, "processor")],
    "cpp": [
        ("#include <stdexcept>\nint main() { throw std::runtime_error(\"no\"); }", Verdict.KILLED, "SIGABRT"),
        ("#include <vector>\nint main() { std::vector<long> v; for (;;) v.push_back(1); }", Verdict.MEMORY, "MB"),
        ("#include <vector>\nint main() { std::vector<char> v(1L << 60); }", Verdict.MEMORY, "MB"),
    ],
}  # fmt: skip


BY_DAY = ("bash", "javascript", "c")
"""An interpreter, one with a heap of its own, and one with a compiler: how others end is the same code's matter."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def own_pool(_needs_isolation: None) -> AsyncIterator[SandboxPool]:
    """A pool with languages of a user's."""
    mine = (
        LanguageSpec(name="awk", extension=".awk", run=("awk", "-f", "{source}"), version=("awk", "-W", "version")),
        LanguageSpec(
            name="cobol", extension=".cob", compile=("cobc", "-o", "{output}", "{source}"), run=("{program}",)
        ),
        LanguageSpec(name="c", extension=".c", compile=("cp", "{source}", "{output}"), run=("cat", "{program}")),
    )
    async with SandboxPool(SandboxConfig(warm=1, timeout_s=2.0, memory_mb=256, languages=mine)) as started:
        yield started


async def judge_one(pool: SandboxPool, code: str, test: StdioTest, language: str, **limits: float) -> TestResult:
    return (await pool.judge(code, [test], language=language, **limits)).tests[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("language", INSTALLED)
async def test_right_and_wrong_answers_are_told_apart(pool: SandboxPool, language: str) -> None:
    tests = [StdioTest("2 3\n", "5"), StdioTest("2 3\n", "6"), StdioTest("20 30\n", "50")]
    result = await pool.judge(SUM[language], tests, language=language)
    assert [test.verdict for test in result.tests] == [Verdict.PASSED, Verdict.WRONG, Verdict.PASSED], result.tests
    assert result.language == language
    assert result.isolation.grade == "ns"
    assert (result.tests[0].output, result.tests[0].expected, result.tests[0].exit_code) == ("5\n", "5", 0)
    assert all(0 < test.cpu_s < 2 and test.wall_s > 0 for test in result.tests)


@pytest.mark.parametrize(
    ("language", "code", "verdict", "words"),
    [
        pytest.param(language, *ending, marks=() if language in BY_DAY else pytest.mark.nightly)
        for language, endings in ENDINGS.items()
        if language in INSTALLED
        for ending in endings
    ],
)
async def test_how_a_program_ends_decides_its_verdict(
    pool: SandboxPool, language: str, code: str, verdict: Verdict, words: str
) -> None:
    timeout_s = 4.0 if verdict is Verdict.MEMORY else 0.5
    result = await judge_one(pool, code, StdioTest(), language, timeout_s=timeout_s)
    assert result.verdict is verdict, result
    assert words in result.detail
    assert result.stage == "run"


needs_gcc = pytest.mark.skipif("c" not in INSTALLED, reason="no C compiler")
needs_cpp = pytest.mark.skipif("cpp" not in INSTALLED, reason="no C++ compiler")


@needs_gcc
async def test_code_that_does_not_compile_is_an_error_with_the_compilers_words(pool: SandboxPool) -> None:
    code = "int main(void) { return undeclared; }"
    result = await pool.judge(code, [StdioTest("", "1"), StdioTest("", "2")], language="c")
    assert [(test.verdict, test.stage) for test in result.tests] == [(Verdict.ERROR, "compile")] * 2
    assert "undeclared" in result.tests[0].detail
    assert "error" in result.tests[0].detail
    assert "return undeclared;" in result.tests[0].stderr
    assert result.compile_s > 0
    result = await pool.judge(code, [StdioTest()] * 2, language="c", stop_at_first_failure=True)
    assert (len(result.tests), result.num_tests, result.num_passed) == (1, 2, 0)


COMPILE_BOMBS = {
    "an object that is too large": ("c", "int x[1 << 28] = {1}; int main(void) { return x[0]; }"),
    "templates without end": (
        "cpp",
        "template<int n> struct F { static const long v = F<n-1>::v + F<n-2>::v; };\n"
        "template<int n, int m> struct G { G<n+1, m> a; G<n, m+1> b; };\n"
        "int main() { G<0, 0> g; return F<100000>::v; }",
    ),
    "a file that has no end": ("c", '#include "/dev/zero"\nint main(void) { return 0; }'),
    "macros that double": (
        "c", "#define A0 x\n" + "".join(f"#define A{n + 1} A{n} A{n}\n" for n in range(40)) + "A40"
    ),
    "a program that includes itself": ("c", "#include __FILE__\nint main(void) { return 0; }"),
}  # fmt: skip


@needs_cpp
@pytest.mark.usefixtures("_needs_isolation")
@pytest.mark.parametrize("bomb", COMPILE_BOMBS)
async def test_a_compiler_has_limits_of_its_own(bomb: str) -> None:
    language, code = COMPILE_BOMBS[bomb]
    spec = find_language(SandboxConfig(), language)
    small = spec.model_copy(update={"compile_timeout_s": 1.0, "compile_memory_mb": 200, "compile_disk_mb": 48})
    async with SandboxPool(SandboxConfig(warm=0, languages=(small,))) as pool:
        result = await judge_one(pool, code, StdioTest(), language)
        assert result.stage == "compile", result
        assert result.verdict in (Verdict.ERROR, Verdict.TIMEOUT, Verdict.MEMORY, Verdict.OUTPUT_LIMIT)
        assert "does not compile" in result.detail
        assert result.wall_s < 200, "none of them would end"
        assert (await judge_one(pool, SUM[language], StdioTest("1 2", "3"), language)).has_passed


@needs_gcc
async def test_the_same_source_is_compiled_once(pool: SandboxPool) -> None:
    code = SUM["c"] + "// once"
    first = await pool.judge(code, [StdioTest("2 3", "5")], language="c")
    again = await pool.judge(code, [StdioTest("4 5", "9")], language="c")
    other = await pool.judge(code.replace("a + b", "a - b"), [StdioTest("4 5", "9")], language="c")
    assert (first.has_passed, again.has_passed, other.has_passed) == (True, True, False)
    assert first.compile_s > 0
    assert again.compile_s == 0
    assert other.compile_s > 0


@needs_gcc
async def test_a_program_has_the_stack_and_the_address_space_that_contests_give(pool: SandboxPool) -> None:
    code = (
        "#include <stdio.h>\nint unused[200000000];\n"
        "int depth(int n) { volatile char pad[64]; pad[0] = n; return n ? 1 + depth(n - 1) + (pad[0] - pad[0]) : 0; }\n"
        'int main(void) { printf("%d\\n", depth(1000000)); return 0; }'
    )
    result = await judge_one(pool, code, StdioTest("", "1000000"), "c", memory_mb=256)
    assert result.has_passed, result


async def test_a_program_starts_with_a_clean_process(pool: SandboxPool) -> None:
    code = (
        "trap '' USR1; echo fds $(ls /proc/self/fd | wc -l)\n"
        "env | cut -d= -f1 | grep -v -x -e _ -e SHLVL -e PWD -e OLDPWD | sort | tr '\\n' ' '\n"
        "grep -h SigIgn /proc/self/status; id -u; pwd; ls -A /work /tmp | wc -l; yes | head -1"
    )
    result = await judge_one(pool, code, StdioTest(), "bash")
    assert result.has_passed or result.verdict is Verdict.WRONG, result
    lines = (result.output or "").split("\n")
    assert lines[0] == "fds 4"  # 0, 1, 2, and the one that reads the directory
    assert lines[1].startswith("HOME LANG PATH ")
    assert int(lines[1].split()[-1], 16) & (1 << 12) == 0, "SIGPIPE is ignored"
    assert lines[2:4] == ["1000", "/work"]


async def test_memory_that_processes_share_is_counted_once(pool: SandboxPool) -> None:
    code = "x=$(head -c 40000000 /dev/zero | tr '\\0' x); for i in 1 2 3 4 5; do sleep 0.3 & done; wait; echo ok"
    result = await judge_one(pool, code, StdioTest("", "ok"), "bash", memory_mb=200)
    assert result.has_passed, result


async def test_languages_says_what_there_is(own_pool: SandboxPool) -> None:
    found = {report.name: report for report in await own_pool.languages()}
    assert found["python"].is_available
    assert found["bash"].version.startswith("GNU bash")
    assert found["awk"].is_available
    assert not found["cobol"].is_available
    assert "'cobc'" in found["cobol"].missing


async def test_a_language_of_a_users_own_is_judged_like_any_other(own_pool: SandboxPool) -> None:
    assert (await judge_one(own_pool, "{ print $1 + $2 }", StdioTest("2 3\n", "5"), "awk")).has_passed
    assert (await judge_one(own_pool, "its own text", StdioTest("", "its own text"), "c")).has_passed


async def test_a_missing_interpreter_is_one_clear_error(own_pool: SandboxPool) -> None:
    with pytest.raises(UserError, match=r"cobol cannot be judged on this host: there is no 'cobc' in /usr/local/bin"):
        await own_pool.judge("x", [StdioTest()], language="cobol")
    with pytest.raises(UserError, match=r"does not run 'brainfuck'; it runs python, bash, .*awk, cobol"):
        await own_pool.judge("x", [StdioTest()], language="brainfuck")
    assert (await own_pool.judge("print(1)", [StdioTest("", "1")])).has_passed


async def test_a_language_without_a_driver_is_tested_by_stdin(own_pool: SandboxPool) -> None:
    with pytest.raises(UserError, match="calls a function, which awk has no driver for; it is tested by stdin"):
        await own_pool.judge("function f() { }", [CallTest("f", (1,), expected=1)], language="awk")


async def test_programs_can_read_a_large_input_or_leave_it(pool: SandboxPool) -> None:
    text = "7\n" * (1 << 20)
    assert (await judge_one(pool, "wc -l", StdioTest(text, str(1 << 20)), "bash")).has_passed
    assert (await judge_one(pool, "echo 1", StdioTest(text, "1"), "bash")).has_passed


async def test_tests_run_at_once_keep_their_places(pool: SandboxPool) -> None:
    tests = [StdioTest(f"{n} 1\n", str(n + 1)) for n in range(12)]
    result = await pool.judge(SUM["bash"], tests, language="bash", num_parallel=4)
    assert result.has_passed
    assert [test.output for test in result.tests] == [f"{n + 1}\n" for n in range(12)]
    tests[5] = StdioTest("5 1\n", "7")
    result = await pool.judge(SUM["bash"], tests, language="bash", num_parallel=4, stop_at_first_failure=True)
    assert len(result.tests) == 6
    assert result.tests[-1].verdict is Verdict.WRONG
    assert pool.stats.num_running == 0
