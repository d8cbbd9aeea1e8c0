"""The server that agent programs take for a model's API: many rollouts, three dialects, one model behind them.

Parts: `ProxyServer`, `ProxyListener` (a socket that one rollout's agent, or any, can reach). A call is read, handed to
its rollout's session, and answered in the dialect it came in; a stream is the whole answer in its order of events.
Invariants: a caller is told apart by its secret before a byte of its body is read; whatever a caller sends, it gets an
answer in its dialect and nobody else notices; nothing here knows what is done with an answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.types import Receive, Scope, Send

from mettle.clients.dialects import chat, messages, responses
from mettle.clients.dialects.call import (
    InvalidRequest,
    ModelCall,
    ServedDialect,
    WireError,
    WireEvent,
    decoded_request,
)
from mettle.envs.proxy.calls import DIALECTS, AgentCall
from mettle.envs.proxy.sessions import AgentSession, Answerer, Exchange, SessionTable, is_secret_of
from mettle.web.app import WebApp, begin, is_delivered, is_gone, undisturbed, wrong_method
from mettle.web.bodies import body_chunks
from mettle.web.doors import Door, allowed_hosts, bearer
from mettle.web.problems import HttpError, json_response, openai_body
from mettle.web.server import HttpServer
from mettle.web.streams import StreamedAnswer, sse

PREFIX = "/rollout/"
HEARTBEAT_S = 10.0
MAX_BODY_BYTES = 32 << 20


class ProxyListener:
    """An open socket. Closing it drops the connections that came through it."""

    def __init__(self, server: HttpServer, port: int) -> None:
        self._server = server
        self.port = port

    async def close(self) -> None:
        """Take no more calls."""
        await self._server.stop(grace_s=0.05)


class ProxyServer:
    """Serves the sessions that are opened on it. `names` are those that it is reached by, besides the loopback's."""

    def __init__(
        self,
        *,
        max_body_bytes: int = MAX_BODY_BYTES,
        heartbeat_s: float = HEARTBEAT_S,
        names: Iterable[str] = (),
    ) -> None:
        self.max_body_bytes = max_body_bytes
        self.heartbeat_s = heartbeat_s
        self.num_strangers = 0
        self._names = tuple(names)
        self._sessions = SessionTable()
        self._listeners: set[ProxyListener] = set()

    def open(self, answerer: Answerer, model: str, **options: Any) -> AgentSession:
        """A session for one rollout."""
        session = AgentSession(answerer, model, **options)
        self._sessions.add(session)
        return session

    def close_session(self, session: AgentSession, reason: str) -> None:
        """Revoke its secret and refuse what it has in flight."""
        self._sessions.remove(session)
        session.close(reason)

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> ProxyListener:
        """Take calls of any session on a TCP port of this host."""
        sock = socket.create_server((host, port), backlog=1024)
        return await self.serve(sock)

    async def serve(self, sock: socket.socket, only: AgentSession | None = None) -> ProxyListener:
        """Take calls on a listening socket; with `only`, those of that session and no other."""
        sock.setblocking(False)
        # A machine's loopback is a loopback, too: its agent has no other name for us than those that we were given.
        names = allowed_hosts("127.0.0.1", self._names)
        # How long a body is, is looked at where it is read, so that the answer is in the caller's dialect.
        door = Door(names, max_body_bytes=None)
        app = WebApp(partial(self._handle, only), door=door, error_body=openai_body)
        port = int(sock.getsockname()[1])
        server = HttpServer(app, sock)
        await server.start()
        listener = ProxyListener(server, port)
        self._listeners.add(listener)
        return listener

    async def stop(self, listener: ProxyListener) -> None:
        """Close one listener."""
        self._listeners.discard(listener)
        await listener.close()

    async def close(self) -> None:
        """Close every listener and refuse every session."""
        listeners, self._listeners = self._listeners, set()
        for session in self._sessions.all():
            self.close_session(session, "the proxy has stopped")
        for listener in listeners:
            await listener.close()

    # One request

    async def _handle(self, only: AgentSession | None, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        secret, path = _split(request.url.path)
        dialect = DIALECTS.get(path, messages if "anthropic-version" in request.headers else chat)
        session: AgentSession | None = None
        try:
            session = self._admit(only, secret or _key(request.headers))
            session.enter()
            try:
                await self._answer(request, session, dialect, path, send)
            finally:
                session.leave()
        except HttpError as refusal:
            if session is not None:
                session.note_refusal(refusal)
            begin(scope)
            await _refused(dialect, refusal)(scope, receive, send)

    def _admit(self, only: AgentSession | None, secret: str) -> AgentSession:
        session = only if only is not None and is_secret_of(only, secret) else None
        if only is None:
            session = self._sessions.find(secret)
        if session is None:
            self.num_strangers += 1
            raise HttpError(401, "the API key is none of a running rollout", code="invalid_api_key")
        return session

    async def _answer(
        self, request: Request, session: AgentSession, dialect: ServedDialect, path: str, send: Send
    ) -> None:
        scope = request.scope
        is_list = path == "/models" or path.startswith("/models/")
        if not is_list and path not in DIALECTS:
            raise HttpError(404, f"{request.method} {request.url.path} is not served here", code="no_route")
        allowed = ("GET", "HEAD") if is_list else ("POST",)
        if request.method not in allowed:
            raise wrong_method(", ".join(allowed))
        if is_list:
            answer: HttpResponse = json_response(_models(session.model))
        else:
            call = await self._read(request, session, dialect)
            if path != "/messages/count_tokens":
                await self._answer_call(request, session, call, send)
                return
            answer = _counted(session, call)
        begin(scope)
        await answer(scope, request.receive, send)

    async def _read(self, request: Request, session: AgentSession, dialect: ServedDialect) -> AgentCall:
        raw = await self._body(request, session)
        try:
            call = dialect.read_call(decoded_request(raw))
        except InvalidRequest as error:
            raise HttpError(400, str(error)) from None
        return AgentCall(
            **{field.name: getattr(call, field.name) for field in fields(ModelCall)},
            dialect=dialect,
            headers=dict(request.headers),
            digest=hashlib.blake2b(raw, key=dialect.NAME.encode(), digest_size=16).digest(),
            num_retries=_count(request.headers.get("x-stainless-retry-count")),
        )

    async def _body(self, request: Request, session: AgentSession) -> bytes:
        """A request's body; all bodies of a rollout that are being read share twice the limit of one."""
        raw = bytearray()
        try:
            async for chunk in body_chunks(request, max_bytes=self.max_body_bytes):
                raw += chunk
                session.num_bytes += len(chunk)
                if session.num_bytes > 2 * self.max_body_bytes:
                    raise HttpError(429, "too many long requests at once; wait for an answer")
        finally:
            session.num_bytes -= len(raw)
        return bytes(raw)

    async def _answer_call(self, request: Request, session: AgentSession, call: AgentCall, send: Send) -> None:
        scope = request.scope
        exchange = session.exchange(call)
        try:
            if call.is_stream:
                pieces = self._pieces(scope, session, call, exchange)
                with suppress(StopAsyncIteration):  # nobody is there to be answered
                    stream = StreamedAnswer(pieces, first=await anext(pieces))
                    begin(scope)
                    await stream(scope, request.receive, send)
                return
            answer = await self._take(scope, session, call, exchange)
            if answer is None:
                return
            made = json_response(answer)
            begin(scope)
            await made(scope, request.receive, send)
            if await is_delivered(scope):
                exchange.delivered_at = time.monotonic()
        finally:
            exchange.num_waiting -= 1

    async def _pieces(
        self, scope: Scope, session: AgentSession, call: AgentCall, exchange: Exchange
    ) -> AsyncGenerator[bytes, None]:
        """A stream: what keeps it alive while the model thinks, then the whole answer; an error before is a status."""
        has_begun = False
        while not (await asyncio.wait([exchange.task], timeout=self.heartbeat_s))[0]:
            has_begun = True
            yield _written(call.dialect.HEARTBEAT)
        try:
            answer = await self._take(scope, session, call, exchange)
        except HttpError as refusal:
            if not has_begun:
                raise
            session.note_refusal(refusal)
            yield _written(call.dialect.error_event(_wire_error(refusal)))
            return
        if answer is not None:
            yield b"".join(map(_written, call.dialect.answer_events(call, answer)))
            if await is_delivered(scope):
                exchange.delivered_at = time.monotonic()

    async def _take(
        self, scope: Scope, session: AgentSession, call: AgentCall, exchange: Exchange
    ) -> dict[str, Any] | None:
        """The body of the answer, which is a step of the rollout from here on; None when its caller has hung up."""
        response = await session.response(exchange)
        if is_gone(scope):
            return None
        with undisturbed(scope):
            await session.hand_over(exchange)
        answer = call.dialect.answer_body(call, response)
        if call.dialect.NAME == responses.NAME:
            session.remember_response(exchange, answer["id"])
        return answer


def _split(path: str) -> tuple[str, str]:
    """(secret in the path, the rest without the version): `/rollout/S/v1/messages` is ("S", "/messages")."""
    secret = ""
    if path.startswith(PREFIX):
        secret, _, rest = path[len(PREFIX) :].partition("/")
        path = f"/{rest}"
    while path.startswith("/v1/"):
        path = path[len("/v1") :]
    return secret, path.rstrip("/")


def _key(headers: Mapping[str, str]) -> str:
    return bearer(headers) or headers.get("x-api-key") or headers.get("api-key") or ""


def _count(value: str | None) -> int:
    return int(value) if value and value.isascii() and value.isdigit() and len(value) < 6 else 0


def _counted(session: AgentSession, call: AgentCall) -> HttpResponse:
    num_tokens = session.answerer.count_tokens(call)
    if num_tokens is None:
        raise HttpError(404, "the endpoint behind this proxy does not tell how many tokens a text has")
    return json_response({"input_tokens": num_tokens})


def _models(model: str) -> dict[str, Any]:
    entry = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "mettle", "type": "model"}
    return {"object": "list", "data": [entry], "has_more": False, "first_id": model, "last_id": model}


def _written(event: WireEvent | str) -> bytes:
    return event.encode() if isinstance(event, str) else sse(*event)


def _wire_error(refusal: HttpError) -> WireError:
    return WireError(refusal.status, str(refusal), refusal.code)


def _refused(dialect: ServedDialect, refusal: HttpError) -> HttpResponse:
    may_retry = refusal.status == 429
    headers = {**refusal.headers, "x-should-retry": "true" if may_retry else "false"}
    return json_response(dialect.error_body(_wire_error(refusal)), status=refusal.status, headers=headers)
