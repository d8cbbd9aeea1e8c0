"""Untrusted code, kept away from the host: judged against tests in milliseconds, or given a machine to work in.

    async with SandboxPool(SandboxConfig()) as pool:
        result = await pool.judge(code, [StdioTest(stdin="2 3", expected="5")])
    async with MachinePool(SandboxConfig()) as machines:
        machine = await machines.create()
        result = await machine.exec("uname -a")

    config.py       what is required of the host, and limits
    isolation.py    what is really in force: graded, shown, refused if too little; explorer.py is what measures
    pool.py         warm cells, slots, retries; `probe`, a look at the host without a pool
    judgement.py    one solution: built, run on its tests, checked
    languages.py    the interpreters and compilers that the judge knows; toolchains.py, versions.py, builds.py
    orders.py, limits.py, reports.py   a caller's tests into orders, a cell's reports into verdicts
    verdicts.py, comparators.py   tests, results, and when an output is the expected one
    checkers.py, checking.py      where a task's own code decides, in a cell of its own
    templates.py, cells.py        the owner's ends of the processes; keeper.py, a template that is always there
    cgroups.py      a cgroup for each machine, where the host lets this user divide one
    doctor.py       every layer of this host, for tests and for machines
    machines/       machines to work in: commands, jobs, files, ports
    zygote/         the process tree in which the code runs; standard library only

    protocols.py    what all backends offer; backends/ finds them by name, and holds those that are not in here
    testing/        the contract that every backend keeps, as test classes
    service/        pools behind HTTP; remote/, the backend that uses them

`open_judge(config)` and `open_machines(config)` give the pool of whichever backend the config names.
"""

from mettle.sandbox.backends import backend_names, open_judge, open_machines
from mettle.sandbox.checkers import CheckerError
from mettle.sandbox.config import LanguageSpec, SandboxConfig
from mettle.sandbox.isolation import IsolationReport, Layer
from mettle.sandbox.languages import LanguageReport
from mettle.sandbox.machines.channel import MachineLost
from mettle.sandbox.machines.config import MachineConfig
from mettle.sandbox.machines.execution import Chunk, ExecResult, Output
from mettle.sandbox.machines.files import Entry, Snapshot
from mettle.sandbox.machines.jobs import Job, Stream
from mettle.sandbox.machines.machine import Machine
from mettle.sandbox.machines.pool import MachinePool
from mettle.sandbox.pool import PoolStats, SandboxPool, probe
from mettle.sandbox.verdicts import (
    CallTest,
    Checker,
    InteractiveTest,
    JudgeResult,
    ProgramChecker,
    PythonChecker,
    StdioTest,
    TestResult,
    Verdict,
)

__all__ = [
    "CallTest",
    "Checker",
    "CheckerError",
    "Chunk",
    "Entry",
    "ExecResult",
    "InteractiveTest",
    "IsolationReport",
    "Job",
    "JudgeResult",
    "LanguageReport",
    "LanguageSpec",
    "Layer",
    "Machine",
    "MachineConfig",
    "MachineLost",
    "MachinePool",
    "Output",
    "PoolStats",
    "ProgramChecker",
    "PythonChecker",
    "SandboxConfig",
    "SandboxPool",
    "Snapshot",
    "StdioTest",
    "Stream",
    "TestResult",
    "Verdict",
    "backend_names",
    "open_judge",
    "open_machines",
    "probe",
]
