"""The owner's end of an agent's stream: what `machines/channel.py` is for a socket of this host.

Orders go out and answers come back as frames; each reader, writer and port has a numbered stream with a window, as
`agent/streams.py` describes. The agent is asked for a sign of life when it has been silent.
Invariant: every order is answered once, by its answer or by the `MachineLost` that says what became of the machine;
what comes from an agent is data to be checked, and a frame that makes no sense ends the line.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

from mettle.sandbox.containers.agent.wire import FrameReader
from mettle.sandbox.containers.streams import FarReader, FarWriter, carry
from mettle.sandbox.machines.line import Answer, MachineLost, Reading, Sink, Writing
from mettle.sandbox.machines.listeners import PrivateListener
from mettle.sandbox.zygote import frames

logger = logging.getLogger(__name__)

_PING_S: Final = 10.0
_SILENCE_S: Final = 30.0
_FATE_S: Final = 5.0


class Transport(Protocol):
    """A stream of bytes to an agent."""

    async def read(self) -> bytes:
        """What has come; empty at the end. Raises: OSError, ValueError for what an agent cannot have sent."""
        ...

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None:
        """Wait until what was written is on its way."""
        ...

    def close(self) -> None: ...


class AgentLine:
    """One agent's orders, answers and streams. `fate` is asked once, when the stream has ended, what has happened."""

    def __init__(self, transport: Transport, fate: Callable[[], Awaitable[MachineLost]] | None = None) -> None:
        self._transport = transport
        self.fate = fate
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._stream_numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._readers: dict[int, FarReader] = {}
        self._writers: dict[int, FarWriter] = {}
        self._listeners: dict[int, PrivateListener] = {}
        self._is_hung_up = False
        self._lost = MachineLost("the machine has ended")
        self._last_heard = self._loop.time()
        self._tasks: set[asyncio.Task[None]] = set()
        self.ready: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self.closed = asyncio.Event()
        self._receiver = self._spawn(self._receive(), "agent receive")
        self._spawn(self._keep_alive(), "agent keep-alive")

    @property
    def is_open(self) -> bool:
        return not self.closed.is_set() and not self._is_hung_up and not self._receiver.done()

    def open_reader(self, sink: Sink) -> Reading:
        number = next(self._stream_numbers)
        reader = self._readers[number] = FarReader(number, sink, self._send)
        return Reading(reader, number)

    def open_writer(self, stall_s: float | None = None) -> Writing:
        number = next(self._stream_numbers)
        writer = self._writers[number] = FarWriter(number, self._send, self._transport.drain, stall_s)
        return Writing(writer, number)

    def let_go(self, ends: Sequence[int]) -> None:
        """Nothing is held on this side but the streams, which end by themselves."""

    async def order(self, header: dict[str, Any], ends: Sequence[int] = ()) -> tuple[int, asyncio.Future[Answer]]:
        number = next(self._numbers)
        answer: asyncio.Future[Answer] = self._loop.create_future()
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        if not self.is_open:
            self._forget(ends)
            raise await self._why_lost()
        self._waiting[number] = answer
        try:
            self._send({"id": number, **header, **({"ends": list(ends)} if ends else {})})
            await self._transport.drain()
        except OSError as error:
            self._waiting.pop(number, None)
            self._forget(ends)
            raise await self._why_lost() from error
        return number, answer

    async def ask(self, header: dict[str, Any], timeout_s: float) -> Answer:
        if header["do"] == "listen":
            return await self._listen(header, timeout_s)
        if header["do"] == "connect":
            return await self._connect(header, timeout_s)
        return await self._ask(header, timeout_s)

    async def open_socket(self, header: dict[str, Any]) -> socket.socket:
        """Send an order whose stream begins at once, and give its end as a socket."""
        number, theirs, ours = self._make_socket()
        try:
            await self.order({**header, "stream": number})
        except BaseException:
            self._forget([number])
            theirs.close()
            ours.close()
            raise
        self._spawn(carry(theirs, self._readers[number], self._writers[number]), "agent socket")
        return ours

    def hang_up(self) -> None:
        if not self._is_hung_up and not self.closed.is_set():
            self._send({"bye": True})
        self._is_hung_up = True

    def close(self) -> None:
        self._close(MachineLost("the machine ended"))

    def _close(self, lost: MachineLost) -> None:
        if self.closed.is_set():
            return
        self._lost = lost
        self.closed.set()
        self._transport.close()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        for reader in self._readers.values():
            reader.finish()
        for writer in self._writers.values():
            writer.drop()
        for listener in self._listeners.values():
            listener.retire()  # it belongs to who listens, and may be watched by an event loop
        self._listeners.clear()
        if not self.ready.done():
            self.ready.set_exception(lost)
            self.ready.exception()
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(type(lost)(*lost.args))

    async def _why_lost(self) -> MachineLost:
        """What is raised for a line that has ended, as soon as it is known why."""
        if not self._is_hung_up:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FATE_S + 1):
                    await self.closed.wait()
        return type(self._lost)(*self._lost.args)

    async def _ask(self, header: dict[str, Any], timeout_s: float) -> Answer:
        _, answer = await self.order(header)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            raise MachineLost(f"the machine did not answer within {timeout_s:.0f} s") from error

    async def _connect(self, header: dict[str, Any], timeout_s: float) -> Answer:
        number, theirs, ours = self._make_socket()
        try:
            answer = await self._ask({**header, "stream": number}, timeout_s)
            is_made = "errno" not in answer.header
        except BaseException:
            is_made = False
            raise
        finally:
            if not is_made:
                self._forget([number])
                theirs.close()
                ours.close()
        if not is_made:
            return answer
        self._spawn(carry(theirs, self._readers[number], self._writers[number]), "agent connection")
        return Answer(answer.header, ours)

    def _make_socket(self) -> tuple[int, socket.socket, socket.socket]:
        """A stream both ways, this side's end of its socket, and the caller's."""
        number = next(self._stream_numbers)
        self._open_both(number)
        theirs, ours = socket.socketpair()
        theirs.setblocking(False)
        ours.setblocking(False)
        return number, theirs, ours

    def _open_both(self, number: int) -> None:
        reader = self._readers[number] = FarReader(number, lambda _: None, self._send)
        reader.pause()  # until somebody takes what comes
        self._writers[number] = FarWriter(number, self._send, self._transport.drain, None)

    async def _listen(self, header: dict[str, Any], timeout_s: float) -> Answer:
        number = next(self._stream_numbers)
        listener = PrivateListener.make()
        try:
            self._listeners[number] = listener
            answer = await self._ask({**header, "stream": number}, timeout_s)
        except BaseException:
            self._listeners.pop(number, None)
            listener.close()
            raise
        if "errno" in answer.header:
            self._listeners.pop(number, None)
            listener.close()
            return answer
        listener.inside_port = int(answer.header["port"])
        loop = self._loop
        listener.on_close = lambda: loop.is_closed() or loop.call_soon_threadsafe(self._unlisten, number)
        return Answer(answer.header, listener)

    def _unlisten(self, number: int) -> None:
        if self._listeners.pop(number, None) is not None and self.is_open:
            self._send({"id": next(self._numbers), "do": "unlisten", "stream": number})

    async def _accept(self, listener: int, number: int) -> None:
        """A program inside has connected: make a connection to whoever listens here."""
        reader, writer = self._readers[number], self._writers[number]
        ours = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        try:
            await self._loop.sock_connect(ours, self._listeners[listener].address)
        except (OSError, KeyError):  # nobody listens here any more
            reader.close()
            writer.close()
            ours.close()
            return
        await carry(ours, reader, writer)

    def _send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        if "end" in header:
            self._writers.pop(header["end"], None)
        if not self.closed.is_set():
            self._transport.write(frames.encode(header, payload))

    async def _receive(self) -> None:
        """Take frames until the stream ends; then find out why, and say so to all who wait."""
        reader = FrameReader()
        try:
            while data := await self._transport.read():
                self._last_heard = self._loop.time()
                for header, payload in reader.feed(data):
                    self._deliver(header, payload)
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.debug("an agent's stream ended: %s", error)
        self._close(await self._ask_fate())

    async def _ask_fate(self) -> MachineLost:
        lost = MachineLost("the machine ended")
        if self.fate is None or self._is_hung_up:
            return lost
        try:
            async with asyncio.timeout(_FATE_S):
                return await self.fate()
        except Exception as error:
            logger.warning("what became of a machine could not be found out: %s", error)
            return lost

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(_PING_S)
            if self._loop.time() - self._last_heard > _SILENCE_S:
                logger.warning("an agent has been silent for %.0f s", _SILENCE_S)
                self._transport.close()
                return
            self._send({"ping": 0})

    def _deliver(self, header: dict[str, Any], payload: bytes) -> None:
        if not self.ready.done():
            self.ready.set_result(header)
        elif "data" in header:
            reader = self._readers.get(header["data"])
            if reader is not None:
                reader.receive(payload)
        elif "id" in header:
            answer = self._waiting.pop(int(header["id"]), None)
            if answer is not None and not answer.done():
                answer.set_result(Answer(header))
        elif "accepted" in header:
            number = int(header["stream"])
            self._open_both(number)  # now: its bytes may be in the next frame
            self._spawn(self._accept(int(header["accepted"]), number), "agent accept")
        else:
            self._deliver_control(header)

    def _deliver_control(self, header: dict[str, Any]) -> None:
        if "credit" in header and (writer := self._writers.get(header["credit"])) is not None:
            writer.add_credit(int(header["bytes"]))
        elif "end" in header and (reader := self._readers.pop(header["end"], None)) is not None:
            reader.finish()
        elif "drop" in header and (writer := self._writers.pop(header["drop"], None)) is not None:
            writer.drop()

    def _forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            reader = self._readers.pop(number, None)
            if reader is not None:
                reader.finish()
            writer = self._writers.pop(number, None)
            if writer is not None:
                writer.drop()

    def _spawn(self, work: Any, name: str) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def wait_closed(self) -> None:
        """Wait until no task of the line is left."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        with contextlib.suppress(asyncio.CancelledError):
            if tasks:
                await asyncio.wait(tasks)
