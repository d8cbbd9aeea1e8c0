"""The owner's end of a machine's socket: orders and descriptors out, answers and descriptors in.

Invariant: every order is answered once, by its answer or, when the machine has ended, by `MachineLost`; answers are
data to be checked, and descriptors that nobody asked for are closed. `gone` is set when no process of the machine is
left: its socket closes before that, because process 1 lets go of its descriptors first and then waits for all others.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from mettle.errors import UserError
from mettle.sandbox.machines.endings import MachineLost
from mettle.sandbox.machines.line import Answer, ReaderEnd, Sink, Writing
from mettle.sandbox.machines.pipes import PipeReader, PipeWriter
from mettle.sandbox.zygote import frames

_READ_BYTES: Final = 1 << 16
_MAX_DESCRIPTORS: Final = 8


class Channel:
    """The socket, its reader, and the orders that wait for an answer."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._received = bytearray()
        self._descriptors: deque[int] = deque()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._is_hung_up = False
        self.ready: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self.closed = asyncio.Event()
        self.gone = asyncio.Event()
        self._first_process: int | None = None  # a descriptor of process 1, which says when it has ended
        self._loop.add_reader(connection, self._on_readable)

    @property
    def is_open(self) -> bool:
        return not self.closed.is_set() and not self._is_hung_up

    def open_reader(self, sink: Sink) -> ReaderEnd:
        """A pipe that the machine writes; its end is a descriptor, which `let_go` closes."""
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        return ReaderEnd(PipeReader(read_end, sink), write_end)

    def open_writer(self, stall_s: float | None = None) -> Writing:
        """A pipe that the machine reads."""
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        return Writing(PipeWriter(write_end, stall_s), read_end)

    def let_go(self, ends: Sequence[int]) -> None:
        """Close this process's copies of what was sent along."""
        for descriptor in ends:
            os.close(descriptor)

    async def order(self, header: dict[str, Any], ends: Sequence[int] = ()) -> tuple[int, asyncio.Future[Answer]]:
        """Send an order; its number, and the future of its answer. The ends stay the caller's to let go."""
        number = next(self._numbers)
        data = frames.encode({"id": number, **header})
        if len(data) > frames.MAX_HEADER_BYTES:  # process 1 would take it for an attack, and end
            raise UserError(f"a command with its environment has {len(data):,} bytes; put what is long into a file")
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting[number] = answer
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await self._send(data, list(ends))
        except OSError as error:
            self._waiting.pop(number, None)
            raise MachineLost("the machine has ended") from error
        return number, answer

    async def ask(self, header: dict[str, Any], timeout_s: float) -> Answer:
        """Send an order and wait for its answer."""
        _, answer = await self.order(header)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            _let_go_of(answer)
            raise MachineLost(f"the machine did not answer within {timeout_s:.0f} s") from error
        except asyncio.CancelledError:
            _let_go_of(answer)
            raise

    def hang_up(self) -> None:
        """Say that nothing more is coming; process 1 ends, and the machine with it."""
        self._is_hung_up = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Let go of the socket; whoever waits is told that the machine is lost."""
        if self.closed.is_set():
            return
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self.closed.set()
        if self._first_process is None:
            self.gone.set()
        for descriptor in self._descriptors:
            os.close(descriptor)
        if not self.ready.done():
            self.ready.set_exception(MachineLost("the machine ended while it was made"))
            self.ready.exception()
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(MachineLost("the machine ended"))

    def let_go_of_process(self) -> None:
        """Whether process 1 has ended is not asked any more."""
        first, self._first_process = self._first_process, None
        if first is not None:
            self._loop.remove_reader(first)
            os.close(first)
        self.gone.set()

    async def _send(self, data: bytes, descriptors: list[int]) -> None:
        if not self.is_open:
            raise BrokenPipeError("closed")
        async with self._sending:
            view = memoryview(data)
            try:
                while view:
                    try:
                        num_sent = socket.send_fds(self._socket, [view], descriptors)
                    except BlockingIOError:
                        await self._wait_writable()
                        continue
                    descriptors, view = [], view[num_sent:]
            except asyncio.CancelledError:
                if len(view) < len(data):  # half a message would garble all that follow
                    self.close()
                raise

    async def _wait_writable(self) -> None:
        writable = asyncio.Event()
        self._loop.add_writer(self._socket, writable.set)
        try:
            await writable.wait()
        finally:
            self._loop.remove_writer(self._socket)

    def _on_readable(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _READ_BYTES, _MAX_DESCRIPTORS)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        self._descriptors.extend(descriptors)
        self._received += data
        try:
            is_sound = bool(data)
            self._read_frames()
        except (ValueError, KeyError, TypeError):
            is_sound = False
        if not is_sound:
            self.close()

    def _read_frames(self) -> None:
        while len(self._received) >= frames.PREFIX.size:
            lengths = frames.check_lengths(bytes(self._received[: frames.PREFIX.size]), frames.MAX_HEADER_BYTES)
            end = frames.PREFIX.size + sum(lengths)
            if len(self._received) < end:
                return
            header = frames.decode_header(bytes(self._received[frames.PREFIX.size : end - lengths[1]]))
            del self._received[:end]
            self._deliver(header)

    def _deliver(self, header: dict[str, Any]) -> None:
        if not self.ready.done():
            self._watch_process(header)
            self.ready.set_result(header)
            return
        descriptor = self._descriptors.popleft() if header["has_descriptor"] and self._descriptors else None
        answer = self._waiting.pop(int(header["id"]), None)
        if answer is not None and not answer.done():
            answer.set_result(Answer(header, None if descriptor is None else socket.socket(fileno=descriptor)))
        elif descriptor is not None:
            os.close(descriptor)

    def _watch_process(self, header: dict[str, Any]) -> None:
        """Take the descriptor of process 1. Where the host's kernel gave it none, the end of the socket has to do."""
        if header.get("has_descriptor") and self._descriptors:
            self._first_process = self._descriptors.popleft()
            self._loop.add_reader(self._first_process, self.let_go_of_process)


def _let_go_of(answer: asyncio.Future[Answer]) -> None:
    """Nobody takes it. It may have come in the same moment: then the socket that it carries has no other owner."""
    if answer.done() and not answer.cancelled() and answer.exception() is None:
        passed = answer.result().passed
        if passed is not None:
            passed.close()
