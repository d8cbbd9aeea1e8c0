"""What a person sees of a run: lines where there is no terminal, a panel where there is one, each trouble once."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from mettle.runs import progress as module
from mettle.runs.progress import RunProgress
from mettle.storage.ledger import Ledger


@pytest.fixture
def ledger(tmp_path):
    made = Ledger(tmp_path / "run.db")
    yield made
    made.close()


@pytest.fixture
def warming_up(ledger):
    ledger.journal.record_process("sft", "running", pid=1, restarts=0, exit_code=None)
    ledger.journal.set_fact("warm_up_goal", {"reward": 0.7, "max_steps": 400})
    return ledger


@pytest.fixture
def clock(monkeypatch):
    """A clock of this module's own: the process's may have servers of other tests asleep on it."""
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_log_says_how_far_the_warm_up_is_and_how_long_it_takes_at_most(warming_up, ledger, clock, capsys):
    with RunProgress(ledger, 400, title="t") as shown:
        for step in range(1, 41):
            clock[0] += 1.0
            ledger.journal.record_metrics(step, {"sft/loss": 1.0})
            if step >= 30:
                ledger.journal.record_metrics(step, {"sft/reward": 0.35})
            shown.update()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith(
        "warming up the policy on demonstrations: step 1 of at most 400, not measured yet, ends at 0.7"
    )
    assert lines[-1].endswith(": step 31 of at most 400, reward 0.35, ends at 0.7, at most 6 min left")


def test_a_terminal_sees_the_warm_up_as_a_bar(warming_up, ledger, clock):
    shown = RunProgress(ledger, 400, title="t")
    ledger.journal.record_metrics(40, {"sft/loss": 1.0, "sft/reward": 0.35})
    screen = Console(file=io.StringIO(), width=120)
    screen.print(shown._panel(module.read_snapshot(ledger, 400), 10.0))
    text = screen.file.getvalue()
    assert "40/400" in text
    assert "step 40 of at most 400, reward 0.35, ends at 0.7" in text


def test_training_says_how_long_it_still_takes(ledger, clock, monkeypatch, capsys):
    made = iter(range(1, 1000))
    monkeypatch.setattr(
        module,
        "read_snapshot",
        lambda ledger, max_steps, curve=None: module.ProgressSnapshot(
            "training", next(made), max_steps, [0.5], [], {"reward/mean": 0.5}
        ),
    )
    with RunProgress(ledger, 400, title="t") as shown:
        for _ in range(40):
            clock[0] += 1.0
            shown.update()
    last = capsys.readouterr().err.splitlines()[-1]
    assert ": step 31/400, reward 0.500, about 6 min left" in last


def test_a_log_says_once_where_the_page_is(ledger, clock, capsys):
    with RunProgress(ledger, 400, title="t") as shown:
        for page in (None, "http://127.0.0.1:5/runs/r", "http://127.0.0.1:5/runs/r"):
            shown.page = page
            clock[0] += 1.0
            shown.update()
    said = [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()]
    assert [line for line in said if "page" in line] == ["its page is http://127.0.0.1:5/runs/r"]


def test_the_curve_of_a_long_run_has_few_points_that_say_the_same(ledger, monkeypatch):
    monkeypatch.setattr(module, "CURVE_POINTS", 4)
    curve, seen = module.RewardCurve(), []
    for step in range(1, 51):
        ledger.journal.record_metrics(step, {"reward/mean": float(step)})
        points = module.read_snapshot(ledger, 50, curve=curve).rewards
        assert points == module.read_snapshot(ledger, 50).rewards, "read at once or as it grows"
        seen.append(len(points))
        assert points == sorted(points)
    assert (seen[:9], max(seen)) == ([1, 2, 3, 4, 5, 6, 7, 4, 5], 8)
    assert points == [4.5, 12.5, 20.5, 28.5, 36.5, 44.5, 49.5]
    assert curve.read(ledger.journal) == points, "nothing is read twice"


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
