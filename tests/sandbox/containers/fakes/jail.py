"""A process in namespaces of its own, as an engine would start a container: run as a script with a JSON description.

    {"argv": [...], "env": {...}, "uid": 1000, "mounts": {"/mettle": "/tmp/x"}, "tmpfs": {"/work": 268435456},
     "read_only": true, "network": true, "capabilities": false, "seccomp": true, "processes": 80,
     "port": {"number": 8790, "socket": "/tmp/y/port"}}

The root is this host's /usr and /etc. With `port`, connections to the unix socket are carried to that port inside, as
the network of a cluster would. Exits as the process does. What is not limited here (processors, memory) an engine's
cgroup would limit; the tests do not claim it.
"""

from __future__ import annotations

import codecs
import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import types
from typing import Any

# The core imports nothing outside itself; the package around it takes ten times as long as all else here.
for _name, _folder in (("mettle", "mettle"), ("mettle.sandbox", "mettle/sandbox")):
    sys.modules[_name] = types.ModuleType(_name)
    sys.modules[_name].__path__ = [f"{os.environ['PYTHONPATH']}/{_folder}"]

from mettle.sandbox.zygote import jail, kernel, seccomp  # noqa: E402

ROOT = "/mnt"
IMAGE_BIN = "/image/bin"
ORDINARY_UID = 64113
OWN = kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWNET
FLAGS = kernel.MS_NOSUID | kernel.MS_NODEV


def main() -> None:
    spec: dict[str, Any] = json.loads(sys.argv[1])
    codecs.lookup("ascii")  # while the interpreter's own files can be read
    listener = _listen(spec)
    if os.geteuid() == 0:
        kernel.unshare(kernel.CLONE_NEWNS)
        _build(spec)
        os.setgroups([])
        os.setresgid(ORDINARY_UID, ORDINARY_UID, ORDINARY_UID)
        os.setresuid(ORDINARY_UID, ORDINARY_UID, ORDINARY_UID)
        kernel.set_dumpable(True)
    has_root = os.getcwd() == "/"
    outside = os.geteuid()
    kernel.unshare(kernel.CLONE_NEWUSER)
    jail.map_user(spec["uid"], outside)
    kernel.unshare(OWN if spec["network"] else OWN & ~kernel.CLONE_NEWNET)
    if not has_root:
        _build(spec)
    if spec["network"]:
        kernel.raise_loopback()
    kernel.set_hostname("sandbox")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    if listener is not None:
        _fork_network(listener, spec["port"]["number"])
    kernel.unshare(kernel.CLONE_NEWPID)
    pid = _fork()
    if pid == 0:
        _enter(spec)
    for stream in (0, 1):
        os.close(stream)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os._exit(128 - status if status < 0 else status)


def _fork() -> int:
    """As `os.fork`, and the child ends with this process, also when that ends before the child has asked for it."""
    parent = os.pidfd_open(os.getpid())
    pid = os.fork()
    if pid == 0:
        kernel.die_with_parent()
        poller = select.poll()
        poller.register(parent, select.POLLIN)
        if poller.poll(0):
            os._exit(0)
    os.close(parent)
    return pid


def _enter(spec: dict[str, Any]) -> None:
    for path, size in {**spec["tmpfs"], "/dev/shm": 64 << 20}.items():
        options = f"mode=1777,size={size},uid={spec['uid']},gid={spec['uid']}"
        kernel.mount("tmpfs", path, "tmpfs", FLAGS, options)
    kernel.mount("proc", "/proc", "proc", FLAGS | kernel.MS_NOEXEC | kernel.MS_RDONLY)
    os.chdir("/work" if os.path.isdir("/work") else "/")
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    if spec["processes"]:
        resource.setrlimit(resource.RLIMIT_NPROC, (spec["processes"],) * 2)
    if not spec["capabilities"]:
        _drop_bounding()
        kernel.drop_capabilities()
        kernel.renounce_new_privileges()
    if spec["seccomp"]:
        kernel.renounce_new_privileges()
        kernel.install_filter(seccomp.build_filter(is_machine=True))
    try:
        os.execvpe(spec["argv"][0], spec["argv"], spec["env"])
    except OSError as error:
        print(f"exec: {spec['argv'][0]}: {error.strerror}", file=sys.stderr)
        os._exit(127)


def _build(spec: dict[str, Any]) -> None:
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", ROOT, "tmpfs", kernel.MS_NOSUID, "mode=0755")
    for folder in (
        "usr",
        "etc",
        "proc",
        "dev",
        "var",
        *(path.lstrip("/") for path in [*spec["mounts"], *spec["tmpfs"]]),
    ):
        os.makedirs(f"{ROOT}/{folder}", exist_ok=True)
    for path in sorted({"/usr", "/etc", os.path.realpath(sys.base_prefix)}):
        os.makedirs(ROOT + path, exist_ok=True)
        kernel.mount(path, ROOT + path, None, kernel.MS_BIND | kernel.MS_REC)
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{ROOT}/{name}")
    for target, source in spec["mounts"].items():
        kernel.mount(source, ROOT + target, None, kernel.MS_BIND | kernel.MS_REC)
    _devices()
    os.makedirs(f"{ROOT}{IMAGE_BIN}")
    os.symlink(os.path.realpath(sys.executable), f"{ROOT}{IMAGE_BIN}/python3")
    if spec["read_only"]:
        kernel.lock_mounts(ROOT, is_device=True)
    kernel.mount("/proc", f"{ROOT}/proc", None, kernel.MS_BIND | kernel.MS_REC)
    kernel.pivot_into(ROOT)


def _devices() -> None:
    for name in ("null", "zero", "full", "random", "urandom"):
        os.close(os.open(f"{ROOT}/dev/{name}", os.O_CREAT | os.O_WRONLY))
        kernel.mount(f"/dev/{name}", f"{ROOT}/dev/{name}", None, kernel.MS_BIND)
    os.mkdir(f"{ROOT}/dev/shm")
    for link, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(target, f"{ROOT}/dev/{link}")


def _drop_bounding() -> None:
    """What CapDrop ALL does to the set that could be regained; the newer kernel module does it by itself."""
    libc = ctypes.CDLL(None)
    for number in range(64):
        libc.prctl(24, number, 0, 0, 0)


def _listen(spec: dict[str, Any]) -> socket.socket | None:
    if "port" not in spec:
        return None
    listener = socket.socket(socket.AF_UNIX)
    if os.path.exists(spec["port"]["socket"]):  # of a removed pod that had the same name
        os.unlink(spec["port"]["socket"])
    listener.bind(spec["port"]["socket"])
    os.chmod(spec["port"]["socket"], 0o666)
    listener.listen(64)
    return listener


def _fork_network(listener: socket.socket, port: int) -> None:
    """A process in the container's network, and outside everything else of it."""
    if _fork() == 0:
        nothing = os.open("/dev/null", os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        _carry(listener, port)
    listener.close()


def _carry(listener: socket.socket, port: int) -> None:
    while True:
        outside, _ = listener.accept()
        try:
            inside = socket.create_connection(("127.0.0.1", port), timeout=5)
        except OSError:
            outside.close()
            continue
        inside.settimeout(None)
        for source, target in ((outside, inside), (inside, outside)):
            threading.Thread(target=_pump, args=(source, target), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


if __name__ == "__main__":
    main()
