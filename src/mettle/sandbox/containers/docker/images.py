"""Images by name, pulled where they are missing, and known by what is in them.

Invariant: within a pool a name stands for one image, whatever the registry does meanwhile; an image is pulled once,
however many machines wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from typing import Any, Final, NamedTuple

import aiohttp
from aiodocker import DockerError

from mettle.errors import UserError
from mettle.sandbox.containers.docker.client import DockerClient, words_of
from mettle.sandbox.containers.docker.config import DockerConfig
from mettle.sandbox.containers.errors import ControlPlaneAway, ControlPlaneError, ImageMissing

logger = logging.getLogger(__name__)

_GONE: Final = 404
_PROGRESS_S: Final = 2.0


class Image(NamedTuple):
    """What the daemon calls it, and the registry's digest (the daemon's own id for one that was built here)."""

    id: str
    digest: str


class Images:
    """The images of one pool."""

    def __init__(self, config: DockerConfig, client: DockerClient) -> None:
        self._config = config
        self._client = client
        self._known: dict[str, Image] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def find(self, name: str) -> Image:
        """The image of that name. Raises: ImageMissing, ControlPlaneError."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            if name not in self._known:
                self._known[name] = await self._look_up(name)
                logger.info("image %s is %s", name, self._known[name].digest)
        return self._known[name]

    async def _look_up(self, name: str) -> Image:
        found = None if self._config.pull == "always" else await self._inspect(name)
        if found is None and self._config.pull == "never":
            raise ImageMissing(f"the image {name!r} is not there, and sandbox.docker.pull is 'never'")
        if found is None:
            await self._pull(name)
            found = await self._inspect(name)
        if found is None:
            raise ImageMissing(f"the image {name!r} is not there although it was pulled")
        return found

    async def _inspect(self, name: str) -> Image | None:
        inspect = self._client.docker.images.inspect
        try:
            shown = await self._client.ask("inspect image", lambda: inspect(name), is_repeatable=True)
        except ControlPlaneError as error:
            if error.status == _GONE:
                return None
            raise
        return Image(str(shown["Id"]), next(iter(shown.get("RepoDigests") or ()), str(shown["Id"])))

    async def _pull(self, name: str) -> None:
        """Fetch an image, saying how far it is. Raises: ImageMissing, ControlPlaneAway, UserError."""
        auth, limit_s = self._registry_auth(), self._config.pull_timeout_s
        wanted = name if auth is None else _with_registry(name)
        try:
            async with asyncio.timeout(limit_s):
                await _follow(name, self._client.docker.images.pull(wanted, auth=auth, stream=True))
        except TimeoutError as error:
            raise ControlPlaneAway(f"the image {name!r} was not pulled within {limit_s:.0f} s") from error
        except aiohttp.ClientError as error:
            raise ControlPlaneAway(f"the Docker daemon ended the pull of {name!r}: {error}") from error
        except DockerError as error:
            cause = self._client.explain("pull", error)
            if isinstance(cause, ControlPlaneAway | UserError):
                raise cause from error
            raise ImageMissing(f"the image {name!r} cannot be pulled: {words_of(error)}") from error

    def _registry_auth(self) -> dict[str, str] | None:
        name = self._config.registry_auth_env
        if name is None:
            return None
        user, colon, password = os.environ.get(name, "").partition(":")
        if not colon:
            raise UserError(f"sandbox.docker.registry_auth_env names {name}, which does not hold user:password")
        return {"username": user, "password": password}


async def _follow(image: str, progress: AsyncIterator[dict[str, Any]]) -> None:
    layers: dict[str, tuple[int, int]] = {}
    last_said = time.monotonic()
    async for told in progress:
        detail = told.get("progressDetail") or {}
        if told.get("id") and "total" in detail:
            layers[told["id"]] = (int(detail.get("current", 0)), int(detail["total"]))
        if time.monotonic() - last_said > _PROGRESS_S and layers:
            last_said = time.monotonic()
            done, total = (sum(column) for column in zip(*layers.values(), strict=True))
            logger.info("pulling %s: %d of %d MB, %d layers", image, done >> 20, total >> 20, len(layers))
    logger.info("pulled %s", image)


def _with_registry(image: str) -> str:
    """The name with its registry, which credentials are for: Docker Hub unless it says another."""
    first, slash, _ = image.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return image
    return f"docker.io/{image}" if slash else f"docker.io/library/{image}"
