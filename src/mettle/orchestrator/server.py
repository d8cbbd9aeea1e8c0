"""The inference server as the orchestrator sees it: is it the same one as before, and which weights does it serve.

Parts: `PolicyServer` (the protocol, which the simulator keeps too), `HttpPolicyServer` (a thin client of the admin
routes), `EndpointFile`. What serves behind that server is no matter here: see `inference.engine.protocol`, whose
records travel through. The address is read again from the endpoint file whenever that changes: a restarted server may
listen on another port.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mettle.errors import ProviderError
from mettle.inference.client import ServerClient
from mettle.inference.engine.protocol import WeightUpdate
from mettle.orchestrator.concurrency import EngineLoad
from mettle.records.versions import WeightVersion

NOT_SERVED = -1
"""The version of a policy that the server has nothing of yet."""


@dataclass(frozen=True, slots=True)
class ServerHealth:
    """`incarnation` changes when the server is started again; `version` is what it serves; None: it tells no load."""

    incarnation: str
    version: int
    load: EngineLoad | None = None


class PolicyServer(Protocol):
    """The weights and the health of whatever serves the policy."""

    async def health(self) -> ServerHealth:
        """Raises: ProviderError when nothing answers."""
        ...

    async def update(self, weights: WeightVersion) -> WeightUpdate:
        """Raises: WeightsRejected when the server keeps its weights; ProviderError when nothing answers."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


class EndpointFile:
    """The address in an endpoint file, read again when the file changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._value: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """The file's content. Raises: ProviderError while there is none."""
        try:
            stat = self._path.stat()
            stamp = (stat.st_mtime_ns, stat.st_ino)
            if stamp != self._stamp:
                self._value = json.loads(self._path.read_text())
                self._stamp = stamp
        except (OSError, ValueError) as error:
            raise ProviderError(f"no inference server has said where it listens ({self._path}): {error}") from error
        return self._value

    @property
    def base_url(self) -> str:
        """Base URL of the OpenAI routes, ending in /v1."""
        return str(self.read()["base_url"])

    @property
    def incarnation(self) -> str:
        """Another word for every start of the server."""
        value = self.read()
        return f"{value.get('pid')}@{value['base_url']}"


class HttpPolicyServer:
    """The inference server at the address in an endpoint file, by the run's admin key.

    With `adapter` the policy is an adapter of that name beside others on the same server; else it is the model itself.
    """

    def __init__(self, endpoint: EndpointFile, admin_key: str = "", *, adapter: str | None = None) -> None:
        self._endpoint = endpoint
        self._adapter = adapter
        self._client = ServerClient(lambda: endpoint.base_url, admin_key)

    async def health(self) -> ServerHealth:
        """What the server says of itself."""
        incarnation = self._endpoint.incarnation
        if self._adapter is None:
            told = await self._client.health()
            return ServerHealth(incarnation, told["version"], _load(told))
        status = await self._client.status()
        if not status.is_alive:
            raise ProviderError("the engine has ended")
        versions = next((one.versions for one in status.adapters if one.name == self._adapter), ())
        load = EngineLoad(
            status.num_running, status.num_waiting, status.kv_bytes, status.kv_budget_bytes, status.total_preempted
        )
        return ServerHealth(incarnation, versions[-1] if versions else NOT_SERVED, load)

    async def update(self, weights: WeightVersion) -> WeightUpdate:
        """Hand over a published folder; returns once it is served and its canary was reproduced."""
        return await self._client.update_weights(Path(weights.path), weights.version, self._adapter)

    async def close(self) -> None:
        """Close the session."""
        await self._client.close()


def _load(told: dict[str, Any]) -> EngineLoad | None:
    names = ("running", "waiting", "kv_bytes", "kv_budget_bytes", "preempted")
    values = [told.get(name) for name in names]
    return EngineLoad(*values) if all(isinstance(value, int) for value in values) else None  # type: ignore[arg-type]
