"""The server that agent programs take for a model's API: many rollouts, three dialects, one model behind them.

Parts: `ProxyServer`, `Listener` (a socket that one rollout's agent, or any, can reach). A call is read, handed to its
rollout's session, and answered in the dialect it came in; a stream is the whole answer in the right order of events.
Invariants: a caller is told apart by its secret before a byte of its body is read; whatever a caller sends, it gets an
answer in its dialect and nobody else notices; nothing here knows what is done with an answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import socket
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from aiohttp import web

from mettle.envs.proxy.calls import AgentCall, Dialect, Refusal, decoded, invalid
from mettle.envs.proxy.chat_dialect import ChatDialect
from mettle.envs.proxy.messages_dialect import MessagesDialect
from mettle.envs.proxy.responses_dialect import ResponsesDialect
from mettle.envs.proxy.sessions import Answerer, Exchange, Session, Sessions, is_secret_of

logger = logging.getLogger(__name__)

PREFIX = "/rollout/"
HEARTBEAT_S = 10.0
MAX_BODY_BYTES = 32 << 20
CHAT, RESPONSES, MESSAGES = ChatDialect(), ResponsesDialect(), MessagesDialect()
ROUTES: dict[str, Dialect] = {
    "/chat/completions": CHAT,
    "/responses": RESPONSES,
    "/messages": MESSAGES,
    "/messages/count_tokens": MESSAGES,
}


class Listener:
    """An open socket. Closing it drops the connections that came through it."""

    def __init__(self, server: asyncio.Server, protocols: web.Server) -> None:
        self._server = server
        self._protocols = protocols

    @property
    def port(self) -> int:
        """The port, where the socket has one."""
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Take no more calls."""
        self._server.close()
        await self._protocols.shutdown(0.05)


class ProxyServer:
    """Serves the sessions that are opened on it."""

    def __init__(self, *, max_body_bytes: int = MAX_BODY_BYTES, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.max_body_bytes = max_body_bytes
        self.heartbeat_s = heartbeat_s
        self.num_strangers = 0
        self._sessions = Sessions()
        self._listeners: set[Listener] = set()

    def open(self, answerer: Answerer, model: str, **options: Any) -> Session:
        """A session for one rollout."""
        session = Session(answerer, model, **options)
        self._sessions.add(session)
        return session

    def close_session(self, session: Session, reason: str) -> None:
        """Revoke its secret and refuse what it has in flight."""
        self._sessions.remove(session)
        session.close(reason)

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> Listener:
        """Take calls of any session on a TCP port of this host."""
        sock = socket.create_server((host, port), backlog=1024)
        sock.setblocking(False)
        return await self.serve(sock)

    async def serve(self, sock: socket.socket, only: Session | None = None) -> Listener:
        """Take calls on a listening socket; with `only`, those of that session and no other."""
        protocols = web.Server(partial(self._handle, only), access_log=None, keepalive_timeout=75.0)
        server = await asyncio.get_running_loop().create_server(protocols, sock=sock)
        listener = Listener(server, protocols)
        self._listeners.add(listener)
        return listener

    async def stop(self, listener: Listener) -> None:
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

    async def _handle(self, only: Session | None, request: web.BaseRequest) -> web.StreamResponse:
        secret, path = _split(request.path)
        dialect = ROUTES.get(path, MESSAGES if "anthropic-version" in request.headers else CHAT)
        session: Session | None = None
        call: AgentCall | None = None
        try:
            session = self._admit(only, secret or _key(request.headers))
            session.enter()
            try:
                if path == "/models" or path.startswith("/models/"):
                    return web.json_response(_models(session.model))
                if path not in ROUTES or request.method != "POST":
                    raise Refusal(404, "not_found_error", f"{request.method} {request.path} is not served here")
                call = await self._read(request, session, dialect)
                if path == "/messages/count_tokens":
                    return _counted(session, call)
                return await self._answer(request, session, call)
            finally:
                session.leave()
        except Refusal as refusal:
            if session is not None:
                session.note_refusal(refusal)
            return _refused(dialect, refusal)

    def _admit(self, only: Session | None, secret: str) -> Session:
        session = only if only is not None and is_secret_of(only, secret) else None
        if only is None:
            session = self._sessions.find(secret)
        if session is None:
            self.num_strangers += 1
            raise Refusal(
                401, "authentication_error", "the API key is none of a running rollout", code="invalid_api_key"
            )
        return session

    async def _read(self, request: web.BaseRequest, session: Session, dialect: Dialect) -> AgentCall:
        raw = await self._body(request, session)
        call = dialect.read(decoded(raw))
        call.digest = hashlib.blake2b(raw, key=dialect.name.encode(), digest_size=16).digest()
        call.num_retries = _count(request.headers.get("x-stainless-retry-count"))
        call.headers = dict(request.headers)
        return call

    async def _body(self, request: web.BaseRequest, session: Session) -> bytes:
        """A request's body; all bodies of a rollout that are being read share twice the limit of one."""
        raw = bytearray()
        limit = self.max_body_bytes
        try:
            async for chunk in request.content.iter_any():
                raw += chunk
                session.num_bytes += len(chunk)
                if len(raw) > limit:
                    raise Refusal(413, "request_too_large", f"the body is longer than the {limit} bytes allowed")
                if session.num_bytes > 2 * limit:
                    message = "too many long requests at once; wait for an answer"
                    raise Refusal(429, "rate_limit_error", message, may_retry=True)
        except (ConnectionError, web.RequestPayloadError) as error:
            invalid(f"the body broke off: {error}")
        finally:
            session.num_bytes -= len(raw)
        return bytes(raw)

    async def _answer(self, request: web.BaseRequest, session: Session, call: AgentCall) -> web.StreamResponse:
        exchange = session.exchange(call)
        try:
            if call.is_stream:
                return await self._stream(request, session, call, exchange)
            response = await session.response(exchange)
            if _is_gone(request):
                return web.Response(status=499)
            await session.hand_over(exchange)
            answer = call.dialect.answer(call, response)
            made = web.json_response(answer)
            await _send(request, made)
            exchange.delivered_at = time.monotonic()
            if call.dialect is RESPONSES:
                session.remember_response(exchange, answer["id"])
            return made
        except ConnectionError:
            return web.Response(status=499)
        finally:
            exchange.num_waiting -= 1

    async def _stream(
        self, request: web.BaseRequest, session: Session, call: AgentCall, exchange: Exchange
    ) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        while not (await asyncio.wait([exchange.task], timeout=self.heartbeat_s))[0]:
            if not stream.prepared:
                await stream.prepare(request)
            await stream.write(call.dialect.heartbeat())
        try:
            response = await session.response(exchange)
            if _is_gone(request):
                return web.Response(status=499)
            await session.hand_over(exchange)
        except Refusal as refusal:
            if not stream.prepared:
                raise
            session.note_refusal(refusal)
            await stream.write(call.dialect.refusal_event(refusal))
            await stream.write_eof()
            return stream
        answer = call.dialect.answer(call, response)
        if call.dialect is RESPONSES:
            session.remember_response(exchange, answer["id"])
        if not stream.prepared:
            await stream.prepare(request)
        await stream.write(b"".join(call.dialect.events(call, answer)))
        await stream.write_eof()
        exchange.delivered_at = time.monotonic()
        return stream


async def _send(request: web.BaseRequest, response: web.Response) -> None:
    await response.prepare(request)
    await response.write_eof()


def _is_gone(request: web.BaseRequest) -> bool:
    transport = request.transport
    return transport is None or transport.is_closing()


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
    bearer = headers.get("Authorization", "")
    if bearer.lower().startswith("bearer "):
        return bearer[len("bearer ") :].strip()
    return headers.get("x-api-key") or headers.get("api-key") or ""


def _count(value: str | None) -> int:
    return int(value) if value and value.isascii() and value.isdigit() and len(value) < 6 else 0


def _counted(session: Session, call: AgentCall) -> web.Response:
    num_tokens = session.answerer.count_tokens(call)
    if num_tokens is None:
        raise Refusal(404, "not_found_error", "the endpoint behind this proxy does not tell how many tokens a text has")
    return web.json_response({"input_tokens": num_tokens})


def _models(model: str) -> dict[str, Any]:
    entry = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "mettle", "type": "model"}
    return {"object": "list", "data": [entry], "has_more": False, "first_id": model, "last_id": model}


def _refused(dialect: Dialect, refusal: Refusal) -> web.Response:
    headers = {"x-should-retry": "true" if refusal.may_retry else "false"}
    if refusal.may_retry:
        headers["Retry-After"] = "1"
    body = json.dumps(dialect.refusal(refusal), ensure_ascii=False).encode("utf-8", "replace")
    return web.Response(status=refusal.status, body=body, content_type="application/json", headers=headers)


def base_url(host: str, port: int) -> str:
    """Where agents that speak OpenAI's APIs find a listener."""
    return f"http://{host}:{port}/v1"
