"""The owner's end of a template process: start it clean, ask it for cells, notice when it ends.

The process is a fresh exec of this interpreter with no site-packages and an environment written here, so that nothing
of the owner's (secrets in variables, open files, loaded modules) is in it. It ends when the owner does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from mettle.errors import SandboxError, UserError
from mettle.processes.readiness import is_readable
from mettle.sandbox.config import SandboxConfig
from mettle.sandbox.host_ids import HostIds, find_subordinates
from mettle.sandbox.own_limits import limits_hint
from mettle.sandbox.packages import distributions_of, package_paths
from mettle.sandbox.toolchains import known_languages, shown_paths
from mettle.sandbox.zygote.settings import MAX_MESSAGE_BYTES, CellLimits, MachineLimits, Settings

logger = logging.getLogger(__name__)

# Imports the zygote's modules without running the package's own __init__ files, which import more than it may have.
_BOOT: Final = """
import sys, types
for name, folder in (("mettle", sys.argv[1]), ("mettle.sandbox", sys.argv[1] + "/sandbox")):
    package = types.ModuleType(name)
    package.__path__ = [folder]
    sys.modules[name] = package
from mettle.sandbox.zygote.template import main
main(sys.argv[2])
"""
# Instead of -I, which would also ignore the hash seed: the environment is this one and nothing else, and a fixed seed
# makes a program that prints a set print the same in every run.
_FLAGS: Final = ("-s", "-P", "-S", "-B")
_ENVIRONMENT: Final = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/work",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "MALLOC_ARENA_MAX": "2",
    "LD_BIND_NOW": "1",  # else each clone would look up each function that it calls first
}
# A library that starts threads when it is imported could not be forked.
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_MAX_HELLO_BYTES: Final = 1 << 16
_MAX_LOG_LINE: Final = 500
_MAX_DISK_FILES: Final = 1024
_ORDER_RETRY_S: Final = 0.002
_MAX_REMOVALS: Final = 5
_DYING_S: Final = 0.5
_REMOVAL_PAUSE_S: Final = 0.1


class Clone(NamedTuple):
    """A process that the template made, by its number, and the owner's end of its socket."""

    number: int
    channel: socket.socket


class TemplateProcess:
    """One running template process."""

    def __init__(self, config: SandboxConfig, generation: int, *, is_landlocked: bool = False) -> None:
        self._config = config
        self.is_landlocked = is_landlocked
        self.generation = generation
        self.layers: dict[str, str] = {}
        self.host_ids = HostIds()
        self.why_no_event = ""
        self.is_ready = False
        self._num_spawned = 0
        self._scratch = _make_scratch() if config.backend == "unsafe" or is_landlocked else ""
        self._control, theirs = _socket_pair(socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._log, log_end = os.pipe()
        os.set_blocking(self._log, False)
        with theirs:
            try:
                self._process = self._execute(theirs, log_end)
            finally:
                os.close(log_end)
        self._exit_fd = os.pidfd_open(self._process.pid)
        self._exited = asyncio.Event()
        self._last_words = ""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._exit_fd, self._on_exit)
        loop.add_reader(self._log, self._on_log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """False as soon as the kernel says so, even before the event loop has heard it."""
        return not self._exited.is_set() and not is_readable(self._exit_fd)

    async def ends_soon(self) -> bool:
        """Whether it has ended, or does within a moment: a process that is killed hangs up before it is dead."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DYING_S):
                await self._exited.wait()
        return not self.is_alive

    async def wait_ready(self) -> None:
        """Wait for the first message: which layers are in force, and whether cells can be made."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                message = await loop.sock_recv(self._control, _MAX_HELLO_BYTES)
            hello: dict[str, Any] = json.loads(message or b"{}")
        except (OSError, ValueError) as error:
            raise SandboxError(
                f"the sandbox's template process did not start: {error}. {self._last_words}{limits_hint()}"
            ) from error
        if not hello:
            await asyncio.sleep(0)
            raise SandboxError(f"the sandbox's template process ended at its start. {self._last_words}{limits_hint()}")
        if hello["preload"]:
            raise UserError(f"the sandbox cannot preload its modules: {hello['preload']}")
        self.layers = hello["layers"]
        self.host_ids = HostIds(tuple(hello.get("host_users", ())), str(hello.get("why_no_host_users", "")))
        self.why_no_event = str(hello["why_no_event"])
        self.is_ready = bool(hello["is_ready"])

    async def spawn_cell(self, limits: CellLimits | None = None, entrances: Sequence[int] = ()) -> Clone:
        """A new cell, not yet ready; with the usual limits, or these. `entrances` are those of its cgroup."""
        return await self._clone({} if limits is None else {"cell": limits._asdict()}, entrances)

    async def spawn_machine(self, limits: MachineLimits, entrance: int | None = None) -> Clone:
        """A new machine, not yet ready. `entrance` is the `cgroup.procs` that it is to enter, opened for writing."""
        return await self._clone({"machine": limits._asdict()}, [] if entrance is None else [entrance])

    async def _clone(self, kind: dict[str, Any], descriptors: Sequence[int] = ()) -> Clone:
        self._num_spawned += 1
        number = self._num_spawned
        ours, theirs = _socket_pair(socket.SOCK_STREAM)
        with theirs:
            try:
                await self._send({"spawn": number, **kind}, [theirs.fileno(), *descriptors])
            except OSError as error:
                ours.close()
                raise SandboxError(f"the sandbox's template process takes no orders: {error}") from error
        ours.setblocking(False)
        return Clone(number, ours)

    async def kill(self, number: int, generation: int) -> None:
        """End a cell or machine at once, whatever it is doing. One whose template has ended has ended with it."""
        if generation == self.generation:
            with contextlib.suppress(OSError):
                await self._send({"kill": number}, [])

    async def close(self) -> None:
        """Hang up and wait for the process to end; it takes its cells along."""
        self._control.close()
        try:
            async with asyncio.timeout(5):
                await self._exited.wait()
        except TimeoutError:
            self._process.kill()
            await self._exited.wait()
        await self._remove_scratch()

    async def _remove_scratch(self) -> None:
        """Delete the directories of cells that were killed; others delete their own, perhaps at this moment.

        By a program of its own, because judged code decides how deep the tree is.
        """
        for _ in range(_MAX_REMOVALS if self._scratch else 0):
            opened = ("chmod", "-R", "u+rwX", "--", self._scratch)  # what judged code has closed
            remove = ("rm", "-rf", "--one-file-system", "--", self._scratch)
            for command in (opened, remove):
                process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
                status = await process.wait()
            if status == 0:
                return
            await asyncio.sleep(_REMOVAL_PAUSE_S)

    def _execute(self, control: socket.socket, log_end: int) -> subprocess.Popen[bytes]:
        config = self._config
        subordinates = find_subordinates()
        settings = Settings(
            control_fd=control.fileno(),
            owner_pid=os.getpid(),
            is_jailed=config.backend != "unsafe" and not self.is_landlocked,
            is_landlocked=self.is_landlocked,
            host_uid=config.host_uid,
            max_processes=config.max_processes,
            max_open_files=config.max_open_files,
            max_file_bytes=config.disk_mb << 20,
            disk_bytes=(config.disk_mb << 20) // 3,
            max_disk_files=_MAX_DISK_FILES,
            scratch=self._scratch,
            packages=_packages(config),
            preload=config.preload,
            host_paths=shown_paths(list(known_languages(config).values())),
            host_ids=(config.first_host_uid, config.num_host_uids),
            sub_ids=subordinates.ids,
            why_no_sub_ids=subordinates.why_not,
            may_use_event=config.cpu_meter in ("auto", "event"),
        )
        folder = str(Path(__file__).resolve().parent.parent)
        command = [os.path.realpath(sys.executable), *_FLAGS, "-c", _BOOT, folder, settings.to_json()]
        # Its standard input is a pipe that is already at its end: the same kind of file as a test's will be.
        nothing, write_end = os.pipe()
        os.close(write_end)
        try:
            return subprocess.Popen(
                command,
                stdin=nothing,
                stdout=log_end,
                stderr=log_end,
                env={**_ENVIRONMENT, **(_ONE_THREAD if config.preload else {})},
                cwd="/",
                pass_fds=[control.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(f"the sandbox's template process cannot be started: {error}") from error
        finally:
            os.close(nothing)

    async def _send(self, order: dict[str, Any], descriptors: list[int]) -> None:
        message = json.dumps(order).encode()
        if len(message) > MAX_MESSAGE_BYTES:  # half an order would end the template, and everything that it has made
            raise SandboxError(f"an order to the sandbox's template has {len(message):,} bytes, which is too long")
        while True:
            try:
                if descriptors:
                    socket.send_fds(self._control, [message], descriptors)
                else:
                    self._control.send(message)
                return
            except BlockingIOError:
                await asyncio.sleep(_ORDER_RETRY_S)  # the socket holds few messages; the template is busy cloning

    def _on_exit(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._exit_fd)
        self._on_log()
        loop.remove_reader(self._log)
        os.close(self._exit_fd)
        os.close(self._log)
        self._process.wait()
        self._exited.set()

    def _on_log(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._log, 1 << 16)
            if not data:
                asyncio.get_running_loop().remove_reader(self._log)
            for line in data.decode(errors="replace").splitlines():
                self._last_words = line[:_MAX_LOG_LINE]
                logger.warning("sandbox template says: %s", line[:_MAX_LOG_LINE])


def _packages(config: SandboxConfig) -> tuple[str, ...]:
    """What is shown of installed packages; UserError for one that is to be preloaded and is not there."""
    found = package_paths((*config.python_packages, *distributions_of(config.preload)))
    return tuple(str(path) for path in found.found)


def _make_scratch() -> str:
    try:
        return tempfile.mkdtemp(prefix="mettle-sandbox-")
    except OSError as error:
        raise SandboxError(f"the sandbox cannot make its directory in {tempfile.gettempdir()}: {error}") from error


def _socket_pair(kind: socket.SocketKind) -> tuple[socket.socket, socket.socket]:
    try:
        return socket.socketpair(socket.AF_UNIX, kind)
    except OSError as error:
        raise SandboxError(f"no socket could be made for the sandbox: {error}") from error
