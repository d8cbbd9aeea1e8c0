"""An inference server as its operator sees it: health, weights, pausing. The records are those of the engine seam.

`ServerClient` speaks the admin routes for whoever holds the key: the orchestrator, which keeps the server on the newest
weights, and `RemoteEngine`, which is a server of ours behind the seam. One client belongs to one event loop.
Invariant: an answer is a record of `engine.protocol`; a refusal is `WeightsRejected`, and silence is `ProviderError`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import aiohttp

from mettle.errors import ProviderError
from mettle.inference.engine.protocol import (
    AdapterStatus,
    EngineStatus,
    PauseMode,
    WeightsRejected,
    WeightUpdate,
)
from mettle.records.versions import CanaryCheck

ASK_TIMEOUT_S: Final = 10.0
UPDATE_TIMEOUT_S: Final = 600.0
_STATUS_FIELDS: Final = frozenset(field.name for field in dataclasses.fields(EngineStatus))


class ServerClient:
    """The health and admin routes of the server at `base_url()`, an address that ends in /v1 and may change."""

    def __init__(self, base_url: Callable[[], str], admin_key: str = "") -> None:
        self._base_url = base_url
        self._headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def health(self) -> dict[str, Any]:
        """What `/health` says. Raises: ProviderError when nothing answers, or the server is about to end."""
        status, body = await self._call("GET", "/health", None, ASK_TIMEOUT_S)
        if status != 200 or not isinstance(body.get("version"), int):
            raise ProviderError(f"GET /health answered {status}: {str(body)[:200]}")
        return body

    async def status(self) -> EngineStatus:
        """Where the server's engine stands. Raises: ProviderError."""
        body = await self._done("GET", "/admin/status", None, ASK_TIMEOUT_S)
        try:
            known = {name: value for name, value in body.items() if name in _STATUS_FIELDS}
            known["adapters"] = tuple(
                AdapterStatus(**{**adapter, "versions": tuple(adapter["versions"])})
                for adapter in known.get("adapters", ())
            )
            return EngineStatus(**known)
        except (TypeError, KeyError) as error:
            raise ProviderError(f"GET /admin/status: {error}") from error

    async def update_weights(self, folder: Path, version: int, adapter: str | None = None) -> WeightUpdate:
        """Hand over a published folder, which the server reads by that path; returns once it is served and proven.

        With `adapter` it is a version of that adapter, else of the model itself.

        Raises: WeightsRejected when the server keeps its weights; ProviderError when nothing answers.
        """
        request = {"version": version, "path": str(folder)} | ({"adapter": adapter} if adapter else {})
        status, body = await self._call("POST", "/admin/weights", request, UPDATE_TIMEOUT_S)
        canary = _canary(version, body.get("canary"))
        if 400 <= status < 500:
            raise WeightsRejected(f"the engine refused v{version} ({status}): {message_of(body)}", canary)
        if status != 200 or body.get("version") != version:
            raise ProviderError(f"POST /admin/weights answered {status}: {message_of(body)}")
        return WeightUpdate(version, float(body.get("load_ms") or 0), float(body.get("swap_ms") or 0), canary)

    async def load_adapter(self, name: str, folder: Path) -> WeightUpdate:
        """Hand over any PEFT folder. Raises: WeightsRejected, ProviderError."""
        request = {"lora_name": name, "lora_path": str(folder), "load_inplace": True}
        status, body = await self._call("POST", "/v1/load_lora_adapter", request, UPDATE_TIMEOUT_S)
        if 400 <= status < 500:
            raise WeightsRejected(f"the engine refused adapter {name!r} ({status}): {message_of(body)}")
        if status != 200:
            raise ProviderError(f"POST /v1/load_lora_adapter answered {status}: {message_of(body)}")
        return WeightUpdate(int(body["version"]), float(body.get("load_ms") or 0), 0.0, None)

    async def unload_adapter(self, name: str) -> None:
        """An adapter that is not there is no matter. Raises: ProviderError."""
        status, body = await self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, ASK_TIMEOUT_S)
        if status not in (200, 404):
            raise ProviderError(f"POST /v1/unload_lora_adapter answered {status}: {message_of(body)}")

    async def pause(self, mode: PauseMode) -> None:
        """Returns once nothing is sampled any more. Raises: ProviderError."""
        await self._done("POST", "/admin/pause", {"mode": mode}, UPDATE_TIMEOUT_S)

    async def resume(self) -> None:
        """Raises: ProviderError."""
        await self._done("POST", "/admin/resume", None, ASK_TIMEOUT_S)

    async def close(self) -> None:
        """Let go of connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _done(
        self, method: str, path: str, json_body: Mapping[str, Any] | None, limit_s: float
    ) -> dict[str, Any]:
        status, body = await self._call(method, path, json_body, limit_s)
        if status != 200:
            raise ProviderError(f"{method} {path} answered {status}: {message_of(body)}")
        return body

    async def _call(
        self, method: str, path: str, json_body: Mapping[str, Any] | None, timeout_s: float
    ) -> tuple[int, dict[str, Any]]:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers)
        url = self._base_url().removesuffix("/v1") + path
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._session.request(method, url, json=json_body, timeout=timeout) as response:
                body = await response.json(content_type=None)
                return response.status, body if isinstance(body, dict) else {"message": body}
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ProviderError(f"{method} {url}: {type(error).__name__}: {error}") from error


def message_of(body: Mapping[str, Any]) -> str:
    """What an error body says, whatever its shape."""
    found = body.get("error", body.get("message", body.get("detail", body)))
    return str(found.get("message", found) if isinstance(found, dict) else found)[:300]


def _canary(version: int, found: Mapping[str, Any] | None) -> CanaryCheck | None:
    if not found:
        return None
    # A difference that is not finite travels as null: JSON has no word for it.
    mean, largest = (
        float("nan") if found[key] is None else float(found[key]) for key in ("mean_abs_diff", "max_abs_diff")
    )
    return CanaryCheck(version, mean, largest, int(found["num_tokens"]))
