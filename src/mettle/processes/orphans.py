"""A process that ends when the one that started it does, also when that was killed.

Parts: two ways. `tie_to_thread`, run in the child before its program, asks the kernel for SIGKILL and works for any
program; but the kernel sends it when the *thread* that started the child ends, so it is for who starts children from a
thread that lives as long as they do. `end_with_parent`, called by a Python program that takes part, watches a pipe
whose other end only the parent holds, and does not care for threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading

WATCHED_FD = "METTLE_PARENT_FD"
"""The environment variable that names the pipe's end in the child."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def tie_to_thread(parent: int) -> None:
    """Be killed when the thread that started this process ends. `parent` is the process that it belongs to."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # The parent died before the line above took effect.
            os.kill(os.getpid(), signal.SIGKILL)


def end_with_parent() -> None:
    """Be killed when the parent's end of the pipe is closed, in the middle of a call that listens to nothing too."""
    import fcntl

    if (number := os.environ.pop(WATCHED_FD, None)) is None:
        return
    pipe = int(number)
    os.set_inheritable(pipe, False)
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            if not os.read(pipe, 1):  # it was closed before the kernel was asked to tell
                os._exit(1)
        return
    threading.Thread(target=lambda: (os.read(pipe, 1), os._exit(1)), daemon=True).start()
