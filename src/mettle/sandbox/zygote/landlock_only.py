"""A test where the host has no namespaces for anyone: one process, held by Landlock, seccomp and limits alone.

Parts: `set_up` (the template), `confine_process_1`, `restrict` and `finish` (the child), `link_packages`. It runs as
the user of the template, beside that user's other processes. So it may start no process (nothing survives it, and the
limit of its address space is a limit of all its memory), has no socket, signals itself alone, and process 1 counts its
threads and files (`counter.py`). What stays open to it is in the documentation: it can ask whether a path exists.
Invariant: only a pool whose config names this grade makes such a template.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import struct
from typing import Any, Final

from mettle.sandbox.zygote import counter, jail, kernel, landlock, rootfs, seccomp
from mettle.sandbox.zygote.settings import Settings

MAX_FILES: Final = 256
_SOME_PID: Final = 0x51AB1DE5  # no process has it
_readable: list[str] = []


def set_up(settings: Settings) -> dict[str, Any]:
    """Become an ordinary user and see whether all that is needed is there; what the template says in its hello."""
    layers: dict[str, str] = {"landlock": landlock.why_not_alone() or "", "user": "", "seccomp": ""}
    try:
        if os.geteuid() == 0:
            os.chown(settings.scratch, settings.host_uid, settings.host_uid)
            jail.become_ordinary(settings.host_uid)
        _require_interpreter(settings)
    except OSError as error:
        layers["user"] = f"{error.strerror} [{errno.errorcode.get(error.errno or 0, '?')}]"
    layers["seccomp"] = seccomp.why_unsupported() or _try_filters()
    _readable[:] = rootfs.readable_directories(settings.host_paths)
    _readable.extend((*settings.packages, f"{settings.scratch}/packages"))
    return {"is_ready": not any(layers.values()), "layers": layers}


def _require_interpreter(settings: Settings) -> None:
    library = os.path.realpath(os.__file__)
    if not os.access(library, os.R_OK):
        reason = f"user {settings.host_uid} cannot read this interpreter's {library}: use one that all users can read"
        raise PermissionError(errno.EACCES, f"{reason}, or start the pool as an ordinary user")


def build_filter() -> bytes:
    """The filter of a process whose number is not known yet."""
    return seccomp.build_filter(only_pid=_SOME_PID)


def _try_filters() -> str:
    """Load both filters in a child that ends at once; "" or why the kernel did not take them."""
    pid = os.fork()
    if pid == 0:
        try:
            kernel.renounce_new_privileges()
            os.close(counter.hold_up())
            kernel.install_filter(_own_filter(build_filter()))
        except OSError as error:
            os._exit((error.errno or errno.EIO) & 0xFF)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return "" if code == 0 else f"the kernel refused the filters [{errno.errorcode.get(code, str(code))}]"


def link_packages(settings: Settings) -> str:
    """A directory of links to the chosen packages: what lies beside them is not in it, and cannot be read."""
    directory = f"{settings.scratch}/packages"
    os.mkdir(directory, 0o755)
    for path in settings.packages:
        os.symlink(path, f"{directory}/{os.path.basename(path)}")
    return directory


def confine_process_1() -> None:
    """Of a cell: it has no privilege to give up but those of its user."""
    for kind in (resource.RLIMIT_MSGQUEUE, resource.RLIMIT_RTPRIO, resource.RLIMIT_NICE):
        jail.lower(kind, 0)
    kernel.set_dumpable(False)
    kernel.drop_capabilities(with_bounds=False)
    kernel.renounce_new_privileges()
    kernel.die_with_parent()


def restrict(job: socket.socket, work: str) -> None:
    """The child's doors but the last: files, and the calls that are counted. It has made nothing yet."""
    landlock.restrict(landlock.alone(tuple(_readable), work))
    counter.hand_over(job)


def finish(program: bytes) -> None:
    """The last door, after which it can hear of nothing any more: the filter, with its own number in it."""
    kernel.install_filter(_own_filter(program))


def _own_filter(program: bytes) -> bytes:
    return program.replace(struct.pack("=I", _SOME_PID), struct.pack("=I", os.getpid()))
