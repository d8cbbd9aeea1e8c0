"""Landlock: the kernel's own list of what a process tree may do with files, TCP and other processes, as a second line.

It is applied after the root has been changed, by process 1 to itself, and everything that it starts inherits it. What
the mounts and namespaces already refuse it refuses again, by other code of the kernel: a mistake in one of them is not
a way out. Parts: `Grant` (rights below a path), `CELL` and `MACHINE` (the lists), `restrict`.
Invariant: rights that are not listed are refused for every path; a kernel that takes only part of the list is told so
by `why_unsupported`, and never gets a shorter list in silence.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import stat
from typing import Final, NamedTuple

# The same numbers on every architecture.
_NR_CREATE_RULESET: Final = 444
_NR_ADD_RULE: Final = 445
_NR_RESTRICT_SELF: Final = 446
_VERSION: Final = 1
_RULE_PATH_BENEATH: Final = 1
_LOG_SAME_EXEC_OFF: Final = 1  # what untrusted code is refused must not fill the host's audit log
_FIRST_WITH_RENAMES: Final = 2
FIRST_WITH_TRUNCATION: Final = 3
_FIRST_WITH_TCP: Final = 4
_FIRST_WITH_SCOPES: Final = 6
_FIRST_WITH_LOG_FLAGS: Final = 7

EXECUTE: Final = 1 << 0
WRITE_FILE: Final = 1 << 1
READ_FILE: Final = 1 << 2
READ_DIR: Final = 1 << 3
_MAKE_CHAR: Final = 1 << 6
_MAKE_BLOCK: Final = 1 << 11
_TRUNCATE: Final = 1 << 14
_IOCTL_DEV: Final = 1 << 15
# How many rights on files a version knows: each has a bit, from the lowest up.
_NUM_FILE_RIGHTS: Final = {1: 13, 2: 14, 3: 15, 4: 15}
_NUM_FILE_RIGHTS_SINCE_5: Final = 16
_TCP_BIND_AND_CONNECT: Final = 3
_ABSTRACT_SOCKETS_AND_SIGNALS: Final = 3

_READ: Final = EXECUTE | READ_FILE | READ_DIR
_ALL: Final = (1 << _NUM_FILE_RIGHTS_SINCE_5) - 1
_OF_FILES: Final = EXECUTE | WRITE_FILE | READ_FILE | _TRUNCATE | _IOCTL_DEV
_OWN: Final = _ALL & ~(_MAKE_CHAR | _MAKE_BLOCK)
_WORK: Final = sum(1 << bit for bit in (1, 2, 3, 4, 5, 7, 8, 12, 13, 14))  # not execute, sockets, fifos, devices
_READABLE_FILES: Final = (
    *("/etc/ld.so.cache", "/etc/localtime", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"),
)
_DEVICE: Final = READ_FILE | WRITE_FILE | _TRUNCATE | _IOCTL_DEV


class Grant(NamedTuple):
    """Rights on a file, or on everything below a directory."""

    path: str
    rights: int


class Grants(NamedTuple):
    """All that a process tree may do."""

    files: tuple[Grant, ...]
    allows_tcp: bool


CELL: Final = Grants(
    files=(
        Grant("/", _READ),
        *(Grant(path, _OWN) for path in ("/tmp", "/work", "/dev/shm", "/program")),
        *(Grant(f"/dev/{name}", _DEVICE) for name in ("null", "zero", "full")),
    ),
    allows_tcp=False,
)
"""A test reads everything that it can see, and writes only to its own directories and to devices that keep nothing.

(/program is written by process 1 through a mount that only it can reach; for everybody else it is mounted read-only.)
"""

MACHINE: Final = Grants(files=(Grant("/", _OWN),), allows_tcp=True)
"""A machine's root is its own: only making devices is refused. Its TCP ends in a network of its own."""


def alone(readable: tuple[str, ...], work: str) -> Grants:
    """What a test may do where Landlock is all there is: read these, and write, but not execute, in one directory."""
    return Grants(
        files=(
            *(Grant(path, _READ) for path in readable),
            *(Grant(path, READ_FILE) for path in _READABLE_FILES),
            Grant("/dev/null", READ_FILE | WRITE_FILE | _TRUNCATE),
            Grant(work, _WORK),
        ),
        allows_tcp=False,
    )


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("tcp", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("parent", ctypes.c_int32))


_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _call(number: int, what: str, *arguments: int | object | None) -> int:
    passed = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    result = int(_libc.syscall(ctypes.c_long(number), *passed))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


@functools.cache
def version() -> int:
    """The version of Landlock's interface that this kernel has in force; 0 for none."""
    try:
        return _call(_NR_CREATE_RULESET, "landlock_create_ruleset", None, 0, _VERSION)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
            return 0
        raise


def why_unsupported() -> str | None:
    """Why the lists cannot be put in force here, or None if they can."""
    found = version()
    if found == 0:
        return "the kernel has no Landlock, or it is switched off at boot, or a filter above this process denies it"
    if found < _FIRST_WITH_RENAMES:
        return f"version {found} of Landlock forbids every rename between directories, so that it is not used"
    return None


def why_not_alone() -> str | None:
    """Why it cannot be the only thing that keeps code from the host's files, or None if it can."""
    if version() < FIRST_WITH_TRUNCATION:
        return why_unsupported() or f"version {version()} of Landlock lets code empty files that it may not write"
    return None


def describe() -> str:
    """What this kernel's version can hold."""
    found = version()
    parts = ["files"]
    if found >= _FIRST_WITH_TCP:
        parts.append("TCP")
    if found >= _FIRST_WITH_SCOPES:
        parts.append("abstract sockets and signals to the outside")
    return f"version {found}: {', '.join(parts)}"


def restrict(grants: Grants) -> None:
    """Hold this process, and all that it starts, to the list, for good. The caller has renounced new privileges.

    Does nothing where `why_unsupported` says why; OSError where the kernel has Landlock and refuses.
    """
    found = version()
    if why_unsupported() is not None:
        return
    handled = (1 << _NUM_FILE_RIGHTS.get(found, _NUM_FILE_RIGHTS_SINCE_5)) - 1
    has_tcp, has_scopes = found >= _FIRST_WITH_TCP, found >= _FIRST_WITH_SCOPES
    wanted = _Ruleset(
        handled,
        _TCP_BIND_AND_CONNECT if has_tcp and not grants.allows_tcp else 0,
        _ABSTRACT_SOCKETS_AND_SIGNALS if has_scopes else 0,
    )
    num_bytes = 24 if has_scopes else 16 if has_tcp else 8
    ruleset = _call(_NR_CREATE_RULESET, "landlock_create_ruleset", ctypes.byref(wanted), num_bytes, 0)
    try:
        for grant in grants.files:
            _add(ruleset, grant, handled)
        flags = _LOG_SAME_EXEC_OFF if found >= _FIRST_WITH_LOG_FLAGS else 0
        _call(_NR_RESTRICT_SELF, "landlock_restrict_self", ruleset, flags)
    finally:
        os.close(ruleset)


def _add(ruleset: int, grant: Grant, handled: int) -> None:
    try:
        descriptor = os.open(grant.path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rights = grant.rights if stat.S_ISDIR(os.fstat(descriptor).st_mode) else grant.rights & _OF_FILES
        beneath = _PathBeneath(rights & handled, descriptor)
        what = f"landlock_add_rule {grant.path}"
        _call(_NR_ADD_RULE, what, ruleset, _RULE_PATH_BENEATH, ctypes.byref(beneath), 0)
    finally:
        os.close(descriptor)
