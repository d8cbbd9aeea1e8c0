"""Untrusted code, kept away from the host: judged against tests in milliseconds, or given a machine to work in.

    async with SandboxPool(SandboxConfig()) as pool:
        result = await pool.judge(code, [StdioTest(stdin="2 3", expected="5")])
    async with MachinePool(SandboxConfig()) as machines:
        machine = await machines.create()
        result = await machine.exec("uname -a")

    zygote/         the process tree in which the code runs; standard library only, and imports nothing outside itself
    judge/          code against tests: a verdict for each
    machines/       machines to work in: commands, jobs, files, ports
    service/        both behind HTTP; service/client/, the backend `remote` that uses it
    containers/     both in containers: the backends `docker` and `kubernetes`

    config.py       what is required of the host, and limits
    isolation.py    what is really in force: graded, shown, refused if too little; explorer.py is what measures
    languages.py    the interpreters and compilers that are known; toolchains.py, where this host has them
    templates.py    the owner's end of a template process; keeper.py, one that is always there
    packages.py     installed packages that code may import
    protocols.py    what all backends offer; backends.py finds them by name; embedded.py, the one of this process
    doctor.py       every layer of this host, for tests and for machines; hosts.py, what kind of host it is; bench.py
    testing/        the contract that every backend keeps, as test classes

`open_judge(config)` and `open_machines(config)` give the pool of whichever backend the config names.
"""

from mettle.sandbox.backends import backend_names, open_judge, open_machines
from mettle.sandbox.config import LanguageSpec, SandboxConfig
from mettle.sandbox.isolation import IsolationReport, Layer
from mettle.sandbox.judge.checkers import CheckerError
from mettle.sandbox.judge.pool import PoolStats, SandboxPool, probe
from mettle.sandbox.judge.verdicts import (
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
from mettle.sandbox.languages import LanguageReport
from mettle.sandbox.machines.commands import Chunk, ExecResult, Output
from mettle.sandbox.machines.config import MachineConfig
from mettle.sandbox.machines.endings import MachineLost
from mettle.sandbox.machines.files import Entry, Snapshot
from mettle.sandbox.machines.pool import MachinePool
from mettle.sandbox.protocols import Job, Machine, Stream

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
