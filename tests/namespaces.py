"""Hosts on a network of their own: network namespaces on one bridge, with delays and partitions.

    with network(run=0.0, ann=0.05) as hosts:       # what a frame takes between ann and the bridge, each way, in seconds
        with hosts["ann"].inside():                 # processes and sockets that are made in here are that host's
            worker = subprocess.Popen(...)
        hosts["ann"].cut()
        hosts["ann"].heal()

Parts: `network` (makes all, skips the test where namespaces are not allowed), `Host`, and the keeper, a process that
carries the delayed frames and outlives the tests by as long as it takes to end what still runs on the hosts.
Invariants: namespaces have no names, and nothing is added to the namespace of the tests, so that the kernel removes
everything with the last process in it. A host that is delayed hangs on a pair of taps instead of a veth pair: the
kernel's own delay (netem) is a module that small kernels lack.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NoReturn

CLONE_NEWNET: Final = 0x40000000
TUNSETIFF: Final = 0x400454CA
TAP_WITHOUT_HEADER: Final = 0x0002 | 0x1000
OWN: Final = "/proc/thread-self/ns/net"
MTU: Final = 9000
MAX_WAITING: Final = 4096
"""Frames on a delayed way, each direction; what is more is lost, as on any way."""


@dataclass(frozen=True, slots=True)
class Host:
    """A host of a `network`; `namespace` is a path that `nsenter --net=` takes for as long as the network is there."""

    name: str
    address: str
    namespace: str
    bridge: str
    """The namespace with the bridge and this host's port on it."""
    port: str

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """What this thread starts and opens within the block belongs to this host."""
        with inside(self.namespace):
            yield

    def cut(self) -> None:
        """From here on no frame reaches this host, or leaves it; nobody is told so."""
        command(self.bridge, f"link set {self.port} down")

    def heal(self) -> None:
        """Undo `cut`."""
        command(self.bridge, f"link set {self.port} up")


@contextlib.contextmanager
def network(**delays_s: float) -> Iterator[dict[str, Host]]:
    """Hosts that reach each other and nothing else, by name, each with its delay to the bridge in seconds, each way.

    At the end, and when this process is killed, every process on them is killed. Skips the test, with the reason, where
    namespaces are not allowed.
    """
    with contextlib.ExitStack() as stack:
        try:
            paths = [stack.enter_context(namespace()) for _ in range(len(delays_s) + 1)]
            command(paths[0], "link add bridge type bridge forward_delay 0", f"link set bridge mtu {MTU} up")
        except (OSError, subprocess.CalledProcessError) as error:
            skip(f"network namespaces are not allowed here: {getattr(error, 'stderr', None) or error}")
        hosts = {
            name: Host(name, f"10.77.0.{number}", paths[number], paths[0], f"port{number}")
            for number, name in enumerate(delays_s, start=1)
        }
        ways = [(host.namespace, host.bridge, host.port, delays_s[host.name]) for host in hosts.values()]
        stack.enter_context(keeper([identity(path) for path in paths], [way for way in ways if way[-1] > 0.0]))
        for host in hosts.values():
            connect(host, is_delayed=delays_s[host.name] > 0.0)
        yield hosts


def skip(reason: str) -> NoReturn:
    import pytest  # the keeper, which is this file too, starts without it

    pytest.skip(reason)


def connect(host: Host, *, is_delayed: bool) -> None:
    """Give a host its port on the bridge and its address. The taps of one that is delayed are there already."""
    if not is_delayed:
        command(host.bridge, f"link add {host.port} type veth peer name eth0 netns {host.namespace}")
    command(host.bridge, f"link set {host.port} mtu {MTU} master bridge up")
    command(host.namespace, "link set lo up", f"address add {host.address}/24 dev eth0", f"link set eth0 mtu {MTU} up")


@contextlib.contextmanager
def namespace() -> Iterator[str]:
    """The path of a new namespace, which is there until the block and the last process in it have ended."""
    before = os.open(OWN, os.O_RDONLY)
    try:
        call("unshare", CLONE_NEWNET)
        made = os.open(OWN, os.O_RDONLY)
        call("setns", before, CLONE_NEWNET)
    finally:
        os.close(before)
    try:
        yield f"/proc/{os.getpid()}/fd/{made}"
    finally:
        os.close(made)


@contextlib.contextmanager
def inside(path: str) -> Iterator[None]:
    """This thread in another namespace."""
    before = os.open(OWN, os.O_RDONLY)
    there = os.open(path, os.O_RDONLY)
    try:
        call("setns", there, CLONE_NEWNET)
        yield
    finally:
        call("setns", before, CLONE_NEWNET)
        os.close(there)
        os.close(before)


def call(name: str, *arguments: int) -> None:
    """A call of the C library. Raises: OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def command(path: str, *lines: str) -> None:
    """Lines of the program `ip`, in a namespace. Raises: OSError, CalledProcessError."""
    with inside(path):
        told = "\n".join(lines)
        subprocess.run(
            [shutil.which("ip", path="/usr/sbin:/sbin:/usr/bin:/bin") or "ip", "-batch", "-"],
            input=told, text=True, check=True, capture_output=True, timeout=60.0,
        )  # fmt: skip


def identity(path: str) -> int:
    """By which a namespace is known, whatever path leads to it."""
    return os.stat(path).st_ino


def end_processes(namespaces: list[int], limit_s: float = 20.0) -> None:
    """Kill whatever runs in these namespaces, except this process, and what that starts meanwhile."""
    deadline = time.monotonic() + limit_s
    while (found := processes_in(namespaces)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def processes_in(namespaces: list[int]) -> list[int]:
    """Who runs there, without this process; a process that has ended and was not waited for is not among them."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                if identity(f"/proc/{entry}/ns/net") in namespaces:
                    found.append(int(entry))
    return found


@contextlib.contextmanager
def keeper(namespaces: list[int], ways: list[tuple[str, str, str, float]]) -> Iterator[None]:
    """A process that carries frames over delayed ways and, should this one be killed, ends all in these namespaces."""
    process = subprocess.Popen(
        [sys.executable, "-IS", __file__, json.dumps([os.getpid(), namespaces, ways])], text=True,
        stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "ready\n":
            skip("a host cannot be delayed here: the kernel makes no taps")
        yield
    finally:
        end_processes(namespaces)
        process.kill()
        process.wait()
        process.stdout.close()


class Way:
    """Two taps; what comes in at one leaves by the other after `delay_s`."""

    def __init__(self, host: str, bridge: str, port: str, delay_s: float) -> None:
        self.taps = (tap(host, "eth0"), tap(bridge, port))
        self.delay_s = delay_s


class Wire:
    """The frames that are under way on all ways."""

    def __init__(self, ways: list[Way]) -> None:
        self._other = {one: (other, way.delay_s) for way in ways for one, other in (way.taps, way.taps[::-1])}
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._count = 0

    def carry_until(self, ended: int) -> None:
        """Until the descriptor `ended` can be read."""
        poll = select.poll()
        for descriptor in (ended, *self._other):
            poll.register(descriptor, select.POLLIN)
        while True:
            due_s = self._waiting[0][0] - time.monotonic() if self._waiting else 60.0
            ready = [descriptor for descriptor, _ in poll.poll(max(0.0, due_s) * 1000.0)]
            if ended in ready:
                return
            for descriptor in ready:
                self._take(descriptor)
            self._give()

    def _take(self, tap_in: int) -> None:
        with contextlib.suppress(OSError):  # the link is down
            frame = os.read(tap_in, MTU + 64)
            out, delay_s = self._other[tap_in]
            if len(self._waiting) < MAX_WAITING * len(self._other):
                self._count += 1
                heapq.heappush(self._waiting, (time.monotonic() + delay_s, self._count, out, frame))

    def _give(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, out, frame = heapq.heappop(self._waiting)
            with contextlib.suppress(OSError):  # the link is down
                os.write(out, frame)


def tap(path: str, name: str) -> int:
    """A new network device in a namespace, whose frames are read from and written to the descriptor."""
    with inside(path):
        made = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(made, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP_WITHOUT_HEADER))
    return made


def keep(parent: int, namespaces: list[int], ways: list[tuple[str, str, str, float]]) -> None:
    """The keeper's whole life."""
    ended = os.pidfd_open(parent)
    wire = Wire([Way(*way) for way in ways])
    print("ready", flush=True)
    wire.carry_until(ended)
    end_processes(namespaces)


if __name__ == "__main__":
    keep(*json.loads(sys.argv[1]))
