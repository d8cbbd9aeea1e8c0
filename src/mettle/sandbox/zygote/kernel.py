"""System calls that Python has no function for, by way of ctypes.

Invariant: a call that fails raises `OSError` whose text names the call, so that a report can say which door was shut.
The library is loaded with the interpreter lock held, because `clone` returns twice.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from typing import Final

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWCGROUP: Final = 0x02000000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000
SIGCHLD: Final = 17

MS_RDONLY: Final = 1
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_NOATIME: Final = 1024
MS_BIND: Final = 4096
MS_REC: Final = 16384
MS_PRIVATE: Final = 1 << 18
MNT_DETACH: Final = 2

CAP_KILL: Final = 5
CAP_SETGID: Final = 6
CAP_SETUID: Final = 7
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_PR_SET_KEEPCAPS: Final = 8
_PR_SET_SECCOMP: Final = 22
_PR_CAPBSET_DROP: Final = 24
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4
_MAX_CAPABILITIES: Final = 64
_SECCOMP_MODE_FILTER: Final = 2
_AT_FDCWD: Final = -100
_AT_RECURSIVE: Final = 0x8000
_NR_MOUNT_SETATTR: Final = 442  # the same on every architecture
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 0x1
_IFF_RUNNING: Final = 0x40
# Numbers of the calls that the C library does not wrap. An architecture that is not listed is refused.
_NUMBERS: Final = {
    "x86_64": {"clone": 56, "pivot_root": 155, "perf_event_open": 298},
    "aarch64": {"clone": 220, "pivot_root": 41, "perf_event_open": 241},
}
# Of `struct perf_event_attr` in its first version: type, size, config, period, kinds of samples, format, flags.
_EVENT: Final = struct.Struct("=IIQQQQQ16x")
_SOFTWARE, _TASK_CLOCK = 1, 1
# Inherited by every child, and without the details of the kernel, which ordinary users may not have. Time in the kernel
# counts all the same: the clock of a task makes no difference.
_INHERITED, _WITHOUT_KERNEL, _WITHOUT_HYPERVISOR = 1 << 1, 1 << 5, 1 << 6
_CLOSED_ON_EXEC: Final = 8

_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class SockFprog(ctypes.Structure):
    """A classic BPF program as the kernel takes it."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _syscall(number: int, what: str, *arguments: int | ctypes.Array[ctypes.c_char] | None) -> int:
    passed = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *passed), what)


def _number(name: str) -> int:
    machine = os.uname().machine
    if machine not in _NUMBERS:
        raise OSError(38, f"{name}: no system call numbers for {machine}")
    return _NUMBERS[machine][name]


def open_task_clock() -> int:
    """A descriptor that reads as eight bytes: nanoseconds that this process, and every descendant from now on, has
    used of the processors. OSError where the host keeps such counters from this user (kernel.perf_event_paranoid)."""
    flags = _INHERITED | _WITHOUT_KERNEL | _WITHOUT_HYPERVISOR
    event = _EVENT.pack(_SOFTWARE, _EVENT.size, _TASK_CLOCK, 0, 0, 0, flags)
    described = ctypes.create_string_buffer(event, _EVENT.size)
    return _syscall(_number("perf_event_open"), "perf_event_open", described, 0, -1, -1, _CLOSED_ON_EXEC)


def unshare(flags: int) -> None:
    """Leave the namespaces named by `flags` for new ones."""
    _checked(_libc.unshare(flags), f"unshare({flags:#x})")


def clone_process(flags: int) -> int:
    """`os.fork` into new namespaces; returns 0 in the child, which is process 1 if `flags` has CLONE_NEWPID."""
    number = _number("clone")
    ctypes.pythonapi.PyOS_BeforeFork()
    result: int = _libc.syscall(ctypes.c_long(number), ctypes.c_long(flags | SIGCHLD), None, None, None, None)
    error = ctypes.get_errno()
    if result == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if result < 0:
        raise OSError(error, f"clone({flags:#x}): {os.strerror(error)}")
    return result


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Mount a file system, or bind a directory."""
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    result = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _checked(result, f"mount {kind or source} on {target}")


def lock_mounts(path: str, *, is_device: bool = False) -> None:
    """Make everything mounted at and below `path` read-only and unable to lend privilege."""
    attributes = MS_RDONLY | MS_NOSUID | (0 if is_device else MS_NODEV)
    wanted = _MountAttr(attributes, 0, 0, 0)
    result = _libc.syscall(
        ctypes.c_long(_NR_MOUNT_SETATTR),
        ctypes.c_long(_AT_FDCWD),
        os.fsencode(path),
        ctypes.c_long(_AT_RECURSIVE),
        ctypes.byref(wanted),
        ctypes.c_long(ctypes.sizeof(wanted)),
    )
    _checked(result, f"mount_setattr {path} read-only")


def pivot_into(path: str) -> None:
    """Make `path` the root directory and let go of the old one."""
    os.chdir(path)
    here = ctypes.create_string_buffer(b".")
    _syscall(_number("pivot_root"), "pivot_root", here, here)
    _checked(_libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def write_control(path: str, text: str) -> None:
    """Write a file of the kernel's in one call, without a file object, whose making costs a fork some thirty pages."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def set_control(name: str, text: str) -> bool:
    """Write a control of one of this process's namespaces; False where the kernel has none or forbids it.

    Each is a second line behind the filter or a limit.
    """
    try:
        write_control(f"/proc/sys/{name}", text)
    except OSError:
        return False
    return True


def set_hostname(name: str) -> None:
    """Name the machine that this UTS namespace shows."""
    encoded = name.encode()
    _checked(_libc.sethostname(encoded, len(encoded)), "sethostname")


def drop_capabilities(*, with_bounds: bool = True) -> None:
    """Empty all five capability sets: bounding and ambient first, while there is still the right to.

    An ordinary user has no right to lower the bounds, which bound nothing once new privileges are renounced.
    """
    for capability in range(_MAX_CAPABILITIES if with_bounds else 0):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            if ctypes.get_errno() == errno.EINVAL:  # past the last that this kernel has
                break
            _checked(-1, f"prctl(PR_CAPBSET_DROP, {capability})")
    _checked(_libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "prctl(PR_CAP_AMBIENT)")
    header = _CapHeader(0x20080522, 0)
    nothing = (ctypes.c_uint32 * 6)()
    _checked(_libc.capset(ctypes.byref(header), nothing), "capset")


def keep_capabilities() -> None:
    """Let the permitted capabilities outlast the next change from root to another user."""
    _checked(_libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0), "prctl(PR_SET_KEEPCAPS)")


def hold_capabilities(wanted: Sequence[int]) -> None:
    """Have these capabilities in force, of those that are permitted, and no others."""
    mask = sum(1 << capability for capability in wanted)
    header = _CapHeader(0x20080522, 0)
    words = (ctypes.c_uint32 * 6)(mask, mask, 0, 0, 0, 0)  # effective, permitted, inheritable; then their upper halves
    _checked(_libc.capset(ctypes.byref(header), words), "capset")


def set_dumpable(is_dumpable: bool) -> None:
    """Whether processes of the same user may look into this one through /proc and ptrace."""
    _checked(_libc.prctl(_PR_SET_DUMPABLE, int(is_dumpable), 0, 0, 0), "prctl(PR_SET_DUMPABLE)")


def die_with_parent() -> None:
    """Be killed when the thread that started this process ends."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    _checked(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl(PR_SET_CHILD_SUBREAPER)")


def renounce_new_privileges() -> None:
    """No later exec can gain privilege; inherited, and cannot be undone."""
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")


def install_filter(program: bytes) -> None:
    """Put a seccomp filter (classic BPF, eight bytes an instruction) in force for this process and its children."""
    described = SockFprog(len(program) // 8, program)
    result = _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(described), 0, 0)
    _checked(result, "prctl(PR_SET_SECCOMP)")


def raise_loopback() -> None:
    """Bring up the one interface of a new network namespace: 127.0.0.1 and ::1."""
    name_and_flags = struct.pack("16sh14x", b"lo", _IFF_UP | _IFF_RUNNING)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
        fcntl.ioctl(channel, _SIOCSIFFLAGS, name_and_flags)
