"""`POST /v1/generate`: token ids in; token ids, log-probabilities and policy versions out. Training uses it.

Nothing is tokenized, rendered or parsed. One request carries a whole group (`n`), whose prompt is computed once. With
`stream` each token is a server-sent event, and the whole answer is the last one. A request without `stream` that was
sent with a `request_id` can be ended by that name (`POST /v1/generate/abort`): its answer then comes at once, with what
it has.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mettle.inference.bodies import AbortBody, GenerateBody
from mettle.inference.chat import finite
from mettle.inference.engine.protocol import Choice, Generation, GenerationRequest, TokenEvent, TokenLogprob
from mettle.inference.service import service_of
from mettle.records.experts import wire_experts
from mettle.web.app import WebApp
from mettle.web.bodies import read_model
from mettle.web.problems import HttpError, json_response
from mettle.web.streams import StreamedAnswer, sse


async def generate(request: Request) -> Response:
    """Answer with all choices when the last of them has ended, or token by token."""
    service = service_of(request)
    body = await read_model(request, GenerateBody)
    chosen = service.find_model(body.model)
    wanted = GenerationRequest(
        request_id=service.new_id(),
        prompt_ids=body.prompt_ids,
        params=body.params(body.max_tokens),
        n=body.n or 1,
        prompt_logprobs=bool(body.prompt_logprobs),
        top_logprobs=body.top_logprobs or 0,
        has_token_events=bool(body.stream),
        seeds=tuple(body.seeds or ()),
        adapter=chosen.adapter,
        adapter_version=chosen.version,
        may_lag=bool(body.may_lag),
    )
    if body.stream:
        items = service.stream(wanted, "prompt_ids")
        first = await anext(items)  # a request that is refused is so here
        return StreamedAnswer(_events(request.app, service.name_of(wanted), first, items))
    with service.known_as(body.request_id, wanted.request_id):
        return json_response(_answer(service.name_of(wanted), await service.generate(wanted, "prompt_ids")))


async def abort(request: Request) -> Response:
    """200 as soon as the engine knows; 404 when no request of that name runs."""
    service = service_of(request)
    body = await read_model(request, AbortBody)
    internal = service.aliases.get(body.request_id)
    if internal is None:
        raise HttpError(404, f"no request {body.request_id!r} runs here", param="request_id", code="unknown_request")
    service.engine.abort(internal)
    return json_response({"aborted": body.request_id})


async def _events(
    app: WebApp, model: str, first: TokenEvent | Generation, items: AsyncGenerator[TokenEvent | Generation]
) -> AsyncGenerator[bytes, None]:
    async with aclosing(items):  # closing them aborts the request of a client that went away
        try:
            yield sse(_event(model, first))
            async for item in items:
                yield sse(_event(model, item))
        except Exception as error:  # it came too late for a status
            yield sse(app.error_event(error))
        yield sse("[DONE]")


def _event(model: str, item: TokenEvent | Generation) -> dict[str, Any]:
    if isinstance(item, Generation):
        return _answer(model, item)
    return {
        "choice": item.choice,
        "token_id": item.token_id,
        "logprob": item.logprob,
        "version": item.version,
        "top_logprobs": _alternatives(item.top_logprobs),
        "finish_reason": item.finish_reason,
        "stop": item.stop,
    }


def _answer(model: str, generation: Generation) -> dict[str, Any]:
    answer = {
        "request_id": generation.request_id,
        "model": model,
        "prompt_tokens": generation.num_prompt_tokens,
        "choices": [_choice(choice) for choice in generation.choices],
        "prompt_logprobs": generation.prompt_logprobs,
    }
    if generation.prompt_top_logprobs is not None:
        answer["prompt_top_logprobs"] = [_alternatives(found) for found in generation.prompt_top_logprobs]
    return answer


def _choice(choice: Choice) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "index": choice.index,
        "token_ids": choice.token_ids,
        "logprobs": choice.logprobs,
        "versions": choice.versions,
        "finish_reason": choice.finish_reason,
        "stop": choice.stop,
    }
    if choice.experts:
        answer["experts"] = wire_experts(choice.experts)
    if choice.replica:
        answer["replica"] = choice.replica
    if choice.top_logprobs:
        answer["top_logprobs"] = [_alternatives(top) for top in choice.top_logprobs]
    return answer


def _alternatives(top: Sequence[TokenLogprob]) -> list[tuple[int, float]]:
    return [(other.token_id, finite(other.logprob)) for other in top]


ROUTES = [("POST", "/v1/generate", generate), ("POST", "/v1/generate/abort", abort)]
