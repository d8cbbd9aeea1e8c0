"""One agent at work: its machine, the way from there to the proxy, and the process.

Parts: `AgentAtWork`. Invariant: whatever happened, `stop` leaves no process, no listener and no open secret; what the
agent wrote to its output until then is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mettle.envs.proxy.recorder import Recorder
from mettle.envs.proxy.server import Listener, ProxyServer
from mettle.envs.proxy.sessions import Session

LOG_BYTES = 1 << 20


@dataclass
class AgentAtWork:
    """What belongs to one rollout of an agent."""

    proxy: ProxyServer
    recorder: Recorder
    session: Session
    machine: Any = None
    listener: Listener | None = None
    job: Any = None
    watcher: asyncio.Task[None] | None = None

    async def open_door(self, port: int) -> int:
        """Let the proxy be reached from inside the machine, on `port` (0: any); the port."""
        sock = await self.machine.listen(port)
        sock.setblocking(False)
        self.listener = await self.proxy.serve(sock, only=self.session)
        return self.listener.port

    async def start(self, command: str, environment: Mapping[str, str], cwd: str) -> None:
        """Start the agent in the background."""
        self.job = await self.machine.start(command, cwd=cwd, env=environment, max_output_bytes=LOG_BYTES)

    async def over(self, wrap_up_s: float) -> None:
        """Wait until the agent has ended, or has had `wrap_up_s` seconds to do so after the rollout ended without it."""
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
