"""The exact memory of processes: each page that several share is divided among them.

The kernel walks a process's address space for it, and lets every fork and mapping of that process go first, so that
code which does nothing else would hold up whoever asks for as long as it likes. So a thread asks, and process 1 goes on
without an answer that does not come at once. Invariant: no more than one thread asks at a time, and it touches nothing
but its own descriptors and its answer.
"""

from __future__ import annotations

import _thread
import contextlib
import os
from typing import Final

from mettle.sandbox.zygote import procfs

_ANSWER_S: Final = 0.05
_ANSWER_BYTES: Final = 1 << 12


class ProportionalSizes:
    """Asks, one question at a time."""

    def __init__(self) -> None:
        self._asking: _thread.LockType | None = None  # held while the thread is at work

    def sizes(self, resident: dict[int, int]) -> dict[int, int]:
        """The exact bytes of these processes; what was not told in time stays what it is in `resident`."""
        if self._asking is not None and not self._asking.acquire(blocking=False):
            return resident
        answers: dict[int, int] = {}
        files = _open(resident)
        self._asking = _thread.allocate_lock()
        self._asking.acquire()
        try:
            _thread.start_new_thread(_ask, (files, answers, self._asking))
        except RuntimeError:  # no room for one more
            _close(files)
            self._asking.release()
        if self._asking.acquire(timeout=_ANSWER_S):
            self._asking = None
        return {**resident, **answers}


def _open(pids: dict[int, int]) -> dict[int, int]:
    """The descriptors to read, by process, without those that are gone."""
    files = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            files[pid] = procfs.open_file(pid, "smaps_rollup")
    return files


def _ask(files: dict[int, int], answers: dict[int, int], asking: _thread.LockType) -> None:
    try:
        for pid, descriptor in files.items():
            with contextlib.suppress(OSError, StopIteration):  # it has ended
                lines = os.read(descriptor, _ANSWER_BYTES).splitlines()
                answers[pid] = next(int(line.split()[1]) * 1024 for line in lines if line.startswith(b"Pss:"))
    finally:
        _close(files)
        asking.release()


def _close(files: dict[int, int]) -> None:
    for descriptor in files.values():
        os.close(descriptor)
