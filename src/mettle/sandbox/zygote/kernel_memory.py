"""Memory of a test or a machine that none of its processes map: page tables, the kernel's notes of mappings, and what
sockets and pipes hold.

The kernel counts it for nobody where there is no memory cgroup, so process 1 asks for it. Page tables are in each
process's status. The sockets of a machine's network are asked for their buffers over netlink, which also names those
that are on their way from one process to another. Pipes, and sockets where the network is shared with other cells, are
counted by descriptors, at what each may hold at most: the filter keeps pipes at their first size.
Invariant: what cannot be looked at is counted as full.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Final

from mettle.sandbox.zygote import procfs
from mettle.sandbox.zygote.mappings import Mappings, status_number

PIPE_BYTES: Final = 1 << 16
SOCKET_BYTES: Final = 1 << 18  # net.core.wmem_default, and what one message may go beyond it
_UNSUSPICIOUS: Final = 96  # descriptors of all processes together below which none are looked at
_UNSUSPICIOUS_PAGES: Final = 1 << 18  # of address space (1 GB): their page tables are 2 MB at most
_UNSUSPICIOUS_SOCKETS: Final = 32  # 8 MB at most
_UNSUSPICIOUS_CONNECTIONS: Final = 8  # of TCP: 16 MB at most, as a machine's network is set up
_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_REQUEST_DUMP: Final = 0x301
_ERROR, _DONE = 2, 3
_HEADER: Final = struct.Struct("=IHHII")
_ATTRIBUTE: Final = struct.Struct("=HH")
_UNIX: Final = 1
_INTERNET: Final = (2, 10)
_TCP_AND_UDP: Final = (6, 17)
_UNIX_MESSAGE_BYTES: Final = 16
_INTERNET_MESSAGE_BYTES: Final = 72
_UNIX_MEMORY: Final = 5  # UNIX_DIAG_MEMINFO
_INTERNET_MEMORY: Final = 7  # INET_DIAG_SKMEMINFO
_SHOW_UNIX_MEMORY: Final = 0x20
_NUM_MEMORY_WORDS: Final = 8
_DIAG_TIMEOUT_S: Final = 0.5
_mappings: Final = Mappings()  # of the one cell or machine that this process is process 1 of


class Sockets:
    """The sockets of this network namespace. Made before the filter, which would refuse it.

    `has_small_buffers`: its connections were kept to what a machine's may have, so that a few need no look.
    """

    def __init__(self, *, has_small_buffers: bool = True) -> None:
        self._num_unsuspicious = _UNSUSPICIOUS_CONNECTIONS if has_small_buffers else 0
        self._channel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG)
        self._channel.settimeout(_DIAG_TIMEOUT_S)
        self._is_complete = True

    def num_bytes(self) -> int:
        """What their buffers hold, all together; nothing is looked at while there are few."""
        num_sockets, num_connections = _num_sockets()
        if num_sockets <= _UNSUSPICIOUS_SOCKETS and num_connections <= self._num_unsuspicious:
            return 0
        total = self._ask(_UNIX, struct.pack("=BBHIIIII", _UNIX, 0, 0, 0xFFFFFFFF, 0, _SHOW_UNIX_MEMORY, 0, 0))
        for family in _INTERNET if num_connections else ():
            for protocol in _TCP_AND_UDP:
                extension = 1 << (_INTERNET_MEMORY - 1)
                total += self._ask(family, struct.pack("=BBBBI48x", family, protocol, extension, 0, 0xFFFFFFFF))
        return total if self._is_complete else max(total, num_sockets * SOCKET_BYTES)

    def _ask(self, family: int, request: bytes) -> int:
        num_bytes = _HEADER.size + len(request)
        self._channel.send(_HEADER.pack(num_bytes, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 0, 0) + request)
        total = 0
        while True:
            try:
                data = self._channel.recv(1 << 17)
            except TimeoutError:
                self._is_complete = False
                return total
            for kind, body in _messages(data):
                if kind == _DONE:
                    return total
                if kind == _ERROR:  # a kernel that was built without this kind of question
                    self._is_complete = False
                    return total
                total += _memory_of(family, body)


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position + _HEADER.size <= len(data):
        length, kind, *_ = _HEADER.unpack_from(data, position)
        yield kind, data[position + _HEADER.size : position + length]
        position += max(_HEADER.size, (length + 3) & ~3)


def _memory_of(family: int, body: bytes) -> int:
    position = _UNIX_MESSAGE_BYTES if family == _UNIX else _INTERNET_MESSAGE_BYTES
    wanted = _UNIX_MEMORY if family == _UNIX else _INTERNET_MEMORY
    while position + _ATTRIBUTE.size <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, position)
        if kind == wanted:
            words = struct.unpack_from(f"={_NUM_MEMORY_WORDS}I", body, position + _ATTRIBUTE.size)
            received, _, sent, _, kept, queued, options, backlog = words
            return int(received + max(sent, queued) + kept + options + backlog)
        position += max(_ATTRIBUTE.size, (length + 3) & ~3)
    return 0


def _num_sockets() -> tuple[int, int]:
    """Of this network: all, and those of TCP and UDP, which are slow to ask for."""
    num_sockets = num_connections = 0
    for name in ("sockstat", "sockstat6"):
        try:
            lines = [line.split() for line in procfs.read("self", f"net/{name}").splitlines()]
        except OSError:
            continue
        for words in lines:
            if words[0] == b"sockets:":
                num_sockets = int(words[2])
            elif words[0] in (b"TCP:", b"UDP:", b"TCP6:", b"UDP6:"):
                num_connections += int(words[2])
    return num_sockets, num_connections


def table_bytes(pids: Sequence[int]) -> dict[int, int]:
    """What the kernel keeps of each process's address space: page tables, if they can be large, and mappings."""
    pages = {pid: _address_space_pages(pid) for pid in pids}
    in_mappings = _mappings.num_bytes(pages)
    return {pid: _page_table_bytes(pid, pages[pid]) + in_mappings[pid] for pid in pids}


def _address_space_pages(pid: int) -> int:
    try:
        return int(procfs.read(pid, "statm", 64).split()[0])
    except (OSError, IndexError):
        return 0


def _page_table_bytes(pid: int, num_pages: int) -> int:
    """A program fills them by reading where it wrote nothing."""
    return status_number(pid, b"VmPTE:") * 1024 if num_pages >= _UNSUSPICIOUS_PAGES else 0


def pipe_bytes(pids: Sequence[int]) -> int:
    """What the pipes that these processes have open can hold at most."""
    return sum(PIPE_BYTES for kind in _open_streams(pids) if kind == "pipe")


def stream_bytes(pids: Sequence[int]) -> int:
    """What the pipes and sockets that these processes have open can hold at most."""
    return sum(PIPE_BYTES if kind == "pipe" else SOCKET_BYTES for kind in _open_streams(pids))


def parts(num_bytes: int, pids: Sequence[int]) -> dict[int, int]:
    """A number of bytes divided among processes as they have descriptors open."""
    counts = {pid: _num_descriptors(pid) for pid in pids}
    total = max(1, sum(counts.values()))
    return {pid: num_bytes * count // total for pid, count in counts.items()}


def _open_streams(pids: Sequence[int]) -> Iterator[str]:
    """Each open pipe and socket once; nothing while there are few descriptors."""
    counts = {pid: _num_descriptors(pid) for pid in pids}
    if sum(counts.values()) <= _UNSUSPICIOUS:
        return
    seen: set[str] = set()
    for pid, count in counts.items():
        try:
            names = procfs.descriptors(pid)
        except PermissionError:  # it has closed itself to inspection
            yield from ["socket"] * count
            continue
        except OSError:
            continue
        for name in names:
            try:
                target = procfs.target(pid, name)
            except OSError:
                continue
            if target.startswith(("pipe:", "socket:")) and target not in seen:
                seen.add(target)
                yield target.partition(":")[0]


def _num_descriptors(pid: int) -> int:
    """Since Linux 6.2 the size of the directory says it, also to those who may not list it."""
    try:
        return procfs.num_descriptors(pid) or len(procfs.descriptors(pid))
    except PermissionError:
        return _most_descriptors(pid)
    except OSError:
        return 0


def _most_descriptors(pid: int) -> int:
    """What a process that nobody can look into may have open, by the table that the kernel keeps for it."""
    return status_number(pid, b"FDSize:")
