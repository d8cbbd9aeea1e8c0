"""A machine to work in: commands, background jobs, files and ports that live until it is deleted.

Invariant: after `delete`, or after the end of the process that owns it, nothing of a machine is left; an operation on a
machine that has ended is a SandboxError that says why it ended.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import itertools
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from mettle.errors import SandboxError, UserError
from mettle.sandbox.cgroups import MachineCgroup
from mettle.sandbox.isolation import IsolationReport
from mettle.sandbox.machines.commands import CommandRunner, CommandSpec, ExecResult
from mettle.sandbox.machines.config import MachineConfig
from mettle.sandbox.machines.egress import PORT, Egress
from mettle.sandbox.machines.endings import MachineLost
from mettle.sandbox.machines.execution import Execution
from mettle.sandbox.machines.files import Content, Entry, Snapshot, file_pieces, read_entries
from mettle.sandbox.machines.jobs import LocalJob, LocalStream
from mettle.sandbox.machines.lifetime import Timed
from mettle.sandbox.machines.line import Line, Reader, Writer
from mettle.sandbox.machines.transfers import Transfers

logger = logging.getLogger(__name__)

_ANSWER_S: Final = 10.0
_MAX_PORT: Final = 65_535
_END_S: Final = 2.0
_KILLED_S: Final = 20.0  # hundreds of processes on a busy host take seconds to end
_MAX_LISTING_BYTES: Final = 64 << 20
_MAX_DRAINED: Final = 64
MAX_ENTRY_BYTES: Final = 10 << 10  # of an archive, before a file's own: two paths of the longest kind, and padding


class LocalMachine(Timed, CommandRunner):
    """One machine. Made by `MachinePool.create`."""

    def __init__(
        self,
        machine_id: str,
        config: MachineConfig,
        isolation: IsolationReport,
        channel: Line,
        kill: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(config)
        self.id = machine_id
        self.isolation = isolation
        self.channel = channel
        self._kill = kill
        self._transfers = Transfers(self)
        self._executions: set[Execution] = set()
        self._drained: deque[Reader] = deque()
        self._job_numbers = itertools.count(1)
        self.why_ended = ""
        self.lost_as: type[MachineLost] = MachineLost
        self.cgroup: MachineCgroup | None = None
        self.egress: Egress | None = None
        """Its way out, if it was given one: what it was refused, and how much passed."""
        self.on_end: Callable[[LocalMachine], None] = lambda _: None

    @property
    def is_alive(self) -> bool:
        return not self.why_ended and self.channel.is_open

    @property
    def is_busy(self) -> bool:
        return super().is_busy or bool(self._executions)

    async def exec_command(self, spec: CommandSpec) -> ExecResult:
        return await self._execute(spec, has_flood_limit=True).result()

    def stream_command(self, spec: CommandSpec) -> LocalStream:
        return LocalStream(self._execute(spec, has_flood_limit=False))

    async def start_command(self, spec: CommandSpec) -> LocalJob:
        return LocalJob(f"{self.id}/{next(self._job_numbers)}", self._execute(spec, has_flood_limit=False))

    async def upload(self, path: str, data: Content) -> None:
        """Write a file; a `Path` is a file or a directory of the host. Directories on the way are made."""
        await self.upload_files({path: data})

    async def upload_files(self, files: Mapping[str, Content]) -> None:
        """Write many files at once. Raises: OSError for what is in the way inside the machine."""
        pieces = file_pieces(files)

        async def feed(writer: Writer) -> None:
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                await writer.write(piece)

        await self._transfers.give("put", {}, feed, ", ".join(list(files)[:3]))

    async def download(self, path: str, *, max_bytes: int = 1 << 30) -> bytes:
        """The bytes of a file. Raises: OSError as `open` would, and EFBIG over `max_bytes`."""
        return await self._transfers.take("get", {"path": path}, path, max_bytes)

    async def list(self, path: str = "/work") -> builtins.list[Entry]:
        """What a directory holds, by name. Raises: OSError as `os.scandir` would."""
        return read_entries(await self._transfers.take("list", {"path": path}, path, _MAX_LISTING_BYTES))

    async def snapshot(self, paths: Sequence[str] = ("/work",)) -> Snapshot:
        """The files below these directories, for another machine to start from. Processes are not part of it.

        Raises: OSError, EFBIG for more than its disk can hold: files with holes have any size and take no room there.
        """
        limits, what = self.config.limits(), " ".join(paths)
        most = limits.disk_bytes + limits.max_files * MAX_ENTRY_BYTES
        return Snapshot(await self._transfers.take("pack", {"paths": list(paths)}, what, most), tuple(paths))

    async def restore(self, snapshot: Snapshot) -> None:
        """Put a snapshot's files back where they were."""
        await self._transfers.give("unpack", {}, lambda writer: writer.write(snapshot.data), "the snapshot")

    async def listen(self, port: int = 0) -> socket.socket:
        """A socket that listens on 127.0.0.1:`port` inside and belongs to the caller, who answers there."""
        return await self._socket({"do": "listen", "port": port}, f"port {port}")

    async def connect(self, port: int, *, timeout_s: float = 10.0) -> socket.socket:
        """A connection to 127.0.0.1:`port` inside. Raises: OSError as `connect` would."""
        order = {"do": "connect", "port": port, "timeout_s": timeout_s}
        connection = await self._socket(order, f"port {port}", timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await _wait_connected(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    async def open_egress(self) -> None:
        """Answer as the proxy that its environment names, if its config lets it reach anything."""
        network = self.config.reach()
        if network is not None:
            self.egress = Egress(network)
            await self.egress.open(await self.listen(PORT))

    async def delete(self, why: str = "it was deleted") -> None:
        """End it, and return when no process of it is left. Doing it twice is harmless."""
        self.why_ended = self.why_ended or why
        self.channel.hang_up()
        try:
            if not await self._is_gone(_END_S):
                await self._kill_and_wait()
        except asyncio.CancelledError:
            await self._kill()  # nobody waits any longer for it to end by itself
            raise
        finally:
            self.close()

    async def force_end(self, why: str) -> None:
        """End it without asking."""
        self.why_ended = self.why_ended or why
        try:
            await self._kill_and_wait()
        finally:
            self.close()

    async def _kill_and_wait(self) -> None:
        """The kernel ends all processes of a machine whose process 1 is killed; one that it can't end is left to it."""
        await self._kill()
        if not await self._is_gone(_KILLED_S):
            logger.warning("processes of machine %s have not ended %.0f s after they were killed", self.id, _KILLED_S)

    async def _is_gone(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.channel.gone.wait()
        return self.channel.gone.is_set()

    def close(self) -> None:
        """Let go of everything on this side."""
        self.on_end(self)
        if self.egress is not None:
            self.egress.close()
        self.channel.close()
        self.channel.let_go_of_process()
        while self._drained:
            self._drained.popleft().close()

    def num_killed_by_kernel(self) -> int:
        """How many of its processes the kernel has ended for lack of memory, where it counts them."""
        return self.cgroup.num_killed() if self.cgroup is not None else 0

    def keep_draining(self, readers: Sequence[Reader]) -> None:
        """Read on for processes that a command has left behind, so that what they print does not end them."""
        for reader in readers:
            reader.discard()
            self._drained.append(reader)
        for reader in [reader for reader in self._drained if reader.ended.is_set()]:
            self._drained.remove(reader)
        while len(self._drained) > _MAX_DRAINED:
            self._drained.popleft().close()

    def _execute(self, spec: CommandSpec, *, has_flood_limit: bool) -> Execution:
        self.require_alive()
        execution = Execution(self, spec, has_flood_limit=has_flood_limit)
        self._executions.add(execution)
        execution.task.add_done_callback(lambda _: self._finished(execution))
        return execution

    def _finished(self, execution: Execution) -> None:
        self._executions.discard(execution)
        self._last_used = time.monotonic()
        if not execution.task.cancelled() and isinstance(error := execution.task.exception(), MachineLost):
            error.why = self.why_ended or str(error)
            error.args = (self._ended_message(error.why),)

    def require_alive(self) -> None:
        """Raises: MachineLost, which says why it ended."""
        if not self.is_alive:
            why = self.why_ended or "its process 1 ended"
            raise self.lost_as(self._ended_message(why), why=why)

    def _ended_message(self, why: str) -> str:
        return f"machine {self.id} has ended: {why}"

    async def _socket(self, order: dict[str, Any], what: str, extra_s: float = 0.0) -> socket.socket:
        self.require_alive()
        if not 0 <= order["port"] <= _MAX_PORT:
            raise UserError(f"there is no {what}; ports go from 1 to {_MAX_PORT}, and 0 asks for any that is free")
        with self.working():
            answer = await self.channel.ask(order, _ANSWER_S + extra_s)
        if "errno" in answer.header:
            number = int(answer.header["errno"])
            raise OSError(number, os.strerror(number), f"{what} of machine {self.id}")
        if answer.passed is None:
            raise SandboxError(f"machine {self.id} sent no socket")
        answer.passed.setblocking(False)
        return answer.passed


async def _wait_connected(connection: socket.socket) -> None:
    loop, writable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_writer(connection, writable.set)
    try:
        await writable.wait()
    finally:
        loop.remove_writer(connection)
    error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))
