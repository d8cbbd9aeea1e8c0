"""One pod as a machine's container: the way to its agent, and its end.

The agent is spoken to at the pod's address; the API server hears of a pod when it is made, adopted and removed.
Invariant: when the cluster says that the pod is no more, the line ends, even if the network has not noticed.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from mettle.errors import SandboxError
from mettle.sandbox.containers.faults import ControlPlaneAway, ControlPlaneError
from mettle.sandbox.containers.kubernetes.api import KubernetesClient
from mettle.sandbox.containers.kubernetes.bodies import token_of
from mettle.sandbox.containers.kubernetes.fates import Pod, fate_of, is_running, what_it_waits_for, why_not_starting
from mettle.sandbox.containers.kubernetes.pods import Pods
from mettle.sandbox.containers.line import AgentLine
from mettle.sandbox.containers.transports import SealedTransport, wait_ready
from mettle.sandbox.machines.line import MachineLost

_GONE: Final = 404
_CONFLICT: Final = 409
_FATE_S: Final = 3.0
_CONNECT_S: Final = 5.0
_PAUSE_S: Final = 0.1


class PodContainer:
    """A pod whose agent is at the end of a line."""

    def __init__(self, client: KubernetesClient, pods: Pods, pod: Pod, transport: SealedTransport) -> None:
        self.id: str = pod["metadata"]["name"]
        self.image = _image_of(pod)
        self.line = AgentLine(transport)
        self._uid: str = pod["metadata"]["uid"]
        self._client = client
        self._pods = pods
        self._transport = transport
        self._is_removed = False
        pods.listen(self.id, self._on_change)

    async def fate(self) -> MachineLost:
        await self._pods.wait(lambda: self._fate() is not None, _FATE_S)
        return self._fate() or MachineLost("its line ended, and its pod still runs")

    async def remove(self) -> None:
        if self._is_removed:
            return
        self._is_removed = True
        self.line.close()
        self._pods.forget(self.id)
        await remove_pod(self._client, self.id, {"uid": self._uid})

    def _fate(self) -> MachineLost | None:
        pod = self._pods.find(self.id)
        return None if pod is None else fate_of(pod, is_removed=self._pods.is_gone(self.id))

    def _on_change(self, pod: Pod, is_gone: bool) -> None:
        if fate_of(pod, is_removed=is_gone) is not None:
            self._transport.close()


async def reach(client: KubernetesClient, pods: Pods, name: str, port: int, timeout_s: float) -> PodContainer:
    """Wait until a pod runs, and connect to its agent. Raises: UserError, SandboxError."""
    deadline = time.monotonic() + timeout_s
    pod = await _wait_running(pods, name, timeout_s)
    host = pod["status"]["podIP"]
    while True:
        try:
            transport = await SealedTransport.connect(host, port, token_of(pod), _CONNECT_S)
            break
        except OSError as error:
            pod = pods.find(name) or pod
            lost = fate_of(pod, is_removed=pods.is_gone(name))
            if lost is not None:
                raise lost from error
            if time.monotonic() > deadline:
                raise ControlPlaneAway(
                    f"the agent of pod {name} does not answer at {host}:{port}: {error}. Pools must run where the "
                    "addresses of pods can be reached, and network policies must let them in"
                ) from error
            await asyncio.sleep(_PAUSE_S)
        except ValueError as error:
            raise SandboxError(f"what answers at {host}:{port} is not the agent of pod {name}: {error}") from error
    container = PodContainer(client, pods, pod, transport)
    try:
        await wait_ready(container.line.ready, max(1.0, deadline - time.monotonic()))
    except BaseException:
        container.line.close()
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
    failed = why_not_starting(pod) or fate_of(pod, is_removed=pods.is_gone(name))
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
