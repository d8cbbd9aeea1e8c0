"""Work on data that nobody vouches for, done in a process beside this one: it costs an event loop nothing, and ends.

A call into C (`json.loads`, a set that is built, a pattern that backtracks) holds the interpreter until it returns, in
a thread too. So what is to be read goes to a child as bytes, and comes back in pieces that are each small to take.
Parts: `Aside` (children that are kept while they are used), `AsideEnded`, `AsideFailed`; run as a program, the child.
Invariants: a child that needs more than its processor time or memory is ended by the kernel, in the middle of a call
too; children end with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import pickle
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from mettle.errors import SandboxError
from mettle.processes.child import ChildProcess, import_path, python_module
from mettle.processes.orphans import end_with_parent

_LENGTH: Final = struct.Struct(">Q")
_IDLE_S: Final = 30.0
_PIECE_BYTES: Final = 1 << 20
Work = Callable[[bytes], Iterator[Any]]
"""A function of a module, from bytes to pieces that can be pickled."""


class AsideEnded(Exception):
    """The child needed more time or memory than it may have; the message says so in words."""


class AsideFailed(SandboxError):
    """The function itself failed, which is a mistake of ours."""


class _Child:
    def __init__(self, memory_mb: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [*python_module("mettle.processes.aside"), str(theirs.fileno()), str(memory_mb)]
            self.process = ChildProcess(
                command, tie="pipe", pass_fds=[theirs.fileno()], environment={"PYTHONPATH": import_path()}
            )
        self.channel = ours
        self.letting_go: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        self.reader, self.writer = await asyncio.open_unix_connection(sock=self.channel)

    async def ask(self, work: Work, data: bytes, cpu_s: float) -> list[Any]:
        order = pickle.dumps((work.__module__, work.__qualname__, cpu_s))
        self.writer.writelines((_LENGTH.pack(len(order)), order, _LENGTH.pack(len(data))))
        for start in range(0, len(data), _PIECE_BYTES):
            self.writer.write(memoryview(data)[start : start + _PIECE_BYTES])
            await self.writer.drain()
        pieces = []
        while answer := await self.reader.readexactly(_LENGTH.unpack(await self.reader.readexactly(_LENGTH.size))[0]):
            is_done, piece = pickle.loads(answer)
            if not is_done:
                raise AsideFailed(piece)
            pieces.append(piece)
            await asyncio.sleep(0)  # others have their turn between two pieces
        return pieces

    def end(self) -> None:
        if self.letting_go is not None:
            self.letting_go.cancel()
        self.process.kill()
        if hasattr(self, "writer"):
            self.writer.close()
        else:
            self.channel.close()


class Aside:
    """Up to `num_children` children, started when they are needed and let go when they have been idle."""

    def __init__(self, *, num_children: int = 2, memory_mb: int = 2048) -> None:
        self._memory_mb = memory_mb
        self._turns = asyncio.Semaphore(num_children)
        self._idle: list[_Child] = []
        self._num_started = 0

    async def run(self, work: Work, data: bytes, *, cpu_s: float) -> list[Any]:
        """The pieces that `work` makes of the data.

        Raises: AsideEnded over `cpu_s` of processor time or the memory of a child, AsideFailed for what `work` raises.
        """
        async with self._turns:
            child = await self._take()
            try:
                pieces = await child.ask(work, data, cpu_s)
            except (asyncio.IncompleteReadError, OSError) as error:
                code = child.process.wait(5.0)
                self._end(child)
                if code == -signal.SIGPROF:
                    raise AsideEnded(f"it took more than {cpu_s:g} s of processor time to read") from error
                raise AsideEnded(f"it could not be read in {self._memory_mb} MB of memory") from error
            except BaseException:
                self._end(child)
                raise
            child.letting_go = asyncio.get_running_loop().call_later(_IDLE_S, self._let_go, child)
            self._idle.append(child)
            return pieces

    def close(self) -> None:
        """End the children. Work that is going on ends as if its child had died."""
        while self._idle:
            self._end(self._idle.pop())

    async def _take(self) -> _Child:
        if self._idle:
            child = self._idle.pop()
            assert child.letting_go is not None, "it has been idle"
            child.letting_go.cancel()
            return child
        child = await asyncio.to_thread(_Child, self._memory_mb)
        await child.open()
        self._num_started += 1
        return child

    def _let_go(self, child: _Child) -> None:
        with contextlib.suppress(ValueError):  # taken meanwhile
            self._idle.remove(child)
            self._end(child)

    def _end(self, child: _Child) -> None:
        child.end()


def _serve(channel: socket.socket) -> None:
    """In the child: one order after another."""
    stream = channel.makefile("rwb")

    def received() -> bytes:
        size = stream.read(_LENGTH.size)
        if len(size) < _LENGTH.size:
            raise SystemExit
        return stream.read(_LENGTH.unpack(size)[0])

    def send(data: bytes) -> None:
        stream.write(_LENGTH.pack(len(data)) + data)
        stream.flush()

    while True:
        module, name, cpu_s = pickle.loads(received())
        data = received()
        work = getattr(importlib.import_module(module), name)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # whose signal ends the process
        try:
            for piece in work(data):
                send(pickle.dumps((True, piece), protocol=5))
        except MemoryError:
            sys.exit(1)
        except Exception as error:
            send(pickle.dumps((False, f"{name}: {type(error).__name__}: {str(error)[:500]}")))
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(b"")


def main() -> None:
    """`python -m mettle.processes.aside FD MEMORY_MB`."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    most = int(sys.argv[2]) << 20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        _serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
