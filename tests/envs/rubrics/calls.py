"""What workers are asked to run in tests of the worker processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any


def double(value: int) -> int:
    return 2 * value


def pid() -> int:
    return os.getpid()


def spin() -> None:
    while True:
        try:
            while True:
                pass
        except Exception:  # what a grader's own handler would swallow
            continue


def deaf() -> None:
    signal.signal(signal.SIGPROF, signal.SIG_IGN)
    while True:
        time.sleep(1)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def shout() -> str:
    print("not an answer")
    sys.stdout.flush()
    os.write(1, b"neither is this")
    return "x" * 3_000_000


def fails() -> None:
    raise TimeoutError("my own")


def lambdas() -> Any:
    return lambda: 1


def hungry() -> int:
    return len(bytearray(1 << 30))


def quits() -> None:
    sys.exit(3)
