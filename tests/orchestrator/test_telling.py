"""The orchestrator tells of a supervisor that stands still, once, wakes it, and ends it where it does not wake."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

from mettle.orchestrator.telling import watch_supervisor
from mettle.processes.beats import Beat
from mettle.storage.ledger import Ledger


async def until_told(ledger, number):
    async with asyncio.timeout(30):
        while len(ledger.journal.events()) < number:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def beat_of_the_supervisor(run_dir, pid):
    """Write a beat of this moment, the last one; returns its fields."""
    last = Beat("supervisor", pid, time.monotonic())
    run_dir.beats.mkdir(exist_ok=True)
    fields = {name: getattr(last, name) for name in Beat.__slots__}
    (run_dir.beats / "supervisor.beat").write_text(json.dumps(fields))
    return fields


async def test_a_supervisor_that_does_not_beat_is_told_once(run_dir, monkeypatch):
    monkeypatch.setattr("mettle.processes.liveness.TOLD_S", 0.3)
    ledger = Ledger(run_dir.ledger, is_blocking=False)
    fields = beat_of_the_supervisor(run_dir, os.getpid())
    (run_dir.beats / "trainer.beat").write_text(json.dumps({**fields, "name": "trainer"}))  # the supervisor's business
    watching = asyncio.create_task(watch_supervisor(ledger, run_dir, look_s=0.05))
    await until_told(ledger, 1)
    await asyncio.sleep(0.3)
    watching.cancel()
    (event,) = ledger.journal.events()
    assert (event.kind, event.source, event.data["process"]) == ("stall", "orchestrator", "supervisor")
    assert f"supervisor (pid {os.getpid()})" in event.message
    ledger.close()


async def test_a_supervisor_that_was_stopped_is_woken_and_one_that_does_not_wake_is_ended(run_dir, monkeypatch):
    """The one of this test runs again when it is told to, and never beats."""
    monkeypatch.setattr("mettle.processes.liveness.TOLD_S", 0.2)
    monkeypatch.setattr("mettle.processes.liveness.STOPPED_RESTART_S", 0.4)
    monkeypatch.setattr("mettle.processes.liveness.SILENT_RESTART_S", 0.4)
    monkeypatch.setattr("mettle.orchestrator.telling.SILENT_RESTART_S", 1.0)
    ledger = Ledger(run_dir.ledger, is_blocking=False)
    woken = "import signal, sys, time\nsignal.signal(signal.SIGCONT, lambda *_: print('woken', flush=True))\n"
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", woken + "print('there', flush=True)\nwhile True: time.sleep(1)"],
        stdout=subprocess.PIPE, text=True,
    ) as stopped:  # fmt: skip
        assert stopped.stdout is not None
        assert stopped.stdout.readline() == "there\n"
        stopped.send_signal(signal.SIGSTOP)
        beat_of_the_supervisor(run_dir, stopped.pid)
        watching = asyncio.create_task(watch_supervisor(ledger, run_dir, look_s=0.05))
        await until_told(ledger, 3)
        watching.cancel()
        assert stopped.wait(30) == -signal.SIGKILL
        assert stopped.stdout.read() == "woken\n"
    told = ledger.journal.events()
    assert [event.kind for event in told] == ["stall", "recovery", "recovery"]
    assert f"told the supervisor (pid {stopped.pid}) to continue" in told[1].message
    assert "mettle rl resume goes on" in told[2].message
    ledger.close()


async def test_a_supervisor_that_beats_again_is_left_alone(run_dir, monkeypatch):
    monkeypatch.setattr("mettle.processes.liveness.TOLD_S", 0.2)
    monkeypatch.setattr("mettle.processes.liveness.SILENT_RESTART_S", 3600.0)
    ledger = Ledger(run_dir.ledger, is_blocking=False)
    beat_of_the_supervisor(run_dir, os.getpid())  # which a signal would end
    watching = asyncio.create_task(watch_supervisor(ledger, run_dir, look_s=0.05))
    await until_told(ledger, 1)
    beat_of_the_supervisor(run_dir, os.getpid())
    await until_told(ledger, 2)
    watching.cancel()
    assert [event.kind for event in ledger.journal.events()] == ["stall", "stall"]
    ledger.close()
