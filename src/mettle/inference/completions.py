"""`POST /v1/completions`: text or token ids continued, with log-probabilities and, on request, the prompt's own (echo).

`max_tokens` 0 with `echo` and `logprobs` scores a text and samples nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mettle.clients.dialects import completions as dialect
from mettle.inference.bodies import CompletionBody, StreamOptions
from mettle.inference.chat import finite
from mettle.inference.chunks import Choices, ChunkMaker, stream, usage
from mettle.inference.engine.protocol import Choice, Generation, GenerationRequest, TokenEvent
from mettle.inference.service import ModelChoice, ModelService, service_of
from mettle.inference.text import cut_at_stop
from mettle.web.bodies import read_model
from mettle.web.problems import HttpError, json_response

_DEFAULT_MAX_TOKENS = 16  # the OpenAI API's


async def completions(request: Request) -> Response:
    """Continue one or several prompts."""
    service = service_of(request)
    body = await read_model(request, CompletionBody)
    chosen = service.find_model(body.model)
    wanted = tokenized(service, body, chosen)
    if body.stream:
        return await stream(request, _TextChunks(service, wanted[0], body), "prompt")
    generations = await _generate_all(service, wanted)
    choices: list[dict[str, Any]] = []
    for asked, generation in zip(wanted, generations, strict=True):
        choices += [_choice(service, body, asked, generation, choice) for choice in generation.choices]
    return json_response(
        dialect.completion(
            f"cmpl-{generations[0].request_id}",
            int(service.clock()),
            service.name_of(wanted[0]),
            [{"index": index, **choice} for index, choice in enumerate(choices)],
            usage(*generations),
        )
    )


def tokenized(service: ModelService, body: CompletionBody, chosen: ModelChoice) -> list[GenerationRequest]:
    """One generation for each prompt, all alike. Raises: HttpError."""
    if body.stream and (body.echo or len(body.prompt) > 1):
        raise HttpError(400, "stream takes one prompt and no echo", param="stream")
    params = body.params(_DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens)
    encode = service.renderer.encode
    return [
        GenerationRequest(
            request_id=service.new_id(),
            prompt_ids=encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt,
            params=params,
            n=body.n or 1,
            prompt_logprobs=bool(body.echo) and body.logprobs is not None,
            top_logprobs=body.logprobs or 0,
            has_token_events=bool(body.stream),
            adapter=chosen.adapter,
            adapter_version=chosen.version,
        )
        for prompt in body.prompt
    ]


async def _generate_all(service: ModelService, wanted: list[GenerationRequest]) -> list[Generation]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(service.generate(asked, "prompt")) for asked in wanted]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the prompts are one request, and it has one answer
    return [task.result() for task in tasks]


def _choice(
    service: ModelService, body: CompletionBody, asked: GenerationRequest, generation: Generation, choice: Choice
) -> dict[str, Any]:
    text = cut_at_stop(service.renderer.visible_text(choice.token_ids), choice.stop)
    if body.echo:
        text = service.renderer.decode(asked.prompt_ids) + text
    answer: dict[str, Any] = {"text": text, "logprobs": None, "finish_reason": choice.finish_reason}
    if body.logprobs is not None:
        answer["logprobs"] = _logprobs(service, body, asked, generation, choice)
    if body.return_token_ids:
        answer |= {
            "prompt_token_ids": list(asked.prompt_ids),
            "token_ids": choice.token_ids,
            "versions": choice.versions,
        }
        if choice.replica:
            answer["replica"] = choice.replica
    return answer


def _logprobs(
    service: ModelService, body: CompletionBody, asked: GenerationRequest, generation: Generation, choice: Choice
) -> dict[str, Any]:
    ids, values = list(choice.token_ids), list[float | None](choice.logprobs)
    tops = choice.top_logprobs or [[] for _ in ids]
    alternatives: list[dict[str, float] | None] = []
    if body.echo:
        ids = [*asked.prompt_ids, *ids]
        values = [*(generation.prompt_logprobs or []), *values]
        tops = [*(generation.prompt_top_logprobs or [[] for _ in asked.prompt_ids]), *tops]
    name = token_name if body.return_tokens_as_token_ids else service.renderer.token_text
    for position, token_id in enumerate(ids):
        if (own := values[position]) is None:  # the first token of an echoed prompt
            alternatives.append(None)
            continue
        found = {name(other.token_id): finite(other.logprob) for other in tops[position]}
        found.setdefault(name(token_id), own)
        alternatives.append(found)
    texts = [service.renderer.token_text(token_id) for token_id in ids]
    return {
        "tokens": [name(token_id) for token_id in ids],
        "token_logprobs": values,
        "top_logprobs": alternatives if body.logprobs else None,
        "text_offset": _offsets(texts),
    }


def token_name(token_id: int) -> str:
    """A token by its id, as vLLM writes it."""
    return f"token_id:{token_id}"


def _offsets(texts: Sequence[str]) -> list[int]:
    offsets, position = [], 0
    for text in texts:
        offsets.append(position)
        position += len(text)
    return offsets


class _TextChunks(ChunkMaker):
    """Chunks of one prompt's choices: the text of each token, and how it ended."""

    def __init__(self, service: ModelService, asked: GenerationRequest, body: CompletionBody) -> None:
        super().__init__(service, asked, body.stream_options or StreamOptions())
        self._body = body

    def chunk(self, choices: Choices, used: Mapping[str, int] | None = None) -> dict[str, Any]:
        answer_id = f"cmpl-{self.asked.request_id}"
        return dialect.completion(answer_id, self.created, self.service.name_of(self.asked), choices, used)

    def of_token(self, event: TokenEvent) -> Iterator[Choices]:
        """The text of a token, once it is whole."""
        if event.token_id is None:
            return
        text = self.texts[event.choice].add(event.token_id)
        more: dict[str, Any] = {"logprobs": self._logprobs(event)}
        if self._body.return_token_ids:
            more |= {"token_ids": [event.token_id], "versions": [event.version]}
        if text or self._body.logprobs is not None or self._body.return_token_ids:
            yield [{"index": event.choice, "text": text, "finish_reason": None, **more}]

    def _logprobs(self, event: TokenEvent) -> dict[str, Any] | None:
        if self._body.logprobs is None or event.token_id is None:
            return None
        alone = Choice(event.choice, [event.token_id], [event.logprob], [event.version], [event.top_logprobs])
        return _logprobs(self.service, self._body, self.asked, Generation("", 0, ()), alone)

    def of_end(self, index: int, reason: str, stop: str | None) -> Iterator[Choices]:
        """What was held back, and the reason."""
        text = self.texts[index].finish(stop)
        yield [{"index": index, "text": text, "logprobs": None, "finish_reason": reason}]


ROUTES = [("POST", "/v1/completions", completions)]
