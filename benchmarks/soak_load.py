"""The load of a soak: clients that judge and use machines until they are told to stop, some cancelled on the way.

A side is a judge pool and a machine pool with their clients. The steady side is never disturbed; on the shaken one
both templates are killed with -9 in each window. Parts: `Side`, `Traffic` (what was asked, how long it took, what
surprised).
Invariant: after `rest`, the clients hold nothing, and both pools hold what they held after the first one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import soak_machines
from soak_programs import HONEST, SUM, Program, available

from mettle.errors import SandboxError
from mettle.sandbox import Machine, MachineConfig, MachinePool, SandboxPool
from mettle.sandbox.zygote import watch

_CANCELLED = 0.08
_PAUSE_S = 0.02
_MAX_SURPRISES = 20
_HANGS_S = 45.0
logger = logging.getLogger("soak")
Action = Callable[[], Awaitable[None]]


@dataclass
class Traffic:
    """What was asked since the last `window`, and since the start."""

    counts: Counter[str] = field(default_factory=Counter)
    surprises: list[str] = field(default_factory=list)
    num_surprises: int = 0
    latencies_ms: dict[str, list[float]] = field(default_factory=dict)
    num_done: Counter[str] = field(default_factory=Counter)
    since: float = field(default_factory=time.monotonic)

    def note(self, side: str, kind: str, took_s: float) -> None:
        self.counts[f"{side}: {kind}"] += 1
        self.num_done[kind.partition(":")[0]] += 1
        self.latencies_ms.setdefault(kind, []).append(took_s * 1000)

    def surprise(self, what: str) -> None:
        self.num_surprises += 1
        logger.warning("surprise: %s", what)
        if len(self.surprises) < _MAX_SURPRISES:
            self.surprises.append(what[:500])

    def window(self) -> dict[str, float]:
        """Throughput and latency since the last call."""
        now = time.monotonic()
        wall_s = max(1e-9, now - self.since)
        found = {
            "judgements a second": self.num_done["judge"] / wall_s,
            "machine scenarios a second": self.num_done["machine"] / wall_s,
        }
        for name, kind in (("judge p50, ms", "judge: honest"), ("exec p50, ms", "exec")):
            found[name] = statistics.median(self.latencies_ms.get(kind) or [float("nan")])
        self.latencies_ms, self.num_done, self.since = {}, Counter(), now
        return found


@dataclass
class Side:
    """Two pools, their clients, and a machine that is kept from the first window to the last."""

    name: str
    judge: SandboxPool
    machines: MachinePool
    traffic: Traffic
    rng: random.Random
    is_shaken: bool = False
    num_judging: int = 2
    num_working: int = 2
    kept: Machine | None = None

    def templates(self) -> list[int]:
        return [pid for pid in (self.judge.template_pid, self.machines.template_pid) if pid is not None]

    def machine_pids(self) -> list[int]:
        """Processes 1 of the machines that are there."""
        template = self.machines.template_pid
        return [] if template is None else [pid for pid in watch.live_descendants(template) if _parent(pid) == template]

    async def window(self, seconds: float) -> None:
        """Every client at work for so long; on the shaken side the templates die in the middle of it."""
        stop = time.monotonic() + seconds
        async with asyncio.TaskGroup() as clients:
            for _ in range(self.num_judging):
                clients.create_task(self._work(self._judge_actions(), stop))
            for _ in range(self.num_working):
                clients.create_task(self._work(self._machine_actions(), stop))
            clients.create_task(self._work([("exec", self._use_kept)], stop))
            if self.is_shaken:
                clients.create_task(self._shake(seconds))

    async def rest(self) -> None:
        """Back to what the pools hold when nobody asks for anything: the same kinds of warm cells, the kept machine."""
        try:
            async with asyncio.timeout(_HANGS_S):
                await self._come_to_rest()
        except Exception as error:  # the soak goes on, and tells
            self.traffic.surprise(f"{self.name} did not come to rest: {type(error).__name__}: {error}")

    async def _come_to_rest(self) -> None:
        await self._renew_kept()
        programs = available()
        for name in ("honest", "honest, bash", "honest, C"):
            if name in programs:
                await self._judge(programs[name], f"judge: {name}")
        while len(self.machines.machines) > 1:  # noqa: ASYNC110 - those whose time ends by itself
            await asyncio.sleep(0.05)

    async def _shake(self, seconds: float) -> None:
        await asyncio.sleep(seconds * self.rng.uniform(0.2, 0.8))
        for pid in self.templates():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.traffic.counts[f"{self.name}: templates killed"] += 1

    async def _work(self, actions: list[tuple[str, Action]], stop: float) -> None:
        waiting: list[tuple[str, Action]] = []
        while time.monotonic() < stop:
            if not waiting:
                waiting = self.rng.sample(actions, len(actions))
            kind, action = waiting.pop()
            started = time.monotonic()
            if await self._do(kind, action):
                self.traffic.note(self.name, kind, time.monotonic() - started)
            await asyncio.sleep(_PAUSE_S)

    async def _do(self, kind: str, action: Action) -> bool:
        """Whether it was done to its end: one client in a dozen loses patience and is cancelled."""
        patience_s = self.rng.uniform(0.0, 0.3) if self.rng.random() < _CANCELLED else None
        try:
            if patience_s is None:
                async with asyncio.timeout(_HANGS_S):
                    await action()
                return True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await action()
            self.traffic.counts[f"{self.name}: clients cancelled"] += 1
        except SandboxError as error:
            if self.is_shaken:
                self.traffic.counts[f"{self.name}: lost with its template"] += 1
            else:
                self.traffic.surprise(f"{self.name}, {kind}: {type(error).__name__}: {error}")
        except TimeoutError:
            self.traffic.surprise(f"{self.name}, {kind}: not over after {_HANGS_S:g} s")
        except Exception as error:  # the soak goes on, and tells
            self.traffic.surprise(f"{self.name}, {kind}: {type(error).__name__}: {error}")
        return False

    def _judge_actions(self) -> list[tuple[str, Action]]:
        def of(name: str, program: Program) -> tuple[str, Action]:
            return f"judge: {name}", lambda: self._judge(program, name)

        programs = available()
        honest = [of("honest", programs["honest"])] * 8
        return [*honest, *(of(name, program) for name, program in programs.items())]

    def _machine_actions(self) -> list[tuple[str, Action]]:
        def of(name: str) -> tuple[str, Action]:
            return f"machine: {name}", lambda: soak_machines.SCENARIOS[name](self.machines)

        return [of(name) for name in soak_machines.SCENARIOS]

    async def _judge(self, program: Program, name: str) -> None:
        result = await self.judge.judge(
            program.code, program.tests, language=program.language, **{"timeout_s": 2.0, **program.options}
        )
        found = {test.verdict for test in result.tests}
        if not found <= program.verdicts:
            details = {test.detail for test in result.tests if test.verdict not in program.verdicts}
            self.traffic.surprise(f"{self.name}, {name}: {sorted(found)} {sorted(details)}")

    async def _use_kept(self) -> None:
        machine = self.kept
        if machine is None or not machine.is_alive:
            await self._renew_kept()
            return
        assert (await machine.exec("sleep 0.3 & echo $((6 * 7))")).stdout == "42\n"

    async def _renew_kept(self) -> None:
        if self.kept is None or not self.kept.is_alive:
            if self.kept is not None:
                await self.kept.delete()
            self.kept = await self.machines.create(MachineConfig(memory_mb=128, disk_mb=16, lifetime_s=None))
            await self.kept.start("exec sleep 100000")


async def warm_up(pool: SandboxPool) -> None:
    """One judgement, so that the first window starts with a pool at work."""
    assert (await pool.judge(HONEST, SUM)).has_passed


def _parent(pid: int) -> int:
    above = watch.ancestors(pid)
    return above[0] if above else 0
