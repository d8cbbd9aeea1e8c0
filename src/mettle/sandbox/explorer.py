"""Code that is run inside a cell to find out what holds: it tries the doors and prints what it found as JSON.

It is sent as the source of a test, and is never imported by the rest of the package.
Invariant: each attempt is harmless where it succeeds, because it also runs on hosts where nothing holds.
"""

import _thread
import ctypes
import errno
import fcntl
import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
# In a machine (where this file runs as a script with that argument) /work and the root around it are the code's own,
# and the data segment is limited rather than the address space, which some interpreters reserve by the terabyte.
IS_MACHINE = sys.argv[1:] == ["machine"]
# Whether Landlock is all there is: the input says so.
IS_ALONE = not IS_MACHINE and sys.stdin.readline().strip() == "alone"
LIMITS = ("CPU", "DATA" if IS_MACHINE else "AS", "NPROC", "FSIZE", "NOFILE", "CORE", "MEMLOCK")
READ_ONLY = ("/usr", "/etc", "/dev", "/proc", os.path.dirname(os.__file__), *(() if IS_MACHINE else ("/",)))
# x86_64 numbers and arguments of calls that only a filter stops.
CALLS: dict[str, tuple[int, ...]] = {
    "unshare": (272, 0x10000000),
    "socket(AF_VSOCK)": (41, 40, 1, 0),
    "socket(AF_NETLINK)": (41, 16, 3, 0),
    "memfd_create": (319, 0, 0),
    "bpf": (321, 0, 0, 0),
    "keyctl": (250, 0, -3, 0),
    "ptrace": (101, 0, 0, 0, 0),
    "io_uring_setup": (425, 0, 0),
    "userfaultfd": (323, 1),
    "shmget": (29, 0, 4096, 0o1600),
    "perf_event_open": (298, 0, 0, -1, -1, 0),
    "process_vm_readv": (310, 0, 0, 0, 0, 0, 0),
    "kexec_load": (246, 0, 0, 0, 0),
    "fsopen": (430, 0, 0),
    "personality": (135, 0xFFFFFFFF),
}
# What tells about the host or steers it; in a private /proc it is not there, or empty.
HOST_FILES = ("kallsyms", "keys", "kmsg", "kcore", "timer_list", "cmdline", "sys/kernel/core_pattern", "interrupts")
PR_CAPBSET_READ = 23
PR_GET_NO_NEW_PRIVS = 39
NUM_CAPABILITIES = 64
libc = ctypes.CDLL(None, use_errno=True)


def link_text(path: str) -> str | None:
    """Where a link points, or None if it cannot be read."""
    try:
        return os.readlink(path)
    except OSError:
        return None


def can_write(directory: str) -> bool:
    """Whether a file can be made in a directory."""
    path = os.path.join(directory, ".mettle-explorer")
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600))
        os.unlink(path)
    except OSError:
        return False
    return True


def succeeds(attempt: Callable[[], None]) -> bool:
    """Whether a call returns rather than raises."""
    try:
        attempt()
    except OSError:
        return False
    return True


def is_answered(arguments: tuple[int, ...]) -> bool:
    """Whether the kernel looked at a system call at all."""
    ctypes.set_errno(0)
    result = libc.syscall(*(ctypes.c_long(argument) for argument in arguments))
    return result >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS)


def can_read(path: str) -> bool:
    """Whether anything comes out of a file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return bool(os.read(descriptor, 1))
    except OSError:
        return False
    finally:
        os.close(descriptor)


def can_make_whiteout() -> bool:
    """Whether a device can be made that needs no privilege: nothing but Landlock refuses it."""
    path = "/tmp/.mettle-explorer"
    if not succeeds(lambda: os.mknod(path, 0o20600, 0)):
        return False
    os.unlink(path)
    return True


def listing(directory: str) -> list[str]:
    """The names in a directory, or none if it cannot be read."""
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def host_user() -> int | None:
    """Who this is outside, as far as /proc tells."""
    try:
        with open("/proc/self/uid_map") as file:
            return int(file.read().split()[1])
    except (OSError, IndexError):
        return None


def can_fork() -> bool:
    """Whether it can start a process."""
    try:
        pid = os.fork()
    except OSError:
        return False
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return True


def most_threads(limit: int) -> int:
    """How many threads it can have at once, up to a limit."""
    gate = _thread.allocate_lock()
    with gate:
        for number in range(limit):
            try:
                _thread.start_new_thread(wait, (gate,))
            except RuntimeError:
                return number
    return limit


def wait(gate: Any) -> None:
    """Until the gate is open."""
    with gate:
        pass


def changes_metadata() -> list[str]:
    """What of a file of its own can be changed that Landlock does not look at."""
    path = ".mettle-explorer"
    if not succeeds(lambda: os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))):
        return []
    attempts: dict[str, Callable[[], None]] = {
        "chmod": lambda: os.chmod(path, 0o640),
        "chown": lambda: os.chown(path, os.getuid(), os.getgid()),
        "utime": lambda: os.utime(path, (0, 0)),
        "xattr": lambda: os.setxattr(path, "user.mettle", b""),
        "flock": lambda: fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_SH),
    }
    changed = [name for name, attempt in attempts.items() if succeeds(attempt)]
    os.unlink(path)
    return changed


def privileges() -> list[str]:
    """What only root can do, and this code can."""
    attempts: dict[str, Callable[[], None]] = {
        "become uid 0": lambda: os.setuid(0),
        "chroot": lambda: os.chroot("/tmp"),
        "change an owner": lambda: os.chown("/work", 0, 0),
    }
    held = [name for name, attempt in attempts.items() if succeeds(attempt)]
    if any(libc.prctl(PR_CAPBSET_READ, number, 0, 0, 0) == 1 for number in range(NUM_CAPABILITIES)):
        held.append("regain a capability")
    return [*held, "mount"] if libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None) == 0 else held


def what_one_process_can() -> dict[str, object]:
    """Asked only where a test has no namespaces."""
    import socket  # it takes longer than all the rest

    return {
        "reads": [path for path in ("/proc/self/status", "/etc/passwd", "/etc/hostname") if can_read(path)],
        "lists": [path for path in ("/", "/etc", "/tmp", "/var", "/home", "/root", "/proc", "/sys") if listing(path)],
        "writes_outside": [path for path in ("/tmp", "/var/tmp", "/dev/shm", "..", "/run") if can_write(path)],
        "has_renounced": libc.prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1,
        "forks": can_fork(),
        "num_threads": most_threads(200),
        "sockets": succeeds(lambda: socket.socket().close()) or succeeds(lambda: socket.socketpair()[0].close()),
        "signals": succeeds(lambda: os.kill(os.getppid(), 0)),
        "changes": changes_metadata(),
    }


def findings() -> dict[str, object]:
    """Everything that `mettle.sandbox.isolation.examine` grades."""
    is_unlimited = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1] < 0 for name in LIMITS}
    return {
        "namespaces": {kind: link_text(f"/proc/self/ns/{kind}") for kind in NAMESPACES},
        "effects": {
            "user": os.getuid() == 1000,
            "mount": not os.path.exists("/var/lib"),
            "pid": os.getppid() == 1 or (IS_MACHINE and os.getsid(1) == 0),  # process 1 belongs to a session outside
            "uts": os.uname().nodename == "sandbox",
        },
        "host_user": host_user(),
        "root": listing("/"),
        "writable": [path for path in READ_ONLY if can_write(path)],
        "is_machine": IS_MACHINE,
        "processes": sorted(int(name) for name in listing("/proc") if name.isdigit()),
        "host_files": [name for name in HOST_FILES if can_read(f"/proc/{name}")],
        "makes_whiteouts": can_make_whiteout(),
        "privileges": privileges(),
        "unlimited": [name for name in LIMITS if is_unlimited[name]],
        **(what_one_process_can() if IS_ALONE else {}),
        "calls": [name for name, arguments in CALLS.items() if is_answered(arguments)],
    }


if __name__ == "__main__":
    print(json.dumps(findings()))
