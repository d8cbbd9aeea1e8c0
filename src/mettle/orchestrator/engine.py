"""The engine as the orchestrator sees it: its health, and its weights.

Parts: `Engine` (the protocol), `HttpEngine` (the inference server's admin routes). The address is read again from the
endpoint file whenever that changes: a restarted server may listen on another port.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from mettle.errors import MettleError, ProviderError
from mettle.records.versions import CanaryCheck, WeightVersion

HEALTH_TIMEOUT_S = 10.0
UPDATE_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """`incarnation` changes when the server is started again; `version` is what it serves."""

    incarnation: str
    version: int


@dataclass(frozen=True, slots=True)
class EngineUpdate:
    """An update that the engine has acknowledged."""

    version: int
    update_ms: float
    canary: CanaryCheck | None


class UpdateRefused(MettleError):
    """The engine loaded the weights, found them wrong (or could not read them), and keeps the old ones."""


class Engine(Protocol):
    """The weights and the health of whatever serves the policy."""

    async def health(self) -> EngineHealth:
        """Raises: ProviderError when nothing answers."""
        ...

    async def update(self, weights: WeightVersion) -> EngineUpdate:
        """Raises: UpdateRefused when the engine keeps its weights; ProviderError when nothing answers."""
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


class HttpEngine:
    """The inference server's /health and /admin/weights, which wants the run's admin key."""

    def __init__(self, endpoint: EndpointFile, admin_key: str = "") -> None:
        self._endpoint = endpoint
        self._headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def health(self) -> EngineHealth:
        """What the server says of itself."""
        incarnation = self._endpoint.incarnation
        status, body = await self._call("GET", "/health", None, HEALTH_TIMEOUT_S)
        if status != 200 or not isinstance(body.get("version"), int):
            raise ProviderError(f"GET /health answered {status}: {str(body)[:200]}")
        return EngineHealth(incarnation, body["version"])

    async def update(self, weights: WeightVersion) -> EngineUpdate:
        """Hand over a published folder; returns once the engine serves it and has checked the canary."""
        started = time.perf_counter()
        request = {"version": weights.version, "path": weights.path}
        status, body = await self._call("POST", "/admin/weights", request, UPDATE_TIMEOUT_S)
        elapsed_ms = (time.perf_counter() - started) * 1000.0
        if 400 <= status < 500:
            raise UpdateRefused(f"the engine refused v{weights.version} ({status}): {_message(body)}")
        if status != 200 or body.get("version") != weights.version:
            raise ProviderError(f"POST /admin/weights answered {status}: {_message(body)}")
        found = body.get("canary")
        canary = None
        if found:
            canary = CanaryCheck(
                weights.version, float(found["mean_abs_diff"]), float(found["max_abs_diff"]), int(found["num_tokens"])
            )
        return EngineUpdate(weights.version, elapsed_ms, canary)

    async def close(self) -> None:
        """Close the session."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _call(
        self, method: str, path: str, json_body: dict[str, Any] | None, timeout_s: float
    ) -> tuple[int, dict[str, Any]]:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers)
        url = self._endpoint.base_url.removesuffix("/v1") + path
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._session.request(method, url, json=json_body, timeout=timeout) as response:
                body = await response.json(content_type=None)
                return response.status, body if isinstance(body, dict) else {"message": body}
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ProviderError(f"{method} {url}: {type(error).__name__}: {error}") from error


def _message(body: dict[str, Any]) -> str:
    found = body.get("error", body.get("message", body))
    return str(found.get("message", found) if isinstance(found, dict) else found)[:300]
