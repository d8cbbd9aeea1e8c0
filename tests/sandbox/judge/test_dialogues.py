"""Problems whose judge talks to the code: each in a cell of its own, and every way in which a conversation can end."""

from __future__ import annotations

import shutil

import pytest

from mettle.errors import UserError
from mettle.sandbox import (
    CheckerError,
    InteractiveTest,
    ProgramChecker,
    PythonChecker,
    SandboxConfig,
    SandboxPool,
    StdioTest,
    TestResult,
    Verdict,
    open_judge,
)
from serving import ApiCaller

pytestmark = pytest.mark.asyncio(loop_scope="module")

GUESSING = """
import sys
secret = int(open(sys.argv[1]).read())
for turn in range(12):
    line = sys.stdin.readline()
    if not line:
        sys.exit("it left")
    guess = int(line)
    print("=" if guess == secret else "<" if secret < guess else ">", flush=True)
    if guess == secret:
        open(sys.argv[2], "w").write("done")
        print(f"{turn + 1} turns, {open(sys.argv[3]).read()}", file=sys.stderr)
        sys.exit(0)
sys.exit("too many turns")
"""
BISECT = """
low, high = 1, 1000
while True:
    middle = (low + high) // 2
    print(middle, flush=True)
    answer = input()
    if answer == "=": break
    low, high = (low, middle - 1) if answer == "<" else (middle + 1, high)
"""
GUESS = ProgramChecker(GUESSING, language="python")
ASKS_ALL = "for n in range(1, 1001):\n  print(n, flush=True)\n  if input() == '=': break"


async def talk(pool: SandboxPool, code: str, interactor: ProgramChecker | str = GUESS, **options: object) -> TestResult:
    if isinstance(interactor, str):
        interactor = ProgramChecker(interactor, language="python")
    test = InteractiveTest(interactor, stdin="677", expected="bravo")
    [result] = (await pool.judge(code, [test], **options)).tests  # type: ignore[arg-type]
    return result


async def test_code_that_finds_the_answer_passes_and_what_was_said_is_kept(pool: SandboxPool) -> None:
    result = await talk(pool, BISECT)
    assert (result.verdict, result.detail, result.score) == (Verdict.PASSED, "9 turns, bravo", 1.0), result
    assert result.transcript.split("\n")[:4] == ["< 500", "> >", "< 750", "> <"]
    assert result.transcript.endswith("> =")
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("code", "verdict", "words"),
    [
        (ASKS_ALL, Verdict.WRONG, "too many turns"),
        ("print(3)", Verdict.WRONG, "it left"),
        ("pass", Verdict.WRONG, "it left"),
        ("import os; print(3, flush=True); os.close(1); input(); input()", Verdict.WRONG, "it left"),
        ("1 / 0", Verdict.ERROR, "ZeroDivisionError"),
        ("print(677, flush=True); input(); raise SystemExit(3)", Verdict.ERROR, "exit status 3"),
        ("import os; os.kill(os.getpid(), 9)", Verdict.KILLED, "SIGKILL"),
        ("while True: pass", Verdict.TIMEOUT, "processor"),
        ("input()", Verdict.TIMEOUT, "idle: neither side"),
        ("print(677, flush=True); input(); import time; time.sleep(60)", Verdict.TIMEOUT, "idle"),
        ("x = 'x' * (1 << 30)", Verdict.MEMORY, "MB"),
        ("print('=' * 9, flush=True)", Verdict.WRONG, "ValueError"),
    ],
)
async def test_every_way_to_end_a_conversation_has_its_verdict(
    pool: SandboxPool, code: str, verdict: Verdict, words: str
) -> None:
    result = await talk(pool, code, timeout_s=0.3)
    assert result.verdict is verdict, result
    assert words in result.detail
    assert result.score == 0


@pytest.mark.parametrize("has_closed", [True, False])
async def test_code_that_breaks_on_the_end_of_its_input_has_not_ended_first(
    pool: SandboxPool, has_closed: bool
) -> None:
    """Whichever closed its output first, and although the report on the code comes long before the interactor's."""
    hangs_up = "import os, sys, time\nsys.stdin.readline(); os.close(1); time.sleep(0.3); sys.exit('it left')"
    code = f"import os; print(3, flush=True); {'os.close(1); ' * has_closed}input()"
    result = await talk(pool, code, hangs_up, timeout_s=2)
    assert (result.verdict, result.detail) == (Verdict.WRONG, "it left"), result


async def test_a_flood_is_cut_off_on_either_side(pool: SandboxPool) -> None:
    hears_all = "import sys\nfor line in sys.stdin: pass\nsys.exit(1)"
    result = await talk(pool, "while True: print('y' * 60)", hears_all)
    assert result.verdict is Verdict.OUTPUT_LIMIT, result
    assert len(result.transcript) < 20_000
    assert "bytes ..." in result.transcript
    with pytest.raises(CheckerError, match="output_limit"):
        await talk(pool, "import sys\nfor line in sys.stdin: pass", "while True: print('y' * 60)")


async def test_an_interactor_that_breaks_is_no_verdict(pool: SandboxPool) -> None:
    for interactor, words in [
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("while True: pass", "processor"),
    ]:
        with pytest.raises(CheckerError, match=words):
            await talk(pool, "print(1)", ProgramChecker(interactor, language="python", timeout_s=0.3))
    with pytest.raises(CheckerError, match="the interactor does not compile"):
        await talk(pool, "print(1)", ProgramChecker("int main( {", language="c"))
    assert (await talk(pool, BISECT)).has_passed


async def test_points_are_a_part_of_a_test(pool: SandboxPool) -> None:
    some = ProgramChecker("import sys; print('3 of four', file=sys.stderr); sys.exit(7)", "python", max_points=4)
    result = await talk(pool, "print(1)", some)
    assert (result.verdict, result.score, result.detail) == (Verdict.WRONG, 0.75, "of four")


async def test_the_code_cannot_see_what_the_interactor_is_given(pool: SandboxPool) -> None:
    looks = (
        "import os\nfound = []\n"
        "for top in ('/program', '/work', '/tmp', '/dev/shm'):\n"
        "  for folder, _, files in os.walk(top): found += files\n"
        "pids = [p for p in os.listdir('/proc') if p.isdigit() and p not in ('1', str(os.getpid()))]\n"
        "fds = [fd for fd in os.listdir('/proc/self/fd') if int(fd) > 2 and os.path.exists(f'/proc/self/fd/{fd}')]\n"
        "print(found, pids, len(fds), flush=True)"
    )
    result = await talk(pool, looks, "import sys\nsys.exit(sys.stdin.readline() != '[] [] 0\\n')")
    assert result.has_passed, result.transcript


async def test_saying_that_one_has_passed_is_only_something_said(pool: SandboxPool) -> None:
    frame = 'print(\'{"done":0,"ended":"exit","status":0}\', flush=True)\nprint("ok 1 points", flush=True)'
    assert (await talk(pool, frame + "\nimport os; os._exit(0)")).verdict is Verdict.WRONG


async def test_interactive_tests_stand_beside_others_and_each_has_its_own_cells(pool: SandboxPool) -> None:
    code = "import os\nprint(os.path.exists('/tmp/x'), flush=True); open('/tmp/x', 'w'); print(input())"
    echo = ProgramChecker("import sys\nseen = input()\nprint(1, flush=True)\nsys.exit(seen != 'False')", "python")
    tests = [StdioTest("1", "False 1"), InteractiveTest(echo), InteractiveTest(echo), StdioTest("1", "False 1")]
    for num_parallel in (1, 3):
        result = await pool.judge(code, tests, num_parallel=num_parallel)
        assert result.has_passed, result.tests
    assert pool.stats.num_running == 0


@pytest.mark.skipif(not shutil.which("g++") or not shutil.which("node"), reason="no g++ or no Node.js")
async def test_both_sides_may_be_of_any_language(pool: SandboxPool) -> None:
    interactor = (
        "#include <fstream>\n#include <iostream>\nint main(int, char **argv) { int n, x; std::ifstream(argv[1]) >> n;\n"
        'std::cout << n << std::endl; if (!(std::cin >> x)) return 2; std::cerr << "got " << x; return x != 2 * n; }'
    )
    code = (
        "require('readline').createInterface(process.stdin).on('line', (n) => { console.log(2 * n); process.exit() })"
    )
    result = await talk(pool, code, ProgramChecker(interactor), language="javascript")
    assert (result.verdict, result.detail) == (Verdict.PASSED, "got 1354"), result


async def test_mistakes_in_interactive_tests_are_refused(pool: SandboxPool) -> None:
    with pytest.raises(UserError, match="decided by its interactor"):
        await talk(pool, "1", checker=PythonChecker("def check(*a): return True"))
    with pytest.raises(UserError, match="an interactor is a ProgramChecker, not a str"):
        await pool.judge("1", [InteractiveTest("x")])  # type: ignore[arg-type]
    with pytest.raises(UserError, match="stdin must be text"):
        await pool.judge("1", [InteractiveTest(GUESS, stdin=3)])  # type: ignore[arg-type]


async def test_an_interactive_test_travels_to_a_service(api: ApiCaller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METTLE_SANDBOX_TOKEN", api.token)
    async with open_judge(SandboxConfig(backend="remote", urls=(api.url,))) as judge:
        [result] = (await judge.judge(BISECT, [InteractiveTest(GUESS, stdin="677", expected="bravo")])).tests
    assert (result.detail, result.transcript[:5]) == ("9 turns, bravo", "< 500")
    plain = {"interactor": {"code": GUESSING, "language": "python"}, "stdin": "677", "expected": ""}
    status, answer = await api.ask("POST", "/judge", json={"code": BISECT, "tests": [plain]})
    assert (status, answer["has_passed"]) == (200, True), answer
    plain["interactor"] = {"language": "python"}
    status, answer = await api.ask("POST", "/judge", json={"code": BISECT, "tests": [plain]})
    assert (status, "an interactor is a ProgramChecker" in str(answer)) == (400, True), answer
