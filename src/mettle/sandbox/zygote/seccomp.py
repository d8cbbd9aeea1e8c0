"""The filter on system calls: an allow-list for x86_64, compiled to classic BPF as a binary search over the numbers.

A call is decided in about eight comparisons. Other architectures are refused: their tables have not been tested.
Invariant: a program for another architecture's calls is killed, x32 calls do not exist, and whatever is not listed
in `syscalls.py` fails.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence
from typing import Final

from mettle.sandbox.zygote import syscalls

ALLOW: Final = 0x7FFF0000
KILL_PROCESS: Final = 0x80000000
_HOLD_UP: Final = 0x7FC00000
_ERRNO: Final = 0x00050000

_LOAD_WORD: Final = 0x20
_JUMP: Final = 0x05
_JUMP_IF_EQUAL: Final = 0x15
_JUMP_IF_AT_LEAST: Final = 0x35
_JUMP_IF_ANY_BIT: Final = 0x45
_RETURN: Final = 0x06

_AUDIT_ARCH_X86_64: Final = 0xC000003E
_OFFSET_NUMBER: Final = 0
_OFFSET_ARCH: Final = 4
_OFFSET_ARGUMENTS: Final = 16

_AF_UNIX: Final = 1
_INTERNET_FAMILIES: Final = (2, 10)
_PROTOCOLS: Final = (0, 1, 6, 17, 58)  # the default, ICMP, TCP, UDP, ICMPv6: no other that a kernel could load
_NEW_NAMESPACE_FLAGS: Final = 0x7E020000
_MAP_SHARED: Final = 0x1
_MAP_ANONYMOUS: Final = 0x20
_MAP_HUGETLB: Final = 0x40000
# DUPFD, GETFD, SETFD, GETFL, SETFL, locks of processes and of files, owner and signal, GETLEASE, DUPFD_QUERY,
# DUPFD_CLOEXEC, GETPIPE_SZ, seals, write-life hints. Not SETPIPE_SZ, SETLEASE and NOTIFY: larger pipes and directory
# watches are memory of the kernel's that no limit counts, and a lease holds up the worker that opens the file.
_FCNTLS: Final = (
    *(1, 3, 2, 4, 1030, 0, 5, 6, 7, 36, 37, 38, 8, 9, 10, 11, 15, 16),
    *range(1033, 1041),
    1025,
    1027,
    1032,
)
# Without locks, which others may wait for, and without signals to whom one chooses.
_FCNTLS_OF_ONE: Final = tuple(command for command in _FCNTLS if command not in (5, 6, 7, 36, 37, 38, 8, 10, 15))
_O_TMPFILE: Final = 0x400000
_SOL_SOCKET: Final = 1
_SOL_TCP: Final = 6
# Programs for the kernel (ATTACH_FILTER, _BPF, _REUSEPORT_CBPF, _REUSEPORT_EBPF), and TCP_ULP, which loads modules.
_REFUSED_SOCKET_OPTIONS: Final = (26, 50, 51, 52)
_REFUSED_TCP_OPTIONS: Final = (31,)
# SNDBUF, RCVBUF. The kernel gives less than is asked for when it likes; here it gives nothing more and says it did, so
# that what sockets hold goes by their number, and grows no faster than process 1 looks.
_SIZING_SOCKET_OPTIONS: Final = (7, 8)
_UNCHANGED: Final = 0xFFFFFFFF  # -1: leave this one of the ids as it is
_CLONE_THREAD: Final = 0x00010000
_IOCTLS: Final = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS TIOCGWINSZ FIONREAD FIONBIO FIO(N)CLEX
# Terminals: the TCSET, TCSBRK, TCXONC and TCFLSH families, controlling terminal, process group, size, pseudo-terminals.
_TERMINAL_IOCTLS: Final = (
    *(0x5402, 0x5403, 0x5404, 0x5409, 0x540A, 0x540B, 0x540E, 0x540F, 0x5410, 0x5411, 0x5414, 0x5422, 0x5429),
    *(0x5425, 0x5441, 0x5452, 0x80045430, 0x80045439, 0x40045431, 0x802C542A, 0x402C542B, 0x402C542C, 0x402C542D),
)
# PDEATHSIG, GET and SET_DUMPABLE, SET_NAME, GET_NAME, GET_SECCOMP, CAPBSET_READ, SET and GET_NO_NEW_PRIVS, SET_VMA
_PRCTLS: Final = (1, 3, 4, 15, 16, 21, 23, 38, 39, 0x53564D41)
_MACHINE_PRCTLS: Final = (29, 30, 36, 37, 41, 42)  # timer slack, child subreaper, huge pages

Instruction = tuple[int, int, int, int]
Block = list[Instruction]


def why_unsupported() -> str | None:
    """Why this machine cannot have the filter, or None if it can."""
    machine = os.uname().machine
    if machine == "x86_64":
        return None
    return f"the system call table is for x86_64 and has not been tested on {machine}"


def refusal(number: int) -> int:
    """The return value that makes a call fail with this errno."""
    return _ERRNO | number


def build_filter(
    *, is_machine: bool = False, is_memory_counted: bool = False, has_watches: bool = True, only_pid: int | None = None
) -> bytes:
    """The whole program.

    `only_pid`: there are no namespaces, and what this process does may reach nothing but itself: it can start threads
    but no process, and has no sockets. `is_machine`: with sockets and terminals, for processes in a network and a root
    of their own; and with watches of files, where `has_watches` says that they are limited for this user namespace.
    `is_memory_counted`: a cgroup counts all memory, so that mappings which outlive their processes are allowed.
    """
    blocks = _blocks() | (_machine_blocks() if is_machine else {})
    if has_watches and is_machine:
        blocks |= {number: _finish(ALLOW) for number in syscalls.WATCHES.values()}
    if only_pid is not None:
        blocks |= _alone_blocks(only_pid)
    if is_memory_counted:
        blocks[syscalls.CHECKED["mmap"]] = _refuse_bits(3, _MAP_HUGETLB, errno.ENOMEM)
        blocks[syscalls.CHECKED["setsockopt"]] = _allow_option(())
    return _assemble(blocks)


def build_counted() -> bytes:
    """A second filter beside the first: calls that start a thread or make a file are held up for process 1 to count."""
    blocks: dict[int, Block] = {number: _finish(_HOLD_UP) for number in syscalls.MAKING.values()}
    blocks[syscalls.CHECKED["clone"]] = _finish(_HOLD_UP)
    for number, flags in syscalls.OPENS.values():
        blocks[number] = [
            _load_argument(flags),
            (_JUMP_IF_ANY_BIT, 0, 1, os.O_CREAT | _O_TMPFILE),
            *_finish(_HOLD_UP),
            *_finish(ALLOW),
        ]
    return _assemble(blocks, default=ALLOW, beyond=ALLOW)


def build_user_filter(others: Sequence[int], first: int, size: int) -> bytes:
    """For a process that may change its user: only to the `size` users from `first`, and to `others`."""
    allowed = (*others, _UNCHANGED)
    blocks: dict[int, Block] = {syscalls.SETGROUPS: _finish(refusal(errno.EPERM))}
    for number, num_arguments in syscalls.CHANGES_OF_USER.values():
        blocks[number] = [
            instruction for index in range(num_arguments) for instruction in _require_user(index, allowed, first, size)
        ] + _finish(ALLOW)
    return _assemble(blocks, default=ALLOW, beyond=ALLOW)


def _require_user(index: int, allowed: Sequence[int], first: int, size: int) -> Block:
    """Go on where the argument is one of these, or one of a range; refuse it where not."""
    checks: Block = [(_JUMP_IF_EQUAL, len(allowed) - place + 2, 0, user) for place, user in enumerate(allowed)]
    return [
        _load_argument(index),
        *checks,
        (_JUMP_IF_AT_LEAST, 0, 1, first),
        (_JUMP_IF_AT_LEAST, 0, 1, first + size),
        *_finish(refusal(errno.EPERM)),
    ]


def _assemble(
    blocks: dict[int, Block], *, default: int = _ERRNO | errno.EPERM, beyond: int = _ERRNO | errno.ENOSYS
) -> bytes:
    """One program of what to do for each number, for the others that are known, and for those beyond."""
    bounds = [0]
    for number in sorted(blocks):
        bounds += [number, number + 1]
    ranges: list[tuple[int, Block]] = []
    for start in sorted(set(bounds) | {syscalls.LAST_KNOWN + 1}):
        block = blocks.get(start, _finish(default if start <= syscalls.LAST_KNOWN else beyond))
        if not ranges or ranges[-1][1] != block:
            ranges.append((start, block))
    prologue: Block = [
        (_LOAD_WORD, 0, 0, _OFFSET_ARCH),
        (_JUMP_IF_EQUAL, 1, 0, _AUDIT_ARCH_X86_64),
        (_RETURN, 0, 0, KILL_PROCESS),
        (_LOAD_WORD, 0, 0, _OFFSET_NUMBER),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in prologue + _search(ranges))


def _blocks() -> dict[int, Block]:
    """What to do for each listed call."""
    blocks = {number: _finish(ALLOW) for number in syscalls.PLAIN.values()}
    blocks |= {number: _finish(refusal(errno.ENOSYS)) for number in syscalls.PRETEND_MISSING.values()}
    blocks |= {number: _finish(ALLOW) for number in syscalls.FORKS.values()}
    checked = syscalls.CHECKED
    blocks[checked["mmap"]] = _allow_counted_mapping()
    blocks[checked["fcntl"]] = _allow_argument(1, _FCNTLS, errno.EPERM)
    blocks[checked["setsockopt"]] = _allow_option(_SIZING_SOCKET_OPTIONS)
    blocks[checked["ioctl"]] = _allow_argument(1, _IOCTLS, errno.ENOTTY)
    blocks[checked["socketpair"]] = _allow_argument(0, (_AF_UNIX,), errno.EPERM)
    blocks[checked["prctl"]] = _allow_argument(0, _PRCTLS, errno.EPERM)
    # Process 0 means the caller: no other process's limits, priority or processors can be touched.
    blocks[checked["prlimit64"]] = _allow_argument(0, (0,), errno.EPERM)
    blocks[checked["sched_setaffinity"]] = _allow_argument(0, (0,), errno.EPERM)
    blocks[checked["setpriority"]] = _allow_own_priority()
    blocks[checked["clone"]] = _allow_clone(allow_fork=True)
    return blocks


def _alone_blocks(pid: int) -> dict[int, Block]:
    """What else is refused where no namespace stands between this process and others of the same user."""
    refused = (syscalls.BEYOND_LANDLOCK, syscalls.SOCKET_PAIRS, syscalls.FORKS, syscalls.WATCHES)
    blocks = {number: _finish(refusal(errno.EPERM)) for numbers in refused for number in numbers.values()}
    blocks[syscalls.OPEN_BY_STRUCTURE] = _finish(refusal(errno.ENOSYS))
    blocks |= {number: _allow_argument(0, (pid,), errno.EPERM) for number in syscalls.SIGNALS.values()}
    checked = syscalls.CHECKED
    for name in ("socketpair", "setsockopt"):
        blocks[checked[name]] = _finish(refusal(errno.EPERM))
    blocks[checked["clone"]] = _allow_clone(allow_fork=False)
    blocks[checked["fcntl"]] = _allow_argument(1, _FCNTLS_OF_ONE, errno.EPERM)
    # Not SET_DUMPABLE: process 1 looks at its descriptors.
    blocks[checked["prctl"]] = _allow_argument(0, tuple(option for option in _PRCTLS if option != 4), errno.EPERM)
    return blocks


def _machine_blocks() -> dict[int, Block]:
    """What a machine may do beyond what a test may."""
    blocks = {number: _finish(ALLOW) for number in syscalls.MACHINES.values()}
    checked = syscalls.CHECKED
    blocks[syscalls.SOCKET] = _allow_socket()
    blocks[checked["ioctl"]] = _allow_argument(1, _IOCTLS + _TERMINAL_IOCTLS, errno.ENOTTY)
    blocks[checked["prctl"]] = _allow_argument(0, _PRCTLS + _MACHINE_PRCTLS, errno.EPERM)
    return blocks


def _allow_socket() -> Block:
    """socket(): of the Unix family, or of the internet's with a protocol that every kernel has built in."""
    head: Block = [_load_argument(0), (_JUMP_IF_EQUAL, 0, 1, _AF_UNIX), *_finish(ALLOW)]
    internet: Block = [
        (_JUMP_IF_EQUAL, 2, 0, _INTERNET_FAMILIES[0]),
        (_JUMP_IF_EQUAL, 1, 0, _INTERNET_FAMILIES[1]),
        *_finish(refusal(errno.EPERM)),
    ]
    return head + internet + _allow_argument(2, _PROTOCOLS, errno.EPROTONOSUPPORT)


def _finish(action: int) -> Block:
    return [(_RETURN, 0, 0, action)]


def _load_argument(index: int) -> Instruction:
    return (_LOAD_WORD, 0, 0, _OFFSET_ARGUMENTS + 8 * index)  # the low half: each of these arguments is an int


def _allow_argument(index: int, values: tuple[int, ...], otherwise: int) -> Block:
    block = [_load_argument(index)]
    for position, value in enumerate(values):
        block.append((_JUMP_IF_EQUAL, len(values) - position, 0, value))
    return block + _finish(refusal(otherwise)) + _finish(ALLOW)


def _refuse_bits(index: int, bits: int, otherwise: int) -> Block:
    return [_load_argument(index), (_JUMP_IF_ANY_BIT, 0, 1, bits), *_finish(refusal(otherwise)), *_finish(ALLOW)]


def _allow_counted_mapping() -> Block:
    """mmap(): no huge pages of the host's, and no shared memory without a file.

    Such memory lives as long as a page of it is mapped anywhere, and counts for nobody while it is not touched: only a
    cgroup limits it. Shared memory with a file is counted by the size of its file system.
    """
    return [
        _load_argument(3),
        (_JUMP_IF_ANY_BIT, 2, 0, _MAP_HUGETLB),
        (_JUMP_IF_ANY_BIT, 0, 2, _MAP_ANONYMOUS),
        (_JUMP_IF_ANY_BIT, 0, 1, _MAP_SHARED),
        *_finish(refusal(errno.ENOMEM)),
        *_finish(ALLOW),
    ]


def _allow_option(ignored: tuple[int, ...]) -> Block:
    """setsockopt(): `ignored` options of sockets succeed and do nothing; refused are those that hand the kernel a
    program, and those of TCP that make it load a module.
    """
    refuse = _refuse_argument(2, _REFUSED_SOCKET_OPTIONS, errno.EPERM)
    ignore: Block = []
    for option in ignored:
        ignore += [(_JUMP_IF_EQUAL, 0, 1, option), *_finish(refusal(0))]
    of_socket: Block = [_load_argument(2), *ignore, *refuse] if ignored else refuse
    return [
        _load_argument(1),
        (_JUMP_IF_EQUAL, 0, len(of_socket), _SOL_SOCKET),
        *of_socket,
        (_JUMP_IF_EQUAL, 1, 0, _SOL_TCP),
        *_finish(ALLOW),
        *_refuse_argument(2, _REFUSED_TCP_OPTIONS, errno.EPERM),
    ]


def _refuse_argument(index: int, values: tuple[int, ...], otherwise: int) -> Block:
    block = [_load_argument(index)]
    for position, value in enumerate(values):
        block.append((_JUMP_IF_EQUAL, len(values) - position, 0, value))
    return block + _finish(ALLOW) + _finish(refusal(otherwise))


def _allow_own_priority() -> Block:
    """setpriority(PRIO_PROCESS, 0, ...): the caller and nobody else."""
    return [
        _load_argument(0),
        (_JUMP_IF_EQUAL, 0, 2, 0),
        _load_argument(1),
        (_JUMP_IF_EQUAL, 1, 0, 0),
        *_finish(refusal(errno.EPERM)),
        *_finish(ALLOW),
    ]


def _allow_clone(*, allow_fork: bool) -> Block:
    block: Block = [_load_argument(0), (_JUMP_IF_ANY_BIT, 0, 1, _NEW_NAMESPACE_FLAGS), *_finish(refusal(errno.EPERM))]
    if not allow_fork:
        block += [(_JUMP_IF_ANY_BIT, 1, 0, _CLONE_THREAD), *_finish(refusal(errno.EPERM))]
    return block + _finish(ALLOW)


def _search(ranges: list[tuple[int, Block]]) -> Block:
    """Binary search: `ranges` are (first number, what to do) in rising order, and the number is in the register."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    lower, upper = _search(ranges[:middle]), _search(ranges[middle:])
    start = ranges[middle][0]
    if len(lower) <= 255:
        return [(_JUMP_IF_AT_LEAST, len(lower), 0, start), *lower, *upper]
    return [(_JUMP_IF_AT_LEAST, 0, 1, start), (_JUMP, 0, 0, len(lower)), *lower, *upper]
