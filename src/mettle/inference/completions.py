"""`POST /v1/completions`: text or token ids continued, with log-probabilities and, on request, the prompt's own (echo).

`max_tokens` 0 with `echo` and `logprobs` scores a text and samples nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from mettle.inference.api_errors import bad_request, json_response
from mettle.inference.chunks import ChunkWriter, stream
from mettle.inference.engine.protocol import Choice, Generation, GenerationRequest, TokenEvent
from mettle.inference.openai_fields import finite, token_fields, usage
from mettle.inference.request_body import MAX_TOP_LOGPROBS, Body, is_token_ids, read_body
from mettle.inference.service import SERVICE, Service
from mettle.inference.text import cut_at_stop

_DEFAULT_MAX_TOKENS = 16  # the OpenAI API's


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One generation for each prompt, all alike."""

    generations: tuple[GenerationRequest, ...]
    num_logprobs: int | None
    is_echo: bool
    has_token_ids: bool
    has_usage: bool
    is_stream: bool


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue one or several prompts."""
    service = request.app[SERVICE]
    body = await read_body(request)
    service.check_model(body.get("model"))
    wanted = read_completion(service, body)
    if wanted.is_stream:
        return await stream(
            request, service, wanted.generations[0], "prompt", lambda response: _TextWriter(service, wanted, response)
        )
    generations = await _generate_all(service, wanted)
    choices: list[dict[str, Any]] = []
    for asked, generation in zip(wanted.generations, generations, strict=True):
        choices += [_choice(service, wanted, asked, generation, choice) for choice in generation.choices]
    return json_response(
        {
            "id": f"cmpl-{generations[0].request_id}",
            "object": "text_completion",
            "created": int(service.clock()),
            "model": service.model_name,
            "choices": [{"index": index, **choice} for index, choice in enumerate(choices)],
            "usage": usage(sum(g.num_prompt_tokens for g in generations), generations),
        }
    )


def read_completion(service: Service, body: Body) -> CompletionRequest:
    """Check every field and tokenize the prompts.

    Raises: ApiError naming the field at fault.
    """
    num_logprobs = body.integer("logprobs", low=0, high=MAX_TOP_LOGPROBS)
    is_echo = body.boolean("echo")
    is_stream = body.boolean("stream")
    prompts = _read_prompts(service, body)
    if is_stream and (is_echo or len(prompts) > 1):
        raise bad_request("stream takes one prompt and no echo", "stream")
    params = body.sampling(body.integer("max_tokens", _DEFAULT_MAX_TOKENS, low=0))
    n = body.integer("n", low=1) or 1
    return CompletionRequest(
        tuple(
            GenerationRequest(
                request_id=service.new_id(),
                prompt_ids=prompt,
                params=params,
                n=n,
                prompt_logprobs=is_echo and num_logprobs is not None,
                top_logprobs=num_logprobs or 0,
                has_token_events=is_stream,
            )
            for prompt in prompts
        ),
        num_logprobs=num_logprobs,
        is_echo=is_echo,
        has_token_ids=body.boolean("return_token_ids"),
        has_usage=body.wants_usage(),
        is_stream=is_stream,
    )


def _read_prompts(service: Service, body: Body) -> list[list[int]]:
    value = body.get("prompt")
    if isinstance(value, str) or (is_token_ids(value) and value):
        value = [value]
    if not isinstance(value, list) or not value:
        raise bad_request("prompt must be a string, a list of token ids, or a list of either", "prompt")
    prompts: list[list[int]] = []
    for prompt in value:
        if isinstance(prompt, str):
            prompts.append(service.renderer.encode(prompt, add_special_tokens=True))
        elif is_token_ids(prompt):
            prompts.append(prompt)
        else:
            raise bad_request("prompt must hold strings or lists of token ids", "prompt")
    return prompts


async def _generate_all(service: Service, wanted: CompletionRequest) -> list[Generation]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(service.generate(asked, "prompt")) for asked in wanted.generations]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the prompts are one request, and it has one answer
    return [task.result() for task in tasks]


def _choice(
    service: Service, wanted: CompletionRequest, asked: GenerationRequest, generation: Generation, choice: Choice
) -> dict[str, Any]:
    text = cut_at_stop(service.renderer.visible_text(choice.token_ids), choice.stop)
    if wanted.is_echo:
        text = service.renderer.decode(asked.prompt_ids) + text
    answer: dict[str, Any] = {"text": text, "logprobs": None, "finish_reason": choice.finish_reason}
    if wanted.num_logprobs is not None:
        answer["logprobs"] = _logprobs(service, wanted, asked, generation, choice)
    if wanted.has_token_ids:
        answer |= {"prompt_token_ids": list(asked.prompt_ids), **token_fields(choice)}
    return answer


def _logprobs(
    service: Service, wanted: CompletionRequest, asked: GenerationRequest, generation: Generation, choice: Choice
) -> dict[str, Any]:
    ids, values = list(choice.token_ids), list[float | None](choice.logprobs)
    alternatives: list[dict[str, float] | None] = []
    if wanted.is_echo:
        ids = [*asked.prompt_ids, *ids]
        values = [*(generation.prompt_logprobs or []), *values]
        alternatives = [None] * len(asked.prompt_ids)
    for position, token_id in enumerate(choice.token_ids):
        top = choice.top_logprobs[position] if position < len(choice.top_logprobs) else []
        found = {service.renderer.token_text(other.token_id): finite(other.logprob) for other in top}
        found.setdefault(service.renderer.token_text(token_id), choice.logprobs[position])
        alternatives.append(found)
    texts = [service.renderer.token_text(token_id) for token_id in ids]
    return {
        "tokens": texts,
        "token_logprobs": values,
        "top_logprobs": alternatives if wanted.num_logprobs else None,
        "text_offset": _offsets(texts),
    }


def _offsets(texts: Sequence[str]) -> list[int]:
    offsets, position = [], 0
    for text in texts:
        offsets.append(position)
        position += len(text)
    return offsets


class _TextWriter(ChunkWriter):
    """Chunks of one prompt's choices: the text of each token, and how it ended."""

    ID_PREFIX = "cmpl"
    OBJECT = "text_completion"

    def __init__(self, service: Service, wanted: CompletionRequest, response: web.StreamResponse) -> None:
        super().__init__(service, wanted.generations[0], response, has_usage=wanted.has_usage)
        self._wanted = wanted

    async def write_token(self, event: TokenEvent) -> None:
        """The text of a token, once it is whole."""
        if event.token_id is not None:
            text = self.texts[event.choice].add(event.token_id)
            more: dict[str, Any] = {"logprobs": self._logprobs(event)}
            if self._wanted.has_token_ids:
                more |= {"token_ids": [event.token_id], "versions": [event.version]}
            if text or self._wanted.num_logprobs is not None or self._wanted.has_token_ids:
                await self.send([{"index": event.choice, "text": text, "finish_reason": None, **more}])

    def _logprobs(self, event: TokenEvent) -> dict[str, Any] | None:
        if self._wanted.num_logprobs is None or event.token_id is None:
            return None
        alone = Choice(event.choice, [event.token_id], [event.logprob], [event.version], [event.top_logprobs])
        return _logprobs(self.service, self._wanted, self.asked, Generation("", 0, ()), alone)

    async def write_end(self, index: int, reason: str, stop: str | None) -> None:
        """What was held back, and the reason."""
        text = self.texts[index].finish(stop)
        await self.send([{"index": index, "text": text, "logprobs": None, "finish_reason": reason}])


ROUTES = [web.post("/v1/completions", completions)]
