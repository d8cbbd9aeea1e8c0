"""Events of the orchestrator, told from its event loop.

Parts: `tell`; `watch_supervisor`: the supervisor watches everybody else, so somebody else has to watch it.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from mettle.processes.beats import read_beats
from mettle.processes.child import process_state
from mettle.processes.liveness import FROZEN, Looks, diagnose
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
    """Tell when the supervisor stands still, until cancelled. It is not ended: the kernel would end the run with it."""
    looks = Looks()
    is_told = False
    while True:
        await asyncio.sleep(look_s)
        now = time.monotonic()
        looks.look(now)
        beats = {name: beat for name, beat in read_beats(run_dir.beats).items() if name == SUPERVISOR}
        faults = diagnose(beats, now, looked_s=looks.seconds_since, state_of=process_state)
        frozen = [fault for fault in faults if fault.kind == FROZEN]  # of a blocked loop its own thread tells
        for fault in frozen if not is_told else []:
            await tell(ledger, "stall", fault.text, process=SUPERVISOR, cause=fault.kind, age_s=round(fault.age_s, 1))
        is_told = bool(frozen)
