"""A service of one's own, on this host: started when it is first asked for, gone when it has been idle.

It listens on a Unix socket that only its user can open, in the user's runtime directory. Invariant: of several who ask
at once, one starts it; a directory that others could have made is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from mettle.errors import SandboxError, UserError
from mettle.sandbox.own_limits import limits_hint

IDLE_EXIT_S: Final = 600.0
_START_S: Final = 30.0
_LOOK_S: Final = 0.02


def runtime_directory() -> Path:
    """The user's own directory for sockets. Raises: UserError when somebody else has made it."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(given) / "mettle" if given else Path(tempfile.gettempdir()) / f"mettle-{os.geteuid()}"
    path.mkdir(mode=0o700, parents=bool(given), exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise UserError(f"{path} must be a directory of your own that others cannot enter; remove it, or chmod 700 it")
    return path


def local_socket() -> Path:
    """Where the service of this user listens."""
    return runtime_directory() / "sandbox.sock"


def local_service(settings: dict[str, Any] | None = None) -> str:
    """The URL of this user's service, started if need be. Raises: UserError when it cannot run here."""
    path = local_socket()
    if not _answers(path):
        with _lock(path.with_suffix(".lock")):
            if not _answers(path):
                _start(path, settings or {})
    return f"unix:{path}"


def _start(path: Path, settings: dict[str, Any]) -> None:
    config = {"unix": str(path), "idle_exit_s": IDLE_EXIT_S, **settings}
    log = path.with_suffix(".log")
    command = [sys.executable, "-m", "mettle.sandbox.service", json.dumps(config)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, cwd="/"
        )
    deadline = time.monotonic() + _START_S
    while not _answers(path):
        if process.poll() is not None:
            lines = log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
            why = lines[-1].removeprefix("error: ")
            hint = "" if "ulimit" in why else limits_hint()
            raise UserError(f"no sandbox service could be started here: {why}{hint}")
        if time.monotonic() > deadline:
            process.kill()
            raise SandboxError(f"the sandbox service was not ready after {_START_S:.0f} s; see {log}")
        time.sleep(_LOOK_S)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.settimeout(5.0)
        with contextlib.suppress(OSError):
            trial.connect(str(path))
            return True
    return False


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
