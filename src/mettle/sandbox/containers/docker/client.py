"""One Docker daemon, through `aiodocker`: how it is reached, how long it is waited for, and what its errors are here.

Invariant: what changes nothing, or can be repeated under the same name, is tried again while the daemon is away or
busy, and no longer than the config says; everything else is tried once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

import aiohttp

from mettle.errors import UserError
from mettle.sandbox.containers.docker.config import DockerConfig
from mettle.sandbox.containers.errors import RETRIED, ControlPlaneAway, ControlPlaneError
from mettle.web.backoff import Retries, retry_after_s

try:
    from aiodocker import Docker, DockerError
except ImportError:
    raise UserError("the backend docker needs aiodocker: pip install 'mettle-lab[docker]'") from None

logger = logging.getLogger(__name__)

T = TypeVar("T")
_OURS: Final = (1, 43)
_OLDEST: Final = (1, 41)
_REQUEST_S: Final = 60.0
_AWAY: Final = 900
"""What aiodocker calls the status of a daemon that it cannot connect to."""
_BUSY: Final = (429, 503)
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_asked_s: ContextVar[float | None] = ContextVar("retry_after_s", default=None)


class Address(NamedTuple):
    """Where the daemon listens."""

    text: str
    path: str | None  # of a unix socket
    host: str
    port: int
    tls: ssl.SSLContext | None


def find_address(config: DockerConfig, environ: Mapping[str, str] = os.environ) -> Address:
    """From the config, or the variables that Docker's own tools read. Raises: UserError."""
    text = config.host or environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    parts = urlsplit(text)
    if parts.scheme == "unix" and parts.path:
        return Address(text, parts.path, "docker", 0, None)
    if parts.scheme not in ("tcp", "https", "http") or not parts.hostname:
        raise UserError(f"the Docker host is {text!r}; it must be unix:///path or tcp://name:port")
    tls = _make_tls(config, environ)
    if tls is None and parts.hostname not in _LOOPBACK:
        raise UserError(
            f"the Docker daemon at {text} would be spoken to without TLS, and whoever is on the way could take its "
            "host over; set sandbox.docker.cert_path"
        )
    return Address(text, None, parts.hostname, parts.port or (2376 if tls else 2375), tls)


def _make_tls(config: DockerConfig, environ: Mapping[str, str]) -> ssl.SSLContext | None:
    folder = config.cert_path
    if folder is None and environ.get("DOCKER_TLS_VERIFY"):
        folder = Path(environ.get("DOCKER_CERT_PATH") or Path.home() / ".docker")
    if folder is None:
        return None
    try:
        made = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        made.load_cert_chain(str(folder / "cert.pem"), str(folder / "key.pem"))
    except (OSError, ssl.SSLError) as error:
        raise UserError(
            f"{folder} has no usable ca.pem, cert.pem and key.pem for the Docker daemon: {error}"
        ) from error
    return made


class DockerClient:
    """One daemon. `docker` is what requests are made with, by `ask`."""

    docker: Docker

    def __init__(self, config: DockerConfig) -> None:
        self._config = config
        self.address = find_address(config)
        self._session: aiohttp.ClientSession | None = None
        self.version = ""
        self.is_podman = False

    async def open(self) -> None:
        """Connect, and agree on a version of the API. Raises: UserError, ControlPlaneAway."""
        await self.close()
        address = self.address
        scheme, place = ("https" if address.tls else "http"), f"{address.host}:{address.port}"
        connector = (
            aiohttp.UnixConnector(address.path, limit=0)
            if address.path
            else aiohttp.TCPConnector(ssl=address.tls or False, limit=0)
        )
        tracing = aiohttp.TraceConfig()
        tracing.on_request_end.append(_note_retry_after)
        timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, trace_configs=[tracing])
        url = "unix://localhost" if address.path else f"{scheme}://{place}"
        self.docker = Docker(url, session=self._session, timeout=timeout)
        found = await self.ask("version", self.docker.version, is_repeatable=True)
        theirs = _number(found.get("ApiVersion", "0.0"))
        if theirs < _OLDEST:
            raise UserError(
                f"the Docker daemon speaks API {found.get('ApiVersion')}; 1.41 (Docker 20.10) is the oldest"
            )
        major, minor = min(theirs, _OURS)
        self.docker.api_version = f"v{major}.{minor}"
        self.version = str(found.get("Version", ""))
        self.is_podman = any("Podman" in part.get("Name", "") for part in found.get("Components") or ())

    async def close(self) -> None:
        if self._session is not None:
            await self.docker.close()
            await self._session.close()
            self._session = None

    async def ask(self, what: str, request: Callable[[], Awaitable[T]], *, is_repeatable: bool = False) -> T:
        """What a request gives. Raises: ControlPlaneError with the status, UserError."""
        retries = Retries(RETRIED, limit_s=self._config.patience_s)
        while True:
            _asked_s.set(None)
            try:
                return await self._ask_once(what, request)
            except ControlPlaneError as error:
                may_repeat = error.status in _BUSY or (isinstance(error, ControlPlaneAway) and is_repeatable)
                if not may_repeat or not await retries.again(_asked_s.get()):
                    raise

    async def remove(self, container_id: str) -> None:
        """End and remove a container. Raises: ControlPlaneError, also for one that is gone or going."""
        container = self.docker.containers.container(container_id)
        await self.ask("remove container", lambda: container.delete(force=True, v=True), is_repeatable=True)

    async def _ask_once(self, what: str, request: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(_REQUEST_S):
                return await request()
        except TimeoutError as error:
            raise ControlPlaneAway(f"the Docker daemon at {self.address.text} did not answer: {what}") from error
        except aiohttp.ClientError as error:
            raise ControlPlaneAway(f"the Docker daemon at {self.address.text} ended {what}: {error}") from error
        except DockerError as error:
            raise self.explain(what, error) from error

    def explain(self, what: str, error: DockerError) -> Exception:
        """The error as one of ours, in the daemon's own words."""
        if error.status != _AWAY:
            return ControlPlaneError(f"Docker: {what}: {error.status}: {words_of(error)}", error.status)
        cause = getattr(error.__context__, "os_error", error.__context__)
        if isinstance(cause, PermissionError):
            return UserError(f"{self.address.text} may not be used by this user: {cause.strerror}")
        number = getattr(cause, "errno", None)
        why = os.strerror(number) if number and number > 0 else str(cause)
        return ControlPlaneAway(
            f"no Docker daemon answers at {self.address.text} ({why}); start it, or set sandbox.docker.host"
        )


def words_of(error: DockerError) -> str:
    """What the daemon says; a body that aiodocker did not take for JSON may be one all the same."""
    text = str(error.message)
    with contextlib.suppress(ValueError, AttributeError):
        text = str(json.loads(text).get("message", text))
    return text.strip()[:500]


async def _note_retry_after(_: object, __: object, ended: aiohttp.TraceRequestEndParams) -> None:
    """aiodocker's errors have no headers; the task that made the request sees what is set here."""
    if ended.response.status in _BUSY:
        _asked_s.set(retry_after_s(ended.response.headers.get("Retry-After")))


def _number(version: str) -> tuple[int, int]:
    major, _, minor = version.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)
