"""One agent at work: its machine, the way from there to the proxy, and the process.

Parts: `AgentAtWork`. Invariant: whatever happened, `stop` leaves no process, no listener and no open secret; what the
agent wrote to its output until then is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mettle.envs.proxy.machines import AgentJob, AgentMachine
from mettle.envs.proxy.recorder import Recorder
from mettle.envs.proxy.sessions import AgentSession

if TYPE_CHECKING:
    from mettle.envs.proxy.server import ProxyListener, ProxyServer

LOG_BYTES = 1 << 20


@dataclass
class AgentAtWork:
    """What belongs to one rollout of an agent."""

    proxy: ProxyServer
    recorder: Recorder
    session: AgentSession
    machine: AgentMachine | None = None
    listener: ProxyListener | None = None
    job: AgentJob | None = None
    watcher: asyncio.Task[None] | None = None

    async def open_door(self, port: int) -> int:
        """Let the proxy be reached from inside the machine, on `port` (0: any); the port."""
        assert self.machine is not None, "a door needs a machine"
        sock = await self.machine.listen(port)
        self.listener = await self.proxy.serve(sock, only=self.session)
        return self.listener.port

    async def start(
        self, command: str | Sequence[str], environment: Mapping[str, str], cwd: str, timeout_s: float | None
    ) -> None:
        """Start the agent in the background."""
        assert self.machine is not None, "an agent needs a machine"
        self.job = await self.machine.start(
            command, cwd=cwd, env=environment, timeout_s=timeout_s, max_output_bytes=LOG_BYTES
        )

    async def over(self, wrap_up_s: float) -> None:
        """Wait until the agent has ended; once the rollout is over it has `wrap_up_s` seconds left for that."""
        ended = asyncio.create_task(self.recorder.ended.wait())
        watcher = self.watcher
        assert watcher is not None, "the agent is watched from its start"
        try:
            await asyncio.wait({ended, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not watcher.done():
                await asyncio.wait({watcher}, timeout=wrap_up_s)
        finally:
            ended.cancel()

    async def stop(self, reason: str) -> tuple[str, str] | None:
        """Revoke the secret, close the door and end the agent; what it wrote, where it was still at work."""
        self.proxy.close_session(self.session, reason)
        if self.watcher is not None and not self.watcher.done():
            self.watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.watcher
        written = None
        if self.job is not None and self.job.poll() is None:
            await self.job.kill()
            output = await self.job.output()
            written = (output.stdout, output.stderr)
        if self.listener is not None:
            await self.proxy.stop(self.listener)
            self.listener = None
        return written
