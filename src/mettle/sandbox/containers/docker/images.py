"""Images by name, pulled where they are missing, and known by what is in them.

Invariant: within a pool a name stands for one image, whatever the registry does meanwhile; an image is pulled once,
however many machines wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, NamedTuple
from urllib.parse import quote

from mettle.sandbox.containers.docker.api import DockerClient
from mettle.sandbox.containers.docker.config import DockerConfig
from mettle.sandbox.containers.faults import ControlPlaneError, ImageMissing

logger = logging.getLogger(__name__)

_GONE: Final = 404


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
            await self._client.pull(name)
            found = await self._inspect(name)
        if found is None:
            raise ImageMissing(f"the image {name!r} is not there although it was pulled")
        return found

    async def _inspect(self, name: str) -> Image | None:
        try:
            shown = await self._client.get(f"/images/{quote(name, safe='/:@')}/json")
        except ControlPlaneError as error:
            if error.status == _GONE:
                return None
            raise
        return Image(str(shown["Id"]), next(iter(shown.get("RepoDigests") or ()), str(shown["Id"])))
