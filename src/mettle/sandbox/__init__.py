"""Untrusted code, judged against tests in milliseconds and kept away from the host.

    async with SandboxPool(SandboxConfig()) as pool:
        result = await pool.judge(code, [StdioTest(stdin="2 3", expected="5")])

    config.py       what is required of the host, and limits
    isolation.py    what is really in force: graded, shown, refused if too little; explorer.py is what measures
    pool.py         warm cells, slots, retries; `probe`, a look at the host without a pool
    orders.py       a caller's tests into orders, a cell's reports into verdicts
    verdicts.py, comparators.py   tests, results, and when an output is the expected one
    templates.py, cells.py        the owner's ends of the processes
    zygote/         the process tree in which the code runs; standard library only

Other uses (a machine to work in) and other places to run (containers, another host) belong beside `pool.py` and
`templates.py`; they share verdicts, orders and the isolation report.
"""

from mettle.sandbox.config import SandboxConfig
from mettle.sandbox.isolation import IsolationReport, Layer
from mettle.sandbox.pool import PoolStats, SandboxPool, probe
from mettle.sandbox.verdicts import CallTest, JudgeResult, StdioTest, TestResult, Verdict

__all__ = [
    "CallTest",
    "IsolationReport",
    "JudgeResult",
    "Layer",
    "PoolStats",
    "SandboxConfig",
    "SandboxPool",
    "StdioTest",
    "TestResult",
    "Verdict",
    "probe",
]
