"""A machine of another host."""

from __future__ import annotations

import asyncio
import base64
import builtins
import contextlib
import io
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, Final

import aiohttp

from mettle.errors import SandboxError, UserError
from mettle.sandbox.isolation import IsolationReport
from mettle.sandbox.machines.commands import CommandRunner, CommandSpec, ExecResult
from mettle.sandbox.machines.config import MachineConfig
from mettle.sandbox.machines.endings import MachineLost
from mettle.sandbox.machines.files import Content, Entry, Snapshot, file_pieces
from mettle.sandbox.service.client.commands import RemoteJob, RemoteStream
from mettle.sandbox.service.client.connection import ServiceConnection, read_body
from mettle.sandbox.service.client.tunnels import Tunnels
from mettle.sandbox.service.faults import NoMachine, ServiceLost
from mettle.sandbox.service.messages import FILES_TYPE
from mettle.sandbox.service.wire import unpack

_END_S: Final = 5.0
_MAX_SNAPSHOT_BYTES: Final = 8 << 30
_MAX_PORT: Final = 65_535
_QUIET: Final = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=120.0)


class RemoteMachine(CommandRunner):
    """A machine at a service. Made by `RemoteMachines.create`; see `mettle.sandbox.protocols.Machine`."""

    def __init__(
        self, machine_id: str, config: MachineConfig, isolation: IsolationReport, connection: ServiceConnection
    ) -> None:
        self.id = machine_id
        self.config = config
        self.isolation = isolation
        self.connection = connection
        self.why_ended = ""
        self.is_left = False
        """It has ended here, and its service may not know."""
        self._path = f"/machines/{machine_id}"
        self._tunnels = Tunnels(connection, self._path)
        self._jobs: list[RemoteJob] = []

    @property
    def is_alive(self) -> bool:
        return not self.why_ended

    async def exec_command(self, spec: CommandSpec) -> ExecResult:
        """Run a command and wait for its end. It is never sent twice."""
        result: ExecResult | None = None
        async with contextlib.aclosing(self._lines({**_body_of(spec), "stream": "result"})) as lines:
            async for line in lines:  # to the end, so that the connection can be used again
                result = unpack(line["result"])
        if result is None:
            raise ServiceLost(f"sandbox service {self.connection.url} gave a command no result")
        return result

    def stream_command(self, spec: CommandSpec) -> RemoteStream:
        return RemoteStream(self._lines({**_body_of(spec), "stream": "chunks"}))

    async def start_command(self, spec: CommandSpec) -> RemoteJob:
        told = await self._ask("POST", f"{self._path}/jobs", json=_body_of(spec), key=secrets.token_hex(16))
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
        return await self._take(f"{self._path}/files", {"path": path, "max_bytes": str(max_bytes)}, max_bytes)

    async def list(self, path: str = "/work") -> builtins.list[Entry]:
        told = await self._ask("GET", f"{self._path}/entries", params={"path": path})
        entries: builtins.list[Entry] = unpack(told["entries"])
        return entries

    async def snapshot(self, paths: Sequence[str] = ("/work",)) -> Snapshot:
        params = [("path", path) for path in paths]
        return Snapshot(await self._take(f"{self._path}/snapshot", params, _MAX_SNAPSHOT_BYTES), tuple(paths))

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
        """End it, and everything in it. A service that is gone is not waited for."""
        if not self.why_ended:
            self.end(why)
            await self.end_there()
        await self.let_go()

    async def end_there(self) -> None:
        """Have the service end it, which may be lost, or have ended it already."""
        self.is_left = self.connection.is_lost
        if self.is_left:
            return
        try:
            await self.connection.ask("DELETE", self._path, timeout_s=30.0)
        except ServiceLost:
            self.is_left = True
        except (NoMachine, MachineLost):
            return

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
            raise MachineLost(f"machine {self.id} has ended: {self.why_ended}", why=self.why_ended)

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

    async def _take(self, path: str, params: Any, max_bytes: int) -> bytes:
        self.require_alive()
        try:
            async with self.connection.answer("GET", path, params=params, timeout=_QUIET) as response:
                return await read_body(response, max_bytes)
        except (MachineLost, NoMachine) as error:
            raise self._ended(error) from None

    def _ended(self, error: SandboxError) -> SandboxError:
        if isinstance(error, MachineLost):
            self.end(error.why or "it has ended")
            return error
        self.end("its service does not know it any more")
        return MachineLost(str(error), why=self.why_ended)


def _body_of(spec: CommandSpec) -> dict[str, Any]:
    body = {"command": spec.command, "cwd": spec.cwd, "env": dict(spec.env)}
    if spec.stdin is not None:
        body["stdin_base64"] = base64.b64encode(spec.stdin).decode()
    return {**body, "timeout_s": spec.timeout_s, "max_output_bytes": spec.max_output_bytes}


def machine_request(config: MachineConfig) -> dict[str, Any]:
    """What is asked for when a machine is made; its files follow. Raises: UserError for a network, which none has."""
    if config.network is not None:
        raise UserError("a machine of a service has no network, not even to an allow-list; leave `network` out")
    return {
        "memory_mb": config.memory_mb,
        "disk_mb": config.disk_mb,
        "max_processes": config.max_processes,
        "cpus": config.cpus,
        "lifetime_s": config.lifetime_s,
        "idle_s": config.idle_s,
        "env": dict(config.env),
        "labels": dict(config.labels),
        **({"image": config.image} if config.image else {}),
    }


def _check_port(port: int) -> None:
    if not 0 <= port <= _MAX_PORT:
        raise UserError(f"there is no port {port}; ports go from 1 to {_MAX_PORT}, and 0 asks for any that is free")
