"""One service, as its client sees it: requests, errors, and whether it is there.

Invariant: a request ends with an answer, with the error that the service names, or with `ServiceLost`: also when the
service's host vanishes without a word, because whoever finds that out (`declare_lost`) ends what still waits; and an
answer that is too long, or no answer of a service's, is a `ServiceLost`, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from typing import Any, Final

import aiohttp

from mettle.errors import SandboxError
from mettle.sandbox.isolation import IsolationReport
from mettle.sandbox.service import faults
from mettle.sandbox.service.client.access import ServiceAccess, not_trusted
from mettle.sandbox.service.faults import ServiceLost
from mettle.sandbox.service.messages import CLIENT_HEADER, ERROR_HEADER, KEY_HEADER, MAX_MESSAGE_BYTES, PREFIX
from mettle.sandbox.service.wire import unpack

_CONNECT_S: Final = 5.0
_MAX_ANSWER_BYTES: Final = 512 << 20
_MAX_ERROR_BYTES: Final = 1 << 20
_QUIET_S: Final = 60.0  # of an answer in lines, which has a sign of life every 15 s


class NotConnected(ServiceLost):
    """The request never left."""


class JsonAnswer(dict[str, Any]):
    """A JSON answer. A field that a service of this kind would have sent is missed as its fault."""

    def __missing__(self, name: str) -> Any:
        raise ServiceLost(f"a sandbox service sent an answer without {name!r}")


class ServiceConnection:
    """One service. Made in the loop that uses it."""

    def __init__(self, url: str, access: ServiceAccess, client: str) -> None:
        self.url = url.rstrip("/")
        base, connector = access.connector(self.url)
        headers = {CLIENT_HEADER: client} if client else {}
        if access.token:
            headers["Authorization"] = f"Bearer {access.token}"
        self._base = base
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            read_bufsize=1 << 18,
            auto_decompress=False,
        )
        self._has_answered = False
        self.is_lost = False
        """Declared so, and has not answered since."""
        self._waiting: dict[asyncio.Timeout, None] = {}  # in order, so that they end in it
        self._reports: dict[str, IsolationReport] = {}

    async def ask(self, method: str, path: str, *, timeout_s: float | None = None, **request: Any) -> dict[str, Any]:
        """Send a request and read its JSON answer. Raises: what the service names; ServiceLost."""
        async with self.answer(method, path, timeout_s=timeout_s, **request) as response:
            return self._decode(await read_body(response, _MAX_ANSWER_BYTES))

    @contextlib.asynccontextmanager
    async def answer(
        self, method: str, path: str, *, key: str | None = None, timeout_s: float | None = None, **request: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A request whose answer is read by the caller, and closed however that ends."""
        headers = {**request.pop("headers", {}), **({KEY_HEADER: key} if key else {})}
        if "json" in request:  # as a file, of which aiohttp sends one piece at a time
            headers["Content-Type"] = "application/json"
            request["data"] = io.BytesIO(json.dumps(request.pop("json"), separators=(",", ":")).encode())
        request |= {"headers": headers, "allow_redirects": False}  # the token goes where it was sent, or nowhere
        with self._attributed():
            async with (
                self._until_lost(timeout_s),
                self._session.request(method, f"{self._base}{PREFIX}{path}", **request) as response,
            ):
                self._has_answered, self.is_lost = True, False
                if response.status >= 300:
                    raise self._named(faults.rebuild(response.status, await read_body(response, _MAX_ERROR_BYTES)))
                yield response

    async def lines(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """An answer in lines, as they come, without the signs of life. Raises: also what the last line names."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_QUIET_S)
        async with self.answer("POST", path, json=body, timeout=timeout) as response:
            async for text in _lines(response):
                line = self._decode(text)
                if "error" in line:
                    raise self._named(faults.rebuild(500, text))
                if line:
                    yield line

    @contextlib.asynccontextmanager
    async def websocket(
        self, path: str, *, params: Mapping[str, str] | None = None, heartbeat_s: float | None = None
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """A websocket. Raises: what the service names."""
        url = f"{self._base}{PREFIX}{path}"
        with self._attributed():
            try:
                opening = self._session.ws_connect(
                    url, params=params, heartbeat=heartbeat_s, max_msg_size=MAX_MESSAGE_BYTES, compress=0
                )
                async with opening as ws:
                    yield ws
            except aiohttp.WSServerHandshakeError as error:
                text = error.headers.get(ERROR_HEADER, "") if error.headers else ""
                raise self._named(faults.rebuild(error.status, text.encode())) from None

    async def report(self, name: str) -> IsolationReport:
        """The isolation report of that name."""
        known = self._reports.get(name)
        if known is None:
            known = self._reports[name] = unpack((await self.ask("GET", f"/isolation/{name}"))["report"])
        return known

    def declare_lost(self) -> None:
        """The service is not there any more: whoever waits for it is told."""
        self.is_lost = True
        now = asyncio.get_running_loop().time()
        for waiting in self._waiting:
            if not waiting.expired():  # it may be on its way out already
                waiting.reschedule(now)

    async def close(self) -> None:
        await self._session.close()

    def _decode(self, text: bytes) -> JsonAnswer:
        try:
            body = json.loads(text)
        except (ValueError, RecursionError):
            raise ServiceLost(f"sandbox service {self.url} answered with something that is not JSON") from None
        if not isinstance(body, dict):
            raise ServiceLost(f"sandbox service {self.url} answered with a {type(body).__name__}, not an object")
        return JsonAnswer(body)

    @contextlib.asynccontextmanager
    async def _until_lost(self, timeout_s: float | None) -> AsyncIterator[None]:
        async with asyncio.timeout(timeout_s) as waiting:
            self._waiting[waiting] = None
            try:
                yield
            finally:
                self._waiting.pop(waiting, None)

    @contextlib.contextmanager
    def _attributed(self) -> Iterator[None]:
        """Whatever goes wrong on the way is the service's loss; what the service itself says passes unchanged."""
        try:
            yield
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            untrusted = not_trusted(self.url, error)
            if untrusted is not None:
                raise untrusted from error
            raise NotConnected(f"sandbox service {self.url} cannot be reached: {_reason(error)}") from error
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            if isinstance(error, OSError) and getattr(error, "is_of_service", False):
                raise  # an error met inside a machine
            hint = "" if self._has_answered or not self._base.startswith("http:") else "; does it speak https:// only?"
            raise ServiceLost(
                f"sandbox service {self.url} was lost in the middle of a request: {_reason(error)}{hint}"
            ) from error

    def _named(self, error: Exception) -> Exception:
        """An error of the service's; of many services, a person wants to know which one it is."""
        if isinstance(error, OSError):
            error.is_of_service = True  # type: ignore[attr-defined]
        elif isinstance(error, faults.TokenRefused | ServiceLost) or type(error) is SandboxError:
            error.args = (f"{error} (sandbox service {self.url})",)
        return error


async def read_body(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """The whole body of an answer. Raises: ServiceLost for one that is longer."""
    received = bytearray()
    async for piece in response.content.iter_any():
        received += piece
        if len(received) > max_bytes:
            raise ServiceLost(f"a sandbox service sent more than the {max_bytes:,} bytes that an answer may have")
    return bytes(received)


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    held = bytearray()
    async for piece in response.content.iter_any():
        start = len(held)
        held += piece
        while (end := held.find(b"\n", start)) >= 0:
            line = bytes(held[:end])
            del held[: end + 1]
            start = 0
            yield line
        if len(held) > _MAX_ANSWER_BYTES:
            raise ServiceLost(f"a sandbox service sent a line of more than {_MAX_ANSWER_BYTES:,} bytes")
    if held:
        raise ServiceLost("the answer ends in the middle of a line")


def _reason(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "there is no such host"
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    if isinstance(cause, OSError) and cause.errno and cause.errno > 0:
        return os.strerror(cause.errno).lower()
    return " ".join(str(cause).split()) or type(cause).__name__
