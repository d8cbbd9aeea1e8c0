"""Which MCP servers there are: programs that talk over their standard streams, or addresses that talk HTTP.

Parts: `MCPServerConfig`, `server_configs`. Invariant: a server that could never be reached as it is written (no
command, no such program, both a command and an address) is refused before anything is started.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from mettle.errors import UserError


@dataclass
class MCPServerConfig:
    """One server: `command` with `args` and `env` is started, `url` is connected to with `headers`."""

    name: str
    command: str = ""
    args: list[str] | None = None
    env: dict[str, str] | None = None
    description: str = ""
    url: str = ""
    headers: dict[str, str] | None = None
    cwd: str | None = None


def server_configs(given: Sequence[MCPServerConfig | Mapping[str, Any]]) -> list[MCPServerConfig]:
    """The servers, checked.

    Raises: UserError naming the server and what is wrong with it.
    """
    configs = [raw if isinstance(raw, MCPServerConfig) else _config_of(raw) for raw in given]
    for config in configs:
        _check(config)
    names = [config.name for config in configs]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two MCP servers are named {name!r}; give each a name of its own")
    return configs


def _config_of(raw: Any) -> MCPServerConfig:
    known = [field.name for field in fields(MCPServerConfig)]
    if not isinstance(raw, Mapping) or not raw.get("name"):
        raise UserError(f"an MCP server is a dict with a name and a command or a url, not {raw!r}")
    unknown = sorted(set(raw) - set(known))
    if unknown:
        raise UserError(f"MCP server {raw['name']!r} has no setting {unknown[0]!r}; there are {', '.join(known)}")
    return MCPServerConfig(**raw)


def _check(config: MCPServerConfig) -> None:
    if bool(config.command) == bool(config.url):
        raise UserError(f"MCP server {config.name!r} needs a command or a url, and not both")
    if config.url and not config.url.startswith(("http://", "https://")):
        raise UserError(f"the url of MCP server {config.name!r} is {config.url!r}; it begins with http:// or https://")
    path = (config.env or {}).get("PATH")
    if config.command and shutil.which(config.command, path=path) is None:
        raise UserError(f"MCP server {config.name!r} needs the program {config.command!r}, which is not installed here")
