"""The backend in this process: `zygote`, and by its own name only `unsafe`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mettle.sandbox.judge.pool import SandboxPool
from mettle.sandbox.machines.pool import MachinePool

if TYPE_CHECKING:
    from mettle.sandbox.config import SandboxConfig
    from mettle.sandbox.protocols import Backend, Judge, Machines


class EmbeddedBackend:
    """Processes of this host, started and owned by this one; the config's name decides whether they are isolated."""

    def judge(self, config: SandboxConfig) -> Judge:
        return SandboxPool(config)

    def machines(self, config: SandboxConfig) -> Machines:
        return MachinePool(config)


EMBEDDED: Final[Backend] = EmbeddedBackend()
