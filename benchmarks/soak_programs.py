"""The programs that a soak has judged: honest and wrong ones, and some for each way to misbehave; several languages."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mettle.sandbox import CallTest, PythonChecker, StdioTest, Verdict

HONEST = "print(sum(map(int, input().split())))"
SUM = (StdioTest("2 3", "5"), StdioTest("10 20", "30"))
ANY_END = frozenset(Verdict)


@dataclass(frozen=True)
class Program:
    """What is judged, and which verdicts it may get."""

    code: str
    verdicts: frozenset[Verdict]
    language: str = "python"
    tests: tuple[StdioTest | CallTest, ...] = SUM
    options: Mapping[str, Any] = field(default_factory=dict)


def _ends(*verdicts: Verdict) -> frozenset[Verdict]:
    return frozenset(verdicts)


_PASSED = _ends(Verdict.PASSED)
_BASH = 'read a b; echo "$((a + b))"'
_C = (
    '#include <stdio.h>\nint main(void) { int a, b; return scanf("%d %d", &a, &b) == 2 ? !printf("%d\\n", a + b) : 1; }'
)
_JAVASCRIPT = "const [a, b] = require('fs').readFileSync(0, 'utf8').split(' ').map(Number); console.log(a + b)"
_FORK_BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
_SURVIVOR = """
import os, signal, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
print(sum(map(int, input().split())))
"""
_FILES = (
    "import os\nfor i in range(50): open(f'/work/{i}', 'w').write('x' * 1000)\nprint(sum(map(int, input().split())))"
)
_QUICK = {"timeout_s": 0.3, "stop_at_first_failure": True}
_CHECKER = PythonChecker("def check(stdin, expected, output): return sum(map(int, stdin.split())) == int(output)")

PROGRAMS: Mapping[str, Program] = {
    "honest": Program(HONEST, _PASSED),
    "honest, 10 tests": Program(HONEST, _PASSED, tests=SUM * 5),
    "honest, in parallel": Program(HONEST, _PASSED, tests=SUM * 3, options={"num_parallel": 3}),
    "honest, bash": Program(_BASH, _PASSED, "bash"),
    "honest, C": Program(_C, _PASSED, "c"),
    "honest, JavaScript": Program(_JAVASCRIPT, _PASSED, "javascript", options={"timeout_s": 5.0}),
    "a function": Program("def f(a): return a[::-1]", _PASSED, tests=(CallTest("f", ([1, 2],), expected=[2, 1]),)),
    "a checker": Program(HONEST, _PASSED, options={"checker": _CHECKER}),
    "writes files": Program(_FILES, _PASSED),
    "leaves survivors": Program(_SURVIVOR, _PASSED),
    "wrong": Program("print(1)", _ends(Verdict.WRONG)),
    "wrong, bash": Program("echo 1", _ends(Verdict.WRONG), "bash"),
    "an exception": Program("1 / 0", _ends(Verdict.ERROR)),
    "a syntax error": Program("def", _ends(Verdict.ERROR)),
    "does not compile": Program("int main(void) { return x; }", _ends(Verdict.ERROR), "c"),
    "crashes": Program("import os; os.abort()", _ends(Verdict.ERROR, Verdict.KILLED)),
    "kills itself": Program("import os; os.kill(os.getpid(), 9)", _ends(Verdict.ERROR, Verdict.KILLED)),
    "never ends": Program("while True: pass", _ends(Verdict.TIMEOUT), options=_QUICK),
    "sleeps": Program("import time; time.sleep(60)", _ends(Verdict.TIMEOUT), options={**_QUICK, "timeout_s": 0.05}),
    "fills memory": Program("x = bytearray(1 << 30)", _ends(Verdict.MEMORY), options={"memory_mb": 64, **_QUICK}),
    "floods its output": Program(
        "while True: print('x' * 10000)", _ends(Verdict.OUTPUT_LIMIT, Verdict.TIMEOUT), options=_QUICK
    ),
    "a fork bomb": Program(_FORK_BOMB, ANY_END - _PASSED, options=_QUICK),
}
_NEEDS = {"c": "gcc", "javascript": "node"}


def available() -> dict[str, Program]:
    """Those whose language this host has."""
    found = {name: one for name, one in PROGRAMS.items() if shutil.which(_NEEDS.get(one.language, "sh"))}
    return found
