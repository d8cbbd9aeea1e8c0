"""The sandbox service as a part of the Hub: the Hub's people, scopes and audit log, one quota for each person.

It is the service of `mettle sandbox serve` without its tokens, started when the first sandbox is asked for. Invariants:
who asks is known, and may ask, before anything is started; a machine belongs to a person, whichever token asks.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from starlette.requests import HTTPConnection, Request
from starlette.types import Receive, Scope, Send

from mettle.errors import MettleError
from mettle.hub.access import caller_of
from mettle.hub.accounts import audit
from mettle.hub.accounts.people import person_by_id
from mettle.hub.lab import Lab
from mettle.sandbox.config import SandboxConfig
from mettle.sandbox.service import faults
from mettle.sandbox.service.answers import body_of, problem_of
from mettle.sandbox.service.app import make_app, sweeping
from mettle.sandbox.service.config import QuotaConfig, ServiceConfig
from mettle.sandbox.service.machines import MachineRecord
from mettle.sandbox.service.routes import prime
from mettle.sandbox.service.routes.prime_gateway import PREFIX, gateway_holder
from mettle.sandbox.service.server import started_service
from mettle.sandbox.service.state import SandboxService
from mettle.sandbox.service.tokens import Holder
from mettle.web.app import WebApp
from mettle.web.doors import Door
from mettle.web.problems import HttpError

logger = logging.getLogger(__name__)
_READS: Final = ("GET", "HEAD")
_CLOSE_S: Final = 20.0


class HubSandboxes:
    """An ASGI application over a sandbox service that is started on demand."""

    def __init__(self, lab: Lab, host: str, sandbox: SandboxConfig, quota: QuotaConfig) -> None:
        self._lab = lab
        self._config = ServiceConfig(host=host, port=0, sandbox=sandbox, quota=quota, spool_dir=lab.folder / "incoming")
        self._lock = asyncio.Lock()
        self._over = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._app: WebApp | None = None
        self._service: SandboxService | None = None
        self._names: dict[str, str] = {}
        self._auditor = ThreadPoolExecutor(1, "sandbox audit")
        self._door = WebApp(self._dispatch, door=Door(None, max_body_bytes=None), error_body=body_of)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._door(scope, receive, send)

    @property
    def service(self) -> SandboxService | None:
        """The service while it runs; None before the first sandbox is asked for, and after its end."""
        return self._service

    @property
    def config(self) -> ServiceConfig:
        """What the service is started with."""
        return self._config

    async def close(self) -> None:
        """End every machine."""
        self._over.set()
        if self._serving is not None:
            await asyncio.wait({self._serving}, timeout=_CLOSE_S)
        await asyncio.to_thread(self._auditor.shutdown)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses before it starts anything."""
        if self._app is None and not scope["path"].startswith(PREFIX):
            connection = HTTPConnection(scope)
            try:
                await asyncio.to_thread(self._holder, connection)
            except (MettleError, HttpError) as error:
                raise prime.problem_of(error, connection) or problem_of(error, connection) from error
        await (await self._started())(scope, receive, send)

    async def _started(self) -> WebApp:
        async with self._lock:
            if self._app is None or (self._serving is not None and self._serving.done()):
                ready: asyncio.Future[WebApp] = asyncio.get_running_loop().create_future()
                self._serving = asyncio.create_task(self._serve(ready), name="sandboxes of the Hub")
                self._app = await ready
            return self._app

    async def _serve(self, ready: asyncio.Future[WebApp]) -> None:
        try:
            self._config.spool_dir.mkdir(exist_ok=True)
            async with started_service(self._config, self) as service, sweeping(service):
                service.register.on_change = self._note
                self._service = service
                ready.set_result(make_app(service, self._identify))
                await self._over.wait()
                service.is_closing = True
        except (MettleError, OSError) as error:
            logger.warning("sandboxes cannot be offered", extra={"why": str(error)})
            if ready.done():
                raise
            ready.set_exception(HttpError(503, f"this Hub can offer no sandboxes: {error}", code="not_offered"))
        finally:
            self._service = None

    async def _identify(self, service: SandboxService, connection: HTTPConnection) -> Holder:
        def known() -> Holder:
            given = gateway_holder(service, connection)
            return given or Holder(self._holder(connection), service.config.quota)

        return await asyncio.to_thread(known)

    def _holder(self, connection: HTTPConnection) -> str:
        """Who asks. Raises: TokenRefused for nobody, HttpError 403 for a token that does not cover it."""
        scope = {**connection.scope, "type": "http", "method": connection.scope.get("method", "POST")}
        try:
            caller = caller_of(Request(scope), self._lab)
        except HttpError as error:
            raise faults.TokenRefused(str(error)) if error.status == 401 else error from None
        if caller.person is None:
            raise faults.TokenRefused("sign in first: `mettle login`, or a token as `Authorization: Bearer ...`")
        wanted = "sandboxes:read" if scope["method"] in _READS else "sandboxes:write"
        if not caller.may(wanted):
            raise HttpError(403, f"this token does not cover {wanted}; make one that does", code="scope_missing")
        self._names[caller.person.id] = caller.name
        return caller.person.id

    def knows(self, name: str) -> bool:
        """Whether a person may still use what they were given a pass for."""
        with self._lab.database.read() as c:
            person = person_by_id(c, name)
        return person is not None and not person.is_disabled

    def holder(self, header: str | None) -> Holder:
        """Not asked: the Hub tells its callers apart by more than a header."""
        raise faults.TokenRefused("this sandbox service is part of a Hub; sign in there")

    def _note(self, what: str, record: MachineRecord) -> None:
        if not self._over.is_set():
            self._auditor.submit(self._write_note, what, record)

    def _write_note(self, what: str, record: MachineRecord) -> None:
        detail = record.name if what == "create" else record.why
        try:
            with self._lab.database.write() as c:
                audit.note(c, self._names.get(record.owner, record.owner), f"sandbox.{what}", record.id, detail=detail)
        except MettleError as error:
            logger.warning("the audit log took no line", extra={"machine": record.id, "error": str(error)})
