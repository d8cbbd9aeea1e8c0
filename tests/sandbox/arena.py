"""Runs one attack in a pool, isolated or not, and says what it left: the tests and the suite's page both do it so."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from attack import PRELUDE, Attack
from planted import SECRET, Planted, plant, stragglers

from mettle.sandbox import (
    ExecResult,
    Machine,
    MachineConfig,
    MachineLost,
    MachinePool,
    SandboxPool,
    StdioTest,
    TestResult,
    Verdict,
)

MACHINE_LIMITS = MachineConfig(memory_mb=256, disk_mb=32, max_processes=16)
_SETTLED_S = 3.0
_BROKEN = ("NameError", "SyntaxError", "AttributeError")


def a_sixth(attacks: Sequence[Attack]) -> list[Any]:
    """Parameters of a test that other tests can fail: every sixth each time, the others in the nightly tier."""
    return [
        pytest.param(attack, id=attack.name, marks=pytest.mark.nightly if number % 6 else ())
        for number, attack in enumerate(attacks)
    ]


@contextlib.contextmanager
def open_plant(directory: Path) -> Iterator[Planted]:
    """What is planted, where only isolation, and no file mode, protects it."""
    for parent in (directory, *directory.parents):
        if parent.is_relative_to("/tmp") and parent != Path("/tmp"):
            with contextlib.suppress(PermissionError):
                parent.chmod(parent.stat().st_mode | 0o055)
    with plant(directory) as things:
        yield things


async def attack_as_test(pool: SandboxPool, attack: Attack, planted: Planted) -> TestResult:
    """Run it as a solution that is judged."""
    test = StdioTest(planted.describe(), "")
    if attack.first:
        await pool.judge(PRELUDE + attack.first, [test])
    return (await pool.judge(PRELUDE + attack.code, [test])).tests[0]


def traces_of_test(result: TestResult, planted: Planted) -> list[str]:
    """Everything that shows that an attack got through."""
    found = [*planted.damage(), *_said(result.stdout, result.stderr)]
    if result.verdict is Verdict.KILLED and "cell" in result.detail:
        found.append("process 1 was ended by the code")
    return found


async def attack_from_machine(machine: Machine, attack: Attack, described: str) -> ExecResult:
    """Run it as a program in this machine."""
    await machine.upload("attack.py", PRELUDE + attack.code)
    return await machine.exec(["python3", "attack.py"], stdin=described, timeout_s=8)


async def traces_of_machine(machines: MachinePool, attack: Attack, planted: Planted) -> list[str]:
    """Run it in a machine made for it, and what shows that it got through."""
    if attack.first:
        other = await machines.create(MACHINE_LIMITS)
        await other.upload("first.py", PRELUDE + attack.first)
        await other.exec(["python3", "first.py"], stdin=planted.describe())
        await other.delete()
    machine = await machines.create(MACHINE_LIMITS)
    try:
        result = await attack_from_machine(machine, attack, planted.describe())
        still = await machine.exec("echo still here", timeout_s=10)
        found = _said(result.stdout, result.stderr) + broken(result.stderr)
        found += [] if still.stdout == "still here\n" else ["the machine takes no more commands"]
    except MachineLost as error:
        found = [f"the machine was ended: {error}"]
    finally:
        await machine.delete()
    until = time.monotonic() + _SETTLED_S
    while stragglers(planted.straggler) and time.monotonic() < until:  # noqa: ASYNC110
        await asyncio.sleep(0.02)  # the kernel ends what is left in a machine a moment after its process 1
    return [*planted.damage(), *found]


def broken(errors: str) -> list[str]:
    """Mistakes in the attack itself."""
    return [f"the attack's own code is broken: {errors[-200:]}"] if any(name in errors for name in _BROKEN) else []


def _said(output: str, errors: str) -> list[str]:
    found = [output.strip()] if "BREACH" in output else []
    return [*found, "the secret was read"] if SECRET in output + errors else found
