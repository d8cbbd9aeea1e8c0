"""Process 1 of a machine: starts a hand for each order of the owner, watches memory, ends trees, collects the dead.

A hand (`hands.py`) is a process of its own that runs one command, or moves one file, with descriptors that the owner
sent along; what they carry never passes through here. Orders: `start`, `kill`, `listen`, `connect`; each is answered
once, `start` when its hand has ended. Files and processes that a command leaves behind live on until the machine ends,
which is when the owner hangs up.
Invariant: the answer to a killed order is sent when no process of its tree is left.
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
import time
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, NoReturn

from mettle.sandbox.zygote import frames, hands, jail, kernel, landlock, rootfs, unmapped, watch
from mettle.sandbox.zygote.settings import MachineLimits, Settings

_MAX_DESCRIPTORS: Final = 4
_RESERVED_PROCESSES: Final = 64  # for hands, when the code inside has used up its own
_URGENT_LOOK_S: Final = 0.004  # while memory grows fast or is nearly used up
_BUSY_LOOK_S: Final = 0.02
_IDLE_LOOK_S: Final = 0.25
_HUNT_S: Final = 0.002
_MAX_HUNT_S: Final = 1.0
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


@dataclass
class Hand:
    """One order that is being carried out."""

    order: int
    pid: int
    has_run_out_of_memory: bool = False
    hunted_since: float | None = None


@dataclass
class Machine:
    """The loop of process 1."""

    channel: socket.socket
    tools: Tools
    root: str
    sockets: unmapped.Sockets | None  # of its own network
    hands: dict[int, Hand] = field(default_factory=dict)
    next_look: float = 0.0
    last_total: int = 0

    def serve(self) -> None:
        """Obey until the owner goes away."""
        wake = self._wake_on_ended_children()
        poller = select.poll()
        poller.register(self.channel, select.POLLIN)
        poller.register(wake, select.POLLIN)
        while True:
            for descriptor, _ in poller.poll(self._patience_ms()):
                if descriptor == wake:
                    os.read(wake, 4096)
                elif not self._obey():
                    return
            self._collect()
            self._hunt()
            self._watch_memory()

    def _wake_on_ended_children(self) -> int:
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        return reader

    def _patience_ms(self) -> float | None:
        if any(hand.hunted_since is not None for hand in self.hands.values()):
            return _HUNT_S * 1000
        if self.next_look == 0.0:
            return None
        return max(0.0, self.next_look - time.monotonic()) * 1000 + 1

    def _obey(self) -> bool:
        received = frames.receive_with_descriptors(self.channel, _MAX_DESCRIPTORS)
        if received is None:
            return False
        (header, _), descriptors = received
        try:
            self._carry_out(header, descriptors)
        except OSError as error:
            self._answer(header["id"], {"errno": error.errno or errno.EIO})
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _carry_out(self, header: dict[str, Any], descriptors: list[int]) -> None:
        match header["do"]:
            case "start":
                self._start(header, descriptors)
            case "kill":
                self._kill(header)
            case "listen":
                self._listen(header)
            case "connect":
                self._connect(header)
            case unknown:
                raise ValueError(f"no such order: {unknown}")

    def _start(self, header: dict[str, Any], descriptors: list[int]) -> None:
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            hands.live(header, descriptors, self.tools.settings, self.tools.limits, self.root)
        self.hands[pid] = Hand(header["id"], pid)
        self._look_soon()

    def _look_soon(self) -> None:
        self.next_look = time.monotonic() + _BUSY_LOOK_S

    def _kill(self, header: dict[str, Any]) -> None:
        """Begin to end a tree. Its hand is stopped first: while it is there, no descendant finds another parent."""
        for hand in self.hands.values():
            if hand.order == header["target"] and hand.hunted_since is None:
                jail.kill(hand.pid, signal.SIGSTOP)
                hand.hunted_since = time.monotonic()
        self._answer(header["id"], {})

    def _hunt(self) -> None:
        """One pass over the trees that must end. What forks faster than it is found falls with all the rest."""
        for hand in [hand for hand in self.hands.values() if hand.hunted_since is not None]:
            prey = watch.live_descendants(hand.pid)
            if not prey:
                jail.kill(hand.pid)
                continue
            if time.monotonic() - (hand.hunted_since or 0.0) > _MAX_HUNT_S and os.getpid() == 1:
                jail.kill(-1)
            for pid in prey:
                jail.kill(pid)

    def _collect(self) -> None:
        """Take in every process that has ended, also those that lost their parent, and report the hands."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pid = 0
            if pid == 0:
                return
            hand = self.hands.pop(pid, None)
            if hand is not None:
                code = os.waitstatus_to_exitcode(status)
                code = 128 - code if code < 0 else code
                self._answer(hand.order, {"status": code, "is_out_of_memory": hand.has_run_out_of_memory})

    def _watch_memory(self) -> None:
        """End the largest processes while all together hold more than their share."""
        if self.next_look == 0.0 or time.monotonic() < self.next_look:
            return
        pids = self._processes()
        page_tables = {pid: unmapped.page_table_bytes(pid) for pid in pids}
        sizes = {pid: watch.process_resident_bytes(pid) + page_tables[pid] for pid in pids}
        limit = self.tools.limits.memory_bytes
        in_buffers = self._buffer_bytes(pids) if pids else 0
        total = sum(sizes.values()) + in_buffers
        is_urgent = 4 * total > 3 * limit or total - self.last_total > limit // 16
        self.last_total = total
        if total > limit:
            sizes = {pid: watch.proportional_bytes(pid) + page_tables[pid] for pid in pids}
            self._relieve(sizes, in_buffers, sum(sizes.values()) + in_buffers - limit)
        pause = _URGENT_LOOK_S if is_urgent else _BUSY_LOOK_S if self.hands else _IDLE_LOOK_S
        self.next_look = time.monotonic() + pause if pids or self.hands else 0.0

    def _processes(self) -> list[int]:
        """Every process of the machine except process 1 and its hands."""
        known = watch.cell_processes() if self.tools.settings.is_jailed else watch.descendants(os.getpid())
        return [pid for pid in known if pid not in self.hands]

    def _buffer_bytes(self, pids: list[int]) -> int:
        """What sockets and pipes hold: what they belong to may be in any process, or between two."""
        if self.sockets is None:
            return unmapped.stream_bytes(pids)
        return self.sockets.num_bytes() + unmapped.pipe_bytes(pids)

    def _relieve(self, sizes: dict[int, int], in_buffers: int, excess_bytes: int) -> None:
        """End the largest. Nobody knows whose the buffers are: each process has a part of them by its descriptors."""
        parts = unmapped.parts(in_buffers, list(sizes))
        sizes = {pid: num_bytes + parts[pid] for pid, num_bytes in sizes.items()}
        for pid, num_bytes in sorted(sizes.items(), key=lambda entry: -entry[1]):
            if excess_bytes <= 0:
                return
            for above in watch.ancestors(pid):
                if above in self.hands:
                    self.hands[above].has_run_out_of_memory = True
            jail.kill(pid)
            excess_bytes -= num_bytes

    def _listen(self, header: dict[str, Any]) -> None:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", header["port"]))
            listener.listen(_BACKLOG)
            self._answer(header["id"], {"port": listener.getsockname()[1]}, listener)

    def _connect(self, header: dict[str, Any]) -> None:
        with socket.socket() as connection:
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):  # the owner waits for it to be connected
                connection.connect(("127.0.0.1", header["port"]))
            self._answer(header["id"], {}, connection)

    def _answer(self, order: int, answer: dict[str, Any], passed: socket.socket | None = None) -> None:
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
        _live(jail.keep_only(channel), tools, root, has_cgroup=has_cgroup)
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
    try:
        sockets = _enter(tools, root, has_cgroup=has_cgroup)
    except OSError as error:
        channel.sendall(frames.encode({"failed": str(error)}))
        return
    channel.sendall(frames.encode({"ready": True, "has_cgroup": has_cgroup}))
    gc.enable()
    Machine(channel, tools, root, sockets).serve()


def _enter(tools: Tools, root: str, *, has_cgroup: bool) -> unmapped.Sockets | None:
    """Shut all doors; returns what asks for the sockets of its network, if it has one of its own."""
    limits = tools.limits
    jail.forget_signals()
    sys.path.clear()  # from here on no module is loaded: the code may put other files where they are looked for
    jail.limit(file_bytes=limits.disk_bytes, open_files=limits.max_open_files)
    if root:
        kernel.adopt_orphans()
        os.makedirs(f"{root}/work", 0o700)
        os.makedirs(f"{root}/tmp", 0o700)
        os.chdir(f"{root}/work")
        return None
    jail.own_user()
    kernel.raise_loopback()
    is_small = [kernel.set_control(f"net/ipv4/tcp_{name}", _TCP_BUFFER_BYTES) for name in ("rmem", "wmem")]
    sockets = unmapped.Sockets(has_small_buffers=all(is_small))
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
