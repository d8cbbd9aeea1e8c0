"""What a person at the terminal is told: each trouble once, however many events came before it."""

import pytest

from mettle.runs.progress import RunProgress
from mettle.storage.ledger import Ledger


@pytest.fixture
def ledger(tmp_path):
    made = Ledger(tmp_path / "run.db")
    yield made
    made.close()


def notes_of(capsys):
    return [line.partition("note: ")[2] for line in capsys.readouterr().err.splitlines() if "note: " in line]


def test_what_others_tell_is_shown_once_and_in_a_long_run_too(ledger, capsys):
    with ledger.database.transaction():
        for number in range(1500):
            ledger.journal.event("trainer", "resumed", f"old {number}")
        ledger.journal.event("orchestrator", "worker_died", "of the life before")
    notes = []
    with RunProgress(ledger, 10, title="run", notes=notes) as progress:
        progress.update(is_last=True)
        assert notes_of(capsys) == []
        with ledger.database.transaction():
            for number in range(1500):
                ledger.journal.event("trainer", "resumed", f"new {number}")
            ledger.journal.event("orchestrator", "worker_died", "worker 7 was ended by SIGKILL")
            ledger.journal.event("supervisor", "stall", "the supervisor says this itself")
        notes.append("trainer is stopped by a signal")
        progress.update(is_last=True)
        assert notes_of(capsys) == ["trainer is stopped by a signal", "worker 7 was ended by SIGKILL"]
        progress.update(is_last=True)
        assert notes_of(capsys) == []
