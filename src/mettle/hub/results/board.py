"""The pushed evaluations that may stand on an environment's leaderboard, read for that alone: a board has up to a
thousand, and most of what a row holds is not on it."""

from __future__ import annotations

from sqlalchemy import Connection, select

from mettle.hub import tables
from mettle.hub.caller import Caller
from mettle.hub.results.leaderboard import Ranked
from mettle.hub.results.pushed import COMPLETED, is_of, visible_to

MAX_RANKED = 1000
MAX_SHOWN = 100
"""Places that a page has; programs are told them all."""


def pushed_board(c: Connection, caller: Caller, environment: str) -> list[Ranked]:
    """Those that the caller may see, the newest `MAX_RANKED`; one without an interval (of one task, or none) has no
    place."""
    r = tables.results.c
    columns = (
        r.id, r.environment, r.model, r.mean, r.ci_low, r.ci_high, r.num_samples, r.num_tasks, r.completed_at,
    )  # fmt: skip
    has_place = (r.status == COMPLETED, r.mean.is_not(None), r.ci_low.is_not(None), r.ci_high.is_not(None))
    rows = c.execute(
        select(*columns)
        .where(visible_to(caller), is_of(environment), *has_place)
        .order_by(r.created_at.desc(), r.id)
        .limit(MAX_RANKED)
    )
    return [
        Ranked(i, f"/evaluations/{i}", env, model, mean, low, high, samples, tasks, at or 0.0, False)
        for i, env, model, mean, low, high, samples, tasks, at in rows
    ]
