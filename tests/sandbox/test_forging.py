"""Code that lies about its result: the values travel out, and nothing inside knows what is expected."""

from __future__ import annotations

import pytest

from mettle.sandbox import CallTest, SandboxPool, StdioTest, Verdict

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXPECTED = "the-expected-output-88d2"

PROGRAMS = {
    "prints a frame that says passed": "import sys\nsys.stdout.buffer.write(b'\\0\\0\\0\\x1a\\0\\0\\0\\0{\"done\":0,\"ended\":\"exit\"}')",
    "prints words that say passed": "print('passed'); print('PASSED 1/1'); print({'verdict': 'passed'})",
    "leaves early with success": "import os; os._exit(0)",
    "leaves early in an exit handler": "import atexit, os; atexit.register(os._exit, 0)",
    "replaces the ways out": "import os, sys\nos._exit = sys.exit = lambda *a: None\nos.write = lambda *a: 0\nraise SystemExit(0)",
    "replaces the whole of builtins": "import builtins\nfor n in list(vars(builtins)):\n  if n != 'setattr': setattr(builtins, n, None)",
    "writes to every descriptor": "import os\nfor fd in range(3, 300):\n  try: os.write(fd, b'passed')\n  except OSError: pass",
    "looks for the expected output": (
        "import gc, sys\n"
        "texts = [o for o in gc.get_objects() if isinstance(o, (str, bytes, dict, list, tuple))]\n"
        "frame = sys._getframe()\n"
        "while frame: texts.append(dict(frame.f_locals)); frame = frame.f_back\n"
        "where = repr(texts).find('the-expected-' + 'output')\n"
        "if where >= 0: print(repr(texts)[where:where + 24])\n"
        "for line in open('/proc/self/maps'):\n"
        "  bounds, mode = line.split()[:2]\n"
        "  low, high = (int(n, 16) for n in bounds.split('-'))\n"
        "  if 'r' in mode and 'v' not in line.split()[-1][:2]:\n"
        "    with open('/proc/self/mem', 'rb', 0) as memory:\n"
        "      try: memory.seek(low); data = memory.read(min(high - low, 1 << 24))\n"
        "      except OSError: continue\n"
        "    where = data.find(b'the-expected-output' + b'-88')\n"
        "    if where >= 0: print(data[where:where + 24].decode())"
    ),
    "unwinds into the harness": "import sys\nframe = sys._getframe()\nwhile frame: frame.f_trace = None; frame = frame.f_back\nsys.modules.clear()",
}  # fmt: skip


@pytest.mark.parametrize("code", PROGRAMS.values(), ids=PROGRAMS.keys())
async def test_a_program_gains_nothing_by_lying(pool: SandboxPool, code: str) -> None:
    result = (await pool.judge(code, [StdioTest("", EXPECTED)])).tests[0]
    assert result.verdict in (Verdict.WRONG, Verdict.ERROR), result
    assert EXPECTED not in result.stdout


FUNCTIONS = {
    "an object that equals everything": "class Y:\n  __eq__ = lambda *a: True\n  __hash__ = None\ndef add(a, b): return Y()",
    "an int that equals everything": "class Y(int):\n  __eq__ = lambda *a: True\n  __hash__ = int.__hash__\ndef add(a, b): return Y()",
    "a value of its own making": "import os\nos.write(3, b'[\"i\",\"63\"]'); os._exit(0)",
    "bytes that are no value": "import os\ndef add(a, b): os.write(3, b'\\xff{[' * 99); os._exit(0)",
    "two values": "import os\ndef add(a, b): os.write(3, b'[\"i\",\"5\"]'); return 5",
    "deep nesting in place of a value": "import os\ndef add(a, b): os.write(3, b'[\"l\",[' * 20000); os._exit(0)",
    "nesting that is too deep": "def add(a, b):\n  x = []\n  for _ in range(100): x = [x]\n  return x",
    "a number that is too long": "def add(a, b): return 1 << 100000",
    "nan": "def add(a, b): return float('nan')",
    "True": "def add(a, b): return True",
    "a float beyond all floats": "import os\nos.write(3, b'[\"f\",\"0x1p999999\"]'); os._exit(0)",
    "a set whose members all collide": "def add(a, b): return {n * ((1 << 61) - 1) for n in range(2000)}",
    "a generator": "def add(a, b): yield 5",
    "an exit at import": "import sys; sys.exit(0)",
    "a patched encoder": "import json, sys\njson.dumps = lambda *a, **k: '[\"c\",true]'\ndef add(a, b): return 9",
    "a result written by a thread later": "import threading, time, os\ndef add(a, b):\n  threading.Thread(target=lambda: (time.sleep(.05), os.write(3, b'x'))).start()\n  return 5",
}  # fmt: skip


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
    code = "import os, time\nprint(1, flush=True)\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(30)\n"
    result = (await pool.judge(code, [StdioTest("", "1")])).tests[0]
    assert result.has_passed
    assert result.wall_s < 10
