"""Cutting a ledger back to a step: what it would say had nothing happened after that step was trained.

A task that was drawn by the time that the step's batch was shipped stays drawn, so that the curriculum goes on after
it. What had been scored by then and was not in a batch yet waits for the next one again, with the rollouts that it has;
what was still under way is pending. Metrics, evaluations, versions and events of later are gone. Invariant: what is
left is a ledger like any other, which a run is resumed from.
"""

from __future__ import annotations

import sqlite3
from typing import Any

from mettle.errors import StorageError
from mettle.storage.ledger import Ledger

KEPT_FACTS = ("datasets", "env_ids", "is_warm", "max_staleness", "warm_up", "warm_up_goal")
"""Named facts that hold of every run with these first steps; all others are of one run."""


def rewind(ledger: Ledger, step: int) -> dict[str, Any]:
    """Forget what came after `step` (0: after the initial policy), in one transaction; the orchestrator's half of the
    checkpoint of that step, empty for 0.

    Raises: StorageError when the step has not been trained.
    """
    row = ledger.batch(step)
    if step > 0 and (row is None or row.trained_at is None):
        raise StorageError(f"step {step} has not been trained")
    drawn: dict[str, int] = {} if row is None else row.orchestrator_state["drawn"]
    shipped_at = 0.0 if row is None else row.shipped_at
    initial = ledger.version(0)
    ended_at = row.trained_at if row is not None else None if initial is None else initial.published_at
    with ledger.database.transaction() as connection:
        _cut_tasks(connection, step, sum(drawn.values()), shipped_at)
        for table in ("batches", "trained", "metrics"):
            connection.execute(f"DELETE FROM {table} WHERE step > ?", (step,))
        connection.execute("DELETE FROM versions WHERE version > ?", (step,))
        late = "step > ? OR (step = ? AND kind = 'final')"  # the run has another end now
        connection.execute(
            f"DELETE FROM rollouts WHERE eval_id IN (SELECT eval_id FROM evals WHERE {late})", (step, step)
        )
        connection.execute(f"DELETE FROM evals WHERE {late}", (step, step))
        connection.execute("DELETE FROM events WHERE at > ?", (ended_at or 0.0,))
        connection.execute("DELETE FROM processes")
        connection.execute(f"DELETE FROM meta WHERE key NOT IN ({', '.join('?' * len(KEPT_FACTS))})", KEPT_FACTS)
    return {} if row is None else row.orchestrator_state


def _cut_tasks(connection: sqlite3.Connection, step: int, num_drawn: int, shipped_at: float) -> None:
    """Draws are numbered from 1 without gaps: the first `num_drawn` had been made when the batch was shipped."""
    was_settled = "(step <= ? OR (state = 'dropped' AND updated_at <= ?))"
    was_scored = "draw_id IN (SELECT draw_id FROM groups WHERE created_at <= ?)"
    connection.execute("DELETE FROM rollouts WHERE draw_id > ?", (num_drawn,))
    connection.execute("DELETE FROM groups WHERE draw_id > ?", (num_drawn,))
    connection.execute("DELETE FROM tasks WHERE draw_id > ?", (num_drawn,))
    connection.execute(
        f"UPDATE tasks SET state = CASE WHEN {was_scored} THEN 'scored' ELSE 'pending' END, reason = NULL, step = NULL"
        f" WHERE NOT coalesce({was_settled}, 0)",
        (shipped_at, step, shipped_at),
    )
    unscored = "draw_id IN (SELECT draw_id FROM tasks WHERE state = 'pending')"
    connection.execute(f"DELETE FROM rollouts WHERE {unscored}")
    connection.execute(f"DELETE FROM groups WHERE {unscored}")
    connection.execute(
        "UPDATE rollouts SET step = NULL WHERE draw_id IN (SELECT draw_id FROM tasks WHERE state = 'scored')"
    )
