"""The door for workers from outside: what they read, with the token of their invitation, and what they say, signed.

    GET  /work/v1/facts            the session, what is served and how, the files of the model
    GET  /work/v1/versions/{n}     the files of the version that is served
    GET  /work/v1/pieces/{sha256}  a piece of a file, from here or from any worker that has it
    POST /work/v1/join  /poll  /answer  /leave

Invariant: this listens apart from the engine's own routes, so that whoever reaches the one reaches nothing of the
other.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import socket
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from mettle.errors import MettleError, StorageError
from mettle.inference.engine.protocol import Choice
from mettle.inference.outside.config import OutsideConfig
from mettle.inference.outside.door_file import read_door, write_door
from mettle.inference.outside.engine import OutsideEngine, WorkRefused
from mettle.inference.outside.files import PieceStore, describe_folder, wire_listing
from mettle.inference.outside.relays import relay_address
from mettle.inference.outside.roster import Invitation, JoinRefused, OutsideWorker
from mettle.inference.outside.signatures import (
    COUNT_HEADER,
    KEY_HEADER,
    SIGNATURE_HEADER,
    check_signature,
    signed_bytes,
)
from mettle.inference.remote import wire_request
from mettle.storage.files import write_json
from mettle.web.app import Row, WebApp, routed
from mettle.web.bodies import checked, read_body
from mettle.web.doors import Door, allowed_hosts, bearer
from mettle.web.problems import HttpError, json_response
from mettle.web.server import HttpServer, bind, url_of

PREFIX: Final = "/work/v1"
MAX_WAIT_S: Final = 20.0
MAX_CHOICES: Final = 4096
_REFUSED: Final = "refused"
_MAX_RELAYS: Final = 32


class JoinBody(BaseModel):
    """`relay` is where the worker hands pieces on, if it does."""

    model_config = ConfigDict(strict=True, extra="forbid")

    relay: str = Field(default="", max_length=200)


class PollBody(BaseModel):
    """Which version the worker serves, for how many completions it has room, and which requests it works on."""

    model_config = ConfigDict(strict=True, extra="forbid")

    version: int
    room: int = Field(ge=0)
    working_on: list[str] = Field(default_factory=list, max_length=MAX_CHOICES)
    wait_s: float = Field(default=0.0, ge=0, le=MAX_WAIT_S)


class SampledChoice(BaseModel):
    """A completion as a worker tells it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    stop: str | None = None


class AnswerBody(BaseModel):
    """What came of a request."""

    model_config = ConfigDict(strict=True, extra="forbid")

    request_id: str
    choices: list[SampledChoice] = Field(max_length=MAX_CHOICES)


class OutsideDoor:
    """Answers workers on a socket of its own."""

    def __init__(self, engine: OutsideEngine, folder: Path, model: Path, name: str, dtype: str) -> None:
        self._engine, self._folder, self._model, self._name, self._dtype = engine, folder, model, name, dtype
        self._session = secrets.token_hex(16)
        self._pieces = PieceStore()
        self._http: HttpServer | None = None
        self.base_url = ""

    def routes(self) -> list[Row]:
        """Who may ask what is decided by tokens and signatures, in the handlers."""
        return [
            ("GET", f"{PREFIX}/facts", self._facts),
            ("GET", f"{PREFIX}/versions/{{version:int}}", self._version),
            ("GET", f"{PREFIX}/pieces/{{digest}}", self._piece),
            ("POST", f"{PREFIX}/join", self._join),
            ("POST", f"{PREFIX}/poll", self._poll),
            ("POST", f"{PREFIX}/answer", self._answer),
            ("POST", f"{PREFIX}/leave", self._leave),
        ]

    async def start(self, listener: socket.socket) -> None:
        """Answer, and write down where."""
        host, port = listener.getsockname()[:2]
        self.base_url = url_of(host, port)
        app = WebApp(routed(self.routes()), door=Door(allowed_hosts(host)), as_error=_as_http_error)
        self._http = HttpServer(app, listener)
        await self._http.start()
        write_door(self._folder, self.base_url, host, port)

    async def stop(self) -> None:
        """Answer no more."""
        if self._http is not None:
            await self._http.stop(0.0)

    async def _facts(self, request: Request) -> Response:
        self._invitation(request)
        files = await asyncio.to_thread(self._pieces.add, self._model)
        return json_response(
            {
                "run": self._name,
                "session": self._session,
                "dtype": self._dtype,
                "max_model_len": self._engine.max_model_len,
                "lease_s": self._engine.config.lease_s,
                "model": wire_listing(files),
                "relays": self._relays(),
                "version": self._engine.serving().version,
            }
        )

    async def _version(self, request: Request) -> Response:
        self._invitation(request)
        serving = self._engine.serving()
        version = request.path_params["version"]
        if version != serving.version:
            raise HttpError(
                409, f"version {version} is not served any more; {serving.version} is", code="other_version"
            )
        if serving.weights is None:
            return json_response({"version": version, "files": None})
        files = await asyncio.to_thread(describe_folder, serving.weights)
        self._pieces.add(serving.weights, files)
        return json_response({"version": version, "files": wire_listing(files), "relays": self._relays()})

    async def _piece(self, request: Request) -> Response:
        self._invitation(request)
        return await piece_answer(self._pieces, request)

    async def _join(self, request: Request) -> Response:
        invitation = self._invitation(request)
        body, key, _ = await self._signed(request)
        asked = checked(JoinBody, body)
        if asked.relay and relay_address(asked.relay) is None:
            raise HttpError(400, f"{asked.relay!r} is no address", param="relay")
        with self._engine.locked():
            worker = self._engine.roster.join(key, invitation, asked.relay)
            self._engine.roster.save()
        return json_response({"name": worker.name})

    async def _poll(self, request: Request) -> Response:
        worker, body, _ = await self._heard(request)
        asked = checked(PollBody, body)
        loop = asyncio.get_running_loop()
        has_news = asyncio.Event()
        end = self._engine.wake_with(lambda: _set_in(loop, has_news))
        deadline = loop.time() + asked.wait_s
        try:
            while True:
                has_news.clear()
                work = self._engine.poll(worker, asked.version, asked.room, asked.working_on)
                left_s = deadline - loop.time()
                if work.assignments or work.lost or work.version != asked.version or left_s <= 0:
                    break
                try:
                    async with asyncio.timeout(min(left_s, 1.0)):
                        await has_news.wait()
                except TimeoutError:
                    continue
        finally:
            end()
        assigned = [
            {**wire_request(one.request), "request_id": one.request.request_id, "version": one.version}
            for one in work.assignments
        ]
        return json_response({"version": work.version, "assigned": assigned, "lost": work.lost})

    async def _answer(self, request: Request) -> Response:
        worker, body, signature = await self._heard(request)
        told = checked(AnswerBody, body)
        choices = [
            Choice(index, one.token_ids, one.logprobs, [], finish_reason=one.finish_reason, stop=one.stop)
            for index, one in enumerate(told.choices)
        ]
        try:
            await asyncio.to_thread(self._engine.answer, worker, told.request_id, choices)
        except WorkRefused as error:
            if error.is_banned:
                about = {**signature, "session": self._session, "body": body.decode(), "why": str(error)}
                write_json(self._folder / _REFUSED / f"{worker.key[:16]}.json", about)
            raise
        return json_response({"taken": told.request_id})

    async def _leave(self, request: Request) -> Response:
        worker, _, _ = await self._heard(request)
        await asyncio.to_thread(self._engine.leave, worker)
        return json_response({"left": worker.name})

    def _relays(self) -> list[str]:
        found = [worker.relay for worker in self._engine.roster.here() if worker.relay]
        return found if len(found) <= _MAX_RELAYS else random.SystemRandom().sample(found, _MAX_RELAYS)

    def _invitation(self, request: Request) -> Invitation:
        found = self._engine.roster.invitation(bearer(request.headers))
        if found is None:
            message = "this door wants the token of an invitation: `Authorization: Bearer ...`"
            raise HttpError(401, message, code="invalid_token", headers={"WWW-Authenticate": "Bearer"})
        return found

    async def _signed(self, request: Request) -> tuple[bytes, str, dict[str, Any]]:
        """The body, the key that has signed it, and what was signed."""
        body = await read_body(request)
        given = {name: request.headers.get(name, "") for name in (KEY_HEADER, COUNT_HEADER, SIGNATURE_HEADER)}
        key, count = given[KEY_HEADER], given[COUNT_HEADER]
        is_number = count.isascii() and count.isdecimal() and len(count) < 20
        signed = signed_bytes(request.method, request.url.path, self._session, int(count) if is_number else -1, body)
        if not (is_number and check_signature(key, given[SIGNATURE_HEADER], signed)):
            message = "the signature is not that of this key over this word in this session; read the facts again"
            raise HttpError(401, message, code="bad_signature")
        return body, key, {"key": key, "count": int(count), "signature": given[SIGNATURE_HEADER]}

    async def _heard(self, request: Request) -> tuple[OutsideWorker, bytes, dict[str, Any]]:
        body, key, signature = await self._signed(request)
        return self._engine.hear(key, signature["count"]), body, signature


async def open_relay(pieces: PieceStore, address: str) -> HttpServer:
    """Hand pieces on at an address of this machine. No secret is asked for: who knows a hash knows the run.

    Raises: UserError when the address is not free.
    """
    host, _, port = address.removeprefix("http://").rpartition(":")
    listener = bind(host, int(port))

    async def piece(request: Request) -> Response:
        return await piece_answer(pieces, request)

    server = HttpServer(WebApp(routed([("GET", "/pieces/{digest}", piece)]), door=Door(allowed_hosts(host))), listener)
    await server.start()
    return server


async def piece_answer(pieces: PieceStore, request: Request) -> Response:
    """A piece for whoever names it. Raises: HttpError 404 when it is not here."""
    digest = request.path_params["digest"]
    data = await asyncio.to_thread(pieces.read, digest)
    if data is None:
        raise HttpError(404, f"no piece {digest[:64]!r} is here", code="no_piece")
    return Response(data, media_type="application/octet-stream")


def bind_door(config: OutsideConfig) -> socket.socket:
    """A socket for the door: where it was before, if nobody has taken that meanwhile. Raises: UserError."""
    assert config.folder is not None, "the config was checked"
    if config.port == 0:
        with contextlib.suppress(MettleError, KeyError, ValueError, TypeError):  # it is a wish
            return bind(config.host, int(read_door(config.folder)["port"]))
    return bind(config.host, config.port)


def _set_in(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    try:
        loop.call_soon_threadsafe(event.set)
    except RuntimeError:  # the loop is closed, so nobody waits
        return


def _as_http_error(error: Exception) -> HttpError | None:
    match error:
        case JoinRefused():
            return HttpError(403, str(error), code="not_admitted")
        case WorkRefused(is_banned=True):
            return HttpError(403, f"this worker is banned: {error}", code="banned")
        case WorkRefused():
            return HttpError(409, str(error), code="not_taken")
        case StorageError():
            return HttpError(404, str(error), code="gone")
    return None
