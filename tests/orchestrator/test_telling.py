"""The orchestrator tells of a supervisor that stands still, once, and not of one that beats."""

import asyncio
import json
import os
import time

from mettle.orchestrator.telling import watch_supervisor
from mettle.processes.beats import Beat
from mettle.storage.ledger import Ledger


async def until_told(ledger, number):
    async with asyncio.timeout(30):
        while len(ledger.journal.events()) < number:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_supervisor_that_does_not_beat_is_told_once(run_dir, monkeypatch):
    monkeypatch.setattr("mettle.processes.liveness.TOLD_S", 0.3)
    ledger = Ledger(run_dir.ledger, is_blocking=False)
    frozen = Beat("supervisor", os.getpid(), time.monotonic())
    run_dir.beats.mkdir(exist_ok=True)
    fields = {name: getattr(frozen, name) for name in Beat.__slots__}
    (run_dir.beats / "supervisor.beat").write_text(json.dumps(fields))
    (run_dir.beats / "trainer.beat").write_text(json.dumps({**fields, "name": "trainer"}))  # the supervisor's business
    watching = asyncio.create_task(watch_supervisor(ledger, run_dir, look_s=0.05))
    await until_told(ledger, 1)
    await asyncio.sleep(0.3)
    watching.cancel()
    (event,) = ledger.journal.events()
    assert (event.kind, event.source, event.data["process"]) == ("stall", "orchestrator", "supervisor")
    assert f"supervisor (pid {os.getpid()})" in event.message
    ledger.close()
