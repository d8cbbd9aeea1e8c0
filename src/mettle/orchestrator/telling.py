"""Events of the orchestrator, told from its event loop.

Parts: `tell`; `watch_supervisor`: the supervisor watches everybody else, so somebody else has to watch it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

from mettle.processes.beats import read_beats
from mettle.processes.child import process_state
from mettle.processes.liveness import FROZEN, SILENT_RESTART_S, Fault, Looks, diagnose
from mettle.storage.database import transaction_soon
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir

SUPERVISOR = "supervisor"
LOOK_S = 2.0


async def tell(ledger: Ledger, kind: str, message: str, **data: Any) -> None:
    """Record an event as soon as no other process is writing."""
    async with transaction_soon(ledger.database):
        ledger.journal.event("orchestrator", kind, message, **data)


async def watch_supervisor(ledger: Ledger, run_dir: RunDir, *, look_s: float = LOOK_S) -> None:
    """Tell when the supervisor stands still, wake it, and end it where it does not wake; until cancelled.

    With it the kernel ends the run's other processes, this one included, and `mettle rl resume` goes on from there: a
    run that nobody watches would stand for ever at the first fault of any of them.
    """
    looks, care = Looks(), _Care()
    while True:
        await asyncio.sleep(look_s)
        now = time.monotonic()
        looks.look(now)
        beats = {name: beat for name, beat in read_beats(run_dir.beats).items() if name == SUPERVISOR}
        faults = diagnose(beats, now, looked_s=looks.seconds_since, state_of=process_state)
        frozen = [fault for fault in faults if fault.kind == FROZEN]  # of a blocked loop its own thread tells
        if not frozen:
            care = _Care()
        for fault in frozen:
            await _care_for(fault, care, ledger)


@dataclass(slots=True)
class _Care:
    """What was done about a supervisor that stands still."""

    is_told: bool = False
    woken_at_s: float | None = None
    """How long it had stood when it was told to continue."""


async def _care_for(fault: Fault, care: _Care, ledger: Ledger) -> None:
    facts = {"process": SUPERVISOR, "cause": fault.kind, "age_s": round(fault.age_s, 1)}
    if not care.is_told:
        care.is_told = True
        await tell(ledger, "stall", fault.text, **facts)
    elif care.woken_at_s is None and fault.is_due:
        care.woken_at_s = fault.age_s
        await tell(ledger, "recovery", f"told the supervisor (pid {fault.pid}) to continue (SIGCONT)", **facts)
        os.kill(fault.pid, signal.SIGCONT)
    elif care.woken_at_s is not None and fault.age_s - care.woken_at_s >= SILENT_RESTART_S:
        text = (
            f"the supervisor (pid {fault.pid}) did not wake and is ended, and the run with it: mettle rl resume goes on"
        )
        await tell(ledger, "recovery", text, **facts)
        os.kill(fault.pid, signal.SIGKILL)
