"""Containers that dead owners have left.

Invariant: only containers with our mark are looked at, and only those that `owners.is_leftover` names are removed.
"""

from __future__ import annotations

import json
import logging
import time

from mettle.sandbox.containers.docker.api import DockerClient
from mettle.sandbox.containers.faults import ControlPlaneError
from mettle.sandbox.containers.owners import MARK, is_leftover

logger = logging.getLogger(__name__)


async def sweep(client: DockerClient) -> int:
    """Remove them; how many there were."""
    filters = json.dumps({"label": [f"{MARK}=1"]})
    found = await client.get("/containers/json", {"all": "1", "filters": filters})
    num_removed = 0
    for shown in found:
        age_s = time.time() - float(shown.get("Created", 0))
        if not is_leftover(shown.get("Labels") or {}, str(shown.get("State", "")), age_s):
            continue
        try:
            await client.send(
                "DELETE", f"/containers/{shown['Id']}", params={"force": "1", "v": "1"}, is_repeatable=True
            )
            num_removed += 1
        except ControlPlaneError as error:
            logger.debug("a leftover could not be removed: %s", error)
    if num_removed:
        logger.info("removed %d containers of owners that are gone", num_removed)
    return num_removed
