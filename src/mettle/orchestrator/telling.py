"""Events of the orchestrator, told from its event loop."""

from __future__ import annotations

from typing import Any

from mettle.storage.database import transaction_soon
from mettle.storage.ledger import Ledger


async def tell(ledger: Ledger, kind: str, message: str, **data: Any) -> None:
    """Record an event as soon as no other process is writing."""
    async with transaction_soon(ledger.database):
        ledger.journal.event("orchestrator", kind, message, **data)
