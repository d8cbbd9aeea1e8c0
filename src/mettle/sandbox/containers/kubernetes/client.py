"""The Kubernetes API through `kubernetes_asyncio`, with plain objects as the server writes them.

    send      JSON in and out, with the server's own words in errors; busy (429, 503) and away are waited for
    list_all  a collection in pages, and the version that it stands for
    watch     what changes from a version on; `Gone` when the server no longer remembers it

Invariant: a request that made something once is not sent again unless it cannot make it twice; credentials that were
refused are read again once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, NamedTuple

import aiohttp

from mettle.errors import UserError
from mettle.sandbox.containers.errors import RETRIED, ControlPlaneAway, ControlPlaneError
from mettle.sandbox.containers.kubernetes.access import Access
from mettle.sandbox.containers.kubernetes.config import KubernetesConfig
from mettle.web.backoff import Retries, retry_after_s

from kubernetes_asyncio.client.exceptions import ApiException  # isort: skip - access says what to install
from kubernetes_asyncio.watch import Watch  # isort: skip

_REQUEST_S: Final = 30.0
_PAGE: Final = 500
_WATCH_S: Final = 240
_WATCH_EXTRA_S: Final = 30.0
_BUSY: Final = (429, 503, 504)
_GONE: Final = 410
_UNKNOWN_USER: Final = 401
MERGE: Final = "application/merge-patch+json"


class Gone(ControlPlaneError):
    """The server no longer remembers what has changed since that version."""


class WatchEvent(NamedTuple):
    """One change: ADDED, MODIFIED, DELETED or BOOKMARK, and the object after it."""

    kind: str
    object: dict[str, Any]


class Listing(NamedTuple):
    """A collection at one version."""

    items: list[dict[str, Any]]
    version: str


class KubernetesClient:
    """One cluster."""

    def __init__(self, config: KubernetesConfig) -> None:
        self._config = config
        self._slots = asyncio.Semaphore(config.max_requests)
        self._access: Access | None = None

    @property
    def access(self) -> Access:
        assert self._access is not None, "the client is open"
        return self._access

    async def open(self) -> str:
        """Connect; the server's version. Raises: UserError, ControlPlaneAway."""
        await self.close()
        self._access = await Access.open(self._config)
        found = await self.send("GET", "/version")
        return str(found.get("gitVersion", ""))

    async def close(self) -> None:
        if self._access is not None:
            await self._access.close()
            self._access = None

    def path(self, kind: str, name: str = "", *, group: str = "") -> str:
        """The path of a kind in our namespace, or of one object."""
        root = f"/apis/{group}" if group else "/api/v1"
        return f"{root}/namespaces/{self.access.namespace}/{kind}{f'/{name}' if name else ''}"

    async def send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        content: str = "application/json",
        is_repeatable: bool | None = None,
    ) -> Any:
        """The answer to a request. Raises: ControlPlaneError with the status, UserError for a user it refuses."""
        retries = Retries(RETRIED, limit_s=self._config.patience_s)
        may_repeat = method == "GET" if is_repeatable is None else is_repeatable
        has_renewed = False
        while True:
            try:
                async with self._slots:
                    return await self._send_once(method, path, params, body, content)
            except ControlPlaneError as error:
                if error.status == _UNKNOWN_USER and not has_renewed:
                    has_renewed = True
                    await self.access.refresh(is_refused=True)
                    continue
                is_away = isinstance(error, ControlPlaneAway)
                can_wait = error.status in _BUSY or (is_away and may_repeat)
                if not can_wait or not await retries.again(error.retry_after_s):
                    raise

    async def list_all(self, path: str, selector: str) -> Listing:
        """Every object that the labels select, in pages. A page that comes too late begins anew."""
        items: list[dict[str, Any]] = []
        token = ""
        while True:
            params = {"labelSelector": selector, "limit": str(_PAGE), **({"continue": token} if token else {})}
            try:
                page = await self.send("GET", path, params=params)
            except ControlPlaneError as error:
                if error.status != _GONE or not token:
                    raise
                items, token = [], ""
                continue
            items += page.get("items") or []
            token = page["metadata"].get("continue", "")
            if not token:
                return Listing(items, str(page["metadata"]["resourceVersion"]))

    async def watch(self, path: str, selector: str, version: str) -> AsyncIterator[WatchEvent]:
        """Changes from this version on, until the server ends the watch. Raises: Gone, ControlPlaneError."""
        params = {"labelSelector": selector, "allowWatchBookmarks": "true", "timeoutSeconds": str(_WATCH_S)}
        limits = aiohttp.ClientTimeout(total=None, sock_read=_WATCH_S + _WATCH_EXTRA_S)

        async def follow(*, watch: bool, resource_version: str, **_: Any) -> Any:
            query = {**params, "watch": str(int(watch)), "resourceVersion": resource_version}
            return await self._request("GET", path, query, limits=limits)

        try:
            events = Watch().stream(follow, resource_version=version, timeout_seconds=_WATCH_S)
            async with events:
                async for event in events:
                    if not isinstance(event, dict):
                        raise ControlPlaneError(f"Kubernetes: watch {path}: an event that is no JSON")
                    yield WatchEvent(event["type"], event["raw_object"])
        except ApiException as error:
            raise _as_error({"code": error.status, "message": error.reason}, f"watch {path}") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ControlPlaneAway(f"the Kubernetes API ended a watch: {error}") from error

    async def _send_once(
        self, method: str, path: str, params: Mapping[str, str] | None, body: Any, content: str
    ) -> Any:
        try:
            async with asyncio.timeout(_REQUEST_S):
                response = await self._request(method, path, params, body=body, content=content)
                async with response:
                    if response.status >= 400:
                        raise await _failure(response, f"{method} {path}")
                    return await response.json(content_type=None)
        except TimeoutError as error:
            raise ControlPlaneAway(f"the Kubernetes API did not answer {method} {path}") from error
        except aiohttp.ClientError as error:
            raise ControlPlaneAway(f"the Kubernetes API ended {method} {path}: {error}") from error

    async def _request(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        *,
        body: Any = None,
        content: str = "application/json",
        limits: aiohttp.ClientTimeout | None = None,
    ) -> aiohttp.ClientResponse:
        access = self.access
        await access.refresh()
        try:
            response: aiohttp.ClientResponse = await access.api.call_api(
                path,
                method,
                query_params=list((params or {}).items()),
                header_params={"Accept": "application/json", "Content-Type": content},
                body=body,
                auth_settings=["BearerToken"],
                _preload_content=False,
                _request_timeout=limits,
            )
        except aiohttp.ClientConnectorCertificateError as error:
            raise UserError(f"the certificate of {access.server} is not one that the kubeconfig trusts") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ControlPlaneAway(f"no Kubernetes API answers at {access.server}: {error}") from error
        return response


async def _failure(response: aiohttp.ClientResponse, what: str) -> ControlPlaneError:
    text = await response.text(errors="replace")
    try:
        told = json.loads(text)
    except ValueError:
        told = {}
    if not isinstance(told, dict) or "message" not in told:
        told = {"message": text.strip()[:500] or response.reason}
    failure = _as_error({**told, "code": response.status}, what)
    failure.retry_after_s = retry_after_s(response.headers.get("Retry-After"))
    return failure


def _as_error(status: dict[str, Any], what: str) -> ControlPlaneError:
    code = int(status.get("code") or 0)
    kind = Gone if code == _GONE else ControlPlaneError
    return kind(f"Kubernetes: {what}: {code}: {str(status.get('message', ''))[:500]}", code)
