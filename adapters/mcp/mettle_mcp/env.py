"""Tools of MCP servers.

Parts: `MCPEnv`. Invariants: constructing one starts nothing; servers are connected to and their tools listed by the
first rollout; with `connection="rollout"` every rollout has servers of its own; a server that is gone ends the
rollouts that were using it with an error, and is started again for the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from mettle.envs.decorators import cleanup, teardown
from mettle.envs.errors import ToolCallError, ToolParseError
from mettle.envs.state import State
from mettle.envs.tool_content import content_of
from mettle.envs.tool_env import ToolEnv
from mettle.errors import InfraError, UserError
from mettle.records.messages import Content, Message, Messages, Tool
from mettle_mcp.connection import ToolServerConnection
from mettle_mcp.servers import MCPServerConfig, server_configs

CONNECTIONS = ("shared", "rollout")


def _error_text(error: Exception) -> str:
    return f"Error: {error}"


class MCPEnv(ToolEnv):
    """The tools of all `mcp_servers`, and Python functions as `tools` beside them.

    A name that two servers have is given to the model as `server_tool`. `connection` is "shared" (one for all
    rollouts, for servers without state) or "rollout" (one each).
    """

    def __init__(
        self,
        mcp_servers: Sequence[MCPServerConfig | Mapping[str, Any]] = (),
        max_turns: int = 10,
        error_formatter: Callable[[Exception], str] = _error_text,
        connection: str = "shared",
        connect_timeout_s: float = 30.0,
        tool_timeout_s: float | None = 60.0,
        max_result_chars: int = 100_000,
        **kwargs: Any,
    ) -> None:
        if connection not in CONNECTIONS:
            raise UserError(f"connection is one of {', '.join(CONNECTIONS)}, not {connection!r}")
        self.mcp_servers = server_configs(mcp_servers)
        self.connection = connection
        self.connect_timeout_s = connect_timeout_s
        self.tool_timeout_s = tool_timeout_s
        self.max_result_chars = max_result_chars
        self._shared: WeakKeyDictionary[asyncio.AbstractEventLoop, _Servers] = WeakKeyDictionary()
        self._in_use: ContextVar[_Servers] = ContextVar("mcp servers of the rollout")
        self._knows_tools = False
        super().__init__(max_turns=max_turns, error_formatter=error_formatter, **kwargs)

    # Connections

    def _new_servers(self) -> _Servers:
        return _Servers(self.mcp_servers, self.connect_timeout_s, self.tool_timeout_s)

    def _shared_servers(self) -> _Servers:
        return self._shared.setdefault(asyncio.get_running_loop(), self._new_servers())

    async def setup_state(self, state: State) -> State | None:
        """Connect, and offer the tools."""
        servers = self._new_servers() if self.connection == "rollout" else self._shared_servers()
        state["mcp_servers"] = servers
        await servers.open()
        self._learn(servers)
        info = state.get("info")
        if not (isinstance(info, Mapping) and info.get("tool_defs")):
            state["tool_defs"] = self.tool_defs
        return state

    async def list_tools(self) -> list[Tool]:
        """Connect if no rollout has yet, and describe the tools."""
        servers = self._shared_servers()
        await servers.open()
        self._learn(servers)
        return self.tool_defs

    def _learn(self, servers: _Servers) -> None:
        """Register the tools, the first time."""
        if self._knows_tools:
            return
        self._knows_tools = True
        offered = [(name, tool) for name, link in servers.links.items() for tool in link.tools]
        names = [tool["name"] for _, tool in offered]
        for server, tool in offered:
            is_taken = names.count(tool["name"]) > 1 or tool["name"] in self.tool_map
            name = f"{server}_{tool['name']}" if is_taken else tool["name"]
            schema = tool.get("inputSchema") or {"type": "object", "properties": {}}
            described = Tool(name=name, description=tool.get("description") or "", parameters=schema)
            self._register(_ServerTool(self, server, tool["name"], name), described)

    # Calls

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Messages:
        """Run the calls of the model's last message on the rollout's servers."""
        self._in_use.set(state["mcp_servers"])
        return await super().env_response(messages, state, **kwargs)

    async def call_server_tool(self, server: str, tool: str, arguments: dict[str, Any]) -> Content:
        """Call a tool of a server; its answer as content."""
        servers = self._in_use.get(None) or self._shared_servers()
        result = await servers.call(server, tool, arguments, may_reopen=self.connection == "shared")
        return content_of(result, self.max_result_chars)

    def _refuse(self, error: Exception, kind: type[ToolParseError] | type[ToolCallError], call_id: str) -> Message:
        if isinstance(error, InfraError):
            raise error  # the server is gone, which the model can do nothing about
        return super()._refuse(error, kind, call_id)

    # Ends

    @cleanup
    async def close_rollout_servers(self, state: State) -> None:
        """Close the connections of a rollout that has its own."""
        servers: _Servers | None = state.pop("mcp_servers", None)
        if servers is not None and self.connection == "rollout":
            await servers.close()

    @teardown
    async def teardown_mcp_servers(self) -> None:
        """Close the shared connections."""
        servers = self._shared.pop(asyncio.get_running_loop(), None)
        if servers is not None:
            await servers.close()


class _ServerTool:
    """A tool of a server, as a function."""

    def __init__(self, env: MCPEnv, server: str, tool: str, name: str) -> None:
        self._env, self._server, self._tool = env, server, tool
        self.__name__ = name

    async def __call__(self, **arguments: Any) -> Content:
        return await self._env.call_server_tool(self._server, self._tool, arguments)


class _Servers:
    """A connection to each server, of one rollout or of all."""

    def __init__(
        self, configs: Sequence[MCPServerConfig], connect_timeout_s: float, call_timeout_s: float | None
    ) -> None:
        self.links: dict[str, ToolServerConnection] = {}
        self._configs = {config.name: config for config in configs}
        self._connect_timeout_s = connect_timeout_s
        self._call_timeout_s = call_timeout_s
        self._lock = asyncio.Lock()

    async def open(self) -> None:
        """Connect to each server that there is no open connection to."""
        async with self._lock:
            for name in self._configs:
                await self._opened(name)

    async def call(self, server: str, tool: str, arguments: dict[str, Any], *, may_reopen: bool) -> dict[str, Any]:
        """Call a tool, over a new connection where the last one has ended and `may_reopen`."""
        link = self.links[server]
        if not link.is_open and may_reopen:
            async with self._lock:
                link = await self._opened(server)
        return await link.call(tool, arguments)

    async def close(self) -> None:
        """Close all connections."""
        async with self._lock:
            for link in self.links.values():
                await link.close()

    async def _opened(self, name: str) -> ToolServerConnection:
        known = self.links.get(name)
        if known is not None and known.is_open:
            return known
        if known is not None:
            await known.close()
        link = ToolServerConnection(
            self._configs[name], connect_timeout_s=self._connect_timeout_s, call_timeout_s=self._call_timeout_s
        )
        await link.open()
        self.links[name] = link
        return link
