"""One child process: started in a session of its own, tied to its parent's life, asked to end and then ended.

Parts: `ChildProcess`; `python_module` (the command for a module of ours), `how_it_ended`, `last_line`,
`memory_bytes_of`; `is_alive` and `process_state`, of any process. Invariants: a child and what it starts end with it
(signals go to the whole session); one that has ended is reaped and its pipes are closed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Literal

import mettle
from mettle.processes.fork_server import AdoptedProcess, ForkServer
from mettle.processes.orphans import WATCHED_FD, tie_to_thread

THREAD_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""One thread a process: with two on busy cores decoding was 4 to 15 times slower."""
Tie = Literal["thread", "pipe"]
"""How a child ends with its parent; see `orphans`."""
TAIL_BYTES = 4096
_EXITING = 0x4
"""The kernel's flag of a process that is being taken down (PF_EXITING)."""
WARNING = re.compile(r"^(\S+:\d+: )?\w*Warning: ")


class ChildProcess:
    """`command`, started. What it prints goes to the end of `output`, to pipes, or where this process prints.

    With `tie="pipe"` the program has to call `orphans.end_with_parent`.
    Raises: OSError when it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        tie: Tie,
        output: Path | None = None,
        has_pipes: bool = False,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._output = output
        self._popen: subprocess.Popen[bytes] | AdoptedProcess
        watched, self._held = os.pipe() if tie == "pipe" else (-1, -1)
        added = {WATCHED_FD: str(watched)} if tie == "pipe" else {}
        try:
            with contextlib.ExitStack() as files:
                printed: int | IO[bytes] | None = subprocess.PIPE if has_pipes else None
                if output is not None:
                    output.parent.mkdir(parents=True, exist_ok=True)
                    printed = files.enter_context(output.open("ab"))
                self._popen = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE if has_pipes else subprocess.DEVNULL,
                    stdout=printed,
                    stderr=None if output is None else subprocess.STDOUT,
                    bufsize=0,
                    cwd=cwd,
                    env={**os.environ, **(environment or {}), **added},
                    pass_fds=[*pass_fds, *([watched] if tie == "pipe" else [])],
                    start_new_session=True,
                    preexec_fn=functools.partial(tie_to_thread, os.getpid()) if tie == "thread" else None,
                )
        except BaseException:
            self._release()
            raise
        finally:
            if watched >= 0:
                os.close(watched)

    @classmethod
    def forked(
        cls, server: ForkServer, module: str, *arguments: str, output: Path, environment: Mapping[str, str]
    ) -> ChildProcess:
        """One that runs a module of ours, tied to this process and begun with what `server` has imported.

        Raises: OSError when the fork server can fork no more.
        """
        child = cls.__new__(cls)
        child._output, child._held = output, -1
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("ab") as file:
            child._popen = server.fork(module, arguments, {**os.environ, **environment}, file.fileno())
        return child

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def stdin(self) -> IO[bytes]:
        assert self._popen.stdin is not None, "it was started without pipes"
        return self._popen.stdin

    @property
    def stdout(self) -> IO[bytes]:
        assert self._popen.stdout is not None, "it was started without pipes"
        return self._popen.stdout

    def exit_code(self) -> int | None:
        """None while the process runs; negative is the signal that ended it."""
        return self._popen.poll()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and the children it may have."""
        if self._popen.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the end; None when it has not come in time."""
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self, *, grace_s: float = 5.0) -> None:
        """Ask the process to end, and end it if it does not."""
        self.signal(signal.SIGTERM)
        self.wait(grace_s)
        self.kill()

    def kill(self) -> None:
        """End it now, and what it has left behind in its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()
        self._release()

    def forget(self) -> None:
        """In a fork of this process: the child is the parent's."""
        self._popen.returncode = self._popen.returncode or 0
        self._release()

    def tail(self, max_chars: int = TAIL_BYTES) -> str:
        """The end of what it has printed into `output`."""
        return "" if self._output is None else _end_of(self._output)[-max_chars:]

    def _release(self) -> None:
        popen = getattr(self, "_popen", None)
        for pipe in (popen.stdin, popen.stdout) if popen is not None else ():
            if pipe is not None:
                pipe.close()
        if self._held >= 0:
            os.close(self._held)
            self._held = -1


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs a module in this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def import_path() -> str:
    """Where a new interpreter finds this very package, before anything of that name elsewhere."""
    here = str(Path(mettle.__file__).resolve().parents[1])
    return os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def explain_exit(name: str, code: int, line: str) -> str:
    """One sentence about how a process ended, with what it said last."""
    return f"{name} {how_it_ended(code)}" + (f": {line}" if line else "")


def last_line(path: Path) -> str:
    """The last line of a file that says something; empty when there is none.

    What Python warns of while it ends, with the indented source below, comes after the reason and is none.
    """
    lines = _end_of(path).rstrip().splitlines()
    said = [line for line in lines if not line.startswith((" ", "\t")) and not WARNING.match(line)]
    return (said or lines or [""])[-1].strip()


def process_memory_bytes(pid: int) -> int:
    """Proportional set size of a process; 0 when it is gone or the host does not say."""
    try:
        with Path(f"/proc/{pid}/smaps_rollup").open() as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:")), 0)
    except OSError:
        return 0


def process_cpu_s(pid: int) -> float:
    """Processor time of a process and of its children that have ended; 0 when it is gone or the host does not say."""
    return sum(map(int, _stat(pid)[11:15])) / os.sysconf("SC_CLK_TCK")


def is_alive(pid: int | None) -> bool | None:
    """Whether a process of this machine has the pid; None without a pid."""
    if pid is None or pid <= 0:
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def process_state(pid: int) -> str:
    """The kernel's letter for a process (T: stopped by a signal, t: traced); empty when it has ended, reaped or not."""
    fields = _stat(pid)
    return fields[0] if fields and fields[0] not in "ZX" else ""


def is_ending(pid: int) -> bool:
    """True of a process that has been sent SIGKILL or is on its way out, and still holds its files and locks."""
    stat = _stat(pid)
    if not stat:
        return False
    if stat[0] in "ZX" or int(stat[6]) & _EXITING:
        return True
    with contextlib.suppress(OSError, ValueError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
        return any(mask >> (signal.SIGKILL - 1) & 1 for mask in pending)
    return False


def process_parent(pid: int) -> int:
    """Who has to wait for a process; 0 when it is gone."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def descendants(pid: int) -> list[int]:
    """All processes below a process, children before their own; none where it is gone or the host does not say."""
    found = [pid]
    for parent in found:  # grows while it is walked
        with contextlib.suppress(OSError, ValueError):
            for file in Path(f"/proc/{parent}/task").glob("*/children"):
                found += [int(child) for child in file.read_text().split()]
    return found[1:]


def _stat(pid: int) -> list[str]:
    """What the kernel says of a process, from its state on; nothing when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _end_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
