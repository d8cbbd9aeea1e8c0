"""A generation as OpenAI-shaped chunks over server-sent events, from the first token to `[DONE]`.

Parts: `stream` (what a streaming route does), `ChunkMaker` (what a kind of chunk fills in). Invariants: a refusal
comes before the first byte, while a status can still say it; every choice ends once; a client that goes away ends its
request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import Request

from mettle.clients.dialects.chat import usage_fields
from mettle.inference.bodies import StreamOptions
from mettle.inference.engine.protocol import Generation, GenerationRequest, TokenEvent
from mettle.inference.service import ModelService
from mettle.inference.text import GrowingText
from mettle.web.app import WebApp
from mettle.web.streams import StreamedAnswer, sse

Choices = list[dict[str, Any]]


async def stream(request: Request, maker: ChunkMaker, prompt_field: str) -> StreamedAnswer:
    """Answer what `maker` was asked, chunk by chunk; a complaint about the prompt names `prompt_field`."""
    items = maker.service.stream(maker.asked, prompt_field)
    first = await anext(items)  # a request that is refused is so here
    return StreamedAnswer(_pieces(request.app, maker, first, items))


async def _pieces(
    app: WebApp, maker: ChunkMaker, first: TokenEvent | Generation, items: AsyncGenerator[TokenEvent | Generation]
) -> AsyncGenerator[bytes, None]:
    async with aclosing(items):  # closing them aborts the request of a client that went away
        try:
            for chunk in (*maker.begin(), *maker.take(first)):
                yield sse(chunk)
            async for item in items:
                # One write for what one token adds.
                added = b"".join(map(sse, maker.take(item)))
                if added:
                    yield added
        except Exception as error:  # it came too late for a status
            yield sse(app.error_event(error))
        yield sse("[DONE]")


class ChunkMaker(ABC):
    """Makes the chunks of one request, whose choices take turns."""

    def __init__(self, service: ModelService, asked: GenerationRequest, wanted: StreamOptions) -> None:
        self.service, self.asked = service, asked
        self.texts = [GrowingText(service.renderer, asked.params.stop) for _ in range(asked.n)]
        self.created = int(service.clock())
        self._wanted = wanted
        self._num_sampled = 0
        self._has_ended = [False] * asked.n

    def begin(self) -> Iterator[Mapping[str, Any]]:
        """Chunks that come before the first token; none unless a kind has some."""
        yield from ()

    def take(self, item: TokenEvent | Generation) -> Iterator[Mapping[str, Any]]:
        """What an event adds; at the end, what is still missing and the usage."""
        if isinstance(item, TokenEvent):
            self._num_sampled += item.token_id is not None
            yield from map(self.piece, self.of_token(item))
            if item.finish_reason is not None:
                yield from self._end(item.choice, item.finish_reason, item.stop)
            return
        for choice in item.choices:
            if not self._has_ended[choice.index]:
                yield from self._end(choice.index, str(choice.finish_reason), choice.stop)
        if self._wanted.include_usage:
            yield self.chunk([], usage(item))

    @abstractmethod
    def of_token(self, event: TokenEvent) -> Iterator[Choices]:
        """The choices of a token's chunk; none for an end without a token (`event.token_id` is None)."""

    @abstractmethod
    def of_end(self, index: int, reason: str, stop: str | None) -> Iterator[Choices]:
        """The last chunks of a choice."""

    @abstractmethod
    def chunk(self, choices: Choices, used: Mapping[str, int] | None = None) -> dict[str, Any]:
        """A chunk with its head."""

    def piece(self, choices: Choices) -> dict[str, Any]:
        """A chunk of the answer; with the tokens used so far where that is wanted."""
        if not self._wanted.continuous_usage_stats:
            return self.chunk(choices)
        return self.chunk(choices, usage_fields(len(self.asked.prompt_ids), self._num_sampled))

    def _end(self, index: int, reason: str, stop: str | None) -> Iterator[Mapping[str, Any]]:
        self._has_ended[index] = True
        yield from map(self.piece, self.of_end(index, reason, stop))


def usage(*generations: Generation) -> dict[str, int]:
    """Token counts; a prompt counts once however many choices it has."""
    num_sampled = sum(len(choice.token_ids) for g in generations for choice in g.choices)
    return usage_fields(sum(g.num_prompt_tokens for g in generations), num_sampled)
