"""Machines of other hosts, and the pool that makes them."""

from __future__ import annotations

import asyncio
import base64
import builtins
import contextlib
import io
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

import aiohttp

from mettle.errors import SandboxError, UserError
from mettle.sandbox.config import SandboxConfig
from mettle.sandbox.isolation import IsolationReport
from mettle.sandbox.machines.channel import MachineLost
from mettle.sandbox.machines.config import MachineConfig, check_environment
from mettle.sandbox.machines.execution import ExecResult
from mettle.sandbox.machines.files import Content, Entry, Snapshot, file_pieces
from mettle.sandbox.remote.commands import RemoteJob, RemoteStream
from mettle.sandbox.remote.connection import Connection
from mettle.sandbox.remote.fleet import Fleet, Member
from mettle.sandbox.remote.tunnels import Tunnels
from mettle.sandbox.service.faults import NoMachine, ServiceLost
from mettle.sandbox.service.transfers import FILES_TYPE
from mettle.sandbox.service.wire import unpack

_END_S: Final = 5.0
_MAX_PORT: Final = 65_535
_QUIET: Final = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=120.0)


class RemoteMachine:
    """A machine at a service. Made by `RemoteMachines.create`; see `mettle.sandbox.protocols.Machine`."""

    def __init__(
        self, machine_id: str, config: MachineConfig, isolation: IsolationReport, connection: Connection
    ) -> None:
        self.id = machine_id
        self.config = config
        self.isolation = isolation
        self.connection = connection
        self.why_ended = ""
        self._path = f"/machines/{machine_id}"
        self._tunnels = Tunnels(connection, self._path)
        self._jobs: list[RemoteJob] = []

    @property
    def is_alive(self) -> bool:
        return not self.why_ended

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str = "/work",
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        timeout_s: float | None = 30.0,
        max_output_bytes: int = 1 << 20,
    ) -> ExecResult:
        """Run a command and wait for its end. It is never sent twice."""
        body = _order(command, cwd, env, stdin, timeout_s, max_output_bytes)
        async with contextlib.aclosing(self._lines({**body, "stream": "result"})) as lines:
            async for line in lines:
                result: ExecResult = unpack(line["result"])
                return result
        raise ServiceLost(f"sandbox service {self.connection.url} gave a command no result")

    def stream(
        self,
        command: str | Sequence[str],
        *,
        cwd: str = "/work",
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        timeout_s: float | None = 30.0,
        max_output_bytes: int = 1 << 20,
    ) -> RemoteStream:
        """Like `exec`, with the output as it comes."""
        body = _order(command, cwd, env, stdin, timeout_s, max_output_bytes)
        return RemoteStream(self._lines({**body, "stream": "chunks"}))

    async def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str = "/work",
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        timeout_s: float | None = None,
        max_output_bytes: int = 1 << 20,
    ) -> RemoteJob:
        """Run a command in the background."""
        body = _order(command, cwd, env, stdin, timeout_s, max_output_bytes)
        told = await self._ask("POST", f"{self._path}/jobs", json=body, key=secrets.token_hex(16))
        return self.job(str(told["id"]))

    def job(self, name: str) -> RemoteJob:
        """A job by the last part of its id."""
        job = RemoteJob(f"{self.id}/{name}", self._ask, f"{self._path}/jobs/{name}", lambda: self.is_alive)
        self._jobs = [known for known in self._jobs if not known.following.done()] + [job]
        return job

    async def upload(self, path: str, data: Content) -> None:
        await self.upload_files({path: data})

    async def upload_files(self, files: Mapping[str, Content]) -> None:
        pieces, mistakes = file_pieces(files), list[UserError]()

        async def body() -> AsyncIterator[bytes]:
            try:
                while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                    yield piece
            except UserError as error:  # a file of this host; it would reach the caller as a lost connection
                mistakes.append(error)
                raise

        headers = {"Content-Type": FILES_TYPE}
        try:
            await self._ask("POST", f"{self._path}/files", data=body(), headers=headers, timeout=_QUIET)
        except SandboxError:
            if mistakes:
                raise mistakes[0] from None
            raise

    async def download(self, path: str, *, max_bytes: int = 1 << 30) -> bytes:
        return await self._take(f"{self._path}/files", {"path": path, "max_bytes": str(max_bytes)})

    async def list(self, path: str = "/work") -> builtins.list[Entry]:
        told = await self._ask("GET", f"{self._path}/entries", params={"path": path})
        entries: builtins.list[Entry] = unpack(told["entries"])
        return entries

    async def snapshot(self, paths: Sequence[str] = ("/work",)) -> Snapshot:
        return Snapshot(await self._take(f"{self._path}/snapshot", [("path", path) for path in paths]), tuple(paths))

    async def restore(self, snapshot: Snapshot) -> None:
        params = [("path", path) for path in snapshot.paths]
        await self._ask("PUT", f"{self._path}/snapshot", params=params, data=io.BytesIO(snapshot.data), timeout=_QUIET)

    async def listen(self, port: int = 0) -> socket.socket:
        _check_port(port)
        self.require_alive()
        return await self._tunnels.listen(port)

    async def connect(self, port: int, *, timeout_s: float = 10.0) -> socket.socket:
        _check_port(port)
        self.require_alive()
        return await self._tunnels.connect(port, timeout_s)

    async def delete(self, why: str = "it was deleted") -> None:
        """End it, and everything in it. A service that is gone has ended it already."""
        if not self.why_ended:
            self.end(why)
            with contextlib.suppress(NoMachine, MachineLost, ServiceLost):
                await self.connection.ask("DELETE", self._path, timeout_s=30.0)
        await self.let_go()

    def end(self, why: str) -> None:
        """Take note that it has ended."""
        self.why_ended = self.why_ended or why

    async def let_go(self) -> None:
        """Let go of everything on this side; jobs hear from the service that the machine has ended."""
        await self._tunnels.close()
        following = [job.following for job in self._jobs]
        if following:
            _, left = await asyncio.wait(following, timeout=_END_S)
            for task in left:
                task.cancel()

    def require_alive(self) -> None:
        """Raises: MachineLost, which says why it ended."""
        if self.why_ended:
            raise MachineLost(f"machine {self.id} has ended: {self.why_ended}")

    async def _ask(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        try:
            if "/jobs/" not in path:  # what a job wrote can be asked for afterwards
                self.require_alive()
            return await self.connection.ask(method, path, **request)
        except (MachineLost, NoMachine) as error:
            raise self._ended(error) from None

    async def _lines(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        self.require_alive()
        try:
            async with contextlib.aclosing(self.connection.lines(f"{self._path}/exec", body)) as lines:
                async for line in lines:
                    yield line
        except (MachineLost, NoMachine) as error:
            raise self._ended(error) from None

    async def _take(self, path: str, params: Any) -> bytes:
        self.require_alive()
        try:
            async with self.connection.answer("GET", path, params=params, timeout=_QUIET) as response:
                return await response.read()
        except (MachineLost, NoMachine) as error:
            raise self._ended(error) from None

    def _ended(self, error: SandboxError) -> SandboxError:
        if "no job" not in str(error):
            self.end(str(error).partition(" has ended: ")[2] or "its service does not know it any more")
        return error if isinstance(error, MachineLost) else MachineLost(str(error))


class RemoteMachines:
    """Machines at the services of a config. Use as `async with RemoteMachines(config) as machines`."""

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self._fleet = Fleet(config, "machines", self._hear)
        self._machines: dict[str, RemoteMachine] = {}

    @property
    def isolation(self) -> IsolationReport:
        """What the services measured; with several, of the one that gives the least."""
        return self._fleet.isolation

    @property
    def machines(self) -> tuple[RemoteMachine, ...]:
        """Those that have not ended, as far as is known here."""
        return tuple(machine for machine in self._machines.values() if machine.is_alive)

    def get(self, machine_id: str) -> RemoteMachine:
        """A machine of this pool by its id; SandboxError when there is none."""
        machine = self._machines.get(machine_id)
        if machine is None or not machine.is_alive:
            raise SandboxError(f"there is no machine {machine_id!r}; it has ended, or never was")
        return machine

    async def __aenter__(self) -> Self:
        try:
            await self._fleet.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def create(self, config: MachineConfig | None = None, *, snapshot: Snapshot | None = None) -> RemoteMachine:
        """A new machine at the least busy service, with its first files in place."""
        _ = self.isolation  # says that it has not been started
        config = config or MachineConfig()
        config.limits()  # says what is wrong with the environment, before anything is sent
        machine = await self._make(config)
        try:
            if snapshot is not None:
                await machine.restore(snapshot)
            if config.files:
                await machine.upload_files(config.files)
        except BaseException:
            await machine.delete()
            raise
        return machine

    async def close(self) -> None:
        """End every machine of this pool. Safe to call twice."""
        machines, self._machines = list(self._machines.values()), {}
        for machine in machines:
            machine.end("its pool was closed")
        await self._fleet.leave()
        for machine in machines:
            await machine.let_go()
        await self._fleet.close()

    async def _make(self, config: MachineConfig) -> RemoteMachine:
        key, body = secrets.token_hex(16), machine_request(config)

        async def ask(member: Member) -> RemoteMachine:
            try:
                told = await member.connection.ask("POST", "/machines", json=body, key=key)
            except asyncio.CancelledError:
                member.abandoned.append(key)
                raise
            if key in member.abandoned:  # lost before, and adopted now
                member.abandoned.remove(key)
            report = await member.connection.report(told["isolation"])
            return RemoteMachine(str(told["id"]), config, report, member.connection)

        machine = await self._fleet.run(ask, on_move=lambda member: member.abandoned.append(key))
        self._machines[machine.id] = machine
        return machine

    def _hear(self, member: Member, news: dict[str, Any]) -> None:
        """What a service says about this client's machines there."""
        there, ended = set(news["machines"]), news["ended"]
        for machine in list(self._machines.values()):
            if machine.connection is not member.connection or machine.id in there:
                continue
            if machine.is_alive:
                machine.end(ended.get(machine.id, "its service was started anew"))
            del self._machines[machine.id]


def _order(
    command: str | Sequence[str],
    cwd: str,
    env: Mapping[str, str] | None,
    stdin: bytes | str | None,
    timeout_s: float | None,
    max_output_bytes: int,
) -> dict[str, Any]:
    data = stdin.encode() if isinstance(stdin, str) else stdin
    return {
        "command": command if isinstance(command, str) else list(command),
        "cwd": cwd,
        "env": check_environment(env or {}),
        **({"stdin_base64": base64.b64encode(data).decode()} if data else {}),
        **({"stdin": ""} if data == b"" else {}),
        "timeout_s": timeout_s,
        "max_output_bytes": max_output_bytes,
    }


def machine_request(config: MachineConfig) -> dict[str, Any]:
    """What is asked for when a machine is made; its files follow."""
    return {
        "memory_mb": config.memory_mb,
        "disk_mb": config.disk_mb,
        "max_processes": config.max_processes,
        "lifetime_s": config.lifetime_s,
        "idle_s": config.idle_s,
        "env": dict(config.env),
        "labels": dict(config.labels),
    }


def _check_port(port: int) -> None:
    if not 0 <= port <= _MAX_PORT:
        raise UserError(f"there is no port {port}; ports go from 1 to {_MAX_PORT}, and 0 asks for any that is free")
