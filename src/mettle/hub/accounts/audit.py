"""The audit log: who did what to what, from where. Written in the transaction of what it tells of."""

from __future__ import annotations

import time
from typing import NamedTuple

from sqlalchemy import Connection, insert, select

from mettle.hub import tables


class AuditEntry(NamedTuple):
    at: float
    actor: str
    action: str
    subject: str
    detail: str
    address: str


def note(c: Connection, actor: str, action: str, subject: str, *, detail: str = "", address: str = "") -> None:
    """Add a line, for example ("ann", "token.create", "laptop")."""
    c.execute(
        insert(tables.audit).values(
            at=time.time(),
            actor=actor[:100],
            action=action,
            subject=subject[:200],
            detail=detail[:2000],
            address=address,
        )
    )


def newest(c: Connection, *, limit: int = 200, before: int | None = None) -> list[AuditEntry]:
    """The last lines, the newest first."""
    table = tables.audit.c
    query = select(table.at, table.actor, table.action, table.subject, table.detail, table.address)
    if before is not None:
        query = query.where(table.id < before)
    return [AuditEntry(*row) for row in c.execute(query.order_by(table.id.desc()).limit(limit))]
