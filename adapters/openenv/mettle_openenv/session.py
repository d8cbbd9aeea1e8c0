"""One episode on an OpenEnv server: a WebSocket on which reset, step and tool calls are asked and answered in turn.

Parts: `Session`, `StepOutcome`, `Refused`, `ServerFull`. Messages are JSON with `type` and `data`: `reset`, `step` and
`mcp` are answered by `observation`, `mcp` or `error`. Invariants: a question has one answer in time, or the session is
over; a server that is gone, hangs or talks nonsense is an `InfraError`, an environment that raised is an
`EnvironmentFault`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from mettle.errors import EnvironmentFault, InfraError

MAX_MESSAGE_BYTES = 100 * 2**20
CLOSE_TIMEOUT_S = 2.0
SHOWN_CHARS = 200


class ServerFull(InfraError):
    """All the episodes that the server allows at a time are being played."""


class Refused(Exception):
    """The server could not read an action; the episode goes on."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What came of a reset or a step."""

    observation: Any
    reward: float | None
    is_done: bool


class Session:
    """An episode on the server at `base_url`, between `open` and `close`."""

    def __init__(self, base_url: str, timeout_s: float) -> None:
        self._url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._num_calls = 0

    async def open(self) -> None:
        """Connect.

        Raises: InfraError when there is no such server.
        """
        self._http = aiohttp.ClientSession(trust_env=False)
        address = "ws" + self._url.removeprefix("http") + "/ws"
        try:
            async with asyncio.timeout(self._timeout_s):
                self._socket = await self._http.ws_connect(address, max_msg_size=MAX_MESSAGE_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            await self.close()
            raise InfraError(f"no OpenEnv server at {address}: {type(error).__name__}: {error}") from error

    async def reset(self, **options: Any) -> StepOutcome:
        """Begin an episode."""
        return _outcome(await self._ask("reset", options, "observation"))

    async def step(self, action: Mapping[str, Any]) -> StepOutcome:
        """Carry out an action.

        Raises: Refused when the action does not fit the environment's schema.
        """
        return _outcome(await self._ask("step", action, "observation"))

    async def list_tools(self) -> list[dict[str, Any]]:
        """The tools of an environment that has tools."""
        self._num_calls += 1
        call = {"jsonrpc": "2.0", "method": "tools/list", "params": {}, "id": self._num_calls}
        answer = await self._ask("mcp", call, "mcp")
        result = answer.get("result")
        tools = result.get("tools") if isinstance(result, Mapping) else None
        if not isinstance(tools, list):
            raise EnvironmentFault(f"the OpenEnv server lists no tools: {json.dumps(answer)[:SHOWN_CHARS]}")
        return tools

    async def close(self) -> None:
        """End the episode. What the server makes of that does not matter any more."""
        socket, http = self._socket, self._http
        self._socket = self._http = None
        try:
            if socket is not None and not socket.closed:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await socket.send_str(json.dumps({"type": "close"}))
                    await socket.close()
        except (aiohttp.ClientError, OSError, TimeoutError):
            pass
        finally:
            if http is not None:
                await http.close()

    async def _ask(self, kind: str, data: Any, answer_kind: str) -> dict[str, Any]:
        if self._socket is None or self._socket.closed:
            raise InfraError(f"the OpenEnv server at {self._url} has ended the episode")
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                await self._socket.send_str(json.dumps({"type": kind, "data": data}))
                received = await self._socket.receive()
        except TimeoutError as error:
            await self.close()
            what = f"said nothing to a {kind} for {self._timeout_s} s" if limit.expired() else "timed out"
            raise InfraError(f"the OpenEnv server at {self._url} {what}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise InfraError(f"the OpenEnv server at {self._url} is gone: {error}") from error
        if received.type is not aiohttp.WSMsgType.TEXT:
            raise InfraError(f"the OpenEnv server at {self._url} ended the connection during a {kind}")
        return self._read(kind, received.data, answer_kind)

    def _read(self, kind: str, text: str, answer_kind: str) -> dict[str, Any]:
        try:
            answer = json.loads(text)
        except ValueError as error:
            raise InfraError(f"the OpenEnv server answered a {kind} with no JSON: {text[:SHOWN_CHARS]!r}") from error
        data = answer.get("data") if isinstance(answer, dict) else None
        if isinstance(data, dict) and answer.get("type") == answer_kind:
            return data
        if isinstance(data, dict) and answer.get("type") == "error":
            raise _error(kind, data)
        raise InfraError(f"the OpenEnv server answered a {kind} with {text[:SHOWN_CHARS]!r}")


def _error(kind: str, data: dict[str, Any]) -> Exception:
    code, message = data.get("code"), str(data.get("message", "no reason given"))
    if code == "CAPACITY_REACHED":
        return ServerFull(f"the OpenEnv server is full: {message}")
    if code in ("VALIDATION_ERROR", "INVALID_JSON"):
        wrong = "; ".join(
            f"{'.'.join(str(part) for part in error.get('loc', ()))}: {error.get('msg', '')}"
            for error in data.get("errors") or []
            if isinstance(error, dict)
        )
        return Refused(wrong or message) if kind == "step" else EnvironmentFault(f"{kind}: {wrong or message}")
    return EnvironmentFault(f"the OpenEnv environment failed in {kind} ({code}): {message}")


def _outcome(data: dict[str, Any]) -> StepOutcome:
    reward = data.get("reward")
    if reward is not None and not isinstance(reward, int | float):
        raise EnvironmentFault(f"the OpenEnv environment gave the reward {reward!r}, which is no number")
    return StepOutcome(
        data.get("observation"), None if reward is None else float(reward), bool(data.get("done", False))
    )
