"""The zygote: a bare interpreter in namespaces of its own, which clones one cell or machine for each socket it is sent.

It starts from a clean exec, knows nothing about any task, and talks to the owner over one seqpacket socket:
`spawn` with a descriptor makes a cell (with `machine`, a machine) that serves that descriptor; `kill` ends one. Its
first message, `hello`, says which layers it could put in force; if a layer is missing the owner decides what to do, and
this process only reports.
Invariant: when the owner ends, however it ends, this process ends, and with it every cell.
"""

from __future__ import annotations

import errno
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from typing import Any, Final, NoReturn

from mettle.sandbox.zygote import (
    ballast,
    cell,
    child,
    host_users,
    jail,
    kernel,
    landlock,
    landlock_only,
    machine,
    meter,
    rehearsal,
    rootfs,
    seccomp,
)
from mettle.sandbox.zygote.host_users import HostUsers
from mettle.sandbox.zygote.settings import MAX_MESSAGE_BYTES, CellLimits, MachineLimits, Settings

# What solutions import most. Nothing here starts threads or registers at-fork work, which every fork would pay for.
_PRELOADED: Final[tuple[str, ...]] = (
    *("bisect", "collections", "collections.abc", "copy", "datetime", "decimal", "enum", "fractions"),
    *("functools", "heapq", "io", "itertools", "json", "math", "operator", "re", "string", "textwrap", "time"),
    *("traceback", "typing"),
)
_MAX_DESCRIPTORS: Final = 3  # the owner's socket, and two files of a cgroup
_TEMPLATE_NAMESPACES: Final = (
    kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWNS
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWCGROUP
)
_ballast: Final[list[bytes]] = []
_CELL_NAMESPACES: Final = (_TEMPLATE_NAMESPACES & ~kernel.CLONE_NEWNET) | kernel.CLONE_NEWPID


def main(settings_json: str) -> NoReturn:
    """Set up, say hello, and clone cells until the owner goes away."""
    settings = Settings.from_json(settings_json)
    control = socket.socket(fileno=settings.control_fd)
    control.set_inheritable(False)
    os.environ.pop("LD_BIND_NOW", None)  # it was for the start of this process
    jail.forget_signals()  # for all that is cloned
    _preload()
    hello, users = _set_up(settings)
    hello["why_no_event"] = meter.why_no_event() if settings.may_use_event else "it is not asked for"
    hello["preload"] = _preload_packages(settings) if hello["is_ready"] else ""
    kernel.die_with_parent()
    if os.getppid() != settings.owner_pid:
        os._exit(0)  # the owner ended before the kernel knew to tell us
    child.forget_harness()
    program = None
    if hello["layers"].get("seccomp") == "":
        program = landlock_only.build_filter() if settings.is_landlocked else seccomp.build_filter()
    if hello["is_ready"] and settings.is_jailed:
        rehearsal.rehearse(settings)
    gc.collect()
    _ballast[:] = ballast.fill_holes()
    gc.freeze()
    gc.disable()
    control.sendall(json.dumps(hello).encode())
    if hello["is_ready"]:
        _serve(control, settings, program, users)
    os._exit(0)


def _preload() -> None:
    for name in _PRELOADED:
        importlib.import_module(name)
    site_builtins: Any = importlib.import_module("_sitebuiltins")
    builtins: Any = importlib.import_module("builtins")
    for name in ("exit", "quit"):
        setattr(builtins, name, site_builtins.Quitter(name, "Ctrl-D (i.e. EOF)"))


def _preload_packages(settings: Settings) -> str:
    """Let judged code import the chosen packages, and import some of them for all of it; "" or what went wrong."""
    if settings.is_landlocked:
        folders = [landlock_only.link_packages(settings)]
    elif settings.is_jailed:
        folders = [rootfs.PACKAGES]
    else:
        folders = sorted({os.path.dirname(path) for path in settings.packages})
    sys.path += folders if settings.packages else []
    for name in settings.preload:
        try:
            importlib.import_module(name)
        except Exception as error:
            return f"{name} cannot be imported: {type(error).__name__}: {error}"
    if settings.preload and len(os.listdir("/proc/self/task")) > 1:
        return f"importing {', '.join(settings.preload)} started threads, which no forked process would have"
    return ""


def _set_up(settings: Settings) -> tuple[dict[str, Any], HostUsers | None]:
    """Put the layers in force. Each maps to "" or to why it is not; the first that fails ends the attempt."""
    layers: dict[str, str] = {}
    if settings.is_landlocked:
        return landlock_only.set_up(settings), None
    if not settings.is_jailed:
        return {"is_ready": True, "layers": layers}, None
    is_ready = True
    users: HostUsers | str = "the set-up failed before"
    try:
        users = _enter_namespaces(settings, layers)
    except OSError as error:
        failed = next(name for name in ("root", "user", "namespaces") if name not in layers)
        layers[failed] = f"{error.strerror} [{errno.errorcode.get(error.errno or 0, '?')}]"
        is_ready = False
    layers["landlock"] = landlock.why_unsupported() or ""
    layers["seccomp"] = seccomp.why_unsupported() or _try_filter()
    hello: dict[str, Any] = {"is_ready": is_ready, "layers": layers}
    if isinstance(users, str):
        return {**hello, "why_no_host_users": users}, None
    return {**hello, "host_users": list(users.block)}, users


def _has_watches() -> bool:
    """Whether a cell can limit the file watches of its user namespace: runtimes that mask /proc forbid it."""
    try:
        return not os.statvfs("/proc/sys").f_flag & os.ST_RDONLY
    except OSError:
        return False


def _enter_namespaces(settings: Settings, layers: dict[str, str]) -> HostUsers | str:
    """Reach namespaces with the small root in place; the users for what is cloned there, or why there are none.

    Root builds the file system first, because only root may be able to see the interpreter (below /root, say), and
    then becomes an ordinary user for good. Where it can have users for its clones, it needs no user namespace itself.
    """
    users = host_users.claim_as_root(settings) if os.geteuid() == 0 else ""
    is_root_built = os.geteuid() == 0 and _build_root_as_root(settings, layers)
    if isinstance(users, HostUsers) and is_root_built:
        kernel.unshare(_TEMPLATE_NAMESPACES & ~(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS))
        kernel.set_hostname("sandbox")
        host_users.stay_ordinary(users)
        layers.update(user="", namespaces="")
        return users
    if os.geteuid() == 0:
        jail.become_ordinary(settings.host_uid)
    block = users if isinstance(users, str) and users else host_users.claim_subordinates(settings)
    users = host_users.enter_namespace(settings, block)
    layers["user"] = ""
    kernel.unshare(_TEMPLATE_NAMESPACES & ~kernel.CLONE_NEWUSER)
    layers["namespaces"] = ""
    kernel.set_hostname("sandbox")
    if not is_root_built:
        rootfs.build_root(settings.packages, settings.host_paths)
        layers["root"] = ""
    return users if isinstance(users, str) else users.why_unusable() or users


def _build_root_as_root(settings: Settings, layers: dict[str, str]) -> bool:
    try:
        kernel.unshare(kernel.CLONE_NEWNS)
    except PermissionError:
        return False  # root of a container without the right; it goes the ordinary user's way
    rootfs.build_root(settings.packages, settings.host_paths)
    layers["root"] = ""
    return True


def _try_filter() -> str:
    """Load the filter in a child that ends at once; "" or why the kernel did not take it."""
    pid = os.fork()
    if pid == 0:
        try:
            kernel.renounce_new_privileges()
            kernel.install_filter(seccomp.build_filter())
        except OSError as error:
            os._exit((error.errno or errno.EIO) & 0xFF)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return "" if code == 0 else f"the kernel refused the filter [{errno.errorcode.get(code, str(code))}]"


def _serve(control: socket.socket, settings: Settings, program: bytes | None, users: HostUsers | None) -> None:
    cells: dict[int, int] = {}
    poller = select.poll()
    poller.register(control, select.POLLIN)
    while True:
        if poller.poll(1000):
            message, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS)
            if not message:
                return
            _obey(json.loads(message), descriptors, cells, control, settings, program, users)
        _reap(cells, users)


def _obey(
    order: dict[str, Any],
    descriptors: list[int],
    cells: dict[int, int],
    control: socket.socket,
    settings: Settings,
    program: bytes | None,
    users: HostUsers | None,
) -> None:
    if "kill" in order:
        if order["kill"] in cells:
            os.kill(cells[order["kill"]], signal.SIGKILL)
        return
    channel = socket.socket(fileno=descriptors[0])
    template_pid, is_machine = os.getpid(), "machine" in order
    programs = _machine_programs() if is_machine and program is not None else None
    if is_machine:
        _load_for_machines()
    try:
        # Without the filter a test can open sockets, so that each cell needs a network of its own.
        pid, user = _clone(settings, users, has_network=is_machine or program is None)
    except OSError as error:
        channel.close()
        print(f"no cell: {error}", file=sys.stderr, flush=True)
        return
    if pid == 0:
        control.detach()
        settings = settings._replace(outside_id=user)
        if not is_machine:
            limits_of_cell = CellLimits(**order["cell"]) if "cell" in order else None
            own = limits_of_cell.of(settings) if limits_of_cell else settings
            has_files = limits_of_cell is not None and limits_of_cell.has_program
            cell.live(channel, own, program, descriptors[1:], has_files=has_files)
        limits = MachineLimits(**order["machine"])
        entrance = descriptors[1] if len(descriptors) > 1 else None
        machine.live(channel, machine.Tools(settings, limits, programs, template_pid), entrance)
    cells[order["spawn"]] = pid
    channel.close()
    for descriptor in descriptors[1:]:
        os.close(descriptor)


@functools.cache
def _load_for_machines() -> None:
    """What workers of machines use and no cell does, once for all machines: every fork copies what is loaded here."""
    importlib.import_module("tarfile")
    gc.freeze()


@functools.cache
def _machine_programs() -> machine.Programs:
    has_watches = _has_watches()
    counted = seccomp.build_filter(is_machine=True, is_memory_counted=True, has_watches=has_watches)
    return machine.Programs(seccomp.build_filter(is_machine=True, has_watches=has_watches), counted)


def _clone(settings: Settings, users: HostUsers | None, *, has_network: bool) -> tuple[int, int]:
    """The new process (0 in itself), and the user that it is, as the template's namespace counts."""
    if not settings.is_jailed:
        return os.fork(), settings.outside_id
    flags = _CELL_NAMESPACES | (kernel.CLONE_NEWNET if has_network else 0)
    return (kernel.clone_process(flags), settings.outside_id) if users is None else users.clone(flags)


def _reap(cells: dict[int, int], users: HostUsers | None) -> None:
    """Collect cells that have ended; their numbers stay valid until then."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if users is not None:
            users.give_back(pid)
        for number in [number for number, owner in cells.items() if owner == pid]:
            del cells[number]
