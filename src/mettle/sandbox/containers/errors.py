"""What can become of a machine elsewhere, and of the service that makes them, as errors with a type each.

Invariant: all are `SandboxError`s, never a verdict on code; what the user can mend is a `UserError`.
"""

from __future__ import annotations

from typing import Final

from mettle.errors import SandboxError, UserError
from mettle.sandbox.machines.endings import MachineLost
from mettle.web.backoff import Backoff

RETRIED: Final = Backoff(first_s=0.1, max_s=5.0)
"""Between the tries of a request to a service that is away or busy."""
SELDOM: Final = Backoff(first_s=1.0, max_s=60.0)
"""Between tries to make what nobody waits for."""


class ControlPlaneError(SandboxError):
    """The Docker daemon or the Kubernetes API did not do what it was asked."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s: float | None = None


class ControlPlaneAway(ControlPlaneError):
    """It does not answer, or not in time."""


class ImageMissing(UserError):
    """The image is not there and cannot be pulled."""


class MachineOutOfMemory(MachineLost):
    """The kernel ended the container for lack of memory."""


class MachineEvicted(MachineLost):
    """The cluster took the machine away, for somebody more important or because the node ran out of something."""


class NodeLost(MachineLost):
    """The node went away, or stopped answering, and the machine with it."""


class MachineRemoved(MachineLost):
    """Somebody else removed the container or the pod."""
