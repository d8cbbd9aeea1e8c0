"""What process 1 of a cell and of a machine do alike: take over new namespaces, and give up what is not needed.

Invariant: after `confine` the process holds no capability, cannot be looked into, and is behind the filter; everything
that it starts inherits that.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import socket
from collections.abc import Sequence
from typing import Final

from mettle.sandbox.zygote import kernel, landlock, rootfs, watch

# Of this user namespace, by its own counters: what a filter forbids is also impossible. A cell that could make no user
# namespace has no capability with which to make any other. Inotify is counted per user of the host as well, so that
# without limits here one sandbox would leave none for the others.
_KERNEL_LIMITS: Final = {
    "user/max_user_namespaces": "0",
    "user/max_inotify_instances": "32",
    "user/max_inotify_watches": "16384",
}
_MAX_PENDING_SIGNALS: Final = 1024

SANDBOX_UID: Final = rootfs.SANDBOX_UID

NOTHING_FD: Final = 3  # like the template's standard input, at its end from the start
CHANNEL_FD: Final = 5


def keep_only(channel: socket.socket, others: Sequence[int] = ()) -> tuple[socket.socket, list[int]]:
    """Close everything but the standard streams, the owner's socket and these others, under the numbers returned.

    Descriptors up to 4 stay occupied.
    """
    # Copied past all of them first, so that none is overwritten before it has moved.
    found = [channel.detach(), *others]
    free = max(*found, CHANNEL_FD + len(found)) + 1
    found = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, free) for descriptor in found]
    kept = [os.dup2(descriptor, CHANNEL_FD + place, inheritable=False) for place, descriptor in enumerate(found)]
    os.closerange(CHANNEL_FD + len(kept), 1 << 16)
    for low in range(NOTHING_FD, CHANNEL_FD):
        os.dup2(0, low, inheritable=False)
    return socket.socket(fileno=CHANNEL_FD), kept[1:]


def forget_signals() -> None:
    """The default for each signal that Python handles; for process 1 the default is to ignore."""
    for number in (signal.SIGINT, signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def become_ordinary(uid: int) -> None:
    """From root to a user who is nobody else, for good."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    kernel.set_dumpable(True)  # changing the user made /proc/self root's


def own_user(outside: int) -> None:
    """Become the user of the new user namespace, and the first to go when the host runs out of memory."""
    map_user(SANDBOX_UID, outside)
    kernel.write_control("/proc/self/oom_score_adj", "500")
    for name, text in _KERNEL_LIMITS.items():
        kernel.set_control(name, text)


def map_unmapped(uid: int, gid: int) -> None:
    """As `map_user` does for the ordinary user that made this user namespace, as far as it has not been done."""
    for kind, outside in (("uid", uid), ("gid", gid)):
        with open(f"/proc/self/{kind}_map", encoding="ascii") as file:
            if file.read().strip():
                continue
        if kind == "gid":
            with open("/proc/self/setgroups", "w", encoding="ascii") as file:
                file.write("deny")
        with open(f"/proc/self/{kind}_map", "w", encoding="ascii") as file:
            file.write(f"{SANDBOX_UID} {outside} 1")


def map_user(inside: int, outside: int) -> None:
    """Give the one user of this user namespace a name inside it."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside} {outside} 1"),
        ("gid_map", f"{inside} {outside} 1"),
    ):
        kernel.write_control(f"/proc/self/{name}", text)


def limit(*, file_bytes: int, open_files: int) -> None:
    """The limits of every process inside, with or without a jail."""
    lower(resource.RLIMIT_FSIZE, file_bytes)
    lower(resource.RLIMIT_NOFILE, open_files)
    lower(resource.RLIMIT_MEMLOCK, 1 << 16)
    lower(resource.RLIMIT_CORE, 1)  # 1 and not 0: a core_pattern that is a pipe ignores 0


def confine(program: bytes | None, num_processes: int, grants: landlock.Grants = landlock.CELL) -> None:
    """Give up everything that process 1 does not need; `num_processes` counts all of its user namespace."""
    lower(resource.RLIMIT_NPROC, num_processes)
    lower(resource.RLIMIT_MSGQUEUE, 0)
    lower(resource.RLIMIT_SIGPENDING, _MAX_PENDING_SIGNALS)
    lower(resource.RLIMIT_RTPRIO, 0)
    lower(resource.RLIMIT_NICE, 0)
    kernel.set_dumpable(False)
    kernel.drop_capabilities()
    kernel.renounce_new_privileges()
    kernel.die_with_parent()
    landlock.restrict(grants)
    if program is not None:
        kernel.install_filter(program)


def lower(kind: int, value: int) -> None:
    """Lower a limit for good, never above what it is."""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_descendants() -> None:
    """End whatever is below this process, where no pid namespace does it."""
    for pid in watch.descendants(os.getpid()):
        kill(pid)


def remove_tree(path: str) -> None:
    """Delete a directory, of whatever depth and closed however, by programs of their own."""
    for command in (("chmod", "-R", "u+rwX", "--", path), ("rm", "-rf", "--one-file-system", "--", path)):
        os.waitpid(os.posix_spawnp(command[0], command, {"PATH": "/usr/bin:/bin"}), 0)
