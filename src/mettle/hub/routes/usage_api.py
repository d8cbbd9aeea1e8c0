"""What one's jobs, and those of one's teams, have taken in a month, for programs."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query

from mettle.hub.access import LabHere, TrainingReader
from mettle.hub.training import usage

router = APIRouter(prefix="/api/v1/usage", tags=["usage"])


@router.get("")
def read_usage(lab: LabHere, caller: TrainingReader, month: Annotated[str, Query(max_length=7)] = "") -> dict[str, Any]:
    """Of the caller and of each team of theirs: tokens, what they cost, the quota, and the jobs that took most."""
    month = month or usage.month_of(time.time())
    with lab.database.read() as c:
        found = [usage.usage_of(c, owner_id, month) for owner_id in caller.owner_ids]
        prices = usage.prices(c)
    return {"month": month, "owners": [each.to_dict() for each in found], "usd_per_mtok": prices}
