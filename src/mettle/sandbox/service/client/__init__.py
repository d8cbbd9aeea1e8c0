"""Sandboxes of other hosts: the backend `remote`, over one or several services (`mettle sandbox serve`).

    SandboxConfig(backend="remote", urls=("https://10.0.0.5:8300", "https://10.0.0.6:8300"))

    access.py       address, token, certificates
    connection.py   one service: requests, errors, and whether it is there
    fleet.py        several: the least loaded of those that are there, the lease, what is tried again where
    judge.py        judgements; machines.py, the pool of machines; machine.py, one of them
    commands.py     streams and jobs; tunnels.py, ports
    client.py       one service for somebody who comes and goes
    terminal.py     its commands for a person; shell.py, a terminal inside; downloads.py, files onto this disk

Invariants: a judgement is tried elsewhere when its service is lost, since it changes nothing; a machine is made once,
however often its making is asked for; a command is never repeated. What a service isolates is checked against the
config's `require`, and its report stands in each result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mettle.sandbox.config import SandboxConfig
    from mettle.sandbox.protocols import Backend, Judge, Machines


class RemoteBackend:
    """Pools of other hosts."""

    def judge(self, config: SandboxConfig) -> Judge:
        from mettle.sandbox.service.client.judge import RemoteJudge

        return RemoteJudge(config)

    def machines(self, config: SandboxConfig) -> Machines:
        from mettle.sandbox.service.client.machines import RemoteMachines

        return RemoteMachines(config)


REMOTE: Final[Backend] = RemoteBackend()
