"""A generation as OpenAI-shaped chunks over server-sent events, from the first token to `[DONE]`.

Parts: `stream` (what a streaming route does), `ChunkWriter` (what a kind of chunk fills in). Invariants: a refusal
comes before the first byte, while a status can still say it; every choice ends once; a client that goes away ends its
request.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from aiohttp import web

from mettle.inference.api_errors import as_api_error, error_body
from mettle.inference.engine.protocol import Generation, GenerationRequest, TokenEvent
from mettle.inference.openai_fields import usage
from mettle.inference.service import Service
from mettle.inference.text import GrowingText


async def stream(
    request: web.Request,
    service: Service,
    asked: GenerationRequest,
    prompt_field: str,
    make_writer: Callable[[web.StreamResponse], ChunkWriter],
) -> web.StreamResponse:
    """Answer `asked` chunk by chunk; a complaint about the prompt names `prompt_field`."""
    items = service.stream(asked, prompt_field)
    first = await anext(items)  # a request that is refused is so here
    response = await _open(request)
    writer = make_writer(response)
    try:
        await writer.begin()
        await writer.write(first)
        async for item in items:
            await writer.write(item)
    except ConnectionError:
        return response  # the client went away
    except Exception as error:
        await _close(response, error)
    else:
        await _close(response)
    finally:
        await items.aclose()  # which aborts the request of a client that went away
    return response


class ChunkWriter(ABC):
    """Writes the chunks of one request, whose choices take turns."""

    ID_PREFIX: ClassVar[str]
    OBJECT: ClassVar[str]

    def __init__(
        self, service: Service, asked: GenerationRequest, response: web.StreamResponse, *, has_usage: bool
    ) -> None:
        self.service, self.asked, self.response = service, asked, response
        self.texts = [GrowingText(service.renderer, asked.params.stop) for _ in range(asked.n)]
        self._has_usage = has_usage
        self._created = int(service.clock())
        self._has_ended = [False] * asked.n

    async def begin(self) -> None:
        """Chunks that come before the first token; none unless a kind has some."""
        return

    async def write(self, item: TokenEvent | Generation) -> None:
        """What an event adds; at the end, what is still missing and the usage."""
        if isinstance(item, TokenEvent):
            await self.write_token(item)
            if item.finish_reason is not None:
                await self._end(item.choice, item.finish_reason, item.stop)
            return
        for choice in item.choices:
            if not self._has_ended[choice.index]:
                await self._end(choice.index, str(choice.finish_reason), choice.stop)
        if self._has_usage:
            await self.send([], usage(item.num_prompt_tokens, [item]))

    @abstractmethod
    async def write_token(self, event: TokenEvent) -> None:
        """The chunk of one token, if it has something to say; `event.token_id` is None for an end without a token."""

    @abstractmethod
    async def write_end(self, index: int, reason: str, stop: str | None) -> None:
        """The last chunks of a choice."""

    async def send(self, choices: list[dict[str, Any]], used: dict[str, int] | None = None) -> None:
        """Send one chunk."""
        chunk: dict[str, Any] = {
            "id": f"{self.ID_PREFIX}-{self.asked.request_id}",
            "object": self.OBJECT,
            "created": self._created,
            "model": self.service.model_name,
            "choices": choices,
        }
        if used is not None:
            chunk["usage"] = used
        await _send(self.response, chunk)

    async def _end(self, index: int, reason: str, stop: str | None) -> None:
        self._has_ended[index] = True
        await self.write_end(index, reason, stop)


async def _open(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    return response


async def _send(response: web.StreamResponse, body: Mapping[str, Any]) -> None:
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False)
    await response.write(f"data: {text}\n\n".encode())


async def _close(response: web.StreamResponse, error: Exception | None = None) -> None:
    """End a stream; an error that came too late for a status is its last event."""
    if error is not None:
        await _send(response, error_body(as_api_error(error)))
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
