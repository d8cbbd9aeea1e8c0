"""What a pod's status says has become of it, as one of our errors.

Invariant: a pod that still runs has no outcome; what cannot be told apart is `MachineLost`.
"""

from __future__ import annotations

from typing import Any, Final

from mettle.errors import SandboxError
from mettle.sandbox.containers.errors import (
    ControlPlaneError,
    ImageMissing,
    MachineEvicted,
    MachineOutOfMemory,
    MachineRemoved,
    NodeLost,
)
from mettle.sandbox.machines.endings import MachineLost

Pod = dict[str, Any]

_OF_NODE: Final = ("DeletionByTaintManager", "DeletionByPodGC")
_NODE_REASONS: Final = ("NodeLost", "NodeShutdown", "Shutdown", "Terminated", "NodeAffinity")
_NO_IMAGE: Final = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
_NO_START: Final = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_ENDED: Final = ("Failed", "Succeeded")


def has_ended(pod: Pod) -> bool:
    """Whether nothing runs in it any more, or will."""
    return pod.get("status", {}).get("phase") in _ENDED


def is_going(pod: Pod) -> bool:
    """Whether it was told to end."""
    return "deletionTimestamp" in pod["metadata"]


def is_running(pod: Pod) -> bool:
    """Whether its agent can be spoken to."""
    status = pod.get("status", {})
    return status.get("phase") == "Running" and bool(status.get("podIP")) and not is_going(pod)


def outcome_of(pod: Pod, *, is_removed: bool) -> MachineLost | None:
    """Why it is no more; None while it is."""
    status = pod.get("status", {})
    if (disrupted := _disruption(status)) is not None:
        return disrupted
    reason, message = status.get("reason", ""), str(status.get("message", ""))[:300]
    if reason == "Evicted":
        return MachineEvicted(f"its pod was evicted: {message}")
    if reason in _NODE_REASONS:
        return NodeLost(f"its node is lost ({reason}): {message}")
    if reason == "DeadlineExceeded":
        return MachineLost("its pod reached the longest life that the cluster was told to give it")
    ended = _terminated(status)
    if ended.get("reason") == "OOMKilled":
        return MachineOutOfMemory("the kernel ended its container for lack of memory")
    if is_removed or is_going(pod):
        return MachineRemoved("its pod was removed by somebody else")
    if has_ended(pod):
        words = str(ended.get("message") or "").strip()[-300:]
        return MachineLost(f"its pod ended with status {ended.get('exitCode')}{f': {words}' if words else ''}")
    return None


def why_not_starting(pod: Pod) -> SandboxError | ImageMissing | None:
    """What keeps it from starting and will not pass by itself; None if nothing is known."""
    for container in pod.get("status", {}).get("containerStatuses") or ():
        waiting = container.get("state", {}).get("waiting") or {}
        reason, message = waiting.get("reason", ""), str(waiting.get("message", ""))[:300]
        if reason in _NO_IMAGE:
            return ImageMissing(f"the image {container.get('image')!r} cannot be pulled ({reason}): {message}")
        if reason in _NO_START:
            return ControlPlaneError(f"a pod cannot start ({reason}): {message}")
    return outcome_of(pod, is_removed=False)


def what_it_waits_for(pod: Pod) -> str:
    """In words, for a pod that was not ready in time."""
    status = pod.get("status", {})
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"it is not scheduled: {condition.get('message', '')}"
    for container in status.get("containerStatuses") or ():
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting:
            return f"its container waits ({waiting.get('reason')}): {waiting.get('message', '')}"
    return f"its phase is {status.get('phase', 'unknown')}"


def _disruption(status: dict[str, Any]) -> MachineLost | None:
    for condition in status.get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            reason, message = condition.get("reason", ""), str(condition.get("message", ""))[:300]
            if reason in _OF_NODE:
                return NodeLost(f"its node is lost ({reason}): {message}")
            return MachineEvicted(f"the cluster took its pod away ({reason}): {message}")
    return None


def _terminated(status: dict[str, Any]) -> dict[str, Any]:
    for container in status.get("containerStatuses") or ():
        ended: dict[str, Any] | None = container.get("state", {}).get("terminated")
        if ended:
            return ended
    return {}
