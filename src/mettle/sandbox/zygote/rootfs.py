"""The file system that judged code sees: the system's programs and the interpreter, read-only, and nothing else.

Homes, /root, /run, /var, /opt and the host's /tmp and /etc do not exist in it. /tmp, /work and /dev/shm are empty
directories here; every cell mounts its own tmpfs over them. /proc is the host's until a cell covers it with its own,
because the kernel only lets a user namespace mount a fresh /proc where it can already see a whole one.

A machine gets a root of its own: the same read-only directories on a private tmpfs, so that any other directory
(/work, /tmp, /app, /home) can be made in it and lives and dies with the machine.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Final

from mettle.sandbox.zygote import kernel, procfs

SANDBOX_UID: Final = 1000  # as seen from inside
PROGRAMS: Final = "/opt/bin"  # of a machine
PACKAGES: Final = "/packages"
_BESIDE_USR: Final = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_MAX_TERMINALS: Final = 64  # of a machine
WRITABLE: Final = ("/tmp", "/work", "/dev/shm")
_changed_ns: dict[str, int] = {}  # of this cell's own directories
_bound: list[str] = []  # what the template bound read-only, so that a machine can bind it again
# /dev/zero is the host's /dev/full: it reads as zeros just the same, and a mapping of it, which would be memory that
# belongs to no process and that no watch counts, is refused.
_DEVICES: Final = {"null": "null", "zero": "full", "full": "full", "random": "random", "urandom": "urandom"}
# Parts of a machine's /proc that tell about the host's kernel, hardware and other users, or steer them. What is masked
# is an empty file or an empty directory; /proc/sys stays readable, as all of /proc is mounted read-only.
_MASKED_PROC: Final = (
    *("acpi", "asound", "bus", "driver", "fs", "irq", "pressure", "scsi", "sysvipc", "tty", "dynamic_debug"),
    *("buddyinfo", "cgroups", "cmdline", "config.gz", "consoles", "diskstats", "dma", "interrupts", "iomem", "ioports"),
    *(
        "kallsyms",
        "kcore",
        "key-users",
        "keys",
        "kmsg",
        "kpagecgroup",
        "kpagecount",
        "kpageflags",
        "latency_stats",
        "locks",
    ),
    *("mdstat", "modules", "mtrr", "pagetypeinfo", "partitions", "sched_debug", "schedstat", "slabinfo", "softirqs"),
    *("swaps", "sysrq-trigger", "timer_list", "timer_stats", "vmallocinfo", "vmstat", "zoneinfo"),
    *("sys/kernel/core_pattern", "sys/kernel/random/boot_id", "sys/fs/binfmt_misc"),
)
_LINKS: Final = {
    "dev/fd": "/proc/self/fd",
    "dev/stdin": "/proc/self/fd/0",
    "dev/stdout": "/proc/self/fd/1",
    "dev/stderr": "/proc/self/fd/2",
    "dev/ptmx": "pts/ptmx",
}
_FILES: Final = {
    "etc/passwd": f"root:x:0:0::/:/usr/sbin/nologin\ncode:x:{SANDBOX_UID}:{SANDBOX_UID}::/work:/bin/sh\n",
    "etc/group": f"root:x:0:\ncode:x:{SANDBOX_UID}:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "etc/hosts": "127.0.0.1 localhost\n",
    "etc/.nothing": "",  # what a masked file shows; read-only like all of /etc
}


def build_root(packages: Sequence[str] = (), host_paths: Sequence[str] = ()) -> None:
    """Assemble the root in this mount namespace and move into it. The caller has made the namespace its own."""
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    sources = _interpreter_directories(host_paths)
    root = _staging_directory(sources)
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID, "mode=0755,size=4m,nr_inodes=4096")
    for directory in ("dev/shm", "etc", "proc", "program", "tmp", "work"):
        os.makedirs(f"{root}/{directory}")
    for source in sources:
        _bind(source, root)
    _add_system_links(root)
    _add_etc(root)
    _add_packages(packages, root)
    kernel.lock_mounts(root)
    _add_devices(root)
    kernel.mount("/proc", f"{root}/proc", None, kernel.MS_BIND | kernel.MS_REC)
    kernel.pivot_into(root)


def mount_private_directories(disk_bytes: int, max_files: int) -> None:
    """Cover the writable directories with empty ones that only this mount namespace has."""
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOATIME
    for path in WRITABLE:
        options = f"mode=1777,size={disk_bytes},nr_inodes={max_files},uid={SANDBOX_UID},gid={SANDBOX_UID}"
        kernel.mount("tmpfs", path, "tmpfs", flags, options)
        os.utime(path, (0, 0))
        _changed_ns[path] = os.stat(path).st_ctime_ns


def mount_proc(path: str, *, has_system: bool = False) -> bool:
    """A fresh /proc of this pid namespace, or an empty directory and False where the host forbids one.

    In the latter case process 1 goes on looking at processes through the host's, which nothing else can reach.

    It shows the processes inside and, only if it `has_system`, some of what there is to know about the host: its
    memory, processors and version, the network namespace. Processes are not hidden from each other, because process 1
    has no privileges either, and what could hide from it would not be watched.
    """
    flags = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    try:
        kernel.mount("proc", path, "proc", flags, None if has_system else "subset=pid")
    except PermissionError:
        # Containers that mask parts of /proc forbid a fresh one; then there is none inside.
        # What process 1 keeps lies in the same tree of mounts, where Landlock's rule for / covers it.
        if path != "/proc":
            kernel.mount("/proc", path, None, kernel.MS_BIND | kernel.MS_REC)
        procfs.keep(path)
        kernel.mount("tmpfs", path, "tmpfs", flags, "size=4k,nr_inodes=2,mode=0555")
        return False
    if has_system:
        _mask(path)
    return True


def _mask(proc: str) -> None:
    for name in _MASKED_PROC:
        path = f"{proc}/{name}"
        if os.path.isdir(path):
            flags = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
            kernel.mount("tmpfs", path, "tmpfs", flags, "size=4k,nr_inodes=2,mode=0555")
        elif os.path.exists(path):
            kernel.mount("/etc/.nothing", path, None, kernel.MS_BIND)


def enter_machine_root(disk_bytes: int, max_files: int) -> None:
    """Build this machine's own root, all of it one sized tmpfs around the read-only directories, and move into it."""
    root = "/work"  # an empty directory of the template's root, in a mount namespace that is this machine's own
    owner = f"uid={SANDBOX_UID},gid={SANDBOX_UID}"
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOATIME
    kernel.mount("tmpfs", root, "tmpfs", flags, f"mode=0755,size={disk_bytes},nr_inodes={max_files},{owner}")
    for directory, mode in (("proc", 0o755), ("work", 0o755), ("tmp", 0o1777), ("run/shm", 0o1777), ("var", 0o755)):
        os.makedirs(f"{root}/{directory}")
        os.chmod(f"{root}/{directory}", mode)
    for source in (*_bound, "/etc", "/dev"):
        os.makedirs(root + source, exist_ok=True)
        kernel.mount(source, root + source, None, kernel.MS_BIND | kernel.MS_REC)
    for name in os.listdir("/"):
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
    os.symlink("/tmp", f"{root}/var/tmp")
    _link_interpreter(root)
    kernel.mount(f"{root}/run/shm", f"{root}/dev/shm", None, kernel.MS_BIND)
    _mount_terminals(f"{root}/dev/pts")
    mount_proc(f"{root}/proc", has_system=True)
    kernel.pivot_into(root)


def _link_interpreter(root: str) -> None:
    """This interpreter as `python` and `python3`, ahead of any other in the path."""
    os.makedirs(f"{root}{PROGRAMS}")
    for name in ("python", "python3"):
        os.symlink(os.path.realpath(sys.executable), f"{root}{PROGRAMS}/{name}")


def _mount_terminals(path: str) -> None:
    """Pseudo-terminals that only this machine has. A host without them is no worse for it."""
    with contextlib.suppress(OSError):
        flags = kernel.MS_NOSUID | kernel.MS_NOEXEC
        # The host has some thousands for all; without a share of its own one machine could take them.
        kernel.mount("devpts", path, "devpts", flags, f"newinstance,ptmxmode=0666,mode=0620,max={_MAX_TERMINALS}")


def are_private_directories_untouched() -> bool:
    """Whether no file was made, nor anything else changed, in any of them since they were mounted.

    A file that comes or goes changes the modification time, which was set to 1970; setting it back, like a change of
    mode or owner, changes the inode's own time, which nobody can set.
    """
    for path in WRITABLE:
        found = os.stat(path)
        if found.st_mtime_ns != 0 or found.st_ctime_ns != _changed_ns[path] or os.listdir(path):
            return False
    return True


def _interpreter_directories(host_paths: Sequence[str]) -> list[str]:
    """/usr and what interpreters load from outside it, without directories inside other listed ones."""
    wanted = {"/usr", os.path.realpath(sys.base_prefix), os.path.realpath(sys.base_exec_prefix), *host_paths}
    return [path for path in sorted(wanted) if not any(path.startswith(f"{other}/") for other in wanted)]


def readable_directories(host_paths: Sequence[str] = ()) -> list[str]:
    """The same, where no root is built of them, as far as this user may look, and beside /usr."""
    beside = [f"/{name}" for name in _BESIDE_USR if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}")]
    open_paths = [path for path in host_paths if os.access(path, os.R_OK | os.X_OK)]  # none below another's home
    return [*_interpreter_directories(open_paths), *beside, "/etc/alternatives"]


def _staging_directory(sources: list[str]) -> str:
    """An existing directory to build the root on, which hides none of the sources."""
    for candidate in ("/mnt", "/sys", "/srv", "/media"):
        if os.path.isdir(candidate) and not any(f"{source}/".startswith(f"{candidate}/") for source in sources):
            return candidate
    raise OSError(2, "no directory to build the sandbox's root on: one of /mnt, /sys, /srv, /media must exist")


def _bind(source: str, root: str) -> None:
    target = root + source
    os.makedirs(target, exist_ok=True)
    kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)
    _bound.append(source)


def _add_system_links(root: str) -> None:
    for name in _BESIDE_USR:
        path = f"/{name}"
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        elif os.path.isdir(path):
            _bind(path, root)


def _add_etc(root: str) -> None:
    for name, text in _FILES.items():
        with open(f"{root}/{name}", "w", encoding="utf-8") as file:
            file.write(text)
    for path in ("/etc/ld.so.cache", "/etc/localtime"):
        if os.path.isfile(path):
            with open(path, "rb") as source, open(root + path, "wb") as target:
                target.write(source.read())
    if os.path.isdir("/etc/alternatives"):
        _bind("/etc/alternatives", root)


def _add_packages(packages: Sequence[str], root: str) -> None:
    """Bind chosen packages of the owner's, each under its own name, and nothing that lies beside them."""
    os.makedirs(root + PACKAGES)
    for source in packages:
        target = f"{root}{PACKAGES}/{os.path.basename(source)}"
        if os.path.isdir(source):
            os.mkdir(target)
        else:
            with open(target, "xb"):
                pass
        kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)
    _bound.append(PACKAGES)


def _add_devices(root: str) -> None:
    """Bind the harmless devices. The root is already read-only, so they live on a small file system of their own."""
    kernel.mount("tmpfs", f"{root}/dev", "tmpfs", kernel.MS_NOSUID, "mode=0755,size=64k,nr_inodes=64")
    for name in ("shm", "pts"):
        os.mkdir(f"{root}/dev/{name}")
    for name, source in _DEVICES.items():
        with open(f"{root}/dev/{name}", "w", encoding="utf-8"):
            pass
        kernel.mount(f"/dev/{source}", f"{root}/dev/{name}", None, kernel.MS_BIND)
    for link, target in _LINKS.items():
        os.symlink(target, f"{root}/{link}")
    kernel.lock_mounts(f"{root}/dev", is_device=True)
