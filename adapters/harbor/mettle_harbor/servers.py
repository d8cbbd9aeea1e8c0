"""MCP servers that a task asks for: started in the agent's machine, awaited, and told to the agent by variables.

Parts: `HarborMCPHealthcheck`, `MCPServer`, `servers_of`, `start_server`. A server with a launch command runs inside the
machine and is reached on its loopback; one without is somebody else's and is told as it stands. Invariant: the agent
does not start before every server answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from mettle.envs.proxy.machines import AgentMachine
from mettle.errors import SandboxError, UserError

NETWORK_TRANSPORTS = frozenset({"http", "sse", "streamable-http"})


@dataclass
class HarborMCPHealthcheck:
    """When a server is ready: `command` (with `{port}`) succeeds, or without one the port answers."""

    command: str | None = None
    retries: int = 30
    interval_sec: float = 2.0
    start_period_sec: float = 0.0
    timeout_sec: float = 10.0


@dataclass(frozen=True)
class MCPServer:
    """A server of `[[environment.mcp_servers]]` that is reached by a URL."""

    name: str
    url: str
    command: str | None

    @property
    def variable(self) -> str:
        """The environment variable that tells the agent its URL."""
        return f"HARBOR_MCP_{self.name.upper().replace('-', '_')}_URL"

    @property
    def port(self) -> int:
        """The port in its URL."""
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def agent_url(self) -> str:
        """The URL for the agent."""
        if self.command is None:
            return self.url
        return urlunsplit(urlsplit(self.url)._replace(netloc=f"127.0.0.1:{self.port}"))


def servers_of(config: Mapping[str, Any], launch_commands: Mapping[str, str]) -> list[MCPServer]:
    """The servers of a task. Raises: UserError for one without a URL."""
    found = []
    for entry in (config.get("environment") or {}).get("mcp_servers") or []:
        name = str(entry.get("name") or "")
        if entry.get("transport", "sse") not in NETWORK_TRANSPORTS:
            continue
        if not entry.get("url"):
            raise UserError(f"MCP server {name!r} of the task has no url")
        found.append(MCPServer(name, str(entry["url"]), launch_commands.get(name)))
    return found


async def start_server(machine: AgentMachine, server: MCPServer, check: HarborMCPHealthcheck) -> None:
    """Start a server and wait until it is ready. Raises: SandboxError when it ends or does not get ready."""
    assert server.command is not None, "a server of somebody else is not started"
    job = await machine.start(server.command)
    await asyncio.sleep(check.start_period_sec)
    for _ in range(check.retries):
        ended = job.poll()
        if ended is not None:
            why = (ended.stderr or ended.stdout).strip()[-500:]
            raise SandboxError(f"MCP server {server.name!r} ended with exit code {ended.exit_code}: {why}")
        if await _is_ready(machine, server, check):
            return
        await job.wait(check.interval_sec)
    raise SandboxError(f"MCP server {server.name!r} did not get ready on port {server.port} in {check.retries} tries")


async def _is_ready(machine: AgentMachine, server: MCPServer, check: HarborMCPHealthcheck) -> bool:
    if check.command:
        command = check.command.replace("{port}", str(server.port))
        return (await machine.exec(command, timeout_s=check.timeout_sec)).exit_code == 0
    try:
        (await machine.connect(server.port, timeout_s=check.timeout_sec)).close()
    except (OSError, TimeoutError):
        return False
    return True
