"""The backend `docker`: each machine a container, whose process 1 is Mettle's agent.

    volume      the agent, put by the archive API into a volume that all containers mount read-only
    container   made with everything dropped, then attached to, then started; the attached stream is its line
    warm        containers of the default shape, started and waiting
    sweep       what dead owners have left, at the start and now and then

Invariant: a container's standard input is this connection: when its owner ends, however that comes, the agent reads the
end and the container stops. One whose start failed is removed here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mettle.sandbox.config import SandboxConfig
    from mettle.sandbox.protocols import Backend, Judge, Machines


class DockerBackend:
    """Pools of containers of one daemon."""

    def judge(self, config: SandboxConfig) -> Judge:
        from mettle.sandbox.containers.docker.host import DockerHost
        from mettle.sandbox.containers.judge import ContainerJudge

        return ContainerJudge(config, DockerHost(config.docker))

    def machines(self, config: SandboxConfig) -> Machines:
        from mettle.sandbox.containers.docker.host import DockerHost
        from mettle.sandbox.containers.pool import ContainerPool

        return ContainerPool(config, DockerHost(config.docker))


DOCKER: Final[Backend] = DockerBackend()
