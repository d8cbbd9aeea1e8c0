"""`POST /v1/generate`: token ids in; token ids, log-probabilities and policy versions out. Training uses it.

Nothing is tokenized, rendered or parsed. One request carries a whole group (`n`), whose prompt is computed once.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from mettle.inference.api_errors import json_response
from mettle.inference.engine.protocol import Choice, GenerationRequest
from mettle.inference.request_body import read_body
from mettle.inference.service import SERVICE


async def generate(request: web.Request) -> web.Response:
    """Answer with all choices when the last of them has ended."""
    service = request.app[SERVICE]
    body = await read_body(request)
    service.check_model(body.get("model"))
    wanted = GenerationRequest(
        request_id=service.new_id(),
        prompt_ids=body.token_ids("prompt_ids"),
        params=body.sampling(body.integer("max_tokens", low=0)),
        n=body.integer("n", low=1) or 1,
        prompt_logprobs=body.boolean("prompt_logprobs"),
    )
    generation = await service.generate(wanted, "prompt_ids")
    return json_response(
        {
            "request_id": generation.request_id,
            "model": service.model_name,
            "prompt_tokens": generation.num_prompt_tokens,
            "choices": [_choice(choice) for choice in generation.choices],
            "prompt_logprobs": generation.prompt_logprobs,
        }
    )


def _choice(choice: Choice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "token_ids": choice.token_ids,
        "logprobs": choice.logprobs,
        "versions": choice.versions,
        "finish_reason": choice.finish_reason,
    }


ROUTES = [web.post("/v1/generate", generate)]
