"""Every language's ways to a verdict that was not earned: none works, and each works where nothing isolates.

Each forgery is run twice: in the pool, where it must gain nothing and leave nothing, and on a pool without isolation, or
on the naive judge that it is written for, where it must succeed; that run proves that the first can fail.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forgeries import CHECKER, FORGERIES
from planted import SECRET, Planted, plant, stragglers

from mettle.sandbox import JudgeResult, PythonChecker, SandboxConfig, SandboxPool, StdioTest, Verdict
from mettle.sandbox.toolchains import bins, find_language, shown_paths, why_missing

pytestmark = pytest.mark.asyncio(loop_scope="module")

MISSING = {name: why_missing(find_language(SandboxConfig(), name)) for name in FORGERIES}
LANGUAGES = [name for name, missing in MISSING.items() if missing is None]
JVM = {"java"}  # seconds for each: at night, and left out where the program only asks a shell, as every language's does


def marked(name: str) -> Any:
    why = MISSING[name]
    marks = [
        pytest.mark.skipif(why is not None, reason=str(why)),
        *([pytest.mark.slow, pytest.mark.nightly] if name in JVM else []),
    ]
    return pytest.param(name, marks=marks)


every_language = pytest.mark.parametrize("language", [marked(name) for name in FORGERIES])
every_quick_language = pytest.mark.parametrize("language", [marked(name) for name in FORGERIES if name not in JVM])
FLOOD_BYTES = 4 << 20


@pytest.fixture
def planted(tmp_path: Path) -> Iterator[Planted]:
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.geteuid() and parent.is_relative_to("/tmp") and parent != Path("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o055)
    with plant(tmp_path) as things:
        yield things
    for pid in stragglers():
        os.kill(pid, signal.SIGKILL)


def lines(planted: Planted, path: str = "", num: int = 1) -> list[str]:
    return [f"{path or planted.directory / 'secret'} {planted.leftover} {turn}\n" for turn in range(num)]


@dataclass
class NaiveResult:
    """What a judge sees that believes what it is told."""

    last_line: str
    exit_code: int
    num_bytes: int


def judge_naively(code: str, language: str, folder: Path) -> NaiveResult:
    """A plain process, in a directory of its own, with nothing around it."""
    spec = find_language(SandboxConfig(), language)
    source, program = folder / spec.source_name, folder / "naive-program"
    source.write_text(code)
    places = {"{source}": str(source), "{output}": str(program), "{program}": str(program), "{memory_mb}": "256"}

    def command(words: tuple[str, ...]) -> list[str]:
        for mark, place in places.items():
            words = tuple(word.replace(mark, place) for word in words)
        return list(words)

    path = ":".join([*bins(shown_paths([spec])), os.environ["PATH"]])
    environment = {"PATH": path, "HOME": str(folder)}
    if spec.compile:
        subprocess.run(command(spec.compile), check=True, env=environment, cwd=folder)
    with subprocess.Popen(
        command(spec.run),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        cwd=folder,
    ) as process:
        assert process.stdout is not None
        output = process.stdout.read(FLOOD_BYTES)
        if len(output) == FLOOD_BYTES:
            process.kill()
    for path in (source, program):
        path.unlink(missing_ok=True)
    return NaiveResult(output.decode().strip().rpartition("\n")[2], process.returncode, len(output))


async def run(
    pool: SandboxPool, language: str, name: str, tests: list[StdioTest], checker: PythonChecker | None = None
) -> JudgeResult:
    return await pool.judge(FORGERIES[language][name], tests, language=language, checker=checker)


@every_language
@pytest.mark.parametrize("name", ["says that it has passed", "leaves early"])
async def test_what_a_program_says_of_itself_is_only_output(
    pool: SandboxPool, planted: Planted, language: str, name: str
) -> None:
    [result] = (await run(pool, language, name, [StdioTest(lines(planted)[0], SECRET)])).tests
    assert result.verdict is Verdict.WRONG, result
    naive = judge_naively(FORGERIES[language][name], language, planted.directory)
    assert naive.exit_code == 0, "one that believes the exit status is not deceived"
    assert name == "leaves early" or naive.last_line == "PASSED", "one that believes the last line is not deceived"


@every_language
@pytest.mark.parametrize("where", ["a file", "another process"])
async def test_what_is_expected_is_nowhere_to_be_read(
    pool: SandboxPool, unsafe_pool: SandboxPool, planted: Planted, language: str, where: str
) -> None:
    path = "" if where == "a file" else f"/proc/{planted.decoy.pid}/environ"
    tests = [StdioTest(lines(planted, path)[0], SECRET)]
    [result] = (await run(pool, language, "reads what is expected", tests)).tests
    assert result.verdict is not Verdict.PASSED
    assert SECRET not in result.stdout + result.stderr
    [result] = (await run(unsafe_pool, language, "reads what is expected", tests)).tests
    assert SECRET in result.stdout


@every_language
async def test_no_test_changes_the_program_of_the_next(
    pool: SandboxPool, unsafe_pool: SandboxPool, planted: Planted, language: str
) -> None:
    tests = [StdioTest(line, "forged") for line in lines(planted, num=2)]
    result = await run(pool, language, "rewrites itself", tests)
    assert {test.output for test in result.tests} == {"honest\n"}, result.tests
    result = await run(unsafe_pool, language, "rewrites itself", tests)
    assert result.tests[-1].has_passed, result.tests


@every_language
async def test_no_test_finds_what_another_has_left(
    pool: SandboxPool, unsafe_pool: SandboxPool, planted: Planted, language: str
) -> None:
    tests = [StdioTest(line, "clean") for line in lines(planted, num=2)]
    assert (await run(pool, language, "leaves a file", tests)).has_passed
    assert planted.damage() == []
    assert (await run(unsafe_pool, language, "leaves a file", tests)).tests[-1].output == "seen\n"
    assert planted.damage() != []


@every_quick_language
async def test_a_checker_cannot_be_reached(
    pool: SandboxPool, unsafe_pool: SandboxPool, planted: Planted, language: str
) -> None:
    tests = [StdioTest(line, SECRET) for line in lines(planted, num=2)]
    result = await run(pool, language, "plants a module", tests, PythonChecker(CHECKER))
    assert result.num_passed == 0, result.tests
    assert {test.stage for test in result.tests if test.verdict is Verdict.WRONG} <= {"check"}
    result = await run(unsafe_pool, language, "plants a module", tests, PythonChecker(CHECKER))
    assert result.tests[-1].has_passed, result.tests


@every_quick_language
async def test_no_process_outlives_its_test(pool: SandboxPool, planted: Planted, language: str) -> None:
    result = await run(pool, language, "leaves a process", [StdioTest(line, "") for line in lines(planted, num=2)])
    assert result.has_passed, result.tests  # it did no harm, and printed what was wanted: nothing
    assert stragglers() == []
    judge_naively(FORGERIES[language]["leaves a process"], language, planted.directory)
    assert stragglers() != []
    (planted.directory / "mettle-straggler").unlink()


@every_language
async def test_a_flood_is_cut_off(pool: SandboxPool, planted: Planted, language: str) -> None:
    [result] = (await run(pool, language, "floods", [StdioTest(lines(planted)[0], "y")])).tests
    assert result.verdict is Verdict.OUTPUT_LIMIT, result
    assert len(result.stdout) + len(result.stderr) <= pool.config.output_kb << 10
    assert judge_naively(FORGERIES[language]["floods"], language, planted.directory).num_bytes == FLOOD_BYTES


@pytest.mark.skipif("c" not in LANGUAGES, reason="no C compiler")
async def test_a_compiler_reads_no_file_of_the_host(
    pool: SandboxPool, unsafe_pool: SandboxPool, planted: Planted
) -> None:
    code = f'#include "{planted.directory}/secret"\nint main(void) {{ return 0; }}'
    [result] = (await pool.judge(code, [StdioTest()], language="c")).tests
    assert (result.verdict, result.stage) == (Verdict.ERROR, "compile")
    assert SECRET not in result.stderr + result.detail
    [result] = (await unsafe_pool.judge(code, [StdioTest()], language="c")).tests
    assert SECRET in result.stderr


@pytest.mark.skipif(not shutil.which("perl"), reason="no Perl")
async def test_a_program_cannot_be_changed_in_place(pool: SandboxPool, unsafe_pool: SandboxPool) -> None:
    """Opened for reading and writing, as a mapping needs that leaves no trace in the file's times."""
    code = (
        "for f in $0 /program/*; do\n"
        "perl -e 'open(F, q(+<), $ARGV[0]) or exit; seek(F, 0, 0); print F qq(echo forged; exit #)' $f 2>/dev/null\n"
        "mount -o remount,rw /program 2>/dev/null; umount /program 2>/dev/null; done; echo honest\n"
    )
    tests = [StdioTest("", "forged")] * 2
    assert {test.output for test in (await pool.judge(code, tests, language="bash")).tests} == {"honest\n"}
    assert (await unsafe_pool.judge("chmod u+w $0\n" + code, tests, language="bash")).tests[-1].has_passed


async def test_a_program_that_kills_all_it_can_ends_only_itself(pool: SandboxPool) -> None:
    result = await pool.judge("(sleep 9 &) ; kill -9 -1; kill -9 1; echo 1", [StdioTest("", "1")] * 2, language="bash")
    assert {test.verdict for test in result.tests} <= {Verdict.KILLED, Verdict.PASSED}, result.tests
    assert not any("cell" in test.detail for test in result.tests), "process 1 was ended by the code"
    assert (await pool.judge("echo 1", [StdioTest("", "1")], language="bash")).has_passed
