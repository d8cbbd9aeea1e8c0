"""Process 1 of a machine: starts a worker for each order of the owner, watches memory, ends trees, collects the dead.

A worker (`operations.py`) is a process of its own that runs one command, or moves one file, with descriptors that the
owner sent along; what they carry never passes through here. Orders: `start`, `kill`, `listen`, `connect`; each is
answered once, `start` when its worker has ended. Files and processes that a command leaves behind live on until the
machine ends, which is when the owner hangs up. Invariant: the answer to a killed order is sent when no process of its
tree is left.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import select
import signal
import socket
import sys
from typing import Any, Final, NamedTuple, NoReturn

from mettle.sandbox.zygote import frames, jail, kernel, kernel_memory, landlock, rootfs, watch
from mettle.sandbox.zygote.overseer import Overseer
from mettle.sandbox.zygote.settings import MachineLimits, Settings

_MAX_DESCRIPTORS: Final = 4
_RESERVED_PROCESSES: Final = 64  # for workers, when the code inside has used up its own
_BACKLOG: Final = 128
_TCP_BUFFER_BYTES: Final = f"4096 65536 {1 << 20}"  # least, first, most: of a connection to the same machine


class Programs(NamedTuple):
    """The filter of a machine, and the one of a machine whose memory a cgroup counts."""

    usual: bytes
    in_cgroup: bytes


class Tools(NamedTuple):
    """What a machine's process 1 is given: where it stands, its limits, its filters."""

    settings: Settings
    limits: MachineLimits
    programs: Programs | None
    template_pid: int


class MachineProcess(Overseer):
    """The loop of process 1."""

    def __init__(
        self, channel: socket.socket, tools: Tools, root: str, sockets: kernel_memory.Sockets | None = None
    ) -> None:
        super().__init__(tools.settings, tools.limits, root, sockets)
        self.channel = channel

    def serve(self) -> None:
        """Obey until the owner goes away."""
        wake = self.wake_on_ended_children()
        poller = select.poll()
        poller.register(self.channel, select.POLLIN)
        poller.register(wake, select.POLLIN)
        while True:
            for descriptor, _ in poller.poll(self.wait_ms()):
                if descriptor == wake:
                    os.read(wake, 4096)
                elif not self._obey():
                    return
            self.collect()
            self.hunt()
            self.watch_memory()

    def _obey(self) -> bool:
        received = frames.receive_with_descriptors(self.channel, _MAX_DESCRIPTORS)
        if received is None:
            return False
        (header, _), descriptors = received
        try:
            self._carry_out(header, descriptors)
        except OSError as error:
            self.answer(header["id"], {"errno": error.errno or errno.EIO})
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _carry_out(self, header: dict[str, Any], descriptors: list[int]) -> None:
        match header["do"]:
            case "start":
                self.start(header, descriptors)
            case "kill":
                self.kill(header)
            case "listen":
                self._listen(header)
            case "connect":
                self._connect(header)
            case unknown:
                raise ValueError(f"no such order: {unknown}")

    def _listen(self, header: dict[str, Any]) -> None:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", header["port"]))
            listener.listen(_BACKLOG)
            self.answer(header["id"], {"port": listener.getsockname()[1]}, listener)

    def _connect(self, header: dict[str, Any]) -> None:
        with socket.socket() as connection:
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):  # the owner waits for it to be connected
                connection.connect(("127.0.0.1", header["port"]))
            self.answer(header["id"], {}, connection)

    def answer(self, order: int, answer: dict[str, Any], passed: socket.socket | None = None) -> None:
        data = frames.encode({"id": order, **answer, "has_descriptor": passed is not None})
        if passed is None:
            self.channel.sendall(data)
        else:
            num_sent = socket.send_fds(self.channel, [data], [passed.fileno()])
            self.channel.sendall(data[num_sent:])


def live(channel: socket.socket, tools: Tools, entrance: int | None) -> NoReturn:
    """The machine's whole life, in the cloned process; nothing that goes wrong returns to the template's code."""
    root = "" if tools.settings.is_jailed else f"{tools.settings.scratch}/{os.getpid()}"
    try:
        has_cgroup = entrance is not None and _enter_cgroup(entrance)
        _live(jail.keep_only(channel)[0], tools, root, has_cgroup=has_cgroup)
    except ConnectionError:
        pass  # the owner hung up
    except BaseException as error:
        print(f"a machine ends: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        if root:
            _clear(root, tools)
        os._exit(0)  # and the kernel ends whatever is left in the machine


def _enter_cgroup(entrance: int) -> bool:
    """Move into the cgroup whose `cgroup.procs` the owner has opened: the right to do so is the owner's."""
    try:
        return os.write(entrance, b"0") == 1
    except OSError:
        return False


def _live(channel: socket.socket, tools: Tools, root: str, *, has_cgroup: bool) -> None:
    own_descriptor = _open_own_descriptor()
    try:
        sockets = _enter(tools, root, has_cgroup=has_cgroup)
    except OSError as error:
        channel.sendall(frames.encode({"failed": str(error)}))
        return
    _say_ready(channel, own_descriptor, has_cgroup=has_cgroup)
    gc.enable()
    MachineProcess(channel, tools, root, sockets).serve()


def _open_own_descriptor() -> int | None:
    """What tells the owner that this process has ended, which is when the last process of the machine has."""
    try:
        return os.pidfd_open(os.getpid())
    except OSError:
        return None  # the host forbids it


def _say_ready(channel: socket.socket, own_descriptor: int | None, *, has_cgroup: bool) -> None:
    header = {"ready": True, "has_cgroup": has_cgroup, "has_descriptor": own_descriptor is not None}
    passed = [] if own_descriptor is None else [own_descriptor]
    socket.send_fds(channel, [frames.encode(header)], passed)
    for descriptor in passed:
        os.close(descriptor)


def _enter(tools: Tools, root: str, *, has_cgroup: bool) -> kernel_memory.Sockets | None:
    """Shut all doors; returns what asks for the sockets of its network, if it has one of its own."""
    limits = tools.limits
    sys.path.clear()  # from here on no module is loaded: the code may put other files where they are looked for
    jail.limit(file_bytes=limits.disk_bytes, open_files=limits.max_open_files)
    if root:
        kernel.adopt_orphans()
        os.makedirs(f"{root}/work", 0o700)
        os.makedirs(f"{root}/tmp", 0o700)
        os.chdir(f"{root}/work")
        return None
    jail.own_user(tools.settings.outside_id)
    kernel.raise_loopback()
    is_small = [kernel.set_control(f"net/ipv4/tcp_{name}", _TCP_BUFFER_BYTES) for name in ("rmem", "wmem")]
    sockets = kernel_memory.Sockets(has_small_buffers=all(is_small))
    rootfs.enter_machine_root(limits.disk_bytes, limits.max_files)
    os.chdir("/work")
    jail.lower(resource.RLIMIT_CPU, limits.cpu_s)
    is_counted = has_cgroup and limits.is_memory_counted
    program = tools.programs and (tools.programs.in_cgroup if is_counted else tools.programs.usual)
    jail.confine(program, limits.max_processes + _RESERVED_PROCESSES, landlock.MACHINE)
    return sockets


def _clear(root: str, tools: Tools) -> None:
    """Without a jail nothing ends by itself: the processes and the directory of this machine."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    while watch.live_descendants(os.getpid()):
        jail.kill_descendants()
    jail.remove_tree(root)
    if os.getppid() != tools.template_pid:
        with contextlib.suppress(OSError):
            os.rmdir(tools.settings.scratch)  # the owner was killed, so that the last machine tidies up
