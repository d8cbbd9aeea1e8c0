"""A request of the `tinker` SDK, passed on to the process of its base model, and the answer as it comes.

The SDK wants keys that begin with `tml-`; here that is `tml-` and a token of the Hub that covers training:write.
Invariants: the process hears whose a request is from here alone, and no header of the client's says so; bodies and
times are bounded both ways; a person whose quota is used up is told so by the future of what they ask, for a number of
a model's request that is refused would let what follows wait for it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, Final

from fastapi.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mettle.hub.access import token_caller
from mettle.hub.lab import Lab
from mettle.hub.routes.addresses import root_of
from mettle.hub.training import usage
from mettle.hub.training_service.offers import ServiceState, read_state
from mettle.trainer.service.access import HEADER, OWNER, PREFIX, REFUSAL, ROOT
from mettle.web.bodies import body_chunks
from mettle.web.doors import MAX_BODY_BYTES, bearer
from mettle.web.problems import HttpError, json_response

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

API: Final = "/api/v1/"
MAX_OPEN: Final = 1024
"""Requests of one person at a time: each result that is waited for holds one."""
SCOPE: Final = "training:write"
_OPEN: Final = ("healthz", "telemetry")
_LINKS: Final = "files/"
"""What a link leads to: it is signed, and works without a key for a while."""
_COMPUTING: Final = frozenset({"forward", "forward_backward", "asample"})
_SENT: Final = ("content-type", "content-encoding", "content-length", "accept", "user-agent")
_ANSWERED: Final = (
    "content-type", "content-length", "content-disposition", "location", "expires", "retry-after", "last-modified",
    "etag",
)  # fmt: skip
_CONNECT_S: Final = 10.0
_READ_S: Final = 90.0
"""Without a byte of an answer: a question for a result is held open for 40 s at most."""
_TOTAL_S: Final = 900.0
_WHOLE_BYTES: Final = 1 << 20
"""An answer of at most this is read before it is passed on."""


class TrainingProxy:
    """Between the Hub's port and the processes. Close it on the loop that has used it."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._open: Counter[str] = Counter()
        self._client: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Let go of the connections."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def passed_on(self, request: Request, name: str, path: str) -> Response:
        """What the service of a base model answers.

        Raises: HttpError 404 where it is not offered, 401 and 403 for who may not, 429 for too many at a time, 503
        while there is no process.
        """
        self._must_be_offered(name)
        if path == _OPEN[1]:
            return json_response({"status": "accepted"})  # whoever sends it: a client waits for this at its end
        owner = ""
        told: dict[str, str] = {}
        if path not in _OPEN and not path.startswith(_LINKS):
            owner, told = await run_in_threadpool(self._admitted, request, path)
        state = read_state(self._lab.folder, name)
        if not state.is_ready:
            raise HttpError(503, f"the training service of {name} is {state.words}; it goes on where it was")
        told |= {"Authorization": f"Bearer {state.key}", ROOT: f"{root_of(request)}/train/{name}"}
        headers = {each: request.headers[each] for each in _SENT if each in request.headers} | told
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self._counted(owner))
            return await self._answer(stack, request, state, name, headers)

    def _must_be_offered(self, name: str) -> None:
        names = [each.name for each in self._lab.train_offers]
        if not names:
            raise HttpError(404, "this Hub offers no training service (--train-models)", code="not_offered")
        if name not in names:
            raise HttpError(404, f"no training on {name[:100]!r} here; there is {', '.join(names)}", code="not_offered")

    def _admitted(self, request: Request, path: str) -> tuple[str, dict[str, str]]:
        """Whose a request is, and what the process is told of it."""
        given = request.headers.get(HEADER, "").removeprefix(PREFIX) or bearer(request.headers)
        if not given:
            raise HttpError(
                401,
                f"this Hub wants a token of yours that covers {SCOPE}: TINKER_API_KEY={PREFIX}mtl_...",
                code="invalid_api_key",
            )  # fmt: skip
        caller = token_caller(self._lab, given, request.client.host if request.client else "")
        assert caller.person is not None, "a token is somebody's"
        if not caller.may(SCOPE):
            raise HttpError(403, f"this token does not cover {SCOPE}; make one that does", code="scope_missing")
        told = {OWNER: caller.person.id}
        if path in _COMPUTING and request.method == "POST":
            try:
                with self._lab.database.read() as c:
                    usage.must_have_room(c, caller.person.id, 1)
            except HttpError as error:
                told[REFUSAL] = str(error)
        return caller.person.id, told

    @contextlib.contextmanager
    def _counted(self, owner: str) -> Iterator[None]:
        if self._open[owner] >= MAX_OPEN:
            raise HttpError(429, f"{MAX_OPEN:,} requests of yours are being answered; more are taken later")
        self._open[owner] += 1
        try:
            yield
        finally:
            self._open[owner] -= 1
            if not self._open[owner]:
                del self._open[owner]

    async def _answer(
        self,
        stack: contextlib.AsyncExitStack,
        request: Request,
        state: ServiceState,
        name: str,
        headers: dict[str, str],
    ) -> Response:
        """The answer, whole where it is short. What streams takes over what `stack` holds."""
        import aiohttp

        wrong: list[Exception] = []
        data = _body(request, wrong) if request.method in ("POST", "PUT") else None
        asked = self._session().request(
            request.method, _address(request, state, name), headers=headers, data=data, allow_redirects=False
        )
        try:
            answer = await stack.enter_async_context(asked)
            passed = {each: answer.headers[each] for each in _ANSWERED if each in answer.headers}
            if answer.content_length is not None and answer.content_length <= _WHOLE_BYTES:
                return Response(await answer.read(), answer.status, passed)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if wrong:
                raise wrong[0] from None
            why = type(error).__name__
            raise HttpError(503, f"the training service of {name} does not answer ({why}); ask again") from error
        return _Passed(stack.pop_all(), answer, passed)

    def _session(self) -> aiohttp.ClientSession:
        """One for all: made by the first request, on the loop that answers."""
        import aiohttp

        if self._client is None:
            timeout = aiohttp.ClientTimeout(total=_TOTAL_S, sock_connect=_CONNECT_S, sock_read=_READ_S)
            connector = aiohttp.TCPConnector(limit=0)
            self._client = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        return self._client


class _Passed(StreamingResponse):
    """An answer that is passed on as it comes; whoever goes away lets go of it."""

    def __init__(self, kept: contextlib.AsyncExitStack, answer: Any, headers: dict[str, str]) -> None:
        super().__init__(_pieces(answer), answer.status, headers)
        self._kept = kept

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._kept:
            await super().__call__(scope, receive, send)


async def _pieces(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async for piece in answer.content.iter_any():
        yield piece


def _address(request: Request, state: ServiceState, name: str) -> URL:
    """Where the process answers what was asked here, spelled as the client has spelled it."""
    from yarl import URL

    raw = bytes(request.scope.get("raw_path") or request.url.path.encode()).decode("latin-1").partition("?")[0]
    query = f"?{request.url.query}" if request.url.query else ""
    return URL(f"{state.url}{API}{raw.partition(API)[2]}{query}", encoded=True)


async def _body(request: Request, wrong: list[Exception]) -> AsyncIterator[bytes]:
    """The body piece by piece. What is wrong with it is kept: the client of the process says only that it failed."""
    try:
        async for chunk in body_chunks(request, max_bytes=MAX_BODY_BYTES):
            yield chunk
    except Exception as error:
        wrong.append(error)
        raise
