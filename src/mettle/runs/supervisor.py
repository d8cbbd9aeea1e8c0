"""The supervisor of a run on one machine: starts its processes, restarts what dies, ends what is done.

One loop, driven by the caller (`for _ in supervisor.ticks()`), so that a terminal can show progress between ticks. A
process that crashes is started again after a growing pause, `max_restarts` times a run; exit code 2 or 3 is the
process's own word that starting again is useless, and three crashes in a row right after the start say the same.
Invariant: when `ticks` ends, no process of the run is left.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from mettle.errors import StorageError
from mettle.processes.child import explain_exit, process_memory_bytes
from mettle.processes.managed import ManagedProcess, ProcessSpec
from mettle.runs.watchdog import Watchdog, wait_graph
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir

logger = logging.getLogger(__name__)

TICK_S = 0.1
CHECK_S = 1.0
STOP_GRACE_S = 20.0
FINAL_CODES = frozenset({2, 3})
QUICK_CRASH_S = 15.0
MAX_QUICK_CRASHES = 3
RESTART_PAUSES_S = (0.1, 0.5, 1.0, 2.0, 5.0)


@dataclass(slots=True)
class Slot:
    """A process and its history in this run."""

    process: ManagedProcess
    restarts: int = 0
    quick_crashes: int = 0
    start_at: float = 0.0
    state: str = "waiting"


class Supervisor:
    """Runs `specs` until the one named `main` ends well, one of them cannot go on, or `stop` is called."""

    def __init__(
        self, run_dir: RunDir, ledger: Ledger, specs: Sequence[ProcessSpec], *, main: str, max_restarts: int = 8
    ) -> None:
        self._run_dir = run_dir
        self._ledger = ledger
        self._main = main
        self._max_restarts = max_restarts
        self._slots = {spec.name: Slot(ManagedProcess(spec, run_dir.logs / f"{spec.name}.out")) for spec in specs}
        self._watchdog = Watchdog()
        self._is_stopping = False
        self.peak_memory_bytes = 0
        self.failure: str | None = None
        self.failure_code = 1

    def process(self, name: str) -> ManagedProcess:
        """One of the run's processes."""
        return self._slots[name].process

    def stop(self) -> None:
        """Ask the loop to end the run cleanly."""
        self._is_stopping = True

    def ticks(self) -> Iterator[None]:
        """Start everything and yield several times a second until the run has ended; then nothing is left running."""
        next_check = 0.0
        try:
            while not self._is_over():
                now = time.monotonic()
                for name, slot in self._slots.items():
                    self._attend(name, slot, now)
                if now >= next_check:
                    next_check = now + CHECK_S
                    self._check_waits()
                    self._measure_memory()
                yield
                time.sleep(TICK_S)
        finally:
            self._end_all()

    def _is_over(self) -> bool:
        return self._is_stopping or self.failure is not None or self._slots[self._main].state == "done"

    def _attend(self, name: str, slot: Slot, now: float) -> None:
        if slot.state in ("waiting", "restarting"):
            if now >= slot.start_at and all(self._is_satisfied(other) for other in slot.process.spec.after):
                self._start(name, slot)
            return
        if slot.state == "done":
            return
        code = slot.process.exit_code()
        if code is not None:
            self._ended(name, slot, code, now)
        elif slot.state == "starting" and slot.process.is_ready():
            self._set_state(name, slot, "running")
        elif slot.state == "starting" and now - slot.process.started_at > slot.process.spec.ready_timeout_s:
            self._event("not_ready", f"{name} is not ready after {slot.process.spec.ready_timeout_s:.0f} s: ended")
            slot.process.signal(signal.SIGKILL)

    def _is_satisfied(self, name: str) -> bool:
        slot = self._slots[name]
        return slot.state == ("done" if slot.process.spec.ready_file is None else "running")

    def _start(self, name: str, slot: Slot) -> None:
        slot.process.start()
        self._set_state(name, slot, "starting")
        if slot.process.spec.ready_file is None:
            self._set_state(name, slot, "running")

    def _ended(self, name: str, slot: Slot, code: int, now: float) -> None:
        self._ledger.journal.forget_waits(slot.process.pid or -1)
        if code == 0 and not slot.process.spec.is_service:
            self._set_state(name, slot, "done", code)
            return
        sentence = explain_exit(name, code, slot.process.last_line() if code > 0 else "")
        is_quick = code > 0 and now - slot.process.started_at < QUICK_CRASH_S
        slot.quick_crashes = slot.quick_crashes + 1 if is_quick else 0
        if code in FINAL_CODES or slot.restarts >= self._max_restarts or slot.quick_crashes >= MAX_QUICK_CRASHES:
            self.failure = slot.process.last_line() if code in FINAL_CODES else f"{sentence}; {slot.restarts} restarts"
            self.failure_code = code
            self._set_state(name, slot, "failed", code)
            self._event("failed", sentence)
            return
        pause = RESTART_PAUSES_S[min(slot.restarts, len(RESTART_PAUSES_S) - 1)]
        slot.restarts += 1
        slot.start_at = now + pause
        self._set_state(name, slot, "restarting", code)
        self._event("restart", f"{sentence}; restarting in {pause:g} s", process=name, code=code)

    def _check_waits(self) -> None:
        waits = self._ledger.journal.waits()
        now = time.time()
        for stall in self._watchdog.check(waits, now):
            graph = "; ".join(wait_graph(waits, now))
            self._event("stall", f"{stall.wait.owner} has waited {stall.waited_s:.0f} s: {graph}")
            slot = self._slots.get(stall.restart or "")
            if slot is not None and slot.process.exit_code() is None:
                self._event("recovery", f"ending {stall.restart} so that it starts afresh", process=stall.restart)
                slot.process.signal(signal.SIGKILL)

    def _measure_memory(self) -> None:
        total = process_memory_bytes(os.getpid()) + sum(s.process.memory_bytes() for s in self._slots.values())
        self.peak_memory_bytes = max(self.peak_memory_bytes, total)

    def _end_all(self) -> None:
        if self._slots[self._main].state != "done":
            with self._writing():
                self._ledger.journal.set_fact("state", "stopping" if self.failure is None else "failed")
        running = [slot for slot in self._slots.values() if slot.process.exit_code() is None and slot.process.pid]
        for slot in running:
            slot.process.signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_GRACE_S
        for slot in running:
            if slot.process.wait(max(0.1, deadline - time.monotonic())) is None:
                slot.process.signal(signal.SIGKILL)
                slot.process.wait(5.0)
        with self._writing():
            for slot in running:
                self._ledger.journal.forget_waits(slot.process.pid or -1)
            for name, slot in self._slots.items():
                if slot.state not in ("done", "failed"):
                    self._set_state(name, slot, "stopped", slot.process.exit_code())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Processes end also where the disk no longer takes a word about it."""
        try:
            yield
        except StorageError as error:
            logger.error("%s", error)
            self.failure = self.failure or str(error)
            self.failure_code = StorageError.exit_code

    def _set_state(self, name: str, slot: Slot, state: str, code: int | None = None) -> None:
        slot.state = state
        self._ledger.journal.record_process(name, state, pid=slot.process.pid, restarts=slot.restarts, exit_code=code)
        logger.info("%s is %s", name, state, extra={"pid": slot.process.pid, "exit_code": code})

    def _event(self, kind: str, message: str, **data: object) -> None:
        logger.warning(message, extra={"kind": kind})
        self._ledger.journal.event("supervisor", kind, message, **data)


class StopSignals:
    """Within the block, Ctrl-C and SIGTERM call `on_stop` once; a second Ctrl-C raises KeyboardInterrupt."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.is_interrupted = False

    def __enter__(self) -> StopSignals:
        self._previous = {n: signal.signal(n, self._handle) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_interrupted:
            raise KeyboardInterrupt
        self.is_interrupted = True
        self._supervisor.stop()
