"""One pod as a machine's container: the way to its agent, and its end.

The agent is spoken to at the pod's address; the API server hears of a pod when it is made, adopted and removed.
Invariant: when the cluster says that the pod is no more, the line ends, even if the network has not noticed.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import Final

from mettle.errors import SandboxError
from mettle.sandbox.containers.errors import ControlPlaneAway, ControlPlaneError
from mettle.sandbox.containers.kubernetes.bodies import identity_of
from mettle.sandbox.containers.kubernetes.client import KubernetesClient
from mettle.sandbox.containers.kubernetes.identity import SecureStream
from mettle.sandbox.containers.kubernetes.outcomes import (
    Pod,
    is_running,
    outcome_of,
    what_it_waits_for,
    why_not_starting,
)
from mettle.sandbox.containers.kubernetes.pods import Pods
from mettle.sandbox.containers.link import AgentLink
from mettle.sandbox.machines.endings import MachineLost

_GONE: Final = 404
_CONFLICT: Final = 409
_OUTCOME_S: Final = 3.0
_CONNECT_S: Final = 5.0
_PAUSE_S: Final = 0.1


class PodContainer:
    """A pod whose agent is at the end of a link."""

    def __init__(self, client: KubernetesClient, pods: Pods, pod: Pod, stream: SecureStream) -> None:
        self.id: str = pod["metadata"]["name"]
        self.image = _image_of(pod)
        self.link = AgentLink(stream, f"pod {self.id}", self.outcome)
        self._uid: str = pod["metadata"]["uid"]
        self._client = client
        self._pods = pods
        self._stream = stream
        self._is_removed = False
        pods.listen(self.id, self._on_change)

    async def outcome(self) -> MachineLost:
        await self._pods.wait(lambda: self._outcome() is not None, _OUTCOME_S)
        return self._outcome() or MachineLost("its connection ended, and its pod still runs")

    async def remove(self) -> None:
        if self._is_removed:
            return
        self._is_removed = True
        await self.link.close()
        self._pods.forget(self.id)
        await remove_pod(self._client, self.id, {"uid": self._uid})

    def _outcome(self) -> MachineLost | None:
        pod = self._pods.find(self.id)
        return None if pod is None else outcome_of(pod, is_removed=self._pods.is_gone(self.id))

    def _on_change(self, pod: Pod, is_gone: bool) -> None:
        if outcome_of(pod, is_removed=is_gone) is not None:
            self._stream.abort()


async def reach(client: KubernetesClient, pods: Pods, name: str, port: int, timeout_s: float) -> PodContainer:
    """Wait until a pod runs, and connect to its agent. Raises: UserError, SandboxError."""
    deadline = time.monotonic() + timeout_s
    pod = await _wait_running(pods, name, timeout_s)
    host = pod["status"]["podIP"]
    while True:
        try:
            stream = await SecureStream.connect(host, port, identity_of(pod), _CONNECT_S)
            break
        except ssl.SSLCertVerificationError as error:
            raise SandboxError(f"what answers at {host}:{port} is not the agent of pod {name}: {error}") from error
        except OSError as error:
            pod = pods.find(name) or pod
            lost = outcome_of(pod, is_removed=pods.is_gone(name))
            if lost is not None:
                raise lost from error
            if time.monotonic() > deadline:
                raise ControlPlaneAway(
                    f"the agent of pod {name} does not answer at {host}:{port}: {error}. Pools must run where the "
                    "addresses of pods can be reached, and network policies must let them in"
                ) from error
            await asyncio.sleep(_PAUSE_S)
    container = PodContainer(client, pods, pod, stream)
    try:
        await container.link.wait_ready(max(1.0, deadline - time.monotonic()))
    except BaseException:
        await container.link.close()
        pods.forget(name)
        raise
    return container


async def _wait_running(pods: Pods, name: str, timeout_s: float) -> Pod:
    def is_decided() -> bool:
        seen = pods.find(name)
        return seen is not None and (pods.is_gone(name) or is_running(seen) or why_not_starting(seen) is not None)

    await pods.wait(is_decided, timeout_s)
    pod = pods.find(name)
    if pod is None:
        raise ControlPlaneAway(f"pod {name} was made, and the cluster says nothing of it")
    if is_running(pod) and not pods.is_gone(name):
        return pod
    failed = why_not_starting(pod) or outcome_of(pod, is_removed=pods.is_gone(name))
    if failed is not None:
        raise failed
    raise ControlPlaneAway(f"pod {name} did not start within {timeout_s:.0f} s: {what_it_waits_for(pod)}")


async def remove_pod(client: KubernetesClient, name: str, preconditions: dict[str, str]) -> bool:
    """Remove a pod if it is still the one that was meant; whether it was."""
    body = {"gracePeriodSeconds": 0, "preconditions": preconditions}
    try:
        await client.send("DELETE", client.path("pods", name), body=body, is_repeatable=True)
    except ControlPlaneError as error:
        if error.status in (_GONE, _CONFLICT):
            return False
        raise
    return True


def _image_of(pod: Pod) -> str:
    for container in pod.get("status", {}).get("containerStatuses") or ():
        return str(container.get("imageID") or container.get("image") or "")
    return str(pod["spec"]["containers"][0]["image"])
