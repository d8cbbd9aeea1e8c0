"""Hosts that give less: what container runtimes and kernels do to a process, done to the pool's template process.

`on_host(kind)` starts every template made inside the block through a launcher that first becomes such a host; `start_on`
starts a pool so, and leaves others alone. The tests themselves stay what they are, so that what they plant and look at is not denied to them.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

from mettle.sandbox import MachinePool, SandboxPool

Host = Literal["masked", "docker", "no-user-namespaces", "apparmor", "no-landlock"]
SOURCE = Path(__file__).resolve().parents[2] / "src" / "mettle"
_LAUNCH = """
import errno, os, struct, sys, types
for name, folder in (("mettle", sys.argv[2]), ("mettle.sandbox", sys.argv[2] + "/sandbox")):
    package = types.ModuleType(name); package.__path__ = [folder]; sys.modules[name] = package
from mettle.sandbox.zygote import kernel
NEW = 0x7E020000
MOUNTS = (165, 166, 155, 308, 428, 429, 430, 431, 432, 433, 442, 161)
def filtered(refused, of_clone=NEW, error=errno.EPERM, with_clone3=True):
    # The calls fail; so does clone with any of these flags; clone3 is not there, as its flags cannot be seen.
    lines = [(0x20, 0, 0, 0)]
    for number in refused: lines += [(0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | error)]
    if with_clone3: lines += [(0x15, 0, 1, 435), (0x06, 0, 0, 0x50000 | errno.ENOSYS)]
    lines += [(0x15, 0, 3, 56), (0x20, 0, 0, 16), (0x45, 0, 1, of_clone), (0x06, 0, 0, 0x50000 | error)]
    kernel.renounce_new_privileges()
    kernel.install_filter(b"".join(struct.pack("=HBBI", *line) for line in [*lines, (0x06, 0, 0, 0x7FFF0000)]))
def masked():
    # A runtime covers parts of /proc and makes others read-only, so that the kernel allows no fresh one inside.
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", "/proc/irq", "tmpfs", kernel.MS_RDONLY)
    kernel.mount("/proc/sys", "/proc/sys", None, kernel.MS_BIND | kernel.MS_REC)
    kernel.lock_mounts("/proc/sys")
def no_user_namespaces():
    # As sysctl user.max_user_namespaces = 0 answers; containers of such hosts may not mount either.
    filtered((272,), 0x10000000, errno.ENOSPC); filtered(MOUNTS)
kinds = {
    "masked": masked,
    "docker": lambda: filtered((272, *MOUNTS)),
    "no-user-namespaces": no_user_namespaces,
    "apparmor": lambda: filtered(MOUNTS, 0),  # unshare works, and gives no right to mount
    "no-landlock": lambda: (filtered((272, *MOUNTS)), filtered((444, 445, 446), 0, errno.ENOSYS)),
}
kinds[sys.argv[1]]()
os.execv(sys.argv[3], sys.argv[3:])
"""


@contextlib.contextmanager
def on_host(kind: Host, interpreter: str = "") -> Iterator[None]:
    """Start templates as on such a host, if asked for by another interpreter of this version."""

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        launch = [sys.executable, "-I", "-S", "-B", "-c", _LAUNCH, kind, str(SOURCE)]
        return subprocess.Popen([*launch, interpreter or command[0], *command[1:]], **options)

    with mock.patch("mettle.sandbox.templates.subprocess", SimpleNamespace(Popen=start)):
        yield


async def start_on(pool: SandboxPool | MachinePool, kind: Host, interpreter: str = "") -> None:
    """Start a pool as on such a host; the caller closes it. A template that is started later is of this host."""
    with on_host(kind, interpreter):
        await pool.__aenter__()
