"""A run whose engine is two processes, one of which is killed: every account holds, as with one engine."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from stories import Run, published

from mettle.processes.child import process_state


def children(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in path.read_text().split()]
    return found


@pytest.mark.nightly
def test_a_run_with_two_replicas_goes_on_when_one_is_killed(tmp_path: Path) -> None:
    run = Run(tmp_path, "--inference.replicas", "2", steps=2)
    try:
        run.wait_for(published(1))
        server = run.read(lambda ledger: {p.name: p.pid for p in ledger.journal.processes()}, {})["inference"]
        replicas = children(server)
        assert len(replicas) == 2
        os.kill(replicas[0], signal.SIGKILL)
        assert run.end() == 0, run.said()
        run.check_accounts()
        assert not any(process_state(pid) for pid in replicas)
    finally:
        run.close()
