"""What is seen of processes from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from mettle.sandbox.zygote import watch

_ONLY_A_THREAD_IS_LEFT = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_whose_first_thread_has_ended_still_runs():
    with subprocess.Popen([sys.executable, "-c", _ONLY_A_THREAD_IS_LEFT]) as process:
        try:
            while _state(process.pid) != "Z":
                assert process.poll() is None
                time.sleep(0.01)
            assert process.pid in watch.live_descendants(os.getpid())
        finally:
            process.kill()
    assert process.pid not in watch.live_descendants(os.getpid())


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
