"""Code that lies about its result: the values travel out, and nothing inside knows what is expected."""

from __future__ import annotations

import pytest
from python_forgeries import EXPECTED, FUNCTIONS, PROGRAMS

from mettle.sandbox import CallTest, SandboxPool, StdioTest, Verdict

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("code", PROGRAMS.values(), ids=PROGRAMS.keys())
async def test_a_program_gains_nothing_by_lying(pool: SandboxPool, code: str) -> None:
    result = (await pool.judge(code, [StdioTest("", EXPECTED)])).tests[0]
    assert result.verdict in (Verdict.WRONG, Verdict.ERROR), result
    assert EXPECTED not in result.stdout


@pytest.mark.parametrize("code", FUNCTIONS.values(), ids=FUNCTIONS.keys())
async def test_a_function_gains_nothing_by_returning(pool: SandboxPool, code: str) -> None:
    result = (await pool.judge(code, [CallTest("add", (2, 3), expected=5)])).tests[0]
    assert result.verdict in (Verdict.WRONG, Verdict.ERROR), result


async def test_one_test_sees_nothing_of_the_one_before(pool: SandboxPool) -> None:
    code = (
        "import os, sys\n"
        "seen = os.path.exists('/tmp/mark') or os.path.exists('/work/mark') or os.path.exists('/dev/shm/mark')\n"
        "print('seen' if seen else 'clean', len([p for p in os.listdir('/proc') if p.isdigit()]))\n"
        "for where in ('/tmp', '/work', '/dev/shm'): open(where + '/mark', 'w').write('x')\n"
        "if os.fork() == 0: os.setsid(); import time; time.sleep(30)\n"
    )
    result = await pool.judge(code, [StdioTest("", "clean 2")] * 3)
    assert result.has_passed, [test.output for test in result.tests]


async def test_traces_that_are_wiped_are_seen_all_the_same(pool: SandboxPool) -> None:
    code = (
        "import os\n"
        "print(os.stat('/tmp').st_mtime, len(os.listdir('/tmp')), oct(os.stat('/work').st_mode))\n"
        "os.mkdir('/tmp/mark'); os.rmdir('/tmp/mark'); os.utime('/tmp', (0, 0)); os.chmod('/work', 0o1755)\n"
    )
    result = await pool.judge(code, [StdioTest("", "0.0 0 0o41777")] * 3)
    assert result.has_passed, [test.output for test in result.tests]


async def test_a_daemon_that_holds_the_output_delays_nothing(pool: SandboxPool) -> None:
    code = "import os, time\nprint(1, flush=True)\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(300)\n"
    result = (await pool.judge(code, [StdioTest("", "1")])).tests[0]
    assert result.has_passed
    assert result.wall_s < 200, "far below what the daemon sleeps, whatever the host does beside"
