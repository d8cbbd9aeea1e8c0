"""The backend `kubernetes`: each machine a pod, whose agent is spoken to directly.

    access      kubeconfig or service account; client, requests and watches (both by `kubernetes_asyncio`)
    pods        what the cluster says of ours; outcomes, what became of one
    host        the warm pool, adoption, leases; pod, one pod and the way to its agent; identity, the key of that way
    bodies      what is asked for, as the API spells it

Invariant: commands and bytes never pass through the API server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mettle.sandbox.config import SandboxConfig
    from mettle.sandbox.protocols import Backend, Judge, Machines


class KubernetesBackend:
    """Pools of pods of one cluster."""

    def judge(self, config: SandboxConfig) -> Judge:
        from mettle.sandbox.containers.judge import ContainerJudge
        from mettle.sandbox.containers.kubernetes.host import KubernetesHost

        return ContainerJudge(config, KubernetesHost(config.kubernetes))

    def machines(self, config: SandboxConfig) -> Machines:
        from mettle.sandbox.containers.kubernetes.host import KubernetesHost
        from mettle.sandbox.containers.pool import ContainerPool

        return ContainerPool(config, KubernetesHost(config.kubernetes))


KUBERNETES: Final[Backend] = KubernetesBackend()
