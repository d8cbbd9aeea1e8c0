"""Containers that dead owners have left.

Invariant: only containers with our mark are looked at, and only those that `owners.is_leftover` names are removed.
"""

from __future__ import annotations

import json
import logging
import time

from mettle.sandbox.containers.docker.client import DockerClient
from mettle.sandbox.containers.errors import ControlPlaneError
from mettle.sandbox.containers.owners import MARK, is_leftover

logger = logging.getLogger(__name__)


async def sweep(client: DockerClient) -> int:
    """Remove them; how many there were."""
    filters = json.dumps({"label": [f"{MARK}=1"]})
    containers = client.docker.containers
    found = await client.ask("list containers", lambda: containers.list(all=True, filters=filters), is_repeatable=True)
    num_removed = 0
    for container in found:
        age_s = time.time() - float(container["Created"])
        if not is_leftover(container["Labels"] or {}, str(container["State"]), age_s):
            continue
        try:
            await client.remove(container.id)
            num_removed += 1
        except ControlPlaneError as error:
            logger.debug("a leftover could not be removed: %s", error)
    if num_removed:
        logger.info("removed %d containers of owners that are gone", num_removed)
    return num_removed
