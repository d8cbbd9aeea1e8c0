"""Process 1 of a container: answers the routes of a sandbox service for the one machine that the container is.

    GET     /status                     what it is
    PUT     /machines/ID                the machine's limits and environment
    POST    /machines/ID/exec, /jobs    commands; GET and DELETE /jobs/JOB
    POST    /machines/ID/files          many files; GET /files, GET /entries; GET and PUT /snapshot
    GET     /machines/ID/connect/PORT   websockets: to a port inside, and from one (`listen`)
    GET     /machines/ID/cells          a websocket to a cell of the judge's, of which a container has one

It ends, and the container with it, when the stream to its owner does, or has been silent for the lease.
Invariant: whatever a handler raises becomes one typed line; a request whose client hangs up takes its command along.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import resource
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, NoReturn, Protocol

from mettle.errors import UserError
from mettle.sandbox.containers.agent import cells
from mettle.sandbox.containers.agent.commands import Command, Op
from mettle.sandbox.containers.agent.faults import BodyTooLarge, NoSuch, UnknownJob, refuse
from mettle.sandbox.containers.agent.files import FileRoutes
from mettle.sandbox.containers.agent.http import HttpStream, PeerEnded, Request, read_request
from mettle.sandbox.containers.agent.loop import Loop, LoopEvent, Task, readable, writable
from mettle.sandbox.containers.agent.mux import Mux
from mettle.sandbox.containers.agent.ports import PortRoutes, carry
from mettle.sandbox.service.messages import HEARTBEAT_S, LINES_TYPE, PREFIX
from mettle.sandbox.zygote import jail
from mettle.sandbox.zygote.overseer import OperationWorker, Overseer
from mettle.sandbox.zygote.settings import CellLimits, MachineLimits, Settings

_MAX_JOBS: Final = 1000
_MAX_BODY_BYTES: Final = 32 << 20
_MAX_OUTPUT_BYTES: Final = 64 << 20
_MAX_WAIT_S: Final = 60.0
_FULL_BYTES: Final = 1 << 20
_SEND_BYTES: Final = 1 << 18
_ALL_USERS: Final = ["0", "0", "4294967295"]
_UNLIMITED: Final = MachineLimits(1 << 40, 1 << 40, 1 << 20, 1 << 20, 1 << 10, 1 << 20, {})


class Wire(Protocol):
    """The stream to the owner, neither end of which ever blocks."""

    read_fd: int
    write_fd: int

    def read(self) -> bytes | None:
        """What has come; nothing at the end, None while nothing is there. Raises: OSError."""
        ...

    def write(self, data: memoryview) -> int:
        """How much of it was taken. Raises: OSError."""
        ...


class Agent(Overseer):
    """The whole of process 1. Its ops are those of a machine on this host, without descriptors that travel."""

    def __init__(self, wire: Wire, settings: Settings, image_environment: dict[str, str], lease_s: float) -> None:
        super().__init__(settings, _UNLIMITED, "")
        self.loop = Loop()
        self.drained: deque[Task] = deque()
        self._wire = wire
        self._environment = image_environment
        self._lease_s = lease_s
        self._last_heard = time.monotonic()
        self._out = bytearray()
        self._has_more = LoopEvent()
        self._gate = LoopEvent()
        self._gate.set()
        self._mux = Mux(self._write, self._accept)
        self._ops: dict[int, Op] = {}
        self._numbers = itertools.count(1)
        self._jobs: dict[str, Command] = {}
        self._files = FileRoutes(self)
        self._ports = PortRoutes(self.loop)

    def serve(self) -> None:
        """Answer until the owner goes away."""
        self._wake = self.wake_on_ended_children()
        for work in (self._receive(), self._send(), self._drain_wakes()):
            self.loop.spawn(work)
        self.loop.run(self._look)

    def answer(self, order: int, answer: dict[str, Any]) -> None:
        op = self._ops.pop(order, None)
        if op is not None:
            op.answer = answer
            op.ended.set()

    def start_op(self, order: dict[str, Any], streams: list[int]) -> tuple[Op, list[int]]:
        """Start an op with a pipe for each stream; our ends of them."""
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in streams]
        theirs = [pipe[0] if stream == 0 else pipe[1] for pipe, stream in zip(pipes, streams, strict=True)]
        ours = [pipe[1] if stream == 0 else pipe[0] for pipe, stream in zip(pipes, streams, strict=True)]
        op = Op(next(self._numbers))
        try:
            self.start({"id": op.number, "streams": streams, **order}, theirs)
        except OSError:
            _close(ours)
            raise
        finally:
            _close(theirs)
        self._ops[op.number] = op
        for descriptor in ours:
            os.set_blocking(descriptor, False)
        return op, ours

    def kill_op(self, op: Op) -> None:
        self.kill({"id": 0, "target": op.number})

    def give_up(self, why: str) -> NoReturn:
        print(why, file=sys.stderr, flush=True)
        os._exit(1)

    def _look(self) -> float | None:
        """One turn of the overseer's; how soon it wants the next."""
        self.collect()
        self.hunt()
        self.watch_memory()
        silent_s = time.monotonic() - self._last_heard
        if silent_s > self._lease_s:
            self.loop.is_over = True
        soon_ms = self.wait_ms()
        waits = [self._lease_s - silent_s + 0.001, *([] if soon_ms is None else [soon_ms / 1000])]
        return max(0.0, min(waits))

    async def _drain_wakes(self) -> None:
        while True:
            await readable(self._wake)
            os.read(self._wake, 4096)

    async def _receive(self) -> None:
        try:
            while (data := self._wire.read()) != b"":
                if data is None:
                    await readable(self._wire.read_fd)
                    continue
                self._last_heard = time.monotonic()
                self._mux.feed(data)
        except (OSError, ValueError) as error:
            print(f"the stream to the owner ends: {error}", file=sys.stderr, flush=True)
        self.loop.is_over = True

    def _write(self, data: bytes) -> None:
        self._out += data
        self._has_more.set()
        if len(self._out) > _FULL_BYTES:
            self._gate.clear()

    async def _send(self) -> None:
        try:
            while True:
                self._has_more.clear()
                while self._out:
                    with memoryview(self._out) as view:
                        num = self._wire.write(view[:_SEND_BYTES])
                    del self._out[:num]
                    if not num:
                        await writable(self._wire.write_fd)
                    if len(self._out) < _FULL_BYTES:
                        self._gate.set()
                await self._has_more.wait()
        except OSError:
            self.loop.is_over = True

    def _accept(self, mux: Mux, number: int) -> HttpStream:
        stream = HttpStream(mux, number, self._gate)
        task = self.loop.spawn(self._converse(stream))
        stream.on_hang_up = task.cancel
        return stream

    async def _converse(self, stream: HttpStream) -> None:
        """The requests of one connection, one after the other."""
        try:
            while (request := await read_request(stream)) is not None:
                try:
                    await self._handle(request)
                except (UserError, OSError, KeyError, TypeError, ValueError) as error:
                    if request.has_answered:
                        raise PeerEnded(str(error)) from error
                    await refuse(request, error)
                if request.is_websocket and request.has_answered:
                    break
                await request.finish()
            stream.end()
        except (PeerEnded, ValueError):
            pass
        finally:
            stream.reset()

    async def _handle(self, request: Request) -> None:
        routes: dict[tuple[str, str], Callable[..., Awaitable[None]]] = {
            ("PUT", ""): self._begin,
            ("POST", "exec"): self._exec,
            ("POST", "jobs"): self._start_job,
            ("GET", "jobs"): self._show_job,
            ("DELETE", "jobs"): self._kill_job,
            ("POST", "files"): lambda request: self._files.give(request, "put"),
            ("PUT", "snapshot"): lambda request: self._files.give(request, "unpack"),
            ("GET", "files"): self._files.get,
            ("GET", "snapshot"): self._files.snapshot,
            ("GET", "entries"): self._files.entries,
            ("GET", "connect"): self._ports.connect,
            ("GET", "listen"): self._ports.listen,
            ("GET", "cells"): self._cell,
        }
        prefix = PREFIX.strip("/").split("/")
        if request.words == [*prefix, "status"]:
            await request.answer(_describe())
            return
        _, _, machines, _, what, *words = [*request.words, "", "", "", "", ""][: max(5, len(request.words))]
        handler = routes.get((request.method, what))
        if request.words[:2] != prefix or machines != "machines" or handler is None:
            raise NoSuch(f"an agent has no {request.method} /{'/'.join(request.words)[:200]}")
        await handler(request, *[word for word in words if word])

    async def _begin(self, request: Request) -> None:
        """Take the limits of this machine. The image's variables come first, the owner's over them."""
        limits = MachineLimits(**(await _json(request))["limits"])
        environment = {**self._environment, **limits.environment}
        max_processes = limits.max_processes if _has_own_users() else 0
        self.limits = limits._replace(environment=environment, max_processes=max_processes)
        jail.limit(file_bytes=limits.disk_bytes, open_files=limits.max_open_files)
        jail.lower(resource.RLIMIT_CPU, limits.cpu_s)
        await request.answer({})

    async def _exec(self, request: Request) -> None:
        """Run a command, and answer in lines: output, signs of life, the result."""
        body = await _json(request)
        order = _order(body)
        await request.begin(LINES_TYPE)

        async def chunk(name: str, data: bytes) -> None:
            with contextlib.suppress(PeerEnded):  # who reads has gone, and the command is ended for it
                await line({name: base64.b64encode(data).decode()})

        async def line(told: dict[str, Any]) -> None:
            await request.send(json.dumps(told, separators=(",", ":")).encode() + b"\n")

        is_stream = body.get("stream") == "chunks"
        command = Command(self, order, on_chunk=chunk if is_stream else None, has_flood_limit=not is_stream)
        try:
            while not await command.ended.wait(HEARTBEAT_S):
                await line({})
        finally:
            command.stop()
        await line({"result": command.result})
        await request.send(b"")

    async def _start_job(self, request: Request) -> None:
        order = _order(await _json(request))
        name = str(next(self._numbers))
        self._jobs[name] = Command(self, order)
        if len(self._jobs) > _MAX_JOBS:
            done = [known for known, job in self._jobs.items() if job.ended.is_set]
            for known in done[: len(self._jobs) - _MAX_JOBS]:
                del self._jobs[known]
        await request.answer({"id": name}, 201)

    async def _show_job(self, request: Request, name: str) -> None:
        job = self._job(name)
        await job.ended.wait(min(_MAX_WAIT_S, float(request.one("wait_s", "0"))))
        shown: dict[str, Any] = {"id": name, "result": job.result or None}
        if request.one("output", "") == "1":
            shown |= {stream: capture.text() for stream, capture in job.captures.items()}
        await request.answer(shown)

    async def _kill_job(self, request: Request, name: str) -> None:
        job = self._job(name)
        if not job.ended.is_set:
            job.stop()
            await job.ended.wait()
        await request.answer({"result": job.result})

    def _job(self, name: str) -> Command:
        if name not in self._jobs:
            raise UnknownJob(f"the machine has no job {name[:100]!r}")
        return self._jobs[name]

    async def _cell(self, request: Request) -> None:
        """A cell in a process of its own, which speaks the judge's protocol over the websocket."""
        settings = Settings.from_json(request.one("settings", "{}"))
        given = json.loads(request.one("limits", "null"))
        limits = CellLimits(**given) if given else None
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            own = limits.of(settings) if limits else settings
            cells.live(theirs, own, has_files=limits is not None and limits.has_program)
        theirs.close()
        self.workers[pid] = OperationWorker(next(self._numbers), pid)
        ours.setblocking(False)
        with ours:
            await carry(self.loop, request, ours)


def _order(body: dict[str, Any]) -> dict[str, Any]:
    """A command as `service/bodies.py` has it. There is no pydantic here; the owner, who alone can ask, has made it."""
    stdin = body.get("stdin_base64")
    return {
        "command": body["command"],
        "cwd": body.get("cwd", "/work"),
        "env": dict(body.get("env") or {}),
        "stdin": None if stdin is None else base64.b64decode(stdin, validate=True),
        "timeout_s": body.get("timeout_s"),
        "max_output_bytes": min(int(body.get("max_output_bytes", 1 << 20)), _MAX_OUTPUT_BYTES),
    }


async def _json(request: Request) -> dict[str, Any]:
    data = bytearray()
    async for piece in request.body():
        data += piece
        if len(data) > _MAX_BODY_BYTES:
            raise BodyTooLarge(f"the body has more than {_MAX_BODY_BYTES >> 20} MB; put what is long into a file")
    body = json.loads(data) if data else {}
    if not isinstance(body, dict):
        raise UserError("the body must be a JSON object")
    return body


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _has_own_users() -> bool:
    """Whether the users in here are nobody else's, so that their processes can be counted."""
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            return file.read().split() != _ALL_USERS
    except OSError:
        return False


def _describe() -> dict[str, Any]:
    kernel = os.uname()
    return {"kernel": kernel.release, "machine": kernel.machine, "uid": os.getuid(), "is_first": os.getpid() == 1}
