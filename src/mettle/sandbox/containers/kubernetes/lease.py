"""An owner's lease: its sign of life in the cluster, and the root of everything that belongs to it.

Pods name the lease as their owner, so that removing it removes them. Any owner removes a lease that has not been
renewed for twice its duration.
Invariant: a lease that was renewed meanwhile is not removed: the removal names the version that was seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any, Final

from mettle.errors import SandboxError
from mettle.sandbox.containers.errors import ControlPlaneError
from mettle.sandbox.containers.kubernetes.bodies import LEASES, lease_body, micro_time, read_time, selector
from mettle.sandbox.containers.kubernetes.client import MERGE, KubernetesClient
from mettle.sandbox.containers.kubernetes.config import KubernetesConfig
from mettle.sandbox.containers.owners import Owner

logger = logging.getLogger(__name__)

_GONE: Final = 404
_CONFLICT: Final = 409
_RENEWALS: Final = 3
_DURATIONS: Final = 2


class Lease:
    """The lease of one owner."""

    def __init__(self, client: KubernetesClient, config: KubernetesConfig, owner: Owner) -> None:
        self._client = client
        self._config = config
        self._owner = owner
        self._keeper: asyncio.Task[None] | None = None
        self.object: dict[str, Any] = {}

    @property
    def _path(self) -> str:
        return self._client.path("leases", group=LEASES)

    async def start(self) -> None:
        """Make it, and renew it from then on."""
        await self._make()
        self._keeper = asyncio.create_task(self._keep(), name="kubernetes lease")

    async def close(self) -> None:
        """Remove it, and with it whatever still names it."""
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
            self._keeper = None
        if self.object:
            name, self.object = self.object["metadata"]["name"], {}
            try:
                await self._remove(name, {})
            except ControlPlaneError as error:
                logger.warning("a lease could not be removed, and is left to the next sweep: %s", error)

    async def sweep(self) -> int:
        """Remove the leases of owners that have given no sign; how many there were."""
        listing = await self._client.list_all(self._path, selector(self._config.pool))
        num_removed = 0
        for lease in listing.items:
            spec = lease["spec"]
            silent_s = time.time() - read_time(spec.get("renewTime") or lease["metadata"]["creationTimestamp"])
            if silent_s < _DURATIONS * int(spec.get("leaseDurationSeconds") or self._config.lease_s):
                continue
            metadata = lease["metadata"]
            seen = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
            num_removed += await self._remove(metadata["name"], seen)
        if num_removed:
            logger.info("removed %d leases of owners that are gone", num_removed)
        return num_removed

    async def _make(self) -> None:
        body = lease_body(self._config, self._owner.id, self._owner.process)
        try:
            self.object = await self._client.send("POST", self._path, body=body, is_repeatable=True)
        except ControlPlaneError as error:
            if error.status != _CONFLICT:
                raise
            self.object = await self._client.send("GET", f"{self._path}/{body['metadata']['name']}")

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._config.lease_s / _RENEWALS)
            try:
                await self._renew()
                await self.sweep()
            except SandboxError as error:
                logger.warning("a lease could not be renewed: %s", error)

    async def _renew(self) -> None:
        path = f"{self._path}/{self.object['metadata']['name']}"
        body = {"spec": {"renewTime": micro_time()}}
        try:
            self.object = await self._client.send("PATCH", path, body=body, content=MERGE, is_repeatable=True)
        except ControlPlaneError as error:
            if error.status != _GONE:
                raise
            logger.warning("the lease of this owner was removed, and its pods with it; making another")
            await self._make()

    async def _remove(self, name: str, preconditions: dict[str, str]) -> bool:
        body = {"propagationPolicy": "Background", **({"preconditions": preconditions} if preconditions else {})}
        try:
            await self._client.send("DELETE", f"{self._path}/{name}", body=body, is_repeatable=True)
        except ControlPlaneError as error:
            if error.status in (_GONE, _CONFLICT):
                return False
            raise
        return True
