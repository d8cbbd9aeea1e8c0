"""One connection to one MCP server, by the protocol's own library.

Parts: `ToolServerConnection`; `ToolFailed`. The library ties a session to the task that opened it, so a connection has
one task that opens it, waits, and closes it; calls come from any task of the same loop. Invariants: the end of that
task, by `close` or by the end of the loop, ends the server's process; a server that died or hangs is an `InfraError`,
what a tool says went wrong is a `ToolFailed`; each wait has a limit.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TextIO

from mettle.envs.guests import imported
from mettle.errors import InfraError, UserError
from mettle_mcp.servers import MCPServerConfig

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
PING_TIMEOUT_S = 3.0
CONNECTION_CLOSED = -32000
MAX_PAGES = 100
MAX_STDERR_CHARS = 400


class ToolFailed(Exception):
    """A tool or its server refused a call; the connection is well."""


class ToolServerConnection:
    """A session with the server of `config`, open between `open` and `close`."""

    def __init__(self, config: MCPServerConfig, *, connect_timeout_s: float, call_timeout_s: float | None) -> None:
        self.config = config
        self.tools: list[dict[str, Any]] = []
        self._connect_timeout_s = connect_timeout_s
        self._call_timeout_s = call_timeout_s
        self._session: Any = None
        self._owner: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._stderr: TextIO | None = None

    @property
    def is_open(self) -> bool:
        """Whether calls can be made."""
        return self._session is not None

    async def open(self) -> None:
        """Start or reach the server and list its tools.

        Raises: InfraError when that fails, with the end of what the server wrote to its standard error.
        """
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._own(ready), name=f"mcp {self.config.name}")
        try:
            await asyncio.shield(ready)
        except BaseException:
            ready.cancel()
            await self.close()
            raise

    async def call(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """The result of a tool as the protocol writes it (`content`, `structuredContent`).

        Raises: ToolFailed when the tool or the server refused, or the tool took too long; InfraError when the server
        is gone or answers nothing any more.
        """
        session = self._session
        if session is None:
            raise self._gone("is gone")
        try:
            async with asyncio.timeout(self._call_timeout_s) as limit:
                result = await session.call_tool(tool, arguments)
        except TimeoutError as error:
            if not limit.expired():
                raise self._gone(f"failed: {error}") from error
            await self._check_alive(session)
            raise ToolFailed(f"{tool} took longer than {self._call_timeout_s} s") from error
        except Exception as error:
            raise self._judged(error) from error
        written: dict[str, Any] = result.model_dump(by_alias=True, mode="json", exclude_none=True)
        if written.get("isError"):
            raise ToolFailed(_text_of(written) or f"{tool} failed and does not say why")
        return written

    async def close(self) -> None:
        """End the session and the server's process."""
        owner, self._session = self._owner, None
        self._stop.set()
        if owner is None or owner is asyncio.current_task():
            return
        _, pending = await asyncio.wait([owner], timeout=CLOSE_TIMEOUT_S)
        if pending:
            owner.cancel()
            await asyncio.wait([owner], timeout=CLOSE_TIMEOUT_S)

    # The owner's task

    async def _own(self, ready: asyncio.Future[None]) -> None:
        try:
            with tempfile.TemporaryFile("w+", errors="replace") as self._stderr:
                await self._hold(ready)
        except (UserError, asyncio.CancelledError) as error:
            _fail(ready, error)
        except Exception as error:
            _fail(ready, self._gone(f"could not be used: {_root(error)}") if not ready.done() else error)
            logger.info("an MCP session ended", extra={"server": self.config.name, "error": str(_root(error))})
        finally:
            self._session = None
            _fail(ready, self._gone("closed the connection"))

    async def _hold(self, ready: asyncio.Future[None]) -> None:
        mcp = imported("mcp", adapter="mcp", needed_by="MCPEnv")
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._connect_timeout_s) as limit:
                    streams = await stack.enter_async_context(self._transport())
                    session = await stack.enter_async_context(mcp.ClientSession(streams[0], streams[1]))
                    await session.initialize()
                    self.tools = await _all_tools(session)
            except TimeoutError as error:
                what = f"said nothing for {self._connect_timeout_s} s" if limit.expired() else f"failed: {error}"
                _fail(ready, self._gone(what))
                return
            except Exception as error:
                _fail(ready, self._gone(f"could not be used: {_root(error)}"))
                return
            self._session = session
            if not ready.done():
                ready.set_result(None)
            await self._until_stopped()
            self._session = None

    async def _until_stopped(self) -> None:
        """Wait for `close`. The end of the loop comes as a cancellation, and closes in the same way."""
        try:
            await self._stop.wait()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None, "a coroutine runs in a task"
            task.uncancel()

    @asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        config = self.config
        if config.command:
            stdio = imported("mcp.client.stdio", adapter="mcp", needed_by="MCPEnv")
            server = stdio.StdioServerParameters(
                command=config.command,
                args=config.args or [],
                env=config.env,
                cwd=config.cwd,
                encoding_error_handler="replace",  # bytes that are no text are one bad line, not the end
            )
            async with stdio.stdio_client(server, errlog=self._stderr) as streams:
                yield streams
            return
        http = imported("mcp.client.streamable_http", adapter="mcp", needed_by="MCPEnv")
        if not hasattr(http, "streamable_http_client"):  # before 1.24
            async with http.streamablehttp_client(config.url, headers=config.headers) as streams:
                yield streams
            return
        make = imported("mcp.shared._httpx_utils", adapter="mcp", needed_by="MCPEnv").create_mcp_http_client
        async with (
            make(headers=config.headers) as client,
            http.streamable_http_client(config.url, http_client=client) as streams,
        ):
            yield streams

    # What went wrong

    async def _check_alive(self, session: Any) -> None:
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                await session.send_ping()
        except Exception as error:
            self._session = None
            self._stop.set()
            raise self._gone("answers nothing any more") from error

    def _judged(self, error: Exception) -> Exception:
        """A refusal of the server as it is, anything else as the end of the connection."""
        code = getattr(getattr(error, "error", error), "code", None)
        if isinstance(code, int) and code != CONNECTION_CLOSED and self._session is not None:
            return ToolFailed(str(error))
        if isinstance(error, RuntimeError | ValueError) and self._session is not None:
            return ToolFailed(str(error))  # the result does not fit the tool's own schema
        self._session = None
        self._stop.set()
        return self._gone(f"died during a call: {_root(error)}")

    def _gone(self, what: str) -> InfraError:
        where = " ".join((self.config.url or " ".join([self.config.command, *(self.config.args or [])])).split())[:200]
        said = self._last_words()
        return InfraError(f"MCP server {self.config.name!r} ({where}) {what}" + (f"; it wrote: {said}" if said else ""))

    def _last_words(self) -> str:
        if self._stderr is None or self._stderr.closed:
            return ""
        self._stderr.flush()
        self._stderr.seek(0)
        return " ".join(self._stderr.read()[-MAX_STDERR_CHARS:].split())


async def _all_tools(session: Any) -> list[dict[str, Any]]:
    types = imported("mcp.types", adapter="mcp", needed_by="MCPEnv")
    takes_params = "params" in inspect.signature(session.list_tools).parameters
    tools: list[dict[str, Any]] = []
    cursor: str | None = None
    for _ in range(MAX_PAGES):
        if cursor is None:
            page = await session.list_tools()
        elif takes_params:
            page = await session.list_tools(params=types.PaginatedRequestParams(cursor=cursor))
        else:
            page = await session.list_tools(cursor=cursor)
        written = page.model_dump(by_alias=True, mode="json", exclude_none=True)
        tools += written["tools"]
        cursor = written.get("nextCursor")
        if not cursor:
            break
    return tools


def _fail(ready: asyncio.Future[None], error: BaseException) -> None:
    if ready.done():
        return
    if isinstance(error, asyncio.CancelledError):
        ready.cancel()
    else:
        ready.set_exception(error)


def _text_of(result: dict[str, Any]) -> str:
    return "\n".join(str(part.get("text", "")) for part in result.get("content") or []).strip()


def _root(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return error
