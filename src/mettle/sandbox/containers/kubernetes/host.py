"""A cluster as a host of machines: a warm pool of pods that owners share, and pods made at once for what it lacks.

    warm     pods of the default shape that nobody owns yet; whoever sees that some are missing makes them
    adopt    a label patch that names the version seen: of two owners that want one pod, one gets it
    lease    what every pod belongs to, so that nothing outlives its owner for long

Invariant: a pod has one owner, or none and a maker whose lease it hangs on; no two machines are ever in one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import urlsplit

from mettle.errors import MettleError, SandboxError
from mettle.sandbox.containers.bundle import make_bundle
from mettle.sandbox.containers.creation import make_or_undo
from mettle.sandbox.containers.errors import RETRIED, SELDOM, ControlPlaneAway, ControlPlaneError
from mettle.sandbox.containers.grading import Surroundings
from mettle.sandbox.containers.kubernetes.bodies import (
    OWNER,
    POLICIES,
    REQUEST,
    SHAPE,
    STATE,
    TAKEN,
    WARM,
    agent_body,
    owner_reference,
    pod_body,
    policy_body,
    read_time,
    selector,
    shape_key,
)
from mettle.sandbox.containers.kubernetes.client import MERGE, KubernetesClient
from mettle.sandbox.containers.kubernetes.config import KubernetesConfig
from mettle.sandbox.containers.kubernetes.identity import make_identity
from mettle.sandbox.containers.kubernetes.lease import Lease
from mettle.sandbox.containers.kubernetes.outcomes import Pod, has_ended, is_going, is_running
from mettle.sandbox.containers.kubernetes.pod import PodContainer, reach, remove_pod
from mettle.sandbox.containers.kubernetes.pods import Pods
from mettle.sandbox.containers.owners import Owner
from mettle.sandbox.containers.pool import Shape
from mettle.sandbox.machines.config import MachineConfig
from mettle.web.backoff import Retries

logger = logging.getLogger(__name__)

_GONE: Final = 404
_CONFLICT: Final = 409
_FORBIDDEN: Final = 403
_INVALID: Final = 422
_GVISOR: Final = "gvisor"
_RUNTIMES: Final = "/apis/node.k8s.io/v1/runtimeclasses"
_METADATA: Final = ("169.254.169.254", 80)
_LOOK_S: Final = 30.0
_MARGIN_S: Final = 600
_FIXES: Final = (
    ("seccomp", "use nodes whose container runtime has a default seccomp profile, or a RuntimeClass `gvisor`"),
    ("resource limits", "set podPidsLimit in the configuration of the kubelets"),
    ("network", "use a network plugin that enforces NetworkPolicy, and let this user make one"),
    ("no privileges", "use nodes that honour the pod's securityContext"),
    ("read-only root", "use nodes that honour readOnlyRootFilesystem"),
    ("pid namespace", "use nodes that give pods a pid namespace of their own"),
    ("own kernel", "install gVisor on the nodes and make a RuntimeClass `gvisor`"),
)


class KubernetesHost:
    """One namespace of one cluster, for one pool."""

    def __init__(self, config: KubernetesConfig) -> None:
        self._config = config
        self._client = KubernetesClient(config)
        self._owner = Owner.of_this_process()
        self._pods = Pods(self._client, selector(config.pool))
        self._lease = Lease(self._client, config, self._owner)
        self._bundle = make_bundle()
        self._runtime_class: str | None = None
        self._targets: tuple[tuple[str, int], ...] = ()
        self._version = ""
        self._filler: asyncio.Task[None] | None = None

    @property
    def interpreter(self) -> str:
        return self._config.interpreter

    async def open(self) -> None:
        self._version = await self._client.open()
        self._runtime_class = await self._choose_runtime_class()
        self._targets = await self._find_targets()
        await self._make_once(self._client.path("configmaps"), agent_body(self._bundle))
        if self._config.network == "none":
            await self._make_policy()
        await self._lease.start()
        await self._lease.sweep()
        await self._pods.start()
        if self._config.warm:
            self._filler = asyncio.create_task(self._keep_warm(), name="kubernetes warm pods")

    def shape_of(self, config: MachineConfig) -> Shape:
        own = self._config
        image, cpus = config.image or own.image, config.cpus or own.cpus
        return Shape(image, config.memory_mb, config.disk_mb, config.max_processes, cpus)

    async def make(self, shape: Shape, config: MachineConfig) -> PodContainer:
        name = await self._adopt(shape, config.lifetime_s)
        while name is not None:
            try:
                return await self._reach(name)
            except ControlPlaneError as error:
                logger.warning("a warm pod could not be used: %s", error)
            name = await self._adopt(shape, config.lifetime_s)
        labels = {STATE: TAKEN, OWNER: self._owner.id, SHAPE: self._key(shape)}
        lifetime_s = self._config.max_lifetime_s if config.lifetime_s is None else config.lifetime_s + _MARGIN_S
        making = self._create(shape, labels, min(lifetime_s, self._config.max_lifetime_s))
        return await self._reach(await make_or_undo(making, self._remove))

    def surroundings(self) -> Surroundings:
        where = f"kubernetes {self._version} at {self._client.access.server}, namespace {self._client.access.namespace}"
        return Surroundings(where, self._targets, has_network=self._config.network != "none", fixes=_FIXES)

    async def close(self) -> None:
        if self._filler is not None:
            self._filler.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._filler
            self._filler = None
        await self._remove_own_warm()
        await self._pods.close()
        await self._lease.close()
        await self._client.close()

    def _key(self, shape: Shape) -> str:
        return shape_key(self._config, shape, self._bundle, self._runtime_class)

    async def _choose_runtime_class(self) -> str | None:
        name = self._config.runtime_class or _GVISOR
        try:
            await self._client.send("GET", f"{_RUNTIMES}/{name}")
        except ControlPlaneError as error:
            if error.status == _FORBIDDEN or (error.status == _GONE and self._config.runtime_class is None):
                return self._config.runtime_class  # it cannot be looked up: what was asked for is tried
            if error.status == _GONE:
                raise SandboxError(f"the cluster has no RuntimeClass {name!r}") from error
            raise
        return name

    async def _find_targets(self) -> tuple[tuple[str, int], ...]:
        """What must not answer from inside. A loopback address would be the pod's own."""
        parts = urlsplit(self._client.access.server)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(parts.hostname, port, family=socket.AF_INET, type=socket.SOCK_STREAM)
        servers = {(str(address[4][0]), port) for address in found if not str(address[4][0]).startswith("127.")}
        more = [text.rpartition(":") for text in self._config.network_targets]
        return (*sorted(servers), _METADATA, *((host, int(number)) for host, _, number in more))

    async def _make_once(self, path: str, body: dict[str, Any]) -> None:
        """Make what may be there already."""
        try:
            await self._client.send("POST", path, body=body, is_repeatable=True)
        except ControlPlaneError as error:
            if error.status != _CONFLICT:
                raise

    async def _make_policy(self) -> None:
        try:
            await self._make_once(self._client.path("networkpolicies", group=POLICIES), policy_body(self._config))
        except ControlPlaneError as error:
            if error.status != _FORBIDDEN:
                raise
            logger.warning("no NetworkPolicy could be made, and whether one is there is tried from inside: %s", error)

    async def _reach(self, name: str) -> PodContainer:
        """The container of a pod that is ours; one that cannot be reached is removed."""
        try:
            return await reach(self._client, self._pods, name, self._config.port, self._config.start_timeout_s)
        except BaseException:
            with contextlib.suppress(ControlPlaneError):
                await asyncio.shield(self._remove(name))
            raise

    async def _remove(self, name: str) -> None:
        await remove_pod(self._client, name, {})

    async def _adopt(self, shape: Shape, lifetime_s: float | None) -> str | None:
        """Take a warm pod, if one can be had that lives long enough; its name."""
        for pod in self._warm_pods(self._key(shape)):
            left_s = self._left_s(pod)
            if not is_running(pod) or (lifetime_s is not None and left_s < lifetime_s):
                continue
            if await make_or_undo(self._take(pod, lifetime_s), self._untake(pod)):
                return str(pod["metadata"]["name"])
        return None

    def _untake(self, pod: Pod) -> Callable[[bool], Awaitable[None]]:
        """What to do about a pod that was taken for somebody who has left."""

        async def undo(is_taken: bool) -> None:
            if is_taken:
                await self._remove(pod["metadata"]["name"])

        return undo

    async def _take(self, pod: Pod, lifetime_s: float | None) -> bool:
        """Write our name on a pod, if nobody else has meanwhile: the server compares the version that we saw."""
        metadata, spec = pod["metadata"], pod["spec"]
        body: dict[str, Any] = {
            "metadata": {
                "uid": metadata["uid"],
                "resourceVersion": metadata["resourceVersion"],
                "labels": {STATE: TAKEN, OWNER: self._owner.id},
                "ownerReferences": [owner_reference(self._lease.object)],
            }
        }
        if lifetime_s is not None:
            used_s = spec["activeDeadlineSeconds"] - self._left_s(pod)
            wanted = math.ceil(used_s + lifetime_s + _MARGIN_S)
            if wanted < spec["activeDeadlineSeconds"]:  # it may be lowered, never raised
                body["spec"] = {"activeDeadlineSeconds": wanted}
        try:
            await self._client.send("PATCH", self._client.path("pods", metadata["name"]), body=body, content=MERGE)
        except ControlPlaneError as error:
            if error.status in (_CONFLICT, _GONE, _INVALID):
                return False
            raise
        return True

    def _warm_pods(self, key: str) -> list[Pod]:
        """Those that wait, in any order that differs from owner to owner, so that they seldom want the same one."""
        found = []
        for pod in self._pods.all():
            labels = pod["metadata"].get("labels") or {}
            is_waiting = labels.get(STATE) == WARM and labels.get(SHAPE) == key
            if is_waiting and not has_ended(pod) and not is_going(pod):
                found.append(pod)
        secrets.SystemRandom().shuffle(found)
        return found

    def _left_s(self, pod: Pod) -> float:
        started = pod.get("status", {}).get("startTime")
        age_s = time.time() - read_time(started) if started else 0.0
        return float(pod["spec"]["activeDeadlineSeconds"]) - age_s

    async def _create(self, shape: Shape, labels: dict[str, str], lifetime_s: float) -> str:
        """Make a pod; its name. One whose making was not answered is looked for before another is made."""
        request = secrets.token_hex(8)
        body = pod_body(
            self._config,
            shape,
            self._bundle,
            self._runtime_class,
            {**labels, REQUEST: request},
            owner_reference(self._lease.object),
            make_identity(),
            lifetime_s,
        )
        retries = Retries(RETRIED, limit_s=self._config.patience_s)
        while True:
            try:
                made = await self._client.send("POST", self._client.path("pods"), body=body)
                return str(made["metadata"]["name"])
            except ControlPlaneAway:
                listing = await self._client.list_all(self._client.path("pods"), f"{REQUEST}={request}")
                if listing.items:
                    return str(listing.items[0]["metadata"]["name"])
                if not await retries.again():
                    raise

    async def _keep_warm(self) -> None:
        """Make what is missing, one at a time; after a failure wait, longer each time."""
        shape, retries = self.shape_of(MachineConfig()), Retries(SELDOM)
        key = self._key(shape)
        labels = {STATE: WARM, OWNER: self._owner.id, SHAPE: key}
        while True:
            await self._pods.wait(lambda: len(self._warm_pods(key)) < self._config.warm, _LOOK_S)
            try:
                await self._remove_useless()
                if len(self._warm_pods(key)) < self._config.warm:
                    name = await self._create(shape, labels, self._config.max_lifetime_s)
                    await self._pods.wait(lambda name=name: self._pods.find(name) is not None, _LOOK_S)  # type: ignore[misc]
                retries = Retries(SELDOM)
            except MettleError as error:
                logger.warning("no pod could be made ahead of time: %s", error)
                await retries.again()

    async def _remove_useless(self) -> None:
        """Warm pods of ours that have ended, or have little of their life left."""
        for pod in self._own_warm():
            if has_ended(pod) or self._left_s(pod) < self._config.max_lifetime_s / 2:
                await self._remove_unless_taken(pod)

    async def _remove_own_warm(self) -> None:
        for pod in self._own_warm():
            try:
                await self._remove_unless_taken(pod)
            except ControlPlaneError as error:
                logger.warning("a warm pod could not be removed, and goes with the lease: %s", error)

    def _own_warm(self) -> list[Pod]:
        ours = {STATE: WARM, OWNER: self._owner.id}
        return [pod for pod in self._pods.all() if ours.items() <= (pod["metadata"].get("labels") or {}).items()]

    async def _remove_unless_taken(self, pod: Pod) -> None:
        metadata = pod["metadata"]
        seen = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
        await remove_pod(self._client, metadata["name"], seen)
