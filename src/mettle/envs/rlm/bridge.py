"""How code in a sandbox calls functions of this process.

Parts: `FunctionBridge`, which listens inside the sandbox and answers here; `arguments_of`. A call is a line of JSON
with the rollout's secret, an answer is another. Invariants: who does not know the secret is hung up on; what a function
raises is told to the code that called it; every connection ends with the bridge.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import json
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

MAX_LINE_BYTES = 64 << 20

Answering = Callable[[str, list[Any], dict[str, Any], bool], Awaitable[Any]]


class FunctionBridge:
    """One rollout's bridge. `answering` is called with name, arguments, keywords, and whether they are bare text."""

    def __init__(self, answering: Answering) -> None:
        self.secret = secrets.token_hex(16)
        self._answering = answering
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def serve(self, listening: socket.socket) -> int:
        """Answer on a socket that listens; its port."""
        listening.setblocking(False)
        self._server = await asyncio.start_server(self._serve_one, sock=listening, limit=MAX_LINE_BYTES)
        port: int = listening.getsockname()[1]
        return port

    async def close(self) -> None:
        """Stop listening, and end the calls that are under way."""
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            answer = await self._answer(await reader.readline())
            if answer is not None:
                writer.write(json.dumps(answer, default=str).encode() + b"\n")
                await writer.drain()
        except (OSError, ValueError, asyncio.CancelledError):
            pass  # The code that called is gone, or the rollout is over.
        finally:
            self._open.discard(task)
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any] | None:
        try:
            request = json.loads(line)
            if not hmac.compare_digest(str(request["secret"]), self.secret):
                return None
            name, args, kwargs = str(request["name"]), list(request["args"]), dict(request["kwargs"])
        except (ValueError, KeyError, TypeError):
            return None
        try:
            return {"result": await self._answering(name, args, kwargs, bool(request.get("is_text")))}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}


def arguments_of(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, is_text: bool
) -> dict[str, Any]:
    """The arguments of a call by name. Words of a command line for parameters that are no text are read as JSON.

    Raises: TypeError where they do not fit the function.
    """
    signature = inspect.signature(function)
    bound = signature.bind(*args, **kwargs)
    if is_text:
        for name, value in bound.arguments.items():
            bound.arguments[name] = _read(value, signature.parameters[name].annotation)
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        named |= value if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return named


def _read(value: Any, annotation: Any) -> Any:
    if not isinstance(value, str) or annotation in (str, "str", inspect.Parameter.empty):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
