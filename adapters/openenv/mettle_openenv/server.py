"""The server of a local OpenEnv project, run as a child process.

Parts: `ProjectServer`. The project's `openenv.yaml` names its application (`app: server.app:app`); uvicorn of the
project's own virtual environment, or of this interpreter, serves it on a socket that is opened here, so there is no
port to guess. Invariants: the process and its children end with `stop`; the process ends with this one, even one that
is killed. The project's code is not isolated from this machine: whoever starts it has asked for that by name.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from mettle.errors import InfraError, UserError
from mettle.processes.child import ChildProcess

DEFAULT_APP = "server.app:app"
POLL_S = 0.05
STOP_TIMEOUT_S = 3.0
MAX_OUTPUT_CHARS = 600


class ProjectServer:
    """The server of the project in `folder`, between `start` and `stop`."""

    def __init__(self, folder: Path, *, startup_timeout_s: float) -> None:
        self.folder = checked_project(folder)
        self.base_url = ""
        self._startup_timeout_s = startup_timeout_s
        self._child: ChildProcess | None = None
        self._written: tempfile.TemporaryDirectory[str] | None = None

    @property
    def is_running(self) -> bool:
        """Whether its process lives."""
        return self._child is not None and self._child.exit_code() is None

    @property
    def pid(self) -> int | None:
        """Its process, None before there is one."""
        return None if self._child is None else self._child.pid

    async def start(self) -> str:
        """Start it and wait until it answers; its address.

        Raises: InfraError with the end of its output when it does not come up.
        """
        self._spawn()
        atexit.register(self._kill)
        try:
            await self._until_healthy()
        except BaseException:
            await self.stop()
            raise
        return self.base_url

    async def stop(self) -> None:
        """End the process and all that it has started."""
        if self._child is not None:
            await asyncio.to_thread(self._child.end, grace_s=STOP_TIMEOUT_S)
        self._kill()

    def _kill(self) -> None:
        atexit.unregister(self._kill)
        if self._child is not None:
            self._child.kill()
        if self._written is not None:
            self._written.cleanup()

    def _spawn(self) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(128)
            self.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            self._written = tempfile.TemporaryDirectory(prefix="mettle-openenv-")
            paths = [str(self.folder), str(self.folder.parent), os.environ.get("PYTHONPATH", "")]
            self._child = ChildProcess(
                self._command(listener.fileno()),
                tie="thread",
                output=Path(self._written.name) / "out",
                cwd=self.folder,
                environment={"PYTHONPATH": os.pathsep.join(filter(None, paths))},
                pass_fds=[listener.fileno()],
            )

    def _command(self, fd: int) -> list[str]:
        own = self.folder / ".venv" / "bin" / "python"
        python = str(own) if own.exists() else sys.executable
        app = manifest_of(self.folder).get("app") or DEFAULT_APP
        return [python, "-m", "uvicorn", app, "--fd", str(fd), "--log-level", "warning"]

    async def _until_healthy(self) -> None:
        deadline = time.monotonic() + self._startup_timeout_s
        async with aiohttp.ClientSession(trust_env=False) as http:
            while time.monotonic() < deadline:
                if not self.is_running:
                    raise InfraError(f"the server of {self.folder} ended at once; it wrote: {self._last_words()}")
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                    limit = aiohttp.ClientTimeout(total=2)
                    async with http.get(f"{self.base_url}/health", timeout=limit) as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(POLL_S)
        limit_s = self._startup_timeout_s
        raise InfraError(f"the server of {self.folder} is not up after {limit_s} s; it wrote: {self._last_words()}")

    def _last_words(self) -> str:
        assert self._child is not None, "the process has been started"
        return " ".join(self._child.tail(MAX_OUTPUT_CHARS).split()) or "nothing"


def checked_project(folder: Path) -> Path:
    """The folder of a project.

    Raises: UserError when it is none.
    """
    folder = folder.expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"there is no OpenEnv project at {folder}; give its folder, or base_url for a running server")
    app = manifest_of(folder).get("app") or DEFAULT_APP
    module = folder / Path(*app.partition(":")[0].split(".")).with_suffix(".py")
    if not module.exists():
        raise UserError(f"{folder} is no OpenEnv project: there is no {module.relative_to(folder)} for the app {app!r}")
    return folder


def manifest_of(folder: Path) -> dict[str, Any]:
    """The settings `key: value` at the top level of the project's `openenv.yaml`, as text."""
    path = folder / "openenv.yaml"
    if not path.exists():
        return {}
    pairs = (line.partition(":") for line in path.read_text().splitlines() if line[:1].strip() not in ("", "#", "-"))
    return {key.strip(): value.partition(" #")[0].strip().strip("\"'") for key, _, value in pairs}
