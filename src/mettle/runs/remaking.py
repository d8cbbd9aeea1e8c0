"""A run that ended over a mistake before it had done anything is made anew in its place, by the command that made it.

Parts: `can_be_made_again`, `clear`. Invariant: what somebody waited for (steps, a warm-up, groups of rollouts) is never
cleared.
"""

from __future__ import annotations

import json
import shutil
from contextlib import closing

from mettle.errors import UserError
from mettle.records.tasks import TaskState
from mettle.runs.lock import RunLock, supervisor_pid
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir

_MADE = ("model", "sft", "weights", "batches", "rollouts", "checkpoints", "outside", "beats", "endpoints")
"""Folders that belong to what is given up; the logs stay."""
_UNTOUCHED = {TaskState.PENDING.value, TaskState.IN_FLIGHT.value}


def can_be_made_again(run_dir: RunDir) -> bool:
    """Whether there is a run here that has failed, is not being resumed, and has done nothing."""
    if not run_dir.ledger.exists():
        return False
    with closing(Ledger(run_dir.ledger, is_read_only=True)) as ledger:
        return has_failed_early(run_dir, ledger) and supervisor_pid(run_dir) is None


def has_failed_early(run_dir: RunDir, ledger: Ledger) -> bool:
    """Whether the run has failed and nothing would be lost with it."""
    journal, newest = ledger.journal, ledger.newest_version()
    is_new = (newest is None or newest.weights.version == 0) and ledger.task_counts().keys() <= _UNTOUCHED
    if journal.fact("state") != "failed" or not is_new:
        return False
    is_warming = json.loads(run_dir.config("run").read_text())["warm_up"]["enabled"]
    is_warmed = journal.fact("is_warm") or (run_dir.path / "sft" / "checkpoints").exists()
    return not (is_warming and is_warmed) and journal.fact("branched_from") is None


def clear(run_dir: RunDir) -> None:
    """Remove what the run had; its ledger last, so that where this is killed it can be done again.

    Raises: UserError when somebody runs it, or has run it since it was looked at.
    """
    with RunLock(run_dir):
        with closing(Ledger(run_dir.ledger, is_read_only=True)) as ledger:
            if not has_failed_early(run_dir, ledger):
                path = run_dir.path
                raise UserError(f"the run at {path} has been resumed meanwhile; `mettle rl resume {path}` continues it")
        for name in _MADE:
            folder = run_dir.path / name
            if folder.is_symlink():
                folder.unlink()
            else:
                shutil.rmtree(folder, ignore_errors=True)
        names = sorted(run_dir.path.glob(f"{run_dir.ledger.name}*"), key=lambda file: file.name == run_dir.ledger.name)
        for file in names:
            file.unlink()
