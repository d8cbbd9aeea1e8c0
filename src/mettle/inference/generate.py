"""`POST /v1/generate`: token ids in; token ids, log-probabilities and policy versions out. Training uses it.

Nothing is tokenized, rendered or parsed. One request carries a whole group (`n`), whose prompt is computed once.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mettle.inference.bodies import GenerateBody
from mettle.inference.engine.protocol import Choice, GenerationRequest
from mettle.inference.service import service_of
from mettle.web.bodies import read_model
from mettle.web.problems import json_response


async def generate(request: Request) -> Response:
    """Answer with all choices when the last of them has ended."""
    service = service_of(request)
    body = await read_model(request, GenerateBody)
    chosen = service.find_model(body.model)
    wanted = GenerationRequest(
        request_id=service.new_id(),
        prompt_ids=body.prompt_ids,
        params=body.params(body.max_tokens),
        n=body.n or 1,
        prompt_logprobs=bool(body.prompt_logprobs),
        seeds=tuple(body.seeds or ()),
        adapter=chosen.adapter,
        adapter_version=chosen.version,
    )
    generation = await service.generate(wanted, "prompt_ids")
    return json_response(
        {
            "request_id": generation.request_id,
            "model": service.name_of(wanted),
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


ROUTES = [("POST", "/v1/generate", generate)]
