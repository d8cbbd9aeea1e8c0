"""The machine that a supervisor runs on: its clocks, its process table, its disk.

Parts: `HostMachine` (the protocol, which the simulator keeps too), `ThisMachine`. Invariant: the supervisor, its
watchdog and its launchers ask time and processes of nobody else, so that a history in simulated time takes the same
decisions.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from mettle.processes.child import process_state


class HostMachine(Protocol):
    """What a supervisor asks of the machine."""

    @property
    def pid(self) -> int:
        """The supervisor's own."""
        ...

    def now(self) -> float:
        """Monotonic seconds, comparable between the processes of this machine."""
        ...

    def wall(self) -> float:
        """Seconds since 1970, as somebody has set them."""
        ...

    def sleep(self, seconds: float) -> None:
        """Pass the time."""
        ...

    def state_of(self, pid: int) -> str:
        """The kernel's letter for a process (T: stopped by a signal, t: traced); empty when it has ended."""
        ...

    def kill(self, pid: int) -> None:
        """End a process now; one that has ended is no error."""
        ...

    def free_bytes(self, path: Path) -> int:
        """Free space where `path` is. Raises: OSError."""
        ...


class ThisMachine:
    """The one that this process runs on."""

    @property
    def pid(self) -> int:
        return os.getpid()

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def state_of(self, pid: int) -> str:
        return process_state(pid)

    def kill(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def free_bytes(self, path: Path) -> int:
        return shutil.disk_usage(path).free
