"""JSON over HTTP to a model endpoint: pooled, retried by class of failure, and clear about what went wrong.

Parts: `RetryPolicy`, `ModelTransport`. The session is made on first use and belongs to one event loop; one is enough
(four cost the same per request at 64 and at 512 concurrent ones). Invariants: a caller gets a dict or a `ModelError`
(or `OverlongPromptError`) that names the URL; a refused key is never retried; aiohttp is imported by the first request
and not before.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import warnings
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mettle.clients.errors import (
    InvalidModelResponseError,
    ModelError,
    one_line,
    refusal_of,
)
from mettle.clients.wire import decoded, encoded
from mettle.web.backoff import DEFAULT_BACKOFF, Backoff, retry_after_s

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger(__name__)

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})
BODY_EXCERPT = 300
MAX_REFUSAL_BYTES = 1 << 20
MAX_BODY_BYTES = 256 << 20
"""More than the logprobs of a long completion take, and less than a broken endpoint could fill the memory with."""
RETRIED_STATUSES = frozenset({408, 409, 425, 500, 502, 503, 504, 529})


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often each class of failure is tried again, and how long to wait between.

    `max_retries` bounds lost connections, 429 and 5xx together; an answer that is not JSON is tried again once, a
    timeout never (the endpoint is busy with it already). A `Retry-After` is obeyed up to the longest wait.
    """

    max_retries: int = 5
    max_garbage_retries: int = 1
    backoff: Backoff = DEFAULT_BACKOFF


class _Failure(Exception):
    """One failed attempt: the error to raise in the end, and whether another attempt may help."""

    def __init__(self, error: Exception, *, retries: int, retry_after_s: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.retries = retries
        self.retry_after_s = retry_after_s


class ModelTransport:
    """Requests to one endpoint. `base_url` includes the version, as in `http://127.0.0.1:8000/v1`."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = 3600.0,
        connect_timeout_s: float | None = 10.0,
        max_body_bytes: int = MAX_BODY_BYTES,
        retry: RetryPolicy | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.retry = retry or RetryPolicy()
        self.headers = {"Content-Type": "application/json", **(headers or {})}
        if api_key:
            self.headers.setdefault("Authorization", f"Bearer {api_key.strip()}")
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._max_body_bytes = max_body_bytes
        self._sleep = sleep
        self._rng = rng or random.Random()
        self._is_loopback = (urlsplit(self.base_url).hostname or "") in LOOPBACK_HOSTS
        self._current: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def post(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """POST `body` as JSON to `base_url` + `path`; the JSON object of the answer. `headers` are this request's."""
        try:
            data = encoded(body)
        except (TypeError, ValueError, RecursionError) as error:
            raise ModelError(f"POST {self.base_url + path}: the request has no JSON: {error}") from error
        return await self._request("POST", path, data, headers)

    async def get(self, path: str) -> dict[str, Any]:
        """GET the JSON object at `base_url` + `path`."""
        return await self._request("GET", path, None)

    async def close(self) -> None:
        """Close every connection of this loop; a later request opens new ones."""
        session, self._current = self._current, None
        if session is not None and self._loop is asyncio.get_running_loop():
            await session.close()

    async def _request(
        self, method: str, path: str, data: bytes | None, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        attempt = 0
        while True:
            try:
                return await self._attempt(method, self.base_url + path, data, headers)
            except _Failure as failure:
                if attempt >= failure.retries:
                    raise failure.error from failure.__cause__
                wait_s = self.retry.backoff.wait_s(attempt, failure.retry_after_s, self._rng.uniform)
                logger.info("model call failed, trying again", extra={"error": str(failure), "wait_s": wait_s})
                await self._sleep(wait_s)
                attempt += 1

    async def _attempt(
        self, method: str, url: str, data: bytes | None, headers: Mapping[str, str] | None
    ) -> dict[str, Any]:
        session = self._session()
        import aiohttp

        request = f"{method} {url}"
        try:
            async with session.request(method, url, data=data, headers=headers) as response:
                payload = await self._body(response, request)
        except aiohttp.ConnectionTimeoutError as error:
            lost = ModelError(f"{request}: no connection within {self._connect_timeout_s} s")
            raise _Failure(lost, retries=self.retry.max_retries) from error
        except TimeoutError as error:
            raise _Failure(ModelError(f"{request}: no answer within {self._timeout_s} s"), retries=0) from error
        except (aiohttp.ClientError, OSError) as error:
            is_hopeless = isinstance(error, aiohttp.InvalidURL | aiohttp.TooManyRedirects | aiohttp.ClientSSLError)
            lost = ModelError(one_line(f"{request}: {type(error).__name__}: {error}"))
            raise _Failure(lost, retries=0 if is_hopeless else self.retry.max_retries) from error
        except ValueError as error:
            raise _Failure(ModelError(one_line(f"{request}: cannot be sent: {error}")), retries=0) from error
        if response.status >= 400:
            raise self._refusal(request, response.status, payload, response.headers.get("Retry-After"))
        return self._decoded(request, response.status, payload)

    async def _body(self, response: aiohttp.ClientResponse, request: str) -> bytes:
        """The whole body, unless it is larger than any answer; one of unknown size is not read to its end."""
        if response.content_length is not None and "Content-Encoding" not in response.headers:
            if response.content_length <= self._max_body_bytes:
                return await response.read()
        else:
            body = bytearray()
            async for part in response.content.iter_any():
                body += part
                if len(body) > self._max_body_bytes:
                    break
            else:
                return bytes(body)
        response.close()
        limit = f"more than {self._max_body_bytes >> 20} MiB"
        raise _Failure(InvalidModelResponseError(f"{request}: status {response.status}: {limit} of answer"), retries=0)

    def _refusal(self, request: str, status: int, payload: bytes, retry_after: str | None) -> _Failure:
        text = payload[:MAX_REFUSAL_BYTES].decode("utf-8", "replace")
        error = refusal_of(request, status, _reason(text), text)
        is_passing = status == 429 or status in RETRIED_STATUSES
        retries = self.retry.max_retries if is_passing else 0
        return _Failure(error, retries=retries, retry_after_s=retry_after_s(retry_after))

    def _decoded(self, request: str, status: int, payload: bytes) -> dict[str, Any]:
        try:
            answer = decoded(payload)
        except (ValueError, RecursionError) as error:
            text = payload[: 4 * BODY_EXCERPT].decode("utf-8", "replace")
            garbage = InvalidModelResponseError(f"{request}: status {status}: not JSON: {text[:BODY_EXCERPT]!r}")
            raise _Failure(garbage, retries=self.retry.max_garbage_retries) from error
        if not isinstance(answer, dict):
            garbage = InvalidModelResponseError(
                f"{request}: status {status}: a JSON {type(answer).__name__}, no object"
            )
            raise _Failure(garbage, retries=self.retry.max_garbage_retries)
        return answer

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._current is None or self._loop is not loop:
            if self._current is not None and self._loop is not None and self._loop.is_closed():
                _let_go(self._current)
            self._current, self._loop = self._new_session(), loop
            # Callers who gave a URL or an SDK's object have nothing that they could close.
            weakref.finalize(self, _let_go, self._current)
        return self._current

    def _new_session(self) -> aiohttp.ClientSession:
        import aiohttp

        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=self._connect_timeout_s),
            headers=self.headers,
            trust_env=not self._is_loopback,
            cookie_jar=aiohttp.DummyCookieJar(),
        )


def _let_go(session: aiohttp.ClientSession) -> None:
    """Close a session where nothing can be awaited: aiohttp closes its sockets before the first time that it waits."""
    connector = session.connector
    if session.closed or connector is None:
        return
    session.detach()
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That nobody waits is what this is for.
        closing = connector.close().__await__()
        next(closing, None)
        closing.close()


def _reason(text: str) -> str:
    """The message inside an OpenAI-shaped error body, else the beginning of the body, as one line."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return one_line(text) or "empty body"
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return one_line(str(error))
