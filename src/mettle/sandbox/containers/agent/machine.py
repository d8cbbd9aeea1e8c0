"""Process 1 of a container: obeys its owner over a wire, and oversees what the orders start.

Orders, each answered once: `begin` (limits and environment), `start` (answered when its hand has ended), `kill`,
`listen`, `unlisten`, `connect`, `judge` (a cell; answered when it has ended). Besides: frames of streams, `ping`, and
`bye`, after which, as after the wire's end or a silence longer than the lease, this process ends and the container with
it.
Invariant: an answer to `start` goes out after all output that the command has left in its pipes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import signal
import socket
import time
from dataclasses import dataclass
from typing import Any, Final

from mettle.sandbox.containers.agent import cells
from mettle.sandbox.containers.agent.streams import Streams
from mettle.sandbox.containers.agent.wire import Wire
from mettle.sandbox.zygote import jail
from mettle.sandbox.zygote.overseer import OperationWorker, Overseer
from mettle.sandbox.zygote.settings import CellLimits, MachineLimits, Settings

_BACKLOG: Final = 128
_CONNECT_S: Final = 10.0
_GOODBYE_S: Final = 1.0
_STREAM_KINDS: Final = frozenset({"data", "credit", "end", "drop", "discard"})
_ALL_USERS: Final = ["0", "0", "4294967295"]
_UNLIMITED: Final = MachineLimits(1 << 40, 1 << 40, 1 << 20, 1 << 20, 1 << 10, 1 << 20, {})


@dataclass
class _Connecting:
    """A connection that the kernel has not yet made or refused."""

    order: int
    stream: int
    connection: socket.socket
    deadline: float


class Agent(Overseer):
    """The loop of process 1."""

    def __init__(self, wire: Wire, settings: Settings, image_environment: dict[str, str], lease_s: float) -> None:
        super().__init__(settings, _UNLIMITED, "")
        self._wire = wire
        self._streams = Streams(wire)
        self._environment = image_environment
        self._lease_s = lease_s
        self._last_heard = time.monotonic()
        self._streams_of: dict[int, list[int]] = {}
        self._listeners: dict[int, socket.socket] = {}
        self._connecting: dict[int, _Connecting] = {}
        self._num_accepted = 0
        self._poller = select.poll()
        self._polled: dict[int, int] = {}

    def serve(self) -> None:
        """Obey until the owner goes away."""
        wake = self.wake_on_ended_children()
        self._wire.send({"ready": True, **_describe()})
        while self._attend(wake):
            self.collect()
            self.hunt()
            self.watch_memory()
            self._give_up_connecting()
            if not self._wire.flush() or time.monotonic() - self._last_heard > self._lease_s:
                return
        self._say_goodbye()

    def answer(self, order: int, answer: dict[str, Any]) -> None:
        numbers = self._streams_of.pop(order, None)
        if numbers is not None:
            self._streams.flush(numbers)
        self._wire.send({"id": order, **answer})

    def _attend(self, wake: int) -> bool:
        """Wait for something, and see to it; False when the owner has gone."""
        self._register({wake: select.POLLIN, **self._interest()})
        ready = {descriptor for descriptor, _ in self._poller.poll(self._wait_ms())}
        if wake in ready:
            os.read(wake, 4096)
        if self._wire.read_fd in ready:
            received = self._wire.receive()
            if received is None:
                return False
            self._last_heard = time.monotonic()
            for header, payload in received:
                if "bye" in header:
                    return False
                self._take(header, payload)
        self._streams.attend(ready)
        for number, listener in list(self._listeners.items()):
            if listener.fileno() in ready:
                self._accept(number, listener)
        for descriptor in ready & self._connecting.keys():
            self._connected(descriptor)
        return True

    def _interest(self) -> dict[int, int]:
        wanted = self._streams.interest()
        wanted[self._wire.read_fd] = select.POLLIN
        if self._wire.has_more_to_send:
            wanted[self._wire.write_fd] = wanted.get(self._wire.write_fd, 0) | select.POLLOUT
        wanted |= {listener.fileno(): select.POLLIN for listener in self._listeners.values()}
        return wanted | dict.fromkeys(self._connecting, select.POLLOUT)

    def _register(self, wanted: dict[int, int]) -> None:
        for descriptor in self._polled.keys() - wanted.keys():
            self._poller.unregister(descriptor)
        for descriptor, events in wanted.items():
            if self._polled.get(descriptor) != events:
                self._poller.register(descriptor, events)
        self._polled = wanted

    def _wait_ms(self) -> float:
        waits = [1000.0 * max(0.0, self._last_heard + self._lease_s - time.monotonic()) + 1]
        patience = self.wait_ms()
        if patience is not None:
            waits.append(patience)
        if self._connecting:
            waits.append(100.0)
        return min(waits)

    def _take(self, header: dict[str, Any], payload: bytes) -> None:
        if "ping" in header:
            self._wire.send({"pong": header["ping"]})
        elif _STREAM_KINDS & header.keys():
            self._streams.take(header, payload)
        else:
            try:
                self._carry_out(header)
            except OSError as error:
                self.answer(header["id"], {"errno": error.errno or errno.EIO})

    def _carry_out(self, header: dict[str, Any]) -> None:
        match header["do"]:
            case "begin":
                self._begin(header)
            case "start":
                self._start(header)
            case "kill":
                self.kill(header)
            case "listen":
                self._listen(header)
            case "unlisten":
                self._unlisten(header)
            case "connect":
                self._connect(header)
            case "judge":
                self._judge(header)
            case unknown:
                raise OSError(errno.ENOSYS, f"no such order: {unknown}")

    def _begin(self, header: dict[str, Any]) -> None:
        """Take the limits of this machine. The image's variables come first, the owner's over them."""
        limits = MachineLimits(**header["limits"])
        environment = {**self._environment, **limits.environment}
        max_processes = limits.max_processes if _has_own_users() else 0
        self.limits = limits._replace(environment=environment, max_processes=max_processes)
        jail.limit(file_bytes=limits.disk_bytes, open_files=limits.max_open_files)
        jail.lower(resource.RLIMIT_CPU, limits.cpu_s)
        self.answer(header["id"], {})

    def _start(self, header: dict[str, Any]) -> None:
        """A hand with one end of a pipe for each stream that the order names; the other ends are the streams'."""
        theirs: list[int] = []
        numbers: list[int] = header["ends"]
        try:
            for number, stream in zip(numbers, header["streams"], strict=True):
                reader, writer = os.pipe2(os.O_CLOEXEC)
                if stream == 0:
                    theirs.append(reader)
                    self._streams.add_sink(number, writer)
                else:
                    theirs.append(writer)
                    self._streams.add_source(number, reader)
            self._streams_of[header["id"]] = numbers
            self.start(header, theirs)
        except OSError:
            for number in numbers:
                self._streams.close(number)
            self._streams_of.pop(header["id"], None)
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)

    def _listen(self, header: dict[str, Any]) -> None:
        listener = socket.socket()
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", header["port"]))
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        self._listeners[header["stream"]] = listener
        self.answer(header["id"], {"port": listener.getsockname()[1]})

    def _unlisten(self, header: dict[str, Any]) -> None:
        listener = self._listeners.pop(header["stream"], None)
        if listener is not None:
            listener.close()
        self.answer(header["id"], {})

    def _accept(self, number: int, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            self._num_accepted += 1
            self._streams.add_socket(-self._num_accepted, connection)
            self._wire.send({"accepted": number, "stream": -self._num_accepted})

    def _connect(self, header: dict[str, Any]) -> None:
        connection = socket.socket()
        connection.setblocking(False)
        try:
            connection.connect(("127.0.0.1", header["port"]))
        except BlockingIOError:
            pass
        except OSError:
            connection.close()
            raise
        deadline = time.monotonic() + float(header.get("timeout_s", _CONNECT_S))
        self._connecting[connection.fileno()] = _Connecting(header["id"], header["stream"], connection, deadline)

    def _connected(self, descriptor: int) -> None:
        made = self._connecting.pop(descriptor)
        number = made.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            made.connection.close()
            self.answer(made.order, {"errno": number})
            return
        self._streams.add_socket(made.stream, made.connection)
        self.answer(made.order, {})

    def _give_up_connecting(self) -> None:
        now = time.monotonic()
        for descriptor in [fd for fd, made in self._connecting.items() if now > made.deadline]:
            made = self._connecting.pop(descriptor)
            made.connection.close()
            self.answer(made.order, {"errno": errno.ETIMEDOUT})

    def _judge(self, header: dict[str, Any]) -> None:
        """A cell that speaks the judge's protocol over the stream that the order names."""
        settings = Settings.from_json(header["settings"])
        limits = CellLimits(**header["cell"]) if header["cell"] else None
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            own = limits.of(settings) if limits else settings
            cells.live(theirs, own, has_files=limits is not None and limits.has_program)
        theirs.close()
        self.workers[pid] = OperationWorker(header["id"], pid)
        self._streams.add_socket(header["stream"], ours)

    def _say_goodbye(self) -> None:
        """Send what is still queued, if it goes quickly."""
        deadline = time.monotonic() + _GOODBYE_S
        while self._wire.has_more_to_send and self._wire.flush() and time.monotonic() < deadline:
            select.select([], [self._wire.write_fd], [], 0.05)


def _has_own_users() -> bool:
    """Whether the users in here are nobody else's, so that their processes can be counted."""
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            return file.read().split() != _ALL_USERS
    except OSError:
        return False


def _describe() -> dict[str, Any]:
    """What the owner is told first."""
    kernel = os.uname()
    return {"kernel": kernel.release, "machine": kernel.machine, "uid": os.getuid(), "is_first": os.getpid() == 1}
