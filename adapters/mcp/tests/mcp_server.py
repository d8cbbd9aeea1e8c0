"""An MCP server with tools that work, fail, hang and die: over its standard streams, or over HTTP with a port."""

from __future__ import annotations

import base64
import os
import sys
import time

try:
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
except ImportError:  # mcp 1.x
    from mcp.server.fastmcp import FastMCP as MCPServer
    from mcp.server.fastmcp.exceptions import ToolError

from mcp.types import EmbeddedResource, ImageContent, TextContent, TextResourceContents

server = MCPServer("tools of a test")
count = 0
PIXEL = base64.b64encode(b"not really a picture").decode()


@server.tool()
def add(a: int, b: int = 2) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def bump() -> str:
    """How often this was called."""
    global count
    count += 1
    return str(count)


@server.tool()
def pid() -> str:
    """The server's process."""
    return str(os.getpid())


@server.tool()
def fail(why: str) -> str:
    """Fail."""
    raise ToolError(why)


@server.tool()
async def wait(seconds: float) -> str:
    """Wait without blocking the server."""
    import anyio

    await anyio.sleep(seconds)
    return "done"


@server.tool()
def hang() -> str:
    """Block the whole server."""
    time.sleep(30)
    return "done"


@server.tool()
def die() -> str:
    """End the server's process."""
    print("goodbye, cruel world", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def huge(size: int) -> str:
    """Say a lot."""
    return "x" * size


@server.tool()
def noise() -> str:
    """Write what is not the protocol to the standard output."""
    os.write(1, b"\x00\xff this is no JSON\n{]\n")
    return "quiet again"


@server.tool()
def picture():
    """A picture and what it shows."""
    return [
        TextContent(type="text", text="a dot"),
        ImageContent(type="image", data=PIXEL, **({"mimeType": "image/png"})),
        EmbeddedResource(
            type="resource",
            resource=TextResourceContents(uri="memo://1", text="a memo", **({"mimeType": "text/plain"})),
        ),
    ]


@server.tool()
def nothing() -> None:
    """Say nothing."""


if __name__ == "__main__":
    mode = sys.argv[1] if len(sys.argv) > 1 else "stdio"
    if mode == "stdio":
        server.run("stdio")
    elif mode == "http":
        import uvicorn

        app = server.streamable_http_app()
        uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="error")
