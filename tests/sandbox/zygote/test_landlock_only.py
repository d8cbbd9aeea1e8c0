"""The grade without namespaces: only by name, in every result, for Python alone; and what it contains.

The pool's template is started as under Docker's default filter (`simulated.py`); the attacks are the whole suite's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import ordinary
import pytest
import pytest_asyncio
from arena import attack_as_test, broken, open_plant, traces_of_test
from attacks import ATTACKS, Attack
from landlock_gaps import OPEN_ALONE
from planted import Planted
from python_forgeries import EXPECTED, FUNCTIONS, PROGRAMS
from simulated import Host, on_host, start_on

from mettle.errors import UserError
from mettle.sandbox import (
    CallTest,
    MachinePool,
    ProgramChecker,
    PythonChecker,
    SandboxConfig,
    SandboxPool,
    StdioTest,
    TestResult,
    Verdict,
)
from mettle.sandbox.doctor import examine_host
from mettle.sandbox.testing import JudgeContract
from mettle.sandbox.zygote import landlock

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="denied calls are given by x86_64 numbers"),
    pytest.mark.skipif(landlock.version() < 3, reason="the kernel's Landlock is older than version 3"),
]
# Those that only this grade must stop by other means than namespaces.
QUICK = [
    attack for attack in ATTACKS if any(word in attack.code for word in ("fork", "kill", "thread", "socket", "open("))
]


@pytest.fixture(scope="module")
def interpreter() -> str:
    """One that the ordinary user can read whom a root's template becomes."""
    if os.geteuid() != 0:
        return ""
    found = ordinary.interpreter()
    if found is None:
        pytest.skip("no interpreter of this version that an ordinary user can run")
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def judge(interpreter: str) -> AsyncIterator[SandboxPool]:
    config = SandboxConfig(require="landlock-only", warm=2, timeout_s=2.0, memory_mb=256, disk_mb=8)
    pool = SandboxPool(config)
    await start_on(pool, "docker", interpreter)
    yield pool
    await pool.close()


@pytest.fixture
def planted(tmp_path: Path) -> Iterator[Planted]:
    with open_plant(tmp_path) as things:
        yield things


async def run(pool: SandboxPool, code: str, test: StdioTest | None = None) -> TestResult:
    return (await pool.judge(code, [test or StdioTest()])).tests[0]


class TestJudgeWithoutNamespaces(JudgeContract):
    async def test_the_grade_is_in_every_result(self, judge: SandboxPool) -> None:
        report = (await judge.judge("print(1)", [StdioTest("", "1")])).isolation
        assert report.grade == "landlock-only"
        assert not report.layer("pid-namespace").is_in_force
        assert "unshare" in report.layer("user-namespace").detail
        for name in ("seccomp", "landlock", "read-only-root", "private-proc", "no-privileges", "resource-limits"):
            assert report.layer(name).is_in_force, name
        assert report.meets("landlock-only")
        assert not report.meets("ns")


@pytest.mark.parametrize("attack", QUICK, ids=lambda attack: attack.name)
async def test_contained_or_known_to_be_open(judge: SandboxPool, planted: Planted, attack: Attack) -> None:
    await check_attack(judge, planted, attack)


@pytest.mark.nightly
@pytest.mark.parametrize("attack", [a for a in ATTACKS if a not in QUICK], ids=lambda attack: attack.name)
async def test_the_rest_of_the_suite_too(judge: SandboxPool, planted: Planted, attack: Attack) -> None:
    await check_attack(judge, planted, attack)


async def check_attack(judge: SandboxPool, planted: Planted, attack: Attack) -> None:
    result = await attack_as_test(judge, attack, planted)
    assert bool(traces_of_test(result, planted)) == (attack.name in OPEN_ALONE)
    assert broken(result.stderr) == []


async def test_no_forged_result_passes(judge: SandboxPool) -> None:
    for code in PROGRAMS.values():
        assert (await run(judge, code, StdioTest("", EXPECTED))).verdict is not Verdict.PASSED
    for code in FUNCTIONS.values():
        result = await judge.judge(code, [CallTest("add", (2, 3), expected=5)])
        assert not result.has_passed


@pytest.mark.parametrize(
    ("code", "verdict", "words"),
    [
        ("for n in range(1000): open(f'f{n}', 'w').close()", Verdict.ERROR, "quota"),
        ("import os\nfor n in range(1000): os.mkdir('d'); os.chdir('d')", Verdict.ERROR, "quota"),
        ("import os; os.mkdir('d', 0o300)", Verdict.ERROR, "PermissionError"),
        ("import os; os.umask(0o777)", Verdict.ERROR, "OSError"),
        ("n = 0\nwhile True: n += 1; open(f'f{n}', 'w').write('x' * (1 << 20))", Verdict.OUTPUT_LIMIT, "files"),
        (
            "import os, time\nkept = []\nfor n in range(40):\n"
            "    f = open('f', 'wb'); os.unlink('f'); f.write(b'x' * (1 << 20)); f.flush(); kept.append(f)\ntime.sleep(9)",
            Verdict.OUTPUT_LIMIT,
            "files",
        ),
        ("import subprocess; subprocess.run('true')", Verdict.ERROR, "PermissionError"),
        ("import os; os.execv('/bin/true', ['true'])", Verdict.ERROR, "PermissionError"),
    ],
)
async def test_files_and_processes_are_counted_or_refused(
    judge: SandboxPool, code: str, verdict: Verdict, words: str
) -> None:
    result = await run(judge, code)
    assert result.verdict is verdict, result
    assert words in result.detail


async def test_threads_work_and_are_counted(judge: SandboxPool) -> None:
    code = (
        "import sys, threading\nthreading.stack_size(1 << 25); sys.setrecursionlimit(10**6)\n"
        "def deep(n): return 0 if n == 0 else 1 + deep(n - 1)\n"
        "t = threading.Thread(target=lambda: print(deep(20000))); t.start(); t.join()\n"
        "for _ in range(60): t = threading.Thread(target=int); t.start(); t.join()\n"
        "gate, n = threading.Event(), 0\n"
        "try:\n"
        "    for n in range(100): threading.Thread(target=gate.wait).start()\n"
        "except RuntimeError: pass\n"
        "gate.set(); print(n)"
    )
    result = await run(judge, code)
    deep, at_once = map(int, result.stdout.split())
    assert deep == 20000
    assert 4 <= at_once <= judge.config.max_processes


async def test_what_one_test_leaves_no_other_finds(judge: SandboxPool) -> None:
    code = "import os\nprint(os.listdir('.')); open('mark', 'w').close(); os.makedirs('/'.join('d' * 200))"
    result = await judge.judge(code, [StdioTest("", "[]")] * 3)
    assert [test.stdout for test in result.tests] == ["[]\n"] * 3


async def test_other_languages_are_refused_in_one_line(judge: SandboxPool) -> None:
    with pytest.raises(UserError, match="bash cannot be judged here: it starts processes"):
        await judge.judge("echo 1", [StdioTest("", "1")], language="bash")
    with pytest.raises(UserError, match="cpp cannot be judged here"):
        await judge.judge("print(1)", [StdioTest()], checker=ProgramChecker("int main() {}", "cpp"))
    checker = PythonChecker("def check(stdin, output, expected): return 1.0")
    assert (await judge.judge("print(1)", [StdioTest()], checker=checker)).has_passed
    missing = {report.name: report.missing for report in await judge.languages()}
    assert missing["python"] == ""
    assert "landlock-only" in missing["bash"]


@pytest.mark.parametrize(
    ("host", "errno", "fix"),
    [
        ("docker", "EPERM", "--security-opt seccomp=mettle.json"),
        ("no-user-namespaces", "ENOSPC", "user.max_user_namespaces"),
        ("apparmor", "EPERM", "userns,"),
    ],
)
async def test_it_is_never_taken_unasked_and_the_refusal_names_both_ways(
    interpreter: str, host: Host, errno: str, fix: str
) -> None:
    with on_host(host, interpreter), pytest.raises(UserError) as caught:
        await SandboxPool(SandboxConfig()).__aenter__()
    text = str(caught.value)
    assert errno in text
    assert 0 < text.index(fix) < text.index('require = "landlock-only"') < text.index("'unsafe'")
    assert "--privileged" not in text


@pytest.mark.parametrize("host", ["no-user-namespaces", "apparmor"])
async def test_each_host_that_denies_namespaces_can_have_it(interpreter: str, host: Host) -> None:
    with on_host(host, interpreter):
        async with SandboxPool(SandboxConfig(require="landlock-only", warm=0)) as pool:
            assert pool.isolation.grade == "landlock-only"
            assert (await run(pool, "print(1)", StdioTest("", "1"))).has_passed


async def test_machines_are_refused_in_one_line(interpreter: str) -> None:
    with on_host("docker", interpreter), pytest.raises(UserError, match="machines and other languages need namespaces"):
        await MachinePool(SandboxConfig(require="landlock-only")).__aenter__()


async def test_without_landlock_there_is_no_second_way(interpreter: str) -> None:
    with on_host("no-landlock", interpreter), pytest.raises(UserError, match="no Landlock"):
        await SandboxPool(SandboxConfig(require="landlock-only")).__aenter__()


@pytest.mark.usefixtures("_needs_isolation")
async def test_where_there_are_namespaces_they_are_used_although_less_would_do() -> None:
    async with SandboxPool(SandboxConfig(require="landlock-only", warm=0)) as pool:
        assert pool.isolation.grade == "ns"


async def test_the_doctor_says_what_is_denied_why_and_both_ways(interpreter: str) -> None:
    with on_host("docker", interpreter):
        report = await asyncio.to_thread(examine_host)
        allowed = await asyncio.to_thread(examine_host, SandboxConfig(require="landlock-only"))
    text = "\n".join(report.lines())
    for words in ("denied: ", "unshare", "EPERM", "first way: ", "seccomp=mettle.json", 'require = "landlock-only"'):
        assert words in text
    assert text.index("first way") < text.index("second way")
    data = report.as_dict()
    assert data["grade"] == "none"
    assert "EPERM" in data["host"]["denied"][0]
    assert "landlock-only" in data["host"]["second_way"]
    assert allowed.judge.grade == "landlock-only"
    assert "tests landlock-only, machines none" in "\n".join(allowed.lines())
