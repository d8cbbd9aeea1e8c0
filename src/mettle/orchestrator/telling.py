"""Events of the orchestrator, told from its event loop.

Parts: `tell`; `watch_supervisor`: the supervisor watches everybody else, so somebody else has to watch it.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from mettle.processes.beats import GAP_S, read_beats
from mettle.processes.child import process_state
from mettle.processes.liveness import diagnose
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
    since = last = time.monotonic()
    is_told = False
    while True:
        await asyncio.sleep(look_s)
        now = time.monotonic()
        if now - last > GAP_S:
            since = now  # this process stood still itself
        last = now
        beats = {name: beat for name, beat in read_beats(run_dir.beats).items() if name == SUPERVISOR}
        faults = diagnose(beats, now, watched_s=now - since, state_of=process_state)
        if faults and not is_told:
            fault = faults[0]
            await tell(ledger, "stall", fault.text, process=SUPERVISOR, cause=fault.kind, age_s=round(fault.age_s, 1))
        is_told = bool(faults)
