"""JSON over HTTP to a model endpoint: pooled, retried by class of failure, and clear about what went wrong.

Parts: `RetryPolicy`, `Transport`. The session is made on first use and belongs to one event loop; one is enough (four
cost the same per request at 64 and at 512 concurrent ones). Invariants: a caller gets a dict
or a `ModelError` (or `OverlongPromptError`) that names the URL; a refused key is never retried; aiohttp is imported by
the first request and not before.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mettle.clients.errors import (
    AuthenticationError,
    InvalidModelResponseError,
    ModelError,
    OverlongPromptError,
    RateLimitError,
    is_overlong,
)

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger(__name__)

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})
BODY_EXCERPT = 300
RETRIED_STATUSES = frozenset({408, 409, 425, 500, 502, 503, 504, 529})


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often each class of failure is tried again, and how long to wait between.

    `max_retries` bounds lost connections, 429 and 5xx together; an answer that is not JSON is tried again once, a
    timeout never (the endpoint is busy with it already). Waits double from `first_wait_s` up to `max_wait_s`, with
    jitter; a `Retry-After` is obeyed up to `max_wait_s`.
    """

    max_retries: int = 5
    max_garbage_retries: int = 1
    first_wait_s: float = 0.5
    max_wait_s: float = 30.0

    def wait_s(self, attempt: int, retry_after_s: float | None, rng: random.Random) -> float:
        """Seconds to wait before attempt `attempt` + 1 (attempts count from 0)."""
        if retry_after_s is not None:
            return min(self.max_wait_s, max(0.0, retry_after_s))
        return min(self.max_wait_s, self.first_wait_s * 2.0**attempt) * rng.uniform(0.5, 1.0)


class _Failure(Exception):
    """One failed attempt: the error to raise in the end, and whether another attempt may help."""

    def __init__(self, error: Exception, *, retries: int, retry_after_s: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.retries = retries
        self.retry_after_s = retry_after_s


class Transport:
    """Requests to one endpoint. `base_url` includes the version, as in `http://127.0.0.1:8000/v1`."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = 3600.0,
        connect_timeout_s: float = 10.0,
        retry: RetryPolicy | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.retry = retry or RetryPolicy()
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        if api_key:
            self._headers.setdefault("Authorization", f"Bearer {api_key}")
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._sleep = sleep
        self._rng = rng or random.Random()
        self._is_loopback = (urlsplit(self.base_url).hostname or "") in LOOPBACK_HOSTS
        self._current: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST `body` as JSON to `base_url` + `path`; the JSON object of the answer."""
        return await self._request("POST", path, json.dumps(body).encode())

    async def get(self, path: str) -> dict[str, Any]:
        """GET the JSON object at `base_url` + `path`."""
        return await self._request("GET", path, None)

    async def close(self) -> None:
        """Close every connection of this loop; a later request opens new ones."""
        session, self._current = self._current, None
        if session is not None and self._loop is asyncio.get_running_loop():
            await session.close()

    async def _request(self, method: str, path: str, data: bytes | None) -> dict[str, Any]:
        attempt = 0
        while True:
            try:
                return await self._attempt(method, self.base_url + path, data)
            except _Failure as failure:
                if attempt >= failure.retries:
                    raise failure.error from failure.__cause__
                wait_s = self.retry.wait_s(attempt, failure.retry_after_s, self._rng)
                logger.info("model call failed, trying again", extra={"error": str(failure), "wait_s": wait_s})
                await self._sleep(wait_s)
                attempt += 1

    async def _attempt(self, method: str, url: str, data: bytes | None) -> dict[str, Any]:
        session = self._session()
        import aiohttp

        try:
            async with session.request(method, url, data=data) as response:
                payload = await response.read()
        except TimeoutError as error:
            raise _Failure(ModelError(f"{method} {url}: no answer within {self._timeout_s} s"), retries=0) from error
        except (aiohttp.ClientError, OSError) as error:
            lost = ModelError(f"{method} {url}: {type(error).__name__}: {error}")
            raise _Failure(lost, retries=self.retry.max_retries) from error
        if response.status >= 400:
            raise self._refusal(f"{method} {url}", response.status, payload, response.headers.get("Retry-After"))
        return self._decoded(f"{method} {url}", response.status, payload)

    def _refusal(self, request: str, status: int, payload: bytes, retry_after: str | None) -> _Failure:
        text = payload.decode("utf-8", "replace")
        message = f"{request}: status {status}: {_reason(text)}"
        if status in (401, 403):
            return _Failure(AuthenticationError(f"{message} (check the API key)"), retries=0)
        if status in (400, 413, 422) and is_overlong(text):
            return _Failure(OverlongPromptError(message), retries=0)
        if status == 429:
            retries = self.retry.max_retries
            return _Failure(RateLimitError(message), retries=retries, retry_after_s=_seconds(retry_after))
        if status in RETRIED_STATUSES:
            retries = self.retry.max_retries
            return _Failure(ModelError(message), retries=retries, retry_after_s=_seconds(retry_after))
        return _Failure(ModelError(message), retries=0)

    def _decoded(self, request: str, status: int, payload: bytes) -> dict[str, Any]:
        try:
            decoded = json.loads(payload)
        except ValueError as error:
            text = payload.decode("utf-8", "replace")
            garbage = InvalidModelResponseError(f"{request}: status {status}: not JSON: {text[:BODY_EXCERPT]!r}")
            raise _Failure(garbage, retries=self.retry.max_garbage_retries) from error
        if not isinstance(decoded, dict):
            garbage = InvalidModelResponseError(
                f"{request}: status {status}: a JSON {type(decoded).__name__}, no object"
            )
            raise _Failure(garbage, retries=self.retry.max_garbage_retries)
        return decoded

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._current is None or self._loop is not loop:
            self._current, self._loop = self._new_session(), loop
        return self._current

    def _new_session(self) -> aiohttp.ClientSession:
        import aiohttp

        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=self._connect_timeout_s),
            headers=self._headers,
            trust_env=not self._is_loopback,
            cookie_jar=aiohttp.DummyCookieJar(),
        )


def _reason(text: str) -> str:
    """The message inside an OpenAI-shaped error body, else the beginning of the body."""
    try:
        body = json.loads(text)
    except ValueError:
        return text[:BODY_EXCERPT].strip() or "empty body"
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return str(error)[:BODY_EXCERPT]


def _seconds(retry_after: str | None) -> float | None:
    if not retry_after:
        return None
    try:
        return float(retry_after)
    except ValueError:
        pass
    try:
        from datetime import UTC, datetime

        return (parsedate_to_datetime(retry_after) - datetime.now(UTC)).total_seconds()
    except (TypeError, ValueError):
        return None
