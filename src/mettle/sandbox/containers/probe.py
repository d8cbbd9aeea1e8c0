"""Code that is run in a container to find out where it is: beside `explorer.py`, which tries the doors.

Its argument is a JSON list of [host, port] that a contained program must not reach. It is never imported.
Invariant: it changes nothing, and ends within a few seconds.
"""

import ctypes
import errno
import json
import os
import resource
import select
import socket
import sys
import time

TRY_S = 1.5
LOG_BYTES = 1 << 14
CGROUP = {
    "memory": ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"),
    "pids": ("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max"),
    "cpu": ("/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us"),
}


def words(path: str) -> list[str]:
    """The words of a small file; none if it is not there."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(4096).split()
    except OSError:
        return []


def first_word(path: str) -> str:
    """The first of them, or nothing."""
    return (words(path) or [""])[0]


def status() -> dict[str, str]:
    """Lines of /proc/self/status by name."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        pairs = [line.partition(":") for line in file]
    return {name: value.strip() for name, _, value in pairs}


def kernel_log() -> str:
    """What the kernel has said, as far as it tells."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "klogctl"):
        return ""
    buffer = ctypes.create_string_buffer(LOG_BYTES)
    length = libc.klogctl(3, buffer, LOG_BYTES)
    return buffer.raw[: max(0, length)].decode(errors="replace")


def interfaces() -> list[str]:
    """Network interfaces, loopback included."""
    with open("/proc/net/dev", encoding="ascii", errors="replace") as file:
        return [line.partition(":")[0].strip() for line in file if ":" in line]


def reached(targets: list[list[object]]) -> list[str]:
    """Those of the targets that something answers at: a refusal is an answer, too."""
    waiting = {}
    poller = select.poll()
    found = []
    for host, port in targets:
        connection = socket.socket()
        connection.setblocking(False)
        code = connection.connect_ex((str(host), int(str(port))))
        if code in (0, errno.ECONNREFUSED):
            found.append(f"{host}:{port}")
        elif code == errno.EINPROGRESS:
            waiting[connection.fileno()] = connection, f"{host}:{port}"
            poller.register(connection, select.POLLOUT)
    deadline = time.monotonic() + TRY_S
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        for number, _ in poller.poll(left_s * 1e3):
            poller.unregister(number)
            connection, name = waiting.pop(number)
            code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code in (0, errno.ECONNREFUSED):
                found.append(name)
    return found


if __name__ == "__main__":
    kernel = os.uname()
    print(
        json.dumps(
            {
                "status": status(),
                "user_map": words("/proc/self/uid_map"),
                "cgroup": {name: next(filter(None, map(first_word, paths)), "") for name, paths in CGROUP.items()},
                "processes": resource.getrlimit(resource.RLIMIT_NPROC)[1],
                "interfaces": interfaces(),
                "reached": reached(json.loads(sys.argv[1])),
                "is_gvisor": "gVisor" in kernel_log(),
                "kernel": kernel.release,
                "machine": kernel.machine,
            }
        )
    )
