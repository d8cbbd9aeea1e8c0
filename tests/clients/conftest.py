"""An endpoint on the loopback that answers as it is told, and a renderer over bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

Answer = Any


@dataclass
class Endpoint:
    """Answers request i with `answers[i]` (the last one from then on); keeps what it was sent."""

    answers: list[Answer] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.text()
        self.requests.append(json.loads(body) if body else {})
        self.headers.append(dict(request.headers))
        answer = self.answers[min(len(self.requests), len(self.answers)) - 1]
        if callable(answer):
            answer = answer(self.requests[-1])
        if asyncio.iscoroutine(answer):
            answer = await answer
        if answer == "hang up":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if answer == "half":
            response = web.StreamResponse(headers={"Content-Length": "1000"})
            await response.prepare(request)
            await response.write(b'{"choices": [')
            assert request.transport is not None
            request.transport.close()
            return response
        if isinstance(answer, tuple):
            status, text, *headers = answer
            return web.Response(status=status, text=text, headers=headers[0] if headers else None)
        return web.json_response(answer)


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    made = Endpoint()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    made.url = f"http://127.0.0.1:{port}/v1"
    yield made
    await runner.cleanup()


class ByteRenderer:
    """One id per byte; a role is one id from 256 on, and 300 ends a turn."""

    ROLES = {"system": 258, "user": 259, "assistant": 260, "tool": 261}  # noqa: RUF012

    def __init__(self, *, rewrites_history: bool = False) -> None:
        self.rewrites_history = rewrites_history

    def _message(self, message: Any) -> list[int]:
        return [self.ROLES[message["role"]], *(message["content"] or "").encode(), 300]

    def render(self, messages: Any, tools: Any = None, *, add_generation_prompt: bool = True) -> list[int]:
        ids = [i for message in messages for i in self._message(message)]
        return [*ids, 260] if add_generation_prompt else ids

    def extend(self, context_ids: Any, context_messages: Any, messages: Any, tools: Any = None) -> list[int] | None:
        if self.rewrites_history:
            return None
        closing = [] if context_ids[-1] == 300 else [300]
        return [*context_ids, *closing, *self.render(messages[len(context_messages) :], tools)]

    def parse(self, completion_ids: Any, tools: Any = None) -> Any:
        text = bytes(i for i in completion_ids if i < 256).decode("utf-8", "replace")
        return SimpleNamespace(content=text, reasoning_content=None, tool_calls=None)


@pytest.fixture
def renderer() -> ByteRenderer:
    return ByteRenderer()


@pytest.fixture
def rewriting_renderer() -> ByteRenderer:
    return ByteRenderer(rewrites_history=True)


@pytest.fixture
def generate_answer() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Choice i says "ci" followed by the end id, sampled by version 3."""

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for index in range(request["n"]):
            ids = [ord("c"), ord("0") + index, 300]
            choice = {"index": index, "token_ids": ids, "logprobs": [-0.5] * 3, "versions": [3] * 3}
            choices.append({**choice, "finish_reason": "stop"})
        return {"request_id": "r", "model": "m", "prompt_tokens": len(request["prompt_ids"]), "choices": choices}

    return answer


@pytest.fixture
def no_wait() -> Callable[[float], Awaitable[None]]:
    async def sleep(_: float) -> None:
        return None

    return sleep
