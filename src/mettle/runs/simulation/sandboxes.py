"""A run's sandbox services in simulated time: the real service and the real client, with machines that are not there.

    rollout in a worker ─ SandboxPools ─ RemoteMachines ══ SimulatedNetwork ══ HttpServer ─ app ─ SimulatedBackend

Parts: `SimulatedBackend` (machines that take time and do nothing, and a judge that runs no code: `passes`),
`run_service` (what a service's process does), `SandboxUsers` (what each process that rolls out makes its sandboxes
with), `SandboxedSource`. What is between the two ends is what a cluster runs, but for its sockets. Invariant: a process
makes its sandboxes with what its environment says.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import re
import socket
from collections.abc import AsyncIterator
from typing import Any, Final, Self, cast

from mettle.envs.errors import ErrorChain
from mettle.envs.sandboxes.shared import SANDBOX_ENV, SandboxPools
from mettle.errors import RolloutError
from mettle.evals.source import GroupRequest
from mettle.orchestrator.simulator import SimulatedEngine, SimulatedSource, SimulatedWorld
from mettle.processes.beats import Gauge
from mettle.records.tasks import RolloutRecord
from mettle.runs.cluster.placement import SANDBOXES
from mettle.runs.simulation.host import Life, SimulatedHost
from mettle.sandbox.config import SandboxConfig
from mettle.sandbox.isolation import IsolationReport
from mettle.sandbox.judge.request import CodeJudge, JudgeRequest
from mettle.sandbox.judge.verdicts import JudgeResult, TestResult, Verdict
from mettle.sandbox.machines.commands import CommandSpec, ExecResult
from mettle.sandbox.machines.config import MachineConfig
from mettle.sandbox.protocols import Judge, Machine, Machines
from mettle.sandbox.service.app import make_app, sweeping
from mettle.sandbox.service.client.access import ServiceAccess
from mettle.sandbox.service.client.machines import RemoteMachines
from mettle.sandbox.service.config import ServiceConfig
from mettle.sandbox.service.server import started_service
from mettle.sandbox.service.tokens import TOKEN_ENV, Tokens
from mettle.storage.files import write_json
from mettle.web.server import HttpServer

MAKE_S: Final = 0.1
COMMAND_S: Final = 0.2
JUDGE_S: Final = 0.3
PASSES_ABOVE: Final = 0.3
ISOLATION: Final = IsolationReport("simulated", "ns", (), "", "", "")
_IDS: Final = itertools.count(1)


class SimulatedMachine:
    """One that runs every command in the same time, and prints nothing."""

    isolation = ISOLATION

    def __init__(self, config: MachineConfig) -> None:
        self.id = f"machine-{next(_IDS)}"
        self.config = config
        self.why_ended = ""
        self.num_commands = 0

    @property
    def is_alive(self) -> bool:
        return not self.why_ended

    async def exec_command(self, spec: CommandSpec) -> ExecResult:
        await asyncio.sleep(COMMAND_S)
        self.num_commands += 1
        return ExecResult(0, "", "")

    async def delete(self, why: str = "it was deleted") -> None:
        self.why_ended = self.why_ended or why


def passes(code: str) -> bool:
    """Code passes its tests where the number in it is large enough."""
    return float(re.findall(r"\d+\.\d+", code)[0]) > PASSES_ABOVE


class SimulatedCodeJudge(CodeJudge):
    """Judges by the number in the code, which it does not run."""

    isolation = ISOLATION

    def __init__(self) -> None:
        self.num_judged = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is open."""

    async def judge_request(self, request: JudgeRequest) -> JudgeResult:
        await asyncio.sleep(JUDGE_S)
        self.num_judged += 1
        verdict = Verdict.PASSED if passes(request.code) else Verdict.WRONG
        score = float(verdict is Verdict.PASSED)
        results = [TestResult(verdict, "", "", 0.0, 0.0, 0, 0, "", "", score=score) for _ in request.tests]
        return JudgeResult(tuple(results), len(results), ISOLATION, 0.0, JUDGE_S)


class SimulatedBackend:
    """Where the machines of a service are, and its judge."""

    isolation = ISOLATION

    def __init__(self) -> None:
        self.made: list[SimulatedMachine] = []
        self.code_judge = SimulatedCodeJudge()

    @property
    def num_used(self) -> int:
        """Machines that have run a command, and judgements."""
        return sum(machine.num_commands > 0 for machine in self.made) + self.code_judge.num_judged

    def judge(self, config: SandboxConfig) -> Judge:
        return cast(Judge, self.code_judge)

    @contextlib.asynccontextmanager
    async def _opened(self) -> AsyncIterator[Machines]:
        yield cast(Machines, self)

    def machines(self, config: SandboxConfig) -> Any:
        return self._opened()

    async def create(self, config: MachineConfig) -> Machine:
        await asyncio.sleep(MAKE_S)
        self.made.append(SimulatedMachine(config))
        return cast(Machine, self.made[-1])


async def run_service(life: Life, backend: SimulatedBackend) -> int:
    """Serve as `mettle.runs.cluster.sandboxes` does, until the process ends."""
    run_dir, loop = life.host.run_dir, life.host.loop
    config = ServiceConfig.model_validate_json(run_dir.config(SANDBOXES).read_bytes())
    config = config.model_copy(update={"host": life.node, "port": 0})
    life.heart.gauge = lambda: Gauge(0, has_work=False)
    life.heart.tick_with(loop)
    tokens = Tokens(config.quota, given=life.environment[TOKEN_ENV])
    async with started_service(config, tokens, backend=backend, clock=loop.time) as service, sweeping(service):
        server = HttpServer(make_app(service), socket.socket(socket.AF_UNIX))
        await server.start()
        try:
            write_json(run_dir.endpoint(life.name), {"url": f"unix:/{life.pid}", "pid": life.pid})
            await asyncio.Event().wait()
        finally:
            await server.stop()
    return 0


class SandboxUsers:
    """The pools of each process that makes sandboxes; they end with it."""

    def __init__(self, host: SimulatedHost, rng: random.Random) -> None:
        self._host = host
        self._rng = rng
        self._pools: dict[int, SandboxPools] = {}

    async def create(self) -> Machine:
        """A sandbox for the process that asks. Raises: SandboxError."""
        life = self._host.current
        config = SandboxConfig.model_validate_json(life.environment[SANDBOX_ENV])
        pools = self._pools.get(life.pid)
        if pools is None:
            pools = self._pools[life.pid] = SandboxPools(self._open)
        return await (await pools.pool(config)).create(MachineConfig(memory_mb=64, disk_mb=8))

    async def close(self, life: Life) -> None:
        """The process has ended; what it would have told its services, it tells nobody."""
        if (pools := self._pools.pop(life.pid, None)) is not None:
            await pools.close()

    async def _open(self, config: SandboxConfig) -> Machines:
        token = self._host.current.environment.get(config.token_env)
        access = ServiceAccess(token, config.ca_file, config.plain_http)
        return await RemoteMachines(config, access=access, rng=self._rng).__aenter__()


class SandboxedSource(SimulatedSource):
    """Rollouts that each have a sandbox, and a command run in it at the end, if there are `users` of sandboxes."""

    def __init__(self, world: SimulatedWorld, engine: SimulatedEngine, users: SandboxUsers | None) -> None:
        super().__init__(world, engine)
        self.users = users

    async def _rollout(
        self, request: GroupRequest, position: int, luck: random.Random, pause_s: float, is_equal: bool
    ) -> RolloutRecord:
        if self.users is None:
            return await super()._rollout(request, position, luck, pause_s, is_equal)
        try:
            machine = await self.users.create()
            try:
                record = await super()._rollout(request, position, luck, pause_s, is_equal)
                await machine.exec("true", timeout_s=None)
                return record
            finally:
                await machine.delete()
        except RolloutError as error:
            name = f"{request.prefix}-{position}"
            return RolloutRecord(
                name, None, {}, [], (), error_kind=error.kind, error=str(error), error_type=type(error).__name__,
                error_chain=str(ErrorChain(error)),
            )  # fmt: skip
