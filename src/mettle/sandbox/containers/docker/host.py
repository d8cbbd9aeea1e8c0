"""A Docker daemon as a host of machines: images, the agent's volume, containers made now or ahead of time.

Invariant: a container that this object has made is removed by it, also when making it fails half-way or is cancelled;
what is made ahead of time is used once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final

from mettle.errors import SandboxError, UserError
from mettle.sandbox.containers.bundle import ARCHIVE, FOLDER, make_bundle
from mettle.sandbox.containers.creation import make_or_undo
from mettle.sandbox.containers.docker.bodies import container_body, filler_body
from mettle.sandbox.containers.docker.client import DockerClient
from mettle.sandbox.containers.docker.config import DockerConfig
from mettle.sandbox.containers.docker.images import Images
from mettle.sandbox.containers.docker.stream import AttachedStream
from mettle.sandbox.containers.docker.sweep import sweep
from mettle.sandbox.containers.errors import ControlPlaneError, MachineOutOfMemory, MachineRemoved
from mettle.sandbox.containers.grading import Surroundings
from mettle.sandbox.containers.link import AgentLink
from mettle.sandbox.containers.owners import IMAGE, Owner
from mettle.sandbox.containers.pool import Shape
from mettle.sandbox.containers.warm import Warm
from mettle.sandbox.machines.config import MachineConfig
from mettle.sandbox.machines.endings import MachineLost

if TYPE_CHECKING:
    from aiodocker.containers import DockerContainer as Filler

logger = logging.getLogger(__name__)

_GONE: Final = 404
_CONFLICT: Final = 409
_SWEEP_S: Final = 60.0
_KILLED: Final = 137
_GVISOR: Final = "runsc"
_FIXES: Final = (
    ("seccomp", "use Docker 23 or later with its default seccomp profile, or runtime `runsc` (gVisor)"),
    ("resource limits", "let the daemon limit processes (PidsLimit needs the pids controller of cgroups)"),
    ("network", "set sandbox.docker.network to 'none'"),
    ("no privileges", "set sandbox.docker.user to a user other than 0"),
    ("read-only root", "use a daemon that honours ReadonlyRootfs"),
    ("pid namespace", "use a daemon that gives containers a pid namespace of their own"),
    ("own kernel", "install gVisor and register its runtime `runsc` with the daemon"),
)


class DockerContainer:
    """A container that runs, and the way to its agent."""

    def __init__(self, client: DockerClient, container_id: str, image: str, stream: AttachedStream) -> None:
        self.id = container_id
        self.image = image
        self.link = AgentLink(stream, f"container {container_id[:12]}", self.outcome)
        self._client = client
        self._stream = stream
        self._is_removed = False

    async def outcome(self) -> MachineLost:
        try:
            show = self._client.docker.containers.container(self.id).show
            shown = await self._client.ask("inspect container", show, is_repeatable=True)
        except ControlPlaneError as error:
            if error.status == _GONE:
                return MachineRemoved("its container was removed by somebody else")
            return MachineLost(f"its stream from the Docker daemon ended, and the daemon does not say why: {error}")
        state = shown.get("State", {})
        if state.get("OOMKilled"):
            return MachineOutOfMemory("the kernel ended its container for lack of memory")
        if state.get("Running"):
            return MachineLost("its stream from the Docker daemon ended")
        words = self._stream.last_words
        return MachineLost(f"its container ended with status {state.get('ExitCode')}{f': {words}' if words else ''}")

    async def remove(self) -> None:
        if self._is_removed:
            return
        self._is_removed = True
        await self.link.close()
        await remove_container(self._client, self.id)


class DockerHost:
    """One daemon, for one pool."""

    def __init__(self, config: DockerConfig) -> None:
        self._config = config
        self._client = DockerClient(config)
        self._images = Images(config, self._client)
        self._owner = Owner.of_this_process()
        self._volume = ""
        self._runtime: str | None = None
        self._starting = asyncio.Semaphore(config.max_starting)
        self._warm = Warm(self._make_warm, config.warm)
        self._tasks: set[asyncio.Task[None]] = set()
        self._description = f"docker at {self._client.address.text}"

    @property
    def interpreter(self) -> str:
        return self._config.interpreter

    async def open(self) -> None:
        await self._client.open()
        info = await self._client.ask("info", self._client.docker.system.info, is_repeatable=True)
        for warning in info.get("Warnings") or ():
            logger.warning("docker: %s", warning)
        self._runtime = self._choose_runtime(info)
        self._description = (
            f"{'podman' if self._client.is_podman else 'docker'} {self._client.version} at {self._client.address.text}"
        )
        await sweep(self._client)
        image = await self._images.find(self._config.image)
        self._volume = await self._make_volume(image.id)
        self._spawn(self._sweep_now_and_then())
        self._warm.start()

    def shape_of(self, config: MachineConfig) -> Shape:
        own = self._config
        image, cpus = config.image or own.image, config.cpus or own.cpus
        return Shape(image, config.memory_mb, config.disk_mb, config.max_processes, cpus)

    async def make(self, shape: Shape, config: MachineConfig) -> DockerContainer:
        if shape == self.shape_of(MachineConfig()) and (ready := await self._warm.take()) is not None:
            return ready
        return await self._make(shape, config.lifetime_s)

    def surroundings(self) -> Surroundings:
        return Surroundings(user=self._description, has_network=self._config.network != "none", fixes=_FIXES)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._warm.close()
        await self._client.close()

    def _choose_runtime(self, info: Mapping[str, Any]) -> str | None:
        listed = info.get("Runtimes") or {}
        wanted = self._config.runtime
        if wanted is None:
            return _GVISOR if _GVISOR in listed else None
        if wanted not in listed:
            raise UserError(f"the Docker daemon has no runtime {wanted!r}; it has {', '.join(sorted(listed))}")
        return wanted

    async def _make_volume(self, image_id: str) -> str:
        """The volume that holds this agent, filled unless somebody has done so: it is named by what is in it."""
        bundle = make_bundle()
        name = f"mettle-agent-{bundle.digest}"
        labels = self._owner.labels(None)
        volumes = self._client.docker.volumes
        body = {"Name": name, "Labels": {}}
        await self._client.ask(
            "create volume",
            lambda: volumes.create(body),  # type: ignore[no-untyped-call]
            is_repeatable=True,
        )
        filling = filler_body(image_id, name, labels)
        filler_id = await make_or_undo(self._create(f"mettle-fill-{secrets.token_hex(6)}", filling), self._remove)
        filler = self._client.docker.containers.container(filler_id)
        try:
            if not await self._has_agent(filler):
                data = bundle.as_tar()
                await self._client.ask(
                    "put archive",
                    lambda: filler.put_archive(FOLDER, data),  # type: ignore[no-untyped-call]
                    is_repeatable=True,
                )
        finally:
            await asyncio.shield(self._remove(filler_id))
        return name

    async def _has_agent(self, filler: Filler) -> bool:
        path = f"{FOLDER}/{ARCHIVE}"
        try:
            await self._client.ask("get archive", lambda: filler.get_archive(path), is_repeatable=True)
        except ControlPlaneError as error:
            if error.status == _GONE:
                return False
            raise
        return True

    async def _make_warm(self) -> DockerContainer:
        return await self._make(self.shape_of(MachineConfig()), None)

    async def _make(self, shape: Shape, lifetime_s: float | None) -> DockerContainer:
        image = await self._images.find(shape.image)
        labels = {**self._owner.labels(lifetime_s), IMAGE: image.digest}
        is_podman = self._client.is_podman
        body = container_body(self._config, shape, image.id, self._runtime, self._volume, labels, is_podman=is_podman)
        async with self._starting:
            name = f"mettle-{self._owner.id}-{secrets.token_hex(6)}"
            container_id = await make_or_undo(self._create(name, body), self._remove)
            try:
                return await self._start(container_id, image.digest)
            except BaseException:
                await asyncio.shield(self._remove(container_id))
                raise

    async def _create(self, name: str, body: dict[str, Any]) -> str:
        """Make a container under a name that nobody else uses: a conflict is an earlier try of this one."""
        containers = self._client.docker.containers
        try:
            made = await self._client.ask(
                "create container", lambda: containers.create(body, name=name), is_repeatable=True
            )
        except ControlPlaneError as error:
            if error.status != _CONFLICT:
                raise
            made = await self._client.ask("inspect container", lambda: containers.get(name), is_repeatable=True)
        return made.id

    async def _remove(self, container_id: str) -> None:
        await remove_container(self._client, container_id)

    async def _start(self, container_id: str, image: str) -> DockerContainer:
        """Attach first, so that nothing is missed, then start, then wait for the agent's first word."""
        stream = await AttachedStream.attach(self._client, container_id)
        container = DockerContainer(self._client, container_id, image, stream)
        try:
            start = self._client.docker.containers.container(container_id).start
            await self._client.ask("start container", start, is_repeatable=True)
            await container.link.wait_ready(self._config.start_timeout_s)
        except MachineLost as error:
            await container.link.close()
            raise SandboxError(
                f"no agent started in the image {image!r}: {error}. "
                f"It needs Python 3.10 or later as {self._config.interpreter!r} (sandbox.docker.interpreter)"
            ) from error
        except BaseException:
            await container.link.close()
            raise
        return container

    async def _sweep_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            with contextlib.suppress(SandboxError):
                await sweep(self._client)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="docker sweep")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def remove_container(client: DockerClient, container_id: str) -> None:
    """End and remove a container. One that is gone, or going, is no matter; one that resists is told of."""
    try:
        await client.remove(container_id)
    except ControlPlaneError as error:
        if error.status not in (_GONE, _CONFLICT):
            logger.warning("a container could not be removed, and is left to the next sweep: %s", error)
