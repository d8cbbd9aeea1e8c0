"""The pods of a pool, as the API server tells of them: listed once, then watched.

A watch that ends is taken up where it ended; one whose version the server has forgotten (410) begins with a new list,
and what is no longer listed is gone.
Invariant: what is known is never older than the last event, and whoever waits for a pod is woken by each change of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from mettle.errors import SandboxError
from mettle.sandbox.containers.errors import RETRIED, ControlPlaneAway
from mettle.sandbox.containers.kubernetes.client import Gone, KubernetesClient, WatchEvent
from mettle.sandbox.containers.kubernetes.outcomes import Pod
from mettle.web.backoff import Retries

logger = logging.getLogger(__name__)

_MAX_GONE_KEPT: Final = 1000


class Pods:
    """What is known of each pod, by name."""

    def __init__(self, client: KubernetesClient, selector: str) -> None:
        self._client = client
        self._selector = selector
        self._known: dict[str, Pod] = {}
        self._gone: OrderedDict[str, Pod] = OrderedDict()
        self._version = ""
        self._changed = asyncio.Condition()
        self._watcher: asyncio.Task[None] | None = None
        self._listeners: dict[str, Callable[[Pod, bool], None]] = {}
        self.num_lists = 0

    async def start(self) -> None:
        """List, and watch from then on."""
        await self._list()
        self._watcher = asyncio.create_task(self._watch(), name="kubernetes pods")

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
            self._watcher = None

    def all(self) -> list[Pod]:
        return list(self._known.values())

    def find(self, name: str) -> Pod | None:
        """As last seen, also for one that is gone."""
        return self._known.get(name) or self._gone.get(name)

    def is_gone(self, name: str) -> bool:
        return name in self._gone

    def listen(self, name: str, listener: Callable[[Pod, bool], None]) -> None:
        """Be told of each change of a pod, and whether it is gone."""
        self._listeners[name] = listener

    def forget(self, name: str) -> None:
        """Nobody listens to it any more."""
        self._listeners.pop(name, None)

    async def wait(self, is_enough: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until something is so; False when it was not in time."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(is_enough)
        except TimeoutError:
            return False
        return True

    async def _list(self) -> None:
        listing = await self._client.list_all(self._client.path("pods"), self._selector)
        self.num_lists += 1
        self._version = listing.version
        found = {pod["metadata"]["name"]: pod for pod in listing.items}
        vanished = [pod for name, pod in self._known.items() if name not in found]
        for pod in vanished:
            await self._keep(pod, is_gone=True)
        for pod in found.values():
            await self._keep(pod, is_gone=False)

    async def _watch(self) -> None:
        retries = Retries(RETRIED)
        is_lost = False
        while True:
            try:
                if is_lost:
                    await self._list()
                    is_lost = False
                async for event in self._client.watch(self._client.path("pods"), self._selector, self._version):
                    await self._take(event)
                    retries = Retries(RETRIED)
                continue
            except Gone:
                logger.info("the Kubernetes API no longer remembers version %s; listing pods again", self._version)
                is_lost = True
            except ControlPlaneAway as error:
                logger.info("the watch of pods ended, and goes on: %s", error)
                await retries.again()
            except SandboxError as error:
                logger.warning("pods cannot be watched: %s", error)
                is_lost = True
                await retries.again()

    async def _take(self, event: WatchEvent) -> None:
        self._version = str(event.object["metadata"]["resourceVersion"])
        if event.kind != "BOOKMARK":
            await self._keep(event.object, is_gone=event.kind == "DELETED")

    async def _keep(self, pod: Pod, *, is_gone: bool) -> None:
        name = pod["metadata"]["name"]
        if is_gone:
            self._known.pop(name, None)
            self._gone[name] = pod
            if len(self._gone) > _MAX_GONE_KEPT:
                self._gone.popitem(last=False)
        else:
            self._known[name] = pod
            self._gone.pop(name, None)  # clusters draw names at random, and draw one again
        listener = self._listeners.get(name)
        if listener is not None:
            listener(pod, is_gone)
        async with self._changed:
            self._changed.notify_all()
