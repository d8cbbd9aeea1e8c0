"""The Docker Engine API, as far as the backend uses it, over a unix socket or TCP with TLS.

    requests    JSON in and out; what the daemon says about an error is in the error
    pull        the stream of progress, whose last words may be an error though the status was 200
    attach      the hijacked connection, in `stream.py`

Invariant: what changes nothing, or can be repeated under the same name, is tried again while the daemon is away or
busy, and no longer than the patience; everything else is tried once.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

import aiohttp

from mettle.errors import UserError
from mettle.sandbox.containers.docker.address import Address
from mettle.sandbox.containers.docker.config import DockerConfig
from mettle.sandbox.containers.docker.stream import DockerTransport, attach
from mettle.sandbox.containers.faults import ControlPlaneAway, ControlPlaneError, ImageMissing
from mettle.sandbox.containers.http_lines import read_lines
from mettle.sandbox.containers.patience import Patience, retry_after_s

logger = logging.getLogger(__name__)

_OURS: Final = (1, 43)
_OLDEST: Final = (1, 41)
_REQUEST_S: Final = 60.0
_PROGRESS_S: Final = 2.0
_BUSY: Final = (429, 503)
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


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
    """One daemon."""

    def __init__(self, config: DockerConfig) -> None:
        self._config = config
        self.address = find_address(config)
        self._session: aiohttp.ClientSession | None = None
        self._prefix = ""
        self.version = ""
        self.is_podman = False

    async def open(self) -> None:
        """Connect, and agree on a version of the API. Raises: UserError, ControlPlaneAway."""
        address = self.address
        connector = (
            aiohttp.UnixConnector(address.path, limit=0)
            if address.path
            else aiohttp.TCPConnector(ssl=address.tls or False, limit=0)
        )
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        found = await self.get("/version")
        theirs = _number(found.get("ApiVersion", "0.0"))
        if theirs < _OLDEST:
            raise UserError(
                f"the Docker daemon speaks API {found.get('ApiVersion')}; 1.41 (Docker 20.10) is the oldest"
            )
        major, minor = min(theirs, _OURS)
        self._prefix = f"/v{major}.{minor}"
        self.version = str(found.get("Version", ""))
        self.is_podman = any("Podman" in part.get("Name", "") for part in found.get("Components") or ())

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> Any:
        return await self.send("GET", path, params=params, is_repeatable=True)

    async def send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        data: bytes | None = None,
        is_repeatable: bool = False,
        timeout_s: float = _REQUEST_S,
    ) -> Any:
        """The answer to a request, None if it has no body. Raises: ControlPlaneError with the status, UserError."""
        patience = Patience(self._config.patience_s)
        while True:
            try:
                return await self._send_once(method, path, params, body, data, timeout_s)
            except ControlPlaneError as error:
                is_away = isinstance(error, ControlPlaneAway)
                may_repeat = error.status in _BUSY or (is_away and is_repeatable)
                if not may_repeat or not await patience.wait(error.retry_after_s):
                    raise

    async def pull(self, image: str) -> None:
        """Fetch an image, saying how far it is. Raises: ImageMissing, ControlPlaneError."""
        name, tag = _split_image(image)
        params = {"fromImage": name, **({"tag": tag} if tag else {})}
        headers, limit_s = self._registry_auth(), self._config.pull_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                response = await self._request("POST", "/images/create", params=params, headers=headers)
                async with response:
                    if response.status != 200:
                        raise ImageMissing(f"the image {image!r} cannot be pulled: {await _message(response)}")
                    await _follow_pull(image, response)
        except TimeoutError as error:
            raise ControlPlaneAway(f"the image {image!r} was not pulled within {limit_s:.0f} s") from error
        except aiohttp.ClientError as error:
            raise ControlPlaneAway(f"the Docker daemon ended the pull of {image!r}: {error}") from error

    async def attach(self, container: str) -> DockerTransport:
        """The streams of a container's process 1, before it is started."""
        query = "stream=1&stdin=1&stdout=1&stderr=1"
        return await attach(self.address, f"{self._prefix}/containers/{quote(container)}/attach?{query}")

    async def _send_once(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None,
        body: Any,
        data: bytes | None,
        timeout_s: float,
    ) -> Any:
        headers = {"Content-Type": "application/x-tar"} if data is not None else {}
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._request(method, path, params=params, json=body, data=data, headers=headers)
                async with response:
                    if response.status >= 400:
                        failed = ControlPlaneError(
                            f"Docker: {method} {path}: {response.status}: {await _message(response)}", response.status
                        )
                        failed.retry_after_s = retry_after_s(response.headers)
                        raise failed
                    text = await response.read()
        except TimeoutError as error:
            raise ControlPlaneAway(
                f"the Docker daemon at {self.address.text} did not answer {method} {path}"
            ) from error
        except aiohttp.ClientError as error:
            raise ControlPlaneAway(
                f"the Docker daemon at {self.address.text} ended {method} {path}: {error}"
            ) from error
        return json.loads(text) if text.strip() else None

    async def _request(self, method: str, path: str, **arguments: Any) -> aiohttp.ClientResponse:
        assert self._session is not None, "the client is open"
        scheme = "https" if self.address.tls else "http"
        place = self.address.host if self.address.path else f"{self.address.host}:{self.address.port}"
        timeout = aiohttp.ClientTimeout(total=None)
        url = f"{scheme}://{place}{self._prefix}{path}"
        try:
            return await self._session.request(method, url, timeout=timeout, **arguments)
        except PermissionError as error:
            raise UserError(f"{self.address.text} may not be used by this user: {error.strerror}") from error
        except (aiohttp.ClientError, OSError) as error:
            why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            raise ControlPlaneAway(
                f"no Docker daemon answers at {self.address.text} ({why}); start it, or set sandbox.docker.host"
            ) from error

    def _registry_auth(self) -> dict[str, str]:
        name = self._config.registry_auth_env
        if name is None:
            return {}
        user, colon, password = os.environ.get(name, "").partition(":")
        if not colon:
            raise UserError(f"sandbox.docker.registry_auth_env names {name}, which does not hold user:password")
        text = json.dumps({"username": user, "password": password})
        return {"X-Registry-Auth": base64.urlsafe_b64encode(text.encode()).decode()}


async def _follow_pull(image: str, response: aiohttp.ClientResponse) -> None:
    layers: dict[str, tuple[int, int]] = {}
    last_said = time.monotonic()
    async for line in read_lines(response.content):
        told = json.loads(line)
        if "error" in told:
            raise ImageMissing(f"the image {image!r} cannot be pulled: {told['error']}")
        progress = told.get("progressDetail") or {}
        if told.get("id") and "total" in progress:
            layers[told["id"]] = (int(progress.get("current", 0)), int(progress["total"]))
        if time.monotonic() - last_said > _PROGRESS_S and layers:
            last_said = time.monotonic()
            done, total = (sum(column) for column in zip(*layers.values(), strict=True))
            logger.info("pulling %s: %d of %d MB, %d layers", image, done >> 20, total >> 20, len(layers))
    logger.info("pulled %s", image)


async def _message(response: aiohttp.ClientResponse) -> str:
    text = (await response.read()).decode(errors="replace")
    with contextlib.suppress(ValueError, AttributeError):
        text = str(json.loads(text).get("message", text))
    return text.strip()[:500]


def _split_image(image: str) -> tuple[str, str]:
    """Name and tag; a digest belongs to the name, and a colon before a slash is a port."""
    if "@" in image:
        return image, ""
    head, slash, last = image.rpartition("/")
    name, _, tag = last.partition(":")
    return f"{head}{slash}{name}", tag or "latest"


def _number(version: str) -> tuple[int, int]:
    major, _, minor = version.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)
