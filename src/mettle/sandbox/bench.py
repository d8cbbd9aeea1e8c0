"""How fast the sandboxes of a config are, beside a plain process of the same host, measured in one run.

Invariant: every figure is of work whose result was checked; ratios are to the plain interpreter, started in turn with
the rest, because milliseconds of a busy host mean little.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from mettle.errors import SandboxError
from mettle.sandbox.backends import open_judge, open_machines
from mettle.sandbox.config import SandboxConfig
from mettle.sandbox.judge.verdicts import StdioTest
from mettle.sandbox.protocols import Judge, Machine, Machines

_CODE: Final = "n = int(input())\nprint(sum(range(n)))"
_PLAIN: Final = "a plain `python3 -I -S -c`, no sandbox"


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table."""

    what: str
    num: int
    p50_ms: float
    p95_ms: float
    per_s: float
    ratio: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


async def measure(config: SandboxConfig, num: int) -> list[Figure]:
    """Judge, run a command, make a machine: `num` times each, in turns. Raises: SandboxError on a wrong result."""
    times: dict[str, list[float]] = {}
    async with open_judge(config) as judge, open_machines(config) as machines:
        machine = await machines.create()
        work: dict[str, Callable[[int], Awaitable[None]]] = {
            _PLAIN: _plain,
            "judge a solution on one test": lambda n: _judge(judge, n),
            "run a command in a machine": lambda n: _exec(machine, n),
            "make and delete a machine": lambda _: _create(machines),
        }
        for round_ in range(num + 1):
            for what, do in work.items():
                started = time.perf_counter()
                await do(round_)
                if round_:  # the first round warms up
                    times.setdefault(what, []).append(time.perf_counter() - started)
        at_once = await _at_once(judge, num)
    plain = statistics.median(times[_PLAIN])
    return [*(_figure(what, taken, plain) for what, taken in times.items()), _figure(*at_once, plain)]


def _figure(what: str, taken: list[float], plain: float, total_s: float | None = None) -> Figure:
    ranked = sorted(taken)
    p50, p95 = statistics.median(ranked), ranked[min(len(ranked) - 1, int(0.95 * len(ranked)))]
    return Figure(what, len(taken), 1000 * p50, 1000 * p95, len(taken) / (total_s or sum(taken)), p50 / plain)


async def _plain(number: int) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-c", _CODE, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate(str(number).encode())
    _check(output.decode().strip() == str(sum(range(number))), "a plain process")


async def _judge(judge: Judge, number: int) -> None:
    result = await judge.judge(_CODE, [StdioTest(str(number), str(sum(range(number))))])
    _check(result.has_passed, "a judgement")


async def _exec(machine: Machine, number: int) -> None:
    _check((await machine.exec(["echo", str(number)])).stdout == f"{number}\n", "a command")


async def _create(machines: Machines) -> None:
    machine = await machines.create()
    _check(machine.is_alive, "a machine")
    await machine.delete()


async def _at_once(judge: Judge, num: int) -> tuple[str, list[float]]:
    taken: list[float] = []

    async def one(number: int) -> None:
        started = time.perf_counter()
        await _judge(judge, number)
        taken.append(time.perf_counter() - started)

    started = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(4 * num)))
    each = (time.perf_counter() - started) / len(taken)
    return "judge, all at once: time for each", [each] * len(taken)


def _check(is_right: bool, what: str) -> None:
    if not is_right:
        raise SandboxError(f"{what} gave a wrong result; the benchmark means nothing")
